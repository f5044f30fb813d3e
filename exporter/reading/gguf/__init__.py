"""A GGUF file is a checkpoint: tensors under transformers' names, and metadata as a configuration.

- It may have any name, as Ollama's ``sha256-...``. A piece of a split file may not link to another folder.
- It may mix types, as Unsloth's UD files do. Gate and up of a layer have one type. Both may be one tensor, and experts
  a tensor each, or MLX's ``switch_mlp``.
- F16, BF16 and F32 are exported with as many bits, F32 outside experts only. A codebook's weights are carried as int8.
- Some matrices of transformers are several tensors of the file. Parts of different types, and ``kv_b`` of latent
  attention, become floats.
- A quantized embedding stays quantized on the CPU (not MXFP4) and for ``--target ort`` in Q8_0 and Q5_0. A tied LM head
  shares its copy.
- Text ends at ``eos_token_id``, ``eot_token_id``, ``eom_token_id``, and at texts such as ``<|im_end|>``.
- Draft layers (``nextn``) are left out.
- llama.cpp's architectures ``deepseek4``, ``qwen4exp``, ``glm5-next`` and ``minimax-01`` are not read. The class of
  ``minimax-01`` in transformers has no ``rotary_dim``. transformers has no model for others, for example ``arctic``,
  ``deepseek``, ``grok``, ``grovemoe``, ``kimi-k3``, ``llada-moe`` and ``smallthinker``.
- ``export`` refuses a key that changes the computation and that it does not read of the architecture, for example
  ``attn_logit_softcapping``. It also refuses a key or a tensor that is there twice, overlapping tensors, and more than
  64 MB of metadata.
- ``quantmoe inspect FILE.gguf`` shows types by part of the model, their bits and the CPU kernel.
"""

# Names and keys are gguf-py's (constants.py, tensor_mapping.py). A module of blocks of the ggml type T has the tensor
# <module>.T U8 [N, bytes of a row], which formats/gguf.py decodes; floats are <module>.weight.
from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import CONFIG, GENERATION_CONFIG
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import MAX_TENSORS, dense
from quantmoe.exporter.reading.checkpoint import Checkpoint as Checkpoint
from quantmoe.exporter.reading.checkpoint import is_outline as is_outline
from quantmoe.exporter.reading.config_fields import check_sizes, reading
from quantmoe.exporter.reading.gguf.changed_tensors import ChangedTensors
from quantmoe.exporter.reading.gguf.families import FAMILIES
from quantmoe.exporter.reading.gguf.families.base import GgufFamily
from quantmoe.exporter.reading.gguf.header import TYPES, Header, read_header, shown
from quantmoe.exporter.reading.gguf.joined_tensors import Part, add_joined
from quantmoe.exporter.reading.gguf.metadata import Metadata
from quantmoe.exporter.reading.gguf.tensor_names import JOINED, common_name
from quantmoe.exporter.reading.gguf.tokenizer import write_tokenizer
from quantmoe.exporter.safetensors_file import DTYPES, Entry

_NAME = re.compile(r"(?:blk\.([0-9]{1,6})\.)?(.+?)(?:\.(weight|bias))?", re.DOTALL)
#: factors of a matrix and of its activations, beside NVFP4
_SCALES = ("scale", "input_scale")
_PIECE = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})(\.[^.]*)?", re.DOTALL)


