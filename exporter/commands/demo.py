"""``quantmoe demo``: a checkpoint is exported, run and compared with PyTorch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

from rich.filesize import decimal
from rich.table import Table

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.command_arguments import need
from quantmoe.exporter.commands.export import export_in_terminal
from quantmoe.exporter.common_options import PROMPT as PROMPT_HELP
from quantmoe.exporter.common_options import Force, panel_option
from quantmoe.exporter.report import console, experts_of, plural

#: of the demo: its own model knows the English of the King James Bible
PROMPT = "Then said the captain of the host,"


def demo(
    checkpoint: Annotated[Path, panel_option("Model", "export this Hugging Face folder", metavar="FOLDER")],
    outdir: Annotated[Path, panel_option("Model", "write the model here", metavar="FOLDER")] = Path("demo-model"),
    prompt: Annotated[str, panel_option("Answer", PROMPT_HELP, metavar="TEXT")] = PROMPT,
    max_new_tokens: Annotated[int, panel_option("Answer", "stop after N tokens", min=2, metavar="N")] = 32,
    force: Force = False,
) -> None:
    """Export a checkpoint, run it, and compare with PyTorch."""
    need("torch", "transformers", "onnxscript", "onnxruntime", "tokenizers")
    from quantmoe.exporter.folder.files import MODEL, TOKENIZER
    from quantmoe.exporter.writing.output import check_folder

    check_folder(outdir, [MODEL], force)
    from quantmoe.benchmarks.pytorch_comparison import compare
    from quantmoe.exporter.folder.tokenizer import load_tokenizer

    report = export_in_terminal(checkpoint, outdir, Options(), force=force)
    tokenizer = load_tokenizer(outdir) if (outdir / TOKENIZER).exists() else None
    ids = tokenizer.encode(prompt).ids if tokenizer else None
    found = compare(checkpoint, outdir, max_new_tokens, ids)

    def shown(tokens: list[int]) -> str:
        return tokenizer.decode([*ids, *tokens]) if tokenizer and ids else str(tokens)

    table = Table("", "", title=f"{checkpoint.name} -> {outdir / MODEL}", show_header=False)
    layers = Counter(
        f"{scheme}; experts: {experts_of(spec.attributes(), report.shared[name])}; "
        f"{spec.w13.activation_format} activations, {spec.w13.scale_type} scales"
        for name, (scheme, spec) in report.layers.items()
    )
    for text, count in layers.items():
        table.add_row(f"{count} MoE {plural('layer', count)}", text)
    for file in sorted(outdir.glob(f"{MODEL}*")):
        table.add_row(file.name, decimal(file.stat().st_size))
    table.add_row("ONNX Runtime", shown(found.tokens))
    table.add_row(
        "PyTorch", shown(found.expected_tokens) if found.expected_tokens else "(too large to dequantize here)"
    )
    if found.difference is not None:
        table.add_row("largest logit difference", f"{found.difference:.2e} of the largest logit, fed the same tokens")
    if found.float_difference is not None:
        table.add_row(
            "with float activations",
            f"{found.float_difference:.2e} and a float32 cache: ours; the rest is what rounding both loses",
        )
    if found.divergence is not None:
        table.add_row("distribution", f"KL {found.divergence:.2e} nats, same likeliest token {found.agreement:.0%}")
    table.add_row(
        "speed", f"prefill {found.prompt / found.prefill:.0f} tokens/s, decode {found.decode_rate:.1f} tokens/s"
    )
    console.print(table)
    console.print(report.activations or "activations as the checkpoint says", style="yellow")
