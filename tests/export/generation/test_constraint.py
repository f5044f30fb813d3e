"""Answers that follow a rule: JSON schemas, regular expressions and grammars, in each way of generating."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from export.generation import test_chosen_there
from export.generation.test_chat import generate

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.reply_formats import reply_format
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime.chat import Chat, Text
from quantmoe.runtime.choosing import device_sampling
from quantmoe.runtime.choosing.constraint import Constraint, Grammar, Vocabulary
from quantmoe.runtime.generate import Generator

FLOAT = {"activations": "float", "logits": "all"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["wheel", "axle"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
COMPACT = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
DATE = r"20[0-9]{2}-(0[1-9]|1[0-2])"
#: rules and what checks an answer
RULES: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "schema": (
        Grammar("json_schema", json.dumps(COMPACT)),
        lambda text: json.loads(text)["kind"] in SCHEMA["properties"]["kind"]["enum"],
    ),
    "regex": (Grammar("regex", DATE), lambda text: re.fullmatch(DATE, text)),
    "lark": (Grammar("grammar", 'start: "a" ("b" | "c")~2 "d"'), lambda text: re.fullmatch("a[bc]{2}d", text)),
    "gbnf": (Grammar("grammar", 'root ::= "yes" | "no" [!?]'), lambda text: re.fullmatch(r"yes|no[!?]", text)),
}
SAMPLED = Sampling(3.0, top_k=0, seed=5)


@pytest.fixture(scope="module")
def ending(exported, tmp_path_factory) -> Path:
    """A model whose answers end at token 1."""
    folder = shutil.copytree(exported("qwen3_moe", **FLOAT), tmp_path_factory.mktemp("ending") / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}', encoding="utf-8")
    return folder


there = test_chosen_there.there


@pytest.fixture(scope="module")
def text(ending: Path) -> Text:
    return Text(ending, raw=True)


def said(text: Text, tokens: list[int]) -> str:
    assert tokens[-1] in text.stop
    return text.decode(tokens[:-1])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["likeliest", "sampled"])
def test_answers_follow_a_rule(ending: Path, text: Text, name: str, sampling: Sampling | None) -> None:
    """Alone, in a batch, with drafts, and with tokens that a GPU chooses (a stand-in): all the same."""
    rule, holds = RULES[name]
    prompts = [text.ids("hello"), text.ids("a mixture of experts")]
    alone: list[list[int]] = []
    with Generator(ending) as model:
        for ids in prompts:
            found = model.generate(
                ids, 100, text.stop, sampling=sampling, constraint=text.constraint(rule, ids, model.vocabulary)
            )
            assert holds(said(text, found.tokens)), found.tokens
            assert found.finish_reason == "stop"
            alone.append(found.tokens)
        rules = [text.constraint(rule, ids, model.vocabulary) for ids in prompts]
        batch = model.stream_batch(prompts, 100, text.stop, sampling, rules)
        for _ in batch:
            pass
        assert batch.tokens == alone
        free = model.stream_batch(
            prompts, 4, text.stop, sampling, [rules[0].__class__(rule, text._vocabulary, text.format), None]
        )
        for _ in free:
            pass
        assert free.tokens[0] == alone[0][:4]
        assert free.tokens[1] == model.generate(prompts[1], 4, text.stop, sampling=sampling).tokens
    with Generator(ending, speculate="ngram") as model:
        found = model.generate(
            prompts[0],
            100,
            text.stop,
            sampling=sampling,
            constraint=text.constraint(rule, prompts[0], model.vocabulary),
        )
        assert found.tokens == alone[0]


def test_drafts_against_a_rule_are_not_verified(ending: Path, text: Text) -> None:
    rule = text.constraint(RULES["regex"][0], [])
    dates = text.ids("2024-05x")
    for token in dates[:2]:
        rule.add(token)
    valid = rule.valid(dates[2:])
    assert valid == dates[2 : 2 + len(valid)]
    assert 0 < len(valid) < len(dates) - 2


def test_a_gpu_chooses_by_a_rule(ending: Path, text: Text, there: Callable[..., Generator]) -> None:
    """The rule goes to what chooses there. tests/cuda/test_choose.py has the kernel."""
    rule, holds = RULES["schema"]
    ids, model = text.ids("hello"), there(path=ending)
    found = model.generate(
        ids, 100, text.stop, sampling=SAMPLED, constraint=text.constraint(rule, ids, model.vocabulary)
    )
    assert len(model.made) == 1
    assert holds(said(text, found.tokens))


class Memory:
    """An array on the host, in the place of memory on the GPU."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @classmethod
    def of(cls, array: np.ndarray, device: str) -> Memory:
        return cls(array)

    @classmethod
    def empty(cls, shape: list[int], dtype: type, device: str) -> Memory:
        return cls(np.empty(shape, dtype))

    def address(self) -> int:
        return self.array.ctypes.data


