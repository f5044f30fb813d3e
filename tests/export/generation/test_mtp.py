"""Multi-token prediction: mtp.onnx against transformers, its drafts, weights that are stored once, onnxruntime-genai.

Weights are random: no draft is right but by chance, and what acceptance does is tested with drafts that are told. Only
samples/demo_model's hybrid was trained.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.architectures.test_hybrid import multimodal, rewritten
from export.generation.test_generate import PROMPT
from export.generation.test_shared import capture
from export.generation.test_speculate import Guess
from export.graph.test_model import error
from export.writing.test_other_programs import check
from safetensors.torch import load_file, save_file
from support.harness.sweeps import every
from transformers.modeling_layers import MtpModel
from typer.testing import CliRunner

from quantmoe.exporter.cli import app
from quantmoe.exporter.errors import CheckpointError, ModelError
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.inspecting.fit import _drafting, fit
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, moe_layers, open_checkpoint
from quantmoe.exporter.report import print_fit
from quantmoe.exporter.targets import TARGETS
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import formats_of
from quantmoe.runtime.buffer import Buffer
from quantmoe.runtime.generate import Generator
from quantmoe.runtime.opened_model import SPINNING
from quantmoe.runtime.speculate import Head
from quantmoe.serving.batching.batch_cache import Rows
from quantmoe.serving.batching.scheduler import check_serves

KINDS = ["qwen3_next", "deepseek_v3", "qwen3_5_moe_text", "glm4_moe", "mimo_v2_flash"]
#: whose layer is the one after the last
NEXT = ("deepseek_v3", "glm4_moe")
#: without linear attention
STATELESS = (*NEXT, "mimo_v2_flash")
OPTIONS = {"activations": "float", "cache": "f32", "mtp": True}
HYBRID = OPTIONS | {"state_window": 5}


def drafting(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint's tensors and mtp.*: its layer of full attention and other norms."""
    generator = torch.Generator().manual_seed(0)
    yield name, tensor
    if name.startswith("model.layers.1."):
        yield name.replace("model.layers.1.", "mtp.layers.0."), tensor.clone()
    if name == "model.norm.weight":
        for own in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{own}.weight", (torch.randn(tensor.shape, generator=generator) / 8).to(tensor.dtype)
        h = len(tensor)
        yield "mtp.fc.weight", (torch.randn(h, 2 * h, generator=generator) * (2 * h) ** -0.5).to(tensor.dtype)


