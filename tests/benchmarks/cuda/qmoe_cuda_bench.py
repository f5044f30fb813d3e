"""QuantMoE beside ONNX Runtime's own com.microsoft::QMoE on a GPU: the same weights, logits and provider.

    PYTHONPATH=tests python tests/benchmarks/cuda/qmoe_cuda_bench.py [--shapes gpt-oss-20b,...]
        [--formats int4,mxfp4] [--tokens 1,8,64,512,4096] [--group-size 32]

A model of each side has LAYERS layers of one x, each with logits and, in the GPU's memory, weights of its own: more
than L2 holds. Ours is MoERouting and QuantMoE, since QMoE routes, too. Both are sessions of ONNX Runtime's CUDA
provider on the same f16 inputs; outputs are compared, then replays of both CUDA graphs take turns. Times are of a
layer, medians; the ratio is QMoE's time by ours. Needs onnxruntime-gpu, PyTorch with CUDA, and this checkout's CUDA
library (QUANTMOE_ORT_CUDA_LIBRARY).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from benchmarks.all_reduce import seconds
from benchmarks.cuda.cuda_bench import counts, shapes, some_of
from onnx import TensorProto

from quantmoe.benchmarks.bench_layer import Layer
from quantmoe.benchmarks.layer_sizes import SHAPES
from quantmoe.custom_ops.layouts import LAYOUTS, join, qmoe
from quantmoe.custom_ops.op import DOMAIN, MoESpec, RoutingSpec
from quantmoe.ort_ext import cuda_library_path

LAYERS = 4
ROUNDS = 30
#: of outputs, relative to their norm: what f16 rounds of weights and activations, and some
DIFFERENCE = 0.005
FORMATS = ("int4", "mxfp4")


class Side:
    """A model that is being made, of one layout."""

    def __init__(self, layer: Layer, layout: str, folder: Path) -> None:
        self.layer, self.layout, self.path = layer, layout, folder / f"{layout}.onnx"
        w13, w2 = reduce(join, (LAYOUTS[layout].describe(expert, "none") for expert in layer.experts))
        self.spec: MoESpec = replace(layer.spec(), w13=w13, w2=w2)
        self.stored = list(self._stored())

    def _stored(self) -> Iterable[tuple[int, tuple[int, ...], list[np.ndarray]]]:
        """Input of the node, shape, and the bytes of each expert that differs."""
        layout = LAYOUTS[self.layout]
        sizes = [layout.row_bytes(self.spec, projection) for projection in ("w13", "w2")]
        rows = [[np.empty(size, np.uint8) for size in sizes] for _ in self.layer.experts]
        for expert, pair in zip(self.layer.experts, rows, strict=True):
            layout.pack(expert, self.spec, *pair)
        for at, projection in enumerate(("w13", "w2")):
            own = [pair[at] for pair in rows]
            if self.layout == "qmoe":
                parts = [qmoe.stored(self.spec, projection, row, np.dtype(np.float16)) for row in own]
                for name in parts[0]:
                    yield (
                        qmoe.INPUTS[projection, name],
                        qmoe.shape(self.spec, projection, name),
                        [p[name] for p in parts],
                    )
            else:
                yield 3 + at, (self.spec.num_experts, sizes[at] // 4), [row.view(np.int32) for row in own]

    def save(self) -> Path:
        """Return inputs x [n, H] and logits.i [n, E], outputs y.i [n, H]: f16."""
        s, data = self.layer.shape, self.path.with_suffix(".bin")
        written = self.layer.write_data(data, [arrays for *_, arrays in self.stored])
        x, *logits = inputs = [
            ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape(["n", size]))
            for name, size in [("x", s.hidden), *((f"logits.{i}", s.experts) for i in range(LAYERS))]
        ]
        nodes: list[ir.Node] = []
        weights: list[ir.Value] = []
        outputs: list[ir.Value] = []
        for i, of in enumerate(logits):
            own: dict[int, ir.Value] = {}
            for (at, shape, arrays), region in zip(self.stored, written, strict=True):
                kind = ir.DataType.from_numpy(arrays[0].dtype)
                tensor = ir.ExternalTensor(
                    data.name, *region, kind, shape=ir.Shape(shape), name=f"{i}.{at}", base_dir=data.parent
                )
                own[at] = ir.Value(name=tensor.name, type=ir.TensorType(kind), shape=tensor.shape, const_value=tensor)
            nodes += self._nodes(i, x, of, own)
            weights += own.values()
            outputs.append(y := nodes[-1].outputs[0])
            y.name, y.type, y.shape = f"y.{i}", x.type, x.shape
        opsets = {"": 20, DOMAIN: 1, "com.microsoft": 1}
        graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, opset_imports=opsets, name=self.layout)
        ir.save(ir.Model(graph, ir_version=10), self.path)
        return self.path

    def _nodes(self, i: int, x: ir.Value, logits: ir.Value, weights: dict[int, ir.Value]) -> list[ir.Node]:
        """Layer i; its weights, to which constants are added, by input."""
        s = self.layer.shape

        def constant(at: int, array: np.ndarray) -> None:
            weights[at] = ir.val(f"{i}.{at}", const_value=ir.tensor(array, name=f"{i}.{at}"))

        if self.layout == "qmoe":
            attributes = qmoe.attributes(self.spec) | {"k": s.top_k, "normalize_routing_weights": 1}
            for at in qmoe.GLOBAL_SCALES if "quant_type" in attributes else ():
                constant(at, np.ones(s.experts, np.float32))
            order = [x, logits, *(weights.get(at) for at in range(2, max(weights) + 1))]
            return [ir.node("QMoE", order, attributes, domain="com.microsoft")]
        routing = RoutingSpec(
            num_experts=s.experts, top_k=s.top_k, method="topk_softmax", renormalize=1, n_group=1, topk_group=1,
            routed_scaling_factor=1.0,
        )  # fmt: skip
        constant(0, np.zeros(s.experts, np.float32))
        router = ir.node("MoERouting", [logits, weights[0]], routing.attributes(), domain=DOMAIN, num_outputs=2)
        order = [x, *router.outputs, weights[3], weights[4]]
        return [router, ir.node("QuantMoE", order, self.spec.attributes(), domain=DOMAIN)]


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(cuda_library_path())
    cuda = {"enable_cuda_graph": 1}
    return ort.InferenceSession(str(path), options, providers=[("CUDAExecutionProvider", cuda)])


def bound(own: ort.InferenceSession, feeds: list[torch.Tensor], ys: torch.Tensor) -> Callable[[], None]:
    """Return a run that is captured in a graph of its own."""
    binding, options = own.io_binding(), ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(len(feeds[0])))
    for values, tensors, bind in (
        (own.get_inputs(), feeds, binding.bind_input),
        (own.get_outputs(), ys, binding.bind_output),
    ):
        for value, tensor in zip(values, tensors, strict=True):
            bind(value.name, "cuda", 0, TensorProto.FLOAT16, list(tensor.shape), tensor.data_ptr())
    return lambda: own.run_with_iobinding(binding, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = "gpt-oss-20b,qwen3-30b-a3b"
    parser.add_argument("--shapes", type=shapes, default=usual, help=f"{', '.join(SHAPES)}, or H/I/E/k")
    parser.add_argument("--formats", type=some_of(FORMATS), default="int4,mxfp4", help=", ".join(FORMATS))
    parser.add_argument("--tokens", type=counts, default="1,8,64,512,4096")
    parser.add_argument("--group-size", type=int, default=32, help="of int4")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, onnxruntime {ort.__version__}")
    torch.manual_seed(0)
    differ = False
    for (name, s), kind in product(options.shapes.items(), options.formats):
        layer = Layer.random(s, kind, 32 if kind == "mxfp4" else options.group_size)
        with tempfile.TemporaryDirectory() as folder:
            sessions = [session(Side(layer, layout, Path(folder)).save()) for layout in ("marlin", "qmoe")]
        for tokens in options.tokens:
            feeds = [torch.randn(tokens, size, device="cuda").half() for size in (s.hidden, *[s.experts] * LAYERS)]
            ys = [torch.empty(LAYERS, *feeds[0].shape, device="cuda").half() for _ in sessions]
            runs = [bound(own, feeds, y) for own, y in zip(sessions, ys, strict=True)]
            taken = [[seconds(run) for run in runs] for _ in range(5 + ROUNDS)][5:]
            mine, theirs = (y.float() for y in ys)
            apart = float((mine - theirs).norm() / mine.norm())
            differ |= not apart <= DIFFERENCE
            ours, peer = (1e6 * median(column) / LAYERS for column in zip(*taken, strict=True))
            print(
                f"{name:14} {kind:5} T={tokens:<5} QMoE / ours {peer / ours:5.2f}  ours {ours:8.1f} us, "
                f"QMoE {peer:8.1f} us, outputs apart {apart:.1e}",
                flush=True,
            )
    if differ:
        raise SystemExit(f"outputs differ by more than {DIFFERENCE} of their norm")


if __name__ == "__main__":
    main()
