"""Compare logits of requests that run together in the scheduler of ``quantmoe serve`` with each request's alone.

    python tests/benchmarks/serving_logits.py FOLDER... --exact CPU_FOLDER --count 256 --tokens 48

256 requests run together, and a third of them is cancelled on the way. Then each runs alone, in the parts that its
prompt had and with its tokens. It fails if the logits after a prompt have other bytes. After a token they may: a kernel
adds in another order where it has more rows. ``--bound`` limits the difference, of the largest logit.

``--exact`` is an export of the checkpoint for the CPU in f32. The distance of both to its logits says which is wrong.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.serving import Own, Request, cancelled, texts

from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.generate import Generator


@dataclass
class Read:
    """A request that ran.

    Attributes:
        parts: tokens of each part of its prompt. logits: after the prompt, and after each token.
    """

    parts: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)


def last(model: Generator, logits: Buffer, row: int) -> np.ndarray:
    """Return a row's logits after its last token, f32 [vocabulary], once the run has ended."""
    model.in_turn(model.wait)
    array = logits.numpy().astype(np.float32)
    return array[row].reshape(-1, array.shape[-1])[-1]


def record(own: Own) -> dict[int, Read]:
    """Have a scheduler's rows write down what they read. Return it by the address of each prompt."""
    scheduler, found = own.scheduler, dict[int, Read]()
    rows = scheduler._rows
    read, start = rows.read, rows.start

    def reading(row: int, ids: Any) -> Buffer:
        logits = read(row, ids)
        assert scheduler._reading is not None
        got = found.setdefault(id(scheduler._reading.request.ids), Read())
        got.parts.append(len(ids))
        got.logits = [last(own.model, logits, 0)]
        return logits

    def starting(tokens: Any) -> Any:
        logits, ran = start(tokens)
        own.model.in_turn(own.model.wait)
        array = logits.numpy().astype(np.float32)
        array = array.reshape(len(array), -1, array.shape[-1])[:, -1]
        for row in tokens:
            found[id(scheduler._answers[row].request.ids)].logits.append(array[list(ran).index(row)])
        return logits, ran

    rows.read, rows.start = reading, starting  # type: ignore[method-assign]
    return found


def alone(rows: Any, model: Generator, request: Request, parts: list[int]) -> list[np.ndarray]:
    """Return the logits of a request in a cache of one row: its prompt in these parts, then its tokens."""
    rows.take(0, len(request.prompt) + len(request.tokens))
    at, found = 0, list[np.ndarray]()
    for part in parts:
        found = [last(model, rows.read(0, request.prompt[at : at + part]), 0)]
        at += part
    for token in request.tokens[:-1]:
        found.append(last(model, rows.start({0: token})[0], 0))
    rows.leave(0)
    return found


def apart(found: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the largest difference of each token's logits, of the largest logit."""
    return np.abs(found - want).max(-1) / np.abs(want).max(-1)


def quantiles(values: np.ndarray) -> str:
    """Return the median, 95 %, 99 % and the largest."""
    return ", ".join(f"{np.quantile(values, q):.1e}" for q in (0.5, 0.95, 0.99, 1))


def check(folder: Path, exact: Path | None, given: argparse.Namespace) -> bool:
    """Print how far the logits are apart. Return whether they are as near as they must be."""
    own = Own(folder, given.count, given.length, given.device)
    requests = cancelled(list(texts(folder, given.text, given.count, own.vocabulary)), given.tokens)
    found = record(own)
    own.serve(requests, given.count)
    kind = type(own.scheduler._rows)
    own.scheduler.close()
    reads = [found[id(request.prompt)] for request in requests]
    rows = kind(own.model, 1, given.length)  # type: ignore[arg-type]
    wants = [alone(rows, own.model, r, read.parts) for r, read in zip(requests, reads, strict=True)]
    whole = [alone(rows, own.model, r, _parts(r, own.model.chunk)) for r in requests]
    pairs = [(read.logits[: len(want)], want) for read, want in zip(reads, wants, strict=True)]
    same = sum(x[0].tobytes() == y[0].tobytes() for x, y in pairs)
    steps = [pair for x, y in pairs for pair in zip(x[1:], y[1:], strict=True)]
    equal = sum(x.tobytes() == y.tobytes() for x, y in steps)
    far = apart(np.array([x for x, _ in steps]), np.array([y for _, y in steps]))
    print(f"{own.name}: {len(requests)} requests, {sum(len(r.parts) > 1 for r in reads)} prompts in several parts")
    print(f"  after the prompt, in equal parts: {same} of {len(pairs)} have equal bytes")
    print(f"  after a token: {equal} of {len(steps)} have equal bytes; apart by {quantiles(far)} (50, 95, 99, 100 %)")
    firsts = apart(np.array([x[0] for x in whole]), np.array([y[0] for y in wants]))
    print(f"  after the prompt, alone in other parts: apart by {quantiles(firsts)}")
    others = sum(any(x.argmax() != y.argmax() for x, y in zip(*pair, strict=True)) for pair in pairs)
    print(f"  {others} requests have another token than alone")
    if exact is not None:
        generator = Generator(exact)
        scores = [generator.scores(r.prompt + r.tokens[:-1])[len(r.prompt) - 1 :] for r in requests]
        for name, logits in (("together", [x for x, _ in pairs]), ("alone", wants), ("alone, other parts", whole)):
            far_of = np.concatenate([apart(np.array(x), y) for x, y in zip(logits, scores, strict=True)])
            print(f"  {name}: from the logits in f32 by {quantiles(far_of)}; {(far_of > given.flip).mean():.2%} beyond")
        generator.close()
    own.model.close()
    return same == len(pairs) and (given.bound is None or float(far.max()) <= given.bound)


def _parts(request: Request, chunk: int) -> list[int]:
    """Return the parts of a prompt that runs alone."""
    return [min(chunk, len(request.prompt) - at) for at in range(0, len(request.prompt), chunk)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--exact", type=Path, help="the checkpoint's export for the CPU, in f32")
    parser.add_argument("--bound", type=float, help="most that logits after a token may differ by")
    parser.add_argument("--flip", type=float, default=0.02, help="count logits that are farther from f32's")
    parser.add_argument("--count", type=int, default=256, help="requests")
    parser.add_argument("--tokens", type=int, default=48, help="of a request at most")
    parser.add_argument("--length", type=int, default=700, help="tokens of a prompt and its answer at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--text", type=Path, help="the text that prompts are taken from; random ids without it")
    given = parser.parse_args()
    wrong = [str(folder) for folder in given.folders if not check(folder, given.exact, given)]
    if wrong:
        raise SystemExit(f"logits are farther apart than they may be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
