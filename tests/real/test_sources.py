"""A tokenizer.model of SentencePiece becomes a tokenizer.json, by transformers and the package sentencepiece."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from real.languages import of_python, of_transformers
from real.vocabularies import battery
from transformers import AutoTokenizer

from quantmoe.exporter.writing.tokenizer import write_tokenizer

pytestmark = pytest.mark.real
CONFIG = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of Llama 2's kind, trained on the battery."""
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = [line for text in battery() for line in text.replace("\0", " ").splitlines() if line.strip()]
    trainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=4000,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.mark.parametrize("config", [{}, {"legacy": False}, {"add_bos_token": False, "add_eos_token": True}])
def test_sentencepiece(model: Path, config: dict[str, bool], tmp_path: Path, found: Callable[[str], None]) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    shutil.copy(model, source)
    (source / "config.json").write_text('{"model_type": "mixtral"}', encoding="utf-8")
    (source / "tokenizer_config.json").write_text(json.dumps(CONFIG | config), encoding="utf-8")
    shutil.copytree(source, out)
    assert write_tokenizer(source, lambda name: out / name) == ""
    wanted = of_transformers(AutoTokenizer.from_pretrained(source), battery())
    assert of_transformers(AutoTokenizer.from_pretrained(out), battery()) == wanted
    assert of_python(out, battery()) == wanted
    found(f"tokenizer.model {config}: {len(wanted)} texts, 0 differ")
