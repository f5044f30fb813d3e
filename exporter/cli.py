"""The ``quantmoe`` command. Each subcommand prints for people and calls the function of the same name."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.command_arguments import UsageError, listed, missing, need, outdated, run, with_options
from quantmoe.exporter.errors import CheckpointError, ModelError, OptionError
from quantmoe.exporter.memory import DRAFTS
from quantmoe.exporter.report import (
    APART,
    FLOAT_HERE,
    NOT_ORT,
    PLAIN_ATTENTION,
    and_more,
    console,
    experts_of,
    minutes,
    peak_memory,
    plural,
    print_evaluation,
    print_export_sizes,
    print_fit,
    print_layers,
    print_model,
    print_reasons,
    print_survey,
)
from quantmoe.exporter.targets import CPU, CUDA, TARGETS, of_device
from quantmoe.ort_ext import build_info
from quantmoe.serving import BATCH, LENGTH, QUEUE

app = typer.Typer(
    help="Export and run quantized mixture-of-experts models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
#: of the demo: its own model knows the English of the King James Bible
PROMPT = "Then said the captain of the host,"
#: of generate, where no terminal shows the answer as it comes
NEW_TOKENS = 512
#: of inspect --fit
CONTEXT = 4096
#: what inspect finds beside a model
BESIDE = {
    "mtp": "the layer that drafts for it",
    "vision": "which makes features of images",
    "embeddings": "which makes its input of tokens and features",
}
Checkpoint = Annotated[Path, typer.Argument(help="Hugging Face folder, or a GGUF file")]
Model = Annotated[Path, typer.Argument(help="exported model or its folder")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"quantmoe {version('quantmoe')} ({build_info()})")
        raise typer.Exit


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?", str(text).strip())
    if not found:
        raise typer.BadParameter(f"{text!r}: expected bytes, as 2GB, 512MiB or 1000000000")
    unit = 1024 if found[3] else 1000
    return int(float(found[1]) * unit ** " KMGT".index(found[2].upper() or " "))


def _bytes_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else _bytes(text)


#: of options that are bytes, 12GB
SIZE: dict[str, Any] = {"parser": _bytes, "metavar": "SIZE"}
#: the same where auto is what is free
ROOM: dict[str, Any] = {"parser": _bytes_or_auto, "metavar": "SIZE|auto"}


def _option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Return an option in a panel of ``--help``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Device = Annotated[Literal["cpu", "cuda"], _option("Hardware", "run on the CPU or a GPU")]
Threads = Annotated[
    int,
    _option(
        "Hardware", "use N threads; 0: automatic", "--threads", "-t", min=0, max=1024, metavar="N", show_default=False
    ),
]
Experts = Annotated[
    Literal["gpu", "host", "disk", "auto"] | None,
    _option("Hardware", "place experts: gpu, host, disk, auto", metavar="WHERE"),
]
Ram = Annotated[Any, _option("Hardware", "limit RAM for experts, as 12GB", **ROOM)]
GpuMemory = Annotated[Any, _option("Hardware", "limit GPU memory for experts", **ROOM)]
Chunk = Annotated[
    int | None,
    _option(
        "Advanced", "read N prompt tokens a step", min=1, metavar="N", show_default=f"{CPU.chunk}, cuda: {CUDA.chunk}"
    ),
]


def _logits(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    pass


@app.command()
@with_options(Options, {"SIZE": _bytes, "last|all|N": _logits})
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face folder, ORG/MODEL, or GGUF file")],
    outdir: Annotated[Path, typer.Argument(help="folder for the model")],
    options: Options,
    force: Annotated[bool, _option("Options", "replace an earlier export", "--force")] = False,
    dry_run: Annotated[bool, _option("Options", "show sizes, time and refusals only", "--dry-run")] = False,
) -> None:
    """Turn a checkpoint into an ONNX model with packed weights."""
    from quantmoe.exporter.reading.hub import fetched

    checkpoint = fetched(checkpoint, download=not dry_run)
    begin = time.perf_counter()
    if options.tensor_parallel > 1:
        console.print(f"what follows is of rank 0 of {options.tensor_parallel}", style="yellow")
    if dry_run:
        return _plan(checkpoint, outdir, options, force=force)
    report = _export(checkpoint, outdir, options, force=force)
    seconds = time.perf_counter() - begin
    console.print(str(outdir), highlight=False)
    print_layers((scheme, spec, report.shared[name], None) for name, (scheme, spec) in report.layers.items())
    remarks = (report.calibration, report.left_out, report.activations, report.kv_cache, report.drafting,
               report.library, report.genai, report.chat, report.tokenizer)  # fmt: skip
    for remark in filter(None, remarks):
        console.print(remark, style="yellow")
    if report.scale_error is not None:
        console.print(f"scales rounded to bf16: largest relative error {report.scale_error:.2e}", style="yellow")
    if report.head_error is not None:
        console.print(
            f"lm_head quantized to {options.lm_head}: root mean square error {report.head_error:.2%}", style="yellow"
        )
    print_reasons(FLOAT_HERE, report.dequantized)
    print_reasons(APART, report.apart)
    print_reasons(NOT_ORT, report.not_ort)
    print_reasons(PLAIN_ATTENTION, report.plain_attention)
    if report.plain_routers:
        console.print(
            f"routers of {report.plain_routers} layers are plain ONNX nodes: not MoERouting's", style="yellow"
        )
    if report.untraced:
        console.print(f"all layers were traced one by one, layers do not match: {report.untraced}", style="yellow")
    console.print(
        f"experts {decimal(report.packed_bytes)}, other weights {decimal(report.dense_bytes)}, "
        f"{seconds:.1f} s, peak memory {peak_memory()}"
    )
    if options.quantize not in (None, "none"):
        console.print(_lost(checkpoint, outdir, seconds, options), highlight=False)


@app.command()
def inspect(
    model: Annotated[Path, typer.Argument(help="exported model, its folder, or a checkpoint")],
    verify: Annotated[bool, _option("Show", "read all weights and compare their hashes", "--verify")] = False,
    why: Annotated[bool, _option("Show", "show every layout and kernel considered", "--explain")] = False,
    as_json: Annotated[bool, _option("Show", "print JSON", "--json")] = False,
    memory: Annotated[int | None, _option("Fit", "show what fits into this memory, as 12GB", "--fit", **SIZE)] = None,
    host_memory: Annotated[int | None, _option("Fit", "count this RAM beside a GPU's memory", **SIZE)] = None,
    context: Annotated[
        int | None,
        _option("Fit", "count a cache of N tokens", "--context", "-c", min=1, metavar="N", show_default=str(CONTEXT)),
    ] = None,
    trace: Annotated[
        Path | None, _option("Fit", "take hit rates of a trace (generate --record)", metavar="FILE")
    ] = None,
    memory_speed: Annotated[
        int | None,
        _option(
            "Fit",
            "read memory at SIZE bytes a second",
            show_default=f"this GPU's, else {decimal(int(CUDA.rates[0]))}; cpu: {decimal(int(CPU.rates[0]))}",
            **SIZE,
        ),
    ] = None,
    bus_speed: Annotated[
        int | None,
        _option("Fit", "read through the bus at SIZE a second", show_default=decimal(int(CUDA.rates[1])), **SIZE),
    ] = None,
    disk_speed: Annotated[
        int | None,
        _option("Fit", "read the disk at SIZE a second", show_default=decimal(int(CPU.rates[1])), **SIZE),
    ] = None,
    reserve: Annotated[int | None, _option("Fit", "leave this memory free", **SIZE)] = None,
    target: Annotated[
        Literal[tuple(TARGETS)] | None,  # type: ignore[valid-type]
        _option("Fit", "choose what runs the files", show_default="cpu"),
    ] = None,
) -> None:
    """Show what a model or checkpoint holds, and what export refuses."""
    from quantmoe.exporter.inspecting.survey import is_model, is_refused, survey

    of_model = {"trace": trace, "memory-speed": memory_speed, "bus-speed": bus_speed, "host-memory": host_memory,
                "disk-speed": disk_speed}  # fmt: skip
    for option, value in (of_model | {"context": context, "reserve": reserve, "target": target}).items():
        if value is not None and memory is None:
            raise typer.BadParameter("is of --fit", param_hint=f"--{option}")
    if not is_model(model):
        if verify:
            raise UsageError(f"--verify compares the hashes of an exported model; {model} is none")
        if memory is not None:
            if given := next((option for option, value in of_model.items() if value is not None), None):
                raise UsageError(f"--{given} is of an exported model; {model} is none")
            return _fit_checkpoint(model, memory, target or CPU.name, context or CONTEXT, reserve, as_json)
        found = survey(model)
        if why and found.get("layers"):
            _explain(model, as_json)
        else:
            print(json.dumps(found, indent=1)) if as_json else print_survey(found)
        if is_refused(found):
            raise typer.Exit(1)
        return
    if why:
        _explain(model, as_json)
        return
    from quantmoe.exporter.inspecting.inspect import inspect as inspect_model

    with contextlib.ExitStack() as stack:
        tell: list[Any] = []
        if verify:
            from rich.progress import DownloadColumn, TransferSpeedColumn

            from quantmoe.exporter.terminal import progress

            tell.append(stack.enter_context(progress("reading", DownloadColumn(), TransferSpeedColumn())))
        found = inspect_model(model, verify, *tell)
    if memory is not None:
        from quantmoe.exporter import gpu
        from quantmoe.exporter.inspecting.expert_trace import read_trace
        from quantmoe.exporter.inspecting.fit import fit

        if target is not None:
            raise typer.BadParameter(f"{model} is exported, it has a target", param_hint="--target")
        on_gpu = TARGETS.get(found["metadata"].get("target"), CPU).on_gpu
        if bus_speed is not None and not on_gpu:
            raise typer.BadParameter(
                f"{model} is for the CPU, whose experts come from the disk", param_hint="--bus-speed"
            )
        here = gpu.bandwidth() if on_gpu and memory_speed is None else None
        rates = (memory_speed or here, *((bus_speed, disk_speed) if on_gpu else (disk_speed,)))
        fits = fit(found, memory, context or CONTEXT, read_trace(trace) if trace else None, rates, host_memory, reserve)
        if as_json:
            derived = {"bounds": fits.bounds, "tokens_per_second": fits.tokens_per_second}
            print(json.dumps(asdict(fits) | derived, indent=1))
        else:
            said = "--memory-speed gives another" if here is None else "as this GPU has"
            print_fit(fits, model, "as --memory-speed says" if memory_speed else said)
        return
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console.print(found["model"], highlight=False)
    print_model(found)
    for name, what in BESIDE.items():
        if name in found:
            console.print(f"{found[name]['model']}, {what}:", highlight=False)
            print_model(found[name])
    for file in found["files"]:
        if file["resident"] is not None:
            console.print(f"{file['name']}: {decimal(file['resident'])} of {decimal(file['bytes'])} in memory")


def _fit_checkpoint(
    checkpoint: Path, memory: int, target: str, context: int, reserve: int | None, as_json: bool
) -> None:
    """Print what exports would take of a memory, and which of them fit."""
    try:
        need("torch", "transformers", "onnxscript")
    except ModuleNotFoundError as error:
        sys.exit(f"quantmoe: --fit of a checkpoint: {missing(error, 'export')}")
    from quantmoe.exporter.terminal import progress
    from quantmoe.exporter.writing.checkpoint_fit import export_sizes

    with progress("reading headers") as tell:
        found = export_sizes(checkpoint, target=target, context=context, reserve=reserve, progress=tell)
    if as_json:
        rows = [asdict(size) | {"total": size.total, "held": size.held(memory)} for size in found]
        print(json.dumps({"target": target, "memory": memory, "context": context, "exports": rows}, indent=1))
    else:
        print_export_sizes(found, memory, target, context)


@app.command()
def unpack(
    model: Model,
    layer: Annotated[int, typer.Option(min=0, help="unpack this decoder layer")],
    output: Annotated[Path | None, typer.Option(help="write this file", show_default="layer_N.safetensors")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it exists")] = False,
) -> None:
    """Write a layer's codes and scales as the checkpoint had them."""
    from quantmoe.exporter.inspecting.unpack import unpack as unpack_layer

    output = output or Path(f"layer_{layer}.safetensors")
    console.print(f"{len(unpack_layer(model, layer, output, force=force))} matrices in {output}")


