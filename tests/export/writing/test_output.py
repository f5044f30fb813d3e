"""The folder that an export writes: whose files are replaced, what is there at every moment, which bytes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
from blake3 import blake3
from support.harness.sweeps import every

import quantmoe
from quantmoe.custom_ops.op import inputs
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.metadata import PRODUCER
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.reading.formats import open_checkpoint
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.writing import output
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

#: what changes a folder, and what makes that last
CALLS = ("mkdir", "replace", "link", "unlink", "rmdir", "fsync")


class Killed(BaseException):
    """The process ends here: nothing that follows is done."""


def die_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Lets so many of CALLS happen."""
    done = 0

    def wrap(real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal done
            done += 1
            if done > step:
                raise Killed
            return real(*arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder: Path, source: dict[str, bytes], force: bool) -> None:
    """An export with these files for its result."""
    with output.writing(folder, force) as partial:
        for name, data in source.items():
            partial(name).write_bytes(data)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of calls take seconds on a slow disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def models(checkpoint, tmp_path_factory) -> list[dict[str, bytes]]:
    """Files of two exports: one in several data files and with the CPU's library, one without."""
    folder, made = shutil.copytree(checkpoint("qwen3_moe"), tmp_path_factory.mktemp("copy") / "it"), []
    for options, companion in (
        ({"target": "cpu", "max_file_size": 1}, "LICENSE"),
        ({"target": "cuda"}, "chat_template.jinja"),
    ):
        (folder / companion).write_text(companion, encoding="utf-8")
        out = tmp_path_factory.mktemp("out")
        export(folder, out, layers=1, **options)
        made.append(contents(out))
        (folder / companion).unlink()
    assert made[0].keys() - made[1].keys() >= {"LICENSE", "libquantmoe_ort.so", "model.onnx.data.2"}
    assert made[1].keys() - made[0].keys() - {"libquantmoe_ort_cuda.so"} == {"chat_template.jinja"}
    return made


@pytest.mark.parametrize("old", every([0, None, 1]))
def test_a_kill_at_any_step_leaves_a_whole_model_and_is_cleaned_up(models, tmp_path, unsynced, old):
    """``old`` is None: an empty folder, where there is no model until it is whole."""
    before, after = (None if old is None else models[old]), models[1 if old is None else 1 - old]
    step, seen = 0, set()
    while True:
        folder = tmp_path / str(step)
        if before:
            write(folder, before, force=False)
        else:
            folder.mkdir()
        (folder / "notes.txt").write_text("the user's", encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            die_at(patch, step)
            try:
                write(folder, after, force=True)
            except Killed:
                killed = True
            else:
                killed = False
        target = None
        if (folder / "model.onnx").exists():
            found = inspect(folder, verify=True)
            assert found["verified"] > 2
            target = found["metadata"]["target"]
        assert target or before is None
        seen.add(target)
        if not killed:
            assert contents(folder) == after | {"notes.txt": b"the user's"}
            break
        if target is not None:
            with pytest.raises(FileExistsError, match="--force"):
                write(folder, after, force=False)
            assert inspect(folder, verify=True)["metadata"]["target"] == target
            assert not (folder / "quantmoe.partial").exists()
        write(folder, after, force=target is not None)  # what a killed export left is in nobody's way
        assert contents(folder) == after | {"notes.txt": b"the user's"}
        shutil.rmtree(folder)
        step += 1
    assert step > 20
    assert len(seen) == 2, seen


@pytest.mark.parametrize("old", [None, 0])
def test_an_error_at_any_step_leaves_a_whole_model(models, tmp_path, monkeypatch, unsynced, old):
    """The disk fails at one call of ``replace``, ``link`` or ``fsync``; what follows works. An export that was complete
    may leave its stage, which the next one removes."""
    before, after = (None if old is None else models[old]), models[1]
    calls = {name: getattr(os, name) for name in ("replace", "link", "fsync")}
    step, failed = 0, True
    while failed:
        folder, done, failed = tmp_path / str(step), 0, False
        if before:
            write(folder, before, force=False)

        def call(name, *arguments, step=step):
            nonlocal done, failed
            done += 1
            if done == step + 1:
                failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO), "the disk")
            return calls[name](*arguments)

        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, lambda *arguments, name=name: call(name, *arguments))
            with contextlib.suppress(OSError):
                write(folder, after, force=True)
        if folder.exists():
            found = inspect(folder, verify=True)
            assert found["verified"] > 2
            now = json.loads(found["metadata"]["files"])
            data = {file["name"] for file in found["files"]}
            assert {path.name for path in folder.iterdir()} - {output.STAGE} == {"model.onnx", *now, *data}
        else:
            assert before is None
        step += 1
    assert step > 15


