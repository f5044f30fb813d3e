"""Generation with tokens that the GPU chooses, on the CPU with a stand-in for the kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.models.chosen_there import Choice, choosing_there

from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime import cache as caches
from quantmoe.runtime.choosing.sampling import Sampler
from quantmoe.runtime.generate import Generator, ModelError, OptionError

FLOAT = {"activations": "float", "logits": "last"}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [PROMPT, PROMPT[:3], [7], PROMPT[2:] * 3]
SAMPLED = Sampling(0.8, top_k=20, top_p=0.9, seed=3, repetition_penalty=1.2, no_repeat_ngram_size=3)


@pytest.fixture
def there(exported) -> Callable[..., Generator]:
    """there(architecture, **options of Generator): one whose tokens are chosen by the stand-in."""

    def make(architecture: str = "qwen3_moe", path: Path | None = None, **options: object) -> Generator:
        generator = Generator(path or exported(architecture, **FLOAT), threads=1, **options)
        return choosing_there(generator)

    return make


@pytest.mark.parametrize("sampling", [None, SAMPLED])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_tokens_are_those_of_the_host(exported, there, architecture, sampling, monkeypatch):
    """Also in a next turn, in a cache that grows meanwhile, and after a stop."""
    monkeypatch.setattr(caches, "ROOM", 2)
    usual, generator = Generator(exported(architecture, **FLOAT)), there(architecture)
    found = []
    for model in (usual, generator):
        cache = model.cache()
        first = model.generate(PROMPT, 9, sampling=sampling, cache=cache)
        again = model.generate([*first.tokens[-1:], 5, 2], 20, [first.tokens[3]], sampling=sampling, cache=cache)
        found.append((first.tokens, again.tokens, again.finish_reason, cache.tokens))
    assert found[0] == found[1]
    assert generator.made[0].runs == [[length] for length in range(8, 17)]


def test_the_last_token_needs_no_room(there):
    generator = there(capacity=len(PROMPT) + 3)
    assert len(generator.generate(PROMPT, 4).tokens) == 4
    generator.context = len(PROMPT) + 3
    assert len(generator.generate(PROMPT, 9).tokens) == 3


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_what_is_left_early_goes_on(exported, there, architecture):
    """The run that is ahead is forgotten. A model with states has then read the last token that was given, too."""
    usual, generator = Generator(exported(architecture, **FLOAT)), there(architecture)
    cache = generator.cache()
    stream = generator.stream(PROMPT, 9, cache=cache)
    given = [next(stream) for _ in range(3)]
    cache.settle()
    read = given if generator.states else given[:-1]
    assert cache.tokens == PROMPT + read
    want = usual.generate([*PROMPT, *read, 7], 6).tokens
    assert generator.generate([7], 6, cache=cache).tokens == want
    assert cache.keep([*PROMPT, 8]) == len(PROMPT)
    assert generator.generate([8], 3, cache=cache).tokens == usual.generate([*PROMPT, 8], 3).tokens


def test_what_is_dropped_leaves_its_room(there):
    """At once, as a conversation that is left has no cycle of references; the next one has its graph."""
    generator = there()
    gc.disable()
    try:
        for _ in range(3):
            next(generator.stream(PROMPT, 5))
            assert len(generator.rooms._free) == 1
    finally:
        gc.enable()


def test_a_reply_that_is_read_late_is_chosen_at_once(there):
    """A token's run and the choice after it have begun when the token is given."""
    generator = there()
    stream = generator.stream(PROMPT, 3)
    next(stream)
    assert (generator.made[0].pending, len(generator.made[0].runs)) == (1, 2)
    assert len(list(stream)) == 2
    assert (generator.made[0].pending, len(generator.made[0].runs)) == (0, 3)


def test_logits_and_drafts_take_the_hosts_way(exported, there):
    generator = there()
    want = Generator(exported("qwen3_moe", **FLOAT)).greedy(PROMPT, 5)
    found = generator.greedy(PROMPT, 5)
    assert (found.tokens, generator.made) == (want.tokens, [])
    assert np.array_equal(found.logits, want.logits)
    drafting = there(path=exported("qwen3_moe", activations="float", logits="all"), speculate="ngram")
    assert (drafting.generate(PROMPT, 5).tokens, drafting.made) == (want.tokens, [])
    generator.sampler = lambda sampling, prompt: Sampler(sampling, prompt)  # as ranks have
    assert (generator.generate(PROMPT, 5).tokens, generator.made) == (want.tokens, [])


def test_logits_that_are_not_finite(there, monkeypatch):
    generator = there()
    monkeypatch.setattr(np, "isfinite", lambda values: np.zeros(1, bool))
    with pytest.raises(ModelError, match="logits after 8 tokens are not finite"):
        generator.generate(PROMPT, 3)
    with pytest.raises(ModelError, match="logits after 8 tokens are not finite"):
        generator.generate_batch([PROMPT, PROMPT], 3)


def test_no_token_is_left(there):
    generator = there()
    generator.choice = type("Nothing", (Choice,), {"take": lambda self: [-2]})
    with pytest.raises(OptionError, match="leave no token to choose"):
        generator.generate(PROMPT, 3)


@pytest.mark.parametrize("sampling", [None, SAMPLED])
@pytest.mark.parametrize(("architecture", "chunk"), [("qwen3_moe", 512), ("qwen3_5_moe_text", 8)])
def test_rows_of_a_batch(exported, there, architecture, chunk, sampling):
    """Prompts of any lengths, in any chunks; rows that stop, and one that its user ends."""
    usual = Generator(exported(architecture, **FLOAT), chunk=chunk)
    generator = there(architecture, chunk=chunk)
    want = usual.generate_batch(PROMPTS, 12, sampling=sampling)
    assert generator.generate_batch(PROMPTS, 12, sampling=sampling) == want
    stop = [want[0][4], want[2][1]]
    batches = [model.stream_batch(PROMPTS, 12, stop, sampling) for model in (usual, generator)]
    for batch in batches:
        for row, _ in batch:
            if row == 3 and len(batch.tokens[3]) == 3:
                batch.end(3)
    assert batches[0].tokens == batches[1].tokens
    assert batches[0].finish_reasons == batches[1].finish_reasons
    assert len(batches[1].tokens[3]) <= 3


def test_a_batch_of_all_logits(exported, there):
    folder = exported("qwen3_moe", activations="float", logits="all")
    want = Generator(folder).generate_batch(PROMPTS, 5)
    assert there(path=folder, chunk=8).generate_batch(PROMPTS, 5) == want
