"""The folder ``onnx`` in an export, from which transformers.js loads the model in a browser or in Node."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import DATA, JS_FOLDER, JS_WEIGHTS, MODEL, weight_files
from quantmoe.exporter.folder.model_file import load_own

#: bytes of a file that a browser can hold in one buffer
LARGEST = 2 * 10**9


def js_config(config: dict[str, Any], stage: Path) -> dict[str, Any]:
    """Return config.json with what transformers.js asks: fp32, whose names have no suffix, and files of weights."""
    return config | {"transformers.js_config": {"dtype": "fp32", "use_external_data_format": len(weight_files(stage))}}


def check_onnx_folder(output: Path, force: bool) -> None:
    """Refuse a folder ``onnx`` that is not an earlier export's.

    Raises:
        FileExistsError: it is there, and a stranger's, or ``force`` is not set.
    """
    folder = output / JS_FOLDER
    if os.path.lexists(folder) and not _is_own(folder):
        raise FileExistsError(f"{folder} exists and no export is known to have written it; export to another folder")
    if os.path.lexists(folder) and not force:
        raise FileExistsError(f"{folder} exists; --force (in Python, force=True) replaces an earlier export")


def write_onnx_folder(output: Path) -> None:
    """Write ``onnx``: the model, which names its weights as transformers.js does, and hard links to the weights."""
    import onnx_ir as ir  # it imports sympy, half a second

    remove_onnx_folder(output)
    folder = output / JS_FOLDER
    folder.mkdir()
    for name in weight_files(output):
        try:
            os.link(output / name, folder / _theirs(name))
        except OSError:  # a file system without hard links
            shutil.copyfile(output / name, folder / _theirs(name))
    model = ir.load(output / MODEL)
    for value in model.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.const_value = ir.ExternalTensor(
                _theirs(str(tensor.location)),
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
            )
    ir.save(model, folder / MODEL)


def remove_onnx_folder(output: Path) -> None:
    """Remove what an earlier export wrote there: another export has other weights."""
    folder = output / JS_FOLDER
    if _is_own(folder):
        for path in folder.iterdir():
            if path.name == MODEL or re.fullmatch(rf"{re.escape(JS_WEIGHTS)}(_\d+)?", path.name):
                path.unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def check_webgpu(where: Path, layer: str, zero_points: bool) -> None:
    """Refuse what WebGPU's QMoE lacks.

    Raises:
        CheckpointError: naming the layer.
    """
    if zero_points:
        raise CheckpointError(
            f"{where}: {layer}: WebGPU's QMoE takes no zero points, the layer has some; expected symmetric weights. "
            "--browser wasm takes them"
        )


def _theirs(name: str) -> str:
    """model.onnx.data.1 -> model.onnx_data_1"""
    return JS_WEIGHTS + name.removeprefix(DATA).replace(".", "_")


def _is_own(folder: Path) -> bool:
    return not folder.is_symlink() and load_own(folder / MODEL) is not None
