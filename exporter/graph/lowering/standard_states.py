"""CausalConv, GatedDelta and StateSpace -> operators that ONNX Runtime has itself.

Which ones, the target's opset says. None: com.microsoft's CausalConvWithState and LinearAttention, which have kernels
for the CPU, CUDA and WebGPU. From 27: the operators of these names in ai.onnx, which ONNX Runtime 1.32 expands to other
nodes and runs slowly. Below 27: Conv and Scan.

All of these take every token. Here tokens that do not count keep the state: their decay is 0 and their update rate, or
their key, is 0. A convolution reads its tokens through a gather that puts the state beside the first one that counts.
All of it is f32 in any graph, as in the operators' own kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import tape
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from quantmoe.custom_ops.op import DOMAIN, ConvSpec, DeltaSpec, SpaceSpec

#: ai.onnx has LinearAttention and CausalConvWithState from here on
NEWEST = 27
_END = 2**31 - 1


class _Nodes(tape.Tape):
    """New nodes, with constants among their inputs."""

    def __init__(self, rows: ir.Value, x: ir.Value, opset: int | None):
        super().__init__()
        self.domain = "com.microsoft" if opset is None else ""
        self.scans = opset is not None and opset < NEWEST
        self._rows, self._like = rows, x

    def __call__(self, op: str, *inputs: ir.Value | int | float | Sequence[int] | None, **attributes: Any) -> ir.Value:
        return self.op(op, [self._value(given) for given in inputs], attributes)

    def _value(self, given: ir.Value | int | float | Sequence[int] | None) -> ir.Value | None:
        if given is None or isinstance(given, ir.Value):
            return given
        kind = np.float32 if isinstance(given, float) else np.int64
        return self.op("Constant", [], {"value": ir.tensor(np.array(given, kind))})

    def wide(self, x: ir.Value | None) -> ir.Value:
        assert x is not None
        return x if x.dtype == ir.DataType.FLOAT else self("Cast", x, to=ir.DataType.FLOAT)

    def part(self, x: ir.Value | None, offset: int, size: int) -> ir.Value:
        """Return features of the last axis, f32."""
        assert x is not None
        whole = x.shape is not None and x.shape[-1] == size
        return self.wide(x) if whole else self.wide_of(self("Slice", x, [offset], [offset + size], [-1]), x)

    def wide_of(self, made: ir.Value, x: ir.Value) -> ir.Value:
        """Return a new value of an old one's type, f32."""
        made.type = x.type
        return self.wide(made)

    def row(self, index: int) -> ir.Value:
        """Return a column of ``rows``, int64 [B, 1]."""
        column = self("Slice", self._rows, [index], [index + 1], [1])
        return self("Cast", column, to=ir.DataType.INT64)

    def counts(self) -> ir.Value:
        """Return 1 for tokens that count and 0 for others, f32 [B, S, 1]."""
        place = self("Sub", self.tokens(), self.row(0))
        inside = self("And", self("GreaterOrEqual", place, 0), self("Less", place, self.row(1)))
        return self("Unsqueeze", self("Cast", inside, to=ir.DataType.FLOAT), [2])

    def tokens(self, more: int = 0) -> ir.Value:
        """Return 0, 1, .. for each token and so many more, int64."""
        length = self("Squeeze", self("Shape", self._like, start=1, end=2), [0])
        return self("Range", 0, self("Add", length, more) if more else length, 1)

    def live(self, state: ir.Value | None, rank: int) -> ir.Value:
        """Return a state as f32, zeros where no token was before; but as it is where none is new."""
        kept = self("Or", self("Greater", self.row(2), 0), self("Equal", self.row(1), 0))
        kept = self("Cast", kept, to=ir.DataType.FLOAT)
        if rank > 2:
            kept = self("Unsqueeze", kept, [*range(2, rank)])
        return self("Mul", self.wide(state), kept)

    def heads(self, x: ir.Value, count: int, size: int) -> ir.Value:
        return self("Reshape", x, [0, 0, count, size])

    def flat(self, x: ir.Value, size: int) -> ir.Value:
        return self("Reshape", x, [0, 0, size])

    def norm(self, x: ir.Value, epsilon: float) -> ir.Value:
        """Return x / sqrt(mean(x^2) + epsilon) over the last axis."""
        mean = self("ReduceMean", self("Mul", x, x), [-1], keepdims=1)
        return self("Div", x, self("Sqrt", self("Add", mean, epsilon)))

    def silu(self, x: ir.Value) -> ir.Value:
        return self("Mul", x, self("Sigmoid", x))

    def repeated(self, x: ir.Value, groups: int, heads: int, size: int) -> ir.Value:
        """Return what groups of heads share, of each head: [B, S, groups, size] -> [B, S, heads * size]."""
        if groups < heads:
            x = self("Expand", self("Unsqueeze", x, [3]), [1, 1, 1, heads // groups, 1])
        return self.flat(x, heads * size)

    def attention(
        self,
        q: ir.Value,
        k: ir.Value,
        v: ir.Value,
        *,
        state: ir.Value,
        decay: ir.Value,
        beta: ir.Value | None,
        heads: int,
        scale: float,
    ) -> tuple[ir.Value, ir.Value]:
        """Return outputs [B, S, heads * V] and the next state of a gated delta rule, or gated sums without ``beta``."""
        rule = "gated" if beta is None else "gated_delta"
        given = [q, k, v, state, decay, *([beta] if beta is not None else [])]
        if not self.scans:
            sizes: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule, "scale": scale}
            y, present = self.op_multi_out("LinearAttention", given, sizes, num_outputs=2, domain=self.domain)
            return y, present
        # [B, S, heads, 1, K], [.., K, 1] for what a row of the state has one of
        row, column = [0, 0, heads, 1, -1], [0, 0, heads, -1, 1]
        q = self("Mul", self("Reshape", q, row), scale)
        shapes = {"k": (k, column), "v": (v, row), "decay": (decay, column)} | ({"beta": (beta, row)} if beta else {})
        scanned = [q, *(self("Reshape", x, shape) for x, shape in shapes.values())]
        body = _token(beta is not None)
        scan: dict[str, Any] = {"body": body, "num_scan_inputs": len(scanned), "scan_input_axes": [1] * len(scanned)}
        present, y = self.op_multi_out("Scan", [state, *scanned], scan | {"scan_output_axes": [1]}, num_outputs=2)
        return self("Reshape", y, [0, 0, -1]), present

    def convolution(
        self, x: ir.Value, state: ir.Value, weight: ir.Value, bias: ir.Value | None, spec: ConvSpec
    ) -> ir.Value:
        """Return the convolution of [B, C, S] after a state [B, C, W - 1]."""
        kernel = self("Unsqueeze", weight, [1])
        if not self.scans:
            silu = {"activation": spec.activation}
            given = [x, kernel, bias, state]
            y, _ = self.op_multi_out("CausalConvWithState", given, silu, num_outputs=2, domain=self.domain)
            return y
        whole = self("Concat", state, x, axis=2)
        y = self("Conv", whole, kernel, *([bias] if bias is not None else []), group=spec.channels)
        return self.silu(y) if spec.activation == "silu" else y


def _token(delta: bool) -> ir.Graph:
    """Return what Scan does with a token: the state [B, H, K, V] decays and takes the product of key and value."""
    names = ("state", "q", "k", "v", "decay", *(["beta"] if delta else []))
    given = {name: ir.Value(name=f"token_{name}", type=ir.TensorType(ir.DataType.FLOAT)) for name in names}
    nodes: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op, list(inputs), attributes))
        made = nodes[-1].outputs[0]
        made.name, made.type = f"token_{op.lower()}_{len(nodes)}", ir.TensorType(ir.DataType.FLOAT)
        return made

    kept, new = node("Mul", given["state"], node("Exp", given["decay"])), given["v"]
    if delta:
        known = node("MatMul", node("Transpose", given["k"], perm=[0, 1, 3, 2]), kept)
        new = node("Mul", node("Sub", new, known), given["beta"])
    present = node("Add", kept, node("Mul", given["k"], new))
    return ir.Graph(list(given.values()), [present, node("MatMul", given["q"], present)], nodes=nodes, name="token")


