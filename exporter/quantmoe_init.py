"""QuantMoE: quantized mixture-of-experts models as ONNX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quantmoe.ort_ext import cuda_library_path as ort_cuda_library_path
from quantmoe.ort_ext import library_path as ort_library_path
from quantmoe.trt_plugins import library_path as trt_library_path

if TYPE_CHECKING:
    from quantmoe.exporter.errors import CheckpointError, ContextError, ModelError, OptionError
    from quantmoe.exporter.inspecting.inspect import inspect
    from quantmoe.exporter.inspecting.unpack import unpack
    from quantmoe.exporter.measuring.bench import bench
    from quantmoe.exporter.measuring.evaluate import evaluate
    from quantmoe.exporter.reading.sampling import Sampling
    from quantmoe.exporter.running.cache import Cache
    from quantmoe.exporter.running.chat import Chat, Text
    from quantmoe.exporter.running.generate import Generated, Generator
    from quantmoe.exporter.writing.convert import export

#: where each name is: imported when asked for, since each command needs other packages
_LAZY = {"Cache": "running.cache", "Chat": "running.chat", "CheckpointError": "errors",
         "ContextError": "errors", "Generated": "running.generate", "Generator": "running.generate",
         "ModelError": "errors", "OptionError": "errors", "Sampling": "reading.sampling", "Text": "running.chat",
         "bench": "measuring.bench", "evaluate": "measuring.evaluate", "export": "writing.convert",
         "inspect": "inspecting.inspect", "unpack": "inspecting.unpack"}  # fmt: skip
__all__ = ["Cache", "Chat", "CheckpointError", "ContextError", "Generated", "Generator", "ModelError", "OptionError",
           "Sampling", "Text", "bench", "evaluate", "export", "inspect", "ort_cuda_library_path", "ort_library_path",
           "trt_library_path", "unpack"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":  # importlib.metadata takes half of the time that the rest of this import takes
        return import_module("importlib.metadata").version("quantmoe")
    if name in _LAZY:
        return getattr(import_module(f"quantmoe.exporter.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'quantmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
