"""Caches on disk: generation goes on from them as if the prompt had just been run; another model refuses them."""

from __future__ import annotations

import os
import shutil
import sys
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from export.architectures.test_hybrid import grown
from export.generation.test_generate import PROMPT
from safetensors.numpy import load_file, save_file
from support.harness.sweeps import every
from typer.testing import CliRunner

from quantmoe.exporter.cli import app, main
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.safetensors_file import DTYPES, read_header, write_safetensors
from quantmoe.runtime import saved_states
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.saved_states import CHECKSUM, MODEL

FLOAT = {"activations": "float", "logits": "last"}


@pytest.fixture(params=every(["qwen3_moe", "window", "deepseek_v3", "qwen3_5_moe_text"], 2))
def folder(exported, request):
    if request.param == "window":
        return exported("qwen3_next", logits=5, state_window=5)
    return exported(request.param, **FLOAT)


@pytest.mark.parametrize("kind", [lambda generator: generator, grown], ids=["in place", "grown"])
def test_generation_goes_on(folder, tmp_path, kind):
    generator = kind(Generator(folder, chunk=8))
    cache = generator.cache()
    cache.tail = 3
    said = generator.generate(PROMPT, 6, cache=cache).tokens
    generator.save_cache(cache, tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    other = kind(Generator(folder))
    again = other.load_cache(tmp_path / "state")
    assert again.tokens == PROMPT + said[:-1]
    for length, more in ((28, said[-1:]), (23, [5, 6]), (20, [9])):
        for each in (cache, again):
            each.rewind(length)
        want = generator.generate(more, 5, cache=cache, logits=True)
        found = other.generate(more, 5, cache=again, logits=True)
        assert found.tokens == want.tokens
        assert found.logits.tobytes() == want.logits.tobytes()
        generator.save_cache(cache, tmp_path / "state")
        again = other.load_cache(tmp_path / "state")
    assert again.keep([*PROMPT[:20], 11, 7]) == 20


@pytest.fixture
def saved(exported, tmp_path):
    generator = Generator(exported("qwen3_moe", **FLOAT))
    cache = generator.cache()
    cache.append(PROMPT)
    generator.save_cache(cache, tmp_path / "state")
    return generator, tmp_path / "state"


def write(path: Path, tensors: dict[str, np.ndarray | None]) -> None:
    """A file whose checksum is right, of the tensors that are not None."""
    write_safetensors(path, {n: array for n, array in tensors.items() if array is not None and n != CHECKSUM}, CHECKSUM)


def test_another_model_is_refused(saved, exported, tmp_path):
    generator, path = saved
    shutil.copytree(generator.path.parent, tmp_path / "model")
    assert Generator(tmp_path / "model").load_cache(path).tokens == PROMPT
    model = ir.load(tmp_path / "model" / "model.onnx")
    for identity in (generator.identity[::-1], "short"):
        model.metadata_props["identity"] = identity
        ir.save(model, tmp_path / "model" / "model.onnx")
        with pytest.raises(ModelError, match=r"state: (saved with another model than|model is U8 \[64\])"):
            Generator(tmp_path / "model").load_cache(path)
    del model.metadata_props["identity"]
    ir.save(model, tmp_path / "model" / "model.onnx")
    with pytest.raises(ModelError, match=r"model\.onnx: no identity in its metadata, as in older exports"):
        Generator(tmp_path / "model").load_cache(path)
    with pytest.raises(ModelError, match="saved with another model"):
        Generator(exported("qwen3_5_moe_text", **FLOAT)).load_cache(path)


def test_damaged_files_are_named(saved, tmp_path):
    generator, path = saved
    whole = path.read_bytes()
    for size in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=f"^{path}: "):
            generator.load_cache(path)
    path.write_bytes(whole)
    tensors = load_file(path)
    key = "past_key_values.1.key"

    def refused(message: str, change: dict) -> None:
        write(path, tensors | change)
        with pytest.raises(ModelError, match=message):
            generator.load_cache(path)

    refused(rf"{key} is missing", {key: None})
    refused(rf"{key} is F32 \[1, 2, 22, 48\], expected float32 \[1, 2, 23, 48\]", {key: tensors[key][:, :, 1:].copy()})
    refused(rf"{key} is F16 ", {key: tensors[key].astype(np.float16)})
    refused("state: no saved state: no tensor model; expected a file that generate --save-state", {"model": None})
    refused("state: no saved state: no tensor tokens; expected", {"tokens": None})
    refused("tokens is I64 ", {"tokens": tensors["tokens"][None]})
    refused(rf"{path}: {key} has numbers that are not finite", {key: tensors[key] * np.float32(np.nan)})
    refused("more is not of this model's cache", {"more": np.zeros(1, np.float32)})
    refused(f"^{path}: token id 99999 is outside the vocabulary", {"tokens": np.full(23, 99999)})
    refused(r"past_key_values\.0\.key@-4 is not of this model", {"past_key_values.0.key@-4": np.zeros(1, np.float32)})
    refused(r"past_key_values\.0\.key@4 is not of this model", {"past_key_values.0.key@4": np.zeros(1, np.float32)})


