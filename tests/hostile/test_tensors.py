"""Damaged quantized tensors and quantizers' configurations: each is refused by name, or decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.models.checkpoints import write_checkpoint
from support.models.encoders import CASES, Case, random_matrix

from quantmoe.exporter.reading.formats import CheckpointError, find_format, open_checkpoint

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
