"""Sums and gathers of ranks that write to each other's memory, against reference.py: ranks are streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.built import NUMPY, TORCH, gpu, torch

from quantmoe.custom_ops.op import NormSpec
from quantmoe.custom_ops.reference import all_reduce

#: of a kernel here, so that all ranks' fit on the GPU
BLOCKS = 24
#: 16-byte words of a rank's part of a tile
PART = 512
#: 16-byte words of a kernel that sends all ranks all parts
MOST = 65536
Launch = Callable[[cuda.Peers, Any, Any], None]
NORM = NormSpec(norm_epsilon=1e-5)
Norms = list[tuple[np.ndarray, ...]]


def group(world: int) -> tuple[list[cuda.Peers], list[cuda.Box]]:
    """Ranks of a group, and the boxes that live as long as they do."""
    boxes = [cuda.Box(world) for _ in range(world)]
    addresses = (cuda._PTR * cuda.PEERS)(*(box.address for box in boxes))
    return [cuda.Peers(rank, world, BLOCKS, addresses) for rank in range(world)], boxes


def drawn(world: int, count: int, dtype: str, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(0, 2.0 ** random.integers(-8, 9), count).astype(NUMPY[dtype]) for _ in range(world)]


def on_gpu(x: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16).copy()).cuda().view(TORCH[dtype])


def off_gpu(y: torch.Tensor, dtype: str) -> np.ndarray:
    return y.view(torch.int16).cpu().numpy().view(NUMPY[dtype])


def shifted(x: np.ndarray, dtype: str, offset: int) -> torch.Tensor:
    """x, so many elements past a multiple of 16 bytes."""
    spare = np.zeros(offset, NUMPY[dtype])
    return on_gpu(np.concatenate([spare, x.ravel()]), dtype)[offset:].view(x.shape)


class Ranks:
    """A group whose ranks launch on streams of their own."""

    def __init__(self, world: int) -> None:
        self.peers, self._boxes = group(world)
        self._streams = [torch.cuda.Stream() for _ in range(world)]

    def launch(self, call: Launch, xs: list[Any], ys: list[Any]) -> None:
        for peers, stream, x, y in zip(self.peers, self._streams, xs, ys, strict=True):
            with torch.cuda.stream(stream):
                call(peers, x, y)

    def reduce(self, xs: list[np.ndarray], dtype: str, offset: int = 0, in_place: bool = False) -> list[np.ndarray]:
        """Each rank's sum; offset: elements that x and y are past a multiple of 16 bytes."""
        own = [shifted(x, dtype, offset) for x in xs]
        sums = own if in_place else [shifted(np.full_like(x, np.nan), dtype, offset) for x in xs]
        torch.cuda.synchronize()
        self.launch(cuda.launch_sum, own, sums)
        torch.cuda.synchronize()
        return [off_gpu(y, dtype) for y in sums]

    def add_norm(self, xs: list[np.ndarray], residuals: list[np.ndarray], weight: np.ndarray, dtype: str) -> Norms:
        """Each rank's y and sum."""
        inputs = [[on_gpu(x, dtype) for x in (*own, weight)] for own in zip(xs, residuals, strict=True)]
        made = [[torch.full_like(own[0], float("nan")) for _ in range(2)] for own in inputs]
        torch.cuda.synchronize()
        self.launch(lambda peers, given, outputs: cuda.launch_sum_norm(peers, NORM, *given, *outputs), inputs, made)
        torch.cuda.synchronize()
        return [tuple(off_gpu(y, dtype) for y in own) for own in made]

    def gather(self, xs: list[np.ndarray], dtype: str, offset: int = 0) -> list[np.ndarray]:
        """Each rank's y [rows, world, columns] of x [rows, columns]."""
        shape = (len(xs[0]), len(xs), xs[0].shape[1])
        own = [shifted(x, dtype, offset) for x in xs]
        joined = [shifted(np.full(shape, np.nan, NUMPY[dtype]), dtype, offset) for _ in xs]
        torch.cuda.synchronize()
        self.launch(cuda.launch_gather, own, joined)
        torch.cuda.synchronize()
        return [off_gpu(y, dtype) for y in joined]


