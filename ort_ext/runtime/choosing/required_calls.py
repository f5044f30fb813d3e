"""A rule for answers that must call a function: its text is what the chat template renders of a call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.chat_template import Template
from quantmoe.runtime.choosing.constraint import SPACE, Grammar

#: the call that is rendered
NAME, ARGUMENTS = "name_of_the_function", {"argument": "value"}


def required_calls(
    template: Template, tools: Sequence[Mapping[str, Any]], tokenizer: Any, stop: Sequence[int]
) -> Grammar:
    """Return the rule of an answer that calls one of these functions.

    Args:
        tokenizer: a tokenizers.Tokenizer, whose special tokens a grammar names by their ids.
        stop: ids that end an answer.

    Raises:
        OptionError: the template's calls are not JSON with a text before and after it.
        ModelError: the template refuses a call.
    """
    ends = [tokenizer.id_to_token(id) for id in stop]
    begin, between, after = _around(template, [*tools], ends)
    special = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def literal(text: str) -> str:
        pieces = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return " ".join(f"<[{special[piece]}]>" if piece in special else json.dumps(piece) for piece in pieces if piece)

    lines = ["start: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = {"type": "object"} | (function.get("parameters") or {})
        schema = {"x-guidance": {"whitespace_pattern": SPACE}} | schema
        lines += [
            f"call_{i}: {literal(begin + function['name'] + between)} arguments_{i} {literal(after)}".rstrip(),
            f"arguments_{i}: %json {json.dumps(schema)}",
        ]
    return Grammar("grammar", "\n".join(lines), calls=True)


def _around(template: Template, tools: list[Mapping[str, Any]], ends: Sequence[str]) -> tuple[str, str, str]:
    """Return what stands before the name of a call, between the name and the arguments, and after these."""
    format = template.format
    user = {"role": "user", "content": ""}
    call = {"id": "call12345", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in ARGUMENTS}}
    tools = [*tools, {"type": "function", "function": {"name": NAME, "description": "", "parameters": parameters}}]
    prompt = template.render([user], tools=tools)
    whole = template.render([user, said], tools=tools, add_generation_prompt=False)
    for found in regex.finditer(format.call, whole) if format.call and not format.parameter else ():
        if found["name"] != NAME:
            continue
        at = len(whole) - len(whole[found.end() :].lstrip())
        try:
            arguments, end = json.JSONDecoder().raw_decode(whole, at)
        except ValueError:
            continue
        if arguments != ARGUMENTS:
            continue
        first = max(found.start(), len(prompt) if whole.startswith(prompt) else 0)
        rest = end
        for tail in format.tail:
            if (more := regex.compile(tail).match(whole, rest)) is not None:
                rest = more.end()
        after = whole[end:rest]
        for mark in ends:  # the end of the answer, which a grammar adds itself
            after = after.removesuffix(mark)
        return whole[first : found.start("name")], whole[found.end("name") : at], after
    name = f"in the format {format.name}" if format.name else "of this chat template"
    raise OptionError(f"tool_choice asks for a call, and calls {name} cannot be required; expected auto or none")
