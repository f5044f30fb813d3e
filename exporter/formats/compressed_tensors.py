"""compressed-tensors, as llm-compressor writes it.

Tensors of a linear with N outputs and K inputs, groups of g, b bits (read from the library's compressors 0.13 to 0.20):

- ``pack-quantized``: weight_packed I32 [N, ceil(K b / 32)], a dense bit stream along K of q + 2^(b-1); weight_scale
  [N, K/g]; weight_shape I64 [2]; weight_zero_point I32 [ceil(N b / 32), K/g], the same packing along N;
  weight_g_idx I32 [K] (actorder "group", older releases).
- ``int-quantized``: weight I8 [N, K], one code a byte whatever b is; weight_scale [N, K/g]; weight_zero_point I8.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.formats.base import FLOATS, Format, Scheme, Tensor, group_order
from quantmoe.exporter.formats.bits import unpack_words

SUPPORTED = "pack-quantized with 4 or 8 bits, int-quantized with 4 or 8 bits"


@dataclass(frozen=True)
class Args:
    """The fields of the library's QuantizationArgs that decide numerics."""

    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int
    dynamic: bool | str
    actorder: str | None

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Args:
        group_size = raw.get("group_size")
        strategy = raw.get("strategy")
        if strategy is None:  # the library's own inference
            strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        return cls(
            num_bits=int(raw.get("num_bits", 8)),
            type=str(raw.get("type", "int")).lower(),
            symmetric=bool(raw.get("symmetric", True)),
            strategy=str(strategy).lower(),
            group_size=-1 if group_size is None else int(group_size),
            dynamic=raw.get("dynamic", False),
            actorder=raw.get("actorder"),
        )


@dataclass(frozen=True)
class Group:
    """One entry of config_groups."""

    name: str
    format: str
    targets: tuple[str, ...]
    weights: Args
    inputs: Args | None

    @property
    def text(self) -> str:
        w, a = self.weights, self.inputs
        size = w.group_size if w.strategy == "group" else w.strategy
        activations = "16" if a is None else f"{a.num_bits} ({a.type}, {a.strategy})"
        order = f", actorder {w.actorder}" if w.actorder else ""
        return f"compressed-tensors {self.format} {w.type}{w.num_bits} A{activations} group {size}{order}"


class CompressedTensors(Format):
    name = "compressed-tensors"
    marks = ("weight_packed", "weight_scale")

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        self.ignore = tuple(raw.get("ignore") or ())
        self.groups = [self._group(name, g) for name, g in (raw.get("config_groups") or {}).items()]

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") in ("compressed-tensors", "compressed_tensors")

    def _group(self, name: str, raw: Any) -> Group:
        if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
            raise CheckpointError(f"{self.ckpt.folder / 'config.json'}: config group {name} describes no weights")
        inputs = raw.get("input_activations")
        return Group(
            name,
            raw.get("format") or self.ckpt.quantization.get("format", ""),
            tuple(raw.get("targets") or ()),
            Args.parse(raw["weights"]),
            Args.parse(inputs) if inputs else None,
        )

    def group(self, module: str) -> Group:
        """The config group that targets a module: exact names first, then patterns, then classes, as the library does."""
        ranked = [
            (rank, group)
            for group in self.groups
            for target in group.targets
            if (rank := _match(module, target)) is not None
        ]
        if not ranked:
            raise CheckpointError(f"{self.ckpt.folder}: {module} has quantized tensors but no config group targets it")
        return min(ranked, key=lambda pair: pair[0])[1]

    def scheme(self, module: str) -> Scheme:
        group = self.group(module)
        w = group.weights
        if group.format in ("pack-quantized", "int-quantized") and w.type == "int" and w.num_bits in (4, 8):
            return Scheme(f"int{w.num_bits}", self._group_size(w), self._activations(module, group), group.text)
        raise CheckpointError(f"{self.ckpt.folder}: {module} is {group.text}; supported: {SUPPORTED}")

    def _activations(self, module: str, group: Group) -> str:
        a = group.inputs
        if a is None:
            return "none"
        if (a.type, a.num_bits, a.strategy, a.dynamic) == ("int", 8, "token", True):
            return "int8_token" if a.symmetric else "int8_token_asym"
        raise CheckpointError(
            f"{self.ckpt.folder}: {module} wants activations {a}; supported: none, dynamic int8 per token"
        )

    @staticmethod
    def _group_size(w: Args) -> int:
        return w.group_size if w.strategy == "group" else -1

    def matrix(self, module: str) -> QuantizedMatrix:
        scheme, group = self.scheme(module), self.group(module)
        w, bits, g = group.weights, group.weights.num_bits, scheme.group_size
        packed = group.format == "pack-quantized"
        n, k = self._shape(module, packed)
        groups = 1 if g == -1 else -(-k // g)
        scales = (1,) if w.strategy == "tensor" else (n, groups)
        tensors = self.take(
            module,
            [
                Tensor("weight_packed", ("I32",), (n, -(-k * bits // 32)))
                if packed
                else Tensor("weight", ("I8",), (n, k)),
                Tensor("weight_scale", FLOATS, scales),
                Tensor("weight_zero_point", ("I32",), (-(-n * bits // 32), groups), required=not w.symmetric)
                if packed
                else Tensor("weight_zero_point", ("I8",), scales, required=not w.symmetric),
                Tensor("weight_g_idx", ("I32",), (k,), required=False),
            ],
        )
        middle = 1 << (bits - 1)
        if packed:
            codes = unpack_words(tensors["weight_packed"], bits, k)
        else:
            codes = tensors["weight"].view(np.uint8) + np.uint8(middle)
            if bits < 8 and codes.max(initial=0) >= 2 * middle:
                raise CheckpointError(f"{self.ckpt.where(module + '.weight')} has codes outside int{bits}")
        zero_points = None
        if not w.symmetric:
            stored = tensors["weight_zero_point"]
            if packed:
                zero_points = np.ascontiguousarray(unpack_words(stored.T, bits, n).T)
            else:
                zero_points = np.broadcast_to(stored.view(np.uint8) + np.uint8(middle), (n, groups))
        perm = None
        if "weight_g_idx" in tensors and g != -1:
            perm = group_order(tensors["weight_g_idx"], g, self.ckpt.where(f"{module}.weight_g_idx"))
        return QuantizedMatrix(
            kind=scheme.format,
            codes=codes if perm is None else np.take(codes, perm, axis=1),
            scales=np.broadcast_to(tensors["weight_scale"], (n, groups)),
            group_size=g,
            zero_points=zero_points,
            bias=self.bias(module, n),
            perm=perm,
        )

    def _shape(self, module: str, packed: bool) -> tuple[int, int]:
        if not packed:
            return self.shape2d(f"{module}.weight")
        n, k = self.take(module, [Tensor("weight_shape", ("I64", "I32"), (2,))])["weight_shape"].tolist()
        if n <= 0 or k <= 0:
            raise CheckpointError(f"{self.ckpt.where(module + '.weight_shape')} is {[n, k]}, expected positive sizes")
        return n, k


def _match(module: str, target: str) -> int | None:
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    # "Linear" or another class name: classes are not in the checkpoint, but only linears have quantized tensors
    return 2 if "." not in target else None
