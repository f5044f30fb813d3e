"""Text in, text out: the folder's tokenizer and chat template around a Generator."""

from __future__ import annotations

import inspect
import reprlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Generator as Generation
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from quantmoe.exporter.errors import ModelError, OptionError, need_path
from quantmoe.exporter.folder.chat_template import load_template
from quantmoe.exporter.folder.reply_formats import FORMATS
from quantmoe.exporter.folder.sampling_options import Sampling, folder_sampling
from quantmoe.exporter.folder.tokenizer import load_tokenizer, stop_tokens
from quantmoe.runtime.batch import Batch
from quantmoe.runtime.cache import TAIL, Cache
from quantmoe.runtime.choosing.constraint import Constraint, Grammar, Vocabulary
from quantmoe.runtime.choosing.reply_parser import Delta, ReplyParser
from quantmoe.runtime.choosing.required_calls import required_calls
from quantmoe.runtime.generate import ANOTHER, Generated, Generator
from quantmoe.runtime.opened_model import need_count

T = TypeVar("T")
#: tokens at the end of a prompt that may open reasoning
PROMPT_END = 64
#: variables of a chat template that messages and tools give
GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class TemplateArguments:
    """Arguments of a chat template beside the messages.

    Attributes:
        tools: functions that the model may call, as OpenAI's API has them: dicts with ``type`` and ``function``.
        tool_choice: "auto": the model decides. "none": the template gets no tools. "required": the answer calls one of
            the tools. Another text is the name of the tool that the answer calls.
        variables: what else the template reads, as ``enable_thinking``.

    Raises:
        OptionError: a value of another type.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str = "auto"
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tools = self.tools
        if tools is not None and (isinstance(tools, str | Mapping) or not all(map(_is_tool, tools))):
            raise OptionError(
                f'tools is {reprlib.repr(tools)}, expected a list of {{"type": "function", "function": {{"name": ..}}}}'
            )
        known = ["auto", "none", *(["required", *(tool["function"]["name"] for tool in tools)] if tools else [])]
        if self.tool_choice not in known:
            raise OptionError(f"tool_choice is {self.tool_choice!r}, expected one of: {', '.join(known)}")
        if not isinstance(self.variables, Mapping) or not all(isinstance(name, str) for name in self.variables):
            raise OptionError(f"variables is {self.variables!r}, expected names and values of a template's variables")
        if found := sorted(GIVEN & self.variables.keys()):
            raise OptionError(f"variables has {found[0]}, which messages and tools give; expected other names")

    @property
    def required(self) -> list[Mapping[str, Any]]:
        """Return the tools that the answer must choose from."""
        if self.tool_choice in ("auto", "none"):
            return []
        return [tool for tool in self.tools or () if self.tool_choice in ("required", tool["function"]["name"])]

    def rendered_with(self) -> dict[str, Any]:
        """Return what the template is rendered with."""
        tools = None if self.tool_choice == "none" or not self.tools else [*self.tools]
        return {"tools": tools, **self.variables}


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
        #: how replies are written
        self.format = FORMATS[-1] if self.template is None else self.template.format
        self._vocabulary: Vocabulary | None = None

    def encode(
        self, messages: Sequence[dict[str, Any]], before: Sequence[int] = (), arguments: TemplateArguments | None = None
    ) -> list[int]:
        """Return the token ids of a conversation that ends with a message.

        Args:
            messages: dicts with the texts ``role`` and ``content``; the last one is the new message.
            before: without a template, the ids of the text before that message.
            arguments: tools and other arguments of the template.

        Raises:
            OptionError: messages are something else, or there is no template for ``arguments``.
            ModelError: the template refuses the messages, or a message has half of a surrogate pair.
        """
        content = str | None if self.template else str  # None: a message of tool calls
        if not isinstance(messages, Sequence) or not messages or not all(_is_message(m, content) for m in messages):
            raise OptionError(
                f"messages is {reprlib.repr(messages)}, expected at least one message, each with the texts role and "
                "content"
            )
        if self.template:
            return self.ids(self.template.render(messages, **(arguments or TemplateArguments()).rendered_with()))
        self.check_arguments(arguments)
        return [*before, *self.ids(messages[-1]["content"], begins=not before)]

    def check_arguments(self, arguments: TemplateArguments | None) -> None:
        """Check that a template takes ``arguments``.

        Raises:
            OptionError: there is none.
        """
        if self.template is None and arguments not in (None, TemplateArguments()):
            raise OptionError(
                "tools and variables need a chat template, and the model has none: describe tools in the prompt, or "
                "put a chat_template.jinja into the folder"
            )

    def ids(self, text: str, begins: bool = False) -> list[int]:
        """Return the token ids of a text; with ``begins``, also the special tokens at the begin of a text.

        Raises:
            ModelError: it has half of a surrogate pair.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ModelError(f"the prompt has {text[error.start]!a}, half of a surrogate pair") from None
        # encode holds Python's lock, for seconds in a long text: encode_batch does not
        return list(self.tokenizer.encode_batch([text], add_special_tokens=begins)[0].ids)

    def parser(self, ids: Sequence[int], arguments: TemplateArguments | None = None) -> ReplyParser:
        """Return what divides the reply to a prompt of these token ids into its parts."""
        return ReplyParser(self.format, self.decode(ids[-PROMPT_END:]), (arguments or TemplateArguments()).tools)

    def constraint(self, grammar: Grammar, ids: Sequence[int], vocabulary: int | None = None) -> Constraint:
        """Return which tokens may follow a prompt of these token ids, if the answer follows a grammar.

        Args:
            vocabulary: tokens that have logits, as ``Generator.vocabulary``; None: all of the tokenizer.

        Raises:
            OptionError: no token ends an answer.
        """
        size = vocabulary or self.tokenizer.get_vocab_size()
        if self._vocabulary is None or self._vocabulary.size != size:
            self._vocabulary = Vocabulary(self.tokenizer, size, self.stop)
        return Constraint(grammar, self._vocabulary, self.format, self.decode(ids[-PROMPT_END:]))

    def calls(self, arguments: TemplateArguments) -> Grammar | None:
        """Return the rule of the calls that ``tool_choice`` requires; None: it requires none.

        Raises:
            OptionError: calls of this template cannot be required.
        """
        if not arguments.required or self.template is None:
            return None
        return required_calls(self.template, arguments.required, self.tokenizer, self.stop)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


