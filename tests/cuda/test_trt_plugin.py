"""The TensorRT plug-in through its own interface: no TensorRT, and a GPU only for what is enqueued."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from specs import (
    attention_spec,
    conv_spec,
    delta_spec,
    linear_spec,
    moe_spec,
    projection,
    routing_spec,
    state_shapes,
)

import quantmoe
from quantmoe.custom_ops import cuda, reference
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import NormSpec, RouterSpec, RowsSpec, attribute_kinds, inputs, outputs
from quantmoe.custom_ops.schema import schema

if "QUANTMOE_TRT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
torch = pytest.importorskip("torch")
from cuda.layers import BASE, TORCH, UNIT, build, build_linear  # noqa: E402
from cuda.test_attention import Inputs, check_results  # noqa: E402
from cuda.test_linear_attention import conv_inputs, delta_inputs  # noqa: E402
from cuda.test_linear_attention import tensor as on_device  # noqa: E402
from cuda.trt import (  # noqa: E402
    BUILD,
    FIELD_TYPES,
    RUNTIME,
    TYPES,
    Attribute,
    Driver,
    Field,
    Plugin,
    attributes_of,
    tensor,
)  # fmt: skip

OPERATORS = len(schema().operators)
W = projection("int4", 128, "bf16", "none", layout="marlin", layout_version=LAYOUTS["marlin"].VERSION)
W2 = replace(W, group_size=64, scale_type="f16")
SPEC = moe_spec(16, 2048, 768, W, W2, activation="swiglu_oai", swiglu_limit=7.5)
ROWS = {p: LAYOUTS["marlin"].row_bytes(SPEC, p) // 4 for p in ("w13", "w2")}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture
def plugin(driver: Driver) -> Plugin:
    made = driver.create(attributes_of(SPEC))
    assert made is not None, driver.log()
    return made


def tensors(
    tokens: tuple[int, ...] = (4,), dtype: str = "bf16", ids: str = "i64", top_k: int = 8, experts: int = 16, **changes
):
    """The six tensors; a change replaces the dimensions of one."""
    dims = {
        "hidden_states": (*tokens, 2048), "topk_ids": (*tokens, top_k), "topk_weights": (*tokens, top_k),
        "w13": (experts, ROWS["w13"]), "w2": (experts, ROWS["w2"]), "output": (*tokens, 2048),
    } | changes  # fmt: skip
    types = (dtype, ids, "f32", "i32", "i32", dtype)
    return [tensor(t, d) for t, d in zip(types, dims.values(), strict=True)]


@pytest.fixture
def others(driver: Driver):
    """The driver, for a test that selects another operator."""
    yield driver
    driver.select("QuantMoE")


DEVICES = [
    cuda.Device(80, 108, 167936),
    cuda.Device(86, 84, 102400),
    cuda.Device(89, 128, 102400),
    *(cuda.Device(90, n, 233472) for n in (16, 60, 78, 114, 132)),  # MIG, H20, H100 PCIe, H200
    cuda.Device(100, 148, 233472),
    cuda.Device(120, 188, 102400),
    cuda.Device(121, 48, 102400),
]
NVFP4 = replace(W, format="nvfp4", group_size=16, scale_type="e4m3", activation_format="nvfp4")
FP8 = replace(W, format="fp8_e4m3", group_size=-1, scale_type="f32", activation_format="fp8_token")
# Activations are codes in either product, or rounded, by format and GPU.
SPECS = {
    "int4": SPEC,
    **{f"{a.format}-{b.format}": replace(SPEC, w13=a, w2=b) for a, b in permutations((W, NVFP4, FP8), 2)},
}


@pytest.mark.parametrize("op", list(schema().operators))
def test_creator(others, op):
    others.select(op)
    assert [others.lib.driver_name(others.creator, i) for i in range(3)] == [op.encode(), b"1", b""]
    found = {f.name.decode(): f.type for f in others.fields("field_names", others.creator)}
    kinds = {n: FIELD_TYPES[k if k in ("i", "f") else "s"] for n, k in attribute_kinds(op).items()}
    assert found == kinds
    assert next(iter(found)) == "op_version"


def test_exported_symbols_and_libraries():
    path = quantmoe.trt_library_path()
    listing = subprocess.check_output(["nm", "-D", "--defined-only", path], text=True)
    assert {line.split()[-1] for line in listing.splitlines()} == {"getCreators", "setLoggerFinder"}
    needed = subprocess.check_output(["readelf", "-d", path], text=True)
    assert "nvinfer" not in needed
    assert "libcuda" not in needed


def test_serializes_exactly_the_attributes(driver, plugin):
    fields = plugin.serialize()
    assert {n: a.value for n, a in fields.items()} == SPEC.attributes()
    again = driver.create(fields, RUNTIME)
    assert again is not None
    assert {n: a.value for n, a in again.attach().serialize().items()} == SPEC.attributes()


@pytest.mark.parametrize("name", attribute_kinds())
def test_missing_attribute(driver, name):
    fields = attributes_of(SPEC)
    del fields[name]
    for phase in (BUILD, RUNTIME):
        assert driver.create(fields, phase) is None
        assert driver.log() == f'1 QuantMoE layer "experts": attribute {name} is required\n'


@pytest.mark.parametrize("name", attribute_kinds())
@pytest.mark.parametrize("kind", FIELD_TYPES)
def test_attribute_of_another_type(driver, name, kind):
    fields = attributes_of(SPEC)
    if fields[name].type == FIELD_TYPES[kind]:
        return
    fields[name] = Attribute(name, FIELD_TYPES[kind], "1" if kind == "s" else 1)
    assert driver.create(fields) is None
    assert f"attribute {name} is of field type" in driver.log()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("op_version", 99, "op_version is 99, this library knows 1"),
        ("w13_layout_version", 1, "marlin version 2: export the model again"),
        ("w2_layout", "cpu_panel", "marlin version 2"),
        ("w13_format", "int3", 'w13_format is "int3", the operator defines: int4, int8'),
        ("w13_format", "bf16", "w13_format is bf16"),
        ("activation", "", 'activation is "", the operator defines: silu'),
        ("activation", "x" * 100_000, 'activation is "xxx'),
        ("w2_group_size", 48, "w2_group_size is 48"),
        ("hidden_size", -8, "hidden_size is -8"),
        ("intermediate_size", 0, "intermediate_size is 0"),
        ("num_experts", 0, "num_experts = 0"),
        ("expert_offset", 16, "num_experts = 16"),
        ("expert_offset", -(2**31), "experts [-2147483648, -2147483632) are not inside num_experts = 16"),
        ("num_experts", -(2**31), "num_experts = -2147483648"),
        ("w13_pre_scale", 2, "w13_pre_scale is 2"),
        ("w2_perm", 2, "w2_perm is 2"),
        ("w13_bias", 2, "w13_bias is 2, expected 0 or 1"),
        ("gated", 2, "gated is 2, expected 0 or 1"),
        ("apply_router_weight_on_input", -1, "apply_router_weight_on_input is -1, expected 0 or 1"),
    ],
)  # fmt: skip
def test_bad_attribute(driver, name, value, message):
    fields = attributes_of(SPEC)
    fields[name] = Attribute(name, fields[name].type, value)
    assert driver.create(fields) is None
    log = driver.log()
    assert log.startswith('1 QuantMoE layer "experts": ')
    assert message in log


def test_damaged_fields(driver):
    """A plan's bytes may be anything: text without its NUL, no memory, no name, no fields, ones of a later version."""
    fields = attributes_of(SPEC)
    fields["activation"].length = 4  # "swig": cut, no NUL
    assert driver.create(fields) is None
    assert 'activation is "swig"' in driver.log()
    fields["activation"].length = 0
    assert driver.create(fields) is None
    assert "of field type 6 and length 0" in driver.log()
    fields = attributes_of(SPEC) | {"w3_format": Attribute("w3_format", FIELD_TYPES["s"], "int4")}
    assert driver.create(fields, RUNTIME) is None
    assert "unknown attribute w3_format" in driver.log()
    assert driver.create({}) is None
    assert "op_version is required" in driver.log()
    future = fields | {"op_version": Attribute("op_version", FIELD_TYPES["i"], 7)}
    assert driver.create(future, RUNTIME) is None
    assert driver.log() == '1 QuantMoE layer "experts": op_version is 7, this library knows 1\n'
    made = attributes_of(SPEC)
    made["nameless"] = Attribute(None, FIELD_TYPES["i"], 1)
    assert driver.create(made) is None
    assert "an attribute has no name" in driver.log()


