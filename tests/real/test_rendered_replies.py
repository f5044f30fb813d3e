"""Replies as real chat templates render them: parsed, they are the messages that were rendered."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real.test_templates import templates
from support.models.tiny import make_tokenizer

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.chat_template import Template
from quantmoe.exporter.folder.reply_formats import FORMATS, reply_format
from quantmoe.runtime.choosing.constraint import Constraint, Vocabulary
from quantmoe.runtime.choosing.reply_parser import Reply, ReplyParser, parse_reply
from quantmoe.runtime.choosing.required_calls import _around, required_calls

pytestmark = pytest.mark.real

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Gets {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "City"},
                    "days": {"type": "integer"},
                    "parts": {"type": "array", "items": {"type": "string"}},
                    "exact": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    }
    for name in ("get_weather", "get-tide")
]
USER = {"role": "user", "content": "How is it?"}
THOUGHT, SAID = "They ask.\nI look.", "Let me see:\n1 < 2."
CITY = 'Köln "am" {Rhein}\n</x> 12'
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": CITY, "days": 3, "parts": ["sky", "wind"], "exact": True}),
    ("get-tide", {"city": "7"}),
]
#: the families that issue 53 names, and a template of each
FAMILIES = {
    "hermes": ["Qwen3", "llama.cpp Qwen-Qwen3-0.6B", "llama.cpp NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
               "llama.cpp Qwen-Qwen2.5-7B-Instruct", "llama.cpp ibm-granite-granite-4.0"],
    "qwen3_coder": ["llama.cpp Qwen3-Coder", "llama.cpp Qwen3.5-4B",
                    "llama.cpp NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "llama.cpp ByteDance-Seed-OSS"],
    "harmony": ["llama.cpp openai-gpt-oss-120b"],
    "deepseek": ["DeepSeek-V3", "llama.cpp deepseek-ai-DeepSeek-V3.1",
                 "llama.cpp deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"],
    "dsml": ["llama.cpp deepseek-ai-DeepSeek-V3.2", "llama.cpp deepseek-ai-DeepSeek-V4"],
    "glm": ["llama.cpp GLM-4.6", "llama.cpp GLM-4.7-Flash", "llama.cpp poolside-Laguna-XS-2.1"],
    "kimi": ["llama.cpp moonshotai-Kimi-K2"],
    "minimax": ["llama.cpp MiniMax-M2"],
    "mistral": ["llama.cpp Mistral-Small-3.2-24B-Instruct-2506", "llama.cpp mistralai-Mistral-Nemo-Instruct-2407",
                "llama.cpp mistralai-Ministral-3-14B-Reasoning-2512"],
}  # fmt: skip


def message(reasoning: bool, content: bool, calls: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": SAID if content else None if calls else ""}
    if reasoning:
        found["reasoning_content"] = THOUGHT
    if calls:
        found["tool_calls"] = [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(CALLS[:calls])
        ]
    return found


def parts(reply: Reply) -> dict[str, Any]:
    calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
    return {"reasoning": reply.reasoning, "content": reply.content.strip("\n"), "calls": calls}


def reply_of(template: Template, said: dict[str, Any]) -> tuple[str, str] | None:
    """Return a prompt and the reply after it, as the template renders both; None if it refuses the message."""
    try:
        whole = template.render([USER, said], tools=TOOLS, add_generation_prompt=False)
        prompt = template.render([USER], tools=TOOLS)
        before = template.render([USER], tools=TOOLS, add_generation_prompt=False)
    except ModelError:
        return None
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    shared = max(shared - prompt[:shared].endswith("<"), len(before))
    prompt = prompt[:shared]  # the generation prompt, up to where this reply is another one
    for end in ("<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "[e~[", "<seed:eos>", "</assistant>"):
        if end in whole[len(prompt) :]:
            return prompt, whole[len(prompt) :].partition(end)[0]
    return prompt, whole[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trips(family: str, found: Callable[[str], None]) -> None:
    """What a template renders of a message is parsed back to it, cut anywhere."""
    rng = random.Random(0)
    for name in FAMILIES[family]:
        text = templates()[name]
        template, format = Template(text, Path(name), {"bos_token": "<s>", "eos_token": "</s>"}), reply_format(text)
        assert format.name == family, name
        count, called = 0, False
        for reasoning, content, calls in [(r, c, n) for r in (0, 1) for c in (0, 1) for n in (0, 1, 2)]:
            said = message(bool(reasoning), bool(content), calls)
            rendered = reply_of(template, said)
            if rendered is None or not (reasoning or content or calls):
                continue
            prompt, reply = rendered
            wanted = {
                "reasoning": THOUGHT if reasoning and "They ask" in reply else "",
                "content": SAID if content and "Let me" in reply else "",
                "calls": [call for call in CALLS[:calls] if call[0] in reply],
            }
            if family == "harmony" and content and calls:  # its template makes reasoning of it
                wanted |= {"reasoning": SAID, "content": ""}
            called |= bool(wanted["calls"])
            parsed = parse_reply(format, reply, prompt, TOOLS)
            assert parts(parsed) == wanted, (name, said, reply)
            for _ in range(5):
                parser, rest, pieces = ReplyParser(format, prompt, TOOLS), reply, []
                while rest:
                    size = rng.choice((1, 1, 2, 3, 7, 30))
                    pieces += parser.push(rest[:size])
                    rest = rest[size:]
                pieces += parser.end()
                assert parts(parser.reply) == wanted, (name, said, reply)
                assert "".join(piece.content for piece in pieces) == parser.reply.content
            count += 1
        assert count >= 4, name
        assert called, name
        found(f"{name}: {count} replies parsed back ({family})")
    assert {format.name for format in FORMATS} - {""} == FAMILIES.keys()


#: families whose calls are JSON
JSON_CALLS = ("hermes", "harmony", "deepseek", "kimi", "mistral")


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_can_be_required(family: str, found: Callable[[str], None]) -> None:
    """The rule takes a call as the family's templates render it, and nothing else."""
    tokenizer = make_tokenizer().backend_tokenizer
    end = tokenizer.token_to_id("</s>")
    marks = ["<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|tool_call_begin|>", "<|tool_call_end|>"]
    tokenizer.add_special_tokens(marks)
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), [end])
    for name in FAMILIES[family]:
        template = Template(templates()[name], Path(name), {"bos_token": "<s>", "eos_token": "</s>"})
        if family not in JSON_CALLS:
            with pytest.raises(OptionError, match=f"calls in the format {family} cannot be required"):
                required_calls(template, TOOLS, tokenizer, [end])
            continue
        rule = required_calls(template, TOOLS, tokenizer, [end])
        begin, between, after = _around(template, TOOLS, [])
        for tool, arguments in CALLS:
            reply = begin + tool + between + json.dumps(arguments, ensure_ascii=False) + after
            assert parts(parse_reply(template.format, reply, "", TOOLS))["calls"] == [(tool, arguments)]
            tokens = [*tokenizer.encode(reply, add_special_tokens=False).ids, end]
            answer = Constraint(rule, vocabulary, template.format)
            assert answer.valid(tokens) == tokens, (name, reply)
            wrong = tokenizer.encode(reply.replace(tool, "other"), add_special_tokens=False).ids
            assert Constraint(rule, vocabulary, template.format).valid(wrong) != wrong
        found(f"{name}: calls can be required: {begin!r} NAME {between!r} JSON {after!r}")
