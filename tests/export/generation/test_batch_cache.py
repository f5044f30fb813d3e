"""Rows of a server's cache with CUDA graphs, as a GPU has them, on the CPU: their sizes, and each row's own tokens."""

from __future__ import annotations

import numpy as np
import pytest
from export.targets.test_cuda_graphs import PROMPT, captured  # noqa: F401

from quantmoe.exporter.errors import ModelError
from quantmoe.runtime import opened_model
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.generate import Generator
from quantmoe.serving.batching import batch_cache as served
from quantmoe.serving.batching.batch_cache import Rows
from quantmoe.serving.batching.prefixes import BLOCK
from quantmoe.serving.batching.scheduler import check_serves

FLOAT = {"activations": "float", "logits": "last"}


def last(logits: Buffer) -> np.ndarray:
    """Return the logits [rows, vocabulary] of each row's last token."""
    count, *_, vocabulary = logits.value.shape()
    return logits.here().reshape(count, -1, vocabulary)[:, -1].copy()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("graphs", [False, True])
def test_rows_join_and_leave(exported, captured, monkeypatch, architecture: str, graphs: bool) -> None:  # noqa: F811
    """Greedy tokens of sequences that begin while others run, in rows that others had, are those of each one alone."""
    model = captured(architecture) if graphs else Generator(exported(architecture, **FLOAT))
    if graphs:
        monkeypatch.setattr(served, "SESSION_THREAD", opened_model.SESSION_THREAD)
    prompts = [PROMPT[at:] + PROMPT[:at] for at in range(5)]
    rows, found = Rows(model, 4, 32), [[] for _ in prompts]
    live: dict[int, int] = {}  # row -> prompt

    def begin(prompt: int, row: int) -> None:
        rows.read(row, prompts[prompt][:3])
        found[prompt].append(int(last(rows.read(row, prompts[prompt][3:])).argmax()))
        live[row] = prompt

    def step(count: int) -> None:
        for _ in range(count):
            logits, ran = rows.start({row: found[prompt][-1] for row, prompt in live.items()})
            for row, prompt in live.items():
                found[prompt].append(int(last(logits)[ran.index(row)].argmax()))

    begin(0, 2)
    step(2)
    begin(1, 1)
    step(2)
    rows.read(0, prompts[2][:3])  # a prompt of which a part is read while others go on
    step(1)
    found[2].append(int(last(rows.read(0, prompts[2][3:])).argmax()))
    live[0] = 2
    begin(3, 3)
    step(1)
    del live[2]
    rows.leave(2)
    begin(4, 2)
    step(3)
    with Generator(exported(architecture, **FLOAT)) as alone:
        assert found == [alone.generate(ids, len(tokens)).tokens for ids, tokens in zip(prompts, found, strict=True)]
    if graphs:
        assert len(model.session.captured) == 3  # of 1, 2 and 4 rows, before a row has tokens


def test_the_nearest_row(exported) -> None:
    model = Generator(exported("qwen3_moe", **FLOAT))
    rows = Rows(model, 8, 8)
    assert rows.nearest([0, 1, 3, 7], [5, 6]) == 7
    assert rows.nearest([0, 1, 3], [5, 6]) == 3
    assert rows.nearest([2, 1], []) == 1
    model.cuda_graph = True  # one graph for 1, 2, 4 and 8 rows
    assert rows.nearest([7, 3], [1, 2]) == 3
    assert [rows._between(used) for used in ([0], [1], [2], [4, 5], [7])] == [(0, 1), (0, 2), (0, 4), (0, 8), (0, 8)]


def test_contents_of_a_row(exported) -> None:
    """Keys, values and states that are put into another row go on there."""
    model = Generator(exported("qwen3_next", **FLOAT))
    rows, text = Rows(model, 3, 96), (PROMPT * BLOCK)[: 2 * BLOCK]
    rows.read(0, text)
    contents, states = rows.contents(0, 0, len(text)), rows.states(0)
    assert len(contents) == 2
    rows.put(2, contents)
    rows.put_states(2, states)
    rows.tokens[2] = list(text)
    logits, ran = rows.start({0: 7, 2: 7})
    of_both = last(logits)
    np.testing.assert_array_equal(of_both[ran.index(0)], of_both[ran.index(2)])
    rows.tokens[1] = list(text)  # without its keys
    logits, ran = rows.start({1: 7})
    assert not np.array_equal(last(logits)[ran.index(1)], of_both[0])


def test_what_cannot_be_served_is_said(exported) -> None:
    with pytest.raises(ModelError, match="keeps the states of 4 tokens for drafts; export it without --mtp"):
        check_serves(Generator(exported("qwen3_next", **FLOAT, state_window=4)))
