"""What the packed bytes of layout cpu_panel mean, read from custom_ops/FORMAT.md section 2 alone.

Independent of the layouts, of QuantizedMatrix and of custom_ops/reference.py on purpose: a mistake that packer, kernels
and reference share is not made here again. The arithmetic is arithmetic.py's, which is written from the
same text. Sections of FORMAT.md stand in parentheses.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from support.operators.arithmetic import (
    GGML,
    PLANES,
    SECOND,
    SIGMOID,
    SMALLEST_SIGMOID,
    TINY,
    Span,
    U,
    Weights,
    assert_within,
)

from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection, RoutingSpec

#: rows of a panel and bits of a code (2.1, 2.7, 2.8)
PANELS = {"int4": (8, 4), "int8": (4, 8), "mxfp4": (8, 4), "nvfp4": (8, 4), "fp8_e4m3": (16, 8), "bf16": (16, 16),
          "f16": (16, 16), "q4_k": (16, 4), "q5_k": (16, 5), "q6_k": (16, 6), "q2_k": (16, 2), "q4_1": (16, 4),
          "q5_1": (16, 5), "nf4": (16, 4), "bnb_fp4": (16, 4), "q8_min": (16, 8), "int2": (16, 2),
          "int3": (16, 3), "int5": (16, 5), "int6": (16, 6)}  # fmt: skip
SCALE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "e8m0": 1, "e4m3": 1, "k32": 20, "k16": 18, "k16_minima": 20,
               "f16_minima": 4, "f32_minima": 8}  # fmt: skip
#: places -> numbers (2.10)
TABLES = {
    "nf4": np.array([-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0, 0.0795803,
                     0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1], np.float32),
    "bnb_fp4": np.array([sign * n / 192 for sign in (1, -1) for n in (0, 1, 128, 192, 64, 96, 32, 48)], np.float32),
}  # fmt: skip
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float64)


def up_to(a: int, b: int) -> int:
    return -(-a // b) * b


def number(raw: np.ndarray, type_: str) -> np.ndarray:
    """Bytes [.., size of type_] -> float64 [..]. e4m3 is 2^-8 times its number: the f16 with its bits (2.8)."""
    raw = np.ascontiguousarray(raw)
    if type_ == "e8m0":
        return np.ldexp(1.0, raw[..., 0].astype(np.int32) - 127)
    if type_ == "e4m3":  # sign, 4 bits of exponent, 3 after the point
        bits = raw[..., 0].astype(np.int32)
        exponent, fraction = bits >> 3 & 15, bits & 7
        magnitude = np.ldexp(
            np.where(exponent, 8 + fraction, fraction).astype(np.float64), np.maximum(exponent, 1) - 10 - 8
        )
        return np.where(bits & 0x80, -magnitude, magnitude)
    if type_ == "bf16":
        return (raw.view("<u2")[..., 0].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view({"f16": "<f2", "f32": "<f4", "i32": "<i4"}[type_])[..., 0].astype(np.float64)


class Matrix:
    """Sizes of the panels of one matrix of N rows and K columns (2.1 to 2.8)."""

    def __init__(self, p: Projection, n: int, k: int):
        self.p, self.n, self.k = p, n, k
        self.nr, self.bits = PANELS[p.format]
        self.two_levels = p.format in GGML
        self.integer = p.format in ("int4", "int8") or self.two_levels
        self.by_column = p.format in ("fp8_e4m3", "bf16", "f16")
        self.grouped = self.two_levels or not self.integer or bool(p.zero_points) or p.group_size != -1
        # Groups of 16 come two to a block of 32 columns, where a product is over pieces of 32 (2.7).
        self.groups_a_block = 2 if p.group_size == 16 and not self.by_column else 1
        self.kp = up_to(k, 32) if p.group_size == -1 else up_to(k, p.group_size * self.groups_a_block)
        self.block = self.kp if p.group_size == -1 else p.group_size * self.groups_a_block
        self.blocks = self.kp // self.block
        self.code_bytes = self.nr * self.block * self.bits // 8
        per_group = SCALE_BYTES[p.scale_type] + p.zero_points if self.grouped else 0
        self.block_bytes = self.code_bytes + self.nr * self.groups_a_block * per_group
        self.tail_bytes = 4 * self.nr * (2 if self.integer and self.grouped else 3)
        self.panel_bytes = self.blocks * self.block_bytes + self.tail_bytes
        self.panels = -(-n // self.nr)

    def rows(self, by_panel: np.ndarray) -> np.ndarray:
        """[panels, nr, ..] -> [N, ..]."""
        return by_panel.reshape(-1, *by_panel.shape[2:])[: self.n]

    def codes(self, blocks: np.ndarray) -> np.ndarray:
        """Bytes [panels, blocks, code_bytes] -> codes, unsigned [N, K] (2.3, 2.7, 2.8)."""
        panels, count, nr = len(blocks), self.blocks, self.nr
        if self.by_column:
            q = np.ascontiguousarray(blocks).view("<u1" if self.bits == 8 else "<u2")
            return self.rows(q.reshape(panels, self.kp, nr).transpose(0, 2, 1))[:, : self.k]
        if self.bits == 8:
            q = (blocks ^ 0x80).reshape(panels, count * self.block // 8, nr, 8).transpose(0, 2, 1, 3)
            return self.rows(q.reshape(panels, nr, self.kp))[:, : self.k]
        pairs = (blocks ^ (0x88 if self.integer else 0)).reshape(panels, self.kp // 32, 2, nr, 8)  # c, s, r, i
        q = np.stack([pairs & 15, pairs >> 4], axis=2).transpose(0, 4, 1, 2, 3, 5)  # r, c, 16 further or not, s, i
        return self.rows(q.reshape(panels, nr, self.kp))[:, : self.k]

    def per_group(self, raw: np.ndarray, size: int) -> np.ndarray:
        """Bytes [panels, blocks, groups of a block * nr * size] -> bytes [N, groups that have columns, size]."""
        parts = raw.reshape(self.panels, self.blocks, self.groups_a_block, self.nr, size).transpose(0, 3, 1, 2, 4)
        group = self.kp if self.p.group_size == -1 else self.p.group_size
        return self.rows(parts.reshape(self.panels, self.nr, -1, size))[:, : -(-self.k // group)]

    def decode(self, data: np.ndarray) -> Weights:
        """Bytes [panels, panel_bytes] -> what they mean, without what stands behind the panels."""
        if self.two_levels:
            return self.decode_two_levels(data)
        p, body = self.p, data[:, : -self.tail_bytes].reshape(self.panels, self.blocks, self.block_bytes)
        tail = data[:, -self.tail_bytes :].reshape(self.panels, -1, self.nr, 4)
        bias = self.rows(number(tail[:, -1], "f32"))
        sums, second = self.rows(tail[:, 0]), self.rows(number(tail[:, 1], "f32"))
        q = self.codes(body[:, :, : self.code_bytes])
        at = self.code_bytes + self.nr * self.groups_a_block * SCALE_BYTES[p.scale_type]
        if self.grouped:
            scales = number(self.per_group(body[:, :, self.code_bytes : at], SCALE_BYTES[p.scale_type]), p.scale_type)
        else:
            scales = second[:, None] * (16 if p.format == "int4" else 1)
        if p.format in ("mxfp4", "nvfp4"):
            values = E2M1_DOUBLED[q]
        elif self.by_column:
            raw = np.ascontiguousarray(q)[..., None].view(np.uint8)
            values = number(raw, "e4m3" if p.format == "fp8_e4m3" else p.format)
        else:
            zeros = np.full(scales.shape, 8 if self.bits == 4 else 128)
            if p.zero_points:
                zeros = self.per_group(body[:, :, at:], 1)[..., 0].astype(np.int64)
            group = self.k if p.group_size == -1 else p.group_size
            values = q.astype(np.float64) - np.repeat(zeros, group, axis=1)[:, : self.k]
        found = Weights(
            p.format, p.group_size, bool(p.zero_points), values, scales, None if self.integer else second, bias
        )
        self.check_sums(found, sums)
        return found

    def decode_two_levels(self, data: np.ndarray) -> Weights:
        """Decode panels with scales of two levels, or minima (2.10)."""
        body = data[:, : -self.tail_bytes].reshape(self.panels, self.blocks, self.block_bytes)
        tail = data[:, -self.tail_bytes :].reshape(self.panels, 2, 16, 4)
        chunk, values = 64 * self.bits, np.zeros((self.panels, 16, self.blocks, self.block))
        nibbles, pairs = self.bits & 4, self.bits & 2  # planes of each
        for column in range(self.block):
            c, j, i = column // 32, column % 32 // 4, column % 4
            at = c * chunk + 4 * np.arange(16) + i
            code = np.zeros((self.panels, self.blocks, 16))
            if self.bits == 8:
                code = body[:, :, at + 64 * j]
            if nibbles:
                code = code + (body[:, :, at + 64 * (j % 4)] >> (0 if j < 4 else 4) & 15)
            if pairs:
                code = code + (body[:, :, at + 64 * (nibbles + j // 4)] >> 2 * (j % 4) & 3) * 2**nibbles
            if self.bits & 1:
                code = code + (body[:, :, at + 64 * (nibbles + pairs)] >> j & 1) * 2 ** (nibbles + pairs)
            values[..., column] = code.transpose(0, 2, 1)
        levels = []
        table, scale_type = TABLES.get(self.p.format), self.p.scale_type
        minima = self.p.format != "q6_k" and table is None
        groups = self.block // (16 if self.p.format in ("q2_k", "q6_k") else 32)
        size, type_ = (4, "f32") if scale_type in ("f32", "f32_minima") else (2, "f16")
        if self.p.format in PLANES:  # a scale and a zero point of a block
            size = SCALE_BYTES[scale_type]
            end = self.code_bytes + 16 * size
            d = number(body[:, :, self.code_bytes : end].reshape(self.panels, self.blocks, 16, size), scale_type)
            zeros = body[:, :, end : end + 16] if self.p.zero_points else np.full(d.shape, 1 << (self.bits - 1))
            for product in (d, (d * zeros).astype(np.float32).astype(np.float64)):
                levels.append(np.repeat(self.rows(product.transpose(0, 2, 1)), groups, axis=1))
        for which in range(1 + minima if not levels else 0):
            at = self.code_bytes + 16 * size * which
            d = number(body[:, :, at : at + 16 * size].reshape(self.panels, self.blocks, 16, size), type_)
            at = self.code_bytes + 32 * (1 + minima) + 16 * groups * which
            if self.p.format == "q2_k":  # of both the same bytes
                at = self.code_bytes + 64
                n = body[:, :, at : at + 16 * groups] >> 4 * which & 15
            elif scale_type in ("f32", "f32_minima", "f16_minima"):
                n = np.ones((self.panels, self.blocks, 16 * groups), np.int8)
            else:
                n = np.ascontiguousarray(body[:, :, at : at + 16 * groups]).view(np.int8)
            product = n.reshape(self.panels, self.blocks, groups, 16) * d[:, :, None]
            levels.append(self.rows(product.transpose(0, 3, 1, 2).reshape(self.panels, 16, -1)))
        numbers = self.rows(values.reshape(self.panels, 16, -1))[:, : self.k] - 32 * (self.p.format == "q6_k")
        found = Weights(
            self.p.format,
            self.block // groups,
            False,
            numbers if table is None else table.astype(np.float64)[numbers.astype(np.int64)],
            levels[0],
            None,
            self.rows(number(tail[:, 1], "f32")),
            minima=levels[1] if minima else None,
        )
        self.check_sums(found, self.rows(tail[:, 0]))
        return found

    def check_sums(self, m: Weights, stored: np.ndarray) -> None:
        """Row sums, bytes [N, 4], are those of the codes (2.4, 2.7, 2.8)."""
        if m.channelwise:
            found, want, error = number(stored, "i32"), m.values.sum(1) * (16 if self.bits == 4 else 1), 0
        else:
            (want, error), found = m.row_sums(), number(stored, "f32")
            if self.by_column or m.format in TABLES:
                want, error = 0, 0
        if not (np.abs(found - want) <= error).all():
            raise AssertionError(f"row sums are {found}, those of the codes {want}")


def part(row: np.ndarray, at: int, k: int, index: int, type_: str) -> np.ndarray:
    """Vector ``index`` of K numbers of four bytes: each starts at a multiple of 64 (1)."""
    start = at + index * up_to(4 * k, 64)
    return row[start : start + 4 * k].view(type_)


def decode_row(p: Projection, halves: int, n: int, k: int, row: np.ndarray) -> list[tuple[Weights, np.ndarray | None]]:
    """One expert's row: for each matrix (gate and up, or one) itself and its pre-scales as stored (1, 2.6, 2.9)."""
    geometry = Matrix(p, n, k)
    end = geometry.panels * halves * geometry.panel_bytes
    data = row[:end].reshape(geometry.panels, halves, geometry.panel_bytes)
    inputs = up_to(end, 64)
    pre_scales = inputs + (64 if p.activation_format in ("fp8_tensor", "nvfp4") else 0)
    perms = pre_scales + p.pre_scale * up_to(4 * k, 64)
    if len(row) != perms + p.perm * up_to(4 * k, 64):
        raise AssertionError(f"a row has {len(row)} bytes, FORMAT.md gives {perms + p.perm * up_to(4 * k, 64)}")
    found = []
    for i in range(halves):
        m, changes = geometry.decode(data[:, i]), {}
        if p.activation_format in ("fp8_tensor", "nvfp4"):
            changes["stored"] = float(row[inputs : inputs + 8].view("<f4")[i])
        if p.perm:
            changes["perm"] = part(row, perms, k, min(i, p.perm - 1), "<i4")
        pre_scale = part(row, pre_scales, k, min(i, p.pre_scale - 1), "<f4") if p.pre_scale else None
        found.append((replace(m, **changes), pre_scale))
    return found


