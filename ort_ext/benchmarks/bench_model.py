"""``quantmoe bench model``: a whole model in ONNX Runtime, against llama.cpp and onnxruntime-genai.

Method:

- Each side runs in a process of its own, where no pool's spinning threads meet another's; they alternate run by run
  (A B A B). A run is a prompt, or decode steps from the same depth. Before it a side takes a few tokens that are not
  counted: after another side's run llama.cpp's first ones take two to three times as long. The ratio is the median of
  the runs' own ratios, as neighbours in time see the same machine. Where other work runs, too, threads that wait for
  each other wait for that: --cpu-time with one thread compares the work alone.
- A depth's cache is random numbers for us (no time depends on them), computed tokens for llama.cpp and genai.
- A shape's weights are random, int4 with groups of 32, and exported by our exporter. llama.cpp gets a file of the same
  sizes in Q4_0; lm_head and embeddings have the same bits on both sides. Routing is by random routers, near uniform.
- A decode step touches all linears, the LM head, and the experts that its tokens are expected to choose. It also
  touches the keys and values that attention reads.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from quantmoe.benchmarks.bench_engines import Genai, LlamaCpp, OnCuda, Ours, Process
from quantmoe.benchmarks.bench_models import available_memory, exported, gguf_of_shape, gguf_types, of_shape
from quantmoe.benchmarks.child_processes import in_process
from quantmoe.benchmarks.machine_limits import probe_read
from quantmoe.benchmarks.random_checkpoint import CONFIGS
from quantmoe.benchmarks.random_gguf import write_gguf
from quantmoe.custom_ops import native
from quantmoe.exporter.command_arguments import check_files, listed, need, terminal
from quantmoe.exporter.common_options import BATCH, LM_HEAD, Device, Output, Plot, Threads, panel_option
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.files import CONFIG, GENAI
from quantmoe.exporter.folder.model_file import check_alone, model_path
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.targets import of_device
from quantmoe.runtime.opened_model import runtime

#: --against -> what pip installs for it, and its modules
PEERS = {
    "llama.cpp": ("llama-cpp-python 'quantmoe[bench]'", ("llama_cpp", "gguf", "torch", "transformers")),
    "genai": ("onnxruntime-genai", ("onnxruntime_genai",)),
}
COMPILED = {"llama.cpp": "; that is compiled, for minutes"}
MIN_RUNS, CELL_SECONDS = 3, 30.0
WARM = 16  # tokens of a run that are not counted
ROOM = 64  # tokens after the deepest depth, at least; genai goes on where its last run ended
PROFILE_LINES = 10


@dataclass(frozen=True, kw_only=True)
class ModelCell:
    """One row of the result; the keys of ``--output``.

    ms is the median of a prompt or a decode step of ``tokens`` tokens. ratio: peer / ours; ratio_min: of their shortest
    runs, which other work on the machine moves least. bytes: that a decode step touches; bandwidth_share: of the read
    bandwidth, in the median.
    """

    step: str
    tokens: int
    depth: int
    batch: int
    ms: float
    ms_min: float
    tokens_per_second: float
    bytes: int | None
    bandwidth_share: float | None
    peer: str | None = None
    ratio: float | None = None
    ratio_min: float | None = None
    peer_ms: float | None = None
    peer_ms_min: float | None = None
    peer_tokens_per_second: float | None = None


@dataclass(frozen=True)
class TimedStep:
    """A timed step: a prompt of ``tokens`` (batch 1, depth 0), or a token in each of ``batch`` rows at ``depth``."""

    step: Literal["prefill", "decode"]
    tokens: int
    depth: int
    batch: int

    def __str__(self) -> str:
        return f"prefill {self.tokens:,}" if self.step == "prefill" else f"decode at {self.depth:,}, batch {self.batch}"


def cells(
    step: TimedStep, times: Mapping[str, Sequence[float]], touched: int | None, read: float | None
) -> list[ModelCell]:
    """Return one cell for each peer, or one without peers.

    Args:
        times: seconds by side, the first is ours; times of a round stand at one place.
        touched: bytes; read: bytes/s, None: not known.
    """
    (_, ours), *peers = times.items()
    median = statistics.median(ours)
    share = touched / median / read if touched and read else None
    alone = ModelCell(
        step=step.step,
        tokens=step.tokens,
        depth=step.depth,
        batch=step.batch,
        ms=1e3 * median,
        ms_min=1e3 * min(ours),
        tokens_per_second=step.tokens / median,
        bytes=touched,
        bandwidth_share=share,
    )
    return [
        replace(
            alone,
            peer=name,
            ratio=statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
            ratio_min=min(theirs) / min(ours),
            peer_ms=1e3 * statistics.median(theirs),
            peer_ms_min=1e3 * min(theirs),
            peer_tokens_per_second=step.tokens / statistics.median(theirs),
        )
        for name, theirs in peers
    ] or [alone]


def alternate(
    sides: Mapping[str, Any], run: Callable[[Any], float], repeat: int, drop: Callable[[str, ModelError], None]
) -> dict[str, list[float]]:
    """Return seconds by side of rounds in which each runs once; the first round is not counted. ``drop`` is told of a
    peer that fails, whose times are then left out."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    began = time.perf_counter()
    for round_ in range(repeat + 1):
        for number, name in enumerate(list(sides)):
            if name not in times:
                continue
            try:
                seconds = run(sides[name])
            except ModelError as error:
                if not number:
                    raise
                drop(name, error)
                del times[name]
                continue
            if round_:
                times[name].append(seconds)
        if round_ >= MIN_RUNS and time.perf_counter() - began > CELL_SECONDS:
            break
    return times


