"""CachedAttention in float64, with a bound on how far a kernel may be from it, by its .def, as in arithmetic.py.

Every operation's error is counted where it is done. What a kernel has stored is checked by itself; outputs are then
held to what follows from the stored keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from support.operators import native_kernels as native
from support.operators.arithmetic import ONE_PLUS, SECOND, TINY, Span, U, assert_within
from support.operators.specs import attention_spec

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.op import AttentionSpec

BLOCK = 256
#: of a batch: right padding, left padding, nothing new, a block's border, everything
RAGGED = [[0, 5, 250], [3, 6, 0], [4, 0, 17], [8, 1, 255], [0, 9, 256]]
SPECS = {
    "plain": attention_spec(4, 2, 32),
    "one-head": attention_spec(3, 3, 16),
    "nine-heads": attention_spec(9, 1, 32),
    "seventy-heads": attention_spec(70, 1, 16),
    "odd-widths": attention_spec(6, 2, 19, v_head_size=37),
    "wide-keys": attention_spec(4, 2, 48, v_head_size=32),
    "rotary": attention_spec(4, 2, 32, rotary_size=32),
    "partial-rotary": attention_spec(4, 2, 32, rotary_size=10),
    "interleaved": attention_spec(4, 2, 32, rotary_size=12, rotary_interleaved=1),
    "norm-head": attention_spec(4, 2, 32, qk_norm="head", rotary_size=32),
    "norm-row": attention_spec(4, 2, 24, qk_norm="row", rotary_size=8),
    "softcap": attention_spec(4, 2, 32, softcap=3.0),
    "window": attention_spec(4, 2, 32, sliding_window=100),
    "window-1": attention_spec(4, 2, 32, sliding_window=1),
    "window-257": attention_spec(4, 2, 32, sliding_window=257),
    "chunks": attention_spec(4, 2, 32, chunk_size=7),
    "chunks-of-blocks": attention_spec(4, 2, 32, chunk_size=256),
    "latent": attention_spec(20, 1, 80, v_head_size=64, key_split=40, rotary_size=16, rotary_interleaved=1),
    "latent-of-two": attention_spec(6, 2, 37, v_head_size=24, key_split=5, rotary_size=12),
    "latent-split-late": attention_spec(130, 1, 48, v_head_size=32, key_split=32, sliding_window=70),
    "up": attention_spec(6, 1, 46, v_head_size=40, key_split=23, rotary_size=4, nope_size=3, out_size=5),
    "up-of-two": attention_spec(
        4, 2, 258, v_head_size=256, key_split=129, nope_size=1, out_size=16, sliding_window=200, softcap=3.0
    ),
    "up-wide": attention_spec(
        3, 1, 306, v_head_size=304, key_split=5, rotary_size=2, rotary_interleaved=1, nope_size=4, out_size=3
    ),
    "up-in-chunks": attention_spec(20, 1, 34, v_head_size=32, key_split=17, nope_size=2, out_size=1, chunk_size=100),
    "gated": attention_spec(4, 2, 32, rotary_size=32, gated=1),
    "gated-odd": attention_spec(6, 2, 19, v_head_size=71, qk_norm="row", gated=1),
    "window-in-chunks": attention_spec(4, 2, 32, sliding_window=5, chunk_size=64),
    # divisors of 303, so that the last slot of a test has a compressed key
    "compressed": attention_spec(20, 1, 32, rotary_size=8, qk_norm="head", sliding_window=100, compress_rate=3),
    "compressed-odd": attention_spec(6, 2, 19, softcap=3.0, compress_rate=101),
    "compressed-each": attention_spec(70, 1, 16, sliding_window=1, compress_rate=1, gated=1),
}
#: types of caches, or the cache_format of their codes
CACHES = [np.float32, np.float16, "int8", "fp8_e4m3", "int8_token"]
CODES = CACHES[2:]
#: exp is within 4u of the truth, and not below e^-87
EXP, SMALLEST = 4 * U, np.exp(-87.0)


#: inputs of which each token has its own part
PER_TOKEN = ("qkv", "cos", "sin", "selected")


@dataclass(frozen=True)
class Inputs:
    """Those of a call."""

    spec: AttentionSpec
    qkv: np.ndarray
    past: tuple[np.ndarray, np.ndarray]
    rows: np.ndarray
    length: int
    cos: np.ndarray
    sin: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    sinks: np.ndarray
    ups: tuple[np.ndarray, ...] = ()
    block_table: np.ndarray | None = None
    selected: np.ndarray | None = None

    @property
    def others(self) -> tuple[np.ndarray, ...]:
        return self.cos, self.sin, self.q_norm, self.k_norm, self.sinks

    def run(self, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        given = (self.rows, self.length, *self.others, self.ups, self.block_table, self.selected)
        return native.attention(self.spec, self.qkv, self.past, *given, **options)

    def reference(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        given, lists = (self.rows, self.length, *self.others, *self.ups), self.selected
        return reference.attention(
            self.spec, self.qkv, *self.past, *given, block_table=self.block_table, selected=lists
        )

    def tokens(self, at: slice, rows: list[list[int]]) -> Inputs:
        """Only some of the new tokens."""
        cut = {name: getattr(self, name)[:, at] for name in PER_TOKEN if getattr(self, name) is not None}
        return replace(self, rows=np.array(rows, np.int32), **cut)

    def row(self, b: int) -> Inputs:
        """Row b alone, without padding: its tokens that count."""
        begin, count, past = self.rows[b].tolist()
        alone = {name: getattr(self, name)[b : b + 1] for name in PER_TOKEN if getattr(self, name) is not None}
        key, value = (cache[b : b + 1, :, :past] for cache in self.past)
        return replace(self, past=(key, value), length=past + count, **alone).tokens(
            slice(begin, begin + count), [[0, count, past]]
        )


def inputs(
    spec: AttentionSpec,
    rows: list[list[int]],
    tokens: int,
    past: int,
    length: int,
    dtype: Any = np.float32,
    cache: Any = np.float32,
    seed: int = 0,
) -> Inputs:
    """Random ones. Scores have a spread of about 2. cache: one of CACHES; codes get scales that no power of two is, by
    which large numbers saturate, unless the spec has them."""
    rng, batch = np.random.default_rng(seed), len(rows)
    if cache in CODES and (spec.key_split or spec.compress_rate):  # which have no codes
        cache = np.float16
    if cache in CODES and spec.cache_format == "none":
        own = {"int8": (0.021, 0.017), "fp8_e4m3": (0.007, 0.0061), "int8_token": (1.0, 1.0)}[cache]
        spec = replace(spec, cache_format=cache, k_scale=own[0], v_scale=own[1])
    heads, groups, d, v = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def encoded(x: np.ndarray, scale: float) -> np.ndarray:
        return reference.encode_cache(spec, x, scale, cache if spec.cache_format == "none" else None)

    widths = {"none": (0, 0), "head": (d, d), "row": (heads * d, groups * d)}[spec.qk_norm]
    key, value = (spec.key_split, d - spec.key_split) if spec.key_split else (d, v)
    features = spec.gates_size + heads * spec.query_size + groups * d + (0 if spec.key_split else groups * v)
    return Inputs(
        spec,
        (draw(batch, tokens, features) * 1.4).astype(dtype),
        (
            encoded(draw(batch, groups, past, key), spec.k_scale),
            encoded(draw(batch, groups, past, value), spec.v_scale),
        ),
        np.array(rows, np.int32).reshape(batch, 3),
        length,
        *(draw(batch, tokens, spec.rotary_size // 2) for _ in range(2)),
        *(1 + draw(width) / 4 for width in widths),
        draw(heads),
        tuple((draw(heads, *size) / v**0.5).astype(dtype) for size in ((spec.nope_size, v), (v, spec.out_size)))
        if spec.nope_size
        else (),
    )


def selecting(a: Inputs, lists: int, size: int, own: bool = False) -> Inputs:
    """Return the call with random lists."""
    return replace(a, selected=random_lists(a.rows.tolist(), a.qkv.shape[1], lists, size, own))


def random_lists(rows: list[list[int]], tokens: int, lists: int, size: int, own: bool = False) -> np.ndarray:
    """Return random lists of at most ``size`` slots, ``lists`` a token. own: with a token's own slot."""
    rng = np.random.default_rng(3)
    selected = np.full((len(rows), tokens, lists, size), -1, np.int32)
    for b, (begin, count, past) in enumerate(rows):
        for i, j in np.ndindex(count, lists):
            p = past + i
            most = min(size - own, p + (not own))
            chosen = rng.choice(p + (not own), rng.integers(min(1 - own, most), most + 1), replace=False)
            chosen = np.sort(chosen).tolist() + [p] * own
            selected[b, begin + i, j, : len(chosen)] = chosen
    return selected


