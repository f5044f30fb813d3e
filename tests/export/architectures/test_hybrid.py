"""Hybrid models, linear attention beside full attention: whole exports against PyTorch in float64, states handed on and
gone back to, checkpoints as they are published, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from safetensors.torch import load_file, save_file
from support.harness.sweeps import every
from support.models import orders
from support.models.checkpoints import make_integer_checkpoint
from support.models.encoders import awq
from support.models.tiny import make_float_checkpoint

from quantmoe.benchmarks.bench_engines import Ours
from quantmoe.benchmarks.bench_model import touched_bytes
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.families import UNSUPPORTED
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.weights.base import Format
from quantmoe.exporter.reading.weights.unquantized import Unquantized
from quantmoe.exporter.surveying.survey import survey
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.generate import Generator

HYBRID = ("qwen3_5_moe_text", "qwen3_next")
PROMPT = tokens(1, 23, seed=4)[0].tolist()
#: of a small float checkpoint of two layers
SIZES = {
    "hidden_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("architecture", every(HYBRID))
def test_states_handed_on_equal_pytorch(exported, reference, architecture):
    """Across the borders of the chunks of 64 tokens that PyTorch has, whose linear attention is float32 in any model.
    All pieces give the same logits. Those of qwen3_next are off by 5.3e-6, the bound is 3.2e-5; of qwen3_5_moe_text
    by 1.7e-5, the bound is 4.1e-5."""
    generator, ids = Generator(exported(architecture, activations="float")), tokens(2, 137)
    bound = orders.bound(reference(architecture), ids)
    want = expected(reference(architecture).double(), ids)
    reference(architecture).float()
    for pieces in ((137,), (1, 7, 64, 65), (64, 1, 72), (7, *[1] * 9, 121)):
        assert error(run(generator, ids, pieces), want) < bound < 8e-5, pieces


@pytest.mark.parametrize(
    ("architecture", "scheme"), every([("qwen3_5_moe_text", "NVFP4A16"), ("qwen3_next", "FP8_BLOCK")])
)
def test_formats(exported, reference, architecture, scheme):
    ids = tokens(2, 9)
    found = run(Generator(exported(architecture, scheme, activations="float")), ids, (7, 1, 1))
    assert error(found, expected(reference(architecture, scheme), ids)) < 2e-5


@pytest.mark.parametrize("architecture", every(HYBRID))
def test_awq_with_modules_to_not_convert(architecture, tmp_path):
    """Experts and full attention of 4 bits with zero points; linear attention and what the list names else stay."""
    ignore = ["linear_attn", "mlp.gate", "mlp.shared_expert_gate", "lm_head", "visual", "mtp"]
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
              "modules_to_not_convert": ignore}  # fmt: skip
    folder = make_integer_checkpoint(
        tmp_path / "checkpoint", awq, config, architecture, group_size=32, sym=False, ignore=ignore, **SIZES
    )
    names = set(open_checkpoint(folder).names())
    stored = {name.rpartition(".")[0] for name in names if name.endswith(".qweight")}
    assert {"model.layers.0.mlp.experts.3.down_proj", "model.layers.1.self_attn.q_proj"} <= stored
    assert not any(part in module for part in ignore for module in stored)
    export(folder, tmp_path / "model", activations="float", logits="all", cache="f32")
    want = dequantized(Skeleton(find_format(open_checkpoint(folder))))
    ids = tokens(2, 9)
    assert error(run(Generator(tmp_path / "model"), ids, (7, 1, 1)), expected(want, ids)) < 2e-5


def test_f16(exported, reference):
    """float16 has 11 significant bits: 5e-4 a rounding, some tens of them in a row."""
    generator, ids = (
        Generator(exported("qwen3_5_moe_text", activations="float", dtype="f16", cache="f16")),
        tokens(2, 9),
    )
    dtypes = {name: array.dtype for name, array in generator.start().items()}
    assert dtypes["past_key_values.0.conv_state"] == np.float16
    assert dtypes["past_key_values.0.recurrent_state"] == np.float32
    assert error(run(generator, ids, (7, 1, 1)), expected(reference("qwen3_5_moe_text"), ids)) < 2e-2


def ragged(generator: Generator, own: np.ndarray, lengths: tuple[int, ...], side: str) -> list[np.ndarray]:
    """Of each row, of so many tokens, padded to the longest, the logits of its last token and of two more."""
    longest = max(lengths)
    ids, mask = np.zeros((3, longest), np.int64), np.zeros((3, longest), np.int64)
    for row, n in enumerate(lengths):
        at = slice(longest - n, longest) if side == "left" else slice(0, n)
        ids[row, at], mask[row, at] = own[row, :n], 1

    def step(ids, mask, past):
        feed = {"input_ids": ids, "attention_mask": mask}
        feed["position_ids"] = np.maximum(mask.cumsum(1)[:, -ids.shape[1] :] - 1, 0)
        found = dict(zip(generator.outputs, generator.session.run(None, feed | past), strict=True))
        return found["logits"], {name: found[name.replace("past_key_values", "present")] for name in past}

    logits, past = step(ids, mask, generator.start(3))
    found = [[logits[row, -1 if side == "left" else n - 1]] for row, n in enumerate(lengths)]
    for more in range(2):
        mask = np.concatenate([mask, np.ones((3, 1), np.int64)], 1)
        new = np.array([[own[row, n + more]] for row, n in enumerate(lengths)])
        logits, past = step(new, mask, past)
        for row in range(3):
            found[row].append(logits[row, -1])
    return [np.array(rows) for rows in found]


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts(exported, side):
    """Rows of 7, 4 and 1 tokens, padded, give what each gives alone: padding leaves states alone."""
    generator = Generator(exported("qwen3_5_moe_text", activations="float"))
    own, lengths = tokens(3, 9), (7, 4, 1)
    found = ragged(generator, own, lengths, side)
    for row, n in enumerate(lengths):
        want = run(generator, own[row : row + 1, : n + 2], (n, 1, 1))[0, n - 1 :]
        assert error(found[row], want) < 2e-5, (row, n)


def test_chunks_of_any_size_give_the_tokens_of_one_run(exported):
    folder = exported("qwen3_next", activations="float", logits="last")
    whole = Generator(folder, chunk=1000).greedy(PROMPT, 12)
    for chunk in (1, 5, 22):
        found = Generator(folder, chunk=chunk).greedy(PROMPT, 12)
        assert found.tokens == whole.tokens
        assert error(found.logits, whole.logits) < 2e-5


def grown(generator: Generator) -> Generator:
    """The same with a cache that grows with each run."""
    generator.shares_buffer = False
    return generator


@pytest.mark.parametrize("kind", [lambda generator: generator, grown], ids=["in place", "grown"])
def test_going_back_to_the_end_of_a_prompt(exported, kind: Callable[[Generator], Generator]):
    generator = kind(Generator(exported("qwen3_5_moe_text", activations="float", logits="last"), chunk=8))
    cache = generator.cache()
    cache.tail = 3
    first = generator.generate(PROMPT, 6, cache=cache)
    assert cache.tokens == PROMPT + first.tokens[:-1]
    with pytest.raises(ModelError, match="of all 28 tokens, they cannot be had of 21; only of 0, 20, 23, 28 tokens"):
        cache.rewind(21)
    for length, more in ((23, [5, 6, 7]), (20, [8, 9]), (0, PROMPT)):
        cache.rewind(length)
        prompt = cache.tokens + more
        found = generator.generate(more, 6, cache=cache)
        assert cache.tokens == prompt + found.tokens[:-1]
        assert found.tokens == kind(Generator(generator.path)).greedy(prompt, 6).tokens
    assert cache.keep([*PROMPT[:22], 1, 2]) == 20
    assert cache.keep(PROMPT[:9]) == 0


@pytest.mark.parametrize("kind", [lambda generator: generator, grown], ids=["in place", "grown"])
def test_an_interrupted_run_leaves_no_wrong_state(exported, monkeypatch, kind: Callable[[Generator], Generator]):
    generator = kind(Generator(exported("qwen3_5_moe_text", activations="float", logits="last"), chunk=8))
    cache = generator.cache()
    generator.generate(PROMPT, 1, cache=cache)
    run_ = cache._run

    def interrupted(ids):
        run_(ids)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.append([5])
    monkeypatch.undo()
    assert cache.tokens == PROMPT
    assert cache.keep([*PROMPT, 6]) == 23
    found = generator.generate([6], 4, cache=cache)
    assert found.tokens == kind(Generator(generator.path)).greedy([*PROMPT, 6], 4).tokens


def test_interface(exported):
    folder = exported("qwen3_5_moe_text", activations="float")
    graph = ir.load(folder / "model.onnx").graph
    names = ["0.conv_state", "0.recurrent_state", "1.key", "1.value"]
    assert [v.name for v in graph.inputs][3:] == [f"past_key_values.{name}" for name in names]
    assert [v.name for v in graph.outputs][1:] == [f"present.{name}" for name in names]
    shapes = {v.name: [str(size) for size in v.shape] for v in (*graph.inputs, *graph.outputs)}
    for prefix in ("past_key_values", "present"):
        assert shapes[f"{prefix}.0.conv_state"] == ["batch_size", "512", "3"]
        assert shapes[f"{prefix}.0.recurrent_state"] == ["batch_size", "4", "64", "64"]
    found = inspect(folder)
    assert [(n["width"], n["state_bytes"]) for n in found["linear_attention"]] == [(4, 4 * (4 * 64 * 64 + 512 * 3))]
    assert not found["plain_attention"]
    modules = {n["module"] for n in found["linears"]}
    assert {"model.layers.0.linear_attn.in_proj", "model.layers.1.self_attn.qkv_proj"} <= modules


@pytest.mark.every
def test_layers_in_turn_are_traced_once(checkpoint, tmp_path, monkeypatch):
    """17 layers, three turns of four and the last one traced."""
    from quantmoe.exporter.graph import trace

    traced = []
    only = trace._only
    monkeypatch.setattr(trace, "_only", lambda m, kept: traced.append(kept) or only(m, kept))
    folder = checkpoint("qwen3_next", num_hidden_layers=17, full_attention_interval=4, num_experts=4,
                        num_experts_per_tok=2)  # fmt: skip
    report = export(folder, tmp_path, activations="float", logits="all", cache="f32")
    assert (report.untraced, traced) == ("", [[*range(8), *range(12, 17)]])
    want = expected(dequantized(Skeleton(find_format(open_checkpoint(folder)))), tokens(2, 6))
    assert error(run(Generator(tmp_path), tokens(2, 6), (5, 1)), want) < 1e-4


def rewritten(folder: Path, target: Path, rename: Callable[[str, torch.Tensor], Iterator], config: Callable) -> Path:
    """A checkpoint with other tensors and another configuration."""
    shutil.copytree(folder, target)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    for shard in target.glob("*.safetensors"):
        found = {new: value for name, t in load_file(shard).items() for new, value in rename(name, t)}
        save_file(found, shard, metadata={"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(config(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    return target


def multimodal(config: dict) -> dict:
    quantization = {"quantization_config": config.pop("quantization_config")} if "quantization_config" in config else {}
    return {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config,
            "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1}} | quantization  # fmt: skip


def published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    own = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    yield own, tensor
    if name.startswith("model.layers.0.") and "linear_attn" not in name:
        yield name.replace("model.", "mtp.", 1), tensor.clone()
    if name == "model.norm.weight":
        yield "model.visual.blocks.0.norm1.weight", tensor.clone()


def test_a_checkpoint_as_it_is_published(checkpoint, exported, tmp_path):
    """Names, vision tower and multi-token prediction of Qwen3_5MoeForConditionalGeneration: the text model's bytes."""
    folder = rewritten(checkpoint("qwen3_5_moe_text"), tmp_path / "checkpoint", published, multimodal)
    report = export(folder, tmp_path / "model", activations="float", logits="all", cache="f32")
    want = Generator(exported("qwen3_5_moe_text", activations="float"))
    found, ids = Generator(tmp_path / "model"), tokens(1, 6)
    assert run(found, ids, (5, 1)).tobytes() == run(want, ids, (5, 1)).tobytes()
    for text in (report.left_out, plan(folder, tmp_path / "other").left_out, survey(folder)["left_out"]):
        assert text.startswith("the text model alone; left out: a vision tower (model.visual.blocks.0.norm1.weight and")
        assert "multi-token prediction (mtp.layers.0." in text
    assert survey(folder)["attention"] == "1 layers of linear attention, 1 layers of full attention"
    refused = survey(folder)["refused"]
    assert (refused["cpu"], refused["cuda"]) == ("", "")
    assert refused["ort"].endswith(
        "layers.0.linear_attn: CausalConv is no operator of ONNX Runtime's own (--target ort)"
    )