# over 80 lines: most are its options
@app.command()
def generate(
    context: typer.Context,
    outdir: Model,
    prompt: Annotated[str | None, _option("Prompt", "answer this text", "--prompt", "-p", metavar="TEXT")] = None,
    file: Annotated[
        Path | None, _option("Prompt", "answer the text in this file", "--file", "-f", metavar="FILE")
    ] = None,
    chat: Annotated[bool, _option("Prompt", "hold a conversation, as in a terminal", "--chat")] = False,
    raw: Annotated[bool, _option("Prompt", "continue text without a chat template", "--raw")] = False,
    system: Annotated[str | None, _option("Prompt", "give a system prompt", "--system", "-sys", metavar="TEXT")] = None,
    tools: Annotated[Path | None, _option("Prompt", "offer functions to call: a JSON list", metavar="FILE")] = None,
    template_arg: Annotated[
        list[str] | None, _option("Prompt", "set a variable of the chat template", metavar="NAME=JSON")
    ] = None,
    prompts: Annotated[Path | None, _option("Prompt", "answer each line, as a JSON string", metavar="FILE")] = None,
    batch: Annotated[
        int | None, _option("Prompt", "answer N of --prompts at once", min=1, metavar="N", show_default=str(BATCH))
    ] = None,
    ids: Annotated[list[int] | None, _option("Prompt", "continue these token ids", **listed(int))] = None,
    max_new_tokens: Annotated[
        int | None,
        _option(
            "Answer",
            "stop after N tokens",
            "--max-new-tokens",
            "-n",
            min=1,
            metavar="N",
            show_default=f"{NEW_TOKENS}, in a terminal none",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, _option("Answer", "end before this text; may be repeated", metavar="TEXT")
    ] = None,
    json_schema: Annotated[
        str | None, _option("Answer", "follow this JSON schema; FILE or {..}", "--json-schema", "-j", metavar="FILE")
    ] = None,
    grammar: Annotated[Path | None, _option("Answer", "follow this Lark or GBNF grammar", metavar="FILE")] = None,
    regex: Annotated[str | None, _option("Answer", "match this regular expression", metavar="REGEX")] = None,
    temperature: Annotated[
        float | None,
        _option("Answer", "divide logits by X; 0: likeliest token", min=0, metavar="X", show_default="the model's"),
    ] = None,
    top_k: Annotated[int | None, _option("Answer", "choose among the K likeliest tokens", min=0, metavar="K")] = None,
    top_p: Annotated[float | None, _option("Answer", "choose among tokens of this probability", metavar="P")] = None,
    min_p: Annotated[float | None, _option("Answer", "drop tokens below P times the likeliest", metavar="P")] = None,
    seed: Annotated[int | None, _option("Answer", "repeat a sampled answer", min=0, metavar="N")] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    experts: Experts = None,
    ram: Ram = None,
    gpu_memory: GpuMemory = None,
    speculate: Annotated[str | None, _option("Answer", "draft tokens: ngram, mtp, or a folder", metavar="HOW")] = None,
    drafts: Annotated[
        int | None, _option("Answer", "draft N tokens at once", min=1, metavar="N", show_default=str(DRAFTS))
    ] = None,
    save_state: Annotated[Path | None, _option("Prompt", "save the conversation's state", metavar="FILE")] = None,
    load_state: Annotated[Path | None, _option("Prompt", "continue from a saved state", metavar="FILE")] = None,
    repetition_penalty: Annotated[
        float | None, _option("Advanced", "penalize all tokens so far; 1: off", metavar="X")
    ] = None,
    presence_penalty: Annotated[float | None, _option("Advanced", "penalize tokens of the answer", metavar="X")] = None,
    frequency_penalty: Annotated[float | None, _option("Advanced", "penalize each occurrence", metavar="X")] = None,
    chunk: Chunk = None,
    prefault: Annotated[bool, _option("Advanced", "read all weights first", "--prefault", hidden=True)] = False,
    cuda_graph: Annotated[
        bool | None,
        _option("Advanced", "replay each step as a CUDA graph", "--cuda-graph/--no-cuda-graph", hidden=True),
    ] = None,
    reserve: Annotated[int | None, _option("Advanced", "leave this memory free", hidden=True, **SIZE)] = None,
    misses: Annotated[
        str | None, _option("Advanced", "choose what multiplies experts outside GPU memory", metavar="HOW", hidden=True)
    ] = None,
    record: Annotated[Path | None, _option("Advanced", "record which experts are used", metavar="FILE")] = None,
    warm: Annotated[Path | None, _option("Advanced", "load a trace's experts first", metavar="FILE")] = None,
) -> None:
    """Answer a prompt, or hold a conversation."""
    from quantmoe.exporter.folder.model_file import model_path
    from quantmoe.exporter.reading.sampling import Sampling, folder_sampling, not_applied
    from quantmoe.exporter.reading.tokenizer import stop_tokens
    from quantmoe.exporter.terminal import TokensColumn, ended_by_signals, progress
    from quantmoe.runtime import ranks, saved_states
    from quantmoe.runtime.cache import TAIL
    from quantmoe.runtime.generate import Generator

    messages = None if prompts is None else _read_prompts(prompts)
    sources = {"--prompt": prompt, "--file": file, "--ids": ids}
    others = {"--chat": chat or None, "--speculate": speculate, "--save-state": save_state, "--load-state": load_state}
    _check_apart("--prompts", prompts, sources | others)
    _check_apart("--ids", ids, {"--prompt": prompt, "--file": file, "--chat": chat or None})
    _check_apart("--file", file, {"--prompt": prompt})
    if chat and sys.stdin is None:
        raise typer.BadParameter("reads standard input, which is closed", param_hint="--chat")
    if prompts is None and not chat and all(value is None for value in sources.values()):
        chat = sys.stdin is not None and sys.stdin.isatty()
        if not chat and ranks.launched():
            raise typer.BadParameter("under a launcher give --prompt, --file or --ids")
        if not chat:
            prompt = _read_prompt(None)
    if file is not None:
        prompt = _read_prompt(file)
    _check_apart("--ids", ids, {"--json-schema": json_schema, "--grammar": grammar, "--regex": regex})
    _check_apart("--json-schema", json_schema, {"--grammar": grammar, "--regex": regex})
    _check_apart("--grammar", grammar, {"--regex": regex})
    rule = _rule(json_schema, grammar, regex)
    of_template = {"--system": system, "--tools": tools, "--template-arg": template_arg}
    _check_apart("--ids", ids, of_template)
    if ids is not None and (raw or stop):
        raise typer.BadParameter("--raw and --stop are of text; --ids has none")
    for option, texts in (("--prompt", [prompt]), ("--stop", stop or [])):
        if "" in texts:
            raise typer.BadParameter("is empty", param_hint=option)
    _check_text(prompt or "")
    if save_state is not None:
        try:
            saved_states.target(save_state)
        except ModelError as error:
            raise typer.BadParameter(str(error), param_hint="--save-state") from None
    if load_state is not None and not load_state.is_file():
        raise typer.BadParameter(f"{load_state}: no such file", param_hint="--load-state")
    if drafts is not None and speculate is None:
        raise typer.BadParameter("is of --speculate", param_hint="--drafts")
    if batch is not None and messages is None:
        raise typer.BadParameter("is of --prompts", param_hint="--batch")
    group = own = None
    if ranks.launched() and (ranks.ranks_in(outdir) or os.environ["WORLD_SIZE"] != "1"):
        if chat or save_state is not None:
            raise typer.BadParameter(
                "under a launcher give --prompt, --file or --ids; --chat and --save-state are of one process"
            )
        own = ranks.meet(outdir, device, seed)
        outdir, group, seed = own.path, own.group, own.seed
        if own.rank:  # rank 0 chooses and prints
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    folder = model_path(outdir).parent  # before the tokenizer: a checkpoint has one, too
    sampling = folder_sampling(folder, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed,
                               repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
                               frequency_penalty=frequency_penalty)  # fmt: skip
    if ignored := not_applied(folder):
        print(f"{folder / 'generation_config.json'}: not applied: {', '.join(ignored)}", file=sys.stderr)
    shown = own is None and ids is None and messages is None and sys.stdout.isatty()
    most = max_new_tokens or (sys.maxsize if shown else NEW_TOKENS)
    make = partial(Generator, outdir, threads, prefault, chunk, device=device, cuda_graph=cuda_graph,
                   speculate=speculate, drafts=drafts, experts=experts, ram=ram, gpu_memory=gpu_memory,
                   reserve=reserve, misses=misses, trace=record, warm=warm, group=group)  # fmt: skip

    def begin(length: int | None = None, rows: int = 1) -> tuple[Generator, Any]:
        """Return a generator for texts of ``length`` tokens, if that is known."""
        with progress(f"loading {outdir}"):
            model = make(max_length=None if shown and max_new_tokens is None else length, batch=rows)
        context.with_resource(ended_by_signals(model.interrupt))
        if own is not None:
            model.sampler = own.sampler
        return model, model.cache() if load_state is None else model.load_cache(load_state)

    def end(model: Generator, cache: Any) -> None:
        if experts is not None:
            print(_placed(model.experts_report(), device), file=sys.stderr)
        if save_state is not None:
            model.save_cache(cache, save_state)
        if own is not None:
            own.leave()

    if ids is not None:
        model, cache = begin(len(ids) + most)
        cache.tail = TAIL if save_state is not None else 0  # for the same ids again, whose last one is to be run
        tell, kept = _used(load_state, cache), cache.keep(ids)
        tell(kept)
        with progress("reading the prompt", TokensColumn()) as cache.progress:
            found = model.generate(ids[kept:], most, stop_tokens(folder), sampling, cache)
        print(",".join(map(str, found.tokens)))
        _tell_end(found, most, model.context)
        end(model, cache)
        return
    from quantmoe.runtime.chat import Chat, Text

    text = Text(folder, raw)
    if text.template is None and (given := next((name for name, value in of_template.items() if value), None)):
        why = "--raw uses none" if raw else f"{folder} has none"
        raise typer.BadParameter(f"needs a chat template; {why}", param_hint=given)
    arguments, before = _template_arguments(tools, template_arg), _system(system)
    if prompts is not None and messages is not None:
        asked = []
        for number, message in enumerate(messages, 1):
            with _in_line(prompts, number):
                asked.append(text.encode([*before, {"role": "user", "content": message}], arguments=arguments))
        size = min(batch or BATCH, len(asked))
        model, cache = begin(max(map(len, asked)) + most, size)
        for number, tokens in enumerate(asked, 1):  # before the first is run
            with _in_line(prompts, number):
                model.check(tokens, room=1)
        _answer(model, text, asked, size, max_new_tokens=most, stop=stop or (), sampling=sampling, grammar=rule)
        end(model, cache)
        return
    chosen = sampling or Sampling(temperature=0)  # Chat takes None for what the folder says
    reply = partial(_reply, max_new_tokens=most, stop=stop or (), sampling=chosen, grammar=rule)
    alone = [*before, {"role": "user", "content": prompt}] if prompt is not None and not chat else None
    model, cache = begin(len(text.encode(alone, arguments=arguments)) + most if alone else None)
    reply = partial(reply, tell=_used(load_state, cache))
    talk = Chat(model, text, cache, arguments)
    talk.messages = before
    answered = True
    if chat:
        from quantmoe.exporter.conversation import Conversation

        answered = Conversation(talk, reply, lambda text: print(f"quantmoe: {_line(text)}", file=sys.stderr)).run(
            prompt
        )
    elif prompt is not None:
        reply(talk, prompt)
    end(model, cache)
    if not answered:
        raise typer.Exit(1)


@app.command()
def serve(
    outdir: Model,
    host: Annotated[str, _option("Server", "listen on this address")] = "127.0.0.1",
    port: Annotated[
        int, _option("Server", "listen on this port; 0: any free one", min=0, max=65535, metavar="N")
    ] = 8000,
    api_key: Annotated[
        str | None, _option("Server", "require this key from clients", envvar="QUANTMOE_API_KEY", metavar="KEY")
    ] = None,
    batch: Annotated[int, _option("Server", "run N requests together", min=1, max=1024, metavar="N")] = BATCH,
    queue: Annotated[int, _option("Server", "let N requests wait, refuse more", min=0, metavar="N")] = QUEUE,
    max_length: Annotated[
        int | None,
        _option("Server", "limit prompt and answer to N tokens", min=2, metavar="N", show_default=str(LENGTH)),
    ] = None,
    prefix_cache: Annotated[
        int | None, _option("Server", "keep earlier prompts in this memory; 0: none", show_default="1GB", **SIZE)
    ] = None,
    cache_memory: Annotated[
        int | None, _option("Server", "limit the cache of a --paged folder to this memory", **SIZE)
    ] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    experts: Experts = None,
    ram: Ram = None,
    gpu_memory: GpuMemory = None,
    chunk: Chunk = None,
) -> None:
    """Answer requests of OpenAI's interface over HTTP, many at a time."""
    from quantmoe.exporter.terminal import progress
    from quantmoe.serving.command import listen, run
    from quantmoe.serving.opening import open_server

    if api_key == "":
        raise typer.BadParameter("is empty", param_hint="--api-key")
    with listen(host, port) as listening:
        with progress(f"loading {outdir}"):
            server = open_server(outdir, threads=threads, chunk=chunk, device=device, experts=experts, ram=ram,
                                 gpu_memory=gpu_memory, max_length=max_length, batch=batch, queue=queue,
                                 prefix_cache=prefix_cache, cache_memory=cache_memory)  # fmt: skip
        run(server, listening, api_key)


@app.command()
def trace(
    file: Annotated[
        Path, typer.Argument(help="trace that generate --record or the session entry quantmoe.trace wrote")
    ],
    memory: Annotated[
        list[int] | None,
        typer.Option(help="show this memory for experts; may be repeated", show_default="shares of all", **SIZE),
    ] = None,
    disk_speed: Annotated[int, typer.Option(help="read the disk at SIZE a second", **SIZE)] = "2GB",  # type: ignore[assignment]
    expert_map: Annotated[
        Path | None, typer.Option("--write-map", metavar="FILE", help="place experts on ranks, in this file")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="place experts on N ranks")] = 2,
    copies: Annotated[int, typer.Option(min=0, help="let ranks hold N copies of experts")] = 0,
    shared: Annotated[int, typer.Option(min=0, help="leave out the last N experts, which are shared")] = 0,
    plot: Annotated[Path | None, typer.Option(help="draw use, locality and hit rates into this file")] = None,
) -> None:
    """Show hit rates from a trace, or place experts on ranks."""
    from quantmoe.exporter.inspecting.expert_trace import curve, draw, read_trace

    if not file.exists() or file.is_dir():
        why = "is a folder, expected a file" if file.is_dir() else "no such file"
        raise typer.BadParameter(f"{file}: {why}", param_hint="FILE")
    found = read_trace(file)
    if found.cut:
        print(f"{file}: its last {found.cut} bytes are no whole record, and left out", file=sys.stderr)
    if not found.runs:
        raise typer.BadParameter(f"{file}: no token has been routed yet", param_hint="FILE")
    _check_plot(plot)
    if expert_map is not None:
        return _place(found, expert_map, ranks, copies, shared)
    experts = sum(layer["experts"] for layer in found.layers)
    used = sum(int((counts > 0).sum()) for counts in found.use())
    console.print(
        f"{len(found.layers)} layers, {found.tokens} tokens; {used} of {experts} experts used, "
        f"{decimal(sum(layer['bytes'] * layer['experts'] for layer in found.layers))} in all"
    )
    shares = [experts * share // 100 for share in (5, 10, 20, 33, 50, 75, 100)]
    slots = [min(size // found.slot_bytes, experts) for size in memory] if memory else shares
    table = Table("memory", "slots", "hit rate", "read a token", f"tokens/s at {decimal(disk_speed)}/s, at most")
    rows = curve(found, sorted({max(count, 1) for count in slots}), disk_speed)
    for row in rows:
        speed = row["tokens_per_second"]
        held, missed = (decimal(int(row[key])) for key in ("bytes", "read"))
        fastest = f"{speed:.1f}" if speed < 1e6 else "-"
        table.add_row(held, str(row["slots"]), f"{row['hit_rate']:.1%}", missed, fastest)
    console.print(table)
    if plot is not None:
        draw(found, rows, plot)


def _check_plot(path: Path | None) -> None:
    """Refuse, before the measurement, what a plot cannot be written into."""
    from quantmoe.exporter.inspecting.expert_trace import PLOTS

    if path is None:
        return
    need("matplotlib")
    if path.suffix[1:] not in PLOTS:
        raise typer.BadParameter(f"{path}: expected a file .{', .'.join(PLOTS)}", param_hint="--plot")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent}: no such folder", param_hint="--plot")


def _place(found: Any, path: Path, ranks: int, copies: int, shared: int) -> None:
    from quantmoe.exporter.reading.expert_map import balance, in_order, write_map

    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path.parent}: no such folder", param_hint="--write-map")
    loads = [counts[: len(counts) - shared] for counts in found.use()]
    placed = [balance(tokens, ranks, copies) for tokens in loads]
    write_map(path, placed)
    table = Table("layer", "busiest rank, in order", "by the map", title="times the mean of the ranks")
    for i, (tokens, placement) in enumerate(zip(loads, placed, strict=True)):
        shares = [
            p.load(tokens).max() * ranks / max(tokens.sum(), 1) for p in (in_order(len(tokens), ranks), placement)
        ]
        table.add_row(str(i), *(f"{share:.2f}" for share in shares))
    console.print(table)


def _used(path: Path | None, cache: Any) -> Callable[[int], None]:
    """Return what says, of the first prompt after a loaded state, how much of it was used, if that is not all."""
    whole, ends = len(cache.tokens), cache.ends()
    lengths = "any length" if isinstance(ends, range) else f"{', '.join(map(str, ends))} tokens"

    def tell(kept: int) -> None:
        nonlocal path
        if path is not None and kept < whole:
            print(f"{path}: {kept} of its {whole} tokens are used; it can go back to {lengths}", file=sys.stderr)
        path = None

    return tell


def _reply(chat: Any, message: Any, tell: Callable[[int], None], max_new_tokens: int, **options: Any) -> None:
    """Print the answer to a text or to messages as it comes."""
    from quantmoe.exporter.conversation import PLAIN, shown
    from quantmoe.exporter.terminal import TokensColumn, progress

    if isinstance(message, str):
        _check_text(message)
    parts = sys.stdout.isatty() and chat.text.format.name + chat.text.format.open != ""
    found = (chat.deltas if parts else chat.reply)(message, max_new_tokens, **options)
    if chat.dropped:
        turns = "the oldest turn" if chat.dropped == 1 else f"the oldest {chat.dropped} turns"
        limit = f"the model's context of {chat.model.context} tokens"
        print(f"{limit} is full: dropped {turns}; the rest is read again", file=sys.stderr)
    try:
        with (
            progress("reading the prompt", TokensColumn()) as chat.cache.progress,
            contextlib.closing(found),
        ):
            for piece in shown(found) if parts else found:
                print(piece, end="", flush=True)
    finally:
        print(PLAIN if parts else "", flush=True)
    tell(chat.kept)
    _tell_end(chat.last, max_new_tokens, chat.model.context)


def _tell_end(found: Any, most: int, context: int) -> None:
    """Print how fast an answer came, and why it ended if it was cut."""
    print(_speed(found), file=sys.stderr)
    if found.finish_reason == "length":
        limit = f"--max-new-tokens {most}" if len(found.tokens) == most else f"the model's context of {context} tokens"
        print(f"the answer ended at {limit}", file=sys.stderr)


def _system(text: str | None) -> list[dict[str, str]]:
    """Return the messages before the first of the user."""
    _check_text(text or "")
    return [] if text is None else [{"role": "system", "content": text}]


def _template_arguments(tools: Path | None, variables: list[str] | None) -> Any:
    """Return what the template gets of --tools and --template-arg."""
    from quantmoe.runtime.chat import TemplateArguments

    found = {}
    for given in variables or []:
        name, _, value = given.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            expected = f'{given!r}: expected NAME=JSON, as enable_thinking=false or reasoning_effort="low"'
            raise typer.BadParameter(expected, param_hint="--template-arg") from None
    listed = None
    if tools is not None:
        try:
            listed = json.loads(_read_prompt(tools, "--tools"))
        except ValueError as error:
            raise typer.BadParameter(f"{tools}: {error}", param_hint="--tools") from None
    try:
        return TemplateArguments(listed, variables=found)
    except OptionError as error:
        hint = "--tools" if str(error).startswith("tools") else "--template-arg"
        raise typer.BadParameter(str(error), param_hint=hint) from None


def _rule(json_schema: str | None, grammar: Path | None, regex: str | None) -> Any:
    """Return the Grammar that answers follow; None: they are free."""
    if (json_schema, grammar, regex) == (None, None, None):
        return None
    from quantmoe.runtime.constraint import Grammar

    try:
        if json_schema is not None:
            inline = json_schema.lstrip().startswith("{")
            given = json_schema if inline else _read_prompt(Path(json_schema), "--json-schema")
            return Grammar("json_schema", given)
        if grammar is not None:
            return Grammar("grammar", _read_prompt(grammar, "--grammar"))
        return Grammar("regex", str(regex))
    except OptionError as error:
        hint = "--json-schema" if json_schema is not None else "--grammar" if grammar is not None else "--regex"
        raise typer.BadParameter(str(error), param_hint=hint) from None


def _check_apart(option: str, value: Any, others: dict[str, Any]) -> None:
    """Refuse options beside one that is given."""
    for other, beside in others.items():
        if value is not None and beside is not None:
            raise typer.BadParameter(f"{option} does not go with {other}")


def _read_prompt(path: Path | None, option: str | None = "--file") -> str:
    """Return a file's text, None: standard input's, without the line break at its end."""
    path = None if path == Path("-") else path
    name, option = (str(path), option) if path else ("standard input", None)
    given = b"" if path or sys.stdin is None else sys.stdin.buffer.read()  # None: it is closed
    try:
        text = (path.read_bytes() if path else given).decode("utf-8-sig")
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}", param_hint=option) from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{name}: expected text in UTF-8", param_hint=option) from None
    if not text.strip():
        others = "" if path else "; give --prompt, --file or --ids, or --chat for a conversation"
        what = "text" if option == "--text" else "a prompt"
        raise typer.BadParameter(f"{name}: expected {what}, found no text{others}", param_hint=option)
    return text.removesuffix("\n").removesuffix("\r")


