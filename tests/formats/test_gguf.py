"""GGUF files: blocks against gguf-py's numbers, llama.cpp's converter against transformers, damaged headers."""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.harness import pages
from support.harness.sweeps import every
from transformers import AutoTokenizer

from quantmoe.benchmarks.random_checkpoint import CONFIGS, cut
from quantmoe.benchmarks.random_gguf import UNSLOTH as UNSLOTH_FILES
from quantmoe.benchmarks.random_gguf import write_gguf
from quantmoe.custom_ops.layouts import cpu_panel, marlin
from quantmoe.exporter.choosing.choose import choose_experts
from quantmoe.exporter.errors import CheckpointError, ModelError
from quantmoe.exporter.folder.files import LFS_POINTER
from quantmoe.exporter.folder.model_file import load
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting import unpack
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.reading.gguf.blocks import CARRIED
from quantmoe.exporter.reading.gguf.header import MAX_METADATA, TYPES, read_header
from quantmoe.exporter.report import print_survey
from quantmoe.exporter.surveying.explain import explain
from quantmoe.exporter.surveying.survey import is_model, survey
from quantmoe.exporter.writing.battery import texts
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.tokenizer import write_tokenizer
from quantmoe.runtime.generate import Generator

FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
LOGITS = dict(np.load(FILES / "logits.npz"))
NAMES = sorted(set(LOGITS) - {"ids"})
DECODER = "qwen3moe.embedding_length", 64


@pytest.mark.parametrize(
    ("name", "remark"), [("qwen3moe-Q4_0", ""), ("qwen35moe-Q4_0", "AutoTokenizer of this folder")]
)
def test_a_tokenizer_is_the_files_own(name: str, remark: str, tmp_path: Path) -> None:
    """Its ids are those that AutoTokenizer gives for the file. Qwen3.5's class adds NFC, which llama.cpp has not."""
    ckpt = open_checkpoint(FILES / f"{name}.gguf")
    found = write_tokenizer(ckpt.companions, lambda name: tmp_path / name, gguf=True)
    assert remark in found
    assert bool(found) == bool(remark)
    auto = AutoTokenizer.from_pretrained(FILES, gguf_file=f"{name}.gguf")
    ours = load_tokenizer(tmp_path)
    assert [encoding.ids for encoding in ours.encode_batch(texts())] == auto(texts()).input_ids


def test_no_token_is_beyond_the_vocabulary(tmp_path: Path) -> None:
    """Transformers' class for such files has a token of its own, which files may lack."""
    name = "mixtral-Q5_0"
    assert max(AutoTokenizer.from_pretrained(FILES, gguf_file=f"{name}.gguf")("<|endoftext|>").input_ids) == 384
    ckpt = open_checkpoint(FILES / f"{name}.gguf")
    assert max(load_tokenizer(ckpt.companions).encode("<|endoftext|>").ids) < 384
    assert write_tokenizer(ckpt.companions, lambda name: tmp_path / name, gguf=True) == ""


