"""bitsandbytes, HQQ, MLX and torchao: logits beside transformers, and what their fixtures have not."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.harness.sweeps import every
from support.models.checkpoints import make_gptq_checkpoint, same_matrix, write_checkpoint
from support.models.encoders import CASES, bitsandbytes, hqq, random_matrix

from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.choosing.choose import rounded
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.formats import CheckpointError, Format, find_format, moe_layers, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASE = {case.id: case for case in CASES}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("name", every(["bitsandbytes-nf4-double", "mlx-int4", "hqq-int8", "torchao-int4"]))
def test_logits_are_transformers(name: str, tmp_path: Path) -> None:
    """On the dequantized weights, with float activations. MLX quantizes embeddings, the LM head and routers, too."""
    report = export(FIXTURES / name, tmp_path / "out", activations="float", cache="f32", logits="all")
    assert report.dequantized.keys() <= {"model.layers.0.mlp.gate.weight"}
    ids = np.arange(3, 23)[None]
    generator = Generator(tmp_path / "out")
    found = generator.step(ids, generator.start())[0].reshape(ids.size, -1)
    model = dequantized(Skeleton(find_format(open_checkpoint(FIXTURES / name))))
    with torch.no_grad():
        want = model(torch.from_numpy(ids)).logits[0].numpy()
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize(("bits", "target"), [(3, "cpu"), *every([(2, "cpu"), (3, "ort")])])
def test_gptq_of_few_bits(bits: int, target: str, tmp_path: Path) -> None:
    """In act-order with zero points: as the checkpoint has them on the CPU, in 4 bits where no kernel takes them."""
    source = make_gptq_checkpoint(tmp_path / "source", bits=bits, sym=False, desc_act=target == "cpu")
    options = {"cache": "f32"} if target == "cpu" else {}
    report = export(source, tmp_path / "out", target=target, activations="float", logits="all", **options)
    kinds = {spec.w13.format for _, spec in report.layers.values()} | {
        spec.w.format for _, spec in report.linears.values()
    }
    assert kinds - {"bf16"} == {f"int{bits}" if target == "cpu" else "int4"}
    ids = np.arange(3, 23)[None]
    generator = Generator(tmp_path / "out")
    found = generator.step(ids, generator.start())[0].reshape(ids.size, -1)
    model = dequantized(Skeleton(find_format(open_checkpoint(source))))
    with torch.no_grad():
        want = model(torch.from_numpy(ids)).logits[0].numpy()
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())


def read(folder: Path, tensors: dict[str, np.ndarray], quantization: dict[str, Any], **config: Any) -> Format:
    named = {f"m.{name}": array for name, array in tensors.items()}
    return find_format(open_checkpoint(write_checkpoint(folder, named, quantization, **config)))


def nf4(n: int, k: int, block: int, kind: str = "nf4") -> QuantizedMatrix:
    """Blocks over the flattened weight, of which each 32 columns have the scale."""
    matrix = random_matrix(CASE["bitsandbytes-nf4"], n, k, 32, "f32", True, 0)
    scales = np.repeat(np.arange(1, n * k // block + 1, dtype=np.float32) / 2, block // 32).reshape(n, k // 32)
    return replace(matrix, kind=kind, scales=scales)


@pytest.mark.parametrize("kind", ["nf4", "bnb_fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_that_end_inside_rows(nested: bool, kind: str, tmp_path: Path) -> None:
    """bitsandbytes' blocks of 128 run over rows of 96 inputs."""
    matrix = nf4(8, 96, 128, kind)
    format = read(tmp_path, bitsandbytes(matrix, 128, nested), BITSANDBYTES)
    same_matrix(format.matrix("m"), matrix)
    assert rounded(matrix, "bf16") == (matrix, 0.0)
    bits = 4 + (8 + 32 / 256 if nested else 32) / 128
    assert f"5 bits a weight, the file has {bits:.4g}" in format.scheme("m").text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"weight.quant_map": np.arange(16, dtype=np.float32)}, "weight.quant_map is not the table of nf4"),
        ({"weight.quant_state.bitsandbytes__nf4": None}, r"m.weight.quant_state.bitsandbytes__nf4 or fp4 is missing"),
        ({"weight.quant_state.bitsandbytes__nf4": np.zeros(4, np.uint8)}, "expected a JSON text with quant_type nf4"),
        ({"weight.absmax": np.ones(3, np.float32)}, r"m.weight.absmax is F32 \[3\], expected F32 \[6\]"),
    ],
)
def test_odd_states_of_bitsandbytes(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    tensors = bitsandbytes(nf4(8, 96, 128), 128) | changes
    with pytest.raises(CheckpointError, match=text):
        read(tmp_path, {k: v for k, v in tensors.items() if v is not None}, BITSANDBYTES).matrix("m")


def test_what_bitsandbytes_cannot_be_carried(tmp_path: Path) -> None:
    rows = replace(nf4(16, 64, 64), codes=np.zeros((16, 48), np.uint8), scales=np.ones((16, 2), np.float32))
    with pytest.raises(CheckpointError, match="groups of 64 in rows of 48 inputs; supported: groups that end with 32"):
        read(tmp_path / "rows", bitsandbytes(rows, 64), BITSANDBYTES).scheme("m")
    tensors = {"weight": np.zeros((4, 32), np.int8), "SCB": np.ones(4, np.float32), "weight_format": np.uint8(1)}
    with pytest.raises(CheckpointError, match=r"m.weight_format is 1, a layout of some GPUs; expected 0, rows"):
        read(tmp_path / "int8", {k: np.array(v) for k, v in tensors.items()}, BITSANDBYTES).matrix("m")


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_bits_of_hqq(bits: int, tmp_path: Path) -> None:
    matrix = random_matrix(CASE["hqq"], 16, 192, 64, "f32_minima", True, bits)
    codes = np.random.default_rng(bits).integers(0, 1 << bits, matrix.codes.shape).astype(np.uint8)
    want = replace(matrix, kind="q4_1" if bits < 5 else "q5_1" if bits == 5 else "q8_min", codes=codes)
    format = read(tmp_path, hqq(want, bits), {"quant_method": "hqq"})
    same_matrix(format.matrix("m"), want)
    assert format.scheme("m").group_size == format.outline().matrix("m").group_size == 64


def test_what_hqq_cannot_be_carried(tmp_path: Path) -> None:
    matrix = random_matrix(CASE["hqq"], 16, 192, 64, "f32_minima", False, 0)
    with pytest.raises(CheckpointError, match=r"m.axis is 0: groups have one input of many outputs; expected 1"):
        read(tmp_path / "axis", hqq(matrix, axis=0), {"quant_method": "hqq"}).scheme("m")
    tensors = hqq(replace(matrix, codes=matrix.codes + 32), 5)
    with pytest.raises(CheckpointError, match=r"m.W_q has the code \d+, expected 5 bits \(nbits\)"):
        read(tmp_path / "code", tensors, {"quant_method": "hqq"}).matrix("m")
    tensors = hqq(matrix) | {"packing": np.frombuffer(b"4bit_32", np.uint8)}
    with pytest.raises(CheckpointError, match=r"m.packing is '4bit_32' and nbits 4; expected one of 8bit_u8"):
        read(tmp_path / "packing", tensors, {"quant_method": "hqq"}).matrix("m")


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_modules_of_mlx_with_their_own_bits(bits: int, tmp_path: Path) -> None:
    """An entry under the path that MLX has, of stacked experts; without a mode it is affine."""
    rng, (n, k, g) = np.random.default_rng(bits), (8, 128, 64)
    codes = rng.integers(0, 1 << bits, (2, n, k)).astype(np.uint8)
    stream = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits].reshape(2, n, -1)
    scales, biases = rng.normal(size=(2, 2, n, k // g)).astype(np.float32)
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    tensors = {
        f"{name}.weight": np.packbits(stream, axis=-1, bitorder="little").view("<u4"),
        f"{name}.scales": scales,
        f"{name}.biases": biases,
    }
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4", name: {"group_size": g, "bits": bits}}
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "own", tensors, settings, model_type="olmoe"))
    for e in range(2):
        found = find_format(ckpt).matrix(f"model.layers.0.mlp.experts.{e}.up_proj").dequantize()
        want = codes[e] * np.repeat(scales[e].astype(np.float64), g, 1) + np.repeat(biases[e].astype(np.float64), g, 1)
        np.testing.assert_array_equal(found, want)
    folder = write_checkpoint(tmp_path / "family", tensors, settings, model_type="qwen3_next")
    with pytest.raises(CheckpointError, match="MLX weights of 'qwen3_next': mlx-lm changes tensors of some families"):
        find_format(open_checkpoint(folder))
    settings[name]["bits"] = 7
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "bits", tensors, settings, model_type="olmoe"))
    with pytest.raises(CheckpointError, match="MLX mode 'affine' of 7 bits; supported: affine of 2, 3, 4"):
        find_format(ckpt).matrix("model.layers.0.mlp.experts.0.up_proj")