def _read_prompts(path: Path) -> list[str]:
    """Return its lines, of a file .jsonl the strings that they are, prompt N on line N. Empty lines at the end
    aside."""
    of_json, found = path.suffix == ".jsonl", []
    try:
        lines = path.read_text("utf-8-sig").split("\n")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--prompts") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path}: expected text in UTF-8", param_hint="--prompts") from None
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise typer.BadParameter(f"{path}: expected a prompt a line, there is none", param_hint="--prompts")
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line) if of_json else line
        except (ValueError, RecursionError):
            prompt = None
        if not isinstance(prompt, str) or not (prompt if of_json else prompt.strip()):
            what = "a JSON string that is not empty" if of_json else "a prompt, the line is empty"
            raise typer.BadParameter(f"{path}, line {number}: expected {what}", param_hint="--prompts")
        if not _is_text(prompt):
            what = r"text, found half of a pair \ud800 to \udfff"
            raise typer.BadParameter(f"{path}, line {number}: expected {what}", param_hint="--prompts")
        found.append(prompt)
    return found


@contextlib.contextmanager
def _in_line(path: Path, number: int) -> Iterator[None]:
    """Name the line of a prompt in what is wrong with it."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}, line {number}: {error}") from None


def _answer(model: Any, text: Any, prompts: Sequence[Sequence[int]], size: int, **options: Any) -> None:
    """Print the answers in the prompts' order, each when it and those before it are there.

    The longest run first, with others about as long: a row is padded to the longest of its batch.
    """
    from quantmoe.exporter.terminal import TokensColumn, progress
    from quantmoe.runtime.chat import answers

    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]), reverse=True)
    batches: list[Any] = []
    found: dict[int, str] = {}
    printed = 0
    for begin in range(0, len(order), size):
        rows = order[begin : begin + size]
        with progress(f"reading {len(rows)} prompts, the longest", TokensColumn()) as tell:
            said, batch = answers(model, text, [prompts[row] for row in rows], progress=tell, **options)
        found |= dict(zip(rows, said, strict=True))
        while printed in found:
            print(json.dumps(found.pop(printed), ensure_ascii=not _prints_utf8()), flush=True)
            printed += 1
        batches.append(batch)
    read, prefill, decode = (sum(getattr(b, name) for b in batches) for name in ("prompt", "prefill", "decode"))
    tokens = sum(len(row) for batch in batches for row in batch.tokens)
    print(
        f"{len(prompts)} prompts: {read} tokens, {read / prefill:.1f} tokens/s ({prefill:.3f} s); "
        f"decode: {tokens} tokens, {(tokens - len(batches)) / decode if decode else 0:.1f} tokens/s",
        file=sys.stderr,
    )
    if cut := sum(reason == "length" for batch in batches for reason in batch.finish_reasons):
        limits = f"--max-new-tokens {options['max_new_tokens']} or at the model's context of {model.context} tokens"
        print(f"{cut} of {len(prompts)} answers ended at {limits}", file=sys.stderr)


def _prints_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")


def _is_text(message: str) -> bool:
    """Return whether it has no halves of surrogate pairs, which Python reads from JSON and from bytes that are no
    text."""
    return message.encode(errors="ignore").decode() == message


def _check_text(message: str) -> None:
    if not _is_text(message):
        raise typer.BadParameter("the prompt: expected text in UTF-8")


def _placed(report: dict[str, int], device: str) -> str:
    """Return a line that says where experts were, from the library's report."""
    if not report.get("slots"):
        return f"experts: all in {'GPU memory' if of_device(device).on_gpu else 'the mapped file'}"
    uses = report["hits"] + report["misses"]
    missed = report.get("missed_bytes", report["bytes_read"])  # copied, read, or the CPU's
    return (
        f"experts: {report['slots']} slots in {report['layers']} layers, "
        f"{100 * report['hits'] / max(1, uses):.0f} % of {uses} uses hit, {decimal(missed)} missed"
    )


