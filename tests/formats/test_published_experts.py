"""Experts in the formats that models are published in: DeepSeek-V4's in FP4, Inkling 2's in MXFP8 and NVFP4.

The writers below follow transformers' readers. Logits are transformers' in float32, with the weights that the files
have.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.architectures.test_architectures import SIZES, logits_of, make_checkpoint, transformers_class
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

FLOATS: dict[str, Any] = {"activations": "float", "cache": "f32", "logits": "all"}
#: of E2M1 codes
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def exponents(groups: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the biased exponents of two, U8, by which the largest number of each group is at most ``largest``."""
    top = groups.abs().amax(-1).clamp(min=2.0**-60)
    return (torch.ceil(torch.log2(top / largest)) + 127).to(torch.uint8)


def nearest(groups: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes of numbers, two a byte, the first in the low half."""
    codes = (groups[..., None] - NUMBERS).abs().argmin(-1).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes U8 [.., K / 2] and scales U8 [.., K / 32]."""
    groups = weight.float().unflatten(-1, (-1, 32))
    scales = exponents(groups, 6)
    return nearest(groups / torch.exp2(scales.float() - 127)[..., None]), scales


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    return NUMBERS[torch.stack((codes & 15, codes >> 4), -1).long()].flatten(-2)


def scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return values [.., K] times scales [.., K / group]."""
    return (values.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def fp4_experts(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return an expert's tensors as DeepSeek-V4 has them, and the weights that they mean, in F32."""
    codes, scales = mxfp4(weight)
    stored = {name: codes.view(torch.int8), f"{name.removesuffix('weight')}scale": scales.view(torch.float8_e8m0fnu)}
    return stored, scaled(unpacked(codes), torch.exp2(scales.float() - 127))


def mxfp8_experts(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return all experts' tensors as Inkling-2-Small-MXFP8 has them, and the weights that they mean."""
    groups = weight.float().unflatten(-1, (-1, 32))
    scales = exponents(groups, 448)
    factors = torch.exp2(scales.float() - 127)
    codes = (groups / factors[..., None]).flatten(-2).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scales}, scaled(codes.float(), factors)


def nvfp4_experts(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return all experts' tensors as Inkling-2-Mini has them, and the weights that they mean."""
    amax, denominator = weight.float().abs().amax((1, 2)), torch.full((len(weight),), 6 * 448.0)
    factors, groups = (amax / denominator)[:, None, None], weight.float().unflatten(-1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / factors).to(torch.float8_e4m3fn)
    codes = nearest(groups / (scales.float() * factors).clamp(min=2.0**-60)[..., None])
    stored = {name: codes, f"{name}_scale": scales}
    stored |= {f"{name}_amax": amax, f"{name}_outer_scale_denominator": denominator}
    return stored, scaled(unpacked(codes), scales.float()) * factors


def rewrite(folder: Path, writers: dict[str, Any], **fields: Any) -> Path:
    """Quantize a tiny checkpoint's experts, and return a folder with the same weights in F32.

    Args:
        writers: pattern of tensors' names -> what makes tensors of one. fields: of config.json.
    """
    tensors, floats = load_file(folder / "model.safetensors"), {}
    for name in list(tensors):
        floats[name] = tensors[name].float() if tensors[name].is_floating_point() else tensors[name]
        if writer := next((writer for pattern, writer in writers.items() if re.search(pattern, name)), None):
            stored, floats[name] = writer(name, tensors.pop(name))
            tensors |= stored
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plain = folder.parent / "floats"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(floats, plain / "model.safetensors", {"format": "pt"})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
    return plain


def check_experts(folder: Path, want: dict[str, torch.Tensor]) -> None:
    """Compare each number of each expert; want: of the experts [E, N, K] of gate, up and down, by layer and part."""
    for layer in moe_layers(find_format(open_checkpoint(folder))):
        for e in range(layer.num_experts):
            expert = layer.expert(e)
            for part, matrix in (("gate", expert.gate), ("up", expert.up), ("down", expert.down)):
                assert matrix is not None
                assert np.array_equal(matrix.dequantize(np.float32), want[f"{layer.index} {part}"][e].numpy())


def difference(folder: Path, onnx: Path, plain: Path) -> float:
    """Export, and return the error of logits by the largest; plain: the folder that transformers reads."""
    export(folder, onnx, **FLOATS)
    own = transformers_class(AutoConfig.from_pretrained(plain))
    model = own.from_pretrained(plain, dtype=torch.float32).eval()
    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 14))
    with torch.no_grad():
        want = np.asarray(model(torch.from_numpy(ids)).logits)
    return float(np.abs(logits_of(onnx, ids) - want).max() / np.abs(want).max())


