"""CausalConv, GatedDelta and StateSpace on CUDA against reference.py, through the C ABI. Without a GPU nothing runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.built import NUMPY, SM80, TORCH, UNIT, gpu, torch
from support.operators import linear_attention
from support.operators.arithmetic import U
from support.operators.linear_attention import Space, space_span
from support.operators.specs import conv_spec, delta_spec, space_spec

from quantmoe.custom_ops.op import ConvSpec, DeltaSpec, SpaceSpec
from quantmoe.custom_ops.ops.causal_conv import causal_conv
from quantmoe.custom_ops.ops.gated_delta import gated_delta

# Only the output is rounded to 16 bits, at most half an ulp of each value. Sums, decays and norms are of f32: a token
# adds some roundings of 2^-24 to the state, of which decay forgets; over 300 tokens they stay far below a unit of f16.
STATE = 2.0**-24 * 64  # of the largest value of a head's state
# The chunked kernels: a state goes through three products a chunk. Their operands are two values of 16 bits: of bf16
# within 2^-16 at most, each on its own side, of f16 2^-22; additions on tensor cores cut off less than 2^-24.
CHUNK = 2.0**-16
# StateSpace's: two bf16 are within 2^-17, and a decay from a difference of logarithms, which f32 rounds, within 2^-17.
PARTS = 2.0**-16
# begin, count, past of each row; tokens
CALLS = {
    "one token": ([(0, 1, 9)], 1),
    "the first": ([(0, 1, 0)], 1),
    "seven": ([(0, 7, 3)], 7),
    "eight": ([(0, 8, 0)], 8),
    "nine": ([(0, 9, 1)], 9),
    "64": ([(0, 64, 1)], 64),
    "65": ([(0, 65, 2)], 65),
    "300": ([(0, 300, 0)], 300),
    "2100": ([(3, 2095, 7)], 2100),  # more chunks than are made at once
    "ragged few": ([(0, 1, 4), (0, 0, 7), (2, 3, 0), (4, 1, 1), (0, 5, 2)], 5),
    "ragged many": ([(0, 40, 4), (0, 0, 7), (31, 9, 0), (39, 1, 1), (5, 20, 2), (0, 0, 0)], 40),
}
CONVS = [
    conv_spec(512),
    conv_spec(70, 3, "none"),
    conv_spec(8192),
    conv_spec(2, 2),
    conv_spec(128, 16, "none"),
    conv_spec(70, 5),
]
CONVS += [conv_spec(512, 128)]
DELTAS = {
    "qwen3.6": delta_spec(16, 32, 128),
    "qwen3-next": delta_spec(2, 6, 128),
    "kimi": delta_spec(4, 4, 128, decay_per_key=1, gate="sigmoid"),
    "small": delta_spec(2, 2, 64),
    "per key of 64": delta_spec(1, 3, 64, decay_per_key=1),
    "parts": delta_spec(2, 4, 64, a_size=9, a_offset=5, b_size=4, z_size=400, z_offset=71),
    "parts, per key": delta_spec(2, 2, 64, decay_per_key=1, a_size=140, a_offset=8, b_size=5, b_offset=1),
    "wide values": delta_spec(2, 4, 64, v_head_size=128, beta_scale=2.0, scale=0.3),
    "wide keys": delta_spec(2, 4, 128, v_head_size=64, norm_epsilon=1e-3, l2_epsilon=1e-2),
}
SPACES = {
    "nemotron": space_spec(2, 16, 128, 64, norm_size=512),
    "granite": space_spec(1, 8, 128, 64),
    "small": space_spec(2, 4, 64, 32),
    "wide": space_spec(1, 3, 256, 96, norm_size=96, norm_epsilon=1e-2),
    "parts": space_spec(2, 4, 64, 64, dt_size=9, dt_offset=5, z_size=303, z_offset=43),
    "two blocks": space_spec(3, 6, 64, 128, norm_size=128),
}


def tensor(x: np.ndarray, dtype: str) -> Any:
    if x.dtype.itemsize == 2:
        return torch.from_numpy(x.view(np.int16).copy()).view(TORCH[dtype]).cuda()
    return torch.from_numpy(x.copy()).cuda()


def numbers(x: Any) -> np.ndarray:
    return x.cpu().float().numpy().astype(np.float64)


def mask(x: np.ndarray, rows: list[tuple[int, int, int]]) -> np.ndarray:
    """x with NaN in tokens that do not count."""
    for b, (begin, count, _) in enumerate(rows):
        x[b, :begin] = x[b, begin + count :] = np.nan
    return x


def twice(run: Any) -> list[Any]:
    one, two = run(), run()
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), "two runs differ"
    return one


def conv_error(spec: ConvSpec) -> float:
    """Each product beyond the fourth rounds a sum, which is below the number of products."""
    return 1e-6 + (spec.width - 4) * spec.width * 2.0**-24 if spec.width > 4 else 1e-6


def conv_inputs(spec: ConvSpec, dtype: str, call: str, bias: bool = True) -> list[np.ndarray]:
    rng, (rows, tokens) = np.random.default_rng(3), CALLS[call]
    x = mask(rng.normal(size=(len(rows), tokens, spec.x_size or spec.channels)).astype(NUMPY[dtype]), rows)
    past = rng.normal(size=(len(rows), spec.channels, spec.width - 1)).astype(NUMPY[dtype])
    for b, (_, count, before) in enumerate(rows):
        if count and not before:
            past[b] = np.nan  # is not read
    weight = rng.normal(size=(spec.channels, spec.width)).astype(np.float32)
    add = rng.normal(size=spec.channels if bias else 0).astype(np.float32)
    return [x, weight, add, past, np.array(rows, np.int32)]


@gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "spec", [*CONVS, conv_spec(70, 8, "none", 3), replace(conv_spec(70), x_size=108, x_offset=22)], ids=str
)
def test_conv_of_f32(spec: ConvSpec, call: str, in_place: bool) -> None:
    x, weight, bias, past, rows = conv_inputs(spec, "f16", call)
    inputs = [x / np.float32(3), weight, bias, past / np.float32(3), rows]
    sizes, _ = causal_conv(replace(spec, activation="none", state_window=1), *map(np.abs, inputs))
    if spec.state_window > 1:
        inputs = window_of(inputs, spec.state_window)
    y, present = twice(lambda: cuda.run_node(spec, *(tensor(x, "f32") for x in inputs), in_place=in_place))
    want, state = causal_conv(spec, *inputs)
    # each product rounds a sum once. silu's slope is at most 1.1, and it loses what exp and a reciprocal do
    bound = 1.1 * (spec.width + 1) * 2.0**-24 * sizes + 2.0**-21 * np.abs(want)
    assert (np.abs(numbers(y) - want) <= bound).all()
    if not (in_place and spec.state_window > 1):  # whose other slots keep what is in them
        assert present.cpu().numpy().tobytes() == state.tobytes()


@gpu
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("spec", [*CONVS, replace(conv_spec(70), x_size=108, x_offset=22)], ids=str)
def test_conv(spec: ConvSpec, call: str, dtype: str, in_place: bool) -> None:
    inputs = conv_inputs(spec, dtype, call, bias=spec.channels != 512)
    y, present = twice(lambda: cuda.run_node(spec, *(tensor(x, dtype) for x in inputs), in_place=in_place))
    want, state = causal_conv(spec, *inputs)
    # one rounding; silu loses what exp, within 2 ulp, and a reciprocal do
    np.testing.assert_allclose(numbers(y), want, rtol=UNIT[dtype] * 1.01, atol=conv_error(spec))
    assert present.cpu().view(torch.int16).numpy().tobytes() == state.view(np.int16).tobytes()


def delta_inputs(spec: DeltaSpec, dtype: str, call: str, decay: str = "") -> list[np.ndarray]:
    rng, (rows, tokens) = np.random.default_rng(5), CALLS[call]
    heads, keys, batch = spec.num_v_heads, spec.k_head_size, len(rows)
    width = 2 * spec.num_k_heads * keys + heads * spec.v_head_size
    decays = heads * keys if spec.decay_per_key else heads

    def values(*shape: int) -> np.ndarray:
        return mask(rng.normal(size=(batch, tokens, *shape)).astype(NUMPY[dtype]), rows)

    a_log = {"": rng.normal(0, 1, heads), "one": np.full(heads, -20.0), "zero": np.full(heads, 6.0)}[decay]
    past = rng.normal(size=(batch, heads, keys, spec.v_head_size)).astype(np.float32)
    for b, (_, count, before) in enumerate(rows):
        if count and not before:
            past[b] = np.nan  # is not read
    others = [a_log, rng.normal(size=decays), rng.uniform(0.5, 1.5, spec.v_head_size)]
    own = (spec.a_size or decays, spec.b_size or heads, spec.z_size or heads * spec.v_head_size)
    tensors = [values(width), *map(values, own)]
    return [*tensors, *(x.astype(np.float32) for x in others), past, np.array(rows, np.int32)]


def check_delta(spec: DeltaSpec, dtype: str, inputs: list[np.ndarray], in_place: bool = False) -> None:
    y, present = twice(lambda: cuda.run_node(spec, *(tensor(x, dtype) for x in inputs), in_place=in_place))
    want, state = gated_delta(spec, *inputs)
    got, unit = numbers(y), UNIT[dtype]
    least = 2.0**-25 if dtype == "f16" else 0.0  # half of the smallest number
    heads = (*want.shape[:2], spec.num_v_heads, spec.v_head_size)
    sizes = np.linalg.norm(want.reshape(heads), axis=3, keepdims=True)  # what cancels loses by a head's norm
    assert (np.abs(got - want).reshape(heads) <= unit * np.abs(want).reshape(heads) + unit / 8 * sizes + least).all()
    assert (got[want.any(2) == 0] == 0).all()
    largest = np.abs(state).max((-2, -1), keepdims=True)
    chunks = -(-want.shape[1] // 64)
    assert (np.abs(numbers(present) - state) <= (STATE + chunks * CHUNK) * np.maximum(largest, 1)).all()


def make_space(spec: SpaceSpec, dtype: str, call: str, **others: Any) -> Space:
    rows, tokens = CALLS[call]
    return linear_attention.space_inputs(spec, [[*row] for row in rows], tokens, NUMPY[dtype], **others)


def unread(a: Space) -> list[np.ndarray]:
    """Its tensors, with NaN where nothing is read."""
    xbc, dt, z, *others, past, rows = (x.copy() for x in a.tensors)
    for b, (_, count, before) in enumerate(rows.tolist()):
        if count and not before:
            past[b] = np.nan
    return [*(mask(x, rows.tolist()) for x in (xbc, dt, z)), *others, past, rows]


def space_inputs(spec: SpaceSpec, dtype: str, call: str) -> list[np.ndarray]:
    return unread(make_space(spec, dtype, call))


def check_space(a: Space, dtype: str, in_place: bool = False) -> None:
    y, present = twice(lambda: cuda.run_node(a.spec, *(tensor(x, dtype) for x in unread(a)), in_place=in_place))
    assert_space(a, dtype, y, present, parts_of(a, dtype))


def parts_of(a: Space, dtype: str) -> float:
    """Of a call: PARTS where it is read in chunks."""
    batch, tokens = a.z.shape[:2]
    plan = cuda.plan_node(a.spec, dtype, batch, tokens=tokens, device=cuda.query())
    return PARTS if plan.chosen[0] else 0


def assert_space(a: Space, dtype: str, y: Any, present: Any, parts: float) -> None:
    (want, state), (y_span, state_span) = a.reference(), space_span(a, after=True, parts=parts)
    got = numbers(y)
    counts = np.zeros(want.shape[:2], bool)
    for b, (begin, count, _) in enumerate(a.rows.tolist()):
        counts[b, begin : begin + count] = True
    # The gate's exponent is of a product that f32 rounds, its exponential and reciprocal are within 2 ulp and 1; all
    # gates of a norm may be off to one side.
    gate = 2 * (2 * np.abs(a.own().z[counts].astype(np.float64)).max(initial=0) + 8) * U
    least = 2.0**-25 if dtype == "f16" else 0.0  # half of the smallest number
    most = y_span.error + (UNIT[dtype] + gate) * (np.abs(want) + y_span.error) + least
    assert (np.abs(got - want) <= most)[counts].all()
    assert (got[~counts] == 0).all()
    assert (np.abs(numbers(present) - state) <= state_span.error).all()


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", SPACES)
def test_space(name: str, call: str, dtype: str) -> None:
    check_space(make_space(SPACES[name], dtype, call), dtype, in_place=len(call) % 2 == 0)


@gpu
@pytest.mark.parametrize(
    "spec",
    [
        space_spec(8, 64, 128, 64, norm_size=512),  # Nemotron-3-Nano
        space_spec(1, 128, 128, 64),  # Granite 4 H
        space_spec(2, 160, 64, 96, norm_size=15360),
    ],
    ids=str,
)
def test_spaces_of_models(spec: SpaceSpec) -> None:
    for call in ("one token", "ragged few"):
        check_space(make_space(spec, "bf16", call), "bf16")


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", ["65", "300", "2100", "ragged many"])
@pytest.mark.parametrize("name", ["granite", "parts", "two blocks"])
def test_chunks_of_spaces_on_mma(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str) -> None:
    """What a GPU before sm_90 runs."""
    monkeypatch.setattr(cuda, "query", lambda *_: SM80)
    check_space(make_space(SPACES[name], dtype, call), dtype)


@gpu
@pytest.mark.parametrize("device", [cuda.H200, SM80], ids=["wgmma", "mma"])
@pytest.mark.parametrize("scale", [2.0**-18, 2.0**13])
def test_extreme_values_of_spaces_in_f16(monkeypatch: pytest.MonkeyPatch, scale: float, device: cuda.Device) -> None:
    """Values of which a state leaves f16's range, or that lie at its end."""
    monkeypatch.setattr(cuda, "query", lambda *_: device)
    a, values = make_space(SPACES["parts"], "f16", "300"), 4 * 64
    xbc = a.xbc.astype(np.float32)
    xbc[..., :values] *= scale
    check_space(replace(a, xbc=xbc.astype(np.float16), past=a.past * np.float32(scale * 64)), "f16")


