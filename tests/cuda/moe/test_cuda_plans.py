"""Plans of the CUDA kernels: what they ask of a device, and that what they name is compiled. Needs no GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.formats import FLOATS, FORMATS, spec_of
from support.cuda.layers import FORMAT_SHAPES, FP8, LINEARS, ONE, SM120, TILES, build, build_linear, of_format
from support.operators.cases import INT4
from support.operators.specs import linear_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import enum

BF16 = FLOATS["bf16"]


@pytest.mark.parametrize("tokens", [0, 1, 10, 11, 4096])
def test_fp8_plans(tokens):
    """On sm_90, for e4m3 with scales of multiples of 128 columns, e4m3 activations, more than 5 tokens an expert."""
    spec = spec_of(512, 384, 4, 128, FP8.weights)
    codes = replace(spec.w13, activation_format="fp8_group128")

    def path(w13, w2, device=cuda.H200, **changes):
        p = cuda.problem(replace(spec, w13=w13, w2=w2, **changes), "bf16", tokens, 2, 4)
        plan = cuda.plan(p, device)
        cuda.check_plan(p, plan)
        return cuda.PATHS[plan.path]

    many = tokens * 2 > 5 * 4
    assert (path(codes, replace(codes, group_size=-1, activation_format="fp8_tensor")) == "fp8") == many
    for other in (spec.w13, replace(codes, group_size=64), replace(codes, group_size=32, scale_type="e8m0"),
                  replace(codes, pre_scale=1), replace(codes, activation_format="mxfp8")):  # fmt: skip
        assert path(codes, other) != "fp8"
    assert path(replace(codes, perm=1), codes) != "fp8"
    assert path(codes, codes, gated=0, activation="relu2") != "fp8"
    assert path(codes, codes, cuda.Device(89, 128, 102400)) != "fp8"


@pytest.mark.parametrize("tokens", [0, 3, 40, 4096])
def test_packed_plans(tokens):
    """Only where both sides are nvfp4 in groups of 16, without an order of features, on a GPU with the instruction."""
    spec = spec_of(2048, 768, 16, 16, ("nvfp4", "e4m3", False))
    codes = replace(spec.w13, activation_format="nvfp4")

    def packed(w13, w2, device=SM120):
        p = cuda.problem(replace(spec, w13=w13, w2=w2), "bf16", tokens, 4, 16)
        plan = cuda.plan(p, device)
        cuda.check_plan(p, plan)
        return plan.w13.packed, plan.w2.packed

    assert packed(codes, codes) == packed(codes, codes, cuda.Device(121, 48, 102400)) == (1, 1)
    assert packed(replace(codes, perm=1), spec.w2) == (0, 0)
    assert packed(spec.w13, codes) == (0, 1)
    assert packed(replace(codes, activation_format="mxfp4"), replace(codes, format="mxfp4", group_size=32,
                  scale_type="e8m0")) == (0, 0)  # fmt: skip
    assert packed(codes, codes, cuda.H200) == (0, 0)


def test_wgmma_plans_end_where_its_addresses_do():
    """2^32 pieces of 16 bytes of x or h."""
    spec = spec_of(2048, 4096, 16)
    for tokens, path in ((2**23 - 1, "wgmma"), (2**23, "stream")):
        plan = cuda.plan(cuda.problem(spec, "bf16", tokens, 1, 16), cuda.Device(90, 132, 233472))
        assert cuda.PATHS[plan.path] == path


def tiles_of(plan):
    """(tokens, panels) of a block, of both products."""
    return tuple((8 * step.n_tiles, step.panels) for step in (plan.w13, plan.w2))


@pytest.mark.parametrize(
    ("name", "most"), [("int4-zero", 6), ("nvfp4", 6), ("q4_k", 6), ("q5_k", 3), ("q6_k", 3), ("int8", 3), ("fp8", 3)]
)
def test_every_tile_of_wgmma_has_its_tokens(name, most):
    """What test_cuda_layers.test_every_tile runs: more than 4 bits have no blocks of 512 rows."""
    found = []
    for shape, tokens in TILES:
        case = of_format(name, FORMAT_SHAPES[shape])
        problem = cuda.problem(build(case)[0], "bf16", tokens, case.top_k, case.experts)
        found.append(tiles_of(cuda.plan(problem, ONE)))
    for tiles in zip(*found, strict=True):
        assert len(set(tiles)) == most, tiles
    up = {first for (shape, _), (first, _) in zip(TILES, found, strict=True) if shape == "ungated"}
    assert up == {(48, 16), (144, 16)}


@pytest.mark.parametrize(
    ("an_expert", "tokens", "panels"),
    [(16, 24, 32), (32, 48, 16), (48, 64, 32), (64, 80, 32), (80, 96, 16), (128, 144, 16)],
)
def test_tiles_grow_with_the_tokens_of_an_expert(an_expert, tokens, panels):
    """As measured with Qwen3-235B's sizes on an H100."""
    problem = cuda.problem(spec_of(4096, 1536, 128), "bf16", 16 * an_expert, 8, 128)
    assert tiles_of(cuda.plan(problem, cuda.H200)) == ((tokens, panels),) * 2


