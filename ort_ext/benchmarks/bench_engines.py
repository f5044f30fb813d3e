"""The sides of ``quantmoe bench model``, each in a process of its own: a model that prefills and decodes token ids.

A side has ``prefill(tokens)``: seconds of a prompt of so many tokens until the logits of its last;
``fill(depth, batch, length)``: a cache of ``depth`` tokens in each of ``batch`` rows, and room for ``length`` in all;
``decode(steps)``: seconds of a step, each of one token a row, the first at that depth. Nothing is sampled.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from quantmoe.benchmarks.child_processes import how_ended, unheard_interrupts
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.files import GENAI
from quantmoe.exporter.folder.interface import PAST, STATES, present
from quantmoe.exporter.folder.json_files import read_object
from quantmoe.exporter.folder.metadata import SHARE_BUFFER
from quantmoe.exporter.folder.model_file import model_path
from quantmoe.exporter.targets import CPU
from quantmoe.ort_ext import cuda_library_path, library_path
from quantmoe.runtime.cache import Buffer
from quantmoe.runtime.cache_memory import DecodeStep
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.opened_model import check_takes_tokens, runtime

#: onnxruntime's names of types -> NumPy's
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}
TYPES |= {"tensor(int8)": np.int8, "tensor(uint8)": np.uint8}  # codes of caches
#: of a side's process: time.process_time counts the CPU's seconds of all its threads
clock: Callable[[], float] = time.perf_counter
FIRST_ID, IDS = 3, 200  # ids of prompts, in every vocabulary and no end of a text


def token_ids(batch: int, tokens: int) -> np.ndarray:
    """int64 [batch, tokens]; the same for all sides."""
    return np.random.default_rng(tokens).integers(FIRST_ID, IDS, (batch, tokens))


def random_numbers(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Return a cache's content: a million random numbers, repeated."""
    return np.resize(np.random.default_rng(0).normal(size=1 << 20), shape).astype(dtype)


def token_bytes(shape: Sequence[Any], dtype: DTypeLike) -> int:
    """Return the bytes of a token in a row of keys or values [batch, heads, length, width]."""
    return int(shape[1] * shape[3] * np.dtype(dtype).itemsize)


class Ours:
    """An exported model in ONNX Runtime with I/O binding: a step's present is the next step's past, without a copy.

    If the model writes the cache in place, both are one buffer, and a prompt is run in pieces of 512 tokens.

    Args:
        path: of the model or its folder.
        threads: of the session.
        profile: ONNX Runtime's profiler is on, for :meth:`nodes`.
    """

    def __init__(self, path: str, threads: int, profile: bool = False):
        self._ort = runtime()
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.enable_profiling = profile
        options.profile_file_prefix = str(Path(tempfile.gettempdir()) / f"quantmoe-bench-{os.getpid()}")
        options.register_custom_ops_library(library_path())
        self.session = self._ort.InferenceSession(str(model_path(path)), options, providers=["CPUExecutionProvider"])
        check_takes_tokens(model_path(path), self.session)
        self._inputs = {i.name: i for i in self.session.get_inputs()}
        self._past = [name for name in self._inputs if name.startswith(f"{PAST}.")]
        self._in_place = self.session.get_modelmeta().custom_metadata_map.get(SHARE_BUFFER) == "true"
        self._runs = 0

    def _run(self, ids: np.ndarray, past: dict[str, Any], length: int) -> tuple[float, dict[str, Any]]:
        batch, new = ids.shape
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, length + new), np.int64),
            "position_ids": np.tile(np.arange(length, length + new), (batch, 1)),
        }
        binding = self.session.io_binding()
        for name, array in feed.items():
            if name in self._inputs:
                binding.bind_cpu_input(name, array)
        for name, value in past.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        for name, value in past.items():
            output = present(name)
            binding.bind_ortvalue_output(output, value) if self._in_place else binding.bind_output(output)
        start = clock()
        self.session.run_with_iobinding(binding)
        seconds = clock() - start
        self._runs += 1
        logits, *outputs = binding.get_outputs()
        self.logits = logits.numpy()
        # In place the OrtValues of past stay: they alone keep NumPy's memory, which outputs only point to.
        return seconds, past if self._in_place else dict(zip(past, outputs, strict=True))

    def _cache(self, batch: int, length: int) -> dict[str, Any]:
        """Random keys and values of so many tokens a row, and states."""
        cache = {}
        for name in self._past:
            shape = [size if isinstance(size, int) else batch for size in self._inputs[name].shape]
            if not name.endswith(STATES):
                shape[2] = length
            array = random_numbers(shape, TYPES[self._inputs[name].type])
            cache[name] = self._ort.OrtValue.ortvalue_from_numpy(array)
        return cache

    def prefill(self, tokens: int) -> float:
        ids, past, total = token_ids(1, tokens), self._cache(1, tokens if self._in_place else 0), 0.0
        chunk = CPU.chunk if self._in_place else tokens
        for at in range(0, tokens, chunk):
            seconds, past = self._run(ids[:, at : at + chunk], past, at)
            total += seconds
        return total

    def fill(self, depth: int, batch: int, length: int) -> None:
        self._depth, self._batch = depth, batch
        self._filled = None  # frees it first
        self._filled = self._cache(batch, length if self._in_place else depth)

    def decode(self, steps: int) -> float:
        past, total, ids = self._filled, 0.0, token_ids(self._batch, steps)
        assert past is not None
        for step in range(steps):
            seconds, past = self._run(ids[:, step : step + 1], past, self._depth + step)
            total += seconds
        return total / steps

    def cache_bytes(self) -> dict[str, int]:
        """Return the bytes of a token in a row: by input, of keys and values."""
        inputs = {name: self._inputs[name] for name in self._past if not name.endswith(STATES)}
        return {name: token_bytes(i.shape, TYPES[i.type]) for name, i in inputs.items()}

    def run_count(self) -> int:
        return self._runs

    def nodes(self, runs: list[int]) -> list[list[tuple[str, int, float]]]:
        """End the profile: of each of these runs the operators, how many nodes and ms, most first."""
        path = Path(self.session.end_profiling())
        events = [e for e in json.loads(path.read_text(encoding="utf-8")) if e.get("ph") == "X"]
        path.unlink()
        whole = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "model_run")
        kernels = [e for e in events if e["cat"] == "Node" and e["name"].endswith("_kernel_time")]
        return [by_operator([e for e in kernels if whole[n][0] <= e["ts"] <= whole[n][1]]) for n in runs]


