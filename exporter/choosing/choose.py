"""Which layout, node attributes and kernels an expert layer or a linear gets, and why not the others.

Dry run, ``inspect --explain`` and export all ask here. The checkpoint's own format answers, from headers and the few
tensors whose numbers decide (:meth:`quantmoe.exporter.reading.weights.base.Format.outline`). The data is packed as this
answer says: ``pack`` refuses an expert that differs from its node. Torch-free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import ModuleType

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.cuda import FLOATS
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, OPTIONAL, cpu_panel, join
from quantmoe.custom_ops.layouts.panel_rows import panel_rows
from quantmoe.custom_ops.matrix import QuantizedMatrix, joined, unrotated
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.choosing.described_model import DescribedModel, Shared
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import Format, ModuleScheme, MoELayer, moe_layers
from quantmoe.exporter.reading.weights.base import INPUT_SCALES, SharedExpert, dividing
from quantmoe.exporter.reading.weights.rotations import Rotation
from quantmoe.exporter.targets import ACTIVATIONS, Target, of_layout

#: ends of the names of tensors whose numbers decide what a node has
DECIDING = ("g_idx", "zero_point", "qzeros", "pre_quant_scale")
#: linears of one input, whose rows become one matrix: names of the parts -> of the whole
JOINED = {
    ("q_proj", "k_proj", "v_proj"): "qkv_proj",
    ("gate_proj", "up_proj"): "gate_up_proj",
    ("in_proj_qkvz", "in_proj_ba"): "in_proj",  # linear attention, q, k and v first: all of them, else what is alike
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"): "in_proj",
    ("in_proj_qkv", "in_proj_z"): "in_proj_qkvz",
    ("in_proj_b", "in_proj_a"): "in_proj_ba",
}
#: activation_format whose scales are those of all features of a token, which the parts of an expert do not know
WHOLE_ROWS = ("int8_token", "int8_token_asym", "fp8_token", "fp8_tensor")
#: linears that are packed as 16-bit floats of the graph's type, if they have a bias, which would be a kernel of its own
FLOAT_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
#: and without one: so few rows that a plain product, which others are on CUDA, waits longer than it reads
NARROW_LINEARS = ("in_proj_b", "in_proj_a", "in_proj_ba")
#: why the linear that expands a latent is none in the graph
ABSORBED = "its halves, one a head, multiply queries and outputs instead of the cache"


@dataclass(frozen=True)
class Candidate:
    """A layout for a node.

    Attributes:
        spec: the node's attributes; None when the layout refuses.
        reason: of the refusal, by the layout or by the kernels' library; "" when neither refuses.
    """

    layout: str
    spec: MoESpec | LinearSpec | None
    reason: str

    @property
    def kernels(self) -> list[tuple[str, str]]:
        """(name, why not on this machine or "") in order of preference; the first without a reason is used."""
        if self.spec is None:
            return []
        return [(name, self.reason or absent) for name, absent in of_layout(self.layout).kernels(self.spec)]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The nodes that a model gets.

    Attributes:
        layers: name of a node of experts -> its attributes. The name is their module's; several groups have
            ``<module>.groups.<number>``.
        linears: name of a linear outside the experts -> its node's attributes, if the layout carries it. Some of them
            are one node, such as ``qkv_proj`` beside where ``q_proj`` was.
        parts: name of a linear -> the model's modules whose rows it has, in this order, and their checkpoint modules.
        dequantized: checkpoint tensor of a linear that stays float -> why.
        experts: name of a node of experts -> its experts, with the shared expert if it is one of them.
        nodes: experts module name -> its nodes.
        shared: experts module name -> that shared expert in the model.
        apart: checkpoint module of a shared expert that stays a module of its own -> why.
        not_ort: with ``dense="ort"``, why a quantized linear is no MatMulNBits, "" if it is one.
        tables: name of a parameter whose rows are looked up -> the attributes of its packed form, and the linear that
            shares it, "" for none.
        rotations: name of a node -> what multiplies its input before it.
        gated: name of a linear whose first part has each head's gates behind its queries -> heads. The file has all
            gates before all queries. :func:`trace` finds them.
    """

    layers: dict[str, MoESpec] = dataclasses.field(default_factory=dict)
    linears: dict[str, LinearSpec] = dataclasses.field(default_factory=dict)
    parts: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    dequantized: dict[str, str] = dataclasses.field(default_factory=dict)
    experts: dict[str, MoELayer] = dataclasses.field(default_factory=dict)
    nodes: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    shared: dict[str, Shared] = dataclasses.field(default_factory=dict)
    apart: dict[str, str] = dataclasses.field(default_factory=dict)
    not_ort: dict[str, str] = dataclasses.field(default_factory=dict)
    tables: dict[str, tuple[LinearSpec, str]] = dataclasses.field(default_factory=dict)
    gated: dict[str, int] = dataclasses.field(default_factory=dict)
    rotations: dict[str, Rotation] = dataclasses.field(default_factory=dict)

    def source(self, name: str) -> str:
        """Return what a linear is called beside the checkpoint's modules: a group's is where they are."""
        first, *more = self.parts[name].values()
        return f"{first.rpartition('.')[0]}.{name.rpartition('.')[2]}" if more else first


