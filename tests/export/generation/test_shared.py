"""Caches of a fixed capacity, bound in place: the same bytes as caches that grow, whatever else the memory holds."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from export.generation.test_generate import PROMPT
from support.harness.sweeps import every

from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.folder.metadata import SHARE_BUFFER
from quantmoe.runtime.cache import ROOM, Buffer, Cache, SharedCache
from quantmoe.runtime.generate import Generator

ARCHITECTURES = ["qwen3_moe", "gpt_oss", "mixtral", "olmoe", "glm4_moe"]


@pytest.fixture(params=every(ARCHITECTURES, 2))
def folder(exported, request):
    return exported(request.param, activations="float", logits="last")


@pytest.fixture
def nan(monkeypatch):
    """What is not written is NaN, so that it shows if it is read."""
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, np.nan, dtype))


def test_in_place_gives_the_bytes_of_growing(folder, nan):
    generator = Generator(folder, chunk=7)
    shared, growing = generator.cache(), Cache(generator)
    assert isinstance(shared, SharedCache)
    found, expected = (generator.generate(PROMPT, 12, cache=cache, logits=True) for cache in (shared, growing))
    assert np.array_equal(found.logits, expected.logits)
    for length, more in ((23, [5, 6, 7]), (28, [8, 9]), (3, [8]), (0, PROMPT)):
        for cache in (shared, growing):
            cache.rewind(length)
        prompt = shared.tokens + more
        found, expected = (generator.generate(more, 6, cache=cache).tokens for cache in (shared, growing))
        assert found == expected == generator.greedy(prompt, 6).tokens


@pytest.mark.every
def test_a_full_cache_is_copied_to_a_larger_one(exported, nan):
    generator = Generator(exported("qwen3_moe", activations="float", logits="last"), chunk=100)
    generator.context = 1 << 20
    cache, growing, capacities = generator.cache(), Cache(generator), []
    tokens = (PROMPT * 109)[:2500]
    for at in range(0, 2500, 250):
        part = tokens[at : at + 250]
        assert np.array_equal(cache.append(part), growing.append(part))
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [250 + ROOM, 2 * (250 + ROOM)]
    addresses = [buffer.value.data_ptr() for buffer in cache._room.buffers.values()]
    cache.append(PROMPT)
    assert addresses == [buffer.value.data_ptr() for buffer in cache._room.buffers.values()]


class Capturing:
    """A session that runs each binding's first call three times, but of those whose graph is -1."""

    def __init__(self, session: ort.InferenceSession):
        self.session, self.captured = session, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.session, name)

    def run_with_iobinding(self, binding: ort.IOBinding, graph: int) -> None:
        for _ in range(3 if graph != -1 and binding not in self.captured else 1):
            self.session.run_with_iobinding(binding)
        self.captured += [binding]


def capture(generator: Generator) -> None:
    """Its decode steps are as with a CUDA graph, on the CPU."""
    generator._opened = Capturing(generator.session)
    generator.cuda_graph, generator.run_options = True, lambda graph: graph


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_a_step_of_unchanging_shapes_and_addresses(exported, architecture, nan):
    """What a CUDA graph is made of, on the CPU: other shapes of the mask, the same bytes; and its cache may grow."""
    folder = exported(architecture, activations="float", logits="last")
    usual, steps = Generator(folder), Generator(folder)
    steps.cuda_graph, steps.run_options = True, lambda graph: None
    found, cache = [], steps.cache()
    for generator, one in ((usual, usual.cache()), (steps, cache)):
        tokens = generator.generate(PROMPT, 12, cache=one, logits=True)
        one.reserve(one.capacity + 1)
        found.append(np.concatenate([tokens.logits, generator.generate([3], 5, cache=one, logits=True).logits]))
    assert [tokens for tokens, _ in cache._room.steps] == [1]
    assert np.array_equal(*found)


