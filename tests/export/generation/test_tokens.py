"""Tokens are AutoTokenizer's: in the tokenizer.json of an export, in what reads a folder, and from turn to turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny import make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.chat_template import folder_turns, load_template
from quantmoe.exporter.folder.json_files import read_object
from quantmoe.exporter.folder.tokenizer import end_tokens, load_tokenizer, special_tokens, stop_tokens
from quantmoe.exporter.targets import CPU
from quantmoe.exporter.writing.readme import readme
from quantmoe.exporter.writing.tokenizer import write_tokenizer
from quantmoe.runtime.chat import Text

TEXTS = ["<|im_start|>a mixture<|im_end|> of  <|im_start|> experts", "router's <b> é", " token"]


def edit(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(read_object(path) | change), encoding="utf-8")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with the files that lie beside a checkpoint's weights."""
    folder = tmp_path / "source"
    make_tokenizer().save_pretrained(folder)
    edit(folder / "config.json", {"model_type": "qwen3_moe"})
    return folder


def written(source: Path) -> Path:
    """A folder with the tokenizer of an export."""
    out = source.with_name("out")
    out.mkdir(exist_ok=True)
    assert write_tokenizer(source, lambda name: out / name) == ""
    for path in source.glob("*.json"):
        if path.name != "tokenizer.json":
            (out / path.name).write_bytes(path.read_bytes())
    return out


def ids(tokenizer: Any, special: bool) -> list[list[int]]:
    if isinstance(tokenizer, Tokenizer):
        return [tokenizer.encode(text, add_special_tokens=special).ids for text in TEXTS]
    return [tokenizer(text, add_special_tokens=special).input_ids for text in TEXTS]


def check(source: Path) -> None:
    """Check that a folder's readers, the exported file by itself and transformers in both folders give the same ids."""
    out, auto = written(source), AutoTokenizer.from_pretrained(source)
    plain = Tokenizer.from_file(str(out / "tokenizer.json"))
    for special in (True, False):
        wanted = ids(auto, special)
        assert ids(load_tokenizer(source), special) == wanted
        assert ids(plain, special) == wanted
        assert ids(load_tokenizer(out), special) == wanted
        assert ids(AutoTokenizer.from_pretrained(out), special) == wanted
    assert special_tokens(source) == special_tokens(out) == auto.special_tokens_map


def test_a_complete_file_stays_as_it_is(source: Path) -> None:
    assert (written(source) / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    check(source)


@pytest.mark.parametrize(
    "change",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 64},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<pad>",
            }
        },
    ],
)
def test_truncation_and_padding_are_left_out(source: Path, change: dict[str, Any]) -> None:
    edit(source / "tokenizer.json", change)
    check(source)
    assert read_object(source.with_name("out") / "tokenizer.json")[next(iter(change))] is None


FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def added(first: int, *names: str) -> dict[str, Any]:
    return {str(first + i): FLAGS | {"content": name} for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", lambda n: {"added_tokens_decoder": added(n, "<|im_start|>", "<|im_end|>")}),
        ("tokenizer_config.json", lambda n: {"added_tokens_decoder": {n: {"content": "<|im_end|>", "rstrip": True}}}),
        ("added_tokens.json", lambda n: {"<|im_end|>": n + 1, "<|im_start|>": n}),
        ("tokenizer_config.json", lambda n: {"extra_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
        ("tokenizer_config.json", lambda n: {"extra_special_tokens": {"begin_token": "<|im_start|>"}}),
        ("tokenizer_config.json", lambda n: {"model_specific_special_tokens": {"begin_token": "<|im_start|>"}}),
        ("tokenizer_config.json", lambda n: {"additional_special_tokens": ["<|im_end|>"]}),
        ("special_tokens_map.json", lambda n: {"eos_token": FLAGS | {"content": "<|im_end|>"}}),
        ("tokenizer_config.json", lambda n: {"image_token": "<|im_start|>", "add_bos_token": True}),
    ],
)  # fmt: skip
def test_tokens_that_other_files_name(source: Path, file: str, change: Callable[[int], dict[str, Any]]) -> None:
    edit(source / file, change(len(AutoTokenizer.from_pretrained(source))))
    check(source)


def test_special_tokens_of_added_tokens_json_are_special(source: Path) -> None:
    edit(source / "added_tokens.json", {"<|im_end|>": len(AutoTokenizer.from_pretrained(source))})
    edit(source / "special_tokens_map.json", {"eos_token": "<|im_end|>"})
    auto, ours = AutoTokenizer.from_pretrained(source), load_tokenizer(source)
    given = auto("a<|im_end|>", add_special_tokens=False).input_ids
    assert ours.decode(given) == auto.decode(given, skip_special_tokens=True) == "a"


@pytest.mark.parametrize("field", ["extra_special_tokens", "model_specific_special_tokens"])
def test_named_tokens_are_variables_of_templates(source: Path, field: str) -> None:
    template = "{{ begin_token }}{{ bos_token }}{{ messages[0].content }}{{ add_bos_token }}"
    tokens = {field: {"begin_token": "<b>"}, "add_bos_token": False}
    edit(source / "tokenizer_config.json", tokens | {"chat_template": template})
    said = [{"role": "user", "content": "a"}]
    wanted = AutoTokenizer.from_pretrained(source).apply_chat_template(said, tokenize=False)
    assert load_template(source).render(said) == wanted == "<b><s>a"


@pytest.mark.parametrize("named", [True, False])
def test_templates_take_tools_and_variables(source: Path, named: bool) -> None:
    """Also a template of its own for tools, messages without content, and reasoning under any of its names."""
    default = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ enable_thinking }}"
    template = [{"name": "default", "template": default}, {"name": "tool_use", "template": "tools: " + default}]
    edit(source / "tokenizer_config.json", {"chat_template": template if named else default})
    auto, ours = AutoTokenizer.from_pretrained(source), load_template(source)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    for message in (
        {"role": "user", "content": "<a>"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "a", "reasoning_content": "b"},
        {"role": "assistant", "content": "a", "reasoning": "b"},
        {"role": "assistant", "content": "a", "thinking": "b", "reasoning_content": None},
    ):
        for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
            for variables in ({}, {"enable_thinking": False}):
                wanted = auto.apply_chat_template(
                    [message], tools=tools, tokenize=False, add_generation_prompt=True, **variables
                )
                assert ours.render([message], tools=tools, **variables) == wanted


