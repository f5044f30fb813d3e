"""optimum's ORTModelForCausalLM loads an exported folder: `make test-packages` installs optimum into build/optimum."""

import os
import sys

import pytest
from support.harness.other_languages import ROOT, quantmoe, run

PROMPT = "The old house"


def answer(folder: str) -> str:
    """Return what the sample prints, with optimum's packages before those of this environment."""
    sample = ROOT / "samples/python/optimum_text.py"
    return run(sys.executable, "-P", sample, folder, PROMPT, PYTHONPATH=f"{ROOT}/build/optimum:{ROOT}/build/python")


def test_the_answer_is_that_of_generate() -> None:
    folder = os.environ["QUANTMOE_MODEL"]
    options = ["--max-new-tokens", "12", "--temperature", "0"]
    expected = PROMPT + quantmoe("generate", folder, "--raw", "--prompt", PROMPT, *options).rstrip("\n")
    assert answer(folder).rstrip("\n") == expected


def test_hybrid_models_are_refused() -> None:
    """Whenever this fails, the guide's limit has gone."""
    with pytest.raises(AssertionError, match=r"(KeyError|ValueError|InvalidArgument|Missing Input)"):
        answer(os.environ["QUANTMOE_HYBRID"])
