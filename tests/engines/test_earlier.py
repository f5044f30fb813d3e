"""Folders that an earlier version exported (tests/fixtures/exported.py) keep loading, and give the same numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.runtime.generate import Generator

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_an_earlier_export_keeps_its_logits(tmp_path: Path) -> None:
    """Expected is what ONNX Runtime 1.31 gave in f32: another version or machine sums its products in another order."""
    shutil.unpack_archive(FIXTURES / "exported-cpu.tar.xz", tmp_path)
    found = inspect(tmp_path, verify=True)
    assert [len(found[nodes]) for nodes in ("layers", "linears", "routers")] == [1, 4, 1]
    assert found["layers"][0]["attributes"]["op_version"] == 1
    expected = np.load(tmp_path / "expected.npz")
    ids, generator = expected["input_ids"], Generator(tmp_path)
    logits, _ = generator.step(ids, generator.start(len(ids)))
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-4, atol=1e-4)
