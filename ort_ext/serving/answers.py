"""OpenAI's objects for the events of a request: one at the end, or one for each part of the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from quantmoe.runtime.choosing.reply_parser import Delta, ReplyParser
from quantmoe.serving.batching.scheduler import Event, Request
from quantmoe.serving.protocol import finite


class Answers:
    """The answers to one HTTP request.

    Args:
        model: its name. tokenizer: of the folder. prompts: token ids of each prompt.
        requests: one for each answer; the same number for each prompt.
    """

    kind = chunk = prefix = ""

    def __init__(self, model: str, tokenizer: Any, prompts: Sequence[Sequence[int]], requests: Sequence[Request]):
        self._tokenizer, self._prompts, self._requests = tokenizer, prompts, requests
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._events: list[list[Event]] = [[] for _ in requests]
        self._texts, self._counts = [""] * len(requests), [0] * len(requests)

    def add(self, index: int, event: Event) -> None:
        """Take an event of an answer for :meth:`whole`."""
        self._events[index].append(event)

    def whole(self) -> dict[str, Any]:
        """Return the object with all answers, after their last events."""
        choices = [self._choice(index, events, streamed=False) for index, events in enumerate(self._events)]
        return self._head | {"object": self.kind, "choices": choices, "usage": self.usage()}

    def part(self, index: int, events: Sequence[Event], usage: bool) -> dict[str, Any] | None:
        """Return the object with more tokens of an answer; None: they have nothing to send.

        Args:
            events: one or more. usage: the last object has :meth:`usage`.
        """
        choice = self._choice(index, events, streamed=True)
        if not any(value for name, value in choice.items() if name != "index"):
            return None
        return self._head | {"object": self.chunk, "choices": [choice]} | ({"usage": None} if usage else {})

    def last(self) -> dict[str, Any]:
        """Return the object that says :meth:`usage`."""
        return self._head | {"object": self.chunk, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return numbers of tokens. A prompt with several answers counts once."""
        read, each = sum(map(len, self._prompts)), len(self._requests) // len(self._prompts)
        written, cached = sum(self._counts), sum(request.cached for request in self._requests[::each])
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _choice(self, index: int, events: Sequence[Event], *, streamed: bool) -> dict[str, Any]:
        text = "".join(event.text for event in events)
        chosen = [event for event in events if event.chances is not None]
        logprobs = self._logprobs(chosen, len(self._texts[index])) if chosen else None
        self._counts[index] += len(events)
        self._texts[index] += text
        ends = events[-1].reason
        return {"index": index, "logprobs": logprobs, "finish_reason": ends} | self._said(index, text, ends, streamed)

    def _said(self, index: int, text: str, ends: str | None, streamed: bool) -> dict[str, Any]:
        """Return more of an answer, or with ``streamed`` False all of it."""
        raise NotImplementedError

    def _logprobs(self, events: Sequence[Event], offset: int) -> dict[str, Any]:
        raise NotImplementedError

    def _token(self, id: int | None) -> str:
        return str(self._tokenizer.decode([id], skip_special_tokens=False))


def _delta(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Return OpenAI's object for more of a reply."""
    found: dict[str, Any] = {}
    if content := "".join(delta.content for delta in deltas):
        found["content"] = content
    if reasoning := "".join(delta.reasoning for delta in deltas):
        found["reasoning_content"] = reasoning
    if calls := [delta for delta in deltas if delta.call is not None]:
        found["tool_calls"] = [
            {"index": delta.call, "function": {"arguments": delta.arguments}}
            | ({"id": delta.id, "type": "function"} if delta.id else {})
            for delta in calls
        ]
        for entry, delta in zip(found["tool_calls"], calls, strict=True):
            entry["function"] |= {"name": delta.name} if delta.name else {}
    return found


class TextAnswers(Answers):
    """Answers of /v1/completions."""

    kind = chunk = "text_completion"
    prefix = "cmpl"

    def _said(self, index: int, text: str, ends: str | None, streamed: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, events: Sequence[Event], offset: int) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for event in events:
            assert event.chances is not None
            token = self._token(event.token)
            found["tokens"].append(token)
            found["token_logprobs"].append(finite(event.chances.chosen))
            found["top_logprobs"].append({self._token(id): finite(by) for id, by in event.chances.top})
            found["text_offset"].append(offset)
            offset += len(event.text)
        return found


class ChatAnswers(Answers):
    """Answers of /v1/chat/completions.

    Args:
        parser: makes what divides an answer into reasoning, content and tool calls.
    """

    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[Request],
        parser: Callable[[], ReplyParser],
    ):
        super().__init__(model, tokenizer, prompts, requests)
        self._parsers = [parser() for _ in requests]
        self._begun = [False] * len(requests)

    def _said(self, index: int, text: str, ends: str | None, streamed: bool) -> dict[str, Any]:
        parser = self._parsers[index]
        begin = {} if self._begun[index] else {"role": "assistant", "content": ""}
        self._begun[index] = True
        deltas = parser.push(text) + (parser.end() if ends else [])
        said = {"delta": begin | _delta(deltas)} if streamed else {"message": parser.reply.message()}
        return said | ({"finish_reason": "tool_calls"} if ends == "stop" and parser.reply.calls else {})

    def _logprobs(self, events: Sequence[Event], offset: int) -> dict[str, Any]:
        return {"content": [self._chances(event) for event in events]}

    def _chances(self, event: Event) -> dict[str, Any]:
        assert event.chances is not None
        top = [self._entry(id, by) for id, by in event.chances.top]
        return self._entry(event.token, event.chances.chosen) | {"top_logprobs": top}

    def _entry(self, id: int | None, logprob: float) -> dict[str, Any]:
        token = self._token(id)
        whole = "\ufffd" not in token  # else it has a part of a character
        return {"token": token, "logprob": finite(logprob), "bytes": list(token.encode()) if whole else None}
