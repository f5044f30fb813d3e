"""Decode and prefill of a decoder of Qwen3-30B-A3B's sizes in TensorRT: random int4 weights, a cache in place.

    g++ -std=c++20 -shared -fPIC tests/benchmarks/cuda/tensorrt_bench.cc -o bench.so -lnvinfer -lnvonnxparser \
      -I <TensorRT's and CUDA's include folders>
    PYTHONPATH=tests python tests/benchmarks/cuda/tensorrt_bench.py bench.so libquantmoe_trt.so [--layers 1,48]
        [--capacity 4096]

The graph is written here, of the operators that an exported model has; packed weights are its inputs, so that an engine
of 48 layers needs no 17 GB file. Each layer has bytes of its own. One engine has three profiles: one token and 1 to
PREFILL with a cache in place, and any number after a cache that grows. Times are of a CUDA graph of one token's step,
captured once and replayed at several positions; that of one alone contains its launch. `us by part` are the profiler's
times of its kernels, each from the end of the one before it. The graph's logits are compared with those of calls
without it, a cache in place with one that grows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from benchmarks.cuda.attention_cuda_bench import SHAPES as ATTENTION
from benchmarks.cuda.cuda_bench import random_rows
from benchmarks.cuda.cuda_bench import spec_of as moe_spec_of
from onnx import TensorProto, helper, numpy_helper

from quantmoe.benchmarks.layer_sizes import SHAPES
from quantmoe.custom_ops.layouts import LAYOUTS
from quantmoe.custom_ops.op import AttentionSpec, LinearSpec, MoESpec, NormSpec, RouterSpec, RowsSpec

NAME, VOCABULARY, PREFILL = "qwen3-30b-a3b", 151936, 2048
TYPES = {"bf16": (torch.bfloat16, TensorProto.BFLOAT16), "f16": (torch.float16, TensorProto.FLOAT16)}
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Specs:
    moe: MoESpec
    attention: AttentionSpec
    qkv: LinearSpec
    o: LinearSpec
    router: RouterSpec

    @classmethod
    def make(cls) -> Specs:
        moe, attention, shape = moe_spec_of(SHAPES[NAME], "int4"), ATTENTION[NAME], SHAPES[NAME]
        heads, groups, d = attention.num_heads, attention.kv_num_heads, attention.head_size
        qkv = LinearSpec(in_features=shape.hidden, out_features=(heads + 2 * groups) * d, w=moe.w2)
        o = LinearSpec(in_features=heads * d, out_features=shape.hidden, w=moe.w2)
        router = RouterSpec(
            hidden_size=shape.hidden,
            num_experts=shape.experts,
            top_k=shape.top_k,
            method="softmax_topk",
            renormalize=1,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=1.0,
        )
        return cls(moe, attention, qkv, o, router)

    def packed(self) -> dict[str, tuple[MoESpec, str]]:
        """Return a layer's packed weights: whose rows they are, and which projection."""
        return {"qkv": (self.qkv.moe, "w2"), "o": (self.o.moe, "w2"), "w13": (self.moe, "w13"), "w2": (self.moe, "w2")}


class Graph:
    """An ONNX graph as it is written."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        self.data = (folder / "weights").open("wb")

    def __call__(self, op: str, *inputs: str, count: int = 1, domain: str = "", **attributes: Any) -> Any:
        outputs = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op, inputs, outputs, f"n{len(self.nodes)}", domain=domain, **attributes))
        return outputs[0] if count == 1 else outputs

    def ours(self, spec: Any, *inputs: str, count: int = 1) -> Any:
        return self(spec.OP, *inputs, count=count, domain="quantmoe", **spec.attributes())

    def constant(self, values: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def random(self, *sizes: int, spread: float = 1.0, near: float = 0.0) -> str:
        """In the graph's type, beside the file."""
        kind, code = TYPES[self.dtype]
        values = (torch.randn(sizes, device="cuda") * spread + near).to(kind)
        tensor = onnx.TensorProto(name=f"c{len(self.constants)}", data_type=code, dims=sizes, data_location="EXTERNAL")
        parts = {"location": "weights", "offset": self.data.tell(), "length": values.nbytes}
        for key, value in parts.items():
            tensor.external_data.add(key=key, value=str(value))
        self.data.write(values.view(torch.uint8).cpu().numpy().tobytes())
        self.constants.append(tensor)
        return str(tensor.name)

    def input(self, name: str, code: int, sizes: list[Any]) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, code, sizes))
        return name

    def norm(self, x: str, weight: str) -> str:
        wide = self("Cast", x, to=TensorProto.FLOAT)
        mean = self("ReduceMean", self("Mul", wide, wide), self.constant(np.array([-1])), keepdims=1)
        root = self("Sqrt", self("Add", mean, self.constant(np.float32(1e-6))))
        return str(self("Mul", self("Cast", self("Div", wide, root), to=TYPES[self.dtype][1]), weight))

    def save(self, outputs: dict[str, tuple[Any, list[Any]]]) -> Path:
        self.data.close()
        infos = [helper.make_tensor_value_info(name, code, sizes) for name, (code, sizes) in outputs.items()]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, infos, self.constants)
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("quantmoe", 1)]
        path = self.folder / "model.onnx"
        path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())
        return path


