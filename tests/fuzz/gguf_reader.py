"""atheris on the GGUF reader: a CheckpointError, or experts as floats.

    python tests/fuzz/gguf_reader.py CORPUS [libFuzzer's options]

The corpus gets one small file of each kind first. libFuzzer's last line, "Done N runs", has the executions.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris
import gguf
import numpy as np

with atheris.instrument_imports(include=["quantmoe.exporter.reading"]):
    from quantmoe.exporter.reading.checkpoint import CheckpointError
    from quantmoe.exporter.reading.formats import find_format, moe_layers
    from quantmoe.exporter.reading.gguf import GGUF

#: architecture, ggml type of the experts, whether gate and up are one tensor, whether each expert has a tensor
KINDS = (("qwen3moe", "Q4_0", False, False), ("qwen3moe", "Q8_0", True, False), ("llama", "MXFP4", False, True))
TOKENS, HIDDEN, EXPERTS = 4, 32, 2


def write_seed(path: Path, architecture: str, kind: str, merged: bool, apart: bool) -> None:
    """A model of one layer, whose tensors are 0."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"embedding_length": HIDDEN, "block_count": 1, "context_length": 8, "attention.head_count": 1,
             "expert_count": EXPERTS, "expert_used_count": 1, "expert_feed_forward_length": HIDDEN,
             "feed_forward_length": HIDDEN}  # fmt: skip
    for name, value in sizes.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "</s>", "<|im_end|>"])
    writer.add_token_types([1] * TOKENS)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((TOKENS, HIDDEN), np.float32))
    number = gguf.GGMLQuantizationType[kind]
    weights, octets = gguf.GGML_QUANT_SIZES[number]
    rows = {"gate_up": 2 * HIDDEN, "down": HIDDEN} if merged else dict.fromkeys(("gate", "up", "down"), HIDDEN)
    for name, count in rows.items():
        blocks = np.zeros((EXPERTS, count, HIDDEN // weights * octets), np.uint8)
        if apart:
            for e in range(EXPERTS):
                writer.add_tensor(f"blk.0.ffn_{name}.{e}.weight", blocks[e], raw_dtype=number)
        else:
            writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for i, kind in enumerate(KINDS):
        write_seed(corpus / f"seed{i}", *kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"

        def one(data: bytes) -> None:
            path.write_bytes(data)
            with suppress(CheckpointError):
                ckpt = GGUF(path)
                for layer in moe_layers(find_format(ckpt)):
                    layer.expert(0).down.dequantize()

        atheris.Setup(sys.argv, one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
