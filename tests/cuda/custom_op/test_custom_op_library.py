"""The CUDA custom-op library: its symbols and operators, and what registers it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from support.cuda.ort import TYPES, constants

import quantmoe

OPERATORS = 50  # a type each


def test_operators(driver):
    assert driver.count == OPERATORS
    for dtype in ("f32", "f16", "bf16"):
        op = driver.op(dtype, name="MoERouting")
        assert [driver.lib.driver_type(op, i) for i in (1, -1)] == [1, 6]
    for dtype in ("f16", "bf16"):
        op = driver.op(dtype, name="QuantLinear")
        assert [driver.lib.driver_type(op, i) for i in (1, -1)] == [6, TYPES[dtype]]
    for dtype in ("f16", "bf16"):
        op = driver.op(dtype, dtype, "f32", "f32", name="MoERouter")
        assert driver.lib.driver_type(op, -1) == TYPES["i32"]
        op = driver.op(dtype, dtype, dtype, name="AddRMSNorm")
        assert driver.lib.driver_type(op, -1) == TYPES[dtype]
        op = driver.op(dtype, "i64", "i64", name="TokenRows")
        assert driver.lib.driver_type(op, -1) == TYPES["i32"]
    for dtype in ("f16", "bf16"):
        op = driver.op(dtype, dtype, dtype, "i32", "i64", "f32", name="CachedAttention")
        assert [driver.lib.driver_type(op, i) for i in (9, -1)] == [1, TYPES[dtype]]
    for name, at, state in (("CausalConv", 3, "T"), ("GatedDelta", 7, "f32"), ("StateSpace", 7, "f32")):
        for dtype in ("f16", "bf16"):
            op = driver.op(dtype, name=name)
            types = [driver.lib.driver_type(op, i) for i in (at, at + 1, -1)]
            assert types == [TYPES.get(state, TYPES[dtype]), TYPES["i32"], TYPES[dtype]]
    for dtype in ("f16", "bf16"):
        op = driver.op(dtype, "f32", "f32", "f32", name="HyperConnection")
        assert [driver.lib.driver_type(op, i) for i in (1, 3, -1)] == [1, 1, TYPES[dtype]]
    for dtype in ("f16", "bf16"):
        for ids in ("i32", "i64"):
            op = driver.op(dtype, ids)
            assert [driver.lib.driver_name(op, i) for i in range(2)] == [b"QuantMoE", b"CUDAExecutionProvider"]
            assert [driver.lib.driver_type(op, i) for i in (2, 3, 4, -1)] == [1, 6, 6, TYPES[dtype]]


def test_exported_symbols_and_libraries():
    path = quantmoe.ort_cuda_library_path()
    listing = subprocess.check_output(["nm", "-D", "--defined-only", path], text=True)
    device = ("launch_choice", "open_stream", "allocate", "free", "host_memory", "copy", "wait")
    expected = {"RegisterCustomOps", "qm_experts_report", *(f"qm_cuda_{name}" for name in device)}
    assert {line.split()[-1] for line in listing.splitlines()} == expected
    assert "libcuda" not in subprocess.check_output(["readelf", "-d", path], text=True)


def test_old_runtime_is_refused(driver):
    assert driver.open(20) == -1
    assert driver.error == "quantmoe needs ONNX Runtime 1.21 or newer, found 1.20"
    assert driver.open(21) == OPERATORS


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_no_device(driver, layer):
    assert driver.create(driver.op("bf16", "i64"), layer[0].attributes(), constants(layer)) is None
    assert driver.error.startswith('QuantMoE node "moe": CUDA device 0: ')


def test_real_runtime_registers_it(tmp_path: Path, layer):
    """A CPU-only ONNX Runtime loads and registers the library, and then finds no kernel for the node."""
    ort = pytest.importorskip("onnxruntime")
    from support.models.one_layer import write_model

    path = write_model(tmp_path / "m.onnx", layer[0], layer[2], layer[3], float_type="BFLOAT16")
    options = ort.SessionOptions()
    options.register_custom_ops_library(quantmoe.ort_cuda_library_path())
    options.log_severity_level = 3
    with pytest.raises(Exception, match="QuantMoE"):
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
