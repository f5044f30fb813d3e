"""The tests of packages/rust and packages/cpp: `make test-packages` calls this where cargo stands."""

import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
from support.harness.other_languages import CARGO, ROOT, cmake, quantmoe, run

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
TURNS = {
    "chat.begin": "Q: ",
    "chat.reply": "\nA:",
    "chat.next": "\nQ: ",
    "chat.system": "S: ",
    "chat.system_end": "\nQ: ",
}
TEMPLATE = """{% for m in messages -%}
{%- set users = messages[: loop.index] | selectattr('role', 'equalto', 'user') | list | length -%}
{{ m.content if m.role != 'user' else '|' ~ users ~ ' ' ~ m.content ~ '\\nA:' }}
{%- endfor %}"""
pytestmark = pytest.mark.skipif(not shutil.which("cargo"), reason="needs cargo")


def variant(folder: str, to: Path, metadata: dict[str, str]) -> Path:
    """Copy a model with more metadata: a ModelProto's field 14 is a list, which may go on at the file's end."""

    def field(tag: int, value: bytes) -> bytes:
        return bytes([tag, len(value) & 127 | 128, len(value) >> 7]) + value

    shutil.copytree(folder, to)
    with (to / "model.onnx").open("ab") as file:
        for key, value in metadata.items():
            file.write(field(0x72, field(0x0A, key.encode()) + field(0x12, value.encode())))
    return to


def test_rust(tmp_path: Path) -> None:
    """Each test file has passed, and Python goes on from the prompt that Rust saved."""
    manifest, saved = str(ROOT / "packages/rust/Cargo.toml"), tmp_path / "prompt.state"
    test = ["cargo", "test", "--quiet", "--locked", "--manifest-path", manifest, "--package", "quantmoe", "--tests"]
    said = run(*test, **CARGO, QUANTMOE_SAVED=str(saved))
    passed = re.findall("test result: ok. ([1-9][0-9]*) passed; 0 failed; 0 ignored", said)
    assert len(passed) == len(list((ROOT / "packages/rust/quantmoe/tests").glob("*.rs"))), said
    prompt = ["--ids", "1,2,3,4,5,6,7,8,9,10,11,12,20", "--max-new-tokens", "6", "--temperature", "0"]
    fresh = quantmoe("generate", os.environ["QUANTMOE_HYBRID"], *prompt)
    assert quantmoe("generate", os.environ["QUANTMOE_HYBRID"], *prompt, "--load-state", saved) == fresh


def test_crates() -> None:
    """Both crates can be published: cargo warns of nothing, neither in manifests nor in documentation."""
    manifest, crates = ROOT / "packages/rust/Cargo.toml", ["--package", "quantmoe", "--package", "quantmoe-text"]
    strict = CARGO | {"RUSTDOCFLAGS": "-D warnings"}
    for command in (["package", "--allow-dirty", "--no-verify"], ["doc", "--no-deps"]):
        words = ["cargo", *command, "--locked", "--manifest-path", manifest, *crates]
        done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", env=os.environ | strict)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
    for name in ("quantmoe", "quantmoe-text"):
        with tarfile.open(ROOT / f"build/rust/package/{name}-{VERSION}.crate") as crate:
            licence = crate.extractfile(f"{name}-{VERSION}/LICENSE")
            assert licence
            assert licence.read() == (ROOT / "LICENSE").read_bytes()
            assert crate.getmember(f"{name}-{VERSION}/src/lib.rs")


def test_cpp(tmp_path: Path) -> None:
    mtp = os.environ["QUANTMOE_MTP"]
    plain, hybrid = os.environ["QUANTMOE_MODEL"], os.environ["QUANTMOE_HYBRID"]
    turns = variant(hybrid, tmp_path / "turns", TURNS)
    context = variant(hybrid, tmp_path / "context", {**TURNS, "context_length": "64"})
    refused = variant(plain, tmp_path / "refused", {"no_chat": "the template counts messages"})
    (refused / "tokenizer.json").unlink()
    template = variant(hybrid, tmp_path / "template", {"no_chat": "the template counts messages"})
    (template / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    build = ROOT / "build/cpp-tests"
    cmake(ROOT / "packages/cpp/tests", build, "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON")
    assert run(build / "tests", plain, hybrid, turns, context, refused, template, mtp) == "all passed\n"
