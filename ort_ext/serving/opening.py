"""Opens an exported folder for many requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.model_file import model_path
from quantmoe.serving import BATCH, LENGTH, QUEUE
from quantmoe.serving.app import Server
from quantmoe.serving.embeddings import Embeddings
from quantmoe.serving.served_model import ServedModel

#: bytes for the keys and values of earlier prompts
PREFIXES = 1_000_000_000


def open_server(
    outdir: str | Path,
    *,
    batch: int = BATCH,
    queue: int = QUEUE,
    context: int | None = None,
    prefix_cache: int | None = None,
    cache_memory: int | None = None,
    threads: int = 0,
    **options: Any,
) -> Server | Embeddings:
    """Open an exported model for many requests; :func:`application` of the result answers them.

    Args:
        batch: requests that run together.
        queue: requests that wait; more are refused.
        context: tokens of a prompt and its answer at most; None: 8,192, or the model's context if that is shorter.
        prefix_cache: bytes for the keys and values of earlier prompts; None: 1 GB, 0: none are kept.
        cache_memory: bytes for the blocks of a ``--paged`` folder; None: ``batch`` times ``context`` tokens.
        threads: as :class:`quantmoe.Generator`'s, as are ``device``, ``chunk``, ``experts``, ``ram``, ``gpu_memory``.

    Raises:
        OptionError: an option does not fit the model.
        ModelError: the folder has no model that a server can run.
    """
    wanted = context or LENGTH
    model = ServedModel(model_path(outdir), threads, max_length=wanted, batch=batch, **options)
    if cache_memory is not None and not model.paged:
        raise OptionError("cache_memory is for folders of export --paged")
    length = min(model.context, model.short_context, wanted)
    if context is not None and context > length:
        raise OptionError(f"context is {context}, this model has {length}")
    if model.encoder:
        return Embeddings(model, queue)
    kept = PREFIXES if prefix_cache is None else prefix_cache
    return Server(model, batch, length, queue=queue, prefix_bytes=kept, cache_bytes=cache_memory)