def _speed(found: Any) -> str:
    speed = (
        f"prompt: {found.prompt} {plural('token', found.prompt)}, "
        f"{found.prompt / found.prefill:.1f} tokens/s ({found.prefill:.3f} s); "
        f"decode: {len(found.tokens)} {plural('token', len(found.tokens))}"
    )
    if len(found.tokens) > 1:  # the prompt's run chose the first one
        speed += f", {found.tokens_per_second:.1f} tokens/s"
    if (drafts := found.speculation) is None:
        return speed
    return f"{speed}; {drafts.accepted} of {drafts.drafted} drafts accepted, {drafts.runs} runs"


@app.command()
def demo(
    checkpoint: Annotated[Path, typer.Option(help="export this Hugging Face folder")],
    output: Annotated[Path, typer.Option(help="write the model here")] = Path("demo-model"),
    prompt: Annotated[str, typer.Option(help="continue this text")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="stop after N tokens")] = 32,
    force: Annotated[bool, typer.Option("--force", help="replace an earlier export there")] = False,
) -> None:
    """Export a checkpoint, run it, and compare with PyTorch."""
    need("torch", "transformers", "onnxscript", "onnxruntime", "tokenizers")
    from quantmoe.exporter.folder.files import MODEL
    from quantmoe.exporter.writing.output import check_folder

    check_folder(output, [MODEL], force)
    from quantmoe.benchmarks.pytorch_comparison import compare
    from quantmoe.exporter.reading.tokenizer import TOKENIZER, load_tokenizer

    report = _export(checkpoint, output, Options(), force=force)
    tokenizer = load_tokenizer(output) if (output / TOKENIZER).exists() else None
    ids = tokenizer.encode(prompt).ids if tokenizer else None
    found = compare(checkpoint, output, max_new_tokens, ids)

    def shown(tokens: list[int]) -> str:
        return tokenizer.decode([*ids, *tokens]) if tokenizer and ids else str(tokens)

    table = Table("", "", title=f"{checkpoint.name} -> {output / MODEL}", show_header=False)
    layers = Counter(
        f"{scheme}; experts: {experts_of(spec.attributes(), report.shared[name])}; "
        f"{spec.w13.activation_format} activations, {spec.w13.scale_type} scales"
        for name, (scheme, spec) in report.layers.items()
    )
    for text, count in layers.items():
        table.add_row(f"{count} MoE {plural('layer', count)}", text)
    for file in sorted(output.glob(f"{MODEL}*")):
        table.add_row(file.name, decimal(file.stat().st_size))
    table.add_row("ONNX Runtime", shown(found.tokens))
    table.add_row(
        "PyTorch", shown(found.expected_tokens) if found.expected_tokens else "(too large to dequantize here)"
    )
    if found.difference is not None:
        table.add_row("largest logit difference", f"{found.difference:.2e} of the largest logit, fed the same tokens")
    if found.float_difference is not None:
        table.add_row(
            "with float activations",
            f"{found.float_difference:.2e} and a float32 cache: ours; the rest is what rounding both loses",
        )
    if found.divergence is not None:
        table.add_row("distribution", f"KL {found.divergence:.2e} nats, same likeliest token {found.agreement:.0%}")
    table.add_row(
        "speed", f"prefill {found.prompt / found.prefill:.0f} tokens/s, decode {found.decode_rate:.1f} tokens/s"
    )
    console.print(table)
    console.print(report.activations or "activations as the checkpoint says", style="yellow")


