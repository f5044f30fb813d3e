"""A transformers model without its weights, and where in the checkpoint each of them is (placeholders.py)."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Inkling2LoopMergeMessageQueries,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from quantmoe.custom_ops.matrix import scattered
from quantmoe.custom_ops.op import ConvSpec, MoESpec
from quantmoe.exporter.choosing.described_model import Shared
from quantmoe.exporter.graph import eagle3, encoder, mtp
from quantmoe.exporter.graph.architectures import ARCHITECTURES
from quantmoe.exporter.graph.config import configuration, whole
from quantmoe.exporter.graph.encoder import is_encoder
from quantmoe.exporter.graph.experts import check_experts, fit
from quantmoe.exporter.graph.long_rope import follow_lengths, switch_of
from quantmoe.exporter.graph.modules import latent
from quantmoe.exporter.graph.modules.shared_experts import recognise as recognise_shared
from quantmoe.exporter.graph.modules.states import lightning, linear_attention, selective_scan, state_space
from quantmoe.exporter.graph.placeholders import DTYPES, Stored, placeholder
from quantmoe.exporter.graph.text_models import causal_model, renamings
from quantmoe.exporter.memory import doing
from quantmoe.exporter.reading.checkpoint import CheckpointError
from quantmoe.exporter.reading.families import EAGLE3
from quantmoe.exporter.reading.formats import Format, MoELayer, moe_layers
from quantmoe.exporter.reading.slices import MADE_BY, Cut, Slice
from quantmoe.exporter.reading.weights.base import FLOAT_KINDS, FLOATS, INTEGERS
from quantmoe.exporter.reading.weights.rounding import HEAD_GROUPS
from quantmoe.exporter.targets import CPU, Target

#: where models of several modalities keep their language model, or others their layers -> where it is on its own
WRAPPERS = {
    "thinker.": "",
    "language_model.": "",
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "layers.": "model.layers.",
}
Found = TypeVar("Found")


class Skeleton(Stored):
    """A transformers model without its weights, and where in the checkpoint each of them is.

    Args:
        format: the opened checkpoint, or :meth:`Format.beside` of its multi-token prediction.
        dtype: "f32", "f16" or "bf16", of the graph.
        layers: keep only the first so many decoder layers.
        lm_head: "int4" or "int8" rounds the head, see ``head``; None leaves it as it is.
        target: see trace.py.
        state_window: states of linear attention after each of the last so many tokens.
        vision: of a checkpoint with images its family's module (graph/vision): in the place of tokens the graph takes
            their embeddings, and positions of three axes.

    Attributes:
        model: its experts modules have no parameters.
        experts: experts module name -> MoELayer, in the model's order.
        linears: linear module name -> its name in the checkpoint. The checkpoint quantizes them, or has them in another
            16-bit type. A head that shares the embedding's weight has the embedding's name.
        embedding_width: of the embeddings that the graph takes in the place of tokens, with ``vision``.
        head: name in the checkpoint of the linear that makes the logits, when ``lm_head`` rounds it.
        linear_attention, lightning, state_space, selective_scan: module name -> what it computes, of those that keep a
            state. own_states: modules that keep a state beside keys and values, with the node that has it.
        absorbed: names of linear modules that are no linears in the graph, see modules/latent.py.
        stored_as: parameter name -> the shape of its tensor, and the function of that, where they are not alike.
        by_rows: linears that take the features of all ranks, and are divided by rows: name -> the shape that
            :meth:`take_rows` gives it.

    Raises:
        CheckpointError: the architecture is not supported, or a parameter has no tensor.
    """

    def __init__(
        self,
        format: Format,
        dtype: str = "f32",
        layers: int | None = None,
        *,
        lm_head: str | None = None,
        target: Target = CPU,
        state_window: int = 1,
        vision: ModuleType | None = None,
    ):
        super().__init__(format, DTYPES[dtype])
        self.vision = vision
        config = self._configuration(layers)
        self.model = self._without_weights(config)
        self._prepare(config.model_type)
        self._narrow()
        self.lightning = self._lightning(state_window)
        self.state_space = self._state_space(target, state_window)
        self.selective_scan = self._selective_scan(target, state_window)
        self.own_states = self._own_states(target, state_window)
        self.linear_attention = self._linear_attention(target, state_window)
        self.experts = self._experts(layers)
        self._find_sources()
        self.head = self._round_head(lm_head) if lm_head else None
        self.absorbed = [f"{name}.kv_b_proj" for name, module in self.model.named_modules() if latent.is_latent(module)]
        self.linears = dict(self._linears())

    def _configuration(self, layers: int | None) -> Any:
        """Return transformers' configuration of what the graph has."""
        format = self.format
        config = configuration(format, layers)
        self.embedding_width = config.hidden_size * (self.vision.parts(whole(format)) if self.vision else 1)
        if any(format.is_quantized(prefix + "lm_head") for prefix in ("", *WRAPPERS)):
            config.tie_word_embeddings = False
        if self.is_head:
            assert format.ckpt.head is not None
            return eagle3.configuration(format.ckpt.head, config)
        if format.part:
            config = mtp.one_layer(config, format.next_layer)
        getattr(ARCHITECTURES.get(config.model_type), "configure", lambda config: None)(config)
        return config

    def _without_weights(self, config: Any) -> Any:
        """Return transformers' model of a configuration, without weights.

        Raises:
            CheckpointError: transformers makes no such model.
        """
        folder = self.format.ckpt.folder
        try:
            with init_empty_weights(), _LargeOnMeta(), quiet(), doing(f"{folder}: making the model without weights"):
                model = causal_model(config, self.dtype)
        except MemoryError:
            raise
        except Exception as error:  # of any kind, from the depths of an architecture
            reason = "" if "Unrecognized configuration class" in str(error) else f": {error!r}"  # lists hundreds
            raise CheckpointError(
                f"{folder / 'config.json'}: not a causal language model of transformers {transformers.__version__}: "
                f"{config.model_type}{reason}"
            ) from None
        return model.eval().requires_grad_(requires_grad=False)

    def _prepare(self, model_type: str) -> None:
        """Change modules so that torch.export can follow them."""
        if model_type in ARCHITECTURES:
            ARCHITECTURES[model_type].prepare(self.model)
        if is_encoder(self.model.config):
            encoder.prepare(self.model, self.format.ckpt)
        follow_lengths(self.model)
        if self.vision is not None:
            self.vision.prepare(self.model)
        head = self.format.ckpt.head
        with init_empty_weights(), _LargeOnMeta():
            if self.is_head:
                eagle3.prepare(self.model)
            elif self.format.part:
                mtp.prepare(self.model)
            elif head is not None:
                eagle3.give_features(self.model, decoder_of(self.model), head)

    def _narrow(self) -> None:
        """Leave a rank its part of the head and of linear attention."""
        if self.divided:
            self._narrow_head(self.divided.world)
            linear_attention.narrow(self.model, self.divided, str(self.format.ckpt.folder))

    def _experts(self, layers: int | None) -> dict[str, MoELayer]:
        """Return experts modules, which lose their parameters, each with its layer in the checkpoint."""
        format, model, folder = self.format, self.model, self.format.ckpt.folder
        modules: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "_is_expert_parallel")}
        if format.without_experts:
            return {}
        if not modules and layers is not None:
            raise CheckpointError(f"{folder}: the first {layers} layers have no experts")
        if not modules:
            raise CheckpointError(
                f"{folder}: {type(model).__name__} has no layer on transformers' experts interface "
                f"(transformers {transformers.__version__}); supported are architectures like qwen3_moe, mixtral, olmoe"
            )
        by_name = {self._rename(layer.name + ".").removesuffix("."): layer for layer in moe_layers(format)}
        if missing := modules.keys() - by_name.keys():
            raise CheckpointError(
                f"{folder}: no quantized experts for {sorted(missing)[0]}; found {sorted(by_name)[:4]}"
            )
        fit(model, {name: by_name[name] for name in modules}, str(folder))
        for name, module in modules.items():
            check_experts(module, by_name[name], f"{folder}: {name} ({type(module).__name__})")
        for module in modules.values():
            for parameter in list(module._parameters):
                del module._parameters[parameter]
        return {name: by_name[name] for name in modules}

    def _find_sources(self) -> None:
        """Find the other parameters in the checkpoint, and make them placeholders."""
        format, model, folder = self.format, self.model, self.format.ckpt.folder
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
        stored: Any = getattr(ARCHITECTURES.get(model.config.model_type), "stored", lambda model: {})
        if self.is_head and format.ckpt.head is not None:
            stored = partial(eagle3.stored, head=format.ckpt.head)
        self.stored_as: dict[str, tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]] = stored(model)
        self.derived |= {name: function for name, (_, function) in self.stored_as.items()}
        self.sources = {name: source for name, source in self.sources.items() if name in self.tensors}
        self._check_parameters()
        self.by_rows = dict(self._divide_act_order(self.divided)) if self.divided else {}

    @property
    def is_head(self) -> bool:
        """Return whether this is an EAGLE-3 head."""
        return bool(self.format.part) and self.format.next_layer == EAGLE3

    @property
    def divided(self) -> Slice | None:
        """The rank's share of a model that is divided; None if each rank has all of it, except experts."""
        part = self.format.slice
        return part if part and not part.own_tokens else None

    @property
    def short_context(self) -> int | None:
        """The most tokens that have the rotary frequencies of short texts; None where there is one kind of texts."""
        return switch_of(self.model.config)

    @property
    def with_states(self) -> list[str]:
        """Modules that keep a state from token to token."""
        return [*self.linear_attention, *self.lightning, *self.state_space, *self.selective_scan, *self.own_states]

    @property
    def keeps_states(self) -> bool:
        """Return whether anything keeps a state from token to token, attention with compressed keys too."""
        return bool(self.with_states) or any(hasattr(module, "state_window") for module in self.model.modules())

    def _recognised(
        self, what: str, recognise: Callable[[], tuple[dict[str, Found], dict[str, str]]]
    ) -> dict[str, Found]:
        """Return what a pass found; a module that looks like it and is not is named."""
        folder = self.format.ckpt.folder
        with doing(f"{folder}: recognising {what}"), quiet():
            found, left = recognise()
        for name, reason in left.items():
            raise CheckpointError(f"{folder}: {name}: {reason}")
        return found

    def _check_whole(self, kind: str, modules: Iterable[str], why: str = "it normalizes heads together") -> None:
        """Raise, naming a module, if there are modules that cannot be divided among ranks."""
        for name in modules if self.divided else ():
            raise CheckpointError(
                f"{self.format.ckpt.folder}: {name}: {kind} is not divided among ranks: {why}, which would be on "
                "several"
            )

    def _lightning(self, window: int) -> dict[str, lightning.Lightning]:
        ckpt = self.format.ckpt
        layers = ckpt.text_config.get("num_hidden_layers", self.model.config.num_hidden_layers)
        recognise = partial(lightning.recognise, self.model, layers, window)
        found = self._recognised("lightning attention", recognise)
        self._check_whole("lightning attention", found)
        for name in ckpt.names() if found else ():
            own = found.get(self._rename(name).removesuffix(".slope_rate"))
            if own and not np.allclose(ckpt.tensor(name).astype(np.float32).ravel(), own.rates, rtol=2**-7, atol=0):
                raise CheckpointError(f"{ckpt.where(name)}: other decays than of a model of {layers} layers")
        return found

    def _state_space(self, target: Target, window: int) -> dict[str, state_space.StateSpace]:
        recognise = partial(state_space.recognise, self.model, target.refusal, window)
        found = self._recognised("state spaces", recognise)
        self._check_whole("a state space", found)
        return found

    def _selective_scan(self, target: Target, window: int) -> dict[str, selective_scan.SelectiveScan]:
        recognise = partial(selective_scan.recognise, self.model, target.refusal, window)
        found = self._recognised("selective scans", recognise)
        self._check_whole("a selective scan", found, "it makes time steps from all channels")
        return found

    def _own_states(self, target: Target, window: int) -> dict[str, ConvSpec]:
        """Return the modules that keep a state beside keys and values, each with the node that has it."""
        states: Any = getattr(ARCHITECTURES.get(self.model.config.model_type), "states", lambda model, window: {})
        found: dict[str, ConvSpec] = states(self.model, window)
        self._check_whole("a convolution before attention", found, "it mixes queries with keys")
        for name, spec in found.items():
            if reason := target.refusal(spec):
                raise CheckpointError(f"{self.format.ckpt.folder}: {name}: {reason}")
        return found

    def _linear_attention(self, target: Target, window: int) -> dict[str, linear_attention.RecognisedState]:
        folder, stack = self.format.ckpt.folder, decoder_of(self.model).layers
        others = {*self.lightning, *self.state_space, *self.selective_scan, *self.own_states}
        recognise = linear_attention.recognise
        found = self._recognised(
            "linear attention", partial(recognise, self.model, stack, target.refusal, window, others)
        )
        attends = {name for name, m in self.model.named_modules() if type(m).__name__.endswith("Attention")}
        with_states = others | found.keys()
        if with_states and attends <= with_states:
            raise CheckpointError(
                f"{folder}: {len(with_states)} layers of linear attention alone; expected one of full attention among "
                "them, whose cache says how many tokens there are"
            )
        return found

    def shared(self, specs: Mapping[str, MoESpec]) -> dict[str, Shared]:
        """Shared experts that the routed ones' nodes compute alike, by the name of those.

        Args:
            specs: experts module name -> its node's attributes.
        """
        with doing(f"{self.format.ckpt.folder}: recognising shared experts"), quiet():
            return recognise_shared(self.model, specs)

    @property
    def type_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)

    def join(self, path: str, parts: Sequence[str], whole: str) -> None:
        """Join float linears of a module that read one input to one linear, with their rows in this order.

        If one of them is no float linear, nothing changes.
        """
        module = self.model.get_submodule(path)
        linears: list[Any] = [getattr(module, part, None) for part in parts]
        kinds = {(type(part), getattr(part, "in_features", 0), getattr(part, "bias", None) is None) for part in linears}
        if len(kinds) > 1 or type(linears[0]) is not torch.nn.Linear:
            return
        module.add_module(whole, joined := torch.nn.Linear(1, 1, bias=linears[0].bias is not None))
        for leaf in [leaf for leaf, parameter in joined._parameters.items() if parameter is not None]:
            self.stack(f"{path}.{whole}.{leaf}", [f"{path}.{part}.{leaf}" for part in parts])

    def stack(self, name: str, parts: Sequence[str]) -> None:
        """Make a parameter the rows of others, which it may be one of."""
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

    def _narrow_head(self, world: int) -> None:
        """Give the head a rank's part of the vocabulary.

        It keeps all of it if the embeddings are the same tensor, or if the ranks do not divide it.
        """
        head, tied = self.model.get_output_embeddings(), getattr(self.model.config, "tie_word_embeddings", False)
        if type(head) is not torch.nn.Linear or tied or head.out_features % world:
            return
        with init_empty_weights():
            part = torch.nn.Linear(head.in_features, head.out_features // world, head.bias is not None)
        self.model.set_output_embeddings(part.to(self.dtype).requires_grad_(requires_grad=False))

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
        """Compare shapes with the headers, and find which parts a rank has of larger tensors."""
        quantized = self.format.outline()
        for name, source in self.sources.items():
            module, _, leaf = source.rpartition(".")
            if leaf == "weight" and self.format.is_quantized(module):
                self._check_or_cut(name, quantized.matrix(module).shape)
                continue
            shapes = [self.format.ckpt.shape(part) for part in self.joined.get(name, [source])]
            if name in self.stored_as:
                for shape in shapes:
                    self._check_shape(name, shape, self.stored_as[name][0])
                shapes = [tuple(self.tensors[name].shape)]
            rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else 0
            self._check_or_cut(name, (rows, *shapes[0][1:]) if rows else shapes[0])
            wanted = FLOATS if self.tensors[name].is_floating_point() else INTEGERS
            if (dtype := self.format.ckpt.dtype(source)) not in wanted:
                raise CheckpointError(
                    f"{self.format.ckpt.where(source)} is {dtype}, expected {', '.join(wanted)}: nothing says how "
                    f"it is quantized"
                )

    def _check_or_cut(self, name: str, found: tuple[int, ...]) -> None:
        want, source, part = tuple(self.tensors[name].shape), self.sources[name], self.format.slice
        where = self.format.ckpt.where(source)
        divided = part is not None and not part.own_tokens  # and so are heads
        if divided and name.endswith(("q_norm.weight", "k_norm.weight")) and found != (self.model.config.head_dim,):
            raise CheckpointError(
                f"{where} has shape {list(found)}: it normalizes all heads together, which are on several ranks; "
                f"expected [{self.model.config.head_dim}], a norm of each head"
            )
        sections = self._sections(name)
        if part is None or (found == want and not sections):
            return self._check_shape(name, found)
        self.format.cuts |= part.cuts(self.joined.get(name, [source]), found, want, where, sections)
        return None

    def _divide_act_order(self, part: Slice) -> Iterator[tuple[str, tuple[int, int]]]:
        """Divide linears in act-order whose columns share scales with other ranks' columns.

        A rank has features in the order of an MLP's columns. Of other linears it has rows, which take the features of
        all ranks.

        Yields:
            Entries of :attr:`by_rows`.

        Raises:
            CheckpointError: the ranks do not divide the rows.
        """
        format, outline = self.format, self.format.outline()
        for name, source in self.sources.items():
            module, cut = source.rpartition(".")[0], format.cuts.get(source)
            if cut is None or cut.axis != 1 or not format.is_quantized(module):
                continue
            m = outline.matrix(module)
            if cut.count != part.world or not scattered(m, cut.count):
                continue
            parent, _, leaf = module.rpartition(".")
            makers = [f"{parent}.{maker}.{end}" for maker in MADE_BY.get(leaf, ()) for end in ("weight", "bias")]
            makers = [key for key in makers if key in format.cuts]
            whole = m.group_size == -1 or not m.shape[1] // part.world % m.group_size
            if makers and whole and format.scheme(module).activation_format == "none":
                format.cuts |= {key: replace(format.cuts[key], order=m.perm) for key in (source, *makers)}
                continue
            what = f"{format.ckpt.folder}: {module} is in act-order and divided by its rows, whose number"
            rows = part.part(m.shape[0], what)
            format.cuts |= dict.fromkeys((source, f"{module}.bias"), Cut(0, part.rank, part.world))
            yield name.rpartition(".")[0], (rows, m.shape[1])

    def take_rows(self) -> None:
        """Give linears of :attr:`by_rows` their shapes, which what runs without other ranks does not fit."""
        for path, shape in self.by_rows.items():
            linear = self.model.get_submodule(path)
            linear.out_features, linear.in_features = shape
            for leaf in [leaf for leaf, parameter in linear._parameters.items() if parameter is not None]:
                made = placeholder(shape if leaf == "weight" else shape[:1], self.dtype)
                linear._parameters[leaf] = torch.nn.Parameter(made, requires_grad=False)
                self.tensors[f"{path}.{leaf}"] = linear._parameters[leaf]

    def _sections(self, name: str) -> tuple[int, ...]:
        """Return :attr:`Cut.sections` of a parameter with heads or channels of linear attention; () for others."""
        if self.divided:
            for path, found in self.linear_attention.items():
                if name.startswith(f"{path}."):
                    return found.sections(name.removeprefix(f"{path}."))
        return ()

    @property
    def summed(self) -> list[str]:
        """Linears of whose columns a rank has a part."""
        cuts = ((name, self.format.cuts.get(source)) for name, source in self.sources.items())
        return [name.rpartition(".")[0] for name, cut in cuts if cut is not None and cut.axis == 1]

    @property
    def gathered(self) -> list[str]:
        """Linears of whose outputs a rank has a part, and the model takes all: the head, and :attr:`by_rows`."""
        head = [name for name in ["lm_head"] if self.sources.get(f"{name}.weight") in self.format.cuts]
        return [*head, *self.by_rows]

    def rows(self, linears: Mapping[str, str]) -> dict[str, int]:
        """Output features of linears (name -> in the checkpoint), by their checkpoint names."""
        weights = {source: self.tied[f"{name}.weight"] for name, source in linears.items()}
        return {source: self.tensors[weight].shape[0] for source, weight in weights.items()}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what checkpoints store: parameters, and buffers like DeepSeek's correction biases."""
        stored = self.model.state_dict().keys()
        yield from self.model.named_parameters()
        yield from ((name, buffer) for name, buffer in self.model.named_buffers() if name in stored)

    def _names(self) -> Iterator[str]:
        return (name for name, _ in self._tensors())

    def _rename(self, name: str) -> str:
        """Return the model's name for a checkpoint's name.

        It lacks the prefixes of a model that also sees pictures, and follows this version of transformers.
        """
        if self.format.part:
            for prefix, own in mtp.names(self.format.next_layer).items():
                if name.startswith(prefix):
                    name = own + name.removeprefix(prefix) if own else name
                    break
        if not hasattr(self, "_renamings"):
            outer = self.format.ckpt.config.get("model_type")
            self._outer = renamings(self.model.config, outer) if isinstance(outer, str) else []
            transforms = get_model_conversion_mapping(self.model)
            self._renamings = [
                t for t in transforms if isinstance(t, WeightRenaming) and not isinstance(t, WeightConverter)
            ]
            self._state = dict.fromkeys(self._names(), True)
        name = rename_source_key(name, self._outer, [])[0]
        for prefix, own in WRAPPERS.items():
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
        for part, own in getattr(ARCHITECTURES.get(self.model.config.model_type), "NAMES", {}).items():
            name = name.replace(part, own)
        return rename_source_key(name, self._renamings, [], self.model.base_model_prefix, self._state)[0]

    def _parts(self, name: str) -> list[str]:
        """Return tensors whose rows one parameter has in this version of transformers.

        They are Kimi-Linear's three convolutions, parts of Qwen4-Exp's embeddings of n-grams, and Inkling 2 Mini's
        queries.
        """
        for transform in get_model_conversion_mapping(self.model):
            if not isinstance(transform, WeightConverter) or len(transform.operations) != 1:
                continue
            operation: Any = transform.operations[0]
            merged = type(operation) is Inkling2LoopMergeMessageQueries
            if not merged and (type(operation) is not Concatenate or operation.dim != 0):
                continue
            (end,) = transform.target_patterns
            if name.endswith(f".{end}"):
                shards = None if merged else operation.num_shards_attribute
                numbers = range(getattr(self.model.config, shards) if shards else 1)
                parts = (part.replace("*", str(i)) for part in transform.source_patterns for i in numbers)
                return [name.removesuffix(end) + part for part in parts]
        return []

    def _unrename(self, name: str) -> str:
        """Return what a missing tensor of this part would be called in the checkpoint."""
        for prefix, own in mtp.names(self.format.next_layer).items() if self.format.part else ():
            if own and name.startswith(own) and "embed_tokens" not in name:
                return prefix + name.removeprefix(own)
        return name


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors without memory from the start: init_empty_weights moves them only once they are made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None:
            with torch.device("meta"):
                if func(*args, **kwargs).numel() > 1 << 20:
                    kwargs["device"] = "meta"
        return func(*args, **kwargs)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the module that has the decoder layers; Llama-4's get_decoder does not find it."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else model.model


def dequantized(skeleton: Skeleton) -> PreTrainedModel:
    """Return the model in PyTorch with every weight dequantized, to compare exports with. For small models."""
    model = causal_model(skeleton.model.config, torch.float32).eval()
    if skeleton.is_head:
        eagle3.prepare(model)
    elif skeleton.format.part:
        mtp.prepare(model)
    fit(model, skeleton.experts, str(skeleton.format.ckpt.folder))
    problems = model.load_state_dict(state_of(skeleton), strict=False)
    assert not problems.unexpected_keys, problems.unexpected_keys
    model.tie_weights()
    model.set_experts_implementation("eager")
    return model.requires_grad_(requires_grad=False)


def state_of(skeleton: Skeleton, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """Return the parameters of transformers' model in float32, dequantized, by name.

    Args:
        wanted: which of them, by the beginning of their names: a module's and of it all, or none.
    """
    format = skeleton.format
    state = {
        name: torch.from_numpy(np.concatenate([format.parameter(part) for part in skeleton.joined.get(name, [source])]))
        for name, source in skeleton.sources.items()
        if wanted(name)
    }
    for name in state.keys() & skeleton.stored_as.keys():
        state[name] = torch.from_numpy(skeleton.stored_as[name][1](state[name].numpy()).copy())
    for name, layer in skeleton.experts.items():
        if not wanted(name):
            continue
        module = skeleton.model.get_submodule(name)
        experts = [layer.expert(e) for e in range(layer.num_experts)]

        def stored(weights: list[np.ndarray], transposed: bool = bool(module.is_transposed)) -> torch.Tensor:
            stacked = torch.from_numpy(np.stack(weights)).float()
            return stacked.transpose(1, 2).contiguous() if transposed and stacked.ndim == 3 else stacked

        def join(halves: list[np.ndarray], concatenated: bool = bool(module.is_concatenated)) -> np.ndarray:
            return np.concatenate(halves) if concatenated else np.stack(halves, 1).reshape(-1, *halves[0].shape[1:])

        up = [[m for m in (e.gate, e.up) if m is not None] for e in experts]
        leaf = f"{name}.{'gate_up_proj' if layer.gated else 'up_proj'}"
        state[leaf] = stored([join([m.dequantize(np.float32) for m in halves]) for halves in up])
        state[f"{name}.down_proj"] = stored([e.down.dequantize(np.float32) for e in experts])
        if module.has_bias:
            state[f"{leaf}_bias"] = stored([join([m.bias for m in halves]) for halves in up])  # type: ignore[misc]
            state[f"{name}.down_proj_bias"] = stored([e.down.bias for e in experts])  # type: ignore[misc]
    return state


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence progress lines and version remarks of torch and transformers; errors stay exceptions."""
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
