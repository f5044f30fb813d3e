"""Quantized layers outside the experts, quantize, unpack, explain."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from support.harness.sweeps import every
from support.models.checkpoints import (
    TINY,
    check_layer,
    make_gptq_checkpoint,
    make_integer_checkpoint,
    same_matrix,
    write_checkpoint,
)
from support.models.encoders import gptq
from support.models.tiny import make_float_checkpoint

from quantmoe.benchmarks.pytorch_comparison import divergence
from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import cpu_panel, marlin
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.choosing import choose
from quantmoe.exporter.choosing.choose import choose_layer, layer_spec
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.surveying.explain import explain
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import open_format
from quantmoe.runtime.generate import Generator

FIXTURES = Path(__file__).parents[2] / "fixtures"


def operators(folder: Path) -> Counter:
    return Counter(node.op_type for node in ir.load(folder / "model.onnx").graph)


def test_every_quantized_linear_is_a_node(exported):
    folder = exported("qwen3_moe", activations="float")
    found = {linear["module"]: linear["rows"] for linear in inspect(folder)["linears"]}
    attention = {f"model.layers.{i}.self_attn.{x}_proj": {} for i in range(2) for x in "o"}
    attention |= {
        f"model.layers.{i}.self_attn.qkv_proj": {
            f"model.layers.{i}.self_attn.{x}_proj": n for x, n in (("q", 192), ("k", 96), ("v", 96))
        }
        for i in range(2)
    }
    assert found == attention | {"lm_head": {}}
    assert operators(folder)["QuantLinear"] == len(found)
    assert not [t for t in inspect(folder)["dense"] if t["dequantized_from"]]


def test_matmul_nbits_where_it_is_exact(checkpoint, reference, tmp_path):
    folder = checkpoint("qwen3_moe")
    report = export(folder, tmp_path / "float", activations="float", dense="ort", logits="all", cache="f32")
    assert report.not_ort == {}
    assert operators(tmp_path / "float")["MatMulNBits"] == 4
    assert operators(tmp_path / "float")["QuantLinear"] == 1  # the head, of bf16
    ids = tokens(2, 6)
    assert error(run(Generator(tmp_path / "float"), ids, (5, 1)), expected(reference("qwen3_moe"), ids)) < 2e-5


def test_matmul_nbits_is_refused_with_a_reason(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe", "W8A8")
    report = export(folder, tmp_path, dense="ort", layers=1)
    assert plan(folder, tmp_path / "other", dense="ort", layers=1).not_ort == report.not_ort
    assert set(report.not_ort.values()) == {
        "MatMulNBits quantizes activations by rules of its own, the checkpoint says int8_token"
    }
    assert operators(tmp_path)["QuantLinear"] == 3


@pytest.mark.parametrize("scale", every(["f16", "bf16", "f32"]))
def test_matmul_nbits_of_a_float16_model(tmp_path, scale):
    """The scales' type, or else their numbers, decide before anything is written."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
    folder = make_integer_checkpoint(tmp_path / "checkpoint", gptq, config, scale=scale, num_hidden_layers=1)
    options = {"activations": "float", "dense": "ort", "dtype": "f16"}
    planned = plan(folder, tmp_path / "model", **options)
    report = export(folder, tmp_path / "model", **options)
    exact = scale != "f32"
    reason = "MatMulNBits in a float16 model has float16 scales, these are not exact in it"
    names = [f"model.layers.0.self_attn.{name}" for name in ("qkv_proj", "o_proj")]
    assert planned.not_ort == report.not_ort == ({} if exact else dict.fromkeys(names, reason))
    assert operators(tmp_path / "model")["MatMulNBits"] == (2 if exact else 0)


