"""The first program of each language's guide, built against the package, on the demo's folder: `make test-guides`."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from support.harness.other_languages import CARGO, ROOT, cmake, quantmoe, run
from tokenizers import Tokenizer

from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.formats import find_format, open_checkpoint

MOST_LINES = 20
#: onnxruntime-genai as NuGet's client unpacks it
GENAI = ROOT / "build/nuget/packages/microsoft.ml.onnxruntimegenai/0.18.0"


def block(guide: str, language: str) -> str:
    """Return the first block of a language in a guide, with the paths of this machine."""
    text = (ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8")
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found, f"docs/guides/{guide}.md has no block of {language}"
    paths = {"/path/to/quantmoe": ROOT, "/path/to/dist": ROOT / "dist", "/path/to/genai": GENAI}
    program = found[1]
    for named, here in paths.items():
        program = program.replace(named, str(here))
    return program


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start where they find the model as printed, as OUTDIR."""
    monkeypatch.chdir(tmp_path)


def python(folder: Path, _: str) -> str:
    return run(sys.executable, folder / "main.py")


def project(folder: Path, guide: str) -> None:
    packages = f"<RestorePackagesPath>{ROOT}/build/nuget/packages</RestorePackagesPath></PropertyGroup>"
    text = block("csharp", "xml").replace("</PropertyGroup>", packages)
    if guide == "genai":
        text = text.replace("</ItemGroup>", f"{block(guide, 'xml')}</ItemGroup>")
    (folder / "First.csproj").write_text(text, encoding="utf-8")


def csharp(folder: Path, guide: str) -> str:
    project(folder, guide)
    run("dotnet", "build", folder)  # prints warnings, which are not the program's
    return run("dotnet", "run", "--no-build", "--project", folder)


def cpp(folder: Path, guide: str) -> str:
    text = block("cpp", "cmake") + (block(guide, "cmake") if guide == "genai" else "")
    (folder / "CMakeLists.txt").write_text(text, encoding="utf-8")
    cmake(folder, folder / "build")
    return run(folder / "build/app")


def cpp_of_genai(folder: Path, guide: str) -> str:
    project(folder, guide)
    run("dotnet", "restore", folder)
    return cpp(folder, guide)


def rust(folder: Path, guide: str) -> str:
    (folder / "src").mkdir()
    (folder / "main.rs").rename(folder / "src/main.rs")
    package = '[package]\nname = "first"\nversion = "1.0.0"\nedition = "2021"\n\n'
    (folder / "Cargo.toml").write_text(package + block(guide, "toml"), encoding="utf-8")
    shutil.copy(ROOT / "packages/rust/Cargo.lock", folder)
    return run("cargo", "run", "--quiet", "--manifest-path", folder / "Cargo.toml", **CARGO)


