"""CausalConv, GatedDelta and StateSpace in float64, with a bound on how far a kernel may be from it; ops/*.def, as in
arithmetic.py.

The error of GatedDelta's state is bounded for each of its columns as a whole (2-norm over the K rows): a token takes an
error e to (1 - beta k k^T) D e, whose norm is no larger than max(D) times that of e, as |k| <= 1 and 0 <= beta <= 2,
and adds what its own operations err. StateSpace takes e to d e, so that of its state is bounded number by number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from support.operators import native_kernels as native
from support.operators.arithmetic import SECOND, SIGMOID, TINY, Span, U, assert_within
from support.operators.specs import conv_spec, delta_spec, space_spec

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.op import ConvSpec, DeltaSpec, SpaceSpec
from quantmoe.custom_ops.ops.causal_conv import causal_conv
from quantmoe.custom_ops.ops.gated_delta import gated_delta
from quantmoe.custom_ops.ops.state_space import state_space

#: of a batch: right padding, left padding, nothing new, from nothing, everything
RAGGED = [[0, 5, 7], [3, 6, 2], [4, 0, 17], [1, 8, 0], [0, 9, 300]]
CONVS = {
    "4": conv_spec(40),
    "4-none": conv_spec(300, activation="none"),
    "2": conv_spec(257, width=2),
    "3": conv_spec(256, width=3),
    "12": conv_spec(7, width=12),
    "128": conv_spec(3, width=128, activation="none"),
    "part": replace(conv_spec(40), x_size=61),
    "middle": replace(conv_spec(40), x_size=61, x_offset=20),
}
DELTAS = {
    "plain": delta_spec(2, 4, 32),
    "one-head": delta_spec(1, 1, 16),
    "three-a-key": delta_spec(2, 6, 16),
    "wide-values": delta_spec(1, 2, 16, v_head_size=144),
    "odd-widths": delta_spec(2, 4, 19, v_head_size=37),
    "narrow": delta_spec(1, 2, 1, v_head_size=1),
    "decay-per-key": delta_spec(2, 2, 24, decay_per_key=1, gate="sigmoid"),
    "negative": delta_spec(2, 4, 32, beta_scale=2.0),
    "parts": delta_spec(2, 4, 32, a_size=9, a_offset=5, b_size=4, z_size=200, z_offset=71),
    "parts-decay-per-key": delta_spec(2, 2, 24, decay_per_key=1, a_size=57, a_offset=9, b_size=5, b_offset=1),
}
SPACES = {
    "plain": space_spec(2, 4, 32, 16),
    "one-head": space_spec(1, 1, 16, 32),
    "one-norm": space_spec(2, 6, 16, 16, norm_size=96),
    "norm-a-head": space_spec(2, 4, 16, 48, norm_size=48),
    "odd-widths": space_spec(2, 4, 19, 37),
    "narrow": space_spec(1, 2, 1, 1),
    "parts": space_spec(2, 4, 32, 16, dt_size=9, dt_offset=5, z_size=150, z_offset=71),
}
#: exp is within 4u; log(1 + u) is a quotient, a square, fused operations, a product and what the series lacks: 14u
EXP, SOFTPLUS = 4 * U, 14 * U
#: exponents are clamped to -87, and a decay below e^-60 is 0
SMALLEST, NO_DECAY = np.exp(-87.0), np.exp(-60.0)


class Rows:
    """Inputs of which ``PER_TOKEN`` have tokens, and ``past`` a state for each row."""

    PER_TOKEN: ClassVar[tuple[str, ...]]
    spec: Any
    rows: np.ndarray
    tensors: Any

    def run(self, **options: Any) -> Any:
        return native.run(self.spec, *self.tensors, **options)

    def tokens(self, at: slice, rows: list[list[int]]) -> Any:
        """Only some of the new tokens."""
        cut = {name: getattr(self, name)[:, at] for name in self.PER_TOKEN}
        return replace(self, rows=np.array(rows, np.int32).reshape(-1, 3), **cut)  # type: ignore[type-var]

    def row(self, b: int) -> Any:
        """Row b alone, without padding."""
        begin, count, past = self.rows[b].tolist()
        cut = {name: getattr(self, name)[b : b + 1] for name in (*self.PER_TOKEN, "past")}
        alone = replace(self, **cut)  # type: ignore[type-var]
        return alone.tokens(slice(begin, begin + count), [[0, count, past]])


@dataclass(frozen=True)
class Conv(Rows):
    """A call's inputs."""

    PER_TOKEN = ("x",)
    spec: ConvSpec
    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    past: np.ndarray
    rows: np.ndarray

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return self.x, self.weight, self.bias, self.past, self.rows

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return causal_conv(self.spec, *self.tensors)


