"""The common steps of an export and its dry run: options, headers, transformers' model, every choice, no trace.

The first steps ask headers and config.json alone, and torch is imported after them: what they refuse takes no seconds.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.choosing.choose import Choice, activation_format, check_floats, choose, choose_experts
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import CheckpointError, OptionError, need_path
from quantmoe.exporter.folder.chat_template import folder_turns
from quantmoe.exporter.folder.files import (
    DATA,
    EMBEDDINGS_MODEL,
    GENAI,
    MODEL,
    MTP_MODEL,
    PROCESSOR,
    TOKENIZER,
    VISION_MODEL,
    rank_folder,
    ranks_in,
    weight_files,
)
from quantmoe.exporter.folder.metadata import CONTEXT_LENGTH, EOS, SHORT_CONTEXT
from quantmoe.exporter.folder.model_file import ranks_stated
from quantmoe.exporter.folder.tokenizer import end_tokens
from quantmoe.exporter.memory import DRAFTS
from quantmoe.exporter.reading.companions import check_companions, companion_files
from quantmoe.exporter.reading.eagle3 import take_head
from quantmoe.exporter.reading.expert_map import placements
from quantmoe.exporter.reading.formats import Format, ModuleScheme, find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.slices import Slice
from quantmoe.exporter.reading.weights.base import BESIDE, MTP, VISION
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.targets import Target
from quantmoe.exporter.writing.genai import image_processor
from quantmoe.exporter.writing.output import check_folder
from quantmoe.exporter.writing.transformers_js import check_webgpu

if TYPE_CHECKING:
    import onnx_ir as ir

    from quantmoe.exporter.graph.lowering.packed_tables import PackedTable
    from quantmoe.exporter.graph.lowering.paged import Table
    from quantmoe.exporter.graph.lowering.weights import Weight
    from quantmoe.exporter.graph.model import Skeleton
    from quantmoe.exporter.graph.put_nodes import Attention
    from quantmoe.exporter.graph.vision.tower import Embeddings, Tower


@dataclasses.dataclass(kw_only=True)
class Report:
    """The summary of an export.

    Attributes:
        format: name of the checkpoint format.
        layers: checkpoint module name, of several nodes with their experts (:attr:`MoELayer.title`) -> (scheme in the
            tool's words, node attributes).
        shared: the same names -> how many of that node's experts are a shared expert.
        apart: checkpoint module of a shared expert that is no expert of its layer's node -> why.
        activations: remark when they are not what the checkpoint says, else "".
        calibration: of ``calibrate``: how many tokens, and experts that they did not reach; else "".
        head_error: of ``lm_head``: root of the mean square error of its weights, relative to theirs.
        scale_error: largest relative error of a scale rounded to bf16; None when scales are exact.
        packed_bytes, dense_bytes: of the experts and of everything else.
        linears: checkpoint module name -> (scheme in the tool's words, node attributes), outside the experts.
        dequantized: checkpoint tensor outside the experts, quantized there and float in the model -> why.
        not_ort: linears that ``dense="ort"`` left as QuantLinear -> why.
        plain_attention: attention module that is standard nodes, not CachedAttention -> why.
        plain_routers: layers whose router is not a MoERouting node but many of ONNX's: none of its methods is theirs.
        untraced: why every layer was traced although some are alike, else "".
        left_out: remark when the checkpoint has more than its text model, which alone is exported, else "".
        kv_cache: remark when the KV cache is quantized, or stays float although the checkpoint wants it, else "".
        drafting: remark when generate cannot verify what ``mtp.onnx`` drafts, else "".
        library: remark when the library beside the model asks for a glibc newer than OLDEST_GLIBC, else "".
        genai: remark when there is no genai_config.json though the architecture could have one, else "".
        chat: why the metadata has no ``chat.*`` although the checkpoint has a chat template, else "".
        tokenizer: what :func:`write_tokenizer` returns, or why a GGUF file has no tokenizer, else "".
    """

    format: str
    layers: dict[str, tuple[str, MoESpec]]
    activations: str = ""
    calibration: str = ""
    scale_error: float | None = None
    head_error: float | None = None
    packed_bytes: int = 0
    dense_bytes: int = 0
    linears: dict[str, tuple[str, LinearSpec]] = dataclasses.field(default_factory=dict)
    dequantized: dict[str, str] = dataclasses.field(default_factory=dict)
    not_ort: dict[str, str] = dataclasses.field(default_factory=dict)
    shared: dict[str, int] = dataclasses.field(default_factory=dict)
    apart: dict[str, str] = dataclasses.field(default_factory=dict)
    plain_attention: dict[str, str] = dataclasses.field(default_factory=dict)
    plain_routers: int = 0
    untraced: str = ""
    kv_cache: str = ""
    left_out: str = ""
    drafting: str = ""
    library: str = ""
    genai: str = ""
    chat: str = ""
    tokenizer: str = ""


@dataclasses.dataclass(kw_only=True)
class Part:
    """One graph of an export: the model, or what drafts for it.

    Attributes:
        graph, weights, tables, lookups: once it is traced.
    """

    skeleton: Skeleton
    chosen: Choice
    attention: Attention
    graph: ir.Model = dataclasses.field(init=False)
    weights: list[Weight] = dataclasses.field(init=False)
    tables: list[Table] = dataclasses.field(default_factory=list)
    lookups: list[PackedTable] = dataclasses.field(default_factory=list)

    def key(self, weight: Weight) -> tuple[object, ...]:
        """Equal for weights of two parts with the same bytes."""
        module = weight.parameter.rpartition(".")[0]
        if module in self.chosen.linears:
            return self.chosen.source(module), json.dumps(self.chosen.linears[module].attributes())
        return self.skeleton.sources.get(weight.parameter), weight.transposed, weight.value.dtype


@dataclasses.dataclass
class Beside:
    """A graph that makes inputs of the model, whose weights are all floats.

    Attributes:
        name: of its file.
        graph, weights: once it is traced.
    """

    name: str
    stored: Tower | Embeddings
    graph: ir.Model = dataclasses.field(init=False)
    weights: list[Weight] = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """The facts that are known before the trace.

    Attributes:
        format: the checkpoint. parts: the model, and what drafts for it. beside: what makes its inputs.
        whole: transformers' configuration of the text model and its tower, where that is exported.
        report: without what tracing and writing add. ends: see :func:`stops`.
        turns: ``chat.*`` of the metadata.
    """

    format: Format
    parts: list[Part]
    beside: list[Beside]
    report: Report
    ends: dict[str, str]
    turns: dict[str, str]
    whole: Any = None


def prepare(
    checkpoint: str | Path,
    options: Options,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    part: Slice | None = None,
) -> Prepared:
    """Read, check and choose all that headers, config.json and transformers decide.

    Args:
        part: the rank's, of :attr:`Options.slices`.

    Raises:
        CheckpointError, OptionError: see :func:`quantmoe.exporter.writing.convert.export`.
    """
    progress("reading", 0, 1)
    format = open_format(
        checkpoint,
        options.quantize,
        options.group_size,
        activations=options.wanted,
        symmetric=options.symmetric,
        eagle3=options.eagle3,
    )
    if part is not None and options.expert_map is not None:
        routed = {layer.index: layer.num_experts for layer in moe_layers(format)}
        part = replace(part, placements=placements(Path(options.expert_map), part.world, routed))
    format.slice, format.own_widths = part, options.facts.own_widths
    formats, layout = formats_of(format, options.drafter), options.layout
    floats = options.graph_type if options.facts.own_floats else None
    experts = [
        choose_experts(
            one,
            layout,
            options.wanted,
            scales=options.scales,
            layers=None if one.part else options.layers,
            floats=floats,
        )
        for one in formats
    ]

    progress("loading torch and transformers", 0, 1)  # seconds, and what headers decide has been said
    family, tower = _vision(format) if options.vision else (None, None)
    chosen = _choose_nodes(formats, experts, options, family)
    _check_kind(format, chosen[0][0], options)
    ends = stops(chosen[0][0])
    turns, no_turns = folder_turns(format.ckpt.companions)
    parts = _parts(chosen, options)
    config, beside = _vision_models(format, parts[0].skeleton, options, family=family, tower=tower)
    return Prepared(
        format=format,
        parts=parts,
        beside=beside,
        report=_report(parts, beside, options, no_turns),
        ends=ends,
        turns=turns,
        whole=config,
    )


def _choose_nodes(
    formats: Sequence[Format], experts: Sequence[Mapping[str, Any]], options: Options, family: Any
) -> list[tuple[Skeleton, Choice]]:
    """Return the skeleton of each part of a model, and the nodes that it gets.

    Args:
        experts: of :func:`choose_experts`, for each of ``formats``. family: of the vision tower, None without one.
    """
    from quantmoe.exporter.graph.model import Skeleton

    chosen = []
    for one, nodes in zip(formats, experts, strict=True):
        layers, window = (1, 1) if one.part else (options.layers, options.kept_states)
        skeleton = Skeleton(
            one,
            options.graph_type,
            layers,
            lm_head=options.lm_head,
            target=options.facts,
            state_window=window,
            vision=family,
        )
        choice = choose(
            skeleton,
            nodes,
            options.layout,
            activations=options.wanted,
            scales=options.scales,
            dense=options.dense,
        )
        chosen.append((skeleton, choice))
        if not options.facts.library and options.graph_type == "f32":
            check_floats(one, nodes)
        if options.browser == "webgpu":
            for layer, spec in (pair for groups in nodes.values() for pair in groups):
                check_webgpu(one.ckpt.folder, layer.title, bool(spec.w13.zero_points or spec.w2.zero_points))
    return chosen


def _check_kind(format: Format, text_model: Skeleton, options: Options) -> None:
    """Refuse options of other kinds of models.

    Raises:
        OptionError: naming the option.
    """
    if format.ckpt.family.encoder:
        for option in ("mtp", "eagle3", "paged", "vision", "state_window"):
            if getattr(options, option):
                raise OptionError(f"{option} is of models that write text: {format.ckpt.folder} is an encoder")
    if (options.state_window or 1) > 1 and not text_model.keeps_states:
        raise OptionError(f"state_window is {options.state_window}: {format.ckpt.folder} has no linear attention")


def _vision_models(
    format: Format, text_model: Skeleton, options: Options, *, family: Any, tower: Any
) -> tuple[Any, list[Beside]]:
    """Return the configuration of the whole model and the models beside its text model; without a tower, neither."""
    if family is None or tower is None:
        return None, []
    from quantmoe.exporter.graph.config import whole
    from quantmoe.exporter.graph.vision.tower import Embeddings, Tower

    config = whole(format)
    return config, [
        Beside(VISION_MODEL, Tower(family, tower, config, options.graph_type, options.facts)),
        Beside(EMBEDDINGS_MODEL, Embeddings(text_model, config.image_token_id, family.parts(config))),
    ]


def _parts(chosen: Sequence[tuple[Skeleton, Choice]], options: Options) -> list[Part]:
    """Return the parts of a model with their first nodes in place and their attention recognised."""
    from quantmoe.exporter.graph.put_nodes import put_first_nodes
    from quantmoe.exporter.graph.trace import attention_of

    parts = []
    for skeleton, choice in chosen:
        rows = put_first_nodes(skeleton, choice, options.facts)
        attends = attention_of(skeleton, choice, rows, target=options.facts, cache=options.cache, paged=options.paged)
        parts.append(Part(skeleton=skeleton, chosen=choice, attention=attends))
    return parts


def _vision(format: Format) -> tuple[ModuleType, Format]:
    """Return the module of the checkpoint's vision family, and the format of its tower.

    Raises:
        CheckpointError: as :func:`family_of`; nothing says how images become patches.
    """
    from quantmoe.exporter.graph.vision import family_of

    found = family_of(format)
    try:
        image_processor(format.ckpt.image_processor)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{format.ckpt.folder}: neither preprocessor_config.json nor processor_config.json has an image processor "
            f"with what --vision needs: {error}"
        ) from None
    return found


def formats_of(format: Format, mtp: bool) -> list[Format]:
    """Return the format of each graph of an export: the text model, and with ``mtp`` its drafting layer.

    Raises:
        CheckpointError: it has none.
    """
    if not mtp:
        return [format]
    if (found := format.beside(MTP)) is None:
        raise CheckpointError(
            f"{format.ckpt.folder}: no tensors of {MTP} ({' or '.join(f'{name}*' for name in BESIDE[MTP])}, or a "
            "layer after the last one); many quantizers leave them out"
        )
    return [format, found]


def rank_folders(output: Path, options: Options) -> list[Path]:
    """Return the folder of each slice."""
    return [output if part is None else rank_folder(output, part.rank) for part in options.slices]


def stale_folders(output: Path, options: Options, force: bool) -> list[Path]:
    """Return what an earlier export left beside this one's: ranks that this one has not, or the whole model beside
    slices.

    Raises:
        FileExistsError: there is something, and not ``force``.
    """
    own = rank_folders(output, options)
    there = {path: ranks_stated(path / MODEL) for path in (output, *ranks_in(output).values()) if path not in own}
    found = [path for path, world in there.items() if world > (path != output)]
    if found and not force:
        was, wanted = (
            f"an export in {world} slices" if world > 1 else "a whole model"
            for world in (there[found[0]], options.tensor_parallel)
        )
        raise FileExistsError(f"{found[0] / MODEL} exists, of {was}, expected {wanted} alone; --force removes it")
    return found


def check_output(checkpoint: Path, output: Path, target: Target, force: bool) -> None:
    """Refuse what must not be written to, before any work is done.

    Raises:
        OSError: see :func:`export`.
    """
    if output.resolve() == checkpoint.resolve():
        raise FileExistsError(f"{output} is the checkpoint's own folder; export to another")
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there} is a file, expected a folder to write to")
    companions = companion_files(checkpoint if checkpoint.is_dir() else output)  # a GGUF file has none beside it
    names = {MODEL, MTP_MODEL, VISION_MODEL, EMBEDDINGS_MODEL, DATA} | weight_files(output)
    names |= {path.name for path in companions} | {TOKENIZER, GENAI, PROCESSOR, *filter(None, [target.library])}
    check_folder(output, names, force)


def open_format(
    checkpoint: str | Path,
    quantize: str | None,
    group_size: int | None,
    *,
    activations: str | None = None,
    symmetric: bool = False,
    eagle3: str | Path | None = None,
) -> Format:
    """Return the checkpoint in its own format, or as :func:`export` quantizes it.

    Args:
        eagle3: folder of an EAGLE-3 head, whose tensors the checkpoint gets.

    Raises:
        CheckpointError: see :func:`export`; a file that would go with the model links to elsewhere.
    """
    ckpt = open_checkpoint(checkpoint)
    if eagle3 is not None:
        take_head(ckpt, need_path("eagle3", eagle3))
    check_companions(ckpt)
    format = find_format(ckpt) if quantize is None else Unquantized(ckpt, quantize, group_size, symmetric)
    format.input_scales = activations != "float"
    return format


def stops(skeleton: Skeleton) -> dict[str, str]:
    """Return the metadata that a program needs for texts: ``eos_token_id``, ``context_length``, ``short_context``.

    Values that the checkpoint does not say are left out.
    """
    ckpt, found = skeleton.format.ckpt, {}
    if ends := end_tokens(ckpt.generation_config, ckpt.config, ckpt.folder):
        found[EOS] = ",".join(map(str, ends))
    if type(length := getattr(skeleton.model.config, "max_position_embeddings", None)) is int:
        found[CONTEXT_LENGTH] = str(length)
    if (short := skeleton.short_context) is not None:
        found[SHORT_CONTEXT] = str(short)
    return found


def _report(parts: Sequence[Part], beside: Sequence[Beside], options: Options, no_turns: str) -> Report:
    """Return what is known before the tracing; no_turns: why the chat template has none."""
    format = parts[0].skeleton.format
    report = Report(format=format.name, layers={}, chat=f"no chat.* in the metadata: {no_turns}" if no_turns else "")
    report.left_out = format.left_out(VISION if beside else parts[-1].skeleton.format.part)
    if reason := format.ckpt.no_tokenizer:
        report.tokenizer = f"no tokenizer.json: {reason}; the model takes token ids: quantmoe generate --ids 1,2,3"
    report.drafting = _drafting(bool(parts[0].skeleton.with_states), options)
    for one in beside:
        for source in one.stored.sources.values():
            module, _, leaf = source.rpartition(".")
            if leaf == "weight" and one.stored.format.is_quantized(module):
                report.dequantized[source] = f"{one.name} has floats"
    schemes: list[ModuleScheme] = []
    divided: list[str] = []
    for part in parts:
        skeleton, chosen = part.skeleton, part.chosen
        report.dequantized |= chosen.dequantized
        report.apart |= chosen.apart
        report.not_ort |= {chosen.source(name): reason for name, reason in chosen.not_ort.items() if reason}
        if options.facts.library:  # the others have standard nodes alone
            report.plain_attention |= part.attention.plain
        report.kv_cache = report.kv_cache or part.attention.caches.remark
        for name, spec in chosen.layers.items():
            layer = chosen.experts[name]
            report.layers[layer.title] = layer.scheme_text, spec
            report.shared[layer.title] = len([e for e in layer.members or range(layer.every) if e >= layer.num_experts])
            schemes += [layer.scheme, layer.down_scheme]
            if spec.w2.activation_format != activation_format(layer.down_scheme, options.wanted):
                divided.append("the experts' down")
        for name, linear in chosen.linears.items():
            scheme = skeleton.format.scheme_of(next(iter(chosen.parts[name].values())))
            report.linears[chosen.source(name)] = scheme.text, linear
            schemes.append(scheme)
            if linear.w.activation_format != activation_format(scheme, options.wanted):
                divided.append(chosen.source(name).rpartition(".")[2])
    for scheme in schemes:  # a remark where activations are not what the checkpoint says
        wanted, used = scheme.activation_format, activation_format(scheme, options.wanted)
        if wanted == "none" != used:
            of = "in groups of 32 or 64 features" if used == "int8_group" else "per token"
            report.activations = f"weights-only checkpoint: int8 activations {of}; --activations float keeps them float"
        if wanted != "none" == used:
            report.activations = f"the checkpoint says {wanted}: activations stay float as asked"
        rounded = used != "none" and not used.startswith("fp8")  # e4m3 is multiplied as such
        if rounded and options.facts.rounding_is_slow:
            before = " on GPUs before Blackwell" if used == "nvfp4" else ""
            report.activations = f"activations are rounded to {used}; --activations float takes less time{before}"
    formats = {p.activation_format for _, spec in report.layers.values() for p in (spec.w13, spec.w2)}
    if not options.facts.library:
        report.activations = _rounded_activations(report, options) or report.activations
    elif str(options.activations).startswith("int8") and not any(name.startswith("int8") for name in formats):
        report.activations = "no integer product of these weights is exact: activations are not int8 as asked"
    if divided and format.slice is not None:
        names = ", ".join(dict.fromkeys(divided))
        report.activations += f"; float in {names}: a scale would take the maximum over all slices"
    return report


def _drafting(states: bool, options: Options) -> str:
    """Return which options let ``generate`` verify a draft; "" where they are there, or it runs no such model."""
    rows = options.kept_logits if isinstance(options.kept_logits, int) else sys.maxsize
    window = options.kept_states if states else sys.maxsize
    if not options.drafter or options.vision or min(rows, window) > 1:
        return ""
    most = min([DRAFTS + 1, *(n for n in (rows, window) if n > 1)])
    lacking = [f"--logits {most}"] * (rows == 1) + [f"--state-window {most}"] * (window == 1)
    return f"generate --speculate mtp cannot use {MTP_MODEL} without {' '.join(lacking)}: export with that, too"


def _rounded_activations(report: Report, options: Options) -> str:
    """Return where ONNX Runtime's CPU kernels round activations; "" for nowhere."""
    if options.accuracy_level:
        return "ONNX Runtime may round activations to int8, in blocks of the weights' (accuracy_level 4)"
    blocks = [spec for _, spec in report.layers.values() if spec.w13.format == "int8" and spec.w13.group_size != -1]
    return "ONNX Runtime's CPU kernel of int8 experts in blocks rounds activations to int8" if blocks else ""
