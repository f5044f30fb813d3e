"""QuantMoE: quantized mixture-of-experts models as ONNX."""

from importlib import import_module

TYPE_CHECKING = False  # the module typing is not imported: the command looks after Ctrl-C first
if TYPE_CHECKING:
    from typing import Any

    from quantmoe.benchmarks.bench import bench
    from quantmoe.benchmarks.quality.evaluate import evaluate
    from quantmoe.exporter.choosing.options import Options
    from quantmoe.exporter.errors import CheckpointError, ContextError, ModelError, OptionError
    from quantmoe.exporter.folder.sampling_options import Sampling
    from quantmoe.exporter.inspecting.inspect import inspect
    from quantmoe.exporter.inspecting.unpack import unpack
    from quantmoe.exporter.writing.convert import export
    from quantmoe.ort_ext import cuda_library_path as ort_cuda_library_path
    from quantmoe.ort_ext import library_path as ort_library_path
    from quantmoe.runtime.cache import Cache
    from quantmoe.runtime.chat import Chat, TemplateArguments, Text
    from quantmoe.runtime.choosing.constraint import Grammar
    from quantmoe.runtime.generate import Generated, Generator
    from quantmoe.trt_plugins import library_path as trt_library_path

#: where each name is: imported when asked for, since each command needs other packages
_LAZY = {"Cache": "runtime.cache", "Chat": "runtime.chat", "CheckpointError": "exporter.errors",
         "ContextError": "exporter.errors", "Generated": "runtime.generate", "Generator": "runtime.generate",
         "Grammar": "runtime.choosing.constraint", "ModelError": "exporter.errors", "OptionError": "exporter.errors",
         "Options": "exporter.choosing.options", "Sampling": "exporter.folder.sampling_options",
         "TemplateArguments": "runtime.chat", "Text": "runtime.chat", "bench": "benchmarks.bench",
         "evaluate": "benchmarks.quality.evaluate", "export": "exporter.writing.convert",
         "inspect": "exporter.inspecting.inspect", "unpack": "exporter.inspecting.unpack"}  # fmt: skip
#: functions that have another name where they are
_RENAMED = {"ort_cuda_library_path": ("ort_ext", "cuda_library_path"), "ort_library_path": ("ort_ext", "library_path"),
            "trt_library_path": ("trt_plugins", "library_path")}  # fmt: skip
__all__ = ["Cache", "Chat", "CheckpointError", "ContextError", "Generated", "Generator", "Grammar", "ModelError",
           "OptionError", "Options", "Sampling", "TemplateArguments", "Text", "bench", "evaluate", "export", "inspect",
           "ort_cuda_library_path", "ort_library_path", "trt_library_path", "unpack"]  # fmt: skip


def __getattr__(name: str) -> "Any":
    if name == "__version__":  # importlib.metadata takes half of the time that the rest of this import takes
        return import_module("importlib.metadata").version("quantmoe")
    if name in _LAZY or name in _RENAMED:
        module, own = _RENAMED.get(name) or (_LAZY[name], name)
        return getattr(import_module(f"quantmoe.{module}"), own)
    raise AttributeError(f"module 'quantmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
