"""What is around the layers: the head in the checkpoint's bytes, tables that are looked up, the last token's logits."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from support.harness.sweeps import every
from support.models.checkpoints import TINY
from support.models.tiny import make_float_checkpoint

from quantmoe.exporter.errors import CheckpointError, OptionError
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.graph.passes.last_logits import keep_last_logits
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import open_checkpoint
from quantmoe.exporter.reading.weights import unquantized
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator


def test_head_and_embedding_keep_the_checkpoints_bytes(exported, checkpoint):
    folder, ckpt = exported("qwen3_moe", activations="float"), open_checkpoint(checkpoint("qwen3_moe"))
    (head,) = (linear for linear in inspect(folder)["linears"] if linear["module"] == "lm_head")
    assert head["format"] == "bf16, not quantized"
    assert head["attributes"]["w_activation_format"] == "none"
    graph = ir.load(folder / "model.onnx").graph
    (table,) = (value for value in graph.initializers.values() if "embed_tokens" in value.name)
    stored = table.const_value.numpy().view(ml_dtypes.bfloat16)
    assert stored.tobytes() == ckpt.tensor("model.embed_tokens.weight").tobytes()


@pytest.mark.parametrize("tied", every([True, False]))
def test_16_bit_linears_are_packed_as_they_are(tmp_path, tied):
    sizes = TINY | {"num_hidden_layers": 1, "num_experts": 4, "tie_word_embeddings": tied}
    folder = make_float_checkpoint(tmp_path / "float", "qwen3_moe", **sizes)
    options = {"activations": "float", "quantize": "none", "logits": "all", "cache": "f32"}
    planned = plan(folder, tmp_path / "model", **options)
    report = export(folder, tmp_path / "model", **options)
    assert set(report.linears) == {
        *(f"model.layers.0.self_attn.{x}_proj" for x in ("qkv", "o")),
        "model.embed_tokens" if tied else "lm_head",
    }
    assert planned.dense == pytest.approx(report.dense_bytes, rel=0.01)
    want = dequantized(Skeleton(Unquantized(open_checkpoint(folder), "none")))
    ids = tokens(2, 5)
    assert error(run(Generator(tmp_path / "model"), ids, (4, 1)), expected(want, ids)) < 2e-5


@pytest.mark.parametrize(("kind", "bound"), every([("int4", 0.2), ("int8", 0.02)]))
@pytest.mark.parametrize("tied", every([True, False]))
def test_a_rounded_head(tmp_path, kind, bound, tied):
    sizes = TINY | {"num_hidden_layers": 1, "num_experts": 4, "tie_word_embeddings": tied}
    folder = make_float_checkpoint(tmp_path / "float", "qwen3_moe", **sizes)
    options = {"activations": "float", "quantize": "none", "lm_head": kind, "cache": "f32"}
    planned = plan(folder, tmp_path / "model", **options)
    report = export(folder, tmp_path / "model", **options)
    assert planned.dense == pytest.approx(report.dense_bytes, rel=0.01)
    format = Unquantized(open_checkpoint(folder), "none")
    skeleton = Skeleton(format, lm_head=kind)
    head = "model.embed_tokens" if tied else "lm_head"
    assert skeleton.head == head
    weight, found = format.parameter(f"{head}.weight"), format.matrix_of(head).dequantize()
    assert report.head_error == pytest.approx(np.linalg.norm(found - weight) / np.linalg.norm(weight), rel=1e-4)
    assert 0 < report.head_error < bound
    want = dequantized(Skeleton(Unquantized(open_checkpoint(folder), "none")))
    want.lm_head.weight = torch.nn.Parameter(torch.from_numpy(found.astype(np.float32)))
    ids = tokens(1, 5)
    found = Generator(tmp_path / "model").scores(ids[0].tolist())
    assert error(found[None], expected(want, ids)) < 2e-5


def test_heads_that_are_not_rounded(tmp_path, monkeypatch):
    folder = make_float_checkpoint(tmp_path / "float", "qwen3_moe", **TINY | {"num_hidden_layers": 1})
    with pytest.raises(OptionError, match="lm_head is 'int3', expected one of: int4, int8"):
        export(folder, tmp_path / "model", quantize="int4", lm_head="int3")
    monkeypatch.setattr(unquantized, "_LINEAR", re.compile(".*"))
    with pytest.raises(CheckpointError, match=r"lm_head is quantized already \(quantized to int4 group 32\)"):
        export(folder, tmp_path / "model", quantize="int4", lm_head="int4")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("padding", ["left", "right", "none"])
def test_last_logits_are_those_of_each_rows_last_token(exported, padding):
    every = Generator(exported("qwen3_moe", activations="float"))
    last = Generator(exported("qwen3_moe", activations="float", logits="last"))
    assert last.rows == 1
    assert every.rows > 1
    lengths = {"left": (3, 6), "right": (6, 2), "none": (6, 6)}[padding]
    ids, want = tokens(2, 6), []
    mask, positions = np.zeros_like(ids), np.zeros_like(ids)
    for row, length in enumerate(lengths):
        at = slice(6 - length, 6) if padding == "left" else slice(length)
        mask[row, at], positions[row, at] = 1, np.arange(length)
        want.append(run(every, ids[row : row + 1, at], (length,))[:, -1:])
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    found = last.session.run(["logits"], feed | last.start(2))[0]
    assert found.shape == (2, 1, every.vocabulary)
    assert error(found, np.concatenate(want)) < 2e-5


def test_scores_of_a_prompt_are_the_same_step_by_step(exported):
    every = Generator(exported("qwen3_moe", activations="float"))
    last = Generator(exported("qwen3_moe", activations="float", logits="last"))
    ids = tokens(1, 6)[0].tolist()
    assert error(last.scores(ids), every.scores(ids)) < 2e-5


def test_a_head_that_is_no_product_keeps_all_logits():
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 21]>
        g (int64[B, S] input_ids, int64[B, T] attention_mask, float[B, S, 4] hidden_states) => (float[B, S, 4] logits) {
            logits = Softmax(hidden_states)
        }
    """)
    assert not keep_last_logits(model)
    assert [node.op_type for node in model.graph] == ["Softmax"]
