"""Every architecture in TensorRT on this machine's GPU, against what PyTorch said on another.

usage: run.py FOLDER RUNNER LIBRARY [--jobs N] [--only REGEX] [--plans PLANS [--build]]

FOLDER is what prepare.py wrote. LIBRARY is libquantmoe_trt.so. RUNNER is run.cc, compiled: g++ -std=c++20 run.cc -I
<TensorRT's and CUDA's include folders> -lnvinfer -lnvonnxparser -lcudart. Needs NumPy, not this package. Prints a table
and ends with 1 when a case fails. PLANS keeps engines: those that are there are loaded, others are built and saved;
--build runs none, which slices for several GPUs allow on one.

An f16 engine passes when no token's logits are further from float32's, relative to their length, than TOLERANCE times
what PyTorch's own in the same type are at their worst token; a bf16 engine when that holds for nine tokens of ten: with
8 bits a router's nearly tied experts change places, in PyTorch as here, and such a token is off by up to a half. Both
round after each operation, in other places: their errors are draws of one distribution, of which noise.json has the
largest of more than a hundred. A wrong engine is off by 15 % to 150 %, PyTorch in bf16 by 2 to 3 %.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
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
#: in the names of models of drafting layers alone, whose files give the last token's logits
DRAFTS = "+mtp"
#: of weight formats, whose graphs are alike, and of slices
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
    plans: Path | None
    build: bool
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
    found, given, at = np.empty(want.shape, np.float32), np.zeros(tokens.shape, bool), 0
    raw = widen(raw, dtype)
    for step, end in zip(steps, np.cumsum(steps), strict=True):
        of = 1 if DRAFTS in folder.name else step
        size = rows * of * want.shape[-1]
        found[:, end - of : end], given[:, end - of : end] = raw[at : at + size].reshape(rows, of, -1), True
        at += size
    assert at == raw.size, f"{raw.size} logits, expected {at}"
    given &= tokens >= 0
    found, want = found[given], want[given]
    distance = np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1)
    distance = np.nan_to_num(distance, nan=np.inf)
    return float(distance.max()), float(np.quantile(distance, 0.9 if dtype == "bf16" else 1.0, method="lower"))


class Runners:
    """A runner for each rank, on a GPU of its own where there are several; what is asked all of them do."""

    def __init__(self, work: Work, ranks: int):
        self.ranks, self.folder = ranks, tempfile.TemporaryDirectory()
        group = {"QUANTMOE_GROUP_FILE": f"{self.folder.name}/group", "WORLD_SIZE": str(ranks)}
        self.processes = [
            subprocess.Popen(
                work.runner,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ if ranks == 1 else os.environ | group | {"RANK": str(rank)} | self.gpu(work, rank),
            )
            for rank in range(ranks)
        ]

    @staticmethod
    def gpu(work: Work, rank: int) -> dict[str, str]:
        return {} if work.build else {"CUDA_VISIBLE_DEVICES": str(rank)}

    def ask(self, *words: object) -> str:
        """ "" or why not; {rank} in a word is the rank."""
        for rank, process in enumerate(self.processes):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(" ".join(map(str, words)).replace("{rank}", str(rank)) + "\n")
                process.stdin.flush()
        return next(filter(None, [self._answer(process) for process in self.processes]), "")

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        answer = process.stdout.readline().strip()
        return "" if answer.startswith("ok") else answer or f"the runner ended with {process.wait()}"

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait()
        self.folder.cleanup()


def key_of(*words: str) -> str:
    return re.sub(r"\W+", "_", "-".join(words))


def make_engine(runners: Runners, work: Work, model: str, dtype: str, name: str, files: list[str]) -> str:
    """ "" or why not."""
    case, key = CASES[name], key_of(model, dtype, name)
    plans = [work.plans / f"{key}.{rank}.plan" for rank in range(len(files))] if work.plans else []
    if plans and all(plan.exists() for plan in plans):
        return runners.ask("load", "e", work.plans / f"{key}.{{rank}}.plan")
    file = files[0].replace("rank0", "rank{rank}")
    refused = runners.ask("engine", "e", work.folder / model / dtype / file, case.level, *case.profiles)
    return refused or (runners.ask("save", "e", work.plans / f"{key}.{{rank}}.plan") if work.plans else "")


def try_case(runners: Runners, work: Work, model: str, dtype: str, name: str) -> None:
    folder, case = work.folder / model, CASES[name]
    facts = json.loads((folder / "noise.json").read_text(encoding="utf-8"))
    refused = make_engine(runners, work, model, dtype, name, facts["files"])
    for label, run in case.runs.items():
        result = Result(model, dtype, name, label, limit=TOLERANCE * facts[dtype], message=refused)
        if not refused and work.build:
            result.worst = result.error = 0.0
        elif not refused:
            try_run(runners, folder, result, run, case)
        work.results.append(result)
        print(result.row, file=sys.stderr, flush=True)


def try_run(runners: Runners, folder: Path, result: Result, run: Run, case: Case) -> None:
    file, rows, steps, graph = run
    last_profile = len(case.profiles) - 1
    key = key_of(result.model, result.dtype, result.case, result.run)
    tokens, hidden = folder / f"{key}.tokens", folder / f"{key}.tokens.hidden"
    logits = [folder / f"{key}.{rank}.logits" for rank in range(runners.ranks)]
    np.load(folder / f"{file}.npy")[:rows].astype(np.int64).tofile(tokens)
    if (read := folder / f"{file.replace('tokens', 'hidden')}.npy").exists():
        narrow(np.load(read)[:rows], result.dtype).tofile(hidden)
    words = [f"e/{last_profile if step == 1 else 0}/{step}{'/graph' if graph and step == 1 else ''}" for step in steps]
    result.message = runners.ask("run", tokens, rows, case.capacity, folder / f"{key}.{{rank}}.logits", *words)
    if not result.message:
        found = [np.fromfile(path, np.uint16) for path in logits]
        result.worst, result.error = measure(folder, result.dtype, run, found[0])
        if not all(np.array_equal(found[0], other) for other in found):
            result.message = "the ranks' logits differ"
    for path in (tokens, hidden, *logits):
        path.unlink(missing_ok=True)


def serve(work: Work) -> None:
    """One runner after another: a crash loses the case it is in."""
    runners: Runners | None = None
    while True:
        try:
            model, dtype, name = work.tasks.get_nowait()
        except queue.Empty:
            break
        ranks = len(json.loads((work.folder / model / "noise.json").read_text(encoding="utf-8"))["files"])
        if runners is None or not runners.alive or runners.ranks != ranks:
            if runners is not None:
                runners.close()
            runners = Runners(work, ranks)
        try:
            try_case(runners, work, model, dtype, name)
        except Exception as error:
            work.results.append(Result(model, dtype, name, "", message=repr(error)))
    if runners is not None:
        runners.close()


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
    parser.add_argument("--plans", type=Path, help="folder of engines to load, and to save")
    parser.add_argument("--build", action="store_true", help="engines for --plans only")
    given = parser.parse_args()
    work = Work(given.folder, [given.runner, given.library], given.plans, given.build)
    models = {
        path.parent: json.loads(path.read_text(encoding="utf-8")) for path in sorted(given.folder.glob("*/noise.json"))
    }
    for dtype, name, (path, facts) in itertools.product(("bf16", "f16"), CASES, models.items()):
        brief = len(facts["files"]) > 1 or not path.name.endswith("-W4A16")
        wanted = (name in BRIEF or not brief) and (facts["in_place"] or not CASES[name].capacity)
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
