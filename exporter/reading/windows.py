"""Texts as windows of tokens, for what measures or calibrates a model."""

from __future__ import annotations

from pathlib import Path

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.tokenizer import load_tokenizer

#: tokens of a window, llama-perplexity's
WINDOW = 512


def windows_of(folder: Path, text: str, window: int) -> list[list[int]]:
    """Return a text's windows: all of one length, or the whole text where it is shorter.

    Each begins with the tokens that the tokenizer of ``folder`` puts in front of a text.

    Raises:
        ModelError: there is no tokenizer; the text has fewer than two tokens.
    """
    tokenizer = load_tokenizer(folder)
    first = tokenizer.encode("", add_special_tokens=True).ids
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    size = min(window - len(first), len(ids))
    if size < 1 or len(first) + size < 2:
        raise ModelError(f"the text has {len(ids)} tokens, expected at least 2 in a window of {window}")
    return [[*first, *ids[at : at + size]] for at in range(0, len(ids) - size + 1, size)]
