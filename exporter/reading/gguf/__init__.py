"""A GGUF file as a checkpoint: its tensors under transformers' names, its metadata as a configuration.

Names and keys are those of gguf-py's constants.py and tensor_mapping.py. A module of blocks of the ggml type T has the
tensor ``<module>.T`` U8 [N, bytes of a row], which formats/gguf.py decodes; floats are ``<module>.weight``.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import MAX_TENSORS, Checkpoint, CheckpointError, Entry, is_outline
from quantmoe.exporter.reading.gguf.families import FAMILIES, JOINED, Metadata, common_name
from quantmoe.exporter.reading.gguf.header import TYPES, Header, read_header, shown
from quantmoe.exporter.reading.gguf.tokenizer import write_tokenizer

_NAME = re.compile(r"(?:blk\.([0-9]{1,6})\.)?(.+?)(?:\.(weight|bias))?", re.DOTALL)
_LAYER = re.compile(r"model\.layers\.[0-9]+")
_PIECE = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.[^.]*)?", re.DOTALL)

Change = Callable[[np.ndarray], np.ndarray]


class GGUF(Checkpoint):
    """A GGUF file; of a model in pieces, any of them.

    Attributes:
        rows: module -> the order of its rows that transformers has.
        columns: module -> the order of its columns, which keeps groups of columns that share a scale together.

    Raises:
        CheckpointError: naming the file, the field or tensor, what was found and what was expected.
    """

    def _open(self) -> None:
        from quantmoe.exporter.reading.formats.base import reading  # which imports this
        from quantmoe.exporter.reading.formats.experts import check_sizes

        self._changes: dict[str, Change] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.columns: dict[str, np.ndarray] = {}
        headers = self._headers()
        self._first = next(iter(headers))
        fields = headers[self._first].fields
        shapes = {name: shape for header in headers.values() for name, (shape, *_) in header.tensors.items()}
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise CheckpointError(
                f"{self.folder}: architecture {shown(architecture)} is not read from GGUF; supported: {known}"
            )
        family = FAMILIES[architecture]
        kind = fields.get("tokenizer.ggml.model", "none")
        self._has_tokenizer = isinstance(kind, str) and kind not in ("none", "no_vocab")
        with doing(str(self.folder)), reading(f"{self.folder}: its fields cannot be read as {architecture}'s"):
            metadata = Metadata(self.folder, architecture, fields, shapes)
            self.config = family.config(metadata)
            ends = metadata.ends()
            self.generation_config = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
            check_sizes(self, self.config)
            for shard, header in headers.items():
                for name, (shape, kind, begin) in header.tensors.items():
                    self._add(shard, name, shape, kind, begin, family.names)
            family.undo(self)

    def _headers(self) -> dict[Path, Header]:
        """Piece -> its header, in the model's order.

        Raises:
            CheckpointError: naming a piece that is missing, is another one, or links to elsewhere.
        """
        headers: dict[Path, Header] = {}
        pieces = _pieces(self.folder)
        for i, shard in enumerate(pieces):
            if shard != self.folder:
                self.check_file(shard)
            self._see(shard)
            with doing(str(shard)):
                headers[shard] = read_header(shard)
            fields = headers[shard].fields
            found = shown(fields.get("split.no", i)), shown(fields.get("split.count", len(pieces)))
            if found != (str(i), str(len(pieces))) and found[1] != "0":
                raise CheckpointError(
                    f"{shard}: is piece {found[0]} (from 0) of {found[1]}, expected piece {i} of {len(pieces)} by its "
                    "name; rename the pieces as llama.cpp's gguf-split does: NAME-00001-of-00002.gguf"
                )
        return headers

    @property
    def root(self) -> Path:
        return self.folder.parent

    @cached_property
    def quantization(self) -> dict[str, Any]:
        return {"quant_method": "gguf"}

    def tensor(self, name: str, decides: bool = False) -> np.ndarray:
        found = super().tensor(name, decides)
        return self._changes[name](found) if name in self._changes and not is_outline(found) else found

    def change(self, name: str, what: Change) -> None:
        """Has a tensor read through a function of its numbers, one after those that it has."""
        if name in self._entries:
            earlier = self._changes.get(name, lambda array: array)
            self._changes[name] = lambda array: what(earlier(array))

    def order(self, name: str, order: np.ndarray) -> None:
        """Has a tensor's rows, or the elements of a vector, read in another order."""
        if (entry := self._entries.get(name)) is not None:
            if entry.shape[0] != len(order):
                raise CheckpointError(f"{self.where(name)} is {list(entry.shape)}, expected {len(order)} rows")
            self.change(name, lambda array: array[order])

    def reorder(self, module: str, order: np.ndarray) -> None:
        """Has the rows of a module's weight, and its bias, read in another order."""
        self.rows[module] = order
        for leaf in ("weight", "bias"):
            self.order(f"{module}.{leaf}", order)

    def reorder_columns(self, module: str, order: np.ndarray) -> None:
        """The same of the columns of its weight."""
        self.columns[module] = order
        if (entry := self._entries.get(f"{module}.weight")) is not None and entry.shape[1:] != (len(order),):
            raise CheckpointError(f"{self.where(entry.name)} is {list(entry.shape)}, expected {len(order)} columns")
        self.change(f"{module}.weight", lambda array: array[:, order])

    @cached_property
    def layers(self) -> list[str]:
        """``model.layers.<number>`` of those that have tensors."""
        return list(dict.fromkeys(match[0] for name in self._entries if (match := _LAYER.match(name))))

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Give a tensor another shape of as many elements."""
        if (entry := self._entries.get(name)) is not None:
            if prod(entry.shape) != prod(shape):
                raise CheckpointError(f"{self.where(name)} is {list(entry.shape)}, expected {list(shape)}")
            self._entries[name] = Entry(entry.shard, entry.dtype, shape, entry.begin, entry.name)

    @cached_property
    def companions(self) -> Path:
        """A folder with config.json and the tokenizer, as they lie beside a checkpoint; it goes with this object."""
        self._temporary = tempfile.TemporaryDirectory(prefix="quantmoe-gguf-")
        folder = Path(self._temporary.name)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        if self.generation_config:
            (folder / "generation_config.json").write_text(
                json.dumps(self.generation_config, indent=2), encoding="utf-8"
            )
        with doing(str(self.folder)):
            self.no_tokenizer = self._write_tokenizer(folder) if self._has_tokenizer else "the file has none"
        return folder

    def _write_tokenizer(self, folder: Path) -> str:
        """Write tokenizer.json and its configuration; return why there is none, "" where there is one."""
        try:
            write_tokenizer(self._first, folder)
        except MemoryError:
            raise
        except Exception as error:  # those of tokenizers have no common base class
            return f"transformers cannot make a tokenizer of the file's fields ({str(error)[:300] or repr(error)})"
        return ""

    def _add(
        self, shard: Path, name: str, shape: tuple[int, ...], kind: int, begin: int, names: dict[str, str]
    ) -> None:
        layer, stem, leaf = match.groups() if (match := _NAME.fullmatch(name)) else (None, name, None)
        if layer is not None and int(layer) >= self.config["num_hidden_layers"]:
            return  # a layer that drafts
        stem, expert = common_name(stem)
        whole = names.get(f"{stem}.{leaf}")  # a name of its own, which no module's is
        parts = JOINED.get(stem, (stem,))
        if whole is None and not all(part in names for part in parts):
            raise CheckpointError(f"{shard}: {name} is a tensor that this architecture is not known to have")
        title, weights, block = TYPES[kind]
        blocks = weights > 1
        if blocks and (whole or leaf != "weight" or len(shape) < 2):
            raise CheckpointError(f"{shard}: {name} is {title} {list(shape)}, expected floats")
        dtype, shape = ("U8", (*shape[:-1], shape[-1] // weights * block)) if blocks else (title, shape)
        places = [whole] if whole else [f"{names[part]}.{title if blocks else leaf}" for part in parts]
        if layer is not None:
            places = [f"model.layers.{layer}.{place}" for place in places]
        if "{}" not in places[0]:
            self._put(places[0], Entry(shard, dtype, shape, begin, name))
            return
        experts = range(shape[0]) if expert is None else [expert]
        rows = shape[expert is None :]
        if not rows or rows[0] % len(places):
            raise CheckpointError(f"{shard}: {name} is {title} {list(shape)}, expected rows of {' and '.join(parts)}")
        rows = (rows[0] // len(places), *rows[1:])
        for e, place in product(experts, places):
            self._put(place.format(e), Entry(shard, dtype, rows, begin, name))
            begin += prod(rows) * (1 if blocks else block)

    def _put(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            raise CheckpointError(f"{self.where(name)} and {entry.name} are both {name}")
        if len(self._entries) >= MAX_TENSORS:
            raise CheckpointError(f"{entry.shard}: {entry.name}: more than {MAX_TENSORS} tensors and experts' parts")
        self._entries[name] = entry


def _pieces(path: Path) -> list[Path]:
    """Return all files of a model that llama.cpp's gguf-split has cut into pieces, of which this is one.

    Raises:
        CheckpointError: naming a piece that is missing, or this one if it is none of them.
    """
    if (match := _PIECE.fullmatch(path.name)) is None:
        return [path]
    stem, _, count, suffix = match.groups(default="")
    found = [path.with_name(f"{stem}-{i:05}-of-{count}{suffix}") for i in range(1, int(count) + 1)]
    if path not in found:
        raise CheckpointError(f"{path}: named as a piece beyond the {int(count)} of its model")
    for piece in found:
        if not piece.is_file():
            raise CheckpointError(f"{piece}: missing; the model has {int(count)} pieces")
    return found
