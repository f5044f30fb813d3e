"""Files of text are UTF-8 by name, whatever the locale says."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("exporter", "custom_ops", "ort_ext", "trt_plugins", "samples", "packages", "docs", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
#: a locale whose encoding is ASCII, which every machine has
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def unnamed(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the locale's encoding; ruff sees only paths whose type it knows."""
    named = any(keyword.arg == "encoding" for keyword in call.keywords)
    method = call.func.attr if isinstance(call.func, ast.Attribute) else None
    return not named and ((method == "read_text" and not call.args) or (method == "write_text" and len(call.args) < 2))


def test_text_is_read_and_written_as_utf8() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and unnamed(node)
    ]
    assert len(SOURCES) > 200
    assert not found, "name encoding='utf-8'"


@pytest.mark.parametrize("template", ["tokenizer_config.json", "chat_template.jinja"])
def test_no_locale_changes_a_template(tmp_path: Path, template: str) -> None:
    config, text = (
        {"bos_token": "<\uff5cbegin\u2581of\u2581sentence\uff5c>"},
        "{{ bos_token }}é{{ messages[0].content }}",
    )
    if template == "tokenizer_config.json":
        config["chat_template"] = text
    else:
        (tmp_path / template).write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    code = (
        "import locale, sys; from pathlib import Path\n"
        "from quantmoe.exporter.folder.chat_template import load_template\n"
        "text = load_template(Path(sys.argv[1])).render([{'role': 'user', 'content': 'a'}])\n"
        "print(locale.getpreferredencoding(), ascii(text))"
    )
    expected = ascii(config["bos_token"] + "éa")
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=ASCII)
    assert done.stdout == f"ANSI_X3.4-1968 {expected}\n", done.stderr