def java(folder: Path, guide: str) -> str:
    sources = folder / "src/main/java"
    sources.mkdir(parents=True)
    (folder / "Main.java").rename(sources / "Main.java")
    (folder / "pom.xml").write_text(block(guide, "xml"), encoding="utf-8")
    command = re.search(r"^mvn (.*)", (ROOT / f"docs/guides/{guide}.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert command
    return run("mvn", *command[1].split()).replace("\x1b[0m", "")  # Maven resets colours, also in a file


def javascript(folder: Path, _: str) -> str:
    (folder / "node_modules").symlink_to(ROOT / "build/javascript/node_modules")
    return run("node", folder / "main.mjs")


def browser(folder: Path, _: str) -> str:
    script, modules = ROOT / "tests/packages/javascript/browser.mjs", ROOT / "build/javascript/node_modules"
    return run("node", script, modules, folder / "index.html", folder / "OUTDIR")


#: a guide, the language of its blocks, the program's file, what must stand on this machine, and what runs it
GUIDES: list[tuple[str, str, str, str, Callable[[Path, str], str]]] = [
    ("python", "python", "main.py", "python", python),
    ("csharp", "csharp", "Program.cs", "dotnet", csharp),
    ("cpp", "cpp", "main.cc", "cargo", cpp),
    ("java", "java", "Main.java", "mvn", java),
    ("rust", "rust", "main.rs", "cargo", rust),
    ("genai", "python", "main.py", "python", python),
    ("genai", "csharp", "Program.cs", "dotnet", csharp),
    ("genai", "cpp", "main.cc", "dotnet cargo", cpp_of_genai),
    ("javascript", "js", "main.mjs", "npm", javascript),
    ("javascript", "html", "index.html", "chromium", browser),
]


@pytest.mark.parametrize(
    ("guide", "language", "name", "commands", "start"), GUIDES, ids=[f"{of[0]}-{of[1]}" for of in GUIDES]
)
def test_first_program(
    guide: str, language: str, name: str, commands: str, start: Callable[[Path, str], str], tmp_path: Path
) -> None:
    """It has at most 20 lines without comments and blank lines, and prints what `quantmoe generate` prints."""
    for command in commands.split():
        if not shutil.which(command):
            pytest.skip(f"needs {command}")
    program = block(guide, language)
    lines = [line for line in program.splitlines() if line.strip() and not re.match(r"\s*(//|#(?!include))", line)]
    assert len(lines) <= MOST_LINES, f"docs/guides/{guide}.md: {len(lines)} lines, expected at most {MOST_LINES}"
    prompt = re.search(r'(?:[rR]eply(?:Async)?|[eE]ncode|generate)\(\s*"(.*?)"', program)
    assert prompt
    model = os.environ["QUANTMOE_BROWSER" if guide == "javascript" else "QUANTMOE_MODEL"]
    expected = quantmoe("generate", model, "--prompt", prompt[1], "--temperature", "0", *most_tokens(program))
    if guide == "genai":
        greedy(model, prompt[1], tmp_path / "OUTDIR")
    else:
        (tmp_path / "OUTDIR").symlink_to(model)
    (tmp_path / name).write_text(program, encoding="utf-8")
    assert start(tmp_path, guide).strip() == expected.strip()


def most_tokens(program: str) -> list[str]:
    """Return the option of `quantmoe generate` for a program that names its most tokens."""
    found = re.search(r"max_new_tokens: (\d+)", program)
    return ["--max-new-tokens", found[1]] if found else []


@pytest.mark.skipif(not shutil.which("chromium") or not shutil.which("npm"), reason="needs chromium and npm")
def test_webgpu(tmp_path: Path) -> None:
    """A prompt of one token on a GPU that is software: with more, onnxruntime-web's QMoE differs from run to run.

    QMoE rounds activations to int8 there, so the prompt was chosen: its two likeliest tokens are at least 0.1 apart
    in each step. Other prompts may get other tokens.
    """
    model = os.environ["QUANTMOE_BROWSER"]
    expected = quantmoe("generate", model, "--prompt", "king", "--temperature", "0", "--max-new-tokens", "16")
    page = block("javascript", "html")
    for old, new in {'device: "wasm"': 'device: "webgpu"', "The old house": "king", "tokens: 48": "tokens: 16"}.items():
        assert old in page
        page = page.replace(old, new)
    (tmp_path / "index.html").write_text(page, encoding="utf-8")
    (tmp_path / "OUTDIR").symlink_to(model)
    assert browser(tmp_path, "").strip() == expected.strip()


@pytest.mark.skipif(not shutil.which("npm"), reason="needs npm")
@pytest.mark.parametrize(("language", "name"), [("js", "main.mjs"), ("html", "index.html")])
def test_zero_points(language: str, name: str, zero_points: Path, tmp_path: Path) -> None:
    """Experts with zero points, which --quantize int4 writes, run in Node and in WebAssembly."""
    if language == "html" and not shutil.which("chromium"):
        pytest.skip("needs chromium")
    (tmp_path / "OUTDIR").symlink_to(zero_points)
    program = block("javascript", language)
    (tmp_path / name).write_text(program, encoding="utf-8")
    prompt = ("--prompt", "The old house", "--temperature", "0", *most_tokens(program))
    start = browser if language == "html" else javascript
    assert start(tmp_path, "javascript").strip() == quantmoe("generate", zero_points, *prompt).strip()


@pytest.fixture(scope="module")
def zero_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model in bf16, exported to int4 with zero points."""
    demo, folder = ROOT / "samples/demo_model/checkpoint", tmp_path_factory.mktemp("zero_points")
    dequantized(Skeleton(find_format(open_checkpoint(demo)))).bfloat16().save_pretrained(folder / "bf16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo / name, folder / "bf16")
    browser_options = ("--target", "ort", "--browser", "wasm")
    quantmoe("export", folder / "bf16", folder / "model", "--quantize", "int4", *browser_options)
    graph = ir.load(folder / "model/model.onnx").graph
    experts = [node for node in graph if node.op_type == "QMoE"]
    assert experts
    assert all(None not in node.inputs[11:13] and len(node.inputs) > 12 for node in experts)
    return folder / "model"


def test_samples_are_the_guide() -> None:
    """samples/javascript has the two programs of the guide."""
    for language, name in {"js": "generate.mjs", "html": "index.html"}.items():
        assert (ROOT / "samples/javascript" / name).read_text(encoding="utf-8") == block("javascript", language)


def greedy(model: str, prompt: str, copy: Path) -> None:
    """Copy a folder. The copy's genai_config.json takes the likeliest tokens, as many as `quantmoe generate`."""
    shutil.copytree(model, copy)
    file = copy / "genai_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    most = len(Tokenizer.from_file(f"{model}/tokenizer.json").encode(prompt).ids) + 512
    config["search"] |= {"do_sample": False, "max_length": most}
    file.write_text(json.dumps(config), encoding="utf-8")
