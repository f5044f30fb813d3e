"""The execution provider for com.microsoft's QMoE and MatMulNBits, beside ONNX Runtime's own kernels."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.models.existing import (
    error,
    is_claimed,
    linear,
    moe,
    narrowed,
    needs_provider,
    nvfp4_moe,
    outputs,
    run,
    said,
    session,
    with_input,
)
from support.operators.bounds import check, check_linear
from support.operators.cases import Case
from support.operators.specs import moe_spec, projection, routing_spec

from quantmoe import ort_ext
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import cpu_panel, join
from quantmoe.custom_ops.reference import quant_moe, route

#: float32 on both sides, sums in another order, as tests/export/targets/test_target_ort.py
BOUND = 2e-5
#: Half a step of 1/127 of a row's or block's largest is 0.4 % of it, in each of a layer's products, on both sides.
ROUNDED = 0.05


CASE = Case(weights=("int4", "f32", False), activation_format="none", bias=True, hidden=64, intermediate=96)


@needs_provider
@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(
    ("kind", "group", "n", "k"),
    [
        ("int4", 32, 300, 416),
        ("int4", 64, 7, 200),
        ("int4", 128, 40, 128),
        ("int4", 16, 33, 48),
        ("int8", 32, 300, 160),
    ],
)
def test_a_linear(capfd, kind, group, n, k, zero_points, accuracy_level):
    """More rows than are packed at once, rows and columns that fill no panel or block, one block."""
    m = Case(weights=(kind, "f32", zero_points), group_size=group, bias=True).matrix(np.random.default_rng(0), n, k)
    source = linear(m, np.float32, accuracy_level=accuracy_level)
    assert is_claimed(source, capfd)
    ours, theirs = session(source), session(source, provider=False)
    p = projection(kind, group, "f32", "int8_group" if accuracy_level else "none", zero_points=int(zero_points), bias=1)
    for tokens in (1, 3, 17):
        x = np.random.default_rng(tokens).standard_normal((tokens, k)).astype(np.float32)
        found = run(ours, x=x)
        check_linear(x, m, p, found)
        assert error(found, run(theirs, x=x)) < (ROUNDED if accuracy_level else BOUND)
    assert run(ours, x=np.zeros((0, k), np.float32)).shape == (0, n)


@needs_provider
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize(("group", "n", "k"), [(32, 300, 416), (16, 7, 40), (128, 40, 128)])
def test_a_linear_of_two_bits(capfd, group, n, k, zero_points):
    m = Case(weights=("int4", "f32", zero_points), group_size=group, bias=True).matrix(np.random.default_rng(0), n, k)
    source = linear(narrowed(m, 2), np.float32, 2)
    assert is_claimed(source, capfd)
    p = projection("int4", group, "f32", "none", zero_points=int(zero_points), bias=1)
    x = np.random.default_rng(1).standard_normal((17, k)).astype(np.float32)
    found = run(session(source), x=x)
    check_linear(x, narrowed(m, 2), p, found)
    assert error(found, run(session(source, provider=False), x=x)) < BOUND


@needs_provider
@pytest.mark.parametrize(
    ("widths", "zero_points"),
    [((2, 2), False), ((2, 2), True), ((3, 3), False), ((3, 2), False), ((2, 4), False), ((4, 8), False)],
)
def test_a_layer_of_other_widths(capfd, widths, zero_points):
    """Codes of 2 and 3 bits have the values that ONNX Runtime's documentation of QMoE says, gate and up beside down of
    another width. Its CPU kernel is compared where it has one."""
    case = replace(CASE, weights=("int4", "f32", zero_points))
    wide = replace(CASE, weights=("int8", "f32", zero_points))
    experts = []
    for e in range(case.experts):
        own, other = case.expert(np.random.default_rng(e)), wide.expert(np.random.default_rng(e))
        up, down = (own if width < 8 else other for width in widths)
        parts = ((up.gate, widths[0]), (up.up, widths[0]), (down.down, widths[1]))
        experts.append(Expert(*(narrowed(m, width) if width < 4 else m for m, width in parts)))
    dtype = np.float16 if 3 in widths else np.float32  # ONNX Runtime has 3 bits with 16-bit floats alone
    own = {"activation_type": "swiglu", "normalize_routing_weights": 0, "weights_prepacked": 0}
    source = moe(case, experts, dtype, True, widths, **own)
    assert is_claimed(source, capfd)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((33, case.hidden)).astype(dtype)
    probs, factors = (rng.uniform(0.1, 1, (33, case.experts)).astype(dtype) for _ in range(2))
    found = run(session(source), x=x, probs=probs, factors=factors)
    ids = np.argsort(-probs, 1)[:, : case.top_k].astype(np.int32)
    pair = reduce(join, (cpu_panel.describe(expert, "none") for expert in experts))
    spec = moe_spec(case.experts, case.hidden, case.intermediate, *pair)
    want = quant_moe(spec, experts, x, ids, np.take_along_axis(factors, ids, 1))
    assert error(found, want) < (BOUND if dtype == np.float32 else 2**-10)
    if widths == (2, 2):
        assert error(found, run(session(source, provider=False), x=x, probs=probs, factors=factors)) < BOUND


@needs_provider
@pytest.mark.parametrize("columns", [False, True])
def test_a_layer_of_nvfp4(capfd, columns):
    """Either order of codes, beside the reference: ONNX Runtime's CPU provider has no kernel to compare with."""
    case = replace(CASE, weights=("nvfp4", "e4m3", False), group_size=16, bias=False)
    experts = [case.expert(np.random.default_rng(e)) for e in range(case.experts)]
    experts = [replace(e, up=replace(e.up, global_scale=e.gate.global_scale)) for e in experts]
    source = nvfp4_moe(case, experts, columns)
    assert is_claimed(source, capfd)
    rng = np.random.default_rng(0)
    x, probs = (rng.standard_normal((33, size)).astype(np.float32) for size in (case.hidden, case.experts))
    found = run(session(source), x=x, probs=probs)
    ids, weights = route(routing_spec(case.experts, case.top_k, "topk_softmax"), probs)
    spec = moe_spec(case.experts, case.hidden, case.intermediate, *cpu_panel.describe(experts[0], "none"))
    assert error(found, quant_moe(spec, experts, x, ids, weights)) < BOUND


