"""AMD Quark (``quant_method: quark``), weights packed in "reorder" order.

Tensors of a linear with N outputs and K inputs:

- fp4 (MXFP4): weight U8 [N, K/2] e2m1 low nibble first, weight_scale U8 [N, K/32] e8m0; input_scale as fp8's.
- fp6_e2m3, fp6_e3m2 (MXFP6): weight U8 [N, 3 K/4], a dense bit stream; weight_scale as fp4's. Codes are carried as
  e4m3's of the same numbers.
- fp8_e4m3: weight F8_E4M3 [N, K], weight_scale of one element or one a row, input_scale [] when activations are static.
- int8: weight I8 [N, K], weight_scale [N], weight_zero_point I8 [N].
- int4, uint4: weight I32 [K, N/8] in AWQ's nibble order, two's complement for int4; weight_scale [K/g, N];
  weight_zero_point I32 [K/g, N/8] in the same packing. One scale a row (per_channel): not transposed, weight I32
  [N, K/8], weight_scale [N], weight_zero_point I32 [N/8]. input_scale as fp8's.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.formats.awq import unpack_columns
from quantmoe.exporter.reading.formats.fp8 import row_scales
from quantmoe.exporter.reading.weights.affine import growth
from quantmoe.exporter.reading.weights.base import FLOATS, Format, ModuleScheme, Reads, Tensor, group_size_of
from quantmoe.exporter.reading.weights.bits import as_e4m3, unpack_nibbles, unpack_words

#: (dtype, qscheme) of weights -> op.def's format
WEIGHTS = {
    ("fp4", "per_group"): "mxfp4",
    ("fp6_e2m3", "per_group"): "fp8_e4m3",
    ("fp6_e3m2", "per_group"): "fp8_e4m3",
    ("fp8_e4m3", "per_tensor"): "fp8_e4m3",
    ("fp8_e4m3", "per_channel"): "fp8_e4m3",
    ("int8", "per_channel"): "int8",
    ("int4", "per_group"): "int4",
    ("uint4", "per_group"): "int4",
    ("int4", "per_channel"): "int4",
    ("uint4", "per_channel"): "int4",
}


#: dtype of 6 bits -> bits of its exponent
FP6 = {"fp6_e2m3": 2, "fp6_e3m2": 3}


class Quark(Format):
    name = "Quark"
    reads = (
        Reads("int4, int8, fp8, MXFP4; by layer", ("quark-*int*", "quark-fp8*", "quark-mxfp4*")),
        Reads("MXFP6, both types; its activations are not rounded", ("quark-mxfp6*",), exported="wider: fp8 e4m3"),
    )
    marks = ("weight_scale",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        self.default: dict[str, Any] = ckpt.quantization.get("global_quant_config") or {}
        self.layers: dict[str, Any] = ckpt.quantization.get("layer_quant_config") or {}
        for config in (self.default, *self.layers.values()):
            weight = config.get("weight") or {}
            for stage in weight if isinstance(weight, list) else [weight]:
                group_size_of(stage.get("group_size") or 128)
        export = ckpt.quantization.get("export") or {}
        #: whose outputs are the KV cache
        self.cached = ("*k_proj", "*v_proj", *(ckpt.quantization.get("kv_cache_quant_config") or {}))
        self.cached += tuple(map(str, export.get("kv_cache_group") or ()))
        order, stored = export.get("pack_method", "reorder"), export.get("weight_format", "real_quantized")
        if order != "reorder" or stored != "real_quantized":
            raise CheckpointError(
                f"{ckpt.folder}: Quark pack_method {order!r}, weight_format {stored!r}; "
                "supported: reorder, real_quantized"
            )

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "quark"

    def module_config(self, module: str) -> dict[str, Any]:
        return next((config for pattern, config in self.layers.items() if fnmatch(module, pattern)), self.default)

    def _weight(self, module: str) -> tuple[str, dict[str, Any]]:
        weight = self.module_config(module).get("weight") or {}
        if isinstance(weight, list):
            stages = " then ".join(f"{stage.get('dtype')} {stage.get('qscheme')}" for stage in weight)
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: Quark weights quantized in stages, {stages}; supported: one stage"
            )
        key = (str(weight.get("dtype")), str(weight.get("qscheme")))
        if key not in WEIGHTS or (key[0] in ("fp4", *FP6) and weight.get("group_size") != 32):
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: Quark weights {' '.join(key)} group {weight.get('group_size')}; "
                f"supported: {', '.join(map(' '.join, WEIGHTS))} (fp4 and fp6 in groups of 32)"
            )
        return WEIGHTS[key], weight

    def scheme(self, module: str) -> ModuleScheme:
        kind, weight = self._weight(module)
        config = self.module_config(module)
        inputs, outputs = config.get("input_tensors"), config.get("output_tensors")
        if outputs and not any(fnmatch(module, pattern) for pattern in self.cached):
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: Quark output_tensors {outputs.get('dtype')} {outputs.get('qscheme')}; "
                "supported: none, but of the KV cache"
            )
        group_size = (weight.get("group_size") or 128) if weight["qscheme"] == "per_group" else -1
        symmetric = " asymmetric" if weight["dtype"] == "uint4" else ""
        text = f"Quark {weight['dtype']}{symmetric} {weight['qscheme']} group {group_size}"
        if weight["dtype"] in FP6:
            text += growth(kind, 8, 32, 6.25)
        if not inputs:
            return ModuleScheme(kind, group_size, "none", text)
        if inputs.get("dtype") == "fp8_e4m3" and inputs.get("qscheme") == "per_tensor":
            return ModuleScheme(kind, group_size, "fp8_tensor", f"{text}, fp8 activations per tensor")
        if inputs.get("dtype") == "fp8_e4m3" and inputs.get("qscheme") == "per_channel" and inputs.get("is_dynamic"):
            return ModuleScheme(kind, group_size, "fp8_token", f"{text}, fp8 activations per token")
        dynamic_group = inputs.get("qscheme") == "per_group" and inputs.get("is_dynamic")
        if inputs.get("dtype") == "fp4" and dynamic_group and inputs.get("group_size") == 32:
            return ModuleScheme(kind, group_size, "mxfp4", f"{text}, MXFP4 activations")
        if inputs.get("dtype") in FP6 and dynamic_group:
            return ModuleScheme(kind, group_size, "none", f"{text}, MXFP6 activations are not rounded")
        by_token = inputs.get("qscheme") == "per_channel" and inputs.get("is_dynamic") and inputs.get("symmetric")
        if inputs.get("dtype") == "int8" and by_token:
            return ModuleScheme(kind, group_size, "int8_token", f"{text}, int8 activations per token")
        raise CheckpointError(
            f"{self.ckpt.folder}: {module}: Quark input_tensors {inputs.get('dtype')} {inputs.get('qscheme')}; "
            "supported: none, fp8_e4m3 per_tensor, fp8_e4m3 and int8 per_channel dynamic, fp4 per_group 32, fp6 dynamic"
        )

    def matrix(self, module: str) -> QuantizedMatrix:
        kind, weight = self._weight(module)
        if kind == "int4":
            return self._int4(module, weight)
        rows, columns = self.shape2d(f"{module}.weight")
        if kind != "int8":
            self.no_zero_points(module)
        zeros = None
        input_scale = self._input_scale(module)
        if kind == "mxfp4":
            n, k = rows, columns * 2
            tensors = self.take(
                module,
                [
                    Tensor("weight", ("U8",), (n, columns)),
                    Tensor("weight_scale", ("U8", "F8_E8M0"), (n, -(-k // 32))),
                    input_scale,
                ],
            )
            codes, scales, g = unpack_nibbles(tensors["weight"]), tensors["weight_scale"].view(SCALE_DTYPES["e8m0"]), 32
        elif weight["dtype"] in FP6:
            n, k = rows, columns * 4 // 3
            tensors = self.take(
                module,
                [
                    Tensor("weight", ("U8",), (n, k * 3 // 4)),
                    Tensor("weight_scale", ("U8", "F8_E8M0"), (n, -(-k // 32))),
                    input_scale,
                ],
            )
            codes, scales, g = (
                as_e4m3(unpack_words(tensors["weight"], 6, k), FP6[weight["dtype"]]),
                tensors["weight_scale"].view(SCALE_DTYPES["e8m0"]),
                32,
            )
        else:
            n, k = rows, columns
            declared = [Tensor("weight", ("I8",) if kind == "int8" else ("F8_E4M3",), (n, k)), input_scale]
            if kind == "int8":
                declared.append(Tensor("weight_zero_point", ("I8",), (n,), required=False))
            tensors = self.take(module, declared)
            flip = np.uint8(128 if kind == "int8" else 0)  # two's complement -> offset 128
            codes, scales, g = (
                tensors["weight"].view(np.uint8) ^ flip,
                row_scales(self, f"{module}.weight_scale", n),
                -1,
            )
            if "weight_zero_point" in tensors and tensors["weight_zero_point"].any():
                zeros = (tensors["weight_zero_point"].view(np.uint8) ^ flip)[:, None]
        return QuantizedMatrix(
            kind=kind,
            codes=codes,
            scales=scales,
            group_size=g,
            zero_points=zeros,
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            bias=self.bias(module, n),
        )

    def _input_scale(self, module: str) -> Tensor:
        inputs = self.module_config(module).get("input_tensors") or {"is_dynamic": True}
        return Tensor("input_scale", FLOATS, (), required=not inputs.get("is_dynamic"))

    def _int4(self, module: str, weight: dict[str, Any]) -> QuantizedMatrix:
        flip = np.uint8(8 if weight["dtype"] == "int4" else 0)  # two's complement -> offset 8
        rows, words = self.shape2d(f"{module}.weight")
        scales: tuple[int, ...]
        zeros: tuple[int, ...]
        if weight["qscheme"] == "per_channel":
            n, g, scales, zeros = rows, -1, (rows,), (-(-rows // 8),)
        else:
            n, g = words * 8, weight.get("group_size") or 128
            groups = -(-rows // g)
            scales, zeros = (groups, n), (groups, words)
        tensors = self.take(
            module,
            [
                Tensor("weight", ("I32",), (rows, words)),
                Tensor("weight_scale", FLOATS, scales),
                Tensor("weight_zero_point", ("I32",), zeros, weight["dtype"] == "uint4", decides=True),
                self._input_scale(module),
            ],
        )
        codes = unpack_columns(tensors["weight"])
        zero_points = None
        if "weight_zero_point" in tensors:
            stored = tensors["weight_zero_point"]
            zero_points = unpack_columns(stored.reshape(-1, stored.shape[-1]))[:n] ^ flip
        return QuantizedMatrix(
            kind="int4",
            codes=(np.ascontiguousarray(codes.T) if g == -1 else codes) ^ flip,
            scales=np.ascontiguousarray(tensors["weight_scale"].reshape(-1, n).T),
            group_size=g,
            zero_points=None if zero_points is None or (flip and (zero_points == 8).all()) else zero_points,
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            bias=self.bias(module, n),
        )
