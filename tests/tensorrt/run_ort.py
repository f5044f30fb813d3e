"""The exported f16 models in ONNX Runtime's TensorRT provider, against what prepare.py wrote.

usage: run_ort.py FOLDER TRT_LIBRARY ORT_CUDA_LIBRARY. Needs onnx, onnxruntime-gpu and the TensorRT 10 that it finds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from run import PREFILL, PROMPT, TOLERANCE, measure


def shapes(model: Path, new: int, past: int) -> dict[str, list[int]]:
    """Of the inputs, with one row of ``new`` tokens after ``past``."""
    found = {"input_ids": [1, new], "attention_mask": [1, past + new], "position_ids": [1, new]}
    for value in onnx.load(model, load_external_data=False).graph.input:
        if value.name.startswith("past"):
            dims = value.type.tensor_type.shape.dim
            found[value.name] = [1, dims[1].dim_value, past, dims[3].dim_value]
    return found


def session(model: Path, trt_library: str, ort_library: str) -> ort.InferenceSession:
    os.environ["QUANTMOE_FOLDER"] = str(model.parent)  # of --external-experts
    options = ort.SessionOptions()
    options.register_custom_ops_library(ort_library)  # ONNX Runtime itself asks what the operators are
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")  # an error instead of a slow session
    provider: dict[str, object] = {
        "trt_extra_plugin_lib_paths": trt_library,
        "trt_fp16_enable": True,  # else TensorRT computes in f32, which the plug-ins do not take
    }
    for bound, new, past in (("min", 1, 0), ("opt", PREFILL, 0), ("max", 64, 64)):
        wanted = shapes(model, new, past).items()
        provider[f"trt_profile_{bound}_shapes"] = ",".join(f"{name}:{'x'.join(map(str, s))}" for name, s in wanted)
    return ort.InferenceSession(model, options, providers=[("TensorrtExecutionProvider", provider)])


def run(folder: Path, trt_library: str, ort_library: str) -> float:
    """The worst token's relative distance from float32's logits: a prompt, then token by token with the cache."""
    model = folder / "f16" / "model.onnx"
    engine = session(model, trt_library, ort_library)
    assert engine.get_providers()[0] == "TensorrtExecutionProvider", engine.get_providers()
    tokens = np.load(folder / "tokens.npy")[:1]
    names = [value.name for value in engine.get_outputs()]
    past = {name: np.zeros(s, np.float16) for name, s in shapes(model, 1, 0).items() if name.startswith("past")}
    logits, at = [], 0
    for step in PROMPT:
        ids = tokens[:, at : at + step]
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones((1, at + step), np.int64),
            "position_ids": np.arange(at, at + step)[None],
        }
        found = dict(zip(names, engine.run(None, feed | past), strict=True))
        past = {name: found[name.replace("past_key_values", "present")] for name in past}
        logits.append(found["logits"].ravel())
        at += step
    return measure(folder, "f16", ("tokens", 1, PROMPT, False), np.concatenate(logits).view(np.uint16))[0]


if __name__ == "__main__":
    failed = 0
    for folder in sorted(path.parent.parent for path in Path(sys.argv[1]).glob("*-W4A16/f16/model.onnx")):
        limit = TOLERANCE * json.loads((folder / "noise.json").read_text(encoding="utf-8"))["f16"]
        try:
            error = run(folder, *sys.argv[2:4])
            verdict = "passed" if error <= limit else "FAILED"
        except Exception as problem:
            error, verdict = float("nan"), f"FAILED {problem}"
        failed += verdict != "passed"
        print(f"| {folder.name} | f16 | {error:.4f} | {limit:.4f} | {verdict} |", flush=True)
    sys.exit(bool(failed))