class OnCuda:
    """An exported model in ONNX Runtime's CUDA provider, all of it bound in the GPU's memory.

    A decode step is a CUDA graph, one for each cache, captured before the first timed run. A prompt is run in pieces of
    2,048 tokens.

    Args:
        path: of the model or its folder.
    """

    def __init__(self, path: str):
        self._model = Generator(path, device="cuda", cuda_graph=True)
        self._caches: dict[str, Buffer] = {}

    def _random(self, batch: int, slots: int) -> None:
        """Make a cache of ``slots`` tokens a row; the cache before is freed first."""
        self._caches = {}
        for name, (_, dtype) in self._model.past.items():
            shape = self._model.shape(name, batch)
            if name not in self._model.states:
                shape[2] = slots
            self._caches[name] = Buffer.of(random_numbers(shape, dtype), self._model.device)

    def prefill(self, tokens: int) -> float:
        self._random(1, tokens)
        ids, total, model = token_ids(1, tokens), 0.0, self._model
        for at in range(0, tokens, model.chunk):
            binding = model.session.io_binding()
            feed = model.feed(ids[:, at : at + model.chunk], at)
            inputs = {name: Buffer.of(array, model.device) for name, array in feed.items()}
            logits = model.logits_of(feed["input_ids"].shape[1], model.device)
            logits.bind(binding, output="logits")
            for name, buffer in inputs.items():
                buffer.bind(binding, name)
            for name, buffer in self._caches.items():
                buffer.bind(binding, name, present(name))
            start = clock()
            model.session.run_with_iobinding(binding, model.run_options(-1))
            total += clock() - start
        return total

    def fill(self, depth: int, batch: int, length: int) -> None:
        self._random(batch, length)
        self._depth, self._batch = depth, batch
        self.step = DecodeStep(self._model, self._caches, length, batch=batch)
        self.step.run(token_ids(batch, 1), depth)  # captures

    def decode(self, steps: int) -> float:
        ids, total = token_ids(self._batch, steps), 0.0
        for step in range(steps):
            self.step.put(ids[:, step : step + 1], self._depth + step)
            start = clock()
            self.step.launch(self._depth + step)
            total += clock() - start
        return total / steps

    def cache_bytes(self) -> dict[str, int]:
        """Return what :meth:`Ours.cache_bytes` returns."""
        past, states = self._model.past, self._model.states
        return {name: token_bytes(*past[name]) for name in past if name not in states}


