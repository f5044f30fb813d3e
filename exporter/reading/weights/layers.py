"""The MoE layers of a checkpoint: what its tensors' names and config.json say together."""

from __future__ import annotations

import itertools
import re
from typing import Any

from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.config_fields import MAX_SIZE, check_sizes
from quantmoe.exporter.reading.families import GATES
from quantmoe.exporter.reading.weights.base import FLOAT_KINDS, Format, ModuleScheme, MoELayer
from quantmoe.exporter.reading.weights.experts import NAMINGS, named_experts
from quantmoe.exporter.reading.weights.unquantized import Unquantized

#: fields of config.json that count them
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: the same of a token's
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
#: transformers' hidden_act -> op.def's activation
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
#: field with a layer's limit of gates after SiLU, null and 0 for none
STEP_LIMITS = "swiglu_limits"


def moe_layers(format: Format) -> list[MoELayer]:
    """Return the MoE layers that the checkpoint's tensor names show, checked against its config.

    Layers beyond num_hidden_layers (multi-token prediction) are left out, as transformers leaves them out.

    Raises:
        CheckpointError: naming a missing expert, an unknown naming, a layer of another type or a config field.
    """
    check_sizes(format.ckpt.folder, format.ckpt.text_config)
    if format.without_experts:
        return []
    # quantizers that store experts one by one leave those of a part that they do not know fused, in floats
    left = bool(format.part) and not format.fused
    found = named_experts(format.ckpt, Unquantized.fused if left else format.fused, format.has, format.part)
    last = format.ckpt.text_config.get("num_hidden_layers")
    limit = last if type(last) is int and not format.part else MAX_SIZE
    layers = {name: experts for name, experts in found.items() if _index(name) < limit}
    made = []
    for name, experts in layers.items():
        made.append(_layer(Unquantized.rest(format.ckpt) if left and not experts else format, name, experts))
    made.sort(key=lambda layer: layer.index)
    if other := next((layer for layer in made if layer.gated != made[0].gated), None):
        kinds = [f"{layer.name} has {'a' if layer.gated else 'no'} gate" for layer in (made[0], other)]
        raise CheckpointError(f"{format.ckpt.folder}: {', '.join(kinds)}; expected one kind in all layers")
    return made


def _index(name: str) -> int:
    number = re.findall(r"\.([0-9]{1,6})\.", name)
    return int(number[-1]) if number else 0


# over 60 lines: each field of the layer, and what config.json calls it
def _layer(format: Format, name: str, experts: dict[int, set[str]]) -> MoELayer:
    """``experts``: the children of each expert; {} when they are fused."""
    whole, family = format.ckpt.text_config, format.ckpt.family
    config = whole if format.part else of_layer(whole, _index(name))
    path = format.ckpt.folder / CONFIG

    def setting(kind: type, *keys: str) -> Any:
        key = next((key for key in keys if config.get(key) is not None), None)
        if key is None:
            raise CheckpointError(f"{path}: expected one of the fields {', '.join(keys)}")
        found: Any = config[key]
        if family.counts_some and isinstance(found, list) and found:
            found = found[0]
        if type(found) is not kind or (isinstance(found, int) and found <= 0):
            raise CheckpointError(f"{path}: {key} is {found!r}, expected a positive {kind.__name__}")
        return found

    def number(found: Any, key: str) -> float:
        if type(found) not in (int, float):
            raise CheckpointError(f"{path}: {key} is {found!r}, expected a number")
        return float(found)

    num_experts = _stored_count(format, name, experts) or setting(int, *COUNTS)
    if family.counts_some:
        experts = {e: children for e, children in experts.items() if e < num_experts}
    projections = _projections(format, name, experts, num_experts) if experts else ()
    scheme, down_scheme = _schemes(format, name, projections, num_experts)
    limits = config.get(STEP_LIMITS)
    step = (
        number(limits[_index(name)] or 0, STEP_LIMITS) if isinstance(limits, list) and limits[_index(name) :] else 0.0
    )
    activation = family.hidden_act or setting(
        str, "hidden_act", "mlp_hidden_act", "hidden_activation", "activation_function"
    )
    fields = GATES.get(family.gate, (("", 0.0), ("", step)))
    alpha, limit = (number(config.get(key, usual), key) for key, usual in fields)
    if family.gate == "swiglu_tanh" and min(alpha, limit) <= 0:
        names = " and ".join(key for key, _ in fields)
        raise CheckpointError(f"{path}: {names} are {alpha:g} and {limit:g}, expected positive numbers")
    if family.gate != "swiglu_oai" and activation not in ACTIVATIONS:
        raise CheckpointError(f"{path}: activation {activation!r}; supported: {', '.join(ACTIVATIONS)}")
    top_k = setting(int, *TOP_K)
    if top_k > num_experts:
        raise CheckpointError(f"{path}: {top_k} experts a token, expected at most {num_experts}, the number of experts")
    return MoELayer(
        name=name,
        index=_index(name),
        num_experts=num_experts,
        # Nemotron-3-Super and Muse Spark: of experts alone
        hidden_size=setting(int, "moe_latent_size", "moe_hidden_size", "hidden_size"),
        intermediate_size=setting(int, "expert_ffn_hidden_size", "moe_intermediate_size", "intermediate_size"),
        activation=family.gate or ("swiglu_step" if step else ACTIVATIONS.get(activation, "")),
        gated=len(projections) != 2,
        top_k=1 if family.norm_after_expert else top_k,
        scheme=scheme,
        down_scheme=down_scheme,
        swiglu_alpha=alpha,
        swiglu_limit=limit,
        apply_router_weight_on_input=family.weighs_inputs,
        format=format,
        projections=projections,
    )


