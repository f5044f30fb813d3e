"""Layers of every format in every path of the CUDA kernels, against reference.py; skipped where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, UNIT, gpu
from support.cuda.formats import FLOATS, FORMATS
from support.cuda.layers import BASE, CASES, FORMAT_SHAPES, FP8_CASES, ONE, SM89, TILES, build, of_format, run
from support.operators.cases import Case

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS


def check(case: Case, tokens: int, dtype: str, few: bool = False, **options) -> None:
    """few: so few values decide about a token that their roundings do not average."""
    got, want = run(case, tokens, dtype, **options)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error < (4 if few else 2) * UNIT[dtype], f"relative error {error:.2e}"
    # One token alone must not hide behind the others.
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    if few:  # sums of which little is left have large relative errors
        assert np.quantile(rows, 0.9) < 8 * UNIT[dtype]
        return
    # On wgmma a group of a format with minima has one more rounding in each product, of what its 32 columns share
    # (docs/lab/cuda-kernels.md): such errors add up, as the error of h does where columns share an offset
    # (test_expert_cache.near). So a token's error is that of three such roundings and not of one.
    minima = {case.weights[0], (case.down_weights or [case.weights])[0][0]} & {"q4_k", "q5_k"}
    most = 4 * 3**0.5 if minima else 4
    assert rows.max() < most * UNIT[dtype], f"token {rows.argmax()}: relative error {rows.max():.2e}"


SIZES = [1, 2, 7, 8, 9, 33, 130]


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_layer(name, tokens, dtype):
    check(CASES[name], tokens, dtype)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 8, 13, 30, 70, 200, 600])
@pytest.mark.parametrize("shape", FORMAT_SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_format(name, shape, tokens, dtype):
    check(of_format(name, FORMAT_SHAPES[shape]), tokens, dtype)


FLOAT_SHAPES = FORMAT_SHAPES | {
    name: CASES[name] for name in ("base", "gpt-oss", "small-k", "slice", "many-experts", "few-experts", "wide")
}


@gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [*SIZES, 600])
@pytest.mark.parametrize("shape", FLOAT_SHAPES)
def test_floats(shape, tokens, dtype):
    check(of_format(dtype, FLOAT_SHAPES[shape]), tokens, dtype)


@gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 8, 33, 300])
def test_floats_beside_codes(tokens, dtype):
    """Of one projection alone."""
    check(replace(of_format(dtype, BASE), down_weights=FORMATS["mxfp4"]), tokens, dtype)
    check(replace(of_format("mxfp4", BASE), down_weights=FLOATS[dtype]), tokens, dtype)


@gpu
@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_every_size(name, tokens):
    """A row's scales differ by 2^20 (nvfp4: all codes), some are zero; tokens differ by 2^40.

    relu2 is twice as wrong as its input, relatively, not more as others are.
    Few large scales decide about a token, so that their roundings do not average.
    """
    case = of_format(name, replace(BASE, hidden=512, intermediate=256))
    relu = replace(case, gated=False, activation="relu2")

    def wild(m, rng):
        s = m.scales
        if s.dtype.names:
            s = s.copy()
            for factor in ("d", "d_min")[: len(s.dtype.names) // 2]:
                s[factor] *= (2.0 ** rng.integers(-4, 1, s.shape)).astype(np.float16)
                s[factor][rng.random(s.shape) < 0.1] = 0
        elif name == "nvfp4":
            s = rng.integers(0, 0x7F, s.shape, dtype=np.uint8).view(s.dtype)
        elif s.dtype.itemsize == 1:
            s = (s.view(np.uint8) - rng.integers(0, 20, s.shape, dtype=np.uint8)).view(s.dtype)
        else:
            least = -4 if s.dtype == np.float16 else -20
            s = (s.astype(np.float64) * 2.0 ** rng.integers(least, 1, s.shape)).astype(s.dtype)
            s[rng.random(s.shape) < 0.1] = 0
        return replace(m, scales=s, global_scale=m.global_scale and m.global_scale / 128)

    def tokens_of_every_size(x):
        x *= 2.0 ** torch.randint(-20, 20, (len(x), 1), generator=torch.Generator().manual_seed(0))

    _, experts, *_ = build(case)
    rng = np.random.default_rng(7)
    experts = [Expert(*(wild(m, rng) for m in (e.gate, e.up, e.down))) for e in experts]
    for dtype in ("bf16", "f16"):
        check(case, tokens, dtype, experts=experts, few=True)
    experts = [replace(e, gate=None) for e in experts]
    check(relu, tokens, "bf16", experts=experts, mutate=tokens_of_every_size, few=True)


@gpu
@pytest.mark.parametrize("tokens", [512, 1100])
@pytest.mark.parametrize("name", ["g128", "gpt-oss", "odd-sizes", "slice", "base", "ungated", "ungated-gelu"])
def test_prefill(name, tokens):
    check(CASES[name], tokens, "bf16")
    check(CASES[name], tokens, "f16")


def formats_of(*kinds: str) -> dict[str, Case]:
    """Formats whose weights are of these kinds, in two shapes."""
    return {
        f"{name}-{shape}": of_format(name, FORMAT_SHAPES[shape])
        for name, (weights, *_) in FORMATS.items()
        for shape in ("odd", "split-k")
        if weights[0] in kinds
    }


OF_512_ROWS = {name: CASES[name] for name in ("base", "g128", "g64", "channel", "odd-sizes", "split-k")}


OF_512_ROWS |= formats_of("int4", "mxfp4", "nvfp4", "q4_k")


@gpu
@pytest.mark.parametrize("tokens", [40, 70])
@pytest.mark.parametrize("name", OF_512_ROWS)
@pytest.mark.parametrize("both", [False, True])
def test_blocks_of_512_rows(both, name, tokens):
    """Where the GPU is small small problems take them: both products or one, whose list of tiles is then its own."""
    case, device = OF_512_ROWS[name], cuda.query()
    few = tokens * case.top_k / case.experts <= 20
    device = cuda.Device(device.sm, 1, device.shared_bytes)
    if both:
        odd = case.hidden % 16 > 0
        case = replace(
            case, hidden=488 if odd else 512, intermediate=234 if odd else max(case.intermediate & ~255, 256)
        )
    if device.sm == 90:
        plan = cuda.plan(cuda.problem(build(case)[0], "bf16", tokens, case.top_k, case.experts), device)
        wide = [gemm.panels == 32 for gemm in (plan.w13, plan.w2)]
        assert sum(wide) == (1 + both if few else 0)
    for dtype in ("bf16", "f16"):
        check(case, tokens, dtype, device=device)


SPANS = formats_of("mxfp4") | {
    name: of_format("mxfp4", CASES[name]) for name in ("gpt-oss", "odd-sizes", "small-k", "many-experts", "slice")
}


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 5, 8, 13, 20])
@pytest.mark.parametrize("name", SPANS)
def test_spans_of_panels(name, tokens, dtype):
    """Blocks with many panels, whose units of K the warps share, as the GPU is small; down may have too few."""
    case, device = SPANS[name], cuda.query()
    for multiprocessors in (1, 3):
        device = cuda.Device(device.sm, multiprocessors, device.shared_bytes)
        if device.sm == 90 and multiprocessors == 1 and tokens * case.top_k <= 5 * (case.total_experts or case.experts):
            plan = cuda.plan(cuda.problem(build(case)[0], dtype, tokens, case.top_k, case.experts), device)
            assert plan.w13.warps_k == 0
        check(case, tokens, dtype, device=device)


RINGS = formats_of("int8", "fp8_e4m3")


@gpu
@pytest.mark.parametrize("tokens", [70, 600])
@pytest.mark.parametrize("name", RINGS)
def test_rings_from_work_to_work(name, tokens):
    """A block with more than one unit of work, of 8 bits: here because the GPU is small."""
    device = cuda.query()
    check(RINGS[name], tokens, "bf16", device=cuda.Device(device.sm, 1, device.shared_bytes))


MIXED = {
    "int4-mxfp4": replace(CASES["g128"], down_weights=FORMATS["mxfp4"]),
    "nvfp4-fp8": replace(of_format("nvfp4", BASE), down_weights=FORMATS["fp8"]),
    "q4_k-q6_k": replace(of_format("q4_k", BASE), down_weights=FORMATS["q6_k"]),  # as in Q4_K_M files
    "q5_k-int8": replace(of_format("q5_k", BASE), down_weights=FORMATS["int8-f16"]),
    "mxfp4-int8": replace(of_format("mxfp4", BASE), down_weights=FORMATS["int8"]),
    "int8-int4": replace(of_format("int8", BASE), down_weights=(BASE.weights, 64, 1)),
    "codes-int4": replace(of_format("fp8-bf16", BASE), activation_format="fp8_token", down_format="none",
                          down_weights=(BASE.weights, 32, 1)),
}  # fmt: skip


@gpu
@pytest.mark.parametrize("tokens", [3, 12, 40, 300])
@pytest.mark.parametrize("name", MIXED)
def test_weights_of_two_formats(name, tokens):
    for dtype in ("bf16", "f16"):
        check(MIXED[name], tokens, dtype)


@gpu
@pytest.mark.parametrize("tokens", [3, 12, 40, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_two_orders(name, tokens):
    """Gate's and up's columns in orders of their own: FORMAT.md 3.4."""
    if FORMATS[name][2] != 1:
        pytest.skip("rows that share scales are not reordered for down")
    check(of_format(name, replace(BASE, hidden=360, intermediate=90, act_order="split", bias=True)), tokens, "bf16")


@gpu
@pytest.mark.parametrize("tokens", [3, 40, 600])
@pytest.mark.parametrize("act_order", ["shared", "split"])
@pytest.mark.parametrize("bad", [-1, 2**30, 5], ids=["negative", "past the end", "repeated"])
def test_bad_orders_are_named_and_read_nowhere_else(bad, act_order, tokens):
    case = replace(BASE, act_order=act_order, group_size=64)
    spec, _, w13, w2 = build(case)
    layout = LAYOUTS["marlin"]
    orders = w13[3, layout.row(spec, "w13").part("perm")].view(np.int32).reshape(spec.w13.perm, -1)
    feature = int(orders[-1, 7]) if bad == 5 else bad
    orders[-1, 5] = feature
    bad_rows = torch.from_numpy(w13).cuda()
    p = cuda.problem(spec, "bf16", tokens, case.top_k, case.experts)
    how = "twice" if bad == 5 else "in it"
    with pytest.raises(
        ValueError, match=f"w13 of expert 3 has an act-order with feature {feature} {how}, expected each of 256"
    ):
        cuda.check_order(p, bad_rows)
    hidden, ids, weights = (torch.from_numpy(x).cuda() for x in case.tokens(tokens))
    layer = cuda.CudaMoE(spec, bad_rows, torch.from_numpy(w2).cuda())
    layer(hidden.bfloat16(), ids, weights)
    torch.cuda.synchronize()
    good = torch.from_numpy(build(case)[2]).cuda()
    cuda.check_order(p, good)


@gpu
@pytest.mark.parametrize("tokens", [3, 40])
def test_foreign_and_invalid_ids_contribute_zero(tokens):
    rng = np.random.default_rng(5)
    for ids in (
        rng.integers(-1, 8, (tokens, 2)),
        np.full((tokens, 2), -1),
        np.full((tokens, 2), 2**31 - 1),
        np.full((tokens, 2), -(2**31)),
    ):
        check(BASE, tokens, "bf16", ids=ids.astype(np.int64), id_type=np.int32)
    check(BASE, tokens, "bf16", ids=np.full((tokens, 2), 2**40 + 1, np.int64))
    nvfp4 = replace(of_format("nvfp4", BASE), activation_format="nvfp4")
    check(nvfp4, tokens, "bf16", ids=np.full((tokens, 2), -1, np.int64))


@gpu
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_repeated_and_crowded_ids(tokens):
    check(BASE, tokens, "bf16", ids=np.full((tokens, 2), 3, np.int64))
    check(replace(BASE, top_k=7), tokens, "f16", ids=np.tile(np.array([3, 3, 1, 3, 0, 1, 7]), (tokens, 1)))


@gpu
@pytest.mark.parametrize("tokens", [127, 129, 143, 144, 145, 288, 289])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_full_tiles_and_one_more(tokens, dtype):
    for case in (BASE, CASES["odd-sizes"]):
        check(replace(case, experts=3, top_k=1), tokens, dtype, ids=np.full((tokens, 1), 2))


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("shape", "tokens"), TILES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_tile(name, shape, tokens, dtype):
    """Blocks take several units of work each."""
    check(of_format(name, FORMAT_SHAPES[shape]), tokens, dtype, device=ONE)


@gpu
@pytest.mark.parametrize("tile", [64, 80, 96, 144])
def test_tiles_full_by_one(tile):
    """An expert's tokens fill tiles, or have one more or less; the mean of four experts chooses the tile."""
    case = replace(FORMAT_SHAPES["split-k"], top_k=1)
    mean = {64: 48, 80: 60, 96: 165, 144: 100}[tile]
    problem = cuda.problem(build(case)[0], "bf16", 4 * mean, 1, case.experts)
    assert cuda.plan(problem, ONE).w13.n_tiles == tile // 8
    for count in (tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1):
        ids = np.where(np.arange(4 * mean)[:, None] < count, 2, np.arange(4 * mean)[:, None] % 2)
        check(case, 4 * mean, "bf16", ids=ids, device=ONE)


