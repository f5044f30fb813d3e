"""GPTQ, as GPTQModel, AutoGPTQ and AutoRound write it.

Tensors of a linear with N outputs and K inputs, groups of g, b bits:

- qweight I32 [K b / 32, N], packed along K. b is 2 to 8;
- qzeros I32 [K/g, N b / 32], packed along N. scales [K/g, N];
- g_idx I32 [K] names each input feature's group.

``checkpoint_format`` gptq (v1) stores zero points less one, gptq_v2 as they are. v1 was made from v2 by subtracting
words of ones (GPTQModel's convert_gptq_v2_to_v1_format), borrows included, so whole words are added back here.
gptq_p has bit planes (:func:`unpack_planes`) and zero points as they are; other codes are a dense bit stream.
AutoRound writes no checkpoint_format: its ``packing_format`` (``backend`` before release 0.5) says which, see
:func:`stores_zeros`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError, is_outline
from quantmoe.exporter.reading.weights.base import (
    FLOATS,
    Format,
    ModuleScheme,
    Reads,
    Tensor,
    carried_wider,
    group_order,
    group_size_of,
    integer_kind,
)
from quantmoe.exporter.reading.weights.bits import in_order, unpack_planes, unpack_words
from quantmoe.exporter.reading.weights.overrides import Overrides

#: bits -> 1 in each code of a word; other codes lie across words, and the tools take 1 from each of them instead
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
#: AutoRound's quant_method
AUTOROUND = ("auto-round", "auto_round", "intel/auto-round")
PACKINGS = "auto_round, auto_round:gptqmodel, auto_round:auto_gptq, auto_round:auto_awq"


@dataclass(frozen=True)
class Config:
    """The fields of the quantizer's configuration that decide numerics; a module may have some of its own."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    v2: bool | None
    """None: not said; the zero points of symmetric weights tell."""

    def text(self, kind: str) -> str:
        symmetric = "symmetric" if self.sym else "asymmetric"
        order = ", desc_act" if self.desc_act else ""
        wider = carried_wider(kind, self.bits)
        return f"GPTQ {'v2 ' if self.v2 else ''}int{self.bits} {symmetric} group {self.group_size}{order}{wider}"


