"""A whole exported model in ONNX Runtime's CUDA provider: a token, prompts, batches, with and without a CUDA graph.

The graph is made where transformers is, on any machine; weights are random, and one layer's bytes are those of all:

    python tests/benchmarks/cuda/ort_cuda_bench.py graph qwen.onnx --model qwen3-30b-a3b --group-size 128
    python tests/benchmarks/cuda/ort_cuda_bench.py run qwen.onnx  # with onnxruntime-gpu, PyTorch, a GPU

A sliced model is a folder with a graph for each rank (rank0/model.onnx by --ranks 2 --rank 0, ..):

    torchrun --nproc-per-node 2 --local-ranks-filter 0 tests/benchmarks/cuda/ort_cuda_bench.py run FOLDER

--gpu-memory BYTES leaves experts in host memory, with that much for a cache of them, and prints its hits
(lab/expert-offloading): of runs that ask for the same experts each time, then of tokens routed as --routes says,
for each of --misses in a session of its own. --warm TOKENS: such sessions begin with a trace (quantmoe.warm) of so many
tokens of the same routes, those before the ones that are measured. --ram BYTES beside --gpu-memory: experts are in the
file, and so much RAM has a cache of them, which no CUDA graph can use; --apart gives each layer bytes of its own there.
--apart says how long the first token took, and --cold how long after the file has left the page cache.
--steps names other runs, as BATCH:PAST:NEW, and --prompts other lengths. The cache is bound in place. Times are medians
of whole runs on the host's clock, kernels are those that CUPTI saw.
"""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from quantmoe.benchmarks.random_checkpoint import CONFIGS, embedding_deviation, group_size_of, write
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import marlin
from quantmoe.custom_ops.matrix import QuantizedMatrix
from quantmoe.custom_ops.op import LinearSpec, MoESpec, Projection
from quantmoe.exporter.inspecting.expert_trace import read_trace
from quantmoe.exporter.reading.slices import Slice
from quantmoe.ort_ext import experts_report
from quantmoe.runtime import ranks

#: experts of different bytes in a layer
EXPERTS = 8
TYPES = {1: np.float32, 6: np.int32, 10: np.float16}
SCALES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
}
#: what takes the place of int4: of experts and lm_head, and of the other linears
WEIGHTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mxfp4": (
        {"format": "mxfp4", "scale_type": "e8m0", "group_size": 32},
        {"format": "f16", "scale_type": "f32", "group_size": -1},
    ),
    "nvfp4": (
        {"format": "nvfp4", "scale_type": "e4m3", "group_size": 16},
        {"format": "fp8_e4m3", "scale_type": "f32", "group_size": -1},
    ),
}