def choose_experts(
    format: Format,
    layout: str,
    activations: str | None,
    *,
    scales: str,
    layers: int | None = None,
    floats: str | None = None,
) -> dict[str, list[tuple[MoELayer, MoESpec]]]:
    """Return the nodes of the first so many decoder layers, by the experts' names in the checkpoint: each group of a
    layer and its attributes.

    What headers decide, before torch is imported to make a model of them.

    Args:
        activations, scales: see export; None: as the checkpoint says.
        floats: see :func:`linear_candidate`.

    Raises:
        CheckpointError: fewer layers than that; the layout does not carry a layer's experts, or no kernel takes them.
    """
    found = moe_layers(format)
    last = format.ckpt.text_config.get("num_hidden_layers") or max((layer.index + 1 for layer in found), default=1)
    if layers is not None and not 1 <= layers <= last:
        raise CheckpointError(f"{format.ckpt.folder}: --layers {layers}; the model has 1 to {last}")
    made = {}
    for layer in found:
        if layers is not None and layer.index >= layers:
            continue
        own = layer.groups()
        if reason := _no_parts(own, layout):
            raise CheckpointError(f"{format.ckpt.folder}: {reason}")
        made[layer.name] = [(group, choose_layer(group, layout, activations, scales, floats)) for group in own]
    return made


def check_floats(format: Format, nodes: Mapping[str, Sequence[tuple[MoELayer, MoESpec]]]) -> None:
    """Refuse MXFP4 experts in a graph of float32: the one provider whose QMoE has them, CUDA, take 16 bits."""
    for name, spec in ((layer.title, spec) for groups in nodes.values() for layer, spec in groups):
        if "mxfp4" in (spec.w13.format, spec.w2.format):
            raise CheckpointError(
                f"{format.ckpt.folder}: {name}: ONNX Runtime has mxfp4 experts on CUDA alone, whose QMoE takes no f32: "
                "use --dtype f16"
            )


def rotations(layer: MoELayer, e: int) -> tuple[Rotation | None, int]:
    """Return what multiplies the hidden states of expert ``e``, and the features of a block of down's rotated input.

    Raises:
        ValueError: gate and up have different rotations.
    """
    if not layer.projections:
        return None, 0
    modules: Sequence[str] = [f"{layer.name}.{e}.{projection}" for projection in layer.projections]
    if layer.shared and e >= layer.num_experts:
        modules = layer.shared.modules
    inputs = {layer.format.rotation(module, layer.hidden_size) for module in modules[:-1]}
    if len(inputs) > 1:
        raise ValueError(f"the inputs of {' and '.join(modules[:-1])} are rotated differently, expected one rotation")
    down = layer.format.rotation(modules[-1], layer.intermediate_size)
    return inputs.pop(), down.size if down else 0