class Pages:
    """Page-locked memory, here."""

    def __init__(self, size: int):
        self.memory = bytearray(size)


def without_a_gpu(monkeypatch: pytest.MonkeyPatch, library: type) -> None:
    """Let device_sampling call a library of the test, over memory of the host."""
    for name, stand_in in {
        "library": library, "wait": lambda: None, "stream": lambda: 0, "Pages": Pages, "Buffer": Memory,
        "copy": ctypes.memmove,
    }.items():  # fmt: skip
        monkeypatch.setattr(device_sampling, name, stand_in)


def test_bits_are_copied_before_each_choice(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with a rule has its bits, others have ones. The rule goes on after the token that was chosen."""
    vocabulary, launched = text.tokenizer.get_vocab_size(), []
    token = text.ids("yes")[0]

    class Library:
        def qm_cuda_launch_choice(self, choice: Any, stream: Any, error: Any) -> int:
            words = -(-vocabulary // 32)
            given = (ctypes.c_uint32 * (2 * words)).from_address(choice._obj.allowed)
            launched.append(np.frombuffer(given, np.uint32).reshape(2, words).copy())
            (ctypes.c_int32 * 2).from_address(choice._obj.chosen)[:] = [9, token]
            return 0

    without_a_gpu(monkeypatch, Library)
    rule, alike = (text.constraint(RULES["gbnf"][0], [], vocabulary) for _ in range(2))
    choice = device_sampling.Choice(
        [[5], [6]], 8, vocabulary, dtype=np.dtype(np.float32), sampling=None, constraints=[None, rule]
    )
    logits = SimpleNamespace(address=lambda: 0, bytes=lambda: 0, row_bytes=lambda: 0)
    for past in ([1, 1], [2, 2], [3, -1]):
        if past[1] >= 0:
            expected = np.array(alike.allowed())
            alike.add(token)
        choice.start(logits, past, None)  # type: ignore[arg-type]
        assert choice.take() == [9, token]
        assert (launched[-1][0] == 2**32 - 1).all()
        np.testing.assert_array_equal(launched[-1][1], expected)
        token = text.ids("yes")[-1] if past == [1, 1] else token
    assert len(launched) == 3


def test_a_row_of_a_choice_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text, its random numbers and its place are those of the new text; other rows take no part."""
    launched: list[dict[str, Any]] = []

    class Library:
        def qm_cuda_launch_choice(self, choice: Any, stream: Any, error: Any) -> int:
            sizes = {"counts": 40, "history": 8, "past": 1}
            found: dict[str, Any] = {"batch": choice._obj.batch}
            for name, size in sizes.items():
                found[name] = list((ctypes.c_int32 * size).from_address(getattr(choice._obj, name)))
            launched.append(found | {"uniform": ctypes.c_double.from_address(choice._obj.uniform).value})
            return 0

    without_a_gpu(monkeypatch, Library)
    sampling = Sampling(0.5, presence_penalty=1, no_repeat_ngram_size=2, seed=3)
    choice = device_sampling.Choice([[5], [6], [7]], 8, 40, dtype=np.dtype(np.float32), sampling=sampling)
    logits = SimpleNamespace(address=lambda: 0, bytes=lambda: 0, row_bytes=lambda: 0)
    choice.join(1, [4, 4, 2], 9, None)
    choice.start(logits, [3], None, 1)  # type: ignore[arg-type]
    choice.start(logits, [1, 4, -1], None)  # type: ignore[arg-type]
    one, all_three = launched
    drawn = np.random.Generator(np.random.PCG64(9))
    assert (one["batch"], one["past"], one["uniform"]) == (1, [3], drawn.random())
    assert one["counts"] == [int(id in (2, 4)) for id in range(40)]
    assert one["history"] == [4, 4, 2, 0, 0, 0, 0, 0]
    assert (all_three["batch"], all_three["counts"][5]) == (3, 1)
    assert choice._uniform[1] == drawn.random()
    assert list(choice._past) == [1, 4, -1]


def test_a_tokenizer_with_more_tokens_than_the_model(text: Text) -> None:
    """Bits are those of the model's tokens."""
    size = text.tokenizer.get_vocab_size() - 40
    words = Constraint(RULES["gbnf"][0], Vocabulary(text.tokenizer, size, text.stop), reply_format("")).allowed()
    assert words is not None
    assert len(words) == -(-size // 32)


THINKS = "<think></think>"


@pytest.mark.parametrize(
    ("template", "prompt", "free", "then"),
    [
        ("", "", "", "yes"),
        (THINKS, "<think>", "why? </think>", "yes"),
        (THINKS, "<think></think>", "", "yes"),
        ("<|channel|><|message|>", "", "<|channel|>analysis<|message|>no<|end|><|channel|>final<|message|>", "no!"),
    ],
)
def test_reasoning_is_free(text: Text, template: str, prompt: str, free: str, then: str) -> None:
    vocabulary = Vocabulary(text.tokenizer, text.tokenizer.get_vocab_size(), text.stop)
    rule = Constraint(RULES["gbnf"][0], vocabulary, reply_format(template), prompt)
    for token in text.ids(free):
        assert rule.allowed() is None
        rule.add(token)
    for token in [*text.ids(then), 1]:
        words = rule.allowed()
        assert words is not None
        assert words[token // 32] >> token % 32 & 1
        assert np.bitwise_count(words).sum() < 40
        rule.add(token)
    with pytest.raises(ModelError, match="an answer cannot follow its rule: "):
        rule.add(text.ids("more")[0])


def test_a_model_may_begin_reasoning_itself(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token opens reasoning, it may come first. Otherwise the answer begins at once."""
    opens, vocabulary = 7, Vocabulary(text.tokenizer, text.tokenizer.get_vocab_size(), text.stop)
    for first in (opens, *text.ids("yes")[:1]):
        rule = Constraint(RULES["gbnf"][0], vocabulary, reply_format(THINKS))
        rule._opens = opens  # this tokenizer has no such token
        words = rule.allowed()
        assert words is not None
        assert words[opens // 32] >> opens % 32 & 1
        rule.add(first)
        assert (rule.allowed() is None) == (first == opens)


def test_wrong_rules_are_named(text: Text) -> None:
    for kind, wrong, message in (
        ("json_schema", "{", "the JSON schema is refused"),
        ("json_schema", '{"type": "nothing"}', "the JSON schema is refused: .*nothing"),
        ("regex", "a(b", "the regular expression is refused: .*unclosed group"),
        ("grammar", "start: nothing", "the grammar is refused"),
        ("grammar", "root ::= (", "the grammar is refused"),
        ("lark", "", "kind is 'lark', expected one of"),
        ("regex", 5, "text is 5, expected text"),
    ):
        with pytest.raises(OptionError, match=f"(?s){message}"):
            Grammar(kind, wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a grammar needs a token that ends the answer"):
        Vocabulary(text.tokenizer, 100, [])


@pytest.mark.parametrize(
    ("answer", "follows"),
    [
        ('{"name": "a", "count": 7, "kind": "axle"}', True),
        ('{\n  "name": "a",\n  "count": 7,\n  "kind": "axle"\n}', True),
        ('{"name":"a","count":7,"kind":"axle"}', True),
        ('{  "name": "a", "count": 7, "kind": "axle"}', False),
        ('{\n\n"name": "a", "count": 7, "kind": "axle"}', False),
    ],
)
def test_json_has_a_space_or_a_line_between_its_parts(text: Text, answer: str, follows: bool) -> None:
    """Models write at most one space or one line break there. A second one is refused."""
    rule, tokens = text.constraint(Grammar("json_schema", json.dumps(SCHEMA)), []), text.ids(answer)
    assert (rule.valid(tokens) == tokens) == follows


def test_a_conversation_follows_a_rule(ending: Path) -> None:
    chat = Chat(Generator(ending))
    rule, holds = RULES["schema"]
    assert holds("".join(chat.reply("hello", 100, grammar=rule)))
    assert holds("".join(delta.content for delta in chat.deltas("more", 100, grammar=rule)))


def test_rules_of_the_command_line(ending: Path, tmp_path: Path) -> None:
    """A schema in a file or on the line, a grammar of llama.cpp, a regular expression; also of many prompts."""
    schema, grammar, prompts = tmp_path / "schema.json", tmp_path / "list.gbnf", tmp_path / "prompts.txt"
    schema.write_text(json.dumps(COMPACT), encoding="utf-8")
    grammar.write_text(RULES["gbnf"][0].text, encoding="utf-8")
    prompts.write_text("hello\nmore\n", encoding="utf-8")
    for options, name in (
        (("--json-schema", schema), "schema"),
        (("-j", json.dumps(COMPACT)), "schema"),
        (("--grammar", grammar), "gbnf"),
        (("--regex", DATE), "regex"),
    ):
        done = generate(ending, "--prompt", "hello", *options)
        assert RULES[name][1](done.stdout.removesuffix("\n")), done.stderr
    lines = generate(ending, "--prompts", prompts, "--regex", DATE).stdout.splitlines()
    assert len(lines) == 2
    assert all(RULES["regex"][1](json.loads(line)) for line in lines)
    for options, message in (
        (("--regex", "a("), "the regular expression is refused"),
        (("--json-schema", tmp_path / "nothing"), "nothing: No such file"),
        (("--grammar", grammar, "--regex", "a"), "--grammar does not go with --regex"),
    ):
        done = generate(ending, "--prompt", "hello", *options)
        assert done.returncode == 2
        assert message in " ".join(done.stderr.replace("│", " ").split())
