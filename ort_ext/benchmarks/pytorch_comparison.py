"""An exported model beside PyTorch running the same dequantized weights in float32."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quantmoe.benchmarks.quality.divergence import log_softmax
from quantmoe.custom_ops.layouts import cpu_panel
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.exporter.folder.model_file import model_path
from quantmoe.exporter.graph.passes.interface import set_cache_type
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.reading.formats import find_format, open_checkpoint
from quantmoe.exporter.writing.external_data import DataFiles
from quantmoe.runtime.generate import Generator

#: above this many bytes of float32 parameters the model is not dequantized
LIMIT = 8 << 30


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Greedy tokens of both, and how far the logits are apart (None: not compared).

    Attributes:
        difference: largest, relative to the largest logit. PyTorch's activations are float.
        float_difference: the difference with these packed weights, float activations and a float32 cache; None if the
            model has them anyway.
        divergence: mean over positions of KL(PyTorch's distribution || ours), in nats.
        agreement: share of positions where both have one likeliest token.
    """

    tokens: list[int]
    expected_tokens: list[int]
    difference: float | None
    float_difference: float | None
    prompt: int
    prefill: float
    decode_rate: float
    divergence: float | None = None
    agreement: float | None = None


def compare(
    checkpoint: str | Path, model: str | Path, new_tokens: int = 16, prompt: Sequence[int] | None = None
) -> Comparison:
    """Run both on one prompt, 16 random tokens if None; logits are compared on PyTorch's greedy tokens fed to both."""
    import torch

    from quantmoe.exporter.graph.model import Skeleton, dequantized

    format = find_format(open_checkpoint(checkpoint))
    format.input_scales = False  # PyTorch's activations are float
    skeleton = Skeleton(format)
    vocabulary = skeleton.model.config.vocab_size
    ids = list(prompt or np.random.default_rng(0).integers(0, vocabulary, 16).tolist())
    generator = Generator(model)
    generator.greedy(ids, 2)  # first runs allocate
    found = generator.greedy(ids, new_tokens)
    experts = sum(x.num_experts * x.hidden_size * x.intermediate_size * 3 for x in skeleton.experts.values())
    if 4 * (experts + sum(p.numel() for p in skeleton.model.parameters())) > LIMIT:
        return Comparison(
            tokens=found.tokens,
            expected_tokens=[],
            difference=None,
            float_difference=None,
            prompt=len(ids),
            prefill=found.prefill,
            decode_rate=found.tokens_per_second,
        )
    reference, expected = dequantized(skeleton), list(ids)
    with torch.no_grad():
        for _ in range(new_tokens):
            logits = reference(torch.tensor([expected])).logits[0]
            expected.append(int(logits[-1].argmax()))
        logits = reference(torch.tensor([expected])).logits[0].numpy()

    def difference(generator: Generator) -> tuple[float, np.ndarray]:
        ours = generator.scores(expected)
        return float(np.abs(ours - logits).max() / np.abs(logits).max()), ours

    with _float_twin(model_path(model)) as other:
        exact = None if other is None else difference(Generator(other))[0]
    own, ours = difference(generator)
    apart, agreement = divergence(ours, logits)
    return Comparison(
        tokens=found.tokens,
        expected_tokens=expected[len(ids) :],
        difference=own,
        float_difference=exact,
        prompt=len(ids),
        prefill=found.prefill,
        decode_rate=found.tokens_per_second,
        divergence=apart,
        agreement=agreement,
    )


def divergence(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Mean KL(expected || found) in nats and the share of equal likeliest tokens, of logits [positions, vocabulary]."""
    p, q = log_softmax(expected), log_softmax(found)
    same = (found.argmax(-1) == expected.argmax(-1)).mean()
    return float((np.exp(p) * (p - q)).sum(-1).mean()), float(same)


@contextlib.contextmanager
def _float_twin(model: Path) -> Iterator[Path | None]:
    """Yield the model with float activations and a float32 cache, while the block runs; None when it has them itself.

    It reads the model's data file, except weights that stand beside the scales of their inputs.
    """
    found, graph = inspect(model), ir.load(model)
    nodes, changed = {node.name: node for node in graph.graph}, any(n["cache"] != "float" for n in found["attention"])
    set_cache_type(graph, ir.DataType.FLOAT)
    path, data = (model.with_name(f"float-activations.partial.onnx{end}") for end in ("", ".data"))
    try:
        with DataFiles(model.with_name, data.name, sys.maxsize) as files:
            for described in found["layers"] + found["linears"]:
                node, linear = nodes[described["node"]], "w" in described
                kind = LinearSpec if linear else MoESpec
                spec = kind.from_attributes(described["attributes"])
                moe = spec.moe if isinstance(spec, LinearSpec) else spec
                for name, projection in {"w": "w2"}.items() if linear else {"w13": "w13", "w2": "w2"}.items():
                    if getattr(spec, name).activation_format == "none":
                        continue
                    changed = True
                    node.attributes[f"{name}_activation_format"] = ir.AttrString(f"{name}_activation_format", "none")
                    value = graph.graph.initializers[described[name]["tensor"]]
                    rows = np.asarray(value.const_value.numpy()).view(np.uint8)  # type: ignore[union-attr]
                    floats = cpu_panel.without_input_scales(moe, projection, rows)
                    if floats is not rows:
                        node.attributes.pop(f"{name}_identity", None)
                        value.shape = ir.Shape((len(floats), floats.shape[1] // 4))
                        region = files.region(value)
                        region.write(floats)
                        region.finish({})
        if changed:
            ir.save(graph, path)
        yield path if changed else None
    finally:
        for file in (path, data):
            file.unlink(missing_ok=True)
