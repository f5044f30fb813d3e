"""Vectors of texts, by an exported encoder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.folder.json_files import read_object, vocabulary_of
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.serving.batching.scheduler import BusyError
from quantmoe.serving.metrics import Metrics
from quantmoe.serving.prompt_length import PromptLength
from quantmoe.serving.served_model import VECTOR, ServedModel


class Embeddings:
    """An encoder, which runs one batch of texts after the other.

    Args:
        queue: requests that wait at most.

    Attributes:
        failed: as :class:`Scheduler`'s; a run that fails is its request's alone.
    """

    failed: BaseException | None = None

    def __init__(self, model: ServedModel, queue: int):
        folder = model.path.parent
        self.model, self.name, self.began = model, folder.resolve().name, int(time.time())
        self.metrics, self.tokenizer = Metrics(), load_tokenizer(folder)
        model.vocabulary = vocabulary_of(read_object(folder / CONFIG))
        self.length = PromptLength(self.tokenizer, model.context, "a text", "shorten the text")
        self._queue, self._waiting, self._turn = queue, 0, asyncio.Lock()

    def close(self) -> None:
        """End the runs that go on."""
        self.model.interrupt()

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that begin and end it.

        Raises:
            ContextError: it is much too long.
        """
        self.length.check_text(text)
        return list(self.tokenizer.encode_batch([text])[0].ids)  # encode holds Python's lock

    async def vectors(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the vectors f32 [texts, width] of texts of token ids.

        Raises:
            BusyError: the queue is full. ContextError, ModelError: a text is too long, or has no such tokens.
        """
        for ids in texts:
            self.length.check(len(ids))
            self.model.check(ids)
        if self._waiting > self._queue:
            raise BusyError
        self._waiting += 1
        found: dict[int, np.ndarray] = {}
        try:
            for numbers in batches([*map(len, texts)], self.model.chunk):
                async with self._turn:  # requests take turns after each batch
                    run = partial(self._run, [texts[number] for number in numbers])
                    rows = await asyncio.get_running_loop().run_in_executor(None, run)
                found |= dict(zip(numbers, rows, strict=True))
                self.metrics.prompt.inc(sum(len(texts[number]) for number in numbers))
        finally:
            self._waiting -= 1
        return np.array([found[number] for number in range(len(texts))], np.float32)

    def _run(self, texts: Sequence[Sequence[int]]) -> np.ndarray:
        longest = max(map(len, texts))
        ids, mask = np.zeros((2, len(texts), longest), np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
        with self.model.step_lock(), self.model.running(longest, 0), self.metrics.step.time():
            given = {"input_ids": ids, "attention_mask": mask}
            (rows,) = self.model.session.run([VECTOR], given, self.model.run_options(-1))
        found: np.ndarray = rows
        return found


def batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the numbers of the texts that run together: alike in length, with padding at most so many tokens."""
    found: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if not found or (len(found[-1]) + 1) * lengths[number] > most:
            found.append([])
        found[-1].append(number)
    return found
