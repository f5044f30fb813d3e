"""CachedAttention in exported models: what is recognised, where tokens of ragged batches are, both ways to keep the
cache."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from export.graph.test_model import error, expected, run, tokens
from support.harness.sweeps import every
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, apply_rotary_pos_emb

from quantmoe.custom_ops.reference import token_rows
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.graph import standard_attention
from quantmoe.exporter.graph.model import Skeleton, dequantized
from quantmoe.exporter.graph.modules import indexer
from quantmoe.exporter.graph.modules.attention import GROUPED, recognise
from quantmoe.exporter.graph.modules.attention_inputs import rows_of
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.convert import export
from quantmoe.ort_ext import library_path
from quantmoe.runtime.generate import Generator

CACHED = {"qwen3_moe": "head", "gpt_oss": "none", "olmoe": "row", "mixtral": "none", "glm4_moe": "head"}


@pytest.mark.parametrize("architecture", every(CACHED, 2))
def test_attention_is_one_node(exported, architecture):
    found = inspect(exported(architecture, activations="float"))
    assert found["plain_attention"] == {}
    assert [node["attributes"]["qk_norm"] for node in found["attention"]] == [CACHED[architecture]] * 2
    assert [node["attributes"]["sliding_window"] for node in found["attention"]] == (
        [4, 0] if architecture == "gpt_oss" else [0, 0]
    )
    rotary = 24 if architecture == "glm4_moe" else 48
    assert {node["attributes"]["rotary_size"] for node in found["attention"]} == {rotary}
    assert {(node["cache"], node["bytes_per_token"]) for node in found["attention"]} == {("float", 2 * 2 * 48 * 4)}


def test_what_is_left_says_why(plain):
    found = inspect(plain)
    assert found["attention"] == []
    assert found["plain_attention"] == {f"model.layers.{i}.self_attn": "not tried" for i in range(2)}


def test_llama_4(exported):
    """A layer that turns, norms and sees chunks, and one that does neither and whose queries have temperatures."""
    found = inspect(exported("llama4_text", activations="float"))
    assert found["plain_attention"] == {}
    names = ("rotary_size", "rotary_interleaved", "chunk_size", "qk_norm")
    attributes = [tuple(node["attributes"][name] for name in names) for node in found["attention"]]
    assert attributes == [(48, 1, 4, "head"), (0, 0, 0, "none")]


@pytest.mark.parametrize("side", ["left", "right"])
def test_temperatures_and_chunks_are_of_a_rows_own_tokens(exported, side):
    """Llama-4's prompts of 3, 7 and 11 tokens in a batch, chunks of 4: each row as alone."""
    generator, lengths = Generator(exported("llama4_text", activations="float")), (3, 7, 11)
    rows = [tokens(1, n, seed=n)[0] for n in lengths]
    ids, mask = np.zeros((3, 11), np.int64), np.zeros((3, 11), np.int64)
    for row, (own, n) in enumerate(zip(rows, lengths, strict=True)):
        at = slice(11 - n, 11) if side == "left" else slice(0, n)
        ids[row, at], mask[row, at] = own, 1
    logits, _ = step(generator, ids, mask, generator.start(3))
    for row, (own, n) in enumerate(zip(rows, lengths, strict=True)):
        alone, _ = step(generator, own[None], np.ones((1, n), np.int64), generator.start())
        at = slice(11 - n, 11) if side == "left" else slice(0, n)
        assert error(logits[row : row + 1, at], alone) < 2e-5


