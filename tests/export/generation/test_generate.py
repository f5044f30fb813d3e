"""Long prompts, going back, and streaming: the same tokens whatever way a prompt was run."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx_ir as ir
import pytest
from export.graph.test_model import error, tokens
from support.harness.sweeps import every

import quantmoe
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.metadata import SHARE_BUFFER
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.exporter.targets import CPU
from quantmoe.exporter.writing.genai import genai_config, shares_buffer
from quantmoe.runtime.generate import Generator

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


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_the_next_answer_on_a_cache_ends_the_one_before(exported, speculate):
    generator = Generator(exported("qwen3_moe", activations="float"), speculate=speculate)
    whole = generator.generate(PROMPT, 8).tokens
    cache = generator.cache()
    left = generator.stream(PROMPT, 8, cache=cache)
    assert [next(left), next(left)] == whole[:2]
    over = generator.stream([*whole[1:2], *PROMPT], 2, cache=cache)
    tokens = list(over)
    with pytest.raises(ModelError, match="another answer was begun"):
        next(left)
    assert list(over) == []  # it was over
    assert tokens == generator.generate([*PROMPT, *whole[:2], *PROMPT], 2).tokens
    kept = generator.stream(PROMPT, 8, cache=cache)
    next(kept)
    assert cache.keep(PROMPT) == len(PROMPT) - 1
    with pytest.raises(ModelError, match="another answer was begun"):
        next(kept)


def test_sampling_repeats_with_its_seed(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    a, b, c = (generator.generate(PROMPT, 12, sampling=Sampling(2.0, 0, 1.0, seed=seed)).tokens for seed in (1, 1, 2))
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
    text, mild = (
        PROMPT + generator.greedy(PROMPT, 60).tokens,
        Sampling(
            0.0, 50, 1.0, seed=None, min_p=0.0, repetition_penalty=1.01, presence_penalty=0.0, frequency_penalty=0.001
        ),
    )
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
    with pytest.raises(
        ModelError,
        match="20 tokens and 1 for the answer do not fit into the model's context of 20 tokens: shorten the prompt",
    ):
        generator.stream([5], cache=cache)
    monkeypatch.setattr(generator, "cache", None)
    with pytest.raises(ModelError, match="23 tokens and 1 for the answer do not fit into the model's context of 20"):
        generator.stream(PROMPT)
    with pytest.raises(ModelError, match="42 tokens do not fit into the model's context of 20 tokens"):
        cache.append(PROMPT)


def test_options_that_the_model_does_not_take_are_named(plain):
    folder = plain
    with pytest.raises(ModelError, match=r"no capacity can be set, this model's cache grows with each run"):
        Generator(folder, capacity=100)
    with pytest.raises(OptionError, match="chunk is 0, expected an integer of at least 1"):
        Generator(folder, chunk=0)
    with pytest.raises(ModelError, match=r"this onnxruntime has no CUDA provider; .*onnxruntime-gpu\[cuda,cudnn\]"):
        Generator(folder, device="cuda")


def test_wrong_arguments_are_named(exported):
    """Each by its name, before anything runs; integers of NumPy are integers."""
    folder = exported("qwen3_moe", activations="float")
    for wrong in (
        {"device": "tpu"}, {"speculate": "lookup"}, {"experts": "ram"}, {"chunk": 0}, {"chunk": 1.5}, {"capacity": "x"},
        {"drafts": True}, {"drafts": 3}, {"max_length": -1}, {"batch": 0}, {"threads": -1}, {"threads": "2"},
        {"ram": "2GB"}, {"ram": 1.5}, {"ram": True}, {"gpu_memory": "all"}, {"gpu_memory": -1}, {"reserve": "auto"},
    ):  # fmt: skip
        with pytest.raises(OptionError, match=f"^{next(iter(wrong))} is .*, expected "):
            Generator(folder, **wrong)
    for name, call, arguments in (
        ("path", Generator, [5]),
        ("path", quantmoe.inspect, [5]),
        ("path", quantmoe.unpack, [5, 0, "layer"]),
        ("folder", quantmoe.Text, [5]),
        ("checkpoint", quantmoe.export, [5, "out"]),
        ("output", quantmoe.export, ["checkpoint", 5]),
    ):
        with pytest.raises(OptionError, match=f"^{name} is 5, expected a path$"):
            call(*arguments)
    generator = Generator(folder)
    for call in (generator.generate, generator.stream, generator.greedy, generator.scores):
        for ids in ([1.5], [5, "a"], "text", b"text", {5: 6}, 5, [[5]], [None], [True]):
            with pytest.raises(OptionError, match=r"^the prompt is .*, expected token ids, which are integers"):
                call(ids)
        for ids in ([], [-1], [1 << 20]):
            with pytest.raises(ModelError, match=r"^the prompt has no tokens|is outside the vocabulary"):
                call(ids)
    for call in (generator.generate, generator.stream, generator.greedy):
        with pytest.raises(OptionError, match=r"^stop is 5, expected token ids"):
            call([5], stop=5)
        for count in (0, -1, 1.5, "3", True, None):
            with pytest.raises(OptionError, match=f"^max_new_tokens is {count!r}, expected an integer of at least 1"):
                call([5], count)
    with pytest.raises(OptionError, match=r"quantmoe.Chat and quantmoe.Text take text"):
        generator.generate("text")
    for cache in ("x", Generator(exported("qwen3_moe")).cache()):
        with pytest.raises(OptionError, match=r"^cache is .*, expected a cache of "):
            generator.generate([5], cache=cache)
        with pytest.raises(OptionError, match=r"^cache is .*, expected a cache of "):
            generator.save_cache(cache, "saved.state")
    for call, arguments in ((generator.save_cache, [generator.cache()]), (generator.load_cache, [])):
        with pytest.raises(OptionError, match=r"^path is 5, expected a path$"):
            call(*arguments, 5)
    with pytest.raises(OptionError, match=r"^sampling is 0\.7, expected quantmoe\.Sampling"):
        generator.generate([5], sampling=0.7)
    with pytest.raises(OptionError, match=r"^prompt 1: the prompt is \[1\.5\]"):
        generator.generate_batch([[5], [1.5]])
    with pytest.raises(OptionError, match=r"^prompt 0: the prompt is 5, expected token ids"):
        generator.generate_batch([5, 6])
    with pytest.raises(OptionError, match=r"^max_new_tokens is 0"):
        generator.generate_batch([[5]], 0)
    with pytest.raises(OptionError, match=r"^stop is \['a'\]"):
        generator.generate_batch([[5]], stop=["a"])
    with pytest.raises(OptionError, match=r"^the prompt is"):
        generator.cache().append([1.5])
    expected = generator.generate([5, 6], 3, [7]).tokens
    assert generator.generate(np.array([5, 6], np.int32), np.int64(3), np.array([7])).tokens == expected
    assert generator.generate(iter([5, 6]), 3, iter([7])).tokens == expected


def test_a_reply_says_why_it_ended(exported, tmp_path):
    generator = Generator(exported("qwen3_moe", activations="float"))
    whole = generator.greedy(PROMPT, 8)
    assert whole.finish_reason == "length"
    found = generator.stream(PROMPT, 8)
    assert [(next(found), found.finish_reason)[1] for _ in range(8)] == [None] * 7 + ["length"]
    last = max(map(whole.tokens.index, whole.tokens))  # where a token comes for the first time
    assert generator.generate(PROMPT, 8, stop=[whole.tokens[last]]).finish_reason == "stop"
    assert generator.generate(PROMPT, last + 1, stop=[whole.tokens[last]]).finish_reason == "stop"
    assert generator.generate(PROMPT, 2, stop=[whole.tokens[last]]).finish_reason == "length"
    batch = generator.stream_batch([PROMPT, PROMPT[:5]], 8, stop=[whole.tokens[last]])
    assert batch.finish_reasons == [None, None]
    rows = [list(zip(*batch, strict=True)), batch.finish_reasons][1]
    assert rows[0] == "stop"
    assert rows[1] == ("stop" if batch.tokens[1][-1] == whole.tokens[last] else "length")
    generator.context = len(PROMPT) + 3
    found = generator.generate(PROMPT, 100)
    assert (len(found.tokens), found.finish_reason) == (3, "length")


def test_the_end_of_a_with_block_frees_the_session(exported):
    with Generator(exported("qwen3_moe", activations="float")) as generator:
        session = weakref.ref(generator.session)
        generator.greedy(PROMPT, 2)
    assert session() is None
    with pytest.raises(ModelError, match="this Generator is closed; create another one"):
        generator.greedy(PROMPT, 2)
    generator.close()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_close_ends_answers_of_other_threads_by_name(exported, architecture):
    folder, ended = exported(architecture, activations="float"), 0
    for wait in range(8):
        generator = Generator(folder, chunk=64)
        prompt = [1 + i * 7 % 60 for i in range(min(1000, generator.context // 2))]
        with ThreadPoolExecutor(2) as threads:
            answers = [threads.submit(generator.generate, prompt, 100000) for _ in range(2)]
            time.sleep(0.01 * wait)
            generator.close()
            for answer in answers:
                if error := answer.exception():  # else it was over
                    assert isinstance(error, ModelError)
                    assert "this Generator is closed; create another one" in str(error)
                    ended += 1
        with pytest.raises(ModelError, match="this Generator is closed"):
            generator.generate(prompt)
    assert ended


def test_close_after_ctrl_c_between_a_step_and_its_context_manager(exported):
    """Python calls a signal's handler at the first instruction of ``__exit__``, if the engine's run has just ended."""
    generator = Generator(exported("qwen3_moe", activations="float"))

    def trace(frame, event, argument):
        if frame.f_code is contextlib._GeneratorContextManager.__exit__.__code__:
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt) as interrupted:
            generator.step(np.array([PROMPT]), generator.start())
    finally:
        sys.settrace(None)
    assert interrupted.traceback  # its frames live
    closing = threading.Thread(target=generator.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()


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
    found = genai_config(long, {}, CPU)["search"]
    assert found == {"do_sample": False, "max_length": 40960, "past_present_share_buffer": False, "chunk_size": 512}
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    found = genai_config(long, sampling, CPU, shares=True)["search"]
    assert found == sampling | {"top_k": 50, "max_length": 4096, "past_present_share_buffer": True, "chunk_size": 512}
    assert genai_config(short, {}, CPU, shares=True)["search"]["max_length"] == 77
    found = genai_config(long, {"do_sample": True, "top_k": 0, "bos_token_id": None}, CPU)
    assert (found["search"]["top_k"], "bos_token_id" in found["model"]) == (0, False)
    assert genai_config(long, {"do_sample": True, "temperature": 0.0}, CPU)["search"]["do_sample"] is False


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
