"""``quantmoe generate``: answers, conversations and many prompts."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from quantmoe.exporter.command_arguments import listed, one_line
from quantmoe.exporter.commands.prompts import check_text, read_prompt, read_prompts
from quantmoe.exporter.common_options import BATCH as BATCH_HELP
from quantmoe.exporter.common_options import (
    PROMPT,
    SIZE,
    Chunk,
    Device,
    Experts,
    GpuMemory,
    Model,
    Ram,
    Threads,
    context_option,
    panel_option,
)
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.memory import DRAFTS
from quantmoe.exporter.report import plural
from quantmoe.exporter.targets import of_device
from quantmoe.serving import BATCH

#: of generate, where no terminal shows the answer as it comes
NEW_TOKENS = 512


# over 200 lines: half are its options; then refusals, and one of three ways: ids, lines of a file, a conversation
def generate(
    context: typer.Context,
    outdir: Model,
    prompt: Annotated[str | None, panel_option("Prompt", PROMPT, "--prompt", "-p", metavar="TEXT")] = None,
    *,
    file: Annotated[
        Path | None, panel_option("Prompt", "answer the text in this file", "--file", "-f", metavar="FILE")
    ] = None,
    chat: Annotated[bool, panel_option("Prompt", "hold a conversation, as in a terminal", "--chat")] = False,
    raw: Annotated[bool, panel_option("Prompt", "continue text without a chat template", "--raw")] = False,
    system: Annotated[
        str | None, panel_option("Prompt", "give a system prompt", "--system", "-sys", metavar="TEXT")
    ] = None,
    tools: Annotated[
        Path | None, panel_option("Prompt", "offer functions to call: a JSON list", metavar="FILE")
    ] = None,
    template_arg: Annotated[
        list[str] | None, panel_option("Prompt", "set a variable of the chat template", metavar="NAME=JSON")
    ] = None,
    prompts: Annotated[
        Path | None, panel_option("Prompt", "answer each line, as a JSON string", metavar="FILE")
    ] = None,
    batch: Annotated[
        int | None, panel_option("Prompt", BATCH_HELP, min=1, metavar="N", show_default=str(BATCH))
    ] = None,
    ids: Annotated[list[int] | None, panel_option("Prompt", "continue these token ids", **listed(int))] = None,
    length: Annotated[int | None, context_option("Answer", "the model's")] = None,
    max_new_tokens: Annotated[
        int | None,
        panel_option(
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
        list[str] | None, panel_option("Answer", "end before this text; may be repeated", metavar="TEXT")
    ] = None,
    json_schema: Annotated[
        str | None,
        panel_option("Answer", "follow this JSON schema; FILE or {..}", "--json-schema", "-j", metavar="FILE"),
    ] = None,
    grammar: Annotated[Path | None, panel_option("Answer", "follow this Lark or GBNF grammar", metavar="FILE")] = None,
    regex: Annotated[str | None, panel_option("Answer", "match this regular expression", metavar="REGEX")] = None,
    temperature: Annotated[
        float | None,
        panel_option(
            "Answer", "divide logits by X; 0: likeliest token", min=0, metavar="X", show_default="the model's"
        ),
    ] = None,
    top_k: Annotated[
        int | None, panel_option("Answer", "choose among the K likeliest tokens", min=0, metavar="K")
    ] = None,
    top_p: Annotated[
        float | None, panel_option("Answer", "choose among tokens of this probability", metavar="P")
    ] = None,
    min_p: Annotated[
        float | None, panel_option("Answer", "drop tokens below P times the likeliest", metavar="P")
    ] = None,
    seed: Annotated[int | None, panel_option("Answer", "repeat a sampled answer", min=0, metavar="N")] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    experts: Experts = None,
    ram: Ram = None,
    gpu_memory: GpuMemory = None,
    speculate: Annotated[
        str | None, panel_option("Answer", "draft tokens: ngram, mtp, or a folder", metavar="HOW")
    ] = None,
    drafts: Annotated[
        int | None, panel_option("Answer", "draft N tokens at once", min=1, metavar="N", show_default=str(DRAFTS))
    ] = None,
    save_state: Annotated[Path | None, panel_option("Prompt", "save the conversation's state", metavar="FILE")] = None,
    load_state: Annotated[Path | None, panel_option("Prompt", "continue from a saved state", metavar="FILE")] = None,
    repetition_penalty: Annotated[
        float | None, panel_option("Advanced", "penalize all tokens so far; 1: off", metavar="X")
    ] = None,
    presence_penalty: Annotated[
        float | None, panel_option("Advanced", "penalize tokens of the answer", metavar="X")
    ] = None,
    frequency_penalty: Annotated[
        float | None, panel_option("Advanced", "penalize each occurrence", metavar="X")
    ] = None,
    chunk: Chunk = None,
    prefault: Annotated[bool, panel_option("Advanced", "read all weights first", "--prefault", hidden=True)] = False,
    cuda_graph: Annotated[
        bool | None,
        panel_option("Advanced", "replay each step as a CUDA graph", "--cuda-graph/--no-cuda-graph", hidden=True),
    ] = None,
    reserve: Annotated[int | None, panel_option("Advanced", "leave this memory free", hidden=True, **SIZE)] = None,
    misses: Annotated[
        str | None,
        panel_option("Advanced", "choose what multiplies experts outside GPU memory", metavar="HOW", hidden=True),
    ] = None,
    record: Annotated[Path | None, panel_option("Advanced", "record which experts are used", metavar="FILE")] = None,
    warm: Annotated[Path | None, panel_option("Advanced", "load a trace's experts first", metavar="FILE")] = None,
) -> None:
    """Answer a prompt, or hold a conversation."""
    from quantmoe.exporter.commands.terminal import TokensColumn, ended_by_signals, progress
    from quantmoe.exporter.folder.model_file import model_path
    from quantmoe.exporter.folder.sampling_options import folder_sampling, not_applied
    from quantmoe.exporter.folder.tokenizer import stop_tokens
    from quantmoe.runtime import ranks, saved_states
    from quantmoe.runtime.cache import TAIL
    from quantmoe.runtime.generate import Generator

    messages = None if prompts is None else read_prompts(prompts)
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
            prompt = read_prompt(None)
    if file is not None:
        prompt = read_prompt(file)
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
    check_text(prompt or "")
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
    chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
              "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
              "frequency_penalty": frequency_penalty}  # fmt: skip
    sampling = folder_sampling(folder, **chosen)
    if ignored := not_applied(folder):
        fields = ", ".join(ignored)
        print(
            f"{folder / 'generation_config.json'}: not applied: {fields}; transformers' tokens may differ",
            file=sys.stderr,
        )
    shown = own is None and ids is None and messages is None and sys.stdout.isatty()
    most = max_new_tokens or (sys.maxsize if shown else NEW_TOKENS)
    make = partial(Generator, outdir, threads=threads, prefault=prefault, chunk=chunk, device=device,
                   cuda_graph=cuda_graph, speculate=speculate, drafts=drafts, experts=experts, ram=ram,
                   gpu_memory=gpu_memory, reserve=reserve, misses=misses, trace=record, warm=warm,
                   group=group)  # fmt: skip

    def begin(tokens: int | None = None, rows: int = 1) -> tuple[Generator, Any]:
        """Return a generator for texts of so many tokens, if that is known."""
        known = length if shown and max_new_tokens is None else tokens
        with progress(f"loading {outdir}"):
            model = make(max_length=known, batch=rows)
        if length is not None:
            if length > model.context:
                raise OptionError(f"length is {length}, this model has {model.context}")
            model.context = length
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
            found = model.generate(ids[kept:], most, stop_tokens(folder), sampling=sampling, cache=cache)
        print(",".join(map(str, found.tokens)))
        _tell_end(found, most, model.context)
        end(model, cache)
        return
    from quantmoe.exporter.commands.answer_settings import AnswerSettings
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
    settings = AnswerSettings(folder, most, stop or (), chosen, rule)
    alone = [*before, {"role": "user", "content": prompt}] if prompt is not None and not chat else None
    model, cache = begin(len(text.encode(alone, arguments=arguments)) + most if alone else None)
    reply = partial(_reply, tell=_used(load_state, cache))
    talk = Chat(model, text, cache, arguments)
    talk.messages = before
    answered = True
    if chat:
        from quantmoe.exporter.commands.terminal_conversation import Conversation

        def complain(text: str) -> None:
            print(f"quantmoe: {one_line(text)}", file=sys.stderr)

        answered = Conversation(talk, reply, complain, settings).run(prompt)
    elif prompt is not None:
        reply(talk, prompt, **settings.options())
    end(model, cache)
    if not answered:
        raise typer.Exit(1)


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
    from quantmoe.exporter.commands.terminal import TokensColumn, progress
    from quantmoe.exporter.commands.terminal_conversation import PLAIN, shown

    if isinstance(message, str):
        check_text(message)
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
    print(speed(found), file=sys.stderr)
    if found.finish_reason == "length":
        limit = f"--max-new-tokens {most}" if len(found.tokens) == most else f"the model's context of {context} tokens"
        print(f"the answer ended at {limit}", file=sys.stderr)


def _system(text: str | None) -> list[dict[str, str]]:
    """Return the messages before the first of the user."""
    check_text(text or "")
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
            listed = json.loads(read_prompt(tools, "--tools"))
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
    from quantmoe.runtime.choosing.constraint import Grammar

    try:
        if json_schema is not None:
            inline = json_schema.lstrip().startswith("{")
            given = json_schema if inline else read_prompt(Path(json_schema), "--json-schema")
            return Grammar("json_schema", given)
        if grammar is not None:
            return Grammar("grammar", read_prompt(grammar, "--grammar"))
        return Grammar("regex", str(regex))
    except OptionError as error:
        hint = "--json-schema" if json_schema is not None else "--grammar" if grammar is not None else "--regex"
        raise typer.BadParameter(str(error), param_hint=hint) from None


def _check_apart(option: str, value: Any, others: dict[str, Any]) -> None:
    """Refuse options beside one that is given."""
    for other, beside in others.items():
        if value is not None and beside is not None:
            raise typer.BadParameter(f"{option} does not go with {other}")


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
    from quantmoe.exporter.commands.terminal import TokensColumn, progress
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


def speed(found: Any) -> str:
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