# --- sizes ---


def touched_bytes(
    found: Mapping[str, Any], cache: Mapping[str, int], config: Mapping[str, Any], depth: int, batch: int
) -> int | None:
    """Count the bytes that a decode step reads; None where nothing says how many experts a token has.

    Args:
        found: of :func:`inspect`. cache: bytes of a token, by the name of the input. config: config.json.
    """
    kinds, window = config.get("layer_types") or [], config.get("sliding_window") or 0
    total = 0.0
    for layer in found["layers"]:
        every, shared = layer["attributes"]["num_experts"], len(layer["shared"])
        if (top_k := layer["top_k"] or config.get("num_experts_per_tok")) is None:
            return None
        others = 1 - top_k / (every - shared)
        total += layer["bytes"] / every * ((every - shared) * (1 - others**batch) + shared)
    total += sum(linear["bytes"] for linear in found["linears"])
    total += sum(tensor["bytes"] for tensor in found["dense"] if not tensor["table"])
    total += batch * sum(node["state_bytes"] for node in found["linear_attention"])
    for name, size in cache.items():
        layer = int(name.split(".")[1])
        windowed = layer < len(kinds) and kinds[layer] == "sliding_attention"
        total += batch * size * (min(depth, window) if windowed else depth)
    return round(total)


# --- the command ---


