"""CachedAttention beside onnxruntime's GroupQueryAttention (f32): one layer, both caches in place, alternating runs.

python tests/benchmarks/attention.py --threads 2 --context 2048 16384 --prefill 512 2048
python tests/benchmarks/attention.py --heads 128 1 576 --latent 512  # DeepSeek-V3's, no GroupQueryAttention
python tests/benchmarks/attention.py --heads 128 1 576 --latent 512 --up 128 128  # up-projections inside, too

Bytes are those of the keys and values that a token reads; the read bandwidth is qm_probe_read's of the same threads.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from benchmarks.attention_spec import spec_of

from quantmoe.custom_ops import native
from quantmoe.custom_ops.op import AttentionSpec, optional_inputs
from quantmoe.custom_ops.op import inputs as inputs_of
from quantmoe.custom_ops.reference import encode_cache
from quantmoe.ort_ext import library_path

FLOATS = ("float32", "float16")
#: cache_format, which needs no scales
CODES = ("int8_token", "fp8_e4m3")


def session(
    op: str, domain: str, attributes: dict[str, Any], given: list[ir.Value], results: list[ir.Value], threads: int
) -> ort.InferenceSession:
    """Return a model of one node."""
    node = ir.node(op, given, attributes, domain=domain, outputs=results)
    opsets = {"": 18, "quantmoe": 1, "com.microsoft": 1}
    graph = ir.Graph(given, results, nodes=[node], opset_imports=opsets, name="attention")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(library_path())
    model = ir.serde.serialize_model(ir.Model(graph, ir_version=9)).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class AttentionLayer:
    """A session whose present is bound to past."""

    def __init__(self, op: str, domain: str, attributes: dict[str, Any], given: dict[str, np.ndarray], threads: int):
        past = {"present_key": "past_key", "present_value": "past_value"}
        size = attributes.get("out_size") or attributes.get("v_head_size", given["past_value"].shape[3])
        width = attributes["num_heads"] * size
        result = [given["past_key"].shape[0], given["tokens"].size, width]
        given = {name: a for name, a in given.items() if name != "tokens"}
        types = {
            "float32": "FLOAT",
            "float16": "FLOAT16",
            "int8": "INT8",
            "uint8": "UINT8",
            "int32": "INT32",
            "int64": "INT64",
        }

        def value(name: str, dtype: str, shape: Sequence[int]) -> ir.Value:
            return ir.Value(name=name, type=ir.TensorType(ir.DataType[types[dtype]]), shape=ir.Shape(shape))

        inputs = [value(name, str(a.dtype), a.shape) for name, a in given.items()]
        results = [value("output", "float32", result)]
        results += [value(new, str(given[old].dtype), given[old].shape) for new, old in past.items()]
        self.threads = threads
        self.session = session(op, domain, attributes, inputs, results, threads)
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in given.items()}
        self.binding = self.session.io_binding()
        for name, value in self.values.items():
            self.binding.bind_ortvalue_input(name, value)
        self.output = ort.OrtValue.ortvalue_from_shape_and_type(result, np.float32)
        self.binding.bind_ortvalue_output("output", self.output)
        for new, old in past.items():
            self.binding.bind_ortvalue_output(new, self.values[old])

    def __call__(self) -> float:
        """Return the seconds of a run: of one thread those that it worked, whatever else the machine did."""
        clock = time.thread_time if self.threads == 1 else time.perf_counter
        start = clock()
        self.session.run_with_iobinding(self.binding)
        return clock() - start


def ours(spec: AttentionSpec, past: int, tokens: int, cache: str, threads: int) -> AttentionLayer:
    """cache: of FLOATS or CODES."""
    rng = np.random.default_rng(0)
    heads, groups, d, slots = spec.num_heads, spec.kv_num_heads, spec.head_size, past + tokens
    half, (key, value) = spec.rotary_size // 2, spec.cache_widths  # of floats, which are encoded below
    spec = replace(spec, cache_format=cache) if cache in CODES else spec
    shapes = {
        "qkv": (1, tokens, heads * spec.query_size + groups * d + (0 if spec.key_split else groups * spec.v_head_size)),
        "past_key": (1, groups, slots, key),
        "past_value": (1, groups, slots, value),
        "cos": (1, tokens, half),
        "sin": (1, tokens, half),
        "q_norm": (0,),
        "k_norm": (0,),
    }
    given = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    given |= {
        name: encode_cache(spec, given[name], 1.0, np.dtype(given[name].dtype if cache in CODES else cache))
        for name in ("past_key", "past_value")
    }
    given |= {"rows": np.array([[0, tokens, past]], np.int32), "attention_mask": np.ones((1, slots), np.int64)}
    given |= {"sinks": np.full(heads, -np.inf, np.float32)}
    ups = {"k_up": (heads, spec.nope_size, spec.v_head_size), "v_up": (heads, spec.v_head_size, spec.out_size)}
    if spec.nope_size:
        given |= {name: rng.standard_normal(shape, np.float32) / shape[2] ** 0.5 for name, shape in ups.items()}
    names = [name for name, _ in (*inputs_of("CachedAttention"), *optional_inputs("CachedAttention")) if name in given]
    order = {name: given[name] for name in names} | {"tokens": np.empty(tokens)}
    return AttentionLayer("CachedAttention", "quantmoe", spec.attributes(), order, threads)


def theirs(spec: AttentionSpec, past: int, tokens: int, threads: int) -> AttentionLayer:
    rng = np.random.default_rng(0)
    heads, groups, d, slots = spec.num_heads, spec.kv_num_heads, spec.head_size, past + tokens
    shapes = {
        "query": (1, tokens, heads * d),
        "key": (1, tokens, groups * d),
        "value": (1, tokens, groups * d),
        "past_key": (1, groups, slots, d),
        "past_value": (1, groups, slots, d),
    }
    given = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    given |= {"seqlens_k": np.array([slots - 1], np.int32), "total_sequence_length": np.array(slots, np.int32)}
    given |= {
        name: rng.standard_normal((slots, spec.rotary_size // 2), np.float32) for name in ("cos_cache", "sin_cache")
    }
    attributes = {"num_heads": heads, "kv_num_heads": groups, "do_rotary": 1, "scale": spec.scale}
    return AttentionLayer(
        "GroupQueryAttention", "com.microsoft", attributes, given | {"tokens": np.empty(tokens)}, threads
    )


def bandwidth(threads: int) -> float:
    data = np.ones(1 << 28, np.uint8)
    pointer, size = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes)
    return max(native.library().qm_probe_read(pointer, size, threads) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=(32, 4, 128), help="of queries, of keys; width")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--context", type=int, nargs="*", default=(2048, 16384), help="tokens before a decoded one")
    parser.add_argument("--prefill", type=int, nargs="*", default=(512, 2048))
    parser.add_argument("--cache", nargs="*", choices=(*FLOATS, *CODES), default=(*FLOATS, *CODES))
    parser.add_argument("--latent", type=int, default=0, metavar="V", help="values are the last V features of keys")
    parser.add_argument(
        "--up", type=int, nargs=2, metavar=("M", "U"), help="also a node with a nope_size and an out_size"
    )
    args = parser.parse_args()
    heads, groups, d = args.heads
    spec = spec_of(heads, groups, d)
    if args.latent:
        spec = replace(spec, v_head_size=args.latent, rotary_size=d - args.latent, key_split=d // 2)
    for past, tokens in [*((n, 1) for n in args.context), *((0, n) for n in args.prefill)]:
        caches = [cache for cache in args.cache if cache in FLOATS or not args.latent]
        layers = {cache: ours(spec, past, tokens, cache, args.threads) for cache in caches}
        if args.up:
            own = replace(spec, nope_size=args.up[0], out_size=args.up[1])
            layers |= {f"{cache}, up": ours(own, past, tokens, cache, args.threads) for cache in caches}
        if not args.latent:
            layers["GroupQueryAttention"] = theirs(spec, past, tokens, args.threads)
        times: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(args.runs):
            for name, layer in layers.items():
                times[name].append(layer())
        for name, layer in layers.items():
            found = times[name]
            best, middle = min(found), float(np.median(found))
            line = f"{past:6} + {tokens:4}  {name:20} {middle * 1e3:8.3f} ms (best {best * 1e3:.3f})"
            if not args.latent:
                line += f"  {float(np.median(times['GroupQueryAttention'])) / middle:5.2f}x"
            if tokens == 1 and name in args.cache:
                size = sum(layer.values[cache].numpy().nbytes for cache in ("past_key", "past_value"))
                line += f"  {size / best / 1e9:5.1f} GB/s of {bandwidth(args.threads) / 1e9:.1f}"
            if (tokens > 1 or args.latent) and name in args.cache:
                pairs = tokens * past + tokens * (tokens + 1) // 2
                line += f"  {2 * heads * (d + spec.v_head_size) * pairs / best / 1e9:6.1f} GFLOP/s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
