"""Lightning attention of MiniMax-Text-01 in standard nodes, against transformers in float32 and against itself in other
pieces, rows and windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from export.architectures.test_architectures import SIZES, make_checkpoint
from export.architectures.test_hybrid import ragged, rewritten
from export.generation.test_speculate import Guess
from export.graph.test_model import error
from support.harness.once import made_once
from support.models import orders
from transformers import AutoModelForCausalLM, PreTrainedModel

from quantmoe.exporter.graph.model import Skeleton
from quantmoe.exporter.graph.modules.states import lightning
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import open_format
from quantmoe.runtime.generate import Generator

OPTIONS = {"quantize": "none", "activations": "float", "cache": "f32"}
TOKENS = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (3, 300))
PROMPT = TOKENS[0, :23].tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, every second of lightning attention."""
    kinds = ["full_attention", "linear_attention"] * 4

    def write(folder: Path) -> None:
        make_checkpoint(folder, "minimax", num_hidden_layers=8, layer_types=kinds, max_position_embeddings=512)

    return made_once(tmp_path_factory, write, "minimax")


@pytest.fixture(scope="module")
def model(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def write(folder: Path) -> None:
        report = export(source, folder, logits="all", **OPTIONS)
        assert report.untraced == ""  # layers with other rates are alike
        assert not report.plain_attention

    return made_once(tmp_path_factory, write, "minimax-model")


@pytest.fixture(scope="module")
def windowed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(
        tmp_path_factory,
        lambda folder: export(source, folder, logits=5, state_window=5, **OPTIONS),
        "minimax-windowed",
    )


@pytest.fixture(scope="module")
def expected(source: Path) -> np.ndarray:
    return logits(source, TOKENS[:1])


def whole(source: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def logits(source: Path, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return whole(source)(torch.from_numpy(ids)).logits.numpy()


@pytest.fixture(scope="module")
def bound(source: Path) -> float:
    """Of two runs in float32."""
    return orders.bound(whole(source), TOKENS[:1], samples=4)


def run(generator: Generator, ids: np.ndarray, pieces: tuple[int, ...]) -> np.ndarray:
    found, past, at = [], generator.start(len(ids)), 0
    for piece in pieces:
        logits, past = generator.step(ids[:, at : at + piece], past)
        found.append(logits)
        at += piece
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize(
    "pieces", [(300,), (1, 7, 64, 65, 163), (65, 64, *[1] * 20, 7, 144)], ids=["one", "few", "many"]
)
def test_pieces_give_the_logits_of_transformers(model, expected, bound, pieces):
    """Measured 1.9e-6, the bound is 1.2e-5."""
    assert error(run(Generator(model), TOKENS[:1], pieces), expected) < bound < 2e-5


@pytest.mark.every
def test_states_are_f32_in_any_graph(tmp_path):
    """float16 has 11 significant bits: 5e-4 a rounding, some tens of them in a row, as in the other hybrid models. All
    experts get every token: no rounding chooses others."""
    make_checkpoint(tmp_path / "checkpoint", "minimax", num_experts_per_tok=8)
    options = OPTIONS | {"cache": "f16", "dtype": "f16", "state_window": 2}
    export(tmp_path / "checkpoint", tmp_path / "model", logits="all", **options)
    generator, ids = Generator(tmp_path / "model"), TOKENS[:1, :70]
    dtypes = {name: array.dtype for name, array in generator.start().items()}
    assert dtypes["past_key_values.0.key"] == np.float16
    assert dtypes["past_key_values.1.recurrent_state"] == np.float32
    assert error(run(generator, ids, (60, 1, 9)), logits(tmp_path / "checkpoint", ids)) < 2e-2


@pytest.mark.every
def test_interface(model, windowed):
    graph = ir.load(model / "model.onnx").graph
    shapes = {value.name: [str(size) for size in value.shape] for value in (*graph.inputs, *graph.outputs)}
    for prefix in ("past_key_values", "present"):
        assert shapes[f"{prefix}.1.recurrent_state"] == ["batch_size", "4", "16", "16"]
        assert f"{prefix}.1.conv_state" not in shapes
        assert f"{prefix}.1.key" not in shapes
    assert Generator(windowed).window == 5
    assert not (model / "genai_config.json").exists()  # onnxruntime-genai asks for conv_state
    found = inspect(windowed)
    assert len(found["attention"]) == 4
    assert [node["state_bytes"] for node in found["linear_attention"]] == [4 * 4 * 16 * 16] * 4
    assert {node["attributes"]["state_window"] for node in found["linear_attention"]} == {5}


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_prompts(model, side):
    generator = Generator(model)
    lengths = (7, 4, 1)
    for row, (n, found) in enumerate(zip(lengths, ragged(generator, TOKENS, lengths, side), strict=True)):
        want = run(generator, TOKENS[row : row + 1, : n + 2], (n, 1, 1))[0, n - 1 :]
        assert error(found, want) < 2e-5, (row, n)


def test_a_row_without_tokens_keeps_its_state(model):
    """Rows that have ended, in a batch that goes on: their state is there for a later token."""
    found = lightning.Lightning(2, 4, (0.5, 0.1), 1)
    draw = torch.Generator().manual_seed(0)
    state, qkv = torch.randn(3, 2, 4, 4, generator=draw), torch.randn(3, 5, 24, generator=draw)
    rows = torch.tensor([[0, 0, 9], [0, 0, 0], [1, 3, 0]], dtype=torch.int32)
    _, present = lightning._attend(found, qkv, torch.tensor(found.rates), state, rows)
    assert torch.equal(present[:2], state[:2])
    want = torch.zeros(2, 4, 4)
    for t in (1, 2, 3):
        _, k, v = qkv[2, t].reshape(2, 3, 4).unbind(1)
        want = want * torch.exp(-torch.tensor(found.rates))[:, None, None] + k[:, :, None] * v[:, None]
    assert error(present[2].numpy(), want.numpy()) < 1e-6


def test_decays_near_0_and_1_stay_finite():
    """exp(-rate t) of rates that leave nothing, and that leave all, over 512 tokens."""
    found = lightning.Lightning(2, 4, (90.0, 1e-6), 1)
    qkv = torch.ones(1, 512, 24)
    mixed, present = lightning._attend(
        found, qkv, torch.tensor(found.rates), torch.ones(1, 2, 4, 4), torch.tensor([[0, 512, 1]], dtype=torch.int32)
    )
    assert torch.equal(present[0, 0], torch.ones(4, 4))  # of the last token alone
    want = np.exp(-1e-6 * 512) + np.exp(-1e-6 * np.arange(512)).sum()
    assert error(present[0, 1].numpy(), np.full((4, 4), want)) < 1e-5
    assert torch.isfinite(mixed).all()


def check_window(model: Path, windowed: Path, prompt: list[int]) -> None:
    """With states after each of a run's last 5 tokens: rejected drafts are taken back, and so are verified tokens."""
    want = Generator(model).greedy(prompt, 30)
    stream = Generator(windowed, speculate="ngram").stream(prompt, 30)
    stream.speculation.draft = Guess(want.tokens, len(prompt))
    assert list(stream) == want.tokens
    assert stream.speculation.drafted > stream.speculation.accepted > 0
    cache = Generator(windowed).cache()
    cache.append(prompt[:10])
    cache.verify(prompt[10:15])
    cache.rewind(12)
    found = cache.append(prompt[12:14])
    assert error(found, run(Generator(model), np.array([prompt[:14]]), (14,))[0, -1]) < 2e-5


def check_going_back(model: Path, prompt: list[int], file: Path) -> None:
    """To a prompt's end, with states in memory and on disk."""
    generator = Generator(model, chunk=8)
    cache = generator.cache()
    said = generator.generate(prompt, 6, cache=cache).tokens
    generator.save_cache(cache, file)
    again = Generator(model).load_cache(file)
    assert again.tokens == prompt + said[:-1]
    for each in (cache, again):
        each.rewind(len(prompt))
    want = generator.generate([5, 6], 5, cache=cache, logits=True)
    found = generator.generate([5, 6], 5, cache=again, logits=True)
    assert found.tokens == want.tokens == Generator(model).greedy([*prompt, 5, 6], 5).tokens
    assert found.logits.tobytes() == want.logits.tobytes()


@pytest.mark.every
def test_speculation_with_a_window_of_states(model, windowed):
    check_window(model, windowed, PROMPT)


def test_going_back_and_states_on_disk(model, tmp_path):
    check_going_back(model, PROMPT, tmp_path / "state")


def test_the_first_layers_decay_as_in_the_whole_model(source):
    rates = {name: found.rates for name, found in Skeleton(open_format(source, "none", None)).lightning.items()}
    first = Skeleton(open_format(source, "none", None), layers=4).lightning
    assert {name: found.rates for name, found in first.items()} == dict(list(rates.items())[:2])
    assert len(set(rates.values())) == 4


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_stored_rates_are_checked(source, tmp_path, factor):
    """As transformers stores them, rounded to bf16; and of other decays, which config.json cannot say."""
    rates = Skeleton(open_format(source, "none", None)).lightning["model.layers.3.self_attn"].rates

    def stored(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        own = (torch.tensor(rates) * factor).bfloat16().reshape(-1, 1, 1)
        more = [(name.replace("norm.weight", "slope_rate"), own)] if name.endswith("3.self_attn.norm.weight") else []
        return [(name, tensor), *more]

    folder = rewritten(source, tmp_path / "checkpoint", stored, lambda config: config)
    if factor == 1:
        assert plan(folder, tmp_path / "model", **OPTIONS).plain_attention == {}
        return
    with pytest.raises(CheckpointError, match=r"layers\.3\.self_attn\.slope_rate: other decays than of a model of 8"):
        plan(folder, tmp_path / "model", **OPTIONS)


def test_what_cannot_be_is_named(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"self_attn: lightning attention is not divided among ranks"):
        plan(source, tmp_path / "model", tensor_parallel=2, **OPTIONS)

    def narrow(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor[:, 1:].contiguous() if name.endswith("1.self_attn.out_proj.weight") else tensor)]

    folder = rewritten(source, tmp_path / "checkpoint", narrow, lambda config: config)
    with pytest.raises(CheckpointError, match=r"out_proj\.weight has shape \[64, 63\], expected \[64, 64\]"):
        plan(folder, tmp_path / "model", **OPTIONS)


def test_layers_of_lightning_attention_alone_are_refused(tmp_path):
    make_checkpoint(tmp_path / "checkpoint", "minimax", layer_types=["linear_attention"] * 4)
    with pytest.raises(CheckpointError, match="4 layers of linear attention alone; expected one of full attention"):
        plan(tmp_path / "checkpoint", tmp_path / "model", **OPTIONS)
