"""CUDA kernels against reference.py, through the C ABI. Plans run everywhere; launches are skipped where no GPU is."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from cases import INT4, ROUTERS, Case, assert_routed
from specs import linear_spec, moe_spec, projection

from quantmoe.custom_ops import cuda, reference
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join, marlin
from quantmoe.custom_ops.op import Projection, enum
from quantmoe.custom_ops.reference import FLOAT_FORMATS

torch = pytest.importorskip("torch")
try:
    cuda.library()
except FileNotFoundError:
    pytest.skip("no CUDA library was built (QUANTMOE_CUDA)", allow_module_level=True)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

# Roundings to 16 bits: the activations between the GEMMs and the output, and in the wgmma path the weights and the
# experts' products. Each is uniform in half an ulp, at most u / sqrt(3) of the norm; f32 sums and the fast exponential
# are far below.
UNIT = {"f16": 2.0**-11, "bf16": 2.0**-8}  # half an ulp
SM89, SM120 = (cuda.Device(sm, 132, 102400) for sm in (89, 120))  # of an H200's size
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16}


def build(case: Case, experts: list[Expert] | None = None):
    """(spec, experts, w13, w2) of a case in layout marlin."""
    rng = np.random.default_rng(case.seed)
    experts = experts or [one_input(case.expert(rng)) for _ in range(case.experts)]
    layout = LAYOUTS["marlin"]
    w13, w2 = experts_describe(experts, case)
    spec = moe_spec(
        num_experts=case.total_experts or case.experts,
        expert_offset=case.offset,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        w13=w13,
        w2=w2,
        activation=case.activation,
        gated=int(case.gated),
        swiglu_alpha=1.702,
        swiglu_limit=7.0 if case.activation == "swiglu_oai" else 1.5,
        apply_router_weight_on_input=int(case.on_input),
    )
    rows = [np.zeros((case.experts, layout.row_bytes(spec, p)), np.uint8) for p in ("w13", "w2")]
    for i, expert in enumerate(experts):
        layout.pack(expert, spec, rows[0][i], rows[1][i])
    return spec, experts, *rows


def one_input(e: Expert) -> Expert:
    """Gate and up with the same factors on their input, as in checkpoints."""
    same = {"input_scale": e.up.input_scale, "pre_scale": e.up.pre_scale}
    return replace(e, gate=e.gate and replace(e.gate, **same))


def experts_describe(experts, case) -> tuple[Projection, Projection]:
    formats = [case.activation_format, case.down_format or case.activation_format]
    if case.act_order != "none" and FLOAT_FORMATS.get(formats[1], (0, None, 0))[1]:
        formats[1] = "fp8_token"  # layout marlin forgets the order of the features of h
    describe = LAYOUTS["marlin"].describe
    return reduce(join, (describe(e, *formats) for e in experts))


def run(case: Case, tokens: int, dtype: str, *, ids=None, id_type=np.int64, mutate=None, experts=None, device=None):
    spec, experts, w13, w2 = build(case, experts)
    hidden, topk_ids, weights = case.tokens(tokens)
    if ids is not None:
        topk_ids = ids
    hidden = torch.from_numpy(hidden).to(TORCH[dtype])
    if mutate is not None:
        mutate(hidden)
    layer = cuda.CudaMoE(spec, torch.from_numpy(w13).cuda(), torch.from_numpy(w2).cuda())
    layer.device = device or layer.device
    args = (hidden.cuda(), torch.from_numpy(topk_ids.astype(id_type)).cuda(), torch.from_numpy(weights).cuda())
    got = layer(*args)
    again = layer(*args)
    torch.cuda.synchronize()
    assert torch.equal(got.view(torch.int16), again.view(torch.int16)), "two runs differ"
    want_ids = np.where((topk_ids >= 0) & (topk_ids < spec.num_experts), topk_ids, -1)
    with np.errstate(invalid="ignore"):
        want = reference.quant_moe(spec, experts, hidden.float().numpy(), want_ids, weights)
    return got.float().cpu().numpy().astype(np.float64), want


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
    assert rows.max() < 4 * UNIT[dtype], f"token {rows.argmax()}: relative error {rows.max():.2e}"


BASE = Case(hidden=256, intermediate=192, experts=8, top_k=2, group_size=32, activation_format="none")
SIZES = [1, 2, 7, 8, 9, 33, 130]
CASES = {
    "base": BASE,
    "g64": replace(BASE, group_size=64),
    "g128": replace(BASE, group_size=128, hidden=512, intermediate=384),
    "channel": replace(BASE, group_size=-1),
    "f16-scales": replace(BASE, weights=("int4", "f16", False)),
    "odd-sizes": replace(BASE, hidden=360, intermediate=90, group_size=128),
    "gpt-oss": replace(BASE, hidden=360, intermediate=360, bias=True, activation="swiglu_oai", group_size=32),
    "bias": replace(BASE, bias=True),
    "ungated": replace(BASE, gated=False, activation="relu2"),
    "gelu": replace(BASE, activation="gelu"),
    "gelu_tanh": replace(BASE, activation="gelu_tanh"),
    "swiglu_step": replace(BASE, activation="swiglu_step"),
    "on-input": replace(BASE, on_input=True),
    "act-order": replace(BASE, act_order="shared", group_size=64),
    "two-orders": replace(BASE, act_order="split", group_size=64),
    "two-orders-odd": replace(BASE, act_order="split", group_size=128, hidden=360, intermediate=90, bias=True),
    "slice": replace(BASE, offset=8, total_experts=24, top_k=6),
    "many-experts": replace(BASE, experts=96, top_k=8, hidden=128, intermediate=64),
    "few-experts": replace(BASE, experts=2, top_k=2),
    "small-k": replace(BASE, hidden=64, intermediate=8),
    "wide": replace(BASE, hidden=2048, intermediate=256, group_size=128, experts=4),
    # wgmma: down's K of 35 units in two parts, the second from the middle of a scale block
    "split-k": replace(BASE, intermediate=2240, group_size=128, experts=4, bias=True),
}
# Formats other than symmetric int4: (kind, scale type, zero points), group_size, block_n.
FORMATS = {
    "int4-zero": (("int4", "bf16", True), 32, 1),
    "int4-zero-f16": (("int4", "f16", True), 128, 1),
    "int4-zero-channel": (("int4", "bf16", True), -1, 1),
    "int8": (("int8", "bf16", False), -1, 1),
    "int8-f16": (("int8", "f16", False), 32, 1),
    "int8-f32": (("int8", "f32", False), 128, 1),
    "int8-zero": (("int8", "bf16", True), 32, 1),
    "int8-zero-f16": (("int8", "f16", True), 128, 1),
    "int8-zero-f32": (("int8", "f32", True), -1, 1),
    "fp8": (("fp8_e4m3", "f32", False), 128, 128),
    "fp8-bf16": (("fp8_e4m3", "bf16", False), -1, 1),
    "fp8-f16": (("fp8_e4m3", "f16", False), 32, 1),
    "fp8-e8m0": (("fp8_e4m3", "e8m0", False), 32, 1),
    "mxfp4": (("mxfp4", "e8m0", False), 32, 1),
    "nvfp4": (("nvfp4", "e4m3", False), 16, 1),
}
# bf16 scales and zero points, odd sizes, a bias; two parts of K; sizes of many panels.
FORMAT_SHAPES = {
    "odd": replace(BASE, hidden=360, intermediate=90, bias=True),
    "split-k": replace(BASE, intermediate=2240, experts=4, activation="swiglu_oai"),
    "ungated": replace(BASE, hidden=512, intermediate=200, gated=False, activation="relu2", on_input=True),
}


def of_format(name: str, case: Case) -> Case:
    weights, group_size, block_n = FORMATS[name]
    return replace(case, weights=weights, group_size=group_size, block_n=block_n)


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


# Weights whose products with their scales are exact in 16 bits (int4: as powers_of_two makes it), so that h is the
# reference's but for f32 sums in every path: one that h's other roundings reach would have other codes.
EXACT = {
    "int8_token": "int4-zero",
    "int8_token_asym": "int4-zero",
    "fp8_token": "fp8-e8m0",
    "fp8_tensor": "fp8-e8m0",
    "fp8_group128": "fp8-e8m0",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp4",
    "mxfp4": "mxfp4",
}
ROUNDED = {
    "odd": (None, FORMAT_SHAPES["odd"]),
    "split-k": (None, replace(FORMAT_SHAPES["split-k"], pre_scale=True)),
    "ungated": (None, FORMAT_SHAPES["ungated"]),
    "act-order": ("int4-zero", replace(BASE, act_order="shared", pre_scale=True, offset=2, total_experts=12)),
    "two-orders": ("int4-zero", replace(BASE, act_order="split", pre_scale=True, offset=2, total_experts=12)),
    "int4": ("int4", replace(BASE, hidden=520, intermediate=264, top_k=3)),
}


def powers_of_two(e: Expert) -> Expert:
    def make(m):
        if m is None or m.kind != "int4":
            return m
        return replace(m, scales=(2.0 ** np.floor(np.log2(m.scales.astype(np.float64)))).astype(m.scales.dtype))

    return one_input(Expert(make(e.gate), make(e.up), make(e.down)))


def rounded(activation_format: str, shape: str) -> tuple[Case, list[Expert]]:
    weights, case = ROUNDED[shape]
    if weights != "int4":
        case = of_format(weights or EXACT[activation_format], case)
    case = replace(case, activation_format=activation_format)
    rng = np.random.default_rng(case.seed)
    return case, [powers_of_two(case.expert(rng)) for _ in range(case.experts)]


def rounding_bound(activation_format: str, dtype: str, d: float = 2.0**-18) -> tuple[float, float]:
    """Of the error's norm, against rounding_reference; and what one token's largest value of h can add.

    Besides the 16-bit roundings some codes of h are their neighbours, relatively a step D of the format away: f32
    sums, wrong by d at most, put h on the other side of a middle, which happens to d / D of them. The same of
    scales in e4m3 or powers of two, where a group's roundings, D^2 / 12 each, are then others. With few tokens that is
    no mean: a value with half the norm of its token's h may be the one.
    """
    step = 1 / 2 if activation_format in ("nvfp4", "mxfp4") else 1 / 8
    return float(np.sqrt((2 * UNIT[dtype]) ** 2 + 2 * d * step + 16 * d * 2 * step**2 / 12)), step / 2


def half_of(dtype: str):
    return lambda x: torch.from_numpy(x).float().to(TORCH[dtype]).double().numpy()


def codes_of_halves(monkeypatch, dtype: str) -> None:
    """The reference with h in 16 bits before it is rounded to its format."""
    exact, half = reference.activate, half_of(dtype)
    monkeypatch.setattr(reference, "activate", lambda *a: half(exact(*a)))


def rounding_reference(monkeypatch, case: Case, dtype: str) -> None:
    """The reference with what the kernels have in 16 bits: h before it is rounded to the format, and products with a
    step that is no power of two. h would else have other codes wherever these put it on the other side of a middle.
    """
    exact, half = reference.quantize_activations, half_of(dtype)
    in_values = case.weights[0] == "int4" and not case.weights[2]  # a stored scale is

    def quantize(x, activation_format, stored=None):
        q = exact(x, activation_format, stored)
        stored_outside = activation_format in ("fp8_tensor", "nvfp4") and not in_values
        return q if stored_outside or activation_format.startswith("mx") else half(q)

    codes_of_halves(monkeypatch, dtype)
    monkeypatch.setattr(reference, "quantize_activations", quantize)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 13, 70, 600])
@pytest.mark.parametrize("shape", ROUNDED)
@pytest.mark.parametrize("activation_format", EXACT)
def test_rounded_activations(activation_format, shape, tokens, dtype, monkeypatch):
    check_rounded(activation_format, shape, tokens, dtype, monkeypatch)


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [1, 7, 13, 70, 600])
@pytest.mark.parametrize("shape", ["odd", "split-k", "ungated"])
def test_packed_activations(shape, tokens, dtype, monkeypatch):
    """sm_120a's plan on sm_90, whose kernels have the block-scaled instruction from shuffles (ptx.cuh)."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("test_rounded_activations on sm_120, nothing elsewhere")
    check_rounded("nvfp4", shape, tokens, dtype, monkeypatch, SM120)