@pytest.mark.parametrize("tokens", [0, 3, 16, 40, 4096])
@pytest.mark.parametrize("sm", [80, 87, 89, 90, 100, 120])
def test_e4m3_plans(tokens, sm):
    """From sm_89 on, wherever it is not wgmma: for each projection whose weights are e4m3 as path fp8 takes them."""
    spec = spec_of(2048, 768, 16, 128, FP8.weights)
    codes = replace(spec.w13, activation_format="fp8_group128")
    device = cuda.Device(sm, 132, 233472 if sm in (90, 100) else 102400)
    wgmma = sm == 90 and tokens * 4 > 8 * 16

    def plan(w13, w2, **changes):
        p = cuda.problem(replace(spec, w13=w13, w2=w2, **changes), "bf16", tokens, 4, 16)
        found = cuda.plan(p, device)
        cuda.check_plan(p, found)
        return found

    def packed(*a, **changes):
        found = plan(*a, **changes)
        return found.w13.packed, found.w2.packed

    yes = int(sm >= 89 and not wgmma)
    assert packed(codes, codes) == (yes, yes)
    assert packed(codes, replace(codes, activation_format="fp8_tensor", group_size=-1, scale_type="f16")) == (yes, yes)
    assert packed(codes, codes, gated=0, activation="relu2") == (yes, yes)
    for other in (spec.w13, replace(codes, group_size=64), replace(codes, group_size=32, scale_type="e8m0"),
                  replace(codes, pre_scale=1), replace(codes, activation_format="mxfp8"),
                  replace(codes, format="int8")):  # fmt: skip
        assert packed(codes, other) == (yes, 0)
        assert packed(other, codes) == (0, yes)
    assert packed(replace(codes, perm=1), codes) == (0, yes)
    if tokens and yes:  # 80 bytes for 64 columns, of x a row a token, and h not in place
        a, b = plan(spec.w13, spec.w2), plan(codes, codes)
        grows = tokens * 2048 // 64 * 80 + tokens * 4 * 768 // 64 * 80
        assert 0 <= b.workspace_bytes - a.workspace_bytes - grows < 512
    linear = cuda.plan(cuda.linear_problem(linear_spec(2048, 768, codes), "bf16", tokens), device)
    assert linear.w2.packed == int(sm >= 89 and not (sm == 90 and tokens > 64))


@pytest.mark.parametrize("tokens", [0, 1, 40, 4096])
@pytest.mark.parametrize("activation_format", sorted({*enum("activation_format")} - {"int8_group"}))
def test_rounding_takes_workspace(activation_format, tokens):
    """A row of x for each token, or for each pair where experts differ; h is rounded in place."""
    spec = spec_of(2048, 768, 16)
    plain = cuda.plan(cuda.problem(spec, "bf16", tokens, 4, 16))
    changed = replace(spec.w13, activation_format=activation_format)
    plan = cuda.plan(cuda.problem(replace(spec, w13=changed, w2=changed), "bf16", tokens, 4, 16))
    pairs = activation_format in ("fp8_tensor", "nvfp4")
    rows = 0 if activation_format == "none" else tokens * (4 if pairs else 1)
    if cuda.PATHS[plan.path] == "wgmma":  # has a copy of x anyway
        rows = max(0, rows - tokens)
    assert plan.workspace_bytes == plain.workspace_bytes + rows * 2048 * 2
    for changed, same in ((plan.w13, plain.w13), (plan.w2, plain.w2)):
        assert all(getattr(changed, name) == getattr(same, name) for name in cuda.PlanStep.instance)


