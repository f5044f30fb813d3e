"""GGUF files: blocks against gguf-py's numbers, llama.cpp's converter against transformers, damaged headers."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweeps import every

from quantmoe.custom_ops.layouts import marlin
from quantmoe.exporter.choosing.choose import choose_experts
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.explain import explain
from quantmoe.exporter.inspecting.survey import survey
from quantmoe.exporter.reading.checkpoint import LFS_POINTER, CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.formats.gguf import CARRIED
from quantmoe.exporter.reading.gguf.header import TYPES, read_header
from quantmoe.exporter.running.generate import Generator
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
LOGITS = dict(np.load(FILES / "logits.npz"))
NAMES = sorted(set(LOGITS) - {"ids"})
DECODER = "qwen3moe.embedding_length", 64


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


def random_blocks(kind: str, experts: int, size: int) -> np.ndarray:
    """Any codes, and scales that are numbers."""
    weights, octets = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (experts, size, size // weights, octets), np.uint8)
    at = {"Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(kind, (0,))
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:-1])
    else:
        for i in at:
            scales = rng.normal(0, 1, blocks.shape[:-1]).astype("<f2")
            blocks[..., i : i + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(experts, size, -1)


@pytest.mark.parametrize("kind", CARRIED)
def test_blocks(kind: str, tmp_path: Path) -> None:
    """Codes times scales are gguf-py's numbers, bit for bit."""
    blocks = random_blocks(kind, 2, 256)
    format = find_format(open_checkpoint(small_file(tmp_path / "model.gguf", kind, blocks)))
    (layer,) = format.moe_layers()
    for e in range(2):
        expert = layer.expert(e)
        want = gguf.dequantize(blocks[e], gguf.GGMLQuantizationType[kind])
        for matrix in (expert.gate, expert.up, expert.down):
            np.testing.assert_array_equal(matrix.dequantize(np.float32), want)
    outline = format.outline().moe_layers()[0].expert(0).up
    assert (outline.kind, outline.group_size, outline.scale_type) == (
        expert.up.kind,
        expert.up.group_size,
        expert.up.scale_type,
    )


@pytest.mark.parametrize("kind", CARRIED)
def test_blocks_for_nvidia_gpus(kind: str, tmp_path: Path) -> None:
    """What layout marlin packs has gguf-py's numbers, too."""
    blocks = random_blocks(kind, 2, 256)
    format = find_format(open_checkpoint(small_file(tmp_path / "model.gguf", kind, blocks)))
    if kind == "Q3_K":
        with pytest.raises(CheckpointError, match="group_size is 16, the CUDA kernels take -1, 32 and powers of two"):
            choose_experts(format, "marlin", None, "bf16")
        assert "w13_group_size is 16" in survey(format.ckpt.folder)["refused"]["cuda"]  # which no --scales helps
        return
    (((_, spec),),) = choose_experts(format, "marlin", None, "exact").values()
    rows = [np.zeros(marlin.row_bytes(spec, name), np.uint8) for name in ("w13", "w2")]
    marlin.pack(format.moe_layers()[0].expert(1), spec, *rows)
    found, want = marlin.unpack(spec, *rows), gguf.dequantize(blocks[1], gguf.GGMLQuantizationType[kind])
    for matrix in (found.gate, found.up, found.down):
        np.testing.assert_array_equal(matrix.dequantize(np.float32), want)


@pytest.mark.parametrize("kind", [name for name, weights, _ in TYPES.values() if weights > 1 and name not in CARRIED])
def test_refused_blocks(kind: str, tmp_path: Path) -> None:
    weights, octets = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    path = small_file(tmp_path / "model.gguf", kind, np.zeros((2, 256, 256 // weights * octets), np.uint8))
    with pytest.raises(
        CheckpointError, match=rf"blk.0.ffn_gate_exps.weight is {kind}, which (has|is) .*supported: Q4_0"
    ):
        find_format(open_checkpoint(path)).moe_layers()


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
    beyond = first.rename(tmp_path / "model-00003-of-00002.gguf")
    with pytest.raises(CheckpointError, match="named as a piece beyond the 2 of its model"):
        open_checkpoint(beyond)


@pytest.mark.parametrize(
    ("name", "key", "value", "text"),
    [
        ("mixtral-Q5_0", "llama.attention.key_length", 48, r"blk\.0\.attn_q\.weight has 128 rows, expected 192"),
        ("mixtral-Q5_0", "llama.attention.key_length", 33, "fields cannot be read as llama's"),
        ("qwen35moe-Q4_0", "qwen35moe.ssm.inner_size", 64, r"ssm_.* is \[256, 4\], expected \[192, 1, 4\]"),
        ("qwen35moe-Q4_0", "qwen35moe.ssm.group_count", 3, "fields cannot be read as qwen35moe's"),
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
    "long name": (header(struct.pack("<Q", 1 << 40) + b"a"), "a string of 1099511627776 bytes"),
    "not UTF-8": (header(field(b"\xff", 4, b"\0\0\0\0")), "a name that is not UTF-8"),
    "unknown field type": (header(field(b"a", 99, b"")), "a has the type 99"),
    "array of arrays": (header(field(b"a", 9, struct.pack("<IQ", 9, 1))), "a is an array of the type 9"),
    "long array": (header(field(b"a", 9, struct.pack("<IQ", 8, 1 << 62))), "a has 4611686018427387904 elements"),
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
    with pytest.raises(CheckpointError, match=key.rpartition(".")[2] if value != 1 << 30 else "num_hidden_layers"):
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
        for layer in format.moe_layers():
            layer.expert(0)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017
