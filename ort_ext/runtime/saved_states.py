"""A saved prompt is a safetensors file, which Python, C#, Java, C++ and Rust read and write.

It has these tensors, in this order:

- ``model``: uint8 [64], the characters of ``identity`` in the model's metadata.
- ``tokens``: int64 [n], prompt and answer, without the last token, which was not run.
- ``past_key_values.N.key`` and ``.value``: [1, heads, n, width] in the cache's type.
- ``past_key_values.N.conv_state@M`` and ``.recurrent_state@M``: the states after M tokens, without a window, for M = n
  and for each M that the cache can go back to.
- ``checksum``: uint32 [1], the CRC-32 (of zlib and gzip) of all bytes of the file before it, with the header.
"""

from __future__ import annotations

import os
import re
import secrets
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantmoe.exporter.durable_files import replace
from quantmoe.exporter.errors import CheckpointError, ModelError
from quantmoe.exporter.folder.metadata import IDENTITY
from quantmoe.exporter.memory import doing, naming
from quantmoe.exporter.safetensors_file import DTYPES, Entry, read_header, write_safetensors

if TYPE_CHECKING:
    from quantmoe.runtime.cache import Cache
    from quantmoe.runtime.opened_model import OpenedModel

MODEL, TOKENS, CHECKSUM = "model", "tokens", "checksum"
#: what :func:`load` takes
EXPECTED = "expected a file that generate --save-state or save_cache wrote"


def target(path: str | Path) -> Path:
    """Return the file that :func:`save` writes: where a link leads.

    Raises:
        ModelError: its folder is missing, it is no regular file, or what it has is neither nothing nor a saved state.
        OSError: it cannot be read.
    """
    file = Path(os.path.realpath(path))
    if file.is_dir():
        raise ModelError(f"{path} is a folder, expected a file")
    if not file.parent.is_dir():
        raise ModelError(f"{file.parent}: no such folder")
    if file.is_symlink() or (file.exists() and not file.is_file()):  # a link that leads to itself; a pipe, a device
        raise ModelError(f"{path}: is no regular file")
    if file.exists() and file.stat().st_size:
        try:
            known = {MODEL, TOKENS} <= read_header(file).keys()
        except CheckpointError:
            known = False
        if not known:
            raise ModelError(f"{path}: is there, and is no saved state: expected an earlier one, or no file")
    return file


