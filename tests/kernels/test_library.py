"""libquantmoe.so: the C ABI and nothing else, which custom_ops loads without an engine's package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from quantmoe import custom_ops
from quantmoe.custom_ops import native


def declared(header: str) -> set[str]:
    text = (Path(__file__).parents[2] / "custom_ops/include/quantmoe" / header).read_text()
    return set(re.findall(r"QM_API [\w *]*?\b(qm_\w+)\(", text))


def test_only_the_c_abi_is_exported() -> None:
    """All of quant_moe.h, what of quant_moe_cuda.h needs no GPU, and qm_slice_bytes of cpu/kernel.h."""
    listing = subprocess.check_output(["nm", "-D", "--defined-only", native.library()._name], text=True)
    exported, own = {line.split()[-1] for line in listing.splitlines()}, declared("quant_moe.h")
    assert len(own) > 30
    assert own <= exported
    assert exported <= own | declared("quant_moe_cuda.h") | {"qm_slice_bytes"}


def test_custom_ops_imports_no_engine() -> None:
    """The engines' packages import custom_ops, not the other way around."""
    sources = sorted(Path(custom_ops.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    for path in sources:
        assert not re.search(r"^\s*(from|import) quantmoe\.(ort_ext|trt_plugins|exporter)\b", path.read_text(), re.M), (
            path
        )