def to_standard_states(model: ir.Model, opset: int | None) -> None:
    """Replace every CausalConv, GatedDelta and StateSpace.

    Args:
        opset: see above.
    """
    of: dict[str, tuple[Any, Any]] = {
        "CausalConv": (ConvSpec, _convolve),
        "GatedDelta": (DeltaSpec, _delta),
        "StateSpace": (SpaceSpec, _space),
    }
    like: dict[ir.Value, ir.Value] = {}  # rows -> x [B, S, ..] of the first node, whose sizes all have
    for node in [node for node in model.graph if node.domain == DOMAIN and node.op_type in of]:
        (kind, replacement), rows = of[node.op_type], node.inputs[-1]
        spec: Any = kind.from_attributes({name: a.value for name, a in node.attributes.items()})
        assert rows is not None
        assert node.inputs[0] is not None
        ops = _Nodes(rows, like.setdefault(rows, node.inputs[0]), opset)
        made = replacement(ops, spec, list(node.inputs))
        for i, (value, old) in enumerate(zip(made, node.outputs, strict=True)):
            if old.dtype != ir.DataType.FLOAT and (node.op_type, i) != ("CausalConv", 1):
                made[i] = value = ops("Cast", value, to=old.dtype)
            value.type, value.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], ops.nodes, node.outputs, made)
        if opset is None:
            model.graph.opset_imports.setdefault("com.microsoft", 1)
    CommonSubexpressionEliminationPass()(model)  # what rows say is the same in all layers