def selects(a: Inputs, b: int) -> bool:
    """Return whether a row has more tokens than a list."""
    return a.selected is not None and int(a.rows[b, 1:].sum()) > a.selected.shape[3]


def seen(a: Inputs, b: int, i: int) -> list[tuple[slice, np.ndarray, int]]:
    """Return heads of row b's i-th token that counts, the slots that they see, and the first one, or 0 of lists."""
    spec, (begin, _, past) = a.spec, a.rows[b].tolist()
    p = past + i
    if a.selected is None or not selects(a, b):
        low = max(p - spec.sliding_window + 1 if spec.sliding_window else 0, 0)
        low = max(low, p // spec.chunk_size * spec.chunk_size if spec.chunk_size else 0)
        return [(slice(None), np.arange(low, p + 1), low)]
    lists = a.selected[b, begin + i]
    each = spec.num_heads // len(lists)
    return [(slice(each * j, each * (j + 1)), own[own >= 0], 0) for j, own in enumerate(lists)]


def compressed(a: Inputs, b: int, i: int, slots: np.ndarray, present: list[np.ndarray]) -> np.ndarray:
    """Return the keys that row b's i-th token sees, [groups, keys, D]. slots: of a list, if it has one."""
    spec, p = a.spec, int(a.rows[b, 2]) + i
    listed = slots if selects(a, b) else np.arange(p + 1)
    window = np.arange(max(p - spec.sliding_window + 1 if spec.sliding_window else 0, 0), p + 1)
    parts = (present[1][b][:, listed[(listed + 1) % spec.compress_rate == 0]], present[0][b][:, window])
    return np.concatenate(parts, 1)


def ragged(spec: AttentionSpec, **types: Any) -> Inputs:
    return inputs(spec, RAGGED, tokens=9, past=260, length=265, **types)


def turned(spec: AttentionSpec, x: np.ndarray, weights: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> Span:
    """Queries or keys [B, S, heads, D], normed and rotated."""
    value = reference.rms_norm(spec, x, weights)
    error = np.zeros(x.shape)
    if spec.qk_norm != "none":
        n = x.shape[-1] * (x.shape[-2] if spec.qk_norm == "row" else 1)
        squares = (-(-n // 16) + 4) * U  # positive terms: 16 lanes, then four levels of a tree
        # mean and epsilon; the root, which halves a relative error; its inverse; two products
        error = np.abs(value) * ((squares + 2 * U) / 2 + 4 * U)
    bare = replace(spec, qk_norm="none")
    y = reference.rotate(bare, value, cos, sin)
    turning = np.zeros(x.shape[-1], bool)
    turning[: spec.rotary_size] = True
    # both products and their sum; |a c| + |b s| is the rotation of magnitudes with -|sin|
    first = np.arange(x.shape[-1]) < spec.rotary_size // 2
    if spec.rotary_interleaved:
        first = np.arange(x.shape[-1]) % 2 == 0
    sides = [reference.rotate(bare, a, np.abs(cos), s * np.abs(sin)) for a in (np.abs(value), error) for s in (-1, 1)]
    size, spread = (np.where(first, *sides[i : i + 2]) for i in (0, 2))
    return Span(y, np.where(turning, spread + U * size + U * np.abs(y) + 3 * TINY, error) * SECOND)


def stored(a: Inputs) -> tuple[Span, Span, Span]:
    """Queries, keys and values of the new tokens, [B, S, heads, width]. With a nope_size queries are what turns, then
    the features that k_up multiplies."""
    spec, x = a.spec, a.qkv.astype(np.float64)[..., a.spec.gates_size :]
    heads, groups, d = spec.num_heads, spec.kv_num_heads, spec.head_size
    parts = np.split(x, [heads * spec.query_size, heads * spec.query_size + groups * d], axis=2)
    sizes = (heads, spec.query_size), (groups, d), (groups, 0 if spec.key_split else spec.v_head_size)
    q, k, v = (p.reshape(*x.shape[:2], *size) for p, size in zip(parts, sizes, strict=True))
    q = np.roll(q, -spec.nope_size, axis=3)
    queries, keys = (turned(spec, p, w, a.cos, a.sin) for p, w in ((q, a.q_norm), (k, a.k_norm)))
    if spec.key_split:
        first, rest = (np.split(x, [spec.key_split], axis=3) for x in (keys.value, keys.error))
        return queries, Span(first[0], rest[0]), Span(first[1], rest[1])
    return queries, keys, Span(v, np.zeros(v.shape))


def numbers(spec: AttentionSpec, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel reads of a cache [.., n]: numbers float64, and scales [..] of a token and head, 1 where there are
    none."""
    ones = replace(spec, cache_format="int8" if spec.cache_format == "int8_token" else spec.cache_format)
    if spec.cache_format == "int8_token":
        own = np.ascontiguousarray(stored[..., -4:]).view(np.float32)[..., 0]
        return reference.decode_cache(ones, stored[..., :-4], 1.0), own.astype(np.float64)
    number = 2.0**-8 if spec.cache_format == "fp8_e4m3" else 1.0
    return reference.decode_cache(ones, stored, number), np.ones(stored.shape[:-1])


def factors(spec: AttentionSpec) -> tuple[float, float]:
    """What scores and values are multiplied by, in f32: scale and k_scale, v_scale."""
    number = np.float32(256 if spec.cache_format == "fp8_e4m3" else 1)
    return float(np.float32(spec.scale) * np.float32(spec.k_scale) * number), float(np.float32(spec.v_scale) * number)


def attend(
    spec: AttentionSpec,
    q: Span,
    caches: tuple[np.ndarray, np.ndarray],
    low: int,
    sinks: np.ndarray,
    wrong_caches: tuple[np.ndarray, np.ndarray] | None = None,
) -> Span:
    """One token: q [heads, D], stored keys and values [heads, slots from low on, ..] -> [heads, V].

    wrong_caches: by how much keys and values may be other numbers.
    """
    (keys, key_scales), (values, value_scales) = (numbers(spec, cache) for cache in caches)
    terms = q.value[:, None] * keys
    partial = np.abs(terms.cumsum(2))
    (scale, factor), softcap = factors(spec), float(np.float32(spec.softcap))
    score = terms.sum(2) * scale
    error = (U * partial.sum(2) + (q.error[:, None] * np.abs(keys)).sum(2)) * abs(scale) + U * np.abs(score)
    if wrong_caches is not None:
        error += ((np.abs(q.value) + q.error)[:, None] * wrong_caches[0]).sum(2) * abs(scale)
    error += TINY * terms.shape[2] * abs(scale)
    once = U if spec.cache_format == "int8_token" else 0.0  # one more product with a scale
    score, error = score * key_scales, (error + once * np.abs(score)) * np.abs(key_scales) + TINY
    if softcap:
        inside, error = score / softcap, error / softcap
        error += U * np.abs(inside) + ONE_PLUS
        score = softcap * np.tanh(inside)
        error = softcap * error + U * np.abs(score)
    top = np.maximum(score.max(1), sinks)[:, None]
    weight, sink = np.exp(score - top), np.exp(sinks - top[:, 0])
    # A weight is the exponential of what its score is below its block's largest, times one for each merge; their
    # arguments add up to score - top, and each is rounded, as is each product.
    blocks = (low + score.shape[1] - 1) // BLOCK - low // BLOCK + 1
    each = (EXP + 2 * U) * (blocks + 1)
    wrong = weight * np.expm1(error + U * np.abs(score - top) + each) + SMALLEST
    with np.errstate(invalid="ignore"):
        sink_wrong = np.where(sink > 0, sink * (U * np.abs(sinks - top[:, 0]) + each), 0) + SMALLEST
    total, total_error = weight.sum(1) + sink, wrong.sum(1) + sink_wrong
    total_error += (16 + 4 + 2 * blocks) * U * total
    wrong = (wrong + once * weight) * np.abs(value_scales) + TINY
    products = (weight * value_scales)[:, :, None] * values
    out, out_error = products.sum(1), (wrong[:, :, None] * np.abs(values)).sum(1) + TINY * weight.shape[1]
    if wrong_caches is not None:
        out_error += ((weight + wrong)[:, :, None] * wrong_caches[1]).sum(1)
    for begin in range(low // BLOCK * BLOCK, low + score.shape[1], BLOCK):
        of = products[:, max(begin - low, 0) : begin + BLOCK - low]
        out_error += U * np.abs(of.cumsum(1)).sum(1)
    out_error += 2 * blocks * U * np.abs(products).sum(1)
    y = out / total[:, None]
    y_error = (out_error + np.abs(y) * total_error[:, None]) / total[:, None] + (2 + (factor != 1)) * U * np.abs(y)
    return Span(y * factor, (y_error * SECOND + 4 * TINY) * factor + TINY)


def product(x: Span, weights: np.ndarray) -> Span:
    """x [heads, n, K] times weights [heads, K, N], by fma from 0."""
    terms = x.value[..., None] * weights[:, None]
    error = U * np.abs(terms.cumsum(2)).sum(2) + TINY * weights.shape[1]
    return Span(terms.sum(2), (error + x.error @ np.abs(weights)) * SECOND)


def attend_up(a: Inputs, q: Span, caches: tuple[np.ndarray, ...], low: int, expands: bool) -> Span:
    """Return what :func:`attend` does, of a spec with a nope_size; q: [heads, what turns, then M]."""
    spec, sinks = a.spec, a.sinks.astype(np.float64)
    turning = spec.head_size - spec.v_head_size
    k_up, v_up = (up.astype(np.float64) for up in a.ups)
    if expands:
        first, latents = np.split(caches[0].astype(np.float64), [turning], 2)
        exact = np.zeros(latents.shape)
        keys, values = product(Span(latents, exact), k_up.swapaxes(1, 2)), product(Span(latents, exact), v_up)
        order = Span(*(np.roll(x, spec.nope_size, 1) for x in q))  # the dot's: M, then what turns
        own = replace(
            spec, kv_num_heads=spec.num_heads, head_size=spec.query_size, v_head_size=spec.out_size, key_split=0
        )
        own = replace(own, nope_size=0, out_size=0)
        wrong = np.concatenate([keys.error, np.zeros(first.shape)], 2), values.error
        return attend(own, order, (np.concatenate([keys.value, first], 2), values.value), low, sinks, wrong)
    absorbed = product(Span(q.value[:, None, turning:], q.error[:, None, turning:]), k_up)
    whole = Span(*(np.concatenate([x[:, :turning], y[:, 0]], 1) for x, y in zip(q, absorbed, strict=True)))
    inner = replace(spec, nope_size=0, out_size=0)
    out = attend(inner, whole, (caches[0], caches[1]), low, sinks)
    return Span(*(x[:, 0] for x in product(Span(out.value[:, None], out.error[:, None]), v_up)))


def assert_stored(spec: AttentionSpec, found: np.ndarray, want: Span, scale: float) -> None:
    """Keys or values that a kernel has stored, [.., n]."""
    if spec.cache_format == "none":
        return assert_within(found, want)
    error = want.error + U * np.abs(want.value)  # a quotient
    if spec.cache_format == "int8_token":
        own = np.ascontiguousarray(found[..., -4:]).view(np.float32)
        largest = np.abs(want.value).max(-1, keepdims=True)
        most = (np.abs(want.value) + want.error).max(-1, keepdims=True)
        assert_within(own, Span(largest / 127, ((most - largest) / 127 + U * most / 127) * SECOND + TINY))
        with np.errstate(invalid="ignore", divide="ignore"):
            low, high = (np.clip(np.rint((want.value + s * error) / own), -127, 127) for s in (-1, 1))
        codes = found[..., :-4].astype(np.float64)
        assert ((codes >= np.nan_to_num(low)) & (codes <= np.nan_to_num(high))).all()
        return None
    # rounding is monotone: what the least and the most that x may be are rounded to
    low, high = (
        reference.decode_cache(spec, reference.encode_cache(spec, want.value + s * error, scale, found.dtype), 1.0)
        for s in (-1, 1)
    )
    codes = reference.decode_cache(spec, found, 1.0)
    assert ((codes >= low) & (codes <= high)).all()
    return None


def check(a: Inputs, got: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """A kernel's output, keys and values, against what they have to be."""
    spec, (output, *present) = a.spec, got
    queries, *new = stored(a)
    want, heads = np.zeros((*a.qkv.shape[:2], spec.num_heads, spec.output_size)), spec.num_heads // spec.kv_num_heads
    error = np.zeros(want.shape)
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        for cache, before, of, scale in zip(present, a.past, new, (spec.k_scale, spec.v_scale), strict=True):
            assert cache.shape[2] == max(before.shape[2], a.length)
            np.testing.assert_array_equal(cache[b, :, :past], before[b, :, :past])
            counting = slice(begin, begin + count)
            here = Span(of.value[b, counting].swapaxes(0, 1), of.error[b, counting].swapaxes(0, 1))
            assert_stored(spec, cache[b, :, past : past + count], here, scale)
        for i in range(count):
            for of, slots, low in seen(a, b, i):
                caches = tuple(np.repeat(c[b][:, slots], heads, 0)[of] for c in present)
                if spec.compress_rate:
                    both, low = np.repeat(compressed(a, b, i, slots, present), heads, 0)[of], 0
                    caches = both, both
                if spec.key_split:
                    whole = np.concatenate(caches, 2)
                    caches = whole, whole[..., spec.head_size - spec.v_head_size :]
                q = Span(queries.value[b, begin + i, of], queries.error[b, begin + i, of])
                if spec.nope_size:
                    own = replace(a, sinks=a.sinks[of], ups=tuple(up[of] for up in a.ups))
                    found = attend_up(own, q, caches, low, spec.expands(count) and not selects(a, b))
                else:
                    found = attend(spec, q, caches, low, a.sinks[of].astype(np.float64))
                want[b, begin + i, of], error[b, begin + i, of] = found
    span = Span(want.reshape(output.shape), error.reshape(output.shape))
    if spec.gated:
        sigmoid = 1 / (1 + np.exp(-a.qkv[..., : spec.gates_size].astype(np.float64)))
        # exp, the sum, the inverse and the product
        wrong = np.abs(span.value) * (EXP + 3 * U) + span.error
        span = Span(span.value * sigmoid, wrong * sigmoid * SECOND + TINY)
    assert_within(output, span)
    other, *stored_too = a.reference()
    counts = [np.s_[b, :, : past + count] for b, (_, count, past) in enumerate(a.rows.tolist())]
    if all((x[at] == y[at]).all() for at in counts for x, y in zip(present, stored_too, strict=True)):
        assert_within(other, span)


def assert_bytes(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.tobytes() == y.tobytes()


def in_blocks(
    spec: AttentionSpec, lengths: list[tuple[int, int]], columns: int, blocks: int, positions: int = 0, **types: Any
) -> Inputs:
    """Requests of (tokens, slots before) in a row, whose slots are in blocks of 256 in random order. Slots of no token
    hold ones of bits: NaN of every type but int8."""
    a = inputs(replace(spec, block_size=0), [[0, 0, 0]], sum(count for count, _ in lengths), 0, 0, **types)
    spec, rng = replace(a.spec, block_size=256), np.random.default_rng(5)
    positions = positions or max(sum(length) for length in lengths)
    table = rng.permutation(blocks)[: len(lengths) * columns].reshape(len(lengths), columns).astype(np.int32)
    caches = []
    for cache, scale in zip(a.past, (spec.k_scale, spec.v_scale), strict=True):
        held = np.full((blocks, 256, spec.kv_num_heads, cache.shape[3]), 0, cache.dtype)
        held.view(np.uint8)[:] = 0xFF
        width = cache.shape[3] - (4 if spec.cache_format == "int8_token" else 0)
        for row, (_, before) in zip(table, lengths, strict=True):
            numbers = rng.standard_normal((before, spec.kv_num_heads, width)).astype(np.float32)
            encoded = reference.encode_cache(spec, numbers, scale, None if spec.cache_format != "none" else cache.dtype)
            for slot in range(before):
                held[row[slot // 256], slot % 256] = encoded[slot]
        caches.append(held)
    begins = np.cumsum([0, *(count for count, _ in lengths)])
    rows = [[begin, *length] for begin, length in zip(begins, lengths, strict=False)]
    cos, sin = (rng.standard_normal((positions, spec.rotary_size // 2)).astype(np.float32) for _ in range(2))
    return replace(
        a, spec=spec, past=tuple(caches), rows=np.array(rows, np.int32), cos=cos, sin=sin, block_table=table, length=0
    )


def alone(a: Inputs, b: int) -> Inputs:
    """Request b of :func:`in_blocks`, in a cache of its own."""
    begin, count, before = a.rows[b].tolist()
    past = tuple(
        np.ascontiguousarray(cache[a.block_table[b]].reshape(1, -1, *cache.shape[2:]).swapaxes(1, 2)[:, :, :before])
        for cache in a.past
    )
    turns = {name: getattr(a, name)[None, before : before + count] for name in ("cos", "sin")}
    own = {"spec": replace(a.spec, block_size=0), "block_table": None, "length": before + count}
    rows = np.array([[0, count, before]], np.int32)
    return replace(a, qkv=a.qkv[:, begin : begin + count], past=past, rows=rows, **turns, **own)