def test_a_file_that_is_truncated_while_it_is_read(saved, monkeypatch):
    """Before it is read, its end is missing; afterwards it does not matter. A mapped file would end this process."""
    generator, path = saved
    whole, identity = path.read_bytes(), saved_states._identity

    def truncated(size: int, after: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wrapped(argument: Any) -> Any:
            found = after(argument)
            os.truncate(path, size)
            return found

        return wrapped

    with monkeypatch.context() as during:
        during.setattr(saved_states, "_identity", truncated(0, identity))
        assert generator.load_cache(path).tokens == PROMPT
    path.write_bytes(whole)
    with monkeypatch.context() as during:
        during.setattr(saved_states, "read_header", truncated(len(whole) // 2, read_header))
        with pytest.raises(ModelError, match=rf"^{path}: .*bytes could be read; is it truncated\?$"):
            generator.load_cache(path)


def test_a_file_that_is_no_saved_state(saved):
    generator, path = saved
    config = generator.path.parent / "config.json"
    arguments = ["generate", str(config.parent), "--ids", "1", "--load-state", str(config)]
    done = CliRunner().invoke(app, arguments)
    assert str(done.exception) == (
        f"{config}: no saved state; expected a file that generate --save-state or save_cache wrote"
    )
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"state: header length \d+; the file has 100 bytes"):
        generator.load_cache(path)


def test_numbers_that_were_altered_are_noticed(exported, tmp_path):
    """One bit of any tensor, or of the header where it says what is where; the checksum is zlib's, of all before it."""
    generator, path = Generator(exported("qwen3_5_moe_text", **FLOAT)), tmp_path / "state"
    cache = generator.cache()
    cache.append(PROMPT)
    generator.save_cache(cache, path)
    whole, header = path.read_bytes(), read_header(path)
    assert int.from_bytes(whole[-4:], "little") == zlib.crc32(whole[:-4])
    assert list(header)[-1] == CHECKSUM
    for name, entry in header.items():
        last = entry.begin + prod(entry.shape) * DTYPES[entry.dtype].itemsize - 1
        path.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
        altered = f"{path}: was altered or is damaged: the CRC-32 of its bytes is [0-9a-f]{{8}}, its checksum says "
        with pytest.raises(ModelError, match="saved with another model" if name == MODEL else altered):
            generator.load_cache(path)
    key, value = (f'"past_key_values.1.{kind}"'.encode() for kind in ("key", "value"))
    path.write_bytes(whole.replace(key, b"<key>", 1).replace(value, key, 1).replace(b"<key>", value, 1))
    with pytest.raises(ModelError, match="was altered or is damaged"):
        generator.load_cache(path)
    tensors = load_file(path)
    save_file(tensors, path)  # in another order
    with pytest.raises(ModelError, match=r"state: checksum is not its last tensor"):
        generator.load_cache(path)
    del tensors[CHECKSUM]
    save_file(tensors, path)
    with pytest.raises(ModelError, match="state: checksum is missing: save it again"):
        generator.load_cache(path)


def test_states_must_be_of_the_last_token(exported, tmp_path):
    generator = Generator(exported("qwen3_5_moe_text", **FLOAT))
    cache = generator.cache()
    cache.append(PROMPT)
    generator.save_cache(cache, tmp_path / "state")
    tensors = {name.replace("@23", "@22"): array for name, array in load_file(tmp_path / "state").items()}
    write(tmp_path / "state", tensors)
    with pytest.raises(ModelError, match=r"expected states after its 23 tokens, found those after \[22\]"):
        generator.load_cache(tmp_path / "state")
    name = next(name for name in tensors if ".recurrent_state@" in name)
    tensors[name][..., -1] = np.nan
    write(tmp_path / "state", {name.replace("@22", "@23"): array for name, array in tensors.items()})
    with pytest.raises(
        ModelError, match=r"state: past_key_values\.0\.recurrent_state@23 has numbers that are not finite"
    ):
        generator.load_cache(tmp_path / "state")
    with pytest.raises(ModelError, match="the cache has no tokens to save"):
        generator.save_cache(generator.cache(), tmp_path / "state")


def test_more_than_a_cache_holds(saved):
    generator, path = saved
    with pytest.raises(ModelError, match="23 tokens, the cache has a capacity of 20"):
        Generator(generator.path, capacity=20).load_cache(path)


def test_only_saved_states_are_replaced(saved, tmp_path, monkeypatch, capsys):
    """What else is there stays, and nothing is generated before that is known."""
    generator, path = saved
    cache, whole = generator.load_cache(path), path.read_bytes()
    cache.append([5])
    (tmp_path / "link").symlink_to(path)
    generator.save_cache(cache, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert generator.load_cache(path).tokens == [*PROMPT, 5]
    (tmp_path / "empty").touch()
    generator.save_cache(cache, tmp_path / "empty")
    assert (tmp_path / "empty").read_bytes() == path.read_bytes() != whole
    save_file({"model": np.zeros(64, np.uint8)}, tmp_path / "weights.safetensors")
    (tmp_path / "model.onnx.data").write_bytes(b"weights" * 9)
    (tmp_path / "to").symlink_to(tmp_path / "model.onnx.data")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    os.mkfifo(tmp_path / "pipe")
    before = {name: (tmp_path / name).read_bytes() for name in ("weights.safetensors", "model.onnx.data")}
    none = "is there, and is no saved state: expected an earlier one, or no file"
    for name, message in (
        ("weights.safetensors", none),
        ("model.onnx.data", none),
        ("to", none),
        ("itself", "is no regular file"),
        ("pipe", "is no regular file"),
        ("none/state", "none: no such folder"),
        (".", "is a folder, expected a file"),
    ):
        with pytest.raises(ModelError, match=message):
            generator.save_cache(cache, tmp_path / name)
        arguments = ["generate", str(generator.path), "--ids", "5", "--save-state", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["quantmoe", *arguments])
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        told = capsys.readouterr()
        assert (told.out, message in told.err) == ("", True), told.err
    assert before == {name: (tmp_path / name).read_bytes() for name in before}


def test_savers_of_one_path_do_not_disturb_each_other(saved, tmp_path, monkeypatch):
    generator, _ = saved
    first, second = (generator.load_cache(tmp_path / "state") for _ in range(2))
    second.append([5])
    (tmp_path / "state.partial").write_text("another program's", encoding="utf-8")
    replace = saved_states.replace

    def meanwhile(source: Path, target: Path) -> None:
        monkeypatch.setattr(saved_states, "replace", replace)
        generator.save_cache(second, target)
        assert generator.load_cache(target).tokens == second.tokens
        replace(source, target)

    monkeypatch.setattr(saved_states, "replace", meanwhile)
    generator.save_cache(first, tmp_path / "state")
    assert generator.load_cache(tmp_path / "state").tokens == first.tokens
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["state", "state.partial"]
    assert (tmp_path / "state.partial").read_text(encoding="utf-8") == "another program's"


def test_a_short_turn_goes_back_to_where_it_began(exported):
    """Of fewer tokens than the tail. Without tokens before it there is nothing to copy."""
    generator = Generator(exported("qwen3_5_moe_text", **FLOAT))
    cache = generator.cache()
    cache.tail = 8
    cache.append(PROMPT[:5])
    assert cache.ends() == [0, 5]
    for token in (6, 7, 8):
        cache.append([token])
    cache.append([9, 10, 11])
    assert cache.ends() == [0, 5, 8, 11]
    said = generator.generate([5], 4, cache=cache).tokens
    assert cache.keep([*PROMPT[:5], 6, 7, 8, 9, 12]) == 8
    assert generator.generate([9, 10, 11, 5], 4, cache=cache).tokens == said


def test_the_same_ids_again_run_their_end_alone(exported, tmp_path):
    """Linear attention: a saved file has states before the end of the prompt, whose last token is to be run."""
    folder, ids = str(exported("qwen3_5_moe_text", **FLOAT)), ",".join(map(str, PROMPT))
    arguments = ["generate", folder, "--ids", ids, "--max-new-tokens", "6", "--temperature", "0"]
    first = CliRunner().invoke(app, [*arguments, "--save-state", str(tmp_path / "state")])
    again = CliRunner().invoke(app, [*arguments, "--load-state", str(tmp_path / "state")])
    assert again.stdout.splitlines()[0] == first.stdout.splitlines()[0]
    assert "prompt: 8 tokens" in again.stderr
    whole = len(PROMPT) + first.stdout.splitlines()[0].count(",")
    told = f"{tmp_path / 'state'}: 15 of its {whole} tokens are used; it can go back to 0, 15, 23, {whole} tokens"
    assert told in again.stderr.splitlines()
    other = CliRunner().invoke(
        app, ["generate", folder, "--prompt", "x", "--max-new-tokens", "1", "--load-state", str(tmp_path / "state")]
    )
    assert f"0 of its {whole} tokens are used; it can go back to 0, 15, 23, {whole} tokens" in other.stderr


def test_the_command(exported, tmp_path):
    folder, ids = str(exported("qwen3_moe", **FLOAT)), ",".join(map(str, PROMPT))
    count = ["--max-new-tokens", "6", "--temperature", "0"]
    run = CliRunner().invoke
    first = run(app, ["generate", folder, "--ids", ids, *count, "--save-state", str(tmp_path / "state")])
    assert first.exit_code == 0, first.output
    said = first.stdout.splitlines()[0]
    again = run(app, ["generate", folder, "--ids", f"{ids},{said}", *count, "--load-state", str(tmp_path / "state")])
    want = run(app, ["generate", folder, "--ids", f"{ids},{said}", *count])
    assert again.stdout.splitlines()[0] == want.stdout.splitlines()[0]
    assert "prompt: 1 token, " in again.stderr
    assert "prompt: 29 tokens" in want.stderr
    assert "tokens are used" not in again.stderr + want.stderr
    part = run(app, ["generate", folder, "--ids", ids, *count, "--load-state", str(tmp_path / "state")])
    assert "22 of its 28 tokens are used; it can go back to any length" in part.stderr
