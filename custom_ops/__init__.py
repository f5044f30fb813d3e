"""The operators: specification, layouts, reference, kernels and the C ABI."""

import os
import sys
from importlib.resources import files

#: the operators' domain in ONNX
DOMAIN = "quantmoe"


def native_name(stem: str) -> str:
    """File name of a native library: ``quantmoe.dll`` (Windows), ``libquantmoe.dylib`` (macOS), ``libquantmoe.so``."""
    return f"{stem}.dll" if sys.platform == "win32" else f"lib{stem}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def library_file(package: str, name: str, variable: str) -> str:
    """Path of a native library: what the environment ``variable`` names, else ``name`` installed in ``package``.

    Raises:
        FileNotFoundError: there is none, as of the CUDA libraries without the package quantmoe-cuda.
    """
    path = os.environ.get(variable) or str(files(package) / name)
    if not os.path.exists(path):
        hint = "install quantmoe-cuda, or build it with make cuda and " if "trt" in name or "cuda" in name else ""
        raise FileNotFoundError(f"{path}: no such library; {hint}name it in {variable}")
    return path