@pytest.mark.parametrize("desc_act", every([True, False]))
def test_gptq_linears_with_act_order(tmp_path, desc_act):
    folder = make_gptq_checkpoint(tmp_path / "checkpoint", desc_act=desc_act, num_hidden_layers=1)
    dense = "ort" if desc_act else "quantmoe"
    report = export(folder, tmp_path / "model", activations="float", dense=dense, logits="all", cache="f32")
    assert set(report.not_ort.values()) == ({"MatMulNBits has no perm"} if desc_act else set())
    want = dequantized(Skeleton(find_format(open_checkpoint(folder))))
    ids = tokens(2, 5)
    assert error(run(Generator(tmp_path / "model"), ids, (4, 1)), expected(want, ids)) < 2e-5


def test_what_stays_float_says_why(checkpoint, tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("down: layout cpu_panel does not carry it")

    monkeypatch.setattr(choose, "linear_spec", refuse)
    report = export(checkpoint("qwen3_moe"), tmp_path, layers=1)
    assert set(report.dequantized.values()) == {"layout cpu_panel does not carry it"}
    assert len(report.dequantized) == 4
    kept = [tensor for tensor in inspect(tmp_path)["dense"] if tensor["dequantized_from"]]
    assert {tensor["dequantized_because"] for tensor in kept} == {"layout cpu_panel does not carry it"}
    assert len(kept) == 4
    assert operators(tmp_path)["QuantLinear"] == 0


def test_explain_and_export_refuse_with_the_same_reason(tmp_path):
    folder = make_gptq_checkpoint(tmp_path / "checkpoint", group_size=8, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.0: .*group_size") as refused:
        export(folder, tmp_path / "model")
    ours = [c for entry in explain(folder) for c in entry["candidates"] if c.layout == "cpu_panel"]
    assert ours
    assert all(c.reason for c in ours)
    assert ours[0].reason in str(refused.value)


def rewritten(fixture: str, folder: Path, edit) -> Path:
    """A fixture with other tensors or another configuration."""
    ckpt = open_checkpoint(FIXTURES / fixture)
    tensors, config = {name: ckpt.tensor(name) for name in ckpt.names()}, dict(ckpt.config)
    quantization = config.pop("quantization_config")
    edit(tensors, quantization)
    return write_checkpoint(folder, tensors, quantization, **config)


def test_experts_of_other_bits_are_a_group(tmp_path):
    """GPTQModel's ``dynamic``. Formats of w13 and w2 may differ; groups are of experts that are alike in both."""
    module = "model.layers.0.mlp.experts.1.down_proj"
    four = find_format(open_checkpoint(FIXTURES / "gptqmodel-gptq-desc_act")).matrix(module)

    def widen(tensors, quantization):
        eight = dataclasses.replace(four, kind="int8", codes=four.codes + np.uint8(120))  # the same weights
        tensors.update({f"{module}.{name}": array for name, array in gptq(eight).items()})
        quantization["dynamic"] = {rf"+:{re.escape(module)}": {"bits": 8}}

    folder = rewritten("gptqmodel-gptq-desc_act", tmp_path, widen)
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    found = {g.title.removeprefix(layer.name): choose_layer(g, "cpu_panel", "float") for g in layer.groups()}
    formats = {title: (spec.w13.format, spec.w2.format) for title, spec in found.items()}
    assert formats == {" (0)": ("int4", "int4"), " (1)": ("int4", "int8")}
    np.testing.assert_array_equal(layer.expert(1).down.dequantize(), four.dequantize())
    assert [len(entry["modules"]) for entry in explain(folder)[:2]] == [1, 1]


def test_an_expert_that_no_token_reached_has_no_order(tmp_path):
    def sort(tensors, quantization):
        for name in tensors:
            if ".experts.0." in name and name.endswith("g_idx"):
                tensors[name] = np.sort(tensors[name])

    folder = rewritten("gptqmodel-gptq-desc_act", tmp_path, sort)
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    assert layer.expert(0).down.perm is None
    assert layer_spec(layer, cpu_panel, "float").w2.perm
    check_layer(layer, "float")


@pytest.mark.parametrize("layout", [cpu_panel, marlin])
def test_zero_points_of_one_expert_are_carried(tmp_path, layout):
    def move(tensors, quantization):
        for name in tensors:
            if ".experts." in name and name.endswith("weight_zero_point"):
                tensors[name] = np.full_like(tensors[name], ".experts.1.up_proj" in name)

    folder = rewritten("quark-int8", tmp_path, move)
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    spec = layer_spec(layer, layout, "float")
    assert spec.w13.zero_points == 1
    for expert in layer:
        layout.pack(expert, spec, *(native.aligned(layout.row_bytes(spec, name)) for name in ("w13", "w2")))


def expert_group(number: int, **weights):
    """An edit for :func:`rewritten`: an expert of the layer has a config group of its own, with these fields."""

    def edit(tensors, quantization):
        first = quantization["config_groups"]["group_0"]
        own = {"targets": [rf"re:.*experts\.{number}\..*"], "weights": first["weights"] | weights}
        quantization["config_groups"] = {"group_0": first, "group_1": first | own}
        for name in tensors:
            if f".experts.{number}." in name and name.endswith("_proj.weight"):
                tensors[name] = tensors[name].clip(-8, 7)  # what four bits hold
            if f".experts.{number}." in name and name.endswith("weight_zero_point"):
                tensors[name] = np.full_like(tensors[name], -0x77777778)  # the middle, eight times

    return edit


@pytest.mark.parametrize("layout", ["cpu_panel", "marlin"])
def test_an_expert_configured_otherwise_is_a_group(tmp_path, layout):
    """Its tensors have the names, types and shapes of the others'."""
    folder = rewritten("llmcompressor-w8a8", tmp_path, expert_group(1, num_bits=4))
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    found = {g.members: choose_layer(g, layout, "float").w13.format for g in layer.groups()}
    assert found == {(0,): "int8", (1,): "int4"}


@pytest.mark.parametrize("layout", [cpu_panel, marlin])
def test_a_symmetric_expert_beside_asymmetric_ones_is_carried(tmp_path, layout):
    folder = rewritten("llmcompressor-w4a16-asym", tmp_path, expert_group(0, symmetric=True))
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    assert layer.expert(0).up.zero_points is None
    spec = layer_spec(layer, layout, "float")
    assert spec.w13.zero_points == spec.w2.zero_points == 1
    for expert in layer:
        layout.pack(expert, spec, *(native.aligned(layout.row_bytes(spec, name)) for name in ("w13", "w2")))


@pytest.mark.parametrize(
    ("fixture", "suffix"), [("modelopt-fp8", "input_scale"), ("modelopt-w4a16_awq", "pre_quant_scale")]
)
def test_scales_of_gates_and_ups_inputs_differ_in_one_expert(tmp_path, fixture, suffix):
    """The dry run refuses it as the packing would."""

    def double(tensors, quantization):
        name = f"model.layers.0.mlp.experts.1.up_proj.{suffix}"
        tensors[name] = tensors[name] * 2

    folder = rewritten(fixture, tmp_path / "checkpoint", double)
    with pytest.raises(CheckpointError, match=r"experts\.1: gate and up have different (input|pre-)") as refused:
        plan(folder, tmp_path / "model", target="cuda")
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    spec = layer_spec(moe_layers(find_format(open_checkpoint(FIXTURES / fixture)))[0], marlin, None)
    with pytest.raises(ValueError, match="gate and up have") as packing:
        marlin.describe(layer.expert(1), spec.w13.activation_format)
    assert str(refused.value) == f"{folder}: {layer.name}.1: {packing.value}"


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan, None])
@pytest.mark.parametrize(
    ("fixture", "suffix"),
    [
        ("llmcompressor-nvfp4", "input_global_scale"),
        ("llmcompressor-fp8", "input_scale"),
        ("modelopt-nvfp4", "input_scale"),
        ("modelopt-fp8", "input_scale"),
        ("quark-fp8", "input_scale"),
    ],
)
def test_an_expert_that_no_token_reached_has_no_input_scale(tmp_path, fixture, suffix, value):
    """It is refused by name and stored value, unless activations are float."""
    module = "model.layers.0.mlp.experts.1.down_proj"
    name = f"{module}.{suffix}"

    def damage(tensors, quantization):
        tensors[name] = np.full_like(tensors[name], value or 0)
        if value is None:
            del tensors[name]

    folder = rewritten(fixture, tmp_path / "checkpoint", damage)
    said = f"{name} is {'missing' if value is None else value}, expected .*--activations float does without"
    with pytest.raises(CheckpointError, match=re.escape(said).replace(r"\.\*", ".*")):
        find_format(open_checkpoint(folder)).matrix(module)
    found = open_format(folder, None, None, activations="float").matrix(module)
    assert found.input_scale is None
    np.testing.assert_array_equal(found.codes, find_format(open_checkpoint(FIXTURES / fixture)).matrix(module).codes)
    if fixture == "modelopt-nvfp4" and value is None:
        assert plan(folder, tmp_path / "model", activations="float").packed
        assert export(folder, tmp_path / "model", activations="float").packed_bytes


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("llmcompressor-fp8-kv", "the KV cache is fp8_e4m3 (kv_cache_scheme: float8 per tensor)"),
        ("modelopt-fp8-kv", "the KV cache is fp8_e4m3 (kv_cache_scheme: float8 per tensor)"),
        ("compressed-tensors-0.20-w2a8-kv_int8", "the KV cache is int8 (kv_cache_scheme: int8 per tensor)"),
        (
            "compressed-tensors-0.20-w4a16-kv_head",
            "the KV cache stays float: strategy attn_head, supported: tensor; the checkpoint wants it quantized "
            "(kv_cache_scheme: float8 per attn_head; not used: model.layers.0.self_attn.k_scale and 1 more)",
        ),
        (
            "modelopt-nvfp4-kv",
            "the KV cache stays float: NVFP4 is none of FP8, INT8; --cache fp8 and --cache int8 have codes of one byte"
            "; the checkpoint wants it quantized (kv_cache_scheme: NVFP4; not used: "
            "model.layers.0.self_attn.k_proj.k_scale and 1 more)",
        ),
        (
            "quark-fp8-kv",
            "the KV cache stays float: its scales are of what k_proj and v_proj give, before the norm and the rotary "
            "embedding; the checkpoint wants it quantized (kv_cache_quant_config: *k_proj, *v_proj; not used: "
            "model.layers.0.self_attn.k_proj.output_scale and 1 more)",
        ),
    ],
)
def test_a_quantized_kv_cache_is_said(tmp_path, name, remark):
    folder = FIXTURES / name
    assert explain(folder)[-1]["remark"] == plan(folder, tmp_path / "model").kv_cache == remark
    if name.startswith("quark"):
        assert export(folder, tmp_path / "model").kv_cache == remark