@pytest.mark.parametrize(
    "shape", [(2048, 768, 128, 8), (4096, 14336, 8, 2), (2880, 2880, 128, 4), (7168, 256, 256, 8), (64, 8, 1, 1)]
)
@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 64, 512, 4096, 65536])
@pytest.mark.parametrize(
    "device", [cuda.Device(80, 108, 167936), cuda.Device(89, 128, 102400), cuda.H200, cuda.Device(120, 188, 102400)]
)
@pytest.mark.parametrize(("kind", "group_size"), [(INT4, 128), *((w, g) for w, g, _ in (*FORMATS.values(), BF16))])
def test_plan_fits_the_device(shape, tokens, device, kind, group_size):
    hidden, intermediate, experts, top_k = shape
    spec = spec_of(hidden, intermediate, experts, group_size, kind)
    p = cuda.problem(spec, "bf16", tokens, top_k, experts)
    plan = cuda.plan(p, device)
    stream = cuda.PATHS[plan.path] == "stream"
    for gemm in (plan.w13, plan.w2):
        static = 0 if stream else 3 * 1024  # cuobjdump --dump-resource-usage: at most 3,072 bytes; stream's 16
        assert gemm.shared_bytes + static + 1024 <= device.shared_bytes
        assert gemm.grid >= 1
        assert gemm.cluster == 1 or device.sm >= 90
    fits = kind[::2] != ("int8", True) or device.shared_bytes > 102400
    assert cuda.PATHS[plan.path] == "decode" if tokens <= 8 and fits else plan.path > 0
    offsets = [at for s in plan.steps.values() for at in (s.in_at, s.out_at) if at != cuda.CALLERS]
    assert all(o % 256 == 0 for o in (*offsets, plan.tiles, plan.sorted_pairs, plan.workspace_bytes))
    assert all(o < plan.workspace_bytes for o in offsets) or not tokens
    assert plan.workspace_bytes >= tokens * top_k * intermediate * 2
    assert values(cuda.plan(p, device)) == values(plan)
    cuda.check_plan(p, plan)


@pytest.mark.parametrize("gemm", ["w13", "w2"])
@pytest.mark.parametrize(
    "change",
    [{"panels": 3}, {"panels": 8}, {"n_tiles": 5}, {"n_tiles": 0}, {"stages": 4}, {"packed": 1}, {"block": 32}],
)
@pytest.mark.parametrize("tokens", [4, 64, 4096])
@pytest.mark.parametrize(
    ("kind", "group_size"), [(INT4, 128), (INT4, 32), *((w, g) for w, g, _ in (*FORMATS.values(), BF16))]
)
def test_a_plan_of_kernels_that_are_not_compiled_is_refused(kind, group_size, tokens, change, gemm):
    p = cuda.problem(spec_of(2048, 768, 16, group_size, kind), "bf16", tokens, 4, 16)
    plan = cuda.plan(p)
    cuda.check_plan(p, plan)
    if cuda.PATHS[plan.path] == "wgmma" and "stages" in change:
        return  # the ring of wgmma has as many as fit
    for name, value in change.items():
        setattr(getattr(plan, gemm), name, value)
    with pytest.raises(ValueError, match=f"the plan names a kernel that is not compiled: {gemm} of path"):
        cuda.check_plan(p, plan)
    # A launch says so before anything reaches a GPU.
    with pytest.raises(ValueError, match="not compiled"):
        cuda.launch(p, plan, [], [None], None, None)


@pytest.mark.parametrize("path", [-1, 2, 3, 4, 5])
def test_a_plan_of_a_path_that_a_problem_has_not_is_refused(path):
    p = cuda.problem(spec_of(2048, 768, 16), "bf16", 64, 4, 16)
    linear = cuda.linear_problem(linear_spec(2048, 768, replace(spec_of(64, 64, 1).w2)), "bf16", 64)
    for problem, has in ((p, "wgmma"), (linear, "dense")):
        if path == cuda.PATHS.index(has):
            continue
        plan = cuda.plan(problem)
        plan.path = path
        with pytest.raises(ValueError, match="not compiled"):
            cuda.check_plan(problem, plan)