def test_engines_load_the_model_between_two_names(models, tmp_path, monkeypatch):
    """Until the last rename the new model reads its weights by their second names."""
    write(tmp_path, models[1], force=False)
    replace, interim = os.replace, []

    def call(source: Path, target: Path) -> None:
        replace(source, target)
        if source.name == "interim.onnx":
            tensors = (value.const_value for value in ir.load(target).graph.initializers.values())
            interim.extend({str(t.location) for t in tensors if isinstance(t, ir.ExternalTensor)})
            Generator(tmp_path).greedy([1, 2, 3], 2)

    monkeypatch.setattr(os, "replace", call)
    write(tmp_path, models[0], force=True)
    assert interim
    assert all(name.endswith(".partial") for name in interim)


def test_what_a_name_promises_is_on_the_disk_first(models, tmp_path, monkeypatch):
    """Files before their final names, the weights' names before the model's, both before the old weights go."""
    synced, pending, renamed = set(), set(), []
    fsync, replace, unlink, link = os.fsync, os.replace, os.unlink, os.link

    def on_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.add(os.fstat(descriptor).st_ino)
        if path == folder:
            pending.clear()

    def on_replace(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in synced, source
        assert target.name != "model.onnx" or not pending, pending
        assert "model.onnx" not in pending, target
        replace(source, target)
        pending.add(target.name)
        renamed.append(target.name)

    def on_link(source: Path, target: Path) -> None:
        link(source, target)
        if target.parent == folder:
            pending.add(target.name)

    def on_unlink(path: Path, **options: object) -> None:
        assert "model.onnx" not in pending, path
        unlink(path, **options)

    folder = tmp_path / "a" / "out"
    monkeypatch.setattr(os, "fsync", on_fsync)
    monkeypatch.setattr(os, "replace", on_replace)
    monkeypatch.setattr(os, "link", on_link)
    monkeypatch.setattr(os, "unlink", on_unlink)
    for model, final in ((models[0], 1), (models[1], 2)):
        renamed.clear()
        write(folder, model, force=True)
        assert renamed.count("model.onnx") == final
        assert renamed[-1] == "model.onnx"
        assert not pending
    assert {os.stat(path).st_ino for path in (folder, *folder.iterdir(), folder.parent, tmp_path)} <= synced


def test_what_no_export_wrote_is_never_written_over(checkpoint, exported, tmp_path):
    folder = checkpoint("qwen3_moe")
    for name in ("config.json", "tokenizer.json", "model.onnx", "model.onnx.data", "model.onnx.data.7",
                 "genai_config.json", "libquantmoe_ort.so"):  # fmt: skip
        out = tmp_path / name.replace(".", "_")
        out.mkdir()
        (out / name).write_text("another's", encoding="utf-8")
        for force in (False, True):
            for command in (export, plan):
                with pytest.raises(FileExistsError, match=rf"{name} exists and no export is known to have written it"):
                    command(folder, out, force=force)
        assert contents(out) == {name: b"another's"}

    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "config.json").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match=r"config\.json exists"):
        export(folder, tmp_path / "dangling", force=True)

    for force in (False, True):
        other = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / f"shards{force}")
        (other / "model-00001-of-00002.safetensors").touch()
        for command in (export, plan):
            with pytest.raises(FileExistsError, match=r"00002\.safetensors exists: .* holds a checkpoint"):
                command(folder, other, force=force)


def test_force_replaces_what_earlier_exports_wrote_and_nothing_else(models, tmp_path):
    write(tmp_path, models[0], force=False)
    with pytest.raises(FileExistsError, match=r"model\.onnx exists; --force \(in Python, force=True\) repl"):
        write(tmp_path, models[1], force=False)
    for name, data in {"chat_template.jinja": "another's", "model.onnx.data.77": "another's"}.items():
        (tmp_path / name).write_text(data, encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"chat_template\.jinja exists and no export"):
        write(tmp_path, models[1], force=True)
    assert contents(tmp_path).items() >= models[0].items()
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "libquantmoe_ort.so").write_text(
        "edited", encoding="utf-8"
    )  # not as the export left it: somebody's work
    write(tmp_path, models[1], force=True)
    kept = {"libquantmoe_ort.so": b"edited", "model.onnx.data.77": b"another's"}
    assert contents(tmp_path) == models[1] | kept