@pytest.mark.parametrize("sizes", every([{}, {"q_lora_rank": None}, {"rope_interleave": False}]), ids=str)
def test_latent_attention(checkpoint, tmp_path, sizes):
    """One latent for all heads, stored once: with what turns, 64 + 16 features a token, in two halves."""
    export(checkpoint("deepseek_v3", **sizes), tmp_path, activations="float", logits="all", cache="f32")
    found = inspect(tmp_path)
    assert found["plain_attention"] == {}
    for node in found["attention"]:
        assert (node["cache"], node["bytes_per_token"]) == ("float", 80 * 4)
        a = node["attributes"]
        assert (a["kv_num_heads"], a["head_size"], a["v_head_size"], a["key_split"]) == (1, 80, 64, 40)
        assert (a["rotary_size"], a["rotary_interleaved"]) == (16, int(sizes.get("rope_interleave", True)))
        # 4 heads of 32 features of keys and as many of values, by products in the node
        assert (a["nope_size"], a["out_size"]) == (32, 32)
    (reason,) = {d["dequantized_because"] for d in found["dense"] if ".absorbed." in d["name"]}
    assert reason == f"its halves, one a head, multiply queries and outputs instead of the cache: {256 * 64 * 4} bytes"
    skeleton = Skeleton(find_format(open_checkpoint(checkpoint("deepseek_v3", **sizes))))
    generator, model = Generator(tmp_path), dequantized(skeleton)
    for pieces in ((5, 1, 3), (64, 1, 63), (63, 70)):  # it expands from 64 tokens on
        ids = tokens(2, sum(pieces))
        assert error(run(generator, ids, pieces), expected(model, ids)) < 2e-5


def test_nodes_of_a_latent_layer(checkpoint, tmp_path):
    """Neither half of kv_b_proj is a product of its own, and no heads are put in another order."""
    export(checkpoint("deepseek_v3", first_k_dense_replace=0), tmp_path, activations="float")
    found = optimized(tmp_path, tmp_path)
    assert found["CachedAttention"] == 2
    assert not {"Transpose", "FusedMatMul", "Softmax"} & set(found)