@pytest.mark.parametrize(
    ("version", "plain"),
    [(100600, True), (101600, True), (110000, False), (110400, False), (10400, True), (10500, False), (10701, False)],
)
def test_loggers_of_all_versions(version, plain):
    """TensorRT 10 and TensorRT-RTX before 1.5 have other tables of virtual functions; each in its own process."""
    code = f"d = Driver({version}, {plain})\nassert d.create({{}}) is None\nprint(d.log(), end='')"
    assert run(code) == '1 QuantMoE layer "experts": attribute op_version is required\n'


def run(code: str) -> str:
    """What a process of its own prints."""
    head = "import ctypes, quantmoe\nfrom cuda.trt import *\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: a TensorRT's version, whether its tables are those of 10
VERSIONS = [(100600, True), (110400, False), (10400, True), (10701, False)]
IN_REGISTRY = """
lib = driver_library()
lib.driver_registry({version}, {plain})
path = quantmoe.trt_library_path().encode()
def log():
    text = lib.driver_log().decode()
    lib.driver_clear()
    return text
"""


@pytest.mark.parametrize(("version", "plain"), VERSIONS)
def test_opening_the_library_registers_the_creators(version, plain):
    """trtexec --staticPlugins and ONNX Runtime's trt_extra_plugin_lib_paths call nothing of a library."""
    code = (
        IN_REGISTRY
        + "ctypes.CDLL(path.decode())\nprint(lib.driver_registered())\nlib.driver_log_something()\nprint(log())"
    )
    out = run(code.format(version=version, plain=plain)).splitlines()
    assert out[:2] == [f"{OPERATORS}", '1 QuantMoE layer "experts": attribute op_version is required']


@pytest.mark.parametrize(("version", "plain"), VERSIONS)
@pytest.mark.parametrize("opened_before", [False, True])
def test_a_registry_can_load_the_library(version, plain, opened_before):
    """--dynamicPlugins; the library's own registration must not be in its way, nor complain."""
    code = IN_REGISTRY + opened_before * "ctypes.CDLL(path.decode())\n"
    code += "library = lib.driver_load(path)\nprint(bool(library), lib.driver_registered(), repr(log()))\n"
    code += "lib.driver_unload(ctypes.c_void_p(library))\nprint(lib.driver_registered())\n"
    code += "print(bool(lib.driver_load(path)), lib.driver_registered(), repr(log()))"
    out = run(code.format(version=version, plain=plain)).splitlines()
    assert out == [f"True {OPERATORS} ''", "0", f"True {OPERATORS} ''"]


def test_a_registry_that_loads_the_library_takes_it_from_no_other(tmp_path):
    """A process may have TensorRT and TensorRT-RTX; one driver plays each."""
    copy = tmp_path / "driver.so"
    shutil.copy(os.environ["QUANTMOE_TRT_DRIVER"], copy)
    code = f"other = ctypes.CDLL({str(copy)!r})\n" + IN_REGISTRY + "other.driver_registry(10701, 0)\n"
    code += "ctypes.CDLL(path.decode())\nprint(lib.driver_registered(), other.driver_registered())\n"
    code += "lib.driver_load.restype = ctypes.c_void_p\nlibrary = lib.driver_load(path)\n"
    code += "print(bool(library), lib.driver_registered(), other.driver_registered(), repr(log()))\n"
    code += "lib.driver_unload(ctypes.c_void_p(library))\nprint(lib.driver_registered(), other.driver_registered())"
    out = run(code.format(version=100600, plain=True)).splitlines()
    assert out == [f"{OPERATORS} {OPERATORS}", f"True {OPERATORS} {OPERATORS} ''", f"0 {OPERATORS}"]


def test_a_second_copy_of_the_library_is_not_registered(tmp_path):
    """An engine may hold one (trtexec --setPluginsToSerialize), which TensorRT writes to a file and loads."""
    copy = tmp_path / "copy.so"
    shutil.copy(quantmoe.trt_library_path(), copy)
    code = IN_REGISTRY + f"ctypes.CDLL(path.decode())\nctypes.CDLL({str(copy)!r})\n"
    code += "print(lib.driver_registered(), repr(log()))"
    assert run(code.format(version=100600, plain=True)) == f"{OPERATORS} ''\n"


def test_without_a_known_tensorrt_messages_go_to_stderr():
    code = "from cuda.trt import Driver\nd = Driver(0)\nassert d.create({}) is None\nassert not d.log()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(os.path.dirname(__file__))
    )
    assert done.stderr == 'QuantMoE layer "experts": attribute op_version is required\n'


def test_format_combinations(plugin):
    """Every combination of types: exactly f16 and bf16, either width of ids, linear tensors."""
    good = {(x, i) for x in ("f16", "bf16") for i in ("i32", "i64")}
    for x in TYPES:
        for i in TYPES:
            supported = [plugin.call("supports", tensors(dtype=x, ids=i), at) for at in range(6)]
            assert all(supported) == ((x, i) in good), (x, i)
    for at in range(6):
        for name in TYPES:
            t = tensors()
            t[at].type = TYPES[name]
            want = {0: ("f16", "bf16"), 1: ("i32", "i64"), 2: ("f32",), 3: ("i32",), 4: ("i32",), 5: ("bf16",)}[at]
            assert plugin.call("supports", t, at) == (name in want)
            t = tensors()
            t[at].format = 1
            assert not plugin.call("supports", t, at)


def test_float32_is_refused_with_a_reason(driver, plugin):
    driver.log()
    assert not plugin.call("supports", tensors(dtype="f32"), 0)
    assert not plugin.call("supports", tensors(dtype="f32"), 0)
    assert driver.log().splitlines() == [
        '2 QuantMoE layer "experts": does not run with float32 hidden_states, the kernels take float16 and bfloat16'
    ]


def test_output_type_and_shape(driver, plugin):
    for name in ("f16", "bf16"):
        assert plugin.outputs(tensors((3, 5), dtype=name)) == [(name, (3, 5, 2048))]
    driver.log()
    assert plugin.outputs(tensors(hidden_states=())) is None
    assert "hidden_states is a scalar, expected [.., features]" in driver.log()


