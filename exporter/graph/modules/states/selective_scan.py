"""Jamba's state spaces (Mamba) become a CausalConv and ONNX' Scan, which goes from token to token in f32.

So a prompt takes as long as its tokens one by one. ``--state-window`` is refused.

Each channel c has N states: ``S_t[n, c] = exp(dt_t[c] A[n, c]) S_(t-1)[n, c] + dt_t[c] x_t[c] B_t[n]``.
Its output is the sum over n of ``C_t[n] S_t[n, c]``. The decays differ by channel and state, so no product of matrices
makes several tokens at once.
"""

# As linear_attention.py, modules are recognised by what they compute.

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from onnx.defs import OpSchema
from onnxscript.values import Op, Opset
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from quantmoe.custom_ops.op import ConvSpec
from quantmoe.exporter.graph.modules.attention import (
    FAILURES,
    Given,
    Unlike,
    drawing,
    judged,
    line,
    near_all,
    once_a_kind,
    randomise,
)
from quantmoe.exporter.graph.modules.attention_inputs import Rows
from quantmoe.exporter.graph.modules.states.linear_attention import as_taken, convolve, recurrent_state, widen

if TYPE_CHECKING:
    from quantmoe.exporter.graph.placeholders import Stored

LINEARS = ("in_proj", "x_proj", "dt_proj", "out_proj")
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
#: sums in f32 in another order, of chunks of 70 tokens
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class SelectiveScan:
    """Sizes of a module.

    Attributes:
        conv: its short convolution, which reads the first half of in_proj's output; the other half is a gate.
        states: of each channel. rank: of what the time steps are made from.
    """

    conv: ConvSpec
    states: int
    rank: int


def recognise(
    model: torch.nn.Module, refusal: Callable[[ConvSpec], str], window: int
) -> tuple[dict[str, SelectiveScan], dict[str, str]]:
    """Return the modules of a selective scan, and why others that look like it are none. By name.

    Args:
        refusal: why the target's kernels do not run a node; "" when they do.
        window: how many states are asked for, after each of the last so many tokens.
    """
    compare = once_a_kind(_compare)

    def judge(module: Any) -> SelectiveScan:
        own = _spec(module)
        if window > 1:
            raise Unlike(f"it keeps the state after the last token alone, expected a state window of 1, not {window}")
        compare(module, own)
        if reason := refusal(own.conv):
            raise Unlike(reason)
        return own

    return judged(((name, module) for name, module in model.named_modules() if _looks_like_one(module)), judge)


def _looks_like_one(module: Any) -> bool:
    linears = (getattr(module, name, None) for name in LINEARS)
    return (
        all(type(linear) is torch.nn.Linear for linear in linears)
        and type(getattr(module, "conv1d", None)) is torch.nn.Conv1d
        and all(hasattr(module, name) for name in (*NORMS, "A_log", "D"))
    )


def _spec(module: Any) -> SelectiveScan:
    channels, states = module.A_log.shape
    convolution, rank = module.conv1d, module.dt_proj.in_features
    if not convolution.in_channels == convolution.groups == channels:
        raise Unlike("its convolution is not of each channel alone")
    if module.in_proj.out_features != 2 * channels or module.x_proj.out_features != rank + 2 * states:
        raise Unlike("its projections do not make channels and their gates, a time step, B and C")
    width = convolution.kernel_size[0]
    conv = ConvSpec(channels=channels, width=width, activation="silu", x_size=2 * channels, x_offset=0)
    return SelectiveScan(conv, states, rank)


