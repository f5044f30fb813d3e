"""GatedDelta, CausalConv and StateSpace on CUDA: us a call.

    PYTHONPATH=tests python tests/benchmarks/cuda/delta_cuda_bench.py [--repeats 10] [--fla]
        [--flashinfer] [--spaces] [--mamba]

16 key heads of 128, a convolution of 4 over keys, queries and values, bf16, states in place; StateSpace of the sizes of
some models. Times are of CUDA graphs of several calls, each with tensors of its own, larger than L2 together where one
token reads a state; medians.
--fla: flash-linear-attention (PyPI's fla-core) in the same process, its recurrent kernel up to 8 tokens, its chunked
ones from there on. Its calls get gates that are ready and end before the gated norm, which are inside ours.
--flashinfer: FlashInfer (PyPI's flashinfer-python and nvidia-cutlass-dsl), its decode and multi-token kernels up to 8
tokens, which have the gates inside, too, its chunked ones from there on. All keep the state in f32.
--mamba: the Triton kernels of PyPI's mamba-ssm beside StateSpace, that of a step for one token, else the chunked ones.
They have the steps' softplus inside, and end before the gate and the norm, which are inside ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from benchmarks.attention_spec import delta_spec_of, space_spec_of
from benchmarks.cuda.attention_cuda_bench import Call, microseconds
from support.cuda import cuda_kernels as cuda

from quantmoe.custom_ops.op import ConvSpec, Spec

KEY_HEADS, SIZE, WIDTH = 16, 128, 4
#: groups, heads, features of a norm
SPACES = {"Nemotron-3-Nano": (8, 64, 512), "Granite-4-H-Tiny": (1, 48, 3072), "Granite-4-H-Small": (1, 128, 8192)}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def launch(spec: Spec, inputs: list[torch.Tensor], y: torch.Tensor) -> Call:
    """Return a call that writes the state in place; inputs end with a state and rows."""
    batch, tokens = inputs[0].shape[:2]
    plan = cuda.plan_node(spec, "bf16", batch, tokens=tokens, device=cuda.query())
    workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
    return lambda: cuda.launch_node(spec, plan, inputs, (y, inputs[-2]), workspace)


def delta(heads: int, batch: int, tokens: int) -> Call:
    """Return a call of GatedDelta on random inputs."""
    spec = delta_spec_of(KEY_HEADS, heads, SIZE)
    width = (2 * KEY_HEADS + heads) * SIZE
    inputs = [random(batch, tokens, n) for n in (width, heads, heads, heads * SIZE)]
    inputs += [random(n, dtype=torch.float32) for n in (heads, heads, SIZE)]
    state = random(batch, heads, SIZE, SIZE, dtype=torch.float32)
    rows = torch.tensor([[0, tokens, 1]] * batch, dtype=torch.int32, device="cuda")
    return launch(spec, [*inputs, state, rows], torch.empty_like(inputs[3]))


def fla(heads: int, batch: int, tokens: int) -> Call:
    """Return the call of flash-linear-attention, without the gates' functions and the norm of its output."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    q, k = (random(batch, tokens, KEY_HEADS, SIZE) for _ in "qk")
    v, beta = random(batch, tokens, heads, SIZE), random(batch, tokens, heads).sigmoid()
    g = -torch.nn.functional.softplus(random(batch, tokens, heads, dtype=torch.float32))
    state = random(batch, heads, SIZE, SIZE, dtype=torch.float32)
    rule = fused_recurrent_gated_delta_rule if tokens <= 8 else chunk_gated_delta_rule
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def call() -> None:
        with torch.no_grad():
            rule(q, k, v, g=g, beta=beta, **options)

    return call