@dataclass(frozen=True)
class Delta(Rows):
    """A call's inputs."""

    PER_TOKEN = ("qkv", "a", "b", "z")
    spec: DeltaSpec
    qkv: np.ndarray
    a: np.ndarray
    b: np.ndarray
    z: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray
    past: np.ndarray
    rows: np.ndarray

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return self.qkv, self.a, self.b, self.z, self.a_log, self.dt_bias, self.norm, self.past, self.rows

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return gated_delta(self.spec, *self.tensors)

    def own(self) -> Delta:
        """Without what a, b and z are parts of."""
        spec, heads = self.spec, self.spec.num_v_heads
        sizes = {
            "a": heads * (spec.k_head_size if spec.decay_per_key else 1),
            "b": heads,
            "z": heads * spec.v_head_size,
        }
        offsets = {name: getattr(spec, f"{name}_offset") for name in sizes}
        cut = {name: getattr(self, name)[..., at : at + sizes[name]] for name, at in offsets.items()}
        return replace(self, **cut)


@dataclass(frozen=True)
class Space(Rows):
    """A call's inputs."""

    PER_TOKEN = ("xbc", "dt", "z")
    spec: SpaceSpec
    xbc: np.ndarray
    dt: np.ndarray
    z: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    d: np.ndarray
    norm: np.ndarray
    past: np.ndarray
    rows: np.ndarray

    @property
    def tensors(self) -> tuple[np.ndarray, ...]:
        return self.xbc, self.dt, self.z, self.a_log, self.dt_bias, self.d, self.norm, self.past, self.rows

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        return state_space(self.spec, *self.tensors)

    def own(self) -> Space:
        """Without what dt and z are parts of."""
        spec = self.spec
        dt, z = self.dt[..., spec.dt_offset :], self.z[..., spec.z_offset :]
        return replace(self, dt=dt[..., : spec.num_heads], z=z[..., : spec.num_heads * spec.head_size])


def conv_inputs(
    spec: ConvSpec, rows: list[list[int]], tokens: int, dtype: Any = np.float32, bias: bool = True, seed: int = 0
) -> Conv:
    """Random ones."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return Conv(
        spec,
        draw(len(rows), tokens, spec.x_size or spec.channels).astype(dtype),
        draw(spec.channels, spec.width) / 2,
        draw(spec.channels if bias else 0),
        draw(len(rows), spec.channels, spec.width - 1).astype(dtype),
        np.array(rows, np.int32).reshape(-1, 3),
    )


def delta_inputs(
    spec: DeltaSpec,
    rows: list[list[int]],
    tokens: int,
    dtype: Any = np.float32,
    decay: tuple[float, float] = (0.01, 16.0),
    seed: int = 0,
) -> Delta:
    """Random ones. decay: the range of exp(a_log), transformers' initial one unless told."""
    rng, batch, heads = np.random.default_rng(seed), len(rows), spec.num_v_heads
    decays = heads * (spec.k_head_size if spec.decay_per_key else 1)
    width = 2 * spec.num_k_heads * spec.k_head_size + heads * spec.v_head_size
    widths = width, spec.a_size or decays, spec.b_size or heads, spec.z_size or heads * spec.v_head_size

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return Delta(
        spec,
        *(draw(batch, tokens, n).astype(dtype) for n in widths),
        np.log(rng.uniform(*decay, heads)).astype(np.float32),
        draw(decays),
        1 + draw(spec.v_head_size) / 4,
        draw(batch, heads, spec.k_head_size, spec.v_head_size) / 4,
        np.array(rows, np.int32).reshape(-1, 3),
    )