@gpu
@pytest.mark.parametrize("decay", [(1e-9, 1e-8), (400.0, 500.0)], ids=["one", "zero"])
@pytest.mark.parametrize("steps", [0.0, 1.0, 20.0, 1000.0])
@pytest.mark.parametrize("name", ["small", "parts"])
def test_spaces_of_steps_and_decays(name: str, decay: tuple[float, float], steps: float) -> None:
    """Decays near one and zero; steps that are near zero, and that softplus leaves as they are."""
    a = make_space(SPACES[name], "bf16", "65", decay=decay)
    check_space(replace(a, dt=(a.dt.astype(np.float32) * steps).astype(a.dt.dtype)), "bf16")


@gpu
@pytest.mark.parametrize(
    ("name", "call"), [("small", "300"), ("wide", "300"), ("granite", "31"), ("granite", "300")], ids=str
)
def test_space_in_parts(name: str, call: str) -> None:
    """A state handed on between calls of 1, 7, 64, 65, .. tokens: one call's bytes; of chunks, within their bound."""
    spec = SPACES[name]
    CALLS["31"] = ([(0, 31, 0)], 31)
    a = make_space(spec, "bf16", call)
    inputs = unread(a)
    want, state = cuda.run_node(spec, *(tensor(x, "bf16") for x in inputs))
    ys = []
    past, at = tensor(inputs[7], "bf16"), 0
    for count in (1, 7, 16, 7) if call == "31" else (1, 7, 64, 65, 1, 1, 161):
        part = [tensor(x[:, at : at + count], "bf16") for x in inputs[:3]]
        others = [tensor(x, "bf16") for x in (*inputs[3:7], np.array([[0, count, at]], np.int32))]
        y, past = cuda.run_node(spec, *part, *others[:-1], past, others[-1], in_place=at > 0)
        ys.append(y)
        at += count
    if (name, call) == ("granite", "300"):
        assert_space(a, "bf16", torch.cat(ys, 1), past, PARTS)
    else:
        assert torch.equal(torch.cat(ys, 1), want)
        assert torch.equal(past, state)


