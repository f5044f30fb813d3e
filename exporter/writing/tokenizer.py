"""A complete tokenizer.json: by itself it gives the ids and texts that AutoTokenizer gives for the checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantmoe.exporter.folder.files import TOKENIZER
from quantmoe.exporter.folder.tokenizer import read_tokenizer
from quantmoe.exporter.memory import doing
from quantmoe.exporter.writing.battery import texts

#: a folder with none of these has no tokenizer
SOURCES = (TOKENIZER, "vocab.json", "vocab.txt", "tekken.json", "*.model")
#: special tokens that stand in texts of their own, at most
TOKENS = 64
#: what AutoTokenizer does and no tokenizer.json says, by its name in tokenizer_config.json
RULES = {
    "clean_up_tokenization_spaces": "AutoTokenizer takes spaces before punctuation out of the decoded text",
    "split_special_tokens": "AutoTokenizer splits special tokens in a text like other words",
}


def write_tokenizer(folder: Path, partial: Callable[[str], Path], gguf: bool = False) -> str:
    """Write tokenizer.json: the checkpoint's own bytes where they are complete, else what transformers makes of it.

    Args:
        folder: a checkpoint's, whose code is never run.
        partial: final name -> where to write.
        gguf: the folder's tokenizer.json was made of the fields of a GGUF file. It stays as it is: transformers' class
            for the architecture may add rules that the file does not have, and llama.cpp does not apply.

    Returns:
        Why there is no tokenizer.json although the checkpoint has a tokenizer. Or how a GGUF file's tokenizer differs
        from AutoTokenizer's for the exported folder. Or a line for each of :data:`RULES` that the file does not have.
        Else "".
    """
    if not any(path.is_file() for name in SOURCES for path in folder.glob(name)):
        return ""
    try:
        with doing(str(folder / TOKENIZER)):
            auto, made, own = _load(folder)
    except MemoryError:
        raise
    except Exception as error:  # of transformers, of tokenizers, of packages that convert
        reason = " ".join(str(error).split()) or type(error).__name__
        if find_spec("sentencepiece") is None and not (folder / TOKENIZER).is_file() and any(folder.glob("*.model")):
            reason += "; SentencePiece's files take pip install sentencepiece protobuf"
        return f"no {TOKENIZER}: transformers makes no tokenizer of the checkpoint's files: {reason[:500]}"
    path = partial(TOKENIZER)
    if gguf:
        shutil.copyfile(folder / TOKENIZER, path)
        difference = compare(auto, own)
        return difference and f"{TOKENIZER} is the GGUF file's; AutoTokenizer of this folder differs: {difference}"
    rules = [rule for rule in RULES if getattr(auto, rule, False)]
    for rule in rules:
        setattr(auto, rule, False)
    if own is not None and _is_complete(own, auto, made):
        shutil.copyfile(folder / TOKENIZER, path)
        written = own
    else:
        path.write_text(made.to_str(pretty=True), encoding="utf-8")
        written = read_tokenizer(path)
        if difference := compare(auto, written):
            path.unlink()
            return f"no {TOKENIZER}: it cannot say what transformers does with the checkpoint's tokenizer: {difference}"
    return "\n".join(_left_out(auto, written, rules))


def _left_out(auto: Any, tokenizer: Any, rules: Sequence[str]) -> Iterator[str]:
    """Yield a line for each of these rules that changes what transformers gives; they are off in ``auto``."""
    for rule in rules:
        setattr(auto, rule, True)
        if difference := compare(auto, tokenizer):
            yield f"{TOKENIZER} does not have {rule}: {RULES[rule]}; {difference}"
        setattr(auto, rule, False)


def compare(auto: Any, tokenizer: Any) -> str:
    """Return the first text for which a tokenizer gives other ids or another text than transformers', "" for none.

    Args:
        auto: transformers'. tokenizer: a tokenizers.Tokenizer.
    """
    battery = texts(itertools.islice(auto.get_added_vocab(), TOKENS))
    for special in (True, False):
        wanted = auto(battery, add_special_tokens=special)["input_ids"]
        given = [encoding.ids for encoding in tokenizer.encode_batch(battery, add_special_tokens=special)]
        for text, expected, found in zip(battery, wanted, given, strict=True):
            if expected != found:
                return f"{text!a} is {_short(expected)} in AutoTokenizer and {_short(found)} in {TOKENIZER}"
            for skipped in (True, False):
                there = auto.decode(expected, skip_special_tokens=skipped)
                if (here := tokenizer.decode(expected, skip_special_tokens=skipped)) != there:
                    said = f"{there!a} in AutoTokenizer and {here!a} in {TOKENIZER}"
                    return f"tokens {_short(expected)} are the text {said}"
    return ""


def _load(folder: Path) -> tuple[Any, Any, Any]:
    """Return transformers' tokenizer of a folder, the tokenizers.Tokenizer in it without truncation and padding, and
    the tokenizers.Tokenizer of the folder's tokenizer.json, None without that file."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    with _quiet():
        # never code out of the checkpoint's folder, nor a question whether to run it; never mistral-common's tokenizer,
        # which is in Python
        auto = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, mistral_format=False
        )
    made = getattr(auto, "backend_tokenizer", None)
    if not isinstance(made, Tokenizer):
        raise TypeError(f"{type(auto).__name__} is a tokenizer in Python, which no {TOKENIZER} has")
    made.no_truncation()  # as each of its calls does
    made.no_padding()
    path = folder / TOKENIZER
    return auto, made, Tokenizer.from_file(str(path)) if path.is_file() else None


def _is_complete(found: Any, auto: Any, made: Any) -> bool:
    """Return whether a checkpoint's own tokenizer.json, in readers that obey all of it, is what transformers makes."""
    if found.truncation is not None or found.padding is not None:
        return False
    added = (tokenizer.get_added_tokens_decoder() for tokenizer in (found, made))
    here, there = ({id: token.__getstate__() for id, token in tokens.items()} for tokens in added)
    return here == there and found.get_vocab_size() == made.get_vocab_size() and not compare(auto, found)


def _short(ids: Sequence[int]) -> str:
    return str(list(ids)) if len(ids) <= 12 else f"{list(ids[:12])} and {len(ids) - 12} more"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' remarks on tokenizers, which say nothing about an export."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
