"""Passes over the traced graph (onnx_ir). graph/trace.py and writing/graph_writer.py run them, in their order, after
``modules`` and before ``lowering``. A target names its own (:class:`quantmoe.exporter.targets.Target`)."""

from collections.abc import Iterable
from importlib import import_module

import onnx_ir as ir


def run_passes(graph: ir.Model, names: Iterable[str]) -> None:
    """Run passes "<module>.<function>" of this package in order."""
    for name in names:
        module, _, function = name.partition(".")
        getattr(import_module(f"{__name__}.{module}"), function)(graph)
