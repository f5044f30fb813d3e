"""QuantLinear of more than a few rows on wgmma: one kernel, its tiles, parts of K and edges, against reference.py."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from support.cuda import cuda_kernels as cuda  # noqa: E402
from support.cuda.built import TORCH, UNIT, gpu  # noqa: E402
from support.cuda.formats import FORMATS, spec_of  # noqa: E402
from support.cuda.layers import BASE, LINEARS, SM89, build_linear, of_format  # noqa: E402
from support.operators.cases import K_QUANTS  # noqa: E402
from support.operators.specs import linear_spec  # noqa: E402

from quantmoe.custom_ops import reference  # noqa: E402
from quantmoe.custom_ops.layouts import marlin  # noqa: E402
from quantmoe.custom_ops.matrix import QuantizedMatrix  # noqa: E402

#: of tiles of up to so many tokens, the least a product has (layout.h); panels
LEAST, PANELS = {64: 16, 128: 80, 256: 144}, {64: 8, 128: 16, 256: 8}


def tile_of(width: int) -> int:
    return min(t for t in LEAST if t >= width)


def launch(spec, w: np.ndarray, x: torch.Tensor, plan: cuda.Plan | None = None) -> torch.Tensor:
    """y between rows that nothing may write; twice the same bytes."""
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    p = cuda.linear_problem(spec, {v: k for k, v in TORCH.items()}[x.dtype], len(x))
    plan = plan or cuda.plan(p, linear.device)
    results = []
    for _ in range(2):
        size = len(x) * spec.out_features
        flat = torch.full((size + 16,), float("nan"), dtype=x.dtype, device="cuda")  # 16-byte aligned from 8 on
        y = flat[8 : 8 + size].view(len(x), spec.out_features)
        workspace = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device="cuda")
        linear.launch(p, plan, x.cuda(), y, workspace)
        assert flat[:8].isnan().all()
        assert flat[8 + size :].isnan().all()
        results.append(y)
    assert torch.equal(*(torch.nan_to_num(y, nan=123.0) for y in results))
    return results[0]


def tiles_of(spec, panels: int, width: int, rows: int) -> int:
    return math.ceil(math.ceil(spec.out_features / 16) / panels) * math.ceil(rows / width)


def inputs(rows: int, columns: int, dtype: str, seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 1, (rows, columns)).astype(np.float32)).to(
        TORCH[dtype]
    )


def assert_close(y: torch.Tensor, x: torch.Tensor, m: QuantizedMatrix, dtype: str) -> None:
    """Rows of results: y is rounded once, and so is each weight, at random. Rows of few: no rounding errs by more."""
    x = x.double().cpu().numpy()
    got, want = y.double().cpu().numpy(), reference.linear(x.astype(np.float32), m, "none")
    assert np.isfinite(got).all()
    error = np.abs(got - want)
    if want.shape[1] >= 64:
        assert (np.linalg.norm(error, axis=1) <= 1.3 * UNIT[dtype] * np.linalg.norm(want, axis=1)).all()
    else:  # a scale, a weight, y; f32 sums
        terms = np.abs(x) @ np.abs(m.dequantize()).T
        assert (error <= UNIT[dtype] * (2.02 * terms + np.abs(want))).all()


def plan_of(spec, rows: int, width: int, parts: int) -> cuda.Plan:
    """A plan of that tile and so many parts of K; a matrix for which heuristics.cc takes each tile says their sizes."""
    large = replace(spec, in_features=16384, out_features=7168)
    shared = {}
    for some in (16, 96, 128, 4096):
        g = cuda.plan(cuda.linear_problem(large, "bf16", some), cuda.H200).w2
        shared[tile_of(8 * g.n_tiles)] = g.shared_bytes
    p = cuda.linear_problem(spec, "bf16", rows)
    plan = cuda.plan(p, cuda.H200)
    tile = tile_of(width)
    tiles = tiles_of(spec, PANELS[tile], width, rows)
    plan.path = cuda.PATHS.index("dense")
    plan.w2.panels, plan.w2.n_tiles, plan.w2.shared_bytes = PANELS[tile], width // 8, shared[tile]
    plan.w2.block = 32 * PANELS[tile] + 128  # a panel a warp, and a warpgroup that copies
    plan.w2.warps_k = plan.w2.cluster = parts
    plan.w2.grid = tiles * parts if parts > 1 else min(tiles, 132)
    cuda.check_plan(p, plan)
    return plan


@pytest.mark.parametrize("name", [*LINEARS, "int4-32"])
def test_plans_are_of_compiled_kernels(name):
    """For any number of rows: the tiles cover them, parts have units of K, the blocks fit."""
    case = replace(BASE, hidden=1032, intermediate=520) if name == "int4-32" else LINEARS[name]
    _, spec, _ = build_linear(case)
    units = math.ceil(spec.in_features / 64)
    for rows in (*range(9, 300), 511, 512, 513, 1000, 2048, 4096, 65536):
        p = cuda.linear_problem(spec, "bf16", rows)
        plan = cuda.plan(p, cuda.H200)
        cuda.check_plan(p, plan)
        g, width = plan.w2, 8 * plan.w2.n_tiles
        assert cuda.PATHS[plan.path] == "dense"
        tile = tile_of(width)
        assert width >= LEAST[tile]
        assert width % 16 == 0
        assert g.panels == PANELS[tile]
        tiles = tiles_of(spec, g.panels, width, rows)
        assert 1 <= g.cluster <= min(8, units)
        assert g.grid == (tiles * g.cluster if g.cluster > 1 else min(tiles, g.grid))
        assert (plan.workspace_bytes > 0) == bool(spec.w.perm)


@pytest.mark.parametrize(
    ("features", "rows"), [((2048, 5120), 16), ((4096, 2048), 64), ((16384, 7168), 4096), ((1536, 24576), 512)]
)
def test_a_dense_matrix_has_one_kernel_and_no_workspace(features, rows):
    plan = cuda.plan(cuda.linear_problem(linear_spec(*features, spec_of(64, 64, 1).w2), "bf16", rows), cuda.H200)
    assert (cuda.PATHS[plan.path], plan.workspace_bytes, plan.max_tiles) == ("dense", 0, 0)


@gpu
@pytest.mark.parametrize("rows", [9, 16, 17, 63, 64, 65, 96, 97, 127, 129, 160, 255, 256, 257, 300, 513, 1025])
@pytest.mark.parametrize("shape", [(8, 16), (129, 72), (203, 264), (1032, 1096), (2056, 64)])
def test_rows_and_shapes(rows, shape):
    case = replace(BASE, hidden=shape[0], intermediate=shape[1], group_size=32, bias=True)
    m, spec, w = build_linear(case)
    x = inputs(rows, spec.in_features, "bf16")
    assert_close(launch(spec, w, x), x, m, "bf16")


@gpu
@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("width", [16, 32, 48, 64, *range(80, 257, 16)])
def test_tiles_and_parts(width, parts):
    """Every width of a product, with every number of blocks that share K; results of two kinds of sums agree."""
    case = replace(BASE, hidden=520, intermediate=64 * 9 + 8, group_size=128, bias=True)
    m, spec, w = build_linear(case)
    x = inputs(width + 7, spec.in_features, "bf16")
    y = launch(spec, w, x, plan_of(spec, len(x), width, parts))
    assert_close(y, x, m, "bf16")


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("width", [16, 64, 112, 128, 160, 256])
@pytest.mark.parametrize("name", K_QUANTS)
def test_parts_of_scales_of_two_levels(name, width, parts, dtype):
    """Parts of K that begin in the middle of a block of scales."""
    m, spec, w = build_linear(of_format(name, replace(BASE, hidden=520, intermediate=64 * 9 + 8, bias=True)))
    x = inputs(width + 7, spec.in_features, dtype)
    assert_close(launch(spec, w, x, plan_of(spec, len(x), width, parts)), x, m, dtype)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [20, 100, 200])
@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_minima_that_cancel_scales(name, rows, dtype):
    """A group's minimum is about the middle of its codes times its scale, as in files."""
    m, spec, w = minima_like_files(name, rows)
    x = inputs(rows, spec.in_features, dtype)
    assert_close(launch(spec, w, x), x, m, dtype)