# over 80 lines: half are its options
def bench_model(
    model: Annotated[
        str,
        typer.Argument(help="an exported model's folder, a GGUF file, or a shape"),
    ],
    against: Annotated[
        list[str] | None,
        panel_option("Measure", "compare with llama.cpp, genai, or a FOLDER of onnxruntime-genai", **listed()),
    ] = None,
    depths: Annotated[
        list[int] | None,
        panel_option(
            "Measure", "generate after N tokens in the cache", show_default="0,2048,16384", **listed(int, least=0)
        ),
    ] = None,
    *,
    prefill: Annotated[
        list[int] | None,
        panel_option("Measure", "read prompts of N tokens", show_default="128,512,2048", **listed(int, least=1)),
    ] = None,
    batch: Annotated[
        list[int] | None, panel_option("Measure", BATCH, show_default="1,8,32", **listed(int, least=1))
    ] = None,
    steps: Annotated[int, panel_option("Measure", "generate N tokens each time", min=1, metavar="N")] = 32,
    repeat: Annotated[
        int, panel_option("Measure", f"time each side N times, for {CELL_SECONDS:g} s at most", min=1, metavar="N")
    ] = 5,
    cpu_time: Annotated[bool, panel_option("Measure", "count CPU seconds; needs --threads 1", "--cpu-time")] = False,
    profile: Annotated[bool, panel_option("Measure", "show QuantMoE's time by node type", "--profile")] = False,
    layers: Annotated[
        int | None,
        panel_option("Model", "take only the first N layers", min=1, metavar="N", show_default="what memory holds"),
    ] = None,
    lm_head: Annotated[Literal["int4", "int8"] | None, panel_option("Model", LM_HEAD, show_default="bf16")] = None,
    weights: Annotated[
        Literal["Q4_0", "Q4_K_M", "Q5_K_M", "Q8_0", "MXFP4", "UD-Q4_K_XL", "UD-Q3_K_XL"] | None,
        panel_option(
            "Model",
            "give a shape GGUF weights: Q4_0, Q4_K_M, MXFP4, ..",
            metavar="TYPE",
            show_default="int4 and Q4_0",
        ),
    ] = None,
    keep: Annotated[
        Path | None, panel_option("Model", "keep the models of a shape or file in this folder", metavar="FOLDER")
    ] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    output: Output = None,
    plot: Plot = None,
) -> dict[str, Any]:
    """Time a model's prompts, and token generation by cache depth and batch.

    Give lists as a,b,c. A shape is a model of random weights, with as many layers as fit.

    \f

    A GGUF file is exported, and llama.cpp has the file itself.

    Raises:
        ModelError: the folder is no model, a shape does not fit, or our side fails.
    """
    against = list(dict.fromkeys(against or ()))
    _check(model, against, (layers, lm_head, weights, keep), (output, plot))
    on_gpu = of_device(device).on_gpu
    if on_gpu and (cpu_time or profile or threads):
        raise typer.BadParameter("of the CPU", param_hint="--cpu-time, --profile or --threads with --device cuda")
    shape = not Path(model).exists()
    runtime()
    threads, console = threads or native.cpus(), terminal(markup=True)
    with tempfile.TemporaryDirectory(prefix="quantmoe-bench-") as temporary, ExitStack() as stack:
        root = keep or Path(temporary)
        file = Path(model) if Path(model).is_file() else None
        if weights:
            file = gguf_of_shape(console, model, layers, weights=weights, against=against, root=root)
        if file:
            folder = exported(console, file, device, root)
        else:
            folder = (
                of_shape(console, model, layers, lm_head=lm_head, device=device, against=against, root=root)
                if shape
                else Path(model)
            )
        found = inspect(folder)
        check_alone(model_path(folder), found["metadata"])
        config = _config(folder)
        ours = (OnCuda, str(folder)) if on_gpu else (Ours, str(folder), threads)
        sides = {"ours": Process("ours", *ours, cpu=cpu_time)}
        stack.callback(sides["ours"].close)
        for name in against:
            if peer := _peer(
                console,
                name,
                (folder, file, device),
                found=found,
                config=config,
                threads=threads,
                cpu=cpu_time,
                root=root,
            ):
                sides[name] = peer
                stack.callback(peer.close)
        cache = sides["ours"].cache_bytes()
        room = max(ROOM, (repeat + 2) * (WARM + steps))
        wanted = _steps(
            console, config, cache, sides=len(sides), room=room, prefill=prefill, depths=depths, batches=batch
        )
        reads = [] if on_gpu else [probe_read(threads, Path(temporary))]
        timed = _timings(console, sides, wanted, repeat=repeat, steps=steps, room=room)
        reads += [] if on_gpu else [probe_read(threads, Path(temporary))]
        done = [
            cell
            for step, times in timed
            for cell in cells(
                step,
                times,
                touched_bytes(found, cache, config, step.depth, step.batch) if step.step == "decode" else None,
                max(reads, default=None),
            )
        ]
        peaks = {name: side.peak() for name, side in sides.items() if side.alive}
        result = {
            "model": model,
            "layers": config.get("num_hidden_layers", len(found["layers"])),
            "device": device,
            "threads": threads,
            "cpu_time": cpu_time,
            "read_gbps": max(reads) / 1e9 if reads else None,
            "peak_bytes": peaks,
            "cells": [asdict(cell) for cell in done],
        }
        where = "on the GPU" if on_gpu else f"{threads} threads{', CPU time' if cpu_time else ''}"
        _print(console, done, f"{Path(model).name}, {result['layers']} layers, {where}")
        _limits(console, reads, peaks)
        if profile:
            stack.close()  # no session beside the one that is profiled
            result["profile"] = _profile(console, folder, threads, [step for step in wanted if step.batch == 1])
        if output:
            output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if plot:
            draw(done, plot)
        return result