@gpu
@pytest.mark.parametrize("tokens", [5, 40, 600])
def test_non_finite_token_stays_alone(tokens):
    def spoil(x):
        x[2, 7] = float("nan")
        x[4, 0] = float("inf")

    got, want = run(BASE, tokens, "bf16", mutate=spoil)
    keep = np.ones(tokens, bool)
    keep[[2, 4]] = False
    assert np.isnan(got[2]).all()
    assert not np.isfinite(got[4]).any()
    assert np.linalg.norm(got[keep] - want[keep]) / np.linalg.norm(want[keep]) < 2 * UNIT["bf16"]


PLACES = {**CASES, **{name: of_format(name, FORMAT_SHAPES["odd"]) for name in FORMATS}, **FP8_CASES}


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("tokens", "device"), [(13, None), (40, None), (200, None), (40, SM89), (200, SM89)])
@pytest.mark.parametrize("name", PLACES)
def test_results_do_not_depend_on_a_tokens_place(name, tokens, device, dtype):
    """moe_route gives an expert's pairs places in whatever order; here the tokens come in other orders. Not in decode,
    which adds up the experts of all tokens in one order."""
    case = PLACES[name]
    spec, _, w13, w2 = build(case)
    layer = cuda.CudaMoE(spec, torch.from_numpy(w13).cuda(), torch.from_numpy(w2).cuda())
    layer.device = device or layer.device
    hidden, ids, weights = (torch.from_numpy(a).cuda() for a in case.tokens(tokens))
    hidden = hidden.to(TORCH[dtype])
    want = layer(hidden, ids, weights).view(torch.int16)
    for seed in range(4):
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).cuda()
        got = layer(hidden[order], ids[order], weights[order]).view(torch.int16)
        assert torch.equal(got, want[order]), f"{(got != want[order]).sum()} values differ"


@gpu
def test_no_tokens():
    got, _ = run(BASE, 0, "bf16")
    assert got.shape == (0, BASE.hidden)


@gpu
@pytest.mark.parametrize("activation_format", ["none", "nvfp4"])
@pytest.mark.parametrize("tokens", [2, 50, 700])
def test_graph_replay_follows_new_inputs(tokens, activation_format):
    case = replace(BASE, activation_format=activation_format)
    spec, _, w13, w2 = build(case)
    layer = cuda.CudaMoE(spec, torch.from_numpy(w13).cuda(), torch.from_numpy(w2).cuda())
    first, second = ([torch.from_numpy(x).cuda() for x in case.tokens(tokens, seed)] for seed in (1, 2))
    x, ids, weights = first[0].bfloat16(), first[1], first[2]
    prepared = layer.prepare(x, ids)
    out = torch.empty_like(x)
    workspace = torch.empty(prepared[1].workspace_bytes, dtype=torch.uint8, device="cuda")
    layer.launch(prepared, x, ids, weights, out, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.launch(prepared, x, ids, weights, out, workspace)
    for target, source in zip((x, ids, weights), second, strict=True):
        target.copy_(source)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, layer(x, ids, weights))
