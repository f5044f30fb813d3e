"""A checkpoint's configuration as transformers reads it, and what of it no graph has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.reading.formats.experts import check_sizes


def configuration(format: Format, layers: int | None) -> Any:
    """The configuration of a checkpoint's language model.

    Args:
        layers: of the first so many layers; None: of all.

    Raises:
        CheckpointError: it is of no architecture of transformers, or of one that a graph cannot follow.
    """
    folder, raw = format.ckpt.folder, format.ckpt.config
    for part in (raw, raw.get("text_config")):
        if isinstance(part, dict):
            check_sizes(format.ckpt, part)
    with _validating(folder):
        config = whole(format).get_text_config()
        if format.slice:
            format.slice.narrow(config, str(folder / "config.json"))
    if not isinstance(config, PreTrainedConfig):
        raise CheckpointError(f"{folder / 'config.json'}: text_config is {config!r}, expected a configuration")
    check_sizes(format.ckpt, vars(config))
    _check_layers(format, config.num_hidden_layers)
    _check_linear_heads(format, config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def whole(format: Format) -> Any:
    """The configuration of all of a checkpoint's model.

    Raises:
        CheckpointError: it is of no architecture of transformers.
    """
    with _validating(format.ckpt.folder):
        # never code out of the checkpoint's folder, nor a question whether to run it
        return AutoConfig.from_pretrained(format.ckpt.companions, trust_remote_code=False)


@contextlib.contextmanager
def _validating(folder: Path) -> Iterator[None]:
    try:
        with doing(str(folder / "config.json")):
            yield
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:  # the validators' exceptions have no common base class
        raise CheckpointError(f"{folder / 'config.json'}: not an architecture of transformers: {error}") from None


def _check_layers(format: Format, count: int) -> None:
    """Refuses layers that have no tensors, and Nemotron's lists of another length, of which transformers takes that."""
    own = format.ckpt.text_config.get("num_hidden_layers")
    for field in ("hybrid_override_pattern", "layers_block_type"):
        blocks = format.ckpt.text_config.get(field)
        if isinstance(blocks, str | list) and type(own) is int and len(blocks) != own:
            raise CheckpointError(
                f"{format.ckpt.folder / 'config.json'}: {field} is of {len(blocks)} layers, expected "
                f"num_hidden_layers, {own}"
            )
    found = {match[1] for name in format.ckpt.names() if (match := re.search(r"\.layers\.([0-9]{1,6})\.", name))}
    if found and count > len(found):
        raise CheckpointError(
            f"{format.ckpt.folder / 'config.json'}: num_hidden_layers is {count}, the checkpoint has tensors of "
            f"{len(found)} layers"
        )


def _check_linear_heads(format: Format, config: PreTrainedConfig) -> None:
    """Refuses linear attention whose value heads do not share the key heads evenly: transformers divides them."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", 1) for kind in ("key", "value"))
    if keys < 1 or values < 1 or values % keys:
        raise CheckpointError(
            f"{format.ckpt.folder / 'config.json'}: linear_num_value_heads is {values}, expected a positive multiple "
            f"of linear_num_key_heads, {keys}"
        )
