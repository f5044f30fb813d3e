"""The number that the ranks of one export have in common, and no other export has."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.folder.record import new_hash
from quantmoe.exporter.reading.checkpoint import Checkpoint
from quantmoe.exporter.reading.expert_map import read_text
from quantmoe.exporter.writing.external_data import LINE


def export_id(ckpt: Checkpoint, options: Options) -> int:
    """Return the attribute of nodes that need the other ranks (ops/all_reduce.def), 1 to 2^31 - 1.

    It is made of the release, the options, the configuration, names, types and shapes of the tensors, and 64 bytes of
    each. Two fine-tunes of a model differ in these bytes alone. All ranks have one number, and a repeated export too.

    Raises:
        CheckpointError: a tensor cannot be read.
        OptionError: the map of experts cannot be.
    """
    asked = dataclasses.asdict(options)
    if options.expert_map is not None:
        asked["expert_map"] = read_text(Path(options.expert_map))
    made_of = new_hash()
    made_of.update(json.dumps([version("quantmoe"), asked, ckpt.config, ckpt.quantization], default=str).encode())
    for name in sorted(ckpt.names()):
        made_of.update(f"\n{name} {ckpt.dtype(name)} {ckpt.shape(name)} ".encode())
        made_of.update(ckpt.sample(name, LINE))
    return int(made_of.hexdigest()[:16], 16) % (2**31 - 1) + 1
