"""Requests that run together: each joins when a row of the cache is free, and leaves when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from quantmoe.exporter.errors import ContextError, ModelError, OptionError
from quantmoe.exporter.reading.sampling import Sampling
from quantmoe.runtime.cache import TAIL
from quantmoe.runtime.chat import Text, TextStream
from quantmoe.runtime.constraint import Constraint
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.sampling import Sampler, check_sampling, largest
from quantmoe.serving.batch_cache import Rows
from quantmoe.serving.prefixes import BLOCK, Block, Prefixes

if TYPE_CHECKING:
    from quantmoe.serving.metrics import Metrics

#: while others wait for their next token, a prompt is read in parts of a chunk's tokens divided by this
SHARE = 4
#: errors whose message says what is wrong
_KNOWN = (ModelError, OptionError, MemoryError)


class BusyError(Exception):
    """The queue of requests is full."""


class ClosedError(Exception):
    """The scheduler has ended."""


@dataclasses.dataclass(frozen=True)
class Chances:
    """Natural logarithms of probabilities, before penalties and temperature.

    Attributes:
        chosen: of the token that was chosen. top: ids of the likeliest tokens with theirs, likeliest first.
    """

    chosen: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Event:
    """A part of an answer, for the request.

    Attributes:
        text: more of the answer. token: the token that was chosen; None with an error.
        chances: of the token, if they were asked for.
        reason: why the answer ends here; None: it goes on. error: why there is no more.
    """

    text: str = ""
    token: int | None = None
    chances: Chances | None = None
    reason: Literal["stop", "length"] | None = None
    error: Exception | None = None


@dataclasses.dataclass(eq=False)
class Request:
    """One answer to a prompt.

    Attributes:
        ids: token ids of the prompt.
        after: the text continues the prompt's text. False: it follows a chat template, and has special tokens, too.
        stop: texts that end the answer.
        constraint: tokens that may come; None: all.
        top: how many of the likeliest tokens :class:`Chances` has; None: there are no Chances.
        ends: the model's end tokens end the answer.
        tell: called by the scheduler's thread with each :class:`Event`.
        cached: prompt tokens that were not computed.
        gone: set it to end the request; it hears nothing more.
    """

    ids: list[int]
    max_new_tokens: int
    tell: Callable[[Event], None]
    after: bool = False
    stop: Sequence[str] = ()
    sampling: Sampling | None = None
    constraint: Constraint | None = None
    top: int | None = None
    ends: bool = True
    cached: int = 0
    gone: bool = False
    submitted: float = dataclasses.field(default_factory=time.monotonic)


class Answer:
    """A request in its row.

    Attributes:
        token: the last token that was chosen, which runs next. count: how many there are.
        keep: lengths of the prompt after which states are kept.
    """

    def __init__(self, request: Request, row: int, text: Text):
        self.request, self.row = request, row
        sample = Sampler(request.sampling, request.ids)
        self.sample = sample if request.constraint is None else request.constraint.sampler(sample)
        self.text = TextStream(text.tokenizer, request.stop, request.ids if request.after else (), not request.after)
        self.token, self.count = -1, 0
        self.keep: set[int] = set()
        self._stop = text.stop if request.ends else ()

    def choose(self, logits: np.ndarray) -> Event:
        """Choose the next token, and return what the request hears."""
        request = self.request
        self.token = token = self.sample(logits)
        self.count += 1
        chances = None if request.top is None else chances_of(logits, token, request.top)
        ended = token in self._stop
        text = "" if ended else self.text.push(token)
        reason: Literal["stop", "length"] | None = None
        if ended or self.text.stopped:
            reason = "stop"
        elif self.count == request.max_new_tokens:
            reason = "length"
        if reason is not None:
            text += self.text.end()
            reason = "stop" if self.text.stopped else reason
        return Event(text, token, chances, reason)


def chances_of(logits: np.ndarray, token: int, top: int) -> Chances:
    """Return the logarithms of probabilities that finite logits [vocabulary] give."""
    scores = logits - logits.max()
    scores -= np.log(np.exp(scores).sum())
    ids = largest(scores, top)[:top] if top else np.empty(0, np.int64)
    ids = ids[np.argsort(-scores[ids], kind="stable")]
    return Chances(float(scores[token]), [(int(id), float(scores[id])) for id in ids])


class Scheduler:
    """Runs requests in a thread of its own: one part of one prompt, then one token of each answer, and again.

    Args:
        rows: requests that run together at most. capacity: tokens of a prompt and its answer at most.
        queue: requests that wait at most.
        prefix_bytes: memory for beginnings of prompts; 0: none are kept.

    Attributes:
        failed: why the thread has ended; None: it runs.

    Raises:
        ModelError: the model cannot run requests together.
    """

    def __init__(
        self, model: Generator, text: Text, metrics: Metrics, rows: int, capacity: int, queue: int, prefix_bytes: int
    ):
        check_serves(model)
        self.model, self.text, self.capacity, self.queue = model, text, capacity, queue
        self.failed: BaseException | None = None
        self._metrics, self._rows = metrics, Rows(model, rows, capacity)
        self._prefixes = Prefixes(prefix_bytes, bool(model.states))
        self._free, self._waiting = set(range(rows)), deque[Request]()
        self._reading: Answer | None = None
        self._answers: dict[int, Answer] = {}
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="quantmoe-scheduler", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin requests, all of them or none.

        Raises:
            BusyError: the queue is full.
            ContextError: the prompt does not fit.
            ModelError: it has no tokens, or one outside the vocabulary.
            ClosedError: the scheduler has ended.
            OptionError: sampling has a token outside the vocabulary.
        """
        for request in requests:
            self.model.check(request.ids, room=1)
            if (count := len(request.ids)) >= self.capacity:
                raise ContextError(
                    f"the prompt has {count} tokens, expected at most {self.capacity - 1}: shorten the prompt, or "
                    "start the server with a larger --max-length"
                )
            check_sampling(request.sampling, self.model.vocabulary or 0)
        with self._changed:
            if self._closed:
                raise ClosedError(self._why())
            if sum(not request.gone for request in self._waiting) + len(requests) > self.queue + len(self._free):
                raise BusyError
            self._waiting.extend(requests)
            self._metrics.waiting.set(len(self._waiting))
            self._changed.notify()

    def close(self) -> None:
        """End all requests and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.model.interrupt()
        self._thread.join()

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it is, nobody must wait for ever
            self.failed = error
        with self._changed:
            self._closed = True
            waiting, running = [*self._waiting], [answer.request for answer in self._running()]
            self._waiting.clear()
        for request in [*running, *waiting]:
            request.tell(Event(error=ClosedError(self._why())))

    def _why(self) -> str:
        return "the server ends" if self.failed is None else f"the server has failed: {self.failed}"

    def _turn(self) -> bool:
        """Run a part of one prompt, and one token of each answer. Return False at the end."""
        with self._changed:
            while not (self._waiting or self._answers or self._reading or self._closed):
                self._changed.wait()
            if self._closed:
                return False
        for answer in self._running():
            if answer.request.gone:
                self._leave(answer)
        if self._reading is None:
            self._begin()
        if self._reading is not None:
            answer = self._reading
            with self._failing([answer]):
                self._read(answer)
        if self._answers:
            answers = [*self._answers.values()]
            with self._failing(answers), self._metrics.step.time():
                logits = self._rows.step({answer.row: answer.token for answer in answers})
            for answer in answers:
                if answer.row in self._answers:
                    self._choose(answer, logits[answer.row])
        return True

    def _running(self) -> list[Answer]:
        return [*self._answers.values(), *([self._reading] if self._reading else [])]

    @contextlib.contextmanager
    def _failing(self, answers: Sequence[Answer], caught: tuple[type[Exception], ...] = _KNOWN) -> Iterator[None]:
        """Tell these requests an error, and end them."""
        try:
            yield
        except caught as error:
            for answer in answers:
                self._leave(answer)
                answer.request.tell(Event(error=_known(error)))

    def _begin(self) -> None:
        """Give the oldest waiting request a row, and in it the tokens that are known."""
        with self._changed:
            request = None
            while self._waiting and self._free and request is None:
                request = self._waiting.popleft()
                request = None if request.gone else request
            self._metrics.waiting.set(len(self._waiting))
        if request is None:
            return
        row = self._rows.nearest([*self._free], [*self._answers])
        try:
            answer = Answer(request, row, self.text)
        except Exception as error:  # it has no row yet
            request.tell(Event(error=_known(error)))
            return
        self._free.remove(row)
        self._reading = answer
        request.max_new_tokens = min(request.max_new_tokens, self.capacity - len(request.ids))
        with self._failing([answer]):
            names = Prefixes.names(request.ids[:-1])
            found, known = self._prefixes.find(names)
            for at, block in enumerate(found):
                self._rows.put(row, at * BLOCK, block.keys)
            if found and found[-1].states is not None:
                self._rows.put_states(row, found[-1].states)
            request.cached = len(found) * BLOCK
            self._rows.tokens[row] = request.ids[: request.cached]
            if self.model.states:
                answer.keep = {known * BLOCK, (len(request.ids) - TAIL) // BLOCK * BLOCK}
        self._metrics.cached.inc(request.cached)
        self._metrics.prompt.inc(len(request.ids))
        self._metrics.running.set(len(self._running()))

    def _read(self, answer: Answer) -> None:
        """Run a part of a prompt, and after its last part choose the first token."""
        ids, done = answer.request.ids, len(self._rows.tokens[answer.row])
        chunk = max(self.model.chunk // SHARE, 1) if self._answers else self.model.chunk
        end = min([done + chunk, len(ids), *(at for at in answer.keep if at > done)])
        logits = self._rows.read(answer.row, ids[done:end])
        self._keep(answer, done, end in answer.keep)
        if end == len(ids):
            self._reading = None
            self._answers[answer.row] = answer
            self._metrics.first.observe(time.monotonic() - answer.request.submitted)
            self._choose(answer, logits)

    def _choose(self, answer: Answer, logits: np.ndarray) -> None:
        with self._failing([answer], (Exception,)):
            event = answer.choose(self.model.finite(logits, len(self._rows.tokens[answer.row])))
            self._metrics.generated.inc()
            if event.reason is not None:
                self._leave(answer)
            answer.request.tell(event)

    def _leave(self, answer: Answer) -> None:
        """Free a request's row."""
        if not self.model.states and answer is not self._reading:
            self._keep(answer, len(answer.request.ids), False)
        self._prefixes.use(Prefixes.names(self._rows.tokens[answer.row]))
        self._rows.tokens[answer.row] = []
        self._answers.pop(answer.row, None)
        self._reading = None if self._reading is answer else self._reading
        with self._changed:
            self._free.add(answer.row)
        self._metrics.running.set(len(self._running()))

    def _keep(self, answer: Answer, begin: int, states: bool) -> None:
        """Keep the blocks that end after a row's first ``begin`` tokens; ``states``: and those after the last token."""
        tokens = self._rows.tokens[answer.row]
        names = Prefixes.names(tokens) if self._prefixes.limit else []
        for at in range(begin // BLOCK, len(names)):
            last = states and (at + 1) * BLOCK == len(tokens)
            if not self._prefixes.has(names[at], last):
                keys = self._rows.contents(answer.row, at * BLOCK, (at + 1) * BLOCK)
                self._prefixes.add(names[at], Block(keys, self._rows.states(answer.row) if last else None))


def _known(error: Exception) -> Exception:
    """Return an error that says what is wrong. Another one goes to the log."""
    if isinstance(error, _KNOWN):
        return error
    logging.getLogger(__name__).error("a request has failed", exc_info=error)
    return ModelError(f"{type(error).__name__}: {error}")


def check_serves(model: Generator) -> None:
    """Check that a model can run requests together.

    Raises:
        ModelError: it cannot; the message says how to export it.
    """
    why = ""
    if not model.shares_buffer:
        why = "its cache grows with each step; export it with --target cpu or cuda"
    elif model.window > 1:
        why = f"it keeps the states of {model.window} tokens for drafts; export it without --mtp and --state-window"
    if why:
        raise ModelError(f"{model.path}: cannot serve requests together: {why}")
