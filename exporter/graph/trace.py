"""A skeleton -> ONNX graph: modules become what their nodes are, then torch.export runs.

Parameters are traced as placeholders, which the graph keeps as initializers of the same name; lowering/weights.py later
says where their bytes come from. Of equal layers three are traced; passes/repeated_layers.py makes the rest.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch
import transformers
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.exporters import exporter_onnx
from transformers.exporters.utils import patch_attributes

from quantmoe.custom_ops.op import AttentionSpec
from quantmoe.custom_ops.torch_op import ONNX
from quantmoe.exporter.choosing.caches import choose_caches
from quantmoe.exporter.choosing.choose import Choice
from quantmoe.exporter.graph import encoder, standard_attention
from quantmoe.exporter.graph.architectures import ARCHITECTURES
from quantmoe.exporter.graph.encoder import is_encoder
from quantmoe.exporter.graph.lowering.paged import refusal as unpaged
from quantmoe.exporter.graph.model import Skeleton, decoder_of, quiet
from quantmoe.exporter.graph.modules import indexer, latent, token_windows
from quantmoe.exporter.graph.modules.attention import (
    GROUPED,
    RecognisedAttention,
    recognise,
    signature,
)
from quantmoe.exporter.graph.modules.attention_inputs import Rows
from quantmoe.exporter.graph.modules.states import linear_attention, selective_scan
from quantmoe.exporter.graph.passes import run_passes
from quantmoe.exporter.graph.passes.interface import set_cache_type, set_logits_type, set_state_type
from quantmoe.exporter.graph.passes.placement import place_experts
from quantmoe.exporter.graph.passes.rank_collectives import meet_around_experts, norm_sums
from quantmoe.exporter.graph.passes.repeated_layers import RepeatError, repeat_layers
from quantmoe.exporter.graph.passes.reshapes import drop_repeated_reshapes
from quantmoe.exporter.graph.passes.rewrite_rules import ONLY_THEIR_OPERATOR
from quantmoe.exporter.graph.passes.tables import narrow_tables
from quantmoe.exporter.graph.put_nodes import Attention
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.targets import Target

#: the last projections of attention modules, beside whose weights a checkpoint has the scales of caches
LAST = ("o_proj.weight", "o_b_proj.weight")
CACHES = {"f32": ir.DataType.FLOAT, "f16": ir.DataType.FLOAT16, "auto": ir.DataType.FLOAT16}


#: layers after which others like them may follow in turn: hybrid models have four, one of them of full attention
LONGEST = 8
#: lists of a configuration that may name a layer for each layer: whose keys and values it has (Mistral-Large-4), and
#: itself where all have experts (Llama-4)
LAYERS = ("kv_source_layers", "moe_layers")


def trace(skeleton: Skeleton, chosen: Choice, attends: Attention, target: Target) -> ir.Model:
    """Return the ONNX graph, with KV cache, dynamic in batch and sequence.

    passes/interface.py names its inputs and outputs. When layers that look alike cannot be copied, all are traced and
    meta["untraced"] says why.

    Args:
        skeleton: after :func:`put_nodes`. chosen, attends: its arguments.

    Raises:
        CheckpointError: transformers or torch cannot export the architecture.
    """
    model, own = skeleton.model, skeleton.format.slice
    with _uncollected():
        graph = _trace_layers(skeleton, target)
    if not attends.plain:
        layers = {model.get_submodule(path).layer_idx: codes for path, codes in attends.caches.codes.items()}
        set_cache_type(graph, CACHES.get(attends.kind) if target.caches else None, layers)
    set_state_type(graph)
    set_logits_type(graph)
    tables = {name: table for name, layer in chosen.experts.items() if (table := layer.table()) is not None}
    if own is not None and own.own_tokens:
        try:
            meet_around_experts(graph, own)
        except ValueError as error:
            raise CheckpointError(f"{skeleton.format.ckpt.folder}: --data-parallel: {error}") from None
    elif own is not None:
        norm_sums(graph)
    place_experts(graph, tables, own)
    return graph


def attention_of(
    skeleton: Skeleton, chosen: Choice, rows: Rows, *, target: Target, cache: str, paged: bool = False
) -> Attention:
    """Return how the model attends in the graph.

    Args:
        skeleton: after :func:`put_first_nodes`, which returns ``rows``.
        cache: see :func:`export`.
        paged: all attention is to have caches in blocks (lowering/paged.py).

    Raises:
        CheckpointError: the model does not run, so :func:`trace` would refuse it, too. Scales of the KV cache are
            damaged. With ``paged``, a module does not fit into blocks.
        OptionError: there is no such cache.
    """
    model, decoder = skeleton.model, decoder_of(skeleton.model)
    refuses: Callable[[AttentionSpec], str] = partial(unpaged, target) if paged else target.refusal
    for name in skeleton.with_states if paged else []:
        raise CheckpointError(
            f"{skeleton.format.ckpt.folder}: {name}: --paged has no linear attention: its states are not in blocks"
        )
    with _exporting(skeleton, "recognising attention"):
        own = getattr(ARCHITECTURES.get(model.config.model_type), "KIND", None)
        kinds = [GROUPED, latent.KIND, *([own] if own else [])]
        if is_encoder(model.config):
            names = (name for name, module in model.named_modules() if type(module).__name__.endswith("Attention"))
            found, plain = dict[str, RecognisedAttention](), dict.fromkeys(names, encoder.PLAIN)
        else:
            found, plain = recognise(
                model, decoder, refuses, kinds=kinds, indexer=indexer.compare, without=skeleton.with_states
            )
            plain |= {name: reason for name, module in found.items() if (reason := _without_lists(target, module))}
            found = {name: module for name, module in found.items() if name not in plain}
    for name, reason in plain.items() if paged else ():
        raise CheckpointError(f"{skeleton.format.ckpt.folder}: {name}: --paged: {reason}")
    last = {path: next(name for name in LAST if f"{path}.{name}" in skeleton.sources) for path in found}
    sources = {path: skeleton.sources[f"{path}.{name}"].removesuffix(f".{name}") for path, name in last.items()}
    specs = {path: module.spec for path, module in found.items()}
    caches = choose_caches(
        skeleton.format.ckpt, cache, specs, plain=plain, sources=sources, refusal=refuses, target=target
    )
    for path, (format, k_scale, v_scale) in caches.codes.items():  # of the values that the model would cache
        if (own := found[path].value_scale) != 1 and not format.endswith("token"):
            caches.codes[path] = format, k_scale, float(np.float32(v_scale / own))
    return Attention(found, plain, rows, caches, cache)


def _without_lists(target: Target, module: RecognisedAttention) -> str:
    """Return why a target has no node for attention to selected tokens; "" where it has, or where all are seen."""
    return target.lists(module.spec) if module.selects or module.indexer else ""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the garbage collector off while the block runs.

    Tracing makes few cycles, and many objects. The collector would look at all objects of torch and sympy again and
    again, for a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _trace_layers(skeleton: Skeleton, target: Target) -> ir.Model:
    """Return the graph of all layers; one traced layer of each kind is copied where that is possible."""
    model = skeleton.model
    stack = decoder_of(model).layers
    prefix = next(name for name, module in model.named_modules() if module is stack)
    reason = ""
    for before in (False, True):
        groups = _representatives(model.config, stack, 3 if before else 2)
        if sum(map(len, groups)) == len(stack):
            break
        with _only(model, [layer for group in groups for layer in group]):
            graph = _trace(skeleton, target)
            try:
                repeat_layers(graph, prefix, groups, before)
                return graph
            except RepeatError as error:
                reason = str(error)
    graph = _trace(skeleton, target)
    if reason:
        graph.meta["untraced"] = reason
    return graph


def cache_sizes(skeleton: Skeleton, attends: Attention, target: Target) -> tuple[int, int]:
    """Return the bytes that a sequence takes: for the keys and values of each token, and for its states."""
    if is_encoder(skeleton.model.config):
        return 0, 0
    model, own = skeleton.model, skeleton.dtype.itemsize
    asked = CACHES.get(attends.kind) if target.caches and not attends.plain else None
    floats = asked.itemsize if asked else own
    packed = {}
    for path, module in attends.found.items():
        spec = replace(module.spec, cache_format=attends.caches.codes.get(path, ("none",))[0])
        width = spec.kv_num_heads * sum(spec.cache_widths)
        packed[model.get_submodule(path).layer_idx] = int(width * (1 if spec.cache_dtype else floats))
    tokens = states = 0
    with _exporting(skeleton, "sizes of the cache"):
        for i, layer in enumerate(_one_token(skeleton).layers):
            if (keys := getattr(layer, "keys", None)) is not None:
                tokens += packed.get(i, own * (keys.numel() + layer.values.numel()))
            if (keys := getattr(layer, "indexer_keys", None)) is not None:
                tokens += floats * keys.numel()
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for state in (layer.conv_states[0], layer.recurrent_states[0]):
                    states += state.element_size() * state.numel() if state is not None else 0
    return tokens, states


def _one_token(skeleton: Skeleton) -> Any:
    """Return the cache of a model that has read one token, without memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        one = torch.ones(1, 1, dtype=torch.int64)
        return decoder_of(skeleton.model)(one, attention_mask=one, use_cache=True).cache


