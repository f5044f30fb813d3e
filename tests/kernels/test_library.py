"""libquantmoe.so: the C ABI and nothing else, which custom_ops loads without an engine's package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from quantmoe import custom_ops
from quantmoe.custom_ops import native


def test_only_the_c_abi_is_exported() -> None:
    """All that quant_moe.h declares, CUDA's plan, which needs no GPU, and qm_slice_bytes of cpu/kernel.h."""
    listing = subprocess.check_output(["nm", "-D", "--defined-only", native.library()._name], text=True)
    include = Path(__file__).parents[2] / "custom_ops/include/quantmoe"
    declared = set(re.findall(r"QM_API [\w *]*?\b(qm_\w+)\(", (include / "quant_moe.h").read_text(encoding="utf-8")))
    assert len(declared) > 10
    assert {line.split()[-1] for line in listing.splitlines()} == declared | {"qm_cuda_plan_node", "qm_slice_bytes"}


def test_custom_ops_imports_no_engine() -> None:
    """The engines' packages import custom_ops, not the other way around."""
    sources = sorted(Path(custom_ops.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        assert not re.search(
            r"^\s*(from|import) quantmoe\.(ort_ext|trt_plugins|exporter)\b", path.read_text(encoding="utf-8"), re.M
        ), path
