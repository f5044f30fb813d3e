"""Prompts that run together, of unlike lengths: the tokens that each has alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from export.generation.test_shared import capture
from export.graph.test_model import tokens
from support.harness.sweeps import every
from typer.testing import CliRunner

from quantmoe.exporter.cli import app, main
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.sampling_options import Sampling
from quantmoe.runtime.batch import Batch
from quantmoe.runtime.generate import Generator

#: of 1, 23, 7 and 12 tokens
PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (1, 23, 7, 12)]
FLOAT = {"activations": "float", "logits": "last"}
KINDS = {
    "qwen3_moe": FLOAT,
    "qwen3_5_moe_text": FLOAT,
    "qwen3_next": {"logits": 5, "state_window": 5},  # of the last logits and a window of states
    "gpt_oss": {"activations": "float"},  # of all logits
    "deepseek_v3": FLOAT,
}


@pytest.fixture(params=every(list(KINDS), 3))
def folder(exported, request):
    return exported(request.param, **KINDS[request.param])


@pytest.mark.parametrize("chunk", [512, 20])
def test_each_prompt_has_the_tokens_that_it_has_alone(folder, chunk):
    """In chunks of 5 tokens a row, too. One ends early, and the others go on."""
    generator = Generator(folder, chunk=chunk)
    alone = [generator.generate(ids, 9).tokens for ids in PROMPTS]
    assert generator.generate_batch(PROMPTS, 9) == alone
    stop = alone[1][3]
    want = [found[: found.index(stop) + 1] if stop in found else found for found in alone]
    assert len(want[1]) < 9
    assert generator.generate_batch(PROMPTS, 9, [stop]) == want


def test_a_rows_cache_has_the_bytes_of_its_prompt_alone(exported):
    """Of the first layer: the routers' products in ONNX Runtime depend on the number of rows in their last bits."""
    generator = Generator(exported("qwen3_5_moe_text", **FLOAT))
    batch = generator.stream_batch(PROMPTS, 4)
    ended = 2
    for row, _ in batch:
        if row == ended and len(batch.tokens[row]) == 2:
            batch.end(row)
    for row, ids in enumerate(PROMPTS):
        assert len(batch.tokens[row]) == (2 if row == ended else 4)
        cache = generator.cache()
        cache.append(ids)
        for token in batch.tokens[row][:-1]:
            cache.append([token])
        _, states = cache.contents()
        for name, array in states[len(cache.tokens)].items():
            if name.startswith("past_key_values.0."):
                assert batch._room.buffers[name].numpy()[row].tobytes() == array.tobytes(), (row, name)


def test_tokens_come_as_they_are_asked_for(exported):
    generator = Generator(exported("qwen3_moe", **FLOAT))
    batch = generator.stream_batch(PROMPTS[:2], 3)
    assert (batch.prompt, batch.prefill, batch.tokens) == (24, 0, [[], []])
    found = [next(batch), next(batch), next(batch)]
    assert [row for row, _ in found] == [0, 1, 0]
    assert batch.tokens == [[found[0][1], found[2][1]], [found[1][1]]]
    assert batch.prefill > 0
    batch.end(0)
    assert {row for row, _ in batch} == {1}
    for row in (-1, 2):
        with pytest.raises(ModelError, match=f"there is no prompt {row}, only 0 to 1"):
            batch.end(row)


def test_any_numbers_are_prompts(exported):
    generator = Generator(exported("qwen3_moe", **FLOAT))
    want = generator.generate_batch(PROMPTS, 3)
    assert generator.generate_batch((iter(ids) for ids in PROMPTS), 3) == want
    assert generator.generate_batch([np.array(ids) for ids in PROMPTS], 3) == want
    same = np.array([PROMPTS[2][:5], PROMPTS[3][:5]])
    assert generator.generate_batch(same, 3) == generator.generate_batch(same.tolist(), 3)


def test_like_lengths_run_together(exported, monkeypatch, tmp_path):
    """A long line does not pad the short ones beside it; answers stand in the file's order."""
    folder, ran, make = str(exported("qwen3_moe", **FLOAT)), [], Batch.__init__

    def noted(self, model, rooms, prompts, **others):
        ran.append([len(ids) for ids in prompts])
        make(self, model, rooms, prompts, **others)

    prompts = ["a", "bc", "a long line " * 5, "b", "another long line " * 5]
    (tmp_path / "prompts").write_text("\n".join(prompts), encoding="utf-8")
    arguments = ["generate", folder, "--max-new-tokens", "4", "--temperature", "0"]
    alone = [CliRunner().invoke(app, [*arguments, "--prompt", prompt]).stdout[:-1] for prompt in prompts]
    monkeypatch.setattr(Batch, "__init__", noted)
    done = CliRunner().invoke(app, [*arguments, "--prompts", str(tmp_path / "prompts"), "--batch", "2"])
    assert [json.loads(line) for line in done.stdout.splitlines()] == alone
    lengths = [length for rows in ran for length in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(rows) for rows in ran] == [2, 2, 1]