def by_operator(events: list[dict[str, Any]]) -> list[tuple[str, int, float]]:
    """Return sums a profile's kernel events: operator, nodes, ms; most first."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event["args"]["op_name"]].append(event["dur"] / 1e3)
    return sorted(((name, len(ms), sum(ms)) for name, ms in found.items()), key=lambda row: -row[2])


class Genai:
    """onnxruntime-genai on the same folder, with the installed package's library. It keeps its place: a decode begins
    where the one before it ended."""

    def __init__(self, path: str, threads: int):
        import onnxruntime_genai as og

        folder = model_path(path).parent
        if not (folder / GENAI).is_file():
            raise ModelError(f"{folder / GENAI}: missing")
        config = og.Config(str(folder.resolve()))
        options: dict[str, Any] = {"intra_op_num_threads": threads}
        stated = read_object(folder / GENAI)["model"]["decoder"].get("session_options", {})
        name = stated.get("custom_ops_library", "")
        library = Path(cuda_library_path() if "cuda" in name else library_path()).resolve()
        if name:  # the folder's is native code of whoever exported it
            options["custom_ops_library"] = str(library)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        with contextlib.chdir(library.parent):  # else onnxruntime-genai takes none but the model's folder's
            self._og, self._model = og, og.Model(config)
        self._generating: Any = None

    def _generator(self, batch: int, length: int) -> Any:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(batch_size=batch, max_length=length, min_length=length)
        return self._og.Generator(self._model, params)

    def prefill(self, tokens: int) -> float:
        self._generating = None
        generating = self._generator(1, tokens + 1)
        start = clock()
        generating.append_tokens(token_ids(1, tokens).astype(np.int32))
        return clock() - start

    def fill(self, depth: int, batch: int, length: int) -> None:
        self._generating = None
        self._generating = self._generator(batch, length)
        self._generating.append_tokens(token_ids(batch, max(1, depth)).astype(np.int32))
        self._generating.generate_next_token()  # of the prompt's logits, which are there

    def decode(self, steps: int) -> float:
        start = clock()
        for _ in range(steps):
            self._generating.generate_next_token()
        return (clock() - start) / steps


class LlamaCpp:
    """llama.cpp by its C API, with its defaults except threads.

    Flash attention is used where llama.cpp chooses it. The cache is f16, and a window's cache has the window's size, as
    in its own programs. Prompts are run in pieces of 512 tokens.

    Args:
        path: a GGUF file.
        threads: that compute.
        repack: weights are copied into layouts that its kernels read faster; else they are read where they are mapped.
        gpu: all layers are on the GPU.

    Raises:
        ModelError: it does not load the file, or its build has no GPU.
    """

    def __init__(self, path: str, threads: int, repack: bool = True, gpu: bool = False):
        import llama_cpp as api

        self._api, self._threads, self._said = api, threads, [""]

        @api.llama_log_callback  # type: ignore[untyped-decorator]
        def log(level: int, text: bytes, data: Any) -> None:
            if level == 4:  # GGML_LOG_LEVEL_ERROR
                self._said.append(text.decode(errors="replace").strip())

        self._log = log  # is called while the library lives
        api.llama_log_set(log, None)
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.use_extra_bufts = repack
        params.n_gpu_layers = 999 if gpu else 0
        if gpu and not api.llama_supports_gpu_offload():
            raise ModelError("this build has no GPU; CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python")
        self._model = api.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise ModelError(f"{path}: {self._said[-1] or 'llama.cpp does not load it'}")
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        # States of linear attention cannot be taken back: a row's tokens are saved and loaded again.
        self._saves = api.llama_model_is_hybrid(self._model) or api.llama_model_is_recurrent(self._model)
        self._context, self._memory, self._shape, self._length, self._most = None, None, (0, 0), 0, 0

    def _reserve(self, length: int, batch: int) -> None:
        """Make a context of at least ``length`` tokens a row, with an empty cache or the old one."""
        api = self._api
        if self._context and length <= self._shape[0] and batch == self._shape[1]:
            return
        if self._context:
            api.llama_free(self._context)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.swa_full = length * batch, batch, False
        params.n_threads = params.n_threads_batch = self._threads
        self._context, self._shape, self._length = api.llama_init_from_model(self._model, params), (length, batch), 0
        if not self._context:
            raise ModelError(f"llama.cpp makes no context of {batch} x {length} tokens: {self._said[-1]}")
        self._memory, self._most = api.llama_get_memory(self._context), params.n_batch

    def _step(self, ids: np.ndarray, first: int, row: int | None = None) -> float:
        """Return the seconds of new tokens [rows, tokens] at position ``first``, all of the same row if that is
        given."""
        api, (rows, tokens) = self._api, ids.shape
        batch = api.llama_batch_init(ids.size, 0, 1)
        batch.n_tokens = ids.size
        for at in range(ids.size):
            r, s = divmod(at, tokens)
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = int(ids[r, s]), first + s, 1
            batch.seq_id[at][0], batch.logits[at] = r if row is None else row, s == tokens - 1
        start = clock()
        status = api.llama_decode(self._context, batch)
        api.llama_synchronize(self._context)
        seconds = clock() - start
        api.llama_batch_free(batch)
        if status:
            raise ModelError(f"llama_decode of {rows} x {tokens} tokens at {first}: {status} {self._said[-1]}")
        return seconds

    def _prompt(self, first: int, end: int) -> float:
        ids = token_ids(1, end)  # others than of a shorter prompt: only their number matters
        return sum(self._step(ids[:, at : min(at + self._most, end)], at, 0) for at in range(first, end, self._most))

    def logits(self) -> np.ndarray:
        """f32 [vocabulary]: of the last token."""
        pointer = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,)).copy()

    def one_by_one(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the logits of each of these tokens [tokens], a step each; f32 [vocabulary]."""
        self._reserve(len(ids), 1)
        self._api.llama_memory_clear(self._memory, True)  # noqa: FBT003
        for at, token in enumerate(ids):
            self._step(np.array([[token]]), at)
            yield self.logits()

    def prefill(self, tokens: int) -> float:
        self._reserve(tokens, 1)
        self._api.llama_memory_clear(self._memory, True)  # noqa: FBT003
        self._length = 0
        return self._prompt(0, tokens)

    def fill(self, depth: int, batch: int, length: int) -> None:
        """Compute the tokens that one row does not have yet, and copy it to the others."""
        self._reserve(length, batch)
        kept = 0 if self._saves else min(self._length, depth)
        for row in range(batch):
            self._api.llama_memory_seq_rm(self._memory, row, 0 if row else kept, -1)
        self._prompt(kept, depth)
        if self._saves:
            self._saved = (ctypes.c_uint8 * self._api.llama_state_seq_get_size(self._context, 0))()
            self._api.llama_state_seq_get_data(self._context, self._saved, len(self._saved), 0)
        else:
            for row in range(1, batch):
                self._api.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        self._length = depth

    def _rewind(self) -> None:
        """Take every row back to what ``fill`` made."""
        for row in range(self._shape[1]):
            self._api.llama_memory_seq_rm(self._memory, row, 0 if self._saves else self._length, -1)
            if (
                self._saves
                and self._length
                and not self._api.llama_state_seq_set_data(self._context, self._saved, len(self._saved), row)
            ):
                raise ModelError("llama.cpp does not load the state of a row that it saved")

    def decode(self, steps: int) -> float:
        ids = token_ids(self._shape[1], steps)
        self._rewind()
        return sum(self._step(ids[:, s : s + 1], self._length + s) for s in range(steps)) / steps


