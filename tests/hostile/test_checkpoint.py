"""Checkpoints that are broken or hostile: each gives a CheckpointError that says where and what, never a crash."""

from __future__ import annotations

import json
import struct
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
    with pytest.raises(CheckpointError, match="not a folder"):
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
EDITS: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
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
        "no experts; expected tensors named",
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
    with pytest.raises(CheckpointError) as error:
        [list(layer) for layer in find_format(open_checkpoint(folder)).moe_layers()]
    assert text in str(error.value)
    assert str(folder) in str(error.value)


LAST = "model.layers.1.mlp.experts.3.down_proj"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], Any], str]] = {
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
        "model.layers.1.mlp.experts.3: w2 differs between experts of one layer",
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


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_tracing(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantmoe.exporter import convert

    monkeypatch.setattr(convert, "trace", lambda *_, **__: pytest.fail("traced a damaged checkpoint"))
    edit, text = DAMAGE[name]
    with pytest.raises(CheckpointError) as error:
        convert.export(edited(model, tmp_path / "damaged", edit), tmp_path / "out")
    assert text in str(error.value)
    assert not (tmp_path / "out").exists()
