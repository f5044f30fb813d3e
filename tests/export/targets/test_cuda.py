"""export --target cuda: standard operators and quantmoe's only, in 16 bits, the same tokens' logits as PyTorch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from export.architectures.test_architectures import fields, make_checkpoint
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support.harness.sweeps import every
from support.models import tiny
from support.models.tiny import SIZES

from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.op import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    IndexerSpec,
    LinearSpec,
    MoESpec,
    NormSpec,
    RouterSpec,
    RoutingSpec,
)
from quantmoe.custom_ops.op_def import nodes
from quantmoe.custom_ops.ops.causal_conv import causal_conv
from quantmoe.custom_ops.ops.gated_delta import gated_delta
from quantmoe.custom_ops.ops.hyper_connection import hyper_connection
from quantmoe.custom_ops.ops.sparse_indexer import sparse_indexer
from quantmoe.custom_ops.reference import add_norm, linear, quant_moe, route, router, token_rows
from quantmoe.custom_ops.reference import attention as attend
from quantmoe.exporter.graph import standard_attention
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.targets import CUDA, TARGETS
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

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


class CachedAttention(OpRun):
    op_domain = "quantmoe"

    def _run(self, qkv, key, value, rows, mask, *tables, **attributes):
        spec = AttentionSpec.from_attributes(attributes)
        # after the sinks: k_up, v_up, block_table, selected
        block_table, selected = (tables[i] if len(tables) > i else None for i in (7, 8))
        given = (qkv.astype(np.float64), key, value, rows, mask.shape[1], *tables[:5])
        output, *present = attend(spec, *given, block_table=block_table, selected=selected)
        return tuple(array.astype(qkv.dtype) for array in (output, *present))


class SparseIndexer(OpRun):
    op_domain = "quantmoe"

    def _run(self, *inputs, **attributes):
        return sparse_indexer(IndexerSpec.from_attributes(attributes), *inputs)


class CausalConv(OpRun):
    op_domain = "quantmoe"

    def _run(self, x, weight, bias, past, rows, **attributes):
        y, present = causal_conv(ConvSpec.from_attributes(attributes), x, weight, bias, past, rows)
        return y.astype(x.dtype), present.astype(x.dtype)


class GatedDelta(OpRun):
    op_domain = "quantmoe"

    def _run(self, qkv, *others, **attributes):
        y, present = gated_delta(DeltaSpec.from_attributes(attributes), qkv, *others)
        return y.astype(qkv.dtype), present.astype(np.float32)


class MoERouting(OpRun):
    op_domain = "quantmoe"

    def _run(self, logits, bias, **attributes):
        ids, weights = route(RoutingSpec.from_attributes(attributes), logits.reshape(-1, logits.shape[-1]), bias)
        return tuple(a.reshape(*logits.shape[:-1], -1) for a in (ids, weights.astype(np.float32)))


class MoERouter(OpRun):
    op_domain = "quantmoe"

    def _run(self, x, *others, **attributes):
        ids, weights = router(RouterSpec.from_attributes(attributes), x.reshape(-1, x.shape[-1]), *others)
        return tuple(a.reshape(*x.shape[:-1], -1) for a in (ids, weights.astype(np.float32)))


class AddRMSNorm(OpRun):
    op_domain = "quantmoe"

    def _run(self, x, residual, weight, **attributes):
        y, total = add_norm(NormSpec.from_attributes(attributes), x, residual, weight)
        return y.astype(x.dtype), total


class TokenRows(OpRun):
    op_domain = "quantmoe"

    def _run(self, past_key, ids, mask, num_logits=(1,), **attributes):
        return token_rows(mask, ids.shape[1], past_key.shape[2], int(num_logits[0]))


class HyperConnection(OpRun):
    op_domain = "quantmoe"

    def _run(self, streams, *others, **attributes):
        spec = nodes.HyperConnection.from_attributes(attributes)
        collapsed, *weights = hyper_connection(spec, streams, *others)
        return collapsed.astype(streams.dtype), *(array.astype(np.float32) for array in weights)


OPERATORS = [
    *(QuantMoE, QuantLinear, MoERouting, CachedAttention, CausalConv, GatedDelta),
    *(MoERouter, AddRMSNorm, TokenRows, SparseIndexer, HyperConnection),
]


@pytest.mark.parametrize("dtype", every([None, "f16"]))
@pytest.mark.parametrize("architecture", every(["qwen3_moe", "mixtral", "olmoe"]))
def test_operators_and_types(exported, architecture, dtype):
    folder = exported(architecture, target="cuda", dtype=dtype)
    model = ir.load(folder / "model.onnx")
    assert model.opset_imports == {"": OPSET, "quantmoe": 1}
    nodes = [node for node in model.graph if node.domain != ""]
    assert {node.domain for node in nodes} == {"quantmoe"}
    assert {node.op_type for node in nodes} >= {"QuantMoE", "MoERouter", "AddRMSNorm"}
    want = ir.DataType.FLOAT16 if dtype else ir.DataType.BFLOAT16
    assert [value.dtype for value in model.graph.inputs if value.name.startswith("past")] == [want] * 4
    assert model.graph.outputs[0].dtype == want
    assert {p.name for p in folder.iterdir()} >= {"config.json", "tokenizer.json"}
    for node in nodes:
        for prefix in {"QuantMoE": ("w13", "w2"), "QuantLinear": ("w",)}.get(node.op_type, ()):
            assert node.attributes[f"{prefix}_layout"].value == "marlin"
            assert node.attributes[f"{prefix}_activation_format"].value == "none"


HYBRID = ["qwen3_next", "qwen3_5_moe_text"]
CACHED = ["qwen3_moe", "llama4_text", *HYBRID, "mixtral", "olmoe", "gpt_oss", "glm4_moe"]


def test_nodes_of_a_layer(cached):
    nodes = [ir.load(cached("qwen3_moe", layers=n) / "model.onnx").graph for n in (1, 2)]
    counts = [Counter(node.op_type for node in graph) for graph in nodes]
    own = {"QuantLinear": 2, "CachedAttention": 1, "Reshape": 2, "MoERouter": 1, "QuantMoE": 1, "AddRMSNorm": 2}
    assert counts[1] - counts[0] == Counter(own)
    assert {node.domain for node in nodes[1]} == {"", "quantmoe"}


def test_float_linears_of_one_input_are_one(tmp_path, monkeypatch):
    """gpt-oss's experts alone are quantized; biases and all."""
    monkeypatch.setattr(tiny, "IGNORE", (*tiny.IGNORE, *(f"self_attn.{name}_proj" for name in "qkvo")))
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = tiny.make_checkpoint(tmp_path / "a", "gpt_oss", **sizes, intermediate_size=96, num_hidden_layers=2)
    export(checkpoint, tmp_path / "b", target="cuda", dtype="f16", logits="all")
    counts = Counter(node.op_type for node in ir.load(tmp_path / "b" / "model.onnx").graph)
    assert (counts["MatMul"], counts["QuantLinear"]) == (1, 2 * 2)  # the head; of 16 bits, q, k and v together
    ids = np.random.default_rng(4).integers(1, 384, (2, 11))
    model = dequantized(Skeleton(find_format(open_checkpoint(checkpoint))))
    found, want = logits(tmp_path / "b", ids, np.ones_like(ids)), torch_logits(model, ids, np.ones_like(ids))
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.parametrize("architecture", every(["qwen3_moe", "gpt_oss", "glm4_moe"], 0))
def test_experts_in_16_bits(tmp_path, architecture):
    """As bf16 in the checkpoint, f16 in the graph; a shared expert is among them."""
    floats = tiny.make_float_checkpoint(tmp_path / "a", architecture, hidden_size=256, head_dim=64)
    export(floats, tmp_path / "b", target="cuda", dtype="f16", logits="all", quantize="none", cache="f16")
    found = inspect(tmp_path / "b")
    kinds = {tuple(node["attributes"][f"{p}_format"] for p in ("w13", "w2")) for node in found["layers"]}
    assert kinds == {("f16", "f16")}
    model = dequantized(Skeleton(Unquantized(open_checkpoint(floats), "none")))
    ids = np.random.default_rng(5).integers(1, 384, (2, 7))
    found, want = logits(tmp_path / "b", ids, np.ones_like(ids)), torch_logits(model, ids, np.ones_like(ids))
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.parametrize("architecture", every(CACHED, 3))
def test_attention_is_one_node(cached, architecture):
    found = inspect(cached(architecture))
    assert found["plain_attention"] == {}
    assert [node["cache"] for node in found["attention"]] == ["float16"] * (1 if architecture in HYBRID else 2)
    assert len(found["linear_attention"]) == (architecture in HYBRID)
    assert found["metadata"]["past_present_share_buffer"] == "true"


