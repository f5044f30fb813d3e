"""CachedAttention in ONNX Runtime: the C ABI's bytes, caches in place and grown, shapes, errors that name the node."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.models.one_layer import session
from support.operators.attention import CACHES, CODES, Inputs, assert_bytes, in_blocks, inputs
from support.operators.specs import attention_spec

from quantmoe.custom_ops.op import DOMAIN, AttentionSpec, optional_inputs
from quantmoe.custom_ops.op import inputs as inputs_of
from quantmoe.custom_ops.op import outputs as outputs_of

NODE = "model.layers.0.self_attn"
SPEC = attention_spec(6, 2, 24, v_head_size=16, rotary_size=8, qk_norm="head", sliding_window=40)
NAMES = [name for name, _ in inputs_of("CachedAttention")]
TYPES = {np.float32: "FLOAT", np.float16: "FLOAT16", ml_dtypes.bfloat16: "BFLOAT16"}
#: what inputs() makes of SPEC for a type of caches
SPECS = {cache: inputs(SPEC, [], 0, 0, 0, cache=cache).spec for cache in CACHES}


def feeds(a: Inputs) -> dict[str, np.ndarray]:
    mask = np.ones((len(a.rows), a.length), np.int64)
    given = dict(zip(NAMES, (a.qkv, *a.past, a.rows, mask, *a.others), strict=True))
    if a.block_table is not None:
        given |= {"attention_mask": np.ones((1, 0), np.int64), "block_table": a.block_table}
    return given | dict(zip(("k_up", "v_up"), a.ups, strict=False))


def write(
    path: Path,
    dtype: Any = np.float32,
    cache: Any = np.float16,
    past: int | str = "P",
    length: int | str = "L",
    spec: AttentionSpec | None = None,
) -> Path:
    """One node, of SPECS[cache] or another spec; qkv and output are float32, cast to and from ``dtype``: ONNX Runtime
    takes no bfloat16 from NumPy."""
    spec = spec or SPECS[cache]
    heads, groups, d, v = spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size
    widths = (spec if spec.key_split else SPECS[cache]).cache_widths
    norm = d if spec.qk_norm == "head" else 0
    shapes: dict[str, list[int | str]] = {
        "qkv": ["B", "S", heads * spec.query_size + groups * d + (0 if spec.key_split else groups * v)],
        "past_key": ["B", groups, past, widths[0]],
        "past_value": ["B", groups, past, widths[1]],
        "rows": ["B", 3],
        "attention_mask": ["B", length],
        "cos": ["B", "S", spec.rotary_size // 2],
        "sin": ["B", "S", spec.rotary_size // 2],
        "q_norm": [norm],
        "k_norm": [norm],
        "sinks": [heads],
        "k_up": [heads, spec.nope_size, v],
        "v_up": [heads, v, spec.out_size],
        "block_table": ["R", "M"],
    }
    if spec.block_size:
        for name, width in zip(("past_key", "past_value"), widths, strict=True):
            shapes[name] = ["N", spec.block_size, groups, width]
        shapes |= {"rows": ["R", 3], "cos": ["K", spec.rotary_size // 2], "sin": ["K", spec.rotary_size // 2]}
    kinds = {
        "T": "FLOAT",
        "C": (SPECS[cache].cache_dtype or TYPES.get(cache)).upper(),
        "float": "FLOAT",
        "int32": "INT32",
        "int64": "INT64",
    }

    def value(name: str, kind: str) -> ir.Value:
        shape = ir.Shape(shapes[name]) if name in shapes else None
        return ir.Value(name=name, type=ir.TensorType(ir.DataType[kinds[kind]]), shape=shape)

    used = {"k_up", "v_up"} if spec.nope_size else {"block_table"} if spec.block_size else set()
    named = (*inputs_of("CachedAttention"), *(i for i in optional_inputs("CachedAttention") if i[0] in used))
    given = [value(name, kind) for name, kind in named]
    casts = [
        ir.node("Cast", [x], {"to": int(ir.DataType[TYPES[dtype]])})
        for x, (_, kind) in zip(given, named, strict=True)
        if kind == "T"
    ]
    typed = {cast.inputs[0]: cast.outputs[0] for cast in casts}
    results = [value(name, kind) for name, kind in outputs_of("CachedAttention")]
    node = ir.node(
        "CachedAttention",
        [typed.get(x, x) for x in given[:10]]
        + [None, None] * bool(spec.block_size)
        + [typed.get(x, x) for x in given[10:]],
        spec.attributes(),
        domain=DOMAIN,
        name=NODE,
        num_outputs=3,
    )
    node.outputs[1].name, node.outputs[2].name = "present_key", "present_value"
    for output, result in zip(node.outputs[1:], results[1:], strict=True):
        output.type = result.type
    back = ir.node("Cast", node.outputs[:1], {"to": int(ir.DataType.FLOAT)}, outputs=results[:1])
    graph = ir.Graph(
        given,
        [*back.outputs, *node.outputs[1:]],
        nodes=[*casts, node, back],
        opset_imports={"": 20, DOMAIN: 1},
        name="attention",
    )
    ir.save(ir.Model(graph, ir_version=10), path / "model.onnx")
    return path / "model.onnx"


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", TYPES)
def test_types(tmp_path: Path, dtype: Any, cache: Any) -> None:
    """Every (T, C) gives the C ABI's bytes, on one thread and on two."""
    a = inputs(SPEC, [[0, 3, 50], [1, 2, 3]], tokens=3, past=60, length=70, cache=cache)
    output, *present = dataclasses.replace(a, qkv=a.qkv.astype(dtype)).run()
    for threads in (1, 2):
        got = session(write(tmp_path, dtype, cache), threads).run(None, feeds(a))
        assert_bytes(got, (output.astype(np.float32), *present))