def after(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as the third of two layers; with copies of the embeddings and the head, as they are published."""
    names = {"mtp.norm": "shared_head.norm", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
             "mtp.fc": "eh_proj"}  # fmt: skip
    for own, made in drafting(name, tensor):
        module = own.removesuffix(".weight")
        own = f"model.layers.2.{names[module]}.weight" if module in names else own
        yield own.replace("mtp.layers.0.", "model.layers.2."), made
    for copied, own in (
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "shared_head.head.weight"),
    ):
        if name == copied:
            yield f"model.layers.2.{own}", tensor.clone()


def mimo(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """MiMo's three layers: of the second layer the attention, of the first the MLP. The later two are of other values,
    which nothing reads."""
    yield name, tensor
    stem = "model.mtp.layers.{}."
    own = re.sub(r"^model\.layers\.1\.(?=input|self_attn)", stem, name)
    own = re.sub(r"^model\.layers\.0\.(?=mlp)", stem, own)
    own = own.replace("model.layers.1.post_attention_layernorm", f"{stem}pre_mlp_layernorm")
    made = {own: tensor} if own != name else {}
    if name == "model.norm.weight":
        names = {"norm": "final_layernorm", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
                 "fc": "eh_proj"}  # fmt: skip
        drawn = {mtp.removeprefix("mtp."): value for mtp, value in drafting(name, tensor) if mtp.startswith("mtp.")}
        made = {f"{stem}{names[key.removesuffix('.weight')]}.weight": value for key, value in drawn.items()}
    for key, value in made.items():
        for layer in range(3):
            yield key.format(layer), value.clone() if not layer else torch.ones_like(value)


REWRITE = dict.fromkeys(KINDS, drafting) | dict.fromkeys(NEXT, after) | {"mimo_v2_flash": mimo}


@pytest.fixture(scope="module")
def sources(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with the layer, quantized as the others."""
    folder = tmp_path_factory.mktemp("drafting")
    return {kind: rewritten(checkpoint(kind), folder / kind, REWRITE[kind], lambda config: config) for kind in KINDS}


@pytest.fixture(scope="module")
def models(sources, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")

    class Models(dict[str, Path]):
        def __missing__(self, kind: str) -> Path:
            export(sources[kind], folder / kind, logits=5, **OPTIONS if kind in STATELESS else HYBRID)
            self[kind] = folder / kind
            return self[kind]

    return Models()


def reference(source: Path) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], int]:
    """transformers' MtpModel: hidden states [S, H] and the tokens [S] after them to the layer's own and the logits; of
    MiMo's, which it lacks, the same by hand."""
    if "mimo" in source.name:
        return reference_mimo(source)
    whole = dequantized(Skeleton(formats_of(find_format(open_checkpoint(source)), True)[1]))
    config = whole.config
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    model = MtpModel(whole, 1).eval()
    layer, own = model.layers[0], whole.mtp
    layer.mtp_block.mlp = whole.model.layers[0].mlp
    layer.mtp_block.load_state_dict(whole.model.layers[0].state_dict())
    for name, module in (("eh_proj", own.fc), ("enorm", own.pre_fc_norm_embedding), ("hnorm", own.pre_fc_norm_hidden),
                         ("post_norm", whole.model.norm)):  # fmt: skip
        getattr(layer, name).load_state_dict(module.state_dict())

    def run(hidden: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.no_grad():
            given = torch.from_numpy(hidden)[None], torch.arange(len(ids))[None]
            made = model.forward_layer(0, *given, None, input_ids=torch.from_numpy(ids)[None])
            return made[0].numpy(), model.shared_head(made)[0].numpy()

    return run, config.hidden_size


def reference_mimo(source: Path) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], int]:
    """The layer as sglang's mimo_v2_flash_nextn.py and vLLM's mimo_v2_mtp.py have it, in float32."""
    format = find_format(open_checkpoint(source))
    config = format.ckpt.config
    heads, width, values = (config[name] for name in ("num_attention_heads", "head_dim", "v_head_dim"))
    turning, groups = int(0.334 * width), 2 * config["num_key_value_heads"]

    def weight(name: str, layer: str = "model.mtp.layers.0.") -> torch.Tensor:
        return torch.from_numpy(format.parameter(f"{layer}{name}"))

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weight(f"{name}.weight").T

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight(f"{name}.weight")

    def attend(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(0, turning, 2) / turning)
        cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))

        def turned(y: torch.Tensor) -> torch.Tensor:
            first, second = y[..., :turning].chunk(2, -1)
            return torch.cat((y[..., :turning] * cos + torch.cat((-second, first), -1) * sin, y[..., turning:]), -1)

        q = turned(linear(x, "self_attn.q_proj").unflatten(-1, (heads, width)))
        k = turned(linear(x, "self_attn.k_proj").unflatten(-1, (groups, width)))
        v = linear(x, "self_attn.v_proj").unflatten(-1, (groups, values)) * config["attention_value_scale"]
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        unseen = (back < 0) | (back >= config["sliding_window"])
        scores = torch.einsum("ihd,jhd->hij", q, k) * width**-0.5
        sinks = weight("self_attn.attention_sink_bias")[:, None, None].expand(-1, len(x), 1)
        shares = torch.cat((scores.masked_fill(unseen, -torch.inf), sinks), -1).softmax(-1)[..., :-1]
        return linear(torch.einsum("hij,jhd->ihd", shares, v).flatten(1), "self_attn.o_proj")

    def run(hidden: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        embeddings = weight("embed_tokens.weight", "model.")[ids]
        x = linear(torch.cat((norm(embeddings, "enorm"), norm(torch.from_numpy(hidden), "hnorm")), -1), "eh_proj")
        x = x + attend(norm(x, "input_layernorm"))
        y = norm(x, "pre_mlp_layernorm")
        gate = linear(y, "mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(y, "mlp.up_proj"), "mlp.down_proj")
        x = norm(x, "final_layernorm")
        return x.numpy(), (x @ weight("lm_head.weight", "").T).numpy()

    return run, config["hidden_size"]


@pytest.mark.parametrize("kind", every(KINDS, 2))
def test_the_layer_is_transformers(sources, models, kind):
    check_layer(sources[kind], models[kind])


def check_layer(source: Path, folder: Path) -> None:
    """The exported layer's hidden states and logits are the reference's."""
    run, size = reference(source)
    rng = np.random.default_rng(0)
    hidden, ids = rng.standard_normal((9, size)).astype(np.float32), rng.integers(0, 300, 9)
    want, logits = run(hidden, ids)
    cache = Generator(folder / "mtp.onnx").cache()
    for part in (slice(0, 6), slice(6, 7), slice(7, 9)):
        cache.given = {"hidden_states": hidden[None, part]}
        last = cache.verify(ids[part])[-1]
        assert error(cache.hidden, want[part]) < 2e-5
        assert error(last, logits[part][-1]) < 2e-5


def test_a_layer_with_another_number_of_experts(sources, tmp_path):
    """The layers of the main model have 16 experts, the drafting layer has 12."""

    def fewer(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        expert = re.match(r"mtp\..*\.experts\.(\d+)\.", name)
        if not expert or int(expert[1]) < 12:
            router = name.startswith("mtp.") and name.endswith("mlp.gate.weight")
            yield name, tensor[:12].clone() if router else tensor

    pruned = rewritten(sources["qwen3_next"], tmp_path / "qwen3_next", fewer, lambda config: config)
    export(pruned, tmp_path / "out", logits=5, **HYBRID)
    layers = {
        layer["module"]: layer["attributes"]["num_experts"] for layer in inspect(tmp_path / "out")["mtp"]["layers"]
    }
    assert list(layers.values()) == [13]  # with the shared one
    check_layer(pruned, tmp_path / "out")


@pytest.mark.parametrize("kind", every(KINDS, 2))
def test_tokens_and_bytes_are_those_of_generation_without(models, kind):
    want = Generator(models[kind]).greedy(PROMPT, 30)
    found = Generator(models[kind], speculate="mtp").greedy(PROMPT, 30)
    assert found.tokens == want.tokens
    assert found.speculation.drafted > 20
    assert found.logits.tobytes() == want.logits.tobytes()


@pytest.mark.parametrize("kind", every(["qwen3_next", "mimo_v2_flash"]))
def test_steps_of_drafts_as_a_cuda_graph_has_them(models, kind, monkeypatch):
    """On the CPU: one for each number of tokens, of the model and of its layer; states are copied as on a device."""

    def copy(target, source, to=None, slot=None):
        ctypes.memmove(target.address(to), source.address(slot), source.bytes(slot))

    monkeypatch.setattr(Buffer, "copy", copy)
    usual, steps = (Generator(models[kind], speculate="mtp") for _ in range(2))
    capture(steps)
    capture(steps.head)
    caches, ran = [], []
    cache_ = steps.head.cache
    monkeypatch.setattr(steps.head, "cache", lambda: caches.append(cache_()) or caches[-1])
    found, want = ([] for _ in range(2))
    for generator, given in ((usual, want), (steps, found)):
        cache = generator.cache()
        first = generator.generate(PROMPT, 30, cache=cache, logits=True)
        cache.reserve(cache.capacity + 1)
        given += [first, generator.generate([5, 6], 9, cache=cache, logits=True)]
        ran.append(cache)
    for one, other in zip(found, want, strict=True):
        assert one.tokens == other.tokens
        assert one.logits.tobytes() == other.logits.tobytes()
    assert not ran[0]._room.steps
    assert {2, 5} <= {tokens for tokens, _ in ran[1]._room.steps} <= set(range(1, 6))
    assert {1, 2} <= {tokens for tokens, _ in caches[0]._room.steps} <= set(range(1, 7))
    assert len(steps.session.captured) >= len(ran[1]._room.steps) + 1  # those before the cache grew, too


def test_threads_of_two_sessions_do_not_spin(models):
    """They take turns, and what spins for the next run of one takes cores from the other's."""

    def spins(generator: Generator) -> bool:
        try:
            return generator.session.get_session_options().get_session_config_entry(SPINNING) != "0"
        except Exception:  # onnxruntime's, of an entry that nobody made
            return True

    generator = Generator(models["deepseek_v3"], speculate="mtp")
    assert [spins(one) for one in (generator, generator.head)] == [False, False]
    assert spins(Generator(models["deepseek_v3"], speculate="ngram"))


def test_drafts_follow_what_was_accepted(sources, models, monkeypatch):
    """Each first draft is from all hidden states and tokens so far, whatever was drafted and rejected between."""
    generator = Generator(models["qwen3_next"], chunk=9, speculate="mtp")
    want = Generator(models["qwen3_next"]).greedy(PROMPT, 25)
    found = generator.stream(PROMPT, 25)
    head, guess, firsts = found.speculation.draft, Guess(want.tokens, len(PROMPT)), []
    run_, calls = Head._run, []

    class Told:
        hear = staticmethod(head.hear)

        def __call__(self, tokens, count):
            calls.clear()
            if head(tokens, count):
                firsts.append((len(tokens), calls[0]))
            return guess(tokens, count)

    monkeypatch.setattr(Head, "_run", lambda self, *given: calls.append(run_(self, *given)) or calls[-1])
    found.speculation.draft = Told()
    assert list(found) == want.tokens
    assert 5 < found.speculation.accepted < found.speculation.drafted
    tokens = np.array(PROMPT + want.tokens)
    whole = Generator(models["qwen3_next"], speculate="mtp").cache()
    whole.append(tokens[:-1])
    run, _ = reference(sources["qwen3_next"])
    _, logits = run(whole.hidden, tokens[1:])
    assert len(firsts) > 5
    for length, row in firsts:
        assert error(row, logits[length - 2]) < 2e-5


def test_embedding_and_head_are_stored_once(models):
    tensors = []
    check(models["qwen3_next"] / "mtp.onnx")
    for name in ("model.onnx", "mtp.onnx"):
        values = ir.load(models["qwen3_next"] / name).graph.initializers
        tensors.append({n: v.const_value for n, v in values.items() if isinstance(v.const_value, ir.ExternalTensor)})
    main, head = tensors
    for name in ("model.embed_tokens.weight", "lm_head.w"):
        assert (main[name].offset, main[name].length) == (head[name].offset, head[name].length)
    regions = sorted({(t.offset, t.length) for part in tensors for t in part.values()})
    assert len(regions) == len(main) + len(head) - 2
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(regions))
    assert sum(regions[-1]) == os.path.getsize(models["qwen3_next"] / "model.onnx.data")
    assert not list(models["qwen3_next"].glob("mtp.onnx.data*"))


@pytest.mark.every
def test_a_device_holds_them_once(sources, tmp_path):
    """What onnxruntime-genai loads for both models; the CPU maps the file."""
    export(sources["qwen3_next"], tmp_path, target="cuda", mtp=True, logits="all")
    model = json.loads((tmp_path / "genai_config.json").read_text(encoding="utf-8"))["model"]
    shared = model["decoder"]["shared_initializers"]
    assert model["mtp"]["shared_initializers"] == shared
    assert {entry["name"] for entry in shared} == {"model.embed_tokens.weight", "lm_head.weight.T"}
    for name in ("model.onnx", "mtp.onnx"):
        values = ir.load(tmp_path / name).graph.initializers
        for entry in shared:
            tensor = values[entry["name"]].const_value
            assert (str(tensor.offset), str(tensor.length)) == (entry["offset"], entry["length"])
            assert (list(tensor.shape), int(tensor.dtype)) == (entry["shape"], entry["data_type"])
            assert entry["data_file"] == tensor.location


def test_a_plan_counts_it_once(sources, models, tmp_path):
    found = plan(sources["qwen3_next"], tmp_path, logits=5, **HYBRID)
    size = os.path.getsize(models["qwen3_next"] / "model.onnx.data")
    regions = len(found.linears) + 2 * len(found.layers)
    assert 0 <= size - found.packed - found.dense < 65536 * (regions + 2)  # where tensors begin
    assert found.packed + found.dense > 0.5 * size
    assert "multi-token" not in found.left_out


def test_an_mtp_that_its_quantizer_left_fused_in_floats(sources, tmp_path):
    """As compressed-tensors' checkpoints of Qwen3.5 have it: nothing of mtp.* is quantized."""
    source = tmp_path / "checkpoint"
    rewritten(sources["qwen3_5_moe_text"], source, lambda *named: [named], lambda config: config)
    path = source / "model.safetensors"
    head = formats_of(find_format(open_checkpoint(source)), True)[1]
    experts = moe_layers(head)[0]
    tensors = {
        name: tensor for name, tensor in load_file(path).items() if not name.startswith("mtp.layers.0.mlp.experts")
    }
    for module in {name.rpartition(".")[0] for name in tensors if name.startswith("mtp.layers.0.")}:
        if head.is_quantized(module):
            weight = torch.from_numpy(head.parameter(f"{module}.weight")).bfloat16()
            tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{module}.")} | {
                f"{module}.weight": weight
            }
    stacked = [(torch.from_numpy(np.concatenate([e.gate.dequantize(), e.up.dequantize()])), e.down) for e in experts]
    tensors["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.stack([up for up, _ in stacked]).bfloat16()
    downs = [torch.from_numpy(down.dequantize()) for _, down in stacked]
    tensors["mtp.layers.0.mlp.experts.down_proj"] = torch.stack(downs).bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})
    report = export(source, tmp_path / "model", logits=5, **HYBRID)
    assert report.layers["mtp.layers.0.mlp.experts"][0] == "bf16, not quantized"
    run, size = reference(source)
    rng = np.random.default_rng(0)
    hidden, ids = rng.standard_normal((4, size)).astype(np.float32), rng.integers(0, 300, 4)
    cache = Generator(tmp_path / "model" / "mtp.onnx").cache()
    cache.given = {"hidden_states": hidden[None]}
    assert error(cache.verify(ids)[-1], run(hidden, ids)[1][-1]) < 2e-5


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("mtp.fc.weight", r"mtp\.fc\.weight of multi-token prediction \(Qwen3_5MoeForCausalLM\) is missing"),
        ("mtp.norm.weight", r"mtp\.norm\.weight of multi-token prediction"),
        ("self_attn.k_norm.weight", r"mtp\.layers\.0\.self_attn\.k_norm\.weight of multi-token prediction"),
        ("experts.3.up_proj.weight_packed", r"mtp\.layers\.0\.mlp\.experts\.3\.up_proj"),
        (
            "",
            r"no tensors of multi-token prediction \(mtp\.\* or model\.mtp\.\*, or a layer after the last one\)",
        ),
    ],
)
def test_half_of_the_tensors(sources, tmp_path, leaf, message):
    def half(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not (name.startswith("mtp.") and name.endswith(leaf)):
            yield name, tensor

    folder = rewritten(sources["qwen3_5_moe_text"], tmp_path / "checkpoint", half, lambda config: config)
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=message):
            command(folder, tmp_path / "model", **OPTIONS)


