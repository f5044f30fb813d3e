"""CONTRIBUTING.md's checkpoint format: <module>.acme_q U8 [N, K/2], low nibble first; <module>.acme_s F16 [N, K/64]."""

from typing import Any

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.reading.weights.base import Format, ModuleScheme, Tensor
from quantmoe.exporter.reading.weights.bits import unpack_nibbles


class Acme(Format):
    name = "Acme"
    marks = ("acme_q",)  # a module with this tensor is quantized

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") == "acme"

    def scheme(self, module: str) -> ModuleScheme:
        return ModuleScheme("int4", 64, "none", "Acme int4 group 64")

    def matrix(self, module: str) -> QuantizedMatrix:
        n, half = self.shape2d(f"{module}.acme_q")
        tensors = self.take(
            module,
            [
                Tensor("acme_q", ("U8",), (n, half)),
                Tensor("acme_s", ("F16",), (n, -(-2 * half // 64))),
            ],
        )
        return QuantizedMatrix(
            kind="int4",
            codes=unpack_nibbles(tensors["acme_q"]),
            scales=tensors["acme_s"],
            group_size=64,
            bias=self.bias(module, n),
        )