def _no_parts(parts: Sequence[MoELayer], layout: str) -> str:
    """Why the groups of a layer cannot be a node each; "" where they can, or there is one."""
    own = parts[0].format.slice
    why = "QMoE routes them itself" if of_layout(layout).one_node else ""
    if own is not None and own.own_tokens:
        why = "with --data-parallel tokens are sent to and from one node"
    if len(parts) == 1 or not why:
        return ""
    (a, its), (b, other) = ((part.label(part.routed[0]), part.scheme_text) for part in parts[:2])
    return f"{b} ({other}) and {a} ({its}) are of different formats; expected one in all experts of a layer: {why}"


# over 60 lines: a third are its parameters; then each kind of node, in order
def choose(
    skeleton: DescribedModel,
    experts: Mapping[str, Sequence[tuple[MoELayer, MoESpec]]],
    layout: str,
    *,
    activations: str | None,
    scales: str,
    dense: str = "quantmoe",
) -> Choice:
    """Return the nodes of a model in one layout.

    Args:
        experts: of :func:`choose_experts` with the same arguments.
        dense: see export.
    """
    target = of_layout(layout)
    parts_of = {name: experts[layer.name] for name, layer in skeleton.experts.items()}
    chosen = Choice()
    for name, shared in skeleton.shared({name: own[0][1] for name, own in parts_of.items()}).items():
        try:
            if target.one_node:
                raise ValueError("QMoE routes every expert")
            parts_of[name] = with_shared(skeleton, shared, parts_of[name], activations, scales)
        except ValueError as reason:
            first = shared.projections[0]
            chosen.apart[skeleton.linears.get(first, first).rpartition(".")[0]] = str(reason)
            continue
        chosen.shared[name] = shared
        gate = skeleton.linears.get(shared.gate)
        if gate is not None and skeleton.format.is_quantized(gate):
            chosen.dequantized[f"{gate}.weight"] = "it is a row of the router's"
    for name, own in parts_of.items():
        held = [(group, spec) for group, spec in own if len(group.ids)]  # a rank may have none of a group
        chosen.nodes[name] = [f"{name}.groups.{i}" for i in range(len(held))] if len(own) > 1 else [name]
        for node, (group, spec) in zip(chosen.nodes[name], held, strict=True):
            chosen.experts[node], chosen.layers[node] = group, spec
            if rotation := rotations(group, group.routed[0])[0]:
                chosen.rotations[node] = rotation
    merged = {path for shared in chosen.shared.values() for path in (*shared.projections, shared.gate)}
    linears = {name: source for name, source in skeleton.linears.items() if name not in merged}
    for whole, parts in groups(skeleton.format, linears).items():
        sources = {part: skeleton.linears[part] for part in parts}
        floats = skeleton.type_name if target.own_floats else None
        candidate = linear_candidate(
            skeleton.format, [*sources.values()], layout, activations=activations, scales=scales, floats=floats
        )
        rotation = Rotation.of(skeleton.format.outline().matrix_of(next(iter(sources.values()))))
        if not candidate.reason and isinstance(candidate.spec, LinearSpec):
            chosen.linears[whole], chosen.parts[whole] = candidate.spec, sources
            if rotation:
                chosen.rotations[whole] = rotation
            if dense == "ort" and target.library and skeleton.format.is_quantized(next(iter(sources.values()))):
                chosen.not_ort[whole] = not_ort(skeleton, [*sources.values()], scales)
            continue
        if rotation and not skeleton.format.is_quantized(first := next(iter(sources.values()))):
            chosen.dequantized[f"{first}.weight"] = "its input is rotated in each run, here its weight is"
        for source in filter(skeleton.format.is_quantized, sources.values()):
            if not target.library and activation_format(skeleton.format.scheme_of(source), activations) != "none":
                raise CheckpointError(f"{skeleton.format.ckpt.folder}: {source}: {candidate.reason}")
            chosen.dequantized[f"{source}.weight"] = candidate.reason
    for name in skeleton.absorbed:
        source = skeleton.sources[f"{name}.weight"]
        if skeleton.format.is_quantized(source.removesuffix(".weight")):
            weight = skeleton.tensors[f"{name}.weight"]
            chosen.dequantized[source] = f"{ABSORBED}: {weight.numel() * weight.element_size()} bytes"
    if skeleton.vision is None:
        chosen.tables.update(_tables(skeleton, chosen, target, scales))
    return chosen