def space_inputs(
    spec: SpaceSpec,
    rows: list[list[int]],
    tokens: int,
    dtype: Any = np.float32,
    decay: tuple[float, float] = (0.01, 16.0),
    seed: int = 0,
) -> Space:
    """As :func:`delta_inputs`."""
    rng, (batch, heads), width = (
        np.random.default_rng(seed),
        (len(rows), spec.num_heads),
        spec.num_heads * spec.head_size,
    )
    widths = width + 2 * spec.num_groups * spec.state_size, spec.dt_size or heads, spec.z_size or width

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return Space(
        spec,
        *(draw(batch, tokens, n).astype(dtype) for n in widths),
        np.log(rng.uniform(*decay, heads)).astype(np.float32),
        draw(heads),
        draw(heads),
        1 + draw(width) / 4,
        draw(batch, heads, spec.state_size, spec.head_size) / 4,
        np.array(rows, np.int32).reshape(-1, 3),
    )


def conv_span(a: Conv) -> Span:
    """What y may be."""
    a = replace(a, x=a.x[..., a.spec.x_offset :][..., : a.spec.channels])
    y, error = np.zeros(a.x.shape), np.zeros(a.x.shape)
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        before = a.past[b] if past else np.zeros_like(a.past[b])
        seen = np.concatenate([before.T, a.x[b, begin : begin + count]]).astype(np.float64)  # [W - 1 + count, C]
        total = np.zeros((count, a.spec.channels)) + (a.bias.astype(np.float64) if a.bias.size else 0)
        wrong = np.zeros(total.shape)
        for j in range(a.spec.width):
            total = total + seen[j : j + count] * a.weight[:, j].astype(np.float64)
            wrong += U * np.abs(total) + TINY
        at = np.s_[b, begin : begin + count]
        y[at], error[at] = total, wrong
    if a.spec.activation == "silu":  # whose slope is at most 1.1
        silu = y * reference.sigmoid(y)
        error = 1.1 * error + (SIGMOID + U) * np.abs(silu) + np.abs(y) * SMALLEST
        y = silu
    return Span(y, error * SECOND)


@dataclass
class Token:
    """A token's operands by value head: [H, ..] of row b, with their errors."""

    q: Span
    k: Span
    v: np.ndarray
    decay: Span
    beta: Span


