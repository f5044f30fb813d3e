"""SparseIndexer on CUDA: exact lists where scores are exact, and within the bounds of tensor cores elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.built import NUMPY, SM80, TORCH, gpu, torch
from support.operators import indexer
from support.operators.arithmetic import SECOND, TINY, U
from support.operators.indexer import Inputs

from quantmoe.custom_ops.op import IndexerSpec

SPECS = {
    "deepseek": IndexerSpec(num_heads=64, head_size=128, top_k=256),
    "one head": IndexerSpec(num_heads=1, head_size=128, top_k=7),
    "of 64": IndexerSpec(num_heads=5, head_size=64, top_k=100),
    "hundred heads": IndexerSpec(num_heads=100, head_size=64, top_k=33),
    "one slot": IndexerSpec(num_heads=16, head_size=128, top_k=1),
    "more than all": IndexerSpec(num_heads=4, head_size=64, top_k=4096),
    "minimax": IndexerSpec(
        num_heads=4, head_size=128, top_k=48, num_groups=4, relu=0, block_size=16, best_slot=1, local_blocks=1
    ),
    "minimax of whole blocks": IndexerSpec(
        num_heads=4, head_size=128, top_k=128, num_groups=4, relu=0, block_size=64, best_slot=1, local_blocks=1
    ),
    "whole blocks": IndexerSpec(num_heads=20, head_size=64, top_k=96, block_size=32, local_blocks=2),
    "heads of their own": IndexerSpec(num_heads=11, head_size=64, top_k=30, num_groups=11),
    "groups": IndexerSpec(num_heads=34, head_size=64, top_k=40, num_groups=2, block_size=5, local_blocks=2),
    "local blocks alone": IndexerSpec(num_heads=6, head_size=64, top_k=21, num_groups=2, block_size=7, local_blocks=3),
    "last slots": IndexerSpec(num_heads=32, head_size=128, top_k=48, block_size=16, best_slot=0),
    "last slots in groups": IndexerSpec(
        num_heads=4, head_size=64, top_k=6, num_groups=2, block_size=2, best_slot=0, relu=0
    ),
}
# rows, new tokens, slots of past, columns of the mask
CALLS = {
    "token": ([(0, 1, 300)], 1, 310, 1),
    "the first": ([(0, 1, 0)], 1, 64, 1),
    "token, the last slot": ([(0, 1, 511)], 1, 512, 1),
    "tokens": ([(0, 1, 255), (0, 1, 256), (0, 0, 9), (0, 1, 0), (0, 1, 700)], 1, 701, 1),
    "ragged": ([(0, 5, 250), (3, 6, 0), (4, 0, 17), (8, 1, 255), (0, 9, 256)], 9, 260, 265),
    "prompt": ([(0, 70, 0)], 70, 0, 70),
    "prompt after": ([(0, 40, 280), (7, 60, 1), (0, 0, 3)], 67, 320, 400),
    "no tokens": ([(0, 0, 5)], 0, 9, 1),
    "no rows": ([], 3, 9, 1),
}
# rows of a batch that ask for what is not there
BAD_ROWS = [(0, 2, 0), (-1, 1, 0), (0, -1, 0), (0, 1, -1), (0, 1, 64), (0, 1, 65), (1, 1, 0)]


def call(a: Inputs, dtype: str, in_place: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Run the kernels twice, with equal bytes. Slots that no token has are NaN."""

    def tensor(x: np.ndarray) -> Any:
        if x.dtype.itemsize == 2:
            return torch.from_numpy(x.view(np.int16).copy()).view(TORCH[dtype]).cuda()
        return torch.from_numpy(x.copy()).cuda()

    found = [cuda.run_node(a.spec, *map(tensor, a.tensors), in_place=in_place) for _ in range(2)]
    for one, two in zip(*found, strict=True):
        assert not one.numel() or torch.equal(one.view(torch.uint8), two.view(torch.uint8)), "two runs differ"
    selected, present = (x.cpu() for x in found[0])
    return selected.numpy(), present.view(torch.int16).numpy().view(NUMPY[dtype])


def made(spec: IndexerSpec, dtype: str, name: str, **others: Any) -> Inputs:
    kind = NUMPY[dtype]
    return masked(indexer.inputs(spec, *map(list, CALLS[name][:1]), *CALLS[name][1:], dtype=kind, cache=kind, **others))


def masked(a: Inputs) -> Inputs:
    """Make NaN of tokens that do not count, and of slots that no token has."""
    for b, (begin, count, past) in enumerate(a.rows.tolist()):
        for x in (a.query, a.key, a.weights):
            x[b, :begin] = x[b, begin + count :] = np.nan
        a.past[b, :, past:] = np.nan
    return a


