"""A target: every fact in which files for one set of kernels differ from files for another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

#: what a user asks of a weights-only checkpoint's activations -> activation_format of the nodes
ACTIVATIONS = {"int8": "int8_group", "int8-token": "int8_token_asym", "float": "none"}
#: an ONNX Runtime, (major, minor)
Version = tuple[int, int]


def no_library() -> str:
    """Raise FileNotFoundError: ONNX Runtime has all operators itself."""
    raise FileNotFoundError


def all_lists(_: Any) -> str:
    """Return "": all attention reads lists of selected tokens."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An ``export --target NAME``: what it writes, and what runs it.

    Attributes:
        name: as it is typed.
        device: where the files run: a value of Generator's ``device``.
        layout: packed layout of experts and linears (custom_ops/layouts).
        kernels: (kernel, why not on this machine or "") for a node's attributes, in order of preference.
        refusal: why the kernels do not run a node with these attributes; "" when they do.
        library: file name of the operators' library. "": the nodes are ONNX Runtime's own operators.
        library_path: path of the library in this installation, or FileNotFoundError.
        library_rebuild: how to make a library for an older glibc.
        package: what brings the library to every platform, for README.md of a folder.
        runtime: the oldest ONNX Runtime that runs the files. runtime_with: attribute of Options -> the oldest with it.
        runtime_at: opset -> the oldest that reads it.
        graph_types: types of the graph outside the experts, the default first.
        tower_type: type in which a vision tower computes; None: the graph's.
        own_floats: packed weights of 16-bit floats have the graph's type, not the checkpoint's.
        activations: values of ``--activations``. default_activations: for weights-only checkpoints; None: as the
            checkpoint says.
        rounding_is_slow: a checkpoint's rounded activations (not e4m3) take more time than floats.
        dense: values of ``--dense``.
        caches: types of a float KV cache, apart from the graph's; (): the graph's type alone.
        cache_codes: ``--cache auto`` keeps the codes that the checkpoint says.
        cache_scales: a KV cache of int8 may have a scale for each token.
        options: options of Options that not all targets have: mtp, eagle3, state_window, vision, tensor_parallel,
            paged, external_experts, browser, opset.
        passes: of exporter/graph/passes, "<module>.<function>" in order: after torch.export.
        final_passes: passes that run once inputs and outputs have their names.
        opset: of ai.onnx, which replaces com.microsoft's operators; None: the trace's, and com.microsoft's too.
        router: what a router becomes: a MoERouter with its product, a MoERouting, or nodes of ai.onnx.
        one_node: each layer's experts are one node of one format, which routes all of them.
        joined: projections of one input are one float product.
        token_rows: one TokenRows node says where a batch's tokens are.
        latent_ups: the node of latent attention expands the latent itself.
        lists: why attention with these attributes does not read lists of selected tokens; "" when it does.
        packed_tables: formats of embeddings that are looked up as they are packed; None: all.
        own_widths: kernels take integers of 2, 3, 5 and 6 bits.
        max_elements: of one tensor; None: no limit.
        act_orders_apart: gate and up of different act-orders lie beside each other, each with the columns of both.
        chunk: prompt tokens in one step.
        steps_of_chunk: so many steps have a chunk's tokens while other requests wait for their next token.
        reserve: bytes that experts leave free beside weights and caches.
        rates: bytes a second that ``inspect --fit`` assumes: of the memory, and of what experts come through, the
            nearest first.
        provider: execution provider in genai_config.json; "": the CPU's.
    """

    name: str
    device: Literal["cpu", "cuda"]
    layout: str
    kernels: Callable[[Any], list[tuple[str, str]]]
    refusal: Callable[[Any], str]
    library: str = ""
    library_path: Callable[[], str] = no_library
    library_rebuild: str = ""
    package: str = ""
    runtime: Version
    runtime_with: Mapping[str, Version]
    runtime_at: Mapping[int, Version] = field(default_factory=dict)
    graph_types: tuple[str, ...]
    tower_type: str | None = None
    own_floats: bool = False
    activations: tuple[str, ...]
    default_activations: str | None = None
    rounding_is_slow: bool = False
    dense: tuple[str, ...] = ("quantmoe", "ort")
    caches: tuple[str, ...] = ()
    cache_codes: bool = True
    cache_scales: bool = True
    options: frozenset[str] = frozenset()
    passes: tuple[str, ...]
    final_passes: tuple[str, ...] = ()
    opset: int | None = None
    router: Literal["MoERouter", "MoERouting", "ai.onnx"] = "MoERouting"
    one_node: bool = False
    joined: bool = False
    token_rows: bool = False
    latent_ups: bool = True
    lists: Callable[[Any], str] = all_lists
    packed_tables: tuple[str, ...] | None = ()
    own_widths: bool = False
    max_elements: int | None = None
    act_orders_apart: bool = False
    chunk: int
    steps_of_chunk: int
    reserve: int
    rates: tuple[float, ...]
    provider: str = ""

    def at(self, opset: int | None) -> Target:
        """Return the target with an opset's operators in the place of com.microsoft's, except for packed weights.

        The passes are for com.microsoft's operators. From 23 the trace itself has norms and rotary embeddings.
        """
        if opset is None:
            return self
        return replace(self, opset=opset, passes=(), runtime=self.runtime_at.get(opset, self.runtime))

    @property
    def on_gpu(self) -> bool:
        """The weights lie in a GPU's memory."""
        return self.device != "cpu"