@pytest.mark.parametrize("rows", [0, 1, 9, 128, 4096])
@pytest.mark.parametrize("name", LINEARS)
def test_linear_plans(name, rows):
    _, spec, w = build_linear(LINEARS[name])
    assert cuda.refusal(spec) == ""
    p = cuda.linear_problem(spec, "bf16", rows)
    assert native.row_of(spec.w, spec.out_features, spec.in_features, 1).bytes == w.shape[1]
    for device in (cuda.Device(80, 108, 167936), cuda.Device(89, 128, 102400), cuda.H200):
        plan = cuda.plan(p, device)
        cuda.check_plan(p, plan)
        # The system's 1024 bytes, and what a linear's kernel has besides its rings, which is 16 at most.
        others = 4096 if cuda.PATHS[plan.path] == "dense" else 1024 + 16
        assert plan.w2.shared_bytes + others <= device.shared_bytes
        fits = not name.startswith("int8-zero") or device.shared_bytes > 102400
        assert plan.path == 0 if rows <= 8 and fits else plan.path > 0


@pytest.mark.parametrize(
    ("shape", "tokens", "panels"),  # of gate_up, of down
    [
        ((2880, 2880, 128, 4), 512, (32, 32)),
        ((7168, 256, 256, 8), 512, (32, 32)),
        ((4096, 14336, 8, 2), 64, (32, 32)),
        ((2048, 768, 128, 8), 512, (16, 16)),  # 32 tokens an expert
        ((2048, 768, 128, 8), 128, (16, 32)),  # gate_up: three rounds of blocks of 256 rows instead of two of 512
        ((7168, 256, 256, 8), 640, (16, 32)),  # gate_up: one expert in six has more than 24 tokens, and a second tile
        ((7168, 256, 256, 8), 192, (32, 32)),  # 6 tokens an expert
        ((7168, 256, 256, 8), 160, (4, 4)),
        ((2880, 2880, 128, 4), 64, (4, 4)),  # stream
    ],
)
def test_plan_of_few_tokens(shape, tokens, panels):
    hidden, intermediate, experts, top_k = shape
    p = cuda.problem(spec_of(hidden, intermediate, experts), "bf16", tokens, top_k, experts)
    plan = cuda.plan(p, cuda.H200)
    assert (plan.w13.panels, plan.w2.panels) == panels
    for gemm in (plan.w13, plan.w2):
        assert gemm.n_tiles == {32: 3, 16: 6, 4: 1}[gemm.panels]
        assert gemm.stages == (2 if gemm.panels == 4 else 3)
    pairs = tokens * top_k  # the list has room for every expert's last tile
    assert plan.max_tiles >= pairs // (8 * plan.w13.n_tiles) + min(pairs, experts)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "llama4", "linear", "lm_head"])
def test_workspace_for_any_number_of_multiprocessors(name):
    """A device of 0 multiprocessors stands for any."""
    sizes = {"qwen3": (2048, 768, 128, 8), "mixtral": (4096, 14336, 8, 2), "llama4": (5120, 8192, 16, 1)}
    for tokens in (1, 8, 9, 64, 100, 272, 512, 1024, 4096):
        if name in sizes:
            hidden, intermediate, experts, top_k = sizes[name]
            spec = spec_of(hidden, intermediate, experts)
            p = cuda.problem(spec, "bf16", tokens, top_k, experts)
        else:
            features = (4096, 4096) if name == "linear" else (2048, 151936)
            p = cuda.linear_problem(linear_spec(*features, spec_of(64, 64, 1).w2), "bf16", tokens)
        bound = cuda.plan(p, cuda.Device(90, 0, 233472)).workspace_bytes
        found = [cuda.plan(p, cuda.Device(90, n, 233472)).workspace_bytes for n in range(1, 145)]
        assert max(found) <= bound <= 1.2 * max(found)


