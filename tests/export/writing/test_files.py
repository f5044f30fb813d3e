"""What export leaves on disk, and what inspect says about it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.harness.sweeps import every
from transformers import AutoTokenizer

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.cli import main
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder.chat_template import load_template
from quantmoe.exporter.folder.files import FILES, LFS_POINTER
from quantmoe.exporter.folder.interface import PAGED, PAGED_TENSORS, TENSORS
from quantmoe.exporter.folder.tokenizer import load_tokenizer, stop_tokens
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.targets import CPU, CUDA, ORT
from quantmoe.exporter.writing import convert
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.external_data import ALIGNMENT
from quantmoe.exporter.writing.genai import genai_config
from quantmoe.exporter.writing.output import writing
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import stops
from quantmoe.exporter.writing.readme import readme
from quantmoe.ort_ext import build_info, library_path
from quantmoe.runtime.generate import Generator


@dataclasses.dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def quantmoe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Done]]:
    """The command, in this process: importing torch anew takes seconds."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["quantmoe", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            main()
        out, err = capsys.readouterr()
        code = done.value.code or 0
        return Done(code, out, err) if isinstance(code, int) else Done(1, out, err + code)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_packed_bytes_are_the_checkpoints(exported, checkpoint):
    folder = exported("qwen3_moe", activations="float")
    nodes = [node for node in ir.load(folder / "model.onnx").graph if node.op_type == "QuantMoE"]
    layers = moe_layers(find_format(open_checkpoint(checkpoint("qwen3_moe"))))
    assert len(nodes) == len(layers)
    for node, layer in zip(nodes, layers, strict=True):
        tensors = [value.const_value for value in node.inputs[3:5]]
        assert tensors[0].metadata_props["module"] == layer.name
        assert tensors[0].metadata_props["format"] == layer.scheme.text
        spec = MoESpec.from_attributes(json.loads(tensors[0].metadata_props["spec"]))
        rows = [tensor.numpy().view(np.uint8) for tensor in tensors]
        for e in (0, layer.num_experts - 1):
            want, found = layer.expert(e), LAYOUTS["cpu_panel"].unpack(spec, rows[0][e], rows[1][e])
            for a, b in ((want.gate, found.gate), (want.up, found.up), (want.down, found.down)):
                assert np.array_equal(a.codes, b.codes)
                assert np.array_equal(a.scales.view(np.uint8), b.scales.view(np.uint8))


def test_external_data_is_aligned_and_does_not_overlap(exported):
    folder = exported("qwen3_moe", activations="float")
    tensors = [v.const_value for v in ir.load(folder / "model.onnx").graph.initializers.values()]
    spans = sorted((t.offset, t.offset + t.length) for t in tensors if isinstance(t, ir.ExternalTensor))
    assert len(spans) > 4
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert spans[-1][1] == (folder / "model.onnx.data").stat().st_size
    assert (folder / "model.onnx").stat().st_size < 1_000_000


def test_weights_may_take_several_files(exported, checkpoint, tmp_path):
    whole, limit = exported("qwen3_moe", activations="float"), 400_000
    export(checkpoint("qwen3_moe"), tmp_path, activations="float", cache="f32", max_file_size=limit)
    initializers = ir.load(tmp_path / "model.onnx").graph.initializers.values()
    held = {}
    for tensor in (value.const_value for value in initializers if isinstance(value.const_value, ir.ExternalTensor)):
        held.setdefault(str(tensor.location), []).append((tensor.offset, tensor.length))
    names = ["model.onnx.data"] + [f"model.onnx.data.{i}" for i in range(1, len(held))]
    assert sorted(held) == sorted(names) == sorted(path.name for path in tmp_path.glob("model.onnx.*"))
    assert len(held) > 3
    for name, spans in held.items():
        assert len(spans) == 1 or (tmp_path / name).stat().st_size <= limit
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))
    assert inspect(tmp_path, verify=True)["verified"] == inspect(whole, verify=True)["verified"]
    a, b = (Generator(folder, threads=1).greedy(range(1, 9), 3) for folder in (tmp_path, whole))
    assert a.tokens == b.tokens
    assert np.array_equal(a.logits, b.logits)