def check_rounded(activation_format, shape, tokens, dtype, monkeypatch, device=None):
    case, experts = rounded(activation_format, shape)
    rounding_reference(monkeypatch, case, dtype)
    got, want = run(case, tokens, dtype, experts=experts, device=device)
    assert_rounded(got, want, rounding_bound(activation_format, dtype))


def assert_rounded(got: np.ndarray, want: np.ndarray, bounds: tuple[float, float]) -> None:
    bound, neighbour = bounds
    assert np.isfinite(got).all()
    largest = np.linalg.norm(want, axis=1).max(initial=0)
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want) + neighbour * largest
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert rows.max(initial=0) < 4 * bound + neighbour, f"token {rows.argmax()}: relative error {rows.max():.2e}"


@gpu
@pytest.mark.parametrize("tokens", [5, 40, 600])
@pytest.mark.parametrize("activation_format", EXACT)
def test_non_finite_token_stays_alone_when_rounded(activation_format, tokens, monkeypatch):
    def spoil(x):
        x[2, 7] = float("nan")
        x[4, 0] = -float("inf")

    case, experts = rounded(activation_format, "odd")
    rounding_reference(monkeypatch, case, "bf16")
    got, want = run(case, tokens, "bf16", mutate=spoil, experts=experts)
    keep = np.ones(tokens, bool)
    keep[[2, 4]] = False
    assert np.isnan(got[~keep]).all()
    bound, _ = rounding_bound(activation_format, "bf16")
    assert np.linalg.norm(got[keep] - want[keep]) <= bound * np.linalg.norm(want[keep])


