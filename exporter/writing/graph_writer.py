"""A graph of an export: traced, its weights decoded, packed and written one expert at a time, and saved."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quantmoe.custom_ops import native
from quantmoe.custom_ops.layouts import LAYOUTS, cpu_panel, qmoe
from quantmoe.custom_ops.matrix import gates_first, reordered
from quantmoe.custom_ops.op import MoESpec, inputs
from quantmoe.exporter.choosing.choose import Choice, linear_matrix, retyped, retyped_matrix, scaled
from quantmoe.exporter.choosing.options import Options
from quantmoe.exporter.errors import CheckpointError
from quantmoe.exporter.folder import tensor_metadata as keys
from quantmoe.exporter.folder.interface import HIDDEN, HIDDEN_OUT
from quantmoe.exporter.folder.metadata import (
    CONTEXT_LENGTH,
    FILES,
    IDENTITY,
    LOGITS,
    PAGED_METADATA,
    PRODUCER,
    SHARE_BUFFER,
    SHORT_CONTEXT,
    TARGET,
)
from quantmoe.exporter.folder.record import new_hash
from quantmoe.exporter.graph.encoder import is_encoder
from quantmoe.exporter.graph.lowering.embeddings import keep_tables
from quantmoe.exporter.graph.lowering.matmul_nbits import matmul_nbits, to_matmul_nbits
from quantmoe.exporter.graph.lowering.packed_tables import PackedTable, pack_tables
from quantmoe.exporter.graph.lowering.paged import to_paged
from quantmoe.exporter.graph.lowering.qmoe import check_domains, tensor_name, to_qmoe
from quantmoe.exporter.graph.lowering.standard_states import to_standard_states
from quantmoe.exporter.graph.lowering.weights import Weight, place_weights
from quantmoe.exporter.graph.model import Skeleton
from quantmoe.exporter.graph.passes import run_passes
from quantmoe.exporter.graph.passes.interface import drop_traces, name_interface
from quantmoe.exporter.graph.passes.last_logits import keep_last_logits, output_hidden
from quantmoe.exporter.graph.placeholders import Stored
from quantmoe.exporter.graph.put_nodes import put_nodes
from quantmoe.exporter.graph.trace import trace
from quantmoe.exporter.memory import doing, naming
from quantmoe.exporter.parallel_calls import BLOCK_MEMORY, ahead, expert_size
from quantmoe.exporter.reading.formats import Format, MoELayer
from quantmoe.exporter.reading.weights.base import MTP
from quantmoe.exporter.reading.weights.rounding import distance
from quantmoe.exporter.targets import TARGETS
from quantmoe.exporter.writing.external_data import INLINE, DataFiles, Region, byte_size
from quantmoe.exporter.writing.genai import shares_buffer
from quantmoe.exporter.writing.prepare import Beside, Part, Report


def trace_part(part: Part, options: Options, report: Report, ends: dict[str, str]) -> None:
    """Make a part's graph and what it has for weights.

    Args:
        ends: see Prepared; gets how many tokens have logits, where that is neither one nor all.
    """
    put_nodes(part.skeleton, part.chosen, part.attention, options.facts)
    part.graph = graph = trace(part.skeleton, part.chosen, part.attention, options.facts)
    report.untraced = graph.meta.pop("untraced", "") or report.untraced
    part.weights = place_weights(graph)
    if not options.facts.library:
        to_standard_states(graph, options.facts.opset)
        if options.opset is not None:
            graph.graph.opset_imports[""] = options.opset
        try:
            part.weights = to_qmoe(graph, part.weights, part.chosen.layers, options.accuracy_level)
        except ValueError as error:
            raise CheckpointError(f"{part.skeleton.format.ckpt.folder}: {error}") from None
    else:
        routers = sum(node.op_type in ("MoERouting", "MoERouter") for node in graph.graph)
        report.plain_routers += len(part.chosen.nodes) - routers
        keep_tables(part.weights, part.skeleton.stored_type)
    part.lookups = pack_tables(part.weights, part.chosen.tables)
    name_interface(graph)
    head, config = bool(part.skeleton.format.part), part.skeleton.model.config
    if options.eagle3 is not None:  # it is behind the caches
        outputs = graph.graph.outputs
        outputs.insert(1, outputs.pop())
    if options.mtp and not output_hidden(graph, HIDDEN_OUT if head else HIDDEN, config.hidden_size):
        raise CheckpointError(
            f"{part.skeleton.format.ckpt.folder}: no product with a weight makes the logits: no {MTP}"
        )
    if options.paged:
        try:
            part.tables = to_paged(graph, int(ends[CONTEXT_LENGTH]), options.kept_logits == "all")
        except KeyError:
            raise CheckpointError(
                f"{part.skeleton.format.ckpt.folder / 'config.json'}: no max_position_embeddings, a number of tokens: "
                "--paged has tables of so many positions"
            ) from None
        except ValueError as error:
            raise CheckpointError(f"{part.skeleton.format.ckpt.folder}: --paged: {error}") from None
        ends[PAGED_METADATA] = "true"
        ends.pop(SHORT_CONTEXT, None)  # its tables are those of the whole context
    kept = 1 if head else options.kept_logits
    every = options.paged or is_encoder(config) or kept == "all"
    if not every:
        count = kept if isinstance(kept, int) else None
        if keep_last_logits(graph, count, options.facts.token_rows) and (count or 1) > 1:
            ends[LOGITS] = str(count)
    run_passes(graph, options.facts.final_passes)


def write_beside(beside: Beside, data: DataFiles, report: Report) -> Iterator[tuple[str, int]]:
    """Write the weights of a graph beside the model; yield each stage and its bytes."""
    for weight in beside.weights:
        with doing(f"{beside.stored.format.ckpt.folder}: {beside.stored.sources[weight.parameter]}"):
            yield "writing other weights", _dense(weight, beside.stored, data, report)


def write_weights(
    part: Part, first: Part, options: Options, data: DataFiles, report: Report
) -> Iterator[tuple[str, int]]:
    """Write a part's weights, or take the first part's; yield each stage and its bytes."""
    skeleton, chosen = part.skeleton, part.chosen
    specs, linears, ckpt = chosen.layers, chosen.linears, skeleton.format.ckpt
    there = {} if part is first else {first.key(weight): weight.value for weight in first.weights}
    regions: dict[str, dict[str, Region]] = {name: {} for name in specs}
    for weight in part.weights:
        module, _, projection = weight.parameter.rpartition(".")
        if module in specs:
            regions[module][projection] = data.region(weight.value)
            continue
        if isinstance(getattr(shared := there.get(part.key(weight)), "const_value", None), ir.ExternalTensor):
            assert shared is not None
            _share(weight.value, shared)
            yield "writing other weights", byte_size(weight.value)
            continue
        source = chosen.source(module) if module in linears else skeleton.sources[weight.parameter]
        with doing(f"{ckpt.folder}: {source}"):
            if module in linears:
                written = _linear(weight, skeleton, chosen, options=options, data=data, report=report)
            else:
                written = _dense(weight, skeleton, data, report)
        yield "writing other weights", written
    for lookup in part.lookups:
        written = _lookup(lookup, part, first, data, report)
        yield "writing other weights", written
    for table in part.tables:
        region = data.region(table.value)
        region.write(table.array)
        region.finish({})
        report.dense_bytes += table.array.nbytes
        yield "writing other weights", table.array.nbytes
    for name, layer in chosen.experts.items():
        for written in _pack(layer, specs[name], regions[name], options, report):
            yield "packing experts", written
        report.packed_bytes += sum(region.length for region in regions[name].values())


def _same_bytes(value: ir.Value, written: ir.Value) -> None:
    """Give a value the bytes of another one, as its own type and shape."""
    tensor = written.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert value.dtype is not None
    assert value.shape is not None
    value.const_value = ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        value.dtype,
        shape=value.shape,
        name=value.name or "",
        metadata_props=tensor.metadata_props,
    )


def _share(value: ir.Value, written: ir.Value) -> None:
    """Give a value the bytes of another graph's, and its nodes what they say of them."""
    _same_bytes(value, written)
    for (node, _), (other, _) in zip(value.uses(), written.uses(), strict=False):
        node.attributes.update({name: a for name, a in other.attributes.items() if name.endswith("_identity")})