def test_names_recorded_in_a_strangers_model_remove_nothing(models, tmp_path):
    folder = tmp_path / "out"
    write(folder, models[0], force=False)
    (tmp_path / "secret").write_text("s", encoding="utf-8")
    (folder / "thesis").write_text("t", encoding="utf-8")
    model = ir.load(folder / "model.onnx")
    files = {"../secret": output.file_hash(tmp_path / "secret"), "thesis": "", "model.onnx.data/..": ""}
    model.metadata_props["files"] = json.dumps(json.loads(model.metadata_props["files"]) | files)
    ir.save(model, folder / "model.onnx")
    write(folder, models[1], force=True)
    assert (tmp_path / "secret").exists()
    assert contents(folder) == models[1] | {"thesis": b"t"}
    for text in ("[", "[]", "5", '{"a": 5}'):
        model.metadata_props["files"] = text
        ir.save(model, folder / "model.onnx")
        with pytest.raises(FileExistsError, match="exists and no export"):
            write(folder, models[0], force=True)


def test_replacing_says_when_it_cannot_be_done_safely(checkpoint, models, tmp_path, monkeypatch):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    write(tmp_path, models[0], force=False)
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OSError, match="replacing a model takes hard links; export to another folder"):
        export(checkpoint("qwen3_moe"), tmp_path, force=True)
    assert contents(tmp_path) == models[0]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_model_knows_its_data(models, target):
    """quant_moe.def, Identity, of every packed weight."""
    files = models[("cpu", "cuda").index(target)]
    model, found = ir.from_proto(onnx.load_from_string(files["model.onnx"])), 0
    for node in model.graph:
        for i, value in enumerate(node.inputs if node.op_type in ("QuantMoE", "QuantLinear") else ()):
            if not isinstance(tensor := value.const_value, ir.ExternalTensor):
                continue
            data = files[str(tensor.location)][tensor.offset : tensor.offset + tensor.length]
            line = [64 * (j * (len(data) // 64 - 1) // 7) for j in range(8)]
            samples = blake3(b"".join(data[at : at + 64] for at in line)).hexdigest()[:32]
            name = f"{inputs(node.op_type)[i][0]}_identity"
            want = f"{blake3(data).hexdigest()} {samples} {tensor.location} of it"
            assert node.attributes[name].as_string() == want
            found += 1
    assert found == {"cpu": 2 + 2 + 1, "cuda": 2 + 2}[target]  # q, k and v are one; for the CPU the head is packed


def test_the_data_of_another_export_is_refused(models, checkpoint, tmp_path):
    """Of the same names and sizes: half of an app's update."""
    write(tmp_path / "ours", models[0], force=False)
    ckpt = open_checkpoint(checkpoint("qwen3_moe"))
    other = shutil.copytree(ckpt.folder, tmp_path / "it")
    tensors = {name: ckpt.tensor(name) for name in ckpt.names()}
    tensors |= {name: tensor[::-1].copy() for name, tensor in tensors.items() if name.endswith("weight_packed")}
    write_safetensors(other / "model.safetensors", tensors)
    export(other, tmp_path / "another", layers=1, max_file_size=1)
    moe = next(node for node in ir.load(tmp_path / "ours" / "model.onnx").graph if node.op_type == "QuantMoE")
    last = moe.inputs[4].const_value.location
    Generator(tmp_path / "ours")
    shutil.copyfile(tmp_path / "another" / last, tmp_path / "ours" / last)
    with pytest.raises(
        ModelError, match=rf"is not the data that .* of {last} of it; put the data file of the same export"
    ):
        Generator(tmp_path / "ours")


def test_licenses_travel_with_the_model(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    names = ("LICENSE", "License.txt", "LICENCE.md", "NOTICE", "USE_POLICY.md", "copying", "LICENSE-MODEL",
             "THIRD_PARTY_LICENSES.txt", "Third-Party-Notices", "ThirdPartyNotices.md")  # fmt: skip
    for name in names:
        (folder / name).write_text(name, encoding="utf-8")
    (folder / "NOTICES").mkdir()
    export(folder, tmp_path / "out", layers=1)
    assert {name: (tmp_path / "out" / name).read_text(encoding="utf-8") for name in names} == {
        name: name for name in names
    }
    assert not (tmp_path / "out" / "NOTICES").exists()
    (tmp_path / "private").write_text("private", encoding="utf-8")
    (folder / "license.private").symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=r"license\.private: links to .*, outside the checkpoint's folder"):
        export(folder, tmp_path / "private_out", layers=1)
    assert not (tmp_path / "private_out").exists()


def test_what_stands_in_the_way_is_named_before_any_work(checkpoint, tmp_path, monkeypatch):
    """By the dry run, too: a stage that no export made, a folder below a file, a companion from elsewhere."""
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    (tmp_path / "file").write_text("another's", encoding="utf-8")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / output.STAGE).symlink_to(folder)
    (tmp_path / "filed").mkdir()
    (tmp_path / "filed" / output.STAGE).write_text("another's", encoding="utf-8")
    monkeypatch.setattr("quantmoe.exporter.writing.graph_writer.trace", None)
    for command in (export, plan):
        with pytest.raises(NotADirectoryError, match=r"/file is a file, expected a folder"):
            command(folder, tmp_path / "file" / "a" / "out")
        with pytest.raises(FileExistsError, match=rf"linked/{output.STAGE} is a link"):
            command(folder, tmp_path / "linked", force=True)
        with pytest.raises(FileExistsError, match=rf"filed/{output.STAGE} is a file"):
            command(folder, tmp_path / "filed", force=True)
    for name in ("linked", "filed"):
        with pytest.raises(FileExistsError, match=output.STAGE):
            write(tmp_path / name, {}, force=True)
        assert os.path.lexists(tmp_path / name / output.STAGE)
    (folder / "license.private").symlink_to(tmp_path / "file")
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=r"license\.private: links to .*, outside the checkpoint's folder"):
            command(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stage_with_somebodys_files_is_refused(checkpoint, models, tmp_path, unsynced, monkeypatch):
    """What a killed export left there is removed, and nothing else."""
    stage = tmp_path / output.STAGE
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, 2)
        with pytest.raises(Killed):
            write(tmp_path, models[0], force=False)
    left = set(contents(stage))
    assert left >= {"model.onnx", "config.json", "LICENSE"}
    (stage / "thesis.txt").write_text("t", encoding="utf-8")
    (stage / "model.onnx.data.9").write_text("somebody's", encoding="utf-8")
    (stage / "notes").mkdir()
    monkeypatch.setattr("quantmoe.exporter.writing.graph_writer.trace", None)
    for command in (export, plan):
        with pytest.raises(
            FileExistsError, match=rf"{output.STAGE}/model\.onnx\.data\.9 exists and no export is known"
        ):
            command(checkpoint("qwen3_moe"), tmp_path, force=True)
    with pytest.raises(FileExistsError, match=output.STAGE):
        write(tmp_path, models[1], force=True)
    assert {path.name for path in stage.iterdir()} == left | {"thesis.txt", "model.onnx.data.9", "notes"}
    for name in ("thesis.txt", "model.onnx.data.9"):
        (stage / name).rename(tmp_path / f"moved-{name}")
    (stage / "notes").rmdir()
    write(tmp_path, models[1], force=False)
    assert not stage.exists()
    assert contents(tmp_path).items() >= models[1].items()


def test_a_file_put_into_the_stage_meanwhile_stays(models, tmp_path):
    with output.writing(tmp_path, False) as partial:
        for name, data in models[1].items():
            partial(name).write_bytes(data)
        (tmp_path / output.STAGE / "thesis.txt").write_text("t", encoding="utf-8")
    assert contents(tmp_path / output.STAGE) == {"thesis.txt": b"t"}
    assert inspect(tmp_path, verify=True)["verified"] > 2


@pytest.mark.every
def test_two_exports_have_the_same_bytes_and_no_path_of_the_machine(checkpoint, tmp_path):
    """Other hash seeds, numbers of threads and output folders; both targets."""
    code = (
        "import os, sys; os.cpu_count = lambda: int(sys.argv[3])\n"
        "from quantmoe.exporter.writing.convert import export\n"
        "for target in ('cpu', 'cuda'): export(sys.argv[1], os.path.join(sys.argv[2], target), target=target)"
    )
    folders = tmp_path / "a", tmp_path / "another" / "b"
    for folder, number in zip(folders, ("1", "2"), strict=True):
        folder.mkdir(parents=True)
        environment = os.environ | {"PYTHONHASHSEED": number, "OMP_NUM_THREADS": number}
        command = [sys.executable, "-c", code, checkpoint("qwen3_moe"), folder, number]
        subprocess.run(command, env=environment, check=True)
    packages = Path(quantmoe.__file__).parent, Path(output.__file__).parents[2]
    machine = {Path.home(), Path(sys.prefix), *packages, tmp_path}
    for target in ("cpu", "cuda"):
        a, b = (contents(folder / target) for folder in folders)
        assert a.keys() == b.keys() >= {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"}
        assert [name for name in a if a[name] != b[name]] == []
        assert not [path for path in machine if os.fsencode(path) + b"/" in a["model.onnx"]]
        assert b"site-packages" not in a["model.onnx"]
        assert b"pkg.torch" not in a["model.onnx"]


def test_names_that_lead_out_of_the_folder_are_no_records(tmp_path):
    """With the separators of every system; a stranger's record would have files removed there."""
    names = ["README.md", "a/b", "..\\other\\README.md", "..", ".", "", "a\0b"]
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10, producer_name=PRODUCER)
    model.metadata_props[output.FILES] = json.dumps(dict.fromkeys(names, "blake3:0"))
    ir.save(model, tmp_path / output.MODEL)
    assert output._recorded(tmp_path / output.MODEL).keys() == {"README.md", output.MODEL}
