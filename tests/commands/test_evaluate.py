"""`quantmoe evaluate` on the demo's model: its figures are those of the definition, and of transformers."""

from __future__ import annotations

import contextlib
import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.harness.once import made_once
from typer.testing import CliRunner

from quantmoe.benchmarks.quality.evaluate import Outputs, evaluate, outputs
from quantmoe.exporter.cli import app
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.graph.streamed_model import Streamed
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.windows import windows_of
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.chat import Text
from quantmoe.runtime.generate import Generator

DEMO = Path(__file__).parents[2] / "samples" / "demo_model"
TEXT = (DEMO / "heldout.txt").read_text(encoding="utf-8")[:3000]
WINDOW = 128


@pytest.fixture(scope="module", params=["checkpoint", pytest.param("hybrid", marks=pytest.mark.every)])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return DEMO / request.param


@pytest.fixture(scope="module")
def exact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Float activations and cache, and the logits of the last token alone."""

    def write(folder: Path) -> None:
        export(checkpoint, folder, activations="float", cache="f32")

    return made_once(tmp_path_factory, write, "evaluate exact", checkpoint=checkpoint.name)


@pytest.fixture(scope="module")
def rounded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default's activations, and the logits of all tokens."""

    def write(folder: Path) -> None:
        export(checkpoint, folder, logits="all")

    return made_once(tmp_path_factory, write, "evaluate rounded", checkpoint=checkpoint.name)


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.from_numpy(logits).double(), -1).numpy()


def test_figures_are_those_of_the_definition(checkpoint: Path, exact: Path, rounded: Path) -> None:
    """Against float64 sums over transformers' logits and those that the model's own session gives."""
    found = evaluate(rounded, TEXT, against=checkpoint, window=WINDOW, windows=3)
    windows = windows_of(rounded, TEXT, WINDOW)[:3]
    assert (found.windows, found.window) == (3, WINDOW)
    reference = dequantized(Skeleton(find_format(open_checkpoint(checkpoint))))
    with torch.no_grad():
        base = [softmax(reference(torch.tensor([ids])).logits[0].numpy()) for ids in windows]
    ours = [softmax(Generator(rounded).scores(ids)) for ids in windows]
    kld = np.concatenate([(p * np.log(p / q)).sum(-1) for p, q in zip(base, ours, strict=True)])
    picked = [[p[np.arange(WINDOW - 1), ids[1:]] for p, ids in zip(x, windows, strict=True)] for x in (base, ours)]
    base_of, own = (np.concatenate(rows) for rows in picked)
    same = np.concatenate([p.argmax(-1) == q.argmax(-1) for p, q in zip(base, ours, strict=True)])
    figures, close = found.figures, {"rel": 1e-3}  # both references are float32
    assert figures.predicted == 3 * (WINDOW - 1)
    assert figures.perplexity.mean == pytest.approx(math.exp(-np.log(own).mean()), **close)
    assert figures.base_perplexity.mean == pytest.approx(math.exp(-np.log(base_of).mean()), **close)
    assert figures.log_ratio.mean == pytest.approx(np.log(base_of / own).mean(), abs=1e-5)
    assert figures.kld.mean == pytest.approx(kld.mean(), **close)
    assert figures.median_kld == pytest.approx(np.median(kld), **close)
    assert figures.kld_99 == pytest.approx(np.quantile(kld, 0.99), **close)
    assert figures.max_kld == pytest.approx(kld.max(), **close)
    assert figures.kld_quantiles == pytest.approx(np.quantile(kld, np.arange(101) / 100), abs=1e-6, **close)
    assert figures.rms_delta_p == pytest.approx(np.sqrt(((own - base_of) ** 2).mean()), **close)
    assert figures.same_top.mean == pytest.approx(same.mean(), abs=1 / len(same))
    assert figures.kld.error == pytest.approx(kld.std(ddof=1) / math.sqrt(len(kld)), **close)
    assert figures.kld.mean > 1e-5  # int8 activations cost something


def test_a_float_export_predicts_what_transformers_does(checkpoint: Path, exact: Path, rounded: Path) -> None:
    """Hidden states need a file beside the model, and nothing stays there; all logits need none."""
    before = sorted(exact.iterdir())
    found = evaluate(exact, TEXT, against=checkpoint, window=WINDOW, windows=2, layers=True)
    assert sorted(exact.iterdir()) == before
    assert found.figures.kld.mean < 1e-6
    assert found.figures.same_top.mean > 0.99
    layers = open_checkpoint(checkpoint).text_config["num_hidden_layers"]
    assert len(found.layers) == layers
    assert max(found.layers) < 1e-4
    against_itself = evaluate(rounded, TEXT, against=exact, window=WINDOW, windows=2, layers=True)
    assert len(against_itself.layers) == layers
    assert all(error > 20 * own for error, own in zip(against_itself.layers, found.layers, strict=True))