@gpu
@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("call", [call for call in CALLS if call != "2100"])
def test_windows_of_spaces(call: str, window: int) -> None:
    """Slots have the bytes of calls that end there, or zeros."""
    a = make_space(SPACES["small"], "bf16", call)
    inputs = unread(a)
    want, _ = cuda.run_node(a.spec, *(tensor(x, "bf16") for x in inputs))
    spec = replace(a.spec, state_window=window)
    y, present = twice(lambda: cuda.run_node(spec, *(tensor(x, "bf16") for x in window_of(inputs, window))))
    assert torch.equal(y, want)
    for b, (_, count, before) in enumerate(CALLS[call][0]):
        for slot in range(window):
            made = count - window + 1 + slot
            if made > 0 or slot == window - 1:
                ends = a.row(b).tokens(slice(0, made), [[0, made, before]])
                _, state = cuda.run_node(a.spec, *(tensor(x, "bf16") for x in ends.tensors))
                assert torch.equal(present[slot, b], state[0])
            else:
                assert (present[slot, b] == 0).all()


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", ["one token", "65", "300", "2100", "ragged many"])
def test_windows_of_spaces_in_chunks(call: str, dtype: str) -> None:
    """y and the slots are, within the bound, those of calls without a window that end there."""
    window = 3
    a = make_space(SPACES["parts"], dtype, call)
    spec, parts = replace(a.spec, state_window=window), parts_of(a, dtype)
    y, present = twice(lambda: cuda.run_node(spec, *(tensor(x, dtype) for x in window_of(unread(a), window))))
    assert_space(a, dtype, y, present[-1], parts)
    for b, (begin, count, before) in enumerate(CALLS[call][0]):
        for slot in range(window - 1):
            made = count - window + 1 + slot
            if made > 0:
                ends = a.row(b).tokens(slice(0, made), [[0, made, before]])
                assert_space(ends, dtype, y[[b], begin : begin + made], present[slot, [b]], parts)
            else:
                assert (present[slot, b] == 0).all()


