"""The first program of each language's guide, built against the package, on the demo's folder: `make test-guides`."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from other_languages import CARGO, ROOT, cmake, quantmoe, run

MOST_LINES = 20
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>first</groupId>
  <artifactId>first</artifactId>
  <version>1</version>
  <properties>
    <maven.compiler.source>17</maven.compiler.source>
    <maven.compiler.target>17</maven.compiler.target>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <dependencies>
DEPENDENCIES
  </dependencies>
</project>
"""


def block(guide: str, language: str) -> str:
    """Return the first block of a language in a guide, with the paths of this machine."""
    text = (ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8")
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found, f"docs/guides/{guide}.md has no block of {language}"
    return found[1].replace("/path/to/quantmoe", str(ROOT)).replace("OUTDIR", os.environ["QUANTMOE_MODEL"])


def python(folder: Path) -> str:
    return run(sys.executable, folder / "main.py")


def csharp(folder: Path) -> str:
    packages = f"<RestorePackagesPath>{ROOT}/build/nuget/packages</RestorePackagesPath></PropertyGroup>"
    project = block("csharp", "xml").replace("/path/to/dist", f"{ROOT}/dist").replace("</PropertyGroup>", packages)
    (folder / "First.csproj").write_text(project, encoding="utf-8")
    return run("dotnet", "run", "--project", folder)


def cpp(folder: Path) -> str:
    (folder / "CMakeLists.txt").write_text(block("cpp", "cmake"), encoding="utf-8")
    cmake(folder, folder / "build")
    return run(folder / "build/app")


def rust(folder: Path) -> str:
    (folder / "src").mkdir()
    (folder / "main.rs").rename(folder / "src/main.rs")
    package = '[package]\nname = "first"\nversion = "1.0.0"\nedition = "2021"\n\n'
    (folder / "Cargo.toml").write_text(package + block("rust", "toml"), encoding="utf-8")
    shutil.copy(ROOT / "packages/rust/Cargo.lock", folder)
    return run("cargo", "run", "--quiet", "--manifest-path", folder / "Cargo.toml", **CARGO)


def java(folder: Path) -> str:
    """Build in a Maven project of Java 17, whose dependencies are the guide's."""
    sources = folder / "src/main/java"
    sources.mkdir(parents=True)
    (folder / "Main.java").rename(sources / "Main.java")
    (folder / "pom.xml").write_text(POM.replace("DEPENDENCIES", block("java", "xml")), encoding="utf-8")
    copy = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"  # that of samples/java
    run("mvn", "-q", "-B", "-f", folder / "pom.xml", "compile", copy)
    classes = f"{folder}/target/classes:{folder}/target/dependency/*"
    return run("java", "-cp", classes, "Main")


#: a guide, the language of its blocks, the program's file, what must stand on this machine, and what runs it
GUIDES: dict[str, tuple[str, str, str, Callable[[Path], str]]] = {
    "python": ("python", "main.py", "python", python),
    "csharp": ("csharp", "Program.cs", "dotnet", csharp),
    "cpp": ("cpp", "main.cc", "cargo", cpp),
    "java": ("java", "Main.java", "mvn", java),
    "rust": ("rust", "main.rs", "cargo", rust),
}


@pytest.mark.parametrize("guide", GUIDES)
def test_first_program(guide: str, tmp_path: Path) -> None:
    """It has at most 20 lines without comments and blank lines, and prints what `quantmoe generate` prints."""
    language, name, command, start = GUIDES[guide]
    if not shutil.which(command):
        pytest.skip(f"needs {command}")
    program = block(guide, language)
    lines = [line for line in program.splitlines() if line.strip() and not re.match(r"\s*(//|#(?!include))", line)]
    assert len(lines) <= MOST_LINES, f"docs/guides/{guide}.md: {len(lines)} lines, expected at most {MOST_LINES}"
    prompt = re.search(r'[rR]eply(?:Async)?\(\s*"(.*?)"', program)
    assert prompt
    (tmp_path / name).write_text(program, encoding="utf-8")
    expected = quantmoe("generate", os.environ["QUANTMOE_MODEL"], "--prompt", prompt[1], "--temperature", "0")
    assert start(tmp_path).strip() == expected.strip()
