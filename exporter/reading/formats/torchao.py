"""torchao's tensors (``quant_method: torchao``), as its flatten_tensor_state_dict puts them into safetensors.

A weight ``m.weight`` is tensors ``m._weight_qdata``, ``m._weight_scale`` and so on. The file's metadata has a JSON text
under ``m.weight``: ``_type``, the class of the weight, and ``_data``, its attributes. N outputs, K inputs, groups of g:

- Int4Tensor: qdata I8 [N, K/2], of two codes the low half first, two's complement. scale and zero_point [K/g, N] are
  floats. A weight is code * scale + zero_point (FBGEMM's int4_row_quantize_zp).
- Int8Tensor: qdata I8 [N, K]; scale and perhaps zero_point I8 [N, K/g].
- IntxUnpackedToInt8Tensor: as Int8Tensor, codes of ``target_dtype``.
- Float8Tensor: qdata F8_E4M3 [N, K]; scale [N, 1], [1, 1] or of blocks.

Others are refused by name, and pickled files (pytorch_model.bin) are not read. Int4TilePackedTo4dTensor has one shape
and two orders of codes. PyTorch's int4mm.cu orders them for NVIDIA's or for AMD's instructions.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.checkpoint import Checkpoint, is_outline, outline
from quantmoe.exporter.reading.weights.affine import affine, carried_affine, carried_group, carrier
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, Reads, Tensor, integer_kind
from quantmoe.exporter.reading.weights.bits import unpack_nibbles
from quantmoe.exporter.safetensors_file import read_metadata

#: class of a weight that is not read -> why
REFUSED = {
    "Int4TilePackedTo4dTensor": "its codes have the order of the GPU that wrote them, NVIDIA's or AMD's, and the file "
    "does not say which"
}
TYPES = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
#: (class of a weight, granularity of its activations) -> op.def's activation_format
ACTIVATIONS = {
    ("Float8Tensor", "PerRow"): "fp8_token",
    ("Float8Tensor", "PerTensor"): "fp8_tensor",
    ("Int8Tensor", "PerRow"): "int8_token",
}


class TorchAO(Format):
    name = "torchao"
    reads = (
        Reads("Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor", ("torchao-int8*", "torchao-fp8*", "torchao-intx4")),
        Reads("Int4Tensor", ("torchao-int4",), exported="wider: f32 scales and minima", cuda="no"),
        *(Reads(kind, ("test_refusals_of_torchao",), exported=f"refused: {why}") for kind, why in REFUSED.items()),
        Reads(
            "experts of a layer in one tensor",
            ("test_refusals_of_torchao",),
            exported="refused: only their linears are read",
        ),
    )
    marks = ("_weight_qdata",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        if fused := next((name for name in ckpt.names() if re.search(r"\.experts\._\w+_qdata$", name)), ""):
            raise CheckpointError(
                f"{ckpt.where(fused)} has all experts of a layer; expected a torchao weight for each expert's linears"
            )

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "torchao"

    @cached_property
    def _metadata(self) -> dict[Path, dict[str, Any]]:
        return {}

    def _said(self, module: str) -> tuple[str, dict[str, Any]]:
        """Return the class and the attributes of a weight.

        Raises:
            CheckpointError: the file does not say, or names a class that is not read.
        """
        shard = self.ckpt.shard(f"{module}._weight_qdata")
        if shard not in self._metadata:
            self._metadata[shard] = read_metadata(shard)
        try:
            said = json.loads(self._metadata[shard].get(f"{module}.weight", ""))
            kind, fields = said["_type"], said["_data"]
        except (ValueError, TypeError, KeyError, RecursionError):
            kind, fields = None, None
        if not isinstance(kind, str) or not isinstance(fields, dict):
            raise CheckpointError(
                f"{shard}: the metadata of {module}.weight is no JSON text with _type and _data; expected torchao's"
            )
        if kind not in TYPES:
            why = f", which is not read: {REFUSED[kind]}" if kind in REFUSED else ""
            raise CheckpointError(f"{shard}: {module}.weight is a torchao {kind}{why}; supported: {', '.join(TYPES)}")
        if f"{module}._weight_act_pre_scale" in self.ckpt or f"{module}._weight_act_quant_scale" in self.ckpt:
            raise CheckpointError(
                f"{shard}: {module} has stored scales of activations; supported: torchao weights without them"
            )
        return kind, fields

    def _bits(self, module: str, fields: dict[str, Any]) -> int:
        """Return the bits of an IntxUnpackedToInt8Tensor's codes."""
        target = fields.get("target_dtype")
        found = re.fullmatch(r"int([1-8])", str(target.get("_data"))) if isinstance(target, dict) else None
        if found is None:
            raise CheckpointError(f"{self.ckpt.folder}: {module}: target_dtype {target!r}, expected int1 to int8")
        return int(found[1])

    def _groups(self, module: str) -> tuple[int, int, int, int]:
        """Return N, K, the rows and the columns that share a scale (K: all), of a matrix with a code an element."""
        (n, k), scale = self.shape2d(f"{module}._weight_qdata"), f"{module}._weight_scale"
        shape = (self.ckpt.shape(scale) if scale in self.ckpt else ()) or (1, 1)
        if len(shape) != 2 or not all(shape) or n % shape[0] or k % shape[1]:
            raise CheckpointError(
                f"{self.ckpt.where(scale)} has shape {list(shape)}, expected divisors of [{n}, {k}], the weight's"
            )
        return n, k, n // shape[0], k // shape[1]

    def _activations(self, module: str, kind: str, fields: dict[str, Any]) -> str:
        """Return how the class rounds activations.

        Raises:
            CheckpointError: in a way that no kernel knows.
        """
        said = fields.get("act_quant_kwargs") or fields.get("activation_quantization")
        if said is None:
            return "none"
        if isinstance(said, dict) and said.get("_data") == "INT8_ASYM_PER_TOKEN":
            return "int8_token_asym"
        own = said.get("_data") if isinstance(said, dict) else None
        granularity = own.get("granularity") if isinstance(own, dict) else None
        mapping = own.get("mapping_type") if isinstance(own, dict) else None
        known = isinstance(granularity, dict) and (kind, granularity.get("_type")) in ACTIVATIONS
        if not known or (isinstance(mapping, dict) and mapping.get("_data") != "SYMMETRIC"):
            ways = ", ".join(f"{way} of {owner}" for owner, way in ACTIVATIONS)
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: torchao {kind} with activations {said!r}; "
                f"supported: none, symmetric {ways}"
            )
        return ACTIVATIONS[kind, granularity["_type"]]  # type: ignore[index]

    def scheme(self, module: str) -> ModuleScheme:
        kind, fields = self._said(module)
        if kind == "Int4Tensor":
            group, width = self._int4(module, fields)[2:]
            stored = 16 * SCALE_DTYPES[self.ckpt.dtype(f"{module}._weight_scale").lower()].itemsize
            text = f"torchao Int4Tensor group {group}{carried_affine(4, width, group, stored)}"
            return ModuleScheme(carrier(4), width, "none", text)
        _, k, rows, columns = self._groups(module)
        group = -1 if columns == k else columns
        if kind == "Float8Tensor":
            format, more = "fp8_e4m3", f", blocks of {rows} rows" if group != -1 and rows > 1 else ""
        else:
            bits = 8 if kind == "Int8Tensor" else self._bits(module, fields)
            format, more = integer_kind(bits, group, self.own_widths), f" int{bits}"
        where = "a scale for each row" if group == -1 else f"group {group}"
        return ModuleScheme(format, group, self._activations(module, kind, fields), f"torchao {kind}{more} {where}")

    def matrix(self, module: str) -> QuantizedMatrix:
        kind, fields = self._said(module)
        if kind == "Int4Tensor":
            return self._int4_matrix(module, fields)
        n, k, rows, columns = self._groups(module)
        scheme, shape = self.scheme(module), (n // rows, k // columns)
        dtype = "F8_E4M3" if kind == "Float8Tensor" else "I8"
        declared = [
            Tensor("_weight_qdata", (dtype,), (n, k)),
            Tensor("_weight_scale", FLOATS, shape),
            Tensor("_weight_zero_point", ("I8", *FLOATS), shape, required=False, decides=True),
        ]
        tensors = self.take(module, declared)
        stored, scales = tensors["_weight_qdata"], tensors["_weight_scale"].reshape(shape)
        if scheme.group_size == -1:  # of a row, also where some or all share it
            scales, rows = np.repeat(scales, rows, axis=0), 1
        bias = self.bias(module, n)
        if kind == "Float8Tensor":
            return QuantizedMatrix(
                kind="fp8_e4m3",
                codes=stored.view(np.uint8),
                scales=np.ascontiguousarray(scales),
                group_size=scheme.group_size,
                block_n=rows,
                bias=bias,
            )
        if rows != 1:
            raise CheckpointError(
                f"{self.ckpt.where(f'{module}._weight_scale')} has shape {list(shape)}, expected a scale for each row"
            )
        middle = SCHEMES[scheme.format].zero
        zeros = None
        if "_weight_zero_point" in tensors and (tensors["_weight_zero_point"] != 0).any():
            wide = tensors["_weight_zero_point"].reshape(shape).astype(np.float64) + middle
            if (wide != np.round(wide)).any() or wide.min() < 0 or wide.max() > 2 * middle - 1:
                raise CheckpointError(
                    f"{self.ckpt.where(f'{module}._weight_zero_point')} is not of integers from {-middle} to "
                    f"{middle - 1}; expected them, as codes have"
                )
            zeros = np.repeat(wide.astype(np.uint8), n // len(wide), axis=0)
        codes = outline((n, k), np.uint8) if is_outline(stored) else stored.view(np.uint8) + np.uint8(middle)
        if not is_outline(codes) and codes.max() >> SCHEMES[scheme.format].bits:
            where = self.ckpt.where(f"{module}._weight_qdata")
            raise CheckpointError(f"{where} has codes beyond {scheme.format}'s, expected {scheme.text}")
        return QuantizedMatrix(
            kind=scheme.format,
            codes=codes,
            scales=np.ascontiguousarray(scales),
            group_size=scheme.group_size,
            zero_points=zeros,
            bias=bias,
        )

    def _int4(self, module: str, fields: dict[str, Any]) -> tuple[int, int, int, int]:
        """Return N, K, the weights of a group and the columns that are carried with one scale."""
        n, half = self.shape2d(f"{module}._weight_qdata")
        block = fields.get("block_size")
        group = block[-1] if isinstance(block, list) and block and type(block[-1]) is int else 0
        if group < 1 or 2 * half % group:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: block_size {block!r}, expected [1, a divisor of {2 * half}]"
            )
        return n, 2 * half, group, carried_group(2 * half, group, f"{self.ckpt.folder}: {module}: torchao")

    def _int4_matrix(self, module: str, fields: dict[str, Any]) -> QuantizedMatrix:
        n, k, group, width = self._int4(module, fields)
        groups = (k // group, n)
        declared = [
            Tensor("_weight_qdata", ("I8", "U8"), (n, k // 2)),
            Tensor("_weight_scale", FLOATS, groups),
            Tensor("_weight_zero_point", FLOATS, groups),
        ]
        tensors = self.take(module, declared)
        codes = unpack_nibbles(tensors["_weight_qdata"].view(np.uint8))
        if not is_outline(codes):
            codes = codes ^ np.uint8(8)
        scales = tensors["_weight_scale"].T.astype(np.float64)
        minima = 8 * scales - tensors["_weight_zero_point"].T.astype(np.float64)
        return affine(carrier(4), codes, scales, minima=minima, width=width, bias=self.bias(module, n))
