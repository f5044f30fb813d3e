"""checkpoint folder -> ONNX folder: read, trace, decode, pack, write; one expert at a time."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import MoESpec, inputs
from quantmoe.exporter.ahead import BLOCK_MEMORY, ahead, expert_size
from quantmoe.exporter.choosing.choose import (
    Choice,
    linear_matrix,
    retyped,
    scaled,
)
from quantmoe.exporter.choosing.options import MAX_FILE_SIZE, Options
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.graph.passes.defaults import drop_defaults
from quantmoe.exporter.graph.passes.embeddings import keep_tables
from quantmoe.exporter.graph.passes.interface import drop_traces, name_interface
from quantmoe.exporter.graph.passes.last_logits import HIDDEN, HIDDEN_OUT, keep_last_logits, output_hidden
from quantmoe.exporter.graph.passes.matmul_nbits import to_matmul_nbits, why_not
from quantmoe.exporter.graph.passes.weights import Weight, place_weights
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.formats import Checkpoint, Format, MoELayer
from quantmoe.exporter.reading.formats.base import MTP
from quantmoe.exporter.reading.formats.rounding import distance
from quantmoe.exporter.writing.external_data import INLINE, DataFiles, Region, byte_size, naming
from quantmoe.exporter.writing.genai import (
    LOGITS,
    SHARE_BUFFER,
    add_mtp,
    genai_config,
    shared_tensors,
    shares_buffer,
)
from quantmoe.exporter.writing.output import (
    DATA,
    FILES,
    MODEL,
    MTP_MODEL,
    PRODUCER,
    record,
    writing,
)
from quantmoe.exporter.writing.prepare import GENAI, Part, Report, check_output, companion_files, prepare
from quantmoe.ort_ext import LIBRARIES, OLDEST, OLDEST_GLIBC, cuda_library_path, glibc_of, library_path

if TYPE_CHECKING:
    from quantmoe.exporter.graph.model import Skeleton


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    target: Literal["cpu", "cuda"] = "cpu",
    activations: Literal["int8", "float"] | None = None,
    scales: Literal["exact", "bf16"] = "exact",
    dtype: Literal["f32", "f16", "bf16"] | None = None,
    dense: Literal["quantmoe", "ort"] = "quantmoe",
    logits: Literal["last", "all"] | int = "last",
    lm_head: Literal["int4", "int8"] | None = None,
    cache: Literal["auto", "f16", "f32", "bf16", "int8", "fp8"] = "auto",
    state_window: int = 1,
    mtp: bool = False,
    layers: int | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    max_file_size: int = MAX_FILE_SIZE,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Exports a quantized mixture-of-experts checkpoint.

    Args:
        checkpoint: Hugging Face folder.
        output: folder for model.onnx, model.onnx.data, configuration, tokenizer, and for onnxruntime-genai its
            genai_config.json and the target's library; created if missing.
        target: "cpu": ONNX Runtime on x86-64 and Arm; "cuda": TensorRT and ONNX Runtime on NVIDIA GPUs, only of the
            operators of ai.onnx and quantmoe.
        activations: of weight-only checkpoints: "int8" quantizes each token (int8_token_asym), "float" does not. The
            default is "int8" for the CPU, and what the checkpoint says for CUDA.
        scales: "bf16" rounds them, for KleidiAI's kernels; see Report.scale_error.
        dtype: of the graph outside the experts: for the CPU "f32" (default) or "f16", for CUDA "bf16" (default) or
            "f16".
        dense: quantized linears outside the experts become QuantLinear, or with "ort" com.microsoft::MatMulNBits where
            it means the same; see Report.not_ort. For CUDA only "quantmoe". On the CPU linears of 16-bit floats are
            QuantLinear, too, whose weights stay as they are.
        logits: of each row's last token, [B, 1, V]; of its last N tokens, [B, min(S, N), V], so that speculation can
            verify N - 1 drafts; or of all tokens, for perplexity and for onnxruntime-genai's speculation.
        lm_head: rounds the head to nearest; see Report.head_error. None: it stays as it is.
        cache: what the KV cache holds. "auto": on the CPU int8 or e4m3 codes where the checkpoint says so and has
            scales, else f16; for CUDA floats of the graph's type. "f16", "f32" (CPU), "bf16": floats. "fp8": e4m3
            codes, by the checkpoint's scales or 1. "int8": codes, by the checkpoint's scales or, on the CPU, one of
            each token and head. Where some attention is standard nodes (Report.plain_attention), it is floats of the
            graph's type.
        state_window: of linear attention the states after each of the last so many tokens of a run, 1 to 64, so that
            speculation can verify one draft less; for the CPU.
        mtp: also the layer that drafts (multi-token prediction), mtp.onnx; its weights are in the same files,
            embeddings and head once. The model has an output hidden_states [B, S, H].
        layers: only the first so many decoder layers.
        quantize: "int4", "int8", "mxfp4" or "nvfp4" for a checkpoint that is not quantized: its experts and other
            ``*_proj`` linears are rounded to nearest; "none": its experts stay as they are, bf16 or f16.
        group_size: of ``quantize``, input features that share a scale, -1 for a row; None: what is usual.
        max_file_size: bytes of weights in a file; what comes after goes to model.onnx.data.1 and so on. The default is
            what the Hugging Face hub takes.
        force: replace an earlier export in ``output``, its files edited or not; what is there and no export wrote is
            kept or refused.
        progress: called with stage, bytes done, bytes in all.

    Raises:
        CheckpointError: the checkpoint cannot be read, or something in it is not supported; the message says what.
        OSError: ``output`` cannot be written, holds this checkpoint or another, or a file that would be written over
            and is not of an earlier export, or ``force`` is False.
        OptionError: an option that does not exist, or not with the others.
        OutOfMemoryError: naming what did not fit.
    """
    options = Options(
        target,
        activations,
        scales,
        dtype,
        dense,
        logits,
        lm_head,
        cache,
        state_window,
        mtp,
        layers,
        quantize,
        group_size,
        max_file_size,
    )
    check_output(Path(checkpoint), Path(output), target, force)
    with writing(Path(output), force) as partial, doing(f"{checkpoint} to {output}"):
        ready = prepare(checkpoint, options, progress)
        parts, report, ends, ckpt = ready.parts, ready.report, ready.ends, ready.format.ckpt
        for part in parts:
            progress("tracing", 0, 1)
            _trace(part, options, report, ends)

        total = sum(byte_size(weight.value) for part in parts for weight in part.weights)
        with DataFiles(partial, DATA, max_file_size) as data:
            done = 0
            for part in parts:
                for stage, written in _weights(part, parts[0], scales, dense, data, report):
                    done += written
                    progress(stage, done, total)
        _companions(ckpt, partial, layers)
        if LOGITS not in ends:  # onnxruntime-genai takes those of all tokens or of the last
            _genai(ckpt, partial, layers, target, parts, logits == "all")
        report.library = _library(partial, target)
        metadata = {"checkpoint": ckpt.folder.resolve().name, "target": target} | ends
        metadata["onnxruntime"] = ".".join(map(str, OLDEST))
        if report.plain_attention:
            metadata["plain_attention"] = json.dumps(report.plain_attention)
        for part in parts[1:]:
            _save(part, partial(MTP_MODEL), {name: text for name, text in metadata.items() if name != LOGITS})
        _save(parts[0], partial(MODEL), metadata, record(partial(MODEL).parent))
    return report