def test_a_call_that_captures_runs_several_times(exported):
    """As ONNX Runtime's CUDA provider does it: the states of linear attention are of one run, in the first token, after
    the cache has grown, and in another cache."""

    folder = exported("qwen3_next", activations="float", logits="last")
    usual, steps = Generator(folder), Generator(folder)
    capture(steps)
    for _ in range(2):
        found = []
        for generator in (usual, steps):
            cache = generator.cache()
            logits = [generator.generate(PROMPT, 6, cache=cache, logits=True).logits]
            cache.reserve(cache.capacity + 1)
            found.append(np.concatenate([*logits, generator.generate([3], 5, cache=cache, logits=True).logits]))
        assert np.array_equal(*found)


def test_bfloat16_is_bound_as_it_is():
    """NumPy lacks it, and so do ONNX Runtime's arrays."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.BFLOAT16), shape=ir.Shape([3]))
    node = ir.node("Identity", [x])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 20})
    session = ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString())
    given, binding = np.array([1.5, -2.0, np.inf], ml_dtypes.bfloat16), session.io_binding()
    read, written = Buffer.of(given, "cpu"), Buffer.of(np.zeros(3, ml_dtypes.bfloat16), "cpu")
    read.bind(binding, "x")
    written.bind(binding, output="y")
    session.run_with_iobinding(binding)
    assert np.array_equal(written.numpy(), given)
    read.write(np.array([0.0, 3.0, -4.0], ml_dtypes.bfloat16))
    session.run_with_iobinding(binding)
    assert written.numpy().tolist() == [0, 3, -4]


def test_a_capacity_that_is_asked_for_is_kept(exported):
    folder = exported("qwen3_moe", activations="float", logits="last")
    generator = Generator(folder, capacity=30)
    cache = generator.cache()
    assert cache.capacity == 30
    assert generator.generate(PROMPT, 8, cache=cache).tokens == Generator(folder).greedy(PROMPT, 8).tokens
    assert len(cache.tokens) == 30
    with pytest.raises(ModelError, match="31 tokens, the cache has a capacity of 30"):
        cache.append([1])
    cache.rewind(29)
    cache.append([1])
    assert cache.capacity == 30


def test_a_capacity_beyond_memory_is_named(exported):
    generator = Generator(exported("qwen3_moe", activations="float", logits="last"), capacity=1 << 50)
    with pytest.raises(MemoryError, match=r"model\.onnx: the cache of 1,125,899,906,842,624 tokens: out of mem"):
        generator.cache()


def test_folders_say_that_their_cache_is_written_in_place(folder):
    search = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]
    assert search["past_present_share_buffer"] is True
    assert search["max_length"] <= 4096
    assert ir.load(folder / "model.onnx").metadata_props[SHARE_BUFFER] == "true"
    assert Generator(folder).shares_buffer


def test_a_folder_that_does_not_say_so_has_a_cache_that_grows(exported, tmp_path):
    folder = exported("qwen3_moe", activations="float", logits="last")
    other = shutil.copytree(folder, tmp_path / "model")
    model = ir.load(other / "model.onnx")
    del model.metadata_props[SHARE_BUFFER]
    ir.save(model, other / "model.onnx")
    generator = Generator(other)
    assert type(generator.cache()) is Cache
    assert generator.greedy(PROMPT, 8).tokens == Generator(folder).greedy(PROMPT, 8).tokens


def test_onnxruntime_genai_turn_after_turn(exported):
    """With a shared buffer: onnxruntime-genai does not run the last token of a reply, so a turn goes back over it."""
    import onnxruntime_genai as og

    model = og.Model(str(exported("qwen3_moe", activations="float", logits="last")))

    def take(generator, ids):
        generator.append_tokens(ids)
        for _ in range(6):
            generator.generate_next_token()
        return generator.get_sequence(0).tolist()

    def one_prompt(ids):
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=80)
        generator = og.Generator(model, params)
        return generator, take(generator, ids)

    generator, said = one_prompt(PROMPT)
    for new in ([5, 6, 7], [8], [9, 10]):  # three turns
        prompt = said + new
        generator.rewind_to(len(said) - 1)
        said = take(generator, said[-1:] + new)
        assert said == one_prompt(prompt)[1]
    for length in (30, 9, 1, 0):
        prompt = [*said[:length], 11, 12]
        generator.rewind_to(length)
        said = take(generator, [11, 12])
        assert said == one_prompt(prompt)[1]