@pytest.mark.parametrize("cache", CACHES)
def test_caches_in_blocks(tmp_path: Path, cache: Any) -> None:
    """The C ABI's bytes, into other memory and in place; a graph's shapes follow from op.def."""
    a = in_blocks(SPEC, [(1, 40), (3, 255), (1, 0)], columns=2, blocks=7, cache=cache)
    want = a.run()
    opened = session(write(tmp_path, cache=cache, spec=a.spec), 2)
    assert opened.get_outputs()[1].shape == ["N", 256, 2, want[1].shape[3]]
    assert_bytes(opened.run(None, feeds(a)), want)
    binding, past = opened.io_binding(), [ort.OrtValue.ortvalue_from_numpy(x.copy()) for x in a.past]
    for name, value in feeds(a).items():
        if not name.startswith("past"):
            binding.bind_cpu_input(name, value)
    for kind, value in zip(("key", "value"), past, strict=True):
        binding.bind_ortvalue_input(f"past_{kind}", value)
        binding.bind_ortvalue_output(f"present_{kind}", value)
    binding.bind_output("output")
    opened.run_with_iobinding(binding)
    assert_bytes(tuple(value.numpy() for value in past), want[1:])


def test_a_table_that_is_missing_or_wrong(tmp_path: Path) -> None:
    a = in_blocks(SPEC, [(1, 40)], columns=2, blocks=2)
    opened = session(write(tmp_path, cache=np.float32, spec=a.spec), 1)
    with pytest.raises(Exception, match=rf"{NODE}.*block_table\[0\]\[0\] is 5: the caches have 2 blocks"):
        opened.run(None, feeds(dataclasses.replace(a, block_table=np.array([[5, 0]], np.int32))))
    with pytest.raises(Exception, match=rf"{NODE}.*block_table has shape \[2, 1\], expected \[1, M\]"):
        opened.run(None, feeds(dataclasses.replace(a, block_table=a.block_table.reshape(2, 1))))
    model = ir.load(tmp_path / "model.onnx")
    node = next(n for n in model.graph if n.op_type == "CachedAttention")
    node.resize_inputs(10)
    ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(Exception, match=rf"{NODE}.*it has 10 inputs, expected 13, block_table too"):
        session(tmp_path / "model.onnx", 1).run(None, feeds(a))


@pytest.mark.parametrize("cache", CACHES[1:])
def test_a_cache_that_grows_from_nothing(tmp_path: Path, cache: Any) -> None:
    """present is fed as past, one slot longer each time, as of a plain run()."""
    s = session(write(tmp_path, cache=cache))
    a = inputs(SPEC, [[0, 8, 0]], tokens=8, past=0, length=8, cache=cache)
    want, pieces, past = a.run(), [], a.past
    for i in range(8):
        step = dataclasses.replace(a, past=past, length=i + 1).tokens(slice(i, i + 1), [[0, 1, i]])
        output, *past = s.run(None, feeds(step))
        assert past[0].shape[2] == i + 1
        pieces.append(output)
    assert_bytes((np.concatenate(pieces, 1), *past), want)


