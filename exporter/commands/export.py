"""``quantmoe export``, and its dry run."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.command_arguments import with_options
from quantmoe.exporter.common_options import Force, panel_option, parse_bytes
from quantmoe.exporter.folder.files import CALIBRATION
from quantmoe.exporter.report import (
    APART,
    FLOAT_HERE,
    NOT_ORT,
    PLAIN_ATTENTION,
    console,
    minutes,
    peak_memory,
    print_layers,
    print_reasons,
    selection,
)


def parse_logits(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


@with_options(Options, {"SIZE": parse_bytes, "last|all|N": parse_logits})
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder, ORG/MODEL, or GGUF file")],
    outdir: Annotated[Path, typer.Argument(help="folder for the model")],
    options: Options,
    force: Force = False,
    dry_run: Annotated[bool, panel_option("Options", "show sizes, time and refusals only", "--dry-run")] = False,
) -> None:
    """Turn a checkpoint into an ONNX model with packed weights."""
    from quantmoe.exporter.reading.hub import fetched

    checkpoint = fetched(checkpoint, download=not dry_run)
    begin = time.perf_counter()
    if options.tensor_parallel > 1:
        console.print(f"what follows is of rank 0 of {options.tensor_parallel}", style="yellow")
    if dry_run:
        return _plan(checkpoint, outdir, options, force=force)
    report = export_in_terminal(checkpoint, outdir, options, force=force)
    seconds = time.perf_counter() - begin
    console.print(str(outdir), highlight=False)
    print_layers((scheme, spec, report.shared[name], None) for name, (scheme, spec) in report.layers.items())
    remarks = (report.calibration, report.left_out, report.activations, report.kv_cache, report.drafting,
               report.library, report.genai, report.chat, report.tokenizer)  # fmt: skip
    for remark in filter(None, remarks):
        console.print(remark, style="yellow")
    if report.scale_error is not None:
        console.print(f"scales rounded to bf16: largest relative error {report.scale_error:.2e}", style="yellow")
    if report.head_error is not None:
        console.print(
            f"lm_head quantized to {options.lm_head}: root mean square error {report.head_error:.2%}", style="yellow"
        )
    print_reasons(FLOAT_HERE, report.dequantized)
    print_reasons(APART, report.apart)
    print_reasons(NOT_ORT, report.not_ort)
    print_reasons(PLAIN_ATTENTION, report.plain_attention)
    if report.plain_routers:
        console.print(
            f"routers of {report.plain_routers} layers are plain ONNX nodes: not MoERouting's", style="yellow"
        )
    if report.untraced:
        console.print(
            "the model is correct, and its export took longer: all layers were traced one by one, because layers do "
            f"not match: {report.untraced}",
            style="yellow",
        )
    console.print(
        f"experts {decimal(report.packed_bytes)}, other weights {decimal(report.dense_bytes)}, "
        f"{seconds:.1f} s, peak memory {peak_memory()}"
    )
    if options.quantize not in (None, "none"):
        console.print(_lost(checkpoint, outdir, seconds, options), highlight=False)


def _plan(checkpoint: Path, outdir: Path, options: Options, *, force: bool) -> None:
    from quantmoe.exporter.writing.plan import plan

    found = plan(checkpoint, outdir, force=force, **vars(options))
    console.print(f"{outdir} (dry run)", highlight=False)
    print_layers((scheme, spec, found.shared[name], size) for name, (scheme, spec, size) in found.layers.items())
    if found.attention:
        console.print(found.attention)
    for selected, count in Counter(map(selection, found.indexers)).items():
        console.print(f"{count} SparseIndexer: {selected}")
    total = found.packed + found.dense
    console.print(
        f"reads {decimal(found.read)}; writes {decimal(total)}: experts {decimal(found.packed)}, "
        f"other weights {decimal(found.dense)}{f', in {found.files} files' if found.files > 1 else ''}\n"
        f"about {minutes(found.seconds)} ({found.rate}), peak memory about {decimal(round(found.memory))}\n"
        f"the KV cache takes {found.cache:,} bytes a token"
    )
    if text := found.calibration:
        console.print(
            f"the model reads {text.tokens:,} tokens of {options.calibrate} first: about {minutes(text.seconds)} "
            f"of the time above, with {decimal(round(text.memory))} of memory"
        )
    print_reasons(FLOAT_HERE, found.dequantized)
    print_reasons(APART, found.apart)
    print_reasons(NOT_ORT, found.not_ort)
    print_reasons(PLAIN_ATTENTION, found.plain_attention)
    remarks = (found.left_out, found.activations, found.kv_cache, found.drafting, found.chat, found.tokenizer)
    for remark in filter(None, remarks):
        console.print(remark, style="yellow")
    if total > found.free:
        console.print(f"only {decimal(found.free)} of disk are free there", style="red")


def export_in_terminal(checkpoint: Path, outdir: Path, options: Options, *, force: bool) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        from quantmoe.exporter.writing.convert import write

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        try:
            return write(checkpoint, outdir, options, force=force, progress=progress)
        except KeyboardInterrupt:
            if (kept := outdir / CALIBRATION).exists():
                said = f"{kept} keeps what was read of {options.calibrate}: this command goes on from there"
                stderr.print(said, soft_wrap=True, highlight=False)
            raise


def _lost(checkpoint: Path, outdir: Path, seconds: float, options: Options) -> str:
    """Return what the quantization of an export lost, or why that is not measured."""
    for option, given in (
        ("--tensor-parallel", options.tensor_parallel > 1),
        ("--vision", options.vision),
        ("--paged", options.paged),
        ("--external-experts", options.external_experts),
    ):
        if given:
            return f"what was lost is not measured: {option} exports no model that takes one text"
    from quantmoe.benchmarks.quality.quantization_loss import lost

    return lost(checkpoint, outdir, seconds, options.layers)
