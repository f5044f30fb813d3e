"""Options of an export: declared once, for Python and the command line, and checked before anything is read.

The command line makes its options from the fields (:func:`quantmoe.exporter.command_arguments.with_options`). It
imports this for its help: what needs NumPy is imported in functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.memory import DRAFTS
from quantmoe.exporter.targets import ACTIVATIONS, CPU, CUDA, TARGETS, Target, with_option

if TYPE_CHECKING:
    from quantmoe.exporter.reading.slices import Slice

#: bytes of weights in a file
MAX_FILE_SIZE = 50 * 10**9
#: types of a KV cache
CACHES = ("auto", "f16", "f32", "bf16", "int8", "fp8")
FLOATS = CACHES[1:4]
#: formats that weights are quantized to; "none": 16 bits
QUANTIZE = ("int4", "int8", "mxfp4", "nvfp4", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m", "none")
#: option that not all targets have -> why
WHY = {
    "external_experts": ": TensorRT's plug-in reads them",
    "tensor_parallel": ": ONNX Runtime has no AllReduce of its own",
    "browser": ": browsers have ONNX Runtime's own operators alone",
}


def option(default: Any, help: str, group: str = "Options", **settings: Any) -> Any:
    """Return a field that is an option of ``export``.

    Args:
        help: a verb phrase of at most 12 words. group: its panel of ``--help``.
        settings: values, metavar, least, most. shown: a default that depends on other options. kind: the type, if it
            is no str. hidden: the option is on the reference page, not in ``--help``.
    """
    return field(default=default, metadata={"help": help, "group": group, **settings})


def _apart(option: str, *others: tuple[str, bool]) -> None:
    """Refuse an option beside others that are given."""
    for name, given in others:
        if given:
            raise OptionError(f"{option} does not go with {name}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :func:`quantmoe.export`, checked against each other.

    Attributes:
        target: "cpu": ONNX Runtime on x86-64 and Arm. "cuda": ONNX Runtime and TensorRT on NVIDIA GPUs. "ort": ONNX
            Runtime's own operators, without a library (docs/guides/without-library.md).
        quantize: format for the experts and other ``*_proj`` linears of a bf16 or f16 checkpoint. "none" keeps 16 bits.
        group_size: input features that share a scale of ``quantize``; -1: a whole row; None: the format's default.
        symmetric: "int4" has no zero points.
        calibrate: UTF-8 text, or llama.cpp's importance matrix in GGUF. Transformers' model reads a text, one decoder
            layer at a time. Squared errors of weights are weighed by the squares of their inputs. Experts that no token
            reaches are quantized without it; see Report.calibration.
        lm_head: quantizes the LM head; see Report.head_error. None: it stays as it is.
        activations: activation quantization of weights-only checkpoints. "int8": groups of 32 or 64 features
            (int8_group), the default for the CPU. "int8-token": whole tokens (int8_token_asym). "float": none. For CUDA
            the default is the checkpoint's format, and "int8" is refused.
        cache: type of the KV cache. "auto" for the CPU: int8 or e4m3 codes if the checkpoint has scales for them, else
            f16. "auto" for CUDA: floats of the graph's type. "f16", "f32" (CPU), "bf16": floats. "fp8": e4m3 codes, by
            the checkpoint's scales or 1. "int8": codes, by the checkpoint's scales or, on the CPU, one scale for each
            token and head. If some attention is standard nodes (Report.plain_attention), the cache has the graph's
            type.
        dtype: type of the graph outside the experts. CPU: "f32" (default) or "f16". CUDA: "bf16" (default) or "f16".
        logits: "last": each sequence's last token, [B, 1, V]. A session may choose another number N by the initializer
            ``num_logits``. For engines that replace no initializer: N: the last N tokens, [B, min(S, N), V], so that
            N - 1 draft tokens can be verified. "all": all tokens. None: "last".
        state_window: number of last tokens, 1 to 64, whose states of linear attention are kept. N states let N - 1
            draft tokens be verified. None: 1, and with ``mtp`` as many as it drafts.
        mtp: also export the layer of multi-token prediction as mtp.onnx. It shares the weight files. The model gets an
            output hidden_states [B, S, H].
        eagle3: folder of an EAGLE-3 head for this checkpoint: also export it as mtp.onnx, in the place of ``mtp``.
        vision: also export the vision tower as vision.onnx, and embeddings.onnx, which puts the tower's features in the
            places of image tokens. model.onnx then takes inputs_embeds [B, S, H] instead of input_ids, and position_ids
            [3, B, S] (docs/guides/vision.md).
        paged: export for servers: requests share the memory of a cache in blocks. ``quantmoe serve`` runs it, and on
            CUDA onnxruntime-genai's Engine. input_ids [num_tokens] holds the tokens of all requests. logits
            [num_logits, V] holds the tokens that the input logits_indices names, or all.
        tensor_parallel: number of ranks. The output gets a folder for each, rank0 and so on. The Report is of rank 0
            (docs/guides/several-gpus.md).
        expert_parallel: give each rank whole experts, not a slice of each expert.
        expert_map: file that places experts on ranks (exporter/reading/expert_map.py). By default each rank has as many
            experts, in order.
        data_parallel: give each rank the whole model except the other ranks' experts. Each rank runs its own batch, and
            the batches have one shape.
        opset: version of ai.onnx whose operators take the place of com.microsoft's, except QMoE and MatMulNBits, for
            "ort". From 23 norms, rotary embeddings and attention are one node each, and from 27 linear attention.
        external_experts: for TensorRT only: nodes name the experts' place in the data files. Engines then hold no
            experts, and the plug-in keeps in GPU memory what fits.
        dense: operator of quantized linears outside the experts. "quantmoe": QuantLinear. "ort": MatMulNBits of
            com.microsoft where both mean the same result; see Report.not_ort. CUDA takes only "quantmoe".
        browser: also write the folder onnx, from which transformers.js loads the model. "wasm": for browsers and Node
            on the CPU. "webgpu": for WebGPU, too; experts with zero points are refused.
        scales: "bf16" rounds scales, for KleidiAI's kernels; see Report.scale_error.
        layers: export only the first decoder layers.
        max_file_size: bytes of weights in a file. Further weights go to model.onnx.data.1 and so on. The default is the
            Hugging Face hub's limit.

    Raises:
        OptionError: an option does not exist, or cannot be combined with another.
    """

    target: str = option("cpu", "choose what runs the files", values=TARGETS)
    mtp: bool = option(default=False, help="also export the layer that drafts tokens")
    eagle3: str | Path | None = option(  # noqa: RUF009
        None, "also export this EAGLE-3 head", metavar="FOLDER", kind=Path
    )
    vision: bool = option(default=False, help="also export the vision tower")
    paged: bool = option(default=False, help="export for servers, with a cache in blocks")
    quantize: str | None = option(
        None, "quantize to int4, q4_k_m, .. or none", "Numbers", values=QUANTIZE, metavar="FORMAT"
    )
    group_size: int | None = option(
        None, "give N weights one scale; -1: a row", "Numbers", metavar="N", shown="the format's"
    )
    symmetric: bool = option(default=False, help="quantize to int4 without zero points", group="Numbers")
    calibrate: str | Path | None = option(  # noqa: RUF009
        None, "weigh errors of --quantize by this text", "Numbers", metavar="FILE", kind=Path
    )
    lm_head: str | None = option(None, "quantize the LM head", "Numbers", values=("int4", "int8"))
    activations: str | None = option(
        None,
        "quantize activations: int8, int8-token, float",
        "Numbers",
        values=ACTIVATIONS,
        metavar="FORMAT",
        shown="int8 on cpu, else the checkpoint's",
    )
    cache: str = option("auto", "set the KV cache's type: f16, fp8, ..", "Numbers", values=CACHES, metavar="TYPE")
    dtype: str | None = option(
        None,
        "choose the type outside experts",
        "Numbers",
        values=("f32", "f16", "bf16"),
        shown=f"{CPU.graph_types[0]}, cuda: {CUDA.graph_types[0]}",
    )
    tensor_parallel: int = option(
        1, "split the model over N ranks", "Several GPUs or processes", metavar="N", least=1, most=1024
    )
    expert_parallel: bool = option(
        default=False, help="give each rank whole experts", group="Several GPUs or processes"
    )
    expert_map: str | Path | None = option(  # noqa: RUF009
        None, "place experts by this file", "Several GPUs or processes", metavar="FILE", kind=Path
    )
    data_parallel: bool = option(
        default=False, help="split experts; one batch a rank", group="Several GPUs or processes"
    )
    logits: str | int | None = option(
        None,
        "fix the tokens with logits, for TensorRT",
        "Advanced",
        metavar="last|all|N",
        shown="last",
    )
    state_window: int | None = option(
        None,
        "keep states of N tokens to verify drafts",
        "Advanced",
        metavar="N",
        shown=f"1, --mtp: {DRAFTS + 1}",
        least=1,
        most=64,
    )
    opset: int | None = option(None, "use standard operators of opset N", "Advanced", metavar="N", least=20, most=27)
    external_experts: bool = option(default=False, help="keep experts outside TensorRT's engine", group="Advanced")
    browser: str | None = option(
        None, "also write files for transformers.js", "Advanced", values=("wasm", "webgpu"), metavar="wasm|webgpu"
    )
    dense: str = option(
        "quantmoe", "choose the operator of other linears", "Advanced", values=("quantmoe", "ort"), hidden=True
    )
    scales: str = option(
        "exact", "keep scales, or round them to bf16", "Advanced", values=("exact", "bf16"), hidden=True
    )
    layers: int | None = option(None, "take only the first N layers", "Advanced", metavar="N", least=1)
    max_file_size: int = option(
        MAX_FILE_SIZE, "start another weight file at this size", "Advanced", metavar="SIZE", shown="50GB", hidden=True
    )

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise OptionError(f"target is {self.target!r}, expected one of: {', '.join(TARGETS)}")
        self._check_values()
        self._check_numbers()
        self._check_target()
        self._check_together()

    def _check_values(self) -> None:
        target = self.facts
        for name, known, of in (
            ("activations", target.activations, f" (target {self.target})"),
            ("dtype", target.graph_types, f" (target {self.target})"),
            ("dense", target.dense, f" (target {self.target})"),
            ("quantize", QUANTIZE, ""),
            ("lm_head", ("int4", "int8"), ""),
            ("cache", CACHES, ""),
            ("scales", ("exact", "bf16"), ""),
            ("browser", ("wasm", "webgpu"), ""),
        ):
            if (value := getattr(self, name)) is not None and value not in known:
                raise OptionError(f"{name} is {value!r}, expected one of: {', '.join(known)}{of}")
        floats = target.caches or (self.graph_type,)
        if self.cache in FLOATS and self.cache not in floats:
            why = f"floats have the graph's type, {self.graph_type}"
            if target.caches:
                why = f"the kernels take {' and '.join(target.caches)}"
            raise OptionError(f"cache is {self.cache}: for target {self.target} {why}")

    def _check_numbers(self) -> None:
        if self.logits not in (None, "last", "all") and not (type(self.logits) is int and self.logits > 0):
            raise OptionError(f"logits is {self.logits!r}, expected last, all or a number of tokens from 1")
        for one in fields(self):
            number, least, most = getattr(self, one.name), one.metadata.get("least"), one.metadata.get("most")
            if number is not None and least is not None and not least <= number <= (most or number):
                raise OptionError(f"{one.name} is {number}, expected {least} {f'to {most}' if most else 'or more'}")
        if self.max_file_size < 1:
            raise OptionError(f"max_file_size is {self.max_file_size}, expected a number of bytes")

    def _check_target(self) -> None:
        given = {
            "mtp": self.mtp,
            "eagle3": self.eagle3 is not None,
            "state_window": (self.state_window or 1) > 1,
            "vision": self.vision,
            "paged": self.paged,
            "external_experts": self.external_experts,
            "tensor_parallel": self.tensor_parallel > 1,
            "browser": self.browser is not None,
            "opset": self.opset is not None,
        }
        for name in (name for name, asked in given.items() if asked):
            if name not in self.facts.options:
                raise OptionError(f"{name} is for {with_option(name)}{WHY.get(name, '')}")

    def _check_together(self) -> None:
        ranks = ("tensor_parallel", self.tensor_parallel > 1)
        eagle3 = ("eagle3", self.eagle3 is not None)
        one_plain_graph = (("mtp", self.mtp), eagle3, ranks, ("logits of N tokens", isinstance(self.logits, int)))
        if self.mtp:
            _apart("mtp", eagle3)
        if self.vision:
            _apart("vision", *one_plain_graph)
        if self.paged:
            _apart("paged", ("vision", self.vision), *one_plain_graph)
        if self.external_experts:
            _apart("external_experts", ("paged", self.paged), ("vision", self.vision))
        if self.group_size is not None and self.quantize is None:
            size = self.group_size
            raise OptionError(f"group_size is {size}: an option of quantize; a quantized checkpoint has its own")
        if self.symmetric and self.quantize != "int4":
            raise OptionError("symmetric is for quantize int4: the other formats have no zero points")
        if self.calibrate is not None:
            if self.quantize in (None, "none"):
                raise OptionError("calibrate is an option of quantize: what is not quantized needs no text")
            _apart("calibrate", ranks, ("vision", self.vision))
        if self.expert_parallel and self.tensor_parallel == 1:
            raise OptionError("expert_parallel needs tensor_parallel: the number of ranks")
        for name in ("expert_map", "data_parallel"):
            if getattr(self, name) and not self.expert_parallel:
                raise OptionError(f"{name} needs expert_parallel: whole experts in a rank")
        for name in ("mtp", "eagle3"):
            if getattr(self, name) and self.tensor_parallel > 1:
                raise OptionError(f"{name} is not divided: leave out {name} or tensor_parallel")

    @property
    def drafter(self) -> bool:
        """Return whether a layer that drafts is exported beside the model."""
        return self.mtp or self.eagle3 is not None

    @property
    def kept_logits(self) -> str | int:
        """The tokens that get logits: "last", "all" or a number."""
        return self.logits or "last"

    @property
    def kept_states(self) -> int:
        """The number of tokens whose states are kept, if the model has states."""
        return self.state_window or (DRAFTS + 1 if self.drafter else 1)

    @property
    def slices(self) -> list[Slice | None]:
        """The slice of each rank; None if one rank has all."""
        from quantmoe.exporter.reading.slices import Slice

        world = self.tensor_parallel
        if world == 1:
            return [None]
        return [
            Slice(rank=rank, world=world, whole_experts=self.expert_parallel, own_tokens=self.data_parallel)
            for rank in range(world)
        ]

    @property
    def facts(self) -> Target:
        """The target of the export."""
        target = TARGETS[self.target].at(self.opset)
        return replace(target, lists=_without_lists) if self.external_experts else target

    @property
    def layout(self) -> str:
        """The packed layout of the target."""
        return self.facts.layout

    @property
    def wanted(self) -> str | None:
        """Activations of weights-only checkpoints; None: as the checkpoint says.

        With ONNX Runtime's own operators "int8" is no format of a node. ``accuracy_level`` allows it.
        """
        if not self.facts.library and self.activations == "int8":
            return None
        return self.activations or self.facts.default_activations

    @property
    def accuracy_level(self) -> int:
        """The attribute of ONNX Runtime's own operators: 4 allows int8 activations in blocks, 0 does not."""
        return 4 if self.activations == "int8" else 0

    @property
    def graph_type(self) -> str:
        """The type of the graph outside the experts."""
        return self.dtype or self.facts.graph_types[0]


def _without_lists(_: Any) -> str:
    """Return why TensorRT, which alone reads experts beside the model, has no lists of selected tokens."""
    return "the plug-in for TensorRT has no attention to selected tokens"


class ExportOptions(TypedDict, total=False):
    """Types of the fields of :class:`Options`, as keyword arguments. A test compares both."""

    target: str
    mtp: bool
    eagle3: str | Path | None
    vision: bool
    paged: bool
    quantize: str | None
    group_size: int | None
    symmetric: bool
    calibrate: str | Path | None
    lm_head: str | None
    activations: str | None
    cache: str
    dtype: str | None
    tensor_parallel: int
    expert_parallel: bool
    expert_map: str | Path | None
    data_parallel: bool
    logits: str | int | None
    state_window: int | None
    opset: int | None
    external_experts: bool
    browser: str | None
    dense: str
    scales: str
    layers: int | None
    max_file_size: int
