"""AllReduce, AllGather and ReduceScatter in ONNX Runtime on the CPU: sessions of one process, a thread each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from engines.test_ort_others import FLOATS

from quantmoe import ort_library_path
from quantmoe.custom_ops.op import DOMAIN, GatherSpec, ReduceSpec, ScatterSpec
from quantmoe.custom_ops.reference import all_gather, all_reduce, reduce_scatter

SPECS = {"AllReduce": ReduceSpec, "AllGather": GatherSpec, "ReduceScatter": ScatterSpec}
OPERATORS = ("AllReduce", "AllGather")
NAMES = (f"group {i}" for i in count())


def write(
    path: Path,
    rank: int,
    world: int,
    float_type: str = "FLOAT",
    node: str = "sum",
    op: str = "AllReduce",
    axis: int = -1,
    export_ids: tuple[int, int] = (0, 0),
    **given_version: int,
) -> Path:
    """x f32 [rows, 8] -> its sums over the ranks, or all ranks', twice: y of x, z of y."""
    dtype = ir.DataType[float_type]
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["rows", 8]))
    nodes = [ir.node("Cast", [x], {"to": int(dtype)})]
    nodes[0].outputs[0].type = ir.TensorType(dtype)
    outputs = []
    for i, name in enumerate("yz"):
        own = {"axis": axis} if op == "AllGather" else {}
        place = {"rank": rank, "world": world, "export_id": export_ids[i]}
        attributes = SPECS[op](**place, **own, **given_version).attributes()
        given = nodes[-1 if i == 0 else -2].outputs
        nodes.append(ir.node(op, given, attributes, domain=DOMAIN, name=f"{node}.{i}"))
        nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": int(ir.DataType.FLOAT)}))
        nodes[-1].outputs[0].name, nodes[-1].outputs[0].type = name, x.type
        outputs += nodes[-1].outputs
    graph = ir.Graph([x], outputs, nodes=nodes, opset_imports={"": 20, DOMAIN: 1}, name="sums")
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def session(path: Path, group: str | None, timeout: str | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    for key, value in (("group", group), ("timeout", timeout)):
        if value is not None:
            options.add_session_config_entry(f"quantmoe.{key}", value)
    options.register_custom_ops_library(ort_library_path())
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(sessions: Sequence[ort.InferenceSession], inputs: Sequence[np.ndarray]) -> list[list[np.ndarray] | Exception]:
    """Outputs of each session, or what it raised."""

    def one(session: ort.InferenceSession, x: np.ndarray) -> list[np.ndarray] | Exception:
        try:
            return session.run(None, {"x": x})
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(one, sessions, inputs))


def parts(world: int, rows: int = 5, seed: int = 0) -> list[np.ndarray]:
    return [*np.random.default_rng(seed).normal(0, 3, (world, rows, 8)).astype(np.float32)]


@pytest.mark.parametrize("float_type", FLOATS)
@pytest.mark.parametrize("world", [1, 2, 7])
def test_sums_in_order_of_the_ranks(tmp_path: Path, float_type: str, world: int) -> None:
    group = next(NAMES)
    sessions = [session(write(tmp_path / f"{r}.onnx", r, world, float_type), group) for r in range(world)]
    assert sessions[0].get_outputs()[0].shape == ["rows", 8]
    for seed in range(50):
        given = parts(world, 1 + seed % 4, seed)
        typed = [x.astype(FLOATS[float_type]) for x in given]
        y = all_reduce(typed)
        want = [y.astype(np.float32), all_reduce([y] * world).astype(np.float32)]
        for found in run(sessions, given):
            np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("float_type", FLOATS)
@pytest.mark.parametrize("world", [1, 2, 7])
def test_rows_in_order_of_the_ranks(tmp_path: Path, float_type: str, world: int) -> None:
    group = next(NAMES)
    paths = [write(tmp_path / f"{r}.onnx", r, world, float_type, op="AllGather") for r in range(world)]
    sessions = [session(path, group) for path in paths]
    for rows in (1, 4, 0):
        given = parts(world, rows, rows)
        y = all_gather([x.astype(FLOATS[float_type]) for x in given])
        assert y.shape == (rows, 8 * world)
        for found in run(sessions, given):
            np.testing.assert_array_equal(found[0], y.astype(np.float32))
            np.testing.assert_array_equal(found[1], all_gather([y] * world).astype(np.float32))


@pytest.mark.parametrize("float_type", FLOATS)
@pytest.mark.parametrize("world", [1, 2, 7])
def test_tokens_of_all_ranks_and_sums_of_the_own(tmp_path: Path, float_type: str, world: int) -> None:
    where = [(tmp_path / f"{op}{r}.onnx", r, world, float_type, "sum", op, 0) for op in SPECS for r in range(world)]
    sessions = [session(write(*each), f"{float_type} {world} {each[5]}") for each in where]
    gathers, scatters = sessions[world : 2 * world], sessions[2 * world :]
    for rows in (world**2, 3 * world**2, 0):
        given = parts(world, rows, rows)
        typed = [x.astype(FLOATS[float_type]) for x in given]
        y = all_gather(typed, 0)
        assert y.shape == (rows * world, 8)
        for found in run(gathers, given):
            np.testing.assert_array_equal(found[0], y.astype(np.float32))
            np.testing.assert_array_equal(found[1], all_gather([y] * world, 0).astype(np.float32))
        own = reduce_scatter(typed)
        twice = reduce_scatter(own)
        for r, found in enumerate(run(scatters, given)):
            np.testing.assert_array_equal(found[0], own[r].astype(np.float32))
            np.testing.assert_array_equal(found[1], twice[r].astype(np.float32))
    if world > 1:
        for found in run(scatters, parts(world, world + 1)):
            assert f"x has shape [{world + 1}, 8], expected [{world} * N, ..]" in str(found)


