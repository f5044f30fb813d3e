"""checkpoint folder -> ONNX folder: read, trace, decode, pack, write; one expert at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Literal, TypeVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.formats import Checkpoint, MoELayer, find_format, open_checkpoint
from quantmoe.exporter.model import DTYPES, Skeleton, trace
from quantmoe.exporter.passes.external_data import INLINE, DataFile, Region, byte_size
from quantmoe.exporter.passes.interface import name_interface
from quantmoe.exporter.passes.weights import Weight, place_weights

T = TypeVar("T")
MODEL, DATA = "model.onnx", "model.onnx.data"
#: the packed layout an engine reads
LAYOUT = {"cpu": "cpu_panel"}
#: files of a checkpoint that clients of the model need
COMPANIONS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
              "vocab.*", "merges.txt", "chat_template*", "*.model")  # fmt: skip


@dataclasses.dataclass
class Report:
    """What an export did.

    Attributes:
        format: name of the checkpoint format.
        layers: checkpoint module name -> (scheme in the tool's words, node attributes).
        activations: remark when they are not what the checkpoint says, else "".
        scale_error: largest relative error of a scale rounded to bf16; None when scales are exact.
        packed_bytes, dense_bytes: of the experts and of everything else.
        dequantized: tensors outside the experts that the checkpoint quantizes and the model does not.
    """

    format: str
    layers: dict[str, tuple[str, MoESpec]]
    activations: str = ""
    scale_error: float | None = None
    packed_bytes: int = 0
    dense_bytes: int = 0
    dequantized: int = 0


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    target: Literal["cpu"] = "cpu",
    activations: Literal["int8", "float"] = "int8",
    scales: Literal["exact", "bf16"] = "exact",
    dtype: Literal["f32", "f16"] = "f32",
    layers: int | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Exports a quantized mixture-of-experts checkpoint.

    Args:
        checkpoint: Hugging Face folder.
        output: folder for model.onnx, model.onnx.data, configuration and tokenizer; created if missing.
        activations: of weight-only checkpoints: "int8" quantizes each token (int8_token_asym), "float" does not.
        scales: "bf16" rounds them, for KleidiAI's kernels; see Report.scale_error.
        dtype: of the graph outside the experts.
        layers: only the first so many decoder layers.
        force: replace a model already in ``output``.
        progress: called with stage, bytes done, bytes in all.

    Raises:
        CheckpointError: the checkpoint cannot be read, or something in it is not supported; the message says what.
        OSError: ``output`` cannot be written, is the checkpoint itself, or holds a model and ``force`` is False.
        ValueError: an option that does not exist.
    """
    for name, value, known in (
        ("target", target, tuple(LAYOUT)),
        ("activations", activations, ("int8", "float")),
        ("scales", scales, ("exact", "bf16")),
        ("dtype", dtype, tuple(DTYPES)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(known)}")
    if Path(output).resolve() == Path(checkpoint).resolve():
        raise FileExistsError(f"{output} is the checkpoint's own folder; export to another")
    if Path(output).exists() and not Path(output).is_dir():
        raise NotADirectoryError(f"{output} is a file, expected a folder to write to")
    with _writing(Path(output), force) as partial:
        progress("reading", 0, 1)
        format = find_format(open_checkpoint(checkpoint))
        skeleton = Skeleton(format, dtype, layers)
        report = Report(format.name, {})
        specs = {}
        for name, layer in skeleton.experts.items():
            specs[name] = spec_of(layer, LAYOUT[target], activations, scales, report)
            report.layers[layer.name] = (layer.scheme.text, specs[name])

        progress("tracing", 0, 1)
        graph = trace(skeleton, specs, fusions=target)
        weights = place_weights(graph)
        name_interface(graph)

        total, done = sum(byte_size(weight.value) for weight in weights), 0
        with DataFile(partial(DATA), DATA) as data:
            regions = {}
            for weight in weights:
                module, _, projection = weight.parameter.rpartition(".")
                if module in specs:
                    regions[module, projection] = data.region(weight.value)
                    continue
                progress("writing other weights", done, total)
                done += _dense(weight, skeleton, data, report)
            for name, layer in skeleton.experts.items():
                pair = regions[name, "w13"], regions[name, "w2"]
                for written in _pack(layer, specs[name], pair, scales, report):
                    done += written
                    progress("packing experts", done, total)
                report.packed_bytes += pair[0].length + pair[1].length
        _save(graph, weights, partial(MODEL), {"checkpoint": format.ckpt.folder.resolve().name, "target": target})
        _companions(format.ckpt, partial, layers)
    return report


def spec_of(
    layer: MoELayer, layout: str, activations: str, scales: str, report: Report, experts: Sequence[Expert] | None = None
) -> MoESpec:
    """The attributes of a layer's node.

    Args:
        experts: what stands for the layer's own, when their data is not to be read.
    """
    formats = layer.activation_format, layer.down_scheme.activation_format
    wanted, wanted_down = (_activations(found, activations, report) for found in formats)
    try:
        first = LAYOUTS[layout].describe(_scaled(experts[0] if experts else layer.expert(0), scales)[0], wanted)
        if first[0].perm or first[1].perm:  # experts may differ in act-order
            rest = (LAYOUTS[layout].describe(_scaled(e, scales)[0], wanted) for e in experts or layer)
            first = reduce(join, rest, first)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{layer.format.ckpt.folder}: {layer.name}: {error}") from None
    return MoESpec(
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        w13=first[0],
        w2=dataclasses.replace(first[1], activation_format=wanted_down),
        activation=layer.activation,
        gated=int(layer.gated),
        swiglu_alpha=layer.swiglu_alpha,
        swiglu_limit=layer.swiglu_limit,
    )


def _activations(wanted: str, choice: str, report: Report) -> str:
    """The node's activation_format, from the checkpoint's and the user's choice; a difference is reported."""
    if wanted == "none" and choice == "int8":
        report.activations = (
            "weights-only checkpoint: activations are quantized to int8 per token (--activations float: not)"
        )
        return "int8_token_asym"
    if wanted != "none" and choice == "float":
        report.activations = f"the checkpoint says {wanted}: activations stay float as asked"
        return "none"
    return wanted


def _pack(layer: MoELayer, spec: MoESpec, regions: tuple[Region, Region], scales: str, report: Report) -> Iterator[int]:
    """Decodes and packs experts ahead of the writing, as many as there are cores; yields the bytes of each."""
    layout = LAYOUTS[spec.w13.layout]

    def make(e: int) -> tuple[list[np.ndarray], float]:
        expert, error = _scaled(layer.expert(e), scales)
        rows = [native.aligned(layout.row_bytes(spec, projection)) for projection in ("w13", "w2")]
        try:
            layout.pack(expert, spec, *rows)
        except ValueError as error:
            raise CheckpointError(f"{layer.format.ckpt.folder}: {layer.name}.{e}: {error}") from None
        return rows, error

    with contextlib.closing(_ahead(functools.partial(make, e) for e in range(layer.num_experts))) as made:
        for rows, error in made:
            for region, row in zip(regions, rows, strict=True):
                region.write(row)
            if scales == "bf16":
                report.scale_error = max(report.scale_error or 0.0, error)
            layer.format.ckpt.release()
            yield sum(map(len, rows))
    for region in regions:
        metadata = {"module": layer.name, "format": layer.scheme.text, "layout": spec.w13.layout,
                    "layout_version": str(spec.w13.layout_version), "spec": json.dumps(spec.attributes())}  # fmt: skip
        region.finish(metadata)


def _ahead(calls: Iterable[Callable[[], T]]) -> Generator[T, None, None]:
    """The calls' results in order; as many calls run ahead of the caller as there are cores."""
    cores, calls = os.cpu_count() or 1, iter(calls)
    with ThreadPoolExecutor(cores) as pool:
        waiting = deque(pool.submit(call) for call in itertools.islice(calls, cores))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(call) for call in itertools.islice(calls, 1))
            yield result


def _dense(weight: Weight, skeleton: Skeleton, data: DataFile, report: Report) -> int:
    """Writes a weight outside the experts; returns its bytes."""
    format, source = skeleton.format, skeleton.sources[weight.parameter]
    metadata, module = {"module": source}, source.rpartition(".")[0]
    if format.is_quantized(module):
        metadata["dequantized_from"] = format.scheme(module).text
        report.dequantized += 1
    blocks, size = skeleton.blocks(weight.parameter, weight.transposed), byte_size(weight.value)
    if size <= INLINE:
        array = np.concatenate([block() for block in blocks])
        weight.value.const_value = ir.Tensor(array, name=weight.value.name, metadata_props=metadata)
    else:
        region = data.region(weight.value)
        for block in _ahead(blocks):
            region.write(block)
        region.finish(metadata)
    report.dense_bytes += size
    format.ckpt.release()
    return size


def _scaled(expert: Expert, scales: str) -> tuple[Expert, float]:
    """The expert with its scales as asked for, and the largest relative error that this made."""
    if scales == "exact":
        return expert, 0.0
    errors = [0.0]

    def round_(m: QuantizedMatrix | None) -> QuantizedMatrix | None:
        if m is None or m.scales.dtype.itemsize == 1:
            return m
        exact = m.scales.astype(np.float64)
        rounded = exact.astype(ml_dtypes.bfloat16)
        with np.errstate(divide="ignore", invalid="ignore"):
            errors.append(float(np.nan_to_num(np.abs(rounded.astype(np.float64) - exact) / np.abs(exact)).max()))
        return dataclasses.replace(m, scales=rounded)

    return Expert(*(round_(m) for m in (expert.gate, expert.up, expert.down))), max(errors)  # type: ignore[arg-type]


def _save(graph: ir.Model, weights: list[Weight], path: Path, metadata: dict[str, str]) -> None:
    for weight in weights:
        graph.graph.register_initializer(weight.value)
    graph.producer_name, graph.producer_version = "quantmoe", "0.1.0"
    graph.metadata_props.update(metadata)
    ir.save(graph, path)


def _companions(ckpt: Checkpoint, partial: Callable[[str], Path], layers: int | None) -> None:
    folder = ckpt.folder
    for path in sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}):
        ckpt.check_link(path)  # nobody's private file into a folder that is passed on
        shutil.copyfile(path, partial(path.name))
    if layers is not None:
        config = json.loads((folder / "config.json").read_text())
        config.get("text_config", config)["num_hidden_layers"] = layers
        partial("config.json").write_text(json.dumps(config, indent=2))


@contextlib.contextmanager
def _writing(folder: Path, force: bool) -> Iterator[Callable[[str], Path]]:
    """Files of ``folder`` under temporary names; renamed, the model last, when the block ends well, else deleted."""
    if (folder / MODEL).exists() and not force:
        raise FileExistsError(f"{folder / MODEL} exists; --force replaces it")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    names: list[str] = []

    def partial(name: str) -> Path:
        names.append(name)
        return folder / f"{name}.partial"

    try:
        partial(MODEL).touch()  # a folder that cannot be written says so now
        yield partial
        (folder / MODEL).unlink(missing_ok=True)  # never a new data file beside an old model
        for name in sorted(set(names), key=lambda name: name == MODEL):
            (folder / f"{name}.partial").replace(folder / name)
    finally:
        for name in names:
            (folder / f"{name}.partial").unlink(missing_ok=True)
        if made and not any(folder.iterdir()):
            folder.rmdir()
