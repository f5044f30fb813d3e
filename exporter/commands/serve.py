"""``quantmoe serve``: OpenAI's interface over HTTP."""

from __future__ import annotations

from typing import Annotated

import typer

from quantmoe.exporter.common_options import BATCH as BATCH_HELP
from quantmoe.exporter.common_options import (
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
from quantmoe.serving import BATCH, LENGTH, QUEUE


def serve(
    outdir: Model,
    host: Annotated[str, panel_option("Server", "listen on this address", metavar="ADDRESS")] = "127.0.0.1",
    port: Annotated[
        int, panel_option("Server", "listen on this port; 0: any free one", min=0, max=65535, metavar="N")
    ] = 8000,
    *,
    api_key: Annotated[
        str | None, panel_option("Server", "require this key from clients", envvar="QUANTMOE_API_KEY", metavar="KEY")
    ] = None,
    batch: Annotated[int, panel_option("Server", BATCH_HELP, min=1, max=1024, metavar="N")] = BATCH,
    queue: Annotated[int, panel_option("Server", "let N requests wait, refuse more", min=0, metavar="N")] = QUEUE,
    context: Annotated[int | None, context_option("Server", str(LENGTH))] = None,
    prefix_cache: Annotated[
        int | None, panel_option("Server", "keep earlier prompts in this memory; 0: none", show_default="1GB", **SIZE)
    ] = None,
    cache_memory: Annotated[
        int | None, panel_option("Server", "limit the cache of a --paged folder to this memory", **SIZE)
    ] = None,
    device: Device = "cpu",
    threads: Threads = 0,
    experts: Experts = None,
    ram: Ram = None,
    gpu_memory: GpuMemory = None,
    chunk: Chunk = None,
) -> None:
    """Answer requests of OpenAI's interface over HTTP, many at a time."""
    from quantmoe.exporter.commands.terminal import progress
    from quantmoe.serving.command import listen, run
    from quantmoe.serving.opening import open_server

    if api_key == "":
        raise typer.BadParameter("is empty", param_hint="--api-key")
    with listen(host, port) as listening:
        with progress(f"loading {outdir}"):
            server = open_server(outdir, threads=threads, chunk=chunk, device=device, experts=experts, ram=ram,
                                 gpu_memory=gpu_memory, context=context, batch=batch, queue=queue,
                                 prefix_cache=prefix_cache, cache_memory=cache_memory)  # fmt: skip
        run(server, listening, api_key)