def optimized(folder: Path, out: Path) -> Counter:
    """Operators that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(library_path())
    options.optimized_model_filepath = str(out / "optimized.onnx")
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.data")
    options.log_severity_level = 4
    ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(out / "optimized.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


@pytest.mark.parametrize("dtype", every(["f32", "f16"]))
def test_nodes_of_a_layer(checkpoint, tmp_path, dtype):
    found = []
    for layers in (1, 2):
        folder = tmp_path / f"{layers}"
        export(checkpoint("qwen3_moe"), folder, activations="float", layers=layers, dtype=dtype)
        found.append(optimized(folder, folder))
    layer = found[1] - found[0]
    assert layer["CachedAttention"] == 1
    assert layer["QuantLinear"] == 2
    if dtype == "f16":  # ONNX Runtime has no Gemm of float16 on the CPU: it widens and narrows the router's
        assert layer.pop("Cast") == 2
    assert layer.total() <= 12, layer
    assert not {"Softmax", "RotaryEmbedding", "Transpose", "Cast"} & set(layer)


ROWS = [
    # of a growing cache: mask [B, L], new tokens, slots before -> begin, count, past
    ([[1, 1, 1]], 3, 0, [[0, 3, 0]]),
    ([[0, 1, 1], [1, 1, 1]], 3, 0, [[1, 2, 0], [0, 3, 0]]),
    ([[1, 1, 0], [1, 0, 0]], 3, 0, [[0, 2, 0], [0, 1, 0]]),
    ([[0, 1, 1, 1], [1, 1, 0, 1]], 1, 3, [[0, 1, 2], [0, 1, 2]]),
    ([[1, 1, 1, 1, 0]], 2, 3, [[0, 1, 3]]),
    ([[1, 1, 0]], 1, 2, [[1, 0, 2]]),
    # of a fixed capacity: a mask of as many columns as there are tokens, or of all of them
    ([[1, 1, 1]], 3, 8, [[0, 3, 0]]),
    ([[1, 1, 1, 0, 0, 0, 0, 0]], 3, 8, [[0, 3, 0]]),
    ([[1, 1, 1, 1, 0, 0, 0, 0]], 1, 8, [[0, 1, 3]]),
    ([[0, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0, 0, 0]], 1, 8, [[0, 1, 3], [0, 1, 2]]),
    ([[0, 1, 1, 0], [1, 1, 1, 0]], 3, 4, [[1, 2, 0], [0, 3, 0]]),
]


@pytest.mark.parametrize(("mask", "new", "past", "want"), ROWS)
def test_rows(mask, new, past, want):
    found = rows_of(torch.tensor(mask), new, past)
    assert found.dtype == torch.int32
    assert found.tolist() == want
    rows, last = token_rows(np.array(mask), new, past)  # of the CUDA file's node
    assert (rows.dtype, rows.tolist()) == (np.int32, want)
    assert last.tolist() == [[[begin + count - 1]] for begin, count, _ in want]


def test_rows_of_random_masks():
    rng = np.random.default_rng(0)
    for _ in range(300):
        batch, new, past = rng.integers(1, (4, 6, 9))
        mask = (rng.random((batch, rng.integers(new, past + new + 2))) < rng.choice([0.2, 0.8, 1.0])).astype(np.int64)
        rows, _ = token_rows(mask, int(new), int(past))
        assert rows.tolist() == rows_of(torch.tensor(mask), int(new), int(past)).tolist(), (mask, new, past)


def feed(ids: np.ndarray, mask: np.ndarray, past: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)[:, -ids.shape[1] :]
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | past


def step(generator: Generator, ids: np.ndarray, mask: np.ndarray, past: dict[str, np.ndarray]):
    found = dict(zip(generator.outputs, generator.session.run(None, feed(ids, mask, past)), strict=True))
    return found["logits"], {name: found[name.replace("past_key_values", "present")] for name in past}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batches(exported, architecture, side):
    """Prompts of 3, 7 and 5 tokens, then three tokens more: each row as alone.

    The first layer's cache has the same bytes. The routers' products in ONNX Runtime depend on the number of rows in
    their last bits, so that the rest differs by f32's roundings.
    """
    generator, lengths = Generator(exported(architecture, activations="float")), (3, 7, 5)
    rows = [tokens(1, n + 3, seed=n) for n in lengths]
    ids, mask = np.zeros((3, 7), np.int64), np.zeros((3, 7), np.int64)
    for row, (own, n) in enumerate(zip(rows, lengths, strict=True)):
        at = slice(7 - n, 7) if side == "left" else slice(0, n)
        ids[row, at], mask[row, at] = own[0, :n], 1
    logits, past = step(generator, ids, mask, generator.start(3))
    steps = [logits[i, -1 if side == "left" else n - 1] for i, n in enumerate(lengths)]
    found = [[s] for s in steps]
    for more in range(3):
        mask = np.concatenate([mask, np.ones((3, 1), np.int64)], 1)
        new = np.array([[own[0, n + more]] for own, n in zip(rows, lengths, strict=True)])
        logits, past = step(generator, new, mask, past)
        for i in range(3):
            found[i].append(logits[i, -1])
    for i, (own, n) in enumerate(zip(rows, lengths, strict=True)):
        alone, cache = step(generator, own[:, :n], np.ones((1, n), np.int64), generator.start())
        want = [alone[0, -1]]
        for more in range(3):
            alone, cache = step(generator, own[:, n + more : n + more + 1], np.ones((1, n + more + 1), np.int64), cache)
            want.append(alone[0, -1])
        assert error(np.array(found[i]), np.array(want)) < 2e-5
        for kind in ("key", "value"):
            name = f"past_key_values.0.{kind}"
            assert past[name][i, :, : n + 3].tobytes() == cache[name][0].tobytes()


def test_padding_is_not_looked_at(exported):
    """Whatever tokens stand where the mask has none, the others' bytes are the same."""
    generator, mask = Generator(exported("qwen3_moe", activations="float")), np.array([[0, 0, 1, 1, 1]])
    ids = tokens(2, 5)
    ids[1, 2:] = ids[0, 2:]
    found = [step(generator, row[None], mask, generator.start())[0][0, 2:] for row in ids]
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("whole_mask", [False, True])
@pytest.mark.parametrize("cache", ["f32", "f16"])
@pytest.mark.parametrize("architecture", every(["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"], 2))
def test_a_cache_bound_in_place_equals_one_that_grows(exported, architecture, cache, whole_mask):
    """Prompt, chunk and tokens, each output bound to the memory of its input, which was never cleared."""
    generator = Generator(exported(architecture, activations="float", cache=cache))
    ids, capacity = tokens(2, 12), 16
    past = generator.start(2)
    memory = {
        name: ort.OrtValue.ortvalue_from_numpy(
            np.full((*array.shape[:2], capacity, array.shape[3]), np.nan, array.dtype)
        )
        for name, array in past.items()
    }
    at = 0
    for new in (5, 1, 4, 1, 1):
        own = ids[:, at : at + new]
        at += new
        want, past = step(generator, own, np.ones((2, at), np.int64), past)
        binding = generator.session.io_binding()
        mask = np.zeros((2, capacity if whole_mask else at), np.int64)
        mask[:, :at] = 1
        values = feed(own, mask, {}) | {"position_ids": np.tile(np.arange(at - new, at), (2, 1))}
        for name, array in values.items():
            binding.bind_cpu_input(name, array)
        for name, value in memory.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        binding.bind_output("logits")
        generator.session.run_with_iobinding(binding)
        assert binding.copy_outputs_to_cpu()[-1].tobytes() == want.tobytes()
    for name, value in memory.items():
        assert value.numpy()[:, :, :at].tobytes() == past[name].tobytes()


