"""transformers architecture -> ONNX graph: every expert layer one QuantMoE node, no large weight ever in memory.

Parameters are traced as placeholders (one element, expanded to the shape) that the graph keeps as initializers of the
same name; passes/weights.py later says where their bytes come from. Of equal layers three are traced; passes/repeat.py
makes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch
import transformers
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightRenaming, rename_source_key
from transformers.exporters import exporter_onnx
from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime
from transformers.exporters.utils import patch_attribute
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.matrix import gates_first
from quantmoe.custom_ops.op import LinearSpec, MoESpec
from quantmoe.custom_ops.reference import activate
from quantmoe.custom_ops.torch_op import (
    onnx_cached_attention,
    onnx_causal_conv,
    onnx_gated_delta,
    onnx_moe_router,
    onnx_moe_routing,
    onnx_quant_linear,
    onnx_quant_moe,
    onnx_token_rows,
)
from quantmoe.exporter.ahead import BLOCK
from quantmoe.exporter.choosing.caches import Caches, choose_caches
from quantmoe.exporter.choosing.choose import Choice, kernels_refuse
from quantmoe.exporter.errors import OptionError
from quantmoe.exporter.graph import attention, mtp
from quantmoe.exporter.graph.architectures import ARCHITECTURES
from quantmoe.exporter.graph.passes import latent, linear_attention
from quantmoe.exporter.graph.passes.add_norms import add_norms
from quantmoe.exporter.graph.passes.attention import (
    GROUPED,
    MASKLESS,
    PROJECTIONS,
    Recognised,
    Rows,
    attach,
    recognise,
    signature,
    widen_tables,
)
from quantmoe.exporter.graph.passes.divided_norms import divide_by_roots
from quantmoe.exporter.graph.passes.interface import set_cache_type, set_state_type
from quantmoe.exporter.graph.passes.norms import plain_norms
from quantmoe.exporter.graph.passes.repeat import RepeatError, repeat_layers
from quantmoe.exporter.graph.passes.routers import replace_routers
from quantmoe.exporter.graph.passes.shared import Shared
from quantmoe.exporter.graph.passes.shared import attach as attach_shared
from quantmoe.exporter.graph.passes.shared import recognise as recognise_shared
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import DTYPES as STORED
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.formats import Format, MoELayer
from quantmoe.exporter.reading.formats.base import FLOAT_KINDS, FLOATS
from quantmoe.exporter.reading.formats.experts import check_sizes
from quantmoe.exporter.reading.formats.rounding import HEAD_GROUPS

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
CACHES = {"f32": ir.DataType.FLOAT, "f16": ir.DataType.FLOAT16, "auto": ir.DataType.FLOAT16}
#: layers after which others like them may follow in turn: hybrid models have four, one of them of full attention
LONGEST = 8
#: where models of several modalities keep their language model -> where it is on its own
WRAPPERS = {"language_model.": "", "model.language_model.": "model."}


class Skeleton:
    """A transformers model without its weights, and where in the checkpoint each of them is.

    Args:
        format: the opened checkpoint, or :meth:`Format.beside` of its multi-token prediction.
        dtype: "f32", "f16" or "bf16", of the graph.
        layers: keep only the first so many decoder layers.
        lm_head: "int4" or "int8" rounds the head, see ``head``; None leaves it as it is.
        target: see :func:`trace`.
        state_window: states of linear attention after each of the last so many tokens.

    Attributes:
        model: parameters are placeholders; experts modules have none.
        sources: parameter name -> its name in the checkpoint, for ``format.parameter``.
        experts: experts module name -> MoELayer, in the model's order.
        linears: linear module name -> its name in the checkpoint, of those that the checkpoint quantizes or has in a
            16-bit type of their own; a head that shares the embedding's weight has the embedding's name.
        head: name in the checkpoint of the linear that makes the logits, when ``lm_head`` rounds it.
        tied: parameter name -> the first of the names of the same parameter.
        linear_attention: module name -> what it computes.
        derived: parameter name -> what the graph has instead of its tensor, a function of that.
        joined: parameter name -> the checkpoint's tensors whose rows it has, see ``join``.
        absorbed: names of linear modules that are no linears in the graph, see passes/latent.py.

    Raises:
        CheckpointError: the architecture is not supported, or a parameter has no tensor.
    """

    def __init__(
        self,
        format: Format,
        dtype: str = "f32",
        layers: int | None = None,
        lm_head: str | None = None,
        target: str = "cpu",
        state_window: int = 1,
    ):
        self.format, self.dtype = format, DTYPES[dtype]
        folder = format.ckpt.folder
        config = _config(format, layers)
        if any(format.is_quantized(prefix + "lm_head") for prefix in ("", *WRAPPERS)):
            config.tie_word_embeddings = False
        if format.part:
            config = mtp.one_layer(config)
        try:
            with init_empty_weights(), _LargeOnMeta(), _quiet(), doing(f"{folder}: making the model without weights"):
                model = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        except MemoryError:
            raise
        except Exception as error:  # of any kind, from the depths of an architecture
            reason = "" if "Unrecognized configuration class" in str(error) else f": {error!r}"  # lists hundreds
            raise CheckpointError(
                f"{folder / 'config.json'}: not a causal language model of transformers {transformers.__version__}: "
                f"{config.model_type}{reason}"
            ) from None
        self.model = model.eval().requires_grad_(False)
        if config.model_type in ARCHITECTURES:
            ARCHITECTURES[config.model_type].prepare(model)
        if format.part:
            with init_empty_weights(), _LargeOnMeta():
                mtp.prepare(model)
        self.linear_attention = self._linear_attention(target, state_window)
        if state_window > 1 and not self.linear_attention:
            raise OptionError(f"state_window is {state_window}: {folder} has no linear attention")
        self.derived: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
        self.joined: dict[str, list[str]] = {}

        modules = {name: m for name, m in model.named_modules() if hasattr(m, "_is_expert_parallel")}
        if not modules and layers is not None:
            raise CheckpointError(f"{folder}: the first {layers} layers have no experts")
        if not modules:
            raise CheckpointError(
                f"{folder}: {type(model).__name__} has no layer on transformers' experts interface "
                f"(transformers {transformers.__version__}); supported are architectures like qwen3_moe, mixtral, olmoe"
            )
        by_name = {self._rename(layer.name + ".").removesuffix("."): layer for layer in format.moe_layers()}
        if missing := modules.keys() - by_name.keys():
            raise CheckpointError(
                f"{folder}: no quantized experts for {sorted(missing)[0]}; found {sorted(by_name)[:4]}"
            )
        for name, module in modules.items():
            _check_experts(module, by_name[name], f"{folder}: {name} ({type(module).__name__})")
        self.experts = {name: by_name[name] for name in modules}
        for module in modules.values():
            for parameter in list(module._parameters):
                del module._parameters[parameter]

        known = set(self._names())
        renamed = {self._rename(name): name for name in format.parameters()}
        self.sources = {name: source for name, source in renamed.items() if name in known}
        for name in known - self.sources.keys():
            if parts := [renamed[part] for part in self._parts(name) if part in renamed]:
                self.sources[name], self.joined[name] = parts[0], parts
        tied = set(getattr(model, "all_tied_weights_keys", None) or {})
        if missing := known - self.sources.keys() - tied:
            first_missing = sorted(missing)[0]
            of = f"{format.part} ({type(model).__name__})" if format.part else type(model).__name__
            raise CheckpointError(f"{folder}: {self._unrename(first_missing)} of {of} is missing in the checkpoint")
        for name in self.sources:
            self._hollow(name)
        model.tie_weights()
        first: dict[int, str] = {}
        names = model.named_parameters(remove_duplicate=False)
        self.tied = {name: first.setdefault(id(parameter), name) for name, parameter in names}
        self.tensors = {name: tensor for name, tensor in self._tensors() if name in self.sources}
        self.sources = {name: source for name, source in self.sources.items() if name in self.tensors}
        self._check_parameters()
        self.head = self._round_head(lm_head) if lm_head else None
        latents = (name for name, module in model.named_modules() if latent.is_latent(module))
        self.absorbed = [f"{name}.kv_b_proj" for name in latents]
        self.linears = dict(self._linears())

    def _linear_attention(self, target: str, window: int) -> dict[str, linear_attention.Recognised]:
        folder, stack = self.format.ckpt.folder, _decoder(self.model).layers
        with doing(f"{folder}: recognising linear attention"), _quiet():
            found, left = linear_attention.recognise(self.model, stack, kernels_refuse(target), window)
        for name, reason in left.items():
            raise CheckpointError(f"{folder}: {name}: {reason}")
        if found and not any(hasattr(layer, "self_attn") for layer in stack):
            raise CheckpointError(
                f"{folder}: {len(stack)} layers of linear attention alone; expected one of full attention among them, "
                "whose cache says how many tokens there are"
            )
        return found

    def shared(self, specs: Mapping[str, MoESpec]) -> dict[str, Shared]:
        """Shared experts that the routed ones' nodes compute alike, by the name of those.

        Args:
            specs: experts module name -> its node's attributes.
        """
        with doing(f"{self.format.ckpt.folder}: recognising shared experts"), _quiet():
            return recognise_shared(self.model, specs)

    def derive(self, names: Iterable[str], function: Callable[[np.ndarray], np.ndarray]) -> None:
        """Notes parameters that were changed to be functions of their tensors."""
        for name in names:
            self.tensors[name], self.derived[name] = self.model.get_parameter(name), function

    @property
    def type_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def join(self, path: str, parts: Sequence[str], whole: str) -> None:
        """Makes float linears of a module that read one input one linear, whose rows are theirs in this order; where
        one of them is of another kind, nothing."""
        module = self.model.get_submodule(path)
        linears: list[Any] = [getattr(module, part, None) for part in parts]
        kinds = {(type(part), getattr(part, "in_features", 0), getattr(part, "bias", None) is None) for part in linears}
        if len(kinds) > 1 or type(linears[0]) is not torch.nn.Linear:
            return
        module.add_module(whole, joined := torch.nn.Linear(1, 1, bias=linears[0].bias is not None))
        for leaf in [leaf for leaf, parameter in joined._parameters.items() if parameter is not None]:
            self.stack(f"{path}.{whole}.{leaf}", [f"{path}.{part}.{leaf}" for part in parts])

    def stack(self, name: str, parts: Sequence[str]) -> None:
        """Makes a parameter the rows of others, which it may be one of."""
        path, _, leaf = name.rpartition(".")
        module, names = self.model.get_submodule(path), [self.tied[part] for part in parts]
        tensors = [self.tensors[part] for part in names]
        shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
        made = torch.nn.Parameter(placeholder(shape, tensors[0].dtype), requires_grad=False)
        module._parameters[leaf] = made
        self.joined[name] = [self.sources[part] for part in names]
        self.tensors[name], self.sources[name] = made, self.joined[name][0]
        if functions := {i: self.derived[part] for i, part in enumerate(names) if part in self.derived}:
            ends = np.cumsum([len(tensor) for tensor in tensors])[:-1]

            def derived(array: np.ndarray) -> np.ndarray:
                pieces = enumerate(np.split(array, ends))
                return np.concatenate([functions[i](piece) if i in functions else piece for i, piece in pieces])

            self.derived[name] = derived

    def _round_head(self, kind: str) -> str:
        weight = self.tied.get("lm_head.weight")
        if weight is None:
            raise CheckpointError(f"{self.format.ckpt.folder}: {type(self.model).__name__} has no lm_head to round")
        source = self.sources[weight].removesuffix(".weight")
        if self.format.is_quantized(source):
            text = self.format.scheme(source).text
            raise CheckpointError(
                f"{self.format.ckpt.folder}: {source} is quantized already ({text}); leave lm_head out"
            )
        self.format.rounding[source] = kind, HEAD_GROUPS[kind]
        return source

    def _linears(self) -> Iterator[tuple[str, str]]:
        for name, module in self.model.named_modules():
            weight = self.tied.get(f"{name}.weight")
            if type(module) is torch.nn.Linear and weight in self.sources and name not in self.absorbed:
                source = self.sources[weight].removesuffix(".weight")
                if (
                    self.format.is_quantized(source)
                    or source == self.head
                    or self.format.ckpt.dtype(f"{source}.weight") in FLOAT_KINDS
                ):
                    yield name, source

    def _check_parameters(self) -> None:
        """Shapes, from the headers."""
        quantized = self.format.outline()
        for name, source in self.sources.items():
            module, _, leaf = source.rpartition(".")
            if leaf == "weight" and self.format.is_quantized(module):
                self._check_shape(name, quantized.matrix(module).shape)
                continue
            shapes = [self.format.ckpt.shape(part) for part in self.joined.get(name, [source])]
            rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else 0
            self._check_shape(name, (rows, *shapes[0][1:]) if rows else shapes[0])
            if (dtype := self.format.ckpt.dtype(source)) not in FLOATS:
                raise CheckpointError(
                    f"{self.format.ckpt.where(source)} is {dtype}, expected {', '.join(FLOATS)}: nothing says how "
                    f"it is quantized"
                )

    def rows(self, linears: Mapping[str, str]) -> dict[str, int]:
        """Output features of linears (name -> in the checkpoint), by their checkpoint names."""
        weights = {source: self.tied[f"{name}.weight"] for name, source in linears.items()}
        return {source: self.tensors[weight].shape[0] for source, weight in weights.items()}

    def stored_type(self, name: str) -> ir.DataType | None:
        """The type of a parameter's tensor in the checkpoint; None when it is packed or quantized there."""
        source = self.sources.get(name)  # packed weights have none
        if source is None or self.format.is_quantized(source.rpartition(".")[0]):
            return None
        return ir.DataType.from_numpy(STORED[self.format.ckpt.dtype(source)])

    def itemsize(self, name: str) -> int:
        """Bytes of an element of a parameter that is not packed: the graph's, or the checkpoint's if fewer in a table
        that is only looked up (passes/embeddings.py)."""
        own, stored = self.tensors[name].element_size(), self.stored_type(name)
        module = self.model.get_submodule(name.rpartition(".")[0])
        return min(own, int(stored.itemsize)) if stored is not None and isinstance(module, torch.nn.Embedding) else own

    def blocks(self, name: str, transposed: bool, dtype: np.dtype) -> Iterator[Callable[[], np.ndarray]]:
        """A parameter or stored buffer of the model, or its transpose, as calls that make the next rows each.

        Raises:
            CheckpointError: another shape than the model's, here or from a function: values that float16 cannot hold.
        """
        source = self.sources[name]
        found = np.concatenate([self.format.stored(part) for part in self.joined.get(name, [source])])
        if name in self.derived:
            found = self.derived[name](found)
        self._check_shape(name, found.shape)
        rows = np.atleast_1d(found.T if transposed else found)
        step = max(1, BLOCK // max(1, 4 * math.prod(rows.shape[1:])))
        return (partial(self._converted, source, dtype, rows[at : at + step]) for at in range(0, len(rows), step))

    def _converted(self, source: str, dtype: np.dtype, rows: np.ndarray) -> np.ndarray:
        out = np.empty(rows.shape, dtype)
        # by pieces of columns, so that the rows of a transpose stay in the cache
        for at in range(0, rows.shape[-1], 2048):
            piece = np.ascontiguousarray(rows[..., at : at + 2048])
            made = out[..., at : at + 2048]
            with np.errstate(over="ignore"):
                made[...] = piece
            if not np.isfinite(made).all():
                reason = "float16 cannot hold; use --dtype f32 or bf16"
                if not np.isfinite(piece).all():
                    reason = "are not finite numbers"
                raise CheckpointError(f"{self.format.ckpt.where(source)} has values that {reason}")
        return out

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What checkpoints store: parameters, and buffers like DeepSeek's correction biases."""
        stored = self.model.state_dict().keys()
        yield from self.model.named_parameters()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in stored)

    def _check_shape(self, name: str, found: tuple[int, ...]) -> None:
        if found != tuple(self.tensors[name].shape):
            raise CheckpointError(
                f"{self.format.ckpt.where(self.sources[name])} has shape {list(found)}, "
                f"expected {list(self.tensors[name].shape)}"
            )

    def _names(self) -> Iterator[str]:
        return (name for name, _ in self._tensors())

    def _rename(self, name: str) -> str:
        """A checkpoint's name as the model has it now: without what wraps a language model that also sees pictures, and
        as this version of transformers names modules."""
        if self.format.part:
            for prefix, own in mtp.names(self.format.next_layer).items():
                if name.startswith(prefix):
                    name = own + name.removeprefix(prefix) if own else name
                    break
        for prefix, own in WRAPPERS.items():
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
        if not hasattr(self, "_renamings"):
            transforms = get_model_conversion_mapping(self.model)
            self._renamings = [
                t for t in transforms if isinstance(t, WeightRenaming) and not isinstance(t, WeightConverter)
            ]
            self._state = dict.fromkeys(self._names(), True)
        return rename_source_key(name, self._renamings, [], self.model.base_model_prefix, self._state)[0]

    def _parts(self, name: str) -> list[str]:
        """Tensors whose rows one parameter has in this version of transformers: Kimi-Linear's three convolutions."""
        for transform in get_model_conversion_mapping(self.model):
            if not isinstance(transform, WeightConverter) or [type(o) for o in transform.operations] != [Concatenate]:
                continue
            (end,) = transform.target_patterns
            if name.endswith(f".{end}") and transform.operations[0].dim == 0:
                return [name.removesuffix(end) + part for part in transform.source_patterns]
        return []

    def _unrename(self, name: str) -> str:
        """What a missing tensor of this part would be called in the checkpoint."""
        for prefix, own in mtp.names(self.format.next_layer).items() if self.format.part else ():
            if own and name.startswith(own) and "embed_tokens" not in name:
                return prefix + name.removeprefix(own)
        return name

    def _hollow(self, name: str) -> None:
        module_name, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        old = module._parameters.get(leaf)
        if old is not None:
            module._parameters[leaf] = torch.nn.Parameter(placeholder(old.shape, old.dtype), requires_grad=False)
        else:  # float32 whatever the graph is: a rounded correction bias selects other experts
            module._buffers[leaf] = placeholder(module._buffers[leaf].shape, torch.float32)  # type: ignore[union-attr]


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without memory from the start: init_empty_weights moves them only once they are made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None:
            with torch.device("meta"):
                if func(*args, **kwargs).numel() > 1 << 20:
                    kwargs["device"] = "meta"
        return func(*args, **kwargs)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, _count: Iterator[int] = itertools.count(1)) -> torch.Tensor:  # noqa: B008
    """A tensor of any size in one element's memory, unlike every other: the exporter merges equal small tensors."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    return torch.tensor(next(_count) % 30000, dtype=bits).view(dtype).expand(shape)


class PackedLinear(torch.nn.Module):
    """A linear whose weight and bias are packed: one QuantLinear node."""

    def __init__(self, spec: LinearSpec, dtype: torch.dtype):
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype)  # routers ask for its type; nothing can be multiplied by it
        self.attributes = json.dumps(spec.attributes())
        words = LAYOUTS[spec.w.layout].row_bytes(spec.moe, "w2") // 4
        self.register_buffer("w", placeholder((1, words), torch.int32), persistent=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantmoe.quant_linear(x, self.w, self.attributes)


class PartOfLinear(torch.nn.Module):
    """Some of a packed linear's outputs. Parts of one input are one product: the exporter merges equal nodes."""

    def __init__(self, whole: PackedLinear, sizes: Sequence[int], index: int):
        super().__init__()
        self.whole = (whole,)  # no module of this one, too
        self.sizes, self.index = list(sizes), index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole[0](x).split(self.sizes, -1)[self.index]