def tables_of(g: Graph, d: int) -> list[str]:
    """cos and sin, f32 [B, S, D / 2]."""
    frequencies = g.constant(np.float32(1e6) ** (-np.arange(0, d, 2, dtype=np.float32) / d))
    positions = g("Unsqueeze", g("Cast", "position_ids", to=TensorProto.FLOAT), g.constant(np.array([2])))
    angles = g("Mul", positions, frequencies)
    return [g("Cos", angles), g("Sin", angles)]


def write(specs: Specs, layers: int, dtype: str, folder: Path) -> Path:
    g, a, code = Graph(folder, dtype), specs.attention, TYPES[dtype][1]
    hidden, cache = specs.moe.hidden_size, ["batch", a.kv_num_heads, "past", a.head_size]
    for name, size in (("input_ids", "new"), ("attention_mask", "total"), ("position_ids", "new")):
        g.input(name, TensorProto.INT64, ["batch", size])
    for i in range(layers):
        for kind in ("key", "value"):
            g.input(f"past_key_values.{i}.{kind}", code, cache)
    embeddings = g.input("embeddings", code, [VOCABULARY, hidden])
    rows, _ = g.ours(RowsSpec(), "past_key_values.0.key", "input_ids", "attention_mask", count=2)
    cos, sin = tables_of(g, a.head_size)
    norms = [g.constant(np.ones(a.head_size, np.float32)) for _ in "qk"]
    sinks, none = g.constant(np.full(a.num_heads, -np.inf, np.float32)), g.constant(np.zeros(0, np.float32))
    x: str = g("Gather", embeddings, "input_ids")
    normed = g.norm(x, g.random(hidden, spread=0.1, near=1))

    def add_norm(x: str, residual: str) -> Any:
        return g.ours(NormSpec(norm_epsilon=1e-6), x, residual, g.random(hidden, spread=0.1, near=1), count=2)

    present: dict[str, str] = {}
    for i in range(layers):
        packed = {
            name: g.input(
                f"{i}.{name}", TensorProto.INT32, [spec.num_experts, LAYOUTS["marlin"].row_bytes(spec, part) // 4]
            )
            for name, (spec, part) in specs.packed().items()
        }
        qkv = g.ours(specs.qkv, normed, packed["qkv"])
        past = [f"past_key_values.{i}.{kind}" for kind in ("key", "value")]
        attended, key, value = g.ours(a, qkv, *past, rows, "attention_mask", cos, sin, *norms, sinks, count=3)
        present |= {f"present.{i}.key": key, f"present.{i}.value": value}
        normed, x = add_norm(g.ours(specs.o, attended, packed["o"]), x)
        weight = g.random(specs.router.num_experts, hidden, spread=hidden**-0.5)
        ids, weights = g.ours(specs.router, normed, weight, none, none, count=2)
        normed, x = add_norm(g.ours(specs.moe, normed, ids, weights, packed["w13"], packed["w2"]), x)
    last = g("Gather", normed, g.constant(np.array([-1])), axis=1)
    logits = g("MatMul", last, g.random(hidden, VOCABULARY, spread=0.02))
    names = dict(zip((logits, *present.values()), ("logits", *present), strict=True))
    for node in g.nodes:
        for i, name in enumerate(node.output):
            node.output[i] = names.get(name, name)
    grown = [*cache[:2], "slots", cache[3]]
    return g.save({"logits": (code, ["batch", 1, VOCABULARY])} | {name: (code, grown) for name in present})


class Range(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 4 * 3)]


