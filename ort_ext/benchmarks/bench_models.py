"""Models to measure: made of a shape, of random weights, or of a GGUF file; and how many layers of them fit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from quantmoe.benchmarks.child_processes import in_process
from quantmoe.benchmarks.random_checkpoint import CONFIGS, GROUP_SIZE, cut, parameters, quantized, write
from quantmoe.benchmarks.random_gguf import write_gguf
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.files import MODEL

SPARE = 2e9  # bytes beside the weights
SHARE = 0.7  # of the memory that is available, for the layers that a shape is cut to
#: of the graph: f16, which NumPy has
TYPES: dict[str, Literal["f16"] | None] = {"cpu": None, "cuda": "f16"}
#: format of our weights -> GGUF's of as many bits
GGUF_TYPES = {"int4": "Q4_0", "mxfp4": "MXFP4", "nvfp4": "Q4_0", "int8": "Q8_0", "fp8": "Q8_0", "mxfp8": "Q8_0",
              "bf16": "BF16", "f16": "F16"}  # fmt: skip


def weight_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of a random checkpoint, and about as many as its export and its GGUF file take."""
    return round(
        sum(
            prod(shape) * ((4 + 16 / GROUP_SIZE) / 8 if quantized(name) else 2)
            for name, shape in parameters(config).items()
        )
    )


def available_memory() -> int:
    line = next(
        line
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("MemAvailable")
    )
    return int(line.split()[1]) * 1024


def layers_that_fit(config: Mapping[str, Any], layers: int | None, copies: int, memory: int, disk: int) -> int:
    """Return how many layers of a shape to make.

    Args:
        layers: asked for, or None. copies: of the weights in memory: one a side with a file of its own.
        memory, disk: bytes that are free.

    Raises:
        ModelError: they do not fit, or not a single one with experts.
    """
    least = 1 + min(1, config.get("first_k_dense_replace", 0))
    base, next_ = (weight_bytes(cut(config, n)) for n in (least, least + 1))

    def weights(n: int) -> int:
        return base + (n - least) * (next_ - base)

    def needed(n: int) -> float:
        return SPARE + copies * weights(n)

    for free, need_of, what in ((memory, needed, "memory"), (disk, lambda n: 2.1 * weights(n), "disk")):
        wanted = max(least, layers or least)
        if need_of(wanted) > free:
            raise ModelError(
                f"{wanted} layers need about {need_of(wanted) / 1e9:.1f} GB of {what}, {free / 1e9:.1f} GB are free"
            )
    if layers:
        return max(layers, least)
    fitting = (n for n in range(config["num_hidden_layers"], least, -1)
               if needed(n) <= SHARE * memory and 2.1 * weights(n) <= SHARE * disk)  # fmt: skip
    return next(fitting, least)


def make_model(
    folder: Path, config: Mapping[str, Any], lm_head: Literal["int4", "int8"] | None, device: Literal["cpu", "cuda"]
) -> None:
    """Export a random checkpoint to ``folder`` for the device, in f16 on cuda; the checkpoint is removed."""
    from quantmoe.exporter.writing.convert import export

    checkpoint = folder.with_name(folder.name + "-checkpoint")
    try:
        write(checkpoint, config, GROUP_SIZE)
        export(checkpoint, folder, target=device, dtype=TYPES[device], lm_head=lm_head)
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def gguf_types(found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the types with as many bits as the model's experts, and as its head."""
    formats = {linear["module"]: linear["attributes"]["w_format"] for linear in found["linears"]}
    experts = found["layers"][0]["attributes"]["w2_format"] if found["layers"] else "int4"
    return GGUF_TYPES[experts], GGUF_TYPES[formats.get("lm_head", "bf16")]


def _layers(name: str, layers: int | None, against: Sequence[str], root: Path) -> int:
    """Return how many layers of a shape to make in ``root``, which is there afterwards."""
    root.mkdir(parents=True, exist_ok=True)
    copies = 1 + ("llama.cpp" in against)
    free = available_memory(), shutil.disk_usage(root).free
    return int(in_process(name, layers_that_fit, CONFIGS[name], layers, copies, *free))


def of_shape(
    console: Console,
    name: str,
    layers: int | None,
    *,
    lm_head: Literal["int4", "int8"] | None,
    device: Literal["cpu", "cuda"],
    against: Sequence[str],
    root: Path,
) -> Path:
    """Return the exported folder of a shape."""
    layers = _layers(name, layers, against, root)
    folder = root / "-".join(filter(None, [name, str(layers), lm_head, device.removeprefix("cpu")]))
    if (folder / MODEL).is_file():
        return folder
    with console.status(f"making {layers} layers of {name} and exporting them"):
        in_process(name, make_model, folder, cut(CONFIGS[name], layers), lm_head, device)
    return folder


def gguf_of_shape(
    console: Console, name: str, layers: int | None, *, weights: str, against: Sequence[str], root: Path
) -> Path:
    """Return a GGUF file of a shape."""
    layers = _layers(name, layers, against, root)
    path = root / f"{name}-{layers}-{weights}.gguf"
    if not path.is_file():
        with console.status(f"writing {path.name}"):
            in_process(path.name, write_gguf, path, cut(CONFIGS[name], layers), weights)
    return path


def export_file(file: Path, folder: Path, device: Literal["cpu", "cuda"]) -> None:
    from quantmoe.exporter.writing.convert import export

    export(file, folder, target=device, dtype=TYPES[device])


def exported(console: Console, file: Path, device: Literal["cpu", "cuda"], root: Path) -> Path:
    """Return the exported folder of a GGUF file."""
    folder = root / "-".join(filter(None, [file.stem, device.removeprefix("cpu")]))
    if not (folder / MODEL).is_file():
        with console.status(f"exporting {file.name}"):
            in_process(file.name, export_file, file, folder, device)
    return folder
