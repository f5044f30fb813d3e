"""The CUDA custom-op library: loaded by ONNX Runtime anywhere, its kernels through ort_driver.cc where a GPU is."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from specs import attention_spec, conv_spec, delta_spec, routing_spec, state_shapes

import quantmoe
from quantmoe.custom_ops import cuda, reference
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import AttentionSpec, MoESpec, NormSpec, RouterSpec, RowsSpec
from quantmoe.exporter.inspecting.fit import device_slots
from quantmoe.exporter.running.trace import read_trace

if "QUANTMOE_ORT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
torch = pytest.importorskip("torch")
from cuda.layers import BASE, TORCH, UNIT, build, build_linear  # noqa: E402
from cuda.test_attention import Inputs  # noqa: E402
from cuda.test_linear_attention import conv_inputs, delta_inputs, tensor  # noqa: E402
from engines.test_identity import identity  # noqa: E402

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

    def create(self, op: int, attributes: dict, values: list[Value]) -> _PTR | None:
        info = _PTR(self.lib.driver_info())
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


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture(scope="module")
def layer():
    return build(BASE)


def constants(layer) -> list[Value]:
    """hidden_states, ids and weights are no initializers; w13 and w2 are."""
    return [value(()), value(()), value(())] + [value((len(w), w.shape[1] // 4), True) for w in layer[2:]]


def test_operators(driver):
    assert driver.count == 29
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
    for name, at, state in (("CausalConv", 3, "T"), ("GatedDelta", 7, "f32")):
        for dtype in ("f16", "bf16"):
            op = driver.op(dtype, name=name)
            types = [driver.lib.driver_type(op, i) for i in (at, at + 1, -1)]
            assert types == [TYPES.get(state, TYPES[dtype]), TYPES["i32"], TYPES[dtype]]
    for dtype in ("f16", "bf16"):
        for ids in ("i32", "i64"):
            op = driver.op(dtype, ids)
            assert [driver.lib.driver_name(op, i) for i in range(2)] == [b"QuantMoE", b"CUDAExecutionProvider"]
            assert [driver.lib.driver_type(op, i) for i in (2, 3, 4, -1)] == [1, 6, 6, TYPES[dtype]]


def test_exported_symbols_and_libraries():
    path = quantmoe.ort_cuda_library_path()
    listing = subprocess.check_output(["nm", "-D", "--defined-only", path], text=True)
    assert {line.split()[-1] for line in listing.splitlines()} == {"RegisterCustomOps", "qm_experts_report"}
    assert "libcuda" not in subprocess.check_output(["readelf", "-d", path], text=True)


def test_old_runtime_is_refused(driver):
    assert driver.open(20) == -1
    assert driver.error == "quantmoe needs ONNX Runtime 1.21 or newer, found 1.99"
    assert driver.open(21) == 29


@pytest.fixture
def fake(driver):
    """Opens the adapter whose GPU is the test's, with session entries."""
    ctypes.CDLL(FAKE).driver_device(90, 132, 233472)
    driver.lib.driver_scratch_on_device(0)
    yield lambda **entries: driver.open(21, FAKE, entries)
    driver.lib.driver_scratch_on_device(1)
    driver.open(21)


