"""Fields of transformers' configuration, config.json."""

from collections.abc import Mapping
from typing import Any


def text_part(config: Mapping[str, Any]) -> Any:
    """Return the language model's part of a configuration: of a model that also speaks, its thinker's."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, dict) else config
    return config.get("text_config") or config
