"""``quantmoe unpack``: a layer's codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmoe.exporter.commands.common_options import Model
from quantmoe.exporter.report import console


def unpack(
    model: Model,
    layer: Annotated[int, typer.Option(min=0, help="unpack this decoder layer")],
    output: Annotated[Path | None, typer.Option(help="write this file", show_default="layer_N.safetensors")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it exists")] = False,
) -> None:
    """Write a layer's codes and scales as the checkpoint had them."""
    from quantmoe.exporter.inspecting.unpack import unpack as unpack_layer

    output = output or Path(f"layer_{layer}.safetensors")
    console.print(f"{len(unpack_layer(model, layer, output, force=force))} matrices in {output}")
