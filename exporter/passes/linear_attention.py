"""Linear attention of transformers -> CausalConv and GatedDelta: recognised by what it computes, replaced before the
trace.

A module is given the outputs of its projections, its own parameters at random and random states. What it makes of them,
outputs and new states, must be what the operators' references make.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from quantmoe.custom_ops.op import ConvSpec, DeltaSpec
from quantmoe.custom_ops.reference import conv as reference_conv
from quantmoe.custom_ops.reference import delta as reference_delta
from quantmoe.exporter.passes.attention import FAILURES, Given, Rows, Unlike, line, signature

#: projections of a module: each key head's q, k, v and z beside each other, and its b and a (Qwen3-Next) ..
TOGETHER = ("in_proj_qkvz", "in_proj_ba")
#: .. or apart (Qwen3.5), heads in order
APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
#: outputs are sums in f32 in another order, of chunks of 64 tokens: some hundreds of roundings of 6e-8
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Recognised:
    """What a module computes.

    Attributes:
        conv, delta: of its nodes.
        together: whether its projections are TOGETHER.
    """

    conv: ConvSpec
    delta: DeltaSpec
    together: bool


def windowed(found: Recognised, window: int) -> Recognised:
    """The same with the states after each of the last ``window`` tokens."""
    conv = dataclasses.replace(found.conv, state_window=window)
    return dataclasses.replace(found, conv=conv, delta=dataclasses.replace(found.delta, state_window=window))


def recognise(
    model: torch.nn.Module,
    stack: torch.nn.ModuleList,
    refusal: Callable[[ConvSpec | DeltaSpec], str],
    window: int = 1,
) -> tuple[dict[str, Recognised], dict[str, str]]:
    """What every module that keeps a state computes, if CausalConv and GatedDelta do; and why the others are not. By
    module name.

    Args:
        stack: the model's decoder layers.
        refusal: why the target's kernels do not run a node; "" when they do.
        window: of states, of every node.
    """
    found: dict[str, Recognised] = {}
    left: dict[str, str] = {}
    kinds: dict[str, Recognised] = {}
    for name, module in model.named_modules():
        if (together := _projected(module)) is None:
            continue
        try:
            if (kind := repr(signature(module))) not in kinds:
                kinds[kind] = windowed(_compare(module, together), window)
            for spec in (kinds[kind].conv, kinds[kind].delta):
                if reason := refusal(spec):
                    raise Unlike(reason)
            found[name] = kinds[kind]
        except Unlike as reason:
            left[name] = f"{type(module).__name__}: {reason}"
    config: Any = model.config
    try:
        caches = DynamicCache(config=config).layers
    except FAILURES:
        caches = []
    for i, (layer, cache) in enumerate(zip(stack, caches, strict=False)):
        known = [m for m, _ in layer.named_modules() if any(n.endswith(f".{i}.{m}") for n in (*found, *left))]
        if isinstance(cache, LinearAttentionCacheLayerMixin) and not known:
            left[f"layer {i}"] = f"{type(layer).__name__}: it keeps a state from token to token that no operator has"
    return found, left


def _projected(module: Any) -> bool | None:
    """Whether the projections of a linear attention are together; None of other modules."""
    parts = (*TOGETHER, "out_proj"), (*APART, "out_proj")
    own = module._modules
    for names in parts:
        if all(type(own.get(name)) is torch.nn.Linear for name in names) and type(own.get("conv1d")) is torch.nn.Conv1d:
            return names[0] == TOGETHER[0]
    return None


def _specs(module: Any) -> Iterator[tuple[ConvSpec, DeltaSpec]]:
    """The nodes that a module may be, the likeliest first."""
    heads, groups = module.num_v_heads, module.num_k_heads
    key, value = module.head_k_dim, module.head_v_dim
    eps = next(float(v) for k, v in vars(module.norm).items() if k in ("variance_epsilon", "eps"))
    for activation, gate, beta in itertools.product(("silu", "none"), ("silu", "sigmoid"), (1.0, 2.0)):
        conv = ConvSpec(channels=module.conv1d.in_channels, width=module.conv1d.kernel_size[0], activation=activation)
        delta = DeltaSpec(
            num_k_heads=groups,
            num_v_heads=heads,
            k_head_size=key,
            v_head_size=value,
            scale=float(np.float32(key**-0.5)),
            l2_epsilon=float(np.float32(1e-6)),
            decay_per_key=0,
            beta_scale=beta,
            gate=gate,
            norm_epsilon=float(np.float32(eps)),
        )
        yield conv, delta


def _compare(module: Any, together: bool) -> Recognised:
    """The nodes that give what a module gives, on random tokens and states."""
    generator = torch.Generator().manual_seed(0)
    try:
        candidates = list(_specs(module))
        conv, delta = candidates[0]
        width = 2 * delta.num_k_heads * delta.k_head_size + delta.num_v_heads * delta.v_head_size
        if module.conv1d.groups != conv.channels or width != conv.channels or module.norm.weight.ndim != 1:
            raise Unlike("its convolution is not of queries, keys and values, each channel alone")
        probe = _probe(module, generator)
        for batch, new, past in ((2, 5, False), (2, 1, True), (2, 5, True), (1, 70, True)):
            trial = _try(probe, delta, together, (batch, new), past, generator)
            candidates = [specs for specs in candidates if _gives(specs, *trial)]
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None
    if not candidates:
        raise Unlike("it computes something else than CausalConv and GatedDelta")
    return Recognised(*candidates[0], together)


def _probe(module: Any, generator: torch.Generator) -> Any:
    """A copy of a module with random parameters and without projections."""
    probe = copy.copy(module)
    given = {*TOGETHER, *APART, "out_proj"}
    probe._modules = {name: copy.deepcopy(m) for name, m in module._modules.items() if name not in given}
    probe._parameters = dict(module._parameters)
    for part in probe.modules():
        for name, old in part._parameters.items():
            if old is not None:
                made = torch.randn(old.shape, generator=generator)
                part._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    probe._modules["out_proj"] = torch.nn.Identity()
    probe.features = {name: getattr(module, name).out_features for name in (*TOGETHER, *APART) if hasattr(module, name)}
    probe.layer_idx = 0
    return probe


def _try(
    probe: Any, spec: DeltaSpec, together: bool, sizes: tuple[int, int], past: bool, generator: torch.Generator
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """What the nodes are given (x, a, b, z, weights and states) and what a probe makes of the same: its output and its
    states afterwards. Third: tokens before."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    batch, new = sizes
    outputs = {name: draw(batch, new, features) for name, features in probe.features.items()}
    for name, values in outputs.items():
        probe._modules[name] = Given(values)
    layer = LinearAttentionLayer()
    conv = draw(batch, probe.conv1d.in_channels, probe.conv1d.kernel_size[0])
    state = draw(batch, spec.num_v_heads, spec.k_head_size, spec.v_head_size)
    if past:
        layer.update_conv_state(conv.clone())
        layer.update_recurrent_state(state.clone())
    cache = DynamicCache()
    cache.layers = [layer]
    with torch.no_grad():
        output = probe(hidden_states=draw(batch, new, 8), cache_params=cache, attention_mask=None)
    if not isinstance(output, torch.Tensor):
        raise Unlike("its forward does not return its output alone")
    projected = list(outputs.values())
    qkv, z, b, a = apart(spec, *projected) if together else projected
    bias = probe.conv1d.bias if probe.conv1d.bias is not None else torch.zeros(0)
    given = [qkv, a, b, z, probe.conv1d.weight[:, 0], bias, conv[..., 1:], probe.A_log, probe.dt_bias]
    given += [probe.norm.weight, state]
    made = [output, layer.conv_states[0], layer.recurrent_states[0]]
    return [t.numpy() for t in given], [t.numpy() for t in made], int(past)


