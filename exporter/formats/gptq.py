"""GPTQ, as GPTQModel, AutoGPTQ and AutoRound write it.

Tensors of a linear with N outputs and K inputs, groups of g, b bits: qweight I32 [K b / 32, N] packed along K; qzeros
I32 [K/g, N b / 32] packed along N; scales [K/g, N]; g_idx I32 [K] names each input feature's group.
``checkpoint_format`` gptq (v1) stores zero points less one, gptq_v2 as they are. v1 was made from v2 by subtracting
0x11111111 (or 0x01010101) from whole words, borrows included, so whole words are added back here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import regex

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.formats.base import FLOATS, Format, Scheme, Tensor, group_order, group_size_of, matches
from quantmoe.exporter.formats.bits import unpack_words

_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class Config:
    """The fields of the quantizer's configuration that decide numerics; `dynamic` rules replace some for a module."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    v2: bool

    @property
    def text(self) -> str:
        symmetric = "symmetric" if self.sym else "asymmetric"
        order = ", desc_act" if self.desc_act else ""
        return f"GPTQ {'v2 ' if self.v2 else ''}int{self.bits} {symmetric} group {self.group_size}{order}"


class GPTQ(Format):
    name = "GPTQ"
    marks = ("qweight",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        layout = raw.get("checkpoint_format") or ("marlin" if raw.get("is_marlin_format") else "gptq")
        if layout not in ("gptq", "gptq_v2"):
            raise CheckpointError(f"{ckpt.folder}: GPTQ checkpoint_format {layout!r}; supported: gptq, gptq_v2")
        if raw.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(f"{ckpt.folder}: GPTQ pack_dtype {raw['pack_dtype']!r}; supported: int32")
        self.config = Config(
            bits=int(raw.get("bits", 4)),
            group_size=group_size_of(raw.get("group_size", 128)),
            sym=bool(raw.get("sym", True)),
            desc_act=bool(raw.get("desc_act", False)),
            v2=layout == "gptq_v2",
        )
        # modules_in_block_to_quantize and lm_head need no reading: a module with a qweight is quantized
        #: (pattern, configuration) of each rule; GPTQModel calls them dynamic, AutoRound extra_config
        self.rules: list[tuple[regex.Pattern[str], Config]] = []
        for pattern, overrides in (raw.get("dynamic") or raw.get("extra_config") or {}).items():
            if pattern.startswith("-:"):
                continue  # names what is left unquantized; the tensors say so too
            known = {key: overrides[key] for key in ("bits", "group_size", "sym", "desc_act") if key in overrides}
            group_size_of(known.get("group_size", -1))
            self.rules.append((regex.compile(pattern.removeprefix("+:")), replace(self.config, **known)))

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        method = quantization.get("quant_method")
        if method in ("auto-round", "auto_round", "intel/auto-round"):
            return "awq" not in str(quantization.get("packing_format", ""))
        return method == "gptq"

    def module_config(self, module: str) -> Config:
        """The configuration of the first rule that matches, or the whole checkpoint's."""
        return next((config for pattern, config in self.rules if matches(pattern, module)), self.config)

    def scheme(self, module: str) -> Scheme:
        config = self.module_config(module)
        if type(config.bits) is not int or config.bits not in _ONES:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: unsupported GPTQ bits={config.bits}, sym={config.sym}; "
                "supported: 4 and 8 bits, sym true or false"
            )
        return Scheme(f"int{config.bits}", config.group_size, "none", config.text)

    def matrix(self, module: str) -> QuantizedMatrix:
        scheme, config = self.scheme(module), self.module_config(module)
        bits = config.bits
        rows, n = self.shape2d(f"{module}.qweight")
        has_order = f"{module}.g_idx" in self.ckpt
        k = prod(self.ckpt.shape(f"{module}.g_idx")) if has_order else rows * 32 // bits
        g = config.group_size if config.group_size > 0 else k
        groups = -(-k // g)
        tensors = self.take(
            module,
            [
                Tensor("qweight", ("I32",), (-(-k * bits // 32), n)),
                Tensor("qzeros", ("I32",), (groups, -(-n * bits // 32))),
                Tensor("scales", FLOATS, (groups, n)),
                Tensor("g_idx", ("I32",), (k,), required=False),
            ],
        )
        codes = unpack_words(tensors["qweight"].T, bits, k)
        words = tensors["qzeros"].view(np.uint32)
        if not config.v2:
            words = words + np.uint32(_ONES[bits])
        zeros = unpack_words(words, bits, n).T
        perm = group_order(tensors["g_idx"], g, self.ckpt.where(f"{module}.g_idx")) if has_order else None
        return QuantizedMatrix(
            kind=scheme.format,
            codes=codes if perm is None else np.take(codes, perm, axis=1),
            scales=np.ascontiguousarray(tensors["scales"].T),
            group_size=scheme.group_size,
            zero_points=None if config.sym and (zeros == 1 << (bits - 1)).all() else np.ascontiguousarray(zeros),
            bias=self.bias(module, n),
            perm=perm,
        )