@needs_provider
def test_a_linear_of_float16(capfd):
    m = Case(weights=("int4", "f16", True), group_size=32).matrix(np.random.default_rng(0), 40, 96)
    source = linear(m, np.float16)
    assert is_claimed(source, capfd)
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float16)
    found = run(session(source), x=x)
    want = x.astype(np.float64) @ m.dequantize().astype(np.float64).T
    np.testing.assert_allclose(found, want, rtol=2**-11 * 1.01, atol=BOUND)  # one rounding to float16


@needs_provider
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize(
    "case",
    [
        Case(bias=True),
        Case(weights=("int4", "f32", True), activation="swiglu_oai", bias=True),
        Case(weights=("int8", "f32", False), intermediate=64),
        Case(weights=("int8", "f32", True), experts=5, top_k=5),
        Case(group_size=-1, activation="swiglu_oai"),
        Case(gated=False, bias=True),
        Case(gated=False, activation="gelu_tanh"),
        Case(hidden=512, intermediate=544, experts=2, top_k=1),
    ],
    ids=lambda case: f"{case.weights[0]}-{case.activation}-{case.hidden}x{case.experts}",
)
def test_a_layer(capfd, case, activations):
    """Byte for byte what our operator gives for panels that Python packed."""
    rounded = "none" if activations == "float" else "int8_group"
    kind, _, zero_points = case.weights
    case = replace(case, weights=(kind, "f32", zero_points), activation_format=rounded)
    layer = case.build()
    for fusion in (1, 2) if case.gated else (0,):
        source = moe(case, layer.experts, np.float32, True, swiglu_fusion=fusion, normalize_routing_weights=0)
        assert is_claimed(source, capfd, activations=activations)
        ours = session(source, activations=activations)
        for tokens in (1, 5, 33):
            x, ids, weights = case.tokens(tokens)
            probs, factors = np.zeros((2, tokens, case.experts), np.float32)
            # as an export has it: what is not selected is far below
            np.put_along_axis(probs, ids, 1 + np.arange(case.top_k, dtype=np.float32)[::-1], 1)
            np.put_along_axis(factors, ids, weights, 1)
            found = run(ours, x=x, probs=probs, factors=factors)
            check(layer, (x, ids, weights), found)
            np.testing.assert_array_equal(found, layer.native()(x, ids, weights))


