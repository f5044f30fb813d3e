"""Rotary embeddings whose frequencies follow the length of the sequence, against transformers: longrope and dynamic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.architectures.test_architectures import SIZES, make_checkpoint
from onnx import load, numpy_helper
from support.harness.sweeps import every
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quantmoe.exporter.errors import CheckpointError, ModelError
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

#: tokens that have the short factors, and of a prompt that `dynamic` leaves as it is
SHORT = 12
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1 + 0.1 * i for i in range(8)],
    "long_factor": [1 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": SHORT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
BY_LAYER = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
#: kind -> model type and its fields
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phimoe", {"rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}}),
    "dynamic": ("qwen3_moe", {"rope_parameters": DYNAMIC, "max_position_embeddings": SHORT, "head_dim": 16}),
    "longrope in a node": ("qwen3_moe", {"rope_parameters": LONGROPE, "head_dim": 16}),
    "longrope of some layers": ("laguna", {"rope_parameters": BY_LAYER}),
    "longrope in pairs": ("ernie4_5_moe", {"rope_parameters": LONGROPE}),
    "dynamic in complex numbers": (
        "llama4_text",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": SHORT, "interleave_moe_layer_step": 1}
        | {"intermediate_size_mlp": 64, "num_experts_per_tok": 1, "attention_chunk_size": 64},
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """made(kind) -> the folder with the checkpoint and its export."""
    found: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in found:
            folder = found[kind] = tmp_path_factory.mktemp("long_rope")
            model_type, fields = KINDS[kind]
            make_checkpoint(folder / "checkpoint", model_type, **fields)
            options: dict[str, Any] = {"quantize": "none", "activations": "float", "logits": "all", "cache": "f32"}
            export(folder / "checkpoint", folder / "onnx", **options)
        return found[kind]

    return make


def torch_model(folder: Path) -> PreTrainedModel:
    """transformers' model; of phimoe with the long factors in long sequences, which transformers 5.24 leaves out."""
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    if model.config.model_type == "phimoe":
        rotary = model.model.rotary_emb

        def follow(module: Any, args: Any, kwargs: Any) -> None:
            length = int(kwargs["position_ids"].max()) + 1
            module.rope_init_fn = lambda config: ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)

        rotary.register_forward_pre_hook(follow, with_kwargs=True)
    return model


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(3, SIZES["vocab_size"], shape)