def test_experts_of_deepseek_v4_in_fp4(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, "deepseek_v4")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    fields = {"expert_dtype": "fp4", "quantization_config": fp8}
    plain = rewrite(folder, {r"\.experts\.\d+\.w\d\.weight$": fp4_experts}, **fields)
    floats = load_file(plain / "model.safetensors")
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    want = {
        f"{i} {part}": torch.stack([floats[f"model.layers.{i}.ffn.experts.{e}.{leaf}.weight"] for e in range(8)])
        for i in range(4)
        for part, leaf in names.items()
    }
    check_experts(folder, want)
    assert difference(folder, tmp_path / "onnx", plain) < 2e-5
    assert {scheme for scheme, *_ in plan(folder, tmp_path / "other").layers.values()} == {"MXFP4, activations per 128"}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for kind, message in (
        ("fp6", r"config\.json: expert_dtype 'fp6'; supported: fp8, fp4"),
        ("fp8", r"\.weight is I8 \[64, 32\], expected F8_E4M3 \[64, 32\] \(FP8\)"),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"expert_dtype": kind}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            plan(folder, tmp_path / "other")


#: Inkling-2-Mini has both
INKLING2 = {
    "inkling2": {r"experts\.w(13|2)_weight$": mxfp8_experts},
    "inkling2_loop": {
        r"\.[0-5]\..*experts\.w(13|2)_weight$": nvfp4_experts,
        r"experts\.w(13|2)_weight$": mxfp8_experts,
    },
}


@pytest.mark.parametrize("model_type", INKLING2)
def test_experts_of_inkling2(model_type: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, model_type)
    fields = {"quantization_config": {"quant_method": "mxfp8"}} if model_type == "inkling2" else {}
    plain = rewrite(folder, INKLING2[model_type], **fields)
    want = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if found := re.search(r"layers\.(\d+)\.mlp\.experts\.(w13|w2)_weight$", name):
            parts = {"gate": tensor[:, 0::2], "up": tensor[:, 1::2]} if found[2] == "w13" else {"down": tensor}
            want |= {f"{found[1]} {part}": values for part, values in parts.items()}
    check_experts(folder, want)
    # transformers 5.24 reads Inkling-2-Mini's experts itself, without a quantizer
    assert difference(folder, tmp_path / "onnx", folder if model_type == "inkling2_loop" else plain) < 2e-5
    schemes = Counter(scheme for scheme, *_ in plan(folder, tmp_path / "other").layers.values())
    assert schemes.keys() == ({"MXFP8"} if model_type == "inkling2" else {"MXFP8", "NVFP4"})


def test_refused_experts_of_inkling2(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, "inkling2")
    rewrite(folder, {r"experts\.w(13|2)_weight$": nvfp4_experts})
    tensors = load_file(folder / "model.safetensors")
    experts = "model.llm.layers.1.mlp.experts."
    for changed, message in (
        ({f"{experts}w2_weight": tensors[f"{experts}w2_weight"].view(torch.int8)}, "w2_weight is I8 with scales, "),
        ({f"{experts}w2_weight_amax": torch.ones(3)}, r"w2_weight_amax is F32 \[3\], expected .* \[8\]"),
        ({f"{experts}w2_weight_scale": tensors[f"{experts}w2_weight_scale"].view(torch.uint8)}, r"_scale is U8 \[8, "),
    ):
        save_file(tensors | changed, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            plan(folder, tmp_path / "onnx")