def _compare(module: Any, found: SelectiveScan) -> None:
    """Raise Unlike where a module gives something else on random tokens and states.

    transformers begins a run of several tokens without a state, so that only single tokens have one here.
    """
    draw = drawing()
    channels, states, width = found.conv.channels, found.states, found.conv.width
    try:
        # parts without the largest linears, which may be larger than the memory
        large = module.in_proj, module.out_proj
        probe = copy.deepcopy(module, {id(linear): torch.nn.Identity() for linear in large})
        randomise(probe, draw)
        for linear in (probe.x_proj, probe.dt_proj):
            linear.weight.data /= linear.in_features**0.5
        own = copy.deepcopy(probe)
        probe.layer_idx = own.layer_idx = 0
        own.found = found
        for part, name, function in ((own.conv1d, "weight", as_taken), (own, "A_log", decays)):
            made = torch.from_numpy(function(part._parameters[name].numpy()))
            part._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        for batch, new, past in ((2, 5, False), (1, 70, False), (2, 1, True)):
            probe.in_proj = own.in_proj = Given(draw(batch, new, 2 * channels))
            conv, state = draw(batch, channels, width), draw(batch, channels, states)
            layer, mine = LinearAttentionLayer(), LinearAttentionLayer()
            if past:
                layer.update_conv_state(conv.clone())
                layer.update_recurrent_state(state.clone())
                mine.conv_states[0], mine.recurrent_states[0] = conv[..., 1:], state.transpose(1, 2)[:, None]
            own.rows = SimpleNamespace(rows=torch.tensor([[0, new, int(past)]] * batch, dtype=torch.int32))
            cache, x = DynamicCache(), torch.zeros(batch, new, 8)
            cache.layers = [layer]
            with torch.no_grad():
                want = probe(x, cache=cache, attention_mask=None)
                output = _forward(own, x, SimpleNamespace(layers=[mine]))
            made = layer.conv_states[0][..., 1:], layer.recurrent_states[0].transpose(1, 2)[:, None]
            got = output, mine.conv_states[0], mine.recurrent_states[0]
            if not near_all(got, [t.numpy() for t in (want, *made)], _TOLERANCE):
                raise Unlike("it computes something else than Mamba's selective scan")
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None


def decays(a_log: np.ndarray) -> np.ndarray:
    """Return A [N, C] of an A_log [C, N]."""
    return np.ascontiguousarray(-np.exp(a_log.astype(np.float32)).T)


def attach(stored: Stored, found: dict[str, SelectiveScan], rows: Rows) -> list[str]:
    """Make the forward of recognised modules their projections, a convolution and a scan.

    Returns:
        Names of the parameters that are f32 now, in the shapes that the nodes take, see linear_attention.py's as_taken.
    """
    changed = []
    for path, own in found.items():
        module: Any = stored.model.get_submodule(path)
        changed += [f"{path}.{leaf}" for leaf in ("conv1d.weight", "conv1d.bias", "D") if widen(module, leaf)]
        old = module.A_log.data
        wide = old.flatten()[:1].float().expand(old.shape[::-1])  # a placeholder as it was
        module._parameters["A_log"] = torch.nn.Parameter(wide, requires_grad=False)
        stored.derive([f"{path}.A_log"], decays)
        module.found, module.rows, module.forward = own, rows, MethodType(_forward, module)
    return changed


def _forward(self: Any, hidden_states: torch.Tensor, cache: Any, *_: Any, **__: Any) -> torch.Tensor:
    found, layer, rows = self.found, cache.layers[self.layer_idx], self.rows.rows
    states, channels = found.states, found.conv.channels
    projected = self.in_proj(hidden_states)
    x = convolve(found.conv, self.conv1d, projected, layer, rows)
    step, b, c = self.x_proj(x).split([found.rank, states, states], -1)
    step = torch.nn.functional.softplus(self.dt_proj(self.dt_layernorm(step)).float())
    begin, count, past = (part.reshape(-1, 1) for part in rows.unbind(1))
    place = torch.arange(x.shape[1]) - begin
    step = step * ((place >= 0) & (place < count)).float()[..., None]  # a step of 0 leaves the state as it is
    state = recurrent_state(layer, x, 1, (1, states, channels)).float()
    state = state * ((past > 0) | (count == 0)).float()[..., None, None]
    wide = x.float()
    given = step, step * wide, self.b_layernorm(b).float(), self.c_layernorm(c).float()
    y, present = torch.ops.quantmoe.selective_scan(state[:, 0], self.A_log, *given)
    layer.recurrent_states[0] = present[:, None]
    layer.has_previous_state[0] = True
    gate = projected[..., channels:].float()
    y = (y + wide * self.D) * torch.nn.functional.silu(gate)
    return self.out_proj(y.to(hidden_states.dtype))


