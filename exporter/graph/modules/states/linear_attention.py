"""Linear attention of transformers -> CausalConv and GatedDelta, gated short convolutions -> CausalConv: recognised by
what they compute, replaced before the trace.

A module is given the outputs of its projections, its own parameters at random and random states. What it makes of them,
outputs and new states, must be what the operators' references make.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Iterator
from types import MethodType
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from quantmoe.custom_ops.op import ConvSpec, DeltaSpec
from quantmoe.custom_ops.ops.causal_conv import causal_conv as reference_conv
from quantmoe.custom_ops.ops.gated_delta import gated_delta as reference_delta
from quantmoe.exporter.choosing.choose import JOINED
from quantmoe.exporter.graph.modules.attention import (
    FAILURES,
    Draw,
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
from quantmoe.exporter.reading.slices import Slice

#: outputs are sums in f32 in another order, of chunks of 64 tokens: some hundreds of roundings of 6e-8
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateFamily:
    """Names of the submodules and parameters that nodes take.

    Attributes:
        projections: of the hidden states, each one linear or several in a row.
        out, conv: the last linear, the convolution. norm: the output's. decay: the module of A_log and dt_bias.
        sizes: the attributes that say key heads, value heads, and the width of each.
        apart: q, k and v beside each other, z, b and a, of what the projections give.
        per_key: each key feature has a decay.
        mixed: a projection whose rows are queries, keys and values one after the other, or gates and what they
            multiply. None: each projection has one of these, or has each head's parts beside each other.
    """

    projections: tuple[tuple[str, ...], ...]
    apart: Callable[..., tuple[torch.Tensor, ...]]
    out: str = "out_proj"
    conv: str = "conv1d"
    norm: str = "norm"
    decay: str = ""
    sizes: tuple[str, ...] = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    per_key: bool = False
    mixed: str | None = None

    def of(self, module: torch.nn.Module) -> bool:
        """Return whether a module has these parts."""
        found = {name: type(part) for name, part in module.named_modules()}
        linears = *itertools.chain(*self.projections), self.out
        return all(found.get(name) is torch.nn.Linear for name in linears) and found.get(self.conv) is torch.nn.Conv1d

    def projected(self, module: Any, x: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for chain in self.projections:
            made = x
            for name in chain:
                made = module.get_submodule(name)(made)
            outputs.append(made)
        return outputs


def _interleaved(spec: DeltaSpec, qkvz: torch.Tensor, ba: torch.Tensor) -> tuple[torch.Tensor, ...]:
    each = spec.num_v_heads // spec.num_k_heads
    sizes = [spec.k_head_size, spec.k_head_size, each * spec.v_head_size, each * spec.v_head_size]
    q, k, v, z = (t.flatten(-2) for t in qkvz.unflatten(-1, (spec.num_k_heads, sum(sizes))).split(sizes, -1))
    b, a = (t.flatten(-2) for t in ba.unflatten(-1, (spec.num_k_heads, 2 * each)).split(each, -1))
    return torch.cat((q, k, v), -1), z, b, a


def _chained(*projections: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names.split()) for names in projections)


#: each key head's q, k, v and z beside each other, and its b and a
QWEN3_NEXT = StateFamily(projections=_chained("in_proj_qkvz", "in_proj_ba"), apart=_interleaved)
#: the same apart, heads in order
QWEN3_5 = StateFamily(
    projections=_chained("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    apart=lambda _, *given: given,
    mixed="in_proj_qkv",
)
#: Kimi delta attention: a decay of each key feature; gates of low rank
KIMI = StateFamily(
    projections=_chained(
        "q_proj", "k_proj", "v_proj", "g_a_proj g_b_proj", "b_proj", "forget_gate.f_a_proj forget_gate.f_b_proj"
    ),
    apart=lambda _, q, k, v, *given: (torch.cat((q, k, v), -1), *given),
    out="o_proj",
    norm="o_norm",
    decay="forget_gate",
    sizes=("num_heads", "num_heads", "head_dim", "head_dim"),
    per_key=True,
)
#: Kimi delta attention with gates of full rank
LING = dataclasses.replace(
    KIMI, projections=_chained("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "forget_gate.f_proj")
)
#: a convolution between two gates and nothing else: the gates and what they multiply beside each other
LFM2 = StateFamily(
    projections=_chained("in_proj"), apart=lambda _, given: given.chunk(3, -1), conv="conv", sizes=(), mixed="in_proj"
)
FAMILIES = (QWEN3_NEXT, QWEN3_5, KIMI, LING, LFM2)
#: of QWEN3_5's projections one linear in the place of several -> which, in the order of its rows
WHOLES = {whole: parts for parts, whole in JOINED.items() if {(part,) for part in parts} <= {*QWEN3_5.projections}}


def _decays(decay: Any, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the a, A_log and dt_bias that the node takes of a module with A_log and dt_bias.

    The node decays by exp(-exp(A_log) softplus(a + dt_bias)). A bounded decay (Ling 3, GLM-5-Next) is exp(-g) with
    g = bound sigmoid(exp(A_log) (a + dt_bias)). It is the node's of A_log = dt_bias = 0 and a = log(exp(g) - 1).
    """
    a_log, dt_bias = decay.A_log.flatten(), decay.dt_bias
    bound = getattr(decay, "safe_gate_lower_bound", None)
    if getattr(decay, "safe_gate", False):
        bound = decay.lower_bound
    if bound is None:
        return a, a_log, dt_bias
    rate = a_log.exp().repeat_interleave(len(dt_bias) // len(a_log))
    g = -bound * torch.sigmoid(rate * (a.float() + dt_bias))
    return torch.log(torch.expm1(g).clamp(min=2.0**-30)).to(a.dtype), torch.zeros_like(a_log), torch.zeros_like(dt_bias)


@dataclasses.dataclass(frozen=True)
class RecognisedState:
    """The computation of a module: the specs of its nodes. A short convolution has one."""

    conv: ConvSpec
    delta: DeltaSpec | None
    family: StateFamily

    def specs(self) -> list[ConvSpec | DeltaSpec]:
        return [self.conv, self.delta] if self.delta else [self.conv]

    def sections(self, parameter: str) -> tuple[int, ...]:
        """Return :attr:`quantmoe.exporter.reading.slices.Cut.sections` of a parameter that heads or channels divide.

        A norm, and what all heads have in common, give ().
        """
        module, family, delta = parameter.rpartition(".")[0], self.family, self.delta
        if module not in {family.conv, family.decay, *(chain[-1] for chain in family.projections)}:
            return ()
        if delta is None:
            return (1, 1, 1) if module == family.mixed else (1,)
        keys, values = delta.num_k_heads * delta.k_head_size, delta.num_v_heads * delta.v_head_size
        return (keys, keys, values) if module in (family.mixed, family.conv) else (1,)


def narrow(model: torch.nn.Module, part: Slice, where: str) -> None:
    """Give short convolutions a rank's channels, since their size is not in the configuration.

    Raises:
        CheckpointError: the ranks do not divide them.
    """
    for name, module in [(name, module) for name, module in model.named_modules() if LFM2.of(module)]:
        given, conv, out = (getattr(module, leaf) for leaf in ("in_proj", "conv", "out_proj"))
        channels = part.part(conv.in_channels, f"{where}: channels of {name}")
        kind = {"device": "meta", "dtype": conv.weight.dtype}
        sizes, kernel = (channels, channels), {"padding": conv.padding, "groups": channels}
        module.conv = torch.nn.Conv1d(*sizes, conv.kernel_size, **kernel, bias=conv.bias is not None, **kind)
        module.in_proj = torch.nn.Linear(given.in_features, 3 * channels, given.bias is not None, **kind)
        module.out_proj = torch.nn.Linear(channels, out.out_features, out.bias is not None, **kind)
        module.requires_grad_(requires_grad=False)


def windowed(found: RecognisedState, window: int) -> RecognisedState:
    """Return the operators with states after each of the last ``window`` tokens."""
    conv = dataclasses.replace(found.conv, state_window=window)
    delta = found.delta and dataclasses.replace(found.delta, state_window=window)
    return dataclasses.replace(found, conv=conv, delta=delta)


def recognise(
    model: torch.nn.Module,
    stack: torch.nn.ModuleList,
    refusal: Callable[[ConvSpec | DeltaSpec], str],
    window: int = 1,
    others: Collection[str] = (),
) -> tuple[dict[str, RecognisedState], dict[str, str]]:
    """Return what every module that keeps a state computes, if CausalConv and GatedDelta do; and why the others are
    not. By module name.

    Args:
        stack: the model's decoder layers.
        refusal: why the target's kernels do not run a node; "" when they do.
        window: of states, of every node.
        others: names of modules that keep one of another kind.
    """

    @once_a_kind
    def compared(module: Any) -> RecognisedState:
        family = _family(module)
        assert family is not None
        compare = _compare if family.sizes else _compare_short
        return windowed(compare(module, family), window)

    def judge(module: Any) -> RecognisedState:
        own = compared(module)
        for spec in own.specs():
            if reason := refusal(spec):
                raise Unlike(reason)
        return own

    found, left = judged(((name, module) for name, module in model.named_modules() if _family(module)), judge)
    config: Any = model.config
    try:
        caches = DynamicCache(config=config).layers
    except FAILURES:
        caches = []
    for i, (layer, cache) in enumerate(zip(stack, caches, strict=False)):
        known = [m for m, _ in layer.named_modules() if any(n.endswith(f".{i}.{m}") for n in (*found, *left, *others))]
        if isinstance(cache, LinearAttentionCacheLayerMixin) and not known:
            left[f"layer {i}"] = f"{type(layer).__name__}: it keeps a state from token to token that no operator has"
    return found, left


def _family(module: torch.nn.Module) -> StateFamily | None:
    return next((family for family in FAMILIES if family.of(module)), None)


def _specs(module: Any, family: StateFamily) -> Iterator[tuple[ConvSpec, DeltaSpec]]:
    """Yield the nodes that a module may be, the likeliest first."""
    groups, heads, key, value = (getattr(module, name) for name in family.sizes)
    eps = next(float(v) for k, v in vars(getattr(module, family.norm)).items() if k in ("variance_epsilon", "eps"))
    convolution = getattr(module, family.conv)
    for activation, gate, beta in itertools.product(("silu", "none"), ("silu", "sigmoid"), (1.0, 2.0)):
        conv = ConvSpec(channels=convolution.in_channels, width=convolution.kernel_size[0], activation=activation)
        delta = DeltaSpec(
            num_k_heads=groups,
            num_v_heads=heads,
            k_head_size=key,
            v_head_size=value,
            scale=float(np.float32(key**-0.5)),
            l2_epsilon=float(np.float32(1e-6)),
            decay_per_key=int(family.per_key),
            beta_scale=beta,
            gate=gate,
            norm_epsilon=float(np.float32(eps)),
        )
        yield conv, delta


def _compare(module: Any, family: StateFamily) -> RecognisedState:
    """Return the nodes that give what a module gives, on random tokens and states."""
    draw = drawing()
    try:
        candidates = list(_specs(module, family))
        conv, delta = candidates[0]
        width = 2 * delta.num_k_heads * delta.k_head_size + delta.num_v_heads * delta.v_head_size
        convolution, norm = getattr(module, family.conv), getattr(module, family.norm)
        if convolution.groups != conv.channels or width != conv.channels or norm.weight.ndim != 1:
            raise Unlike("its convolution is not of queries, keys and values, each channel alone")
        probe = _probe(module, family, draw)
        for batch, new, past in ((2, 5, False), (2, 1, True), (2, 5, True), (1, 70, True)):
            trial = _try(probe, delta, family, sizes=(batch, new), past=past, draw=draw)
            candidates = [specs for specs in candidates if _gives(specs, *trial)]
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None
    if not candidates:
        raise Unlike("it computes something else than CausalConv and GatedDelta")
    return RecognisedState(*candidates[0], family)


def _compare_short(module: Any, family: StateFamily) -> RecognisedState:
    """Return the node between the gates of a short convolution, if its module is one."""
    draw = drawing()
    convolution = getattr(module, family.conv)
    channels, width = convolution.in_channels, convolution.kernel_size[0]
    spec = ConvSpec(channels=channels, width=width, activation="none")
    try:
        probe = _probe(module, family, draw)
        if convolution.groups != channels or probe.features != [3 * channels]:
            raise Unlike("its convolution is not of a third of its projection, each channel alone")
        weight, bias = (getattr(getattr(probe, family.conv), name) for name in ("weight", "bias"))
        taken, bias = weight[:, 0].numpy(), (torch.zeros(0) if bias is None else bias).numpy()
        for batch, new, past in ((2, 5, False), (2, 1, True), (2, 5, True)):
            projected, state = draw(batch, new, 3 * channels), draw(batch, channels, width)
            before, after, x = (t.numpy() for t in projected.chunk(3, -1))
            probe.set_submodule(family.projections[0][0], Given(projected))
            output, layer = _run(probe, torch.zeros(batch, new, 8), [state] if past else [])
            mixed, present = reference_conv(spec, before * x, taken, bias, state[..., 1:].numpy(), _rows(x, past))
            if not near_all((output, layer.conv_states[0][..., 1:]), (after * mixed, present), _TOLERANCE):
                raise Unlike("it computes something else than a convolution between two gates")
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None
    return RecognisedState(spec, None, family)


def _probe(module: Any, family: StateFamily, draw: Draw) -> Any:
    """Return a copy of a module with random parameters and without projections."""
    linears = {*itertools.chain(*family.projections), family.out}
    features = [module.get_submodule(chain[-1]).out_features for chain in family.projections]
    # parts without their linears first: those may be larger than the memory
    kept = {id(module.get_submodule(name)): torch.nn.Identity() for name in linears}
    probe = copy.deepcopy(module, kept)
    randomise(probe, draw)
    probe.features = features
    probe.layer_idx = 0
    return probe


def _run(probe: Any, x: torch.Tensor, states: list[torch.Tensor]) -> tuple[torch.Tensor, LinearAttentionLayer]:
    """Return a probe's output, and its layer of a cache, which had these states before: its convolution's, a recurrent
    one."""
    layer, cache = LinearAttentionLayer(), DynamicCache()
    for update, state in zip((layer.update_conv_state, layer.update_recurrent_state), states, strict=False):
        update(state.clone())
    cache.layers = [layer]
    with torch.no_grad():
        output = probe(hidden_states=x, cache=cache, attention_mask=None)
    if not isinstance(output, torch.Tensor):
        raise Unlike("its forward does not return its output alone")
    return output, layer


def _rows(x: np.ndarray, past: bool) -> np.ndarray:
    """Return the nodes' rows of x [B, S, C]: all tokens count."""
    return np.tile(np.array([0, x.shape[1], int(past)], np.int32), (len(x), 1))


def _try(
    probe: Any, spec: DeltaSpec, family: StateFamily, *, sizes: tuple[int, int], past: bool, draw: Draw
) -> tuple[list[np.ndarray], list[np.ndarray], bool]:
    """Run a probe of a module.

    Returns:
        The nodes' inputs: x, a, b, z, weights and states. The probe's output, and its states afterwards. Whether there
        are tokens before.
    """
    batch, new = sizes
    outputs = [draw(batch, new, features) for features in probe.features]
    for (*_, last), values in zip(family.projections, outputs, strict=True):
        probe.set_submodule(last, Given(values))
    convolution, decay = getattr(probe, family.conv), probe.get_submodule(family.decay)
    conv = draw(batch, convolution.in_channels, convolution.kernel_size[0])
    state = draw(batch, spec.num_v_heads, spec.k_head_size, spec.v_head_size)
    output, layer = _run(probe, draw(batch, new, 8), [conv, state] if past else [])
    qkv, z, b, a = family.apart(spec, *outputs)
    bias = convolution.bias if convolution.bias is not None else torch.zeros(0)
    a, *decays = _decays(decay, a)
    given = [qkv, a, b, z, convolution.weight[:, 0], bias, conv[..., 1:], *decays]
    given += [getattr(probe, family.norm).weight, state]
    made = [output, layer.conv_states[0], layer.recurrent_states[0]]
    return [t.numpy() for t in given], [t.numpy() for t in made], past


def _gives(specs: tuple[ConvSpec, DeltaSpec], given: list[np.ndarray], made: list[np.ndarray], past: bool) -> bool:
    """Return whether the nodes give what the module gave."""
    qkv, a, b, z, weight, bias, conv, a_log, dt_bias, norm, state = given
    rows = _rows(qkv, past)
    mixed, present_conv = reference_conv(specs[0], qkv, weight, bias, conv, rows)
    output, present = reference_delta(specs[1], mixed, a, b, z, a_log, dt_bias, norm, state, rows)
    return near_all((made[0], made[1][..., 1:], made[2]), (output, present_conv, present), _TOLERANCE)


def attach(model: torch.nn.Module, found: dict[str, RecognisedState], rows: Rows) -> list[str]:
    """Make the forward of recognised modules their projections and two nodes between them.

    Returns:
        Names of the parameters that are f32 now, in the shapes that the nodes take, see :func:`as_taken`.
    """
    changed = []
    for path, recognised in found.items():
        module: Any = model.get_submodule(path)
        family = recognised.family
        module.found, module.rows = recognised, rows
        linears = (chain[-1] for chain in family.projections)
        module.features = {name: module.get_submodule(name).out_features for name in linears}
        of = [(family.conv, "weight"), (family.conv, "bias")]
        if recognised.delta:
            of += [(family.decay, "A_log"), (family.decay, "dt_bias"), (family.norm, "weight")]
        names = (".".join(filter(None, parts)) for parts in of)
        changed += [f"{path}.{name}" for name in names if widen(module, name)]
        module.forward = MethodType(_forward if recognised.delta else _forward_short, module)
    return changed


def widen(module: torch.nn.Module, name: str) -> bool:
    """Make a parameter of a module, if it has this one, f32 and of the shape of :func:`as_taken`."""
    path, _, leaf = name.rpartition(".")
    part = module.get_submodule(path)
    if (old := part._parameters[leaf]) is None:
        return False
    shape = as_taken(np.broadcast_to(np.zeros(1), old.shape)).shape
    wide = old.data.flatten()[:1].float().expand(shape)  # a placeholder as it was
    part._parameters[leaf] = torch.nn.Parameter(wide, requires_grad=False)
    return True


def as_taken(parameter: np.ndarray) -> np.ndarray:
    """Return a convolution's weight [C, 1, W] as [C, W], an A_log [1, 1, H, 1] as [H]."""
    return parameter[:, 0] if parameter.ndim == 3 else parameter.reshape(-1)


def cache_layer(layer: Any, batch: int) -> LinearAttentionLayer:
    """Return the states of zeros as another cache's layer has them, for so many rows."""
    both = hasattr(layer, "keys")
    made = LinearAttentionAndFullAttentionLayer() if both else LinearAttentionLayer()
    of = (made.conv_states, layer.conv_states, 3), (made.recurrent_states, layer.recurrent_states, 4)
    for own, states, rank in of:
        if states[0] is None:
            continue
        shape = *states[0].shape[:-rank], batch, *states[0].shape[1 - rank :]
        own[0] = torch.zeros(shape, dtype=states[0].dtype)  # theirs may be without memory
    made.has_previous_state[0] = True
    return made


def recurrent_state(layer: Any, x: torch.Tensor, window: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return what a layer has of the tokens before, zeros f32 [B, *sizes] where it has nothing; a window of several in
    front. x: [B, ..]."""
    if layer.recurrent_states[0] is None:
        layer.recurrent_states[0] = x.new_zeros((*[window] * (window > 1), len(x), *sizes), dtype=torch.float32)
    state: torch.Tensor = layer.recurrent_states[0]
    return state


def _whole(module: Any, x: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield what each of QWEN3_5's projections makes of x, when it is asked for: the tensor that has it, and from which
    feature on. Where several are one linear, that one's output is all of theirs."""
    found: dict[str, tuple[torch.Tensor, int]] = {}
    for (name,) in QWEN3_5.projections:
        of = (whole for whole, names in WHOLES.items() if name in names and hasattr(module, whole))
        if name not in found and (whole := next(of, None)) is not None:
            y, at = getattr(module, whole)(x), 0
            for part in WHOLES[whole]:
                found[part] = y, at
                at += module.features[part]
        yield found[name] if name in found else (getattr(module, name)(x), 0)


def _size(tensor: torch.Tensor, own: int) -> int:
    """Return a row's features, 0 where they are the input's own."""
    return 0 if tensor.shape[-1] == own else tensor.shape[-1]


def convolve(spec: ConvSpec, convolution: Any, x: torch.Tensor, layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the output of a CausalConv, whose state is the layer's. x: [B, S, C], or more behind that."""
    attributes = json.dumps(dataclasses.replace(spec, x_size=_size(x, spec.channels)).attributes())
    if layer.conv_states[0] is None:
        window = [spec.state_window] * (spec.state_window > 1)
        layer.conv_states[0] = x.new_zeros((*window, x.shape[0], spec.channels, spec.width - 1))
    bias = convolution.bias if convolution.bias is not None else torch.zeros(0)
    state = layer.conv_states[0]
    x, layer.conv_states[0] = torch.ops.quantmoe.causal_conv(x, convolution.weight, bias, state, rows, attributes)
    return x


def _convolved(self: Any, x: torch.Tensor, layer: Any) -> torch.Tensor:
    return convolve(self.found.conv, getattr(self, self.found.family.conv), x, layer, self.rows.rows)


def _forward_short(self: Any, hidden_states: torch.Tensor, cache: Any, *_: Any, **__: Any) -> torch.Tensor:
    family, layer = self.found.family, cache.layers[self.layer_idx]
    before, after, x = family.apart(None, *family.projected(self, hidden_states))
    y = _convolved(self, before * x, layer)
    layer.has_previous_state[0] = True
    return getattr(self, family.out)(after * y)


def _forward(self: Any, hidden_states: torch.Tensor, cache: Any, *_: Any, **__: Any) -> torch.Tensor:
    x, spec, family = hidden_states, self.found.delta, self.found.family
    layer, decay = cache.layers[self.layer_idx], self.get_submodule(family.decay)
    if family is QWEN3_5:
        parts = _whole(self, x)
        qkv = next(parts)[0]
        z, z_at = next(parts)
        # Of what is ready ONNX Runtime runs the node that comes last here first, so a small product before the large
        # one, whose weights are read meanwhile.
        qkv = _convolved(self, qkv, layer)
        (b, b_at), (a, a_at) = parts
        heads = spec.num_v_heads
        sizes = {"a": _size(a, heads), "b": _size(b, heads), "z": _size(z, heads * spec.v_head_size)}
        wider = {f"{name}_size": size for name, size in sizes.items()}
        spec = dataclasses.replace(spec, **wider, a_offset=a_at, b_offset=b_at, z_offset=z_at)
    else:
        qkv, z, b, a = family.apart(spec, *family.projected(self, x))
        qkv = _convolved(self, qkv, layer)
    state = recurrent_state(layer, x, spec.state_window, (spec.num_v_heads, spec.k_head_size, spec.v_head_size))
    norm, rows = getattr(self, family.norm).weight, self.rows.rows
    a, *decays = _decays(decay, a)
    y, layer.recurrent_states[0] = torch.ops.quantmoe.gated_delta(
        qkv, a, b, z, *decays, norm, state, rows, json.dumps(spec.attributes())
    )
    layer.has_previous_state[0] = True
    return getattr(self, family.out)(y)
