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
from typing import Any, Unpack

from quantmoe.exporter.choosing.options import ExportOptions, Options
from quantmoe.exporter.errors import need_path
from quantmoe.exporter.folder.chat_template import read_templates
from quantmoe.exporter.folder.files import (
    CALIBRATION,
    CHAT_TEMPLATE,
    CONFIG,
    DATA,
    EMBEDDINGS_MODEL,
    GENAI,
    MODEL,
    MTP_MODEL,
    PROCESSOR,
    README,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VISION_MODEL,
)
from quantmoe.exporter.folder.interface import NUM_LOGITS
from quantmoe.exporter.folder.json_files import read_object
from quantmoe.exporter.folder.metadata import (
    CHECKPOINT,
    LOGITS,
    NO_CHAT,
    ONNXRUNTIME,
    PLAIN_ATTENTION,
    RANK,
    SHORT_CONTEXT,
    TARGET,
    WORLD,
)
from quantmoe.exporter.memory import check_space, doing
from quantmoe.exporter.reading.companions import companion_files
from quantmoe.exporter.reading.config_fields import text_part
from quantmoe.exporter.reading.formats import Checkpoint, open_checkpoint
from quantmoe.exporter.reading.hub import fetched
from quantmoe.exporter.reading.slices import Slice
from quantmoe.exporter.targets import Target
from quantmoe.exporter.writing.calibration import weigh
from quantmoe.exporter.writing.external_data import ALIGNMENT, DataFiles, byte_size
from quantmoe.exporter.writing.genai import (
    FIELDS,
    add_caches,
    add_mtp,
    add_paged,
    add_vision,
    caches,
    fix_logits,
    genai_config,
    image_processor,
    shared_tensors,
    shares_buffer,
    why_not,
)
from quantmoe.exporter.writing.identity import export_id
from quantmoe.exporter.writing.output import is_foreign, record, remove, writing
from quantmoe.exporter.writing.prepare import Prepared, Report, check_output, prepare, rank_folders, stale_folders
from quantmoe.exporter.writing.readme import readme
from quantmoe.exporter.writing.tokenizer import write_tokenizer
from quantmoe.exporter.writing.transformers_js import (
    LARGEST,
    check_onnx_folder,
    js_config,
    remove_onnx_folder,
    write_onnx_folder,
)
from quantmoe.ort_ext import OLDEST_GLIBC, glibc_of


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    **options: Unpack[ExportOptions],
) -> Report:
    """Export a quantized mixture-of-experts checkpoint as an ONNX model.

    Args:
        checkpoint: Hugging Face folder, its name ORG/MODEL on the hub (with huggingface_hub), or GGUF file.
        output: folder for model.onnx, model.onnx.data, configuration, tokenizer, genai_config.json and the target's
            library; created if missing.
        force: replace an earlier export in ``output``, also an edited one. Files that no export wrote are kept or
            refused. Folders of an earlier export with another number of ranks are removed, except edited files.
        progress: called with stage, bytes done, bytes in all.
        options: fields of :class:`quantmoe.Options`, which says what they mean: ``target="cuda"``.

    Raises:
        CheckpointError: the checkpoint cannot be read, or something in it is not supported; the message says what.
        OSError: ``output`` cannot be written, or holds a checkpoint. It has a file that would be overwritten, and the
            file is not of an earlier export or ``force`` is False.
        OptionError: an option has a wrong value, or cannot be combined with another.
        TypeError: there is no such option.
        OutOfMemoryError: memory ran out; the message says for what.
    """
    wanted = Options(**options)
    return write(fetched(need_path("checkpoint", checkpoint)), output, wanted, force=force, progress=progress)


