"""Compares onnxruntime-genai with Generator on an exported folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantmoe.runtime.generate import Generator


def generated(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Return the likeliest tokens, at most ``count`` and up to the model's end of a text."""
    import onnxruntime_genai as og

    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0).tolist()[len(prompt) :]


def check_tokens(folder: Path, prompt: Sequence[int], count: int) -> None:
    """Check that onnxruntime-genai chooses Generator's tokens, before one that ends a text."""
    model = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    # without one, onnxruntime-genai ends a text at the token for padding, and that is 0 by default
    ends = np.ravel(model.get("eos_token_id", model.get("pad_token_id", 0)))

    def before_end(tokens: list[int]) -> list[int]:
        return list(itertools.takewhile(lambda token: token not in ends, tokens))

    want = before_end(Generator(folder).greedy(prompt, count).tokens)
    assert before_end(generated(folder, prompt, count)) == want
    assert want