@gpu
@pytest.mark.parametrize("window", [1, 3])
def test_space_of_no_tokens(window: int) -> None:
    """Without tokens, or none that counts, the state stays, and the output is zero."""
    CALLS["none"], CALLS["none of three"] = ([(0, 0, 3), (0, 0, 0)], 0), ([(0, 0, 3), (3, 0, 0)], 3)
    spec = replace(SPACES["small"], state_window=window)
    for call in ("none", "none of three"):
        inputs = space_inputs(SPACES["small"], "f16", call)
        if window > 1:
            inputs = window_of(inputs, window)
        y, present = cuda.run_node(spec, *(tensor(x, "f16") for x in inputs))
        assert (y == 0).all()
        last = present[-1] if window > 1 else present
        assert torch.equal(last.cpu(), torch.from_numpy(inputs[7][-1] if window > 1 else inputs[7]))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_a_number_stays_in_its_column_and_norm(bad: float) -> None:
    spec = SPACES["small"]
    clean = space_inputs(spec, "bf16", "nine")
    inputs = [x.copy() for x in clean]
    inputs[0][0, 4, 5] = bad  # x of head 0
    y, present = cuda.run_node(spec, *(tensor(x, "bf16") for x in inputs))
    want, state = cuda.run_node(spec, *(tensor(x, "bf16") for x in clean))
    assert torch.equal(y[:, :4], want[:, :4])
    assert torch.equal(y[:, :, 64:], want[:, :, 64:])
    assert torch.isnan(y[:, 4:, 5]).all()
    others = [column for column in range(32) if column != 5]
    assert torch.equal(present[:, 0][..., others], state[:, 0][..., others])
    assert not torch.isfinite(present[:, 0, :, 5]).any()
    assert torch.equal(present[:, 1:], state[:, 1:])


