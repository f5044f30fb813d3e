"""Layers and linears of the CUDA tests: what they are made of, and how they are held to reference.py."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import numpy as np
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, UNIT, torch
from support.cuda.formats import FLOATS, FORMATS
from support.operators.cases import Case
from support.operators.specs import linear_spec, moe_spec

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.op import Projection
from quantmoe.custom_ops.reference import FLOAT_FORMATS

SM89, SM120 = (cuda.Device(sm, 132, 102400) for sm in (89, 120))  # of an H200's size


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


BASE = Case(hidden=256, intermediate=192, experts=8, top_k=2, group_size=32, activation_format="none")


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
    "ungated-gelu": replace(BASE, gated=False, activation="gelu", bias=True),
    "gelu": replace(BASE, activation="gelu"),
    "gelu_tanh": replace(BASE, activation="gelu_tanh"),
    "swiglu_step": replace(BASE, activation="swiglu_step"),
    "swiglu_clamp": replace(BASE, activation="swiglu_clamp"),
    "swiglu_tanh": replace(BASE, activation="swiglu_tanh"),
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


# bf16 scales and zero points, odd sizes, a bias; two parts of K; sizes of many panels.
FORMAT_SHAPES = {
    "odd": replace(BASE, hidden=360, intermediate=90, bias=True),
    "split-k": replace(BASE, intermediate=2240, experts=4, activation="swiglu_oai"),
    "ungated": replace(BASE, hidden=512, intermediate=200, gated=False, activation="relu2", on_input=True),
}


#: of FORMAT_SHAPES, with tokens that give each product each of wgmma's tiles where a GPU has one multiprocessor
ONE = cuda.Device(90, 1, 233472)
TILES = [
    *(("odd", n) for n in (33, 120, 200, 250, 320, 400)),
    *(("split-k", n) for n in (33, 72, 100, 130, 200, 330)),
    *(("ungated", n) for n in (33, 230, 500)),
]


def of_format(name: str, case: Case) -> Case:
    weights, group_size, block_n = {**FORMATS, **FLOATS}[name]
    return replace(case, weights=weights, group_size=group_size, block_n=block_n)


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


def assert_rounded(got: np.ndarray, want: np.ndarray, bounds: tuple[float, float]) -> None:
    bound, neighbour = bounds
    assert np.isfinite(got).all()
    largest = np.linalg.norm(want, axis=1).max(initial=0)
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want) + neighbour * largest
    rows = np.linalg.norm(got - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), 1e-30)
    assert rows.max(initial=0) < 4 * bound + neighbour, f"token {rows.argmax()}: relative error {rows.max():.2e}"


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
    # Of few rows on an H200: two panels a block, with five stages and with three.
    "long-rows": replace(BASE, hidden=2200, intermediate=2504, group_size=128, bias=True),
    "head": replace(BASE, hidden=17000, intermediate=136, group_size=128),
    "wide-zero": of_format("int4-zero", replace(BASE, hidden=4096, intermediate=200, bias=True)),
    **{name: of_format(name, replace(BASE, hidden=1032, intermediate=520, bias=True)) for name in FORMATS},
}
