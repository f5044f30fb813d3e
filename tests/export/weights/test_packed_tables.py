"""Embeddings that a checkpoint quantizes: rows of packed weights with its numbers, one copy when tied."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from support.harness.sweeps import every

from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.graph.lowering.packed_tables import pack_tables
from quantmoe.exporter.graph.lowering.weights import Weight
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import prepare
from quantmoe.runtime.generate import Generator

FILES = Path(__file__).parents[2] / "fixtures" / "gguf"
IDS = np.array([[0, 5, 36], [21, 7, 5]])


def random_table(kind: str, group_size: int, scales: str, n: int = 37, k: int = 512) -> QuantizedMatrix:
    """Every code, and rows that do not fill the last panel."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << SCHEMES[kind].bits, (n, k), np.uint8)
    dtype, shape = SCALE_DTYPES[scales], (n, k // group_size)
    if dtype.names is None:
        return QuantizedMatrix(
            kind=kind, codes=codes, scales=rng.normal(0, 1, shape).astype(dtype), group_size=group_size
        )
    found = np.empty(shape, dtype)
    for name in dtype.names:
        part = dtype[name]
        low, high = (0, 256) if name == "levels" else (-63, 64)
        found[name] = rng.normal(0, 1, shape) if part.shape == () else rng.integers(low, high, (*shape, *part.shape))
        if part == np.float32:  # checkpoints have 16 bits: a code times its scale is exact in f32
            found[name] = found[name].astype(np.float16)
    return QuantizedMatrix(kind=kind, codes=codes, scales=found, group_size=group_size)


def looked_up(m: QuantizedMatrix, wide: ir.DataType, ids: np.ndarray) -> np.ndarray:
    """What a graph gives that has the table packed."""
    table = ir.Value(name="t.weight", shape=ir.Shape(m.shape), type=ir.TensorType(wide))
    tokens = ir.Value(name="ids", shape=ir.Shape(["a"] * ids.ndim), type=ir.TensorType(ir.DataType.INT64))
    gather = ir.node("Gather", [table, tokens], name="embed")
    gather.outputs[0].name, gather.outputs[0].type = "y", ir.TensorType(wide)
    graph = ir.Graph([tokens], gather.outputs, nodes=[gather], name="g", opset_imports={"": 20})
    spec = LinearSpec(in_features=m.shape[1], out_features=m.shape[0], w=cpu_panel.describe_down(m, "none"))
    (packed,) = pack_tables(weights := [Weight(table, "t.weight")], {"t.weight": (spec, "")})
    assert not weights
    row = np.zeros(cpu_panel.row_bytes(spec.moe, "w2"), np.uint8)
    cpu_panel.pack_down(m, spec.moe, row)
    for (dtype, width), view in packed.views.items():
        view.const_value = ir.tensor(row.view(dtype).reshape(-1, width), name=view.name)
        graph.register_initializer(view)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"ids": ids})[0]


@pytest.mark.parametrize(
    ("kind", "group_size", "scales"),
    [
        ("int8", 32, "f16"),  # Q8_0
        ("int8", 128, "bf16"),
        ("int8", 16, "f32"),
        ("int4", 32, "f16"),  # Q4_0
        ("int4", 16, "f32"),  # Q3_K
        ("int4", 128, "bf16"),
        ("q4_k", 256, "k32"),
        ("q5_k", 256, "k32"),
        ("q6_k", 256, "k16"),
        ("q2_k", 256, "k16_minima"),
        ("q4_1", 32, "f16_minima"),
        ("q5_1", 32, "f16_minima"),
        ("q4_1", 64, "f32_minima"),  # MLX
        ("q5_1", 128, "f32_minima"),
        ("int2", 128, "f16"),
        ("int5", 32, "f16"),  # Q5_0
        ("int6", 64, "bf16"),
    ],
)
def test_rows(kind: str, group_size: int, scales: str) -> None:
    m = random_table(kind, group_size, scales)
    want = m.dequantize(np.float32)
    np.testing.assert_array_equal(looked_up(m, ir.DataType.FLOAT, IDS), want[IDS])
    np.testing.assert_array_equal(looked_up(m, ir.DataType.FLOAT, np.arange(37)), want)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(looked_up(m, ir.DataType.FLOAT16, IDS), want[IDS].astype(np.float16))


@pytest.mark.parametrize("name", every(["mixtral-Q5_0", "qwen2moe-Q8_0", "qwen3moe-Q6_K", "qwen3moe-Q4_0"]))
def test_models(name: str, tmp_path: Path) -> None:
    """Logits are transformers', the table takes about the file's bytes, and a tied one none beside the LM head's."""
    path, tied = FILES / f"{name}.gguf", name == "mixtral-Q5_0"
    planned = plan(path, tmp_path, activations="float", cache="f32", logits="all")
    report = export(path, tmp_path, activations="float", cache="f32", logits="all")
    assert planned.dense == report.dense_bytes
    assert not any("embed_tokens" in tensor for tensor in report.dequantized)
    graph = ir.load(tmp_path / "model.onnx").graph
    places: dict[str, set[tuple[str, int]]] = {}
    for initializer, value in graph.initializers.items():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            place = str(tensor.location), int(tensor.offset or 0)
            places.setdefault(initializer.rpartition(".")[0], set()).add(place)
    assert len(places["model.embed_tokens.weight"]) == 1
    assert (places["lm_head"] == places["model.embed_tokens.weight"]) == tied
    generator, logits = Generator(tmp_path), np.load(FILES / "logits.npz")
    found, want = generator.step(logits["ids"][None], generator.start())[0], logits[name]
    np.testing.assert_allclose(found[0], want, rtol=0, atol=2e-5 * np.abs(want).max())
    said = inspect(tmp_path, verify=True)
    tables = [tensor for tensor in said["dense"] if "embed_tokens" in tensor["name"]]
    assert len(tables) == (0 if tied else 1)
    (stored,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    for table in tables:
        assert table["table"]
        assert table["bytes"] <= stored.n_bytes + 8 * 384 + 64  # of each of 384 rows a sum and a bias, too


@pytest.mark.parametrize(("name", "packed"), [("qwen2moe-Q8_0", True), ("qwen3moe-Q4_0", False)])
def test_ort(name: str, packed: bool) -> None:
    """Only tables that ONNX Runtime's CUDA provider reads, too; never the head's bytes, which are MatMulNBits'."""
    chosen = prepare(FILES / f"{name}.gguf", Options(target="ort")).parts[0].chosen
    assert [head for _, head in chosen.tables.values()] == [""] * packed


def test_cuda() -> None:
    """TensorRT has no BitShift."""
    assert not prepare(FILES / "qwen2moe-Q8_0.gguf", Options(target="cuda")).parts[0].chosen.tables


def test_a_head_that_is_rounded_has_a_copy_of_its_own(tmp_path: Path) -> None:
    """The table keeps the file's numbers."""
    chosen = prepare(FILES / "mixtral-Q5_0.gguf", Options(scales="bf16")).parts[0].chosen
    assert chosen.tables["model.embed_tokens.weight"][1] == ""
    assert "lm_head" in chosen.linears
