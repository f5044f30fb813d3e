"""A .onnx file that is one QuantMoE node between casts, weights in a data file at 64 KiB offsets as in exports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

import quantmoe
from quantmoe.custom_ops.op import DOMAIN, MoESpec

NODE = "model.layers.0.mlp.experts"
_PAGE = 65536


def write_model(
    path: Path,
    spec: MoESpec,
    w13: np.ndarray | Sequence[int],
    w2: np.ndarray | Sequence[int],
    *,
    float_type: str = "FLOAT",
    id_type: str = "INT64",
    leading: Sequence[int | str] = ("tokens",),
    attributes: Mapping[str, Any] | None = None,
    weights_as_inputs: bool = False,
) -> Path:
    """Inputs x (f32, cast to ``float_type``), ids (``id_type``), weights (f32); output y (f32, no declared shape).

    w13 and w2 are packed rows, uint8 [E, row bytes], or only a shape [E, int32 words] whose bytes the caller writes.
    attributes: instead of the spec's; a value of None leaves the attribute out.
    """
    attributes = {k: v for k, v in (spec.attributes() | dict(attributes or {})).items() if v is not None}
    dtype = ir.DataType[float_type]

    def value(name: str, type_: ir.DataType, shape: Sequence[int | str | None] | None) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(type_), shape=None if shape is None else ir.Shape(shape))

    x = value("x", ir.DataType.FLOAT, (*leading, spec.hidden_size))
    ids = value("ids", ir.DataType[id_type], (*leading, "top_k"))
    weights = value("weights", ir.DataType.FLOAT, (*leading, "top_k"))
    packed, offset, data = [], 0, path.with_suffix(".bin")
    with data.open("wb") as file:
        for name, rows in (("w13", w13), ("w2", w2)):
            shape = (rows.shape[0], rows.shape[1] // 4) if isinstance(rows, np.ndarray) else tuple(rows)
            tensor = value(name, ir.DataType.INT32, shape)
            size = 4 * int(np.prod(shape))
            tensor.const_value = ir.ExternalTensor(
                data.name, offset, size, ir.DataType.INT32, shape=ir.Shape(shape), name=name, base_dir=path.parent
            )
            if isinstance(rows, np.ndarray):
                file.seek(offset)
                file.write(np.ascontiguousarray(rows).data)
            packed.append(tensor)
            offset = -(-(offset + size) // _PAGE) * _PAGE
    if weights_as_inputs:
        for tensor in packed:
            tensor.const_value = None
    typed = ir.node("Cast", [x], {"to": int(dtype)}, outputs=[value("typed", dtype, None)])
    moe = ir.node("QuantMoE", [typed.outputs[0], ids, weights, *packed], attributes, domain=DOMAIN, name=NODE)
    moe.outputs[0].name = "moe_out"
    back = ir.node("Cast", moe.outputs, {"to": int(ir.DataType.FLOAT)}, outputs=[value("y", ir.DataType.FLOAT, None)])
    graph = ir.Graph(
        [x, ids, weights, *(packed if weights_as_inputs else [])],
        back.outputs,
        nodes=[typed, moe, back],
        initializers=[] if weights_as_inputs else packed,
        opset_imports={"": 20, DOMAIN: 1},
        name="one_layer",
    )
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def session(path: Path, threads: int = 1, entries: Mapping[str, str] | None = None) -> ort.InferenceSession:
    """A CPU session with the custom-op library and these configuration entries."""
    options = ort.SessionOptions()
    for name, value in (entries or {}).items():
        options.add_session_config_entry(name, value)
    options.register_custom_ops_library(quantmoe.ort_library_path())
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(s: ort.InferenceSession, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return s.run(None, {"x": x, "ids": ids, "weights": weights})[0]


def in_threads(threads: int, runs: int, work: Callable[[int], bool]) -> list[str]:
    """Runs ``work`` of a number, which says whether a result is right, so many times in threads at once.

    Returns:
        What went wrong: exceptions, which a thread would lose, and numbers whose work was not right.
    """
    wrong: list[str] = []

    def turn(thread: int) -> None:
        try:
            wrong.extend(f"thread {thread}, run {i}" for i in range(runs // threads) if not work(i + thread))
        except Exception as error:
            wrong.append(repr(error))

    started = [threading.Thread(target=turn, args=(i,)) for i in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return wrong
