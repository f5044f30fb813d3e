"""Tokens that a GPU would choose, on the CPU: a stand-in for the kernel reads logits and writes inputs."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from quantmoe import Generator
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.cache_memory import DecodeStep
from quantmoe.runtime.choosing.constraint import Constraint
from quantmoe.runtime.choosing.sampling import Choose, Sampler


class Choice:
    """What device_sampling.Choice does on a GPU, at once."""

    #: starts after which nothing was taken: at most one, as one run is ahead
    pending = 0

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        longest: int,
        vocabulary: int,
        dtype: np.dtype,
        sampling: Sampling | None,
        constraints: Sequence[Constraint | None] = (),
    ):
        self._sampling = sampling
        self._samplers: list[Choose] = [Sampler(sampling, text) for text in texts]
        for row, constraint in enumerate(constraints):
            if constraint is not None:
                self._samplers[row] = constraint.sampler(self._samplers[row])
        self._lengths, self._longest = [*map(len, texts)], longest
        self._tokens = [0] * len(texts)
        self.runs: list[list[int]] = []

    def join(self, row: int, text: Sequence[int], seed: int | None, constraint: Constraint | None) -> None:
        """Begin another text in a row."""
        sampling = None if self._sampling is None else dataclasses.replace(self._sampling, seed=seed)
        sampler = Sampler(sampling, text)
        self._samplers[row] = sampler if constraint is None else constraint.sampler(sampler)

    def start(self, logits: Buffer, past: Sequence[int], step: DecodeStep | None, first: int = 0) -> None:
        """Choose a token of each sequence, and write the inputs of the next run."""
        assert self.pending == 0
        assert max(past) <= self._longest
        self.pending, batch = 1, len(past)
        self.runs.append(list(past))
        rows = logits.here().reshape(batch, -1, logits.value.shape()[-1])[:, -1]
        for at, length in enumerate(past):
            if length >= 0:
                row, finite = first + at, np.isfinite(rows[at]).all()
                self._tokens[row] = self._samplers[row](rows[at].astype(np.float32)) if finite else -1
        if step is None:
            return
        capacity, before, column = step.expect(past)

        def inputs(name: str, columns: int) -> np.ndarray:
            memory = (ctypes.c_int64 * (batch * columns)).from_address(step.places[name])
            return np.frombuffer(memory, np.int64).reshape(batch, columns)

        ids, positions, mask = inputs("ids", 1), inputs("positions", 1), inputs("mask", capacity)
        for row, length in enumerate(past):
            if length < 0:
                mask[row, column] = 0
                continue
            ids[row], positions[row] = self._tokens[row], length
            if before >= 0:
                mask[row, before] = 0
            mask[row, length - 1] = mask[row, column] = 1

    def take(self) -> list[int]:
        """Return the tokens that were chosen last."""
        self.pending = 0
        return list(self._tokens)


def choosing_there(generator: Any) -> Generator:
    """Make a generator on the CPU one with decode steps of fixed shapes, whose tokens the stand-in chooses.

    Its ``made`` are the stand-ins.
    """
    run, generator.made = generator.session.run_with_iobinding, []
    generator.session.run_with_iobinding = lambda binding, options: run(binding)
    generator.cuda_graph, generator.run_options = True, lambda graph, ahead=False: graph
    generator.choice = lambda *given, **named: generator.made.append(Choice(*given, **named)) or generator.made[-1]
    found: Generator = generator
    return found