@app.command()
def evaluate(
    outdir: Model,
    text: Annotated[Path, typer.Option(help="predict the text in this file")],
    against: Annotated[Path | None, typer.Option(help="compare with another model, or with the CHECKPOINT")] = None,
    window: Annotated[int, typer.Option(min=2, help="read N tokens at once, from an empty cache")] = 512,
    windows: Annotated[
        int | None, typer.Option(min=1, help="stop after N windows", show_default="the whole text")
    ] = None,
    layers: Annotated[bool, typer.Option("--each-layer", help="also compare hidden states after each layer")] = False,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="use N CPU threads; 0: automatic")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the divergence at all positions into this file")] = None,
) -> None:
    """Measure perplexity on a text, and the divergence from another model's predictions."""
    need("onnxruntime", "tokenizers")
    if plot is not None and against is None:
        raise typer.BadParameter("needs --against: it draws the divergence from that model", param_hint="--plot")
    _check_plot(plot)
    from quantmoe.exporter.inspecting.survey import is_model

    if against is not None and not is_model(against):
        need("torch", "transformers")
    content = _read_prompt(text, "--text")
    from rich.progress import TimeRemainingColumn

    from quantmoe.benchmarks.evaluate import evaluate as evaluate_model
    from quantmoe.exporter.terminal import TokensColumn, ended_by_signals, progress
    from quantmoe.runtime.generate import Generator

    opened: list[Generator] = []

    def interrupt() -> None:
        for model in opened:
            model.interrupt()

    with ended_by_signals(interrupt), progress("reading", TokensColumn(), TimeRemainingColumn()) as tell:
        found = evaluate_model(
            outdir, content, against=against, window=window, windows=windows, layers=layers, threads=threads,
            progress=tell, opened=opened.append,
        )  # fmt: skip
    print(json.dumps(found.to_dict(), indent=1)) if as_json else print_evaluation(found)
    if plot is not None:
        from quantmoe.benchmarks.divergence_plot import draw

        draw(found, plot)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure one layer or a whole model beside other engines."""
    from quantmoe.benchmarks.bench import main as bench_main

    bench_main(context.args)


def main() -> None:
    """Entry point: errors a person can act on are one line and exit code 1."""
    arguments = sys.argv[1:] or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths and texts may have what a pipe's encoding lacks
    try:
        _main(arguments)
    except MemoryError as error:  # without words where the modules are imported
        sys.exit(f"quantmoe: {_line(str(error) or ' '.join(arguments[:2]) + ': out of memory')}")
    except ModuleNotFoundError as error:
        sys.exit(f"quantmoe: {missing(error, arguments[0])}")
    except ImportError as error:  # a library that does not fit into memory, or not to this machine; the text names it
        sys.exit(f"quantmoe: {outdated(arguments[0]) or _line(str(error))}")
    except Exception:
        if old := outdated(arguments[0]):
            sys.exit(f"quantmoe: {old}")
        raise


def _main(arguments: Sequence[str]) -> None:
    for signal_ in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # Windows has no SIGHUP
        signal.signal(signal_, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C: what was begun is removed
    try:
        run(app, arguments, "quantmoe")
    except OptionError as error:
        sys.exit(f"quantmoe: {_line(_as_typed(str(error), arguments[0]))}")
    except (CheckpointError, ModelError, OSError) as error:
        sys.exit(f"quantmoe: {_line(str(error))}")


def _as_typed(text: str, command: str) -> str:
    """Return an error with the command's options in the places of a function's arguments.

    An argument is the first word, a word with an underscore, or follows some words.
    """
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    options = {p.name: p.opts[0] for p in parameters if p.opts[0].startswith("--")}
    after = "|".join(f"(?<={words} )" for words in ("does not go with", "leave out", "option of", "is for", "needs"))
    places = rf"^\w+|\b[a-z]+_\w+|(?:{after})\w+"
    return re.sub(places, lambda match: options.get(match[0], match[0]), text)


def _line(text: str) -> str:
    """Return an error on one line: files choose parts of it, which may be long, many lines or a terminal's commands."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return text if len(text) <= 2000 else f"{text[:1600]} ... {text[-300:]}"


