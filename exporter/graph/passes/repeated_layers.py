"""Deep models from shallow traces: layers that were left out of the trace are copies of traced ones.

What is copied is a decoder layer, or a group of different layers that repeats.

Tracing, optimizing and fusing 48 equal layers takes minutes, growing faster than their number; three take seconds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import onnx_ir as ir


class RepeatError(Exception):
    """The graph is not a chain of equal layers; trace all of them."""


def _levels(graph: ir.Graph, given: Mapping[ir.Value, int]) -> dict[ir.Value, int]:
    """Return the group of layers that makes each value, -1 for none.

    Args:
        given: the groups of parameters and of the graph's inputs.
    """
    level = dict(given)
    for node in graph:
        at = max((level.get(value, -1) for value in node.inputs if value is not None), default=-1)
        if node.op_type in ("Shape", "TokenRows") and node.inputs[0] in graph.inputs:
            at = -1  # all layers' caches have one shape
        level |= dict.fromkeys(node.outputs, at)
    level |= dict.fromkeys((value for node in _shared_sizes(graph, level) for value in node.outputs), -1)
    _give_to_readers(graph, level)
    return level


# over 60 lines: a third say what it requires and ensures
def repeat_layers(model: ir.Model, prefix: str, groups: Sequence[Sequence[int]], before: bool = False) -> None:
    """Insert the layers missing between ``groups`` of layers, as copies of the traced group before, and number all.

    Args:
        before: the last group may end in another way, such as in a fused norm. So a copied group is compared with the
            group before it, and three groups before a gap are alike.

    Requires:
        Parameters are in model.meta["placeholders"], as ``<prefix>.<position>.*``. Inputs and outputs of the cache are
        ``*.layers.<position>.*``. Position i is the i-th layer of all groups. The two groups before a gap, the groups
        in it and the group after it are alike, layer by layer.
    Ensures:
        Names have the model's own layer numbers. New parameters are among the placeholders. Graph inputs and outputs
        are in the order of layers, nodes are in topological order.

    Raises:
        RepeatError: a group's counterpart in the next one is not found, before anything is changed.
    """
    graph = model.graph
    number = re.compile(rf"(?:{re.escape(prefix)}|(?:input|output)\.cache\.layers)\.(\d+)\.")
    parameters: list[ir.Value] = model.meta["placeholders"]
    kept = [layer for group in groups for layer in group]
    group_of = [at for at, group in enumerate(groups) for _ in group]

    def position(value: ir.Value) -> int:
        match = number.match(value.name or "")
        return int(match[1]) if match else -1

    def group_at(value: ir.Value) -> int:
        return group_of[at] if (at := position(value)) >= 0 else -1

    level = _levels(graph, {value: group_at(value) for value in [*parameters, *graph.inputs]})
    block: dict[int, list[ir.Node]] = {}
    for node in graph:
        block.setdefault(level[node.outputs[0]], []).append(node)

    plans = []
    if missing := set(range(len(groups))) - block.keys():
        raise RepeatError(f"no nodes of layers {[groups[at] for at in sorted(missing)]}")
    for at, (group, following) in enumerate(itertools.pairwise(groups)):
        if following[0] > group[-1] + 1:
            shifts = range(len(group), following[0] - group[0], len(group))
            match = _match(block, level, at - before, number, len(group))
            plans.append((at, shifts, _carried(match, block, level, at, before)))

    named = [value for value in [*parameters, *graph.inputs, *graph.outputs] if position(value) >= 0]
    rename = {value: kept[position(value)] for value in named}
    for at, shifts, carried in plans:
        later = [node for i in range(at + 1, len(groups)) for node in block[i]]
        own = [v for v in [*parameters, *graph.inputs] if level.get(v, -1) == at]
        # the next group may read parameters of this one, too: what JetMoE adds to a layer's result
        left = [*own, *(value for node in block[at] for value in node.outputs)]
        previous: dict[ir.Value, ir.Value] = {value: value for value in left}
        for shift in shifts:
            copy = {source: previous[target] for source, target in carried.items()}
            for value in own:
                copy[value] = ir.Value(name=value.name, shape=value.shape, type=value.type)
                rename[copy[value]] = rename[value] + shift
                (graph.inputs if value.is_graph_input() else parameters).append(copy[value])
            for node in block[at]:
                graph.append(_copy(node, copy, groups[at][0] + shift))
            for value in [v for v in graph.outputs if level.get(v, -1) == at == group_at(v)]:
                copy[value].name = value.name
                rename[copy[value]] = rename[value] + shift
                graph.outputs.append(copy[value])
            previous = {value: copy[value] for value in left}
        for node in later:
            for i, read in enumerate(node.inputs):
                if read is not None and read in previous:
                    node.replace_input_with(i, previous[read])
    for value, layer in rename.items():
        value.name = _renumbered(value, number, layer)
    for ends in (graph.inputs, graph.outputs):
        ordered = sorted(ends, key=lambda value: rename.get(value, -1))
        ends[:] = ordered
    graph.sort()


def _shared_sizes(graph: ir.Graph, level: dict[ir.Value, int]) -> list[ir.Node]:
    """Return nodes of one group of layers that sizes alone decide. A group behind the next one reads their results.

    Layers that are alike have equal sizes. The trace makes a node once if only sizes decide it.
    """
    sized: dict[ir.Node, None] = {}
    for node in graph:
        known = (v is None or level.get(v, -1) < 0 or v.producer() in sized for v in node.inputs)
        if level[node.outputs[0]] >= 0 and (node.op_type == "Shape" or all(known)):
            sized[node] = None
    found: dict[ir.Node, None] = {}
    for node in reversed(sized):
        users = [user for value in node.outputs for user, _ in value.uses()]
        own = level[node.outputs[0]]
        if any(user in found or level[user.outputs[0]] > own + 1 for user in users):
            found[node] = None
    return list(found)


def _give_to_readers(graph: ir.Graph, level: dict[ir.Value, int]) -> None:
    """Move nodes that change one value of a group, for later groups alone, to the first group that reads the result.

    The last group may have no such nodes: what follows it is no layer.
    """
    source: dict[ir.Value, ir.Value] = {}  # the one value that a value is made of
    for node in graph:
        of = {source.get(value, value) for value in node.inputs if value is not None and level.get(value, -1) >= 0}
        if len(of) == 1:
            source |= dict.fromkeys(node.outputs, of.pop())
    for node in reversed(graph):
        own = level[node.outputs[0]]
        readers = [level.get(user.outputs[0], own) for value in node.outputs for user, _ in value.uses()]
        if own >= 0 and node.outputs[0] in source and min(readers, default=own) > own:
            level |= dict.fromkeys(node.outputs, min(readers))


def _carried(
    match: dict[ir.Value, ir.Value], block: dict[int, list[ir.Node]], level: dict[ir.Value, int], at: int, before: bool
) -> dict[ir.Value, ir.Value]:
    """Return what group ``at`` reads of the one before -> what the next reads of it.

    Args:
        match: of the group itself, or of the one ``before``.
    """
    carried = {mine: other for mine, other in match.items() if 0 <= level.get(mine, -1) < at - before}
    if before:
        carried = {mine: match[mine] for mine in carried.values()}
    leaving = {
        value
        for node in block[at]
        for value in node.outputs
        if any(level[user.outputs[0]] > at for user, _ in value.uses())
    }
    if more := leaving - set(carried.values()):
        raise RepeatError(f"{next(iter(more)).name} is read by a later layer only here")
    return carried


def _match(
    block: dict[int, list[ir.Node]],
    level: dict[ir.Value, int],
    at: int,
    number: re.Pattern[str],
    layers: int,
) -> dict[ir.Value, ir.Value]:
    """Return the values that group ``at`` of so many layers reads and makes -> the next group's: their nodes match."""
    by_name = {value.name: value for value in level if value.producer() is None}
    match: dict[ir.Value, ir.Value] = {}

    def learn(mine: ir.Value, other: ir.Value) -> None:
        shared = level.get(mine, -1) < 0
        right = other is mine if shared else level.get(other, -1) == level[mine] + 1
        if not right or match.setdefault(mine, other) is not other:
            raise RepeatError(f"{mine.name} and {other.name}")

    for value, at_ in level.items():
        if at_ == at and value.producer() is None:
            match_ = number.match(value.name or "")
            assert match_ is not None
            name = _renumbered(value, number, int(match_[1]) + layers)
            if name not in by_name or _sizes(by_name[name]) != _sizes(value):
                raise RepeatError(f"{value.name} has no counterpart {name}")
            learn(value, by_name[name])
    waiting, taken = list(block.get(at, [])), set()
    while waiting:
        left = []
        for node in waiting:
            read = [(i, match[v]) for i, v in enumerate(node.inputs) if v is not None and v in match]
            made = [match[v].producer() for v in node.outputs if v in match]
            if not read and not made:
                left.append(node)
                continue
            users = made or [user for user, i in read[0][1].uses() if i == read[0][0]]
            found = [user for user in users if user and user not in taken and _alike(node, user, match, level)]
            if not found:
                raise RepeatError(f"no counterpart of {node.name}")
            taken.add(found[0])
            for mine, other in zip([*node.inputs, *node.outputs], [*found[0].inputs, *found[0].outputs], strict=True):
                if mine is not None and other is not None:
                    learn(mine, other)
        if len(left) == len(waiting):
            raise RepeatError(f"{left[0].name} is tied to no parameter")
        waiting = left
    return match