@pytest.mark.parametrize("default", [True, False])
def test_templates_in_files_of_their_own(source: Path, default: bool) -> None:
    """Templates with names are read as transformers saves them: additional_chat_templates/NAME.jinja."""
    edit(source / "tokenizer_config.json", {"chat_template": "old"})
    others = source / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text("tools: {{ messages[0].content }}", encoding="utf-8")
    if default:
        (source / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    auto, said = AutoTokenizer.from_pretrained(source), [{"role": "user", "content": "a"}]
    if not default:
        with pytest.raises(ValueError, match="no default"):
            auto.apply_chat_template(said, tokenize=False)
        with pytest.raises(ModelError, match="additional_chat_templates: chat_template has the templates tool_use, "):
            load_template(source)
        return
    ours = load_template(source)
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        assert ours.render(said, tools) == auto.apply_chat_template(said, tools=tools, tokenize=False)


def test_what_is_no_token_is_named(source: Path) -> None:
    for wrong in ({"x": {"content": "a"}}, {"1": {}}, {"1": "a", "2": 3}, []):
        edit(source / "tokenizer_config.json", {"added_tokens_decoder": wrong})
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read as special tokens"):
            load_tokenizer(source)


@pytest.mark.parametrize("begins", [True, False])
def test_vocabulary_and_merges_become_one_file(source: Path, begins: bool) -> None:
    """Also the token at the beginning that only the configuration asks for, which is there once."""
    Tokenizer.from_file(str(source / "tokenizer.json")).model.save(str(source))
    (source / "tokenizer.json").unlink()
    edit(source / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": begins})
    out, auto = written(source), AutoTokenizer.from_pretrained(source)
    for special in (True, False):
        wanted = ids(auto, special)
        assert [found.count(auto.bos_token_id) for found in wanted] == [int(begins and special)] * len(TEXTS)
        assert ids(Tokenizer.from_file(str(out / "tokenizer.json")), special) == wanted
        assert ids(AutoTokenizer.from_pretrained(out), special) == wanted
    assert load_tokenizer(out).decode(ids(auto, False)[0], skip_special_tokens=False) == TEXTS[0]


def test_mistrals_file_becomes_one_file(tmp_path: Path) -> None:
    """Without mistral-common, whose tokenizer is no tokenizers.Tokenizer."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    octets = [*(bytes([i]) for i in range(256)), b"th", b"the", b" the", "é".encode()]
    vocabulary = [{"rank": i, "token_bytes": b64encode(word).decode()} for i, word in enumerate(octets)]
    special = [{"rank": i, "token_str": text} for i, text in enumerate(["<unk>", "<s>", "</s>", "[INST]"])]
    config = {"pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "default_num_special_tokens": 8}
    edit(source / "tekken.json", {"config": config, "vocab": vocabulary, "special_tokens": special})
    edit(source / "config.json", {"model_type": "mixtral"})
    assert write_tokenizer(source, lambda name: out / name) == ""
    auto, plain = AutoTokenizer.from_pretrained(source), Tokenizer.from_file(str(out / "tokenizer.json"))
    assert ids(plain, True) == ids(auto, True)
    assert plain.encode("[INST]thé").ids == [3, 8 + 256, 8 + 259]
    edit(out / "config.json", {"model_type": "mixtral"})
    assert ids(AutoTokenizer.from_pretrained(out), True) == ids(auto, True)


def test_a_tokenizer_that_needs_the_checkpoints_code_is_left_out(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenization.py").write_text("raise SystemExit('this ran')", encoding="utf-8")
    (source / "tiktoken.model").write_text("IQ== 0\n", encoding="utf-8")
    change = {"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}, "tokenizer_class": "Own"}
    edit(source / "tokenizer_config.json", change)
    out = source.with_name("out")
    out.mkdir()
    assert "transformers makes no tokenizer of" in write_tokenizer(source, lambda name: out / name)
    assert not [*out.iterdir()]


def test_a_model_without_a_tokenizer_is_exported(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """With status 0 and a warning, which the folder's README has, too."""
    source = shutil.copytree(checkpoint(), tmp_path / "source")
    (source / "tokenizer.json").unlink()
    (source / "tiktoken.model").write_text("IQ== 0\n", encoding="utf-8")
    change = {"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}, "tokenizer_class": "Own"}
    edit(source / "tokenizer_config.json", change)
    command, out = Path(sys.executable).with_name("quantmoe"), tmp_path / "out"
    done = subprocess.run([command, "export", source, out], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = "no tokenizer.json: transformers makes no tokenizer of the checkpoint's files: "
    assert said in " ".join((done.stdout + done.stderr).split())
    assert said in (out / "README.md").read_text(encoding="utf-8")
    assert (out / "model.onnx").exists()
    assert not (out / "tokenizer.json").exists()


def test_a_rule_that_no_file_can_say_is_named(tmp_path: Path) -> None:
    """Transformers takes spaces out of the texts of this one, which no tokenizer.json does."""
    known = [("<unk>", 0.0), *((f"\u2581{word}", -1.0) for word in ("a", ",", ".", "!")), ("\u2581", -2.0)]
    tokenizer = Tokenizer(models.Unigram(known, unk_id=0))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    source, out = tmp_path / "source", tmp_path / "out"
    out.mkdir()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=True
    ).save_pretrained(source)
    edit(source / "config.json", {"model_type": "ernie4_5_moe"})
    remark = write_tokenizer(source, lambda name: out / name)
    assert remark.startswith("tokenizer.json does not have clean_up_tokenization_spaces: AutoTokenizer takes spaces")
    assert "are the text '" in remark
    assert len(remark.splitlines()) == 1
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    shown = readme(CPU, "1.21", remark=f"{remark}\nanother")
    assert shown.endswith(f"\n\n{remark}\n\nanother\n")


def test_special_tokens_that_are_split_are_named(source: Path) -> None:
    edit(source / "tokenizer_config.json", {"split_special_tokens": True, "clean_up_tokenization_spaces": True})
    out = source.with_name("out")
    out.mkdir()
    remark = write_tokenizer(source, lambda name: out / name)  # spaces stay in texts of a BPE
    assert remark.startswith("tokenizer.json does not have split_special_tokens: AutoTokenizer splits special tokens")
    assert "'a <pad> b' is [" in remark
    assert len(remark.splitlines()) == 1
    assert (out / "tokenizer.json").exists()


def test_what_no_file_can_say_is_no_file(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = PreTrainedTokenizerFast._decode
    monkeypatch.setattr(PreTrainedTokenizerFast, "_decode", lambda *a, **k: decode(*a, **k).replace("Fluß", "Fluss"))
    out = source.with_name("out")
    out.mkdir()
    remark = write_tokenizer(source, lambda name: out / name)
    assert remark.startswith("no tokenizer.json: it cannot say what transformers does")
    assert "are the text 'Der Fluss \\xfcberquert" in remark
    assert not [*out.iterdir()]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path, lambda name: tmp_path / name) == ""
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 7}, [1, 2]),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, [0]),
        ({"eos_token_id": []}, {"eos_token_id": 7}, [7]),
        ({"eos_token_id": None}, {"eos_token_id": [], "text_config": {"eos_token_id": 3}}, [3]),
        ({"eos_token_id": []}, {}, []),
    ],
)
def test_one_rule_says_where_texts_end(tmp_path: Path, generation: Any, config: Any, ends: list[int]) -> None:
    for name, fields in (("generation_config.json", generation), ("config.json", config)):
        edit(tmp_path / name, fields)
    assert end_tokens(generation, config) == stop_tokens(tmp_path) == ends


