"""What a reader stumbles over, counted: long sentences, phrases that look back, first words of docstrings.

Pages, docstrings, raised messages, help, and comments of C++.

``python tests/house/test_style.py FILE ..`` prints the faults of files.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parents[2]
PACKAGES = ("exporter", "custom_ops", "ort_ext", "trt_plugins")
FOUND = [*ROOT.glob("*.md"), *(p for d in ("docs", "samples", "packages", *PACKAGES) for p in (ROOT / d).rglob("*.md"))]
PAGES = [page for page in FOUND if not page.read_text(encoding="utf-8").startswith("<!-- made by")]
SOURCES = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
CPP = ("custom_ops/include", "custom_ops/ops", "custom_ops/src", "ort_ext", "trt_plugins", "packages/cpp/include")
CPP_ENDS = (".h", ".cc", ".cu", ".cuh", ".def", ".inc")
CPP_SOURCES = [path for folder in CPP for path in (ROOT / folder).rglob("*.*") if path.suffix in CPP_ENDS]
#: words in a sentence, in a page's sentences on average, of an option's help; numbers in a sentence; bytes of a guide
WORDS, MEAN, HELP, NUMBERS, GUIDE = 25, 15, 12, 2, 8192
BACK = r"that of|those of|those which|the latter|the former|of which|but (for|in|with)|the same(?=[.,;:)]|$)"
BANNED = re.compile(rf"\b({BACK}|no longer|until lately|earlier (version|release)s?|we)\b", re.I)
#: a range and a list of values are one number; dates and versions are names
NUMBER = re.compile(r"(?<![\w./-])(\d[\d.]*(, | to | or | and |, (or|and) ))*\d[\d.]*(,\d{3})*(?![\w-])")
NAME = re.compile(r"\d+ [A-Z]\w+ 20\d\d|\b([A-Z][\w.+#-]*|section|version|commit) \d[\w.]*")
#: a function's docstring begins with a verb ("Return ..."), a class's with a noun phrase
NO_NOUN = "of|see|like|as|same|what|whether|how|when|where|if|in|on|for|with|from"
NO_VERB = f"{NO_NOUN}|the|a|an|it|its|this|that|these|those|all|each|every|one|no|which|who|[a-z]+[^su]s"


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, list items and cells, without code, links and headings."""
    text = re.sub(r"^( *)(```+|~~~).*?^\1\2 *$|<!--.*?-->|^#.*?$", "", text, flags=re.S | re.M)
    text = re.sub(r"(`+)[^`]+\1", "x", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|] ?|\d+\. |[a-z_]+: ))", text):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            yield from re.split(r"(?<=[.!?])[\"')*]*\s+", " ".join(cell.split()))


def prose(text: str) -> Iterator[str]:
    for sentence in sentences(text):
        if (count := len(re.findall(r"\S*\w\S*", sentence))) > WORDS:
            yield f"{count} words: {sentence}"
        if found := BANNED.search(sentence):
            yield f"{found[0]!r}: {sentence}"


def page(path: Path, text: str) -> Iterator[str]:
    yield from prose(text)
    if path.match("docs/guides/*") and len(text.encode()) > GUIDE:
        yield f"{len(text.encode())} bytes"
    if "lab" not in path.parts and "custom_ops" not in path.parts:  # measurements and the file format are numbers
        whole = [s for s in sentences(re.sub(r"(?m)^\s*\|.*$", "", text)) if s.endswith((".", ":"))]
        yield from (f"numbers: {s}" for s in whole if len(NUMBER.findall(NAME.sub("", s))) > NUMBERS)
        if (mean := sum(len(s.split()) for s in whole) / max(1, len(whole))) > MEAN:
            yield f"{mean:.1f} words a sentence"


def source(text: str) -> Iterator[str]:
    """Yield the faults of docstrings and of raised messages."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Raise):
            strings = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            yield from (f"{node.lineno}: {fault}" for fault in prose(" x ".join(strings)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (doc := ast.get_docstring(node)):
            line, first = getattr(node, "lineno", 1), re.split(r"\W", doc.lower(), maxsplit=1)[0]
            verb = isinstance(node, ast.FunctionDef) and "property" not in "".join(
                map(ast.unparse, node.decorator_list)
            )
            if re.fullmatch(NO_VERB if verb else NO_NOUN, first):
                yield f"{line}: first word {first!r}"
            yield from (f"{line}: {fault}" for fault in prose(doc))


def cpp(text: str) -> Iterator[str]:
    """Yield the faults of comments. A comment goes on in its column. Its indented lines are an item's or a drawing."""
    found: list[tuple[int, str]] = []
    for line in text.splitlines():
        comment = re.search(r"(?<!:)// ?(.*)$", line)
        if comment and not line[: comment.start()].strip() and found and comment.start() == found[-1][0]:
            found[-1] = (comment.start(), f"{found[-1][1]}\n{comment[1]}")
        else:
            found.append((comment.start(), comment[1]) if comment else (-1, ""))
    for _, comment in found:
        items = re.sub(r"(?m)^(-|\d\.) .*(\n {2,3}\S.*)+", lambda item: " ".join(item[0].split()), comment)
        yield from prose(re.sub(r"(?m)^ {2,}.*$", "\n", items))


def faults(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return [*(page(path, text) if path.suffix == ".md" else source(text) if path.suffix == ".py" else cpp(text))]


@pytest.mark.parametrize("path", [*PAGES, *SOURCES, *CPP_SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_file(path: Path) -> None:
    assert (found := faults(path)) == [], "\n".join(found)


def test_many_fields_are_given_by_name() -> None:
    """Dataclasses take at most five fields by position; ruff counts the arguments of functions (PLR0917)."""

    def by_position(node: ast.ClassDef) -> int:
        fields = [ast.unparse(field.annotation) for field in node.body if isinstance(field, ast.AnnAssign)]
        return fields.index("KW_ONLY") if "KW_ONLY" in fields else len(fields)

    seen, found = 0, []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
            if isinstance(node, ast.ClassDef) and any("dataclass" in one for one in made):
                seen += 1
                if not any("kw_only=True" in one for one in made) and by_position(node) > 5:
                    found.append(f"{path}: {node.name}")
    assert seen > 80
    assert found == []


def test_long_functions_say_why() -> None:
    """A function of more than 60 lines has the reason above it: ``# over 60 lines: ..``."""
    found, said = [], 0
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                reason = re.match(r" *# over \d+ lines: ..", lines[first - 2])
                said += reason is not None
                if not reason and (size := len(range(node.lineno, node.end_lineno or 0)) + 1) > 60:
                    found.append(f"{path}: {node.name} has {size} lines")
    assert said > 10
    assert found == []


def test_help() -> None:
    from quantmoe.benchmarks.bench import app as benches
    from quantmoe.exporter.cli import app

    apps = (typer.main.get_command(one) for one in (app, benches))
    commands = [command for one in apps for command in one.commands.values()]  # type: ignore[attr-defined]
    texts = [text for command in commands for p in command.params if (text := getattr(p, "help", None))]
    texts += [(command.help or "").split("\n\n")[0] for command in commands]
    assert len(texts) > 80
    assert [text for text in texts if len(text.split()) > HELP or [*prose(text)]] == []


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(*(f"{name}: {fault}" for fault in faults(Path(name).resolve())), sep="\n")