def moe(spec: MoESpec, w13: np.ndarray, w2: np.ndarray) -> list[tuple[Weights | None, Weights, Weights]]:
    """Gate, up and down of each expert of a QuantMoE node, from its rows: uint8 [E, row bytes]."""
    return [expert(spec, *rows) for rows in zip(w13, w2, strict=True)]


def expert(spec: MoESpec, w13: np.ndarray, w2: np.ndarray) -> tuple[Weights | None, Weights, Weights]:
    h, i = spec.hidden_size, spec.intermediate_size
    sides = [replace(m, pre_scale=pre) for m, pre in decode_row(spec.w13, 1 + spec.gated, i, h, w13)]
    down = replace(down_of(spec.w2, h, i, w2), hadamard=spec.w2_hadamard)
    if down.perm is not None:  # row j of gate and up is row perm[j] of the checkpoint's (2.6)
        sides = [by_original_row(m, np.argsort(down.perm)) for m in sides]
    return sides[0] if spec.gated else None, sides[-1], down


def linear(spec: LinearSpec, w: np.ndarray) -> Weights:
    """The matrix of a QuantLinear node, from uint8 [1, row bytes]."""
    return down_of(spec.w, spec.out_features, spec.in_features, w[0])


def down_of(p: Projection, n: int, k: int, row: np.ndarray) -> Weights:
    """A w2, whose pre-scales are in the order of its columns (2.9)."""
    ((m, pre_scale),) = decode_row(p, 1, n, k, row)
    if pre_scale is not None and m.perm is not None:
        pre_scale = pre_scale[np.argsort(m.perm)]
    return replace(m, pre_scale=pre_scale)


