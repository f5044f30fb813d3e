"""The tokenizer that a GGUF file's fields describe, with the ids of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: ``tokenizer.ggml.pre`` of vocabularies in which a word that is a token stays whole, and whose texts begin with BOS
#: unless the file says otherwise (llama-vocab.cpp)
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
               "tekken"}  # fmt: skip
#: ``tokenizer.ggml.pre`` of GPT-2's rule for words, which transformers' builder has where it knows no other
PLAIN_WORDS = "gpt-2"
#: kinds of tokens that stay whole in a text: control tokens, which are special, and those of the user
CONTROL, USER_DEFINED = 3, 4


def write_tokenizer(file: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: transformers' tokenizer of the file, with rules of llama.cpp.

    Raises:
        Exception: of any kind, where transformers makes no tokenizer of the fields.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, fields, config = get_gguf_tokenizer(str(file))
    words = fields.get("pre_tokenizer_type")
    if fields["tokenizer_type"] == "gpt2" and words not in {PLAIN_WORDS, *GGUF_PRE_TOKENIZER_SPLITS}:
        raise ValueError(f"tokenizer.ggml.pre is {words!r}, a rule for words that transformers does not have")
    backend, _ = convert_gguf_tokenizer(architecture, fields)
    found = json.loads(backend.to_str())
    # a token of transformers' class that the file does not have
    found["added_tokens"] = [token for token in found["added_tokens"] if token["id"] < len(fields["tokens"])]
    _add_whole_tokens(found, fields["tokens"], fields.get("token_type") or ())
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


def _add_whole_tokens(tokenizer: dict[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Add tokens that stay whole and that transformers leaves out: names with characters that no byte has.

    Args:
        tokenizer: what tokenizer.json will be.
    """
    vocabulary, there = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    made = {"".join(merge) for merge in tokenizer["model"]["merges"]}  # a name that merges need is kept
    names = {id: name for name, id in vocabulary.items() if name not in made}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for id, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and id not in there and id in names and text not in vocabulary:
            del vocabulary[names[id]]
            vocabulary[text] = id
            tokenizer["added_tokens"].append({"id": id, "content": text, "special": kind == CONTROL} | flags)
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
