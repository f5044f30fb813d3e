"""What an export would write, how long it would take and in how much memory: from headers and config.json alone."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter import ahead
from quantmoe.exporter.checkpoint import DTYPES, CheckpointError
from quantmoe.exporter.convert import (
    LAYOUT,
    MAX_FILE_SIZE,
    _rounded,
    _scaled,
    check_options,
    check_output,
    check_size,
    open_format,
)
from quantmoe.exporter.explain import consider, linear_spec, moe_spec
from quantmoe.exporter.formats import Format, MoELayer, Scheme
from quantmoe.exporter.formats.base import FLOATS, INPUT_SCALES
from quantmoe.exporter.model import BLOCK, BLOCK_MEMORY, Skeleton

#: measured by tests/export/test_large.py's export on one core of an Intel Xeon at 2.5 GHz: bytes written per CPU second
#: of expert weights and of other weights, and seconds of tracing, whatever the number of layers
PACKING, CONVERTING, TRACING = 242e6, 460e6, 20.0
#: torch, transformers and the graph
BASE_MEMORY = 0.8e9
#: a scale tensor's safetensors dtype -> op.def's scale_type
SCALES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F8_E8M0": "e8m0", "U8": "e8m0", "F8_E4M3": "e4m3"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What :func:`plan` found.

    Attributes:
        layers: checkpoint module name -> (scheme in the tool's words, node attributes, packed bytes).
        read, packed, dense: bytes of the checkpoint, of the experts and of everything else in the model.
        seconds, memory: estimates; ``rate`` says from what.
        free: bytes of disk where the model would go.
        files: of weights, at least: a tensor is in one.
        dequantized: tensors outside the experts that the checkpoint quantizes and the model would not -> why.
        odd: experts whose tensors are not named, typed or shaped as the first one's of their layer; whether export
            refuses them only their data tell.
        kv_cache: see Report.
    """

    layers: dict[str, tuple[str, MoESpec, int]]
    read: int
    packed: int
    dense: int
    seconds: float
    memory: float
    rate: str
    free: int
    files: int
    dequantized: dict[str, str]
    odd: list[str]
    kv_cache: str