@gpu
@pytest.mark.parametrize("tokens", [2, 20])
def test_space_of_a_batch_of_40(tokens: int) -> None:
    CALLS["large batch"] = ([(b % 2, tokens - b % 2, b % 3) for b in range(40)], tokens)
    check_space(make_space(SPACES["granite"], "bf16", "large batch"), "bf16")


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", DELTAS)
def test_delta(name: str, call: str, dtype: str) -> None:
    check_delta(DELTAS[name], dtype, delta_inputs(DELTAS[name], dtype, call), in_place=len(call) % 2 == 0)


@gpu
@pytest.mark.parametrize("decay", ["one", "zero"])
@pytest.mark.parametrize("call", ["eight", "300"])
def test_decays_near_one_and_zero(call: str, decay: str) -> None:
    check_delta(DELTAS["small"], "bf16", delta_inputs(DELTAS["small"], "bf16", call, decay))


@gpu
@pytest.mark.parametrize("decay", ["", "one", "zero"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_no_chunks(monkeypatch: pytest.MonkeyPatch, dtype: str, decay: str) -> None:
    """What a GPU of little shared memory runs."""
    monkeypatch.setattr(cuda, "query", lambda _: cuda.Device(89, 128, 102400))
    check_delta(DELTAS["qwen3-next"], dtype, delta_inputs(DELTAS["qwen3-next"], dtype, "300", decay))


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("call", ["65", "300", "2100", "ragged many"])
@pytest.mark.parametrize("name", ["qwen3-next", "small", "wide values", "wide keys"])
def test_chunks_on_mma(monkeypatch: pytest.MonkeyPatch, name: str, call: str, dtype: str) -> None:
    """What a GPU before sm_90 runs."""
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    check_delta(DELTAS[name], dtype, delta_inputs(DELTAS[name], dtype, call))


@gpu
@pytest.mark.parametrize("device", [cuda.H200, SM80], ids=["wgmma", "mma"])
@pytest.mark.parametrize("scale", [2.0**-18, 2.0**13])
def test_extreme_values_in_f16(monkeypatch: pytest.MonkeyPatch, scale: float, device: cuda.Device) -> None:
    """Values of which a state leaves f16's range, or that lie at its end."""
    monkeypatch.setattr(cuda, "query", lambda _: device)
    inputs = delta_inputs(DELTAS["qwen3-next"], "f16", "300")
    inputs[0] = (inputs[0].astype(np.float32) * scale).astype(np.float16)
    inputs[7] = inputs[7] * np.float32(scale * 64)
    check_delta(DELTAS["qwen3-next"], "f16", inputs)


@gpu
@pytest.mark.parametrize("tokens", [2, 20, 70])
def test_batch_of_40(tokens: int) -> None:
    CALLS["large batch"] = ([(b % 2, tokens - b % 2, b % 3) for b in range(40)], tokens)
    check_delta(DELTAS["qwen3.6"], "bf16", delta_inputs(DELTAS["qwen3.6"], "bf16", "large batch"))


@gpu
@pytest.mark.parametrize("name", ["small", "kimi"])
def test_delta_in_parts(name: str) -> None:
    """States handed on between calls of 1, 7, 64, 65 tokens: one call's, but for the roundings of f32."""
    spec = DELTAS[name]
    inputs = delta_inputs(spec, "bf16", "300")
    want, state = (numbers(x) for x in cuda.run_node(spec, *(tensor(x, "bf16") for x in inputs)))
    past, found, at = inputs[7], [], 0
    for count in (1, 7, 64, 65, 1, 1, 161):
        part = [x[:, at : at + count] for x in inputs[:4]]
        rows = np.array([[0, count, at]], np.int32)
        y, present = cuda.run_node(spec, *(tensor(x, "bf16") for x in (*part, *inputs[4:7], past, rows)))
        found.append(numbers(y))
        past, at = present.cpu().numpy(), at + count
    np.testing.assert_allclose(np.concatenate(found, 1), want, rtol=2 * UNIT["bf16"], atol=UNIT["bf16"] * 2**-6)
    assert np.abs(past - state).max() <= (STATE + 5 * CHUNK) * max(1, np.abs(state).max())


def window_of(made: list[np.ndarray], window: int) -> list[np.ndarray]:
    """Inputs whose past is the last of a window's slots; the others are not read."""
    past = np.full((window, *made[-2].shape), np.nan, made[-2].dtype)
    past[-1] = made[-2]
    return [*made[:-2], past, made[-1]]


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("window", [2, 5])
@pytest.mark.parametrize("call", [call for call in CALLS if call != "2100"])
def test_windows_of_states(call: str, window: int, dtype: str) -> None:
    for conv in (conv_spec(70, 3, state_window=window), conv_spec(70, 9, state_window=window)):
        inputs = window_of(conv_inputs(conv, dtype, call), window)
        y, present = twice(lambda conv=conv, inputs=inputs: cuda.run_node(conv, *(tensor(x, dtype) for x in inputs)))
        want, state = causal_conv(conv, *inputs)
        np.testing.assert_allclose(numbers(y), want, rtol=UNIT[dtype] * 1.01, atol=conv_error(conv))
        assert present.cpu().view(torch.int16).numpy().tobytes() == state.view(np.int16).tobytes()
    for name in ("qwen3-next", "kimi", "small"):
        spec = replace(DELTAS[name], state_window=window)
        check_delta(spec, dtype, window_of(delta_inputs(spec, dtype, call), window))


@gpu
@pytest.mark.parametrize("call", ["one token", "seven", "ragged few", "300", "ragged many"])
def test_windows_in_place_keep_what_is_of_no_token(call: str) -> None:
    for spec, make, run in (
        (conv_spec(64, state_window=6), conv_inputs, cuda.run_node),
        (replace(DELTAS["small"], state_window=6), delta_inputs, cuda.run_node),
        (replace(SPACES["small"], state_window=6), space_inputs, cuda.run_node),
    ):
        inputs = window_of(make(spec, "bf16", call), 6)
        inputs[-2][:-1] = 7
        y, apart = run(spec, *(tensor(x, "bf16") for x in inputs))
        again, present = run(spec, *(tensor(x, "bf16") for x in inputs), in_place=True)
        assert torch.equal(torch.nan_to_num(y), torch.nan_to_num(again))
        for b, (_, count, _) in enumerate(CALLS[call][0]):
            kept = 6 - min(max(count, 1), 6)
            assert (present[:kept, b] == 7).all()
            assert (apart[:kept, b] == 0).all()
            assert torch.equal(present[kept:, b], apart[kept:, b])


@gpu
@pytest.mark.parametrize("bad", [(0, 9, 0), (-1, 2, 0), (3, 6, 1), (0, 2, -5)], ids=str)
def test_rows_that_are_not_there(bad: tuple[int, int, int]) -> None:
    """NaN for the row, whose state stays; the others are what they are."""
    for spec, make, run in (
        (conv_spec(64), conv_inputs, cuda.run_node),
        (DELTAS["small"], delta_inputs, cuda.run_node),
        (SPACES["small"], space_inputs, cuda.run_node),
    ):
        CALLS["two"] = ([(0, 8, 1), (0, 8, 1)], 8)
        inputs = make(spec, "f16", "two")
        good = run(spec, *(tensor(x, "f16") for x in inputs))
        inputs[-1][1] = bad
        y, present = run(spec, *(tensor(x, "f16") for x in inputs), in_place=True)
        assert torch.equal(y[0], good[0][0])
        assert torch.equal(present[0], good[1][0])
        assert torch.isnan(y[1]).all()
        assert torch.equal(present[1].cpu(), torch.from_numpy(inputs[-2][1]))


@gpu
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_a_number_stays_in_its_head(bad: float) -> None:
    spec = DELTAS["small"]
    clean = delta_inputs(spec, "bf16", "nine")
    inputs = [x.copy() for x in clean]
    inputs[0][0, 4, 2 * 2 * 64 + 5] = bad  # a value of head 0
    y, present = cuda.run_node(spec, *(tensor(x, "bf16") for x in inputs))
    want, state = cuda.run_node(spec, *(tensor(x, "bf16") for x in clean))
    assert torch.equal(y[:, :4], want[:, :4])
    assert torch.equal(y[:, :, 64:], want[:, :, 64:])
    assert torch.isnan(y[:, 4:, 5]).all()
    assert torch.equal(present[:, 1], state[:, 1])


def test_plans() -> None:
    spec = delta_spec(16, 48, 128)
    small, chunk = cuda.Device(89, 128, 102400), 48 * (2 * 64 * 64 + 3 * 64 + 4) * 4
    then_gate, in_cluster, in_batch = range(3)
    for tokens, batch, device, steps, chunked, chunks in (
        (1, 1, cuda.H200, in_cluster, 0, 0),
        (1, 2, cuda.H200, in_cluster, 0, 0),
        (8, 3, cuda.H200, in_batch, 0, 0),
        (8, 1, SM80, in_batch, 0, 0),
        (9, 1, cuda.H200, then_gate, 0, 0),
        (1024, 2, small, then_gate, 0, 0),
        (1000, 2, SM80, then_gate, 1, 16),
        (8192, 1, cuda.H200, then_gate, 2, 32),  # at once
    ):
        plan = cuda.plan_node(spec, "bf16", batch, tokens=tokens, device=device)
        assert plan.chosen[:2] == [chunked, steps]
        outputs = 0 if tokens <= 8 else tokens * 48 * 128 * 4
        assert plan.workspace_bytes == batch * (outputs + chunks * chunk)
    assert not cuda.plan_node(DELTAS["kimi"], "bf16", 1, tokens=1024).chosen[0]  # a decay of each key


def test_plans_of_spaces() -> None:
    spec, chunk = space_spec(8, 64, 128, 64, norm_size=512), 64 * (64 * 64 + 3 * 64 + 4) * 4
    for tokens, batch, device, chunked, chunks in (
        (1, 1, cuda.H200, 0, 0),
        (31, 8, cuda.H200, 0, 0),
        (32, 2, cuda.H200, 2, 1),
        (1000, 2, SM80, 1, 16),
        (1000, 2, cuda.Device(89, 128, 102400), 0, 0),  # too little shared memory
        (8192, 1, cuda.H200, 2, 32),  # at once
    ):
        plan = cuda.plan_node(spec, "bf16", batch, tokens=tokens, device=device)
        assert plan.chosen[0] == chunked
        assert plan.workspace_bytes == batch * (tokens * 64 * 64 * 4 + chunks * chunk)
    for other in (SPACES["wide"], SPACES["small"]):  # states of 256 rows, heads of 32 columns
        assert not cuda.plan_node(other, "bf16", 1, tokens=1024).chosen[0]


@gpu
@pytest.mark.parametrize("call", ["one token", "eight", "ragged few"])
@pytest.mark.parametrize("window", [1, 3])
def test_without_clusters(monkeypatch: pytest.MonkeyPatch, call: str, window: int) -> None:
    """What a GPU before sm_90 runs, and every GPU for a batch."""
    monkeypatch.setattr(cuda, "query", lambda _: SM80)
    for of in DELTAS.values():
        spec, inputs = replace(of, state_window=window), delta_inputs(of, "bf16", call)
        check_delta(spec, "bf16", window_of(inputs, window) if window > 1 else inputs, in_place=window == 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (delta_spec(2, 4, 96), "k_head_size is 96 and v_head_size 96, the CUDA kernels take 64 and 128"),
        (delta_spec(2, 4, 64, v_head_size=32), "k_head_size is 64 and v_head_size 32, the CUDA kernels take 64"),
        (delta_spec(3, 4, 64), "num_v_heads is 4, expected a multiple of num_k_heads 3"),
        (delta_spec(2, 4, 64, l2_epsilon=-1.0), "l2_epsilon is -1, expected 0 or a positive number"),
        (space_spec(2, 4, 96, 64), "state_size is 96, the CUDA kernels take 64, 128 and 256"),
        (space_spec(2, 4, 64, 48), "head_size is 48, the CUDA kernels take multiples of 32"),
        (space_spec(1, 272, 64, 64), "norm_size is 17408, the CUDA kernels take up to 16384"),
        (space_spec(3, 4, 64, 64, norm_size=64), "num_heads is 4, expected a multiple of num_groups 3"),
        (conv_spec(63), "channels is 63, the CUDA kernel takes even numbers"),
        (replace(conv_spec(64), x_size=80, x_offset=7), "x_size is 80 and x_offset 7, the CUDA kernel takes even"),
        (conv_spec(64, 129), "width is 129, expected 2 to 128"),
    ],
    ids=str,
)
def test_refusals(spec: ConvSpec | DeltaSpec | SpaceSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda.plan_node(spec, "f16", 1, tokens=1)
    if "CUDA" in message:  # what needs no library says so, too
        assert cuda.refusal(spec).startswith(message)


def test_f32_is_refused() -> None:
    cuda.plan_node(conv_spec(64), "f32", 1, tokens=1)  # a convolution is not
    with pytest.raises(ValueError, match="qkv is of type 0"):
        cuda.plan_node(delta_spec(2, 4, 64), "f32", 1, tokens=1)
    with pytest.raises(ValueError, match="xbc is of type 0"):
        cuda.plan_node(space_spec(2, 4, 64, 64), "f32", 1, tokens=1)
