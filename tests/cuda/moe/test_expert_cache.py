"""Experts in host memory with slots in device memory: the bytes of experts that are all there, and the hits and misses
of a cache that evicts what was used least recently. Launches are skipped where no GPU is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, UNIT, gpu
from support.cuda.formats import FORMATS
from support.cuda.layers import BASE, CASES, FP8_CASES, build, of_format
from support.operators import native_kernels as native
from support.operators.cases import Case

from quantmoe.custom_ops.layouts import LAYOUTS

LAYER = replace(BASE, hidden=256, intermediate=128, experts=12, top_k=3)


class Lru:
    """What resolve_experts does, of one call after the other.

    Args:
        share: of 256 experts that miss, the host's.
    """

    def __init__(self, slots: int, staging: int, share: int = 0) -> None:
        self.experts, self.used, self.staging, self.share = [-1] * slots, [0] * slots, staging, share
        self.counts = dict.fromkeys(("hits", "misses", "staged", "not_copied", "computed"), 0)
        self.step = 0

    def call(self, wanted: set[int], shared: bool = True) -> set[int]:
        """The host's experts of a call; shared: it has a share."""
        self.step += 1
        hits = [s for s, expert in enumerate(self.experts) if expert in wanted]
        misses, of_host = sorted(wanted - set(self.experts)), 0
        all_misses = len(misses)
        if shared:
            of_host = min(self.share * all_misses // 256, max(0, all_misses - self.experts.count(-1)))
        if of_host:
            first = -self.step % all_misses
            misses = misses[first:] + misses[:first]
        computed, misses = set(misses[:of_host]), misses[of_host:]
        free = sorted((s for s in range(len(self.experts)) if s not in hits), key=lambda s: (self.used[s], s))
        for slot, expert in zip(free, misses, strict=False):
            self.experts[slot] = expert
            hits.append(slot)
        for slot in hits:
            self.used[slot] = self.step
        over = max(0, len(misses) - len(free))
        copied = (min(over, self.staging), max(0, over - self.staging))
        for name, count in zip(self.counts, (len(wanted) - all_misses, all_misses, *copied, of_host), strict=True):
            self.counts[name] += count
        return computed


def layers(case: Case, slots: int, staging: int) -> tuple[cuda.CudaMoE, cuda.CachedMoE]:
    """The same layer with all experts on the device, and with a cache."""
    spec, _, w13, w2 = build(case)
    w13, w2 = torch.from_numpy(w13), torch.from_numpy(w2)
    return (
        cuda.CudaMoE(spec, w13.cuda(), w2.cuda()),
        cuda.CachedMoE(spec, w13.pin_memory(), w2.pin_memory(), slots, staging),
    )


class SharedMoE(cuda.CachedMoE):
    """A cache whose misses a thread of the host multiplies in part.

    Args:
        share: of 256.
    """

    def __init__(self, case: Case, slots: int, staging: int, share: int) -> None:
        spec, experts, w13, w2 = build(case)
        super().__init__(spec, *(torch.from_numpy(w).pin_memory() for w in (w13, w2)), slots, staging)
        w13, w2 = (replace(w, layout="cpu_panel", layout_version=1) for w in (spec.w13, spec.w2))
        spec, layout = replace(spec, w13=w13, w2=w2), LAYOUTS["cpu_panel"]
        rows = [
            native.aligned(len(experts) * layout.row_bytes(spec, p)).reshape(len(experts), -1) for p in ("w13", "w2")
        ]
        for expert, *packed in zip(experts, *rows, strict=True):
            layout.pack(expert, spec, *packed)
        self.share, self.moe, self.shared = share, native.NativeMoE(spec, *rows), True
        self.host = torch.zeros(cuda.host_words(case.hidden), dtype=torch.int32).pin_memory()
        self.asked: list[np.ndarray] = []
        self.stopping = False
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def prepare(self, hidden: torch.Tensor, topk_ids: torch.Tensor) -> tuple[cuda.Problem, cuda.Plan]:
        p, plan = super().prepare(hidden, topk_ids)
        if self.shared and len(hidden) <= 8:
            p.host_share, p.host_layer = self.share, 5
            plan = cuda.plan(p, self.device)
        return p, plan

    def place(self, experts: cuda.Experts) -> None:
        experts.host = self.host.data_ptr()

    def serve(self) -> None:
        arrays = cuda.host_arrays(self.host.numpy(), self.moe.spec.hidden_size)
        request, ids, weights, x, y = (arrays[name] for name in ("request", "ids", "weights", "x", "y"))
        asked, answered, last = request[:2].view(np.uint64), request[16:18].view(np.uint64), 0
        while not self.stopping:
            if (number := int(asked[0])) == last:
                continue
            last, (layer, tokens, top_k) = number, request[2:5]
            assert layer == 5
            size, pairs = tokens * self.moe.spec.hidden_size, (tokens, top_k)
            self.asked.append(ids[: tokens * top_k].reshape(pairs).copy())
            found = self.moe(x[:size].reshape(tokens, -1), self.asked[-1], weights[: tokens * top_k].reshape(pairs))
            y[:size] = found.ravel()
            answered[0] = number

    def close(self) -> None:
        self.stopping = True
        self.thread.join()


def calls(case: Case, tokens: list[int], seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Arguments of calls; ids cluster, as a model's do, and some are of no expert of the layer."""
    rng = np.random.default_rng(seed)
    for count in tokens:
        near = rng.integers(case.experts) + rng.integers(0, 5, (count, case.top_k))
        ids = case.offset + np.where(rng.random(near.shape) < 0.05, case.experts + 7, near % case.experts)
        hidden = rng.standard_normal((count, case.hidden))
        yield (
            torch.from_numpy(hidden).to(TORCH["bf16"]).cuda(),
            torch.from_numpy(ids).cuda(),
            torch.from_numpy(rng.random(ids.shape, dtype=np.float32)).cuda(),
        )


def wanted(case: Case, ids: torch.Tensor) -> set[int]:
    local = ids.cpu().numpy().ravel() - case.offset
    return set(local[(local >= 0) & (local < case.experts)].tolist())


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def poison(layer: cuda.CachedMoE) -> None:
    """NaN in staging and in all slots that have no expert."""
    slots, staging, _ = layer.cache
    staging.fill_(0xFF)
    for slot, expert in enumerate(layer.experts):
        if expert < 0:
            slots[slot].fill_(0xFF)


@gpu
@pytest.mark.parametrize(("slots", "staging"), [(1, 0), (3, 1), (5, 12), (9, 0), (12, 0)])
@pytest.mark.parametrize("name", [*FORMATS, "bf16"])
def test_the_bytes_of_experts_on_the_device(name, slots, staging):
    case = of_format(name, LAYER)
    resident, cached = layers(case, slots, staging)
    lru = Lru(slots, staging)
    for args in calls(case, [1, 1, 1, 4, 8, 1, 30, 200, 1, 2, 600, 1, 9]):
        poison(cached)
        assert same_bytes(cached(*args), resident(*args))
        lru.call(wanted(case, args[1]))
        assert cached.experts == lru.experts
    assert cached.counts == lru.counts
    for expert, row in zip(cached.experts, cached.cache[0].cpu(), strict=True):
        if expert >= 0:
            second = -(-cached.w13.shape[1] // 256) * 256
            assert torch.equal(row[: cached.w13.shape[1]], cached.w13[expert])
            assert torch.equal(row[second : second + cached.w2.shape[1]], cached.w2[expert])


@gpu
@pytest.mark.parametrize("name", [*CASES, *FP8_CASES])
def test_every_layer(name):
    case = {**CASES, **FP8_CASES}[name]
    resident, cached = layers(case, max(1, case.experts // 2), 1)
    for args in calls(case, [1, 5, 1, 40, 2, 300]):
        poison(cached)
        assert same_bytes(cached(*args), resident(*args))


@gpu
@pytest.mark.parametrize(("slots", "staging"), [(2, 0), (4, 1), (4, 12)])
@pytest.mark.parametrize("name", [*FORMATS, "bf16"])
def test_rows_at_addresses_of_their_own(name, slots, staging):
    """Those that a call misses, each at another place in each call; all else that it could read is NaN."""
    case = of_format(name, LAYER)
    resident, cached = layers(case, slots, staging)
    rows, rng = [cached.w13.clone(), cached.w2.clone()], np.random.default_rng(2)
    for w in (cached.w13, cached.w2):
        w.fill_(0xFF)
    places = [torch.empty((2 * case.experts, w.shape[1]), dtype=torch.uint8).pin_memory() for w in rows]
    cached.rows = torch.empty((2, case.experts), dtype=torch.int64).pin_memory()
    lru = Lru(slots, staging)
    for args in calls(case, [1, 1, 1, 4, 1, 30, 200, 1, 600, 1, 9]):
        poison(cached)
        torch.cuda.synchronize()
        missing = wanted(case, args[1]) - set(cached.experts)
        for i, (place, row) in enumerate(zip(places, rows, strict=True)):
            place.fill_(0xFF)
            cached.rows[i] = place[-1].data_ptr()
            for expert, at in zip(missing, rng.permutation(2 * case.experts - 1), strict=False):
                place[at] = row[expert]
                cached.rows[i, expert] = place[at].data_ptr()
        assert same_bytes(cached(*args), resident(*args))
        lru.call(wanted(case, args[1]))
        assert cached.experts == lru.experts
    assert cached.counts == lru.counts


def near(got: torch.Tensor, want: torch.Tensor, stray: float = 1) -> None:
    """Five roundings to 16 bits at most, of h, the device's sum and the whole one here, of h and the sum there: each u
    / sqrt(3) of the norm (built.UNIT).

    Args:
        stray: how much farther h's two may go. Where a group of 32 columns shares an offset their errors add up before
            they are multiplied: of 300 layers drawn of q4_k and of q5_k at most 2.9 and 3.4 times.
    """
    got, want = got.double(), want.double()
    assert torch.isfinite(got).all()
    assert torch.linalg.norm(got - want) <= ((2 * stray**2 + 3) / 3) ** 0.5 * UNIT["bf16"] * torch.linalg.norm(want)


@gpu
@pytest.mark.parametrize(("slots", "staging", "share"), [(1, 0, 256), (3, 1, 159), (5, 2, 60), (9, 0, 200)])
@pytest.mark.parametrize("name", [*FORMATS, "bf16"])
def test_the_host_multiplies_its_share(name, slots, staging, share):
    case = of_format(name, LAYER)
    resident, _ = layers(case, slots, staging)
    shared = SharedMoE(case, slots, staging, share)
    lru = Lru(slots, staging, share)
    for args in calls(case, [1, 1, 1, 4, 8, 1, 30, 2, 1, 1, 200, 1, 8, 5] * 2):
        poison(shared)
        got = shared(*args)
        torch.cuda.synchronize()
        near(got, resident(*args), 3.4 if name in ("q4_k", "q5_k") else 1)
        computed = lru.call(wanted(case, args[1]), len(args[0]) <= 8)
        assert shared.experts == lru.experts
        if computed:
            ids = args[1].cpu().numpy()
            np.testing.assert_array_equal(shared.asked.pop(), np.where(np.isin(ids, [*computed]), ids, -1))
        assert not shared.asked
    assert shared.counts == lru.counts
    assert lru.counts["computed"] > 0
    shared.close()


@gpu
@pytest.mark.parametrize("name", ["gpt-oss", "ungated", "on-input", "two-orders-odd", "slice", "many-experts"])
def test_the_host_of_every_layer(name):
    case = CASES[name]
    resident, _ = layers(case, 1, 0)
    shared = SharedMoE(case, max(1, case.experts // 12), 0, 200)
    for args in calls(case, [1, 5, 1, 8, 2]):
        poison(shared)
        got = shared(*args)
        torch.cuda.synchronize()
        near(got, resident(*args))
    assert shared.counts["computed"] > 0
    shared.close()


@gpu
def test_the_host_in_a_captured_graph():
    """Each replay asks again."""
    resident, _ = layers(LAYER, 3, 0)
    shared, lru = SharedMoE(LAYER, 3, 0, 170), Lru(3, 0, 170)
    args = [x.clone() for x in next(calls(LAYER, [2]))]
    prepared = shared.prepare(args[0], args[1])
    output, workspace = torch.empty_like(args[0]), torch.empty(prepared[1].workspace_bytes, dtype=torch.uint8).cuda()
    shared.launch(prepared, *args, output, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            shared.launch(prepared, *args, output, workspace)
    lru.call(wanted(LAYER, args[1]))
    for new in calls(LAYER, [2] * 40, seed=3):
        for to, value in zip(args, new, strict=True):
            to.copy_(value)
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        near(output, resident(*args))
        for _ in range(2):
            lru.call(wanted(LAYER, args[1]))
        assert shared.experts == lru.experts
    assert shared.counts == lru.counts
    shared.close()


@gpu
def test_many_experts():
    """More experts and slots than resolve_experts has threads."""
    case = replace(LAYER, hidden=64, intermediate=32, experts=2500, top_k=8)
    resident, cached = layers(case, 1300, 40)
    lru = Lru(1300, 40)
    for args in calls(case, [400, 1, 300, 8, 500, 64, 700]):
        args = (args[0], torch.randint(0, case.experts, args[1].shape, device="cuda"), args[2])
        assert same_bytes(cached(*args), resident(*args))
        lru.call(wanted(case, args[1]))
        assert cached.experts == lru.experts
    assert cached.counts == lru.counts
    assert lru.counts["not_copied"] > 0


@gpu
@pytest.mark.parametrize(("slots", "staging"), [(3, 0), (7, 2)])
def test_a_captured_graph_decides_at_each_replay(slots, staging):
    resident, cached = layers(LAYER, slots, staging)
    args = [x.clone() for x in next(calls(LAYER, [2]))]
    prepared = cached.prepare(args[0], args[1])
    output, workspace = torch.empty_like(args[0]), torch.empty(prepared[1].workspace_bytes, dtype=torch.uint8).cuda()
    cached.launch(prepared, *args, output, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cached.launch(prepared, *args, output, workspace)
        cached.launch(prepared, *args, output, workspace)
    lru = Lru(slots, staging)
    lru.call(wanted(LAYER, args[1]))
    for new in calls(LAYER, [2] * 60, seed=3):
        for to, value in zip(args, new, strict=True):
            to.copy_(value)
        output.fill_(float("nan"))
        graph.replay()
        assert same_bytes(output, resident(*args))
        for _ in range(2):
            lru.call(wanted(LAYER, args[1]))
        assert cached.experts == lru.experts
    assert cached.counts == lru.counts


@gpu
def test_evictions_of_many_tokens():
    """10^5 replays, each of other experts, most of which evict: the device compares each with all experts there."""
    runs, tokens, slots = 100_000, 2, 4
    resident, cached = layers(LAYER, slots, 1)
    args = [x.clone() for x in next(calls(LAYER, [tokens]))]
    ids = torch.randint(0, LAYER.experts, (runs, *args[1].shape), device="cuda").to(args[1].dtype)
    hidden = torch.randn(64, *args[0].shape, device="cuda").to(args[0].dtype)
    at, wrong = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    prepared = [layer.prepare(args[0], args[1]) for layer in (cached, resident)]
    outputs = [torch.empty_like(args[0]) for _ in prepared]
    workspaces = [torch.empty(plan.workspace_bytes, dtype=torch.uint8).cuda() for _, plan in prepared]

    def step() -> None:
        args[0].copy_(hidden.index_select(0, at % 64)[0])
        args[1].copy_(ids.index_select(0, at)[0])
        for layer, plan, output, workspace in zip((cached, resident), prepared, outputs, workspaces, strict=True):
            layer.launch(plan, *args, output, workspace)
        wrong.add_((outputs[0].view(torch.int16) != outputs[1].view(torch.int16)).any())
        at.add_(1)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(runs - 1):
        graph.replay()
    assert (int(at), int(wrong)) == (runs, 0)
    assert sum(cached.counts[name] for name in ("misses", "staged", "not_copied")) > runs


def test_plan() -> None:
    spec, *_ = build(replace(LAYER, experts=8))

    def steps(tokens: int, slots: int, staging: int = 0, share: int = 0) -> list[str]:
        p = cuda.problem(spec, "f16", tokens, 2, 8)
        p.slots, p.staging, p.host_share = slots, staging, share
        plan = cuda.plan(p)
        cuda.check_plan(p, plan)
        return list(plan.steps)

    for tokens in (1, 40, 4000):
        plain = steps(tokens, 0)
        assert "resolve" not in plain
        assert steps(tokens, 3) == ["resolve", "fill", *plain]
    for slots, staging in ((9, 0), (-1, 0), (0, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"a cache has {slots} slots and {staging} rows of staging for 8 experts"):
            steps(1, slots, staging)
    assert steps(8, 3, share=200) == ["resolve", "fill", *steps(8, 0), "add_host"]
    for slots, share in ((0, 1), (2, 257), (2, -1)):
        with pytest.raises(ValueError, match=f"the host's share of misses is {share} of 256 with {slots} slots"):
            steps(1, slots, share=share)
    with pytest.raises(ValueError, match=r"a call with a host's share are \[9, 2\], expected at most 8 and 128"):
        steps(9, 3, share=200)
