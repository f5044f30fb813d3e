"""Text as it comes, chat templates as transformers renders them, and turns that keep their cache."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
from support.models.tiny import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from quantmoe.exporter.command_arguments import missing
from quantmoe.exporter.errors import ContextError, ModelError, OptionError
from quantmoe.exporter.folder.chat_template import Template, load_template
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.writing.battery import texts
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.chat import Chat, TemplateArguments, Text, TextStream
from quantmoe.runtime.generate import Generator

WORDS = ["héllo wörld", "你好世界 👩‍👩‍👧 ок", "a mixture of experts\n\tand  more", "日本語のテキスト🎉🎉"]
#: blocks with spaces before and lines after, functions and tags that templates of checkpoints use
TEMPLATE = """\
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- if messages[0]['role'] == 'assistant' %}{{ raise_exception('the first message is the assistant') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{% for message in messages %}
    {% if message.content == 'skip' %}{% continue %}{% endif %}
<|{{ message['role'] }}|>
    {% if message.role == 'assistant' and loop.index0 < ns.last %}
{% generation %}{{ message.content.split('e')[-1] | trim }}{% endgeneration %}
    {% else %}
{{ message | tojson }} {{ '<&>' | tojson(indent=2) }}
    {% endif %}
{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|> {{ strftime_now('%Y') }}
{% endif %}
{% if tools %}tools{% endif %}"""


def byte_level() -> Tokenizer:
    return make_tokenizer().backend_tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer of words with bytes for what it does not know, and a decoder that strips the first space."""
    known = [("<unk>", 0.0), ("▁", -2.0), ("▁mixture", -3.0), ("▁of", -3.0), ("▁experts", -3.0), ("or", -3.0)]
    known += [(letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyz"] + [(f"<0x{i:02X}>", -8.0) for i in range(256)]
    tokenizer = Tokenizer(models.Unigram(known, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", WORDS)
def test_text_comes_in_whole_characters(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    ids, stream = tokenizer.encode(text).ids, TextStream(tokenizer)
    pieces = [stream.push(id) for id in ids]
    whole = tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
    assert stream.end() == ""
    assert "".join(pieces) == whole
    given = ""
    for end, piece in enumerate(pieces, 1):  # as soon as a character is whole
        given += piece
        whole = tokenizer.decode(ids[:end])
        assert given == whole or whole.endswith("\ufffd")


def test_bytes_that_are_no_text() -> None:
    """Tokens at random: what streams is what they decode to, and what may have become a character comes at the end."""
    tokenizer, rng = byte_level(), random.Random(0)
    for _ in range(500):
        ids = [rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(30))]
        assert "".join(TextStream(tokenizer).pieces(ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_texts_that_end_anywhere(make: Callable[[], Tokenizer]) -> None:
    """A stream is what its tokens decode to, wherever it ends.

    Bytes that are no character yet make tokenizers' ByteFallback lose the characters of bytes right before them. A
    stream has given these already.
    """
    tokenizer, lost = make(), 0
    for text in texts():
        ids = tokenizer.encode(text).ids
        whole = tokenizer.decode(ids)
        for end in range(len(ids) + 1):
            given, decoded = "".join(TextStream(tokenizer).pieces(ids[:end])), tokenizer.decode(ids[:end])
            if given != decoded:
                lost += 1
                assert decoded.endswith("\ufffd")
                assert given.endswith("\ufffd")
                assert whole.startswith(given.rstrip("\ufffd"))
    assert (lost > 0) == (make is byte_fallback)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_texts_that_begin_anywhere(make: Callable[[], Tokenizer]) -> None:
    """A stream is the rest of its text, wherever it begins. A character that the prompt only begins belongs to it."""
    tokenizer = make()
    for text in texts():
        ids = tokenizer.encode(text).ids
        whole = tokenizer.decode(ids)
        for begin in range(len(ids) + 1):
            before = tokenizer.decode(ids[:begin]).rstrip("\ufffd")
            assert before + "".join(TextStream(tokenizer, after=ids[:begin]).pieces(ids[begin:])) == whole


def test_tokens_with_parts_of_two_characters() -> None:
    """Vocabularies have tokens that end a character and begin the next one."""
    octets = pre_tokenizers.ByteLevel.alphabet()
    spelled = [
        character for character, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("日日日")
    ]
    (word,) = spelled
    assert len(word) == 9
    tokens = [word[0], word[1:4], word[4:7], word[7:]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(sorted({*octets, *tokens}))}, []))
    tokenizer.decoder = decoders.ByteLevel()
    ids = [tokenizer.token_to_id(token) for token in tokens]
    for begin in range(len(ids) + 1):
        stream = TextStream(tokenizer, after=ids[:begin])
        pieces = [*map(stream.push, ids[begin:])]
        assert "".join(pieces) == "日" * (3 - max(0, begin - 1))
        assert stream.end() == ""


def test_text_goes_on_after_the_prompt() -> None:
    tokenizer = byte_fallback()
    *before, last = tokenizer.encode("mixture of experts").ids
    assert TextStream(tokenizer, after=before).push(last) == " experts"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_stop_strings(make: Callable[[], Tokenizer]) -> None:
    tokenizer, text = make(), "a mixture of 日本 experts or 日本語"
    for stops in (
        ["xtu"],
        ["日本語"],
        ["本 e", "語"],
        ["nowhere"],
        ["or", "of"],
        ["語"],
        ["日本語!", ""],
        ["a"],
        ["  "],
    ):
        ids = iter(tokenizer.encode(text).ids)
        stream = TextStream(tokenizer, stops)
        found = "".join(stream.pieces(ids))
        at = min((text.find(stop) for stop in stops if stop and stop in text), default=None)
        assert found == text[:at]
        assert stream.stopped == (at is not None)
        assert at is None or tokenizer.decode(list(ids)) in text[at:]  # nothing more was asked for


@pytest.fixture(scope="module")
def talking(exported, tmp_path_factory) -> Path:
    """An export with a chat template."""
    folder = shutil.copytree(
        exported("qwen3_moe", activations="float", logits="last"), tmp_path_factory.mktemp("chat") / "m"
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def test_a_long_stop_string_is_compared_with_the_text_that_is_there() -> None:
    """Only as many of its beginnings as there are characters, whatever a client sends."""

    class Counted(str):
        beginnings = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            Counted.beginnings += 1
            return super().__getitem__(key)

    tokenizer = byte_level()
    ids = tokenizer.encode("xx, xx").ids
    assert "".join(TextStream(tokenizer, [Counted("x" * 100_000)]).pieces(ids)) == "xx, xx"
    assert 0 < Counted.beginnings < 100


@pytest.mark.parametrize("where", ["file", "configuration", "by name"])
def test_templates_are_rendered_as_transformers_does(talking: Path, tmp_path: Path, where: str) -> None:
    folder = shutil.copytree(talking, tmp_path / "model")
    if where != "file":
        (folder / "chat_template.jinja").unlink()
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}]
        config["chat_template"] = TEMPLATE if where == "configuration" else named
        config["bos_token"] = {"__type": "AddedToken", "content": "<s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer, template = AutoTokenizer.from_pretrained(folder), load_template(folder)
    messages = [{"role": "user", "content": '<tag> & "quotes" 你好'}]
    for role, content in (
        ("assistant", "think, the end"),
        ("user", "skip"),
        ("user", "more\n\n"),
        ("assistant", "ends"),
    ):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected
        messages.append({"role": role, "content": content})
    assert expected.startswith("<s>")
    with pytest.raises(ModelError, match=f"{template.path.name}: the first message is the assistant"):
        template.render(messages[1:])


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "<|im_end|>\n<|im_start|>"
#: the first message has the system prompt in it, answers end with a token
INSTRUCT = (
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] {% if loop.first and "
    "messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(
    ("template", "begin", "reply", "following", "system"),
    [
        (CHATML, ANSWER[-12:] + "user\n", ANSWER + "assistant\n", ANSWER + "user\n", True),
        (INSTRUCT, "<s>[INST] ", " [/INST]", "</s>[INST] ", True),
        (THINKS, ANSWER[-12:] + "user\n", ANSWER + "assistant\n<think>\n", ANSWER + "user\n", True),
        ("{% if messages[0].role == 'system' %}{{ 1 / 0 }}{% endif %}" + CHATML, ANSWER[-12:] + "user\n",
         ANSWER + "assistant\n", ANSWER + "user\n", False),
    ],
)  # fmt: skip
def test_what_stands_around_messages(template: str, begin: str, reply: str, following: str, system: bool) -> None:
    made = Template(template, Path("t"), {"bos_token": "<s>", "eos_token": "</s>"})
    turns = made.turns()
    assert (turns["chat.begin"], turns["chat.reply"], turns["chat.next"]) == (begin, reply, following)
    assert ("chat.system" in turns) == ("chat.system_end" in turns) == system
    messages, said = [{"role": "user", "content": "Who?"}], begin + "Who?" + reply
    assert made.render(messages) == said
    messages += [{"role": "assistant", "content": "I."}, {"role": "user", "content": "Why?"}]
    said = (said if template is not THINKS else said.replace("<think>\n", "")) + (template is INSTRUCT) * " "
    assert made.render(messages) == said + "I." + following + "Why?" + reply
    if system:
        messages = [{"role": "system", "content": "Be brief."}, *messages[:1]]
        assert made.render(messages) == turns["chat.system"] + "Be brief." + turns["chat.system_end"] + "Who?" + reply


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ '<' if loop.last }}{{ m.content }}{% endfor %}>",  # another way in the last turn
        "{{ messages[-1].content }}",  # without what came before
        "{% for m in messages %}{{ m.content }}{{ loop.index }}{% endfor %}",  # counted
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{{ 1 / 0 }}",
    ],
)
def test_templates_that_are_no_turns(template: str) -> None:
    assert Template(template, Path("t"), {}).turns() == {}


def test_an_export_says_its_turns(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Also where the template is wrong, which who renders it is told."""
    source = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "source")
    for template, expected in (CHATML, Template(CHATML, Path("t"), {}).turns()), ("{% for %}", {}):
        (source / "chat_template.jinja").write_text(template, encoding="utf-8")
        export(source, tmp_path / "model", force=True)
        entries = onnx.load(tmp_path / "model" / "model.onnx", load_external_data=False).metadata_props
        assert {entry.key: entry.value for entry in entries if entry.key.startswith("chat.")} == expected


def test_what_is_wrong_with_a_template_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_template(tmp_path) is None
    for name, text, message in (
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is int, expected text"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("chat_template.jinja", "{% for %}", "Expected an expression"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=rf"{name}: {message}"):
            load_template(tmp_path)
        (tmp_path / name).unlink()
    for text in ("{{ ''.__class__.mro() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"):  # a sandbox
        (tmp_path / "chat_template.jinja").write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=r"chat_template\.jinja: "):
            load_template(tmp_path).render([{"role": "user", "content": "a"}])
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    with pytest.raises(ModelError, match=r"jinja2 is 3\.1\.5, expected 3\.1\.6 or newer"):
        load_template(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ModuleNotFoundError) as missing_package:
        load_template(tmp_path)
    assert missing(missing_package.value, "generate") == "jinja2 is not installed; pip install 'quantmoe[run]'"


def test_turns_run_what_is_new(talking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(talking)
    chat, run = Chat(generator), []
    step = chat.cache._run
    monkeypatch.setattr(chat.cache, "_run", lambda ids: run.append(ids.shape[1]) or step(ids))
    for turn, message in enumerate(["hello", "and then?", "more"]):
        reply = "".join(chat.reply(message, 8))
        assert chat.messages[-1] == {"role": "assistant", "content": reply}
        again = Chat(Generator(talking))
        again.messages = chat.messages[:-2]
        assert "".join(again.reply(message, 8)) == reply  # the same as if all were run
        # the template renders an answer otherwise once another follows: back to where it began
        assert turn == 0 or run[0] == chat.last.prompt < again.last.prompt
        run.clear()


def test_what_is_no_conversation_is_named(talking: Path) -> None:
    said = {"role": "user", "content": "hello"}
    for raw in (False, True):
        text = Text(talking, raw)
        missing = [[said, {"role": "user"}]] * raw  # a template may take a message of tool calls
        for wrong in ([], "hello", said, 5, None, [5], [{"content": "a"}], [said | {"content": 5}], *missing):
            with pytest.raises(OptionError, match=r"^messages is .*, expected at least one message, each with the"):
                text.encode(wrong)
        assert text.encode([said]) == text.encode((said,))


def test_turns_without_a_template_go_on(exported) -> None:
    generator = Generator(exported("qwen3_moe", activations="float"))
    chat, tokenizer = Chat(generator), Text(generator.path.parent).tokenizer
    first = "".join(chat.reply("A mixture", 5))
    ids = tokenizer.encode("A mixture").ids + chat.last.tokens
    "".join(chat.reply(" of", 5))
    more = tokenizer.encode(" of").ids
    assert chat.last.prompt == 1 + len(more)  # the last token of the reply had not been run
    assert chat.last.tokens == generator.greedy(ids + more, 5).tokens
    assert chat.messages[1]["content"] == first


def test_a_reply_that_is_left_is_in_the_conversation(talking: Path) -> None:
    whole = Chat(Generator(talking))
    text = "".join(whole.reply("hello", 12))
    chat = Chat(whole.model)
    pieces = chat.reply("hello", 12)
    said = next(pieces) + next(pieces)
    pieces.close()
    assert text.startswith(said)
    assert chat.messages[-1] == {"role": "assistant", "content": said}
    assert "".join(chat.reply("hello", 3, stop=["\n"], sampling=Sampling(seed=1))) is not None
    assert len(chat.messages) == 4


def test_the_next_reply_ends_the_one_before(talking: Path) -> None:
    """The pieces that came stay, and the next reply is what it is after them. Threads that share a chat alike."""
    chat = Chat(Generator(talking))
    left = chat.reply("hello", 12)
    said = next(left) + next(left)
    text = "".join(chat.reply("more", 12))
    with pytest.raises(ModelError, match="another answer was begun"):
        next(left)
    del left
    contents = ["hello", said, "more", text]
    assert [message["content"] for message in chat.messages] == contents
    other = Chat(chat.model)
    (pieces := other.reply("hello", 12)).__next__()
    next(pieces)
    pieces.close()
    assert "".join(other.reply("more", 12)) == text
    left = chat.reply("again", 12)
    next(left)
    chat.clear()
    del left
    assert chat.messages == []

    ended, whole = [], []

    def talk(name: int) -> None:
        for turn in range(6):
            try:
                whole.append((f"{name} {turn}", "".join(chat.reply(f"{name} {turn}", 8))))
            except ModelError as error:
                ended.append(str(error))

    threads = [threading.Thread(target=talk, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(whole) + len(ended) == 12
    assert all("another answer was begun" in error for error in ended)
    contents = [message["content"] for message in chat.messages]
    assert {*whole} <= {*zip(contents[::2], contents[1::2], strict=True)}


@pytest.mark.parametrize("raw", [False, True])
def test_a_full_context_drops_the_oldest_turns(talking: Path, tmp_path: Path, raw: bool) -> None:
    """Whole ones; what is left is run again, so each reply is that of a conversation that had only these turns."""
    folder = shutil.copytree(talking, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    generator, text = Generator(folder), Text(folder, raw)
    system = [{"role": "system", "content": "Be brief."}] * (not raw)
    one = len(text.encode([*system, {"role": "user", "content": "message 1"}])) + 6
    generator.context = 4 * one
    chat = Chat(generator, text)
    chat.messages = [*system]
    dropped = 0
    for turn in range(1, 12):
        before = chat.messages
        reply = "".join(chat.reply(f"message {turn}", 6))
        dropped += chat.dropped
        *others, asked, answer = chat.messages
        assert (asked["content"], answer["content"]) == (f"message {turn}", reply)
        assert others == [*system, *before[len(system) + 2 * chat.dropped :]]
        assert len(chat.cache.tokens) < generator.context
        if chat.dropped:
            again = Chat(generator, text)
            again.messages = others
            again._ids = chat._prompt_alone(others)[0] if raw and others else []
            assert "".join(again.reply(f"message {turn}", 6)) == reply
    assert dropped > 3
    assert chat.last.finish_reason == "length"


def test_a_message_that_is_too_long_alone_leaves_the_conversation_as_it_was(talking: Path) -> None:
    generator = Generator(talking)
    chat = Chat(generator)
    first = "".join(chat.reply("hello", 5))
    generator.context = 2 * (len(chat.cache.tokens) + 1)
    messages = chat.messages
    with pytest.raises(
        ContextError, match=rf"[0-9]+ tokens and 1 for .* context of {generator.context} tokens: shorten"
    ):
        chat.reply("no " * generator.context, 5)
    assert chat.messages == messages
    assert chat.messages[-1]["content"] == first
    assert "".join(chat.reply("more", 5))
    with pytest.raises(OptionError, match=r"^model is '.*', expected a Generator, as quantmoe.Generator\(folder\)"):
        Chat(str(talking))  # type: ignore[arg-type]
    for wrong in (5, None, ["hello"]):
        with pytest.raises(OptionError, match=r"^message is .*, expected text"):
            chat.reply(wrong)
    with pytest.raises(OptionError, match="stop is '#', expected a list of texts"):
        chat.reply("more", stop="#")
    assert len(chat.messages) >= 2


def test_the_command_goes_on_when_the_context_is_full(talking: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talking, tmp_path / "m")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    next(entry for entry in model.metadata_props if entry.key == "context_length").value = "120"
    onnx.save(model, folder / "model.onnx")
    lines = ["hello"] * 9 + ["too long " * 100, "more"]
    done = generate(folder, "--chat", "--max-new-tokens", 20, stdin="\n".join(lines))
    assert done.returncode == 1  # a message has no answer
    assert done.stderr.count("prompt: ") == 10
    assert "the model's context of 120 tokens is full: dropped the oldest turn; the rest is read again" in done.stderr
    assert (
        done.stderr.count("for the answer do not fit into the model's context of 120 tokens: shorten the prompt") == 1
    )


def generate(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess:
    command = [Path(sys.executable).with_name("quantmoe"), "generate", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True)


def test_a_shorter_context(talking: Path) -> None:
    done = generate(talking, "--ids", "1,2,3", "-n", 50, "-c", 10)
    assert (done.returncode, done.stdout.count(",")) == (0, 6), done.stderr
    assert "the answer ended at the model's context of 10 tokens" in done.stderr
    refused = generate(talking, "--ids", "1,2,3", "--context", 10**6)
    assert refused.returncode == 1
    assert "--context is 1000000, this model has" in refused.stderr


def test_command_line(talking: Path, exported) -> None:
    expected = "".join(Chat(Generator(talking)).reply("hello", 9))
    done = generate(talking, "--prompt", "hello", "--max-new-tokens", 9)
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    assert "prompt: " in done.stderr
    assert "decode: 9 tokens" in done.stderr
    raw = generate(talking, "--prompt", "hello", "--raw", "--max-new-tokens", 9, "--chunk", 1).stdout
    assert (
        raw == generate(exported("qwen3_moe", activations="float"), "--prompt", "hello", "--max-new-tokens", 9).stdout
    )
    turns = generate(talking, "--chat", "--max-new-tokens", 9, stdin="hello\n\nmore\n")
    assert turns.stdout.startswith(expected + "\n")
    assert turns.stderr.count("prompt: ") == 2
    stopped = generate(talking, "--prompt", "hello", "--stop", expected[3:5], "--stop", "nowhere").stdout
    assert stopped == expected[: expected.index(expected[3:5])] + "\n"
    sampled = [
        generate(talking, "--ids", "5,6", "--temperature", 3, "--top-k", 0, "--seed", s).stdout for s in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    for arguments, code, message in (
        (("--ids", "5", "--stop", "x"), 2, "--raw and --stop are of text"),
        (("--prompt", "a", "--stop", ""), 2, "is empty"),
        (("--prompt", ""), 2, "invalid value for --prompt: is empty"),
        (("--prompt", "a", "--save-state", "/nowhere/state"), 2, "/nowhere: no such folder"),
        (("--prompt", "a", "--save-state", "/"), 2, "/ is a folder, expected a file"),
        (("--ids", "5", "--chat"), 2, "--ids does not go with --chat"),
        (("--prompt", "a", "--top-p", 2), 1, "quantmoe: --top-p is 2.0, expected a number above 0, at most 1"),
        (
            ("--prompt", "a", "--temperature", 0, "--min-p", 2),
            1,
            "quantmoe: --min-p is 2.0, expected a number from 0 to 1",
        ),
        (("--prompt", "a", "--device", "cuda"), 1, "this onnxruntime has no CUDA provider; pip uninstall onnxruntime"),
        (("--prompt", b"\xff"), 2, "expected text in UTF-8"),
    ):
        done = generate(talking, *(os.fsdecode(a) if isinstance(a, bytes) else a for a in arguments))
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert message in done.stderr


def test_the_folder_s_processors_are_applied_or_named(talking: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talking, tmp_path / "model")
    config = folder / "generation_config.json"
    config.write_text('{"no_repeat_ngram_size": 1, "min_new_tokens": 3, "bad_words_ids": [[5]]}', encoding="utf-8")
    done = generate(folder, "--ids", "5,6,7", "--max-new-tokens", 20)
    tokens = [5, 6, 7, *map(int, done.stdout.split(","))]
    assert len(set(tokens)) == 23
    assert (
        done.stderr.count(f"{config}: not applied: bad_words_ids, min_new_tokens; transformers' tokens may differ\n")
        == 1
    )
    config.write_text('{"do_sample": true, "top_k": 20.0}', encoding="utf-8")
    done = generate(folder, "--ids", "5,6,7")
    assert (done.returncode, done.stderr) == (1, f"quantmoe: {config}: top_k is 20.0, expected an integer from 0\n")


@contextlib.contextmanager
def terminal(*arguments: object, command: str = "generate", **environment: str) -> Iterator[Terminal]:
    """A command in a terminal of its own."""
    master, slave = pty.openpty()
    code = "from quantmoe.exporter.command import main; main()"
    program = subprocess.Popen(
        [sys.executable, "-c", code, command, *map(str, arguments)],
        stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        env=os.environ | {"TERM": "xterm", "XDG_STATE_HOME": os.devnull} | environment,
    )  # fmt: skip
    os.close(slave)
    found = Terminal(master, program)
    reader = threading.Thread(target=found.read)
    reader.start()
    try:
        yield found
    finally:
        program.kill()
        program.wait()
        reader.join()
        os.close(master)


@dataclasses.dataclass
class Terminal:
    master: int
    program: subprocess.Popen
    shown: bytearray = dataclasses.field(default_factory=bytearray)

    def read(self) -> None:
        try:
            while data := os.read(self.master, 4096):
                self.shown.extend(data)
        except OSError:  # the terminal is gone
            pass

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, self.shown.decode(errors="replace")
            time.sleep(0.01)

    def until_asked(self, turn: int) -> None:
        self.until(lambda: self.shown.count(b"> ") == turn)

    def until_said(self, text: bytes) -> None:
        self.until(lambda: text in self.shown)

    def interrupt(self) -> None:
        self.program.send_signal(signal.SIGINT)


def test_interrupts_end_a_reply_and_not_the_conversation(talking: Path) -> None:
    """In a terminal: a reply is left with Ctrl-C, the next message is answered, Ctrl-D ends."""
    with terminal(talking, "--max-new-tokens", 100000) as shell:
        for turn, message in enumerate((b"hello\n", b"more\n"), 1):
            shell.until_asked(turn)
            length = len(shell.shown)
            shell.type(message)
            shell.until(lambda: len(shell.shown) > length + 40)  # noqa: B023  it answers
            shell.interrupt()
        shell.until_asked(3)
        shell.type(b"\x04")
        assert shell.program.wait(60) == 0
        assert b"Ctrl-C ends a reply" in shell.shown


@pytest.fixture(scope="module")
def endless(talking: Path, tmp_path_factory) -> Path:
    """A model whose runs of several tokens take hours, in very many short nodes."""
    folder = shutil.copytree(talking, tmp_path_factory.mktemp("endless") / "m")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    graph, helper = model.graph, onnx.helper
    count, condition, value, more = (
        helper.make_tensor_value_info(name, kind, [])
        for name, kind in (("count", 7), ("going", 9), ("counted", 7), ("goes_on", 9))
    )
    after = helper.make_tensor_value_info("after", 7, [])
    body = [
        helper.make_node("Identity", ["going"], ["goes_on"]),
        helper.make_node("Add", ["counted", "one"], ["after"]),
    ]
    one = helper.make_tensor("one", 7, [], [1])
    times, nothing, turned = (
        helper.make_tensor(n, 7, [], [v]) for n, v in (("times", 2**40), ("nothing", 0), ("unit", 1))
    )
    graph.initializer.extend([times, nothing, turned])
    logits = next(output for output in graph.output if output.name == "logits")
    for node in graph.node:
        node.output[:] = ["plain_logits" if name == "logits" else name for name in node.output]
    graph.node.extend(
        [
            helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
            helper.make_node("Squeeze", ["length"], ["tokens"]),
            helper.make_node("Sub", ["tokens", "unit"], ["others"]),
            helper.make_node("Mul", ["others", "times"], ["trips"]),
            helper.make_node(
                "Loop", ["trips", "", "nothing"], ["counts"],
                body=helper.make_graph(body, "body", [count, condition, value], [more, after], [one]),
            ),
            helper.make_node("Mul", ["counts", "nothing"], ["zero"]),
            helper.make_node("CastLike", ["zero", "plain_logits"], ["added"]),
            helper.make_node("Add", ["plain_logits", "added"], [logits.name]),
        ]
    )  # fmt: skip
    onnx.save(model, folder / "model.onnx")
    return folder


def test_ctrl_c_ends_the_run_of_a_prompt(endless: Path) -> None:
    """The engine is in one run, whose progress is shown: the conversation goes on, a single prompt ends the command."""
    with terminal(endless) as shell:
        for turn in (1, 2):
            shell.until_asked(turn)
            before = shell.shown.count(b"tokens/s")
            shell.type(b"hello\n")
            shell.until(lambda: shell.shown.count(b"tokens/s") > before)  # noqa: B023
            shell.interrupt()
        shell.until_asked(3)
        shell.type(b"\x04")
        assert shell.program.wait(60) == 0
        assert b"reading the prompt" in shell.shown
    with terminal(endless, "--prompt", "hello") as shell:
        shell.until_said(b"reading the prompt")
        shell.interrupt()
        assert shell.program.wait(60) == 130
        assert b"Traceback" not in shell.shown


def test_ctrl_c_ends_an_evaluation(endless: Path, tmp_path: Path) -> None:
    """The engine is in one run, also of the model that is compared."""
    (tmp_path / "text").write_text("hello " * 40, encoding="utf-8")
    with terminal(endless, "--text", tmp_path / "text", "--window", 8, command="evaluate") as shell:
        shell.until_said(b"reading")
        shell.interrupt()
        assert shell.program.wait(60) == 130
        assert b"Traceback" not in shell.shown


def test_another_thread_ends_a_run(endless: Path) -> None:
    generator, said = Generator(endless), []

    def generate() -> None:
        try:
            generator.generate([5, 6, 7], 1)
        except ModelError as error:
            said.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    while thread.is_alive():
        generator.interrupt()
        thread.join(0.01)
    assert said == [f"{endless / 'model.onnx'}: the run of 3 tokens after 0 was interrupted"]
    assert len(generator.generate([5], 1).tokens) == 1  # a run of one token, and the session goes on


def test_pasted_lines_are_one_message(talking: Path) -> None:
    with terminal(talking, "--max-new-tokens", 3) as shell:
        shell.until_asked(1)
        shell.type(b"\x1b[200~first line\nsecond line\n\nlast line\x1b[201~")
        shell.until_said(b"last line")
        assert b"prompt: " not in shell.shown
        shell.type(b"\n")
        shell.until_said(b"prompt: ")
        shell.until(lambda: shell.shown.endswith(b"> "))
        shell.type(b"\x04")
        assert shell.program.wait(60) == 0
        assert shell.shown.count(b"prompt: ") == 1


def test_an_answer_in_a_terminal_ends_with_the_context(talking: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(talking, tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": []}', encoding="utf-8")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    next(entry for entry in model.metadata_props if entry.key == "context_length").value = "700"
    onnx.save(model, folder / "model.onnx")
    context = Generator(folder).context
    for options, limit in (
        ([], f"the model's context of {context} tokens"),
        (["--max-new-tokens", 7], "--max-new-tokens 7"),
    ):
        with terminal(folder, "--prompt", "hello", *options) as shell:
            assert shell.program.wait(120) == 0
            shell.until_said(f"the answer ended at {limit}".encode())
    done = generate(folder, "--prompt", "hello", "--stop", "\n")
    if "decode: 512 tokens" in done.stderr:
        assert "the answer ended at --max-new-tokens 512" in done.stderr
    else:
        assert "the answer ended" not in done.stderr


def test_a_prompt_comes_from_a_file_or_standard_input(talking: Path, tmp_path: Path) -> None:
    expected = generate(talking, "--prompt", "héllo\n wörld", "--max-new-tokens", 9).stdout
    assert expected
    file, short = tmp_path / "prompt.txt", ("--max-new-tokens", 9)
    for ending in ("", "\n", "\r\n"):
        file.write_bytes(f"héllo\n wörld{ending}".encode())
        assert generate(talking, "--file", file, *short).stdout == expected
        for encoding in ("utf-8", "ascii", "cp1252"):
            command = [Path(sys.executable).with_name("quantmoe"), "generate", talking, *map(str, short)]
            environment = os.environ | {"PYTHONIOENCODING": encoding}
            done = subprocess.run(command, input=file.read_bytes(), capture_output=True, env=environment)
            assert done.returncode == 0, done.stderr
            assert done.stdout.decode(encoding) == expected.encode(encoding, "backslashreplace").decode(encoding)
    assert generate(talking, "--file", "-", *short, stdin="héllo\n wörld").stdout == expected
    closed = f"exec {Path(sys.executable).with_name('quantmoe')} generate {talking} <&-"
    done = subprocess.run(["sh", "-c", closed], capture_output=True, text=True)
    assert done.returncode == 2
    assert "standard input: expected a prompt, found no text" in done.stderr
    file.write_bytes(b"\xff")
    for arguments in (["--file", file], []):
        command = [Path(sys.executable).with_name("quantmoe"), "generate", talking, *map(str, arguments)]
        done = subprocess.run(command, input=b"\xff", capture_output=True, text=False)
        assert done.returncode == 2
        assert b"expected text in UTF-8" in done.stderr
    file.write_text("hello\n", encoding="utf-8")
    turns = generate(talking, "--chat", "--file", file, *short, stdin="more\n")
    assert turns.stderr.count("prompt: ") == 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_a_pipe_cannot_encode_is_escaped(talking: Path, tmp_path: Path, encoding: str) -> None:
    """Paths, answers and JSON; nothing ends in a UnicodeEncodeError."""
    folder = shutil.copytree(talking, tmp_path / "日本語 é")
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    executable = Path(sys.executable).with_name("quantmoe")
    for arguments in (
        ["inspect", folder], ["inspect", folder, "--json"], ["inspect", folder, "--explain"],
        ["inspect", tmp_path / "ø日"],
        ["generate", folder, "--prompt", "日本語", "--max-new-tokens", "40"],
    ):  # fmt: skip
        done = subprocess.run([executable, *map(str, arguments)], capture_output=True, env=environment)
        assert b"Traceback" not in done.stderr, done.stderr
        assert done.returncode == (arguments[1] not in (folder,)), done.stderr
    shown = subprocess.run([executable, "inspect", str(folder)], capture_output=True, env=environment).stdout
    assert str(folder).encode(encoding, "backslashreplace") in b"".join(shown.splitlines())
    prompts = tmp_path / "prompts"
    prompts.write_text("日本語\nhello\n", encoding="utf-8")
    run = [str(executable), "generate", str(folder), "--prompts", str(prompts), "--max-new-tokens", "40"]
    plain, piped = (subprocess.run(run, capture_output=True, env=env) for env in (os.environ, environment))
    answers = [json.loads(line) for line in plain.stdout.decode().splitlines()]
    assert any(not answer.isascii() for answer in answers)
    assert [json.loads(line) for line in piped.stdout.decode(encoding).splitlines()] == answers


#: a template of a family, with tools and an argument
CALLING = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<tool_call>{"name": .., "arguments": ..}</tool_call>' }}{% endif %}
{%- for m in messages %}<s>{{ m.role }}
{%- if not loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<s>assistant{{ '<think></think>' if enable_thinking is false }}{% endif %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SAID = '<think>why</think>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


class Scripted:
    """A tokenizer's ids of texts, as a model that says them gives them."""

    def __init__(self, model: Generator, text: Text, replies: list[str]):
        self.asked: list[str] = []
        replies_left = iter(replies)
        stream = model.stream

        def say(ids, max_new_tokens, stop, sampling, cache, constraint=None):
            found = stream(ids, 1, stop, sampling=sampling, cache=cache, constraint=constraint)
            next(found)
            self.asked.append(text.decode([*cache.tokens[: len(cache.tokens)]]))
            found.tokens.clear()
            tokens = iter(text.ids(next(replies_left)))
            found._steps = ((token, None) for token in tokens)
            return found

        self.stream = say


@pytest.fixture
def calling(talking: Path, tmp_path: Path) -> Path:
    folder = shutil.copytree(talking, tmp_path / "calling")
    (folder / "chat_template.jinja").write_text(CALLING, encoding="utf-8")
    return folder


def test_tools_and_arguments_reach_the_template(calling: Path) -> None:
    text = Text(calling)
    messages = [{"role": "user", "content": "hello"}]

    def rendered(**options) -> str:
        return text.decode(text.encode(messages, arguments=TemplateArguments(**options)))

    assert '"name": "weather"' in rendered(tools=[WEATHER])
    assert "weather" not in rendered(tools=[WEATHER], tool_choice="none")
    assert rendered(variables={"enable_thinking": False}) == rendered() + "<think></think>"
    for options, message in (
        ({"tools": "weather"}, "tools is 'weather', expected a list of"),
        ({"tools": [{"name": "weather"}]}, "tools is"),
        ({"tool_choice": "any"}, "tool_choice is 'any', expected one of: auto, none"),
        ({"variables": {"messages": []}}, "variables has messages, which messages and tools give"),
        ({"variables": "a"}, "variables is 'a', expected names and values"),
    ):
        with pytest.raises(OptionError, match=message):
            TemplateArguments(**options)
    with pytest.raises(
        OptionError,
        match="a chat template, and the model has none: describe tools in the prompt, or put a",
    ):
        Text(calling, raw=True).encode(messages, arguments=TemplateArguments(tools=[WEATHER]))
    for arguments in (TemplateArguments(tools=[WEATHER]), TemplateArguments(variables={"enable_thinking": False})):
        with pytest.raises(OptionError, match="tools and variables need a chat template"):
            Chat(Generator(calling), Text(calling, raw=True), arguments=arguments)


def test_a_reply_is_kept_as_its_parts(calling: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and reasoning are fields of the message. A result follows, and the template renders both."""
    model, text = Generator(calling), Text(calling)
    script = Scripted(model, text, [SAID, "Sunny.", "Bye."])
    monkeypatch.setattr(model, "stream", script.stream)
    chat = Chat(model, text, arguments=TemplateArguments([WEATHER]))
    deltas = [*chat.deltas("hello")]
    assert "".join(delta.reasoning for delta in deltas) == "why"
    assert "".join(delta.content for delta in deltas) == "I look."
    (call,) = chat.messages[-1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert chat.messages[-1]["reasoning_content"] == "why"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sun"}
    assert "".join(chat.reply([result])) == "Sunny."
    assert chat.messages[-2:] == [result, {"role": "assistant", "content": "Sunny."}]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>' in script.asked[-1]
    for wrong in ([], [{"content": "sun"}], 5, [result | {"content": 5}]):
        with pytest.raises(OptionError, match="expected text, or messages with role and content"):
            chat.reply(wrong)
    with pytest.raises(OptionError, match="needs a chat template: without one, put it into the first message"):
        Chat(model, Text(calling, raw=True)).set_system("Be kind.")


def test_commands_of_a_conversation(talking: Path, tmp_path: Path) -> None:
    """What users of llama.cpp and Ollama type; /save shows what came of it."""
    folder, file = shutil.copytree(talking, tmp_path / "m"), tmp_path / "saved.json"
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    (tmp_path / "other").write_text("a", encoding="utf-8")

    def saved() -> list[tuple[str, str]]:
        messages = json.loads(file.read_text(encoding="utf-8"))["messages"]
        return [(message["role"], message["content"]) for message in messages]

    with terminal(folder, "--max-new-tokens", 3, "--system", "Be kind.") as shell:
        turn = 1

        def type_lines(*lines: str) -> None:
            nonlocal turn
            for line in lines:
                shell.until_asked(turn)
                shell.type(line.encode() + b"\n")
                turn += 1

        type_lines("/regen", "hello", "/regen", f"/save {file}", "/help")
        shell.until_said(b"set the system prompt")
        shell.until_said(b"/regen: there is no answer yet")
        assert shell.shown.count(b"prompt: ") == 2
        first = saved()
        assert first[:2] == [("system", "Be kind."), ("user", "hello")]
        assert [role for role, _ in first] == ["system", "user", "assistant"]
        type_lines("/system Be brief.", "/clear")
        shell.until_asked(turn)
        shell.type(b'"""two\n')
        shell.until_said(b"... ")
        shell.type(b'/clear lines"""\n')
        turn += 1
        shell.until_asked(turn)
        shell.type(b"and\\\nmore\n")
        turn += 1
        type_lines(f"/save {file}", "/set system Be fast.", "/nothing", f"/load {tmp_path / 'other'}", "/load")
        shell.until_said(b"/nothing is no command")
        shell.until_said(b"/load: expected the name of a file")
        assert b"other: expected a conversation that /save wrote" in shell.shown
        said = saved()
        assert said[0] == ("system", "Be brief.")
        assert [content for role, content in said if role == "user"] == ["two\n/clear lines", "and\nmore"]
        type_lines(f"/load {file}", "/system", "/regen", f"/save {file}", f"/save {tmp_path / 'other'}")
        shell.until(lambda: shell.shown.count(b"other: expected a conversation") == 2)
        again = saved()
        assert again == said[1:]  # the likeliest tokens once more, without the system prompt
        assert (tmp_path / "other").read_text(encoding="utf-8") == "a"
        type_lines("/bye")
        assert shell.program.wait(60) == 0


@contextlib.contextmanager
def asking(*arguments: object, **environment: str) -> Iterator[tuple[Terminal, Callable[..., None]]]:
    """A conversation in a terminal, and what types lines into it, each when it is asked for."""
    with terminal(*arguments, **environment) as shell:
        turn = 0

        def type_lines(*lines: str) -> None:
            nonlocal turn
            for line in lines:
                turn += 1
                shell.until_asked(turn)
                shell.type(line.encode())

        yield shell, type_lines


def test_answers_are_set_as_in_ollama(talking: Path, tmp_path: Path) -> None:
    folder, file = shutil.copytree(talking, tmp_path / "m"), tmp_path / "note.txt"
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    file.write_text("the sea", encoding="utf-8")
    with asking(folder, "--max-new-tokens", 3, "--temperature", 0) as (shell, type_lines):
        type_lines("/set parameter num_predict 5\n", "hello\n")
        shell.until_said(b"decode: 5 tokens")
        type_lines("/set format json\n", "an object\n")
        shell.until(lambda: re.search(rb'\{[\s"}]', shell.shown))
        type_lines("/set noformat\n")
        type_lines(
            "/set parameter temperature 0.7\n", '/set parameter stop "\\"\n', "/set system Be kind.\n", "/show\n"
        )
        for line in ("temperature         0.7", "max_new_tokens      5", "system              Be kind."):
            shell.until_said(line.encode())
        shell.until_said(b"stop                ['")
        type_lines(f"/read {file}\n", "is blue\n", f"/save {tmp_path / 'saved'}\n")
        for line, said in (
            ("/set parameter temperature hot", "temperature is 'hot', expected a number from 0"),
            ("/set parameter num_predict 0", "num_predict is 0, expected a number of tokens, or -1 for no limit"),
            ("/set parameter num_ctx 5", "num_ctx cannot be set, expected one of: temperature, "),
            ("/set format xml", "/set format xml: expected one of: parameter NAME X, system TEXT, format json"),
            ("/set think", "this model's chat template has no enable_thinking or thinking: reasoning cannot be set"),
            ("/set think low", "this model's chat template has no reasoning_effort: reasoning cannot be set"),
            ("/read", "/read: expected the name of a file"),
            (f"/read {folder / 'model.onnx'}", "model.onnx: expected text in UTF-8"),
            ("/set parameter num_predict -1", ""),
            ("/show", "max_new_tokens      -1"),
            ("/bye", ""),
        ):
            type_lines(line + "\n")
            shell.until_said(said.encode())
        assert shell.program.wait(60) == 0
    messages = json.loads((tmp_path / "saved").read_text(encoding="utf-8"))["messages"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == [
        "Be kind.",
        "hello",
        "an object",
        "the sea\nis blue",
    ]


def test_reasoning_is_set_as_in_ollama(calling: Path) -> None:
    text, messages = Text(calling), [{"role": "user", "content": "hi"}]
    without = text.encode(messages, arguments=TemplateArguments(variables={"enable_thinking": False}))
    with asking(calling, "--max-new-tokens", 1) as (shell, type_lines):
        type_lines("/set nothink\n", "hi\n")
        shell.until_said(f"prompt: {len(without)} tokens".encode())
        type_lines("/set think\n", "/clear\n", "hi\n", "/quit\n")
        assert shell.program.wait(60) == 0
    assert len(text.encode(messages)) < len(without)


def test_typed_lines_are_kept_for_the_next_conversation(talking: Path, tmp_path: Path) -> None:
    state, up = str(tmp_path / "state"), "\x1b[A"
    with asking(talking, "--max-new-tokens", 1, XDG_STATE_HOME=state) as (shell, type_lines):
        type_lines("hello\n", "/set nohistory\n", "secret\n", "/set history\n", "/bye\n")
        assert shell.program.wait(60) == 0
    file = tmp_path / "state" / "quantmoe" / "history"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "hello" in file.read_text(encoding="utf-8")
    assert "secret" not in file.read_text(encoding="utf-8")
    with asking(talking, "--max-new-tokens", 1, XDG_STATE_HOME=state) as (shell, type_lines):
        type_lines(3 * up + "\n", "/bye\n")  # before /bye and /set nohistory
        assert shell.program.wait(60) == 0
        assert b"hello" in shell.shown
        assert b"decode: 1 token" in shell.shown


def test_options_of_the_template(calling: Path, tmp_path: Path) -> None:
    """--system, --tools and --template-arg; what is wrong with them is named."""
    short = ("--max-new-tokens", 1, "--prompt", "hi")
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([WEATHER]), encoding="utf-8")
    lengths = [
        int(generate(calling, *short, *options).stderr.split("prompt: ")[1].split()[0])
        for options in ((), ("--system", "Be brief."), ("--tools", tools), ("--template-arg", "enable_thinking=false"))
    ]
    assert min(lengths[1:]) > lengths[0]
    tools.write_text('{"name": "weather"}', encoding="utf-8")
    for options, message in (
        (("--tools", tools), "tools is"),
        (("--template-arg", "enable_thinking"), "expected NAME=JSON"),
        (("--template-arg", "tools=[]"), "variables has tools"),
        (("--raw", "--system", "a"), "--raw uses none"),
    ):
        done = generate(calling, *short, *options)
        assert done.returncode == 2
        assert message in " ".join(done.stderr.split())


def test_a_conversation_samples_as_the_folder_says(talking: Path, tmp_path: Path) -> None:
    """generation_config.json decides, as on the command line; an argument replaces it."""
    folder = shutil.copytree(talking, tmp_path / "m")
    generator = Generator(folder)
    assert Chat(generator).sampling is None
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 3.0}', encoding="utf-8")
    chat = Chat(generator)
    assert chat.sampling == Sampling(3.0)
    said = {"".join(Chat(generator).reply("hello", 20)) for _ in range(3)}
    assert len(said) > 1
    likeliest = {"".join(Chat(generator).reply("hello", 20, sampling=Sampling(temperature=0))) for _ in range(2)}
    assert len(likeliest) == 1


def test_a_call_is_required(calling: Path, tmp_path: Path) -> None:
    """A model of random weights calls the function that it must, with arguments of its schema."""
    folder = shutil.copytree(calling, tmp_path / "m")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}', encoding="utf-8")
    properties = {"kind": {"enum": ["wind", "rain"]}}
    other = {"type": "function", "function": {"name": "other", "parameters": {
        "type": "object", "properties": properties, "required": ["kind"], "additionalProperties": False}}}  # fmt: skip
    tools, model = [WEATHER, other], Generator(folder)
    for choice in ("other", "required"):
        chat = Chat(model, arguments=TemplateArguments([other] if choice == "required" else tools, choice))
        "".join(chat.reply("hello", 200, sampling=Sampling(2.0, seed=1)))
        assert chat.last.finish_reason == "stop"
        (call,) = chat.messages[-1]["tool_calls"]
        assert call["function"]["name"] == "other"
        assert json.loads(call["function"]["arguments"])["kind"] in properties["kind"]["enum"]
        assert not chat.messages[-1]["content"]
    with pytest.raises(OptionError, match="expected one of: auto, none, required, weather, other"):
        TemplateArguments(tools, "no")
    with pytest.raises(OptionError, match="tool_choice is 'required', expected one of: auto, none"):
        TemplateArguments(tool_choice="required")
    (folder / "chat_template.jinja").write_text(CALLING.replace("<tool_call>", "<call>"), encoding="utf-8")
    with pytest.raises(OptionError, match="tool_choice asks for a call, and calls of this chat template cannot"):
        Chat(model, arguments=TemplateArguments(tools, "other")).reply("hello")