@dataclasses.dataclass(frozen=True)
class Attention:
    """How a model attends in the graph.

    Attributes:
        found: modules that become CachedAttention. rows: what their nodes share.
        plain: module that stays standard nodes -> why. If there is any, the caches have the graph's type.
        caches: what the caches of the found hold. kind: of floats, as asked for; see :func:`export`.
    """

    found: dict[str, Recognised]
    plain: dict[str, str]
    rows: Rows
    caches: Caches
    kind: str


def trace(skeleton: Skeleton, chosen: Choice, attends: Attention, target: str) -> ir.Model:
    """The ONNX graph, with KV cache, dynamic in batch and sequence.

    passes/interface.py names its inputs and outputs. When layers that look alike cannot be copied, all are traced and
    meta["untraced"] says why.

    Args:
        chosen: the nodes' attributes; linears that it lacks are float MatMuls.
        attends: of :func:`attention_of` with the same arguments.
        target: "cpu": with the operators that ONNX Runtime fuses; "cuda": ai.onnx and quantmoe's only.

    Raises:
        CheckpointError: transformers or torch cannot export the architecture.
    """
    model, found = skeleton.model, attends.found
    attach(model, found, attends.rows, _gates_first(skeleton, chosen, found))
    if not attends.plain:
        model.set_attn_implementation(MASKLESS)
        widen_tables(_decoder(model))
    for name, linear in chosen.linears.items():
        sizes, whole = [*skeleton.rows(chosen.parts[name]).values()], PackedLinear(linear, skeleton.dtype)
        if len(sizes) > 1:
            for i, part in enumerate(chosen.parts[name]):
                model.set_submodule(part, PartOfLinear(whole, sizes, i))
        model.set_submodule(name, whole)
    if target == "cuda":
        for path in found:
            skeleton.join(path, PROJECTIONS[:3], "qkv_proj")
        for path in skeleton.linear_attention:
            for joined, parts in linear_attention.WHOLES.items():
                skeleton.join(path, parts, joined)
    every = chosen.shared.values()
    replace_routers(model, target, {shared.router: (shared.count, int(bool(shared.gate))) for shared in every})
    for shared in every:
        if shared.gate:
            skeleton.stack(f"{shared.router}.weight", [f"{shared.router}.weight", f"{shared.gate}.weight"])
    attach_shared(model, every)
    latent.absorb(skeleton)
    with _uncollected():
        graph = _trace_layers(skeleton, target)
    if not attends.plain:
        layers = {model.get_submodule(path).layer_idx: codes for path, codes in attends.caches.codes.items()}
        set_cache_type(graph, CACHES.get(attends.kind) if target == "cpu" else None, layers)
    set_state_type(graph)
    return graph


