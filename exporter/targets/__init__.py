"""Targets of an export: one file each, one line here. No other module compares a target's or a layout's name.

The command line imports this for its help: what needs NumPy is imported in functions.
"""

from quantmoe.exporter.targets.base import ACTIVATIONS, Target
from quantmoe.exporter.targets.cpu import CPU
from quantmoe.exporter.targets.cuda import CUDA
from quantmoe.exporter.targets.ort import ORT

__all__ = ["ACTIVATIONS", "CPU", "TARGETS", "Target", "of_device", "of_layout", "with_option"]

TARGETS = {target.name: target for target in (CPU, CUDA, ORT)}


def of_layout(layout: str) -> Target:
    """Return the target whose nodes have a packed layout."""
    return next(target for target in TARGETS.values() if target.layout == layout)


def of_device(device: str) -> Target:
    """Return the target whose library a Generator loads on a device."""
    return next(target for target in TARGETS.values() if target.library and target.device == device)


def with_option(option: str) -> str:
    """Return the targets that have an option, as a text."""
    names = [name for name, target in TARGETS.items() if option in target.options]
    return f"target{'s' * (len(names) > 1)} {' and '.join(names)}"
