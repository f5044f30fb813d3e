"""A text has at least as many tokens as quantmoe says before it is tokenized."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from quantmoe.exporter.folder.token_length import TokenLength
from quantmoe.exporter.folder.tokenizer import read_tokenizer

DEMO = Path(__file__).parents[2] / "samples" / "demo_model" / "checkpoint" / "tokenizer.json"
WORDS = ["the sea was calm", "  ", "\n\n\n", "Ångström", "e\u0301", "U\u0308\u0304", "\u03b9\u0308\u0301", "한국",
         "\u1112\u1161\u11ab", "語", "😀", "K\u0327\u212a", "<mark>", "\t", "0123456789"]  # fmt: skip


def in_bytes(**options: Any) -> Tokenizer:
    """Return a tokenizer like the ones of GPT-2 and its successors."""
    found = Tokenizer(models.BPE(**options))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(["the sea was calm", "the sea "] * 9, trainer)
    found.add_special_tokens([AddedToken("<mark>", special=True)])
    return found


def composed() -> Tokenizer:
    """As Qwen's."""
    found = in_bytes()
    found.normalizer = normalizers.NFC()
    dividers = [pre_tokenizers.Split(Regex(r"\s+"), "isolated"), found.pre_tokenizer]
    found.pre_tokenizer = pre_tokenizers.Sequence(dividers)
    return found


def with_bytes(**options: Any) -> Tokenizer:
    """As Llama's and Mixtral's."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thesawclm", "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    found = Tokenizer(models.BPE(vocabulary, merges, **({"unk_token": "<unk>", "byte_fallback": True} | options)))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return found


@pytest.mark.parametrize(
    "make", [lambda: read_tokenizer(DEMO), in_bytes, composed, with_bytes, lambda: with_bytes(fuse_unk=True),
             lambda: with_bytes(byte_fallback=False)],
    ids=["demo", "in bytes", "composed", "with bytes", "fused", "unknown"],
)  # fmt: skip
def test_a_text_has_at_least_so_many_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    length, draw = TokenLength(tokenizer), random.Random(1)
    assert length.bytes is not None
    for _ in range(300):
        text = "".join(draw.choices(WORDS, k=draw.randrange(40)))
        assert length.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)
    longest = max(tokenizer.get_vocab(), key=lambda token: len(tokenizer.decode([tokenizer.token_to_id(token)])))
    text = tokenizer.decode([tokenizer.token_to_id(longest)]) * 1000
    assert length.fewest(text) >= 300  # it is not nothing


def test_a_lone_surrogate_counts() -> None:
    assert TokenLength(in_bytes()).fewest("\ud800" * 1000) > 0


def no_alphabet() -> Tokenizer:
    found = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel()
    return found


def changed(name: str, value: Any) -> Tokenizer:
    found = in_bytes()
    setattr(found, name, value)
    return found


def with_token(**options: bool) -> Tokenizer:
    found = in_bytes()
    found.add_tokens([AddedToken("<fill>", **options)])
    return found


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokenizer(models.WordLevel({"a": 0}, "a")),
        lambda: Tokenizer(models.Unigram([("a", 0.0)], 0)),
        no_alphabet,
        lambda: with_bytes(byte_fallback=False, fuse_unk=True),
        lambda: with_bytes(byte_fallback=False, unk_token=None),
        lambda: changed("normalizer", normalizers.Strip()),
        lambda: changed("normalizer", normalizers.NFKC()),
        lambda: changed("normalizer", normalizers.Replace(Regex("a+"), "aa")),
        lambda: changed("normalizer", normalizers.Replace("aa", "a")),
        lambda: changed("pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda: changed("pre_tokenizer", pre_tokenizers.Split("a", "removed")),
        lambda: with_token(rstrip=True),
        lambda: with_token(lstrip=True),
    ],
)
def test_nothing_is_said_where_a_token_may_cover_any_text(make: Callable[[], Tokenizer]) -> None:
    length = TokenLength(make())
    assert (length.bytes, length.fewest("a" * 10**6)) == (None, 0)


def test_three_characters_become_two_bytes_at_most() -> None:
    """What NFC composes: a character's bytes are at least two thirds of the characters that it decomposes to."""
    own = (chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)
    most = max(
        len(unicodedata.normalize("NFD", one)) / len(one.encode())
        for one in own
        if unicodedata.normalize("NFC", one) == one
    )
    assert most == 1.5
