"""Experts that are read from the data file (quantmoe.experts = disk): the bytes of a run with all in memory, or errors.

A preloaded library stands between the experts' reads and the file: before a read its slot's bytes become 0xFF, which
are NaN as scales, for a while, so that a slot that is read while it is written changes the result; it makes faults too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.harness.children import PYTHONPATH
from support.models.one_layer import NODE, in_threads, run, session, write_model
from support.operators.cases import CASES, Case

import quantmoe
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.inspecting.expert_trace import NONE, Trace, curve, draw, read_trace
from quantmoe.ort_ext import experts_report

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")

LAYER = Case(hidden=128, intermediate=160, experts=16, top_k=4)
WIDE = dataclasses.replace(LAYER, hidden=1024, intermediate=1024)
THREADS, RUNS = 8, int(os.environ.get("QUANTMOE_RUNS", 2_000))  # fewer under ThreadSanitizer

PRELOAD = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int wants(const char* fault) { const char* f = getenv("FAULT"); return f && strstr(f, fault) != 0; }
static ssize_t on_read(int fd, void* to, size_t size, off_t at, const char* name) {
  ssize_t (*real)(int, void*, size_t, off_t) = (ssize_t (*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, name);
  static __thread unsigned turn;
  if (!wants("on")) return real(fd, to, size, at);
  if (wants("error")) { errno = EIO; return -1; }
  if (wants("end")) return 0;
  memset(to, 0xff, size);
  while (wants("held") && access(getenv("HELD"), F_OK) == 0) usleep(1000);
  if (wants("slow")) usleep(turn++ % 3 * 100);
  if (wants("interrupted") && turn++ % 3) { errno = EINTR; return -1; }
  if (wants("unaligned") && size % 4096 == 0) { errno = EINVAL; return -1; }
  ssize_t n = real(fd, to, size, at);
  return wants("short") && n > 1 ? n - n / 3 : n;
}
ssize_t pread(int fd, void* to, size_t size, off_t at) { return on_read(fd, to, size, at, "pread"); }
ssize_t pread64(int fd, void* to, size_t size, off_t at) { return on_read(fd, to, size, at, "pread64"); }
"""


def model(path: Path, case: Case, **options: object) -> Path:
    layer = case.build()
    return write_model(path, layer.spec, layer.w13, layer.w2, **options)


def disk(path: Path, slots: int, threads: int = 1, **entries: str) -> ort.InferenceSession:
    """A session with memory for so many of a file's experts."""
    settings = {"quantmoe.experts": "disk", "quantmoe.ram": str(slots * slot_bytes(path)), **entries}
    return session(path, threads, settings)


