"""Dry run, explain and export ask exporter/choosing/choose.py, which reads headers; what is packed is what it chose."""

from __future__ import annotations

import dataclasses
import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from export.weights.test_layers import layer_of
from support.harness.sweeps import every
from support.models.checkpoints import (
    TINY,
    check_headers,
    make_float_checkpoint,
    make_gptq_checkpoint,
    of_node,
    same_matrix,
    write_safetensors,
)
from support.models.encoders import CASES, Case, nibbles, with_bias
from support.operators.specs import moe_spec, projection

from quantmoe.custom_ops import cuda, native
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import parted, unrotated
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.choosing.choose import Candidate, layer_candidate, linear_matrix
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.cli import app
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.reading import formats
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import MoELayer, find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.weights.rounding import HEAD_GROUPS
from quantmoe.exporter.reading.weights.unquantized import KINDS, Unquantized
from quantmoe.exporter.surveying.explain import explain
from quantmoe.exporter.targets import TARGETS, of_layout
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

FIXTURES = Path(__file__).parents[2] / "fixtures"
Specs = dict[str, MoESpec | LinearSpec]


class Traced(Exception):  # noqa: N818
    """In the place of the tracing."""


def chosen(folder: Path, out: Path, target: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...] | str:
    """What an export would trace with: attributes of layers and of linears by checkpoint module, the modules of each
    linear, and the layers with what their nodes have; or its refusal."""

    def trace(skeleton, chosen, target, cache):
        found = {skeleton.experts[name].name: spec for name, spec in chosen.layers.items()}
        parts = {chosen.source(name): [*parts.values()] for name, parts in chosen.parts.items()}
        linears = {chosen.source(name): spec for name, spec in chosen.linears.items()}
        raise Traced(found, linears, parts, [*chosen.experts.values()])

    with monkeypatch.context() as patch:
        patch.setattr("quantmoe.exporter.writing.graph_writer.trace", trace)
        try:
            export(folder, out, target=target)
        except Traced as traced:
            return traced.args
        except CheckpointError as refusal:
            return str(refusal)
    raise AssertionError


def packed(layer: MoELayer, spec: MoESpec) -> int:
    """Packs a layer's experts; its node's attributes are those that they have together. Returns the bytes."""
    layout, size, described = LAYOUTS[spec.w13.layout], 0, []
    for expert in of_node(layer):
        described.append(layout.describe(expert, spec.w13.activation_format, spec.w2.activation_format))
        rows = [native.aligned(layout.row_bytes(spec, projection)) for projection in ("w13", "w2")]
        layout.pack(expert, spec, *rows)
        size += sum(map(len, rows))
    assert functools.reduce(join, described) == (spec.w13, spec.w2)
    return size


def refused(call, *args, **options) -> str:
    with pytest.raises(CheckpointError) as error:
        call(*args, **options)
    return str(error.value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", every(sorted(path.parent.name for path in FIXTURES.glob("*/config.json")), 16))
def test_a_fixture_is_packed_as_its_headers_say(name, target, tmp_path, monkeypatch):
    folder, layout = FIXTURES / name, TARGETS[target].layout
    format = find_format(open_checkpoint(folder)).with_widths(TARGETS[target].own_widths)
    linears = [entry for entry in explain(folder) if not all(name.endswith("mlp.gate") for name in entry["modules"])]
    reasons = [c.reason for entry in linears for c in entry["candidates"] if c.layout == layout]
    found = chosen(folder, tmp_path / "model", target, monkeypatch)
    if isinstance(found, str):
        assert refused(plan, folder, tmp_path / "model", target=target) == found
        own = ("k_proj.bias has shape", "takes no f32: use --dtype f16")  # of no linear layer, of no layer's headers
        assert found.removeprefix(f"{folder}: ") in reasons or any(text in found for text in own)
        return
    layers, linears, parts, experts = found
    planned = plan(folder, tmp_path / "model", target=target)
    assert {module: spec for module, (_, spec, _) in planned.layers.items()} == layers
    assert {module: spec for module, (_, spec, _) in planned.linears.items()} == linears
    assert set(planned.dequantized.values()) == set(filter(None, reasons))
    for layer in experts:
        assert packed(layer, layers[layer.name]) == planned.layers[layer.name][2]
    for module, spec in linears.items():
        m, layout = linear_matrix(format, parts[module], "exact")[0], LAYOUTS[spec.w.layout]
        assert layout.describe_down(m, spec.w.activation_format) == spec.w
        row = native.aligned(layout.row_bytes(spec.moe, "w2"))
        layout.pack_down(m, spec.moe, row)
        assert len(row) == planned.linears[module][2]
        apart = [unrotated(format.matrix_of(part)) for part in parts[module]]
        for a, b in zip(apart, parted(m, [len(part.codes) for part in apart]), strict=True):
            same_matrix(a, b)


@pytest.mark.parametrize(
    ("name", "target"),
    every(
        [
            ("gptqmodel-gptq8-asym-desc_act", "cpu"),
            ("modelopt-w4a8_mxfp4_fp8", "cuda"),  # its linears stay float
        ]
    ),
)
def test_a_whole_export_is_as_planned(name, target, tmp_path):
    planned = plan(FIXTURES / name, tmp_path / "model", target=target)
    report = export(FIXTURES / name, tmp_path / "model", target=target)
    assert {module: (text, spec) for module, (text, spec, _) in planned.layers.items()} == report.layers
    assert {module: (text, spec) for module, (text, spec, _) in planned.linears.items()} == report.linears
    assert (planned.packed, planned.dequantized) == (report.packed_bytes, report.dequantized)
    assert planned.dense == pytest.approx(report.dense_bytes, rel=0.01)  # ours has masks and the like, too


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_headers_describe_what_an_encoder_wrote(case: Case, tmp_path):
    for scale in case.scales:
        check_headers(layer_of(tmp_path / scale, case, case.group_sizes[0], scale))


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_headers_describe_what_is_quantized_while_it_is_read(architecture, tmp_path):
    folder = make_float_checkpoint(tmp_path, architecture, **TINY | {"num_hidden_layers": 1, "num_experts": 4})
    for kind in KINDS:
        (layer,) = moe_layers(Unquantized(open_checkpoint(folder), kind))
        check_headers(layer)


def test_contributings_format_is_described_as_it_decodes(tmp_path, monkeypatch):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "acme.py"))
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, example["Acme"]))

    def encode(matrix):
        return with_bias({"acme_q": nibbles(matrix.codes), "acme_s": matrix.scales}, matrix)

    case = Case("acme", encode, {"quant_method": "acme"}, "int4", (64,), ("f16",), k_step=2)
    layer = layer_of(tmp_path, case, 64, "f16")
    for layout in LAYOUTS:
        found = layer_candidate(layer, layout, of_layout(layout).default_activations)
        if layout == "qmoe":  # 160 features are two and a half groups
            assert found.reason.endswith("QMoE has whole groups of 64, found [96, 160]")
            continue
        spec = found.spec
        assert [(p.scale_type, p.bias, p.group_size) for p in (spec.w13, spec.w2)] == [("f16", 1, 64)] * 2
        assert packed(layer, spec)