def test_unpack_gives_a_gated_query_projection_as_it_was(exported, checkpoint, tmp_path):
    """In the file its gates come first."""
    folder = exported("qwen3_5_moe_text", activations="float")
    assert [n["gated_heads"] for n in inspect(folder)["linears"] if "gated_heads" in n]
    modules = unpack(folder, 1, tmp_path / "layer_1.safetensors")
    format = find_format(open_checkpoint(checkpoint("qwen3_5_moe_text")))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    stored = Checkpoint(tmp_path)
    found = [module for module in modules if "self_attn" in module]
    assert [module.rpartition(".")[2] for module in found] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    for module in found:
        want = format.matrix(module)
        fields = {f: stored.tensor(f"{module}.{f}") for f in ("codes", "scales")}
        same_matrix(QuantizedMatrix(kind=want.kind, group_size=want.group_size, **fields), want)


def test_unpack_gives_the_checkpoints_codes(exported, checkpoint, tmp_path):
    folder = exported("qwen3_moe", activations="float")
    modules = unpack(folder, 1, tmp_path / "layer_1.safetensors")
    format = find_format(open_checkpoint(checkpoint("qwen3_moe")))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    stored = Checkpoint(tmp_path)
    experts = next(layer for layer in moe_layers(format) if layer.index == 1)
    assert len(modules) == 3 * experts.num_experts + 4

    def read(module: str, like: QuantizedMatrix) -> QuantizedMatrix:
        have = {f: stored.tensor(f"{module}.{f}") for f in ("codes", "scales", "bias", "perm", "zero_points")
                if f"{module}.{f}" in stored}  # fmt: skip
        return QuantizedMatrix(kind=like.kind, group_size=like.group_size, **have)

    for e in range(experts.num_experts):
        for role in ("gate", "up", "down"):
            want = getattr(experts.expert(e), role)
            same_matrix(read(f"{experts.name}.{e}.{role}", want), want)
    for name in "qkvo":
        module = f"model.layers.1.self_attn.{name}_proj"
        same_matrix(read(module, format.matrix(module)), format.matrix(module))
    with pytest.raises(ModelError, match="no packed weights in layer 7; layers with some: 0 to 1"):
        unpack(folder, 7, tmp_path / "none.safetensors")
    assert not list(tmp_path.glob("none*"))


