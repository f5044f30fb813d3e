"""Settings of a conversation's answers: from options, until a person types others."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.sampling_options import Sampling, folder_sampling

#: Ollama's names, and those of the options
_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_new_tokens"}
_TOKENS, _STOP = "max_new_tokens", "stop"


class AnswerSettings:
    """Options of answers.

    Args:
        folder: an exported model's, whose generation_config.json has the defaults.
        max_new_tokens: most tokens of an answer; sys.maxsize: no limit. stop: texts that end it.
        sampling: fields of Sampling that were asked for; None where they were not.
        grammar: the Grammar that answers follow; None: they are free.
    """

    def __init__(
        self, folder: Path, max_new_tokens: int, stop: Sequence[str], sampling: Mapping[str, Any], grammar: Any = None
    ):
        self._folder, self._asked, self._grammar = folder, dict(sampling), grammar
        self._most, self._stop = max_new_tokens, [*stop]

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``Chat.reply``."""
        chosen = {"sampling": self._sampling(self._asked), "grammar": self._grammar}
        return {_TOKENS: self._most, _STOP: self._stop, **chosen}

    def follow_json(self, wanted: bool) -> None:
        """Let answers be JSON objects, or free."""
        from quantmoe.runtime.choosing.constraint import Grammar

        self._grammar = Grammar("json_schema", '{"type": "object"}') if wanted else None

    def change(self, name: str, text: str) -> None:
        """Set an option to what a person typed; -1 for max_new_tokens: no limit.

        Raises:
            OptionError: there is no such option, or it has no such value.
        """
        field = _NAMES.get(name, name)
        if field == _STOP and text:
            self._stop = [text]
            return
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if field == _TOKENS and type(value) is int and (value > 0 or value == -1):
            self._most = sys.maxsize if value == -1 else value
        elif field in self._asked:
            asked = self._asked | {field: value}
            self._sampling(asked)
            self._asked = asked
        elif field in (_TOKENS, _STOP):
            expected = "a number of tokens, or -1 for no limit" if field == _TOKENS else "a text"
            raise OptionError(f"{name} is {value!r}, expected {expected}")
        else:
            raise OptionError(f"{name} cannot be set, expected one of: {', '.join(self.names())}")

    def names(self) -> list[str]:
        """Return the options."""
        return [*self._asked, _TOKENS, _STOP]

    def shown(self) -> dict[str, Any]:
        """Return the options and their values, as a person may type them."""
        sampling = self._sampling(self._asked)
        found = {name: getattr(sampling, name) for name in self._asked}
        return found | {_TOKENS: -1 if self._most == sys.maxsize else self._most, _STOP: self._stop}

    def _sampling(self, asked: Mapping[str, Any]) -> Sampling:
        return folder_sampling(self._folder, **asked) or Sampling(temperature=0)  # Chat takes None for the folder's
