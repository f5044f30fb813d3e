"""quantmoe bench model MODEL on tiny models: what it writes and that peers load; nothing about time."""

import json
import shutil
import subprocess
import sys
import time
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
import typer
from rich.console import Console
from safetensors.numpy import load_file
from support.harness.sweeps import every
from typer.testing import CliRunner

from quantmoe.benchmarks import bench_engines as bench_sides
from quantmoe.benchmarks import bench_model as bench_model
from quantmoe.benchmarks import bench_models as bench_made
from quantmoe.benchmarks.bench_engines import LlamaCpp, OnCuda, Ours, Process, by_operator, token_ids
from quantmoe.benchmarks.bench_model import WARM, ModelCell, TimedStep, _timings, alternate, cells, touched_bytes
from quantmoe.benchmarks.bench_models import gguf_types, layers_that_fit
from quantmoe.benchmarks.random_checkpoint import CONFIGS, cut, group_size_of, parameters, quantized, write
from quantmoe.benchmarks.random_gguf import ARCHITECTURES, write_gguf
from quantmoe.exporter.errors import ModelError
from quantmoe.exporter.inspecting.expert_trace import read_trace
from quantmoe.exporter.inspecting.inspect import inspect
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}


def tiny(shape: str) -> dict[str, object]:
    config = cut(CONFIGS[shape], 4 if "linear_conv_kernel_dim" in CONFIGS[shape] else 2)
    sizes = TINY | (LATENT if "kv_lora_rank" in config else {})
    return config | {name: value for name, value in sizes.items() if name in config}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss: windows, biases, sinks."""
    made = tmp_path_factory.mktemp("bench")
    write(made / "checkpoint", tiny("gpt-oss-20b"), 32)
    export(made / "checkpoint", made / "model")
    return made / "model"


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "quantmoe.exporter.cli", "bench", "model", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    files = ["--output", tmp_path / "cells.json", "--plot", tmp_path / "cells.png"]
    lists = "--depths 0,40,300 --prefill 9,300 --batch 1,2 --repeat 2 --steps 3 --threads 2 --cpu-time"
    out = " ".join(run(folder, *lists.split(), *files, "--profile").split())
    found = json.loads((tmp_path / "cells.json").read_text(encoding="utf-8"))
    assert [TimedStep(c["step"], c["tokens"], c["depth"], c["batch"]) for c in found["cells"]] == [
        TimedStep("prefill", 9, 0, 1),
        *(TimedStep("decode", batch, depth, batch) for batch in (1, 2) for depth in (0, 40)),
    ]
    assert "prefill 300: left out: the model's context is 256" in out
    assert (found["layers"], found["threads"]) == (2, 2)
    assert found["peak_bytes"]["ours"] > 1e6
    for c in found["cells"]:
        assert 0 < c["ms_min"] <= c["ms"]
        assert c["tokens_per_second"] == pytest.approx(1e3 * c["tokens"] / c["ms"])
        assert c["peer"] is None
        assert (c["bytes"] is None) == (c["step"] == "prefill")
    profiled = {p["step"]["step"]: {n["operator"]: n for n in p["nodes"]} for p in found["profile"]}
    assert profiled.keys() == {"prefill", "decode"}
    for nodes in profiled.values():
        assert nodes["QuantMoE"]["nodes"] == 2
        assert nodes["QuantMoE"]["ms"] > 0
    assert "QuantMoE" in out
    assert (tmp_path / "cells.png").read_bytes().startswith(b"\x89PNG")


CUDA = "CUDAExecutionProvider" in onnxruntime.get_available_providers()


@pytest.mark.skipif(not CUDA, reason="no CUDA provider")
def test_on_a_gpu(tmp_path: Path) -> None:
    """The trained demo: all cells, and the last step's logits are those of a step that is not captured."""
    export("samples/demo_model/checkpoint", tmp_path / "out", target="cuda", dtype="f16")
    lists = ["--depths", "0,200", "--prefill", "9,100", "--batch", "1,3", "--repeat", "2", "--steps", "3"]
    run(tmp_path / "out", "--device", "cuda", *lists, "--output", tmp_path / "cells.json")
    found = json.loads((tmp_path / "cells.json").read_text(encoding="utf-8"))
    assert (len(found["cells"]), found["device"], found["read_gbps"]) == (6, "cuda", None)
    side = OnCuda(str(tmp_path / "out"))
    side.fill(7, 2, 40)
    side.decode(3)
    captured = side.step.logits.numpy()
    side.step._options = side._model.run_options(-1)
    side.decode(3)
    assert captured.any()
    assert (side.step.logits.numpy() == captured).all()


