"""``--calibrate``: second moments of the inputs of every linear and expert, on a text that transformers' model reads.

They weigh the squared errors of the weights that the inputs are multiplied with: llama.cpp's importance matrix.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.graph.model import Skeleton, decoder_of, quiet
from quantmoe.exporter.graph.streamed_model import Streamed
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.reading.weights.rounding import weighed

#: products of an input and a weight that modules call
_PRODUCTS = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
#: windows that read a layer together
TOGETHER = 32


@dataclass
class _Moments:
    """Sum of the squares of inputs, float64 [K], and how many inputs there were."""

    squares: Any = 0.0
    count: int = 0


@dataclass(frozen=True)
class Kept:
    """A file of moments, from which an interrupted calibration goes on.

    Attributes:
        path: the file, which need not exist. of: the checkpoint and the text of its moments. Moments of others are
            written over.
    """

    path: Path
    of: str

    def load(self) -> tuple[int, dict[tuple[str, int], _Moments]]:
        """Return how many windows were read, and their moments.

        Raises:
            CheckpointError: no export wrote the file.
        """
        if not self.path.exists():
            return 0, {}
        try:
            with np.load(self.path) as arrays:
                of, windows = str(arrays["of"]), int(arrays["windows"])
                if of != self.of:
                    return 0, {}
                names = (key.partition(" ") for key in arrays if " " in key)
                found = {(name, int(part)): arrays[f"{part} {name}"] for part, _, name in names}
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile):
            raise CheckpointError(f"{self.path}: expected the calibration of an export; remove the file") from None
        return windows, {key: _Moments(array[:-1], int(array[-1])) for key, array in found.items()}

    def save(self, windows: int, found: Mapping[tuple[str, int], _Moments]) -> None:
        """Replace the file."""
        arrays: dict[str, Any] = {"of": np.array(self.of), "windows": np.array(windows)}
        arrays |= {f"{part} {name}": np.append(m.squares, m.count) for (name, part), m in found.items()}
        written = self.path.with_name(f"{self.path.name}.new")
        with written.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(written, self.path)


@dataclass
class _Inputs(TorchFunctionMode):
    """Watches products with parameters. An expert's weight is a part of one of three dimensions.

    Attributes:
        parameters: address of its memory -> name and parameter. found: name and number of the part -> moments.
    """

    parameters: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    found: dict[tuple[str, int], _Moments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and len(args) > 1:
            self._see(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _see(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        name, parameter = self.parameters.get(weight.untyped_storage().data_ptr(), ("", None))
        if parameter is None or x.shape[-1] not in weight.shape:
            return
        part = weight.storage_offset() // parameter.stride(0) if parameter.ndim == 3 else 0
        rows = x.detach().reshape(-1, x.shape[-1])
        moments = self.found.setdefault((name, part), _Moments())
        moments.squares = moments.squares + (rows * rows).sum(0, dtype=torch.float64).numpy()
        moments.count += len(rows)


@dataclass(frozen=True)
class Calibration:
    """Importance of inputs, from a text.

    Attributes:
        importance: checkpoint module, or expert and tensor of fused ones -> f32 [K], 1 in the mean.
        experts: how many there are. unreached: how many of them no token reached, which have no importance.
    """

    importance: dict[str, np.ndarray]
    experts: int
    unreached: int


def calibrate(
    format: Format,
    windows: Sequence[Sequence[int]],
    layers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kept: Kept | None = None,
) -> Calibration:
    """Read windows of a text, all of one length.

    Args:
        format: the checkpoint in floats. layers: only the first so many decoder layers.
        progress: called with decoder layers done, and of how many.
        kept: gets the moments after each ``TOGETHER`` windows; what it has already is not read again.

    Raises:
        CheckpointError: the file of ``kept`` is another one.
    """
    before, moments = kept.load() if kept else (0, {})
    rounds, done = -(-len(windows) // TOGETHER), 0

    def tell(at: int, total: int) -> None:
        nonlocal done
        done += 1
        progress(total * (before // TOGETHER) + done, total * rounds)

    streamed, inputs = Streamed(format, layers, tell), _Inputs(found=moments)
    names = {id(module): name for name, module in streamed.model.named_modules()}
    for layer in streamed.layers:

        def watch(module: torch.nn.Module, *_: object, prefix: str = names[id(layer)]) -> None:
            inputs.parameters = {
                parameter.untyped_storage().data_ptr(): (f"{prefix}.{name}", parameter)
                for name, parameter in module.named_parameters()
            }

        layer.register_forward_pre_hook(watch)
    decoder = decoder_of(streamed.model)
    with torch.no_grad(), quiet(), inputs:
        for at in range(before, len(windows), TOGETHER):
            decoder(torch.tensor(windows[at : at + TOGETHER]), use_cache=False)
            if kept:
                kept.save(at + TOGETHER, inputs.found)
    layers_of = streamed.skeleton.experts.items()
    experts = [(f"{name}.down_proj", e) for name, layer in layers_of for e in range(layer.num_experts)]
    unreached = sum(expert not in inputs.found for expert in experts)
    return Calibration(dict(_importance(streamed.skeleton, inputs.found)), len(experts), unreached)


def _importance(skeleton: Skeleton, found: Mapping[tuple[str, int], _Moments]) -> Iterator[tuple[str, np.ndarray]]:
    """By the checkpoint's names."""
    for (name, part), moments in found.items():
        importance = weighed(moments.squares / moments.count)
        if name in skeleton.sources:
            for source in skeleton.joined.get(name, [skeleton.sources[name]]):
                yield source.removesuffix(".weight"), importance
            continue
        module, _, leaf = name.rpartition(".")
        if (layer := skeleton.experts.get(module)) is None:
            continue
        ends = {leaf}
        if layer.projections:
            *halves, down = layer.projections
            ends = {down} if leaf == "down_proj" else {*halves}
        elif leaf == "up_proj":  # ungated
            ends = {"gate_up_proj", "up_proj"}
        for end in ends:
            yield f"{layer.name}.{part}.{end}", importance
