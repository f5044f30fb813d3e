"""A skeleton's modules become what they are in the graph: these functions change the skeleton."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.matrix import gates_first
from quantmoe.custom_ops.op import GatherSpec, LinearSpec, ReduceSpec
from quantmoe.exporter.choosing.caches import Caches
from quantmoe.exporter.choosing.choose import Choice
from quantmoe.exporter.graph import standard_attention
from quantmoe.exporter.graph.architectures import ARCHITECTURES
from quantmoe.exporter.graph.model import Skeleton, decoder_of
from quantmoe.exporter.graph.modules import hyper_connections, latent
from quantmoe.exporter.graph.modules.attention import (
    MASKLESS,
    PROJECTIONS,
    RecognisedAttention,
)
from quantmoe.exporter.graph.modules.attention_inputs import Rows, attach, widen_tables
from quantmoe.exporter.graph.modules.norms import plain_norms
from quantmoe.exporter.graph.modules.rotations import Rotate
from quantmoe.exporter.graph.modules.routers import replace_routers
from quantmoe.exporter.graph.modules.shared_experts import attach as attach_shared
from quantmoe.exporter.graph.modules.states import lightning, linear_attention, selective_scan, state_space
from quantmoe.exporter.graph.passes.rank_collectives import meet, meet_before
from quantmoe.exporter.graph.placeholders import placeholder
from quantmoe.exporter.targets import Target

#: exported graphs have the names of these classes, with this module's: their bytes stay as they are
_RECORDED = "quantmoe.exporter.graph.trace"


class PackedLinear(torch.nn.Module):
    """A linear whose weight and bias are packed: one QuantLinear node, after what rotates its input."""

    __module__ = _RECORDED

    def __init__(self, spec: LinearSpec, dtype: torch.dtype, rotate: Rotate):
        super().__init__()
        self.rotate = rotate
        self.weight = torch.empty(0, dtype=dtype)  # routers ask for its type; nothing can be multiplied by it
        self.attributes = json.dumps(spec.attributes())
        words = LAYOUTS[spec.w.layout].row_bytes(spec.moe, "w2") // 4
        self.register_buffer("w", placeholder((1, words), torch.int32), persistent=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantmoe.quant_linear(self.rotate(x), self.w, self.attributes)


class PartOfLinear(torch.nn.Module):
    """Some of a packed linear's outputs. Parts of one input are one product: the exporter merges equal nodes."""

    __module__ = _RECORDED

    def __init__(self, whole: PackedLinear, sizes: Sequence[int], index: int):
        super().__init__()
        self.whole = (whole,)  # no module of this one, too
        self.sizes, self.index = list(sizes), index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole[0](x).split(self.sizes, -1)[self.index]


@dataclasses.dataclass(frozen=True)
class Attention:
    """A model's attention in the graph.

    Attributes:
        found: modules that become CachedAttention. rows: what their nodes share.
        plain: module that stays standard nodes -> why. If there is any, the caches have the graph's type.
        caches: what the caches of the found hold. kind: of floats, as asked for; see :func:`export`.
    """

    found: dict[str, RecognisedAttention]
    plain: dict[str, str]
    rows: Rows
    caches: Caches
    kind: str