def test_both_devices_run_the_same_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, on the CPU: the same random cache, the same logits."""
    monkeypatch.setattr(bench_sides, "Generator", lambda path, **_: Generator(path, threads=1, chunk=8))
    gpu, cpu = OnCuda(str(folder)), Ours(str(folder), 1)
    assert gpu.cache_bytes() == cpu.cache_bytes()
    assert gpu.prefill(20) > 0
    for side in (gpu, cpu):
        side.fill(7, 2, 40)
        assert side.decode(3) > 0
    logits = gpu.step.logits.numpy()
    assert logits.any()
    np.testing.assert_array_equal(logits, cpu.logits)


@pytest.mark.skipif(CUDA, reason="a CUDA provider")
def test_no_gpu(folder: Path) -> None:
    with pytest.raises(ModelError, match="ours: this onnxruntime has no CUDA provider; pip uninstall onnxruntime"):
        bench_model.bench_model(str(folder), device="cuda")


@pytest.mark.every
def test_a_shape_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "qwen3-30b-a3b", tiny("qwen3-30b-a3b") | {"num_hidden_layers": 3})
    for module in (bench_made, bench_model):
        monkeypatch.setattr(module, "in_process", lambda name, function, *arguments: function(*arguments))
    options = {"depths": [3], "prefill": [4], "batch": [1], "repeat": 1, "threads": 1, "keep": tmp_path}
    found = bench_model.bench_model("qwen3-30b-a3b", layers=2, lm_head="int8", **options)
    (made,) = tmp_path.iterdir()  # the checkpoint is gone
    assert found["layers"] == 2
    assert gguf_types(inspect(made)) == ("Q4_0", "Q8_0")
    written = (made / "model.onnx").stat().st_mtime_ns
    bench_model.bench_model("qwen3-30b-a3b", layers=2, lm_head="int8", **options)
    assert (made / "model.onnx").stat().st_mtime_ns == written
    kept_nowhere = options | {"keep": None, "profile": True}
    assert len(bench_model.bench_model("qwen3-30b-a3b", layers=2, **kept_nowhere)["profile"]) == 2


@pytest.mark.parametrize(
    ("weights", "formats"),
    every([("Q4_K_M", [("q4_k", "q4_k"), ("q4_k", "q6_k")]), ("Q4_0", [("int4", "int4"), ("int4", "int4")])], 0),
)
def test_both_sides_have_one_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, formats: list[tuple[str, str]]
) -> None:
    gguf = pytest.importorskip("gguf")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
    monkeypatch.setitem(CONFIGS, "qwen3-30b-a3b", tiny("qwen3-30b-a3b") | sizes)
    for module in (bench_made, bench_model):
        monkeypatch.setattr(module, "in_process", lambda name, function, *arguments: function(*arguments))
    options = {"depths": [3], "prefill": [4], "batch": [1], "repeat": 1, "threads": 1, "keep": tmp_path}
    bench_model.bench_model("qwen3-30b-a3b", layers=2, weights=weights, **options)
    made, file = sorted(tmp_path.iterdir())
    assert file.name == f"qwen3-30b-a3b-2-{weights}.gguf"
    layers = [layer["attributes"] for layer in inspect(made)["layers"]]
    assert [(a["w13_format"], a["w2_format"]) for a in layers] == formats
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert types["output.weight"] == "Q6_K"  # as llama-quantize writes it
    assert types["token_embd.weight"] == weights.removesuffix("_M")
    assert bench_model.bench_model(str(file), **options)["cells"]
    assert sorted(tmp_path.iterdir()) == [made, file]


def test_genai_runs_the_same_folder_and_another(folder: Path, tmp_path: Path) -> None:
    """With the installed package's library: a folder's is native code of whoever exported it."""
    pytest.importorskip("onnxruntime_genai")
    other = shutil.copytree(folder, tmp_path / "other")
    (other / "libquantmoe_ort.so").write_text("not a library", encoding="utf-8")
    lists = "--depths 0,20 --prefill 9 --batch 1,2 --repeat 2 --steps 2"
    run(folder, "--against", f"genai,{other}", *lists.split(), "--output", tmp_path / "cells.json")
    found = json.loads((tmp_path / "cells.json").read_text(encoding="utf-8"))
    assert [c["peer"] for c in found["cells"]] == ["genai", str(other)] * 5
    assert all(c["ratio"] > 0 for c in found["cells"])


@pytest.mark.parametrize("shape", [name for name in CONFIGS if CONFIGS[name]["model_type"] in ARCHITECTURES])
def test_every_shape_loads_in_llama_cpp(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from quantmoe.benchmarks.random_gguf import write_gguf

    size = write_gguf(tmp_path / "model.gguf", tiny(shape))
    assert size == (tmp_path / "model.gguf").stat().st_size
    side = Process("llama.cpp", LlamaCpp, str(tmp_path / "model.gguf"), 1)
    try:
        for depth in (0, 5, 17):
            side.fill(depth, 2, 40)
            first = side.decode(3)
            logits = side.logits()
            assert side.decode(3) > 0 < first
            assert logits.shape == (256,)
            assert np.isfinite(logits).all()
            assert np.std(logits) > 0.1
            np.testing.assert_allclose(side.logits(), logits, atol=0.02)  # from the same depth again; the cache is f16
    finally:
        side.close()


def test_gguf_names_what_it_has_no_name_for(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from quantmoe.benchmarks.random_gguf import write_gguf

    with pytest.raises(ValueError, match="no GGUF of model_type llama4_text; expected one of qwen3_moe"):
        write_gguf(tmp_path / "model.gguf", {"model_type": "llama4_text"})
    with pytest.raises(ValueError, match="rows of 128, Q4_K has blocks of 256"):
        write_gguf(tmp_path / "model.gguf", tiny("mixtral-8x7b"), "Q4_K")


def test_a_run_continues_its_own_cache(folder: Path) -> None:
    """A step's past is the present of the one before: the same logits as of Generator, which copies."""
    side, generator = Ours(str(folder), 1), Generator(folder, 1)
    side.prefill(7)
    logits, _ = generator.step(token_ids(1, 7), generator.start(1))
    assert np.array_equal(side.logits, logits)
    side.fill(0, 2, 10)
    side.decode(3)
    past, ids = generator.start(2), token_ids(2, 3)
    for at in range(3):
        logits, past = generator.step(ids[:, at : at + 1], past)
    assert np.array_equal(side.logits, logits)