class TensorRT:
    """tensorrt_bench.cc."""

    def __init__(self, library: str, plugin: str) -> None:
        self.lib = ctypes.CDLL(library)
        for name in ("build", "context"):
            getattr(self.lib, f"bench_{name}").restype = ctypes.c_void_p
        for name in ("open", "bind", "enqueue"):
            getattr(self.lib, f"bench_{name}").restype = ctypes.c_bool
        self.lib.bench_memory.restype = ctypes.c_int64
        if not self.lib.bench_open(plugin.encode()):
            raise SystemExit("TensorRT or the plug-in library does not load")

    def build(self, model: Path, profiles: list[dict[str, tuple[Sizes, Sizes, Sizes]]], level: int = 3) -> int:
        ranges = (Range * sum(len(p) for p in profiles))()
        for to, (name, sizes) in zip(ranges, ((n, s) for p in profiles for n, s in p.items()), strict=True):
            to.name, to.rank = name.encode(), len(sizes[0])
            for row, of in zip(to.sizes, sizes, strict=True):
                row[: len(of)] = of
        made = self.lib.bench_build(str(model).encode(), level, ranges, len(profiles[0]), len(profiles))
        if not made:
            raise SystemExit("no engine")
        return int(made)


class Context:
    """An execution context and its tensors."""

    def __init__(self, trt: TensorRT, engine: int, profile: int) -> None:
        self.lib = trt.lib
        self.held: dict[str, torch.Tensor] = {}
        self.nothing = torch.empty(256, dtype=torch.uint8, device="cuda")
        self.context = ctypes.c_void_p(self.lib.bench_context(ctypes.c_void_p(engine), profile, _stream()))
        torch.cuda.synchronize()

    def bind(self, name: str, tensor: torch.Tensor, shaped: bool = True) -> None:
        sizes = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.shape)
        rank = tensor.dim() if shaped else -1
        address = tensor.data_ptr() or self.nothing.data_ptr()  # nothing, too, has an address
        if not self.lib.bench_bind(self.context, name.encode(), ctypes.c_void_p(address), rank, sizes):
            raise SystemExit(f"{name} cannot be bound")
        self.held[name] = tensor

    def run(self) -> None:
        if not self.lib.bench_enqueue(self.context, _stream()):
            raise SystemExit("the engine does not run")


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class Decoder:
    """The engine with a cache in place and weights."""

    def __init__(self, trt: TensorRT, layers: int, dtype: str, capacity: int, folder: Path) -> None:
        self.specs, self.layers, self.capacity, self.kind = Specs.make(), layers, capacity, TYPES[dtype][0]
        a, hidden = self.specs.attention, self.specs.moe.hidden_size
        model = write(self.specs, layers, dtype, folder)
        generator = torch.Generator("cuda").manual_seed(0)
        one = {n: random_rows(s, p, generator).view(torch.int32) for n, (s, p) in self.specs.packed().items()}
        embeddings = torch.randn(VOCABULARY, hidden, device="cuda", dtype=self.kind)
        self.weights = {f"{i}.{n}": w.clone() for i in range(layers) for n, w in one.items()}
        self.weights["embeddings"] = embeddings
        shape = (1, a.kv_num_heads, capacity, a.head_size)
        self.caches = {
            f"{i}.{kind}": torch.full(shape, float("nan"), device="cuda", dtype=self.kind)
            for i in range(layers)
            for kind in ("key", "value")
        }
        begun = time.perf_counter()
        self.engine = trt.build(model, [self.ranges(1, 1, 1), self.ranges(1, PREFILL, PREFILL), self.growing()])
        print(f"{layers} layers: built in {time.perf_counter() - begun:.1f} s", flush=True)
        self.scratch = trt.lib.bench_memory(ctypes.c_void_p(self.engine))
        self.decode, self.prefill, self.grow = (Context(trt, self.engine, i) for i in range(3))
        self.logits = torch.empty(1, 1, VOCABULARY, device="cuda", dtype=self.kind)
        for context in (self.decode, self.prefill, self.grow):
            for name, tensor in self.weights.items():
                context.bind(name, tensor, shaped=False)
            context.bind("logits", self.logits, shaped=False)
        for context in (self.decode, self.prefill):
            for name, cache in self.caches.items():
                context.bind(f"past_key_values.{name}", cache)
                context.bind(f"present.{name}", cache, shaped=False)
        self.tokens = {
            name: torch.zeros(1, capacity if name == "attention_mask" else 1, device="cuda", dtype=torch.int64)
            for name in ("input_ids", "attention_mask", "position_ids")
        }
        for name, tensor in self.tokens.items():
            self.decode.bind(name, tensor)

    def ranges(self, *new: int) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
        a = self.specs.attention
        sizes: dict[str, Any] = {n: tuple((1, size) for size in new) for n in ("input_ids", "position_ids")}
        sizes["attention_mask"] = ((1, self.capacity),) * 3
        cache = (1, a.kv_num_heads, self.capacity, a.head_size)
        sizes |= {f"past_key_values.{name}": (cache,) * 3 for name in self.caches}
        return sizes

    def growing(self) -> dict[str, tuple[Sizes, Sizes, Sizes]]:
        a, past = self.specs.attention, (0, 1024, self.capacity - 1)
        sizes: dict[str, Any] = {n: ((1, 1), (1, 1), (1, PREFILL)) for n in ("input_ids", "position_ids")}
        sizes["attention_mask"] = tuple((1, size) for size in (1, 1025, self.capacity))
        caches = tuple((1, a.kv_num_heads, size, a.head_size) for size in past)
        return sizes | {f"past_key_values.{name}": caches for name in self.caches}

    def fill(self, ids: torch.Tensor) -> None:
        """A prompt, int64 [S], through the prefill profile."""
        size, mask = len(ids), torch.zeros(1, self.capacity, device="cuda", dtype=torch.int64)
        mask[:, :size] = 1
        self.prefill.bind("input_ids", ids[None].contiguous())
        self.prefill.bind("position_ids", torch.arange(size, device="cuda")[None])
        self.prefill.bind("attention_mask", mask)
        self.prefill.run()

    def set(self, token: int, position: int) -> None:
        self.tokens["input_ids"].fill_(token)
        self.tokens["position_ids"].fill_(position)
        self.tokens["attention_mask"].zero_()
        self.tokens["attention_mask"][:, : position + 1] = 1

    def growth(self, token: int, past: int) -> torch.Tensor:
        """Return the logits of a token after the cache's first slots, with present in other memory."""
        outs = {}
        for name, cache in self.caches.items():
            self.grow.bind(f"past_key_values.{name}", cache[:, :, :past].contiguous())
            outs[name] = cache.new_full((1, cache.shape[1], past + 1, cache.shape[3]), float("nan"))
            self.grow.bind(f"present.{name}", outs[name], shaped=False)
        self.grow.bind("input_ids", torch.tensor([[token]], device="cuda"))
        self.grow.bind("position_ids", torch.tensor([[past]], device="cuda"))
        self.grow.bind("attention_mask", torch.ones(1, past + 1, device="cuda", dtype=torch.int64))
        self.grow.run()
        torch.cuda.synchronize()
        for name, out in outs.items():
            assert torch.equal(out[:, :, :past], self.caches[name][:, :, :past]), name
        return self.logits.clone()

    def growing_us(self, past: int, steps: int) -> float:
        """Time of a token whose cache grows: new shapes, and what was past copied, each time."""
        _, groups, _, d = next(iter(self.caches.values())).shape
        memory = {
            n: [torch.zeros(self.capacity * groups * d, device="cuda", dtype=self.kind) for _ in "ab"]
            for n in self.caches
        }
        for step in range(steps + 3):
            if step == 3:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            before = past + step
            for name, (old, new) in memory.items():
                self.grow.bind(f"past_key_values.{name}", old[: before * groups * d].view(1, groups, before, d))
                self.grow.bind(f"present.{name}", new, shaped=False)
                memory[name] = [new, old]
            self.grow.bind("input_ids", self.tokens["input_ids"])
            self.grow.bind("position_ids", self.tokens["position_ids"])
            self.grow.bind("attention_mask", torch.ones(1, before + 1, device="cuda", dtype=torch.int64))
            self.grow.run()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) * 1e6 / steps


