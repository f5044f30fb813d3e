"""Which modules of transformers become HyperConnection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from export.architectures.test_architectures import difference
from transformers import DeepseekV4Config, HYV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from quantmoe.custom_ops.op_def.nodes import HyperConnection
from quantmoe.exporter.graph.modules import hyper_connections
from quantmoe.exporter.targets import CPU, CUDA


def model(**config: Any) -> torch.nn.ModuleDict:
    own = DeepseekV4Config(hidden_size=32, hc_mult=4, **config)
    return torch.nn.ModuleDict({name: v4.DeepseekV4HyperConnection(own) for name in ("attn_hc", "ffn_hc")})


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda target: target.name)
def test_a_connection_is_a_node(target: Any) -> None:
    own = model(hc_sinkhorn_iters=7, hc_eps=1e-3)
    parameters = {name: parameter.data.clone().normal_() for name, parameter in own.named_parameters()}
    own.load_state_dict(parameters)
    streams = torch.randn(2, 3, 4, 32)
    want = own["ffn_hc"](streams)
    spec = HyperConnection(num_streams=4, hidden_size=32, iterations=7, epsilon=1e-3)
    assert hyper_connections.replace(own, target.refusal) == {"attn_hc": spec, "ffn_hc": spec}
    assert all(torch.equal(own.get_parameter(name), value) for name, value in parameters.items())
    for found, expected in zip(own["ffn_hc"](streams), want, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda post, comb, x: (1.01 * post, comb, x),
        lambda post, comb, x: (post, comb.transpose(-1, -2), x),
        lambda post, comb, x: (post, comb / comb.sum(-1, keepdim=True), x),
        lambda post, comb, x: (post, comb, x + 0.01),
        lambda post, comb, x: (post, comb),
    ],
)
def test_another_computation_stays(change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    forward = v4.DeepseekV4HyperConnection.forward
    monkeypatch.setattr(v4.DeepseekV4HyperConnection, "forward", lambda self, x: change(*forward(self, x)))
    assert hyper_connections.replace(model(hc_sinkhorn_iters=2), CPU.refusal) == {}


def test_what_a_target_refuses_and_other_connections_stay() -> None:
    assert hyper_connections.replace(model(), lambda spec: f"no {spec.OP}") == {}
    other = torch.nn.ModuleDict({"attn_hc": HYV4HyperConnection(HYV4Config(hidden_size=32))})
    assert hyper_connections.replace(other, CPU.refusal) == {}


def test_a_model_whose_connections_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = v4.DeepseekV4HyperConnection.forward

    def doubled(self: Any, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        post, comb, collapsed = forward(self, streams)
        return 2 * post, comb, collapsed

    monkeypatch.setattr(v4.DeepseekV4HyperConnection, "forward", doubled)
    assert difference("deepseek_v4", "none", tmp_path, hc_sinkhorn_iters=3) < 2e-5
    graph = onnx.load(tmp_path / "onnx" / "model.onnx", load_external_data=False).graph
    assert Counter(node.op_type for node in graph.node)["HyperConnection"] == 0
