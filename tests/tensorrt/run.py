"""Every architecture in TensorRT on this machine's GPU, against what PyTorch said on another.

usage: run.py FOLDER RUNNER LIBRARY [--jobs N] [--only REGEX]

FOLDER is what prepare.py wrote. LIBRARY is libquantmoe_trt.so. RUNNER is run.cc, compiled: g++ -std=c++20 run.cc -I
<TensorRT's and CUDA's include folders> -lnvinfer -lnvonnxparser -lcudart. Needs NumPy, not this package. Prints a table
and ends with 1 when a case fails.

An f16 engine passes when no token's logits are further from float32's, relative to their length, than TOLERANCE times
what PyTorch's own in the same type are at their worst token; a bf16 engine when that holds for nine tokens of ten: with
8 bits a router's nearly tied experts change places, in PyTorch as here, and such a token is off by up to a half. Both
round after each operation, in other places: their errors are draws of one distribution, of which noise.json has the
largest of more than a hundred. A wrong engine is off by 15 % to 150 %, PyTorch in bf16 by 2 to 3 %.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

TOLERANCE = 3.0
PREFILL, LENGTH = 12, 20
PROMPT = [PREFILL] + [1] * (LENGTH - PREFILL)
ALONE = [1] * LENGTH
DECODE = "1:1:1/1:1:1/0:16:64"
CAPACITY = 64
SERVER = "1:1:2/1:128:512/0:0:1024"


Run = tuple[str, int, list[int], bool]


@dataclass(frozen=True)
class Case:
    """An engine and what it is fed.

    Attributes:
        level: TensorRT's builder optimization level.
        profiles: BATCH/NEW/PAST tokens, each MIN:OPT:MAX; /fixed: PAST is the cache's capacity.
        capacity: 0, or of the cache that past and present share; a CUDA graph then serves all steps of one token.
        runs: name -> file of tokens, rows, lengths of steps, and whether steps of one token are replayed from a CUDA
            graph, too. Steps of one token take the last profile.
    """

    level: int
    profiles: list[str]
    runs: dict[str, Run]
    capacity: int = 0


CASES = {
    "S=1": Case(3, [DECODE], {"tokens": ("tokens", 1, ALONE, False), "graph": ("tokens", 1, ALONE, True)}),
    "S=1 level 0": Case(0, [DECODE], {"tokens": ("tokens", 1, ALONE, True)}),
    "prefill, decode": Case(3, ["1:1:1/1:8:64/0:0:64", DECODE], {"prompt": ("tokens", 1, PROMPT, True)}),
    "prefill, decode level 0": Case(0, ["1:1:1/1:8:64/0:0:64", DECODE], {"prompt": ("tokens", 1, PROMPT, True)}),
    "S=1..512 opt 128": Case(
        3,
        [SERVER],
        {
            "prompt": ("tokens", 1, PROMPT, False),
            "alone": ("tokens", 1, ALONE, False),
            "batch": ("tokens", 2, PROMPT, False),
            "padded": ("padded-tokens", 2, PROMPT, False),
            "graph": ("tokens", 1, PROMPT, True),
        },
    ),
    "S=1..512 level 0": Case(0, [SERVER], {"prompt": ("tokens", 1, PROMPT, False)}),
    "in place": Case(
        3,
        [f"1:1:2/1:8:64/{CAPACITY}:{CAPACITY}:{CAPACITY}/fixed", f"1:1:2/1:1:1/{CAPACITY}:{CAPACITY}:{CAPACITY}/fixed"],
        {
            "prompt": ("tokens", 1, PROMPT, True),
            "parts": ("tokens", 1, [8, *PROMPT[1:], 4], True),
            "batch": ("tokens", 2, PROMPT, True),
            "padded": ("padded-tokens", 2, PROMPT, True),
        },
        CAPACITY,
    ),
    "S=1..2": Case(3, ["1:1:1/1:1:2/0:16:64"], {"mixed": ("tokens", 1, [2, 1] * 6 + [1, 1], False)}),
}
#: of weight formats, whose graphs are alike
BRIEF = ("prefill, decode", "S=1..512 opt 128", "in place")


@dataclass
class Result:
    model: str
    dtype: str
    case: str
    run: str
    error: float = float("nan")
    worst: float = float("nan")
    limit: float = float("nan")
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.message and self.error <= self.limit

    @property
    def row(self) -> str:
        verdict = "passed" if self.passed else f"FAILED {self.message}"
        numbers = f"{self.worst:.4f}", f"{self.error:.4f}", f"{self.limit:.4f}"
        values = self.model, self.dtype, self.case, self.run, *numbers, verdict
        return f"| {' | '.join(values)} |"


@dataclass
class Work:
    """What the threads share."""

    folder: Path
    runner: list[str]
    tasks: queue.Queue[tuple[str, str, str]] = field(default_factory=queue.Queue)
    results: list[Result] = field(default_factory=list)


def widen(raw: np.ndarray, dtype: str) -> np.ndarray:
    return raw.view(np.float16).astype(np.float32) if dtype == "f16" else (raw.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of float32 values that the type holds exactly."""
    return values.astype(np.float16) if dtype == "f16" else (values.view(np.uint32) >> 16).astype(np.uint16)


