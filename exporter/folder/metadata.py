"""Keys of a model's metadata, which is text by name. ``make docs`` makes a table of the comments with a colon.

Two keys stand elsewhere: ``num_logits`` in :mod:`interface`, ``chat.*`` in ``Template.turns``.
"""

# who wrote a model, its ``producer_name``; no key
PRODUCER = "quantmoe"
#: what the model is for, a value of `export --target`
TARGET = "target"
#: the name of the checkpoint's folder
CHECKPOINT = "checkpoint"
#: the oldest ONNX Runtime that runs the model
ONNXRUNTIME = "onnxruntime"
#: token ids after which generation ends, with commas between
EOS = "eos_token_id"
#: most tokens of prompt and answer together
CONTEXT_LENGTH = "context_length"
#: only for `longrope`: most tokens with the factors of short texts
SHORT_CONTEXT = "short_context"
#: `true`: the cache may be [written in place](#the-cache), past and present are one buffer
SHARE_BUFFER = "past_present_share_buffer"
#: BLAKE3 of the rest of `model.onnx`, which contains the hashes of the weights: 64 hexadecimal digits
IDENTITY = "identity"
#: why there is no `chat.begin` although the checkpoint has a chat template
NO_CHAT = "no_chat"
#: this model's number among the ranks of a sliced model, and the number of ranks; absent: the model is whole
RANK, WORLD = "rank", "world"
#: attention modules that are standard nodes, and why: a JSON object
PLAIN_ATTENTION = "plain_attention"
#: the other files that the export wrote: a JSON object of name -> hash
FILES = "files"
#: most last tokens of a row that a run gives logits for; absent: one token or all
LOGITS = "logits"
#: a run has the tokens of many requests (`export --paged`)
PAGED_METADATA = "paged"
