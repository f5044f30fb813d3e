"""A whole exported model on this machine and on aarch64: `model.py FOLDER`, run once on each, prints JSON.

`model.py FOLDER HERE.json THERE.json` compares: greedy tokens, and the KL divergence of the next-token distributions
for the same random tokens. A node of the same inputs gives the same bytes; ONNX Runtime's own float products do not.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from quantmoe.runtime.generate import Generator

PROMPT, NEW = [5, 17, 42, 99, 7, 1, 64, 200], 16


def run(folder: str) -> dict[str, object]:
    generator = Generator(folder, threads=2)
    tokens = generator.greedy(PROMPT, NEW).tokens
    ids = np.random.default_rng(0).integers(0, generator.vocabulary, 32)
    logits = generator.scores(ids.tolist()).astype(np.float64)
    return {"ort": onnxruntime.__version__, "tokens": tokens, "logits": logits.tolist()}


def compare(here: dict, there: dict) -> int:
    a, b = np.array(here["logits"]), np.array(there["logits"])
    p, q = (
        x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True) for x in (a, b)
    )
    kl = (np.exp(p) * (p - q)).sum(1)
    print(f"ONNX Runtime {here['ort']} here, {there['ort']} on aarch64")
    print(f"greedy tokens here    {here['tokens']}\ngreedy tokens aarch64 {there['tokens']}")
    print(f"KL(here || aarch64): mean {kl.mean():.2e}, largest {kl.max():.2e} of {len(kl)} positions; "
          f"largest logit difference {np.abs(a - b).max():.2e} of {np.abs(a).max():.1f}")  # fmt: skip
    # int8 activations round differently where a float sum of ONNX Runtime's differs by one bit
    return int(here["tokens"] != there["tokens"] or kl.max() > 1e-3)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(run(sys.argv[1])))
    else:
        sys.exit(compare(*(json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[2:4])))
