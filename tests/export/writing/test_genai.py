"""genai_config.json: which models have one, and what it says of their caches."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from quantmoe.exporter.targets import CPU, CUDA
from quantmoe.exporter.writing.genai import add_caches, caches, genai_config, why_not

FIELDS = {"model_type": "acme", "num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
FIELDS |= {"vocab_size": 128, "max_position_embeddings": 256}
FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def key(layer: int, width: int = 16, value: int | None = None, heads: int = 2, dtype: Any = HALF) -> list[ir.Value]:
    return [
        cache(f"{layer}.{kind}", dtype, "batch_size", heads, "past_sequence_length", size)
        for kind, size in (("key", width), ("value", value or width))
    ]


def convolution(layer: int, channels: int = 96) -> ir.Value:
    return cache(f"{layer}.conv_state", FLOAT, "batch_size", channels, 3)


def state(layer: int, heads: int = 4) -> ir.Value:
    return cache(f"{layer}.recurrent_state", FLOAT, "batch_size", heads, 16, 16)


def cache(name: str, dtype: Any, *shape: int | str) -> ir.Value:
    return ir.Value(name=f"past_key_values.{name}", type=ir.TensorType(dtype), shape=ir.Shape(shape))


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([*key(0), *key(1, width=32), *key(2, heads=4)], ""),
        ([*key(0), convolution(1), state(1), convolution(3), state(3)], ""),
        ([*key(0), convolution(0), state(0)], ""),
        ([*key(0), convolution(1)], ""),
        ([convolution(0), state(0)], "it needs a layer with keys and values"),
        ([*key(0), *key(1, 32, 16)], "it needs keys and values of one size, and layer 1 has 2x32 and 2x16"),
        ([*key(0), *key(1, dtype=FLOAT)], "it needs caches of one size and type in all layers"),
        ([*key(0), state(1)], "it needs a convolution in a layer with a state, and layer 1 has none"),
        ([*key(0), convolution(0)], "it needs a recurrent state in a layer with a convolution, and layer 0 has none"),
        (
            [*key(0), convolution(1), state(1), convolution(2)],
            "it needs a recurrent state in a layer with a convolution, and layer 2 has none",
        ),
        (
            [*key(0), convolution(1), state(1), convolution(2), state(2, heads=2)],
            "it needs caches of one size and type in all layers",
        ),
        ([*key(0), convolution(1), convolution(2, 64)], "it needs caches of one size and type in all layers"),
        ([*key(0), *key(1, width=32), convolution(2)], "it needs caches of one size and type in all layers"),
    ],
)
def test_what_it_cannot_hold(inputs: list[ir.Value], reason: str) -> None:
    assert why_not(caches(inputs)) == reason


def test_its_engine_needs_one_size() -> None:
    def blocks(width: int) -> list[ir.Value]:
        return [cache(f"{width}.{kind}", HALF, "num_blocks", 256, 2, width) for kind in ("key", "value")]

    assert why_not(caches(blocks(16), paged=True), paged=True) == ""
    assert caches(blocks(16), paged=True)[16]["key"] == ("FLOAT16", "2", "16")
    several = caches([*blocks(16), *blocks(32)], paged=True)
    assert why_not(several, paged=True) == "it needs caches of one size and type in all layers"


def test_sizes_are_those_of_the_graph() -> None:
    """Latent attention has one key for all heads, and codes have scales behind them."""
    config = genai_config(FIELDS, {}, CPU, shares=True)
    add_caches(config, caches([convolution(0), state(0), *key(1, width=20, heads=1)]))
    decoder = config["model"]["decoder"]
    assert (decoder["num_key_value_heads"], decoder["head_size"], config["model"]["type"]) == (1, 20, "llama")


def test_layers_with_a_convolution_alone_are_lfm2s() -> None:
    config = genai_config(FIELDS, {}, CUDA, shares=True)
    provider = config["model"]["decoder"]["session_options"]["provider_options"][0]["cuda"]
    assert provider["enable_cuda_graph"] == "1"
    add_caches(config, caches([convolution(0), *key(1)]))
    decoder = config["model"]["decoder"]
    assert (config["model"]["type"], decoder["layer_types"]) == ("lfm2", ["conv", "full_attention"])
    assert decoder["inputs"]["past_conv_names"] == "past_key_values.%d.conv_state"
    assert decoder["outputs"]["present_conv_names"] == "present.%d.conv_state"
    assert provider["enable_cuda_graph"] == "0"  # it gives each step other buffers of states


def test_fields_that_config_json_lacks_are_transformers_defaults() -> None:
    """bailing_hybrid says its length by another name."""
    short = {name: value for name, value in FIELDS.items() if name != "max_position_embeddings"}
    with pytest.raises(KeyError, match="max_position_embeddings"):
        genai_config(short, {}, CPU)
    config = genai_config(short, {}, CPU, defaults={"max_position_embeddings": 77, "vocab_size": 5})
    assert (config["model"]["context_length"], config["model"]["vocab_size"]) == (77, 128)
