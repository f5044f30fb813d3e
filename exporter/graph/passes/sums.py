"""Sums over the ranks of a sliced model: an AllReduce after each layer's experts and each linear of divided columns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch

from quantmoe.custom_ops.op import ReduceSpec


def add_sums(model: torch.nn.Module, modules: Iterable[str], spec: ReduceSpec) -> None:
    """Makes the outputs of modules, by name, those of all ranks."""
    attributes = json.dumps(spec.attributes())

    def add(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantmoe.all_reduce(output, attributes)

    for name in modules:
        model.get_submodule(name).register_forward_hook(add)