def slot_bytes(path: Path) -> int:
    """Of the largest expert: both rows in pages, and a page each for where they begin."""
    import onnx_ir as ir

    rows = {name: int(v.shape[1]) * 4 for name, v in ir.load(path).graph.initializers.items()}
    regions = {name: -(-row // 4096) * 4096 + 4096 for name, row in rows.items()}
    return sum(max(r for name, r in regions.items() if name.endswith(tensor)) for tensor in ("w13", "w2"))


def report() -> list[dict[str, int]]:
    """Of each session with experts that this process has."""
    return experts_report(quantmoe.ort_library_path())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(tmp_path: Path, case: Case) -> None:
    """Every kind of layer, whose tokens need more experts than there are slots: rounds give the same bytes."""
    path = model(tmp_path / "m.onnx", case)
    plain = session(path)
    for slots in (1, 2):
        s = disk(path, slots)
        for tokens in (1, 9):
            inputs = case.tokens(tokens)
            np.testing.assert_array_equal(run(s, *inputs), run(plain, *inputs))


@pytest.mark.parametrize("float_type", ["FLOAT", "FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_types_and_token_counts(tmp_path: Path, float_type: str, threads: int) -> None:
    path = model(tmp_path / "m.onnx", LAYER, float_type=float_type)
    plain, s = session(path, threads), disk(path, 5, threads)
    for tokens in (1, 300, 0, 3, 65):
        x, ids, weights = LAYER.tokens(tokens, seed=tokens)
        if tokens > 1:
            ids[1] = -1  # no expert at all
            x[0, 3] = np.nan
        np.testing.assert_array_equal(run(s, x, ids, weights), run(plain, x, ids, weights))


def test_slices_of_tokens(tmp_path: Path) -> None:
    """Slices, each with rounds of its own, and scales that are found from all tokens of an expert before that."""
    case = Case(weights=("fp8_e4m3", "f32", False), group_size=-1, activation_format="fp8_tensor", static=False)
    path = model(tmp_path / "m.onnx", case)
    slice_bytes = ctypes.c_int64.in_dll(ctypes.CDLL(quantmoe.ort_library_path()), "qm_slice_bytes")
    inputs, all_bytes = case.tokens(70), slice_bytes.value
    want = run(session(path), *inputs)
    try:
        slice_bytes.value = 20_000
        np.testing.assert_array_equal(run(disk(path, 2), *inputs), want)
    finally:
        slice_bytes.value = all_bytes


def test_least_recently_used_go(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", LAYER)
    s = disk(path, 4)
    x, weights = np.ones((1, LAYER.hidden), np.float32), np.ones((1, 2), np.float32)
    for ids in ([0, 1], [2, 3], [0, 1], [4, 5], [0, 1], [2, 3]):
        run(s, x, np.array([ids]), weights)
    # 0 to 3 are read, 0 and 1 are there, 4 and 5 take the places of 2 and 3, which then take theirs.
    found = report()[-1]
    assert (found["slots"], found["hits"], found["misses"]) == (4, 4, 8)
    del s
    assert not report()


def test_what_a_trace_says_of_locality(tmp_path: Path) -> None:
    layers = [{"node": name, "experts": 4, "bytes": 8} for name in "ab"]
    ids = [[0, 1], [3, NONE], [1, 2], [3, 3], [0, 2]]
    found = Trace(layers, 16, [(i % 2, np.array([row], np.uint16)) for i, row in enumerate(ids)])
    # of layer 0 experts 0 and 1, then 1 and 2, then 0 and 2; of layer 1 twice 3, once a run
    assert found.distances().tolist() == [0, 0, 0, 1, 0, 1, 2, 1]
    draw(found, curve(found, [1, 4], 1e9), tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    draw(Trace(layers, 16, []), [], tmp_path / "empty.png")


def test_trace(tmp_path: Path) -> None:
    """Ids as they were fed, whatever their type; the simulated cache has the hits of the one that ran."""
    path, file = model(tmp_path / "m.onnx", LAYER), tmp_path / "trace"
    for slots in (6, 0):  # 0: all are in memory
        s = (
            disk(path, slots, **{"quantmoe.trace": str(file)})
            if slots
            else session(path, 1, {"quantmoe.trace": str(file)})
        )
        fed = []
        for seed in range(40):
            x, ids, weights = LAYER.tokens(1 + (seed == 3), seed=seed)
            ids[0, 0] = -1
            run(s, x, ids, weights)
            fed.append(ids)
        counts = report()[-1]
        with pytest.raises(Exception, match="another session writes it"):
            session(path, 1, {"quantmoe.trace": str(file)})
        del s
        found = read_trace(file)
        assert [layer["experts"] for layer in found.layers] == [LAYER.experts]
        assert found.tokens == 41
        assert found.slot_bytes == slot_bytes(path)
        for (layer, ids), want in zip(found.runs, fed, strict=True):
            assert layer == 0
            np.testing.assert_array_equal(ids, want.astype(np.uint16))
        if slots:
            assert found.lru(slots)[:2] == (counts["hits"], counts["misses"])
            row = curve(found, [slots], 1e9)[0]
            assert row["read"] * 41 == counts["bytes_read"]
            assert row["hit_rate"] == counts["hits"] / (counts["hits"] + counts["misses"])
    file.write_bytes(file.read_bytes()[:-3])
    assert len(read_trace(file).runs) == 39
    file.write_bytes(b"{}\n")
    with pytest.raises(ModelError, match="expected a trace of version 1"):
        read_trace(file)


def test_a_trace_warms_the_cache(tmp_path: Path) -> None:
    """The experts that it used most are there when the first token asks, and the bytes are the same."""
    both, file = two_layers(tmp_path), tmp_path / "trace"
    s, rng = session(both, 1, {"quantmoe.trace": str(file)}), np.random.default_rng(3)
    x, ids, weights = LAYER.tokens(1)
    for _ in range(30):
        s.run(None, {"x": x, "ids": rng.zipf(1.5, ids.shape) % LAYER.experts, "weights": weights})
    del s
    found = read_trace(file)
    used = [(count, layer, e) for layer, counts in enumerate(found.use()) for e, count in enumerate(counts)]
    hot = [(layer, np.array([[e]])) for _, layer, e in sorted(used, key=lambda use: use[0])[-9:]]
    feeds = {"x": x, "ids": np.array([[0, 1, 2, 9]]), "weights": weights}
    hits = Trace(found.layers, found.slot_bytes, [*hot, (0, feeds["ids"]), (1, feeds["ids"])]).lru(9)[0]
    for entries, want in (({}, 0), ({"quantmoe.warm": str(file)}, hits)):
        s = disk(both, 9, **entries)
        np.testing.assert_array_equal(s.run(None, feeds), session(both).run(None, feeds))
        assert (report()[-1]["hits"], report()[-1]["misses"]) == (want, 8 - want)
        del s
    assert hits > 3
    whole = file.read_bytes()
    for damaged, message in (
        (whole[:-1], r"it ends within the record at word \d+"),
        (whole[:-6] + b"\x90\0" + whole[-4:], r"the record at word \d+ has a layer or an expert that the model lacks"),
        (
            whole.replace(b'"experts": 16', b'"experts": 17'),
            r'it is of another model or target: its layer 0 is "node": .*"experts": 17, "bytes": \d+, expected "node": '
            r'.*"experts": 16, "bytes": \d+',
        ),
        (
            whole.replace(whole[whole.index(b"}, {") : whole.index(b"}]}")], b""),
            "it is of another model or target: it has 1 layers, expected 2",
        ),
        (
            whole.replace(b'_bytes": ', b'_bytes": 1'),
            r'it is of another model or target: it begins with {"quantmoe_trace": 1, "slot_bytes": 1\d+, "layers", '
            r'expected {"quantmoe_trace": 1, "slot_bytes": \d+, "layers"',
        ),
        (b"", "expected a trace that quantmoe.trace wrote"),
    ):
        (tmp_path / "damaged").write_bytes(damaged)
        s = disk(both, 9, **{"quantmoe.warm": str(tmp_path / "damaged")})
        for _ in range(2):
            with pytest.raises(Exception, match=f"quantmoe.warm {tmp_path / 'damaged'}: {message}"):
                s.run(None, feeds)
    del s
    (tmp_path / "damaged").unlink()  # a run that failed, and one after it: one header
    s = disk(both, 9, **{"quantmoe.warm": str(tmp_path / "damaged"), "quantmoe.trace": str(tmp_path / "again")})
    with pytest.raises(Exception, match="No such file"):
        s.run(None, feeds)
    (tmp_path / "damaged").write_bytes(whole)
    s.run(None, feeds)
    del s
    assert sorted(layer for layer, _ in read_trace(tmp_path / "again").runs) == [0, 1]


def test_a_trace_that_would_replace_something_else(tmp_path: Path) -> None:
    path, text, file = model(tmp_path / "m.onnx", LAYER), tmp_path / "text", tmp_path / "trace"
    text.write_text("a text", encoding="utf-8")
    with pytest.raises(Exception, match=f"quantmoe.trace {text}: is there, and is no trace: expected an earlier"):
        session(path, entries={"quantmoe.trace": str(text)})
    assert text.read_text(encoding="utf-8") == "a text"
    s = session(path, entries={"quantmoe.trace": str(file)})
    run(s, *LAYER.tokens(1))
    del s
    whole = file.read_bytes()
    same = {"quantmoe.trace": f"{tmp_path}/./trace", "quantmoe.warm": str(file)}
    with pytest.raises(Exception, match=r"trace: is quantmoe.warm, too: expected another file"):
        disk(path, 9, **same)
    assert file.read_bytes() == whole
    session(path, entries={"quantmoe.trace": str(file)})
    assert not file.read_bytes()


def test_nothing_of_the_mapping_is_read(tmp_path: Path) -> None:
    """Neither when a session is created nor in runs: no page of the experts' mapping is in the process."""
    case = dataclasses.replace(LAYER, hidden=512, intermediate=512)
    path = model(tmp_path / "m.onnx", case)
    data = path.with_suffix(".bin")
    for entries in ({}, {"quantmoe.verify": "1"}):
        s = disk(path, 6, **entries)
        run(s, *case.tokens(20))
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").split(str(data) + "\n")[1:]
        assert lines
        assert all(int(line.split("Rss:")[1].split()[0]) == 0 for line in lines)
        del s


def two_layers(folder: Path) -> Path:
    """A model whose second layer is larger; both have the same tokens."""
    import onnx_ir as ir

    small, large = LAYER, dataclasses.replace(LAYER, intermediate=320)
    parts = [ir.load(model(folder / f"{i}.onnx", case)) for i, case in enumerate((small, large))]
    first, second = parts
    rename = {v: f"second_{v}" for v in ("w13", "w2", "typed", "moe_out", "y")}
    for value in [*second.graph.initializers.values(), *(o for n in second.graph for o in n.outputs)]:
        value.name = rename[value.name]
    nodes = list(second.graph)
    for node in nodes:
        node.name = f"second.{node.name}"
        for at, value in enumerate(node.inputs):
            same = next((i for i in first.graph.inputs if value is not None and i.name == value.name), None)
            if same is not None:
                node.replace_input_with(at, same)
    second.graph.remove(nodes)
    weights = list(second.graph.initializers.values())
    second.graph.initializers.clear()
    second.graph.outputs.clear()
    for value in weights:
        first.graph.register_initializer(value)
    first.graph.extend(nodes)
    first.graph.outputs.append(nodes[-1].outputs[0])
    both = folder / "both.onnx"
    ir.save(first, both)
    return both


def test_two_layers_share_the_slots(tmp_path: Path) -> None:
    """Of the largest one's size; each session brings as many as its memory has room for."""
    both = two_layers(tmp_path)
    s, other, plain = disk(both, 9), disk(both, 3), session(both)
    for seed in range(20):
        x, ids, weights = LAYER.tokens(2, seed=seed)
        feeds = {"x": x, "ids": ids, "weights": weights}
        want = plain.run(None, feeds)
        for which in (s, other):
            np.testing.assert_array_equal(which.run(None, feeds), want)
    assert [(r["slots"], r["layers"]) for r in sorted(report(), key=lambda r: r["slots"])] == [(3, 2), (9, 2)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quantmoe.experts": "ssd"}, 'quantmoe.experts is "ssd", the CPU library takes host, disk or auto'),
        ({"quantmoe.experts": "gpu"}, 'quantmoe.experts is "gpu", the CPU library takes host, disk or auto'),
        ({"quantmoe.experts": "disk", "quantmoe.ram": "2GB"}, 'quantmoe.ram is "2GB", expected a number of bytes'),
        ({"quantmoe.ram": "1000000"}, "need quantmoe.experts = disk"),
        ({"quantmoe.experts": "disk", "quantmoe.reserve": "auto"}, 'quantmoe.reserve is "auto", expected a number'),
        ({"quantmoe.experts": "disk", "quantmoe.ram": "9", "quantmoe.reserve": "9"}, "is of quantmoe.ram = auto"),
        ({"quantmoe.experts": "disk", "quantmoe.ram": "9"}, f'"{NODE}".*quantmoe.ram is 9, expected at least the'),
        ({"quantmoe.trace": "/nowhere/t"}, "quantmoe.trace /nowhere/t: No such file"),
        ({"quantmoe.warm": "trace"}, "quantmoe.warm needs quantmoe.experts = disk or auto"),
        ({"quantmoe.misses": "cpu"}, "quantmoe.misses is an entry of the CUDA library"),
    ],
    ids=str,
)
def test_entries(tmp_path: Path, entries: dict[str, str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        session(model(tmp_path / "m.onnx", LAYER), entries=entries)


def test_auto(tmp_path: Path) -> None:
    """What is free less what is kept: all experts of a small file, and an error where nothing is left."""
    path = model(tmp_path / "m.onnx", LAYER)
    s = session(path, entries={"quantmoe.experts": "disk"})
    inputs = LAYER.tokens(3)
    np.testing.assert_array_equal(run(s, *inputs), run(session(path), *inputs))
    assert report()[-1]["slots"] == LAYER.experts
    s = session(path, entries={"quantmoe.experts": "disk", "quantmoe.ram": "auto", "quantmoe.reserve": "9" * 15})
    with pytest.raises(Exception, match=rf'"{NODE}": quantmoe.ram = auto has \d+ bytes available less 9+ in reserve'):
        run(s, *inputs)


def test_auto_where_all_fit(tmp_path: Path) -> None:
    """They stay mapped; with half the memory they are read."""
    path, inputs = model(tmp_path / "m.onnx", LAYER), LAYER.tokens(3)
    want, size = run(session(path), *inputs), path.with_suffix(".bin").stat().st_size
    for ram, slots in (("auto", 0), (str(size), 0), (str(size // 2), size // 2 // slot_bytes(path))):
        s = session(path, entries={"quantmoe.experts": "auto", "quantmoe.ram": ram})
        np.testing.assert_array_equal(run(s, *inputs), want)
        assert report()[-1]["slots"] == slots
        assert (report()[-1]["misses"] > 0) == (slots > 0)


def test_auto_where_no_file_is(tmp_path: Path) -> None:
    path, inputs = model(tmp_path / "m.onnx", LAYER), LAYER.tokens(3)
    onnx.save_model(onnx.load(path), tmp_path / "whole.onnx")
    s = session(tmp_path / "whole.onnx", entries={"quantmoe.experts": "auto"})
    np.testing.assert_array_equal(run(s, *inputs), run(session(path), *inputs))
    assert report()[-1]["slots"] == 0


def test_weights_that_no_file_has(tmp_path: Path) -> None:
    """Weights inside the .onnx file, which ONNX Runtime holds in memory of its own."""
    path = model(tmp_path / "m.onnx", LAYER)
    onnx.save_model(onnx.load(path), tmp_path / "whole.onnx")
    with pytest.raises(
        Exception, match=f'"{NODE}": quantmoe.experts = disk, but its packed weights are not mapped from'
    ):
        disk(tmp_path / "whole.onnx", 3)


def test_a_file_that_changes(tmp_path: Path) -> None:
    """Renamed over, the old one stays; truncated or written in place, runs say so, but for what memory has."""
    path = model(tmp_path / "m.onnx", LAYER)
    data = path.with_suffix(".bin")
    s, x, weights = disk(path, 3), np.ones((1, LAYER.hidden), np.float32), np.ones((1, 2), np.float32)
    feed = [(x, np.array([ids]), weights) for ids in ([0, 1], [4, 9])]
    missing = x, np.array([[2, 2]]), weights
    want = [run(s, *f) for f in feed]
    shutil.copy(data, tmp_path / "other")
    (tmp_path / "other").write_bytes(bytes(data.stat().st_size))
    kept = tmp_path / "kept"
    os.link(data, kept)
    os.replace(tmp_path / "other", data)
    for f, w in zip(feed, want, strict=True):
        np.testing.assert_array_equal(run(s, *f), w)
    size = kept.stat().st_size
    os.truncate(kept, 100)
    with pytest.raises(Exception, match=rf'"{NODE}": expert 2: .*m.bin.*(has 100 bytes, {size} when|the file ends)'):
        run(s, *missing)
    np.testing.assert_array_equal(run(s, *feed[1]), want[1])  # these are in memory
    os.truncate(kept, size)  # zeros
    with pytest.raises(Exception, match=r"expert 2: .*m\.bin was written to since it was opened"):
        run(s, *missing)


def test_one_session_in_eight_threads(tmp_path: Path) -> None:
    """Few slots for many runs: each takes rounds, none waits for ever, and all have the bytes of a run alone."""
    path = model(tmp_path / "m.onnx", LAYER)
    plain, sessions = session(path), [disk(path, 5), disk(path, 1)]
    inputs = [LAYER.tokens(t, seed=t) for t in (1, 3, 20, 1, 7)]
    want = [run(plain, *i).tobytes() for i in inputs]

    def right(i: int) -> bool:
        which = i % len(inputs)
        return run(sessions[i % 2], *inputs[which]).tobytes() == want[which]

    assert not (wrong := in_threads(THREADS, RUNS, right)), wrong[:5]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sessions_of_a_file_share_what_they_read(tmp_path: Path) -> None:
    """An expert is read once, and is in memory once, whoever asks for it."""
    path = model(tmp_path / "m.onnx", WIDE)
    inputs, s, others = WIDE.tokens(30), disk(path, 16), [disk(path, 16) for _ in range(3)]
    want = run(s, *inputs)
    read, before = sum(counts["bytes_read"] for counts in report()), resident()
    assert read > 16 << 20
    for other in others:
        np.testing.assert_array_equal(run(other, *inputs), want)
    assert sum(counts["bytes_read"] for counts in report()) == read
    assert sum(counts["hits"] for counts in report()) == 3 * sum(counts["misses"] for counts in report())
    assert resident() - before < read / 2


def test_a_session_takes_its_slots_away(tmp_path: Path) -> None:
    """Sessions have the slots of all that live; the last one's memory goes with it."""
    path = model(tmp_path / "m.onnx", WIDE)
    x, weights = WIDE.tokens(1)[0], np.ones((1, 1), np.float32)
    want = [run(session(path), x, np.array([[e]]), weights) for e in range(16)]

    def turn(s: ort.InferenceSession) -> None:
        for expert in range(16):
            np.testing.assert_array_equal(run(s, x, np.array([[expert]]), weights), want[expert])

    before = resident()
    first, second = disk(path, 6), disk(path, 10)
    run(second, x, np.array([[0]]), weights)
    turn(first)
    turn(second)
    assert {r["slots"]: (r["hits"], r["misses"]) for r in report() if r["slots"]} == {6: (1, 15), 10: (16, 1)}
    del first
    turn(second)  # in ten slots, of which one has the first expert
    turn(second)
    assert [r["misses"] for r in report() if r["slots"]] == [1 + 15 + 16]
    assert resident() - before > 8 << 20
    del second
    assert resident() - before < 8 << 20


def test_other_bytes_are_not_shared(tmp_path: Path) -> None:
    """Of a file of another name, of one that was renamed over, and of one that was written in place."""
    path, other = model(tmp_path / "m.onnx", LAYER), model(tmp_path / "other.onnx", LAYER)
    inputs, data = LAYER.tokens(1), path.with_suffix(".bin")
    old, sessions = run(session(path), *inputs), [disk(path, 16), disk(other, 16)]
    for s in sessions:
        np.testing.assert_array_equal(run(s, *inputs), old)
    changed = model(tmp_path / "changed.onnx", dataclasses.replace(LAYER, seed=1)).with_suffix(".bin").read_bytes()
    new = run(session(tmp_path / "changed.onnx"), *inputs)
    assert new.tobytes() != old.tobytes()
    (tmp_path / "new").write_bytes(changed)
    os.replace(tmp_path / "new", data)
    other.with_suffix(".bin").write_bytes(changed)
    sessions += [disk(path, 16), disk(other, 16)]
    for s in sessions[2:]:
        np.testing.assert_array_equal(run(s, *inputs), new)
    assert all(counts["bytes_read"] for counts in report() if counts["slots"])


@pytest.fixture(scope="module")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preload")
    (folder / "reads.c").write_text(PRELOAD, encoding="utf-8")
    compiler = ["c++", "-x", "c"] if shutil.which("c++") else [sys.executable, "-m", "ziglang", "cc"]
    library = folder / "reads.so"
    command = [*compiler, "-shared", "-fPIC", "-O1", str(folder / "reads.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


CHILD = """
import os, sys
from pathlib import Path
import numpy as np
from engines.test_experts import LAYER, disk, report, run, session
path, tokens, slots = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
plain, s = session(path), disk(path, slots, 2)
fault = os.environ.pop("LATER", "")
os.environ["FAULT"] = fault
rng = np.random.default_rng(3)
for token in range(tokens):
    x, ids, weights = LAYER.tokens(1, seed=token)
    ids = rng.permutation(LAYER.experts)[None, :4]
    os.environ["FAULT"] = fault
    got = run(s, x, ids, weights)
    os.environ["FAULT"] = ""
    assert got.tobytes() == run(plain, x, ids, weights).tobytes(), token
os.environ["FAULT"] = ""
print(report()[-1]["misses"])
"""


def environment(preload: Path | None = None, **more: str) -> dict[str, str]:
    before = os.environ.get("LD_PRELOAD", "")
    return os.environ | {"PYTHONPATH": PYTHONPATH, "LD_PRELOAD": f"{before} {preload or ''}".strip(), **more}


def child(path: Path, preload: Path, fault: str, tokens: int, slots: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(tokens), str(slots)], capture_output=True, text=True, timeout=3600,
        env=environment(preload, LATER=fault),
    )  # fmt: skip


def stress(path: Path, preload: Path, faults: Sequence[str], tokens: int) -> None:
    model(path, LAYER)
    for i, fault in enumerate(faults):
        done = child(path, preload, fault, tokens, 3 + i % 3)
        assert done.returncode == 0, (fault, done.stderr[-3000:])
        assert int(done.stdout) >= tokens  # each token evicts


def test_evictions(tmp_path: Path, preload: Path) -> None:
    """Slots are NaN while they are read, late, in parts and interrupted: the bytes of a run without slots."""
    faults = ("on slow", "on short", "on interrupted", "on unaligned short slow")
    stress(tmp_path / "m.onnx", preload, faults, 60)


@pytest.mark.long
def test_evictions_of_many_tokens(tmp_path: Path, preload: Path) -> None:
    stress(tmp_path / "m.onnx", preload, ["on"], 100_000)


@pytest.mark.parametrize(("fault", "message"), [("on error", "Input/output error"), ("on end", "the file ends before")])
def test_reads_that_fail(tmp_path: Path, preload: Path, fault: str, message: str) -> None:
    done = child(model(tmp_path / "m.onnx", LAYER), preload, fault, 5, 5)
    assert done.returncode == 1
    assert f'"{NODE}": expert ' in done.stderr
    assert "m.bin: " + message in done.stderr


SHARED = """
import os, sys
from pathlib import Path
from engines.test_experts import LAYER, disk, run, session
from support.models.one_layer import in_threads
path = Path(sys.argv[1])
inputs = [LAYER.tokens(t, seed=t) for t in (1, 3, 20, 1, 7)]
want = [run(session(path), *i).tobytes() for i in inputs]
stays, place = disk(path, 3), [disk(path, 5)]
run(place[0], *inputs[0])  # before the one that stays
os.environ["FAULT"] = "on slow"
def right(i):
    which = i % len(inputs)
    s = stays if i % 3 else place[0]
    if i % 50 == 0:
        place[0] = disk(path, 5)  # the one before it ends with the runs that it has
    return run(s, *inputs[which]).tobytes() == want[which]
wrong = in_threads(8, int(sys.argv[2]), right)
assert not wrong, wrong[:5]
"""


def test_sessions_that_end_while_others_run(tmp_path: Path, preload: Path) -> None:
    """Slots are NaN while they are read: all have the bytes of a run alone, whatever a session takes away."""
    path = model(tmp_path / "m.onnx", LAYER)
    done = subprocess.run(
        [sys.executable, "-c", SHARED, str(path), str(RUNS)], capture_output=True, text=True, timeout=600,
        env=environment(preload),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


CANCELLED = """
import os, sys, threading, time
from pathlib import Path
import onnxruntime as ort
from engines.test_experts import LAYER, disk, report, session
path, held = Path(sys.argv[1]), Path(os.environ["HELD"])
x, ids, weights = LAYER.tokens(2, seed=1)
feeds = {"x": x, "ids": ids, "weights": weights}
want, s = [y.tobytes() for y in session(path).run(None, feeds)], disk(path, int(sys.argv[2]), 2)
said = []
def run(options):
    try:
        s.run(None, feeds, options)
    except Exception as error:
        said.append(str(error))
for turn in range(3):
    held.touch()
    os.environ["FAULT"] = "on held"
    options, before = ort.RunOptions(), report()[-1]["misses"]
    thread = threading.Thread(target=run, args=(options,))
    thread.start()
    while report()[-1]["misses"] == before:
        time.sleep(0.001)
    options.terminate = True
    held.unlink()
    thread.join()
    os.environ["FAULT"] = ""
    assert len(said) == turn + 1 and "terminate" in said[-1], said
    assert [y.tobytes() for y in s.run(None, feeds)] == want
    s.run(None, {name: LAYER.tokens(30, seed=9)[i] for i, name in enumerate(feeds)})  # others take the slots
"""


@pytest.mark.parametrize("slots", [1, 5])
def test_a_run_that_is_cancelled(tmp_path: Path, preload: Path, slots: int) -> None:
    """While its first layer's experts are read: it ends with ONNX Runtime's word, and the next runs are right."""
    both = two_layers(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", CANCELLED, str(both), str(slots)], capture_output=True, text=True, timeout=300,
        env=environment(preload, HELD=str(tmp_path / "held")),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


SHRINKING = """
import os, sys
from pathlib import Path
from engines.test_experts import LAYER, disk, run, session
path, group, ballast = map(Path, sys.argv[1:])
plain, inputs = session(path), [LAYER.tokens(1 + seed % 3, seed=seed) for seed in range(100)]
want = [run(plain, *i).tobytes() for i in inputs]
(group / "cgroup.procs").write_text(str(os.getpid()))
s = disk(path, 6)
for at, (i, w) in enumerate(zip(inputs, want)):
    if at == 50:
        ballast.read_bytes()
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cache = int(stat["total_inactive_file"]) + int(stat["total_active_file"])
        used = int((group / "memory.usage_in_bytes").read_text())
        assert cache > 60 << 20
        (group / "memory.limit_in_bytes").write_text(str(used - cache + (32 << 20)))
        assert int((group / "memory.usage_in_bytes").read_text()) <= used - cache + (32 << 20)
    assert run(s, *i).tobytes() == w, at
"""


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of version 1, which root may make where it is not mounted read-only."""
    group = Path("/sys/fs/cgroup/memory") / f"quantmoe-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(str(error))
    if not (group / "memory.limit_in_bytes").exists():
        group.rmdir()
        pytest.skip("no control groups of version 1")
    yield group
    group.rmdir()


LACKING = """
import os, sys
from pathlib import Path
from engines.test_experts import WIDE, disk, run
path, group = map(Path, sys.argv[1:])
s = disk(path, 16)
(group / "memory.limit_in_bytes").write_text(str(int((group / "memory.usage_in_bytes").read_text()) + (16 << 20)))
(group / "cgroup.procs").write_text(str(os.getpid()))
run(s, *WIDE.tokens(1))
"""


def test_memory_that_is_not_there(tmp_path: Path, memory_group: Path) -> None:
    """The first run names what it would take, and what there is; a limit would end the process later."""
    path = model(tmp_path / "m.onnx", WIDE)
    done = subprocess.run(
        [sys.executable, "-c", LACKING, str(path), str(memory_group)], capture_output=True, text=True, timeout=300,
        env=environment(),
    )  # fmt: skip
    assert re.search(r"quantmoe.ram: 16 experts take \d+ bytes, \d+ are available", done.stderr), done.stderr[-3000:]


def test_memory_that_shrinks(tmp_path: Path, memory_group: Path) -> None:
    """The group's limit is lowered while a session runs: page cache goes, the slots stay, and results are the same."""
    path, ballast = model(tmp_path / "m.onnx", LAYER), tmp_path / "ballast"
    ballast.write_bytes(bytes(64 << 20))
    fd = os.open(ballast, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # whose group reads it first has it
    os.close(fd)
    done = subprocess.run(
        [sys.executable, "-c", SHRINKING, str(path), str(memory_group), str(ballast)], capture_output=True, text=True,
        timeout=300, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