@pytest.mark.parametrize("cache", CACHES[1:])
def test_a_cache_in_place(tmp_path: Path, cache: Any) -> None:
    """Past and present bound to one OrtValue: every step has one shape, and nothing is copied or cleared."""
    s = session(write(tmp_path, cache=cache), threads=2)
    a = inputs(SPEC, [[0, 8, 0]], tokens=8, past=0, length=8, cache=cache)
    want, *present = a.run()
    memory = [np.full((1, 2, 20, x.shape[3]), 7, x.dtype) for x in present]
    values = [ort.OrtValue.ortvalue_from_numpy(x) for x in memory]
    for i in range(8):
        binding = s.io_binding()
        step = dataclasses.replace(a, past=tuple(memory)).tokens(slice(i, i + 1), [[0, 1, i]])
        for name, array in feeds(step).items():
            if not name.startswith("past"):
                binding.bind_cpu_input(name, array)
        for name, value in zip(("key", "value"), values, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        binding.bind_output("output")
        s.run_with_iobinding(binding)
        assert_bytes((binding.get_outputs()[-1].numpy(),), (want[:, i : i + 1],))
    for value, stored in zip(values, present, strict=True):
        assert_bytes((value.numpy()[:, :, :8],), (stored,))
        assert (value.numpy()[:, :, 8:] == 7).all()


@pytest.mark.parametrize(
    ("past", "length", "slots"), [("P", "L", None), (5, 9, 9), (9, 5, 9), (0, "L", "L"), ("L", "L", "L")]
)
def test_shapes_are_inferred(tmp_path: Path, past: int | str, length: int | str, slots: int | str | None) -> None:
    found = {o.name: o.shape for o in session(write(tmp_path, past=past, length=length)).get_outputs()}
    assert found["output"] == ["B", "S", 96]
    assert found["present_key"] == ([] if slots is None else ["B", 2, slots, 24])
    assert found["present_value"] == ([] if slots is None else ["B", 2, slots, 16])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("qkv", (2, 3, 100), r"qkv has shape \[2, 3, 100\], expected \[2, 3, 224\]"),
        ("past_key", (2, 2, 60, 23), r"past_key has shape .*, expected \[2, 2, 60, 24\]"),
        ("past_value", (2, 2, 59, 16), r"past_value has shape .*, expected \[2, 2, 60, 16\]"),
        ("rows", (3, 3), r"rows has shape \[3, 3\], expected \[2, 3\]"),
        ("attention_mask", (1, 9), r"attention_mask has shape \[1, 9\], expected \[2, L\]"),
        ("cos", (2, 3, 5), r"cos has shape \[2, 3, 5\], expected \[2, 3, 4\]"),
        ("sin", (2, 2, 4), r"sin has shape \[2, 2, 4\], expected \[2, 3, 4\]"),
        ("q_norm", (0,), r"q_norm has shape \[0\], expected \[24\]"),
        ("k_norm", (48,), r"k_norm has shape \[48\], expected \[24\]"),
        ("sinks", (5,), r"sinks has shape \[5\], expected \[6\]"),
    ],
)
def test_wrong_shapes_are_named(tmp_path: Path, name: str, shape: tuple[int, ...], message: str) -> None:
    a = feeds(inputs(SPEC, [[0, 3, 50], [1, 2, 3]], tokens=3, past=60, length=70, cache=np.float16))
    path = write(tmp_path)
    model = ir.load(path)
    for value in model.graph.inputs:
        value.shape = None  # ONNX Runtime would refuse it itself
    ir.save(model, path)
    a[name] = np.zeros(shape, a[name].dtype)
    with pytest.raises(Exception, match=f'CachedAttention node "{NODE}": {message}'):
        session(path).run(None, a)


#: expands from 2 new tokens on
UP = attention_spec(6, 2, 36, v_head_size=32, key_split=18, rotary_size=4, nope_size=1, out_size=1)


@pytest.mark.parametrize("dtype", TYPES)
def test_up_projections(tmp_path: Path, dtype: Any) -> None:
    a = inputs(UP, [[0, 3, 50], [1, 1, 3]], tokens=3, past=60, length=70, cache=np.float16)
    typed = dataclasses.replace(a, qkv=a.qkv.astype(dtype), ups=tuple(up.astype(dtype) for up in a.ups))
    output, *present = typed.run()
    s = session(write(tmp_path, dtype, spec=UP), 2)
    assert s.get_outputs()[0].shape == ["B", "S", 6]
    assert_bytes(s.run(None, feeds(a)), (output.astype(np.float32), *present))


def test_up_projections_of_another_shape_are_named(tmp_path: Path) -> None:
    a = feeds(inputs(UP, [[0, 3, 50]], tokens=3, past=60, length=70, cache=np.float16))
    path = write(tmp_path, spec=UP)
    model = ir.load(path)
    for value in model.graph.inputs:
        value.shape = None
    ir.save(model, path)
    for name, expected in (("k_up", r"\[6, 1, 32\]"), ("v_up", r"\[6, 32, 1\]")):
        with pytest.raises(Exception, match=f'"{NODE}": {name} has shape .*, expected {expected}'):
            session(path).run(None, a | {name: np.zeros((6, 2, 32), np.float32)})