def _convolve(ops: _Nodes, spec: ConvSpec, inputs: list[Any]) -> list[ir.Value]:
    x, weight, bias, past, _ = inputs
    before, begin = spec.width - 1, ops.row(0)
    typed = x.type
    if spec.x_size:
        x = ops("Slice", x, [spec.x_offset], [spec.x_offset + spec.channels], [-1])
    kept = ops("Or", ops("Greater", ops.row(2), 0), ops("Equal", ops.row(1), 0))
    state = ops("Where", ops("Unsqueeze", kept, [2]), past, ops("CastLike", 0.0, past))
    seen = ops("Concat", ops("Transpose", state, perm=[0, 2, 1]), x, axis=1)  # [B, W - 1 + S, C]
    # where a row's tokens begin later, its state moves there
    at = ops("Unsqueeze", ops.tokens(before), [0])
    moved = ops("Where", ops("GreaterOrEqual", at, ops("Add", begin, before)), at, ops("Max", ops("Sub", at, begin), 0))
    seen = ops("GatherND", seen, ops("Unsqueeze", moved, [2]), batch_dims=1)
    last = ops("Unsqueeze", ops("Add", ops("Add", begin, ops.row(1)), [*range(before)]), [2])
    present = ops("Transpose", ops("GatherND", seen, last, batch_dims=1), perm=[0, 2, 1])
    columns = ops("Transpose", ops.wide_of(seen, ir.Value(type=typed)), perm=[0, 2, 1])
    old, new = (ops("Slice", columns, [a], [b], [2]) for a, b in ((0, before), (before, _END)))
    biased = bias if bias.shape is None or bias.shape[0] != 0 else None
    y = ops.convolution(new, old, weight, biased, spec)
    return [ops("Transpose", y, perm=[0, 2, 1]), present]


def _delta(ops: _Nodes, spec: DeltaSpec, inputs: list[Any]) -> list[ir.Value]:
    qkv, a, b, z, a_log, dt_bias, norm, past, _ = inputs
    groups, heads, key, value = spec.num_k_heads, spec.num_v_heads, spec.k_head_size, spec.v_head_size
    decays = heads * (key if spec.decay_per_key else 1)
    keys, values = groups * key, heads * value
    counts = ops.counts()
    qk = ops.heads(ops.part(qkv, 0, 2 * keys), 2 * groups, key)
    length = ops("Sqrt", ops("Add", ops("ReduceSumSquare", qk, [-1], keepdims=1), spec.l2_epsilon))
    qk = ops("Div", qk, length)
    q, k = (ops("Slice", qk, [i * groups], [(i + 1) * groups], [2]) for i in (0, 1))
    q, k = (ops.repeated(x, groups, heads, key) for x in (q, k))
    v = ops.part(qkv, 2 * keys, values)
    time = ops("Softplus", ops("Add", ops.part(a, spec.a_offset, decays), dt_bias))
    rate = ops("Exp", a_log)
    if spec.decay_per_key:
        time, rate = ops.heads(time, heads, key), ops("Unsqueeze", rate, [1])
    decay = ops("Neg", ops("Mul", time, rate))
    if spec.decay_per_key:
        decay = ops.flat(decay, decays)
    beta = ops("Mul", ops("Sigmoid", ops.part(b, spec.b_offset, heads)), ops("Mul", counts, spec.beta_scale))
    decay = ops("Mul", decay, counts)
    y, present = ops.attention(q, k, v, state=ops.live(past, 4), decay=decay, beta=beta, heads=heads, scale=spec.scale)
    y = ops("Mul", ops.norm(ops.heads(y, heads, value), spec.norm_epsilon), norm)
    z = ops.part(z, spec.z_offset, values)
    gate = ops.silu(z) if spec.gate == "silu" else ops("Sigmoid", z)
    return [ops("Mul", ops.flat(y, values), gate), present]


def _space(ops: _Nodes, spec: SpaceSpec, inputs: list[Any]) -> list[ir.Value]:
    xbc, dt, z, a_log, dt_bias, d, norm, past, _ = inputs
    groups, heads, states, size = spec.num_groups, spec.num_heads, spec.state_size, spec.head_size
    values, shared = heads * size, groups * states
    counts = ops.counts()
    x = ops.heads(ops.part(xbc, 0, values), heads, size)
    b, c = (ops.heads(ops.part(xbc, values + i * shared, shared), groups, states) for i in (0, 1))
    b, c = (ops.repeated(part, groups, heads, states) for part in (b, c))
    time = ops("Mul", ops("Softplus", ops("Add", ops.part(dt, spec.dt_offset, heads), dt_bias)), counts)
    decay = ops("Neg", ops("Mul", time, ops("Exp", a_log)))
    new = ops.flat(ops("Mul", x, ops("Unsqueeze", time, [3])), values)
    y, present = ops.attention(c, b, new, state=ops.live(past, 4), decay=decay, beta=None, heads=heads, scale=1.0)
    y = ops("Add", ops.heads(y, heads, size), ops("Mul", x, ops("Unsqueeze", d, [1])))
    gated = ops("Mul", ops.flat(y, values), ops.silu(ops.part(z, spec.z_offset, values)))
    normed = ops.norm(ops.heads(gated, values // spec.norm_size, spec.norm_size), spec.norm_epsilon)
    return [ops("Mul", ops.flat(normed, values), norm), present]