class Chat:
    """A conversation with an exported model.

    The KV cache is kept between messages, so only new text is run. A reply is kept as its tokens. If the template
    renders an earlier reply differently (many templates leave out its reasoning), that text is run again. A reply that
    the template refuses is kept as it came. Without a template each message follows the reply before it.

    If the context is full, the oldest messages and their replies are dropped, and the rest is run again. A system
    prompt stays.

    Args:
        model: the Generator that answers.
        text: tokenizer and template; None: from the model's folder.
        cache: a cache of Generator.cache or load_cache. Messages reuse the tokens with which they begin. None: an empty
            cache.
        arguments: tools and other arguments of the template, for all replies.

    Attributes:
        messages: the conversation so far, as chat templates take it. A reply has ``content``, and perhaps
            ``reasoning_content`` and ``tool_calls``.
        sampling: what generation_config.json says; None: the likeliest token.
        last: tokens and time of the last reply.
        kept: tokens of the cache that the last reply reused.
        dropped: messages, with their replies, that were dropped for the last reply.

    Raises:
        ModelError: there is no tokenizer.json, or a file is damaged.
        OptionError: ``model`` is no Generator, or there is no chat template for ``arguments``.
    """

    def __init__(
        self,
        model: Generator,
        text: Text | None = None,
        cache: Cache | None = None,
        arguments: TemplateArguments | None = None,
    ):
        if isinstance(model, str | Path):
            raise OptionError(f"model is {reprlib.repr(model)}, expected a Generator, as quantmoe.Generator(folder)")
        self.model, self.cache = model, cache or model.cache()
        self.text = text or Text(model.path.parent)
        self.text.check_arguments(arguments)
        self.cache.tail = TAIL
        self.arguments = arguments or TemplateArguments()
        self.sampling = folder_sampling(model.path.parent)
        self.messages: list[dict[str, Any]] = []
        self.last: Generated | None = None
        self.kept = self.dropped = 0
        #: what was run, and the text of it
        self._ids: list[int] = []
        self._run = ""
        #: messages, ``_ids`` and ``_run`` before the last answer, and the messages that it answers
        self._before: tuple[list[dict[str, Any]], list[int], str, list[dict[str, Any]]] | None = None
        self._answering: weakref.ref[_Pieces[Any]] | None = None

    def reply(
        self,
        message: str | Sequence[dict[str, Any]],
        max_new_tokens: int = 512,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
        grammar: Grammar | None = None,
    ) -> Iterator[str]:
        """Yield the text of the model's answer in pieces, as they come, with reasoning, calls and special tokens.

        The pieces that came are part of the conversation, also if you stop early. The next reply ends this one.

        Args:
            message: the user's text; or messages, as the results of tools.
            max_new_tokens: most tokens of the answer. Old messages are dropped until there is room for these tokens, or
                for a quarter of the context.
            stop: strings that end the answer; they are not part of it.
            sampling: how tokens are chosen; None: :attr:`sampling`.
            grammar: the rule that the answer follows, after its reasoning.

        Raises:
            OptionError: the message is no text, or another argument has a wrong type or value.
            ContextError: the message alone is too long; the conversation does not change.
            ModelError: the template refuses the messages, Generator.stream fails, or the next reply was begun.
        """
        return self._answer(
            message,
            max_new_tokens,
            stop,
            sampling=sampling,
            grammar=grammar,
            give=lambda piece, deltas: [piece] if piece else [],
        )

    def deltas(
        self,
        message: str | Sequence[dict[str, Any]],
        max_new_tokens: int = 512,
        stop: Sequence[str] = (),
        sampling: Sampling | None = None,
        grammar: Grammar | None = None,
    ) -> Iterator[Delta]:
        """Yield reasoning, content and tool calls of the model's answer, as they come.

        Arguments and errors are :meth:`reply`'s.
        """
        return self._answer(
            message, max_new_tokens, stop, sampling=sampling, grammar=grammar, give=lambda piece, deltas: deltas
        )

    def clear(self) -> None:
        """Begin a new conversation. System prompts stay."""
        self._end_answer()
        self.messages = [message for message in self.messages if _is_system(message)]
        self._ids, self._run, self._before = [], "", None

    def set_system(self, content: str | None) -> None:
        """Replace the system prompt; None: remove it.

        Raises:
            OptionError: there is no chat template, or the prompt is no text.
        """
        if not isinstance(content, str | None):
            raise OptionError(f"content is {content!r}, expected text")
        if self.text.template is None:
            raise OptionError("a system prompt needs a chat template: without one, put it into the first message")
        self._end_answer()
        system = [] if content is None else [{"role": "system", "content": content}]
        self.messages = system + [message for message in self.messages if not _is_system(message)]

    def undo(self) -> list[dict[str, Any]]:
        """Remove the last answer and the messages that it answers.

        Returns:
            Those messages, which :meth:`reply` takes; none if there is no answer.
        """
        self._end_answer()
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not users or self.messages[-1]["role"] != "assistant":
            return []
        if self._before is None:  # messages that were given
            self.messages, added = self.messages[: users[-1]], self.messages[users[-1] : users[-1] + 1]
            self._ids, self._run = [], ""
            return added
        system = [message for message in self.messages if _is_system(message)]
        messages, self._ids, self._run, added = self._before
        self.messages = system + [message for message in messages if not _is_system(message)]
        self._before = None
        return added

    def _answer(
        self,
        message: str | Sequence[dict[str, Any]],
        max_new_tokens: int,
        stop: Sequence[str],
        *,
        sampling: Sampling | None,
        grammar: Grammar | None,
        give: Callable[[str, list[Delta]], list[T]],
    ) -> Iterator[T]:
        added = [{"role": "user", "content": message}] if isinstance(message, str) else message
        if not isinstance(added, Sequence) or not added or not all(_is_message(m, str | None) for m in added):
            raise OptionError(f"message is {reprlib.repr(message)}, expected text, or messages with role and content")
        need_count("max_new_tokens", max_new_tokens)
        with self.cache.gate:
            self._end_answer()
            pieces = _Pieces(
                self.cache.gate, self._begin(added, max_new_tokens, stop, sampling=sampling, grammar=grammar, give=give)
            )
            self._answering = weakref.ref(pieces)
            return pieces

    def _end_answer(self) -> None:
        """End an answer that was left. The pieces that came are part of the conversation."""
        left = None if self._answering is None else self._answering()
        if left is not None:
            left.end()

    def _begin(
        self,
        added: Sequence[dict[str, Any]],
        max_new_tokens: int,
        stop: Sequence[str],
        *,
        sampling: Sampling | None,
        grammar: Grammar | None,
        give: Callable[[str, list[Delta]], list[T]],
    ) -> Generation[T, None, None]:
        own = self.text
        before = (self.messages, self._ids, self._run, [*added])
        asked, ids, rendered = self._fit([*self.messages, *added], max_new_tokens)
        self._before = before
        self.kept = self.cache.keep(ids)
        if calls := own.calls(self.arguments):
            if grammar is not None:
                raise OptionError(f"grammar does not go with tool_choice {self.arguments.tool_choice!r}; expected auto")
            grammar = calls
        rule = None if grammar is None else own.constraint(grammar, ids, self.model.vocabulary)
        self.last = found = self.model.stream(
            ids[self.kept :],
            max_new_tokens,
            own.stop,
            sampling=sampling or self.sampling,
            cache=self.cache,
            constraint=rule,
        )
        text = TextStream(own.tokenizer, stop, () if own.template else ids, special=True)
        return self._pieces(asked, ids, rendered, found=found, text=text, give=give)

    def _pieces(
        self,
        asked: list[dict[str, Any]],
        ids: list[int],
        rendered: str,
        *,
        found: Generated,
        text: TextStream,
        give: Callable[[str, list[Delta]], list[T]],
    ) -> Generation[T, None, None]:
        own, said, parser = self.text, "", self.text.parser(ids, self.arguments)
        try:
            for piece in text.pieces(token for token in found if token not in own.stop):
                said += piece
                yield from give(piece, parser.push(piece))
            yield from give("", parser.end())
        finally:
            parser.end()  # if the caller stopped early
            if text.stopped:
                found.finish_reason = "stop"
            self.messages = [*asked, parser.reply.message()]
            tokens = [token for token in found.tokens if token not in own.stop]
            while own.template and not said.startswith(own.decode(tokens)):  # a stop string's, or half of a character's
                tokens.pop()
            self._ids, self._run = ids + tokens, rendered + own.decode(tokens)

    def _fit(self, messages: list[dict[str, Any]], max_new_tokens: int) -> tuple[list[dict[str, Any]], list[int], str]:
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

    def _prompt(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], str]:
        """Return the token ids of a conversation, and with a template their text; tokens that were run stay."""
        own = self.text
        if own.template is None:
            return own.encode(messages, self._ids), ""
        text = self._render(messages)
        if not text.startswith(self._run):
            return own.ids(text), text
        return self._ids + own.ids(text.removeprefix(self._run)), text

    def _prompt_alone(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], str]:
        """Return the token ids of a new conversation, and with a template their text."""
        if self.text.template:
            text = self._render(messages)
            return self.text.ids(text), text
        ids: list[int] = []
        for message in messages:
            ids = self.text.encode([message], ids)
        return ids, ""

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        template, variables = self.text.template, self.arguments.rendered_with()
        assert template is not None
        try:
            return template.render(messages, **variables)
        except ModelError:
            if any(message.get("tool_calls") for message in messages):
                raise
            return template.render_kept(messages, **variables)


