"""QuantMoE in the CUDA custom-op library: weights, session entries, experts in host memory, act-orders, runs."""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engines.test_identity import identity
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, UNIT
from support.cuda.formats import FORMATS
from support.cuda.layers import BASE, CASES, build, build_linear, of_format
from support.cuda.ort import FAKE, STREAM, constants, gpu, packed_values, value
from support.harness.sweeps import every
from support.operators import native_kernels as native

import quantmoe
from quantmoe.custom_ops import reference
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.inspecting.expert_trace import read_trace
from quantmoe.exporter.inspecting.fit import device_slots
from quantmoe.ort_ext import experts_report


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_other_weights_are_refused(driver, fake, layer, name):
    """quant_moe.def, Identity, of what is on the device."""
    packed = {"w13": layer[2].copy(), "w2": layer[3].copy()}
    attributes = layer[0].attributes() | {f"{n}_identity": identity(rows) for n, rows in packed.items()}

    def create(**entries: str) -> str:
        fake(**entries)
        op = driver.op("bf16", "i64")
        if made := driver.create(op, attributes, [value(())] * 3 + packed_values(list(packed.values()))):
            driver.lib.driver_destroy(op, made)
        return driver.error

    assert (create(), create(verify="1")) == ("", "")
    packed[name].reshape(-1, 64)[1, 5] ^= 1
    assert create() == create(verify="0") == ""
    said = create(verify="1")
    assert f"{name} is not the data that this model was exported with: the BLAKE3 of its bytes is " in said
    packed[name][-1, -1] ^= 1
    assert create().endswith("of model.onnx.data of Tiny-8x; put the data file of the same export beside the model")
    del attributes[f"{name}_identity"]  # an export before there were any
    assert create(verify="1") == ""


def test_experts_that_are_for_tensorrt_are_refused(driver, fake, layer):
    """quant_moe.def, Experts outside the model."""
    fake()
    op = driver.op("bf16", "i64")
    attributes = layer[0].attributes() | {"w13_external": "65536 4096 model.onnx.data"}
    empty = [value((0,), True), value((0,), True)]
    assert driver.create(op, attributes, [value(())] * 3 + empty) is None
    assert driver.error == (
        'QuantMoE node "moe": w13 is in a data file that TensorRT\'s plug-in reads (w13_external); for ONNX Runtime '
        "export without --external-experts"
    )


def test_other_weights_of_a_linear_are_refused(driver, fake):
    _, spec, w = build_linear(BASE)
    attributes = spec.attributes() | {"w_identity": identity(w)}
    for changed in ("", "w is not the data"):
        fake()
        op = driver.op("bf16", name="QuantLinear")
        made = driver.create(op, attributes, [value(()), *packed_values([w]), *[value(())] * 3])
        assert bool(made) == (not changed)
        assert changed in driver.error
        if made:
            driver.lib.driver_destroy(op, made)
        w[0, 0] ^= 1


def test_a_verify_that_is_none(driver, fake):
    assert fake(verify="yes") == -1
    assert driver.error == 'quantmoe: quantmoe.verify is "yes", expected 0 or 1'


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"experts": "ssd"}, 'quantmoe.experts is "ssd", the CUDA library takes gpu, host, disk or auto'),
        ({"experts": "host", "gpu_memory": "2GB"}, 'quantmoe.gpu_memory is "2GB", expected a number of bytes or auto'),
        ({"gpu_memory": "1000"}, "quantmoe.gpu_memory and quantmoe.reserve need quantmoe.experts = host, disk or auto"),
        (
            {"experts": "gpu", "reserve": "1"},
            "quantmoe.gpu_memory and quantmoe.reserve need quantmoe.experts = host, disk or auto",
        ),
        ({"experts": "host", "gpu_memory": "9", "reserve": "9"}, "quantmoe.reserve is of quantmoe.gpu_memory = auto"),
        ({"experts": "host", "ram": "9"}, "quantmoe.ram needs quantmoe.experts = disk or auto, here it is host"),
        ({"experts": "disk", "ram": "2GB"}, 'quantmoe.ram is "2GB", expected a number of bytes or auto'),
        (
            {"experts": "host", "misses": "gpu"},
            'quantmoe.misses is "gpu", expected copy, cpu, auto, the CPU\'s share, 0% to 100%, or a list of layers such'
            " as 24*copy,24*cpu",
        ),
        *[
            ({"experts": "host", "misses": misses}, f'quantmoe.misses is "{misses}", expected copy, cpu, auto, the')
            for misses in ("101%", "2*gpu", "copy,2*cpu", "2*copy,", "0*cpu", "2*auto", "*cpu", "copy*2", "2*")
        ],
        ({"misses": "cpu"}, "quantmoe.misses needs quantmoe.experts = host or auto, here it is gpu"),
        ({"misses": "auto"}, "quantmoe.misses needs quantmoe.experts = host or auto, here it is gpu"),
        (
            {"experts": "disk", "misses": "cpu"},
            "quantmoe.misses needs quantmoe.experts = host or auto, here it is disk",
        ),
        (
            {"experts": "disk", "misses": "auto"},
            "quantmoe.misses needs quantmoe.experts = host or auto, here it is disk",
        ),
        (
            {"experts": "host", "misses": "copy", "threads": "2"},
            "quantmoe.threads needs quantmoe.misses = cpu, auto or a share",
        ),
        (
            {"experts": "host", "misses": "2*copy,1*0%", "threads": "2"},
            "quantmoe.threads needs quantmoe.misses = cpu, auto or a share",
        ),
        (
            {"experts": "host", "misses": "cpu", "threads": "0"},
            'quantmoe.threads is "0", expected 1 to 1024',
        ),
        ({"warm": "trace"}, "quantmoe.warm needs quantmoe.experts = host, disk or auto, here it is gpu"),
    ],
)
def test_entries_that_are_refused(driver, fake, entries, message):
    assert fake(**entries) == -1
    assert message in driver.error


@pytest.fixture
def hosted(driver, fake, layer):
    """Opens the adapter with experts in host memory, runs its layer of 8 for 3 tokens; what was launched, or None."""
    lib = ctypes.CDLL(FAKE)

    def run(
        captured: bool = False, ids: np.ndarray | None = None, **entries: str
    ) -> tuple[cuda.Experts, cuda.Launched] | None:
        assert fake(**{"experts": "host"} | entries) > 0
        op = driver.op("bf16", "i64")
        weights = packed_values(layer[2:])
        kernel = driver.create(op, layer[0].attributes(), [value(())] * 3 + weights)
        assert kernel is not None, driver.error
        lib.driver_order(1, captured)
        ids = np.zeros((3, 2), np.int64) if ids is None else ids
        tokens = [value((3, layer[0].hidden_size)), value((3, 2), data=ids.ctypes.data), value((3, 2))]
        failed = driver.run(op, kernel, [*tokens, *weights], [tokens[0], value(()), value(())], STREAM)
        lib.driver_order(1, 0)
        tensors = cuda.Launched()
        lib.driver_mixed(ctypes.byref(tensors))
        problem = tensors.experts
        if not failed and entries.get("experts") != "gpu":
            held = [ctypes.string_at(tensors.w13 + i, 64) for i in (0, layer[2].nbytes - 64)]
            assert held == [layer[2].reshape(-1)[i : i + 64].tobytes() for i in (0, layer[2].size - 64)]
        driver.lib.driver_destroy(op, kernel)
        return None if failed else (problem, tensors)

    return run


