"""Which of a folder's files are a checkpoint's, with transformers as the oracle; files that change meanwhile."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.models.checkpoints import TINY, make_checkpoint, write_checkpoint, write_safetensors
from transformers.modeling_utils import _get_resolved_checkpoint_files

from quantmoe.exporter.folder.files import LFS_POINTER
from quantmoe.exporter.reading.companions import check_companions
from quantmoe.exporter.reading.formats import CheckpointError, find_format, open_checkpoint
from quantmoe.exporter.reading.weights.base import MTP, VISION

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "indices", "named"),
    [
        (["model.safetensors"], {INDEX: SHARDS}, None),  # left over: its shards are not there
        (["model.safetensors", *SHARDS], {INDEX: SHARDS}, None),
        (["model.safetensors", "model.fp16.safetensors"], {}, None),
        (["model.fp16.safetensors", *SHARDS], {INDEX: SHARDS, "model.safetensors.index.fp16.json": SHARDS}, None),
        (["model.safetensors", "other.safetensors"], {INDEX: SHARDS}, "other.safetensors"),
        (["model.safetensors", *SHARDS], {"other.safetensors.index.json": SHARDS}, "other.safetensors.index.json"),
    ],
)
def test_the_files_that_transformers_takes(files, indices, named, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({} if named is None else {"transformers_weights": named}), encoding="utf-8"
    )
    for number, name in enumerate(files):
        write_safetensors(tmp_path / name, {f"w{number if name in SHARDS else ''}": np.array([number])})
    for name, shards in indices.items():
        weights = {f"w{files.index(shard) if shard in files else shard}": shard for shard in shards}
        (tmp_path / name).write_text(json.dumps({"metadata": {}, "weight_map": weights}), encoding="utf-8")
    found, _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False, named)
    want = sorted(files.index(Path(path).name) for path in found)
    ckpt = open_checkpoint(tmp_path)
    assert sorted(int(ckpt.tensor(name)[0]) for name in ckpt.names()) == want


def test_an_index_of_the_whole_model_and_more(tmp_path):
    """Layers that draft, which a tool added beside a model in one file."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for name, file in (("a", "model.safetensors"), ("b", "model_mtp.safetensors")):
        write_safetensors(tmp_path / file, {name: np.zeros(1)})
    weights = {"a": "model.safetensors", "b": "model_mtp.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}), encoding="utf-8")
    assert sorted(open_checkpoint(tmp_path).names()) == ["a", "b"]


@pytest.mark.parametrize("index", [b"", b"{", b"[]", b"{}", b'{"weight_map": {"a": 5}}', b"\xff", LFS_POINTER + b"v1"])
def test_an_index_that_cannot_be_read(index, tmp_path):
    """transformers does not read it beside a whole model; without one it names the shards."""
    write_checkpoint(tmp_path, {"a": np.zeros(1)}, {})
    (tmp_path / INDEX).write_bytes(index)
    found, _ = _get_resolved_checkpoint_files(str(tmp_path), None, None, None, None, False, None)
    assert [Path(path).name for path in found] == ["model.safetensors"]
    assert list(open_checkpoint(tmp_path).names()) == ["a"]
    (tmp_path / "model.safetensors").rename(tmp_path / SHARDS[0])
    with pytest.raises(CheckpointError, match=rf"{INDEX}: "):
        open_checkpoint(tmp_path)


def test_a_file_that_config_json_names_is_missing(tmp_path):
    write_checkpoint(tmp_path, {"a": np.zeros(1)}, {})
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": "b.safetensors"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: missing shard"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (MTP, "mtp.fc.weight"),
        (MTP, "model.layers.2.eh_proj.weight"),  # the layer after the last one
        (MTP, "model.mtp.layers.0.eh_proj.weight"),
        (VISION, "model.visual.patch_embed.proj.weight"),
    ],
)
def test_parts_in_a_file_that_no_index_lists(part, name, tmp_path):
    make_checkpoint(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **TINY)
    weights = dict.fromkeys(open_checkpoint(tmp_path).names(), SHARDS[0])
    (tmp_path / "model.safetensors").rename(tmp_path / SHARDS[0])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weights}), encoding="utf-8")
    assert find_format(open_checkpoint(tmp_path)).beside(part) is None
    listed = next(iter(weights))  # as in the source's shard, which has other tensors, too
    write_safetensors(tmp_path / "extra.safetensors", {name: np.array([7]), listed: np.array([8]), "x": np.array([9])})
    format = find_format(open_checkpoint(tmp_path))
    assert format.left_out() == ""
    found = format.beside(part)
    assert found is not None
    assert found.has(name)
    assert found.ckpt.tensor(name) == 7
    assert found.ckpt.where(name) == f"{tmp_path / 'extra.safetensors'}: {name}"
    assert "x" not in found.ckpt
    assert found.ckpt.where(listed).endswith(f"{SHARDS[0]}: {listed}")
    assert format.left_out(part).startswith(f"{part} is in extra.safetensors, which no index lists")


def overwrite(path: Path) -> None:
    """Other numbers, the same size."""
    data = bytearray(path.read_bytes())
    data[-4:] = b"\1\2\3\4"
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    """Another file of the same size and time, with the same tensors in another order."""
    found, size = path.stat(), path.stat().st_size
    write_safetensors(path, {"b": np.ones((2, 3), np.float32), "a": np.zeros((2, 3), np.float32)})
    assert path.stat().st_size == size
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "text", "at_once"),
    [
        (overwrite, "its time of modification is another", True),
        (lambda path: os.truncate(path, 100), "it has 100 bytes, and had ", True),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "it has ", True),
        (Path.unlink, "it is not there any more", True),
        (replace, "its header is another", False),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_that_change(change, text, at_once, name, tmp_path):
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.zeros((2, 3), np.float32)}
    folder = write_checkpoint(tmp_path, tensors, {})
    (folder / "config.json").write_text(json.dumps({"x": "y" * 500}), encoding="utf-8")
    ckpt = open_checkpoint(folder)
    ckpt.check_unchanged()
    if name == "config.json" and not at_once:
        return
    change(folder / name)
    changed = rf"{name}: changed while it was read: {text}.*; export again"
    if at_once and name != "config.json":
        for read in (lambda: ckpt.tensor("a"), lambda: ckpt.element("a", 1), lambda: ckpt.sample("a", 8)):
            with pytest.raises(CheckpointError, match=changed):
                read()
    with pytest.raises(CheckpointError, match=changed):
        ckpt.check_unchanged()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_companions_that_change(name, tmp_path):
    """The exported folder would have the weights of one model and the tokenizer or the template of another."""
    folder = write_checkpoint(tmp_path, {"a": np.ones((2, 3), np.float32)}, {})
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}", encoding="utf-8")
    ckpt = open_checkpoint(folder)
    check_companions(ckpt)
    ckpt.check_unchanged()
    path.write_text("{ }", encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{name}: changed while it was read: it has 3 bytes, and had 2"):
        ckpt.check_unchanged()
