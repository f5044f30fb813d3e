"""op.def is the one place of an operator's attributes: the C structs, the dataclasses and their stub follow from it."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from quantmoe.custom_ops import native
from quantmoe.custom_ops.c_calls import ERROR_SIZE
from quantmoe.custom_ops.op_def import nodes
from quantmoe.custom_ops.op_def.schema import Schema, make_projection, make_spec, parse, read, schema, stub
from quantmoe.custom_ops.op_def.structs import STRUCTS, Value, check_structs, make_struct

SOURCES = Path(__file__).parents[2] / "custom_ops"
SPECS = [getattr(nodes, op) for op in schema().operators]
#: MoERouting's first version with attributes of each kind that a later op_version brings
LATER = """QM_ATTR_SINCE(MoERouting, 2, i, n_shared, -3)          // experts that every token has
QM_ATTR_SINCE(MoERouting, 2, f, softcap, 2.5)
QM_ATTR_SINCE(MoERouting, 3, routing_method, second, topk)
"""
ATTRIBUTES = {"num_experts": 8, "top_k": 2, "method": "softmax_topk", "renormalize": 1, "n_group": 1, "topk_group": 1}
ATTRIBUTES |= {"routed_scaling_factor": 1.5}


def later_text() -> str:
    text = read(SOURCES)
    text, versions = re.subn(r"QM_OP\(MoERouting, routing, \d+\)", "QM_OP(MoERouting, routing, 3)", text)
    assert versions == 1
    text = re.sub(r"QM_ATTR_SINCE\(MoERouting.*\n", "", text)
    return text.replace("QM_END(MoERouting", LATER + "QM_END(MoERouting")


@pytest.fixture(scope="module")
def later() -> Schema:
    return parse(later_text())


def routing_of(later: Schema) -> type:
    return make_spec(later, "MoERouting", make_projection(later))


def test_the_stub_is_what_op_def_says() -> None:
    """make format"""
    assert (SOURCES / "op_def/nodes.pyi").read_text(encoding="utf-8") == stub(schema())


@pytest.mark.parametrize("spec", SPECS)
def test_no_attribute_has_a_default(spec: type) -> None:
    given = dict.fromkeys(spec.OPERATOR.attributes, 0) | dict.fromkeys(spec.OPERATOR.projections, None)
    fields = {name: given[name] for name in spec.__dataclass_fields__ if name != "op_version"}
    assert spec(**fields).op_version == spec.OPERATOR.version
    later = {name for name, a in spec.OPERATOR.attributes.items() if a.since > 1}  # "absent" says
    for name in fields.keys() - later:
        with pytest.raises(TypeError, match=name):
            spec(**{n: v for n, v in fields.items() if n != name})


def test_files_have_the_names_of_their_operators() -> None:
    files = {file.stem for file in (SOURCES / "ops").glob("*.def")}
    assert files == {operator.snake for operator in schema().operators.values()}


def test_a_later_attribute(later: Schema) -> None:
    routing = routing_of(later)
    spec = routing(**ATTRIBUTES)
    assert (spec.op_version, spec.n_shared, spec.softcap, spec.second) == (3, -3, 2.5, "topk")
    assert routing.from_attributes(spec.attributes()) == spec
    assert list(spec.attributes())[-3:] == ["n_shared", "softcap", "second"]
    old = routing.from_attributes(ATTRIBUTES | {"op_version": 1})
    assert (old.op_version, old.n_shared, old.softcap, old.second) == (1, -3, 2.5, "topk")
    assert old.attributes() == ATTRIBUTES | {"op_version": 1}
    second = routing.from_attributes(ATTRIBUTES | {"op_version": 2, "n_shared": 4, "softcap": 0.5})
    assert (second.n_shared, second.softcap, second.second) == (4, 0.5, "topk")
    assert "    n_shared: int = ...  # experts that every token has\n" in stub(later)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op_version": 4}, "op_version is 4, this release knows 1 to 3"),
        ({"op_version": 0}, "op_version is 0, this release knows 1 to 3"),
        ({"op_version": "1"}, "op_version is 1, this release"),
        ({"op_version": 2}, r"lacks the attributes \['n_shared', 'softcap'\]"),
        ({"op_version": 1, "softcap": 1.0}, r"unknown attributes \['softcap'\]"),
        (
            {"op_version": 3, "n_shared": 1, "softcap": 1.0, "second": "best"},
            "second is 'best'; supported: softmax_topk",
        ),
    ],
)
def test_attributes_of_another_version_are_refused(later: Schema, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        routing_of(later).from_attributes(ATTRIBUTES | changes)


def test_what_an_older_version_cannot_say_is_refused(later: Schema) -> None:
    spec = routing_of(later)(**ATTRIBUTES, op_version=1, n_shared=1)
    with pytest.raises(ValueError, match="n_shared needs op_version 2, found 1"):
        spec.attributes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("QM_ATTR(MoERouting, u, x)", "x is of kind u, expected i, f or an enum: activation"),
        ("QM_ATTR_SINCE(MoERouting, 99, i, x, 0)", r"x is of op_version 99, MoERouting is of \d"),
        ("QM_ATTR_SINCE(MoERouting, 1, format, x, int7)", "absent means int7, expected one of: int4"),
    ],
)
def test_a_line_that_cannot_be(line: str, message: str) -> None:
    text = read(SOURCES)
    with pytest.raises(ValueError, match=message):
        parse(text.replace("QM_END(MoERouting", f"{line}\nQM_END(MoERouting"))


def test_the_librarys_structs_are_these() -> None:
    check_structs(native.library())


@pytest.fixture(scope="module")
def later_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """attributes.cc with the lines of LATER, and nothing else changed."""
    folder = tmp_path_factory.mktemp("later")
    (folder / "op.def").write_text(later_text(), encoding="utf-8")
    folders = [f"-I{f}" for f in (folder, SOURCES / "include", SOURCES / "src")]
    source, library = SOURCES / "src/core/attributes.cc", folder / "libattributes.so"
    subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", *folders, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def test_an_attribute_of_the_c_structs_is_one_line(later: Schema, later_library: ctypes.CDLL) -> None:
    check_structs(later_library, later.operators.values())
    now, then = (
        ctypes.sizeof(struct) for struct in (STRUCTS["MoERouting"], make_struct(later.operators["MoERouting"]))
    )
    with pytest.raises(
        OSError,
        match=rf"another op.def.*: qm_routing has {then} bytes, expected {now}; .*n_shared, second, shared_.*soft",
    ):
        check_structs(later_library)
    with pytest.raises(OSError, match=rf"qm_routing has {now} bytes, expected {then}; .*n_shared"):
        check_structs(native.library(), later.operators.values())


def test_absence_in_c_is_what_op_def_says(later: Schema, later_library: ctypes.CDLL) -> None:
    err, lib, op = ctypes.create_string_buffer(ERROR_SIZE), later_library, b"MoERouting"
    node = make_struct(later.operators["MoERouting"])()

    def set_version(version: int) -> int:
        value = Value(b"op_version", b"i", integer=version)
        return lib.qm_set_attributes(op, ctypes.byref(node), ctypes.byref(value), ctypes.c_size_t(1), err)

    for version, message in ((4, "op_version is 4, this library knows 1 to 3"), (0, "op_version is 0, this library")):
        assert set_version(version) == 2
        assert err.value.decode().startswith(message)
    assert set_version(1) == 0
    topk = schema().enums["routing_method"]["topk"]
    assert (node.op_version, node.n_shared, node.softcap, node.second) == (1, -3, 2.5, topk)
    node.n_shared, node.softcap, node.second = 4, 0.5, 0
    assert set_version(2) == 0
    assert (node.n_shared, node.softcap, node.second) == (4, 0.5, topk)


def test_a_code_that_op_def_lacks_is_refused() -> None:
    """In a struct that a C program fills."""
    err, lib = ctypes.create_string_buffer(ERROR_SIZE), native.library()
    node = STRUCTS["MoERouting"](op_version=1, num_experts=8, top_k=2, method=5, n_group=1, topk_group=1)
    assert lib.qm_validate(b"MoERouting", ctypes.byref(node), None, err) == 1
    assert err.value.decode() == (
        "method is 5, no code of the operator's: softmax_topk, topk_softmax, sigmoid_topk, topk_sigmoid, topk"
    )
    assert not lib.qm_find_operator(b"Attention")
