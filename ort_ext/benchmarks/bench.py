"""``quantmoe bench layer``: one expert layer beside this machine's limits and ONNX Runtime's own QMoE.

Method:

- Both sides are one-node .onnx files that one process runs on ONNX Runtime's global thread pool. So threads and
  spinning are equal. (ggml has its C API, and as many threads of its own.) They alternate call by call (A B A B) on
  one set of activations and routing. Times are medians. Only ``Run`` with bound inputs and outputs is timed. QMoE gets
  logits, so its node also selects the k experts. Ours gets their ids.
- A layer's bytes repeat ``DISTINCT`` random experts, each expert at its own place in memory. Scales are bf16 for us.
  QMoE has these values in f32, because it has no other form for f32 activations. Outputs are compared.
- Decode reads weights from memory. The experts of a routing are renamed so that consecutive calls walk a random cycle
  over all experts of the layer. The routing drawn (uniform or Zipf) gives how many experts are touched, and by how many
  tokens each. An expert is touched again only after the rest of the layer was read, which is larger than the caches.
- Read bandwidth is the best 64 MiB in several passes over a file mapping larger than the caches. The int8 peak is the
  best 10 ms of the kernel's own dot-product instructions on registers. Both are measured before and after the cells,
  and the best counts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, cast

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quantmoe.benchmarks.bench_layer import FORMATS, Layer
from quantmoe.benchmarks.bench_model import bench_model
from quantmoe.benchmarks.child_processes import in_process
from quantmoe.benchmarks.ggml_layer import Ggml
from quantmoe.benchmarks.ggml_layer import library as ggml_library
from quantmoe.benchmarks.layer_sizes import SHAPES, Shape
from quantmoe.benchmarks.machine_limits import cache_bytes, probe_int8, probe_read
from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.exporter.command_arguments import check_files, listed, terminal
from quantmoe.exporter.command_words import Command
from quantmoe.exporter.common_options import GROUP_SIZE, Output, Plot, Threads, panel_option
from quantmoe.exporter.errors import ModelError
from quantmoe.ort_ext import library_path
from quantmoe.runtime.opened_model import runtime

#: --against
PEERS = ("ort-qmoe", "ggml")
MIN_PAIRS, CELL_SECONDS = 5, 4.0
READ_SHARE = 0.85  # of the read bandwidth, for the target


@dataclass(frozen=True, kw_only=True)
class LayerCell:
    """One row of the result; the keys of ``--output``. gbps counts packed bytes touched, gops two a multiply-add."""

    shape: str
    weight_format: str
    group_size: int
    tokens: int
    threads: int
    ms: float
    gbps: float
    gops: float
    peer: str | None
    peer_ms: float | None
    read_gbps: float
    vnni_gops: float
    floor_ms: float
    target_ms: float


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A cell before the machine's limits are known."""

    shape: str
    weight_format: str
    group_size: int
    tokens: int
    touched_bytes: int
    operations: int
    ms: float
    peers: dict[str, float]

    def cells(self, threads: int, read: float, peak: float) -> list[LayerCell]:
        """Return one cell for each peer, or one without peers. read: bytes/s; peak: int8 operations/s."""

        def bound(read_share: float, peak_share: float) -> float:
            return 1e3 * max(self.touched_bytes / (read_share * read), self.operations / (peak_share * peak))

        return [
            LayerCell(
                shape=self.shape,
                weight_format=self.weight_format,
                group_size=self.group_size,
                tokens=self.tokens,
                threads=threads,
                ms=self.ms,
                gbps=self.touched_bytes / self.ms / 1e6,
                gops=self.operations / self.ms / 1e6,
                peer=peer,
                peer_ms=peer_ms,
                read_gbps=read / 1e9,
                vnni_gops=peak / 1e9,
                floor_ms=bound(1, 1),
                target_ms=bound(READ_SHARE, peak_share(self.weight_format, self.group_size)),
            )
            for peer, peer_ms in cast("dict[str | None, float | None]", self.peers or {None: None}).items()
        ]


