"""QuantMoE in the CUDA custom-op library: weights, session entries, experts in host memory, act-orders, runs."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda.built import TORCH, UNIT
from cuda.layers import BASE, build, build_linear
from cuda.ort import FAKE, STREAM, constants, gpu, packed_values, value
from engines.test_identity import identity

from quantmoe.custom_ops import cuda, reference
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.inspecting.fit import device_slots
from quantmoe.exporter.running.trace import read_trace


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_other_weights_are_refused(driver, fake, layer, name):
    """FORMAT.md 1.1, of what is on the device."""
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
        ({"experts": "disk"}, 'quantmoe.experts is "disk", the CUDA library takes gpu, host or auto'),
        ({"experts": "host", "gpu_memory": "2GB"}, 'quantmoe.gpu_memory is "2GB", expected a number of bytes or auto'),
        ({"gpu_memory": "1000"}, "quantmoe.gpu_memory and quantmoe.reserve need quantmoe.experts = host or auto"),
        (
            {"experts": "gpu", "reserve": "1"},
            "quantmoe.gpu_memory and quantmoe.reserve need quantmoe.experts = host or auto",
        ),
        ({"experts": "host", "gpu_memory": "9", "reserve": "9"}, "quantmoe.reserve is of quantmoe.gpu_memory = auto"),
        ({"experts": "host", "ram": "9"}, "quantmoe.ram is an entry of the CPU's library"),
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
    ) -> tuple[cuda.Problem, cuda.Tensors] | None:
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
        problem, tensors = cuda.Problem(), cuda.Tensors()
        lib.driver_mixed(ctypes.byref(problem), ctypes.byref(tensors))
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
    assert None not in (tensors.slots, tensors.cache_state)
    assert (
        driver.lib.driver_logged()
        .decode()
        .startswith(f"quantmoe: experts = {where}: device memory for 3 of 8 experts, and ")
    )


@pytest.mark.parametrize(
    "entries", [{}, {"experts": "auto"}, {"gpu_memory": "auto"}, {"reserve": "0"}, {"gpu_memory": str(1 << 30)}]
)
def test_experts_that_all_fit(driver, hosted, entries):
    problem, tensors = hosted(**entries)
    assert (problem.slots, problem.staging, tensors.slots, tensors.cache_state) == (0, 0, None, None)
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
    assert driver.error.endswith("the session's first run is captured, expected a run before it")


@gpu
@pytest.mark.parametrize("act_order", ["shared", "split"])
@pytest.mark.parametrize("bad", [-1, 256, 5], ids=["negative", "past the end", "repeated"])
def test_a_bad_act_order_ends_the_session(driver, act_order, bad):
    made = build(replace(BASE, act_order=act_order, group_size=64))
    spec, w13 = made[0], made[2]
    order = w13[-1, LAYOUTS["marlin"]._Parts(spec, "w13").slices["perm"]].view(np.int32)

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
    order = w[0, LAYOUTS["marlin"]._Parts(spec.moe, "w2").slices["perm"]].view(np.int32)
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
def test_run(driver, layer, dtype, id_type):
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
    assert "hidden_states has shape [5, 255], expected [.., hidden_size 256]" in driver.error
    driver.lib.driver_destroy(op, kernel)
