"""QuantMoE in the TensorRT plug-in, its experts in a data file: where they go, and what is wrong with the file."""

from __future__ import annotations

import ctypes
import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

if "QUANTMOE_TRT_DRIVER" not in os.environ:
    pytest.skip("make test-cuda builds the driver", allow_module_level=True)
from engines.test_identity import identity
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH
from support.cuda.layers import BASE, build
from support.cuda.trt import BUILD, FIELD_TYPES, RUNTIME, Attribute, Driver, Plugin, attributes_of, tensor

import quantmoe
from quantmoe.custom_ops.op import MoESpec
from quantmoe.exporter.inspecting.fit import device_slots

SETTINGS = ("FOLDER", "EXPERTS", "GPU_MEMORY", "RESERVE", "RAM", "VERIFY")


@dataclass
class Layer:
    """A layer's packed rows, w13 and w2, and a data file that has them."""

    spec: MoESpec
    rows: list[np.ndarray]
    file: Path

    @classmethod
    def write(cls, folder: Path, case=BASE) -> Layer:
        spec, _, *rows = build(case)
        spec = replace(spec, swiglu_alpha=1.75)  # which f32 has
        made = cls(spec, rows, folder / "model.onnx.data")
        with made.file.open("wb") as file:
            for at, packed in zip(made.offsets, rows, strict=True):
                file.seek(at)
                file.write(packed.tobytes())
        return made

    @property
    def offsets(self) -> list[int]:
        return [4096, -(-(4096 + self.rows[0].nbytes) // 64) * 64]

    @property
    def slot(self) -> int:
        return sum(packed.shape[1] for packed in self.rows)

    def fields(self, **strings: str | None) -> dict[str, Attribute]:
        """As TensorRT's parser passes them; a string replaces another, None removes it."""
        found: dict[str, str | None] = {}
        for name, packed, at in zip(("w13", "w2"), self.rows, self.offsets, strict=True):
            found |= {
                f"{name}_external": f"{at} {packed.nbytes} {self.file.name}",
                f"{name}_identity": identity(packed),
            }
        texts = {name: text for name, text in (found | strings).items() if text is not None}
        return attributes_of(self.spec) | {n: Attribute(n, FIELD_TYPES["s"], text) for n, text in texts.items()}

    def tensors(self, tokens: int = 3, dtype: str = "bf16", packed: tuple = ((0,), (0,)), top_k: int = 2):
        x, k = (tokens, self.spec.hidden_size), (tokens, top_k)
        return [
            tensor(t, d) for t, d in zip((dtype, "i64", "f32", "i32", "i32", dtype), (x, k, k, *packed, x), strict=True)
        ]


@pytest.fixture
def layer(tmp_path, monkeypatch):
    made = Layer.write(tmp_path)
    for name in SETTINGS:
        monkeypatch.delenv(f"QUANTMOE_{name}", raising=False)
    monkeypatch.setenv("QUANTMOE_FOLDER", str(tmp_path))
    return made


@pytest.fixture
def settings(layer, monkeypatch):
    def set_all(**values: str) -> None:
        for name, text in values.items():
            monkeypatch.setenv(f"QUANTMOE_{name}", text)

    return set_all


def enqueue(plugin: Plugin, shapes, ids: np.ndarray, output: np.ndarray | None = None) -> int:
    inputs = (ctypes.c_void_p * 5)(0, ids.ctypes.data, 0, 0, 0)
    outputs = (ctypes.c_void_p * 1)(output.ctypes.data if output is not None else 0)
    return plugin.call("enqueue", shapes, inputs, outputs, None, None)


IDS = np.array([[6, 1], [1, 0], [7, 6]])


def launched(fake: Driver) -> tuple[cuda.Experts, cuda.Launched]:
    found = cuda.Launched()
    fake.lib.driver_mixed(ctypes.byref(found))
    problem = found.experts
    return problem, found


def run(fake: Driver, plugin: Plugin, layer: Layer, ids: np.ndarray = IDS) -> tuple[cuda.Experts, cuda.Launched] | None:
    """What was launched, or None."""
    failed = enqueue(plugin, layer.tensors(len(ids), top_k=ids.shape[1]), ids)
    return None if failed else launched(fake)


def report(library: ctypes.CDLL) -> list[dict[str, int]]:
    text = ctypes.create_string_buffer(1 << 12)
    library.qm_experts_report(text, ctypes.c_size_t(len(text)))
    return [json.loads(line) for line in text.value.splitlines()]


def opened(fake: Driver, layer: Layer, **strings: str | None) -> Plugin:
    """A context of an engine that runs."""
    fake.log()
    made = fake.create(layer.fields(**strings), RUNTIME)
    assert made is not None, fake.log()
    return made.attach()


def refused(fake: Driver, layer: Layer, **strings: str | None) -> str:
    """What an engine says that does not find its experts: when it is deserialized, and at each call."""
    plugin, before = opened(fake, layer, **strings), fake.lib.driver_count(1)
    said = fake.log()
    for _ in range(2):
        assert run(fake, plugin, layer) is None
        assert fake.log() == said
    assert fake.lib.driver_count(1) == before
    return said


def test_an_engine_is_built_without_the_file(fake, layer, monkeypatch):
    """Its plan has the attributes alone, and a builder's calls write zeros."""
    monkeypatch.delenv("QUANTMOE_FOLDER")
    layer.file.unlink()
    built = fake.create(layer.fields(), BUILD)
    shapes = layer.tensors()
    assert built.call("configure", shapes) == 0, fake.log()
    size = built.call("workspace", shapes)
    output, before = np.full((3, layer.spec.hidden_size), 7, np.uint16), fake.lib.driver_count(1)
    assert enqueue(built, shapes, IDS, output) == 0, fake.log()
    assert not output.any()
    assert fake.lib.driver_count(1) == before
    assert {n: a.value for n, a in built.serialize().items()} == {n: a.value for n, a in layer.fields().items()} | {
        "workspace_bytes": size
    }
    for slots in (0, 1, 8):
        problem = cuda.problem(layer.spec, "bf16", 3, 2, 8)
        problem.slots = slots
        assert cuda.plan(problem, cuda.Device(90, 132, 233472)).workspace_bytes <= size


def test_an_identity_of_constants_is_not_in_the_plan(fake, layer):
    """It would make layers differ that a builder times once."""
    made = fake.create(layer.fields(w13_external=None, w2_external=None), RUNTIME)
    assert {n: a.value for n, a in made.serialize().items()} == layer.spec.attributes()


def test_all_fit(fake, layer):
    plugin = opened(fake, layer)
    problem, found = run(fake, plugin, layer)
    assert (problem.slots, problem.staging, found.experts.slot_memory, found.experts.cache_state) == (0, 0, None, None)
    for at, packed in zip((found.w13, found.w2), layer.rows, strict=True):
        assert ctypes.string_at(at, packed.nbytes) == packed.tobytes()
    size = sum(packed.nbytes for packed in layer.rows)
    free = (1 << 32) - (1 << 30)
    assert fake.log().splitlines() == [
        f"3 quantmoe: experts = auto: all 8 experts are in the device's memory ({size} bytes; 4294967296 bytes free "
        f"less {1 << 30})"
    ]
    assert size < free
    assert run(fake, plugin, layer) is not None
    assert fake.log() == ""


def test_slots(fake, layer, settings):
    """As in ONNX Runtime; what the products miss is read in the file's own pages."""
    settings(EXPERTS="host", GPU_MEMORY=str(4 * layer.slot))
    plugin = opened(fake, layer)
    problem, found = run(fake, plugin, layer)
    assert [problem.slots] == device_slots([8], [layer.slot], 4 * layer.slot) == [3]
    assert None not in (found.experts.slot_memory, found.experts.cache_state)
    for at, packed in zip((found.w13, found.w2), layer.rows, strict=True):
        assert ctypes.string_at(at, packed.nbytes) == packed.tobytes()
    assert "experts = host: device memory for 3 of 8 experts, and " in fake.log()


def test_experts_are_read_from_the_file(fake, layer, settings):
    ram = 8 * sum(-(-w.shape[1] // 4096) * 4096 + 4096 for w in layer.rows)
    settings(EXPERTS="disk", GPU_MEMORY=str(3 * layer.slot), RAM=str(ram))
    plugin = opened(fake, layer)
    _, found = run(fake, plugin, layer)
    table = (ctypes.c_void_p * 16).from_address(found.experts.rows)
    for i, packed in enumerate(layer.rows):
        for expert in (0, 1, 6, 7):
            assert ctypes.string_at(table[8 * i + expert], packed.shape[1]) == packed[expert].tobytes()
    assert report(fake.lib)[-1]["bytes_read"] == 4 * layer.slot
    os.truncate(layer.file, 5000)
    fake.log()
    assert run(fake, plugin, layer, np.array([[4, 5]])) is None
    assert '1 QuantMoE layer "experts": expert 4: ' in (log := fake.log())
    assert str(layer.file) in log


def test_engines_and_contexts_of_a_folder_share_a_cache(fake, layer, settings):
    settings(GPU_MEMORY=str(4 * layer.slot))
    first, again = opened(fake, layer), opened(fake, layer)
    launches = [run(fake, plugin, layer)[1] for plugin in (first, again, first.attach())]
    assert (
        len({found.experts.slot_memory for found in launches})
        == len({found.experts.cache_state for found in launches})
        == 1
    )
    assert [entry["layers"] for entry in report(fake.lib)] == [1]
    w2 = f"{layer.offsets[1] + 64} {layer.rows[1].nbytes - layer.rows[1].shape[1]} {layer.file.name}"
    w13 = f"{layer.offsets[0] + 64} {layer.rows[0].nbytes - layer.rows[0].shape[1]} {layer.file.name}"
    late = refused(fake, layer, w13_external=w13, w2_external=w2, w13_identity=None, w2_identity=None)
    assert "a layer came after the first run of others, expected all layers before it" in late
    del first, again, launches
    assert report(fake.lib) == []
    settings(GPU_MEMORY=str(5 * layer.slot))
    problem, _ = run(fake, opened(fake, layer), layer)
    assert problem.slots == 4


def test_graphs(fake, layer, settings):
    """The first call takes memory; a graph may capture those after it."""
    settings(GPU_MEMORY=str(4 * layer.slot))
    plugin = opened(fake, layer)
    fake.lib.driver_order(1, 1)
    assert run(fake, plugin, layer) is None
    assert fake.log() == (
        '1 QuantMoE layer "experts": QUANTMOE_EXPERTS = auto: the first run is captured, expected a run before it\n'
    )
    fake.lib.driver_order(1, 0)
    assert run(fake, plugin, layer) is not None
    fake.lib.driver_order(1, 1)
    assert run(fake, plugin, layer) is not None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"FOLDER": ""}, "its experts are in model.onnx.data: set QUANTMOE_FOLDER to the exported folder"),
        ({"FOLDER": "/nowhere"}, "QUANTMOE_FOLDER is /nowhere: No such file or directory"),
        ({"FOLDER": "/"}, "/model.onnx.data: No such file or directory"),
        ({"EXPERTS": "ssd"}, 'QUANTMOE_EXPERTS is "ssd", the CUDA library takes gpu, host, disk or auto'),
        ({"GPU_MEMORY": "2GB"}, 'QUANTMOE_GPU_MEMORY is "2GB", expected a number of bytes or auto'),
        (
            {"EXPERTS": "gpu", "GPU_MEMORY": "9"},
            "QUANTMOE_GPU_MEMORY and QUANTMOE_RESERVE need QUANTMOE_EXPERTS = host",
        ),
        ({"RESERVE": "9", "GPU_MEMORY": "9"}, "QUANTMOE_RESERVE is of QUANTMOE_GPU_MEMORY = auto, here it is 9"),
        ({"EXPERTS": "host", "RAM": "9"}, "QUANTMOE_RAM needs QUANTMOE_EXPERTS = disk or auto, here it is host"),
        ({"RAM": "9"}, "QUANTMOE_RAM is 9, expected at least the 94208 bytes of one expert"),
        ({"VERIFY": "yes"}, 'QUANTMOE_VERIFY is "yes", expected 0 or 1'),
    ],
    ids=str,
)
def test_settings_that_are_refused(fake, layer, settings, values, message):
    settings(**values)
    assert refused(fake, layer).startswith(f'1 QuantMoE layer "experts": {message}')


