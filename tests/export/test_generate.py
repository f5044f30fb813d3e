"""Long prompts, going back, and streaming: the same tokens whatever way a prompt was run."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import onnx_ir as ir
import pytest
from sweeps import every
from test_model import error, tokens

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.reading.sampling import Sampling
from quantmoe.exporter.running.generate import Generator
from quantmoe.exporter.writing.genai import SHARE_BUFFER, genai_config, shares_buffer

ARCHITECTURES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"]  # full, sliding, latent and chunked attention
PROMPT = tokens(1, 23, seed=4)[0].tolist()


@pytest.fixture(params=every(ARCHITECTURES, 2))
def folder(exported, request):
    return exported(request.param, activations="float", logits="last")


def test_chunks_of_any_size_give_the_tokens_of_one_run(folder, exported):
    whole = Generator(folder, chunk=1000).greedy(PROMPT, 12)
    for chunk in (1, 5, 22, 23):
        found = Generator(folder, chunk=chunk).greedy(PROMPT, 12)
        assert found.tokens == whole.tokens
        assert error(found.logits, whole.logits) < 2e-5
    scored = Generator(exported(folder.name, activations="float"), chunk=5)
    assert scored.greedy(PROMPT, 12).tokens == whole.tokens
    assert error(scored.scores(PROMPT)[-1:], whole.logits[:1]) < 2e-5


def test_going_back_gives_the_tokens_of_one_prompt(folder):
    generator = Generator(folder, chunk=4)
    cache = generator.cache()
    first = generator.generate(PROMPT, 6, cache=cache)
    assert cache.tokens == PROMPT + first.tokens[:-1]
    for length, more in ((23, [5, 6, 7]), (28, [8, 9]), (3, [8]), (0, PROMPT)):
        cache.rewind(length)
        prompt = cache.tokens + more
        found = generator.generate(more, 6, cache=cache)
        assert cache.tokens == prompt + found.tokens[:-1]
        assert found.tokens == generator.greedy(prompt, 6).tokens
    assert cache.keep([*PROMPT[:9], 1, 2]) == 9
    assert cache.keep(PROMPT[:9]) == 8  # the last is run again
    with pytest.raises(ModelError, match="the cache has 8 tokens, there is no going back to 9"):
        cache.rewind(9)


def test_the_cache_holds_what_was_run_when_a_run_is_interrupted(exported, monkeypatch):
    generator = Generator(exported("qwen3_moe", activations="float"), chunk=4)
    cache, calls = generator.cache(), itertools.count()
    run = cache._run

    def interrupted(ids):
        found = run(ids)
        if next(calls) == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(cache, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generator.generate(PROMPT, 4, cache=cache)
    assert cache.tokens == PROMPT[:8]
    found = generator.generate(PROMPT[8:], 4, cache=cache)
    assert found.tokens == Generator(generator.path).greedy(PROMPT, 4).tokens


def test_tokens_come_as_they_are_asked_for(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    whole = generator.greedy(PROMPT, 8)
    assert whole.logits.argmax(-1).tolist() == whole.tokens
    found = generator.stream(PROMPT, 8)
    assert (found.tokens, found.prompt, found.prefill) == ([], 23, 0)
    assert next(found) == whole.tokens[0]
    assert found.prefill > 0
    assert found.decode == 0
    assert list(itertools.islice(found, 2)) == whole.tokens[1:3]
    assert found.tokens == whole.tokens[:3]
    assert found.logits.size == 0
    last = max(map(whole.tokens.index, whole.tokens))  # where a token comes for the first time
    assert generator.generate(PROMPT, 8, stop=[1000, whole.tokens[last]]).tokens == whole.tokens[: last + 1]


def test_sampling_repeats_with_its_seed(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    a, b, c = (generator.generate(PROMPT, 12, sampling=Sampling(2.0, 0, 1.0, seed)).tokens for seed in (1, 1, 2))
    assert a == b != c
    assert generator.generate(PROMPT, 12, sampling=Sampling(5.0, 1)).tokens == generator.greedy(PROMPT, 12).tokens


def test_penalties_are_of_prompt_and_answer_wherever_they_run(exported):
    """One sequence, a conversation's cache, a batch, drafts."""
    generator = Generator(exported("qwen3_moe", activations="float", logits=5))
    never = Sampling(0.0, no_repeat_ngram_size=1)
    found = generator.generate(PROMPT, 12, sampling=never).tokens
    assert len({*PROMPT, *found}) == len({*PROMPT}) + 12
    cache = generator.cache()
    first = generator.generate(PROMPT, 5, sampling=never, cache=cache).tokens
    assert first + generator.generate(first[-1:], 7, sampling=never, cache=cache).tokens == found
    other = PROMPT[:3]
    alone = generator.generate(other, 12, sampling=never).tokens
    assert generator.generate_batch([PROMPT, other], 12, sampling=never) == [found, alone]
    drafting = Generator(generator.path, speculate="ngram")
    text, mild = PROMPT + generator.greedy(PROMPT, 60).tokens, Sampling(0.0, 50, 1.0, None, 0.0, 1.01, 0.0, 0.001)
    plain, drafted = (g.generate(text, 30, sampling=mild) for g in (generator, drafting))
    assert drafted.speculation.drafted > 0
    assert drafted.tokens == plain.tokens


