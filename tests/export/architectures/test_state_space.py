"""Mamba-2's state space in whole models: against transformers and against themselves in other pieces, rows and windows,
checkpoints as NVIDIA publishes them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.architectures.test_architectures import SIZES, make_checkpoint
from export.architectures.test_hybrid import ragged
from export.architectures.test_lightning import check_going_back, check_window, run
from export.graph.test_model import error
from safetensors.torch import load_file, save_file
from support.harness.once import made_once
from support.harness.sweeps import every
from support.models.genai import check_tokens
from support.models.tiny import add_quantization, rewrite_linears
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.graph.modules.states.state_space import recognise
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

OPTIONS: dict[str, Any] = {"quantize": "none", "activations": "float", "cache": "f32"}
BLOCKS = ["linear_attention", "moe", "full_attention"]
TOKENS = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (3, 300))
PROMPT = TOKENS[0, :23].tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state space, experts and attention. Of four heads two have steps below 0.001."""

    def write(folder: Path) -> None:
        make_checkpoint(folder, "nemotron_h", layer_types=BLOCKS, max_position_embeddings=512)
        tensors = load_file(folder / "model.safetensors")
        for name, values in (("A_log", [0.0, -4.0, 3.0, 5.0]), ("dt_bias", [0.0, 1.0, -8.0, -9.0])):
            tensors[f"backbone.layers.0.mixer.{name}"] = torch.tensor(values, dtype=torch.bfloat16)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return made_once(tmp_path_factory, write, "nemotron")


@pytest.fixture(scope="module")
def model(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, lambda folder: export(source, folder, logits="all", **OPTIONS), "nemotron-model")


def whole(source: Path) -> PreTrainedModel:
    """transformers' model with time steps limited as config.json says, see architectures/nemotron_h.py."""
    found = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for module in found.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return found


