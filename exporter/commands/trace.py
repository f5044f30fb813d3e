"""``quantmoe trace``: hit rates from a trace, and experts on ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from quantmoe.exporter.command_arguments import need
from quantmoe.exporter.common_options import SIZE, DiskSpeed, Plot, panel_option
from quantmoe.exporter.report import console
from quantmoe.exporter.targets import CPU


def trace(
    file: Annotated[Path, typer.Argument(help="trace that generate --record wrote")],
    memory: Annotated[
        list[int] | None,
        panel_option("Fit", "show this memory for experts; may be repeated", show_default="shares of all", **SIZE),
    ] = None,
    disk_speed: DiskSpeed = None,
    *,
    expert_map: Annotated[
        Path | None, panel_option("Ranks", "place experts on ranks, in this file", "--write-map", metavar="FILE")
    ] = None,
    ranks: Annotated[int, panel_option("Ranks", "place experts on N ranks", min=2, metavar="N")] = 2,
    copies: Annotated[int, panel_option("Ranks", "let ranks hold N copies of experts", min=0, metavar="N")] = 0,
    shared: Annotated[
        int, panel_option("Ranks", "leave out the last N experts, which are shared", min=0, metavar="N")
    ] = 0,
    plot: Plot = None,
) -> None:
    """Show hit rates from a trace, or place experts on ranks."""
    from quantmoe.exporter.inspecting.expert_trace import curve, draw, read_trace

    if not file.exists() or file.is_dir():
        why = "is a folder, expected a file" if file.is_dir() else "no such file"
        raise typer.BadParameter(f"{file}: {why}", param_hint="FILE")
    found = read_trace(file)
    if found.cut:
        print(f"{file}: its last {found.cut} bytes are no whole record, and left out", file=sys.stderr)
    if not found.runs:
        raise typer.BadParameter(f"{file}: no token has been routed yet", param_hint="FILE")
    check_plot(plot)
    if expert_map is not None:
        return _place(found, expert_map, ranks, copies, shared)
    read_speed = disk_speed or int(CPU.rates[1])
    experts = sum(layer["experts"] for layer in found.layers)
    used = sum(int((counts > 0).sum()) for counts in found.use())
    console.print(
        f"{len(found.layers)} layers, {found.tokens} tokens; {used} of {experts} experts used, "
        f"{decimal(sum(layer['bytes'] * layer['experts'] for layer in found.layers))} in all"
    )
    shares = [experts * share // 100 for share in (5, 10, 20, 33, 50, 75, 100)]
    slots = [min(size // found.slot_bytes, experts) for size in memory] if memory else shares
    table = Table("memory", "slots", "hit rate", "read a token", f"tokens/s at {decimal(read_speed)}/s, at most")
    rows = curve(found, sorted({max(count, 1) for count in slots}), read_speed)
    for row in rows:
        speed = row["tokens_per_second"]
        held, missed = (decimal(int(row[key])) for key in ("bytes", "read"))
        fastest = f"{speed:.1f}" if speed < 1e6 else "-"
        table.add_row(held, str(row["slots"]), f"{row['hit_rate']:.1%}", missed, fastest)
    console.print(table)
    if plot is not None:
        draw(found, rows, plot)


def check_plot(path: Path | None) -> None:
    """Refuse, before the measurement, what a plot cannot be written into."""
    from quantmoe.exporter.inspecting.expert_trace import PLOTS

    if path is None:
        return
    need("matplotlib")
    if path.suffix[1:] not in PLOTS:
        raise typer.BadParameter(f"{path}: expected a file .{', .'.join(PLOTS)}", param_hint="--plot")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent}: no such folder", param_hint="--plot")


def _place(found: Any, path: Path, ranks: int, copies: int, shared: int) -> None:
    from quantmoe.exporter.reading.expert_map import balance, in_order, write_map

    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent}: no such folder", param_hint="--write-map")
    loads = [counts[: len(counts) - shared] for counts in found.use()]
    placed = [balance(tokens, ranks, copies) for tokens in loads]
    write_map(path, placed)
    table = Table("layer", "busiest rank, in order", "by the map", title="times the mean of the ranks")
    for i, (tokens, placement) in enumerate(zip(loads, placed, strict=True)):
        shares = [
            p.load(tokens).max() * ranks / max(tokens.sum(), 1) for p in (in_order(len(tokens), ranks), placement)
        ]
        table.add_row(str(i), *(f"{share:.2f}" for share in shares))
    console.print(table)
