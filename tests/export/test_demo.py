"""`quantmoe demo` with checkpoints that the tools themselves wrote, and the model that was trained for it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from export.test_output import contents
from sweeps import every
from typer.testing import CliRunner

from quantmoe.benchmarks import pytorch_comparison as compare
from quantmoe.exporter.cli import app
from quantmoe.exporter.commands import demo as command
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

FIXTURES = Path(__file__).parent.parent / "fixtures"
TRAINED = Path(__file__).parents[2] / "samples" / "demo_model"


def fixtures() -> Sequence[object]:
    """Every fixture; first one of each model type and of each scheme."""
    found: dict[bool, list[object]] = {True: [], False: []}
    seen = set()
    for path in sorted(FIXTURES.glob("*/config.json")):
        format = find_format(open_checkpoint(path.parent))
        schemes = [s for layer in moe_layers(format) for s in (layer.scheme, layer.down_scheme)]
        kinds = {format.ckpt.config["model_type"], *(s.format for s in schemes)}
        found[kinds <= seen].append(path.parent)
        seen |= kinds
    return every(found[False] + found[True], len(found[False]))


@pytest.mark.parametrize("folder", fixtures(), ids=lambda folder: folder.name)
def test_every_fixture_is_exported_run_and_compared(folder, tmp_path, monkeypatch):
    found = []

    def recorded(*arguments: object) -> compare.Comparison:
        found.append(original(*arguments))
        return found[-1]

    original = compare.compare
    monkeypatch.setattr(compare, "compare", recorded)
    out = tmp_path / "model"
    done = CliRunner().invoke(
        app,
        ["demo", "--checkpoint", str(folder), "--output", str(out), "--max-new-tokens", "4"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    (compared,) = found
    assert len(compared.tokens) == len(compared.expected_tokens) == 4
    exact = compared.difference if compared.float_difference is None else compared.float_difference
    assert exact < 1e-4
    assert inspect(out)["metadata"]["num_logits"] == "1"  # also of prompts
    assert not list(out.glob("*.partial"))


def test_an_earlier_export_is_replaced_when_asked_only(exported, tmp_path, monkeypatch):
    """In the words of export, before any work."""
    out = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "demo-model")
    before = contents(out)
    with pytest.raises(FileExistsError, match=r"model\.onnx exists; --force \(in Python, force=True\) repl") as refused:
        export(FIXTURES / "quark-int4", out)
    monkeypatch.chdir(tmp_path)
    demo = ["demo", "--checkpoint", str(FIXTURES / "quark-int4"), "--max-new-tokens", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(command, "export_in_terminal", None)
        done = CliRunner().invoke(app, demo)
    assert str(done.exception) == str(refused.value).replace(f"{tmp_path}/", "")
    assert contents(out) == before
    assert CliRunner().invoke(app, [*demo, "--force"], catch_exceptions=False).exit_code == 0
    assert inspect(out)["metadata"]["checkpoint"] == "quark-int4"


def test_the_trained_model_writes_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    demo = [
        "demo",
        "--checkpoint",
        str(TRAINED / "checkpoint"),
        "--prompt",
        "And the king said unto",
        "--max-new-tokens",
        "24",
    ]
    done = CliRunner().invoke(app, demo, catch_exceptions=False)
    assert done.exit_code == 0
    tokenizer = load_tokenizer(tmp_path / "demo-model")
    prompt = tokenizer.encode("And the king said unto").ids
    text = tokenizer.decode(prompt + Generator("demo-model").greedy(prompt, 24).tokens)
    assert text.startswith("And the king said unto ")
    assert " ".join(text.split()[:8]) in " ".join(done.output.replace("\u2502", " ").split())
    known = set((TRAINED / "heldout.txt").read_text(encoding="utf-8").split())
    words = text.split()[:-1]  # the last may be cut
    assert sum(word in known for word in words) > 0.8 * len(words)


@pytest.mark.every
def test_perplexity_of_the_trained_model(tmp_path):
    """What docs/lab/demo-model.md says of its accuracy, on a part of the text.

    Float activations and a float32 cache differ from PyTorch by 1e-4 of the largest logit, as elsewhere here; a token's
    loss by twice that, as it is a difference of logits and their log-sum-exp.
    """
    spec = importlib.util.spec_from_file_location("perplexity", TRAINED / "perplexity.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tokens = (
        load_tokenizer(TRAINED / "checkpoint")
        .encode((TRAINED / "heldout.txt").read_text(encoding="utf-8"))
        .ids[: script.WINDOW]
    )
    reference = dequantized(Skeleton(find_format(open_checkpoint(TRAINED / "checkpoint"))))
    largest = 0.0

    def expected(ids):
        nonlocal largest
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0].numpy()
        largest = max(largest, float(np.abs(logits).max()))
        return logits

    found = {"torch": script.perplexity(expected, tokens)}
    for activations, cache in (("float", "f32"), ("int8", "auto")):
        out = tmp_path / activations
        export(TRAINED / "checkpoint", out, activations=activations, cache=cache, logits="all")
        found[activations] = script.perplexity(Generator(out).scores, tokens)
    assert found["torch"] < 40
    assert abs(np.log(found["float"] / found["torch"])) < 2e-4 * largest
    assert found["int8"] < 1.05 * found["torch"]
