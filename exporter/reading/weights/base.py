"""The interface of a checkpoint format, and the loop that checks tensors against its declarations."""

from __future__ import annotations

import contextlib
import copy
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, Self

import numpy as np
import regex

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import PLANE_INTEGERS, QuantizedMatrix, portion
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.reading import families
from quantmoe.exporter.reading.checkpoint import Checkpoint, unlike_rows
from quantmoe.exporter.reading.config_fields import reading
from quantmoe.exporter.reading.slices import Cut, Slice
from quantmoe.exporter.reading.weights import kv_cache
from quantmoe.exporter.reading.weights.rotations import Rotation
from quantmoe.exporter.reading.weights.rounding import quantized
from quantmoe.exporter.safetensors_file import DTYPES


@dataclass(frozen=True)
class Tensor:
    """A tensor that a format expects beside a module: ``<module>.<suffix>``.

    Attributes:
        decides: whether :meth:`Format.matrix` looks at its numbers, as at zero points that may all be the middle:
            outlines read it.
    """

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    required: bool = True
    decides: bool = False


@dataclass(frozen=True)
class Reads:
    """A row of docs/reference/formats.md: checkpoints of a format that are exported alike.

    Attributes:
        what: the tool's words for it.
        tests: fixtures that the tool wrote, by a pattern of their names, or test functions.
        exported: "same": with as many bits as in the checkpoint. "wider: ..": the same values in more bits.
        cuda: whether CUDA kernels take it: yes, no, "yes *" with ``--scales bf16``, or text such as "wider: ..".
        tool: who writes it, if not the tool that the format is called by.
    """

    what: str
    tests: tuple[str, ...]
    exported: str = "same"
    cuda: str = "yes"
    tool: str = ""


@dataclass(frozen=True)
class ModuleScheme:
    """The quantization of a module, in op.def's words.

    Attributes:
        format: what a weight code means.
        group_size: input features that share a scale, -1 for the whole row.
        activation_format: how the checkpoint says activations are quantized.
        text: the tool's own words, for people: nothing is read out of it.
    """

    format: str
    group_size: int
    activation_format: str
    text: str


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """A shared expert, read as some experts of the routed ones' width.

    Attributes:
        modules: of gate (when gated), up and down, as :class:`MoELayer` has them.
        count: of those experts; each has the next rows of gate and up, and the next columns of down.
    """

    modules: tuple[str, ...]
    count: int
    format: Format

    @property
    def name(self) -> str:
        """Path of it in the checkpoint, e.g. ``model.layers.0.mlp.shared_expert``."""
        return self.modules[0].rpartition(".")[0]

    def names(self) -> list[str]:
        """Return the names of the experts, as ``unpack`` calls them."""
        return [self.name] if self.count == 1 else [f"{self.name}.{i}" for i in range(self.count)]

    def expert(self, i: int) -> Expert:
        """Decode one of them.

        Raises:
            CheckpointError: see :meth:`MoELayer.expert`.
            ValueError: a projection cannot be divided.
        """
        *inputs, down = (self.format.matrix_of(module) for module in self.modules)
        rows = [portion(m, i, self.count, axis=0) for m in inputs]
        return Expert(rows[0] if len(rows) == 2 else None, rows[-1], portion(down, i, self.count, axis=1))