@pytest.mark.parametrize(
    ("tokens", "changes", "steps"),
    [
        (1, {}, "gate_up down"),
        (1, {"activation_format": "fp8_token"}, "round gate_up round_hidden down"),
        (1, {"perm": 1, "activation_format": "fp8_token"}, "round gather gate_up round_hidden down"),
        (24, {}, "route gate_up down combine"),
        (4096, {}, "route gate_up down combine"),
        (4096, {"perm": 1}, "gather route gate_up down combine"),
        (4096, {"activation_format": "fp8_token"}, "round route gate_up round_hidden down combine"),
    ],
)
def test_steps_of_a_layer(tokens, changes, steps):
    """Each reads what the one before it wrote, the first the caller's rows; the last writes the caller's."""
    spec = spec_of(2048, 768, 128)
    spec = replace(spec, w13=replace(spec.w13, **changes), w2=replace(spec.w2, **changes))
    check_steps(cuda.plan(cuda.problem(spec, "bf16", tokens, 8, 128)), steps.split(), 2048, 2048, tokens)


@pytest.mark.parametrize(
    ("formats", "steps"),
    [
        (("fp8_group128", "fp8_group128"), "route quantize gate_up down combine"),
        (("fp8_token", "fp8_tensor"), "route quantize gate_up down combine"),
        (("fp8_tensor", "fp8_token"), "route quantize gate_up quantize_hidden down combine"),
    ],
)
@pytest.mark.parametrize("on_input", [0, 1])
def test_steps_of_codes(formats, steps, on_input):
    """gate_up quantizes h where a block has what its scale needs."""
    spec = spec_of(2048, 768, 16, 128, FP8.weights)
    w13, w2 = (replace(spec.w13, activation_format=f) for f in formats)
    spec = replace(spec, w13=w13, w2=w2, apply_router_weight_on_input=on_input)
    plan = cuda.plan(cuda.problem(spec, "bf16", 512, 4, 16))
    check_steps(plan, steps.split(), 2048, 2048, 512)
    assert [name for name, s in plan.steps.items() if s.weighted] == ["quantize" if on_input else "down"]


@pytest.mark.parametrize(
    ("rows", "changes", "steps"),
    [
        (1, {}, "linear"),
        (512, {}, "linear"),
        (512, {"activation_format": "mxfp8"}, "round linear"),
        (512, {"perm": 1}, "gather linear"),
    ],
)
def test_steps_of_a_linear(rows, changes, steps):
    w = replace(spec_of(64, 64, 1).w2, **changes)
    plan = cuda.plan(cuda.linear_problem(linear_spec(768, 2048, w), "bf16", rows))
    check_steps(plan, steps.split(), plan.w2.in_columns, plan.w2.out_columns, rows)
    assert {plan.w2.in_columns, plan.w2.out_columns} == {768, 2048}


def values(plan: cuda.Plan) -> list[int]:
    """All that a plan says; its padding is any."""
    steps = [getattr(step, name) for step in plan.all_steps for name, _ in cuda.PlanStep._fields_]
    return steps + [getattr(plan, name) for name, _ in cuda.Plan._fields_ if name != "all_steps"]


def check_steps(plan: cuda.Plan, names: list[str], columns: int, out_columns: int, rows: int) -> None:
    assert list(plan.steps) == names
    steps = list(plan.steps.values())
    first, last = steps[0], steps[-1]
    assert (first.in_at, first.in_rows, first.in_columns) == (cuda.CALLERS, rows, columns)
    assert (last.out_at, last.out_rows, last.out_columns) == (cuda.CALLERS, rows, out_columns)
    for before, after in pairwise(steps):
        assert (before.out_at, before.out_rows, before.out_columns) == (after.in_at, after.in_rows, after.in_columns)
        assert before.out_at != cuda.CALLERS or before.kind == cuda.STEPS.index("route")
    # What reads x before a product does waits for the kernels before the call (launcher.h).
    waits = ("round", "gather") if steps[0].kind in map(cuda.STEPS.index, ("round", "gather")) else ("route",)
    assert [name for name, s in plan.steps.items() if not s.dependent] == [n for n in names if n in waits]
    assert sum(s.weighted for s in steps) == ("linear" not in names)


def instance(plan: cuda.Plan, step: cuda.PlanStep, of: str) -> tuple:
    """What a plan says of a row of instances.inc: path, product, panels (0: Span's), n_tiles, kernel, stages."""
    path, span = cuda.PATHS[plan.path].capitalize(), step.warps_k == 0
    whole = (path, of, step.stages, step.warps_k) == ("Stream", "Down", 2, 1)
    kernel = "Span" if span else "MmaWhole" if whole else ""
    return path, of, 0 if span else step.panels, step.n_tiles, kernel, step.stages