def said(folder: Path, source: str, old: str, new: str) -> Path:
    """Return a copy of a fixture of torchao, in whose metadata every ``old`` is ``new``."""
    folder.mkdir()
    (folder / "config.json").write_bytes((FIXTURES / source / "config.json").read_bytes())
    data = (FIXTURES / source / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {k: v.replace(old, new) for k, v in header["__metadata__"].items()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return folder


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("torchao-int4", "Int4Tensor", "Int4PreshuffledTensor", "is a torchao Int4PreshuffledTensor; supported"),
        ("torchao-int4", '"_type"', '"type"', "weight is no JSON text with _type and _data; expected torchao's"),
        ("torchao-int4", "[1, 32]", "[1, 0]", r"block_size \[1, 0\], expected \[1, a divisor of \d+\]"),
        ("torchao-int8-dynamic", '"SYMMETRIC"', '"ASYMMETRIC"', "supported: none, symmetric PerRow of Float8Tensor"),
        ("torchao-fp8-rows", "PerRow", "PerBlock", "supported: none, symmetric PerRow of Float8Tensor"),
        ("torchao-intx4", '"int4"', '"uint4"', "target_dtype .*uint4.*, expected int1 to int8"),
    ],
)
def test_odd_metadata_of_torchao(name: str, old: str, new: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text):
        moe_layers(find_format(open_checkpoint(said(tmp_path / "odd", name, old, new))))[0].expert(0)


def test_refusals_of_torchao(tmp_path: Path) -> None:
    """By name and with the reason: codes in a GPU's order, and experts of a layer in one tensor."""
    folder = said(tmp_path / "tiles", "torchao-int4", "Int4Tensor", "Int4TilePackedTo4dTensor")
    with pytest.raises(CheckpointError, match=r"Int4TilePackedTo4dTensor, which is not read: .* NVIDIA's or AMD's"):
        moe_layers(find_format(open_checkpoint(folder)))[0].expert(0)
    name = "model.layers.0.mlp.experts._gate_up_proj_qdata"
    fused = write_checkpoint(tmp_path, {name: np.zeros((2, 4, 4), np.int8)}, {"quant_method": "torchao"})
    with pytest.raises(
        CheckpointError, match=rf"{name} has all experts of a layer; expected a torchao weight for each"
    ):
        find_format(open_checkpoint(fused))
