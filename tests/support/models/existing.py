"""Models that exist already: nodes of com.microsoft's QMoE and MatMulNBits; sessions with the execution provider."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.operators.cases import Case

from quantmoe import ort_ext
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix

NEW_ENOUGH = tuple(map(int, ort.__version__.split(".")[:2])) >= ort_ext.OLDEST_PROVIDER
needs_provider = pytest.mark.skipif(not NEW_ENOUGH, reason=f"onnxruntime {ort.__version__} has no plug-in interface")


def value(name: str, array: np.ndarray) -> ir.Value:
    dtype = ir.DataType.from_numpy(array.dtype)
    return ir.Value(
        name=name,
        type=ir.TensorType(dtype),
        shape=ir.Shape(array.shape),
        const_value=ir.tensor(np.ascontiguousarray(array), name=name),
    )


def model(
    op: str,
    given: dict[str, tuple[type, int]],
    weights: list[np.ndarray | str | None],
    attributes: dict[str, Any],
    size: int,
) -> ir.Model:
    """One node; weights: its inputs, those of a run by name. The output y has `size` columns."""
    inputs = {
        name: ir.Value(
            name=name, type=ir.TensorType(ir.DataType.from_numpy(np.dtype(t))), shape=ir.Shape(["n", columns])
        )
        for name, (t, columns) in given.items()
    }
    values = [
        inputs[w] if isinstance(w, str) else None if w is None else value(f"w{i}", w) for i, w in enumerate(weights)
    ]
    node = ir.node(op, values, attributes, domain="com.microsoft", name="the node")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", next(iter(inputs.values())).type, ir.Shape(["n", size])
    constants = [v for v in values if v is not None and v.const_value is not None]
    opsets = {"": 20, "com.microsoft": 1}
    graph = ir.Graph(list(inputs.values()), [y], nodes=[node], initializers=constants, opset_imports=opsets, name="g")
    return ir.Model(graph, ir_version=10)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [.., k] as a stream of bits, the lowest first, which ends with a byte."""
    stream = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def stored(m: QuantizedMatrix, bits: int) -> np.ndarray:
    """Return the codes as the operators have them in so many bits, of a matrix of :func:`narrowed`."""
    return m.codes if bits >= 4 or m.zero_points is not None else m.codes - (8 - 2 ** (bits - 1))


def narrowed(m: QuantizedMatrix, bits: int) -> QuantizedMatrix:
    """Return a matrix of int4 whose codes fit into 2 or 3 bits."""
    if m.zero_points is not None:
        return replace(m, codes=m.codes % 2**bits, zero_points=m.zero_points % 2**bits)
    return replace(m, codes=m.codes % 2**bits + (8 - 2 ** (bits - 1)))


def linear(m: QuantizedMatrix, dtype: type, width: int = 0, **attributes: Any) -> ir.Model:
    """MatMulNBits. width: bits of a code, of a matrix of :func:`narrowed`; 0: the matrix's own."""
    bits = width or (4 if m.kind == "int4" else 8)
    (n, k), g = m.shape, m.group_size
    codes = np.pad(stored(m, bits), ((0, 0), (0, -k % g)))
    weights = [
        "x",
        packed(codes.reshape(n, -1, g), bits),
        m.scales.astype(dtype),
        None if m.zero_points is None else packed(m.zero_points, bits),
        None,
        None if m.bias is None else m.bias.astype(dtype),
    ]
    attributes = {"K": k, "N": n, "bits": bits, "block_size": g} | attributes
    return model("MatMulNBits", {"x": (dtype, k)}, weights, attributes, n)


