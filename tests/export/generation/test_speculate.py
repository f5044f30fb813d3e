"""Speculation: the tokens, and on the CPU the bytes, of generation without it, in fewer runs."""

from __future__ import annotations

import copy
import itertools
import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.architectures.test_hybrid import grown
from export.generation.test_generate import PROMPT
from export.graph.test_model import error, expected, run, tokens
from support.harness.once import made_once
from support.harness.sweeps import every
from support.models import orders

from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.exporter.graph.placeholders import DTYPES
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.choosing.sampling import Sampler
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.speculate import Lookup, Speculation

ARCHITECTURES = ["qwen3_moe", "gpt_oss", "glm4_moe"]
REPEATING = (PROMPT[:7] * 4)[:25]


class Guess(Lookup):
    """Drafts of which some are what comes, and some are not."""

    def __init__(self, coming: list[int], prompt: int):
        self.coming, self.prompt, self.random = coming, prompt, np.random.default_rng(0)

    def __call__(self, tokens, count):
        at = len(tokens) - self.prompt
        return [id if self.random.random() < 0.7 else 1 for id in self.coming[at : at + count]]


def guided(generator: Generator, prompt: list[int], count: int, sampling: Sampling | None = None, **options):
    """Generation whose drafts are :class:`Guess`, and what it should give."""
    generator.speculate = None
    want = generator.generate(prompt, count, sampling=sampling, logits=True)
    generator.speculate, generator.drafts = "ngram", 4
    found = generator.stream(prompt, count, sampling=sampling, logits=True, **options)
    found.speculation.draft = Guess(want.tokens, len(prompt))
    return found, want


@pytest.fixture(params=["a session's choice", "5 tokens' logits", "all"])
def kept(request):
    return {"a session's choice": "last", "5 tokens' logits": 5, "all": "all"}[request.param]


@pytest.mark.parametrize("architecture", every(ARCHITECTURES))
def test_tokens_and_bytes_are_those_of_generation_without(exported, architecture, kept):
    generator = Generator(exported(architecture, logits=kept), chunk=8, num_logits=5)  # int8 activations
    found, want = guided(generator, PROMPT, 40)
    assert list(found) == want.tokens
    assert found.logits.tobytes() == want.logits.tobytes()
    drafts = found.speculation
    assert drafts.runs + drafts.accepted == 39
    assert 10 < drafts.accepted < drafts.drafted


@pytest.mark.parametrize("architecture", every(["deepseek_v3", "llama4_text"]))
def test_caches_that_grow(exported, architecture):
    found, want = guided(grown(Generator(exported(architecture, activations="float"))), PROMPT, 30)
    assert list(found) == want.tokens
    assert found.logits.tobytes() == want.logits.tobytes()
    assert found.speculation.accepted


@pytest.mark.every
def test_attention_of_standard_nodes(plain_of, reference):
    """Products and sums of attention and the products of routers are ONNX Runtime's, and may be added up in another
    order where a run has several rows. The bound is 1.3e-6 of the largest logit; on AVX2 with ONNX Runtime 1.32 the
    difference is 0. One projection of one layer that is off by 2^-10 is beyond it."""
    model, generator = reference(), Generator(plain_of(cache="f32", logits="all"))
    found, want = guided(generator, PROMPT, 30)
    tokens = list(found)
    ids = np.array([PROMPT + want.tokens[:-1]])
    packed = [name for name, _ in model.named_parameters() if not name.endswith("mlp.gate.weight")]
    bound = orders.bound(model, ids, packed)
    same = orders.same_but_near_ties(tokens, want.tokens, want.logits, bound)
    assert error(found.logits[: same + 1], want.logits[: same + 1]) < bound < 2e-6
    assert found.speculation.accepted
    exact = expected(model, ids)
    weight = model.get_parameter("model.layers.0.self_attn.o_proj.weight")
    with torch.no_grad():
        kept = weight.clone()
        weight *= 1 + 2**-10
        moved = error(expected(model, ids), exact)
        weight.copy_(kept)
    assert moved > 10 * bound


