"""ONNX Runtime's own operators: QMoE and MatMulNBits, without a library."""

from __future__ import annotations

from typing import Any

from quantmoe.exporter.targets.base import ACTIVATIONS, Target
from quantmoe.exporter.targets.cpu import CPU
from quantmoe.ort_ext import OLDEST_ACCURACY, OLDEST_OPSET_27, OLDEST_QMOE

#: rows of docs/guides/without-library.md: what weights have, and whether QMoE and MatMulNBits take it
TAKEN = (
    (
        "int4, int8",
        "group size 16, 32, 64, ... that divides hidden and intermediate size, with or without zero points; "
        "one scale a row without them",
        "group size a power of two from 16, with or without zero points",
    ),
    ("mxfp4", "group size 32, with `--dtype f16`; only CUDA has kernels", "stays float"),
    (
        "scales",
        "f32, f16, bf16, written in the graph's type; with `--dtype f16` only scales that float16 holds; e8m0 of mxfp4",
        "f32, f16, bf16, as for QMoE",
    ),
    ("biases", "in the graph's type", "in the graph's type"),
    ("activation function", "silu (`swiglu`) and gpt-oss's clamped SwiGLU, gated", ""),
    ("act-order, pre-scales, blocks of rows", "refused", "stays float"),
    ("nvfp4, fp8, K-quants, 16-bit experts", "refused", "stays float"),
    (
        "activations that the checkpoint quantizes",
        "refused; `--activations float` keeps them float, which changes results",
        "as for QMoE",
    ),
    ("a router's weights on inputs (Llama-4)", "refused", ""),
)


def _refusal(spec: Any) -> str:
    from quantmoe.custom_ops.layouts import qmoe
    from quantmoe.custom_ops.op import ConvSpec, DeltaSpec, LinearSpec, MoESpec, SpaceSpec

    if isinstance(spec, MoESpec | LinearSpec):
        return qmoe.refusal(spec)
    if isinstance(spec, ConvSpec | DeltaSpec | SpaceSpec):  # exporter/graph/lowering/standard_states.py
        return ""
    return f"{spec.OP} is no operator of ONNX Runtime's own (--target ort)"


def _kernels(spec: Any) -> list[tuple[str, str]]:
    from quantmoe.custom_ops.op import MoESpec

    return [("QMoE" if isinstance(spec, MoESpec) else "MatMulNBits", "")]


ORT = Target(
    name="ort",
    device="cpu",
    layout="qmoe",
    kernels=_kernels,
    refusal=_refusal,
    runtime=OLDEST_QMOE,
    runtime_with={"accuracy_level": OLDEST_ACCURACY},
    runtime_at={27: OLDEST_OPSET_27},
    graph_types=("f32", "f16"),
    options=frozenset(("browser", "opset")),
    activations=tuple(name for name in ACTIVATIONS if name != "int8-token"),
    passes=CPU.passes,
    router="ai.onnx",
    one_node=True,
    packed_tables=("int8",),  # ONNX Runtime's CUDA provider has no BitShift
    chunk=CPU.chunk,
    steps_of_chunk=CPU.steps_of_chunk,
    reserve=CPU.reserve,
    rates=CPU.rates,
)