def _gates_first(skeleton: Skeleton, chosen: Choice, found: Mapping[str, Recognised]) -> list[str]:
    """Modules whose query projections get their gates before their queries, so that both are one piece of the output:
    chosen.gated of packed ones, functions of the others' tensors."""
    moved = []
    for path in (path for path, recognised in found.items() if recognised.gated):
        heads, size = found[path].spec.num_heads, found[path].spec.head_size
        node = next((name for name, parts in chosen.parts.items() if f"{path}.q_proj" in parts), None)
        if node is not None and size % chosen.linears[node].w.block_n:
            continue  # rows of two blocks share a scale
        moved.append(path)
        if node is not None:
            chosen.gated[node] = heads
            continue
        order = gates_first(2 * heads * size, heads)
        names = (f"{path}.q_proj.{leaf}" for leaf in ("weight", "bias"))
        skeleton.derive((name for name in names if name in skeleton.tensors), partial(np.take, indices=order, axis=0))
    return moved


def attention_of(skeleton: Skeleton, chosen: Choice, target: str, cache: str) -> Attention:
    """How the model attends in the graph. Experts, norms and linear attention are what they will be there afterwards.

    Args:
        cache: see :func:`export`.

    Raises:
        CheckpointError: scales of the KV cache are damaged.
        OptionError: there is no such cache.
    """
    model, decoder, refuses = skeleton.model, _decoder(skeleton.model), kernels_refuse(target)
    for name, spec in chosen.layers.items():
        module, layout = model.get_submodule(name), LAYOUTS[spec.w13.layout]
        module.attributes = json.dumps(spec.attributes())
        for projection in ("w13", "w2"):
            shape = (spec.num_experts, layout.row_bytes(spec, projection) // 4)
            module.register_buffer(projection, placeholder(shape, torch.int32), persistent=True)
    model.set_experts_implementation("quantmoe")
    model.set_attn_implementation(attention.NAME)
    skeleton.derive(plain_norms(model), lambda array: array.astype(np.float32) + 1)
    rows = Rows(decoder, target)
    changed = linear_attention.attach(model, skeleton.linear_attention, rows)
    skeleton.derive(changed, linear_attention.as_taken)
    with doing(f"{skeleton.format.ckpt.folder}: recognising attention"):
        own = getattr(ARCHITECTURES.get(model.config.model_type), "KIND", None)
        kinds = [GROUPED, latent.KIND, *([own] if own else [])]
        found, plain = recognise(model, decoder, refuses, kinds, skeleton.linear_attention)
    sources = {path: skeleton.sources[f"{path}.o_proj.weight"].removesuffix(".o_proj.weight") for path in found}
    specs = {path: module.spec for path, module in found.items()}
    caches = choose_caches(skeleton.format.ckpt, cache, specs, plain, sources, refuses, target)
    return Attention(found, plain, rows, caches, cache)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collections: tracing makes few cycles and so many objects that the collector would look at all of
    torch's and sympy's again and again, a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _trace_layers(skeleton: Skeleton, target: str) -> ir.Model:
    """See :func:`trace`."""
    model = skeleton.model
    stack = _decoder(model).layers
    prefix = next(name for name, module in model.named_modules() if module is stack)
    groups = _representatives(model.config, stack)
    if sum(map(len, groups)) < len(stack):
        with _only(model, [layer for group in groups for layer in group]):
            graph = _trace(skeleton, target)
            try:
                repeat_layers(graph, prefix, groups)
                return graph
            except RepeatError as error:
                reason = str(error)
        graph = _trace(skeleton, target)
        graph.meta["untraced"] = reason
        return graph
    return _trace(skeleton, target)


def _inputs(skeleton: Skeleton) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs of the model, and which of their sizes are dynamic."""
    batch, past, new = 2, 5, 3  # distinct, and neither 0 nor 1, which torch.export would take as fixed
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        one = torch.ones(1, 1, dtype=torch.int64)
        ran = _decoder(skeleton.model)(one, attention_mask=one, use_cache=True).cache
    cache = DynamicCache()  # of full length in every layer: sliding windows and chunks are in the masks
    dynamic = torch.export.Dim.DYNAMIC
    sizes: list[dict[int, Any]] = []
    for i, layer in enumerate(ran.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            made = linear_attention.cache_layer(layer, batch)
            cache.layers.append(made)
            states = 2 if made.recurrent_states[0] is not None else 1
            sizes += [{made.conv_states[0].ndim - 3: dynamic}] * states  # behind the window
        else:
            shapes = [(batch, t.shape[1], past, t.shape[3]) for t in (layer.keys, layer.values)]
            cache.update(*(torch.zeros(shape, dtype=skeleton.dtype) for shape in shapes), i)
            sizes += [{0: dynamic, 2: dynamic}] * 2
    inputs = {
        "input_ids": torch.zeros(batch, new, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + new, dtype=torch.int64),
        "position_ids": torch.arange(past, past + new).repeat(batch, 1),
        "cache": cache,
    }
    if skeleton.format.part:
        size = skeleton.model.config.hidden_size
        inputs = {"hidden_states": torch.zeros(batch, new, size, dtype=skeleton.dtype)} | inputs
    dynamic_shapes: dict[str, Any] = {name: {0: dynamic, 1: dynamic} for name in list(inputs)[:-1]}
    dynamic_shapes["cache"] = sizes
    return inputs, dynamic_shapes


def _trace(skeleton: Skeleton, target: str) -> ir.Model:
    model = skeleton.model
    placeholders = {name for name, _ in model.named_parameters()}
    placeholders |= model.state_dict().keys()
    try:
        with doing(f"{skeleton.format.ckpt.folder}: tracing {type(model).__name__}"):
            inputs, dynamic_shapes = _inputs(skeleton)
            config = exporter_onnx.OnnxConfig(dynamic_shapes=dynamic_shapes)
            with _quiet(), patch_attribute(onnxscript.optimizer, "optimize_ir", _keep(placeholders)):
                graph = exporter_onnx.OnnxExporter().export(model, inputs, config).program
    except MemoryError:
        raise
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
        value.name = skeleton.tied.get(value.name, value.name)  # one that the model has twice has its last name here
        graph.graph.inputs.append(value)
    if target == "cpu":
        with _quiet():
            fuse_for_onnxruntime(graph, target)
    else:
        divide_by_roots(graph)
        add_norms(graph)
    for value in hidden:
        graph.graph.inputs.remove(value)
    graph.meta["placeholders"] = hidden
    return graph


def _decoder(model: PreTrainedModel) -> Any:
    """The module that has the decoder layers; Llama-4's get_decoder does not find it."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else model.model


def _representatives(config: Any, stack: torch.nn.ModuleList) -> list[list[int]]:
    """Layers to trace, in groups: where a group comes more than three times in a row the first two and the last."""
    per_layer = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == len(stack)]
    found = [repr([*(values[i] for values in per_layer), signature(layer)]) for i, layer in enumerate(stack)]
    kept: list[list[int]] = []
    at = 0
    while at < len(found):
        for size in range(1, LONGEST + 1):
            same = (found[i] == found[at + (i - at) % size] for i in range(at, len(found)))
            count = sum(1 for _ in itertools.takewhile(bool, same)) // size
            if count > 3:
                kept += [list(range(at + size * n, at + size * (n + 1))) for n in (0, 1, count - 1)]
                at += size * count
                break
        else:
            kept.append([at])
            at += 1
    return kept


