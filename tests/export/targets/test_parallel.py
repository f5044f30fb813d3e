"""Slices of a model: all ranks in this process, a thread each, against the model in one piece."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from benchmarks import slice_logits
from export.architectures.test_hybrid import multimodal, published, rewritten
from export.graph.test_model import error, run, tokens
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.harness.once import made_once
from support.harness.sweeps import every
from support.models.checkpoints import TINY, make_gptq_checkpoint
from support.models.tiny import COMMON, make_checkpoint, make_float_checkpoint
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

from quantmoe.benchmarks.random_gguf import write_gguf
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.cli import app
from quantmoe.exporter.errors import CheckpointError, OptionError
from quantmoe.exporter.folder.files import ranks_in
from quantmoe.exporter.folder.record import file_hash
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.inspecting.unpack import unpack
from quantmoe.exporter.reading.expert_map import balance, in_order, placements, write_map
from quantmoe.exporter.reading.formats import moe_layers
from quantmoe.exporter.reading.slices import Cut, Slice
from quantmoe.exporter.surveying.explain import explain
from quantmoe.exporter.surveying.survey import is_model
from quantmoe.exporter.targets import CUDA, TARGETS
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.identity import export_id
from quantmoe.exporter.writing.plan import plan
from quantmoe.exporter.writing.prepare import open_format
from quantmoe.runtime.generate import Generator, ModelError

GROUPS = (f"model {i}" for i in count())
#: 4 ranks of 2 heads of keys and values: two ranks have each
SIZES = {
    "hidden_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 128,
}
#: linear attention, of whose heads two share a key, and full attention with a gate; a shared expert with a gate
HYBRID = SIZES | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 128,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
OF = {
    "qwen3_moe": SIZES,
    # latent attention, a dense layer, a shared expert of two experts' width
    "deepseek_v3": {k: v for k, v in SIZES.items() if k != "head_dim"}
    | {"num_key_value_heads": 4, "n_shared_experts": 2},
    # biases of o_proj and of the experts' down, sinks, a window
    "gpt_oss": {k: v for k, v in SIZES.items() if k != "moe_intermediate_size"} | {"intermediate_size": 128},
    # a norm of all heads together
    "olmoe": {k: v for k, v in SIZES.items() if k not in ("moe_intermediate_size", "head_dim")}
    | {"intermediate_size": 128},
    "qwen3_next": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    # decays of each key feature, gates of low rank, full attention with a latent, a dense layer
    "kimi_linear": {k: v for k, v in SIZES.items() if k != "head_dim"}
    | {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    | {"linear_num_heads": 4, "linear_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]}
    | {"mlp_layer_types": ["dense", "sparse"]},
    # short convolutions with biases, whose channels are as many as the model's features; a dense layer
    "lfm2_moe": SIZES
    | {"hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "num_dense_layers": 1, "conv_bias": True}
    | {"layer_types": ["conv", "full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
HYBRIDS = ("qwen3_5_moe_text", "qwen3_next", "kimi_linear", "lfm2_moe")
EVERY_LOGIT = {"activations": "float", "logits": "all", "cache": "f32"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(architecture: str) -> Path:
        def write(folder: Path) -> Path:
            return make_checkpoint(folder, architecture, **OF[architecture])

        return made_once(tmp_path_factory, write, f"sliced {architecture}", **OF[architecture])

    return make


@pytest.fixture(scope="module")
def whole(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def make(architecture: str) -> Path:
        def write(folder: Path) -> None:
            export(checkpoint(architecture), folder, **EVERY_LOGIT)

        return made_once(tmp_path_factory, write, f"whole {architecture}")

    return make


#: of formats whose scales are of up to 128 rows or 256 columns, which two ranks have whole
WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 512,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
#: a preset, "_ASYM" with zero points, or a type of GGUF, or floats -> the columns that share a scale
SCHEMES = {
    "Q4_K": 256,
    "Q5_K": 256,
    "Q6_K": 256,
    "W4A16": 32,
    "W4A16_ASYM": 32,
    "W8A16": 32,
    "W8A16_ASYM": 32,
    "FP8_BLOCK": 128,
    "NVFP4A16": 16,
    "MXFP4A16": 32,
    "MXFP8A16": 32,
    "bf16": 0,
}


def make_scheme_checkpoint(folder: Path, scheme: str, **sizes: int) -> Path:
    """Qwen3-MoE in a scheme of SCHEMES."""
    sizes = WIDE | sizes
    if scheme == "bf16":
        return make_float_checkpoint(folder, "qwen3_moe", **sizes)
    if scheme.endswith("_K"):
        return make_gguf(folder, "qwen3_moe", scheme, **sizes)
    preset = scheme.removesuffix("_ASYM")
    group_size = None if "FP" in scheme else SCHEMES.get(scheme)
    return make_checkpoint(folder, "qwen3_moe", preset, group_size, symmetric=preset == scheme, **sizes)


def make_gguf(folder: Path, architecture: str, kind: str, **sizes: int) -> Path:
    folder.mkdir()
    config = CONFIG_MAPPING[architecture](**COMMON | sizes, vocab_size=384).to_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantmoe.benchmarks.random_gguf.ROWS", 4 * 512 * 4)  # no two rows of a tensor alike
        write_gguf(folder / "model.gguf", config, kind)
    return folder / "model.gguf"


def run_all(folder: Path, ids: np.ndarray, pieces: tuple[int, ...]) -> list[np.ndarray]:
    """Each rank's logits of ids [B, S], fed in consecutive pieces through its cache."""
    group = next(GROUPS)
    ranks = [Generator(path, threads=1, group=group) for path in ranks_in(folder).values()]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: run(rank, ids, pieces), ranks))


@pytest.mark.parametrize(
    ("architecture", "world", "whole_experts"),
    every(
        [
            ("qwen3_5_moe_text", 2, False),
            ("qwen3_moe", 2, False),
            ("qwen3_moe", 2, True),
            ("deepseek_v3", 2, False),
            ("gpt_oss", 2, False),
            ("qwen3_moe", 4, False),
            ("qwen3_moe", 4, True),
            ("deepseek_v3", 4, False),
            ("deepseek_v3", 4, True),
            ("deepseek_v3", 2, True),
            ("gpt_oss", 4, False),
            ("gpt_oss", 2, True),
            ("gpt_oss", 4, True),
            *[(name, world, whole) for name in HYBRIDS for world in (2, 4) for whole in (False, True)][1:],
        ],
    ),
)
def test_all_ranks_equal_the_whole_model(checkpoint, whole, tmp_path, architecture, world, whole_experts):
    """The same products in float32, summed in another order.

    A sum of n terms is off by up to n 2^-24 of its largest partial sum, where all roundings had one sign; as they have
    both it is about sqrt(n) 2^-24. Of the 6 sums that two layers add to a token, and the head's, of at most 512 terms
    each, that is sqrt(7 * 512) * 6e-8 = 4e-6, of which norms and softmax make no more than a few times as much; 6e-7
    was seen. A bias added in every rank, a head of another rank or an expert left out moves logits by 1e-2 and more.
    """
    folder = tmp_path / "slices"
    export(checkpoint(architecture), folder, **EVERY_LOGIT, tensor_parallel=world, expert_parallel=whole_experts)
    ids = tokens(2, 9)
    want = run(Generator(whole(architecture)), ids, (4, 3, 1, 1))
    found = run_all(folder, ids, (4, 3, 1, 1))
    assert len(found) == world
    for logits in found:
        assert error(logits, want) < 2e-5
        np.testing.assert_array_equal(logits, found[0])  # every rank chooses the same tokens
    check_bytes(folder, whole(architecture), whole_experts)