def _check(
    model: str,
    against: Sequence[str],
    shapes: tuple[int | None, str | None, str | None, Path | None],
    files: tuple[Path | None, Path | None],
) -> None:
    """Refuse arguments of :func:`bench_model` that do not go together, and peers that are not installed.

    Args:
        shapes: layers, lm_head, weights, keep. files: output, plot.
    """
    layers, lm_head, weights, keep = shapes
    if wrong := [name for name in against if name not in PEERS and not (Path(name) / GENAI).is_file()]:
        expected = f"expected {', '.join(PEERS)} or a folder with {GENAI}"
        raise typer.BadParameter(f"{', '.join(wrong)}; {expected}", param_hint="--against")
    shape = not Path(model).exists()
    if shape and model not in CONFIGS:
        raise typer.BadParameter(f"{model}: no such folder; expected one, or one of {', '.join(CONFIGS)}")
    if not shape and (layers or lm_head or weights or (keep and Path(model).is_dir())):
        hint = "--layers, --lm-head, --weights or --keep"
        raise typer.BadParameter("of a shape; a folder's model is as it is", param_hint=hint)
    if weights and lm_head:
        raise typer.BadParameter("a GGUF file has a head of its own", param_hint="--weights and --lm-head")
    check_files(*files)
    for name in against:
        package, modules = PEERS.get(name, PEERS["genai"])
        for module in modules:
            if find_spec(module) is None:
                raise ModelError(
                    f"{module} is not installed; --against {name} needs: pip install {package}{COMPILED.get(name, '')}"
                )
    if not Path(model).is_dir():
        need("torch", "transformers", "onnxscript")


def _config(folder: Path) -> dict[str, Any]:
    path = model_path(folder).parent / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return dict(config.get("text_config") or config)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from None


def _peer(
    console: Console,
    name: str,
    model: tuple[Path, Path | None, str],
    *,
    found: Mapping[str, Any],
    config: Mapping[str, Any],
    threads: int,
    cpu: bool,
    root: Path,
) -> Process | None:
    """None, said in a line, where it cannot run this model: a folder, the GGUF file that it is of, and the device."""
    folder, file, device = model
    llama_cpp = (threads, True, of_device(device).on_gpu)
    try:
        if name != "llama.cpp":
            return Process(name, Genai, str(folder) if name == "genai" else name, threads, cpu=cpu)
        if file:
            return Process(name, LlamaCpp, str(file), *llama_cpp, cpu=cpu)
        weights, head = gguf_types(found)
        path = root / f"{folder.resolve().name}-{weights}-{head}.gguf"
        if not path.is_file():
            with console.status(f"writing {path.name}"):
                in_process(path.name, write_gguf, path, config, weights, head)
        console.print(f"llama.cpp: weights {weights}, lm_head and embeddings {head}", highlight=False)
        return Process(name, LlamaCpp, str(path), *llama_cpp, cpu=cpu)
    except (ModelError, ValueError, KeyError) as error:
        console.print(f"{name}: no peer: {error}", style="yellow", highlight=False)
        return None


