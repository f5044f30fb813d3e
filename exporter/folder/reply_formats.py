"""Formats in which model families write reasoning and tool calls. Each format is one row of FORMATS.

A format is recognized by its marks in the chat template, which renders earlier replies with them.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

#: an object that begins with the function's name; its arguments follow
_NAMED = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_SEP = "<｜tool▁sep｜>"


@dataclass(frozen=True)
class ReplyFormat:
    """Regular expressions of what stands around the parts of a reply.

    Spaces around ``open``, ``call`` and ``skip`` belong to them. An expression ends with something that must be there,
    since a reply may be cut anywhere.

    Attributes:
        name: in metadata and errors.
        models: examples, for docs/guides/chat.md.
        marks: texts that the template has.
        call: what begins a call, with the group ``name`` and perhaps ``id``. The arguments follow.
        parameter: what begins an argument, with the groups ``key`` and perhaps ``string``; "": the arguments are JSON.
        value_end: what ends such an argument.
        tail: what may follow the arguments, one after the other.
        again: what begins another call right after a call, beside ``call``.
        open, close: what begins and ends reasoning; "": the family has none.
        skip: marks that are no part of the content.
        answer: what stands before the answer in each reply; "": nothing.
    """

    name: str
    models: str = ""
    marks: tuple[str, ...] = ()
    _: KW_ONLY
    call: str = ""
    parameter: str = ""
    value_end: str = ""
    tail: tuple[str, ...] = ()
    again: str = ""
    open: str = ""
    close: str = ""
    skip: str = ""
    answer: str = ""


FORMATS = (
    ReplyFormat(
        "harmony",
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        call=r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+ to=(?:functions\.)?(?P<name>[\w.-]+)"
        r"| to=(?:functions\.)?(?P<name>[\w.-]+)<\|channel\|>\w+)[^<]*(?:<\|constrain\|>\w+)?<\|message\|>",
        tail=(r"\s*<\|call\|>",),
        open=r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
        close=r"<\|end\|>",
        skip=r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>"
        r"|<\|end\|>|<\|return\|>",
        answer=r"<\|channel\|>final(?: ?<\|constrain\|>\w+)?<\|message\|>",
    ),
    ReplyFormat(
        "dsml",
        "DeepSeek-V3.2, V4",
        ("｜DSML｜", "invoke"),
        call=r'(?:<｜DSML｜\w+_calls>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
        parameter=r'<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<string>true|false)">',
        value_end="</｜DSML｜parameter>",
        tail=(r"\s*</｜DSML｜invoke>", r"\s*</｜DSML｜\w+_calls>"),
    ),
    ReplyFormat(
        "deepseek",
        "DeepSeek-V3, R1, V3.1",
        ("<｜tool▁call▁begin｜>",),
        call=rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function{_SEP})?"
        rf"(?P<name>(?!function{_SEP})[^<\n]+?)(?:{_SEP}|\s*```json)",
        tail=(r"\s*```", r"\s*<｜tool▁call▁end｜>", r"\s*<｜tool▁calls▁end｜>"),
    ),
    ReplyFormat(
        "kimi",
        "Kimi-K2",
        ("<|tool_call_argument_begin|>",),
        call=r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[\w.-]+?):\d+)\s*<\|tool_call_argument_begin\|>",
        tail=(r"\s*<\|tool_call_end\|>", r"\s*<\|tool_calls_section_end\|>"),
    ),
    ReplyFormat(
        "minimax",
        "MiniMax-M2",
        ("<minimax:tool_call>", "<invoke"),
        call=r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
        parameter='<parameter name="(?P<key>[^"]+)">',
        value_end="</parameter>",
        tail=(r"\s*</invoke>", r"\s*</minimax:tool_call>"),
    ),
    ReplyFormat(
        "mistral",
        "Mistral, Magistral, Ministral",
        ("[TOOL_CALLS]",),
        call=rf"\[TOOL_CALLS\](?:\s*\[\s*{_NAMED}|\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\])",
        tail=(r'\s*,\s*"id"\s*:\s*"[^"]*"', r"\s*\}", r"\s*\]"),
        again=rf"\s*,\s*{_NAMED}",
    ),
    ReplyFormat(
        "glm",
        "GLM-4.5 and later, Laguna",
        ("<arg_key>", "<tool_call>"),
        call=r"<tool_call>\s*(?P<name>[^\s<>{]+)\s*(?=<)",
        parameter=r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
        value_end="</arg_value>",
        tail=(r"\s*</tool_call>",),
    ),
    ReplyFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Seed-OSS",
        ("<function=", "<parameter="),
        call=r"(?:<(?:seed:)?tool_call>\s*)?<function=(?P<name>[^>\s]+)>",
        parameter=r"<parameter=(?P<key>[^>]+)>\n?",
        value_end=r"\n?</parameter>",
        tail=(r"\s*</function>", r"\s*</(?:seed:)?tool_call>"),
    ),
    ReplyFormat(
        "hermes",
        "Qwen3, Hermes, Granite 4",
        ("<tool_call>", '"name"', '"arguments"'),
        call=rf"<tool_call>\s*{_NAMED}",
        tail=(r"\s*\}", r"\s*</tool_call>"),
    ),
    ReplyFormat(""),  # content alone, and reasoning
)  # fmt: skip
#: tags of reasoning, which several families share
_THOUGHTS = (("<think>", "</think>"), (r"\[THINK\]", r"\[/THINK\]"), ("<seed:think>", "</seed:think>"))


def reply_format(template: str) -> ReplyFormat:
    """Return the format of the replies to a chat template; content alone if it has no marks of a format."""
    found = next(format for format in FORMATS if all(mark in template for mark in format.marks))
    if found.open:
        return found
    for begin, end in _THOUGHTS:
        if end.replace("\\", "") in template:
            return replace(found, open=begin, close=end)
    return found
