"""export --target cuda: standard operators and quantmoe's only, in 16 bits, the same tokens' logits as PyTorch."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import LinearSpec, MoESpec, RoutingSpec
from quantmoe.custom_ops.reference import linear, quant_moe, route
from quantmoe.exporter import attention, choose
from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.convert import export
from quantmoe.exporter.demo import SIZES
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


def ancestor(value, op_type):
    """Its producer's first input's and so on: the nearest node of that type."""
    node = value.producer()
    while node.op_type != op_type:
        node = node.inputs[0].producer()
    return node


def scaled_where_multiplied(softmax):
    """Whether queries are multiplied by what is no constant between their heads' reshape and the product: TensorRT 10.6
    moves a constant away and then takes the wrong heads, where layers have no positions."""
    scaled = ancestor(softmax.inputs[0], "MatMul").inputs[0].producer()
    tensor = scaled.op_type == "Mul" and scaled.inputs[1].const_value is None
    return tensor and scaled.inputs[0].producer().op_type == "Reshape"


@pytest.mark.parametrize("architecture", SIZES)
def test_attention(exported, architecture):
    """What TensorRT 10.6 gets wrong or cannot capture, ONNX Runtime's CUDA provider lacks, and memory is wasted on."""
    graph = ir.load(exported(architecture, target="cuda") / "model.onnx").graph
    # with one new token, TensorRT's fusion of transformers' test for rows that see no key zeroes heads; ONNX Runtime
    # gives ScatterND an attribute that TensorRT's parser refuses
    assert not {"ReduceSum", "ReduceMax", "CumSum", "ScatterND"} & {node.op_type for node in graph}
    softmaxes = [node for node in graph if node.op_type == "Softmax"]
    assert len(softmaxes) == 2
    assert {node.inputs[0].dtype for node in softmaxes} == {ir.DataType.FLOAT}
    for cache in graph.outputs[1:]:  # keys and values of groups of heads, which are not repeated
        if architecture != "deepseek_v3":  # whose cache is latent, and whose heads share nothing
            assert all(scaled_where_multiplied(node) for node in softmaxes)
            assert {user.op_type for user, _ in cache.uses()} <= {"MatMul", "Transpose"}


@pytest.mark.parametrize("name", attention.UNSUPPORTED)
def test_attention_refuses_what_it_does_not_do(name):
    query, mask = torch.zeros(1, 4, 3, 8), torch.zeros(1, 1, 3, 3)
    usual = {"dropout": 0.0, "sliding_window": 2, "is_causal": True, name: None}
    found, _ = attention.grouped_attention(torch.nn.Module(), query, query, query, mask, 1.0, **usual)
    assert found.shape == (1, 3, 4, 8)
    with pytest.raises(ValueError, match=f"Module: attention with {name} is not supported"):
        attention.grouped_attention(torch.nn.Module(), query, query, query, mask, 1.0, **{name: 30.0})


def test_default_attributes_are_left_out(exported):
    """TensorRT 10.6's parser refuses some, ScatterND's reduction for one, also with their default."""
    graph = ir.load(exported("deepseek_v3", target="cuda") / "model.onnx").graph
    assert {"ReduceMean", "Softmax"} <= {node.op_type for node in graph}  # keepdims, axis
    for node in graph:
        known = {} if node.domain else onnx.defs.get_schema(node.op_type, OPSET).attributes
        defaults = {name: ir.from_proto(a.default_value).value for name, a in known.items() if a.default_value.type}
        assert not {name for name, a in node.attributes.items() if name in defaults and defaults[name] == a.value}


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
    ids = np.random.default_rng(3).integers(0, 384, (2, 7))
    mask = np.ones_like(ids)
    found = logits(exported(*given, target="cuda", dtype="f16", **options), ids, mask)
    want = torch_logits(reference(*given), ids, mask)
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_padding(exported, reference, architecture):
    """Left padding: chunks and windows are counted as transformers counts them; rows of padding are finite."""
    ids = np.random.default_rng(4).integers(1, 384, (2, 11))
    mask = np.ones_like(ids)
    mask[1, :3] = 0
    found = logits(exported(architecture, target="cuda", dtype="f16"), ids, mask)
    assert np.isfinite(found).all()
    want = torch_logits(reference(architecture), ids, mask)[mask > 0]
    assert np.abs(found[mask > 0] - want).max() / np.abs(want).max() < 1e-2


def test_an_earlier_export_keeps_its_logits(tmp_path):
    """tests/fixtures/exported.py; the evaluator rounds its products to float16, in another order with another NumPy."""
    shutil.unpack_archive(Path(__file__).parents[1] / "fixtures/exported-cuda.tar.xz", tmp_path)
    expected = np.load(tmp_path / "expected.npz")
    found = logits(tmp_path, expected["input_ids"], np.ones_like(expected["input_ids"]))
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-2 * np.abs(expected["logits"]).max())


def positions(mask):
    return np.maximum(mask.cumsum(-1) - 1, 0)


def logits(folder, ids, mask):
    evaluator = ReferenceEvaluator(str(folder / "model.onnx"), new_ops=[QuantMoE, QuantLinear, MoERouting])
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    for value in evaluator.proto_.graph.input:
        if value.name not in feed and value.name.startswith("past"):
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
            feed[value.name] = np.zeros((len(ids), dims[1], 0, dims[3]), np.float16)
    return evaluator.run(["logits"], {n: feed[n] for n in evaluator.input_names})[0].astype(np.float64)


def torch_logits(model, ids, mask):
    tensors = (torch.from_numpy(a) for a in (ids, mask, positions(mask)))
    with torch.no_grad():
        given = dict(zip(("input_ids", "attention_mask", "position_ids"), tensors, strict=True))
        return model(**given).logits.double().numpy()


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
