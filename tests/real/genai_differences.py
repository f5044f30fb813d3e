"""Prints how onnxruntime-genai's tokenizer differs from AutoTokenizer, as a table: make genai-differences"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime_genai as og
from real.vocabularies import VOCABULARIES, battery, make
from transformers import AutoTokenizer

HEAD = [
    "vocabulary",
    "ids differ",
    "first text",
    "with `add_special_tokens`",
    "first text",
    "text differs",
    "first text",
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße <b>&"}],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Why?"},
    ],
    [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHi."},
        {"role": "user", "content": "Why?"},
    ],
]


def first_of(texts: Sequence[str], give: Callable[[int], Any], wanted: Sequence[Any]) -> list[str]:
    """Return how many differ, and the shortest text that does."""
    differ = [i for i in range(len(texts)) if give(i) != wanted[i]]
    shortest = min((texts[i] for i in differ), key=len, default="")
    return [str(len(differ)), f"`{shortest!a}`" if differ else ""]


def row(name: str, folder: Path) -> list[str]:
    """Return a row of the table; texts with NUL, at which genai ends a text, are not in it.

    Raises:
        AssertionError: a text gets two BOS.
    """
    vocabulary = make(name, folder)
    lines = [line.split("\t") for line in vocabulary.expected.read_text(encoding="utf-8").splitlines()]
    lines = [line for line, text in zip(lines, battery(), strict=True) if "\0" not in text]
    texts, decoded = ([base64.b64decode(line[i]).decode() for line in lines] for i in (0, 3))
    ids = [[int(id) for id in line[1].split()] for line in lines]
    tokenizer = og.Tokenizer(og.Model(str(vocabulary.outdir)))
    found = first_of(texts, lambda i: tokenizer.encode(texts[i]).tolist(), ids)
    tokenizer.update_options(add_special_tokens="true")
    found += first_of(texts, lambda i: tokenizer.encode(texts[i]).tolist(), ids)
    begin = AutoTokenizer.from_pretrained(vocabulary.checkpoint).bos_token_id
    assert begin is None or tokenizer.encode("a").tolist().count(begin) <= 1
    found += first_of(texts, lambda i: tokenizer.decode(ids[i]) if ids[i] else "", decoded)
    return [name, *found]


def conversations(name: str, folder: Path) -> str:
    """Say how many conversations a real vocabulary's template renders otherwise."""
    auto = AutoTokenizer.from_pretrained(folder / "checkpoint")
    tokenizer = og.Tokenizer(og.Model(str(folder / "outdir")))
    differ = 0
    for messages in CONVERSATIONS:
        wanted = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        try:
            given = tokenizer.apply_chat_template(messages=json.dumps(messages), add_generation_prompt=True)
        except Exception as error:
            given = str(error)
        differ += given != wanted
    return f"{name}: {differ} of {len(CONVERSATIONS)} conversations differ"


def main() -> None:
    count = sum("\0" not in text for text in battery())
    print(f"onnxruntime-genai {og.__version__}, {count} texts without NUL\n")
    rows, said = [], []
    for name in VOCABULARIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row(name, Path(folder)))
            if (Path(folder) / "checkpoint/tokenizer_config.json").read_text(encoding="utf-8").count("chat_template"):
                said.append(conversations(name, Path(folder)))
    for cells in [HEAD, ["---"] * len(HEAD), *rows]:
        print("|", " | ".join(cells), "|")
    print("", *said, sep="\n")


if __name__ == "__main__":
    main()
