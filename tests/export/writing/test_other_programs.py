"""What ONNX's own programs make of an export: its checker, its version converter, and ONNX Runtime's tool that fixes
shapes. Then the fixed and the converted model give what the exported one gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from export.architectures.test_architectures import make_checkpoint
from onnx import version_converter
from support.harness.once import made_once
from support.harness.sweeps import every

from quantmoe import ort_library_path
from quantmoe.exporter.writing.convert import export
from quantmoe.runtime.generate import Generator

#: kind -> model type of test_architectures.py, options of the export
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("qwen3_moe", {}),
    "norms of heads": ("afmoe", {}),
    "cpu f16": ("gpt_oss", {"dtype": "f16"}),
    "hybrid": ("qwen3_next", {}),
    "mamba": ("granitemoehybrid", {}),
    "latent": ("deepseek_v3", {}),
    "ort": ("qwen3_moe", {"target": "ort", "quantize": "int4", "group_size": 32}),
    "cuda": ("qwen3_moe", {"target": "cuda"}),
    "cuda plain": ("afmoe", {"target": "cuda"}),
    "paged": ("qwen3_moe", {"target": "cuda", "paged": True, "dtype": "f16"}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(kind: str) -> Path:
        model_type, options = KINDS[kind]

        def write(folder: Path) -> None:
            checkpoint = tmp_path_factory.mktemp("checkpoint")
            make_checkpoint(checkpoint, model_type)
            export(checkpoint, folder, force=True, **{"quantize": "none", **options})

        return made_once(tmp_path_factory, write, model_type, checked=kind, **options)

    return make


def unknown(model: onnx.ModelProto) -> set[str]:
    """Nodes of ONNX's own domain that it does not have."""
    own = {opset.domain: opset.version for opset in model.opset_import}[""]
    nodes = [node for node in model.graph.node if node.domain in ("", "ai.onnx")]
    return {node.op_type for node in nodes if not onnx.defs.has(node.op_type, own, "")}


@pytest.mark.parametrize("kind", every(KINDS, 3))
def test_onnx_checks_and_converts_it(kind: str, made: Any) -> None:
    check(made(kind) / "model.onnx")


def check(path: Path) -> None:
    """ONNX's checker and its version converter take a file; test_mtp.py and test_vision.py ask for theirs, too."""
    onnx.checker.check_model(str(path))
    model = onnx.load(path, load_external_data=False)
    assert unknown(model) == set()
    converted = version_converter.convert_version(model, 22)
    assert {opset.domain: opset.version for opset in converted.opset_import}[""] == 22
    assert unknown(converted) == set()


@pytest.mark.parametrize("kind", every(["cpu", "norms of heads"]))
def test_onnx_runtime_fuses_the_norms(kind: str, made: Any, tmp_path: Path) -> None:
    """Each to one node, of the kernel that com.microsoft's operator would have."""
    path = made(kind) / "model.onnx"
    norms = sum(node.op_type == "ReduceMean" for node in onnx.load(path, load_external_data=False).graph.node)
    options = ort.SessionOptions()
    options.register_custom_ops_library(ort_library_path())
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    nodes = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node]
    assert nodes.count("SimplifiedLayerNormalization") == norms > 0
    assert "ReduceMean" not in nodes


def test_a_fixed_and_a_converted_model_give_the_same_logits(made: Any, tmp_path: Path) -> None:
    folder = made("cpu")
    fixed, converted = tmp_path / "fixed.onnx", tmp_path / "converted.onnx"
    tool = [sys.executable, "-m", "onnxruntime.tools.make_dynamic_shape_fixed"]
    subprocess.run([*tool, "--dim_param", "batch_size", "--dim_value", "1", folder / "model.onnx", fixed], check=True)
    onnx.save(version_converter.convert_version(onnx.load(folder / "model.onnx"), 22), converted)
    generator, ids = Generator(folder), np.arange(3, 10)[None]
    feed = generator.feed(ids, 0) | generator.start()
    want = generator.run(feed, ids.shape[1], 0)["logits"]
    options = ort.SessionOptions()
    options.register_custom_ops_library(ort_library_path())
    for path in (fixed, converted):
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (found,) = session.run(["logits"], feed)
        np.testing.assert_array_equal(found, want)
    (first, *_) = ort.InferenceSession(fixed, options, providers=["CPUExecutionProvider"]).get_inputs()
    assert first.shape[0] == 1
