"""Reference pages and tables made from the code at each ``make docs``.

Pages are the command line, the Python API and the operators. Tables and notes are parts of other pages.
"""

from __future__ import annotations

import ast
import csv
import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import typer

import quantmoe
from quantmoe.benchmarks.bench import app as bench_commands
from quantmoe.custom_ops.matrix import SCALE_DTYPES
from quantmoe.custom_ops.op_def.schema import read, schema, split
from quantmoe.custom_ops.schemes import SCHEMES
from quantmoe.exporter.cli import app
from quantmoe.exporter.folder import metadata as model_keys
from quantmoe.exporter.folder import tensor_metadata as tensor_keys
from quantmoe.exporter.folder.files import FILES
from quantmoe.exporter.folder.interface import ENCODER_TENSORS, PAGED_TENSORS, TENSORS, VISION_TENSORS, Tensor
from quantmoe.exporter.folder.reply_formats import FORMATS as REPLIES
from quantmoe.exporter.reading.families import UNSUPPORTED
from quantmoe.exporter.reading.formats import FORMATS, REFUSED
from quantmoe.exporter.reading.formats.gguf import GGML
from quantmoe.exporter.reading.formats.gguf import REFUSED as REFUSED_TYPES
from quantmoe.exporter.reading.gguf.blocks import CARRIED, Block
from quantmoe.exporter.reading.gguf.families import FAMILIES
from quantmoe.exporter.reading.gguf.header import TYPES
from quantmoe.exporter.reading.weights.base import Format
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.targets.ort import TAKEN

HERE = Path(__file__).resolve().parent
CUSTOM_OPS = HERE.parent / "custom_ops"
#: in the words of model_types.py: it has nodes that TensorRT refuses
INDEXER = "with an indexer"
MADE = "<!-- made by docs/generate.py -->\n"
#: parts of pages -> modules whose docstrings they are
NOTES = {
    "long-rope": "exporter/graph/long_rope.py",
    "mamba-2": "exporter/graph/modules/states/state_space.py",
    "selective-scan": "exporter/graph/modules/states/selective_scan.py",
    "jetmoe": "exporter/graph/architectures/jetmoe.py",
    "doge": "exporter/graph/architectures/doge.py",
    "inkling": "exporter/graph/architectures/extended_cache/inkling.py",
    "inkling2": "exporter/graph/architectures/extended_cache/inkling2.py",
    "kv-cache": "exporter/reading/weights/kv_cache.py",
    "gguf": "exporter/reading/gguf/__init__.py",
    "genai": "exporter/writing/genai.py",
    "slices": "exporter/reading/slices.py",
    "expert-map": "exporter/reading/expert_map.py",
    "trace": "exporter/inspecting/expert_trace.py",
    "saved-prompts": "ort_ext/runtime/saved_states.py",
}
OPERATORS = """# Operators

The operators of the domain `quantmoe`. [FORMAT.md](../../custom_ops/FORMAT.md) has packed weights.

- An attribute is required, unless the table says what its absence means.
- T is float, float16 or bfloat16. I is int32 or int64.
- C is the type of a cache: float, float16 or bfloat16. By `cache_format` it can also be int8 or uint8.
- Capital letters in shapes are sizes that a run decides. `..` is any number of dimensions, one list in a whole node.
- `where(c, a, b)` is a, or b where c is 0. `pick(i, a, b)` is the value with that number. An enum has its code.
- `c ? [..] : [..]` is the second shape where c is 0. An output whose shape is the name of an input may be its memory.
- Attributes of type i are integers, of type f floats. Others are strings of the enum with that name.
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines) + "\n"


def code(text: str) -> str:
    """Return help text with options and commands in code, as Markdown would join their dashes."""
    return re.sub(r"(?<![\w`-])--?[a-z][\w-]*", r"`\g<0>`", text)


def option(parameter: Any) -> list[str]:
    """Return the cells of a parameter: how it is typed, and its help, values and default."""
    if is_argument(parameter):
        return [f"`{parameter.name.upper()}`", parameter.help or ""]
    kinds = [kind for kind in get_args(parameter.type_descriptor.annotation) if get_origin(kind) is Literal]
    kind = kinds[0] if kinds else parameter.type_descriptor.annotation
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    said = [code(parameter.help or "")]
    if parameter.is_flag:
        return [names, said[0]]
    if get_origin(kind) is Literal:
        said.append("Values: " + ", ".join(f"`{value}`" for value in get_args(kind)) + ".")
    else:
        names += f" `{parameter.metavar or kind.__name__.upper()}`"
    if isinstance(shown := parameter.show_default, str):
        said.append(f"Default: {code(shown)}.")
    elif parameter.default not in (None, "", ()):
        said.append(f"Default: `{parameter.default}`.")
    return [
        names,
        " ".join([f"{said[0]}." if said[1:] else said[0], *said[1:], *(["Required."] if parameter.required else [])]),
    ]


def is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def commands() -> str:
    """Return the page of all commands and their options, by group."""
    page = [f"{MADE}# Command line\n\n`quantmoe COMMAND --help` shows these options in a terminal.\n"]
    found = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    del found["bench"]
    benches = typer.main.get_command(bench_commands).commands  # type: ignore[attr-defined]
    for name, command in (found | {f"bench {name}": command for name, command in benches.items()}).items():
        usage = [p.name.upper() if p.required else f"[{p.name.upper()}]" for p in command.params if is_argument(p)]
        page.append(f"## {name}\n\n{command.help}\n\n```\nquantmoe {' '.join([name, *usage])} [OPTIONS]\n```\n")
        groups: dict[str, list[list[str]]] = {}
        for parameter in command.params:
            group = "Arguments" if is_argument(parameter) else parameter.rich_help_panel or "Options"
            groups.setdefault(group, []).append(option(parameter))
        for group, rows in groups.items():
            page.append(f"**{group}**\n\n" + table(["argument" if group == "Arguments" else "option", ""], rows))
    return "\n".join(page)


def python() -> str:
    """Return the page of the public names, which autodoc fills."""
    page = [f"{MADE}# Python API\n\n`import quantmoe` gives these names. Everything else may change in any release.\n"]
    for name in quantmoe.__all__:
        kind = "autoclass" if inspect.isclass(getattr(quantmoe, name)) else "autofunction"
        members = "   :members:\n" if kind == "autoclass" else ""
        page.append(f"## {name}\n\n```{{eval-rst}}\n.. {kind}:: quantmoe.{name}\n{members}```\n")
    return "\n".join(page)


def text(comment: str) -> str:
    """Return a comment of op.def as Markdown."""
    return linked(re.sub(r"([*\[\]_])", r"\\\1", comment).replace("<", "&lt;"))


def linked(markdown: str) -> str:
    markdown = re.sub(r"quant\\?_moe\.def, (\w+)", lambda found: f"[{found[0]}](#{found[1].lower()})", markdown)
    return re.sub(r"FORMAT\.md(?: [\d.]*\d)?", r"[\g<0>](../../custom_ops/FORMAT.md)", markdown)


def semantics(operator: str) -> str:
    """Return the comment below an operator's last line, which is Markdown."""
    lines = (CUSTOM_OPS / "ops" / f"{schema().operators[operator].snake}.def").read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("QM_END"))
    return "\n".join(line.removeprefix("//").removeprefix(" ") for line in lines[end + 1 :]) + "\n"