def test_a_prompt_longer_than_the_context_is_refused_before_it_runs(exported, tmp_path, monkeypatch):
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    model = ir.load(folder / "model.onnx")
    model.metadata_props["context_length"] = "20"
    ir.save(model, folder / "model.onnx")
    generator = Generator(folder, chunk=8)
    cache = generator.cache()
    assert len(generator.generate(PROMPT[:12], 100, cache=cache).tokens) == 8
    with pytest.raises(ModelError, match="a prompt of 20 tokens leaves no room in the model's context of 20"):
        generator.stream([5], cache=cache)
    monkeypatch.setattr(generator, "cache", None)
    with pytest.raises(ModelError, match="a prompt of 23 tokens leaves no room in the model's context of 20"):
        generator.stream(PROMPT)
    with pytest.raises(ModelError, match="a prompt of 42 tokens leaves no room"):
        cache.append(PROMPT)


def test_options_that_the_model_does_not_take_are_named(plain):
    folder = plain
    with pytest.raises(ModelError, match=r"no capacity can be set, this model's cache grows with each run"):
        Generator(folder, capacity=100)
    with pytest.raises(ModelError, match="chunk is 0, expected at least 1"):
        Generator(folder, chunk=0)
    with pytest.raises(ModelError, match=r"this onnxruntime has no CUDA provider; .*onnxruntime-gpu\[cuda,cudnn\]"):
        Generator(folder, device="cuda")


def test_f16_caches_are_kept_and_cut(exported):
    generator = Generator(exported("qwen3_moe", activations="float", dtype="f16", cache="f16"), chunk=8)
    cache = generator.cache()
    generator.generate(PROMPT, 5, cache=cache)
    assert {dtype for _, dtype in generator.past.values()} == {np.dtype(np.float16)}
    cache.rewind(10)
    again = cache.append(PROMPT[10:])
    # float16 has 11 significant bits: chunks may round otherwise, some tens of times in a row
    assert error(again, Generator(generator.path).greedy(PROMPT, 1).logits[0]) < 2e-2


def cache_graph(readers):
    """A graph of caches and the nodes that read each: (domain, type) of one node for each cache, and Shape."""
    past = [ir.val(f"past_key_values.{i}.key") for i in range(len(readers))]
    nodes = [ir.Node(domain, op, [value]) for value, (domain, op) in zip(past, readers, strict=True)]
    nodes += [ir.Node("", "Shape", [value]) for value in past]
    return ir.Graph([ir.val("input_ids"), *past], [], nodes=nodes)


def test_past_and_present_are_one_buffer_where_all_caches_are_cached_attentions(plain):
    ours, concat = ("quantmoe", "CachedAttention"), ("", "Concat")
    assert shares_buffer(cache_graph([ours, ours]))
    for readers in ([ours, concat], [concat], [("", "CachedAttention")], []):
        assert not shares_buffer(cache_graph(readers))
    model = ir.load(plain / "model.onnx")
    assert not shares_buffer(model.graph)  # of standard nodes
    assert SHARE_BUFFER not in model.metadata_props


def test_what_onnxruntime_genai_is_told(checkpoint):
    config = json.loads((checkpoint("qwen3_moe") / "config.json").read_text(encoding="utf-8"))
    long, short = (config | {"max_position_embeddings": length} for length in (40960, 77))
    found = genai_config(long, {}, "library")["search"]
    assert found == {"do_sample": False, "max_length": 40960, "past_present_share_buffer": False, "chunk_size": 512}
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    found = genai_config(long, sampling, "library", shares=True)["search"]
    assert found == sampling | {"top_k": 50, "max_length": 4096, "past_present_share_buffer": True, "chunk_size": 512}
    assert genai_config(short, {}, "library", shares=True)["search"]["max_length"] == 77


def test_onnxruntime_genai_goes_on_after_going_back(exported):
    """A cache that grows: onnxruntime-genai does not run the last token of a reply, and appending after it fails in the
    graph; two tokens back, appended again, are the same as one prompt."""
    import onnxruntime_genai as og

    model = og.Model(str(exported("qwen3_moe", activations="float", logits="last")))

    def generator() -> og.Generator:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=80)
        return og.Generator(model, params)

    def take(generator: og.Generator, ids: list[int], count: int) -> list[int]:
        generator.append_tokens(ids)
        for _ in range(count):
            generator.generate_next_token()
        return generator.get_sequence(0).tolist()

    turns, new = generator(), [5, 6, 7]
    said = take(turns, PROMPT, 6)
    expected = take(generator(), said + new, 6)
    turns.rewind_to(len(said) - 2)
    assert take(turns, said[-2:] + new, 6) == expected
    turns.rewind_to(9)
    assert take(turns, said[9:] + new, 6) == expected
    turns.rewind_to(0)
    assert take(turns, said + new, 6) == expected
