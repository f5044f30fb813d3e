"""``quantmoe unpack``: a layer's codes and scales."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantmoe.exporter.common_options import Force, Model
from quantmoe.exporter.report import console


def unpack(
    outdir: Model,
    layer: Annotated[int, typer.Option(min=0, help="unpack this decoder layer", metavar="N")],
    output: Annotated[
        Path | None,
        typer.Option(help="write the result to this file", metavar="FILE", show_default="layer_N.safetensors"),
    ] = None,
    force: Force = False,
) -> None:
    """Write a layer's codes and scales as the checkpoint had them."""
    from quantmoe.exporter.inspecting.unpack import unpack as unpack_layer

    output = output or Path(f"layer_{layer}.safetensors")
    console.print(f"{len(unpack_layer(outdir, layer, output, force=force))} matrices in {output}")
