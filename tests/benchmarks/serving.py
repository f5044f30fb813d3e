"""Requests of mixed lengths, so many at a time, to quantmoe's scheduler, onnxruntime-genai's Engine or a server.

    quantmoe export CHECKPOINT paged --target cuda --paged
    quantmoe export CHECKPOINT plain --target cuda
    python tests/benchmarks/serving.py run paged plain http://localhost:8080

An ordinary export runs in static batches: onnxruntime-genai's Generator with as many rows, 32 at most, prompts padded
to the longest, until the last row has its tokens. (The Engine's own static batches have four rows, and take ``--logits
all``: option ``--static``.) Whoever asks has a new request when one has ended: as many are in flight until the last
have begun. A line has generated tokens a second, of all requests together; milliseconds to a request's first token, of
half of them and of 95 in 100, the wait for its turn included; and the median of those between two tokens of a request.

``check`` compares a paged folder in f16 with the ordinary export (``--logits all``) in ``quantmoe.Generator``, one
request after the other there; in the Engine they come while others run, and every third is cancelled on the way:

    python tests/benchmarks/serving.py check paged plain --text FILE

``--steady 1024:1024`` has prompts and answers of these lengths instead. The first answers are shorter, so that requests
end at different times. Its line is of the time after all of these have ended, until the last request is asked for.

``--own`` runs folders in the scheduler of ``quantmoe serve``, without HTTP. It makes texts of a tokenizer of words.
``check --own`` compares its requests with the same Generator's, which runs one after the other. Those of NAME-paged are
compared with NAME's.

``make`` writes both folders at a model's sizes with random weights where there are no checkpoint and no transformers,
from the graphs that ort_cuda_bench.py's ``graph`` made, with and without ``--paged``.
"""

from __future__ import annotations

import argparse
import json
import queue
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quantmoe.exporter.folder.interface import PAGED
from quantmoe.exporter.folder.metadata import SHARE_BUFFER

if TYPE_CHECKING:
    from quantmoe.runtime.generate import Generator

#: tokens of prompts and of answers, each request's at random
PROMPTS, ANSWERS = (32, 128, 512, 1024), (32, 64, 128, 256)
#: requests that a static batch has at most, of the Engine and of onnxruntime-genai's Generator (0.18)
STATIC, ROWS = 4, 32


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


@dataclass
class Mixture:
    """Random prompts and numbers of tokens, of these lengths."""

    vocabulary: int
    prompts: Sequence[int] = PROMPTS
    answers: Sequence[int] = ANSWERS

    def draw(self, count: int, seed: int = 0) -> list[Request]:
        rng = np.random.default_rng(seed)
        return [
            Request(rng.integers(3, self.vocabulary, rng.choice(self.prompts)).tolist(), int(rng.choice(self.answers)))
            for _ in range(count)
        ]


class Batches:
    """An ordinary export's folder in onnxruntime-genai's Generator, a batch after the other."""

    def __init__(self, folder: Path):
        import onnxruntime_genai as og

        self.og, config = og, json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        self.vocabulary, self.pad = config["model"]["vocab_size"], config["model"]["pad_token_id"]
        opened = og.Config(str(folder))
        opened.overlay(json.dumps({"search": {"chunk_size": 0}}))  # of several rows no part of a prompt can follow
        self.name, self.model = f"{folder.name}, static batches", og.Model(opened)

    def serve(self, requests: Sequence[Request], concurrent: int) -> None:
        """Fill in when what came. Who asks does so again when the request before has ended."""
        begin, rows = time.perf_counter(), min(concurrent, ROWS)
        for at in range(0, len(requests), rows):
            batch = requests[at : at + rows]
            longest, count = max(len(r.prompt) for r in batch), max(r.count for r in batch)
            for i, request in enumerate(batch, at):
                request.asked = requests[i - concurrent].came[-1] if i >= concurrent else begin
            ids = np.array([[self.pad] * (longest - len(r.prompt)) + r.prompt for r in batch], np.int32)
            params = self.og.GeneratorParams(self.model)
            params.set_search_options(batch_size=len(batch), max_length=longest + count, do_sample=False)
            generator = self.og.Generator(self.model, params)
            generator.append_tokens(ids)
            for _ in range(count):
                if generator.is_done():
                    break
                generator.generate_next_token()
                now = time.perf_counter()
                for request, token in zip(batch, generator.get_next_tokens(), strict=True):
                    if len(request.came) < request.count:
                        request.came.append(now)
                        request.tokens.append(int(token))
            del generator


