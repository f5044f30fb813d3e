"""Requests of mixed lengths to onnxruntime-genai's Engine, so many at a time, or to llama.cpp's server.

    quantmoe export CHECKPOINT paged --target cuda --paged
    quantmoe export CHECKPOINT plain --target cuda --logits all  # static batches take the logits of all tokens
    python -m quantmoe.exporter.measuring.kernels.serving run paged plain http://localhost:8080

Whoever asks is given a new request when one has ended: as many are in flight until the last have begun. A row has
generated tokens a second, of all requests together; milliseconds to a request's first token, of half of them and of 95
in 100, the wait for its turn included; and the median of the milliseconds between two tokens of a request.

``check`` compares the tokens of a paged folder with those of the ordinary export in ``quantmoe.Generator``, one request
after the other there; in the Engine they come one by one while others run, and every third is cancelled on the way:

    python -m quantmoe.exporter.measuring.kernels.serving check paged plain --text FILE

``make`` writes both folders at a model's sizes with random weights where there are no checkpoint and no transformers,
from the graphs that ort_cuda_bench.py's ``graph`` made, with and without ``--paged``.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.names import PAGED

#: tokens of prompts and of answers, each request's at random
PROMPTS, ANSWERS = (32, 128, 512, 1024), (32, 64, 128, 256)
#: requests that a static batch has at most
STATIC = 4


@dataclass
class Request:
    """One request, and when what came: seconds on a clock.

    Attributes:
        prompt: token ids. count: tokens asked for. leave: cancelled after so many, 0 for not.
        asked, came: when it was asked for, and when each token came. tokens: those, where whoever serves gives ids.
    """

    prompt: list[int]
    count: int
    leave: int = 0
    asked: float = 0.0
    came: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def mixed(count: int, vocabulary: int, seed: int = 0) -> list[Request]:
    """Random prompts and numbers of tokens."""
    rng = np.random.default_rng(seed)
    return [
        Request(rng.integers(3, vocabulary, rng.choice(PROMPTS)).tolist(), int(rng.choice(ANSWERS)))
        for _ in range(count)
    ]


class Engine:
    """A folder in onnxruntime-genai's Engine."""

    def __init__(self, folder: Path):
        import onnxruntime_genai as og

        self.og, config = og, json.loads((folder / "genai_config.json").read_text())
        self.vocabulary = config["model"]["vocab_size"]
        paged, opened = "block_table" in config["model"]["decoder"]["inputs"], og.Config(str(folder))
        if not paged:  # static batches take no prompt in parts
            settings = {"search": {"chunk_size": 0}, "engine": {"static_batching": {"max_batch_size": STATIC}}}
            opened.overlay(json.dumps(settings))
        self.name = f"{folder.name}, {'paged' if paged else 'static'}"
        self.engine = og.Engine(og.Model(opened))
        self.events = self.engine.create_event_buffer(1024)

    def serve(self, requests: Sequence[Request], concurrent: int) -> None:
        """Fills in what came."""
        waiting, running = list(reversed(requests)), {}
        while waiting or running:
            while waiting and len(running) < concurrent:
                asked = waiting.pop()
                request = self.engine.create_request()
                turn = self.og.TurnOptions(request)
                turn.set_max_generated_tokens(asked.count)
                turn.set_do_sample(False)
                asked.asked = time.perf_counter()
                request.begin_turn(np.asarray(asked.prompt, np.int32), turn)
                running[request] = asked
            for event in self.engine.run(self.events):
                asked, now = running[event.request], time.perf_counter()
                if event.token is not None:
                    asked.tokens.append(int(event.token))
                    asked.came.append(now)
                if event.finish_reason != self.og.FinishReason.NONE:
                    if event.finish_reason == self.og.FinishReason.FAILED:
                        raise RuntimeError(f"{self.name}: a request failed: {event.error_code}")
                    del running[event.request]
                    event.request.close()
                elif asked.leave and len(asked.tokens) == asked.leave:
                    event.request.cancel_turn(event.turn_id)


