"""compressed-tensors' transform_config: what the library makes of a model, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from tiny import make_checkpoint, make_float_checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.formats.rotations import refusal

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
         "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}  # fmt: skip
ATTENTION = ["re:.*self_attn$"]


def args(location: str, targets: list[str], **others: Any) -> dict[str, Any]:
    return {"location": location, "targets": targets, **others}


#: SpinQuant's R2, of values and what multiplies them, and R3, of scores
R2 = [args("weight_output", ["re:.*v_proj$"]), args("weight_input", ["re:.*o_proj$"], inverse=True)]
R3 = [args("q_attn", ATTENTION), args("k_cache", ATTENTION)]


def config(applied: list[Any], type: str = "hadamard", **fields: Any) -> dict[str, Any]:
    return {"config_groups": {"R": {"type": type, "head_dim": 32, "apply": applied, **fields}}}


def logits(model: Any, ids: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        return model(ids).logits.double().numpy()


def rotated(module: Any, query: torch.Tensor, key: torch.Tensor, *others: Any, **more: Any) -> Any:
    """Attend as transformers does, with the library's matrices.

    Its own hook of k_cache (0.20.1) waits for an argument past_key_values, which transformers 5.24 calls cache.
    """
    return sdpa_attention_forward(module, module.R_q_attn(query), module.R_k_cache(key), *others, **more)


AttentionInterface.register("rotated", rotated)
AttentionMaskInterface.register("rotated", sdpa_mask)


def apply(model: Any, rotation: list[Any], type: str) -> None:
    """Rotate a model's weights or scores with the library."""
    apply_transform_config(model, TransformConfig.model_validate(config(rotation, type)))
    if rotation is R3:
        model.set_attn_implementation("rotated")


def near(a: np.ndarray, b: np.ndarray) -> bool:
    """f32 on both sides: some thousand roundings of 6e-8."""
    return float(np.abs(a - b).max() / np.abs(b).max()) < 2e-5


@pytest.mark.parametrize("type", ["hadamard", "random-hadamard"])
def test_what_the_library_rotates(tmp_path: Path, type: str) -> None:
    """A float model with R2 and R3 gives what it gave without; so does one that lacks R3, as export makes it."""
    folder = make_float_checkpoint(tmp_path, "qwen3_moe", dtype=torch.float32, **SIZES)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(3, 12)[None]
    plain, values = logits(model, ids), model.model.layers[0].self_attn.v_proj.weight.clone()
    for rotation in (R2, R3):
        apply(model, rotation, type)
        assert near(logits(model, ids), plain)
    attention, query = model.model.layers[0].self_attn, torch.eye(32)[None]
    assert not near(attention.v_proj.weight.detach().numpy(), values.detach().numpy())
    assert not near(attention.R_q_attn(query).detach().numpy(), query.numpy())


def test_a_checkpoint(tmp_path: Path) -> None:
    """The reader's model is the library's, whose attention rotates queries and keys."""
    folder = make_checkpoint(tmp_path, "qwen3_moe", **SIZES)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    said["quantization_config"]["transform_config"] = config(R2 + R3)
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    model: Any = dequantized(Skeleton(find_format(open_checkpoint(folder))))
    ids = torch.arange(3, 12)[None]
    read = logits(model, ids)
    apply(model, R3, "hadamard")
    assert model.config._attn_implementation == "rotated"
    assert near(logits(model, ids), read)
    said["quantization_config"]["transform_config"] = config([args("input", ["Linear"])])
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"config\.json: transform_config's group 'R': it multiplies the input of"
    ):
        find_format(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("given", "codes", "text"),
    [
        (config(R2), True, ""),
        (config(R2, "random-matrix"), True, ""),
        (config(R3, "random-hadamard", randomize=True), False, ""),
        (config([args("input", ["Linear"])]), False, r"multiplies the input of \['Linear'\] by a matrix in each run"),
        (config([args("output", ["Linear"])]), False, "multiplies the output of"),
        (config(R2, "householder"), False, "type 'householder', expected one of hadamard, random-hadamard, random-m"),
        (config([args("v_cache", ATTENTION)]), False, "location 'v_cache', expected one of weight_input"),
        (config(R3, "random-matrix"), False, "random-matrix on q_attn and k_cache: scores differ"),
        (config(R3[:1]), False, "hadamard on q_attn: scores differ"),
        (config([R3[0], R3[1] | {"inverse": True}]), False, "hadamard on q_attn and k_cache: scores differ"),
        (config([R3[0], R3[1] | {"ignore": ["re:.*0.self_attn$"]}]), False, "of the same modules"),
        (config(R3), True, "k_scale is of rotated keys"),
        ({"config_groups": {"R": 1}}, False, "found 1, expected type and apply"),
        (config([1]), False, "location 1, expected one of"),
        ({"groups": {}}, False, "transform_config has groups, expected config_groups"),
    ],
)
def test_refusals(given: dict[str, Any], codes: bool, text: str) -> None:
    assert re.search(text, refusal(given, codes))
    assert bool(text) == bool(refusal(given, codes))
