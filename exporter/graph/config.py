"""A checkpoint's configuration as transformers reads it, and what of it no graph has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.config_fields import check_sizes, text_part
from quantmoe.exporter.reading.families import family_named
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.reading.weights.layers import COUNTS, TOP_K

#: fields that choose code for attention or experts, under their public and inner names
_IMPLEMENTATION = re.compile("_?(attn|experts)_implementation(?:_internal)?")


def configuration(format: Format, layers: int | None) -> Any:
    """Return the configuration of a checkpoint's language model.

    Args:
        layers: of the first so many layers; None: of all.

    Raises:
        CheckpointError: it is of no architecture of transformers, or of one that a graph cannot follow.
    """
    folder, raw = format.ckpt.folder, format.ckpt.config
    for part in (raw, text_part(raw)):
        if isinstance(part, dict):
            check_sizes(format.ckpt.folder, part)
    with _validating(folder):
        outer = whole(format)
        config = outer.get_text_config()
        if format.slice:
            format.slice.narrow(config, str(folder / CONFIG))
    if not isinstance(config, PreTrainedConfig):
        raise CheckpointError(f"{folder / 'config.json'}: text_config is {config!r}, expected a configuration")
    check_sizes(format.ckpt.folder, vars(config))
    # LongCat-Flash counts two caches a layer in the latter
    _check_layers(format, getattr(config, "num_layers", None) or config.num_hidden_layers)
    _check_linear_heads(format, config)
    _check_rope(format, config)
    if family_named(config.model_type).text_class:  # whose heads are the outer model's
        outer = getattr(outer, "thinker_config", outer)
        config.tie_word_embeddings = getattr(outer, "tie_word_embeddings", False)
    if config.is_heterogeneous and config.per_layer_attributes <= {*COUNTS, *TOP_K}:
        config.allow_global_per_layer_attribute_access = True  # graph/experts.py fits the layers to the tensors
    _dense_layers(format, config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if layers is not None:
        config.num_hidden_layers = layers
        if vars(config).get("layer_types"):  # of Jamba they follow from periods
            config.layer_types = config.layer_types[:layers]
    return config


def whole(format: Format) -> Any:
    """Return the configuration of all of a checkpoint's model.

    Raises:
        CheckpointError: it is of no architecture of transformers.
    """
    check_implementations(format.ckpt.config, format.ckpt.folder / CONFIG)
    with _validating(format.ckpt.folder):
        # never code out of the checkpoint's folder, nor a question whether to run it
        return with_own_code(AutoConfig.from_pretrained(format.ckpt.companions, trust_remote_code=False))


def check_implementations(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a configuration that names code which transformers would fetch: ``"attn_implementation": "org/repo"``.

    Args:
        path: of the file, for the message.

    Raises:
        CheckpointError: naming the field, also of a part of the model.
    """
    known = {
        "attn": ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()],
        "experts": ["eager", *ALL_EXPERTS_FUNCTIONS.keys()],
    }
    # without those that the exporter registers
    known = {kind: [name for name in names if not name.startswith("quantmoe")] for kind, names in known.items()}
    waiting: list[tuple[str, object, list[str] | None]] = [("", config, None)]  # the last: what a field may say
    while waiting:
        where, value, allowed = waiting.pop()
        if isinstance(value, Mapping | list):
            for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
                found = _IMPLEMENTATION.fullmatch(str(key))
                waiting.append((f"{where}.{key}" if where else str(key), inner, known[found[1]] if found else allowed))
        elif allowed is not None and value is not None and value not in allowed:
            raise CheckpointError(
                f"{path}: {where} is {value!r}, which is no part of transformers: no code is fetched for an export; "
                f"expected one of {', '.join(sorted(allowed))}, or remove the field"
            )


def with_own_code(config: Any) -> Any:
    """Return a configuration, and the parts of it, with transformers' plain attention and experts: nothing asks the
    hub."""
    config._attn_implementation = config._experts_implementation = "eager"
    return config


@contextlib.contextmanager
def _validating(folder: Path) -> Iterator[None]:
    try:
        with doing(str(folder / CONFIG)):
            yield
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:  # the validators' exceptions have no common base class
        reason = str(error)
        if "trust_remote_code" in reason:  # an option of transformers' functions, which nothing here has
            reason = (
                f"transformers {transformers.__version__} does not know its model_type, and auto_map names code of the "
                "checkpoint, which is never run; a later transformers may know it: pip install --upgrade transformers"
            )
        raise CheckpointError(f"{folder / 'config.json'}: not an architecture of transformers: {reason}") from None


def _check_layers(format: Format, count: int) -> None:
    """Refuse layers that have no tensors, and Nemotron's lists of another length, which transformers takes."""
    own = format.ckpt.text_config.get("num_hidden_layers")
    for field in ("hybrid_override_pattern", "layers_block_type"):
        blocks = format.ckpt.text_config.get(field)
        if isinstance(blocks, str | list) and type(own) is int and len(blocks) != own:
            raise CheckpointError(
                f"{format.ckpt.folder / 'config.json'}: {field} is of {len(blocks)} layers, expected "
                f"num_hidden_layers, {own}"
            )
    found = {match[1] for name in format.ckpt.names() if (match := re.search(r"\blayers\.([0-9]{1,6})\.", name))}
    if found and count > len(found):
        raise CheckpointError(
            f"{format.ckpt.folder / 'config.json'}: num_hidden_layers is {count}, the checkpoint has tensors of "
            f"{len(found)} layers"
        )


def _dense_layers(format: Format, config: PreTrainedConfig) -> None:
    """Make layers dense whose tensors are a dense MLP's, whatever the configuration says of them."""
    if format.part:
        return
    names = list(format.ckpt.names())
    sparse = {int(m[1]) for name in names if (m := re.search(r"\blayers\.(\d{1,6})\.(?:.*\.)?experts\.", name))}
    mlp = r"\blayers\.(\d{1,6})\.mlp\.down_proj\."
    dense = {int(m[1]) for name in names if (m := re.search(mlp, name))} - sparse
    kinds = getattr(config, "mlp_layer_types", None)
    if isinstance(kinds, list):
        config.mlp_layer_types = ["dense" if i in dense else kind for i, kind in enumerate(kinds)]
    elif isinstance(getattr(config, "mlp_only_layers", None), list):
        config.mlp_only_layers = sorted(dense | set(config.mlp_only_layers))


def _check_rope(format: Format, config: PreTrainedConfig) -> None:
    """Refuse a rope type that transformers does not know, of all layers or of a type of layers."""
    parameters = getattr(config, "rope_parameters", None)
    for rope in [parameters, *(parameters or {}).values()] if isinstance(parameters, dict) else []:
        kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
        if not isinstance(kind, str) or kind not in {"default", *ROPE_INIT_FUNCTIONS}:
            raise CheckpointError(
                f"{format.ckpt.folder / 'config.json'}: rope_type is {kind!r}, transformers {transformers.__version__} "
                f"knows default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}; a later transformers may know it: "
                "pip install --upgrade transformers"
            )


def _check_linear_heads(format: Format, config: PreTrainedConfig) -> None:
    """Refuse linear attention whose value heads do not share the key heads evenly: transformers divides them."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", 1) for kind in ("key", "value"))
    if keys < 1 or values < 1 or values % keys:
        raise CheckpointError(
            f"{format.ckpt.folder / 'config.json'}: linear_num_value_heads is {values}, expected a positive multiple "
            f"of linear_num_key_heads, {keys}"
        )
