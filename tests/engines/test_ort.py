"""QuantMoE in ONNX Runtime, any supported version: the C ABI's bytes, errors a user can act on, mapped weights."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support.harness.children import PYTHONPATH
from support.models.one_layer import NODE, run, session, write_model
from support.operators.cases import CASES, Case, Layer
from support.operators.specs import moe_spec, projection

import quantmoe
from quantmoe.custom_ops.layouts import cpu_panel

FLOATS = {"FLOAT": np.float32, "FLOAT16": np.float16, "BFLOAT16": ml_dtypes.bfloat16}
SMALL = Case(hidden=64, intermediate=96, experts=4, top_k=2)


@pytest.fixture(scope="module")
def small() -> Layer:
    return SMALL.build()


def write(path: Path, layer: Layer, **options: object) -> Path:
    return write_model(path / "model.onnx", layer.spec, layer.w13, layer.w2, **options)


@pytest.mark.parametrize("id_type", ["INT32", "INT64"])
@pytest.mark.parametrize("float_type", FLOATS)
def test_types(tmp_path: Path, small: Layer, float_type: str, id_type: str) -> None:
    """Every (hidden_states, topk_ids) pair of types gives the C ABI's bytes."""
    s = session(write(tmp_path, small, float_type=float_type, id_type=id_type))
    x, ids, weights = SMALL.tokens(7)
    ids = ids.astype(np.int32 if id_type == "INT32" else np.int64)
    want = small.native()(x.astype(FLOATS[float_type]), ids, weights).astype(np.float32)
    np.testing.assert_array_equal(run(s, x, ids, weights), want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(tmp_path: Path, case: Case) -> None:
    """Every kind of layer; tests/kernels compares the C ABI with the reference."""
    layer = case.build()
    x, ids, weights = case.tokens(9)
    np.testing.assert_array_equal(
        run(session(write(tmp_path, layer)), x, ids, weights), layer.native()(x, ids, weights)
    )


@pytest.mark.parametrize("leading", [(5,), (2, 3), (2, 1, 3), (0,), (0, 4)], ids=str)
def test_leading_dimensions(tmp_path: Path, small: Layer, leading: tuple[int, ...]) -> None:
    s = session(write(tmp_path, small, leading=[f"d{i}" for i in range(len(leading))]))
    tokens = int(np.prod(leading))
    x, ids, weights = SMALL.tokens(tokens)
    got = run(s, *(a.reshape(*leading, a.shape[-1]) for a in (x, ids, weights)))
    assert got.shape == (*leading, SMALL.hidden)
    if tokens:
        np.testing.assert_array_equal(got.reshape(tokens, -1), small.native()(x, ids, weights))


def test_output_shape_is_inferred(tmp_path: Path, small: Layer) -> None:
    s = session(write(tmp_path, small, leading=["batch", "sequence"]))
    assert s.get_outputs()[0].shape == ["batch", "sequence", SMALL.hidden]


def test_token_counts_on_one_session(tmp_path: Path, small: Layer) -> None:
    s, kernel = session(write(tmp_path, small), threads=2), small.native()
    for tokens in (1, 200, 0, 3, 65):
        x, ids, weights = SMALL.tokens(tokens, seed=tokens)
        np.testing.assert_array_equal(run(s, x, ids, weights), kernel(x, ids, weights))


def test_threads_and_concurrent_runs(tmp_path: Path) -> None:
    """One and two intra-op threads, and several runs of one session at once, give the same bytes."""
    case = dataclasses.replace(SMALL, hidden=256, intermediate=192, experts=8)
    path = write(tmp_path, case.build())
    one, two = session(path), session(path, threads=2)
    inputs = [case.tokens(t, seed=t) for t in (1, 33, 130)] * 6
    want = [run(one, *i) for i in inputs]
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(lambda i: run(two, *i), inputs), want, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_slice_of_experts(tmp_path: Path) -> None:
    """Ids of other slices and -1 add nothing, so two halves of the experts sum to the whole layer."""
    whole = dataclasses.replace(SMALL, activation_format="none")
    layer = whole.build()
    x, ids, weights = whole.tokens(6)
    ids[0, 0] = -1
    parts = []
    for offset in (0, 2):
        spec = dataclasses.replace(layer.spec, expert_offset=offset)
        rows = slice(offset, offset + 2)
        path = write_model(tmp_path / f"{offset}.onnx", spec, layer.w13[rows], layer.w2[rows])
        parts.append(run(session(path), x, ids, weights))
    whole_out = run(session(write(tmp_path, layer)), x, ids, weights)
    np.testing.assert_allclose(sum(parts), whole_out, rtol=0, atol=4 * 2**-24 * np.abs(whole_out).max())


def test_not_finite_row(tmp_path: Path, small: Layer) -> None:
    s = session(write(tmp_path, small))
    x, ids, weights = SMALL.tokens(4)
    clean = run(s, x, ids, weights)
    x[1, 3], x[2, 5] = np.nan, np.inf
    got = run(s, x, ids, weights)
    assert np.isnan(got[1:3]).all()
    np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("op_version", 99, "op_version is 99, this library knows 1"),
        ("w13_layout_version", 2, "w13_layout_version is 2, expected 1"),
        ("w2_layout", "marlin", 'w2_layout is "marlin", this library supports: cpu_panel'),
        ("w13_format", "int7", 'w13_format is "int7", the operator defines: int4, int8'),
        ("activation", "tanh", 'activation is "tanh", the operator defines: silu'),
        ("w2_group_size", 48, "w2_zero_points 0: group_size must be -1, 16 or a multiple of 32"),
        ("gated", 2, "gated is 2, expected 0 to 1"),
        ("expert_offset", 1, "num_experts - expert_offset = 3"),
        ("hidden_size", 1 << 40, "hidden_size is 1099511627776, outside int32"),
        ("hidden_size", 96, "w13 has 2112 int32 words a row, expected 2976 for these attributes"),
        ("w13_perm", None, "attribute w13_perm of kind i is required"),
        ("swiglu_limit", None, "attribute swiglu_limit of kind f is required"),
        ("w2_scale_type", None, "attribute w2_scale_type of kind s is required"),
    ],
)
def test_wrong_attribute(tmp_path: Path, small: Layer, name: str, value: object, message: str) -> None:
    path = write(tmp_path, small, attributes={name: value})
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        session(path)
    assert f'QuantMoE node "{NODE}"' in str(caught.value)