@pytest.mark.parametrize("type", every(["f16", "bf16"]))
def test_what_roundings_to_16_bits_become(reference, type):
    """PyTorch's run in 16 bits beside float64 with the same weights: the errors of one run, where the bound is of two.
    They are 2.2e-2 of f16, whose bound is 7.4e-2, and 8.3e-2 of bf16, 1.4e-1: single tokens of random weights get
    another expert. One projection of one layer that is twice as large is beyond it."""
    model, ids = copy.deepcopy(reference()), tokens(2, 20)
    bound = orders.bound(model, ids, type=type)
    model = model.to(DTYPES[type])
    found = expected(model, ids)
    exact = expected(model.double(), ids)
    assert error(found, exact) < bound < 0.2
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.o_proj.weight").mul_(2)
    assert error(expected(model, ids), exact) > 2 * bound


def test_near_ties_are_no_others():
    logits = np.array([[0, 1, 0], [1, 0, 1 - 1e-6], [0, 0, 1]])
    assert orders.same_but_near_ties([1, 0, 2], [1, 0, 2], logits, 0) == 3
    assert orders.same_but_near_ties([1, 2, 0], [1, 0, 2], logits, 6e-7) == 1
    with pytest.raises(AssertionError):
        orders.same_but_near_ties([1, 2, 0], [1, 0, 2], logits, 4e-7)


def test_sampling_with_the_same_seed(exported):
    generator = Generator(exported("qwen3_moe"))
    found, want = guided(generator, PROMPT, 40, Sampling(1.5, 0, 0.9, seed=3))
    assert list(found) == want.tokens
    assert found.speculation.accepted


def test_what_was_before_is_drafted(exported):
    folder = exported("qwen3_moe")
    plain, generator = Generator(folder), Generator(folder, speculate="ngram")
    assert generator.greedy(REPEATING, 60).tokens == plain.greedy(REPEATING, 60).tokens
    lookup = Lookup()
    assert lookup([1, 2, 3, 4, 1, 2], 9) == [3, 4, 1, 2]
    assert lookup([1, 2, 3, 4, 1, 2, 5, 1, 2], 2) == [5, 1]  # the latest place
    assert lookup([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4], 1) == [1]  # the longest match
    assert lookup([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 7], 4) == []
    assert Lookup()([5], 4) == []


DEMO = Path(__file__).parents[3] / "samples" / "demo_model"
#: the demo's model, and its hybrid one -> what an export needs to verify drafts
DEMOS = {"checkpoint": {"logits": 5}, "hybrid": {"logits": 5, "state_window": 5}}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """demo(name) -> the folder of an export of a demo model."""

    def make(name):
        def write(folder):
            export(DEMO / name, folder, **DEMOS[name])

        return made_once(tmp_path_factory, write, "demo", checkpoint=name)

    return make


