"""The layer of ``quantmoe bench``, and the two ways of storing it: our node, and ONNX Runtime's own QMoE."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.benchmarks.layer_sizes import Shape
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import DOMAIN, MoESpec
from quantmoe.custom_ops.schemes import SCHEMES

#: --format: kind, scale type, whether it has zero points, activation format
FORMATS = {
    "int4": ("int4", "bf16", False, "int8_group"),
    "int8": ("int8", "bf16", False, "int8_group"),
    "int4-zp": ("int4", "bf16", True, "int8_group"),
    "int8-zp": ("int8", "bf16", True, "int8_group"),
    "mxfp4": ("mxfp4", "e8m0", False, "int8_group"),
    "nvfp4": ("nvfp4", "e4m3", False, "int8_group"),
    "nvfp4-w4a4": ("nvfp4", "e4m3", False, "nvfp4"),
    "fp8": ("fp8_e4m3", "f32", False, "none"),
}
#: what com.microsoft::QMoE has too
BITS = {"int4": 4, "int8": 8}
DISTINCT = 4  # experts whose bytes differ
PAGE = 65536  # alignment of weights in a data file


@dataclass(frozen=True)
class Layer:
    """One random layer. Expert e has the weights of expert e % DISTINCT."""

    shape: Shape
    kind: str
    group_size: int
    experts: list[Expert]

    @classmethod
    def random(cls, shape: Shape, kind: str, group_size: int, seed: int = 0) -> Layer:
        rng = np.random.default_rng(seed)
        code, scale_type, zero_points, activations = FORMATS[kind]
        top, table = 1 << SCHEMES[code].bits, SCHEMES[code].table

        def matrix(n: int, k: int) -> QuantizedMatrix:
            codes = np.frombuffer(rng.bytes(n * k), np.uint8).reshape(n, k) & np.uint8(top - 1)
            if code == "fp8_e4m3":
                codes = codes & np.uint8(0xF7)  # no NaN
            shape = (n, 1 if group_size == -1 else math.ceil(k / group_size))
            spread = float(np.nanstd(table)) * math.sqrt(k)  # products keep unit variance
            unit = 1.0 if code == "nvfp4" else spread
            return QuantizedMatrix(
                kind=code,
                codes=codes,
                scales=(rng.uniform(0.5, 1.5, shape) / unit).astype(SCALE_DTYPES[scale_type]),
                group_size=group_size,
                zero_points=rng.integers(0, top, shape, dtype=np.uint8) if zero_points else None,
                global_scale=1 / spread if code == "nvfp4" else None,
                input_scale=0.01 if activations == "nvfp4" else None,
            )

        h, i = shape.hidden, shape.intermediate
        count = min(DISTINCT, shape.experts)
        return cls(shape, kind, group_size, [Expert(matrix(i, h), matrix(i, h), matrix(h, i)) for _ in range(count)])

    def spec(self) -> MoESpec:
        """Return the attributes of our node."""
        s, describe = self.shape, LAYOUTS["cpu_panel"].describe
        w13, w2 = reduce(join, (describe(e, FORMATS[self.kind][3]) for e in self.experts))
        oai = s.activation == "swiglu_oai"
        return MoESpec(
            num_experts=s.experts,
            expert_offset=0,
            hidden_size=s.hidden,
            intermediate_size=s.intermediate,
            w13=w13,
            w2=w2,
            activation=s.activation,
            gated=1,
            swiglu_alpha=1.702 if oai else 0.0,
            swiglu_limit=7.0 if oai else 0.0,
            apply_router_weight_on_input=0,
        )

    @property
    def expert_bytes(self) -> int:
        """Packed bytes of one expert."""
        return sum(LAYOUTS["cpu_panel"].row_bytes(self.spec(), p) for p in ("w13", "w2"))

    @property
    def operations(self) -> int:
        """The operations of one token in one expert: two a multiply-add."""
        return 2 * 3 * self.shape.hidden * self.shape.intermediate

    def write(self, folder: Path) -> Path:
        """Our model: inputs x [n, H], ids int64 [n, k], weights [n, k]; output y [n, H]."""
        layout, s, spec = LAYOUTS["cpu_panel"], self.shape, self.spec()
        sizes = [layout.row_bytes(spec, p) for p in ("w13", "w2")]
        rows = [np.empty((len(self.experts), size), np.uint8) for size in sizes]
        for expert, *out in zip(self.experts, *rows, strict=True):
            layout.pack(expert, spec, *out)
        weights = [(n, r.view(np.int32)) for n, r in zip(("w13", "w2"), rows, strict=True)]
        inputs = {"x": (np.float32, s.hidden), "ids": (np.int64, s.top_k), "weights": (np.float32, s.top_k)}
        order = ["x", "ids", "weights", "w13", "w2"]
        return self._save(
            folder / "quantmoe.onnx",
            "QuantMoE",
            DOMAIN,
            inputs=inputs,
            weights=weights,
            order=order,
            attributes=spec.attributes(),
        )

    def write_qmoe(self, folder: Path) -> Path:
        """Write com.microsoft::QMoE with equal weights: inputs x [n, H], logits and weights [n, E]; output y [n, H].

        Gate and up rows alternate (swiglu_fusion 1). 4-bit codes lie two a byte, the even column low. accuracy_level 4
        lets it use int8 activations, as QuantMoE does. With one scale a row it has no integer kernel and uses f32.
        Source: the operator's schema in onnxruntime 1.31.

        Raises:
            ValueError: QMoE cannot hold the layer.
        """
        s, g = self.shape, self.group_size
        if self.kind not in BITS:
            raise ValueError(f"QMoE has {' and '.join(BITS)}, not {self.kind}")
        if g != -1 and (s.hidden % g or s.intermediate % g):
            raise ValueError(f"QMoE's block_size must divide the sizes, {g} and {s.hidden}, {s.intermediate}")

        def packed(m: QuantizedMatrix) -> np.ndarray:
            return m.codes if self.kind == "int8" else m.codes[:, ::2] | m.codes[:, 1::2] << 4

        def scales(m: QuantizedMatrix) -> np.ndarray:
            return m.scales.astype(np.float32) if g != -1 else m.scales[:, 0].astype(np.float32)

        def both(f: Callable[[QuantizedMatrix], np.ndarray]) -> Callable[[Expert], np.ndarray]:
            def interleaved(e: Expert) -> np.ndarray:
                assert e.gate is not None
                gate, up = f(e.gate), f(e.up)
                return np.stack([gate, up], axis=1).reshape(-1, *gate.shape[1:])

            return interleaved

        sides: dict[str, Callable[[Expert], np.ndarray]] = {
            "fc1": both(packed),
            "fc1_scales": both(scales),
            "fc2": lambda e: packed(e.down),
            "fc2_scales": lambda e: scales(e.down),
        }
        weights = [(name, np.stack([make(e) for e in self.experts])) for name, make in sides.items()]
        oai = s.activation == "swiglu_oai"
        attributes: dict[str, Any] = {
            "k": s.top_k,
            "expert_weight_bits": BITS[self.kind],
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": 1.702 if oai else 1.0,
            "activation_beta": 1.0 if oai else 0.0,
            "accuracy_level": 4,
        }
        attributes |= {"swiglu_limit": 7.0} if oai else {}
        attributes |= {"block_size": g} if g != -1 else {}
        inputs = {"x": (np.float32, s.hidden), "logits": (np.float32, s.experts), "weights": (np.float32, s.experts)}
        order = ["x", "logits", "fc1", "fc1_scales", None, "fc2", "fc2_scales", *[None] * 7, "weights"]
        return self._save(
            folder / "qmoe.onnx",
            "QMoE",
            "com.microsoft",
            inputs=inputs,
            weights=weights,
            order=order,
            attributes=attributes,
        )

    def write_data(self, path: Path, weights: Sequence[Sequence[np.ndarray]]) -> list[tuple[int, int]]:
        """Write each weight's distinct experts, repeated to all, to a file, and wait until it is on the disk.

        Returns:
            First byte and bytes of each.
        """
        regions, offset = [], 0
        with path.open("wb") as file:
            for arrays in weights:
                file.seek(offset)
                for e in range(self.shape.experts):
                    file.write(arrays[e % len(arrays)].view(np.uint8).data)
                regions.append((offset, file.tell() - offset))
                offset = -(-file.tell() // PAGE) * PAGE
            file.flush()
            os.fsync(file.fileno())
        return regions

    def _save(
        self,
        path: Path,
        op: str,
        domain: str,
        *,
        inputs: Mapping[str, tuple[type, int]],
        weights: Sequence[tuple[str, np.ndarray]],
        order: Sequence[str | None],
        attributes: dict[str, Any],
    ) -> Path:
        """Return a model with one node; weights [DISTINCT, ...] of all experts."""

        import onnx_ir as ir  # seconds, which the processes of --session need not spend

        def value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
            return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

        values = {n: value(n, ir.DataType.from_numpy(np.dtype(t)), ("n", size)) for n, (t, size) in inputs.items()}
        graph_inputs, initializers, file = list(values.values()), [], path.with_suffix(".bin")
        for (name, array), region in zip(weights, self.write_data(file, [[*a] for _, a in weights]), strict=True):
            shape, dtype = (self.shape.experts, *array.shape[1:]), ir.DataType.from_numpy(array.dtype)
            values[name] = value(name, dtype, shape)
            values[name].const_value = ir.ExternalTensor(
                file.name, *region, dtype, shape=ir.Shape(shape), name=name, base_dir=path.parent
            )
            initializers.append(values[name])
        node = ir.node(op, [values[n] if n else None for n in order], attributes, domain=domain, name=op)
        y = node.outputs[0]
        y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(("n", self.shape.hidden))
        opsets = {"": 20, domain: 1}
        graph = ir.Graph(graph_inputs, [y], nodes=[node], initializers=initializers, opset_imports=opsets, name="layer")
        ir.save(ir.Model(graph, ir_version=10), path)
        return path