def _tables(
    skeleton: DescribedModel, chosen: Choice, target: Target, scales: str
) -> Iterator[tuple[str, tuple[LinearSpec, str]]]:
    """Yield the embeddings that the checkpoint quantizes and a graph can look up as they are packed; see
    :class:`Choice`."""
    format = skeleton.format
    heads = {part: name for name, parts in chosen.parts.items() for part in parts.values() if len(parts) == 1}
    for parameter in skeleton.lookups() if target.packed_tables != () else ():
        source = skeleton.sources[parameter].removesuffix(".weight")
        if not format.is_quantized(source):
            continue
        m = format.outline().matrix_of(source)
        try:
            own = cpu_panel.describe_down(m, "none")
        except ValueError:
            continue
        spec = LinearSpec(in_features=m.shape[1], out_features=m.shape[0], w=own)
        if panel_rows(spec) is None or m.shape != tuple(skeleton.tensors[parameter].shape):
            continue
        if target.packed_tables is not None and own.format not in target.packed_tables:
            continue
        head = heads.get(source, "")
        if head:
            linear = chosen.linears[head]
            shares = replace(linear, w=replace(linear.w, activation_format="none")) == spec
            head = head if shares and scales == "exact" and chosen.not_ort.get(head) != "" else ""
        yield parameter, (spec, head)


def not_ort(skeleton: DescribedModel, modules: Sequence[str], scales: str) -> str:
    """Why MatMulNBits cannot stand for a quantized linear, or a group of them; "" when it can.

    Its scales are read only in a float16 model, where the checkpoint has others than float16, which may not be exact.
    """
    format = skeleton.format
    m, stored = linear_matrix(format.outline(), modules, scales)[0], format.scheme_of(modules[0]).activation_format
    if stored != "none":
        return f"MatMulNBits quantizes activations by rules of its own, the checkpoint says {stored}"
    if m.kind != "int4":
        return f"MatMulNBits of ONNX Runtime 1.21 has int4 only, found {m.kind}"
    if m.group_size < 16 or m.group_size & (m.group_size - 1):
        return f"MatMulNBits needs a group_size that is a power of two from 16, found {m.group_size}"
    for name in ("perm", "pre_scale", "global_scale"):
        if getattr(m, name) is not None:
            return f"MatMulNBits has no {name}"
    if m.block_n != 1:
        return "MatMulNBits has one scale a row and group"
    if skeleton.dtype.itemsize == 2 and m.scales.dtype != np.float16:
        exact = linear_matrix(format, modules, scales)[0].scales.astype(np.float64)
        with np.errstate(over="ignore"):
            if not np.array_equal(exact.astype(np.float16).astype(np.float64), exact):
                return "MatMulNBits in a float16 model has float16 scales, these are not exact in it"
    return ""


def with_shared(
    skeleton: DescribedModel,
    shared: Shared,
    parts: Sequence[tuple[MoELayer, MoESpec]],
    activations: str | None,
    scales: str,
) -> list[tuple[MoELayer, MoESpec]]:
    """Return a layer's groups and their nodes' attributes with its shared expert, which is of the first group whose
    experts are of its kind.

    Args:
        parts: the same without it.

    Raises:
        ValueError: no node's experts are of its kind; the first one's reason.
    """
    reasons: list[ValueError] = []
    for at, (routed, node) in enumerate(parts):
        try:
            layer = _shared_like(skeleton, shared, routed, spec=node, activations=activations, scales=scales)
        except ValueError as reason:
            reasons.append(reason)
            continue
        made = []
        for i, (group, spec) in enumerate(parts):
            ids = range(layer.num_experts, layer.every) if i == at else ()
            members = None if group.members is None else (*group.members, *ids)
            group = replace(group, shared=layer.shared, members=members)
            first, count = group.span
            made.append((group, replace(spec, num_experts=count, expert_offset=first)))
        for _, spec in made:
            if refused := refusal(spec) or _too_large(spec):
                raise ValueError(refused)
        return made
    raise reasons[0]