@pytest.mark.parametrize("where", ["host", "auto"])
def test_experts_in_host_memory(driver, fake, layer, hosted, where):
    """Their inputs stay there; a budget gives slots, of which a part is for what a call copies for itself."""
    fake()
    assert [driver.lib.driver_in_host_memory(driver.op("bf16", "i64"), i) for i in range(5)] == [0] * 5
    slot = sum(w.shape[1] for w in layer[2:])
    problem, tensors = hosted(experts=where, gpu_memory=str(4 * slot))
    assert [driver.lib.driver_in_host_memory(driver.op("bf16", "i64"), i) for i in range(5)] == [0, 0, 0, 1, 1]
    assert [problem.slots] == device_slots([8], [slot], 4 * slot) == [3]  # what inspect --fit says
    assert problem.staging == 0
    assert None not in (tensors.experts.slot_memory, tensors.experts.cache_state)
    assert (
        driver.lib.driver_logged()
        .decode()
        .startswith(f"quantmoe: experts = {where}: device memory for 3 of 8 experts, and ")
    )


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"experts": "auto"},
        {"gpu_memory": "auto"},
        {"reserve": "0"},
        {"gpu_memory": str(1 << 30)},
        {"misses": "auto"},
        {"warm": "/nowhere"},  # there is nothing to choose
    ],
)
def test_experts_that_all_fit(driver, hosted, entries):
    problem, tensors = hosted(**entries)
    assert (problem.slots, problem.staging, tensors.experts.slot_memory, tensors.experts.cache_state) == (
        0,
        0,
        None,
        None,
    )
    assert "all 8 experts are in the device's memory" in driver.lib.driver_logged().decode()


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_trace(driver, hosted, layer, tmp_path, where):
    """What the ids of a run were, in a file; a captured run leaves none and says so."""
    path, ids = tmp_path / "trace", np.arange(6).reshape(3, 2)
    assert hosted(experts=where, trace=str(path), ids=ids) is not None
    found = read_trace(path)
    assert [x["experts"] for x in found.layers] == [8]
    assert found.layers[0]["bytes"] == sum(w.shape[1] for w in layer[2:])
    ((at, run),) = found.runs
    assert at == 0
    np.testing.assert_array_equal(run, ids)
    assert hosted(experts=where, trace=str(path), captured=True) is None
    assert "quantmoe.trace: a CUDA graph is captured" in driver.error


def test_experts_for_which_there_is_no_memory(driver, hosted, layer):
    slot = sum(w.shape[1] for w in layer[2:])
    assert hosted(gpu_memory=str(slot - 1)) is None
    assert driver.error.startswith(
        f'QuantMoE node "moe": quantmoe.experts = host: quantmoe.gpu_memory is {slot - 1}, expected at least the {slot}'
    )
    assert hosted(reserve="9" * 15) is None
    assert f"bytes free less {'9' * 15} is 0, expected at least the {slot}" in driver.error
    assert hosted(captured=True) is None
    assert driver.error.endswith("the first run is captured, expected a run before it")


def of_cpu(spec: MoESpec) -> MoESpec:
    """The same layer as the CPU's kernels read it."""
    w13, w2 = (replace(w, layout="cpu_panel", layout_version=1) for w in (spec.w13, spec.w2))
    return replace(spec, w13=w13, w2=w2)


class Asked:
    """What the device and the host tell one another, as the fake device sees it."""

    def __init__(self, tensors: cuda.Launched, layer) -> None:
        self.spec, self.made = layer[0], layer
        words = (ctypes.c_int32 * cuda.host_words(self.spec.hidden_size)).from_address(tensors.experts.host)
        arrays = cuda.host_arrays(np.frombuffer(words, np.int32), self.spec.hidden_size)
        self.request, self.ids, self.weights, self.x, self.y = (
            arrays[name] for name in ("request", "ids", "weights", "x", "y")
        )
        self.asked, self.answered = self.request[:2].view(np.uint64), self.request[16:18].view(np.uint64)

    def multiply(
        self, number: int, hidden: np.ndarray, ids: np.ndarray, weights: np.ndarray, layer: int = 0
    ) -> np.ndarray:
        """y of a request, which the host is given 60 s for."""
        for to, given in ((self.x, hidden), (self.ids, ids), (self.weights, weights)):
            to[: given.size] = given.ravel()
        self.y[:] = np.nan
        self.request[2:5] = layer, *ids.shape
        self.asked[0] = number
        limit = time.monotonic() + 60
        while self.answered[0] != number:
            assert time.monotonic() < limit
        return self.y[: hidden.size].reshape(hidden.shape).copy()


@pytest.fixture
def asked(driver, fake):
    """Opens a session whose CPU multiplies the experts that miss, and runs it once; what it is asked by."""
    kernels = []

    def open_layer(layer, captured: bool = False, dtypes: tuple[str, str] = ("bf16", "i64"), **entries: str) -> Asked:
        slot = sum(w.shape[1] for w in layer[2:])
        settings = {"experts": "host", "misses": "cpu", "gpu_memory": str(3 * slot // 2), "threads": "3"}
        assert fake(**settings | entries) > 0, driver.error
        op, weights = driver.op(*dtypes), packed_values(layer[2:])
        kernels.append((op, driver.create(op, layer[0].attributes(), [value(())] * 3 + weights)))
        assert kernels[-1][1], driver.error
        ids = np.zeros((2, 2), np.int64)
        tokens = [value((2, layer[0].hidden_size)), value(ids.shape, data=ids.ctypes.data), value(ids.shape)]
        for graph in (False, captured):
            ctypes.CDLL(FAKE).driver_order(1, graph)
            run = driver.run(op, kernels[-1][1], [*tokens, *weights], [tokens[0], value(()), value(())], STREAM)
            ctypes.CDLL(FAKE).driver_order(1, 0)
            assert run == 0, driver.error
        tensors = cuda.Launched()
        ctypes.CDLL(FAKE).driver_mixed(ctypes.byref(tensors))
        problem = tensors.experts
        assert (problem.slots, problem.host_layer) == (1, 0)
        return Asked(tensors, layer)

    yield open_layer
    for op, kernel in kernels:
        driver.lib.driver_destroy(op, kernel)


@pytest.mark.parametrize("name", every([*FORMATS, "bf16"]))
@pytest.mark.parametrize("hidden", [256, 360])
def test_the_cpu_multiplies_what_the_device_misses(asked, name, hidden):
    """The bytes of the CPU's kernels on the same experts; pairs of none are zero."""
    case = of_format(name, replace(BASE, hidden=hidden, intermediate=90, bias=True))
    layer = build(case)
    host, spec = asked(layer), of_cpu(layer[0])
    rows = [native.aligned(8 * LAYOUTS["cpu_panel"].row_bytes(spec, p)).reshape(8, -1) for p in ("w13", "w2")]
    for expert, *packed in zip(layer[1], *rows, strict=True):
        LAYOUTS["cpu_panel"].pack(expert, spec, *packed)
    moe = native.NativeMoE(spec, *rows)
    for number, tokens in enumerate([1, 1, 2, 8, 5, 1], 1):
        x, ids, weights = case.tokens(tokens, seed=number)
        ids = np.where(np.arange(ids.size).reshape(ids.shape) % 3 == 1, -1, ids).astype(np.int32)
        y = host.multiply(number, x.astype(np.float32), ids, weights)
        assert y.tobytes() == moe(x.astype(np.float32), ids, weights).tobytes()
        assert not y[(ids < 0).all(axis=1)].any()


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("wide", "split-k", "many-experts")])
def test_the_cpu_multiplies_every_layer(asked, name):
    """Act-orders, which layout marlin has in another order, slices and biases: to f32 sums (layers.rounding_bound)."""
    case = CASES[name]
    layer = build(case)
    host = asked(layer)
    x, ids, weights = case.tokens(4)
    want = reference.quant_moe(layer[0], layer[1], x, ids, weights)
    y = host.multiply(7, x.astype(np.float32), ids.astype(np.int32), weights)
    assert np.linalg.norm(y - want) < 2.0**-18 * np.linalg.norm(want)


