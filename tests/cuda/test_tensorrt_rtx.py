"""Whole exported models through TensorRT-RTX's parser and builder with the plug-in, for GPUs that need not be here."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto
from support.operators.specs import attention_spec

import quantmoe

if "QUANTMOE_TRT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the plug-in", allow_module_level=True)
found = importlib.util.find_spec("tensorrt_rtx_libs")
if found is None:
    pytest.skip("TensorRT-RTX is not installed", allow_module_level=True)
from support.cuda.attention_model import attention_model  # noqa: E402

from quantmoe.exporter.inspecting.inspect import inspect  # noqa: E402

SAMPLE = Path(__file__).parents[2] / "samples/tensorrt_rtx/build_engine.py"


#: by the model's type; NVFP4 has quantized activations too
SCHEMES = {"bf16": "W4A16", "f16": "NVFP4"}
SIZES = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES |= {"num_hidden_layers": 2, "moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models.tiny import make_checkpoint

    out = tmp_path_factory.mktemp("exported")
    for dtype, scheme in SCHEMES.items():
        group = {"group_size": None} if scheme == "NVFP4" else {}  # the preset's
        made = make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3_moe", scheme, **SIZES, **group)
        quantmoe.export(made, out / dtype, target="cuda", dtype=dtype)
    return out


def run(links: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # The builder opens libtensorrt_rtx.so by that name, which the wheel does not have.
    library = Path(str(found.submodule_search_locations[0])) / "libtensorrt_rtx.so.1"
    (links / "libtensorrt_rtx.so").symlink_to(library)
    environment = os.environ | {"LD_LIBRARY_PATH": str(links)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=600)


def build(model: Path, plan: Path, links: Path) -> subprocess.CompletedProcess[str]:
    return run(links, SAMPLE, model, plan, "89", "120")


@pytest.mark.parametrize("dtype", SCHEMES)
def test_engine(folder, tmp_path, dtype):
    done = build(folder / dtype, tmp_path / "plan", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = [node.op_type for node in ir.load(folder / dtype / "model.onnx").graph if node.domain == "quantmoe"]
    linears = 4 if dtype == "bf16" else 8  # q, k and v are one, but where each has an input scale of its own
    of_layers = {"QuantMoE": 2, "MoERouter": 2, "CachedAttention": 2, "AddRMSNorm": 5, "TokenRows": 1}
    assert {op: nodes.count(op) for op in set(nodes)} == of_layers | {"QuantLinear": linears}
    assert f"{len(nodes)} quantmoe layers" in done.stdout
    assert (tmp_path / "plan").stat().st_size > 100_000
    # The plan holds the attributes: names, and strings with their NUL.
    plan = (tmp_path / "plan").read_bytes()
    assert b"w13_layout_version" in plan
    assert b"marlin\0" in plan
    assert (b"nvfp4\0" in plan) == (SCHEMES[dtype] == "NVFP4")
    assert b"workspace_bytes" in plan, "what the engine's builder was told, to be held to where it runs"


def test_engine_without_its_experts(tmp_path_factory, tmp_path):
    """--external-experts: the plan is smaller by all of them, and says where they are."""
    from support.models.tiny import make_checkpoint

    made = make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3_moe", **SIZES | {"moe_intermediate_size": 768})
    sizes = {}
    for kind in ("inputs", "external"):
        quantmoe.export(made, tmp_path / kind, target="cuda", external_experts=kind == "external")
        (tmp_path / f"of_{kind}").mkdir()
        done = build(tmp_path / kind, tmp_path / f"plan_{kind}", tmp_path / f"of_{kind}")
        assert done.returncode == 0, done.stdout + done.stderr
        sizes[kind] = (tmp_path / f"plan_{kind}").stat().st_size
    layers = inspect(tmp_path / "external")["layers"]
    experts = sum(layer["bytes"] for layer in layers)
    assert experts > 1_000_000
    assert abs(sizes["inputs"] - sizes["external"] - experts) < 200_000
    plan = (tmp_path / "plan_external").read_bytes()
    for node in ir.load(tmp_path / "external/model.onnx").graph:
        if node.op_type == "QuantMoE":
            for name in ("w13_external", "w2_external", "w13_identity", "w2_identity"):
                assert node.attributes[name].as_string().encode() + b"\0" in plan


@pytest.mark.parametrize("window", [1, 3])
def test_engine_of_a_hybrid_model(tmp_path_factory, tmp_path, window):
    from support.models.tiny import make_checkpoint

    sizes = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"num_hidden_layers": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
    made = make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3_next", full_attention_interval=2, **sizes)
    quantmoe.export(made, tmp_path / "model", target="cuda", state_window=window)
    done = build(tmp_path / "model", tmp_path / "plan", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = [node.op_type for node in ir.load(tmp_path / "model/model.onnx").graph if node.domain == "quantmoe"]
    assert nodes.count("CausalConv") == nodes.count("GatedDelta") == nodes.count("CachedAttention") == 1
    assert f"{len(nodes)} quantmoe layers" in done.stdout


def test_engine_of_lightning_attention(tmp_path_factory, tmp_path):
    from support.models.tiny import make_checkpoint

    sizes = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
    kinds = ["linear_attention", "full_attention"]
    made = make_checkpoint(tmp_path_factory.mktemp("made"), "minimax", layer_types=kinds, **sizes)
    quantmoe.export(made, tmp_path / "model", target="cuda")
    done = build(tmp_path / "model", tmp_path / "plan", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [str(size) for size in state_of(tmp_path / "model/model.onnx")] == ["batch_size", "4", "64", "64"]


def state_of(model: Path) -> ir.Shape:
    (state,) = (value for value in ir.load(model).graph.inputs if value.name.endswith("recurrent_state"))
    return state.shape


def test_engine_of_multi_token_prediction(tmp_path_factory, tmp_path):
    from export.architectures.test_hybrid import rewritten
    from export.generation.test_mtp import REWRITE
    from support.models.tiny import make_checkpoint

    sizes = {"num_hidden_layers": 2, "moe_intermediate_size": 96, "intermediate_size": 96}
    made = make_checkpoint(tmp_path_factory.mktemp("made"), "deepseek_v3", **sizes)
    source = rewritten(made, tmp_path / "checkpoint", REWRITE["deepseek_v3"], lambda config: config)
    quantmoe.export(source, tmp_path / "model", target="cuda", mtp=True)
    done = build(tmp_path / "model/mtp.onnx", tmp_path / "plan", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = [node.op_type for node in ir.load(tmp_path / "model/mtp.onnx").graph if node.domain == "quantmoe"]
    assert (nodes.count("QuantMoE"), nodes.count("MoERouter")) == (1, 1)
    assert f"{len(nodes)} quantmoe layers" in done.stdout


def test_engine_of_a_slice(tmp_path_factory, tmp_path):
    """A builder needs no other ranks and no NCCL. With --data-parallel the others are in the graph."""
    from support.models.tiny import make_checkpoint

    sizes = {"hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    sizes |= {"num_hidden_layers": 2, "moe_intermediate_size": 128}
    made = make_checkpoint(tmp_path_factory.mktemp("made"), **sizes)
    quantmoe.export(made, tmp_path / "tp", target="cuda", tensor_parallel=2, logits="all")
    options = {"tensor_parallel": 2, "expert_parallel": True, "data_parallel": True}
    quantmoe.export(made, tmp_path / "dp", target="cuda", **options)
    found = {}
    for kind in ("tp", "dp"):
        (tmp_path / f"of_{kind}").mkdir()
        done = build(tmp_path / kind / "rank1", tmp_path / "plan", tmp_path / f"of_{kind}")
        assert done.returncode == 0, done.stdout + done.stderr
        nodes = [node.op_type for node in ir.load(tmp_path / kind / "rank1/model.onnx").graph]
        found[kind] = {op: nodes.count(op) for op in ("AllReduceAddRMSNorm", "AllGather", "ReduceScatter")}
    assert found == {
        "tp": {"AllReduceAddRMSNorm": 4, "AllGather": 1, "ReduceScatter": 0},
        "dp": {"AllReduceAddRMSNorm": 0, "AllGather": 2, "ReduceScatter": 2},
    }


#: open: only dlopen, as trtexec --staticPlugins; load and builder: the global registry and the builder's;
#: runtime: another one, as trtexec --dynamicPlugins has after the builder's
@pytest.mark.parametrize(
    "steps", ["open", "load", "open load", "builder runtime", "open builder runtime", "open load unload load"]
)
def test_registries(folder, tmp_path, steps):
    """However the library comes into the process the model parses, and TensorRT has nothing to say about it."""
    code = f"""
