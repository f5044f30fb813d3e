"""inspect --fit: what it predicts is what the libraries do."""

from __future__ import annotations

import json
import re
import shutil
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny import make_float_checkpoint

from quantmoe.exporter.cli import main
from quantmoe.exporter.errors import ModelError, OptionError
from quantmoe.exporter.folder.tokenizer import load_tokenizer
from quantmoe.exporter.inspecting.expert_trace import Trace, read_trace
from quantmoe.exporter.inspecting.fit import device_slots, file_slot_bytes, fit
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.inspecting.reserve import reserve
from quantmoe.exporter.report import console
from quantmoe.exporter.targets import CPU, CUDA
from quantmoe.exporter.writing.checkpoint_fit import SIZES, ExportSize, export_sizes
from quantmoe.runtime.generate import Generator

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
CONTEXT = 100


def command_line(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quantmoe", *arguments])
        with pytest.raises(SystemExit, match=r"^0$"):
            main()


@pytest.fixture
def found(exported):
    return inspect(exported("qwen3_moe", activations="float"))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3_moe", {"cache": "auto"}),
        ("deepseek_v3", {"cache": "auto"}),  # latent attention
        ("qwen3_next", {"cache": "auto"}),  # states
        ("qwen3_moe", {"target": "cuda"}),  # attention of standard nodes, whose cache inspect does not count
    ],
)
def test_a_checkpoint_takes_what_its_export_takes(checkpoint, exported, architecture, options):
    target = options.get("target", "cpu")
    (size,) = export_sizes(checkpoint(architecture), target=target, context=CONTEXT)
    want = fit(inspect(exported(architecture, **options)), 1 << 33, CONTEXT)
    assert (size.quantize, size.refused) == (None, "")
    assert (size.experts, size.reserve) == (want.all_experts, want.reserve)
    assert size.cache == (want.cache or CONTEXT * 2 * 2 * prod((2, 48)) * 2)  # layers, keys and values, heads, bf16
    assert want.weights < size.others < 1.1 * want.weights  # the small ones are in model.onnx itself


def test_the_share_of_the_experts_that_fits():
    size = ExportSize(quantize=None, experts=1000, others=50, cache=30, reserve=20, least=10)
    assert [size.held(memory) for memory in (1100, 1099, 600, 110, 109)] == [1.0, 0.999, 0.5, 0.01, 0.0]


def test_floats_are_quantized_to_fit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, "width", 200)
    source = make_float_checkpoint(tmp_path / "floats", "qwen3_moe", num_hidden_layers=1, num_experts=4)
    command_line("inspect", str(source), "--fit", "1GB", "--reserve", "1MB", "--json")
    rows = json.loads(capsys.readouterr().out)["exports"]
    assert [row["quantize"] for row in rows] == list(SIZES)
    experts = [row["experts"] for row in rows]
    assert experts == sorted(experts)
    assert experts[-1] > 1.8 * experts[-2] > 3 * experts[0]
    some = rows[0]["total"] - rows[0]["experts"] // 2
    command_line("inspect", str(source), "--fit", str(some), "--reserve", "1MB")
    out = capsys.readouterr().out
    assert re.search(r"--quantize int4.*holds 50% of the experts", out)
    assert "generate --experts disk" in out


def test_everything_fits(found):
    every = fit(found, 1 << 33, CONTEXT)
    assert (every.hit_rate, every.missed, every.slots) == (1, 0, every.experts)
    # A token reads its experts, the linears and the head, and the keys and values before it; of the embeddings a row.
    (layer, _), dense = found["layers"], {t["name"]: t["bytes"] for t in found["dense"]}
    table = sum(size for name, size in dense.items() if "embed_tokens" in name)
    experts = 2 * layer["top_k"] * layer["bytes"] // layer["attributes"]["num_experts"]
    assert table > 0
    assert every.weights == sum(item["bytes"] for item in found["linears"]) + sum(dense.values())
    assert every.read == every.weights - table + experts + every.cache
    assert every.cache == CONTEXT * sum(node["bytes_per_token"] for node in found["attention"])
    assert every.tokens_per_second == pytest.approx(CPU.rates[0] / every.read)
    assert every.bounds == [CPU.rates[0] / every.read, None]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--experts", "disk", "--ram", "600kB"],
            r"experts: \d+ slots in 2 layers, \d+ % of \d+ uses hit, [\d.]+ [kM]B",
        ),
        (["--experts", "disk", "--ram", "auto"], r"experts: \d+ slots in 2 layers"),
        (["--experts", "auto", "--reserve", "1MB"], "experts: all in the mapped file"),
    ],
)
def test_generate_says_where_experts_were(given, said, exported, capsys):
    folder = exported("qwen3_moe", activations="float")
    command_line("generate", str(folder), "--ids", "5", "--max-new-tokens", "3", *given)
    assert re.search(said, capsys.readouterr().err)


