"""Which config group a module has: the library that writes them is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.models.tiny import qparams

from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.reading.formats.compressed_tensors import ACTIVATIONS, Args, CompressedTensors, _compiled

EXPERT = "model.layers.0.mlp.experts.0"
MODULES = [
    "model.embed_tokens",
    "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.k_proj",
    *(f"{EXPERT}.{name}_proj" for name in ("gate", "up", "down")),
    "model.layers.0.mlp.experts.10.down_proj",
    "model.layers.0.re:named",
    "lm_head",
    "Linear",  # a name that is a class
]


def model(width: int = 32, device: str = "meta") -> torch.nn.Module:
    root = torch.nn.Module()
    for name in MODULES:
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        make = torch.nn.Embedding if leaf == "embed_tokens" else torch.nn.Linear
        parent.add_module(
            leaf, make(width, width, device=device, **({} if make is torch.nn.Embedding else {"bias": False}))
        )
    return root


def schemes(config: dict[str, Any], width: int = 32, device: str = "meta") -> dict[str, Any]:
    """What the library attaches to each module, None where it quantizes nothing."""
    made = model(width, device)
    apply_quantization_config(made, QuantizationConfig.model_validate(config), show_progress=False)
    return {name: getattr(made.get_submodule(name), "quantization_scheme", None) for name in MODULES}


def args(found: Args | None) -> tuple | None:
    return found and (found.num_bits, found.type, found.symmetric, found.strategy, found.group_size)


def oracle_args(found: Any) -> tuple | None:
    size = found and found.group_size
    return found and (found.num_bits, found.type, found.symmetric, found.strategy, -1 if size is None else size)


def weights(bits: int, symmetric: bool) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "channel"}


TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
patterns = st.one_of(
    st.sampled_from(
        [
            r"re:.*gate_proj",
            r"re:.*\.experts\.\d+\.",
            r"re:.*\.experts\.\d\.",
            "re:model",
            "re:proj",
            "re:.*",
            "re:",
            r"re:.*[qk]_proj$",
            "re:lm_head",
            "re:^Linear$",
            "re:(?i)LINEAR",
            "re:.*(down|up)_proj",
            "re:Linear",
        ]
    ),
    st.sampled_from(MODULES).map(lambda name: f"re:{name}"),
    st.text("aelmod._prj*", max_size=6).map(lambda tail: "re:.*" + tail.replace("*", ".*")),
)
targets = st.one_of(
    st.sampled_from(["Linear", "Embedding", "Module", "linear", "MLP", "Conv2d", "proj", "experts", "", "lm"]),
    st.sampled_from(MODULES),
    patterns,
)
groups = st.builds(
    lambda targets, bits, symmetric, inputs: {
        "targets": targets,
        "weights": weights(bits, symmetric),
        "input_activations": inputs,
    },
    st.lists(targets, max_size=4),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from([None, TOKEN, TOKEN | {"type": "int"}]),
)


@settings(max_examples=400, deadline=None)
@given(groups=st.lists(groups, min_size=1, max_size=5), ignore=st.one_of(st.none(), st.lists(targets, max_size=2)))
def test_every_module_has_the_librarys_group(groups: list[dict[str, Any]], ignore: list[str] | None) -> None:
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ignore,
    }
    found = CompressedTensors(SimpleNamespace(quantization=config, folder=Path("checkpoint")))  # type: ignore[arg-type]
    for name, want in schemes(config).items():
        if want is None:
            with pytest.raises(CheckpointError, match=r"no config group targets it|ignore says that it is not"):
                found.group(name)
        else:
            group = found.group(name)
            assert args(group.weights) == oracle_args(want.weights), name
            assert args(group.inputs) == oracle_args(want.input_activations), name


SYMMETRIC, ASYMMETRIC = weights(4, True), weights(4, False)
INT8 = weights(8, True) | {"strategy": "channel"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
#: (targets, weights, input_activations) of each group, in the configuration's order
CONFIGS: dict[str, list[tuple[list[str], dict[str, Any], dict[str, Any] | None]]] = {
    "lm_head symmetric first": [(["lm_head"], SYMMETRIC, None), (["Linear"], ASYMMETRIC, None)],
    "lm_head of eight bits first": [(["lm_head"], INT8, None), (["Linear"], weights(8, False), None)],
    "Embedding first": [(["Embedding"], SYMMETRIC, None), (["Linear"], ASYMMETRIC, None)],
    "two patterns": [(["re:.*proj"], SYMMETRIC, None), (["re:.*gate", "re:.*", "Linear"], ASYMMETRIC, None)],
    "a target twice": [(["Linear"], SYMMETRIC, None), (["Linear"], ASYMMETRIC, None)],
    "Module after Linear": [(["Linear"], SYMMETRIC, None), (["Module"], ASYMMETRIC, None)],
    "Module before Linear": [(["Module"], SYMMETRIC, None), (["Linear"], ASYMMETRIC, None)],
    "lm_head's activations": [(["lm_head"], FLOAT, TOKEN), (["Linear"], FLOAT, None)],
    "activations but lm_head's": [(["lm_head"], FLOAT, None), (["Linear"], FLOAT, TOKEN)],
    "another class": [(["Conv2d"], SYMMETRIC, None), (["Linear"], ASYMMETRIC, None)],
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_activations_are_the_librarys(name: str, tmp_path: Path) -> None:
    """Real tensors of each module, compressed under its group; what the library decompresses is what is read."""
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {"targets": targets, "weights": weights, "input_activations": inputs}
            for i, (targets, weights, inputs) in enumerate(CONFIGS[name])
        },
    }
    torch.manual_seed(0)
    tensors, want = {}, {}
    chosen = {module: scheme for module, scheme in schemes(config, 64, "cpu").items() if scheme is not None}
    assert {f"{EXPERT}.up_proj", "lm_head"} <= set(chosen)
    for module, scheme in chosen.items():
        kind = infer_module_format(torch.nn.Linear, scheme)
        for group in config["config_groups"].values():
            group["format"] = kind.value  # all of one configuration have the same
        compressor = BaseCompressor.get_value_from_registry(kind.value)
        weight = torch.randn(64, 64) + 1  # far from symmetric
        stored = compressor.compress({"weight": weight} | qparams(weight, scheme), scheme)
        tensors |= {f"{module}.{key}": value for key, value in stored.items()}
        want[module] = compressor.decompress(stored, scheme)["weight"].float().numpy()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")
    format = find_format(open_checkpoint(tmp_path))
    for module, scheme in chosen.items():
        np.testing.assert_array_equal(format.matrix(module).dequantize().astype(np.float32), want[module], module)
        a = scheme.input_activations
        activations = ACTIVATIONS[(a.type, a.num_bits, a.strategy, -1, a.dynamic, a.symmetric)] if a else "none"
        assert format.scheme(module).activation_format == activations, module


@pytest.mark.parametrize(
    "target", ["re:(", "re:model.layers.{d}.*", r"re:.*\\.experts{e<=9}.*", "re:.*[[:alpha:]]_proj"]
)
def test_patterns_that_regex_reads_otherwise_than_re_are_refused(target: str) -> None:
    """The library uses re; regex takes these for fuzzy matches and named classes, and so other modules."""
    with pytest.raises(ValueError, match="target 're:"):
        _compiled(target)


def test_counts_are_patterns() -> None:
    assert _compiled(r"re:model\.layers\.[0-9]{1,2}\..*") is not None
