"""Options that several commands have. An option with one name means one thing in all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.filesize import decimal

from quantmoe.exporter.targets import CPU, CUDA

Model = Annotated[Path, typer.Argument(help="exported model or its folder")]


def parse_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", str(text).strip())
    if not found:
        raise typer.BadParameter(f"{text!r}: expected bytes, as 2GB, 512MiB or 1000000000")
    unit = 1024 if found[3] else 1000
    return int(float(found[1]) * unit ** " KMGT".index(found[2].upper() or " "))


def bytes_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else parse_bytes(text)


#: settings of an option that is a number of bytes, as 12GB
SIZE: dict[str, Any] = {"parser": parse_bytes, "metavar": "SIZE"}
#: settings of a number of bytes, or auto: what is free
ROOM: dict[str, Any] = {"parser": bytes_or_auto, "metavar": "SIZE|auto"}
#: help of options with one meaning, where types or defaults differ
GROUP_SIZE = "give N weights one scale; -1: a row"
LM_HEAD = "quantize the LM head"
TARGET = "choose what runs the files"
PROMPT = "answer or continue this text"
BATCH = "run N sequences together"


def panel_option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Return an option in a panel of ``--help``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Device = Annotated[Literal["cpu", "cuda"], panel_option("Hardware", "run on the CPU or a GPU")]
Threads = Annotated[
    int,
    panel_option(
        "Hardware",
        "use N CPU threads; 0: automatic",
        "--threads",
        "-t",
        show_default=False,
        min=0,
        max=1024,
        metavar="N",
    ),
]
Experts = Annotated[
    Literal["gpu", "host", "disk", "auto"] | None,
    panel_option("Hardware", "place experts: gpu, host, disk, auto", metavar="WHERE"),
]
Ram = Annotated[Any, panel_option("Hardware", "limit RAM for experts, as 12GB", **ROOM)]
GpuMemory = Annotated[Any, panel_option("Hardware", "limit GPU memory for experts", **ROOM)]
Chunk = Annotated[
    int | None,
    panel_option(
        "Advanced", "read N prompt tokens a step", min=1, metavar="N", show_default=f"{CPU.chunk}, cuda: {CUDA.chunk}"
    ),
]
DiskSpeed = Annotated[
    int | None,
    panel_option("Fit", "read the disk at SIZE a second", show_default=decimal(int(CPU.rates[1])), **SIZE),
]
Force = Annotated[bool, typer.Option("--force", help="replace earlier output")]
Json = Annotated[bool, panel_option("Output", "print JSON", "--json")]
Output = Annotated[Path | None, panel_option("Output", "write the result to this file", metavar="FILE")]
Plot = Annotated[Path | None, panel_option("Output", "draw the result into this file", metavar="IMAGE")]


def context_option(panel: str, default: str) -> Any:
    """Return ``--context`` in a panel of ``--help``."""
    return panel_option(
        panel, "hold N tokens of prompt and answer", "--context", "-c", min=2, metavar="N", show_default=default
    )