@contextlib.contextmanager
def _only(model: PreTrainedModel, kept: list[int]) -> Iterator[None]:
    """The model with only some of its layers, numbered anew."""
    decoder, config = _decoder(model), model.config
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
    if format.part:
        mtp.prepare(model)
    state = {
        name: torch.from_numpy(np.concatenate([format.parameter(part) for part in skeleton.joined.get(name, [source])]))
        for name, source in skeleton.sources.items()
    }
    for name, layer in skeleton.experts.items():
        module = skeleton.model.get_submodule(name)
        experts = [layer.expert(e) for e in range(layer.num_experts)]

        def stored(weights: list[np.ndarray], transposed: bool = bool(module.is_transposed)) -> torch.Tensor:
            stacked = torch.from_numpy(np.stack(weights)).float()
            return stacked.transpose(1, 2).contiguous() if transposed and stacked.ndim == 3 else stacked

        def join(halves: list[np.ndarray], concatenated: bool = bool(module.is_concatenated)) -> np.ndarray:
            return np.concatenate(halves) if concatenated else np.stack(halves, 1).reshape(-1, *halves[0].shape[1:])

        up = [[m for m in (e.gate, e.up) if m is not None] for e in experts]
        leaf = f"{name}.{'gate_up_proj' if layer.gated else 'up_proj'}"
        state[leaf] = stored([join([m.dequantize() for m in halves]) for halves in up])
        state[f"{name}.down_proj"] = stored([e.down.dequantize() for e in experts])
        if module.has_bias:
            state[f"{leaf}_bias"] = stored([join([m.bias for m in halves]) for halves in up])  # type: ignore[misc]
            state[f"{name}.down_proj_bias"] = stored([e.down.bias for e in experts])  # type: ignore[misc]
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
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.quant_linear.default] = onnx_quant_linear
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.cached_attention.default] = onnx_cached_attention
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.causal_conv.default] = onnx_causal_conv
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.gated_delta.default] = onnx_gated_delta
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.moe_routing.default] = onnx_moe_routing
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.moe_router.default] = onnx_moe_router
exporter_onnx._ONNX_TRANSLATION_TABLE[torch.ops.quantmoe.token_rows.default] = onnx_token_rows


