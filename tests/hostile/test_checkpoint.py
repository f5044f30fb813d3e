"""Checkpoints that are broken or hostile: each gives a CheckpointError that says where and what, never a crash."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TINY, make_checkpoint, write_checkpoint, write_safetensors
from encoders import CASES, Case, random_matrix
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specs import moe_spec

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.exporter.formats import CheckpointError, find_format, open_checkpoint


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
    (tmp_path / "config.json").write_text("{}")
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
        (tmp_path / "config.json").write_text(config)
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
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "one.safetensors", {"a": np.zeros(1)})
    write_safetensors(folder / "two.safetensors", {"b": np.zeros(1), "x": np.zeros(1)})
    write_safetensors(folder / "three.safetensors", {"d": np.zeros(1), "a": np.zeros(1)})
    (folder / "link.safetensors").symlink_to(tmp_path / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    assert text in str(error.value)


def test_a_header_with_a_million_names_of_which_two_are_one(tmp_path: Path) -> None:
    names = ",".join(f'"{i}":0' for i in range(200_000)) + ',"0":0'
    header = f"{{{names}}}".encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="'0' appears twice"):  # at once; a quadratic check would take minutes
        open_checkpoint(tmp_path)


def test_hugging_face_cache_links_are_followed(tmp_path: Path) -> None:
    """snapshots/<revision>/model.safetensors -> ../../blobs/<hash>"""
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    write_safetensors(tmp_path / "blobs" / "abc", {"a": np.arange(3)})
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    np.testing.assert_array_equal(open_checkpoint(snapshot).tensor("a"), np.arange(3))


def test_tensors_are_views_of_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"odd": np.ones(3, np.uint8), "m": np.arange(6, dtype=np.float32).reshape(2, 3)}, {})
    ckpt = open_checkpoint(tmp_path)
    array = ckpt.tensor("m")  # at an odd offset: still a view
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    assert not array.flags.writeable
    assert not array.flags.owndata
    assert ckpt.where("m").endswith("model.safetensors: m")
    with pytest.raises(CheckpointError, match="absent is missing"):
        ckpt.tensor("absent")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "quantize_config.json"])
def test_configurations_are_files_of_the_folder(name: str, tmp_path: Path) -> None:
    """Neither links out of it nor pipes, which would never end."""
    folder = write_checkpoint(tmp_path / "checkpoint", {"a": np.zeros(1)}, {})
    (folder / name).unlink(missing_ok=True)
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
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


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.floats()
    | st.sampled_from(["", "re:(", "group", "int", "1x2"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "weights"]), inner, max_size=2),
    max_leaves=3,
)


def fields(config: Any, path: tuple = ()) -> list[tuple]:
    """Paths of all values in a configuration."""
    inner = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return [path] * bool(path) + [p for key, value in inner for p in fields(value, (*path, key))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_field(case: Case, data: st.DataObject, tmp_path: Path) -> None:
    """One field of the quantizer's configuration replaced: decoded, or refused with a CheckpointError."""
    matrix = random_matrix(case, 16, 128, max(case.group_sizes), case.scales[0], bias=True, seed=0)
    config = json.loads(json.dumps(case.config(matrix.group_size)))
    path = data.draw(st.sampled_from([p for p in fields(config) if p != ("quant_method",)]))
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = data.draw(JSON)
    folder = write_checkpoint(tmp_path, {f"m.{k}": v for k, v in case.encode(matrix).items()}, config)
    with suppress(CheckpointError):
        format = find_format(open_checkpoint(folder))
        format.scheme("m")
        format.matrix("m")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **TINY
    )