@pytest.mark.parametrize("dtype", every(["f16", "bf16"]))
@pytest.mark.parametrize("architecture", every(HYBRID))
def test_types_of_states(cached, architecture, dtype):
    """Of a convolution the graph's, of the delta rule f32."""
    folder = cached(architecture, dtype=dtype)
    graph = ir.load(folder / "model.onnx").graph
    own = ir.DataType.FLOAT16 if dtype == "f16" else ir.DataType.BFLOAT16
    for values, prefix in ((graph.inputs, "past_key_values"), (graph.outputs, "present")):
        types = {value.name: value.dtype for value in values}
        assert types[f"{prefix}.0.conv_state"] == types[f"{prefix}.1.key"] == own
        assert types[f"{prefix}.0.recurrent_state"] == ir.DataType.FLOAT
    genai = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    assert genai["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "1"}}]


def test_what_the_kernels_do_not_take_stays_plain(exported, checkpoint, tmp_path):
    found = inspect(exported("qwen3_moe", target="cuda"))
    reason = (
        "head_size is 48 and v_head_size 48, the CUDA kernels take 64, 96, 128, 192 and 256 of both, or 192 and 128"
    )
    assert found["plain_attention"] == {f"model.layers.{i}.self_attn": reason for i in range(2)}
    assert plan(checkpoint("qwen3_moe"), tmp_path / "a", target="cuda").plain_attention == found["plain_attention"]
    assert plan(checkpoint("qwen3_moe"), tmp_path / "a").plain_attention == {}


#: what ONNX Runtime's CUDA provider reads from the host: op type -> inputs
FROM_HOST = {
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 3, 4),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
}


