"""QuantMoE: quantized mixture-of-experts models as ONNX."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from quantmoe.ort_ext import cuda_library_path as ort_cuda_library_path
from quantmoe.ort_ext import library_path as ort_library_path
from quantmoe.trt_plugins import library_path as trt_library_path

if TYPE_CHECKING:
    from quantmoe.exporter.inspecting.inspect import inspect
    from quantmoe.exporter.inspecting.unpack import unpack
    from quantmoe.exporter.measuring.bench import bench
    from quantmoe.exporter.reading.sampling import Sampling
    from quantmoe.exporter.running.chat import Chat
    from quantmoe.exporter.running.generate import Generator
    from quantmoe.exporter.writing.convert import export

__all__ = ["Chat", "Generator", "Sampling", "bench", "export", "inspect", "ort_cuda_library_path", "ort_library_path",
           "trt_library_path", "unpack"]  # fmt: skip
__version__ = version("quantmoe")
#: imported when asked for: each command needs other packages
_LAZY = {"Chat": "running.chat", "Generator": "running.generate", "Sampling": "reading.sampling",
         "bench": "measuring.bench", "export": "writing.convert", "inspect": "inspecting.inspect",
         "unpack": "inspecting.unpack"}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"quantmoe.exporter.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'quantmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
