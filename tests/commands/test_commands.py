"""The command as a stranger types it: what it says, on how many lines, and what it imports before it says so."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Unpack, get_type_hints

import numpy as np
import onnx_ir as ir
import pytest
import typer
from support.harness.pages import generate
from typer.testing import CliRunner

from quantmoe.benchmarks.bench import app as benches
from quantmoe.custom_ops.op_def.schema import schema
from quantmoe.exporter.choosing.options import ExportOptions, Options
from quantmoe.exporter.cli import app, main
from quantmoe.exporter.command_arguments import EXTRAS, listed
from quantmoe.exporter.commands.generate import speed
from quantmoe.exporter.folder.files import LFS_POINTER
from quantmoe.exporter.reading.checkpoint import Checkpoint
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

#: the command, and then the names of the packages that it imported as the last line of stdout
COMMAND = """
import os, sys
sys.modules |= dict.fromkeys(os.environ.get("ABSENT", "").split())  # what is None there is not found
from quantmoe.exporter.cli import main
try:
    main()
finally:
    sys.stdout.flush()
    print(*sorted({name.partition(".")[0] for name, module in sys.modules.items() if module}))
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
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True}
    offline = {"HF_HUB_OFFLINE": "1"}  # nothing is fetched from the hub
    done = subprocess.run(command, text=True, cwd=cwd, env=os.environ | offline | environment, **streams)
    out, _, imported = done.stdout.rstrip("\n").rpartition("\n")
    return Done(done.returncode, out, done.stderr, set(imported.split()))


@pytest.mark.parametrize("arguments", ["--version", "--help", "export --help", "inspect --help", "generate --help"])
def test_what_needs_no_model_imports_nothing_large(arguments: str) -> None:
    done = quantmoe(*arguments.split())
    assert (done.code, done.err) == (0, "")
    assert done.out
    assert not done.imported & {"numpy", "onnx_ir", "torch", "transformers", "onnxruntime"}


def commands() -> dict[str, Any]:
    """Every command by its name, as "bench layer"."""
    of_app, of_bench = (typer.main.get_command(one).commands for one in (app, benches))
    return {name: of_app[name] for name in of_app if name != "bench"} | {
        f"bench {name}": of_bench[name] for name in of_bench
    }


@pytest.mark.parametrize("name", commands())
def test_help_reads_at_a_glance(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 60 lines of 80 columns, at most 12 words an option, words instead of types; -h is --help."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["quantmoe", *name.split(), "-h"])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 60
    options = shown.partition("Options ─")[2]
    assert not re.search(r"<(bool|int|float|str|path|Any)[ >]", options), options
    for parameter in commands()[name].params:
        assert 0 < len((parameter.help or "").split()) <= 12, parameter.name


def reference(page: str) -> str:
    """A page that docs/generate.py makes."""
    made: str = getattr(generate(), page)()
    return made


def test_the_reference_has_every_operator() -> None:
    found = re.findall(r"^## (\w+)$", reference("operators"), re.M)
    assert found[: len(schema().operators)] == sorted(schema().operators)


def test_rare_options_are_in_the_reference_alone() -> None:
    page = reference("commands")
    for command, option in (("export", "--max-file-size"), ("generate", "--misses")):
        assert option not in quantmoe(command, "--help").out
        section = page.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        assert f"`{option}`" in section


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mtp --tensor-parallel 2", "--mtp is not divided: leave out --mtp or --tensor-parallel"),
        ("--target cuda --external-experts --paged", "--external-experts does not go with --paged"),
        ("--symmetric", "--symmetric is for --quantize int4: the other formats have no zero points"),
        ("--data-parallel", "--data-parallel needs --expert-parallel: whole experts in a rank"),
        ("--external-experts", "--external-experts is for --target cuda: TensorRT's plug-in reads them"),
    ],
)
def test_errors_name_options_as_they_are_typed(options: str, said: str, tmp_path: Path) -> None:
    assert quantmoe("export", tmp_path, tmp_path / "out", *options.split()).line == f"quantmoe: {said}"


