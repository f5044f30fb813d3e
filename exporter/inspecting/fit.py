"""What of an exported model a memory holds, and what a token then reads from where, without that machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.inspecting.trace import Trace

#: bytes a second of what holds everything, and of what experts come through that it does not hold. cuda: a GPU's
#: memory of 1 TB/s, 16 lanes of PCIe 4; cpu: two channels of DDR5, an NVMe disk.
RATES = {"cuda": (1e12, 25e9), "cpu": (60e9, 3e9)}
#: bytes that the libraries leave beside weights and caches, unless quantmoe.reserve says otherwise
RESERVE = {"cuda": 1 << 30, "cpu": 512 << 20}
_PAGE = 4096


@dataclass(frozen=True)
class Fit:
    """Where weights lie in a memory, in bytes, and what a token reads after ``context`` others.

    Attributes:
        target: "cuda": the memory is a GPU's, and misses come through the bus. "cpu": RAM, and they come from the disk.
        memory: what there is. weights: outside the experts. cache: of keys, values and states, for ``context`` tokens.
        reserve: workspaces and the engine.
        budget: what is left for experts, which take ``all_experts``.
        slots: experts that it holds. experts: how many there are.
        hit_rate: of the experts that tokens ask for. from_trace: a trace says so; otherwise it is the share that the
            memory holds, as if all experts were as likely as others, and what was used lately were not.
        external: the model is for TensorRT, whose plug-in reads the experts.
        read: of the memory by a token. missed: of the bus or disk. rates: bytes a second of both.
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
    rates: tuple[float, float]

    @property
    def tokens_per_second(self) -> float:
        """At most: one read after the other, and nothing else."""
        return 1 / (self.read / self.rates[0] + self.missed / self.rates[1])


def fit(
    found: Mapping[str, Any],
    memory: int,
    context: int,
    trace: Trace | None = None,
    rates: tuple[float | None, float | None] = (None, None),
) -> Fit:
    """Predicts what the session entries of docs/experts.md do.

    Args:
        found: of ``inspect``.
        memory: bytes. context: tokens.
        trace: of the same model.
        rates: bytes a second of the memory, and of the bus or disk; None: RATES.

    Raises:
        ModelError: the model has no QuantMoE node, or one that says no top_k; the rest leaves no room for one expert
            of each layer (cuda) or for one (cpu); the trace is of another model.
    """
    layers, target = found["layers"], found["metadata"].get("target", "cpu")
    if target not in RESERVE:
        raise ModelError(f"{found['model']}: expected a model for cpu or cuda, its target is {target}")
    if not layers or any(layer["top_k"] is None for layer in layers):
        raise ModelError(f"{found['model']}: expected QuantMoE nodes after routers with a top_k")
    attention, states = found["attention"], sum(node["state_bytes"] for node in found["linear_attention"])
    cache = context * sum(node["bytes_per_token"] for node in attention) + states
    weights = sum(item["bytes"] for part in ("linears", "dense") for item in found[part])
    rest = weights + cache + RESERVE[target]
    counts = [layer["w13"]["shape"][0] for layer in layers]
    sizes = [layer["bytes"] // count for layer, count in zip(layers, counts, strict=True)]
    budget, least = memory - rest, sum(sizes) if target == "cuda" else file_slot_bytes(layers)
    if budget < least:
        raise ModelError(
            f"{found['model']}: {memory:,} bytes, expected at least {rest + least:,}: {weights:,} of weights outside "
            f"the experts, {cache:,} of cache for {context:,} tokens, {RESERVE[target]:,} of reserve, "
            f"{least:,} of experts"
        )
    every = sum(layer["bytes"] for layer in layers)
    names = [layer["module"] or layer["node"] for layer in layers]
    held_in: Counter[str] = Counter()  # a layer's experts may be several nodes, which share its top_k
    for name, count in zip(names, counts, strict=True):
        held_in[name] += count
    of = zip(layers, names, counts, sizes, strict=True)
    asked = sum(layer["top_k"] * size * count // held_in[name] for layer, name, count, size in of)
    held, hit_rate, missed = sum(counts), 1.0, 0.0
    if trace is not None and [layer["experts"] for layer in trace.layers] != counts:
        raise ModelError(f"{found['model']}: the trace is of a model with other layers or experts")
    if budget < every:
        slots: int | list[int] = budget // file_slot_bytes(layers)
        if target == "cuda":
            slots = device_slots(counts, sizes, budget)
        held = min(held, slots) if isinstance(slots, int) else sum(slots)
        if trace is None:
            hit_rate = held / sum(counts)
            missed = asked * (1 - hit_rate)
        else:
            hits, misses, size = trace.lru(slots)
            hit_rate, missed = hits / max(hits + misses, 1), size / max(trace.tokens, 1)
    windows = [min(context, node["attributes"]["sliding_window"] or context) for node in attention]
    read = weights - sum(item["bytes"] for item in found["dense"] if item["table"]) + asked + states
    read += sum(n * node["bytes_per_token"] for n, node in zip(windows, attention, strict=True))
    own = RATES[target]
    return Fit(
        target=target,
        memory=memory,
        context=context,
        weights=weights,
        cache=cache,
        reserve=RESERVE[target],
        budget=budget,
        all_experts=every,
        slots=held,
        experts=sum(counts),
        hit_rate=hit_rate,
        from_trace=trace is not None and budget < every,
        external=all(layer["external"] for layer in layers),
        read=read,
        missed=missed,
        rates=(rates[0] or own[0], rates[1] or own[1]),
    )


def file_slot_bytes(layers: Sequence[Mapping[str, Any]]) -> int:
    """What an expert takes of the CPU library's cache: both rows in pages, and a page each for where they begin."""
    rows = ([4 * layer[name]["shape"][1] for layer in layers] for name in ("w13", "w2"))
    return sum(-(-max(sizes) // _PAGE) * _PAGE + _PAGE for sizes in rows)


def device_slots(experts: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """Slots that the CUDA library gives to layers of so many experts of so many bytes (custom_ops/src/experts)."""
    layers = [count * size for count, size in zip(experts, sizes, strict=True)]
    staging = min(budget // 8, max(layers), budget - sum(sizes))
    share = (budget - staging) / sum(layers)
    return [min(max(int(share * count), 1), count) for count in experts]
