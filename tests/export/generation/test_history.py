"""Conversations keep what was said as its tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.models.tiny import make_tokenizer
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer

from quantmoe.exporter.errors import ModelError
from quantmoe.runtime.chat import Chat, Text

#: gpt-oss' ways: an answer is the text of a channel, and one with channels is refused
HARMONY = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('channels in the content') }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
#: the ways of a family that is not known: its answers are kept as they came
LANES = HARMONY.replace("<|channel|>", "<|lane|>")
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|message|>{% endif %}"
)
SPECIAL = ["<|start|>", "<|channel|>", "<|lane|>", "<|message|>", "<|end|>", "<|return|>"]


class Said:
    """A model that says what it is told to, and has no cache."""

    def __init__(self, folder: Path, *replies: list[int]):
        self.path, self.replies, self.prompts = folder / "model.onnx", iter(replies), []

    def cache(self) -> Any:
        return SimpleNamespace(
            keep=lambda ids: self.prompts.append(list(ids)) or 0, tail=0, tokens=[], room=10_000, gate=threading.RLock()
        )

    def check(self, ids: list[int], room: int) -> None:
        pass

    def stream(self, ids: list[int], count: int, stop: list[int], sampling: Any, cache: Any, constraint: Any) -> Any:
        reply, tokens = next(self.replies), []

        class Generated(Iterator[int]):
            def __next__(self) -> int:
                if len(tokens) == len(reply):
                    raise StopIteration
                tokens.append(reply[len(tokens)])
                return tokens[-1]

        found = Generated()
        found.tokens = tokens
        return found


@pytest.fixture
def talk(tmp_path: Path) -> Callable[..., tuple[Chat, Said, Any]]:
    def make(template: str, *replies: str) -> tuple[Chat, Said, Any]:
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(text, special=True) for text in SPECIAL]})
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}', encoding="utf-8")
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        end = tokenizer.convert_tokens_to_ids("<|return|>" if template in (HARMONY, LANES) else "<|end|>")
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}), encoding="utf-8")
        auto = AutoTokenizer.from_pretrained(tmp_path)
        # letter by letter: other tokens than the text's own
        told = [[id for letter in cut(reply) for id in auto(letter).input_ids] for reply in replies]
        model = Said(tmp_path, *told)
        return Chat(model), model, auto

    return make


def cut(reply: str) -> Iterator[str]:
    while reply:
        token = next((text for text in SPECIAL if reply.startswith(text)), reply[0])
        yield token
        reply = reply.removeprefix(token)


CHANNELS = "<|channel|>analysis<|message|>a few experts<|end|><|start|>assistant<|channel|>final<|message|>The router"
THOUGHT = CHANNELS.replace("<|channel|>", "<|lane|>")


def test_replies_keep_their_channels_and_their_tokens(talk: Callable[..., tuple[Chat, Said, Any]]) -> None:
    chat, model, auto = talk(LANES, THOUGHT + "<|return|>", THOUGHT + "<|return|>", "x")
    assert "".join(chat.reply("Who?")) == THOUGHT
    "".join(chat.reply("Why?"))
    "".join(chat.reply("So?"))
    first, second, third = model.prompts
    said = [id for text in cut(THOUGHT) for id in auto(text).input_ids]
    asked = [{"role": "user", "content": text} for text in ("Who?", "Why?", "So?")]
    assert first == auto.apply_chat_template(asked[:1], add_generation_prompt=True, return_dict=False)
    after = [
        auto(f"<|end|><|start|>user<|message|>{text}<|end|><|start|>assistant").input_ids for text in ("Why?", "So?")
    ]
    assert second == first + said + after[0]
    assert third == second + said + after[1]


def test_a_known_family_leaves_out_its_reasoning(talk: Callable[..., tuple[Chat, Said, Any]]) -> None:
    """The template gets the parts of a reply, and writes an earlier one in its own way."""
    chat, model, auto = talk(HARMONY, CHANNELS + "<|return|>", "x")
    assert "".join(chat.reply("Who?")) == CHANNELS
    assert chat.messages[-1]["reasoning_content"] == "a few experts"
    assert chat.messages[-1]["content"] == "The router"
    "".join(chat.reply("Why?"))
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The router"},
                {"role": "user", "content": "Why?"}]  # fmt: skip
    assert model.prompts[1] == auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_turns_that_are_dropped_leave_the_others(talk: Callable[..., tuple[Chat, Said, Any]]) -> None:
    chat, model, auto = talk(LANES, THOUGHT, THOUGHT, "x")
    for text in ("Who?", "Why?"):
        "".join(chat.reply(text))
    del chat.messages[:2]
    "".join(chat.reply("So?"))
    turn = "<|start|>user<|message|>{}<|end|><|start|>assistant"
    assert auto.decode(model.prompts[-1]) == turn.format("Why?") + THOUGHT + "<|end|>" + turn.format("So?")


def test_a_plain_reply_is_what_the_template_renders(talk: Callable[..., tuple[Chat, Said, Any]]) -> None:
    """Where the template writes it as it came, its tokens stay; where it leaves out some, the template decides."""
    chat, model, auto = talk(CHATML, "few experts<|end|>", "think</think>a token<|end|>", "x")
    for text in ("Who?", "Why?", "So?"):
        "".join(chat.reply(text))
    said = [id for letter in "few experts" for id in auto(letter).input_ids]
    assert model.prompts[1][: len(model.prompts[0]) + len(said)] == model.prompts[0] + said
    assert said != auto("few experts").input_ids
    assert model.prompts[2] == auto.apply_chat_template(
        chat.messages[:-1], add_generation_prompt=True, return_dict=False
    )
    assert "think" not in auto.decode(model.prompts[2])


def test_stop_strings_match_special_tokens(talk: Callable[..., tuple[Chat, Said, Any]]) -> None:
    chat, model, auto = talk(LANES, THOUGHT, "x")
    assert "".join(chat.reply("Who?", stop=["<|end|>"])) == THOUGHT[: THOUGHT.index("<|end|>")]
    "".join(chat.reply("Why?"))
    assert auto.decode(model.prompts[1]).count("<|end|><|start|>user") == 1


def test_a_conversation_has_one_beginning(talk: Callable[..., tuple[Chat, Said, Any]], tmp_path: Path) -> None:
    """Also of a tokenizer that begins texts with the token that the template writes, as Mixtral's does."""
    chat, model, auto = talk("{{ bos_token }}" + CHATML, "few<|end|>", "x")
    auto.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", auto.bos_token_id)]
    )
    auto.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = Chat(model, Text(tmp_path))
    for text in ("Who?", "Why?"):
        "".join(chat.reply(text))
    assert [prompt.count(auto.bos_token_id) for prompt in model.prompts] == [1, 1]
    assert Text(tmp_path, raw=True).encode(chat.messages[:1])[0] == auto.bos_token_id


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the prompt has '\\ud800', half of a surrogate pair"):
        Text(tmp_path).encode([{"role": "user", "content": "a\ud800"}])
