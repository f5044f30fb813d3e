"""Names and sizes of a model's inputs and outputs. The names are onnxruntime-genai's."""

#: prefix of a cache's inputs
PAST = "past_key_values"
#: ends of the names of what linear attention keeps: of one size however many tokens there were
STATES = (".conv_state", ".recurrent_state")

#: dimensions of a cache's tensors of one token, past_key_values.N.<name> and present.N.<name>
RANKS = {"key": 4, "value": 4, "indexer_key": 4, "conv_state": 3, "recurrent_state": 4}
#: initializer, int64 [1], that a session may replace: how many last tokens' logits a run gives; metadata has its value
NUM_LOGITS = "num_logits"
#: what goes from the main model to the one that drafts, and out of that to draft once more
HIDDEN, HIDDEN_OUT = "hidden_states", "hidden_states_out"
#: slots of a block of the caches
BLOCK = 256
#: inputs of a packed batch beside its tokens and caches, int32, and their shapes (export --paged)
PAGED: dict[str, tuple[int | str, ...]] = {
    "block_table": ("batch_size", "max_num_blocks"),
    "cumulative_sequence_lengths": ("batch_size + 1",),
    "past_sequence_lengths": ("batch_size",),
    "logits_indices": ("num_logits",),
}


def present(name: str) -> str:
    """Return the output of a cache's input."""
    return name.replace(PAST, "present")