def test_companion_files(exported):
    names = {path.name for path in exported("qwen3_moe", activations="float").iterdir()}
    configs = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    genai = {"genai_config.json", "libquantmoe_ort.so"}
    assert names == configs | genai | {"model.onnx", "model.onnx.data", "README.md"}
    assert names <= {name for row in FILES for name in row.names}


def test_the_reference_has_inputs_and_outputs(exported):
    """Each of a model, and each of a packed batch, is in the table of exported-folder.md."""
    graph = ir.load(exported("qwen3_moe", activations="float") / "model.onnx").graph
    found = [re.sub(r"\.\d+\..*", ".N.*", value.name) for value in (*graph.inputs, *graph.outputs)]
    assert {*found} == {row.name for row in TENSORS} - {"hidden_states"}
    assert PAGED.keys() < {row.name for row in PAGED_TENSORS}


def test_the_folder_says_what_runs_it_elsewhere(exported):
    text = (exported("qwen3_moe", activations="float") / "README.md").read_text(encoding="utf-8")
    assert "ONNX Runtime 1.21 or newer" in text
    assert f"A `libquantmoe_ort.so` in this folder is for Linux {platform.machine()}." in text
    assert "It is native code" in text
    assert "the nupkg QuantMoe" in text
    assert "libquantmoe_ort_cuda.so" in readme(CUDA, "1.21")
    assert "no library is needed" in readme(ORT, "1.31")


def test_a_readme_of_somebody_else_stays(checkpoint, tmp_path):
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    export(checkpoint("qwen3_moe"), tmp_path, activations="float")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


