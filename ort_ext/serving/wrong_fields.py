"""The words for a request whose fields are not what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: characters of a value in a message at most
_SHOWN = 40
#: what is expected, by pydantic's names of errors
_EXPECTED: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "bool_type": lambda _: "true or false",
    "dict_type": lambda _: "an object",
    "finite_number": lambda _: "a finite number",
    "float_type": lambda _: "a number",
    "greater_than": lambda limits: f"more than {limits['gt']:g}",
    "greater_than_equal": lambda limits: f"at least {limits['ge']}",
    "int_type": lambda _: "a whole number",
    "less_than": lambda limits: f"less than {limits['lt']}",
    "less_than_equal": lambda limits: f"at most {limits['le']:g}",
    "list_type": lambda _: "a list",
    "literal_error": lambda known: _json_words(known["expected"]),
    "model_attributes_type": lambda _: "an object",
    "model_type": lambda _: "an object",
    "none_required": lambda _: "nothing: it is not supported",
    "string_pattern_mismatch": lambda _: "token ids as keys",
    "string_too_short": lambda _: "text that is not empty",
    "string_type": lambda _: "text",
    "string_unicode": lambda _: "text without half of a surrogate pair",
    "too_long": lambda limits: f"at most {limits['max_length']} entries",
    "too_short": lambda _: "a list that is not empty",
    "union_tag_invalid": lambda known: f"one of {_json_words(known['expected_tags'])}",
}


def wrong_field(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str | None]:
    """Return what is wrong with a request, and the name of the field at fault; None: it is the whole body.

    Args:
        errors: of pydantic, with FastAPI's word ``body`` before each place. body: what was sent.
    """
    if errors[0]["type"] == "json_invalid":
        return f"the body is no JSON, from character {errors[0]['loc'][1]} on", None
    first = [error for error in errors if error["loc"][:2] == errors[0]["loc"][:2]]
    of_branches: dict[Any, tuple[tuple[str | int, ...], Mapping[str, Any]]] = {}
    for error in first:  # of each type that the field may have
        place, branch = _place(error, body)
        of_branches.setdefault(branch, (place, error))
    farthest = max(place for place, _ in of_branches.values())
    found = [error for place, error in of_branches.values() if place == farthest]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in farthest).lstrip(".")
    return f"{name or 'the body'} {_words(found)}", name or None


def _place(error: Mapping[str, Any], body: Any) -> tuple[tuple[str | int, ...], tuple[str, ...]]:
    """Return keys and indexes to the value at fault, and pydantic's names of the types between them."""
    *others, last = error["loc"][1:] or (None,)
    place, branch = list[str | int](), list[str]()
    for part in (*others, last):
        there = isinstance(body, dict) and part in body
        if there or (isinstance(part, int) and isinstance(body, list) and part < len(body)):
            place.append(part)
            body = body[part]
        elif part is not None:
            branch.append(str(part))
    if error["type"] == "missing" and last is not None:
        place.append(branch.pop())
    if error["type"] == "string_pattern_mismatch":  # of a key
        place.pop()
    if error["type"].startswith("union_tag"):
        place.append("type")
    return tuple(place), tuple(branch)


def _words(errors: Sequence[Mapping[str, Any]]) -> str:
    kind = errors[0]["type"]
    if kind in ("missing", "union_tag_not_found"):
        return "is missing; add it"
    if kind == "extra_forbidden":
        return "is no known field; leave it out"
    if kind == "value_error":
        return str(errors[0]["ctx"]["error"])
    if isinstance(errors[0]["input"], bytes):
        return "is not read as JSON, expected the header content-type: application/json"
    expected = dict.fromkeys(_EXPECTED[error["type"]](error.get("ctx", {})) for error in errors)
    value = errors[0]["ctx"]["tag"] if kind == "union_tag_invalid" else errors[0]["input"]
    return f"is {_found(value)}, expected {' or '.join(expected)}"


def _found(value: Any) -> str:
    """Return a value as JSON; of a list and an object only what it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    shown = json.dumps(value[:_SHOWN] if isinstance(value, str) else value)
    return shown if len(shown) <= _SHOWN + 2 else f"{shown[:_SHOWN]}.."


def _json_words(literals: str) -> str:
    """Return Python's literals as JSON's."""
    return literals.replace("'", '"').replace("True", "true").replace("False", "false")
