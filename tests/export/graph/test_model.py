"""Exported whole models against PyTorch: prefill, decode with the KV cache, any batch and sequence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from support.harness.sweeps import every
from support.models.genai import check_tokens
from transformers import PreTrainedModel

from quantmoe.benchmarks.pytorch_comparison import compare
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.graph import model, trace
from quantmoe.exporter.graph.experts import experts_forward
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.graph.modules.rotations import Rotate
from quantmoe.exporter.graph.passes.repeated_layers import RepeatError
from quantmoe.exporter.graph.put_nodes import PackedLinear, PartOfLinear
from quantmoe.exporter.inspecting.inspect import ModelError, inspect
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import Report, export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

ARCHITECTURES = (
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "qwen3_5_moe_text",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "qwen3_next",
)
VOCABULARY = 384


def tokens(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, length))


def run(generator: Generator, ids: np.ndarray, pieces: tuple[int, ...]) -> np.ndarray:
    """Logits of ids [B, S], fed in consecutive pieces through the KV cache."""
    past, logits, at = generator.start(len(ids)), [], 0
    for piece in pieces:
        found, past = generator.step(ids[:, at : at + piece], past)
        logits.append(found)
        at += piece
    assert at == ids.shape[1]
    return np.concatenate(logits, axis=1).astype(np.float64)


def expected(torch_model: PreTrainedModel, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return torch_model(torch.from_numpy(ids)).logits.double().numpy()


def error(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


@pytest.mark.parametrize("architecture", every(ARCHITECTURES, 3))
def test_float_activations_equal_pytorch(exported, reference, architecture):
    # float32 on both sides, sums in another order: a few thousand roundings of 6e-8, far below the bound
    generator = Generator(exported(architecture, activations="float"))
    for batch, pieces in ((1, (9,)), (1, (8, 1)), (3, (5, 1, 1)), (2, (4, 3))):
        ids = tokens(batch, sum(pieces))
        assert error(run(generator, ids, pieces), expected(reference(architecture), ids)) < 2e-5, (batch, pieces)


@pytest.mark.parametrize(
    "scheme",
    every(
        ["W4A16_ASYM", "NVFP4A16", "FP8_BLOCK", "W8A16_ASYM", "NVFP4", "MXFP4A16", "FP8", "FP8_DYNAMIC", "MXFP8A16"], 2
    ),
)
def test_every_scheme_equals_pytorch(exported, reference, scheme):
    """Weights bit for bit what the checkpoint says: with float activations the bound is that of the f32 sums alone."""
    generator = Generator(exported("qwen3_moe", scheme, activations="float"))
    ids = tokens(2, 7)
    assert error(run(generator, ids, (5, 1, 1)), expected(reference("qwen3_moe", scheme), ids)) < 2e-5


@pytest.mark.parametrize("architecture", every(ARCHITECTURES, 3))
def test_greedy_tokens_equal_pytorch(exported, reference, architecture):
    prompt = tokens(1, 6, seed=1)[0].tolist()
    found = Generator(exported(architecture, activations="float")).greedy(prompt, 12)
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(expected(reference(architecture), np.array([ids]))[0, -1].argmax()))
    assert found.tokens == ids[len(prompt) :]


@pytest.mark.parametrize(
    ("architecture", "scheme"), every([("qwen3_moe", "W4A16"), ("mixtral", "W4A16"), ("qwen3_moe", "W8A8")])
)
def test_int8_activations_equal_the_reference_op(exported, reference, architecture, scheme, monkeypatch):
    """The same PyTorch model, its experts computed from the exported bytes by reference.py.

    Both round activations to int8, and what they round differs by f32 noise (the bound of float activations; 6e-7 was
    seen). A token of which no activation lies that close to the middle of two codes keeps that bound; any other takes
    another code, after which nothing bounds it or the tokens that attend to it: a router may choose other experts. In
    sequences of 7, one token of fourteen (W4A16) or of two (W8A8) was such or came after one; with 2, few come after.
    A wrong zero point, scale or nibble order moves all.
    """
    folder = exported(architecture, scheme)
    torch_model = reference(architecture, scheme)
    bound = bind_packed(torch_model, folder, monkeypatch)
    assert bound == 2
    ids = tokens(12, 2, seed=2)
    want = expected(torch_model, ids)
    found = run(Generator(folder), ids, (1, 1))
    same = np.abs(found - want).max(-1) < 2e-5 * np.abs(want).max()
    assert same.mean() > 0.5, same


def bind_packed(torch_model: PreTrainedModel, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes the model's experts run torch.ops.quantmoe.quant_moe on the exported tensors; returns how many."""
    graph = ir.load(folder / "model.onnx").graph
    nodes = [node for node in graph if node.op_type == "QuantMoE"]
    modules = [m for m in torch_model.modules() if hasattr(m, "_is_expert_parallel")]
    for module, node in zip(modules, nodes, strict=True):
        values = {
            name: a.as_string() if a.type == ir.AttributeType.STRING else a.value for name, a in node.attributes.items()
        }
        monkeypatch.setattr(
            module, "attributes", json.dumps(MoESpec.from_attributes(values).attributes()), raising=False
        )
        for name, value in zip(("w13", "w2"), node.inputs[3:5], strict=True):
            monkeypatch.setattr(module, name, torch.from_numpy(np.array(value.const_value.numpy())), raising=False)
        monkeypatch.setattr(module, "rotate", Rotate(None, torch.float32, library=True), raising=False)
        monkeypatch.setattr(module, "forward", experts_forward.__get__(module))
    for node in graph:
        if node.op_type == "QuantLinear":
            tensor = node.inputs[1].const_value
            spec = LinearSpec.from_attributes(json.loads(tensor.metadata_props["spec"]))
            linear = PackedLinear(spec, torch.float32, Rotate(None, torch.float32, library=True))
            linear.w = torch.from_numpy(np.array(tensor.numpy()))
            rows = json.loads(tensor.metadata_props.get("rows", "{}"))
            for i, name in enumerate(rows or [tensor.metadata_props["module"]]):
                found = PartOfLinear(linear, [*rows.values()], i) if rows else linear
                monkeypatch.setattr(torch_model.get_submodule(name), "forward", found.forward)
    return len(modules)


