"""A conversation at a terminal or over a pipe: messages, and commands that begin with a slash.

The conversation itself is ``Chat`` of ort_ext/runtime/chat.py.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantmoe.exporter.errors import ContextError, ModelError, OptionError

if TYPE_CHECKING:
    from quantmoe.exporter.commands.answer_settings import AnswerSettings
    from quantmoe.runtime.chat import Chat
    from quantmoe.runtime.choosing.reply_parser import Delta

#: what a terminal takes for dim and for plain letters
DIM, PLAIN = "\033[2m", "\033[0m"
#: begins and ends a message of several lines
QUOTES = '"""'
#: commands, as Ollama and llama.cpp name them, and what they do
COMMANDS = {
    "/clear": "begin a new conversation; the system prompt stays",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/regen": "answer the last message again",
    "/read FILE": "put the text of a file before the next message",
    "/set parameter NAME X": "change how tokens are chosen, as temperature 0.7; /show lists the names",
    "/set format json": "answer with JSON objects; /set noformat: with any text",
    "/set think, /set nothink": "turn reasoning on or off; /set think low, medium or high: choose how much",
    "/set nohistory": "forget the lines that follow; /set history: keep them",
    "/show": "show parameters and system prompt",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "read a conversation from a file",
    "/help, /?": "show this list",
    "/bye, /exit, /quit": "end; so does Ctrl-D",
    '"""': "begin and end a message of several lines",
    "\\": "at the end of a line: the message goes on",
}
#: what follows /set
SET = ("parameter NAME X", "system TEXT", "format json", "noformat", "think", "nothink", "history", "nohistory")


