"""checkpoint folder -> ONNX folder: read, trace, decode, pack, write; one expert at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import MoESpec, Projection
from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.formats import MoELayer, find_format, open_checkpoint
from quantmoe.exporter.genai import genai_config
from quantmoe.exporter.model import Skeleton, trace
from quantmoe.exporter.passes.external_data import INLINE, DataFile, Region, byte_size, naming
from quantmoe.exporter.passes.interface import name_interface
from quantmoe.exporter.passes.weights import Weight, place_weights
from quantmoe.ort_ext import library_path

MODEL, DATA = "model.onnx", "model.onnx.data"
#: the packed layout an engine reads
LAYOUT = {"cpu": "cpu_panel", "cuda": "marlin"}
#: types of the graph outside the experts, the default first
GRAPH_TYPES = {"cpu": ("f32", "f16"), "cuda": ("bf16", "f16")}
#: of one tensor in TensorRT
MAX_ELEMENTS = 2**31 - 1
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
        untraced: why every layer was traced although some are alike, else "".
        dequantized: tensors outside the experts that the checkpoint quantizes and the model does not.
    """

    format: str
    layers: dict[str, tuple[str, MoESpec]]
    activations: str = ""
    scale_error: float | None = None
    packed_bytes: int = 0
    dense_bytes: int = 0
    untraced: str = ""
    dequantized: int = 0


