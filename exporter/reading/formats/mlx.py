"""MLX's quantized linears, as mlx-lm's convert writes them (``quantization`` in config.json, without a quant_method).

A linear has N outputs and K inputs, groups of g along K, and b bits. Its weight is U32 [N, ceil(K b / 32)], a dense bit
stream along K. ``mode`` says what else there is.

- affine: scales and biases [N, K/g]. A weight is code * scale + bias. b is 2 to 6 or 8.
- mxfp4, mxfp8, nvfp4: scales U8 [N, K/g], e8m0 or e4m3. Codes are e2m1 or e4m3. Groups have 32 weights, nvfp4's 16.

Experts are stacked: ``switch_mlp.gate_proj`` has tensors [E, N, ..]. Checkpoint calls them ``experts.0.gate_proj`` etc.
A module of its own bits has an entry in ``quantization`` under its path, as routers do.

mlx-lm changes other tensors of some families: Qwen3-Next's norms have 1 added, LFM2's convolutions are transposed. Only
families are read whose tensors it leaves as they are.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import STACKED, Checkpoint, CheckpointError
from quantmoe.exporter.reading.weights.affine import affine, carried_affine, carried_group, carrier
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, Reads, Tensor, group_size_of
from quantmoe.exporter.reading.weights.bits import unpack_words

#: families of which mlx-lm changes nothing beside stacking experts
FAMILIES = ("glm4_moe", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe")
#: mode -> op.def's format
MODES = {"affine": "", "mxfp4": "mxfp4", "mxfp8": "fp8_e4m3", "nvfp4": "nvfp4"}
#: bits of affine codes
BITS = (2, 3, 4, 5, 6, 8)


class MLX(Format):
    name = "MLX"
    reads = (
        Reads("affine, 2 to 6 and 8 bits, of six families", ("mlx-int*",), exported="wider: as HQQ", cuda="no"),
        Reads("mxfp4, mxfp8, nvfp4, of six families", ("mlx-mx*", "mlx-nvfp4")),
    )
    marks = ("scales",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        family = ckpt.text_config.get("model_type")
        if family not in FAMILIES:
            raise CheckpointError(
                f"{ckpt.folder / 'config.json'}: MLX weights of {family!r}: mlx-lm changes tensors of some families; "
                f"supported: {', '.join(FAMILIES)}; for others, export the checkpoint that mlx-lm converted"
            )

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return "quant_method" not in quantization and {"bits", "group_size"} <= quantization.keys()

    def _settings(self, module: str) -> tuple[str, int, int]:
        """Return a module's mode, bits and group size.

        Raises:
            CheckpointError: they are none of MLX's.
        """
        whole = self.ckpt.quantization
        path = re.sub(r"\.experts\.\d+\.(?=\w+$)", f".{STACKED}.", module)
        own = whole.get(path)
        found = own if isinstance(own, dict) else whole
        mode, bits = found.get("mode", "affine"), found["bits"]
        if mode not in MODES or (mode == "affine" and bits not in BITS):
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: MLX mode {mode!r} of {bits!r} bits; supported: affine of "
                f"{', '.join(map(str, BITS))} bits, mxfp4, mxfp8, nvfp4"
            )
        return mode, bits, group_size_of(found["group_size"])

    def scheme(self, module: str) -> ModuleScheme:
        mode, bits, group = self._settings(module)
        if mode != "affine":
            return ModuleScheme(MODES[mode], group, "none", f"MLX {mode}")
        width = carried_group(group, group, f"{self.ckpt.folder}: {module}: MLX")
        stored = 16 * SCALE_DTYPES[self.ckpt.dtype(f"{module}.scales").lower()].itemsize
        text = f"MLX int{bits} group {group}{carried_affine(bits, width, group, stored)}"
        return ModuleScheme(carrier(bits), width, "none", text)

    def matrix(self, module: str) -> QuantizedMatrix:
        mode, bits, group = self._settings(module)
        scheme, (n, words) = self.scheme(module), self.shape2d(f"{module}.weight")
        if mode != "affine":
            bits = SCHEMES[scheme.format].bits
        k = words * 32 // bits
        groups = (n, k // group)
        declared = [Tensor("weight", ("U32",), (n, -(-k * bits // 32)))]
        if mode != "affine":
            tensors = self.take(module, [*declared, Tensor("scales", ("U8",), groups)])
            scales = tensors["scales"].view(SCALE_DTYPES["e4m3" if mode == "nvfp4" else "e8m0"])
            return QuantizedMatrix(
                kind=scheme.format, codes=unpack_words(tensors["weight"], bits, k), scales=scales, group_size=group,
                global_scale=1.0 if mode == "nvfp4" else None, bias=self.bias(module, n),
            )  # fmt: skip
        tensors = self.take(module, [*declared, Tensor("scales", FLOATS, groups), Tensor("biases", FLOATS, groups)])
        codes = unpack_words(tensors["weight"], bits, k)
        scales, minima = tensors["scales"].astype(np.float64), -tensors["biases"].astype(np.float64)
        return affine(scheme.format, codes, scales, minima=minima, width=scheme.group_size, bias=self.bias(module, n))
