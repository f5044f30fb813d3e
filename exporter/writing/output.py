"""The folder that an export writes: a whole model is there at every moment, also after a kill or a power failure.

New files grow in ``STAGE``, a folder inside, under their final names. They are on the disk before the first of them is
renamed, and the model is renamed last. The configuration, the tokenizer and the like are renamed one by one before it.
A kill in that moment leaves the whole old model beside some of these new files. A model that is replaced reads its
weights from a file with the new file's name. So the new model first reads them from ``<name>.partial``, a second name
(hard link) of the new file. ONNX Runtime loads that, too. ``STAGE`` lists its files, and only these are removed from
it. A model records what its export wrote. ``force`` replaces these files, also edited ones, and never any other file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from quantmoe.exporter.durable_files import sync
from quantmoe.exporter.folder.files import MODEL, STAGE, is_plain, is_weights, weight_files
from quantmoe.exporter.folder.metadata import FILES
from quantmoe.exporter.folder.model_file import load_own
from quantmoe.exporter.folder.record import file_hash
from quantmoe.exporter.memory import naming

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: in ``STAGE``: the new model with its weights under second names, and the record of the model that it replaces
_INTERIM, _REPLACED = "interim.onnx", "replaced.onnx"
#: in ``STAGE``: names of what an export wrote there, each followed by a NUL; its own is the first
_NAMES = "names"
_SECOND = ".partial"


def check_folder(folder: Path, names: Iterable[str], force: bool) -> None:
    """Refuse a folder in which one of the names is taken, but by an earlier export when ``force`` is set.

    Raises:
        FileExistsError: naming the file, and a folder that holds a checkpoint; ``STAGE`` is a link or a file.
    """
    _check_stage(folder)
    _check_names(folder, names, force)


def _check_names(folder: Path, names: Iterable[str], force: bool) -> None:
    if shard := min(folder.glob("*.safetensors"), default=None):
        raise FileExistsError(f"{shard} exists: {folder} holds a checkpoint; export to another folder")
    ours, left = _recorded(folder / MODEL), _left(folder)
    # the model first: it says most about the folder
    for name in sorted(set(names) - left.keys(), key=lambda name: (name != MODEL, name)):
        path = folder / name
        if os.path.lexists(path) and name not in ours:
            raise FileExistsError(f"{path} exists and no export is known to have written it; export to another folder")
        if os.path.lexists(path) and not force:
            raise FileExistsError(f"{path} exists; --force (in Python, force=True) replaces an earlier export")


def remove(folder: Path) -> None:
    """Remove the model in a folder, with what its export wrote and is as it was; the folder, if it is then empty.

    The model, which says what that is, goes last.
    """
    files = _recorded(folder / MODEL)
    for name in sorted(files, key=lambda name: name == MODEL):
        path, own = folder / name, name == MODEL or is_weights(name)
        if path.is_file() and (own or file_hash(path) == files[name]):
            path.unlink()
    if not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


@contextlib.contextmanager
def writing(folder: Path, force: bool) -> Iterator[Callable[[str], Path]]:
    """Final names of files -> where to write them now; they get these names when the block ends well.

    One export at a time writes to a folder. What a killed one left is removed.

    Raises:
        OSError: see :func:`check_folder`; another export is writing there; what replacing a model takes is missing.
    """
    made, stage = [path for path in (folder, *folder.parents) if not path.exists()], folder / STAGE
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY) if fcntl else None
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it, also after kill -9
            except BlockingIOError:
                raise FileExistsError(f"{folder}: another export is writing there") from None
        _check_stage(folder)
        try:
            _sweep(folder)
            stage.mkdir()  # a folder that cannot be written says so now
            if (folder / MODEL).exists():
                _check_links(folder)
            with naming(folder):
                yield lambda name: _own(stage, name)
            _commit(folder, force)
            for path in made:
                sync(path.parent)
        finally:
            _sweep(folder)
    finally:
        for path in made:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
        if lock is not None:
            os.close(lock)


def is_foreign(folder: Path, name: str) -> bool:
    """Return whether a file is there that no export is known to have written."""
    return os.path.lexists(folder / name) and name not in _recorded(folder / MODEL).keys() | _left(folder).keys()


def record(stage: Path) -> str:
    """``FILES`` of a model whose other files are all in the folder."""
    names = [path.name for path in _files(stage) if not is_weights(path.name)]
    return json.dumps({name: file_hash(stage / name) for name in names if name not in (MODEL, _NAMES)})


def _commit(folder: Path, force: bool) -> None:
    """Give the files of the stage their final names. Every ``sync`` divides what must be durable before the next."""
    stage = folder / STAGE
    names = [path.name for path in _files(stage) if path.name != _NAMES]
    _check_names(folder, names, force)
    before = _recorded(folder / MODEL)
    data = [name for name in names if is_weights(name)]
    taken = not before.keys().isdisjoint(data)
    if before:
        shutil.copyfile(folder / MODEL, _own(stage, _REPLACED))
    if taken:
        _save_interim(stage)
    for path in (*stage.iterdir(), stage, folder):
        sync(path)

    for name in sorted({*names} - {*data, MODEL}):
        (stage / name).replace(folder / name)
    if taken:
        for name in data:
            os.link(stage / name, folder / f"{name}{_SECOND}")
        sync(folder)
        (stage / _INTERIM).replace(folder / MODEL)
        sync(folder)
    for name in data:
        (stage / name).replace(folder / name)
    sync(folder)
    (stage / MODEL).replace(folder / MODEL)
    sync(folder)


def _save_interim(stage: Path) -> None:
    """Write the stage's model with its weights under their second names."""
    import onnx_ir as ir  # it imports sympy, half a second

    model = ir.load(stage / MODEL)
    for value in model.graph.initializers.values():
        if isinstance(tensor := value.const_value, ir.ExternalTensor):
            value.const_value = ir.ExternalTensor(
                f"{tensor.location}{_SECOND}",
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name,
                metadata_props=tensor.metadata_props,
            )
    ir.save(model, _own(stage, _INTERIM))


