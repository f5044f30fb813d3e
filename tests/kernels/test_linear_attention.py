"""CausalConv, GatedDelta and StateSpace through the C ABI: every kernel within its bound; all of them, however they
run, the same bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.operators.linear_attention import (
    CONVS,
    DELTAS,
    RAGGED,
    SPACES,
    Conv,
    Delta,
    Space,
    assert_bytes,
    check_conv,
    check_delta,
    check_space,
    check_window,
    conv_inputs,
    delta_inputs,
    delta_span,
    space_inputs,
    space_span,
)
from support.operators.specs import conv_spec, delta_spec, space_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import ConvSpec, DeltaSpec, SpaceSpec

USABLE = [name for name, usable in native.kernels().items() if usable]
TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.fixture(params=USABLE)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", request.param)
    return request.param


def cases() -> list[Any]:
    """Ragged batches of every spec of the operators."""
    kinds: Any = (("conv", conv_inputs, CONVS), ("delta", delta_inputs, DELTAS), ("space", space_inputs, SPACES))
    return [
        pytest.param(make(spec, RAGGED, 9), id=f"{kind}-{name}")
        for kind, make, specs in kinds
        for name, spec in specs.items()
    ]


def check(a: Any, got: tuple[np.ndarray, np.ndarray]) -> None:
    {Conv: check_conv, Delta: check_delta, Space: check_space}[type(a)](a, got)


@pytest.mark.parametrize("a", cases())
def test_every_kernel_is_within_its_bound(kernel: str, a: Conv | Delta | Space) -> None:
    check(a, a.run())


@pytest.mark.parametrize("dtype", TYPES)
def test_types(kernel: str, dtype: Any) -> None:
    for a in (
        conv_inputs(CONVS["4"], RAGGED, 9, dtype, bias=False),
        delta_inputs(DELTAS["plain"], RAGGED, 9, dtype),
        space_inputs(SPACES["plain"], RAGGED, 9, dtype),
    ):
        y, state = a.run()
        assert (y.dtype, state.dtype) == (dtype, a.past.dtype)
        check(a, (y, state))


@pytest.mark.parametrize("decay", [(1e-6, 1e-4), (0.01, 16.0), (30.0, 1000.0)], ids=["kept", "usual", "forgotten"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 32, 33, 64, 65, 300])
def test_prompts(tokens: int, decay: tuple[float, float]) -> None:
    """Decays near 1 and 0; states in place and in slabs; groups of 32 tokens."""
    a = delta_inputs(delta_spec(1, 2, 32), [[0, tokens, 4]], tokens, decay=decay)
    check_delta(a, a.run(lanes=2))
    b = space_inputs(space_spec(1, 2, 32, 16), [[0, tokens, 4]], tokens, decay=decay)
    check_space(b, b.run(lanes=2))


@pytest.mark.parametrize("a", cases())
def test_kernels_lanes_and_memory_give_the_same_bytes(a: Conv | Delta | Space, monkeypatch: pytest.MonkeyPatch) -> None:
    want = a.run()
    for name in USABLE:
        monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", name)
        for lanes in (1, 2, 64):
            assert_bytes(a.run(lanes=lanes), want)
        past = a.past.copy()
        assert_bytes(dataclasses.replace(a, past=past).run(present=past, lanes=3), want)


@pytest.mark.parametrize("a", cases())
def test_a_row_has_the_bytes_that_it_has_alone(a: Conv | Delta | Space) -> None:
    y, state = a.run(lanes=2)
    for b, (begin, count, _) in enumerate(a.rows.tolist()):
        assert_bytes((y[b : b + 1, begin : begin + count], state[b : b + 1]), a.row(b).run())
        assert not np.delete(y[b], np.s_[begin : begin + count], 0).any()
        if not count:
            assert_bytes((state[b],), (a.past[b],))


@pytest.mark.parametrize("sizes", [(1,), (7,), (64, 65), (65, 1, 1), (33, 9, 8)], ids=str)
@pytest.mark.parametrize("spec", [*CONVS.values(), *DELTAS.values(), *SPACES.values()], ids=[*CONVS, *DELTAS, *SPACES])
def test_a_prompt_in_chunks_has_the_bytes_of_one_at_once(spec: Any, sizes: tuple[int, ...]) -> None:
    make: Any = {ConvSpec: conv_inputs, DeltaSpec: delta_inputs, SpaceSpec: space_inputs}[type(spec)]
    a = make(spec, [[0, 140, 0]], 140)
    want = a.run()
    past, at, pieces = np.full_like(a.past, np.nan), 0, []
    while at < 140:
        count = min(sizes[len(pieces) % len(sizes)], 140 - at)
        part = dataclasses.replace(a, past=past).tokens(slice(at, at + count), [[0, count, at]])
        pieces.append(part.run(present=past, lanes=1 + len(pieces) % 3)[0])
        at += count
    assert_bytes((np.concatenate(pieces, 1), past), want)


@pytest.mark.parametrize("window", [2, 4, 9])
@pytest.mark.parametrize("a", cases())
def test_slots_of_a_window_are_the_states_of_fewer_tokens(kernel: str, a: Any, window: int) -> None:
    """More tokens than slots, as many, and fewer."""
    check_window(a, window)


@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 33, 70])
def test_a_window_of_a_prompt(tokens: int) -> None:
    """States in place and in slabs, groups of 32 tokens; NaN with a payload."""
    a = delta_inputs(delta_spec(1, 2, 32, v_head_size=48), [[0, tokens, 4]], tokens)
    a.past.view(np.uint32)[0, 0, 3, 7] = 0xFFC12345
    check_window(a, 5)


@pytest.mark.parametrize("a", cases())
def test_nothing_before_is_not_read(kernel: str, a: Conv | Delta | Space) -> None:
    """past = 0: whatever is in the state, it counts as zeros."""
    a.rows[:, 2] = 0
    zeros, dirty = np.zeros_like(a.past), np.full_like(a.past, np.nan)
    y, state = dataclasses.replace(a, past=zeros).run()
    again, other = dataclasses.replace(a, past=dirty).run()
    counts = a.rows[:, 1] > 0
    assert_bytes((again, other[counts]), (y, state[counts]))
    past = dirty.copy()
    assert_bytes(dataclasses.replace(a, past=past).run(present=past, lanes=2), (again, other))
    assert np.isfinite(y).all()


def test_nothing_to_do() -> None:
    for rows, tokens in (([[0, 0, 3]], 0), ([[1, 0, 3]], 2), ([], 2)):
        for a in (
            conv_inputs(CONVS["4"], rows, tokens),
            delta_inputs(DELTAS["plain"], rows, tokens),
            space_inputs(SPACES["plain"], rows, tokens),
        ):
            check(a, a.run(lanes=2))


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [6, 40])
def test_what_is_not_a_number_stays_in_its_head(kernel: str, tokens: int, bad: float, lanes: int) -> None:
    """A key reaches its value heads from its token on, a value its feature of the state; no other row."""
    spec = delta_spec(2, 4, 16)
    a = delta_inputs(spec, [[0, tokens, 3]] * 2, tokens)
    want, states = a.run()
    for at in (32 + 5, 64 + 16 + 7):  # key 5 of the first key head, value 7 of the second value head
        qkv = a.qkv.copy()
        qkv[0, 3, at] = bad
        y, state = dataclasses.replace(a, qkv=qkv).run(lanes=lanes)
        heads = slice(0, 32) if at < 64 else slice(16, 32)
        reached = np.zeros(y.shape, bool)
        reached[0, 3:, heads] = True
        assert_bytes((y[~reached],), (want[~reached],))
        if at < 64 or np.isnan(bad):
            assert np.isnan(y[reached]).all()  # the norm is of the whole head
        assert not np.isfinite(y[0, 3:, 16 + 7]).any()
        spoilt = np.zeros(state.shape, bool)
        spoilt[(0, slice(0, 2)) if at < 64 else (0, 1, slice(None), 7)] = True
        assert_bytes((state[~spoilt],), (states[~spoilt],))
        assert not np.isfinite(state[spoilt]).any()
        for x in (y, state):
            assert {n.tobytes() for n in x[np.isnan(x)]} <= {np.float32(np.nan).tobytes()}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [6, 40])
def test_what_is_not_a_number_reaches_what_is_normed_with_it(kernel: str, tokens: int, bad: float) -> None:
    """x of a head its state's column, B those of its group; the output all that has the same norm; no other row."""
    a = space_inputs(space_spec(2, 4, 16, 32, norm_size=64), [[0, tokens, 3]] * 2, tokens)
    want, states = a.run()
    for at, heads, columns in ((32 + 7, [1], [7]), (128 + 5, [0, 1], [*range(32)])):  # x of head 1; B of group 0
        xbc = a.xbc.copy()
        xbc[0, 3, at] = bad
        y, state = dataclasses.replace(a, xbc=xbc).run(lanes=3)
        reached = np.zeros(y.shape, bool)
        reached[0, 3:, :64] = True
        assert_bytes((y[~reached],), (want[~reached],))
        spoilt = np.zeros(state.shape, bool)
        spoilt[np.ix_([0], heads, [*range(16)] if at < 128 else [5], columns)] = True
        assert_bytes((state[~spoilt],), (states[~spoilt],))
        assert not np.isfinite(state[spoilt]).any()
        of_heads = y[0, 3:, [32 * head + column for head in heads for column in columns]]
        assert not np.isfinite(of_heads).any()
        assert {n.tobytes() for n in y[np.isnan(y)]} <= {np.float32(np.nan).tobytes()}


