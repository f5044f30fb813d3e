"""Requests that run together: each joins when a row of the cache is free, and leaves when it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime.cache import TAIL
from quantmoe.runtime.chat import Text, TextStream
from quantmoe.runtime.choosing.constraint import Constraint
from quantmoe.runtime.choosing.sampling import check_sampling
from quantmoe.serving.batch_cache import Rows
from quantmoe.serving.choosing import Chances, Choosing, Chosen
from quantmoe.serving.paged_cache import PagedRows
from quantmoe.serving.prefixes import BLOCK, Block, Prefixes
from quantmoe.serving.prompt_length import PromptLength
from quantmoe.serving.served_model import ServedModel

if TYPE_CHECKING:
    from quantmoe.serving.metrics import Metrics

#: errors whose message says what is wrong
_KNOWN = (ModelError, OptionError, MemoryError)


class BusyError(Exception):
    """The queue of requests is full."""


class ClosedError(Exception):
    """The scheduler has ended."""


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


@dataclasses.dataclass(eq=False, kw_only=True)
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
        reason: why it ends with that token; None: it goes on. told: the request has heard how it ends.
        keep: lengths of the prompt after which states are kept.
    """

    def __init__(self, request: Request, row: int, text: Text):
        self.request, self.row = request, row
        self.text = TextStream(text.tokenizer, request.stop, request.ids if request.after else (), not request.after)
        self.token, self.count = -1, 0
        self.reason: Literal["stop", "length"] | None = None
        self.told = False
        self.keep: set[int] = set()
        self._stop = text.stop if request.ends else ()

    def add(self, token: int) -> None:
        """Take the next token."""
        self.token, self.count = token, self.count + 1
        if token in self._stop:
            self.reason = "stop"
        elif self.count == self.request.max_new_tokens:
            self.reason = "length"

    def event(self, chosen: Chosen, reason: Literal["stop", "length"] | None) -> Event:
        """Return what the request hears of a token; reason: why it ends the answer. A stop text may end it, too."""
        text = "" if reason == "stop" else self.text.push(chosen.token)
        if self.text.stopped:
            reason = "stop"
        if reason is not None:
            text += self.text.end()
            reason = "stop" if self.text.stopped else reason
        return Event(text, chosen.token, chosen.chances, reason)


