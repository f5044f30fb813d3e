"""Chat templates, rendered as transformers does, and what of one a program without Jinja can do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.reading.sampling import read_object

#: jinja2 whose sandbox keeps what is known: templates are code of whoever made the checkpoint
OLDEST_JINJA = (3, 1, 6)


class Template:
    """A chat template, rendered as transformers does: in a sandbox, blocks trimmed, with its functions.

    Args:
        path: the file it is from, for errors.
        names: special tokens by their names, which templates use.

    Raises:
        ModelError: it is no Jinja template; jinja2 is too old.
    """

    def __init__(self, text: str, path: Path, names: dict[str, str]):
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
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise ModelError(f"{path}: {error}") from None

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation as text that the model continues with its answer.

        Raises:
            ModelError: the template refuses the messages or fails.
        """
        inputs = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(self.names | inputs)
        except Exception as error:  # whatever its expressions raise
            raise ModelError(f"{self.path}: {error}") from None

    def turns(self) -> dict[str, str]:
        """The text around messages, for programs that render no Jinja.

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
        """What is rendered before, between and after messages, whose roles are their first words; [] where the template
        refuses them or renders one not just once, or in another order."""
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


def load_template(folder: Path) -> Template | None:
    """The folder's chat template: chat_template.jinja, else the one of tokenizer_config.json, else None.

    Raises:
        ModelError: a file is not what it should be.
    """
    path = folder / "chat_template.jinja"
    config = read_object(folder / "tokenizer_config.json")
    names = {}
    for name, token in (read_object(folder / "special_tokens_map.json") | config).items():
        if name.endswith("_token") and (text := token.get("content") if isinstance(token, dict) else token):
            names[name] = str(text)
    try:
        found = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: {error}") from None
    if not path.is_file():
        path = folder / "tokenizer_config.json"
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is None:
        return None
    if not isinstance(found, str):
        raise ModelError(f"{path}: chat_template is {type(found).__name__}, expected text")
    return Template(found, path, names)