class Server:
    """llama.cpp's server at an address."""

    def __init__(self, address: str, vocabulary: int):
        self.address, self.vocabulary, self.name = address, vocabulary, f"llama.cpp, {address}"

    def serve(self, requests: Sequence[Request], concurrent: int) -> None:
        """Fills in when what came."""
        waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)

        def ask() -> None:
            while True:
                try:
                    asked = waiting.get_nowait()
                except queue.Empty:
                    return
                fields = {"prompt": asked.prompt, "n_predict": asked.count, "temperature": 0, "ignore_eos": True}
                body = json.dumps(fields | {"stream": True, "cache_prompt": False}).encode()
                headers = {"Content-Type": "application/json"}
                asked.asked = time.perf_counter()
                with urllib.request.urlopen(urllib.request.Request(f"{self.address}/completion", body, headers)) as got:
                    for line in got:
                        if line.startswith(b"data: ") and not json.loads(line[6:])["stop"]:
                            asked.came.append(time.perf_counter())

        threads = [threading.Thread(target=ask) for _ in range(concurrent)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def measure(server: Engine | Server, concurrent: int, rounds: int) -> None:
    """Prints a row."""
    requests = mixed(max(4, rounds * concurrent), server.vocabulary)
    begin = time.perf_counter()
    server.serve(requests, concurrent)
    seconds = time.perf_counter() - begin
    count = sum(len(request.came) for request in requests)
    first = 1e3 * np.array([request.came[0] - request.asked for request in requests])
    between = 1e3 * np.concatenate([np.diff(request.came) for request in requests])
    asked = sum(request.count for request in requests)
    print(
        f"{concurrent:5} at once, {len(requests):4} requests: {count / seconds:8.0f} tokens/s, first token "
        f"{np.median(first):7.1f} ms ({np.quantile(first, 0.95):.0f}), then {np.median(between):6.2f} ms"
        + (f"; {asked - count} tokens of {asked} did not come" if asked != count else ""),
        flush=True,
    )


def check(paged: Path, plain: Path, prompts: Sequence[list[int]], count: int) -> bool:
    """Prints how many tokens of the Engine are those of the ordinary export.

    Returns:
        Whether all are, or differ first where the ordinary export's two logits are within 1e-2 of the largest.
    """
    from quantmoe.exporter.running.generate import Generator

    lengths = np.random.default_rng(0).integers(1, count, len(prompts), endpoint=True)
    requests = [
        Request(prompt, int(length), leave=int(length) // 2 if i % 3 == 2 else 0)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    engine = Engine(paged)
    engine.serve(requests, max(2, len(prompts) // 2))
    del engine
    generator, equal, largest, same = Generator(plain, device="cuda"), 0, 0.0, 0
    for request in requests:
        want = generator.greedy(request.prompt, request.count)
        expected = want.tokens[: request.leave or None]
        pairs = list(zip(request.tokens[: len(expected)], expected, strict=True))
        differing = next((i for i, (found, other) in enumerate(pairs) if found != other), None)
        equal += len(pairs) if differing is None else differing
        same += differing is None
        if differing is not None:
            logits = want.logits[differing].astype(np.float32)
            gap = float(logits.max() - logits[request.tokens[differing]]) / float(np.abs(logits).max())
            largest = max(largest, gap)
    total = sum(min(len(r.tokens), r.leave or r.count) for r in requests)
    left = sum(r.leave > 0 for r in requests)
    print(
        f"{paged.name}: {len(requests)} requests, {left} left on the way: {same} have the ordinary export's tokens, "
        f"{equal} of {total} tokens before the first other one; its logit is up to {largest:.1e} of the largest behind"
    )
    return largest < 1e-2


def texts(folder: Path, text: Path | None, count: int) -> Iterator[list[int]]:
    """Prompts of 1 to 600 tokens: pieces of a text, or random."""
    config = json.loads((folder / "genai_config.json").read_text())
    rng, vocabulary = np.random.default_rng(1), config["model"]["vocab_size"]
    ids = rng.integers(3, vocabulary, 20_000).tolist()
    if text is not None:
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text.read_text()).ids
    for length in [1, 255, 256, 257, *rng.integers(2, 600, max(0, count - 4)).tolist()][:count]:
        at = int(rng.integers(0, len(ids) - length))
        yield ids[at : at + length]


def make(graphs: Sequence[Path], folder: Path, model: str, sizes: dict[str, Any]) -> None:
    """Writes a folder for each graph, named as it is, with random weights, genai_config.json and the library."""
    import onnx

    from quantmoe.exporter.measuring.kernels.ort_cuda_bench import fill
    from quantmoe.exporter.measuring.random_checkpoint import CONFIGS
    from quantmoe.exporter.writing.genai import add_paged, genai_config
    from quantmoe.ort_ext import LIBRARIES, cuda_library_path

    for graph in graphs:
        out = folder / graph.stem
        out.mkdir(parents=True, exist_ok=True)
        fill(graph, out)
        names = [value.name for value in onnx.load(graph, load_external_data=False).graph.input]
        own = CONFIGS[model] | sizes
        stop = {"eos_token_id": own["vocab_size"] - 1}  # what random weights rarely say
        config = genai_config(own, stop, LIBRARIES["cuda"], shares=True, cuda=True)
        if names[1] in PAGED:
            add_paged(config, names)
        (out / "genai_config.json").write_text(json.dumps(config))
        shutil.copyfile(cuda_library_path(), out / LIBRARIES["cuda"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "check", "make"])
    parser.add_argument("places", nargs="+", help="folders, or a server's address; of make the graphs")
    parser.add_argument("--concurrent", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--rounds", type=int, default=2, help="requests for each that is in flight")
    parser.add_argument("--text", type=Path, help="of check: what prompts are pieces of")
    parser.add_argument("--count", type=int, default=24, help="of check: requests")
    parser.add_argument("--tokens", type=int, default=48, help="of check: of a request at most")
    parser.add_argument("--folder", type=Path, default=Path("serving"), help="of make: where folders go")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="of make")
    parser.add_argument("--sizes", type=json.loads, default={}, help="of make: as ort_cuda_bench.py's")
    parser.add_argument("--vocabulary", type=int, default=151936, help="of a server's model")
    given = parser.parse_args()
    if given.what == "make":
        make([Path(place) for place in given.places], given.folder, given.model, given.sizes)
    elif given.what == "check":
        paged, plain = map(Path, given.places)
        sys.exit(not check(paged, plain, list(texts(paged, given.text, given.count)), given.tokens))
    else:
        open_server: Callable[[str], Engine | Server] = lambda place: (
            Server(place, given.vocabulary) if place.startswith("http") else Engine(Path(place))
        )
        for place in given.places:
            server = open_server(place)
            server.serve(mixed(8, server.vocabulary, seed=1), 4)  # the first runs allocate
            print(server.name)
            for concurrent in given.concurrent:
                measure(server, concurrent, given.rounds)
            del server


if __name__ == "__main__":
    main()
