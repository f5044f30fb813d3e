"""A prediction of how much of an exported model fits into a memory, and what a token then reads from where."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.metadata import TARGET
from quantmoe.exporter.inspecting.expert_trace import Trace
from quantmoe.exporter.inspecting.reserve import cache_bytes
from quantmoe.exporter.targets import CPU, TARGETS, Target

_PAGE = 4096
_TOKENS = 200  # of a simulation


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The place of weights in a memory, in bytes, and what a token reads after ``context`` others.

    Attributes:
        target: "cuda": the memory is a GPU's, and misses come through the bus. "cpu": RAM, and they come from the disk.
        memory: what there is. weights: outside the experts. cache: of keys, values and states, for ``context`` tokens.
        reserve: workspaces and the engine.
        budget: what is left for experts, which take ``all_experts``.
        slots: experts that it holds. experts: how many there are.
        hit_rate: of the experts that tokens ask for. from_trace: a trace gives it. Otherwise it is the share that the
            memory holds, as if all experts were equally likely. RAM that holds fewer experts than a token asks for hits
            none.
        external: the model is for TensorRT, whose plug-in reads the experts.
        read: of the memory by a token. missed: of the bus or disk. rates: bytes a second of both, and of the disk
            below a GPU.
        ram: beside a GPU's memory; None: it holds the whole file. in_file: it does not, and they are read from there.
        ram_slots: experts that it holds, also experts that the GPU holds. from_disk: what a token reads into it.
        drafting: what mtp.onnx beside the model takes in addition where it drafts, weights and cache: it is not counted
            in the others. 0: there is none.
    """

    target: str
    memory: int
    context: int
    weights: int
    cache: int
    reserve: int
    budget: int
    all_experts: int
    slots: int
    experts: int
    hit_rate: float
    from_trace: bool
    external: bool
    read: int
    missed: float
    rates: tuple[float, ...]
    ram: int | None
    in_file: bool
    ram_slots: int
    from_disk: float
    drafting: int

    @property
    def ram_budget(self) -> int:
        """Bytes of RAM for experts."""
        return 0 if self.ram is None else self.ram - CPU.reserve

    @property
    def bounds(self) -> list[float | None]:
        """Tokens a second that each of ``rates`` allows by itself; None: nothing is read there."""
        reads = (self.read, self.missed, self.from_disk)
        return [rate / size if size else None for size, rate in zip(reads, self.rates, strict=False)]

    @property
    def tokens_per_second(self) -> float:
        """At most: one read after the other, and nothing else."""
        return 1 / sum(1 / bound for bound in self.bounds if bound is not None)


def _target(found: Mapping[str, Any]) -> Target:
    """Return the target of a model.

    Raises:
        ModelError: it has no library of ours.
    """
    said = found["metadata"].get(TARGET, CPU.name)
    target = TARGETS.get(said)
    if target is None or not target.library:
        known = " or ".join(one.name for one in TARGETS.values() if one.library)
        raise ModelError(f"{found['model']}: expected a model for {known}, its target is {said}")
    return target


