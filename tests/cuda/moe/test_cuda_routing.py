"""MoERouting on CUDA against reference.py; skipped where no GPU is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cuda import cuda_kernels as cuda
from support.cuda.built import TORCH, gpu
from support.operators.cases import ROUTERS, assert_routed

from quantmoe.custom_ops import reference


@gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens", [0, 1, 37, 1000])
@pytest.mark.parametrize("name", ROUTERS)
def test_routing(name, tokens, dtype):
    spec = ROUTERS[name]
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 2, (tokens, spec.logits)).astype(np.float32))
    logits = logits.to(TORCH.get(dtype, torch.float32))
    for bias in (np.zeros(spec.num_experts, np.float32), rng.uniform(0, 1, spec.num_experts).astype(np.float32)):
        ids, weights = (t.cpu().numpy() for t in cuda.run_node(spec, logits.cuda(), torch.from_numpy(bias).cuda()))
        assert ids.shape == weights.shape == (tokens, spec.slots)
        if not tokens:
            continue
        assert_routed((ids, weights), reference.route(spec, logits.float().numpy(), bias), 4e-6, 1e-6)


@gpu
def test_routing_ties_and_logits_that_are_not_numbers():
    for spec in ROUTERS.values():
        bias = torch.zeros(spec.num_experts).cuda()
        logits = torch.zeros((3, spec.logits))
        logits[1, spec.num_experts - 1] = float("nan")
        ids, weights = cuda.run_node(spec, logits.cuda(), bias)
        shared = range(spec.num_experts, spec.num_experts + spec.shared_experts)
        assert torch.equal(ids.cpu(), torch.tensor([*range(spec.top_k), *shared], dtype=torch.int32).expand(3, -1))
        assert weights[1, : spec.top_k].isnan().all()
        assert (weights[:, spec.top_k :] == (0.5 if spec.shared_gate else 1)).all()
        assert weights[[0, 2]].isfinite().all()
        levels = np.random.default_rng(0).integers(0, 3, (50, spec.logits)).astype(np.float32)
        ids, _ = cuda.run_node(spec, torch.from_numpy(levels).cuda(), bias)
        np.testing.assert_array_equal(ids.cpu().numpy(), reference.route(spec, levels)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 129}, "top_k is 129, the CUDA kernel takes 1 to 128"),
        ({"n_group": 7}, "n_group is 7, expected a divisor of num_experts 256"),
        ({"topk_group": 9}, "topk_group is 9"),
        ({"num_experts": 2304}, "num_experts is 2304, the CUDA kernel takes 1 to 2048"),
        ({"renormalize": 2}, "renormalize is 2"),
        ({"op_version": 99}, "op_version is 99"),
    ],
)
def test_routing_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        cuda.plan_node(replace(ROUTERS["groups"], **change), "f32", 1, tokens=1)