@dataclass(frozen=True, eq=False, kw_only=True)
class MoELayer:
    """The experts of one layer, read one at a time.

    Attributes:
        name: path of the experts in the checkpoint, e.g. ``model.layers.0.mlp.experts``.
        index: the layer's number in the model.
        scheme: of gate and up. Experts share the activation_format, but may differ in width, group size and order.
        down_scheme: of down.
        num_experts: routed ones.
        shared: which are the experts from ``num_experts`` on.
        members: of one of the layer's :meth:`groups` its experts; None: all of the layer's.
    """

    name: str
    index: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool
    top_k: int
    scheme: ModuleScheme
    down_scheme: ModuleScheme
    swiglu_alpha: float
    swiglu_limit: float
    apply_router_weight_on_input: bool
    format: Format
    projections: tuple[str, ...]
    """Names of gate (when gated), up and down; () when the tool fuses experts into 3-D tensors."""
    shared: SharedExpert | None = None
    members: tuple[int, ...] | None = None

    @property
    def every(self) -> int:
        """Routed and shared experts."""
        return self.num_experts + (self.shared.count if self.shared else 0)

    @property
    def ids(self) -> Sequence[int]:
        """The ids of the experts in a file, in its order: all of them, a rank's, or a group's."""
        return self._held if self.members is None else tuple(e for e in self._held if e in self.members)

    @property
    def _held(self) -> Sequence[int]:
        """The layer's, whatever the group."""
        part = self.format.slice
        return part.ids(self.every, self.num_experts, self.index) if part else range(self.every)

    @property
    def span(self) -> tuple[int, int]:
        """The first of the node's ids that is in its file, and how many ids the node knows.

        A node after a table counts its file's experts from 0. A group without experts in the rank has the layer's span.
        """
        ids = self.ids
        return (ids.start, self.every) if isinstance(ids, range) else (0, len(ids) or self.every)

    def table(self) -> np.ndarray | None:
        """Return the node's row of each expert, int64 [copies, every]; -1 where it has none.

        A rank whose experts come from a map has a table (:meth:`Placement.table`), and each of several groups has one.
        Others have None: ``expert_offset`` gives their rows.
        """
        part, held = self.format.slice, self._held
        if part is None or part.placements is None:
            if self.members is None:
                return None
            found = np.full((1, self.every), -1)
            found[0, held] = np.arange(len(held))
        else:
            found = part.placements[self.index].table(part.rank, self.every)
            for at, expert in enumerate(held):
                if expert >= self.num_experts:
                    found[:, expert] = at
        if self.members is None:
            return found
        rows = {at: row for row, at in enumerate(at for at, e in enumerate(held) if e in self.members)}
        return np.vectorize(lambda at: rows.get(at, -1), otypes=[np.int64])(found)

    def groups(self) -> list[MoELayer]:
        """Return the layer in groups that a node can hold. Most layers are one group, the layer itself.

        Experts of a group have equal formats, group sizes, types of scales and formats of activations.

        Raises:
            CheckpointError: see :meth:`expert`.
        """
        if not self.projections:
            return [self]
        outline = self.outline()
        found: dict[object, list[int]] = {}
        kinds: dict[object, object] = {}
        for e, stored in enumerate(self._stored):
            if (alike := repr(stored)) not in kinds:
                expert = outline.expert(e)
                matrices = [m for m in (expert.gate, expert.up, expert.down) if m is not None]
                weights = [(m.kind, m.group_size, m.block_n, m.scale_type) for m in matrices]
                kinds[alike] = repr((weights, [scheme.activation_format for scheme in stored[1]]))
            found.setdefault(kinds[alike], []).append(e)
        if len(found) == 1:
            return [self]
        made = []
        for members in found.values():
            schemes = self._stored[members[0]][1]
            made.append(replace(self, members=tuple(members), scheme=schemes[0], down_scheme=schemes[-1]))
        return made

    @property
    def title(self) -> str:
        """Its name, of a group with its experts: ``model.layers.0.mlp.experts (0-2, 5)``."""
        if self.members is None:
            return self.name
        runs: list[list[int]] = []
        for e in self.members:
            if runs and e == runs[-1][-1] + 1:
                runs[-1][1:] = [e]
            else:
                runs.append([e])
        return f"{self.name} ({', '.join('-'.join(map(str, run)) for run in runs)})"

    @property
    def width(self) -> int:
        """Intermediate size of an expert in a file: all of it, or a rank's part."""
        where = f"{self.format.ckpt.folder}: intermediate size of {self.name}"
        return self.format.slice.width(self.intermediate_size, where) if self.format.slice else self.intermediate_size

    @property
    def scheme_text(self) -> str:
        """The scheme in the tool's words, and down's where it is another."""
        same = self.down_scheme == self.scheme
        return self.scheme.text if same else f"{self.scheme.text}; down: {self.down_scheme.text}"

    def label(self, e: int) -> str:
        """Return what ``unpack`` and errors call expert ``e``."""
        shared = e - self.num_experts
        return f"{self.name}.{e}" if shared < 0 or self.shared is None else self.shared.names()[shared]

    def tensors(self, e: int) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
        """Return names, dtypes and shapes of expert ``e``'s tensors, from the headers; of all experts when fused."""
        modules = [f"{self.name}.{e}.{projection}" for projection in self.projections] or [self.name]
        return [self.format.ckpt.beside(module) for module in modules]

    def outline(self) -> MoELayer:
        """Return the layer with outlines of its experts (:meth:`Format.outline`)."""
        shared = self.shared and replace(self.shared, format=self.shared.format.outline())
        return replace(self, format=self.format.outline(), shared=shared)

    def expert(self, e: int) -> Expert:
        """Decode expert ``e``, or a rank's part of it.

        Raises:
            CheckpointError: naming file, tensor, found and expected.
        """
        if not 0 <= e < self.every:
            raise IndexError(f"{self.name} has {self.every} experts, asked for {e}")
        if self.shared and e >= self.num_experts:
            return self.shared.expert(e - self.num_experts)
        expert = self._named(e) if self.projections else self.format.fused_expert(self, e)
        if self.format.slice is None:
            return expert
        with dividing(self.format, self.label(e)):
            return self.format.slice.expert(expert, self.down_scheme.activation_format)

    def _named(self, e: int) -> Expert:
        sizes = {"down": (self.hidden_size, self.intermediate_size)}
        found: dict[str, QuantizedMatrix] = {}
        for role, name in zip(("gate", "up", "down")[-len(self.projections) :], self.projections, strict=True):
            module = f"{self.name}.{e}.{name}"
            matrix = self.format.matrix_of(module)
            want = sizes.get(role, (self.intermediate_size, self.hidden_size))
            if matrix.shape != want:
                raise CheckpointError(
                    f"{self.format.ckpt.folder}: {module} is {list(matrix.shape)}, expected {list(want)} (config.json)"
                )
            found[role] = matrix
        return Expert(found.get("gate"), found["up"], found["down"])

    @property
    def routed(self) -> Sequence[int]:
        """The routed experts of the group, or of the layer."""
        return range(self.num_experts) if self.members is None else [e for e in self.members if e < self.num_experts]

    def odd(self) -> list[int]:
        """Return experts whose tensors or configuration differ from the first expert's, in names, types or shapes."""
        first, *others = self.routed
        return [e for e in others if self._stored[e] != self._stored[first]]

    @cached_property
    def _stored(self) -> list[tuple[object, list[ModuleScheme]]]:
        """The tensors and schemes of each routed expert, from headers and configuration."""
        of = self.format.scheme_of
        return [
            (self.tensors(e), [of(f"{self.name}.{e}.{projection}") for projection in self.projections])
            for e in range(self.num_experts)
        ]

    @property
    def halves(self) -> tuple[slice, slice]:
        """Rows of gate and of up where the model keeps the two in one tensor."""
        return families.halves(self.format.ckpt.text_config, self.intermediate_size)

    def __iter__(self) -> Iterator[Expert]:
        return (self.expert(e) for e in range(self.every))