def packed_values(packed: list[np.ndarray]) -> list[Value]:
    return [value((len(w), w.shape[1] // 4), True, w.ctypes.data) for w in packed]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_no_device(driver, layer):
    assert driver.create(driver.op("bf16", "i64"), layer[0].attributes(), constants(layer)) is None
    assert driver.error.startswith('QuantMoE node "moe": CUDA device 0: ')


def test_real_runtime_registers_it(tmp_path: Path, layer):
    """A CPU-only ONNX Runtime loads and registers the library, and then finds no kernel for the node."""
    ort = pytest.importorskip("onnxruntime")
    from engines.one_layer import write_model

    path = write_model(tmp_path / "m.onnx", layer[0], layer[2], layer[3], float_type="BFLOAT16")
    options = ort.SessionOptions()
    options.register_custom_ops_library(quantmoe.ort_cuda_library_path())
    options.log_severity_level = 3
    with pytest.raises(Exception, match="QuantMoE"):
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


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


@pytest.mark.parametrize(
    ("shape", "constant", "message"),
    [
        ((1, 7), True, "w has shape [1, 7], expected [experts, "),
        ((2, None), True, "w has 2 rows, expected 1"),
        ((1, None), False, "w is computed or fed at run time, expected an initializer"),
    ],
)
def test_wrong_linear(driver, shape, constant, message):
    _, spec, w = build_linear(LINEAR_CASE)
    shape = (shape[0], shape[1] or w.shape[1] // 4)
    values = [value(()), value(shape, constant)]
    assert driver.create(driver.op("f16", name="QuantLinear"), spec.attributes(), values) is None
    assert driver.error.startswith('QuantLinear node "moe": ')
    assert message in driver.error


def test_wrong_routing(driver):
    attributes = replace(ROUTING, top_k=25).attributes()
    assert driver.create(driver.op("f32", name="MoERouting"), attributes, []) is None
    assert driver.error == 'MoERouting node "moe": top_k is 25, the CUDA kernel takes 1 to 24'


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_run_linear(driver, dtype):
    m, spec, w = build_linear(LINEAR_CASE)
    op = driver.op(dtype, name="QuantLinear")
    kernel = driver.create(op, spec.attributes(), [value(()), value((1, w.shape[1] // 4), True)])
    assert kernel is not None, driver.error
    packed = torch.from_numpy(w).cuda()
    for leading in ((1,), (3, 50), (0, 5)):
        rows = int(np.prod(leading))
        x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (rows, 512)).astype(np.float32)).to(TORCH[dtype])
        y = torch.full((rows, 264), float("nan"), dtype=x.dtype, device="cuda")
        shapes = [(*leading, 512), (1, w.shape[1] // 4), (*leading, 264)]
        assert run(driver, op, kernel, [x.cuda(), packed], shapes, [y]) == 0, driver.error
        assert driver.lib.driver_live_scratch() == 0
        if rows:
            want = reference.linear(x.float().numpy(), m, "none")
            assert np.linalg.norm(y.double().cpu().numpy() - want) < 1.2 * UNIT[dtype] * np.linalg.norm(want)
    driver.lib.driver_destroy(op, kernel)


@gpu
def test_run_routing(driver):
    op = driver.op("f32", name="MoERouting")
    kernel = driver.create(op, ROUTING.attributes(), [])
    assert kernel is not None, driver.error
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (18, 65)).astype(np.float32))
    bias = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids, weights = torch.full((18, 8), -1, dtype=torch.int32).cuda(), torch.full((18, 8), float("nan")).cuda()
    shapes = [(2, 9, 65), (64,), (2, 9, 8), (2, 9, 8)]
    assert run(driver, op, kernel, [logits.cuda(), bias.cuda()], shapes, [ids, weights]) == 0, driver.error
    want_ids, want = reference.route(ROUTING, logits.numpy(), bias.numpy())
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=4e-6)
    shapes[1] = (63,)
    assert run(driver, op, kernel, [logits.cuda(), bias.cuda()], shapes, [ids, weights]) != 0
    assert driver.error == 'MoERouting node "moe": correction_bias has shape [63], expected [num_experts 64]'
    driver.lib.driver_destroy(op, kernel)


def fails(driver: Driver, op: int, kernel: _PTR, shapes: list[tuple[int, ...]], inputs: int) -> str:
    """The error of a run of tensors that are not there."""
    values = [value(s) for s in shapes]
    assert driver.run(op, kernel, values[:inputs], values[inputs:], STREAM) != 0
    return driver.error


ROUTER = RouterSpec(hidden_size=96, **{n: v for n, v in ROUTING.attributes().items() if n != "op_version"})
ROUTER_SHAPES = [(2, 9, 96), (65, 96), (0,), (64,), (2, 9, 8), (2, 9, 8)]
NORM = NormSpec(norm_epsilon=2.0**-20)


@pytest.mark.parametrize(
    ("change", "weight", "message"),
    [
        ({"top_k": 25}, value((65, 96), True), "top_k is 25, the CUDA kernel takes 1 to 24"),
        ({"hidden_size": 0}, value((65, 96), True), "hidden_size is 0, the CUDA kernels take 1 to 16777216"),
        (
            {},
            value((96, 64), True),
            "weight has shape [96, 64], expected [num_experts + shared_gate, hidden_size] [65, 96]",
        ),
        ({}, value((65, 96)), "weight is computed or fed at run time, expected an initializer"),
    ],
)
def test_wrong_router(driver, fake, change, weight, message):
    fake()
    attributes = replace(ROUTER, **change).attributes()
    assert driver.create(driver.op("f16", name="MoERouter"), attributes, [value(()), weight]) is None
    assert driver.error.startswith('MoERouter node "moe": ')
    assert message in driver.error


@pytest.mark.parametrize(
    ("at", "shape", "message"),
    [
        (0, (2, 9, 95), "hidden_states has shape [2, 9, 95], expected [.., hidden_size 96]"),
        (2, (64,), "bias has shape [64], expected [65]"),
        (3, (1, 64), "correction_bias has shape [1, 64], expected [64]"),
    ],
)
def test_wrong_router_inputs(driver, fake, at, shape, message):
    fake()
    op = driver.op("bf16", name="MoERouter")
    kernel = driver.create(op, ROUTER.attributes(), [value(()), value((65, 96), True)])
    shapes = [*ROUTER_SHAPES[:at], shape, *ROUTER_SHAPES[at + 1 :]]
    assert message in fails(driver, op, kernel, shapes, 4)
    driver.lib.driver_destroy(op, kernel)


def test_wrong_norm(driver, fake):
    fake()
    op = driver.op("f16", name="AddRMSNorm")
    for weight, message in (
        (value((64, 1), True), "weight has shape [64, 1], expected [features]"),
        (value((64,)), "weight is computed or fed at run time, expected an initializer"),
    ):
        assert driver.create(op, NORM.attributes(), [value(()), value(()), weight]) is None
        assert message in driver.error
    kernel = driver.create(op, NORM.attributes(), [value(()), value(()), value((64,), True)])
    same = (3, 64)
    for shapes, message in (
        ([(3, 63), same], "x has shape [3, 63], expected [.., 64] as weight has"),
        ([same, (1, 64)], "residual has shape [1, 64], expected [3, 64]"),
    ):
        assert message in fails(driver, op, kernel, [*shapes, (64,), same, same], 3)
    driver.lib.driver_destroy(op, kernel)


def test_wrong_rows(driver, fake):
    fake()
    op = driver.op("f16", name="TokenRows")
    kernel = driver.create(op, RowsSpec().attributes(), [])
    good = [(2, 4, 8, 64), (2, 1), (2, 8), (2, 3), (2, 1, 1)]
    for at, shape, message in (
        (0, (3, 4, 8, 64), "past_key has shape [3, 4, 8, 64], expected [2, -1, -1, -1]"),
        (1, (2,), "input_ids has shape [2], expected [2, -1]"),
        (2, (8,), "attention_mask has shape [8], expected [-1, -1]"),
    ):
        assert message in fails(driver, op, kernel, [*good[:at], shape, *good[at + 1 :]], 3)
    driver.lib.driver_destroy(op, kernel)


@gpu
def test_run_router_norm_and_rows(driver):
    rng, dtype = np.random.default_rng(0), torch.float16
    x, residual, weight = (torch.from_numpy(rng.normal(0, 1, s)).to(dtype) for s in ((2, 9, 96), (2, 9, 96), (65, 96)))
    correction = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids, weights = torch.full((18, 8), -1, dtype=torch.int32).cuda(), torch.full((18, 8), float("nan")).cuda()
    op = driver.op("f16", name="MoERouter")
    kernel = driver.create(op, ROUTER.attributes(), [value(()), value((65, 96), True)])
    inputs = [x.cuda(), weight.cuda(), torch.zeros(1).cuda(), correction.cuda()]
    assert run(driver, op, kernel, inputs, ROUTER_SHAPES, [ids, weights]) == 0, driver.error
    flat = (t.double().numpy() for t in (x.reshape(18, 96), weight, torch.zeros(0), correction))
    want_ids, want = reference.router(ROUTER, *flat)
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=1e-5)
    driver.lib.driver_destroy(op, kernel)

    op = driver.op("f16", name="AddRMSNorm")
    kernel = driver.create(op, NORM.attributes(), [value(()), value(()), value((96,), True)])
    y, total = (torch.full((2, 9, 96), float("nan"), dtype=dtype).cuda() for _ in range(2))
    inputs = [x.cuda(), residual.cuda(), weight[0].cuda()]
    shapes = [x.shape, x.shape, (96,), x.shape, x.shape]
    assert run(driver, op, kernel, inputs, shapes, [y, total]) == 0, driver.error
    want, sums = reference.add_norm(NORM, x.numpy(), residual.numpy(), weight[0].numpy())
    np.testing.assert_array_equal(total.cpu().numpy(), sums)
    np.testing.assert_allclose(y.double().cpu().numpy(), want, rtol=2.0**-10, atol=2.0**-24)
    driver.lib.driver_destroy(op, kernel)

    op = driver.op("f16", name="TokenRows")
    kernel = driver.create(op, RowsSpec().attributes(), [])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0]])
    rows, last = torch.full((2, 3), -1, dtype=torch.int32).cuda(), torch.full((2, 1, 1), -9).cuda()
    shapes = [(2, 4, 8, 64), (2, 1), (2, 8), (2, 3), (2, 1, 1)]
    inputs = [torch.zeros(1).cuda(), torch.zeros(1).cuda(), mask.cuda()]
    assert run(driver, op, kernel, inputs, shapes, [rows, last]) == 0, driver.error
    assert rows.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert last.flatten().tolist() == [0, 0]
    driver.lib.driver_destroy(op, kernel)


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


@pytest.mark.parametrize(
    ("name", "new", "message"),
    [
        ("softcap", None, "attribute softcap of kind f is required"),
        ("qk_norm", "all", 'qk_norm is "all", the operator defines: none, head, row'),
        ("head_size", 80, "head_size is 80 and v_head_size 64, the CUDA kernels take 64, 96, 128"),
        ("num_heads", 7, "kv_num_heads is 2, expected a divisor of num_heads 7"),
        ("key_split", 32, "head_size is 64, v_head_size 64 and key_split 32, of latent attention the CUDA kernels"),
    ],
)
def test_wrong_attention(driver, fake, name, new, message):
    fake()
    attributes = {k: v for k, v in (ATTENTION.attributes() | {name: new}).items() if v is not None}
    assert driver.create(driver.op("f16", "f16", name="CachedAttention"), attributes, []) is None
    assert driver.error.startswith('CachedAttention node "moe": ')
    assert message in driver.error


@pytest.mark.parametrize(
    ("spec", "at", "shape", "message"),
    [
        (ATTENTION, 0, (2, 3, 700), "qkv has shape [2, 3, 700], expected [-1, -1, 768]"),
        (ATTENTION, 2, (2, 2, 63, 64), "past_value has shape [2, 2, 63, 64], expected [2, 2, 64, 64]"),
        (ATTENTION, 3, (2, 2), "rows has shape [2, 2], expected [2, 3]"),
        (ATTENTION, 4, (64,), "attention_mask has shape [64], expected [2, -1]"),
        (ATTENTION, 6, (2, 3, 64), "sin has shape [2, 3, 64], expected [2, 3, 32]"),
        (ATTENTION, 7, (64,), "q_norm has shape [64], expected [0]"),
        (ATTENTION, 9, (2,), "sinks has shape [2], expected [8]"),
        (LATENT, 0, (2, 3, 12608), "qkv has shape [2, 3, 12608], expected [-1, -1, 12096]"),
        (LATENT, 1, (2, 1, 64, 576), "past_key has shape [2, 1, 64, 576], expected [2, 1, -1, 288]"),
        (LATENT, 2, (2, 1, 64, 512), "past_value has shape [2, 1, 64, 512], expected [2, 1, 64, 288]"),
    ],
)
def test_wrong_attention_inputs(driver, fake, spec, at, shape, message):
    fake()
    op = driver.op("bf16", "bf16", name="CachedAttention")
    kernel = driver.create(op, spec.attributes(), [])
    assert kernel is not None, driver.error
    shapes = attention_shapes(spec, 2, 3, 64, 60)
    shapes[at] = shape
    values = [value(s) for s in shapes]
    assert driver.run(op, kernel, values[:10], values[10:], STREAM) != 0
    assert driver.error.startswith('CachedAttention node "moe": ')
    assert message in driver.error
    driver.lib.driver_destroy(op, kernel)


@gpu
@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["grouped", "latent"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_run_attention(driver, dtype, spec):
    """In place, and into other memory with more slots."""
    op = driver.op(dtype, dtype, name="CachedAttention")
    kernel = driver.create(op, spec.attributes(), [])
    assert kernel is not None, driver.error
    for rows, tokens, past, length in (
        ([(0, 1, 40), (0, 1, 99)], 1, 100, 0),
        ([(0, 30, 0), (5, 20, 0)], 30, 0, 30),
        ([(0, 3, 40), (1, 2, 41)], 3, 50, 60),
    ):
        made = Inputs.make(spec, dtype, rows, tokens, past, length)
        inputs = made.on_device()
        inputs.insert(4, torch.empty(0))  # the mask, of which nothing is read
        shapes = attention_shapes(spec, len(rows), tokens, past, length)
        output, *present = (torch.full(s, float("nan"), dtype=TORCH[dtype], device="cuda") for s in shapes[10:])
        if length <= past:
            present = inputs[1:3]
        assert run(driver, op, kernel, inputs, shapes, [output, *present]) == 0, driver.error
        assert driver.lib.driver_live_scratch() == 0
        for got, want in zip((output, *present), made.want(), strict=True):
            got = got.double().cpu().numpy()
            np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
            got, want = got[np.isfinite(want)], want[np.isfinite(want)]
            assert np.linalg.norm(got - want) < 1.5 * UNIT[dtype] * np.linalg.norm(want)
    driver.lib.driver_destroy(op, kernel)


CONV, DELTA = conv_spec(512), delta_spec(2, 4, 64)
WINDOW = conv_spec(512, state_window=3)


@pytest.mark.parametrize(
    ("spec", "name", "new", "message"),
    [
        (CONV, "width", None, "attribute width of kind i is required"),
        (CONV, "state_window", 65, "state_window is 65, expected 1 to 64"),
        (CONV, "width", 5, "width is 5, the CUDA kernel takes 2 to 4"),
        (CONV, "channels", 63, "channels is 63, the CUDA kernel takes even numbers"),
        (CONV, "activation", "tanh", 'activation is "tanh", the operator defines: none, silu'),
        (DELTA, "norm_epsilon", None, "attribute norm_epsilon of kind f is required"),
        (DELTA, "k_head_size", 96, "k_head_size is 96 and v_head_size 64, the CUDA kernels take 64 and 128"),
        (DELTA, "num_k_heads", 3, "num_v_heads is 4, expected a multiple of num_k_heads 3"),
    ],
)
def test_wrong_states(driver, fake, spec, name, new, message):
    fake()
    op = spec.OP
    attributes = {k: v for k, v in (spec.attributes() | {name: new}).items() if v is not None}
    assert driver.create(driver.op("f16", name=op), attributes, []) is None
    assert driver.error.startswith(f'{op} node "moe": ')
    assert message in driver.error


@pytest.mark.parametrize(
    ("spec", "at", "shape", "message"),
    [
        (CONV, 0, (2, 512), "x has shape [2, 512], expected [-1, -1, 512]"),
        (CONV, 1, (512, 1, 4), "weight has shape [512, 1, 4], expected [512, 4]"),
        (CONV, 2, (4,), "bias has shape [4], expected [512] or, for none, [0]"),
        (CONV, 3, (2, 512, 4), "past_conv has shape [2, 512, 4], expected [2, 512, 3]"),
        (WINDOW, 3, (2, 512, 3), "past_conv has shape [2, 512, 3], expected [3, 2, 512, 3]"),
        (CONV, 4, (1, 3), "rows has shape [1, 3], expected [2, 3]"),
        (DELTA, 0, (2, 3, 500), "qkv has shape [2, 3, 500], expected [-1, -1, 512]"),
        (DELTA, 1, (2, 3, 256), "a has shape [2, 3, 256], expected [2, 3, 4]"),
        (DELTA, 3, (2, 3, 4), "z has shape [2, 3, 4], expected [2, 3, 256]"),
        (DELTA, 6, (256,), "norm has shape [256], expected [64]"),
        (DELTA, 7, (1, 4, 64, 64), "past_state has shape [1, 4, 64, 64], expected [2, 4, 64, 64]"),
    ],
)
def test_wrong_state_inputs(driver, fake, spec, at, shape, message):
    fake()
    name = spec.OP
    op = driver.op("bf16", name=name)
    kernel = driver.create(op, spec.attributes(), [])
    assert kernel is not None, driver.error
    shapes = state_shapes(spec, 2, 3)
    shapes[at] = shape
    values = [value(s) for s in shapes]
    assert driver.run(op, kernel, values[:-2], values[-2:], STREAM) != 0
    assert driver.error.startswith(f'{name} node "moe": ')
    assert message in driver.error
    driver.lib.driver_destroy(op, kernel)


@pytest.mark.parametrize("bias", [True, False])
def test_states_are_launched_as_they_are_bound(driver, fake, bias):
    """Sizes and addresses of a call; present is past's memory."""
    fake()
    lib = ctypes.CDLL(FAKE)
    for spec, problem, past, said in (
        (CONV, cuda.ConvProblem(), 3, lib.driver_convolved),
        (DELTA, cuda.DeltaProblem(), 7, lib.driver_stepped),
    ):
        op = driver.op("f16", name=spec.OP)
        kernel = driver.create(op, spec.attributes(), [])
        assert kernel is not None, driver.error
        shapes, addresses = state_shapes(spec, 2, 8), [4096 * (i + 1) for i in range(12)]
        addresses = addresses[: len(shapes)]
        addresses[-1] = addresses[past]
        if spec is CONV and not bias:
            shapes[2] = (0,)
        values = [value(s, data=at) for s, at in zip(shapes, addresses, strict=True)]
        assert driver.run(op, kernel, values[:-2], values[-2:], STREAM) == 0, driver.error
        driver.lib.driver_destroy(op, kernel)
        tensors = (ctypes.c_uint64 * 12)()
        said(ctypes.byref(problem), tensors)
        assert (problem.type, problem.batch, problem.tokens) == (1, 2, 8)
        if spec is CONV and not bias:
            addresses[2] = 0
        assert list(tensors)[: len(addresses)] == addresses


@gpu
@pytest.mark.parametrize("call", ["one token", "ragged few", "65"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_run_states(driver, dtype, call):
    """In place, and into other memory: the bytes of the kernels, which test_linear_attention.py checks."""
    for spec, make, launch in ((CONV, conv_inputs, cuda.conv), (DELTA, delta_inputs, cuda.delta)):
        op = driver.op(dtype, name=spec.OP)
        kernel = driver.create(op, spec.attributes(), [])
        assert kernel is not None, driver.error
        made = make(spec, dtype, call)
        want = launch(spec, *(tensor(x, dtype) for x in made))
        for in_place in (False, True):
            inputs = [tensor(x, dtype) for x in made]
            outputs = [torch.full_like(x, float("nan")) for x in want]
            if in_place:
                outputs[1] = inputs[-2]
            shapes = [tuple(x.shape) for x in (*inputs, *outputs)]
            assert run(driver, op, kernel, inputs, shapes, outputs) == 0, driver.error
            assert driver.lib.driver_live_scratch() == 0
            for found, expected in zip(outputs, want, strict=True):
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        driver.lib.driver_destroy(op, kernel)
