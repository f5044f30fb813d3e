"""samples/genai in C++ and C# print what chat.py prints, whose turns genai_chat.py compares with one prompt."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.harness.other_languages import ROOT, cmake, run

SAMPLES = ROOT / "samples/genai"
PYTHON: list[str | Path] = [sys.executable, SAMPLES / "chat.py"]
TURNS = ("A mixture of experts", ' and a "router" \\ of\tthem', " scores them: é.")
TEMPLATE = """{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}\
{% if add_generation_prompt %}[assistant]{% endif %}"""
pytestmark = pytest.mark.skipif(
    not shutil.which("dotnet") or not shutil.which("cargo"), reason="needs dotnet, which brings genai, and cargo"
)


@pytest.fixture(scope="module", params=["cpp", "csharp"])
def program(request: pytest.FixtureRequest) -> list[str | Path]:
    """The command of a sample."""
    build = ROOT / "build/samples-genai"
    run("dotnet", "build", "-v", "q", "--artifacts-path", build, SAMPLES)
    if request.param == "csharp":
        return ["dotnet", build / "bin/Chat/debug/Chat.dll"]
    genai = ROOT / "build/nuget/packages/microsoft.ml.onnxruntimegenai/0.18.0"
    cmake(SAMPLES, build / "cpp", f"-DGENAI_ROOT={genai}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    return [build / "cpp/chat"]


def greedy(model: str, folder: Path, *, eos: int | None = None, **search: Any) -> Path:
    """Copy a model whose genai_config.json takes the likeliest tokens."""
    shutil.copytree(os.environ[model], folder)
    file = folder / "genai_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["search"] |= {"do_sample": False, "max_length": 256} | search
    if eos is not None:
        config["model"]["eos_token_id"] = eos
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def said(program: list[str | Path], folder: Path, *options: str, lines: tuple[str, ...] = TURNS) -> str:
    command = [*map(str, program), str(folder), *options]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, input=text, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("model", "search", "template"),
    [
        ("QUANTMOE_MODEL", {}, False),
        ("QUANTMOE_MODEL", {}, True),
        ("QUANTMOE_MODEL", {"past_present_share_buffer": False}, False),
        ("QUANTMOE_HYBRID", {}, False),
    ],
    ids=["plain", "template", "cache that grows", "hybrid"],
)
def test_three_turns(
    program: list[str | Path], model: str, search: dict[str, Any], template: bool, tmp_path: Path
) -> None:
    folder = greedy(model, tmp_path / "model", **search)
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    lines = (TURNS[0], "", *TURNS[1:])  # an empty line is no message
    found = said(program, folder, "--max-new-tokens", "8", lines=lines)
    assert found == said(PYTHON, folder, "--max-new-tokens", "8")
    assert found == said(PYTHON, folder, "--max-new-tokens", "8", lines=lines)
    assert len(found.split()) > 3


def test_stop_strings_and_eight_users(program: list[str | Path], tmp_path: Path) -> None:
    folder = greedy("QUANTMOE_MODEL", tmp_path / "model")
    whole = said(program, folder, "--max-new-tokens", "24", lines=TURNS[:1])
    end = whole[8:12]
    options = ("--stop", "never", "--stop", end, "--users", "8")
    found = said(program, folder, *options, "--max-new-tokens", "24", lines=TURNS[:1])
    answer = whole[: whole.index(end)]
    assert found == "".join(f"{i}: {answer}\n" for i in range(1, 9))
    assert said(program, folder, *options, "--max-new-tokens", "4") == said(
        PYTHON, folder, *options, "--max-new-tokens", "4"
    )


def test_a_cancelled_answer(program: list[str | Path], tmp_path: Path) -> None:
    """Ctrl-C ends the first answer before it fills the context, so the second message is answered."""
    folder = greedy("QUANTMOE_MODEL", tmp_path / "model", eos=4095, max_length=4000)
    command = [*map(str, program), str(folder), "--max-new-tokens", "4000"]
    whole = subprocess.run(command, input="A\nB\n", capture_output=True, text=True, encoding="utf-8", check=False)
    assert whole.returncode == 1
    assert "do not fit into max_length, 4000 tokens" in whole.stderr
    out, program_out = os.pipe()
    fcntl.fcntl(program_out, fcntl.F_SETPIPE_SZ, 4096)  # a program that nobody reads waits before its answer's end
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=program_out, stderr=subprocess.PIPE) as started:
        os.close(program_out)
        assert started.stdin
        assert started.stderr
        started.stdin.write(b"A\nB\n")
        started.stdin.close()
        with open(out, "rb") as answers:
            begin = answers.read(1)
            started.send_signal(signal.SIGINT)
            time.sleep(2)
            text = (begin + answers.read()).decode()
        assert started.wait() == 0, started.stderr.read()
    assert text[0] == whole.stdout[0]
    assert text.count("\n") > 1
    assert not text.startswith(whole.stdout[:-1])


def test_a_wrong_option_is_named(program: list[str | Path]) -> None:
    done = subprocess.run([*map(str, program), "folder", "--user", "8"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "--user: expected --stop TEXT, --users N or --max-new-tokens N\n")
    for option, found in {
        ("--users", "0"): "--users 0: expected a number from 1",
        ("--max-new-tokens", "-1"): "--max-new-tokens -1: expected a number from 1",
        ("--stop", ""): "--stop is empty: expected a text",
    }.items():
        for command in (program, PYTHON):
            words = [*map(str, command), "folder", *option]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (1, found + "\n")
