"""Sessions refuse packed weights that are not those which the model was exported with (quant_moe.def, Identity)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from support.models.one_layer import NODE, session, write_model
from support.operators.specs import moe_spec, projection

from quantmoe.custom_ops.layouts import cpu_panel

VERIFY = {"quantmoe.verify": "1"}
INT4 = projection("int4", 32, "bf16", "int8_token_asym")
SPEC = moe_spec(3, 64, 96, INT4, INT4)


def identity(rows: np.ndarray) -> str:
    lines = rows.reshape(-1, 64)
    samples = b"".join(lines[i * (len(lines) - 1) // 7].tobytes() for i in range(8))
    return f"{blake3(rows.tobytes()).hexdigest()} {blake3(samples).hexdigest()[:32]} model.onnx.data of Tiny-8x"


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, (3, cpu_panel.row_bytes(SPEC, name)), np.uint8) for name in ("w13", "w2")}


def write(folder: Path, weights: dict[str, np.ndarray], **identities: object) -> Path:
    """A model with these weights and the identities of others."""
    return write_model(folder / "m.onnx", SPEC, weights["w13"], weights["w2"],
                       attributes={f"{name}_identity": value for name, value in identities.items()})  # fmt: skip


@pytest.mark.parametrize("mode", ["0", "1", "copy"])
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_other_data_is_refused(tmp_path, weights, name, mode):
    wanted = {other: identity(rows) for other, rows in weights.items()}
    entries = {"quantmoe.prefault": mode}
    session(write(tmp_path, weights, **wanted), entries=entries | VERIFY)
    weights[name] = np.roll(weights[name], 1)
    with pytest.raises(Exception, match=f"{name} is not the data that this model was exported with") as refused:
        session(write(tmp_path, weights, **wanted), entries=entries)
    assert f'QuantMoE node "{NODE}": ' in str(refused.value)
    found, expected = (text.split()[1] for text in (identity(weights[name]), wanted[name]))
    said = f"the BLAKE3 of its samples is {found}, expected {expected}, of model.onnx.data of Tiny-8x; put the data"
    assert said in str(refused.value)


@pytest.mark.parametrize("line", range(8))
def test_every_sample_counts(tmp_path, weights, line):
    wanted = identity(weights["w2"])
    lines = weights["w2"].reshape(-1, 64)
    lines[line * (len(lines) - 1) // 7, 63] ^= 1
    with pytest.raises(Exception, match=r"w2 is not the data .* samples"):
        session(write(tmp_path, weights, w2=wanted))


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_verify_reads_all_bytes(tmp_path, weights, name):
    wanted = {other: identity(rows) for other, rows in weights.items()}
    weights[name].reshape(-1, 64)[1, 0] ^= 128
    path = write(tmp_path, weights, **wanted)
    session(path)
    session(path, entries={"quantmoe.verify": "0"})
    with pytest.raises(
        Exception, match=f"{name} is not the data .* BLAKE3 of its bytes is {identity(weights[name])[:64]}"
    ):
        session(path, entries=VERIFY)


def test_models_without_identities_are_not_checked(tmp_path, weights):
    session(write(tmp_path, weights), entries=VERIFY)


@pytest.mark.parametrize("value", ["", "blake3"])
def test_an_identity_that_is_none(tmp_path, weights, value):
    with pytest.raises(Exception, match=f'w2_identity is "{value}", expected two BLAKE3 sums'):
        session(write(tmp_path, weights, w2=value))


def test_a_verify_that_is_none(tmp_path, weights):
    with pytest.raises(Exception, match=r'quantmoe\.verify is "yes", expected 0 or 1'):
        session(write(tmp_path, weights), entries={"quantmoe.verify": "yes"})


@pytest.mark.parametrize(("experts", "hidden"), [(1, 8), (2, 64), (5, 96), (70, 256)])
def test_sums_of_every_size(tmp_path, experts, hidden):
    """BLAKE3's trees are of other shapes; the last is read in pieces."""
    int8 = projection("int8", -1, "f32", "none")
    spec, rng = moe_spec(experts, hidden, 2 * hidden, int8, int8), np.random.default_rng(0)
    rows = [rng.integers(0, 256, (experts, cpu_panel.row_bytes(spec, name)), np.uint8) for name in ("w13", "w2")]
    attributes = {f"{name}_identity": identity(row) for name, row in zip(("w13", "w2"), rows, strict=True)}
    session(write_model(tmp_path / "m.onnx", spec, *rows, attributes=attributes), entries=VERIFY)
