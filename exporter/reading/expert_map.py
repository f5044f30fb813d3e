"""An expert map says which experts stand on which rank.

The file is JSON, ``{"physical_to_logical_map": [[...], ...]}``, in the format of DeepSeek's EPLB. Each row is a layer
with experts: the experts that the ranks hold one after the other, equally many for each rank. Every expert appears at
least once, and never twice in a rank. The position of a token selects its copy. Shared experts are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from quantmoe.exporter.errors import CheckpointError, OptionError

KEY = "physical_to_logical_map"


@dataclass(frozen=True)
class Placement:
    """The ranks of a layer's experts: ``ranks[r]`` has the ids of rank r's, in the order of its file."""

    ranks: tuple[tuple[int, ...], ...]

    @property
    def copies(self) -> int:
        """The number of copies of the expert that stands most often."""
        return int(np.bincount(np.concatenate(self.ranks)).max())

    def table(self, rank: int, every: int) -> np.ndarray:
        """Return the rows of the rank's file: int64 [copies, every], -1 where another rank has the pair.

        Column e is expert e's. A token at position p takes row p % copies, and so copy p % copies % (copies of e).
        Exactly one rank computes each pair.
        """
        found = np.full((self.copies, every), -1)
        for expert in range(every):
            places = [(r, own.index(expert)) for r, own in enumerate(self.ranks) if expert in own]
            for row in range(self.copies if places else 0):
                holder, at = places[row % len(places)]
                if holder == rank:
                    found[row, expert] = at
        return found

    def load(self, tokens: ArrayLike) -> np.ndarray:
        """Return the load of each rank, for ``tokens`` of each expert."""
        each = np.asarray(tokens, float)
        each = each / np.maximum(np.bincount(np.concatenate(self.ranks), minlength=len(each)), 1)
        return np.array([each[list(own)].sum() for own in self.ranks])


def read_text(path: Path) -> str:
    """Return what a map's file says.

    Raises:
        OptionError: the file cannot be read, or is no map.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"expert_map {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(_expected(path)) from None


def _expected(path: Path) -> str:
    return f'expert_map {path}: expected JSON, {{"{KEY}": [[expert, ...], ...]}}'


def placements(path: Path, world: int, experts: Mapping[int, int]) -> dict[int, Placement]:
    """Return what a map says of each layer.

    Args:
        world: ranks. experts: how many routed ones each layer has, by the layer's number, in the model's order.

    Raises:
        OptionError: the file cannot be read, or is no map.
        CheckpointError: it does not fit the model or the number of ranks; names the file and the layer.
    """
    text = read_text(path)
    try:
        rows = json.loads(text)[KEY]
        if any(type(e) is not int for row in rows for e in row):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise OptionError(_expected(path)) from None
    if len(rows) != len(experts):
        raise CheckpointError(f"{path}: {KEY} has {len(rows)} rows, expected one for each of {len(experts)} layers")
    found = {}
    for row, (layer, count) in zip(rows, experts.items(), strict=True):
        where = f"{path}: {KEY} of layer {layer}"
        if not row or len(row) % world:
            raise CheckpointError(f"{where} has {len(row)} experts, expected as many in each of {world} ranks")
        if missing := set(range(count)) - set(row):
            raise CheckpointError(f"{where} has not expert {min(missing)}")
        if strange := set(row) - set(range(count)):
            raise CheckpointError(
                f"{where} has expert {min(strange)}, expected 0 to {count - 1}; quantmoe trace --shared leaves out "
                "experts that are no routed ones"
            )
        size = len(row) // world
        ranks = tuple(tuple(row[r * size : (r + 1) * size]) for r in range(world))
        for r, own in enumerate(ranks):
            if len(set(own)) < size:
                raise CheckpointError(f"{where} has an expert twice in rank {r}")
        found[layer] = Placement(ranks)
    return found


def balance(tokens: ArrayLike, world: int, copies: int) -> Placement:
    """Return a placement with ``copies`` more copies, for the hottest experts.

    Each expert or copy, the hottest first, goes to the idlest rank with room. These are the greedy steps of DeepSeek's
    EPLB (replicate, then pack), within one group of ranks.

    Args:
        tokens: of each expert.

    Raises:
        OptionError: experts and copies are no multiple of the ranks, or more than one of an expert in a rank.
    """
    load = np.asarray(tokens, float)
    experts = len(load)
    size, rest = divmod(experts + copies, world)
    if rest or size > experts:
        raise OptionError(
            f"{experts} experts and {copies} copies among {world} ranks: expected a multiple of the ranks, and at most "
            f"{experts} in each"
        )
    counts = np.ones(experts, int)
    for _ in range(copies):
        more = np.where(counts < world, load / counts, -1)
        counts[int(more.argmax())] += 1
    ranks: list[list[int]] = [[] for _ in range(world)]
    busy = np.zeros(world)
    for expert in sorted(np.repeat(np.arange(experts), counts).tolist(), key=lambda e: (-load[e] / counts[e], e)):
        room = [r for r in range(world) if len(ranks[r]) < size and expert not in ranks[r]]
        if not room:  # the last places are where it stands already: it changes places with another
            expert = _exchange(ranks, expert, size)
            room = [r for r in range(world) if len(ranks[r]) < size and expert not in ranks[r]]
        rank = min(room, key=lambda r: (busy[r], r))
        ranks[rank].append(expert)
        busy[rank] = sum(load[e] / counts[e] for e in ranks[rank])
    return Placement(tuple(tuple(sorted(own)) for own in ranks))


def _exchange(ranks: list[list[int]], expert: int, size: int) -> int:
    """Put an expert into a full rank in the place of one that a rank with room lacks, and return that one."""
    free = [own for own in ranks if len(own) < size]
    for own in ranks:
        if expert in own:
            continue
        for i, other in enumerate(own):
            if any(other not in rank for rank in free):
                own[i] = expert
                return other
    raise AssertionError("size is at most the number of experts")


def in_order(experts: int, world: int) -> Placement:
    """Without a map: :meth:`Slice.ids`."""
    return Placement(tuple(tuple(range(r * experts // world, (r + 1) * experts // world)) for r in range(world)))


def write_map(path: Path, found: Sequence[Placement]) -> None:
    """Write a map, a row a layer."""
    rows = [[e for own in placement.ranks for e in own] for placement in found]
    path.write_text(json.dumps({KEY: rows}) + "\n", encoding="utf-8")
