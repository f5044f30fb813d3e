"""``quantmoe evaluate``: perplexity of an exported model on a text, and its divergence from another model.

The text is cut into windows of equal length. Each starts with an empty cache, and with the tokens that the tokenizer
puts in front of a text. One window is in memory at a time, of a checkpoint as many as are run together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantmoe.benchmarks.quality.divergence import Figures, Positions
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.interface import NUM_LOGITS, present
from quantmoe.exporter.folder.metadata import TARGET
from quantmoe.exporter.folder.model_file import load, model_path
from quantmoe.exporter.reading.windows import WINDOW, windows_of
from quantmoe.exporter.surveying.survey import is_model
from quantmoe.exporter.targets import CPU, TARGETS
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.opened_model import need_count

#: windows that read a checkpoint's layers together
TOGETHER = 4
#: what a window gives: logits f32 [tokens, vocabulary], and hidden states after each layer, f32 [tokens, width]
Outputs = tuple[np.ndarray, list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of :func:`evaluate`; its fields are the keys of ``--json``.

    Attributes:
        windows: number of windows.
        window: tokens of a window.
        figures: perplexities and divergence.
        layers: relative error of the hidden states after each decoder layer, root mean square. The last layer is
            measured after the final norm. None: not asked for.
        seconds: time that it took.
    """

    model: str
    against: str | None
    windows: int
    window: int
    figures: Figures
    layers: list[float] | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return asdict(self)


# over 60 lines: half say what its arguments mean
def evaluate(
    model: str | Path,
    text: str,
    *,
    against: str | Path | None = None,
    window: int = WINDOW,
    windows: int | None = None,
    layers: bool = False,
    threads: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    opened: Callable[[Generator], None] = lambda model: None,
) -> Evaluation:
    """Measure how well an exported model predicts a text.

    Args:
        model: an exported model or its folder, whose tokenizer reads the text.
        text: the text to predict. Tokens after the last whole window are ignored.
        against: another exported model, or a checkpoint. transformers runs a checkpoint in float32, one decoder layer
            at a time.
        window: tokens of a window.
        windows: largest number of windows; None: as many as the text has.
        layers: also compare hidden states; needs ``against``.
        threads: of each ONNX Runtime session; 0 is its choice.
        progress: called with tokens done, and tokens in all.
        opened: called with each exported model; another thread may interrupt it.

    Raises:
        OptionError: an argument that does not go with the others, or outside its range.
        ModelError: the model cannot be run, or the text is too short; both models differ in their vocabulary or layers.
        CheckpointError: ``against`` cannot be read.
    """
    need_count("window", window, 2)
    if windows is not None:
        need_count("windows", windows)
    if layers and against is None:
        raise OptionError("layers needs against: hidden states are compared")
    begin, path = time.perf_counter(), model_path(model)
    texts = windows_of(path.parent, text, window)[:windows]
    total = sum(map(len, texts)) * (1 + (against is not None))
    positions, errors, done = Positions(), [], 0

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(done, total)

    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(outputs(path, texts, layers=layers, threads=threads, tell=tell, opened=opened))
        theirs: Iterator[Outputs | None] = iter([None] * len(texts))
        if against is not None:
            theirs = stack.enter_context(
                outputs(Path(against), texts, layers=layers, threads=threads, tell=tell, opened=opened)
            )
        for ids in texts:  # a window's outputs are gone before the next one's are there
            errors.append(
                _compare(ids, next(ours), next(theirs), positions=positions, name=str(path), against=str(against))
            )
    difference, size = np.moveaxis(np.array(errors), -1, 0) if layers else (np.zeros((1, 0)),) * 2
    return Evaluation(
        model=str(model),
        against=None if against is None else str(against),
        windows=len(texts),
        window=len(texts[0]),
        figures=positions.figures(),
        layers=np.sqrt(difference.sum(0) / size.sum(0)).tolist() if layers else None,
        seconds=time.perf_counter() - begin,
    )