def _trace(part: Part, options: Options, report: Report, ends: dict[str, str]) -> None:
    """Makes a part's graph and what it has for weights.

    Args:
        ends: see Prepared; gets how many tokens have logits, where that is neither one nor all.
    """
    from quantmoe.exporter.graph.model import trace

    part.graph = graph = trace(part.skeleton, part.chosen, part.attention, options.target)
    report.untraced = graph.meta.pop("untraced", "") or report.untraced
    routers = sum(node.op_type in ("MoERouting", "MoERouter") for node in graph.graph)
    report.plain_routers += len(part.chosen.layers) - routers
    part.weights = place_weights(graph)
    keep_tables(part.weights, part.skeleton.stored_type)
    name_interface(graph)
    head, config = bool(part.skeleton.format.part), part.skeleton.model.config
    if options.mtp and not output_hidden(graph, HIDDEN_OUT if head else HIDDEN, config.hidden_size):
        raise CheckpointError(
            f"{part.skeleton.format.ckpt.folder}: no product with a weight makes the logits: no {MTP}"
        )
    kept = 1 if head or options.logits == "last" else options.logits
    if isinstance(kept, int) and keep_last_logits(graph, kept) and kept > 1:
        ends[LOGITS] = str(kept)
    if options.target == "cuda":
        drop_defaults(graph)