def plan(
    checkpoint: str | Path,
    output: str | Path,
    *,
    target: str = "cpu",
    activations: str | None = None,
    scales: str = "exact",
    dtype: str | None = None,
    dense: str = "quantmoe",
    layers: int | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    force: bool = False,
    max_file_size: int = MAX_FILE_SIZE,
) -> Plan:
    """Plans :func:`quantmoe.exporter.convert.export` with the same options. No tensor's data is read.

    Raises:
        OptionError, OSError: see export.
        CheckpointError: what export would refuse, as far as names, types, shapes and config.json show it.
    """
    activations, graph_type = check_options(
        target, activations, scales, dtype, dense, quantize, group_size, max_file_size
    )
    check_output(Path(checkpoint), Path(output), target, force)
    folder = Path(output).resolve()
    format = open_format(checkpoint, quantize, group_size, activations)
    skeleton = Skeleton(format, graph_type, layers, headers_only=True)
    layout = LAYOUTS[LAYOUT[target]]
    found: dict[str, tuple[str, MoESpec, int]] = {}
    odd: list[str] = []
    for layer in skeleton.experts.values():
        expert = _scaled(outline(layer), scales)[0]
        (candidate,) = consider(partial(_moe_spec, layer, expert, activations), [LAYOUT[target]])
        if candidate.reason or not isinstance(candidate.spec, MoESpec):
            raise CheckpointError(f"{format.ckpt.folder}: {layer.name}: {candidate.reason}")
        spec = candidate.spec
        if target == "cuda":
            check_size(layer, spec)
        size = layer.num_experts * sum(layout.row_bytes(spec, projection) for projection in ("w13", "w2"))
        found[layer.name] = layer.scheme.text, spec, size
        odd += [f"{layer.name}.{e}" for e in layer.odd()]
    packed = sum(size for _, _, size in found.values())
    itemsize = 4 if graph_type == "f32" else 2
    dequantized: dict[str, str] = {}
    sizes = _linears(skeleton, layout, activations, scales, dequantized)
    linears = {f"{name}.weight": n for name, n in sizes.items()}
    names = (name for name in skeleton.tensors if name in skeleton.sources and name not in linears)
    others = sum(prod(skeleton.tensors[name].shape) * itemsize for name in names) + sum(linears.values())
    cores = native.cpus()
    seconds = TRACING + (packed / PACKING + others / CONVERTING) / cores
    return Plan(
        found,
        read=sum(path.stat().st_size for path in format.ckpt.folder.glob("*.safetensors")),
        packed=packed,
        dense=others,
        seconds=seconds,
        memory=BASE_MEMORY + _working_set(skeleton, [spec for _, spec, _ in found.values()], sizes),
        rate=f"{cores} cores; on one {PACKING / 1e6:.0f} MB/s of experts and {CONVERTING / 1e6:.0f} MB/s of others, "
        f"{TRACING:.0f} s of tracing, as measured on an Intel Xeon at 2.5 GHz",
        free=shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free,
        files=-(-(packed + others) // max_file_size),
        dequantized=dequantized,
        odd=odd,
        kv_cache=format.kv_cache(),
    )


def _linears(
    skeleton: Skeleton, layout: ModuleType, activations: str | None, scales: str, dequantized: dict[str, str]
) -> dict[str, int]:
    """Linears outside the experts that the layout carries -> their packed bytes, which MatMulNBits' are close to."""
    format, found = skeleton.format, {}
    for name, source in skeleton.linears.items():
        linear, scheme = skeleton.model.get_submodule(name), format.scheme_of(source)
        _check_codes(format, scheme, source, linear.out_features, linear.in_features)
        m = _rounded(_outline(format, scheme, source, linear.out_features, linear.in_features), scales)[0]
        (candidate,) = consider(partial(_linear_spec, scheme, m, activations), [layout.__name__.rpartition(".")[2]])
        if not candidate.reason and isinstance(candidate.spec, LinearSpec):
            found[name] = layout.row_bytes(candidate.spec.moe, "w2")
        else:
            dequantized[f"{source}.weight"] = candidate.reason.removeprefix("down: ")
    return found


def _check_codes(format: Format, scheme: Scheme, module: str, n: int, k: int) -> None:
    """Refuses a linear whose largest tensor is not that of n x k codes; some tools pad rows to 32 bits."""
    tensors = format.ckpt.beside(module)
    stored = max(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in tensors.values())
    floats = tensors["weight"][0] if "weight" in tensors and tensors["weight"][0] in FLOATS else None  # to be rounded
    wanted = n * k * (8 * DTYPES[floats].itemsize if floats else SCHEMES[scheme.format].bits) // 8
    padding = 8 * max(n, k) if n % 8 or k % 8 else 0
    a_byte_each = not floats and any(shape == (n, k) for _, shape in tensors.values())
    if not (wanted <= stored <= wanted + padding or a_byte_each):
        raise CheckpointError(
            f"{format.ckpt.folder}: {module} has {stored} bytes of weights, expected {wanted}: {n} x {k} in "
            f"{floats or scheme.format} (config.json)"
        )


def _linear_spec(scheme: Scheme, m: QuantizedMatrix, activations: str | None, layout: ModuleType) -> LinearSpec:
    return linear_spec(scheme, m, layout, activations)


def _moe_spec(layer: MoELayer, expert: Expert, activations: str | None, layout: ModuleType) -> MoESpec:
    return moe_spec(layer, expert, layout, activations)


def outline(layer: MoELayer) -> Expert:
    """Expert 0 without its numbers: arrays of the right shapes and types that take no memory."""
    h, i = layer.hidden_size, layer.intermediate_size
    sizes = {"gate": (i, h), "up": (i, h), "down": (h, i)}
    roles = ("gate", "up", "down") if layer.gated else ("up", "down")
    names = layer.projections or ("gate_up_proj", "gate_up_proj", "down_proj")[-len(roles) :]
    found = {}
    for role, name in zip(roles, names, strict=True):
        module = f"{layer.name}.0.{name}" if layer.projections else f"{layer.name}.{name}"
        found[role] = _outline(
            layer.format, layer.down_scheme if role == "down" else layer.scheme, module, *sizes[role]
        )
    return Expert(found.get("gate"), found["up"], found["down"])


def _outline(format: Format, scheme: Scheme, module: str, n: int, k: int) -> QuantizedMatrix:
    ckpt, g = format.ckpt, scheme.group_size

    def has(suffix: str) -> bool:
        return f"{module}.{suffix}" in ckpt or f"{module}_{suffix}" in ckpt  # "_": of fused experts

    ends = (".weight_scale", "_weight_scale", ".scales", ".weight_scale_inv", ".weight")
    names = (f"{module}{end}" for end in ends)
    stored = next((ckpt.dtype(name) for name in names if name in ckpt), "BF16")
    wide = SCHEMES[scheme.format].bits == 16
    scale = {"mxfp4": "e8m0", "nvfp4": "e4m3"}.get(scheme.format) or ("f32" if wide else SCALES.get(stored, "bf16"))
    shape = (n, 1 if g == -1 else -(-k // g))
    asymmetric = " asymmetric" in scheme.text
    ordered = (has("g_idx") or has("weight_g_idx")) and "act" in scheme.text
    return QuantizedMatrix(
        kind=scheme.format,
        codes=np.broadcast_to(np.uint16(0) if wide else np.uint8(0), (n, k)),
        scales=np.broadcast_to(np.zeros((), SCALE_DTYPES[scale]), shape),
        group_size=g,
        zero_points=np.broadcast_to(np.uint8(0), shape) if asymmetric else None,
        global_scale=1.0 if scheme.format == "nvfp4" else None,
        input_scale=1.0 if format.input_scales and any(map(has, INPUT_SCALES)) else None,
        pre_scale=np.broadcast_to(np.float32(0), (k,)) if has("pre_quant_scale") else None,
        bias=np.broadcast_to(np.float32(0), (n,)) if has("bias") else None,
        perm=np.arange(k, dtype=np.int32)[::-1] if ordered else None,
    )


def _working_set(skeleton: Skeleton, specs: list[MoESpec], linears: dict[str, int]) -> int:
    """Experts or blocks ahead of the writing, or a linear; and the largest mapped tensor outside the experts."""
    experts = max(ahead.memory(ahead.expert_size(spec), spec.num_experts) for spec in specs)
    modules = ((skeleton.model.get_submodule(name), packed) for name, packed in linears.items())
    linear = max((m.out_features * m.in_features + 2 * packed for m, packed in modules), default=0)
    ckpt = skeleton.format.ckpt
    largest = max((prod(ckpt.shape(name)) for name in skeleton.sources.values() if name in ckpt), default=0)
    blocks = ahead.memory(BLOCK_MEMORY, -(-4 * largest // BLOCK))
    return max(experts, linear, 2 * largest + blocks)