@pytest.mark.parametrize(
    ("generation", "config", "file"),
    [
        ({"eos_token_id": 9}, {"vocab_size": 9}, "generation_config"),
        ({"eos_token_id": [2, -1]}, {"vocab_size": 9}, "generation_config"),
        ({"eos_token_id": True}, {"vocab_size": 9}, "generation_config"),
        ({}, {"eos_token_id": 9, "vocab_size": 9}, "config"),
        ({}, {"vocab_size": 99, "text_config": {"eos_token_id": 9, "vocab_size": 9}}, "config"),
    ],
)
def test_an_end_outside_the_vocabulary_is_named(tmp_path: Path, generation: Any, config: Any, file: str) -> None:
    for name, fields in (("generation_config.json", generation), ("config.json", config)):
        edit(tmp_path / name, fields)
    with pytest.raises(ModelError, match=rf"/{file}\.json: eos_token_id is .*, expected a token id from 0 to 8"):
        stop_tokens(tmp_path)


def test_no_named_template(source: Path) -> None:
    for none in ([], {}, [5]):
        edit(source / "tokenizer_config.json", {"chat_template": none})
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template has no template, expected"):
            load_template(source)


def test_templates_by_name_without_a_default(source: Path) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}]
    edit(source / "tokenizer_config.json", {"chat_template": named})
    with pytest.raises(ValueError, match="no default"):
        AutoTokenizer.from_pretrained(source).apply_chat_template([{"role": "user", "content": "a"}])
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template has the templates rag, tool_use,"):
        load_template(source)
    assert Text(source, raw=True).template is None
    assert "expected one named default" in folder_turns(source)[1]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "maximum recursion depth exceeded"),
        ("{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "too many statically nested blocks"),
        ("{{ '\ud800' }}", r"renders '\ud800', half of a surrogate pair"),
        ("{{ 'a' * 10**13 }}", "out of memory"),
    ],
)
def test_a_template_that_fails_is_one_line(tmp_path: Path, template: str, message: str) -> None:
    edit(tmp_path / "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(ModelError) as failed:
        load_template(tmp_path).render([{"role": "user", "content": "a"}])
    for text in (str(failed.value), folder_turns(tmp_path)[1]):
        assert text.startswith(f"{tmp_path / 'tokenizer_config.json'}: {message}")


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set x = namespace(l='a') %}{% for i in range(36) %}{% set x.l = x.l + x.l %}{% endfor %}",
    ],
)
def test_a_template_that_takes_too_much_ends(tmp_path: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export goes on, and says which file it was."""
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    turns, reason = folder_turns(tmp_path)
    assert turns == {}
    assert reason.startswith(f"{tmp_path / 'chat_template.jinja'}: ")
    assert "longer than" in reason or "out of memory" in reason


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no processor time")
def test_a_template_on_a_loaded_machine_keeps_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of processor time are not those of the clock: here the process waits longer than it may compute."""
    wait = tmp_path / "wait"
    wait.mkdir()
    (wait / "sitecustomize.py").write_text("import time\ntime.sleep(0.5)", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(wait), *sys.path])
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    monkeypatch.setattr("quantmoe.exporter.folder.chat_template.SECONDS", 0.04)
    turns, reason = folder_turns(tmp_path)
    assert (turns["chat.begin"], turns["chat.reply"], reason) == ("<user>", "</><assistant>", "")
    monkeypatch.setattr("quantmoe.exporter.folder.chat_template.CLOCK", 0.4)
    assert folder_turns(tmp_path) == (
        {},
        f"{tmp_path / 'chat_template.jinja'}: rendering takes longer than 0.4 s",
    )


def test_no_module_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this ran')", encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert folder_turns(tmp_path) == (
        {},
        f"{tmp_path / 'chat_template.jinja'}: does more than put texts around messages",
    )