class Format(ABC):
    """One checkpoint format, bound to a checkpoint whose configuration it has parsed."""

    #: how people call it
    name: ClassVar[str]
    #: suffixes of tensors that exist only beside a quantized module
    marks: ClassVar[tuple[str, ...]]
    #: ends of the names of tensors that hold all experts of a layer
    fused: ClassVar[tuple[str, ...]] = ()
    #: for the reference page
    reads: ClassVar[tuple[Reads, ...]] = ()

    def __init__(self, ckpt: Checkpoint) -> None:
        self.ckpt = ckpt
        #: whether stored scales of activations are read and must be numbers; models with float activations need none
        self.input_scales = True
        #: module that the checkpoint has in floats -> (kind, group size) that it is rounded to as asked
        self.rounding: dict[str, tuple[str, int]] = {}
        #: whether integers of 2, 3, 5 and 6 bits keep their width; otherwise int4 or int8 carries them
        self.own_widths = False
        #: the rank whose part of the model is read; None: all of it
        self.slice: Slice | None = None
        #: tensor outside the experts -> the part of it that the rank has
        self.cuts: dict[str, Cut] = {}
        #: files that :meth:`beside` found the part in, which are no shards of the model
        self.unlisted: list[str] = []
        #: a key of BESIDE: that part and what it shares with the text model; "": the text model
        self.part = ""

    def beside(self, part: str) -> Format | None:
        """Return this format for a part beside the text model; None if the checkpoint has no such part.

        It may be in a file that no index lists: tools that do not quantize it copy it from the source.
        """
        if not self._has(part):
            drafting = families.drafting_prefixes(self.ckpt.text_config) if part == MTP else ()
            self.unlisted = self.ckpt.adopt(BESIDE[part] + drafting)
            self.__dict__.pop("next_layer", None)
        if not self._has(part):
            return None
        twin = copy.copy(self)
        twin.part = part
        return twin

    def _has(self, part: str) -> bool:
        return any(name.startswith(self.prefixes(part)) for name in self.ckpt.names())

    def prefixes(self, part: str) -> tuple[str, ...]:
        """Return how the names of the tensors of a part beside the text model begin."""
        return BESIDE[part] + ((self.next_layer,) if part == MTP and self.next_layer else ())

    @cached_property
    def next_layer(self) -> str:
        """The prefix of a layer that drafts and is no ``mtp.``; "": none."""
        return families.drafting_layer(self.ckpt.text_config, self.ckpt.names())

    @property
    def without_experts(self) -> bool:
        """This part has no experts, or none that a node computes."""
        if not self.part:
            return families.has_rows_for_experts(self.ckpt.text_config)
        return families.drafts_without_experts(self.next_layer)

    def _later_layers(self) -> list[str]:
        """Return the tensors of layers that draft beside the first one."""
        found: list[str] = []
        if self.next_layer == families.EAGLE3:
            return [name for name in self.ckpt.names() if name.startswith(BESIDE[MTP])]
        for first in [self.next_layer] if self.next_layer else [f"{prefix}layers.0." for prefix in BESIDE[MTP]]:
            stem, number = first.removesuffix(".").rsplit(".", 1)
            layers = ((name, re.match(rf"{re.escape(stem)}\.(\d+)\.", name)) for name in self.ckpt.names())
            found += [name for name, layer in layers if layer and int(layer[1]) > int(number)]
        return found

    @property
    def own_global_scales(self) -> bool:
        """True if each matrix has a global scale, which only its values show."""
        return False

    def outline(self) -> Self:
        """Return this format over headers: its decoders give matrices and refusals, without time or memory.

        What a matrix has (types, shapes, act-order, which scales and zero points) is as in the checkpoint. Its codes
        and other numbers are ones, except vectors and what a decoder looks at.
        """
        twin = copy.copy(self)
        twin.ckpt = self.ckpt.outline
        return twin

    def with_widths(self, own: bool) -> Self:
        """Return this format for a target that has kernels for integers of 2, 3, 5 and 6 bits, or has none."""
        twin = copy.copy(self)
        twin.own_widths = own
        return twin

    @staticmethod
    @abstractmethod
    def claims(quantization: dict[str, Any]) -> bool:
        """Return whether this format wrote a checkpoint with this quantization configuration."""

    @abstractmethod
    def scheme(self, module: str) -> ModuleScheme:
        """Return how a quantized module is quantized.

        Raises:
            CheckpointError: when it is not supported; names the module, the scheme and what is supported.
        """

    @abstractmethod
    def matrix(self, module: str) -> QuantizedMatrix:
        """Decode a quantized linear module, losslessly.

        Raises:
            CheckpointError: naming file, tensor, found and expected.
        """

    def rotation(self, module: str, features: int) -> Rotation | None:
        """Return what multiplies the input of a linear in each run; None: nothing does.

        Raises:
            CheckpointError: it is no :class:`Rotation`; names the module and what is expected.
        """
        return None

    def fused_expert(self, layer: MoELayer, e: int) -> Expert:
        """Decode one expert of a layer that the tool stores in 3-D tensors."""
        raise NotImplementedError

    def is_quantized(self, module: str) -> bool:
        return any(f"{module}.{mark}" in self.ckpt for mark in self.marks)

    def scheme_of(self, module: str) -> ModuleScheme:
        """:meth:`scheme`, or of a module that the tool left alone: what it is rounded to, or its 16-bit type."""
        if self.is_quantized(module):
            with reading(f"{self.ckpt.folder}: the configuration of {module} cannot be read as {self.name}'s"):
                return self.scheme(module)
        if module in self.rounding:
            return searched_scheme(*self.rounding[module])
        return float_scheme(self.ckpt.dtype(f"{module}.weight"))

    def matrix_of(self, module: str) -> QuantizedMatrix:
        """:meth:`matrix`, or the floats rounded as asked, or the 16-bit weights as they are; or a rank's part of them.

        Raises:
            CheckpointError: see :meth:`matrix`; the part would divide what shares a scale, or is in act-order.
        """
        if (cut := self.cuts.get(f"{module}.weight")) is None:
            return self._whole(module)
        with dividing(self, module):
            return cut.matrix(self._whole(module))

    def _whole(self, module: str) -> QuantizedMatrix:
        found = self._unrotated(module)
        rotation = self.rotation(module, found.shape[1])
        return found if rotation is None else rotation.put(found)

    def _unrotated(self, module: str) -> QuantizedMatrix:
        if self.is_quantized(module):
            return self.matrix(module)
        n, k = self.shape2d(f"{module}.weight")
        if module in self.rounding:
            weight = self.take(module, [Tensor("weight", FLOATS, (n, k))])["weight"]
            where = f"{self.ckpt.folder}: {module}"
            kind, group_size = self.rounding[module]
            return quantized(weight, self.bias(module, n), kind, group_size=group_size, where=where)
        weight = self.take(module, [Tensor("weight", tuple(FLOAT_KINDS), (n, k))])["weight"]
        return unrounded(weight, self.bias(module, n))

    def kv_cache(self) -> str:
        """Return a remark when the checkpoint wants its KV cache quantized; else ""."""
        found = kv_cache.find(self.ckpt)
        return found.remark if found else ""

    def attention(self, first: int | None = None) -> str:
        """Return how many layers each type of attention has, by config.json; "" for models with one type.

        Args:
            first: of so many layers at the beginning; None: of all.
        """
        kinds = families.layer_kinds(self.ckpt.text_config)
        types = [kind for kind in kinds[:first] if kind not in ("moe", "mlp")]  # blocks without attention
        if len(set(types)) < 2:
            return ""
        return ", ".join(f"{n} layers of {kind.replace('_', ' ')}" for kind, n in Counter(types).items())

    def left_out(self, exported: str = "") -> str:
        """Return a remark naming the parts of the checkpoint beside its text model, which alone is exported; else "".

        Args:
            exported: another part; of multi-token prediction it is the first layer.
        """
        parts = []
        for part in BESIDE:
            names = [name for name in self.ckpt.names() if name.startswith(self.prefixes(part))]
            what = part
            if part == exported:
                names, what = self._later_layers() if part == MTP else [], f"the later layers of {part}"
            if names:
                size = sum(DTYPES[self.ckpt.dtype(n)].itemsize * prod(self.ckpt.shape(n)) for n in names)
                parts.append(f"{what} ({names[0]} and {len(names) - 1} more tensors, {size / 1e9:.2f} GB)")
        kept = f"the text model and its {exported.removeprefix('a ')}" if exported else "the text model alone"
        remarks = [f"{exported} is in {' and '.join(self.unlisted)}, which no index lists"] if self.unlisted else []
        remarks += [f"{kept}; left out: {', '.join(parts)}"] if parts else []
        return "; ".join(remarks)

    def has(self, name: str) -> bool:
        """Return whether a tensor is of the part that this is, or shared with it."""
        if not self.part:
            return not name.startswith(ALL_BESIDE)
        shared = "embed_tokens" if self.part == MTP and self.next_layer == families.EAGLE3 else "embed_tokens|lm_head"
        return name.startswith(self.prefixes(self.part)) or re.search(rf"(^|\.)({shared})\.", name) is not None

    def parameters(self) -> list[str]:
        """Return the text model's parameters outside the experts, a quantized module's tensors being its one
        ``weight``."""
        names: dict[str, None] = {}
        for name in self.ckpt.names():
            module, _, leaf = name.rpartition(".")
            router = leaf == CORRECTION_BIAS  # which may be stored among the experts
            if not self.has(name) or (not router and re.search(r"\.experts(\.\d+\.\w+)?$", module)):
                continue
            quantized = leaf != "bias" and not router and self.is_quantized(module)
            names[f"{module}.weight" if quantized else name] = None
        return list(names)

    def stored(self, name: str) -> np.ndarray:
        """Return one of :meth:`parameters`, or a rank's part of it: dequantized f32, or the tensor in the checkpoint's
        own type."""
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and self.is_quantized(module):
            return self.matrix_of(module).dequantize(np.float32)
        array = self.ckpt.tensor(name)
        if leaf == "weight" and array.ndim == 2 and (rotation := self.rotation(module, array.shape[1])):
            array = rotation.folded(array)
        return self.cuts[name].array(array) if name in self.cuts else array

    def parameter(self, name: str) -> np.ndarray:
        """Return one of :meth:`parameters` as f32, dequantized if need be."""
        return self.stored(name).astype(np.float32)

    def dense(self, module: str) -> np.ndarray:
        """``<module>.weight`` as f32, dequantized if need be: [N, K] for a linear."""
        return self.parameter(f"{module}.weight")

    # helpers for decoders

    def take(self, module: str, declared: Iterable[Tensor], at: int | None = None) -> dict[str, np.ndarray]:
        """Return the declared tensors of a module by suffix, each checked; optional ones that are absent are left out.

        So are scales of activations where nothing wants them (``self.input_scales``).

        Args:
            at: only this element of the first dimension of each, such as an expert; scalars whole.
        """
        found = {}
        for want in declared:
            name = f"{module}.{want.suffix}"
            scales_inputs = want.suffix.endswith(INPUT_SCALES)
            if scales_inputs and not self.input_scales:
                continue
            if name not in self.ckpt:
                if not want.required:
                    continue
                raise CheckpointError(
                    f"{self.ckpt.folder}: {name} is missing, expected {'|'.join(want.dtypes)} {list(want.shape)}"
                    + ("; --activations float does without" if scales_inputs else "")
                )
            dtype, shape = self.ckpt.dtype(name), self.ckpt.shape(name)
            same = shape == want.shape or (prod(shape) == 1 and prod(want.shape) == 1)  # [] or [1]
            if dtype not in want.dtypes or not same:
                raise CheckpointError(
                    f"{self.ckpt.where(name)} is {dtype} {list(shape)}, "
                    f"expected {'|'.join(want.dtypes)} {list(want.shape)} ({self.name})"
                )
            if at is not None and want.shape:
                found[want.suffix] = self.ckpt.element(name, at)
            else:
                found[want.suffix] = self.ckpt.tensor(name, want.decides).reshape(want.shape)
            if scales_inputs and not 0 < (value := found[want.suffix].item()) < np.inf:
                raise CheckpointError(
                    f"{self.ckpt.where(name)} is {value}, expected a positive number; an expert that no token reached "
                    "in calibration may have none: --activations float does without"
                )
        return found

    def bias(self, module: str, n: int) -> np.ndarray | None:
        """f32 [N], or None."""
        found = self.take(module, [Tensor("bias", FLOATS, (n,), required=False)])
        return found["bias"].astype(np.float32) if found else None

    def no_zero_points(self, module: str) -> None:
        """Refuse stored zero points of weights that have none by the configuration, unless they are zero.

        Raises:
            CheckpointError: naming file and tensor.
        """
        name = f"{module}.weight_zero_point"
        if name in self.ckpt and (self.ckpt.tensor(name, decides=True) != 0).any():
            raise self.odd_zero_points(name)

    def odd_zero_points(self, name: str) -> CheckpointError:
        """Return an error for zero points that are not the middle of the codes, beside weights that have none."""
        return CheckpointError(
            f"{self.ckpt.where(name)} has zero points that are not the middle of the codes; expected none, the "
            f"configuration describes weights without zero points ({self.name})"
        )

    def shape2d(self, name: str) -> tuple[int, int]:
        """Return the shape of a tensor that must be a matrix."""
        shape = self.ckpt.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{self.ckpt.where(name)} has shape {list(shape)}, expected two dimensions")
        return shape  # type: ignore[return-value]