def export(
    checkpoint: str | Path,
    output: str | Path,
    *,
    target: Literal["cpu", "cuda"] = "cpu",
    activations: Literal["int8", "float"] | None = None,
    scales: Literal["exact", "bf16"] = "exact",
    dtype: Literal["f32", "f16", "bf16"] | None = None,
    layers: int | None = None,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """Exports a quantized mixture-of-experts checkpoint.

    Args:
        checkpoint: Hugging Face folder.
        output: folder for model.onnx, model.onnx.data, configuration, tokenizer, and for onnxruntime-genai on the CPU
            its genai_config.json and the library; created if missing.
        target: "cpu": ONNX Runtime on x86-64 and Arm; "cuda": TensorRT and ONNX Runtime on NVIDIA GPUs, only of the
            operators of ai.onnx and quantmoe.
        activations: of weight-only checkpoints: "int8" quantizes each token (int8_token_asym), "float" does not. The
            default is "int8" for the CPU, and what the checkpoint says for CUDA.
        scales: "bf16" rounds them, for KleidiAI's kernels; see Report.scale_error.
        dtype: of the graph outside the experts: for the CPU "f32" (default) or "f16", for CUDA "bf16" (default) or
            "f16".
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
        ("activations", activations, (None, "int8", "float")),
        ("scales", scales, ("exact", "bf16")),
        ("dtype", dtype, (None, *GRAPH_TYPES.get(target, ()))),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, expected one of: {', '.join(filter(None, known))}")
    graph_type = dtype or GRAPH_TYPES[target][0]
    if activations is None and target == "cpu":
        activations = "int8"
    if Path(output).resolve() == Path(checkpoint).resolve():
        raise FileExistsError(f"{output} is the checkpoint's own folder; export to another")
    if Path(output).exists() and not Path(output).is_dir():
        raise NotADirectoryError(f"{output} is a file, expected a folder to write to")
    with _writing(Path(output), force) as partial:
        progress("reading", 0, 1)
        format = find_format(open_checkpoint(checkpoint))
        skeleton = Skeleton(format, graph_type, layers)
        report = Report(format.name, {})
        specs = {}
        for name, layer in skeleton.experts.items():
            specs[name] = _spec(layer, LAYOUT[target], activations, scales, report)
            report.layers[layer.name] = (layer.scheme.text, specs[name])
            if target == "cuda":
                _check_size(layer, specs[name])

        progress("tracing", 0, 1)
        graph = trace(skeleton, specs, fusions="cpu" if target == "cpu" else None)
        report.untraced = graph.meta.pop("untraced", "")
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
        _companions(format.ckpt.folder, partial, layers)
        if target == "cpu":
            _genai(format.ckpt.folder, partial, layers)
    return report


def _spec(layer: MoELayer, layout: str, activations: str | None, scales: str, report: Report) -> MoESpec:
    formats = layer.activation_format, layer.down_scheme.activation_format
    wanted, wanted_down = (_activations(found, activations, report) for found in formats)

    def describe(e: int) -> tuple[Projection, Projection]:
        return LAYOUTS[layout].describe(_scaled(layer.expert(e), scales)[0], wanted)

    e = 0
    try:
        first, usual = describe(0), layer.tensors(0)
        # Experts may differ in act-order. One whose tensors are not those of expert 0 is damaged or stored differently:
        # decoding it tells, now and not after the tracing.
        ordered = first[0].perm or first[1].perm
        for e in range(1, layer.num_experts):
            if ordered or layer.tensors(e) != usual:
                first = join(first, describe(e))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{layer.format.ckpt.folder}: {layer.name}.{e}: {error}") from None
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


def _check_size(layer: MoELayer, spec: MoESpec) -> None:
    """Refuses tensors that TensorRT cannot hold."""
    for projection in ("w13", "w2"):
        words = LAYOUTS[spec.w13.layout].row_bytes(spec, projection) // 4
        if words * spec.num_experts > MAX_ELEMENTS:
            raise CheckpointError(
                f"{layer.format.ckpt.folder}: {layer.name}: {projection} has {spec.num_experts} experts of {words} "
                f"int32 words, more than TensorRT's 2^31 elements; a slice of at most {MAX_ELEMENTS // words} experts "
                f"would fit"
            )


def _activations(wanted: str, choice: str | None, report: Report) -> str:
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

    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        waiting = deque(pool.submit(make, e) for e in range(min(cores, layer.num_experts)))
        for e in range(layer.num_experts):
            rows, error = waiting.popleft().result()
            if e + cores < layer.num_experts:
                waiting.append(pool.submit(make, e + cores))
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


def _dense(weight: Weight, skeleton: Skeleton, data: DataFile, report: Report) -> int:
    """Writes a weight outside the experts; returns its bytes."""
    format, source = skeleton.format, skeleton.sources[weight.parameter]
    array = skeleton.parameter(weight.parameter)
    array = np.ascontiguousarray(array.T if weight.transposed else array)
    metadata, module = {"module": source}, source.rpartition(".")[0]
    if format.is_quantized(module):
        metadata["dequantized_from"] = format.scheme(module).text
        report.dequantized += 1
    if array.nbytes <= INLINE:
        weight.value.const_value = ir.Tensor(array, name=weight.value.name, metadata_props=metadata)
    else:
        region = data.region(weight.value)
        region.write(array)
        region.finish(metadata)
    report.dense_bytes += array.nbytes
    format.ckpt.release()
    return array.nbytes


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
    graph.producer_name, graph.producer_version = "quantmoe", version("quantmoe")
    graph.metadata_props.update(metadata)
    if metadata["target"] == "cpu":
        library = Path(library_path()).name
        graph.doc_string = f"Register {library} of `pip install quantmoe` with ONNX Runtime to run this."
    with naming(path):
        ir.save(graph, path)


def _companions(folder: Path, partial: Callable[[str], Path], layers: int | None) -> None:
    for path in sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, partial(path.name))
    if layers is not None:
        partial("config.json").write_text(json.dumps(_config(folder, layers), indent=2))


def _config(folder: Path, layers: int | None) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_bytes())
    if layers is not None:
        config.get("text_config", config)["num_hidden_layers"] = layers
    return config


def _genai(folder: Path, partial: Callable[[str], Path], layers: int | None) -> None:
    """What onnxruntime-genai reads beside the model: its configuration and the operator's library."""
    config, generation, library = _config(folder, layers), folder / "generation_config.json", Path(library_path())
    with contextlib.suppress(KeyError):  # an architecture that onnxruntime-genai has no decoder for
        found = genai_config(config, json.loads(generation.read_bytes()) if generation.is_file() else {}, library.name)
        partial("genai_config.json").write_text(json.dumps(found, indent=2))
    shutil.copyfile(library, partial(library.name))


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