def flashinfer(heads: int, batch: int, tokens: int) -> Call:
    """Return the call of FlashInfer, without the norm of its output; in prompts also without the gates."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    q, k = (random(batch, tokens, KEY_HEADS, SIZE) for _ in "qk")
    v, a, b = (random(batch, tokens, *shape) for shape in ((heads, SIZE), (heads,), (heads,)))
    a_log, dt_bias = (random(heads, dtype=torch.float32) for _ in "ab")
    state = random(batch, heads, SIZE, SIZE, dtype=torch.float32)
    if tokens == 1:
        return lambda: gated_delta_rule_decode_pretranspose(q, k, v, state, a_log, a, dt_bias, b)
    if tokens <= 8:
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        return lambda: gated_delta_rule_mtp(q, k, v, state, rows, a_log, a, dt_bias, b, disable_state_update=False)
    decay = (-a_log.exp() * torch.nn.functional.softplus(a + dt_bias)).exp().flatten(0, 1)
    beta, after = b.float().sigmoid().flatten(0, 1), torch.empty_like(state)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    ends = torch.arange(batch + 1, device="cuda") * tokens
    options = {"output_final_state": True, "cu_seqlens": ends, "use_qk_l2norm_in_kernel": True, "output_state": after}
    return lambda: chunk_gated_delta_rule(q, k, v, decay, beta, initial_state=state, **options)


def conv(heads: int, batch: int, tokens: int) -> Call:
    """Return the call of CausalConv."""
    channels = (2 * KEY_HEADS + heads) * SIZE
    spec = ConvSpec(channels=channels, width=WIDTH, activation="silu")
    x, state = random(batch, tokens, channels), random(batch, channels, WIDTH - 1)
    weight, bias = random(channels, WIDTH, dtype=torch.float32), random(0, dtype=torch.float32)
    rows = torch.tensor([[0, tokens, 1]] * batch, dtype=torch.int32, device="cuda")
    return launch(spec, [x, weight, bias, state, rows], torch.empty_like(x))


def space(model: str, batch: int, tokens: int) -> Call:
    """Return a call of StateSpace on random inputs."""
    spec = space_spec_of(*SPACES[model])
    heads, states, size = spec.num_heads, spec.state_size, spec.head_size
    width = heads * size
    inputs = [random(batch, tokens, n) for n in (width + 2 * spec.num_groups * states, heads, width)]
    inputs += [random(n, dtype=torch.float32) for n in (heads, heads, heads, width)]
    state = random(batch, heads, states, size, dtype=torch.float32)
    rows = torch.tensor([[0, tokens, 1]] * batch, dtype=torch.int32, device="cuda")
    return launch(spec, [*inputs, state, rows], torch.empty_like(inputs[2]))


def mamba(model: str, batch: int, tokens: int) -> Call:
    """Return the call of mamba-ssm, without the gate and the norm of its output."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    spec = space_spec_of(*SPACES[model])
    heads, states, size = spec.num_heads, spec.state_size, spec.head_size
    x = random(batch, tokens, heads, size)
    dt = random(batch, tokens, heads)
    b, c = (random(batch, tokens, spec.num_groups, states) for _ in "bc")
    a, d, bias = (random(heads, dtype=torch.float32) for _ in "adb")
    a = -a.exp()
    state = random(batch, heads, size, states, dtype=torch.float32)
    if tokens == 1:  # what of a head is one number is read as one
        dt, bias, d = dt[:, 0, :, None].expand(-1, -1, size), *(one[:, None].expand(-1, size) for one in (bias, d))
        a, x, b, c = a[:, None, None].expand(-1, size, states), x[:, 0], b[:, 0], c[:, 0]
        return lambda: selective_state_update(state, x, dt, a, b, c, d, dt_bias=bias, dt_softplus=True)
    options = {"chunk_size": 128, "D": d, "dt_bias": bias, "initial_states": state, "dt_softplus": True}
    return lambda: mamba_chunk_scan_combined(x, dt, a, b, c, return_final_states=True, **options)


def table(name: str, models: Iterable[Any], makers: dict[str, Callable[..., Call]], repeats: int) -> None:
    print(f"| {name} | batch | tokens | {' | '.join(makers)} |\n|{'---|' * (3 + len(makers))}")
    sizes = ((1, 1), (1, 4), (1, 8), (1, 64), (1, 256), (1, 1024), (1, 8192), (8, 1), (32, 1), (8, 256))
    for model in models:
        for batch, tokens in sizes:
            calls = 24 if batch * tokens <= 64 else 4
            us = [microseconds([make(model, batch, tokens) for _ in range(calls)], repeats) for make in makers.values()]
            print(f"| {model} | {batch} | {tokens} | {' | '.join(f'{time:.1f}' for time in us)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--fla", action="store_true", help="beside flash-linear-attention")
    parser.add_argument("--flashinfer", action="store_true", help="beside FlashInfer")
    parser.add_argument("--spaces", action="store_true", help="StateSpace alone")
    parser.add_argument("--mamba", action="store_true", help="StateSpace beside mamba-ssm")
    given = parser.parse_args()
    torch.manual_seed(0)
    makers = {"GatedDelta, us": delta, "CausalConv, us": conv}
    makers |= {f"{peer.__name__}, us": peer for peer in (fla, flashinfer) if getattr(given, peer.__name__)}
    if not given.spaces:
        table("value heads", (32, 48), makers, given.repeats)
    table("model", SPACES, {"StateSpace, us": space} | ({"mamba, us": mamba} if given.mamba else {}), given.repeats)


if __name__ == "__main__":
    main()