# --- what is counted ---


def test_ratio_is_of_neighbours() -> None:
    step = TimedStep("decode", 8, 100, 8)
    times = {"ours": [1.0, 2.0, 10.0], "a": [1.5, 3.0, 10.0], "b": [4.0, 1.0, 5.0]}
    first, second = cells(step, times, touched=4 * 10**9, read=10e9)
    assert (first.peer, first.ratio, first.ratio_min) == ("a", 1.5, 1.5)
    assert (second.peer, second.ratio, second.ratio_min) == ("b", 0.5, 1.0)
    assert (first.ms, first.ms_min, first.peer_ms, first.peer_ms_min) == (2000, 1000, 3000, 1500)
    assert (first.tokens_per_second, first.peer_tokens_per_second) == (4, pytest.approx(8 / 3))
    assert first.bandwidth_share == pytest.approx(0.2)
    (alone,) = cells(TimedStep("prefill", 50, 0, 1), {"ours": [2.0]}, None, 10e9)
    assert alone == ModelCell(
        step="prefill",
        tokens=50,
        depth=0,
        batch=1,
        ms=2000,
        ms_min=2000,
        tokens_per_second=25,
        bytes=None,
        bandwidth_share=None,
    )


def test_a_side_that_begins_again_is_warm() -> None:
    """llama.cpp's first tokens after another process has run are slow, and would count for us."""

    class Side:
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        def fill(self, depth: int, batch: int, length: int) -> None: ...

        def prefill(self, tokens: int) -> float:
            self.calls.append(("prefill", tokens))
            return 1.0

        def decode(self, steps: int) -> float:
            self.calls.append(("decode", steps))
            return 1.0

    side = Side()
    wanted = [TimedStep("prefill", 300, 0, 1), TimedStep("decode", 1, 0, 1)]
    _timings(Console(quiet=True), {"ours": side}, wanted, repeat=1, steps=3, room=64)  # type: ignore[dict-item]
    assert side.calls == [("prefill", WARM), ("prefill", 300)] * 2 + [("decode", WARM), ("decode", 3)] * 2


