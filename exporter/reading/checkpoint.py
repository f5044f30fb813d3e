"""A checkpoint folder as its quantizer wrote it: config files, and safetensors shards read tensor by tensor.

Torch-free. ``safetensors_file`` reads the shards' headers.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.files import CONFIG, GENERATION_CONFIG, LFS_POINTER, hub_name, is_plain
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.config_fields import text_part
from quantmoe.exporter.reading.families import Family, family_named
from quantmoe.exporter.safetensors_file import DTYPES, MAX_HEADER, Entry, parse_json, read_header

#: larger JSON files than this are not configurations
MAX_CONFIG = 64_000_000
#: of all shards
MAX_TENSORS = 2_000_000


GGUF_MAGIC = b"GGUF"
#: what is in folders that have no safetensors file -> what that is, and what to do
OTHERS = {
    "*.onnx": "an exported model; expected the checkpoint that it was made from",
    "snapshots": "a folder of the Hugging Face cache; expected the checkpoint's, which is a folder in this one",
    "pytorch_model*.bin": "PyTorch's pickle, which is not read; expected *.safetensors, as save_pretrained writes them",
}
#: what MLX calls a layer's experts, whose tensors it stacks
STACKED = "switch_mlp"
#: the file of a whole model; the index of one in shards
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """A folder with config.json and safetensors shards.

    Opening reads and checks every shard's header. A tensor is read when it is asked for. Nothing is mapped: a mapped
    file that somebody truncates ends the process (SIGBUS).

    Attributes:
        no_tokenizer: why an export has no tokenizer.json, as far as :attr:`companions` showed it; "" for no reason.

    Raises:
        CheckpointError: naming the file, the tensor, what was found and what was expected.
    """

    no_tokenizer = ""
    #: the EAGLE-3 head that drafts for it (eagle3.py)
    head: Checkpoint | None = None

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        #: size, time and checksum of the header of each file as they were when it was opened
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._headers_only = False
        self._entries: dict[str, Entry] = {}
        self._open()

    def _open(self) -> None:
        """Read the configuration and where each tensor lies."""
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: {_no_folder(self.folder)}")
        if not any(self.folder.glob("*.safetensors")):
            self._refuse_others()
        self.config = self._json(CONFIG)
        self.generation_config = self._json(GENERATION_CONFIG) if (self.folder / GENERATION_CONFIG).exists() else {}
        own = self.family
        for shard in self._shards():
            self.see(shard)
            with doing(str(shard)):
                header = read_header(shard)
            for entry in header.values():
                entry = self._by_experts(entry, own.experts_as_rows)
                for name, part in self._divided(_renamed(entry.name, own.names), entry, own).items():
                    if name in self._entries:
                        raise CheckpointError(f"{shard}: {name} is also in {self._entries[name].shard.name}")
                    self._entries[name] = part
            if len(self._entries) > MAX_TENSORS:
                raise CheckpointError(f"{shard}: more than {MAX_TENSORS} tensors in this and the shards before it")
        self._check_index()

    def _refuse_others(self) -> None:
        """Say what a folder without safetensors has, if that is known.

        Raises:
            CheckpointError: naming it, and what to do.
        """
        if found := min(filter(is_gguf, self.folder.glob("*")), default=None):
            raise CheckpointError(
                f"{found}: a GGUF file, in a folder without safetensors; to read it, name the file itself"
            )
        for pattern, text in OTHERS.items():
            if other := min(self.folder.glob(pattern), default=None):
                raise CheckpointError(f"{other}: {text}")

    # configuration

    @property
    def root(self) -> Path:
        """The folder whose files belong to the checkpoint."""
        return self.folder

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of config.json (the whole of it unless the model is multimodal)."""
        found = text_part(self.config)
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.folder / 'config.json'}: text_config is not an object")
        return found

    @property
    def family(self) -> Family:
        """The facts of the text model's type."""
        return family_named(self.text_config.get("model_type"))

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantizer's configuration, wherever the tool put it; {} when there is none."""
        if (own := self.family.experts_format) and any(
            name.endswith(".experts.down_proj_scale") for name in self._entries
        ):
            return {"quant_method": own}
        for config in (self.config, self.text_config):
            for key in ("quantization_config", "compression_config", "quantization"):
                if found := config.get(key):
                    if not isinstance(found, dict):
                        raise CheckpointError(f"{self.folder / 'config.json'}: {key} is not an object")
                    return found
        if (self.folder / "quantize_config.json").exists():  # AutoGPTQ, GPTQModel
            return {"quant_method": "gptq"} | self._json("quantize_config.json")
        if (self.folder / "quant_config.json").exists():  # AutoAWQ before transformers knew AWQ
            return {"quant_method": "awq"} | self._json("quant_config.json")
        if (self.folder / "hf_quant_config.json").exists():  # ModelOpt
            return {"quant_method": "modelopt"} | self._json("hf_quant_config.json")
        return {}

    @cached_property
    def image_processor(self) -> dict[str, Any]:
        """The image processor's configuration, in transformers' words; {} if there is none."""
        for name, part in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
            if (self.folder / name).exists():
                found = self._json(name)
                if isinstance(found := found.get(part, {}) if part else found, dict) and found:
                    return found
        return {}

    @property
    def companions(self) -> Path:
        """The folder with config.json and what else lies beside the weights."""
        return self.folder

    @property
    def size(self) -> int:
        """Bytes of the files with tensors."""
        return sum(shard.stat().st_size for shard in {entry.shard for entry in self._entries.values()})

    # tensors

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def where(self, name: str) -> str:
        """``file: tensor``, for messages."""
        entry = self._entries.get(name)
        return f"{entry.shard}: {entry.name}" if entry else f"{self.folder}: {name}"

    def shard(self, name: str) -> Path:
        """Return the file that has a tensor."""
        return self._entry(name).shard

    def dtype(self, name: str) -> str:
        """Return the safetensors dtype name, e.g. BF16."""
        return self._entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def beside(self, module: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the tensors ``<module>.<suffix>``: suffix -> (dtype, shape), from the headers alone."""
        return {suffix: (entry.dtype, entry.shape) for suffix, entry in self._modules.get(module, {}).items()}

    @cached_property
    def outline(self) -> Checkpoint:
        """The same tensors, of whose data only vectors and what decides are read; see :meth:`tensor`."""
        twin = copy.copy(self)
        twin._headers_only = True
        return twin

    def tensor(self, name: str, decides: bool = False) -> np.ndarray:
        """Return a tensor's numbers; of an :attr:`outline` ones of its shape, without memory of their own.

        Args:
            decides: whether a matrix's numbers decide what is made of it. An outline reads those and all vectors.

        Raises:
            CheckpointError: the file was changed since it was opened.
        """
        entry = self._entry(name)
        if self._headers_only and len(entry.shape) > 1 and not decides:
            return outline(entry.shape, DTYPES[entry.dtype])
        return self._read(entry).view(DTYPES[entry.dtype]).reshape(entry.shape)

    def element(self, name: str, at: int) -> np.ndarray:
        """Element ``at`` of the first dimension of a tensor, such as one expert's matrix; see :meth:`tensor`."""
        entry = self._entry(name)
        shape, dtype = entry.shape[1:], DTYPES[entry.dtype]
        if self._headers_only and shape:
            return outline(shape, dtype)
        size = prod(shape) * dtype.itemsize
        return self._read(entry, at * size, size).view(dtype).reshape(shape)

    def sample(self, name: str, size: int) -> bytes:
        """So many bytes from the middle of a tensor, as they are stored; all where it has fewer."""
        entry = self._entry(name)
        whole = prod(entry.shape) * DTYPES[entry.dtype].itemsize
        begin = max(0, (whole - size) // 2)
        return self._read(entry, begin, min(size, whole)).tobytes()

    def check_unchanged(self) -> None:
        """Refuse files that were changed since they were opened: what was read may be of two models.

        Raises:
            CheckpointError: naming the file.
        """
        for path, seen in self._seen.items():
            with self._reopen(path) as file:
                self._check_seen(path, file)
                if _beginning(file) != seen[2]:
                    raise _changed(path, "its header is another")

    def _reopen(self, path: Path) -> BinaryIO:
        """Open a file that was there when the checkpoint was opened."""
        try:
            return open(path, "rb")
        except FileNotFoundError:
            raise _changed(path, "it is not there any more") from None

    def see(self, path: Path) -> None:
        """Note how a file is that is about to be read, for :meth:`check_unchanged`."""
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            self._seen.setdefault(path, (found.st_size, found.st_mtime_ns, _beginning(file)))

    def _check_seen(self, path: Path, file: BinaryIO) -> None:
        size, time, _ = self._seen[path]
        found = os.fstat(file.fileno())
        if found.st_size != size:
            raise _changed(path, f"it has {found.st_size} bytes, and had {size}")
        if found.st_mtime_ns != time:
            raise _changed(path, "its time of modification is another")

    def _read(self, entry: Entry, begin: int = 0, size: int | None = None) -> np.ndarray:
        """Return the bytes of a tensor, by default all of them."""
        if size is None:
            size = prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if entry.half is not None:
            return self._read_half(entry, entry.half, begin, size)
        with doing(f"{entry.shard}: {entry.name}"), self._reopen(entry.shard) as file:
            found = np.fromfile(file, np.uint8, size, offset=entry.begin + begin)
            self._check_seen(entry.shard, file)  # after the reading, so that what was read is as it was
        if len(found) < size:
            raise CheckpointError(
                f"{entry.shard}: {entry.name}: {len(found)} of {size} bytes could be read: download it again"
            )
        found.flags.writeable = False
        return found

    def _read_half(self, entry: Entry, half: int, begin: int, size: int) -> np.ndarray:
        """Return bytes of a tensor that has one of two rows of each pair."""
        row = entry.shape[-1] * DTYPES[entry.dtype].itemsize
        first, last = begin // row, -(-(begin + size) // row)
        both = self._read(replace(entry, half=None), 2 * first * row, 2 * (last - first) * row)
        rows = np.ascontiguousarray(both.reshape(-1, 2, row)[:, half]).reshape(-1)
        return rows[begin - first * row :][:size]

    # reading

    @cached_property
    def _modules(self) -> dict[str, dict[str, Entry]]:
        found: dict[str, dict[str, Entry]] = {}
        for name, entry in self._entries.items():
            module, _, suffix = name.rpartition(".")
            found.setdefault(module, {})[suffix] = entry
        return found

    def _by_experts(self, entry: Entry, marks: str) -> Entry:
        """Return a tensor of experts [E, rows, columns], which is stored as [E rows, columns] and has ``marks`` in its
        name."""
        count = self.text_config.get("num_experts")
        if not marks or marks not in entry.name or len(entry.shape) != 2:
            return entry
        if type(count) is not int or count < 1 or entry.shape[0] % count:
            raise CheckpointError(
                f"{entry.shard}: {entry.name} is {entry.dtype} {list(entry.shape)}, expected a multiple of "
                f"moe_num_experts, {count} (config.json), as rows"
            )
        return replace(entry, shape=(count, entry.shape[0] // count, entry.shape[1]))

    def _divided(self, name: str, entry: Entry, own: Family) -> dict[str, Entry]:
        """Return a tensor under its name; of a linear that the family has divided or alternating, its rows under the
        names of transformers' linears."""
        for end, names in own.alternating.items():
            if name.endswith(end):
                return self._halves(name.removesuffix(end), names, entry)
        if f".{STACKED}." in name and entry.shape:
            return _unstacked(name, entry)
        joined, rows = own.divided or ("", None)
        stem, _, leaf = name.rpartition(".")
        parent, _, linear = stem.rpartition(".")
        if rows is None or linear != joined:
            return {name: entry}
        path = self.folder / CONFIG
        try:
            counts = rows(self.text_config)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path}: {error!r}: expected the sizes that divide the rows of {joined}") from None
        where = f"{entry.shard}: {entry.name}"
        if leaf not in ("weight", "bias"):
            raise CheckpointError(
                f"{where}: {joined} is quantized, expected a weight of floats: it joins the rows of "
                f"{', '.join(counts)}, and only floats are divided"
            )
        if not all(type(count) is int and count > 0 for count in counts.values()):
            raise CheckpointError(f"{path}: {joined} would have the rows {counts}, expected positive numbers")
        if entry.shape[:1] != (total := sum(counts.values()),):
            raise CheckpointError(
                f"{where} is {entry.dtype} {list(entry.shape)}, expected {total} rows, {counts} (config.json)"
            )
        size, begin = DTYPES[entry.dtype].itemsize * prod(entry.shape[1:]), entry.begin
        found: dict[str, Entry] = {}
        for part, count in counts.items():
            shape = (count, *entry.shape[1:])
            found[f"{parent}.{part}.{leaf}"] = Entry(
                shard=entry.shard, dtype=entry.dtype, shape=shape, begin=begin, name=entry.name
            )
            begin += count * size
        return found

    def _halves(self, stem: str, names: tuple[str, str], entry: Entry) -> dict[str, Entry]:
        """Return the two tensors whose rows alternate in one, under their names."""
        *outer, rows, columns = entry.shape if len(entry.shape) > 1 else (0, 1, 1)
        if rows % 2:
            raise CheckpointError(
                f"{entry.shard}: {entry.name} is {entry.dtype} {list(entry.shape)}, expected an even number of rows: "
                "a row of gate, then a row of up"
            )
        shape = (*outer, rows // 2, columns)
        return {f"{stem}{name}": replace(entry, shape=shape, half=i) for i, name in enumerate(names)}

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.folder}: {name} is missing")
        return self._entries[name]

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        self.check_file(path)
        try:
            if not path.is_file():  # a pipe would never end
                what = "not a file" if path.exists() else "missing; expected a Hugging Face checkpoint's folder"
                raise CheckpointError(f"{path}: {what}")
            if path.stat().st_size > MAX_CONFIG:
                raise CheckpointError(f"{path}: larger than {MAX_CONFIG} bytes, not a configuration")
            with doing(str(path)):
                self.see(path)
                found = parse_json(path.read_bytes())
        except CheckpointError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(found, dict):
            raise CheckpointError(f"{path}: expected a JSON object, found {type(found).__name__}")
        return found

    @cached_property
    def _named(self) -> tuple[str, str]:
        """The file of a whole model and the index of one in shards, or what config.json has in the place of one."""
        named = self.config.get("transformers_weights")
        if not isinstance(named, str):
            return WHOLE, INDEX
        return ("", named) if named.endswith(".index.json") else (named, "")

    @cached_property
    def _index(self) -> dict[str, str]:
        """Tensor -> shard. transformers takes model.safetensors first: an index without it is another model's, and
        one that cannot be read does not matter."""
        whole, index = self._named
        path = self.folder / index
        if not index or not path.exists():
            return {}
        is_whole = bool(whole) and (self.folder / whole).exists()
        try:
            weight_map = self._json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
                raise CheckpointError(f"{path}: weight_map is not an object of tensor name to file name")
        except CheckpointError:
            if is_whole:
                return {}
            raise
        return {} if is_whole and whole not in weight_map.values() else weight_map

    def _shards(self) -> list[Path]:
        whole, _ = self._named
        if self._index:
            names = sorted(set(self._index.values()))
        elif whole and (whole != WHOLE or (self.folder / whole).exists()):
            names = [whole]
        else:
            names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not names:
            raise CheckpointError(
                f"{self.folder}: no *.safetensors file: give the folder with config.json and *.safetensors, or a "
                "GGUF file"
            )
        return [self._shard(name) for name in names]

    def adopt(self, begins: tuple[str, ...]) -> list[str]:
        """Add the tensors whose names begin so of files in the folder that are no shards; return the files' names."""
        found, shards = [], {entry.shard for entry in self._entries.values()}
        for path in sorted(set(self.folder.glob("*.safetensors")) - shards):
            shard = self._shard(path.name)
            self.see(shard)
            with doing(str(shard)):
                own = {name: e for name, e in read_header(shard).items() if name.startswith(begins)}
            if new := own.keys() - self._entries.keys():
                self._entries |= {name: own[name] for name in new}
                found.append(path.name)
        self._forget()
        return found

    def add_from(self, other: Checkpoint, names: Mapping[str, str]) -> None:
        """Add another checkpoint's tensors.

        Args:
            names: theirs -> what this one calls them.
        """
        self._entries |= {own: other._entry(name) for name, own in names.items()}
        self._seen |= other._seen
        self._forget()

    def _forget(self) -> None:
        """Drop what was made of fewer tensors."""
        for made in ("_modules", "outline"):
            self.__dict__.pop(made, None)

    def _shard(self, name: str) -> Path:
        path = self.folder / name
        # names come from a file someone else wrote: plain file names only, and links only into the Hugging Face cache
        if not is_plain(name):
            raise CheckpointError(f"{self.folder}: a shard is named {name!r}; expected a plain file name")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing shard: download it")
        self.check_file(path)
        return path

    def check_file(self, path: Path) -> None:
        """Refuse a link that leaves the folder and its Hugging Face cache, and a pointer file of Git LFS.

        The pointer's format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.

        Raises:
            CheckpointError: naming the link and where it leads, or the file.
        """
        folder = self.root.resolve()
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as error:  # a loop of links
            raise CheckpointError(f"{path}: {error}") from None
        if target.parent not in (folder / path.parent.relative_to(self.root), folder.parent.parent / "blobs"):
            raise CheckpointError(f"{path}: links to {target}, outside the checkpoint's folder")
        if path.is_symlink() and not path.exists():
            raise CheckpointError(f"{path}: links to {target}, which is not there; download the file again")
        if not path.is_file():
            return
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise CheckpointError(f"{path}: a Git LFS pointer, not the file; to fetch it: git -C {folder} lfs pull")

    def _check_index(self) -> None:
        stored = {entry.name: entry for entry in self._entries.values()}
        for name, shard in self._index.items():
            found = stored.get(name)
            if found is None or found.shard.name != shard:
                where = "in no shard" if found is None else f"in {found.shard.name}"
                raise CheckpointError(f"{self.folder / shard}: {name} is missing (the index names it; it is {where})")


def _beginning(file: BinaryIO) -> int:
    """Return a checksum of a safetensors file's header; of any other file, of its first MiB."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    return zlib.crc32(start + file.read(length if length <= MAX_HEADER else 1 << 20))


def _changed(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: changed while it was read: {what}; export again")


def is_gguf(path: Path) -> bool:
    """Return whether a file is GGUF by its first bytes; or by its name, which a damaged one and a Git LFS pointer
    have."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC or path.suffix.lower() == ".gguf"


def _renamed(name: str, ends: Mapping[str, str]) -> str:
    end = next((end for end in ends if name.endswith(end)), "")
    return name.removesuffix(end) + ends[end] if end else name


def _unstacked(name: str, entry: Entry) -> dict[str, Entry]:
    """Return MLX's tensors of all experts under the names that transformers gives each."""
    stem, leaf = name.split(f".{STACKED}.", 1)
    count, *shape = entry.shape
    size = DTYPES[entry.dtype].itemsize * prod(shape)
    return {
        f"{stem}.experts.{e}.{leaf}": replace(entry, shape=tuple(shape), begin=entry.begin + e * size)
        for e in range(count)
    }


def _no_folder(path: Path) -> str:
    """Return what may have been meant by a path that is no folder."""
    expected = "expected the folder of a Hugging Face checkpoint, with config.json and *.safetensors"
    if path.exists():
        return f"not a folder; {expected}"
    if model := hub_name(path):
        folder = model.partition("/")[2]
        return f"no such folder; to fetch it from the Hugging Face hub: hf download {model} --local-dir {folder}"
    return f"no such folder; {expected}"


def dense(path: Path, kind: object) -> CheckpointError:
    """Return the refusal of a model without experts, which no option helps."""
    return CheckpointError(
        f"{path}: a dense model ({kind}): no experts; expected a mixture of experts; optimum-onnx (optimum-cli export "
        "onnx) and onnxruntime-genai's model builder export dense ones"
    )


def outline(shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
    """Return ones, which divide and round without a warning, in the memory of one."""
    return np.broadcast_to(np.ones((), dtype), shape)


def is_outline(array: np.ndarray) -> bool:
    """Return whether an array of codes or weights is an :func:`outline` or a part of one."""
    return array.size > 1 and not any(array.strides)


def unlike_rows(array: np.ndarray) -> np.ndarray:
    """Return the rows of a matrix; of an outline, whose rows are all alike, the first."""
    return array[:1] if is_outline(array) else array