def assert_same(found: list[np.ndarray], want: np.ndarray) -> None:
    for y in found:
        np.testing.assert_array_equal(y.view(np.uint16), want.view(np.uint16))


@gpu
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums(world: int, dtype: str) -> None:
    """Counts on both sides of all borders, one after the other, so that places are written again."""
    ranks, words = Ranks(world), MOST * 2 // world
    counts = [1, 7, 8, 2048, 2049, 8 * words, 8 * words + 1, 8 * world * PART * BLOCKS * 3 + 12345]
    for seed, count in enumerate([*counts, *reversed(counts), *counts[:4] * 2]):
        xs = drawn(world, count, dtype, seed)
        assert_same(ranks.reduce(xs, dtype, offset=seed % 2, in_place=seed % 3 == 0), all_reduce(xs))


@gpu
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gathers(world: int, dtype: str) -> None:
    """Among sums, whose places they share; of two ranks, which one GPU has room for, also of several kernels."""
    ranks, most = Ranks(world), 8 * MOST if world == 2 else 2 * MOST
    shapes = [(1, 1), (3, 7), (1, 4096), (5, 2056), (64, 1000), (2, most + 8), (1, most * 2 + 3)]
    for seed, (rows, columns) in enumerate([*shapes, *reversed(shapes)]):
        xs = [x.reshape(rows, columns) for x in drawn(world, rows * columns, dtype, seed)]
        assert_same(ranks.gather(xs, dtype, offset=seed % 2), np.stack(xs, axis=1))
        assert_same(ranks.reduce([x[0] for x in xs], dtype), all_reduce([x[0] for x in xs]))