def test_sides_alternate_and_a_peer_that_fails_is_dropped() -> None:
    order: list[str] = []

    def call(side: str) -> float:
        order.append(side)
        if side == "c" and order.count("c") >= 2:
            raise ModelError("no memory")
        return float(len(order))

    dropped: list[str] = []
    times = alternate({x: x for x in "abc"}, call, 2, lambda name, error: dropped.append(f"{name}: {error}"))
    assert "".join(order) == "abcabcab"
    assert times == {"a": [4.0, 7.0], "b": [5.0, 8.0]}  # without the first round
    assert dropped == ["c: no memory"]
    with pytest.raises(ModelError, match="no memory"):
        alternate({"c": "c"}, call, 2, lambda name, error: None)  # ours


def test_touched_bytes(folder: Path) -> None:
    found = inspect(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    expert = sum(layer["bytes"] for layer in found["layers"]) / 32
    linears = sum(linear["bytes"] for linear in found["linears"])
    assert "lm_head" in {linear["module"] for linear in found["linears"]}
    assert touched_bytes(found, {}, config, 0, 1) == pytest.approx(linears + 4 * expert, rel=0.05)
    both = touched_bytes(found, {}, config, 0, 2) - touched_bytes(found, {}, config, 0, 1)
    assert both == pytest.approx((1 - 4 / 32) * 4 * expert, abs=2)  # the second token's, of those not yet read
    cache = {"past_key_values.0.key": 10, "past_key_values.1.key": 10}
    deep = touched_bytes(found, cache, config, 1000, 3) - touched_bytes(found, cache, config, 0, 3)
    assert deep == 3 * 10 * (128 + 1000)  # a window of 128 in layer 0


def test_touched_bytes_of_a_model_that_says_nothing(folder: Path) -> None:
    """Routers say how many experts a token has; where they are plain nodes, config.json; or nothing does."""
    found, config = inspect(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    want = touched_bytes(found, {}, config, 0, 2)
    plain = found | {"layers": [layer | {"top_k": None} for layer in found["layers"]]}
    silent = {name: value for name, value in config.items() if name != "num_experts_per_tok"}
    assert (touched_bytes(found, {}, silent, 0, 2), touched_bytes(plain, {}, config, 0, 2)) == (want, want)
    assert touched_bytes(plain, {}, silent, 0, 2) is None


@pytest.mark.parametrize("source", every(["checkpoint", "gguf"], 0))
def test_random_routers_are_uniform(tmp_path: Path, source: str) -> None:
    """128 tokens of 8 experts each ask for nearly all 128, in the last layers, too."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = cut(CONFIGS["qwen3-30b-a3b"], 6) | sizes | {"head_dim": 64, "vocab_size": 256}
    if source == "gguf":
        pytest.importorskip("gguf")
        write_gguf(tmp_path / "model.gguf", config)
    else:
        write(tmp_path / "checkpoint", config, 32)
    export(tmp_path / ("model.gguf" if source == "gguf" else source), tmp_path / "model")
    generator = Generator(tmp_path / "model", trace=tmp_path / "trace")
    generator.generate_batch([[id] for id in range(128)], 1)
    del generator  # writes the trace's end
    touched = [int((uses > 0).sum()) for uses in read_trace(tmp_path / "trace").use()]
    assert len(touched) == 6
    assert min(touched) >= 120, touched


def test_random_weights_in_bf16(tmp_path: Path) -> None:
    """What `export --quantize` takes: no int4 tensors, and no word of a quantizer."""
    config = tiny("qwen3-30b-a3b")
    write(tmp_path, config, 0)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    tensors = [tensor for file in tmp_path.glob("*.safetensors") for tensor in load_file(file).values()]
    assert {tensor.dtype for tensor in tensors} == {np.dtype(ml_dtypes.bfloat16)}
    assert sum(tensor.size for tensor in tensors) == sum(prod(shape) for shape in parameters(config).values())
    assert all((tensor != 0).any() for tensor in tensors)


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_the_group_size_divides_the_sizes(model: str) -> None:
    """Of ort_cuda_bench, which failed at its default for gpt-oss."""
    size = group_size_of(CONFIGS[model])
    assert size == (32 if model in ("glm-4.5-air", "gpt-oss-20b", "nemotron-3-nano-30b-a3b") else 128)
    assert all(shape[-1] % size == 0 for name, shape in parameters(CONFIGS[model]).items() if quantized(name))


def test_profile_sums_by_operator() -> None:
    nodes = (("add", "Add", 5), ("moe", "QuantMoE", 2000), ("more", "Add", 7))
    events = [{"name": node, "args": {"op_name": name}, "dur": dur} for node, name, dur in nodes]
    assert by_operator(events) == [("QuantMoE", 1, 2.0), ("Add", 2, 0.012)]


def test_layers_that_fit() -> None:
    config = CONFIGS["deepseek-v3"]
    assert layers_that_fit(config, None, 1, int(1e15), int(1e15)) == 61
    some = layers_that_fit(config, None, 1, int(60e9), int(1e15))
    assert 2 < some < 10
    assert layers_that_fit(config, None, 2, int(60e9), int(1e15)) < some
    assert layers_that_fit(config, None, 1, int(1e15), int(60e9)) < some
    assert cut(config, some)["first_k_dense_replace"] == 1  # of three
    with pytest.raises(ModelError, match=r"30 layers need about \d+\.\d GB of memory, 60.0 GB are free"):
        layers_that_fit(config, 30, 1, int(60e9), int(1e15))
    with pytest.raises(ModelError, match=r"2 layers need about 22.1 GB of disk, 1.0 GB are free"):
        layers_that_fit(config, None, 1, int(60e9), int(1e9))


# --- what is wrong ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("qwen3-30b", "expected one, or one of qwen3-30b-a3b, gpt-oss-20b, mixtral-8x7b, deepseek-v3, qwen3.6"),
        ("qwen3-30b-a3b --against vllm", "expected llama.cpp, genai or a folder with genai_config.json"),
        (". --layers 2", "of a shape"),
        ("qwen3-30b-a3b --weights Q4_K_M --lm-head int4", "a GGUF file has a head of its own"),
        ("qwen3-30b-a3b --depths=-1", "greater than or equal to 0"),
        ("qwen3-30b-a3b --prefill 0", "greater than or equal to 1"),
        ("qwen3-30b-a3b --output /nowhere/cells.json", "no such folder"),
        ("qwen3-30b-a3b --plot cells.doc", "expected .png"),
        ("qwen3-30b-a3b --device cuda --threads 2", "of the CPU"),
        ("qwen3-30b-a3b --device cuda --profile", "of the CPU"),
    ],
)
def test_bad_options(arguments: str, message: str) -> None:
    app = typer.Typer()
    app.command()(bench_model.bench_model)
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("peer", "what"), [("llama.cpp", "llama-cpp-python"), ("genai", "onnxruntime-genai")])
def test_a_peer_that_is_not_installed(peer: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"is not installed; --against {peer} needs: pip install {what}"):
        bench_model.bench_model("mixtral-8x7b", against=[peer])


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quantmoe.exporter.cli", "bench", "model", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr == f"quantmoe: {tmp_path / 'model.onnx'}: missing; expected an exported model or its folder\n"


def test_a_side_that_dies_is_named() -> None:
    with pytest.raises(ModelError, match="peer: its process ended with exit status 3"):
        Process("peer", Dies)
    side = Process("peer", Sometimes)
    with pytest.raises(ModelError, match=r"^peer: too large$"):
        side.prefill(3)
    assert side.prefill(1) == 1.0  # it goes on
    assert side.alive
    with pytest.raises(ModelError, match="peer: its process ended with exit status 3"):
        side.prefill(0)
    assert not side.alive


def test_cpu_time_does_not_count_waiting() -> None:
    for cpu in (False, True):
        side = Process("side", Waits, cpu=cpu)
        assert (side.prefill(1) < 0.1) == cpu
        side.close()


class Dies:
    def __init__(self) -> None:
        import os

        os._exit(3)


class Waits:
    def prefill(self, tokens: int) -> float:
        start = bench_sides.clock()
        time.sleep(0.2)
        return bench_sides.clock() - start


class Sometimes:
    def prefill(self, tokens: int) -> float:
        if tokens > 2:
            raise RuntimeError("too large")
        if not tokens:
            Dies()
        return 1.0
