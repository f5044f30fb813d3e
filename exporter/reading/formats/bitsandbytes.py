"""bitsandbytes' 4-bit codes (nf4, fp4) and LLM.int8 (``quant_method: bitsandbytes``), as transformers writes them.

Tensors of a linear with N outputs and K inputs. Blocks of b weights run over the flattened weight.

- 4 bits: weight [.., 1], the bytes of N K codes, of two the high half first, in any type of ``bnb_4bit_quant_storage``.
  weight.quant_map F32 [16] is the table of nf4 or fp4. weight.absmax F32 [N K / b] has the scales.
  weight.quant_state.bitsandbytes__nf4 (or fp4) U8 is a JSON text: quant_type, blocksize, shape, dtype and nested_*.
- Double quantization: weight.absmax U8 are places in weight.nested_quant_map F32 [256]. A scale is that number times
  the block's weight.nested_absmax F32, plus nested_offset. Both are rounded to f32.
- 8 bits: weight I8 [N, K], SCB F32 [N], weight_format U8, 0 for rows. A row's scale is SCB / 127.

A weight is code * scale, as bitsandbytes computes it in f32. It then rounds to the model's type, nothing here does.
bitsandbytes multiplies 8-bit weights by activations rounded to int8, except features with a number above
``llm_int8_threshold``. The checkpoint holds no sign of that: activations are as ``--activations`` says.
"""

from __future__ import annotations

import json
import math
from functools import cached_property
from typing import Any

import numpy as np

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading.checkpoint import is_outline, outline
from quantmoe.exporter.reading.weights.affine import carried_group, growth
from quantmoe.exporter.reading.weights.base import Format, ModuleScheme, Reads, Tensor
from quantmoe.exporter.safetensors_file import DTYPES

#: quant_type -> op.def's format
KINDS = {"nf4": "nf4", "fp4": "bnb_fp4"}
_STATE = "weight.quant_state.bitsandbytes__"
#: as bitsandbytes' kernels multiply: the f32 nearest to 1/127
_OF_127 = np.float32(1 / 127)


