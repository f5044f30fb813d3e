"""The TensorRT plug-in through its own interface: no TensorRT, and a GPU only for what is enqueued."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

import quantmoe
from quantmoe.custom_ops import cuda, reference
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection, RoutingSpec, attribute_kinds

if "QUANTMOE_TRT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
torch = pytest.importorskip("torch")
from cuda.test_cuda import BASE, TORCH, UNIT, build, build_linear  # noqa: E402
from cuda.trt import BUILD, FIELD_TYPES, RUNTIME, TYPES, Attribute, Driver, Plugin, attributes_of, tensor  # noqa: E402

W = Projection("int4", 128, "bf16", "none", layout="marlin", layout_version=LAYOUTS["marlin"].VERSION)
SPEC = MoESpec(16, 2048, 768, W, replace(W, group_size=64, scale_type="f16"), activation="swiglu_oai", swiglu_limit=7.5)
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


@pytest.mark.parametrize("op", ["QuantMoE", "QuantLinear", "MoERouting"])
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
        ("op_version", 2, "op_version is 2, this library knows 1"),
        ("w13_layout_version", 1, "marlin (1) version 2: export the model again"),
        ("w2_layout", "cpu_panel", "marlin (1) version 2"),
        ("w13_format", "int3", 'w13_format is "int3", the operator defines: int4, int8'),
        ("w13_format", "bf16", "w13_format is 5"),
        ("activation", "", 'activation is "", the operator defines: silu'),
        ("activation", "x" * 100_000, 'activation is "xxx'),
        ("w2_group_size", 48, "w2_group_size is 48"),
        ("hidden_size", -8, "hidden_size is -8"),
        ("intermediate_size", 0, "intermediate_size is 0"),
        ("num_experts", 0, "num_experts = 0"),
        ("expert_offset", 16, "num_experts = 16"),
        ("w13_pre_scale", 2, "w13_pre_scale is 2"),
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
    code = (
        "from cuda.trt import Driver\n"
        f"d = Driver({version}, {plain})\n"
        "assert d.create({}) is None\n"
        "print(d.log(), end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(os.path.dirname(__file__))
    )
    assert done.stdout == '1 QuantMoE layer "experts": attribute op_version is required\n', done.stderr


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
        types = (ctypes.c_int32 * 5)(TYPES[name], TYPES["i64"], TYPES["f32"], TYPES["i32"], TYPES["i32"])
        assert driver.lib.driver_output_type(plugin.handle, types) == TYPES[name]
    assert driver.lib.driver_output_shape(plugin.handle)


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


LINEAR = LinearSpec(512, 264, W)
LINEAR_WORDS = LAYOUTS["marlin"].row_bytes(LINEAR.moe, "w2") // 4
ROUTING = RoutingSpec(64, 6, "sigmoid_topk", 1, n_group=8, topk_group=3, routed_scaling_factor=2.5)


def linear_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"x": (*rows, 512), "w": (1, LINEAR_WORDS), "y": (*rows, 264)} | changes
    return [tensor(t, d) for t, d in zip((dtype, "i32", dtype), dims.values(), strict=True)]


def routing_tensors(rows=(4,), dtype="bf16", **changes):
    dims = {"logits": (*rows, 64), "bias": (64,), "ids": (*rows, 6), "weights": (*rows, 6)} | changes
    return [tensor(t, d) for t, d in zip((dtype, "f32", "i32", "f32"), dims.values(), strict=True)]


@pytest.mark.parametrize("spec", [LINEAR, ROUTING], ids=lambda spec: spec.OP)
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
        (LINEAR, "op_version", 2, "op_version is 2, this library knows 1"),
        (LINEAR, "in_features", 500, "in_features is 500"),
        (LINEAR, "w_format", "f16", "w_format is 6"),
        (LINEAR, "w_layout", "cpu_panel", "w_layout is 0"),
        (ROUTING, "op_version", 2, "op_version is 2, this library knows 1"),
        (ROUTING, "method", "hash", 'method is "hash", the operator defines: softmax_topk'),
        (ROUTING, "top_k", 25, "top_k is 25, the CUDA kernel takes 1 to 24"),
        (ROUTING, "n_group", 0, "n_group is 0"),
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
        ({"logits": (4, 63)}, "logits has shape [4, 63], expected [.., num_experts 64]"),
        ({"bias": (4, 64)}, "correction_bias has shape [4, 64], expected [num_experts 64]"),
    ):
        assert made.call("configure", routing_tensors(**change)) != 0
        assert message in others.log()


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

    logits = torch.from_numpy(rng.normal(0, 2, (9, 64)).astype(np.float32))
    bias = torch.from_numpy(rng.uniform(0, 1, 64).astype(np.float32))
    ids = torch.full((9, 6), -1, dtype=torch.int32, device="cuda")
    weights = torch.full((9, 6), float("nan"), device="cuda")
    enqueue(ROUTING, routing_tensors((9,), "f32"), [logits.cuda(), bias.cuda()], [ids, weights])
    want_ids, want = reference.route(ROUTING, logits.numpy(), bias.numpy())
    np.testing.assert_array_equal(ids.cpu().numpy(), want_ids)
    np.testing.assert_allclose(weights.cpu().numpy(), want, rtol=4e-6)
