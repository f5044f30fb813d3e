"""The content of an export's KV cache, from the option, the checkpoint and the target's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from quantmoe.custom_ops.op import AttentionSpec
from quantmoe.exporter.choosing.options import FLOATS
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.reading.checkpoint import Checkpoint
from quantmoe.exporter.reading.weights import kv_cache
from quantmoe.exporter.targets import CPU, Target


@dataclasses.dataclass(frozen=True)
class Caches:
    """The content of the caches of a graph's CachedAttention nodes.

    Attributes:
        codes: module -> cache_format, k_scale, v_scale; modules that are not in it have floats.
        remark: what a user is to know, else "".
    """

    codes: dict[str, tuple[str, float, float]]
    remark: str = ""


def choose_caches(
    ckpt: Checkpoint,
    wanted: str,
    specs: Mapping[str, AttentionSpec],
    *,
    plain: Mapping[str, str],
    sources: Mapping[str, str],
    refusal: Callable[[AttentionSpec], str],
    target: Target = CPU,
) -> Caches:
    """Decide them.

    Args:
        wanted: of CACHES, of floats any. Without the checkpoint's scales, "int8" has scales of each token and "fp8"
            has the scale 1.
        specs: CachedAttention nodes by module. plain: modules that are standard nodes, and why.
        sources: module -> its name in the checkpoint.
        refusal: why the target does not run a node; "" when it does.

    Raises:
        CheckpointError: scales of the checkpoint that are used are missing or not what they should be.
        OptionError: what is asked for cannot be.
    """
    said = kv_cache.find(ckpt)
    if wanted in FLOATS:
        return Caches({}, said.floats("asked for") if said else "")
    if wanted == "auto" and not target.cache_codes and said and said.format:
        own = "int8" if said.format == "int8" else "fp8"
        return Caches({}, said.floats(f"TensorRT takes no codes, --cache {own} keeps them for ONNX Runtime"))
    stored = said is not None and said.format == {"int8": "int8", "fp8": "fp8_e4m3"}.get(wanted, said.format)
    if wanted == "auto" and not (said and said.format):
        return Caches({}, said.remark if said else "")
    format = said.format if stored and said else {"int8": "int8_token", "fp8": "fp8_e4m3"}[wanted]
    if format == "int8_token" and not target.cache_scales:
        raise OptionError(
            f"cache is int8: for target {target.name} int8 needs one scale a layer, and the checkpoint has none; cache "
            "fp8 needs no scales. Target cpu has int8 with a scale of each token"
        )
    reason = next((f"{module} is standard nodes: {why}" for module, why in plain.items()), "")
    for module, spec in specs.items():
        if not reason and (refused := refusal(dataclasses.replace(spec, cache_format=format))):
            reason = f"{module}: {refused}"
    if reason and wanted != "auto":
        raise OptionError(f"cache is {wanted}: {reason}")
    if said and reason:
        return Caches({}, said.floats(reason))
    if not (said and stored):
        what = "the scale 1" if format == "fp8_e4m3" else "scales of each token"
        have = f" in place of the checkpoint's ({said.said})" if said else ", the checkpoint has none"
        return Caches(dict.fromkeys(specs, (format, 1.0, 1.0)), f"the KV cache is {format} with {what}{have}")
    return Caches({m: (format, *kv_cache.scales(ckpt, said, sources[m])) for m in specs}, said.remark)
