"""MoERouter, AddRMSNorm and TokenRows on CUDA against reference.py, through the C ABI. Launches are skipped where no
GPU is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.cuda import cuda_kernels as cuda
from support.cuda.built import SM80, TORCH, UNIT, gpu, torch
from support.operators.cases import ROUTERS, assert_routed

from quantmoe.custom_ops import reference
from quantmoe.custom_ops.op import NormSpec, RouterSpec, RoutingSpec, RowsSpec

PATHS = ("cluster", "rows", "tiles")
H20 = cuda.Device(90, 78, 233472)


def router_spec(routing: RoutingSpec, hidden_size: int) -> RouterSpec:
    own = {name: value for name, value in routing.attributes().items() if name != "op_version"}
    return RouterSpec(hidden_size=hidden_size, **own)


QWEN3 = router_spec(ROUTERS["renormalized"], 2048)
QWEN3_5 = router_spec(ROUTERS["shared-gate"], 2048)
GPT_OSS = router_spec(ROUTERS["topk-softmax"], 2880)
DEEPSEEK = router_spec(ROUTERS["groups"], 7168)


def test_the_plan() -> None:
    def path(spec: RouterSpec, tokens: int, device: cuda.Device = cuda.H200) -> str:
        plan = cuda.plan_node(spec, "f16", 1, tokens=tokens, device=device)
        assert plan.workspace_bytes == (0 if plan.chosen[0] == 0 else 4 * tokens * spec.routing.logits)
        return PATHS[plan.chosen[0]]

    for spec in (QWEN3, QWEN3_5, GPT_OSS, DEEPSEEK):
        assert [path(spec, tokens) for tokens in (1, 8, 32, 33, 2048)] == ["cluster"] * 3 + ["tiles"] * 2
        assert [path(spec, tokens, SM80) for tokens in (1, 32, 33)] == ["rows", "rows", "tiles"]
        odd = dataclasses.replace(spec, hidden_size=spec.hidden_size + 3)
        assert [path(odd, tokens) for tokens in (1, 2048)] == ["rows", "rows"]
    # 80 experts a block
    for device, most in ((H20, 640), (cuda.H200, 1280)):
        assert [path(dataclasses.replace(QWEN3, num_experts=e), 1, device) for e in (most, most + 1)] == [
            "cluster",
            "rows",
        ]


@pytest.mark.parametrize(
    ("device", "experts", "blocks"),
    [(cuda.H200, 128, 8), (cuda.H200, 129, 16), (H20, 512, 8), (cuda.Device(120, 188, 101376), 512, 8)],
)
@pytest.mark.parametrize("of", [QWEN3, QWEN3_5], ids=["experts", "and a gate"])
def test_blocks_of_a_cluster(of: RouterSpec, device: cuda.Device, experts: int, blocks: int) -> None:
    """16 need 16 multiprocessors in a group, as one of eight has of more than 112, and a GPU that takes them."""
    spec = dataclasses.replace(of, num_experts=experts)
    assert cuda.plan_node(spec, "f16", 1, tokens=1, device=device).chosen[1] == blocks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, the CUDA kernels take 1 to 16777216"),
        ({"num_experts": 4096}, "num_experts is 4096, the CUDA kernel takes 1 to 2048"),
        ({"top_k": 129}, "top_k is 129, the CUDA kernel takes 1 to 128"),
        ({"shared_experts": 4096}, "shared_experts is 4096, the CUDA kernel takes 0 to 2048"),
        ({"shared_gate": 1}, "shared_gate is 1, the CUDA kernel takes 0 to 0"),
        ({"op_version": 99}, "op_version is 99"),
    ],
)
def test_router_refusals(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cuda.plan_node(dataclasses.replace(QWEN3, **change), "f16", 1, tokens=1)


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"hidden_states is of type 0, the CUDA kernels take float16 \(1\)"):
        cuda.plan_node(QWEN3, "f32", 1, tokens=1)
    with pytest.raises(ValueError, match="x is of type 0, the CUDA kernels take float16"):
        cuda.plan_node(NormSpec(norm_epsilon=1e-6), "f32", 1, tokens=1, H=8)
    with pytest.raises(ValueError, match=r"norm_epsilon is -1"):
        cuda.plan_node(NormSpec(norm_epsilon=-1.0), "f16", 1, tokens=1, H=8)
    with pytest.raises(ValueError, match="columns of x is 0, the CUDA kernels take 1 to 16777216"):
        cuda.plan_node(NormSpec(norm_epsilon=1e-6), "f16", 1, tokens=1, H=0)


def tensor(x: np.ndarray, dtype: str) -> Any:
    return torch.from_numpy(x.astype(np.float32)).to(TORCH[dtype]).cuda()


def numbers(x: Any) -> np.ndarray:
    return x.cpu().double().numpy()


def twice(run: Any) -> list[Any]:
    one, two = run(), run()
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), "two runs differ"
    return one


def router_inputs(spec: RouterSpec, tokens: int, dtype: str, biases: bool) -> list[Any]:
    rng = np.random.default_rng(tokens)
    x = tensor(rng.normal(0, 1, (tokens, spec.hidden_size)), dtype)
    weight = tensor(rng.normal(0, 2 / spec.hidden_size**0.5, (spec.routing.logits, spec.hidden_size)), dtype)
    own = (rng.normal(0, 1, spec.routing.logits * biases), rng.uniform(0, 1, spec.num_experts * biases))
    return [x, weight, *(torch.from_numpy(bias.astype(np.float32)).cuda() for bias in own)]


def check_router(spec: RouterSpec, inputs: list[Any], device: cuda.Device | None = None) -> None:
    """Sums of n products in f32 are off by a few sqrt(n) 2^-24 of 4, logits being of norm 2: ids but of near ties, and
    weights as MoERouting's of logits so far off."""
    found = [t.cpu().numpy() for t in twice(lambda: cuda.run_node(spec, *inputs, device=device))]
    want = reference.router(spec, *(numbers(t) for t in inputs))
    off = 4 * 2.0**-24 * (spec.hidden_size**0.5 + 8)
    assert_routed((found[0], found[1]), want, 4e-6 + 2 * off, 1e-6 + off)


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 32, 33, 100, 1000])
@pytest.mark.parametrize("hidden", [8, 64, 72, 264, 2048, 61, 1])
@pytest.mark.parametrize(
    "name", ["renormalized", "few-groups", "one", "groups-of-one", "topk", "llama4", "shared", "shared-gate"]
)
def test_router(name: str, hidden: int, tokens: int, dtype: str) -> None:
    spec = router_spec(ROUTERS[name], hidden)
    inputs = router_inputs(spec, tokens, dtype, biases=tokens % 2 == 1)
    for device in (None, H20, SM80):
        check_router(spec, inputs, device)


