"""Tokens that are chosen on the GPU, where the logits are, and read there by the next run."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import ml_dtypes
import numpy as np

from quantmoe.custom_ops.c_calls import checked
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.choosing.sampling import check_sampling
from quantmoe.runtime.device import Pages, copy, library, stream, wait

if TYPE_CHECKING:
    from quantmoe.runtime.choosing.constraint import Constraint

#: qm_type
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(ml_dtypes.bfloat16): 2}
#: what is chosen where logits are not finite, and where bias and n-grams leave no token
NOT_FINITE, NO_TOKEN = -1, -2
_I32, _I64, _F64, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Problem(ctypes.Structure):
    """qm_cuda_choice_problem."""

    _fields_ = [
        *((name, _I32) for name in ("type", "batch", "vocabulary", "top_k", "ngram")),
        *((name, _F64) for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")),
        *((name, _I64) for name in ("capacity", "longest", "column", "column_before")),
    ]


class Tensors(ctypes.Structure):
    """qm_cuda_choice_tensors."""

    _fields_ = [
        (name, _PTR)
        for name in (
            *("logits", "uniform", "past", "bias", "allowed", "counts", "history"),
            *("ids", "positions", "mask", "chosen", "workspace"),
        )
    ]


class NextRun(Protocol):
    """The run that reads the chosen tokens (cache_memory.DecodeStep)."""

    places: dict[str, int]

    def expect(self, past: Sequence[int]) -> tuple[int, int, int]: ...


class Choice:
    """Chooses a token of each row, step after step, as sampling.Sampler does with the same seed.

    Args:
        texts: the tokens of each row so far, all of them in the cache when the first token is chosen.
        longest: tokens that a text has at most.
        vocabulary: tokens that have logits. dtype: of the logits.
        constraints: which tokens may come next, of each row; (): all may.

    Raises:
        OptionError: sampling is of another type, or has a bias of a token outside the vocabulary.
    """

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        longest: int,
        vocabulary: int,
        *,
        dtype: np.dtype,
        sampling: Sampling | None,
        constraints: Sequence[Constraint | None] = (),
    ):
        check_sampling(sampling, vocabulary)
        how = sampling or Sampling(temperature=0)
        batch = len(texts)
        self._problem = Problem(
            type=_TYPES[dtype],
            batch=batch,
            vocabulary=vocabulary,
            top_k=min(how.top_k, vocabulary),
            ngram=how.no_repeat_ngram_size,
            temperature=how.temperature,
            top_p=how.top_p,
            min_p=how.min_p,
            repetition=how.repetition_penalty,
            presence=how.presence_penalty,
            frequency=how.frequency_penalty,
            longest=longest,
            column_before=-1,
        )
        self._random = [np.random.Generator(np.random.PCG64(how.seed)) for _ in texts if how.temperature]
        wait()  # what a choice or a run before still reads or writes may be taken from here on
        self._constraints = {row: rule for row, rule in enumerate(constraints) if rule is not None}
        words = -(-vocabulary // 32) if self._constraints else 0
        self._pages = Pages(16 * batch + 4 * words * batch)
        self._uniform = np.frombuffer(self._pages.memory, np.float64, batch)
        self._past, self._chosen = np.frombuffer(self._pages.memory, np.int32, 2 * batch, 8 * batch).reshape(2, batch)
        #: bits of the tokens that may come next, copied to the GPU before each choice
        self._allowed = np.frombuffer(self._pages.memory, np.uint32, words * batch, 16 * batch).reshape(batch, words)
        self._allowed[:] = 2**32 - 1
        size, held = library().qm_cuda_choice_bytes(ctypes.byref(self._problem)), dict[str, np.ndarray]()
        if self._constraints:
            held["allowed"] = self._allowed
        if how.logit_bias:
            held["bias"] = np.zeros(vocabulary)
            held["bias"][list(how.logit_bias)] = list(how.logit_bias.values())
        if how.repetition_penalty != 1 or how.presence_penalty or how.frequency_penalty:
            held["counts"] = np.stack([*map(self._seen, texts)])
        if how.no_repeat_ngram_size:
            held["history"] = np.stack([*map(self._written, texts)])
        self._held = {name: Buffer.of(array, "cuda") for name, array in held.items()}
        self._held["workspace"] = Buffer.empty([size], np.uint8, "cuda")
        #: of what has a part for each row: where it begins, and the bytes of a part
        self._parts = {name: (self._held[name].address(), array[0].nbytes) for name, array in held.items()}
        self._parts.pop("bias", None)
        for name, array in (("uniform", self._uniform), ("past", self._past), ("chosen", self._chosen)):
            self._parts[name] = array.ctypes.data, array.itemsize
        self._tensors = Tensors(**{name: buffer.address() for name, buffer in self._held.items()})

    def join(self, row: int, text: Sequence[int], seed: int | None, constraint: Constraint | None) -> None:
        """Begin another text in a row, all of it in the cache when its first token is chosen.

        Args:
            constraint: which tokens may come next; None: all. Only if there are ``constraints``.
        """
        if self._random:
            self._random[row] = np.random.Generator(np.random.PCG64(seed))
        self._constraints.pop(row, None)
        if constraint is not None:
            self._constraints[row] = constraint
        for name, begin in (("counts", self._seen), ("history", self._written)):
            if name in self._held:
                at, size = self._parts[name]
                array = begin(text)
                copy(at + row * size, array.ctypes.data, size)
                wait()  # then the array may go

    def _seen(self, text: Sequence[int]) -> np.ndarray:
        found = np.zeros(self._problem.vocabulary, np.int32)
        found[list(text)] = 1
        return found

    def _written(self, text: Sequence[int]) -> np.ndarray:
        found = np.zeros(self._problem.longest, np.int32)
        found[: len(text)] = text
        return found

    def start(self, logits: Buffer, past: Sequence[int], step: NextRun | None, first: int = 0) -> None:
        """Choose after the run that was started last, and write the inputs of the next one.

        Args:
            logits: [sequences, rows, vocabulary]. The last row counts; several sequences have one row each.
            past: tokens of each sequence; -1: it has ended. It does not go on without :meth:`join`.
            step: what runs next; None: nothing.
            first: row of the first sequence.
        """
        count = len(past)
        own = slice(first, first + count)
        if self._random:
            drawn = [0 if n < 0 else self._random[row].random() for row, n in enumerate(past, first)]
            self._uniform[own] = drawn
        self._past[:] = -1
        self._past[own] = past
        for row, rule in self._constraints.items():
            if self._past[row] >= 0:
                words = rule.allowed()
                self._allowed[row] = 2**32 - 1 if words is None else words
        if self._constraints:
            copy(self._held["allowed"].address(), self._allowed.ctypes.data, self._allowed.nbytes)
        if step is not None:
            self._problem.capacity, self._problem.column_before, self._problem.column = step.expect(past)
        self._problem.batch = count
        self._logits = logits  # is not freed before it is read
        self._tensors.logits = logits.address() + logits.bytes() - count * logits.row_bytes()
        for name, (at, size) in self._parts.items():
            setattr(self._tensors, name, at + first * size)
        for name in ("ids", "positions", "mask"):
            setattr(self._tensors, name, None if step is None else step.places[name])
        checked(
            library().qm_cuda_launch_choice, ctypes.byref(self._problem), ctypes.byref(self._tensors), _PTR(stream())
        )

    def take(self) -> list[int]:
        """Wait for the tokens that were chosen last, or NOT_FINITE or NO_TOKEN; older ones of rows that have ended."""
        wait()
        chosen = list(map(int, self._chosen))
        for row, rule in self._constraints.items():
            if self._past[row] >= 0 and chosen[row] >= 0:
                rule.add(chosen[row])
        return chosen
