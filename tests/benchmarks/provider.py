"""The execution provider beside ONNX Runtime's own kernels: two sessions of one model in one process, alternating runs.

python tests/benchmarks/provider.py FOLDER --threads 2  # of `quantmoe export --target ort`, say
python tests/benchmarks/provider.py --shape qwen3-30b-a3b --format int4 --group-size 32 --accuracy-level 4
python tests/benchmarks/provider.py --linear 4096 2048 --accuracy-level 4

Times are the least of Run with NumPy inputs, as other processes only add to them; with --cpu-time they are the
processor's, of one thread, for a machine that is shared. Load is that of a session whose cache stands,
and of ONNX Runtime's. The difference is the largest of an output, relative to the largest.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from quantmoe.benchmarks.bench_layer import BITS, Layer
from quantmoe.benchmarks.layer_sizes import SHAPES
from quantmoe.ort_ext import library_path, provider_devices


def linear(folder: Path, n: int, k: int, bits: int, group: int, accuracy_level: int) -> Path:
    """Return a model of one MatMulNBits with weights in a data file: x [rows, k] to y [rows, n]."""
    rng = np.random.default_rng(0)
    blocks = -(-k // group)
    tensors = {
        "b": np.frombuffer(rng.bytes(n * blocks * group * bits // 8), np.uint8).reshape(n, blocks, -1),
        "scales": rng.uniform(0.5, 1.5, (n, blocks)).astype(np.float32) / 2**bits,
    }
    floats = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=floats, shape=ir.Shape(["rows", k]))
    weights = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in tensors.items()]
    attributes = {"K": k, "N": n, "bits": bits, "block_size": group, "accuracy_level": accuracy_level}
    node = ir.node("MatMulNBits", [x, *weights], attributes, domain="com.microsoft", name="linear")
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", floats, ir.Shape(["rows", n])
    opsets = {"": 20, "com.microsoft": 1}
    graph = ir.Graph([x], [y], nodes=[node], initializers=weights, opset_imports=opsets, name="linear")
    ir.save(ir.Model(graph, ir_version=10), folder / "linear.onnx", external_data="linear.bin")
    return folder / "linear.onnx"


def layer(folder: Path, shape: str, kind: str, group: int, accuracy_level: int) -> Path:
    """Return a model of one QMoE."""
    path = Layer.random(SHAPES[shape], kind, group).write_qmoe(folder)
    model = ir.load(path)
    node = model.graph.node("QMoE")
    node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", accuracy_level)
    node.replace_input_with(14, None)  # router_weights
    ir.save(model, path)
    return path


def feed(session: ort.InferenceSession, tokens: int, past: int) -> dict[str, np.ndarray]:
    """Return the inputs of a run: a model's step of `tokens` after `past`, or random ones of a layer."""
    rng = np.random.default_rng(tokens)
    found: dict[str, np.ndarray] = {}
    for i in session.get_inputs():
        floats = np.float16 if i.type == "tensor(float16)" else np.float32
        if i.name == "input_ids":
            found[i.name] = rng.integers(1, 100, (1, tokens))
        elif i.name == "attention_mask":
            found[i.name] = np.ones((1, past + tokens), np.int64)
        elif i.name == "position_ids":
            found[i.name] = np.arange(past, past + tokens)[None]
        elif i.name.startswith("past_key_values."):
            found[i.name] = (rng.standard_normal((1, i.shape[1], past, i.shape[3])) / 4).astype(floats)
        else:
            found[i.name] = rng.standard_normal((tokens, i.shape[-1])).astype(floats)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--linear", nargs=2, type=int, metavar=("N", "K"))
    parser.add_argument("--format", default="int4", choices=BITS)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--accuracy-level", type=int, default=0)
    parser.add_argument("--activations", default="auto", choices=("auto", "float", "int8"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true")
    own = parser.parse_args()
    clock = time.thread_time if own.cpu_time else time.perf_counter
    if own.cpu_time:
        own.threads = 1
    ort.register_execution_provider_library("QuantMoE", library_path())
    with tempfile.TemporaryDirectory() as folder:
        if own.linear:
            n, k = own.linear
            path = linear(Path(folder), n, k, BITS[own.format], own.group_size, own.accuracy_level)
        elif own.shape:
            path = layer(Path(folder), own.shape, own.format, own.group_size, own.accuracy_level)
        elif own.folder:
            path = own.folder / "model.onnx"
        else:
            parser.error("a folder, --shape or --linear is needed")

        def session(provider: bool) -> tuple[ort.InferenceSession, float]:
            options = ort.SessionOptions()
            options.intra_op_num_threads = own.threads
            # threads of one session that wait spinning would take the other's cores
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            if provider:
                options.add_provider_for_devices(provider_devices(), {"activations": own.activations})
            start = time.perf_counter()
            made = ort.InferenceSession(path, options)
            return made, time.perf_counter() - start

        first = session(True)[1]
        (theirs, their_load), (ours, our_load) = session(False), session(True)
        print(f"load: ONNX Runtime {their_load:.3f} s, provider {our_load:.3f} s, {first:.2f} s with packing")
        for tokens in own.tokens:
            inputs = feed(ours, tokens, 0 if tokens > 1 else 64)
            times: dict[ort.InferenceSession, list[float]] = {theirs: [], ours: []}
            found: dict[ort.InferenceSession, np.ndarray] = {}
            for _ in range(own.repeats + 1):
                for each in times:
                    start = clock()
                    found[each] = each.run(None, inputs)[0]
                    times[each].append(clock() - start)
            a, b = (min(of[1:]) * 1e3 for of in times.values())
            error = np.abs(found[ours] - found[theirs]).max() / np.abs(found[theirs]).max()
            print(f"{tokens} tokens: {a:.2f} ms, {b:.2f} ms, {a / b:.2f} times; difference {error:.1e}")


if __name__ == "__main__":
    main()