def by_original_row(m: Weights, order: np.ndarray) -> Weights:
    names = (name for name in ("values", "scales", "bias", "multiplier", "minima") if getattr(m, name) is not None)
    return replace(m, **{name: getattr(m, name)[order] for name in names})


def scores(spec: RoutingSpec, x: np.ndarray) -> Span:
    """s of ops/moe_routing.def and op.def for the logits x [T, E]."""
    if spec.method == "softmax_topk":
        return softmax(x)
    return sigmoid(x) if spec.method == "sigmoid_topk" else Span(x, np.zeros_like(x))


def softmax(x: np.ndarray) -> Span:
    """Over the last axis: exp is within 4u, of an argument that was rounded, and at least exp(-87)."""
    down = np.minimum(x.max(-1, keepdims=True) - x, 1e4)
    e = np.exp(-down)
    error = e * (4 + down) * U + math.exp(-87)
    total = e.sum(-1, keepdims=True)
    of_total = error.sum(-1, keepdims=True) + U * e.cumsum(-1).sum(-1, keepdims=True)
    s = e / total
    return Span(s, ((error + s * of_total) / total + U * s) * SECOND)


def sigmoid(x: np.ndarray) -> Span:
    with np.errstate(over="ignore"):
        s = 1 / (1 + np.exp(-x))
    return Span(s, s * SIGMOID + SMALLEST_SIGMOID)


