"""Files, headers and indices of checkpoints that are broken or hostile: a CheckpointError that says where and what."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models.checkpoints import write_checkpoint, write_safetensors

from quantmoe.exporter.reading.formats import CheckpointError, open_checkpoint


def shard(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = b"\0" * 8
SHARDS: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "0 bytes; expected a safetensors file"),
    "no header": (b"\1\0\0", "3 bytes; expected a safetensors file"),
    "header longer than the file": (shard({"a": tensor()}, EIGHT, length=10_000), "header length 10000"),
    "huge header length": (shard({}, length=2**63), "header length 9223372036854775808"),
    "not JSON": (shard(b"{nonsense"), "corrupt header"),
    "not UTF-8": (shard(b'{"\xff": 1}'), "corrupt header"),
    "deep JSON": (shard(b"[" * 100_000), "corrupt header"),
    "not an object": (shard([1, 2]), "expected a JSON object"),
    "tensor not an object": (shard({"a": 1}), "a: expected the fields dtype, shape and data_offsets"),
    "no offsets": (shard({"a": {"dtype": "F32", "shape": [1]}}), "a: expected the fields"),
    "duplicate name": (shard(b'{"a":%s,"a":%s}' % ((json.dumps(tensor()).encode(),) * 2), EIGHT), "'a' appears twice"),
    "unknown dtype": (shard({"a": tensor("F4")}, EIGHT), "a: dtype 'F4'; supported: BOOL, U8"),
    "dtype not a string": (shard({"a": tensor(["F32"])}, EIGHT), "a: dtype"),
    "negative shape": (shard({"a": tensor(shape=[-2])}, EIGHT), "a: shape [-2]"),
    "fractional shape": (shard({"a": tensor(shape=[2.0])}, EIGHT), "a: shape [2.0]"),
    "boolean shape": (shard({"a": tensor(shape=[True, 2])}, EIGHT), "a: shape [True, 2]"),
    "overflowing shape": (shard({"a": tensor(shape=[2**62, 2**62])}, EIGHT), "a: data_offsets [0, 8] span 8 bytes"),
    "negative offset": (shard({"a": tensor(offsets=[-8, 0])}, EIGHT), "a: shape [2] and data_offsets [-8, 0]"),
    "reversed offsets": (shard({"a": tensor(offsets=[8, 0])}, EIGHT), "a: data_offsets [8, 0] span -8 bytes"),
    "span too short": (
        shard({"a": tensor(offsets=[0, 4])}, EIGHT),
        "a: data_offsets [0, 4] span 4 bytes; F32 [2] takes 8",
    ),
    "truncated": (shard({"a": tensor()}, EIGHT[:5]), "a: ends at byte"),
    "overlap": (
        shard({"a": tensor(), "b": tensor(offsets=[4, 12])}, EIGHT + EIGHT[:4]),
        "b: starts at 4; the tensors before it end at 8 (overlap or hole)",
    ),
    "another dtype": (
        shard({"a": tensor("F64")}, EIGHT),
        "a: data_offsets [0, 8] span 8 bytes; F64 [2] takes 16",
    ),
    "offsets past the file": (shard({"a": tensor("U8", [2**40], [0, 2**40])}, EIGHT), "a: ends at byte 1099511"),
    "offsets past int64": (shard({"a": tensor("U8", [2**70], [0, 2**70])}, EIGHT), "a: shape [1180591620717411303424]"),
    "a number of 5000 digits": (shard(b'{"a": %s}' % (b"9" * 5000)), "corrupt header: Exceeds the limit"),
    "many values": (shard(b"[" + b"[]," * 2_000_000 + b"1]"), "corrupt header: 4000001 brackets, commas and colons"),
    "many dimensions": (shard({"a": tensor("U8", [1] * 33, [0, 1])}, b"0"), "a: 33 dimensions, expected at most 32"),
    "hole": (shard({"a": tensor(), "b": tensor(offsets=[16, 24])}, EIGHT * 3), "b: starts at 16"),
    "trailing bytes": (shard({"a": tensor()}, EIGHT * 2), "the tensors in its header end at byte"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shard(name: str, tmp_path: Path) -> None:
    data, text = SHARDS[name]
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as error:
        open_checkpoint(tmp_path)
    assert text in str(error.value)


CONFIGS = {
    "many values": ("[" * 5_000_000, "5000000 brackets, commas and colons, expected at most 4000000"),
    "large": (" " * 64_000_001, "config.json: larger than 64000000 bytes"),
    "missing": (None, "config.json: missing"),
    "not JSON": ("{", "config.json: cannot be read as JSON"),
    "deep": ("[" * 100_000, "config.json: cannot be read as JSON"),
    "a list": ("[]", "config.json: expected a JSON object, found list"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name: str, tmp_path: Path) -> None:
    config, text = CONFIGS[name]
    if config is not None:
        (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(tmp_path)
    assert text in str(error.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"a": "../secret.safetensors"}, "expected a plain file name"),
        ({"a": "/etc/passwd"}, "expected a plain file name"),
        ({"a": "..\\secret.safetensors"}, "expected a plain file name"),
        ({"a": ".."}, "expected a plain file name"),
        ({"a": ""}, "expected a plain file name"),
        ({"a": "link.safetensors"}, "outside the checkpoint's folder"),
        ({"a": "folder"}, "missing shard"),
        ({"a": "absent.safetensors"}, "absent.safetensors: missing shard"),
        ({"a": 1}, "not an object of tensor name to file name"),
        ([], "not an object of tensor name to file name"),
        ({"a": "one.safetensors", "c": "one.safetensors"}, "c is missing (the index names it; it is in no shard)"),
        ({"a": "one.safetensors", "b": "one.safetensors", "x": "two.safetensors"}, "it is in two.safetensors"),
        ({"a": "one.safetensors", "b": "two.safetensors", "d": "three.safetensors"}, "a is also in one.safetensors"),
    ],
)
def test_index(weight_map: Any, text: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "secret.safetensors", {"a": np.zeros(1)})
    folder = tmp_path / "checkpoint"
    (folder / "folder").mkdir(parents=True)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    write_safetensors(folder / "one.safetensors", {"a": np.zeros(1)})
    write_safetensors(folder / "two.safetensors", {"b": np.zeros(1), "x": np.zeros(1)})
    write_safetensors(folder / "three.safetensors", {"d": np.zeros(1), "a": np.zeros(1)})
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert text in str(error.value)


def test_a_header_with_a_million_names_of_which_two_are_one(tmp_path: Path) -> None:
    names = ",".join(f'"{i}":0' for i in range(200_000)) + ',"0":0'
    header = f"{{{names}}}".encode()
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="'0' appears twice"):  # at once; a quadratic check would take minutes
        open_checkpoint(tmp_path)


def test_hugging_face_cache_links_are_followed(tmp_path: Path) -> None:
    """snapshots/<revision>/model.safetensors -> ../../blobs/<hash>"""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    write_safetensors(tmp_path / "blobs" / "abc", {"a": np.arange(3)})
    (snapshot / "config.json").write_text("{}", encoding="utf-8")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    np.testing.assert_array_equal(open_checkpoint(snapshot).tensor("a"), np.arange(3))


def test_tensors_are_read_as_they_are_stored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"odd": np.ones(3, np.uint8), "m": np.arange(6, dtype=np.float32).reshape(2, 3)}, {})
    ckpt = open_checkpoint(tmp_path)
    array = ckpt.tensor("m")  # at an odd offset
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    assert not array.flags.writeable
    np.testing.assert_array_equal(ckpt.element("m", 1), [3, 4, 5])
    assert ckpt.where("m").endswith("model.safetensors: m")
    with pytest.raises(CheckpointError, match="absent is missing"):
        ckpt.tensor("absent")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "quantize_config.json"])
def test_configurations_are_files_of_the_folder(name: str, tmp_path: Path) -> None:
    """Neither links out of it nor pipes, which would never end."""
    folder = write_checkpoint(tmp_path / "checkpoint", {"a": np.zeros(1)}, {})
    (folder / name).unlink(missing_ok=True)
    if name == "model.safetensors.index.json":  # read only where no whole model.safetensors makes it needless
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    secret = tmp_path / "secret.json"
    secret.write_text("{}", encoding="utf-8")
    for make, text in (
        (lambda: (folder / name).symlink_to(secret), f"links to {secret}, outside the checkpoint's folder"),
        *([(lambda: (folder / name).symlink_to(name), "ymlink")] if name == "config.json" else []),
        (lambda: os.mkfifo(folder / name), "not a file"),
        (lambda: (folder / name).mkdir(), "not a file"),
    ):
        make()
        with pytest.raises(CheckpointError, match=name) as error:
            _ = open_checkpoint(folder).quantization
        assert text in str(error.value)
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            (folder / name).rmdir()
        else:
            (folder / name).unlink()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.booleans())
def test_any_damaged_byte(position: int, value: int, cut: bool, tmp_path: Path) -> None:
    """One byte changed or the file cut anywhere: read, or refused with a CheckpointError; nothing else."""
    names = {"m.weight": np.zeros((4, 6), np.int8), "m.weight_scale": np.ones((4, 1), np.float32)}
    write_checkpoint(tmp_path, names, {})
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    position %= len(data)
    if cut:
        del data[position:]
    else:
        data[position] = value
    path.write_bytes(data)
    try:
        ckpt = open_checkpoint(tmp_path)
    except CheckpointError:
        return
    assert not cut
    for name in ckpt.names():
        ckpt.tensor(name).sum()


def test_bombs_stay_small(tmp_path: Path) -> None:
    """Headers and indices at their limits are refused or read in bounded memory and time, in one process."""
    entry = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    bombs = {
        "brackets": shard(b"[" * 90_000_000),
        "lists": shard(b'{"a":[' + b"[]," * 1_300_000 + b"1]}"),
        "objects": shard(b'{"a":[' + b'{"":1},' * 900_000 + b"1]}"),
        "dimensions": shard({"a": {"dtype": "U8", "shape": [1] * 2_000_000, "data_offsets": [0, 1]}}, b"0"),
        "tensors": shard(b"{" + b",".join(entry % i for i in range(300_000)) + b"}"),
        "a name": shard(b'{"' + b"a" * 90_000_000 + b'":1}'),
    }
    for name, data in bombs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
        (tmp_path / name / "model.safetensors").write_bytes(data)
    code = """
import re, sys
from pathlib import Path
from quantmoe.exporter.reading.formats import CheckpointError, open_checkpoint
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
before = peak()
for folder in sys.argv[1:]:
    try:
        open_checkpoint(folder)
        print("read")
    except CheckpointError as error:
        print("refused", len(str(error)))
print(peak() - before)
"""
    folders = [str(tmp_path / name) for name in bombs]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *found, peak = done.stdout.splitlines()
    assert [line.split()[0] for line in found] == ["refused"] * 4 + ["read", "refused"]
    assert all(int(line.split()[1]) < 2000 for line in found if "refused" in line), found
    assert int(peak) < 1_000_000_000