def minima_like_files(name: str, seed: int):
    m, spec, _ = build_linear(of_format(name, replace(BASE, hidden=200, intermediate=1352)))
    rng, scales = np.random.default_rng(seed), m.scales.copy()
    scales["scales"] = rng.integers(1, 64, scales["scales"].shape)
    scales["minima"] = (scales["scales"] + rng.integers(-3, 4, scales["minima"].shape)).clip(0, 63)
    scales["d_min"] = scales["d"] * (8 if name == "q4_k" else 16)
    m = replace(m, scales=scales)
    row = np.zeros(marlin.row_bytes(spec.moe, "w2"), np.uint8)
    marlin.pack_down(m, spec.moe, row)
    return m, spec, row[None]


@gpu
@pytest.mark.parametrize("rows", [1, 2, 7, 8])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("shape", [(16, 8), (203, 72), (5128, 264), (264, 4160), (40000, 128)])
def test_few_rows(shape, group_size, rows):
    """One, two or four panels a warp, one block or two an output tile."""
    case = replace(BASE, hidden=shape[0], intermediate=shape[1], group_size=group_size, bias=shape[0] % 16 == 8)
    m, spec, w = build_linear(case)
    x = inputs(rows, spec.in_features, "bf16")
    assert cuda.plan(cuda.linear_problem(spec, "bf16", rows), cuda.H200).path == 0
    assert_close(launch(spec, w, x), x, m, "bf16")


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [3, 33, 100, 200])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, rows, dtype):
    m, spec, w = build_linear(of_format(name, replace(BASE, hidden=456, intermediate=1352, bias=True)))
    x = inputs(rows, spec.in_features, dtype)
    assert_close(launch(spec, w, x), x, m, dtype)