def test_a_vision_config_without_weights_is_a_text_model(checkpoint, tmp_path):
    def only_text(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name, tensor

    folder = rewritten(checkpoint("qwen3_5_moe_text"), tmp_path / "checkpoint", only_text, multimodal)
    assert plan(folder, tmp_path / "model").left_out == ""


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not quantized, its experts fused as Qwen3.5 is published."""
    folder = make_float_checkpoint(tmp_path_factory.mktemp("floats") / "split", "qwen3_5_moe_text", **SIZES)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for shard in folder.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            if ".experts." in name and name.count(".experts.gate_up_proj") + name.count(".experts.down_proj") == 0:
                stem, _, rest = name.partition(".experts.")
                number, leaf, _ = rest.split(".")
                experts.setdefault(f"{stem}.experts.{leaf}", {})[int(number)] = tensor
    stacked = {name: torch.stack([found[e] for e in sorted(found)]) for name, found in experts.items()}
    stems = {name.rpartition(".")[0] for name in stacked}
    extra = {}
    for stem in stems:
        extra[f"{stem}.gate_up_proj"] = torch.cat((stacked[f"{stem}.gate_proj"], stacked[f"{stem}.up_proj"]), 1)
        extra[f"{stem}.down_proj"] = stacked[f"{stem}.down_proj"]

    def fused(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name == "model.norm.weight":
            yield from extra.items()
        if ".experts." not in name or not extra:
            yield name, tensor

    return rewritten(folder, folder.parent / "fused", fused, lambda config: config)


def test_fused_experts_of_floats(floats, tmp_path):
    ckpt = open_checkpoint(floats)
    assert ckpt.shape("model.layers.0.mlp.experts.gate_up_proj") == (4, 192, 192)
    assert ckpt.shape("model.layers.0.mlp.experts.down_proj") == (4, 192, 96)
    export(floats, tmp_path, quantize="none", logits="all", cache="f32")
    want = dequantized(Skeleton(Unquantized(ckpt, "none")))
    ids = tokens(2, 9)
    assert error(run(Generator(tmp_path), ids, (7, 1, 1)), expected(want, ids)) < 2e-5


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("linear_attn.A_log", r"model\.layers\.0\.linear_attn\.A_log of Qwen3_5MoeForCausalLM is missing"),
        ("linear_attn.conv1d.weight", r"linear_attn\.conv1d\.weight of Qwen3_5MoeForCausalLM is missing"),
        ("linear_attn.in_proj_z.weight", r"linear_attn\.in_proj_z\.weight of Qwen3_5MoeForCausalLM is missing"),
    ],
)
def test_half_of_the_tensors(floats, tmp_path, leaf, message):
    def half(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not name.endswith(leaf):
            yield name, tensor

    folder = rewritten(floats, tmp_path / "checkpoint", half, lambda config: config)
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=message):
            command(folder, tmp_path / "model", quantize="none")


def test_a_convolution_of_another_shape(floats, tmp_path):
    def other(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensor[:, :, :3].contiguous() if name.endswith("conv1d.weight") else tensor

    folder = rewritten(floats, tmp_path / "checkpoint", other, lambda config: config)
    with pytest.raises(CheckpointError, match=r"conv1d\.weight has shape \[512, 1, 3\], expected \[512, 1, 4\]"):
        plan(folder, tmp_path / "model", quantize="none")


@pytest.mark.parametrize(("keys", "values"), [(2, 3), (4, 2), (0, 4), (2, 0)])
def test_heads_that_do_not_fit(floats, tmp_path, keys, values):
    fields = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    folder = rewritten(floats, tmp_path / "checkpoint", lambda name, t: iter([(name, t)]), lambda c: c | fields)
    text = rf"config\.json: linear_num_value_heads is {values}, expected a positive multiple .*, {keys}"
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=text):
            command(folder, tmp_path / "model", quantize="none")


@pytest.mark.parametrize(("name", "shape"), [("conv_state", (1, 512, 2)), ("recurrent_state", (1, 4, 64, 32))])
def test_a_state_of_another_shape(exported, name, shape):
    generator = Generator(exported("qwen3_5_moe_text", activations="float"))
    past = generator.start()
    key = f"past_key_values.0.{name}"
    past[key] = np.zeros(shape, past[key].dtype)
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        generator.step(tokens(1, 3), past)


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2},
        {"hybrid_override_pattern": "MME*MM*"},
        {"linear_attn_config": {"kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6]}},
        {"full_attention_interval": 3, "num_hidden_layers": 6},
    ],
    ids=lambda config: next(iter(config)),
)
def test_kinds_of_the_first_layers(config):
    """A part of a model has those of its own layers; Nemotron's blocks of experts count as layers."""
    format = SimpleNamespace(ckpt=SimpleNamespace(text_config=config))
    assert Format.attention(format) == "4 layers of linear attention, 2 layers of full attention"
    assert Format.attention(format, 4) in (
        "3 layers of linear attention, 1 layers of full attention",
        "2 layers of linear attention, 1 layers of full attention",
    )
    assert Format.attention(format, 2) == ""


def test_a_dry_run_of_the_first_layers(tmp_path):
    folder = Path(__file__).parents[3] / "samples/demo_model/hybrid"
    assert plan(folder, tmp_path, layers=4).attention == "3 layers of linear attention, 1 layers of full attention"


def test_layers_without_attention_are_refused(floats, tmp_path):
    for command in (export, plan):
        with pytest.raises(CheckpointError, match="1 layers of linear attention alone; expected one of full attention"):
            command(floats, tmp_path / "model", quantize="none", layers=1)


@pytest.mark.parametrize(("architecture", "missing"), sorted(UNSUPPORTED.items()))
def test_other_families_are_refused_by_name(floats, tmp_path, architecture, missing):
    folder = rewritten(floats, tmp_path / "checkpoint", lambda *named: [named], lambda c: {"model_type": architecture})
    message = rf"config\.json: {architecture}: {missing} is not supported"
    for quantize in (None, "none"):
        with pytest.raises(CheckpointError, match=message):
            plan(folder, tmp_path / "model", quantize=quantize)
        with pytest.raises(CheckpointError, match=message):
            export(folder, tmp_path / "model", quantize=quantize)
    assert missing in survey(folder)["refused"]["cpu"]


def test_bench_holds_states(exported):
    """A cache's bytes a token are of keys and values; a step's are of the states, too."""
    folder = exported("qwen3_5_moe_text", activations="float", logits="last")
    ours, found = Ours(folder, 1), inspect(folder)
    assert ours.cache_bytes() == {f"past_key_values.1.{kind}": 2 * 48 * 4 for kind in ("key", "value")}
    ours.prefill(9)
    ours.fill(5, 2, 9)
    assert ours.decode(2) > 0
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    more = touched_bytes(found, {}, config, 0, 3) - touched_bytes(found | {"linear_attention": []}, {}, config, 0, 3)
    assert more == 3 * 4 * (4 * 64 * 64 + 512 * 3)