def _weights(
    part: Part, first: Part, scales: str, dense: str, data: DataFiles, report: Report
) -> Iterator[tuple[str, int]]:
    """Writes a part's weights, or takes those that the first part has; yields what it does and how many bytes."""
    skeleton, chosen = part.skeleton, part.chosen
    specs, linears, ckpt = chosen.layers, chosen.linears, skeleton.format.ckpt
    there = {} if part is first else {first.key(weight): weight.value for weight in first.weights}
    regions = {}
    for weight in part.weights:
        module, _, projection = weight.parameter.rpartition(".")
        if module in specs:
            regions[module, projection] = data.region(weight.value)
            continue
        if isinstance(getattr(shared := there.get(part.key(weight)), "const_value", None), ir.ExternalTensor):
            assert shared is not None
            _share(weight.value, shared)
            yield "writing other weights", byte_size(weight.value)
            continue
        source = chosen.source(module) if module in linears else skeleton.sources[weight.parameter]
        with doing(f"{ckpt.folder}: {source}"):
            if module in linears:
                written = _linear(weight, skeleton, chosen, scales, dense, data, report)
            else:
                written = _dense(weight, skeleton, data, report)
        yield "writing other weights", written
    for name, layer in chosen.experts.items():
        pair = regions[name, "w13"], regions[name, "w2"]
        for written in _pack(layer, specs[name], pair, scales, report):
            yield "packing experts", written
        report.packed_bytes += pair[0].length + pair[1].length


def _share(value: ir.Value, written: ir.Value) -> None:
    """Gives a value the bytes of another graph's, and its nodes what they say of them."""
    tensor = written.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    value.const_value = ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=value.name or "",
        metadata_props=tensor.metadata_props,
    )
    for (node, _), (other, _) in zip(value.uses(), written.uses(), strict=False):
        node.attributes.update({name: a for name, a in other.attributes.items() if name.endswith("_identity")})


def _pack(layer: MoELayer, spec: MoESpec, regions: tuple[Region, Region], scales: str, report: Report) -> Iterator[int]:
    """Decodes and packs experts ahead of the writing; yields the bytes of each."""
    layout = LAYOUTS[spec.w13.layout]

    def make(e: int) -> tuple[list[np.ndarray], float]:
        with doing(f"{layer.format.ckpt.folder}: {layer.label(e)}"):
            return packed(e)

    def packed(e: int) -> tuple[list[np.ndarray], float]:
        expert, error = scaled(layer.expert(e), scales)
        rows = [native.aligned(layout.row_bytes(spec, projection)) for projection in ("w13", "w2")]
        try:
            layout.pack(expert, spec, *rows)
        except ValueError as error:
            raise CheckpointError(f"{layer.format.ckpt.folder}: {layer.label(e)}: {error}") from None
        return rows, error

    calls = [functools.partial(make, e) for e in range(layer.every)]
    with contextlib.closing(ahead(calls, expert_size(spec))) as made:
        for rows, error in made:
            for region, row in zip(regions, rows, strict=True):
                region.write(row)
            if scales == "bf16":
                report.scale_error = max(report.scale_error or 0.0, error)
            layer.format.ckpt.release()
            yield sum(map(len, rows))
    for region in regions:
        _identify(region, layer.format)
        metadata = {"module": layer.name, "format": layer.scheme.text, "layout": spec.w13.layout,
                    "layout_version": str(spec.w13.layout_version), "spec": json.dumps(spec.attributes())}  # fmt: skip
        if layer.shared:
            metadata["shared"] = json.dumps(layer.shared.names())
        region.finish(metadata)