def test_decays_that_are_not_numbers(kernel: str) -> None:
    """a and a_log of any kind: infinite ones forget all or nothing, NaN reaches its head."""
    spec = delta_spec(1, 1, 16)
    a = delta_inputs(spec, [[0, 3, 1]], 3)
    for value, kept in ((np.inf, 0.0), (-np.inf, 1.0)):
        ones = dataclasses.replace(a, a=np.full_like(a.a, value), b=np.full_like(a.b, -np.inf))  # beta 0
        _, state = ones.run()
        np.testing.assert_allclose(state, a.past * kept, rtol=1e-6, atol=1e-30)
    y, state = dataclasses.replace(a, a=np.full_like(a.a, np.nan)).run()
    assert np.isnan(y).all()
    assert np.isnan(state).all()


def test_the_convolution_keeps_bits(kernel: str) -> None:
    """The state is x's bits, NaN payloads too; a channel that is not a number is one for W tokens."""
    a = conv_inputs(conv_spec(130), [[0, 6, 1]], 6, np.float16)
    bits = a.x.view(np.uint16)
    bits[0, 3:, 7] = 0xFD2A, 0x7C00, 0x7E01
    y, state = a.run()
    assert state.view(np.uint16)[0, 7].tolist() == [0xFD2A, 0x7C00, 0x7E01]
    assert np.isnan(y[0, 3:, 7]).all()
    assert np.isfinite(np.delete(y, 7, 2)).all()
    assert np.isfinite(y[0, :3]).all()