def _alike(a: ir.Node, b: ir.Node, match: dict[ir.Value, ir.Value], level: dict[ir.Value, int]) -> bool:
    """Return whether b may be a's counterpart: the same operation, on what is known to correspond."""
    if (a.op_type, a.domain, len(a.inputs), len(a.outputs)) != (b.op_type, b.domain, len(b.inputs), len(b.outputs)):
        return False
    if _attributes(a) != _attributes(b):
        return False
    for mine, other in zip(a.inputs, b.inputs, strict=True):
        if (mine is None) != (other is None):
            return False
        if mine is None or other is None:
            continue
        if level.get(mine, -1) < 0 and mine is not other:
            return False
        if mine in match and match[mine] is not other:
            return False
    return True


def _attributes(node: ir.Node) -> dict[str, object]:
    """Return a node's attributes, tensors and bodies by what they hold."""
    found: dict[str, object] = {}
    for name, attribute in node.attributes.items():
        found[name] = attribute.value
        if attribute.type == ir.AttributeType.GRAPH:
            found[name] = _body(attribute.as_graph())
        elif attribute.type == ir.AttributeType.TENSOR:
            found[name] = _constant(attribute.as_tensor())
    return found


def _constant(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes()


def _body(graph: ir.Graph) -> list[object]:
    """Return what the body of a Loop or Scan computes, whatever its values are called.

    A body that reads more than constants from outside equals no other.
    """
    numbers = {value: number for number, value in enumerate(graph.inputs)}

    def read(value: ir.Value | None) -> object:
        if value is None or value in numbers:
            return None if value is None else numbers[value]
        return object() if value.const_value is None else _constant(value.const_value)

    nodes: list[object] = []
    for node in graph:
        nodes.append((node.domain, node.op_type, [read(value) for value in node.inputs], _attributes(node)))
        for value in node.outputs:
            numbers[value] = len(numbers)
    return [len(graph.inputs), nodes, [read(value) for value in graph.outputs]]


def _sizes(value: ir.Value) -> list[int | None] | None:
    """Return a value's static sizes; those that the tracing found by itself have another symbol in each layer."""
    return None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]


def _renumbered(value: ir.Value, number: re.Pattern[str], layer: int) -> str:
    match = number.match(value.name or "")
    assert match is not None
    return f"{match.string[: match.start(1)]}{layer}{match.string[match.end(1) :]}"


def _own(attribute: ir.Attr) -> ir.Attr:
    """Return an attribute for a copy of its node: a body belongs to one node."""
    if attribute.type != ir.AttributeType.GRAPH:
        return attribute
    return ir.AttrGraph(attribute.name, attribute.as_graph().clone(allow_outer_scope_values=True))


def _copy(node: ir.Node, copy: dict[ir.Value, ir.Value], layer: int) -> ir.Node:
    new = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else copy.get(value, value) for value in node.inputs],
        [_own(attribute) for attribute in node.attributes.values()],
        num_outputs=len(node.outputs),
        name=f"{node.name}_{layer}",
    )
    for mine, other in zip(node.outputs, new.outputs, strict=True):
        other.name, other.shape, other.type = f"{mine.name}_{layer}", mine.shape, mine.type
        copy[mine] = other
    return new