@needs_provider
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("accuracy_level", [0, 4])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_a_layer_beside_onnxruntime(capfd, activation, accuracy_level, dtype):
    case = replace(CASE, activation=activation, weights=("int4", "f16", True), bias=False)
    experts = [case.expert(np.random.default_rng(e)) for e in range(case.experts)]
    if accuracy_level and tuple(map(int, ort.__version__.split(".")[:2])) < ort_ext.OLDEST_ACCURACY:
        pytest.skip("this onnxruntime's QMoE has no accuracy_level")
    source = moe(case, experts, dtype, **{"accuracy_level": accuracy_level} if accuracy_level else {})
    assert is_claimed(source, capfd)
    ours, theirs = session(source), session(source, provider=False)
    for tokens in (1, 7, 65):
        rng = np.random.default_rng(tokens)
        x = rng.standard_normal((tokens, case.hidden)).astype(dtype)
        probs = rng.standard_normal((tokens, case.experts)).astype(dtype)
        bound = ROUNDED if accuracy_level else BOUND if dtype == np.float32 else 2**-10
        assert error(run(ours, x=x, probs=probs), run(theirs, x=x, probs=probs).astype(np.float64)) < bound


@needs_provider
@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_routing_is_onnxruntimes(weighted, normalize):
    """Equal scores, weights that are negative or nothing, scores of -10,000."""
    experts = [CASE.expert(np.random.default_rng(e)) for e in range(CASE.experts)]
    source = moe(CASE, experts, np.float32, weighted, normalize_routing_weights=normalize)
    ours, theirs = session(source), session(source, provider=False)
    probs = np.array([[0, 0, 0, 0], [1, 2, 2, 1], [3, -1e4, -1e4, -1e4], [-1, -2, -3, 5]], np.float32)
    factors = np.array([[1, 2, 3, 4], [0.5, -1, 2, 1], [1, 0, 0, 0], [-1, 1, 1, -1]], np.float32)
    given = {"x": np.random.default_rng(0).standard_normal((4, CASE.hidden)).astype(np.float32), "probs": probs}
    given |= {"factors": factors} if weighted else {}
    found, want = run(ours, **given), run(theirs, **given)
    np.testing.assert_allclose(found, want, rtol=0, atol=BOUND * np.abs(want).max())
    assert np.isnan(run(ours, **given | {"probs": probs * np.float32("nan")})).all()


MATRIX = Case(weights=("int4", "f32", False), group_size=32).matrix(np.random.default_rng(0), 24, 64)


@needs_provider
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: with_input(linear(MATRIX, np.float32), 3, np.full((24, 2), 8, np.float32)), "zero_points has a type"),
        (lambda: with_input(linear(MATRIX, np.float32), 4, np.repeat(np.int32([0, 1]), 32)), "it has g_idx"),
        (
            lambda: moe(CASE, EXPERTS, np.float32, activation_beta=0.5, activation_alpha=1.0),
            "expected beta 1, or alpha 1",
        ),
        (lambda: moe(CASE, EXPERTS, np.float32, swiglu_limit=5.0), "beta 0 and no limit"),
    ],
)
def test_what_stays_with_onnxruntime(capfd, make, why):
    source = make()
    ours = session(source, severity=0)
    lines = said(capfd)
    assert any("the node stays with ONNX Runtime: " in line and why in line for line in lines), lines
    x = {i.name: np.random.default_rng(0).random((3, i.shape[1]), np.float32) for i in ours.get_inputs()}
    np.testing.assert_array_equal(run(ours, **x), run(session(source, provider=False), **x))