@pytest.mark.parametrize("lanes", [1, 2, 64])
def test_the_workspace_is_what_the_header_states(lanes: int) -> None:
    sizes: list[int] = []

    def buffer(size: int) -> np.ndarray:
        sizes.append(size)
        return native.aligned(size)

    conv_inputs(conv_spec(300, width=5), [[0, 3, 2]], 3).run(lanes=lanes, buffer=buffer)
    assert sizes[-1] == lanes * 2 * 6 * 1024
    delta_inputs(delta_spec(1, 2, 24, v_head_size=40), [[0, 3, 2]], 3).run(lanes=lanes, buffer=buffer)
    assert sizes[-1] <= lanes * 4 * (32 * 48 + 32 * (4 * 32 + 2 * 48 + 16))
    space_inputs(space_spec(1, 2, 24, 40), [[0, 3, 2]], 3).run(lanes=lanes, buffer=buffer)
    assert sizes[-1] <= 4 * 3 * 2 * 40 + lanes * 4 * (32 * 48 + 32 * (4 * 32 + 2 * 48 + 16))


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: conv_inputs(CONVS["4"], rows, 3),
        lambda rows: delta_inputs(DELTAS["plain"], rows, 3),
        lambda rows: space_inputs(SPACES["plain"], rows, 3),
    ],
)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([-1, 1, 0], r"rows\[1\] is \[-1, 1, 0\] .*: expected numbers of at least 0"),
        ([0, -1, 0], r"rows\[1\] .*: expected numbers of at least 0"),
        ([0, 1, -1], r"rows\[1\] .*: expected numbers of at least 0"),
        ([2, 2, 0], r"rows\[1\] .*: the call's tokens are 3"),
        ([2147483647, 2147483647, 2147483647], r"rows\[1\] .*: the call's tokens are 3"),
    ],
)
def test_rows_that_cannot_be(make: Any, row: list[int], message: str) -> None:
    a = make([[0, 1, 0], row])
    with pytest.raises(ValueError, match=message):
        a.run()
    with pytest.raises(ValueError, match=r"rows\[1\]"):
        a.reference()