@pytest.mark.parametrize(("misses", "share"), [("cpu", 256), ("62%", 159), ("0%", 0), ("100%", 256)])
def test_the_share_of_the_cpu(driver, hosted, layer, misses, share):
    """Of calls of a few tokens; others copy what they miss."""
    slot, few = sum(w.shape[1] for w in layer[2:]), np.zeros((3, 2), np.int64)
    entries = {"misses": misses, "gpu_memory": str(3 * slot)}
    problem, tensors = hosted(ids=few, **entries)
    assert (problem.host_share, bool(tensors.experts.host)) == (share, share > 0)
    said = driver.lib.driver_logged().decode()
    assert (f"; the CPU multiplies {round(share / 2.56)}% of the experts that miss" in said) == (share > 0)


@pytest.fixture
def clock(fake):
    """Sets the milliseconds between two events of the fake device: of 8 copies."""
    lib = ctypes.CDLL(FAKE)
    lib.driver_clock.argtypes = [ctypes.c_float, ctypes.c_int32]
    yield lambda milliseconds, times=-1: lib.driver_clock(milliseconds, times)
    lib.driver_clock(0, -1)


@pytest.mark.parametrize("misses", ["cpu", "auto"])
def test_the_cpu_in_a_captured_graph(asked, layer, clock, misses):
    """It is asked by what the device writes, which replays do as well."""
    clock(8e6)
    x, ids, weights = BASE.tokens(2)
    host = asked(layer, captured=True, misses=misses)
    first = host.multiply(1, x.astype(np.float32), ids.astype(np.int32), weights)
    time.sleep(0.05)  # the threads sleep
    assert host.multiply(2, x.astype(np.float32), ids.astype(np.int32), weights).tobytes() == first.tobytes()


@pytest.mark.parametrize(
    ("slots", "ratio"),
    # 1 less the share with a slot, over what misses of routes that ask for the first eighth 67 times of 100
    [(0, 1), (8, 0.9375 / 0.665), (16, 0.875 / 0.33), (32, 0.75 / 0.19), (64, 0.5 / (0.19 * 2 / 3)), (127, 75 / 19)],
)
def test_which_misses_are_of_the_cpu(fake, slots, ratio):
    """With auto, where copies take more than the root of so many times its time."""
    takes = ctypes.CDLL(FAKE).driver_cpu_takes
    takes.argtypes = [ctypes.c_double, ctypes.c_double, ctypes.c_int64, ctypes.c_int64]
    for scale in (1e-6, 1.0):
        assert [takes(scale * ratio**0.5 * near, scale, slots, 128) for near in (0.999, 1.001)] == [0, 1]
    assert takes(1e9, 1e-9, 128, 128) == 0
    # Microseconds of misses on an H200 and an H100, and the quicker choice of local routes (lab/expert-offloading)
    assert [takes(50, cpu, 7, 128) for cpu in (27, 37.5)] == [1, 1]
    assert [takes(50, cpu, 65, 128) for cpu in (30, 33.6)] == [0, 0] == [takes(51, cpu, 65, 128) for cpu in (39, 56)]


