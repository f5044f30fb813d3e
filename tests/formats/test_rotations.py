"""compressed-tensors' transform_config: what the library makes of a model, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from compressed_tensors.transform import TransformArgs, TransformConfig, TransformFactory, apply_transform_config
from safetensors.torch import load_file, save_file
from support.models.tiny import make_checkpoint, make_float_checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quantmoe.custom_ops.hadamard_matrix import matrix
from quantmoe.custom_ops.matrix import unrotated
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.weights.rotations import refusal
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
         "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}  # fmt: skip
ATTENTION = ["re:.*self_attn$"]


def args(location: str, targets: list[str], **others: Any) -> dict[str, Any]:
    return {"location": location, "targets": targets, **others}


#: SpinQuant's R2, of values and what multiplies them, and R3, of scores
R2 = [args("weight_output", ["re:.*v_proj$"]), args("weight_input", ["re:.*o_proj$"], inverse=True)]
R3 = [args("q_attn", ATTENTION), args("k_cache", ATTENTION)]


def config(applied: list[Any], type: str = "hadamard", **fields: Any) -> dict[str, Any]:
    return {"config_groups": {"R": {"type": type, "apply": applied, **({"head_dim": 32} | fields)}}}


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
    said["quantization_config"]["transform_config"] = config([args("output", ["Linear"])])
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"config\.json: transform_config's group 'R': it multiplies the output of"
    ):
        find_format(open_checkpoint(folder))


PARTS = ("gate", "up", "down")
INPUT = TransformArgs(targets=["Linear"], location="input")
#: the inputs that QuIP rotates: of all linears, here also of the routers, which the configuration's ignore names
INPUTS = [args("input", ["Linear"], ignore=["lm_head"])]
ATTENTION_INPUTS = [args("input", ["re:.*self_attn.[qkvo]_proj$"])]


def rotated_checkpoint(
    folder: Path, applied: list[Any], type: str, size: int | None, tensors: dict[str, torch.Tensor], **fields: Any
) -> Path:
    """Write a checkpoint with a transform_config and the matrices that the library stores, one for all of a size."""
    made = make_checkpoint(folder, "qwen3_moe", **(SIZES | fields))
    said = json.loads((made / "config.json").read_text(encoding="utf-8"))
    said["quantization_config"]["transform_config"] = config(applied, type, head_dim=size)
    (made / "config.json").write_text(json.dumps(said), encoding="utf-8")
    stored = load_file(made / "model.safetensors")
    save_file(stored | tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def factory(type: str, size: int | None) -> Any:
    scheme = TransformConfig.model_validate(config(INPUTS, type, head_dim=size)).config_groups["R"]
    return TransformFactory.from_scheme(scheme, name="R", seed=3)


@pytest.mark.parametrize("size", [None, 16])
@pytest.mark.parametrize("type", ["hadamard", "random-hadamard"])
def test_inputs_of_linears(tmp_path: Path, type: str, size: int | None) -> None:
    """Every linear is the library's linear, whose hook rotates its input; the export gives the reader's logits."""
    transforms = {n: factory(type, size).create_transform(torch.nn.Linear(n, 8), INPUT) for n in (64, 128)}
    places = {"model.layers.0.self_attn.q_proj": 128, "model.layers.0.mlp.experts.0.down_proj": 64}
    tensors = {f"{module}.R_input.weight": transforms[n].weight.detach().clone() for module, n in places.items()}
    if size:
        transforms[64] = transforms[128]
        tensors.popitem()
    folder = rotated_checkpoint(tmp_path, INPUTS, type, size, tensors)
    format = find_format(open_checkpoint(folder))
    layer = "model.layers.1."
    attention, expert = (
        (f"{layer}self_attn.{p}_proj" for p in "qkvo"),
        (f"{layer}mlp.experts.3.{p}_proj" for p in PARTS),
    )
    for module in (*attention, *expert):
        matrix = format.matrix_of(module)
        x = torch.randn(5, matrix.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        turned = transforms[matrix.shape[1]](x).numpy()
        want = turned @ unrotated(matrix).dequantize().T
        np.testing.assert_allclose(x.numpy() @ matrix.dequantize().T, want, rtol=0, atol=1e-6 * np.abs(want).max())
    ids = np.arange(3, 40)[None]
    model: Any = dequantized(Skeleton(format))
    for dtype in ("f32", "f16"):
        export(folder, tmp_path / dtype, activations="float", cache=dtype, dtype=dtype, logits="all")
        generator = Generator(tmp_path / dtype)
        found = generator.step(ids, generator.start())[0].astype(np.float64)
        want = logits(model, torch.from_numpy(ids))
        assert np.abs(found - want).max() < (2e-5 if dtype == "f32" else 1e-2) * np.abs(want).max()


def test_a_whole_model_beside_the_librarys(tmp_path: Path) -> None:
    """transformers' model with the library's hooks on attention gives the export's logits, also in standard nodes."""
    plain: Any = dequantized(Skeleton(find_format(open_checkpoint(make_checkpoint(tmp_path, "qwen3_moe", **SIZES)))))
    apply_transform_config(
        plain, TransformConfig.model_validate(config(ATTENTION_INPUTS, "random-hadamard", head_dim=None))
    )
    name = "model.layers.0.self_attn.q_proj.R_input.weight"
    tensors = {name: plain.state_dict()[name].clone()}
    folder = rotated_checkpoint(tmp_path, ATTENTION_INPUTS, "random-hadamard", None, tensors)
    ids = np.arange(3, 40)[None]
    want = logits(plain, torch.from_numpy(ids))
    for target, others in (("cpu", {"activations": "float", "cache": "f32"}), ("ort", {})):
        export(folder, tmp_path / target, target=target, logits="all", **others)
        generator = Generator(tmp_path / target)
        assert near(generator.step(ids, generator.start())[0].astype(np.float64).reshape(want.shape), want)
        names = [
            node.op_type for node in onnx.load(tmp_path / target / "model.onnx", load_external_data=False).graph.node
        ]
        assert ("Hadamard" in names) == (target == "cpu")
    export(folder, tmp_path / "cuda", target="cuda")


