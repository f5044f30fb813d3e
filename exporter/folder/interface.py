"""Names and sizes of a model's inputs and outputs. The names are onnxruntime-genai's."""

from __future__ import annotations

from typing import NamedTuple


class Tensor(NamedTuple):
    """A row of docs/reference/exported-folder.md: inputs or outputs, ``*`` for several."""

    name: str
    shape: str
    content: str


TENSORS = (
    Tensor("input_ids", "int64 [batch, new]", "new tokens, at least one"),
    Tensor("attention_mask", "int64 [batch, length]", "ones for past and new tokens, zeros for padding"),
    Tensor("position_ids", "int64 [batch, new]", "positions of the new tokens, from 0"),
    Tensor("past_key_values.N.*", "", "[the cache](#the-cache) of layer N"),
    Tensor(
        "logits",
        "[batch, min(new, N), vocabulary], N = 1 or [`num_logits`](#logits-of-several-tokens), or of `--logits N`; "
        "[batch, new, vocabulary] with `--logits all`",
        "in the graph's type: f32, f16 or bf16",
    ),
    Tensor("present.N.*", "", "the cache after the run"),
    Tensor(
        "hidden_states",
        "[batch, new, features]",
        "with `--mtp`, after the last norm; with `--eagle3`, its `fc` of three layers' outputs",
    ),
)
PAGED_TENSORS = (
    Tensor("input_ids", "int64 [num_tokens]", "new tokens, one request after the other"),
    Tensor("cumulative_sequence_lengths", "int32 [batch_size + 1]", "where each request's tokens begin"),
    Tensor("past_sequence_lengths", "int32 [batch_size]", "tokens in each request's cache"),
    Tensor(
        "block_table",
        "int32 [batch_size, max_num_blocks]",
        "the [blocks](../../custom_ops/ops/cached_attention.def) of each request",
    ),
    Tensor("logits_indices", "int32 [num_logits]", "tokens whose logits are wanted; not with `--logits all`"),
    Tensor(
        "past_key_values.N.*",
        "[num_blocks, 256, KV heads, head size], the graph's type, or codes with `--cache fp8`",
        "written in place",
    ),
    Tensor("logits", "[num_logits, vocabulary]; [num_tokens, vocabulary] with `--logits all`", ""),
)
ENCODER_TENSORS = (
    Tensor("input_ids", "int64 [batch, length]", "tokens"),
    Tensor("attention_mask", "int64 [batch, length]", "ones for tokens, zeros for padding"),
    Tensor("last_hidden_state", "f32 [batch, length, hidden size]", "output: a vector for each token"),
    Tensor("sentence_embedding", "f32 [batch, hidden size]", "output: a vector for each text"),
    Tensor("logits", "f32 [batch, length, labels]", "output, if the checkpoint has a head for labels"),
)
#: of vision.onnx, embeddings.onnx and model.onnx, one after the other: what one returns goes into the next
VISION_TENSORS = (
    Tensor("pixel_values", "f32 [patches, values of a patch]", "into `vision.onnx`"),
    Tensor("image_grid_thw", "int64 [images, 3]", "into `vision.onnx`: frames, rows and columns of patches"),
    Tensor(
        "image_features",
        "[image tokens, H]; [0, H] without images",
        "from `vision.onnx` into `embeddings.onnx`: features of all images in order",
    ),
    Tensor("input_ids", "int64 [batch, new]", "into `embeddings.onnx`"),
    Tensor("inputs_embeds", "[batch, new, H]", "from `embeddings.onnx` into `model.onnx`"),
    Tensor("position_ids", "int64 [3, batch, new]", "into `model.onnx`: time, row and column"),
)

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