def events(body: Any, repeats: int) -> float:
    """Median microseconds."""
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        body()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


def kernels(body: Any) -> dict[str, tuple[int, float]]:
    """Call of each kernel, and the microseconds from the end of the one before to its own: kernels overlap."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        body()
        torch.cuda.synchronize()
    ranges = sorted(
        (event.time_range.end, event.time_range.start, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    found: dict[str, list[float]] = defaultdict(list)
    last = ranges[0][1]
    for end, _, name in ranges:
        found[name].append(end - last)
        last = end
    return {name: (len(times), sum(times)) for name, times in found.items()}


def part_of(kernel: str) -> str:
    for word, part in (("Append", "attention"), ("Attend", "attention"), ("quantmoe", "other kernels of ours")):
        if word in kernel:
            return part
    return "copies" if "Mem" in kernel else "TensorRT's"


def table(found: dict[str, tuple[int, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, (_, us) in found.items():
        sums[part_of(name)] += us
    return dict(sums)


def measure(d: Decoder, repeats: int) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (PREFILL,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    d.fill(ids)
    torch.cuda.synchronize()
    assert torch.isfinite(d.logits).all()
    prompt = d.logits.clone()
    # The prompt's last token alone, after the others: what the prefill says.
    positions = [PREFILL - 1, PREFILL, PREFILL + 1, d.capacity // 2 + 700, d.capacity - 1]
    positions = [p for p in positions if p < d.capacity]
    for cache in d.caches.values():  # slots between the positions are as if they were filled
        cache[:, :, PREFILL:] = cache[:, :, : d.capacity - PREFILL]
    d.set(int(ids[-1]), PREFILL - 1)
    d.decode.run()
    torch.cuda.synchronize()
    chained = float((d.logits - prompt).float().norm() / prompt.float().norm())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        d.decode.run()
    same, errors, tokens = True, [], []
    for position in positions:
        d.set(position * 7 % VOCABULARY, position)
        d.logits.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = d.logits.clone()
        d.decode.run()
        torch.cuda.synchronize()
        same &= torch.equal(replayed.view(torch.int16), d.logits.view(torch.int16))
        tokens.append(int(replayed.argmax()))
        grown = d.growth(position * 7 % VOCABULARY, position)
        errors.append(float((grown - replayed).float().norm() / replayed.float().norm()))
    d.set(5, PREFILL)
    for _ in range(20):
        graph.replay()
    found = {
        "layers": d.layers,
        "capacity": d.capacity,
        "engine's scratch MB": round(d.scratch / 1e6, 1),
        "decode us, graph": events(graph.replay, repeats),
        "decode us, graphs one after another": events(lambda: [graph.replay() for _ in range(10)], repeats // 10) / 10,
        "decode us, no graph": events(d.decode.run, repeats),
        "decode us, growing": d.growing_us(PREFILL, 20),
        "prefill us": events(d.prefill.run, max(3, repeats // 20)),
        "graph equals calls": same,
        "tokens at the positions": dict(zip(positions, tokens, strict=True)),
        "last of prefill against decode": chained,
        "in place against growing": max(errors),
    }
    d.set(5, PREFILL)
    for name, body in (("decode", graph.replay), ("prefill", d.prefill.run)):
        seen = kernels(body)
        found[f"{name}: kernels"] = sum(count for count, _ in seen.values())
        found[f"{name}: us by part"] = {part: round(us, 1) for part, us in table(seen).items()}
        found[f"{name}: us by kernel"] = {
            key[:110]: (count, round(us, 1))
            for key, (count, us) in sorted(seen.items(), key=lambda item: -item[1][1])[:16]
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library")
    parser.add_argument("plugin")
    parser.add_argument("--layers", default="1,48")
    parser.add_argument("--capacity", type=int, default=4096)
    parser.add_argument("--dtype", choices=TYPES, default="bf16")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    trt, results = TensorRT(given.library, given.plugin), []
    for layers in map(int, given.layers.split(",")):
        with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(torch.cuda.Stream()):
            results.append(measure(Decoder(trt, layers, given.dtype, given.capacity, Path(folder)), given.repeats))
        print(json.dumps(results[-1], indent=1), flush=True)
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