def save(cache: Cache, path: str | Path) -> None:
    """Write what a cache has; an earlier saved state is replaced when all is there.

    Raises:
        ModelError: it has no tokens, the model no identity, or a run was interrupted that changed its states; as
            :func:`target`.
        OSError: the file cannot be written.
    """
    cache.settle()
    path, tokens = target(path), np.array(cache.tokens, np.int64)
    if not len(tokens):
        raise ModelError(f"{path}: the cache has no tokens to save")
    keys, states = cache.contents()
    found = {MODEL: _identity(cache.model), TOKENS: tokens} | keys
    found |= {f"{name}@{length}": array for length, own in states.items() for name, array in own.items()}
    partial = path.with_name(f"{path.name}.{secrets.token_hex(16)}.partial")  # another saver of this path has its own
    try:
        with naming(partial):
            write_safetensors(partial, found, CHECKSUM)
        replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(cache: Cache, path: str | Path) -> None:
    """Make a cache what :func:`save` wrote.

    The file is read and not mapped: a mapped file that somebody truncates ends the process (SIGBUS).

    Raises:
        ModelError: the file is damaged, of another model, or has more tokens than the context or the cache holds.
        OSError: it cannot be read.
    """
    path, model = Path(path), cache.model
    header, memory = _read(path)

    def take(name: str, dtype: np.dtype, shape: list[int]) -> np.ndarray:
        entry = header.pop(name, None)
        if entry is None:
            raise ModelError(f"{path}: {name} is missing")
        if (DTYPES[entry.dtype], list(entry.shape)) != (dtype, shape):
            raise ModelError(
                f"{path}: {name} is {entry.dtype} {list(entry.shape)}, expected {dtype.name} {shape} of this model"
            )
        count = int(np.prod(shape)) * dtype.itemsize
        found = memory[entry.begin : entry.begin + count]
        if len(found) < count:
            raise ModelError(f"{path}: {name}: {len(found)} of {count} bytes could be read; is it truncated?")
        return found.view(dtype).reshape(shape)

    identity = _identity(model)
    if not np.array_equal(take(MODEL, identity.dtype, [len(identity)]), identity):
        raise ModelError(f"{path}: saved with another model than {model.path}: its {IDENTITY} is another")
    if CHECKSUM not in header:
        raise ModelError(f"{path}: {CHECKSUM} is missing: save it again")
    summed = header[CHECKSUM].begin
    checksum = int(take(CHECKSUM, np.dtype("<u4"), [1])[0])
    length = header[TOKENS].shape[0] if header[TOKENS].shape else 0
    tokens = take(TOKENS, np.dtype(np.int64), [length]).tolist()
    keys, states = {}, {}
    for name, (_, dtype) in model.past.items():
        if name not in model.states:
            shape = model.shape(name)
            keys[name] = take(name, dtype, [*shape[:2], length, shape[3]])
    ends = {int(m[1]) for name in header if (m := re.fullmatch(r".+@([0-9]{1,9})", name))}
    for end in ends if model.states else ():
        window = model.window > 1
        states[end] = {n: take(f"{n}@{end}", model.past[n][1], model.shape(n)[window:]).copy() for n in model.states}
    if header:
        raise ModelError(f"{path}: {min(header)} is not of this model's cache")
    if model.states and (length not in states or max(states) > length):
        raise ModelError(f"{path}: expected states after its {length} tokens, found those after {sorted(ends)}")
    _check_sum(path, memory, summed, checksum=checksum)
    try:
        model.check(tokens)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    of_states = [(f"{name}@{end}", array) for end, own in states.items() for name, array in own.items()]
    for name, array in [*keys.items(), *of_states]:
        if array.dtype.kind not in "iu" and not np.isfinite(array).all():
            raise ModelError(f"{path}: {name} has numbers that are not finite")
    cache.become(tokens, keys, states)


def _read(path: Path) -> tuple[dict[str, Entry], np.ndarray]:
    """Return the tensors of a file by their names, and all its bytes.

    Raises:
        ModelError: it is no saved state.
    """
    with open(path, "rb") as file:
        if file.read(9)[8:] != b"{":  # after its length, the header
            raise ModelError(f"{path}: no saved state; {EXPECTED}")
    try:
        header = read_header(path)
    except CheckpointError as error:
        raise ModelError(str(error)) from None
    with doing(str(path)):
        memory = np.fromfile(path, np.uint8)
    for name in (MODEL, TOKENS):
        if name not in header:
            raise ModelError(f"{path}: no saved state: no tensor {name}; {EXPECTED}")
    return header, memory


def _check_sum(path: Path, memory: np.ndarray, summed: int, *, checksum: int) -> None:
    """Refuse a file whose first ``summed`` bytes have another checksum, or that has more than it after them.

    Raises:
        ModelError: saying both checksums.
    """
    if summed + 4 != len(memory):
        raise ModelError(f"{path}: {CHECKSUM} is not its last tensor")
    if (found := zlib.crc32(memory.data[:summed])) != checksum:
        raise ModelError(
            f"{path}: was altered or is damaged: the CRC-32 of its bytes is {found:08x}, its {CHECKSUM} says "
            f"{checksum:08x}: copy or save it again"
        )


def _identity(model: OpenedModel) -> np.ndarray:
    """uint8 [64], its characters."""
    if not model.identity:
        raise ModelError(f"{model.path}: no {IDENTITY} in its metadata, as in older exports; export it again")
    return np.frombuffer(model.identity.encode(), np.uint8)