@gpu
@pytest.mark.parametrize("tokens", [3, 40, 300])
@pytest.mark.parametrize("name", FORMATS)
def test_scales_of_every_size(name, tokens):
    """A row's scales differ by 2^20 (nvfp4: all codes), some are zero; tokens differ by 2^40.

    relu2 is twice as wrong as its input, relatively, not more as others are; but ungated layers take no wgmma.
    Few large scales decide about a token, so that their roundings do not average.
    """
    case = of_format(name, replace(BASE, hidden=512, intermediate=256))
    relu = replace(case, gated=False, activation="relu2")

    def wild(m, rng):
        s = m.scales
        if name == "nvfp4":
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
@pytest.mark.parametrize("name", ["g128", "gpt-oss", "odd-sizes", "slice", "base"])
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
OF_512_ROWS |= formats_of("int4", "mxfp4", "nvfp4")


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
            case, hidden=488 if odd else 512, intermediate=234 if odd else max(case.intermediate & ~128, 256)
        )
    if device.sm == 90:
        plan = cuda.plan(cuda.problem(build(case)[0], "bf16", tokens, case.top_k, case.experts), device)
        wide = [gemm.panels == 32 for gemm in (plan.w13, plan.w2)]
        assert sum(wide) == (1 + both if few else 0)
    for dtype in ("bf16", "f16"):
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
    orders = w13[3, layout._Parts(spec, "w13").slices["perm"]].view(np.int32).reshape(spec.w13.perm, -1)
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


