"""CUDA graphs of decode steps without a GPU: who runs them, how many there are, what errors say of a GPU's memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from quantmoe.exporter import gpu
from quantmoe.exporter.memory import OutOfMemoryError
from quantmoe.exporter.targets import of_device
from quantmoe.runtime import cache as caches
from quantmoe.runtime import cache_memory, opened_model
from quantmoe.runtime.cache import ROOM, Buffer
from quantmoe.runtime.generate import Generator, ModelError
from quantmoe.runtime.session_thread import SessionThread

FLOAT = {"activations": "float", "logits": "last"}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
#: CUDA's driver: what a test says of its GPU
DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return GPUS < 0 ? 100 : 0; }
int cuDeviceGetCount(int* count) { *count = GPUS; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal >= GPUS ? 101 : 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 36 ? 3201000 : attribute == 37 ? 6016 : 0;
  return 0;
}
static int retained, current;
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = &retained; ++retained; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { --retained; return 0; }
int cuCtxPushCurrent_v2(void* context) { current = 1; return 0; }
int cuCtxPopCurrent_v2(void** context) { current = 0; return 0; }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  *free = 123456789, *total = 1u << 31;
  return retained == 1 && current ? 0 : 201;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """driver(gpus) -> a library with CUDA's driver's functions; -1: cuInit finds no device."""

    def make(gpus: int) -> str:
        library = tmp_path_factory.mktemp("driver") / f"driver{gpus}.so"
        command = ["c++", "-x", "c", "-shared", "-fPIC", f"-DGPUS={gpus}", "-", "-o", str(library)]
        subprocess.run(command, input=DRIVER, text=True, check=True)
        return str(library)

    return make


class Session:
    """A session that notes who runs it, and which of its runs were at the same time."""

    def __init__(self, session: ort.InferenceSession):
        self.session, self.threads, self.captured = session, set(), set()
        self.running, self.overlaps = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, binding: ort.IOBinding, graph: int) -> None:
        self.threads.add(threading.get_ident())
        self.running += 1
        self.overlaps += self.running > 1
        if graph != -1:
            self.captured.add(graph)
        self.session.run_with_iobinding(binding)
        self.running -= 1


@pytest.fixture
def captured(exported, monkeypatch) -> Callable[..., Generator]:
    """captured(architecture, **options of Generator): one whose steps are as with CUDA graphs, on the CPU."""

    thread = SessionThread()

    def make(architecture: str = "qwen3_moe", path: Path | None = None, **options: Any) -> Generator:
        for module in (opened_model, cache_memory):  # no thread has called yet
            monkeypatch.setattr(module, "SESSION_THREAD", thread)
        generator = Generator(path or exported(architecture, **FLOAT), threads=1, **options)
        generator._opened, generator.cuda_graph = Session(generator.session), True
        generator.run_options = lambda graph, ahead=False: graph
        return generator

    return make


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen3_next"])
def test_threads_take_turns(exported, captured, architecture):
    """A session with graphs never has two runs at once, and each caller gets its own tokens."""
    prompts = [PROMPT[at:] + PROMPT[:at] for at in range(4)]
    want = [Generator(exported(architecture, **FLOAT)).generate(ids, 8).tokens for ids in prompts]
    generator, found = captured(architecture), [[] for _ in prompts]

    def talk(number: int) -> None:
        for _ in range(3):
            found[number].append(generator.generate(prompts[number], 8).tokens)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[tokens] * 3 for tokens in want]
    assert len(generator.session.threads) <= 2
    assert generator.session.overlaps == 0
    assert len(generator.session.captured) <= len(threads) + 1


def test_the_first_thread_runs_until_a_second_comes(captured):
    """The thread that all calls move to captures its own graphs once, whichever threads come and go."""
    generator, here = captured("qwen3_next"), {threading.get_ident()}
    want = [generator.generate(PROMPT, 6).tokens for _ in range(3)]
    assert (generator.session.threads, len(generator.session.captured)) == (here, 1)
    for _ in range(4):
        thread = threading.Thread(target=lambda: want.append(generator.generate(PROMPT, 6).tokens))
        thread.start()
        thread.join()
    want += [generator.generate(PROMPT, 6).tokens for _ in range(2)]
    assert want == [want[0]] * 9
    assert (len(generator.session.threads), len(generator.session.captured)) == (2, 2)
    assert generator.in_turn(lambda: generator.in_turn(threading.get_ident)) in generator.session.threads - here


def test_who_opens_a_session_need_not_run_it():
    session_thread, found = SessionThread(), []
    assert session_thread(threading.current_thread, runs=False) is threading.current_thread()
    thread = threading.Thread(target=lambda: found.append(session_thread(threading.current_thread)))
    thread.start()
    thread.join()
    assert found == [thread]
    assert session_thread(threading.current_thread) not in (thread, threading.current_thread())


def test_an_error_of_a_run_reaches_who_asked(captured):
    with pytest.raises(ModelError, match="token id -1 is outside the vocabulary"):
        captured().generate([-1], 2)
    generator = captured()
    generator.session.run_with_iobinding = None
    with pytest.raises(ModelError, match="'NoneType' object is not callable"):
        generator.generate(PROMPT, 2)


def test_conversations_share_graphs(captured):
    """Conversations in turn share one graph, two at once have two, and a longer one makes few more."""
    generator = captured("qwen3_next")
    want = generator.generate(PROMPT, 6).tokens
    for _ in range(20):
        assert generator.generate(PROMPT, 6).tokens == want
    assert len(generator.session.captured) == 1
    one, other = generator.cache(), generator.cache()
    for _ in range(3):
        assert [generator.generate(PROMPT, 6, cache=cache).tokens for cache in (one, other)] == [want, want]
        one.rewind(0)
        other.rewind(0)
    assert len(generator.session.captured) == 2
    del one, other
    for _ in range(5):
        assert generator.generate(PROMPT, 6).tokens == want
    assert len(generator.session.captured) == 2


def test_results_that_are_kept_hold_no_memory(exported, captured, monkeypatch):
    """Kept results hold neither the model's memory nor its drafting layer's."""
    folder = exported("qwen3_moe", activations="float", logits="all")
    generator, made = captured(path=folder, speculate="ngram"), []
    monkeypatch.setattr(
        cache_memory, "Room", lambda *given, real=cache_memory.Room: made.append(real(*given)) or made[-1]
    )
    kept = [generator.generate(PROMPT, 6) for _ in range(6)]
    assert len({tuple(found.tokens) for found in kept}) == 1
    assert (len(made), [found.speculation.draft for found in kept]) == (1, [None] * 6)


def test_growing_conversations_leave_few_graphs(captured, monkeypatch):
    """A room that is too small makes way for one that is an eighth larger."""
    monkeypatch.setattr(caches, "ROOM", 0)
    generator, longest = captured(), 120
    for length in range(8, longest):
        generator.generate([1] * length, 2)
    assert len(generator.session.captured) <= 2 + np.log(longest / 8) / np.log(9 / 8)
    monkeypatch.setattr(caches, "ROOM", ROOM)


def test_batches_share_graphs(captured):
    """Batches of the same number of prompts share a graph, whose room is as long as the longest so far."""
    generator, batches = captured(), ([PROMPT, PROMPT[:3]], [PROMPT[:5], PROMPT[:6]])
    want = [[generator.generate(ids, 5).tokens for ids in prompts] for prompts in batches]
    before = len(generator.session.captured)
    for _ in range(4):
        assert [generator.generate_batch(prompts, 5) for prompts in batches] == want
    assert len(generator.session.captured) == before + 1


def test_a_generator_is_freed_with_its_last_user(captured):
    """Memory is free before Python looks for cycles, as a second model may need it at once."""
    generator = captured()
    generator.generate(PROMPT, 4)
    gone = weakref.ref(generator)
    gc.disable()
    try:
        del generator
        assert gone() is None
    finally:
        gc.enable()


def test_runs_of_arrays_are_never_captured(captured):
    """A graph needs shapes and addresses that stay, and arrays have none."""
    generator, seen = captured(), []
    generator.session.run = lambda names, feed, options: (
        seen.append(options) or generator.session.session.run(names, feed)
    )
    generator.step(np.array([PROMPT]), generator.start())
    assert seen == [-1]


class OpenedError(Exception):
    """An error in the place of a session."""


@pytest.mark.parametrize(
    ("options", "want"),
    [({}, True), ({"cuda_graph": False}, False), ({"experts": "disk"}, False), ({"trace": "trace"}, False)],
)
def test_a_graph_is_the_default_where_it_can_be_captured(exported, cached, options, want, monkeypatch):
    """A model with attention in standard nodes has no graph, and the CPU has none."""

    def open_session(generator: Generator, *_: object) -> None:
        raise OpenedError(str(generator.cuda_graph))

    def asked(folder: Path, **options: Any) -> str:
        with pytest.raises(OpenedError) as raised:
            Generator(folder, reserve=1, **options)
        return str(raised.value)

    monkeypatch.setattr(Generator, "_open", open_session)
    assert asked(cached("qwen3_moe"), device="cuda", **options) == str(want)
    assert asked(exported("qwen3_moe", target="cuda"), device="cuda", **options) == "False"
    assert asked(exported("qwen3_moe", **FLOAT), **options) == "False"


def test_what_the_driver_says(driver, monkeypatch):
    monkeypatch.setattr(gpu, "DRIVER", driver(2))
    assert (gpu.devices(), gpu.free_memory(), gpu.bandwidth()) == (2, 123456789, 2 * 3201e6 * 6016 / 8)
    assert gpu.free_memory() == 123456789  # the context was released
    for library in (driver(0), driver(-1), "libnone.so"):
        monkeypatch.setattr(gpu, "DRIVER", library)
        assert (gpu.devices(), gpu.free_memory(), gpu.bandwidth()) == (0, None, None)


def test_no_gpu_is_said_at_once(exported, driver, monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(gpu, "DRIVER", driver(0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ModelError, match=r"^no CUDA device: .* no GPU \(CUDA_VISIBLE_DEVICES is ''\)$"):
        Generator(exported("qwen3_moe", target="cuda"), device="cuda")


#: what ONNX Runtime 1.31 raises where a GPU's memory lacks
LACKING = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer of size 4294967296",
    "[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);",
)


@pytest.mark.parametrize("text", LACKING)
def test_too_little_gpu_memory_names_the_cache(exported, driver, monkeypatch, text):
    """The error before the first prompt has the cache, its bytes, the free bytes, and options that need less."""
    generator = Generator(exported("qwen3_moe", **FLOAT))
    monkeypatch.setattr(gpu, "DRIVER", driver(1))

    def fail(shapes: list[Any], device: str) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(Buffer, "several", fail)
    generator.device, generator.target, tokens = "cuda", of_device("cuda"), len(PROMPT) + ROOM
    shapes = (generator.shape(name)[1] * generator.shape(name)[3] for name in generator.past)
    size = 4 * tokens * sum(shapes)
    with pytest.raises(OutOfMemoryError) as raised:
        generator.generate(PROMPT, 2)
    assert str(raised.value).endswith(
        f"out of GPU memory: the cache of {tokens:,} tokens takes {size:,} bytes, 123,456,789 bytes are free; less is "
        "needed with fewer tokens, or export --cache fp8, or --experts host"
    )
    with pytest.raises(OutOfMemoryError, match=r"the cache of 2 times 12 tokens takes .*fewer prompts at once"):
        generator.generate_batch([PROMPT, PROMPT[:2]], 4)


def test_too_little_gpu_memory_for_a_prompt(captured, driver, monkeypatch):
    generator = captured()
    monkeypatch.setattr(gpu, "DRIVER", driver(1))

    def fail(*_: object) -> None:
        raise RuntimeError(LACKING[0])

    generator.session.run_with_iobinding, generator.target = fail, of_device("cuda")
    monkeypatch.setattr(Buffer, "several", lambda shapes, device, of=Buffer.several: of(shapes, "cpu"))
    with pytest.raises(
        OutOfMemoryError, match=r"8 tokens after 0: out of GPU memory: 123,456,789 bytes are free; .* a smaller --chunk"
    ):
        generator.generate(PROMPT, 2)


def test_other_rooms_make_way(captured, monkeypatch):
    """Rooms of other numbers of rows are freed before lack of memory is an error."""
    generator, real, failed = captured(), Buffer.several, []
    generator.generate_batch([PROMPT, PROMPT], 3)
    assert len(generator.rooms._free) == 1

    def several(shapes: list[Any], device: str) -> list[Buffer]:
        if generator.rooms._free:
            failed.append(shapes)
            raise RuntimeError(LACKING[0])
        return real(shapes, device)

    monkeypatch.setattr(Buffer, "several", several)
    generator.generate(PROMPT, 2)
    gc.collect()  # the error that was caught
    assert len(failed) == 1
    assert [room.batch for room in generator.rooms._free] == [1]


def test_fit_computes_for_this_gpu(cached, driver, monkeypatch, capsys):
    """`inspect --fit` says which GPU it computes for, and its command needs no option for the graph."""
    from quantmoe.exporter.cli import main

    folder = cached("qwen3_moe")
    for library, options, rate in (
        (driver(1), (), "4.8 TB/s, at most .* tokens/s (as this GPU has)"),
        (driver(0), (), "1.0 TB/s, at most .* tokens/s (--memory-speed gives another)"),
        (driver(1), ("--memory-speed", "2TB"), "2.0 TB/s, at most .* tokens/s (as --memory-speed says)"),
    ):
        monkeypatch.setattr(gpu, "DRIVER", library)
        monkeypatch.setattr(sys, "argv", ["quantmoe", "inspect", str(folder), "--fit", "24GB", *options])
        with pytest.raises(SystemExit, match=r"^0$"):
            main()
        text = " ".join(capsys.readouterr().out.split())
        begin, end = rate.split(".*")
        assert begin in text
        assert end in text
        assert text.endswith(f"quantmoe generate {folder} --device cuda")