def test_a_cache_on_the_cpu(found, exported, tmp_path):
    """Slots, misses and bytes of a session with this budget, to the last."""
    every = fit(found, 1 << 33, CONTEXT)
    memory = every.weights + every.cache + CPU.reserve + every.all_experts // 2
    half = fit(found, memory, CONTEXT)
    assert half.budget == every.all_experts // 2
    assert 0 < half.slots < half.experts
    assert half.hit_rate == half.slots / half.experts
    folder = exported("qwen3_moe", activations="float")
    generator = Generator(folder, threads=1, experts="disk", ram=half.budget, trace=tmp_path / "trace")
    generator.greedy([5], 12)
    counts = generator.experts_report()
    assert counts["slots"] == half.slots
    del generator
    traced = fit(found, memory, CONTEXT, trace=read_trace(tmp_path / "trace"))
    assert traced.from_trace
    assert traced.hit_rate == counts["hits"] / (counts["hits"] + counts["misses"])
    assert traced.missed * 12 == counts["bytes_read"]


@pytest.fixture
def on_gpu(cached):
    return inspect(cached("qwen3_moe"))


def of_half(found) -> tuple[int, int]:
    """GPU memory for half of the experts, and what an expert takes of RAM."""
    every = fit(found, 1 << 33, CONTEXT)
    return every.memory - every.budget + every.all_experts // 2, file_slot_bytes(found["layers"])


