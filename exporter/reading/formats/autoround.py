"""AutoRound's MXFP4, MXFP8 and NVFP4. Its integers are read as GPTQ's and AWQ's, its other fp8 as FP8's.

AutoRound stores compressed-tensors' tensors: mxfp4-pack-quantized for mx_fp in 4 bits, mxfp8-quantized for mx_fp in 8
bits, and nvfp4-pack-quantized for nv_fp. Read from AutoRound 0.16. Scales of activations are rounded as
compressed-tensors does it, also for mx_fp_rceil.
"""

from __future__ import annotations

from typing import Any, ClassVar

from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError
from quantmoe.exporter.reading.formats.compressed_tensors import Args, CompressedTensors, Group
from quantmoe.exporter.reading.formats.gptq import autoround_packing, autoround_type, refuse_rotations
from quantmoe.exporter.reading.weights.base import Reads
from quantmoe.exporter.reading.weights.overrides import Overrides

#: (data_type, bits) of weights -> compressed-tensors' storage and strategy
WEIGHTS = {
    ("mx_fp", 4): ("mxfp4-pack-quantized", "group"),
    ("mx_fp", 8): ("mxfp8-quantized", "group"),
    ("nv_fp", 4): ("nvfp4-pack-quantized", "tensor_group"),
}
#: act_data_type -> compressed-tensors' strategy, and dynamic if the configuration's act_dynamic is true
ACTIVATIONS: dict[str, tuple[str, bool | str]] = {
    "mx_fp": ("group", True),
    "mx_fp_rceil": ("group", True),
    "nv_fp4_with_static_gs": ("tensor_group", "local"),
}
FIELDS = (
    "bits",
    "group_size",
    "sym",
    "data_type",
    "act_bits",
    "act_group_size",
    "act_sym",
    "act_data_type",
    "act_dynamic",
)


class AutoRound(CompressedTensors):
    name = "AutoRound"
    reads: ClassVar[tuple[Reads, ...]] = (
        Reads("MXFP4, MXFP8, NVFP4, with `extra_config`", ("autoround-mxfp*", "autoround-nvfp4")),
        Reads(
            "MXINT4, NVFP4_E5M3, rotations",
            ("test_unsupported_is_named",),
            exported="refused: no kernel has integers with e8m0 scales, e5m3 scales, or AutoRound's rotations",
        ),
    )

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        refuse_rotations(ckpt)
        self.default = {key: value for key in FIELDS if (value := ckpt.quantization.get(key)) is not None}
        self.overrides = Overrides(ckpt, FIELDS)
        packing = autoround_packing(ckpt.quantization)
        kind = (self.default["data_type"], self.default.get("bits"))
        if packing != "auto_round:llm_compressor" or kind not in WEIGHTS:
            raise CheckpointError(
                f"{ckpt.folder}: AutoRound data_type {kind[0]!r}, bits {kind[1]}, packing_format {packing!r}; "
                f"supported: {_supported()} in auto_round:llm_compressor"
            )

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return autoround_type(quantization) not in ("", "int", "fp")

    def group(self, module: str) -> Group:
        """Return a module's configuration in compressed-tensors' words."""
        if module not in self._groups:
            self._groups[module] = self._translated(module, self.default | self.overrides.of(module))
        return self._groups[module]

    def _translated(self, module: str, own: dict[str, Any]) -> Group:
        kind, inputs = (own["data_type"], own["bits"]), None
        if kind not in WEIGHTS:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: AutoRound data_type {kind[0]!r}, bits {kind[1]}"
                f"{self.overrides.where(module)}; supported: {_supported()}"
            )
        storage, strategy = WEIGHTS[kind]
        if own.get("act_bits", 16) < 16:
            said = own.get("act_data_type")
            if said not in ACTIVATIONS or not own.get("act_dynamic"):
                raise CheckpointError(
                    f"{self.ckpt.folder}: {module}: AutoRound act_data_type {said!r}, act_dynamic "
                    f"{own.get('act_dynamic')}; supported: {', '.join(ACTIVATIONS)}, act_dynamic true"
                )
            by, dynamic = ACTIVATIONS[said]
            inputs = _args(own["act_bits"], by, own.get("act_group_size"), own.get("act_sym"), dynamic)
        weights = _args(own["bits"], strategy, own.get("group_size"), own.get("sym"), dynamic=False)
        return Group(name="", format=storage, targets=(), weights=weights, inputs=inputs, outputs=None)


def _args(bits: int, strategy: str, group_size: Any, symmetric: Any, dynamic: bool | str) -> Args:
    fields = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": group_size, "dynamic": dynamic}
    return Args.parse(fields | {"symmetric": symmetric})


def _supported() -> str:
    return ", ".join(f"{type} {bits}" for type, bits in WEIGHTS)