def test_memory_for_less_than_an_expert(fake, layer, settings):
    settings(GPU_MEMORY=str(layer.slot - 1))
    assert run(fake, opened(fake, layer), layer) is None
    assert fake.log().startswith(
        f'1 QuantMoE layer "experts": QUANTMOE_EXPERTS = auto: QUANTMOE_GPU_MEMORY is {layer.slot - 1}, expected at '
        f"least the {layer.slot} bytes of one expert of each layer; see QUANTMOE_GPU_MEMORY and QUANTMOE_RESERVE"
    )


def test_all_in_the_gpu_or_an_error(fake, layer, settings):
    settings(EXPERTS="gpu")
    problem, _ = run(fake, opened(fake, layer), layer)
    assert problem.slots == 0
    assert "experts = gpu: all 8 experts are in the device's memory" in fake.log()


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_other_data_is_refused(fake, layer, settings, name):
    """quant_moe.def, Identity, of what is in the file."""
    at = layer.offsets[name == "w2"]
    data = bytearray(layer.file.read_bytes())
    data[at + 70] ^= 1  # no sample
    layer.file.write_bytes(data)
    assert run(fake, opened(fake, layer), layer) is not None, fake.log()
    settings(VERIFY="1")
    want = f"{name} is not the data that this model was exported with: the BLAKE3 of its bytes is "
    assert f'1 QuantMoE layer "experts": {layer.file}: {want}' in refused(fake, layer)
    settings(VERIFY="0")
    data[at] ^= 1
    layer.file.write_bytes(data)
    want = f"{name} is not the data that this model was exported with: the BLAKE3 of its samples is "
    assert want in refused(fake, layer)
    plugin = opened(fake, layer, **{f"{name}_identity": None})  # an export without one
    assert run(fake, plugin, layer) is not None, fake.log()