@pytest.mark.parametrize("tokens", [(1,), (0,), (3, 5), (1, 4096)], ids=str)
def test_configure(plugin, tokens):
    assert plugin.call("configure", tensors(tokens)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": (4, 2040)}, "hidden_states has shape [4, 2040], expected [.., hidden_size 2048]"),
        ({"hidden_states": ()}, "hidden_states has shape []"),
        ({"topk_ids": (5, 8)}, "topk_ids and topk_weights have shapes [5, 8] and [4, 8]"),
        ({"topk_ids": (4, 1, 8)}, "topk_ids and topk_weights have shapes [4, 1, 8]"),
        ({"topk_weights": (4, 7)}, "have shapes [4, 8] and [4, 7]"),
        ({"topk_ids": (4, 0), "topk_weights": (4, 0)}, "last dimension known"),
        ({"topk_ids": (4, -1), "topk_weights": (4, -1)}, "last dimension known"),
        ({"w13": (16, ROWS["w13"] - 16)}, f"w13 has shape [16, {ROWS['w13'] - 16}], expected [experts, {ROWS['w13']}"),
        ({"w2": (15, ROWS["w2"])}, f"w2 has shape [15, {ROWS['w2']}], expected"),
        ({"w2": (16, ROWS["w2"], 1)}, "w2 has shape"),
        ({"experts": 17}, "num_experts = 16"),
        ({"experts": 0}, "w13 has shape [0,"),
    ],
    ids=str,
)
def test_wrong_shapes(driver, plugin, change, message):
    driver.log()
    assert plugin.call("configure", tensors(**change)) != 0
    log = driver.log()
    assert log.startswith('1 QuantMoE layer "experts"')
    assert message in log


