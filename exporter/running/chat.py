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
from quantmoe.exporter.running.batch import Batch
from quantmoe.exporter.running.cache import TAIL, Cache
from quantmoe.exporter.running.generate import Generated, Generator, need_count


class Text:
    """What a folder has to turn text into tokens and back.

    Args:
        folder: an exported model's.
        raw: leaves its chat template alone.

    Attributes:
        tokenizer: a tokenizers.Tokenizer. template: None without one. stop: ids of tokens that end a text.

    Raises:
        ModelError: there is no tokenizer.json; a file is not what it should be. OptionError: folder is no path.
    """

    def __init__(self, folder: str | Path, raw: bool = False):
        folder = need_path("folder", folder)
        self.tokenizer, self.stop = load_tokenizer(folder), stop_tokens(folder)
        self.template = None if raw else load_template(folder)

    def encode(self, messages: Sequence[dict[str, str]], before: Sequence[int] = ()) -> list[int]:
        """Return the token ids of a conversation that ends with a message.

        Args:
            before: without a template, the ids of what came before that message.

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
        """Return the token ids of a text; begins: with the special tokens that a text begins with.

        Raises:
            ModelError: it has half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(f"the prompt has {text[error.start]!a}, half of a surrogate pair") from None
        return list(self.tokenizer.encode(text, add_special_tokens=begins).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens among it."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class Chat:
    """A conversation with an exported model.

    Its cache is kept from turn to turn: only what is new, or what the template renders otherwise than before, is run.
    A reply is kept as its tokens. Where the template renders an earlier reply otherwise (many leave out its reasoning),
    the template decides. A reply that the template refuses (gpt-oss' with its channels) is kept as it came.
    Without a template a message follows the reply before it as it is. Where the context is full, whole turns are
    dropped from the oldest on, and what is left is run again. A system prompt stays.

    Args:
        model: what generates.
        text: None is that of the model's folder.
        cache: from Generator.cache or load_cache, of which messages take what they begin with; None: an empty one.

    Attributes:
        messages: of the conversation so far, as a chat template takes them; special tokens are part of their text.
        last: the tokens of the last reply, and how long they took. kept: tokens of the cache that it followed.
        dropped: turns that were dropped for the last reply.

    Raises:
        ModelError: as Text.
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
        """The model's answer, in pieces as they come; what came of it is part of the conversation when it is left.

        Args:
            message: what the user says.
            max_new_tokens: at most so many. Turns are dropped until these have room, or a quarter of the context.
            stop: strings before which the answer ends; they are no part of it.
            sampling: None takes the likeliest token.

        Raises:
            OptionError: the message is no text; as Generator.stream.
            ContextError: the message alone is too long; the conversation stays what it was.
            ModelError: as Generator.stream; the template refuses the messages.
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
        """Token ids of a conversation, and with a template their text; tokens that were run stay what they were."""
        own = self.text
        if own.template is None:
            return own.encode(messages, self._ids), ""
        text = self._render(messages)
        if not text.startswith(self._run):
            return own.ids(text), text
        return self._ids + own.ids(text.removeprefix(self._run)), text

    def _prompt_alone(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], str]:
        """Token ids of a conversation of which nothing was run, and with a template their text."""
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
    """Whether it has a role and a content of this type."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), content)


def _without_oldest_turn(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return messages without the first that is no system prompt, and what follows it up to the next of the user; []
    where there is no next."""
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
    """Replies to prompts, all of them run together.

    Args:
        prompts: token ids of each, from :meth:`Text.encode`.
        stop: as of :meth:`Chat.reply`; what ends one reply ends no other.
        progress: as ``Batch.progress``.

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
    """Text of tokens as they come: whole characters, and nothing that may be the beginning of a stop string.

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
        """The text of these tokens, which are asked for until a stop string comes."""
        for id in ids:
            if piece := self.push(id):
                yield piece
            if self.stopped:
                return
        if piece := self.end():
            yield piece

    def push(self, id: int) -> str:
        """What one more token adds: nothing while a character, or a stop string, may not be whole."""
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
        """What was held back: there are no more tokens."""
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
