"""Fields of transformers' configuration, config.json."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import regex

from quantmoe.exporter.errors import CheckpointError

#: of anything that config.json counts
MAX_SIZE = 1 << 24


def text_part(config: Mapping[str, Any]) -> Any:
    """Return the language model's part of a configuration: of a model that also speaks, its thinker's."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, dict) else config
    if config.get("model_type") == "dbrx":
        return _dbrx(config)
    return config.get("text_config") or config.get("llm_config") or config


def _dbrx(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return DBRX's configuration with the names of other families."""
    own = config.get("ffn_config")
    inner: Mapping[str, Any] = own if isinstance(own, dict) else {}
    activation = inner.get("ffn_act_fn")
    named = {
        "hidden_size": config.get("d_model"),
        "num_hidden_layers": config.get("n_layers"),
        "num_attention_heads": config.get("n_heads"),
        "max_position_embeddings": config.get("max_seq_len"),
        "intermediate_size": inner.get("ffn_hidden_size"),
        "num_experts": inner.get("moe_num_experts"),
        "num_experts_per_tok": inner.get("moe_top_k"),
        "hidden_act": activation.get("name", "silu") if isinstance(activation, dict) else "silu",
    }
    return {**config, **named}


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Make what fields of another type, or infinite numbers, raise a CheckpointError: ``where`` and the reason."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, ValueError, TypeError, AttributeError, LookupError, regex.error) as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_sizes(folder: Path, config: dict[str, Any]) -> None:
    """Refuse sizes that would take hours or terabytes to build a model of."""
    for key, value in config.items():
        limit = 1 << 16 if key == "num_labels" else MAX_SIZE  # transformers names every label
        if re.search("(size|dim|heads|experts|layers|rank|labels)$", key) and type(value) is int and value > limit:
            raise CheckpointError(f"{folder / 'config.json'}: {key} is {value}, expected at most {limit}")
