"""The logits of all tokens of a model that was exported with the last ones', and its hidden states layer by layer."""

from __future__ import annotations

import re

import onnx_ir as ir
from onnx_ir import tape

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.interface import NUM_LOGITS
from quantmoe.exporter.folder.metadata import LOGITS
from quantmoe.exporter.graph.passes.last_logits import head_of

#: a parameter of a decoder layer
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


def every_logits(model: ir.Model) -> bool:
    """Undo last_logits.py's selection of tokens.

    Returns:
        False, and nothing is changed, when the model gives all logits.
    """
    if (found := head_of(model.graph)) is None:
        return False
    node, picked, between = found
    pick = picked.producer()
    if pick is None or pick.op_type != "GatherND":
        return False
    node.replace_input_with(0, pick.inputs[0])
    for key in (LOGITS, NUM_LOGITS):
        model.metadata_props.pop(key, None)
    for value in between:
        if value.shape is not None:
            value.shape = ir.Shape([value.shape[0], "sequence_length", *value.shape[2:]])
    return True


def hidden_states(model: ir.Model, where: str) -> list[str]:
    """Give the hidden states after each decoder layer as outputs, after the last one behind the final norm.

    Requires:
        all logits.

    Returns:
        The outputs' names, in the order of the layers.

    Raises:
        ModelError: naming ``where``: its layers do not follow each other by one value.
    """
    graph, level = model.graph, {}
    for value in (*graph.inputs, *graph.initializers.values()):
        found = _LAYER.match(value.name or "")  # of inputs none: sizes of one layer's cache are every layer's
        level[value] = int(found[1]) if found else -1
    leaving: dict[int, dict[ir.Value, None]] = {}
    for node in graph:
        read = [value for value in node.inputs if value is not None and value.producer() is not None]
        before = max((level[value] for value in read), default=-1)
        at = max((level.get(value, -1) for value in node.inputs if value is not None), default=-1)
        if at > before >= 0:
            leaving.setdefault(before, {}).update({value: None for value in read if level[value] == before})
        level |= dict.fromkeys(node.outputs, at)
    head, last = head_of(graph), max(level.values(), default=-1)
    ops, states = tape.Tape(), [list(leaving.get(at, {})) for at in range(last)]
    if head is None or last < 0 or any(len(state) not in (1, 2) for state in states):
        raise ModelError(f"{where}: its decoder layers do not follow each other by one value: leave out --each-layer")
    logits = next(output for output in graph.outputs if output.name == "logits")
    values = [state[0] if len(state) == 1 else ops.op("Add", state) for state in states] + [head[1]]
    for at, value in enumerate(values):
        output = ops.op("Identity", [value], output=ir.Value(name=f"hidden.{at}", type=head[1].type or logits.type))
        output.shape = ir.Shape(["batch_size", "sequence_length", None])
        graph.outputs.append(output)
    graph.extend(ops.nodes)
    return [f"hidden.{at}" for at in range(len(values))]
