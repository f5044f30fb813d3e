"""Layout ``qmoe``: the tensors of ONNX Runtime's own com.microsoft::QMoE and MatMulNBits, for files that run without a
library of ours. No node of domain ``quantmoe`` has it.

A row holds one expert's part of each tensor (:func:`parts`), scales in their own type. Codes lie as in QMoE of
ONNX Runtime 1.28 to 1.32 and in MatMulNBits: along K, two of 4 bits a byte, the first low. Rows of gate and up
alternate. MXFP4 has the order of ONNX Runtime's CUDA kernels: [K, N / 2], two rows a byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES

NAME, VERSION = "qmoe", 1
#: format -> quant_type and scale types
FORMATS = {
    "int4": ("int", ("f32", "f16", "bf16")),
    "int8": ("int", ("f32", "f16", "bf16")),
    "mxfp4": ("fp4", ("e8m0",)),
}
#: QMoE's input of a projection's part
INPUTS = {
    ("w13", "codes"): 2,
    ("w13", "scales"): 3,
    ("w13", "bias"): 4,
    ("w2", "codes"): 5,
    ("w2", "scales"): 6,
    ("w2", "bias"): 7,
    ("w13", "zero_points"): 11,
    ("w2", "zero_points"): 12,
}
#: and of MXFP4's factors of an expert, all 1, which have no part in a row
GLOBAL_SCALES = 15, 16


@dataclass(frozen=True)
class RowPart:
    """The place of a part of a row; scales are in their own type, biases in f32, the rest in bytes."""

    at: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.at + int(np.prod(self.shape)) * self.dtype.itemsize

    def of(self, row: np.ndarray) -> np.ndarray:
        """Return a view of a row uint8 [row_bytes]."""
        return row[self.at : self.end].view(self.dtype).reshape(self.shape)


def describe(
    expert: Expert, activation_format: str, down_activation_format: str | None = None
) -> tuple[Projection, Projection]:
    """Return the attributes of a layer's node (layouts/__init__.py)."""
    if expert.down.hadamard:
        raise ValueError("down: its input is rotated in each run, which QMoE does not do; use --target cpu")
    if expert.gate is None:
        w13 = _describe(expert.up, activation_format, "up")
    else:
        halves = [_describe(m, activation_format, what) for m, what in ((expert.gate, "gate"), (expert.up, "up"))]
        wide = {name: max(getattr(p, name) for p in halves) for name in ("bias", "zero_points")}
        w13, other = (replace(p, **wide) for p in halves)
        if w13 != other:
            raise ValueError(f"gate and up are stored differently: {w13} against {other}")
    return w13, _describe(expert.down, down_activation_format or activation_format, "down")


def describe_down(m: QuantizedMatrix, activation_format: str) -> Projection:
    """Return the attributes of a linear alone, which is MatMulNBits."""
    found = _describe(m, activation_format, "down", "MatMulNBits")
    if m.kind == "mxfp4":
        raise ValueError("down: MatMulNBits has int4 and int8, found mxfp4")
    return found


def _describe(m: QuantizedMatrix, activation_format: str, what: str, operator: str = "QMoE") -> Projection:
    if m.kind not in FORMATS:
        raise ValueError(f"{what}: {operator} is exported with {', '.join(FORMATS)}, found {m.kind}")
    if activation_format != "none":
        raise ValueError(
            f"{what}: {operator} does not quantize activations as the checkpoint says ({activation_format}); "
            "with --activations float they stay float"
        )
    for name, why in (("perm", "no act-order"), ("pre_scale", "no pre-scales"), ("global_scale", "no global scale")):
        if getattr(m, name) is not None:
            raise ValueError(f"{what}: {operator} has {why}")
    if m.block_n != 1:
        raise ValueError(f"{what}: {operator} has a scale a row and group, found blocks of {m.block_n} rows")
    scales = FORMATS[m.kind][1]
    if m.scale_type not in scales:
        raise ValueError(f"{what}: {operator} has {m.kind} with scales {', '.join(scales)}, found {m.scale_type}")
    g, (n, k) = m.group_size, m.shape
    rows = g == -1 and operator == "QMoE" and m.kind != "mxfp4"
    if not rows and (g < 16 or g & (g - 1) or (m.kind == "mxfp4" and g != 32)):
        sizes = "32" if m.kind == "mxfp4" else "a power of two from 16"
        raise ValueError(f"{what}: {operator} needs a group_size of {sizes} for {m.kind}, found {g}")
    if rows and m.zero_points is not None:
        raise ValueError(f"{what}: QMoE with one scale a row has no zero points here")
    if operator == "QMoE" and (k % (2 if rows else g) or (m.kind == "mxfp4" and n % 2)):
        groups = "pairs of columns" if rows else f"groups of {g}" + " and pairs of rows" * (m.kind == "mxfp4")
        raise ValueError(f"{what}: QMoE has whole {groups}, found {list(m.shape)}")
    return Projection(
        format=m.kind,
        group_size=g,
        block_n=1,
        scale_type=m.scale_type,
        zero_points=int(m.zero_points is not None),
        activation_format=activation_format,
        layout=NAME,
        layout_version=VERSION,
        bias=int(m.bias is not None),
        perm=0,
        pre_scale=0,
    )


