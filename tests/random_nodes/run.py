"""Random nodes against tests/random_nodes/reference.py until the time is over: make test-random SECONDS=3600 SEED=n.

Node i of seed n is always the same node. A failure prints both: make test-random SEED=n NODE=i runs it alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
from random_nodes import reference
from support.operators import native_kernels as native
from support.operators.arithmetic import PLANES, Span, assert_within, exactly, quant_linear, quant_moe
from support.operators.attention import CACHES, inputs, selecting
from support.operators.attention import check as check_attention
from support.operators.hyper_connection import assert_near
from support.operators.hyper_connection import inputs as connection_inputs
from support.operators.indexer import check as check_indexer
from support.operators.indexer import inputs as indexer_inputs
from support.operators.linear_attention import (
    Conv,
    Delta,
    Space,
    check_conv,
    check_delta,
    check_space,
    check_window,
    conv_inputs,
    delta_inputs,
    space_inputs,
)
from support.operators.specs import (
    attention_spec,
    conv_spec,
    delta_spec,
    linear_spec,
    moe_spec,
    routing_spec,
    space_spec,
)

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import cpu_panel, join
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import IndexerSpec, enum
from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.custom_ops.schemes import SCHEMES

KERNELS = [name for name, usable in native.kernels().items() if usable]
#: input types and their quiet NaNs (FORMAT.md 4)
TYPES = {
    np.dtype(np.float32): (np.uint32, 0x7FC00000),
    np.dtype(np.float16): (np.uint16, 0x7E00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7FC0),
}
WIDE = ("f32", "f16", "bf16")
#: scale types, and the standard deviation of all codes' values
FORMATS: dict[str, tuple[tuple[str, ...], float]] = {
    "int4": (WIDE, 4.6),
    "int8": (WIDE, 74.0),
    "mxfp4": (("e8m0",), 3.0),
    "nvfp4": (("e4m3",), 3.0),
    "fp8_e4m3": ((*WIDE, "e8m0"), 120.0),
    "bf16": (("f32",), 1.0),
    "f16": (("f32",), 1.0),
    "q4_k": (("k32",), 4.6),
    "q5_k": (("k32",), 9.2),
    "q6_k": (("k16",), 18.5),
    "q2_k": (("k16_minima",), 1.1),
    "q4_1": (("f16_minima", "f32_minima"), 4.6),
    "q5_1": (("f16_minima", "f32_minima"), 9.2),
    "nf4": (("f32",), 0.5),
    "bnb_fp4": (("f32",), 0.5),
    "q8_min": (("f32_minima",), 74.0),
    "int2": (WIDE, 1.1),
    "int3": (WIDE, 2.3),
    "int5": (WIDE, 9.2),
    "int6": (WIDE, 18.5),
}
#: ranges of exp(a_log): usual, near 1, near 0
DECAYS = ((0.01, 16.0), (0.01, 16.0), (1e-6, 1e-3), (10.0, 1000.0))
GROUP_SIZES = (-1, 16, 32, 64, 96, 128, 160, 256, 512)


@dataclass
class Node:
    """A node with its inputs: ``label`` to count it by, ``text`` to know it by, ``check`` raises AssertionError."""

    label: str
    text: str
    check: Callable[[], None]


@dataclass
class Kind:
    """What the matrices of one projection have in common; optional parts, of which some matrices may lack theirs."""

    format: str
    activation_format: str
    scale_type: str
    group_size: int
    block_n: int
    zero_points: bool
    bias: bool
    stored: bool
    magnitude: float
    signed: bool


class Draw:
    """Random choices, all from one generator."""

    def __init__(self, seed: int, index: int):
        self.rng = np.random.default_rng([seed, index])

    def one_of(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def int(self, low: int, high: int) -> int:
        """low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def features(self) -> int:
        """Mostly a few tiles and a rest, now and then one or two features, now and then many."""
        low, high = self.one_of(
            (16, 160), (16, 160), (16, 160), (16, 160), (1, 15), (160, 600 if self.chance(0.3) else 300)
        )
        return self.one_of(32, 64, 96, 128, 256) if self.chance(0.2) else self.int(low, high)

    def rows(self) -> int:
        return (
            300 if self.chance(0.01) else self.one_of(0, 1, 1, 2, 3, self.int(4, 9), self.int(10, 17), self.int(18, 48))
        )

    def kind(self) -> Kind:
        format_ = self.one_of(*FORMATS)
        floats = format_ in ("fp8_e4m3", "bf16", "f16", "nf4", "bnb_fp4", "q8_min")
        activation_format = self.one_of(*(a for a in enum("activation_format") if not (floats and a[:4] == "int8")))
        group_size = self.one_of(*GROUP_SIZES)
        if format_ in ("mxfp4", "nvfp4") and self.chance(0.4):  # as checkpoints have them
            activation_format, group_size = format_, 32 if format_ == "mxfp4" else 16
        scale_type = self.one_of(*FORMATS[format_][0])
        if scale_type == "f32_minima" or format_ in ("nf4", "bnb_fp4"):
            group_size = self.one_of(32, 64, 128, 256)
        elif format_[0] == "q":
            group_size = SCHEMES[format_].group_size
        elif format_ in PLANES and group_size == 16:
            group_size = 32
        return Kind(
            format_,
            activation_format,
            scale_type,
            -1 if format_ in ("bf16", "f16") else group_size,
            self.one_of(1, 16, 128, self.int(2, 40)) if format_ == "fp8_e4m3" else 1,
            zero_points=SCHEMES[format_].integer and self.chance(0.5),
            bias=self.chance(0.4),
            stored=activation_format == "nvfp4" or self.chance(0.5),
            magnitude=float(np.exp2(self.rng.uniform(-12, 12))) if self.chance(0.1) else 1.0,
            signed=self.chance(0.1),
        )

    def matrix(
        self, kind: Kind, n: int, k: int, perm: np.ndarray | None, pre_scale: np.ndarray | None
    ) -> QuantizedMatrix:
        rng, (_, deviation) = self.rng, FORMATS[kind.format]
        found: dict[str, Any] = {
            "perm": perm,
            "pre_scale": pre_scale,
            "bias": rng.normal(0, 0.5, n).astype(np.float32) if kind.bias and self.chance(0.8) else None,
            "input_scale": float(np.float32(np.exp2(rng.uniform(-10, -3)))) if kind.stored else None,
        }
        unit = kind.magnitude / deviation / np.sqrt(k)  # scales of which products have the deviation of x
        if kind.format in ("bf16", "f16"):
            values = (rng.normal(0, unit, (n, k))).astype(SCALE_DTYPES[kind.format])
            return QuantizedMatrix(
                kind=kind.format,
                codes=values.view(np.uint16),
                scales=np.ones((n, 1), np.float32),
                group_size=-1,
                **found,
            )
        codes_of = 1 << SCHEMES[kind.format].bits
        codes = rng.integers(0, codes_of, (n, k), dtype=np.uint8)
        if self.chance(0.1):
            codes[self.int(0, n - 1)] = self.one_of(0, codes_of // 2, codes_of - 1)
        if kind.format == "fp8_e4m3":
            codes[codes & 0x7F == 0x7F] ^= 1  # not numbers
        if kind.format[0] == "q":
            levels = np.zeros((n, -(-k // kind.group_size)), SCALE_DTYPES[kind.scale_type])
            names = levels.dtype.names
            for factor, of_groups in (("d", "scales"), ("d_min", "minima")):
                if factor in names:
                    size = 32 if of_groups in names else 8 if "levels" in names else 1
                    levels[factor] = rng.uniform(0.3, 1.5, levels.shape) * min(unit, 1) / size
                    low = -128 if kind.signed or factor == "d" else 0
                    if of_groups in names:
                        levels[of_groups] = rng.integers(low, 128, levels[of_groups].shape)
            if "levels" in names:
                levels["levels"] = rng.integers(0, 256, levels["levels"].shape)
            return QuantizedMatrix(kind=kind.format, codes=codes, scales=levels, group_size=kind.group_size, **found)
        groups = 1 if kind.group_size == -1 else -(-k // kind.group_size)
        shape = -(-n // kind.block_n), groups
        scales = rng.uniform(0.3, 1.5, shape)
        if kind.signed and kind.scale_type != "e8m0":
            scales *= rng.choice([-1.0, 0.0, 1.0], shape)
        if kind.format == "nvfp4":
            found["global_scale"] = float(np.float32(unit / 8))
        zeros = kind.zero_points and self.chance(0.9)
        return QuantizedMatrix(
            kind=kind.format,
            codes=codes,
            scales=(scales * (8 if kind.format == "nvfp4" else unit)).astype(SCALE_DTYPES[kind.scale_type]),
            group_size=kind.group_size,
            block_n=kind.block_n,
            zero_points=rng.integers(0, codes_of, shape, dtype=np.uint8) if zeros else None,
            **found,
        )

    def order(self, k: int) -> np.ndarray:
        return self.rng.permutation(k).astype(np.int32)

    def factors(self, k: int) -> np.ndarray:
        return np.exp2(self.rng.uniform(-2, 2, k)).astype(np.float32)

    def activations(self, t: int, k: int) -> np.ndarray:
        """[t, k] of one of the input types."""
        x = self.rng.normal(0, 1, (t, k)).astype(np.float32)
        if self.chance(0.1):
            x = np.rint(x * 4) / 2  # many middles between two codes
        if self.chance(0.1):
            x *= np.float32(np.exp2(self.rng.uniform(-16, 8)))
        special = self.one_of(0, 0, 0.2, 0.5)
        with np.errstate(over="ignore", invalid="ignore"):
            for row in x:
                if self.chance(special):
                    self.make_special(row)
            return x.astype(self.one_of(*TYPES))

    def make_special(self, row: np.ndarray) -> None:
        at = self.int(0, len(row) - 1)
        match self.int(0, 12):
            case 0:
                row[:] = 0
            case 1:
                row[:] = self.one_of(3.5, -1.0, 127.5, 448.0, 6.0, 1e-30)
            case 2:
                row[at] = np.nan
            case 3:
                row[at] = self.one_of(np.inf, -np.inf)
            case 4:
                row *= np.float32(1e-42)
            case 5:
                row *= np.float32(10) ** np.float32(self.int(-37, -10))
            case 6:
                row *= np.float32(10) ** np.float32(self.int(5, 37))
            case 7:  # one outlier
                row[:] = 0
                row[at] = self.one_of(1.0, -3e38, 1e-45, 5.0)
            case 8:
                row[at] = self.one_of(3.4e38, -3.4e38, 1e4, -1e20)
            case 9:
                row[:] = -np.abs(row)
            case 10:
                row[:] = np.abs(row)
            case 11:  # steps that are one, and middles between codes
                row[:] = np.clip(np.rint(row * 40) + 0.5, -127.5, 127.5)
                row[at] = 127.5
            case 12:
                row[:] = np.exp2(np.rint(row * 3))

    def router_weights(self, shape: tuple[int, int]) -> np.ndarray:
        w = self.rng.uniform(0, 1, shape).astype(np.float32)
        if self.chance(0.1):
            special = self.rng.random(shape) < 0.2
            w[special] = self.rng.choice(
                np.float32([0, -0.0, -1.5, np.nan, np.inf, -np.inf, 1e-40, 1e30]), special.sum()
            )
        return w

    def ids(self, t: int, top_k: int, total: int) -> np.ndarray:
        ids = np.argsort(self.rng.random((t, max(total, top_k))), axis=1)[:, :top_k] % total
        if self.chance(0.2):
            ids = self.rng.integers(0, total, (t, top_k))  # repeated
        if self.chance(0.1):
            ids[:] = self.int(0, total - 1)
        if self.chance(0.3):
            ids[self.rng.random(ids.shape) < self.one_of(0.1, 0.6, 1.0)] = -1
        return ids.astype(self.one_of(np.int32, np.int64))


def moe(draw: Draw) -> Node:
    h, i, local = draw.features(), draw.features(), draw.one_of(1, 2, 3, 4, draw.int(5, 9))
    gated = draw.chance(0.75)
    activation = draw.one_of(*(a for a in enum("activation") if gated or not a.startswith("swiglu")))
    kinds = [draw.kind(), draw.kind()]
    if draw.chance(0.5):
        kinds[1] = replace(kinds[0], magnitude=kinds[1].magnitude, signed=kinds[1].signed)
    perms = draw.one_of(0, 0, 1, 2) if gated else draw.one_of(0, 1)
    pre_scales = draw.one_of(0, 0, 1, 2) if gated else draw.one_of(0, 0, 1)
    down_perm, down_pre_scale = draw.chance(0.4), draw.chance(0.25)
    hadamard = 0 if down_perm or draw.chance(0.7) else 2 ** draw.int(0, (i & -i).bit_length() - 1)

    def sides(count: int, make: Callable[[int], np.ndarray]) -> list[np.ndarray | None]:
        """Of gate and up: none, the same or two of their own; now and then an expert has none."""
        if count == 0 or draw.chance(0.1):
            return [None, None]
        first = make(h)
        return [first, first if count == 1 else make(h)]

    def expert() -> Expert:
        columns, factors = sides(perms, draw.order), sides(pre_scales, draw.factors)
        gate, up = (
            draw.matrix(kinds[0], i, h, column, factor) if side or gated else None
            for side, (column, factor) in enumerate(zip(columns, factors, strict=True))
        )
        order = draw.order(i) if down_perm and draw.chance(0.9) else None
        down = draw.matrix(kinds[1], h, i, order, draw.factors(i) if down_pre_scale else None)
        return Expert(gate, up, replace(down, hadamard=hadamard))

    experts = [expert() for _ in range(local)]
    w13, w2 = reduce(join, (cpu_panel.describe(e, *(k.activation_format for k in kinds)) for e in experts))
    if pre_scales == 1 and gated and all((e.gate.pre_scale is None) == (e.up.pre_scale is None) for e in experts):
        w13 = replace(w13, pre_scale=min(w13.pre_scale, 1))
    offset = draw.one_of(0, draw.int(0, 5))
    spec = moe_spec(
        local + offset + draw.one_of(0, draw.int(0, 5)),
        h,
        i,
        w13,
        w2,
        activation=activation,
        gated=int(gated),
        expert_offset=offset,
        swiglu_alpha=draw.one_of(1.702, 1.0, 0.5),
        swiglu_limit=draw.one_of(7.0, 1.5, 0.25),
        apply_router_weight_on_input=int(draw.chance(0.25)),
        w2_hadamard=hadamard,
    )
    rows = [native.aligned(local * cpu_panel.row_bytes(spec, p)).reshape(local, -1) for p in ("w13", "w2")]
    for e, *row in zip(experts, *rows, strict=True):
        cpu_panel.pack(e, spec, *row)
    t, top_k = min(draw.rows(), 10**6 // (h * i)), draw.one_of(1, 2, 2, draw.int(3, 8))
    tokens = draw.activations(t, h), draw.ids(t, top_k, spec.num_experts), draw.router_weights((t, top_k))
    lanes = draw.int(2, 6)

    def check() -> None:
        want = quant_moe(spec, reference.moe(spec, *rows), *tokens)
        check_kernels(lambda n: native.NativeMoE(spec, *rows)(*tokens, lanes=n, buffer=dirty), lanes, want)

    return Node(
        f"QuantMoE {spec.w13.format}", f"{spec}, {local} experts here, T {t}, top_k {top_k}, {tokens[0].dtype}", check
    )


def dense(draw: Draw) -> Node:
    k, n, kind = draw.features(), draw.features(), draw.kind()
    m = draw.matrix(
        kind, n, k, draw.order(k) if draw.chance(0.4) else None, draw.factors(k) if draw.chance(0.25) else None
    )
    spec = linear_spec(k, n, cpu_panel.describe_down(m, kind.activation_format))
    w = native.aligned(cpu_panel.row_bytes(spec.moe, "w2"))
    cpu_panel.pack_down(m, spec.moe, w)
    t = draw.rows()
    x, lanes = draw.activations(t, k), draw.int(2, 6)

    def check() -> None:
        want = quant_linear(exactly(x), reference.linear(spec, w[None]), spec.w.activation_format)
        check_kernels(lambda lanes: native.NativeLinear(spec, w[None])(x, lanes=lanes), lanes, want)

    return Node(f"QuantLinear {spec.w.format}", f"{spec}, T {t}, {x.dtype}", check)


def routing(draw: Draw) -> Node:
    groups = draw.one_of(1, 1, 1, draw.int(2, 8))
    experts = groups * draw.int(1, draw.one_of(8, 40, 300 // groups))
    kept = draw.int(1, groups)
    method = draw.one_of(*enum("routing_method"))
    spec = routing_spec(
        experts,
        draw.int(1, min(experts // groups * kept, draw.one_of(8, 64))),
        method,
        int(draw.chance(0.5)),
        groups,
        kept,
        draw.one_of(1.0, 2.5, float(draw.rng.uniform(0.1, 16))),
        shared_experts=(shared := draw.one_of(0, 0, 1, draw.int(1, 20))),
        shared_gate=int(shared > 0 and draw.chance(0.5)),
    )
    t, lanes = draw.rows(), draw.int(2, 6)
    logits = draw.rng.normal(0, draw.one_of(0.1, 2, 30), (t, spec.logits)).astype(np.float32)
    if draw.chance(0.3):
        logits = np.rint(logits)  # ties
    if draw.chance(0.2):
        logits[draw.rng.random(t) < 0.3, draw.int(0, spec.logits - 1)] = draw.one_of(np.nan, -np.inf, 6e4, -6e4, 200.0)
    logits = logits.astype(draw.one_of(*TYPES))
    bias = draw.rng.uniform(0, 1, experts).astype(np.float32) * draw.one_of(0, 1, 100)

    def check() -> None:
        ids, weights = native.route(spec, logits, bias)
        for found, want in zip(native.route(spec, logits, bias, lanes), (ids, weights), strict=True):
            assert found.tobytes() == want.tobytes(), f"{lanes} lanes give other bytes than one"
        with np.errstate(invalid="ignore"):  # infinite logits
            reference.check_routing(spec, logits, bias, ids, weights)

    return Node(f"MoERouting {method}", f"{spec}, T {t}, {logits.dtype}", check)


def attending(draw: Draw) -> Node:
    groups, shared, d = draw.int(1, 4), draw.one_of(1, 2, 4, 8, draw.int(1, 20)), draw.one_of(16, 32, draw.int(1, 80))
    half = draw.int(0, d // 2)
    spec = attention_spec(
        groups * shared,
        groups,
        d,
        v_head_size=draw.one_of(d, d, draw.int(1, 80)),
        scale=draw.one_of(d**-0.5, d**-0.5, -0.1, 0.0),
        sliding_window=draw.one_of(0, 0, draw.int(1, 600)),
        chunk_size=draw.one_of(0, 0, 0, draw.int(1, 600)),
        softcap=draw.one_of(0.0, 0.0, 0.5, 30.0),
        rotary_size=draw.one_of(0, 2 * half),
        rotary_interleaved=draw.int(0, 1),
        qk_norm=draw.one_of(*enum("qk_norm")),
        norm_epsilon=draw.one_of(1e-6, 0.1),
        key_split=draw.one_of(0, 0, draw.int(0, d - 1)),
    )
    if draw.chance(0.2):
        spec = replace(spec, key_split=0, chunk_size=0, v_head_size=d, compress_rate=draw.int(1, 200))
    if spec.key_split:
        spec = replace(spec, v_head_size=min(spec.v_head_size, d))
        if draw.chance(0.5):
            rotary = min(spec.rotary_size, (d - spec.v_head_size) // 2 * 2)
            sizes = {"nope_size": draw.int(1, 20), "out_size": draw.one_of(16, draw.int(1, 40))}
            spec = replace(spec, qk_norm="none", rotary_size=rotary, **sizes)
    tokens, past = (
        draw.one_of(1, 1, draw.int(0, 20), draw.int(0, 90)),
        draw.one_of(0, draw.int(0, 20), draw.int(0, 700)),
    )
    rows = []
    for _ in range(draw.int(0, 4)):
        count = draw.one_of(tokens, draw.int(0, tokens))
        rows.append([draw.int(0, tokens - count), count, draw.one_of(past, draw.int(0, past))])
    types = {"dtype": draw.one_of(*TYPES), "cache": draw.one_of(*CACHES)}
    if isinstance(types["cache"], str):  # codes, which no latent has
        spec = replace(spec, key_split=0, nope_size=0, out_size=0, compress_rate=0)
    needed = max([count + before for _, count, before in rows], default=0)
    a = inputs(
        spec, rows, tokens, past, needed + draw.one_of(0, 0, draw.int(0, 40)), **types, seed=draw.int(0, 1 << 30)
    )
    a = replace(a, sinks=draw.one_of(np.full_like(a.sinks, -np.inf), a.sinks, 50 * a.sinks))
    lanes, lists = draw.int(2, 40), draw.one_of(0, 1, groups)
    if lists and (spec.compress_rate or not (spec.sliding_window or spec.chunk_size)):
        a = selecting(a, lists, draw.one_of(draw.int(1, 9), draw.int(1, 300)))

    def check() -> None:
        check_attention(a, on_all_kernels(lambda n: a.run(lanes=n, buffer=dirty), lanes))

    said = f"{spec}, rows {rows}, S {tokens}, P {past}, L {a.length}, {types}, {lists} lists"
    return Node("CachedAttention", said, check)


def indexing(draw: Draw) -> Node:
    spec = IndexerSpec(
        num_heads=draw.one_of(1, 8, draw.int(1, 140)),
        head_size=draw.one_of(16, draw.int(1, 80)),
        top_k=draw.one_of(draw.int(1, 9), draw.int(1, 900)),
        relu=draw.int(0, 1),
    )
    if draw.chance(0.5):
        groups, size, blocks, best = draw.int(1, 4), draw.int(1, 40), draw.int(1, 12), draw.int(0, 1)
        heads = groups * draw.int(1, 40)
        spec = replace(spec, num_heads=heads, num_groups=groups, top_k=blocks * size, block_size=size, best_slot=best)
        spec = replace(spec, local_blocks=draw.int(1, blocks) if best else 0)
    tokens, past = draw.one_of(1, draw.int(0, 20), draw.int(0, 90)), draw.one_of(0, draw.int(0, 20), draw.int(0, 700))
    counts = [draw.one_of(tokens, draw.int(0, tokens)) for _ in range(draw.int(0, 3))]
    rows = [[draw.int(0, tokens - count), count, draw.one_of(past, draw.int(0, past))] for count in counts]
    types = {"dtype": draw.one_of(*TYPES), "cache": draw.one_of(*CACHES[:2]), "whole": draw.chance(0.5)}
    needed = max([count + before for _, count, before in rows], default=0)
    a = indexer_inputs(spec, rows, tokens, past, needed + draw.int(0, 40), **types)
    lanes = draw.int(2, 40)

    def check() -> None:
        check_indexer(a, *on_all_kernels(lambda n: a.run(lanes=n, buffer=dirty), lanes))

    return Node("SparseIndexer", f"{spec}, rows {rows}, S {tokens}, P {past}, L {a.length}, {types}", check)


def on_all_kernels(run: Callable[[int], Any], lanes: int) -> Any:
    """Return the arrays of every kernel in one lane and in several, whose bytes are equal."""
    first = None
    for kernel in KERNELS:
        os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
        for n in (1, lanes):
            found = run(n)
            first = first or found
            for x, y in zip(found, first, strict=True):
                assert x.tobytes() == y.tobytes(), f"{kernel} in {n} lanes gives other bytes than {KERNELS[0]} in one"
    return first


def convolving(draw: Draw) -> Node:
    spec = conv_spec(draw.one_of(256, draw.int(1, 600)), draw.one_of(4, draw.int(2, 9)), draw.one_of("none", "silu"))
    tokens, rows = draw_rows(draw)
    a = conv_inputs(spec, rows, tokens, draw.one_of(*TYPES), draw.chance(0.5), draw.int(0, 1 << 30))
    check = stateful_check(a, lambda got: check_conv(a, got), draw.int(2, 40), draw.int(2, 9))
    return Node("CausalConv", f"{spec}, rows {rows}, S {tokens}, {a.x.dtype}", check)


def recurring(draw: Draw) -> Node:
    groups, shared, per_key = draw.int(1, 3), draw.one_of(1, 2, 3), draw.int(0, 1)
    spec = delta_spec(
        groups,
        groups * shared,
        draw.one_of(16, 32, draw.int(1, 80)),
        v_head_size=draw.one_of(16, 64, 128, draw.int(1, 200)),
        scale=draw.one_of(0.25, -1.0, 0.0),
        l2_epsilon=draw.one_of(1e-6, 0.1),
        decay_per_key=per_key,
        beta_scale=draw.one_of(1.0, 2.0),
        gate=draw.one_of(*enum("output_gate")),
        norm_epsilon=draw.one_of(1e-6, 0.1),
    )
    tokens, rows = draw_rows(draw)
    decay = draw.one_of(*DECAYS)
    a = delta_inputs(spec, rows, tokens, draw.one_of(*TYPES), decay, draw.int(0, 1 << 30))
    check = stateful_check(a, lambda got: check_delta(a, got), draw.int(2, 40), draw.int(2, 9))
    return Node("GatedDelta", f"{spec}, rows {rows}, S {tokens}, decay {decay}, {a.qkv.dtype}", check)


def state_space(draw: Draw) -> Node:
    groups, shared, size = draw.int(1, 3), draw.one_of(1, 2, 3), draw.one_of(16, 64, draw.int(1, 100))
    spec = space_spec(
        groups,
        groups * shared,
        draw.one_of(16, 32, draw.int(1, 80)),
        size,
        norm_size=size * draw.one_of(1, shared, groups * shared),
        norm_epsilon=draw.one_of(1e-6, 0.1),
    )
    (tokens, rows), decay = draw_rows(draw), draw.one_of(*DECAYS)
    a = space_inputs(spec, rows, tokens, draw.one_of(*TYPES), decay, draw.int(0, 1 << 30))
    check = stateful_check(a, lambda got: check_space(a, got), draw.int(2, 40), draw.int(2, 9))
    return Node("StateSpace", f"{spec}, rows {rows}, S {tokens}, decay {decay}, {a.xbc.dtype}", check)


def connecting(draw: Draw) -> Node:
    spec = HyperConnection(
        num_streams=draw.one_of(4, draw.int(1, 16)),
        hidden_size=draw.one_of(256, draw.int(1, 600)),
        iterations=draw.one_of(20, draw.int(1, 9)),
        epsilon=draw.one_of(1e-6, 1e-3, 1.0),
    )
    tokens, spread = (draw.int(0, 3), draw.int(0, 30)), draw.one_of(1.0, 10.0, 1e3, 1e-10)
    a = connection_inputs(spec, tokens, draw.one_of(*TYPES), spread, draw.int(0, 1 << 30))
    lanes = draw.int(2, 40)

    def check() -> None:
        assert_near(on_all_kernels(lambda n: native.run(spec, *a.tensors, lanes=n, buffer=dirty), lanes), a)

    return Node("HyperConnection", f"{spec}, tokens {tokens}, spread {spread}, {a.streams.dtype}", check)


def draw_rows(draw: Draw) -> tuple[int, list[list[int]]]:
    """New tokens, and rows of an operator with a state."""
    tokens, rows = draw.one_of(1, 1, draw.int(0, 12), draw.int(0, 90)), []
    for _ in range(draw.int(0, 4)):
        count = draw.one_of(tokens, draw.int(0, tokens))
        rows.append([draw.int(0, tokens - count), count, draw.one_of(0, draw.int(0, 300))])
    return tokens, rows


def stateful_check(
    a: Conv | Delta | Space, within: Callable[[tuple[np.ndarray, np.ndarray]], None], lanes: int, window: int
) -> Callable[[], None]:
    """Every kernel, number of lanes and place of the state gives the same bytes, within the bound; a window of states
    has those of fewer tokens."""

    def check() -> None:
        first = None
        for kernel in KERNELS:
            os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
            past = a.past.copy()
            for found in (
                a.run(buffer=dirty),
                a.run(lanes=lanes, buffer=dirty),
                replace(a, past=past).run(present=past),
            ):
                first = first or found
                for x, y in zip(found, first, strict=True):
                    assert x.tobytes() == y.tobytes(), f"{kernel} gives other bytes than {KERNELS[0]} in one lane"
            check_window(a, window, lanes)
        assert first is not None
        within(first)

    return check


def dirty(size: int) -> np.ndarray:
    """Memory in which what is read before it is written is not a number."""
    memory = native.aligned(size)
    memory[:] = 0xFF
    return memory


def check_kernels(run: Callable[[int], np.ndarray], lanes: int, want: Span) -> None:
    """Every kernel, in one lane or in several, gives the same bytes, and those are within the bound."""
    first = None
    for kernel, n in [(KERNELS[0], 1), (KERNELS[0], lanes), *((kernel, 1 + lanes % 3) for kernel in KERNELS[1:])]:
        os.environ["QUANTMOE_FORCE_KERNEL"] = kernel
        found = run(n)
        if first is None:
            first = found
        assert found.tobytes() == first.tobytes(), f"{kernel} in {n} lanes gives other bytes than {KERNELS[0]} in one"
    assert first is not None
    assert_within(first, want)
    bits, quiet = TYPES[first.dtype]
    assert (first.view(bits)[np.isnan(first)] == quiet).all(), "a NaN that is not the quiet one"


OTHERS = (routing, attending, indexing, convolving, recurring, state_space, connecting)


def draw_node(seed: int, index: int) -> Node:
    draw = Draw(seed, index)
    return draw.one_of(*[moe] * 6, *[dense] * 3, *OTHERS)(draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--node", type=int, help="this node alone")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    start, index = time.monotonic(), options.node or 0
    while not counts or (options.node is None and time.monotonic() < start + options.seconds):
        node = draw_node(options.seed, index)
        try:
            node.check()
        except Exception:
            print(
                f"node {index} of seed {options.seed}: make test-random SEED={options.seed} NODE={index}\n{node.text}"
            )
            raise
        counts[node.label] += 1
        index += 1
    found = ", ".join(f"{label} {count}" for label, count in sorted(counts.items()))
    print(f"{counts.total()} nodes checked on {', '.join(KERNELS)}: {found}")


if __name__ == "__main__":
    main()