def test_wrong_weight_shape(tmp_path: Path, small: Layer) -> None:
    path = write_model(tmp_path / "m.onnx", small.spec, small.w13, small.w2[:, :-64])
    with pytest.raises(Exception, match=f'"{NODE}": w2 has .* int32 words a row, expected'):
        session(path)
    path = write_model(tmp_path / "m.onnx", small.spec, small.w13, small.w2[:3])
    with pytest.raises(Exception, match=f'"{NODE}": w13 has 4 experts and w2 3'):
        session(path)


def test_weights_must_be_initializers(tmp_path: Path, small: Layer) -> None:
    with pytest.raises(Exception, match=f'"{NODE}": w13 is computed or fed at run time, expected an initializer'):
        session(write(tmp_path, small, weights_as_inputs=True))


def test_unknown_kernel(tmp_path: Path, small: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, small)
    monkeypatch.setenv("QUANTMOE_FORCE_KERNEL", "turbo")
    with pytest.raises(Exception, match=f'"{NODE}": QUANTMOE_FORCE_KERNEL is "turbo", kernels here: .*portable'):
        session(path)


@pytest.mark.parametrize("bad", [4, -2])
def test_id_out_of_range(tmp_path: Path, small: Layer, bad: int) -> None:
    s = session(write(tmp_path, small))
    x, ids, weights = SMALL.tokens(5)
    ids[3, 1] = bad
    with pytest.raises(Exception, match=f'"{NODE}": .*{bad}') as caught:
        run(s, x, ids, weights)
    assert re.search(r"token 3\b", str(caught.value))
    assert re.search(r"slot 1\b", str(caught.value))
    ids[3, 1] = 0
    run(s, x, ids, weights)  # the session is still usable


def test_wrong_input_shapes(tmp_path: Path, small: Layer) -> None:
    s = session(write(tmp_path, small, leading=["a", "b"]))
    x, ids, weights = (a[None] for a in SMALL.tokens(4))
    with pytest.raises(Exception, match=r"topk_ids has shape \[1, 3, 2\], expected \[1, 4, K\]"):
        run(s, x, ids[:, :3], weights)
    with pytest.raises(Exception, match=r"topk_weights has shape \[1, 4, 1\], expected \[1, 4, 2\]"):
        run(s, x, ids, weights[..., :1])


def test_without_the_library(tmp_path: Path, small: Layer) -> None:
    with pytest.raises(Exception, match="quantmoe"):
        ort.InferenceSession(str(write(tmp_path, small)), providers=["CPUExecutionProvider"])


def test_registered_twice(tmp_path: Path, small: Layer) -> None:
    """The second time does nothing, also from another copy of the file; ONNX Runtime would refuse the domain."""
    other = Path(shutil.copy(quantmoe.ort_library_path(), tmp_path / "libother.so"))
    options = ort.SessionOptions()
    for library in (quantmoe.ort_library_path(), quantmoe.ort_library_path(), str(other)):
        options.register_custom_ops_library(library)
    path, tokens = write(tmp_path, small), SMALL.tokens(5)
    twice = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(run(twice, *tokens), run(session(path), *tokens))


def test_two_libraries() -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry("quantmoe.registered", "CUDA provider")  # what the other library leaves there
    with pytest.raises(Exception, match="have the CUDA provider's library, expected that or the CPU's, not both"):
        options.register_custom_ops_library(quantmoe.ort_library_path())


LISTS_ENTRIES = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 24)