def _pack(
    layer: MoELayer, spec: MoESpec, regions: dict[str, Region], options: Options, report: Report
) -> Iterator[int]:
    """Decode and pack experts ahead of the writing; yield the bytes of each."""
    layout = LAYOUTS[spec.w13.layout]

    def make(e: int) -> tuple[dict[str, np.ndarray], float]:
        with doing(f"{layer.format.ckpt.folder}: {layer.label(e)}"):
            return packed(e)

    def packed(e: int) -> tuple[dict[str, np.ndarray], float]:
        expert, error = scaled(layer.expert(e), options.scales)
        rows = {p: native.aligned(layout.row_bytes(spec, p)) for p in ("w13", "w2")}
        try:
            if options.facts.own_floats:
                expert = retyped(expert, spec)
            layout.pack(expert, spec, *rows.values())
            return (rows if options.facts.library else _tensors(spec, rows, options)), error
        except ValueError as error:
            raise CheckpointError(f"{layer.format.ckpt.folder}: {layer.label(e)}: {error}") from None

    calls = [functools.partial(make, e) for e in layer.ids]
    with contextlib.closing(ahead(calls, expert_size(spec))) as made:
        for rows, error in made:
            for name, region in regions.items():
                region.write(rows[name])
            if options.scales == "bf16":
                report.scale_error = max(report.scale_error or 0.0, error)
            yield sum(row.nbytes for row in rows.values())
    for name, region in regions.items():
        metadata = {keys.MODULE: layer.name, keys.FORMAT: layer.scheme.text, keys.LAYOUT: spec.w13.layout,
                    keys.LAYOUT_VERSION: str(spec.w13.layout_version)}  # fmt: skip
        if not options.facts.library:
            own = spec.w13 if name.startswith("fc1") else spec.w2
            metadata[keys.SCALE_TYPE] = own.scale_type
        else:
            _identify(region, layer.format)
            metadata[keys.SPEC] = json.dumps(spec.attributes())
        if layer.shared and layer.every - 1 in layer.ids:
            metadata[keys.SHARED] = json.dumps(layer.shared.names())
        if not isinstance(layer.ids, range):
            metadata[keys.EXPERTS] = json.dumps({"ids": list(layer.ids), "routed": layer.num_experts})
        region.finish(metadata)
        if options.external_experts:
            _leave_in_file(region)