def test_inspect_verifies_and_finds_corruption(exported, tmp_path):
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    found = inspect(folder, verify=True)
    assert found["verified"] == 4 + len(found["linears"]) + len(found["dense"])
    (file,) = found["files"]
    assert file["bytes"] == (folder / "model.onnx.data").stat().st_size
    assert file["resident"] == file["bytes"]  # just read
    layer = found["layers"][0]
    assert layer["bytes"] == layer["w13"]["bytes"] + layer["w2"]["bytes"]
    assert 4.5 <= layer["bits_per_weight"] < 5.5  # 4-bit codes, a 16-bit scale for 32 of them, 64 bits a row

    tensor = ir.load(folder / "model.onnx").graph.initializers[layer["w2"]["tensor"]].const_value
    with open(folder / "model.onnx.data", "r+b") as file:
        file.seek(tensor.offset + tensor.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    inspect(folder)
    with pytest.raises(ModelError, match=rf"model\.onnx\.data: {layer['w2']['tensor']} has hash"):
        inspect(folder, verify=True)

    with open(folder / "model.onnx.data", "r+b") as file:
        file.truncate(tensor.offset)
    with pytest.raises(ModelError, match="truncated"):
        inspect(folder)
    (folder / "model.onnx.data").unlink()
    with pytest.raises(ModelError, match=r"model\.onnx\.data: missing"):
        inspect(folder)


def test_inspect_refuses_changed_attributes(exported, tmp_path):
    folder = exported("qwen3_moe", activations="float")
    for name, value, message in (
        ("w13_group_size", 64, "w13 has shape"),
        ("w13_scale_type", "f16", r"w13_scale_type is 'f16', .* was packed with 'bf16'"),
        ("op_version", 99, r"op_version is 99, this release knows 1"),
        ("w13_layout_version", 2, r"w13_layout_version is 2, this release knows 1"),
        ("w13_format", "nvfp4", r'w13: format is "nvfp4", .*: nvfp4 has e4m3 scales'),
        ("activation", "tanh", "activation is 'tanh'; supported: silu"),
    ):
        model = ir.load(folder / "model.onnx")
        node = next(node for node in model.graph if node.op_type == "QuantMoE")
        node.attributes[name] = ir.Attr(name, node.attributes[name].type, value)
        changed = tmp_path / "model.onnx"
        ir.save(model, changed)
        shutil.copyfile(folder / "model.onnx.data", tmp_path / "model.onnx.data")
        with pytest.raises(ModelError, match=message):
            inspect(changed)


def test_a_model_of_a_later_release_is_refused(exported, tmp_path):
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    for op, name, known in (
        ("QuantMoE", "op_version", 2),
        ("QuantMoE", "w13_layout_version", 1),
        ("MoERouting", "op_version", 2),
    ):
        model = ir.load(exported("qwen3_moe", activations="float") / "model.onnx")
        for node in (node for node in model.graph if node.op_type == op):
            node.attributes[name] = ir.Attr(name, ir.AttributeType.INT, known + 1)
            for value in node.inputs[3:5] if op == "QuantMoE" else ():
                spec = json.loads(value.const_value.metadata_props["spec"]) | {name: known + 1}
                value.const_value.metadata_props["spec"] = json.dumps(spec)
        ir.save(model, folder / "model.onnx")
        with pytest.raises(ModelError, match=f"{name} is {known + 1}, this release knows (1 to )?{known}"):
            inspect(folder)


def test_a_router_that_no_kernel_runs_is_refused(exported, tmp_path):
    folder = exported("qwen3_moe", activations="float")
    model = ir.load(folder / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "MoERouting")
    node.attributes["top_k"] = ir.Attr("top_k", ir.AttributeType.INT, 0)
    ir.save(model, tmp_path / "model.onnx")
    shutil.copyfile(folder / "model.onnx.data", tmp_path / "model.onnx.data")
    with pytest.raises(ModelError, match=f"{node.name}: top_k is 0, expected 1 to"):
        inspect(tmp_path)


@pytest.mark.parametrize("recorded", ["{", "[]", "null", "5", '"x"', "[" * 5000])
def test_recorded_attributes_that_are_none(exported, tmp_path, recorded):
    folder = exported("qwen3_moe", activations="float")
    for op in ("QuantMoE", "QuantLinear"):
        model = ir.load(folder / "model.onnx")
        node = next(node for node in model.graph if node.op_type == op)
        node.inputs[-1].const_value.metadata_props["spec"] = recorded
        ir.save(model, tmp_path / "model.onnx")
        if not (tmp_path / "model.onnx.data").exists():
            shutil.copyfile(folder / "model.onnx.data", tmp_path / "model.onnx.data")
        with pytest.raises(ModelError, match=node.name):
            inspect(tmp_path)


def test_generation_says_what_is_wrong(exported, tmp_path):
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    model = ir.load(folder / "model.onnx")
    norm = next(v for name, v in model.graph.initializers.items() if name.endswith("norm.weight"))
    norm.const_value = ir.tensor(np.full(norm.shape.numpy(), np.nan, np.float32), name=norm.name)
    ir.save(model, folder / "model.onnx")
    with pytest.raises(ModelError, match="logits after 2 tokens are not finite"):
        Generator(folder).greedy([5, 6], 2)
    with (folder / "model.onnx.data").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match=r"model\.onnx\.data: 1000 bytes; .* ends at byte \d+ \(truncated\?\)"):
        Generator(folder)
    (folder / "model.onnx.data").write_bytes(LFS_POINTER + b"v1\n")
    with pytest.raises(ModelError, match=r"model\.onnx\.data: 43 bytes; .* \(a Git LFS pointer; to fetch"):
        Generator(folder)
    model = ir.load(exported("qwen3_moe", activations="float") / "model.onnx")
    model.metadata_props["target"] = "cuda"
    next(node for node in model.graph if node.op_type == "QuantMoE").op_type = "QuantMoEOnCuda"
    ir.save(model, folder / "model.onnx")
    shutil.copyfile(exported("qwen3_moe", activations="float") / "model.onnx.data", folder / "model.onnx.data")
    with pytest.raises(ModelError, match="exported with --target cuda, which this provider does not run"):
        Generator(folder)
    model.metadata_props["target"] = "ort"  # another name, for the device that runs
    ir.save(model, folder / "model.onnx")
    with pytest.raises(ModelError, match=r"model\.onnx: (?!exported with).*QuantMoEOnCuda"):
        Generator(folder)
    for name, text in (("generation_config.json", "[]"), ("generation_config.json", '{"eos_token_id": "x"}')):
        (folder / name).write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=name):
            stop_tokens(folder)
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("group_size", 64, "group_size is 64: an option of quantize"),
        ("activations", "fp8", r"activations is 'fp8', expected one of: int8, int8-token, float \(target cpu\)"),
        ("scales", "f8", "scales is 'f8', expected one of: exact, bf16"),
        ("target", "npu", "target is 'npu', expected one of: cpu"),
        ("dtype", "bf16", "dtype is 'bf16', expected one of: f32, f16"),
    ],
)
def test_an_option_that_does_not_exist_is_refused(checkpoint, tmp_path, option, value, message):
    with pytest.raises(ValueError, match=message):
        export(checkpoint("qwen3_moe"), tmp_path / "out", **{option: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target", "value", "known"), [("cuda", "int8", "int8-token, float"), ("ort", "int8-token", "int8, float")]
)
def test_activations_that_a_target_has_no_kernels_for(checkpoint, tmp_path, target, value, known):
    with pytest.raises(ValueError, match=rf"activations is '{value}', expected one of: {known} \(target {target}\)"):
        export(checkpoint("qwen3_moe"), tmp_path / "out", target=target, activations=value)


def test_the_checkpoint_is_never_written_to(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe")
    with pytest.raises(OSError, match="is the checkpoint's own folder"):
        export(folder, folder, layers=1)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file, expected a folder"):
        export(folder, tmp_path / "file")


def test_token_ids_outside_the_vocabulary_are_named(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    for id in (-1, generator.vocabulary, 10**30):
        with pytest.raises(ModelError, match=f"token id {id} is outside the vocabulary, 0 to"):
            generator.greedy([1, id])


def test_generation_ends_at_the_models_context(exported, tmp_path):
    folder = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "model")
    model = ir.load(folder / "model.onnx")
    model.metadata_props["context_length"] = "8"
    ir.save(model, folder / "model.onnx")
    assert len(Generator(folder).greedy([1, 2, 3, 4, 5], 16).tokens) == 3
    with pytest.raises(
        ModelError,
        match="8 tokens and 1 for the answer do not fit into the model's context of 8 tokens: shorten the prompt",
    ):
        Generator(folder).greedy([1] * 8, 1)
    model.metadata_props["context_length"] = "many"
    ir.save(model, folder / "model.onnx")
    with pytest.raises(ModelError, match="context_length is 'many', expected a number of tokens"):
        Generator(folder)


def test_a_text_config_that_is_null_is_absent(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"text_config": None}), encoding="utf-8")
    ckpt = open_checkpoint(folder)
    cut = convert._config(ckpt, 1)
    assert cut == config | {"text_config": None, "num_hidden_layers": 1}
    assert genai_config(cut, {}, CPU)["model"]["decoder"]["num_hidden_layers"] == 1
    assert plan(folder, tmp_path / "out", layers=1).packed