def _shared_like(
    skeleton: DescribedModel, shared: Shared, layer: MoELayer, *, spec: MoESpec, activations: str | None, scales: str
) -> MoELayer:
    """Return a layer or group with its shared expert, of whose kind its experts are.

    Raises:
        ValueError: they are not.
    """
    layout = LAYOUTS[spec.w13.layout]
    floats = skeleton.type_name if of_layout(spec.w13.layout).own_floats else None
    sources = [skeleton.linears.get(path) for path in shared.projections]
    modules = tuple(source for source in sources if source is not None)
    if len(modules) < len(sources):
        raise ValueError("not all of its linears are packed")
    for module, wanted in zip(modules, [*[layer.scheme] * len(modules[1:]), layer.down_scheme], strict=True):
        found = skeleton.format.scheme_of(module)
        if found.activation_format != wanted.activation_format:
            raise ValueError(f"its activations are {found.activation_format}, the experts' {wanted.activation_format}")
    if shared.count > 1 and layer.down_scheme.activation_format in WHOLE_ROWS:
        raise ValueError(f"{layer.down_scheme.activation_format} rounds rows of it, not of {shared.count} experts")
    layer = replace(layer, shared=SharedExpert(modules, shared.count, skeleton.format))
    outline = layer.outline()
    for e in range(layer.num_experts, layer.every):
        own = moe_spec(layer, scaled(outline.expert(e), scales)[0], layout, activations, floats)
        if rotations(layer, e) != rotations(layer, layer.routed[0]):
            raise ValueError("its inputs and the routed experts' are not rotated alike")
        try:
            same = join((spec.w13, spec.w2), (own.w13, own.w2)) == (spec.w13, spec.w2)
        except ValueError:
            same = False
        if not same:
            unlike = ", ".join(differences(spec.w13, own.w13) or differences(spec.w2, own.w2))
            raise ValueError(f"it and the routed experts differ in {unlike}")
    return layer


