"""compressed-tensors' ``transform_config``: matrices that a tool multiplied weights by, or that each run multiplies
activations by (QuIP, SpinQuant). Read from the library's transform module, 0.20.

Weights are stored as they were after ``weight_input`` and ``weight_output``. Keys and queries are rotated after their
rotary embedding, so their product is the same without two equal orthogonal rotations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: types whose matrix times its transpose is 1
ORTHOGONAL = ("hadamard", "random-hadamard")
TYPES = (*ORTHOGONAL, "random-matrix")
STORED = ("weight_input", "weight_output")
SCORES = {"q_attn", "k_cache"}


def refusal(config: Mapping[str, Any], cached_codes: bool) -> str:
    """Return why a ``transform_config`` is not read; "" where the stored weights are all that it says.

    Args:
        cached_codes: the checkpoint has scales of rotated keys.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return f"transform_config has {', '.join(config) or 'nothing'}, expected config_groups"
    for name, group in groups.items():
        if reason := _group_refusal(group, cached_codes):
            return f"transform_config's group {name!r}: {reason}"
    return ""


def _group_refusal(group: Any, cached_codes: bool) -> str:
    if not isinstance(group, dict) or not isinstance(applied := group.get("apply", []), list):
        return f"found {group!r}, expected type and apply"
    if (kind := group.get("type")) not in TYPES:
        return f"type {kind!r}, expected one of {', '.join(TYPES)}"
    scores = []
    for args in applied:
        location = args.get("location") if isinstance(args, dict) else args
        if location in SCORES:
            where = (repr(args.get("targets")), repr(args.get("ignore") or []), bool(args.get("inverse")))
            scores.append((location, where))
        elif location in ("input", "output"):
            return (
                f"it multiplies the {location} of {args.get('targets')} by a matrix in each run, which no node does; "
                "expected rotations that are in the weights (llm-compressor: SpinQuantModifier with R1 and R2)"
            )
        elif location not in STORED:
            return f"location {location!r}, expected one of {', '.join((*STORED, *sorted(SCORES), 'input', 'output'))}"
    for where in {where for _, where in scores}:
        if {location for location, other in scores if other == where} != SCORES or kind not in ORTHOGONAL:
            return (
                f"{kind} on {' and '.join(location for location, _ in scores)}: scores differ without it; expected "
                f"one of {', '.join(ORTHOGONAL)} on q_attn and k_cache of the same modules"
            )
    if scores and cached_codes:
        return "k_scale is of rotated keys, which the KV cache does not hold; expected no kv_cache_scheme"
    return ""