@pytest.mark.skipif(not LISTS_ENTRIES, reason="ONNX Runtime lists no entries to kernels")
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"experts": "disk", "ram": "1000"}, 'entries are "experts=disk, ram=1000", but were "" when the library'),
        ({"trace": "a" * 1500}, {"ram": "1000"}, 'entries are "ram=1000, trace=aaaaaaa'),
        ({"verify": "1"}, {"verify": "0"}, 'entries are "verify=0", but were "verify=1" when the library was'),
        ({}, {"expert": "disk"}, 'there is no session entry "quantmoe.expert", expected one of prefault, verify, exp'),
        ({"expert": "disk"}, {}, 'there is no session entry "quantmoe.expert", expected one of prefault, verify, exp'),
    ],
)
def test_entries_that_nobody_would_read(
    before: dict[str, str], after: dict[str, str], message: str, tmp_path: Path, small: Layer
) -> None:
    """Set after the library was registered, or misspelt."""
    options = ort.SessionOptions()

    def add(entries: dict[str, str]) -> None:
        for name, value in entries.items():
            options.add_session_config_entry(f"quantmoe.{name}", value)

    def begin() -> None:
        add(before)
        options.register_custom_ops_library(quantmoe.ort_library_path())
        add(after)
        ort.InferenceSession(str(write(tmp_path, small)), options, providers=["CPUExecutionProvider"])

    with pytest.raises(Exception, match=re.escape(message)):
        begin()


def test_not_aligned(tmp_path: Path, small: Layer) -> None:
    """An app's own buffer, and a file that somebody wrote anew: the message says what helps, and that does."""
    path, tokens = write(tmp_path, small), SMALL.tokens(5)
    expected = run(session(path), *tokens)
    data = path.with_suffix(".bin")
    data.write_bytes(b"\0" * 16 + data.read_bytes())
    model = ir.load(path)
    for value in model.graph.initializers.values():
        t = value.const_value
        value.const_value = ir.ExternalTensor(
            t.location, t.offset + 16, t.length, t.dtype, shape=t.shape, name=t.name, base_dir=tmp_path
        )
    ir.save(model, path)
    with pytest.raises(Exception, match=rf'"{NODE}": w13 is not 64-byte aligned .* entry quantmoe.prefault to copy'):
        session(path)
    np.testing.assert_array_equal(run(session(path, entries={"quantmoe.prefault": "copy"}), *tokens), expected)


def test_exported_symbols() -> None:
    """Two entries and the provider's end, what quantmoe.ort_ext asks, and what tests set: no other name may meet one of
    libquantmoe.so's or of another version of this library in a program."""
    listing = subprocess.check_output(["nm", "-D", "--defined-only", quantmoe.ort_library_path()], text=True)
    assert {line.split()[-1] for line in listing.splitlines()} == {
        "RegisterCustomOps", "CreateEpFactories", "ReleaseEpFactory",
        "qm_experts_report", "qm_describe", "qm_slice_bytes",
    }  # fmt: skip


MEASURE = """
import re, sys, time
from pathlib import Path
import numpy as np
from support.models.one_layer import run, session

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def token(s, experts):
    hidden = s.get_inputs()[0].shape[-1]
    run(s, np.ones((1, hidden), np.float32), np.arange(experts)[None], np.ones((1, experts), np.float32))

experts, model, warm_up = int(sys.argv[1]), *map(Path, sys.argv[2:])
first = session(warm_up)
token(first, 4)
before, start = anonymous(), time.perf_counter()
s = session(model)
seconds = time.perf_counter() - start
created = anonymous() - before
token(s, experts)
print(created, anonymous() - before, seconds)
"""


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate"),
    [(64, 1024, 512), pytest.param(128, 2048, 768, marks=pytest.mark.long)],
    ids=["51MB", "311MB"],
)
def test_weights_are_mapped(tmp_path: Path, small: Layer, experts: int, hidden: int, intermediate: int) -> None:
    """Nothing is copied, at creation or later: anonymous memory grows by under 5 % of the packed bytes."""
    packed = projection("int4", 128, "bf16", "int8_token_asym")
    spec = moe_spec(experts, hidden, intermediate, packed, packed)
    row13, row2 = (cpu_panel.row_bytes(spec, p) for p in ("w13", "w2"))
    packed = experts * (row13 + row2)
    path = write_model(tmp_path / "m.onnx", spec, (experts, row13 // 4), (experts, row2 // 4))
    with path.with_suffix(".bin").open("r+b") as file:
        block = np.random.default_rng(0).bytes(1 << 24)
        for _ in range(-(-(packed + 65536) // len(block))):
            file.write(block)
    (tmp_path / "warm").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(experts), path, write(tmp_path / "warm", small)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    created, ran, seconds = map(float, done.stdout.split())
    print(
        f"\nONNX Runtime {ort.__version__}, {packed / 1e6:.0f} MB packed: session in {seconds * 1e3:.1f} ms,"
        f" anonymous memory +{created / 1e6:.2f} MB, after a token through every expert +{ran / 1e6:.2f} MB"
    )
    assert created < 0.05 * packed
    assert ran < 0.05 * packed
