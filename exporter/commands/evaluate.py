"""``quantmoe evaluate``: perplexity, and the divergence from another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quantmoe.exporter.command_arguments import need
from quantmoe.exporter.commands.common_options import Model
from quantmoe.exporter.commands.prompts import read_prompt
from quantmoe.exporter.commands.trace import check_plot
from quantmoe.exporter.report import print_evaluation


def evaluate(
    outdir: Model,
    text: Annotated[Path, typer.Option(help="predict the text in this file")],
    against: Annotated[Path | None, typer.Option(help="compare with another model, or with the CHECKPOINT")] = None,
    *,
    window: Annotated[int, typer.Option(min=2, help="read N tokens at once, from an empty cache")] = 512,
    windows: Annotated[
        int | None, typer.Option(min=1, help="stop after N windows", show_default="the whole text")
    ] = None,
    layers: Annotated[bool, typer.Option("--each-layer", help="also compare hidden states after each layer")] = False,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="use N CPU threads; 0: automatic")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the divergence at all positions into this file")] = None,
) -> None:
    """Measure perplexity on a text, and the divergence from another model's predictions."""
    need("onnxruntime", "tokenizers")
    if plot is not None and against is None:
        raise typer.BadParameter("needs --against: it draws the divergence from that model", param_hint="--plot")
    check_plot(plot)
    from quantmoe.exporter.inspecting.survey import is_model

    if against is not None and not is_model(against):
        need("torch", "transformers")
    content = read_prompt(text, "--text")
    from rich.progress import TimeRemainingColumn

    from quantmoe.benchmarks.quality.evaluate import evaluate as evaluate_model
    from quantmoe.exporter.commands.terminal import TokensColumn, ended_by_signals, progress
    from quantmoe.runtime.generate import Generator

    opened: list[Generator] = []

    def interrupt() -> None:
        for model in opened:
            model.interrupt()

    with ended_by_signals(interrupt), progress("reading", TokensColumn(), TimeRemainingColumn()) as tell:
        found = evaluate_model(
            outdir, content, against=against, window=window, windows=windows, layers=layers, threads=threads,
            progress=tell, opened=opened.append,
        )  # fmt: skip
    print(json.dumps(found.to_dict(), indent=1)) if as_json else print_evaluation(found)
    if plot is not None:
        from quantmoe.benchmarks.quality.divergence_plot import draw

        draw(found, plot)