EXPERTS = [CASE.expert(np.random.default_rng(e)) for e in range(CASE.experts)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A layer, its weights in a data file."""
    path = tmp_path / "model.onnx"
    ir.save(moe(CASE, EXPERTS, np.float32), path, external_data="model.onnx.data")
    return path


def identity(cache: Path) -> tuple[int, int]:
    found = cache.stat()
    return found.st_ino, found.st_mtime_ns


@needs_provider
def test_the_cache_is_written_once(saved):
    cache = saved.with_name("model.onnx.quantmoe")
    want = outputs(session(saved, cache="off"))
    assert not cache.exists()
    np.testing.assert_array_equal(outputs(session(saved)), want)
    written = identity(cache)
    for options in ({}, {"verify": "1"}, {"activations": "int8"}):  # whose panels are the same
        found = outputs(session(saved, **options))
        assert "activations" in options or np.array_equal(found, want)
        assert identity(cache) == written
    assert sorted(p.name for p in saved.parent.iterdir()) == ["model.onnx", "model.onnx.data", cache.name]
    elsewhere = saved.parent / "cache of this"
    session(saved, cache=str(elsewhere))
    assert elsewhere.read_bytes() == cache.read_bytes()


@needs_provider
def test_a_model_without_a_path_has_no_cache(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    session(moe(CASE, EXPERTS, np.float32), severity=1)
    assert "weights are packed into memory: the model has no path" in said(capfd)
    assert not list(tmp_path.iterdir())


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@needs_provider
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:50], "it has no header"),
        (lambda data: flip(data, 16), "it has version 3, expected 2"),
        (lambda data: data[:-1], "it has .* bytes, expected"),
        (lambda data: flip(data, 20), "its table is cut off|its header is damaged"),
        (lambda data: data[:20] + b"\xff\xff\xff\xff" + data[24:], "its table is cut off"),
        (lambda data: flip(data, 40), "its header is damaged"),
        (lambda data: flip(data, 100), "its header is damaged"),
        (lambda data: flip(data, 4096), "its weights are damaged"),  # of the first tensor's first line
    ],
)
def test_a_damaged_cache_is_written_anew(saved, capfd, damage, why):
    want, cache = outputs(session(saved)), saved.with_name("model.onnx.quantmoe")
    whole = cache.read_bytes()
    cache.write_bytes(damage(whole))
    assert cache.read_bytes() != whole
    capfd.readouterr()
    np.testing.assert_array_equal(outputs(session(saved, severity=1)), want)
    assert any(re.search(f"model.onnx.quantmoe is written anew: ({why})", line) for line in said(capfd))
    assert cache.read_bytes() == whole


@needs_provider
def test_a_flipped_bit_anywhere_before_the_weights(saved):
    """Version, table, sums: the whole file comes back, and never an error or another result."""
    want, cache = outputs(session(saved)), saved.with_name("model.onnx.quantmoe")
    whole = cache.read_bytes()
    table = len(whole[:4096].rstrip(b"\0"))
    for at in range(len(MAGIC), table, 7):
        cache.write_bytes(flip(whole, at))
        np.testing.assert_array_equal(outputs(session(saved)), want)
        assert cache.read_bytes() == whole, at


MAGIC = b"QuantMoE packed\0"


@needs_provider
@pytest.mark.parametrize(
    ("content", "named"),
    [(c, n) for c in (b"", MAGIC[:-1], b"notes of mine" * 1000) for n in (True, False)] + [(None, True)],
)
def test_a_file_that_is_no_cache_is_left_as_it_is(saved, capfd, content, named):
    """Also an empty one, and the model's own weights (None) under the option `cache`."""
    want, cache = outputs(session(saved, cache="off")), saved.with_name("model.onnx.quantmoe")
    if content is None:
        cache = saved.with_name("model.onnx.data")
    else:
        cache.write_bytes(content)
    before, files = cache.read_bytes(), sorted(saved.parent.iterdir())
    capfd.readouterr()
    for _ in range(2):
        np.testing.assert_array_equal(
            outputs(session(saved, severity=2, **{"cache": str(cache)} if named else {})), want
        )
        (line,) = said(capfd)
        assert line.endswith(
            f"{cache} cannot be written, weights are packed into memory each time: "
            "a file that is no cache of packed weights has this name, and is left as it is"
        )
    assert cache.read_bytes() == before
    assert sorted(saved.parent.iterdir()) == files


@needs_provider
@pytest.mark.parametrize("target", ["free", "file", "cache"])
def test_a_cache_is_never_written_through_a_link(saved, tmp_path_factory, capfd, target):
    """A whole cache at the link's other end is read; what is written has a name of its own."""
    cache, elsewhere = saved.with_name("model.onnx.quantmoe"), tmp_path_factory.mktemp("other") / "theirs"
    want = outputs(session(saved, cache="off"))
    if target == "file":
        elsewhere.write_bytes(b"theirs")
    elif target == "cache":
        session(saved, cache=str(elsewhere))
    before = elsewhere.read_bytes() if elsewhere.exists() else None
    cache.symlink_to(elsewhere)
    capfd.readouterr()
    np.testing.assert_array_equal(outputs(session(saved, severity=2)), want)
    lines = said(capfd)
    assert [line.rpartition(": ")[2] for line in lines] == ([] if target == "cache" else ["it is a link"])
    assert cache.is_symlink()
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == before
    assert len(list(elsewhere.parent.iterdir())) == (before is not None)


@needs_provider
def test_names_of_temporary_files_cannot_be_known(saved):
    """Two containers have processes of one number, and share a folder; links lie in wait under such a name."""
    theirs = saved.with_name("theirs")
    theirs.write_bytes(b"theirs")
    for number in range(64):
        saved.with_name(f"model.onnx.quantmoe.{os.getpid()}.{number}.tmp").symlink_to(theirs)
    want = outputs(session(saved, cache="off"))
    np.testing.assert_array_equal(outputs(session(saved)), want)
    assert theirs.read_bytes() == b"theirs"
    assert not saved.with_name("model.onnx.quantmoe").is_symlink()


def overwrite(path: Path, at: int, data: bytes) -> None:
    """In place, and with the time of change as it was."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def tensors(path: Path) -> dict[str, tuple[int, int]]:
    """Offset and bytes of each initializer in the data file."""
    graph = ir.load(path).graph
    return {
        name: (value.const_value.offset, value.const_value.length)
        for name, value in graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    }


@needs_provider
def test_weights_that_change_while_size_and_time_stay(saved, capfd):
    """Each of a layer's tensors, codes, scales and biases of both projections: samples of it tell."""
    found = tensors(saved)
    assert len(found) == 6
    for name, (offset, length) in found.items():
        session(saved)
        data = saved.with_name("model.onnx.data")
        old = data.read_bytes()[offset : offset + length]
        overwrite(data, offset, old[::-1] if old[::-1] != old else bytes(length))
        capfd.readouterr()
        ours = outputs(session(saved, severity=1))
        assert any(line.endswith("is written anew: it is of other weights") for line in said(capfd)), name
        np.testing.assert_array_equal(ours, outputs(session(saved, cache="off")))


@needs_provider
@pytest.mark.parametrize("at", [64 + 3, 64 * 5 + 1])
def test_verify_compares_with_the_model(saved, capfd, at):
    """A byte between the samples of the source, which is no secret: the default check takes the cache."""
    data, cache = saved.with_name("model.onnx.data"), saved.with_name("model.onnx.quantmoe")
    stale = outputs(session(saved))
    offset, length = max(tensors(saved).values(), key=lambda place: place[1])
    assert length > 64 * 20
    overwrite(data, offset + at, bytes([data.read_bytes()[offset + at] ^ 0x77]))
    np.testing.assert_array_equal(outputs(session(saved)), stale)
    want = outputs(session(saved, cache="off"))
    assert not np.array_equal(want, stale)
    capfd.readouterr()
    np.testing.assert_array_equal(outputs(session(saved, verify="1", severity=1)), want)
    assert any(line.endswith("is written anew: the model's weights have changed since") for line in said(capfd))
    written = identity(cache)
    np.testing.assert_array_equal(outputs(session(saved, verify="1")), want)
    assert identity(cache) == written


@needs_provider
def test_verify_finds_a_byte_between_samples(saved, capfd):
    want, cache = outputs(session(saved)), saved.with_name("model.onnx.quantmoe")
    whole = cache.read_bytes()
    cache.write_bytes(flip(whole, 4096 + 64))
    assert not np.array_equal(outputs(session(saved)), want)
    np.testing.assert_array_equal(outputs(session(saved, verify="1", severity=1)), want)
    assert any(line.endswith("its weights are damaged") for line in said(capfd))
    assert cache.read_bytes() == whole


@needs_provider
@pytest.mark.parametrize("external", [True, False])
def test_a_stale_cache_is_written_anew(tmp_path, capfd, external):
    path = tmp_path / "model.onnx"
    for seed in (0, 1):
        experts = [CASE.expert(np.random.default_rng(e + 10 * seed)) for e in range(CASE.experts)]
        source = moe(CASE, experts, np.float32)
        ir.save(source, path, external_data="model.onnx.data" if external else None)
        capfd.readouterr()
        found = outputs(session(path, severity=1))
        assert seed == 0 or any(line.endswith("is written anew: it is of other weights") for line in said(capfd))
        np.testing.assert_array_equal(found, outputs(session(source)))
    written = identity(tmp_path / "model.onnx.quantmoe")
    if external:
        os.utime(tmp_path / "model.onnx.data", ns=(0, 0))
        outputs(session(path))
        assert identity(tmp_path / "model.onnx.quantmoe") != written


@needs_provider
def test_a_folder_that_cannot_be_written(saved, capfd):
    """Root may write everywhere, but not where a folder stands."""
    saved.with_name("model.onnx.quantmoe").mkdir()
    want = outputs(session(saved, cache="off"))
    capfd.readouterr()
    np.testing.assert_array_equal(outputs(session(saved, severity=2)), want)
    lines = said(capfd)
    assert len(lines) == 1
    assert "model.onnx.quantmoe cannot be written, weights are packed into memory each time: " in lines[0]
    assert sorted(p.name for p in saved.parent.iterdir()) == ["model.onnx", "model.onnx.data", "model.onnx.quantmoe"]
    session(saved, severity=2, cache=str(saved.parent / "missing" / "cache"))
    assert "No such file" in said(capfd)[0]


@needs_provider
def test_two_sessions_at_once(saved):
    ort_ext.provider_devices()
    want = outputs(session(saved, cache="off"))
    found: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: found.append(outputs(session(saved)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(np.array_equal(each, want) for each in found)
    assert len(list(saved.parent.iterdir())) == 3  # nothing is left behind


@needs_provider
@pytest.mark.parametrize(("option", "expected"), [("activations", "auto, float or int8"), ("verify", "0 or 1")])
def test_options_are_checked(saved, option, expected):
    with pytest.raises(Exception, match=f'quantmoe: provider option {option} is "2", expected {expected}'):
        session(saved, **{option: "2"})


@needs_provider
@pytest.mark.parametrize("option", ["activations", "cache", "verify"])
def test_an_empty_option_is_none_of_the_values(saved, option):
    with pytest.raises(Exception, match=f'quantmoe: provider option {option} is "", expected '):
        session(saved, **{option: ""})


@needs_provider
@pytest.mark.parametrize("option", ["activation", "Cache", "verify ", "ep.quantmoe.cache", ""])
def test_options_of_other_names_are_refused(saved, option):
    """Also beside a known one that is wrong: a name that is not read would be taken for one that is."""
    expected = f'there is no provider option "{re.escape(option)}", expected one of activations, cache, verify'
    for others in ({}, {"activations": "int8"}, {"verify": "2"}):
        with pytest.raises(Exception, match=expected):
            session(saved, **{option: "off"}, **others)


@needs_provider
def test_entries_of_the_session_are_no_options(saved):
    """ONNX Runtime's own, of another provider, and of the operators."""
    options = ort.SessionOptions()
    for entry in ("session.use_env_allocators", "ep.quantmoe2.cache", "ep.context_enable", "quantmoe.verify"):
        options.add_session_config_entry(entry, "0")
    options.add_provider_for_devices(ort_ext.provider_devices(), {"cache": "off"})
    np.testing.assert_array_equal(outputs(ort.InferenceSession(saved, options)), outputs(session(saved)))


@needs_provider
def test_inputs_of_a_run_are_checked(saved):
    ours, x = session(saved), np.zeros((3, CASE.hidden), np.float32)
    with pytest.raises(Exception, match=r"the node: router_probs has shape \[2, 4\], expected \[3, 4\]"):
        run(ours, x=x, probs=np.zeros((2, CASE.experts), np.float32))


class Api(ctypes.Structure):
    _fields_ = (("create_status", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)),)


class ApiBase(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)),
        ("version", ctypes.CFUNCTYPE(ctypes.c_void_p)),
    )


