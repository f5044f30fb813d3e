"""checkpoint folder -> ONNX folder: read, trace, decode, pack, write; one expert at a time."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from quantmoe.exporter.choosing.options import MAX_FILE_SIZE, Options
from quantmoe.exporter.errors import need_path
from quantmoe.exporter.memory import check_space, doing
from quantmoe.exporter.names import text_part
from quantmoe.exporter.reading.companions import companion_files
from quantmoe.exporter.reading.formats import Checkpoint, open_checkpoint
from quantmoe.exporter.reading.sampling import read_object
from quantmoe.exporter.reading.slices import Slice
from quantmoe.exporter.reading.template import DEFAULT, read_templates
from quantmoe.exporter.reading.tokenizer import CONFIG, TOKENIZER
from quantmoe.exporter.targets import Target
from quantmoe.exporter.writing.calibration import CALIBRATION, weigh
from quantmoe.exporter.writing.external_data import ALIGNMENT, DataFiles, byte_size
from quantmoe.exporter.writing.genai import (
    LOGITS,
    SHORT_CONTEXT,
    add_mtp,
    add_paged,
    add_vision,
    genai_config,
    image_processor,
    shared_tensors,
    shares_buffer,
)
from quantmoe.exporter.writing.identity import export_id
from quantmoe.exporter.writing.output import (
    DATA,
    EMBEDDINGS_MODEL,
    MODEL,
    MTP_MODEL,
    VISION_MODEL,
    is_foreign,
    record,
    remove,
    writing,
)
from quantmoe.exporter.writing.prepare import (
    GENAI,
    PROCESSOR,
    Prepared,
    Report,
    check_output,
    prepare,
    rank_folders,
    stale_folders,
)
from quantmoe.exporter.writing.readme import README, readme
from quantmoe.exporter.writing.tokenizer import write_tokenizer
from quantmoe.ort_ext import OLDEST_GLIBC, glibc_of


# over 80 lines: half say what its options mean
def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    target: Literal["cpu", "cuda", "ort"] = "cpu",
    activations: Literal["int8", "int8-token", "float"] | None = None,
    scales: Literal["exact", "bf16"] = "exact",
    dtype: Literal["f32", "f16", "bf16"] | None = None,
    dense: Literal["quantmoe", "ort"] = "quantmoe",
    logits: Literal["last", "all"] | int = "last",
    lm_head: Literal["int4", "int8"] | None = None,
    cache: Literal["auto", "f16", "f32", "bf16", "int8", "fp8"] = "auto",
    state_window: int = 1,
    mtp: bool = False,
    vision: bool = False,
    layers: int | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    symmetric: bool = False,
    calibrate: str | Path | None = None,
    max_file_size: int = MAX_FILE_SIZE,
    tensor_parallel: int = 1,
    expert_parallel: bool = False,
    expert_map: str | Path | None = None,
    data_parallel: bool = False,
    paged: bool = False,
    experts: Literal["inputs", "external"] = "inputs",
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Export a quantized mixture-of-experts checkpoint as an ONNX model.

    Args:
        checkpoint: Hugging Face folder or GGUF file.
        output: folder for model.onnx, model.onnx.data, configuration, tokenizer, genai_config.json and the target's
            library; created if missing.
        target: "cpu": ONNX Runtime on x86-64 and Arm. "cuda": ONNX Runtime and TensorRT on NVIDIA GPUs. "ort": ONNX
            Runtime's own operators, without a library (docs/guides/without-library.md).
        activations: activation quantization of weights-only checkpoints. "int8": groups of 32 or 64 features
            (int8_group), the default for the CPU. "int8-token": whole tokens (int8_token_asym). "float": none. For CUDA
            the default is the checkpoint's format, and "int8" is refused.
        scales: "bf16" rounds scales, for KleidiAI's kernels; see Report.scale_error.
        dtype: type of the graph outside the experts. CPU: "f32" (default) or "f16". CUDA: "bf16" (default) or "f16".
        dense: operator of quantized linears outside the experts. "quantmoe": QuantLinear. "ort": MatMulNBits of
            com.microsoft where both mean the same result; see Report.not_ort. CUDA takes only "quantmoe".
        logits: "last": each sequence's last token, [B, 1, V]. N: its last N tokens, [B, min(S, N), V], so that N - 1
            draft tokens can be verified. "all": all tokens.
        lm_head: quantizes the LM head; see Report.head_error. None: it stays as it is.
        cache: type of the KV cache. "auto" for the CPU: int8 or e4m3 codes if the checkpoint has scales for them, else
            f16. "auto" for CUDA: floats of the graph's type. "f16", "f32" (CPU), "bf16": floats. "fp8": e4m3 codes, by
            the checkpoint's scales or 1. "int8": codes, by the checkpoint's scales or, on the CPU, one scale for each
            token and head. If some attention is standard nodes (Report.plain_attention), the cache has the graph's
            type.
        state_window: number of last tokens, 1 to 64, whose states of linear attention are kept. N states let N - 1
            draft tokens be verified.
        mtp: also export the layer of multi-token prediction as mtp.onnx. It shares the weight files. The model gets an
            output hidden_states [B, S, H].
        vision: also export the vision tower as vision.onnx, and embeddings.onnx, which puts the tower's features in the
            places of image tokens. model.onnx then takes inputs_embeds [B, S, H] instead of input_ids, and position_ids
            [3, B, S] (docs/guides/vision.md).
        layers: export only the first decoder layers.
        quantize: format for the experts and other ``*_proj`` linears of a bf16 or f16 checkpoint: "int4", "int8",
            "mxfp4", "nvfp4", "q4_k", "q5_k", "q6_k", "q4_k_m" or "q5_k_m". "none" keeps 16 bits.
        group_size: input features that share a scale of ``quantize``; -1: a whole row; None: the format's default.
        symmetric: "int4" has no zero points.
        calibrate: UTF-8 text, or llama.cpp's importance matrix in GGUF. Transformers' model reads a text, one decoder
            layer at a time. Squared errors of weights are weighed by the squares of their inputs. Experts that no token
            reaches are quantized without it; see Report.calibration.
        max_file_size: bytes of weights in a file. Further weights go to model.onnx.data.1 and so on. The default is the
            Hugging Face hub's limit.
        tensor_parallel: number of ranks. ``output`` gets a folder for each, rank0 and so on. The Report is of rank 0
            (docs/guides/several-gpus.md).
        expert_parallel: give each rank whole experts, not a slice of each expert.
        expert_map: file that places experts on ranks (exporter/reading/expert_map.py). By default each rank has as many
            experts, in order.
        data_parallel: give each rank the whole model except the other ranks' experts. Each rank runs its own batch, and
            the batches have one shape.
        paged: export for onnxruntime-genai's Engine, which batches requests continuously; for CUDA. Attention is ONNX
            Runtime's PagedAttention. input_ids [num_tokens] holds the tokens of all requests. logits [num_logits, V]
            holds the tokens that the input logits_indices names, or all.
        experts: "inputs": experts are weights of the nodes. "external", for TensorRT only: nodes name the experts'
            place in the data files. Engines then hold no experts, and the plug-in keeps in GPU memory what fits.
        force: replace an earlier export in ``output``, also an edited one. Files that no export wrote are kept or
            refused. Folders of an earlier export with another number of ranks are removed, except edited files.
        progress: called with stage, bytes done, bytes in all.

    Raises:
        CheckpointError: the checkpoint cannot be read, or something in it is not supported; the message says what.
        OSError: ``output`` cannot be written, or holds a checkpoint. It has a file that would be overwritten, and the
            file is not of an earlier export or ``force`` is False.
        OptionError: an option does not exist, or cannot be combined with another.
        OutOfMemoryError: memory ran out; the message says for what.
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
        vision,
        layers,
        quantize,
        group_size,
        symmetric,
        calibrate,
        max_file_size,
        tensor_parallel,
        expert_parallel,
        expert_map,
        data_parallel,
        paged,
        experts,
    )
    checkpoint, output = need_path("checkpoint", checkpoint), need_path("output", output)
    folders = rank_folders(output, options)
    for folder in folders:
        check_output(checkpoint, folder, options.facts, force)
    stale = stale_folders(output, options, force)
    slices: list[Slice | None] = [*options.slices]
    if options.tensor_parallel > 1:  # a page of each tensor, so once for all ranks
        with doing(str(checkpoint)):
            number = export_id(open_checkpoint(checkpoint), options)
        slices = [part and replace(part, export_id=number) for part in slices]
    reports = [_export(checkpoint, *pair, options, force, progress) for pair in zip(folders, slices, strict=True)]
    for folder in stale:
        remove(folder)
    return reports[0]


def _export(
    checkpoint: str | Path,
    output: Path,
    part_of: Slice | None,
    options: Options,
    force: bool,
    progress: Callable[[str, int, int], None],
) -> Report:
    """Write one folder: the model, or one rank of it."""
    target = options.facts
    with writing(output, force) as partial, doing(f"{checkpoint} to {output}"):
        ready = prepare(checkpoint, options, progress, part_of)
        if options.calibrate is not None:
            ready.report.calibration = weigh(checkpoint, ready, options, output, progress)
        from quantmoe.exporter.writing.parts import save_part, trace_part, write_beside, write_weights  # needs torch

        parts, report, ends, ckpt = ready.parts, ready.report, ready.ends, ready.format.ckpt
        for part in parts:
            progress("tracing", 0, 1)
            trace_part(part, options, report, ends)
        for one in ready.beside:
            one.graph, one.weights = one.stored.trace()

        weights = [weight for part in parts for weight in part.weights]
        weights += [weight for one in ready.beside for weight in one.weights]
        total = sum(byte_size(weight.value) for weight in weights)
        check_space(output, total + _beside_weights(ready, len(weights), target))
        with DataFiles(partial, DATA, options.max_file_size) as data:
            done = 0
            for part in parts:
                for stage, written in write_weights(part, parts[0], options, data, report):
                    done += written
                    progress(stage, done, total)
            for one in ready.beside:
                for stage, written in write_beside(one, data, report):
                    done += written
                    progress(stage, done, total)
        _companions(ckpt, partial, options.layers)
        if not report.tokenizer:
            report.tokenizer = write_tokenizer(ckpt.companions, partial, gguf=ckpt.companions != ckpt.folder)
        ckpt.check_unchanged()
        for_tensorrt = options.experts == "external"
        if for_tensorrt:
            report.genai = "no genai_config.json: with its experts in the data files TensorRT alone runs it"
        elif LOGITS in ends:
            report.genai = "no genai_config.json: onnxruntime-genai takes the logits of the last token, or of all"
        elif part_of is not None:
            report.genai = "no genai_config.json: onnxruntime-genai runs no slices"
        else:
            report.genai = _genai(ready, partial, options)
        if target.library and not for_tensorrt:
            report.library = _library(partial, target, not report.genai)
        metadata = {"checkpoint": ckpt.folder.resolve().name, "target": target.name} | ends
        if part_of:
            metadata |= {"rank": str(part_of.rank), "world": str(part_of.world)}
        oldest = max([target.runtime, *(v for name, v in target.runtime_with.items() if getattr(options, name))])
        runtime = "" if for_tensorrt else ".".join(map(str, oldest))
        if runtime:
            metadata["onnxruntime"] = runtime
        if not is_foreign(output, README):
            partial(README).write_text(readme(target, runtime, part_of, report.tokenizer), encoding="utf-8")
        if report.chat:
            metadata["no_chat"] = report.chat.replace(f"{ckpt.companions}{os.sep}", "")
        if report.plain_attention:
            metadata["plain_attention"] = json.dumps(report.plain_attention)
        for part in parts[1:]:
            save_part(part, partial(MTP_MODEL), {name: text for name, text in metadata.items() if name != LOGITS})
        for one in ready.beside:
            save_part(one, partial(one.name), metadata)
        save_part(parts[0], partial(MODEL), metadata | ready.turns, record(partial(MODEL).parent))
    (output / CALIBRATION).unlink(missing_ok=True)
    return report


def _beside_weights(ready: Prepared, weights: int, target: Target) -> int:
    """Return the bytes that an export writes beside its weights, at most: gaps, tables, the library, copied files."""
    tables = [table.array.nbytes for part in ready.parts for table in part.tables]
    tables += [lookup.bytes for part in ready.parts for lookup in part.lookups if not lookup.head]
    with contextlib.suppress(FileNotFoundError):  # an export goes on without it
        tables.append(Path(target.library_path()).stat().st_size)
    copied = [path.stat().st_size for path in companion_files(ready.format.ckpt.companions)]
    return sum(tables) + sum(copied) + ALIGNMENT * (weights + len(tables))


def _companions(ckpt: Checkpoint, partial: Callable[[str], Path], layers: int | None) -> None:
    templates = read_templates(ckpt.companions)
    if templates.keys() <= {"default"}:  # the template has a file of its own
        templates = {}
    for path in companion_files(ckpt.companions):
        if path.name != TOKENIZER and not (templates and path.name == DEFAULT):
            shutil.copyfile(path, partial(path.name))
    if templates:  # an exported folder has no folders
        named = [{"name": name, "template": text} for name, text in templates.items()]
        config = read_object(ckpt.companions / CONFIG) | {"chat_template": named}
        partial(CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    if layers is not None:
        partial("config.json").write_text(json.dumps(_config(ckpt, layers), indent=2), encoding="utf-8")


def _config(ckpt: Checkpoint, layers: int | None) -> dict[str, Any]:
    config = copy.deepcopy(ckpt.config)
    if layers is not None:
        text_part(config)["num_hidden_layers"] = layers
    return config


def _genai(ready: Prepared, partial: Callable[[str], Path], options: Options) -> str:
    """Write the files that onnxruntime-genai reads beside the model; return why if there are none."""
    ckpt, parts, target = ready.format.ckpt, ready.parts, options.facts
    layers = parts[0].skeleton.model.config.num_hidden_layers  # which config.json may say as a list of kinds alone
    config, shares = _config(ckpt, layers), shares_buffer(parts[0].graph.graph)
    inputs = {str(value.name) for value in parts[0].graph.graph.inputs}
    states = {name.removesuffix(".recurrent_state") for name in inputs if name.endswith(".recurrent_state")}
    try:
        if any(f"{layer}.conv_state" not in inputs for layer in states):  # it looks for both
            raise KeyError("conv_state")
        found = genai_config(config, ckpt.generation_config, target, shares)
        caches = (v for v in parts[0].graph.graph.inputs if str(v.name).endswith((".key", ".value")))
        heads = 2 if options.paged else 1
        shapes = {(v.shape[heads], v.shape[3]) for v in caches if v.shape is not None}
        if len(shapes) > 1:  # onnxruntime-genai allocates all alike
            raise KeyError("head_dim")
        _, width = shapes.pop()
        if isinstance(width, int):  # codes may have their scales behind them
            found["model"]["decoder"]["head_size"] = width
        if len(parts) > 1 and options.logits == "all":  # which drafts take
            values = ([weight.value for weight in part.weights] for part in parts)
            # a CPU maps the file: one copy, however many sessions
            add_mtp(found, MTP_MODEL, shared_tensors(*values) if target.on_gpu else [])
        if (short := ready.ends.get(SHORT_CONTEXT)) is not None:  # it reads prompts in pieces, and reads none again
            found["search"]["max_length"] = min(found["search"]["max_length"], int(short))
        if options.paged:
            add_paged(found, (str(v.name) for v in parts[0].graph.graph.inputs))
        if ready.whole is not None:
            add_vision(found, ready.whole, PROCESSOR, (VISION_MODEL, EMBEDDINGS_MODEL))
            partial(PROCESSOR).write_text(json.dumps(image_processor(ckpt.image_processor), indent=2), encoding="utf-8")
        partial(GENAI).write_text(json.dumps(found, indent=2), encoding="utf-8")
    except KeyError:
        return "no genai_config.json: onnxruntime-genai has no decoder for this architecture"
    return ""


def _library(partial: Callable[[str], Path], target: Target, for_genai: bool) -> str:
    """Copy the operators' library; return a remark if there is none, or if it needs more than OLDEST_GLIBC."""
    try:
        library = Path(target.library_path())
    except FileNotFoundError:
        use = "put it beside the model for onnxruntime-genai" if for_genai else "programs register it to run the model"
        return f"{target.library} is not in this installation: {use}"
    shutil.copyfile(library, partial(target.library))
    major, minor = glibc_of(library)
    if (major, minor) <= OLDEST_GLIBC:
        return ""
    return f"{library.name} asks for glibc {major}.{minor} or newer ({target.library_rebuild})"
