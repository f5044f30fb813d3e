"""Replies of each format: reasoning, content and calls, cut anywhere. tests/real renders them by real templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantmoe.exporter.commands.terminal_conversation import DIM, PLAIN, shown
from quantmoe.exporter.folder.chat_template import Template, folder_turns
from quantmoe.exporter.folder.reply_formats import FORMATS, reply_format
from quantmoe.runtime.choosing.reply_parser import Reply, ReplyParser, parse_reply

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wheel",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "count": {"type": ["integer", "null"]}, "any": {}},
            },
        },
    }
]
THINKS = "<think></think>"
#: name, texts of the template, the end of a prompt, a reply, and its parts
REPLIES: list[tuple[str, str, str, str, tuple[str, str, list[tuple[str, Any]]]]] = [
    ("", "", "", " plain <think> text\n", ("", " plain <think> text\n", [])),
    ("", THINKS, "<think>\n", "why\n</think>\n\nbecause\n", ("why", "because\n", [])),
    ("", THINKS, "", "<think>why</think> <think> more", ("whymore", "", [])),
    ("", THINKS, "<think>\n\n</think>\n\n", "said </think> on", ("", "said </think> on", [])),
    ("", "[THINK][/THINK]", "[INST]", "[THINK]why[/THINK]because", ("why", "because", [])),
    (
        "hermes",
        '<tool_call>{"name" "arguments"' + THINKS,
        "<think>\n",
        'a </tool_call> b\n</think>\n\nI call.\n<tool_call>\n{"name": "wheel", '
        '"arguments": {"text": '
        '"</tool_call> \\"}", "count": [1, {"a": "]"}]}}\n</tool_call>\n'
        '<tool_call>{"name":"no","arguments":{}}</tool_call>\nDone.',
        (
            "a </tool_call> b",
            "I call.Done.",
            [("wheel", {"text": '</tool_call> "}', "count": [1, {"a": "]"}]}), ("no", {})],
        ),
    ),
    (
        "hermes",
        '<tool_call>{"name" "arguments"',
        "",
        '<tool_call> nothing {"name": 5}</tool_call>',
        ("", '<tool_call> nothing {"name": 5}</tool_call>', []),
    ),
    ("hermes", '<tool_call>{"name" "arguments"', "", "a <tool_call>\n{", ("", "a <tool_call>\n{", [])),
    (
        "qwen3_coder",
        "<function= <parameter=",
        "",
        "<tool_call>\n<function=wheel>\n<parameter=text>\n12\n\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
        "<parameter=any>\n{'a': True}\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("wheel", {"text": "12\n", "count": 12, "any": {"a": True}})]),
    ),
    (
        "glm",
        "<tool_call><arg_key>" + THINKS,
        "<think>",
        "</think><tool_call>wheel<arg_key>text</arg_key><arg_value>\"a\"\n</arg_value><arg_key>count</arg_key>"
        "<arg_value>None</arg_value></tool_call><tool_call>no</tool_call>",
        ("", "", [("wheel", {"text": '"a"\n', "count": None}), ("no", {})]),
    ),
    (
        "minimax",
        "<minimax:tool_call><invoke" + THINKS,
        "",
        '<think>w</think>c\n<minimax:tool_call>\n<invoke name="wheel">\n<parameter name="text">a "b"</parameter>\n'
        '</invoke>\n<invoke name="no">\n</invoke>\n</minimax:tool_call>',
        ("w", "c", [("wheel", {"text": 'a "b"'}), ("no", {})]),
    ),
    (
        "dsml",
        "｜DSML｜ invoke",
        "",
        'c\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="new">\n<｜DSML｜parameter name="a" string="true">7'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        ("", "c", [("new", {"a": "7", "b": 7})]),
    ),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>",
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>wheel"
        '\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>no<｜tool▁sep｜>{"b": "```"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("", "", [("wheel", {"a": 1}), ("no", {"b": "```"})]),
    ),
    (
        "kimi",
        "<|tool_call_argument_begin|>",
        "",
        'c<|tool_calls_section_begin|><|tool_call_begin|>functions.wheel:0<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        ("", "c", [("wheel", {"a": 1})]),
    ),
    (
        "mistral",
        "[TOOL_CALLS]",
        "",
        '[TOOL_CALLS] [{"name": "wheel", "arguments": {"a": 1}, "id": "123456789"}, {"name": "no", "arguments": {}}]',
        ("", "", [("wheel", {"a": 1}), ("no", {})]),
    ),
    (
        "mistral",
        "[TOOL_CALLS]",
        "",
        'c[TOOL_CALLS]wheel[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]no[ARGS]{}',
        ("", "c", [("wheel", {"a": 1}), ("no", {})]),
    ),
    (
        "harmony",
        "<|channel|><|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>why <|end|><|start|>assistant<|channel|>commentary<|message|>I call.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.wheel <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("why", "I call.", [("wheel", {"a": 1})]),
    ),
    (
        "harmony",
        "<|channel|><|message|>",
        "<|start|>assistant",
        ' to=functions.wheel<|channel|>commentary json<|message|>{"a": 1}',
        ("", "", [("wheel", {"a": 1})]),
    ),
    (
        "harmony",
        "<|channel|><|message|>",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        ("a", "b", []),
    ),
]  # fmt: skip


def parts(reply: Reply) -> tuple[str, str, list[tuple[str, Any]]]:
    return reply.reasoning, reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize(("name", "template", "prompt", "reply", "wanted"), REPLIES)
def test_parts(name: str, template: str, prompt: str, reply: str, wanted: Any) -> None:
    format = reply_format(template)
    assert format.name == name
    assert parts(parse_reply(format, reply, prompt, TOOLS)) == wanted


@given(st.sampled_from(REPLIES), st.data())
def test_pieces_give_the_same_parts(row: Any, data: st.DataObject) -> None:
    _, template, prompt, text, wanted = row
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parser = ReplyParser(reply_format(template), prompt, TOOLS)
    deltas = [
        delta for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for delta in parser.push(text[a:b])
    ] + parser.end()
    assert parts(parser.reply) == wanted
    assert "".join(delta.reasoning for delta in deltas) == wanted[0]
    assert "".join(delta.content for delta in deltas) == wanted[1]
    for number, call in enumerate(parser.reply.calls):
        own = [delta for delta in deltas if delta.call == number]
        assert [(own[0].id, own[0].name)] == [(d.id, d.name) for d in own if d.name] == [(call.id, call.name)]
        assert "".join(delta.arguments for delta in own) == call.arguments


@given(st.sampled_from(REPLIES), st.data())
def test_what_was_said_stays(row: Any, data: st.DataObject) -> None:
    """A reply may end anywhere. The parts before the cut are a begin of the whole reply's."""
    _, template, prompt, text, (reasoning, content, calls) = row
    parser = ReplyParser(reply_format(template), prompt, TOOLS)
    parser.push(text[: data.draw(st.integers(0, len(text)))])
    reply = parser.reply
    assert reasoning.startswith(reply.reasoning)
    assert content.startswith(reply.content)
    assert [call.name for call in reply.calls] == [name for name, _ in calls[: len(reply.calls)]]
    before = len(reply.content)
    parser.end()
    assert reply.content[before:] in text