# fp8 activations on wgmma. By token h is rounded to 16 bits before it is quantized (relative u / 2 on average),
# and the tensor cores keep 14 bits of a sum: such a change of d flips a code, by a spacing s of e4m3 (2^-3 to 2^-4), in
# d / s of the cases: sqrt(d s) of the norm, d = 2^-10 + 2^-12 for bf16. A token whose h is mostly one value may change
# by a spacing.
FLIPS = {"bf16": 2.0**-6, "f16": 2.0**-6.5}
FP8 = replace(BASE, hidden=512, intermediate=384, experts=4, weights=("fp8_e4m3", "f32", False), group_size=128,
              block_n=128, activation_format="fp8_group128")  # fmt: skip
FP8_CASES = {
    "blocks": FP8,
    "token": replace(FP8, activation_format="fp8_token", weights=("fp8_e4m3", "bf16", False), group_size=-1, block_n=1),
    "tensor": replace(FP8, activation_format="fp8_tensor", group_size=-1, block_n=1, on_input=True),
    "f16-256": replace(FP8, weights=("fp8_e4m3", "f16", False), group_size=256, block_n=1, bias=True),
    "odd": replace(FP8, hidden=360, intermediate=90, bias=True, activation="swiglu_oai", block_n=1),
    "odd-token": replace(FP8, hidden=328, intermediate=200, activation_format="fp8_token", on_input=True),
    "half-group": replace(FP8, hidden=64, intermediate=320, block_n=1),
    "split-k": replace(FP8, intermediate=2240, bias=True),
    "gelu-blocks": replace(FP8, activation="gelu", intermediate=392, bias=True),
    "big-blocks": replace(FP8, weights=("fp8_e4m3", "f16", False), group_size=256, block_n=256, intermediate=640),
    "slice": replace(FP8, offset=4, total_experts=12, top_k=6),
    "group-token": replace(FP8, down_format="fp8_token", on_input=True),
    "token-group": replace(FP8, activation_format="fp8_token", down_format="fp8_group128"),
    "group-tensor": replace(FP8, down_format="fp8_tensor"),
    "f16-row": replace(
        FP8, weights=("fp8_e4m3", "f16", False), activation_format="fp8_token", group_size=-1, block_n=1
    ),
    "block-n-64": replace(FP8, block_n=64),
}


def check_fp8(case: Case, tokens: int, dtype: str, keep=None, **options) -> None:
    got, want = run(case, tokens, dtype, **options)
    keep = np.ones(tokens, bool) if keep is None else keep
    assert np.isnan(got[~keep]).all()
    assert np.isfinite(got[keep]).all()
    got, want = got[keep], want[keep]
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < FLIPS[dtype], f"relative error {error:.2e}"
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert rows.max() < 2.0**-3, f"token {rows.argmax()}: relative error {rows.max():.2e}"
    assert np.quantile(rows, 0.9) < 2 * FLIPS[dtype]


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("tokens", [40, 95, 270, 600, 1100])
@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_activations(name, tokens, dtype):
    check_fp8(FP8_CASES[name], tokens, dtype)


@gpu
def test_fp8_activations_of_many_features():
    """More columns of h than a quantizing thread asks for at once."""
    check_fp8(replace(FP8_CASES["token"], hidden=256, intermediate=14336, experts=2), 40, "bf16")


PLACES = {**CASES, **{name: of_format(name, FORMAT_SHAPES["odd"]) for name in FORMATS}, **FP8_CASES}


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("tokens", "device"), [(13, None), (40, None), (200, None), (40, SM89), (200, SM89)])
@pytest.mark.parametrize("name", PLACES)
def test_results_do_not_depend_on_a_tokens_place(name, tokens, device, dtype):
    """MoeRoute gives an expert's pairs places in whatever order; here the tokens come in other orders. Not in decode,
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


# On mma.sync: the plans of the H200 for few tokens, and sm_89's, with tiles of 8, 16 and 32 tokens.
FEW = [(1, None), (3, None), (8, None), (13, None), (8, SM89), (9, SM89), (23, SM89), (64, SM89), (200, SM89)]


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("tokens", "device"), FEW)
@pytest.mark.parametrize("name", [*FP8_CASES, "ungated"])
def test_e4m3_products_of_few_tokens(name, tokens, device, dtype, monkeypatch):
    """Where the product is of f16 that e4m3 codes become (sm_90, sm_100) sums are f32, else of 14 bits."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):
        pytest.skip("no e4m3 products")
    case = FP8_CASES.get(name) or replace(FP8, gated=False, activation="relu2", intermediate=392, bias=True)
    codes_of_halves(monkeypatch, dtype)
    got, want = run(case, tokens, dtype, device=device)
    assert_rounded(got, want, rounding_bound("fp8", dtype, 2.0**-18 if capability[0] in (9, 10) else 2.0**-13))


@gpu
@pytest.mark.parametrize("device", [None, SM89])
@pytest.mark.parametrize("name", ["blocks", "token", "tensor"])
def test_e4m3_products_that_are_not_finite_stay_alone(name, device, monkeypatch):
    def spoil(x):
        x[2, 7], x[4, 0], x[7, 500] = float("nan"), float("inf"), -float("inf")
        x[5], x[6, 128:256] = 0, 0

    codes_of_halves(monkeypatch, "bf16")
    for tokens in (8, 13):
        keep = np.ones(tokens, bool)
        keep[[2, 4, 7]] = False
        got, want = run(FP8_CASES[name], tokens, "bf16", mutate=spoil, device=device)
        assert np.isnan(got[~keep]).all()
        assert not got[5].any()
        assert_rounded(got[keep], want[keep], rounding_bound("fp8", "bf16"))


