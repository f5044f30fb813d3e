"""Text in, text out: the folder's tokenizer and chat template around a Generator."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import ModelError, OptionError, need_path
from quantmoe.exporter.reading.sampling import Sampling
from quantmoe.exporter.reading.template import load_template
from quantmoe.exporter.reading.tokenizer import load_tokenizer, stop_tokens
from quantmoe.runtime.batch import Batch
from quantmoe.runtime.cache import TAIL, Cache
from quantmoe.runtime.generate import Generated, Generator, need_count


class Text:
    """Tokenizer and chat template of an exported folder.

    Args:
        folder: an exported model's folder.
        raw: ignore its chat template.

    Attributes:
        tokenizer: a tokenizers.Tokenizer.
        template: the chat template; None if there is none.
        stop: ids of the tokens that end a text.

    Raises:
        ModelError: there is no tokenizer.json, or a file is damaged.
        OptionError: folder is no path.
    """

    def __init__(self, folder: str | Path, raw: bool = False):
        folder = need_path("folder", folder)
        self.tokenizer, self.stop = load_tokenizer(folder), stop_tokens(folder)
        self.template = None if raw else load_template(folder)

    def encode(self, messages: Sequence[dict[str, str]], before: Sequence[int] = ()) -> list[int]:
        """Return the token ids of a conversation that ends with a message.

        Args:
            messages: dicts with the texts ``role`` and ``content``; the last one is the new message.
            before: without a template, the ids of the text before that message.

        Raises:
            OptionError: messages are something else.
            ModelError: the template refuses the messages, or a message has half of a surrogate pair.
        """
        content = str | None if self.template else str  # None: a message of tool calls
        if not isinstance(messages, Sequence) or not messages or not all(_is_message(m, content) for m in messages):
            raise OptionError(
                f"messages is {reprlib.repr(messages)}, expected at least one message, each with the texts role and "
                "content"
            )
        if self.template:
            return self.ids(self.template.render(messages))
        return [*before, *self.ids(messages[-1]["content"], begins=not before)]

    def ids(self, text: str, begins: bool = False) -> list[int]:
        """Return the token ids of a text; with ``begins``, also the special tokens at the begin of a text.

        Raises:
            ModelError: it has half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(f"the prompt has {text[error.start]!a}, half of a surrogate pair") from None
        return list(self.tokenizer.encode(text, add_special_tokens=begins).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class Chat:
    """A conversation with an exported model.

    The KV cache is kept between messages, so only new text is run. A reply is kept as its tokens. If the template
    renders an earlier reply differently (many templates leave out its reasoning), that text is run again. A reply that
    the template refuses (gpt-oss' channels) is kept as it came. Without a template each message follows the reply
    before it.

    If the context is full, the oldest messages and their replies are dropped, and the rest is run again. A system
    prompt stays.

    Args:
        model: the Generator that answers.
        text: tokenizer and template; None: from the model's folder.
        cache: a cache of Generator.cache or load_cache. Messages reuse the tokens with which they begin. None: an empty
            cache.

    Attributes:
        messages: the conversation so far, as chat templates take it; special tokens are part of the text.
        last: tokens and time of the last reply.
        kept: tokens of the cache that the last reply reused.
        dropped: messages, with their replies, that were dropped for the last reply.

    Raises:
        ModelError: there is no tokenizer.json, or a file is damaged.
    """

    def __init__(self, model: Generator, text: Text | None = None, cache: Cache | None = None):
        self.model, self.cache = model, cache or model.cache()
        self.text = text or Text(model.path.parent)
        self.cache.tail = TAIL
        self.messages: list[dict[str, str]] = []
        self.last: Generated | None = None
        self.kept = self.dropped = 0
        #: what was run, and the text of it
        self._ids: list[int] = []
        self._run = ""

    def reply(
        self,
        message: str,
        max_new_tokens: int = 512,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Yield the model's answer in pieces, as they come.

        The pieces that came are part of the conversation, also if you stop early.

        Args:
            message: the user's text.
            max_new_tokens: most tokens of the answer. Old messages are dropped until there is room for these tokens, or
                for a quarter of the context.
            stop: strings that end the answer; they are not part of it.
            sampling: None takes the likeliest token.

        Raises:
            OptionError: the message is no text, or another argument has a wrong type or value.
            ContextError: the message alone is too long; the conversation does not change.
            ModelError: the template refuses the messages, or Generator.stream fails.
        """
        if not isinstance(message, str):
            raise OptionError(f"message is {message!r}, expected text")
        need_count("max_new_tokens", max_new_tokens)
        own = self.text
        asked, ids, rendered = self._fit([*self.messages, {"role": "user", "content": message}], max_new_tokens)
        self.kept = self.cache.keep(ids)
        self.last = found = self.model.stream(ids[self.kept :], max_new_tokens, own.stop, sampling, self.cache)
        text = TextStream(own.tokenizer, stop, () if own.template else ids, special=True)
        return self._pieces(asked, ids, rendered, found, text)

    def _pieces(
        self, asked: list[dict[str, str]], ids: list[int], rendered: str, found: Generated, text: TextStream
    ) -> Iterator[str]:
        own, said = self.text, ""
        try:
            for piece in text.pieces(token for token in found if token not in own.stop):
                said += piece
                yield piece
        finally:
            if text.stopped:
                found.finish_reason = "stop"
            self.messages = [*asked, {"role": "assistant", "content": said}]
            tokens = [token for token in found.tokens if token not in own.stop]
            while own.template and not said.startswith(own.decode(tokens)):  # a stop string's, or half of a character's
                tokens.pop()
            self._ids, self._run = ids + tokens, rendered + own.decode(tokens)

    def _fit(self, messages: list[dict[str, str]], max_new_tokens: int) -> tuple[list[dict[str, str]], list[int], str]:
        """Return the messages that fit into the context with room for an answer, their token ids and their text.

        Raises:
            ContextError: the last message does not fit alone.
        """
        limit = len(self.cache.tokens) + self.cache.room
        room = min(max_new_tokens, limit // 4)
        (ids, text), dropped = self._prompt(messages), 0
        while len(ids) + room > limit and (rest := _without_oldest_turn(messages)):
            messages, dropped = rest, dropped + 1
            ids, text = self._prompt_alone(messages)
        self.model.check(ids, room=1)
        self.dropped = dropped
        return messages, ids, text

    def _prompt(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], str]:
        """Return the token ids of a conversation, and with a template their text; tokens that were run stay."""
        own = self.text
        if own.template is None:
            return own.encode(messages, self._ids), ""
        text = self._render(messages)
        if not text.startswith(self._run):
            return own.ids(text), text
        return self._ids + own.ids(text.removeprefix(self._run)), text

    def _prompt_alone(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], str]:
        """Return the token ids of a new conversation, and with a template their text."""
        if self.text.template:
            text = self._render(messages)
            return self.text.ids(text), text
        ids: list[int] = []
        for message in messages:
            ids = self.text.encode([message], ids)
        return ids, ""

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        template = self.text.template
        assert template is not None
        try:
            return template.render(messages)
        except ModelError:
            return template.render_kept(messages)


def _is_message(message: Any, content: Any) -> bool:
    """Return whether ``message`` has a role, and a content of this type."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), content)


def _without_oldest_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return messages without the oldest message after the system prompts and without its replies.

    The next message of the user begins the rest; without one the result is [].
    """
    first = next(i for i, message in enumerate(messages) if message["role"] not in ("system", "developer"))
    users = (i for i, message in enumerate(messages) if message["role"] == "user" and i > first)
    following = next(users, None)
    return [] if following is None else messages[:first] + messages[following:]


def answers(
    model: Generator,
    text: Text,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 512,
    stop: Sequence[str] = (),
    sampling: Sampling | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[str], Batch]:
    """Return replies to prompts that run together in one batch.

    Args:
        prompts: token ids of each, from :meth:`Text.encode`.
        stop: strings that end a reply, for each reply on its own.
        progress: called as ``Batch.progress``.

    Returns:
        The replies in the prompts' order, and the batch that has run.

    Raises:
        ModelError: as Generator.stream_batch.
    """
    streams = [TextStream(text.tokenizer, stop, () if text.template else ids, special=True) for ids in prompts]
    said, batch = [""] * len(prompts), model.stream_batch(prompts, max_new_tokens, text.stop, sampling)
    batch.progress = progress
    for row, token in batch:
        said[row] += "" if token in text.stop else streams[row].push(token)
        if streams[row].stopped:
            batch.finish_reasons[row] = "stop"
            batch.end(row)
    return [begun + stream.end() for begun, stream in zip(said, streams, strict=True)], batch


class TextStream:
    """Text of tokens as they come: whole characters, and never the begin of a stop string.

    tokenizers' DecodeStream has no end, at which what it holds would come, and fails at bytes that are no text.

    Args:
        after: tokens before the first. Their text is not given, except a last character that they only begin.
        special: special tokens are part of the text.

    Attributes:
        stopped: a stop string came; nothing is given but what stood before it.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), after: Sequence[int] = (), special: bool = False):
        if isinstance(stop, str) or not all(isinstance(text, str) for text in stop):
            raise OptionError(f"stop is {stop!r}, expected a list of texts")
        self._tokenizer, self._stop, self._skipped = tokenizer, [text for text in stop if text], not special
        self._ids, self._held = list(after), ""
        # A window of tokens is decoded. The text of the first `_given` tokens ends with a whole character.
        text = self._decode(self._ids)
        self._shown = len(text.rstrip("\ufffd"))  # characters of the window's text
        self._begin, self._given = 0, len(after) if len(text) == self._shown else 0
        self.stopped = False

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield the text of these tokens until a stop string comes."""
        for id in ids:
            if piece := self.push(id):
                yield piece
            if self.stopped:
                return
        if piece := self.end():
            yield piece

    def push(self, id: int) -> str:
        """Return the text that one more token completes; empty while a character or a stop string may go on."""
        self._ids.append(id)
        text = self._decode(self._ids[self._begin :])
        whole = text.rstrip("\ufffd")  # bytes of a character whose others may come
        found = whole[self._shown :]
        self._shown = max(self._shown, len(whole))
        if found and whole == text:
            # a token's text depends on those right before it, in decoders of words
            self._begin, self._given = self._given, len(self._ids)
            self._shown = len(self._decode(self._ids[self._begin :]))
        return self._release(found)

    def end(self) -> str:
        """Return the text held back, after the last token."""
        found = self._release(self._decode(self._ids[self._begin :])[self._shown :])
        return found if self.stopped else found + self._held

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skipped))

    def _release(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self.stopped:
            return ""
        if found := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.stopped = True
            return text[: min(found)]
        ends = (len(text) - n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        at = min(ends, default=len(text))
        self._held = text[at:]
        return text[:at]