@pytest.mark.parametrize(("world", "whole_experts"), [(8, False), (16, True)])
@pytest.mark.every
def test_many_ranks_equal_the_whole_model(tmp_path, world, whole_experts):
    """As above; 3.5e-7 was seen. A head of keys and values stands in two ranks, or in four."""
    sizes = {"hidden_size": 64, "num_attention_heads": 16, "moe_intermediate_size": 512, "num_experts": 16}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": 1, "num_experts_per_tok": 4}
    folder = make_checkpoint(tmp_path / "checkpoint", "qwen3_moe", **SIZES | sizes)
    export(folder, tmp_path / "whole", **EVERY_LOGIT)
    export(folder, tmp_path / "slices", **EVERY_LOGIT, tensor_parallel=world, expert_parallel=whole_experts)
    ids = tokens(2, 9)
    want = run(Generator(tmp_path / "whole"), ids, (7, 1, 1))
    found = run_all(tmp_path / "slices", ids, (7, 1, 1))
    assert len(found) == world
    for logits in found:
        assert error(logits, want) < 2e-5
        np.testing.assert_array_equal(logits, found[0])
    check_bytes(tmp_path / "slices", tmp_path / "whole", whole_experts, layers=1)


@pytest.mark.parametrize("whole_experts", every([False, True]))
@pytest.mark.parametrize("scheme", every(SCHEMES))
def test_ranks_of_every_scheme_equal_the_whole_model(tmp_path, scheme, whole_experts):
    """The bound is that above. Codes and scales of the parts are the checkpoint's, those of two levels, too."""
    folder = make_scheme_checkpoint(tmp_path / "checkpoint", scheme)
    options = EVERY_LOGIT | ({"quantize": "none"} if scheme == "bf16" else {})
    export(folder, tmp_path / "whole", **options)
    export(folder, tmp_path / "slices", **options, tensor_parallel=2, expert_parallel=whole_experts)
    ids = tokens(2, 6)
    want = run(Generator(tmp_path / "whole"), ids, (5, 1))
    for logits in run_all(tmp_path / "slices", ids, (5, 1)):
        assert error(logits, want) < 2e-5
    check_bytes(tmp_path / "slices", tmp_path / "whole", whole_experts, layers=1)


#: whose activations are rounded, too -> as what, and how ranks divide the model
ROUNDED = [
    ("NVFP4", "nvfp4", {}),
    ("W8A8", "int8_token", {"expert_parallel": True, "data_parallel": True}),
    ("NVFP4", "nvfp4", {"expert_parallel": True}),
    ("FP8", "fp8_tensor", {}),
    ("FP8_DYNAMIC", "fp8_token", {"expert_parallel": True, "data_parallel": True}),
    ("FP8_BLOCK", "fp8_group128", {}),
    ("MXFP4", "mxfp4", {}),
]


@pytest.mark.parametrize(("scheme", "rounded", "options"), every(ROUNDED, 2))
def test_ranks_that_round_activations(tmp_path, scheme, rounded, options):
    """The bound is that above. A scale is of features that a rank has whole, or stored, so each rank rounds what the
    whole model does: in the experts sums over the ranks that differ in their last bits, which have another code only
    at the edge of two. That is a step of a code in a token, and was not seen.
    """
    folder = make_scheme_checkpoint(tmp_path / "checkpoint", scheme)
    kept = {"logits": "all", "cache": "f32"}
    export(folder, tmp_path / "whole", **kept)
    (spec,) = {spec for _, spec, _ in plan(folder, "nowhere", tensor_parallel=2, **options).layers.values()}
    assert (spec.w13.activation_format, spec.w2.activation_format) == (rounded, rounded)
    export(folder, tmp_path / "slices", **kept, tensor_parallel=2, **options)
    ids = tokens(2, 6)
    want = run(Generator(tmp_path / "whole"), ids, (5, 1))
    for logits in run_all(tmp_path / "slices", ids, (5, 1)):
        assert error(logits, want) < 2e-5


@pytest.mark.parametrize("scheme", every((scheme for scheme, columns in SCHEMES.items() if columns), 0))
def test_a_scale_that_two_ranks_would_have(tmp_path, scheme):
    """Of experts of one group of columns each rank would have half: refused by name. Whole experts go."""
    columns = SCHEMES[scheme]
    folder = make_scheme_checkpoint(tmp_path / "checkpoint", scheme, moe_intermediate_size=columns)
    what = rf"{columns} (rows|columns) in blocks of {columns} are not 2 parts"
    refused(folder, rf"model\.layers\.0\.mlp\.experts\.0 among 2 ranks: {what}")
    plan(folder, "nowhere", tensor_parallel=2, expert_parallel=True)


@pytest.mark.every
def test_a_checkpoint_as_it_is_published(checkpoint, whole, tmp_path):
    """Qwen3_5MoeForConditionalGeneration: of its text model ranks have parts, as the dry run and inspect say."""
    folder = rewritten(checkpoint("qwen3_5_moe_text"), tmp_path / "checkpoint", published, multimodal)
    options = EVERY_LOGIT | {"tensor_parallel": 2}
    dry = plan(folder, tmp_path / "slices", **options)
    export(folder, tmp_path / "slices", **options)
    ids, alone = tokens(2, 9), whole("qwen3_5_moe_text")
    want = run(Generator(alone), ids, (4, 3, 1, 1))
    for logits in run_all(tmp_path / "slices", ids, (4, 3, 1, 1)):
        assert error(logits, want) < 2e-5
    found, all_of_it = inspect(tmp_path / "slices/rank0"), inspect(alone)
    assert sum(node["bytes"] for node in found["layers"]) == dry.packed
    assert {node["module"] for node in found["linears"]} == dry.linears.keys()
    (states,), (all_states,) = ([node["state_bytes"] for node in f["linear_attention"]] for f in (found, all_of_it))
    assert 2 * states == all_states