@pytest.mark.parametrize("sampling", [None, Sampling(0.9, 40, 0.95, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "drafting"), every([("checkpoint", "hybrid"), ("hybrid", "checkpoint"), ("checkpoint", "checkpoint")])
)
def test_another_model_drafts(demo, name, drafting, sampling):
    """Tokens and bytes of logits are those without drafts. Of a text and its next turn."""
    ids = load_tokenizer(demo(name)).encode("And the king said unto them, ").ids
    plain, generator = Generator(demo(name)), Generator(demo(name), speculate=demo(drafting))
    caches = plain.cache(), generator.cache()
    for more in (ids, ids[:3]):
        want = plain.generate(more, 60, sampling=sampling, cache=caches[0], logits=True)
        found = generator.generate(more, 60, sampling=sampling, cache=caches[1], logits=True)
        assert found.tokens == want.tokens
        assert found.logits.tobytes() == want.logits.tobytes()
        drafts = found.speculation
        assert 0 < drafts.accepted <= drafts.drafted
        assert drafts.runs + drafts.accepted == 59
        if name == drafting and sampling is None:  # it knows what comes
            assert drafts.accepted == drafts.drafted
    assert caches[0].tokens == caches[1].tokens
    generator.close()


def test_what_cannot_draft(demo, exported, tmp_path):
    own, other = demo("checkpoint"), exported("qwen3_moe")
    with pytest.raises(
        ModelError, match=rf"{other} cannot draft for {own}: token \d+ is '.+' in one and '.+' in the other"
    ):
        Generator(own, speculate=other)
    gpu = tmp_path / "gpu"
    shutil.copytree(own, gpu)
    model = ir.load(gpu / "model.onnx")
    model.metadata_props["target"] = "cuda"
    ir.save(model, gpu / "model.onnx")
    with pytest.raises(
        ModelError, match=rf"{gpu} was exported with --target cuda and cannot draft for {own}, which runs on cpu"
    ):
        Generator(own, speculate=str(gpu))
    for missing in ("mpt", tmp_path / "none"):
        with pytest.raises(OptionError, match=rf"speculate is '{missing}', expected ngram, mtp or a folder: .*missing"):
            Generator(own, speculate=missing)
    with pytest.raises(OptionError, match="speculate is 5"):
        Generator(own, speculate=5)


def test_drafts_end_where_the_other_models_context_ends(demo):
    generator = Generator(demo("checkpoint"), speculate=demo("checkpoint"))
    generator.head.context = 20
    ids = list(range(5, 15))
    found = generator.generate(ids, 40)
    assert found.tokens == Generator(demo("checkpoint")).generate(ids, 40).tokens
    assert 0 < found.speculation.drafted < 20


@pytest.fixture(params=every(["qwen3_next", "qwen3_5_moe_text"]))
def hybrid(exported, request):
    return exported(request.param, logits=5, state_window=5)


@pytest.mark.parametrize("kind", [lambda generator: generator, grown], ids=["in place", "grown"])
def test_states_of_linear_attention(hybrid, kind):
    """The window has the state after each token that may be the last one accepted."""
    generator = kind(Generator(hybrid, chunk=8))
    cache = generator.cache()
    found, want = guided(generator, PROMPT, 40, cache=cache)
    assert list(found) == want.tokens
    assert found.logits.tobytes() == want.logits.tobytes()
    assert cache.tokens == PROMPT + want.tokens[:-1]
    assert 10 < found.speculation.accepted < found.speculation.drafted
    more = generator.generate([5, 6], 5, cache=cache).tokens
    assert more == generator.generate([*PROMPT, *want.tokens[:-1], 5, 6], 5).tokens


@pytest.mark.parametrize("kind", [lambda generator: generator, grown], ids=["in place", "grown"])
def test_a_generation_that_is_left_takes_its_drafts_back(hybrid, kind):
    """Though somebody still holds it, as Chat.last does: whatever uses the cache next ends it first."""
    generator = kind(Generator(hybrid, chunk=8))
    for count in (1, 2, 3, 5, 8, 13):
        cache = generator.cache()
        found, want = guided(generator, PROMPT, 40, cache=cache)
        said = list(itertools.islice(found, count))
        assert said == want.tokens[:count]
        ids = [*PROMPT, *said, 5, 6]
        assert cache.keep(ids) == len(PROMPT) + count - 1
        assert generator.generate([said[-1], 5, 6], 5, cache=cache).tokens == generator.generate(ids, 5).tokens
        with pytest.raises(ModelError, match="another answer was begun"):
            next(found)
        cache = generator.cache()
        found, _ = guided(generator, PROMPT, 40, cache=cache)
        said = list(itertools.islice(found, count))
        more = generator.stream([said[-1], 5, 6], 5, cache=cache)
        assert list(more) == generator.generate(ids, 5).tokens


@pytest.mark.parametrize("kind", [lambda generator: generator, grown], ids=["in place", "grown"])
def test_going_back_in_the_window(hybrid, kind):
    generator = kind(Generator(hybrid))
    cache = generator.cache()
    cache.append(PROMPT[:20])
    cache.rewind(18)
    assert cache.keep([*PROMPT[:18], 7]) == 18
    assert np.array_equal(cache.append([7]), generator.greedy([*PROMPT[:18], 7], 1).logits[0])
    with pytest.raises(ModelError, match="only of 0, 19 tokens"):
        cache.rewind(17)
    cache.verify(PROMPT[:3])
    cache.rewind(20)
    again = cache.append([9])
    assert np.array_equal(again, generator.greedy([*PROMPT[:18], 7, PROMPT[0], 9], 1).logits[0])


def test_an_interrupted_run_of_states(hybrid, monkeypatch):
    generator = Generator(hybrid)
    cache = generator.cache()
    found, _ = guided(generator, PROMPT, 20, cache=cache)
    list(itertools.islice(found, 6))
    run_ = cache._run

    def interrupted(ids):
        run_(ids)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(found)
    monkeypatch.undo()
    assert cache.keep([*PROMPT, 7]) == 23
    assert generator.generate([7], 4, cache=cache).tokens == generator.generate([*PROMPT, 7], 4).tokens


def test_windows_as_onnxruntime_genai_reads_them(hybrid):
    shapes = {v.name: [str(size) for size in v.shape] for v in ir.load(hybrid / "model.onnx").graph.inputs}
    assert shapes["past_key_values.0.conv_state"] == ["5", "batch_size", "512", "3"]
    assert shapes["past_key_values.0.recurrent_state"] == ["5", "batch_size", "4", "64", "64"]


def test_a_window_is_of_states(checkpoint, exported, tmp_path):
    with pytest.raises(OptionError, match=r"state_window is 2: .* has no linear attention"):
        export(checkpoint("qwen3_moe"), tmp_path / "model", state_window=2)
    with pytest.raises(OptionError, match="state_window is 65, expected 1 to 64"):
        export(checkpoint("qwen3_next"), tmp_path / "model", state_window=65)
    message = r"states of linear attention after 5 tokens \(this model keeps 1\): export it with --state-window 5$"
    with pytest.raises(ModelError, match=message):
        Generator(exported("qwen3_5_moe_text", activations="float"), speculate="ngram")


@pytest.mark.parametrize("ends", ["stop", "left", "count"])
def test_the_cache_has_all_tokens_but_the_last(exported, ends):
    generator = Generator(exported("qwen3_moe"))
    for n in range(1, 25):
        cache = generator.cache()
        found, want = guided(generator, PROMPT, n if ends == "count" else 25, cache=cache)
        if ends == "stop":
            if want.tokens[n] in want.tokens[:n]:
                continue
            found = generator.stream(PROMPT, 25, [want.tokens[n]], cache=cache)
            found.speculation.draft = Guess(want.tokens, len(PROMPT))
            n += 1
        got = list(itertools.islice(found, n))
        found._steps.close()
        assert got == want.tokens[:n]
        assert cache.tokens == PROMPT + got[:-1]
        more = generator.generate([5, 6], 5, cache=cache).tokens
        assert more == generator.generate([*PROMPT, *got[:-1], 5, 6], 5).tokens


def test_a_capacity_is_enough_for_what_it_is_without_drafts(exported):
    generator = Generator(exported("qwen3_moe"), capacity=23 + 12)
    found, want = guided(generator, PROMPT, 13)
    assert list(found) == want.tokens
    found = Generator(exported("qwen3_moe"), capacity=28, speculate="ngram").stream(REPEATING, 10)
    with pytest.raises(ModelError, match="29 tokens, the cache has a capacity of 28"):
        list(found)
    assert len(found.tokens) == 4


def test_interrupted_runs(exported, monkeypatch):
    generator = Generator(exported("qwen3_moe"))
    cache = generator.cache()
    found, want = guided(generator, PROMPT, 20, cache=cache)
    calls, run_ = itertools.count(), cache._run

    def interrupted(ids):
        made = run_(ids)
        if next(calls) == 3:
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(cache, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(found)
    assert cache.tokens == PROMPT + found.tokens[:-1]
    assert found.tokens == want.tokens[: len(found.tokens)]


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_logits_of_the_last_tokens(exported, padding, chosen):
    every = Generator(exported("qwen3_moe", activations="float"))
    last = Generator(exported("qwen3_moe", activations="float", logits="last" if chosen else 3), num_logits=3)
    assert (every.rows > 1 << 30, last.rows) == (True, 3)
    # onnxruntime-genai takes the logits of all tokens or of the last
    assert (last.path.parent / "genai_config.json").exists() == chosen
    lengths, ids, want = (5, 6), tokens(2, 6), []
    mask, positions = np.zeros_like(ids), np.zeros_like(ids)
    for row, length in enumerate(lengths):
        at = slice(6 - length, 6) if padding == "left" else slice(length)
        mask[row, at], positions[row, at] = 1, np.arange(length)
        want.append(run(every, ids[row : row + 1, at], (length,))[:, -3:])
    feed = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    found = last.session.run(["logits"], feed | last.start(2))[0]
    assert error(found, np.concatenate(want)) < 2e-5
    ids = PROMPT[:10]
    assert error(last.scores(ids), every.scores(ids)) < 2e-5


def test_a_session_chooses_how_many_tokens_have_logits(exported):
    """One file serves all: its default is one token, whose logits are the same bytes with any choice."""
    folder, ids = exported("qwen3_moe", logits="last"), tokens(1, 6)
    one = Generator(folder)
    want, _ = one.step(ids, one.start())
    assert (one.rows, want.shape[1]) == (1, 1)
    for count in (2, 6, 7, 2**63 - 1):
        several = Generator(folder, num_logits=count)
        found, _ = several.step(ids, several.start())
        assert found.shape == (1, min(count, 6), one.vocabulary)
        assert found[:, -1:].tobytes() == want.tobytes()
        prompts = [ids[0].tolist(), ids[0, :3].tolist()]  # padded, to memory that is bound
        assert several.generate_batch(prompts, 4) == one.generate_batch(prompts, 4)
    fixed = Generator(exported("qwen3_moe", logits=2), num_logits=3)
    assert (fixed.rows, fixed.step(ids, fixed.start())[0].shape[1]) == (2, 2)
    with pytest.raises(OptionError, match="num_logits is 0, expected an integer of at least 1"):
        Generator(folder, num_logits=0)


def test_what_cannot_speculate_is_named(exported):
    folder = exported("qwen3_moe", activations="float", logits=1)
    message = r"4 draft tokens need the logits of 5 tokens \(this model gives 1\): export it with --logits 5$"
    with pytest.raises(ModelError, match=message):
        Generator(folder, speculate="ngram")
    with pytest.raises(ModelError, match=r"\(this model gives 3\): export it with --logits 4, or ask for at most 2$"):
        Generator(exported("qwen3_moe", activations="float", logits=3), speculate="ngram", drafts=3)
    few = Generator(exported("qwen3_moe", activations="float", logits=3), speculate="ngram")
    assert (few.drafts, few.step_tokens) == (2, 3)  # what it can verify, where nobody says
    with pytest.raises(OptionError, match="drafts is 0, expected an integer of at least 1"):
        Generator(folder, speculate="ngram", drafts=0)


class Zeros:
    """A cache of a model that always gives 0."""

    hidden = None

    def __init__(self):
        self.tokens, self.room, self.model, self.whole = [], 100, self, True

    def append(self, ids, heard):
        return self.verify(ids)[-1]

    def verify(self, ids):
        self.tokens += ids
        return np.zeros((len(ids), 1))

    def rewind(self, length):
        del self.tokens[length:]

    def finite(self, row, length):
        return row


def test_there_are_more_drafts_where_they_are_accepted():
    asked, next_ = [], iter([9, 9, 0, 0, 0, 0, 9, 0])

    class Told(Lookup):
        def __call__(self, tokens, count):
            asked.append(count)
            return [next(next_)] * count

    list(itertools.islice(Speculation(Told(), 4).steps(Zeros(), [0], 99, stop=(), sample=Sampler()), 20))
    assert asked == [4, 1, 1, 2, 4, 4, 4, 1]
