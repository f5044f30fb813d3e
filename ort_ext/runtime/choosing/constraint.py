"""Structured output: answers that follow a JSON schema, a regular expression or a grammar, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import regex

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.reply_formats import ReplyFormat
from quantmoe.runtime.choosing.reply_parser import opens_reasoning
from quantmoe.runtime.choosing.sampling import Choose

#: tokens at the end of a text in which a mark is looked for
_MARK = 32
#: what stands between the parts of JSON: a space, or a line break and an indentation, but no spaces without end
SPACE = r" |\n[ \t]{0,20}"


class RuleError(ModelError):
    """A rule that llguidance cannot follow."""


@dataclass(frozen=True)
class Grammar:
    """A rule that an answer follows.

    Attributes:
        kind: what ``text`` is.
        text: a JSON schema; a regular expression in Rust's syntax; or a grammar in Lark's or llama.cpp's syntax. A
            grammar begins with its rule ``start`` or ``root``.
        calls: it is a rule of tool calls, which stand in the place of the answer.

    Raises:
        OptionError: the text is no such rule, or llguidance does not take it.
    """

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    calls: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "grammar"):
            raise OptionError(f"kind is {self.kind!r}, expected one of: json_schema, regex, grammar")
        if not isinstance(self.text, str):
            raise OptionError(f"text is {self.text!r}, expected text")
        if error := _matcher().validate_grammar(self.compiled()):
            raise OptionError(f"the {self._name} is refused: {error.strip()}")

    @property
    def _name(self) -> str:
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.kind, self.kind)

    def compiled(self) -> str:
        """Return the rule as llguidance takes it.

        Raises:
            OptionError: it is no JSON, or no grammar.
        """
        from llguidance import grammar_from
        from llguidance.gbnf_to_lark import GbnfToLarkError

        try:
            if self.kind != "json_schema":
                return grammar_from(self.kind, self.text)
            says = "x-guidance" in self.text  # llguidance's own options
            return str(_matcher().grammar_from_json_schema(self.text, None if says else {"whitespace_pattern": SPACE}))
        except (ValueError, GbnfToLarkError) as error:
            raise OptionError(f"the {self._name} is refused: {error}") from None


class Vocabulary:
    """The texts of a model's tokens, as llguidance takes them.

    Args:
        tokenizer: a tokenizers.Tokenizer.
        size: tokens that have logits; a tokenizer may have more.
        stop: ids that end an answer.

    Raises:
        OptionError: no token ends an answer, so a grammar cannot.
    """

    def __init__(self, tokenizer: Any, size: int, stop: Sequence[int]):
        from llguidance import LLTokenizer

        if not stop:
            raise OptionError("a grammar needs a token that ends the answer, and the folder names none (eos_token_id)")
        self.tokenizer, self.size, self.stop = tokenizer, size, frozenset(stop)
        self.tokens = max(size, tokenizer.get_vocab_size())
        self.guide = LLTokenizer(tokenizer.to_str(), n_vocab=self.tokens, eos_token=[*stop])


class Constraint:
    """Tokens that may come next in one answer. It serves one generation.

    Reasoning and a channel before the answer are free. So the rule begins after ``</think>``, or with gpt-oss in the
    channel ``final``.

    Args:
        grammar: the rule.
        vocabulary: of the model.
        format: of the reply.
        prompt: the text before the reply.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, format: ReplyFormat, prompt: str = ""):
        self._matcher = _matcher()(vocabulary.guide, grammar.compiled(), log_level=0)
        self._check()
        self._vocabulary = vocabulary
        self._words = np.zeros(-(-vocabulary.tokens // 32), np.uint32)
        self._tail: list[int] = []
        #: what ends the part that is free; "": the rule holds
        self._free = ("" if grammar.calls else format.answer) or (
            format.close if opens_reasoning(format, prompt) else ""
        )
        self._close = format.close
        # a token that may begin reasoning, in the place of the answer's first one
        tokenizer = vocabulary.tokenizer
        self._opens = None if self._free or not format.open else tokenizer.token_to_id(format.open.replace("\\", ""))

    def allowed(self) -> np.ndarray | None:
        """Return bits uint32 [ceil(vocabulary / 32)] of the tokens that may come next; None: all may.

        Raises:
            RuleError: the rule is too complex for llguidance.
        """
        if self._free:
            return None
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        if self._opens is not None:
            self._words[self._opens // 32] |= np.uint32(1 << self._opens % 32)
        return self._words[: -(-self._vocabulary.size // 32)]

    def add(self, token: int) -> None:
        """Go on after a token that was chosen.

        Raises:
            RuleError: it does not follow the rule.
        """
        if not self._free and self._opens != token:
            self._opens = None
            self._matcher.consume_token(token)
            return self._check()
        if not self._free:
            self._free, self._opens = self._close, None
            return None
        self._tail = [*self._tail[1 - _MARK :], token]
        if regex.search(self._free, self._vocabulary.tokenizer.decode(self._tail, skip_special_tokens=False)):
            self._free = ""
        return None

    def valid(self, drafts: Sequence[int]) -> list[int]:
        """Return the first of these draft tokens, as many as follow the rule."""
        return [*drafts] if self._free else [*drafts[: self._matcher.validate_tokens([*drafts])]]

    def sampler(self, sample: Choose) -> Choose:
        """Return what chooses among the tokens that may come next, and goes on after them."""

        masked = np.empty(0, np.float32)

        def choose(logits: np.ndarray) -> int:
            nonlocal masked
            if (words := self.allowed()) is not None:
                bits = np.unpackbits(words.view(np.uint8), count=len(logits), bitorder="little").view(bool)
                if masked.shape != logits.shape:
                    masked = np.empty(logits.shape, np.float32)
                masked.fill(-np.inf)
                np.copyto(masked, logits, where=bits)
            token = sample(logits if words is None else masked)
            self.add(token)
            return token

        return choose

    def _check(self) -> None:
        if self._matcher.is_error():
            words = self._matcher.get_error().partition("\n<state>")[0]  # without llguidance's own data
            raise RuleError(f"an answer cannot follow its rule: {words}; give a simpler rule")


@cache
def _matcher() -> Any:
    from llguidance import LLMatcher

    return LLMatcher