@pytest.mark.parametrize("layers", [False, True])
def test_a_session_of_the_file_itself_gives_all_logits(exact: Path, layers: bool) -> None:
    ids = windows_of(exact, TEXT, WINDOW)[0]
    with outputs(exact, [ids], layers=layers, threads=0, tell=lambda tokens: None) as found:
        ((logits, _),) = found
        assert (logits.shape[0], len(list(exact.glob("evaluate.partial.onnx")))) == (WINDOW, int(layers))


def test_a_model_does_not_differ_from_itself(exact: Path) -> None:
    found = evaluate(exact, TEXT, against=exact, window=WINDOW, windows=1, layers=True)
    assert (found.figures.kld.mean, found.figures.max_kld, found.figures.same_top.mean) == (0, 0, 1)
    assert set(found.layers) == {0}


@pytest.mark.parametrize("layers", [False, True])
def test_one_window_is_in_memory(exact: Path, rounded: Path, layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of both models for a window are freed before either runs the next one."""
    alive: list[weakref.ref] = []
    most: list[float] = []

    @contextlib.contextmanager
    def counted(*arguments: object, **named: object) -> Iterator[Iterator[Outputs]]:
        with outputs(*arguments, **named) as found:
            yield map(kept, found)

    def kept(found: Outputs) -> Outputs:
        alive.extend(map(weakref.ref, (found[0], *found[1])))
        most.append(sum(one() is not None for one in alive) / (1 + len(found[1])))
        return found

    monkeypatch.setattr("quantmoe.benchmarks.quality.evaluate.outputs", counted)
    evaluate(rounded, TEXT, against=exact, window=WINDOW, windows=3, layers=layers)
    assert most == [1, 2] * 3


def test_windows_are_equal_and_begin_as_the_tokenizer_says(exact: Path) -> None:
    text = Text(exact)
    windows = windows_of(exact, TEXT, 100)
    first, ids = text.ids("", begins=True), text.ids(TEXT)
    assert {len(window) for window in windows} == {100}
    assert all(window[: len(first)] == first for window in windows)
    joined = [token for window in windows for token in window[len(first) :]]
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) < 100
    short = "In the beginning"
    assert windows_of(exact, short, 100) == [[*first, *text.ids(short)]]


def test_layers_of_a_checkpoint_come_and_go(checkpoint: Path) -> None:
    """One decoder layer has weights while it runs, none after."""
    streamed = Streamed(find_format(open_checkpoint(checkpoint)))
    alive: list[int] = []

    def count(*_: object) -> None:
        alive.append(sum(any(not p.is_meta for p in layer.parameters()) for layer in streamed.layers))

    for layer in streamed.layers:
        layer.register_forward_pre_hook(count)
    windows = [[5, 6, 7, 8], [9, 10, 11, 12]]
    found = list(streamed.outputs(windows))
    assert alive == [1] * len(streamed.layers)
    assert all(p.is_meta for layer in streamed.layers for p in layer.parameters())
    reference = dequantized(Skeleton(find_format(open_checkpoint(checkpoint))))
    with torch.no_grad():
        wanted = reference(torch.tensor(windows)).logits.numpy()
    assert np.array_equal(np.stack([logits for logits, _ in found]), wanted)


def test_the_command(exact: Path, rounded: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    arguments = [
        "evaluate",
        str(rounded),
        "--text",
        str(tmp_path / "text"),
        "--max-windows",
        "2",
        "--window",
        str(WINDOW),
    ]
    run = CliRunner().invoke
    compared = [*arguments, "--against", str(exact), "--each-layer", "--plot", str(tmp_path / "kld.svg")]
    shown = run(app, compared, catch_exceptions=False).output
    drawn = (tmp_path / "kld.svg").read_text(encoding="utf-8")
    for text in (
        f"{rounded} -->",
        f"against {exact} -->",
        "% of the positions",
        "KL divergence at most, nats",
        "mean: ",
    ):
        assert f"<!-- {text}" in drawn
    for name in ("Mean PPL(Q)", "Mean PPL(base)", "Mean ln(PPL(Q)/PPL(base))", "Mean KLD", "Median KLD", "99.0% KLD",
                 "Maximum KLD", "RMS Δp", "Same top p", "after layer"):  # fmt: skip
        assert name in shown
    alone = json.loads(run(app, [*arguments, "--json"], catch_exceptions=False).output)
    assert alone["figures"]["kld"] is None
    wanted = evaluate(rounded, TEXT, window=WINDOW, windows=2)
    assert alone["figures"]["perplexity"]["mean"] == wanted.figures.perplexity.mean
    assert (alone["windows"], alone["window"], alone["layers"]) == (2, WINDOW, None)


def test_what_is_refused(exact: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="layers needs against"):
        evaluate(exact, TEXT, layers=True)
    with pytest.raises(OptionError, match="window is 1, expected an integer of at least 2"):
        evaluate(exact, TEXT, window=1)
    with pytest.raises(ModelError, match="the text has 0 tokens, expected at least 2 in a window of 512"):
        evaluate(exact, "")
    (tmp_path / "empty").write_text(" \n", encoding="utf-8")
    done = CliRunner().invoke(app, ["evaluate", str(exact), "--text", str(tmp_path / "empty")], standalone_mode=False)
    assert "expected text, found no text" in str(done.exception)
