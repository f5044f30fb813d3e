"""Latent attention (DeepSeek-V2's MLA, arXiv 2405.04434): the cache keeps what all heads share, and it is not expanded.

transformers multiplies the whole cache by kv_b_proj at every step, which makes the keys and values of each head. Here
queries are multiplied by the half of kv_b_proj that makes keys, and outputs by the half that makes values. So the
queries of all heads meet the latent itself, one key whose end is its value. The CPU's node has both halves as inputs,
and multiplies so for few tokens. For a prompt it expands the latent, a block and a head at a time. For CUDA, products
around the node do it.

Modules that compute no more than that become CachedAttention. Other modules keep their forward with this change of
order, and standard nodes attend.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quantmoe.custom_ops.op import AttentionSpec
from quantmoe.custom_ops.reference import attention as reference
from quantmoe.exporter.graph.modules.attention import (
    NEAR,
    TOLERANCE,
    Called,
    Draw,
    Given,
    Kind,
    Past,
    RecognisedAttention,
    Seen,
    Selection,
    Sizes,
    Unlike,
    agreeing,
    bound,
    drawing,
    near_all,
    probe_of,
    random_selection,
    run_probe,
)
from quantmoe.exporter.graph.placeholders import placeholder

if TYPE_CHECKING:
    from quantmoe.exporter.graph.placeholders import Stored

#: projections of gates: of a head's output as Ling 3 and dots3-note have it, of all its features as Hunyuan 4
GATES = ("g_proj", "gate_proj")
#: modules whose parameters a probe keeps
KEPT = ("q_a_layernorm", "kv_a_layernorm", "k_rope_only_layernorm", "softmax_scaling")


def is_latent(module: torch.nn.Module) -> bool:
    """Return whether transformers' forward expands a latent by ``expand_kv``, which all architectures have alike."""
    up = getattr(module, "kv_b_proj", None)
    return hasattr(module, "expand_kv") and isinstance(up, torch.nn.Linear) and up.bias is None


def _scaled(module: Any, queries: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Return queries [batch, S, heads, width] times what grows with the position: of Mistral-Small-4, and of each head
    of Mistral-Large-4."""
    if position_ids is None:
        return queries
    if (scaling := getattr(module, "softmax_scaling", None)) is not None:
        found: torch.Tensor = scaling(queries, position_ids, head_dim_first=False)
        return found
    rope = getattr(module.config, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is None:
        return queries
    periods = torch.floor(position_ids.float() / rope["original_max_position_embeddings"])
    return (queries * (1 + beta * torch.log1p(periods))[..., None, None]).to(queries.dtype)


def _scales(module: Any) -> tuple[float, float]:
    """Return the factors of queries and of the latent, as LongCat-Flash and (of the latent) dots3-note have them."""
    latent = getattr(module, "kv_lora_scale", 1.0)
    return getattr(module, "mla_scale_q_lora", 1.0), getattr(module, "mla_scale_kv_lora", latent)


def _low_rank(module: Any) -> int | None:
    """Return the rank of the product that makes queries; None: it is one matrix."""
    rank: int | None = getattr(module, "q_lora_rank", None)
    return rank


def _low_queries(module: Any, compressed: torch.Tensor) -> torch.Tensor:
    """Return what q_b_proj and an indexer make queries of."""
    found: torch.Tensor = module.q_a_layernorm(compressed)
    return found if (factor := getattr(module, "q_lora_scale", 1.0)) == 1 else found * factor


def _turning_key(module: Any, key: torch.Tensor) -> torch.Tensor:
    """Return the features of a key that turn, which dots3-note normalizes."""
    norm = getattr(module, "k_rope_only_layernorm", None)
    return key if norm is None else norm(key)


def _gate_of(module: Any) -> str:
    """Return the name of the projection whose sigmoid multiplies the output; "" where there is none."""
    return next((name for name in GATES if getattr(module, name, None) is not None), "")


def _projections(module: Any, x: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return queries, what an indexer makes its queries of, and what multiplies each head's output.

    The first are [batch, S, heads * width], the last [batch, S, heads, 1 or the output's width] or None.
    """
    gates = None
    if name := _gate_of(module):
        gates = getattr(module, name)(x).unflatten(-1, (heads, -1))
    if not _low_rank(module):
        queries, low = module.q_proj(x), x
    else:
        low = _low_queries(module, compressed := module.q_a_proj(x))
        if hasattr(module, "q_gate_proj"):  # A.X K2: the gates of a head behind its queries
            joined = module.q_gate_proj(torch.cat((low, compressed), -1)).unflatten(-1, (heads, -1))
            queries, gates = joined.split([module.qk_head_dim, module.v_head_dim], -1)
            queries = queries.flatten(-2)
        else:
            queries = module.q_b_proj(low)
    return queries, low, None if gates is None else torch.sigmoid(gates.float()).to(x.dtype)


def _selects(module: Any) -> bool:
    """Return whether a module attends to what an indexer selects, its own or a layer's before it."""
    return getattr(module, "indexer", None) is not None or getattr(module, "skip_topk", False)


class Absorbed(torch.nn.Module):
    """kv_b_proj by heads.

    Attributes:
        k_up: [heads, rank, nope]. v_up: [heads, v_head_dim, rank]. As inputs of a node with a nope_size, which are not
            for :meth:`queries` and :meth:`outputs`, the last two dimensions are in the other order.
    """

    def __init__(self, k_up: torch.Tensor, v_up: torch.Tensor):
        super().__init__()
        self.k_up, self.v_up = (torch.nn.Parameter(t, requires_grad=False) for t in (k_up, v_up))

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, S, heads, nope] -> [batch, S, heads, rank]."""
        return _by_heads(x, self.k_up)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, S, heads, rank] -> [batch, S, heads, v_head_dim]."""
        return _by_heads(x, self.v_up)