def test_explain(exported, checkpoint):
    for path, linears in ((checkpoint("qwen3_moe"), 8), (exported("qwen3_moe", activations="float"), 4 + 1)):
        found = explain(path)
        assert sum(len(entry["modules"]) for entry in found) == 2 + linears
        for entry in found:
            ours = next(c for c in entry["candidates"] if c.layout == "cpu_panel")
            assert ours.reason == ""
            assert [name for name, _ in ours.kernels] == list(native.kernels())
            assert "" in [reason for _, reason in ours.kernels]
    marlin = [c for entry in explain(checkpoint("qwen3_moe")) for c in entry["candidates"] if c.layout == "marlin"]
    assert marlin
    assert all(not c.reason and [name for name, _ in c.kernels] == ["cuda"] for c in marlin)


def test_layers_without_experts_are_no_model(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="the first 1 layers have no experts"):
        export(checkpoint("deepseek_v3"), tmp_path / "model", layers=1)


@pytest.mark.parametrize(("kind", "group_size"), every([("int4", 32), ("int8", -1)]))
def test_quantize(tmp_path, kind, group_size):
    folder = make_float_checkpoint(tmp_path / "float", "qwen3_moe", **TINY | {"num_hidden_layers": 1, "num_experts": 4})
    with pytest.raises(CheckpointError, match="no quantization configuration"):
        export(folder, tmp_path / "none")
    options = {"activations": "float", "quantize": kind, "group_size": group_size, "logits": "all", "cache": "f32"}
    planned = plan(folder, tmp_path / "model", **options)
    report = export(folder, tmp_path / "model", **options)
    assert (planned.packed, planned.dense) == (report.packed_bytes, pytest.approx(report.dense_bytes, rel=0.01))
    want = dequantized(Skeleton(Unquantized(open_checkpoint(folder), kind, group_size)))
    ids = tokens(2, 5)
    assert error(run(Generator(tmp_path / "model"), ids, (4, 1)), expected(want, ids)) < 2e-5
    attributes = inspect(tmp_path / "model")["layers"][0]["attributes"]
    assert (attributes["w2_format"], attributes["w2_group_size"]) == (kind, group_size)