def make_graph(
    path: Path,
    model: str,
    group_size: int,
    weights: str,
    lm_head: str | None,
    scratch: Path,
    sizes: dict[str, Any],
    part: Slice | None,
    every: bool = False,
    paged: bool = False,
    cache: str = "auto",
) -> None:
    """Write a graph in f16 whose weights are named and not there.

    Args:
        sizes: fields of the model's configuration that are others.
        part: a rank's; None: the whole model.
        weights: "int4"; "mxfp4", experts as gpt-oss has them, and linears in f16; or "nvfp4", experts and a rounded
            head, and other linears in FP8, a scale a row, as ModelOpt's MIXED_PRECISION without its activations.
        lm_head: "int4" or "int8"; None: f16.
        scratch: folder for the headers of a checkpoint.
        every: logits of all tokens. paged: for serving.py, see export. cache: see export.
    """
    import onnx_ir as ir

    from quantmoe.exporter.choosing.choose import choose, choose_experts
    from quantmoe.exporter.graph.lowering.embeddings import keep_tables
    from quantmoe.exporter.graph.lowering.paged import to_paged
    from quantmoe.exporter.graph.lowering.weights import place_weights
    from quantmoe.exporter.graph.model import Skeleton
    from quantmoe.exporter.graph.passes import run_passes
    from quantmoe.exporter.graph.passes.interface import drop_traces, name_interface
    from quantmoe.exporter.graph.passes.last_logits import keep_last_logits
    from quantmoe.exporter.graph.put_nodes import put_first_nodes, put_nodes
    from quantmoe.exporter.graph.trace import attention_of, trace
    from quantmoe.exporter.targets import CUDA
    from quantmoe.exporter.writing.prepare import open_format

    write(scratch, CONFIGS[model] | sizes, group_size, data=False)
    format = open_format(scratch, None, None)
    format.slice = part
    skeleton = Skeleton(format, "f16", lm_head=lm_head, target=CUDA)
    chosen = choose(
        skeleton,
        choose_experts(format, CUDA.layout, None, scales="exact"),
        CUDA.layout,
        activations=None,
        scales="exact",
    )
    if weights in WEIGHTS:
        experts, dense = WEIGHTS[weights]
        for name, spec in chosen.layers.items():
            chosen.layers[name] = replace(spec, w13=replace(spec.w13, **experts), w2=replace(spec.w2, **experts))
        for name, linear in chosen.linears.items():
            head = chosen.source(name) == skeleton.head
            if linear.w.format == "int4" and not (head and weights == "mxfp4"):
                chosen.linears[name] = replace(linear, w=replace(linear.w, **(experts if head else dense)))
    attends = attention_of(
        skeleton, chosen, put_first_nodes(skeleton, chosen, CUDA), target=CUDA, cache=cache, paged=paged
    )
    if attends.plain:
        raise SystemExit(f"attention of standard nodes: {attends.plain}")
    put_nodes(skeleton, chosen, attends, CUDA)
    graph = trace(skeleton, chosen, attends, CUDA)
    placed = place_weights(graph)
    keep_tables(placed, skeleton.stored_type)
    name_interface(graph)
    if paged:
        for table in to_paged(graph, skeleton.model.config.max_position_embeddings, every):
            table.value.const_value = ir.tensor(table.array, name=table.value.name)
            graph.graph.register_initializer(table.value)
    elif not every:
        keep_last_logits(graph, None)
    run_passes(graph, CUDA.final_passes)
    drop_traces(graph)
    for value in (weight.value for weight in placed):
        assert value.dtype is not None
        assert value.shape is not None
        value.const_value = ir.ExternalTensor("data", 0, 0, value.dtype, shape=value.shape, name=str(value.name))
        graph.graph.register_initializer(value)
    path.write_bytes(ir.to_proto(graph).SerializeToString())


