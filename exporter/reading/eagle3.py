"""EAGLE-3 heads: a folder with config.json and safetensors of one decoder layer that drafts for another checkpoint.

The format is what SpecForge writes, and SGLang's llama_eagle3.py and vLLM's llama_eagle3.py read (arXiv 2503.01840).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.reading.checkpoint import Checkpoint
from quantmoe.exporter.reading.config_fields import check_sizes
from quantmoe.exporter.reading.families import EAGLE3, FEATURES
from quantmoe.exporter.reading.hub import fetched

#: tensors of a head; t2d says which tokens d2t has
_TENSORS = re.compile(
    r"(fc|norm|lm_head|embed_tokens|midlayer\.(input_layernorm|hidden_norm|post_attention_layernorm|"
    r"self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj))\.(weight|bias)|d2t|t2d"
)


def take_head(ckpt: Checkpoint, folder: Path) -> None:
    """Give a checkpoint the tensors and the configuration of a head that drafts for it.

    Raises:
        CheckpointError: naming the file, the field or tensor, and what is expected.
    """
    head = Checkpoint(fetched(folder))
    path = head.folder / CONFIG
    check_sizes(head.folder, head.config)
    own = head.config.get("eagle_config")
    for field, found, expected in (
        ("model_type", head.config.get("model_type"), "llama"),
        ("num_hidden_layers", head.config.get("num_hidden_layers", 1), 1),
        ("quantization_config", head.config.get("quantization_config"), None),
        ("use_aux_hidden_state", own.get("use_aux_hidden_state", True) if isinstance(own, dict) else True, True),
    ):
        if found != expected:
            raise CheckpointError(f"{path}: {field} is {found!r}, expected {expected!r}, of an EAGLE-3 head of floats")
    if ckpt.companions != ckpt.folder:
        raise CheckpointError(f"{ckpt.folder}: eagle3 needs the folder of a checkpoint with safetensors, not GGUF")
    names = {}
    for name in head.names():
        own_name = re.sub(r"^(model\.)?(layers\.0\.)?", lambda m: "midlayer." if m[2] else "", name)
        if not _TENSORS.fullmatch(own_name):
            raise CheckpointError(f"{head.where(name)}: no tensor of an EAGLE-3 head with a layer like Llama's")
        names[name] = FEATURES + own_name if own_name.startswith("fc.") else EAGLE3 + own_name
    if f"{FEATURES}fc.weight" not in names.values():
        raise CheckpointError(f"{head.folder}: fc.weight is missing; expected an EAGLE-3 head")
    ckpt.add_from(head, names)
    ckpt.head = head


def feature_layers(config: Mapping[str, Any], layers: int, path: Path) -> list[int]:
    """Return the layers of the model whose outputs a head reads, in the order of its ``fc``.

    ``eagle_config`` (SGLang) counts layers; vLLM's own field counts the inputs of layers. Without them both take the
    inputs of layers 2, n / 2 and n - 3.

    Args:
        config: the head's. layers: n, of the model.

    Raises:
        CheckpointError: there are no such layers.
    """
    own, name = config.get("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    inside = own.get(name) if isinstance(own, dict) else None
    found = inside or config.get(name) or [2, layers // 2, layers - 3]
    if not isinstance(found, list) or not all(type(i) is int for i in found):
        raise CheckpointError(f"{path}: {name} is {found!r}, expected numbers of layers")
    found = found if inside else [i - 1 for i in found]
    if not all(0 <= i < layers for i in found):
        raise CheckpointError(
            f"{path}: the head reads the outputs of layers {found} (from 0), and the model has {layers}; expected the "
            "model that it was trained for"
        )
    return found