@torch.library.custom_op("quantmoe::selective_scan", mutates_args=())
def selective_scan(
    state: torch.Tensor, a: torch.Tensor, step: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, S, C] and the state after the last token.

    Args:
        state: [B, N, C]. a: [N, C], what a step of 1 decays by, its logarithm. step: [B, S, C].
        x: [B, S, C], times its step. b, c: [B, S, N].
    """
    outputs = []
    for t in range(step.shape[1]):
        state = state * torch.exp(step[:, t, None] * a) + b[:, t, :, None] * x[:, t, None]
        outputs.append((c[:, t, :, None] * state).sum(1))
    return torch.stack(outputs, 1), state.clone()


@selective_scan.register_fake
def _fake(
    state: torch.Tensor, a: torch.Tensor, step: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(state)


@cache
def _scan() -> Op:
    """Return ONNX' Scan of two states and four inputs, as onnxscript calls it."""
    kind, some = OpSchema.AttrType, [("T", ["tensor(float)"], "")]
    named = {"num_scan_inputs": kind.INT, "scan_input_axes": kind.INTS, "scan_output_axes": kind.INTS}
    own = OpSchema(
        "Scan",
        "",
        16,
        inputs=[OpSchema.FormalParameter(name, "T") for name in ("state", "a", "step", "x", "b", "c")],
        outputs=[OpSchema.FormalParameter(name, "T") for name in ("present", "same", "y")],
        type_constraints=some,
        attributes=[OpSchema.Attribute(name, kind, "") for name, kind in named.items()]
        + [OpSchema.Attribute("body", kind.GRAPH, "")],
    )
    return Op(Opset("", 18), "Scan", own)


def _body() -> ir.Graph:
    """Return what Scan does with a token: inputs [B, 1, C], [B, N, 1] and [B, 1, N] beside the two states."""
    names = ("state", "a", "step", "x", "b", "c")
    given = {name: ir.Value(name=f"scan_{name}", type=ir.TensorType(ir.DataType.FLOAT)) for name in names}
    nodes: list[ir.Node] = []

    def node(op: str, *inputs: ir.Value) -> ir.Value:
        nodes.append(ir.node(op, list(inputs)))
        made = nodes[-1].outputs[0]
        made.name, made.type = f"scan_{op.lower()}_{len(nodes)}", ir.TensorType(ir.DataType.FLOAT)
        return made

    kept = node("Mul", given["state"], node("Exp", node("Mul", given["step"], given["a"])))
    present = node("Add", kept, node("Mul", given["b"], given["x"]))
    outputs = [present, node("Identity", given["a"]), node("MatMul", given["c"], present)]
    return ir.Graph(list(given.values()), outputs, nodes=nodes, name="selective_scan")


def onnx_selective_scan(state: Any, a: Any, step: Any, x: Any, b: Any, c: Any) -> Any:
    """Return the entry of the exporter's translation table for ``selective_scan``."""
    from onnxscript.onnx_opset import opset18 as op

    row, column = op.Constant(value_ints=[2]), op.Constant(value_ints=[3])
    given = op.Unsqueeze(step, row), op.Unsqueeze(x, row), op.Unsqueeze(b, column), op.Unsqueeze(c, row)
    axes = {"scan_input_axes": [1] * 4, "scan_output_axes": [1]}
    present, _, y = _scan()(state, a, *given, body=_body(), num_scan_inputs=4, **axes)
    return op.Squeeze(y, row), present


#: for the exporter's translation table
ONNX = {torch.ops.quantmoe.selective_scan.default: onnx_selective_scan}
