"""vision.onnx and embeddings.onnx: what makes a decoder's input of images and of tokens."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import onnx_ir as ir
import torch
import transformers
from accelerate import init_empty_weights

from quantmoe.exporter.folder.files import CONFIG
from quantmoe.exporter.graph.lowering.embeddings import keep_tables
from quantmoe.exporter.graph.lowering.weights import Weight, place_weights
from quantmoe.exporter.graph.model import Skeleton, quiet
from quantmoe.exporter.graph.passes.interface import drop_shapes
from quantmoe.exporter.graph.placeholders import DTYPES, Stored
from quantmoe.exporter.graph.trace import hide, keeping
from quantmoe.exporter.graph.vision.vision_attention import place_attention
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.config_fields import reading
from quantmoe.exporter.reading.formats import Format
from quantmoe.exporter.reading.weights.base import BESIDE, VISION
from quantmoe.exporter.targets import Target

#: sizes of the traced examples, distinct, and neither 0 nor 1, which torch.export would take as fixed
_BATCH, _TOKENS, _IMAGES, _FEATURES = 2, 7, 3, 5


class Embeddings(Stored):
    """Rows of the text model's table, and features of images in the places of their tokens.

    Args:
        text: the text model. image_token: id of those tokens.
        parts: how many times the hidden size a feature is wide. Behind the rows of the table are zeros.
    """

    def __init__(self, text: Skeleton, image_token: int, parts: int):
        super().__init__(text.format, text.dtype)
        self.model = _Embeddings(text.model.get_input_embeddings(), image_token, parts)
        name, own = "table.weight", next(n for n, m in text.model.named_modules() if m is self.model.table)
        self.tensors = {name: self.model.table.weight}
        self.sources = {name: text.sources[f"{own}.weight"]}

    def trace(self) -> tuple[ir.Model, list[Weight]]:
        """Return the graph: input_ids int64 [B, S], image_features [n, width] of all images in order ->
        inputs_embeds [B, S, width], of the text model's type."""
        width = self.model.width
        inputs = {
            "input_ids": (torch.zeros(_BATCH, _TOKENS, dtype=torch.int64), {0: "batch_size", 1: "sequence_length"}),
            "image_features": (torch.zeros(_FEATURES, width, dtype=self.dtype), {0: "num_image_tokens"}),
        }
        graph = _traced(self, inputs, "inputs_embeds")
        drop_shapes(graph.graph)
        weights = place_weights(graph)
        keep_tables(weights, self.stored_type)
        return graph, weights


class _Embeddings(torch.nn.Module):
    def __init__(self, table: Any, image_token: int, parts: int):
        super().__init__()
        self.table = table
        self.image_token, self.width = image_token, parts * table.embedding_dim

    def forward(self, input_ids: torch.Tensor, image_features: torch.Tensor) -> torch.Tensor:
        rows = self.table(input_ids)
        if behind := self.width - self.table.embedding_dim:
            rows = torch.nn.functional.pad(rows, (0, behind))
        own = input_ids.flatten() == self.image_token
        features = torch.cat((image_features.new_zeros(1, image_features.shape[1]), image_features))
        # 0: a row of the table. Without features all are, as in transformers; of too few the lookup fails
        given = torch.ones_like(features[:, 0], dtype=torch.int64).sum() > 1
        at = own.cumsum(0) * (own & given)
        return torch.where((at > 0).unflatten(0, input_ids.shape)[..., None], features[at].reshape(rows.shape), rows)


