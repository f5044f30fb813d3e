"""Names of a model's inputs and outputs, onnxruntime-genai's, for those who write them and those who read them."""

from collections.abc import Mapping
from typing import Any

#: dimensions of a cache's tensors of one token, past_key_values.N.<name> and present.N.<name>
RANKS = {"key": 4, "value": 4, "conv_state": 3, "recurrent_state": 4}
#: what goes from the main model to the one that drafts, and out of that to draft once more
HIDDEN, HIDDEN_OUT = "hidden_states", "hidden_states_out"
#: inputs of a packed batch beside its tokens and caches, int32, and their shapes (export --paged)
PAGED: dict[str, tuple[int | str, ...]] = {
    "block_table": ("batch_size", "max_num_blocks"),
    "cumulative_sequence_lengths": ("batch_size + 1",),
    "past_sequence_lengths": ("batch_size",),
    "attention_metadata": (3,),
    "logits_indices": ("num_logits",),
}


def is_plain(name: str) -> bool:
    """Return whether a name in a stranger's file names a file in its own folder, on every system."""
    return name not in ("", ".", "..") and not any(mark in name for mark in "/\\\0")


def text_part(config: Mapping[str, Any]) -> Any:
    """Return the language model's part of a configuration: of a model that also speaks, its thinker's."""
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, dict) else config
    return config.get("text_config") or config