@gpu
@pytest.mark.parametrize(
    "spec",
    [
        *(QWEN3, QWEN3_5, GPT_OSS, DEEPSEEK, router_spec(ROUTERS["most"], 1024)),
        *(dataclasses.replace(QWEN3_5, num_experts=experts) for experts in (128, 384, 512, 640)),
        *(dataclasses.replace(QWEN3_5, num_experts=64, hidden_size=hidden) for hidden in (3584, 4104)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [0, 1, 5, 8, 9, 16, 32, 64, 2048])
def test_routers_of_models(spec: RouterSpec, tokens: int) -> None:
    for dtype in ("f16", "bf16"):
        inputs = router_inputs(spec, tokens, dtype, biases=spec is not QWEN3)
        if tokens:
            check_router(spec, inputs)
            check_router(spec, inputs, H20)
        else:
            assert [t.shape for t in cuda.run_node(spec, *inputs)] == [(0, spec.routing.slots)] * 2


@gpu
@pytest.mark.parametrize("tokens", [3, 50])
@pytest.mark.parametrize("hidden", [64, 61])
def test_router_ties_and_logits_that_are_not_numbers(hidden: int, tokens: int) -> None:
    """Small integers: exact sums, so that equal scores are."""
    for routing in ROUTERS.values():
        spec, rng = router_spec(routing, hidden), np.random.default_rng(1)
        x, weight = rng.integers(-1, 2, (tokens, hidden)), rng.integers(0, 2, (routing.logits, hidden)) * 0.25
        none = torch.zeros(0).cuda()
        ids, weights = cuda.run_node(spec, tensor(x, "f16"), tensor(weight, "f16"), none, none)
        want, _ = reference.router(spec, x, weight, np.zeros(0), np.zeros(0))
        if spec.method not in ("softmax_topk", "sigmoid_topk"):  # which may tie what differs
            np.testing.assert_array_equal(ids.cpu().numpy(), want)
        for bad in (np.nan, np.inf):
            wrong = x.astype(np.float64)
            wrong[1] = bad
            weight[-1] = -1.0, *[1.0] * (hidden - 1)  # infinities less infinities
            ids, weights = cuda.run_node(spec, tensor(wrong, "f16"), tensor(weight, "f16"), none, none)
            assert torch.equal(ids[1, : spec.top_k].cpu(), torch.arange(spec.top_k, dtype=torch.int32))
            assert weights[1, : spec.top_k].isnan().all()
            assert weights[[0, 2]].isfinite().all()
            assert ((ids >= 0) & (ids < spec.num_experts + spec.shared_experts)).all()


@gpu
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("rows", [1, 3, 700])
@pytest.mark.parametrize("columns", [1, 7, 8, 61, 264, 2048, 2880, 7168, 8192, 12_288, 16_385])
def test_norm(columns: int, rows: int, dtype: str) -> None:
    """The sum exactly; y is rounded once, and before that by the few roundings of 2^-24 of an f32 norm."""
    spec, rng = NormSpec(norm_epsilon=1e-5), np.random.default_rng(rows)
    x, residual = (tensor(rng.normal(0, 1, (rows, columns)), dtype) for _ in range(2))
    weight = tensor(rng.uniform(0.5, 2, columns), dtype)
    y, total = twice(lambda: cuda.run_node(spec, x, residual, weight))
    assert torch.equal(total, x + residual)
    want, _ = reference.add_norm(spec, numbers(total), np.zeros((rows, columns)), numbers(weight))
    np.testing.assert_allclose(numbers(y), want, rtol=UNIT[dtype] + 2.0**-20, atol=2.0**-25)


@gpu
def test_norm_of_extremes() -> None:
    spec = NormSpec(norm_epsilon=1e-6)
    x = torch.zeros((4, 64), dtype=torch.float16).cuda()
    x[1] = 60000.0
    x[2, 5] = float("nan")
    weight = torch.ones(64, dtype=torch.float16).cuda()
    y, total = cuda.run_node(spec, x, x.clone(), weight)
    assert not y[0].any()
    assert total[1].isinf().all()
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    assert not y[3].any()


def masks() -> list[tuple[np.ndarray, int, int]]:
    rng, found = np.random.default_rng(2), []
    sizes = [(1, 1, 4096, 4096), (3, 1, 8, 8), (2, 5, 0, 5), (4, 7, 9, 16), (5, 1, 30, 31), (2, 3, 8, 3), (0, 1, 4, 4)]
    sizes += [
        (1, 2048, 0, 2048),
        (1, 1500, 4096, 4096),
        (33, 1, 2560, 2560),
        (2, 40, 64, 64),
        (2, 4, 8, 2),
        (1, 1, 1, 0),
    ]
    for batch, new, past, length in sizes:
        for density in (1.0, 0.7, 0.0):
            mask = (rng.random((batch, length)) < density).astype(np.int64)
            mask[:, length - length // 3 :] *= past < length
            found.append((mask, new, past))
    sparse = np.zeros((2, 4096), np.int64)
    sparse[1, 1030] = 7
    return [*found, (sparse, 1, 4096), (sparse, 1100, 4096), (-sparse, 2000, 5000)]


@gpu
def test_rows() -> None:
    for mask, new, past in masks():
        for most in (None, 1, 5, 2**40):
            rows, last = cuda.token_rows(RowsSpec(), torch.from_numpy(mask).cuda(), new, past, most)
            want = reference.token_rows(mask, new, past, most or 1)
            np.testing.assert_array_equal(rows.cpu().numpy(), want[0], err_msg=f"{mask.shape}, {new}, {past}, {most}")
            np.testing.assert_array_equal(last.cpu().numpy(), want[1])
