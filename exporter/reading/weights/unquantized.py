"""A checkpoint of floats, quantized while it is read (src/quantize), or its experts as they are.

Experts are stored one by one, or fused as gate_up_proj [E, 2 I, H] and down_proj [E, H, I], as in Qwen3.5. gpt-oss,
Llama-4 and Aria store the transposes, [E, H, 2 I] and [E, I, H]. gpt-oss' columns alternate between gate and up, and it
has gate_up_proj_bias [E, 2 I] and down_proj_bias [E, H]. Step-3.5 has gate_proj and up_proj [E, I, H].
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.families import is_transposed
from quantmoe.exporter.reading.weights.base import (
    FLOAT_KINDS,
    FLOATS,
    Format,
    ModuleScheme,
    MoELayer,
    Reads,
    Tensor,
    float_scheme,
    searched_scheme,
    unrounded,
)
from quantmoe.exporter.reading.weights.experts import refuse_dense
from quantmoe.exporter.reading.weights.rounding import quantized

#: kind -> the group sizes there are; () for any
KINDS = {"int4": (), "int8": (), "mxfp4": (32,), "nvfp4": (16,), "q4_k": (256,), "q5_k": (256,), "q6_k": (256,),
         "q4_k_m": (256,), "q5_k_m": (256,), "none": (-1,)}  # fmt: skip
#: kind of several -> the usual one of feed-forward networks, and that of all other linears and of down projections in
#: half of the layers (docs/lab/quantization.md)
MIXTURES = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
#: ends of the names of modules in feed-forward networks; "experts": all of a layer
_FEED_FORWARD, _DOWN = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "experts", ""), ("down_proj", "w2")
#: kind -> the usual group size, where checkpoints of the scheme have another
USUAL = {"int4": 32, "none": -1}
#: but decays and betas, and what latent attention keeps in floats (modules/latent.py)
_LINEAR = re.compile(r"(.+\.)?(?!in_proj_(?:a|b|ba)$|kv_b_proj$)(\w+_proj\w*|w[123])")


class Unquantized(Format):
    name = "unquantized"
    reads = (
        Reads(
            "bf16 and f16 checkpoints, with [`--quantize`](../guides/quantize.md)",
            ("test_quantize_export",),
            exported="smaller",
            tool="none",
        ),
    )
    marks = ("weight",)
    fused = (".experts.gate_up_proj", ".experts.down_proj")

    def __init__(self, ckpt: Checkpoint, kind: str, group_size: int | None = None, symmetric: bool = False) -> None:
        super().__init__(ckpt)
        if kind not in KINDS:
            raise CheckpointError(f"{ckpt.folder}: cannot quantize to {kind!r}; supported: {', '.join(KINDS)}")
        if ckpt.quantization:
            refuse_dense(ckpt)
            method = ckpt.quantization.get("quant_method")
            raise CheckpointError(f"{ckpt.folder}: already quantized ({method}); export it without --quantize")
        self.kind, self.symmetric = kind, symmetric
        #: module, or expert and tensor of fused ones -> importance of its input features, f32 [K] (--calibrate)
        self.importance: dict[str, np.ndarray] = {}
        self.group_size = (USUAL.get(kind) or SCHEMES[self._kind("")].group_size) if group_size is None else group_size
        if KINDS[kind] and self.group_size not in KINDS[kind]:
            raise CheckpointError(f"{ckpt.folder}: {kind} has groups of {KINDS[kind][0]}, not {self.group_size}")
        if self.group_size != -1 and self.group_size < 1:
            raise CheckpointError(f"{ckpt.folder}: group size {self.group_size}, expected -1 or a positive integer")

    @classmethod
    def rest(cls, ckpt: Checkpoint) -> Unquantized:
        """Return what the tool that quantized a checkpoint left as it was."""
        made = cls.__new__(cls)
        Format.__init__(made, ckpt)
        made.kind, made.group_size, made.symmetric, made.importance = "none", -1, True, {}
        return made

    @property
    def own_global_scales(self) -> bool:
        return self.kind == "nvfp4"

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return not quantization

    def is_quantized(self, module: str) -> bool:
        if self.kind == "none":
            return False
        name = f"{module}.weight"
        return bool(_LINEAR.fullmatch(module)) and name in self.ckpt and len(self.ckpt.shape(name)) == 2

    def scheme(self, module: str) -> ModuleScheme:
        if self.kind == "none":  # of fused experts
            name = f"{module}.down_proj"
            if self.ckpt.dtype(name) not in FLOAT_KINDS:
                raise CheckpointError(
                    f"{self.ckpt.where(name)} is {self.ckpt.dtype(name)}, expected {' or '.join(FLOAT_KINDS)}"
                )
            return float_scheme(self.ckpt.dtype(name))
        return searched_scheme(self._kind(module), self.group_size)

    def _kind(self, module: str) -> str:
        """Return the format of a module, or of an expert's tensor."""
        if self.kind not in MIXTURES:
            return self.kind
        usual, more = MIXTURES[self.kind]
        layers, leaf = self.ckpt.text_config.get("num_hidden_layers"), module.rpartition(".")[2]
        if leaf not in _DOWN:
            return usual if leaf in _FEED_FORWARD else more
        numbers = re.findall(r"\.(\d+)\.", module)  # of the layer, then of the expert
        if type(layers) is not int or not numbers:
            return usual
        at, eighth = int(numbers[0]), layers // 8  # llama-quant.cpp's use_more_bits
        return more if at < eighth or at >= 7 * layers // 8 or (at - eighth) % 3 == 2 else usual

    def matrix(self, module: str) -> QuantizedMatrix:
        n, k = self.shape2d(f"{module}.weight")
        weight = self.take(module, [Tensor("weight", FLOATS, (n, k))])["weight"]
        return self._quantized(weight, self.bias(module, n), module)

    def fused_expert(self, layer: MoELayer, e: int) -> Expert:
        num, h, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        dtypes = tuple(FLOAT_KINDS) if self.kind == "none" else FLOATS
        if f"{layer.name}.gate_up_proj" in self.ckpt or f"{layer.name}.gate_proj" not in self.ckpt:
            shapes = {"gate_up_proj": (num, 2 * i, h), "down_proj": (num, h, i)}
            inputs: dict[str, tuple[slice, ...]] = {"gate_up_proj": layer.halves}
        else:
            shapes = {"gate_proj": (num, i, h), "up_proj": (num, i, h), "down_proj": (num, h, i)}
            inputs = {"gate_proj": (slice(None),), "up_proj": (slice(None),)}
        transposed = {
            name: is_transposed(self.ckpt.text_config, name, self.ckpt.shape(f"{layer.name}.{name}") != shape)
            for name, shape in shapes.items()
        }
        declared = []
        for name, (_, n, k) in shapes.items():
            declared += [Tensor(name, dtypes, (num, k, n) if transposed[name] else (num, n, k))]
            declared += [Tensor(f"{name}_bias", FLOATS, (num, n), required=False)]
        tensors = self.take(layer.name, declared, at=e)

        def matrix(name: str, rows: slice) -> QuantizedMatrix:
            bias = tensors.get(f"{name}_bias")
            own = None if bias is None else bias[rows].astype(np.float32)
            weight = tensors[name].T if transposed[name] else tensors[name]
            return self._quantized(weight[rows], own, f"{layer.name}.{e}.{name}")

        gate, up = (matrix(name, rows) for name, halves in inputs.items() for rows in halves)
        return Expert(gate, up, matrix("down_proj", slice(None)))

    def _quantized(self, weight: np.ndarray, bias: np.ndarray | None, module: str) -> QuantizedMatrix:
        if self.kind == "none":
            return unrounded(weight, bias)
        where, importance = f"{self.ckpt.folder}: {module}", self.importance.get(module)
        return quantized(
            weight,
            bias,
            self._kind(module),
            group_size=self.group_size,
            where=where,
            symmetric=self.symmetric,
            importance=importance,
        )
