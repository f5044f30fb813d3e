"""compressed-tensors, as llm-compressor writes it.

Tensors of a linear with N outputs and K inputs, groups of g, b bits (read from the library's compressors 0.13 to 0.20):

- ``pack-quantized``: weight_packed I32 [N, ceil(K b / 32)], a dense bit stream along K of q + 2^(b-1).
  weight_scale [N, K/g]; weight_shape I64 [2]. weight_zero_point I32 [ceil(N b / 32), K/g] is packed along N.
  weight_g_idx I32 [K] (actorder "group", older releases).
- ``int-quantized``: weight I8 [N, K], one code a byte whatever b is; weight_scale [N, K/g]; weight_zero_point I8.
- ``float-quantized``, ``mxfp8-quantized``: weight F8_E4M3 [N, K]; weight_scale [N, K/g] or, by blocks, [N/bn, K/bk]
  (mxfp8: U8, e8m0); input_scale [1] when activations are static. ``naive-quantized`` is either of the last two.
- ``nvfp4-pack-quantized``: weight_packed U8 [N, K/2], low nibble first; weight_scale F8_E4M3 [N, K/16];
  weight_global_scale F32 [1] and, for quantized activations, input_global_scale F32 [1], which divide.
- ``mxfp4-pack-quantized``: weight_packed U8 [N, K/2]; weight_scale U8 [N, K/32], e8m0.
- ``mxfp6-pack-quantized``: weight_packed U8 [N, 3 K/4], a dense bit stream of e2m3; weight_scale as mxfp4's. Codes are
  carried as e4m3's of the same numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import regex

from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError, is_outline
from quantmoe.exporter.reading.weights import rotations
from quantmoe.exporter.reading.weights.affine import growth
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
    matches,
)
from quantmoe.exporter.reading.weights.bits import as_e4m3, in_order, unpack_nibbles, unpack_words

#: (storage, type of number, bits) of weights -> op.def's format; integers' are :func:`integer_kind`'s
WEIGHTS = {
    (storage, "int", bits): "int"
    for storage in ("pack-quantized", "int-quantized", "naive-quantized")
    for bits in range(2, 9)
} | {
    ("naive-quantized", "float", 8): "fp8_e4m3",
    ("float-quantized", "float", 8): "fp8_e4m3",
    ("mxfp8-quantized", "float", 8): "fp8_e4m3",
    ("nvfp4-pack-quantized", "float", 4): "nvfp4",
    ("mxfp4-pack-quantized", "float", 4): "mxfp4",
    ("mxfp6-pack-quantized", "float", 6): "fp8_e4m3",
}
#: (type of number, bits, strategy, group size, dynamic, symmetric) of activations -> op.def's activation_format
ACTIVATIONS = {
    ("int", 8, "token", -1, True, True): "int8_token",
    ("int", 8, "token", -1, True, False): "int8_token_asym",
    ("float", 8, "token", -1, True, True): "fp8_token",
    ("float", 8, "tensor", -1, True, True): "fp8_tensor",
    ("float", 8, "tensor", -1, False, True): "fp8_tensor",
    ("float", 8, "group", 128, True, True): "fp8_group128",
    ("float", 8, "group", 32, True, True): "mxfp8",
    ("float", 4, "group", 32, True, True): "mxfp4",
    ("float", 4, "tensor_group", 16, "local", True): "nvfp4",
}


#: last names of transformers' embeddings in decoders; what else has quantized tensors is a linear
EMBEDDINGS = ("embed_tokens", "word_embeddings", "wte")


@dataclass(frozen=True, kw_only=True)
class Args:
    """The fields of the library's QuantizationArgs that decide numerics."""

    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    dynamic: bool | str
    actorder: str | None

    @property
    def columns(self) -> int:
        """Input features that share a scale, -1 for all."""
        return self.block[1] if self.strategy == "block" and self.block else self.group_size

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Args:
        group_size, strategy, block = raw.get("group_size"), raw.get("strategy"), raw.get("block_structure")
        if isinstance(block, str):  # "128x128" in older releases
            block = [int(b) for b in block.split("x")]
        if block is None and strategy == "block":
            raise ValueError("strategy block without block_structure")
        if block is not None and not (len(block) == 2 and all(type(b) is int and b > 0 for b in block)):
            raise ValueError(f"block_structure {block!r}, expected two positive integers")
        if type(symmetric := raw.get("symmetric", True)) is not bool:
            raise ValueError(f"symmetric {symmetric!r}, expected true or false")
        if strategy is None:  # the library's own inference
            strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        return cls(
            num_bits=int(raw.get("num_bits", 8)),
            type=str(raw.get("type", "int")).lower(),
            symmetric=symmetric,
            strategy=str(strategy).lower(),
            group_size=-1 if group_size is None else group_size_of(group_size),
            block=tuple(block) if block else None,
            dynamic=dynamic if isinstance(dynamic := raw.get("dynamic", False), str) else bool(dynamic),
            actorder=str(raw["actorder"]) if raw.get("actorder") else None,
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """One entry of config_groups."""

    name: str
    format: str
    targets: tuple[str, ...]
    weights: Args
    inputs: Args | None
    outputs: Args | None

    @property
    def text(self) -> str:
        w, a = self.weights, self.inputs
        size = f"group {w.group_size}" if "group" in w.strategy else "x".join(map(str, w.block or (w.strategy,)))
        activations = "A16" if a is None else f"A{a.num_bits} ({a.type}, {a.strategy})"
        symmetric = "" if w.symmetric else " asymmetric"
        order = f", actorder {w.actorder}" if w.actorder else ""
        return f"compressed-tensors {self.format} {w.type}{w.num_bits}{symmetric} {activations} {size}{order}"


class CompressedTensors(Format):
    name = "compressed-tensors"
    reads: ClassVar[tuple[Reads, ...]] = (
        Reads(
            "`pack-quantized` and `int-quantized` in 4 and 8 bits, `float-quantized`, `naive-quantized`, nvfp4, mxfp4, "
            "mxfp8",
            (
                "llmcompressor-*",
                "autoround-as_ct-*",
                *(f"compressed-tensors-0.20-{name}" for name in ("w4*", "fp8-*", "mxfp4", "mxfp8", "embedding")),
            ),
        ),
        Reads(
            "`pack-quantized` in 2 and 3 bits, `int-quantized` in 2",
            ("compressed-tensors-0.20-w2*", "test_other_bits_of_compressed_tensors"),
            cuda="wider: 4 bits",
        ),
        Reads(
            "`pack-quantized` in 5 and 6 bits",
            ("compressed-tensors-0.20-w5_w6", "test_other_bits_of_compressed_tensors"),
            cuda="wider: 8 bits",
        ),
        Reads(
            "int4 activations (W4A4)",
            ("test_unsupported_scheme_is_named",),
            exported="refused: no kernel rounds to them",
        ),
        Reads("`mxfp6-pack-quantized`", ("compressed-tensors-0.20-mxfp6",), exported="wider: fp8 e4m3"),
        Reads("`pack-quantized` in 7 bits", ("test_other_bits_of_compressed_tensors",), exported="wider: 8 bits"),
        Reads(
            "`transform_config`: rotations in the weights (SpinQuant's R1, R2), equal ones of queries and keys (R3)",
            ("test_rotations",),
        ),
        Reads(
            "`transform_config`: Hadamard matrices that multiply inputs of experts' down_proj (SpinQuant's R4, QuIP), "
            "in blocks of a power of two, also with signs",
            ("compressed-tensors-0.20-quip-nvfp4", "compressed-tensors-0.20-spinquant"),
            cuda="no",
        ),
        Reads("`transform_config`: these matrices for inputs of other linears", ("test_rotations",)),
        Reads(
            "`transform_config`: other matrices on inputs, and matrices on outputs",
            ("test_rotations",),
            exported="refused: each run multiplies activations by them, which no node does",
        ),
    )
    marks = ("weight_packed", "weight_scale")

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt)
        raw = ckpt.quantization
        config = ckpt.folder / CONFIG
        transforms = raw.get("transform_config")
        if transforms and (reason := rotations.refusal(transforms, bool(raw.get("kv_cache_scheme")))):
            raise CheckpointError(f"{config}: {reason}")
        if (sparsity := (raw.get("sparsity_config") or {}).get("format", "dense")) != "dense":
            raise CheckpointError(f"{config}: sparsity_config format {sparsity!r} is not supported; expected dense")
        if sparsity := raw.get("moe_sparsity_config"):
            raise CheckpointError(
                f"{config}: moe_sparsity_config {sparsity!r}: layers differ in their number of experts; expected null"
            )
        self.ignore = [_compiled(target) for target in _targets(raw.get("ignore") or [], "ignore")]
        groups = [self._group(name, g) for name, g in (raw.get("config_groups") or {}).items()]
        found = {target: group for group in groups for target in group.targets}  # of two groups the last has a target
        in_order = sorted(found, key=lambda target: ("re:" in target, target))  # the library's, not the configuration's
        self.targets = {_compiled(target): found[target] for target in in_order}
        self.rotated = rotations.Inputs(ckpt, transforms or {}, self._is_one_of)
        #: module -> what :meth:`group` found: it is asked several times, and patterns with a time limit take 8 us each
        self._groups: dict[str, Group] = {}
        self._rotations: dict[str, rotations.Rotation | None] = {}

    @staticmethod
    def claims(quantization: dict[str, Any]) -> bool:
        return quantization.get("quant_method") in ("compressed-tensors", "compressed_tensors")

    def _group(self, name: str, raw: Any) -> Group:
        if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
            raise CheckpointError(f"{self.ckpt.folder / 'config.json'}: config group {name} describes no weights")
        inputs, outputs = raw.get("input_activations"), raw.get("output_activations")
        return Group(
            name=name,
            format=str(raw.get("format") or self.ckpt.quantization.get("format")),
            targets=tuple(_targets(raw.get("targets"), f"targets of {name}")),
            weights=Args.parse(raw["weights"]),
            inputs=Args.parse(inputs) if inputs else None,
            outputs=Args.parse(outputs) if outputs else None,
        )

    def group(self, module: str) -> Group:
        """Return the config group of a quantized module, as ``apply_quantization_config`` finds it (the same in 0.13 to
        0.20).

        The module's name wins over patterns, these over classes; among patterns and among classes the alphabet decides.

        Raises:
            CheckpointError: ``ignore`` names the module, or no group targets it.
        """
        if module in self._groups:
            return self._groups[module]
        classes = "Embedding" if module.rpartition(".")[2] in EMBEDDINGS else "Linear", "Module"
        if any(target in classes or _named(module, target) for target in self.ignore):
            raise CheckpointError(
                f"{self.ckpt.folder}: {module} has quantized tensors, but the configuration's ignore says that it is "
                "not quantized"
            )
        named = (group for target, group in self.targets.items() if _named(module, target))
        found = next(named, None) or next((self.targets[c] for c in classes if c in self.targets), None)
        if found is None:
            raise CheckpointError(f"{self.ckpt.folder}: {module} has quantized tensors but no config group targets it")
        self._groups[module] = found
        return found

    def _is_one_of(self, module: str, targets: list[str]) -> bool:
        """Return whether targets name a module, or its class: a linear is quantized, or ``ignore`` names it."""
        classes = {"Linear", "Module"} if module.rpartition(".")[2] not in EMBEDDINGS else set()
        if classes & {*targets} and (
            self.is_quantized(module) or any(_named(module, target) for target in self.ignore)
        ):
            return True
        return any(_named(module, _compiled(target)) for target in targets)

    def rotation(self, module: str, features: int) -> rotations.Rotation | None:
        if module not in self._rotations:
            self._rotations[module] = self.rotated.rotation(module, features)
        return self._rotations[module]

    def parameters(self) -> list[str]:
        return [name for name in super().parameters() if not name.endswith(self.rotated.ends)]

    def scheme(self, module: str) -> ModuleScheme:
        group, kind = self.group(module), self._kind(module)
        packed = group.format == "pack-quantized"
        text = group.text + (carried_wider(kind, group.weights.num_bits) if packed else "")
        if group.format == "mxfp6-pack-quantized":
            text += growth(kind, 8, group.weights.columns, 6.25)
        return ModuleScheme(kind, group.weights.columns, self._activations(module, group), text)

    def _kind(self, module: str) -> str:
        group = self.group(module)
        kind = WEIGHTS.get((group.format, group.weights.type, group.weights.num_bits))
        if kind is None:
            supported = ", ".join(f"{storage} {type}{bits}" for storage, type, bits in WEIGHTS)
            raise CheckpointError(f"{self.ckpt.folder}: {module} is {group.text}; supported: {supported}")
        if a := group.outputs:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: output_activations {a.type}{a.num_bits} per {a.strategy} are not "
                "supported; expected none"
            )
        if kind == "int":
            return integer_kind(group.weights.num_bits, group.weights.columns, self.own_widths)
        return kind

    def _activations(self, module: str, group: Group) -> str:
        a = group.inputs
        if a is None:
            return "none"
        found = ACTIVATIONS.get((a.type, a.num_bits, a.strategy, a.group_size, a.dynamic, a.symmetric))
        if found is None:
            raise CheckpointError(
                f"{self.ckpt.folder}: {module}: input_activations {a.type}{a.num_bits} per {a.strategy}, "
                f"{'dynamic' if a.dynamic else 'static'}, with weights per {group.weights.strategy} are not supported; "
                f"supported: {', '.join(dict.fromkeys(ACTIVATIONS.values()))} (see op.def), none"
            )
        return found

    def matrix(self, module: str) -> QuantizedMatrix:
        kind = self._kind(module)
        if SCHEMES[kind].integer:
            return self._integer(module, kind)
        self.no_zero_points(module)
        if self.group(module).format == "mxfp6-pack-quantized":
            return self._fp6(module)
        return self._fp8(module) if kind == "fp8_e4m3" else self._fp4(module, kind)

    def _integer(self, module: str, kind: str) -> QuantizedMatrix:
        group = self.group(module)
        w, bits, g = group.weights, group.weights.num_bits, group.weights.columns
        packed = group.format == "pack-quantized"
        n, k = self._packed_shape(module) if packed else self.shape2d(f"{module}.weight")
        groups = 1 if g == -1 else -(-k // g)
        scales = (1,) if w.strategy == "tensor" else (n, groups)
        declared = (
            [
                Tensor("weight_packed", ("I32",), (n, -(-k * bits // 32))),
                Tensor("weight_zero_point", ("I32",), (-(-n * bits // 32), groups), not w.symmetric, decides=True),
            ]
            if packed
            else [
                Tensor("weight", ("I8",), (n, k)),
                Tensor("weight_zero_point", ("I8",), scales, not w.symmetric, decides=True),
            ]
        )
        tensors = self.take(
            module,
            [*declared, Tensor("weight_scale", FLOATS, scales), Tensor("weight_g_idx", ("I32",), (k,), required=False)],
        )
        middle = np.uint8(1 << (bits - 1))
        codes = unpack_words(tensors["weight_packed"], bits, k) if packed else tensors["weight"].view(np.uint8) + middle
        if not packed and codes.max(initial=0) >> bits:
            raise CheckpointError(f"{self.ckpt.where(module + '.weight')} has values outside int{bits}")
        zero_points = None
        if (stored := tensors.get("weight_zero_point")) is not None:
            zero_points = (
                np.ascontiguousarray(unpack_words(stored.T, bits, n).T)
                if packed
                else np.broadcast_to(stored.view(np.uint8) + middle, (n, groups))
            )
        if w.symmetric and zero_points is not None:
            if (zero_points != middle).any():
                raise self.odd_zero_points(f"{module}.weight_zero_point")
            zero_points = None
        if (more := np.uint8(SCHEMES[kind].zero - middle)) and not is_outline(codes):
            codes = codes + more
            zero_points = None if zero_points is None else zero_points + more
        perm = None
        if "weight_g_idx" in tensors and g != -1:
            perm = group_order(tensors["weight_g_idx"], g, self.ckpt.where(f"{module}.weight_g_idx"))
        return QuantizedMatrix(
            kind=kind,
            codes=in_order(codes, perm),
            scales=np.broadcast_to(tensors["weight_scale"], (n, groups)),
            group_size=g,
            zero_points=zero_points,
            bias=self.bias(module, n),
            perm=perm,
        )

    def _fp8(self, module: str) -> QuantizedMatrix:
        group = self.group(module)
        w, a, g = group.weights, group.inputs, group.weights.columns
        n, k = self.shape2d(f"{module}.weight")
        bn = w.block[0] if w.block else 1
        want = (-(-n // bn), 1 if g == -1 else -(-k // g))
        mx = group.format == "mxfp8-quantized"
        tensors = self.take(
            module,
            [
                Tensor("weight", ("F8_E4M3",), (n, k)),
                Tensor("weight_scale", ("U8", "F8_E8M0") if mx else FLOATS, (1,) if w.strategy == "tensor" else want),
                Tensor("input_scale", FLOATS, (1,), required=a is not None and not a.dynamic),
            ],
        )
        scales = tensors["weight_scale"]
        return QuantizedMatrix(
            kind="fp8_e4m3",
            codes=tensors["weight"].view(np.uint8),
            scales=np.broadcast_to(scales.view(SCALE_DTYPES["e8m0"]) if mx else scales, want),
            group_size=g,
            block_n=bn,
            input_scale=tensors["input_scale"].item() if "input_scale" in tensors else None,
            bias=self.bias(module, n),
        )

    def _fp4(self, module: str, kind: str) -> QuantizedMatrix:
        group = self.group(module)
        n, half = self.shape2d(f"{module}.weight_packed")
        g = group.weights.columns
        nv = kind == "nvfp4"
        tensors = self.take(
            module,
            [
                Tensor("weight_packed", ("U8",), (n, half)),
                Tensor("weight_scale", ("F8_E4M3",) if nv else ("U8", "F8_E8M0"), (n, -(-2 * half // g))),
                Tensor("weight_global_scale", ("F32",), (1,), required=nv),
                Tensor("input_global_scale", ("F32",), (1,), required=nv and group.inputs is not None),
            ],
        )
        scales = tensors["weight_scale"]
        return QuantizedMatrix(
            kind=kind,
            codes=unpack_nibbles(tensors["weight_packed"]),
            scales=scales if nv else scales.view(SCALE_DTYPES["e8m0"]),
            group_size=g,
            global_scale=_reciprocal(tensors.get("weight_global_scale")),
            input_scale=_reciprocal(tensors.get("input_global_scale")),
            bias=self.bias(module, n),
        )

    def _fp6(self, module: str) -> QuantizedMatrix:
        n, octets = self.shape2d(f"{module}.weight_packed")
        k, g = octets * 4 // 3, self.group(module).weights.columns
        tensors = self.take(
            module,
            [
                Tensor("weight_packed", ("U8",), (n, k * 3 // 4)),
                Tensor("weight_scale", ("U8", "F8_E8M0"), (n, -(-k // g))),
            ],
        )
        return QuantizedMatrix(
            kind="fp8_e4m3",
            codes=as_e4m3(unpack_words(tensors["weight_packed"], 6, k), exponent_bits=2),
            scales=tensors["weight_scale"].view(SCALE_DTYPES["e8m0"]),
            group_size=g,
            bias=self.bias(module, n),
        )

    def _packed_shape(self, module: str) -> tuple[int, int]:
        n, k = self.take(module, [Tensor("weight_shape", ("I64", "I32"), (2,))])["weight_shape"].tolist()
        if n <= 0 or k <= 0:
            raise CheckpointError(f"{self.ckpt.where(module + '.weight_shape')} is {[n, k]}, expected positive sizes")
        return n, k


def _reciprocal(stored: np.ndarray | None) -> float | None:
    """Return a global scale of nvfp4, which the library stores as its inverse."""
    return None if stored is None else float(np.float32(1) / stored.item())


def _targets(raw: Any, what: str) -> list[str]:
    if not (isinstance(raw, list) and all(isinstance(target, str) for target in raw)):
        raise ValueError(f"{what} {raw!r}, expected a list of names")
    return raw


def _compiled(target: str) -> str | regex.Pattern[str]:
    """Return a target; patterns mean what Python's re makes of them, which the library uses.

    Raises:
        ValueError: it is no pattern, or regex, which has a time limit, would read it otherwise.
    """
    if not target.startswith("re:"):
        return target
    pattern = target[3:]
    if re.search(r"\{(?!\d*,?\d*\})|\[\[|\[:", pattern):  # fuzzy matches and named classes
        raise ValueError(f"target {target!r}: braces that are not a count, or [[ or [: , which re takes as they stand")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"target {target!r}: {error}") from None
    return regex.compile(pattern)


def _named(module: str, target: str | regex.Pattern[str]) -> bool:
    return module == target if isinstance(target, str) else matches(target, module)