def operators() -> str:
    """Return the page of op.def's operators, projections and enums."""
    page = [f"{MADE}{OPERATORS}"]
    comment: list[str] = []
    rows: dict[str, list[list[str]]] = {}
    for line in read(CUSTOM_OPS).splitlines():
        if line.startswith("//"):
            comment.append(line[2:].strip())
        if not (found := split(line)):
            comment = comment if line.startswith("//") else []
            continue
        macro, arguments, said = found
        said, about = text(said), text(" ".join(comment))
        comment = []
        if macro == "OP":
            page.append(f"## {arguments[0]}\n\nop_version {arguments[2]}. {about}\n")
            rows = {"input": [], "output": [], "size": [], "attribute": []}
        elif macro in ("INPUT", "INPUT_OPTIONAL", "OUTPUT"):
            where = "output" if macro == "OUTPUT" else "input"
            rows[where].append([f"`{arguments[1]}`", arguments[2], f"`{arguments[3]}`", said])
        elif macro == "SIZE":
            rows["size"].append([f"`{arguments[1]}`", f"`{arguments[2]}`", said])
        elif macro in ("ATTR", "ATTR_SINCE"):
            kind, name = arguments[-3:-1] if macro == "ATTR_SINCE" else arguments[1:]
            since = f"Since op_version {arguments[1]}; absent: `{arguments[4]}`." if macro == "ATTR_SINCE" else ""
            rows["attribute"].append([f"`{name}`", kind, ". ".join(filter(None, (said, since)))])
        elif macro == "PROJECTION":
            rows["attribute"].append([f"`{arguments[1]}_..`", "", "[packed weights](#packed-weights)"])
        elif macro == "STRING":
            rows["attribute"].append([f"`{arguments[1]}`", "string", f"{said} May be absent."])
        elif macro == "END":
            kinds = {"input": ["type", "shape"], "output": ["type", "shape"], "size": ["value"], "attribute": ["type"]}
            page += [table([what, *kinds[what], ""], found_rows) for what, found_rows in rows.items() if found_rows]
            page.append(linked(semantics(arguments[0])))
        elif macro in ("PROJECTION_ATTR", "PROJECTION_OPTIONAL"):
            if "projection" not in rows:
                rows = {"projection": []}
                page.append(
                    "## Packed weights\n\nEach `QM_PROJECTION` of an operator has these attributes, as `w13_format`.\n"
                )
            rows["projection"].append([f"`{arguments[1]}`", arguments[0], said])
        elif macro == "ENUM":
            if "projection" in rows:
                page.append(table(["attribute", "type", ""], rows["projection"]))
            elif "value" in rows:
                page.append(table(["value", "code", ""], rows["value"]))
            rows = {"value": []}
            page.append(f"## {arguments[0]}\n\n{about}\n")
        elif macro == "VALUE":
            rows["value"].append([f"`{arguments[1]}`", arguments[2], said])
    page.append(table(["value", "code", ""], rows["value"]))
    return "\n".join(page)