@pytest.mark.parametrize("architecture", every(CACHED))
def test_no_size_is_copied_to_the_device(cached, architecture):
    """ONNX Runtime keeps sizes on the host, and captures no CUDA graph of a model with a copy of one to the device."""
    graph = ir.load(cached(architecture, logits="last") / "model.onnx").graph
    host: set[ir.Value] = set()
    constants = {*graph.initializers.values()}
    for node in graph:
        sizes = [(i, value) for i, value in enumerate(node.inputs) if value in host]
        if node.op_type == "Constant":
            constants.update(node.outputs)
        elif node.op_type == "Shape":
            host.update(node.outputs)
        elif sizes and all(i in FROM_HOST.get(node.op_type, ()) for i, _ in sizes):
            if node.op_type in ("Squeeze", "Unsqueeze") and node.inputs[0] in host:
                host.update(node.outputs)
        elif sizes:
            assert all(value in host or value in constants for value in node.inputs), node
            host.update(node.outputs)


@pytest.mark.parametrize("fixture", ["cached", "exported"])
def test_a_session_chooses_how_many_tokens_have_logits(request, fixture):
    """With CachedAttention and with attention of standard nodes: the nodes of one token's logits give any number's."""
    made, options = request.getfixturevalue(fixture), {"target": "cuda", "dtype": "f16"}
    chosen, one, every = (made("qwen3_moe", **options, logits=kept) for kept in ("last", 1, "all"))
    assert bool(inspect(chosen)["plain_attention"]) == (fixture == "exported")
    models = [ir.load(folder / "model.onnx") for folder in (chosen, one)]
    nodes = [[(node.op_type, len(node.outputs)) for node in model.graph] for model in models]
    assert nodes[0] == nodes[1]
    assert [kind for kind, _ in nodes[0]].count("TokenRows") == 1
    assert [model.metadata_props.get("num_logits") for model in models] == ["1", None]
    assert [model.graph.outputs[0].shape[1] for model in models] == [ir.SymbolicDim("logits_length"), 1]
    onnx.checker.check_model(chosen / "model.onnx")
    ids = np.random.default_rng(6).integers(1, 384, (3, 7))
    mask = np.ones_like(ids)
    mask[1, :3] = mask[2, 4:] = 0
    want = logits(every, ids, mask)
    np.testing.assert_array_equal(logits(chosen, ids, mask), logits(one, ids, mask))
    for most in (1, 2, 7, 2**63 - 1):
        kept = min(most, 7)
        rows = [np.clip(np.arange(last + 1 - kept, last + 1), 0, None) for last in (6, 6, 3)]
        found = logits(chosen, ids, mask, most)
        np.testing.assert_array_equal(found, np.stack([y[i] for y, i in zip(want, rows, strict=True)]))