import ctypes
import tensorrt_rtx_bindings as trt
import quantmoe
path, log = quantmoe.trt_library_path(), trt.Logger(trt.Logger.WARNING)
builder, registry = trt.Builder(log), trt.get_plugin_registry()
for step in {steps.split()!r}:
    if step == "open":
        ctypes.CDLL(path)
    elif step == "unload":
        registry.deregister_library(library)
    else:
        of = {{"load": registry, "builder": builder.get_plugin_registry()}}.get(step)
        library = (of or trt.Runtime(log).get_plugin_registry()).load_library(path)
        assert library, step
names = [c.name for c in builder.get_plugin_registry().all_creators_recursive]
assert [names.count(n) for n in ("QuantMoE", "QuantLinear", "MoERouting", "CachedAttention")] == [1] * 4, names
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file({str(folder / "bf16/model.onnx")!r}), parser.get_error(0).desc()
"""
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "egister" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("op_version", ir.AttrInt64("op_version", 99), "op_version is 99, this library knows 1"),
        ("w2_perm", None, "attribute w2_perm is required"),
        ("w13_format", ir.AttrString("w13_format", "int7"), 'w13_format is "int7", the operator defines: int4'),
    ],
)
def test_bad_node(folder, tmp_path, name, new, message):
    model = ir.load(folder / "f16/model.onnx")
    node = next(node for node in model.graph if node.op_type == "QuantMoE")
    del node.attributes[name]
    if new is not None:
        node.attributes.add(new)
    (tmp_path / "model.onnx.data").symlink_to(folder / "f16/model.onnx.data")
    ir.save(model, tmp_path / "model.onnx")
    done = build(tmp_path, tmp_path / "plan", tmp_path)
    assert done.returncode != 0
    assert message in done.stdout  # where TensorRT's logger writes
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("fixed", [False, True], ids=["growing", "fixed"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize("norm", ["head", "none"])
def test_attention(tmp_path, norm, kind, fixed):
    """A cache that grows from nothing or has one size; without norms and rotary, too, whose inputs are empty."""
    spec = attention_spec(32, 4, 128, qk_norm=norm, rotary_size=128 if norm == "head" else 0)
    onnx.save(attention_model(spec, kind), tmp_path / "model.onnx")
    code = f"""
