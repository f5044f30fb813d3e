"""Sampling against transformers' own processors; what a folder asks for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.sampling_options import Sampling, folder_sampling, not_applied
from quantmoe.runtime.choosing.sampling import Penalties, Sampler, largest, probabilities

CASES = [
    Sampling(),
    Sampling(1.0, 0, 1.0),
    Sampling(0.6, 20, 0.95),
    Sampling(0.05, 0, 0.9),
    Sampling(3.0, 0, 0.3),
    Sampling(1.7, 1, 0.5),
    Sampling(1.0, 3, 1e-9),
    Sampling(0.7, 10**9, 0.999),
    Sampling(0.8, 0, 1.0, min_p=0.1),
    Sampling(1.3, 40, 0.9, min_p=0.3),
    Sampling(1.0, 0, 1.0, min_p=1.0),
]


def logits(seed: int, vocabulary: int = 1000) -> np.ndarray:
    """[vocabulary] as f32, some of them equal."""
    rng = np.random.default_rng(seed)
    found = rng.standard_normal(vocabulary).astype(np.float32) * 4
    return found.round(1) if seed % 2 else found


def dense(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities [vocabulary], 0 of tokens that are not kept."""
    found = np.zeros(len(logits))
    ids, kept = probabilities(logits, sampling)
    assert (np.diff(ids) > 0).all()
    found[ids] = kept
    return found


@pytest.mark.parametrize("vocabulary", [1000, 40_007])
@pytest.mark.parametrize("sampling", CASES, ids=str)
def test_what_is_kept_and_how_likely_it_is_are_transformers(sampling: Sampling, vocabulary: int) -> None:
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    for seed in range(20):
        values = logits(seed, vocabulary)
        scores = torch.tensor(values, dtype=torch.float64)[None]
        expected = processors(torch.zeros((1, 1), dtype=torch.int64), scores).softmax(-1)[0].numpy()
        found = dense(values, sampling)
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-12)
        if seed % 2 == 0:  # of equally likely ones at top_p's border sorts decide which are kept
            np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.3),
        Sampling(repetition_penalty=0.8),
        Sampling(no_repeat_ngram_size=1),
        Sampling(no_repeat_ngram_size=2),
        Sampling(no_repeat_ngram_size=3),
        Sampling(logit_bias={3: 4.5, 999: -2.0, 7: -np.inf}),
        Sampling(
            0.6, 20, 0.95, min_p=0.02, repetition_penalty=1.1, no_repeat_ngram_size=2, logit_bias={5: 1.5, 0: -3.0}
        ),
    ],
    ids=str,
)
def test_what_a_text_changes_is_transformers(sampling: Sampling) -> None:
    """Biases and penalties while a text grows, then all together in transformers' order."""
    processors, warpers = LogitsProcessorList(), LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[id], float(by)] for id, by in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    for warper, value, unset in (
        (TemperatureLogitsWarper, sampling.temperature, 1),
        (TopKLogitsWarper, sampling.top_k, 0),
        (TopPLogitsWarper, sampling.top_p, 1),
        (MinPLogitsWarper, sampling.min_p, 0),
    ):
        if value != unset:
            warpers.append(warper(value))
    text = np.random.default_rng(1).integers(0, 12, 40).tolist()  # few tokens: what repeats is there
    penalties, changed = Penalties(sampling, text[:9]), 0
    for end in range(9, len(text)):
        ids = torch.tensor([text[:end]])
        scores = torch.tensor(logits(2 * end), dtype=torch.float64)[None]
        # the biases' own tensor is of 32 bits, in which these are exact
        expected = processors(ids, scores)
        found = penalties(logits(2 * end))
        np.testing.assert_allclose(found, expected[0].numpy(), rtol=1e-12)
        likely = warpers(ids, expected).softmax(-1)[0].numpy()
        np.testing.assert_allclose(dense(found, sampling), likely, rtol=1e-12)
        changed += not np.array_equal(found, logits(2 * end))
        penalties.add(text[end])
    assert changed


