"""``--target ort``: files of ONNX Runtime's own operators, run without a library of ours on its CPU provider."""

from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from export.conftest import HYBRID
from export.graph.test_model import error, expected, run, tokens
from support.harness.sweeps import every
from support.models.checkpoints import make_gptq_checkpoint, same_matrix
from support.operators.cases import Case
from support.operators.specs import moe_spec, routing_spec

from quantmoe.custom_ops.layouts import join, qmoe
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.reference import quant_moe, route
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.graph.lowering.qmoe import check_domains, tensor_name, to_qmoe
from quantmoe.exporter.graph.lowering.weights import Weight
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.fit import fit
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.surveying.explain import explain
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

#: float32 on both sides, sums in another order: 8e-7 of the largest logit was seen
BOUND = 2e-5


class Plain:
    """A session as any program makes it, with the methods that :func:`run` calls."""

    def __init__(self, folder: Path):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])

    def start(self, batch: int) -> dict[str, np.ndarray]:
        past = [i for i in self.session.get_inputs() if i.name.startswith("past_key_values.")]
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        sizes = {"batch_size": batch, "past_sequence_length": 0}
        return {i.name: np.zeros([sizes.get(size, size) for size in i.shape], types[i.type]) for i in past}

    def step(self, ids: np.ndarray, past: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        before = next(keys.shape[2] for name, keys in past.items() if name.endswith(".key"))
        given = {
            "input_ids": ids,
            "attention_mask": np.ones((len(ids), before + ids.shape[1]), np.int64),
            "position_ids": np.tile(np.arange(before, before + ids.shape[1]), (len(ids), 1)),
        }
        known = {i.name for i in self.session.get_inputs()}
        names = [name.replace("past_key_values", "present") for name in past]
        feed = past | {name: value for name, value in given.items() if name in known}
        logits, *present = self.session.run(["logits", *names], feed)
        return logits, dict(zip(past, present, strict=True))


def qmoe_nodes(folder: Path) -> list[ir.Node]:
    return [node for node in ir.load(folder / "model.onnx").graph if node.op_type == "QMoE"]


def check_unpacked(checkpoint: Path, folder: Path, to: Path) -> None:
    """What unpack writes of every layer with experts is what the checkpoint has, bit for bit."""
    format = find_format(open_checkpoint(checkpoint))
    to.mkdir()
    (to / "config.json").write_text("{}", encoding="utf-8")
    for layer in moe_layers(format):
        modules = unpack(folder, layer.index, to / "layer.safetensors", force=True)
        stored = Checkpoint(to)
        experts = {f"{layer.name}.{e}": layer.expert(e) for e in range(layer.num_experts)}
        want = {f"{name}.{role}": getattr(e, role) for name, e in experts.items() for role in ("gate", "up", "down")}
        assert want.keys() <= set(modules)
        for module in modules:
            m = want.get(module) or format.matrix_of(module)
            fields = ("codes", "scales", "zero_points", "bias")
            have = {f: stored.tensor(f"{module}.{f}") for f in fields if f"{module}.{f}" in stored}
            same_matrix(QuantizedMatrix(kind=m.kind, group_size=m.group_size, **have), m)


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    every(
        [
            ("qwen3_moe", "W4A16"),
            ("qwen3_moe", "W4A16_ASYM"),
            ("mixtral", "W4A16"),
            ("gpt_oss", "W4A16"),
            ("olmoe", "W4A16"),  # weights of a softmax over all experts
            ("deepseek_v3", "W4A16"),  # sigmoids, groups, a correction bias; shared experts
        ]
    ),
)
def test_equals_pytorch_and_our_operators(exported, checkpoint, reference, tmp_path, architecture, scheme):
    folder = exported(architecture, scheme, target="ort")
    assert {node.domain for node in ir.load(folder / "model.onnx").graph} == {"", "com.microsoft"}
    assert not list(folder.glob("*.so"))
    ids = tokens(2, 7)
    found = run(Plain(folder), ids, (5, 1, 1))
    assert error(found, expected(reference(architecture, scheme), ids)) < BOUND
    ours = run(Generator(exported(architecture, scheme, activations="float")), ids, (5, 1, 1))
    assert error(found, ours) < BOUND
    for node in qmoe_nodes(folder):
        assert node.attributes["normalize_routing_weights"].as_int() == 1
        assert node.attributes["weights_prepacked"].as_int() == 0
        assert len(node.inputs) < qmoe.GLOBAL_SCALES[0]  # no router_weights, which WebGPU lacks
        factor = [use.node.op_type for use in node.outputs[0].uses()] == ["Mul"]
        assert factor == (architecture in ("olmoe", "deepseek_v3"))
    check_unpacked(checkpoint(architecture, scheme), folder, tmp_path / "layers")