def test_an_older_onnxruntime_is_told():
    """As 1.23 calls the library: it has no API 24."""
    messages: list[bytes] = []

    def create_status(code: int, message: bytes) -> int:
        messages.append(message)
        return 1

    version = ctypes.create_string_buffer(b"1.23.2")
    api = Api(Api._fields_[0][1](create_status))
    base = ApiBase(
        ApiBase._fields_[0][1](lambda version: ctypes.addressof(api) if version < 24 else None),
        ApiBase._fields_[1][1](lambda: ctypes.addressof(version)),
    )
    create = ctypes.CDLL(ort_ext.library_path()).CreateEpFactories
    create.restype, count = ctypes.c_void_p, ctypes.c_size_t(7)
    room = (ctypes.c_void_p * 4)()
    assert create(b"QuantMoE", ctypes.byref(base), None, room, ctypes.c_size_t(4), ctypes.byref(count)) == 1
    assert messages == [b"quantmoe's execution provider needs ONNX Runtime 1.24 or newer, found 1.23.2"]
    assert count.value == 0


def test_an_older_onnxruntime_is_told_in_python(monkeypatch):
    monkeypatch.setattr(ort, "__version__", "1.23.2")
    with pytest.raises(ImportError, match=r"the execution provider needs onnxruntime 1\.24, found 1\.23\.2"):
        ort_ext.provider_devices()


@needs_provider
def test_the_sample_with_an_empty_cache(tmp_path):
    """One new token of a language model, and nothing past."""
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Concat", ["past", "new", "both"], ["y"], axis=1)],
        "cache",
        [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch_size", size])
            for name, size in (("past", "past_sequence_length"), ("new", "n"), ("both", "past_sequence_length + n"))
        ],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)]), tmp_path / "model.onnx")
    sample = [sys.executable, str(Path(__file__).parents[2] / "samples" / "python" / "provider.py")]
    done = subprocess.run([*sample, str(tmp_path / "model.onnx")], capture_output=True, text=True)
    assert done.stdout == "y: 1.000000 1.000000\n", done.stderr
    done = subprocess.run([*sample, str(tmp_path)], capture_output=True, text=True)
    assert done.stderr == f"{tmp_path} is a folder, expected a model's .onnx file\n"