def test_a_node_without_its_up_projections_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = ir.load(path)
    node = next(n for n in model.graph if n.domain == DOMAIN)
    spec = attention_spec(6, 2, 24, v_head_size=16, rotary_size=8, key_split=8, nope_size=16, out_size=4)
    for name, value in spec.attributes().items():
        node.attributes[name] = ir.convenience.convert_attribute(name, value)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = None
    ir.save(model, path)
    a = feeds(inputs(dataclasses.replace(spec, nope_size=0, out_size=0), [[0, 3, 50]], 3, 60, 70, cache=np.float16))
    with pytest.raises(Exception, match=f'"{NODE}": it has 10 inputs, expected 12, k_up and v_up too, where nope_size'):
        session(path).run(None, a)


@pytest.mark.parametrize(
    ("cache", "format", "message"),
    [
        (np.float16, "int8", "past_key is of floats, caches of cache_format int8 are of int8"),
        ("int8", "none", "past_key is of int8, caches of cache_format none are of floats"),
        ("int8", "fp8_e4m3", "past_key is of int8, caches of cache_format fp8_e4m3 are of uint8"),
        ("fp8_e4m3", "int8_token", "past_key is of uint8, caches of cache_format int8_token are of int8"),
    ],
)
def test_caches_of_another_type_than_their_format_are_named(
    tmp_path: Path, cache: Any, format: str, message: str
) -> None:
    path = write(tmp_path, cache=cache, spec=dataclasses.replace(SPEC, cache_format=format))
    with pytest.raises(Exception, match=f'CachedAttention node "{NODE}": {message}'):
        session(path)


@pytest.mark.parametrize("cache", CODES)
def test_widths_of_codes_are_inferred(tmp_path: Path, cache: Any) -> None:
    found = {o.name: (o.shape, o.type) for o in session(write(tmp_path, cache=cache, past="L")).get_outputs()}
    for name, width in zip(("present_key", "present_value"), SPECS[cache].cache_widths, strict=True):
        assert found[name] == (["B", 2, "L", width], f"tensor({SPECS[cache].cache_dtype})")


def test_rows_that_cannot_be_are_named(tmp_path: Path) -> None:
    a = inputs(SPEC, [[0, 3, 50], [1, 2, 59]], tokens=3, past=60, length=60, cache=np.float16)
    message = "the cache past_key has 60 slots, and this run needs 61: 3 tokens are new, attention_mask has 60 columns"
    with pytest.raises(Exception, match=f'"{NODE}": {message}; bind a cache with more slots, or feed fewer tokens'):
        session(write(tmp_path)).run(None, feeds(a))


@pytest.mark.parametrize("cache", CACHES[1:])
@pytest.mark.parametrize(
    ("tokens", "before", "length", "needed"),
    [(8, 0, 8, 8), (8, 0, 6, 8), (8, 3, 11, 11), (1, 6, 7, 7), (2, 1, 9, 9)],
)
def test_more_tokens_than_a_bound_cache_has_slots(
    tmp_path: Path, cache: Any, tokens: int, before: int, length: int, needed: int
) -> None:
    """A prompt or a later turn, with a mask of all tokens, all slots or more: cache, slots and tokens are named."""
    s = session(write(tmp_path, cache=cache))
    a = inputs(SPECS[cache], [[0, tokens, before]], tokens=tokens, past=6, length=length, cache=cache)
    binding = s.io_binding()
    for name, array in feeds(a).items():
        if not name.startswith("past"):
            binding.bind_cpu_input(name, array)
    for name, array in zip(("key", "value"), a.past, strict=True):
        value = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    binding.bind_output("output")
    message = (
        f"the cache past_key has 6 slots, and this run needs {needed}: {tokens} tokens are new, attention_mask has "
        f"{length} columns; bind a cache with more slots, or feed fewer tokens"
    )
    with pytest.raises(Exception, match=f'"{NODE}": {message}'):
        s.run_with_iobinding(binding)


@pytest.mark.parametrize("missing", ["past_key", "past_value", "rows", "cos", "sinks"])
def test_an_input_that_is_not_bound(tmp_path: Path, missing: str) -> None:
    s = session(write(tmp_path))
    binding = s.io_binding()
    for name, array in feeds(inputs(SPEC, [[0, 3, 0]], tokens=3, past=5, length=5, cache=np.float16)).items():
        if name != missing:
            binding.bind_cpu_input(name, array)
    for output in s.get_outputs():
        binding.bind_output(output.name)
    with pytest.raises(Exception, match=f'"{NODE}": input {missing} is missing: feed it, or bind it'):
        s.run_with_iobinding(binding)


def test_bad_attributes_are_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    model = ir.load(path)
    node = next(n for n in model.graph if n.domain == DOMAIN)
    node.attributes["rotary_size"] = ir.AttrInt64("rotary_size", 7)
    ir.save(model, path)
    with pytest.raises(Exception, match=f'"{NODE}": rotary_size is 7, expected an even number'):
        session(path)
