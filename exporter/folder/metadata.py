"""Keys of a model's metadata, which is text by name."""

#: who wrote a model, its ``producer_name``
PRODUCER = "quantmoe"
#: what the model is for, a value of ``export --target``
TARGET = "target"
#: this model's number among the ranks of a sliced model, and the number of ranks; absent: the model is whole
RANK, WORLD = "rank", "world"
#: most tokens of a text
CONTEXT_LENGTH = "context_length"
#: attention modules that are standard nodes, and why: a JSON object
PLAIN_ATTENTION = "plain_attention"
#: the other files that the export wrote: a JSON object of name -> hash
FILES = "files"
#: "true": the cache may be written in place, past and present are one buffer; onnxruntime-genai's word
SHARE_BUFFER = "past_present_share_buffer"
#: BLAKE3 of the rest of the model, which has the hashes of its weights: 64 hexadecimal digits
IDENTITY = "identity"
#: most last tokens of a row that a run gives logits for; absent: one token or all
LOGITS = "logits"
#: rotary embedding ``longrope``: most tokens that have the frequencies of short texts
SHORT_CONTEXT = "short_context"
#: a run has the tokens of many requests (``export --paged``)
PAGED_METADATA = "paged"