def _by_heads(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [batch, S, heads, K] times [heads, N, K]; one product a head, however many rows the batch has.

    Tokens are columns, and no more than two dimensions change places at once. TensorRT 10.6 reads wrong places, without
    a message, if [heads, tokens, K] is made by another change of order. This happens in engines for sequences of 1 to
    512 (tests/tensorrt/run.py, deepseek_v3 and kimi_linear).
    """
    batch, new, heads, size = x.shape
    columns = x.reshape(batch * new, heads * size).t().reshape(heads, size, batch * new)
    found = torch.matmul(weights, columns).reshape(heads * weights.shape[1], batch * new)
    return found.t().reshape(batch, new, heads, weights.shape[1])


def _halves(weight: np.ndarray, nope: int, value: int) -> tuple[np.ndarray, np.ndarray]:
    """kv_b_proj's weight [heads (nope + value), rank] as :class:`Absorbed` has it."""
    heads = weight.reshape(-1, nope + value, weight.shape[1])
    return heads[:, :nope].swapaxes(1, 2), heads[:, nope:]


def _half(weight: np.ndarray, i: int, nope: int, value: int, inside: bool) -> np.ndarray:
    half = _halves(weight, nope, value)[i]
    return half.swapaxes(1, 2) if inside else half


def _inside(module: Any) -> bool:
    """Return whether its node multiplies by the halves itself."""
    found = getattr(module, "found", None)
    return found is not None and found.spec.nope_size > 0


def absorb(stored: Stored) -> None:
    """Give latent modules their :class:`Absorbed` in kv_b_proj's place, and those that still run transformers' forward
    an ``expand_kv`` that expands nothing; exporter/graph/standard_attention.py then absorbs."""
    for path, found in list(stored.model.named_modules()):
        if not is_latent(found):
            continue
        module: Any = found
        nope, value, rank = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
        heads, dtype = module.kv_b_proj.out_features // (nope + value), module.kv_b_proj.weight.dtype
        inside = _inside(module)
        shapes = {"k_up": (rank, nope), "v_up": (value, rank)}
        orders = (shape[::-1] if inside else shape for shape in shapes.values())
        module.absorbed = Absorbed(*(placeholder((heads, *order), dtype) for order in orders))
        source = stored.sources[stored.tied[f"{path}.kv_b_proj.weight"]]
        del module.kv_b_proj
        for i, name in enumerate(shapes):
            full = f"{path}.absorbed.{name}"
            stored.sources[full] = source
            stored.derive([full], partial(_half, i=i, nope=nope, value=value, inside=inside))
        module.expand_kv = MethodType(_expand_kv, module)


def _expand_kv(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepseekV3Attention.expand_kv without the expansion.

    Args:
        kv_nope: [batch, 1, L, kv_lora_rank]. k_rot: [batch, 1, L, qk_rope_head_dim].

    Returns:
        keys and values of all heads, [batch, 1, L, kv_lora_rank + qk_rope_head_dim] and [batch, 1, L, kv_lora_rank].
    """
    return torch.cat((kv_nope, k_rot), -1), kv_nope


def _forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return the projections and one node between them."""
    given = bound(self, args, kwargs)
    x, heads = given["hidden_states"], self.found.spec.num_heads
    queries, low, gates = _projections(self, x, heads)
    queries = _scaled(self, queries.unflatten(-1, (heads, -1)), given.get("position_ids"))
    inside = _inside(self)
    if not inside:
        nope, turning = queries.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        queries = torch.cat((turning, self.absorbed.queries(nope)), -1)
    latent, key = self.kv_a_proj_with_mqa(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    latent, key = self.kv_a_layernorm(latent), _turning_key(self, key)
    if (factor := _scales(self)[1]) != 1:
        latent = latent * factor
    qkv = torch.cat((queries.flatten(-2), key, latent), -1)
    ups = (self.absorbed.k_up, self.absorbed.v_up) if inside else ()
    if self.found.indexer is not None:
        selection = self.rows.select(self, given | {"q_resid": low})
    else:
        selection = [given["prev_topk_indices"]] if self.found.selects else []
    sinks = getattr(self, self.found.sinks).float() if self.found.sinks else None
    tables = given.get("position_embeddings") or [qkv[..., :0]] * 2
    output = self.rows.attend(self, qkv, given["cache"], tables=tables, sinks=sinks, ups=ups, selection=selection)
    if not inside or gates is not None:
        output = output.unflatten(-1, (heads, -1))
        output = output if inside else self.absorbed.outputs(output)
        output = (output if gates is None else output * gates).flatten(-2)
    rest = [None] * (self.found.outputs - 1)
    if len(rest) > 1 and self.found.selects:  # for layers without an indexer
        rest[-1] = selection[0]
    return (self.o_proj(output), *rest)


class _Checked(Given):
    """A module in the place of a projection, which checks that it gets the known input."""

    def __init__(self, values: torch.Tensor, expected: torch.Tensor):
        super().__init__(values)
        self.expected = expected

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape != self.expected.shape or not torch.allclose(hidden_states, self.expected, atol=1e-5):
            raise Unlike("it changes what q_a_layernorm gives")
        return super().forward(hidden_states)


def _compare(module: Any, called: Called) -> RecognisedAttention:
    """Return the CachedAttention that gives what a module gives, on random tokens."""
    if module.qk_rope_head_dim and called.arguments.get("position_embeddings") is None:
        raise Unlike("it has no cosines and sines of a rotary module")
    if module.kv_a_proj_with_mqa is None:
        raise Unlike("it attends to keys of another layer")
    draw = drawing()
    probe = probe_of(module, [name for name, _ in module.named_children() if name not in KEPT], draw)
    if _selects(module):
        vars(probe).pop("forward", None)  # of standard nodes
    found, _ = agreeing(
        lambda sizes, spread: _Trial(module, probe, called, sizes=sizes, spread=spread, draw=draw),
        lambda trial: trial.candidates(called),
        lambda trial, pair: trial.gives(*pair),
        "CachedAttention of a latent",
    )
    return replace(found, selects=_selects(module))


class _Trial:
    """A run of a probe."""

    def __init__(self, module: Any, probe: Any, called: Called, *, sizes: Sizes, spread: float, draw: Draw):
        batch, new, past = sizes
        self.nope, self.rope, self.rank = module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank
        self.value, self.spread, self.probe = module.v_head_dim, spread, probe
        self.heads = module.kv_b_proj.out_features // (self.nope + self.value)
        self.queries = spread * draw(batch, new, self.heads * (self.nope + self.rope))
        self.compressed = spread * draw(batch, new, self.rank + self.rope)
        if not _low_rank(module):
            probe._modules["q_proj"] = Given(self.queries)
        else:
            compressed = draw(batch, new, module.q_lora_rank)
            low = _low_queries(probe, compressed)
            probe._modules["q_a_proj"] = Given(compressed)
            if hasattr(module, "q_gate_proj"):
                both = (self.queries.unflatten(-1, (self.heads, -1)), draw(batch, new, self.heads, self.value))
                joined = torch.cat(both, -1).flatten(-2)
                probe._modules["q_gate_proj"] = _Checked(joined, torch.cat((low, compressed), -1))
            else:
                probe._modules["q_b_proj"] = _Checked(self.queries, low)
        probe._modules["kv_a_proj_with_mqa"] = Given(self.compressed)
        up = torch.nn.Linear(1, 1, bias=False)
        up.weight = torch.nn.Parameter(draw(*module.kv_b_proj.weight.shape) / self.rank**0.5, requires_grad=False)
        probe._modules["kv_b_proj"], probe._modules["o_proj"] = up, torch.nn.Identity()
        if gate := _gate_of(module):
            each = getattr(module, gate).out_features // self.heads
            probe._modules[gate] = Given(draw(batch, new, self.heads * each))
        kwargs, self.tables, mask = called.again(sizes, draw)
        self.selected = None
        if _selects(module):
            chosen, self.selected = random_selection(mask, 1, draw)
            if hasattr(module, "build_attention_mask_from_topk"):  # GLM-5.3-Flash: of lists, which end with -1
                chosen = torch.from_numpy(self.selected[:, :, 0])
            probe._modules["indexer"] = None if module.indexer is None else Selection(chosen)
            kwargs |= {"prev_topk_indices": chosen} if module.indexer is None else {}
        self.positions, self.scales = kwargs.get("position_ids"), _scales(module)
        self.past = draw(batch, 1, past, self.rank), draw(batch, 1, past, self.rope)
        cache, self.seen = Past(*self.past), Seen()
        kwargs |= {"attention_mask": mask, "cache": cache}
        self.output, self.returned = run_probe(probe, self.seen, kwargs)
        self.present = cache.present

    def candidates(self, called: Called) -> list[tuple[RecognisedAttention, str]]:
        """Return the nodes that the module may be, each with how the module's cache has the pairs that turn
        together."""
        sinks = next((name for name, p in self.probe._parameters.items() if p is not None and p is self.seen.s_aux), "")
        if self.seen.s_aux is not None and not sinks:
            return []
        size, found = self.rank + self.rope, []
        for interleaved, kept in ((1, "halves"), (1, "pairs"), (0, "halves")):
            spec = AttentionSpec(
                num_heads=self.heads,
                kv_num_heads=1,
                head_size=size,
                v_head_size=self.rank,
                scale=float(np.float32(self.seen.scale * self.scales[0])),
                sliding_window=called.window,
                chunk_size=0,
                softcap=0.0,
                rotary_size=self.rope,
                rotary_interleaved=interleaved,
                qk_norm="none",
                norm_epsilon=0.0,
                key_split=size // 2,
            )
            found.append(
                (
                    RecognisedAttention(spec=spec, table=called.table, sinks=sinks, outputs=self.returned, kind=KIND),
                    kept,
                )
            )
        return found

    def gives(self, found: RecognisedAttention, kept: str) -> bool:
        """Return whether the operator gives the same between absorbed products."""
        spec = found.spec
        up = self.probe.kv_b_proj.weight.double().numpy()
        k_up, v_up = _halves(up, self.nope, self.value)
        batch, new = self.queries.shape[:2]
        with torch.no_grad():
            queries = _scaled(self.probe, self.queries.double().unflatten(-1, (self.heads, -1)), self.positions).numpy()
        absorbed = np.einsum("bshn,hrn->bshr", queries[..., : self.nope], k_up)
        heads = np.concatenate((queries[..., self.nope :], absorbed), -1)
        with torch.no_grad():
            latent = self.probe.kv_a_layernorm(self.compressed[..., : self.rank]) * self.scales[1]
            turning = _turning_key(self.probe, self.compressed[..., self.rank :])
        key = np.concatenate((turning.numpy(), latent.numpy()), -1)
        qkv = np.concatenate((heads.reshape(batch, new, -1), key), -1)
        order = np.arange(self.rope)
        if spec.rotary_interleaved and kept == "halves":  # where the node has what the module keeps in each place
            order = order.reshape(2, -1).T.flatten()
        turned, whole = self.past[1].numpy()[..., order], self.past[0].numpy()
        past = np.split(np.concatenate((turned, whole), -1), [spec.key_split], -1)
        length = past[0].shape[2]
        rows = np.tile(np.array([0, new, length], np.int32), (batch, 1))
        none = np.zeros(0, np.float32)
        sinks = np.full(self.heads, -np.inf, np.float32) if self.seen.s_aux is None else self.seen.s_aux.numpy()
        cos, sin = (t[..., : self.rope // 2].numpy() for t in self.tables)
        given = (rows, length + new, cos, sin, none, none, sinks)
        near = replace(spec, sliding_window=NEAR if spec.sliding_window else 0)
        output, *present = reference(near, qkv, past[0], past[1], *given, selected=self.selected)
        output = np.einsum("bshr,hvr->bshv", output.reshape(batch, new, self.heads, -1), v_up)
        if (gates := _projections(self.probe, self.queries, self.heads)[2]) is not None:
            output = output * gates.numpy()
        stored = np.concatenate(present, -1)
        want = output.reshape(batch, new, -1), stored[..., self.rope :], stored[..., : self.rope]
        got = self.output, self.present[0], self.present[1][..., order]
        return near_all(got, want, TOLERANCE[self.spread])


def _attach(module: Any) -> None:
    if module.rows.target.latent_ups:
        spec = replace(module.found.spec, nope_size=module.qk_nope_head_dim, out_size=module.v_head_dim)
        module.found, module.attention = replace(module.found, spec=spec), json.dumps(spec.attributes())
    module.forward = MethodType(_forward, module)


KIND = Kind(is_latent, _compare, _attach)
