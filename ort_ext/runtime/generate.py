"""Generation with an exported model on ONNX Runtime (no torch)."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Generator as Generation
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from quantmoe.exporter.errors import ModelError, OptionError, need_path
from quantmoe.exporter.folder.files import GENAI, MTP_MODEL
from quantmoe.exporter.folder.json_files import read_object
from quantmoe.exporter.folder.metadata import TARGET
from quantmoe.exporter.folder.model_file import load, model_path
from quantmoe.exporter.folder.record import check_recorded, is_recorded
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.exporter.memory import DRAFTS
from quantmoe.exporter.targets import CPU, TARGETS, of_device
from quantmoe.runtime.batch import Batch
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.cache import Cache, SharedCache
from quantmoe.runtime.cache_memory import DecodeStep, Rooms
from quantmoe.runtime.choosing.constraint import Constraint
from quantmoe.runtime.choosing.device_sampling import Choice
from quantmoe.runtime.choosing.sampling import Choose
from quantmoe.runtime.opened_model import OpenedModel, is_count, need_count, shares_buffer_of, token_ids
from quantmoe.runtime.saved_states import load as load_states
from quantmoe.runtime.saved_states import save as save_states
from quantmoe.runtime.speculate import Head, Lookup, OtherModel, Speculation

T = TypeVar("T")
#: error of an answer that goes on after its cache was used otherwise
ANOTHER = "another answer was begun, or the cache was changed: give each conversation a cache of its own"


class Generated(Iterator[int]):
    """Iterator over new tokens, with their times.

    Attributes:
        tokens: the tokens so far.
        prompt: number of tokens that were run before the first new token.
        prefill: seconds for the prompt and the first token.
        decode: seconds for all tokens after the first.
        logits: f32 [tokens, vocabulary], from which each token was chosen; [0, 0] unless they were asked for.
        speculation: counts of draft tokens; None without speculation.
        finish_reason: "stop" after a token of ``stop`` or a stop text; "length" after ``max_new_tokens``, or when the
            context is full; None until then.

    Args:
        cache: what the steps read; the next answer on it ends this one.
        most: most tokens.
        stop: token ids that end the answer.
    """

    def __init__(
        self,
        steps: Iterator[tuple[int, np.ndarray]],
        cache: Cache,
        prompt: int,
        *,
        most: int,
        stop: Sequence[int],
        logits: bool = False,
        speculation: Speculation | None = None,
    ):
        self.tokens: list[int] = []
        self.finish_reason: Literal["stop", "length"] | None = None
        self.speculation = speculation
        self._most, self._stop = most, stop
        self.prompt, self.prefill, self.decode = prompt, 0.0, 0.0
        self._steps, self._gate, self._answers = steps, cache.gate, cache.answers
        self._answers.latest += 1
        self._number = self._answers.latest
        self._logits: list[np.ndarray] | None = [] if logits else None

    def __next__(self) -> int:
        begin = time.perf_counter()
        with self._gate:
            if self._number != self._answers.latest and self.finish_reason is None:
                raise ModelError(ANOTHER)
            token, logits = next(self._steps)
        if self.tokens:
            self.decode += time.perf_counter() - begin
        else:
            self.prefill = time.perf_counter() - begin
        self.tokens.append(token)
        if token in self._stop:
            self.finish_reason = "stop"
        elif len(self.tokens) == self._most:
            self.finish_reason = "length"
        if self._logits is not None:
            self._logits.append(logits)
        return token

    @property
    def logits(self) -> np.ndarray:
        return np.array(self._logits) if self._logits else np.zeros((0, 0), np.float32)

    @property
    def tokens_per_second(self) -> float:
        return (len(self.tokens) - 1) / self.decode if self.decode else 0.0


class Generator(OpenedModel):
    """An exported model in an ONNX Runtime session.

    :meth:`close` and the end of a ``with`` block free it.

    Args:
        path: the model or its folder.
        threads: threads of the session; 0 is ONNX Runtime's choice.
        prefault: read all packed weights into memory now, not when a token first needs them.
        chunk: prompt tokens that are run at once. Memory beside the cache grows with ``chunk``, not with the prompt.
            The default depends on the device.
        capacity: tokens that a cache is allocated for, if the model writes it in place; None: it grows by doubling.
        device: "cpu", or "cuda" for models exported with --target cuda.
        cuda_graph: on cuda, capture a decode step as a CUDA graph and replay it. It needs a model that writes the cache
            in place, and neither experts "disk" nor ``trace``. None, the default, is True if that holds. All sessions
            with CUDA graphs share one thread, whichever threads call.
        speculate: "ngram" drafts the tokens that followed the last tokens before in the text. "mtp" drafts with the
            layer of multi-token prediction beside the model. One step verifies a token and its draft tokens, so the
            answer has the same tokens in fewer steps. The model must give the logits of several tokens. A folder:
            the exported model in it drafts; it has the same tokenizer, and runs on the same device.
        drafts: most draft tokens in a step of ``speculate``; None: DRAFTS, or what the model's logits and states allow.
        num_logits: last tokens whose logits a step gives, if the model lets a session choose; None: 1. With drafts
            there are at least as many as a step verifies.
        experts: place of the experts (guides/large-models). On the cpu: "host", the default, or "disk", which keeps
            ``ram`` bytes of them in memory. On cuda: "gpu", the default; "host", which keeps ``gpu_memory`` bytes in
            GPU memory; or "disk", which also keeps ``ram`` bytes in RAM, without cuda_graph. "auto" is "disk" on the
            cpu and "host" on cuda if not all experts fit. The layer of multi-token prediction stays mapped.
        ram: bytes of RAM for experts; None or "auto": what is free.
        gpu_memory: bytes of GPU memory for experts; None or "auto": what is free.
        reserve: bytes to leave free when ``ram`` or ``gpu_memory`` is not given; None: the library's default and the
            cache of ``max_length`` tokens.
        max_length: longest text, prompt and answer together, for ``reserve``. None: ``capacity``, else
            search.max_length of genai_config.json. Without that file the library's default holds.
        batch: most prompts that run together, for ``reserve``.
        misses: on cuda with experts "host" or "auto", what happens to experts that are not in GPU memory. "copy", the
            default. "cpu": the CPU multiplies them, in ``threads`` threads. "auto": one of both for each layer, by
            times that the first step measures. "62%": the CPU multiplies this share. "24*copy,24*cpu": for each layer,
            as in the log's line of "auto".
        warm: a trace of this model on this device. The first step loads the experts that the trace used most, and
            misses "auto" chooses by it. For experts "disk" and "auto", on cuda also "host".
        trace: file to record the experts of all tokens in; without cuda_graph.
        group: for one rank of a sliced model (guides/several-gpus). On the cpu: a name that the ranks' generators in
            this process share, each run by its own thread. On cuda: the NCCL id in hex, with a process for each rank.

    Raises:
        OptionError: an argument has a wrong type, or is outside its range.
        ModelError: the session cannot be created; the message has ONNX Runtime's words. ONNX Runtime is too old, or
            lacks the provider. The model's cache grows with each step, and capacity or cuda_graph is given. The model
            cannot verify so many draft tokens.
        FileNotFoundError: this installation has no library for the device.
    """

    # over 60 lines: the options of a session, most of which it passes on
    def __init__(
        self,
        path: str | Path,
        threads: int = 0,
        *,
        prefault: bool = False,
        chunk: int | None = None,
        capacity: int | None = None,
        device: Literal["cpu", "cuda"] = "cpu",
        cuda_graph: bool | None = None,
        speculate: Literal["ngram", "mtp"] | str | Path | None = None,
        drafts: int | None = None,
        experts: Literal["gpu", "host", "disk", "auto"] | None = None,
        ram: int | Literal["auto"] | None = None,
        gpu_memory: int | Literal["auto"] | None = None,
        reserve: int | None = None,
        max_length: int | None = None,
        misses: str | None = None,
        trace: str | Path | None = None,
        warm: str | Path | None = None,
        group: str | None = None,
        batch: int = 1,
        num_logits: int | None = None,
    ):
        lengths = {"chunk": chunk, "capacity": capacity, "drafts": drafts, "max_length": max_length, "batch": batch}
        sizes = {"ram": ram, "gpu_memory": gpu_memory, "reserve": reserve}
        _check_options(device, experts, lengths | {"num_logits": num_logits}, sizes=sizes)
        if ram is not None and experts not in ("disk", "auto") and not of_device(device).on_gpu:
            raise OptionError(f"ram is {ram}, but experts is {experts}, expected disk or auto")
        need_count("threads", threads, 0)
        if drafts is not None and speculate is None:
            raise OptionError(f"drafts is {drafts}, but speculate is None, expected one of: ngram, mtp, a folder")
        path = model_path(path)
        other = None if speculate in (None, "ngram", "mtp") else _drafting_model(speculate, path, device)
        on_gpu = of_device(device).on_gpu
        if cuda_graph and not on_gpu:
            raise ModelError(f"cuda_graph is of device cuda, not {device}")
        captured = on_gpu and experts != "disk" and trace is None and shares_buffer_of(path)
        given = gpu_memory if on_gpu else ram
        if experts in (*["host"] * on_gpu, "disk", "auto") and given in (None, "auto") and reserve is None:
            reserve = _reserve(path, max_length or capacity, drafts=speculate == "mtp", batch=batch)
        entries = {"experts": experts, "ram": ram, "gpu_memory": gpu_memory, "trace": trace, "group": group}
        entries |= {
            "warm": warm,
            "reserve": reserve,
            "misses": misses,
            "threads": threads if threads and misses not in (None, "copy") else None,
        }
        super().__init__(
            path,
            device=device,
            threads=threads,
            prefault=prefault,
            chunk=chunk,
            capacity=capacity,
            cuda_graph=captured if cuda_graph is None else cuda_graph,
            speculate=speculate,
            num_logits=max(num_logits or 1, 0 if speculate is None else 1 + (drafts or DRAFTS)),
            entries=entries,
        )
        #: memory of conversations that have ended, and their CUDA graphs
        self.rooms = Rooms(self)
        self.drafts = self._most_drafts() if drafts is None else drafts
        if speculate is not None:
            if drafts is not None and drafts > self.context:
                raise OptionError(f"drafts is {drafts}, expected a number from 1 to {self.context}")
            self.step_tokens = 1 + self.drafts
            self._check_drafts()
        #: the model that drafts, of multi-token prediction or another one
        self.head: Generator | None = None
        asked = cuda_graph if self.cuda_graph else False
        if speculate == "mtp":
            self.head = Generator(
                self._mtp_path(), threads, prefault=prefault, chunk=self.chunk, device=device, cuda_graph=asked
            )
            # it reads those accepted and the one after them, then drafts one by one
            self.head.step_tokens = self.drafts + 2
        elif other is not None:
            self.head = _Drafting(other, threads, prefault=prefault, device=device, cuda_graph=asked)

    def _mtp_path(self) -> Path:
        """Return the file of the layer that drafts, which was exported with this model.

        Raises:
            ModelError: there is none, or it is of another export.
        """
        path, metadata = self.path.with_name(MTP_MODEL), self.session.get_modelmeta().custom_metadata_map
        if not (self.hidden and (path.is_file() or is_recorded(metadata, MTP_MODEL))):
            raise ModelError(f"{self.path}: no {MTP_MODEL} beside it; export the model with --mtp")
        check_recorded(self.path, metadata, path)
        return path

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the session: its memory, threads and files. Nothing runs afterwards."""
        if self.head is not None:
            self.head.close()
        self.rooms.close()
        super().close()

    def _most_drafts(self) -> int:
        """Return the most draft tokens of a step; DRAFTS if it can verify none, for the error."""
        tokens = min(self.rows, self.window if self.states else self.rows)
        return min(DRAFTS, tokens - 1) if tokens > 1 else DRAFTS

    def _check_drafts(self) -> None:
        """Check that a step gives the logits and the states after a token and each of its draft tokens."""
        tokens, lacking, options = self.drafts + 1, [], []
        if self.speculate == "mtp" and not self.hidden:
            lacking.append(f"{MTP_MODEL} (this model has none)")
            options.append("--mtp")
        if self.states and tokens > self.window:
            lacking.append(f"the states of linear attention after {tokens} tokens (this model keeps {self.window})")
            options.append(f"--state-window {tokens}")
        if tokens > self.rows:
            lacking.append(f"the logits of {tokens} tokens (this model gives {self.rows})")
            options.append(f"--logits {tokens}")
        if lacking:
            most = min(self.rows, self.window if self.states else self.rows) - 1
            fewer = f", or ask for at most {most}" if most and "--mtp" not in options else ""
            raise ModelError(
                f"{self.path}: {self.drafts} draft tokens need {' and '.join(lacking)}: export it with "
                f"{' '.join(options)}{fewer}"
            )

    def cache(self) -> Cache:
        """Return an empty KV cache of one sequence, for :meth:`stream`; each conversation needs its own."""
        return SharedCache(self, self.rooms) if self.shares_buffer else Cache(self)

    def load_cache(self, path: str | Path) -> Cache:
        """Return a cache that :meth:`save_cache` wrote, with its tokens.

        ``cache.keep(ids)`` goes back to the tokens that a prompt shares with it.

        Raises:
            ModelError: the file is damaged, belongs to another model, or has more tokens than the context or a cache.
            OptionError: the path is no path.
        """
        cache = self.cache()
        load_states(cache, need_path("path", path))
        return cache

    def save_cache(self, cache: Cache, path: str | Path) -> None:
        """Write a cache's tokens, keys, values and states to a file.

        Raises:
            ModelError: the cache has no tokens, the model has no identity, or an interrupted step changed the states.
                The path has another file, or its folder is missing.
            OptionError: the path is no path, or the cache is no cache of this model.
        """
        with self._need_cache(cache).gate:
            save_states(cache, need_path("path", path))

    def scores(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after each token, f32 [tokens, vocabulary].

        A step runs as many tokens as the model gives logits for.

        Raises:
            OptionError: the ids are no integers.
            ModelError: there is no token, or an id is outside the vocabulary. Or too many tokens run at once.
            ContextError: the tokens do not fit into the context.
        """
        ids = self.check(ids)
        past, found = self.start(), []
        size = min(self.rows, len(ids) if len(ids) > self.short_context else self.chunk)
        if self.short_context < len(ids) > size:
            raise ModelError(
                f"{self.path}: {len(ids)} tokens are run at once, this model gives the logits of its last {self.rows}: "
                "give a larger num_logits, or export it with --logits all"
            )
        for at in range(0, len(ids), size):
            logits, past = self.step(np.array([ids[at : at + size]], np.int64), past)
            found.append(logits[0].astype(np.float32))
        return np.concatenate(found)

    def stream(
        self,
        ids: Iterable[int],
        max_new_tokens: int = 512,
        stop: Iterable[int] = (),
        *,
        sampling: Sampling | None = None,
        cache: Cache | None = None,
        logits: bool = False,
        constraint: Constraint | None = None,
    ) -> Generated:
        """Return an iterator over the new tokens after a prompt. Each token is computed when it is asked for.

        Args:
            ids: the prompt's token ids; with a cache that has tokens, the ids that follow them.
            max_new_tokens: most new tokens; the end of the context ends the answer, too.
            stop: token ids that end the answer; that token is part of the answer.
            sampling: None takes the likeliest token.
            cache: a conversation's cache, from :meth:`cache`. Afterwards it has the prompt and the new tokens, except
                the last one, which was not run. None: a new cache.
            logits: keep the logits from which each token was chosen.
            constraint: which tokens may come, from :meth:`Text.constraint` for this prompt.

        Raises:
            OptionError: an argument has a wrong type, or is outside its range.
            ModelError: the prompt is empty, or has an id outside the vocabulary. Logits are not finite. The model is a
                layer of multi-token prediction. Or a later answer on the cache was begun, which ends this one.
            ContextError: the prompt does not fit into the context.
        """
        self._check_kind()
        with contextlib.nullcontext() if cache is None else self._need_cache(cache).gate:
            return self._stream(
                ids, max_new_tokens, stop, sampling=sampling, cache=cache, logits=logits, constraint=constraint
            )

    def _stream(
        self,
        ids: Iterable[int],
        max_new_tokens: int,
        stop: Iterable[int],
        *,
        sampling: Sampling | None,
        cache: Cache | None,
        logits: bool,
        constraint: Constraint | None,
    ) -> Generated:
        if cache is not None:
            cache.settle()
        past = 0 if cache is None else len(cache.tokens)
        ids, stop = self.check(ids, past, room=1), token_ids("stop", stop)
        need_count("max_new_tokens", max_new_tokens)
        count = min(max_new_tokens, self.context - past - len(ids))
        cache = self.cache() if cache is None else cache  # after the checks: it takes memory
        if self.chooses_there and self.speculate is None and not logits and isinstance(cache, SharedCache):
            text, longest = [*cache.tokens, *ids], past + len(ids) + count
            choice = self.in_turn(lambda: self.choose([text], longest, sampling, [constraint]))
            steps = self._steps_there(ids, count, stop, choice, cache)
            cache.generation = weakref.ref(steps)
            return Generated(steps, cache, len(ids), most=count, stop=stop)
        sample = self.sampler(sampling, [*cache.tokens, *ids])
        if constraint is not None:
            sample = constraint.sampler(sample)
        if self.speculate is None:
            return Generated(
                self._steps(ids, count, stop, sample, cache), cache, len(ids), most=count, stop=stop, logits=logits
            )
        draft: Lookup | Head | OtherModel = Lookup()
        if self.head is not None:
            cache.drafting = drafting = cache.drafting or self.head.cache()
            draft = Head(drafting) if self.speculate == "mtp" else OtherModel(drafting, self.vocabulary or sys.maxsize)
        speculation = Speculation(draft, self.drafts)
        drafted = speculation.steps(cache, ids, count, stop=stop, sample=sample, constraint=constraint)
        cache.generation = weakref.ref(drafted)
        return Generated(drafted, cache, len(ids), most=count, stop=stop, logits=logits, speculation=speculation)

    def generate(
        self,
        ids: Iterable[int],
        max_new_tokens: int = 512,
        stop: Iterable[int] = (),
        *,
        sampling: Sampling | None = None,
        cache: Cache | None = None,
        logits: bool = False,
        constraint: Constraint | None = None,
    ) -> Generated:
        """Return :meth:`stream`'s tokens, all at once."""
        found = self.stream(
            ids, max_new_tokens, stop, sampling=sampling, cache=cache, logits=logits, constraint=constraint
        )
        for _ in found:
            pass
        return found

    def greedy(self, ids: Iterable[int], max_new_tokens: int = 32, stop: Iterable[int] = ()) -> Generated:
        """Return the likeliest tokens with their logits, as :meth:`generate` without sampling."""
        return self.generate(ids, max_new_tokens, stop, logits=True)

    def stream_batch(
        self,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int = 512,
        stop: Iterable[int] = (),
        sampling: Sampling | None = None,
        constraints: Sequence[Constraint | None] = (),
    ) -> Batch:
        """Return an iterator over the new tokens of several prompts that run together.

        Prompts may have different lengths. Of two almost equally likely tokens, a prompt may get another than alone.

        Args:
            prompts: token ids of each prompt. Each cache takes the memory of the longest prompt's cache.
            max_new_tokens: most new tokens of each prompt.
            stop: token ids that end one answer; the others go on.
            sampling: None takes the likeliest token. A seed draws for each prompt as if it ran alone.
            constraints: which tokens may come, of each prompt; (): all may.

        Raises:
            ModelError: the prompts cannot run together (see Batch), or the model is a layer of multi-token prediction.
        """
        self._check_kind()
        need_count("max_new_tokens", max_new_tokens)
        return Batch(
            self,
            self.rooms,
            prompts,
            max_new_tokens=max_new_tokens,
            stop=token_ids("stop", stop),
            sampling=sampling,
            constraints=constraints,
        )

    def generate_batch(
        self,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int = 512,
        stop: Iterable[int] = (),
        sampling: Sampling | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, all at once; see :meth:`stream_batch`."""
        found = self.stream_batch(prompts, max_new_tokens, stop, sampling)
        for _ in found:
            pass
        return found.tokens

    def _need_cache(self, cache: Cache) -> Cache:
        if not isinstance(cache, Cache) or cache.model.path != self.path:
            raise OptionError(f"cache is {cache!r}, expected a cache of {self.path}")
        return cache

    def _check_kind(self) -> None:
        if self.takes_hidden:
            raise ModelError(f"{self.path}: this is the layer that drafts for a model; run {self.path.parent}")

    def _steps(
        self, ids: list[int], count: int, stop: Sequence[int], sample: Choose, cache: Cache
    ) -> Iterator[tuple[int, np.ndarray]]:
        for _ in range(count):
            logits = self.finite(cache.append(ids), len(cache.tokens))
            ids = [sample(logits)]
            yield ids[0], logits
            if ids[0] in stop:
                return

    def _steps_there(
        self, ids: list[int], count: int, stop: Sequence[int], choice: Choice, cache: SharedCache
    ) -> Generation[tuple[int, np.ndarray], None, None]:
        """Yield tokens that the GPU chooses. The next run goes on while a token is read.

        If the caller leaves early, a model with states has run the last token, too.
        """
        none, runs_on = np.empty(0, np.float32), False

        def start(logits: Buffer) -> DecodeStep | None:
            past, step = len(cache.tokens), cache.step() if count > 1 else None
            self.in_turn(lambda: choice.start(logits, [past], step))
            return step

        step = start(cache.read(ids))
        try:
            while True:
                runs_on = False
                token, count = self.chosen(choice, [len(cache.tokens)])[0], count - 1
                if step is not None and token not in stop:
                    step = start(cache.follow(token, step))
                    runs_on = True
                yield token, none
                if not runs_on:
                    return
        finally:  # whichever thread collects garbage may close it: nothing here takes turns
            if runs_on and not self.states:
                cache.rewind(len(cache.tokens) - 1)


def _check_options(
    device: str, experts: str | None, counts: Mapping[str, int | None], *, sizes: Mapping[str, int | str | None]
) -> None:
    """Refuse values that no model takes.

    Raises:
        OptionError: naming the argument.
    """
    for name, value, known in (
        ("device", device, tuple(dict.fromkeys(target.device for target in TARGETS.values()))),
        ("experts", experts, (None, "gpu", "host", "disk", "auto")),
    ):
        if value not in known:
            raise OptionError(f"{name} is {value!r}, expected one of: {', '.join(filter(None, known))}")
    for name, number in counts.items():
        if number is not None:
            need_count(name, number)
    for name, size in sizes.items():
        auto = "" if name == "reserve" else " or auto"
        if not (size is None or is_count(size, 0) or (auto and size == "auto")):
            raise OptionError(f"{name} is {size!r}, expected a number of bytes{auto}")


class _Drafting(Generator):
    """The model that drafts for another one."""

    takes_turns = True


def _drafting_model(speculate: str | Path, path: Path, device: str) -> Path:
    """Return the model in the folder that ``speculate`` names, which drafts for the model ``path``.

    Raises:
        ModelError: it runs on another device, or has another tokenizer.
        OptionError: speculate is no path, or there is no model.
    """
    try:
        draft = model_path(need_path("speculate", speculate))
    except ModelError as error:
        raise OptionError(f"speculate is {str(speculate)!r}, expected ngram, mtp or a folder: {error}") from None
    folder, own = draft.parent, path.parent
    target = TARGETS.get(load(draft).metadata_props.get(TARGET, ""), CPU)
    if target.device != device:
        raise ModelError(
            f"{folder} was exported with --target {target.name} and cannot draft for {own}, which runs on {device}: "
            f"export it with --target {of_device(device).name}"
        )
    tokens, drafts = ({id: token for token, id in load_tokenizer(one).get_vocab().items()} for one in (own, folder))
    # one may know more special tokens
    if (other := min((id for id in tokens.keys() & drafts if tokens[id] != drafts[id]), default=None)) is not None:
        raise ModelError(
            f"{folder} cannot draft for {own}: token {other} is {drafts[other]!r} in one and {tokens[other]!r} in the "
            "other, expected the same tokenizer"
        )
    return draft


def _reserve(path: Path, length: int | None, drafts: bool, batch: int) -> int | None:
    """Return the bytes that experts leave free for texts of this length; None if no length is known."""
    if length is None:
        config = path.with_name(GENAI)
        search = read_object(config).get("search")
        if not isinstance(search, dict) or "max_length" not in search:
            return None
        length = search["max_length"]
        if type(length) is not int or length < 1:
            raise ModelError(f"{config}: search.max_length is {length!r}, expected a number of tokens")
    from quantmoe.exporter.inspecting.inspect import inspect  # they take time to import
    from quantmoe.exporter.inspecting.reserve import reserve as reserve_of

    return reserve_of(inspect(path), length, drafts, rows=batch)