@pytest.mark.parametrize(
    ("architecture", "opset"),
    every([("qwen3_next", None), ("qwen3_5_moe_text", 27), ("qwen3_next", 20), ("gpt_oss", 27), ("deepseek_v3", 23)]),
)
def test_standard_operators(exported, reference, architecture, opset):
    """Linear attention and, with an opset, nothing of com.microsoft's but what has packed weights."""
    folder = exported(architecture, target="ort", **({} if opset is None else {"opset": opset}))
    model = ir.load(folder / "model.onnx")
    if opset:
        assert model.graph.opset_imports[""] == opset
        assert {n.op_type for n in model.graph if n.domain} == {"QMoE", "MatMulNBits"}
        onnx.checker.check_model(folder / "model.onnx")
    found = {node.op_type for node in model.graph}
    newest = {"LinearAttention", "CausalConvWithState"} if opset in (None, 27) else {"Scan", "Conv"}
    assert (newest <= found) == (architecture in HYBRID)
    assert ("RMSNormalization" in found) == ((opset or 0) >= 23)
    assert ("Attention" in found) == (
        (opset or 0) >= 23 and architecture in HYBRID
    )  # no sinks, no other width of values
    assert inspect(folder)["metadata"]["onnxruntime"] == ("1.32" if opset == 27 else "1.28")
    ids = tokens(2, 9)
    assert error(run(Plain(folder), ids, (5, 1, 3)), expected(reference(architecture), ids)) < BOUND


def test_padding_on_the_left(exported):
    """Padding on the left, as transformers pads: each row's logits are what it has alone."""
    plain = Plain(exported("qwen3_next", target="ort"))
    ids, padding = tokens(2, 9), np.array([[4], [0]])
    place = np.arange(9) - padding
    given = {"input_ids": ids, "attention_mask": np.int64(place >= 0), "position_ids": np.maximum(place, 0)}
    (found,) = plain.session.run(["logits"], given | plain.start(2))
    for row, (left,) in zip((0, 1), padding, strict=True):
        assert error(found[row, left:], run(plain, ids[row : row + 1, left:], (9 - left,))[0]) < BOUND


def one_layer(case: Case, factor: bool) -> tuple[ir.Model, ir.Value]:
    """A QuantMoE after its MoERouting and, with ``factor``, a factor of the weights; and its output."""
    sizes = {"x": case.hidden, "logits": case.experts, "factor": 1}
    inputs = [
        ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", size]))
        for name, size in sizes.items()
    ]
    x, logits, factors = inputs
    routing = routing_spec(case.experts, case.top_k, "topk_softmax").attributes()
    router = ir.node("MoERouting", [logits, None], routing, domain="quantmoe", num_outputs=2)
    times = ir.node("Mul", [router.outputs[1], factors])
    packed = [ir.Value(name=f"moe.{name}") for name in ("w13", "w2")]
    weights = times.outputs[0] if factor else router.outputs[1]
    node = ir.node("QuantMoE", [x, router.outputs[0], weights, *packed], domain="quantmoe", name="moe")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", x.type, x.shape
    graph = ir.Graph(inputs, [y], nodes=[router, times, node], opset_imports={"": 20, "quantmoe": 1}, name="layer")
    return ir.Model(graph, ir_version=10), y