class Engine:
    """A folder in onnxruntime-genai's Engine."""

    def __init__(self, folder: Path):
        import onnxruntime_genai as og

        self.og, config = og, json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        self.vocabulary = config["model"]["vocab_size"]
        paged, opened = "block_table" in config["model"]["decoder"]["inputs"], og.Config(str(folder))
        if not paged:  # static batches take no prompt in parts
            settings = {"search": {"chunk_size": 0}, "engine": {"static_batching": {"max_batch_size": STATIC}}}
            opened.overlay(json.dumps(settings))
            opened.set_provider_option("cuda", "enable_cuda_graph", "0")  # each step would be captured anew
        self.name = f"{folder.name}, {'paged' if paged else 'static batches of the'} Engine"
        self.engine = og.Engine(og.Model(opened))
        self.events = self.engine.create_event_buffer(1024)

    def serve(self, requests: Sequence[Request], concurrent: int) -> None:
        """Fill in what came."""
        waiting, running = list(reversed(requests)), dict[Any, Request]()
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


class Own:
    """A folder in the scheduler of ``quantmoe serve``.

    Args:
        rows: requests that run together at most. length: tokens of a prompt and its answer.
    """

    def __init__(self, folder: Path, rows: int, length: int, device: str):
        from tokenizers import Tokenizer, decoders, models

        from quantmoe.runtime.chat import Text
        from quantmoe.serving.batching.scheduler import Scheduler
        from quantmoe.serving.metrics import Metrics
        from quantmoe.serving.served_model import ServedModel

        self.model = ServedModel(folder, device=device)  # type: ignore[arg-type]
        assert self.model.vocabulary is not None
        self.name, self.vocabulary = f"{folder.name}, quantmoe's scheduler", self.model.vocabulary
        text = Text.__new__(Text)
        made = models.WordLevel({f"Ġw{id}": id for id in range(self.vocabulary)}, "Ġw0")
        text.tokenizer, text.stop = Tokenizer(made), ()  # type: ignore[assignment]
        text.tokenizer.decoder = decoders.ByteLevel()
        self.scheduler = Scheduler(self.model, text, Metrics(), rows=rows, capacity=length, queue=rows, prefix_bytes=0)
        self._waited, choosing = 0.0, self.scheduler._choosing
        take = choosing.take

        def waiting() -> Any:
            begin = time.perf_counter()
            found = take()
            self._waited += time.perf_counter() - begin
            return found

        choosing.take = waiting  # type: ignore[method-assign]

    def serve(self, requests: Sequence[Request], concurrent: int) -> None:
        """Fill in what came."""
        from quantmoe.serving.batching.scheduler import Event
        from quantmoe.serving.batching.scheduler import Request as Asked

        waiting, left, ended = list(reversed(requests)), len(requests), threading.Event()
        failed: list[Exception] = []

        def ask(request: Request) -> None:
            def tell(event: Event) -> None:
                nonlocal left
                if event.token is not None:
                    request.came.append(time.perf_counter())
                    request.tokens.append(event.token)
                    asked.gone = 0 < request.leave == len(request.tokens)
                if event.error is not None:
                    failed.append(event.error)
                if asked.gone or event.reason or event.error:
                    left -= 1
                    if waiting:
                        ask(waiting.pop())
                if failed or not left:
                    ended.set()

            asked = Asked(ids=request.prompt, max_new_tokens=request.count, tell=tell, ends=False)
            request.asked = time.perf_counter()
            self.scheduler.submit([asked])

        begin, self._waited = time.perf_counter(), 0.0
        for _ in range(min(concurrent, len(waiting))):
            ask(waiting.pop())
        ended.wait()
        print(f"      the host waited for tokens {self._waited / (time.perf_counter() - begin):.0%} of the time")
        for error in failed:
            raise error

    def close(self) -> None:
        """Free the model."""
        self.scheduler.close()
        self.model.close()