def test_an_axis_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r'AllGather node "sum.0": axis is 1, expected -1 to 0'):
        session(write(tmp_path / "0.onnx", 0, 2, op="AllGather", axis=1), next(NAMES))


def test_a_sum_and_rows_are_two_nodes(tmp_path: Path) -> None:
    group = next(NAMES)
    sessions = [session(write(tmp_path / f"{op}.onnx", r, 2, op=op), group) for r, op in enumerate(OPERATORS)]
    for found in run(sessions, parts(2)):
        assert 'rank 1 is at AllGather node "sum.0", rank 0 at AllReduce node "sum.0": expected files' in str(found)


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    group = next(NAMES)
    sessions = [session(write(tmp_path / f"{r}.onnx", r, 3), group, "1") for r in (0, 2)]
    late = session(write(tmp_path / "1.onnx", 1, 3), group, "1")
    given = parts(3)
    for found in run(sessions, given):
        assert str(found).endswith(f'AllReduce node "sum.0": the group "{group}" of 3 ranks waited 1 s for rank 1')
    del late  # and with its session gone
    assert all("waited 1 s for rank 1 (no session)" in str(found) for found in run(sessions, given))
    late = session(tmp_path / "1.onnx", group, "1")
    whole = [sessions[0], late, sessions[1]]
    np.testing.assert_array_equal(run(whole, given)[1][0], all_reduce(given))  # a failure leaves nothing behind


def test_parts_of_different_sums(tmp_path: Path) -> None:
    group = next(NAMES)
    sessions = [session(write(tmp_path / f"{r}.onnx", r, 2), group) for r in range(2)]
    given = parts(2)
    for found in run(sessions, [given[0], given[1][:2]]):
        assert "rank 1 is at 16 elements, rank 0 at 40: expected the same inputs in all ranks" in str(found)
    assert isinstance(run(sessions, given)[0], list)
    other = next(NAMES)
    sessions = [session(write(tmp_path / f"{r}.onnx", r, 2, node=f"file{r}"), other) for r in range(2)]
    for found in run(sessions, given):
        assert "expected files of one export, and runs in one order" in str(found)


def test_files_of_two_exports(tmp_path: Path) -> None:
    group = next(NAMES)
    first = session(write(tmp_path / "0.onnx", 0, 2, export_ids=(5, 5)), group)
    for ids, text in (((7, 7), "export 00000007"), ((0, 0), "an export that has no export_id")):
        with pytest.raises(
            Exception, match=f'this file is rank 1 of {text}, the group "{group}" has sessions of export 00000005'
        ):
            session(write(tmp_path / "1.onnx", 1, 2, export_ids=ids), group)
        (found,) = run([first], parts(1))
        assert f"rank 1's session was refused: this file is rank 1 of {text}, the group" in str(found)
    with ThreadPoolExecutor(1) as pool:
        second = session(write(tmp_path / "1.onnx", 1, 2, export_ids=(5, 5)), group)
        waits = pool.submit(run, [first], parts(1))
        while not waits.done():  # it may not wait yet
            with pytest.raises(Exception, match="of export 00000007"):
                session(write(tmp_path / "7.onnx", 1, 2, export_ids=(7, 7)), group)
        assert "was refused: this file is rank 1 of export 00000007" in str(waits.result())
    del second
    second = session(tmp_path / "1.onnx", group)
    assert all(isinstance(found, list) for found in run([first, second], parts(2)))
    with pytest.raises(Exception, match="is rank 1 of 2 of export 00000006, another node of the file rank 1 of 2 of"):
        session(write(tmp_path / "2.onnx", 1, 2, export_ids=(5, 6)), next(NAMES))
    with pytest.raises(Exception, match="export_id is -1, expected 0 to 2147483647"):
        session(write(tmp_path / "2.onnx", 1, 2, export_ids=(-1, -1)), group)


@pytest.mark.parametrize("op", SPECS)
def test_files_before_export_ids(tmp_path: Path, op: str) -> None:
    group, version = next(NAMES), SPECS[op].OPERATOR.version - 1
    sessions = [session(write(tmp_path / f"{r}.onnx", r, 1, op=op, op_version=version), group) for r in range(1)]
    (found,) = run(sessions, parts(1))
    assert isinstance(found, list)
    assert "export_id" not in SPECS[op](rank=0, world=1, op_version=version).attributes()


def test_what_is_no_group(tmp_path: Path) -> None:
    group = next(NAMES)
    with pytest.raises(Exception, match=r'"sum.0": this file is rank 0 of 2 of a sliced model: set the session entry'):
        session(write(tmp_path / "0.onnx", 0, 2), None)
    one = session(tmp_path / "0.onnx", group)
    with pytest.raises(Exception, match=f'the group "{group}" has a session of rank 0 already'):
        session(tmp_path / "0.onnx", group)
    with pytest.raises(Exception, match=rf'this file is rank 1 of 4, the group "{group}" has sessions of 2 ranks'):
        session(write(tmp_path / "1.onnx", 1, 4), group)
    with pytest.raises(Exception, match=r"rank is 2, expected 0 to 1"):
        session(write(tmp_path / "2.onnx", 2, 2), group)
    for text in ("0", "1.5", "soon", "86401"):
        with pytest.raises(Exception, match=rf'quantmoe.timeout is "{text}", expected 1 to 86400 seconds'):
            session(tmp_path / "0.onnx", group, text)
    del one
    session(tmp_path / "0.onnx", group)
