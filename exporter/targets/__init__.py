"""Targets of an export: one file each, one line here. No other module compares a target's or a layout's name.

The command line imports this for its help: what needs NumPy is imported in functions.
"""

from quantmoe.exporter.targets.base import ACTIVATIONS, Target
from quantmoe.exporter.targets.cpu import CPU
from quantmoe.exporter.targets.cuda import CUDA
from quantmoe.exporter.targets.ort import ORT

__all__ = ["ACTIVATIONS", "CPU", "TARGETS", "Target", "by_name", "of_device", "of_layout", "with_option"]

#: facts that follow from a packed layout (:func:`of_layout`), and from the device of a library (:func:`of_device`)
OF_LAYOUT = (
    "kernels",
    "refusal",
    "library",
    "own_floats",
    "one_node",
    "packed_tables",
    "own_widths",
    "max_elements",
    "act_orders_apart",
)
OF_DEVICE = ("library", "library_path", "chunk", "steps_of_chunk")


def by_name(*targets: Target) -> dict[str, Target]:
    """Return targets by their names.

    Raises:
        ValueError: naming a target whose layout or device is another's, and a fact in which the two differ. Modules
            that know only the layout or the device would take the other's.
    """
    found: dict[str, Target] = {}
    for target in targets:
        for other in found.values():
            shared: dict[str, tuple[str, ...]] = {"layout": OF_LAYOUT} if target.layout == other.layout else {}
            if target.library and other.library and target.device == other.device:
                shared["device"] = OF_DEVICE
            for by, name in ((by, name) for by, names in shared.items() for name in names):
                if getattr(target, name) != getattr(other, name):
                    raise ValueError(
                        f"target {target.name}: {name} is {getattr(target, name)!r}, expected {getattr(other, name)!r} "
                        f"as target {other.name} has it, or another {by} than {getattr(target, by)}"
                    )
        found[target.name] = target
    return found


TARGETS = by_name(CPU, CUDA, ORT)


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