def refusal(spec: MoESpec | LinearSpec) -> str:
    """Why QMoE does not compute a layer; "" when it does."""
    if isinstance(spec, LinearSpec):
        return ""
    if not spec.gated or spec.activation not in ("silu", "swiglu_oai"):
        kind = f"{'' if spec.gated else 'un'}gated {spec.activation}"
        return f"QMoE has gated silu and swiglu_oai on every provider, the layer is {kind}"
    if spec.apply_router_weight_on_input:
        return "QMoE multiplies outputs by the router's weights, the layer its inputs"
    if spec.w13.format != spec.w2.format or spec.w13.group_size != spec.w2.group_size:
        found = [f"{p.format} group {p.group_size}" for p in (spec.w13, spec.w2)]
        return f"QMoE has one format and block_size, gate and up are {found[0]}, down is {found[1]}"
    return ""


def parts(spec: MoESpec, projection: str) -> dict[str, RowPart]:
    """Return what a row is made of, in order."""
    p, n, k, halves = spec.matrices(projection)
    bits, n = SCHEMES[p.format].bits, n * halves
    groups = 1 if p.group_size == -1 else -(-k // p.group_size)
    stored = k if p.group_size == -1 else groups * p.group_size
    byte, at = np.dtype(np.uint8), 0
    found: dict[str, RowPart] = {}
    kinds: list[tuple[str, np.dtype, tuple[int, ...]]] = [
        ("codes", byte, (stored, n // 2) if p.format == "mxfp4" else (n, stored * bits // 8)),
        ("scales", SCALE_DTYPES[p.scale_type], (n, groups)),
    ]
    if p.zero_points:
        kinds.append(("zero_points", byte, (n, -(-groups * bits // 8))))
    if p.bias:
        kinds.append(("bias", np.dtype(np.float32), (n,)))
    for name, dtype, shape in kinds:
        found[name] = RowPart(at, dtype, shape)
        at = -(-found[name].end // 64) * 64
    return found


def row_bytes(spec: MoESpec, projection: str) -> int:
    """Return the bytes of one expert's row of ``projection`` ("w13" or "w2"), a multiple of 64."""
    return -(-max(part.end for part in parts(spec, projection).values()) // 64) * 64


def pack(expert: Expert, spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> None:
    """Write one expert; see layouts/__init__.py.

    Raises:
        ValueError: ``expert`` does not fit ``spec``, or has what is no number.
    """
    halves = [(m, what) for m, what in ((expert.gate, "gate"), (expert.up, "up")) if m is not None]
    _pack(halves, spec, "w13", w13_row, "QMoE")
    _pack([(expert.down, "down")], spec, "w2", w2_row, "QMoE")


def pack_down(m: QuantizedMatrix, spec: MoESpec, w2_row: np.ndarray) -> None:
    """Write the matrix of a linear; see layouts/__init__.py."""
    _pack([(m, "down")], spec, "w2", w2_row, "MatMulNBits")


def unpack(spec: MoESpec, w13_row: np.ndarray, w2_row: np.ndarray) -> Expert:
    """Return the expert that :func:`pack` wrote, bit for bit.

    Zero points that are all the middle, and biases that are all zero, come back as None.
    """
    *gate, up = _unpack(spec, "w13", w13_row)
    return Expert(gate[0] if gate else None, up, unpack_down(spec, w2_row))


def unpack_down(spec: MoESpec, w2_row: np.ndarray) -> QuantizedMatrix:
    """Return the matrix that :func:`pack_down` wrote."""
    return _unpack(spec, "w2", w2_row)[0]


def _pack(
    matrices: Sequence[tuple[QuantizedMatrix, str]], spec: MoESpec, projection: str, row: np.ndarray, operator: str
) -> None:
    p, n, k, _ = spec.matrices(projection)
    found = parts(spec, projection)
    row[:] = 0
    for m, what in matrices:
        m.check_finite(what)
        if m.shape != (n, k):
            raise ValueError(f"{what} has shape {list(m.shape)}, expected {[n, k]}")
        own = _describe(m, p.activation_format, what, operator)
        for name in ("bias", "zero_points"):
            if getattr(own, name) > getattr(p, name):
                raise ValueError(f"{what} has {name} and the layer's other experts have none")
        if replace(own, bias=p.bias, zero_points=p.zero_points) != p:
            raise ValueError(f"{what} is {own}, the layer's node says {p}")
    middle, count = np.uint8(SCHEMES[p.format].zero), len(matrices)
    codes = found["codes"].of(row)
    if p.format == "mxfp4":  # no row is copied: an expert may be as large as the memory has room for
        low, high = (m.codes for m, _ in matrices) if count == 2 else (matrices[0][0].codes[i::2] for i in (0, 1))
        np.left_shift(high.T, 4, out=codes)
        codes |= low.T
    for i, (m, _) in enumerate(matrices):
        places = slice(i, None, count)
        if p.format != "mxfp4":
            _put(codes[places], m.codes, p.format, middle)
        found["scales"].of(row)[places] = m.scales
        if "zero_points" in found:
            zeros = np.full(m.scales.shape, middle) if m.zero_points is None else m.zero_points
            _put(found["zero_points"].of(row)[places], zeros, p.format, middle)
        if "bias" in found and m.bias is not None:
            found["bias"].of(row)[places] = m.bias


def _unpack(spec: MoESpec, projection: str, row: np.ndarray) -> list[QuantizedMatrix]:
    p, _, k, halves = spec.matrices(projection)
    found = parts(spec, projection)
    scales = found["scales"].of(row)
    if p.format == "mxfp4":
        codes = np.ascontiguousarray(_nibbles(found["codes"].of(row)).T)
    else:
        codes = _values(found["codes"].of(row), p.format)
    zeros = bias = None
    if "zero_points" in found:
        zeros = _values(found["zero_points"].of(row), p.format)[:, : scales.shape[1]]
    if "bias" in found:
        bias = found["bias"].of(row)
    matrices = []
    for i in range(halves):
        own = slice(i, None, halves)
        points = None if zeros is None or (zeros[own] == SCHEMES[p.format].zero).all() else zeros[own].copy()
        matrices.append(
            QuantizedMatrix(
                kind=p.format,
                codes=np.ascontiguousarray(codes[own, :k]),
                scales=scales[own].copy(),
                group_size=p.group_size,
                zero_points=points,
                bias=bias[own].copy() if bias is not None and bias[own].any() else None,
            )
        )
    return matrices


def _put(out: np.ndarray, codes: np.ndarray, format: str, fill: np.uint8) -> None:
    """Write rows of codes into rows of bytes, and ``fill`` where there are no codes."""
    if SCHEMES[format].bits == 8:
        out[:, : codes.shape[1]], out[:, codes.shape[1] :] = codes, fill
        return
    pairs, odd = divmod(codes.shape[1], 2)
    np.left_shift(codes[:, 1::2], 4, out=out[:, :pairs])
    out[:, :pairs] |= codes[:, : 2 * pairs : 2]
    out[:, pairs:] = fill | fill << 4
    if odd:
        out[:, pairs] = codes[:, -1] | fill << 4


def _nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def _values(packed: np.ndarray, format: str) -> np.ndarray:
    return _nibbles(packed) if SCHEMES[format].bits == 4 else packed


def attributes(spec: MoESpec) -> dict[str, Any]:
    """QMoE's attributes that say what a layer is; not k and normalize_routing_weights, of its router, nor
    accuracy_level."""
    oai = spec.activation == "swiglu_oai"
    kind = FORMATS[spec.w13.format][0]
    found: dict[str, Any] = {
        "expert_weight_bits": SCHEMES[spec.w13.format].bits,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": spec.swiglu_alpha if oai else 1.0,
        "activation_beta": 1.0 if oai else 0.0,
        "weights_prepacked": 0,  # without it CUDA takes the bytes for its own, and multiplies others
    }
    if oai:
        found["swiglu_limit"] = spec.swiglu_limit
    if spec.w13.group_size != -1:
        found["block_size"] = spec.w13.group_size
    return found | ({} if kind == "int" else {"quant_type": kind})


def shape(spec: MoESpec, projection: str, name: str) -> tuple[int, ...]:
    """Return the shape of QMoE's tensor of a part."""
    found = parts(spec, projection)[name].shape
    own = getattr(spec, projection)
    if name == "codes" and own.format == "mxfp4":  # CUDA's bytes under the schema's name of the sizes
        _, n, k, halves = spec.matrices(projection)
        found = (k, n * halves // 2)
    return (spec.num_experts, *(found[:1] if name == "scales" and own.group_size == -1 else found))


def stored(spec: MoESpec, projection: str, rows: np.ndarray, floats: np.dtype) -> dict[str, np.ndarray]:
    """Return a packed row's parts as QMoE's tensors have them.

    Args:
        floats: float32 or float16, of scales of integers and of biases.

    Raises:
        ValueError: scales that float16 does not hold.
    """
    found = {name: part.of(rows) for name, part in parts(spec, projection).items()}
    if getattr(spec, projection).scale_type != "e8m0":
        exact = found["scales"].astype(np.float32)
        with np.errstate(over="ignore"):
            found["scales"] = exact.astype(floats, copy=False)
        if not np.array_equal(found["scales"], exact):
            raise ValueError("scales that float16 does not hold; use --dtype f32")
    if "bias" in found:
        with np.errstate(over="ignore"):
            found["bias"] = found["bias"].astype(floats)
        if not np.isfinite(found["bias"]).all():
            raise ValueError("biases that float16 does not hold; use --dtype f32")
    return found


def restored(spec: MoESpec, projection: str, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the inverse of :func:`stored`: the row."""
    row = np.zeros(row_bytes(spec, projection), np.uint8)
    for name, part in parts(spec, projection).items():
        part.of(row)[:] = tensors[name].reshape(part.shape).astype(part.dtype)
    return row


def _projection(
    format: str, group_size: int, scale_type: str, *, zero_points: bool, bias: bool, activation_format: str = "none"
) -> Projection:
    return Projection(
        format=format,
        group_size=group_size,
        block_n=1,
        scale_type=scale_type,
        zero_points=int(zero_points),
        activation_format=activation_format,
        layout=NAME,
        layout_version=VERSION,
        bias=int(bias),
        perm=0,
        pre_scale=0,
    )


def moe_spec(node: Mapping[str, Any], shapes: Mapping[int, Sequence[int]], scale_types: Mapping[str, str]) -> MoESpec:
    """Return what a QMoE node that an export wrote is: the inverse of :func:`attributes` and :func:`shape`.

    Args:
        node: its attributes. shapes: of the inputs that are initializers, by number. scale_types: of the checkpoint's
            scales, of w13 and w2.

    Raises:
        ValueError, LookupError: it is none that an export wrote.
    """
    bits, kind = node["expert_weight_bits"], node.get("quant_type", "int")
    format = next((f for f, (k, _) in FORMATS.items() if k == kind and SCHEMES[f].bits == bits), None)
    if format is None:
        raise ValueError(f"quant_type {kind!r} of {bits} bits; this release knows {', '.join(FORMATS)}")
    make = partial(_projection, format, node.get("block_size", -1))
    w13, w2 = (
        make(scale_types[p], zero_points=INPUTS[p, "zero_points"] in shapes, bias=INPUTS[p, "bias"] in shapes)
        for p in ("w13", "w2")
    )
    experts, hidden = shapes[INPUTS["w2", "scales"]][:2]
    intermediate = shapes[INPUTS["w13", "scales"]][1] // 2
    oai = "swiglu_limit" in node
    spec = MoESpec(
        num_experts=experts,
        expert_offset=0,
        hidden_size=hidden,
        intermediate_size=intermediate,
        w13=w13,
        w2=w2,
        activation="swiglu_oai" if oai else "silu",
        gated=1,
        swiglu_alpha=node["activation_alpha"] if oai else 0.0,
        swiglu_limit=node["swiglu_limit"] if oai else 0.0,
        apply_router_weight_on_input=0,
    )
    for name, value in attributes(spec).items():
        if node.get(name) != value:
            raise ValueError(f"{name} is {node.get(name)!r}, expected {value!r}")
    for (projection, name), index in INPUTS.items():
        if name in parts(spec, projection) and (want := shape(spec, projection, name)) != tuple(shapes[index]):
            raise ValueError(f"input {index} has shape {list(shapes[index])}, its attributes say {list(want)}")
    return spec


def from_attributes(kind: type[Any], attributes: Mapping[str, Any]) -> Any:
    """``Spec.from_attributes``, also of this layout, which op.def does not have since no node of ours does."""
    if NAME not in (attributes.get("w13_layout"), attributes.get("w_layout")):
        return kind.from_attributes(attributes)
    own = dict(attributes)
    projections = {
        prefix: Projection(**{f.name: own.pop(f"{prefix}_{f.name}") for f in fields(Projection)})
        for prefix in kind.OPERATOR.projections
    }
    return kind(**own, **projections)


def linear_spec(node: Mapping[str, Any], scale_type: str, zero_points: bool, bias: bool) -> LinearSpec:
    """Return what a MatMulNBits node with these attributes is.

    Raises:
        LookupError: it is none that an export wrote.
    """
    format = {SCHEMES[f].bits: f for f in ("int4", "int8")}[node["bits"]]
    w = _projection(format, node["block_size"], scale_type, zero_points=zero_points, bias=bias)
    return LinearSpec(in_features=node["K"], out_features=node["N"], w=w)
