"""export --paged: requests packed in one row, their caches in blocks, and PyTorch's logits. The operators are
test_cuda.py's."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from export.targets.test_cuda import OPERATORS, torch_logits
from onnx.reference import ReferenceEvaluator
from support.harness.sweeps import every

from quantmoe import Generator, ort_library_path
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import CheckpointError, ModelError, OptionError
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan
from quantmoe.runtime.opened_model import check_takes_tokens


@pytest.fixture
def paged(cached):
    return lambda architecture, **options: cached(architecture, paged=True, **{"logits": "last"} | options)


def steps(requests, schedule, blocks):
    """Runs of new tokens of some requests: (inputs but for the caches, (request, tokens before, new) of each)."""
    done = [0] * len(requests)
    for counts in schedule:
        rows = [(r, done[r], count) for r, count in enumerate(counts) if count]
        begins = np.cumsum([0, *(new for _, _, new in rows)])
        yield (
            {
                "input_ids": np.concatenate([requests[r][before : before + new] for r, before, new in rows]),
                "cumulative_sequence_lengths": begins.astype(np.int32),
                "past_sequence_lengths": np.array([before for _, before, _ in rows], np.int32),
                "block_table": blocks[[r for r, _, _ in rows]],
            },
            rows,
        )
        for r, _, new in rows:
            done[r] += new


#: new tokens of three requests in each run: they come and go, and a prompt is read in parts
SCHEDULE = [(7, 0, 0), (1, 5, 0), (1, 0, 4), (2, 0, 5)]


@pytest.mark.parametrize("logits", every(["last", "all"]))
@pytest.mark.parametrize("architecture", every(["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral", "olmoe"]))
def test_packed_requests_have_pytorchs_logits(paged, reference, architecture, logits):
    rng = np.random.default_rng(4)
    requests = [rng.integers(0, 384, sum(counts)) for counts in zip(*SCHEDULE, strict=True)]
    blocks = rng.permutation(6).astype(np.int32).reshape(3, 2)
    evaluator = ReferenceEvaluator(str(paged(architecture, logits=logits) / "model.onnx"), new_ops=OPERATORS)
    caches = {}
    for value in evaluator.proto_.graph.input:
        if value.name.startswith("past_key_values."):
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]]
            caches[value.name] = np.full((6, *shape), 3, np.float16)
    outputs = [value.name for value in evaluator.proto_.graph.output]
    model = reference(architecture, hidden_size=256, head_dim=64)
    want = [torch_logits(model, ids[None], np.ones_like(ids)[None])[0] for ids in requests]
    for feed, rows in steps(requests, SCHEDULE, blocks):
        wanted = np.concatenate([want[r][before : before + new] for r, before, new in rows])
        if logits == "last":
            feed["logits_indices"] = (feed["cumulative_sequence_lengths"][:0:-1] - 1).astype(np.int32)
            wanted = wanted[feed["logits_indices"]]
        found = dict(zip(outputs, evaluator.run(None, feed | caches), strict=True))
        assert found["logits"].shape == wanted.shape
        # as in test_cuda.py: a few hundred roundings of 2^-11
        assert np.abs(found["logits"] - wanted).max() / np.abs(want[0]).max() < 1e-2
        caches = {name: found[name.replace("past_key_values", "present")] for name in caches}


@pytest.mark.parametrize("architecture", every(["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral"]))
def test_inspect_says_the_same_of_attention(paged, cached, architecture):
    found, plain = (inspect(folder)["attention"] for folder in (paged(architecture), cached(architecture)))
    assert [node["attributes"] for node in found] == [node["attributes"] | {"block_size": 256} for node in plain]
    assert [node["bytes_per_token"] for node in found] == [node["bytes_per_token"] for node in plain]
    assert {node["cache"] for node in found} == {"float16 in blocks"}


@pytest.mark.parametrize("dtype", every(["f16", "bf16"]))
def test_what_onnxruntime_genai_reads(paged, dtype):
    folder = paged("qwen3_moe", dtype=dtype)
    path = str(folder / "model.onnx")
    onnx.checker.check_model(path)
    graph, config = ir.load(path).graph, json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    decoder, sizes = config["model"]["decoder"], {value.name: list(map(str, value.shape)) for value in graph.inputs}
    own = ir.DataType.FLOAT16 if dtype == "f16" else ir.DataType.BFLOAT16
    assert sizes["input_ids"] == ["num_tokens"]
    assert sizes["past_key_values.1.value"] == ["num_blocks", "256", "2", "64"]
    types = {value.name: value.dtype for value in graph.inputs}
    names = [name for kind, name in decoder["inputs"].items() if name == kind]
    caches = [f"past_key_values.{i}.{kind}" for i in range(2) for kind in ("key", "value")]
    assert [*types] == [*names, *caches]
    assert {types[name] for name in caches} == {own}
    assert {types[name] for name in names} == {ir.DataType.INT64, ir.DataType.INT32}
    assert [value.name for value in graph.outputs][1:] == [
        name.replace("past_key_values", "present") for name in caches
    ]
    assert decoder["state_groups"] == [{"kind": "paged_kv", "layer_ids": [0, 1]}]
    assert config["engine"]["dynamic_batching"]["block_size"] == 256


def test_onnx_runtime_knows_the_nodes(paged):
    """Types and shapes are op.def's: ONNX Runtime has inferred them before the CPU's library refuses the GPU's nodes.
    Generate says which folder it is."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(ort_library_path())
    with pytest.raises(Exception, match="exported for NVIDIA GPUs"):
        ort.InferenceSession(str(paged("qwen3_moe") / "model.onnx"), options, providers=["CPUExecutionProvider"])
    with pytest.raises(ModelError, match="exported with --target cuda"):
        Generator(paged("qwen3_moe"))