def _config(format: Format, layers: int | None) -> Any:
    folder, raw = format.ckpt.folder, format.ckpt.config
    for part in (raw, raw.get("text_config")):
        if isinstance(part, dict):
            check_sizes(format.ckpt, part)
    try:
        # never code out of the checkpoint's folder, nor a question whether to run it
        with doing(str(folder / "config.json")):
            config = AutoConfig.from_pretrained(format.ckpt.companions, trust_remote_code=False)
            config = config.get_text_config()
    except MemoryError:
        raise
    except Exception as error:  # the validators' exceptions have no common base class
        raise CheckpointError(f"{folder / 'config.json'}: not an architecture of transformers: {error}") from None
    if not isinstance(config, PreTrainedConfig):
        raise CheckpointError(f"{folder / 'config.json'}: text_config is {config!r}, expected a configuration")
    check_sizes(format.ckpt, vars(config))
    _check_layers(format, config.num_hidden_layers)
    _check_rope(format, config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def _check_layers(format: Format, count: int) -> None:
    """Refuses layers that have no tensors."""
    found = {match[1] for name in format.ckpt.names() if (match := re.search(r"\.layers\.([0-9]{1,6})\.", name))}
    if found and count > len(found):
        raise CheckpointError(
            f"{format.ckpt.folder / 'config.json'}: num_hidden_layers is {count}, the checkpoint has tensors of "
            f"{len(found)} layers"
        )


def _check_rope(format: Format, config: PreTrainedConfig) -> None:
    """Refuses rotary embeddings whose frequencies follow the sequence's length: a graph has them once."""
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # of the model, or of each type of layer
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind == "longrope" or "dynamic" in str(kind):
            raise CheckpointError(
                f"{format.ckpt.folder / 'config.json'}: rope_type {kind} is not supported: its frequencies change with "
                "the length of the sequence"
            )


def _check_experts(module: Any, layer: MoELayer, where: str) -> None:
    """Refuses experts whose arithmetic the node does not have."""
    if module.has_post_expert_norm:
        raise CheckpointError(f"{where}: a norm after each expert is not supported yet")
    if getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate:
        _check_gate(module, layer, where)
    first = layer.outline().expert(0)
    if module.has_bias != (first.up.bias is not None and first.down.bias is not None):
        has = "biases" if module.has_bias else "no biases"
        raise CheckpointError(f"{where} has {has}, the checkpoint's {layer.name}.0 does not agree")


def _check_gate(module: Any, layer: MoELayer, where: str) -> None:
    """Refuses a gate of an architecture's own that is not the layer's activation, on numbers beyond every limit."""
    pair = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0)) * 8
    halves = pair.transpose(0, 1)
    given = halves.flatten(1) if module.is_concatenated else halves.transpose(1, 2).flatten(1)
    found = module._apply_gate(given).double().numpy()
    want = activate(layer, *pair.double().numpy())  # type: ignore[arg-type]  # it has the fields that are read
    if found.shape != want.shape or np.abs(found - want).max() > 1e-5 * np.abs(want).max():
        raise CheckpointError(f"{where}: its own gating is not {layer.activation} and not supported yet")


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
