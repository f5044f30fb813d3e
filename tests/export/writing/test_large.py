"""A model at Qwen3-30B-A3B's real shapes, end to end; `make test-long`. QUANTMOE_LARGE_LAYERS=4 for a short one.

Needs about 800 MB of disk a layer and 4 GB, deletes everything afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quantmoe.benchmarks.random_checkpoint import CONFIGS, cut, write
from quantmoe.exporter.reading.formats import CheckpointError, open_checkpoint
from quantmoe.exporter.safetensors_file import write_safetensors
from quantmoe.exporter.writing.convert import export
from quantmoe.exporter.writing.plan import plan

LAYERS = int(os.environ.get("QUANTMOE_LARGE_LAYERS", "48"))
GROUP_SIZE = 32
MEMORY = 2e9
CONFIG = CONFIGS["qwen3-30b-a3b"]

EXPORT = """
import resource, sys, time
begin = time.perf_counter()
from quantmoe.exporter.report import peak_memory
from quantmoe.exporter.writing.convert import export
stages, last = {}, [None, begin]
def progress(stage, done, total):
    now = time.perf_counter()
    if stage != last[0]:
        if last[0]: stages[last[0]] = now - last[1]
        last[:] = stage, now
export(sys.argv[1], sys.argv[2], progress=progress)
progress("end", 0, 0)
usage = resource.getrusage(resource.RUSAGE_SELF)
import json, re
from pathlib import Path
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps({"seconds": time.perf_counter() - begin, "cpu": cpu, "peak": peak, "stages": stages}))
"""

RUN = """
import json, re, sys, time
import numpy as np
from pathlib import Path
from quantmoe.custom_ops import native
from quantmoe.runtime.generate import Generator
def memory(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
begin = time.perf_counter()
g = Generator(sys.argv[1])
loaded = time.perf_counter() - begin
found = [g.greedy(range(100, 100 + 128), 9) for _ in range(2)]
mapped = np.memmap(Path(sys.argv[1]) / "model.onnx.data", np.uint8, "r")[: 1 << 30]
read = native.library().qm_probe_read
import ctypes
bandwidth = max(read(ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.size), 2) for _ in range(3))
print(json.dumps({"load": loaded, "prefill": [128 / f.prefill for f in found],
                  "decode": [f.tokens_per_second for f in found],
                  "same": found[0].tokens == found[1].tokens, "finite": bool(np.isfinite(found[0].logits).all()),
                  "tokens": found[0].tokens, "bandwidth": bandwidth, "anonymous": memory("RssAnon")}))