def decays(given: np.ndarray, bias: np.ndarray, a_log: np.ndarray) -> tuple[Span, Span]:
    """softplus(given + bias), and the decay of it and exp(a_log)."""
    step = given.astype(np.float64) + bias
    soft = np.logaddexp(0, step)
    soft_error = SOFTPLUS * soft + U * np.abs(step) + SMALLEST
    rate = np.repeat(np.exp(a_log.astype(np.float64)), len(step) // len(a_log))
    g = rate * soft
    g_error = rate * soft_error + (EXP + U) * g
    decay = np.exp(-g)
    return Span(soft, soft_error), Span(
        decay, decay * np.expm1(g_error + EXP) + np.where(g + g_error > 60, NO_DECAY, 0)
    )


def prepared(a: Delta, b: int, t: int) -> Token:
    spec, heads, key = a.spec, a.spec.num_v_heads, a.spec.k_head_size
    x = a.qkv[b, t].astype(np.float64)
    q, k, v = np.split(x, [spec.num_k_heads * key, 2 * spec.num_k_heads * key])
    q, k = (np.repeat(x.reshape(spec.num_k_heads, key), heads // spec.num_k_heads, 0) for x in (q, k))
    squares = (-(-key // 16) + 4) * U  # positive terms: 16 lanes, then four levels of a tree

    def unit(x: np.ndarray, scale: float, products: int) -> Span:
        y = x / np.sqrt((x * x).sum(1, keepdims=True) + np.float32(spec.l2_epsilon)) * scale
        return Span(y, np.abs(y) * ((squares + U) / 2 + (2 + products) * U) + TINY)

    _, step_decay = decays(a.a[b, t], a.dt_bias, a.a_log)
    decay, decay_error = (
        np.broadcast_to(x.reshape(heads, -1), (heads, key)) for x in (step_decay.value, step_decay.error)
    )
    beta = np.float32(spec.beta_scale) * reference.sigmoid(a.b[b, t].astype(np.float64))
    return Token(
        unit(q, float(np.float32(spec.scale)), 2),
        unit(k, 1.0, 1),
        v.reshape(heads, -1),
        Span(decay, decay_error),
        Span(beta, (SIGMOID + U) * beta + SMALLEST),
    )


def product(x: Span, y: Span) -> Span:
    """Elementwise, rounded once."""
    value = x.value * y.value
    return Span(value, np.abs(x.value) * y.error + x.error * np.abs(y.value) + U * np.abs(value) + TINY)


def delta_span(a: Delta) -> tuple[Span, Span]:
    """What y and present_state may be."""
    a = a.own()
    spec, heads, value = a.spec, a.spec.num_v_heads, a.spec.v_head_size
    y = np.zeros((*a.qkv.shape[:2], heads, value))
    error = np.zeros(y.shape)
    states, state_errors = a.past.astype(np.float64), np.zeros(a.past.shape)
    for row, (begin, count, past) in enumerate(a.rows.tolist()):
        if not count:
            continue
        state = states[row] if past else np.zeros(states[row].shape)
        column = np.zeros((heads, value))  # the 2-norm of a column's error
        for t in range(begin, begin + count):
            token = prepared(a, row, t)
            kd, qd = product(token.k, token.decay), product(token.q, token.decay)
            kq = (token.k.value * token.q.value).sum(1)
            kq_error = (token.k.error * np.abs(token.q.value) + np.abs(token.k.value) * token.q.error).sum(1)
            kq_error += (-(-spec.k_head_size // 16) + 4) * U * np.abs(token.k.value * token.q.value).sum(1)
            size = np.abs(state)

            def summed(x: Span, state: np.ndarray = state, size: np.ndarray = size) -> Span:
                terms = (x.value[:, :, None] * state).cumsum(1)
                return Span(terms[:, -1], U * np.abs(terms).sum(1) + (x.error[:, :, None] * size).sum(1))

            m, o = summed(kd), summed(qd)
            gap = token.v - m.value
            gap_error = m.error + U * np.abs(gap)
            beta, beta_error = token.beta.value[:, None], token.beta.error[:, None]
            new = beta * gap
            new_error = beta * gap_error + beta_error * np.abs(gap) + U * np.abs(new) + TINY
            out = o.value + kq[:, None] * new
            out_error = o.error + kq_error[:, None] * np.abs(new) + np.abs(kq)[:, None] * new_error + U * np.abs(out)
            most = token.decay.value.max(1)[:, None]
            out_error += np.sqrt((token.q.value**2).sum(1))[:, None] * most * column
            decayed = token.decay.value[:, :, None] * state
            state = decayed + token.k.value[:, :, None] * new[:, None]
            local = token.decay.error[:, :, None] * size + U * np.abs(decayed) + U * np.abs(state) + 2 * TINY
            local += token.k.error[:, :, None] * np.abs(new)[:, None]
            local += np.abs(token.k.value)[:, :, None] * new_error[:, None]
            column = most * column + np.sqrt((local**2).sum(1))
            y[row, t], error[row, t] = out, out_error * SECOND
        states[row], state_errors[row] = state, np.broadcast_to(column[:, None], state.shape) * SECOND
    out = Span(y, error)
    return Span(gated(a, out), gated_error(a, out)), Span(states, state_errors)


def scales(a: Delta) -> tuple[np.ndarray, np.ndarray]:
    """The norm's weights times the gate, by token and value head, and the gate's relative error."""
    z = a.z.astype(np.float64).reshape(*a.z.shape[:2], a.spec.num_v_heads, a.spec.v_head_size)
    gate = reference.sigmoid(z) * (z if a.spec.gate == "silu" else 1)
    return gate * a.norm, (SIGMOID + U) * np.abs(gate * a.norm) + np.abs(a.norm) * (1 + np.abs(z)) * SMALLEST


def gated(a: Delta, o: Span) -> np.ndarray:
    scale, _ = scales(a)
    y = o.value / np.sqrt((o.value**2).mean(3, keepdims=True) + np.float32(a.spec.norm_epsilon)) * scale
    return y.reshape(a.z.shape)


def normed(o: Span, norm_epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """1 / sqrt(mean(o^2) + epsilon) over the last dimension, and its error."""
    size, epsilon = np.abs(o.value), float(np.float32(norm_epsilon))
    mean, n = (o.value**2).mean(3, keepdims=True), o.value.shape[3]
    spread = ((2 * size + o.error) * o.error).mean(3, keepdims=True)
    spread += (-(-n // 16) + 4 + 2) * U * (mean + spread) + U * epsilon
    r = 1 / np.sqrt(mean + epsilon)
    return r, 1 / np.sqrt(np.maximum(mean + epsilon - spread, 0) + TINY) - r + 2 * U * r


def gated_error(a: Delta, o: Span) -> np.ndarray:
    scale, scale_error = scales(a)
    size = np.abs(o.value)
    r, r_error = normed(o, a.spec.norm_epsilon)
    error = np.abs(scale) * (o.error * (r + r_error) + size * r_error) + scale_error * size * r
    error += 3 * U * np.abs(scale) * size * r + 3 * TINY
    return (error * SECOND).reshape(a.z.shape)


def space_span(a: Space, after: bool = False, parts: float = 0) -> tuple[Span, Span]:
    """What y and present_state may be. after: C meets the state after a token, in sixteen sums, as on CUDA.

    parts: what the chunked kernels' operands lose, of the sum of all that was added to a state, in absolute values and
    decayed: once in the state, and once more where C meets it.
    """
    a = a.own()
    spec, heads, groups = a.spec, a.spec.num_heads, a.spec.num_groups
    width, n = heads * spec.head_size, spec.state_size
    y, error = np.zeros(a.z.shape), np.zeros(a.z.shape)
    states, state_errors = a.past.astype(np.float64), np.zeros(a.past.shape)
    for row, (begin, count, past) in enumerate(a.rows.tolist()):
        if not count:
            continue
        state = states[row] if past else np.zeros(states[row].shape)
        wrong, most_state = np.zeros(state.shape), np.abs(state)
        for t in range(begin, begin + count):
            x, b, c = np.split(a.xbc[row, t].astype(np.float64), [width, width + groups * n])
            x = x.reshape(heads, -1)
            b, c = (np.repeat(part.reshape(groups, n), heads // groups, 0) for part in (b, c))
            step, decay = decays(a.dt[row, t], a.dt_bias, a.a_log)
            kept = Span(decay.value[:, None], decay.error[:, None])
            u = product(Span(x, np.zeros(x.shape)), Span(step.value[:, None], step.error[:, None]))
            query = product(Span(c, np.zeros(c.shape)), kept)
            terms = (query.value[:, :, None] * state).cumsum(1)
            out = terms[:, -1]
            out_error = U * np.abs(terms).sum(1) + (query.error[:, :, None] * np.abs(state)).sum(1)
            out_error += ((np.abs(query.value) + query.error)[:, :, None] * wrong).sum(1)
            p = (c * b).sum(1)[:, None]
            p_error = (-(-n // 16) + 4) * U * np.abs(c * b).sum(1)[:, None]
            out = out + p * u.value
            out_error += p_error * (np.abs(u.value) + u.error) + np.abs(p) * u.error + U * np.abs(out)
            old = product(Span(state, wrong), Span(kept.value[:, :, None], kept.error[:, :, None]))
            added = b[:, :, None] * u.value[:, None]
            state = old.value + added
            wrong = old.error + np.abs(b)[:, :, None] * u.error[:, None] + U * np.abs(state) + TINY
            if after:
                out = (c[:, :, None] * state).sum(1)
                most_state = kept.value[:, :, None] * most_state + np.abs(added)
                lost = wrong + (-(-n // 16) + 4) * U * np.abs(state) + 2 * parts * most_state
                out_error = (np.abs(c)[:, :, None] * lost).sum(1)
            out = out + a.d.astype(np.float64)[:, None] * x
            out_error += U * np.abs(out) + TINY
            y[row, t], error[row, t] = out.reshape(-1), out_error.reshape(-1)
        states[row], state_errors[row] = state, (wrong + parts * most_state) * SECOND
    z = a.z.astype(np.float64)
    gate = z * reference.sigmoid(z)
    gate_error = (SIGMOID + U) * np.abs(gate) + np.abs(z) * SMALLEST
    parts = (*a.z.shape[:2], width // spec.norm_size, spec.norm_size)
    gated = product(Span(y, error), Span(gate, gate_error))
    o = Span(gated.value.reshape(parts), gated.error.reshape(parts))
    r, r_error = normed(o, spec.norm_epsilon)
    norm = np.abs(a.norm.astype(np.float64)).reshape(-1, spec.norm_size)
    size = np.abs(o.value)
    most = norm * (o.error * (r + r_error) + size * r_error) + 3 * U * norm * size * r + 3 * TINY
    value = (o.value * r).reshape(a.z.shape) * a.norm
    return Span(value, (most * SECOND).reshape(a.z.shape)), Span(states, state_errors)


def check_conv(a: Conv, got: tuple[np.ndarray, np.ndarray]) -> None:
    """A kernel's y and state against what they have to be; the reference's, too."""
    want = conv_span(a)
    other, state = a.reference()
    assert_within(got[0], want)
    np.testing.assert_allclose(other, want.value, rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(got[1], state)


def check_delta(a: Delta, got: tuple[np.ndarray, np.ndarray]) -> None:
    _check(a, got, *delta_span(a))


def check_space(a: Space, got: tuple[np.ndarray, np.ndarray]) -> None:
    _check(a, got, *space_span(a))


def _check(a: Delta | Space, got: tuple[np.ndarray, np.ndarray], y: Span, state: Span) -> None:
    assert_within(got[0], y)
    assert_within(got[1], state)
    for found, want in zip(a.reference(), (y, state), strict=True):
        np.testing.assert_allclose(found, want.value, rtol=1e-9, atol=1e-11)


def assert_bytes(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.tobytes() == y.tobytes()


def check_window(a: Conv | Delta | Space, window: int, lanes: int = 3) -> None:
    """A node with a window of states: slots have the bytes of calls that end there, the others are zeros, or in place
    what they were; the last one is all that is read.

    Args:
        a: without a window.
    """
    spec = replace(a.spec, state_window=window)
    past = np.full((window, *a.past.shape), np.nan, a.past.dtype)
    past[-1] = a.past
    want, kept = np.zeros_like(past), past.copy()
    for b, (_, count, before) in enumerate(a.rows.tolist()):
        for slot in range(window - min(count, window), window):
            made = count - window + 1 + slot
            _, state = a.row(b).tokens(slice(0, made), [[0, made, before]]).run()
            want[slot, b] = kept[slot, b] = state[0]
        if not count:
            want[-1, b] = a.past[b]
    y, _ = a.run()
    whole: Any = replace(a, spec=spec, past=past)
    assert_bytes(whole.run(lanes=lanes), (y, want))
    memory = past.copy()
    assert_bytes(replace(whole, past=memory).run(present=memory), (y, kept))
    other, state = whole.reference()
    plain, last = a.reference()
    assert_bytes((other, state[-1]), (plain, last))
    np.testing.assert_allclose(state, want, rtol=1e-3, atol=1e-3)