class Server:
    """A server with OpenAI's interface: ``quantmoe serve``, llama.cpp's, vLLM."""

    def __init__(self, address: str, vocabulary: int):
        self.address, self.vocabulary, self.name = address, vocabulary, address

    def serve(self, requests: Sequence[Request], concurrent: int) -> None:
        """Fill in when what came."""
        waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        for request in requests:
            waiting.put(request)

        def ask() -> None:
            while True:
                try:
                    asked = waiting.get_nowait()
                except queue.Empty:
                    return
                fields = {"prompt": asked.prompt, "max_tokens": asked.count, "temperature": 0, "ignore_eos": True}
                body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}}).encode()
                headers = {"Content-Type": "application/json"}
                asked.asked = time.perf_counter()
                with urllib.request.urlopen(
                    urllib.request.Request(f"{self.address}/v1/completions", body, headers)
                ) as got:
                    for line in got:
                        if not line.startswith(b"data: {"):
                            continue
                        if b"completion_tokens" in line:  # a token without text of its own comes with a later one
                            missing = json.loads(line[6:])["usage"]["completion_tokens"] - len(asked.came)
                            asked.came += [time.perf_counter()] * missing
                        elif len(asked.came) < asked.count:  # not what follows the text
                            asked.came.append(time.perf_counter())

        threads = [threading.Thread(target=ask) for _ in range(concurrent)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def opened(place: str, given: argparse.Namespace) -> Batches | Engine | Own | Server:
    """Return what serves at a place: a folder, or an address."""
    vocabulary, static = given.vocabulary, given.static
    if place.startswith("http"):
        return Server(place, vocabulary)
    if given.own:
        return Own(Path(place), max(given.concurrent), given.length, given.device)
    inputs = json.loads((Path(place) / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]["inputs"]
    return Engine(Path(place)) if static or "block_table" in inputs else Batches(Path(place))


def measure(server: Batches | Engine | Own | Server, mixture: Mixture, concurrent: int, rounds: int) -> None:
    """Print a line, of requests after others in which CUDA graphs are captured."""
    server.serve(mixture.draw(2 * concurrent, seed=1), concurrent)
    requests = mixture.draw(max(8, rounds * concurrent))
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


def steady(server: Batches | Engine | Own | Server, concurrent: int, prompt: int, answer: int) -> None:
    """Print a line, of the time in which as many requests run as may."""
    server.serve(Mixture(server.vocabulary).draw(2 * concurrent, seed=1), concurrent)
    rng = np.random.default_rng(0)
    counts = [*rng.integers(1, answer, concurrent, endpoint=True).tolist(), *[answer] * 2 * concurrent]
    requests = [Request(rng.integers(3, server.vocabulary, prompt).tolist(), count) for count in counts]
    server.serve(requests, concurrent)
    begin, end = max(request.came[-1] for request in requests[:concurrent]), requests[-1].asked
    count = sum(begin <= time < end for request in requests for time in request.came)
    asked = [request for request in requests if begin <= request.asked < end]
    first = 1e3 * np.array([request.came[0] - request.asked for request in asked])
    between = 1e3 * np.concatenate([np.diff(request.came) for request in asked])
    print(
        f"{concurrent:5} at once, {prompt} in and {answer} out: {count / (end - begin):8.0f} tokens/s in "
        f"{end - begin:.1f} s, first token {np.median(first):7.1f} ms ({np.quantile(first, 0.95):.0f}), "
        f"then {np.median(between):6.2f} ms",
        flush=True,
    )


def check(paged: Path, plain: Path, prompts: Sequence[list[int]], count: int) -> None:
    """Print how far logits of packed runs are from the ordinary export's, as far as those are from themselves where
    other tokens are run together; and how many tokens of the Engine are the ordinary export's."""
    from quantmoe.runtime.generate import Generator

    generator = Generator(plain, device="cuda")
    want = [generator.scores(prompt) for prompt in prompts]
    generator.chunk = 7
    for name, found in (
        ("packed", packed_logits(paged, prompts)),
        ("ordinary export, 7 tokens a run", [generator.scores(prompt) for prompt in prompts]),
    ):
        far = np.concatenate(
            [np.abs(x - y).max(1) / np.abs(y).max() for x, y in zip(found, want, strict=True)]
        )  # of each token
        parts = ", ".join(f"{np.quantile(far, q):.1e}" for q in (0.5, 0.95, 1))
        print(f"{name}: {len(far)} tokens' logits differ by {parts} of the largest (median, 95 %, all)")
    compare(Engine(paged), generator, prompts, count, max(2, len(prompts) // 2))


def cancelled(prompts: Sequence[list[int]], count: int) -> list[Request]:
    """Return requests of 1 to ``count`` tokens. Every third leaves on the way."""
    lengths = np.random.default_rng(0).integers(1, count, len(prompts), endpoint=True)
    return [
        Request(prompt, int(length), leave=int(length) // 2 if i % 3 == 2 else 0)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def compare(
    server: Engine | Own, generator: Generator, prompts: Sequence[list[int]], count: int, concurrent: int
) -> None:
    """Print how many tokens of requests that run together are those that the generator gives to each alone."""
    requests = cancelled(prompts, count)
    equal, same, gaps = 0, 0, [0.0]
    server.serve(requests, concurrent)
    for request in requests:
        assert request.tokens
        expected = generator.greedy(request.prompt, len(request.tokens))
        pairs = list(zip(request.tokens, expected.tokens, strict=True))
        differing = next((i for i, (found, other) in enumerate(pairs) if found != other), len(pairs))
        equal, same = equal + differing, same + (differing == len(pairs))
        if differing < len(pairs):
            logits = expected.logits[differing].astype(np.float32)
            gaps.append(float((logits.max() - logits[request.tokens[differing]]) / np.abs(logits).max()))
    left, total = sum(request.leave > 0 for request in requests), sum(len(request.tokens) for request in requests)
    print(
        f"{server.name}: {len(requests)} requests, {left} left on the way: {same} have their tokens alone; before "
        f"the first other one {equal} of {total}, whose logit is up to {max(gaps):.1e} of the largest behind"
    )


def packed_logits(folder: Path, prompts: Sequence[list[int]]) -> list[np.ndarray]:
    """Return the logits of all tokens, [tokens, V] of each prompt, all in the same runs, random parts of each in one,
    with caches in blocks in random order; of a graph in f16."""
    import onnxruntime as ort
    import torch

    from quantmoe.ort_ext import cuda_library_path

    options = ort.SessionOptions()
    options.register_custom_ops_library(cuda_library_path())
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CUDAExecutionProvider"])
    rng, size = np.random.default_rng(2), 256
    columns = -(-max(map(len, prompts)) // size)
    blocks = rng.permutation(len(prompts) * columns).astype(np.int32).reshape(len(prompts), columns)
    shapes = {i.name: i.shape[2:] for i in session.get_inputs() if i.name.startswith("past_key_values.")}
    caches = {
        name: torch.zeros(blocks.size, size, *shape, dtype=torch.float16, device="cuda")
        for name, shape in shapes.items()
    }
    done: list[int] = [0] * len(prompts)
    found: list[list[np.ndarray]] = [[] for _ in prompts]
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        news = [min(len(p) - at, int(rng.choice([0, 1, 60]))) for at, p in zip(done, prompts, strict=True)]
        rows = [row for row, new in enumerate(news) if new]
        if not rows:
            continue
        tokens = [token for row in rows for token in prompts[row][done[row] : done[row] + news[row]]]
        begins = np.cumsum([0, *(news[row] for row in rows)])
        feed = {
            "input_ids": np.array(tokens, np.int64),
            "block_table": blocks[rows],
            "cumulative_sequence_lengths": begins.astype(np.int32),
            "past_sequence_lengths": np.array([done[row] for row in rows], np.int32),
            "logits_indices": np.arange(len(tokens), dtype=np.int32),
        }
        binding = session.io_binding()
        for name, array in feed.items():
            binding.bind_cpu_input(name, array)
        for name, cache in caches.items():
            place = ("cuda", 0, np.float16, list(cache.shape), cache.data_ptr())
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past_key_values", "present"), *place)
        binding.bind_output("logits", "cpu")
        session.run_with_iobinding(binding)
        logits = next(value for value in binding.get_outputs() if len(value.shape()) == 2).numpy()
        for i, row in enumerate(rows):
            found[row].append(logits[begins[i] : begins[i + 1]].astype(np.float32))
            done[row] += news[row]
    return [np.concatenate(parts) for parts in found]


def texts(folder: Path, text: Path | None, count: int, vocabulary: int) -> Iterator[list[int]]:
    """Yield the prompts of 1 to 600 tokens: pieces of a text, or random."""
    rng = np.random.default_rng(1)
    ids = rng.integers(3, vocabulary, 20_000).tolist()
    if text is not None:
        from quantmoe.exporter.folder.tokenizer import load_tokenizer

        ids = load_tokenizer(folder).encode(text.read_text(encoding="utf-8")).ids
    for length in [1, 255, 256, 257, *rng.integers(2, 600, max(0, count - 4)).tolist()][:count]:
        at = int(rng.integers(0, len(ids) - length))
        yield ids[at : at + length]


def make(graphs: Sequence[Path], folder: Path, model: str, sizes: dict[str, Any], most: int) -> None:
    """Write a folder for each graph, named as it is, with random weights, genai_config.json and the library."""
    import onnx
    import onnx_ir as ir
    from benchmarks.cuda.ort_cuda_bench import fill

    from quantmoe.benchmarks.random_checkpoint import CONFIGS
    from quantmoe.exporter.targets import CUDA
    from quantmoe.exporter.writing.genai import add_caches, add_paged, caches, genai_config

    for graph in graphs:
        out = folder / graph.stem
        out.mkdir(parents=True, exist_ok=True)
        fill(graph, out)
        model_file = onnx.load(out / "model.onnx", load_external_data=False)
        properties = {p.key: p.value for p in model_file.metadata_props} | {SHARE_BUFFER: "true"}
        onnx.helper.set_model_props(model_file, properties)
        onnx.save(model_file, out / "model.onnx")
        names = [value.name for value in model_file.graph.input]
        own = CONFIGS[model] | sizes
        stop = dict.fromkeys(("eos_token_id", "pad_token_id"), own["vocab_size"] - 1)  # what random weights rarely say
        config = genai_config(own, stop, CUDA, shares=True)
        paged = names[1] in PAGED
        add_caches(config, caches(ir.load(out / "model.onnx").graph.inputs, paged))
        if paged:
            add_paged(config, names)
            config["engine"]["dynamic_batching"]["max_batch_size"] = most
        (out / "genai_config.json").write_text(json.dumps(config), encoding="utf-8")
        shutil.copyfile(CUDA.library_path(), out / CUDA.library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "check", "make"])
    parser.add_argument("places", nargs="+", help="folders, or a server's address; of make the graphs")
    parser.add_argument("--concurrent", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--steady", metavar="PROMPT:ANSWER", help="tokens of every prompt and answer")
    parser.add_argument("--rounds", type=int, default=3, help="requests for each that is in flight")
    parser.add_argument("--static", action="store_true", help="ordinary exports in the Engine, too")
    parser.add_argument("--own", action="store_true", help="the scheduler of quantmoe serve")
    parser.add_argument("--length", type=int, default=2304, help="of --own: tokens of a request at most")
    parser.add_argument("--device", default="cuda", help="of --own")
    parser.add_argument("--text", type=Path, help="of check: what prompts are pieces of")
    parser.add_argument("--count", type=int, default=24, help="of check: requests")
    parser.add_argument("--tokens", type=int, default=48, help="of check: of a request at most")
    parser.add_argument("--folder", type=Path, default=Path("serving"), help="of make: where folders go")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="of make")
    parser.add_argument("--sizes", type=json.loads, default={}, help="of make: as ort_cuda_bench.py's")
    parser.add_argument("--most", type=int, default=256, help="of make: requests in a run")
    parser.add_argument("--vocabulary", type=int, default=151936, help="of a server's model")
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="tokens of prompts")
    parser.add_argument("--answers", nargs="+", type=int, default=ANSWERS, help="tokens of answers")
    given = parser.parse_args()
    if given.what == "make":
        make([Path(place) for place in given.places], given.folder, given.model, given.sizes, given.most)
    elif given.what == "check" and given.own:
        for place in map(Path, given.places):
            concurrent = max(given.concurrent)
            own = Own(place, concurrent, given.length, given.device)
            found = list(texts(place, given.text, given.count, own.vocabulary))
            plain: Generator = own.model
            if own.model.paged:
                from quantmoe.runtime.generate import Generator as Alone

                plain = Alone(place.with_name(place.name.removesuffix("-paged")), device=given.device)
            compare(own, plain, found, given.tokens, concurrent)
            own.close()
    elif given.what == "check":
        paged, plain = map(Path, given.places)
        config = json.loads((paged / "genai_config.json").read_text(encoding="utf-8"))
        check(paged, plain, list(texts(paged, given.text, given.count, config["model"]["vocab_size"])), given.tokens)
    else:
        for place in given.places:
            server = opened(place, given)
            print(server.name)
            for concurrent in given.concurrent:
                if given.steady:
                    steady(server, concurrent, *map(int, given.steady.split(":")))
                else:
                    measure(server, Mixture(server.vocabulary, given.prompts, given.answers), concurrent, given.rounds)
            if isinstance(server, Own):
                server.close()
            del server


if __name__ == "__main__":
    main()