def test_export_takes_its_options(tmp_path: Path) -> None:
    """The dry run of a fixture says what the options mean."""
    done = quantmoe("export", QWEN, tmp_path / "out", "--dry-run", "--activations", "float", "--max-file-size", "1MB")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"activations *none", done.out.replace("│", " ")), done.out


def test_no_rate_of_one_token() -> None:
    found = SimpleNamespace(prompt=4, prefill=0.5, tokens=[1], tokens_per_second=0.0, speculation=None)
    assert speed(found) == "prompt: 4 tokens, 8.0 tokens/s (0.500 s); decode: 1 token"
    found.tokens, found.tokens_per_second = [1, 2], 3.0
    assert speed(found).endswith("decode: 2 tokens, 3.0 tokens/s")


def test_a_shell_completes_options() -> None:
    """A word's beginning gives the options; the script asks for them.

    Not --show-completion: it takes the shell's name only where it finds none running.
    """
    typed = {"COMP_WORDS": "quantmoe export --ex", "COMP_CWORD": "2", "_QUANTMOE_COMPLETE": "complete_bash"}
    assert quantmoe(**typed).out.split() == ["--expert-parallel", "--expert-map", "--external-experts"]
    typed |= {"COMP_WORDS": "quantmoe bench layer --to", "COMP_CWORD": "3"}
    assert quantmoe(**typed).out.split() == ["--tokens"]
    script = quantmoe(_QUANTMOE_COMPLETE="source_bash").out
    assert "_QUANTMOE_COMPLETE=complete_bash" in script


def test_no_option_means_two_things() -> None:
    """Commands that have an option in common say the same of it, except times and the other side."""
    said: dict[str, set[str]] = {}
    for command in commands().values():
        for one in command.params:
            for name in one.opts:
                if name.startswith("-"):
                    text = "compare with" if name == "--against" else one.help
                    said.setdefault(name, set()).add(re.sub(r"\d+ s\b", "N s", text))
                    assert name != "--against" or one.help.startswith(text)
    assert len(said) > 100
    assert {name: texts for name, texts in said.items() if len(texts) > 1} == {}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("generate a --temp 1", "quantmoe generate: no such option: --temp; type --temperature;"),
        ("generate a --top_k 3", "quantmoe generate: no such option: --top_k; type --top-k;"),
        ("generate a -ngl 99", "quantmoe generate: no such option: -ngl; type --device cuda, which runs all layers"),
        ("serve a --n-gpu-layers=9", "quantmoe serve: no such option: --n-gpu-layers; type --device cuda, "),
        ("export a b -ngl 9", "quantmoe export: no such option: -ngl; quantmoe export --help"),
        ("generate a -nx", "quantmoe generate: no such option: -nx; type -n; quantmoe generate --help"),
        ("generate a -n x", "quantmoe generate: invalid value for '--max-new-tokens': "),
        ("serve a --ctx-size 9", "quantmoe serve: no such option: --ctx-size; type --context;"),
        ("bench model a --prefil 9", "quantmoe bench model: no such option: --prefil; type --prefill;"),
        ("run a", "quantmoe: no such command: run; type quantmoe generate;"),
        ("chat", "quantmoe: no such command: chat; type quantmoe generate;"),
        ("bench modle", "quantmoe bench: no such command: modle; type quantmoe bench model;"),
        ("zzz", "quantmoe: no such command: zzz; quantmoe --help lists"),
    ],
)
def test_words_of_other_tools(typed: str, said: str) -> None:
    done = quantmoe(*typed.split())
    assert done.code == 2
    assert done.line.startswith(said)


def test_help_says_what_a_checkpoint_may_be() -> None:
    assert "Hugging Face folder, ORG/MODEL, or GGUF file" in " ".join(
        quantmoe("export", "--help").out.replace("│", " ").split()
    )


FIXTURES = Path(__file__).parents[1] / "fixtures"
QWEN = FIXTURES / "llmcompressor-gptq-weight"


def edited(folder: Path, **fields: object) -> Path:
    """A copy of QWEN with other fields in its config.json; None: without."""
    shutil.copytree(QWEN, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | fields
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def float_model(folder: Path, prefix: str, **fields: object) -> Path:
    """A checkpoint of floats with one linear a name."""
    folder.mkdir()
    names = [f"model.layers.0.{prefix}{name}_proj.weight" for name in ("gate", "up", "down")]
    write_safetensors(folder / "model.safetensors", {name: np.zeros((32, 32), np.float16) for name in names})
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(sizes | fields), encoding="utf-8")
    return folder