@pytest.mark.parametrize("architecture", every(CACHED, 3))
def test_every_norm_is_a_node(cached, architecture):
    """Two a layer and one after them; queries' and keys' are in CachedAttention."""
    graph = ir.load(cached(architecture) / "model.onnx").graph
    found = [node.op_type for node in graph]
    assert found.count("AddRMSNorm") == 2 * (found.count("CachedAttention") + found.count("GatedDelta")) + 1
    assert "ReduceMean" not in found


@pytest.mark.parametrize("architecture", every(CACHED, 3))
def test_logits_of_cached_attention_equal_pytorch(cached, reference, architecture):
    """As test_logits_equal_pytorch and test_padding."""
    ids = np.random.default_rng(4).integers(1, 384, (2, 11))
    mask = np.ones_like(ids)
    mask[1, :3] = 0
    model = reference(architecture, hidden_size=256, head_dim=64)
    found, want = logits(cached(architecture), ids, mask), torch_logits(model, ids, mask)
    assert np.isfinite(found).all()
    assert np.abs(found - want)[mask > 0].max() / np.abs(want[mask > 0]).max() < 1e-2


def test_genai_config(cached, tmp_path):
    found = json.loads((cached("qwen3_moe") / "genai_config.json").read_text(encoding="utf-8"))
    assert found["model"]["decoder"]["session_options"] == {
        "custom_ops_library": "libquantmoe_ort_cuda.so",
        "provider_options": [{"cuda": {"enable_cuda_graph": "1"}}],
    }
    assert found["search"]["past_present_share_buffer"] is True
    found = json.loads((cached("qwen3_moe", logits="last") / "genai_config.json").read_text(encoding="utf-8"))
    assert found["model"]["decoder"]["session_options"]["quantmoe.one_logit"] == "1"


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


@pytest.mark.parametrize("architecture", every(sorted(SIZES.keys() - set(HYBRID))))
def test_attention(exported, architecture):
    """What TensorRT 10.6 gets wrong or cannot capture, ONNX Runtime's CUDA provider lacks, and memory is wasted on."""
    graph = ir.load(exported(architecture, target="cuda") / "model.onnx").graph
    # with one new token, TensorRT's fusion of transformers' test for rows that see no key zeroes heads; ONNX Runtime
    # gives ScatterND an attribute that TensorRT's parser refuses
    assert not {"ReduceSum", "ReduceMax", "CumSum", "ScatterND"} & {node.op_type for node in graph}
    softmaxes = [node for node in graph if node.op_type == "Softmax"]
    assert len(softmaxes) == 2
    assert {node.inputs[0].dtype for node in softmaxes} == {ir.DataType.FLOAT}
    for present in graph.outputs[1:]:  # keys and values of groups of heads, which are not repeated
        if architecture != "deepseek_v3":  # whose cache is latent, and whose heads share nothing
            assert all(scaled_where_multiplied(node) for node in softmaxes)
            assert {user.op_type for user, _ in present.uses()} <= {"MatMul", "Transpose"}