class GPTQ(Format):
    name = "GPTQ"
    reads = (
        Reads(
            "v1 and v2, 4 and 8 bits; `desc_act`; `dynamic`, also for single experts",
            ("gptqmodel-gptq-*", "gptqmodel-gptq8-*", "gptqmodel-gptq_v2"),
        ),
        Reads("2 and 3 bits", ("gptqmodel-gptq2-*", "gptqmodel-gptq3*"), cuda="wider: 4 bits"),
        Reads(
            "the packings of GPTQ and AWQ, with `extra_config`",
            ("autoround-auto_*", "autoround-gptqmodel*", "autoround-0.8-*", "autoround-awq", "autoround-as_[ag]*"),
            "as there",
            tool="AutoRound",
        ),
        Reads("`gptq_p`, 2 to 8 bits in planes", ("gptqmodel-gptq_p",), cuda="wider: 8 bits"),
        Reads("5, 6 and 7 bits, also by module", ("autoround-bits*",), cuda="wider: 8 bits", tool="AutoRound"),
    )
    marks = ("qweight",)

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw, planes = ckpt.quantization, False
        if raw.get("quant_method") in AUTOROUND and not raw.get("checkpoint_format"):
            v2 = stores_zeros(ckpt)
        else:
            layout = raw.get("checkpoint_format") or ("marlin" if raw.get("is_marlin_format") else "gptq")
            if layout not in ("gptq", "gptq_v2", "gptq_p"):
                raise CheckpointError(
                    f"{ckpt.folder}: GPTQ checkpoint_format {layout!r}; supported: gptq, gptq_v2, gptq_p"
                )
            v2 = layout != "gptq"
            planes = layout == "gptq_p"
        if raw.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(f"{ckpt.folder}: GPTQ pack_dtype {raw['pack_dtype']!r}; supported: int32")
        self.config = Config(
            bits=int(raw.get("bits", 4)),
            group_size=group_size_of(raw.get("group_size", 128)),
            sym=bool(raw.get("sym", True)),
            desc_act=bool(raw.get("desc_act", False)),
            v2=v2,
        )
        self.unpack = unpack_planes if planes else unpack_words
        #: GPTQModel has 5, 6 and 7 bits only in planes
        self.widths = (2, 3, 4, 5, 6, 7, 8) if planes or raw.get("quant_method") in AUTOROUND else (2, 3, 4, 8)
        # modules_in_block_to_quantize and lm_head need no reading: a module with a qweight is quantized
        self.overrides = Overrides(ckpt)

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        integers = autoround_type(quantization) == "int" and "awq" not in autoround_packing(quantization)
        return quantization.get("quant_method") == "gptq" or integers

    def module_config(self, module: str) -> Config:
        """Return a module's own configuration, or the whole checkpoint's."""
        return replace(self.config, **self.overrides.of(module))

    def scheme(self, module: str) -> ModuleScheme:
        config = self.module_config(module)
        if type(config.bits) is not int or config.bits not in self.widths:
            supported = f"{', '.join(map(str, self.widths[:-1]))} and {self.widths[-1]}"
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: unsupported GPTQ bits={config.bits}, sym={config.sym}"
                f"{self.overrides.where(module)}; supported: {supported} bits, sym true or false"
            )
        if config.v2 is None and not config.sym:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: asymmetric, and the quantization configuration does not say how zero "
                f"points are stored; expected a packing_format: {PACKINGS}"
            )
        kind = integer_kind(config.bits, config.group_size, self.own_widths)
        return ModuleScheme(kind, config.group_size, "none", config.text(kind))

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
                Tensor("qzeros", ("I32",), (groups, -(-n * bits // 32)), decides=True),
                Tensor("scales", FLOATS, (groups, n)),
                Tensor("g_idx", ("I32",), (k,), required=False),
            ],
        )
        codes = self.unpack(tensors["qweight"].T, bits, k)
        words, middle = tensors["qzeros"].view(np.uint32), 1 << (bits - 1)

        def zeros_as(v2: bool) -> np.ndarray:
            if v2 or bits in _ONES:
                return self.unpack(words if v2 else words + np.uint32(_ONES[bits]), bits, n).T
            return (unpack_words(words, bits, n).T + np.uint8(1)) & np.uint8((1 << bits) - 1)

        zeros = self._middles(module, zeros_as, middle) if config.v2 is None else zeros_as(config.v2)
        perm = group_order(tensors["g_idx"], g, self.ckpt.where(f"{module}.g_idx")) if has_order else None
        plain = config.sym and bool((zeros == middle).all())
        if plain and (more := SCHEMES[scheme.format].zero - middle) and not is_outline(codes):
            codes = codes + np.uint8(more)
        return QuantizedMatrix(
            kind=scheme.format,
            codes=in_order(codes, perm),
            scales=np.ascontiguousarray(tensors["scales"].T),
            group_size=scheme.group_size,
            zero_points=None if plain else np.ascontiguousarray(zeros),
            bias=self.bias(module, n),
            perm=perm,
        )

    def _middles(self, module: str, zeros_as: Callable[[bool], np.ndarray], middle: int) -> np.ndarray:
        """Symmetric weights' zero points, all the middle, as v2 or as v1 stores them."""
        for v2 in (True, False):
            if ((zeros := zeros_as(v2)) == middle).all():
                return zeros
        raise CheckpointError(
            f"{self.ckpt.where(f'{module}.qzeros')} is neither {middle} nor {middle - 1} throughout, though symmetric; "
            "the quantization configuration does not say how zero points are stored: expected a packing_format: "
            f"{PACKINGS}"
        )


def autoround_packing(quantization: dict[str, Any]) -> str:
    """AutoRound's name of the packing, "" when the configuration has none."""
    packing = str(quantization.get("packing_format") or quantization.get("backend") or "").lower()
    return packing.replace("autoround", "auto_round").replace("auto-round", "auto_round")


def autoround_type(quantization: dict[str, Any]) -> str:
    """Return what AutoRound's weights are: "int", "fp", "mx_fp" or another of its words; "": it is another tool."""
    if quantization.get("quant_method") not in AUTOROUND:
        return ""
    found = str(quantization.get("data_type") or "int")
    return "int" if found.startswith("int") else found


def refuse_rotations(ckpt: Checkpoint) -> None:
    """Refuse AutoRound's weights that wait for rotated activations."""
    for field in ("rotation_config", "spinquant_config"):
        if ckpt.quantization.get(field):
            raise CheckpointError(f"{ckpt.folder}: AutoRound {field} is not supported; expected none")


def stores_zeros(ckpt: Checkpoint) -> bool | None:
    """Return whether AutoRound stored zero points as they are (True) or less one; None when the configuration does not
    say.

    Read from AutoRound 0.2 to 0.16: its own packing and gptqmodel's keep them, every other gptq's does not.

    Raises:
        CheckpointError: neither of the two packings, or weights that are not all of the model.
    """
    raw = ckpt.quantization
    packing = autoround_packing(raw)
    refuse_rotations(ckpt)
    for rule in (raw, *(raw.get("extra_config") or {}).values()):
        act_bits = rule.get("act_bits") or raw.get("act_bits") or 16
        if act_bits < 16 and rule.get("bits", 4) <= 8:
            raise CheckpointError(f"{ckpt.folder}: AutoRound act_bits {act_bits}; supported: 16")
    if "gptq" in packing:
        return "gptqmodel" in packing
    if packing in ("auto_round", "auto_round:exllamav2", "auto_round:triton", "auto_round:torch"):
        return True
    if packing in ("", "auto"):
        return None
    raise CheckpointError(f"{ckpt.folder}: AutoRound packing_format {packing!r}; supported: {PACKINGS}")