def far(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@pytest.mark.parametrize("kind", every(KINDS, 2))
def test_the_graph_follows_each_run_as_transformers_does(kind: str, made: Any) -> None:
    """A prompt within the limit and past it, token by token up to it and over it, with what the cache then has."""
    generator, ids = Generator(made(kind) / "onnx"), numbers(2, 20)
    for pieces in ([20], [8, 1, 1, 1, 1, 1, 1, 2], [15, 1, 3]):
        model = torch_model(made(kind))  # dynamic frequencies stay from one text to the next
        cache, past = DynamicCache(config=model.config), generator.start(2)
        for piece in np.split(ids[:, : sum(pieces)], np.cumsum(pieces)[:-1], axis=1):
            with torch.no_grad():
                want = model(torch.from_numpy(piece), cache=cache, use_cache=True).logits.numpy()
            found, past = generator.step(piece, past)
            assert far(found, want) < 2e-5


def test_the_factors_change_the_logits(made: Any) -> None:
    """What the test above would not see if both lengths had the same tables."""
    model, ids = torch_model(made("longrope")), torch.from_numpy(numbers(1, 20))
    with torch.no_grad():
        long, short = model(ids).logits[:, :SHORT], model(ids[:, :SHORT]).logits
    assert far(long.numpy(), short.numpy()) > 0.01


@pytest.mark.parametrize("kind", every(["dynamic", "longrope in a node"]))
def test_a_sequence_of_a_batch_has_its_own_length(kind: str, made: Any) -> None:
    generator, ids, own = Generator(made(kind) / "onnx"), numbers(2, 20), 9
    mask = np.ones((2, 20), np.int64)
    mask[1, own:] = 0
    positions = np.minimum(np.arange(20), [[19], [own - 1]])
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    found = generator.run(feed | generator.start(2), 20, 0)["logits"]
    for row, length in enumerate((20, own)):
        alone, _ = generator.step(ids[row : row + 1, :length], generator.start())
        assert far(found[row : row + 1, :length], alone) < 1e-6


def texts(model: PreTrainedModel, ids: list[int], begin: int) -> Iterator[np.ndarray]:
    """Logits after the first ``begin`` tokens and each one more, every time of a run of all of them."""
    for end in range(begin, len(ids) + 1):
        with torch.no_grad():
            yield model(torch.tensor([ids[:end]])).logits[0, -1].numpy()


def test_a_cache_has_the_frequencies_of_its_length(made: Any, tmp_path: Path) -> None:
    """In pieces, over the limit, back, in drafts and saved: always as one run of all tokens."""
    folder, ids = made("longrope"), numbers(24).tolist()
    generator, model = Generator(folder / "onnx", chunk=5), torch_model(folder)
    want = dict(enumerate(texts(model, ids, 1), 1))
    assert generator.short_context == SHORT
    cache = generator.cache()
    for end in (7, 10, 11, 12, 13, 14, 22):
        assert far(cache.append(ids[len(cache.tokens) : end]), want[end]) < 2e-5
    cache.rewind(9)
    assert far(cache.append(ids[9:10]), want[10]) < 2e-5
    found = cache.verify(ids[10:14])
    with torch.no_grad():
        assert far(found, model(torch.tensor([ids[:14]])).logits[0, 10:].numpy()) < 2e-5
    cache.rewind(8)
    generator.save_cache(cache, tmp_path / "cache")
    loaded = generator.load_cache(tmp_path / "cache")
    assert far(loaded.append(ids[8:9]), want[9]) < 2e-5
    whole = generator.cache()
    assert far(whole.append(ids), want[24]) < 2e-5
    assert far(generator.scores(ids)[-1], want[24]) < 2e-5


def test_generating_past_the_limit_is_transformers_choice(made: Any) -> None:
    folder, ids = made("longrope"), numbers(SHORT - 4).tolist()
    model, want = torch_model(folder), list(ids)
    for _ in range(10):
        with torch.no_grad():
            want.append(int(model(torch.tensor([want])).logits[0, -1].argmax()))
    generator = Generator(folder / "onnx")
    assert generator.generate(ids, 10).tokens == want[len(ids) :]
    drafting = Generator(folder / "onnx", speculate="ngram")
    assert drafting.generate(ids, 10).tokens == want[len(ids) :]
    with pytest.raises(ModelError, match=rf"18 tokens of a prompt and its answer, expected at most {SHORT} of prompts"):
        generator.generate_batch([ids, ids], 10)
    together = generator.generate_batch([ids, ids[:3]], 4)
    assert together[0] == want[len(ids) :][:4]


def test_genai_stays_within_the_short_texts(made: Any) -> None:
    """It reads prompts in pieces and runs nothing again."""
    folder = made("longrope in a node") / "onnx"
    assert json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]["max_length"] == SHORT
    assert inspect(folder)["metadata"]["short_context"] == str(SHORT)


def test_phimoes_other_kinds_are_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "short_mscale": 1.1, "long_mscale": 1.3}
    make_checkpoint(tmp_path / "checkpoint", "phimoe", rope_parameters=yarn)
    with pytest.raises(CheckpointError, match=r"config\.json: rope_type yarn of phimoe is not supported, expected"):
        plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none")


@pytest.mark.parametrize("kind", ["spiral", []])  # a list is no key of transformers' table
def test_a_rope_type_that_transformers_does_not_know_is_refused(kind: object, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    path = tmp_path / "checkpoint" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"rope_parameters": {"rope_type": kind}}), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"config\.json: rope_type is ('spiral'|\[\]), transformers .* knows default, "
    ):
        plan(tmp_path / "checkpoint", tmp_path / "onnx", quantize="none")


@pytest.mark.every
def test_a_paged_cache_has_the_frequencies_of_the_context(tmp_path: Path) -> None:
    """Its tables are of all positions, so that each request has those of the longest, as in vLLM."""
    # of heads that CUDA's kernels take
    factors = {name: LONGROPE[name] * 4 for name in ("short_factor", "long_factor")}
    kind = {"rope_parameters": LONGROPE | factors, "head_dim": 64, "max_position_embeddings": 32}
    make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", **kind)
    options: dict[str, Any] = {"target": "cuda", "paged": True, "quantize": "none", "dtype": "f16"}
    export(tmp_path / "checkpoint", tmp_path / "onnx", **options)
    graph = load(tmp_path / "onnx" / "model.onnx").graph
    table = next(numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name == "cos_cache")
    rotary = torch_model(tmp_path).model.rotary_emb
    want, _ = rotary(torch.zeros(1, 1, 1), torch.arange(32)[None])
    np.testing.assert_allclose(table, want[0, :, :32].numpy(), atol=2**-11)
    assert "short_context" not in inspect(tmp_path / "onnx")["metadata"]