class GGUF(ChangedTensors):
    """A GGUF file, or any piece of a model in pieces.

    Raises:
        CheckpointError: naming the file, the field or tensor, what was found and what was expected.
    """

    #: prefix and module -> GGUF's name and leaf of each of its parts -> the part
    _parts: dict[tuple[str, str], dict[tuple[str, str], Part]]

    def _open(self) -> None:
        self._changes, self._made, self._parts = {}, {}, {}
        self.rows, self.columns = {}, {}
        headers = self._headers()
        self._first = next(iter(headers))
        fields = headers[self._first].fields
        shapes = {name: shape for header in headers.values() for name, (shape, *_) in header.tensors.items()}
        architecture = fields.get("general.architecture")
        routed = type(count := fields.get(f"{architecture}.expert_count")) is int and count > 0
        if "token_embd.weight" in shapes and not routed and not any("ffn_gate_inp" in name for name in shapes):
            raise dense(self.folder, shown(architecture))
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise CheckpointError(
                f"{self.folder}: architecture {shown(architecture)} is not read from GGUF; supported: {known}"
            )
        family = FAMILIES[architecture]
        kind = fields.get("tokenizer.ggml.model", "none")
        self._has_tokenizer = isinstance(kind, str) and kind not in ("none", "no_vocab")
        with doing(str(self.folder)), reading(f"{self.folder}: its fields cannot be read as {architecture}'s"):
            metadata = Metadata(
                path=self.folder,
                architecture=architecture,
                fields=fields,
                shapes=shapes,
                vector=partial(self._floats, headers),
            )
            self.config = family.config(metadata)
            metadata.check_read()
            ends = metadata.ends()
            self.generation_config = {"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {}
            check_sizes(self.folder, self.config)
            for shard, header in headers.items():
                for name, (shape, kind, begin) in header.tensors.items():
                    self._add(shard, name, shape, kind=kind, begin=begin, family=family)
            for (prefix, module), parts in self._parts.items():
                add_joined(self, prefix + module, family.joined[module], parts)
            family.undo(self)

    def _floats(self, headers: dict[Path, Header], name: str) -> np.ndarray:
        """Return a tensor of floats.

        Raises:
            CheckpointError: it is missing, or has blocks.
        """
        for shard, header in headers.items():
            if name in header.tensors:
                shape, kind, begin = header.tensors[name]
                title, weights, _ = TYPES[kind]
                if weights > 1:
                    raise CheckpointError(f"{shard}: {name} is {title} {list(shape)}, expected floats")
                return (
                    self._read(Entry(shard=shard, dtype=title, shape=shape, begin=begin, name=name))
                    .view(DTYPES[title])
                    .astype(np.float32)
                )
        raise CheckpointError(f"{self.folder}: {name} is missing")

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
            self.see(shard)
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

    @cached_property
    def companions(self) -> Path:
        """A folder with config.json and the tokenizer, as they lie beside a checkpoint; it goes with this object."""
        self._temporary = tempfile.TemporaryDirectory(prefix="quantmoe-gguf-")
        folder = Path(self._temporary.name)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2), encoding="utf-8")
        if self.generation_config:
            (folder / GENERATION_CONFIG).write_text(json.dumps(self.generation_config, indent=2), encoding="utf-8")
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
        self, shard: Path, name: str, shape: tuple[int, ...], *, kind: int, begin: int, family: GgufFamily
    ) -> None:
        layer, stem, leaf = match.groups() if (match := _NAME.fullmatch(name)) else (None, name, None)
        if layer is not None and int(layer) >= self.config["num_hidden_layers"]:
            return  # a layer that drafts
        prefix = family.layer.format(layer) if layer is not None else ""
        stem, leaf, expert = common_name(stem, leaf)
        names = family.names
        if module := next((module for module, join in family.joined.items() if stem in join.parts), None):
            self._parts.setdefault((prefix, module), {})[stem, leaf] = Part(shard, name, shape, kind, begin)
            return
        if (of := stem.rpartition(".")) and of[2] in _SCALES and f"{stem}.{leaf}" not in names:
            self._add_scale(
                shard,
                name,
                shape,
                kind=kind,
                begin=begin,
                modules=[prefix + names[p] for p in JOINED.get(of[0], (of[0],)) if p in names],
            )
            return
        whole = names.get(f"{stem}.{leaf}")  # a name of its own, which no module's is
        parts = (stem,) if stem in names else JOINED.get(stem, (stem,))
        if whole is None and not all(part in names for part in parts):
            raise CheckpointError(f"{shard}: {name} is a tensor that this architecture is not known to have")
        if names.get(stem) == "":
            return
        title, weights, block = TYPES[kind]
        blocks = weights > 1
        if blocks and (whole or leaf != "weight" or len(shape) < 2):
            raise CheckpointError(f"{shard}: {name} is {title} {list(shape)}, expected floats")
        dtype, shape = ("U8", (*shape[:-1], shape[-1] // weights * block)) if blocks else (title, shape)
        places = [whole] if whole else [f"{names[part]}.{title if blocks else leaf}" for part in parts]
        places = [prefix + place for place in places]
        if "{}" not in places[0]:
            self._put_rows(Entry(shard=shard, dtype=dtype, shape=shape, begin=begin, name=name), places)
            return
        experts = range(shape[0]) if expert is None else [expert]
        rows = shape[expert is None :]
        if not rows or rows[0] % len(places):
            raise CheckpointError(f"{shard}: {name} is {title} {list(shape)}, expected rows of {' and '.join(parts)}")
        rows = (rows[0] // len(places), *rows[1:])
        for e, place in product(experts, places):
            self._put(place.format(e), Entry(shard=shard, dtype=dtype, shape=rows, begin=begin, name=name))
            begin += prod(rows) * (1 if blocks else block)

    def _add_scale(
        self, shard: Path, name: str, shape: tuple[int, ...], *, kind: int, begin: int, modules: list[str]
    ) -> None:
        """Add the factors of NVFP4 matrices: one, or one for each expert. Scales of activations are left out."""
        if name.endswith(".input_scale"):
            return
        if TYPES[kind][0] != "F32" or len(shape) != 1 or not modules:
            raise CheckpointError(f"{shard}: {name} is {TYPES[kind][0]} {list(shape)}, expected F32 of a known matrix")
        for module in modules:
            for e in range(shape[0] if "{}" in module else 1):
                self._put(
                    f"{module.format(e)}.scale",
                    Entry(shard=shard, dtype="F32", shape=(1,), begin=begin + 4 * e, name=name),
                )

    def _put_rows(self, entry: Entry, places: list[str]) -> None:
        """Add a tensor under one name, or its rows under the names of queries, keys and values."""
        if len(places) == 1:
            self._put(places[0], entry)
            return
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        begin, each = entry.begin, self.config.get("head_dim", 0)
        if entry.shape[0] != (heads + 2 * groups) * each:
            raise CheckpointError(
                f"{entry.shard}: {entry.name} is {list(entry.shape)}, expected {(heads + 2 * groups) * each} rows"
            )
        for place, count in zip(places, (heads, groups, groups), strict=True):
            shape = (count * each, *entry.shape[1:])
            self._put(place, replace(entry, shape=shape, begin=begin))
            begin += prod(shape) * DTYPES[entry.dtype].itemsize

    def _put(self, name: str, entry: Entry) -> None:
        if name in self._entries:
            raise CheckpointError(f"{self.where(name)} and {entry.name} are both {name}")
        if len(self._entries) >= MAX_TENSORS:
            raise CheckpointError(f"{entry.shard}: {entry.name}: more than {MAX_TENSORS} tensors and experts' parts")
        self._entries[name] = entry


def _pieces(path: Path) -> list[Path]:
    """Return all files of a model that llama.cpp's gguf-split has cut into pieces.

    Args:
        path: one of them.

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
