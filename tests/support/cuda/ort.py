"""ctypes over ort_driver.cc: ONNX Runtime's side of the CUDA custom-op library, and the nodes that tests make of it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.operators.specs import attention_spec, conv_spec, delta_spec, routing_spec, space_spec

import quantmoe
from quantmoe.custom_ops.op import AttentionSpec, NormSpec, RouterSpec

if "QUANTMOE_ORT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
torch = pytest.importorskip("torch")
from support.cuda.layers import BASE  # noqa: E402

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TYPES = {"f16": 10, "bf16": 16, "i32": 6, "i64": 7, "f32": 1}  # ONNXTensorElementDataType
FAKE = str(Path(os.environ["QUANTMOE_ORT_DRIVER"]).with_name("libquantmoe_ort_fake.so"))  # its GPU is the test's
STREAM = type("Stream", (), {"cuda_stream": 0})  # no stream: what runs on it is the fake GPU's
INPUTS, OUTPUTS = 10, 3  # ort_driver.cc has room for
_PTR = ctypes.c_void_p


class Value(ctypes.Structure):
    _fields_ = [("dims", ctypes.c_int64 * 4), ("rank", ctypes.c_int32), ("constant", ctypes.c_int32), ("data", _PTR)]


def value(dims: tuple[int, ...], constant: bool = False, data: int | None = None) -> Value:
    return Value((ctypes.c_int64 * 4)(*dims), len(dims), constant, data)


class Driver:
    def __init__(self) -> None:
        self.lib = ctypes.CDLL(os.environ["QUANTMOE_ORT_DRIVER"])
        for name in ("error", "name", "logged"):
            getattr(self.lib, f"driver_{name}").restype = ctypes.c_char_p
        for name in ("info", "create"):
            getattr(self.lib, f"driver_{name}").restype = _PTR
        self.count = self.open(21)

    def open(self, api_version: int, path: str | None = None, entries: dict[str, str] | None = None) -> int:
        path = path or quantmoe.ort_cuda_library_path()
        lines = "".join(f"quantmoe.{key}={entry}\n" for key, entry in (entries or {}).items())
        return self.lib.driver_open(path.encode(), api_version, lines.encode())

    @property
    def error(self) -> str:
        return self.lib.driver_error().decode()

    def op(self, *types: str, name: str = "QuantMoE") -> int:
        """The operator of that name whose first inputs have these types."""
        found = [
            i
            for i in range(self.count)
            if self.lib.driver_name(i, 0) == name.encode()
            and all(self.lib.driver_type(i, at) == TYPES[t] for at, t in enumerate(types))
        ]
        assert len(found) == 1
        return found[0]

    def create(self, op: int, attributes: dict, values: list[Value], count: int = 0) -> _PTR | None:
        """Return a node; count: of its inputs, 0: the required ones."""
        info = _PTR(self.lib.driver_info())
        self.lib.driver_set_count(info, count)
        for name, v in attributes.items():
            if isinstance(v, int):
                self.lib.driver_set_int(info, name.encode(), ctypes.c_int64(v))
            elif isinstance(v, float):
                self.lib.driver_set_float(info, name.encode(), ctypes.c_float(v))
            else:
                self.lib.driver_set_string(info, name.encode(), v.encode())
        made = self.lib.driver_create(op, info, (Value * INPUTS)(*values))
        return _PTR(made) if made else None

    def run(self, op: int, kernel: _PTR, inputs: list[Value], outputs: list[Value], stream: torch.cuda.Stream) -> int:
        none = [value(())] * (INPUTS - len(inputs))
        values = (Value * (INPUTS + OUTPUTS))(*inputs, *none, *outputs)
        return self.lib.driver_run(op, kernel, values, _PTR(stream.cuda_stream))


def constants(layer) -> list[Value]:
    """hidden_states, ids and weights are no initializers; w13 and w2 are."""
    return [value(()), value(()), value(())] + [value((len(w), w.shape[1] // 4), True) for w in layer[2:]]


def packed_values(packed: list[np.ndarray]) -> list[Value]:
    return [value((len(w), w.shape[1] // 4), True, w.ctypes.data) for w in packed]


LINEAR_CASE = replace(BASE, hidden=264, intermediate=512, bias=True)
ROUTING = routing_spec(64, 6, "sigmoid_topk", 1, 8, 3, routed_scaling_factor=2.5, shared_experts=2, shared_gate=1)
ATTENTION = attention_spec(8, 2, 64, rotary_size=64)
LATENT = attention_spec(20, 1, 576, v_head_size=512, key_split=288, rotary_size=64, rotary_interleaved=1)


def run(driver, op, kernel, inputs, shapes, outputs) -> int:
    values = [value(s, data=t.data_ptr()) for s, t in zip(shapes, [*inputs, *outputs], strict=True)]
    torch.cuda.synchronize()
    status = driver.run(op, kernel, values[: len(inputs)], values[len(inputs) :], torch.cuda.Stream())
    torch.cuda.synchronize()
    return status


def fails(driver: Driver, op: int, kernel: _PTR, shapes: list[tuple[int, ...]], inputs: int) -> str:
    """The error of a run of tensors that are not there."""
    values = [value(s) for s in shapes]
    assert driver.run(op, kernel, values[:inputs], values[inputs:], STREAM) != 0
    return driver.error


ROUTER = RouterSpec(hidden_size=96, **{n: v for n, v in ROUTING.attributes().items() if n != "op_version"})
ROUTER_SHAPES = [(2, 9, 96), (65, 96), (0,), (64,), (2, 9, 8), (2, 9, 8)]
NORM = NormSpec(norm_epsilon=2.0**-20)


def attention_shapes(spec: AttentionSpec, batch: int, tokens: int, past: int, length: int) -> list[tuple[int, ...]]:
    """Of CachedAttention's inputs, then outputs; no norm."""
    heads, groups, v = spec.num_heads, spec.kv_num_heads, spec.v_head_size
    cache, present = (
        [(batch, groups, slots, width) for width in spec.cache_widths] for slots in (past, max(past, length))
    )
    turn = (batch, tokens, spec.rotary_size // 2)
    qkv = (batch, tokens, (heads + groups) * spec.head_size + (0 if spec.key_split else groups * v))
    inputs = [qkv, *cache, (batch, 3), (batch, length), turn, turn]
    return [*inputs, (0,), (0,), (heads,), (batch, tokens, heads * v), *present]


CONV, DELTA, SPACE = conv_spec(512), delta_spec(2, 4, 64), space_spec(2, 4, 64, 32)
WINDOW = conv_spec(512, state_window=3)