def of_layer(config: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a text model's configuration with the numbers of experts of one layer, where it has them by layer."""
    layers, own = config.get("num_hidden_layers"), config.get("per_layer_config")
    found = dict(config)
    for key in (*COUNTS, *TOP_K):
        values = config.get(key)
        if isinstance(values, list) and len(values) == layers and index < len(values):
            found[key] = values[index]
    own = own.get(str(index)) if isinstance(own, dict) else None
    return found | {key: own[key] for key in (*COUNTS, *TOP_K) if key in own} if isinstance(own, dict) else found


def _stored_count(format: Format, name: str, experts: dict[int, set[str]]) -> int | None:
    """Return how many experts a layer has by its tensors and by the rows of its router; None where they disagree.

    Pruned checkpoints have other numbers than config.json in some layers, and so may the layers that draft.
    """
    ckpt, mixture = format.ckpt, name.rpartition(".")[0]
    fused = [shape[0] for _, shape in ckpt.beside(name).values() if shape]
    count = len(experts) or (fused[0] if fused and len(set(fused)) == 1 else 0)
    weights = [f"{mixture}.{router}.weight" for router in ("gate", "router")]
    rows = [ckpt.shape(weight)[0] for weight in weights if weight in ckpt and len(ckpt.shape(weight)) == 2]
    return count if rows == [count] and (not experts or max(experts) == count - 1) else None


def _projections(format: Format, name: str, experts: dict[int, set[str]], num_experts: int) -> tuple[str, ...]:
    """Return the naming that all experts of a layer share; every one of them is there, quantized or a 16-bit float."""
    folder = format.ckpt.folder
    if missing := list(itertools.islice((e for e in range(num_experts) if e not in experts), 8)):  # may be absurd
        raise CheckpointError(f"{folder}: {name} lacks the experts {missing}; config.json says {num_experts}")
    if len(experts) > num_experts:
        raise CheckpointError(f"{folder}: {name} has {len(experts)} experts; config.json says {num_experts}")
    naming = next((naming for naming in NAMINGS if set(naming) == set.union(*experts.values())), None)
    if naming is None:
        known = "; ".join("/".join(naming) for naming in NAMINGS)
        raise CheckpointError(f"{folder}: {name}.0 has {sorted(experts[0])}; supported names: {known}")
    for e in range(num_experts):
        for projection in naming:
            module = f"{name}.{e}.{projection}"
            weight = f"{module}.weight"
            if format.is_quantized(module) or (weight in format.ckpt and format.ckpt.dtype(weight) in FLOAT_KINDS):
                continue
            raise CheckpointError(
                f"{folder}: {module} is missing or not quantized; "
                f"expected one of the tensors {', '.join(format.marks)} ({format.name}), "
                f"or a weight in {' or '.join(FLOAT_KINDS)}"
            )
    return naming


def _schemes(
    format: Format, name: str, projections: tuple[str, ...], num_experts: int
) -> tuple[ModuleScheme, ModuleScheme]:
    """Return the schemes of the first expert's gate and up, and down: a node has one activation_format for each of the
    two."""
    if not projections:
        return format.scheme(name), format.scheme(name)
    for e in range(num_experts):
        first, *others = (f"{name}.{e}.{projection}" for projection in projections[:-1])
        wanted = format.scheme_of(first).activation_format
        for module in others:
            if (found := format.scheme_of(module).activation_format) != wanted:
                raise CheckpointError(
                    f"{format.ckpt.folder}: {module} quantizes activations as {found}, {first} as {wanted}; expected "
                    "one way in both, which read the same tokens"
                )
    return format.scheme_of(f"{name}.0.{projections[0]}"), format.scheme_of(f"{name}.0.{projections[-1]}")
