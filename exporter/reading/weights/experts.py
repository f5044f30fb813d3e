"""The names of experts in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from quantmoe.exporter.reading.checkpoint import CheckpointError, dense
from quantmoe.exporter.reading.families import family_named
from quantmoe.exporter.reading.weights.base import ALL_BESIDE

if TYPE_CHECKING:
    from quantmoe.exporter.reading.checkpoint import Checkpoint

#: the names of an expert's children: gate, up, down; or up, down where there is no gate
NAMINGS = (
    ("gate_proj", "up_proj", "down_proj"),  # Qwen, DeepSeek, OLMoE, GLM; Mixtral and gpt-oss by some tools
    ("w1", "w3", "w2"),  # Mixtral, MiniMax
    ("up_proj", "down_proj"),  # Nemotron
)
_EXPERT = re.compile(r"(.+\.experts)\.([0-9]{1,6})\.([^.]+)\.[^.]+")


def named_experts(
    ckpt: Checkpoint,
    fused: tuple[str, ...],
    has: Callable[[str], bool] = lambda name: not name.startswith(ALL_BESIDE),
    part: str = "",
) -> dict[str, dict[int, set[str]]]:
    """Return what tensor names show: experts' module -> number -> the children of each; {} where they are fused.

    Args:
        fused: ends of the names of tensors of all experts. has: which tensors count. part: whose they are, if not the
            text model's.

    Raises:
        CheckpointError: there are none, or no operator computes something of the family.
    """
    for kind in (ckpt.config.get("model_type"), ckpt.text_config.get("model_type")):
        if missing := family_named(kind).unsupported:
            raise CheckpointError(f"{ckpt.folder / 'config.json'}: {kind}: {missing} is not supported")
    found: dict[str, dict[int, set[str]]] = {}
    for name in ckpt.names():
        if not has(name):
            continue
        if match := _EXPERT.fullmatch(name):
            found.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
        elif name.endswith(fused):
            found.setdefault(name.rpartition(".")[0], {})
    if not found:
        refuse_dense(ckpt)
        raise CheckpointError(f"{ckpt.folder}: {_absence(ckpt, fused, has, part)}")
    return found


def refuse_dense(ckpt: Checkpoint) -> None:
    """Refuse a model of whose experts neither tensor names nor config.json say anything.

    Raises:
        CheckpointError: it is such a model, which no option helps.
    """
    config, named = ckpt.text_config, any(re.search(r"\bexpert", name) for name in ckpt.names())
    said = config.get("is_moe") is not False and any("expert" in key and value for key, value in config.items())
    if not named and not said:
        raise dense(ckpt.folder, config.get("model_type"))


def _absence(ckpt: Checkpoint, fused: tuple[str, ...], has: Callable[[str], bool], part: str) -> str:
    """Return which names there are none of, and the first tensor that may be experts' by its name or three
    dimensions."""
    if part:
        layer = next((m[1] for name in ckpt.names() if has(name) and (m := re.match(r"(.+?\.\d+)\.", name))), "<layer>")
        return f"no experts of {part}; expected tensors named {_expected(f'{layer}.mlp', fused)}"
    some = [name for name in ckpt.names() if re.search(r"\bexpert", name)]
    some += [name for name in ckpt.names() if len(ckpt.shape(name)) == 3]
    found = f", found {ckpt.where(some[0])} {ckpt.dtype(some[0])} {list(ckpt.shape(some[0]))}" if some else ""
    return f"no experts; expected tensors named {_expected('<layer>', fused)}{found}"


def _expected(layer: str, fused: tuple[str, ...]) -> str:
    return " or ".join(f"{layer}{end}" for end in (".experts.<number>.*", *fused))