def _tensors(spec: MoESpec, rows: dict[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
    """Return an expert's part of the tensors of a QMoE, by their names."""
    floats = np.dtype(np.float16 if options.graph_type == "f16" else np.float32)
    return {
        tensor_name(projection, part): array
        for projection, row in rows.items()
        for part, array in qmoe.stored(spec, projection, row, floats).items()
    }


def _linear(
    weight: Weight, skeleton: Skeleton, chosen: Choice, *, options: Options, data: DataFiles, report: Report
) -> int:
    """Write a linear's packed weight, or make its node a MatMulNBits; return the bytes."""
    format, name = skeleton.format, weight.parameter.rpartition(".")[0]
    spec, source, parts = chosen.linears[name], chosen.source(name), [*chosen.parts[name].values()]
    scheme = format.scheme_of(parts[0])
    m, error = linear_matrix(format, parts, options.scales)
    if options.facts.own_floats:
        try:
            m = retyped_matrix(m, spec.w.format)
        except ValueError as refusal:
            raise CheckpointError(f"{format.ckpt.folder}: {source}: {refusal}") from None
    if source == skeleton.head:
        report.head_error = distance(m, format.stored(f"{source}.weight"))
    if options.scales == "bf16":
        report.scale_error = max(report.scale_error or 0.0, error)
    metadata = {keys.MODULE: source, keys.FORMAT: scheme.text}
    if name in chosen.gated:
        rows = next(iter(skeleton.rows(chosen.parts[name]).values()))
        order = gates_first(rows, chosen.gated[name])
        m = reordered(m, np.concatenate([order, np.arange(rows, spec.out_features)]))
        metadata[keys.GATED_HEADS] = str(chosen.gated[name])
    if len(parts) > 1:
        metadata[keys.ROWS] = json.dumps(skeleton.rows(chosen.parts[name]))
    made = None
    layout = LAYOUTS[spec.w.layout]
    row = native.aligned(layout.row_bytes(spec.moe, "w2"))
    try:
        if chosen.not_ort.get(name) == "":
            made = to_matmul_nbits(weight.value, m, spec)
        else:
            layout.pack_down(m, spec.moe, row)
        if not options.facts.library:
            made = matmul_nbits(weight.value, row, spec, options.accuracy_level)
            metadata |= {keys.LAYOUT: qmoe.NAME, keys.LAYOUT_VERSION: str(qmoe.VERSION), keys.SCALE_TYPE: m.scale_type}
    except ValueError as problem:
        for part in parts:  # one of them is to blame, if one is
            _check_finite(format, part)
        raise CheckpointError(f"{format.ckpt.folder}: {source}: {str(problem).removeprefix('down: ')}") from None
    if made is not None:
        for value, array in made:
            region = data.region(value)
            region.write(array)
            region.finish(metadata)
        size = sum(array.nbytes for _, array in made)
        report.dense_bytes += size
        return size
    region = data.region(weight.value)
    region.write(row)
    _identify(region, format)
    region.finish(metadata | {keys.LAYOUT: spec.w.layout, keys.LAYOUT_VERSION: str(spec.w.layout_version),
                              keys.SPEC: json.dumps(spec.attributes())})  # fmt: skip
    report.dense_bytes += row.nbytes
    return row.nbytes


def _lookup(lookup: PackedTable, part: Part, first: Part, data: DataFiles, report: Report) -> int:
    """Write a table that is looked up packed, unless its bytes are there; return the bytes written."""
    format, source = part.skeleton.format, part.skeleton.sources[lookup.parameter]
    module, views = source.removesuffix(".weight"), list(lookup.views.values())
    same = [other for other in first.lookups if first.skeleton.sources[other.parameter] == source]
    weights = {weight.parameter: weight.value for weight in part.weights}
    written, there = 0, weights.get(f"{lookup.head}.w")
    if there is None and same and same[0] is not lookup:
        there = next(iter(same[0].views.values()))
    if there is None:
        there, layout = views[0], cpu_panel
        row = native.aligned(lookup.bytes)
        with doing(f"{format.ckpt.folder}: {source}"):
            try:
                layout.pack_down(format.matrix_of(module), lookup.spec.moe, row)
            except ValueError as problem:
                _check_finite(format, module)
                raise CheckpointError(f"{format.ckpt.folder}: {source}: {problem}") from None
        region = data.region(there)
        region.write(row)
        text = format.scheme_of(module).text
        region.finish({keys.MODULE: module, keys.FORMAT: text, keys.LAYOUT: layout.NAME,
                       keys.LAYOUT_VERSION: str(layout.VERSION),
                       keys.SPEC: json.dumps(lookup.spec.attributes())})  # fmt: skip
        written = row.nbytes
        report.dense_bytes += written
    for view in views:
        if view is not there:
            _same_bytes(view, there)
    return written


def _check_finite(format: Format, module: str) -> None:
    try:
        format.matrix_of(module).check_finite(module)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{format.ckpt.folder}: {error}") from None


def _identify(region: Region, format: Format) -> None:
    """Tell the nodes that read a packed weight which bytes it has."""
    for node, at in region.value.uses():
        name = f"{inputs(node.op_type)[at][0]}_identity"
        node.attributes[name] = ir.AttrString(name, region.identity(format.ckpt.folder.resolve().name))


def _leave_in_file(region: Region) -> None:
    """Tell the nodes where a packed weight is, in its place (quant_moe.def)."""
    written = region.value.const_value
    assert isinstance(written, ir.ExternalTensor)
    for node, at in region.value.uses():
        name = f"{inputs(node.op_type)[at][0]}_external"
        node.attributes[name] = ir.AttrString(name, f"{written.offset} {written.length} {written.location}")
    empty = np.empty(0, written.dtype.numpy())
    region.value.shape = ir.Shape(empty.shape)
    region.value.const_value = ir.Tensor(empty, name=region.value.name, metadata_props=written.metadata_props)


def _dense(weight: Weight, skeleton: Stored, data: DataFiles, report: Report) -> int:
    """Write a weight outside the experts; return its bytes."""
    format, source = skeleton.format, skeleton.sources[weight.parameter]
    metadata, module = {"module": source}, source.rpartition(".")[0]
    if weight.parameter in skeleton.joined:
        metadata[keys.MODULE] = ", ".join(skeleton.joined[weight.parameter])
    if source == f"{module}.weight" and format.is_quantized(module):
        owner = type(skeleton.model.get_submodule(weight.parameter.rpartition(".")[0])).__name__
        reason = report.dequantized.setdefault(source, f"{owner} is not a linear layer")
        metadata |= {keys.DEQUANTIZED_FROM: format.scheme(module).text, keys.DEQUANTIZED_BECAUSE: reason}
    assert weight.value.dtype is not None
    blocks = skeleton.blocks(weight.parameter, weight.transposed, weight.value.dtype.numpy())
    size = byte_size(weight.value)
    if size <= INLINE:
        array = np.concatenate([block() for block in blocks])
        weight.value.const_value = ir.Tensor(array, name=weight.value.name, metadata_props=metadata)
    else:
        region = data.region(weight.value)
        for block in ahead(blocks, BLOCK_MEMORY):
            region.write(block)
        region.finish(metadata)
    report.dense_bytes += size
    return size


def save_part(part: Part | Beside, path: Path, metadata: dict[str, str], files: str = "") -> None:
    """Write a graph without its weights. files: FILES, of the model that is renamed last."""
    graph = part.graph
    values = [weight.value for weight in part.weights]
    if isinstance(part, Part):
        values += [table.value for table in part.tables]
        values += [view for lookup in part.lookups for view in lookup.views.values()]
    for value in values:
        if value.uses():
            graph.graph.register_initializer(value)
    drop_traces(graph)
    graph.producer_name, graph.producer_version = PRODUCER, version("quantmoe")
    graph.metadata_props.update(metadata | ({FILES: files} if files else {}))
    if shares_buffer(graph.graph):
        graph.metadata_props[SHARE_BUFFER] = "true"
    target = TARGETS[metadata[TARGET]]
    if not target.library:
        check_domains(graph)
    elif not target.on_gpu:
        graph.doc_string = f"Register {target.library} of the package quantmoe with ONNX Runtime to run this."
    with doing(str(path)), naming(path):
        model = ir.to_proto(graph).SerializeToString(deterministic=True)
        graph.metadata_props[IDENTITY] = new_hash().update(model).hexdigest()
        ir.save(graph, path)