@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("zero_points", [False, True])
def test_one_node(activation, factor, zero_points):
    case = Case(weights=("int4", "bf16", zero_points), activation=activation, bias=True, activation_format="none")
    experts = [case.expert(np.random.default_rng(e)) for e in range(case.experts)]
    pair = reduce(join, (qmoe.describe(expert, "none") for expert in experts))
    alpha, limit = (float(np.float32(1.702)), 7.0) if activation == "swiglu_oai" else (0.0, 0.0)
    spec = moe_spec(case.experts, case.hidden, case.intermediate, *pair, activation=activation, swiglu_alpha=alpha,
                    swiglu_limit=limit)  # fmt: skip
    model, _ = one_layer(case, factor)
    packed = [value for value in model.graph.node("moe").inputs[3:]]
    tensors = to_qmoe(model, [Weight(value, str(value.name)) for value in packed], {"moe": spec}, 0)
    check_domains(model)
    parts: dict[str, list[np.ndarray]] = {}
    for expert in experts:
        rows = {p: np.zeros(qmoe.row_bytes(spec, p), np.uint8) for p in ("w13", "w2")}
        qmoe.pack(expert, spec, *rows.values())
        for p, row in rows.items():
            for part, array in qmoe.stored(spec, p, row, np.dtype(np.float32)).items():
                parts.setdefault(f"moe.{tensor_name(p, part)}", []).append(array)
    for tensor in tensors:
        array = np.stack(parts[tensor.parameter]).reshape(tensor.value.shape.numpy())
        tensor.value.const_value = ir.tensor(array, name=tensor.value.name)
        model.graph.register_initializer(tensor.value)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    given = {"x": rng.normal(0, 1, (9, case.hidden)), "logits": rng.normal(0, 1, (9, case.experts))}
    given = {name: array.astype(np.float32) for name, array in given.items()}
    ids, weights = route(routing_spec(case.experts, case.top_k, "topk_softmax"), given["logits"])
    factors = rng.uniform(0.1, 2, (9, 1)).astype(np.float32)
    (found,) = session.run(None, given | {"factor": factors})
    want = quant_moe(spec, experts, given["x"], ids, weights * factors if factor else weights)
    assert error(found, want) < BOUND


def test_a_router_that_is_not_recognised_is_refused():
    """QMoE leaves experts of negative weights out, on the CPU."""
    case = Case(weights=("int4", "bf16", False), activation_format="none")
    expert = case.expert(np.random.default_rng(0))
    spec = moe_spec(case.experts, case.hidden, case.intermediate, *qmoe.describe(expert, "none"))
    model, _ = one_layer(case, False)
    node = model.graph.node("moe")
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape(["n", case.top_k]))
    node.replace_input_with(1, ids)
    with pytest.raises(ValueError, match="moe: its router is none that QMoE computes"):
        to_qmoe(model, [Weight(value, str(value.name)) for value in node.inputs[3:]], {"moe": spec}, 0)


@pytest.mark.parametrize(("scheme", "group"), every([("W4A16", 128), ("W8A16", -1)]))
def test_other_groups(checkpoint, tmp_path, scheme, group):
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    source = checkpoint("qwen3_moe", scheme, group_size=group, **sizes)
    report = export(source, tmp_path / "model", target="ort", logits="all")
    assert report.activations == ""
    assert set(report.dequantized.values()) == (
        set() if group > 0 else {"MatMulNBits needs a group_size of a power of two from 16 for int8, found -1"}
    )
    ids = tokens(2, 6)
    want = expected(dequantized(Skeleton(find_format(open_checkpoint(source)))), ids)
    assert error(run(Plain(tmp_path / "model"), ids, (5, 1)), want) < BOUND
    check_unpacked(source, tmp_path / "model", tmp_path / "layers")


@pytest.mark.every
def test_activations_that_onnxruntime_rounds(exported, checkpoint, reference, tmp_path):
    """int8 experts in blocks have no other kernel on the CPU; of int4 --activations int8 allows it."""
    ids = tokens(2, 2)
    for scheme, options in (("W8A16", {}), ("W4A16", {"activations": "int8"})):
        folder = tmp_path / scheme
        report = export(checkpoint("qwen3_moe", scheme), folder, target="ort", logits="all", **options)
        assert "int8" in report.activations
        found = error(run(Plain(folder), ids, (1, 1)), expected(reference("qwen3_moe", scheme), ids))
        # Half a step of 1/127 of a block's largest is 0.4 % of it, in each of four products: it is there, and small.
        assert BOUND < found < 0.05
    (node, _) = qmoe_nodes(folder)
    assert node.attributes["accuracy_level"].as_int() == 4
    assert inspect(folder)["metadata"]["onnxruntime"] == "1.31"
    check_unpacked(checkpoint("qwen3_moe", "W8A16"), tmp_path / "W8A16", tmp_path / "layers")