class Tower(Stored):
    """A checkpoint's vision tower.

    Args:
        family: of FAMILIES. format: of the tower. config: transformers' configuration of the whole model.
        dtype: of the text model's graph, in which the tower computes if the target says no other. Weights stay of 16
            bits.
    """

    def __init__(self, family: ModuleType, format: Format, config: Any, dtype: str, target: Target):
        super().__init__(format, DTYPES[target.tower_type or dtype])
        self.features, folder = DTYPES[dtype], format.ckpt.folder
        making = doing(f"{folder}: making the vision tower without weights")
        with init_empty_weights(), quiet(), making, reading(str(folder / CONFIG)):
            self.model = family.tower(config).to(self.dtype).eval().requires_grad_(requires_grad=False)
        found = {}
        for name in format.parameters():
            for prefix in BESIDE[VISION]:
                if name.startswith(prefix):
                    found[name.removeprefix(prefix)] = name
        functions = family.derived(self.model)
        for name, parameter in list(self.model.named_parameters()):
            if name not in found:
                prefix = next(iter(found.values())).removesuffix(next(iter(found)))
                raise CheckpointError(
                    f"{folder}: {prefix}{name} of the vision tower ({type(self.model).__name__}) is missing in the "
                    "checkpoint"
                )
            self.sources[name] = found[name]
            shape, function = functions.get(name, (tuple(parameter.shape), None))
            self._check_source(name, shape)
            self._hollow(name)
            self.tensors[name] = self.model.get_parameter(name)
            if function is not None:
                self.derived[name] = function

    def itemsize(self, name: str) -> int:
        own, stored = self.tensors[name].element_size(), self.stored_type(name)
        return own if stored is None else min(own, int(stored.itemsize))

    def _check_source(self, name: str, want: tuple[int, ...]) -> None:
        """Refuse a tensor whose header has another shape."""
        source = self.sources[name]
        module = source.rpartition(".")[0]
        quantized = source.endswith(".weight") and self.format.is_quantized(module)
        found = self.format.outline().matrix(module).shape if quantized else self.format.ckpt.shape(source)
        self._check_shape(name, tuple(found), want)

    def trace(self) -> tuple[ir.Model, list[Weight]]:
        """Return the graph: pixel_values f32 [patches, values of a patch], image_grid_thw int64 [images, 3] ->
        image_features [patches / merged, hidden size], of the text model's type. It needs frames of one size in a
        run."""
        config = self.model.config
        merged = config.spatial_merge_size
        grid = torch.tensor([[1, 2 * merged, 3 * merged]] * _IMAGES)
        patches = int(grid.prod(1).sum())
        inputs = {
            "pixel_values": (torch.zeros(patches, self.model.patch_embed.proj.in_features), {0: "num_patches"}),
            "image_grid_thw": (grid, {0: "num_images"}),
        }
        graph = _traced(self, inputs, "image_features")
        place_attention(graph, ir.DataType.FLOAT if self.dtype == torch.float32 else ir.DataType.FLOAT16)
        drop_shapes(graph.graph)
        if self.features != self.dtype:
            _cast_output(graph.graph, ir.DataType.FLOAT16 if self.features == torch.float16 else ir.DataType.FLOAT)
        weights = place_weights(graph)
        keep_tables(weights, self.stored_type)
        for weight in weights:
            _keep_stored(weight, self.stored_type(weight.parameter))
        return graph, weights


def _cast_output(graph: ir.Graph, dtype: ir.DataType) -> None:
    """Give the only output another type."""
    (output,) = graph.outputs
    cast = ir.node("Cast", [output], {"to": dtype}, name=f"{output.name}/narrow")
    graph.append(cast)
    graph.outputs[0] = made = cast.outputs[0]
    made.name, output.name = output.name, f"{output.name}/wide"
    made.type, made.shape = ir.TensorType(dtype), output.shape


def _keep_stored(weight: Weight, stored: ir.DataType | None) -> None:
    """Keep a weight in the checkpoint's narrower type; a Cast makes it the graph's, once, when a session is opened."""
    value, wide = weight.value, weight.value.dtype
    assert wide is not None
    if stored is None or stored.itemsize >= wide.itemsize:
        return
    uses = list(value.uses())
    value.type = ir.TensorType(stored)
    cast = ir.node("Cast", [value], {"to": wide}, name=f"{value.name}/wide")
    graph = uses[0].node.graph
    assert graph is not None
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(wide), value.shape
    graph.insert_before(graph[0], cast)
    for node, index in uses:
        node.replace_input_with(index, cast.outputs[0])


def _traced(stored: Stored, inputs: dict[str, tuple[torch.Tensor, dict[int, str]]], output: str) -> ir.Model:
    """Return the graph of a module.

    Args:
        inputs: examples by name, with the names of their dynamic sizes. output: its name.

    Raises:
        CheckpointError: torch cannot export it.
    """
    model, folder = stored.model, stored.format.ckpt.folder
    placeholders = {name for name, _ in model.named_parameters()}
    dynamic = torch.export.Dim.DYNAMIC
    try:
        with doing(f"{folder}: tracing {type(model).__name__}"), quiet(), keeping(placeholders):
            program = torch.onnx.export(
                model,
                kwargs={name: tensor for name, (tensor, _) in inputs.items()},
                dynamic_shapes={name: dict.fromkeys(sizes, dynamic) for name, (_, sizes) in inputs.items()},
                input_names=list(inputs),
                output_names=[output],
                dynamo=True,
            )
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder}: {type(model).__name__} cannot be exported by torch {torch.__version__} (transformers "
            f"{transformers.__version__}): {error}"
        ) from error
    graph: ir.Model = program.model
    hidden = hide(graph, placeholders, {})
    for value in hidden:
        graph.graph.inputs.remove(value)
    graph.meta["placeholders"] = hidden
    for value in graph.graph.inputs:
        assert value.name is not None
        shape: list[Any] = list(value.shape or ())
        for axis, name in inputs[value.name][1].items():
            shape[axis] = name
        value.shape = ir.Shape(shape)
    return graph
