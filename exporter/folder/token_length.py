"""The least number of tokens of a text, so that a text that is much too long is refused before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

#: pre-tokenizers that divide a text, and leave all of it
_DIVIDE = {"ByteLevel", "Digits", "Metaspace", "Split"}
#: bytes of a character in UTF-8 at most
_CHARACTER = 4


class TokenLength:
    """The text that one token may cover.

    A text is divided into tokens without a rest, so it has at least its length divided by the longest token's. That
    holds for a BPE whose normalizer and pre-tokenizer drop nothing, and which has a token for each byte or for each
    unknown character. Of another tokenizer nothing is known: one token may cover a whole text.

    Args:
        tokenizer: a tokenizers.Tokenizer.

    Attributes:
        bytes: of the longest token; None: nothing is known.
    """

    def __init__(self, tokenizer: Any):
        from tokenizers.models import BPE

        model, added = tokenizer.model, tokenizer.get_added_tokens_decoder().values()
        normalizers, dividers = [*_steps(tokenizer.normalizer)], [*_steps(tokenizer.pre_tokenizer)]
        in_bytes = any(step["type"] == "ByteLevel" for step in dividers)
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._composes = any(step["type"] == "NFC" for step in normalizers)
        self.bytes: int | None = None
        if (
            isinstance(model, BPE)
            and all(map(_keeps_length, normalizers))
            and all(step["type"] in _DIVIDE and step.get("behavior") != "Removed" for step in dividers)
            and not any(token.lstrip or token.rstrip for token in added)  # these take spaces without an end
            and _covers_all(model, vocabulary, in_bytes)
        ):
            own = (len(token) if in_bytes else len(token.encode()) for token in vocabulary)
            self.bytes = max(_CHARACTER, *own, *(len(token.content.encode()) for token in added))

    def fewest(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        if self.bytes is None:
            return 0
        # NFC makes two bytes of at most three characters, as of U with two accents, U+01D5
        size = len(text) * 2 // 3 if self._composes else len(text.encode(errors="surrogatepass"))
        return -(-size // self.bytes)


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the fields of the steps of a normalizer or of a pre-tokenizer."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    inner = step.get("normalizers", step.get("pretokenizers"))
    return [step] if inner is None else [found for one in inner for found in _flat(one)]


def _keeps_length(step: Mapping[str, Any]) -> bool:
    """Return whether a normalizer composes characters, or makes no text shorter."""
    if step["type"] == "Replace":
        before, after = step["pattern"].get("String"), step["content"]
        return before is not None and len(after) >= len(before) and len(after.encode()) >= len(before.encode())
    return step["type"] in ("NFC", "Prepend")


def _covers_all(model: Any, vocabulary: Container[str], in_bytes: bool) -> bool:
    """Return whether each byte, or each unknown character, has a token of its own."""
    from tokenizers.pre_tokenizers import ByteLevel

    if in_bytes:
        return all(symbol in vocabulary for symbol in ByteLevel.alphabet())
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return model.unk_token in vocabulary and not model.fuse_unk
