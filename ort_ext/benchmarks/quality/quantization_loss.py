"""Loss of an export's quantization on a built-in text: the line that ends ``export --quantize``."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quantmoe.exporter.errors import ModelError

#: the beginning of the demo's held-out text
TEXT = Path(__file__).with_name("heldout.txt")
#: tokens of it, at most: one window
TOKENS = 512
#: of the export's time that measuring may add, and of that what the checkpoint's run may take
SHARE, OF_CHECKPOINT = 0.1, 0.5


class _TooLongError(Exception):
    pass


def lost(checkpoint: Path, output: Path, seconds: float, layers: int | None = None) -> str:
    """Return a line that says how far the predictions of an export are from its checkpoint's, or why it does not.

    Args:
        seconds: that the export took. layers: that it has, of the checkpoint's first; None: all.
    """
    how = f"quantmoe evaluate {output} --text FILE --against {checkpoint}"
    begin, limit = time.perf_counter(), SHARE * OF_CHECKPOINT * seconds
    missing = [name for name in ("onnxruntime", "tokenizers") if find_spec(name) is None]
    if missing:
        return f"what was lost is not measured: {missing[0]} is not installed"

    def check(done: int, total: int) -> None:
        """End what would take too long: from the first layer on it is known how long all of them take."""
        if (time.perf_counter() - begin) * total / done > limit:
            raise _TooLongError

    try:
        return _measured(checkpoint, output, layers, check)
    except _TooLongError:
        share = f"more than {SHARE:.0%} of the export's time"
        return f"what was lost is not measured: it would take {share}" + (f"; {how} does it" if layers is None else "")
    except (ModelError, FileNotFoundError) as error:
        return f"what was lost is not measured: {error}"


def _measured(checkpoint: Path, output: Path, layers: int | None, check: Any) -> str:
    from quantmoe.benchmarks.quality.divergence import Positions
    from quantmoe.benchmarks.quality.evaluate import outputs
    from quantmoe.exporter.graph.streamed_model import Streamed
    from quantmoe.exporter.reading.windows import windows_of
    from quantmoe.exporter.writing.prepare import open_format

    ids = windows_of(output, TEXT.read_text(encoding="utf-8"), TOKENS)[0]
    streamed = Streamed(open_format(checkpoint, "none", None, activations="float"), layers, check)
    ((base, _),) = streamed.outputs([ids])
    positions = Positions()
    with outputs(output, [ids], layers=False, threads=0, tell=lambda tokens: None) as found:
        for logits, _ in found:
            positions.add(ids, logits, base)
    figures = positions.figures()
    assert figures.kld
    assert figures.same_top
    assert figures.base_perplexity
    return (
        f"lost on {len(ids)} tokens of a built-in text: KL {figures.kld.mean:.4f} nats, same likeliest token "
        f"{figures.same_top.mean:.1%}, perplexity {figures.perplexity.mean:.2f} instead of "
        f"{figures.base_perplexity.mean:.2f}"
    )
