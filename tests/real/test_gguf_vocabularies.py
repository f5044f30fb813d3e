"""Tokens of GGUF files are llama.cpp's of the same file, and beside them AutoTokenizer's. Needs llama-cpp-python."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real.fetch import llama_cpp
from real.vocabularies import PACKAGES, VOCABULARIES, battery, package
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

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


#: bytes of a value, by its type in GGUF; 8 is a string, 9 an array
BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@pytest.fixture(params=FILES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of FIXTURES with the vocabulary."""
    name = request.param
    source = llama_cpp() / f"models/ggml-vocab-{name}.gguf" if name not in PACKAGES else converted(name, tmp_path)
    model = (FIXTURES / f"{FILES[name]}.gguf").read_bytes()
    fields, end = fields_of(model)
    others, _ = fields_of(source.read_bytes())
    kept = {name: field for name, field in fields.items() if not name.startswith("tokenizer.")}
    kept |= {name: field for name, field in others.items() if name.startswith("tokenizer.")}
    tensors = struct.unpack_from("<Q", model, 8)[0]
    begin = end
    for _ in range(tensors):
        end = after(model, end, 8)
        end += 4 + 8 * struct.unpack_from("<I", model, end)[0] + 12
    head = struct.pack("<4sIQQ", b"GGUF", 3, tensors, len(kept)) + b"".join(kept.values()) + model[begin:end]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + model[end + -end % 32 :])
    return path


def fields_of(data: bytes) -> tuple[dict[str, bytes], int]:
    """Return the bytes of a file's fields by their names, and where they end."""
    found, at = {}, 24
    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        begin, at = at, after(data, at, 8)
        name = data[begin + 8 : at].decode()
        at = after(data, at + 4, struct.unpack_from("<I", data, at)[0])
        found[name] = data[begin:at]
    return found, at


def after(data: bytes, at: int, kind: int) -> int:
    """Return where the value that begins here ends."""
    if kind == 8:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    if kind != 9:
        return at + BYTES[kind]
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    for _ in range(count):
        at = after(data, at, kind)
    return at


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
    """llama.cpp's ids, except what docs/lab/gguf-tokens.md lists."""
    ckpt, out = open_checkpoint(file), tmp_path / "out"
    out.mkdir()
    remark = write_tokenizer(ckpt.companions, lambda name: out / name, gguf=True)
    ours = Tokenizer.from_file(str(out / "tokenizer.json"))
    said = f"{file.stem} as GGUF: {len(battery())} texts"
    try:
        auto = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except TypeError as reason:  # of transformers 5.24, gpt-oss' rope
        found(f"{said}, AutoTokenizer does not read the file: {reason}")
    else:
        differ = differing(ours, lambda text, special: auto(text, add_special_tokens=special).input_ids)
        found(f"{said}, AutoTokenizer of the file: {len(differ)} differ {differ[:2]!a}")
    found(f"{said}, AutoTokenizer of OUTDIR: {remark or '0 differ'}")
    if file.stem in PACKAGES:
        auto = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
        differ = differing(ours, lambda text, special: auto(text, add_special_tokens=special).input_ids)
        found(f"{said}, AutoTokenizer of the converted checkpoint: {len(differ)} differ {differ[:2]!a}")
    try:
        theirs = of_llama_cpp(file)
    except ModuleNotFoundError as reason:
        found(f"{said}, llama.cpp: not run: {reason}")
        return
    differ = differing(ours, theirs)
    found(f"{said}, llama.cpp: {len(differ)} differ {differ[:2]!a}")
    for text in differ:
        assert not text.isascii() or "/s>" in text, text
