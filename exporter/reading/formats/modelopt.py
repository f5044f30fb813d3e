"""NVIDIA ModelOpt (``hf_quant_config.json`` or ``quant_method: modelopt``).

Tensors of a linear with N outputs and K inputs by quant_algo:

- NVFP4: weight U8 [N, K/2] e2m1 low nibble first, weight_scale F8_E4M3 [N, K/16], weight_scale_2 F32 [] (multiplies),
  input_scale F32 [] (activations are NVFP4 too). NVFP4_AWQ: and pre_quant_scale [K]. W4A16_NVFP4: no input_scale.
- FP8: weight F8_E4M3 [N, K], weight_scale F32 [], input_scale F32 []. FP8_PER_CHANNEL_PER_TOKEN: weight_scale [N].
  FP8_PB_WO: weight_scale [N/128, K/128], weights only; dimensions of 1 may lack or be added. FP8_BLOCK_SCALES: the same
  with activations in groups of 128, as TensorRT-LLM runs it; often DeepSeek's files, with weight_scale_inv.
- MXFP4: weight U8 [N, K/2], weight_scale U8 [N, K/32], e8m0. MXFP8: weight F8_E4M3 [N, K]. Activations are
  quantized the same way; the tool's weights-only MXFP4 configuration says nothing else.
- W4A16_AWQ: weight U8 [N/2, K], weight_scale F32 [N, K/g]. A byte holds two's-complement nibbles of rows 2 i (low) and
  2 i + 1. pre_quant_scale [K] multiplies the activations.
- W8A16: weight I8 [N, K], weight_scale F32 [N].
- W4A8_NVFP4_FP8: as NVFP4 in groups of 32, with FP8 activations. W4A8_MXFP4_FP8: as MXFP4, with input_scale F32 [] of
  FP8 activations. The tool's own configuration calibrates none: linears have none, and find the scale at run time;
  experts have 0.5 / 448.

Llama-4's and gpt-oss' experts stay fused, [E, K, N] in the place of [N, K]: gate_up_proj, gate_up_proj_weight_scale and
so on, down_proj likewise. NVFP4 has U8 [E, K/2, N] and scales [E, K/16, N], FP8 a scale of [],
FP8_PER_CHANNEL_PER_TOKEN one of [E]. gpt-oss' columns alternate between gate and up, and have biases [E, N]. What the
tool forgets to transpose before it quantizes (MXFP4, MXFP8, W4A8_*) has groups of output features.

Release 0.47 writes some of these names in lower case. It writes the group size of the whole checkpoint into
hf_quant_config.json only: the shape of weight_scale gives it.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.formats.fp8 import block_scales, row_scales
from quantmoe.exporter.reading.weights.base import (
    FLOAT_KINDS,
    FLOATS,
    Format,
    ModuleScheme,
    MoELayer,
    Reads,
    Tensor,
    float_scheme,
    group_size_of,
    unrounded,
)
from quantmoe.exporter.reading.weights.bits import unpack_nibbles

#: quant_algo -> (format, group size, activation_format); None: from the shape of weight_scale
ALGORITHMS: dict[str, tuple[str, int | None, str]] = {
    "NVFP4": ("nvfp4", 16, "nvfp4"),
    "NVFP4_AWQ": ("nvfp4", 16, "nvfp4"),
    "W4A16_NVFP4": ("nvfp4", 16, "none"),
    "FP8": ("fp8_e4m3", -1, "fp8_tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_e4m3", -1, "fp8_token"),
    "FP8_PB_WO": ("fp8_e4m3", 128, "none"),
    "FP8_BLOCK_SCALES": ("fp8_e4m3", 128, "fp8_group128"),
    "MXFP4": ("mxfp4", 32, "mxfp4"),
    "MXFP8": ("fp8_e4m3", 32, "mxfp8"),
    "W4A16_AWQ": ("int4", None, "none"),
    "W8A16": ("int8", -1, "none"),
    "W4A8_MXFP4_FP8": ("mxfp4", 32, "fp8_tensor"),
    "W4A8_NVFP4_FP8": ("nvfp4", 32, "fp8_tensor"),
}
#: those that fused experts are read in
FUSED = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")


class ModelOpt(Format):
    name = "ModelOpt"
    reads = (
        Reads(
            "NVFP4, FP8, FP8_PB_WO, FP8_BLOCK_SCALES, MXFP4, MXFP8, W8A16, W4A8_MXFP4_FP8, MIXED_PRECISION; fused "
            "experts of Llama-4 and gpt-oss in NVFP4 and FP8",
            tests=(
                "modelopt-nvfp4*",
                "modelopt-w4a16_nvfp4",
                "modelopt-fp8*",
                "modelopt-mxfp*",
                "modelopt-int8_wo",
                "modelopt-w4a8_mxfp4_fp8",
            ),
        ),
        Reads("W4A16_AWQ", ("modelopt-w4a16_awq",), cuda="yes *"),
        Reads("W4A8_NVFP4_FP8", ("modelopt-w4a8_nvfp4_fp8",), cuda="no"),
    )
    marks = ("weight_scale", "weight_scale_inv")
    fused = (".experts.gate_up_proj", ".experts.down_proj")

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        self.config: dict[str, Any] = raw.get("quantization") or raw
        #: MIXED_PRECISION: module pattern -> configuration
        self.layers = {k: self.config | v for k, v in (self.config.get("quantized_layers") or {}).items()}
        for config in (self.config, *self.layers.values()):
            group_size_of(config.get("group_size") or -1)

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return str(quantization.get("quant_method", "")).startswith("modelopt")

    def module_config(self, module: str) -> dict[str, Any]:
        """Return the entry of quantized_layers for a module, or for one that it is in, or the whole configuration."""
        for end in ("", ".*"):
            if found := next((c for pattern, c in self.layers.items() if fnmatch(module, pattern + end)), None):
                return found
        return self.config

    def scheme(self, module: str) -> ModuleScheme:
        fused = f"{module}.gate_up_proj"
        if fused in self.ckpt and self.ckpt.dtype(fused) in FLOAT_KINDS:
            return float_scheme(self.ckpt.dtype(fused))
        config = self.module_config(module)
        algorithm = str(config.get("quant_algo")).upper()
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: ModelOpt quant_algo {algorithm}; supported: {', '.join(ALGORITHMS)}"
            )
        format, group_size, activations = ALGORITHMS[algorithm]
        if algorithm not in FUSED:
            self._refuse_fused(module, algorithm)
        if group_size is None:
            k, groups = self.shape2d(f"{module}.weight")[1], self.shape2d(f"{module}.weight_scale")[1]
            group_size = config.get("group_size") or max(1, k // max(1, groups))
        return ModuleScheme(format, group_size, activations, f"ModelOpt {algorithm} group {group_size}")

    def _refuse_fused(self, module: str, algorithm: str) -> None:
        names = [f"{module}.{leaf}" for leaf in ("gate_up_proj", "gate_up_proj_weight_scale")]
        if not all(name in self.ckpt for name in names):
            return
        found = " and ".join(f"{name} {self.ckpt.dtype(name)} {list(self.ckpt.shape(name))}" for name in names)
        across = self.ckpt.shape(names[0])[:2] == self.ckpt.shape(names[1])[:2]
        raise CheckpointError(
            f"{self.ckpt.folder}: {module}: ModelOpt {algorithm} of fused experts, {found}"
            f"{': groups of output features, expected of input features' if across else ''}; "
            f"supported fused: {', '.join(FUSED)}"
        )

    def _block_scale(self, module: str) -> str:
        """Return the name of the scales of blocks."""
        own = f"{module}.weight_scale"
        return own if own in self.ckpt else f"{own}_inv"

    def matrix(self, module: str) -> QuantizedMatrix:
        scheme = self.scheme(module)
        rows, columns = self.shape2d(f"{module}.weight")
        self.no_zero_points(module)
        if scheme.format == "nvfp4":
            return self._nvfp4(module, scheme, rows, columns * 2)
        if scheme.format == "fp8_e4m3":
            return self._fp8(module, scheme, rows, columns)
        if scheme.format == "int4":
            return self._int4(module, scheme.group_size, rows * 2, columns)
        mx = scheme.format == "mxfp4"
        weight = Tensor("weight", ("U8",) if mx else ("I8",), (rows, columns))
        scale = Tensor("weight_scale", ("U8", "F8_E8M0"), (rows, -(-2 * columns // 32)))
        inputs = Tensor("input_scale", FLOATS, (), required=False)
        tensors = self.take(module, [weight, scale, inputs] if mx else [weight])
        return QuantizedMatrix(
            kind=scheme.format,
            codes=unpack_nibbles(tensors["weight"]) if mx else tensors["weight"].view(np.uint8) ^ np.uint8(128),
            scales=tensors["weight_scale"].view(SCALE_DTYPES["e8m0"])
            if mx
            else row_scales(self, f"{module}.weight_scale", rows),
            group_size=scheme.group_size,
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            bias=self.bias(module, rows),
        )

    def _nvfp4(self, module: str, scheme: ModuleScheme, n: int, k: int) -> QuantizedMatrix:
        tensors = self.take(
            module,
            [
                Tensor("weight", ("U8",), (n, k // 2)),
                Tensor("weight_scale", ("F8_E4M3",), (n, -(-k // scheme.group_size))),
                Tensor("weight_scale_2", FLOATS, ()),
                Tensor("input_scale", FLOATS, (), required=scheme.activation_format != "none"),
                Tensor("pre_quant_scale", FLOATS, (k,), required=False),
            ],
        )
        pre = tensors.get("pre_quant_scale")
        return QuantizedMatrix(
            kind="nvfp4",
            codes=unpack_nibbles(tensors["weight"]),
            scales=tensors["weight_scale"],
            group_size=scheme.group_size,
            global_scale=tensors["weight_scale_2"].item(),
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            pre_scale=None if pre is None else pre.astype(np.float32),
            bias=self.bias(module, n),
        )

    def _fp8(self, module: str, scheme: ModuleScheme, n: int, k: int) -> QuantizedMatrix:
        static = scheme.activation_format == "fp8_tensor"
        declared = [Tensor("weight", ("F8_E4M3",), (n, k)), Tensor("input_scale", FLOATS, (), required=static)]
        if mx := scheme.activation_format == "mxfp8":
            declared.append(Tensor("weight_scale", ("U8", "F8_E8M0"), (n, -(-k // 32))))
        tensors = self.take(module, declared)
        name = f"{module}.weight_scale"
        if mx:
            scales = tensors["weight_scale"].view(SCALE_DTYPES["e8m0"])
        elif scheme.group_size == 128:
            scales = block_scales(self, self._block_scale(module), n, k=k, bn=128, bk=128)
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

    def fused_expert(self, layer: MoELayer, e: int) -> Expert:
        num, h, i, scheme = layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.scheme
        nvfp4, each = scheme.format == "nvfp4", (num,) if scheme.activation_format == "fp8_token" else ()
        gate, up = layer.halves

        def matrix(name: str, n: int, k: int, rows: slice) -> QuantizedMatrix:
            declared = [Tensor(f"{name}_bias", FLOATS, (num, n), required=False)]
            if scheme.format in FLOAT_KINDS.values():
                declared += [Tensor(name, tuple(FLOAT_KINDS), (num, k, n))]
            elif nvfp4:
                declared += [
                    Tensor(name, ("U8",), (num, k // 2, n)),
                    Tensor(f"{name}_weight_scale", ("F8_E4M3",), (num, -(-k // 16), n)),
                    Tensor(f"{name}_weight_scale_2", FLOATS, ()),
                    Tensor(f"{name}_input_scale", FLOATS, (), required=scheme.activation_format == "nvfp4"),
                ]
            else:
                declared += [
                    Tensor(name, ("F8_E4M3",), (num, k, n)),
                    Tensor(f"{name}_weight_scale", FLOATS, each),
                    Tensor(f"{name}_input_scale", FLOATS, (), required=not each),
                ]
            tensors = self.take(layer.name, declared, at=e)
            weight = tensors[name].T[rows]
            bias = tensors[f"{name}_bias"][rows].astype(np.float32) if f"{name}_bias" in tensors else None
            if scheme.format in FLOAT_KINDS.values():
                return unrounded(weight, bias)
            scale, inputs = tensors[f"{name}_weight_scale"], tensors.get(f"{name}_input_scale")
            scales = scale.T[rows] if nvfp4 else np.broadcast_to(scale, (len(weight), 1))
            return QuantizedMatrix(
                kind=scheme.format,
                codes=unpack_nibbles(weight) if nvfp4 else np.ascontiguousarray(weight).view(np.uint8),
                scales=np.ascontiguousarray(scales),
                group_size=scheme.group_size,
                global_scale=tensors[f"{name}_weight_scale_2"].item() if nvfp4 else None,
                input_scale=None if inputs is None else inputs.item(),
                bias=bias,
            )

        return Expert(
            gate=matrix("gate_up_proj", 2 * i, h, gate),
            up=matrix("gate_up_proj", 2 * i, h, up),
            down=matrix("down_proj", h, i, slice(None)),
        )
