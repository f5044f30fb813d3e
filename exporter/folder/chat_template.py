"""Chat templates, rendered as transformers does, and what of one a program without Jinja can do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from quantmoe.exporter.folder.json_files import is_there, read_object
from quantmoe.exporter.folder.reply_formats import reply_format
from quantmoe.exporter.folder.tokenizer import NAMED_TEMPLATES, special_tokens

#: jinja2 whose sandbox keeps what is known: templates are code of whoever made the checkpoint
OLDEST_JINJA = (3, 1, 6)
#: of processor time, and bytes, that rendering a template for its turns may take: templates take milliseconds
SECONDS, MEMORY = 5, 512 << 20
#: seconds by the clock, for a process that waits. On Windows, which limits no processor time, for all that one does
CLOCK = 600 if resource else 50
#: names that a message's reasoning may have
REASONING = ("reasoning_content", "thinking", "reasoning")


class Template:
    """A chat template, rendered as transformers does: in a sandbox, blocks trimmed, with its functions.

    Args:
        path: the file it is from, for errors.
        names: special tokens by their names, which templates use.
        tool_use: the template of conversations with tools, None for ``text``.

    Raises:
        ModelError: one is no Jinja template; jinja2 is too old.
    """

    def __init__(self, text: str, path: Path, names: dict[str, str], tool_use: str | None = None):
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < OLDEST_JINJA:
            oldest = ".".join(map(str, OLDEST_JINJA))
            raise ModelError(
                f"jinja2 is {jinja2.__version__}, expected {oldest} or newer; pip install 'jinja2>={oldest}'"
            )

        class Generation(Extension):
            """The block that marks what the model says; it is rendered as it stands."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def refuse(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes for HTML

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }
        self.path, self.names = path, names
        #: how replies are written
        self.format = reply_format(text + (tool_use or ""))
        #: whether it knows the role ``developer``; others drop such messages, or write the name as it stands
        self.knows_developer = "developer" in text
        self._text, self._environment = text, environment
        try:
            self._template = environment.from_string(text)
            self._tool_use = self._template if tool_use is None else environment.from_string(tool_use)
        except Exception as error:  # jinja2's, and those of Python's own compiler
            raise ModelError(f"{path}: {_words(error)}") from None

    def variables(self) -> set[str]:
        """Return the names that the template reads."""
        from jinja2.meta import find_undeclared_variables

        return find_undeclared_variables(self._environment.parse(self._text))

    def render(
        self, /, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """Return the conversation as text that the model continues with its answer.

        Args:
            messages: with their ``role`` and ``content``, and other fields that the template reads, as ``tool_calls``.
                Arguments of a call may be an object or its JSON text: the template gets what it takes.
            tools: JSON schemas of functions that the model may call.
            variables: what else the template reads, as ``enable_thinking``.

        Raises:
            ModelError: the template refuses the messages or fails, or the text has half of a surrogate pair.
        """
        inputs = {"tools": tools, "documents": None, "add_generation_prompt": True} | variables
        template = self._template if tools is None else self._tool_use
        refused: Exception | None = None
        for given in _attempts([*map(_as_given, messages)]):
            try:
                text = template.render(self.names | inputs, messages=given)
                text.encode()
                return text
            except Exception as error:  # whatever its expressions raise
                refused = refused or error
        assert refused is not None
        raise ModelError(f"{self.path}: {_words(refused)}") from None

    def render_kept(self, /, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """Return the conversation as text, with answers as they came: each after the prompt that it was given to.

        A template like gpt-oss' refuses an answer with its channels, and writes the header of a channel before others.

        Raises:
            ModelError: the template refuses the other messages, or does not render answers.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = self.render(messages[: answers[0]] if answers else messages, **variables)
        for i in answers:
            text += messages[i]["content"] + self._after_answer(messages[: i + 2], **variables)
        return text

    def _after_answer(self, /, messages: Sequence[dict[str, Any]], **variables: Any) -> str:
        """Return what is rendered after the last answer, whatever answers say."""
        mark = "[answer]"
        while any(mark in message["content"] for message in messages if message["role"] != "assistant"):
            mark = f"[{mark}]"
        marked = [m | {"content": mark} if m["role"] == "assistant" else m for m in messages]
        _, found, after = self.render(marked, **variables).rpartition(mark)
        if not found:
            raise ModelError(f"{self.path}: does not render answers as they are")
        return after

    def turns(self) -> dict[str, str]:
        """Return the text around messages, for programs that render no Jinja.

        A conversation is ``chat.begin`` + message + ``chat.reply``, then after each answer ``chat.next`` + message +
        ``chat.reply``. With a system prompt it begins with ``chat.system`` + prompt + ``chat.system_end`` instead of
        ``chat.begin``; those two are missing where the template takes none. Answers stay as the model gave them, where
        some templates leave out what it thought in earlier ones.

        Returns:
            Nothing where that is not what the template renders; a date that it writes is today's.
        """
        said = "user 1", "assistant 1", "user 2", "assistant 2", "user 3"
        one, two, three = (self._around(*said[:n]) for n in (1, 3, 5))
        if not (one and two and three):
            return {}
        begin, reply, earlier, following = *one, *two[1:3]
        if [two, three] != [[begin, *[earlier, following] * n, reply] for n in (1, 2)]:
            return {}
        found = {"chat.begin": begin, "chat.reply": reply, "chat.next": following}
        one, two = (self._around("system 1", *said[:n]) for n in (1, 3))
        if one and two == [*one[:2], earlier, following, reply] and one[2] == reply:
            found |= {"chat.system": one[0], "chat.system_end": one[1]}
        return found

    def _around(self, *said: str) -> list[str]:
        """Return what is rendered before, between and after messages. A message's first word is its role.

        [] if the template refuses the messages, renders one more than once or not at all, or changes their order.
        """
        try:
            rest, parts = self.render([{"role": text.split()[0], "content": text} for text in said]), []
        except ModelError:
            return []
        for text in said:
            if rest.count(text) != 1:
                return []
            before, rest = rest.split(text)
            parts.append(before)
        return [*parts, rest]


def _as_given(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: without nulls, reasoning under the names that they
    read."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning} | found | {"reasoning_content": reasoning}


def _attempts(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield messages in the forms that templates of tool calls take, transformers' own first.

    Arguments are objects or texts. A message without content has none, a null, or an empty text.
    """
    yield [_with_converted(message, _argument_object) for message in messages]
    if any(message.get("tool_calls") for message in messages):
        yield [_with_converted(message, _argument_text) for message in messages]
        for content in ({"content": None}, {"content": ""}):
            for convert in (_argument_object, _argument_text):
                yield [_with_converted(content | message, convert) for message in messages]


def _with_converted(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    functions = [(call, call.get("function", call)) for call in calls]
    converted = [(call, f | {"arguments": convert(f.get("arguments"))}) for call, f in functions]
    return message | {"tool_calls": [call | {"function": f} if "function" in call else f for call, f in converted]}


def _argument_object(given: Any) -> Any:
    """Return arguments as an object; a text that is no JSON object stays."""
    try:
        found = json.loads(given or "{}") if isinstance(given, str | None) else given
    except ValueError:
        return given
    return found if isinstance(found, dict) else given


def _argument_text(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)


def _words(error: Exception) -> str:
    """Return an error's text; Python's own say less than their names."""
    if isinstance(error, UnicodeEncodeError):
        return f"renders {error.object[error.start]!a}, half of a surrogate pair, which no tokenizer takes"
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def folder_turns(folder: Path) -> tuple[dict[str, str], str]:
    """Return the :meth:`Template.turns` of a folder's template, and why there are none, "" where it has no template.

    ``chat.format`` is the name of the format of replies, if it is known.

    A template is code of whoever made the checkpoint. So a process of its own renders it, within :data:`SECONDS` of
    processor time, :data:`MEMORY` bytes and :data:`CLOCK` seconds by the clock. Not every system has the first two.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-P", "-m", __name__, str(folder)]  # -P: nothing of the current folder
    file = folder / CHAT_TEMPLATE
    where = file if file.is_file() else folder / TOKENIZER_CONFIG
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=CLOCK)
        found, reason = json.loads(done.stdout)
        return found, reason
    except subprocess.TimeoutExpired:
        return {}, f"{where}: rendering takes longer than {CLOCK} s"
    except ValueError:  # it ended without a word
        if done.returncode == -getattr(signal, "SIGXCPU", 0):
            return {}, f"{where}: rendering takes longer than {SECONDS} s of processor time"
        return {}, f"{where}: rendering ended its process with status {done.returncode}"


def _turns(folder: Path) -> tuple[dict[str, str], str]:
    """Return what :func:`folder_turns` gives, from the process that it starts."""
    try:
        if (template := load_template(folder)) is None:
            return {}, ""
        format = {"chat.format": template.format.name} if template.format.name else {}
        if found := template.turns():
            return found | format, ""
        template.render([{"role": "user", "content": "user 1"}])
    except ModelError as error:
        return {}, str(error)
    return format, f"{template.path}: does more than put texts around messages"


def _limit() -> None:
    """Limit this process, as far as the system can."""
    if resource is None:
        return
    used = Path("/proc/self/statm")
    size = int(used.read_text(encoding="utf-8").split()[0]) * resource.getpagesize() if used.exists() else 0
    for kind, least in ((resource.RLIMIT_AS, size + MEMORY), (resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)):
        soft, hard = resource.getrlimit(kind)
        limits = [limit for limit in (least, soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(limits), hard))


def template_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder's chat templates by the templates' names.

    Raises:
        ModelError: a file is a link to nothing.
    """
    files = {"default": folder / CHAT_TEMPLATE} | {
        path.stem: path for path in sorted((folder / NAMED_TEMPLATES).glob("*.jinja"))
    }
    return {name: path for name, path in files.items() if is_there(path)}


def read_templates(folder: Path) -> dict[str, str]:
    """Return the texts of :func:`template_files`.

    Raises:
        ModelError: a file is no text in UTF-8.
    """
    found = {}
    for name, path in template_files(folder).items():
        try:
            found[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: {error}") from None
    return found


def load_template(folder: Path) -> Template | None:
    """Return the folder's chat template: one of :func:`template_files`, else of tokenizer_config.json, else None.

    Raises:
        ModelError: a file is not what it should be; there are templates with names, and none is "default".
    """
    found: Any = read_templates(folder)
    path = folder / (CHAT_TEMPLATE if "default" in found else NAMED_TEMPLATES)
    if not found:
        path = folder / TOKENIZER_CONFIG
        found = read_object(path).get("chat_template")
    if isinstance(found, list):
        found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
    tool_use = None
    if isinstance(found, dict):
        if "default" not in found:
            there = f"has the templates {', '.join(sorted(found))}" if found else "has no template"
            raise ModelError(
                f"{path}: chat_template {there}, expected one named default; write the one to use to "
                "chat_template.jinja, or leave it out with --raw"
            )
        found, tool_use = found["default"], found.get("tool_use")
    if found is None:
        return None
    for text in (found, tool_use):
        if not isinstance(text, str | None):
            raise ModelError(f"{path}: chat_template is {type(text).__name__}, expected text")
    return Template(found, path, special_tokens(folder), tool_use)


if __name__ == "__main__":
    import jinja2.sandbox  # noqa: F401  before the limits, as NumPy is

    _limit()
    print(json.dumps(_turns(Path(sys.argv[1]))))
