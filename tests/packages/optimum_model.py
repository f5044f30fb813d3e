"""optimum's ORTModelForCausalLM loads an exported folder: `make test-packages` installs optimum into build/optimum."""

import os
import re
import sys
from pathlib import Path

import pytest
from other_languages import ROOT, quantmoe, run

PROMPT = "The old house"


def program(folder: str, ends: str) -> str:
    """Return the guide's block for optimum, with a folder."""
    text = (ROOT / "docs/guides/python.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n([^`]*ORTModelForCausalLM.*?)```", text, re.DOTALL)
    assert found
    assert PROMPT in found[1]
    return found[1].replace("OUTDIR", folder) + ends


def answer(folder: str, ends: str, path: Path) -> str:
    """Return what the program prints, with optimum's packages before those of this environment."""
    path.write_text(program(folder, ends), encoding="utf-8")
    return run(sys.executable, "-P", path, PYTHONPATH=f"{ROOT}/build/optimum:{ROOT}/build/python")


def test_the_answer_is_that_of_generate(tmp_path: Path) -> None:
    folder = os.environ["QUANTMOE_MODEL"]
    options = ["--max-new-tokens", "12", "--temperature", "0"]
    expected = PROMPT + quantmoe("generate", folder, "--raw", "--prompt", PROMPT, *options).rstrip("\n")
    assert answer(folder, "", tmp_path / "main.py").rstrip("\n") == expected


def test_hybrid_models_are_refused(tmp_path: Path) -> None:
    """Whenever this fails, the guide's limit has gone."""
    with pytest.raises(AssertionError, match=r"(KeyError|ValueError|InvalidArgument|Missing Input)"):
        answer(os.environ["QUANTMOE_HYBRID"], "", tmp_path / "main.py")
