"""``--calibrate``: what weighs the errors of ``--quantize``, from a text or from llama.cpp's importance matrix."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.folder.files import CALIBRATION
from quantmoe.exporter.folder.record import new_hash
from quantmoe.exporter.reading.checkpoint import is_gguf
from quantmoe.exporter.reading.gguf.imatrix import read_imatrix
from quantmoe.exporter.reading.weights.rounding import weighed
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.reading.windows import WINDOW, windows_of
from quantmoe.exporter.writing.identity import export_id
from quantmoe.exporter.writing.prepare import Prepared, open_format

#: measured on a core of an Intel Xeon at 2.5 GHz: weights that a token is multiplied by in a CPU second, and bytes of
#: a checkpoint that become floats
MULTIPLYING, DECODING = 17.5e9, 460e6
#: scores of attention that are in memory at a time, and features beside them: copies of a window's
_SCORES, _FEATURES = 2.5, 4


class Cost(NamedTuple):
    """The cost of reading a text: tokens, seconds on this machine's cores, bytes of memory beside the imports'."""

    tokens: int
    seconds: float
    memory: float


def text_of(ready: Prepared, options: Options) -> list[list[int]]:
    """Return the windows of the text that ``--calibrate`` names; none where it names an importance matrix.

    Raises:
        OptionError: there is no such file, or it is no text. OSError: it cannot be read.
    """
    path = Path(str(options.calibrate))
    if not path.is_file():
        raise OptionError(f"calibrate {path}: no such file; expected text, or llama-imatrix's file in GGUF")
    if is_gguf(path):
        return []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise OptionError(f"calibrate {path}: expected text in UTF-8, or llama-imatrix's file in GGUF") from None
    if not text.strip():
        raise OptionError(f"calibrate {path}: expected text, found no text")
    return windows_of(ready.format.ckpt.companions, text, WINDOW)


def cost(ready: Prepared, options: Options) -> Cost | None:
    """Estimate what ``--calibrate`` takes; None: it reads no text.

    Raises:
        OptionError: the file is no text. CheckpointError: the importance matrix is none. OSError: the file cannot be
            read.
    """
    if options.calibrate is None:
        return None
    if not (windows := text_of(ready, options)):
        read_imatrix(Path(str(options.calibrate)))
        return None
    from quantmoe.exporter.graph.calibrating import TOGETHER  # needs torch

    skeleton, chosen, length = ready.parts[0].skeleton, ready.parts[0].chosen, len(windows[0])
    config, layers = skeleton.model.config, skeleton.experts.values()
    expert = [(2 + layer.gated) * layer.hidden_size * layer.intermediate_size for layer in layers]
    active = sum((layer.top_k + layer.every - layer.num_experts) * n for layer, n in zip(layers, expert, strict=True))
    active += sum(spec.in_features * spec.out_features for spec in chosen.linears.values())
    streamed = sum(prod(tensor.shape) for name, tensor in skeleton.tensors.items() if ".layers." in name)
    rest = sum(prod(tensor.shape) for tensor in skeleton.tensors.values()) - streamed
    largest = max((layer.every * n for layer, n in zip(layers, expert, strict=True)), default=0)
    tokens, rounds = len(windows) * length, -(-len(windows) // TOGETHER)
    seconds = tokens * active / MULTIPLYING + rounds * ready.format.ckpt.size / DECODING
    heads = getattr(config, "num_attention_heads", None)
    scores = _SCORES * (heads if isinstance(heads, int) else 64) * length  # a few configurations have a list
    window = 4 * length * (scores + _FEATURES * config.hidden_size)
    layer_and_next = 2 * (largest + streamed / config.num_hidden_layers)
    memory = 4 * (rest + layer_and_next) + min(TOGETHER, len(windows)) * window
    return Cost(tokens, seconds / native.cpus(), memory)


def weigh(
    checkpoint: str | Path, ready: Prepared, options: Options, folder: Path, progress: Callable[[str, int, int], None]
) -> str:
    """Give the format the importance of its weights' inputs, and return a remark on the text.

    Args:
        folder: of the export, which keeps what was read of the text until the export ends well.
    """
    from quantmoe.exporter.graph.calibrating import Kept, calibrate  # needs torch

    assert isinstance(ready.format, Unquantized)
    if not (windows := text_of(ready, options)):
        means = read_imatrix(Path(str(options.calibrate)))
        ready.format.importance |= {name: weighed(mean) for name, mean in means.items()}
        return f"errors are weighed by {options.calibrate}"
    text = new_hash()
    text.update(np.array(windows, "<i8").tobytes())
    kept = Kept(
        folder / CALIBRATION, f"{export_id(ready.format.ckpt, Options(layers=options.layers))} {text.hexdigest()}"
    )
    found = calibrate(
        open_format(checkpoint, "none", None, activations="float"),
        windows,
        options.layers,
        lambda done, total: progress("calibrating", done, total),
        kept,
    )
    ready.format.importance |= found.importance
    unreached = f"; {found.unreached} of {found.experts} experts were not reached" if found.unreached else ""
    return f"calibrated on {len(windows) * len(windows[0]):,} tokens of {options.calibrate}{unreached}"