def check_routing(
    spec: RoutingSpec, logits: np.ndarray, bias: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> None:
    """MoERouting's outputs are some that it allows: where float32 may tie or exchange two scores, either order is.

    Args:
        logits: [T, E + shared_gate]. bias: float32 [E]. ids, weights: [T, top_k + shared_experts], as found.
    """
    x, gate = np.split(logits.astype(np.float64), [spec.num_experts], axis=1)
    ids, shared_ids = np.split(ids, [spec.top_k], axis=1)
    weights, shared = np.split(weights, [spec.top_k], axis=1)
    assert (shared_ids == np.arange(spec.num_experts, spec.num_experts + spec.shared_experts)).all(), (
        f"shared: ids {shared_ids}"
    )
    if spec.shared_gate:
        full = sigmoid(gate)
        assert_within(shared, Span(*(np.broadcast_to(part, shared.shape) for part in full)))
    else:
        assert (shared == 1).all(), f"shared: weights {shared}"
    for t, row in enumerate(x):
        if np.isnan(row).any():
            assert (ids[t] == np.arange(spec.top_k)).all(), f"token {t}: ids {ids[t]} of a logit that is not a number"
            assert np.isnan(weights[t]).all(), f"token {t}: weights {weights[t]} of a logit that is not a number"
            continue
        s, error = scores(spec, row)
        _check_selection(spec, s, error, bias.astype(np.float64), ids[t], f"token {t}")
        assert_within(weights[t], routed_weights(spec, row[ids[t]], Span(s[ids[t]], error[ids[t]])))


def precedes(value: np.ndarray, error: np.ndarray, same: np.ndarray) -> np.ndarray:
    """[i, j]: whether i certainly comes before j; those that are the ``same`` come in ascending order."""
    ascending = np.arange(len(value))[:, None] < np.arange(len(value))
    apart = value[:, None] - error[:, None] > value + error
    return np.where(same, ascending, apart)


def _check_selection(
    spec: RoutingSpec, s: np.ndarray, error: np.ndarray, bias: np.ndarray, ids: np.ndarray, what: str
) -> None:
    choice = (s + bias).astype(np.float32).astype(np.float64)
    exact = spec.method in ("topk_softmax", "topk_sigmoid", "topk")
    error = np.zeros_like(choice) if exact else error + 2 * U * np.abs(choice)
    same = choice[:, None] == choice if exact else (s[:, None] == s) & (bias[:, None] == bias)
    before = precedes(choice, error, same)
    groups, size = spec.n_group, len(s) // spec.n_group
    best = np.sort(choice.reshape(groups, size), axis=1)[:, -2:].astype(np.float32).sum(1).astype(np.float64)
    doubt = np.zeros(groups) if exact else 2 * error.reshape(groups, size).max(1) + U * np.abs(best)
    first = precedes(best, doubt, (best[:, None] == best) & (doubt == 0))
    possible = first.sum(0) < spec.topk_group
    certain = (~first).sum(1) <= spec.topk_group  # itself is among those that it does not precede
    possible, certain = np.repeat(possible, size), np.repeat(certain, size)
    chosen = np.zeros(len(s), bool)
    chosen[ids] = True
    assert chosen.sum() == spec.top_k, f"{what}: ids {ids} are not different"
    assert possible[ids].all(), f"{what}: ids {ids} are of groups that are not kept"
    assert not before[np.ix_(certain & ~chosen, chosen)].any(), f"{what}: ids {ids} lack better ones"
    order = before[np.ix_(ids, ids)]
    assert not np.tril(order, -1).any(), f"{what}: ids {ids} are not in descending order"


def routed_weights(spec: RoutingSpec, x: np.ndarray, s: Span) -> Span:
    """[top_k], of selected logits x and scores s, best first."""
    if spec.method == "topk_softmax":
        s = softmax(x)
    elif spec.method == "topk_sigmoid":
        s = sigmoid(x)
    w, error = s
    if spec.renormalize:
        sums = 1e-20 + w.cumsum()
        doubt = error.sum() + U * np.abs(sums).sum()
        if doubt > abs(sums[-1]) / 2**10:  # logits that cancel
            return Span(w, np.full_like(w, np.inf))
        w = w / sums[-1]
        error = ((error + np.abs(w) * doubt) / abs(sums[-1]) + U * np.abs(w)) * SECOND
    w = w * np.float64(np.float32(spec.routed_scaling_factor))
    return Span(w, (error * abs(spec.routed_scaling_factor) + U * np.abs(w)) * SECOND + TINY)
