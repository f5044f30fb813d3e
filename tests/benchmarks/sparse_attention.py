"""A token's time of layers of published sizes, with the nodes of sparse attention and in standard nodes.

PYTHONPATH=tests python tests/benchmarks/sparse_attention.py FOLDER [ROUNDS | prompt] [MODEL]: the
models stay in FOLDER. Their tokens are timed in turn; with prompt a prompt of each is. MODEL: deepseek_v32, one layer,
or deepseek_v4, two layers, of 4 and of 128 tokens a compressed key.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from export.architectures.test_architectures import fields, make_checkpoint

from quantmoe.benchmarks.random_checkpoint import CONFIGS
from quantmoe.exporter.graph.architectures.extended_cache import deepseek_v4
from quantmoe.exporter.graph.modules import latent
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

#: what DeepSeek-V3.2 has from V3
KEPT = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
)
V32: dict[str, Any] = {name: CONFIGS["deepseek-v3"][name] for name in KEPT} | {
    "num_hidden_layers": 1,
    "layer_types": fields("deepseek_v32")["layer_types"][:1],
    "mlp_layer_types": ["sparse"],
    "head_dim": 64,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "moe_intermediate_size": 256,
    "vocab_size": 512,
}
#: transformers' defaults
V4: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["moe"] * 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "max_position_embeddings": 1 << 20,
    "moe_intermediate_size": 256,
    "vocab_size": 512,
}
MODELS = {"deepseek_v32": V32, "deepseek_v4": V4}


def make(folder: Path, model: str) -> None:
    """Export the model twice."""
    make_checkpoint(folder / "checkpoint", model, **MODELS[model])
    export(folder / "checkpoint", folder / "node", quantize="int8")
    module: Any = deepseek_v4 if model == "deepseek_v4" else latent
    kind = module.KIND
    module.KIND = dataclasses.replace(kind, fits=lambda m: kind.fits(m) and not hasattr(m, "indexer"))
    export(folder / "checkpoint", folder / "standard", quantize="int8")


class Token:
    """A run of one token after so many."""

    def __init__(self, folder: Path, tokens: int):
        generator, rng = Generator(folder, threads=2), np.random.default_rng(0)
        self.session, room = generator.session, int(generator.shares_buffer)  # else the cache grows, in new memory
        self.binding = self.session.io_binding()
        feed: dict[str, np.ndarray] = {"input_ids": np.array([[5]]), "position_ids": np.array([[tokens]])}
        feed["attention_mask"] = np.ones((1, tokens + 1), np.int64)
        for name, (_, dtype) in generator.past.items():
            shape = generator.shape(name)
            if shape[-2] == 0:
                shape[-2] = tokens + room
            feed[name] = np.abs(rng.standard_normal(shape)).astype(dtype)  # above 0: sums of exponentials, too
        values = {i.name: ort.OrtValue.ortvalue_from_numpy(feed[i.name]) for i in self.session.get_inputs()}
        for name, value in values.items():
            self.binding.bind_ortvalue_input(name, value)
        for output in self.session.get_outputs():
            past = values.get(output.name.replace("present", "past_key_values"))
            if past is not None and room:
                self.binding.bind_ortvalue_output(output.name, past)
            else:
                self.binding.bind_output(output.name)

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.session.run_with_iobinding(self.binding)
        return time.perf_counter() - begin


def prompt(folder: Path, tokens: int = 4096, step: int = 512) -> None:
    """Print after how many seconds each step of a prompt ended."""
    ids = np.random.default_rng(0).integers(3, V32["vocab_size"], (1, tokens))
    for name in ("node", "standard"):
        generator, ends = Generator(folder / name, threads=2), []
        generator.step(ids[:, :step], generator.start(1))
        past, begin = generator.start(1), time.perf_counter()
        for at in range(0, tokens, step):
            _, past = generator.step(ids[:, at : at + step], past)
            ends.append(time.perf_counter() - begin)
        print(f"prompt of {tokens:,} tokens {name}: {', '.join(f'{end:.2f}' for end in ends)} s")


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "20"
    model = sys.argv[3] if len(sys.argv) > 3 else "deepseek_v32"
    if not (folder / "standard").exists():
        make(folder, model)
    if what == "prompt":
        return prompt(folder)
    rounds = int(what)
    for tokens in (2048, 4096, 16384, 65536):
        runs = [Token(folder / name, tokens) for name in ("node", "standard")]
        times = np.array([[run.seconds() for run in runs] for _ in range(rounds + 2)])[2:] * 1e3
        for name, own in zip(("node", "standard"), times.T, strict=True):
            print(f"after {tokens:,} tokens {name}: {min(own):.1f} ms, median {median(own):.1f}")


if __name__ == "__main__":
    main()