@pytest.mark.parametrize("name", [format.name for format in FORMATS])
def test_each_format_has_a_reply_here(name: str) -> None:
    assert any(row[0] == name for row in REPLIES)


def test_a_message_is_what_templates_take() -> None:
    row = next(row for row in REPLIES if row[0] == "kimi")
    message = parse_reply(reply_format(row[1]), row[3]).message()
    assert message == {
        "role": "assistant",
        "content": "c",
        "tool_calls": [
            {"id": "functions.wheel:0", "type": "function", "function": {"name": "wheel", "arguments": '{"a": 1}'}}
        ],
    }
    ids = {parse_reply(reply_format(r[1]), r[3]).calls[0].id for r in REPLIES if r[0] == "glm"}
    assert all(len(id) == 9 and id.isalnum() for id in ids)  # as Mistral's templates want them


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a + 1 if m.tool_calls }}{% endfor %}",
        "{% for m in messages %}{{ '<' + m.tool_calls[0].function.arguments if m.tool_calls }}{% endfor %}",
        "{% for m in messages %}{{ 'a' in m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content is not none %}{{ 'a' + m.content }}{% endif %}{% endfor %}",
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_calls_are_rendered_in_the_form_that_a_template_takes(template: str, arguments: Any) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert Template(template, Path("t"), {}).render([{"role": "user", "content": ""}, call])


@pytest.mark.parametrize("plain", [True, False])
def test_a_folder_says_its_format(plain: bool, tmp_path: Path) -> None:
    """Also where a program without Jinja cannot put the conversation together."""
    text = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}{% endfor %}" + (
        "" if plain else "{{ messages | length }}"
    )
    for mark, name in ("{# [TOOL_CALLS] #}", "mistral"), ("", None):
        (tmp_path / "chat_template.jinja").write_text(text + mark, encoding="utf-8")
        turns, reason = folder_turns(tmp_path)
        assert turns.get("chat.format") == name
        assert ("chat.begin" in turns, bool(reason)) == (plain, not plain)


def test_a_terminal_shows_the_parts() -> None:
    """Reasoning is dim, calls are lines, and marks are left out."""
    row = next(row for row in REPLIES if row[0] == "hermes")
    parser = ReplyParser(reply_format(row[1]), row[2], TOOLS)
    text = "".join(shown([*parser.push(row[3]), *parser.end()]))
    call = '{"text": "</tool_call> \\"}", "count": [1, {"a": "]"}]}'
    assert text == f"{DIM}a </tool_call> b{PLAIN}\n\nI call.\n\nwheel {call}\n\nno {{}}\n\nDone."
