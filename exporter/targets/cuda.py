"""ONNX Runtime and TensorRT on NVIDIA GPUs, with the libraries of the CUDA kernels."""

from __future__ import annotations

from typing import Any

from quantmoe.exporter.targets.base import ACTIVATIONS, Target
from quantmoe.ort_ext import LIBRARIES, OLDEST, cuda_library_path


def _kernels(spec: Any) -> list[tuple[str, str]]:
    from quantmoe.custom_ops import cuda

    return [("cuda", cuda.absence(spec))]


def _refusal(spec: Any) -> str:
    from quantmoe.custom_ops import cuda

    return cuda.refusal(spec)


def _lists(spec: Any) -> str:
    from quantmoe.custom_ops import cuda

    return cuda.refusal(spec, lists=True)


CUDA = Target(
    name="cuda",
    device="cuda",
    layout="marlin",
    kernels=_kernels,
    refusal=_refusal,
    library=LIBRARIES["cuda"],
    library_path=cuda_library_path,
    library_rebuild="`make cuda` on an older system makes one for that system",
    package="the wheel quantmoe-cuda, for Linux (x86-64, aarch64)",
    runtime=OLDEST,
    runtime_with={},
    graph_types=("bf16", "f16"),
    own_floats=True,
    activations=tuple(name for name in ACTIVATIONS if name != "int8"),
    rounding_is_slow=True,
    dense=("quantmoe",),
    cache_codes=False,  # TensorRT reads the files, too, and takes no codes
    cache_scales=False,
    options=frozenset(("mtp", "eagle3", "state_window", "vision", "tensor_parallel", "paged", "external_experts")),
    passes=("divided_norms.divide_by_roots", "add_norms.add_norms"),  # ai.onnx and quantmoe's operators only
    final_passes=("defaults.drop_defaults",),
    router="MoERouter",
    joined=True,
    token_rows=True,
    latent_ups=False,
    lists=_lists,
    packed_tables=(),  # TensorRT has no BitShift
    max_elements=2**31 - 1,  # TensorRT's
    act_orders_apart=True,
    chunk=2048,
    steps_of_chunk=2,
    reserve=1 << 30,
    rates=(1e12, 25e9, 3e9),  # a GPU's memory, 16 lanes of PCIe 4, an NVMe disk
    provider="cuda",
)