import tensorrt_rtx_bindings as trt
import quantmoe
log = trt.Logger(trt.Logger.WARNING)
builder = trt.Builder(log)
assert builder.get_plugin_registry().load_library(quantmoe.trt_library_path())
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file({str(tmp_path / "model.onnx")!r}), parser.get_error(0).desc()
assert [tuple(network.get_output(i).shape) for i in range(3)] == [(-1, -1, 4096)] + [(-1, 4, -1, 128)] * 2
profile = builder.create_optimization_profile()
for i in range(network.num_inputs):
    tensor = network.get_input(i)
    ranges = []
    for batch, new, past in ((1, 1, 0), (1, 1, 32), (2, 1 if {fixed} else 16, 64)):
        past, total = (64, 64) if {fixed} else (past, past + new)
        known = {{"past_key": {{2: past}}, "past_value": {{2: past}}, "rows": {{}}, "attention_mask": {{1: total}}}}
        sizes = {{0: batch}} | known.get(tensor.name, {{1: new}})
        ranges.append([sizes.get(d, size) for d, size in enumerate(tensor.shape)])
    profile.set_shape(tensor.name, *ranges)
config = builder.create_builder_config()
config.add_optimization_profile(profile)
config.num_compute_capabilities = 1
config.set_compute_capability(trt.ComputeCapability.SM89, 0)
plan = bytes(builder.build_serialized_network(network, config))
assert b"qk_norm" in plan and b"{norm}\\0" in plan
"""
    done = run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