# --- runs ---


def _steps(
    console: Console,
    config: Mapping[str, Any],
    cache: Mapping[str, int],
    *,
    sides: int,
    room: int,
    prefill: Sequence[int] | None,
    depths: Sequence[int] | None,
    batches: Sequence[int] | None,
) -> list[TimedStep]:
    """Return all that the model's context and the memory hold; by batch, then depth."""
    context, token = config.get("max_position_embeddings") or 1 << 62, sum(cache.values())
    steps = [TimedStep("prefill", n, 0, 1) for n in prefill or (128, 512, 2048)]
    steps += [
        TimedStep("decode", b, d, b) for b in sorted(batches or (1, 8, 32)) for d in sorted(depths or (0, 2048, 16384))
    ]
    found = []
    for step in steps:
        length = step.tokens if step.step == "prefill" else step.depth + room
        needed = step.batch * length * token * (1 + sides)  # ours is there twice, past and present
        if length > context:
            reason = f"the model's context is {context:,}"
        elif needed > available_memory():
            reason = f"caches take about {needed / 1e9:.1f} GB, {available_memory() / 1e9:.1f} GB are free"
        else:
            found.append(step)
            continue
        console.print(f"{step}: left out: {reason}", style="yellow", highlight=False)
    return found


def _timings(
    console: Console, sides: dict[str, Process], wanted: Sequence[TimedStep], *, repeat: int, steps: int, room: int
) -> list[tuple[TimedStep, dict[str, list[float]]]]:
    found = []
    for step in wanted:

        def drop(name: str, error: ModelError, step: TimedStep = step) -> None:
            console.print(f"{step}: {error}", style="yellow", highlight=False)
            if not sides[name].alive:
                del sides[name]

        with console.status(str(step)):
            if step.step == "prefill":
                times = alternate(sides, lambda side: (side.prefill(WARM), side.prefill(step.tokens))[1], repeat, drop)  # noqa: B023
            else:
                most = max(other.depth for other in wanted if other.batch == step.batch)
                length, ready = most + room, dict(sides)
                for name in list(ready):
                    try:
                        ready[name].fill(step.depth, step.batch, length)
                    except ModelError as error:
                        if name == "ours":
                            raise
                        del ready[name]
                        drop(name, error)
                times = alternate(ready, lambda side: (side.decode(WARM), side.decode(steps))[1], repeat, drop)
        found.append((step, times))
        if not console.is_terminal:  # which would show what is being measured
            each = ", ".join(f"{name} {1e3 * statistics.median(t):.4g} ms" for name, t in times.items())
            typer.echo(f"{step}: {each}", err=True)
    return found


def _profile(console: Console, folder: Path, threads: int, wanted: Sequence[TimedStep]) -> list[dict[str, Any]]:
    """Our time by node type, printed and returned: one run of each."""
    side = Process("profile", partial(Ours, profile=True), str(folder), threads)
    try:
        runs = []
        for step in wanted:
            if step.step == "prefill":
                side.prefill(step.tokens)
            else:
                side.fill(step.depth, step.batch, step.depth + ROOM)
                side.decode(3)  # the last counts
            runs.append(side.run_count() - 1)
        found = list(zip(wanted, side.nodes(runs), strict=True))
    finally:
        side.close()
    for step, nodes in found:
        total = sum(ms for _, _, ms in nodes)
        table = Table(title=f"profile: {step}", title_justify="left", box=SIMPLE_HEAD)
        for column in ("share", "ms", "nodes"):
            table.add_column(column, justify="right")
        table.add_column("operator")
        lines, rest = nodes[:PROFILE_LINES], nodes[PROFILE_LINES:]
        if rest:
            lines = [*lines, ("others", sum(n for _, n, _ in rest), sum(t for _, _, t in rest))]
        for name, count, ms in lines:
            table.add_row(f"{ms / total:.1%}", f"{ms:.3g}", str(count), name)
        console.print(table)
    return [{"step": asdict(step), "nodes": [dict(zip(("operator", "nodes", "ms"), row, strict=True)) for row in nodes]}
            for step, nodes in found]  # fmt: skip