@gpu
@pytest.mark.parametrize("rows", [1, 8, 9, 30, 64])
@pytest.mark.parametrize("device", [None, SM89])
@pytest.mark.parametrize("name", ["blocks", "token", "tensor", "odd-token", "f16-256"])
def test_e4m3_linear(name, device, rows):
    m, spec, w = build_linear(replace(FP8_CASES[name], hidden=1032))
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (rows, spec.in_features)).astype(np.float32)).half()
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    linear.device = device or linear.device
    got = linear(x.cuda()).double().cpu().numpy()
    want = reference.linear(x.float().numpy(), m, spec.w.activation_format)
    error, size = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
    assert (error <= 1.2 * UNIT["f16"] * size).all()


@gpu
@pytest.mark.parametrize("name", ["blocks", "odd-token"])
def test_fp8_activations_of_crowds_and_of_no_one(name):
    case = FP8_CASES[name]
    # Tiles of up to 64 tokens, and of more.
    for tokens in (32, 33, 57, 64, 65, 88, 96, 100, 128, 130):
        check_fp8(case, tokens, "bf16", ids=np.full((tokens, 2), 3))
    ids = np.random.default_rng(5).integers(-3, 6, (500, 2))
    check_fp8(case, 500, "bf16", ids=np.where(ids < 4, ids, 2**31 - 1), id_type=np.int32)
    got, _ = run(case, 200, "bf16", ids=np.full((200, 2), -1))
    assert not got.any()


@gpu
@pytest.mark.parametrize("name", ["blocks", "token", "tensor"])
def test_fp8_activations_that_are_not_finite_stay_alone(name):
    keep = np.ones(300, bool)
    keep[[2, 4, 299]] = False

    def spoil(x):
        x[2, 7], x[4, 0], x[299, 500] = float("nan"), float("inf"), -float("inf")
        x[5], x[6, 128:256] = 0, 0

    case = FP8_CASES[name]
    got, _ = run(case, 300, "bf16", mutate=spoil)
    assert not got[5].any()
    check_fp8(replace(case, bias=True), 300, "bf16", keep=keep, mutate=spoil)


@gpu
@pytest.mark.parametrize("name", ["blocks", "token", "f16-256"])
def test_fp8_activations_of_every_size(name):
    """Tokens differ by 2^24, groups of one by 2^12; a row's scales by 2^4, some are zero."""
    case = replace(FP8_CASES[name], bias=False)

    def sizes(x):
        x *= 2.0 ** torch.randint(-20, 4, (len(x), 1), generator=torch.Generator().manual_seed(0))
        x[:, 128:256] *= 2.0**-12

    def wild(m, rng):
        s = (m.scales.astype(np.float64) * 2.0 ** rng.integers(-4, 1, m.scales.shape)).astype(m.scales.dtype)
        s[rng.random(s.shape) < 0.1] = 0
        return replace(m, scales=s)

    _, experts, *_ = build(case)
    rng = np.random.default_rng(7)
    experts = [Expert(*(wild(m, rng) for m in (e.gate, e.up, e.down))) for e in experts]
    got, want = run(case, 400, "bf16", experts=experts, mutate=sizes)
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert np.quantile(rows, 0.9) < 4 * FLIPS["bf16"], rows


@gpu
def test_fp8_activations_beyond_f32_in_steps_are_the_largest_code():
    case = FP8_CASES["tensor"]
    _, experts, *_ = build(case)
    x = 2.0**30 * experts[0].up.input_scale
    far = [
        Expert(replace(e.gate, input_scale=x), replace(e.up, input_scale=x), replace(e.down, input_scale=2.0**-99))
        for e in experts
    ]
    got, want = run(case, 95, "bf16", experts=far, mutate=lambda x: x.mul_(2.0**30))
    # h is only its sign. That of a sum which is less than 2^-14 of its terms may differ: about 0.8 * 2^-14 of gate's
    # and of up's, and each is a change by 2.
    assert np.linalg.norm(got - want) < np.sqrt(4 * 1.6 * 2.0**-14) * np.linalg.norm(want)


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

    assert packed(codes, codes) == (1, 1)
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
    assert packed(codes, codes, gated=0, activation="relu2") == (int(sm >= 89),) * 2
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
@pytest.mark.parametrize("activation_format", enum("activation_format"))
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
    for gemm in ("w13", "w2"):
        assert bytes(getattr(plan, gemm)) == bytes(getattr(plain, gemm))


def spec_of(hidden, intermediate, experts, group_size=128, weights=INT4, **changes):
    kind, scale_type, zero_points = weights
    layout = {"layout": "marlin", "layout_version": LAYOUTS["marlin"].VERSION}
    w = projection(kind, group_size, scale_type, "none", **layout, zero_points=int(zero_points))
    return moe_spec(experts, hidden, intermediate, w, w, **changes)


