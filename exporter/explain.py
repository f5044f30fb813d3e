"""Which layout and kernel a scheme gets, and why not the others. Export refuses with the reasons found here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from quantmoe.custom_ops import cuda, native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, OPTIONAL, join
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection
from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.formats import MoELayer, Scheme, find_format, open_checkpoint
from quantmoe.exporter.inspect import inspect


@dataclass(frozen=True)
class Candidate:
    """A layout for a node.

    Attributes:
        spec: the node's attributes; None when the layout refuses.
        reason: of the refusal, by the layout or by the kernels' library; "" when neither refuses.
        kernels: (name, why not or "") in order of preference; the first without a reason is used.
    """

    layout: str
    spec: MoESpec | LinearSpec | None
    reason: str
    kernels: tuple[tuple[str, str], ...] = ()


def consider(
    make: Callable[[ModuleType], MoESpec | LinearSpec], layouts: Iterable[str] = tuple(LAYOUTS)
) -> list[Candidate]:
    """The layouts in order, each with its verdict.

    Args:
        make: the node's attributes in a layout; raises ValueError when the layout does not carry something.
    """
    found = []
    for name in layouts:
        try:
            spec = make(LAYOUTS[name])
        except CheckpointError:
            raise
        except ValueError as error:
            found.append(Candidate(name, None, str(error)))
            continue
        found.append(Candidate(name, spec, *_kernels(spec)))
    return found


def activation_format(scheme: Scheme, choice: str | None) -> str:
    """The node's activation_format.

    Args:
        scheme: as the checkpoint says. choice: "int8" or "float", the user's for weights-only checkpoints;
            None: as the checkpoint says.
    """
    wanted = scheme.activation_format
    if choice == "float":
        return "none"
    whole = scheme.format in ("fp8_e4m3", "bf16", "f16")  # no integer product of these is exact
    if wanted == "none" and choice == "int8" and not whole:
        return "int8_token_asym"
    return wanted


def moe_spec(layer: MoELayer, expert: Expert, layout: ModuleType, activations: str | None) -> MoESpec:
    """Attributes of the layer's node, if all its experts are like this one.

    Raises:
        ValueError: the layout does not carry the expert.
    """
    formats = (activation_format(scheme, activations) for scheme in (layer.scheme, layer.down_scheme))
    w13, w2 = layout.describe(expert, *formats)
    return MoESpec(
        num_experts=layer.num_experts,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        w13=w13,
        w2=w2,
        activation=layer.activation,
        gated=int(layer.gated),
        swiglu_alpha=layer.swiglu_alpha,
        swiglu_limit=layer.swiglu_limit,
        apply_router_weight_on_input=int(layer.apply_router_weight_on_input),
    )


def layer_spec(
    layer: MoELayer, layout: ModuleType, activations: str | None, expert: Callable[[int], Expert] | None = None
) -> MoESpec:
    """Attributes of the layer's node, which carries all its experts.

    Args:
        expert: decodes one; layer.expert by default.

    Raises:
        ValueError: the layout does not carry an expert, or experts differ in what a node has one of; names the modules.
    """
    expert, odd = expert or layer.expert, set(layer.odd())

    def describe(e: int) -> MoESpec:
        decoded = expert(e)
        try:
            return moe_spec(layer, decoded, layout, activations)
        except ValueError as error:
            raise ValueError(f"{layer.name}.{e}: {error}") from None

    spec = describe(0)
    # Experts may differ in act-order. One whose tensors are not those of expert 0 is damaged or stored differently:
    # decoding it tells, now and not after the tracing.
    # (Expert 0 may have none: nothing orders the inputs of an expert that no token reached.)
    indexed = any("g_idx" in suffix for module in layer.tensors(0) for suffix in module)
    ordered = indexed and "act" in layer.scheme.text + layer.down_scheme.text
    for e in range(1, layer.num_experts):
        if ordered or e in odd:
            other = describe(e)
            try:
                w13, w2 = join((spec.w13, spec.w2), (other.w13, other.w2))
            except ValueError:
                raise ValueError(_difference(layer, e, spec, other)) from None
            spec = replace(spec, w13=w13, w2=w2)
    return spec


def _difference(layer: MoELayer, e: int, first: MoESpec, other: MoESpec) -> str:
    """What experts 0 and ``e`` differ in and must not."""

    def unlike(a: Projection, b: Projection) -> list[str]:
        pairs = {f.name: (getattr(b, f.name), getattr(a, f.name)) for f in fields(a) if f.name not in OPTIONAL}
        return [f"{name} ({x} and {y})" for name, (x, y) in pairs.items() if x != y]

    names, differences = layer.projections[:-1], unlike(first.w13, other.w13)
    if not differences:
        names, differences = layer.projections[-1:], unlike(first.w2, other.w2)
    texts = [[f"{layer.name}.{i}.{name}", layer.format.scheme_of(f"{layer.name}.{i}.{name}").text]
             for name in names for i in (e, 0)]  # fmt: skip
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    a, b = next((pair for pair in pairs if pair[0][1] != pair[1][1]), pairs[0])
    return (
        f"{a[0]} ({a[1]}) and {b[0]} ({b[1]}) differ in {', '.join(differences)}; "
        "expected the same in all experts of a layer"
    )


def linear_spec(scheme: Scheme, m: QuantizedMatrix, layout: ModuleType, activations: str | None) -> LinearSpec:
    """The same of a linear outside the experts."""
    return LinearSpec(m.shape[1], m.shape[0], layout.describe_down(m, activation_format(scheme, activations)))


def explain(path: str | Path, activations: str = "int8") -> list[dict[str, Any]]:
    """What was considered for each distinct scheme of a checkpoint's modules or a model's nodes.

    Returns:
        One dict a scheme: ``scheme`` (in the tool's words), ``modules`` (names), ``candidates`` (list of Candidate).
        Last, of a quantized KV cache, one without modules and with ``remark``.

    Raises:
        CheckpointError, ModelError: the folder or file cannot be read.
    """
    path = Path(path)
    if path.is_file() or (path / "model.onnx").exists():
        return _model(path)
    format = find_format(open_checkpoint(path))
    found: dict[Any, dict[str, Any]] = {}

    def add(key: Any, text: str, module: str, make: Callable[[ModuleType], MoESpec | LinearSpec]) -> None:
        if key not in found:
            found[key] = {"scheme": text, "modules": [], "candidates": consider(make)}
        found[key]["modules"].append(module)

    for layer in format.moe_layers():
        text = layer.scheme.text
        if layer.down_scheme != layer.scheme:
            text += f"; down: {layer.down_scheme.text}"
        key = (layer.scheme, layer.down_scheme, layer.hidden_size, layer.intermediate_size, tuple(layer.odd()))
        add(key, text, layer.name, partial(layer_spec, layer, activations=activations))
    for name in format.parameters():
        module = name.removesuffix(".weight")
        if module == name or not format.is_quantized(module):
            continue
        scheme = format.scheme_of(module)
        if (scheme, "linear") in found:
            found[scheme, "linear"]["modules"].append(module)
            continue
        m = format.matrix(module)
        add((scheme, "linear"), scheme.text, module,
            partial(linear_spec, scheme, m, activations=activations))  # fmt: skip
    if remark := format.kv_cache():
        found["KV cache"] = {"scheme": "KV cache", "modules": [], "candidates": [], "remark": remark}
    return list(found.values())


def _model(path: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    described = inspect(path)
    for kind, nodes in ((MoESpec, described["layers"]), (LinearSpec, described["linears"])):
        for node in nodes:
            spec = kind.from_attributes(node["attributes"])
            projection = spec.w2 if isinstance(spec, MoESpec) else spec.w
            sized = {"out_features": 0, "in_features": 0}
            key = str({k: v for k, v in node["attributes"].items() if k not in sized})
            if key not in found:
                candidate = Candidate(projection.layout, spec, *_kernels(spec))
                found[key] = {"scheme": node["format"], "modules": [], "candidates": [candidate]}
            found[key]["modules"].append(node["module"])
    return list(found.values())


def _kernels(spec: MoESpec | LinearSpec) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The library's refusal, and its kernels."""
    name = spec.w2.layout if isinstance(spec, MoESpec) else spec.w.layout
    if name == "marlin":
        reason = cuda.refusal(spec)
        return reason, (("cuda", reason),)
    layout = LAYOUTS[name]
    moe = spec if isinstance(spec, MoESpec) else spec.moe
    names = {"w13": "w13", "w2": "w2"} if isinstance(spec, MoESpec) else {"w": "w2"}
    words = {name: layout.row_bytes(moe, projection) // 4 for name, projection in names.items()}
    reason = native.refusal(spec, words)
    missing = "this machine lacks its instructions"
    return reason, tuple((name, reason or ("" if usable else missing)) for name, usable in native.kernels().items())
