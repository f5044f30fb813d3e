"""What the session entry ``quantmoe.trace`` writes: which experts tokens were routed to (docs/experts.md)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError

NONE = 0xFFFF


@dataclass(frozen=True)
class Trace:
    """A trace.

    Attributes:
        layers: node, experts and bytes (of one expert) of each.
        slot_bytes: what one expert takes of the CPU library's cache.
        runs: of nodes, in their order: the layer, and ids uint16 [tokens, top_k], 0xFFFF for none.
    """

    layers: list[dict[str, Any]]
    slot_bytes: int
    runs: list[tuple[int, np.ndarray]]

    @property
    def tokens(self) -> int:
        return sum(len(ids) for layer, ids in self.runs if layer == 0)

    def visits(self) -> Iterator[list[tuple[int, int]]]:
        """(layer, expert) that each run of a node needs, ascending."""
        for layer, ids in self.runs:
            yield [(layer, int(e)) for e in np.unique(ids) if e != NONE]

    def lru(self, slots: int | Sequence[int]) -> tuple[int, int, int]:
        """Hits, misses and missed bytes of a cache of so many experts, or of each layer, that evicts the least recently
        used.

        The counts of ``quantmoe.experts`` = disk with slots for all experts of a run at least.
        """
        shared: OrderedDict[tuple[int, int], None] = OrderedDict()
        caches = [shared if isinstance(slots, int) else OrderedDict() for _ in self.layers]
        hits = misses = missed = 0
        for visit in self.visits():
            for key in visit:
                cache = caches[key[0]]
                if key in cache:
                    hits += 1
                    cache.move_to_end(key)
                    continue
                misses += 1
                missed += self.layers[key[0]]["bytes"]
                if len(cache) == (slots if isinstance(slots, int) else slots[key[0]]):
                    cache.popitem(last=False)
                cache[key] = None
        return hits, misses, missed

    def use(self) -> list[np.ndarray]:
        """Tokens of each expert, by layer."""
        counts = [np.zeros(layer["experts"], np.int64) for layer in self.layers]
        for layer, ids in self.runs:
            counts[layer] += np.bincount(ids[ids != NONE], minlength=len(counts[layer]))
        return counts


def read_trace(path: str | Path) -> Trace:
    """A trace; of a session that still runs, what it has written so far.

    Raises:
        ModelError: it is none, or damaged.
    """
    data = Path(path).read_bytes()
    end = data.find(b"\n")
    try:
        header = json.loads(data[: max(end, 0)])
        layers, slot_bytes = header["layers"], header["slot_bytes"]
        known = header["quantmoe_trace"] == 1 and slot_bytes > 0
        known = known and all(layer["experts"] + layer["bytes"] > 0 for layer in layers)
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise ModelError(f"{path}: expected a trace of version 1, which begins with a line of JSON")
    words, runs, at = np.frombuffer(data, "<u2", (len(data) - end - 1) // 2, end + 1), [], 0
    while at + 4 <= len(words):
        layer, top_k, low, high = map(int, words[at : at + 4])
        tokens = low | high << 16
        ids = words[at + 4 : at + 4 + tokens * top_k]
        if len(ids) < tokens * top_k:
            break  # cut where the session ended or has come to
        if layer >= len(layers) or np.any((ids != NONE) & (ids >= layers[layer]["experts"])):
            raise ModelError(
                f"{path}: record at word {at} is of layer {layer} of {len(layers)}, or has ids that it lacks"
            )
        runs.append((layer, ids.reshape(tokens, top_k)))
        at += 4 + tokens * top_k
    return Trace(layers, slot_bytes, runs)


def curve(trace: Trace, slots: Sequence[int], read: float) -> list[dict[str, float]]:
    """For numbers of slots: memory, hit rate, bytes read a token, tokens/s that reading ``read`` bytes/s allows."""
    tokens, rows = max(trace.tokens, 1), []
    for count in slots:
        hits, misses, missed = trace.lru(count)
        rows.append(
            {
                "slots": count,
                "bytes": count * trace.slot_bytes,
                "hit_rate": hits / max(hits + misses, 1),
                "read": missed / tokens,
                "tokens_per_second": read * tokens / missed if missed else float("inf"),
            }
        )
    return rows
