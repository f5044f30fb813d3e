"""NVIDIA ModelOpt (``hf_quant_config.json`` or ``quant_method: modelopt``).

Tensors of a linear with N outputs and K inputs by quant_algo:

- NVFP4: weight U8 [N, K/2] e2m1 low nibble first, weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32 [] (multiplies),
  input_scale F32 [] (activations are NVFP4 too).
- FP8: weight F8_E4M3 [N, K], weight_scale F32 [], input_scale F32 []. FP8_PER_CHANNEL_PER_TOKEN: weight_scale [N].
  FP8_PB_WO: weight_scale [N/128, 1, K/128, 1] or [N/128, K/128], weights only.
- W4A16_AWQ: weight U8 [N/2, K], a byte holding two's-complement nibbles of rows 2 i (low) and 2 i + 1; weight_scale F32
  [N, K/g]; pre_quant_scale [K] multiplies the activations.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.formats.base import FLOATS, Format, Scheme, Tensor, group_size_of
from quantmoe.exporter.formats.bits import unpack_nibbles
from quantmoe.exporter.formats.fp8 import row_scales

#: quant_algo -> (format, group size, activation_format); None: from the configuration
ALGORITHMS: dict[str, tuple[str, int | None, str]] = {
    "NVFP4": ("nvfp4", 16, "nvfp4"),
    "FP8": ("fp8_e4m3", -1, "fp8_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", -1, "fp8_token"),
    "FP8_PB_WO": ("fp8_e4m3", 128, "none"),
    "W4A16_AWQ": ("int4", None, "none"),
}


class ModelOpt(Format):
    name = "ModelOpt"
    marks = ("weight_scale",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        self.config: dict[str, Any] = raw.get("quantization") or raw
        #: MIXED_PRECISION: module pattern -> configuration
        self.layers = {k: self.config | v for k, v in (self.config.get("quantized_layers") or {}).items()}
        for config in (self.config, *self.layers.values()):
            group_size_of(config.get("group_size") or 128)

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return str(quantization.get("quant_method", "")).startswith("modelopt")

    def module_config(self, module: str) -> dict[str, Any]:
        """The entry of quantized_layers for a module, or the whole configuration."""
        return next((config for pattern, config in self.layers.items() if fnmatch(module, pattern)), self.config)

    def scheme(self, module: str) -> Scheme:
        config = self.module_config(module)
        algorithm = str(config.get("quant_algo"))
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: ModelOpt quant_algo {algorithm}; supported: {', '.join(ALGORITHMS)}"
            )
        format, group_size, activations = ALGORITHMS[algorithm]
        if group_size is None:
            group_size = config.get("group_size") or 128
        return Scheme(format, group_size, activations, f"ModelOpt {algorithm} group {group_size}")

    def matrix(self, module: str) -> QuantizedMatrix:
        scheme = self.scheme(module)
        rows, columns = self.shape2d(f"{module}.weight")
        scalars = [
            Tensor("input_scale", FLOATS, (), required=scheme.activation_format in ("nvfp4", "fp8_tensor")),
            Tensor("weight_scale_2", FLOATS, (), required=scheme.format == "nvfp4"),
        ]
        if scheme.format == "nvfp4":
            return self._nvfp4(module, rows, columns * 2, scalars)
        if scheme.format == "fp8_e4m3":
            return self._fp8(module, scheme, rows, columns, scalars)
        return self._int4(module, scheme.group_size, rows * 2, columns)

    def _nvfp4(self, module: str, n: int, k: int, scalars: list[Tensor]) -> QuantizedMatrix:
        tensors = self.take(
            module,
            [
                Tensor("weight", ("U8",), (n, k // 2)),
                Tensor("weight_scale", ("F8_E4M3",), (n, -(-k // 16))),
                *scalars,
            ],
        )
        return QuantizedMatrix(
            kind="nvfp4",
            codes=unpack_nibbles(tensors["weight"]),
            scales=tensors["weight_scale"],
            group_size=16,
            global_scale=tensors["weight_scale_2"].item(),
            input_scale=tensors["input_scale"].item(),
            bias=self.bias(module, n),
        )

    def _fp8(self, module: str, scheme: Scheme, n: int, k: int, scalars: list[Tensor]) -> QuantizedMatrix:
        tensors = self.take(module, [Tensor("weight", ("F8_E4M3",), (n, k)), *scalars])
        name = f"{module}.weight_scale"
        if scheme.group_size == 128:
            bn, bk = -(-n // 128), -(-k // 128)
            shape = self.ckpt.shape(name)
            if shape not in ((bn, bk), (bn, 1, bk, 1)):
                raise CheckpointError(
                    f"{self.ckpt.where(name)} has shape {list(shape)}, expected {[bn, bk]} or {[bn, 1, bk, 1]}"
                )
            scales = self.ckpt.tensor(name).reshape(bn, bk)
        else:
            scales = row_scales(self, name, n)
        return QuantizedMatrix(
            kind="fp8_e4m3",
            codes=tensors["weight"].view(np.uint8),
            scales=scales,
            group_size=scheme.group_size,
            block_n=128 if scheme.group_size == 128 else 1,
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            bias=self.bias(module, n),
        )

    def _int4(self, module: str, g: int, n: int, k: int) -> QuantizedMatrix:
        tensors = self.take(
            module,
            [
                Tensor("weight", ("U8",), (n // 2, k)),
                Tensor("weight_scale", FLOATS, (n, -(-k // g))),
                Tensor("pre_quant_scale", FLOATS, (k,), required=False),
            ],
        )
        packed = tensors["weight"] ^ np.uint8(0x88)  # two's complement -> offset 8
        codes = np.empty((n, k), np.uint8)
        codes[0::2], codes[1::2] = packed & 15, packed >> 4
        pre = tensors.get("pre_quant_scale")
        return QuantizedMatrix(
            kind="int4",
            codes=codes,
            scales=tensors["weight_scale"],
            group_size=g,
            pre_scale=None if pre is None else pre.astype(np.float32),
            bias=self.bias(module, n),
        )