def peak_share(weight_format: str, group_size: int) -> float:
    """Return the share of the int8 peak a product should reach: what unpacking 4-bit codes and scaling groups leaves.

    To be multiplied by the useful share of token tiles, which is 1: our kernels have a tile of every number of rows.
    """
    if weight_format.startswith("int8"):
        return 0.55
    if weight_format == "fp8":
        return 0.14  # 0.55 of the f32 multiply-adds, of which an instruction has a quarter as many
    return 0.45 if group_size in (16, 32) else 0.60


# --- routing ---


def route(shape: Shape, tokens: int, skew: bool, seed: int) -> np.ndarray:
    """Return ids int64 [tokens, k], distinct in a token; weight of expert e is 1, or 1 / (e + 1) when skewed (Zipf
    1.0)."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, shape.experts + 1) if skew else np.ones(shape.experts)
    keys = np.log(weights) + rng.gumbel(size=(tokens, shape.experts))  # the k largest are a draw without replacement
    return np.argpartition(-keys, shape.top_k - 1, axis=1)[:, : shape.top_k].astype(np.int64)


class Cycle:
    """Renames the experts of a routing so that calls walk a random cycle over all experts (see the module's text)."""

    def __init__(self, experts: int, seed: int):
        self._order = np.random.default_rng(seed).permutation(experts)
        self._next = 0

    def rename(self, ids: np.ndarray) -> np.ndarray:
        touched, inverse = np.unique(ids, return_inverse=True)
        places = (self._next + np.arange(len(touched))) % len(self._order)
        self._next = int(places[-1] + 1) % len(self._order)
        return self._order[places][inverse].reshape(ids.shape)


# --- sessions ---


class Side:
    """A session and the inputs it takes for (x, ids, weights)."""

    def __init__(self, path: Path, experts: int, threads: int | None = None):
        """Open a model; ``threads`` are of a pool of its own, None is the global pool."""
        import onnxruntime as ort

        self._ort, self._experts = ort, experts
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is None:
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = threads
        options.register_custom_ops_library(library_path())
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._names = {i.name for i in self.session.get_inputs()}

    def bind(
        self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
    ) -> tuple[Callable[[], None], Callable[[], np.ndarray]]:
        """Bind inputs and an output: what runs the call, and what then reads y [n, H]."""
        feed = {"x": x, "ids": ids, "weights": weights}
        if "logits" in self._names:
            feed = {"x": x, "logits": np.zeros((len(x), self._experts), np.float32)}
            np.put_along_axis(feed["logits"], ids, np.float32(1), axis=1)
            feed["weights"] = np.zeros_like(feed["logits"])
            np.put_along_axis(feed["weights"], ids, weights, axis=1)
        y = np.zeros_like(x)
        values = {name: self._ort.OrtValue.ortvalue_from_numpy(array) for name, array in (feed | {"y": y}).items()}
        binding = self.session.io_binding()
        for name in feed:
            binding.bind_ortvalue_input(name, values[name])
        binding.bind_ortvalue_output("y", values["y"])

        def run(alive: object = values) -> None:  # the binding refers to their memory without owning it
            self.session.run_with_iobinding(binding)

        return run, lambda: values["y"].numpy().copy()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Relative error of ``a`` against ``b`` in the 2-norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure(
    sides: Sequence[Side | Ggml], shape: Shape, tokens: int, *, repeat: int, skew: bool, cycle: Cycle, seed: int = 1
) -> tuple[list[float], int]:
    """Median ms of each side over alternating calls, and the number of experts a call touches.

    Raises:
        ModelError: the sides' outputs differ by more than the activations' rounding explains.
    """
    rng = np.random.default_rng(seed)
    ids = route(shape, tokens, skew, seed)
    x = rng.normal(0, 1, (tokens, shape.hidden)).astype(np.float32)
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    times: list[list[float]] = [[] for _ in sides]
    started = time.perf_counter()
    for pair in range(repeat + 1):  # the first is not counted: it allocates
        named = cycle.rename(ids)
        outputs = []
        for side, kept in zip(sides, times, strict=True):
            run, output = side.bind(x, named, weights)
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if pair:
                kept.append(1e3 * elapsed)
            else:
                outputs.append(output())
        for other in outputs[1:]:  # int8 activations on both sides, one step a token against one a block: 1 to 2 % each
            if not difference(outputs[0], other) < 0.05:
                raise ModelError(f"{tokens} tokens: outputs of two sides differ by {difference(outputs[0], other):.1%}")
        if pair >= MIN_PAIRS and time.perf_counter() - started > CELL_SECONDS:
            break
    return [statistics.median(t) for t in times], len(np.unique(ids))


def touch_all(sides: Iterable[Side | Ggml], shape: Shape) -> None:
    """Run every expert once: maps the pages and make pools start their threads."""
    ids = np.arange(math.ceil(shape.experts / shape.top_k) * shape.top_k).reshape(-1, shape.top_k) % shape.experts
    x, weights = np.ones((len(ids), shape.hidden), np.float32), np.ones(ids.shape, np.float32)
    for side in sides:
        side.bind(x, ids, weights)[0]()


@dataclass(frozen=True)
class SessionCost:
    seconds: float
    anonymous_bytes: int


def session_cost(path: Path, shape: Shape, threads: int) -> SessionCost:
    """Creation time, and RssAnon growth after creation and one token: in a new process; the file was just written."""
    return in_process(str(path), _session_cost, path, shape, threads)  # type: ignore[no-any-return]


def _session_cost(path: Path, shape: Shape, threads: int) -> SessionCost:
    import onnxruntime  # noqa: F401  not part of the cost

    def anonymous() -> int:
        return int(Path("/proc/self/status").read_text(encoding="utf-8").split("RssAnon:")[1].split()[0]) * 1024

    before, start = anonymous(), time.perf_counter()
    side = Side(path, shape.experts, threads)
    seconds = time.perf_counter() - start
    ids = np.arange(shape.top_k).reshape(1, -1)
    side.bind(np.ones((1, shape.hidden), np.float32), ids, np.ones(ids.shape, np.float32))[0]()
    return SessionCost(seconds, anonymous() - before)


# --- the command ---


# over 60 lines: half are its options
def bench(
    shape: Annotated[
        list[str] | None,
        panel_option("Layer", "measure these layers, or H/I/E/k", show_default="qwen3-30b-a3b,gpt-oss-20b", **listed()),
    ] = None,
    format: Annotated[
        list[str] | None,
        panel_option("Layer", "measure these weight formats", show_default="int4,int8", **listed()),
    ] = None,
    group_size: Annotated[
        list[int] | None, panel_option("Layer", GROUP_SIZE, show_default="32,128", **listed(int))
    ] = None,
    *,
    tokens: Annotated[
        list[int] | None,
        panel_option(
            "Layer",
            "measure calls of N tokens, or ranges as 1..8",
            show_default="1,4,..,1024",
            **listed(int, 1, ranges=True),
        ),
    ] = None,
    skew: Annotated[bool, panel_option("Layer", "route tokens by Zipf 1.0, not uniformly", "--skew")] = False,
    against: Annotated[
        list[str] | None,
        panel_option("Measure", "compare with ort-qmoe (QMoE) or ggml (llama.cpp)", **listed()),
    ] = None,
    repeat: Annotated[
        int, panel_option("Measure", f"time each side N times, for {CELL_SECONDS:g} s at most", min=1, metavar="N")
    ] = 30,
    session: Annotated[
        bool, panel_option("Measure", "measure only session creation: time and memory", "--session")
    ] = False,
    packing: Annotated[bool, panel_option("Measure", "measure only the packer", "--packing")] = False,
    threads: Threads = 0,
    output: Output = None,
    plot: Plot = None,
) -> list[LayerCell]:
    """Time one expert layer beside the machine's limits and other implementations.

    Give lists as a,b,c. The default layers take about 5 minutes on 2 cores.
    """
    for chosen, allowed, option in (
        (format, FORMATS, "--format"),
        (against, PEERS[:1] if session else PEERS, "--against"),
    ):
        if wrong := set(chosen or ()) - set(allowed):
            raise typer.BadParameter(f"{', '.join(sorted(wrong))}; expected {' or '.join(allowed)}", param_hint=option)
    if sizes := [g for g in group_size or () if g not in (-1, 16) and (g < 32 or g % 32)]:
        raise typer.BadParameter(f"{sizes[0]}; expected -1, 16 or a multiple of 32", param_hint="--group-size")
    if (session or packing) and (output or plot):
        raise typer.BadParameter("has no cells to write", param_hint="--session" if session else "--packing")
    check_files(output, plot)
    threads, against = threads or native.cpus(), list(dict.fromkeys(against or ()))
    layers = [
        (name, _shape(name), kind, group)
        for name in shape or (["qwen3-30b-a3b"] if session else ["qwen3-30b-a3b", "gpt-oss-20b"])
        for kind in format or (["int4"] if session else ["int4", "int8"])
        for group in group_size or ([128] if session else [32, 128])
    ]
    console = terminal(markup=True)
    if packing:
        _packing(console, layers)
        return []
    runtime()  # said now
    if "ggml" in against:
        ggml_library()
    with tempfile.TemporaryDirectory(prefix="quantmoe-bench-") as folder:
        if session:
            _sessions(console, layers, threads, against, Path(folder))
            return []
        tokens = tokens or [1, 4, 16, 64, 256, 1024]
        cells = _cells(
            console, layers, tokens, threads=threads, repeat=repeat, against=against, skew=skew, folder=Path(folder)
        )
    if output:
        output.write_text(json.dumps([asdict(c) for c in cells], indent=1) + "\n", encoding="utf-8")
    if plot:
        draw(cells, plot)
    return cells


Chosen = tuple[str, Shape, str, int]  # a layer: name, shape, weight format, group size


def _cells(
    console: Console,
    layers: Sequence[Chosen],
    tokens: Sequence[int],
    *,
    threads: int,
    repeat: int,
    against: Sequence[str],
    skew: bool,
    folder: Path,
) -> list[LayerCell]:
    import onnxruntime as ort

    ort.set_global_thread_pool_sizes(threads, 1)
    with console.status("read bandwidth and int8 peak"):
        reads, peaks = [probe_read(threads, folder)], [probe_int8(threads)]
    timings: list[Timing] = []
    for name, size, kind, group in layers:
        title = f"{name} {kind} group {group}"
        with console.status(f"{title}: making weights"):
            layer = Layer.random(size, kind, group)
            sides: list[Side | Ggml] = [Side(layer.write(folder), size.experts)]
            found = {
                name: _peer(console, title, layer, against=name, threads=threads, folder=folder) for name in against
            }
            peers = {name: peer for name, peer in found.items() if peer}
            sides += peers.values()
            touch_all(sides, size)
        if size.experts * layer.expert_bytes < 4 * cache_bytes():
            console.print(f"{title}: under 4 times the caches, decode may find weights there", style="yellow")
        cycle = Cycle(size.experts, seed=2)
        for n in tokens:
            with console.status(f"{title}: {n} tokens"):
                ms, touched = measure(sides, size, n, repeat=repeat, skew=skew, cycle=cycle)
            timings.append(
                Timing(
                    shape=name,
                    weight_format=kind,
                    group_size=group,
                    tokens=n,
                    touched_bytes=touched * layer.expert_bytes,
                    operations=n * size.top_k * layer.operations,
                    ms=ms[0],
                    peers=dict(zip(peers, ms[1:], strict=True)),
                )
            )
            if not console.is_terminal:  # which would show what is being measured
                typer.echo(f"{title}: {n} tokens in {ms[0]:.3g} ms", err=True)
        del sides, found, peers
        for file in folder.iterdir():
            file.unlink()
    reads.append(probe_read(threads, folder))
    peaks.append(probe_int8(threads))
    cells = [cell for t in timings for cell in t.cells(threads, max(reads), max(peaks))]
    _print(console, cells)
    routing = "Zipf 1.0" if skew else "uniform"
    what = f"{_kernel()}, ONNX Runtime {ort.__version__}, {threads} threads, {routing} routing"
    _print_limits(console, what, timings, reads=reads, peaks=peaks)
    console.print(worst(cells), highlight=False)
    return cells


def _print_limits(
    console: Console, what: str, timings: Sequence[Timing], *, reads: Sequence[float], peaks: Sequence[float]
) -> None:
    """Print what was measured, and the machine's limits before and after."""
    limits = [f"{a / 1e9:.1f} and {b / 1e9:.1f} {unit}" for (a, b), unit in ((reads, "GB/s"), (peaks, "GOP/s int8"))]
    shares = [peak_share(t.weight_format, t.group_size) for t in timings]
    console.print(f"{what}; before and after: {', '.join(limits)}", highlight=False)
    aim = f"our aim is {READ_SHARE:.0%} of the one and, by format, {min(shares):.0%} to {max(shares):.0%} of the other"
    if "amx" in _kernel():
        aim = "AMX's peak leaves out that products are scaled"
    console.print(
        f"floor: packed bytes at that bandwidth or products at that peak, whichever takes longer; {aim}",
        highlight=False,
    )
    if max(reads) > 1.1 * min(reads) or max(peaks) > 1.1 * min(peaks):
        console.print("this machine was not quiet: its limits moved by more than 10 %", style="yellow")


def _peer(
    console: Console, title: str, layer: Layer, *, against: str, threads: int, folder: Path
) -> Side | Ggml | None:
    try:
        if against == "ggml":
            return Ggml(layer.shape, layer.kind, layer.group_size, layer.experts, threads)
        return Side(layer.write_qmoe(folder), layer.shape.experts)
    except ValueError as error:
        console.print(f"{title}: no peer: {error}", style="yellow", highlight=False)
        return None


def _sessions(console: Console, layers: Sequence[Chosen], threads: int, against: Sequence[str], folder: Path) -> None:
    table = Table("layer", "side", "packed MB", "session s", "RssAnon MB", "of packed")
    for name, size, kind, group in layers:
        title = f"{name} {kind} group {group}"
        with console.status(title):
            layer = Layer.random(size, kind, group)
            paths = {"ours": layer.write(folder)}
            if against:
                try:
                    paths["ort-qmoe"] = layer.write_qmoe(folder)
                except ValueError as error:
                    console.print(f"{title}: no peer: {error}", style="yellow", highlight=False)
            packed = size.experts * layer.expert_bytes
            costs = {side: [session_cost(path, size, threads) for _ in range(3)] for side, path in paths.items()}
        for side, found in costs.items():
            seconds, growth = (statistics.median(getattr(c, f) for c in found) for f in ("seconds", "anonymous_bytes"))
            row = (f"{packed / 1e6:.0f}", f"{seconds:.3f}", f"{growth / 1e6:.1f}", f"{growth / packed:.1%}")
            table.add_row(title, side, *row)
    console.print(table)
    console.print(f"medians of 3 processes, {threads} threads; RssAnon after creation and one token", highlight=False)


def _packing(console: Console, layers: Sequence[Chosen]) -> None:
    """MB of packed output a second, by all cores."""
    table = Table("layer", "layout", "MB of an expert", "MB/s")
    for name, size, kind, group in layers:
        layer = Layer.random(size, kind, group)
        for layout in LAYOUTS.values():
            pair = None
            for activations in ("none", FORMATS[kind][3]):
                with contextlib.suppress(ValueError):  # a layout that does not carry it
                    pair = reduce(join, (layout.describe(e, activations) for e in layer.experts))
            if pair is None:
                continue
            w13, w2 = pair
            spec = replace(layer.spec(), w13=w13, w2=w2)
            rows = [native.aligned(layout.row_bytes(spec, p)) for p in ("w13", "w2")]
            times = []
            for expert in layer.experts * 4:
                start = time.perf_counter()
                layout.pack(expert, spec, *rows)
                times.append(time.perf_counter() - start)
            packed = sum(len(row) for row in rows) / 1e6
            rate = f"{packed / statistics.median(times):.0f}"
            table.add_row(f"{name} {kind} group {group}", layout.NAME, f"{packed:.2f}", rate)
    console.print(table)


def _shape(name: str) -> Shape:
    if name in SHAPES:
        return SHAPES[name]
    parts = name.split("/")
    sizes = [int(size) for size in parts if size.isdecimal()]
    why = ""
    if len(sizes) == len(parts) != 4 and len(parts) > 1:
        why = f"; {len(parts)} sizes, H/I/E/k are 4"
    elif len(sizes) == len(parts) == 4:
        why = "; a size of 0" if min(sizes) < 1 else f"; k is {sizes[3]}, E {sizes[2]}" if sizes[3] > sizes[2] else ""
    if why or len(sizes) != 4 or len(parts) != 4:
        known = ", ".join(SHAPES)
        raise typer.BadParameter(f"{name}{why}; expected one of {known}, or H/I/E/k", param_hint="--shape")
    hidden, intermediate, experts, top_k = sizes
    return Shape(hidden, intermediate, experts, top_k)


def _kernel() -> str:
    forced = os.environ.get("QUANTMOE_FORCE_KERNEL")
    return forced or next(name for name, usable in native.kernels().items() if usable)


def worst(cells: Sequence[LayerCell]) -> str:
    """Return the cell that is slowest beside the peer, or else beside the floor, in a line."""
    if beside := [c for c in cells if c.peer_ms]:
        c = min(beside, key=lambda c: (c.peer_ms or 0) / c.ms)
        text = f"{(c.peer_ms or 0) / c.ms:.2f}x {c.peer}"
    else:
        c = min(cells, key=lambda c: c.floor_ms / c.ms)
        text = f"{c.floor_ms / c.ms:.0%} of the floor"
    return f"worst: {text}, {c.shape} {c.weight_format} group {c.group_size}, {c.tokens} tokens"


def _print(console: Console, cells: Sequence[LayerCell]) -> None:
    for (name, kind, group, peer), rows in _by_layer(cells).items():
        table = Table(title=f"{name} {kind} group {group}", title_justify="left", box=SIMPLE_HEAD)
        ratio, peer_ms = ([f"{peer} / ours"], [f"{peer} ms"]) if peer else ([], [])
        for column in (*ratio, "tokens", "ms", *peer_ms, "GB/s", "GOP/s", "floor ms", "of floor"):
            table.add_column(column, justify="right")
        for c in rows:
            ratio, peer_ms = ([f"{c.peer_ms / c.ms:.2f}x"], [f"{c.peer_ms:.3g}"]) if c.peer_ms else ([], [])
            times = (
                f"{c.ms:.3g}",
                *peer_ms,
                f"{c.gbps:.1f}",
                f"{c.gops:.0f}",
                f"{c.floor_ms:.3g}",
                f"{c.floor_ms / c.ms:.0%}",
            )
            table.add_row(*ratio, str(c.tokens), *times)
        console.print(table)


def _by_layer(cells: Sequence[LayerCell]) -> dict[tuple[str, str, int, str | None], list[LayerCell]]:
    layers: dict[tuple[str, str, int, str | None], list[LayerCell]] = {}
    for c in cells:
        layers.setdefault((c.shape, c.weight_format, c.group_size, c.peer), []).append(c)
    return layers


def draw(cells: Sequence[LayerCell], path: Path) -> None:
    """Draw a panel a layer: ms over tokens for us, the peer, the target and the floor, both axes logarithmic."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    layers = _by_layer(cells)
    columns = min(len(layers), 4)
    rows = -(-len(layers) // columns)
    figure, axes = plt.subplots(rows, columns, squeeze=False, figsize=(4 * columns, 3.2 * rows), layout="constrained")
    for axis in axes.flat[len(layers) :]:
        axis.axis("off")
    for axis, ((name, kind, group, _), mine) in zip(axes.flat, layers.items(), strict=False):
        tokens = [c.tokens for c in mine]
        axis.plot(tokens, [c.ms for c in mine], "o-", label="ours")
        if mine[0].peer:
            axis.plot(tokens, [c.peer_ms for c in mine], "s-", label=mine[0].peer)
        axis.plot(tokens, [c.target_ms for c in mine], "k--", label="target")
        axis.plot(tokens, [c.floor_ms for c in mine], "k:", label="floor")
        axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        axis.set_title(f"{name} {kind} group {group}")
        axis.set_xticks(tokens, [str(n) for n in tokens])
        axis.minorticks_off()
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


#: the commands of ``quantmoe bench``
app = typer.Typer()
app.command("layer", cls=Command)(bench)
app.command("model", cls=Command)(bench_model)
