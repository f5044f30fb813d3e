"""Architectures of GGUF files: llama.cpp's converter and transformers on the same tiny models.

fixtures/make_gguf_architectures.py makes the files and the logits.
"""

from __future__ import annotations

import lzma
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.harness.sweeps import every

from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.gguf.families import FAMILIES
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

FILES = Path(__file__).parents[1] / "fixtures" / "gguf_architectures"
LOGITS = dict(np.load(FILES / "logits.npz"))
NAMES = sorted(set(LOGITS) - {"ids"})
#: names of the files of bench's and inspect's tests; quick runs take these alone
BRIEF = ("deepseek2", "nemotron_h_moe", "qwen3next")


def test_every_architecture_has_a_file() -> None:
    """Five have theirs in fixtures/gguf."""
    others = {"qwen2moe", "qwen3moe", "qwen35moe", "gpt-oss", "llama"}
    assert {name.partition(" ")[0] for name in NAMES} | others == FAMILIES.keys()


@pytest.mark.parametrize(("key", "value"), [("attn_logit_softcapping", 30.0), ("attention.sliding_window", 8)])
def test_a_key_that_is_not_read(key: str, value: float, tmp_path: Path) -> None:
    """A model that computes something else is refused, naming the key."""
    path = file("granitemoe", tmp_path)
    reader, other = gguf.GGUFReader(path), tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "granitemoe")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], kind)
    kind = gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32
    writer.add_key_value(f"granitemoe.{key}", value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=rf"granitemoe\.{key} is {value}, expected 0.*are not read of granitemoe"):
        open_checkpoint(other)


def file(name: str, folder: Path) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(lzma.decompress((FILES / f"{name.replace(' ', '-')}.gguf.xz").read_bytes()))
    return path


def difference(found: np.ndarray, name: str) -> float:
    """Return the largest difference from transformers' logits, by the largest of them."""
    return float(np.abs(found - LOGITS[name]).max() / np.abs(LOGITS[name]).max())


@pytest.mark.parametrize("name", NAMES)
def test_names_and_numbers(name: str, tmp_path: Path) -> None:
    """transformers gives the same logits on what is read: one float32 model run twice, but norms with 1 added."""
    model = dequantized(Skeleton(find_format(open_checkpoint(file(name, tmp_path)))))
    with torch.no_grad():
        found = model(torch.from_numpy(LOGITS["ids"][None])).logits[0].numpy()
    assert difference(found, name) < 1e-5


@pytest.mark.parametrize("name", every([*BRIEF, *sorted(set(NAMES) - set(BRIEF))], len(BRIEF)))
def test_export(name: str, tmp_path: Path) -> None:
    """The exported model gives transformers' logits, with the bound of export/architectures/test_architectures.py."""
    export(file(name, tmp_path), tmp_path / "out", activations="float", cache="f32", logits="all")
    generator = Generator(tmp_path / "out")
    assert difference(generator.step(LOGITS["ids"][None], generator.start())[0], name) < 2e-5


def quantized(source: Path, target: Path, wide: bool) -> None:
    """Write a file with its matrices in Q8_0, or with their values in F32."""
    reader = gguf.GGUFReader(source)
    kept = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(target, kept.pop("general.architecture").contents())
    for name, field in kept.items():
        writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    kind = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        data = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        floats = tensor.name.endswith(("ssm_norm.weight", "ssm_a")) or "hc_" in tensor.name  # as llama.cpp keeps them
        small = len(shape) < 2 or shape[-1] % 32 or shape[-2] == 1 or floats
        if small:
            writer.add_tensor(tensor.name, data)
        elif wide:
            blocks = gguf.quantize(data, kind)
            writer.add_tensor(tensor.name, gguf.dequantize(blocks, kind).reshape(shape))
        else:
            writer.add_tensor(tensor.name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_weights(name: str, tmp_path: Path) -> None:
    """Rows, columns and parts of matrices are brought into transformers' order in blocks as in floats."""
    source = file(name, tmp_path)
    for wide in (False, True):
        quantized(source, tmp_path / f"{wide}.gguf", wide)
    blocks = find_format(open_checkpoint(tmp_path / "False.gguf"))
    floats = open_checkpoint(tmp_path / "True.gguf")
    assert sum(blocks.is_quantized(name.rpartition(".")[0]) for name in blocks.ckpt.names()) > 20
    for name in blocks.ckpt.names():
        module, _, leaf = name.rpartition(".")
        if leaf == "Q8_0":
            np.testing.assert_array_equal(
                blocks.matrix(module).dequantize(np.float32), floats.tensor(f"{module}.weight")
            )
        else:
            np.testing.assert_array_equal(blocks.ckpt.tensor(name), floats.tensor(name))