def measure(folder: Path, dtype: str, run: Run, raw: np.ndarray) -> tuple[float, float]:
    """Relative distances from float32's logits: the worst token's, and of those that count in this type."""
    file, rows, steps, _ = run
    tokens = np.load(folder / f"{file}.npy")[:rows]
    want = np.load(folder / f"{file.replace('tokens', 'logits')}.npy")[:rows]
    found, at = np.empty(want.shape, np.float32), 0
    raw = widen(raw, dtype)
    for step, start in zip(steps, np.cumsum([0, *steps]), strict=False):
        size = rows * step * want.shape[-1]
        found[:, start : start + step] = raw[at : at + size].reshape(rows, step, -1)
        at += size
    assert at == raw.size, f"{raw.size} logits, expected {at}"
    found, want = found[tokens >= 0], want[tokens >= 0]
    distance = np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1)
    distance = np.nan_to_num(distance, nan=np.inf)
    return float(distance.max()), float(np.quantile(distance, 0.9 if dtype == "bf16" else 1.0, method="lower"))


def ask(process: subprocess.Popen[str], *words: object) -> str:
    """ "" or why not."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(" ".join(map(str, words)) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline().strip()
    except BrokenPipeError:
        answer = ""
    return "" if answer.startswith("ok") else answer or f"the runner ended with {process.wait()}"


def try_case(process: subprocess.Popen[str], work: Work, model: str, dtype: str, name: str) -> None:
    folder, case = work.folder / model, CASES[name]
    facts = json.loads((folder / "noise.json").read_text())
    refused = ask(process, "engine", "e", folder / dtype / facts["file"], case.level, *case.profiles)
    limit = TOLERANCE * facts[dtype]
    for label, run in case.runs.items():
        result = Result(model, dtype, name, label, limit=limit, message=refused)
        if not refused:
            try_run(process, folder, result, run, case)
        work.results.append(result)
        print(result.row, file=sys.stderr, flush=True)


def try_run(process: subprocess.Popen[str], folder: Path, result: Result, run: Run, case: Case) -> None:
    file, rows, steps, graph = run
    last_profile = len(case.profiles) - 1
    key = re.sub(r"\W+", "_", f"{result.model}-{result.dtype}-{result.case}-{result.run}")
    tokens, hidden, logits = (folder / f"{key}.{kind}" for kind in ("tokens", "tokens.hidden", "logits"))
    np.load(folder / f"{file}.npy")[:rows].astype(np.int64).tofile(tokens)
    if (read := folder / f"{file.replace('tokens', 'hidden')}.npy").exists():
        narrow(np.load(read)[:rows], result.dtype).tofile(hidden)
    words = [f"e/{last_profile if step == 1 else 0}/{step}{'/graph' if graph and step == 1 else ''}" for step in steps]
    result.message = ask(process, "run", tokens, rows, case.capacity, logits, *words)
    if not result.message:
        result.worst, result.error = measure(folder, result.dtype, run, np.fromfile(logits, np.uint16))
    for path in (tokens, hidden, logits):
        path.unlink(missing_ok=True)


def serve(work: Work) -> None:
    """One runner after another: a crash loses the case it is in."""
    process: subprocess.Popen[str] | None = None
    while True:
        try:
            model, dtype, name = work.tasks.get_nowait()
        except queue.Empty:
            break
        if process is None or process.poll() is not None:
            process = subprocess.Popen(work.runner, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            try_case(process, work, model, dtype, name)
        except Exception as error:
            work.results.append(Result(model, dtype, name, "", message=repr(error)))
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def table(results: list[Result]) -> str:
    lines = [
        "| model | type | engine | fed | worst token's error | that counts | limit | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [r.row for r in sorted(results, key=lambda r: (r.model, r.dtype, r.case, r.run))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runner")
    parser.add_argument("library")
    parser.add_argument("--jobs", type=int, default=2, help="runners at once, 5 GB of host memory each")
    parser.add_argument("--only", default="", help="of MODEL/TYPE/ENGINE")
    given = parser.parse_args()
    work = Work(given.folder, [given.runner, given.library])
    models = sorted(path.parent for path in given.folder.glob("*/noise.json"))
    shared = {path for path in models if json.loads((path / "noise.json").read_text())["in_place"]}
    for dtype, name, path in itertools.product(("bf16", "f16"), CASES, models):
        wanted = (path.name.endswith("-W4A16") or name in BRIEF) and (path in shared or not CASES[name].capacity)
        if wanted and (path / dtype).is_dir() and re.search(given.only, f"{path.name}/{dtype}/{name}"):
            work.tasks.put((path.name, dtype, name))
    count = work.tasks.qsize()
    threads = [threading.Thread(target=serve, args=(work,)) for _ in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(table(work.results))
    failed = sum(not result.passed for result in work.results)
    print(f"{count} engines, {len(work.results)} runs, {failed} failed")
    sys.exit(bool(failed or not count))


if __name__ == "__main__":
    main()