class Conversation:
    """Reads messages from standard input until it ends, and lets a model answer.

    In a terminal, Ctrl-C ends an answer, lines that begin with a slash are commands, and a message may have several
    lines. From a pipe, each line is a message.

    Args:
        chat: the conversation.
        reply: prints the answer of a chat to a message, with :meth:`AnswerSettings.options`.
        tell: prints an error.
        settings: how answers are made.
    """

    def __init__(self, chat: Chat, reply: Callable[..., None], tell: Callable[[str], None], settings: AnswerSettings):
        self._chat, self._reply, self._tell, self._settings = chat, reply, tell, settings
        #: text of a file, for the next message
        self._read_text = ""
        self._typed = sys.stdin.isatty()
        self._answered = True

    def run(self, message: str | None) -> bool:
        """Hold the conversation, which may begin with a message.

        Returns:
            Whether each message has an answer, or a person has seen why not.
        """
        if self._typed:
            from quantmoe.exporter.commands.terminal import edit_lines

            edit_lines()
            print("Ctrl-C ends a reply, Ctrl-D the conversation; /help lists commands", file=sys.stderr)
        elif isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # a message that is no text is named
        while True:
            try:
                message = message or self._read()
            except EOFError:
                return self._typed or self._answered
            except KeyboardInterrupt:
                if not self._typed:
                    raise
                print()
                continue
            if self._typed and re.match(r"/[a-z?]+(\s|$)", message):
                name, _, rest = message.strip().partition(" ")
                if name in ("/bye", "/exit", "/quit"):
                    return True
                self._command(name, rest.strip())
            elif message.strip():
                message, self._read_text = self._read_text + message, ""
                self._answer(message)
            message = None

    def _read(self) -> str:
        """Return a message: a line, lines between quotes, or lines that end with a backslash.

        Raises:
            EOFError: there is none.
        """
        if not self._typed:
            return input()
        from quantmoe.exporter.commands.terminal import keep_lines

        try:
            return self._typed_message()
        finally:
            keep_lines()

    @staticmethod
    def _typed_message() -> str:
        line = input("> ")
        if line.lstrip().startswith(QUOTES):
            lines = [line.lstrip().removeprefix(QUOTES)]
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(input("... "))
            return "\n".join(lines).rstrip().removesuffix(QUOTES)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(input("... "))
        return "\n".join(lines)

    def _answer(self, message: Any) -> None:
        shown = ModelError if self._typed else ContextError
        with contextlib.suppress(KeyboardInterrupt) if self._typed else contextlib.nullcontext():
            try:
                self._reply(self._chat, message, **self._settings.options())
            except shown as error:  # the conversation is what it was
                self._answered = False
                self._tell(str(error))

    def _command(self, name: str, rest: str) -> None:
        do = {"/clear": self._clear, "/system": self._system, "/regen": self._regenerate, "/save": self._save,
              "/load": self._load, "/read": self._read_file, "/set": self._set, "/show": self._show,
              "/help": self._help, "/?": self._help}.get(name)  # fmt: skip
        if do is None:
            return self._tell(f"{name} is no command; /help lists the commands")
        try:
            do(rest.strip("\"'"))
        except (ModelError, OptionError, OSError) as error:
            self._tell(str(error))

    def _clear(self, rest: str) -> None:
        self._chat.clear()

    def _system(self, rest: str) -> None:
        self._chat.set_system(rest or None)

    def _regenerate(self, rest: str) -> None:
        if added := self._chat.undo():
            self._answer(added)
        else:
            self._tell("/regen: there is no answer yet")

    def _save(self, rest: str) -> None:
        path = _file("/save", rest)
        if path.exists():
            _read_messages(path)  # another file is not replaced
        path.write_text(json.dumps({"messages": self._chat.messages}, ensure_ascii=False, indent=1), encoding="utf-8")

    def _load(self, rest: str) -> None:
        messages = _read_messages(_file("/load", rest))
        self._chat.clear()
        self._chat.messages = messages

    def _read_file(self, rest: str) -> None:
        path = _file("/read", rest)
        try:
            self._read_text += path.read_text(encoding="utf-8") + "\n"
        except UnicodeDecodeError:
            raise ModelError(f"{path}: expected text in UTF-8") from None

    def _set(self, rest: str) -> None:
        """Ollama's command."""
        what, _, rest = rest.partition(" ")
        name, _, value = rest.strip().partition(" ")
        if what == "parameter":
            self._settings.change(name, value.strip(" \"'"))
        elif what == "system":
            self._system(rest.strip(" \"'"))
        elif (what, name) == ("format", "json") or what == "noformat":
            self._settings.follow_json(what == "format")
        elif what in ("think", "nothink"):
            self._think(name or what == "think")
        elif what in ("history", "nohistory"):
            from quantmoe.exporter.commands.terminal import remember_lines

            remember_lines(what == "history")
        else:
            raise OptionError(f"/set {f'{what} {name}'.strip()}: expected one of: {', '.join(SET)}")

    def _think(self, value: str | bool) -> None:
        """Set the variable of the chat template for reasoning: Qwen's, DeepSeek's, or how much gpt-oss is to reason."""
        names = ["reasoning_effort"] if isinstance(value, str) else ["enable_thinking", "thinking"]
        template = self._chat.text.template
        found = next((name for name in names if template and name in template.variables()), None)
        if found is None:
            raise OptionError(f"this model's chat template has no {' or '.join(names)}: reasoning cannot be set")
        arguments = self._chat.arguments
        self._chat.arguments = replace(arguments, variables={**arguments.variables, found: value})

    def _show(self, rest: str) -> None:
        for name, value in self._settings.shown().items():
            print(f"  {name:20}{value}", file=sys.stderr)
        for message in self._chat.messages:
            if message["role"] == "system":
                print(f"  {'system':20}{message['content']}", file=sys.stderr)

    def _help(self, rest: str) -> None:
        for name, does in COMMANDS.items():
            print(f"  {name:26}{does}", file=sys.stderr)


def _file(command: str, name: str) -> Path:
    if not name:
        raise OptionError(f"{command}: expected the name of a file")
    return Path(name).expanduser()


def _read_messages(path: Path) -> list[dict[str, Any]]:
    """Return the messages of a saved conversation.

    Raises:
        ModelError: the file is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        messages = found["messages"]
        if all(isinstance(message["role"], str) and "content" in message for message in messages):
            return list(messages)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise ModelError(f"{path}: expected a conversation that /save wrote")


def shown(deltas: Iterable[Delta]) -> Iterator[str]:
    """Yield the parts of a reply as text for a terminal: reasoning is dim, and each tool call is a line."""
    before = ""
    for delta in deltas:
        part = "reasoning" if delta.reasoning else "content" if delta.content else f"call {delta.call}"
        if part != before:
            plain = PLAIN if before == "reasoning" else ""
            yield plain + ("\n\n" if before else "") + (DIM if part == "reasoning" else "")
        before = part
        yield delta.reasoning or delta.content or (f"{delta.name} " if delta.name else "") + delta.arguments