@contextlib.contextmanager
def outputs(
    path: Path,
    texts: Sequence[Sequence[int]],
    *,
    layers: bool,
    threads: int,
    tell: Callable[[int], None],
    opened: Callable[[Generator], None] = lambda model: None,
) -> Iterator[Iterator[Outputs]]:
    """Yield the outputs of a model, or of a checkpoint in transformers, for texts of one length, one after another."""
    if not is_model(path):
        yield _of_checkpoint(path, texts, layers, tell)
        return
    path = model_path(path)
    with _with_all_logits(path, layers) as (whole, names):
        device = TARGETS.get(load(path).metadata_props.get(TARGET, ""), CPU).device
        size = len(texts[0])
        with Generator(whole, threads, device=device, cuda_graph=False, num_logits=size) as generator:
            opened(generator)
            yield (_of_model(generator, ids, names, tell) for ids in texts)


def _of_model(generator: Generator, ids: Sequence[int], names: Sequence[str], tell: Callable[[int], None]) -> Outputs:
    generator.check(ids)
    past, parts, size = generator.start(), [], generator.chunk if len(ids) <= generator.short_context else len(ids)
    for at in range(0, len(ids), size):
        piece = np.array([ids[at : at + size]], np.int64)
        found = generator.run(generator.feed(piece, at) | past, piece.shape[1], at)
        past = {name: found[present(name)] for name in past}
        parts.append([found[name][0].astype(np.float32) for name in ("logits", *names)])
        tell(piece.shape[1])
    logits, *hidden = (np.concatenate(same) for same in zip(*parts, strict=True))
    return generator.finite(logits, len(ids)), hidden


def _of_checkpoint(
    path: Path, texts: Sequence[Sequence[int]], layers: bool, tell: Callable[[int], None]
) -> Iterator[Outputs]:
    from quantmoe.exporter.graph.streamed_model import Streamed  # needs torch
    from quantmoe.exporter.reading.formats import open_checkpoint
    from quantmoe.exporter.writing.prepare import open_format

    quantize = None if open_checkpoint(path).quantization else "none"
    streamed = Streamed(open_format(path, quantize, None, activations="float"))
    for at in range(0, len(texts), TOGETHER):
        for found in streamed.outputs(texts[at : at + TOGETHER], layers):
            tell(len(texts[0]))
            yield found


def _compare(
    ids: Sequence[int], ours: Outputs, theirs: Outputs | None, *, positions: Positions, name: str, against: str
) -> list[tuple[float, float]]:
    """Add a window to ``positions``, and return the squares of each layer's hidden states.

    Raises:
        ModelError: the outputs have unlike shapes.
    """
    (logits, hidden), other = ours, theirs or (None, [])
    if theirs is not None and (logits.shape, len(hidden)) != (theirs[0].shape, len(theirs[1])):
        sizes = ((part[0].shape[1], len(part[1])) for part in (ours, theirs))
        found, wanted = (f"a vocabulary of {v}" + (f", {n} layers" if n else "") for v, n in sizes)
        raise ModelError(f"{name} has {found}; {against} has {wanted}; expected the same model")
    positions.add(ids, logits, other[0])
    return [_squares(*pair) for pair in zip(hidden, other[1], strict=theirs is not None)]


def _squares(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Return the sums of squares of a difference, and of the expected values."""
    difference = found - wanted
    return float(np.vdot(difference, difference)), float(np.vdot(wanted, wanted))


@contextlib.contextmanager
def _with_all_logits(path: Path, layers: bool) -> Iterator[tuple[Path, list[str]]]:
    """Yield the model with the logits of all tokens, and the names of its outputs of hidden states.

    It is a file beside the model while the block runs, and reads the model's data files. A model that already has these
    outputs is yielded itself."""
    import onnx_ir as ir

    from quantmoe.exporter.graph.passes.every_token import every_logits, hidden_states

    graph = load(path)
    if not layers and NUM_LOGITS in graph.metadata_props:
        yield path, []
        return
    changed, names = every_logits(graph), hidden_states(graph, str(path)) if layers else []
    if not changed and not names:
        yield path, []
        return
    twin = path.with_name(f"evaluate.partial{path.suffix}")
    try:
        ir.save(graph, twin)
        yield twin, names
    finally:
        twin.unlink(missing_ok=True)