def _gives(specs: tuple[ConvSpec, DeltaSpec], given: list[np.ndarray], made: list[np.ndarray], past: int) -> bool:
    """Whether the nodes make the same."""
    qkv, a, b, z, weight, bias, conv, a_log, dt_bias, norm, state = given
    rows = np.tile(np.array([0, qkv.shape[1], past], np.int32), (len(qkv), 1))
    mixed, present_conv = reference_conv(specs[0], qkv, weight, bias, conv, rows)
    output, present = reference_delta(specs[1], mixed, a, b, z, a_log, dt_bias, norm, state, rows)
    pairs = zip((made[0], made[1][..., 1:], made[2]), (output, present_conv, present), strict=True)
    return all(x.shape == y.shape and np.abs(x - y).max() <= _TOLERANCE * np.abs(y).max() for x, y in pairs)


def apart(spec: DeltaSpec, qkvz: torch.Tensor, ba: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """qkv, z, b and a, each with its heads in order, of projections that are TOGETHER."""
    each = spec.num_v_heads // spec.num_k_heads
    sizes = [spec.k_head_size, spec.k_head_size, each * spec.v_head_size, each * spec.v_head_size]
    q, k, v, z = (t.flatten(-2) for t in qkvz.unflatten(-1, (spec.num_k_heads, sum(sizes))).split(sizes, -1))
    b, a = (t.flatten(-2) for t in ba.unflatten(-1, (spec.num_k_heads, 2 * each)).split(each, -1))
    return torch.cat((q, k, v), -1), z, b, a


def attach(model: torch.nn.Module, found: dict[str, Recognised], rows: Rows) -> list[str]:
    """Makes the forward of recognised modules their projections and two nodes between them.

    Returns:
        Names of the parameters that are f32 now, as the nodes take them; of a convolution's weight [C, 1, W] as [C, W].
    """
    changed = []
    for path, recognised in found.items():
        module: Any = model.get_submodule(path)
        module.found, module.rows = recognised, rows
        module.specs = [json.dumps(spec.attributes()) for spec in (recognised.conv, recognised.delta)]
        shape = recognised.conv.channels, recognised.conv.width
        of = [(module, "A_log"), (module, "dt_bias"), (module.norm, "weight"), (module.conv1d, "weight")]
        of += [(module.conv1d, "bias")] * (module.conv1d.bias is not None)
        for part, name in of:
            old = part._parameters[name]
            wide = (
                old.data.flatten()[:1].float().expand(shape if old.ndim == 3 else old.shape)
            )  # a placeholder as it was
            part._parameters[name] = torch.nn.Parameter(wide, requires_grad=False)
            leaf = {id(module.conv1d): "conv1d.", id(module.norm): "norm."}.get(id(part), "")
            changed.append(f"{path}.{leaf}{name}")
        module.forward = MethodType(_forward, module)
    return changed


def cache_layer(layer: Any, batch: int) -> LinearAttentionLayer:
    """States of zeros as another cache's layer has them, for so many rows."""
    made = LinearAttentionLayer()
    of = (made.conv_states, layer.conv_states, 3), (made.recurrent_states, layer.recurrent_states, 4)
    for own, states, rank in of:
        shape = *states[0].shape[:-rank], batch, *states[0].shape[1 - rank :]
        own[0] = torch.zeros(shape, dtype=states[0].dtype)  # theirs may be without memory
    made.has_previous_state[0] = True
    return made


def _forward(self: Any, hidden_states: torch.Tensor, cache_params: Any, *_: Any, **__: Any) -> torch.Tensor:
    x, spec = hidden_states, self.found.delta
    if self.found.together:
        qkv, z, b, a = apart(spec, *(getattr(self, name)(x) for name in TOGETHER))
    else:
        qkv, z, b, a = (getattr(self, name)(x) for name in APART)
    layer = cache_params.layers[self.layer_idx]
    if layer.has_previous_state[0]:
        conv, state = layer.conv_states[0], layer.recurrent_states[0]
    else:
        window = [spec.state_window] * (spec.state_window > 1)
        conv = x.new_zeros((*window, x.shape[0], self.found.conv.channels, self.found.conv.width - 1))
        sizes = *window, x.shape[0], spec.num_v_heads, spec.k_head_size, spec.v_head_size
        state = x.new_zeros(sizes, dtype=torch.float32)
    bias = self.conv1d.bias if self.conv1d.bias is not None else torch.zeros(0)
    rows, (of_conv, of_delta) = self.rows.rows, self.specs
    qkv, conv = torch.ops.quantmoe.causal_conv(qkv, self.conv1d.weight, bias, conv, rows, of_conv)
    y, state = torch.ops.quantmoe.gated_delta(
        qkv, a, b, z, self.A_log, self.dt_bias, self.norm.weight, state, rows, of_delta
    )
    layer.conv_states[0], layer.recurrent_states[0], layer.has_previous_state[0] = conv, state, True
    return self.out_proj(y)