class _Pieces(Iterator[T]):
    """Pieces of an answer, as they come, until the conversation goes on without it.

    Args:
        gate: held by each step, so that threads wait for each other.
    """

    def __init__(self, gate: RLock, pieces: Generation[T, None, None]):
        self._gate, self._pieces, self._ended = gate, pieces, False

    def __next__(self) -> T:
        with self._gate:
            if self._ended:
                raise ModelError(ANOTHER)
            return next(self._pieces)

    def close(self) -> None:
        with self._gate:
            self._pieces.close()

    def end(self) -> None:
        """Refuse to go on, unless the answer is over."""
        with self._gate:
            self._ended |= inspect.getgeneratorstate(self._pieces) != inspect.GEN_CLOSED
            self._pieces.close()


def _is_message(message: Any, content: Any) -> bool:
    """Return whether ``message`` has a role, and a content of this type."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), content)


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _is_tool(tool: Any) -> bool:
    return isinstance(tool, Mapping) and isinstance((tool.get("function") or {}).get("name"), str)


def _without_oldest_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the oldest message after the system prompts and without its replies.

    The next message of the user begins the rest; without one the result is [].
    """
    first = next(i for i, message in enumerate(messages) if not _is_system(message))
    users = (i for i, message in enumerate(messages) if message["role"] == "user" and i > first)
    following = next(users, None)
    return [] if following is None else messages[:first] + messages[following:]


