"""transformers architecture -> ONNX graph: every expert layer one QuantMoE node, no large weight ever in memory.

Parameters are traced as placeholders (one element, expanded to the shape) that the graph keeps as initializers of the
same name; passes/weights.py later says where their bytes come from. Of equal layers three are traced; passes/repeat.py
makes the rest.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch
import transformers
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.exporters import exporter_onnx
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime
from transformers.exporters.utils import patch_attribute
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import MoESpec
from quantmoe.custom_ops.torch_op import onnx_quant_moe
from quantmoe.exporter.checkpoint import CheckpointError
from quantmoe.exporter.formats import Format
from quantmoe.exporter.passes.repeat import RepeatError, repeat_layers

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Skeleton:
    """A transformers model without its weights, and where in the checkpoint each of them is.

    Args:
        format: the opened checkpoint.
        dtype: "f32", "f16" or "bf16", of the graph.
        layers: keep only the first so many decoder layers.

    Attributes:
        model: parameters are placeholders; experts modules have none.
        sources: parameter name -> its name in the checkpoint, for ``format.parameter``.
        experts: experts module name -> MoELayer, in the model's order.

    Raises:
        CheckpointError: the architecture is not supported, or a parameter has no tensor.
    """

    def __init__(self, format: Format, dtype: str = "f32", layers: int | None = None):
        self.format, self.dtype = format, DTYPES[dtype]
        folder = format.ckpt.folder
        config = _config(format, layers)
        try:
            with init_empty_weights(), _quiet():
                model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        except ValueError as error:
            raise CheckpointError(
                f"{folder / 'config.json'}: not a causal language model of transformers: {error}"
            ) from None
        self.model = model.eval().requires_grad_(False)

        modules = {name: m for name, m in model.named_modules() if hasattr(m, "_is_expert_parallel")}
        if not modules:
            raise CheckpointError(
                f"{folder}: {type(model).__name__} has no layer on transformers' experts interface "
                f"(transformers {transformers.__version__}); supported are architectures like qwen3_moe, mixtral, olmoe"
            )
        for name, module in modules.items():
            _check_experts(module, f"{folder}: {name} ({type(module).__name__})")
        by_name = {self._rename(layer.name + ".").removesuffix("."): layer for layer in format.moe_layers()}
        if missing := modules.keys() - by_name.keys():
            raise CheckpointError(
                f"{folder}: no quantized experts for {sorted(missing)[0]}; found {sorted(by_name)[:4]}"
            )
        self.experts = {name: by_name[name] for name in modules}
        for module in modules.values():
            for parameter in list(module._parameters):
                del module._parameters[parameter]

        known = set(self._names())
        renamed = {self._rename(name): name for name in format.parameters()}
        self.sources = {name: source for name, source in renamed.items() if name in known}
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        if missing := known - self.sources.keys() - tied:
            raise CheckpointError(
                f"{folder}: {sorted(missing)[0]} of {type(model).__name__} is missing in the checkpoint"
            )
        for name in self.sources:
            self._hollow(name)
        model.tie_weights()
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.sources = {name: source for name, source in self.sources.items() if name in self.shapes}
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Shapes, from the headers; of quantized weights that are alike but for numbers in their names one is read."""
        checked = []
        for name, source in self.sources.items():
            module = source.rpartition(".")[0]
            if not self.format.is_quantized(module):
                self._check_shape(name, self.format.ckpt.shape(source))
                continue
            kind = re.sub(r"\d+", "", source), self.format.scheme(module).text, self.format.ckpt.beside(module)
            if kind not in checked:
                self.parameter(name)
                checked.append(kind)

    def parameter(self, name: str) -> np.ndarray:
        """A parameter of the model in the graph's dtype, dequantized if need be."""
        source = self.sources[name]
        found = self.format.parameter(source)
        self._check_shape(name, found.shape)
        if self.dtype == torch.float16:
            if np.abs(found).max(initial=0) > np.finfo(np.float16).max:
                raise CheckpointError(
                    f"{self.format.ckpt.where(source)} has values that float16 cannot hold; use --dtype f32"
                )
            return found.astype(np.float16)
        return found.astype(ml_dtypes.bfloat16) if self.dtype == torch.bfloat16 else found

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        if found != self.shapes[name]:
            raise CheckpointError(
                f"{self.format.ckpt.where(self.sources[name])} has shape {list(found)}, "
                f"expected {list(self.shapes[name])}"
            )

    def _names(self) -> Iterator[str]:
        return (name for name, _ in self.model.named_parameters())

    def _rename(self, name: str) -> str:
        """A checkpoint's name as the model has it now: transformers renames modules between versions."""
        if not hasattr(self, "_renamings"):
            transforms = get_model_conversion_mapping(self.model)
            self._renamings = [
                t for t in transforms if isinstance(t, WeightRenaming) and not isinstance(t, WeightConverter)
            ]
            self._state = dict.fromkeys(self._names(), True)
        return rename_source_key(name, self._renamings, [], self.model.base_model_prefix, self._state)[0]

    def _hollow(self, name: str) -> None:
        module_name, _, leaf = name.rpartition(".")
        parameters = self.model.get_submodule(module_name)._parameters
        old = parameters[leaf]
        assert old is not None
        parameters[leaf] = torch.nn.Parameter(placeholder(old.shape, old.dtype), requires_grad=False)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, _count: Iterator[int] = itertools.count(1)) -> torch.Tensor:  # noqa: B008
    """A tensor of any size in one element's memory, unlike every other: the exporter merges equal small tensors."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return torch.tensor(next(_count) % 30000, dtype=bits).view(dtype).expand(shape)


def trace(skeleton: Skeleton, specs: Mapping[str, MoESpec], fusions: str | None = "cpu") -> ir.Model:
    """The ONNX graph, with KV cache, dynamic in batch and sequence.

    passes/interface.py names its inputs and outputs. When layers that look alike cannot be copied, all are traced and
    meta["untraced"] says why.

    Args:
        specs: experts module name -> its node's attributes.
        fusions: ONNX Runtime provider whose fused operators may be used; None: ai.onnx and quantmoe only.

    Raises:
        CheckpointError: transformers or torch cannot export the architecture.
    """
    model = skeleton.model
    for name, spec in specs.items():
        module, layout = model.get_submodule(name), LAYOUTS[spec.w13.layout]
        module.attributes = json.dumps(spec.attributes())
        for projection in ("w13", "w2"):
            shape = (spec.num_experts, layout.row_bytes(spec, projection) // 4)
            module.register_buffer(projection, placeholder(shape, torch.int32), persistent=True)
    model.set_experts_implementation("quantmoe")
    stack = model.get_decoder().layers
    prefix = next(name for name, module in model.named_modules() if module is stack)
    kept = _representatives(model.config, stack)
    if len(kept) < len(stack):
        with _only(model, kept):
            graph = _trace(skeleton, fusions)
            try:
                repeat_layers(graph, prefix, kept)
                return graph
            except RepeatError as error:
                reason = str(error)
        graph = _trace(skeleton, fusions)
        graph.meta["untraced"] = reason
        return graph
    return _trace(skeleton, fusions)


def _trace(skeleton: Skeleton, fusions: str | None) -> ir.Model:
    model = skeleton.model
    batch, past, new = 2, 5, 3  # distinct, and neither 0 nor 1, which torch.export would take as fixed
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        ran = model.get_decoder()(torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
        shapes = [[tuple(t.shape) for t in (layer.keys, layer.values)] for layer in ran.layers]
    cache = DynamicCache(config=model.config)
    for i, (key, value) in enumerate(shapes):
        cache.update(*(torch.zeros(batch, s[1], past, s[3], dtype=skeleton.dtype) for s in (key, value)), i)
    inputs = {
        "input_ids": torch.zeros(batch, new, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
        "position_ids": torch.arange(past, past + new).repeat(batch, 1),
        "past_key_values": cache,
    }
    dynamic = torch.export.Dim.DYNAMIC
    dynamic_shapes: dict[str, Any] = {name: {0: dynamic, 1: dynamic} for name in list(inputs)[:3]}
    dynamic_shapes["past_key_values"] = [{0: dynamic, 2: dynamic}] * (2 * len(shapes))
    config = exporter_onnx.OnnxConfig(dynamic_shapes=dynamic_shapes)
    placeholders = {name for name, _ in model.named_parameters()}
    placeholders |= {name for name, _ in model.named_buffers() if name.rpartition(".")[2] in ("w13", "w2")}
    try:
        with _quiet(), patch_attribute(onnxscript.optimizer, "optimize_ir", _keep(placeholders)):
            graph = exporter_onnx.OnnxExporter().export(model, inputs, config).program
    except Exception as error:
        raise CheckpointError(
            f"{skeleton.format.ckpt.folder}: {type(model).__name__} cannot be exported by transformers "
            f"{transformers.__version__}: {error}"
        ) from error
    # Without their values no fusion can read placeholders; as inputs they stay part of the graph.
    hidden = [value for name, value in graph.graph.initializers.items() if name in placeholders]
    for value in hidden:
        value.const_value = None
        del graph.graph.initializers[value.name]
        graph.graph.inputs.append(value)
    if fusions:
        with _quiet():
            fuse_for_onnxruntime(graph, fusions)
    for value in hidden:
        graph.graph.inputs.remove(value)
    graph.meta["placeholders"] = hidden
    return graph


def _representatives(config: Any, stack: torch.nn.ModuleList) -> list[int]:
    """Layers to trace: of each run of more than three equal ones the first two and the last."""
    per_layer = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == len(stack)]

    def describe(i: int) -> list[Any]:
        found: list[Any] = [values[i] for values in per_layer]
        for name, module in stack[i].named_modules():
            plain = {
                k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str) and k != "layer_idx"
            }
            tensors = {
                k: (v.shape, v.dtype)
                for k, v in [*module._parameters.items(), *module._buffers.items()]
                if v is not None
            }
            found.append((name, type(module), plain, tensors))
        return found

    kept: list[int] = []
    for _, run in itertools.groupby(range(len(stack)), describe):
        layers = list(run)
        kept += layers if len(layers) <= 3 else [layers[0], layers[1], layers[-1]]
    return kept


@contextlib.contextmanager
def _only(model: PreTrainedModel, kept: list[int]) -> Iterator[None]:
    """The model with only some of its layers, numbered anew."""
    decoder, config = model.get_decoder(), model.config
    stack, settings = decoder.layers, dict(vars(config))

    def number(module: torch.nn.Module, i: int) -> None:
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = i  # type: ignore[assignment]

    for name, value in settings.items():
        if isinstance(value, list) and len(value) == len(stack):
            setattr(config, name, [value[i] for i in kept])
    config.num_hidden_layers = len(kept)
    decoder.layers = torch.nn.ModuleList(stack[i] for i in kept)
    for i, module in enumerate(decoder.layers):
        number(module, i)
    try:
        yield
    finally:
        decoder.layers = stack
        for i, module in enumerate(stack):
            number(module, i)
        for name in settings:
            setattr(config, name, settings[name])


def dequantized(skeleton: Skeleton) -> PreTrainedModel:
    """The same model in PyTorch with every weight dequantized, to compare exports with. For small models."""
    format = skeleton.format
    model = AutoModelForCausalLM.from_config(skeleton.model.config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(format.parameter(source)) for name, source in skeleton.sources.items()}
    for name, layer in skeleton.experts.items():
        experts = [layer.expert(e) for e in range(layer.num_experts)]
        up = [[m.dequantize() for m in (e.gate, e.up) if m is not None] for e in experts]
        w13 = np.stack([np.concatenate(halves) for halves in up])
        state[f"{name}.{'gate_up_proj' if layer.gated else 'up_proj'}"] = torch.from_numpy(w13).float()
        state[f"{name}.down_proj"] = torch.from_numpy(np.stack([e.down.dequantize() for e in experts])).float()
    problems = model.load_state_dict(state, strict=False)
    assert not problems.unexpected_keys, problems.unexpected_keys
    model.tie_weights()
    model.set_experts_implementation("eager")
    return model.requires_grad_(False)


def _experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    return torch.ops.quantmoe.quant_moe(
        hidden_states, top_k_index, top_k_weights.float(), self.w13, self.w2, self.attributes
    )


ALL_EXPERTS_FUNCTIONS.register("quantmoe", _experts_forward)
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.quant_moe.default] = onnx_quant_moe


def _config(format: Format, layers: int | None) -> Any:
    folder = format.ckpt.folder
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # the validators' exceptions have no common base class
        raise CheckpointError(f"{folder / 'config.json'}: not an architecture of transformers: {error}") from None
    config = config.get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise CheckpointError(f"{folder}: --layers {layers}; the model has 1 to {config.num_hidden_layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def _check_experts(module: Any, where: str) -> None:
    """Refuses experts whose arithmetic the node does not have."""
    for found, what in (
        (module.has_post_expert_norm, "a norm after each expert"),
        (type(module)._apply_gate is not _default_apply_gate, "its own gating"),
        (module.has_bias, "biases"),
    ):
        if found:
            raise CheckpointError(f"{where}: {what} is not supported yet")


def _keep(placeholders: set[str]) -> Any:
    """A wrapper of onnxscript's optimize_ir that folds no node reading a placeholder."""

    def wrap(original: Any) -> Any:
        def optimize(model: ir.Model, *args: Any, should_fold: Any = lambda node: None, **kwargs: Any) -> Any:
            def fold(node: ir.Node) -> bool | None:
                reads = any(value is not None and value.name in placeholders for value in node.inputs)
                return False if reads else should_fold(node)

            return original(model, *args, should_fold=fold, **kwargs)

        return optimize

    return wrap


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress lines and version remarks of torch and transformers; errors stay exceptions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "transformers", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