def _own(stage: Path, name: str) -> Path:
    """Put a file on the stage's list, and return where to write it."""
    names = stage / _NAMES
    with naming(names), names.open("ab") as file:
        file.write(b"".join(os.fsencode(own) + b"\0" for own in ([] if file.tell() else [_NAMES]) + [name]))
    return stage / name


def _files(stage: Path) -> list[Path]:
    """Return what an export wrote to its stage and is still there, the list itself among it."""
    names = stage / _NAMES
    listed = names.read_bytes().split(b"\0") if names.is_file() else []
    there = sorted(stage.iterdir()) if stage.is_dir() else []
    return [path for path in there if os.fsencode(path.name) in listed and not path.is_dir()]


def _check_stage(folder: Path) -> None:
    """Refuse a ``STAGE`` that no export made, and one in which somebody has a file."""
    stage = folder / STAGE
    if stage.is_symlink() or (stage.exists() and not stage.is_dir()):
        kind = "a link" if stage.is_symlink() else "a file"
        raise FileExistsError(f"{stage} is {kind}, expected a folder that an export left, or nothing")
    if stage.is_dir() and (others := set(stage.iterdir()) - set(_files(stage))):
        raise FileExistsError(f"{min(others)} exists and no export is known to have written it; move it elsewhere")


def _check_links(folder: Path) -> None:
    second = _own(folder / STAGE, _REPLACED)
    try:
        os.link(folder / MODEL, second)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}: replacing a model takes hard links; export to another folder", str(folder)
        ) from None
    second.unlink()


def _recorded(model: Path) -> dict[str, str]:
    """Return what the export of a model wrote: name -> hash, "" for the model and its weights; {} for another model.

    A stranger's file is read here. No name leads out of its folder. A file that is removed must have the hash, or a
    name that only exports use.
    """
    if (graph := load_own(model)) is None:
        return {}
    import onnx_ir as ir  # it imports sympy, half a second

    try:
        files = json.loads(graph.metadata_props.get(FILES, "{}"))
        found = {str(name): str(digest) for name, digest in files.items() if is_plain(name)}
        tensors = (value.const_value for value in graph.graph.initializers.values())
        locations = {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}
    except MemoryError:
        raise
    except Exception:  # fields of another type
        return {}
    return found | {name: "" for name in locations if is_weights(name)} | {MODEL: ""}


def _left(folder: Path) -> dict[str, Path]:
    """Return the files of killed or finished exports that the folder's model does not go with: name -> path."""
    stage, now = folder / STAGE, _recorded(folder / MODEL)
    renamed = {n: digest for n, digest in _recorded(stage / MODEL).items() if not os.path.lexists(stage / n)}
    found = renamed | _recorded(stage / _REPLACED) | {n: "" for n in weight_files(folder) if n.endswith(_SECOND)}
    paths = {name: folder / name for name in found.keys() - now.keys()}
    return {
        name: path
        for name, path in paths.items()
        if path.is_file() and (is_weights(name) or file_hash(path) == found[name])
    }


def _sweep(folder: Path) -> None:
    """Remove what is left, and then the stage, which says what that is."""
    left = _left(folder)
    for path in left.values():
        path.unlink()
    if left:
        sync(folder)
    stage = folder / STAGE
    for path in sorted(_files(stage), key=lambda path: path.name == _NAMES):  # the list last
        path.unlink()
    if stage.exists() and not any(stage.iterdir()):
        stage.rmdir()