@pytest.mark.parametrize("begun", [True, False])
def test_spaces_before_texts_are_llama_cpps(begun: bool, tmp_path: Path) -> None:
    """SentencePiece puts a space before a text and after each special token, whatever follows."""
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "\u2581b", *(f"[{i}]" for i in range(376))]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 381],
        "tokenizer.ggml.merges": ["\u2581 a", "\u2581 b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.pre": None,
    } | ({} if begun else {"tokenizer.ggml.add_space_prefix": False})
    file = rewritten("mixtral-Q5_0", tmp_path / "model.gguf", fields)
    ckpt = open_checkpoint(file)
    tokenizer = load_tokenizer(ckpt.companions)
    first = [3] if begun else []
    assert tokenizer.encode(" a").ids == [1, *first, 6]
    assert tokenizer.encode("</s> b").ids == [1, 2, *first, 7]
    assert tokenizer.encode("a</s>b").ids == ([1, 6, 2, 7] if begun else [1, 4, 2, 5])
    assert tokenizer.decode(tokenizer.encode("a b").ids) == "a b"


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_words_of_llama_3_stay_whole(pre: str, tmp_path: Path) -> None:
    """Where they are tokens, and texts begin with BOS although the file does not say so, as in llama.cpp."""
    fields = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 1}
    file = rewritten("mixtral-Q5_0", tmp_path / "model.gguf", fields)
    ckpt = open_checkpoint(file)
    model = json.loads((ckpt.companions / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    assert bool(model["ignore_merges"]) == (pre == "llama-bpe")
    assert (load_tokenizer(ckpt.companions).encode("a").ids[0] == 1) == (pre == "llama-bpe")


def test_special_tokens_of_other_characters_than_bytes_stay_whole(tmp_path: Path) -> None:
    """transformers leaves out DeepSeek's, whose bars and spaces are no letters of a byte, and gives BOS a new id."""
    ends, said = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cthink\uff5c>"
    found = gguf.GGUFReader(FILES / "mixtral-Q5_0.gguf").fields
    tokens, kinds = (found[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    tokens[380:382], kinds[380:382] = [ends, said], [3, 4]
    fields = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 380,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.pre": "deepseek-r1-qwen",
    }
    ckpt = open_checkpoint(rewritten("mixtral-Q5_0", tmp_path / "model.gguf", fields))
    tokenizer = load_tokenizer(ckpt.companions)
    a = tokenizer.encode("a", add_special_tokens=False).ids
    assert tokenizer.encode(f"a{said}a{ends}a").ids == [380, *a, 381, *a, 380, *a]
    assert tokenizer.decode([*a, 381, 380, *a]) == f"a{said}a"
    assert tokenizer.get_vocab_size() == 384


@pytest.mark.parametrize("pre", ["refact", "default", None])
def test_a_rule_for_words_that_transformers_does_not_have(pre: str | None, tmp_path: Path) -> None:
    """Texts would be split by another rule, without a word."""
    ckpt = open_checkpoint(rewritten("mixtral-Q5_0", tmp_path / "model.gguf", {"tokenizer.ggml.pre": pre}))
    assert not (ckpt.companions / "tokenizer.json").exists()
    assert f"(tokenizer.ggml.pre is {pre!r}, a rule for words" in ckpt.no_tokenizer


def small_file(path: Path, kind: str, blocks: np.ndarray) -> Path:
    """A Qwen3-MoE of one layer and two experts, whose experts have these blocks [E, N, bytes] in all projections."""
    n, k = blocks.shape[1], blocks.shape[2] // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    k *= gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    assert n == k
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, value in (
        ("embedding_length", n),
        ("block_count", 1),
        ("attention.head_count", 1),
        ("context_length", 8),
    ):
        writer.add_uint32(f"qwen3moe.{name}", value)
    for name, value in (("expert_count", len(blocks)), ("expert_used_count", 1), ("expert_feed_forward_length", k)):
        writer.add_uint32(f"qwen3moe.{name}", value)
    writer.add_float32("qwen3moe.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", np.ones((4, n), np.float32))
    for part in ("gate", "up", "down"):
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rewritten(
    source: str,
    path: Path,
    fields: Mapping[str, Any] = MappingProxyType({}),
    tensors: Callable[[dict[str, Any]], dict[str, Any]] = lambda found: found,
) -> Path:
    """A fixture with other metadata and tensors.

    Args:
        fields: key -> value of the old one's type, or of a new one's: an integer or a list of strings.
        tensors: name -> gguf-py's tensor in, name -> (data, type) or gguf-py's tensor out.
    """
    reader = gguf.GGUFReader(FILES / f"{source}.gguf")
    kept = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, kept.pop("general.architecture").contents())
    for name in fields.keys() | kept.keys():
        new = gguf.GGUFValueType.BOOL if isinstance(fields.get(name), bool) else gguf.GGUFValueType.UINT32
        types = kept[name].types if name in kept else [new]
        value = fields.get(name, kept[name].contents() if name in kept else None)
        if value is not None:
            writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    for name, found in tensors({tensor.name: tensor for tensor in reader.tensors}).items():
        data, kind = (found.data, found.tensor_type) if isinstance(found, gguf.ReaderTensor) else found
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: str, experts: int, size: int, rows: int | None = None, spread: float = 1.0) -> np.ndarray:
    """Return any codes, and scales that are numbers, as experts [experts, rows, size]; of as many rows as columns if
    nothing else is said."""
    weights, octets = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    rows = rows or size
    blocks = rng.integers(0, 256, (experts, rows, size // weights, octets), np.uint8)
    places = {"Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "Q2_K": (80, 82)}
    places |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:-1])
    elif kind == "NVFP4":
        blocks[..., :4] &= 0x7F
    elif kind == "IQ1_M":
        blocks[..., 55] &= 0xBF  # the exponent's highest bit
    else:
        for i in places.get(kind, (0,)):
            scales = rng.normal(0, spread, blocks.shape[:-1]).astype("<f2")
            blocks[..., i : i + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(experts, rows, -1)


def llama_cpps(kind: str, blocks: np.ndarray) -> np.ndarray:
    """The numbers of rows of blocks: gguf-py's, which lacks a type of ggml-common.h."""
    if kind != "Q1_0":
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    parts = blocks.reshape(len(blocks), -1, 18)
    plus = parts[..., 2:, None] >> np.arange(8, dtype=np.uint8) & 1
    scales = np.ascontiguousarray(parts[..., :2]).view(np.float16).astype(np.float32)
    return np.where(plus.reshape(*parts.shape[:2], 128), scales, -scales).reshape(len(blocks), -1)


@pytest.mark.parametrize("kind", CARRIED)
def test_blocks(kind: str, tmp_path: Path) -> None:
    """Codes times scales are llama.cpp's numbers, bit for bit."""
    blocks = random_blocks(kind, 2, 256)
    format = find_format(open_checkpoint(small_file(tmp_path / "model.gguf", kind, blocks)))
    (layer,) = moe_layers(format)
    for e in range(2):
        expert = layer.expert(e)
        want = llama_cpps(kind, blocks[e])
        for matrix in (expert.gate, expert.up, expert.down):
            np.testing.assert_array_equal(matrix.dequantize(np.float32), want)
    outline = moe_layers(format.outline())[0].expert(0).up
    assert (outline.kind, outline.group_size, outline.scale_type) == (
        expert.up.kind,
        expert.up.group_size,
        expert.up.scale_type,
    )


def test_factors_of_nvfp4(tmp_path: Path) -> None:
    """llama.cpp's converter writes one for each expert, and one of activations, which is not used."""
    blocks, kind = random_blocks("NVFP4", 2, 256), gguf.GGMLQuantizationType.NVFP4
    factors = {"gate": [0.5, 0.75], "up": [1.5, 3.0], "down": [0.1, 0.2]}
    scales = {
        f"blk.0.ffn_{part}_exps.{name}": (np.array(values, np.float32), gguf.GGMLQuantizationType.F32)
        for part, values in factors.items()
        for name in ("scale", "input_scale")
    }
    source = small_file(tmp_path / "small.gguf", "NVFP4", blocks)
    path = rewritten(str(source.with_suffix("")), tmp_path / "model.gguf", tensors=lambda found: found | scales)
    (layer,) = moe_layers(find_format(open_checkpoint(path)))
    for e in range(2):
        for part, values in factors.items():
            want = gguf.dequantize(blocks[e], kind).astype(np.float64) * float(np.float32(values[e]))
            np.testing.assert_array_equal(getattr(layer.expert(e), part).dequantize(), want)


def test_a_factor_of_another_type(tmp_path: Path) -> None:
    scale = {"blk.0.attn_q.scale": (np.ones(1, np.float32), gguf.GGMLQuantizationType.F32)}
    path = rewritten("qwen3moe-Q4_0", tmp_path / "model.gguf", tensors=lambda found: found | scale)
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_q\.scale: expected a positive number beside a matrix of NVFP4"
    ):
        find_format(open_checkpoint(path)).matrix("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize("kind", CARRIED)
def test_blocks_for_nvidia_gpus(kind: str, tmp_path: Path) -> None:
    """What layout marlin packs has llama.cpp's numbers, too."""
    blocks = random_blocks(kind, 2, 256)
    format = find_format(open_checkpoint(small_file(tmp_path / "model.gguf", kind, blocks)))
    if CARRIED[kind].kind in ("q2_k", "q4_1", "q5_1"):
        refused = f"format {CARRIED[kind].kind}; layout marlin carries int4, .*q6_k$"
        with pytest.raises(CheckpointError, match=refused):
            choose_experts(format, "marlin", None, scales="exact")
        return
    if CARRIED[kind].group_size == 16 and kind != "NVFP4":
        with pytest.raises(CheckpointError, match="group_size is 16, the CUDA kernels take -1, 32 and powers of two"):
            choose_experts(format, "marlin", None, scales="bf16")
        assert "w13_group_size is 16" in survey(format.ckpt.folder)["refused"]["cuda"]  # which no --scales helps
        return
    if CARRIED[kind].scales == "f32":
        with pytest.raises(CheckpointError, match="groups of 64 and more: export with --scales bf16"):
            choose_experts(format, "marlin", None, scales="exact")
        return
    (((_, spec),),) = choose_experts(format, "marlin", None, scales="exact").values()
    rows = [np.zeros(marlin.row_bytes(spec, name), np.uint8) for name in ("w13", "w2")]
    marlin.pack(moe_layers(format)[0].expert(1), spec, *rows)
    found, want = marlin.unpack(spec, *rows), llama_cpps(kind, blocks[1])
    for matrix in (found.gate, found.up, found.down):
        np.testing.assert_array_equal(matrix.dequantize(np.float32), want)


@pytest.mark.parametrize("kind", [name for name, weights, _ in TYPES.values() if weights > 1 and name not in CARRIED])
def test_refused_blocks(kind: str, tmp_path: Path) -> None:
    weights, octets = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    path = small_file(tmp_path / "model.gguf", kind, np.zeros((2, 256, 256 // weights * octets), np.uint8))
    with pytest.raises(
        CheckpointError, match=rf"blk.0.ffn_gate_exps.weight is {kind}, which (has|is) .*supported: Q4_0"
    ):
        moe_layers(find_format(open_checkpoint(path)))


def test_types() -> None:
    assert [kind.value for kind in gguf.GGMLQuantizationType] == sorted(TYPES)
    for number, (name, weights, octets) in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (weights, octets)


@pytest.mark.parametrize("name", NAMES)
def test_models(name: str) -> None:
    """What the converter reordered and changed is undone: transformers gives the same logits on what is read."""
    model = dequantized(Skeleton(find_format(open_checkpoint(FILES / f"{name}.gguf"))))
    with torch.no_grad():
        found = model(torch.from_numpy(LOGITS["ids"][None])).logits[0].numpy()
    # one float32 model run twice: but Qwen3.5's norms are stored with 1 added, rounded to f32
    np.testing.assert_allclose(found, LOGITS[name], rtol=0, atol=1e-5 * np.abs(LOGITS[name]).max())


@pytest.mark.parametrize("name", every(["qwen35moe-Q4_K_M", "qwen35moe-Q4_0", "qwen3moe-Q5_K_M"]))
def test_export(name: str, tmp_path: Path) -> None:
    """The file's tokenizer and configuration lie beside the model, which gives transformers' logits."""
    path = FILES / f"{name}.gguf"
    assert plan(path, tmp_path / "out").read == path.stat().st_size
    export(path, tmp_path / "out", activations="float", cache="f32", logits="all")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == ("qwen3_moe" if name.startswith("qwen3moe") else "qwen3_5_moe_text")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    generator = Generator(tmp_path / "out")
    found, want = generator.step(LOGITS["ids"][None], generator.start())[0], LOGITS[name]
    np.testing.assert_allclose(found[0], want, rtol=0, atol=2e-5 * np.abs(want).max())


TOKENS = gguf.GGUFReader(FILES / "qwen3moe-Q4_0.gguf").fields["tokenizer.ggml.tokens"].contents()


def with_texts(texts: Mapping[int, str]) -> list[str]:
    return [texts.get(i, text) for i, text in enumerate(TOKENS)]


@pytest.mark.parametrize(
    ("ids", "texts", "want"),
    [
        ({}, {}, 2),  # </s>
        ({"eot": 5, "eom": 6}, {}, [2, 5, 6]),
        ({"eos": 7, "eot": 5}, {2: "x"}, [7, 5]),
        ({"eos": None}, {2: "x"}, None),
        ({}, {2: "<|im_end|>", 9: "<|endoftext|>"}, [2, 9]),
        ({"eos": None}, {2: "x", 4: "<end_of_turn>"}, 4),
        ({"eos": 0xFFFFFFFF, "eot": 384}, {2: "x", 4: "<|eom_id|>"}, 4),  # none of the vocabulary's
        ({"eos": 30}, {2: "x", 30: "<|return|>", 31: "<|call|>", 32: "<|end|>"}, [30, 31]),  # gpt-oss
        ({"eos": 30}, {2: "x", 30: "<|end|>", 31: "<|return|>"}, [30, 31]),
        ({"eos": 30}, {30: "<|tool_response>", 31: "<turn|>"}, [30, 31]),  # Gemma 4, whose </s> is text
        ({}, {2: "x", 30: "<|fim_pad|>", 31: "<|repo_name|>", 32: "<|file_sep|>"}, [2, 30, 31, 32]),  # Qwen's coder
        ({"fim_pad": 40, "fim_rep": 41}, {2: "x", 30: "<|fim_pad|>"}, [2, 40, 41]),
    ],
)
def test_ends(ids: dict[str, int | None], texts: dict[int, str], want: Any, tmp_path: Path) -> None:
    """A text ends at the tokens at which llama.cpp ends it (llama-vocab.cpp): by their keys, and by their texts."""
    fields = {f"tokenizer.ggml.{key}_token_id": token for key, token in ids.items()}
    ckpt = open_checkpoint(
        rewritten("qwen3moe-Q4_0", tmp_path / "model.gguf", fields | {"tokenizer.ggml.tokens": with_texts(texts)})
    )
    assert ckpt.generation_config == ({} if want is None else {"eos_token_id": want})
    if len(ids) == 2 and not texts:
        assert json.loads((ckpt.companions / "generation_config.json").read_text(encoding="utf-8")) == {
            "eos_token_id": want
        }


def test_an_end_that_is_no_number(tmp_path: Path) -> None:
    file = rewritten("qwen3moe-Q4_0", tmp_path / "model.gguf", {"tokenizer.ggml.eot_token_id": 5})
    data = file.read_bytes()
    at = data.index(key := b"tokenizer.ggml.eot_token_id") + len(key)
    file.write_bytes(data[:at] + struct.pack("<If", 6, 5.0) + data[at + 8 :])
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.eot_token_id is 5.0, expected a token's number"):
        open_checkpoint(file)


def merged(found: dict[str, Any]) -> dict[str, Any]:
    """As convert_hf_to_gguf.py --fuse-gate-up-exps writes experts."""
    for name in [name for name in found if "ffn_gate_exps.weight" in name]:
        gate, up = found.pop(name), found.pop(name.replace("gate", "up"))
        found[name.replace("gate", "gate_up")] = np.concatenate([gate.data, up.data], 1), gate.tensor_type
    return found


def one_by_one(found: dict[str, Any]) -> dict[str, Any]:
    """As llama.cpp's converter wrote Mixtral's experts until April 2024."""
    for name in [name for name in found if "_exps.weight" in name]:
        tensor = found.pop(name)
        for e, data in enumerate(tensor.data):
            found[name.replace("_exps", f".{e}")] = data, tensor.tensor_type
    return found


def of_mlx(pattern: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {re.sub(r"ffn_(gate|up|down)_exps", pattern, name): t for name, t in found.items()}


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("qwen35moe-Q4_K_M", merged),
        ("qwen3moe-Q5_K_M", merged),
        ("mixtral-Q5_0", merged),
        ("mixtral-Q5_0", one_by_one),
        ("mixtral-Q5_0", of_mlx(r"block_sparse_moe.switch_ffn_\1")),  # what mlx_lm's replacements make of its name
        ("mixtral-Q5_0", of_mlx(r"block_sparse_moe.switch_mlp.\1_proj")),
        ("qwen35moe-Q4_0", of_mlx(r"mlp.switch_mlp.\1_proj")),
    ],
)
def test_names_of_experts(source: str, change: Callable[..., Any], tmp_path: Path) -> None:
    """Every way in which tools store experts gives the same tensors."""
    found = open_checkpoint(rewritten(source, tmp_path / "model.gguf", tensors=change))
    want = open_checkpoint(FILES / f"{source}.gguf")
    assert set(found.names()) == set(want.names())
    for name in want.names():
        np.testing.assert_array_equal(found.tensor(name), want.tensor(name))


def test_merged_experts_of_an_odd_number_of_rows(tmp_path: Path) -> None:
    def odd(found: dict[str, Any]) -> dict[str, Any]:
        name = next(name for name in merged(found) if "gate_up" in name)
        return found | {name: (found[name][0][:, 1:], found[name][1])}

    path = rewritten("mixtral-Q5_0", tmp_path / "model.gguf", tensors=odd)
    with pytest.raises(
        CheckpointError, match=r"ffn_gate_up_exps.weight is Q5_0 .*, expected rows of ffn_gate_exps and"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["MODEL.GGUF", "sha256-0123456789abcdef", "model.bin"])
def test_known_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    """Whatever the file's name: Ollama's have no suffix."""
    path = tmp_path / name
    path.write_bytes((FILES / "qwen3moe-Q4_0.gguf").read_bytes())
    assert find_format(open_checkpoint(path)).name == "GGUF"
    assert not is_model(path)
    assert (open_checkpoint(path).companions / "tokenizer.json").exists()
    with pytest.raises(CheckpointError, match=f"{name}: a GGUF file, in a folder without safetensors"):
        open_checkpoint(tmp_path)


def test_a_tokenizer_that_transformers_cannot_make(tmp_path: Path) -> None:
    """The model is exported without it; the export says so, and generate takes ids."""
    path = rewritten("qwen3moe-Q4_0", tmp_path / "model.gguf", {"tokenizer.ggml.model": "of tomorrow"})
    said = "no tokenizer.json: transformers cannot make a tokenizer of the file's fields"
    assert plan(path, tmp_path / "out").tokenizer.startswith(said)
    report = export(path, tmp_path / "out", layers=1)
    assert report.tokenizer.startswith(said)
    assert report.tokenizer.endswith("the model takes token ids: quantmoe generate --ids 1,2,3")
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert len(Generator(tmp_path / "out").generate([5, 6], 2).tokens) == 2
    with pytest.raises(ModelError, match=r"tokenizer.json: missing; give token ids \(--ids 1,2,3\)"):
        load_tokenizer(tmp_path / "out")


#: stem of a tensor -> the types of it in the four layers: as in Unsloth's UD-Q4_K_XL, with rare ones of other UD files
UNSLOTH = {
    "ffn_gate_exps": ("Q4_K", "IQ4_XS", "Q5_K", "IQ3_S"),
    "ffn_up_exps": ("Q4_K", "IQ4_XS", "Q5_K", "IQ3_S"),
    "ffn_down_exps": ("Q5_0", "IQ4_NL", "Q8_0", "IQ4_NL"),  # rows of 32 features
    "ffn_gate_shexp": ("Q8_0", "Q6_K", "Q8_0", "Q5_K"),
    "ffn_up_shexp": ("Q8_0", "Q6_K", "Q8_0", "Q5_K"),
    "attn_qkv": ("Q6_K", "Q5_K", "Q8_0", "Q4_K"),
    "attn_gate": ("Q5_K", "Q4_K", "IQ4_XS", "Q4_K"),
    "ssm_out": ("Q5_K", "Q8_0", "Q6_K", "Q4_K"),
    "attn_q": ("Q5_K",) * 4,
    "attn_k": ("Q8_0",) * 4,
    "attn_v": ("Q6_K",) * 4,
    "token_embd": ("Q8_0",) * 4,
    "output": ("Q6_K",) * 4,
}


def unsloth(found: dict[str, Any]) -> dict[str, Any]:
    """Give a model of Qwen3.6's kind matrices of :data:`UNSLOTH`, with random codes."""
    made = dict(found)
    for name, old in found.items():
        match = re.fullmatch(r"(?:blk\.(\d)\.)?(\w+)\.weight", name)
        if match is None or match[2] not in UNSLOTH:
            continue
        kind, shape = UNSLOTH[match[2]][int(match[1] or 0)], [int(size) for size in old.shape[::-1]]
        experts, rows, size = [1, *shape][-3:]
        spread = 0.05 / llama_cpps(kind, random_blocks(kind, 1, size, rows)[0]).std()
        blocks = random_blocks(kind, experts, size, rows, spread)
        made[name] = blocks.reshape(*shape[:-1], -1), gguf.GGMLQuantizationType[kind]
    return made


def test_a_file_with_unsloths_mix_of_types(tmp_path: Path) -> None:
    """No UD file can be fetched here: a tiny model of Qwen3.6's kind has its mix of types. It exports and writes."""
    path = rewritten("qwen35moe-Q4_K_M", tmp_path / "model.gguf", tensors=unsloth)
    types = {row["type"] for row in survey(path)["types"]}
    assert types >= {kind for kinds in UNSLOTH.values() for kind in kinds}
    export(path, tmp_path / "out", activations="float", cache="f32", logits="all")
    generator = Generator(tmp_path / "out")
    found = generator.step(LOGITS["ids"][None], generator.start())[0].reshape(len(LOGITS["ids"]), -1)
    model = dequantized(Skeleton(find_format(open_checkpoint(path))))
    with torch.no_grad():
        want = model(torch.from_numpy(LOGITS["ids"][None])).logits[0].numpy()
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert len(generator.generate([5, 6], 3).tokens) == 3


@pytest.mark.parametrize("weights", every([*UNSLOTH_FILES], 0))
def test_a_file_of_published_widths_loses_nothing(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four layers of Qwen3.6-35B-A3B with 4 experts, in Unsloth's types: packed weights are gguf-py's numbers.

    Linear attention has its heads in another order, and so has its out_proj its columns.
    """
    monkeypatch.setattr("quantmoe.benchmarks.random_gguf.ROWS", 4 * 512 * 2)  # no two rows of a tensor of experts alike
    config = cut(CONFIGS["qwen3.6-35b-a3b"], 4) | {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 512}
    path, out = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(path, config, weights)
    report = export(path, out)
    assert not report.dequantized
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35MOE, 4)
    seen, initializers, found = set(), load(out / "model.onnx").graph.initializers, inspect(out)
    for node in found["layers"] + found["linears"]:
        for module, matrix in unpack._matrices(node, initializers):
            expert = re.fullmatch(r"(.*experts)\.(\d+)\.(gate|up|down)", module)
            stem = (
                f"{expert[1]}.{expert[3]}_proj"
                if expert
                else re.sub(r"expert\.(gate|up|down)$", r"expert.\1_proj", module)
            )
            tensor = stored[f"{names.get_name(stem)}.weight"]
            want = gguf.dequantize(tensor.data[int(expert[2])] if expert else tensor.data, tensor.tensor_type)
            own, seen = matrix.dequantize(np.float32), seen | {tensor.name}
            if "linear_attn" in module:
                own, want = np.sort(own, None), np.sort(want, None)
            np.testing.assert_array_equal(own, want, err_msg=module)
    quantized = {name for name, tensor in stored.items() if gguf.GGMLQuantizationType(tensor.tensor_type).name != "F32"}
    assert quantized - seen == {"token_embd.weight"}


#: GGUF's name -> type of a file whose types have minima
MINIMA = {
    "token_embd": "Q2_K",
    "attn_q": "Q4_1",
    "attn_k": "Q4_1",
    "attn_v": "Q4_1",
    "attn_output": "Q5_1",
    "ffn_down_exps": "Q5_1",
    "ffn_gate_exps": "Q2_K",
    "ffn_up_exps": "Q2_K",
    "output": "Q2_K",
}


def with_minima(found: dict[str, Any]) -> dict[str, Any]:
    """Give matrices the types of :data:`MINIMA`: by gguf-py's quantizer, or, of Q2_K, which it lacks, by hand."""
    made = dict(found)
    for name, old in found.items():
        if (kind := MINIMA.get(re.sub(r"^blk\.\d+\.|\.weight$", "", name))) is None:
            continue
        weights = gguf.dequantize(old.data, old.tensor_type)
        type_ = gguf.GGMLQuantizationType[kind]
        made[name] = (q2_k_blocks(weights) if kind == "Q2_K" else gguf.quantize(weights, type_)), type_
    return made


def q2_k_blocks(weights: np.ndarray) -> np.ndarray:
    """Quantize [.., K] to block_q2_K: 16 bytes of scales and minima, 64 of pairs of bits, two f16."""
    groups = weights.reshape(*weights.shape[:-1], -1, 16, 16)
    minima = np.maximum(-groups.min(-1), 0)
    scales = (groups.max(-1) + minima) / 3
    d, d_min = (np.float16(part.max(-1, keepdims=True) / 15) for part in (scales, minima))
    levels = [np.rint(part / unit).clip(0, 15).astype(np.uint8) for part, unit in ((scales, d), (minima, d_min))]
    exact = [(unit * part)[..., None] for part, unit in zip(levels, (d, d_min), strict=True)]
    codes = np.rint((groups + exact[1]) / np.where(exact[0] > 0, exact[0], 1)).clip(0, 3).astype(np.uint8)
    pairs = codes.reshape(*codes.shape[:-2], 2, 4, 32)
    packed = np.bitwise_or.reduce(pairs << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=-2)
    parts = [levels[0] | levels[1] << 4, packed.reshape(*codes.shape[:-2], 64), d.view(np.uint8), d_min.view(np.uint8)]
    return np.concatenate(parts, axis=-1).reshape(*weights.shape[:-1], -1)


def test_a_file_with_minima(tmp_path: Path) -> None:
    """Q4_1, Q5_1 and Q2_K keep their bits, also in the table of tokens, and the model has transformers' logits."""
    path = rewritten("qwen3moe-Q6_K", tmp_path / "model.gguf", tensors=with_minima)
    assert {row["type"]: row["scheme"] for row in survey(path)["types"] if row["bits"] < 8} == {
        kind: f"GGUF {kind}" for kind in MINIMA.values()
    }
    report = export(path, tmp_path / "out", activations="float", cache="f32", logits="all")
    assert not report.dequantized
    generator = Generator(tmp_path / "out")
    found = generator.step(LOGITS["ids"][None], generator.start())[0].reshape(len(LOGITS["ids"]), -1)
    model = dequantized(Skeleton(find_format(open_checkpoint(path))))
    with torch.no_grad():
        want = model(torch.from_numpy(LOGITS["ids"][None])).logits[0].numpy()
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", CARRIED)
def test_what_is_said_of_a_type(kind: str, tmp_path: Path) -> None:
    """By a dry run and the page: the bits of packed rows without the numbers of whole rows, and which kernels run."""
    weights, octets = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    path = small_file(tmp_path / "model.gguf", kind, random_blocks(kind, 2, 256))
    format = find_format(open_checkpoint(path))
    ((_, spec),) = next(iter(choose_experts(format.with_widths(True), "cpu_panel", None, scales="exact").values()))
    of_rows = 256 * (12 if spec.w2.format in ("mxfp4", "nvfp4") else 8)
    bits, own = (cpu_panel.row_bytes(spec, "w2") - of_rows) * 8 / 256**2, 8 * octets / weights
    said, cuda = survey(path)["types"][0]["scheme"], survey(path)["refused"]["cuda"]
    wider = f", carried as {spec.w2.format}: {bits:.4g} bits a weight, the file has {own:.4g}"
    assert said == f"GGUF {kind}{wider if bits > own else ''}"
    carried = f"wider: {bits:.5g} bits for {own:.5g}" if bits > own else f"same: {bits:.5g} bits"
    on_gpus = "refused" if cuda else carried
    if cuda.endswith("--scales bf16"):
        on_gpus = f"{carried} *"
    elif not cuda and moe_layers(format)[0].scheme.format != spec.w13.format:
        wide = bits + (3 if kind == "Q5_0" else 2)
        on_gpus = f"wider: {wide:.5g} bits for {own:.5g}"
    assert ["llama.cpp", f"GGUF {kind}", carried, on_gpus, "`test_what_is_said_of_a_type`"] in pages.rows("formats")


def test_inspect_shows_types(capsys: pytest.CaptureFixture[str]) -> None:
    """Bits are the file's: all rows together have the bytes of its tensors."""
    path = FILES / "qwen35moe-Q4_K_M.gguf"
    rows = survey(path)["types"]
    data = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert sum(row["weights"] * row["bits"] for row in rows) == 8 * data
    found = {(row["part"], row["type"]): row for row in rows}
    experts = found["experts, gate and up", "Q4_K"]
    scheme = "GGUF Q4_K, carried as q4_k: 4.625 bits a weight, the file has 4.5"
    assert (experts["bits"], experts["weights"], experts["scheme"]) == (4.5, 4 * 2 * 2 * 32 * 256, scheme)
    assert experts["kernel"].startswith("panel_")
    assert not found["norms and biases", "F32"]["kernel"]
    print_survey(survey(path))
    shown = " ".join(capsys.readouterr().out.split())  # lines of any width
    row = "experts, gate and up: Q4_K, 0.1 M weights, 4.5 bits each; carried as q4_k: 4.625 bits a weight, the file has"
    assert f"{row} 4.5; CPU kernel here: panel_" in shown
    assert "bits a weight" in shown


def test_explain() -> None:
    assert explain(FILES / "qwen3moe-Q4_0.gguf")[0]["scheme"] == "GGUF Q4_0"


def test_mxfp4_for_onnx_runtime_needs_a_graph_of_16_bits() -> None:
    """inspect says what export with no other option says."""
    path = FILES / "gpt-oss-MXFP4.gguf"
    with pytest.raises(
        CheckpointError, match=r"ONNX Runtime has mxfp4 experts on CUDA alone.*use --dtype f16"
    ) as error:
        plan(path, "out", target="ort")
    assert survey(path)["refused"]["ort"] == str(error.value)


def test_pieces(tmp_path: Path) -> None:
    whole = FILES / "qwen3moe-Q4_0.gguf"
    first = tmp_path / "model-00001-of-00002.gguf"
    first.write_bytes(whole.read_bytes())
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf: missing; the model has 2 pieces"):
        open_checkpoint(first)
    writer = gguf.GGUFWriter(tmp_path / "model-00002-of-00002.gguf", "qwen3moe")
    writer.add_tensor("blk.0.attn_k.bias", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for piece in tmp_path.glob("*.gguf"):
        ckpt = open_checkpoint(piece)
        assert "model.layers.0.self_attn.k_proj.bias" in ckpt
        assert (ckpt.companions / "tokenizer.json").exists()
    (tmp_path / "elsewhere").mkdir()
    second = (tmp_path / "model-00002-of-00002.gguf").rename(tmp_path / "elsewhere" / "second.gguf")
    (tmp_path / "model-00002-of-00002.gguf").symlink_to(second)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf: links to .*second\.gguf, outside"):
        open_checkpoint(first)
    beyond = first.rename(tmp_path / "model-00003-of-00002.gguf")
    with pytest.raises(CheckpointError, match="named as a piece beyond the 2 of its model"):
        open_checkpoint(beyond)


@pytest.mark.parametrize("suffix", [".GGUF", ""])
def test_pieces_of_any_suffix(suffix: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"model-0000{i}-of-00002{suffix}" for i in (1, 2)]
    for i, path in enumerate(paths):
        numbers = {"split.no": i, "split.count": 2}
        halves = [lambda found: dict([*found.items()][:9]), lambda found: dict([*found.items()][9:])]
        rewritten("qwen3moe-Q4_0", path, numbers, halves[i])
    assert set(open_checkpoint(paths[1]).names()) == set(open_checkpoint(FILES / "qwen3moe-Q4_0.gguf").names())
    paths[1].rename(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"other: is piece 1 \(from 0\) of 2, expected piece 0 of 1 by its name"):
        open_checkpoint(tmp_path / "other")
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match=r"is piece 0 .* expected piece 1 of 2 by its name; rename"):
        open_checkpoint(paths[0])


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [
        ("mixtral-Q5_0", "llama.attention.key_length", 48, r"blk\.0\.attn_q\.weight has 128 rows, expected 192"),
        ("mixtral-Q5_0", "llama.attention.key_length", 33, "fields cannot be read as llama's"),
        ("qwen35moe-Q4_0", "qwen35moe.ssm.inner_size", 64, r"ssm_.* is \[256, 4\], expected \[192, 1, 4\]"),
        ("qwen35moe-Q4_0", "qwen35moe.ssm.group_count", 3, r"ssm_.* is \[256, 4\], expected \[320, 1, 4\]"),
    ],
)
def test_orders_that_fit_no_tensor(name: str, key: str, value: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns are not reordered by sizes that are not theirs."""

    def changed(path: Path) -> Any:
        found = read_header(path)
        found.fields[key] = value
        return found

    monkeypatch.setattr("quantmoe.exporter.reading.gguf.read_header", changed)
    with pytest.raises(CheckpointError, match=text):
        find_format(open_checkpoint(FILES / f"{name}.gguf")).matrix("model.layers.0.self_attn.q_proj")


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def header(*fields: bytes, tensors: bytes = b"", count: int = 0, version: int = 3, data: bytes = b"") -> bytes:
    text = b"GGUF" + struct.pack("<IQQ", version, count, len(fields)) + b"".join(fields) + tensors
    return text + b"\0" * (-len(text) % 32) + data


def tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


#: what is wrong -> file, what is said
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes; expected a GGUF file"),
    "a pointer": (LFS_POINTER + b"v1 and more", "a Git LFS pointer, not the file"),
    "another file": (b"PK\3\4" + bytes(60), "begins with b'PK"),
    "another version": (header(version=1), "version 1; expected GGUF of version 2 or 3"),
    "many tensors": (header(count=1 << 60), "1152921504606846976 tensors"),
    "cut": (header(field(b"a", 4, b""))[:30], "is it truncated"),
    "long name": (header(struct.pack("<Q", 1 << 40) + b"a"), "a name of 1099511627776 bytes at byte 24, expected at"),
    "not UTF-8": (header(field(b"\xff", 4, b"\0\0\0\0")), "a name that is not UTF-8"),
    "unknown field type": (header(field(b"a", 99, b"")), "a has the type 99"),
    "array of arrays": (header(field(b"a", 9, struct.pack("<IQ", 9, 1))), "a is an array of the type 9"),
    "long array": (header(field(b"a", 9, struct.pack("<IQ", 8, 1 << 62))), "a ends at byte 36893488147419103281"),
    "a key twice": (header(*[field(b"a", 4, b"\0\0\0\0")] * 2), "a: twice in the metadata, expected each key once"),
    "long text": (header(field(b"a", 8, struct.pack("<Q", 1 << 40))), "a ends at byte 1099511627821 or later"),
    "overlap": (
        header(tensors=tensor((8,)) + tensor((8,), name=b"u"), count=2, data=bytes(64)),
        "u starts at byte 96, where t has not ended: it ends at 128 (overlap)",
    ),
    "overlap inside": (
        header(tensors=tensor((64,)) + tensor((8,), offset=32, name=b"u"), count=2, data=bytes(256)),
        "u starts at byte 128, where t has not ended",
    ),
    "alignment 0": (header(field(b"general.alignment", 4, b"\0\0\0\0")), "general.alignment is 0"),
    "alignment text": (header(field(b"general.alignment", 8, struct.pack("<Q", 1) + b"x")), "general.alignment is 'x'"),
    "many dimensions": (header(tensors=tensor((1,) * 9), count=1), "t: 9 dimensions"),
    "twice": (header(tensors=tensor((2,)) * 2, count=2, data=bytes(64)), "t: twice in the file"),
    "unknown type": (header(tensors=tensor((2,), kind=77), count=1), "t: ggml type 77, which has no name here"),
    "half a block": (header(tensors=tensor((48,), kind=2), count=1), "t: Q4_0 [48], expected rows of a multiple of 32"),
    "no rows": (header(tensors=tensor((64, 0)), count=1), "t: F32 [0, 64], expected no dimension of 0"),
    "no columns": (header(tensors=tensor((0, 64), kind=2), count=1), "t: Q4_0 [64, 0], expected no dimension of 0"),
    "past the end": (header(tensors=tensor((1 << 40, 4)), count=1), "t: F32 [4, 1099511627776] ends at byte"),
    "odd offset": (header(tensors=tensor((2,), offset=4), count=1, data=bytes(64)), "t: F32 [2] starts at 4"),
    "no architecture": (header(), "architecture None is not read from GGUF; supported: qwen2moe"),
    "an architecture that is an array": (
        header(field(b"general.architecture", 9, struct.pack("<IQI", 4, 1, 7))),
        "architecture [7] is not read from GGUF",
    ),
    "a dense model": (
        header(
            field(b"general.architecture", 8, struct.pack("<Q", 5) + b"llama"),
            tensors=tensor((2, 8), name=b"token_embd.weight"),
            count=1,
            data=bytes(64),
        ),
        "a dense model ('llama'): no experts; expected a mixture of experts; optimum-onnx",
    ),
    "another architecture": (
        header(field(b"general.architecture", 8, struct.pack("<Q", 5) + b"mamba")),
        "architecture 'mamba' is not read from GGUF",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged(what: str, tmp_path: Path) -> None:
    data, text = DAMAGED[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    assert str(error.value).startswith(f"{path}: ")
    assert text in str(error.value)


def array_field(kind: int, count: int, size: int) -> bytes:
    """Of elements whose bytes are 0."""
    return field(b"a", 9, struct.pack("<IQ", kind, count)) + bytes(size)


@pytest.mark.parametrize(("kind", "width"), [(0, 1), (1, 1), (7, 1), (4, 4), (12, 8), (8, 8)])
def test_arrays_take_their_bytes(kind: int, width: int, tmp_path: Path) -> None:
    """Python's numbers would take 8 to 40 bytes each, its strings 57."""
    size = 8_000_000
    path = tmp_path / "model.gguf"
    path.write_bytes(header(array_field(kind, size // width, size)))
    tracemalloc.start()
    try:
        found = read_header(path).fields["a"]
        assert tracemalloc.get_traced_memory()[1] < 1.5 * size
        assert len(found) == size // width
        assert next(iter(found)) == ("" if kind == 8 else 0)
    finally:
        tracemalloc.stop()


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size was looked at before."""
    path = tmp_path / "model.gguf"
    path.write_bytes(header(array_field(0, 1 << 20, 1 << 20)))
    fstat = os.fstat

    def cut(file: int) -> os.stat_result:
        found = fstat(file)
        if found.st_size > 1 << 20:
            os.truncate(path, 1 << 16)
        return found

    monkeypatch.setattr(os, "fstat", cut)
    with pytest.raises(CheckpointError, match=r"ends at byte 65536, and had .* bytes: it was cut while"):
        read_header(path)


@pytest.mark.parametrize(("kind", "width"), [(0, 1), (8, 8)])
def test_metadata_of_many_bytes(kind: int, width: int, tmp_path: Path) -> None:
    """Refused before it takes memory, naming the field."""
    size, path = MAX_METADATA // 2, tmp_path / "model.gguf"
    one = array_field(kind, size // width, size)
    path.write_bytes(header(one, one.replace(b"a", b"b", 1)))
    with pytest.raises(
        CheckpointError, match=f"b ends at byte [0-9]* or later, expected all metadata in the first {2 * size}"
    ):
        read_header(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 0),
        ("expert_used_count", None),
        ("block_count", 1 << 30),
        ("attention.layer_norm_rms_epsilon", -1.0),
        ("rope.scaling.type", "longrope"),
    ],
)
def test_fields(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(path: Path) -> Any:
        found = read_header(path)
        found.fields[f"qwen3moe.{key}"] = value
        return found

    monkeypatch.setattr("quantmoe.exporter.reading.gguf.read_header", changed)
    with pytest.raises(CheckpointError, match=key.rpartition(".")[2]):
        Skeleton(find_format(open_checkpoint(FILES / "qwen3moe-Q4_0.gguf")))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_bytes(data: st.DataObject, tmp_path: Path) -> None:
    """A damaged header is refused by name, or describes some other model."""
    octets = bytearray((FILES / "qwen3moe-Q4_0.gguf").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        octets[data.draw(st.integers(0, 16000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.gguf"
    path.write_bytes(octets[: data.draw(st.sampled_from([len(octets), 9000, 20000]))])
    try:
        format = find_format(open_checkpoint(path))
        for layer in moe_layers(format):
            layer.expert(0)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