def build_floats(kind: str, n: int, k: int):
    rng = np.random.default_rng(n)
    codes = torch.from_numpy(rng.normal(0, k**-0.5, (n, k))).to(TORCH[kind]).view(torch.uint16).numpy()
    bias = rng.normal(size=n).astype(np.float32) if n % 16 else None
    m = QuantizedMatrix(kind=kind, codes=codes, scales=np.ones((n, 1), np.float32), group_size=-1, bias=bias)
    spec = linear_spec(k, n, marlin.describe_down(m, "none"))
    row = np.zeros(marlin.row_bytes(spec.moe, "w2"), np.uint8)
    marlin.pack_down(m, spec.moe, row)
    return m, spec, row[None]


@pytest.mark.parametrize("device", [cuda.H200, SM89])
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 64, 65, 300, 4096])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_plans_of_floats(kind, rows, device):
    _, spec, _ = build_floats(kind, 200, 264)
    p = cuda.linear_problem(spec, kind, rows)
    plan = cuda.plan(p, device)
    cuda.check_plan(p, plan)
    assert cuda.PATHS[plan.path] == ("decode" if rows <= 8 else "dense" if device is cuda.H200 else "stream")
    assert plan.w2.shared_bytes + 1024 <= device.shared_bytes
    assert plan.workspace_bytes == 0


@gpu
@pytest.mark.parametrize("device", [None, SM89, cuda.Device(80, 132, 166912)])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 17, 33, 64, 100, 200, 300, 1025])
@pytest.mark.parametrize("shape", [(8, 16), (203, 72), (264, 4160), (2880, 1352)])
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_floats(kind, shape, rows, device):
    """Weights as they are: y is rounded once, and f32 sums, which tensor cores cut, add little."""
    m, spec, w = build_floats(kind, *shape)
    x = inputs(rows, spec.in_features, kind)
    y = launch(spec, w, x, device and cuda.plan(cuda.linear_problem(spec, kind, rows), device))
    x = x.double().numpy()
    want = reference.linear(x.astype(np.float32), m, "none")
    terms = np.abs(x) @ np.abs(m.dequantize()).T
    error = np.abs(y.double().cpu().numpy() - want)
    assert (error <= UNIT[kind] * np.abs(want) + shape[1] * 2.0**-23 * terms + 2.0**-24).all()


@gpu
@pytest.mark.parametrize("rows", [20, 100, 300])
def test_what_is_not_finite_stays_in_its_row(rows):
    m, spec, w = build_linear(replace(BASE, hidden=264, intermediate=392, group_size=128, bias=True))
    x = inputs(rows, spec.in_features, "bf16")
    x[2, 7], x[4, 0], x[rows - 1, 391] = float("nan"), float("inf"), float("-inf")
    y = launch(spec, w, x)
    bad = [2, 4, rows - 1]
    assert not y[bad].isfinite().any()
    keep = np.setdiff1d(np.arange(rows), bad)
    assert_close(y[keep], x[keep], m, "bf16")


@gpu
@pytest.mark.parametrize("rows", [40, 120, 300])
def test_results_do_not_depend_on_a_rows_place(rows):
    _, spec, w = build_linear(replace(BASE, hidden=520, intermediate=1032, group_size=128))
    x, order = inputs(rows, spec.in_features, "f16"), torch.from_numpy(np.random.default_rng(3).permutation(rows))
    assert torch.equal(launch(spec, w, x)[order.cuda()], launch(spec, w, x[order]))


@gpu
@pytest.mark.parametrize("rows", [16, 300])
def test_a_graph_replays_the_same_bytes(rows):
    """The tensor map of x is a parameter of the launch: a graph keeps it, and reads what x holds then."""
    _, spec, w = build_linear(replace(BASE, hidden=520, intermediate=1032, group_size=128))
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    p = cuda.linear_problem(spec, "bf16", rows)
    plan = cuda.plan(p, linear.device)
    x, other = (inputs(rows, spec.in_features, "bf16", seed).cuda() for seed in (1, 2))
    wants = [launch(spec, w, v.cpu()) for v in (x, other)]
    y, workspace = torch.empty_like(wants[0]), torch.empty(1, dtype=torch.uint8, device="cuda")
    linear.launch(p, plan, x, y, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear.launch(p, plan, x, y, workspace)
    for value, want in zip((x.clone(), other), wants, strict=True):
        x.copy_(value)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)