# --- output ---


def _print(console: Console, done: Sequence[ModelCell], title: str) -> None:
    for peer, rows in _by_peer(done).items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        name = peer if peer in PEERS else Path(peer or "").name
        versus = [f"{name} / ours", "of minima"] if peer else []
        for column in (*versus, "step", "tokens/s", "ms min", "ms"):
            table.add_column(column, justify="left" if column == "step" else "right", no_wrap=column == "step")
        for column in (*([f"{name} tokens/s", "ms min", "ms"] if peer else []), "touched", "of read bandwidth"):
            table.add_column(column, justify="right")
        for c in rows:
            step = str(TimedStep(c.step, c.tokens, c.depth, c.batch))  # type: ignore[arg-type]
            row = [f"{c.ratio:.2f}x", f"{c.ratio_min:.2f}x"] if c.ratio else []
            row += [step, f"{c.tokens_per_second:.1f}", f"{c.ms_min:.4g}", f"{c.ms:.4g}"]
            if peer:
                row += [f"{c.peer_tokens_per_second:.1f}", f"{c.peer_ms_min:.4g}", f"{c.peer_ms:.4g}"]
            row += [decimal(c.bytes) if c.bytes else "", f"{c.bandwidth_share:.0%}" if c.bandwidth_share else ""]
            table.add_row(*row)
        console.print(table)


def _by_peer(done: Sequence[ModelCell]) -> dict[str | None, list[ModelCell]]:
    found: dict[str | None, list[ModelCell]] = {}
    for cell in done:
        found.setdefault(cell.peer, []).append(cell)
    return found


def _limits(console: Console, reads: Sequence[float], peaks: Mapping[str, int]) -> None:
    memory = ", ".join(f"{name} {decimal(size)}" for name, size in peaks.items())
    console.print(f"peak memory of the host, mapped pages included: {memory}", highlight=False)
    if not reads:
        return
    console.print(
        f"read bandwidth before and after: {reads[0] / 1e9:.1f} and {reads[1] / 1e9:.1f} GB/s", highlight=False
    )
    if max(reads) > 1.1 * min(reads):
        console.print("this machine was not quiet: its bandwidth moved by more than 10 %", style="yellow")


def draw(done: Sequence[ModelCell], path: Path) -> None:
    """Draw tokens/s of prompts by their length, and of decode steps by depth, a line a batch and side."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for peer, rows in _by_peer(done).items():
        for axis, step, at in ((axes[0], "prefill", "tokens"), (axes[1], "decode", "depth")):
            for batch in sorted({c.batch for c in rows if c.step == step}):
                chosen = [c for c in rows if (c.step, c.batch) == (step, batch)]
                x = [getattr(c, at) for c in chosen]
                text = f", batch {batch}" if step == "decode" else ""
                if peer is None or peer == next(iter(_by_peer(done))):
                    axis.plot(x, [c.tokens_per_second for c in chosen], "o-", label=f"ours{text}")
                if peer:
                    axis.plot(x, [c.peer_tokens_per_second for c in chosen], "s--", label=f"{peer}{text}")
    for axis, label in zip(axes, ("tokens of a prompt", "tokens in the cache"), strict=True):
        axis.set(xlabel=label, ylabel="tokens/s", ylim=(0, None))
        if axis.lines:
            axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