def _inputs(skeleton: Skeleton) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs of the model, and which of their sizes are dynamic."""
    if is_encoder(skeleton.model.config):
        return encoder.inputs()
    batch, past, new = 2, 5, 3  # distinct, and neither 0 nor 1, which torch.export would take as fixed
    ran = _one_token(skeleton)
    cache = DynamicCache()  # of full length in every layer: sliding windows and chunks are in the masks
    dynamic = torch.export.Dim.DYNAMIC
    sizes: list[dict[int, Any]] = []
    for i, layer in enumerate(ran.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            made = linear_attention.cache_layer(layer, batch)
            if (keys := getattr(layer, "keys", None)) is not None:
                pair = (torch.zeros(batch, t.shape[1], past, t.shape[3], dtype=t.dtype) for t in (keys, layer.values))
                made.update(*pair)
                sizes += [{0: dynamic, 2: dynamic}] * 2
            cache.layers.append(made)
            states = zip((made.conv_states[0], made.recurrent_states[0]), (3, 4), strict=True)
            sizes += [{t.ndim - rank: dynamic} for t, rank in states if t is not None]  # behind the window
            if (keys := getattr(layer, "indexer_keys", None)) is not None:
                made.indexer_keys = torch.zeros(batch, 1, past, keys.shape[3], dtype=skeleton.dtype)
                sizes.append({0: dynamic, 2: dynamic})
        elif layer.keys is None:  # of experts alone
            cache.layers.append(layer)
        else:
            shapes = [(batch, t.shape[1], past, t.shape[3]) for t in (layer.keys, layer.values)]
            cache.update(*(torch.zeros(shape, dtype=skeleton.dtype) for shape in shapes), i)
            sizes += [{0: dynamic, 2: dynamic}] * 2
            if (keys := getattr(layer, "indexer_keys", None)) is not None:
                cache.layers[i].indexer_keys = torch.zeros(batch, 1, past, keys.shape[3], dtype=skeleton.dtype)
                sizes.append({0: dynamic, 2: dynamic})
    inputs = {
        "input_ids": torch.zeros(batch, new, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
        "position_ids": torch.arange(past, past + new).repeat(batch, 1),
        "cache": cache,
    }
    size = skeleton.model.config.hidden_size
    if skeleton.vision is not None:
        del inputs["input_ids"]
        width = skeleton.embedding_width
        inputs = {"inputs_embeds": torch.zeros(batch, new, width, dtype=skeleton.dtype)} | inputs
        inputs["position_ids"] = inputs["position_ids"].repeat(3, 1, 1)
    if skeleton.format.part:
        inputs = {"hidden_states": torch.zeros(batch, new, size, dtype=skeleton.dtype)} | inputs
    dynamic_shapes: dict[str, Any] = {name: {0: dynamic, 1: dynamic} for name in list(inputs)[:-1]}
    if skeleton.vision is not None:
        dynamic_shapes["position_ids"] = {1: dynamic, 2: dynamic}
    dynamic_shapes["cache"] = sizes
    return inputs, dynamic_shapes


def _trace(skeleton: Skeleton, target: Target) -> ir.Model:
    model = skeleton.model
    placeholders = {name for name, _ in model.named_parameters()}
    placeholders |= model.state_dict().keys()
    with _exporting(skeleton, f"tracing {type(model).__name__}"):
        inputs, dynamic_shapes = _inputs(skeleton)
        newest = standard_attention.ATTENTION if standard_attention.name_of(target) == standard_attention.NODE else None
        config = exporter_onnx.OnnxConfig(dynamic_shapes=dynamic_shapes, opset_version=newest)
        with quiet(), keeping(placeholders):
            graph = exporter_onnx.OnnxExporter().export(model, inputs, config).program
    hidden = hide(graph, placeholders, skeleton.tied)
    with quiet():
        run_passes(graph, target.passes)
    drop_repeated_reshapes(graph)
    narrow_tables(graph)
    # A fusion leaves each norm without weights ones of its own; layers whose constants are others are not alike.
    CommonSubexpressionEliminationPass(size_limit=1 << 16)(graph)
    for value in hidden:
        graph.graph.inputs.remove(value)
    graph.meta["placeholders"] = hidden
    return graph


@contextlib.contextmanager
def _exporting(skeleton: Skeleton, what: str) -> Iterator[None]:
    """Yield a model that does not run, or cannot be traced, is refused: in a dry run as in an export."""
    folder = skeleton.format.ckpt.folder
    try:
        with doing(f"{folder}: {what}"):
            yield
    except (MemoryError, CheckpointError):
        raise
    except Exception as error:  # of any kind, from the depths of an architecture
        raise CheckpointError(
            f"{folder}: {type(skeleton.model).__name__} cannot be exported by transformers "
            f"{transformers.__version__}: {error}"
        ) from error


def hide(graph: ir.Model, placeholders: set[str], tied: Mapping[str, str]) -> list[ir.Value]:
    """Make placeholders inputs: without their values no fusion can read them, and they stay part of the graph.

    Args:
        tied: see Skeleton.
    """
    hidden = [value for name, value in graph.graph.initializers.items() if name in placeholders]
    for value in hidden:
        assert value.name is not None
        value.const_value = None
        del graph.graph.initializers[value.name]
        value.name = tied.get(value.name, value.name)  # one that the model has twice has its last name here
        graph.graph.inputs.append(value)
    return hidden


def _representatives(config: Any, stack: torch.nn.ModuleList, first: int = 2) -> list[list[int]]:
    """Return the layers to trace, in groups: of a group that comes in a row the ``first`` ones and the last."""
    caches = (len({part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")}) for layer in stack)
    if any(count > 1 for count in caches) or getattr(config, "loop_num_passes", 1) > 1:  # several caches a layer
        return [[i] for i in range(len(stack))]
    lists = {key: v for key, v in config.to_dict().items() if isinstance(v, list) and len(v) == len(stack)}
    per_layer = [[i - at for i, at in enumerate(v)] if key in LAYERS else v for key, v in lists.items()]
    found = [repr([*(values[i] for values in per_layer), signature(layer)]) for i, layer in enumerate(stack)]
    kept: list[list[int]] = []
    at = 0
    while at < len(found):
        for size in range(1, LONGEST + 1):
            same = (found[i] == found[at + (i - at) % size] for i in range(at, len(found)))
            count = sum(1 for _ in itertools.takewhile(bool, same)) // size
            if count > first + 1:
                kept += [list(range(at + size * n, at + size * (n + 1))) for n in (*range(first), count - 1)]
                at += size * count
                break
        else:
            kept.append([at])
            at += 1
    return kept


@contextlib.contextmanager
def _only(model: PreTrainedModel, kept: list[int]) -> Iterator[None]:
    """Yield the model with only some of its layers, numbered anew."""
    decoder, config = decoder_of(model), model.config
    stack, settings = decoder.layers, dict(vars(config))

    def number(module: torch.nn.Module, i: int) -> None:
        for part in module.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = i  # type: ignore[assignment]

    for name, value in settings.items():
        if isinstance(value, list) and len(value) == len(stack):
            own = [value[i] for i in kept]
            setattr(config, name, [kept.index(i) for i in own] if name in LAYERS else own)
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


def keeping(placeholders: set[str]) -> Any:
    """Return a context in which onnxscript's optimizer folds no node that reads a placeholder, and tries its rules on
    nodes that they are for."""
    original = onnxscript.optimizer.optimize_ir

    def optimize(model: ir.Model, *args: Any, should_fold: Any = lambda node: None, **kwargs: Any) -> Any:
        def fold(node: ir.Node) -> bool | None:
            reads = any(value is not None and value.name in placeholders for value in node.inputs)
            return False if reads else should_fold(node)

        return original(model, *args, should_fold=fold, **kwargs)

    return patch_attributes([(onnxscript.optimizer, "optimize_ir", lambda _: optimize), ONLY_THEIR_OPERATOR])


exporter_onnx._ONNX_TRANSLATION_TABLE |= ONNX | selective_scan.ONNX | token_windows.ONNX