def bounded(a: Inputs, b: int, at: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """indexer.bounded of tensor cores.

    A product of 16 features adds 17 numbers, which are cut off below the largest one's 24 bits, then its sum is: at
    most 19 ulps of what the terms' sizes add up to. The heads' weighted products are added in any order.
    """
    spec = a.spec
    query = a.query[b, at].astype(np.float64).reshape(spec.num_heads, -1)
    weights = a.weights[b, at].astype(np.float64)[:, None]
    products, sizes = query @ keys.T, np.abs(query) @ np.abs(keys).T
    products = np.maximum(products, 0) if spec.relu else products
    wrong = 19 * (spec.head_size // 16) * 2 * U * sizes + TINY * spec.head_size
    shape = (spec.num_groups, -1, len(keys))
    scores, wrong = (weights * products).reshape(shape), (np.abs(weights) * wrong).reshape(shape)
    sums = scores.shape[1] * U * np.abs(scores).sum(1)
    return scores.sum(1), (wrong.sum(1) + sums) * SECOND + TINY * scores.shape[1]


@pytest.fixture(params=["h200", "sm80"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "sm80":  # without clusters
        monkeypatch.setattr(cuda, "query", lambda _: SM80)


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_exact_scores(spec: IndexerSpec, name: str, dtype: str) -> None:
    """Scores of small integers are exact, and many are equal: the lists are the reference's."""
    a = made(spec, dtype, name, whole=True)
    want, keys = a.reference()
    selected, present = call(a, dtype)
    np.testing.assert_array_equal(selected, want)
    np.testing.assert_array_equal(present, keys)
    if a.length <= a.past.shape[2]:
        selected, present = call(a, dtype, in_place=True)
        np.testing.assert_array_equal(selected, want)
        for b, (_, count, past) in enumerate(a.rows.tolist()):
            np.testing.assert_array_equal(present[b, :, : past + count], keys[b, :, : past + count])
            assert np.isnan(present[b, :, past + count :]).all()


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_scores(spec: IndexerSpec, name: str, dtype: str) -> None:
    a = made(spec, dtype, name)
    indexer.check(a, *call(a, dtype), bounds=bounded)


@gpu
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("past", "slots", "top_k"), [(9000, 9001, 2048), (40000, 70000, 2048), (3000, 131072, 2048), (70000, 70001, 50)]
)
def test_a_token_after_many(past: int, slots: int, top_k: int, whole: bool) -> None:
    """Lists that a cluster makes, and parts of it that have no scores."""
    spec = IndexerSpec(num_heads=64, head_size=128, top_k=top_k)
    a = masked(indexer.inputs(spec, [[0, 1, past]], 1, slots, 1, np.float16, np.float16, whole=whole))
    if whole:  # few scores, so most are equal
        a.weights[:] = np.where(np.arange(64) < 2, a.weights, 0)
        np.testing.assert_array_equal(call(a, "f16", in_place=True)[0], a.reference()[0])
    else:
        indexer.check_lists(a, call(a, "f16", in_place=True)[0], a.reference()[1], bounded)


MINIMAX = IndexerSpec(
    num_heads=4, head_size=128, top_k=2048, num_groups=4, relu=0, block_size=128, best_slot=1, local_blocks=1
)


@gpu
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("past", [2047, 2048, 5000, 69999])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_blocks_after_many(past: int, tokens: int) -> None:
    """A list of MiniMax-M3, which a warp's best scores of 32 slots make."""
    rows = [[0, tokens, past], [0, 1, 4000]]
    a = masked(indexer.inputs(MINIMAX, rows, tokens, 70100, 1, np.float16, np.float16, whole=True))
    np.testing.assert_array_equal(call(a, "f16", in_place=True)[0], a.reference()[0])
    a = masked(indexer.inputs(MINIMAX, rows, tokens, 70100, 1, np.float16, np.float16))
    indexer.check_lists(a, call(a, "f16", in_place=True)[0], a.reference()[1], bounded)


@gpu
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("spec", [IndexerSpec(num_heads=2, head_size=64, top_k=96, num_groups=g) for g in (1, 2)])
def test_scores_in_several_pieces(spec: IndexerSpec) -> None:
    """More tokens and slots than have scores at a time."""
    rows, tokens = [[0, 330, 1500], [20, 100, 0], [0, 1, 77]], 330
    a = masked(indexer.inputs(spec, rows, tokens, 60000, 1, np.float16, np.float16, whole=True))
    np.testing.assert_array_equal(call(a, "f16", in_place=True)[0], a.reference()[0])


@gpu
@pytest.mark.parametrize(
    "spec", [SPECS[name] for name in ("deepseek", "minimax", "minimax of whole blocks", "whole blocks", "last slots")]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none(spec: IndexerSpec, bad: float) -> None:
    """A score of NaN is above all, also above infinity; -0 is 0."""
    a = made(spec, "f16", "token", whole=True)
    slots = [31, 95, 260, 287]
    a.past[0, 0, slots, 3] = bad
    a.past[0, 0, 47] = a.past[0, 0, 15] = 0
    want, _ = a.reference()
    np.testing.assert_array_equal(call(a, "f16")[0], want)
    a.query[0, 0, 5] = bad  # all scores are NaN, or infinities and NaN
    want, _ = a.reference()
    np.testing.assert_array_equal(call(a, "f16")[0], want)


@gpu
def test_rows_that_ask_for_too_much() -> None:
    spec = SPECS["one head"]
    a = replace(indexer.inputs(spec, [[0, 1, 20], *map(list, BAD_ROWS)], 1, 64, 1, np.float16, np.float16))
    selected, present = call(a, "f16", in_place=True)
    assert (selected[1:] == -1).all()
    np.testing.assert_array_equal(present[1:], a.past[1:])
    alone = replace(a, rows=a.rows[:1], query=a.query[:1], key=a.key[:1], weights=a.weights[:1], past=a.past[:1])
    np.testing.assert_array_equal(selected[:1], call(alone, "f16", in_place=True)[0])


@gpu
def test_a_graph_serves_every_position() -> None:
    spec = IndexerSpec(num_heads=64, head_size=128, top_k=128)
    a = masked(indexer.inputs(spec, [[0, 1, 0]], 1, 20000, 1, np.float16, np.float16, whole=True))
    a.past[:] = indexer.inputs(spec, [[0, 1, 0]], 1, 20000, 1, np.float16, np.float16, whole=True).past
    inputs = [torch.from_numpy(x.copy()).cuda() for x in a.tensors]
    plan = cuda.plan_shapes(spec, "f16", [x.shape for x in inputs], device=cuda.query(0))
    selected = torch.zeros(1, 1, 1, 128, dtype=torch.int32, device="cuda")
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.launch_node(spec, plan, inputs, [selected, inputs[3]], workspace)
    for past in (0, 100, 128, 129, 5000, 19999):
        inputs[4].copy_(torch.tensor([[0, 1, past]], dtype=torch.int32))
        graph.replay()
        own = replace(a, rows=np.array([[0, 1, past]], np.int32))
        np.testing.assert_array_equal(selected.cpu().numpy(), own.reference()[0])
        a.past[0, 0, past] = a.key[0, 0]  # as the graph has stored it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_size": 96}, "head_size is 96, the CUDA kernels take 64 and 128"),
        ({"num_heads": 130}, "num_heads is 130 and num_groups 1, the CUDA kernels take up to 128 heads"),
        ({"num_heads": 18, "num_groups": 9}, "num_heads is 18 and num_groups 9, the CUDA kernels take up to 128 heads"),
        ({"num_heads": 129, "num_groups": 129}, "num_heads is 129 and num_groups 129, the CUDA kernels take up to 128"),
        ({"top_k": 0}, "top_k is 0, expected 1 to"),
    ],
)
def test_attributes_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda.plan_node(replace(SPECS["deepseek"], **change), "f16", 1, tokens=1)
    with pytest.raises(ValueError, match="query is of type 0, the CUDA kernels take float16"):
        cuda.plan_node(SPECS["deepseek"], "f32", 1, tokens=1)
    with pytest.raises(ValueError, match=r"compute capability 7.5, the kernels need 8.0"):
        cuda.plan_node(SPECS["deepseek"], "f16", 1, tokens=1, device=cuda.Device(75, 40, 65536))


def test_plans() -> None:
    def found(
        spec: IndexerSpec, batch: int, tokens: int, slots: int, device: cuda.Device = cuda.H200
    ) -> tuple[int, ...]:
        plan = cuda.plan_node(spec, "f16", batch, tokens=tokens, device=device, P=slots)
        return plan.chosen[0], plan.chosen[1], plan.workspace_bytes

    spec = IndexerSpec(num_heads=64, head_size=128, top_k=2048)
    assert found(spec, 1, 1, 2048) == (1, 1, 0)  # no token sees more slots than a list has
    assert found(spec, 1, 1, 4096) == (1, 1, 4096 * 4)
    assert found(spec, 1, 1, 65536) == (1, 8, 65536 * 4)
    assert found(spec, 1, 1, 65536, SM80) == (1, 1, 65536 * 4)
    assert found(spec, 32, 1, 65536) == (32, 4, 32 * 65536 * 4)
    assert found(spec, 1, 16384, 16384) == (32, 1, 32 * 32 * 16384 * 4)  # 64 MiB
    assert found(spec, 1, 33, 4096) == (2, 1, 64 * 4096 * 4)
    assert found(MINIMAX, 1, 1, 65536) == (1, 1, 4 * 2048 * 4)  # a score of 32 slots for each group
    assert found(MINIMAX, 1, 16384, 16384) == (256, 1, 256 * 32 * 4 * 512 * 4)