class Process:
    """A side in a new process. Attributes are its methods.

    Args:
        name: for errors. side, arguments: what makes it, and of what. cpu: times are the CPU's, not the clock's.

    Raises:
        ModelError: the side's own words when it raises; that it was killed when it was.
    """

    def __init__(self, name: str, side: Callable[..., Any], *arguments: Any, cpu: bool = False):
        context = multiprocessing.get_context("spawn")
        self._name, (self._pipe, end) = name, context.Pipe()
        self._process = context.Process(target=_serve, args=(end, side, arguments, cpu), daemon=True)
        with unheard_interrupts():
            self._process.start()
        end.close()
        self._receive()

    def _receive(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise ModelError(f"{self._name}: its process {how_ended(self._process.exitcode)}") from None
        if failed:
            raise ModelError(f"{self._name}: {' '.join(value.split())}")
        return value

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._pipe.send((method, arguments))
            return self._receive()

        return call

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        """End the process, also one that is at work."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(pipe: Any, side: Callable[..., Any], arguments: tuple[Any, ...], cpu: bool) -> None:
    global clock
    clock = time.process_time if cpu else time.perf_counter

    def answer(work: Callable[..., Any], *given: Any) -> Any:
        try:
            value = work(*given)
        except Exception as error:  # of any library, said by the process that asked
            pipe.send((True, str(error) or repr(error)))
            return None
        pipe.send((False, None if work is side else value))
        return value

    made = answer(side, *arguments)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            method, given = pipe.recv()
            answer(peak_bytes) if method == "peak" else answer(getattr(made, method), *given)


def peak_bytes() -> int:
    """Return the peak memory of this process, with pages of mapped files (VmHWM)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024 if found else 0