def test_sampling_is_that_of_each_alone(exported):
    generator, sampling = Generator(exported("qwen3_moe", **FLOAT)), Sampling(2.0, 0, 1.0, seed=3)
    want = [generator.generate(ids, 8, sampling=sampling).tokens for ids in PROMPTS]
    assert generator.generate_batch(PROMPTS, 8, sampling=sampling) == want


def test_a_context_ends_its_row(exported):
    generator = Generator(exported("qwen3_5_moe_text", **FLOAT))
    generator.context = 25
    found = generator.generate_batch(PROMPTS, 5)
    assert [len(row) for row in found] == [5, 2, 5, 5]
    assert found == [generator.generate(ids, 5).tokens for ids in PROMPTS]


def test_what_cannot_run_together_is_named(exported, plain):
    generator = Generator(exported("qwen3_moe", **FLOAT), capacity=30)
    assert [len(row) for row in generator.generate_batch(PROMPTS, 7)] == [7] * 4
    for prompts, count, message in (
        ([], 1, "there are no prompts"),
        ([[1], []], 1, "prompt 1: the prompt has no tokens"),
        ([[1], [-1]], 1, "prompt 1: token id -1 is outside the vocabulary"),
        (PROMPTS, 8, "31 tokens, the cache has a capacity of 30"),
    ):
        with pytest.raises(ModelError, match=message):
            generator.generate_batch(prompts, count)
    with pytest.raises(ModelError, match="prompts cannot run together, this model's cache grows with each run"):
        Generator(plain).generate_batch(PROMPTS)
    drafting = Generator(exported("qwen3_next", **KINDS["qwen3_next"]), speculate="ngram")
    with pytest.raises(ModelError, match="take no drafts: speculate is ngram"):
        drafting.generate_batch(PROMPTS)


def test_steps_as_a_cuda_graph_has_them(exported):
    """One step of a fixed shape, of all rows and the whole capacity, that runs several times when it is captured."""
    generator = Generator(exported("qwen3_5_moe_text", **FLOAT))
    want = generator.generate_batch(PROMPTS, 6)
    capture(generator)
    batch = generator.stream_batch(PROMPTS, 6)
    list(batch)
    assert batch.tokens == want
    assert len({*map(id, generator.session.captured)}) == 2  # the prompts' runs, and the step


def test_the_command(exported, tmp_path):
    """Answers in the order of the prompts, each as alone; of two at a time, where a stop ends one of them."""
    folder = str(exported("qwen3_moe", **FLOAT))
    options = ["--max-new-tokens", "9", "--temperature", "0"]
    prompts = ["hello", "a much longer\none", "x"]

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(app, ["generate", folder, *arguments, *options])
        assert done.exit_code == 0, done.output
        return done

    alone = [run("--prompt", prompt).stdout[:-1] for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts), encoding="utf-8")
    done = run("--prompts", str(tmp_path / "prompts.jsonl"), "--batch", "2")
    assert [json.loads(line) for line in done.stdout.splitlines()] == alone
    assert "3 prompts: " in done.stderr
    (tmp_path / "prompts").write_text("\ufeffhello\nx\n\n", "utf-8")
    stop = alone[0][3:5]
    done = run("--prompts", str(tmp_path / "prompts"), "--stop", stop)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [alone[i].split(stop)[0] for i in (0, 2)]


def test_lines_that_are_no_prompts_are_named(exported, tmp_path, monkeypatch, capsys):
    """All of them before the first batch: nothing is printed, and nothing has run."""
    folder = exported("qwen3_moe", **FLOAT)
    context = Generator(folder).context
    monkeypatch.setattr("quantmoe.runtime.generate.Generator.stream_batch", None)
    string = "expected a JSON string that is not empty"
    for name, content, message, code in (
        ("p.jsonl", '"a"\n3\n', f"p.jsonl, line 2: {string}", 2),
        ("p.jsonl", '"a"\nhello\n', f"p.jsonl, line 2: {string}", 2),
        ("p.jsonl", '"a"\n""\n', f"p.jsonl, line 2: {string}", 2),
        ("p.jsonl", '"a"\n\n"b"\n', f"p.jsonl, line 2: {string}", 2),
        ("p.jsonl", f'"a"\n"b"\n{"[" * 99999}\n', f"p.jsonl, line 3: {string}", 2),
        ("p.jsonl", '"a"\n"\\ud800"\n', "p.jsonl, line 2: expected text, found half of a pair", 2),
        ("p.txt", "a\n \nb\n", "p.txt, line 2: expected a prompt, the line is empty", 2),
        ("p.txt", "\n \n", "p.txt: expected a prompt a line, there is none", 2),
        ("p.txt", f"a\n{'b ' * context}\n", "p.txt, line 2: ", 1),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["quantmoe", "generate", str(folder), "--prompts", str(tmp_path / name)])
        with pytest.raises(SystemExit) as raised:
            main()
        told = capsys.readouterr()
        assert told.out == ""
        assert message in (told.err if code == 2 else str(raised.value))
        assert (raised.value.code == 2) == (code == 2)
    assert f"and 1 for the answer do not fit into the model's context of {context} tokens" in str(raised.value)