def damage(folder: Path, out: Path, tensors=None, **quantization) -> Path:
    """A copy of a checkpoint with other tensors and fields of the quantizer's configuration."""
    ckpt = open_checkpoint(folder)
    out.mkdir()
    write_safetensors(out / "model.safetensors", {n: ckpt.tensor(n) for n in ckpt.names()} | (tensors or {}))
    config = ckpt.config | {"quantization_config": ckpt.quantization | quantization}
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


EXPERTS = "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("gptqmodel-gptq-desc_act", {"group_size": 64}, "gate_proj.qzeros is I32 [2, 16], expected I32 [1, 16] (GPTQ)"),
        ("autoawq-gemm", {"group_size": 16}, "gate_proj.qzeros is I32 [2, 16], expected I32 [4, 16] (AWQ)"),
        ("llmcompressor-w4a16-asym", 64, "weight_zero_point is I32 [16, 2], expected I32 [16, 1] (compressed-tensors)"),
    ],
)  # fmt: skip
def test_a_group_size_that_the_tensors_contradict(name, fields, text, tmp_path, monkeypatch):
    if isinstance(fields, int):
        groups = open_checkpoint(FIXTURES / name).quantization["config_groups"]
        for group in groups.values():
            group["weights"]["group_size"] = fields
        fields = {"config_groups": groups}
    folder = damage(FIXTURES / name, tmp_path / "damaged", **fields)
    found = refused(plan, folder, tmp_path / "model")
    assert text in found
    assert chosen(folder, tmp_path / "model", "cpu", monkeypatch) == found


@pytest.mark.parametrize("desc_act", [True, False])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (99, "g_idx ranges from 0 to 99, expected 0 to 1"),
        (-1, "g_idx ranges from -1 to 1, expected 0 to 1"),
        (1, "g_idx puts 31 input features into group 0, expected 32 in each but a short last"),
    ],
)
def test_a_damaged_g_idx(value, text, desc_act, tmp_path, monkeypatch):
    """Of the last expert, whatever the configuration says of act-order."""
    sound = make_gptq_checkpoint(tmp_path / "sound", num_hidden_layers=1, num_experts=4, hidden_size=64,
                                 intermediate_size=64, moe_intermediate_size=64)  # fmt: skip
    name = f"{EXPERTS}.3.down_proj.g_idx"
    order = open_checkpoint(sound).tensor(name).copy()
    order[0] = value
    folder = damage(sound, tmp_path / "damaged", {name: order}, desc_act=desc_act)
    found = refused(plan, folder, tmp_path / "model")
    assert f"{name} {text.removeprefix('g_idx ')}" in found
    assert chosen(folder, tmp_path / "model", "cpu", monkeypatch) == found