@pytest.mark.parametrize(
    ("spec", "change", "message"),
    [
        ("conv", {"channels": 0}, "channels is 0, expected 1 to"),
        ("conv", {"width": 1}, "width is 1, expected 2 to 128"),
        ("conv", {"width": 129}, "width is 129, expected 2 to 128"),
        ("conv", {"state_window": 0}, "state_window is 0, expected 1 to 64"),
        ("delta", {"state_window": 65}, "state_window is 65, expected 1 to 64"),
        ("conv", {"activation": "gelu"}, 'activation is "gelu", the operator defines: none, silu'),
        ("delta", {"num_k_heads": 0}, "num_k_heads is 0, expected 1 to"),
        ("delta", {"num_v_heads": 3}, "num_v_heads is 3, expected a multiple of num_k_heads 2"),
        ("delta", {"k_head_size": 0}, "k_head_size is 0, expected 1 to 1024"),
        ("delta", {"v_head_size": 1025}, "v_head_size is 1025, expected 1 to 1024"),
        ("delta", {"decay_per_key": 2}, "decay_per_key is 2, expected 0 to 1"),
        ("delta", {"scale": float("nan")}, "scale is nan, expected a number"),
        ("delta", {"beta_scale": float("inf")}, "beta_scale is inf, expected a number"),
        ("delta", {"l2_epsilon": -1.0}, "l2_epsilon is -1, expected 0 or a positive number"),
        ("delta", {"norm_epsilon": float("inf")}, "norm_epsilon is inf, expected 0 or a positive number"),
        ("delta", {"gate": "relu"}, 'gate is "relu", the operator defines: silu, sigmoid'),
        ("conv", {"x_size": 50, "x_offset": 11}, "x_size is 50 and x_offset 11, expected room for 40 features"),
        ("space", {"num_groups": 0}, "num_groups is 0, expected 1 to"),
        ("space", {"num_heads": 3}, "num_heads is 3, expected a multiple of num_groups 2"),
        ("space", {"state_size": 1025}, "state_size is 1025, expected 1 to 1024"),
        ("space", {"head_size": 0}, "head_size is 0, expected 1 to 1024"),
        ("space", {"norm_size": 0}, "norm_size is 0, expected whole heads of 16, and a divisor of all heads' 64"),
        ("space", {"norm_size": 24}, "norm_size is 24, expected whole heads of 16"),
        ("space", {"norm_size": 48}, "norm_size is 48, expected whole heads of 16"),
        ("space", {"norm_epsilon": -1.0}, "norm_epsilon is -1, expected 0 or a positive number"),
        ("space", {"dt_size": 5, "dt_offset": 2}, "dt_size is 5 and dt_offset 2, expected room for 4 features"),
        ("space", {"z_size": 64, "z_offset": -1}, "z_size is 64 and z_offset -1, expected room for 64 features"),
        ("space", {"state_window": 0}, "state_window is 0, expected 1 to 64"),
    ],
)
def test_bad_attributes_are_named(spec: str, change: dict, message: str) -> None:
    found: Any = {"conv": CONVS["4"], "delta": DELTAS["plain"], "space": SPACES["plain"]}[spec]
    assert message in native.refusal(dataclasses.replace(found, **change), {})


@pytest.mark.parametrize(
    "change",
    [{"l2_epsilon": 1e-2}, {"norm_epsilon": 0.101}, {"scale": 32**-0.5 * (1 + 2**-10)}, {"beta_scale": 1 + 2**-10}],
)
def test_a_rule_a_little_different_is_noticed(change: dict) -> None:
    a = delta_inputs(delta_spec(2, 4, 32, norm_epsilon=0.1), [[0, 20, 3]], 20)
    got = dataclasses.replace(a, spec=dataclasses.replace(a.spec, **change)).run()
    assert any((np.abs(x - want.value) > want.error).any() for x, want in zip(got, delta_span(a), strict=True))


@pytest.mark.parametrize("change", [{"norm_epsilon": 0.101}, {"norm_size": 16}])
def test_a_space_a_little_different_is_noticed(change: dict) -> None:
    a = space_inputs(space_spec(2, 4, 32, 16, norm_epsilon=0.1), [[0, 20, 3]], 20)
    got = dataclasses.replace(a, spec=dataclasses.replace(a.spec, **change)).run()
    assert any((np.abs(x - want.value) > want.error).any() for x, want in zip(got, space_span(a), strict=True))