@pytest.mark.parametrize(
    "shape", [(2048, 768, 128, 8), (4096, 14336, 8, 2), (2880, 2880, 128, 4), (7168, 256, 256, 8), (64, 8, 1, 1)]
)
@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 64, 512, 4096, 65536])
@pytest.mark.parametrize(
    "device", [cuda.Device(80, 108, 167936), cuda.Device(89, 128, 102400), cuda.H200, cuda.Device(120, 188, 102400)]
)
@pytest.mark.parametrize(("kind", "group_size"), [(INT4, 128), *((w, g) for w, g, _ in FORMATS.values())])
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
    offsets = [plan.hidden, plan.partial, plan.tiles, plan.sorted_pairs, plan.workspace_bytes]
    assert all(o % 256 == 0 for o in offsets)
    assert plan.workspace_bytes >= tokens * top_k * intermediate * 2
    assert bytes(cuda.plan(p, device)) == bytes(plan)
    cuda.check_plan(p, plan)


@pytest.mark.parametrize("gemm", ["w13", "w2"])
@pytest.mark.parametrize(
    "change", [{"panels": 3}, {"panels": 8}, {"n_tiles": 5}, {"n_tiles": 0}, {"stages": 4}, {"packed": 1}]
)
@pytest.mark.parametrize("tokens", [4, 64, 4096])
@pytest.mark.parametrize(("kind", "group_size"), [(INT4, 128), (INT4, 32), *((w, g) for w, g, _ in FORMATS.values())])
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
    err, none = cuda.ctypes.create_string_buffer(cuda.ERROR_SIZE), cuda._Tensors()
    ref = cuda.ctypes.byref
    assert cuda.library().qm_cuda_launch(ref(p), ref(plan), ref(none), None, err)
    assert b"not compiled" in err.value


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "f32"}, "float16"),
        ({"device": cuda.Device(75, 40, 65536)}, "7.5"),
        ({"hidden": 2049}, "hidden_size is 2049"),
        ({"local": 200}, "num_experts = 128"),
        ({"group_size": 96}, "group_size is 96"),
        ({"group_size": 192}, "group_size is 192"),
        ({"layout": "cpu_panel"}, "w2_layout is cpu_panel version 2, the CUDA kernels read marlin"),
        ({"layout_version": 1}, "w2_layout is marlin version 1, .* marlin version 2: export the model again"),
        ({"op_version": 99}, "op_version is 99"),
        ({"id_bytes": 2}, "2 bytes"),
        ({"tokens": 2**61}, r"topk_ids is \[2305843009213693952, 8\], expected .* at most 1073741823 ids"),
        ({"intermediate": 2**31 - 1}, r"w13 has rows of \d+ bytes, the CUDA kernels take less than 2\^32"),
        ({"hidden": 2**31 - 8}, "less than 2"),
        ({"gated": 2}, "gated is 2, expected 0 or 1"),
        ({"gated": -1}, "gated is -1, expected 0 or 1"),
        ({"apply_router_weight_on_input": 2}, "apply_router_weight_on_input is 2, expected 0 or 1"),
    ],
)
def test_refusals(change, message):
    sizes = change.get("hidden", 2048), change.get("intermediate", 768), 128, change.get("group_size", 128)
    flags = {n: change[n] for n in ("gated", "apply_router_weight_on_input") if n in change}
    spec = spec_of(*sizes, **flags)
    assert not flags or re.search(message, cuda.refusal(spec))
    layout = {name: value for name, value in change.items() if name.startswith("layout")}
    spec = replace(spec, w2=replace(spec.w2, **layout))
    p = cuda.problem(spec, change.get("dtype", "bf16"), change.get("tokens", 4), 8, change.get("local", 128))
    p.id_bytes = change.get("id_bytes", 8)
    p.moe.op_version = change.get("op_version", 1)
    with pytest.raises(ValueError, match=message):
        cuda.plan(p, change.get("device", cuda.H200))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "bf16"}, r"w\d+_format is bf16"),
        ({"zero_points": 1, "format": "fp8_e4m3"}, r"w\d+_zero_points is 1"),
        ({"scale_type": "e8m0"}, r"w\d+_scale_type is e8m0"),
        ({"scale_type": "f32"}, r"w\d+_scale_type is f32.* for int4: export with --scales bf16"),
        ({"scale_type": "f32", "format": "int8", "group_size": 32}, r"w\d+_scale_type is f32 .*--scales bf16"),
        ({"group_size": 16}, r"w\d+_group_size is 16"),
        ({"group_size": 64, "format": "fp8_e4m3", "scale_type": "e8m0"}, r"w\d+_group_size is 64"),
        ({"group_size": 32, "format": "nvfp4", "scale_type": "e4m3"}, r"w\d+_group_size is 32"),
        ({"pre_scale": 2}, r"w\d+_pre_scale is 2"),
        ({"perm": 3}, r"w\d+_perm is 3"),
        ({"bias": 2}, r"w\d+_bias is 2"),
        ({"bias": -1}, r"w\d+_bias is -1"),
    ],
)
@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_the_exporter_knows_what_is_refused(projection, change, message):
    spec = spec_of(2048, 768, 8)
    assert cuda.refusal(spec) == ""
    spec = replace(spec, **{projection: replace(spec.w13, **change)})
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))
    assert cuda.refusal(spec).startswith(f"{projection}_{next(iter(change))} is {next(iter(change.values()))}")