# over 80 lines: half are its arguments and the fields of its result
def fit(
    found: Mapping[str, Any],
    memory: int,
    context: int,
    *,
    trace: Trace | None = None,
    rates: Sequence[float | None] = (),
    ram: int | None = None,
    reserve: int | None = None,
) -> Fit:
    """Predict what the session entries of docs/reference/expert-offloading.md do.

    Args:
        found: of ``inspect``.
        memory: bytes. context: tokens.
        trace: of the same model.
        rates: bytes a second of the memory, of the bus or disk, and of the disk below a GPU; None, or left out: the
            target's.
        ram: bytes beside a GPU's memory; None: as many as the model asks for.
        reserve: bytes of the memory for workspaces and the engine; None: the target's.

    Raises:
        ModelError: the model has no QuantMoE node, or a node without top_k. The rest leaves no room for one expert of
            each layer (cuda) or for one expert (cpu). The trace is of another model. ``ram`` leaves no room for the
            experts of one layer, or the model is for the CPU, whose RAM is the memory.
    """
    layers, target = found["layers"], _target(found)
    if not layers or any(layer["top_k"] is None for layer in layers):
        raise ModelError(f"{found['model']}: expected QuantMoE nodes after routers with a top_k")
    if ram is not None and not target.on_gpu:
        raise ModelError(f"{found['model']}: is for the CPU, whose RAM is the memory to fit; expected no other RAM")
    reserve = target.reserve if reserve is None else reserve
    attention, cache = found["attention"], cache_bytes(found, context)
    states = sum(node["state_bytes"] for node in found["linear_attention"])  # a token reads one of a window
    weights = sum(item["bytes"] for part in ("linears", "dense") for item in found[part])
    rest = weights + cache + reserve
    counts = [layer["w13"]["shape"][0] for layer in layers]
    sizes = [layer["bytes"] // count for layer, count in zip(layers, counts, strict=True)]
    budget, least = memory - rest, sum(sizes) if target.on_gpu else file_slot_bytes(layers)
    if budget < least:
        raise ModelError(
            f"{found['model']}: {memory:,} bytes, expected at least {rest + least:,}. {weights:,} are for weights "
            f"outside the experts. A cache for {context:,} tokens takes {cache:,}. There are {reserve:,} of reserve, "
            f"and experts take {least:,}"
        )
    every = sum(layer["bytes"] for layer in layers)
    names = [layer["module"] or layer["node"] for layer in layers]
    held_in: Counter[str] = Counter()  # a layer's experts may be several nodes, which share its top_k
    for name, count in zip(names, counts, strict=True):
        held_in[name] += count
    of = zip(layers, names, counts, sizes, strict=True)
    asked = sum(layer["top_k"] * size * count // held_in[name] for layer, name, count, size in of)
    held, hit_rate, missed, from_disk = sum(counts), 1.0, 0.0, 0.0
    whole = sum(file["bytes"] for file in found["files"])  # to lock experts in RAM is to lock their file
    in_file = ram is not None and budget < every and ram - CPU.reserve < whole
    in_ram = _ram_slots(found, counts, ram) if in_file and ram is not None else held
    if trace is not None and [layer["experts"] for layer in trace.layers] != counts:
        raise ModelError(f"{found['model']}: the trace is of a model with other layers or experts")
    if trace is not None:  # maybe of another export, whose experts have other bytes
        trace = replace(trace, layers=[{"bytes": size} for size in sizes])
    if budget < every:
        slots: int | list[int] = budget // file_slot_bytes(layers)
        if target.on_gpu:
            slots = device_slots(counts, sizes, budget)
        held = min(held, slots) if isinstance(slots, int) else sum(slots)
        if trace is None:
            wanted = [
                max(layer["top_k"] * n // held_in[name], 1)
                for layer, name, n in zip(layers, names, counts, strict=True)
            ]
            # one cache for all layers forgets what a layer had before that layer's next turn
            hit_rate = held / sum(counts) if target.on_gpu or held >= sum(wanted) else 0.0
            missed = asked * (1 - hit_rate)
            if in_file:
                from_disk = missed * _missed_below(wanted, counts, sizes, slots, in_ram)
        else:
            hits, misses, size = trace.lru(slots)
            hit_rate, missed = hits / max(hits + misses, 1), size / max(trace.tokens, 1)
            from_disk = trace.lru(slots, in_ram)[2] / max(trace.tokens, 1) if in_file else 0.0
    windows = [min(context, node["attributes"]["sliding_window"] or context) for node in attention]
    read = weights - sum(item["bytes"] for item in found["dense"] if item["table"]) + asked + states
    read += sum(n * node["bytes_per_token"] for n, node in zip(windows, attention, strict=True))
    own = target.rates
    return Fit(
        target=target.name,
        memory=memory,
        context=context,
        weights=weights,
        cache=cache,
        reserve=reserve,
        budget=budget,
        all_experts=every,
        slots=held,
        experts=sum(counts),
        hit_rate=hit_rate,
        from_trace=trace is not None and budget < every,
        external=all(layer["external"] for layer in layers),
        read=read,
        missed=missed,
        rates=tuple(given or usual for given, usual in itertools.zip_longest(rates[: len(own)], own)),
        ram=ram,
        in_file=in_file,
        ram_slots=in_ram,
        from_disk=from_disk,
        drafting=_drafting(found, context, target),
    )


def _drafting(found: Mapping[str, Any], context: int, target: Target) -> int:
    """Return the bytes of the layer that drafts. On the CPU what it shares is there once; sessions on a GPU share
    nothing."""
    if (layer := found.get("mtp")) is None:
        return 0
    kinds = {"layers": "module", "linears": "module", "dense": "name"}
    every = [(kind, item[name], item["bytes"]) for kind, name in kinds.items() for item in layer[kind]]
    there = {
        (kind, item[name]) for kind, name in kinds.items() for item in found[kind] if item[name] and not target.on_gpu
    }
    return cache_bytes(layer, context) + sum(size for kind, name, size in every if (kind, name) not in there)


def _missed_below(
    wanted: Sequence[int], counts: Sequence[int], sizes: Sequence[int], slots: int | list[int], in_ram: int
) -> float:
    """Return which share of a GPU's misses RAM below it misses, too, if all experts are equally likely.

    RAM has what the GPU read last, which the GPU asks for least: there is no short formula. Both are simulated, the
    first half of the tokens fills them.

    Args:
        wanted: experts of a token, by layer. counts: of all experts. sizes: bytes of one. slots: of the GPU.
    """
    rng = np.random.default_rng(0)
    layers = [{"bytes": size} for size in sizes]
    runs = [
        (at, rng.permutation(count)[None, :k].astype(np.uint16))
        for _ in range(_TOKENS)
        for at, (k, count) in enumerate(zip(wanted, counts, strict=True))
    ]
    traces = [Trace(layers, 0, part) for part in (runs, runs[: len(runs) // 2])]
    (missed, before), (read, read_before) = (
        [t.lru(*caches)[2] for t in traces] for caches in ([slots], [slots, in_ram])
    )
    return (read - read_before) / max(missed - before, 1)


def _ram_slots(found: Mapping[str, Any], counts: Sequence[int], ram: int) -> int:
    """Return the experts that a cache in RAM holds, below a GPU."""
    budget, size = ram - CPU.reserve, file_slot_bytes(found["layers"])
    if budget < max(counts) * size:
        raise ModelError(
            f"{found['model']}: {ram:,} bytes of RAM, expected at least {CPU.reserve + max(counts) * size:,}: "
            f"{CPU.reserve:,} of reserve, {max(counts) * size:,} for the experts of one layer"
        )
    return min(budget // size, sum(counts))


def file_slot_bytes(layers: Sequence[Mapping[str, Any]]) -> int:
    """Return what an expert takes of the CPU library's cache: both rows in pages, and a page each for where they
    begin."""
    rows = ([4 * layer[name]["shape"][1] for layer in layers] for name in ("w13", "w2"))
    return sum(-(-max(sizes) // _PAGE) * _PAGE + _PAGE for sizes in rows)


def device_slots(experts: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Return the slots that the CUDA library gives to layers of so many experts of so many bytes
    (custom_ops/src/experts)."""
    layers = [count * size for count, size in zip(experts, sizes, strict=True)]
    staging = min(budget // 16, max(layers), budget - sum(sizes))
    share = (budget - staging) / sum(layers)
    return [min(max(int(share * count), 1), count) for count in experts]