@pytest.mark.parametrize(("memory", "slots", "at_once"), [(3, 1, 2), (12, 5, 1)])
@pytest.mark.parametrize(("milliseconds", "share"), [(8e6, 256), (0, 0)])
def test_auto_takes_what_is_quicker(driver, hosted, layer, clock, milliseconds, share, memory, slots, at_once):
    clock(milliseconds)
    slot, few = sum(w.shape[1] for w in layer[2:]), np.zeros((3, 2), np.int64)
    problem, tensors = hosted(ids=few, misses="auto", gpu_memory=str(memory * slot // 2), threads="2")
    assert (problem.slots, problem.host_share, bool(tensors.experts.host)) == (slots, share, share > 0)
    assert re.search(
        rf"; misses = auto: {'cpu' if share else 'copy'} in layers 0 \(with slots for {slots} of 8 experts a miss "
        rf"takes the bus {round(milliseconds / 8 * 1000)} us, the CPU \d+ us, {at_once} at once\)"
        + (r", in 2 threads \(\d+ bytes, packed in \d+ ms\)" if share else "")
        + rf"; quantmoe.misses = 1\*{'cpu' if share else 'copy'} fixes it$",
        driver.lib.driver_logged().decode(),
    )


@pytest.fixture
def session_of(driver, fake):
    """Opens a session of several layers, with slots for one expert of each, and runs each for two tokens: what was
    launched. The one before it is closed."""
    kernels = []

    def close() -> None:
        while kernels:
            driver.lib.driver_destroy(*kernels.pop())

    def run(layers, **entries: str) -> list[tuple[cuda.Experts, cuda.Launched]]:
        close()
        memory = str(sum(w.shape[1] for made in layers for w in made[2:]))
        assert fake(**{"gpu_memory": memory} | entries) > 0, driver.error
        op = driver.op("bf16", "i64")
        for made in layers:
            kernels.append((op, driver.create(op, made[0].attributes(), [value(())] * 3 + packed_values(made[2:]))))
            assert kernels[-1][1], driver.error
        return again(layers)

    def again(layers) -> list[tuple[cuda.Experts, cuda.Launched]]:
        ids, launched = np.zeros((2, 2), np.int64), []
        for made, (op, kernel) in zip(layers, kernels, strict=True):
            tokens = [value((2, made[0].hidden_size)), value(ids.shape, data=ids.ctypes.data), value(ids.shape)]
            inputs, outputs = [*tokens, *packed_values(made[2:])], [tokens[0], value(()), value(())]
            assert driver.run(op, kernel, inputs, outputs, STREAM) == 0, driver.error
            tensors = cuda.Launched()
            ctypes.CDLL(FAKE).driver_mixed(ctypes.byref(tensors))
            problem = tensors.experts
            launched.append((problem, tensors))
        return launched

    run.again = again
    yield run
    close()


def test_auto_decides_for_each_kind_of_layer(driver, session_of, clock):
    """Layers of the same attributes share a measurement; one that the CPU's kernels do not take copies."""
    clock(8e6)
    float8 = build(of_format("fp8", BASE))
    refused = replace(float8[0], w13=replace(float8[0].w13, activation_format="int8_token"))
    cases = [BASE, replace(BASE, seed=BASE.seed + 1), None, replace(BASE, intermediate=128)]
    layers = [build(case) if case else (refused, *float8[1:]) for case in cases]
    launched = session_of(layers, experts="host", misses="auto", threads="2")
    assert [(p.host_share, p.host_layer) for p, _ in launched] == [(256, 0), (256, 1), (0, 0), (256, 2)]
    assert re.search(
        r"; misses = auto: cpu in layers 0-1 \(with [^()]* us, 2 at once\), "
        r"copy in layers 2 \(quantmoe.misses: the CPU does not take this layer: w13_activation_format is [^()]*\), "
        r"cpu in layers 3 \(with [^()]* us, 2 at once\), in 2 threads",
        driver.lib.driver_logged().decode(),
    )
    assert driver.lib.driver_logged().decode().endswith("; quantmoe.misses = 2*cpu,1*copy,1*cpu fixes it")
    last = Asked(launched[0][1], layers[0])  # the 16th request of the last measurement
    assert (last.request[2:5].tolist(), last.ids[:2].tolist()) == ([2, 1, 2], [6, 7])
    for number, at in enumerate([0, 1, 3], 1):
        problem, tensors = launched[at]
        x, ids, weights = cases[at].tokens(2)
        host = Asked(tensors, layers[at])
        y = host.multiply(number, x.astype(np.float32), ids.astype(np.int32), weights, problem.host_layer)
        want = reference.quant_moe(layers[at][0], layers[at][1], x, ids, weights)
        assert np.linalg.norm(y - want) < 2.0**-18 * np.linalg.norm(want)


def test_the_misses_of_each_layer(driver, session_of):
    """As auto prints them, and shares; a layer that the CPU's kernels do not take may copy."""
    float8 = build(of_format("fp8", BASE))
    refused = (replace(float8[0], w13=replace(float8[0].w13, activation_format="int8_token")), *float8[1:])
    cases = [BASE, replace(BASE, seed=BASE.seed + 1), None, replace(BASE, intermediate=128)]
    layers = [build(case) if case else refused for case in cases]
    entries = {"experts": "host", "threads": "2"}
    for misses, shares in (
        ("2*cpu,1*copy,1*cpu", [256, 256, 0, 256]),
        ("1*copy,1*62%,1*copy,1*cpu", [0, 159, 0, 256]),
    ):
        launched = session_of(layers, **entries, misses=misses)
        assert [p.host_share for p, _ in launched] == shares
        assert f"; misses = {misses}, in 2 threads (" in driver.lib.driver_logged().decode()
        for number, at in enumerate(np.flatnonzero(shares), 1):
            problem, tensors = launched[at]
            x, ids, weights = cases[at].tokens(2)
            host = Asked(tensors, layers[at])
            y = host.multiply(number, x.astype(np.float32), ids.astype(np.int32), weights, problem.host_layer)
            want = reference.quant_moe(layers[at][0], layers[at][1], x, ids, weights)
            assert np.linalg.norm(y - want) < 2.0**-18 * np.linalg.norm(want)
    assert all(p.host_share == 0 for p, _ in session_of(layers, experts="host", misses="4*copy"))
    with pytest.raises(AssertionError, match="the CPU does not take this layer"):
        session_of(layers, **entries, misses="4*cpu")
    for misses, count in (("2*cpu,1*copy", 3), ("2*cpu,1*copy,2*cpu", 5)):
        with pytest.raises(AssertionError) as error:
            session_of(layers, **entries, misses=misses)
        assert f"quantmoe.misses = {misses} is of {count} layers, this model has 4" in str(error.value)


def test_auto_measures_what_a_slice_misses(driver, session_of):
    """Of a token's experts it has a third."""
    session_of([build(replace(BASE, offset=8, total_experts=24))], experts="host", misses="auto", threads="2")
    assert " us, 1 at once)" in driver.lib.driver_logged().decode()


def test_auto_after_a_start_that_failed(driver, session_of, clock):
    """What a failed start has decided for a layer is of no use to the next, which copies."""
    layers = [build(BASE), build(replace(BASE, intermediate=128))]
    clock(8e6, times=3)  # of the first kind of layer
    with pytest.raises(AssertionError, match="the time of a copy"):
        session_of(layers, experts="host", misses="auto", threads="2")
    clock(0)
    launched = session_of.again(layers)
    assert [p.host_share for p, _ in launched] == [0, 0]
    assert "; misses = auto: copy in layers 0 (" in driver.lib.driver_logged().decode()


def test_auto_packs_what_ram_has_room_for(driver, session_of, layer, clock):
    clock(8e6)
    spec = of_cpu(layer[0])
    packed = 8 * sum(LAYOUTS["cpu_panel"].row_bytes(spec, p) for p in ("w13", "w2"))
    layers = [build(replace(BASE, seed=BASE.seed + i)) for i in range(3)]
    for ram, shares, said in (
        (3 * packed, [256] * 3, "cpu in layers 0-2 (with "),
        (3 * packed - 1, [256, 256, 0], "RAM has no room for the CPU's copy), in 2 threads"),
        (packed - 1, [0] * 3, "misses = auto: copy in layers 0-2 (RAM has no room to measure the CPU)"),
    ):
        launched = session_of(layers, experts="auto", misses="auto", threads="2", ram=str(ram))
        assert [problem.host_share for problem, _ in launched] == shares
        assert said in driver.lib.driver_logged().decode()


def write_trace(path: Path, layers, runs: list[tuple[int, np.ndarray]]) -> str:
    """As a session of such layers writes it; runs: a layer, and ids [tokens, top_k]."""
    of = [
        {"node": 'QuantMoE node "moe"', "experts": len(made[2]), "bytes": sum(w.shape[1] for w in made[2:])}
        for made in layers
    ]
    header = {"quantmoe_trace": 1, "slot_bytes": ram_slot(layers[0]), "layers": of}
    words = [np.array([at, ids.shape[1], len(ids), 0, *ids.ravel()], "<u2").tobytes() for at, ids in runs]
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(words))
    return str(path)


def slots_of(problem: cuda.Experts, tensors: cuda.Launched, layer) -> list[int]:
    """The expert that each slot has, 0 and up; its bytes are there, and both tables say so."""
    experts, (first, second) = len(layer[2]), (-(-w.shape[1] // 256) * 256 for w in layer[2:])
    size = experts + problem.slots
    table = np.frombuffer((ctypes.c_int32 * size).from_address(tensors.experts.cache_state + 48), np.int32) - 1
    slot_of, expert_of = table[:experts], table[experts:]
    for slot, expert in enumerate(expert_of):
        assert slot_of[expert] == slot
        for w, at in zip(layer[2:], (0, first), strict=True):
            held = ctypes.string_at(tensors.experts.slot_memory + slot * (first + second) + at, w.shape[1])
            assert held == w[expert].tobytes()
    assert (slot_of >= 0).sum() == problem.slots
    return expert_of.tolist()


@pytest.mark.parametrize("misses", ["copy", "cpu", "62%", "auto"])
def test_slots_begin_with_what_a_trace_used(driver, session_of, tmp_path, misses):
    """Most of all, of each layer, the most used last; of a trace that another session wrote."""
    case = replace(BASE, hidden=360, intermediate=90, bias=True)  # whose second row begins later than the first ends
    layers = [build(replace(case, seed=case.seed + i)) for i in range(2)]
    entries = {"experts": "host", "gpu_memory": str(8 * sum(-(-w.shape[1] // 256) * 256 for w in layers[0][2:]))}
    session_of(layers, **entries, trace=str(tmp_path / "own"))
    write_trace(tmp_path / "same", layers, [(at, np.zeros((2, 2), int)) for at in (0, 1)])
    session_of(layers, **entries)  # the first one is closed, and its trace
    assert (tmp_path / "own").read_bytes() == (tmp_path / "same").read_bytes()
    used = [np.array([[5, 2], [5, 7], [5, 0xFFFF], [2, 7], [7, 5], [0, 7]]), np.array([[1, 3], [6, 3], [3, 6], [3, 1]])]
    path = write_trace(tmp_path / "trace", layers, [*enumerate(used), (1, np.array([[6, 3]]))])
    launched = session_of(layers, **entries, misses=misses, warm=path)
    found = [slots_of(*of, made) for of, made in zip(launched, layers, strict=True)]
    assert found == [[2, 5, 7], [1, 6, 3]]  # 2, 4, 4 times and 2, 3, 5
    assert "; slots have 6 experts at first, as quantmoe.warm says" in driver.lib.driver_logged().decode()


def test_auto_chooses_by_a_trace(driver, session_of, clock, tmp_path):
    """With the same times copies where routes are local, and the CPU where they come around."""
    layers = [build(replace(BASE, seed=BASE.seed + i)) for i in range(3)]
    entries = {"experts": "host", "misses": "auto", "threads": "2"}
    entries["gpu_memory"] = str(14 * sum(w.shape[1] for w in layers[0][2:]))

    def choose(**more: str) -> tuple[list[int], str]:
        """The CPU's shares in a session, and its log. The CPU's time is measured, and varies on a busy machine. Where
        copies take 8 to 3,000 times as long, the outcome is the same."""
        cpu = 0
        for _ in range(50):
            clock(160 * 8e-3 * cpu)
            launched = session_of(layers, **entries, **more)
            log = driver.lib.driver_logged().decode()
            bus, cpu = map(int, re.findall(r"the bus (\d+) us, the CPU (\d+) us", log)[-1])
            assert all(problem.slots == 4 for problem, _ in launched)
            if 0 < 8 * cpu <= bus <= 3000 * cpu:
                return [problem.host_share for problem, _ in launched], log
        pytest.fail("the CPU's time varies too much")

    assert choose()[0] == [256] * 3
    # In the second half 4 to 7 are asked for, which miss once with copies and always without, or all in turn, which
    # always miss with copies, and without every other time. What a prompt of nine asks for misses in either case.
    local = [np.array([[0, 2]]) + at % 2 + 4 * (at >= 20_000) for at in range(40_000)]
    around = [np.array([[0, 1]]) + 2 * at % 8 for at in range(200)]
    prompt = np.array([[e % 8, (e + 1) % 8] for e in range(9)])
    runs = [(0, ids) for ids in local] + [(1, ids) for ids in (*around, prompt)] + [(2, prompt)] * 4
    shares, log = choose(warm=write_trace(tmp_path / "trace", layers, runs))
    assert shares == [0, 256, 256]  # nothing is known of the last one's tokens
    assert re.search(
        r"; misses = auto: cpu in layers 1-2 \(with slots for 4 of 8 experts a miss takes [^()]* us, 2 at once; "
        r"by quantmoe.warm a token misses 2.0 with copies, 1.0 with the CPU\), copy in layers 0 \(with [^()]*; "
        r"by quantmoe.warm a token misses 0.0 with copies, 2.0 with the CPU\), in 2 threads",
        log,
    )


def test_a_trace_that_is_none(driver, hosted, layer, tmp_path):
    path, slot = tmp_path / "trace", sum(w.shape[1] for w in layer[2:])
    whole = Path(write_trace(path, [layer], [(0, np.array([[5, 2], [5, 7]]))])).read_bytes()
    for damaged, message in (
        (None, "No such file or directory"),
        (b"", "expected a trace that quantmoe.trace wrote"),
        (
            whole.replace(b'"experts": 8', b'"experts": 9'),
            r'it is of another model or target: its layer 0 is "node": "QuantMoE node \"moe\"", "experts": 9, ',
        ),
        (whole[:-2], "it ends within the record at word 0"),
        (whole[:-2] + b"\x08\0", "the record at word 0 has a layer or an expert that the model lacks"),
    ):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        assert hosted(gpu_memory=str(4 * slot), warm=str(path)) is None
        assert driver.error.startswith(f'QuantMoE node "moe": quantmoe.warm {path}: {message}')
        path.touch()


def test_a_layer_that_the_cpu_does_not_take(driver, fake):
    layer = build(of_format("fp8", BASE))
    attributes = layer[0].attributes() | {"w13_activation_format": "int8_token"}
    assert fake(experts="host", misses="cpu") > 0
    assert driver.create(driver.op("bf16", "i64"), attributes, [value(())] * 3 + packed_values(layer[2:])) is None
    assert driver.error == (
        'QuantMoE node "moe": quantmoe.misses: the CPU does not take this layer: w13_activation_format is '
        '"int8_token", w13_format "fp8_e4m3" needs none or a float format'
    )


def ram_slot(layer) -> int:
    """Bytes of an expert in RAM: both rows in pages, and a page each for where they begin."""
    return sum(-(-w.shape[1] // 4096) * 4096 + 4096 for w in layer[2:])


class InFile:
    """A session whose layer's experts are in a file. On the fake GPU its cache stays as the test makes it.

    Args:
        register: opens an adapter with session entries.
    """

    def __init__(
        self,
        driver,
        register,
        layer,
        folder: Path,
        dtypes: tuple[str, str] = ("bf16", "i64"),
        size: int | None = None,
        **entries: str | None,
    ):
        self.driver, self.layer, self.path, self.lib = driver, layer, folder / "model.onnx.data", ctypes.CDLL(FAKE)
        ends = np.cumsum([4096, *(-(-w.nbytes // 64) * 64 for w in layer[2:])])
        with self.path.open("wb") as file:
            for w, at in zip(layer[2:], ends, strict=False):
                file.seek(at)
                file.write(w.tobytes())
        if size is not None:
            os.truncate(self.path, size)  # longer, with a hole
        self.mapped = np.memmap(self.path, np.uint8, "r", shape=(int(ends[1]) + layer[3].nbytes,))
        base = self.mapped.ctypes.data
        self.weights = [
            value((len(w), w.shape[1] // 4), True, base + int(at)) for w, at in zip(layer[2:], ends, strict=False)
        ]
        self.slot = sum(w.shape[1] for w in layer[2:])
        settings = {"experts": "disk", "gpu_memory": str(3 * self.slot), "ram": str(8 * ram_slot(layer))} | entries
        assert register(**{name: entry for name, entry in settings.items() if entry is not None}) > 0
        self.op, self.id_type = driver.op(*dtypes), {"i32": np.int32, "i64": np.int64}[dtypes[1]]
        self.kernel = driver.create(self.op, layer[0].attributes(), [value(())] * 3 + self.weights)

    def run(self, ids: list[list[int]], captured: bool = False) -> cuda.Launched | None:
        """What was launched, or None."""
        fed = np.array(ids, self.id_type)
        shape = (len(ids), self.layer[0].hidden_size)
        tokens = [value(shape), value(fed.shape, data=fed.ctypes.data), value(fed.shape)]
        self.lib.driver_order(1, captured)
        failed = self.driver.run(self.op, self.kernel, [*tokens, *self.weights], [tokens[0], *[value(())] * 2], STREAM)
        self.lib.driver_order(1, 0)
        tensors = cuda.Launched()
        self.lib.driver_mixed(ctypes.byref(tensors))
        return None if failed else tensors

    def rows(self, tensors: cuda.Launched, expert: int) -> list[bytes]:
        """An expert's rows, where the launch was told that they are."""
        experts = len(self.layer[2])
        table = (ctypes.c_void_p * (2 * experts)).from_address(tensors.experts.rows)
        return [ctypes.string_at(table[i * experts + expert], w.shape[1]) for i, w in enumerate(self.layer[2:])]

    def slot_of(self, tensors: cuda.Launched) -> np.ndarray:
        """The device's table, to be changed."""
        experts = len(self.layer[2])
        return np.frombuffer((ctypes.c_int32 * experts).from_address(tensors.experts.cache_state + 48), np.int32)

    def bytes_read(self) -> int:
        return experts_report(FAKE)[0]["bytes_read"]

    def close(self) -> None:
        self.driver.lib.driver_destroy(self.op, self.kernel)


@pytest.fixture
def in_file(driver, fake, layer, tmp_path):
    made = []

    def open_file(*args, **entries) -> InFile:
        made.append(InFile(driver, fake, layer, tmp_path, *args, **entries))
        assert made[-1].kernel is not None, driver.error
        return made[-1]

    yield open_file
    for session in made:
        session.close()


@pytest.mark.parametrize("id_type", ["i32", "i64"])
def test_experts_that_are_read_from_the_file(driver, layer, in_file, id_type):
    """What a call asks for and the device does not have, once, as long as RAM keeps it."""
    session = in_file(("bf16", id_type))
    want = [[w[e].tobytes() for w in layer[2:]] for e in range(8)]
    tensors = session.run([[6, 1], [1, -1], [99, 6]])
    assert (tensors.w13, tensors.w2) == (None, None)
    assert "page-locked memory for 8" in driver.lib.driver_logged().decode()
    assert [session.rows(tensors, e) for e in (1, 6)] == [want[1], want[6]]
    assert session.bytes_read() == 2 * session.slot
    slot_of = session.slot_of(tensors)
    slot_of[[1, 3]] = 2, 1  # as resolve_experts would have left it
    tensors = session.run([[1, 3]])
    assert session.bytes_read() == 2 * session.slot
    slot_of[:] = 0
    tensors = session.run([[1, 3]])  # 1 is still in RAM
    assert [session.rows(tensors, e) for e in (1, 3)] == [want[1], want[3]]
    assert session.bytes_read() == 3 * session.slot
    tensors = session.run([[e, 7 - e] for e in range(8)])
    assert [session.rows(tensors, e) for e in range(8)] == want
    assert session.bytes_read() == 8 * session.slot


def test_a_trace_of_experts_in_the_file(driver, layer, in_file, tmp_path):
    """RAM has what it used most, and the device's slots the most used of it."""
    path = write_trace(tmp_path / "trace", [layer], [(0, np.array([[5, 2], [5, 7], [2, 5], [3, 1]]))])
    session = in_file(warm=path)
    tensors = session.run([[5, 2]])
    assert slots_of(tensors.experts, tensors, layer) == [2, 5]
    assert session.bytes_read() == 5 * session.slot
    session.run([[1, 7]])
    assert [session.rows(tensors, e) for e in (1, 7)] == [[w[e].tobytes() for w in layer[2:]] for e in (1, 7)]
    assert session.bytes_read() == 5 * session.slot
    session.run([[0, 5]])
    assert session.bytes_read() == 6 * session.slot


def test_a_trace_below_the_device_is_read_once(driver, layer, in_file, tmp_path):
    whole = Path(write_trace(tmp_path / "trace", [layer], [(0, np.array([[5, 2]]))])).read_bytes()
    os.mkfifo(pipe := tmp_path / "pipe")
    ended, opened = threading.Event(), []

    def write() -> None:
        for again in (False, True):
            if again:
                ended.wait(60)  # the library has closed it, or waits to read it once more
            with pipe.open("wb") as file:  # waits for who reads it
                opened.append(ended.is_set())
                file.write(whole)

    (writer := threading.Thread(target=write)).start()
    assert in_file(warm=str(pipe)).run([[5, 2]]) is not None, driver.error
    ended.set()
    assert pipe.read_bytes() == whole
    writer.join()
    assert opened == [False, True]


def test_layers_share_the_ram(driver, fake, layer, tmp_path):
    """The experts that a call asks for take the place of the other layer's."""
    layers, sessions = [layer, build(replace(BASE, seed=BASE.seed + 1))], []
    for i, made in enumerate(layers):
        (folder := tmp_path / str(i)).mkdir()
        sessions.append(InFile(driver, fake, made, folder))
    every = [[e, 7 - e] for e in range(8)]
    for call in range(6):
        session, made = sessions[call % 2], layers[call % 2]
        tensors = session.run(every)
        assert tensors is not None, driver.error
        assert [session.rows(tensors, e) for e in range(8)] == [[w[e].tobytes() for w in made[2:]] for e in range(8)]
        assert session.bytes_read() == (call + 1) * 8 * session.slot
    for session in sessions:
        session.close()


def test_a_captured_graph_of_experts_in_the_file(driver, in_file):
    session = in_file()
    assert session.run([[0, 1]], captured=True) is None
    assert driver.error.endswith("disk: the first run is captured, expected a run before it")
    assert session.run([[0, 1]]) is not None
    assert session.run([[0, 1]], captured=True) is None
    assert driver.error.endswith("a CUDA graph is captured, whose replays read no file; run without one")


def test_experts_of_a_file_that_all_fit(driver, layer, in_file):
    """They are copied once, and graphs are captured as ever."""
    session = in_file(gpu_memory="auto")
    assert session.run([[0, 1]]) is not None
    tensors = session.run([[0, 1]], captured=True)
    assert ctypes.string_at(tensors.w13, layer[2].nbytes) == layer[2].tobytes()
    assert (tensors.experts.rows, session.bytes_read()) == (None, 0)


def test_ram_for_fewer_experts_than_a_layer_has(driver, layer, in_file):
    session = in_file(ram=str(8 * ram_slot(layer) - 1))
    for _ in range(2):
        assert session.run([[0, 1]]) is None
        assert driver.error.endswith(
            f"quantmoe.ram has room for 7 experts, expected at least the 8 of one layer, {8 * ram_slot(layer)} bytes"
        )


def test_a_file_that_is_truncated_below_the_device(driver, in_file):
    """An error that names node, expert and file; what RAM has goes on."""
    session = in_file()
    assert session.run([[5, 2]]) is not None
    os.truncate(session.path, 5000)
    for _ in range(2):
        assert session.run([[4, 4]]) is None
        assert driver.error.startswith('QuantMoE node "moe": expert 4: ')
        assert str(session.path) in driver.error
        assert session.run([[5, 2]]) is not None


def test_a_file_that_ram_has_no_room_for(driver, fake, layer, tmp_path):
    """Whose pages host would lock: refused before that, and auto reads experts from it."""
    more = 1 << 42
    session = InFile(driver, fake, layer, tmp_path, size=more, experts="host", ram=None)
    assert session.kernel is None
    assert re.fullmatch(
        rf'QuantMoE node "moe": quantmoe.experts = host: experts take {more} bytes in RAM, \d+ are available; '
        "with quantmoe.experts = disk they are read from the file",
        driver.error,
    )
    session = InFile(driver, fake, layer, tmp_path, size=more, experts="auto", misses="cpu", ram=None)
    assert session.kernel is None  # the CPU multiplies what is in RAM
    assert "quantmoe.experts = auto: experts take " in driver.error
    for entries, copies in (({}, ""), ({"misses": "auto"}, "; misses = auto: copy, as experts are read from the file")):
        session = InFile(driver, fake, layer, tmp_path, size=more, experts="auto", ram=None, **entries)
        assert session.kernel is not None, driver.error
        tensors = session.run([[6, 1]])
        assert tensors is not None, driver.error
        assert session.rows(tensors, 6) == [w[6].tobytes() for w in layer[2:]]
        said = driver.lib.driver_logged().decode()
        assert f"experts = auto, which is disk here (they take {more} bytes in RAM, " in said
        assert said.endswith("; page-locked memory for 8" + copies)
        session.close()


def test_auto_with_less_ram_than_the_file(driver, fake, layer, tmp_path):
    """It is said by quantmoe.ram; with as much as the file has its pages are locked as with host."""
    held = 8 * ram_slot(layer)
    session = InFile(driver, fake, layer, tmp_path, size=held + 4096, experts="auto", ram=str(held))
    tensors = session.run([[0, 1]])
    assert tensors is not None, driver.error
    assert tensors.experts.rows is not None
    assert session.run([[0, 1]], captured=True) is None
    assert driver.error.endswith(
        f"quantmoe.experts = auto, which is disk here (they take {held + 4096} bytes in RAM, quantmoe.ram is {held}): "
        "a CUDA graph is captured, whose replays read no file; run without one"
    )
    session.close()
    session = InFile(driver, fake, layer, tmp_path, size=held + 4096, experts="auto", ram=str(held + 4096))
    tensors = session.run([[0, 1]])
    assert tensors is not None, driver.error
    assert tensors.experts.rows is None
    assert ctypes.string_at(tensors.w13, 64) == layer[2].tobytes()[:64]
    session.close()


def test_experts_that_no_file_has(driver, fake, layer):
    assert fake(experts="disk") > 0
    values = [value(())] * 3 + packed_values(layer[2:])
    assert driver.create(driver.op("bf16", "i64"), layer[0].attributes(), values) is None
    assert "quantmoe.experts = disk, but its packed weights are not mapped from a file" in driver.error


@gpu
@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("id_type", ["i32", "i64"])
@pytest.mark.parametrize(("where", "warm"), [("disk", False), ("disk", True), ("host", True)])
def test_the_bytes_of_experts_in_the_file(driver, layer, tmp_path, slots, id_type, where, warm):
    """Two layers in RAM for one of them: calls on two streams evict there and on the device."""
    layers = [layer, build(replace(BASE, seed=BASE.seed + 1))]
    resident = [cuda.CudaMoE(made[0], *(torch.from_numpy(w).cuda() for w in made[2:])) for made in layers]
    budget = str(2 * slots * sum(w.shape[1] for w in layer[2:]))

    def register(**entries: str) -> int:
        return driver.open(21, None, entries)

    sessions, entries = [], {"experts": where} | ({"ram": None} if where == "host" else {})
    if warm:
        runs = [(at, np.array([[e, 7 - e]])) for at in (0, 1) for e in (6, 2, 6, 3)]
        entries["warm"] = write_trace(tmp_path / "trace", layers, runs)
    for i, made in enumerate(layers):
        (folder := tmp_path / str(i)).mkdir()
        sessions.append(InFile(driver, register, made, folder, ("bf16", id_type), gpu_memory=budget, **entries))
        assert sessions[-1].kernel is not None, driver.error
    streams, rng = [torch.cuda.Stream(), torch.cuda.Stream()], np.random.default_rng(5)
    found = []
    for call in range(300):
        session, run = sessions[call % 2], resident[call % 2]
        tokens = int(rng.choice([1, 1, 1, 2, 9, 70]))
        hidden, _, weights = BASE.tokens(tokens, seed=call)
        ids = rng.integers(-1, 8, (tokens, BASE.top_k)).astype(session.id_type)
        x = torch.from_numpy(hidden).to(TORCH["bf16"]).cuda()
        inputs = [x, torch.from_numpy(ids).cuda(), torch.from_numpy(weights).cuda()]
        want, output = run(*inputs), torch.full_like(x, float("nan"))
        values = [value(tuple(t.shape), data=t.data_ptr()) for t in (*inputs, output)]
        torch.cuda.current_stream().synchronize()
        made = driver.run(session.op, session.kernel, [*values[:3], *session.weights], [values[3], *[value(())] * 2],
                          streams[call // 3 % 2])  # fmt: skip
        assert made == 0, driver.error
        found.append((want, output, inputs))
    torch.cuda.synchronize()
    for at, (want, output, _) in enumerate(found):
        assert torch.equal(want.view(torch.int16), output.view(torch.int16)), at
    for session in sessions:
        session.close()
    driver.open(21)


@gpu
@pytest.mark.parametrize("misses", ["cpu", "62%", "auto"])
@pytest.mark.parametrize("id_type", ["i32", "i64"])
def test_the_cpu_beside_the_device(driver, misses, id_type):
    """Two layers of a session, on two streams: within five roundings of all experts on the device (built.UNIT)."""
    shape = replace(BASE, hidden=512, intermediate=256)
    layers = [build(replace(shape, seed=shape.seed + i)) for i in range(2)]
    resident = [cuda.CudaMoE(made[0], *(torch.from_numpy(w).cuda() for w in made[2:])) for made in layers]
    slot = sum(w.shape[1] for w in layers[0][2:])
    assert driver.open(21, None, {"experts": "host", "misses": misses, "gpu_memory": str(6 * slot)}) > 0, driver.error
    op, dtype = driver.op("bf16", id_type), {"i32": np.int32, "i64": np.int64}[id_type]
    weights = [packed_values(made[2:]) for made in layers]
    kernels = [
        driver.create(op, made[0].attributes(), [value(())] * 3 + of) for made, of in zip(layers, weights, strict=True)
    ]
    streams, rng, found = [torch.cuda.Stream(), torch.cuda.Stream()], np.random.default_rng(5), []
    for call in range(300):
        tokens = int(rng.choice([1, 1, 1, 2, 8, 9, 70]))
        hidden, _, factors = shape.tokens(tokens, seed=call)
        ids = rng.integers(-1, 8, (tokens, shape.top_k)).astype(dtype)
        x = torch.from_numpy(hidden).to(TORCH["bf16"]).cuda()
        inputs = [x, torch.from_numpy(ids).cuda(), torch.from_numpy(factors).cuda()]
        want, output = resident[call % 2](*inputs), torch.full_like(x, float("nan"))
        values = [value(tuple(t.shape), data=t.data_ptr()) for t in (*inputs, output)]
        torch.cuda.current_stream().synchronize()
        made = driver.run(op, kernels[call % 2], [*values[:3], *weights[call % 2]], [values[3], *[value(())] * 2],
                          streams[call // 3 % 2])  # fmt: skip
        assert made == 0, driver.error
        found.append((want, output, inputs))
    torch.cuda.synchronize()
    for at, (want, output, _) in enumerate(found):
        limit = (5 / 3) ** 0.5 * UNIT["bf16"] * torch.linalg.norm(want.double())
        assert torch.linalg.norm(output.double() - want.double()) <= limit, at
    (report,) = experts_report(quantmoe.ort_cuda_library_path())
    chosen = re.search(r"misses = auto: (copy|cpu) in layers 0-1 \(", driver.lib.driver_logged().decode())
    assert bool(chosen) == (misses == "auto")
    assert (report["computed"] > 0) == (chosen is None or chosen[1] == "cpu")
    for kernel in kernels:
        driver.lib.driver_destroy(op, kernel)
    driver.open(21)


@gpu
@pytest.mark.parametrize("act_order", ["shared", "split"])
@pytest.mark.parametrize("bad", [-1, 256, 5], ids=["negative", "past the end", "repeated"])
def test_a_bad_act_order_ends_the_session(driver, act_order, bad):
    made = build(replace(BASE, act_order=act_order, group_size=64))
    spec, w13 = made[0], made[2]
    order = w13[-1, LAYOUTS["marlin"].row(spec, "w13").part("perm")].view(np.int32)

    def create():
        rows = [torch.from_numpy(w).cuda() for w in made[2:]]
        constant = [value((len(w), w.shape[1] // 4), True, r.data_ptr()) for w, r in zip(made[2:], rows, strict=True)]
        created = driver.create(driver.op("bf16", "i64"), spec.attributes(), [value(())] * 3 + constant)
        if created:
            driver.lib.driver_destroy(driver.op("bf16", "i64"), created)
        return created

    assert create(), driver.error
    order[5] = feature = int(order[6]) if bad == 5 else bad
    assert not create()
    how = "twice" if bad == 5 else "in it"
    assert driver.error.endswith(
        f"w13 of expert {len(w13) - 1} has an act-order with feature {feature} {how}, expected each of 256 once"
    )


@gpu
def test_a_bad_act_order_of_a_linear_ends_the_session(driver):
    _, spec, w = build_linear(replace(BASE, act_order="shared"))
    order = w[0, LAYOUTS["marlin"].row(spec.moe, "w2").part("perm")].view(np.int32)
    order[0] = -7
    row = torch.from_numpy(w).cuda()
    op = driver.op("bf16", name="QuantLinear")
    values = [value(()), value((1, w.shape[1] // 4), True, row.data_ptr()), *[value(())] * 3]
    assert not driver.create(op, spec.attributes(), values)
    assert "w of expert 0 has an act-order with feature -7 in it" in driver.error


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("w13_perm", None, "attribute w13_perm of kind i is required"),
        ("swiglu_limit", None, "attribute swiglu_limit of kind f is required"),
        ("w2_layout", None, "attribute w2_layout of kind s is required"),
        ("activation", "tanh", 'activation is "tanh", the operator defines: silu'),
        ("hidden_size", 1 << 40, "hidden_size is 1099511627776, outside int32"),
        ("hidden_size", 512, "w13 has shape"),
    ],
)
def test_wrong_attribute(driver, layer, name, new, message):
    attributes = {k: v for k, v in (layer[0].attributes() | {name: new}).items() if v is not None}
    assert driver.create(driver.op("bf16", "i64"), attributes, constants(layer)) is None
    assert driver.error.startswith('QuantMoE node "moe": ')
    assert message in driver.error


def test_wrong_weights(driver, layer):
    for at, new, message in (
        (3, value((8, 4), True), "w13 has shape [8, 4], expected [experts, "),
        (4, value((7, layer[3].shape[1] // 4), True), "w13 has 8 experts and w2 7"),
        (4, value((8, layer[3].shape[1] // 4), False), "w2 is computed or fed at run time, expected an initializer"),
    ):
        values = constants(layer)
        values[at] = new
        assert driver.create(driver.op("f16", "i32"), layer[0].attributes(), values) is None
        assert message in driver.error


@gpu
@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("op_version", 99, "op_version is 99"),
        ("w13_layout_version", 1, "marlin version 2: export the model again"),
        ("w13_pre_scale", 2, "w13_pre_scale is 2"),
        ("expert_offset", 1, "num_experts = 8"),
    ],
)
def test_wrong_for_the_kernels(driver, layer, name, new, message):
    values = constants(layer)
    assert driver.create(driver.op("bf16", "i64"), layer[0].attributes() | {name: new}, values) is None
    assert message in driver.error


@gpu
@pytest.mark.parametrize("id_type", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("floats", [False, True])
def test_run(driver, dtype, id_type, floats):
    layer = build(of_format(dtype, BASE) if floats else BASE)
    spec: MoESpec = layer[0]
    op = driver.op(dtype, "i64" if id_type is np.int64 else "i32")
    packed = [torch.from_numpy(w).cuda() for w in layer[2:]]
    kernel = driver.create(op, spec.attributes(), constants(layer))
    assert kernel is not None, driver.error
    stream = torch.cuda.Stream()
    for leading in ((1,), (2, 4), (40,), (3, 200), (0, 5)):
        tokens = int(np.prod(leading))
        hidden, ids, weights = BASE.tokens(tokens)
        hidden = torch.from_numpy(hidden).to(TORCH[dtype])
        inputs = [
            hidden.cuda(),
            torch.from_numpy(ids.astype(id_type)).cuda(),
            torch.from_numpy(weights).cuda(),
            *packed,
        ]
        output = torch.full_like(inputs[0], float("nan"))
        x, k = (*leading, BASE.hidden), (*leading, BASE.top_k)
        shapes = [x, k, k, *((len(w), w.shape[1] // 4) for w in packed), x]
        values = [value(s, data=t.data_ptr()) for s, t in zip(shapes, [*inputs, output], strict=True)]
        torch.cuda.synchronize()
        status = driver.run(op, kernel, values[:5], values[5:], stream)
        assert status == 0, driver.error
        torch.cuda.synchronize()
        assert driver.lib.driver_live_scratch() == 0
        if tokens:
            want = reference.quant_moe(spec, layer[1], hidden.float().numpy(), ids, weights)
            error = np.linalg.norm(output.double().cpu().numpy() - want) / np.linalg.norm(want)
            assert error < 2 * UNIT[dtype], (leading, error)
    values[0] = value((5, BASE.hidden - 1))
    assert driver.run(op, kernel, values[:5], values[5:], stream) != 0
    assert "hidden_states has shape [5, 255], expected [5, 256]" in driver.error
    driver.lib.driver_destroy(op, kernel)