def test_a_layer_without_its_experts(sources, tmp_path):
    def bare(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not name.startswith("mtp.layers.0.mlp.experts."):
            yield name, tensor

    folder = rewritten(sources["qwen3_5_moe_text"], tmp_path / "checkpoint", bare, lambda config: config)
    names = ".* or ".join(rf"mtp\.layers\.0\.mlp\.experts\.{end}" for end in ("<number>", "gate_up_proj", "down_proj$"))
    with pytest.raises(CheckpointError, match=f"no experts of multi-token prediction; expected tensors named {names}"):
        plan(folder, tmp_path / "model", **OPTIONS)


def test_a_published_checkpoint_and_onnxruntime_genai(sources, tmp_path):
    """Multimodal names; MtpGenerator with one draft a run and three gives the tokens of a Generator without. In f16:
    0.18 casts a CPU's logits to f32 and fails where they are."""
    import onnxruntime_genai as og

    def named(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield re.sub(r"^model\.", "model.language_model.", name), tensor

    source = rewritten(sources["qwen3_5_moe_text"], tmp_path / "checkpoint", named, multimodal)
    folder = tmp_path / "model"
    report = export(source, folder, logits="all", dtype="f16", **HYBRID | {"cache": "f16"})
    assert "multi-token" not in report.left_out
    prompt = list(range(5, 28))  # 20 tokens come after it, and none of them ends
    want = Generator(folder).greedy(prompt, 20, stop=[2]).tokens
    assert len(want) == 20
    main, config = og.Model(str(folder)), og.Config(str(folder))
    decoder = {"filename": "mtp.onnx", "num_hidden_layers": 1, "inputs": {"hidden_states": "hidden_states"},
               "outputs": {"hidden_states": "hidden_states_out"}}  # fmt: skip
    config.overlay(json.dumps({"model": {"decoder": decoder}}))
    head = og.Model(config)
    for drafts in (1, 3):
        params = og.GeneratorParams(main)
        params.set_search_options(max_length=len(prompt) + 20, do_sample=False)
        params.set_speculative_options(max_draft_tokens=drafts)
        generator = og.MtpGenerator(main, head, params)
        generator.append_tokens(np.array(prompt, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        assert generator.get_sequence().tolist()[len(prompt) :] == want
        assert generator.get_stats()["draft_tokens_proposed"] >= 19 * drafts - 3


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        ("eh_proj.weight", "eh_proj.weight of"),
        ("final_layernorm.weight", "final_layernorm.weight of"),
        ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.weight of"),
        ("self_attn.attention_sink_bias", "self_attn.attention_sink_bias of"),
        ("mlp.up_proj.weight_packed", "mlp.up_proj.weight_packed is missing"),
        ("", "input_layernorm.weight of"),  # the later layers are no first one
    ],
)
def test_half_of_mimos_tensors(sources, tmp_path, leaf, message):
    def half(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not (name.startswith("model.mtp.layers.0.") and name.endswith(leaf)):
            yield name, tensor

    folder = rewritten(sources["mimo_v2_flash"], tmp_path / "checkpoint", half, lambda config: config)
    message += " multi-token prediction (MiMoV2FlashForCausalLM) is missing" if message.endswith(" of") else ""
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=re.escape(f"model.mtp.layers.0.{message}")):
            command(folder, tmp_path / "model", **OPTIONS)


def test_mimos_later_layers_are_said_to_be_left_out(sources, tmp_path):
    found = plan(sources["mimo_v2_flash"], tmp_path, **OPTIONS).left_out
    assert found.startswith(
        "the text model and its multi-token prediction; left out: the later layers of multi-token prediction "
        "(model.mtp.layers.1."
    )
    assert not found.count("model.mtp.layers.0.")
    alone = plan(sources["mimo_v2_flash"], tmp_path, **OPTIONS | {"mtp": False}).left_out
    assert alone.startswith("the text model alone; left out: multi-token prediction (model.mtp.layers.")


def test_what_cannot_speculate_is_named(models, exported):
    with pytest.raises(ModelError, match=r"mtp\.onnx: this is the layer that drafts for a model; run .*/qwen3_next$"):
        Generator(models["qwen3_next"] / "mtp.onnx").greedy(PROMPT, 1)
    lacking = r"model\.onnx: 4 draft tokens need mtp\.onnx \(this model has none\)"
    with pytest.raises(ModelError, match=rf"{lacking}: export it with --mtp$"):
        Generator(exported("qwen3_moe", activations="float"), speculate="mtp")
    message = rf"{lacking} and the logits of 5 tokens \(this model gives 1\): export it with --mtp --logits 5$"
    with pytest.raises(ModelError, match=message):
        Generator(exported("qwen3_moe", activations="float", logits=1), speculate="mtp")
    with pytest.raises(
        ModelError,
        match=r"5 draft tokens need the states .* after 6 tokens \(this model keeps 5\) and the logits of "
        r"6 tokens \(this model gives 5\): export it with --state-window 6 --logits 6, or ask for at most 4$",
    ):
        Generator(models["qwen3_next"], speculate="mtp", drafts=5)
    found = inspect(models["qwen3_next"], verify=True)
    alone = inspect(models["qwen3_next"] / "mtp.onnx", verify=True)
    assert {**found["mtp"], "files": None} == {**alone, "files": None}  # what of them is in memory changes
    assert found["mtp"]["layers"][0]["module"] == "mtp.layers.0.mlp.experts"
    assert found["mtp"]["verified"]


def test_what_fits_says_what_drafts_take(models, capsys):
    """Its own weights, and keys and values; embeddings and head are the model's."""
    found = inspect(models["qwen3_next"])
    layer = found["mtp"]
    fits = fit(found, 1 << 33, 100)
    own, every = (
        {
            (tensor.location, tensor.offset): tensor.nbytes
            for tensor in (
                value.const_value for value in ir.load(models["qwen3_next"] / name).graph.initializers.values()
            )
            if isinstance(tensor, ir.ExternalTensor)
        }
        for name in ("mtp.onnx", "model.onnx")
    )
    shared = sum(own.pop(place) for place in own.keys() & every.keys())
    assert shared > 0
    own = sum(own.values())
    assert fits.drafting == own + 100 * sum(node["bytes_per_token"] for node in layer["attention"])
    print_fit(fits, models["qwen3_next"], "as --memory-speed says")
    assert "mtp.onnx is not counted: with --speculate mtp" in capsys.readouterr().out
    assert fit({**found, "mtp": None}, 1 << 33, 100).drafting == 0
    on_gpu = _drafting(found, 0, TARGETS["cuda"])
    assert on_gpu == _drafting(found, 0, TARGETS["cpu"]) + shared


@pytest.mark.parametrize("altered", ["mtp.onnx", "files"])
def test_a_layer_of_another_export_is_named(models, tmp_path, altered):
    """Also where the model does not say which is its own. Without drafts nobody asks for it."""
    folder = shutil.copytree(models["qwen3_next"], tmp_path / "model")
    name = "model.onnx" if altered == "files" else altered
    model = ir.load(folder / name)
    model.metadata_props["checkpoint" if name == altered else altered] = "[]"
    ir.save(model, folder / name)
    message = r"mtp\.onnx: is not the one that model\.onnx was exported with: put both of one export there"
    with pytest.raises(ModelError, match=message):
        Generator(folder, speculate="mtp")
    with pytest.raises(ModelError, match=message):
        inspect(folder, verify=True)
    assert Generator(folder).greedy(PROMPT, 1).tokens
    assert "mtp" in inspect(folder)


def test_a_layer_that_is_missing_is_named(models, tmp_path):
    folder = shutil.copytree(models["qwen3_next"], tmp_path / "model")
    (folder / "mtp.onnx").unlink()
    message = r"mtp\.onnx: is missing, and model\.onnx was exported with it: copy the whole folder"
    with pytest.raises(ModelError, match=message):
        Generator(folder, speculate="mtp")
    with pytest.raises(ModelError, match=message):
        inspect(folder, verify=True)
    assert "mtp" not in inspect(folder)


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("qwen3_next", {"state_window": 1}, "--logits 5 --state-window 5"),
        ("qwen3_next", {"logits": "all", "state_window": 1}, "--state-window 5"),
        ("qwen3_next", {"logits": 3, "state_window": 1}, "--state-window 3"),
        ("qwen3_next", {}, "--logits 5"),
        ("qwen3_next", {"logits": None}, ""),
        ("qwen3_next", {"state_window": 2}, "--logits 2"),
        ("qwen3_next", {"logits": 2, "state_window": 2}, ""),
        ("deepseek_v3", {}, "--logits 5"),
        ("deepseek_v3", {"logits": "all"}, ""),
        ("deepseek_v3", {"logits": None}, ""),
        ("deepseek_v3", {"logits": "last"}, ""),
        ("deepseek_v3", {"mtp": False}, ""),
    ],
)
def test_what_drafts_need_is_said(sources, tmp_path, kind, options, wanted):
    said = plan(sources[kind], tmp_path, **{"mtp": True, "logits": 1} | options).drafting
    expected = f"generate --speculate mtp cannot use mtp.onnx without {wanted}: export with that, too"
    assert said == (expected if wanted else "")