def test_a_file_that_is_too_short(fake, layer):
    os.truncate(layer.file, layer.offsets[1] + layer.rows[1].nbytes - 1)
    size, rows = layer.file.stat().st_size, layer.rows[1].nbytes
    assert refused(fake, layer) == (
        f'1 QuantMoE layer "experts": {layer.file} has {size} bytes, w2 is {rows} from {layer.offsets[1]} on\n'
    )
    os.truncate(layer.file, 0)
    assert refused(fake, layer) == f'1 QuantMoE layer "experts": {layer.file}: it is empty\n'


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ({"w2_external": None}, "w2_external is missing, expected that of w13 and of w2, or neither"),
        ({"w13_external": None}, "w13_external is missing"),
        ({"w13_external": "model.onnx.data"}, 'w13_external is "model.onnx.data", expected first byte, bytes, and'),
        ({"w13_external": "0  64 model.onnx.data"}, 'w13_external is "0  64 model.onnx.data", expected first byte'),
        ({"w13_external": "-64 64 model.onnx.data"}, "expected first byte"),
        ({"w13_external": "64 99999999999999999999 a"}, "expected first byte"),
        ({"w13_external": "64 64 "}, "expected first byte"),
        ({"w13_external": "64 64 .."}, "expected first byte"),
        ({"w13_external": "64 64 ../model.onnx.data"}, "expected first byte"),
        ({"w13_external": "4097 {bytes} a"}, "w13_external begins at byte 4097, expected a multiple of 64"),
        ({"w13_external": "4096 0 a"}, "w13_external has 0 bytes, expected a multiple of the {row} of an expert"),
        ({"w13_external": "4096 64 a"}, "w13_external has 64 bytes, expected a multiple of the {row} of an expert"),
        ({"w13_external": "4096 {row} a"}, "w13_external has 1 experts and w2_external 8, expected the same number"),
    ],
    ids=str,
)
def test_bad_attributes(fake, layer, strings, message):
    """No plug-in is made, in either phase: a parser says so, and a plan is not of this release."""
    sizes = {"bytes": layer.rows[0].nbytes, "row": layer.rows[0].shape[1]}
    given = {name: text and text.format(**sizes) for name, text in strings.items()}
    for phase in (BUILD, RUNTIME):
        fake.log()
        assert fake.create(layer.fields(**given), phase) is None
        log = fake.log()
        assert log.startswith('1 QuantMoE layer "experts": ')
        assert message.format(**sizes) in log