FLOATS = ("BF16", "F16", "F32")
#: of tables of numbers, like the experts of each token
INTEGERS = ("I32", "I64")
MTP = "multi-token prediction"
VISION = "a vision tower"
SOUND = "parts that hear and speak"
#: parts of a checkpoint that a text model lacks -> how the names of their tensors begin
BESIDE = {
    VISION: (
        *(
            f"{wrapper}{tower}."
            for wrapper in ("", "model.", "thinker.")
            for tower in ("visual", "vision_tower", "vision_model", "multi_modal_projector", "mm_projector")
        ),
        # Mistral-Large-4
        "vision_encoder.",
        "vision_language_adapter.",
        "patch_merger.",
        "pre_mm_projector_norm.",
    ),
    SOUND: ("thinker.audio_tower.", "talker.", "code2wav."),
    MTP: ("mtp.", "model.mtp."),
}
ALL_BESIDE = (*(prefix for prefixes in BESIDE.values() for prefix in prefixes), families.EAGLE3)
#: of experts that a tool left alone: safetensors dtype -> op.def's format
FLOAT_KINDS = {"BF16": "bf16", "F16": "f16"}
#: ends of the names of the scales of static activations
INPUT_SCALES = ("input_scale", "input_global_scale")
#: what routers add to the scores for the selection only; most in their module, ERNIE 4.5 in one below
CORRECTION_BIAS = "e_score_correction_bias"


