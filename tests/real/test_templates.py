"""Chat templates of real models: rendered as transformers does, and as the texts `chat.*` of an export's metadata."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from real.fetch import llama_cpp
from real.vocabularies import PACKAGES, package
from support.models.published import PUBLISHED
from support.models.tiny import make_tokenizer

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.chat_template import Template, folder_turns
from quantmoe.exporter.folder.json_files import read_object

pytestmark = pytest.mark.real


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return {"type": "function", "function": {"name": name, "description": f"Gets {name}.", "parameters": parameters}}


TOOLS = [
    function("get_weather", city={"type": "string", "description": "City, e.g. “Köln”"}, days={"type": "integer"}),
    function("now", zone={"type": "string", "enum": ["UTC", "CET"]}),
]
USER = {"role": "user", "content": "Was kostet ein Ei?\nIn <b>Euro</b> & 日本円."}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Thirty cents, or ¥50."}
AGAIN = {"role": "user", "content": "And two?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": '{"sky": "clear"}'}
#: that a program without Jinja puts together
PLAIN = ([USER], [SYSTEM, USER], [USER, ANSWER, AGAIN], [SYSTEM, USER, ANSWER, AGAIN, ANSWER, USER])
CONVERSATIONS = [
    *PLAIN,
    [USER, ANSWER | {"reasoning_content": "An egg.\nCheap."}, AGAIN],
    [USER, ANSWER | {"reasoning": "An egg."}],
    [USER, ANSWER | {"content": "<think>\nAn egg.\n</think>\n\nThirty cents."}, AGAIN],
    [USER, CALL, RESULT],
    [SYSTEM, USER, CALL | {"content": None}, RESULT, ANSWER, AGAIN],
    [USER, CALL | {"reasoning_content": "The weather?"}, RESULT, RESULT | {"content": "rain"}],
    [{"role": "developer", "content": "Be kind."}, USER],
    [{"role": "user", "content": " spaces \n"}],
    [{"role": "user", "content": [{"type": "text", "text": "A part."}, {"type": "text", "text": "Another."}]}],
    [ANSWER, USER],
]  # fmt: skip
VARIABLES: list[dict[str, Any]] = [{}, {"enable_thinking": True}, {"enable_thinking": False}]
#: model types -> the beginning of their templates' names; a package has no template of other types
TYPES = {
    "qwen3_moe": "Qwen3",
    "qwen3_next": "llama.cpp Qwen3.5",
    "qwen3_5_moe_text": "llama.cpp Qwen3.5",
    "gpt_oss": "llama.cpp openai-gpt-oss",
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe": "llama.cpp GLM-4.6",
    "glm4_moe_lite": "llama.cpp GLM-4.7-Flash",
    "lfm2_moe": "llama.cpp LFM2-8B-A1B",
    "gemma4_text": "llama.cpp google-gemma-4",
    "granitemoe": "llama.cpp ibm-granite-granite-3",
    "granitemoehybrid": "llama.cpp ibm-granite-granite-4.0",
    "hy_v3": "llama.cpp tencent-Hy3",
    "minimax_m2": "llama.cpp MiniMax-M2",
    "nemotron_h": "llama.cpp NVIDIA-Nemotron-3-Nano",
    "cohere2_moe": "llama.cpp Cohere2MoE",
    "solar_open": "llama.cpp upstage-Solar-Open",
    "laguna": "llama.cpp poolside-Laguna",
}


@cache
def templates() -> dict[str, str]:
    """Return the templates by their names."""
    found = {name: read_object(package(name) / "tokenizer_config.json").get("chat_template") for name in PACKAGES}
    files = sorted((llama_cpp() / "models/templates").glob("*.jinja"))
    return {name: text for name, text in found.items() if text} | {
        f"llama.cpp {path.stem}": path.read_text(encoding="utf-8") for path in files
    }


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


def expected(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What transformers renders, None where the template refuses or fails."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
    except Exception:
        return None


def rendered(template: Template, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(messages, **options)
    except ModelError:
        return None


def test_templates_are_rendered_as_transformers_does(tokenizer: Any, found: Callable[[str], None]) -> None:
    count, refused = 0, 0
    for name, text in templates().items():
        template = Template(text, Path(name), tokenizer.special_tokens_map)
        tokenizer.chat_template = text
        for messages, tools, variables in product(CONVERSATIONS, (None, TOOLS), VARIABLES):
            wanted = expected(tokenizer, messages, tools=tools, **variables)
            text_here = rendered(template, messages, tools=tools, **variables)
            if wanted is not None or not any(m.get("tool_calls") for m in messages):  # a form that the template takes
                assert text_here == wanted, (name, messages, tools, variables)
            count, refused = count + 1, refused + (wanted is None)
    found(f"{len(templates())} templates, {count} conversations rendered, 0 differ; {refused} are refused by both")
    assert refused < count / 2


def test_types_without_a_template_are_listed(found: Callable[[str], None]) -> None:
    types = dict.fromkeys(name.split()[0] for name in PUBLISHED)
    assert TYPES.keys() <= types.keys()
    for kind, begin in TYPES.items():
        assert any(name.startswith(begin) for name in templates()), kind
    found(f"templates not tested, as no package has them: {', '.join(sorted(types.keys() - TYPES.keys()))}")


def joined(turns: dict[str, str], messages: list[dict[str, str]], channel: str) -> str:
    """A conversation as docs/reference/exported-folder.md says that a program puts it together.

    Args:
        channel: what a model without reasoning says before an answer, as gpt-oss does.
    """
    text, rest = turns["chat.begin"], messages
    if rest[0]["role"] == "system":
        text, rest = turns["chat.system"] + rest[0]["content"] + turns["chat.system_end"], rest[1:]
    text += rest[0]["content"] + turns["chat.reply"]
    for answer, following in zip(rest[1::2], rest[2::2], strict=True):
        text += channel + answer["content"] + turns["chat.next"] + following["content"] + turns["chat.reply"]
    return text


def test_turns_are_what_templates_render(tokenizer: Any, tmp_path: Path, found: Callable[[str], None]) -> None:
    without, reasoning = {}, []
    for i, (name, text) in enumerate(templates().items()):
        folder = tmp_path / str(i)
        tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
        turns, reason = folder_turns(folder)
        if "chat.begin" not in turns:
            assert reason
            without[name] = reason.replace(f"{folder}/", "")
            continue
        tokenizer.chat_template = text
        whole = expected(tokenizer, [USER, ANSWER, AGAIN])
        assert whole is not None
        _, _, after = whole.partition(USER["content"])
        before, _, _ = after.partition(ANSWER["content"])  # what the template writes before an earlier answer
        if not before.startswith(turns["chat.reply"]):
            reasoning.append(name)  # its reply opens reasoning, which it leaves out of earlier answers
        channel = before.removeprefix(turns["chat.reply"])
        for messages in PLAIN[:2] if name in reasoning else PLAIN:
            if messages[0]["role"] != "system" or "chat.system" in turns:
                assert joined(turns, messages, channel) == expected(tokenizer, messages), (name, messages)
    found(f"{len(templates())} templates, {len(templates()) - len(without)} with the texts chat.*, 0 differ")
    found(f"of these, first turns compared, as the reply opens reasoning: {', '.join(reasoning)}")
    for name, reason in without.items():
        found(f"no chat.* of {name}: {reason}")
    assert len(without) < len(templates()) / 2
