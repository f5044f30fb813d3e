"""Checkpoints as they are published: tied embeddings, layers in 16 bits, layers for speculation, wrapped models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from export.graph.test_model import error, expected, run, tokens
from support.harness.sweeps import every
from support.models.tiny import make_float_checkpoint

from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import Format, find_format, open_checkpoint
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.writing.convert import Report, export
from quantmoe.runtime.generate import Generator

Tensors = Iterator[tuple[str, np.ndarray]]


def rewritten(source: Path, folder: Path, change: Callable[[Format], Tensors], config: Callable[[dict], dict]) -> Path:
    """Another checkpoint made of one's tensors."""
    format = find_format(open_checkpoint(source))
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", lambda: change(format))
    (folder / "config.json").write_text(json.dumps(config(dict(format.ckpt.config))), encoding="utf-8")
    return folder


def check(folder: Path, out: Path, quantize: str | None = None) -> Report:
    """Exports with float activations; the logits are those of PyTorch with the dequantized weights."""
    report = export(folder, out, activations="float", quantize=quantize, logits="all", cache="f32")
    ckpt = open_checkpoint(folder)
    format = Unquantized(ckpt, quantize) if quantize else find_format(ckpt)
    ids = tokens(2, 7)
    want = expected(dequantized(Skeleton(format)), ids)
    assert error(run(Generator(out), ids, (5, 1, 1)), want) < 2e-5
    return report


def test_tied_embeddings(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe", tie_word_embeddings=True, num_hidden_layers=1)
    assert "lm_head.weight" not in open_checkpoint(folder)
    assert check(folder, tmp_path / "out").plain_routers == 0


def test_experts_left_in_16_bits_and_a_layer_for_speculation(checkpoint, tmp_path):
    def change(format: Format) -> Tensors:
        for name in format.ckpt.names():
            module, _, leaf = name.rpartition(".")
            packed = ".mlp.experts." in name
            if not (packed and ".layers.0." in name):
                yield name, format.ckpt.tensor(name)
            speculating = module.replace(".layers.1.", ".layers.2.")  # the model has the layers 0 and 1
            if packed and leaf == "weight_packed":
                weight = format.matrix(module).dequantize().astype(ml_dtypes.bfloat16)
                yield f"{speculating if '.layers.1.' in name else module}.weight", weight
            elif not packed and ".layers.1." in name:
                yield f"{speculating}.{leaf}", format.ckpt.tensor(name)

    source = checkpoint("qwen3_moe")
    report = check(
        rewritten(source, tmp_path / "c", change, lambda c: c | {"num_nextn_predict_layers": 1}), tmp_path / "o"
    )
    kinds = [spec.w13.format for _, spec in report.layers.values()]
    assert kinds == ["bf16", "int4"]
    assert [layer["attributes"]["w2_format"] for layer in inspect(tmp_path / "o")["layers"]] == kinds


@pytest.mark.parametrize("architecture", every(["olmoe", "gpt_oss"]))  # experts one by one, and fused
def test_a_checkpoint_of_floats_as_it_is(tmp_path, architecture):
    folder = make_float_checkpoint(tmp_path / "c", architecture, num_hidden_layers=1)
    report = check(folder, tmp_path / "o", quantize="none")
    assert [spec.w2.format for _, spec in report.layers.values()] == ["bf16"]
    assert {text for text, _ in report.linears.values()} == {"bf16, not quantized"}


def test_a_language_model_within_another(checkpoint, tmp_path):
    def wrapped(format: Format) -> Tensors:
        yield "vision_model.patch_embedding.weight", np.zeros((4, 4), np.float32)
        yield from ((f"language_model.{name}", format.ckpt.tensor(name)) for name in format.ckpt.names())

    def config(own: dict) -> dict:
        quantization = own.pop("quantization_config")
        return {"model_type": "llama4", "text_config": own, "quantization_config": quantization}

    check(rewritten(checkpoint("llama4_text"), tmp_path / "c", wrapped, config), tmp_path / "o")


def test_what_transformers_has_no_language_model_for(checkpoint, tmp_path):
    source = checkpoint("qwen3_moe")
    folder = rewritten(
        source,
        tmp_path / "c",
        lambda format: ((name, format.ckpt.tensor(name)) for name in format.ckpt.names()),
        lambda c: c | {"model_type": "qwen3_omni_moe_talker_code_predictor"},
    )
    with pytest.raises(
        CheckpointError, match=r"not a causal language model of .*: qwen3_omni_moe_talker_code_predictor"
    ) as caught:
        export(folder, tmp_path / "o")
    assert len(str(caught.value)) < 300
