"""Sampling against transformers' own processors; what a folder asks for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.reading.sampling import Sampling, folder_sampling
from quantmoe.exporter.running.sampling import Sampler, probabilities

CASES = [
    Sampling(),
    Sampling(1.0, 0, 1.0),
    Sampling(0.6, 20, 0.95),
    Sampling(0.05, 0, 0.9),
    Sampling(3.0, 0, 0.3),
    Sampling(1.7, 1, 0.5),
    Sampling(1.0, 3, 1e-9),
    Sampling(0.7, 10**9, 0.999),
]


def logits(seed: int) -> np.ndarray:
    """[vocabulary] as f32, some of them equal."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(1000).astype(np.float32) * 4
    return found.round(1) if seed % 2 else found


@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_what_is_kept_and_how_likely_it_is_are_transformers(sampling: Sampling) -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    for seed in range(20):
        scores = torch.tensor(logits(seed), dtype=torch.float64)[None]
        expected = processors(torch.zeros((1, 1), dtype=torch.int64), scores).softmax(-1)[0].numpy()
        found = probabilities(logits(seed), sampling)
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-12)
        if seed % 2 == 0:  # of equally likely ones at top_p's border sorts decide which are kept
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_the_defaults_are_transformers() -> None:
    defaults = GenerationConfig()._get_default_generation_params()
    assert Sampling() == Sampling(*(defaults[name] for name in ("temperature", "top_k", "top_p")))


def test_tokens_come_as_often_as_they_are_likely() -> None:
    sampling = Sampling(1.5, 8, 0.9, seed=7)
    expected, sample, count = probabilities(logits(0), sampling), Sampler(sampling), 20_000
    found = np.bincount([sample(logits(0)) for _ in range(count)], minlength=1000)
    assert not found[expected == 0].any()
    # a count is binomial: six standard deviations of it
    assert (abs(found - count * expected) <= 6 * np.sqrt(count * expected * (1 - expected))).all()


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    def drawn(seed: int | None) -> list[int]:
        sample = Sampler(Sampling(5.0, 0, seed=seed))
        return [sample(logits(i)) for i in range(20)]

    assert drawn(3) == drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)
    assert Sampler()(logits(2)) == logits(2).argmax()


def test_the_largest_numbers_do_not_overflow() -> None:
    high = np.array([3e38, -3e38, 3e38], np.float32)
    assert probabilities(high, Sampling(0.001)).tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0.0}, {"temperature": np.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"seed": -1}],
)
def test_numbers_out_of_range_are_named(wrong: dict) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))} is "):
        Sampling(**wrong)


def test_the_folder_says_whether_to_sample(tmp_path: Path) -> None:
    assert folder_sampling(tmp_path) is None
    path = tmp_path / "generation_config.json"
    for config, expected in (
        ({"temperature": 0.6}, None),  # transformers warns that it has no effect
        ({"do_sample": False, "top_p": 0.9}, None),
        ({"do_sample": True}, Sampling()),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, Sampling(0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": None}, Sampling()),
    ):
        path.write_text(json.dumps(config), encoding="utf-8")
        assert folder_sampling(tmp_path) == expected
    for text in ("[]", "{", '{"do_sample": true, "top_p": 2}', '{"do_sample": true, "top_k": "x"}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            folder_sampling(tmp_path)