def test_penalties_of_the_answer_are_openais() -> None:
    """logit - presence * (whether it is in the answer) - frequency * (how often): the formula of OpenAI's reference."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    penalties, answer = Penalties(sampling, [1, 2, 2, 3]), [2, 5, 2, 2]
    for count, token in enumerate([*answer, 0]):
        expected = logits(0).astype(np.float64)
        for id in set(answer[:count]):
            expected[id] -= 0.5 + 0.25 * answer[:count].count(id)
        np.testing.assert_array_equal(penalties(logits(0)), expected)
        penalties.add(token)


def test_the_likeliest_is_of_the_changed_logits() -> None:
    found, row = logits(0), []
    sample = Sampler(Sampling(0.0, no_repeat_ngram_size=1), [int(found.argmax())])
    order = np.argsort(-found)[1:4].tolist()
    row = [sample(found) for _ in order]
    assert row == order
    assert Sampler(Sampling(0.0))(found) == found.argmax()
    with pytest.raises(OptionError, match="logit_bias has token id 1000, expected ids of the vocabulary, 0 to 999"):
        Sampler(Sampling(logit_bias={1000: 1.0}))(found)


def test_the_defaults_are_transformers() -> None:
    defaults = GenerationConfig()._get_default_generation_params()
    names = ("temperature", "top_k", "top_p", "repetition_penalty", "no_repeat_ngram_size")
    assert Sampling() == Sampling(**{name: defaults[name] for name in names if name in defaults})
    assert Sampling().changes_logits is False


def test_tokens_come_as_often_as_they_are_likely() -> None:
    sampling = Sampling(1.5, 8, 0.9, seed=7)
    expected, sample, count = dense(logits(0), sampling), Sampler(sampling), 20_000
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
    assert dense(high, Sampling(0.001)).tolist() == [0.5, 0, 0.5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": np.nan}, {"temperature": "x"}, {"temperature": None},
        {"temperature": 10**400}, {"presence_penalty": -(10**400)},
        {"top_k": -1}, {"top_k": 20.0}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": "0.9"},
        {"seed": -1}, {"seed": 1.5}, {"min_p": 1.5}, {"min_p": []}, {"repetition_penalty": 0},
        {"repetition_penalty": "1.1"}, {"presence_penalty": np.inf}, {"frequency_penalty": None},
        {"no_repeat_ngram_size": -1}, {"no_repeat_ngram_size": 2.0}, {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: "x"}}, {"logit_bias": {-1: 1.0}}, {"logit_bias": {5: np.inf}}, {"logit_bias": [5]},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_named(wrong: dict) -> None:
    with pytest.raises(OptionError, match=f"^{next(iter(wrong))} is .*, expected "):
        Sampling(**wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    given = Sampling(
        np.float32(0.5), np.int64(3), np.float64(0.5), seed=np.uint8(1), logit_bias={np.int32(3): np.float16(2)}
    )
    assert given == Sampling(0.5, 3, 0.5, seed=1, logit_bias={3: 2.0})
    with pytest.raises(OptionError, match=r"sampling is 0\.7, expected quantmoe\.Sampling\(\.\.\) or None"):
        Sampler(0.7)


def test_the_folder_says_whether_to_sample(tmp_path: Path) -> None:
    assert folder_sampling(tmp_path) is None
    path = tmp_path / "generation_config.json"
    for config, expected in (
        ({"temperature": 0.6}, None),  # transformers warns that it has no effect
        ({"do_sample": False, "top_p": 0.9}, None),
        ({"do_sample": True}, Sampling()),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, Sampling(0.6, 20, 0.95)),
        ({"do_sample": True, "top_k": None}, Sampling()),
        ({"do_sample": True, "min_p": 0.1, "top_k": 0}, Sampling(top_k=0, min_p=0.1)),
        ({"repetition_penalty": 1.05, "top_p": 0.8}, Sampling(0, repetition_penalty=1.05)),
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}, None),
        ({"no_repeat_ngram_size": 3}, Sampling(0, no_repeat_ngram_size=3)),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.5}, Sampling(0, presence_penalty=1.5, frequency_penalty=0.5)),
        ({"sequence_bias": [[[5], 2.0], [[6, 7], 9.0]]}, Sampling(0, logit_bias={5: 2.0})),
        ({"suppress_tokens": [8]}, Sampling(0, logit_bias={8: -np.inf})),
    ):
        path.write_text(json.dumps(config), encoding="utf-8")
        assert folder_sampling(tmp_path) == expected
    for text in ("[]", "{", '{"do_sample": true, "top_p": 2}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            folder_sampling(tmp_path)


@pytest.mark.parametrize("samples", [True, False])
def test_a_field_of_the_wrong_type_names_file_and_field(tmp_path: Path, samples: bool) -> None:
    """Every field that is read, also where it has no effect."""
    path = tmp_path / "generation_config.json"
    numbers = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
               "no_repeat_ngram_size")  # fmt: skip
    wrong = [(name, value) for name in numbers for value in ("0.9", [1], {}, True)]
    wrong += [("top_k", 20.0), ("no_repeat_ngram_size", 2.5), ("do_sample", "true"), ("do_sample", 1)]
    wrong += [
        ("sequence_bias", [5]),
        ("sequence_bias", [[["x"], 1]]),
        ("sequence_bias", [[[], 1]]),
        ("sequence_bias", [[[-1], 1]]),
        ("sequence_bias", [[[5], "x"]]),
        ("sequence_bias", [[[5], float("inf")]]),
        ("suppress_tokens", 5),
        ("suppress_tokens", ["x"]),
        ("suppress_tokens", [-1]),
    ]
    for name, value in wrong:
        path.write_text(json.dumps({"do_sample": samples} | {name: value}), encoding="utf-8")
        with pytest.raises(ModelError, match=rf"generation_config\.json: {name} is .*, expected "):
            folder_sampling(tmp_path)


def test_tokens_outside_the_vocabulary_name_the_field(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "text_config": {"vocab_size": 8}}', encoding="utf-8")
    for name, within, beyond in (
        ("suppress_tokens", [7], [8]),
        ("sequence_bias", [[[7], 1.0]], [[[8], 1.0]]),
        ("sequence_bias", [[[0, 7], 1.0]], [[[0, 8], 1.0]]),
    ):
        path.write_text(json.dumps({name: within}), encoding="utf-8")
        folder_sampling(tmp_path)
        path.write_text(json.dumps({name: beyond}), encoding="utf-8")
        with pytest.raises(ModelError, match=rf"generation_config\.json: {name} is .*, expected .*ids from 0 to 7"):
            folder_sampling(tmp_path)


def test_what_is_asked_for_comes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}', encoding="utf-8")
    assert folder_sampling(tmp_path, top_k=5, seed=None) == Sampling(0.6, 5, repetition_penalty=1.1)
    assert folder_sampling(tmp_path, temperature=0, seed=3) == Sampling(0, 50, 1.0, seed=3, repetition_penalty=1.1)
    assert folder_sampling(tmp_path, temperature=0, repetition_penalty=1) is None
    path.write_text('{"repetition_penalty": 1.1}', encoding="utf-8")
    assert folder_sampling(tmp_path, min_p=0.1) == Sampling(min_p=0.1, repetition_penalty=1.1)
    assert folder_sampling(tmp_path, presence_penalty=1, repetition_penalty=1) == Sampling(0, presence_penalty=1)
    with pytest.raises(OptionError, match="top_p is 2, expected"):
        folder_sampling(tmp_path, temperature=0, top_p=2)


def test_what_is_not_applied_is_named(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    for config, expected in (
        ({}, []),
        ({"min_new_tokens": 0, "num_beams": 1, "bad_words_ids": [], "guidance_scale": 1.0, "typical_p": 0.5}, []),
        ({"repetition_penalty": 1.1, "min_p": 0.1, "no_repeat_ngram_size": 3, "suppress_tokens": [5]}, []),
        ({"typical_p": 0.5, "top_h": 0.2, "do_sample": True}, ["top_h", "typical_p"]),
        ({"bad_words_ids": [[5]], "min_new_tokens": 3}, ["bad_words_ids", "min_new_tokens"]),
        ({"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0}, []),
        (
            {"encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 3},
            ["encoder_no_repeat_ngram_size", "encoder_repetition_penalty"],
        ),
        ({"sequence_bias": [[[5], 2.0]]}, []),
        ({"sequence_bias": [[[5, 6], 2.0]]}, ["sequence_bias"]),
    ):
        path.write_text(json.dumps(config), encoding="utf-8")
        assert not_applied(tmp_path) == expected


@pytest.mark.parametrize("size", [1, 2, 7, 1023, 1024, 5000, 151_936])
def test_the_largest_are_those_of_a_sort(size: int) -> None:
    rng = np.random.default_rng(size)
    for values in (rng.standard_normal(size), rng.integers(0, 9, size).astype(np.float32), np.full(size, -np.inf)):
        for count in (1, 2, 20, 1000, 1024, 4000, size):
            least = np.sort(values)[-min(count, size)]
            np.testing.assert_array_equal(largest(values, count), np.flatnonzero(values >= least))


@pytest.mark.parametrize("temperature", [1e-320, 1e-300])
def test_the_least_temperatures_take_the_likeliest(temperature: float) -> None:
    """Logits divided by them are infinite."""
    logits = np.array([1, 5, -2, 4.5], np.float32)
    assert dense(logits, Sampling(temperature)).tolist() == [0, 1, 0, 0]
    assert Sampler(Sampling(temperature))(logits) == 1


@pytest.mark.parametrize("changed", [{"logit_bias": {1: 1e300, 2: 1e300}}, {"repetition_penalty": 1e-300}], ids=str)
def test_penalties_that_overflow_leave_the_likeliest(changed: dict) -> None:
    choose = Sampler(Sampling(seed=1, **changed), [1, 2])
    assert {choose(np.array([1.0, 2.0, 3.0, 4.0], np.float32)) for _ in range(50)} == {1, 2}


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_token_left_is_named(temperature: float) -> None:
    sampling = Sampling(temperature, logit_bias=dict.fromkeys(range(4), -np.inf))
    with pytest.raises(OptionError, match="leave no token to choose"):
        Sampler(sampling)(np.zeros(4, np.float32))