class BitsAndBytes(Format):
    name = "bitsandbytes"
    reads = (
        Reads(
            "nf4 and fp4",
            ("bitsandbytes-fp4", "bitsandbytes-nf4-double"),
            exported="same; after double quantization wider: 4.5 bits",
            cuda="no",
        ),
        Reads("LLM.int8, without outliers in floating point", ("bitsandbytes-int8",)),
    )
    marks = ("weight.absmax", "SCB")

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "bitsandbytes"

    def parameters(self) -> list[str]:
        return [name for name in super().parameters() if ".weight." not in name and not name.endswith("weight_format")]

    def scheme(self, module: str) -> ModuleScheme:
        if f"{module}.SCB" in self.ckpt:
            return ModuleScheme("int8", -1, "none", "bitsandbytes LLM.int8 rows, no outliers apart")
        state = self._state(module)
        block, width = int(state["blocksize"]), self._width(module, state)
        nested = "nested_blocksize" in state
        # a scale of a block, or a byte and its own block's share of one
        bits = 4 + ((8 + 32 / int(state["nested_blocksize"])) if nested else 32) / block
        double, kind = ", double quantization" if nested else "", KINDS[state["quant_type"]]
        text = f"bitsandbytes {state['quant_type']} blocks of {block}{double}{growth(kind, 32, width, bits)}"
        return ModuleScheme(kind, width, "none", text)

    @cached_property
    def _states(self) -> dict[str, dict[str, Any]]:
        return {}

    def _state(self, module: str) -> dict[str, Any]:
        """Return the text beside a 4-bit weight: quant_type, blocksize, shape.

        Raises:
            CheckpointError: it is missing, or says what no kernel of bitsandbytes knows.
        """
        if module in self._states:
            return self._states[module]
        found = [f"{_STATE}{kind}" for kind in KINDS if f"{module}.{_STATE}{kind}" in self.ckpt]
        if not found:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}.{_STATE}nf4 or fp4 is missing, expected what save_pretrained writes "
                "beside weight.absmax"
            )
        where = self.ckpt.where(f"{module}.{found[0]}")
        try:
            state = json.loads(self.ckpt.tensor(f"{module}.{found[0]}", decides=True).tobytes())
            shape, block = state["shape"], state["blocksize"]
            fine = (
                state["quant_type"] in KINDS
                and len(shape) == 2
                and all(type(size) is int and size > 0 for size in (*shape, block, state.get("nested_blocksize", 1)))
                and math.isfinite(state.get("nested_offset", 0.0))
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            fine = False
        if not fine:
            raise CheckpointError(
                f"{where}: expected a JSON text with quant_type {' or '.join(KINDS)}, blocksize and a shape of two"
            )
        self._states[module] = state
        return state

    def _width(self, module: str, state: dict[str, Any]) -> int:
        return carried_group(state["shape"][1], state["blocksize"], f"{self.ckpt.folder}: {module}: bitsandbytes")

    def matrix(self, module: str) -> QuantizedMatrix:
        if f"{module}.SCB" in self.ckpt:
            return self._int8(module)
        state = self._state(module)
        (n, k), block, width = state["shape"], state["blocksize"], self._width(module, state)
        kind = KINDS[state["quant_type"]]
        dtype = self.ckpt.dtype(f"{module}.weight")
        stored = self.take(module, [Tensor("weight", (dtype,), (-(-n * k // 2 // DTYPES[dtype].itemsize), 1))])[
            "weight"
        ]
        scales = self._scales(module, state)
        if is_outline(stored):
            codes, scales = outline((n, k), np.uint8), outline((n, k // width), np.float32)
        else:
            octets = stored.reshape(-1).view(np.uint8)
            codes = np.stack([octets >> 4, octets & 15], axis=1).reshape(n, k)
            scales = scales[np.arange(0, n * k, width) // block].reshape(n, k // width)
        return QuantizedMatrix(kind=kind, codes=codes, scales=scales, group_size=width, bias=self.bias(module, n))

    def _scales(self, module: str, state: dict[str, Any]) -> np.ndarray:
        """Return the scales of the blocks, f32."""
        n, k = state["shape"]
        blocks, nested = -(-n * k // state["blocksize"]), "nested_blocksize" in state
        declared = [
            Tensor("weight.absmax", ("U8",) if nested else ("F32",), (blocks,)),
            Tensor("weight.quant_map", ("F32",), (16,)),
        ]
        if nested:
            share = state["nested_blocksize"]
            declared += [
                Tensor("weight.nested_absmax", ("F32",), (-(-blocks // share),)),
                Tensor("weight.nested_quant_map", ("F32",), (256,)),
            ]
        tensors = self.take(module, declared)
        table = SCHEMES[KINDS[state["quant_type"]]].table
        if not np.array_equal(tensors["weight.quant_map"], table):
            raise CheckpointError(
                f"{self.ckpt.where(f'{module}.weight.quant_map')} is not the table of {state['quant_type']}; expected "
                "it, as bitsandbytes' kernels use no other"
            )
        if not nested:
            return tensors["weight.absmax"]
        factors = np.repeat(tensors["weight.nested_absmax"], share)[:blocks]
        return tensors["weight.nested_quant_map"][tensors["weight.absmax"]] * factors + np.float32(
            state.get("nested_offset", 0.0)
        )

    def _int8(self, module: str) -> QuantizedMatrix:
        n, k = self.shape2d(f"{module}.weight")
        declared = [
            Tensor("weight", ("I8",), (n, k)),
            Tensor("SCB", ("F32",), (n,)),
            Tensor("weight_format", ("U8",), (), required=False),
        ]
        tensors = self.take(module, declared)
        if "weight_format" in tensors and tensors["weight_format"].item() != 0:
            raise CheckpointError(
                f"{self.ckpt.where(f'{module}.weight_format')} is {tensors['weight_format'].item()}, a layout of some "
                "GPUs; expected 0, rows"
            )
        codes = tensors["weight"] if is_outline(tensors["weight"]) else tensors["weight"].view(np.uint8) ^ np.uint8(128)
        if is_outline(codes):
            codes = outline((n, k), np.uint8)
        scales = (tensors["SCB"] * _OF_127).reshape(n, 1)
        return QuantizedMatrix(kind="int8", codes=codes, scales=scales, group_size=-1, bias=self.bias(module, n))
