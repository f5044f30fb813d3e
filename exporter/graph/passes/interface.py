"""The graph as clients see it: inputs, outputs and sizes have onnxruntime-genai's names.

Nothing of the machine that made it is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quantmoe.custom_ops.op import AttentionSpec
from quantmoe.exporter.folder.interface import HIDDEN, HIDDEN_OUT, PAST, RANKS, STATES, present

_KV = re.compile(r"(?:input|output)\.cache\.layers\.(\d+)\.(key|value|indexer_key|conv_state|recurrent_state)s(?:\.0)?")
#: the exporter's names of what a graph takes and gives
_BOTH = {f"input.{HIDDEN}": HIDDEN, f"output.{HIDDEN}": HIDDEN_OUT}


def name_interface(model: ir.Model) -> None:
    """past_key_values.N.key, present.N.key, of an indexer indexer_key, of linear attention conv_state and
    recurrent_state; batch_size, sequence_length, past_sequence_length, total_sequence_length.

    Ensures:
        every dynamic size of an input has one of these names; no other value keeps a symbolic shape of its own (engines
        infer them).
    """
    graph = model.graph
    sizes: dict[str, tuple[str, ...]] = {
        "input_ids": ("batch_size", "sequence_length"),
        "inputs_embeds": ("batch_size", "sequence_length"),
        "attention_mask": ("batch_size", "total_sequence_length"),
        "position_ids": ("batch_size", "sequence_length"),
        HIDDEN: ("batch_size", "sequence_length"),
        HIDDEN_OUT: ("batch_size", "sequence_length"),
        "logits": ("batch_size", "sequence_length"),
        "last_hidden_state": ("batch_size", "sequence_length"),
        "sentence_embedding": ("batch_size",),
    }
    if not any(_KV.fullmatch(value.name or "") for value in graph.inputs):  # an encoder
        sizes["attention_mask"] = sizes["input_ids"]
    for values, prefix, length in (
        (graph.inputs, PAST, "past_sequence_length"),
        (graph.outputs, present(PAST), "total_sequence_length"),
    ):
        for value in values:
            assert value.name is not None
            assert value.shape is not None
            value.name = _BOTH.get(value.name, value.name)
            shape: list[int | ir.SymbolicDim | str] = list(value.shape)
            if match := _KV.fullmatch(value.name):
                value.name = f"{prefix}.{match[1]}.{match[2]}"
                shape[len(shape) - RANKS[match[2]]] = "batch_size"  # behind the window of states, where there is one
                if not value.name.endswith(STATES):
                    shape[2] = length
            else:
                first = len(shape) == 3 and value.name == "position_ids"  # behind the axes, where it has several
                own = sizes[value.name]
                shape[first : first + len(own)] = own
            value.shape = ir.Shape(shape)
    drop_shapes(graph)


def drop_shapes(graph: ir.Graph) -> None:
    """Leave symbolic shapes to inputs and outputs alone: engines infer the others."""
    ends = {*graph.inputs, *graph.outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value not in ends and value.shape is not None and not value.shape.is_static():
                value.shape = None


def set_cache_type(
    model: ir.Model, dtype: ir.DataType | None, codes: Mapping[int, tuple[str, float, float]] | None = None
) -> None:
    """Give keys and values of all CachedAttention nodes, and an indexer's keys, a type; the tracing knows one type of
    floats only.

    Args:
        dtype: of floats; None: as they are.
        codes: layer -> cache_format, k_scale and v_scale; layers that are not in it have floats.

    Requires:
        no other node but Shape and TokenRows reads them.
    """
    for node in model.graph:
        if node.op_type == "SparseIndexer" and dtype is not None:
            for keys in (node.inputs[3], node.outputs[1]):
                assert keys is not None
                keys.type = ir.TensorType(dtype)
        if node.op_type != "CachedAttention":
            continue
        past = node.inputs[1]
        assert past is not None
        layer = re.search(r"\.(\d+)\.", past.name or "")
        format, k_scale, v_scale = (codes or {}).get(int(layer[1]) if layer else -1, ("none", 1.0, 1.0))
        spec = AttentionSpec.from_attributes({name: a.value for name, a in node.attributes.items()})
        spec = replace(spec, cache_format=format, k_scale=k_scale, v_scale=v_scale)
        for name, value in spec.attributes().items():
            node.attributes[name] = ir.convenience.convert_attribute(name, value)
        own = ir.DataType[spec.cache_dtype.upper()] if spec.cache_dtype else dtype
        caches = zip([*node.inputs[1:3], *node.outputs[1:3]], spec.cache_widths * 2, strict=True)
        for cache, width in caches:
            assert cache is not None
            if own is not None:
                cache.type = ir.TensorType(own)
            if cache.shape is not None:
                cache.shape = ir.Shape([*list(cache.shape)[:3], width])


def set_state_type(model: ir.Model) -> None:
    """Give states their type; the tracing knows one type of floats only. Recurrent states are f32 in any graph, and a
    CausalConv's state has the type of what it convolves.

    Requires:
        what reads recurrent states is GatedDelta, StateSpace or a Cast to f32.
    """
    for value in (*model.graph.inputs, *model.graph.outputs):
        match = _KV.fullmatch(value.name or "")
        if match and match[2] == "recurrent_state":
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in model.graph:
        if node.op_type == "CausalConv" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT:
            for state in (node.inputs[3], node.outputs[1]):
                assert state is not None
                state.type = ir.TensorType(ir.DataType.FLOAT)


def set_logits_type(model: ir.Model) -> None:
    """Give logits the graph's type, as most models do; some (Nemotron-H) widen theirs to f32 in the end."""
    logits = next((value for value in model.graph.outputs if value.name == "logits"), None)
    cast = logits.producer() if logits is not None else None
    if logits is None or cast is None or cast.op_type != "Cast":
        return
    narrow = cast.inputs[0]
    if narrow is not None and narrow.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        logits.name, narrow.name, narrow.shape = None, "logits", logits.shape
        logits.replace_all_uses_with(narrow, replace_graph_outputs=True)
        model.graph.remove(cast, safe=True)


def drop_traces(model: ir.Model) -> None:
    """Remove what torch and onnxscript note of their own work: stack traces, with this machine's paths, among it.

    Modules' names (metadata ``namespace``) stay, without addresses of functions: viewers group nodes by them.
    """
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph.all_nodes() for v in node.outputs)]
    noting: list[Any] = [model, graph, *graph.all_nodes(), *values]
    for noted in noting:
        for key in [key for key in noted.metadata_props if key.startswith("pkg.")]:
            del noted.metadata_props[key]
        if (names := noted.metadata_props.get("namespace")) is not None:
            noted.metadata_props["namespace"] = re.sub(r" at 0x[0-9a-f]+", "", names)