@pytest.mark.every
def test_float16(exported, reference):
    folder = exported("qwen3_moe", target="ort", dtype="f16", cache="f16")
    ids = tokens(2, 4)
    # what each of a dozen products gives is rounded to 2^-11 of it; 1e-3 was seen
    assert error(run(Plain(folder), ids, (3, 1)), expected(reference("qwen3_moe"), ids)) < 5e-3


@pytest.mark.every
def test_mxfp4_is_written_for_cuda(checkpoint, tmp_path):
    """ONNX Runtime has no kernel of it for the CPU: the bytes are compared in tests/layouts/test_qmoe.py."""
    source = checkpoint("qwen3_moe", "MXFP4A16")
    for command in (export, plan):
        with pytest.raises(
            CheckpointError, match=r"mlp\.experts: .* on CUDA alone, whose QMoE takes no f32: use --dtype"
        ):
            command(source, tmp_path / "refused", target="ort")
    report = export(source, tmp_path / "model", target="ort", dtype="f16")
    assert set(report.dequantized.values()) == {"MatMulNBits has int4 and int8, found mxfp4"}
    for node in qmoe_nodes(tmp_path / "model"):
        assert node.attributes["quant_type"].as_string() == "fp4"
        assert [node.inputs[i].dtype for i in (0, 3, 6, *qmoe.GLOBAL_SCALES)] == [
            ir.DataType.FLOAT16,
            *[ir.DataType.FLOAT8E8M0] * 2,
            *[ir.DataType.FLOAT] * 2,
        ]
    check_unpacked(source, tmp_path / "model", tmp_path / "layers")


def test_the_folder(exported, checkpoint):
    folder = exported("qwen3_moe", target="ort", logits="last")
    found = inspect(folder, verify=True)
    assert found["metadata"]["target"] == "ort"
    assert found["metadata"]["onnxruntime"] == "1.28"
    assert [(layer["module"], layer["top_k"]) for layer in found["layers"]] == [
        (f"model.layers.{i}.mlp.experts", 4) for i in range(2)
    ]
    assert {layer["attributes"]["w13_layout"] for layer in found["layers"]} == {"qmoe"}
    assert {len(linear["rows"]) for linear in found["linears"]} == {0, 3}
    tensors = sum(len(node[p]["tensors"]) for node in found["layers"] + found["linears"] for p in ("w13", "w2", "w")
                  if p in node)  # fmt: skip
    assert found["verified"] == tensors + len(found["dense"])
    assert {tensor["dequantized_from"] for tensor in found["dense"]} == {None}
    assert {c.kernels[0] for entry in explain(folder) for c in entry["candidates"]} == {
        ("QMoE", ""),
        ("MatMulNBits", ""),
    }
    with pytest.raises(ModelError, match="expected a model for cpu or cuda, its target is ort"):
        fit(found, 10**9, 10)
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    assert config["model"]["decoder"]["session_options"] == {}


def test_onnxruntime_genai_generates_the_same_tokens(exported):
    import onnxruntime_genai as og

    folder = exported("qwen3_moe", target="ort", logits="last")
    prompt = tokens(1, 6, seed=1)[0].tolist()
    genai = og.Model(str(folder))
    params = og.GeneratorParams(genai)
    params.set_search_options(max_length=len(prompt) + 8, min_length=len(prompt) + 8)
    generator = og.Generator(genai, params)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    found = generator.get_sequence(0).tolist()[len(prompt) :]
    want = Generator(folder).greedy(prompt, 8).tokens
    assert found[: len(want)] == want
    assert want == Generator(exported("qwen3_moe", activations="float", logits="last")).greedy(prompt, 8).tokens


