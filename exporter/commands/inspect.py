"""``quantmoe inspect``: what a model or checkpoint holds."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.filesize import decimal

from quantmoe.exporter.command_arguments import UsageError, missing, need
from quantmoe.exporter.common_options import SIZE, TARGET, DiskSpeed, Json, context_option, panel_option
from quantmoe.exporter.report import and_more, console, print_export_sizes, print_fit, print_model, print_survey
from quantmoe.exporter.targets import CPU, CUDA, TARGETS

#: of inspect --fit
CONTEXT = 4096
#: what inspect finds beside a model
BESIDE = {
    "mtp": "the layer that drafts for it",
    "vision": "which makes features of images",
    "embeddings": "which makes its input of tokens and features",
}


# over 60 lines: half are its options
def inspect(
    model: Annotated[Path, typer.Argument(help="exported model, its folder, or a checkpoint")],
    verify: Annotated[bool, panel_option("Show", "read all weights and compare their hashes", "--verify")] = False,
    why: Annotated[bool, panel_option("Show", "show every layout and kernel considered", "--explain")] = False,
    *,
    as_json: Json = False,
    memory: Annotated[
        int | None, panel_option("Fit", "show what fits into this memory, as 12GB", "--fit", **SIZE)
    ] = None,
    host_memory: Annotated[int | None, panel_option("Fit", "count this RAM beside a GPU's memory", **SIZE)] = None,
    context: Annotated[int | None, context_option("Fit", str(CONTEXT))] = None,
    trace: Annotated[
        Path | None, panel_option("Fit", "take hit rates of a trace (generate --record)", metavar="FILE")
    ] = None,
    memory_speed: Annotated[
        int | None,
        panel_option(
            "Fit",
            "read memory at SIZE bytes a second",
            show_default=f"this GPU's, else {decimal(int(CUDA.rates[0]))}; cpu: {decimal(int(CPU.rates[0]))}",
            **SIZE,
        ),
    ] = None,
    bus_speed: Annotated[
        int | None,
        panel_option("Fit", "read through the bus at SIZE a second", show_default=decimal(int(CUDA.rates[1])), **SIZE),
    ] = None,
    disk_speed: DiskSpeed = None,
    reserve: Annotated[int | None, panel_option("Fit", "leave this memory free", **SIZE)] = None,
    target: Annotated[
        Literal[tuple(TARGETS)] | None,  # type: ignore[valid-type]
        panel_option("Fit", TARGET, show_default="cpu"),
    ] = None,
) -> None:
    """Show what a model or checkpoint holds, and what export refuses."""
    from quantmoe.exporter.surveying.survey import is_model, is_refused, survey

    of_model = {"trace": trace, "memory-speed": memory_speed, "bus-speed": bus_speed, "host-memory": host_memory,
                "disk-speed": disk_speed}  # fmt: skip
    for option, value in (of_model | {"context": context, "reserve": reserve, "target": target}).items():
        if value is not None and memory is None:
            raise typer.BadParameter("is of --fit", param_hint=f"--{option}")
    if not is_model(model):
        if verify:
            raise UsageError(f"--verify compares the hashes of an exported model; {model} is none")
        if memory is not None:
            if given := next((option for option, value in of_model.items() if value is not None), None):
                raise UsageError(f"--{given} is of an exported model; {model} is none")
            return _fit_checkpoint(
                model, memory, target or CPU.name, context=context or CONTEXT, reserve=reserve, as_json=as_json
            )
        found = survey(model)
        if why and found.get("layers"):
            _explain(model, as_json)
        else:
            print(json.dumps(found, indent=1)) if as_json else print_survey(found)
        if is_refused(found):
            raise typer.Exit(1)
        return
    if why:
        _explain(model, as_json)
        return
    from quantmoe.exporter.inspecting.inspect import inspect as inspect_model

    with contextlib.ExitStack() as stack:
        tell: list[Any] = []
        if verify:
            from rich.progress import DownloadColumn, TransferSpeedColumn

            from quantmoe.exporter.commands.terminal import progress

            tell.append(stack.enter_context(progress("reading", DownloadColumn(), TransferSpeedColumn())))
        found = inspect_model(model, verify, *tell)
    if memory is not None:
        from quantmoe.exporter import gpu
        from quantmoe.exporter.inspecting.expert_trace import read_trace
        from quantmoe.exporter.inspecting.fit import fit

        if target is not None:
            raise typer.BadParameter(f"{model} is exported, it has a target", param_hint="--target")
        on_gpu = TARGETS.get(found["metadata"].get("target"), CPU).on_gpu
        if bus_speed is not None and not on_gpu:
            raise typer.BadParameter(
                f"{model} is for the CPU, whose experts come from the disk", param_hint="--bus-speed"
            )
        here = gpu.bandwidth() if on_gpu and memory_speed is None else None
        rates = (memory_speed or here, *((bus_speed, disk_speed) if on_gpu else (disk_speed,)))
        fits = fit(
            found,
            memory,
            context or CONTEXT,
            trace=read_trace(trace) if trace else None,
            rates=rates,
            ram=host_memory,
            reserve=reserve,
        )
        if as_json:
            derived = {"bounds": fits.bounds, "tokens_per_second": fits.tokens_per_second}
            print(json.dumps(asdict(fits) | derived, indent=1))
        else:
            said = "--memory-speed gives another" if here is None else "as this GPU has"
            print_fit(fits, model, "as --memory-speed says" if memory_speed else said)
    elif as_json:
        print(json.dumps(found, indent=1))
    else:
        _print_model(found)


def _print_model(found: dict[str, Any]) -> None:
    """Print what an exported model holds."""
    console.print(found["model"], highlight=False)
    print_model(found)
    for name, what in BESIDE.items():
        if name in found:
            console.print(f"{found[name]['model']}, {what}:", highlight=False)
            print_model(found[name])
    for file in found["files"]:
        if file["resident"] is not None:
            console.print(f"{file['name']}: {decimal(file['resident'])} of {decimal(file['bytes'])} in memory")


def _fit_checkpoint(
    checkpoint: Path, memory: int, target: str, *, context: int, reserve: int | None, as_json: bool
) -> None:
    """Print what exports would take of a memory, and which of them fit."""
    try:
        need("torch", "transformers", "onnxscript")
    except ModuleNotFoundError as error:
        sys.exit(f"quantmoe: --fit of a checkpoint: {missing(error, 'export')}")
    from quantmoe.exporter.commands.terminal import progress
    from quantmoe.exporter.writing.checkpoint_fit import export_sizes

    with progress("reading headers") as tell:
        found = export_sizes(checkpoint, target=target, context=context, reserve=reserve, progress=tell)
    if as_json:
        rows = [asdict(size) | {"total": size.total, "held": size.held(memory)} for size in found]
        print(json.dumps({"target": target, "memory": memory, "context": context, "exports": rows}, indent=1))
    else:
        print_export_sizes(found, memory, target, context)


def _explain(path: Path, as_json: bool) -> None:
    from quantmoe.exporter.surveying.explain import explain

    found = explain(path)
    if as_json:
        print(
            json.dumps(
                found, default=lambda o: {"layout": o.layout, "reason": o.reason, "kernels": o.kernels}, indent=1
            )
        )
        return
    for entry in found:
        names = entry["modules"]
        console.print(f"{entry['scheme']}: {and_more(names) if names else entry['remark']}")
        for candidate in entry["candidates"]:
            console.print(f"  layout {candidate.layout}: {candidate.reason or 'carries it'}")
            chosen = False
            for kernel, reason in candidate.kernels if not candidate.reason else ():
                verdict = reason or ("usable" if chosen else "used")
                chosen |= not reason
                console.print(f"    kernel {kernel}: {verdict}")
