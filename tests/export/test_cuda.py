"""export --target cuda: standard operators and quantmoe's only, in 16 bits, the same tokens' logits as PyTorch."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import LinearSpec, MoESpec, RoutingSpec
from quantmoe.custom_ops.reference import linear, quant_moe, route
from quantmoe.exporter import choose
from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.convert import export
from quantmoe.exporter.plan import plan

# The oldest TensorRT that has IPluginV3 parsers for bf16 models, 10.0, reads opset 20.
OPSET = 20


class QuantMoE(OpRun):
    """The node as reference.py computes it."""

    op_domain = "quantmoe"

    def _run(self, x, ids, weights, w13, w2, **attributes):
        spec = MoESpec.from_attributes(attributes)
        experts = [marlin.unpack(spec, a.view(np.uint8), b.view(np.uint8)) for a, b in zip(w13, w2, strict=True)]
        flat = (a.reshape(-1, a.shape[-1]) for a in (x.astype(np.float64), ids, weights))
        return (quant_moe(spec, experts, *flat).astype(x.dtype).reshape(x.shape),)


class QuantLinear(OpRun):
    op_domain = "quantmoe"

    def _run(self, x, w, **attributes):
        spec = LinearSpec.from_attributes(attributes)
        y = linear(
            x.reshape(-1, x.shape[-1]), marlin.unpack_down(spec.moe, w[0].view(np.uint8)), spec.w.activation_format
        )
        return (y.astype(x.dtype).reshape(*x.shape[:-1], -1),)


class MoERouting(OpRun):
    op_domain = "quantmoe"

    def _run(self, logits, bias, **attributes):
        ids, weights = route(RoutingSpec.from_attributes(attributes), logits.reshape(-1, logits.shape[-1]), bias)
        return tuple(a.reshape(*logits.shape[:-1], -1) for a in (ids, weights.astype(np.float32)))


@pytest.mark.parametrize("dtype", [None, "f16"])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe"])
def test_operators_and_types(exported, architecture, dtype):
    folder = exported(architecture, target="cuda", dtype=dtype)
    model = ir.load(folder / "model.onnx")
    assert model.opset_imports == {"": OPSET, "quantmoe": 1}
    nodes = [node for node in model.graph if node.domain != ""]
    assert {node.domain for node in nodes} == {"quantmoe"}
    assert {node.op_type for node in nodes} >= {"QuantMoE", "MoERouting"}
    want = ir.DataType.FLOAT16 if dtype else ir.DataType.BFLOAT16
    assert [value.dtype for value in model.graph.inputs if value.name.startswith("past")] == [want] * 4
    assert model.graph.outputs[0].dtype == want
    assert {p.name for p in folder.iterdir()} >= {"config.json", "tokenizer.json"}
    assert not (folder / "genai_config.json").exists()
    for node in nodes:
        for prefix in {"QuantMoE": ("w13", "w2"), "QuantLinear": ("w",), "MoERouting": ()}[node.op_type]:
            assert node.attributes[f"{prefix}_layout"].value == "marlin"
            assert node.attributes[f"{prefix}_activation_format"].value == "none"


def test_reductions_in_f32(exported):
    """ONNX Runtime's CUDA provider has no bf16 ReduceMax, which transformers' attention with sinks would use."""
    nodes = ir.load(exported("gpt_oss", target="cuda") / "model.onnx").graph
    assert "ReduceMax" not in {node.op_type for node in nodes}


@pytest.mark.parametrize(
    ("scheme", "options", "want"),
    [
        ("W8A8", {}, "int8_token"),
        ("NVFP4", {}, "nvfp4"),
        ("FP8_BLOCK", {}, "fp8_group128"),
        ("W4A16", {"activations": "int8"}, "int8_token_asym"),
    ],
)
def test_the_checkpoint_says_how_activations_are_quantized(exported, scheme, options, want):
    for node in ir.load(exported("qwen3_moe", scheme, target="cuda", **options) / "model.onnx").graph:
        for prefix in {"QuantMoE": ("w13", "w2"), "QuantLinear": ("w",)}.get(node.op_type, ()):
            assert node.attributes[f"{prefix}_activation_format"].value == want


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("qwen3_moe", None), ("deepseek_v3", None), ("gpt_oss", None), ("llama4_text", None)]
    + [("qwen3_moe", scheme) for scheme in ("W4A16_ASYM", "W8A16_ASYM", "NVFP4A16", "FP8_BLOCK")],
)
def test_logits_equal_pytorch(exported, reference, architecture, scheme):
    """float16: a few hundred roundings of 2^-11 on the way to a logit, of random sign."""
    options = {"activations": "float"} if scheme == "FP8_BLOCK" else {}
    given = (architecture,) if scheme is None else (architecture, scheme)
    evaluator = ReferenceEvaluator(
        str(exported(*given, target="cuda", dtype="f16", **options) / "model.onnx"),
        new_ops=[QuantMoE, QuantLinear, MoERouting],
    )
    ids = np.random.default_rng(3).integers(0, 384, (2, 7))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.tile(np.arange(7), (2, 1))}
    for value in evaluator.proto_.graph.input:
        if value.name not in feed and value.name.startswith("past"):
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
            feed[value.name] = np.zeros((2, dims[1], 0, dims[3]), np.float16)
    found = evaluator.run(["logits"], {n: feed[n] for n in evaluator.input_names})[0].astype(np.float64)
    with torch.no_grad():
        want = reference(*given)(torch.from_numpy(ids)).logits.double().numpy()
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


def test_refusals(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("qwen3_moe")
    with pytest.raises(ValueError, match="dtype is 'f32', expected one of: bf16, f16"):
        export(folder, tmp_path / "a", target="cuda", dtype="f32")
    with pytest.raises(ValueError, match="dtype is 'bf16', expected one of: f32, f16"):
        export(folder, tmp_path / "a", dtype="bf16")
    with pytest.raises(ValueError, match="dense is 'ort', expected one of: quantmoe"):
        export(folder, tmp_path / "a", target="cuda", dense="ort")
    monkeypatch.setattr(choose, "MAX_ELEMENTS", 70_000)
    with pytest.raises(CheckpointError, match=r"w13 has 16 experts of \d+ int32 words.* in which 13 experts"):
        export(folder, tmp_path / "a", target="cuda")
    with pytest.raises(CheckpointError, match="in which 13 experts would fit"):
        plan(folder, tmp_path / "a", target="cuda")
    assert not (tmp_path / "a").exists()
