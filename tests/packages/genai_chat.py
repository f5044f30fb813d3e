"""samples/genai/chat.py on the demo's folders: turns, cancelled answers, stop strings, several users."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).parents[2] / "samples/genai"
TURNS = "A mixture of experts", " and a router", " scores them."
#: an ordinary model and a hybrid model
BOTH = pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_5_moe_text"])


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SAMPLES))
    for name in ("chat", "generate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import chat

    yield chat
    for name in ("chat", "generate"):
        sys.modules.pop(name, None)


@pytest.fixture
def exported() -> Callable[..., Path]:
    """exported(architecture) -> the folder that the Makefile exports."""
    names = {"qwen3_moe": "QUANTMOE_MODEL", "qwen3_5_moe_text": "QUANTMOE_HYBRID"}
    return lambda architecture: Path(os.environ[names[architecture]])


@pytest.fixture
def begin(chat: Any, exported: Callable[..., Path]) -> Callable[..., Any]:
    """begin(architecture or folder) -> a conversation of the likeliest tokens."""

    def make(of: str | Path, **search: Any) -> Any:
        folder = of if isinstance(of, Path) else exported(of)
        return chat.Conversation(chat.open_model(folder), folder, do_sample=False, max_length=256, **search)

    return make


def said(conversation: Any) -> list[int]:
    return conversation.generator.get_sequence(0).tolist()


def check(begin: Callable[..., Any], of: str | Path, conversation: Any) -> None:
    """The conversation's last answer is what the whole conversation as one prompt gives."""
    ids, prompt = said(conversation), conversation.snapshot
    other = begin(of).generator
    other.append_tokens(ids[:prompt])
    for _ in ids[prompt:]:
        other.generate_next_token()
    assert other.get_sequence(0).tolist() == ids
    assert len(ids) > prompt


@BOTH
def test_three_turns_equal_one_prompt(begin: Callable[..., Any], architecture: str) -> None:
    conversation, prompts = begin(architecture), []
    for text in TURNS:
        before = len(said(conversation)) if prompts else 0
        assert "".join(conversation.reply(text, max_new_tokens=8))
        hybrid = architecture != "qwen3_moe"
        # a hybrid model begins at the last prompt's end, the other one at the answer's last token
        assert conversation.kept == ((prompts[-1] if hybrid else before - 1) if prompts else 0)
        check(begin, architecture, conversation)
        prompts.append(conversation.snapshot)
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 3


@BOTH
def test_a_cancelled_answer_stays_and_the_conversation_goes_on(begin: Callable[..., Any], architecture: str) -> None:
    conversation, cancelled = begin(architecture), threading.Event()
    pieces = []
    for piece in conversation.reply(TURNS[0], cancelled=cancelled):
        pieces.append(piece)
        if len(pieces) == 3:
            cancelled.set()
    assert 3 <= len(pieces) <= 4  # the fourth was held back
    assert conversation.messages[1]["content"] == "".join(pieces).lstrip("\n")
    next(answer := conversation.reply(TURNS[1]))
    answer.close()  # the caller stops early
    assert "".join(conversation.reply(TURNS[2], max_new_tokens=8))
    check(begin, architecture, conversation)


def test_a_cache_that_grows(begin: Callable[..., Any]) -> None:
    conversation = begin("qwen3_moe", past_present_share_buffer=False)
    for text in TURNS:
        assert "".join(conversation.reply(text, max_new_tokens=8))
        check(begin, "qwen3_moe", conversation)
    assert conversation.kept == conversation.snapshot - len(conversation.tokenizer.encode(TURNS[2]).ids) - 2


def test_a_model_that_does_not_go_back(begin: Callable[..., Any]) -> None:
    """LFM2 in onnxruntime-genai."""

    class Forward:
        def __init__(self, generator: Any):
            self.generator = generator

        def __getattr__(self, name: str) -> Any:
            return getattr(self.generator, name)

        def rewind_to(self, _: int) -> None:
            raise RuntimeError("RewindTo is currently not supported for lfm2.")

    conversation = begin("qwen3_moe")
    for text in TURNS:
        conversation.generator = Forward(conversation.generator)
        assert "".join(conversation.reply(text, max_new_tokens=8))
        assert conversation.kept == 0
        check(begin, "qwen3_moe", conversation)


def test_stop_strings(begin: Callable[..., Any], chat: Any) -> None:
    whole = "".join(begin("qwen3_moe").reply(TURNS[0], max_new_tokens=24))
    for at in range(4, 12):
        end = whole[at : at + 4]
        found = begin("qwen3_moe").reply(TURNS[0], stop=["never", end], max_new_tokens=24)
        assert "".join(found) == whole[: whole.index(end)]
    assert "".join(begin("qwen3_moe").reply(TURNS[0], stop=[whole + "more"], max_new_tokens=24)) == whole
    assert chat.cut("a<en", ["<end>", "n"]) == ("a<e", "", True)
    assert chat.cut("a<en", ["<end>"]) == ("a", "<en", False)


TEMPLATE = """{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""


@BOTH
def test_turns_of_a_template(
    begin: Callable[..., Any], exported: Callable[..., Path], tmp_path: Path, architecture: str, chat: Any
) -> None:
    """The history has answers without their reasoning, so a turn goes back before it."""
    folder = shutil.copytree(exported(architecture), tmp_path / "model")
    assert not chat.has_template(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    conversation = begin(folder)
    prompt = ""
    for text in TURNS:
        answer = "".join(conversation.reply(text, max_new_tokens=8))
        prompt += f"[user]{text}[assistant]"
        assert conversation.tokenizer.encode(prompt).ids == said(conversation)[: conversation.snapshot]
        check(begin, folder, conversation)
        conversation.messages[-1]["content"] = chat.without_reasoning(f"<think>\n{answer}\n</think>\n\nSo {text}.")
        prompt += f"So {text}."
    assert conversation.kept > 0


def test_eight_users_on_one_model(begin: Callable[..., Any], chat: Any, exported: Callable[..., Path]) -> None:
    folder = exported("qwen3_moe")
    model = chat.open_model(folder)
    users = [chat.Conversation(model, folder, do_sample=False, max_length=256) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for turn in TURNS:
            texts = [f"{i}{turn}" for i in range(8)]
            found = list(threads.map(lambda user, text: "".join(user.reply(text, max_new_tokens=8)), users, texts))
            assert all(found)
    assert len({tuple(said(user)) for user in users}) == 8
    for user in users:
        check(begin, "qwen3_moe", user)


def test_a_full_context_is_named(begin: Callable[..., Any]) -> None:
    conversation = begin("qwen3_moe")
    with pytest.raises(ValueError, match=r"^\d+ tokens and 1 for the answer do not fit into max_length, 256 tokens: "):
        next(conversation.reply("router" * 300))
    assert conversation.messages == []
    assert "".join(conversation.reply(TURNS[0], max_new_tokens=8))
