"""What an export is asked for: checked before anything is read, with what is not said as it is by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantmoe.exporter.choosing.caches import FLOATS, KINDS
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.reading.formats.rounding import HEAD_GROUPS
from quantmoe.exporter.reading.slices import Slice
from quantmoe.exporter.targets import TARGETS, Target, with_option

#: bytes of weights in a file
MAX_FILE_SIZE = 50 * 10**9
MAX_RANKS = 1024
#: option that not all targets have -> why
WHY = {
    "paged": ": ONNX Runtime has PagedAttention there alone",
    "experts": ": TensorRT's plug-in reads them",
    "tensor_parallel": ": ONNX Runtime has no AllReduce of its own",
}


def _apart(option: str, *others: tuple[str, bool]) -> None:
    """Refuse an option beside others that are given."""
    for name, given in others:
        if given:
            raise OptionError(f"{option} does not go with {name}")


@dataclass(frozen=True)
class Options:
    """See :func:`quantmoe.exporter.writing.convert.export`, which has the same defaults.

    Raises:
        OptionError: an option that does not exist, or not with the others.
    """

    target: str = "cpu"
    activations: str | None = None
    scales: str = "exact"
    dtype: str | None = None
    dense: str = "quantmoe"
    logits: str | int = "last"
    lm_head: str | None = None
    cache: str = "auto"
    state_window: int = 1
    mtp: bool = False
    vision: bool = False
    layers: int | None = None
    quantize: str | None = None
    group_size: int | None = None
    symmetric: bool = False
    calibrate: str | Path | None = None
    max_file_size: int = MAX_FILE_SIZE
    tensor_parallel: int = 1
    expert_parallel: bool = False
    expert_map: str | Path | None = None
    data_parallel: bool = False
    paged: bool = False
    experts: str = "inputs"

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise OptionError(f"target is {self.target!r}, expected one of: {', '.join(TARGETS)}")
        target = self.facts
        for name, known in (
            ("activations", (None, *target.activations)),
            ("scales", ("exact", "bf16")),
            ("dtype", (None, *target.graph_types)),
            ("dense", target.dense),
            ("lm_head", (None, *HEAD_GROUPS)),
            ("cache", KINDS),
            ("experts", ("inputs", "external")),
        ):
            if (value := getattr(self, name)) not in known:
                of = f" (target {self.target})" if name in ("activations", "dtype", "dense") else ""
                raise OptionError(f"{name} is {value!r}, expected one of: {', '.join(filter(None, known))}{of}")
        if self.logits not in ("last", "all") and not (type(self.logits) is int and self.logits > 0):
            raise OptionError(f"logits is {self.logits!r}, expected last, all or a number of tokens from 1")
        if not 1 <= self.state_window <= 64:
            raise OptionError(f"state_window is {self.state_window}, expected 1 to 64")
        for name, given, as_given in (
            ("mtp", self.mtp, "mtp"),
            ("state_window", self.state_window > 1, "state_window"),
            ("vision", self.vision, "vision"),
            ("paged", self.paged, "paged"),
            ("experts", self.experts == "external", "experts external"),
            ("tensor_parallel", self.tensor_parallel > 1, "tensor_parallel"),
        ):
            if given and name not in target.options:
                raise OptionError(f"{as_given} is for {with_option(name)}{WHY.get(name, '')}")
        one_plain_graph = (
            ("mtp", self.mtp),
            ("tensor_parallel", self.tensor_parallel > 1),
            ("logits of N tokens", isinstance(self.logits, int)),
        )
        if self.vision:
            _apart("vision", *one_plain_graph)
        if self.paged:
            _apart("paged", ("vision", self.vision), *one_plain_graph)
        if self.experts == "external":
            _apart("experts external", ("paged", self.paged), ("vision", self.vision))
        if self.group_size is not None and self.quantize is None:
            size = self.group_size
            raise OptionError(f"group_size is {size}: an option of quantize; a quantized checkpoint has its own")
        if self.symmetric and self.quantize != "int4":
            raise OptionError("symmetric is for quantize int4: the other formats have no zero points")
        if self.calibrate is not None:
            if self.quantize in (None, "none"):
                raise OptionError("calibrate is an option of quantize: what is not quantized needs no text")
            _apart("calibrate", ("tensor_parallel", self.tensor_parallel > 1), ("vision", self.vision))
        if self.max_file_size < 1:
            raise OptionError(f"max_file_size is {self.max_file_size}, expected a number of bytes")
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise OptionError(f"tensor_parallel is {self.tensor_parallel}, expected 1 to {MAX_RANKS}")
        if self.expert_parallel and self.tensor_parallel == 1:
            raise OptionError("expert_parallel needs tensor_parallel: the number of ranks")
        if self.expert_map is not None and not self.expert_parallel:
            raise OptionError("expert_map needs expert_parallel: whole experts in a rank")
        if self.data_parallel and not self.expert_parallel:
            raise OptionError("data_parallel needs expert_parallel: whole experts in a rank")
        if self.mtp and self.tensor_parallel > 1:
            raise OptionError("mtp is not divided: leave out mtp or tensor_parallel")
        floats = target.caches or (self.graph_type,)
        if self.cache in FLOATS and self.cache not in floats:
            why = f"floats have the graph's type, {self.graph_type}"
            if target.caches:
                why = f"the kernels take {' and '.join(target.caches)}"
            raise OptionError(f"cache is {self.cache}: for target {self.target} {why}")

    @property
    def slices(self) -> list[Slice | None]:
        """What each rank has; of one rank all, None."""
        world = self.tensor_parallel
        if world == 1:
            return [None]
        return [Slice(rank, world, self.expert_parallel, own_tokens=self.data_parallel) for rank in range(world)]

    @property
    def facts(self) -> Target:
        """What the target is."""
        return TARGETS[self.target]

    @property
    def layout(self) -> str:
        """The packed layout of the target."""
        return self.facts.layout

    @property
    def wanted(self) -> str | None:
        """The activations of weights-only checkpoints; None: as the checkpoint says. With ONNX Runtime's own operators
        int8 ones are not of a format, but the operators' affair, which ``accuracy_level`` allows."""
        if not self.facts.library and self.activations == "int8":
            return None
        return self.activations or self.facts.default_activations

    @property
    def accuracy_level(self) -> int:
        """Of ONNX Runtime's own operators: 4 allows int8 activations, by blocks; 0 is of floats."""
        return 4 if self.activations == "int8" else 0

    @property
    def graph_type(self) -> str:
        """The type of the graph outside the experts."""
        return self.dtype or self.facts.graph_types[0]
