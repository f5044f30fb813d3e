"""Files of ids: what a tokenizer gives for each text, a line of fields with tabs between. Every language writes one.

The fields are the text, its ids with special tokens, its ids without them, the decoded text of the first ids without
special tokens, and the number of places where a stream that begins there is not the rest of the decoded text. Texts are
UTF-8 in base64, ids have spaces between. The expected file is AutoTokenizer's; its last field is 0.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from support.harness import other_languages

from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.runtime.chat import TextStream

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build/real"


class NotHereError(Exception):
    """The language does not stand on this machine."""


def fields(text: str, ids: Sequence[int], bare: Sequence[int], decoded: str, wrong: int = 0) -> str:
    one, other = (base64.b64encode(part.encode()).decode() for part in (text, decoded))
    return "\t".join([one, " ".join(map(str, ids)), " ".join(map(str, bare)), other, str(wrong)])


def of_transformers(auto: Any, texts: Sequence[str]) -> list[str]:
    """Return the lines of an AutoTokenizer."""
    with_special, without = (auto(texts, add_special_tokens=special)["input_ids"] for special in (True, False))
    return [
        fields(text, ids, bare, auto.decode(ids, skip_special_tokens=True))
        for text, ids, bare in zip(texts, with_special, without, strict=True)
    ]


def of_python(folder: Path, texts: Sequence[str]) -> list[str]:
    """Return the lines of `generate` and `Chat`."""
    tokenizer = load_tokenizer(folder)
    lines = []
    for text in texts:
        ids, bare = (tokenizer.encode(text, add_special_tokens=special).ids for special in (True, False))
        lines.append(fields(text, ids, bare, tokenizer.decode(ids), wrong_places(tokenizer, ids)))
    return lines


def wrong_places(tokenizer: Any, ids: Sequence[int]) -> int:
    """Return at how many places a stream that begins there is not the rest of the text."""
    whole = tokenizer.decode(ids)
    wrong = 0
    for cut in range(len(ids) + 1):
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        wrong += before + "".join(TextStream(tokenizer, after=ids[:cut]).pieces(ids[cut:])) != whole
    return wrong


def of_java(folder: Path, expected: Path) -> list[str]:
    """Return the lines of packages/java."""
    return _run(["java", "-cp", f"{_java()}/generate.jar:{_java()}/*", "Tokens", folder, expected])


def of_csharp(folder: Path, expected: Path) -> list[str]:
    """Return the lines of packages/nuget."""
    return _run(["dotnet", _csharp(), folder, expected])


def of_rust(folder: Path, expected: Path) -> list[str]:
    """Return the lines of packages/rust."""
    return _run([_rust(), folder, expected])


def of_cpp(folder: Path, expected: Path) -> list[str]:
    """Return the lines of packages/cpp."""
    return _run([_cpp(), folder, expected])


@cache
def _java() -> Path:
    """The project of samples/java, with the program here and QuantMoE's sources instead of its package."""
    if not (shutil.which("mvn") and shutil.which("javac")):
        raise NotHereError("no JDK with Maven here")
    project = BUILD / "java"
    shutil.rmtree(project / "src", ignore_errors=True)
    _copy(project / "src/main/java", [HERE / "programs/Tokens.java"])
    _copy(project / "src/main/java/quantmoe", (ROOT / "packages/java/src/main/java/quantmoe").glob("*.java"))
    pom = (ROOT / "samples/java/pom.xml").read_text(encoding="utf-8")
    pom, dropped = re.subn(
        r"\s*<dependency>\s*<groupId>io\.github\.quantmoe</groupId>.*?</dependency>", "", pom, flags=re.DOTALL
    )
    assert dropped == 1
    (project / "pom.xml").write_text(pom, encoding="utf-8")
    _run(["mvn", "-q", "-B", "-f", project / "pom.xml", "package"])
    return project / "target"


@cache
def _csharp() -> Path:
    """The program here with the package's sources."""
    if not shutil.which("dotnet"):
        raise NotHereError("no dotnet here")
    _cargo("--package", "quantmoe-text")
    artifacts = BUILD / "csharp"
    _run(["dotnet", "build", "-v", "q", "--artifacts-path", artifacts, HERE / "programs/csharp"])
    return artifacts / "bin/Tokens/debug/Tokens.dll"


@cache
def _rust() -> Path:
    """The program here with the crate."""
    _cargo("--package", "tokens")
    return ROOT / "build/rust/release/tokens"


@cache
def _cpp() -> Path:
    """The program here with the headers."""
    _cargo("--package", "quantmoe-text")
    other_languages.cmake(HERE / "programs/cpp", BUILD / "cpp")
    return BUILD / "cpp/tokens"


def _cargo(*arguments: str) -> None:
    if not shutil.which("cargo"):
        raise NotHereError("no cargo here")
    command = [
        "cargo",
        "build",
        "--quiet",
        "--release",
        "--locked",
        "--manifest-path",
        ROOT / "packages/rust/Cargo.toml",
    ]
    other_languages.run(*command, *arguments, **other_languages.CARGO)


def _copy(folder: Path, sources: Iterator[Path] | Sequence[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        shutil.copy(source, folder)


def _run(command: Sequence[str | Path]) -> list[str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


#: lines of a folder's tokenizer, from the folder and the expected file of ids
LANGUAGES: dict[str, Callable[[Path, Path], list[str]]] = {
    "Python": lambda folder, expected: of_python(folder, texts_of(expected)),
    "Java": of_java,
    "C#": of_csharp,
    "C++": of_cpp,
    "Rust": of_rust,
}


def texts_of(expected: Path) -> list[str]:
    lines = expected.read_text(encoding="utf-8").splitlines()
    return [base64.b64decode(line.split("\t")[0]).decode() for line in lines]
