"""``quantmoe evaluate``: perplexity, and the divergence from another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quantmoe.exporter.command_arguments import need
from quantmoe.exporter.commands.prompts import read_prompt
from quantmoe.exporter.commands.trace import check_plot
from quantmoe.exporter.common_options import Json, Model, Plot, Threads, panel_option
from quantmoe.exporter.report import print_evaluation


def evaluate(
    outdir: Model,
    text: Annotated[Path, panel_option("Text", "predict the text in this file", metavar="FILE")],
    against: Annotated[
        Path | None, panel_option("Compare", "compare with another model, or with the CHECKPOINT", metavar="FOLDER")
    ] = None,
    *,
    window: Annotated[
        int, panel_option("Text", "read N tokens at once, from an empty cache", min=2, metavar="N")
    ] = 512,
    windows: Annotated[
        int | None,
        panel_option(
            "Text", "stop after N windows", "--max-windows", min=1, metavar="N", show_default="the whole text"
        ),
    ] = None,
    layers: Annotated[
        bool, panel_option("Compare", "also compare hidden states after each layer", "--each-layer")
    ] = False,
    threads: Threads = 0,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Measure perplexity on a text, and the divergence from another model's predictions."""
    need("onnxruntime", "tokenizers")
    if plot is not None and against is None:
        raise typer.BadParameter("needs --against: it draws the divergence from that model", param_hint="--plot")
    check_plot(plot)
    from quantmoe.exporter.surveying.survey import is_model

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