@pytest.mark.parametrize("error", every([KeyboardInterrupt, OSError("No space left on device")]))
def test_interruption_leaves_nothing(checkpoint, exported, tmp_path, monkeypatch, error):
    old, count = shutil.copytree(exported("qwen3_moe", activations="float"), tmp_path / "old"), 0
    pack = LAYOUTS["cpu_panel"].pack

    def interrupted(*arguments: object) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise error
        pack(*arguments)

    monkeypatch.setattr(LAYOUTS["cpu_panel"], "pack", interrupted)
    with pytest.raises(error if isinstance(error, type) else OSError):
        export(checkpoint("qwen3_moe"), tmp_path / "out", layers=1)
    assert not (tmp_path / "out").exists()

    before = contents(old)
    with pytest.raises(FileExistsError, match="--force"):
        export(checkpoint("qwen3_moe"), old)
    with pytest.raises(error if isinstance(error, type) else OSError):
        export(checkpoint("qwen3_moe"), old, force=True, layers=1)
    assert contents(old) == before


def test_termination_leaves_nothing(quantmoe, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "quantmoe.exporter.writing.graph_writer.trace", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert quantmoe("export", checkpoint("qwen3_moe"), tmp_path / "out").returncode == 128 + signal.SIGTERM
    assert not (tmp_path / "out").exists()


def test_one_export_at_a_time_writes_to_a_folder(checkpoint, tmp_path):
    with contextlib.ExitStack() as first:
        first.enter_context(pytest.raises(FileExistsError, match="another export is writing there"))
        first.enter_context(writing(tmp_path, force=False))
        export(checkpoint("qwen3_moe"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_and_leaves_nothing(checkpoint, tmp_path):
    """A limit on file sizes stands for it: the error comes from the same write."""
    folder, limits = checkpoint("qwen3_moe"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*model\.onnx\.data"):
            export(folder, tmp_path / "out", layers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()


@pytest.mark.every
def test_a_killed_export_leaves_no_final_name_and_can_be_run_again(checkpoint, tmp_path):
    code = (
        "import os, signal, sys; from quantmoe.exporter.writing.convert import export\n"
        "def progress(stage, done, total):\n"
        "    if stage == 'packing experts': os.kill(os.getpid(), signal.SIGKILL)\n"
        "export(sys.argv[1], sys.argv[2], layers=1, progress=progress)"
    )
    killed = subprocess.run([sys.executable, "-c", code, checkpoint("qwen3_moe"), tmp_path])
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["quantmoe.partial"]
    export(checkpoint("qwen3_moe"), tmp_path, layers=1)
    assert inspect(tmp_path, verify=True)["verified"] > 2
    assert not list(tmp_path.glob("*.partial"))


def test_bf16_scales_report_their_error(checkpoint, tmp_path):
    report = export(checkpoint("qwen3_moe", dtype=torch.float16), tmp_path, scales="bf16", layers=1)
    assert 0 < report.scale_error <= 2**-8  # half a unit in bf16's last of 8 bits
    assert inspect(tmp_path)["layers"][0]["attributes"]["w2_scale_type"] == "bf16"


def test_templates_in_files_of_their_own_are_exported(checkpoint, tmp_path):
    """transformers saves templates with names as additional_chat_templates/NAME.jinja, and has the same for OUTDIR."""
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    (folder / "additional_chat_templates").mkdir()
    tools = folder / "additional_chat_templates/tool_use.jinja"
    tools.write_text("{{ tools }}", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("<{{ messages[0].content }}>", encoding="utf-8")
    export(folder, tmp_path / "out", layers=1)
    templates = [AutoTokenizer.from_pretrained(path).chat_template for path in (folder, tmp_path / "out")]
    assert templates == [{"default": "<{{ messages[0].content }}>", "tool_use": "{{ tools }}"}] * 2
    assert load_template(tmp_path / "out").render([], tools=[{}]) == "[{}]"
    tools.rename(tmp_path / "private")
    tools.symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=r"tool_use\.jinja: links to .*private, outside the checkpoint's folder"):
        export(folder, tmp_path / "linked", layers=1)


def test_exact_scales_keep_their_type(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe", dtype=torch.float16)
    report = export(folder, tmp_path, layers=1)
    assert report.scale_error is None
    assert inspect(tmp_path)["layers"][0]["attributes"]["w2_scale_type"] == "f16"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "quantum"}, "not an architecture of transformers"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "experts interface"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, the checkpoint has tensors of 2 layers"),
        ({"hidden_size": 256}, "expected"),
    ],
)
def test_refusals(checkpoint, tmp_path, config, message):
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    changed = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_dense_tensor_is_named(checkpoint, tmp_path, monkeypatch):
    from quantmoe.exporter.reading.weights.base import Format

    names = Format.parameters
    monkeypatch.setattr(Format, "parameters", lambda self: [n for n in names(self) if n != "model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of Qwen3MoeForCausalLM is missing"):
        export(checkpoint("qwen3_moe"), tmp_path / "out")


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 7}, "1,2"),
        ({"eos_token_id": None}, {"eos_token_id": 7}, "7"),
        (None, {"eos_token_id": None, "text_config": {"eos_token_id": 3}}, "3"),
        ({"eos_token_id": []}, {}, None),
    ],
)
def test_a_model_says_where_to_stop(checkpoint, tmp_path, generation, config, eos):
    """As the files beside it do."""
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ckpt, model = open_checkpoint(checkpoint("qwen3_moe")), SimpleNamespace(config=SimpleNamespace())
    ckpt.config, ckpt.generation_config, model.config.max_position_embeddings = config, generation or {}, 4096
    found = stops(SimpleNamespace(format=SimpleNamespace(ckpt=ckpt), model=model, short_context=None))
    assert found == {"context_length": "4096"} | ({"eos_token_id": eos} if eos else {})
    assert ",".join(map(str, stop_tokens(folder))) == (eos or "")