def pointer(folder: Path, name: str) -> Path:
    """QWEN with what Git LFS leaves in a file's place."""
    shutil.copytree(QWEN, folder)
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'5' * 64}\nsize 16000000000\n"
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def holding(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
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
        "a-Q4_K_M.gguf: a GGUF file, in a folder without safetensors; to read it, name the file itself",
    ),
    "gguf-file": (lambda folder: holding(folder, "a.gguf") / "a.gguf", "", "a.gguf: 2 bytes; expected a GGUF file"),
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
        lambda folder: float_model(
            folder, "mlp.experts.0.", model_type="qwen3_moe", num_experts=1, num_experts_per_tok=1
        ),
        "",
        "float: no quantization configuration; supported formats: compressed-tensors",
    ),
    "method": (
        lambda folder: edited(folder, quantization_config={"quant_method": "eetq"}),
        "",
        "quantization method 'eetq'; supported formats: compressed-tensors",
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


def test_the_demo_says_of_a_checkpoint_what_export_does(tmp_path: Path) -> None:
    done = quantmoe("demo", "--checkpoint", "Qwen/Qwen3-30B-A3B", cwd=tmp_path)
    assert done.code == 1
    assert "hf download Qwen/Qwen3-30B-A3B" in done.line
    assert not done.imported & {"torch", "transformers"}


@pytest.mark.parametrize("dry", [False, True])
def test_a_model_that_is_there_is_named_before_torch_is_imported(dry: bool, tmp_path: Path) -> None:
    out = exported_before(tmp_path / "out")
    done = quantmoe("export", QWEN, out, *(["--dry-run"] if dry else []))
    assert done.code == 1
    assert done.line == f"quantmoe: {out}/model.onnx exists; --force (in Python, force=True) replaces an earlier export"
    assert not done.imported & {"torch", "transformers"}
    assert [path.name for path in out.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("export", "quantmoe export: missing argument 'checkpoint'"),
        ("export a", "quantmoe export: missing argument 'outdir'"),
        ("export a b --target gpu", "quantmoe export: invalid value for '--target': "),
        ("export a b --bogus", "quantmoe export: no such option: --bogus"),
        ("export a b --layers 0", "quantmoe export: invalid value for '--layers': "),
        ("export a b --group-size x", "quantmoe export: invalid value for '--group-size': "),
        (
            "export a b --max-file-size 1x",
            "quantmoe export: invalid value for '--max-file-size': '1x': expected bytes, as ",
        ),
        ("exprot a b", "quantmoe: no such command: exprot; type quantmoe export"),
        ("generate a", "quantmoe generate: standard input: expected a prompt, found no text; give --prompt, --file or"),
        ("generate a --file none", "quantmoe generate: invalid value for --file: none: No such file or directory"),
        ("generate a --file . --prompt b", "quantmoe generate: --file does not go with --prompt"),
        ("generate a --ids 1 --chat", "quantmoe generate: --ids does not go with --chat"),
        ("generate a --ids 1,x", "quantmoe generate: invalid value for '--ids': '1,x'; expected numbers separated by"),
        ("generate a --ids 1 --max-new-tokens 0", "quantmoe generate: invalid value for '--max-new-tokens': "),
        ("unpack a", "quantmoe unpack: missing option '--layer'"),
        (
            "bench layer --tokens 1,0",
            "quantmoe bench layer: invalid value for '--tokens': 0; expected numbers",
        ),
        (
            "bench layer --shape 1/2/3",
            "quantmoe bench layer: invalid value for --shape: 1/2/3; 3 sizes, H/I/E/k are 4; expected one of",
        ),
        ("bench model --bogus", "quantmoe bench model: no such option: --bogus"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: str, line: str, tmp_path: Path) -> None:
    done = quantmoe(*arguments.split(), cwd=tmp_path)
    assert done.code == 2
    assert done.line.startswith(line)
    assert done.line.endswith(" --help lists what there is")
    assert not done.imported & {"torch", "transformers", "onnxruntime"}


def test_no_argument_is_help() -> None:
    done = quantmoe()
    assert (done.code, done.err) == (0, "")
    assert "export" in done.out


def test_lists_are_separated_by_commas_or_repeated(tmp_path: Path) -> None:
    sizes = ["--shape", "64/64/4/2,128/64/4/2", "--group-size", "32,64", "--group-size", "-1"]
    sizes += ["--format", "int4,int8", "--format", "fp8"]
    done = quantmoe("bench", "layer", "--packing", *sizes)
    assert (done.code, done.err) == (0, "")
    shown = [f"{shape} {kind} group {group} " for shape in ("64/64/4/2", "128/64/4/2")
             for kind in ("int4", "int8", "fp8") for group in (32, 64, -1)]  # fmt: skip
    assert all(f" {name}" in done.out for name in shown)
    given: list[list[int] | None] = []
    other = typer.Typer()

    @other.command()
    def command(tokens: Annotated[list[int] | None, typer.Option(**listed(int))] = None) -> None:
        given.append(tokens)

    for arguments in ("", "--tokens 1", "--tokens 1,16,256", "--tokens 1 --tokens 16,256", "--tokens -1,"):
        assert CliRunner().invoke(other, arguments.split()).exit_code == 0
    assert given == [None, [1], [1, 16, 256], [1, 16, 256], [-1]]


#: what a command that needs packages of an extra says where one of them is missing
LACKING = {
    "export": (["export", QWEN, "out"], "torch"),
    "export --dry-run": (["export", QWEN, "out", "--dry-run"], "torch"),
    "generate": (["generate", "model", "--ids", "1"], "onnxruntime"),
    "generate --prompt": (["generate", "model", "--prompt", "a"], "tokenizers"),
    "serve": (["serve", "model"], "fastapi"),
    "demo": (["demo", "--checkpoint", QWEN], "onnxruntime"),
    "bench": (["bench", "layer"], "onnxruntime"),
    "evaluate": (["evaluate", "model", "--text", "text"], "onnxruntime"),
    "bench --plot": (["bench", "layer", "--plot", "cells.png"], "matplotlib"),
    "evaluate --plot": (
        ["evaluate", "model", "--text", "text", "--against", "model", "--plot", "kld.svg"],
        "matplotlib",
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_missing_package_is_one_line_and_said_first(name: str, tmp_path: Path) -> None:
    exported_before(tmp_path / "model")
    (command, *arguments), package = LACKING[name]
    done = quantmoe(command, *arguments, cwd=tmp_path, ABSENT=package)
    assert done.code == 1
    extra = "bench" if package == "matplotlib" else EXTRAS[str(command)]
    assert done.line == f"quantmoe: {package} is not installed; pip install 'quantmoe[{extra}]'"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_package_that_is_too_old_is_not_called_missing(tmp_path: Path) -> None:
    """The line names what stands, what is needed, and the command. A module, a name or an attribute is missing."""
    package, metadata = tmp_path / "transformers", tmp_path / "transformers-5.17.0.dist-info/METADATA"
    package.mkdir()
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.17.0\n", encoding="utf-8")
    bounds = next(line for line in requires("quantmoe") or () if line.startswith("transformers")).partition(";")[0]
    expected = f"transformers is 5.17.0, expected {bounds[12:]}; pip install '{bounds}'"
    for source in ("", "from os import absent", "import os; os.absent"):
        (package / "__init__.py").write_text(source, encoding="utf-8")
        done = quantmoe("export", QWEN, "out", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert (done.code, done.line) == (1, f"quantmoe: {expected}")


def test_an_older_onnx_runtime_is_one_line(tmp_path: Path) -> None:
    """A package with its version only: nothing else of it is asked for."""
    exported_before(tmp_path / "model")
    (tmp_path / "onnxruntime.py").write_text("__version__ = '1.20.1'", encoding="utf-8")
    for arguments in (["generate", "model", "--ids", "1"], ["bench", "layer"]):
        done = quantmoe(*arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert done.code == 1
        expected = "onnxruntime is 1.20.1, expected 1.21 or newer; pip install 'onnxruntime>=1.21'"
        assert done.line.partition(": ")[2] == expected


def test_ggml_that_is_not_there_is_said_first(tmp_path: Path) -> None:
    done = quantmoe("bench", "layer", "--against", "ggml", QUANTMOE_GGML=str(tmp_path))
    assert done.code == 1
    assert f"{tmp_path}/libggml-base.so: cannot open shared object file" in done.line
    assert "llama_cpp/lib of PyPI's llama-cpp-python" in done.line


#: command -> modules of quantmoe that it runs
MODULES = {
    "export": ["exporter.writing.convert", "exporter.writing.plan"],
    "inspect": ["exporter.inspecting.inspect", "exporter.surveying.explain", "exporter.surveying.survey"],
    "unpack": ["exporter.inspecting.unpack"],
    "generate": ["runtime.generate", "runtime.chat"],
    "serve": ["serving.command", "serving.opening"],
    "trace": ["exporter.inspecting.expert_trace"],
    "demo": ["exporter.writing.convert", "benchmarks.pytorch_comparison"],
    "bench": ["benchmarks.bench"],
    "evaluate": ["benchmarks.quality.evaluate"],
}
#: what an import of quantmoe.<name> reads
PACKAGE = Path(find_spec("quantmoe").origin).parent


def packages(extra: str) -> set[str]:
    """What a wheel installs with an extra, of what pyproject.toml names, as it is imported."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras, names = project["optional-dependencies"], set()
    left = [*project["dependencies"], *extras.get(extra, ())]
    while left:
        name, more = re.fullmatch(r"([\w-]+)(?:\[([\w,-]+)\])?.*", left.pop()).groups()
        if name == "quantmoe":
            left += [line for part in more.split(",") for line in extras[part]]
        names.add(name.replace("-", "_"))
    return names


def imported(path: Path, found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Names that a module of ours and those of ours below it import anywhere, but for type checkers: by file."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    found[str(path)] = names = set()
    while nodes:
        node = nodes.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            names.update({str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)})
    for name in names:
        below = PACKAGE.joinpath(*name.split(".")[1:]) if name.startswith("quantmoe.") else PACKAGE
        for file in (below.with_suffix(".py"), below / "__init__.py"):
            if below != PACKAGE and file.is_file() and str(file) not in found:
                imported(file, found)
    return found


@pytest.mark.parametrize("command", MODULES)
def test_an_extra_has_what_its_command_imports(command: str) -> None:
    found: dict[str, set[str]] = {}
    for module in MODULES[command]:
        imported(PACKAGE.joinpath(*module.split(".")).with_suffix(".py"), found)
    found.get(str(PACKAGE / "custom_ops" / "cuda.py"), set()).discard("torch")  # to launch kernels
    # provider_devices: who calls it has sessions
    found.get(str(PACKAGE / "ort_ext" / "__init__.py"), set()).discard("onnxruntime")
    found.pop(str(PACKAGE / "exporter" / "reading" / "hub.py"), None)  # huggingface_hub, where it is installed
    if command == "inspect":  # which makes no tokenizer and decodes no blocks, as these functions do
        for file in ("folder/tokenizer.py", "reading/gguf/tokenizer.py", "reading/gguf/codebooks.py"):
            found.pop(str(PACKAGE / "exporter" / file))
    names = {name.partition(".")[0] for name in set.union(*found.values())} - sys.stdlib_module_names - {"quantmoe"}
    names -= {"llama_cpp", "onnxruntime_genai"} if command == "bench" else set()  # --against says what to install
    names -= {"matplotlib"} if command == "trace" else set()  # and --plot
    assert names >= {"numpy"}
    assert names <= packages(EXTRAS.get(command, ""))


def test_export_has_the_types_of_its_options() -> None:
    """Editors and type checkers read ExportOptions, the command line and the checks read Options."""
    hints = get_type_hints(Options)
    assert get_type_hints(ExportOptions) == {one.name: hints[one.name] for one in dataclasses.fields(Options)}
    assert ExportOptions.__optional_keys__ == get_type_hints(ExportOptions).keys()
    for function in (export, plan):
        assert get_type_hints(function)["options"] == Unpack[ExportOptions]


def test_every_command_has_its_modules() -> None:
    assert typer.main.get_command(app).commands.keys() == MODULES.keys()
    assert EXTRAS.keys() <= MODULES.keys()


TRACE = b'{"quantmoe_trace": 1, "slot_bytes": 1000, "layers": [{"node": "/layers.0", "experts": 4, "bytes": 1000}]}\n'


def test_trace_shows_hit_rates(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    runs = [[0, 1, 1, 0, expert] for expert in (0, 1, 0, 0, 3)]  # layer, top_k, tokens in two words, ids
    file.write_bytes(TRACE + np.array(runs, "<u2").tobytes())
    done = quantmoe("trace", file, "--memory", "1000", "--memory", "2000", "--disk-speed", "1000", COLUMNS="1000")
    assert (done.code, done.err) == (0, "")
    assert "1 layers, 5 tokens; 3 of 4 experts used" in done.out
    rows = [line.split("│") for line in done.out.splitlines() if "%" in line]
    assert [[cell.strip() for cell in row if "%" in cell] for row in rows] == [["20.0%"], ["40.0%"]]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[1]\n",
        TRACE.replace(b"4,", b'"x",'),
        TRACE.replace(b"[{", b"[3, {"),
        TRACE.replace(b"slot", b"s"),
    ],
)
def test_damaged_traces_are_refused(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(data)
    done = quantmoe("trace", file)
    assert done.code == 1
    assert "expected a trace of version 1" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("generate", ".", "--ids", "1", "--drafts", "3"), "--drafts: is of --speculate"),
        (("generate", ".", "--ids", "1", "--batch", "3"), "--batch: is of --prompts"),
        (("generate", ".", "--prompts", "nowhere"), "--prompts: nowhere: No such file or directory"),
        (("generate", ".", "--prompts", "EMPTY", "--ids", "1"), "--prompts does not go with --ids"),
        (("generate", ".", "--ids", "1", "--load-state", "nowhere"), "--load-state: nowhere: no such file"),
        (("generate", ".", "--ids", "1,,2"), "'1,,2'; expected numbers separated by commas"),
        (("inspect", ".", "--host-memory", "1"), "--host-memory: is of --fit"),
        (("inspect", ".", "--memory-speed", "1"), "--memory-speed: is of --fit"),
        (("inspect", ".", "--bus-speed", "1"), "--bus-speed: is of --fit"),
        (("inspect", ".", "--disk-speed", "1"), "--disk-speed: is of --fit"),
        (("inspect", ".", "--reserve", "1"), "--reserve: is of --fit"),
        (("inspect", ".", "--context", "4096"), "--context: is of --fit"),
        (("inspect", ".", "--trace", "TRACE"), "--trace: is of --fit"),
        (("inspect", ".", "--target", "cuda"), "--target: is of --fit"),
        (("inspect", ".", "--fit", "1000", "--trace", "TRACE"), "--trace is of an exported model"),
        (("trace", "."), "FILE: .: is a folder, expected a file"),
        (("trace", "none"), "FILE: none: no such file"),
        (("trace", "TRACE", "--plot", "use.txt"), "--plot: use.txt: expected a file .png, .svg, .pdf"),
        (("trace", "TRACE", "--plot", "nowhere/use.svg"), "--plot: nowhere: no such folder"),
        (("evaluate", ".", "--text", "TRACE", "--plot", "kld.svg"), "--plot: needs --against: it draws"),
        (("trace", "TRACE", "--write-map", "nowhere/map.json"), "--write-map: nowhere: no such folder"),
        (("trace", "EMPTY"), "no token has been routed yet"),
    ],
    ids=str,
)
def test_options_that_say_nothing(command: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """A trace whose end is cut is read up to there."""
    header = b'{"quantmoe_trace": 1, "slot_bytes": 8, "layers": [{"node": "a", "experts": 4, "bytes": 8}]}\n'
    (tmp_path / "EMPTY").write_bytes(header)
    (tmp_path / "TRACE").write_bytes(header + bytes([0, 0, 1, 0, 1, 0, 0, 0, 3, 0, 7]))
    done = quantmoe(*(str(tmp_path / name) if name.isupper() else name for name in command))
    assert done.code == 2
    said = " ".join(done.err.replace("│", " ").split())
    assert message in said
    assert ("its last 1 bytes are no whole record, and left out" in said) == (command[:2] == ("trace", "TRACE"))


def test_no_trace_is_refused(tmp_path: Path) -> None:
    done = quantmoe("trace", tmp_path / "none")
    assert done.code == 2
    assert "none: no such file" in " ".join(done.err.split())
    assert "Traceback" not in done.err


def equal_layers(folder: Path, count: int) -> Path:
    """QWEN with its layer several times."""
    ckpt = Checkpoint(QWEN)
    names = {name: [name.replace(".layers.0.", f".layers.{i}.") for i in range(count)] for name in ckpt.names()}
    edited(folder, num_hidden_layers=count)
    write_safetensors(folder / "model.safetensors", {n: ckpt.tensor(name) for name, new in names.items() for n in new})
    return folder


@pytest.mark.parametrize("name", ["dense", "gguf", "lfs", "empty", "cache", "method", "float", "size", "gguf-file"])
def test_inspect_explains_what_export_refuses(name: str, tmp_path: Path) -> None:
    make, _, text = REFUSED[name]
    path = make(tmp_path / name)
    done = quantmoe("inspect", path, COLUMNS="1000")
    assert (done.code, done.err) == (0 if name == "float" else 1, "")  # --quantize takes floats
    assert done.out.startswith(f"{path}\n")
    assert text in done.out
    assert "export --target cpu and cuda and ort refuses it: " in done.out
    assert not done.imported & {"torch", "transformers", "onnx_ir"}


@pytest.mark.parametrize("file", ["tokenizer.json", "chat_template.jinja", "LICENSE"])
def test_inspect_sees_files_that_are_links_to_elsewhere(file: str, tmp_path: Path) -> None:
    folder = equal_layers(tmp_path / "three", 3)
    (tmp_path / "secret").write_text("{}", encoding="utf-8")
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to(tmp_path / "secret")
    done = quantmoe("inspect", folder, COLUMNS="1000")
    assert (done.code, done.err) == (1, "")
    assert f"{file}: links to {tmp_path / 'secret'}, outside the checkpoint's folder" in done.out


def test_inspect_of_a_checkpoint_as_json(tmp_path: Path) -> None:
    found = json.loads(quantmoe("inspect", equal_layers(tmp_path / "three", 3), "--json").out)
    assert found["refused"] == {"cpu": "", "cuda": "", "ort": ""}
    assert [layer["module"] for layer in found["layers"]] == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    assert list(found["linears"].values()) == [12]
    assert found["tensors"]["I32"]["count"] == 30
    assert found["format"] == "compressed-tensors"
    refused = json.loads(quantmoe("inspect", holding(tmp_path / "gguf", "a.gguf"), "--json").out)
    assert set(refused["refused"]) == {"cpu", "cuda", "ort"}
    assert refused["files"] == {".gguf": {"count": 1, "bytes": 2}}
    for arguments in (["inspect", "Qwen/Qwen3-30B-A3B"], ["inspect", QWEN, "--verify"]):
        assert quantmoe(*arguments, cwd=tmp_path).line


#: the commands on each line of stdin, in one process: torch is imported once
SEVERAL = """
import sys
from quantmoe.exporter.cli import main
for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    try:
        main()
    except SystemExit as done:
        assert not done.code, done.code
"""


@pytest.mark.every
def test_eighty_columns_hold_everything(tmp_path: Path) -> None:
    """No cell is cut, no line is longer, equal layers are one entry; names of any length in paths."""
    names = ("modelopt-nvfp4-llama4", "gptqmodel-gptq-dynamic", "quark-fp8-kv", "modelopt-w4a8_nvfp4_fp8")
    folders = [equal_layers(tmp_path / "three", 3), *(FIXTURES / name for name in names)]
    commands = []
    for i, folder in enumerate(folders):
        out = tmp_path / f"out{i}"
        commands += [f"inspect {folder}", f"inspect {folder} --explain", f"export {folder} {out} --dry-run",
                     f"export {folder} {out}", f"inspect {out} --verify", f"inspect {out} --explain"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        input="\n".join(f"quantmoe {command}" for command in commands),
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    words = " ".join(done.stdout.split())
    assert words.count("3 layers scheme compressed-tensors pack-quantized int4 A16 group 32, actorder weight") == 3
    assert words.count("3 layers: model.layers.0.mlp.experts and 2 more scheme compressed-tensors") == 1
    assert words.count("6 QuantLinears: model.layers.0.self_attn.qkv_proj and 5 more") == 1
    assert "int8_group" in words


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    for name, text in (("empty.onnx", ""), ("text.onnx", "hello"), ("pointer.onnx", LFS_POINTER.decode() + "v1\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        done = quantmoe("inspect", tmp_path / name)
        assert done.code == 1
        assert done.line.startswith(f"quantmoe: {tmp_path / name}: not an ONNX model: ")
        assert ("lfs pull" in done.line) == (name == "pointer.onnx")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("Qwen/Qwen3-30B-A3B", "no such folder; expected an exported model or its folder. Of a model on the Hugging "
         "Face hub: hf download Qwen/Qwen3-30B-A3B --local-dir CHECKPOINT, then quantmoe export CHECKPOINT OUTDIR"),
        ("nowhere", "missing; expected an exported model or its folder"),
        ("m.zip", "no .onnx file; expected an exported model or its folder; unpack the archive first"),
        ("m.gguf", "no .onnx file; expected an exported model or its folder; this is a checkpoint: quantmoe export it "
         "first"),
        ("m.safetensors", "no .onnx file; expected an exported model or its folder; quantmoe export its folder"),
        ("m.txt", "no .onnx file; expected an exported model or its folder"),
    ],
)  # fmt: skip
def test_what_is_given_in_the_place_of_a_model_is_named(given: str, text: str, tmp_path: Path) -> None:
    if "." in given[-12:] and "/" not in given:
        (tmp_path / given).write_text("", encoding="utf-8")
    for command in (["generate", given, "--prompt", "a"], ["generate", given, "--ids", "1"]):
        done = quantmoe(*command, cwd=tmp_path)
        assert done.code == 1
        assert done.line == f"quantmoe: {given}: {text}"


#: a module that is interrupted while it is imported: as it is, and as NumPy's C code has it
INTERRUPTED = {
    "plain": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "swallowed": """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    sys.excepthook(*sys.exc_info())
    raise ImportError("numpy._core.umath failed to import")
""",
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("kind", INTERRUPTED)
@pytest.mark.parametrize("module", ["typer", "onnxruntime"])
def test_ctrl_c_while_modules_are_imported_is_silent(kind: str, module: str, tmp_path: Path) -> None:
    exported_before(tmp_path / "model")
    text = f"import os, signal, sys, time\n{INTERRUPTED[kind]}"
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    command = "from quantmoe.exporter.command import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "generate", "model", "--ids", "1"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_ends_the_processes_of_a_command_without_a_word(tmp_path: Path) -> None:
    """In a terminal it goes to them, too."""
    started = tmp_path / "started"
    work = f"import os, time\nwith open({str(started)!r}, 'w') as to: to.write(str(os.getpid()))\ntime.sleep(600)"
    code = f"""
import sys, time
from types import SimpleNamespace
from quantmoe.exporter import command
from quantmoe.benchmarks.child_processes import in_process
def main():
    try:
        in_process("work", exec, {work!r})
    finally:
        time.sleep(2)  # as a command that removes what it has begun
sys.modules["quantmoe.exporter.cli"] = SimpleNamespace(main=main)
if __name__ == "__main__":
    command.main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    while not (started.exists() and (child := started.read_text(encoding="utf-8"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 130
    assert not Path(f"/proc/{child}").exists()


def test_the_command_looks_after_ctrl_c_first() -> None:
    """Nothing that takes long is imported before its entry point runs: Ctrl-C prints a traceback until then."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, name = project["scripts"]["quantmoe"].split(":")
    code = f"import sys, {module} as entry; entry.{name}; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in imported if name.startswith("quantmoe")} == {"quantmoe", "quantmoe.exporter", module}
    assert not {"typing", "pathlib", "json", "importlib.metadata", "importlib.resources"} & {*imported}
