"""Mamba-2's state space as nodes of ONNX.

Of a head h, whose group of heads shares B and C: dt = softplus(dt + dt_bias), S_t = exp(-exp(A_log) dt_t) S_(t-1) +
B_t^T (dt_t x_t), y_t = C_t S_t + D x_t. A run needs no loop: tokens are taken in chunks. The tokens of a chunk meet in
products of every two, ((C B^T) * decays) (dt x). The state that a chunk begins with is a sum of what the chunks before
it left, with the decays from there, and of the state before the run. Of one token all that touches a state is C S,
B^T (dt x), a product with the decay and a sum: what several chunks need has then no elements.

A decay is the exponential of a sum of -exp(A_log) dt, all of one sign, over the tokens between two, and each sum is
made of those terms alone. As the difference of two sums from the chunk's first token it would err by 2^-24 of those,
which one token that lets go of everything makes large for all pairs behind it. A sum of n terms of one sign errs by at
most n 2^-24 of itself, and beyond -17 its decay is below an f32's last bit.

A token needs memory for its row of the chunk's products and its part of what the chunk leaves, CHUNK and
states * size / CHUNK numbers a head, and CHUNK^2 multiplications for the sums: 64 is where those are fewer than the
others'. All of it is f32 in any graph, since nothing bounds the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import tape

from quantmoe.exporter.names import STATE_SPACE

#: tokens whose products of every two are made
CHUNK = 64
#: of ONNX, in which the nodes are as they are
OPSET = 18
_FLOAT, _INT = ir.DataType.FLOAT, ir.DataType.INT64


def state_space(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
    rows: torch.Tensor,
    sizes: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """In a trace: a node that :func:`place_state_spaces` replaces.

    Args:
        mixed: x, B and C beside each other, [B, S, heads * size + 2 * groups * states]. dt: [B, S, heads].
        a_log, dt_bias, d: f32 [heads].
        state: f32 [B, heads, states, size], a window of them in front. rows: see rows.py's :func:`rows_of`.
        sizes: groups, heads, size, states and window.

    Returns:
        f32 [B, S, heads * size], of tokens that do not count numbers that nothing reads; and the next state.
    """
    y, present = torch.onnx.ops.symbolic_multi_out(
        f"quantmoe::{STATE_SPACE}",
        (mixed, dt, a_log, dt_bias, d, state, rows),
        sizes,
        dtypes=(torch.float32, torch.float32),
        shapes=((*mixed.shape[:2], sizes["heads"] * sizes["size"]), state.shape),
        version=1,
    )
    return y, present


def alone(sizes: dict[str, int], dtype: ir.DataType = _FLOAT) -> ir.Model:
    """A graph of nothing but one of those nodes in its final form: inputs and outputs are :func:`state_space`'s.

    Args:
        dtype: of ``mixed`` and ``dt``.
    """
    kinds = {"mixed": dtype, "dt": dtype, "a_log": _FLOAT, "dt_bias": _FLOAT, "d": _FLOAT, "state": _FLOAT}
    kinds["rows"] = ir.DataType.INT32
    inputs = [ir.Value(name=name, type=ir.TensorType(kind)) for name, kind in kinds.items()]
    outputs = [ir.Value(name=name, type=ir.TensorType(_FLOAT)) for name in ("y", "present")]
    node = ir.node(STATE_SPACE, inputs, sizes, outputs=outputs, name=STATE_SPACE)
    graph = ir.Graph(inputs, outputs, nodes=[node], opset_imports={"": OPSET}, name=STATE_SPACE)
    place_state_spaces(graph)
    return ir.Model(graph, ir_version=10)


def place_state_spaces(graph: ir.Graph) -> None:
    """Gives each of those nodes its final form."""
    shared: dict[tuple[ir.Value, int], _Run] = {}
    constants: dict[str, ir.Value] = {}
    for n, node in enumerate([node for node in graph if node.op_type == STATE_SPACE]):
        given = [value for value in node.inputs if value is not None]
        ops, sizes = _Ops(constants), {name: attribute.as_int() for name, attribute in node.attributes.items()}
        key = given[-1], sizes["window"]
        if key not in shared:
            shared[key] = _Run(ops, given[0], *key)
        for old, new in zip(node.outputs, _place(ops, shared[key], given[:-1], **sizes), strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
            old.name = None
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        for i, made in enumerate(ops.nodes):
            made.name = f"{STATE_SPACE}_{n}.{i}"
            made.metadata_props.update(node.metadata_props)
        graph.insert_before(node, ops.nodes)
        graph.remove(node, safe=True)


class _Ops(tape.Tape):
    """Nodes of one output each: ``ops.Add(a, b)``; numbers are constants, each once in ``constants``."""

    def __init__(self, constants: dict[str, ir.Value]):
        super().__init__()
        self._constants = constants

    def __getattr__(self, kind: str) -> Any:
        def make(*inputs: Any, **attributes: Any) -> ir.Value:
            return self.op(kind, [self._value(value) for value in inputs], attributes)

        return make

    def _value(self, given: Any) -> ir.Value:
        if isinstance(given, ir.Value):
            return given
        if (key := repr(given)) not in self._constants:
            array = np.array(given, np.float32 if isinstance(given, float) else np.int64)
            self._constants[key] = self.op("Constant", [], {"value": ir.tensor(array)})
        return self._constants[key]

    def parts(self, value: ir.Value, sizes: Sequence[int]) -> Sequence[ir.Value]:
        """Of the last axis."""
        return self.op_multi_out("Split", [value, self._value(sizes)], {"axis": -1}, num_outputs=len(sizes))

    def swapped(self, value: ir.Value, rank: int) -> ir.Value:
        """The last two axes."""
        return self.Transpose(value, perm=[*range(rank - 2), rank - 1, rank - 2])


class _Run:
    """What all nodes of a graph share: where tokens are, and which come before which.

    Attributes:
        new: tokens of a run, int64 [1]. taken: [chunks, length], which tokens of a run: behind its end the last one.
        counts: f32 [B, 1, 1, chunks, length], 1 where a token counts.
        kept: the same for each state of a window, in front, that has a token.
        read: f32 [B, 1, 1, 1, 1], 1 where there is a state before.
        later, later_chunk: f32 [n, n], 1 where a row's token, or chunk, comes after a column's.
        before: where a row's chunk comes before a column's. until: where a row's token is a column's or before it.
        tokens, chunks: the ``order`` of :func:`_decays`, of a chunk's tokens and of all chunks but the last.
    """

    def __init__(self, ops: _Ops, mixed: ir.Value, rows: ir.Value, window: int):
        self.new = ops.Shape(mixed, start=1, end=2)
        new, size = ops.Squeeze(self.new), ops.Squeeze(ops.Min(self.new, [CHUNK]))
        # Sizes become tensors by Range alone, see rows.py's rows_of.
        begins, within, last = ops.Range(0, new, size), ops.Range(0, size, 1), ops.Range(ops.Sub(new, 1), new, 1)
        slots = ops.Add(ops.Unsqueeze(begins, [1]), within)
        self.taken = ops.Min(slots, last)
        wide = ops.Unsqueeze(ops.Cast(rows, to=_INT), [2, 3, 4, 5])
        begin, count, past = (ops.Gather(wide, index, axis=1) for index in range(3))  # [B, 1, 1, 1, 1]
        place = ops.Sub(slots, begin)
        begun = ops.GreaterOrEqual(place, 0)
        self.counts = ops.Cast(ops.And(begun, ops.Less(place, count)), to=_FLOAT)
        self.read = ops.Cast(ops.Or(ops.Greater(past, 0), ops.Equal(count, 0)), to=_FLOAT)
        self.kept = None
        if window > 1:
            ends = ops.Sub(ops.Unsqueeze(count, [0]), ops.Unsqueeze([*range(window)][::-1], [1, 2, 3, 4, 5]))
            self.kept = ops.Cast(ops.Less(place, ends), to=_FLOAT)  # numbers of tokens that do not count are 0 anyway
        self.later = _later(ops, within)
        chunks = ops.Range(0, ops.Squeeze(ops.Shape(begins)), 1)
        self.later_chunk = _later(ops, chunks)
        self.before = ops.swapped(self.later_chunk, 2)
        self.until = ops.Sub(1.0, self.later)
        but_last = _later(ops, ops.Slice(chunks, [0], [-1], [0]))
        self.tokens, self.chunks = ((part, ops.swapped(ops.Sub(1.0, part), 2)) for part in (self.later, but_last))


def _later(ops: _Ops, at: ir.Value) -> ir.Value:
    return ops.Cast(ops.Greater(ops.Unsqueeze(at, [1]), at), to=_FLOAT)


def _softplus(ops: _Ops, x: ir.Value) -> ir.Value:
    """ONNX Runtime's Softplus takes the logarithm of 1 + exp(x) as it was rounded, which of a time step of 0.001 leaves
    four digits. What rounding made of 1 + u, (1 + u) - 1 shows."""
    u = ops.Exp(ops.Neg(ops.Abs(x)))
    w = ops.Add(u, 1.0)
    grown = ops.Mul(ops.Log(w), ops.Div(u, ops.Sub(w, 1.0)))
    return ops.Add(ops.Relu(x), ops.Where(ops.Equal(w, 1.0), u, grown))


def _decays(ops: _Ops, logs: ir.Value, order: tuple[ir.Value, ir.Value]) -> ir.Value:
    """What is left of what came with token j when token i has come: [.., n, n], 0 before.

    Args:
        logs: of each token's decay [.., n], none above 0.
        order: f32 [n, n], 1 where a row's token comes after a column's; and where it does or is the same.
    """
    later, reached = order
    between = ops.MatMul(reached, ops.Mul(ops.Unsqueeze(logs, [-1]), later))
    return ops.Mul(ops.Exp(between), reached)


def _place(
    ops: _Ops, run: _Run, given: Sequence[Any], groups: int, heads: int, size: int, states: int, window: int
) -> tuple[ir.Value, ir.Value]:
    """The two outputs. G: groups, R: heads of a group, C: chunks, L: tokens of a chunk, T: C L, N: states, P: size."""
    mixed, dt, a_log, dt_bias, d, state = given
    each = heads // groups

    def apart(value: ir.Value, *sizes: int) -> ir.Value:
        """[B, S, features] as [B, G, R, C, L, ..]."""
        value = ops.Gather(value, run.taken, axis=1)
        value = value if mixed.dtype == _FLOAT else ops.Cast(value, to=_FLOAT)
        axes = [0, 3, 4, 1, 2, 5][: 3 + len(sizes)]
        return ops.Transpose(ops.Reshape(value, [0, 0, 0, *sizes]), perm=axes)

    def of_heads(parameter: ir.Value, *more: int) -> ir.Value:
        return ops.Reshape(parameter, [groups, each, 1, 1, *more])

    def but_last(value: ir.Value) -> ir.Value:
        return ops.Slice(value, [0], [-1], [3])

    def but_first(value: ir.Value) -> ir.Value:
        return ops.Slice(value, [1], [2**31 - 1], [3])

    x, k, q = ops.parts(mixed, [heads * size, *[groups * states] * 2])
    x, k, q = apart(x, groups, each, size), apart(k, groups, 1, states), apart(q, groups, 1, states)
    steps = _softplus(ops, ops.Add(apart(dt, groups, each), of_heads(dt_bias)))
    steps = ops.Mul(steps, run.counts)  # a token that does not count leaves nothing and lets go of nothing
    logs = ops.Mul(steps, ops.Neg(ops.Exp(of_heads(a_log))))  # [B, G, R, C, L]
    v = ops.Mul(x, ops.Unsqueeze(steps, [-1]))

    def flat(value: ir.Value, width: int) -> ir.Value:
        """[B, G, .., T, width]"""
        return ops.Reshape(value, [0, 0, 0, -1, width])

    scores = ops.MatMul(q, ops.swapped(k, 6))
    y = ops.MatMul(ops.Mul(scores, _decays(ops, logs, run.tokens)), v)

    since, totals = ops.MatMul(logs, run.until), ops.ReduceSum(logs, [-1], keepdims=0)  # from a chunk's begin; of it
    live = state if window == 1 else ops.Gather(state, window - 1, axis=0)
    before = ops.Unsqueeze(ops.MatMul(totals, run.before), [-1])
    entered = ops.Mul(ops.Exp(ops.Add(since, before)), run.read)
    old = ops.MatMul(flat(q, states), ops.Reshape(live, [0, groups, each, states, size]))
    old = ops.Mul(old, flat(entered, 1))

    rest = ops.MatMul(logs, run.later)  # until a chunk's end, without the token's own
    left = ops.Mul(but_last(v), ops.Unsqueeze(ops.Exp(but_last(rest)), [-1]))
    left = ops.Reshape(ops.MatMul(ops.swapped(but_last(k), 6), left), [0, 0, 0, 0, states * size])
    begun = ops.MatMul(_decays(ops, but_last(totals), run.chunks), left)  # what all chunks but the first begin with
    begun = ops.MatMul(but_first(q), ops.Reshape(begun, [0, 0, 0, 0, states, size]))
    begun = ops.Mul(begun, ops.Unsqueeze(ops.Exp(but_first(since)), [-1]))
    y = ops.Add(y, ops.Pad(begun, [*[0] * 3, 1, *[0] * 8]))
    y = ops.Add(flat(ops.Add(y, ops.Mul(x, of_heads(d, 1))), size), old)
    y = ops.Reshape(ops.Transpose(y, perm=[0, 3, 1, 2, 4]), [0, 0, heads * size])

    ahead = [0] * (window > 1)  # axes in front of a state's
    if run.kept is not None:
        logs = ops.Mul(logs, run.kept)
        v = ops.Mul(v, ops.Unsqueeze(run.kept, [-1]))
        rest, totals = ops.MatMul(logs, run.later), ops.ReduceSum(logs, [-1], keepdims=0)
    ends = ops.Exp(ops.Add(rest, ops.Unsqueeze(ops.MatMul(totals, run.later_chunk), [-1])))
    v = ops.Reshape(ops.Mul(v, ops.Unsqueeze(ends, [-1])), [*ahead, 0, 0, 0, -1, size])
    added = ops.Reshape(ops.MatMul(ops.swapped(flat(k, states), 5), v), [*ahead, 0, heads, states, size])
    whole = ops.Mul(ops.Unsqueeze(ops.Exp(ops.ReduceSum(totals, [-1], keepdims=1)), [-1]), run.read)
    present = ops.Add(ops.Mul(live, ops.Reshape(whole, [*ahead, 0, heads, 1, 1])), added)
    return ops.Slice(y, [0], run.new, [1]), present