@pytest.mark.parametrize(
    ("architecture", "scheme", "text"),
    [
        (
            "qwen3_moe",
            "W8A8",
            r"experts\.0: \w+: QMoE does not quantize .* says \(int8_token\); with --activations float they",
        ),
        ("qwen3_moe", "NVFP4A16", r"experts\.0: \w+: QMoE is exported with int4, int8, mxfp4, found nvfp4"),
        ("llama4_text", "W4A16", r"experts: QMoE multiplies outputs by the router's weights, the layer its inputs"),
    ],
)
def test_refused_by_name(checkpoint, tmp_path, architecture, scheme, text):
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=text):
            command(checkpoint(architecture, scheme), tmp_path / "model", target="ort")
    assert re.search(text, survey(checkpoint(architecture, scheme))["refused"]["ort"])


def test_act_order_is_refused_by_name(tmp_path):
    folder = make_gptq_checkpoint(tmp_path / "checkpoint", desc_act=True, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"experts\.0: \w+: QMoE has no act-order"):
        export(folder, tmp_path / "model", target="ort")


@pytest.mark.parametrize("options", [{"mtp": True}, {"state_window": 2}, {"dtype": "bf16"}, {"cache": "f16"}])
def test_options_of_other_targets(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        Options(target="ort", **options)


def test_a_quantized_cache_is_refused(checkpoint, tmp_path):
    with pytest.raises(OptionError, match=r"cache is int8: .*CachedAttention is no operator of ONNX Runtime's own"):
        plan(checkpoint("qwen3_moe"), tmp_path / "model", target="ort", cache="int8")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("block_size", 64, r"input \d+ has shape"),
        ("expert_weight_bits", 8, r"input \d+ has shape"),
        ("quant_type", "fp8", "quant_type 'fp8' of 4 bits; this release knows int4, int8, mxfp4"),
        ("swiglu_fusion", 2, "swiglu_fusion is 2, expected 1"),
    ],
)
def test_a_damaged_node_is_named(exported, tmp_path, name, value, text):
    folder = exported("qwen3_moe", target="ort", logits="last")
    model = ir.load(folder / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "QMoE")
    node.attributes[name] = ir.convenience.convert_attribute(name, value)
    ir.save(model, tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").hardlink_to(folder / "model.onnx.data")
    with pytest.raises(ModelError, match=rf"model\.onnx: node {re.escape(str(node.name))}.*{text}"):
        inspect(tmp_path)


def test_browser(checkpoint, tmp_path):
    """The folder onnx has the model with transformers.js's names of its weights, as config.json says, and runs."""
    folder = tmp_path / "model"
    export(checkpoint("qwen3_moe"), folder, target="ort", browser="webgpu", max_file_size=100_000, logits="all")
    weights = sorted(path.name for path in (folder / "onnx").iterdir())
    count = len(weights) - 1
    assert count > 1
    names = [f"model.onnx_data{f'_{i}' if i else ''}" for i in range(count)]
    assert weights == sorted(["model.onnx", *names])
    asked = json.loads((folder / "config.json").read_text(encoding="utf-8"))["transformers.js_config"]
    assert asked == {"dtype": "fp32", "use_external_data_format": count}
    assert (folder / "onnx/model.onnx_data_1").samefile(folder / "model.onnx.data.1")
    ids = tokens(1, 5)
    assert (run(Plain(folder / "onnx"), ids, (5,)) == run(Plain(folder), ids, (5,))).all()

    with pytest.raises(FileExistsError, match=r"exists; --force \(in Python, force=True\) repl"):
        export(checkpoint("qwen3_moe"), folder, target="ort", browser="wasm")
    export(checkpoint("qwen3_moe"), folder, target="ort", force=True)  # its weights are others
    assert not (folder / "onnx").exists()
    (folder / "onnx").mkdir()
    with pytest.raises(FileExistsError, match=r"onnx exists and no export is known to have written it"):
        export(checkpoint("qwen3_moe"), folder, target="ort", browser="wasm", force=True)


def test_browser_refuses(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"experts: WebGPU's QMoE takes no zero points, .* --browser wasm takes"):
        plan(checkpoint("qwen3_moe", "W4A16_ASYM"), tmp_path / "model", target="ort", browser="webgpu")
    plan(checkpoint("qwen3_moe", "W4A16_ASYM"), tmp_path / "model", target="ort", browser="wasm")
    with pytest.raises(
        OptionError, match="browser is for target ort: browsers have ONNX Runtime's own operators alone"
    ):
        Options(target="cpu", browser="wasm")