def test_plans_take_every_instance():
    """A row that no plan names would be kernels that are compiled for nothing."""
    found = set()
    devices = (cuda.H200, cuda.Device(80, 108, 167936), SM120)
    shapes = ((2880, 2880, 32, 4), (2048, 768, 128, 8), (4096, 14336, 8, 2), (7168, 256, 256, 8))
    kinds = ((INT4, 128), (INT4, 64), *((w, g) for w, g, _ in (*FORMATS.values(), BF16)))
    for (hidden, intermediate, experts, top_k), (kind, group), device in product(shapes, kinds, devices):
        spec = spec_of(hidden, intermediate, experts, group, kind)
        codes = replace(spec.w13, activation_format="fp8_group128")
        ungated = replace(spec, gated=0, activation="relu2")
        for layer in (spec, ungated, replace(spec, w13=codes, w2=codes))[: 3 if kind == FP8.weights else 2]:
            for tokens in (1, 2, 8, 16, 32, 64, 128, 384, 512, 640, 4096):
                plan = cuda.plan(cuda.problem(layer, "bf16", tokens, top_k, experts), device)
                first = "GateUp" if layer.gated or cuda.PATHS[plan.path] != "wgmma" else "Up"
                found |= {instance(plan, plan.w13, first), instance(plan, plan.w2, "Down")}
    specs = [build_linear(case)[1] for case in LINEARS.values()]
    plain = {"group_size": -1, "block_n": 1, "zero_points": 0, "perm": 0, "bias": 0}
    floats = replace(specs[0].w, format="bf16", scale_type="f32", **plain)
    specs.append(replace(specs[0], w=floats))
    for spec, columns, (out, *all_rows) in product(
        specs, (512, 4096, 16384), ((2048, 1), (4096, 1, 9, 16, 32, 64, 128, 256, 1024))
    ):
        for rows, device in product(all_rows, devices):
            p = cuda.linear_problem(replace(spec, in_features=columns, out_features=out), "bf16", rows)
            plan = cuda.plan(p, device)
            found.add(instance(plan, plan.w2, "Linear"))
    text = (Path(__file__).parents[3] / "custom_ops/src/cuda/gemm/instances.inc").read_text(encoding="utf-8")
    rows = re.findall(r"^QM_INSTANCE\((\w+), (\w+), (\w+), ([\w.]+), (\d+), [\w.]+, ([^,]+), ", text, re.MULTILINE)
    assert len(rows) == text.count("\nQM_INSTANCE(")
    counts = {"stages_of(1)": [3], "stages_of(2)": [2], "stages_of(f.units)": [2, 3], "kSpanStages": [3]}
    counts |= {"kDeepStages": [6], "0": range(32)}  # 0: as many as fit
    for kernel, path, of, panels, n_tiles, stages in rows:
        named = kernel if kernel in ("Span", "MmaWhole") else ""
        row = (path, of, int(panels) if panels.isdigit() else 0, int(n_tiles), named)
        if kernel == "Dense":  # n_tiles: at most
            assert any(row[:3] == f[:3] and int(n_tiles) // 2 < f[3] <= int(n_tiles) for f in found), row
        else:
            assert any(row == f[:5] and f[5] in (counts.get(stages) or [int(stages)]) for f in found), (row, stages)


def test_formats_that_differ_take_the_same_tiles():
    """In the stream path w13 and w2 read one list of tiles: neither may have smaller ones than the other."""
    few = replace(spec_of(2048, 768, 128), w2=spec_of(2048, 768, 128, -1, ("int8", "bf16", False)).w2)
    for spec in (few, replace(few, w13=few.w2, w2=few.w13)):
        for device, counts in ((cuda.Device(89, 128, 102400), (64, 128, 512)), (cuda.H200, (9, 64, 80))):
            for tokens in counts:
                plan = cuda.plan(cuda.problem(spec, "bf16", tokens, 8, 128), device)
                assert cuda.PATHS[plan.path] == "stream"
                assert plan.w13.n_tiles == plan.w2.n_tiles