def answers(
    model: Generator,
    text: Text,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 512,
    stop: Sequence[str] = (),
    sampling: Sampling | None = None,
    grammar: Grammar | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[str], Batch]:
    """Return replies to prompts that run together in one batch.

    Args:
        prompts: token ids of each, from :meth:`Text.encode`.
        stop: strings that end a reply, for each reply on its own.
        grammar: the rule that each reply follows.
        progress: called as ``Batch.progress``.

    Returns:
        The replies in the prompts' order, and the batch that has run.

    Raises:
        ModelError: as Generator.stream_batch.
    """
    streams = [TextStream(text.tokenizer, stop, () if text.template else ids, special=True) for ids in prompts]
    rules = [] if grammar is None else [text.constraint(grammar, ids, model.vocabulary) for ids in prompts]
    said, batch = [""] * len(prompts), model.stream_batch(prompts, max_new_tokens, text.stop, sampling, rules)
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
        if not self._stop:
            return text
        text, self._held = self._held + text, ""
        if self.stopped:
            return ""
        if found := [at for stop in self._stop if (at := text.find(stop)) >= 0]:
            self.stopped = True
            return text[: min(found)]
        ends = (
            len(text) - n
            for stop in self._stop
            for n in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:n])
        )
        at = min(ends, default=len(text))
        self._held = text[at:]
        return text[:at]