def edited(model: Path, folder: Path, edit: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> Path:
    """A copy of a checkpoint with its config and tensors changed by ``edit``."""
    ckpt = open_checkpoint(model)
    config, tensors = json.loads(json.dumps(ckpt.config)), {name: ckpt.tensor(name) for name in ckpt.names()}
    edit(config, tensors)
    quantization = config.pop("quantization_config")
    return write_checkpoint(folder, tensors, quantization, **config)


E1 = "model.layers.1.mlp.experts.1"
EDITS: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str | None]] = {
    "missing expert": (
        lambda c, t: [t.pop(name) for name in list(t) if name.startswith(f"{E1}.")],
        "model.layers.1.mlp.experts lacks the experts [1]; config.json says 4",
    ),
    "missing projection": (
        lambda c, t: [t.pop(name) for name in list(t) if name.startswith(f"{E1}.up_proj.")],
        f"{E1}.up_proj is missing or not quantized",
    ),
    "one expert not quantized": (
        lambda c, t: (
            [t.pop(name) for name in list(t) if name.startswith(f"{E1}.up_proj.")],
            t.update({f"{E1}.up_proj.weight": np.zeros((64, 128), np.float32)}),
        ),
        f"{E1}.up_proj is missing or not quantized",
    ),
    "more experts in the config": (lambda c, t: c.update(num_experts=5), "lacks the experts [4]; config.json says 5"),
    "fewer experts in the config": (lambda c, t: c.update(num_experts=3), "has 4 experts; config.json says 3"),
    "no number of experts": (
        lambda c, t: (c.pop("num_experts", 0), c.pop("num_local_experts", 0)),
        "expected one of the fields num_experts",
    ),
    "hidden size a string": (lambda c, t: c.update(hidden_size="128"), "hidden_size is '128', expected a positive int"),
    "another hidden size": (lambda c, t: c.update(hidden_size=96), "is [64, 128], expected [64, 96] (config.json)"),
    "a trillion experts": (
        lambda c, t: c.update(num_experts=10**12),
        "num_experts is 1000000000000, expected at most 16777216",
    ),
    "an expert's number of 5000 digits": (
        lambda c, t: t.update({f"model.layers.1.mlp.experts.{'9' * 5000}.x.y": np.zeros(1)}),
        None,
    ),
    "a millionth expert": (
        lambda c, t: t.update({"model.layers.1.mlp.experts.999999.up_proj.weight_packed": np.zeros(1)}),
        "has 5 experts; config.json says 4",
    ),
    "a layer of that number": (
        lambda c, t: t.update({f"model.layers.{'9' * 5000}.mlp.experts.0.x.y": np.zeros(1)}),
        "lacks the experts [1, 2, 3]",
    ),
    "unknown activation": (lambda c, t: c.update(hidden_act="mish"), "activation 'mish'; supported: silu"),
    "missing scale": (
        lambda c, t: t.pop(f"{E1}.down_proj.weight_scale"),
        f"{E1}.down_proj.weight_scale is missing, expected BF16|F16|F32 [128, 2]",
    ),
    "transposed scale": (
        lambda c, t: t.update({f"{E1}.down_proj.weight_scale": t[f"{E1}.down_proj.weight_scale"].T}),
        f"{E1}.down_proj.weight_scale is BF16 [2, 128], expected BF16|F16|F32 [128, 2] (compressed-tensors)",
    ),
    "wrong weight_shape": (
        lambda c, t: t.update({f"{E1}.down_proj.weight_shape": np.array([-1, 64])}),
        f"{E1}.down_proj.weight_shape is [-1, 64], expected positive sizes",
    ),
    "huge weight_shape": (
        lambda c, t: t.update({f"{E1}.down_proj.weight_shape": np.array([2**40, 2**40])}),
        f"{E1}.down_proj.weight_packed is I32 [128, 8], expected I32 [1099511627776",
    ),
    "other experts only": (
        lambda c, t: [t.update({name.replace("experts", "wizards"): t.pop(name)}) for name in list(t)],
        "no experts; expected tensors named <layer>.experts.<number>.*",
    ),
    "experts of another kind": (
        lambda c, t: (
            [t.pop(name) for name in list(t) if "experts" in name]
            + [t.update({f"{E1[:-2]}.w12": np.zeros((4, 3, 2), np.float16)})]
        ),
        "model.safetensors: model.layers.1.mlp.experts.w12 F16 [4, 3, 2]",
    ),
    "experts of another name": (
        lambda c, t: (
            [t.pop(name) for name in list(t) if "experts" in name]
            + [t.update({"model.layers.1.block_sparse_moe.input_linear.weight": np.zeros((4, 3, 2), np.float16)})]
        ),
        "block_sparse_moe.input_linear.weight F16 [4, 3, 2]",
    ),
    "an expert with other activations": (
        lambda c, t: c["quantization_config"]["config_groups"].update(
            other=c["quantization_config"]["config_groups"]["group_0"]
            | {
                "targets": [f"{E1}.up_proj"],
                "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
            }
        ),
        f"{E1}.up_proj quantizes activations as int8_token, model.layers.1.mlp.experts.0.gate_proj as none",
    ),
    "no group targets the experts": (
        lambda c, t: c["quantization_config"]["config_groups"]["group_0"].update(targets=["re:.*q_proj"]),
        "has quantized tensors but no config group targets it",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_model(name: str, model: Path, tmp_path: Path) -> None:
    edit, text = EDITS[name]
    folder = edited(model, tmp_path, edit)
    if text is None:  # no such expert: not one of the model's tensors
        assert len(find_format(open_checkpoint(folder)).moe_layers()) == 2
        return
    with pytest.raises(CheckpointError) as error:
        [list(layer) for layer in find_format(open_checkpoint(folder)).moe_layers()]
    assert text in str(error.value)
    assert str(folder) in str(error.value)


CASE = {case.id: case for case in CASES}
BIG = np.int32(2**30)


def flat(array: np.ndarray, value: Any, index: int = 5) -> np.ndarray:
    """A copy with one element changed."""
    out = array.copy()
    out.flat[index] = value
    return out


#: encoder, tensor, what becomes of it, the error
TENSORS: dict[str, tuple[str, str, Callable[[np.ndarray], np.ndarray], str]] = {
    "packed too short": (
        "ct-w4a16",
        "weight_packed",
        lambda a: a[:, :-1],
        "m.weight_packed is I32 [16, 15], expected I32 [16, 16]",
    ),
    "packed too long": (
        "ct-w4a16",
        "weight_packed",
        lambda a: np.repeat(a, 2, 1),
        "is I32 [16, 32], expected I32 [16, 16]",
    ),
    "packed as floats": (
        "ct-w4a16",
        "weight_packed",
        lambda a: a.astype(np.float32),
        "m.weight_packed is F32 [16, 16], expected I32",
    ),
    "packed as bytes": (
        "ct-w4a16",
        "weight_packed",
        lambda a: a.view(np.uint8),
        "m.weight_packed is U8 [16, 64], expected I32 [16, 16]",
    ),
    "packed in three dimensions": (
        "ct-w4a16",
        "weight_packed",
        lambda a: a[None],
        "m.weight_packed is I32 [1, 16, 16], expected I32",
    ),
    "codes past the width": ("ct-w4a8", "weight", lambda a: flat(a, 100), "m.weight has values outside int4"),
    "scales as integers": (
        "ct-w4a16",
        "weight_scale",
        lambda a: a.astype(np.int32),
        "m.weight_scale is I32 [16, 4], expected BF16|F16|F32",
    ),
    "shape as floats": (
        "ct-w4a16",
        "weight_shape",
        lambda a: a.astype(np.float64),
        "m.weight_shape is F64 [2], expected I64|I32",
    ),
    "shape of no features": (
        "ct-w4a16",
        "weight_shape",
        lambda a: a * 0,
        "m.weight_shape is [0, 0], expected positive sizes",
    ),
    "qweight too short": ("gptq4", "qweight", lambda a: a[:-1], "m.qweight is I32 [15, 16], expected I32 [16, 16]"),
    "qweight as int64": ("gptq4", "qweight", lambda a: a.astype(np.int64), "m.qweight is I64 [16, 16], expected I32"),
    "qzeros too short": ("gptq4", "qzeros", lambda a: a[:, :-1], "m.qzeros is I32 [4, 1], expected I32 [4, 2]"),
    "g_idx too short": (
        "gptq4-desc_act",
        "g_idx",
        lambda a: a[:-1],
        "m.qweight is I32 [16, 16], expected I32 [16, 16]|m.g_idx",
    ),
    "g_idx as int64": (
        "gptq4-desc_act",
        "g_idx",
        lambda a: a.astype(np.int64),
        "m.g_idx is I64 [128], expected I32 [128]",
    ),
    "g_idx negative": (
        "gptq4-desc_act",
        "g_idx",
        lambda a: flat(a, -1),
        "m.g_idx ranges from -1 to 3, expected 0 to 3",
    ),
    "g_idx out of range": (
        "gptq4-desc_act",
        "g_idx",
        lambda a: flat(a, 4),
        "m.g_idx ranges from 0 to 4, expected 0 to 3",
    ),
    "g_idx far out of range": (
        "gptq4-desc_act",
        "g_idx",
        lambda a: flat(a, BIG),
        "ranges from 0 to 1073741824, expected 0 to 3",
    ),
    "g_idx with uneven groups": (
        "gptq4-desc_act",
        "g_idx",
        lambda a: np.where(a == 3, 2, a).astype(np.int32),
        "input features into group",
    ),
    "weight_g_idx out of range": (
        "ct-w4a16-g_idx",
        "weight_g_idx",
        lambda a: flat(a, BIG),
        "m.weight_g_idx ranges from",
    ),
    "weight_g_idx with uneven groups": (
        "ct-w4a16-g_idx",
        "weight_g_idx",
        lambda a: a * 0,
        "m.weight_g_idx puts 128 input features into group 0",
    ),
}


LAST = "model.layers.1.mlp.experts.3.down_proj"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
    "a billion labels": (
        lambda c, t: c.update(num_labels=10**9),
        "num_labels is 1000000000, expected at most 65536",
    ),
    "a text_config that is a name": (lambda c, t: c.update(text_config="x"), "config.json"),
    "an endless regular expression": (
        lambda c, t: c["quantization_config"]["config_groups"]["group_0"].update(
            targets=["re:(([a-z]|[a-z0-9_.])+)+!$"]
        ),
        "no config group targets it",  # re itself would take years
    ),
    "integers that nothing says are quantized": (
        lambda c, t: t.update({"model.norm.weight": np.ones(128, np.int8)}),
        "model.norm.weight is I8, expected BF16, F16, F32",
    ),
    "a generation_config that is a list": (
        lambda c, t: None,
        "generation_config.json: expected a JSON object, found list",
    ),
    "missing": (lambda c, t: t.pop(f"{LAST}.weight_shape"), f"{LAST}.weight_shape is missing, expected I64"),
    "dtype": (
        lambda c, t: t.update({f"{LAST}.weight_packed": t[f"{LAST}.weight_packed"].view(np.uint32)}),
        f"{LAST}.weight_packed is U32 [128, 8], expected I32 [128, 8]",
    ),
    "shape": (
        lambda c, t: t.update({f"{LAST}.weight_packed": t[f"{LAST}.weight_packed"][:-1]}),
        f"{LAST}.weight_packed is I32 [127, 8], expected I32 [128, 8]",
    ),
    "another scale type": (
        lambda c, t: t.update({f"{LAST}.weight_scale": t[f"{LAST}.weight_scale"].astype(np.float16)}),
        "model.layers.1.mlp.experts.0.down_proj (compressed-tensors pack-quantized int4 A16 group 32) differ in "
        "scale_type (f16 and bf16); expected the same in all experts of a layer",
    ),
    "a norm": (
        lambda c, t: t.update({"model.norm.weight": t["model.norm.weight"][1:]}),
        "model.norm.weight has shape [127], expected [128]",
    ),
    "a quantized linear outside the experts": (
        lambda c, t: t.pop("model.layers.1.self_attn.k_proj.weight_scale"),
        "model.layers.1.self_attn.k_proj.weight_scale is missing",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensor(name: str, tmp_path: Path) -> None:
    case, suffix, damage, text = TENSORS[name]
    matrix = random_matrix(CASE[case], 16, 128, 32, CASE[case].scales[0], bias=False, seed=0)
    tensors = {f"m.{key}": array for key, array in CASE[case].encode(matrix).items()}
    tensors[f"m.{suffix}"] = damage(tensors[f"m.{suffix}"])
    folder = write_checkpoint(tmp_path, tensors, CASE[case].config(32))
    with pytest.raises(CheckpointError) as error:
        find_format(open_checkpoint(folder)).matrix("m")
    assert any(part in str(error.value) for part in text.split("|m.")), str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_scales_that_are_no_numbers(projection: str, value: float, model: Path, tmp_path: Path) -> None:
    """Refused before a byte of that expert is written."""
    name = f"{E1}.{projection}.weight_scale"
    folder = edited(model, tmp_path, lambda c, t: t.update({name: flat(t[name], value)}))
    layer = find_format(open_checkpoint(folder)).moe_layers()[1]
    layout = LAYOUTS["cpu_panel"]
    w13, w2 = layout.describe(layer.expert(0), "none")
    spec = moe_spec(4, layer.hidden_size, layer.intermediate_size, w13, w2)
    rows = [native.aligned(layout.row_bytes(spec, p)) for p in ("w13", "w2")]
    layout.pack(layer.expert(0), spec, *rows)
    role = projection.removesuffix("_proj")
    with pytest.raises(ValueError, match=f"{role}: scales that are NaN or infinite"):
        layout.pack(layer.expert(1), spec, *rows)


@pytest.mark.parametrize("dense", ["quantmoe", "ort"])
def test_a_linears_scales_that_are_no_numbers(dense: str, model: Path, tmp_path: Path) -> None:
    """Also where ONNX Runtime's MatMulNBits would have taken them as they are."""
    from quantmoe.exporter import convert

    name = "model.layers.1.self_attn.k_proj.weight_scale"
    folder = edited(model, tmp_path / "damaged", lambda c, t: t.update({name: flat(t[name], np.nan)}))
    text = r"damaged: model\.layers\.1\.self_attn\.k_proj: scales that are NaN or infinite"
    with pytest.raises(CheckpointError, match=text):
        convert.export(folder, tmp_path / "out", dense=dense, activations="float")
    assert not (tmp_path / "out").exists()


def test_negative_scales_are_kept(model: Path, tmp_path: Path) -> None:
    """AutoRound writes them: a code of -8 and a negative scale reach one step further up."""
    name = f"{E1}.up_proj.weight_scale"
    folder = edited(model, tmp_path, lambda c, t: t.update({name: -t[name]}))
    whole, flipped = (
        find_format(open_checkpoint(path)).moe_layers()[1].expert(1).up.dequantize() for path in (model, folder)
    )
    np.testing.assert_array_equal(flipped, -whole)


SIZES = {
    "hidden_size": (2**40, "hidden_size is 1099511627776, expected at most 16777216"),
    "moe_intermediate_size": (2**62, "moe_intermediate_size is 4611686018427387904, expected at most"),
    "num_hidden_layers": (10**7, "num_hidden_layers is 10000000, the checkpoint has tensors of 2 layers"),
    "num_attention_heads": (2**31, "num_attention_heads is 2147483648, expected at most"),
    "num_key_value_heads": (0, "config.json: not "),
    "head_dim": (2**40, "head_dim is 1099511627776, expected at most"),
    "vocab_size": (2**50, "vocab_size is 1125899906842624, expected at most"),
    "num_experts_per_tok": (10**9, "1000000000 experts a token, expected at most 4"),
    "num_experts": (2**60, "expected at most 16777216"),
    "auto_map": ({"AutoConfig": "run.Config", "AutoModelForCausalLM": "run.Model"}, None),
    "model_type": ("never_heard_of", "not an architecture of transformers"),
    "rope_scaling": ("?", "config.json: not "),
    "layer_types": (7, "config.json: not "),
}


def test_absurd_configurations(model: Path, tmp_path: Path) -> None:
    """One process with 4 GB of address space beyond torch's libraries; every size is refused, and no code is run."""
    for key, (value, _) in SIZES.items():
        folder = edited(model, tmp_path / key, lambda c, t, key=key, value=value: c.update({key: value}))
        (folder / "run.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        if key == "auto_map":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    code = """
import re, resource, sys
from pathlib import Path
from quantmoe.exporter.formats import CheckpointError, find_format, open_checkpoint
from quantmoe.exporter.model import Skeleton
used = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
for folder in sys.argv[1:]:
    try:
        Skeleton(find_format(open_checkpoint(folder)))
        print("accepted")
    except CheckpointError as error:
        print(str(error).replace(chr(10), " "))
"""
    folders = [str(tmp_path / key) for key in SIZES]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for (key, (_, text)), line in zip(SIZES.items(), done.stdout.splitlines(), strict=True):
        assert (text or "not an architecture of transformers") in line, (key, line)
    assert not (tmp_path / "ran").exists()


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
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(data)
    code = """
import re, sys
from pathlib import Path
from quantmoe.exporter.formats import CheckpointError, open_checkpoint
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


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_tracing(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantmoe.exporter import convert
    from quantmoe.exporter import model as exporter_model
    from quantmoe.exporter.plan import plan

    monkeypatch.setattr(exporter_model, "trace", lambda *_, **__: pytest.fail("traced a damaged checkpoint"))
    edit, text = DAMAGE[name]
    folder = edited(model, tmp_path / "damaged", edit)
    if "generation_config" in name:
        (folder / "generation_config.json").write_text("[]")
    for refuse in (convert.export, plan):
        with pytest.raises(CheckpointError) as error:
            refuse(folder, tmp_path / "out")
        assert text in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_weight_outside_the_experts_that_is_no_number(model: Path, tmp_path: Path) -> None:
    from quantmoe.exporter.model import Skeleton

    def edit(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)

    skeleton = Skeleton(find_format(open_checkpoint(edited(model, tmp_path, edit))))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values that are not finite"):
        [make() for make in skeleton.blocks("model.norm.weight", False, np.dtype(np.float32))]
