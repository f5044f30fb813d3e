"""Sizes of a checkpoint's exports beside a memory, from headers alone: ``inspect CHECKPOINT --fit``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.targets import TARGETS
from quantmoe.exporter.writing.plan import plan

#: values of ``--quantize`` for a checkpoint of floats, the smallest first; others lie between these
SIZES = ("int4", "q4_k_m", "q6_k", "int8", "none")


@dataclass(frozen=True, kw_only=True)
class ExportSize:
    """Bytes that an export takes of a memory.

    Attributes:
        quantize: value of ``--quantize``; None: the checkpoint's own format.
        refused: why there is no such export; then the sizes are 0.
        experts, others: weights. cache: of a sequence. reserve: workspaces and the engine.
        least: experts that must be in memory: one of each layer on a GPU, one on the CPU.
    """

    quantize: str | None
    refused: str = ""
    experts: int = 0
    others: int = 0
    cache: int = 0
    reserve: int = 0
    least: int = 0

    @property
    def total(self) -> int:
        """Bytes with which all experts stay in memory."""
        return self.experts + self.others + self.cache + self.reserve

    def held(self, memory: int) -> float:
        """Return the share of the experts that fits, from 0 to 1."""
        room = memory - (self.total - self.experts)
        return 0.0 if room < self.least else min(room / self.experts, 1.0)


def export_sizes(
    checkpoint: Path,
    *,
    target: str,
    context: int,
    reserve: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ExportSize]:
    """Return what exports for a target take: one for each of SIZES, or one of a quantized checkpoint.

    Args:
        context: tokens in the cache. reserve: bytes; None: the target's.

    Raises:
        CheckpointError: every one of them is refused.
    """
    kinds = SIZES if survey(checkpoint).get("format", "") is None else (None,)
    facts, found = TARGETS[target], []
    for done, quantize in enumerate(kinds):
        progress(done, len(kinds))
        try:
            planned = plan(checkpoint, None, target=target, quantize=quantize)
        except CheckpointError as error:
            found.append(ExportSize(quantize=quantize, refused=str(error)))
            continue
        one = [size // spec.num_experts for _, spec, size in planned.layers.values()]
        found.append(
            ExportSize(
                quantize=quantize,
                experts=planned.packed,
                others=planned.dense,
                cache=context * planned.cache + planned.states,
                reserve=facts.reserve if reserve is None else reserve,
                least=sum(one) if facts.on_gpu else max(one, default=0),
            )
        )
    progress(len(kinds), len(kinds))
    if all(size.refused for size in found):
        raise CheckpointError(found[0].refused)
    return found
