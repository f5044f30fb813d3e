"""An exported model in an ONNX Runtime session: its interface and its runs (no torch)."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import reprlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from quantmoe.exporter import gpu
from quantmoe.exporter.errors import ContextError, ModelError, OptionError
from quantmoe.exporter.folder.files import MTP_MODEL
from quantmoe.exporter.folder.interface import HIDDEN, HIDDEN_OUT, NUM_LOGITS, PAST, RANKS, STATES, present
from quantmoe.exporter.folder.metadata import (
    CONTEXT_LENGTH,
    IDENTITY,
    LOGITS,
    SHARE_BUFFER,
    SHORT_CONTEXT,
    TARGET,
    WORLD,
)
from quantmoe.exporter.folder.model_file import check_alone, load, metadata_of
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.memory import OnGpu, doing
from quantmoe.exporter.targets import CPU, TARGETS, of_device
from quantmoe.ort_ext import OLDEST, experts_report
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.choosing.constraint import Constraint
from quantmoe.runtime.choosing.device_sampling import NO_TOKEN, NOT_FINITE, Choice
from quantmoe.runtime.choosing.sampling import NOTHING_LEFT, Choose, Sampler
from quantmoe.runtime.device import stream, wait
from quantmoe.runtime.device_weights import device_weights
from quantmoe.runtime.session_thread import SESSION_THREAD

T = TypeVar("T")
#: ONNX Runtime's entry of sessions: whether threads without work spin
SPINNING = "session.intra_op.allow_spinning"
#: types of logits and caches by ONNX Runtime's names; of caches of codes
FLOATS = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16),
}
CODES = {"tensor(int8)": np.dtype(np.int8), "tensor(uint8)": np.dtype(np.uint8)}


class OpenedModel:
    """An exported model in an ONNX Runtime session.

    Args:
        path: the model. threads: of the session. prefault, chunk, capacity, speculate: see Generator.
        cuda_graph: decode steps are captured.
        entries: session entries by name, None if not given.

    Raises:
        ModelError: see Generator.
    """

    #: whether another session waits while this one runs, and this one waits for that
    takes_turns = False

    def __init__(
        self,
        path: Path,
        device: Literal["cpu", "cuda"],
        threads: int,
        *,
        prefault: bool,
        chunk: int | None,
        capacity: int | None,
        cuda_graph: bool,
        speculate: str | Path | None,
        num_logits: int,
        entries: Mapping[str, Any],
    ):
        ort = runtime()
        self.path, self.device, self.capacity, self.group = path, device, capacity, entries.get("group")
        self.target = of_device(device)
        self.chunk = self.target.chunk if chunk is None else chunk
        #: what chooses the tokens of a generation: ranks of a launcher have another (ranks.Rank.sampler)
        self.sampler: Callable[[Sampling | None, Sequence[int]], Choose] = Sampler
        #: options of the runs that go on now
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        #: locks of the steps that go on now
        self._step_locks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listing = threading.Lock()
        #: names of CUDA graphs in the session; -1 is of runs that have none
        self.graphs = itertools.count(1)
        self.cuda_graph = cuda_graph
        #: what chooses tokens on the GPU; None: the host does
        self.choice: Callable[..., Choice] | None = Choice if cuda_graph else None
        self.speculate = speculate
        self._num_logits = ort.OrtValue.ortvalue_from_numpy(np.array([num_logits], np.int64))  # lives as the session
        #: what needs less GPU memory, in errors
        self._less_memory = (
            ["--experts host"] if entries.get("experts") in (None, "gpu") else ["a smaller --gpu-memory"]
        )
        #: tokens of a decode step, at most: runs of so many are CUDA graphs
        self.step_tokens = 1
        #: initializers that live as the session
        self._weights: list[tuple[str, Any]] = []
        self._opened: Any = self.in_turn(lambda: self._open(ort, threads, prefault, entries), runs=False)
        self._read_interface(speculate, num_logits)

    def close(self) -> None:
        """End the steps of other threads, wait for them, and free the session: its memory, threads and files.

        These steps and later calls raise ModelError.
        """
        self._opened = None
        with self._listing:
            steps = [*self._step_locks]
        for step in steps:
            while not step.acquire(timeout=0.01):
                self.interrupt()  # again: at first a step may have no options yet
            step.release()
        self._weights = []

    @property
    def session(self) -> Any:
        """The onnxruntime.InferenceSession.

        Raises:
            ModelError: the Generator is closed.
        """
        if self._opened is None:
            raise self._closed()
        return self._opened

    def _closed(self) -> ModelError:
        return ModelError(f"{self.path}: this Generator is closed; create another one")

    def _open(self, ort: Any, threads: int, prefault: bool, entries: Mapping[str, Any]) -> Any:
        """Open the model; ``entries`` are its session entries, None if not given."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # what it logs is in its exceptions
        options.add_initializer(NUM_LOGITS, self._num_logits)  # nothing, where the model has none of this name
        if self.takes_turns or self.speculate not in (None, "ngram") or self.path.name == MTP_MODEL:
            # two sessions take turns: threads of one that spin for its next run take cores from the other's
            options.add_session_config_entry(SPINNING, "0")
        if prefault:
            options.add_session_config_entry("quantmoe.prefault", "1")  # before the library is registered
        for entry, given in entries.items():
            if given is not None:
                options.add_session_config_entry(f"quantmoe.{entry}", str(given))
        if self.target.on_gpu:
            _check_gpu(ort)
            reading = ThreadPoolExecutor(1, "quantmoe-weights").submit(device_weights, self.path)
            ort.preload_dlls()  # libraries of the CUDA provider, from the packages that have them
        library = self.target.library_path()
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # onnxruntime's exceptions have no public base class
            raise ModelError(str(error)) from None
        cuda = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(self.cuda_graph))})
        if self.cuda_graph:
            cuda[1]["user_compute_stream"] = str(stream())
        providers = [cuda if self.target.on_gpu else "CPUExecutionProvider"]
        try:
            with doing(str(self.path), self._on_gpu()):
                if self.target.on_gpu:
                    self._weights = reading.result()
                    for name, value in self._weights:
                        options.add_initializer(name, value)
                # its own second try, on the CPU, hides the first one's error
                return ort.InferenceSession(str(self.path), options, providers=providers, enable_fallback=0)
        except MemoryError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no public base class
            model = load(self.path)  # says which file is at fault
            if self.group is None:
                check_alone(self.path, model.metadata_props)
            target = model.metadata_props.get(TARGET, CPU.name)
            runs = target in TARGETS and TARGETS[target].device == self.device
            other = f"exported with --target {target}, which this provider does not run: "
            raise ModelError(f"{self.path}: {'' if runs else other}{error}") from None

    def _read_interface(self, speculate: str | Path | None, num_logits: int) -> None:
        """Read logits, cache and states from the session's inputs, outputs and metadata."""
        metadata = self.session.get_modelmeta().custom_metadata_map
        if self.group is not None and WORLD not in metadata:
            raise ModelError(f"{self.path}: is a whole model, expected a rank of a sliced one: group was given")
        self.context = self._tokens_of(metadata, CONTEXT_LENGTH)
        #: a longer text has other rotary frequencies: all of its tokens are run again
        self.short_context = self._tokens_of(metadata, SHORT_CONTEXT)
        if speculate == "mtp" and SHORT_CONTEXT in metadata:
            raise ModelError(
                f"{self.path}: rope_type longrope with a layer of multi-token prediction is not supported; use "
                "speculate ngram"
            )
        #: what a cache on disk is of; "" in exports that lack it
        self.identity = metadata.get(IDENTITY, "")
        check_takes_tokens(self.path, self.session)
        self.outputs = [output.name for output in self.session.get_outputs()]
        logits = [o for o in self.session.get_outputs() if o.name == "logits"]
        past = {i.name: i for i in self.session.get_inputs() if i.name.startswith(f"{PAST}.")}
        self._check_caches(logits, past)
        #: tokens at the end of a run whose logits it gives, at most
        chosen = NUM_LOGITS in metadata
        self.rows = 1 if chosen or logits[0].shape[1] == 1 else self._tokens_of(metadata, LOGITS)
        #: whether logits lie as the tokens do; else the last row is the last token's, wherever padding is
        self.every_row = self.rows == sys.maxsize
        if chosen:
            self.rows = num_logits
        self._declared = self.rows == 1 or logits[0].shape[1] != 1
        self.vocabulary = logits[0].shape[2] if isinstance(logits[0].shape[2], int) else None
        self._logits = FLOATS[logits[0].type]
        self.shares_buffer = metadata.get(SHARE_BUFFER) == "true" and self.vocabulary is not None
        if self.capacity is not None and not self.shares_buffer:
            raise ModelError(f"{self.path}: no capacity can be set, this model's cache grows with each run")
        if self.cuda_graph and not self.shares_buffer:
            raise ModelError(f"{self.path}: no CUDA graph can be had, this model's cache grows with each run")
        self.past = {
            name: ([s if isinstance(s, int) else 0 for s in i.shape], (FLOATS | CODES)[i.type])
            for name, i in past.items()
        }
        self.states = [name for name in past if name.endswith(STATES)]
        #: states of linear attention after each of the last so many tokens of a run; of more than 1 they have a first
        #: dimension of it
        self.window = next((self.past[n][0][0] for n in self.states if len(self.past[n][0]) > _rank(n)), 1)
        self._read_hidden(speculate)

    def _check_caches(self, logits: Sequence[Any], past: Mapping[str, Any]) -> None:
        """Refuse logits, caches and states of other shapes or types.

        Raises:
            ModelError: saying what is expected.
        """
        windows = {(*i.shape[: len(i.shape) - _rank(name)],) for name, i in past.items() if name.endswith(STATES)}
        if (
            [len(o.shape) for o in logits] != [3]
            or not any(name.endswith(".key") for name in past)
            or not all(i.type in FLOATS | CODES for i in past.values())
            or not all(i.type in FLOATS for i in logits)
            or not all(_declares(name, i.shape) for name, i in past.items())
            or len(windows) > 1
            or not all(present(name) in self.outputs for name in past)
        ):
            raise ModelError(
                f"{self.path}: expected the output logits [batch, sequence, vocabulary], the inputs past_key_values.* "
                f"[batch, heads, length, width], or of linear attention *.conv_state [batch, channels, width] and "
                f"*.recurrent_state [batch, heads, key, value]. In front may be one window of all. Types are "
                f"{' or '.join(FLOATS)}, or of codes {' or '.join(CODES)}. Outputs are present.*"
            )

    def _read_hidden(self, speculate: str | Path | None) -> None:
        """Read what the model gives and takes of hidden states.

        Raises:
            ModelError: they have another shape or type.
        """
        hidden = [o for o in self.session.get_outputs() if o.name in (HIDDEN, HIDDEN_OUT)]
        for value in (*hidden, *(i for i in self.session.get_inputs() if i.name == HIDDEN)):
            if len(value.shape) != 3 or not isinstance(value.shape[2], int) or value.type not in FLOATS:
                raise ModelError(
                    f"{self.path}: {value.name} is {value.type} {value.shape}, expected [batch, sequence, width] of "
                    f"{' or '.join(FLOATS)}"
                )
        #: output of the hidden states after the last norm, where somebody drafts from them; "": none
        self.hidden = next((o.name for o in hidden if o.name == HIDDEN_OUT or speculate == "mtp"), "")
        self._hidden = next(((o.shape[2], FLOATS[o.type]) for o in hidden), (0, self._logits))
        #: whether a run takes hidden states, as that of the layer which drafts
        self.takes_hidden = any(i.name == HIDDEN for i in self.session.get_inputs())

    def _tokens_of(self, metadata: Mapping[str, str], name: str) -> int:
        """Return an entry that is a number of tokens; without it there is no limit."""
        found = metadata.get(name, str(sys.maxsize))
        if not found.isdecimal():
            raise ModelError(f"{self.path}: {name} is {found!r}, expected a number of tokens")
        return int(found)

    def in_turn(self, call: Callable[[], T], runs: bool = True) -> T:
        """Return what a call of the session returns. With CUDA graphs SessionThread makes all calls."""
        return SESSION_THREAD(call, runs) if self.cuda_graph else call()

    def wait(self) -> None:
        """Wait for the runs and copies that were started on a GPU."""
        if self.target.on_gpu:
            wait()

    def allocating(self, capacity: int, batch: int) -> contextlib.AbstractContextManager[None]:
        """Name a cache of ``batch`` times ``capacity`` tokens in an error for lack of memory."""
        tokens = f"{batch} times {capacity:,} tokens" if batch > 1 else f"{capacity:,} tokens"
        shapes = [(self.shape(name, batch), dtype, name in self.states) for name, (_, dtype) in self.past.items()]
        size = sum(math.prod(s if fixed else [*s[:2], capacity, s[3]]) * d.itemsize for s, d, fixed in shapes)
        less = ["a smaller capacity" if self.capacity else "fewer tokens"]
        less += ["fewer prompts at once (--batch)"] if batch > 1 else []
        if any(dtype.itemsize > 1 and name not in self.states for name, (_, dtype) in self.past.items()):
            less += ["export --cache fp8"]
        where = str(self.path) if self.target.on_gpu else f"{self.path}: the cache of {tokens}"
        return doing(where, self._on_gpu(f"the cache of {tokens} takes {size:,} bytes, ", less))

    def _on_gpu(self, what: str = "", less: Sequence[str] = ()) -> OnGpu | None:
        """Return what an error says about the GPU's memory; None on the cpu."""
        return OnGpu(what, [*less, *self._less_memory]) if self.target.on_gpu else None

    def experts_report(self) -> dict[str, int]:
        """Return counters of expert offloading: slots, hits, misses, bytes_read and more (guides/large-models).

        They are of this process's last session with such a cache; {} if there is none.
        """
        return (experts_report(self.target.library_path()) or [{}])[-1]

    def start(self, batch: int = 1) -> dict[str, np.ndarray]:
        """Return an empty KV cache of arrays, for :meth:`step`.

        Raises:
            ModelError: the cache does not fit into memory, or has a type that NumPy lacks.
        """
        if any(dtype == ml_dtypes.bfloat16 for _, dtype in self.past.values()):
            raise ModelError(f"{self.path}: a cache of arrays cannot be bfloat16, which NumPy lacks; use --dtype f16")
        try:
            return {name: np.zeros(self.shape(name, batch), dtype) for name, (_, dtype) in self.past.items()}
        except (MemoryError, ValueError) as error:
            raise ModelError(f"{self.path}: past_key_values: {str(error) or 'out of memory'}") from None

    def shape(self, name: str, batch: int = 1) -> list[int]:
        """Return the shape of an empty cache's tensor for a batch."""
        shape = list(self.past[name][0])
        shape[len(shape) - _rank(name)] = batch
        return shape

    def run_options(self, graph: int, ahead: bool = False) -> Any:
        """Return ONNX Runtime's options of one run, or of all runs of a CUDA graph.

        Args:
            graph: its number; -1: none. ahead: runs return before they have ended.
        """
        import onnxruntime as ort

        options = ort.RunOptions()
        if ahead:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self.cuda_graph:
            options.add_run_config_entry("gpu_graph_id", str(graph))
        if graph == -1:
            with self._listing:
                self._running.add(options)
        return options

    def interrupt(self) -> None:
        """End the steps of other threads, which raise ModelError. CUDA graphs run to their end."""
        with self._listing:
            for options in self._running:
                options.terminate = True

    def logits_of(self, new: int, device: str, batch: int = 1) -> Buffer:
        """Memory for the logits of a run of so many new tokens a sequence."""
        assert self.vocabulary is not None  # where caches are shared
        return Buffer.empty([batch, min(new, self.rows), self.vocabulary], self._logits, device)

    def run_bound(self, binding: Any, new: int, past: int, batch: int = 1) -> Buffer:
        """Run new tokens after ``past`` tokens of each sequence, with all bound except the logits. Return these.

        Raises:
            ModelError: ONNX Runtime fails; the message has its words.
        """
        logits = None
        if self._declared:
            logits = self.logits_of(new, self.device, batch)
            logits.bind(binding, output="logits")
        else:  # ONNX Runtime refuses memory of another size than the model declares
            binding.bind_output("logits", self.device)
        with self.step_lock(), self.running(new, past):
            self.session.run_with_iobinding(binding, self.run_options(-1))
        return logits or Buffer(binding.get_outputs()[-1], self._logits)

    def hidden_of(self, new: int, device: str) -> Buffer | None:
        """Memory for the hidden states of a run of so many new tokens of one sequence; None where nobody wants them."""
        return Buffer.of(self.hidden_array(new), device) if self.hidden else None

    def hidden_array(self, new: int) -> np.ndarray:
        """Return an array for the hidden states of new tokens of one sequence, [1, new, H]."""
        size, dtype = self._hidden
        return np.empty([1, new, size], dtype)

    def feed(self, ids: np.ndarray, past: int) -> dict[str, np.ndarray]:
        """Return the inputs beside the cache, for new tokens [B, S] after ``past`` tokens of each sequence."""
        batch, total = len(ids), past + ids.shape[1]
        return {
            "input_ids": ids,
            "attention_mask": np.ones((batch, total), np.int64),
            "position_ids": np.tile(np.arange(past, total), (batch, 1)),
        }

    def step_lock(self) -> threading.Lock:
        """Return a lock that a step holds around :meth:`running`, and for which :meth:`close` waits.

        Ctrl-C can come between the end of a step and the ``__exit__`` of a context manager in Python, which then never
        runs. A lock's ``__exit__`` is in C, and always runs.
        """
        step = threading.Lock()
        with self._listing:
            self._step_locks.add(step)
        return step

    @contextlib.contextmanager
    def running(self, new: int, past: int) -> Iterator[None]:
        """Turn ONNX Runtime's errors into ModelError and OutOfMemoryError, which name the model."""
        try:
            with doing(f"{self.path}: {new} tokens after {past}", self._on_gpu(less=["a smaller --chunk"] * (new > 1))):
                yield
        except MemoryError:
            raise
        except Exception as error:  # see above
            if self._opened is None:
                raise self._closed() from None
            if "terminate flag" in str(error):
                raise ModelError(f"{self.path}: the run of {new} tokens after {past} was interrupted") from None
            raise ModelError(f"{self.path}: {error}") from None

    def step(self, ids: np.ndarray, past: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Run new tokens.

        Args:
            ids: int64 [B, S].
            past: the cache, from :meth:`start` or the step before.

        Returns:
            Logits [B, min(S, ``rows``), vocabulary] of each sequence's last tokens, and the longer cache.

        Raises:
            ModelError: B or S is 0, or ONNX Runtime fails; the message has its words.
        """
        if not ids.size:
            raise ModelError(f"input_ids has shape {list(ids.shape)}, expected at least one row and one token")
        length = past_length(past)
        found = self.run(self.feed(ids, length) | past, ids.shape[1], length)
        return found["logits"], {name: found[present(name)] for name in past}

    def run(self, feed: dict[str, np.ndarray], new: int, past: int) -> dict[str, np.ndarray]:
        """Return all outputs by name, for new tokens after ``past`` tokens of each sequence.

        Raises:
            ModelError: ONNX Runtime fails; the message has its words.
        """
        with self.step_lock(), self.running(new, past):
            found = self.in_turn(lambda: self.session.run(None, feed, self.run_options(-1)))
        return dict(zip(self.outputs, found, strict=True))

    def check(self, ids: Iterable[int], past: int = 0, room: int = 0) -> list[int]:
        """Check that tokens can follow ``past`` other tokens, and leave room for ``room`` more.

        Returns:
            The tokens.

        Raises:
            ModelError: they cannot.
            OptionError: they are no integers.
        """
        ids = token_ids("the prompt", ids)
        if not ids:
            raise ModelError("the prompt has no tokens")
        for id in ids:
            if id < 0 or (self.vocabulary is not None and id >= self.vocabulary):
                raise ModelError(f"token id {id} is outside the vocabulary, 0 to {(self.vocabulary or 2**63) - 1}")
        if (total := past + len(ids)) + room > self.context:
            answer = f" and {room} for the answer do" if room else " do"
            raise ContextError(
                f"{self.path}: {total} tokens{answer} not fit into the model's context of {self.context} tokens: "
                "shorten the prompt"
            )
        return ids

    def chosen(self, choice: Choice, past: Sequence[int]) -> list[int]:
        """Return the tokens that were chosen last; of rows that have ended, with a ``past`` of -1, older ones.

        Raises:
            ModelError: logits are not numbers to choose from. OptionError: bias and n-grams leave no token.
        """
        with self.step_lock(), self.running(1, max(past)):
            tokens = self.in_turn(choice.take)
        for token, length in zip(tokens, past, strict=True):
            if length >= 0 and token == NOT_FINITE:
                raise self.not_finite(length)
            if length >= 0 and token == NO_TOKEN:
                raise OptionError(NOTHING_LEFT)
        return tokens

    @property
    def chooses_there(self) -> bool:
        """Return whether tokens are chosen where logits are; another sampler than Sampler takes them on the host."""
        return self.choice is not None and self.sampler is Sampler

    def choose(
        self,
        texts: Sequence[Sequence[int]],
        longest: int,
        sampling: Sampling | None,
        constraints: Sequence[Constraint | None] = (),
    ) -> Choice:
        """Return what chooses tokens after texts of at most ``longest`` tokens, on the GPU.

        Raises:
            OptionError: sampling is of another type, or has a bias of a token outside the vocabulary.
        """
        assert self.choice is not None
        assert self.vocabulary is not None  # where caches are shared
        return self.choice(
            texts, longest, self.vocabulary, dtype=self._logits, sampling=sampling, constraints=constraints
        )

    def finite(self, logits: np.ndarray, length: int) -> np.ndarray:
        """Return logits after checking that they are finite; ``length`` is for the message.

        Raises:
            ModelError: they are not finite.
        """
        if not np.isfinite(logits).all():
            raise self.not_finite(length)
        return logits

    def not_finite(self, length: int) -> ModelError:
        """Return the error of logits after so many tokens that are not numbers to choose from."""
        return ModelError(
            f"{self.path}: logits after {length} tokens are not finite: a weight is not a number, or activations "
            "overflow float16: export with --dtype f32, for CUDA with --dtype bf16"
        )


def token_ids(what: str, ids: Iterable[int]) -> list[int]:
    """Return ids as integers.

    Raises:
        OptionError: they are something else.
    """
    try:
        found = list(ids)
        if isinstance(ids, bytes | Mapping) or any(isinstance(id, bool) for id in found):
            raise TypeError
        return [operator.index(id) for id in found]
    except TypeError:
        text = ": quantmoe.Chat and quantmoe.Text take text" if isinstance(ids, str | bytes) else ""
        raise OptionError(f"{what} is {reprlib.repr(ids)}, expected token ids, which are integers{text}") from None


def need_count(name: str, value: int, least: int = 1) -> None:
    """Check an argument that is a number of things.

    Raises:
        OptionError: it is something else.
    """
    if not is_count(value, least):
        raise OptionError(f"{name} is {value!r}, expected an integer of at least {least}")


def is_count(value: Any, least: int) -> bool:
    """Return whether an argument is an integer of at least ``least``."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def check_takes_tokens(path: Path, session: Any) -> None:
    """Refuse an opened model that takes embeddings in the place of tokens, or tokens of many requests.

    Raises:
        ModelError: naming what runs it.
    """
    if any(i.name == "inputs_embeds" for i in session.get_inputs()):
        raise ModelError(
            f"{path}: takes embeddings, not tokens, as exported with --vision: run it with onnxruntime-genai "
            "(docs/guides/vision.md), or export it without"
        )
    if any(o.name == "last_hidden_state" for o in session.get_outputs()):
        raise ModelError(
            f"{path}: an encoder, which writes no text: run it with ONNX Runtime (docs/guides/encoders.md)"
        )
    if any(i.name == "block_table" for i in session.get_inputs()):
        raise ModelError(
            f"{path}: takes the tokens of many requests, as exported with --paged: run it with quantmoe serve "
            "(docs/guides/serve.md), or export it without"
        )


def runtime() -> Any:
    """Return the onnxruntime package.

    Raises:
        ModelError: it is older than the library needs. It would say so itself, but also print a line of its own.
    """
    import onnxruntime as ort

    if tuple(int(part) for part in ort.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ModelError(
            f"onnxruntime is {ort.__version__}, expected {oldest} or newer; pip install 'onnxruntime>={oldest}'"
        )
    return ort


def shares_buffer_of(path: Path) -> bool:
    """Return whether a model's metadata says that its caches may be written in place."""
    return metadata_of(path).get(SHARE_BUFFER) == "true"


def _check_gpu(ort: Any) -> None:
    """Refuse to go on without a GPU.

    Raises:
        ModelError: ONNX Runtime has no such provider, or CUDA's driver no GPU.
    """
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise ModelError(
            "this onnxruntime has no CUDA provider; pip uninstall onnxruntime, then pip install "
            "'onnxruntime-gpu[cuda,cudnn]'"
        )
    if not gpu.devices():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "nvidia-smi shows the driver's" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
        raise ModelError(f"no CUDA device: device is cuda, and this process sees no GPU ({why})")


def _rank(name: str) -> int:
    """Return the dimensions of an input of the cache, without a window of states."""
    return RANKS.get(name.rpartition(".")[2], 4)


def _declares(name: str, shape: Sequence[int | str | None]) -> bool:
    """Return whether a cache's input has its dimensions: numbers, except the batch and the length of keys and
    values."""
    front, state = len(shape) - _rank(name), name.endswith(STATES)
    free = {front} if state else {front, front + 2}
    return front in (0, state) and all(isinstance(size, int) for at, size in enumerate(shape) if at not in free)


def past_length(past: dict[str, np.ndarray]) -> int:
    """Return the tokens in a KV cache."""
    return int(next(value for name, value in past.items() if name.endswith(".key")).shape[2])
