"""Sums and joins between the ranks of a sliced model.

- An AllReduce follows each layer's experts and each linear of divided columns. With the AddRMSNorm of its sum it is one
  node.
- An AllGather follows a linear of divided rows. Another is before it where ranks have parts of its input.
- A rank with its own tokens has an AllGather of the tokens before each layer's experts and their router. A
  ReduceScatter follows the experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from quantmoe.custom_ops.op import DOMAIN, GatherSpec, ReduceNormSpec, ReduceSpec, ScatterSpec
from quantmoe.exporter.graph.passes.divided_norms import only_user, producer
from quantmoe.exporter.reading.slices import Slice


def meet(model: torch.nn.Module, modules: Iterable[str], spec: ReduceSpec | GatherSpec) -> None:
    """Make the outputs of modules, by name, all ranks' outputs."""
    attributes = json.dumps(spec.attributes())
    operator = torch.ops.quantmoe.all_reduce if isinstance(spec, ReduceSpec) else torch.ops.quantmoe.all_gather

    def call(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return operator(output, attributes)

    for name in modules:
        model.get_submodule(name).register_forward_hook(call)


def meet_before(model: torch.nn.Module, modules: Iterable[str], spec: GatherSpec) -> None:
    """Give modules, by name, the inputs of all ranks, one after the other."""
    attributes = json.dumps(spec.attributes())

    def call(_: torch.nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.ops.quantmoe.all_gather(*given, attributes)

    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(call)


def meet_around_experts(model: ir.Model, part: Slice) -> None:
    """Give each QuantMoE the tokens of all ranks, and each rank the experts' sums of its own.

    A router has all ranks' tokens, too: it is in all ranks, so only the tokens are sent, not their ids and weights.

    Raises:
        ValueError: ids and weights are not made of the experts' input, or what makes them has other uses.
    """
    for node in [node for node in model.graph if node.op_type == "QuantMoE"]:
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        readers = {*_router(node, x), node}
        every = ir.node("AllGather", [x], GatherSpec(**part.place, axis=0).attributes(), domain=DOMAIN)
        own = ir.node("ReduceScatter", [y], ScatterSpec(**part.place).attributes(), domain=DOMAIN)
        every.outputs[0].type, own.outputs[0].type = x.type, y.type
        model.graph.insert_before(next(other for other in model.graph if other in readers), every)
        for reader in readers:
            for at, value in enumerate(reader.inputs):
                if value is x:
                    reader.replace_input_with(at, every.outputs[0])
            for value in reader.outputs:
                value.shape = None  # more rows than were traced
        ir.convenience.replace_all_uses_with(y, own.outputs[0])
        own.replace_input_with(0, y)
        model.graph.insert_after(node, own)


def _router(experts: ir.Node, x: ir.Value) -> set[ir.Node]:
    """Return the nodes that make ids and weights of experts of x."""
    of_x: dict[ir.Node, bool] = {}

    def comes(value: ir.Value | None) -> bool:
        maker = value.producer() if value is not None else None
        if value is x or maker is None:
            return value is x
        if maker not in of_x:
            of_x[maker] = any([comes(given) for given in maker.inputs])
        return of_x[maker]

    if not all([comes(value) for value in experts.inputs[1:3]]):
        raise ValueError(f"ids and weights of {experts.name} are not made of its input")
    found = {maker for maker, does in of_x.items() if does}
    for value in (value for maker in found for value in maker.outputs):
        if value.is_graph_output() or not {*found, experts}.issuperset(value.consumers()):
            raise ValueError(f"what routes {experts.name} has other uses: {value.name}")
    return found


def norm_sums(model: ir.Model) -> None:
    """AllReduce and AddRMSNorm -> AllReduceAddRMSNorm, where all that takes the norm's sum becomes one, too: a rank has
    some of its rows only."""
    found = [norm for norm in model.graph if norm.op_type == "AddRMSNorm" and _summed(norm)]
    while len(kept := [norm for norm in found if _stays(norm.outputs[1], found)]) < len(found):
        found = kept
    for norm in found:
        parts = _summed(norm)
        assert parts is not None
        reduce, residual = parts
        x = reduce.inputs[0]
        if (between := only_user(reduce.outputs[0], "Reshape")) is not None:
            between.replace_input_with(0, x)
            x = between.outputs[0]
        both = {"norm_epsilon": norm} | dict.fromkeys(("rank", "world", "export_id"), reduce)
        spec = ReduceNormSpec(**{name: node.attributes[name].value for name, node in both.items()})
        inputs = [x, residual, norm.inputs[2]]
        made = ir.node(spec.OPERATOR.name, inputs, spec.attributes(), domain=DOMAIN, num_outputs=2, name=norm.name)
        for value, old in zip(made.outputs, norm.outputs, strict=True):
            value.type, value.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, norm, [norm], [made], norm.outputs, made.outputs)
        model.graph.remove(reduce, safe=True)


def _summed(norm: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """Return the AllReduce that only an AddRMSNorm has, maybe in another shape, and what it is added to."""
    for value, other in (norm.inputs[:2], norm.inputs[1::-1]):
        last = producer(value, "Reshape") or producer(value, "AllReduce")
        reduce = last if last is None or last.op_type == "AllReduce" else producer(last.inputs[0], "AllReduce")
        if last and reduce and other is not None and _once(last.outputs[0]) and _once(reduce.outputs[0]):
            return reduce, other
    return None


def _once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def _stays(total: ir.Value, found: Sequence[ir.Node]) -> bool:
    """Return whether nothing else takes a norm's sum than such norms, as their residual."""
    users = (user for user, _ in total.uses())
    return not total.is_graph_output() and all(
        user in found and (parts := _summed(user)) is not None and parts[1] is total for user in users
    )