@contextlib.contextmanager
def dividing(format: Format, what: str) -> Iterator[None]:
    """Yield what cannot be divided among ranks is named."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        world = format.slice.world if format.slice else 1
        raise CheckpointError(f"{format.ckpt.folder}: {what} among {world} ranks: {error}") from None


def float_scheme(dtype: str) -> ModuleScheme:
    """Return the scheme of weights that a tool left in a type of FLOAT_KINDS."""
    kind = FLOAT_KINDS[dtype]
    return ModuleScheme(kind, -1, "none", f"{kind}, not quantized")


def integer_kind(bits: int, group_size: int, own_widths: bool) -> str:
    """Return the format of op.def that carries integers of so many bits."""
    if own_widths and f"int{bits}" in PLANE_INTEGERS and (group_size == -1 or group_size % 32 == 0):
        return f"int{bits}"
    return "int4" if bits <= 4 else "int8"


def carried_wider(kind: str, bits: int) -> str:
    """Return what a scheme's text says of integer codes: "" where ``kind`` has as many bits."""
    width = int(kind.removeprefix("int"))
    return f", carried as {kind}: {width} bits a code, packed they would be {bits}" if width > bits else ""


def searched_scheme(kind: str, group_size: int) -> ModuleScheme:
    """Return the scheme of weights that are quantized while they are read."""
    group = "a row" if group_size == -1 else f"group {group_size}"
    return ModuleScheme(kind, group_size, "none", f"quantized to {kind} {group}")