#: fields beside OF: of a dense layer four ranks have whole groups of features, or each half a group
ORDERED = {
    "qwen3_moe": {},
    "deepseek_v3": {"head_dim": 16, "intermediate_size": 128},
    "kimi_linear": {"head_dim": 16, "intermediate_size": 64},
    "lfm2_moe": {"intermediate_size": 128},
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "gpt_oss": {},
}


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A checkpoint whose linears are all in act-order, but for down of an expert of each layer, and the whole model."""

    def make(architecture: str) -> tuple[Path, Path]:
        def write(folder: Path) -> None:
            sizes = OF[architecture] | ORDERED[architecture]
            given = make_gptq_checkpoint(folder.parent / "given", architecture, desc_act=True, **sizes)
            changed(given, folder, "experts.0.down_proj.g_idx", lambda groups: groups.sort().values)

        folder = made_once(tmp_path_factory, write, f"ordered {architecture}", **ORDERED[architecture])
        name = f"ordered whole {architecture}"
        return folder, made_once(tmp_path_factory, lambda out: export(folder, out, **EVERY_LOGIT), name)

    return make


@pytest.mark.parametrize(
    ("architecture", "world", "whole_experts"),
    every(
        sorted(
            ((name, world, whole) for name in ORDERED for world in (2, 4) for whole in (False, True)),
            key=lambda case: case not in (("qwen3_moe", 2, False), ("deepseek_v3", 4, False)),
        ),
        2,
    ),
)
def test_ranks_of_a_model_in_act_order(ordered, tmp_path, architecture, world, whole_experts):
    """The bound is that above; 6e-7 was seen. Features of another order than gate's and up's, or of another rank, move
    logits by 1e-1."""
    folder, whole = ordered(architecture)
    options = EVERY_LOGIT | {"tensor_parallel": world, "expert_parallel": whole_experts}
    dry = plan(folder, tmp_path / "slices", **options)
    export(folder, tmp_path / "slices", **options)
    ids = tokens(2, 9)
    want = run(Generator(whole), ids, (4, 3, 1, 1))
    found = run_all(tmp_path / "slices", ids, (4, 3, 1, 1))
    assert len(found) == world
    for logits in found:
        assert error(logits, want) < 2e-5
        np.testing.assert_array_equal(logits, found[0])
    check_ordered_bytes(tmp_path / "slices", whole)
    nodes = inspect(tmp_path / "slices/rank0")
    assert sum(node["bytes"] for node in nodes["layers"]) == dry.packed
    assert {node["module"]: node["attributes"] for node in nodes["linears"]} == {
        module: linear.attributes() for module, (_, linear, _) in dry.linears.items()
    }


def check_ordered_bytes(folder: Path, whole: Path) -> None:
    """Codes and scales of all ranks, one after the other, are the whole model's in the order of down's columns; whole
    experts are as they are; linears after heads are divided by rows."""
    want, ranks = unpacked(whole), [unpacked(path) for path in ranks_in(folder).values()]
    taken = {"gate": "down", "up": "down", "gate_proj": "down_proj", "up_proj": "down_proj", "w1": "w2", "w3": "w2"}
    seen: Counter[str] = Counter()
    for name, tensor in want.items():
        module, _, field = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        parts = [file[name] for file in ranks if name in file]
        if field not in ("codes", "scales") or not parts:  # a shared expert may be the layer's, or by itself
            continue
        down = f"{parent}.{taken.get(leaf, leaf)}"
        columns = parts[0].shape[0] == tensor.shape[0]
        if len(parts) == 1 or parts[0].shape == tensor.shape:
            assert all(torch.equal(part, tensor) for part in parts), name
        elif leaf in taken and f"{down}.perm" in want and f"{down}.perm" not in ranks[0]:
            assert torch.equal(torch.cat(parts), tensor[want[f"{down}.perm"].long()]), name
        elif leaf in ("down", "down_proj", "w2") and columns:
            assert f"{module}.perm" not in ranks[0]  # nothing has to be brought into another order
            assert torch.equal(torch.cat(parts, 1), tensor), name
        elif leaf in ("o_proj", "out_proj", "down_proj", "w2"):
            assert torch.equal(torch.cat(parts), tensor), name
            assert all(torch.equal(file[f"{module}.perm"], want[f"{module}.perm"]) for file in ranks), name
        else:
            continue
        seen[leaf] += 1
    assert all(seen[leaf] >= 16 for leaf in ("gate", "up", "down"))
    assert seen["o_proj"] + seen["out_proj"] == 4


def test_slices_in_act_order_for_gpus(ordered, tmp_path):
    """A linear of heads has all features and some of the rows, between two AllGather; the dense layer needs none."""
    folder, _ = ordered("deepseek_v3")
    dry = plan(folder, tmp_path, target="cuda", tensor_parallel=2)
    export(folder, tmp_path, target="cuda", tensor_parallel=2)
    for rank in range(2):
        graph = ir.load(tmp_path / f"rank{rank}/model.onnx").graph
        assert Counter(node.op_type for node in graph if node.op_type.startswith("All")) == {
            "AllGather": 5,  # the logits', too
            "AllReduce": 1,
            "AllReduceAddRMSNorm": 1,  # the last one, whose sum nothing takes
        }
        nodes = {node.name: node for node in graph}
        linears = {node["module"]: node for node in inspect(tmp_path / f"rank{rank}")["linears"]}
        for layer in range(2):
            own = linears[f"model.layers.{layer}.self_attn.o_proj"]
            node = nodes[own["node"]]
            before, (after, _) = node.inputs[0].producer(), node.outputs[0].uses()[0]
            for other in (before, after):
                attributes = [other.attributes.get_int(name) for name in ("rank", "world", "axis")]
                assert (other.op_type, attributes) == ("AllGather", [rank, 2, -1])
            sizes = [own["attributes"][name] for name in ("in_features", "out_features", "w_perm")]
            assert sizes == [128, 96, 1]
        down = linears["model.layers.0.mlp.down_proj"]["attributes"]
        assert [down[name] for name in ("in_features", "out_features", "w_perm")] == [64, 192, 0]
        experts = inspect(tmp_path / f"rank{rank}")["layers"]
        assert sum(node["bytes"] for node in experts) == dry.packed
        assert all(node["attributes"]["w2_perm"] == 0 for node in experts)


def test_activations_of_divided_features(ordered):
    """Groups are of a rank's own features. Tokens are not: with a scale for each, o_proj alone has all features, by its
    AllGather; parts of the dense layer's and the experts' are float."""
    folder = ordered("deepseek_v3")[0]
    for activations, floats in ((None, ("lm_head",)), ("int8-token", ("lm_head", "down_proj"))):
        found = plan(folder, "nowhere", tensor_parallel=2, activations=activations)
        for name, (_, linear, _) in found.linears.items():
            assert (linear.w.activation_format == "none") == name.endswith(floats), name
        remark = "; float in the experts' down, down_proj: a scale would take the maximum over all slices"
        assert found.activations.endswith(remark) == (activations == "int8-token")


@given(st.data())
def test_an_expert_in_the_order_of_its_columns(data):
    """The same features, of which every rank takes those of its columns."""
    count, rng = data.draw(st.integers(1, 4)), np.random.default_rng(data.draw(st.integers(0, 99)))
    features, group = count * 2 * 8, 8

    def matrix(n: int, k: int, order: np.ndarray | None, **more: np.ndarray) -> QuantizedMatrix:
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        scales, zeros = rng.random((n, k // group)).astype(np.float32), rng.integers(0, 16, (n, k // group))
        return QuantizedMatrix(
            kind="int4",
            codes=codes,
            scales=scales,
            group_size=group,
            zero_points=zeros.astype(np.uint8),
            perm=order,
            **more,
        )

    gate, up = (matrix(features, 16, rng.permutation(16), bias=rng.random(features)) for _ in range(2))
    order = rng.permutation(features).astype(np.int32)
    down = matrix(5, features, order, pre_scale=rng.random(features).astype(np.float32))
    parts = [Slice(rank=rank, world=count).expert(Expert(gate, up, down), "none") for rank in range(count)]
    for m, own in ((gate, [part.gate for part in parts]), (up, [part.up for part in parts])):
        np.testing.assert_array_equal(np.concatenate([part.dequantize() for part in own]), m.dequantize()[order])
        np.testing.assert_array_equal(np.concatenate([part.bias for part in own]), m.bias[order])
    found = np.concatenate([part.down.dequantize() for part in parts], 1)
    np.testing.assert_array_equal(found, down.dequantize()[:, order])
    assert all(part.down.perm is None for part in parts)


def test_experts_in_act_order_that_are_not_divided():
    """Their activations' groups, or the blocks of gate's rows, would be cut."""

    def matrix(block_n: int, order: np.ndarray | None) -> QuantizedMatrix:
        return QuantizedMatrix(
            kind="fp8_e4m3",
            codes=np.zeros((64, 64), np.uint8),
            scales=np.ones((64 // block_n, 2), np.float32),
            group_size=32,
            block_n=block_n,
            perm=order,
        )

    order = np.roll(np.arange(64, dtype=np.int32), 1)
    for block_n, rounded, message in (
        (1, "mxfp8", "mxfp8 rounds groups of features"),
        (2, "none", "rows in blocks of 2"),
    ):
        expert = Expert(matrix(block_n, None), matrix(block_n, None), matrix(1, order))
        with pytest.raises(ValueError, match=f"{message} .*; --expert-parallel gives each rank whole experts"):
            Slice(rank=0, world=2).expert(expert, rounded)


@given(st.data())
def test_parts_of_sections(data):
    """What ranks have of rows with sections, put together again, is all rows; biases and zero points go with them."""
    count, block_n = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2]))
    sections = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    n, k = sum(sections) * count * block_n, 8
    codes = np.arange(n, dtype=np.uint8)[:, None].repeat(k, 1) % 16
    scales = np.arange(1, n // block_n * 2 + 1, dtype=np.float32).reshape(-1, 2)
    zero_points = (np.arange(scales.size) % 16).astype(np.uint8).reshape(scales.shape)
    bias = np.arange(n, dtype=np.float32)
    whole = QuantizedMatrix(
        kind="int4", codes=codes, scales=scales, group_size=4, block_n=block_n, zero_points=zero_points, bias=bias
    )
    cuts = [Cut(0, rank, count, sections) for rank in range(count)]
    parts = [cut.matrix(whole) for cut in cuts]
    ends = np.cumsum(sections)[:-1] * block_n
    for name in ("codes", "scales", "zero_points", "bias"):
        own = [getattr(part, name) for part in parts]
        split = [np.split(rows, ends // (block_n if name in ("scales", "zero_points") else 1)) for rows in own]
        found = np.concatenate([rows for of_section in zip(*split, strict=True) for rows in of_section])
        np.testing.assert_array_equal(found, getattr(whole, name))
    for rank, cut in enumerate(cuts):
        np.testing.assert_array_equal(cut.array(bias), parts[rank].bias)
        turned = replace(cut, axis=2).array(bias[None, None, :, None])
        np.testing.assert_array_equal(turned[0, 0, :, 0], parts[rank].bias)


@pytest.mark.parametrize(
    ("architecture", "mapped"),
    every([("gpt_oss", False), ("deepseek_v3", True), ("qwen3_moe", False), ("qwen3_next", False), ("olmoe", False)]),
)
def test_ranks_with_tokens_of_their_own(checkpoint, whole, tmp_path, architecture, mapped):
    """Each rank gives the whole model's logits of its own tokens."""
    options = {"tensor_parallel": 2, "expert_parallel": True, "data_parallel": True}
    if mapped:
        layers = moe_layers(open_format(checkpoint(architecture), None, None, activations=None))
        write_map(tmp_path / "map.json", [balance([9, *[1] * (layer.num_experts - 1)], 2, 2) for layer in layers])
        options["expert_map"] = tmp_path / "map.json"
    export(checkpoint(architecture), tmp_path / "slices", **EVERY_LOGIT, **options)
    alone, group = Generator(whole(architecture)), next(GROUPS)
    ranks = [Generator(tmp_path / f"slices/rank{r}", threads=1, group=group) for r in range(2)]
    assert [len(r.session.get_outputs()) for r in ranks] == [len(alone.session.get_outputs())] * 2
    ids = [tokens(2, 9), tokens(4, 9)[2:]]
    assert not np.array_equal(*ids)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank, own: run(rank, own, (7, 1, 1)), ranks, ids))
    for logits, own in zip(found, ids, strict=True):
        assert error(logits, run(alone, own, (7, 1, 1))) < 2e-5  # as above


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.every
def test_ranks_with_experts_as_a_map_says(checkpoint, whole, tmp_path, architecture):
    """Any experts in any rank, some several times: each pair is computed once, by a rank that all agree on."""
    layers = moe_layers(open_format(checkpoint(architecture), None, None, activations=None))
    rng = np.random.default_rng(1)
    found = [balance(rng.zipf(1.5, layer.num_experts), 4, 4) for layer in layers]
    assert all(placement.copies > 1 for placement in found)
    write_map(tmp_path / "map.json", found)
    options = {"tensor_parallel": 4, "expert_parallel": True, "expert_map": tmp_path / "map.json"}
    export(checkpoint(architecture), tmp_path / "slices", **EVERY_LOGIT, **options)
    ids = tokens(2, 9)
    want = run(Generator(whole(architecture)), ids, (7, 1, 1))
    for logits in run_all(tmp_path / "slices", ids, (7, 1, 1)):
        assert error(logits, want) < 2e-5  # see above
    weights, stored = unpacked(whole(architecture)), set()
    for rank in range(4):
        for name, tensor in unpacked(tmp_path / "slices" / f"rank{rank}").items():
            if ".experts." in name:
                assert torch.equal(tensor, weights[name]), name
                stored.add(name)
    assert stored == {name for name in weights if ".experts." in name}
    nodes = inspect(tmp_path / "slices" / "rank0")["layers"]
    assert [node["experts"]["ids"] for node in nodes] == [list(placement.ranks[0]) for placement in found]
    assert all(node["top_k"] for node in nodes)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=24), st.integers(2, 6), st.integers(0, 24))