def write(
    checkpoint: str | Path,
    output: str | Path,
    options: Options,
    *,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Write what :func:`export` describes."""
    checkpoint, output = need_path("checkpoint", checkpoint), need_path("output", output)
    folders = rank_folders(output, options)
    for folder in folders:
        check_output(checkpoint, folder, options.facts, force)
        if options.browser:
            check_onnx_folder(folder, force)
    stale = stale_folders(output, options, force)
    slices: list[Slice | None] = [*options.slices]
    if options.tensor_parallel > 1:  # a page of each tensor, so once for all ranks
        with doing(str(checkpoint)):
            number = export_id(open_checkpoint(checkpoint), options)
        slices = [part and replace(part, export_id=number) for part in slices]
    reports = [
        _export(checkpoint, folder, part, options=options, force=force, progress=progress)
        for folder, part in zip(folders, slices, strict=True)
    ]
    for folder in stale:
        remove(folder)
    return reports[0]


def _export(
    checkpoint: str | Path,
    output: Path,
    part_of: Slice | None,
    *,
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
        from quantmoe.exporter.writing.graph_writer import save_part, trace_part  # needs torch

        parts, report, ends, ckpt = ready.parts, ready.report, ready.ends, ready.format.ckpt
        for part in parts:
            progress("tracing", 0, 1)
            trace_part(part, options, report, ends)
        for one in ready.beside:
            one.graph, one.weights = one.stored.trace()
        _write_weights(ready, output, partial, options=options, progress=progress)
        _companions(ckpt, partial, options)
        if not report.tokenizer:
            report.tokenizer = write_tokenizer(ckpt.companions, partial, gguf=ckpt.companions != ckpt.folder)
        ckpt.check_unchanged()
        for_tensorrt = options.external_experts
        if reason := _genai(ready, partial, options, part_of):
            report.genai = f"no genai_config.json: {reason}"
        if target.library and not for_tensorrt:
            report.library = _library(partial, target, not report.genai)
        metadata = {CHECKPOINT: ckpt.folder.resolve().name, TARGET: target.name} | ends
        if part_of:
            metadata |= {RANK: str(part_of.rank), WORLD: str(part_of.world)}
        oldest = max([target.runtime, *(v for name, v in target.runtime_with.items() if getattr(options, name))])
        runtime = "" if for_tensorrt else ".".join(map(str, oldest))
        if runtime:
            metadata[ONNXRUNTIME] = runtime
        if not is_foreign(output, README):
            remark = "\n".join(filter(None, [report.genai, report.tokenizer]))
            partial(README).write_text(readme(target, runtime, part_of, remark), encoding="utf-8")
        if report.chat:
            metadata[NO_CHAT] = report.chat.replace(f"{ckpt.companions}{os.sep}", "")
        if report.plain_attention:
            metadata[PLAIN_ATTENTION] = json.dumps(report.plain_attention)
        for part in parts[1:]:
            save_part(part, partial(MTP_MODEL), {name: text for name, text in metadata.items() if name != LOGITS})
        for one in ready.beside:
            save_part(one, partial(one.name), metadata)
        save_part(parts[0], partial(MODEL), metadata | ready.turns, record(partial(MODEL).parent))
    (output / CALIBRATION).unlink(missing_ok=True)
    if options.browser:
        write_onnx_folder(output)
    else:
        remove_onnx_folder(output)
    return report


def _write_weights(
    ready: Prepared,
    output: Path,
    partial: Callable[[str], Path],
    *,
    options: Options,
    progress: Callable[[str, int, int], None],
) -> None:
    """Write the weights of all models of a folder into its data files, if the disk has room for them."""
    from quantmoe.exporter.writing.graph_writer import write_beside, write_weights

    weights = [weight for part in ready.parts for weight in part.weights]
    weights += [weight for one in ready.beside for weight in one.weights]
    total = sum(byte_size(weight.value) for weight in weights)
    check_space(output, total + _beside_weights(ready, len(weights), options.facts))
    largest = min(LARGEST, options.max_file_size) if options.browser else options.max_file_size
    with DataFiles(partial, DATA, largest) as data:
        done = 0
        for part in ready.parts:
            for stage, written in write_weights(part, ready.parts[0], options, data, ready.report):
                done += written
                progress(stage, done, total)
        for one in ready.beside:
            for stage, written in write_beside(one, data, ready.report):
                done += written
                progress(stage, done, total)


def _beside_weights(ready: Prepared, weights: int, target: Target) -> int:
    """Return the bytes that an export writes beside its weights, at most: gaps, tables, the library, copied files."""
    tables = [table.array.nbytes for part in ready.parts for table in part.tables]
    tables += [lookup.bytes for part in ready.parts for lookup in part.lookups if not lookup.head]
    with contextlib.suppress(FileNotFoundError):  # an export goes on without it
        tables.append(Path(target.library_path()).stat().st_size)
    copied = [path.stat().st_size for path in companion_files(ready.format.ckpt.companions)]
    return sum(tables) + sum(copied) + ALIGNMENT * (weights + len(tables))


def _companions(ckpt: Checkpoint, partial: Callable[[str], Path], options: Options) -> None:
    templates = read_templates(ckpt.companions)
    if templates.keys() <= {"default"}:  # the template has a file of its own
        templates = {}
    for path in companion_files(ckpt.companions):
        if path.name != TOKENIZER and not (templates and path.name == CHAT_TEMPLATE):
            shutil.copyfile(path, partial(path.name))
    if templates:  # an exported folder has no folders
        named = [{"name": name, "template": text} for name, text in templates.items()]
        config = read_object(ckpt.companions / TOKENIZER_CONFIG) | {"chat_template": named}
        partial(TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    if options.layers is not None or options.browser:
        own = _config(ckpt, options.layers)
        if options.browser:
            own = js_config(own, partial(CONFIG).parent)
        partial(CONFIG).write_text(json.dumps(own, indent=2), encoding="utf-8")


def _config(ckpt: Checkpoint, layers: int | None) -> dict[str, Any]:
    config = copy.deepcopy(ckpt.config)
    if layers is not None:
        text_part(config)["num_hidden_layers"] = layers
    return config


def _genai(ready: Prepared, partial: Callable[[str], Path], options: Options, part_of: Slice | None) -> str:
    """Write the files that onnxruntime-genai reads beside the model; return why if there are none."""
    ckpt, parts, target = ready.format.ckpt, ready.parts, options.facts
    if options.external_experts:
        return "with its experts in the data files TensorRT alone runs it"
    if LOGITS in ready.ends:
        return "onnxruntime-genai takes --logits last or --logits all"
    if part_of is not None:
        return "onnxruntime-genai runs no slices"
    if options.paged and not target.on_gpu:
        return "onnxruntime-genai's Engine has caches in blocks on NVIDIA GPUs only"
    if (family := parts[0].skeleton.vision) is not None and not family.NAME:
        return "onnxruntime-genai 0.18 has no pipeline of this vision tower"
    graph, model = parts[0].graph.graph, parts[0].skeleton.model.config
    cached = caches(graph.inputs, options.paged)
    if reason := why_not(cached, options.paged):
        return f"onnxruntime-genai 0.18 cannot run the model: {reason}"
    fields = {name: getattr(model, name) for name in FIELDS if hasattr(model, name)}
    try:
        found = genai_config(
            _config(ckpt, model.num_hidden_layers), ckpt.generation_config, target, shares_buffer(graph), fields
        )
        add_caches(found, cached)
        if target.token_rows and NUM_LOGITS in parts[0].graph.metadata_props:
            fix_logits(found)
        if len(parts) > 1 and options.kept_logits == "all":  # which drafts take
            values = ([weight.value for weight in part.weights] for part in parts)
            # a CPU maps the file: one copy, however many sessions
            add_mtp(found, MTP_MODEL, shared_tensors(*values) if target.on_gpu else [])
        if (short := ready.ends.get(SHORT_CONTEXT)) is not None:  # it reads prompts in pieces, and reads none again
            found["search"]["max_length"] = min(found["search"]["max_length"], int(short))
        if options.paged:
            add_paged(found, (str(v.name) for v in graph.inputs))
        skeleton = ready.parts[0].skeleton
        if ready.whole is not None and skeleton.vision is not None:
            names = VISION_MODEL, EMBEDDINGS_MODEL
            add_vision(
                found,
                skeleton.vision.NAME,
                skeleton.embedding_width,
                model=ready.whole,
                processor=PROCESSOR,
                filenames=names,
            )
            partial(PROCESSOR).write_text(json.dumps(image_processor(ckpt.image_processor), indent=2), encoding="utf-8")
        partial(GENAI).write_text(json.dumps(found, indent=2), encoding="utf-8")
    except KeyError as error:
        return f"the checkpoint's configuration has no {error.args[0]}"
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
