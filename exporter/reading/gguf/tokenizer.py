"""The tokenizer that a GGUF file's fields describe, with the ids of llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

#: ``tokenizer.ggml.pre`` of vocabularies in which a word that is a token stays whole, and whose texts begin with BOS
#: unless the file says otherwise (llama-vocab.cpp)
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
               "tekken"}  # fmt: skip


def write_tokenizer(file: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: transformers' tokenizer of the file, with rules of llama.cpp.

    Raises:
        Exception: of any kind, where transformers makes no tokenizer of the fields.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, fields, config = get_gguf_tokenizer(str(file))
    backend, _ = convert_gguf_tokenizer(architecture, fields)
    found = json.loads(backend.to_str())
    # a token of transformers' class that the file does not have
    found["added_tokens"] = [token for token in found["added_tokens"] if token["id"] < len(fields["tokens"])]
    if fields["tokenizer_type"] == "llama":  # SentencePiece's: a space before each text, whatever it begins with
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        begun = [{"type": "Prepend", "prepend": "\u2581"}] if fields.get("add_prefix_space", True) else []
        found["normalizer"] = {"type": "Sequence", "normalizers": [*begun, spaces]}
        found["pre_tokenizer"] = None
    elif fields.get("pre_tokenizer_type") in WHOLE_WORDS:
        found["model"]["ignore_merges"] = True
        config.setdefault("add_bos_token", True)
    made = Tokenizer.from_str(json.dumps(found))
    PreTrainedTokenizerFast(tokenizer_object=made, **config).save_pretrained(folder)