def test_experts_on_other_targets(tmp_path: Path) -> None:
    """Hidden states are rotated before a node of experts; what down_proj multiplies, in the CPU's node alone."""
    gates = [args("input", ["re:.*experts.*(gate|up)_proj$"])]
    name = "model.layers.0.mlp.experts.0.gate_proj.R_input.weight"
    tensors = {name: factory("hadamard", None).create_transform(torch.nn.Linear(128, 8), INPUT).weight.detach()}
    folder = rotated_checkpoint(tmp_path / "gates", gates, "hadamard", None, tensors)
    want = logits(dequantized(Skeleton(find_format(open_checkpoint(folder)))), torch.arange(3, 40)[None])
    for target, others in (("cpu", {"activations": "float", "cache": "f32"}), ("ort", {})):
        export(folder, tmp_path / target, target=target, logits="all", **others)
        generator = Generator(tmp_path / target)
        assert near(generator.step(np.arange(3, 40)[None], generator.start())[0].reshape(want.shape), want)
    export(folder, tmp_path / "cuda", target="cuda")
    tensors = {
        name.replace("gate_proj", "down_proj"): factory("hadamard", 32)
        .create_transform(torch.nn.Linear(64, 8), INPUT)
        .weight.detach()
    }
    folder = rotated_checkpoint(tmp_path / "down", [args("input", ["re:.*down_proj$"])], "hadamard", 32, tensors)
    for target, who in (("cuda", "the CUDA kernels do"), ("ort", "QMoE does")):
        with pytest.raises(
            CheckpointError, match=rf"experts\.0: down: its input is rotated in each run, which {who} not"
        ):
            export(folder, tmp_path / "no", target=target)


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (r"re:.*gate_proj$", r"the inputs of .*0\.gate_proj and .*0\.up_proj are rotated differently, expected one"),
        (r"re:.*experts\.[12]\.down_proj$", "experts 0 and 1 are rotated differently, expected one rotation"),
    ],
)
def test_experts_that_are_rotated_differently(tmp_path: Path, targets: str, text: str) -> None:
    tensors = {"model.layers.0.mlp.experts.1.down_proj.R_input.weight": torch.from_numpy(matrix(64)).float()}
    tensors["model.layers.0.mlp.experts.0.gate_proj.R_input.weight"] = torch.from_numpy(matrix(128)).float()
    folder = rotated_checkpoint(tmp_path / "checkpoint", [args("input", [targets])], "hadamard", None, tensors)
    with pytest.raises(CheckpointError, match=text):
        export(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("applied", "type", "size", "matrix", "text"),
    [
        (
            INPUTS,
            "hadamard",
            24,
            None,
            "q_proj: transform_config's group 'R' rotates its 128 inputs in blocks of 24, ",
        ),
        (
            INPUTS,
            "hadamard",
            256,
            None,
            "its 128 inputs in blocks of 256, expected a power of two that divides",
        ),
        (INPUTS, "hadamard", 32, None, r"q_proj\.R_input\.weight is missing, and so is another of \[32, 32\]"),
        (INPUTS, "random-hadamard", 32, torch.eye(32), r"q_proj\.R_input\.weight is not Hadamard's matrix of 32 with"),
        (INPUTS, "random-hadamard", 32, torch.zeros(32, 32), "is not Hadamard's matrix of 32 with"),
    ],
)
def test_matrices_that_are_refused(
    tmp_path: Path, applied: list[Any], type: str, size: int, matrix: torch.Tensor | None, text: str
) -> None:
    tensors = {} if matrix is None else {"model.layers.0.self_attn.q_proj.R_input.weight": matrix}
    folder = rotated_checkpoint(tmp_path, applied, type, size, tensors)
    with pytest.raises(CheckpointError, match=text):
        find_format(open_checkpoint(folder)).matrix_of("model.layers.0.self_attn.q_proj")


def test_two_groups_that_rotate_an_input(tmp_path: Path) -> None:
    folder = rotated_checkpoint(tmp_path, INPUTS, "hadamard", 32, {})
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    groups = said["quantization_config"]["transform_config"]["config_groups"]
    groups["S"] = groups["R"]
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(CheckpointError, match="q_proj: the groups 'R', 'S' of transform_config rotate its input"):
        find_format(open_checkpoint(folder)).matrix_of("model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("given", "codes", "text"),
    [
        (config(R2), True, ""),
        (config(R2, "random-matrix"), True, ""),
        (config(R3, "random-hadamard", randomize=True), False, ""),
        (config(INPUTS), False, ""),
        (config(INPUTS, "random-matrix"), False, "random-matrix on inputs, expected one of hadamard, random-hadamard"),
        (config(INPUTS, randomize=True), False, "randomize with inputs"),
        (config(INPUTS, head_dim=0), False, "head_dim 0, expected a positive integer or null"),
        (config([args("input", [1])]), False, "targets .1., expected a list of names"),
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