@pytest.mark.parametrize("name", standard_attention.UNSUPPORTED)
def test_attention_refuses_what_it_does_not_do(name):
    query, mask = torch.zeros(1, 4, 3, 8), torch.zeros(1, 1, 3, 3)
    usual = {"dropout": 0.0, "sliding_window": 2, "is_causal": True, name: None}
    found, _ = standard_attention.grouped_attention(torch.nn.Module(), query, query, query, mask, 1.0, **usual)
    assert found.shape == (1, 3, 4, 8)
    with pytest.raises(ValueError, match=f"Module: attention with {name} is not supported"):
        standard_attention.grouped_attention(torch.nn.Module(), query, query, query, mask, 1.0, **{name: 30.0})


def test_routers_have_the_graphs_type(exported):
    """transformers keeps DeepSeek's weight in float32, which the node does not take."""
    graph = ir.load(exported("deepseek_v3", target="cuda") / "model.onnx").graph
    routers = [node for node in graph if node.op_type == "MoERouter"]
    assert routers
    assert {value.dtype for node in routers for value in node.inputs[:2]} == {ir.DataType.BFLOAT16}


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
    every(
        [
            ("W8A8", {}, "int8_token"),
            ("NVFP4", {}, "nvfp4"),
            ("FP8_BLOCK", {}, "fp8_group128"),
            ("W4A16", {"activations": "int8-token"}, "int8_token_asym"),
        ]
    ),
)
def test_the_checkpoint_says_how_activations_are_quantized(exported, scheme, options, want):
    for node in ir.load(exported("qwen3_moe", scheme, target="cuda", **options) / "model.onnx").graph:
        for prefix in {"QuantMoE": ("w13", "w2"), "QuantLinear": ("w",)}.get(node.op_type, ()):
            assert node.attributes[f"{prefix}_activation_format"].value == want


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    every(
        [("qwen3_moe", None), ("deepseek_v3", None), ("gpt_oss", None), ("llama4_text", None)]
        + [("qwen3_moe", scheme) for scheme in ("W4A16_ASYM", "W8A16_ASYM", "NVFP4A16", "FP8_BLOCK")]
    ),
)
def test_logits_equal_pytorch(exported, reference, architecture, scheme):
    """float16: a few hundred roundings of 2^-11 on the way to a logit, of random sign."""
    options = {"activations": "float"} if scheme == "FP8_BLOCK" else {}
    given = (architecture,) if scheme is None else (architecture, scheme)
    # of seed 3 a token's fourth and fifth expert differ by 0.0003 there: f16 takes the other one
    ids = np.random.default_rng(4 if scheme == "W4A16_ASYM" else 3).integers(0, 384, (2, 7))
    mask = np.ones_like(ids)
    found = logits(exported(*given, target="cuda", dtype="f16", **options), ids, mask)
    want = torch_logits(reference(*given), ids, mask)
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.parametrize("sizes", every([{}, {"q_lora_rank": None, "rope_interleave": False}]), ids=str)
def test_latent_attention(checkpoint, tmp_path, sizes):
    """One node a layer at the widths that DeepSeek's models have: 512 features of a latent and 64 that turn."""
    source = checkpoint("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, **sizes)
    export(source, tmp_path, target="cuda", dtype="f16", logits="all")
    found = inspect(tmp_path)
    assert found["plain_attention"] == {}
    assert [node["bytes_per_token"] for node in found["attention"]] == [576 * 2] * 2
    graph = ir.load(tmp_path / "model.onnx").graph
    nodes = [node for node in graph if node.op_type == "CachedAttention"]
    assert [node.attributes["key_split"].value for node in nodes] == [288] * 2
    assert not [node for node in graph if node.op_type == "Softmax"]
    ids = np.random.default_rng(3).integers(0, 384, (2, 7))
    mask = np.ones_like(ids)
    want = torch_logits(dequantized(Skeleton(find_format(open_checkpoint(source)))), ids, mask)
    found = logits(tmp_path, ids, mask)
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.parametrize("model_type", every(["deepseek_v32", "glm_moe_dsa"], 1))
def test_sparse_attention(tmp_path, model_type):
    """Two nodes a layer at the widths that latents and indexers of DeepSeek-V3.2 and GLM-5 have."""
    indexed = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    indexed |= {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 6, "num_hidden_layers": 2}
    source = tiny.make_checkpoint(tmp_path / "checkpoint", model_type, **(SIZES["deepseek_v3"] | indexed))
    export(source, tmp_path / "onnx", target="cuda", dtype="f16", logits="all")
    assert inspect(tmp_path / "onnx")["plain_attention"] == {}
    graph = ir.load(tmp_path / "onnx" / "model.onnx").graph
    nodes = [node for node in graph if node.op_type == "CachedAttention"]
    assert [node.inputs[13].producer().op_type for node in nodes] == ["SparseIndexer"] * 2
    assert not [node for node in graph if node.op_type in ("Softmax", "TopK")]
    ids = np.random.default_rng(4).integers(0, 384, (2, 9))  # of others f16 takes another slot or expert of a token
    mask = np.ones_like(ids)
    want = torch_logits(dequantized(Skeleton(find_format(open_checkpoint(source)))), ids, mask)
    found = logits(tmp_path / "onnx", ids, mask)
    assert np.abs(found - want).max() / np.abs(want).max() < 1e-2
    dry = plan(source, tmp_path / "tensorrt", target="cuda", external_experts=True)
    said = "the plug-in for TensorRT has no attention to selected tokens"
    assert (dry.indexers, [*dry.plain_attention.values()]) == ([], [said] * 2)


#: fields that give heads and indexers widths that have kernels
BLOCKS = {
    "minimax_m3_vl_text": {"head_dim": 128, "index_head_dim": 64},
    "qwen4_exp_text": {"head_dim": 256, "indexer_head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64},
}


@pytest.mark.parametrize("model_type", every(BLOCKS))
def test_selected_blocks(tmp_path, model_type):
    """MiniMax-M3 has lists for each group of heads, Qwen4-Exp one for all."""
    make_checkpoint(tmp_path / "checkpoint", model_type, **BLOCKS[model_type])
    export(tmp_path / "checkpoint", tmp_path / "onnx", target="cuda", dtype="f16", logits="all", quantize="none")
    found = inspect(tmp_path / "onnx")
    assert found["plain_attention"] == {}
    graph = ir.load(tmp_path / "onnx" / "model.onnx").graph
    readers = [node for node in graph if node.op_type == "CachedAttention" and len(node.inputs) > 13]
    assert {node.inputs[13].producer().op_type for node in readers} == {"SparseIndexer"}
    assert len(readers) == len([node for node in graph if node.op_type == "SparseIndexer"]) == len(found["indexers"])
    ids = np.random.default_rng(4).integers(3, 128, (2, 12))  # of others f16 may take another block or expert
    mask = np.ones_like(ids)
    want = torch_logits(dequantized(Skeleton(Unquantized(open_checkpoint(tmp_path / "checkpoint"), "none"))), ids, mask)
    assert np.abs(logits(tmp_path / "onnx", ids, mask) - want).max() / np.abs(want).max() < 1e-2
    narrow = BLOCKS[model_type] | {"head_dim": 64}
    make_checkpoint(tmp_path / "narrow", model_type, **narrow)
    said = "head_size is 64 and v_head_size 64, with the input selected the CUDA kernels take 128 and 256 of both"
    assert {*plan(tmp_path / "narrow", tmp_path / "b", target="cuda", quantize="none").plain_attention.values()} == {
        said
    }


@pytest.mark.parametrize("model_type", every(["glm4_moe", "deepseek_v3"]))
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_each_layer_has_its_own_router(tmp_path, model_type, dtype):
    """transformers keeps these routers' weights in f32, the graph has them in 16 bits."""
    make_checkpoint(tmp_path / "checkpoint", model_type)
    export(tmp_path / "checkpoint", tmp_path / "onnx", target="cuda", dtype=dtype, quantize="none")
    routers = [node for node in ir.load(tmp_path / "onnx" / "model.onnx").graph if node.op_type == "MoERouter"]
    found = [node.inputs[1].name for node in routers]
    assert found == [f"model.layers.{i}.mlp.gate.weight" for i in (1, 2, 3)]


#: fields that give latents, heads and indexers widths that have kernels. Each token has all experts: f16 would take
#: others where two have nearly equal scores
INDEXED = {"index_n_heads": 8, "index_head_dim": 128, "num_experts_per_tok": 8}
AS_VALUES: dict[str, dict[str, object]] = {
    "deepseek_v4": INDEXED | {"head_dim": 512},
    "glm5_next": {
        "text_config": fields("glm5_next")["text_config"] | INDEXED | {"kv_lora_rank": 512, "linear_head_dim": 64}
    },
    "hy_v4": INDEXED | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
}


@pytest.mark.parametrize("model_type", every(AS_VALUES))
def test_a_gate_that_is_clamped_before_silu(tmp_path, model_type):
    """Whole models whose latents, or keys that are their values, have the widths of published ones."""
    make_checkpoint(tmp_path / "checkpoint", model_type, **AS_VALUES[model_type])
    export(tmp_path / "checkpoint", tmp_path / "onnx", target="cuda", dtype="f16", logits="all", quantize="none")
    found = inspect(tmp_path / "onnx")
    assert found["plain_attention"] == {}
    graph = ir.load(tmp_path / "onnx" / "model.onnx").graph
    assert {n.attributes["activation"].value for n in graph if n.op_type == "QuantMoE"} == {"swiglu_clamp"}
    readers = [node for node in graph if node.op_type == "CachedAttention" and len(node.inputs) > 13]
    assert readers
    assert {node.inputs[13].producer().op_type for node in readers} == {"SparseIndexer"}
    connections = Counter(node.op_type for node in graph)["HyperConnection"]
    assert connections == (0 if model_type == "hy_v4" else 8)
    assert not any(value.type == ir.AttributeType.GRAPH for node in graph for value in node.attributes.values())
    for node in graph:
        if node.op_type == "CausalConv":  # exponentials are sums in f32, and so is their state
            assert {node.inputs[0].dtype, node.outputs[0].dtype} == {node.inputs[3].dtype}
    ids = np.random.default_rng(4).integers(3, 128, (2, 12))
    mask = np.ones_like(ids)
    want = torch_logits(dequantized(Skeleton(Unquantized(open_checkpoint(tmp_path / "checkpoint"), "none"))), ids, mask)
    assert np.abs(logits(tmp_path / "onnx", ids, mask) - want).max() / np.abs(want).max() < 1e-2


@pytest.mark.parametrize("architecture", every(["qwen3_moe", "gpt_oss", "llama4_text"]))
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
    shutil.unpack_archive(Path(__file__).parents[2] / "fixtures/exported-cuda.tar.xz", tmp_path)
    expected = np.load(tmp_path / "expected.npz")
    found = logits(tmp_path, expected["input_ids"], np.ones_like(expected["input_ids"]))
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-2 * np.abs(expected["logits"]).max())


def positions(mask):
    return np.maximum(mask.cumsum(-1) - 1, 0)


def logits(folder, ids, mask, most=None):
    """most: what a session has in the place of num_logits."""
    evaluator = ReferenceEvaluator(str(folder / "model.onnx"), new_ops=OPERATORS)
    if most is not None:
        evaluator.rt_inits_["num_logits"] = np.array([most])
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    for value in evaluator.proto_.graph.input:
        if value.name not in feed and value.name.startswith("past"):
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]  # 0: dynamic
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feed[value.name] = np.zeros((len(ids), *dims[1:]), dtype)
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
    monkeypatch.setitem(TARGETS, "cuda", dataclasses.replace(CUDA, max_elements=70_000))
    with pytest.raises(CheckpointError, match=r"w13 has 16 experts of \d+ int32 words.* in which 13 experts"):
        export(folder, tmp_path / "a", target="cuda")
    with pytest.raises(CheckpointError, match="in which 13 experts would fit"):
        plan(folder, tmp_path / "a", target="cuda")
    assert not (tmp_path / "a").exists()


def test_states_that_no_kernel_takes_are_refused(checkpoint, tmp_path):
    odd = checkpoint("qwen3_next", linear_key_head_dim=96)
    for command in (export, plan):
        with pytest.raises(
            CheckpointError, match=r"0\.linear_attn: .*: k_head_size is 96 and v_head_size 64, the CUDA"
        ):
            command(odd, tmp_path / "a", target="cuda")
    assert plan(odd, tmp_path / "a").plain_attention == {}
