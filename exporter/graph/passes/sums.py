"""What ranks of a sliced model give each other: an AllReduce after each layer's experts and each linear of divided
columns, an AllGather after a head of divided rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from quantmoe.custom_ops.op import GatherSpec, ReduceSpec


def meet(model: torch.nn.Module, modules: Iterable[str], spec: ReduceSpec | GatherSpec) -> None:
    """Makes the outputs of modules, by name, those of all ranks."""
    attributes = json.dumps(spec.attributes())
    operator = torch.ops.quantmoe.all_reduce if isinstance(spec, ReduceSpec) else torch.ops.quantmoe.all_gather

    def call(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return operator(output, attributes)

    for name in modules:
        model.get_submodule(name).register_forward_hook(call)