def _plan(checkpoint: Path, outdir: Path, options: Options, *, force: bool) -> None:
    from quantmoe.exporter.writing.plan import plan

    found = plan(checkpoint, outdir, force=force, **vars(options))
    console.print(f"{outdir} (dry run)", highlight=False)
    print_layers((scheme, spec, found.shared[name], size) for name, (scheme, spec, size) in found.layers.items())
    if found.attention:
        console.print(found.attention)
    total = found.packed + found.dense
    console.print(
        f"reads {decimal(found.read)}; writes {decimal(total)}: experts {decimal(found.packed)}, "
        f"other weights {decimal(found.dense)}{f', in {found.files} files' if found.files > 1 else ''}\n"
        f"about {minutes(found.seconds)} ({found.rate}), peak memory about {decimal(round(found.memory))}\n"
        f"the KV cache takes {found.cache:,} bytes a token"
    )
    if text := found.calibration:
        console.print(
            f"the model reads {text.tokens:,} tokens of {options.calibrate} first: about {minutes(text.seconds)} "
            f"of the time above, with {decimal(round(text.memory))} of memory"
        )
    print_reasons(FLOAT_HERE, found.dequantized)
    print_reasons(APART, found.apart)
    print_reasons(NOT_ORT, found.not_ort)
    print_reasons(PLAIN_ATTENTION, found.plain_attention)
    remarks = (found.left_out, found.activations, found.kv_cache, found.drafting, found.chat, found.tokenizer)
    for remark in filter(None, remarks):
        console.print(remark, style="yellow")
    if total > found.free:
        console.print(f"only {decimal(found.free)} of disk are free there", style="red")


