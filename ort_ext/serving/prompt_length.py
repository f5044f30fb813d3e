"""The length of prompts, which is checked before and after they are tokenized."""

from __future__ import annotations

from typing import Any

from quantmoe.exporter.errors import ContextError
from quantmoe.exporter.folder.token_length import TokenLength


class PromptLength:
    """The most tokens of a prompt.

    Args:
        tokenizer: a tokenizers.Tokenizer. most: tokens of a prompt at most. what: a prompt's name in errors.
        way_out: the end of errors: what to do.
    """

    def __init__(self, tokenizer: Any, most: int, what: str, way_out: str):
        self._tokens, self._most, self._what, self._way_out = TokenLength(tokenizer), most, what, way_out

    def check(self, count: int, least: str = "") -> None:
        """Check a number of tokens.

        Raises:
            ContextError: there are too many.
        """
        if count > self._most:
            raise ContextError(
                f"{self._what} has {least}{count} tokens, expected at most {self._most}: {self._way_out}"
            )

    def check_text(self, text: str) -> None:
        """Check a text that is not tokenized yet.

        Raises:
            ContextError: it has too many tokens, however it is divided.
        """
        self.check(self._tokens.fewest(text), "at least ")
