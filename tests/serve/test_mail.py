"""When HTTP requests hear of what the scheduler sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quantmoe.serving.mail import CALLS, MANY, PAUSE, Inbox, Mail


class Loop:
    """An event loop whose time the test moves."""

    def __init__(self) -> None:
        self.now, self.calls = 5.0, list[tuple[float, Callable[[], None]]]()

    def time(self) -> float:
        return self.now

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.call_later(0, call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Any:
        entry = (self.now + seconds, call)
        self.calls.append(entry)
        return SimpleNamespace(cancel=lambda: self.calls.remove(entry) if entry in self.calls else None)

    def run(self, until: float) -> None:
        """Make the calls until then."""
        while due := [entry for entry in self.calls if entry[0] <= until]:
            entry = min(due, key=lambda entry: entry[0])
            self.calls.remove(entry)
            self.now = max(self.now, entry[0])
            entry[1]()
        self.now = until


@pytest.fixture
def loop() -> Any:
    return Loop()


@pytest.fixture
def heard() -> Iterator[Callable[[Inbox], list[int]]]:
    """What a request hears now."""

    async def take(inbox: Inbox) -> list[int]:
        taking = asyncio.ensure_future(inbox.take())
        await asyncio.sleep(0)
        if taking.done():
            return taking.result()
        taking.cancel()
        return []

    with asyncio.Runner() as runner:
        yield lambda inbox: runner.run(take(inbox))


def test_few_streams_hear_of_each_token(loop: Any, heard: Any) -> None:
    mail = Mail(loop)
    inboxes = [mail.open(streamed=True) for _ in range(MANY)]
    for token in range(3):
        for inbox in inboxes:
            mail.put(inbox, token, ends=False)
        loop.run(loop.now)
        assert not mail.many
        assert [heard(inbox) for inbox in inboxes] == [[token]] * MANY


def test_many_streams_hear_in_intervals(loop: Any, heard: Any) -> None:
    """The first token at once, then all that have come, in their order."""
    mail = Mail(loop)
    inboxes = [mail.open(streamed=True) for _ in range(2 * MANY)]
    pause, begin = PAUSE * 2 * MANY, loop.now
    for inbox in inboxes:
        mail.put(inbox, 0, ends=False)
    loop.run(begin)
    assert mail.many
    assert [heard(inbox) for inbox in inboxes] == [[0]] * 2 * MANY
    for token in (1, 2):
        for inbox in inboxes:
            mail.put(inbox, token, ends=False)
        loop.run(begin + token * pause / 3)
        assert not any(heard(inbox) for inbox in inboxes)
    loop.run(begin + 2 * pause)
    assert [heard(inbox) for inbox in inboxes] == [[1, 2]] * 2 * MANY


def test_what_is_held_comes_when_the_scheduler_sends_nothing_more(loop: Any, heard: Any) -> None:
    mail = Mail(loop)
    inboxes = [mail.open(streamed=True) for _ in range(MANY + 1)]
    mail.put(inboxes[0], 0, ends=False)
    loop.run(loop.now)
    assert heard(inboxes[0]) == [0]
    mail.put(inboxes[0], 1, ends=False)
    loop.run(loop.now + CALLS)
    assert not heard(inboxes[0])
    loop.run(loop.now + PAUSE * (MANY + 1))
    assert heard(inboxes[0]) == [1]
    assert not loop.calls


def test_the_end_of_an_answer_comes_at_once(loop: Any, heard: Any) -> None:
    mail = Mail(loop)
    inboxes = [mail.open(streamed=True) for _ in range(MANY + 1)]
    mail.put(inboxes[0], 0, ends=False)
    loop.run(loop.now)
    assert heard(inboxes[0]) == [0]
    mail.put(inboxes[0], 1, ends=True)
    loop.run(loop.now + CALLS)
    assert heard(inboxes[0]) == [1]


def test_a_request_without_a_stream_hears_at_the_end(loop: Any, heard: Any) -> None:
    mail = Mail(loop)
    inbox = mail.open(streamed=False)
    for token in range(3):
        mail.put(inbox, token, ends=False)
        loop.run(loop.now + 1)
        assert not heard(inbox)
    mail.put(inbox, 3, ends=True)
    loop.run(loop.now)
    assert heard(inbox) == [0, 1, 2, 3]
    assert not loop.calls


def test_streams_that_have_gone_are_not_counted(loop: Any) -> None:
    mail = Mail(loop)
    inboxes = [mail.open(streamed=True) for _ in range(MANY + 1)]
    assert mail.many
    inboxes.pop()
    assert not mail.many