def test_a_balanced_map(tokens, world, copies):
    """Every expert stands, none twice in a rank, all ranks hold as many; each pair is in one rank's table."""
    experts = len(tokens)
    if (experts + copies) % world or experts + copies > world * experts:
        with pytest.raises(OptionError, match=f"{experts} experts and {copies} copies among {world} ranks"):
            balance(tokens, world, copies)
        return
    placed = balance(tokens, world, copies)
    assert {len(set(own)) for own in placed.ranks} == {(experts + copies) // world}
    assert set().union(*placed.ranks) == set(range(experts))
    tables = np.array([placed.table(rank, experts) for rank in range(world)])
    assert ((tables >= 0).sum(0) == 1).all()
    for rank, table in enumerate(tables):
        for e, at in zip(np.broadcast_to(np.arange(experts), table.shape)[table >= 0], table[table >= 0], strict=True):
            assert placed.ranks[rank][at] == e
    assert placed.load(tokens).sum() == pytest.approx(sum(tokens))


def test_a_map_of_a_skewed_load():
    """Zipf: in order, the rank of the hottest experts has most of the tokens."""
    loads = 1 / np.arange(1, 129)
    shares = [placed.load(loads).max() * 8 / loads.sum() for placed in (in_order(128, 8), balance(loads, 8, 16))]
    assert shares[0] > 4
    assert shares[1] < 1.1


MAP = [[0, 1, 2, 3], [3, 0, 1, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected JSON"),
        ('{"map": []}', "expected JSON"),
        ('{"physical_to_logical_map": [[0.5]]}', "expected JSON"),
        (MAP[:1], "has 1 rows, expected one for each of 2 layers"),
        ([MAP[0][:3], MAP[1]], "of layer 3 has 3 experts, expected as many in each of 2 ranks"),
        ([[0, 1, 2, 2], MAP[1]], "of layer 3 has not expert 3"),
        ([MAP[0], [*MAP[1], 4, 0]], "of layer 5 has expert 4, expected 0 to 3"),
        ([MAP[0], [0, 0, 1, 1, 2, 3, 2, 3]], "of layer 5 has an expert twice in rank 0"),
    ],
)
def test_maps_that_do_not_fit(tmp_path, text, message):
    path = tmp_path / "map.json"
    path.write_text(text if isinstance(text, str) else json.dumps({"physical_to_logical_map": text}), encoding="utf-8")
    with pytest.raises((OptionError, CheckpointError), match=message) as raised:
        placements(path, 2, {3: 4, 5: 4})
    assert str(path) in str(raised.value)


def test_a_map_that_is_not_there(checkpoint, tmp_path):
    with pytest.raises(OptionError, match="no map: No such file"):
        placements(tmp_path / "no map", 2, {3: 4})
    (tmp_path / "map.gz").write_bytes(b"\x1f\x8b\xff")
    command = ["export", str(checkpoint("qwen3_moe")), str(tmp_path / "out"), "--tensor-parallel", "2"]
    command += ["--expert-parallel", "--expert-map"]
    for name, text in (("no map", "No such file"), (".", "Is a directory"), ("map.gz", "expected JSON")):
        for dry in ([], ["--dry-run"]):
            with pytest.raises(OptionError, match=f"expert_map {re.escape(str(tmp_path / name))}: {text}"):
                CliRunner().invoke(app, [*command, str(tmp_path / name), *dry], catch_exceptions=False)
    with pytest.raises(OptionError, match="expert_map needs expert_parallel"):
        Options(tensor_parallel=2, expert_map=tmp_path / "no map")
    with pytest.raises(OptionError, match="data_parallel needs expert_parallel"):
        Options(tensor_parallel=2, data_parallel=True)


def check_bytes(folder: Path, whole: Path, whole_experts: bool, layers: int = 2) -> None:
    """Codes and scales of the experts, bit for bit; which nodes there are."""
    want, ranks = unpacked(whole), [unpacked(path) for path in ranks_in(folder).values()]
    fields = {_field(name) for name in want if "expert" in name and re.search(r"\.(codes|scales)\b", name)}
    assert len(fields) >= 4 * 2 * 3  # of four experts

    def parts(files: list[dict[str, torch.Tensor]], field: str) -> list[torch.Tensor]:
        return [tensor for file in files for name, tensor in file.items() if _field(name) == field]

    for field in fields:
        own, all_of_it = parts(ranks, field), parts([want], field)
        if field.endswith(".down.scales") and all_of_it[0].shape[1] == 1:  # one a row, which every rank has
            assert all(torch.equal(part, all_of_it[0]) for part in own), field
            continue
        dim = int(".down." in field)
        assert torch.equal(torch.cat(own, dim=dim), torch.cat(all_of_it, dim=dim)), field
    ids: set[int] = set()
    for rank, path in enumerate(ranks_in(folder).values()):
        model = ir.load(path / "model.onnx")
        assert (model.metadata_props["rank"], model.metadata_props["world"]) == (str(rank), str(len(ranks)))
        found = [node for node in model.graph if node.op_type in ("AllReduce", "AllReduceAddRMSNorm")]
        assert {node.attributes.get_int("rank") for node in found} == {rank}
        ids |= {node.attributes.get_int("export_id") for node in model.graph if "export_id" in node.attributes}
        assert len(found) == 2 * layers  # a shared expert is among the routed ones
        (joined,) = [node for node in model.graph if node.op_type == "AllGather"]
        assert [joined.attributes.get_int(name) for name in ("rank", "world")] == [rank, len(ranks)]
    assert len(ids) == 1
    assert ids != {0}


def _field(name: str) -> str:
    """Without the number of a shared expert's part, which is as wide as the file's experts."""
    return re.sub(r"(shared_experts)\.\d+", r"\1", name)


def unpacked(folder: Path) -> dict[str, torch.Tensor]:
    """What ``unpack`` writes of both layers."""
    found = {}
    for layer in range(2):
        with contextlib.suppress(ModelError):  # a dense layer of floats
            unpack(folder, layer, path := folder.parent / f"unpacked.{folder.name}.{layer}", force=True)
            found |= load_file(path)
    return found


def test_exports_that_differ_have_other_identities(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("qwen3_moe")
    usual = {"tensor_parallel": 2, "expert_parallel": True}

    def identity(folder: Path = folder, **options: object) -> int:
        return export_id(open_format(folder, None, None, activations=None).ckpt, Options(**usual | options))

    maps = []
    for order in (MAP[0], MAP[1]):
        maps.append(tmp_path / f"{order[0]}.json")
        maps[-1].write_text(json.dumps({"physical_to_logical_map": [order] * 2}), encoding="utf-8")
    tuned = tmp_path / "tuned"
    shutil.copytree(folder, tuned)
    assert identity(tuned) == identity()  # wherever it is
    shard = next(tuned.glob("*.safetensors"))
    tensors = load_file(shard)
    name = min(name for name in tensors if name.endswith("o_proj.weight_scale"))
    save_file(tensors | {name: tensors[name] * 2}, shard, {"format": "pt"})
    found = [identity(), identity(tuned), identity(expert_parallel=False), identity(tensor_parallel=4)]
    found += [identity(target="cuda"), identity(activations="float"), *(identity(expert_map=path) for path in maps)]
    monkeypatch.setattr("quantmoe.exporter.writing.identity.version", lambda _: "0.0.1")
    found.append(identity())
    assert len({*found}) == len(found)
    assert all(0 < one < 2**31 for one in found)


@pytest.mark.every
def test_heads_in_another_order(tmp_path):
    """GGUF has the value heads of a key apart. Blocks of two heads go to the rank that has both, in act-order."""
    sizes = WIDE | HYBRID | {"hidden_size": 256, "head_dim": 128, "linear_key_head_dim": 64}
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 512)
    folder = make_gguf(tmp_path / "checkpoint", "qwen3_5_moe_text", "Q4_K", **sizes | {"linear_value_head_dim": 128})
    export(folder, tmp_path / "whole", **EVERY_LOGIT)
    export(folder, tmp_path / "slices", **EVERY_LOGIT, tensor_parallel=2)
    ids = tokens(2, 9)
    want = run(Generator(tmp_path / "whole"), ids, (4, 3, 1, 1))
    for logits in run_all(tmp_path / "slices", ids, (4, 3, 1, 1)):
        assert error(logits, want) < 2e-5
    modules = {node["module"]: node["attributes"] for node in inspect(tmp_path / "slices/rank1")["linears"]}
    assert modules["model.layers.0.linear_attn.out_proj"]["w_perm"]
    short = make_gguf(tmp_path / "short", "qwen3_5_moe_text", "Q4_K", **sizes | {"linear_num_key_heads": 2})
    export(short, tmp_path / "short whole", **EVERY_LOGIT)
    export(short, tmp_path / "short slices", **EVERY_LOGIT, tensor_parallel=2)  # by rows
    want = run(Generator(tmp_path / "short whole"), ids, (4, 3, 1, 1))
    for logits in run_all(tmp_path / "short slices", ids, (4, 3, 1, 1)):
        assert error(logits, want) < 2e-5


@pytest.mark.every
def test_joined_projections_for_gpus(tmp_path):
    """Float projections of linear attention are one product: of each section of rows a rank's part, then the next."""
    sizes = HYBRID | {"linear_key_head_dim": 64, "linear_value_head_dim": 128}  # of GPUs' kernels
    folder = make_float_checkpoint(tmp_path / "checkpoint", "qwen3_5_moe_text", **sizes)
    export(folder, tmp_path / "slices", target="cuda", quantize="none", dtype="bf16", tensor_parallel=2)
    stored = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    parts = {name: stored[f"model.layers.0.linear_attn.in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")}
    sections = [*parts.pop("qkv").split([256, 256, 1024]), *parts.values()]
    for rank in range(2):
        want = torch.cat([section.chunk(2)[rank] for section in sections]).T.contiguous()
        values = ir.load(tmp_path / f"slices/rank{rank}/model.onnx").graph.initializers.values()
        alike = [value for value in values if tuple(value.shape) == tuple(want.shape)]
        found = [value.const_value.numpy().view(np.uint16) for value in alike]
        assert any(np.array_equal(array, want.view(torch.uint16).numpy()) for array in found)


def test_slices_for_gpus(checkpoint, tmp_path, monkeypatch):
    def absent() -> str:
        raise FileNotFoundError

    monkeypatch.setitem(TARGETS, "cuda", dataclasses.replace(CUDA, library_path=absent))
    report = export(checkpoint("gpt_oss"), tmp_path, target="cuda", tensor_parallel=2, layers=1)
    absence = "libquantmoe_ort_cuda.so is not in this installation"
    assert report.library == f"{absence}: programs register it to run the model"
    assert report.genai == "no genai_config.json: onnxruntime-genai runs no slices"
    biases = []
    for rank in range(2):
        graph = ir.load(tmp_path / f"rank{rank}" / "model.onnx").graph
        nodes = Counter(node.op_type for node in graph)
        assert (nodes["AllReduceAddRMSNorm"], nodes["QuantMoE"]) == (2, 1)
        assert {node.domain for node in graph} <= {"", "quantmoe"}
        unpack(tmp_path / f"rank{rank}", 0, tmp_path / "layer", force=True)
        names = ("self_attn.o_proj.bias", "mlp.experts.0.down.bias")
        biases.append([load_file(tmp_path / "layer").get(f"model.layers.0.{name}") for name in names])
    assert all(bias.any() for bias in biases[0])
    assert not any(bias is not None and bias.any() for bias in biases[1])  # added once


def test_activations_of_divided_features_stay_float(checkpoint):
    """A scale of a token's features would take their maximum over the ranks. Scales of groups are a rank's own."""
    folder = checkpoint("qwen3_moe")
    found = plan(folder, "nowhere", tensor_parallel=2)
    (spec,) = {spec for _, spec, _ in found.layers.values()}
    linears = {linear.w.activation_format for name, (_, linear, _) in found.linears.items() if name != "lm_head"}
    assert {spec.w13.activation_format, spec.w2.activation_format} | linears == {"int8_group"}
    assert "float in" not in found.activations
    for whole_experts, w2 in ((False, "none"), (True, "int8_token_asym")):
        found = plan(folder, "nowhere", activations="int8-token", tensor_parallel=2, expert_parallel=whole_experts)
        (spec,) = {spec for _, spec, _ in found.layers.values()}
        assert (spec.w13.activation_format, spec.w2.activation_format) == ("int8_token_asym", w2)
        for name, (_, linear, _) in found.linears.items():
            divided = name.endswith("o_proj")
            assert (linear.w.activation_format == "none") == (divided or name == "lm_head"), name
        names = "o_proj" if whole_experts else "the experts' down, o_proj"
        assert found.activations.endswith(f"; float in {names}: a scale would take the maximum over all slices")
    assert "float in" not in plan(folder, "nowhere", activations="int8-token").activations
    assert not plan(folder, "nowhere", activations="float", tensor_parallel=2).activations


def command(*arguments: object) -> str:
    """What it prints, on one line."""
    done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    return " ".join(done.output.split())


def test_what_is_said_of_slices(checkpoint, tmp_path):
    """By the summary, inspect and README.md; and of a rank by itself what to do."""
    folder, out = checkpoint("qwen3_moe"), tmp_path / "slices"
    rounded = "activations int8_token_asym, none in down scales"
    divided = "float in the experts' down, o_proj: a scale would take the maximum over all slices"
    options = ("--tensor-parallel", 2, "--activations", "int8-token")
    for said in (command("export", folder, out, *options, *dry) for dry in (["--dry-run"], [])):
        assert rounded in said
        assert divided in said
    assert "activations int8_token_asym, none in down layout" in command("inspect", out / "rank0")
    text = (out / "rank1/README.md").read_text(encoding="utf-8")
    assert text.startswith("# Rank 1 of 2 of a model for ONNX Runtime")
    assert "`quantmoe export --target cpu --tensor-parallel 2` wrote this folder. It runs together with" in text
    assert text.endswith("\nno genai_config.json: onnxruntime-genai runs no slices\n")
    how = r"rank0/model\.onnx: is rank 0 of 2, which run together: a Python program with a Generator and a thread"
    with pytest.raises(ModelError, match=how):
        command("generate", out / "rank0", "--ids", 1)
    with pytest.raises(ModelError, match=how):
        command("bench", "model", out / "rank0")
    model = ir.load(out / "rank1/model.onnx")
    model.metadata_props["target"] = "cuda"
    ir.save(model, out / "rank1/model.onnx")
    how = rf"is rank 1 of 2, .*: torchrun --nproc-per-node 2 --no-python quantmoe generate {out} --device cuda"
    with pytest.raises(ModelError, match=how):
        Generator(out / "rank1")


def test_a_whole_model_is_of_no_group(whole):
    with pytest.raises(ModelError, match=r"model\.onnx: is a whole model, expected a rank of a sliced one: group was"):
        Generator(whole("qwen3_moe"), threads=1, group=next(GROUPS))


def refused(folder: Path, match: str, **options: object) -> None:
    with pytest.raises(CheckpointError, match=match):
        plan(folder, "nowhere", **{"tensor_parallel": 2} | options)


def test_what_ranks_do_not_divide_is_named(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe")
    refused(
        folder,
        r"config\.json: num_attention_heads is 4, expected a multiple of --tensor-parallel 8",
        tensor_parallel=8,
        expert_parallel=True,
    )
    odd = TINY | {"num_attention_heads": 12, "num_key_value_heads": 3, "num_hidden_layers": 1}
    refused(
        make_checkpoint(tmp_path / "heads", **odd),
        "num_key_value_heads is 3, expected a multiple or a divisor of",
        expert_parallel=True,
    )
    experts = r"model\.layers\.0\.mlp\.experts"
    short = TINY | {"moe_intermediate_size": 96, "num_hidden_layers": 1}
    short = make_checkpoint(tmp_path / "groups", **short)
    whole = "; --expert-parallel gives each rank whole experts$"
    refused(short, rf"{experts}\.0 among 2 ranks: 96 columns in blocks of 32 are not 2 parts{whole}")
    plan(short, "nowhere", tensor_parallel=2, expert_parallel=True)
    sizes = {"num_hidden_layers": 1, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}
    ordered = make_gptq_checkpoint(tmp_path / "order", desc_act=True, **sizes, moe_intermediate_size=32)
    refused(ordered, rf"{experts}\.0 among 2 ranks: 32 columns in blocks of 32 are not 2 parts{whole}")
    plan(ordered, "nowhere", tensor_parallel=2, expert_parallel=True)
    rows = r"self_attn\.o_proj is in act-order and divided by its rows, whose number is 128, expected a multiple of "
    refused(ordered, rows + "--tensor-parallel 3", tensor_parallel=3, expert_parallel=True)
    rows = make_checkpoint(tmp_path / "rows", scheme="W8A8", group_size=None, **TINY | {"num_hidden_layers": 1})
    refused(rows, rf"{experts}\.0: int8_token rounds activations by the largest of all features, and each rank has")
    refused(rows, r"self_attn\.o_proj among 2 ranks: int8_token rounds activations", expert_parallel=True)
    plan(rows, "nowhere", tensor_parallel=2, activations="float")
    norms = make_checkpoint(tmp_path / "norms", "olmoe", **TINY | {"num_hidden_layers": 1})
    refused(norms, r"self_attn\.[qk]_norm\.weight has shape .*: it normalizes all heads together")
    few = make_checkpoint(tmp_path / "few", num_experts=4, **TINY | {"num_attention_heads": 8, "num_hidden_layers": 1})
    refused(few, rf"{experts}\.0: 4 experts among 8 ranks", tensor_parallel=8, expert_parallel=True)


def write_rank(folder: Path, rank: int, world: int, **files: str) -> Path:
    """A rank's folder as an export leaves it, as far as its files say whose they are."""
    return write_export(folder / f"rank{rank}", {"rank": str(rank), "world": str(world)}, **files)


def write_export(path: Path, metadata: dict[str, str], **files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8")
    hashes = json.dumps({name: file_hash(path / name) for name in files})
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 21})
    model = ir.Model(graph, ir_version=10, producer_name="quantmoe")
    model.metadata_props.update(metadata, files=hashes)
    ir.save(model, path / "model.onnx")
    return path


def test_ranks_that_an_export_in_more_slices_left(checkpoint, tmp_path, monkeypatch):
    """They are refused, with force removed when the new ranks are there: files that an export wrote, and no others."""
    folder = checkpoint("qwen3_moe")
    for rank in (2, 3, 4):
        write_rank(tmp_path, rank, 5, config="1", license="2")
    (tmp_path / "rank3/config").write_text("edited", encoding="utf-8")
    (tmp_path / "rank4/notes").write_text("the user's", encoding="utf-8")
    shutil.copytree(tmp_path / "rank4", tmp_path / "ranks of mine")
    other = write_rank(tmp_path / "another", 7, 8)
    (tmp_path / "rank7").symlink_to(other)
    ir.save(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), write_rank(tmp_path, 8, 9) / "model.onnx")
    for command in (plan, export):
        text = r"rank2/model\.onnx exists, of an export in 5 slices, expected an export in 2 slices alone; --force"
        with pytest.raises(FileExistsError, match=text):
            command(folder, tmp_path, tensor_parallel=2)
    plan(folder, tmp_path, tensor_parallel=2, force=True)
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    monkeypatch.setattr("quantmoe.exporter.writing.convert._export", lambda *_, **__: None)
    export(folder, tmp_path, tensor_parallel=2, force=True)
    gone = {f"rank{rank}/{name}" for rank in (2, 3, 4) for name in ("model.onnx", "config", "license")}
    gone = gone - {"rank3/config"} | {"rank2", "another/rank7/model.onnx"}
    assert before - {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == gone


@pytest.mark.parametrize("sliced", [False, True])
def test_slices_and_a_whole_model_do_not_mix(checkpoint, tmp_path, monkeypatch, sliced):
    """What an earlier export of the other kind wrote is refused, with force removed; other files stay."""
    folder, options = checkpoint("qwen3_moe"), {"tensor_parallel": 2} if sliced else {}
    if sliced:
        write_export(tmp_path, {}, config="1")
        text = r"/model\.onnx exists, of a whole model, expected an export in 2 slices alone; --force removes it"
        gone = {"model.onnx", "config"}
    else:
        for rank in range(2):
            write_rank(tmp_path, rank, 2, config="1")
        write_export(tmp_path / "rank5", {})  # a whole model, which somebody calls so
        (tmp_path / "rank1/notes").write_text("the user's", encoding="utf-8")
        text = r"rank0/model\.onnx exists, of an export in 2 slices, expected a whole model alone; --force removes it"
        gone = {f"rank{rank}/{name}" for rank in range(2) for name in ("model.onnx", "config")} | {"rank0"}
    (tmp_path / "notes").write_text("the user's", encoding="utf-8")
    for begin in (plan, export):
        with pytest.raises(FileExistsError, match=text):
            begin(folder, tmp_path, **options)
    before = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    monkeypatch.setattr("quantmoe.exporter.writing.convert._export", lambda *_, **__: None)
    export(folder, tmp_path, **options, force=True)
    assert before - {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == gone


@pytest.mark.parametrize(
    ("target", "how"), [("cpu", "a Python program with a Generator and a thread"), ("cuda", "torchrun --nproc-per")]
)
def test_a_folder_of_slices_is_no_model(checkpoint, tmp_path, target, how):
    for rank in range(2):
        write_export(tmp_path / f"rank{rank}", {"rank": str(rank), "world": "2", "target": target})
    text = rf"has slices of 2 ranks, expected one model, as .*/rank0 is\. All together: {how}"
    for command in (Generator, inspect, explain):
        with pytest.raises(ModelError, match=text):
            command(tmp_path)
    for arguments in (["generate", str(tmp_path), "--ids", "1"], ["inspect", str(tmp_path)]):
        with pytest.raises(ModelError, match=text):
            CliRunner().invoke(app, arguments, catch_exceptions=False)
    ckpt = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "rank0", ckpt / "rank0")
    assert not is_model(ckpt)
    assert is_model(tmp_path / "rank0")


def changed(folder: Path, to: Path, leaf: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """A checkpoint whose tensors of this name are others."""
    return rewritten(
        folder, to, lambda name, t: [(name, change(t) if name.endswith(leaf) else t)], lambda config: config
    )


def test_what_of_linear_attention_ranks_do_not_divide_is_named(tmp_path):
    hybrid = make_checkpoint(tmp_path / "hybrid", "qwen3_next", **HYBRID | {"num_attention_heads": 8})
    refused(hybrid, r"config\.json: linear_num_key_heads is 4, expected a multiple of --tensor-parallel 8",
            tensor_parallel=8, expert_parallel=True)  # fmt: skip
    for leaf, change, shapes in (
        ("A_log", lambda t: t[:4].clone(), r"\[4\], \[4\]"),
        ("conv1d.weight", lambda t: torch.cat([t, t]), r"\[768, 1, 4\], \[192, 1, 4\]"),
    ):
        found = changed(hybrid, tmp_path / leaf, leaf, change)
        text = "Only rows of .* and heads of linear attention are divided"
        refused(found, rf"{leaf} has shape {shapes} in each of 2 ranks\. {text}")
    blocks = make_checkpoint(tmp_path / "blocks", "qwen3_5_moe_text", "FP8_BLOCK", None, **HYBRID | {"head_dim": 128})
    refused(blocks, r"layers\.0\.linear_attn\.in_proj_qkv among 2 ranks: 64 rows in blocks of 128 are not 2 parts",
            expert_parallel=True)  # fmt: skip
    short = {"hidden_size": 128, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    short = make_checkpoint(tmp_path / "short", "lfm2_moe", **OF["lfm2_moe"] | short)
    refused(short, r"channels of model\.layers\.0\.conv is 128, expected a multiple of --tensor-parallel 3",
            tensor_parallel=3, expert_parallel=True)  # fmt: skip
    lightning = make_checkpoint(tmp_path / "lightning", "minimax", **SIZES | {"intermediate_size": 128})
    refused(lightning, r"self_attn: lightning attention is not divided among ranks: it normalizes heads together")


def test_options():
    assert Options().slices == [None]
    assert Options(tensor_parallel=2, expert_parallel=True).slices == [
        Slice(rank=0, world=2, whole_experts=True),
        Slice(rank=1, world=2, whole_experts=True),
    ]
    for options, match in (
        ({"tensor_parallel": 0}, "tensor_parallel is 0, expected 1 to 1024"),
        ({"expert_parallel": True}, "expert_parallel needs tensor_parallel"),
        ({"tensor_parallel": 2, "mtp": True}, "mtp is not divided"),
        ({"tensor_parallel": 2, "target": "ort"}, "is for targets cpu and cuda: ONNX Runtime has no AllReduce"),
    ):
        with pytest.raises(OptionError, match=match):
            Options(**options)


def test_logits_of_slices_beside_the_whole_model(checkpoint, whole, tmp_path, monkeypatch, capsys):
    """tests/benchmarks/slice_logits.py, whose ranks are threads here."""
    export(checkpoint("qwen3_moe"), tmp_path, **EVERY_LOGIT, tensor_parallel=2)
    limits = [whole("qwen3_moe")] * 2
    monkeypatch.setattr("sys.argv", ["slice_logits", *map(str, (limits[0], tmp_path, "--limit", *limits))])
    slice_logits.main()
    *runs, text, worst, limit = capsys.readouterr().out.splitlines()
    for name, line in zip(slice_logits.RUNS, runs, strict=True):
        assert re.fullmatch(rf"{name}: \d\.\de-0[67], 0 tokens of other experts; ranks have the same bytes", line)
    assert text == "greedy text: the whole model's first 16 of 16 tokens"
    assert re.fullmatch(r"worst: \d\.\de-0[67]", worst)
    assert limit == "limit: 0.0e+00"
    logits = np.ones((2, 3, 4), np.float32)
    changed = logits.copy()
    changed[0, 1, 0] += 0.02
    changed[1, 2] = [np.nan, 1, 1, 1]
    changed[1, 1] *= -1
    assert slice_logits.apart(changed, logits) == (pytest.approx(0.01), 2)
