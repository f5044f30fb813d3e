"""EAGLE-3 heads: features and drafts against the published computation in PyTorch, tokens, and what is refused.

Weights are random: no draft is right but by chance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export.generation.test_generate import PROMPT
from export.graph.test_model import VOCABULARY, error
from safetensors.torch import load_file, save_file
from support.harness.sweeps import every

from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import CheckpointError, OptionError
from quantmoe.exporter.graph import trace
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.reading.eagle3 import feature_layers
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

HIDDEN, HEADS, SIZE, DRAFTED = 192, 4, 32, 100
LAYERS = [1, 0, 1]
FLOATS: dict[str, Any] = {"activations": "float", "cache": "f32"}


def write_head(folder: Path, **fields: Any) -> Path:
    """Write a head as SpecForge does: without embeddings, for some of the tokens."""
    draw = torch.Generator().manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k, generator=draw) * k**-0.5).bfloat16()

    def norm() -> torch.Tensor:
        return (1 + torch.randn(HIDDEN, generator=draw) / 8).bfloat16()

    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": SIZE,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFTED,
        "max_position_embeddings": 16,  # the model's own are more
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True},
    } | fields
    layer = {
        "input_layernorm": norm(),
        "hidden_norm": norm(),
        "post_attention_layernorm": norm(),
        "self_attn.q_proj": matrix(HEADS * SIZE, 2 * HIDDEN),
        "self_attn.k_proj": matrix(2 * SIZE, 2 * HIDDEN),
        "self_attn.v_proj": matrix(2 * SIZE, 2 * HIDDEN),
        "self_attn.o_proj": matrix(HIDDEN, HEADS * SIZE),
        "mlp.gate_proj": matrix(256, HIDDEN),
        "mlp.up_proj": matrix(256, HIDDEN),
        "mlp.down_proj": matrix(HIDDEN, 256),
    }
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {"fc.weight": matrix(HIDDEN, 3 * HIDDEN), "lm_head.weight": matrix(DRAFTED, HIDDEN)}
    tensors["norm.weight"] = norm()
    chosen = torch.randperm(VOCABULARY, generator=draw)[:DRAFTED].sort().values
    tensors["d2t"] = chosen - torch.arange(DRAFTED)
    tensors["t2d"] = torch.isin(torch.arange(VOCABULARY), chosen)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


class Published:
    """A head by the paper and SGLang's llama_eagle3.py, in f32.

    Args:
        before: norm_before_residual.
    """

    def __init__(self, folder: Path, embeddings: torch.Tensor, before: bool = False):
        self.w = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        self.embeddings, self.before = embeddings, before

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def __call__(self, features: torch.Tensor, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features [S, H] that follow, and the logits [S, V] of all tokens."""
        layer = "midlayer."
        count = len(ids)
        normed = self.norm(features, f"{layer}hidden_norm")
        x = torch.cat((self.norm(self.embeddings[ids], f"{layer}input_layernorm"), normed), -1)
        weights = (self.w[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv")
        q, k, v = ((x @ weight.T).view(count, -1, SIZE).transpose(0, 1) for weight in weights)
        angles = torch.arange(count)[:, None] * 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
        cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))

        def turned(t: torch.Tensor) -> torch.Tensor:
            return t * cos + torch.cat((-t[..., SIZE // 2 :], t[..., : SIZE // 2]), -1) * sin

        k, v = (t.repeat_interleave(HEADS // 2, 0) for t in (turned(k), v))
        scores = turned(q) @ k.transpose(1, 2) * SIZE**-0.5 + torch.full((count, count), -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = (normed if self.before else features) + attended @ self.w[f"{layer}self_attn.o_proj.weight"].T
        y = self.norm(x, f"{layer}post_attention_layernorm")
        gate, up, down = (self.w[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T
        logits = torch.full((count, VOCABULARY), torch.finfo(torch.float32).min)
        drafted = torch.arange(DRAFTED) + self.w["d2t"].long()
        logits[:, drafted] = self.norm(x, "norm") @ self.w["lm_head.weight"].T
        return x, logits


def states(folder: Path, ids: np.ndarray) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the outputs [S, H] of a model's layers, and its embeddings."""
    model = dequantized(Skeleton(find_format(open_checkpoint(folder))))
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, given, made: found.append(made[0]))
    with torch.no_grad():
        model(torch.from_numpy(ids)[None])
    return tuple(found), model.model.embed_tokens.weight.float()


@pytest.mark.parametrize("before", every([False, True]))
def test_features_and_drafts(checkpoint, tmp_path, before):
    """Compare the model's graph and the head's; the second draft is from the head's own features."""
    target = checkpoint("qwen3_moe")
    head = write_head(tmp_path / "head", norm_before_residual=before)
    export(target, tmp_path / "model", eagle3=head, **FLOATS)
    generator = Generator(tmp_path / "model", speculate="mtp")
    ids = np.array([*PROMPT, 7])
    cache = generator.cache()
    cache.append(ids[:-1])
    outputs, embeddings = states(target, ids[:-1])
    fc = load_file(head / "model.safetensors")["fc.weight"].float()
    features = torch.cat([outputs[i] for i in LAYERS], -1) @ fc.T
    assert error(cache.hidden, features.numpy()) < 2e-5
    published = Published(head, embeddings, before)
    own, logits = published(features, ids[1:])
    drafting = Generator(tmp_path / "model" / "mtp.onnx").cache()
    drafting.given = {"hidden_states": cache.hidden[None]}
    assert error(drafting.verify(ids[1:])[-1], logits[-1].numpy()) < 2e-5
    assert error(drafting.hidden, own.numpy()) < 2e-5
    first = int(logits[-1].argmax())
    drafting.given = {"hidden_states": drafting.hidden[None, -1:]}
    _, more = published(torch.cat((features, own[-1:])), np.array([*ids[1:], first]))
    assert error(drafting.verify([first])[-1], more[-1].numpy()) < 2e-5


@pytest.mark.parametrize("options", every([FLOATS, {"dtype": "f16"}, {"logits": 5, "lm_head": "int8"}]))
def test_tokens_are_those_without_drafts(checkpoint, tmp_path, options):
    export(checkpoint("qwen3_moe"), tmp_path / "model", eagle3=write_head(tmp_path / "head"), **options)
    want = Generator(tmp_path / "model").greedy(PROMPT, 30)
    found = Generator(tmp_path / "model", speculate="mtp").greedy(PROMPT, 30)
    assert found.tokens == want.tokens
    assert found.logits.tobytes() == want.logits.tobytes()
    assert found.speculation.drafted > 20


@pytest.mark.every
def test_features_of_a_deep_model(checkpoint, tmp_path, monkeypatch):
    """Trace the layers that give features, and copy others."""
    target = checkpoint("qwen3_moe", num_hidden_layers=14)
    head = write_head(tmp_path / "head", eagle_config=None)
    traced = []
    only = trace._only
    monkeypatch.setattr(trace, "_only", lambda m, kept: traced.append(kept) or only(m, kept))
    report = export(target, tmp_path / "model", eagle3=head, **FLOATS)
    assert (report.untraced, traced) == ("", [[0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13]])
    cache = Generator(tmp_path / "model", speculate="mtp").cache()
    cache.append(PROMPT)
    outputs, _ = states(target, np.array(PROMPT))
    fc = load_file(head / "model.safetensors")["fc.weight"].float()
    features = torch.cat([outputs[i] for i in (1, 6, 10)], -1) @ fc.T
    assert error(cache.hidden, features.numpy()) < 2e-5


def test_layers_of_features(tmp_path):
    """By the published fields, and without them."""
    name = "eagle_aux_hidden_state_layer_ids"
    assert feature_layers({}, 94, tmp_path) == [1, 46, 90]
    assert feature_layers({"eagle_config": {name: [1, 46, 90]}}, 94, tmp_path) == [1, 46, 90]
    assert feature_layers({name: [2, 47, 91]}, 94, tmp_path) == [1, 46, 90]


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({"model_type": "qwen3"}, {}, r"config\.json: model_type is 'qwen3', expected 'llama'"),
        ({"num_hidden_layers": 2}, {}, r"num_hidden_layers is 2, expected 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, r"use_aux_hidden_state is False, expected True"),
        ({"quantization_config": {}}, {}, r"quantization_config is \{\}, expected None"),
        ({"vocab_size": 128}, {}, r"vocab_size is 128, the model has 384; expected a head for it"),
        ({"eagle_config": None}, {}, r"outputs of layers \[1, 0, -2\] \(from 0\), and the model has 2"),
        ({}, {"fc.weight": None}, r"fc\.weight is missing; expected an EAGLE-3 head"),
        ({}, {"fc.weight": torch.zeros(HIDDEN, 1)}, r"model\.safetensors: fc\.weight has shape \[192, 1\], expected"),
        ({}, {"d2t": None}, r"eagle3\.d2t of multi-token prediction \(LlamaForCausalLM\) is missing"),
        ({}, {"d2t": torch.zeros(3, dtype=torch.int64)}, r"model\.safetensors: d2t has shape \[3\], expected \[100\]"),
        ({}, {"midlayer.self_attn.sinks": torch.zeros(4)}, r"self_attn\.sinks: no tensor of an EAGLE-3 head"),
    ],
)
def test_another_head_is_refused(checkpoint, tmp_path, fields, tensors, message):
    head = write_head(tmp_path / "head", **fields)
    changed = load_file(head / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        plan(checkpoint("qwen3_moe"), tmp_path / "model", eagle3=head)


def test_tokens_of_drafts_outside_the_vocabulary(checkpoint, tmp_path):
    head = write_head(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"][3] = VOCABULARY
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: d2t: expected 100 different tokens from 0 to 383"):
        export(checkpoint("qwen3_moe"), tmp_path / "model", eagle3=head)


def test_options_beside_it(tmp_path):
    for options, message in (
        ({"mtp": True}, "mtp does not go with eagle3"),
        ({"paged": True}, "paged does not go with eagle3"),
        ({"tensor_parallel": 2}, "eagle3 is not divided: leave out eagle3 or tensor_parallel"),
        ({"target": "ort"}, "eagle3 is for target"),
    ):
        with pytest.raises(OptionError, match=message):
            Options(eagle3=tmp_path, **options)
