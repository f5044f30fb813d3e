"""A module without its weights, and where in the checkpoint each of them is.

Parameters are placeholders: one element, expanded to the shape. No large weight is ever in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.parallel_calls import BLOCK
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.safetensors_file import DTYPES as STORED

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Stored:
    """A module whose parameters are placeholders, and where in the checkpoint each of them is.

    Attributes:
        format: the opened checkpoint, or :meth:`Format.beside` of a part of it.
        model: the module. dtype: of the graph.
        sources: parameter name -> its name in the checkpoint, for ``format.parameter``.
        tensors: parameter name -> its placeholder, of those that have a source.
        derived: parameter name -> what the graph has instead of its tensor, a function of that.
        joined: parameter name -> the checkpoint's tensors whose rows it has.
        tied: parameter name -> the first of the names of the same parameter.
    """

    model: Any

    def __init__(self, format: Format, dtype: torch.dtype):
        self.format, self.dtype = format, dtype
        self.sources: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.derived: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
        self.joined: dict[str, list[str]] = {}
        self.tied: dict[str, str] = {}

    def fill(self, name: str, values: np.ndarray, beside: str) -> None:
        """Add a parameter, f32, for which the checkpoint has no tensor.

        Args:
            beside: another parameter, whose tensor stands for its own.
        """
        path, _, leaf = name.rpartition(".")
        made = torch.nn.Parameter(placeholder(values.shape, torch.float32), requires_grad=False)
        self.model.get_submodule(path)._parameters[leaf] = made
        self.sources[name] = self.sources[beside]
        self.tensors[name], self.derived[name] = made, lambda _: values

    def derive(self, names: Iterable[str], function: Callable[[np.ndarray], np.ndarray]) -> None:
        """Note parameters that were changed to be functions of their tensors."""
        for name in names:
            self.tensors[name], self.derived[name] = self.model.get_parameter(name), function

    def stored_type(self, name: str) -> ir.DataType | None:
        """Return the type of a parameter's tensor in the checkpoint; None when it is packed or quantized there."""
        source = self.sources.get(name)  # packed weights have none
        if source is None or self.format.is_quantized(source.rpartition(".")[0]):
            return None
        return ir.DataType.from_numpy(STORED[self.format.ckpt.dtype(source)])

    def lookups(self) -> list[str]:
        """Return the parameters whose rows are only looked up: the weights of embeddings."""
        modules = ((name, self.model.get_submodule(name.rpartition(".")[0])) for name in self.tensors)
        return [name for name, module in modules if isinstance(module, torch.nn.Embedding)]

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element of a parameter that is not packed.

        They are the graph's. A table that is only looked up has the checkpoint's, if fewer (lowering/embeddings.py).
        """
        own, stored = self.tensors[name].element_size(), self.stored_type(name)
        return min(own, int(stored.itemsize)) if stored is not None and name in self.lookups() else own

    def blocks(self, name: str, transposed: bool, dtype: np.dtype) -> Iterator[Callable[[], np.ndarray]]:
        """Return a parameter or stored buffer of the model, or its transpose, as calls that make the next rows each.

        Raises:
            CheckpointError: another shape than the model's, here or from a function: values that float16 cannot hold.
        """
        source = self.sources[name]
        parts = [self.format.stored(part) for part in self.joined.get(name, [source])]
        found = np.concatenate(parts) if len(parts) > 1 else parts[0]
        if name in self.derived:
            found = self.derived[name](found)
        self._check_shape(name, found.shape)
        rows = np.atleast_1d(found.T if transposed else found)
        step = max(1, BLOCK // max(1, 4 * math.prod(rows.shape[1:])))
        return (partial(self._converted, source, dtype, rows[at : at + step]) for at in range(0, len(rows), step))

    def _converted(self, source: str, dtype: np.dtype, rows: np.ndarray) -> np.ndarray:
        out = np.empty(rows.shape, dtype)
        # by pieces of columns, so that the rows of a transpose stay in the cache
        for at in range(0, rows.shape[-1], 2048):
            piece = np.ascontiguousarray(rows[..., at : at + 2048])
            made = out[..., at : at + 2048]
            with np.errstate(over="ignore"):
                made[...] = piece
            if not np.isfinite(made).all():
                reason = "float16 cannot hold; use --dtype f32 or bf16"
                if not np.isfinite(piece).all():
                    reason = "are not finite numbers"
                raise CheckpointError(f"{self.format.ckpt.where(source)} has values that {reason}")
        return out

    def _check_shape(self, name: str, found: tuple[int, ...], want: tuple[int, ...] | None = None) -> None:
        """want: None: the placeholder's."""
        want = tuple(self.tensors[name].shape) if want is None else want
        if found != want:
            where = self.format.ckpt.where(self.sources[name])
            raise CheckpointError(f"{where} has shape {list(found)}, expected {list(want)}")

    def _hollow(self, name: str) -> None:
        module_name, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        old = module._parameters.get(leaf)
        if old is not None:
            module._parameters[leaf] = torch.nn.Parameter(placeholder(old.shape, old.dtype), requires_grad=False)
        else:  # float32 whatever the graph is: a rounded correction bias selects other experts
            buffer: Any = module._buffers[leaf]
            kind = torch.float32 if buffer.is_floating_point() else torch.int32
            module._buffers[leaf] = placeholder(buffer.shape, kind)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, _count: Iterator[int] = itertools.count(1)) -> torch.Tensor:  # noqa: B008
    """Return a tensor of any size in one element's memory, unlike every other: the exporter merges equal small
    tensors."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return torch.tensor(next(_count) % 30000, dtype=bits).view(dtype).expand(shape)