def _linear(
    weight: Weight, skeleton: Skeleton, chosen: Choice, scales: str, dense: str, data: DataFiles, report: Report
) -> int:
    """Writes a linear's packed weight, or makes its node a MatMulNBits; returns the bytes."""
    format, name = skeleton.format, weight.parameter.rpartition(".")[0]
    spec, source, parts = chosen.linears[name], chosen.source(name), [*chosen.parts[name].values()]
    scheme = format.scheme_of(parts[0])
    m, error = linear_matrix(format, parts, scales)
    if spec.w.layout == "marlin" and m.kind in ("bf16", "f16"):
        try:
            m = retyped(m, spec.w.format)
        except ValueError as refusal:
            raise CheckpointError(f"{format.ckpt.folder}: {source}: {refusal}") from None
    if source == skeleton.head:
        report.head_error = distance(m, format.stored(f"{source}.weight"))
    if scales == "bf16":
        report.scale_error = max(report.scale_error or 0.0, error)
    metadata = {"module": source, "format": scheme.text}
    if len(parts) > 1:
        metadata["rows"] = json.dumps(skeleton.rows(chosen.parts[name]))
    if dense == "ort" and format.is_quantized(parts[0]):
        reason = why_not(m, scheme.activation_format, skeleton.dtype.itemsize)
        if reason is None:
            size = 0
            for value, array in to_matmul_nbits(weight.value, m, spec):
                region = data.region(value)
                region.write(array)
                region.finish(metadata)
                size += array.nbytes
            report.dense_bytes += size
            return size
        report.not_ort[source] = reason
    layout = LAYOUTS[spec.w.layout]
    row = native.aligned(layout.row_bytes(spec.moe, "w2"))
    try:
        layout.pack_down(m, spec.moe, row)
    except ValueError as problem:
        for part in parts:  # one of them is to blame, if one is
            _check_finite(format, part)
        raise CheckpointError(f"{format.ckpt.folder}: {source}: {str(problem).removeprefix('down: ')}") from None
    region = data.region(weight.value)
    region.write(row)
    _identify(region, format)
    region.finish(metadata | {"layout": spec.w.layout, "layout_version": str(spec.w.layout_version),
                              "spec": json.dumps(spec.attributes())})  # fmt: skip
    report.dense_bytes += row.nbytes
    format.ckpt.release()
    return row.nbytes


def _check_finite(format: Format, module: str) -> None:
    try:
        format.matrix_of(module).check_finite(module)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{format.ckpt.folder}: {error}") from None


def _identify(region: Region, format: Format) -> None:
    """Tells the nodes that read a packed weight which bytes it has."""
    for node, at in region.value.uses():
        name = f"{inputs(node.op_type)[at][0]}_identity"
        node.attributes[name] = ir.AttrString(name, region.identity(format.ckpt.folder.resolve().name))