def test_w8a8_keeps_its_own_activation_format(exported):
    for layer in inspect(exported("qwen3_moe", "W8A8"))["layers"]:
        assert layer["attributes"]["w13_activation_format"] == "int8_token"
        assert layer["attributes"]["w13_format"] == "int8"


def test_layers_left_out_of_the_trace_are_copied(checkpoint, tmp_path, monkeypatch):
    """Five layers, three of them traced, against PyTorch."""
    traced = []
    only = trace._only
    monkeypatch.setattr(trace, "_only", lambda m, kept: traced.append(kept) or only(m, kept))
    report = check_layers(checkpoint("qwen3_moe", num_hidden_layers=5), tmp_path)
    assert traced == [[0, 1, 4]]
    assert report.untraced == ""


@pytest.mark.long
def test_layers_that_cannot_be_copied_are_traced(checkpoint, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise RepeatError("no counterpart of node_x")

    monkeypatch.setattr(trace, "repeat_layers", refuse)
    report = check_layers(checkpoint("qwen3_moe", num_hidden_layers=4), tmp_path)
    assert report.untraced == "no counterpart of node_x"


def check_layers(folder: Path, out: Path) -> Report:
    want = expected(dequantized(Skeleton(find_format(open_checkpoint(folder)))), tokens(2, 6))
    report = export(folder, out, activations="float", logits="all", cache="f32")
    assert error(run(Generator(out), tokens(2, 6), (5, 1)), want) < 2e-5
    modules = [layer["module"] for layer in inspect(out)["layers"]]
    assert modules == [f"model.layers.{i}.mlp.experts" for i in range(len(modules))]
    assert len(modules) == len(report.layers)
    return report


def test_int8_activations_name_the_option_for_float(checkpoint, tmp_path):
    remark = plan(checkpoint("qwen3_moe", "W4A16"), tmp_path).activations
    assert remark.endswith("int8 activations in groups of 32 or 64 features; --activations float keeps them float")


def test_int8_activations_that_fp8_weights_do_not_take(checkpoint, tmp_path):
    report = export(checkpoint("qwen3_moe", "FP8_DYNAMIC"), tmp_path, activations="int8", layers=1)
    assert report.activations.endswith("activations are not int8 as asked")
    assert {spec.w13.activation_format for _, spec in report.layers.values()} == {"fp8_token"}


def test_activations_make_the_difference(exported, checkpoint):
    """compare() tells what int8 activations round from what is ours."""
    folder = exported("qwen3_moe")
    found = compare(checkpoint("qwen3_moe"), folder, new_tokens=2)
    assert found.float_difference < 2e-5 < 1e-3 < found.difference
    assert not list(folder.glob("*.partial"))
    assert compare(checkpoint("qwen3_moe"), exported("qwen3_moe", activations="float"), 2).float_difference is None


@pytest.mark.parametrize("architecture", every(ARCHITECTURES, 3))
def test_onnxruntime_genai_generates_the_same_tokens(exported, architecture):
    check_tokens(exported(architecture, activations="float", logits="last"), tokens(1, 6, seed=1)[0].tolist(), 12)


def test_empty_inputs_are_named(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    for shape in ((0, 3), (1, 0)):
        with pytest.raises(ModelError, match="expected at least one row and one token"):
            generator.step(np.zeros(shape, np.int64), generator.start(shape[0]))


def test_batch_rows_do_not_mix(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    ids = tokens(3, 6)
    together = run(generator, ids, (4, 2))
    for row in range(3):
        assert error(run(generator, ids[row : row + 1], (4, 2)), together[row : row + 1]) < 2e-5


def test_padded_prompts(exported):
    """Left padding, masked: the tokens after it see what they see without it."""
    generator = Generator(exported("qwen3_moe", activations="float"))
    ids = tokens(1, 5)
    padded = np.concatenate([np.zeros((1, 3), np.int64), ids], axis=1)
    feed = {
        "input_ids": padded,
        "attention_mask": np.array([[0] * 3 + [1] * 5]),
        "position_ids": np.array([[0] * 3 + list(range(5))]),
    }
    found = generator.session.run(["logits"], feed | generator.start())[0][:, 3:]
    assert error(found, run(generator, ids, (5,))) < 2e-5


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])  # the other one's norms round after their weights
def test_f16(exported, reference, architecture):
    # float16 has 11 significant bits: 5e-4 a rounding, some tens of them in a row
    folder = exported(architecture, activations="float", dtype="f16", cache="f16")
    generator, ids = Generator(folder), tokens(2, 6)
    assert generator.start()["past_key_values.0.key"].dtype == np.float16
    assert error(run(generator, ids, (5, 1)), expected(reference(architecture), ids)) < 2e-2


def test_layers(exported, checkpoint, reference):
    folder = exported("qwen3_moe", activations="float", layers=1)
    generator, ids = Generator(folder), tokens(1, 5)
    assert len(generator.past) == 2
    assert '"num_hidden_layers": 1' in (folder / "config.json").read_text(encoding="utf-8")
    decoder = reference("qwen3_moe").model
    layers, decoder.layers = decoder.layers, decoder.layers[:1]
    want = expected(reference("qwen3_moe"), ids)
    decoder.layers = layers
    assert error(run(generator, ids, (4, 1)), want) < 2e-5


def test_interface_names(exported):
    graph = ir.load(exported("qwen3_moe", activations="float") / "model.onnx").graph
    kv = [f"{n}.{kind}" for n in range(2) for kind in ("key", "value")]
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{x}" for x in kv)]
    assert [v.name for v in graph.inputs] == inputs
    assert [v.name for v in graph.outputs] == ["logits", *(f"present.{x}" for x in kv)]
    assert [str(d) for d in graph.inputs[3].shape] == ["batch_size", "2", "past_sequence_length", "48"]
    assert {node.domain for node in graph} == {"", "com.microsoft", "quantmoe"}
    assert sum(node.op_type == "QuantMoE" for node in graph) == 2


def test_without_the_library_onnxruntime_names_the_operator(exported):
    import onnxruntime as ort

    # docs/reference/errors.md has these words
    with pytest.raises(Exception, match=r"quantmoe:Quant(MoE|Linear)\(-1\) is not a registered function/op"):
        ort.InferenceSession(str(exported("qwen3_moe", activations="float") / "model.onnx"))
    assert "libquantmoe_ort.so" in ir.load(exported("qwen3_moe", activations="float") / "model.onnx").doc_string


def test_contributings_architecture(checkpoint, monkeypatch):
    """A file with prepare(model) and its line in ARCHITECTURES: it is given transformers' model first."""
    given = []
    monkeypatch.setitem(model.ARCHITECTURES, "qwen3_moe", SimpleNamespace(prepare=given.append))
    skeleton = Skeleton(find_format(open_checkpoint(checkpoint("qwen3_moe"))))
    assert given == [skeleton.model]