@pytest.mark.parametrize("architecture", ["gpt_oss", "llama4_text"])
def test_quantize_fused_experts(checkpoint, tmp_path, architecture):
    """A float checkpoint's fused experts are those that the quantizer's one-by-one files hold, before rounding."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    folder = make_float_checkpoint(tmp_path / "float", architecture, intermediate_size=96, **sizes)
    format = Unquantized(open_checkpoint(folder), "int8", 32)
    layer = moe_layers(format)[0]
    tensor = format.ckpt.tensor(f"{layer.name}.gate_up_proj")[3].astype(np.float64)
    expert = layer.expert(3)
    halves = (tensor[:, ::2], tensor[:, 1::2]) if architecture == "gpt_oss" else np.split(tensor, 2, axis=1)
    for matrix, exact in zip((expert.gate, expert.up), halves, strict=True):
        assert np.abs(matrix.dequantize() - exact.T).max() < np.abs(exact).max() / 127
    assert (expert.down.bias is not None) == (architecture == "gpt_oss")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3", None), "cannot quantize to 'int3'; supported: int4, int8, mxfp4, nvfp4"),
        (("mxfp4", 64), "mxfp4 has groups of 32, not 64"),
        (("int4", 0), "group size 0"),
    ],
)
def test_quantize_refusals(checkpoint, tmp_path, arguments, message):
    folder = make_float_checkpoint(tmp_path, "qwen3_moe", **TINY | {"num_hidden_layers": 1, "num_experts": 4})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Unquantized(open_checkpoint(folder), *arguments)
    with pytest.raises(CheckpointError, match="already quantized"):
        Unquantized(open_checkpoint(checkpoint("qwen3_moe")), "int4")


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_rounding_keeps_its_bound(tmp_path, kind):
    folder = make_float_checkpoint(tmp_path, "qwen3_moe", **TINY | {"num_hidden_layers": 1, "num_experts": 4})
    format = Unquantized(open_checkpoint(folder), kind)
    module = "model.layers.0.self_attn.q_proj"
    m, exact = format.matrix(module), format.ckpt.tensor(f"{module}.weight").astype(np.float64)
    # e2m1's widest gap is 2 of 6, scales move by an e4m3 ulp or a binade
    bound = np.abs(exact).reshape(len(exact), -1, m.group_size).max(2) * (1 / 6 + (1 / 16 if kind == "nvfp4" else 1))
    assert (np.abs(m.dequantize() - exact) <= m.expand(bound) + 1e-12).all()
    assert (m.global_scale is not None) == (kind == "nvfp4")


def test_correction_bias_is_the_checkpoints(exported, checkpoint):
    """A buffer of the model and a tensor of the checkpoint; float32 in every graph."""
    graph = ir.load(exported("deepseek_v3", activations="float") / "model.onnx").graph
    (node,) = [node for node in graph if node.op_type == "MoERouting"]
    found = node.inputs[1].const_value.numpy()
    ckpt = open_checkpoint(checkpoint("deepseek_v3"))
    (name,) = [n for n in ckpt.names() if n.endswith("e_score_correction_bias")]
    assert np.array_equal(found, ckpt.tensor(name).astype(np.float32))
    assert np.abs(found).max() > 0


def test_divergence():
    logits = torch.randn(5, 9).numpy()
    assert divergence(logits, logits) == (0.0, 1.0)
    kl, same = divergence(-logits, logits)
    assert kl > 0
    assert same == 0


def test_command_line(exported, checkpoint, tmp_path):
    from typer.testing import CliRunner

    from quantmoe.exporter.cli import app

    for path in (checkpoint("qwen3_moe"), exported("qwen3_moe", activations="float")):
        done = CliRunner().invoke(app, ["inspect", str(path), "--explain"])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["inspect", str(exported("qwen3_moe", activations="float"))])
    assert done.exit_code == 0, done.output
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    output = tmp_path / "layer.safetensors"
    done = CliRunner().invoke(app, ["unpack", str(folder), "--layer", "0", "--output", str(output)])
    assert done.exit_code == 0, done.output
    assert output.exists()