@gpu
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_norms_of_sums(world: int, dtype: str) -> None:
    """The bytes of AddRMSNorm of the sum, one after the other with sums and gathers, whose places they share. Of more
    than a few rows a rank needs, and has, its own rows of residual and sum only."""
    ranks, rng = Ranks(world), np.random.default_rng(world)
    shapes = [(1, 8), (3, 2048), (2, 2880), (5, 4104), (1, 8192), (64, 4096), (130, 4096), (67, 7168), (301, 64)]
    for seed, (rows, columns) in enumerate([*shapes, *reversed(shapes)]):
        xs = [x.reshape(rows, columns) for x in drawn(world, rows * columns, dtype, seed)]
        weight, residual = (rng.normal(1, 1, size).astype(NUMPY[dtype]) for size in (columns, (rows, columns)))
        words = -(-columns // 2048) * 256
        few, residuals = rows * words <= MOST * 2 // world, [residual] * world
        if not few:
            residuals = [np.full_like(residual, np.nan) for _ in range(world)]
            for rank, own in enumerate(residuals):
                own[rank::world] = residual[rank::world]
        total = on_gpu(all_reduce(xs), dtype)
        y, kept = (
            off_gpu(z, dtype) for z in cuda.run_node(NORM, total, on_gpu(residual, dtype), on_gpu(weight, dtype))
        )
        found = ranks.add_norm(xs, residuals, weight, dtype)
        assert_same([own for own, _ in found], y)
        for rank, (_, own) in enumerate(found):
            rows_of = slice(None) if few else slice(rank, None, world)
            np.testing.assert_array_equal(own[rows_of].view(np.uint16), kept[rows_of].view(np.uint16))
            assert few or np.isnan(np.delete(own, rows_of, axis=0)).all()
        assert_same(ranks.reduce([x[0] for x in xs], dtype), all_reduce([x[0] for x in xs]))
        assert_same(ranks.reduce(xs, dtype), all_reduce(xs))
        one = [x[:2, :8] for x in xs]
        assert_same(ranks.gather(one, dtype), np.stack(one, axis=1))


@gpu
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("count", [64, 8 * MOST + 64])
def test_values_that_are_not_finite(dtype: str, count: int) -> None:
    """Among them the word that stands for one that has not come."""
    xs = drawn(2, count, dtype, 5)
    xs[0].view(np.uint16)[:12] = 0xFFFF
    xs[1].view(np.uint16)[8:16] = 0xFFFF
    xs[0][20:24], xs[1][22:26] = np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        want = all_reduce(xs)
    assert np.isnan(want[[*range(16), 22, 23]]).all()
    assert np.isinf(want[20:22]).all()
    ranks = Ranks(2)
    for y in ranks.reduce(xs, dtype):
        np.testing.assert_array_equal(y.astype(np.float32), want.astype(np.float32))
    for y in ranks.gather([x[None] for x in xs], dtype):
        np.testing.assert_array_equal(y[0].astype(np.float32), np.stack(xs).astype(np.float32))


@gpu
@pytest.mark.parametrize("dtype", TORCH)
def test_zeros_of_a_sign(dtype: str) -> None:
    xs = [np.array([-0.0, -0.0, 0.0], NUMPY[dtype]), np.array([-0.0, 0.0, -0.0], NUMPY[dtype])]
    assert_same(Ranks(2).reduce(xs, dtype), all_reduce(xs))


@gpu
def test_many_sums_that_nothing_else_orders() -> None:
    """Ranks that are up to a call ahead of each other, whose places come in turn."""
    ranks, counts = Ranks(4), (8, 4096, 8 * MOST // 2 + 8, 8 * 4 * PART * BLOCKS * 2)
    xs = [[np.full(count, (rank + 1) * 2.0**-9, np.float16) for count in counts] for rank in range(4)]
    own = [[on_gpu(x, "f16") for x in of_rank] for of_rank in xs]
    sums = [[torch.full_like(x, float("nan")) for x in of_rank] for of_rank in own]
    torch.cuda.synchronize()
    for at in range(200):
        for size in range(len(counts)):
            ranks.launch(cuda.launch_sum, [x[size] for x in own], [y[size] for y in sums])
            if at % 50 == 49:
                torch.cuda.synchronize()
                for y in sums:
                    assert (y[size] == 10 * 2.0**-9).all()
                    y[size].fill_(float("nan"))
                torch.cuda.synchronize()


@gpu
def test_a_captured_graph() -> None:
    """Replays, and calls between them, each of other numbers."""
    ranks = Ranks(2)
    xs, ys = ([on_gpu(np.zeros(5000, np.float16), "f16") for _ in range(2)] for _ in range(2))
    graphs = []
    for peers, x, y in zip(ranks.peers, xs, ys, strict=True):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                cuda.launch_sum(peers, x, y)
        graphs.append((graph, stream))
    for at in range(20):
        values = drawn(2, 5000, "f16", at)
        for x, value in zip(xs, values, strict=True):
            x.copy_(on_gpu(value, "f16"))
        torch.cuda.synchronize()
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert_same([off_gpu(y, "f16") for y in ys], all_reduce(values))
        between = drawn(2, 300 + at, "f16", at)
        assert_same(ranks.reduce(between, "f16"), all_reduce(between))


def test_refusals() -> None:
    x = torch.zeros(1, 8, dtype=torch.float16)
    for rank, world, blocks in ((2, 2, 1), (-1, 2, 1), (0, 1, 1), (0, 9, 1), (0, 2, 0), (0, 2, 257)):
        for call in (cuda.launch_sum, cuda.launch_gather):
            with pytest.raises(ValueError, match=f"rank {rank} of {world} with {blocks} blocks, expected 2 to 8 ranks"):
                call(cuda.Peers(rank, world, blocks), x, x)
    with pytest.raises(ValueError, match="x is of type 0, expected float16 or bfloat16"):
        cuda.launch_sum(cuda.Peers(0, 2, 1), x.float(), x.float())
    for columns in (12, 8200):
        x = torch.zeros(1, columns, dtype=torch.float16)
        with pytest.raises(ValueError, match=f"x has {columns} columns, expected a multiple of 8 up to 8192"):
            cuda.launch_sum_norm(cuda.Peers(0, 2, 1), NORM, x, x, x[0], x, x)