def test_ram_below_a_gpu(on_gpu):
    """What neither holds comes from the disk: the less, the more RAM there is."""
    memory, slot = of_half(on_gpu)
    whole = fit(on_gpu, memory, CONTEXT)
    assert 0 < whole.slots < whole.experts
    before = whole.missed
    # as many as one layer has, a few beyond those of the GPU, all but one
    for count in (whole.experts // 2, whole.slots + 5, whole.experts - 1):
        half = fit(on_gpu, memory, CONTEXT, rates=(None, None, 2e9), ram=CPU.reserve + count * slot)
        assert (half.ram_slots, half.slots, half.missed) == (count, whole.slots, whole.missed)
        assert 0 < half.from_disk < before
        before = half.from_disk
        assert 1 / half.tokens_per_second == pytest.approx(1 / whole.tokens_per_second + half.from_disk / 2e9)
        assert half.bounds == [*whole.bounds[:2], 2e9 / half.from_disk]
        assert half.bounds[1] == CUDA.rates[1] / half.missed
    enough = CPU.reserve + sum(file["bytes"] for file in on_gpu["files"])
    for ram, in_file in ((enough, False), (enough - 1, True)):  # to lock the file takes room for all of it
        all_of_them = fit(on_gpu, memory, CONTEXT, ram=ram)
        assert (all_of_them.ram_slots, all_of_them.in_file) == (whole.experts, in_file)
        assert all_of_them.tokens_per_second == whole.tokens_per_second
    gpu_holds_all = fit(on_gpu, 1 << 33, CONTEXT, ram=1)
    assert (gpu_holds_all.from_disk, gpu_holds_all.in_file) == (0, False)


def test_windows_of_states(exported):
    """All of a window are in memory, and a token reads one."""
    folder = exported("qwen3_next", logits=5, state_window=5)
    found = inspect(folder)
    keys = sum(node["bytes_per_token"] for node in found["attention"])
    states = sum(node["state_bytes"] for node in found["linear_attention"])
    assert states > 0
    generator = Generator(folder)
    buffers = [prod(generator.shape(name)) * generator.past[name][1].itemsize for name in generator.states]
    fits = fit(found, 1 << 33, CONTEXT)
    assert fits.cache - CONTEXT * keys == sum(buffers) == 5 * states
    one = {**found, "linear_attention": [n | {"attributes": {}} for n in found["linear_attention"]]}
    assert (fit(one, 1 << 33, CONTEXT).cache, fit(one, 1 << 33, CONTEXT).read) == (fits.cache - 4 * states, fits.read)
    assert reserve(found, 9, rows=3) - reserve(found, 0, rows=0) == 3 * (9 * keys + 5 * states)


def test_another_reserve(found):
    """A memory that is just large enough for one expert."""
    rest = fit(found, 1 << 33, CONTEXT)
    memory = rest.weights + rest.cache + file_slot_bytes(found["layers"])
    own = fit(found, memory, CONTEXT, reserve=0)
    assert (own.slots, own.reserve) == (1, 0)
    assert own.hit_rate == 0  # of two layers' experts one after the other, one is forgotten each time
    with pytest.raises(ModelError, match="1 of reserve"):
        fit(found, memory, CONTEXT, reserve=1)


def test_a_trace_of_two_levels():
    """RAM is asked for what the GPU misses: of 0 1 0 0 2 1 that is 0 1 0 2 1, and its two slots hit once."""
    layers = [{"node": "a", "experts": 4, "bytes": 8}]
    found = Trace(layers, 16, [(0, np.array([[expert]], np.uint16)) for expert in (0, 1, 0, 0, 2, 1)])
    assert found.lru([1]) == (1, 5, 40)
    assert found.lru([1], 2) == (1, 4, 32)
    assert found.lru([1], 4) == (2, 3, 24)


def test_a_trace_of_ram_below_a_gpu(on_gpu):
    memory, slot = of_half(on_gpu)
    counts = [layer["w13"]["shape"][0] for layer in on_gpu["layers"]]
    rng = np.random.default_rng(2)
    layers = [
        {"node": layer["node"], "experts": n, "bytes": layer["bytes"] // n}
        for n, layer in zip(counts, on_gpu["layers"], strict=True)
    ]
    runs = [(at, rng.integers(0, n, (1, 2)).astype(np.uint16)) for _ in range(200) for at, n in enumerate(counts)]
    trace = Trace(layers, slot, runs)
    one = fit(on_gpu, memory, CONTEXT, trace=trace, ram=CPU.reserve + max(counts) * slot)
    other = Trace([layer | {"bytes": 7} for layer in layers], 9, runs)  # of another export: experts are this one's
    assert fit(on_gpu, memory, CONTEXT, trace=other, ram=CPU.reserve + max(counts) * slot) == one
    most = fit(on_gpu, memory, CONTEXT, trace=trace, ram=CPU.reserve + (sum(counts) - 1) * slot)
    assert one.missed == most.missed
    on_device = device_slots(counts, [layer["bytes"] for layer in layers], one.budget)
    assert one.from_disk == trace.lru(on_device, max(counts))[2] / 200
    assert 0 < most.from_disk < one.from_disk < one.missed


def test_the_command_of_three_tiers(on_gpu, capsys):
    memory, slot = of_half(on_gpu)
    model, experts = on_gpu["model"], sum(layer["w13"]["shape"][0] for layer in on_gpu["layers"])
    ram = CPU.reserve + (experts - 2) * slot
    sizes = ["--fit", str(memory), "--context", str(CONTEXT)]
    for given, said in (
        ([], r"--experts host --gpu-memory \d+$"),
        (["--host-memory", str(ram)], rf"--experts disk --gpu-memory \d+ --ram {ram - CPU.reserve}$"),
        (["--host-memory", "64GB"], r"--experts host --gpu-memory \d+$"),
    ):
        command_line("inspect", model, *sizes, *given)
        out = capsys.readouterr().out
        assert re.search(said, out, re.M), out
        assert ("the disk" in out) == (given == ["--host-memory", str(ram)])
    command_line("inspect", model, *sizes, "--host-memory", str(ram), "--disk-speed", "1GB", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["ram_slots"], found["rates"]) == (experts - 2, [*CUDA.rates[:2], 1e9])


def test_what_is_refused_of_ram(found, on_gpu):
    memory, slot = of_half(on_gpu)
    with pytest.raises(ModelError, match="is for the CPU, whose RAM is the memory to fit"):
        fit(found, 1 << 33, CONTEXT, ram=1 << 33)
    most = max(layer["w13"]["shape"][0] for layer in on_gpu["layers"])
    with pytest.raises(ModelError, match=rf"expected at least {CPU.reserve + most * slot:,}: .* of one layer"):
        fit(on_gpu, memory, CONTEXT, ram=CPU.reserve + most * slot - 1)


def test_what_generate_leaves(exported, monkeypatch, tmp_path):
    """Where nobody says --reserve: the library's default, and a cache of what is asked for or genai_config.json's."""
    folder, seen = exported("qwen3_moe", activations="float"), []
    found, make = inspect(folder), Generator._open

    def session(self, ort, threads, prefault, entries):
        seen.append(entries["reserve"])
        return make(self, ort, threads, prefault, entries)

    monkeypatch.setattr(Generator, "_open", session)
    own = CPU.reserve + found["files"][0]["bytes"] - sum(layer["bytes"] for layer in found["layers"])
    a_token = sum(node["bytes_per_token"] for node in found["attention"])
    length = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))["search"]["max_length"]
    Generator(folder, experts="disk")
    Generator(folder, experts="auto", max_length=7)
    Generator(folder, experts="disk", ram="auto", capacity=9)
    with pytest.raises(OptionError, match=r"^ram is 1000000, but experts is None, expected disk or auto$"):
        Generator(folder, ram=1_000_000)
    assert seen == [own + n * a_token for n in (length, 7, 9)]
    for options in ({}, {"experts": "host"}, {"experts": "disk", "ram": 1 << 28}):
        seen.clear()
        Generator(folder, **options)
        assert seen == [None]
    Generator(folder, experts="disk", reserve=5)
    assert seen[1:] == [5]
    seen.clear()
    command_line("generate", str(folder), "--ids", "5,6", "--max-new-tokens", "3", "--experts", "disk")
    assert seen == [own + 5 * a_token]
    (tmp_path / "prompts").write_text("a\nbc\n", encoding="utf-8")
    seen.clear()
    command_line(
        "generate", str(folder), "--prompts", str(tmp_path / "prompts"), "--max-new-tokens", "3", "--experts", "disk"
    )
    longest = max(len(load_tokenizer(folder).encode(text).ids) for text in ("a", "bc"))
    assert seen == [own + 2 * (longest + 3) * a_token]
    shutil.copytree(folder, tmp_path, ignore=lambda *_: ["genai_config.json"], dirs_exist_ok=True)
    seen.clear()
    Generator(tmp_path, experts="disk")
    (tmp_path / "genai_config.json").write_text('{"search": {"max_length": "long"}}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"genai_config.json: search.max_length is 'long', expected a number"):
        Generator(tmp_path, experts="disk")
    assert seen == [None]


def test_what_is_refused(found, tmp_path):
    with pytest.raises(
        ModelError, match=r"1,000 bytes, expected at least [\d,]+\. [\d,]+ are for weights outside the experts"
    ):
        fit(found, 1000, CONTEXT)
    header = {"quantmoe_trace": 1, "slot_bytes": 9, "layers": [{"node": "a", "experts": 3, "bytes": 9}]}
    (tmp_path / "trace").write_text(json.dumps(header) + "\n", encoding="utf-8")
    with pytest.raises(ModelError, match="the trace is of a model with other layers or experts"):
        fit(found, 1 << 33, CONTEXT, trace=read_trace(tmp_path / "trace"))
    with pytest.raises(ModelError, match="expected QuantMoE nodes after routers"):
        fit(found | {"layers": []}, 1 << 33, CONTEXT)