@pytest.mark.parametrize("target", ["cpu", "cuda"])  # QMoE has no act-order
def test_zero_points_and_orders_are_read_and_not_guessed(target, tmp_path, monkeypatch):
    """A configuration that says symmetric and no act-order, tensors of one expert that have both."""
    sound = make_gptq_checkpoint(tmp_path / "sound", num_hidden_layers=1, num_experts=4, hidden_size=64,
                                 intermediate_size=64, moe_intermediate_size=64)  # fmt: skip
    ckpt, name = open_checkpoint(sound), f"{EXPERTS}.2.down_proj"
    zeros = ckpt.tensor(f"{name}.qzeros").copy()
    zeros[0, 0] ^= 1
    tensors = {f"{name}.qzeros": zeros, f"{name}.g_idx": ckpt.tensor(f"{name}.g_idx")[::-1].copy()}
    folder = damage(sound, tmp_path / "odd", tensors)
    layers, *_ = chosen(folder, tmp_path / "model", target, monkeypatch)
    assert (layers[EXPERTS].w2.perm, layers[EXPERTS].w2.zero_points) == (1, 1)
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    assert packed(layer, layers[EXPERTS]) == plan(folder, tmp_path / "model", target=target).layers[EXPERTS][2]


def test_headers_take_no_memory(tmp_path):
    """An outline is no larger than its vectors, whatever the checkpoint's size."""
    folder = make_gptq_checkpoint(tmp_path, desc_act=True, num_hidden_layers=1, num_experts=4)
    (layer,) = moe_layers(find_format(open_checkpoint(folder)))
    whole, outline = layer.expert(1), layer.outline().expert(1)
    for a, b in ((whole.gate, outline.gate), (whole.up, outline.up), (whole.down, outline.down)):
        assert b.codes.strides == (0, 0)
        assert (a.shape, a.codes.dtype, a.scale_type) == (b.shape, b.codes.dtype, b.scale_type)
        np.testing.assert_array_equal(a.perm, b.perm)


CARRIED = moe_spec(
    num_experts=4,
    hidden_size=64,
    intermediate_size=64,
    **{w: projection("int4", 32, "bf16", "none", layout="marlin", layout_version=2) for w in ("w13", "w2")},
)


def test_explain_says_where_the_cuda_kernels_are(monkeypatch, tmp_path):
    def verdict() -> str:
        ((name, reason),) = Candidate("marlin", CARRIED, "").kernels
        assert name == "cuda"
        return reason

    def raised(error):
        def fail(*_):
            raise error

        return fail

    cuda.library.cache_clear()
    monkeypatch.setenv("QUANTMOE_CUDA_LIBRARY", str(tmp_path / "none.so"))
    assert verdict() == "library not found"
    (tmp_path / "none.so").write_text("no library", encoding="utf-8")
    assert verdict().startswith(f"library cannot be loaded: {tmp_path / 'none.so'}")
    monkeypatch.setattr(cuda, "query", raised(ValueError("CUDA device 0: no CUDA-capable device is detected")))
    assert verdict() == "compiled, no GPU here (CUDA device 0: no CUDA-capable device is detected)"
    monkeypatch.setattr(cuda, "query", lambda: cuda.H200)
    monkeypatch.setattr(cuda, "library", lambda: None)
    monkeypatch.setattr(cuda, "_plan_one", raised(ValueError("compute capability 7.5, the kernels need 8.0 or later")))
    assert verdict() == "compute capability 7.5, the kernels need 8.0 or later"
    monkeypatch.setattr(cuda, "_plan_one", lambda *_: None)
    assert verdict() == ""
    refused = Candidate("marlin", CARRIED, "w2_group_size is 48")
    assert refused.kernels == [("cuda", "w2_group_size is 48")]


def test_choosing_needs_no_torch():
    module = "quantmoe.exporter.choosing.choose"
    code = f"import sys, {module}; print({{'torch', 'transformers', 'onnx_ir'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


def test_the_command_line_is_made_of_the_fields_of_options():
    """In their order, with their defaults; every value that the code knows is one of an option."""
    parameters = typer.main.get_command(app).commands["export"].params
    own = [p for p in parameters if p.name not in ("checkpoint", "outdir", "force", "dry_run")]
    assert {p.name: p.default for p in own} == {field.name: field.default for field in dataclasses.fields(Options)}
    values = {field.name: field.metadata.get("values") for field in dataclasses.fields(Options)}
    assert tuple(values["quantize"]) == tuple(KINDS)
    assert tuple(values["lm_head"]) == tuple(HEAD_GROUPS)
    assert {*values["dtype"]} == {kind for target in TARGETS.values() for kind in target.graph_types}


@pytest.mark.parametrize("call", [export, plan])
def test_an_unknown_option_is_an_error(call, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'activation'"):
        call(tmp_path, tmp_path / "out", activation="int8")
    with pytest.raises(OptionError, match="quantize is 'int5', expected one of: int4, int8, "):
        call(tmp_path, tmp_path / "out", quantize="int5")