@pytest.mark.parametrize("name", SPECS)
def test_workspace_is_enough_for_every_batch_and_device(driver, name):
    """The engine is built once, perhaps without a GPU: no plan within the profile may need more."""
    spec, most = SPECS[name], 700
    rows = {p: (16, LAYOUTS["marlin"].row_bytes(spec, p) // 4) for p in ("w13", "w2")}
    given = driver.create(attributes_of(spec)).call("workspace", tensors((most,), **rows))
    for device in DEVICES:
        for tokens in range(most, -1, -3 if name == "int4" else -13):
            for dtype in ("bf16", "f16"):
                assert cuda.plan(cuda.problem(spec, dtype, tokens, 8, 16), device).workspace_bytes <= given


@pytest.fixture
def fake(driver: Driver):
    """The plug-in with an H200 that is not there."""
    made = Driver(fake=True)
    made.lib.driver_device(90, 132, 233472)
    made.lib.driver_order(1, 0)
    yield made
    Driver()  # what the other tests call


def enqueue(plugin: Plugin, shapes, weights: int = 0x1000) -> int:
    inputs = (ctypes.c_void_p * 5)(0, 0, 0, weights, 0)
    return plugin.call("enqueue", shapes, inputs, (ctypes.c_void_p * 1)(), None, None)


def test_no_memory_is_an_error_of_the_call(fake):
    """Each allocation of each call fails in turn; an exception through a noexcept method would end the process."""
    lib, fields = fake.lib, attributes_of(SPEC)
    made = fake.create(fields)
    wrong = tensors(hidden_states=(4, 2040))
    given = [Field(a.name.encode(), ctypes.addressof(a.data), a.type, a.length) for a in fields.values()]
    given = (Field * len(given))(*given)
    calls = {
        "create": lambda: bool(created.append(lib.driver_create(fake.creator, b"experts", given, len(given), 0))
                               or created[-1]),
        "attach": lambda: bool(created.append(lib.driver_attach(made.handle)) or created[-1]),
        "configure": lambda: made.call("configure", wrong) == 0,
        "shape_change": lambda: made.call("shape_change", wrong) == 0,
        "supports": lambda: fresh.call("supports", tensors(dtype="f32"), 0) == 1,
        "enqueue": lambda: enqueue(made, tensors(experts=17)) == 0,
    }  # fmt: skip
    succeed = ("create", "attach")
    for name, call in calls.items():
        for allocations in range(1000):
            created: list = []
            fresh = fake.create(fields)
            fake.log()
            failed = lib.driver_count(2)
            lib.driver_memory(allocations)
            good = call()
            lib.driver_memory(-1)
            enough = lib.driver_count(2) == failed
            log = fake.log()
            for handle in filter(None, created):
                lib.driver_destroy(ctypes.c_void_p(handle))
            if enough:
                assert good == (name in succeed), (name, log)
                break
            assert not good
            assert "std::bad_alloc" in log or name == "supports", (name, log)
            assert log.startswith("1 QuantMoE") or name == "supports", (name, log)
        assert allocations > 0, f"{name} allocates nothing: the test tests nothing"


@pytest.mark.parametrize("device", [(87, 16, 167936), (121, 48, 102400), (103, 160, 233472), (90, 132, 233472)])
def test_the_workspace_of_other_gpus(fake, device):
    """Built anywhere, run on a GPU that may not have been known then."""
    for name, spec in SPECS.items():
        rows = {p: (16, LAYOUTS["marlin"].row_bytes(spec, p) // 4) for p in ("w13", "w2")}
        built = fake.create(attributes_of(spec))
        given = built.call("workspace", tensors((700,), **rows))
        fields = built.serialize()
        assert fields["workspace_bytes"].value == given
        assert fields["workspace_bytes"].type == FIELD_TYPES["i64"]
        fake.lib.driver_device(*device)
        running = fake.create(fields, RUNTIME).attach()
        for tokens in (1, 8, 40, 300, 700):
            assert running.call("shape_change", tensors((tokens,), **rows)) == 0, (name, tokens, fake.log())
        assert running.serialize()["workspace_bytes"].value == given


def test_a_plan_that_needs_more_workspace_than_the_engine_has_is_an_error(fake):
    fields = attributes_of(SPEC)
    needs = cuda.plan(cuda.problem(SPEC, "bf16", 300, 8, 16), cuda.Device(90, 132, 233472)).workspace_bytes
    for given, runs in ((needs, True), (needs - 1, False)):
        said = fields | {"workspace_bytes": Attribute("workspace_bytes", FIELD_TYPES["i64"], given)}
        running = fake.create(said, RUNTIME).attach()
        fake.log()
        launches = fake.lib.driver_count(1)
        assert (running.call("shape_change", tensors((300,))) == 0) == runs
        assert (enqueue(running, tensors((300,))) == 0) == runs
        assert fake.lib.driver_count(1) == launches + runs
        if not runs:
            assert fake.log().splitlines()[0] == (
                f'1 QuantMoE layer "experts": needs {needs} bytes of workspace for 300 rows on this GPU (compute '
                f"capability 9.0, 233472 bytes of shared memory), the engine has {given}: build it here, "
                "with this library"
            )
    assert fake.create(said, BUILD) is None
    assert "unknown attribute workspace_bytes" in fake.log()


def test_an_unknown_gpu_is_held_to_what_known_ones_need(fake):
    """Without the field, which an engine may lack: shared memory that no GPU of the table has."""
    spec = replace(SPEC, w13=replace(W, format="int8", zero_points=1), w2=W)
    rows = {p: (16, LAYOUTS["marlin"].row_bytes(spec, p) // 4) for p in ("w13", "w2")}
    most = fake.create(attributes_of(spec)).call("workspace", tensors((700,), **rows))
    for shared in range(60_000, 240_000, 8_000):
        fake.lib.driver_device(89, 16, shared)
        running = fake.create(attributes_of(spec), RUNTIME)
        for tokens in (1, 8, 40, 300, 700):
            found = cuda.plan(cuda.problem(spec, "bf16", tokens, 8, 16), cuda.Device(89, 16, shared)).workspace_bytes
            good = running.call("shape_change", tensors((tokens,), **rows)) == 0
            assert found <= most if good else "bytes of workspace" in fake.log()


@pytest.mark.parametrize("op", ["QuantMoE", "QuantLinear"])
def test_act_order_is_checked_when_first_seen(fake, op):
    spec = replace(SPEC, w13=replace(W, perm=1)) if op == "QuantMoE" else replace(LINEAR, w=replace(W, perm=1))
    if op == "QuantMoE":
        words = LAYOUTS["marlin"].row_bytes(spec, "w13") // 4
        shapes = tensors(w13=(16, words))
    else:
        shapes = linear_tensors(w=(1, LAYOUTS["marlin"].row_bytes(spec.moe, "w2") // 4))
    fake.select(op)

    def checked(plugin, weights, result):
        before = fake.lib.driver_count(0)
        inputs = (ctypes.c_void_p * 5)(0, weights, 0, weights, 0)
        assert plugin.call("enqueue", shapes, inputs, (ctypes.c_void_p * 1)(), None, None) == result
        return fake.lib.driver_count(0) - before

    running = fake.create(attributes_of(spec), RUNTIME)
    assert checked(running, 0x1000, 0) == 1
    assert checked(running, 0x1000, 0) == 0
    fake.lib.driver_order(0, 0)
    assert checked(running, 0x1000, 0) == 0
    fake.log()
    assert checked(running, 0x2000, -1) == 1
    assert fake.log() == f'1 {op} layer "experts": an act-order that the test calls bad\n'
    # A call that is captured cannot wait: the next one that is not is checked. The builder's weights are anything.
    running = fake.create(attributes_of(spec), RUNTIME)
    fake.lib.driver_order(0, 1)
    assert checked(running, 0x1000, 0) == 0
    fake.lib.driver_order(0, 0)
    assert checked(running, 0x1000, -1) == 1
    assert checked(fake.create(attributes_of(spec), BUILD), 0x1000, 0) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("bad", [-1, 256, 5], ids=["negative", "past the end", "repeated"])
@pytest.mark.parametrize("op", ["QuantMoE", "QuantLinear"])
def test_a_bad_act_order_is_an_error(others, op, bad):
    """The first call names it; the kernels never read elsewhere for it."""
    others.select(op)
    if op == "QuantMoE":
        spec, _, *packed = build(replace(BASE, act_order="shared", group_size=64))
        row, at = packed[0], LAYOUTS["marlin"]._Parts(spec, "w13").slices["perm"]
        x, k, rows = (4, BASE.hidden), (4, BASE.top_k), [(len(w), w.shape[1] // 4) for w in packed]
        types = ("bf16", "i64", "f32", "i32", "i32", "bf16")
        shapes = [tensor(t, d) for t, d in zip(types, (x, k, k, *rows, x), strict=True)]
    else:
        _, spec, w = build_linear(replace(BASE, hidden=264, intermediate=256, act_order="shared"))
        row, at, packed = w, LAYOUTS["marlin"]._Parts(spec.moe, "w2").slices["perm"], [w]
        words = (1, w.shape[1] // 4)
        shapes = [tensor("bf16", (4, 256)), tensor("i32", words), tensor("bf16", (4, 264))]
    order = row[-1, at].view(np.int32)
    feature = int(order[6]) if bad == 5 else bad
    order[5] = feature
    packed = [torch.from_numpy(w).cuda() for w in packed]
    x = torch.ones(shapes[0].dims[0], shapes[0].dims[1], dtype=torch.bfloat16, device="cuda")
    if op == "QuantMoE":
        ids = torch.full((4, BASE.top_k), len(row) - 1, device="cuda")
        inputs = [x, ids, torch.ones(4, BASE.top_k, device="cuda"), *packed]
    else:
        inputs = [x, *packed]
    output = torch.empty(4, shapes[-1].dims[1], dtype=torch.bfloat16, device="cuda")
    running = others.create(attributes_of(spec), RUNTIME)
    workspace = torch.empty(max(1, running.call("workspace", shapes)), dtype=torch.uint8, device="cuda")
    pointers = [(ctypes.c_void_p * len(t))(*(v.data_ptr() for v in t)) for t in (inputs, [output])]
    torch.cuda.synchronize()
    others.log()
    assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(workspace.data_ptr()), None) == -1
    name, expert = ("w13", len(row) - 1) if op == "QuantMoE" else ("w", 0)
    how = "twice" if bad == 5 else "in it"
    assert others.log() == (
        f'1 {op} layer "experts": {name} of expert {expert} has an act-order with feature {feature} {how}, expected '
        "each of 256 once\n"
    )
    # The builder's calls are not checked: any result, no fault.
    built = others.create(attributes_of(spec), BUILD)
    assert built.call("enqueue", shapes, *pointers, ctypes.c_void_p(workspace.data_ptr()), None) == 0, others.log()
    torch.cuda.synchronize()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("id_type", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_enqueue(driver, dtype, id_type):
    """Built, serialized, deserialized, attached; then batches of changing size against the reference."""
    spec, experts, w13, w2 = build(BASE)
    built = driver.create(attributes_of(spec))
    packed = [torch.from_numpy(w).cuda() for w in (w13, w2)]

    def described(tokens: int):
        x, k = (tokens, BASE.hidden), (tokens, BASE.top_k)
        rows = [(len(w), w.shape[1] // 4) for w in (w13, w2)]
        types = (dtype, "i64" if id_type is np.int64 else "i32", "f32", "i32", "i32", dtype)
        return [tensor(t, d) for t, d in zip(types, (x, k, k, *rows, x), strict=True)]

    assert built.call("configure", described(600)) == 0, driver.log()
    size = built.call("workspace", described(600))
    running = driver.create(built.serialize(), RUNTIME).attach()
    stream = torch.cuda.Stream()
    for tokens in (1, 8, 40, 600, 0, 3):
        hidden, ids, weights = BASE.tokens(tokens)
        hidden = torch.from_numpy(hidden).to(TORCH[dtype])
        inputs = [
            hidden.cuda(),
            torch.from_numpy(ids.astype(id_type)).cuda(),
            torch.from_numpy(weights).cuda(),
            *packed,
        ]
        output = torch.full_like(inputs[0], float("nan"))
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        shapes = described(tokens)
        assert running.call("shape_change", shapes) == 0, driver.log()
        pointers = (ctypes.c_void_p * 5)(*(x.data_ptr() for x in inputs))
        results = (ctypes.c_void_p * 1)(output.data_ptr())
        arguments = [results, *(ctypes.c_void_p(p) for p in (workspace.data_ptr(), stream.cuda_stream))]
        for _ in range(2):
            assert running.call("enqueue", shapes, pointers, *arguments) == 0, driver.log()
        torch.cuda.synchronize()
        if not tokens:
            continue
        want = reference.quant_moe(spec, experts, hidden.float().numpy(), ids, weights)
        error = np.linalg.norm(output.double().cpu().numpy() - want) / np.linalg.norm(want)
        assert error < 2 * UNIT[dtype], (tokens, error)


LINEAR = linear_spec(512, 264, W)
LINEAR_WORDS = LAYOUTS["marlin"].row_bytes(LINEAR.moe, "w2") // 4
ROUTING = routing_spec(64, 6, "sigmoid_topk", 1, 8, 3, routed_scaling_factor=2.5, shared_experts=2, shared_gate=1)
ROUTER = RouterSpec(hidden_size=96, **{n: v for n, v in ROUTING.attributes().items() if n != "op_version"})
TOKEN_ROWS = RowsSpec()


# numbers that f32 has
NORM = NormSpec(norm_epsilon=2.0**-20)
ATTENTION = attention_spec(32, 4, 128, rotary_size=128, qk_norm="head", scale=0.125, norm_epsilon=2.0**-20)

LATENT = attention_spec(20, 1, 576, v_head_size=512, key_split=288, rotary_size=64, scale=0.125, norm_epsilon=0.0)


def attention_tensors(batch=2, tokens=1, past=64, length=64, dtype="bf16", cache=None, spec=ATTENTION, **changes):
    heads, groups, d, v = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size
    slots, table = max(past, length), (batch, tokens, spec.rotary_size // 2)
    key, value = spec.cache_widths
    norms = {"none": (0, 0), "head": (d, d), "row": (heads * d, groups * d)}[spec.qk_norm]
    cache = cache or dtype
    found = {
        "qkv": (dtype, (batch, tokens, (heads + groups) * d + (0 if spec.key_split else groups * v))),
        "past_key": (cache, (batch, groups, past, key)), "past_value": (cache, (batch, groups, past, value)),
        "rows": ("i32", (batch, 3)), "attention_mask": ("i64", (batch, length)),
        "cos": ("f32", table), "sin": ("f32", table),
        "q_norm": ("f32", norms[:1]), "k_norm": ("f32", norms[1:]), "sinks": ("f32", (heads,)),
        "output": (dtype, (batch, tokens, heads * v)),
        "present_key": (cache, (batch, groups, slots, key)), "present_value": (cache, (batch, groups, slots, value)),
    }  # fmt: skip
    return [tensor(t, changes.get(n, dims)) for n, (t, dims) in found.items()]


def linear_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"x": (*rows, 512), "w": (1, LINEAR_WORDS), "y": (*rows, 264)} | changes
    return [tensor(t, d) for t, d in zip((dtype, "i32", dtype), dims.values(), strict=True)]


def routing_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"logits": (*rows, 65), "bias": (64,), "ids": (*rows, 8), "weights": (*rows, 8)} | changes
    return [tensor(t, d) for t, d in zip((dtype, "f32", "i32", "f32"), dims.values(), strict=True)]


# numbers that f32 has, as above
CONV = conv_spec(512)
WINDOW = conv_spec(512, state_window=3)
DELTA = delta_spec(2, 4, 64, l2_epsilon=2.0**-20, norm_epsilon=2.0**-20)


def state_tensors(spec, batch=2, tokens=3, dtype="bf16", **changes):
    """Of CausalConv or GatedDelta; a change replaces the dimensions of one."""
    slots = {name: kind for name, kind in [*inputs(spec.OP), *outputs(spec.OP)]}
    types = [{"T": dtype, "float": "f32", "int32": "i32"}[kind] for kind in slots.values()]
    shapes = zip(slots, types, state_shapes(spec, batch, tokens), strict=True)
    return [tensor(type_, changes.get(name, dims)) for name, type_, dims in shapes]


@pytest.mark.parametrize(
    "spec", [LINEAR, ROUTING, ROUTER, NORM, TOKEN_ROWS, ATTENTION, CONV, DELTA], ids=lambda spec: spec.OP
)
def test_others_serialize_and_name_what_is_missing(others, spec):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    assert made is not None, others.log()
    assert {n: a.value for n, a in others.create(made.serialize(), RUNTIME).attach().serialize().items()} == (
        spec.attributes()
    )
    for name in attribute_kinds(spec.OP):
        fields = attributes_of(spec)
        del fields[name]
        assert others.create(fields) is None
        assert others.log() == f'1 {spec.OP} layer "experts": attribute {name} is required\n'


@pytest.mark.parametrize(
    ("spec", "name", "value", "message"),
    [
        (LINEAR, "op_version", 99, "op_version is 99, this library knows 1"),
        (LINEAR, "in_features", 500, "in_features is 500"),
        (CONV, "width", 5, "width is 5, the CUDA kernel takes 2 to 4"),
        (DELTA, "k_head_size", 96, "k_head_size is 96 and v_head_size 64, the CUDA kernels take 64 and 128"),
        (DELTA, "gate", "tanh", 'gate is "tanh", the operator defines: silu, sigmoid'),
        (LINEAR, "w_format", "f16", "w_group_size is 128, the CUDA kernels take -1 for floats"),
        (LINEAR, "w_layout", "cpu_panel", "w_layout is cpu_panel"),
        (ROUTING, "op_version", 99, "op_version is 99, this library knows 1"),
        (ROUTING, "method", "hash", 'method is "hash", the operator defines: softmax_topk'),
        (ROUTING, "top_k", 25, "top_k is 25, the CUDA kernel takes 1 to 24"),
        (ROUTING, "n_group", 0, "n_group is 0"),
        (ROUTER, "hidden_size", 0, "hidden_size is 0, the CUDA kernels take 1 to 16777216"),
        (ROUTER, "top_k", 25, "top_k is 25, the CUDA kernel takes 1 to 24"),
        (NORM, "op_version", 99, "op_version is 99, this library knows 1"),
        (NORM, "norm_epsilon", -1.0, "norm_epsilon is -1"),
        (ATTENTION, "op_version", 99, "op_version is 99, this library knows 1"),
        (ATTENTION, "qk_norm", "rms", 'qk_norm is "rms", the operator defines: none, head, row'),
        (ATTENTION, "head_size", 160, "head_size is 160 and v_head_size 128, the CUDA kernels take 64, 96, 128"),
        (ATTENTION, "v_head_size", 64, "head_size is 128 and v_head_size 64, the CUDA kernels take 64, 96, 128"),
        (ATTENTION, "kv_num_heads", 3, "kv_num_heads is 3, expected a divisor of num_heads 32"),
    ],
)
def test_bad_attribute_of_others(others, spec, name, value, message):
    others.select(spec.OP)
    fields = attributes_of(spec)
    fields[name] = Attribute(name, fields[name].type, value)
    assert others.create(fields) is None
    log = others.log()
    assert log.startswith(f'1 {spec.OP} layer "experts": ')
    assert message in log


def test_linear_shapes_and_workspace(others):
    others.select("QuantLinear")
    made = others.create(attributes_of(LINEAR))
    for dtype in TYPES:
        supported = [made.call("supports", linear_tensors(dtype=dtype), at) for at in range(3)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    for rows in ((0,), (3, 5)):
        assert made.call("configure", linear_tensors(rows)) == 0, others.log()
    for change, message in (
        ({"x": (4, 511)}, "x has shape [4, 511], expected [.., in_features 512]"),
        ({"w": (2, LINEAR_WORDS)}, f"w has shape [2, {LINEAR_WORDS}], expected [1, {LINEAR_WORDS}"),
        ({"w": (1, 7)}, "w has shape [1, 7]"),
    ):
        assert made.call("configure", linear_tensors(**change)) != 0
        assert message in others.log()
    given = made.call("workspace", linear_tensors((300,)))
    for rows in range(301):
        for device in DEVICES:
            assert cuda.plan(cuda.linear_problem(LINEAR, "bf16", rows), device).workspace_bytes <= given


def test_routing_shapes(others):
    others.select("MoERouting")
    made = others.create(attributes_of(ROUTING))
    for dtype in TYPES:
        supported = [made.call("supports", routing_tensors(dtype=dtype), at) for at in range(4)]
        assert all(supported) == (dtype in ("f32", "f16", "bf16"))
    assert made.call("configure", routing_tensors((3, 5))) == 0
    assert made.call("workspace", routing_tensors()) == 0
    for change, message in (
        ({"logits": (4, 64)}, "logits has shape [4, 64], expected [.., num_experts 64 + 1]"),
        ({"bias": (4, 64)}, "correction_bias has shape [4, 64], expected [num_experts 64]"),
    ):
        assert made.call("configure", routing_tensors(**change)) != 0
        assert message in others.log()


def router_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"hidden": (*rows, 96), "weight": (65, 96), "bias": (0,), "correction": (64,)}
    dims |= {"ids": (*rows, 8), "weights": (*rows, 8)} | changes
    return [tensor(t, d) for t, d in zip((dtype, dtype, "f32", "f32", "i32", "f32"), dims.values(), strict=True)]


def test_router_shapes_and_workspace(others):
    others.select("MoERouter")
    made = others.create(attributes_of(ROUTER))
    for dtype in TYPES:
        supported = [made.call("supports", router_tensors(dtype=dtype), at) for at in range(6)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    assert made.outputs(router_tensors((3, 5))) == [("i32", (3, 5, 8)), ("f32", (3, 5, 8))]
    for good in ({}, {"bias": (65,)}, {"correction": (0,)}):
        assert made.call("configure", router_tensors((3, 5), **good)) == 0, others.log()
    for change, message in (
        ({"hidden": (4, 95)}, "hidden_states has shape [4, 95], expected [.., hidden_size 96]"),
        ({"weight": (96, 64)}, "weight has shape [96, 64], expected [65, 96]"),
        ({"bias": (64,)}, "bias has shape [64], expected [65]"),
        ({"correction": (1, 64)}, "correction_bias has shape [1, 64], expected [64]"),
    ):
        assert made.call("configure", router_tensors(**change)) != 0
        assert message in others.log()
    given = made.call("workspace", router_tensors((70,)))
    for rows in range(71):
        for device in DEVICES:
            assert cuda.plan_router(cuda.router_problem(ROUTER, "bf16", rows), device).workspace_bytes <= given


def norm_tensors(x=(3, 5, 64), residual=(3, 5, 64), weight=(64,), dtype="bf16"):
    return [tensor(dtype, dims) for dims in (x, residual, weight, x, x)]


def test_norm_shapes(others):
    others.select("AddRMSNorm")
    made = others.create(attributes_of(NORM))
    for dtype in TYPES:
        supported = [made.call("supports", norm_tensors(dtype=dtype), at) for at in range(5)]
        assert all(supported) == (dtype in ("f16", "bf16"))
    others.log()
    assert made.outputs(norm_tensors()) == [("bf16", (3, 5, 64))] * 2
    assert made.call("configure", norm_tensors()) == 0, others.log()
    assert made.call("workspace", norm_tensors()) == 0
    for change, message in (
        ({"weight": (63,)}, "x has shape [3, 5, 64] and weight [63], expected [.., H] and [H]"),
        ({"residual": (5, 64)}, "residual has shape [5, 64], expected [3, 5, 64]"),
    ):
        assert made.call("configure", norm_tensors(**change)) != 0
        assert message in others.log()


def rows_tensors(past=(2, 4, 8, 64), ids=(2, 1), mask=(2, 8), types=("f16", "i64", "i64", "i32", "i64")):
    return [tensor(t, dims) for t, dims in zip(types, (past, ids, mask, (2, 3), (2, 1, 1)), strict=True)]


def test_rows_shapes(others):
    others.select("TokenRows")
    made = others.create(attributes_of(TOKEN_ROWS))
    assert all(made.call("supports", rows_tensors(), at) for at in range(5))
    assert not made.call("supports", rows_tensors(types=("f16", "i32", "i64", "i32", "i64")), 1)
    assert not made.call("supports", rows_tensors(types=("f16", "i64", "i64", "i32", "i32")), 4)
    assert made.outputs(rows_tensors()) == [("i32", (2, 3)), ("i64", (2, 1, 1))]
    assert made.call("configure", rows_tensors()) == 0, others.log()
    for change, message in (
        ({"past": (3, 4, 8, 64)}, "past_key has shape [3, 4, 8, 64], expected [2, -1, -1, -1]"),
        ({"ids": (2,)}, "input_ids has shape [2], expected [2, -1]"),
        ({"mask": (8,)}, "attention_mask has shape [8], expected [-1, -1]"),
    ):
        assert made.call("configure", rows_tensors(**change)) != 0
        assert message in others.log()


def test_attention_types(others):
    others.select("CachedAttention")
    made = others.create(attributes_of(ATTENTION))
    others.log()
    for x in TYPES:
        for cache in TYPES:
            supported = [made.call("supports", attention_tensors(dtype=x, cache=cache), at) for at in range(13)]
            assert all(supported) == (x == cache and x in ("f16", "bf16")), (x, cache)
    assert others.log() == (
        '2 CachedAttention layer "experts": does not run with float32 qkv, the kernels take float16 and bfloat16\n'
    )
    fresh = others.create(attributes_of(ATTENTION))
    assert not fresh.call("supports", attention_tensors(dtype="bf16", cache="f16"), 1)
    assert others.log() == '2 CachedAttention layer "experts": does not run with a cache that is not of qkv\'s type\n'
    for at, good in {3: "i32", 4: "i64", 5: "f32", 6: "f32", 7: "f32", 8: "f32", 9: "f32"}.items():
        for name in TYPES:
            given = attention_tensors()
            given[at].type = TYPES[name]
            assert made.call("supports", given, at) == (name == good)


@pytest.mark.parametrize("past", [0, 5, 64])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_attention_outputs(others, dtype, past):
    """The cache grows where the mask is longer than it, and stays where it is not."""
    others.select("CachedAttention")
    made = others.create(attributes_of(ATTENTION))
    cache = (dtype, (2, 4, max(past, 12), 128))
    given = attention_tensors(tokens=7, past=past, length=12, dtype=dtype)
    assert made.outputs(given) == [(dtype, (2, 7, 4096)), cache, cache]
    for name in ("qkv", "past_key", "past_value", "attention_mask"):
        assert made.outputs(attention_tensors(**{name: (2,)})) is None
        assert f'1 CachedAttention layer "experts": {name} has 1 dimensions, expected ' in others.log()


def test_attention_shapes(others):
    others.select("CachedAttention")
    made = others.create(attributes_of(ATTENTION))
    for given in ((1, 1, 0, 1), (3, 5, 64, 10), (1, 2048, 0, 2048), (64, 1, 4096, 4096), (0, 1, 0, 1)):
        assert made.call("configure", attention_tensors(*given)) == 0, others.log()
    for change, message in (
        ({"qkv": (2, 1, 5000)}, "qkv has shape [2, 1, 5000], expected [-1, -1, 5120] (-1: any size)"),
        ({"qkv": (2, 5120)}, "qkv has shape [2, 5120], expected"),
        ({"past_key": (2, 8, 64, 128)}, "past_key has shape [2, 8, 64, 128], expected [2, 4, -1, 128]"),
        ({"past_key": (1, 4, 64, 128)}, "past_key has shape [1, 4, 64, 128], expected [2, 4, -1, 128]"),
        ({"past_value": (2, 4, 63, 128)}, "past_value has shape [2, 4, 63, 128], expected [2, 4, 64, 128]"),
        ({"rows": (2, 2)}, "rows has shape [2, 2], expected [2, 3]"),
        ({"attention_mask": (3, 64)}, "attention_mask has shape [3, 64], expected [2, -1]"),
        ({"cos": (2, 1, 32)}, "cos has shape [2, 1, 32], expected [2, 1, 64]"),
        ({"sin": (1, 1, 64)}, "sin has shape [1, 1, 64], expected [2, 1, 64]"),
        ({"q_norm": (0,)}, "q_norm has shape [0], expected [128]"),
        ({"k_norm": (512,)}, "k_norm has shape [512], expected [128]"),
        ({"sinks": (4,)}, "sinks has shape [4], expected [32]"),
    ):
        for call in ("configure", "shape_change"):
            assert made.call(call, attention_tensors(**change)) != 0
            assert f'1 CachedAttention layer "experts": {message}' in others.log()


def test_latent_shapes(others):
    others.select("CachedAttention")
    made = others.create(attributes_of(LATENT))
    given = attention_tensors(2, 7, 5, 12, spec=LATENT)
    assert made.outputs(given) == [("bf16", (2, 7, 20 * 512))] + [("bf16", (2, 1, 12, 288))] * 2
    assert made.call("configure", given) == 0, others.log()
    for change, message in (
        ({"qkv": (2, 1, 12608)}, "qkv has shape [2, 1, 12608], expected [-1, -1, 12096]"),
        ({"past_key": (2, 1, 64, 576)}, "past_key has shape [2, 1, 64, 576], expected [2, 1, -1, 288]"),
        ({"past_value": (2, 1, 64, 512)}, "past_value has shape [2, 1, 64, 512], expected [2, 1, 64, 288]"),
    ):
        assert made.call("shape_change", attention_tensors(spec=LATENT, **change)) != 0
        assert f'1 CachedAttention layer "experts": {message}' in others.log()


@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["qwen3", "latent"])
def test_attention_workspace(others, spec):
    """Of the profile's maxima, and enough for fewer tokens, rows and slots, which have more splits."""
    others.select("CachedAttention")
    made = others.create(attributes_of(spec))
    given = made.call("workspace", attention_tensors(4, 300, 5000, 5300, spec=spec))
    needed = 0
    for device in DEVICES:
        for batch in range(1, 5):
            for tokens in range(1, 301):
                for slots in (1, 700, 5000, 5300):
                    problem = cuda.attention_problem(spec, "bf16", batch, tokens, 0, slots)
                    needed = max(needed, cuda.plan_attention(problem, device).workspace_bytes)
    most = cuda.plan_attention(cuda.attention_problem(spec, "bf16", 4, 300, 0, 5300)).workspace_bytes
    assert most < needed <= given


@pytest.mark.parametrize("spec", [ATTENTION, attention_spec(4, 4, 64), LATENT], ids=["qwen3", "plain", "latent"])
@pytest.mark.parametrize(("past", "length"), [(64, 64), (64, 9), (0, 7), (20, 64)])
def test_attention_is_launched_with_what_it_is_given(fake, spec, past, length):
    """Each tensor where the kernels look for it; present is past's memory where the caller binds them so."""
    fake.select("CachedAttention")
    running = fake.create(fake.create(attributes_of(spec)).serialize(), RUNTIME).attach()
    shapes = attention_tensors(3, 2, past, length, "f16", spec=spec)
    assert running.call("shape_change", shapes) == 0, fake.log()
    given = [0x1000 * (i + 1) for i in range(10)]
    results = [0xA0000, given[1], given[2]] if past == max(past, length) else [0xA0000, 0xB0000, 0xC0000]
    pointers = [(ctypes.c_void_p * len(p))(*p) for p in (given, results)]
    before = fake.lib.driver_count(1)
    assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(0xD0000), None) == 0, fake.log()
    assert fake.lib.driver_count(1) == before + 1
    problem, tensors_ = cuda.AttentionProblem(), (ctypes.c_uint64 * 13)()
    fake.lib.driver_attended(ctypes.byref(problem), tensors_)
    want = cuda.attention_problem(spec, "f16", 3, 2, past, max(past, length))
    assert bytes(problem) == bytes(want)
    inputs = [p for i, p in enumerate(given) if i != 4]  # attention_mask has only a length
    assert list(tensors_) == [*inputs, *results, 0xD0000]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spec", [ATTENTION, LATENT], ids=["qwen3", "latent"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_enqueue_attention(others, dtype, spec):
    """In place and growing, with one plug-in, against the reference."""
    others.select("CachedAttention")
    built = others.create(attributes_of(spec))
    size = built.call("workspace", attention_tensors(2, 40, 200, 240, dtype, spec=spec))
    running = others.create(built.serialize(), RUNTIME).attach()
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    for rows, tokens, past, length in (
        ([(0, 40, 0), (5, 30, 0)], 40, 200, 0),
        ([(0, 1, 40), (0, 1, 199)], 1, 200, 200),
        ([(0, 1, 40), (0, 1, 200)], 1, 200, 201),
        ([(0, 40, 0), (0, 40, 0)], 40, 0, 40),
    ):
        made = Inputs.make(spec, dtype, rows, tokens, past, length)
        shapes = attention_tensors(2, tokens, past, length, dtype, spec=spec)
        on_device = made.on_device()
        mask = torch.zeros(2, max(1, length), dtype=torch.int64, device="cuda")
        tensors_ = [*on_device[:4], mask, *on_device[4:]]
        width = spec.num_heads * spec.v_head_size
        output = torch.full((2, tokens, width), float("nan"), dtype=TORCH[dtype], device="cuda")
        present = on_device[1:3]
        if length > past:
            present = [
                output.new_full((2, spec.kv_num_heads, length, width), float("nan")) for width in spec.cache_widths
            ]
        workspace.fill_(0xFF)
        torch.cuda.synchronize()
        assert running.call("shape_change", shapes) == 0, others.log()
        pointers = [(ctypes.c_void_p * len(t))(*(x.data_ptr() for x in t)) for t in (tensors_, [output, *present])]
        assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(workspace.data_ptr()), None) == 0
        torch.cuda.synchronize()
        check_results(made, [x.cpu().double().numpy() for x in (output, *present)])


@pytest.mark.parametrize("spec", [CONV, DELTA], ids=lambda spec: spec.OP)
def test_types_of_states(others, spec):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    count = len(state_tensors(spec))
    for x in TYPES:
        supported = [made.call("supports", state_tensors(spec, dtype=x), at) for at in range(count)]
        assert all(supported) == (x in ("f16", "bf16")), x
    for at, good in {i: t.type for i, t in enumerate(state_tensors(spec))}.items():
        for code in TYPES.values():
            given = state_tensors(spec)
            given[at].type = code
            assert at == 0 or made.call("supports", given, at) == (code == good)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("spec", [CONV, WINDOW, DELTA], ids=lambda spec: f"{spec.OP}-{spec.state_window}")
def test_outputs_of_states(others, spec, dtype):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    y, state = state_shapes(spec, 2, 7)[-2:]
    given = state_tensors(spec, 2, 7, dtype)
    assert made.outputs(given) == [(dtype, y), ("f32" if spec is DELTA else dtype, state)]
    for name in ("qkv", "past_state") if spec is DELTA else ("x", "past_conv"):
        assert made.outputs(state_tensors(spec, **{name: (2,)})) is None
        assert f'1 {spec.OP} layer "experts": {name} has 1 dimensions, expected ' in others.log()


@pytest.mark.parametrize(
    ("spec", "name", "dims", "message"),
    [
        (CONV, "x", (2, 3, 511), "x has shape [2, 3, 511], expected [-1, -1, 512] (-1: any size)"),
        (CONV, "weight", (512, 3), "weight has shape [512, 3], expected [512, 4]"),
        (CONV, "bias", (4,), "bias has shape [4], expected [512]"),
        (CONV, "past_conv", (1, 512, 3), "past_conv has shape [1, 512, 3], expected [2, 512, 3]"),
        (WINDOW, "past_conv", (2, 512, 3), "past_conv has shape [2, 512, 3], expected [3, 2, 512, 3]"),
        (CONV, "rows", (2, 2), "rows has shape [2, 2], expected [2, 3]"),
        (DELTA, "qkv", (2, 512), "qkv has shape [2, 512], expected [-1, -1, 512]"),
        (DELTA, "a", (2, 3, 256), "a has shape [2, 3, 256], expected [2, 3, 4]"),
        (DELTA, "b", (2, 2, 4), "b has shape [2, 2, 4], expected [2, 3, 4]"),
        (DELTA, "z", (1, 3, 256), "z has shape [1, 3, 256], expected [2, 3, 256]"),
        (DELTA, "a_log", (2,), "a_log has shape [2], expected [4]"),
        (DELTA, "dt_bias", (256,), "dt_bias has shape [256], expected [4]"),
        (DELTA, "norm", (256,), "norm has shape [256], expected [64]"),
        (DELTA, "past_state", (2, 4, 64, 32), "past_state has shape [2, 4, 64, 32], expected [2, 4, 64, 64]"),
    ],
)
def test_shapes_of_states(others, spec, name, dims, message):
    others.select(spec.OP)
    made = others.create(attributes_of(spec))
    for batch, tokens in ((1, 1), (3, 300), (0, 1), (40, 0)):
        assert made.call("configure", state_tensors(spec, batch, tokens)) == 0, others.log()
    for call in ("configure", "shape_change"):
        assert made.call(call, state_tensors(spec, **{name: dims})) != 0
        assert f'1 {spec.OP} layer "experts": {message}' in others.log()


def test_workspace_of_states(others):
    """The convolution needs none; of the profile's maxima, and enough for fewer tokens and rows."""
    others.select("CausalConv")
    assert others.create(attributes_of(CONV)).call("workspace", state_tensors(CONV, 4, 300)) == 0
    others.select("GatedDelta")
    given = others.create(attributes_of(DELTA)).call("workspace", state_tensors(DELTA, 4, 300))
    problems = [cuda.delta_problem(DELTA, "bf16", b, t) for b in range(1, 5) for t in range(1, 301)]
    assert 0 < max(cuda.plan_delta(p, device).workspace_bytes for p in problems for device in DEVICES) <= given


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("spec", [CONV, DELTA], ids=lambda spec: spec.OP)
def test_states_are_launched_with_what_they_are_given(fake, spec, in_place, bias):
    """As test_attention_is_launched_with_what_it_is_given."""
    fake.select(spec.OP)
    running = fake.create(fake.create(attributes_of(spec)).serialize(), RUNTIME).attach()
    shapes = state_tensors(spec, 3, 20, "f16", **({} if bias else {"bias": (0,)}))
    assert running.call("shape_change", shapes) == 0, fake.log()
    count, past = len(inputs(spec.OP)), -2
    given = [0x1000 * (i + 1) for i in range(count)]
    results = [0xA0000, given[past] if in_place else 0xB0000]
    pointers = [(ctypes.c_void_p * len(p))(*p) for p in (given, results)]
    before = fake.lib.driver_count(1)
    assert running.call("enqueue", shapes, *pointers, ctypes.c_void_p(0xD0000), None) == 0, fake.log()
    assert fake.lib.driver_count(1) == before + 1
    made, found = (cuda.delta_problem if spec is DELTA else cuda.conv_problem), (ctypes.c_uint64 * 12)()
    want = made(spec, "f16", 3, 20)
    problem = type(want)()
    getattr(fake.lib, "driver_stepped" if spec is DELTA else "driver_convolved")(ctypes.byref(problem), found)
    for name, _ in want._fields_:  # what is between them is not said
        got, expected = getattr(problem, name), getattr(want, name)
        assert got == expected if isinstance(expected, int) else bytes(got) == bytes(expected)
    if spec is CONV and not bias:
        given[2] = 0
    assert list(found)[: count + 2] == [*given, *results]
    assert found[11] == (0xD0000 if spec is DELTA else 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("call", ["one token", "ragged few", "65"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_enqueue_states(others, dtype, call):
    """In place, with one plug-in: the bytes of the kernels, which test_linear_attention.py checks."""
    for spec, make, launch in ((CONV, conv_inputs, cuda.conv), (DELTA, delta_inputs, cuda.delta)):
        others.select(spec.OP)
        made = make(spec, dtype, call)
        described = state_tensors(spec, *made[0].shape[:2], dtype)
        built = others.create(attributes_of(spec))
        size = built.call("workspace", described)
        running = others.create(built.serialize(), RUNTIME).attach()
        want = launch(spec, *(on_device(x, dtype) for x in made))
        given = [on_device(x, dtype) for x in made]
        results = [torch.full_like(want[0], float("nan")), given[-2]]
        workspace = torch.full((max(1, size),), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert running.call("shape_change", described) == 0, others.log()
        pointers = [(ctypes.c_void_p * len(t))(*(x.data_ptr() for x in t)) for t in (given, results)]
        assert running.call("enqueue", described, *pointers, ctypes.c_void_p(workspace.data_ptr()), None) == 0
        torch.cuda.synchronize()
        for found, expected in zip(results, want, strict=True):
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_enqueue_others(others):
    rng = np.random.default_rng(0)
    stream = torch.cuda.Stream()

    def enqueue(spec, described, inputs, outputs):
        others.select(spec.OP)
        running = others.create(others.create(attributes_of(spec)).serialize(), RUNTIME).attach()
        size = running.call("workspace", described)
        workspace = torch.full((max(1, size),), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        assert running.call("shape_change", described) == 0, others.log()
        pointers = [(ctypes.c_void_p * len(t))(*(x.data_ptr() for x in t)) for t in (inputs, outputs)]
        tail = [ctypes.c_void_p(p) for p in (workspace.data_ptr(), stream.cuda_stream)]
        assert running.call("enqueue", described, *pointers, *tail) == 0, others.log()
        torch.cuda.synchronize()

    m, spec, w = build_linear(replace(BASE, hidden=264, intermediate=512, group_size=128))
    assert spec == LINEAR
    for rows in (1, 100):
        x = torch.from_numpy(rng.normal(0, 1, (rows, 512)).astype(np.float32)).bfloat16()
        y = torch.full((rows, 264), float("nan"), dtype=torch.bfloat16, device="cuda")
        enqueue(LINEAR, linear_tensors((rows,)), [x.cuda(), torch.from_numpy(w).cuda()], [y])
        want = reference.linear(x.float().numpy(), m, "none")
        assert np.linalg.norm(y.double().cpu().numpy() - want) < 1.2 * UNIT["bf16"] * np.linalg.norm(want)

    logits = torch.from_numpy(rng.normal(0, 2, (9, 65)).astype(np.float32))
    bias = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids = torch.full((9, 8), -1, dtype=torch.int32, device="cuda")
    weights = torch.full((9, 8), float("nan"), device="cuda")
    enqueue(ROUTING, routing_tensors((9,), "f32"), [logits.cuda(), bias.cuda()], [ids, weights])
    want_ids, want = reference.route(ROUTING, logits.numpy(), bias.numpy())
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=4e-6)