def test_two_orders_are_of_a_gated_w13():
    spec = spec_of(2048, 768, 8)
    two = replace(spec.w13, perm=2)
    assert cuda.refusal(replace(spec, w13=two)) == ""
    cuda.plan(cuda.problem(replace(spec, w13=two), "bf16", 1, 1, 8))
    for wrong in (replace(spec, w2=two), replace(spec, w13=two, gated=0, activation="relu2")):
        assert "_perm is 2" in cuda.refusal(wrong)
        with pytest.raises(ValueError, match="_perm is 2"):
            cuda.plan(cuda.problem(wrong, "bf16", 1, 1, 8))


@pytest.mark.parametrize("activation_format", enum("activation_format"))
def test_an_act_order_of_w2_is_refused_where_marlin_refuses_it(activation_format):
    spec = spec_of(2048, 768, 8)
    ordered = replace(spec.w2, perm=1, activation_format=activation_format)
    spec, message = replace(spec, w2=ordered), "w2_perm is 1 with w2_activation_format .* --activations float"
    if activation_format not in marlin.GROUPED:
        assert cuda.refusal(spec) == ""
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))
        return
    assert re.match(message, cuda.refusal(spec))
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.problem(spec, "bf16", 1, 1, 8))


@pytest.mark.parametrize("name", [*CASES, *FORMATS, *EXACT])
def test_row_bytes_agree_with_the_layout(name):
    case = CASES[name] if name in CASES else FORMAT_SHAPES["odd"]
    if name in FORMATS:
        case = of_format(name, case)
    elif name in EXACT:
        act_order = "split" if name == "nvfp4" else "shared"
        case = replace(case, activation_format=name, act_order=act_order, pre_scale=True)
    spec, _, w13, w2 = build(replace(case, experts=1, top_k=1))
    assert cuda.refusal(spec) == ""
    moe = cuda.problem(spec, "bf16", 1, 1, 1).moe
    for which, rows in ((13, w13), (2, w2)):
        assert cuda.library().qm_cuda_row_bytes(cuda.ctypes.byref(moe), which) == rows.shape[1]


def build_linear(case: Case):
    """(matrix, spec, w) of a linear of case.intermediate inputs and case.hidden outputs."""
    rng = np.random.default_rng(case.seed)
    perm = rng.permutation(case.intermediate).astype(np.int32) if case.act_order != "none" else None
    m = case.matrix(rng, case.hidden, case.intermediate, perm)
    layout = LAYOUTS["marlin"]
    spec = linear_spec(case.intermediate, case.hidden, layout.describe_down(m, case.activation_format))
    row = np.zeros(layout.row_bytes(spec.moe, "w2"), np.uint8)
    layout.pack_down(m, spec.moe, row)
    assert np.array_equal(layout.unpack_down(spec.moe, row).codes, m.codes)
    return m, spec, row[None]


LINEARS = {
    "base": BASE,
    "act-order": replace(BASE, act_order="shared", intermediate=264, group_size=128, bias=True),
    "any-n": replace(BASE, hidden=203, intermediate=1096, bias=True),  # no wgmma
    "large": replace(BASE, hidden=4096, intermediate=512, group_size=128),
    "split-k": replace(BASE, hidden=2056, intermediate=4160, group_size=128, bias=True),
    **{name: of_format(name, replace(BASE, hidden=1032, intermediate=520, bias=True)) for name in FORMATS},
}


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 30, 128, 1000])
@pytest.mark.parametrize("name", LINEARS)
def test_linear(name, rows, dtype):
    m, spec, w = build_linear(LINEARS[name])
    x = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (rows, spec.in_features)).astype(np.float32))
    x = x.to(TORCH[dtype])
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    y = linear(x.cuda())
    assert torch.equal(y, linear(x.cuda()))
    want = reference.linear(x.float().numpy(), m, "none")
    got = y.double().cpu().numpy()
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= 1.2 * UNIT[dtype] * np.linalg.norm(want)
    y = linear(torch.full_like(x, float("nan")).cuda())
    assert y.isnan().all()


@gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("rows", [0, 1, 9, 128, 1000])
@pytest.mark.parametrize("act_order", ["none", "shared"])
@pytest.mark.parametrize("activation_format", [*EXACT, "packed"])
def test_rounded_linear(activation_format, act_order, rows, dtype):
    """Rows of every size: where the scale is not stored all are as exact. packed: as test_packed_activations."""
    packed = activation_format == "packed"
    if packed and (act_order != "none" or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("nothing is packed")
    activation_format = "nvfp4" if packed else activation_format
    case = of_format(EXACT[activation_format], replace(BASE, hidden=1032, intermediate=520, bias=act_order == "none"))
    case = replace(case, activation_format=activation_format, act_order=act_order, pre_scale=act_order != "none")
    m, spec, w = build_linear(case)
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (rows, spec.in_features)).astype(np.float32)
    if not case.stored_scale and m.bias is None:
        x *= np.float32(2.0) ** (rng.integers(-8, 8, (rows, 1)) * (8 if dtype == "bf16" else 1))
        x[2:3] = 0
    x = torch.from_numpy(x).to(TORCH[dtype])
    linear = cuda.CudaLinear(spec, torch.from_numpy(w).cuda())
    if packed:
        linear.device = SM120
    y = linear(x.cuda())
    assert torch.equal(y, linear(x.cuda()))
    want = reference.linear(x.float().numpy(), m, activation_format)
    got = y.double().cpu().numpy()
    assert np.isfinite(got).all()
    error, size = np.linalg.norm(got - want, axis=1), np.linalg.norm(want, axis=1)
    assert (error <= 1.2 * UNIT[dtype] * size).all()
    y = linear(torch.full_like(x, float("nan")).cuda())
    assert y.isnan().all()