def put_first_nodes(skeleton: Skeleton, chosen: Choice, target: Target) -> Rows:
    """Make experts, norms and linear attention what they are in the graph. Attention is recognised after that.

    Returns:
        What nodes with a state share.
    """
    model, decoder = skeleton.model, decoder_of(skeleton.model)
    for name, nodes in chosen.nodes.items():
        if nodes != [name]:
            model.get_submodule(name).groups = torch.nn.ModuleList(torch.nn.Module() for _ in nodes)
    for name, spec in chosen.layers.items():
        module, layout = model.get_submodule(name), LAYOUTS[spec.w13.layout]
        module.attributes = json.dumps(spec.attributes())
        module.rotate = Rotate(chosen.rotations.get(name), skeleton.dtype, bool(target.library))
        for projection in ("w13", "w2"):
            shape = (len(chosen.experts[name].ids), layout.row_bytes(spec, projection) // 4)
            module.register_buffer(projection, placeholder(shape, torch.int32), persistent=True)
    model.set_experts_implementation("quantmoe")
    model.set_attn_implementation(standard_attention.name_of(target))
    skeleton.derive(plain_norms(model), lambda array: array.astype(np.float32) + 1)
    rows = Rows(decoder, target)
    changed = linear_attention.attach(model, skeleton.linear_attention, rows)
    changed += state_space.attach(model, skeleton.state_space, rows)
    changed += selective_scan.attach(skeleton, skeleton.selective_scan, rows)
    if skeleton.own_states:
        ARCHITECTURES[model.config.model_type].attach(model, skeleton.own_states, rows)
    skeleton.derive(changed, linear_attention.as_taken)
    skeleton.derive(lightning.attach(skeleton, skeleton.lightning, rows), np.asarray)
    return rows


def put_nodes(skeleton: Skeleton, chosen: Choice, attends: Attention, target: Target) -> None:
    """Make the other modules what they are in the graph, so that it can be traced.

    Args:
        chosen: the nodes' attributes; linears that it lacks are float MatMuls. attends: of ``attention_of``.
    """
    model, found = skeleton.model, attends.found
    attach(model, found, attends.rows, _gates_first(skeleton, chosen, found))
    if not attends.plain:
        model.set_attn_implementation(MASKLESS)
        widen_tables(decoder_of(model))
    skeleton.take_rows()
    for name, linear in chosen.linears.items():
        rotate = Rotate(chosen.rotations.get(name), skeleton.dtype, bool(target.library))
        sizes, whole = [*skeleton.rows(chosen.parts[name]).values()], PackedLinear(linear, skeleton.dtype, rotate)
        if len(sizes) > 1:
            for i, part in enumerate(chosen.parts[name]):
                model.set_submodule(part, PartOfLinear(whole, sizes, i))
        model.set_submodule(name, whole)
    if target.joined:
        for path in found:
            skeleton.join(path, PROJECTIONS[:3], "qkv_proj")
        for path in skeleton.linear_attention:
            for joined, parts in linear_attention.WHOLES.items():
                skeleton.join(path, parts, joined)
    hyper_connections.replace(model, target.refusal)
    every = chosen.shared.values()
    replace_routers(model, target, {shared.router: (shared.count, int(bool(shared.gate))) for shared in every})
    for shared in every:
        if shared.gate:
            skeleton.stack(f"{shared.router}.weight", [f"{shared.router}.weight", f"{shared.gate}.weight"])
    attach_shared(model, every)
    latent.absorb(skeleton)
    if (own := skeleton.format.slice) is not None:
        experts = [] if own.own_tokens else chosen.nodes
        meet(model, [*experts, *skeleton.summed], ReduceSpec(**own.place))
        meet(model, skeleton.gathered, GatherSpec(**own.place))
        meet_before(model, skeleton.by_rows, GatherSpec(**own.place))


def _gates_first(skeleton: Skeleton, chosen: Choice, found: Mapping[str, RecognisedAttention]) -> list[str]:
    """Return modules whose query projections get their gates before their queries, where the node has them:
    chosen.gated of packed ones, functions of the others' tensors."""
    moved = []
    for path in (path for path, recognised in found.items() if recognised.spec.gated):
        heads, size = found[path].spec.num_heads, found[path].spec.head_size
        node = next((name for name, parts in chosen.parts.items() if f"{path}.q_proj" in parts), None)
        if node is not None and size % chosen.linears[node].w.block_n:
            continue  # rows of two blocks share a scale
        moved.append(path)
        if node is not None:
            chosen.gated[node] = heads
            continue
        order = gates_first(2 * heads * size, heads)
        names = (f"{path}.q_proj.{leaf}" for leaf in ("weight", "bias"))
        skeleton.derive((name for name in names if name in skeleton.tensors), partial(np.take, indices=order, axis=0))
    return moved
