"""CausalConv and GatedDelta beside onnxruntime's CausalConvWithState, LinearAttention and GatedDeltaNet (1.32, f32).

python tests/benchmarks/linear_attention.py --threads 1 --tokens 1 64 512

One layer of Qwen3.6-35B-A3B's sizes unless told, states in place, alternating runs; a run goes through --layers
states, so that they come from where a model's come from. Ours has the gates' functions and the gated norm inside,
LinearAttention neither these nor the L2 norm, GatedDeltaNet all but the norm. Bytes are the state's, read and written.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from benchmarks.attention_spec import delta_spec_of

from quantmoe.custom_ops.op import ConvSpec, DeltaSpec
from quantmoe.ort_ext import library_path


class DeltaLayer:
    """A session of one node whose new state is bound to the old one, of which there are ``layers``."""

    def __init__(
        self, node: tuple[str, str, dict[str, Any]], given: dict[str, np.ndarray], state: str, layers: int, threads: int
    ):
        op, domain, attributes = node
        types = {"float32": ir.DataType.FLOAT, "int32": ir.DataType.INT32}

        def value(name: str, array: np.ndarray) -> ir.Value:
            return ir.Value(name=name, type=ir.TensorType(types[str(array.dtype)]), shape=ir.Shape(array.shape))

        # An input without numbers is absent, but for ours, whose bias may have none.
        inputs = [value(n, array) if array.size or domain == "quantmoe" else None for n, array in given.items()]
        results = [ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT)) for name in ("y", "present")]
        made = ir.node(op, inputs, attributes, domain=domain, outputs=results)
        names = [n for n, v in zip(given, inputs, strict=True) if v is not None]
        opsets = {"": 18, "quantmoe": 1, "com.microsoft": 1}
        graph = ir.Graph(
            [v for v in inputs if v is not None], results, nodes=[made], opset_imports=opsets, name="layer"
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(library_path())
        model = ir.serde.serialize_model(ir.Model(graph, ir_version=9)).SerializeToString()
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.threads, self.bindings = threads, []
        shared = {n: ort.OrtValue.ortvalue_from_numpy(given[n]) for n in given if n != state}
        for _ in range(layers):
            binding, past = self.session.io_binding(), ort.OrtValue.ortvalue_from_numpy(given[state].copy())
            for name in names:
                binding.bind_ortvalue_input(name, past if name == state else shared[name])
            binding.bind_ortvalue_output("present", past)
            binding.bind_output("y")
            self.session.run_with_iobinding(binding)
            binding.bind_ortvalue_output("y", binding.get_outputs()[-1])  # in the same memory from now on
            self.bindings.append(binding)

    def __call__(self) -> float:
        """Return the seconds of a layer: of one thread those that it worked, whatever else the machine did."""
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        start = clock()
        for binding in self.bindings:
            self.session.run_with_iobinding(binding)
        return (clock() - start) / len(self.bindings)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def convolutions(spec: ConvSpec, tokens: int, layers: int, threads: int) -> dict[str, DeltaLayer]:
    c, w = spec.channels, spec.width
    none, state = np.zeros(0, np.float32), draw(1, c, w - 1)
    rows = np.array([[0, tokens, 1000]], np.int32)
    ours = {"x": draw(1, tokens, c), "weight": draw(c, w), "bias": none, "past_conv": state, "rows": rows}
    theirs = {"input": draw(1, tokens, c), "weight": draw(c, 1, w), "bias": none, "past_state": draw(1, w - 1, c)}
    peer = "com.microsoft", {"activation": "silu", "channels_last": 1}
    return {
        "CausalConv": DeltaLayer(("CausalConv", "quantmoe", spec.attributes()), ours, "past_conv", layers, threads),
        "CausalConvWithState": DeltaLayer(("CausalConvWithState", *peer), theirs, "past_state", layers, threads),
    }


def deltas(spec: DeltaSpec, tokens: int, layers: int, threads: int) -> dict[str, DeltaLayer]:
    groups, heads, k, v = spec.num_k_heads, spec.num_v_heads, spec.k_head_size, spec.v_head_size
    qkv = draw(1, tokens, 2 * groups * k + heads * v)
    a, b = draw(1, tokens, heads), draw(1, tokens, heads)
    head = {"a_log": draw(heads), "dt_bias": draw(heads)}
    none, state = np.zeros(0, np.float32), draw(1, heads, k, v) / 8
    ours = {"qkv": qkv, "a": a, "b": b, "z": draw(1, tokens, heads * v), **head, "norm": draw(v)}
    ours |= {"past_state": state, "rows": np.array([[0, tokens, 1000]], np.int32)}
    # Its CPU has no inverse grouping: queries and keys, of length 1, once a value head.
    both = qkv[:, :, : 2 * groups * k].reshape(1, tokens, 2, groups, k)
    both = np.repeat(both / np.linalg.norm(both, axis=4, keepdims=True), heads // groups, 3)
    q, key = (np.ascontiguousarray(both[:, :, i]).reshape(1, tokens, heads * k) for i in (0, 1))
    linear = {"query": q, "key": key, "value": np.ascontiguousarray(qkv[:, :, 2 * groups * k :]), "past_state": state}
    linear |= {"decay": -np.abs(a), "beta": 1 / (1 + np.exp(-b))}
    net = {"query": qkv[0], "key": none, "value": none, "cu_seqlens": none, "decay": a[0], "beta": b[0]}
    net |= {"initial_state": np.ascontiguousarray(state.swapaxes(2, 3)), **head}
    fused = {"beta_activation": "sigmoid", "gate_activation": "softplus", "qk_l2_norm": 1}
    names = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"}
    return {
        "GatedDelta": DeltaLayer(("GatedDelta", "quantmoe", spec.attributes()), ours, "past_state", layers, threads),
        "GatedDeltaNet": DeltaLayer(("GatedDeltaNet", "com.microsoft", fused), net, "initial_state", layers, threads),
        "LinearAttention": DeltaLayer(
            ("LinearAttention", "com.microsoft", names), linear, "past_state", layers, threads
        ),
    }


def scaling(layers: int, count: int) -> float:
    """Return bytes/s, read and written, at which NumPy scales as many states of ``count`` numbers in place, on one
    thread."""
    states, seconds = [np.ones(count, np.float32) for _ in range(layers)], []
    for _ in range(5):
        start = time.thread_time()
        for state in states:
            np.multiply(state, np.float32(0.99), out=state)
        seconds.append(time.thread_time() - start)
    return 2 * layers * count * 4 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=(16, 32, 128), help="of keys, of values; width")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, nargs="*", default=(1, 64, 512))
    args = parser.parse_args()
    groups, heads, d = args.heads
    conv = ConvSpec(channels=(2 * groups + heads) * d, width=4, activation="silu")
    delta = delta_spec_of(groups, heads, d)
    for tokens in args.tokens:
        layers = args.layers if tokens < 64 else 1
        for found in (convolutions(conv, tokens, layers, args.threads), deltas(delta, tokens, layers, args.threads)):
            times: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(args.runs):
                for name, layer in found.items():
                    times[name].append(layer())
            first = float(np.median(next(iter(times.values()))))
            for name, each in times.items():
                middle, best = float(np.median(each)), min(each)
                line = f"{tokens:5} tokens  {name:20} {middle * 1e3:9.3f} ms (best {best * 1e3:.3f})"
                line += f"  {middle / first:6.2f}x"
                if tokens == 1 and name == "GatedDelta":
                    size = heads * d * d
                    line += f"  {8 * size / best / 1e9:.1f} GB/s; NumPy, scaling: {scaling(layers, size) / 1e9:.1f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
