"""The session entry ``quantmoe.trace`` writes which experts each token took.

The file begins with one line of JSON: ``quantmoe_trace`` (1), ``slot_bytes`` (of the CPU library) and ``layers``. Each
layer has ``node``, ``experts`` and the ``bytes`` of one expert. Then come records of little-endian uint16: the layer,
top_k, the number of tokens (low half, high half), and ids [tokens, top_k]. 0xFFFF means none.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError

NONE = 0xFFFF
#: what a plot's name may end with
PLOTS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Trace:
    """A trace.

    Attributes:
        layers: node, experts and bytes (of one expert) of each.
        slot_bytes: what one expert takes of the CPU library's cache.
        runs: of nodes, in their order: the layer, and ids uint16 [tokens, top_k], 0xFFFF for none.
        cut: bytes at the end of the file that are no whole record.
    """

    layers: list[dict[str, Any]]
    slot_bytes: int
    runs: list[tuple[int, np.ndarray]]
    cut: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(ids) for layer, ids in self.runs if layer == 0)

    def visits(self) -> Iterator[list[tuple[int, int]]]:
        """(layer, expert) that each run of a node needs, ascending."""
        for layer, ids in self.runs:
            yield [(layer, int(e)) for e in np.unique(ids) if e != NONE]

    def lru(self, *levels: int | Sequence[int]) -> tuple[int, int, int]:
        """Return hits, misses and missed bytes of a cache that evicts the least recently used expert.

        The numbers are those that ``quantmoe.experts`` = disk counts, if there are slots for all experts of a run.

        Args:
            levels: experts in the cache, or in each layer's cache. A further level is asked for what the level before
                misses; the result is of the last level.
        """
        asked = missed = list(self.visits())
        for slots in levels:
            asked, missed = missed, list(self._missed(missed, slots))
        misses = sum(map(len, missed))
        size = sum(self.layers[layer]["bytes"] for visit in missed for layer, _ in visit)
        return sum(map(len, asked)) - misses, misses, size

    def _missed(
        self, visits: Iterable[list[tuple[int, int]]], slots: int | Sequence[int]
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield what of each visit is not in such a cache."""
        shared: OrderedDict[tuple[int, int], None] = OrderedDict()
        caches = [shared if isinstance(slots, int) else OrderedDict() for _ in self.layers]
        for visit in visits:
            missed = []
            for key in visit:
                cache = caches[key[0]]
                if key in cache:
                    cache.move_to_end(key)
                    continue
                missed.append(key)
                if len(cache) == (slots if isinstance(slots, int) else slots[key[0]]):
                    cache.popitem(last=False)
                cache[key] = None
            yield missed

    def use(self) -> list[np.ndarray]:
        """Return the tokens of each expert, by layer."""
        counts = [np.zeros(layer["experts"], np.int64) for layer in self.layers]
        for layer, ids in self.runs:
            counts[layer] += np.bincount(ids[ids != NONE], minlength=len(counts[layer]))
        return counts

    def distances(self) -> np.ndarray:
        """int64 [uses]: how many runs of its node ago each expert was used before; 0: it was not."""
        ran, found = [0] * len(self.layers), []
        last: dict[tuple[int, int], int] = {}
        for visit in self.visits():
            for key in visit:
                found.append(ran[key[0]] - last[key] if key in last else 0)
                last[key] = ran[key[0]]
            for layer in {layer for layer, _ in visit}:
                ran[layer] += 1
        return np.array(found, np.int64)


def read_trace(path: str | Path) -> Trace:
    """Return a trace; of a session that still runs, what it has written so far.

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
    return Trace(layers, slot_bytes, runs, len(data) - end - 1 - 2 * at)


def curve(trace: Trace, slots: Sequence[int], read: float) -> list[dict[str, float]]:
    """Return a row for each number of slots: memory, hit rate, bytes read a token, tokens/s at ``read`` bytes/s."""
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


def draw(trace: Trace, rows: Sequence[dict[str, float]], path: Path) -> None:
    """Three panels: how unevenly experts are used, how soon again, and what a cache hits; rows are :func:`curve`'s."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (use, reuse, hits) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for counts in trace.use():
        use.plot(np.linspace(0, 100, len(counts)), 100 * np.sort(counts)[::-1].cumsum() / max(counts.sum(), 1), "0.6")
    use.plot([0, 100], [0, 100], "k:")
    use.set(xlabel="% of a layer's experts, the busiest first", ylabel="% of its uses")
    distances = trace.distances()
    runs = np.unique(np.geomspace(1, max(distances.max(initial=1), 1), 30).astype(int))
    within = [100 * np.mean((distances > 0) & (distances <= run)) if len(distances) else 0 for run in runs]
    reuse.plot(runs, within, "o-")
    reuse.set(xlabel="runs of the layer", ylabel="% of uses that it had used in so many", xscale="log", ylim=(0, 100))
    hits.plot([row["slots"] for row in rows], [100 * row["hit_rate"] for row in rows], "o-")
    hits.set(xlabel="slots of a cache of all layers", ylabel="% of uses that hit", ylim=(0, 100))
    figure.savefig(path, dpi=120)
    plt.close(figure)