def test_the_last_logits_of_a_cache_bound_in_place(exported):
    """A mask of the whole capacity: the new tokens are not its last columns."""
    every = Generator(exported("qwen3_moe", activations="float"))
    last = Generator(exported("qwen3_moe", activations="float", logits="last"))
    ids, mask = tokens(2, 5), np.zeros((2, 9), np.int64)
    mask[0, :5] = mask[1, 2:5] = 1
    positions = np.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    past = {name: np.zeros((2, 2, 9, 48), np.float32) for name in every.past}
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": positions} | past
    (want,), (found,) = (g.session.run(["logits"], feeds) for g in (every, last))
    np.testing.assert_allclose(found[:, 0], want[:, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [3, 4, 5, 6])
def test_sliding_windows_at_their_border(exported, reference, length):
    """gpt-oss with a window of 4, and its sinks."""
    generator, ids = Generator(exported("gpt_oss", activations="float")), tokens(2, length + 2, seed=length)
    assert error(run(generator, ids, (length, 1, 1)), expected(reference("gpt_oss"), ids)) < 2e-5


def test_the_cache_is_f16(exported, checkpoint, reference, tmp_path):
    export(checkpoint("qwen3_moe"), tmp_path, activations="float", logits="all")
    generator, ids = Generator(tmp_path), tokens(2, 7)
    assert {array.dtype for array in generator.start().values()} == {np.dtype(np.float16)}
    assert {node["cache"] for node in inspect(tmp_path)["attention"]} == {"float16"}
    # each key and value is rounded by 2^-12 of itself at most, two layers in a row
    assert 1e-6 < error(run(generator, ids, (5, 1, 1)), expected(reference("qwen3_moe"), ids)) < 2e-3


def test_where_some_attention_is_plain_the_cache_has_the_graphs_type(plain):
    generator = Generator(plain)
    assert {array.dtype for array in generator.start().values()} == {np.dtype(np.float32)}


def test_cache_is_an_option_of_the_cpu():
    with pytest.raises(OptionError, match="cache is f16: for target cuda floats have the graph's type, bf16"):
        Options(target="cuda", cache="f16")


def test_a_short_cache_is_named(exported):
    generator = Generator(exported("qwen3_moe", activations="float"))
    past = {name: np.zeros((1, 2, 4, 48), np.float32) for name in generator.past}
    with pytest.raises(Exception, match=r"the cache past_key_values\.0\.key has 4 slots|attention_mask has 4 columns"):
        generator.session.run(None, {"input_ids": tokens(1, 6), "attention_mask": np.ones((1, 4), np.int64),
                                     "position_ids": np.arange(6)[None]} | past)  # fmt: skip


# recognition: Qwen3's attention, altered

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1,
         "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "vocab_size": 16,
         "max_position_embeddings": 64}  # fmt: skip