def logits(model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


def test_pieces_give_the_logits_of_transformers(source, model):
    """Whose prompts have a least time step that config.json does not have: it moves logits."""
    want = logits(whole(source), TOKENS[:1])
    for pieces in ((300,), (1, 7, 64, 65, 163), (65, 64, *[1] * 20, 7, 144)):
        assert error(run(Generator(model), TOKENS[:1], pieces), want) < 2e-5, pieces
    other = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert error(logits(other, TOKENS[:1]), want) > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts(model, side):
    generator, lengths = Generator(model), (7, 4, 1)
    for row, (n, found) in enumerate(zip(lengths, ragged(generator, TOKENS, lengths, side), strict=True)):
        want = run(generator, TOKENS[row : row + 1, : n + 2], (n, 1, 1))[0, n - 1 :]
        assert error(found, want) < 2e-5, (row, n)


def test_interface(model):
    found = inspect(model)
    (states,) = found["linear_attention"]
    assert (states["width"], states["state_bytes"]) == (4, 4 * 128 * 3 + 4 * 4 * 16 * 16)
    assert (states["attributes"]["z_size"], states["attributes"]["norm_size"]) == (196, 32)
    names = set(Generator(model).start())
    assert names == {f"past_key_values.{name}" for name in ("0.conv_state", "0.recurrent_state", "2.key", "2.value")}
    nodes = [node.op_type for node in ir.load(model / "model.onnx").graph if node.domain == "quantmoe"]
    assert {"CausalConv", "StateSpace", "QuantMoE", "MoERouting"} <= set(nodes)
    decoder = json.loads((model / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]
    assert decoder["num_hidden_layers"] == len(BLOCKS)


@pytest.mark.every
def test_speculation_with_a_window_of_states(source, model, tmp_path):
    export(source, tmp_path / "windowed", logits=5, state_window=5, **OPTIONS)
    check_window(model, tmp_path / "windowed", PROMPT)


@pytest.mark.every
def test_going_back_and_states_on_disk(model, tmp_path):
    check_going_back(model, PROMPT, tmp_path / "state")


@pytest.mark.every
def test_states_are_f32_in_any_graph(source, tmp_path):
    """float16 has 11 significant bits: 5e-4 a rounding, some tens of them in a row. All experts get every token."""
    make_checkpoint(tmp_path / "checkpoint", "nemotron_h", layer_types=BLOCKS, num_experts_per_tok=8, n_group=1)
    export(tmp_path / "checkpoint", tmp_path / "model", logits="all", **OPTIONS | {"cache": "f16", "dtype": "f16"})
    generator, ids = Generator(tmp_path / "model"), TOKENS[:1, :70]
    assert generator.session.get_outputs()[0].type == "tensor(float16)"  # transformers widens its logits
    dtypes = {name: array.dtype for name, array in generator.start().items()}
    assert dtypes["past_key_values.0.conv_state"] == np.float16
    assert dtypes["past_key_values.0.recurrent_state"] == np.float32
    assert error(run(generator, ids, (60, 1, 9)), logits(whole(tmp_path / "checkpoint"), ids)) < 2e-2


@pytest.mark.every
def test_copied_layers(tmp_path):
    """Of five pairs three are traced; their group norms without weights have one constant."""
    make_checkpoint(tmp_path / "checkpoint", "nemotron_h", layer_types=[*BLOCKS[:2] * 5, BLOCKS[2]])
    report = export(tmp_path / "checkpoint", tmp_path / "model", logits="all", **OPTIONS)
    assert not report.untraced
    found = run(Generator(tmp_path / "model"), TOKENS[:1, :9], (7, 1, 1))
    assert error(found, logits(whole(tmp_path / "checkpoint"), TOKENS[:1, :9])) < 2e-5


@pytest.mark.every
def test_experts_of_a_latent(tmp_path):
    """As Nemotron-3-Super's: they read and write 32 features, the shared expert 64."""
    make_checkpoint(tmp_path / "checkpoint", "nemotron_h", layer_types=BLOCKS, moe_latent_size=32)
    export(tmp_path / "checkpoint", tmp_path / "model", logits="all", **OPTIONS)
    (layer,) = inspect(tmp_path / "model")["layers"]
    assert layer["attributes"]["hidden_size"] == 32
    found = run(Generator(tmp_path / "model"), TOKENS[:1, :9], (7, 1, 1))
    assert error(found, logits(whole(tmp_path / "checkpoint"), TOKENS[:1, :9])) < 2e-5


def nvfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random codes; scales near those of the weight."""
    rng, (n, k) = np.random.default_rng(weight.numel()), weight.shape
    scales = rng.uniform(0.5, 2, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return {
        "weight": torch.from_numpy(rng.integers(0, 256, (n, k // 2), dtype=np.uint8)),
        "weight_scale": torch.from_numpy(scales).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.02),
        "input_scale": torch.tensor(0.01),
    }


def fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.float().abs().max() / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.01)}


@pytest.mark.parametrize("tool", every(["MIXED_PRECISION", "FP8"], 0))
def test_checkpoints_as_nvidia_publishes_them(source, tmp_path, tool):
    """NVFP4 experts and FP8 projections of state spaces in one, FP8 of all of them in the other; what lies around
    attention in 16 bits, keys and values in FP8. config.json has a pattern of blocks, and an infinite limit."""
    folder = tmp_path / "checkpoint"
    make_checkpoint(folder, "nemotron_h", layer_types=["linear_attention", *BLOCKS], max_position_embeddings=512)
    plain = ["layers.1.", "layers.3.", "lm_head", "gate", "embeddings", "conv1d"]
    stored: dict[str, str] = {}

    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        experts = weight.shape in ((64, 64), (128, 64), (64, 128))  # of the experts and the shared one, up and down
        return nvfp4(weight) if tool != "FP8" and experts else fp8(weight)

    rewrite_linears(folder, quantize, plain)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            stored[module] = "NVFP4" if f"{module}.weight_scale_2" in tensors else "FP8"
    assert set(stored.values()) == ({"FP8"} if tool == "FP8" else {"FP8", "NVFP4"})
    scales = {f"backbone.layers.3.mixer.{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    save_file(tensors | scales, folder / "model.safetensors", metadata={"format": "pt"})
    quantization: dict[str, Any] = {"quant_algo": tool, "kv_cache_quant_algo": "FP8"}
    if tool == "FP8":
        quantization["exclude_modules"] = ["lm_head", "backbone.layers.1.mixer.*", "backbone.layers.3.mixer.*"]
    else:
        quantization["quantized_layers"] = {module: {"quant_algo": kind} for module, kind in stored.items()}
    saved = {"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(saved), encoding="utf-8")
    add_quantization(folder, {"quant_method": "modelopt", **quantization})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["layers_block_type"]
    config |= {"hybrid_override_pattern": "MME*", "num_hidden_layers": 4, "time_step_limit": [0.0, math.inf]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert survey(folder)["attention"] == "2 layers of linear attention, 1 layers of full attention"

    export(folder, tmp_path / "model", activations="float", logits="all", cache="f32")
    found = inspect(tmp_path / "model")
    formats = {layer["attributes"]["w13_format"] for layer in found["layers"]}
    assert formats == {"fp8_e4m3" if tool == "FP8" else "nvfp4"}
    want = dequantized(Skeleton(find_format(open_checkpoint(folder))))
    for module in want.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    generator, ids = Generator(tmp_path / "model"), TOKENS[:2, :9]
    assert error(run(generator, ids, (7, 1, 1)), logits(want, ids)) < 2e-5
    check_tokens(tmp_path / "model", PROMPT, 8)


def test_what_cannot_be_is_named(source, tmp_path):
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    for fields, reason in (
        ({"time_step_limit": [0.0, 0.1]}, r"mixer: NemotronHMamba2Mixer: its time_step_limit is \(0\.0, 0\.1\), expe"),
        ({"num_hidden_layers": 5}, "config.json: layers_block_type is of 3 layers, expected num_hidden_layers, 5"),
        ({"mamba_hidden_act": "gelu"}, r"mixer: NemotronHMamba2Mixer: it computes something else than Mamba-2's state"),
    ):
        folder = tmp_path / next(iter(fields))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | fields), encoding="utf-8")
        shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=reason):
            plan(folder, tmp_path / "model", **OPTIONS)
    with pytest.raises(CheckpointError, match=r"mixer: a state space is not divided among ranks"):
        plan(source, tmp_path / "model", tensor_parallel=2, **OPTIONS)


def test_state_spaces_alone_are_refused(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", "nemotron_h", layer_types=BLOCKS[:2])
    with pytest.raises(CheckpointError, match="1 layers of linear attention alone; expected one of full attention"):
        plan(tmp_path / "checkpoint", tmp_path / "model", **OPTIONS)


@pytest.mark.parametrize(
    ("model_type", "blocks"),
    [
        ("bamba", {"attn_layer_indices": [1]}),
        ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]}),
    ],
)
def test_mixers_of_the_same_kind_are_recognised(model_type, blocks):
    """Whatever their class is called; not one that computes a little else."""
    sizes = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_d_head": 16, "mamba_expand": 2}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    given = sizes | blocks | {name: SIZES[name] for name in names} | {"num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**given))
    found, left = recognise(model, lambda spec: "", 3)
    (own,) = (own.space for own in found.values())
    assert (own.num_groups, own.num_heads, own.head_size, own.state_size, own.state_window) == (2, 8, 16, 16, 3)
    assert own.norm_size == 64
    assert not left
    (name,) = found
    assert recognise(model, lambda spec: "no kernel", 1)[1] == {
        name: f"{type(model.get_submodule(name)).__name__}: no kernel"
    }
    model.get_submodule(name).act = torch.nn.ReLU()
    model.get_submodule(name).activation = "relu"
    assert "something else than Mamba-2" in recognise(model, lambda spec: "", 1)[1][name]
