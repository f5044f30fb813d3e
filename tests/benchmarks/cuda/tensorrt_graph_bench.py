"""Decode of an exported model's graph in TensorRT: one token, cache and states in place, in a CUDA graph.

    python tests/benchmarks/cuda/ort_cuda_bench.py graph hybrid.onnx --model qwen3.6-35b-a3b --lm-head int4 \
      --sizes '{"num_hidden_layers": 8}'
    PYTHONPATH=tests python tests/benchmarks/cuda/tensorrt_graph_bench.py bench.so libquantmoe_trt.so hybrid.onnx

The graph is ort_cuda_bench.py's, which makes it where transformers is; weights are random. bench.so is compiled as
tensorrt_bench.py says. Needs TensorRT, PyTorch, a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
import torch
from benchmarks.cuda.ort_cuda_bench import fill
from benchmarks.cuda.tensorrt_bench import Context, Sizes, TensorRT, events, kernels

TYPES = {onnx.TensorProto.FLOAT: torch.float32, onnx.TensorProto.FLOAT16: torch.float16}


def sizes_of(model: onnx.ModelProto, capacity: int) -> dict[str, Sizes]:
    """Of each input, for one token of one row."""
    found: dict[str, Sizes] = {}
    for value in model.graph.input:
        dims = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
        if value.name == "attention_mask":
            dims = [1, capacity]
        elif value.name.endswith((".key", ".value")):
            dims[2] = capacity
        found[value.name] = tuple(dims)
    return found


def measure(trt: TensorRT, folder: Path, past: int, capacity: int, repeats: int) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    sizes = sizes_of(model, capacity)
    begun = time.perf_counter()
    engine = trt.build(folder / "model.onnx", [{name: (size,) * 3 for name, size in sizes.items()}])
    print(f"built in {time.perf_counter() - begun:.1f} s", flush=True)
    context, states = Context(trt, engine, 0), {}
    for value in model.graph.input:
        name, size = value.name, sizes[value.name]
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            tensor = torch.full(size, past if name == "position_ids" else 1, device="cuda", dtype=torch.int64)
            if name == "attention_mask":
                tensor[:, past + 1 :] = 0
        else:
            tensor = torch.randn(size, device="cuda").to(TYPES[value.type.tensor_type.elem_type])
            context.bind(name.replace("past_key_values", "present"), tensor, shaped=False)
            states[name] = tensor
        context.bind(name, tensor)
    logits = next(value for value in model.graph.output if value.name == "logits").type.tensor_type
    found = torch.empty(1, 1, logits.shape.dim[2].dim_value, device="cuda", dtype=TYPES[logits.elem_type])
    context.bind("logits", found, shaped=False)
    kept = {name: tensor.clone() for name, tensor in states.items()}

    def put_back() -> None:
        for name, tensor in states.items():
            tensor.copy_(kept[name])

    def run(body: Any) -> torch.Tensor:
        put_back()
        body()
        torch.cuda.synchronize()
        return found.clone()

    called = run(context.run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        context.run()
    same = torch.equal(run(graph.replay), called) and bool(torch.isfinite(called).all())
    print(f"after {past} of {capacity} slots: {events(graph.replay, repeats):.1f} us a token in a CUDA graph, ", end="")
    print(f"{events(context.run, repeats):.1f} without; the same logits: {same}")
    for name, (count, us) in sorted(kernels(graph.replay).items(), key=lambda item: -item[1][1])[:24]:
        print(f"  {us:9.1f} us, {count:4d}: {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("plugin")
    parser.add_argument("graph", type=Path, nargs="+")
    parser.add_argument("--past", type=int, default=1024)
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=100)
    given = parser.parse_args()
    trt = TensorRT(given.library, given.plugin)
    for graph in given.graph:
        print(graph.name)
        with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(torch.cuda.Stream()):
            fill(graph, Path(folder))
            measure(trt, Path(folder), given.past, given.capacity, given.repeats)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