class Opened:
    """A session of a paged folder."""

    def __init__(self, folder):
        self.graph = ir.load(folder / "model.onnx").graph

    def get_inputs(self):
        return list(self.graph.inputs)

    def get_outputs(self):
        return list(self.graph.outputs)


def test_generate_refuses_many_requests(paged):
    folder = paged("qwen3_moe")
    with pytest.raises(ModelError, match=r"tokens of many requests.*--paged"):
        check_takes_tokens(folder, Opened(folder))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    every(
        [
            ("qwen3_next", r"layers\.0\.linear_attn: --paged has no linear attention"),
            ("deepseek_v3", r"layers\.0\.self_attn: --paged: latent attention"),
            ("mimo_v2_flash", r"layers\.0\.self_attn: --paged: head_size is 48 and v_head_size 32"),
        ]
    ),
)
def test_attention_that_blocks_do_not_hold_is_refused(checkpoint, tmp_path, architecture, reason):
    for command in (export, plan):
        with pytest.raises(CheckpointError, match=reason):
            command(checkpoint(architecture), tmp_path / "a", target="cuda", paged=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target": "ort"}, "paged is for targets cpu and cuda"),
        ({"logits": 5}, "paged does not go with logits of N tokens"),
        ({"tensor_parallel": 2}, "paged does not go with tensor_parallel"),
        ({"mtp": True}, "paged does not go with mtp"),
        ({"vision": True}, "paged does not go with vision"),
    ],
)
def test_options(options, reason):
    with pytest.raises(OptionError, match=reason):
        Options(**{"target": "cuda", "paged": True} | options)
    Options(target="cuda", paged=True)


def test_a_dry_run_counts_the_tables(checkpoint, tmp_path):
    """Cosines and sines of 64 features, 32 of each, in 4 bytes, of 4,096 positions."""
    source = checkpoint("qwen3_moe", hidden_size=256, head_dim=64)
    sizes = [plan(source, tmp_path / "a", target="cuda", paged=paged).dense for paged in (True, False)]
    assert sizes[0] - sizes[1] == 2 * 32 * 4 * 4096


def test_codes_in_the_cache(checkpoint, tmp_path):
    """Blocks hold codes, as other caches do."""
    source = checkpoint("qwen3_moe", hidden_size=256, head_dim=64)
    export(source, tmp_path / "a", target="cuda", paged=True, cache="fp8")
    graph = ir.load(tmp_path / "a" / "model.onnx").graph
    types = {value.name: value.dtype for value in [*graph.inputs, *graph.outputs]}
    assert types["past_key_values.0.key"] == types["present.1.value"] == ir.DataType.UINT8
    assert {node["cache"] for node in inspect(tmp_path / "a")["attention"]} == {"fp8_e4m3 in blocks"}