def fill(path: Path, folder: Path, apart: bool = False) -> None:
    """Write ``folder``'s model.onnx and its data: random weights of unit-variance products.

    Args:
        apart: each layer has a copy of its own, so that the file is as long as a model's; else all share one.
    """
    rng, model = np.random.default_rng(0), onnx.load(path, load_external_data=False)
    layers = sum(node.op_type == "QuantMoE" for node in model.graph.node)
    users = {name: (node, i) for node in model.graph.node for i, name in enumerate(node.input)}
    normal = rng.standard_normal(1 << 22).astype(np.float32)
    regions: dict[str, tuple[int, int]] = {}
    taken: set[str] = set()

    def alike(name: str) -> str:
        return re.sub(r"layers\.\d+\.", "layers.N.", name)

    with open(folder / "data", "w+b") as data:

        def put(name: str, arrays: Iterator[np.ndarray] | list[np.ndarray]) -> None:
            data.write(bytes(-data.tell() % 4096))
            start = data.tell()
            for array in arrays:
                data.write(np.ascontiguousarray(array).view(np.uint8).data)
            regions[name] = start, data.tell() - start

        for tensor in model.graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                continue
            name, (node, _) = alike(tensor.name), users[tensor.name]
            if name not in regions and node.op_type == "QuantMoE":
                rows = list(_experts(MoESpec.from_attributes(_attributes(node)), rng))
                for i, projection in enumerate(("w13", "w2")):
                    every = [rows[e % EXPERTS][i] for e in range(tensor.dims[0])]
                    put(f"{name.rpartition('.')[0]}.{projection}", every)
            elif name not in regions and node.op_type == "QuantLinear":
                spec = LinearSpec.from_attributes(_attributes(node))
                row = np.zeros(marlin.row_bytes(spec.moe, "w2"), np.uint8)
                marlin.pack_down(_matrix(spec.w, spec.out_features, spec.in_features, rng), spec.moe, row)
                put(name, [row])
            elif name not in regions:
                count, dtype = int(np.prod(tensor.dims)), TYPES[tensor.data_type]
                deviation = 0.1 if len(tensor.dims) == 1 else 0.02
                if "embed" in name:
                    deviation = embedding_deviation(layers)
                elif node.op_type in ("MoERouter", "MoERouting"):  # no expert is favoured
                    deviation *= len(tensor.dims) > 1
                piece = np.ones_like(normal) if "norm" in name else normal * deviation
                put(name, (piece[: count - at].astype(dtype) for at in range(0, count, len(piece))))
            start, length = regions[name]
            if apart and name in taken:
                data.seek(start)
                copy = data.read(length)
                data.seek(0, io.SEEK_END)
                data.write(bytes(-data.tell() % 4096))
                start = data.tell()
                data.write(copy)
            taken.add(name)
            del tensor.external_data[:]
            for key, value in (("location", "data"), ("offset", start), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, folder / "model.onnx")


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def _matrix(p: Projection, n: int, k: int, rng: np.random.Generator) -> QuantizedMatrix:
    bias = rng.normal(size=n).astype(np.float32) / 10 if p.bias else None
    if p.format == "f16":
        codes = (rng.standard_normal((n, k), np.float32) / k**0.5).astype(np.float16).view(np.uint16)
        return QuantizedMatrix(kind="f16", codes=codes, scales=np.ones((n, 1), np.float32), group_size=-1, bias=bias)
    groups, scale = (n, k // (p.group_size if p.group_size > 0 else k)), 1 / (4.6 * k**0.5)
    if p.scale_type == "e8m0":
        exponents = rng.integers(0, 2, groups, np.uint8) + np.uint8(127 + round(np.log2(scale)))
        scales = exponents.view(ml_dtypes.float8_e8m0fnu)
    else:
        own = 1 if p.format == "nvfp4" else scale
        scales = (rng.uniform(0.5, 1.5, groups) * own).astype(SCALES[p.scale_type])
    codes = rng.integers(0, 16, (n, k), np.uint8)
    if p.format == "fp8_e4m3":
        codes = (4.6 * rng.standard_normal((n, k), np.float32)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    factor = float(np.float32(scale)) if p.format == "nvfp4" else None
    return QuantizedMatrix(
        kind=p.format, codes=codes, scales=scales, group_size=p.group_size, bias=bias, global_scale=factor
    )


def _experts(spec: MoESpec, rng: np.random.Generator) -> Iterator[list[np.ndarray]]:
    for _ in range(EXPERTS):
        gate, up = (_matrix(spec.w13, spec.intermediate_size, spec.hidden_size, rng) for _ in range(2))
        down = _matrix(spec.w2, spec.hidden_size, spec.intermediate_size, rng)
        rows = [np.zeros(marlin.row_bytes(spec, projection), np.uint8) for projection in ("w13", "w2")]
        marlin.pack(Expert(gate=gate, up=up, down=down), spec, *rows)
        yield rows


class Bound:
    """A run of ``new`` tokens after ``past``, all of it in memory of the device that stays."""

    def __init__(self, session: Any, batch: int, new: int, past: int, capacity: int, graph: int):
        import onnxruntime as ort
        import torch

        self.session, self.binding, self.options = session, session.io_binding(), ort.RunOptions()
        self.options.add_run_config_entry("gpu_graph_id", str(graph))
        caches = {i.name: i for i in session.get_inputs() if i.name.startswith("past")}
        logits = session.get_outputs()[0]
        sizes = {name: [capacity if isinstance(n, str) else n for n in i.shape[1:]] for name, i in caches.items()}
        known = {"tensor(float16)": torch.float16, "tensor(float)": torch.float32}
        types = {name: known[i.type] for name, i in caches.items()}
        vocabulary = logits.shape[2]
        self.mask = torch.zeros(batch, capacity, dtype=torch.int64, device="cuda")
        self.mask[:, : past + new] = 1
        self.positions = torch.arange(past, past + new, device="cuda").repeat(batch, 1)
        self.logits = torch.empty(batch, 1, vocabulary, dtype=known[logits.type], device="cuda")
        self.caches = {n: torch.randn((batch, *sizes[n]), dtype=types[n], device="cuda") for n in caches}
        ids = torch.randint(1, vocabulary, (batch, new), device="cuda")
        routed = {i.name: i for i in session.get_inputs() if i.name.startswith("topk_ids.")}
        #: of driven.onnx: [layers, tokens, top_k]
        self.routed = torch.zeros(0)
        if routed:
            first = next(iter(routed.values()))
            dtype = torch.int32 if first.type == "tensor(int32)" else torch.int64
            self.routed = torch.zeros(len(routed), batch * new, first.shape[1], dtype=dtype, device="cuda")
            for tensor, name in zip(self.routed, routed, strict=True):
                self.binding.bind_input(name, *_place(tensor))
        self.inputs = {"input_ids": ids, "attention_mask": self.mask, "position_ids": self.positions}
        for name, tensor in (self.inputs | self.caches).items():
            self.binding.bind_input(name, *_place(tensor))
        self.binding.bind_output("logits", *_place(self.logits))
        for name, tensor in self.caches.items():
            self.binding.bind_output(name.replace("past_key_values", "present"), *_place(tensor))

    def run(self) -> Any:
        self.session.run_with_iobinding(self.binding, self.options)
        return self.logits.clone()

    def milliseconds(self, runs: int) -> float:
        times = []
        for at in range(runs + 3):
            if at == 3:
                self.options.log_severity_level = 2  # what a session says of each run takes its time
            begin = time.perf_counter()
            self.session.run_with_iobinding(self.binding, self.options)
            times += [time.perf_counter() - begin] if at >= 3 else []
        return float(np.median(times)) * 1e3

    def kernels(self, runs: int = 5, most: int = 24) -> None:
        """Print what took the GPU's time, microseconds a run: until the kernel before had ended, what a kernel ran is
        no time of its own, as kernels begin before that and wait."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(runs):
                self.run()
            torch.cuda.synchronize()
        found: dict[str, list[float]] = collections.defaultdict(list)
        on_device = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.device_time]
        ended = 0.0
        for event in sorted(on_device, key=lambda event: event.time_range.end):
            begin, end = event.time_range.start, event.time_range.end
            found[event.name].append(end - max(begin, ended))
            ended = end
        own = [time for times in found.values() for time in times]
        print(f"  {len(own) / runs:.0f} kernels and copies, {sum(own) / runs:.0f} us of their own")
        for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:most]:
            print(f"  {sum(times) / runs:9.1f} us, {len(times) / runs:6.1f} of {np.mean(times):7.2f}: {name[:90]}")


def _place(tensor: Any) -> tuple[Any, ...]:
    dtype = getattr(np, str(tensor.dtype).removeprefix("torch."))
    return "cuda", 0, dtype, list(tensor.shape), tensor.data_ptr()


def _bus() -> float:
    """Return bytes a second from page-locked memory to the device's."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        device.copy_(host)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return len(host) / float(np.median(times))


def drive(folder: Path) -> np.ndarray:
    """Write driven.onnx, whose layers take ids from inputs topk_ids.N. Routers only weigh them.

    Returns:
        int64 [layers, 3]: routed experts, top_k and shared experts of each; the shared ones are its last.
    """
    model, sizes = onnx.load(folder / "model.onnx", load_external_data=False), []
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    routers = {
        name: _attributes(node) for node in model.graph.node if node.op_type == "MoERouter" for name in node.output
    }
    layers = [node for node in model.graph.node if node.op_type == "QuantMoE"]
    for i, node in enumerate(layers):
        (_, ids, *_), router = node.input, routers[node.input[1]]
        shared = router.get("shared_experts", 0)
        sizes.append((_attributes(node)["num_experts"] - shared, router["top_k"], shared))
        node.input[1] = f"topk_ids.{i}"
        shape = ["routed_tokens", router["top_k"] + shared]
        model.graph.input.append(onnx.helper.make_tensor_value_info(node.input[1], types[ids], shape))
    onnx.save(model, folder / "driven.onnx")
    return np.array(sizes)


def route(how: str, tokens: int, sizes: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, int64 [tokens, layers, top_k + shared experts].

    Args:
        how: "uniform"; "local": of the experts by last use, 67 % are drawn from the first eighth and 81 % from the
            first quarter, the hits of such LRUs in ggml-org/llama.cpp 27861; or a trace of that much decoding.
        sizes: of drive.
    """
    (experts, top_k, shared), rng = sizes[0], np.random.default_rng(0)
    ids = np.zeros((tokens, len(sizes), top_k + shared), np.int64)
    if how not in ("uniform", "local"):
        runs = [(layer, run) for layer, run in read_trace(how).runs if len(run) == 1][: tokens * len(sizes)]
        if len(runs) < tokens * len(sizes) or any(run.shape[1] != ids.shape[2] for _, run in runs):
            raise SystemExit(f"{how}: expected {tokens} tokens of {len(sizes)} layers, {ids.shape[2]} experts each")
        for i, (layer, run) in enumerate(runs):
            ids[i // len(sizes), layer] = run[0]
        return ids
    for layer in range(len(sizes)):
        latest = list(rng.permutation(experts))
        for token in range(tokens):
            chosen: list[int] = []
            while len(chosen) < top_k:
                share = (
                    np.interp(rng.random(), [0, 0.67, 0.81, 1], [0, 1 / 8, 1 / 4, 1])
                    if how == "local"
                    else rng.random()
                )
                expert = latest[min(int(share * experts), experts - 1)]
                chosen += [expert] if expert not in chosen else []
            latest = chosen + [e for e in latest if e not in chosen]
            ids[token, layer] = [*chosen, *range(experts, experts + shared)]
    return ids


def trace_routes(session: Any, ids: np.ndarray) -> None:
    """Run tokens that are routed to these experts, of which the session writes a trace."""
    bound = Bound(session, 1, 1, 512, 4096, -1)
    for step in bound.routed.new_tensor(ids):
        bound.routed.copy_(step[:, None])
        bound.run()


def misses(
    hosted: Any, resident: Any, library: str, routes: Sequence[str], sizes: np.ndarray, after: int, tokens: int = 256
) -> None:
    """A line for each kind of routes: what the cache hits, and a token's time against the time with all experts on the
    device and the missed bytes' on the bus.

    Logits of ``cpu`` may be far off: codes' mean is half a step below zero, so that one direction of these random
    weights outgrows all others, and some tokens' first roundings with it.

    Args:
        hosted, resident: sessions of driven.onnx.
        after: so many tokens of these routes.
    """
    bus, warm = _bus(), 64
    bound = [Bound(session, 1, 1, 512, 4096, 1000) for session in (hosted, resident)]
    for name, tensor in (bound[1].inputs | bound[1].caches).items():
        tensor.copy_((bound[0].inputs | bound[0].caches)[name])
    for how in routes:
        ids = route(how, after + warm + tokens, sizes)[after:]
        counts: list[dict[str, int]] = []
        took, kept, read = [], [], 0
        for one in bound:
            steps = one.routed.new_tensor(ids)
            times, logits = [], []
            for at in range(len(ids)):
                if at == warm:
                    one.options.log_severity_level = 2
                    counts.append(experts_report(library)[0])
                    read -= bytes_read()
                one.routed.copy_(steps[at, :, None])
                begin = time.perf_counter()
                one.session.run_with_iobinding(one.binding, one.options)
                times.append(time.perf_counter() - begin)
                logits.append(one.logits.cpu().numpy().ravel())
            counts.append(experts_report(library)[0])
            read += bytes_read()
            took.append(float(np.mean(times[warm:])))
            kept.append(np.stack(logits))
        hits, missed, size = (counts[1][name] - counts[0][name] for name in ("hits", "misses", "missed_bytes"))
        ideal = took[1] + size / tokens / bus
        print(
            f"routes {how}: {took[0] / ideal:.2f} of resident + missed bytes / bus; {1e3 * took[0]:.2f} ms "
            f"({1 / took[0]:.0f} tokens/s), resident {1e3 * took[1]:.2f} ms, hit rate {hits / (hits + missed):.3f}, "
            f"{size / tokens / 1e6:.1f} MB a token at {bus / 1e9:.1f} GB/s, {read / tokens / 1e6:.1f} from the disk; "
            f"logits are off by {_distance(*kept):.1e} of a token's at most"
        )


def _distance(found: np.ndarray, want: np.ndarray) -> float:
    """Return the largest of rows, relative to each one's length; 0: the same bytes."""
    if found.tobytes() == want.tobytes():
        return 0.0
    wide = want.astype(np.float32)
    return float((np.linalg.norm(found - wide, axis=1) / np.linalg.norm(wide, axis=1)).max())


def measure_steps(session: Any, steps: list[str], report: Callable[[], None]) -> None:
    import torch

    for graph, (batch, past, new) in enumerate((map(int, step.split(":")) for step in steps), 1):
        capacity = 4096 if batch == 1 else past + 512
        replayed, launched = (Bound(session, batch, new, past, capacity, i) for i in (graph, -1))
        for name, tensor in (launched.inputs | launched.caches).items():
            tensor.copy_((replayed.inputs | replayed.caches)[name])
        replayed.run()  # captures, in several runs: states are put back
        for name, tensor in replayed.caches.items():
            tensor.copy_(launched.caches[name])
        same = torch.equal(replayed.run(), launched.run()) and all(
            torch.equal(tensor, launched.caches[name]) for name, tensor in replayed.caches.items()
        )
        checksum = zlib.crc32(launched.run().cpu().view(torch.uint8).numpy().tobytes())
        times = [bound.milliseconds(50) for bound in (replayed, launched)]
        print(
            f"{new} tokens, batch {batch}, after {past} of {capacity} slots: {times[0]:.3f} ms with a CUDA graph "
            f"({1e3 * batch * new / times[0]:.0f} tokens/s), {times[1]:.3f} without; "
            f"the same bytes: {same}, CRC {checksum:08x}"
        )
        report()
        if past >= 1024:
            replayed.kernels()


def forget(data: Path) -> float:
    """Drop the file from the page cache; the bytes a second of a read of its first 2 GiB, which are dropped again."""
    with data.open("rb", buffering=0) as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begin, chunk = time.perf_counter(), bytearray(1 << 24)
        size = sum(file.readinto(chunk) or 0 for _ in range(128))
        took = time.perf_counter() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return size / took


def bytes_read() -> int:
    """Return what this process had read from storage so far, by whatever call or mapping (proc(5))."""
    return int(re.findall(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(encoding="utf-8"), re.MULTILINE)[0])


def measure_load(session: Any, begun: float, read: int, data: Path) -> None:
    """Print when the first token was there, and the time of a copy of the mapped file to the device beside it.

    Args:
        begun: when the session was asked for; read: bytes_read() then.
    """
    import torch

    Bound(session, 1, 1, 0, 4096, -1).run().cpu()
    took = time.perf_counter() - begun
    print(f"first token after {took:.2f} s, {(bytes_read() - read) / 1e9:.2f} GB read from the disk")
    begin = time.perf_counter()
    torch.from_numpy(np.memmap(data, np.uint8, "c")).cuda()
    torch.cuda.synchronize()
    copy = time.perf_counter() - begin
    torch.cuda.empty_cache()
    size = data.stat().st_size / 1e9
    print(f"  {took / copy:.2f} of a copy of the mapped file, now in the page cache: {copy:.2f} s for {size:.1f} GB")


def measure_prompts(session: Any, prompts: list[int], report: Callable[[], None]) -> None:
    for tokens in prompts:
        prompt = Bound(session, 1, tokens, 0, 4096, -1)
        ms = prompt.milliseconds(8)
        print(f"prompt of {tokens}: {ms:.2f} ms ({1e3 * tokens / ms:.0f} tokens/s)")
        prompt.kernels()
        report()


def bench(
    folder: Path,
    library: str,
    steps: list[str],
    prompts: list[int],
    gpu_memory: int | None = None,
    ram: int | None = None,
    routes: Sequence[str] = (),
    of_misses: Sequence[str] = ("copy",),
    threads: int | None = None,
    warm: int = 0,
    group: str = "",
    apart: bool = False,
    cold: bool = False,
) -> None:
    """Print a line for each measurement, and the kernels of some.

    Args:
        steps: BATCH:PAST:NEW.
        gpu_memory: bytes for a cache of experts, which are then in host memory; None: all are on the device.
        ram: bytes for another, of experts that are then in the file.
        routes: of misses. of_misses: values of quantmoe.misses, of which the first is also of steps and prompts.
        threads: of the CPU's part; None: the library's choice. group: of a rank.
        warm: tokens of a trace that sessions of misses begin with; 0: none.
        apart: also the first token, of such a file. cold: it has left the page cache before.
    """
    import onnxruntime as ort
    import torch

    free = torch.cuda.mem_get_info()[0]
    torch.manual_seed(0)  # which experts a batch takes decides about its time

    def open_session(graph: str, how: Any, captures: bool = ram is None) -> Any:
        settings = {"enable_cuda_graph": str(int(captures)), "arena_extend_strategy": "kSameAsRequested"}
        return ort.InferenceSession(graph, how, providers=[("CUDAExecutionProvider", settings)])

    def options(of: str, **more: str) -> Any:
        made, entries = ort.SessionOptions(), {"group": group} if group else {}
        if gpu_memory is not None:
            made.log_severity_level = 1  # says where experts are
            place = {"experts": "host", "misses": of} if ram is None else {"experts": "disk", "ram": str(ram)}
            entries |= place | {"gpu_memory": str(gpu_memory)}
            entries |= more | ({"threads": str(threads)} if threads and of != "copy" else {})
        for name, value in entries.items():
            made.add_session_config_entry(f"quantmoe.{name}", value)
        made.register_custom_ops_library(library)
        return made

    if cold:
        print(f"the file is read at {forget(folder / 'data') / 1e9:.2f} GB/s, one part after the other")
    begin, read = time.perf_counter(), bytes_read() if apart else 0
    session = open_session(str(folder / "model.onnx"), options(of_misses[0]))
    loaded = time.perf_counter() - begin
    print(f"{torch.cuda.get_device_name()}, ONNX Runtime {ort.__version__}: {loaded:.2f} s to load")
    if apart:
        measure_load(session, begin, read, folder / "data")

    def report() -> None:
        if gpu_memory is not None:
            print(f"  {experts_report(library)[0]}")

    measure_steps(session, steps, report)
    measure_prompts(session, prompts, report)
    memory = free - torch.cuda.mem_get_info()[0]
    print(f"GPU memory: {memory / 1e9:.2f} GB")
    if gpu_memory is not None:
        del session
        sizes, driven, plain = drive(folder), str(folder / "driven.onnx"), ort.SessionOptions()
        plain.register_custom_ops_library(library)
        resident = open_session(driven, plain, captures=True)
        traces = {how: str(folder / f"routes{i}.trace") for i, how in enumerate(routes if warm else ())}
        for how, trace in traces.items():
            trace_routes(open_session(driven, options("copy", trace=trace), captures=False), route(how, warm, sizes))
        for of in of_misses:
            print(f"misses {of}")
            for part in [[how] for how in routes] if warm else [routes]:
                made = options(of, warm=traces[part[0]]) if warm else options(of)
                misses(open_session(driven, made), resident, library, part, sizes, warm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["graph", "run"])
    parser.add_argument("graph", type=Path)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--group-size", type=int, help="of int4; default: 128, or 32 where the sizes need it")
    parser.add_argument("--sizes", type=json.loads, default={}, help="fields of its config.json that are others, JSON")
    parser.add_argument("--ranks", type=int, default=1, help="of a sliced model (docs/guides/several-gpus.md)")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--weights", choices=["int4", *WEIGHTS], default="int4", help="of experts; see make_graph")
    parser.add_argument("--lm-head", choices=["int4", "int8"], help="rounded, as export does it")
    parser.add_argument("--all-logits", action="store_true", help="of all tokens, not of the last")
    parser.add_argument("--paged", action="store_true", help="as export --paged, for serving.py")
    parser.add_argument("--cache", default="auto", help="as export --cache")
    parser.add_argument("--steps", nargs="+", default=["1:512:1", "1:2048:1", "8:2048:1", "32:2048:1"])
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048])
    parser.add_argument("--gpu-memory", type=int, help="for experts, which are then in host memory")
    parser.add_argument("--ram", type=int, help="beside --gpu-memory, for experts that are in the file")
    parser.add_argument(
        "--routes", nargs="+", default=["local", "uniform"], help="of --gpu-memory: see route; or traces"
    )
    parser.add_argument("--misses", nargs="+", default=["copy"], help="of --gpu-memory: quantmoe.misses")
    parser.add_argument("--threads", type=int, help="of the CPU's part of --misses")
    parser.add_argument("--warm", type=int, default=0, help="of --gpu-memory: tokens of a trace to begin with")
    parser.add_argument("--apart", action="store_true", help="each layer's bytes in the file, to measure its loading")
    parser.add_argument("--cold", action="store_true", help="of --apart: the file has left the page cache")
    parser.add_argument("--folder", type=Path, default=Path("ort-cuda-bench"), help="scratch")
    given = parser.parse_args()
    if given.cold and not given.apart:
        parser.error("--cold: expected --apart with it")
    if given.ram is not None and (given.gpu_memory is None or given.misses != ["copy"]):
        parser.error("--ram: expected --gpu-memory with it, and no --misses")
    group = ""
    if ranks.launched():
        rank = ranks.meet(given.graph, "cuda", seed=0)
        given.graph, group = rank.path / "model.onnx", rank.group
        given.folder /= f"rank{rank.rank}"
    given.folder.mkdir(parents=True, exist_ok=True)
    given.graph.parent.mkdir(parents=True, exist_ok=True)
    if given.what == "graph":
        part = (
            Slice(rank=given.rank, world=given.ranks, whole_experts=given.expert_parallel) if given.ranks > 1 else None
        )
        scratch = given.folder / "headers"
        weights = (given.weights, given.lm_head)
        ends = (given.all_logits, given.paged, given.cache)
        size = given.group_size or group_size_of(CONFIGS[given.model] | given.sizes)
        make_graph(given.graph, given.model, size, *weights, scratch, given.sizes, part, *ends)
    else:
        from quantmoe.ort_ext import cuda_library_path

        fill(given.graph, given.folder, given.apart)
        bench(
            given.folder,
            cuda_library_path(),
            given.steps,
            given.prompts,
            given.gpu_memory,
            given.ram,
            given.routes,
            given.misses,
            given.threads,
            given.warm,
            group,
            given.apart,
            given.cold,
        )