"""


def child(code: str, *arguments: object) -> dict:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_export_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = LAYERS * 0.8e9 + 5e9
    free = shutil.disk_usage(tmp_path).free
    if free < 1.2 * needed:
        pytest.skip(f"needs {1.2 * needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free")
    checkpoint, model = tmp_path / "checkpoint", tmp_path / "model"
    try:
        begin = time.perf_counter()
        read = write(checkpoint, cut(CONFIG, LAYERS), GROUP_SIZE)
        made = time.perf_counter() - begin
        export = child(EXPORT, checkpoint, model)
        shutil.rmtree(checkpoint)
        written = sum(path.stat().st_size for path in model.glob("model.onnx*"))
        from quantmoe.exporter.inspecting.inspect import inspect

        found = inspect(model)
        run = child(RUN, model)
    finally:
        for folder in (checkpoint, model):
            shutil.rmtree(folder, ignore_errors=True)
    dense = sum(t["bytes"] for t in found["dense"] if "embed_tokens" not in t["name"])
    experts = sum(layer["bytes"] for layer in found["layers"])
    token = dense + experts * CONFIG["num_experts_per_tok"] / CONFIG["num_experts"]
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in export["stages"].items())
    with capsys.disabled():
        print(
            f"\n{LAYERS} layers: checkpoint {read / 1e9:.1f} GB (made in {made:.0f} s), model {written / 1e9:.1f} GB"
            f"\nexport {export['seconds']:.0f} s ({stages}), {export['cpu']:.0f} CPU s, "
            f"peak {export['peak'] / 1e6:.0f} MB: "
            f"{read / export['seconds'] / 1e6:.0f} MB/s read, {written / export['seconds'] / 1e6:.0f} MB/s written"
            f"\nsession in {run['load']:.1f} s, anonymous memory {run['anonymous'] / 1e6:.0f} MB"
            f"\nprefill of 128 {run['prefill'][0]:.1f} then {run['prefill'][1]:.1f} tokens/s; "
            f"decode {run['decode'][0]:.2f} then {run['decode'][1]:.2f} tokens/s; "
            f"{token / 1e9:.2f} GB a token at {run['bandwidth'] / 1e9:.1f} GB/s allow {run['bandwidth'] / token:.2f}"
        )
    assert (model / "model.onnx").exists() is False
    assert export["peak"] < MEMORY
    assert run["same"]
    assert run["finite"]
    assert len(found["layers"]) == LAYERS
    # float32 in memory of its own: embeddings are mapped too; ONNX Runtime may prepack matrices outside the experts
    assert run["anonymous"] < 0.5 * experts + dense + 1e9


@pytest.mark.every
def test_headers_alone_are_enough_to_plan(tmp_path: Path) -> None:
    """--dry-run of a 671B-class checkpoint: DeepSeek-V3's sizes, Qwen3's architecture, only headers in its shards."""
    config = CONFIG | {
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "num_experts": 256,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
    }
    size = write(tmp_path, config, 128, data=False)
    assert size > 350e9
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 100e6
    code = "from quantmoe.exporter.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "export", tmp_path, tmp_path / "out", "--dry-run"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (tmp_path / "out").exists()
    print(done.stdout)
    assert re.search(r"61 layers", done.stdout)


def test_a_plan_names_what_export_refuses(checkpoint, exported, tmp_path: Path) -> None:
    folder, sizes = checkpoint("qwen3_moe"), {"num_hidden_layers": 1}
    for output, kind in ((folder, FileExistsError), (folder / "config.json", NotADirectoryError)):
        with pytest.raises(kind):
            plan(folder, output)
    with pytest.raises(FileExistsError, match="--force"):
        plan(folder, exported("qwen3_moe", activations="float"))
    ckpt = open_checkpoint(checkpoint("qwen3_moe", **sizes))
    lacking = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    shorter = "model.layers.0.self_attn.q_proj"
    tensors = {name: ckpt.tensor(name) for name in ckpt.names()}
    cut = {f"{shorter}.{leaf}": tensors[f"{shorter}.{leaf}"][:-8] for leaf in ("weight_packed", "weight_scale")}
    for edited, text in (
        ({n: t for n, t in tensors.items() if n != lacking}, f"{lacking} is missing, expected BF16|F16|F32 [96, "),
        (tensors | cut | {f"{shorter}.weight_shape": np.array([184, 192])},
         f"{shorter}.weight has shape [184, 192], expected [192, 192]"),
    ):  # fmt: skip
        write_safetensors(tmp_path / "model.safetensors", edited)
        (tmp_path / "config.json").write_text(json.dumps(ckpt.config), encoding="utf-8")
        with pytest.raises(CheckpointError, match=re.escape(text)):
            plan(tmp_path, tmp_path / "out")


def test_a_plan_says_what_stays_float_and_how_many_files(checkpoint, tmp_path: Path) -> None:
    folder = checkpoint("qwen3_moe")
    planned = plan(folder, tmp_path / "out", target="cuda", max_file_size=10**4)
    report = export(folder, tmp_path / "out", target="cuda", max_file_size=10**4)
    assert planned.dequantized == report.dequantized
    assert planned.files == -(-(planned.packed + planned.dense) // 10**4)
