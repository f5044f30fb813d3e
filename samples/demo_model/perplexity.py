"""Perplexity on the books that were held back: perplexity.py [CHECKPOINT ...], by default of the demo's own.

Of a checkpoint in transformers, in float32 on what its weights stand for; of a quantized one also of its exports with
float and with int8 activations, and with int8 and e4m3 caches, in ONNX Runtime. All on heldout.txt in windows of 1,024
tokens, whose first is not predicted.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import quantmoe

HERE = Path(__file__).parent
WINDOW = 1024
#: activations and KV cache of exports
OURS = (("float", "f16"), ("int8", "f16"), ("float", "int8"), ("float", "fp8"))


def perplexity(scores: Callable[[list[int]], np.ndarray], tokens: list[int]) -> float:
    """``scores`` gives logits [tokens, vocabulary] of a window."""
    losses = []
    for begin in range(0, len(tokens) - 1, WINDOW):
        window = tokens[begin : begin + WINDOW]
        logits = scores(window)[:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        losses.append(
            np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.array(window[1:])[:, None], 1)[:, 0]
        )
    return math.exp(np.concatenate(losses).mean())


def main() -> None:
    logging.disable_progress_bar()
    for folder in map(Path, sys.argv[1:] or [HERE / "checkpoint"]):
        tokens = AutoTokenizer.from_pretrained(folder)((HERE / "heldout.txt").read_text(encoding="utf-8"))["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        def expected(window: list[int], model: torch.nn.Module = model) -> np.ndarray:
            with torch.no_grad():
                return model(torch.tensor([window])).logits[0].numpy()

        print(f"{folder}: transformers {perplexity(expected, tokens):.3f}", flush=True)
        for activations, cache in OURS if hasattr(model.config, "quantization_config") else ():
            with tempfile.TemporaryDirectory() as out:
                quantmoe.export(folder, out, activations=activations, cache=cache, logits="all")
                found = perplexity(quantmoe.Generator(out).scores, tokens)
                print(f"{folder}: quantmoe, {activations} activations, {cache} cache {found:.3f}", flush=True)


if __name__ == "__main__":
    main()
