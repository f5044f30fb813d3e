"""README.md of an exported folder: what runs it, on this platform and on others."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from quantmoe.exporter.targets import Target

if TYPE_CHECKING:
    from quantmoe.exporter.reading.slices import Slice

MADE = "`make release` in QuantMoE's sources makes it; no package registry had it when this was written."


def readme(target: Target, runtime: str, part: Slice | None = None, remark: str = "") -> str:
    """Return the file's text, in Markdown.

    Args:
        target: of the export. runtime: the oldest ONNX Runtime that runs it, "" where TensorRT alone does.
        part: what the folder has of a model, None: all.
        remark: lines of what else a user of the folder must know, "" for none.
    """
    return _what_runs(target, runtime, part) + "".join(f"\n{line}\n" for line in remark.splitlines())


def _what_runs(target: Target, runtime: str, part: Slice | None) -> str:
    title, command, wrote = "A model", f"quantmoe export --target {target.name}", "wrote this folder. "
    if part is not None:
        title, command = f"Rank {part.rank} of {part.world} of a model", f"{command} --tensor-parallel {part.world}"
        wrote += "It runs together with those of the other ranks.\n"
    if not runtime:
        return (
            f"# {title} for TensorRT\n\n`{command} --external-experts` {wrote}"
            "Its engines read the experts\nin it where they run: set `QUANTMOE_FOLDER` to it. "
            "The plug-in comes with this package:\n\n"
            f"{target.package}.\n\n{MADE}\n"
        )
    head = f"# {title} for ONNX Runtime {runtime} or newer\n\n`{command}` {wrote}"
    if not target.library:
        return f"{head}ONNX Runtime has all its operators: no library is needed.\n"
    return (
        f"{head}A program registers the library of its operators\nbefore it opens `model.onnx`. "
        f"Take the library from this package:\n\n{target.package}.\n\n{MADE}\n\n"
        f"A `{target.library}` in this folder is for {platform.system()} {platform.machine()}. "
        "It is native code: load\nit only if you trust who made this folder. The other files run on every platform.\n"
    )
