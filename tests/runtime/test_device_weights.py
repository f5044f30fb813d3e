"""Weights that are given to a session: read by threads, and freed with it. The host's memory stands for a GPU's."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from quantmoe.exporter.errors import ModelError
from quantmoe.runtime import device, device_weights
from quantmoe.runtime.opened_model import OpenedModel


class HostBlock:
    """Memory of the host."""

    def __init__(self, size: int):
        self.memory = np.full(size + device.ALIGNED, 255, np.uint8)
        self.address = -(-self.memory.ctypes.data // device.ALIGNED) * device.ALIGNED


class HostPages:
    def __init__(self, size: int):
        self.memory = (ctypes.c_uint8 * size)()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(to: int, source: int, width: int, on: int) -> None:
        ctypes.memmove(to, source, width)

    monkeypatch.setattr(device, "Block", HostBlock)
    monkeypatch.setattr(device, "Pages", HostPages)
    monkeypatch.setattr(device, "copy", copy)
    monkeypatch.setattr(device, "wait", lambda on: None)
    monkeypatch.setattr(device_weights, "_streams", lambda: [*range(device_weights.THREADS)])
    monkeypatch.setattr(device_weights, "CUDA", 1)  # kDLCPU
    monkeypatch.setattr(device_weights, "PIECE", 5000)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = table[ids] @ weight + bias; the bias is small."""
    rng = np.random.default_rng(0)
    tensors = {
        "table": rng.standard_normal((300, 64), np.float32),
        "weight": rng.standard_normal((64, 700), np.float32),
        "bias": rng.standard_normal(700, np.float32),
    }
    nodes = [
        onnx.helper.make_node("Gather", ["table", "ids"], ["x"]),
        onnx.helper.make_node("MatMul", ["x", "weight"], ["p"]),
        onnx.helper.make_node("Add", ["p", "bias"], ["y"]),
    ]
    ids = onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n"])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 700])
    graph = onnx.helper.make_graph(
        nodes, "g", [ids], [y], [onnx.numpy_helper.from_array(t, n) for n, t in tensors.items()]
    )
    path = tmp_path / "model.onnx"
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, path, save_as_external_data=True, location="data", size_threshold=0)
    return path


def _session(path: Path, given: list[tuple[str, Any]]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    for name, value in given:
        options.add_initializer(name, value)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@pytest.mark.usefixtures("host")
def test_a_session_runs_with_them_and_frees_them(model: Path) -> None:
    ids = {"ids": np.array([3, 299, 0])}
    want = _session(model, []).run(None, ids)[0]
    given = device_weights.device_weights(model)
    assert [name for name, _ in given] == ["table", "weight"]
    data, size = model.parent / "data", 700 * 4
    data.write_bytes(bytes(data.stat().st_size - size) + data.read_bytes()[-size:])  # all but the bias
    assert not np.array_equal(_session(model, []).run(None, ids)[0], want)
    session = _session(model, given)
    del given
    gc.collect()
    assert len(device_weights._HELD) == 1  # the table; MatMul has packed its weight
    assert np.array_equal(session.run(None, ids)[0], want)
    del session
    gc.collect()
    assert not device_weights._HELD


@pytest.mark.usefixtures("host")
def test_a_closed_model_keeps_none(model: Path) -> None:
    opened = OpenedModel.__new__(OpenedModel)
    opened._listing, opened._step_locks = threading.Lock(), weakref.WeakSet()
    opened._weights = device_weights.device_weights(model)
    opened._opened = _session(model, opened._weights)
    opened.close()
    gc.collect()
    assert not device_weights._HELD


@pytest.mark.usefixtures("host")
def test_a_file_that_ends_early_is_named(model: Path) -> None:
    data = model.parent / "data"
    data.write_bytes(data.read_bytes()[:-3000])
    with pytest.raises(ModelError, match=r"data: ends before byte \d+, where a weight ends"):
        device_weights.device_weights(model)
    assert not device_weights._HELD


@pytest.mark.usefixtures("host")
def test_tensors_of_other_operators_are_left_to_onnxruntime(model: Path) -> None:
    made = onnx.load(model)
    made.graph.node[1].op_type = "Gemm"
    onnx.save(made, model, save_as_external_data=True, location="data2", size_threshold=0)
    assert [name for name, _ in device_weights.device_weights(model)] == ["table"]
