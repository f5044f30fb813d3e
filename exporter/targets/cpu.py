"""ONNX Runtime on x86-64 and Arm, with the library of the CPU kernels."""

from __future__ import annotations

from typing import Any

from quantmoe.exporter.targets.base import ACTIVATIONS, Target
from quantmoe.ort_ext import LIBRARIES, OLDEST, library_path


def _refusal(spec: Any) -> str:
    from quantmoe.custom_ops import native
    from quantmoe.custom_ops.layouts import cpu_panel
    from quantmoe.custom_ops.op import LinearSpec, MoESpec

    rows = {MoESpec: ("w13", "w2"), LinearSpec: ("w",)}.get(type(spec), ())
    moe = spec.moe if isinstance(spec, LinearSpec) else spec
    words = {name: cpu_panel.row_bytes(moe, "w2" if name == "w" else name) // 4 for name in rows}
    return native.refusal(spec, words)


def _kernels(spec: Any) -> list[tuple[str, str]]:
    from quantmoe.custom_ops import native

    missing = "this machine lacks its instructions"
    return [(name, "" if usable else missing) for name, usable in native.kernels().items()]


CPU = Target(
    name="cpu",
    device="cpu",
    layout="cpu_panel",
    kernels=_kernels,
    refusal=_refusal,
    library=LIBRARIES["cpu"],
    library_path=library_path,
    library_rebuild="without CXX, `make build` makes one for 2.28",
    package="the wheel quantmoe, the jar quantmoe or the nupkg QuantMoe, for Linux (x86-64, aarch64), Windows and "
    "macOS",
    runtime=OLDEST,
    runtime_with={},
    graph_types=("f32", "f16"),
    tower_type="f32",
    activations=(*ACTIVATIONS,),
    default_activations="int8",
    caches=("f16", "f32"),
    options=frozenset(("mtp", "eagle3", "state_window", "vision", "tensor_parallel", "paged")),
    passes=("fused_norms.fuse", "fused_norms.type_fused_norms", "fused_norms.spell_norms"),
    packed_tables=None,
    own_widths=True,
    chunk=512,
    steps_of_chunk=4,
    reserve=512 << 20,
    rates=(60e9, 3e9),  # two channels of DDR5, an NVMe disk
)
