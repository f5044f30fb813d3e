"""Reasoning, content and tool calls of a reply, as its text comes.

No library does this at run time. openai-harmony knows one family, and fetches its vocabulary from the network.
transformers' ResponseParser needs transformers, and a template that no checkpoint of these families has. The parsers of
vLLM and SGLang are parts of their servers.
"""

from __future__ import annotations

import ast
import json
import random
import string
from collections.abc import Generator as Generation
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import regex

from quantmoe.exporter.folder.reply_formats import ReplyFormat

#: letters of an id of a call: Mistral's templates take 9 of these
_LETTERS, _ID = string.ascii_letters + string.digits, 9


@dataclass(frozen=True, kw_only=True)
class Delta:
    """More of a reply: of its reasoning, its content, or its call number ``call``.

    The first delta of a call has its ``id`` and ``name``. ``arguments`` of all its deltas are one JSON text.
    """

    reasoning: str = ""
    content: str = ""
    call: int | None = None
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Call:
    """A function that the model calls; ``arguments`` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """The parts of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """Return the message that chat templates take."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return found


class ReplyParser:
    """Divides the text of a reply into its parts. Pieces may be cut anywhere, and give the parts of the whole text.

    Text that may be the begin of a mark is held until more comes.

    Args:
        format: of the reply.
        prompt: the text before the reply, whose end may open reasoning.
        tools: what the template was given. Schemas say which arguments are texts where a format does not.

    Attributes:
        reply: the parts so far.
    """

    def __init__(self, format: ReplyFormat, prompt: str = "", tools: Sequence[Mapping[str, Any]] | None = None):
        self.reply = Reply()
        self._format, self._types = format, _types(tools or ())
        self._text, self._ended = "", False
        self._deltas: list[Delta] = []
        self._steps = self._read(opens_reasoning(format, prompt))

    def push(self, text: str) -> list[Delta]:
        """Return what one more piece of text gives."""
        self._text += text
        next(self._steps, None)
        found, self._deltas = self._deltas, []
        return found

    def end(self) -> list[Delta]:
        """Return what was held, after the last piece."""
        self._ended = True
        return self.push("")

    def _read(self, reasoning: bool) -> Generation[None, None, None]:
        own = self._format
        marks = {"open": own.open, "call": own.call, "skip": own.skip}
        pattern = "|".join(f"(?P<{name}_>{mark})" for name, mark in marks.items() if mark)
        if own.close and not reasoning:  # of a model that leaves out the begin
            yield from self._match(rf"\s*(?:{own.close})\s*")
        while True:
            if reasoning:
                yield from self._match(r"\s+")
                found = yield from self._until(rf"\s*(?:{own.close})\s*", "reasoning")
            elif pattern:
                found = yield from self._until(rf"\s*(?:{pattern})\s*", "content")
            else:
                found = yield from self._until(r"(?!)", "content")
            if found is None:
                return
            groups = found.groupdict()
            reasoning = groups.get("open_") is not None
            call = found if groups.get("call_") is not None else None
            while call is not None:
                yield from self._call(call)
                call = (yield from self._match(own.again)) if own.again else None
                yield from self._match(r"\s+")

    def _call(self, found: Any) -> Generation[None, None, None]:
        """Read a call whose begin was found, and what follows its arguments."""
        groups, own = found.groupdict(), self._format
        made = "".join(random.choices(_LETTERS, k=_ID))
        call = Call(groups.get("id") or made, groups["name"].strip())
        self.reply.calls.append(call)
        self._deltas.append(Delta(call=len(self.reply.calls) - 1, id=call.id, name=call.name))
        yield from self._parameters(call) if own.parameter else self._json(call)
        for tail in own.tail:
            yield from self._match(tail)

    def _json(self, call: Call) -> Generation[None, None, None]:
        """Read one JSON value, to the brace that ends it."""
        depth, quoted, escaped = 0, False, False
        while True:
            for at, character in enumerate(self._text):
                if quoted:
                    quoted, escaped = escaped or character != '"', not escaped and character == "\\"
                elif character == '"':
                    quoted = True
                else:
                    depth += (character in "{[") - (character in "}]")
                    if depth <= 0:
                        if character in "}]":
                            self._argue(call, self._take(at + 1))
                        return
            self._argue(call, self._take(len(self._text)))
            if self._ended:
                return
            yield

    def _parameters(self, call: Call) -> Generation[None, None, None]:
        """Read arguments that stand in tags, as a JSON object."""
        own, types, between = self._format, self._types.get(call.name, {}), "{"
        while (found := (yield from self._match(rf"\s*{own.parameter}"))) is not None:
            key, says = found["key"].strip(), found.groupdict().get("string")
            text = says == "true" or (says is None and types.get(key) == {"string"})
            self._argue(call, f"{between}{_json(key)}: " + '"' * text)
            pieces: list[str] = []
            yield from self._until(own.value_end, (lambda piece: self._argue(call, _json(piece)[1:-1])) if text
                                   else pieces.append)  # fmt: skip
            value = _value("".join(pieces), types.get(key, set()))
            self._argue(call, '"' if text else _json(value))
            between = ", "
        self._argue(call, "}" if between == ", " else "{}")

    def _argue(self, call: Call, text: str) -> None:
        if text:
            call.arguments += text
            self._deltas.append(Delta(call=len(self.reply.calls) - 1, arguments=text))

    def _say(self, part: str, text: str) -> None:
        if text:
            setattr(self.reply, part, getattr(self.reply, part) + text)
            self._deltas.append(Delta(reasoning=text) if part == "reasoning" else Delta(content=text))

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    def _until(self, pattern: str, part: Any) -> Generation[None, None, Any]:
        """Give text to a part until a pattern comes; return the match, None at the end of the reply."""
        give = part if callable(part) else lambda text: self._say(part, text)
        while True:
            found = _compiled(pattern).search(self._text, partial=not self._ended)
            whole = found is not None and not found.partial and (self._ended or found.end() < len(self._text))
            if text := self._take(len(self._text) if found is None else found.start()):
                give(text)
            if whole:
                self._take(found.end() - found.start())
                return found
            if self._ended:
                return None
            yield

    def _match(self, pattern: str) -> Generation[None, None, Any]:
        """Take a pattern off the begin of the text; return the match, None if other text is there."""
        while True:
            found = _compiled(pattern).match(self._text, partial=not self._ended)
            if found is None or self._ended or (not found.partial and found.end() < len(self._text)):
                if found is not None:
                    self._take(found.end())
                return found
            yield


def opens_reasoning(format: ReplyFormat, prompt: str) -> bool:
    """Return whether a prompt ends with the begin of reasoning."""
    return bool(format.open) and _compiled(rf"(?:{format.open})\s*$").search(prompt[-256:]) is not None


def parse_reply(
    format: ReplyFormat, text: str, prompt: str = "", tools: Sequence[Mapping[str, Any]] | None = None
) -> Reply:
    """Return the parts of a whole reply."""
    parser = ReplyParser(format, prompt, tools)
    parser.push(text)
    parser.end()
    return parser.reply


@cache
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _types(tools: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, set[str]]]:
    """Return the types of the parameters of each function."""
    found: dict[str, dict[str, set[str]]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        found[function.get("name", "")] = {key: _schema_types(schema) for key, schema in properties.items()}
    return found


def _schema_types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    said = schema.get("type", [])
    found = {said} if isinstance(said, str) else set(said)
    for other in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _schema_types(other)
    return found


def _value(text: str, types: set[str]) -> Any:
    """Return the value of an argument whose text stands in a tag, and which may have these types.

    Some templates write values as Python does.
    """
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        return text if "string" in types and isinstance(value, str | int | float) else value
    return text
