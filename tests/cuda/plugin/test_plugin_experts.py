"""QuantMoE in the TensorRT plug-in: types, shapes, workspace, act-orders; a GPU only for what is enqueued."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, UNIT
from support.cuda.layers import BASE, build, build_linear, of_format
from support.cuda.plugin_layers import DEVICES, LINEAR, ROWS, SPEC, SPECS, W, linear_tensors, tensors
from support.cuda.trt import BUILD, FIELD_TYPES, RUNTIME, TYPES, Attribute, Field, Plugin, attributes_of, tensor

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.layouts import LAYOUTS


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
    assert "hidden_states has shape [], expected [.., 2048]" in driver.log()


@pytest.mark.parametrize("tokens", [(1,), (0,), (3, 5), (1, 4096)], ids=str)
def test_configure(plugin, tokens):
    assert plugin.call("configure", tensors(tokens)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": (4, 2040)}, "hidden_states has shape [4, 2040], expected [4, 2048]"),
        ({"hidden_states": ()}, "hidden_states has shape []"),
        ({"topk_ids": (5, 8)}, "topk_ids has shape [5, 8], expected [4, K]"),
        ({"topk_ids": (4, 1, 8)}, "topk_ids has shape [4, 1, 8], expected [4, K]"),
        ({"topk_weights": (4, 7)}, "topk_weights has shape [4, 7], expected [4, 8]"),
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
        row, at = packed[0], LAYOUTS["marlin"].row(spec, "w13").part("perm")
        x, k, rows = (4, BASE.hidden), (4, BASE.top_k), [(len(w), w.shape[1] // 4) for w in packed]
        types = ("bf16", "i64", "f32", "i32", "i32", "bf16")
        shapes = [tensor(t, d) for t, d in zip(types, (x, k, k, *rows, x), strict=True)]
    else:
        _, spec, w = build_linear(replace(BASE, hidden=264, intermediate=256, act_order="shared"))
        row, at, packed = w, LAYOUTS["marlin"].row(spec.moe, "w2").part("perm"), [w]
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
@pytest.mark.parametrize("floats", [False, True])
def test_enqueue(driver, dtype, id_type, floats):
    """Built, serialized, deserialized, attached; then batches of changing size against the reference."""
    spec, experts, w13, w2 = build(of_format(dtype, BASE) if floats else BASE)
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