def test_the_commands_say_what_drafts_need(sources, tmp_path):
    arguments = ["export", str(sources["deepseek_v3"]), str(tmp_path / "model"), "--mtp"]
    for given in (["--dry-run"], []):
        done = CliRunner().invoke(app, [*arguments, *given, "--logits", "1"])
        assert done.exit_code == 0, done.output
        assert "cannot use mtp.onnx without --logits 5: export with that, too" in " ".join(done.stdout.split())
        done = CliRunner().invoke(app, [*arguments, *given, "--force"])
        assert (done.exit_code, "cannot use" in " ".join(done.stdout.split())) == (0, False)


@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_mtp_alone_is_enough_to_draft(sources, tmp_path, kind):
    """A session chooses the logits, and a hybrid model keeps the states of its draft tokens."""
    export(sources[kind], tmp_path / "model", activations="float", mtp=True)
    graph = ir.load(tmp_path / "model" / "model.onnx")
    assert (graph.metadata_props["num_logits"], "logits" in graph.metadata_props) == ("1", False)
    drafter = ir.load(tmp_path / "model" / "mtp.onnx")
    assert "num_logits" not in {*drafter.metadata_props, *drafter.graph.initializers}
    assert (tmp_path / "model" / "genai_config.json").is_file()
    states = [v.shape[0] for v in graph.graph.inputs if str(v.name).endswith("recurrent_state")]
    assert set(states) == ({5} if kind == "qwen3_next" else set())
    with Generator(tmp_path / "model", speculate="mtp") as drafting, Generator(tmp_path / "model") as plain:
        assert drafting.greedy(PROMPT, 6).tokens == plain.greedy(PROMPT, 6).tokens


