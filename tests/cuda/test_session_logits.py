"""A session of an export for CUDA chooses how many tokens have logits; skipped where ONNX Runtime has no GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from support.cuda.built import gpu

import quantmoe
from quantmoe.benchmarks.quality.evaluate import evaluate
from quantmoe.runtime.generate import Generator

pytestmark = [
    gpu,
    pytest.mark.skipif("CUDAExecutionProvider" not in ort.get_available_providers(), reason="no CUDA provider"),
]
DEMO = Path(__file__).parents[2] / "samples/demo_model"
IDS = np.array([[16, 1, 2, 3, 16, 1, 2]])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """exported(checkpoint, **options of export) -> folder."""

    @cache
    def make(checkpoint: str = "checkpoint", **options: object) -> Path:
        folder = tmp_path_factory.mktemp("exported") / "model"
        quantmoe.export(DEMO / checkpoint, folder, target="cuda", dtype="f16", **options)
        return folder

    return make


@pytest.mark.parametrize(("most", "fixed"), [(1, 1), (3, 3), (2**63 - 1, "all")])
def test_logits_are_those_of_a_fixed_number(exported, most, fixed):
    """Bytes are equal, as the LM head has as many rows: alone, and in rows that end with padding or begin with it."""
    ids = np.repeat(IDS, 3, 0)
    mask = np.ones_like(ids)
    mask[1, :3] = mask[2, 4:] = 0
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    alone, together = [], []
    for options in ({}, {"logits": fixed}):
        with Generator(exported(**options), device="cuda", cuda_graph=False, num_logits=most) as generator:
            alone.append(generator.step(IDS, generator.start())[0])
            together.append(generator.session.run(["logits"], feed | generator.start(3))[0])
    assert alone[0].shape[1] == min(most, 7)
    assert alone[0].tobytes() == alone[1].tobytes()
    if fixed == "all":
        rows = [np.clip(np.arange(last - 6, last + 1), 0, None) for last in (6, 6, 3)]
        together[1] = np.stack([y[i] for y, i in zip(together[1], rows, strict=True)])
    assert together[0].tobytes() == together[1].tobytes()


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("checkpoint", ["checkpoint", "hybrid"])
def test_one_export_verifies_drafts(exported, checkpoint, cuda_graph):
    """Tokens equal an export's with the logits of 5 tokens; without drafts they equal an export's with one token's."""
    window = {"state_window": 5} if checkpoint == "hybrid" else {}
    found = []
    for options, drafts in (({}, 4), ({"logits": 5}, 4), ({}, None), ({"logits": 1}, None)):
        given = {"speculate": "ngram", "drafts": drafts} if drafts else {}
        folder = exported(checkpoint, **window, **options)
        with Generator(folder, device="cuda", cuda_graph=cuda_graph, **given) as generator:
            made = generator.generate(IDS[0].tolist() * 3, 40)
            found.append(made.tokens)
            assert not drafts or made.speculation.drafted > 0
    assert found[0] == found[1]
    assert found[2] == found[3]


def test_memory_for_any_number_can_be_bound(exported):
    """Only with one_logit ONNX Runtime knows the size, 1; a decode step binds memory for a token and its drafts."""
    folder, sizes, number = exported(), [], ort.OrtValue.ortvalue_from_numpy(np.array([5]))
    for entry in ("0", "1"):
        options = ort.SessionOptions()
        options.add_session_config_entry("quantmoe.one_logit", entry)
        options.add_initializer("num_logits", number)
        options.register_custom_ops_library(quantmoe.ort_cuda_library_path())
        session = ort.InferenceSession(folder / "model.onnx", options, providers=["CUDAExecutionProvider"])
        sizes.append(session.get_outputs()[0].shape[1])
    assert sizes == ["logits_length", 1]
    past = {
        i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float16)
        for i in session.get_inputs()
        if i.name.startswith("past")
    }
    feed = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.arange(7)[None]}
    with pytest.raises(Exception, match=r"num_logits is 5, but the session entry quantmoe\.one_logit is 1"):
        session.run(["logits"], feed | past)


def test_evaluate_needs_no_other_export(exported):
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    one, every = (evaluate(exported(**options), text, windows=1) for options in ({}, {"logits": "all"}))
    assert one.figures == every.figures
    assert not [*exported().glob("evaluate.partial*")]
