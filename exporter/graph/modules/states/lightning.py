"""Lightning attention of MiniMax-Text-01 -> standard nodes: a state in place of keys and values, which decays by a
constant of its head and layer.

S_t = exp(-rate) S_(t-1) + k_t^T v_t, o_t = q_t S_t. As the decay is constant, a run of several tokens needs no loop:
o = ((q k^T) * D) v + (q S) * d. D and d are powers of the decay, exponentials of what is never above 0. The first
product is of every two tokens of the run. All of it is f32 in any graph, since nothing bounds the sums.

As linear_attention.py, modules are recognised by what they compute.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import LinearAttentionLayer

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
from quantmoe.exporter.graph.modules.states.linear_attention import recurrent_state

if TYPE_CHECKING:
    from quantmoe.exporter.graph.placeholders import Stored

LINEARS = ("qkv_proj", "output_gate", "out_proj")
#: sums in f32 in another order, of chunks of 70 tokens
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Lightning:
    """Numbers that a module computes with.

    Attributes:
        heads, size: of queries, keys and values.
        rates: of each head; a token's decay is exp(-rate).
        window: how many states it keeps, after each of the last so many tokens of a run.
    """

    heads: int
    size: int
    rates: tuple[float, ...]
    window: int


def recognise(model: torch.nn.Module, layers: int, window: int) -> tuple[dict[str, Lightning], dict[str, str]]:
    """Return the modules of lightning attention, and why others that look like it are none. By name.

    Args:
        layers: of the whole model, which decays depend on; ``model`` may have the first of them only.
        window: see :class:`Lightning`.
    """
    compare = once_a_kind(_compare)

    def judge(module: Any) -> Lightning:
        own = _spec(module, layers, window)
        compare(module, own)
        return own

    return judged(((name, module) for name, module in model.named_modules() if _looks_like_one(module)), judge)


def _looks_like_one(module: Any) -> bool:
    return hasattr(module, "slope_rate") and all(hasattr(module, part) for part in LINEARS)


def _spec(module: Any, layers: int, window: int) -> Lightning:
    module.num_hidden_layers = layers
    rates = tuple(module.get_slope_rate().flatten().tolist())
    return Lightning(module.num_attention_heads, module.head_dim, rates, window)


def _compare(module: Any, found: Lightning) -> None:
    """Raise Unlike where a module gives something else on random tokens and states."""
    draw = drawing()
    try:
        probe = copy.deepcopy(module, {id(getattr(module, name)): torch.nn.Identity() for name in LINEARS})
        randomise(probe, draw)
        rates = probe.get_slope_rate()
        tables = zip(("query_decay", "key_decay", "diagonal_decay"), probe.decay_factors(rates), strict=True)
        for name, table in (("slope_rate", rates), *tables):
            probe._buffers[name] = table
        probe.layer_idx, width = 0, found.heads * found.size
        for batch, new, past in ((2, 5, False), (2, 1, True), (2, 5, True), (1, 70, False)):
            for name, features in (("qkv_proj", 3 * width), ("output_gate", width)):
                probe._modules[name] = Given(draw(batch, new, features))
            seen: dict[int, torch.Tensor] = {}
            state = draw(batch, found.heads, found.size, found.size)
            own = SimpleNamespace(get_linear_cache=lambda _, s=state, p=past: s.clone() if p else None)
            own.set_linear_cache = seen.__setitem__
            x = torch.zeros(batch, new, 8)
            with torch.no_grad():
                want, _ = probe(x, position_embeddings=None, attention_mask=None, cache=own)
                layer = LinearAttentionLayer()
                layer.recurrent_states[0] = state.expand(found.window, *state.shape) if found.window > 1 else state
                probe.found, probe.rate = found, torch.tensor(found.rates)
                probe.rows = SimpleNamespace(rows=torch.tensor([[0, new, int(past)]] * batch, dtype=torch.int32))
                output, _ = _forward(probe, x, SimpleNamespace(layers=[layer]))
            present = layer.recurrent_states[0]
            present = present[-1] if found.window > 1 else present
            if not near_all((output, present), (want.numpy(), seen[0].numpy()), _TOLERANCE):
                raise Unlike("it computes something else than lightning attention")
    except FAILURES as error:
        raise Unlike(f"its forward does not run alone: {line(error)}") from None


def attach(stored: Stored, recognised: Mapping[str, Lightning], rows: Rows) -> list[str]:
    """Make the forward of recognised modules standard nodes, and their rates a parameter, so that layers are alike.

    Returns:
        Names of the parameters that are f32 now.
    """
    changed = []
    for path, found in recognised.items():
        module: Any = stored.model.get_submodule(path)
        stored.fill(f"{path}.rate", np.array(found.rates, np.float32), f"{path}.norm.weight")
        old = module.norm.weight.data
        wide = old.flatten()[:1].float().expand(old.shape)  # a placeholder as it was
        module.norm._parameters["weight"] = torch.nn.Parameter(wide, requires_grad=False)
        changed.append(f"{path}.norm.weight")
        module.found, module.rows, module.forward = found, rows, MethodType(_forward, module)
    return changed


def _forward(self: Any, hidden_states: torch.Tensor, cache: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    found, layer = self.found, cache.layers[self.layer_idx]
    qkv = self.act_fn(self.qkv_proj(hidden_states)).float()
    state = recurrent_state(layer, qkv, found.window, (found.heads, found.size, found.size))
    mixed, layer.recurrent_states[0] = _attend(found, qkv, self.rate, state, self.rows.rows)
    layer.has_previous_state[0] = True
    output = self.norm(mixed).to(hidden_states.dtype)
    return self.out_proj(self.output_gate(hidden_states).sigmoid() * output), None


def _attend(
    found: Lightning, qkv: torch.Tensor, rate: torch.Tensor, state: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and states, all f32.

    Args:
        qkv: [B, S, heads * 3 * size], a head's queries, keys and values beside each other. rate: [heads].
        state: [B, heads, size, size], a window of them in front. rows: see attention_inputs.py's :func:`rows_of`.

    Returns:
        [B, S, heads * size], of tokens that do not count numbers that nothing reads; and the next state.
    """
    q, k, v = qkv.unflatten(-1, (found.heads, 3, found.size)).permute(3, 0, 2, 1, 4)
    begin, count, past = (part.reshape(-1, 1) for part in rows.unbind(1))
    at = torch.arange(qkv.shape[1])
    place = at - begin  # [B, S], a token's place among those of its row
    k = k * ((place >= 0) & (place < count)).float()[:, None, :, None]
    live = state.float()  # a cast of the input, whose type the trace takes for the graph's
    live = live[-1] if found.window > 1 else live
    live = live * ((past > 0) | (count == 0)).float()[..., None, None]

    def decay(tokens: torch.Tensor) -> torch.Tensor:
        """Return the decay of so many tokens [.., N], 1 of less than none: [.., heads, N]."""
        return torch.exp(-rate[:, None] * tokens.clamp(min=0).float().unsqueeze(-2))

    back = at[:, None] - at
    within = decay(back).transpose(0, 1) * (back >= 0).float()  # [heads, S, S]
    mixed = torch.matmul(torch.matmul(q, k.transpose(2, 3)) * within, v)
    mixed = mixed + torch.matmul(q, live) * decay(place + 1)[..., None]
    # [window, B, 1], how many tokens of its row a state has
    last = (count - torch.arange(found.window - 1, -1, -1)[:, None, None]).clamp(min=0)
    seen = decay(last - 1 - place) * (place < last).float().unsqueeze(-2)
    made = live * decay(last)[..., None] + torch.matmul((k * seen[..., None]).transpose(-2, -1), v)
    return mixed.transpose(1, 2).flatten(2), made if found.window > 1 else made[0]
