"""compressed-tensors' ``transform_config``: matrices that a tool multiplied weights by, or that each run multiplies
activations by (QuIP, SpinQuant). Read from the library's transform module, 0.20.

- Weights are stored as they were after ``weight_input`` and ``weight_output``.
- Keys and queries are rotated after their rotary embedding, so their product is the same without two equal orthogonal
  rotations.
- The input of a linear is multiplied by a block diagonal matrix, ``<module>.<group>_input.weight`` F32 [size, size],
  over sqrt(size). The file has one tensor for all modules that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from quantmoe.custom_ops.hadamard_matrix import matrix, rotated
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.reading.checkpoint import Checkpoint, CheckpointError

#: types whose matrix times its transpose is 1
ORTHOGONAL = ("hadamard", "random-hadamard")
TYPES = (*ORTHOGONAL, "random-matrix")
STORED = ("weight_input", "weight_output")
SCORES = {"q_attn", "k_cache"}


@dataclass(frozen=True)
class Rotation:
    """The factors of a linear's input in each run: signs, then Hadamard's matrix in blocks.

    Attributes:
        size: features of a block.
        signs: of a block's features, 1 and -1; (): all are 1.
    """

    size: int
    signs: tuple[int, ...] = ()

    @classmethod
    def of(cls, m: QuantizedMatrix) -> Self | None:
        """Return a matrix's; None: its input is not rotated."""
        if not m.hadamard:
            return None
        signs = () if m.pre_scale is None else tuple(m.pre_scale[: m.hadamard].astype(int).tolist())
        return cls(m.hadamard, signs)

    def put(self, m: QuantizedMatrix) -> QuantizedMatrix:
        """Return a matrix for activations that it rotates."""
        signs = np.tile(np.array(self.signs, np.float32), m.shape[1] // self.size) if self.signs else None
        return replace(m, hadamard=self.size, pre_scale=signs)

    def folded(self, weight: np.ndarray) -> np.ndarray:
        """Return the f32 weight [N, K] for activations that are not rotated."""
        signs = np.tile(self.signs, weight.shape[1] // self.size) if self.signs else 1
        return (rotated(weight, self.size) * signs).astype(np.float32)


@dataclass(frozen=True)
class Group:
    """A group of the configuration that rotates the inputs of its targets.

    Attributes:
        matches: whether a module is a target. size: of a block; None: all of a module's inputs.
        transposed: the tensor's transpose is the matrix.
    """

    name: str
    matches: Callable[[str], bool]
    size: int | None
    transposed: bool

    @property
    def end(self) -> str:
        """The end of its tensors' names."""
        return f".{self.name}_input.weight"


class Inputs:
    """Rotations of inputs of a checkpoint's linears.

    Args:
        config: a transform_config that :func:`refusal` does not refuse.
        matches: whether a module is one of some targets.
    """

    def __init__(self, ckpt: Checkpoint, config: Mapping[str, Any], matches: Callable[[str, list[str]], bool]) -> None:
        self.ckpt = ckpt
        self.groups = [
            Group(name, _matcher(args, matches), group.get("head_dim"), bool(args.get("inverse")))
            for name, group in config.get("config_groups", {}).items()
            for args in group.get("apply", [])
            if args.get("location") == "input"
        ]
        self.ends = tuple(group.end for group in self.groups)

    def rotation(self, module: str, features: int) -> Rotation | None:
        """Return what multiplies the input of a linear; None: nothing does.

        Raises:
            CheckpointError: a matrix that is not Hadamard's with signs; names the module and what is expected.
        """
        found = [group for group in self.groups if group.matches(module)]
        if not found:
            return None
        where = f"{self.ckpt.folder}: {module}"
        if len(found) > 1:
            names = ", ".join(repr(group.name) for group in found)
            raise CheckpointError(f"{where}: the groups {names} of transform_config rotate its input, expected one")
        size = found[0].size or features
        if size & (size - 1) or features % size:
            raise CheckpointError(
                f"{where}: transform_config's group {found[0].name!r} rotates its {features} inputs in blocks of "
                f"{size}, expected a power of two that divides them (llm-compressor: transform_block_size)"
            )
        return self._rotation(found[0], size, where, module)

    def _rotation(self, group: Group, size: int, where: str, module: str) -> Rotation:
        name = self._tensor(group, size, module)
        if name is None:
            raise CheckpointError(f"{where}: {module}{group.end} is missing, and so is another of {[size, size]}")
        stored = self.ckpt.tensor(name, decides=True).astype(np.float64)
        made = stored.T if group.transposed else stored
        signs = made[:, 0]  # Hadamard's first column is ones
        if not np.array_equal(made, signs[:, None] * matrix(size)) or (np.abs(signs) != 1).any():
            raise CheckpointError(
                f"{self.ckpt.where(name)} is not Hadamard's matrix of {size} with rows of either sign, which alone "
                f"nodes multiply the input of {module} by; expected type hadamard (llm-compressor: transform_type)"
            )
        return Rotation(size, () if (signs == 1).all() else tuple(signs.astype(int).tolist()))

    def _tensor(self, group: Group, size: int, module: str) -> str | None:
        """Return the name of a module's matrix: its own, or the one that modules share."""
        own = f"{module}{group.end}"
        return own if own in self.ckpt else self._shared.get((group.end, size))

    @cached_property
    def _shared(self) -> dict[tuple[str, int], str]:
        found: dict[tuple[str, int], str] = {}
        for name in self.ckpt.names():
            if end := next((end for end in self.ends if name.endswith(end)), ""):
                found.setdefault((end, self.ckpt.shape(name)[0]), name)
        return found


def _matcher(args: Mapping[str, Any], matches: Callable[[str, list[str]], bool]) -> Callable[[str], bool]:
    targets, ignore = (_names(args.get(key) or []) for key in ("targets", "ignore"))
    return lambda module: matches(module, targets) and not matches(module, ignore)


def _names(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def refusal(config: Mapping[str, Any], cached_codes: bool) -> str:
    """Return why a ``transform_config`` is not read; "" where it is, as far as its fields say.

    Args:
        cached_codes: the checkpoint has scales of rotated keys.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return f"transform_config has {', '.join(config) or 'nothing'}, expected config_groups"
    for name, group in groups.items():
        if reason := _group_refusal(group, cached_codes):
            return f"transform_config's group {name!r}: {reason}"
    return ""


def _group_refusal(group: Any, cached_codes: bool) -> str:
    if not isinstance(group, dict) or not isinstance(applied := group.get("apply", []), list):
        return f"found {group!r}, expected type and apply"
    if (kind := group.get("type")) not in TYPES:
        return f"type {kind!r}, expected one of {', '.join(TYPES)}"
    if (size := group.get("head_dim")) is not None and (type(size) is not int or size < 1):
        return f"head_dim {size!r}, expected a positive integer or null"
    scores = []
    for args in applied:
        location = args.get("location") if isinstance(args, dict) else args
        if location in SCORES:
            where = (repr(args.get("targets")), repr(args.get("ignore") or []), bool(args.get("inverse")))
            scores.append((location, where))
        elif location == "input":
            if reason := _input_refusal(group, args):
                return reason
        elif location == "output":
            return (
                f"it multiplies the output of {args.get('targets')} by a matrix in each run, which no node does; "
                "expected rotations of inputs and of weights (llm-compressor: QuIPModifier with rotations v)"
            )
        elif location not in STORED:
            return f"location {location!r}, expected one of {', '.join((*STORED, *sorted(SCORES), 'input'))}"
    for where in {where for _, where in scores}:
        if {location for location, other in scores if other == where} != SCORES or kind not in ORTHOGONAL:
            return (
                f"{kind} on {' and '.join(location for location, _ in scores)}: scores differ without it; expected "
                f"one of {', '.join(ORTHOGONAL)} on q_attn and k_cache of the same modules"
            )
    if scores and cached_codes:
        return "k_scale is of rotated keys, which the KV cache does not hold; expected no kv_cache_scheme"
    return ""


def _input_refusal(group: Mapping[str, Any], args: Mapping[str, Any]) -> str:
    if group["type"] not in ORTHOGONAL:
        return f"{group['type']} on inputs, expected one of {', '.join(ORTHOGONAL)}"
    if group.get("randomize"):
        return "randomize with inputs: each module has features in an order of its own; expected false"
    for key in ("targets", "ignore"):
        names = _names(args.get(key) or [])
        if not all(isinstance(name, str) for name in names):
            return f"{key} {args[key]!r}, expected a list of names"
    return ""
