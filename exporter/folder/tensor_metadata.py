"""Keys of the metadata of a model's weights. ``make docs`` makes a table of the comments.

``inspect`` and ``unpack`` read them. Programs that run a model need none of them.
"""

#: modules of the checkpoint that the weight is from, with commas between
MODULE = "module"
#: the checkpoint's format
FORMAT = "format"
#: what the bytes were, if the weight was dequantized, and why it was
DEQUANTIZED_FROM, DEQUANTIZED_BECAUSE = "dequantized_from", "dequantized_because"
#: attributes of the node that the weight was packed for: a JSON object
SPEC = "spec"
#: the packed layout and its version
LAYOUT, LAYOUT_VERSION = "layout", "layout_version"
#: only with `--target ort`: type of the checkpoint's scales
SCALE_TYPE = "scale_type"
#: names of the last experts, which all tokens use: a JSON list
SHARED = "shared"
#: the experts that this rank has, and how many there are: a JSON object
EXPERTS = "experts"
#: output rows of each module in a joined linear: a JSON object
ROWS = "rows"
#: number of heads; all gates stand before the queries, which the checkpoint has in turn for each head
GATED_HEADS = "gated_heads"
#: BLAKE3 of the bytes
HASH = "hash"