class Scheduler:
    """Runs requests in a thread of its own: one part of one prompt, then one token of each answer, and again.

    Args:
        rows: requests that run together at most. capacity: tokens of a prompt and its answer at most.
        queue: requests that wait at most.
        prefix_bytes: memory for beginnings of prompts; 0: none are kept.
        cache_bytes: memory of a cache in blocks at most; None: what all rows take.

    Attributes:
        failed: why the thread has ended; None: it runs.

    Raises:
        ModelError: the model cannot run requests together. OptionError: cache_bytes are too few.
    """

    def __init__(
        self,
        model: ServedModel,
        text: Text,
        metrics: Metrics,
        *,
        rows: int,
        capacity: int,
        queue: int,
        prefix_bytes: int,
        cache_bytes: int | None = None,
    ):
        check_serves(model)
        self._size = cache_bytes
        longer = capacity < min(model.context, model.short_context)
        way_out = "shorten the prompt" + ", or start the server with a larger --max-length" * longer
        #: of prompts
        self.length = PromptLength(text.tokenizer, capacity - 1, "the prompt", way_out)
        self.model, self.text, self.capacity, self.queue = model, text, capacity, queue
        self.failed: BaseException | None = None
        self._metrics, self._count = metrics, rows
        self._prefixes = Prefixes(prefix_bytes, bool(model.states))
        self._free, self._waiting = set(range(rows)), deque[Request]()
        self._reading: Answer | None = None
        self._answers: dict[int, Answer] = {}
        #: tokens that no request has heard of, and why the answer ends with each
        self._fresh: list[tuple[Answer, Chosen, Literal["stop", "length"] | None]] = []
        self._changed, self._closed, self._ready = threading.Condition(), False, Future[None]()
        self._thread = threading.Thread(target=self._work, name="quantmoe-scheduler", daemon=True)
        self._thread.start()
        self._ready.result()

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
            self.length.check(len(request.ids))
            self.model.check(request.ids)
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
        try:  # here, so that this thread makes the calls of sessions with CUDA graphs
            made = (self.model, self._count, self.capacity)
            self._rows = PagedRows(*made, self._size) if self.model.paged else Rows(*made)
            self._choosing = Choosing(self.model, self._count, self.capacity)
        except BaseException as error:  # for who waits
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
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
        """Run one token of each answer, and a part of one prompt. Return False at the end."""
        with self._changed:
            while not (self._waiting or self._answers or self._reading or self._fresh or self._closed):
                self._changed.wait()
            if self._closed:
                return False
        for answer in self._running():
            if answer.request.gone:
                self._leave(answer)
        self._step()
        if self._reading is None:
            self._begin()
        if self._reading is not None:
            with self._failing([self._reading]):
                self._read(self._reading)
        return True

    def _step(self) -> None:
        """Run one token of each answer. On a GPU the requests hear of the tokens before while it runs."""
        answers, chosen = {**self._answers}, dict[int, Chosen]()
        if answers:
            with self._failing([*answers.values()]), self._metrics.step.time():
                logits, rows = self._rows.start({row: answer.token for row, answer in answers.items()})
                self._choosing.start(logits, rows, {row: len(self._rows.tokens[row]) for row in answers})
                self._say()
                chosen = self._choosing.take()
        self._metrics.generated.inc(len(chosen))
        for row, answer in answers.items():
            if self._answers.get(row) is answer:
                self._take(answer, chosen[row])
        if not (self._answers and self._ahead):
            self._say()

    def _take(self, answer: Answer, chosen: Chosen) -> None:
        """Take an answer's next token. The request hears of it later."""
        if chosen.error is not None:
            self._fail([answer], chosen.error)
            return
        answer.add(chosen.token)
        self._fresh.append((answer, chosen, answer.reason))
        if answer.reason is not None:
            with self._failing([answer], (Exception,)):
                self._leave(answer)

    def _say(self) -> None:
        """Tell the requests of the tokens that they have not heard of."""
        fresh, self._fresh = self._fresh, []
        for answer, chosen, reason in fresh:
            if answer.request.gone:
                continue
            try:
                event = answer.event(chosen, reason)
                if event.reason is not None and reason is None:  # by a stop text
                    self._leave(answer)
                answer.told = event.reason is not None
                answer.request.tell(event)
            except Exception as error:
                self._fail([answer], error)

    @property
    def _ahead(self) -> bool:
        """Tokens are told while the next run goes on."""
        return self.model.cuda_graph

    def _running(self) -> list[Answer]:
        return [*self._answers.values(), *([self._reading] if self._reading else [])]

    @contextlib.contextmanager
    def _failing(self, answers: Sequence[Answer], caught: tuple[type[Exception], ...] = _KNOWN) -> Iterator[None]:
        """Tell these requests an error, and end them."""
        try:
            yield
        except caught as error:
            self._fail(answers, error)

    def _fail(self, answers: Sequence[Answer], error: Exception) -> None:
        """Tell these requests an error, and end them."""
        self._say()
        for answer in [answer for answer in answers if not answer.told]:
            if answer in self._running():
                self._leave(answer)
            answer.told = True
            answer.request.tell(Event(error=_known(error)))

    def _begin(self) -> None:
        """Give the oldest waiting request a row, and in it the tokens that are known."""
        with self._changed:
            while self._waiting and self._waiting[0].gone:
                self._waiting.popleft()
            request = self._waiting[0] if self._waiting and self._free else None
            if request is not None:
                row = self._rows.nearest([*self._free], [*self._answers])
                request.max_new_tokens = min(request.max_new_tokens, self.capacity - len(request.ids))
                if self._rows.take(row, len(request.ids) + request.max_new_tokens):
                    self._waiting.popleft()
                else:  # until another one leaves
                    request = None
            self._metrics.waiting.set(len(self._waiting))
        if request is None:
            return
        try:
            answer = Answer(request, row, self.text)
            self._choosing.join(row, request.ids, request.sampling, request.constraint, request.top)
        except Exception as error:  # it has no row yet
            self._rows.leave(row)
            request.tell(Event(error=_known(error)))
            return
        self._free.remove(row)
        self._reading = answer
        with self._failing([answer]):
            names = Prefixes.names(request.ids[:-1])
            found, known = self._prefixes.find(names)
            if found:
                self._rows.put(row, [block.keys for block in found])
            if found and found[-1].states is not None:
                assert isinstance(self._rows, Rows)  # blocks hold no states
                self._rows.put_states(row, found[-1].states)
            request.cached = len(found) * BLOCK
            self._rows.tokens[row] = request.ids[: request.cached]
            if self.model.states and self._prefixes.limit:
                answer.keep = {known * BLOCK, (len(request.ids) - TAIL) // BLOCK * BLOCK}
        self._metrics.cached.inc(request.cached)
        self._metrics.prompt.inc(len(request.ids))
        self._metrics.running.set(len(self._running()))

    def _read(self, answer: Answer) -> None:
        """Run a part of a prompt, and after its last part choose the first token."""
        ids, done = answer.request.ids, len(self._rows.tokens[answer.row])
        steps = self.model.target.steps_of_chunk if self._answers else 1
        chunk = max(self.model.chunk // steps, 1)
        end = min([done + chunk, len(ids), *(at for at in answer.keep if at > done)])
        logits = self._rows.read(answer.row, ids[done:end])
        self._keep(answer, done, states=end in answer.keep)
        if end == len(ids):
            self._reading = None
            self._answers[answer.row] = answer
            self._metrics.first.observe(time.monotonic() - answer.request.submitted)
            self._choosing.start(logits, [answer.row], {answer.row: len(ids)})
            self._metrics.generated.inc()
            self._take(answer, self._choosing.take()[answer.row])
            if not self._ahead:
                self._say()

    def _leave(self, answer: Answer) -> None:
        """Free a request's row."""
        if not self.model.states and answer is not self._reading:
            self._keep(answer, len(answer.request.ids), states=False)
        self._prefixes.use(Prefixes.names(self._rows.tokens[answer.row]))
        self._rows.leave(answer.row)
        self._choosing.leave(answer.row)
        self._answers.pop(answer.row, None)
        self._reading = None if self._reading is answer else self._reading
        with self._changed:
            self._free.add(answer.row)
        self._metrics.running.set(len(self._running()))

    def _keep(self, answer: Answer, begin: int, *, states: bool) -> None:
        """Keep the blocks that end after a row's first ``begin`` tokens; ``states``: and those after the last token."""
        tokens = self._rows.tokens[answer.row]
        names = Prefixes.names(tokens) if self._prefixes.limit else []
        last = len(tokens) // BLOCK - 1 if states and len(tokens) % BLOCK == 0 else -1
        new = [at for at in range(begin // BLOCK, len(names)) if not self._prefixes.has(names[at], at == last)]
        if not new:
            return
        contents = self._rows.contents(answer.row, new[0] * BLOCK, (new[-1] + 1) * BLOCK)
        for at in new:
            block = Block(contents[at - new[0]])
            if at == last:
                assert isinstance(self._rows, Rows)  # blocks hold no states
                block.states = self._rows.states(answer.row)
            self._prefixes.add(names[at], block)


def _known(error: Exception) -> Exception:
    """Return an error that says what is wrong. Another one goes to the log."""
    if isinstance(error, _KNOWN):
        return error
    logging.getLogger(__name__).error("a request has failed", exc_info=error)
    return ModelError(f"{type(error).__name__}: {error}")


def check_serves(model: ServedModel) -> None:
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