def _dense(weight: Weight, skeleton: Skeleton, data: DataFiles, report: Report) -> int:
    """Writes a weight outside the experts; returns its bytes."""
    format, source = skeleton.format, skeleton.sources[weight.parameter]
    metadata, module = {"module": source}, source.rpartition(".")[0]
    if weight.parameter in skeleton.joined:
        metadata["module"] = ", ".join(skeleton.joined[weight.parameter])
    if source == f"{module}.weight" and format.is_quantized(module):
        owner = type(skeleton.model.get_submodule(weight.parameter.rpartition(".")[0])).__name__
        reason = report.dequantized.setdefault(source, f"{owner} is not a linear layer")
        metadata |= {"dequantized_from": format.scheme(module).text, "dequantized_because": reason}
    assert weight.value.dtype is not None
    blocks = skeleton.blocks(weight.parameter, weight.transposed, weight.value.dtype.numpy())
    size = byte_size(weight.value)
    if size <= INLINE:
        array = np.concatenate([block() for block in blocks])
        weight.value.const_value = ir.Tensor(array, name=weight.value.name, metadata_props=metadata)
    else:
        region = data.region(weight.value)
        for block in ahead(blocks, BLOCK_MEMORY):
            region.write(block)
        region.finish(metadata)
    report.dense_bytes += size
    format.ckpt.release()
    return size


def _save(part: Part, path: Path, metadata: dict[str, str], files: str = "") -> None:
    """files: FILES, of the model that is renamed last."""
    graph = part.graph
    for weight in part.weights:
        if weight.value.uses():
            graph.graph.register_initializer(weight.value)
    drop_traces(graph)
    graph.producer_name, graph.producer_version = PRODUCER, version("quantmoe")
    graph.metadata_props.update(metadata | ({FILES: files} if files else {}))
    if shares_buffer(graph.graph):
        graph.metadata_props[SHARE_BUFFER] = "true"
    if metadata["target"] == "cpu":
        graph.doc_string = f"Register {LIBRARIES['cpu']} of `pip install quantmoe` with ONNX Runtime to run this."
    with doing(str(path)), naming(path):
        ir.save(graph, path)


def _companions(ckpt: Checkpoint, partial: Callable[[str], Path], layers: int | None) -> None:
    for path in companion_files(ckpt.companions):
        shutil.copyfile(path, partial(path.name))
    if layers is not None:
        partial("config.json").write_text(json.dumps(_config(ckpt, layers), indent=2))


def _config(ckpt: Checkpoint, layers: int | None) -> dict[str, Any]:
    config = copy.deepcopy(ckpt.config)
    if layers is not None:
        (config.get("text_config") or config)["num_hidden_layers"] = layers
    return config


def _genai(
    ckpt: Checkpoint,
    partial: Callable[[str], Path],
    layers: int | None,
    target: str,
    parts: Sequence[Part],
    every: bool,
) -> None:
    """What onnxruntime-genai reads beside the model. every: it gives the logits of all tokens, which drafts take."""
    config, shares = _config(ckpt, layers), shares_buffer(parts[0].graph.graph)
    with contextlib.suppress(KeyError):  # an architecture that onnxruntime-genai has no decoder for
        found = genai_config(config, ckpt.generation_config, LIBRARIES[target], shares, target == "cuda")
        keys = (v.shape for v in parts[0].graph.graph.inputs if str(v.name).endswith(".key") and v.shape is not None)
        widths = {shape[3] for shape in keys if isinstance(shape[3], int)}
        if len(widths) == 1:  # codes may have their scales behind them
            found["model"]["decoder"]["head_size"] = widths.pop()
        if len(parts) > 1 and every:
            values = ([weight.value for weight in part.weights] for part in parts)
            # a CPU maps the file: one copy, however many sessions
            add_mtp(found, MTP_MODEL, shared_tensors(*values) if target == "cuda" else [])
        partial(GENAI).write_text(json.dumps(found, indent=2))


def _library(partial: Callable[[str], Path], target: str) -> str:
    """The operators' library; returns a remark when there is none, or it does not load wherever OLDEST_GLIBC does."""
    try:
        library = Path(library_path() if target == "cpu" else cuda_library_path())
    except FileNotFoundError:
        return f"{LIBRARIES[target]} is not in this installation: put it beside the model for onnxruntime-genai"
    shutil.copyfile(library, partial(LIBRARIES[target]))
    major, minor = glibc_of(library)
    if (major, minor) <= OLDEST_GLIBC:
        return ""
    return f"{library.name} asks for glibc {major}.{minor} or newer (without CXX, `make build` makes one for 2.28)"
