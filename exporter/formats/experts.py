"""How checkpoints name their experts, and what config.json says about them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.formats.base import MoELayer, Scheme

if TYPE_CHECKING:
    from quantmoe.exporter.formats.base import Format

#: (gate, up, down) by the names of an expert's children; None where there is no gate
NAMINGS = (
    (
        "gate_proj",
        "up_proj",
        "down_proj",
    ),  # Qwen, DeepSeek, OLMoE, GLM, gpt-oss by llm-compressor, Mixtral by gptqmodel
    ("w1", "w3", "w2"),  # Mixtral, MiniMax
    ("up_proj", "down_proj"),  # Nemotron: not gated
)
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.([^.]+)\.[^.]+")
#: transformers' hidden_act -> op.def's activation
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}


def moe_layers(format: Format) -> list[MoELayer]:
    """The MoE layers that the checkpoint's tensor names show, checked against its config.

    Raises:
        CheckpointError: naming a missing expert, an unknown naming, an unquantized layer or a config field.
    """
    found: dict[str, dict[int, set[str]]] = {}
    for name in format.ckpt.names():
        if match := _EXPERT.fullmatch(name):
            found.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    if not found:
        raise CheckpointError(f"{format.ckpt.folder}: no experts; expected tensors named <layer>.experts.<number>.*")
    return sorted((_layer(format, name, experts) for name, experts in found.items()), key=lambda layer: layer.index)


def _layer(format: Format, name: str, experts: dict[int, set[str]]) -> MoELayer:
    ckpt = format.ckpt
    config = ckpt.text_config

    def setting(*keys: str) -> Any:
        for key in keys:
            if config.get(key) is not None:
                return config[key]
        raise CheckpointError(f"{ckpt.folder / 'config.json'}: none of {', '.join(keys)} is present")

    num_experts = setting("num_experts", "num_local_experts", "n_routed_experts")
    if sorted(experts) != list(range(num_experts)):
        missing = sorted(set(range(num_experts)) - experts.keys())
        extra = sorted(experts.keys() - set(range(num_experts)))
        raise CheckpointError(
            f"{ckpt.folder}: {name} has {len(experts)} experts, config.json says {num_experts}; "
            + (f"missing {missing[:8]}" if missing else f"unexpected {extra[:8]}")
        )
    projections = next((naming for naming in NAMINGS if experts[0] == set(naming)), None)
    if projections is None:
        known = "; ".join("/".join(naming) for naming in NAMINGS)
        raise CheckpointError(f"{ckpt.folder}: {name}.0 has {sorted(experts[0])}; known are {known}")
    for e, children in experts.items():
        if children != set(projections):
            raise CheckpointError(
                f"{ckpt.folder}: {name}.{e} has {sorted(children)}, expected {sorted(projections)} as in expert 0"
            )

    gated = len(projections) == 3
    oai = config.get("model_type") == "gpt_oss"
    activation = setting("hidden_act", "mlp_hidden_act", "hidden_activation")
    if not oai and activation not in ACTIVATIONS:
        raise CheckpointError(
            f"{ckpt.folder / 'config.json'}: activation {activation!r}; supported: {', '.join(ACTIVATIONS)}"
        )
    number = re.findall(r"\.(\d+)\.", name)
    return MoELayer(
        name=name,
        index=int(number[-1]) if number else 0,
        num_experts=num_experts,
        hidden_size=setting("hidden_size"),
        intermediate_size=setting("moe_intermediate_size", "intermediate_size"),
        activation="swiglu_oai" if oai else ACTIVATIONS[activation],
        gated=gated,
        top_k=setting("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"),
        scheme=_scheme(format, name, projections, num_experts),
        # transformers' GptOssExperts has alpha 1.702 as a constant and the limit in its config
        swiglu_alpha=1.702 if oai else 0.0,
        swiglu_limit=float(config.get("swiglu_limit", 7.0)) if oai else 0.0,
        format=format,
        projections=projections,
    )


def _scheme(format: Format, name: str, projections: tuple[str, ...], num_experts: int) -> Scheme:
    for e in range(num_experts):
        for projection in projections:
            if not format.is_quantized(f"{name}.{e}.{projection}"):
                raise CheckpointError(
                    f"{format.ckpt.folder}: {name}.{e}.{projection} is not quantized ({format.name}); "
                    f"expected one of the tensors {', '.join(format.marks)}"
                )
    return format.scheme(f"{name}.0.{projections[0]}")
