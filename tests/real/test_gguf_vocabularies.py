"""Tokens of GGUF files are llama.cpp's of the same file, and beside them AutoTokenizer's. Needs llama-cpp-python."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from fetch import llama_cpp
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vocabularies import PACKAGES, VOCABULARIES, battery, package

from quantmoe.exporter.reading.formats import open_checkpoint
from quantmoe.exporter.writing.tokenizer import write_tokenizer

pytestmark = pytest.mark.real
FIXTURES = Path(__file__).parents[1] / "fixtures/gguf"
#: a vocabulary of llama.cpp's sources or of PACKAGES -> the model that gets it
FILES = {
    "llama-spm": "mixtral-Q5_0",
    "llama-bpe": "mixtral-Q5_0",
    "qwen2": "qwen2moe-Q8_0",
    "qwen35": "qwen35moe-Q4_0",
    "Qwen3": "qwen3moe-Q4_0",
    "gpt-oss": "gpt-oss-MXFP4",
}


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of FIXTURES with the vocabulary."""
    name = request.param
    source = llama_cpp() / f"models/ggml-vocab-{name}.gguf" if name not in PACKAGES else converted(name, tmp_path)
    model = gguf.GGUFReader(FIXTURES / f"{FILES[name]}.gguf")
    fields = dict(model.fields) | dict(gguf.GGUFReader(source).fields)
    kept = {name: field for name, field in model.fields.items() if not name.startswith(("GGUF.", "tokenizer."))}
    kept |= {name: field for name, field in fields.items() if name.startswith("tokenizer.")}
    for name in model.fields.keys() - gguf.GGUFReader(source).fields.keys():
        if name.startswith("tokenizer."):
            kept.pop(name, None)
    path = tmp_path / f"{request.param}.gguf"
    writer = gguf.GGUFWriter(path, kept.pop("general.architecture").contents())
    for name, field in kept.items():
        writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in model.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(name: str, folder: Path) -> Path:
    """What llama.cpp's converter makes of a real vocabulary."""
    checkpoint, path = folder / "checkpoint", folder / "vocabulary.gguf"
    shutil.copytree(package(name), checkpoint)
    kind = VOCABULARIES[name]
    AutoConfig.for_model(kind, architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]).save_pretrained(checkpoint)
    command = [sys.executable, llama_cpp() / "convert_hf_to_gguf.py", checkpoint, "--vocab-only", "--outfile", path]
    subprocess.run(command, check=True, capture_output=True)
    return path


def of_llama_cpp(path: Path) -> Callable[[str, bool], list[int]]:
    """Return llama.cpp's tokenizer of a file: (text, with special tokens) -> ids."""
    import llama_cpp as llama

    model = llama.Llama(str(path), vocab_only=True, verbose=False)

    def ids(text: str, special: bool) -> list[int]:
        vocabulary = llama.llama_model_get_vocab(model.model)
        octets = text.encode()
        found = (ctypes.c_int32 * (len(octets) + 8))()
        count = llama.llama_tokenize(vocabulary, octets, len(octets), found, len(found), special, True)
        assert count >= 0
        return list(found[:count])

    return ids


def differing(ours: Any, ids: Callable[[str, bool], list[int]]) -> list[str]:
    """Return the texts whose ids differ, the shortest first."""
    texts = [
        text
        for text in battery()
        if any(ours.encode(text, add_special_tokens=special).ids != ids(text, special) for special in (True, False))
    ]
    return sorted(texts, key=len)


def test_gguf(file: Path, tmp_path: Path, found: Callable[[str], None]) -> None:
    """llama.cpp's ids, except two things that are said in docs/lab/gguf-tokens.md."""
    ckpt, out = open_checkpoint(file), tmp_path / "out"
    out.mkdir()
    remark = write_tokenizer(ckpt.companions, lambda name: out / name, gguf=True)
    ours = Tokenizer.from_file(str(out / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    differ = differing(ours, lambda text, special: auto(text, add_special_tokens=special).input_ids)
    said = f"{file.stem} as GGUF: {len(battery())} texts"
    found(f"{said}, AutoTokenizer of the file: {len(differ)} differ {differ[:2]!a}; of OUTDIR: {remark or 'none'}")
    try:
        theirs = of_llama_cpp(file)
    except ModuleNotFoundError as reason:
        found(f"{said}, llama.cpp: not run: {reason}")
        return
    differ = differing(ours, theirs)
    found(f"{said}, llama.cpp: {len(differ)} differ {differ[:2]!a}")
    for text in differ:
        assert "/s>" in text.lower() or any(ord(character) > 0xFFFF for character in text), text
