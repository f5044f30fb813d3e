"""The slow, obvious truth: QuantMoE, linear, router, norm, attention and what keeps a state in NumPy float64.

Only the activation quantizers are computed in float32, because their roundings are part of the format
(quant_moe.def, Activations). Everything after them is exact arithmetic rounded to float64.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.hadamard_matrix import rotated
from quantmoe.custom_ops.matrix import QuantizedMatrix, k_group
from quantmoe.custom_ops.op import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    MoESpec,
    NormSpec,
    RouterSpec,
    RoutingSpec,
    SpaceSpec,
)

#: activation formats of floats: their values, features that share a scale (None: the row), exponent of the largest one
FLOAT_FORMATS: dict[str, tuple[np.dtype, int | None, int]] = {
    "fp8_token": (np.dtype(ml_dtypes.float8_e4m3fn), None, 8),
    "fp8_tensor": (np.dtype(ml_dtypes.float8_e4m3fn), None, 8),
    "fp8_group128": (np.dtype(ml_dtypes.float8_e4m3fn), 128, 8),
    "mxfp8": (np.dtype(ml_dtypes.float8_e4m3fn), 32, 8),
    "mxfp4": (np.dtype(ml_dtypes.float4_e2m1fn), 32, 2),
    "nvfp4": (np.dtype(ml_dtypes.float4_e2m1fn), 16, 2),
}


def round_activations(x: np.ndarray, activation_format: str, stored: float | None) -> np.ndarray:
    """x f32 [T, K] in a float format, as float64 [T, K]: code * step, both as quant_moe.def computes them in float32.

    Args:
        stored: the checkpoint's input scale; None where it is found from x.
    """
    dtype, group, emax = FLOAT_FORMATS[activation_format]
    out = np.full(x.shape, np.nan)
    limit = np.float32(ml_dtypes.finfo(dtype).max)
    finite = np.isfinite(x).all(1)
    if activation_format == "fp8_tensor" and stored is None:
        largest = np.abs(x[finite]).max(initial=np.float32(0))
        stored = float(largest / np.float32(448)) or 1.0
    for t in np.flatnonzero(finite):
        for begin in range(0, x.shape[1], group or x.shape[1]):
            part = x[t, begin : begin + (group or x.shape[1])]
            largest = np.abs(part).max(initial=np.float32(0))
            with np.errstate(over="ignore"):
                if activation_format == "fp8_tensor":
                    step = np.float32(stored)
                elif activation_format == "nvfp4":
                    scale = np.minimum(largest / np.float32(6) / np.float32(stored), np.float32(448))
                    step = np.float32(scale.astype(ml_dtypes.float8_e4m3fn)) * np.float32(stored)
                elif activation_format in ("mxfp8", "mxfp4"):
                    exponent = int((largest.view(np.uint32) + np.uint32(1 << 21)) >> np.uint32(23)) - emax
                    step = np.float32(2.0 ** (max(exponent, 0) - 127))
                else:
                    step = largest / limit
                    step = step if step > 0 else np.float32(1)
                if step == 0:
                    out[t, begin : begin + len(part)] = 0
                    continue
                codes = np.clip(part / step, -limit, limit).astype(dtype)
                out[t, begin : begin + len(part)] = codes.astype(np.float32) * step
    return out


def quantize_activations(x: np.ndarray, activation_format: str, stored: float | None = None) -> np.ndarray:
    """Return what the product sees of activations x, f32 [T, K]: float64 [T, K], (q - z) * step, or a rounded float.

    Rows that are not finite become NaN. ``stored``: a checkpoint's input scale, for fp8_tensor and nvfp4.

    Sources: int8_token is compressed-tensors' dynamic symmetric token strategy, int8_token_asym KleidiAI's
    kai_lhs_quant_pack_qai8dxp_f32.
    """
    x = x.astype(np.float32)
    if activation_format == "none":
        return np.where(np.isfinite(x).all(1, keepdims=True), x, np.nan).astype(np.float64)
    if activation_format in FLOAT_FORMATS:
        return round_activations(x, activation_format, stored)
    one = np.float32(1)
    out = np.empty(x.shape, np.float64)
    for row, into in zip(x, out, strict=True):
        low, high = min(row.min(initial=0), np.float32(0)), max(row.max(initial=0), np.float32(0))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if not np.isfinite(row).all():
                into[:] = np.nan
            elif activation_format == "int8_token":
                step = max(-low, high) / np.float32(127.5)
                step = step if step > 0 else one
                into[:] = np.clip(np.rint(row / step), -128, 127).astype(np.float64) * np.float64(step)
            elif activation_format == "int8_token_asym":
                spread = np.float32(high - low)
                inverse = one if spread == 0 else np.float32(255) / spread
                if not np.isfinite(spread):
                    into[:] = np.nan
                elif not np.isfinite(inverse):
                    into[:] = 0
                else:
                    a, b = low * inverse, high * inverse
                    lower, upper = np.float32(-128) + a, np.float32(127) + b
                    zero = np.float32(-128) - a if lower + upper > 0 else np.float32(127) - b
                    zero = np.rint(np.clip(zero, np.float32(-128), np.float32(127)))
                    q = np.clip(np.rint(row * inverse).astype(np.float64) + np.float64(zero), -128, 127)
                    into[:] = (q - np.float64(zero)) * np.float64(one / inverse)
            else:
                raise ValueError(f"the reference has no activation_format {activation_format!r}")
    return out


def step_columns(m: QuantizedMatrix) -> int:
    """Return how many packed columns share a step of int8_group activations (quant_moe.def, Activations)."""
    if (group := k_group(m)) == -1:
        group = -(-m.shape[1] // 32) * 32
    return 64 if group % 64 == 0 else 32


def quantize_groups(x: np.ndarray, columns: int) -> np.ndarray:
    """Return what the product sees of int8_group activations x, f32 [T, K] in the order of the packed columns: float64
    [T, K].

    Rows that are not finite become NaN.
    """
    padded = np.zeros((len(x), -(-x.shape[1] // columns), columns), np.float32)
    padded.reshape(len(x), -1)[:, : x.shape[1]] = x
    finite = np.isfinite(padded).all((1, 2), keepdims=True)
    padded = np.where(finite, padded, np.float32(0))
    largest = np.abs(padded).max(2, keepdims=True)
    with np.errstate(over="ignore", divide="ignore"):
        factor = np.float32(127) / largest
    codes = np.rint(padded * np.where(np.isinf(factor), np.float32(0), factor))
    out = codes.astype(np.float64) * (largest / np.float32(127)).astype(np.float64)
    return np.where(finite, out, np.nan).reshape(len(x), -1)[:, : x.shape[1]]


def activate(spec: MoESpec, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
    """act(gate, up), or act(up) for a layer that is not gated; formulas and sources in op.def."""
    z = up if gate is None else gate
    with np.errstate(over="ignore"):
        silu = z / (1 + np.exp(-z))
        low = np.minimum(z, spec.swiglu_limit)
        sigmoid, silu_low = 1 / (1 + np.exp(-spec.swiglu_alpha * low)), low / (1 + np.exp(-low))
    u = np.float64(1) if gate is None else up
    limit = spec.swiglu_limit
    match spec.activation:
        case "silu":
            return silu * u
        case "gelu":
            return z / 2 * (1 + np.vectorize(math.erf, otypes=[np.float64])(z / math.sqrt(2))) * u
        case "gelu_tanh":
            return z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) * u
        case "relu2":
            return np.maximum(z, 0) ** 2 * u
        case "swiglu_oai":
            return np.minimum(z, limit) * sigmoid * (np.clip(u, -limit, limit) + 1)
        case "swiglu_step":
            return np.minimum(silu, limit) * np.clip(u, -limit, limit)
        case "swiglu_clamp":
            return silu_low * np.clip(u, -limit, limit)
        case "swiglu_tanh":
            gate_cap = spec.swiglu_alpha
            return gate_cap * np.tanh(z / gate_cap) / (1 + np.exp(-z)) * limit * np.tanh(u / limit)
    raise ValueError(f"the reference has no activation {spec.activation!r}")


def route(
    spec: RoutingSpec, logits: np.ndarray, correction_bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """MoERouting: ids int32 and weights float64, [T, top_k + shared_experts]: of the selected, best first, equal scores
    the lower id first, then of the shared.

    Args:
        logits: [T, E + shared_gate], any float type. correction_bias: [E].
    """
    x, gate = np.split(logits.astype(np.float64), [spec.num_experts], axis=1)
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-x))
    exp = np.exp(x - x.max(1, keepdims=True))
    scores = {"softmax_topk": exp / exp.sum(1, keepdims=True), "sigmoid_topk": sigmoid}.get(spec.method, x)
    choice = scores if correction_bias is None else scores + correction_bias.astype(np.float64)
    if spec.topk_group < spec.n_group:
        groups = choice.reshape(len(x), spec.n_group, -1)
        best = np.sort(groups, axis=2)[:, :, -2:].sum(2)
        dropped = np.argsort(-best, axis=1, kind="stable")[:, spec.topk_group :]
        groups = groups.copy()
        np.put_along_axis(groups, dropped[:, :, None], -np.inf, axis=1)
        choice = groups.reshape(x.shape)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : spec.top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if spec.method == "topk_softmax":
        weights = np.exp(weights - weights.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
    if spec.method == "topk_sigmoid":
        weights = np.take_along_axis(sigmoid, ids, axis=1)
    if spec.renormalize:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    shared = np.broadcast_to(np.arange(spec.shared_experts) + spec.num_experts, (len(x), spec.shared_experts))
    with np.errstate(over="ignore"):
        full = 1 / (1 + np.exp(-gate)) if spec.shared_gate else np.ones((len(x), 1))
    every = np.concatenate((ids, shared), 1).astype(np.int32)
    return every, np.concatenate((weights * spec.routed_scaling_factor, np.broadcast_to(full, shared.shape)), 1)


def router(
    spec: RouterSpec, hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray, correction_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """MoERouter: as :func:`route` of hidden [T, H] times weight [E + shared_gate, H] plus bias; biases [0]: none."""
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    if len(bias):
        logits = logits + bias.astype(np.float64)
    return route(spec.routing, logits, correction_bias if len(correction_bias) else None)


def all_reduce(parts: Sequence[np.ndarray]) -> np.ndarray:
    """AllReduce: y of every rank; parts: each rank's x, of one shape and type, in order."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


