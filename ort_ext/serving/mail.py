"""Events on the way from the scheduler's thread to the HTTP requests that wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any
from weakref import WeakSet

#: more streams than this hear in intervals, of so many seconds for each stream: one object takes 0.1 ms of a core
MANY, PAUSE = 16, 0.0004
#: seconds from one call of the event loop to the next while there are many
CALLS = 0.004


class Inbox:
    """What has come for an HTTP request, which takes all of it at once.

    Args:
        streamed: the request wants parts of the answer. False: it waits for the end.

    Attributes:
        due: the time of the loop from which on a stream hears of what has come.
    """

    def __init__(self, *, streamed: bool):
        self.streamed, self.due = streamed, 0.0
        self._items: list[Any] = []
        self._some = asyncio.Event()

    def put(self, item: Any) -> None:
        """Add an item, of which the request does not hear yet."""
        self._items.append(item)

    def wake(self) -> None:
        """Let the request take what has come."""
        self._some.set()

    async def take(self) -> list[Any]:
        """Wait for :meth:`wake`. Return all items."""
        await self._some.wait()
        self._some.clear()
        items, self._items = self._items, []
        return items


class Mail:
    """Brings items to inboxes of an event loop. Few calls of the loop bring many of them.

    While there are more than MANY streams, each hears PAUSE seconds for each stream after it heard the last time, so
    it gets several tokens in one object: an object costs more than a token. Streams that begin one after another hear
    one after another, each time right after the scheduler has started a run, so they keep no lock that it needs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self._items = deque[tuple[Inbox, Any, bool]]()
        self._streams, self._held = WeakSet[Inbox](), set[Inbox]()
        self._next = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def many(self) -> bool:
        """There are more than MANY streams."""
        return len(self._streams) > MANY

    def open(self, *, streamed: bool) -> Inbox:
        """Return an inbox for a request of this loop."""
        inbox = Inbox(streamed=streamed)
        if streamed:
            self._streams.add(inbox)
        return inbox

    def put(self, inbox: Inbox, item: Any, *, ends: bool) -> None:
        """Send an item to an inbox; for the scheduler's thread alone. ``ends``: it is an answer's last."""
        self._items.append((inbox, item, ends))
        if len(self._items) == 1:  # else a call is on its way, which takes this item, too
            self.loop.call_soon_threadsafe(self._bring_in_time)

    def _bring_in_time(self) -> None:
        if (early := self._next - self.loop.time()) > 0:
            self.loop.call_later(early, self._bring)
        else:
            self._bring()

    def _bring(self) -> None:
        now = self.loop.time()
        while self._items:
            inbox, item, ends = self._items.popleft()
            inbox.put(item)
            if ends:
                inbox.due = now
            if ends or inbox.streamed:
                self._held.add(inbox)
        pause = PAUSE * len(self._streams) if self.many else 0.0
        self._next = now + CALLS if self.many else 0.0
        due = [inbox for inbox in self._held if inbox.due <= now]
        for inbox in due:
            inbox.wake()
            inbox.due = now + pause
        self._held.difference_update(due)
        if self._timer is not None:
            self._timer.cancel()
        # in case that the scheduler has nothing more for a while
        self._timer = self.loop.call_later(pause, self._bring) if self._held else None
