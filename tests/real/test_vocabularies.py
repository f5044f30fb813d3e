"""Tokens of real vocabularies are AutoTokenizer's, in every language, as a whole and as a stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from real.languages import LANGUAGES, NotHereError, of_transformers, texts_of
from real.vocabularies import VOCABULARIES, Vocabulary, make
from tokenizers import Tokenizer
from transformers import AutoTokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def vocabulary_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Vocabulary]:
    """vocabulary_of(name) -> what make() gives, made once."""
    return cache(lambda name: make(name, tmp_path_factory.mktemp("vocabulary")))


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest, vocabulary_of: Callable[[str], Vocabulary]) -> Vocabulary:
    return vocabulary_of(request.param)


def compare(vocabulary: Vocabulary, reader: str, lines: list[str], found: Callable[[str], None]) -> None:
    wanted = vocabulary.expected.read_text(encoding="utf-8").splitlines()
    differ = [i for i in range(max(len(wanted), len(lines))) if wanted[i : i + 1] != lines[i : i + 1]]
    found(f"{vocabulary.name:16} {reader:24} {len(wanted)} texts, {len(differ)} differ")
    if differ:
        first = differ[0]
        text = texts_of(vocabulary.expected)[first] if first < len(wanted) else ""
        pytest.fail(f"{text!a}: expected {wanted[first : first + 1]}, found {lines[first : first + 1]}")


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language(vocabulary: Vocabulary, language: str, found: Callable[[str], None]) -> None:
    try:
        lines = LANGUAGES[language](vocabulary.outdir, vocabulary.expected)
    except NotHereError as reason:
        found(f"{vocabulary.name:16} {language:24} not run: {reason}")
        pytest.skip(str(reason))
    compare(vocabulary, language, lines, found)


def test_transformers_in_the_exported_folder(vocabulary: Vocabulary, found: Callable[[str], None]) -> None:
    auto = AutoTokenizer.from_pretrained(vocabulary.outdir)
    compare(vocabulary, "AutoTokenizer of OUTDIR", of_transformers(auto, texts_of(vocabulary.expected)), found)


def test_special_tokens_in_decoded_texts(vocabulary: Vocabulary) -> None:
    auto = AutoTokenizer.from_pretrained(vocabulary.checkpoint)
    plain = Tokenizer.from_file(str(vocabulary.outdir / "tokenizer.json"))
    for line in vocabulary.expected.read_text(encoding="utf-8").splitlines():
        ids = [*map(int, line.split("\t")[1].split())]
        assert plain.decode(ids, skip_special_tokens=False) == auto.decode(ids)