def all_gather(parts: Sequence[np.ndarray], axis: int = -1) -> np.ndarray:
    """AllGather: y of every rank; parts: each rank's x, of one shape and type, in order."""
    return np.concatenate(parts, axis=axis)


def reduce_scatter(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """ReduceScatter: each rank's y; parts: each rank's x, of one shape and type, in order.

    Raises:
        ValueError: the ranks do not divide the rows.
    """
    return np.split(all_reduce(parts), len(parts))


def add_norm(spec: NormSpec, x: np.ndarray, residual: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AddRMSNorm: y, float64, and the sum, in x's type; x and residual [.., H], weight [H]."""
    total = (x.astype(np.float64) + residual.astype(np.float64)).astype(x.dtype)
    wide = total.astype(np.float64)
    mean = (wide * wide).mean(-1, keepdims=True)
    return wide / np.sqrt(mean + spec.norm_epsilon) * weight.astype(np.float64), total


def token_rows(mask: np.ndarray, new: int, past: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs of TokenRows: rows int32 [B, 3], last int64 [B, 1, 1].

    The new tokens' columns of the mask are its last ones where it is longer than the cache, which then grows. Otherwise
    the cache has room for them, and they end with the last column that any row has set.

    Args:
        mask: [B, L], not 0 for tokens that count. new: S. past: slots of the cache, P.
    """
    seen, (batch, length) = mask != 0, mask.shape
    end = max(new, length) if length > past else new
    end = max(end, *(np.nonzero(seen.any(0))[0] + 1), 0)
    columns = np.arange(end - new, end)
    own = np.zeros((batch, new), bool)
    if length:
        own = seen[:, np.minimum(columns, length - 1)]
    before = seen[:, : end - new].sum(1)
    first = np.where(own.any(1), own.argmax(1) if new else 0, new)
    rows = np.stack((np.minimum(first, new - own.sum(1)), own.sum(1), before), 1).astype(np.int32)
    return rows, (rows[:, :1] + rows[:, 1:2] - 1).astype(np.int64)[:, None]


def linear(x: np.ndarray, m: QuantizedMatrix, activation_format: str) -> np.ndarray:
    """x f32 [T, K] times one matrix: float64 [T, N]."""
    if m.pre_scale is not None:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32) * m.pre_scale
        m = dataclasses.replace(m, pre_scale=None)
    if m.hadamard:
        x = rotated(x.astype(np.float32), m.hadamard)
        m = dataclasses.replace(m, hadamard=0)
    if activation_format == "int8_group":
        order = np.arange(x.shape[1]) if m.perm is None else m.perm
        seen = np.empty(x.shape, np.float64)
        seen[:, order] = quantize_groups(x.astype(np.float32)[:, order], step_columns(m))
    else:
        seen = quantize_activations(x, activation_format, m.input_scale)
    y = seen @ m.dequantize().T
    return y if m.bias is None else y + m.bias.astype(np.float64)


def quant_moe(
    spec: MoESpec, experts: list[Expert], hidden: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """Compute one layer.

    Args:
        spec: the node's attributes; ``experts[i]`` has id ``spec.expert_offset + i``.
        hidden: [T, H], any float type. topk_ids: integer [T, k]. topk_weights: [T, k].

    Returns:
        float64 [T, H]. A token whose activations are not finite is NaN throughout.

    Raises:
        ValueError: an id outside [-1, num_experts).
    """
    x = hidden.astype(np.float32)
    weights = topk_weights.astype(np.float32)
    if ((topk_ids < -1) | (topk_ids >= spec.num_experts)).any():
        raise ValueError(f"topk_ids must be in [-1, {spec.num_experts})")
    out = np.zeros(x.shape, np.float64)
    on_input = bool(spec.apply_router_weight_on_input)
    for i, expert in enumerate(experts):
        tokens, slots = np.nonzero(topk_ids == spec.expert_offset + i)
        if not len(tokens):
            continue
        w = weights[tokens, slots]
        rows = x[tokens] * w[:, None] if on_input else x[tokens]
        up = linear(rows, expert.up, spec.w13.activation_format)
        gate = None if expert.gate is None else linear(rows, expert.gate, spec.w13.activation_format)
        h = activate(spec, gate, up).astype(np.float32)
        y = linear(h, expert.down, spec.w2.activation_format)
        np.add.at(out, tokens, y if on_input else y * w[:, None].astype(np.float64))
    out[~np.isfinite(x).all(1)] = np.nan
    return out


def rms_norm(spec: AttentionSpec, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """qk_norm of queries or keys, [B, S, heads, D]; weights as the operator's input."""
    if spec.qk_norm == "none":
        return x
    over = (-1,) if spec.qk_norm == "head" else (-2, -1)
    norm = np.sqrt((x * x).mean(over, keepdims=True) + np.float32(spec.norm_epsilon))
    return x / norm * weights.astype(np.float64).reshape(-1, x.shape[-1])


def rotate(spec: AttentionSpec, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary embedding of queries or keys, [B, S, heads, D]; cos, sin: [B, S, rotary_size / 2]."""
    size = spec.rotary_size
    half = size // 2
    a, b = (slice(0, size, 2), slice(1, size, 2)) if spec.rotary_interleaved else (slice(half), slice(half, size))
    c, s = (turn[:, :, None].astype(np.float64) for turn in (cos, sin))
    y = x.copy()
    y[..., a] = x[..., a] * c - x[..., b] * s
    y[..., b] = x[..., b] * c + x[..., a] * s
    return y


def encode_cache(spec: AttentionSpec, x: np.ndarray, scale: float, dtype: np.dtype) -> np.ndarray:
    """Return keys or values [.., n] as a cache has them (ops/cached_attention.def): numbers of ``dtype``, or codes.

    Args:
        scale: of the codes, k_scale or v_scale. int8_token has a scale of its own behind its codes, [.., n + 4].
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if spec.cache_format == "none":
            return x.astype(dtype)
        if spec.cache_format == "fp8_e4m3":
            clamped = np.clip(x / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            return np.where(np.isnan(x), np.uint8(0x7F), clamped)
        if spec.cache_format == "int8":
            return np.nan_to_num(np.clip(np.rint(x / np.float32(scale)), -128, 127)).astype(np.int8)
        own = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
        own = np.where(np.isfinite(x).all(-1, keepdims=True), own, np.float32(np.nan))
        codes = np.nan_to_num(np.clip(np.rint(x / own), -127, 127), posinf=0, neginf=0).astype(np.int8)
    return np.concatenate([codes, np.ascontiguousarray(own).view(np.int8)], -1)


def decode_cache(spec: AttentionSpec, stored: np.ndarray, scale: float) -> np.ndarray:
    """Return the float64 numbers [.., n] that :func:`encode_cache`'s stand for."""
    if spec.cache_format == "none":
        return stored.astype(np.float64)
    if spec.cache_format == "fp8_e4m3":
        return stored.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float32(scale)
    if spec.cache_format == "int8":
        return stored.astype(np.float64) * np.float32(scale)
    own = np.ascontiguousarray(stored[..., -4:]).view(np.float32)
    return stored[..., :-4].astype(np.float64) * own


# over 60 lines: the attributes of CachedAttention, in the order of its arithmetic
def attention(
    spec: AttentionSpec,
    qkv: np.ndarray,
    past_key: np.ndarray,
    past_value: np.ndarray,
    rows: np.ndarray,
    length: int,
    cos: np.ndarray,
    sin: np.ndarray,
    q_norm: np.ndarray,
    k_norm: np.ndarray,
    sinks: np.ndarray,
    k_up: np.ndarray | None = None,
    v_up: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    selected: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the outputs of CachedAttention.

    Args:
        spec: the node's attributes. length: L, attention_mask's.
        the others: inputs of op.def's shapes, of any float type; caches of codes are int8 or uint8. k_up and v_up come
            with a nope_size, block_table comes with a block_size. selected: None: a token sees all slots of its mask.

    Returns:
        output: float64 [B, S, num_heads * V], or out_size for V; zero for tokens that do not count.
        present_key, present_value: of past's types and widths, with past's blocks or max(P, L) slots. Slots after the
            last token are zero.

    Raises:
        ValueError: ``rows`` asks for tokens or slots that are not there.
    """
    if block_table is not None:
        return _paged_attention(spec, qkv, (past_key, past_value), rows, (cos, sin, q_norm, k_norm, sinks), block_table)
    batch, tokens, _ = qkv.shape
    heads, groups, d = spec.num_heads, spec.kv_num_heads, spec.head_size
    gates, qkv = np.split(qkv, [spec.gates_size], axis=2)
    capacity = max(past_key.shape[2], length)
    keys_at = heads * spec.query_size
    q, k, v = np.split(qkv.astype(np.float64), [keys_at, keys_at + groups * d], axis=2)
    sizes = ((heads, spec.query_size), (groups, d), (groups, 0 if spec.key_split else spec.v_head_size))
    q, k, v = (x.reshape(batch, tokens, *size) for x, size in zip((q, k, v), sizes, strict=True))
    if k_up is not None:
        absorbed = np.einsum("bshn,hnr->bshr", q[..., : spec.nope_size], k_up.astype(np.float64))
        q = np.concatenate([q[..., spec.nope_size :], absorbed], 3)
    q = rotate(spec, rms_norm(spec, q, q_norm), cos, sin)
    k = rotate(spec, rms_norm(spec, k, k_norm), cos, sin)
    if spec.key_split:
        k, v = np.split(k, [spec.key_split], axis=3)
    output, scales = np.zeros((batch, tokens, heads, spec.v_head_size)), (spec.k_scale, spec.v_scale)
    present = [np.zeros((batch, groups, capacity, past.shape[3]), past.dtype) for past in (past_key, past_value)]
    check_slots(rows, tokens, past_key.shape[2], capacity)
    for b, (begin, count, past) in enumerate(rows.tolist()):
        for into, before, new, scale in zip(present, (past_key, past_value), (k, v), scales, strict=True):
            here = new[b, begin : begin + count].swapaxes(0, 1)
            into[b, :, past : past + count] = encode_cache(spec, here, scale, into.dtype)
            into[b, :, :past] = before[b, :, :past]
        lists = None if selected is None or past + count <= selected.shape[3] else selected[b]
        for i, group in np.ndindex(count, groups):
            p, of = past + i, slice(heads // groups * group, heads // groups * (group + 1))
            low = max(p - spec.sliding_window + 1 if spec.sliding_window else 0, 0)
            low = max(low, p // spec.chunk_size * spec.chunk_size if spec.chunk_size else 0)
            slots = np.arange(low, p + 1)
            own = slots
            if lists is not None:
                slots = lists[begin + i, group % lists.shape[1]]
                slots = slots[slots >= 0]
            keys, values = (
                decode_cache(spec, x[b, group, slots], scale) for x, scale in zip(present, scales, strict=True)
            )
            if spec.compress_rate:
                slots = np.arange(p + 1) if lists is None else slots
                slots = slots[(slots + 1) % spec.compress_rate == 0]
                read = present[1][b, group, slots], present[0][b, group, own]
                keys = values = np.concatenate(read).astype(np.float64)
            if spec.key_split:
                keys = np.concatenate([keys, values], 1)
                values = keys[:, d - spec.v_head_size :]
            with np.errstate(invalid="ignore", over="ignore"):
                score = q[b, begin + i, of] @ keys.T * np.float32(spec.scale)
                if spec.softcap:
                    score = np.tanh(score / np.float32(spec.softcap)) * np.float32(spec.softcap)
                score = np.concatenate([score, sinks[of].astype(np.float64)[:, None]], 1)
                weight = np.exp(score - score.max(1, keepdims=True))
                weight /= weight.sum(1, keepdims=True)
                output[b, begin + i, of] = weight[:, :-1] @ values
                if spec.gated:
                    gate = gates[b, begin + i].astype(np.float64).reshape(heads, -1)[of]
                    output[b, begin + i, of] /= 1 + np.exp(-gate)
    if v_up is not None:
        with np.errstate(invalid="ignore"):
            output = np.einsum("bshr,hrv->bshv", output, v_up.astype(np.float64))
    return output.reshape(batch, tokens, heads * spec.output_size), present[0], present[1]


def _paged_attention(
    spec: AttentionSpec,
    qkv: np.ndarray,
    past: tuple[np.ndarray, np.ndarray],
    rows: np.ndarray,
    others: Sequence[np.ndarray],
    block_table: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """CachedAttention with a block_size: each request alone, its slots taken out of the blocks and put back."""
    alone, (cos, sin, *weights) = dataclasses.replace(spec, block_size=0), others
    output = np.zeros((1, qkv.shape[1], spec.num_heads * spec.output_size))
    present = [cache.copy() for cache in past]
    first = 0
    for (begin, count, before), blocks in zip(rows.tolist(), block_table, strict=True):
        end = before + count
        used = blocks[: -(-end // spec.block_size)]
        if begin != first or count < 1 or (spec.rotary_size and end > len(cos)) or end > len(used) * spec.block_size:
            raise ValueError(f"rows have {begin}, {count}, {before} (begin, count, past), expected to begin at {first}")
        if ((used < 0) | (used >= len(past[0]))).any():
            raise ValueError(f"block_table has {used.tolist()}, the caches have {len(past[0])} blocks")
        mine = slice(begin, begin + count)
        key, value = (cache[used].reshape(1, -1, *cache.shape[2:]).swapaxes(1, 2)[:, :, :end] for cache in present)
        turn = [table[None, before:end] if spec.rotary_size else np.zeros((1, count, 0)) for table in (cos, sin)]
        own = np.array([[0, count, before]], np.int32)
        found, *new = attention(alone, qkv[:, mine], key, value, own, end, turn[0], turn[1], *weights)
        output[:, mine] = found
        for cache, slots in zip(present, new, strict=True):
            for slot in range(before, end):
                cache[used[slot // spec.block_size], slot % spec.block_size] = slots[0, :, slot]
        first += count
    if first != qkv.shape[1]:
        raise ValueError(f"rows have {first} tokens, qkv has {qkv.shape[1]}")
    return output, present[0], present[1]


def check_slots(rows: np.ndarray, tokens: int, before: int, after: int) -> None:
    """Raise ValueError where ``rows`` asks for tokens, or for slots of a cache, that are not there."""
    for b, (begin, count, past) in enumerate(rows.tolist()):
        if min(begin, count, past) < 0 or begin + count > tokens or past > before or past + count > after:
            raise ValueError(
                f"rows[{b}] is {begin}, {count}, {past} (begin, count, past): {tokens} new tokens, {before} slots "
                f"before and {after} after"
            )


def check_rows(rows: np.ndarray, tokens: int) -> None:
    """Raise ValueError where ``rows`` of CausalConv, GatedDelta or StateSpace asks for tokens that are not there."""
    for b, (begin, count, past) in enumerate(rows.tolist()):
        if min(begin, count, past) < 0 or begin + count > tokens:
            raise ValueError(f"rows[{b}] is {begin}, {count}, {past} (begin, count, past): {tokens} new tokens")


def windowed(spec: ConvSpec | DeltaSpec | SpaceSpec, state: np.ndarray) -> np.ndarray:
    """Return a view of their state as [state_window, B, ..]."""
    return state if spec.state_window > 1 else state[None]


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def recur(
    spec: DeltaSpec | SpaceSpec,
    past_state: np.ndarray,
    rows: np.ndarray,
    y: np.ndarray,
    step: Callable[[int, int, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Token after token of each row.

    Args:
        past_state, rows: inputs. y: zeros [B, S, ..], filled for tokens that count.
        step: of a row, a token in the call and the state before it: the state after it and its y.

    Returns:
        y, and present_state float64, zeros in slots of no token.
    """
    present = np.zeros(past_state.shape)
    slots, live = windowed(spec, present), windowed(spec, past_state.astype(np.float64))[-1]
    for i, (begin, count, past) in enumerate(rows.tolist()):
        state = live[i] if past or not count else np.zeros(live[i].shape)
        for t in range(begin, begin + count):
            state, y[i, t] = step(i, t, state)
            if (slot := len(slots) - begin - count + t) >= 0:
                slots[slot, i] = state
        slots[-1, i] = state
    return y, present