def test_a_model_without_states_is_served_beside_its_layer(models):
    """A server runs its rows as it runs those of a model without the layer; docs/guides/serve.md says so."""
    prompts = [PROMPT[at:] for at in range(3)]
    with Generator(models["deepseek_v3"]) as model:
        check_serves(model)
        rows, found = Rows(model, len(prompts), 48), []
        for row, prompt in enumerate(prompts):
            found.append([int(rows.read(row, prompt).here()[0, -1].argmax())])
        for _ in range(4):
            logits, ran = rows.start({row: tokens[-1] for row, tokens in enumerate(found)})
            for row, tokens in enumerate(found):
                tokens.append(int(logits.here()[ran.index(row), -1].argmax()))
        assert found == [model.greedy(prompt, 5).tokens for prompt in prompts]


@pytest.mark.every
def test_the_trained_models_drafts(tmp_path):
    """samples/demo_model's hybrid, whose layer was trained with it: random weights' drafts are never right."""
    folder = Path(__file__).parents[3] / "samples" / "demo_model" / "hybrid"
    export(folder, tmp_path / "model", mtp=True)
    prompt = load_tokenizer(tmp_path / "model").encode("And it came to pass, that the king").ids
    want = Generator(tmp_path / "model").greedy(prompt, 100).tokens
    generator = Generator(tmp_path / "model", speculate="mtp", drafts=1)
    found = generator.stream(prompt, 100)
    assert list(found) == want
    drafts = found.speculation
    assert drafts.runs + drafts.accepted == 99
    assert drafts.accepted > 0.4 * drafts.drafted, "0.60 on 2026-11-25"