def moe(
    case: Case,
    experts: list[Expert],
    dtype: type,
    weighted: bool = False,
    widths: tuple[int, int] | None = None,
    **attributes: Any,
) -> ir.Model:
    """QMoE with inputs x, probs and, where `weighted`, factors. widths: as linear's, of fc1 and fc2."""
    bits, fusion = 4 if case.weights[0] == "int4" else 8, attributes.get("swiglu_fusion", 1)
    widths = widths or (bits, bits)

    def part(m: QuantizedMatrix, field: str, bits: int) -> np.ndarray | None:
        return stored(m, bits) if field == "codes" else getattr(m, field)

    def fc1(field: str) -> np.ndarray | None:
        rows = []
        for e in experts:
            halves = [part(m, field, widths[0]) for m in (e.gate, e.up) if m is not None]
            if halves[0] is None:
                return None
            both = np.stack(halves, 1 if fusion == 1 else 0)
            rows.append(both.reshape(-1, *halves[0].shape[1:]))
        return np.stack(rows)

    def fc2(field: str) -> np.ndarray | None:
        found = [part(e.down, field, widths[1]) for e in experts]
        return None if found[0] is None else np.stack(found)

    def inputs(of: Any, bits: int) -> tuple[list[np.ndarray | str | None], np.ndarray | None]:
        scales, bias, zeros = of("scales").astype(dtype), of("bias"), of("zero_points")
        scales = scales[..., 0] if case.group_size == -1 else scales
        bias = None if bias is None else bias.astype(dtype)
        return [packed(of("codes"), bits), scales, bias], None if zeros is None else packed(zeros, bits)

    (first, first_zeros), (second, second_zeros) = inputs(fc1, widths[0]), inputs(fc2, widths[1])
    weights = ["x", "probs", *first, *second, None, None, None, first_zeros, second_zeros, None]
    given = {"x": (dtype, case.hidden), "probs": (dtype, case.experts)}
    if weighted:
        weights.append("factors")
        given["factors"] = (dtype, case.experts)
    own: dict[str, Any] = {
        "k": case.top_k,
        "expert_weight_bits": widths[0],
        "swiglu_fusion": 1,
        "normalize_routing_weights": 1,
        "activation_type": "swiglu" if case.gated else {"gelu_tanh": "gelu"}.get(case.activation, case.activation),
    }
    if widths[1] != widths[0]:
        own["fc2_expert_weight_bits"] = widths[1]
    if case.group_size != -1:
        own["block_size"] = case.group_size
    if case.activation == "swiglu_oai":
        own |= {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 7.0}
    return model("QMoE", given, weights, own | attributes, case.hidden)


def nvfp4_moe(case: Case, experts: list[Expert], columns: bool, **attributes: Any) -> ir.Model:
    """Return a QMoE of NVFP4, whose gate and up have one global scale.

    Args:
        columns: two rows a byte, [K, N / 2], as ONNX Runtime says for weights_prepacked -1 and 0; else two columns.
    """

    def inputs(matrices: list[list[QuantizedMatrix]]) -> tuple[list[np.ndarray], np.ndarray]:
        rows = [(np.stack([m.codes for m in own], 1), np.stack([m.scales for m in own], 1)) for own in matrices]
        codes = np.stack([codes.reshape(-1, codes.shape[-1]) for codes, _ in rows])
        scales = np.stack([scales.reshape(-1, scales.shape[-1]) for _, scales in rows])
        count, n, k = codes.shape
        stored = packed(codes.transpose(0, 2, 1) if columns else codes, 4).reshape(count, k, n // 2)
        return [stored, scales], np.array([own[0].global_scale for own in matrices], np.float32)

    first, of_first = inputs([[m for m in (e.gate, e.up) if m is not None] for e in experts])
    second, of_second = inputs([[e.down] for e in experts])
    weights = ["x", "probs", *first, None, *second, *[None] * 8, of_first, of_second]
    own = {"k": case.top_k, "swiglu_fusion": 1, "normalize_routing_weights": 1, "activation_type": "swiglu",
           "quant_type": "nvfp4", "weights_prepacked": 0 if columns else 1}  # fmt: skip
    given = {"x": (np.float32, case.hidden), "probs": (np.float32, case.experts)}
    return model("QMoE", given, weights, own | attributes, case.hidden)


def session(source: Path | ir.Model, provider: bool = True, severity: int = 3, **options: str) -> ort.InferenceSession:
    own = ort.SessionOptions()
    own.intra_op_num_threads, own.log_severity_level = 2, severity
    if provider:
        own.add_provider_for_devices(ort_ext.provider_devices(), options)
    given = source if isinstance(source, Path) else ir.to_proto(source).SerializeToString()
    return ort.InferenceSession(given, own, enable_fallback=0)


def run(of: ort.InferenceSession, **given: np.ndarray) -> np.ndarray:
    (y,) = of.run(None, given)
    return y


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return re.findall(r"quantmoe: (.*?)(?:\x1b|$)", capfd.readouterr().err, re.M)


def is_claimed(source: Path | ir.Model, capfd: pytest.CaptureFixture[str], **options: str) -> bool:
    capfd.readouterr()
    session(source, severity=1, **options)
    return any(line.startswith("1 nodes of QMoE and MatMulNBits are computed here, 0") for line in said(capfd))


def error(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found.astype(np.float64) - want).max() / np.abs(want).max())


def outputs(of: ort.InferenceSession) -> np.ndarray:
    rng = np.random.default_rng(0)
    given = {i.name: rng.standard_normal((6, i.shape[1])).astype(np.float32) for i in of.get_inputs()}
    return run(of, **given)


def with_input(source: ir.Model, index: int, array: np.ndarray) -> ir.Model:
    node, own = source.graph.node("the node"), value("other", array)
    source.graph.register_initializer(own)
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, own)
    return source