def unrounded(weight: np.ndarray, bias: np.ndarray | None) -> QuantizedMatrix:
    """Return a matrix [N, K] of 16-bit floats whose codes they are."""
    kind = "f16" if weight.dtype == np.float16 else "bf16"
    codes = np.broadcast_to(np.ascontiguousarray(unlike_rows(weight)).view(np.uint16), weight.shape)
    return QuantizedMatrix(
        kind=kind, codes=codes, scales=np.ones((len(codes), 1), np.float32), group_size=-1, bias=bias
    )


def group_size_of(value: object) -> int:
    """Return a configuration's group size: -1 (one group) or positive.

    Raises:
        ValueError: otherwise.
    """
    if type(value) is not int or (value < 1 and value != -1):
        raise ValueError(f"group size {value!r}, expected -1 or a positive integer")
    return value


def group_order(g_idx: np.ndarray, group_size: int, where: str) -> np.ndarray | None:
    """Return the column order that makes act-order groups contiguous: int32 [K], or None when they are already.

    Args:
        g_idx: group of each input feature, [K].
        group_size: features of a group; the last group may be shorter.
        where: named in the error.

    Raises:
        CheckpointError: when the groups are not of equal size.
    """
    k = len(g_idx)
    contiguous = np.arange(k) // group_size
    if np.array_equal(g_idx, contiguous):
        return None
    groups = -(-k // group_size)
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise CheckpointError(
            f"{where} ranges from {g_idx.min()} to {g_idx.max()}, expected 0 to {groups - 1} "
            f"({k} input features in groups of {group_size})"
        )
    perm = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[perm], contiguous):
        sizes = np.bincount(g_idx, minlength=groups)
        bad = int(np.flatnonzero(sizes != np.bincount(contiguous, minlength=groups))[0])
        raise CheckpointError(
            f"{where} puts {sizes[bad]} input features into group {bad}, expected {group_size} in each but a short last"
        )
    return perm


def matches(pattern: str | regex.Pattern[str], module: str, anywhere: bool = False) -> bool:
    """Return whether a configuration's regular expression matches a module's name from its beginning, or anywhere.

    Raises:
        CheckpointError: it takes more than a second: some expressions take exponential time.
    """
    try:
        return (regex.search if anywhere else regex.match)(pattern, module, timeout=1) is not None
    except TimeoutError:
        text = getattr(pattern, "pattern", pattern)
        raise CheckpointError(f"{text!r} takes more than a second to match {module}") from None