def altered(change: str):
    """Qwen3MoeAttention.forward with one thing done otherwise."""

    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (self.q_norm(q) if change != "no norm of queries" else q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        v = v.transpose(1, 2)
        q, rotated = apply_rotary_pos_emb(q, k, *position_embeddings)
        k = k if change == "keys do not turn" else rotated
        v = v.clamp(-8, 8) if change == "values are clipped" else v
        if change == "temperature by position":
            seen = cache.get_seq_length(self.layer_idx) if cache is not None else 0
            q = q * (1 + np.log1p(seen // 8192))
        if change == "factor by position":
            q = q * (1 + (kwargs["position_ids"] // 8192).float())[:, None, :, None]
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        scale = self.scaling * (1 + 2**-10) if change == "another scale for one head" else self.scaling
        q = torch.cat((q[:, :1] * (scale / self.scaling), q[:, 1:]), 1)
        cap = {"softcap": 50.0} if change == "softcap" else {}
        out, _ = attention_function()(self, q, k, v, attention_mask, scaling=self.scaling, **cap)
        out = out.reshape(*hidden_states.shape[:-1], -1)
        if change == "output gate":
            out = out * torch.sigmoid(hidden_states.mean(-1, keepdim=True))
        return self.o_proj(out), None

    def attention_function():
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS[standard_attention.NAME]

    return forward


def recognised(**config: object):
    settings = AutoConfig.for_model("qwen3_moe", **SMALL | config)
    model = AutoModelForCausalLM.from_config(settings).eval()
    model.set_attn_implementation(standard_attention.NAME)
    return recognise(model, model.model, lambda spec: "", kinds=[GROUPED], indexer=indexer.compare)


def test_the_same_by_other_code_is_recognised(monkeypatch):
    monkeypatch.setattr(Qwen3MoeAttention, "forward", altered(""))
    found, left = recognised()
    assert (list(found), left) == (["model.layers.0.self_attn"], {})


@pytest.mark.parametrize(
    "change",
    ["no norm of queries", "keys do not turn", "values are clipped", "temperature by position", "factor by position",
     "another scale for one head", "output gate"],
)  # fmt: skip
def test_an_altered_module_is_not_recognised(change, monkeypatch):
    monkeypatch.setattr(Qwen3MoeAttention, "forward", altered(change))
    found, left = recognised()
    assert found == {}
    assert list(left) == ["model.layers.0.self_attn"]


def test_an_argument_that_no_attention_takes_is_refused(monkeypatch):
    monkeypatch.setattr(Qwen3MoeAttention, "forward", altered("softcap"))
    with pytest.raises(ValueError, match="Qwen3MoeAttention: attention with softcap is not supported"):
        recognised()


def test_windows_are_those_of_the_masks():
    """Which layers have one is in the model's code; a module's own number may be of no use."""
    found, _ = recognised(sliding_window=12, use_sliding_window=False)
    assert [one.spec.sliding_window for one in found.values()] == [0]
    found, _ = recognised(sliding_window=12, use_sliding_window=True, max_window_layers=0)
    assert [one.spec.sliding_window for one in found.values()] == [12]


def test_reasons_that_are_no_reasons_are_refused(plain, tmp_path):
    from quantmoe.exporter.inspecting.inspect import ModelError

    folder = plain
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for prop in model.metadata_props:
        if prop.key == "plain_attention":
            assert set(json.loads(prop.value)) == {f"model.layers.{i}.self_attn" for i in range(2)}
            prop.value = '{"a": 1}'
    for file in folder.glob("model.onnx.data*"):
        (tmp_path / file.name).hardlink_to(file)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"plain_attention is .*expected reasons by module"):
        inspect(tmp_path)
