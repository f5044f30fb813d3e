"""Rotations of inputs in the graph: Hadamard, or products with its matrix where the target has no library."""

from __future__ import annotations

import json

import torch

from quantmoe.custom_ops import torch_op  # noqa: F401
from quantmoe.custom_ops.hadamard_matrix import matrix
from quantmoe.custom_ops.op_def.nodes import Hadamard
from quantmoe.exporter.reading.weights.rotations import Rotation

#: rows of the largest matrix of a product; Hadamard's of more rows is a product of several
_MOST = 64


def _factors(size: int) -> list[int]:
    return [size] if size <= _MOST else [_MOST, *_factors(size // _MOST)]


class Rotate(torch.nn.Module):
    """A product with the input [.., features] of a node. Its tensors are constants of the graph.

    Args:
        rotation: None: nothing does.
        dtype: of the graph.
        library: whether the graph may have Hadamard nodes.
    """

    def __init__(self, rotation: Rotation | None, dtype: torch.dtype, library: bool):
        super().__init__()
        self.size = rotation.size if rotation else 0
        self.library = library
        signs = torch.tensor(rotation.signs, dtype=dtype) if rotation and rotation.signs else None
        self.register_buffer("signs", signs, persistent=False)
        if self.size and not library:
            for size in _factors(self.size):
                own = torch.from_numpy(matrix(size) / size**0.5).to(dtype)
                self.register_buffer(f"matrix_{size}", own, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.size:
            return x
        if self.signs is not None:
            x = (x.unflatten(-1, (-1, self.size)) * self.signs).flatten(-2)
        if not self.library:
            return self._products(x, self.size)
        spec = Hadamard(features=x.shape[-1], size=self.size)
        return torch.ops.quantmoe.hadamard(x, json.dumps(spec.attributes()))

    def _products(self, x: torch.Tensor, size: int) -> torch.Tensor:
        """Multiply blocks [a, b] by the matrix of b, and from the other side by the matrix of a: size is a times b."""
        if size <= _MOST:
            return (x.unflatten(-1, (-1, size)) @ self.get_buffer(f"matrix_{size}")).flatten(-2)
        rest = size // _MOST
        turned = self._products(x, _MOST).unflatten(-1, (-1, rest, _MOST)).transpose(-1, -2)
        return self._products(turned.flatten(-3), rest).unflatten(-1, (-1, _MOST, rest)).transpose(-1, -2).flatten(-3)