def names(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def model_types() -> str:
    """Return the model types that ``export`` takes."""
    from quantmoe.exporter.graph.architectures.model_types import MODEL_TYPES  # it imports transformers

    return table(
        ["type", "models", "attention"], [[names(row.types), row.models, row.attention] for row in MODEL_TYPES]
    )


def model_errors() -> str:
    """Return the largest errors of each type on the CPU, and where it ran beside."""
    from quantmoe.exporter.graph.architectures.model_types import MODEL_TYPES, RAN, TEXT_OF  # it imports transformers

    with (HERE / "lab" / "architecture_errors.csv").open(encoding="utf-8", newline="") as file:
        measured = {row["name"]: row for row in csv.DictReader(file)}
    rows = []
    for kind in sorted(kind for row in MODEL_TYPES for kind in row.types):
        own, selects = (
            TEXT_OF.get(kind, kind),
            any(kind in row.types and INDEXER in row.attention for row in MODEL_TYPES),
        )
        engines = ["run" if own in RAN["CUDA"] else "not run"]
        engines += ["refused" if selects else "run" if own in RAN["TensorRT"] else "not run"]
        if own != kind:
            rows.append([f"`{kind}`", f"as `{own}`", "", "", *engines])
            continue
        for name in sorted(name for name in measured if name.partition(" ")[0] == kind):
            errors = [measured[name][column] for column in ("prompt", "tokens", "padded")]
            rows.append([f"`{kind}`{name.removeprefix(kind)}", *errors, *engines])
    return table(["type", "a prompt", "tokens after it", "padded prompts", "CUDA", "TensorRT"], rows)


def note(module: str) -> str:
    """Return a module's docstring as Markdown."""
    source = (HERE.parent / module).read_text(encoding="utf-8")
    return f"{ast.get_docstring(ast.parse(source))}\n".replace("``", "`")


def refused_types() -> str:
    """Return the model types that ``export`` refuses by name, by reason."""
    reasons: dict[str, list[str]] = {}
    for kind, reason in UNSUPPORTED.items():
        reasons.setdefault(reason, []).append(kind)
    return table(["type", "reason"], [[names(kinds), reason] for reason, kinds in reasons.items()])


def formats() -> str:
    """Return tools' formats and the types of GGUF files: how they are exported, and what is refused."""
    found: tuple[type[Format], ...] = (*FORMATS, Unquantized)
    rows = [
        [read.tool or format.name, read.what, read.exported, on_gpus(read.cuda, read.exported), names(read.tests)]
        for format in found
        for read in format.reads
        if format is not GGML
    ]
    for kind, weights, size in TYPES.values():
        if kind in CARRIED:
            block, stored = CARRIED[kind], 8 * size / weights
            cpu, gpu = (carried(kind, stored, block) for kind in (block.own or block.kind, block.kind))
            rows.append(["llama.cpp", f"GGUF {kind}", cpu, on_gpus(block.cuda, gpu), "`test_what_is_said_of_a_type`"])
        elif why := REFUSED_TYPES.get(kind):
            rows.append(["llama.cpp", f"GGUF {kind}", f"refused: it {why}", "refused", "`test_refused_blocks`"])
    rows += [
        [f"`{method}`", "", f"refused: {why}", "refused", "`test_unsupported_is_named`"]
        for method, why in REFUSED.items()
    ]
    return table(["tool", "what is read", "CPU", "CUDA, TensorRT", "test"], rows)


def on_gpus(cuda: str, exported: str) -> str:
    """Return the cell of CUDA: what is exported for it."""
    return {"yes": exported, "yes *": f"{exported} *", "no": "refused"}.get(cuda, cuda)


def carried(kind: str, stored: float, block: Block) -> str:
    """Return how a type of GGUF files is carried, with the bits of a weight."""
    bits = SCHEMES[kind].bits + SCALE_DTYPES[block.scales].itemsize * 8 / block.group_size
    return f"wider: {bits:.5g} bits for {stored:.5g}" if bits > stored else f"same: {bits:.5g} bits"


def gguf_architectures() -> str:
    rows = [[f"`{name}`", family.models] for name, family in sorted(FAMILIES.items())]
    return table(["architecture", "models"], rows)


def tensors(rows: tuple[Tensor, ...]) -> str:
    return table(["name", "type and shape", "content"], [[f"`{row.name}`", row.shape, row.content] for row in rows])


def files() -> str:
    return table(["file", "content", "written"], [[names(row.names), row.content, row.written] for row in FILES])


def without_library() -> str:
    return table(["", "QMoE (experts)", "MatMulNBits (other quantized linears)"], [[*row] for row in TAKEN])


def chat_formats() -> str:
    """Return the formats of replies, except the one of content alone."""
    rows = sorted([f"`{format.name}`", format.models] for format in REPLIES if format.name)
    return table(["`chat.format`", "models, for example"], rows)


def metadata(keys: ModuleType) -> str:
    """Return the keys of metadata, whose meaning stands above each constant after ``#:``."""
    rows, said = [], []
    for line in Path(str(keys.__file__)).read_text(encoding="utf-8").splitlines():
        if line.startswith("#: "):
            said.append(line[3:])
        elif said and (found := re.fullmatch(r"([A-Z_, ]+) = .+", line)):
            rows.append([names(getattr(keys, name) for name in found[1].split(", ")), " ".join(said)])
            said = []
    return table(["entry", "meaning"], rows)


def entries() -> str:
    """Return the session entries, whose meaning stands above each."""
    text = (HERE.parent / "ort_ext" / "src" / "common" / "entries.inc").read_text(encoding="utf-8")
    rows = []
    for said, name in re.findall(r"((?://.*\n)+)QM_ENTRY\((\w+)\)", text):
        cpu, cuda = " ".join(re.findall("// (.+)", said)).removeprefix("CPU: ").split(" CUDA: ")
        rows.append([f"`quantmoe.{name}`", cpu.removesuffix("."), cuda])
    return table(["entry", "CPU library", "CUDA library"], rows)


def kernels() -> str:
    """Return the CPU kernels, the preferred one first."""
    text = (CUSTOM_OPS / "src" / "cpu" / "kernels.inc").read_text(encoding="utf-8")
    rows = [[f"`{name}`", said] for said, name in re.findall(r"// (.+)\nQM_CPU_KERNEL\((\w+)\)", text)]
    return table(["kernel", "processors"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "model-types": model_types,
    "model-errors": model_errors,
    "refused-types": refused_types,
    "formats": formats,
    "gguf-architectures": gguf_architectures,
    "chat-formats": chat_formats,
    "without-library": without_library,
    "files": files,
    "tensors": partial(tensors, TENSORS),
    "paged-tensors": partial(tensors, PAGED_TENSORS),
    "encoder-tensors": partial(tensors, ENCODER_TENSORS),
    "vision-tensors": partial(tensors, VISION_TENSORS),
    "metadata": partial(metadata, model_keys),
    "tensor-metadata": partial(metadata, tensor_keys),
    "entries": entries,
    "cpu-kernels": kernels,
}


def write() -> None:
    pages = {"commands": commands(), "python": python(), "operators": operators()}
    pages |= {f"tables/{name}": f"{MADE}\n{note(module)}" for name, module in NOTES.items()}
    pages |= {f"tables/{name}": f"{MADE}\n{make()}" for name, make in TABLES.items()}
    for name, made in pages.items():
        path = HERE / "reference" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != made:
            path.write_text(made, encoding="utf-8")
