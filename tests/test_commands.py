"""The command as a stranger types it: what it says, on how many lines, and what it imports before it says so."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from quantmoe.exporter.checkpoint import write_safetensors

#: the command, and then the names of the packages that it imported as the last line of stdout
COMMAND = """
import sys
from quantmoe.exporter.cli import main
try:
    main()
finally:
    sys.stdout.flush()
    print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str
    imported: set[str]

    @property
    def line(self) -> str:
        """All that was printed: one line of stderr."""
        assert not self.out, self.out
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("quantmoe"), self.err
        return self.err.rstrip("\n")


def quantmoe(*arguments: object, cwd: Path | None = None, **environment: str) -> Done:
    """The command in a process of its own, whose imports count."""
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=os.environ | environment)
    out, _, imported = done.stdout.rstrip("\n").rpartition("\n")
    return Done(done.returncode, out, done.stderr, set(imported.split()))


@pytest.mark.parametrize("arguments", ["--version", "--help", "export --help", "inspect --help", "generate --help"])
def test_what_needs_no_model_imports_nothing_large(arguments: str) -> None:
    done = quantmoe(*arguments.split())
    assert (done.code, done.err) == (0, "")
    assert done.out
    assert not done.imported & {"numpy", "onnx_ir", "torch", "transformers", "onnxruntime"}


FIXTURES = Path(__file__).parent / "fixtures"
QWEN = FIXTURES / "llmcompressor-gptq-weight"


def edited(folder: Path, **fields: object) -> Path:
    """A copy of QWEN with other fields in its config.json; None: without."""
    shutil.copytree(QWEN, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def float_model(folder: Path, prefix: str, **fields: object) -> Path:
    """A checkpoint of floats with one linear a name."""
    folder.mkdir()
    names = [f"model.layers.0.{prefix}{name}_proj.weight" for name in ("gate", "up", "down")]
    write_safetensors(folder / "model.safetensors", {name: np.zeros((32, 32), np.float16) for name in names})
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(sizes | fields))
    return folder


def pointer(folder: Path, name: str) -> Path:
    """QWEN with what Git LFS leaves in a file's place."""
    shutil.copytree(QWEN, folder)
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize 16000000000\n"
    (folder / name).write_text(text)
    return folder


def holding(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def exported_before(folder: Path) -> Path:
    """An OUTDIR with the model of an export."""
    folder.mkdir()
    model = ir.Model(
        ir.Graph([], [], nodes=[], name="g", opset_imports={"": 20}), ir_version=10, producer_name="quantmoe"
    )
    ir.save(model, folder / "model.onnx")
    return folder


#: what is given as CHECKPOINT (made in a folder of that name), options, and all that is said of it
REFUSED: dict[str, tuple[Callable[[Path], Path | str], str, str]] = {
    "hub": (
        lambda folder: "Qwen/Qwen3-30B-A3B",
        "",
        "Qwen/Qwen3-30B-A3B: no such folder; to fetch it from the Hugging Face hub: "
        "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B",
    ),
    "page": (
        lambda folder: "https://huggingface.co/Qwen/Qwen3-30B-A3B/tree/main",
        "",
        "hf download Qwen/Qwen3-30B-A3B --local-dir Qwen3-30B-A3B",
    ),
    "typo": (lambda folder: folder, "", "typo: no such folder; expected the folder of a Hugging Face checkpoint"),
    "file": (lambda folder: QWEN / "config.json", "", "config.json: not a folder; expected"),
    "empty": (lambda folder: holding(folder), "", "config.json: missing; expected a Hugging Face checkpoint's folder"),
    "gguf": (
        lambda folder: holding(folder, "a-Q4_K_M.gguf"),
        "",
        "a-Q4_K_M.gguf: a GGUF file, which is not read; expected the safetensors checkpoint that it was made from",
    ),
    "gguf-file": (lambda folder: holding(folder, "a.gguf") / "a.gguf", "", "a.gguf: a GGUF file, which is not read"),
    "pickles": (
        lambda folder: holding(folder, "config.json", "pytorch_model-00001-of-00002.bin"),
        "",
        "00002.bin: PyTorch's pickle, which is not read; expected *.safetensors, as save_pretrained writes them",
    ),
    "exported": (exported_before, "", "model.onnx: an exported model; expected the checkpoint that it was made from"),
    "cache": (
        lambda folder: holding(folder, "snapshots/0123"),
        "",
        "snapshots: a folder of the Hugging Face cache; expected the checkpoint's, which is a folder in this one",
    ),
    "lfs": (
        lambda f: pointer(f, "model.safetensors"),
        "",
        "model.safetensors: a Git LFS pointer, not the file; to fetch",
    ),
    "lfs-config": (
        lambda f: pointer(f, "config.json"),
        "",
        "config.json: a Git LFS pointer, not the file; to fetch it",
    ),
    "lfs-tokenizer": (lambda f: pointer(f, "tokenizer.json"), "", "tokenizer.json: a Git LFS pointer, not the file"),
    "dense": (
        lambda folder: float_model(folder, "mlp.", model_type="llama"),
        "",
        "dense: a dense model (llama): no experts; expected a mixture of experts; "
        "optimum-onnx (optimum-cli export onnx) and onnxruntime-genai's model builder export dense ones",
    ),
    "dense-int4": (
        lambda folder: float_model(folder, "mlp.", model_type="llama"),
        "--quantize int4",
        "a dense model (llama): no experts",
    ),
    "float": (
        lambda folder: float_model(folder, "mlp.experts.0.", model_type="qwen3_moe"),
        "",
        "float: no quantization configuration; supported formats: compressed-tensors",
    ),
    "method": (
        lambda folder: edited(folder, quantization_config={"quant_method": "bitsandbytes"}),
        "",
        "quantization method 'bitsandbytes'; supported formats: compressed-tensors",
    ),
    "layers": (lambda folder: QWEN, "--layers 9", "llmcompressor-gptq-weight: --layers 9; the model has 1 to 1"),
    "size": (lambda folder: edited(folder, hidden_size=2**40), "", "hidden_size is 1099511627776, expected at most"),
    "f32": (
        lambda folder: QWEN,
        "--target cuda --dtype f32",
        "dtype is 'f32', expected one of: bf16, f16 (target cuda)",
    ),
    "bf16": (lambda folder: QWEN, "--dtype bf16", "dtype is 'bf16', expected one of: f32, f16 (target cpu)"),
}


@pytest.mark.parametrize("case", [*REFUSED, "dense --dry-run", "bf16 --dry-run"])
def test_what_headers_decide_is_said_before_torch_is_imported(case: str, tmp_path: Path) -> None:
    name, *dry = case.split()
    (make, options, text), out = REFUSED[name], tmp_path / "out"
    done = quantmoe("export", make(tmp_path / name), out, *options.split(), *dry, cwd=tmp_path)
    assert done.code == 1
    assert text in done.line
    assert not done.imported & {"torch", "transformers"}
    assert not out.exists()


@pytest.mark.parametrize("dry", [False, True])
def test_a_model_that_is_there_is_named_before_torch_is_imported(dry: bool, tmp_path: Path) -> None:
    out = exported_before(tmp_path / "out")
    done = quantmoe("export", QWEN, out, *(["--dry-run"] if dry else []))
    assert done.code == 1
    assert done.line == f"quantmoe: {out}/model.onnx exists; --force replaces an earlier export"
    assert not done.imported & {"torch", "transformers"}
    assert [path.name for path in out.iterdir()] == ["model.onnx"]