@pytest.mark.parametrize("rows", [0, 1, 9, 128, 4096])
@pytest.mark.parametrize("name", LINEARS)
def test_linear_plans(name, rows):
    _, spec, w = build_linear(LINEARS[name])
    assert cuda.refusal(spec) == ""
    p = cuda.linear_problem(spec, "bf16", rows)
    assert cuda.library().qm_cuda_linear_row_bytes(cuda.ctypes.byref(p.linear)) == w.shape[1]
    for device in (cuda.Device(80, 108, 167936), cuda.Device(89, 128, 102400), cuda.H200):
        plan = cuda.plan(p, device)
        cuda.check_plan(p, plan)
        assert plan.w2.shared_bytes + (1 if cuda.PATHS[plan.path] == "stream" else 4) * 1024 <= device.shared_bytes
        fits = not name.startswith("int8-zero") or device.shared_bytes > 102400
        assert plan.path == 0 if rows <= 8 and fits else plan.path > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 1028}, "in_features is 1028"),
        ({"out_features": 0}, "out_features is 0"),
        ({"op_version": 99}, "op_version is 99"),
        ({"w": {"format": "f16"}}, "w_format is f16 and x is bfloat16"),
        ({"w": {"format": "bf16"}}, "w_group_size is 128, the CUDA kernels take -1 for floats"),
        ({"w": {"perm": 2}}, "w_perm is 2"),
        ({"w": {"bias": 2}}, "w_bias is 2"),
    ],
)
def test_linear_refusals(change, message):
    spec = linear_spec(1024, 512, spec_of(64, 64, 1).w2)
    spec = replace(spec, **change) if "w" not in change else replace(spec, w=replace(spec.w, **change["w"]))
    with pytest.raises(ValueError, match=message):
        cuda.plan(cuda.linear_problem(spec, "bf16", 4))


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


def test_formats_that_differ_take_the_same_tiles():
    """In the stream path w13 and w2 read one list of tiles: neither may have smaller ones than the other."""
    few = replace(spec_of(2048, 768, 128), w2=spec_of(2048, 768, 128, -1, ("int8", "bf16", False)).w2)
    for spec in (few, replace(few, w13=few.w2, w2=few.w13)):
        for device, counts in ((cuda.Device(89, 128, 102400), (64, 128, 512)), (cuda.H200, (9, 64, 80))):
            for tokens in counts:
                plan = cuda.plan(cuda.problem(spec, "bf16", tokens, 8, 128), device)
                assert cuda.PATHS[plan.path] == "stream"
                assert plan.w13.n_tiles == plan.w2.n_tiles


@gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [0, 1, 37, 1000])
@pytest.mark.parametrize("name", ROUTERS)
def test_routing(name, tokens, dtype):
    spec = ROUTERS[name]
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (tokens, spec.logits)).astype(np.float32))
    logits = logits.to(TORCH.get(dtype, torch.float32))
    for bias in (np.zeros(spec.num_experts, np.float32), rng.uniform(0, 1, spec.num_experts).astype(np.float32)):
        ids, weights = (t.cpu().numpy() for t in cuda.route(spec, logits.cuda(), torch.from_numpy(bias).cuda()))
        assert ids.shape == weights.shape == (tokens, spec.slots)
        if not tokens:
            continue
        assert_routed((ids, weights), reference.route(spec, logits.float().numpy(), bias), 4e-6, 1e-6)


@gpu
def test_routing_ties_and_logits_that_are_not_numbers():
    for spec in ROUTERS.values():
        bias = torch.zeros(spec.num_experts).cuda()
        logits = torch.zeros((3, spec.logits))
        logits[1, spec.num_experts - 1] = float("nan")
        ids, weights = cuda.route(spec, logits.cuda(), bias)
        shared = range(spec.num_experts, spec.num_experts + spec.shared_experts)
        assert torch.equal(ids.cpu(), torch.tensor([*range(spec.top_k), *shared], dtype=torch.int32).expand(3, -1))
        assert weights[1, : spec.top_k].isnan().all()
        assert (weights[:, spec.top_k :] == (0.5 if spec.shared_gate else 1)).all()
        assert weights[[0, 2]].isfinite().all()
        levels = np.random.default_rng(0).integers(0, 3, (50, spec.logits)).astype(np.float32)
        ids, _ = cuda.route(spec, torch.from_numpy(levels).cuda(), bias)
        np.testing.assert_array_equal(ids.cpu().numpy(), reference.route(spec, levels)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 129}, "top_k is 129, the CUDA kernel takes 1 to 128"),
        ({"n_group": 7}, "n_group is 7, expected a divisor of num_experts 256"),
        ({"topk_group": 9}, "topk_group is 9"),
        ({"num_experts": 2304}, "num_experts is 2304, the CUDA kernel takes 1 to 2048"),
        ({"renormalize": 2}, "renormalize is 2"),
        ({"op_version": 99}, "op_version is 99"),
    ],
)
def test_routing_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        cuda.check_routing(replace(ROUTERS["groups"], **change))
