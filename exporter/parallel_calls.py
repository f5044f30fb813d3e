"""Work ahead of the writing: on as many threads as there are CPUs, in memory that does not grow with them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.reading.weights.rounding import PIECE
from quantmoe.exporter.targets import of_layout

T = TypeVar("T")
#: bytes that decoded and packed weights take while they are made and written, unless a single expert takes more
MEMORY = 2 * 10**9
#: most bytes of a weight outside the experts that are converted at a time
BLOCK = 1 << 26
#: what that takes where it takes most, in a transpose of float32: the copy, what is made, and whether each is finite
BLOCK_MEMORY = BLOCK * 9 // 4 + (1 << 20)


def in_flight(size: int, count: int) -> int:
    """Return how many of ``count`` calls of ``size`` bytes run, or are done and wait, while one more's result is
    written."""
    return max(1, min(native.cpus(), count, MEMORY // size - 1))


def memory(size: int, count: int) -> int:
    """Return the bytes that so many calls take with :func:`ahead`."""
    return size * (in_flight(size, count) + 1)


def ahead(calls: Iterable[Callable[[], T]], size: int) -> Generator[T, None, None]:
    """Yield the results in order of calls that take ``size`` bytes each and run ahead of the caller.

    CPUs that calls in flight leave over are for the packing inside them.
    """
    calls = list(calls)
    count = in_flight(size, len(calls))
    with ThreadPoolExecutor(count, initializer=native.share_threads, initargs=(count,)) as pool:
        rest = iter(calls)
        waiting = deque(pool.submit(call) for call in itertools.islice(rest, count))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(call) for call in itertools.islice(rest, 1))
            yield result


def expert_size(spec: MoESpec) -> int:
    """Return the bytes that decoding and packing an expert takes at most.

    Codes are a byte each, twice where act-order has rows moved. Scales on their way, or read of the checkpoint, are as
    many bytes as the packed rows. Rounding goes by pieces (``--quantize``), whatever the size. Layout marlin puts gate
    and up of different act-orders beside each other. Each then has the columns of both (FORMAT.md 3.4). So have the
    zero points of one while they are spread over them.
    """
    packed = sum(LAYOUTS[spec.w13.layout].row_bytes(spec, projection) for projection in ("w13", "w2"))
    weights = (2 + spec.gated) * spec.hidden_size * spec.intermediate_size
    beside = 0
    if of_layout(spec.w13.layout).act_orders_apart and spec.w13.perm == 2:
        columns = 2 * -(-spec.hidden_size // (unit := max(spec.w13.group_size, 64))) * unit
        beside = (2 + spec.w13.zero_points) * columns * spec.intermediate_size
    return 2 * packed + weights * (1 + spec.w2.perm) + beside + 50 * PIECE
