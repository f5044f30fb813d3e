"""Encoders with experts: hidden states, vectors of texts and labels of tokens, against transformers in float32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.tiny import make_tokenizer
from transformers import AutoConfig, AutoModelForTokenClassification

from quantmoe.exporter.errors import CheckpointError, ModelError, OptionError
from quantmoe.exporter.folder.interface import ENCODER_TENSORS
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.ort_ext import library_path
from quantmoe.runtime.generate import Generator

#: the published mechanisms are the defaults of transformers' configuration: yarn, sinks, biases, a window on both sides
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 128,
    "sliding_window": 3,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
FLOATS: dict[str, Any] = {"quantize": "none", "activations": "float"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("encoder") / "checkpoint")


def make_checkpoint(folder: Path, **sizes: Any) -> Path:
    config = AutoConfig.for_model("openai_privacy_filter", **SIZES | sizes)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
        for name, tensor in model.named_parameters():
            own = torch.randn_like(tensor)
            if "norm" in name:
                tensor += own / 10
            else:
                tensor.copy_(own * (0.1 if "bias" in name else tensor.shape[-1] ** -0.5))
    model.bfloat16().save_pretrained(folder)
    return folder


def session(folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.register_custom_ops_library(library_path())
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def batch() -> dict[str, np.ndarray]:
    """Three texts of other lengths, padded on the right."""
    ids = np.random.default_rng(0).integers(3, 128, (3, 14))
    mask = np.ones_like(ids)
    mask[1, 9:], mask[2, 1:] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def expected(folder: Path, feed: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return transformers' hidden states and labels."""
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    given = {name: torch.from_numpy(value) for name, value in feed.items()}
    with torch.no_grad():
        states = model.model(**given).last_hidden_state
        return states.numpy(), model(**given).logits.numpy()


def near(found: np.ndarray, want: np.ndarray) -> bool:
    """Within 2e-5 of the largest number, as in test_architectures.py."""
    return found.shape == want.shape and np.abs(found - want).max() < 2e-5 * np.abs(want).max()


def test_an_encoder(checkpoint: Path, tmp_path: Path) -> None:
    """Each text of a batch has what it has alone. Experts and linears are packed, and the dry run says so."""
    dry = plan(checkpoint, tmp_path / "onnx", **FLOATS)
    report = export(checkpoint, tmp_path / "onnx", **FLOATS)
    assert {name: layer[:2] for name, layer in dry.layers.items()} == report.layers
    assert len(report.layers) == 5
    assert set(report.plain_attention.values()) == {"an encoder attends to tokens on both sides"}
    assert report.plain_routers == 0
    assert not report.untraced
    assert len(survey(checkpoint)["layers"]) == 5
    ran, feed = session(tmp_path / "onnx"), batch()
    assert {i.name: i.shape for i in ran.get_inputs()} == {key: ["batch_size", "sequence_length"] for key in feed}
    assert [*feed, *(o.name for o in ran.get_outputs())] == [row.name for row in ENCODER_TENSORS]
    hidden, vector, logits = ran.run(None, feed)
    want, labels = expected(checkpoint, feed)
    seen = feed["attention_mask"] > 0
    assert near(hidden[seen], want[seen])
    assert near(logits[seen], labels[seen])
    mean = np.stack([want[i, own].mean(0) for i, own in enumerate(seen)])
    assert near(vector, mean)
    alone = ran.run(None, {name: value[1:2, :9] for name, value in feed.items()})
    assert near(alone[1], mean[1:2])
    found = inspect(tmp_path / "onnx")
    assert [len(found[kind]) for kind in ("layers", "attention")] == [5, 0]
    assert len(found["linears"]) == 5 * 2 + 1  # queries, keys and values are one
    with pytest.raises(ModelError, match=r"model\.onnx: an encoder, which writes no text"):
        Generator(tmp_path / "onnx")


def test_for_cuda(checkpoint: Path, tmp_path: Path) -> None:
    """Nodes of the CUDA library, with f16 outside the experts; nothing runs it here."""
    export(checkpoint, tmp_path / "onnx", target="cuda", quantize="int4")
    nodes = [node.op_type for node in ir.load(tmp_path / "onnx" / "model.onnx").graph]
    assert nodes.count("QuantMoE") == 5
    assert "MoERouter" in nodes


def pooled(folder: Path, mode: str, normalized: bool) -> None:
    """Write sentence-transformers' files."""
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64} | modes), "utf-8")
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalized]
    listed = [{"idx": i, "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")


def test_pooling(checkpoint: Path, tmp_path: Path) -> None:
    """Follow sentence-transformers' files. A checkpoint of the encoder alone has no labels."""
    other = tmp_path / "checkpoint"
    other.mkdir()
    (other / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("score.")}
    save_file(kept, other / "model.safetensors", {"format": "pt"})
    pooled(other, "cls_token", normalized=True)
    export(other, tmp_path / "onnx", **FLOATS)
    ran, feed = session(tmp_path / "onnx"), batch()
    assert [o.name for o in ran.get_outputs()] == ["last_hidden_state", "sentence_embedding"]
    first = expected(checkpoint, feed)[0][:, 0]
    assert near(ran.run(["sentence_embedding"], feed)[0], first / np.linalg.norm(first, axis=-1, keepdims=True))
    (other / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}', "utf-8")
    with pytest.raises(CheckpointError, match=re.escape("config.json: pooling_mode_max_tokens; expected one of pooli")):
        plan(other, tmp_path / "again", **FLOATS)


@pytest.mark.parametrize("option", [{"mtp": True}, {"paged": True, "target": "cuda"}, {"state_window": 2}])
def test_options_of_decoders(checkpoint: Path, tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises((OptionError, CheckpointError), match=next(iter(option))):
        plan(checkpoint, tmp_path / "onnx", quantize="int4", **option)


def test_fastembed(tmp_path: Path) -> None:
    """It reads the folder of ``--target ort``, and has the graph's own vectors: both take the mean over the tokens."""
    fastembed = pytest.importorskip("fastembed", reason="fastembed is not installed")
    from fastembed.common.model_description import ModelSource, PoolingType

    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 256
    sizes = {"vocab_size": -(-len(tokenizer) // 64) * 64, "intermediate_size": 64}
    make_checkpoint(tmp_path / "checkpoint", **sizes)
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "onnx", quantize="int4", target="ort")
    source = ModelSource(hf="quantmoe/encoder")
    fastembed.TextEmbedding.add_custom_model(
        model="quantmoe/encoder",
        pooling=PoolingType.MEAN,
        normalization=False,
        sources=source,
        dim=SIZES["hidden_size"],
        model_file="model.onnx",
    )
    texts = ["A mixture of experts routes each token", "A router"]
    found = fastembed.TextEmbedding("quantmoe/encoder", specific_model_path=str(tmp_path / "onnx")).embed(texts)
    feed = {name: tensor.numpy() for name, tensor in tokenizer(texts, padding=True, return_tensors="pt").items()}
    ran = session(tmp_path / "onnx")
    want = ran.run(["sentence_embedding"], {i.name: feed[i.name] for i in ran.get_inputs()})[0]
    assert near(np.stack([*found]), want)