def test_an_identity_that_is_none(fake, layer):
    said = refused(fake, layer, w13_identity="blake3")
    assert 'w13_identity is "blake3", expected two BLAKE3 sums' in said


def test_more_experts_than_the_layer_has(fake, layer):
    """The file may have more; the node may not."""
    row, other = layer.rows[0].shape[1], layer.rows[1].shape[1]
    given = {"w13_external": f"4096 {9 * row} a", "w2_external": f"4096 {9 * other} a"}
    assert fake.create(layer.fields(**given), BUILD) is None
    assert "num_experts = 8" in fake.log()


def test_inputs_that_have_bytes(fake, layer):
    built = fake.create(layer.fields(), BUILD)
    shapes = layer.tensors(packed=tuple((8, packed.shape[1] // 4) for packed in layer.rows))
    assert built.call("configure", shapes) != 0
    assert "expected [0]: their bytes are in files" in fake.log()
    built = fake.create(attributes_of(layer.spec), BUILD)
    assert built.call("configure", layer.tensors()) != 0
    assert "w13 has shape [0], expected [experts, " in fake.log()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("where", ["all", "gpu", "slots", "disk"])
def test_the_bytes_of_constants(driver, tmp_path, settings, where, dtype):
    """Tokens, prompts, and captured graphs of them, against a plug-in whose experts are inputs on the device."""
    case = replace(BASE, experts=96, top_k=8, hidden=512, intermediate=256, act_order="shared", group_size=64)
    layer = Layer.write(tmp_path, case)
    memory = {"GPU_MEMORY": str(24 * layer.slot)}
    settings(**{
        "all": {}, "gpu": {"EXPERTS": "gpu"}, "slots": {"EXPERTS": "host", **memory},
        "disk": {"EXPERTS": "disk", "RAM": str(100 * (layer.slot + (1 << 14))), **memory},
    }[where])  # fmt: skip
    packed = [torch.from_numpy(w).cuda() for w in layer.rows]
    shapes_of = {
        "constants": lambda n: layer.tensors(n, dtype, tuple((96, w.shape[1] // 4) for w in layer.rows), 8),
        "external": lambda n: layer.tensors(n, dtype, top_k=8),
    }
    fields = {"constants": attributes_of(layer.spec), "external": layer.fields()}
    plugins, workspaces, made = {}, {}, {}
    for kind, given in fields.items():
        built = driver.create(given)
        assert built.call("configure", shapes_of[kind](600)) == 0, driver.log()
        size = built.call("workspace", shapes_of[kind](600))
        workspaces[kind] = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
        plugins[kind] = driver.create(built.serialize(), RUNTIME)
        assert plugins[kind] is not None, driver.log()
        plugins[kind] = plugins[kind].attach()
    stream = torch.cuda.Stream()
    empty = torch.empty(0, dtype=torch.int32, device="cuda")

    def call(kind: str, inputs: list[torch.Tensor], output: torch.Tensor) -> int:
        shapes = shapes_of[kind](len(output))
        weights = packed if kind == "constants" else [empty, empty]
        pointers = (ctypes.c_void_p * 5)(*(x.data_ptr() for x in [*inputs, *weights]))
        results = (ctypes.c_void_p * 1)(output.data_ptr())
        assert plugins[kind].call("shape_change", shapes) == 0, driver.log()
        arguments = (ctypes.c_void_p(p) for p in (workspaces[kind].data_ptr(), stream.cuda_stream))
        return plugins[kind].call("enqueue", shapes, pointers, results, *arguments)

    for step, tokens in enumerate((1, 4, 600, 1, 40, 1)):
        hidden, ids, weights = case.tokens(tokens, step)
        inputs = [torch.from_numpy(hidden).to(TORCH[dtype]).cuda(), torch.from_numpy(ids).cuda(),
                  torch.from_numpy(weights).cuda()]  # fmt: skip
        for kind in fields:
            output = torch.full_like(inputs[0], float("nan"))
            torch.cuda.synchronize()
            assert call(kind, inputs, output) == 0, driver.log()
            torch.cuda.synchronize()
            made[kind] = output.view(torch.int16)
        assert torch.equal(made["constants"], made["external"]), (where, tokens)
        assert made["constants"].any()
        graph, output = torch.cuda.CUDAGraph(), torch.full_like(inputs[0], float("nan"))
        driver.log()
        with warnings.catch_warnings(action="ignore"), torch.cuda.graph(graph, stream=stream):  # that it is empty
            failed = call("external", inputs, output)
        if where == "disk":
            assert failed
            assert "a CUDA graph is captured, whose replays read no file" in driver.log()
            continue
        assert not failed, driver.log()
        for seed in (1, 2, 3):  # other experts, so that slots change in the replays
            other = case.tokens(tokens, 100 * seed + step)
            for to, new in zip(inputs, other, strict=True):
                to.copy_(torch.from_numpy(new))
            output.fill_(float("nan"))
            graph.replay()
            want = torch.full_like(output, float("nan"))
            torch.cuda.synchronize()
            assert call("constants", inputs, want) == 0, driver.log()
            torch.cuda.synchronize()
            assert torch.equal(output.view(torch.int16), want.view(torch.int16)), (where, tokens, seed)
    (found,) = report(ctypes.CDLL(quantmoe.trt_library_path()))
    if where in ("slots", "disk"):
        assert found["slots"] == device_slots([96], [layer.slot], 24 * layer.slot)[0]
        assert found["hits"] > 0
        assert found["misses"] > found["slots"], "experts were evicted"
    else:
        assert (found["slots"], found["hits"]) == (0, 0)