def test_samples_find_where_to_stop(exported, checkpoint):
    folder = exported("qwen3_moe", activations="float")
    found = Generator(folder).session.get_modelmeta().custom_metadata_map
    assert found["eos_token_id"] == ",".join(map(str, stop_tokens(folder)))
    assert found["context_length"] == str(open_checkpoint(checkpoint("qwen3_moe")).config["max_position_embeddings"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eos_token_id", "</s>"),
        ("eos_token_id", 10**6),
        ("bos_token_id", "<s>"),
        ("pad_token_id", 0.5),
        ("do_sample", "yes"),
        ("temperature", -1),
        ("top_k", 20.0),
        ("top_p", "0.9"),
        ("repetition_penalty", 0),
        ("suppress_tokens", [-1]),
    ],
)
def test_what_generate_would_refuse_is_refused_before_the_export(checkpoint, tmp_path, name, value):
    """And by the dry run and `inspect`: one rule reads generation_config.json."""
    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, name: value}), encoding="utf-8")
    expected = f"{folder / 'generation_config.json'}: {name} is {value!r}, expected "
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=re.escape(expected)):
            command(folder, tmp_path / "model")
    assert all(reason.startswith(expected) for reason in survey(folder)["refused"].values())


def test_expert_unlike_the_others_is_named(checkpoint, tmp_path, monkeypatch):
    from quantmoe.exporter.reading.formats import MoELayer

    expert = MoELayer.expert

    def other(self, e):
        found = expert(self, e)
        if e == 3:
            down = dataclasses.replace(found.down, scales=found.down.scales.astype(np.float16))
            found = dataclasses.replace(found, down=down)
        return found

    monkeypatch.setattr(MoELayer, "expert", other)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.3: down"):
        export(checkpoint("qwen3_moe"), tmp_path / "out", layers=1)