def groups(format: Format, linears: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the linears that one node multiplies: its name -> theirs, in the order of their rows; most are alone.

    Args:
        linears: name -> in the checkpoint.
    """
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        for leaves, whole in JOINED.items():
            parts = tuple(f"{parent}.{part}" for part in leaves)
            if leaf in leaves and not taken & set(parts) and why_apart(format, [linears.get(p) for p in parts]) is None:
                found[f"{parent}.{whole}"] = parts
                taken.update(parts)
        if name not in taken:
            found[name] = (name,)
    return found


def why_apart(format: Format, sources: Sequence[str | None]) -> str | None:
    """Why linears that multiply the same input do not become one; None: they do."""
    modules = [source for source in sources if source is not None]
    if len(modules) < len(sources):
        return "not all are packed"
    if len({replace(format.scheme_of(module), text="") for module in modules}) > 1:
        return "their schemes differ"
    if len(modules) > 1 and format.own_global_scales:
        return "each has a global scale of its own"
    matrices = [format.outline().matrix_of(module) for module in modules]
    try:
        joined(matrices)
    except ValueError as error:
        return str(error)
    return None


def choose_layer(
    layer: MoELayer, layout: str, activations: str | None, scales: str = "exact", floats: str | None = None
) -> MoESpec:
    """Return the attributes of a layer's node; arguments and errors as :func:`choose_experts`."""
    candidate = layer_candidate(layer, layout, activations, scales, floats)
    if candidate.reason or not isinstance(candidate.spec, MoESpec):
        raise CheckpointError(f"{layer.format.ckpt.folder}: {candidate.reason}")
    return candidate.spec


def layer_candidate(
    layer: MoELayer, layout: str, activations: str | None, scales: str = "exact", floats: str | None = None
) -> Candidate:
    """Return a layout's verdict on a layer; its reasons name the layer.

    Raises:
        CheckpointError: the headers do not agree with the configuration, or a tensor that decides is damaged.
    """
    found = _candidate(layout, partial(layer_spec, layer, activations=activations, scales=scales, floats=floats))
    if isinstance(found.spec, MoESpec) and (reason := found.reason or _too_large(found.spec)):
        return replace(found, reason=f"{layer.title}: {reason}")
    return found


def linear_candidate(
    format: Format,
    modules: Sequence[str],
    layout: str,
    *,
    activations: str | None,
    scales: str = "exact",
    floats: str | None = None,
) -> Candidate:
    """Return the choice for a linear outside the experts, quantized or in 16 bits, or for a group of linears.

    Args:
        floats: "bf16" or "f16", the graph's, if the target's packed floats are of that type.
    """
    scheme, m = format.scheme_of(modules[0]), linear_matrix(format.outline(), modules, scales)[0]
    if floats is not None and m.kind in FLOATS:
        taken = NARROW_LINEARS if m.bias is None else FLOAT_LINEARS
        if not all(module.rpartition(".")[2] in taken for module in modules):
            return Candidate(layout, None, "a plain product")
        m = replace(m, kind=floats)
    wanted = activation_format(scheme, activations)
    cut = format.cuts.get(f"{modules[0]}.weight")
    if cut is not None and cut.axis == 1:
        with dividing(format, modules[0]):
            wanted = divided_format(scheme, activations, m)
    found = _candidate(layout, partial(linear_spec, m, activation_format=wanted))
    return replace(found, reason=found.reason.removeprefix("down: "))


def linear_matrix(format: Format, modules: Sequence[str], scales: str) -> tuple[QuantizedMatrix, float]:
    """Return the rows of a group's linears, whose input comes rotated, and see :func:`rounded`."""
    found = [rounded(unrotated(format.matrix_of(module)), scales) for module in modules]
    return found[0][0] if len(found) == 1 else joined([m for m, _ in found]), max(error for _, error in found)


def candidates(format: Format) -> Iterator[tuple[type, str, str, list[Candidate]]]:
    """Yield, for every layer and every quantized linear, what each layout says to it.

    Yields:
        The kind of the node's attributes, the scheme in the tool's words, the module, and the verdict of each layout
        with default activations.
    """
    formats = {layout: format.with_widths(of_layout(layout).own_widths) for layout in LAYOUTS}
    for layer in moe_layers(format):
        apart = {layout: _no_parts(replace(layer, format=own).groups(), layout) for layout, own in formats.items()}
        for group in layer.groups():
            found = [
                Candidate(layout, None, apart[layout])
                if apart[layout]
                else layer_candidate(replace(group, format=own), layout, of_layout(layout).default_activations)
                for layout, own in formats.items()
            ]
            yield MoESpec, group.scheme_text, group.title, found
    names = (name.removesuffix(".weight") for name in format.parameters() if name.endswith(".weight"))
    quantized = {name: name for name in names if format.is_quantized(name)}
    of = {part: parts for parts in groups(format, quantized).values() for part in parts}
    for module in quantized:
        found = [
            linear_candidate(own, of[module], layout, activations=of_layout(layout).default_activations)
            for layout, own in formats.items()
        ]
        yield LinearSpec, format.scheme_of(module).text, module, found


def candidate(spec: MoESpec | LinearSpec) -> Candidate:
    """Return the verdict on a node that there is."""
    return Candidate(spec.w2.layout if isinstance(spec, MoESpec) else spec.w.layout, spec, refusal(spec))


def _candidate(name: str, make: Callable[[ModuleType], MoESpec | LinearSpec]) -> Candidate:
    try:
        spec = make(LAYOUTS[name])
    except CheckpointError:
        raise
    except ValueError as error:
        return Candidate(name, None, str(error))
    return Candidate(name, spec, refusal(spec))


def refusal(spec: MoESpec | LinearSpec) -> str:
    """Why the library of a layout's kernels does not run nodes with these attributes; "" when it does."""
    return of_layout(spec.w2.layout if isinstance(spec, MoESpec) else spec.w.layout).refusal(spec)


def _too_large(spec: MoESpec) -> str:
    """Why TensorRT, if it reads the target's files, cannot hold the layer's tensors; else ""."""
    most = of_layout(spec.w13.layout).max_elements
    for projection in ("w13", "w2") if most is not None else ():
        words = LAYOUTS[spec.w13.layout].row_bytes(spec, projection) // 4
        if most is not None and words * spec.num_experts > most:
            return (
                f"{projection} has {spec.num_experts} experts of {words} int32 words, more than TensorRT's 2^31 "
                f"elements, in which {most // words} experts would fit"
            )
    return ""


def activation_format(scheme: ModuleScheme, choice: str | None) -> str:
    """Return the node's activation_format.

    Args:
        scheme: as the checkpoint says.
        choice: a key of ACTIVATIONS, the user's for weights-only checkpoints; None: as the checkpoint says.
    """
    wanted = scheme.activation_format
    if choice == "float":
        return "none"
    float_only = SCHEMES[scheme.format].float_only
    return ACTIVATIONS[choice] if choice and wanted == "none" and not float_only else wanted


def divided_format(scheme: ModuleScheme, choice: str | None, m: QuantizedMatrix) -> str:
    """Return the activation_format of a linear whose input features are on several ranks: each rounds its own.

    Weights-only checkpoints have float activations there where ``choice`` has a scale of all features, which would take
    the maximum over the ranks.

    Raises:
        ValueError: the checkpoint wants such a scale.
    """
    wanted = activation_format(scheme, choice)
    if scheme.activation_format == "none":
        return "none" if wanted in WHOLE_ROWS else wanted
    if wanted in WHOLE_ROWS and not (wanted == "fp8_tensor" and m.input_scale is not None):
        raise ValueError(
            f"{wanted} rounds activations by the largest of all features, and each rank has a part; expected groups, "
            "a stored scale, --activations float, or --expert-parallel --data-parallel"
        )
    return wanted


def moe_spec(
    layer: MoELayer, expert: Expert, layout: ModuleType, activations: str | None, floats: str | None = None
) -> MoESpec:
    """Return the attributes of the layer's node, if all its experts are like this one.

    Args:
        floats: see :func:`linear_candidate`.

    Raises:
        ValueError: the layout does not carry the expert.
    """
    up, down = (activation_format(scheme, activations) for scheme in (layer.scheme, layer.down_scheme))
    if layer.width < layer.intermediate_size:
        down = divided_format(layer.down_scheme, activations, expert.down)
    if floats is not None:
        parts = (expert.gate, expert.up, expert.down)
        expert = Expert(*(replace(m, kind=floats) if m and m.kind in FLOATS else m for m in parts))  # type: ignore[arg-type]
    w13, w2 = layout.describe(expert, up, down)
    first, count = layer.span
    return MoESpec(
        num_experts=count,
        expert_offset=first,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.width,
        w13=w13,
        w2=w2,
        activation=layer.activation,
        gated=int(layer.gated),
        swiglu_alpha=layer.swiglu_alpha,
        swiglu_limit=layer.swiglu_limit,
        apply_router_weight_on_input=int(layer.apply_router_weight_on_input),
        w2_hadamard=expert.down.hadamard,
    )


def layer_spec(
    layer: MoELayer,
    layout: ModuleType,
    activations: str | None,
    scales: str = "exact",
    floats: str | None = None,
) -> MoESpec:
    """Return the attributes of the layer's node, which carries all its experts.

    Raises:
        ValueError: the layout does not carry an expert, or experts differ in what a node has one of; names the modules.
    """
    outline, odd = layer.outline(), set(layer.odd())

    def describe(e: int) -> MoESpec:
        expert = scaled(outline.expert(e), scales)[0]
        try:
            return moe_spec(layer, expert, layout, activations, floats)
        except ValueError as error:
            raise ValueError(f"{layer.name}.{e}: {error}") from None

    first, *others = layer.routed
    spec = describe(first)
    # Experts may differ in act-order: expert 0 may have none, nothing orders the inputs of one that no token reached.
    # They may in zero points, which decode to none where all are the middle, and in whether gate's and up's inputs
    # share scales, as some layouts want. One whose tensors or scheme are not those of the first is damaged or differs.
    ends = (*DECIDING, *(INPUT_SCALES if layer.format.input_scales else ()))
    decided = any(suffix.endswith(ends) for module in layer.tensors(first) for suffix in module)
    turned = rotations(layer, first)
    for e in others:
        if rotations(layer, e) != turned:
            raise ValueError(f"{layer.name}: experts {first} and {e} are rotated differently, expected one rotation")
        if decided or e in odd:
            other = describe(e)
            try:
                w13, w2 = join((spec.w13, spec.w2), (other.w13, other.w2))
            except ValueError:
                raise ValueError(_difference(layer, first, e, spec, other)) from None
            spec = replace(spec, w13=w13, w2=w2)
    return spec


def differences(a: Projection, b: Projection) -> list[str]:
    """Return what two projections differ in, b's value first."""
    pairs = {f.name: (getattr(b, f.name), getattr(a, f.name)) for f in fields(a) if f.name not in OPTIONAL}
    return [f"{name} ({x} and {y})" for name, (x, y) in pairs.items() if x != y]


def _difference(layer: MoELayer, first: int, e: int, spec: MoESpec, other: MoESpec) -> str:
    """Return what experts ``first`` and ``e`` differ in and must not."""

    names, found = layer.projections[:-1], differences(spec.w13, other.w13)
    if not found:
        names, found = layer.projections[-1:], differences(spec.w2, other.w2)
    texts = [[f"{layer.name}.{i}.{name}", layer.format.scheme_of(f"{layer.name}.{i}.{name}").text]
             for name in names for i in (e, first)]  # fmt: skip
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    a, b = next((pair for pair in pairs if pair[0][1] != pair[1][1]), pairs[0])
    return (
        f"{a[0]} ({a[1]}) and {b[0]} ({b[1]}) differ in {', '.join(found)}; expected the same in all experts of a node"
    )


def linear_spec(m: QuantizedMatrix, layout: ModuleType, activation_format: str) -> LinearSpec:
    """Return the spec of a linear outside the experts."""
    w = layout.describe_down(m, activation_format)
    return LinearSpec(in_features=m.shape[1], out_features=m.shape[0], w=w)


def retyped(expert: Expert, spec: MoESpec) -> Expert:
    """Return an expert whose 16-bit floats are of the types that its node says; see :func:`retyped_matrix`."""
    gate = expert.gate and retyped_matrix(expert.gate, spec.w13.format)
    return Expert(gate, retyped_matrix(expert.up, spec.w13.format), retyped_matrix(expert.down, spec.w2.format))


def retyped_matrix(m: QuantizedMatrix, kind: str) -> QuantizedMatrix:
    """Return a matrix of 16-bit floats in the type that a node says, rounded; any other as it is.

    Raises:
        ValueError: values that float16 cannot hold.
    """
    if m.kind == kind or m.kind not in FLOATS:
        return m
    of = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
    with np.errstate(over="ignore"):
        values = m.codes.view(of[m.kind]).astype(np.float32).astype(of[kind])
    if not np.isfinite(values.astype(np.float32)).all():
        raise ValueError("values that float16 cannot hold; use --dtype bf16")
    return replace(m, kind=kind, codes=values.view(np.uint16))


def scaled(expert: Expert, scales: str) -> tuple[Expert, float]:
    """Return the expert of a node, whose hidden states come rotated, and the largest relative error of its scales.

    Args:
        scales: "exact" or "bf16".
    """
    halves = [m and unrotated(m) for m in (expert.gate, expert.up)]
    found = [None if m is None else rounded(m, scales) for m in (*halves, expert.down)]
    return Expert(*(pair and pair[0] for pair in found)), max(pair[1] for pair in found if pair)  # type: ignore[arg-type]


def rounded(m: QuantizedMatrix, scales: str) -> tuple[QuantizedMatrix, float]:
    """Return one matrix with its scales rounded if need be, and the largest relative error."""
    own = m.scales.dtype.itemsize == 1 or m.scales.dtype.names is not None or SCHEMES[m.kind].own_scales
    if scales == "exact" or own:
        return m, 0.0
    exact = m.scales.astype(np.float64)
    rounded = exact.astype(ml_dtypes.bfloat16)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = float(np.nan_to_num(np.abs(rounded.astype(np.float64) - exact) / np.abs(exact)).max())
    return dataclasses.replace(m, scales=rounded), error