def _export(checkpoint: Path, outdir: Path, options: Options, *, force: bool) -> Any:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeElapsedColumn())
    stderr = Console(stderr=True)
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("reading", total=None)
        from quantmoe.exporter.writing.calibration import CALIBRATION
        from quantmoe.exporter.writing.convert import write

        def progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        try:
            return write(checkpoint, outdir, options, force=force, progress=progress)
        except KeyboardInterrupt:
            if (kept := outdir / CALIBRATION).exists():
                said = f"{kept} keeps what was read of {options.calibrate}: this command goes on from there"
                stderr.print(said, soft_wrap=True, highlight=False)
            raise


def _lost(checkpoint: Path, outdir: Path, seconds: float, options: Options) -> str:
    """Return what the quantization of an export lost, or why that is not measured."""
    for option, given in (
        ("--tensor-parallel", options.tensor_parallel > 1),
        ("--vision", options.vision),
        ("--paged", options.paged),
        ("--external-experts", options.external_experts),
    ):
        if given:
            return f"what was lost is not measured: {option} exports no model that takes one text"
    from quantmoe.benchmarks.quantization_loss import lost

    return lost(checkpoint, outdir, seconds, options.layers)


def _explain(path: Path, as_json: bool) -> None:
    from quantmoe.exporter.inspecting.explain import explain

    found = explain(path)
    if as_json:
        print(
            json.dumps(
                found, default=lambda o: {"layout": o.layout, "reason": o.reason, "kernels": o.kernels}, indent=1
            )
        )
        return
    for entry in found:
        names = entry["modules"]
        console.print(f"{entry['scheme']}: {and_more(names) if names else entry['remark']}")
        for candidate in entry["candidates"]:
            console.print(f"  layout {candidate.layout}: {candidate.reason or 'carries it'}")
            chosen = False
            for kernel, reason in candidate.kernels if not candidate.reason else ():
                verdict = reason or ("usable" if chosen else "used")
                chosen |= not reason
                console.print(f"    kernel {kernel}: {verdict}")


if __name__ == "__main__":
    main()
