"""A dry run: what an export would write, how long and in how much memory, from headers and config.json."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Unpack

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS, cpu_panel
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter import parallel_calls
from quantmoe.exporter.choosing.choose import Choice
from quantmoe.exporter.choosing.options import ExportOptions, Options
from quantmoe.exporter.folder.metadata import CONTEXT_LENGTH
from quantmoe.exporter.writing.calibration import Cost, cost
from quantmoe.exporter.writing.prepare import Prepared, check_output, prepare, rank_folders, stale_folders

if TYPE_CHECKING:
    from quantmoe.exporter.graph.model import Skeleton

#: measured by tests/export/writing/test_large.py's export on one core of an Intel Xeon at 2.5 GHz: bytes written a CPU
#: second of expert weights and of other weights, and seconds of tracing, whatever the number of layers
PACKING, CONVERTING, TRACING = 242e6, 460e6, 20.0
#: weights that --quantize q4_k, the slowest format, searches the scales of in a CPU second
SEARCHING = 6.9e6
#: torch, transformers and the graph
BASE_MEMORY = 0.8e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """The result of :func:`plan`.

    Attributes:
        layers: as in Report -> (scheme in the tool's words, node attributes, packed bytes).
        shared, apart: see Report.
        linears: the same of linears outside the experts; the bytes of a MatMulNBits are close to these.
        read, packed, dense: bytes of the checkpoint, of the experts and of everything else in the model.
        cache, states: bytes of one sequence: of each token's keys and values, and of what does not grow.
        seconds, memory: estimates; ``rate`` says from what. calibration: what a text takes of them.
        free: bytes of disk where the model would go.
        files: of weights, at least: a tensor is in one.
        not_ort: see Report.
        dequantized: tensors outside the experts that the checkpoint quantizes and the model would not -> why.
        plain_attention: attention modules that would be standard nodes, not CachedAttention -> why.
        indexers: attributes of the SparseIndexer nodes.
        activations, kv_cache, left_out, drafting, chat, tokenizer: see Report.
        attention: how many layers each type has, "" for models with one type.
    """

    layers: dict[str, tuple[str, MoESpec, int]]
    shared: dict[str, int]
    apart: dict[str, str]
    linears: dict[str, tuple[str, LinearSpec, int]]
    read: int
    packed: int
    dense: int
    cache: int
    states: int
    seconds: float
    memory: float
    calibration: Cost | None
    rate: str
    free: int
    files: int
    not_ort: dict[str, str]
    dequantized: dict[str, str]
    plain_attention: dict[str, str]
    indexers: list[dict[str, Any]]
    activations: str
    kv_cache: str
    left_out: str
    drafting: str
    chat: str
    tokenizer: str
    attention: str


def _searched(options: Options, ready: Prepared) -> int:
    """Return how many weights ``--quantize`` quantizes."""
    if options.quantize in (None, "none"):
        return 0
    chosen = [part.chosen for part in ready.parts]
    experts = (layer for one in chosen for layer in one.experts.values())
    linears = (spec for one in chosen for spec in one.linears.values())
    return sum(
        len(layer.ids) * (2 + layer.gated) * layer.hidden_size * layer.intermediate_size for layer in experts
    ) + sum(spec.in_features * spec.out_features for spec in linears)


# over 60 lines: half are its options and the fields of its result
def plan(
    checkpoint: str | Path, output: str | Path | None, *, force: bool = False, **options: Unpack[ExportOptions]
) -> DryRun:
    """Plan :func:`quantmoe.exporter.writing.convert.export` with the same options; of ranks the first.

    Args:
        output: where the model would go; None: nowhere, only its sizes are asked for.

    Of tensors' data only vectors, scalars and zero points are read; what :func:`choose.not_ort` says it reads.

    Raises:
        OptionError, OSError: see export.
        CheckpointError: what export would refuse, in its words, as far as that and names, types, shapes and
            config.json show it.
    """
    wanted = Options(**options)
    layout, folder = LAYOUTS[wanted.layout], Path(output or ".").resolve()
    if output is not None:
        for path in rank_folders(Path(output), wanted):
            check_output(Path(checkpoint), path, wanted.facts, force)
        stale_folders(Path(output), wanted, force)
    ready = prepare(checkpoint, wanted, part=wanted.slices[0])
    report, format = ready.report, ready.format
    rows = {layer.title: len(layer.ids) for part in ready.parts for layer in part.chosen.experts.values()}
    found = {
        name: (scheme, spec, rows[name] * sum(layout.row_bytes(spec, p) for p in ("w13", "w2")))
        for name, (scheme, spec) in report.layers.items()
    }
    linears = {
        name: (scheme, spec, layout.row_bytes(spec.moe, "w2")) for name, (scheme, spec) in report.linears.items()
    }
    floats, memory = _floats(ready, wanted, layout)
    others = floats + sum(size for _, _, size in linears.values())
    from quantmoe.exporter.graph.trace import cache_sizes  # torch, which prepare has imported

    cache, states = cache_sizes(ready.parts[0].skeleton, ready.parts[0].attention, wanted.facts)
    experts, cores, text = sum(size for _, _, size in found.values()), native.cpus(), cost(ready, wanted)
    writing = (experts / PACKING + others / CONVERTING + _searched(wanted, ready) / SEARCHING) / cores
    return DryRun(
        layers=found,
        shared=report.shared,
        apart=report.apart,
        linears=linears,
        read=format.ckpt.size,
        packed=experts,
        dense=others,
        cache=cache,
        states=states,
        seconds=TRACING + writing + (text.seconds if text else 0),
        memory=BASE_MEMORY + max(memory, text.memory if text else 0),
        calibration=text,
        rate=f"{cores} cores; on one {PACKING / 1e6:.0f} MB/s of experts and {CONVERTING / 1e6:.0f} MB/s of others, "
        f"{TRACING:.0f} s of tracing, as measured on an Intel Xeon at 2.5 GHz",
        free=shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free,
        files=-(-(experts + others) // wanted.max_file_size),
        not_ort=report.not_ort,
        dequantized=report.dequantized,
        plain_attention=report.plain_attention,
        indexers=[
            found.indexer.attributes() for found in ready.parts[0].attention.found.values() if found.indexer is not None
        ],
        activations=report.activations,
        kv_cache=report.kv_cache,
        left_out=report.left_out,
        drafting=report.drafting,
        chat=report.chat,
        tokenizer=report.tokenizer,
        attention=format.attention(wanted.layers),
    )


def _floats(ready: Prepared, wanted: Options, layout: ModuleType) -> tuple[int, int]:
    """Return the bytes beside packed experts and linears, and those in memory while the largest part is written."""
    others, memory = 0, 0
    written: set[str] = set()
    for part in ready.parts:
        skeleton, chosen = part.skeleton, part.chosen
        packed = {module for modules in chosen.parts.values() for module in modules}
        packed |= {module for merged in chosen.shared.values() for module in merged.projections}
        left = [
            name
            for name in skeleton.tensors
            if name in skeleton.sources and name.rpartition(".")[0] not in packed and name not in chosen.tables
        ]
        for name, (spec, head) in chosen.tables.items():
            if not head and skeleton.sources[name] not in written:
                written.add(skeleton.sources[name])
                others += cpu_panel.row_bytes(spec.moe, "w2")
        mine = {skeleton.sources[name]: name for name in left if skeleton.sources[name] not in written}
        written |= mine.keys()
        others += sum(prod(skeleton.tensors[name].shape) * skeleton.itemsize(name) for name in mine.values())
        memory = max(memory, _working_set(skeleton, chosen, left, layout))
        if wanted.paged and (context := ready.ends.get(CONTEXT_LENGTH)):  # tables of cosines and sines, f32
            turning = {(found.spec.rotary_size, found.table) for found in part.attention.found.values()}
            others += sum(4 * int(context) * size for size, _ in turning)
    for stored in (one.stored for one in ready.beside):
        mine = {source: name for name, source in stored.sources.items() if source not in written}
        others += sum(prod(stored.tensors[name].shape) * stored.itemsize(name) for name in mine.values())
    return others, memory


def _working_set(skeleton: Skeleton, chosen: Choice, left: Iterable[str], layout: ModuleType) -> int:
    """Return the bytes that are in memory while the weights are written.

    These are experts or blocks ahead of the writing, a linear, or a quantized tensor that stays float, and the largest
    tensor outside the experts.

    Args:
        left: names of parameters that no linear has.
    """
    sizes = (
        parallel_calls.memory(parallel_calls.expert_size(spec), spec.num_experts) for spec in chosen.layers.values()
    )
    experts = max(sizes, default=0)
    format = skeleton.format.outline()
    float_here = [
        format.matrix(module)
        for module, _, leaf in (skeleton.sources[name].rpartition(".") for name in left)
        if leaf == "weight" and format.is_quantized(module)
    ]
    decoded = max((dequantizing(m) for m in float_here), default=0)
    whole = 4 * max((m.codes.size for m in float_here), default=0)
    linear = max(
        (
            spec.out_features * spec.in_features * min(2, len(chosen.parts[name]))  # the parts, and they as one
            + 2 * layout.row_bytes(spec.moe, "w2")
            for name, spec in chosen.linears.items()
        ),
        default=0,
    )
    tables = (
        spec.out_features * spec.in_features + 2 * cpu_panel.row_bytes(spec.moe, "w2")
        for spec, _ in chosen.tables.values()
    )
    linear = max([linear, *tables])
    ckpt = skeleton.format.ckpt
    largest = max((prod(ckpt.shape(name)) for name in skeleton.sources.values() if name in ckpt), default=0)
    blocks = parallel_calls.memory(parallel_calls.BLOCK_MEMORY, -(-max(4 * largest, whole) // parallel_calls.BLOCK))
    return max(experts, linear, decoded, max(2 * largest, whole) + blocks)


def dequantizing(m: QuantizedMatrix) -> int:
    """Return the bytes that decoding a matrix to float32 takes.

    Codes on their way are two bytes each. Beside the values stand their scales, and zero points or minima, spread over
    the groups.
    """
    floats = 8 if m.rounds_last else 4
    arrays = 2 if m.zero_points is None and m.scales.dtype.names is None else 3
    return m.codes.size * (2 + floats * arrays) + floats * m.scales.size
