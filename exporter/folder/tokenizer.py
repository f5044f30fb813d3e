"""A folder's tokenizer, special tokens and ends of texts, read as transformers' AutoTokenizer reads them.

An exported tokenizer.json is complete (exporter/writing/tokenizer.py). Files beside it may have been edited since, so
tokens that only they name are added here, too.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.files import CONFIG, GENERATION_CONFIG, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG
from quantmoe.exporter.folder.json_files import is_there, language_part, read_object, vocabulary_of
from quantmoe.exporter.memory import doing

#: folder of chat templates with names
NAMED_TEMPLATES = "additional_chat_templates"
#: files that may name the tokens at which a text ends; the first that names any decides
ENDS = (GENERATION_CONFIG, CONFIG)
#: tokens that they name beside those
NAMED = ("bos_token_id", "pad_token_id")


def load_tokenizer(folder: Path) -> Any:
    """Return the folder's tokenizer as a tokenizers.Tokenizer, without truncation and padding.

    Raises:
        ModelError: there is no tokenizer.json, or a file cannot be read.
    """
    import tokenizers  # noqa: F401  a missing package is said first

    path = folder / TOKENIZER
    if not is_there(path):
        raise ModelError(f"{path}: missing; give token ids (--ids 1,2,3) instead of a prompt")
    try:
        with doing(str(path)):
            return complete(read_tokenizer(path), folder)
    except (MemoryError, ModelError):
        raise
    except Exception as error:  # tokenizers raises nothing else
        raise ModelError(f"{path}: {error}") from None


def read_tokenizer(path: Path) -> Any:
    """Return a file's tokenizer without truncation and padding, which belong to training and are reset by transformers.

    Raises:
        Exception: tokenizers raises nothing else.
    """
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(path))
    found.no_truncation()
    found.no_padding()
    return found


def complete(tokenizer: Any, folder: Path) -> Any:
    """Add the tokens that other files of the folder name, and return the tokenizer.

    Raises:
        ModelError: a file does not say tokens as transformers does.
    """
    from tokenizers import AddedToken

    config = _config(folder)
    named, others = _special(config)
    listed = config.get("added_tokens_decoder")
    there = tokenizer.get_added_tokens_decoder()
    try:
        if listed is None:  # older checkpoints
            special = {*map(_text, [*named.values(), *others])}
            added = {
                int(id): AddedToken(text, normalized=text not in special, special=text in special)
                for text, id in read_object(folder / "added_tokens.json").items()
                if int(id) not in there
            }
        else:
            added = {int(id): _token(token) for id, token in listed.items()}
        tokens = [added[id] for id in sorted(added)]
        known = {token.content for token in [*there.values(), *tokens]}
        tokens += [_token(token, special=True) for token in [*named.values(), *others] if _text(token) not in known]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / TOKENIZER_CONFIG}: cannot be read as special tokens: {error!r}") from None
    tokenizer.add_tokens(tokens)
    return tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the names that the folder has for special tokens, such as ``bos_token``, and their texts.

    Raises:
        ModelError: a file is not a JSON object.
    """
    named, _ = _special(_config(folder))
    return {name: _text(token) for name, token in named.items()}


def stop_tokens(folder: Path) -> list[int]:
    """Return the ids of the tokens at which the folder's texts end.

    Raises:
        ModelError: a file is not what it should be.
    """
    generation, config = (read_object(folder / name) for name in ENDS)
    return end_tokens(generation, config, folder)


def end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any], folder: Path = Path()) -> list[int]:
    """Return the ids of the first ``eos_token_id`` that names any: null and an empty list name none.

    Args:
        generation, config: the objects of :data:`ENDS`. Each may have a text_config that names the tokens.
        folder: where they lie, for errors.

    Raises:
        ModelError: an eos_token_id is neither a token id nor a list of them, or is outside the vocabulary.
    """
    vocabulary = vocabulary_of(config)
    for name, whole in zip(ENDS, (generation, config), strict=True):
        text = language_part(whole)
        for part in (whole, text if isinstance(text, dict) else {}):
            if (found := part.get("eos_token_id")) not in (None, []):
                stop = found if isinstance(found, list) else [found]
                if not all(type(id) is int and 0 <= id < (vocabulary or sys.maxsize) for id in stop):
                    known = f" from 0 to {vocabulary - 1}" if vocabulary else ""
                    raise ModelError(
                        f"{folder / name}: eos_token_id is {found!r}, expected a token id{known} or a list of them"
                    )
                return stop
    return []


def named_token(
    name: str, generation: Mapping[str, Any], config: Mapping[str, Any], folder: Path = Path()
) -> int | None:
    """Return the id of a token such as ``bos_token_id``, None where no file names it. Arguments as :func:`end_tokens`.

    Raises:
        ModelError: it is no token id.
    """
    text = language_part(config)
    own = text if isinstance(text, dict) else config
    file, found = (ENDS[0], generation[name]) if name in generation else (ENDS[1], own.get(name))
    if not (found is None or type(found) is int):
        raise ModelError(f"{folder / file}: {name} is {found!r}, expected a token id")
    return found


def _config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json has the word where it does not list its tokens, as before 2023."""
    config = read_object(folder / TOKENIZER_CONFIG)
    return config if "added_tokens_decoder" in config else config | read_object(folder / SPECIAL_TOKENS)


def _special(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Special tokens that have names, by these, and those that have none: texts, or objects with their ``content``."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for tokens in (config.get("model_specific_special_tokens"), extra):
        named |= tokens if isinstance(tokens, dict) else {}
    others = [token for token in extra if _text(token)] if isinstance(extra, list) else []
    return {name: token for name, token in named.items() if _text(token)}, others


def _text(token: Any) -> str:
    """Return a token's text; "" of what is none."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _token(token: Any, **flags: bool) -> Any:
    """Return a tokenizers.AddedToken of a token as files say it; flags: those that it has whatever they say."""
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, **flags)
    said = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special") if name in token}
    return AddedToken(token["content"], **(said | flags))
