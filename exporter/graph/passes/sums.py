"""What ranks of a sliced model give each other: an AllReduce after each layer's experts and each linear of divided
columns, an AllGather after a linear of divided rows, and before it where ranks have parts of its input; of ranks with
tokens of their own an AllGather of the tokens before each layer's experts and their router, and a ReduceScatter after
the experts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import onnx_ir as ir
import torch

from quantmoe.custom_ops.op import DOMAIN, GatherSpec, ReduceSpec, ScatterSpec
from quantmoe.exporter.reading.slices import Slice


def meet(model: torch.nn.Module, modules: Iterable[str], spec: ReduceSpec | GatherSpec) -> None:
    """Makes the outputs of modules, by name, those of all ranks."""
    attributes = json.dumps(spec.attributes())
    operator = torch.ops.quantmoe.all_reduce if isinstance(spec, ReduceSpec) else torch.ops.quantmoe.all_gather

    def call(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return operator(output, attributes)

    for name in modules:
        model.get_submodule(name).register_forward_hook(call)


def meet_before(model: torch.nn.Module, modules: Iterable[str], spec: GatherSpec) -> None:
    """Gives modules, by name, the inputs of all ranks, one after the other."""
    attributes = json.dumps(spec.attributes())

    def call(_: torch.nn.Module, given: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.ops.quantmoe.all_gather(*given, attributes)

    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(call)


def meet_around_experts(model: ir.Model, part: Slice) -> None:
    """Gives each QuantMoE the tokens of all ranks, and each rank the experts' sums of its own.

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
    """The nodes that make ids and weights of experts of x."""
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