def test_command_line(quantmoe, checkpoint, exported, tmp_path, monkeypatch):
    folder = exported("qwen3_moe", activations="float")
    done = quantmoe("inspect", folder, "--verify", "--json")
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["layers"]) == 2
    shown = quantmoe("inspect", folder).stdout
    assert "cpu_panel" in shown
    assert re.search(r"\bw +bf16 *\n", shown)
    assert re.search(r"model\.onnx\.data: [\d.,]+ MB of [\d.,]+ MB in memory", shown)
    planned = quantmoe("export", checkpoint("qwen3_moe"), tmp_path / "planned", "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert not (tmp_path / "planned").exists()
    assert f"experts {sum(layer['bytes'] for layer in inspect(folder)['layers']) / 1e6:,.1f} MB" in planned.stdout
    assert quantmoe("generate", folder, "--ids", "5", "--max-new-tokens", 1, "--prefault").returncode == 0

    done = quantmoe("generate", folder, "--ids", "5,6,7", "--max-new-tokens", 4)
    assert done.returncode == 0
    assert len(done.stdout.strip().split(",")) <= 4
    assert quantmoe("generate", folder, "--prompt", "A mixture", "--max-new-tokens", 2).returncode == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(folder / "model.onnx", bare / "model.onnx")
    assert quantmoe("--version").stdout == f"quantmoe {version('quantmoe')} ({build_info()})\n"

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    for arguments, code, message in (
        (("generate", folder), 2, "give --prompt, --file or --ids"),
        (("generate", folder, "--ids", "a"), 2, "expected numbers"),
        (("generate", tmp_path, "--ids", "1"), 1, "missing; expected an exported model"),
        (("generate", checkpoint("qwen3_moe"), "--prompt", "A"), 1, "this is a checkpoint: quantmoe export it first"),
        (("generate", bare, "--prompt", "A"), 1, "tokenizer.json: missing; give token ids (--ids 1,2,3)"),
        (("inspect", checkpoint("qwen3_moe") / "config.json"), 1, "no .onnx file; expected an exported model"),
        (("export", tmp_path / "nowhere", tmp_path / "out"), 1, "no such folder"),
        (("export", tmp_path, tmp_path / "out"), 1, "config.json: missing"),
        (("export", checkpoint("qwen3_moe"), folder), 1, "--force"),
        (("export", checkpoint("qwen3_moe"), "/proc/out"), 1, "/proc/out"),
    ):
        done = quantmoe(*arguments)
        assert done.returncode == code, done.stderr
        assert message in " ".join(done.stderr.replace("│", " ").split()), done.stderr
        assert "Traceback" not in done.stderr


def test_samples_say_what_they_take():
    sample = Path(__file__).parents[3] / "samples" / "python" / "generate.py"
    done = subprocess.run([sys.executable, sample], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "usage: generate.py [--cuda] FOLDER COUNT ID...\n")


def test_the_api_mirrors_the_commands():
    import quantmoe

    assert quantmoe.__version__ == version("quantmoe")
    assert (quantmoe.export, quantmoe.inspect, quantmoe.Generator) == (export, inspect, Generator)
    assert all(callable(getattr(quantmoe, name)) for name in quantmoe.__all__)
    errors = {"CheckpointError", "ContextError", "ModelError", "OptionError"}
    assert errors == {name for name in quantmoe.__all__ if name.endswith("Error")}
    assert issubclass(quantmoe.ContextError, quantmoe.ModelError)


def test_errors_are_one_line(quantmoe, tmp_path):
    words = "a" * 5000
    stored = {"mlp.experts.0.up_proj.qweight": np.zeros((4, 4), np.int32)}
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": f"\x1b[31m\n{words}"}}), encoding="utf-8"
    )
    write_safetensors(
        tmp_path / "model.safetensors",
        lambda: iter(stored.items()),
    )
    done = quantmoe("export", tmp_path, tmp_path / "out")
    assert done.returncode == 1
    assert "quantization method" in done.stderr
    assert len(done.stderr) < 2100
    assert "\x1b" not in done.stderr
    assert "\n" not in done.stderr


def test_import_needs_no_torch_and_no_typer():
    assert not {"torch", "typer", "transformers", "onnx_ir"} & imported("quantmoe; quantmoe.ort_library_path()")


def test_what_headers_decide_is_said_before_onnx_ir_is_imported():
    """It imports sympy: half a second of every command."""
    modules = "quantmoe.exporter.writing.convert, quantmoe.exporter.writing.plan, quantmoe.runtime.chat"
    assert not {"torch", "transformers", "onnx_ir", "sympy"} & imported(modules)


def test_inspect_and_generate_need_no_torch():
    assert not {"torch", "transformers"} & imported("quantmoe.exporter.inspecting.inspect, quantmoe.runtime.generate")


def imported(modules: str) -> set[str]:
    """Names in sys.modules after importing in a fresh process."""
    code = f"import {modules}\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.long
def test_memory_stays_bounded(checkpoint, tmp_path):
    """More experts make the file larger, not the process: peaks differ by less than half of the added bytes."""
    code = (
        "import re, sys; from pathlib import Path; from quantmoe.exporter.writing.convert import export\n"
        "report = export(sys.argv[1], sys.argv[2])\n"
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())\n"
        "print(report.packed_bytes, int(peak[1]) * 1024)"
    )
    found = []
    for experts in (8, 256):
        sizes = {"num_experts": experts, "hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 1}
        arguments = [sys.executable, "-c", code, checkpoint("qwen3_moe", **sizes), tmp_path / str(experts)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True)
        found.append([int(number) for number in done.stdout.split()])
    added, peak = (b - a for a, b in zip(*found, strict=True))
    assert added > 100e6
    assert peak < added / 2, (added, peak)


def test_the_oldest_onnxruntime_is_the_library_s(exported):
    oldest = ir.load(exported("qwen3_moe", activations="float") / "model.onnx").metadata_props["onnxruntime"]
    assert f"needs ONNX Runtime {oldest} or newer".encode() in Path(library_path()).read_bytes()
