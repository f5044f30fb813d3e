"""Each pass over transformers' modules, before the trace, on a module of a few lines: what it recognises it must refuse
as soon as one rule of it is another. Modules of transformers itself are in test_routers.py, test_shared_experts.py,
test_lowered_attention.py and test_hybrid.py."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.operators.specs import moe_spec, projection, routing_spec
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import linear, normalize, silu, softplus
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from quantmoe.custom_ops.op import GatherSpec, ReduceSpec
from quantmoe.exporter.choosing.described_model import Shared
from quantmoe.exporter.graph.modules import indexer, latent, routers, shared_experts
from quantmoe.exporter.graph.modules.attention import GROUPED, Called, Unlike, recognise
from quantmoe.exporter.graph.modules.attention_inputs import Rows, attach
from quantmoe.exporter.graph.modules.states import linear_attention
from quantmoe.exporter.graph.passes.rank_collectives import meet, meet_before
from quantmoe.exporter.graph.standard_attention import NAME
from quantmoe.exporter.targets import CPU, CUDA

RNG = torch.Generator().manual_seed(0)


def layer(inputs: int, outputs: int) -> torch.nn.Linear:
    made = torch.nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
    made.weight.copy_(torch.randn(outputs, inputs, generator=RNG))
    return made


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=RNG), requires_grad=False)


class Norm(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = parameter(size), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class TinyRouter(torch.nn.Module):
    """Softmax of the two greatest of four logits."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.weight, self.change = parameter(4, 8), change

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(2 * x if self.change == "twice the product" else x, self.weight)
        chosen, ids = logits.topk(2)
        if self.change == "the least":
            chosen, ids = (-logits).topk(2)
        weights = chosen.softmax(-1)
        return logits, weights.square() if self.change == "squared weights" else weights, ids


def test_a_router() -> None:
    model = torch.nn.ModuleDict({"gate": TinyRouter()})
    x = torch.randn(5, 8, generator=RNG)
    logits, weights, ids = model["gate"](x)
    assert routers.replace_routers(model) == {"gate": routing_spec(4, 2, "topk_softmax")}
    found = model["gate"](x)
    assert found[2].dtype == torch.int32  # the operator's
    assert torch.equal(found[0], logits)
    order, own = ids.argsort(1), found[2].argsort(1)
    assert torch.equal(ids.gather(1, order), found[2].gather(1, own).long())
    torch.testing.assert_close(found[1].gather(1, own), weights.gather(1, order), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", ["the least", "squared weights"])
def test_another_router_stays(change: str) -> None:
    model = torch.nn.ModuleDict({"gate": TinyRouter(change)})
    assert routers.replace_routers(model) == {}
    assert "forward" not in vars(model["gate"])


@pytest.mark.parametrize(("change", "product"), [("", True), ("twice the product", False)])
def test_for_cuda_a_router_has_its_product(change: str, product: bool) -> None:
    """Logits that are something else than a product stay outside; the node begins after them."""
    model = torch.nn.ModuleDict({"gate": TinyRouter(change)})
    assert list(routers.replace_routers(model, CUDA)) == ["gate"]
    assert ("hidden_size" in model["gate"].routing) == product


class TinyMixture(torch.nn.Module):
    """Two of four experts, and one that every token has, with a gate."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.gate, self.experts, self.change = TinyRouter(), torch.nn.Identity(), change
        self.shared_expert, self.shared_expert_gate = TinyMLP(change), layer(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 8)
        _, weights, ids = self.gate(rows)
        factor = self.shared_expert_gate(rows)
        factor = factor if self.change == "no sigmoid" else factor.sigmoid()
        own = rows + 1 if self.change == "another input" else rows
        return (self.experts(own, ids, weights) + factor * self.shared_expert(rows)).reshape(x.shape)


class TinyMLP(torch.nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.change = layer(8, 32), layer(8, 32), layer(32, 8), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        act = torch.nn.functional.gelu if self.change == "another activation" else silu
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


W = projection("int4", 16, "f16", "none")
EXPERTS = moe_spec(4, 8, 16, W, W)


def test_a_shared_expert() -> None:
    model = torch.nn.ModuleDict({"mlp": TinyMixture()})
    assert shared_experts.recognise(model, {"mlp.experts": EXPERTS}) == {
        "mlp.experts": Shared(
            mixture="mlp",
            router="mlp.gate",
            projections=tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
            gate="mlp.shared_expert_gate",
            count=2,
            flat=False,
            logits=False,
        )
    }


@pytest.mark.parametrize("change", ["no sigmoid", "another input", "another activation"])
def test_another_shared_expert_stays(change: str) -> None:
    assert shared_experts.recognise(torch.nn.ModuleDict({"mlp": TinyMixture(change)}), {"mlp.experts": EXPERTS}) == {}


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


class TinyAttention(torch.nn.Module):
    """Two heads of eight features, whose keys and values are the same."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layer(8, 16), layer(8, 8), layer(8, 8), layer(16, 8)
        self.layer_idx, self.change = 0, change

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any = None) -> Any:
        batch, new = hidden_states.shape[:2]
        q, k, v = (p(hidden_states).view(batch, new, -1, 8).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        q, k = (
            turned(q, *position_embeddings),
            k if self.change == "keys do not turn" else turned(k, *position_embeddings),
        )
        v = v.tanh() if self.change == "values are bent" else v
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        out, _ = AttentionInterface()[NAME](self, q, k, v, attention_mask, scaling=0.25)
        out = 2 * out if self.change == "twice the output" else out
        return self.o_proj(out.reshape(batch, new, -1)), None


class TinyRotaryEmbedding(torch.nn.Module):
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None] * torch.tensor([1.0, 0.5, 0.25, 0.125]).repeat(2)
        return angles.cos(), angles.sin()


class TinyDecoder(torch.nn.Module):
    def __init__(self, change: str = "", window: int = 0) -> None:
        super().__init__()
        self.self_attn, self.rotary, self.window = TinyAttention(change), TinyRotaryEmbedding(), window

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> torch.Tensor:
        x = torch.zeros(*input_ids.shape, 8)
        sees = sliding_window_causal_mask_function(self.window) if self.window else causal_mask_function
        mask = AttentionMaskInterface()[NAME](1, 1, 1, mask_function=sees)
        return self.self_attn(x, self.rotary(x, torch.zeros_like(input_ids)), mask)[0]


@pytest.mark.parametrize("window", [0, 6])
def test_attention(window: int) -> None:
    model = TinyDecoder(window=window)
    found, left = recognise(model, model, lambda spec: "", kinds=[GROUPED], indexer=indexer.compare)
    assert left == {}
    spec = found["self_attn"].spec
    assert (spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size) == (2, 1, 8, 8)
    assert (spec.scale, spec.sliding_window, spec.rotary_size, spec.rotary_interleaved) == (0.25, window, 8, 0)
    assert found["self_attn"].table == "halves"


@pytest.mark.parametrize("change", ["keys do not turn", "values are bent", "twice the output"])
def test_other_attention_stays(change: str) -> None:
    model = TinyDecoder(change)
    found, left = recognise(model, model, lambda spec: "", kinds=[GROUPED], indexer=indexer.compare)
    assert (found, left) == ({}, {"self_attn": "it computes something else than CachedAttention"})


def test_attention_that_kernels_refuse_stays() -> None:
    model = TinyDecoder()
    found, left = recognise(model, model, lambda spec: "too wide", kinds=[GROUPED], indexer=indexer.compare)
    assert (found, left) == ({}, {"self_attn": "too wide"})


def test_recognised_attention_is_one_node() -> None:
    """As the module before it: two rows, the second with padding first."""
    model, x = TinyDecoder(), torch.randn(2, 3, 8, generator=RNG)
    tables = model.rotary(x, torch.arange(3).repeat(2, 1))
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    unseen = torch.ones(3, 3).triu(1).bool() | (mask[:, None, None] == 0)
    want, _ = model.self_attn(x, tables, torch.zeros(2, 1, 3, 3).masked_fill(unseen, torch.finfo(torch.float32).min))
    found, _ = recognise(model, model, lambda spec: "", kinds=[GROUPED], indexer=indexer.compare)
    rows = Rows(model, CPU)
    rows.mask, rows.rows = mask, torch.tensor([[0, 3, 0], [1, 2, 0]], dtype=torch.int32)
    attach(model, found, rows, ())
    kept: list[torch.Tensor] = []
    cache = SimpleNamespace(layers=[], update=lambda k, v, i: kept.extend((k, v)))
    made, nothing = model.self_attn(x, tables, None, cache)
    assert nothing is None
    assert [list(t.shape) for t in kept] == [[2, 1, 3, 8]] * 2
    for row, begin in ((0, 0), (1, 1)):
        torch.testing.assert_close(made[row, begin:], want[row, begin:], rtol=1e-4, atol=1e-4)


class TinyLatent(torch.nn.Module):
    """Two heads of four features and two that turn, of a latent of six."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank, self.v_head_dim = 4, 2, 6, 3
        self.q_lora_rank, self.layer_idx, self.change = None, 0, change
        self.config = SimpleNamespace()
        self.q_proj, self.kv_a_proj_with_mqa, self.o_proj = layer(8, 12), layer(8, 8), layer(6, 8)
        self.kv_a_layernorm, self.kv_b_proj = Norm(6), layer(6, 14)

    def expand_kv(self, whole: torch.Tensor, turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.kv_b_proj(whole).unflatten(-1, (2, 7)).squeeze(1).transpose(1, 2).split((4, 3), -1)
        return torch.cat((keys, turned.expand(-1, 2, -1, -1)), -1), values

    def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any = None) -> Any:
        batch, new = hidden_states.shape[:2]
        q, turning = self.q_proj(hidden_states).view(batch, new, 2, 6).transpose(1, 2).split((4, 2), -1)
        kept, key = self.kv_a_proj_with_mqa(hidden_states)[:, None].split((6, 2), -1)
        kept = kept if self.change == "no norm of the latent" else self.kv_a_layernorm(kept)
        q = torch.cat((q, turned(turning, *position_embeddings)), -1)
        key = key if self.change == "keys do not turn" else turned(key, *position_embeddings)
        kept, key = cache.update(kept, key, self.layer_idx)
        keys, values = self.expand_kv(kept, key)
        out, _ = AttentionInterface()[NAME](self, q, keys, values, attention_mask, scaling=0.5)
        return self.o_proj(out.reshape(batch, new, -1)), None


#: a rotary table of two features, of which only the width is read
CALLED = Called({"position_embeddings": (torch.zeros(1, 1, 2),) * 2}, window=0, table="halves")


def test_a_latent() -> None:
    module = TinyLatent()
    assert latent.is_latent(module)
    spec = latent.KIND.compare(module, CALLED).spec
    assert (spec.num_heads, spec.kv_num_heads, spec.head_size, spec.v_head_size, spec.key_split) == (2, 1, 8, 6, 4)
    assert (spec.scale, spec.rotary_size, spec.rotary_interleaved) == (
        0.5,
        2,
        1,
    )  # of one pair either order is the same


@pytest.mark.parametrize("change", ["no norm of the latent", "keys do not turn"])
def test_another_latent_stays(change: str) -> None:
    with pytest.raises(Unlike, match="it computes something else than CachedAttention of a latent"):
        latent.KIND.compare(TinyLatent(change), CALLED)


def test_a_linear_with_a_bias_expands_no_latent() -> None:
    module = TinyLatent()
    module.kv_b_proj = torch.nn.Linear(6, 14)
    assert not latent.is_latent(module)


def test_a_latent_is_absorbed() -> None:
    """The halves of kv_b_proj, one a head, give the scores and the outputs of the keys and values that it makes."""
    model = torch.nn.ModuleDict({"self_attn": TinyLatent()})
    module, weight = model["self_attn"], model["self_attn"].kv_b_proj.weight.numpy().copy()
    whole, q, part = (torch.randn(shape, generator=RNG) for shape in ((1, 1, 5, 6), (1, 3, 2, 4), (1, 3, 2, 5)))
    keys, values = module.expand_kv(whole, torch.zeros(1, 1, 5, 2))
    functions: dict[str, Any] = {}
    name = "self_attn.kv_b_proj.weight"
    latent.absorb(SimpleNamespace(model=model, sources={name: name}, tied={name: name},
                                  derive=lambda names, f: functions.update(dict.fromkeys(names, f))))  # fmt: skip
    assert not hasattr(module, "kv_b_proj")
    for leaf in ("k_up", "v_up"):
        found = torch.from_numpy(np.ascontiguousarray(functions[f"self_attn.absorbed.{leaf}"](weight)))
        assert found.shape == getattr(module.absorbed, leaf).shape
        setattr(module.absorbed, leaf, torch.nn.Parameter(found, requires_grad=False))
    scores = torch.einsum("bshr,btr->bhst", module.absorbed.queries(q), whole[:, 0])
    torch.testing.assert_close(scores, torch.einsum("bshn,bhtn->bhst", q, keys[..., :4]), rtol=1e-4, atol=1e-5)
    outputs = module.absorbed.outputs(torch.einsum("bsht,btr->bshr", part, whole[:, 0]))
    torch.testing.assert_close(outputs, torch.einsum("bsht,bhtv->bshv", part, values), rtol=1e-4, atol=1e-5)
    assert [t.shape[1] for t in module.expand_kv(whole, torch.zeros(1, 1, 5, 2))] == [1, 1]


def convolved(module: Any, x: torch.Tensor, cache: Cache) -> torch.Tensor:
    """x [B, C, S]."""
    conv, state = module.conv1d if hasattr(module, "conv1d") else module.conv, cache.layers[0]
    before = state.conv_states[0] if state.conv_states[0] is not None else x.new_zeros(*x.shape[:2], 4)
    seen = torch.cat((before, x), -1)
    state.conv_states[0] = seen[..., -4:]
    return torch.nn.functional.conv1d(seen[..., 1:], conv.weight, groups=x.shape[1])


class TinyShortConv(torch.nn.Module):
    """A convolution of four tokens between two gates."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.in_proj, self.out_proj, self.change = layer(8, 24), layer(8, 8), change
        self.conv = torch.nn.Conv1d(8, 8, 4, groups=8, bias=False).requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor, cache: Any, attention_mask: None) -> torch.Tensor:
        before, after, x = self.in_proj(hidden_states).transpose(1, 2).chunk(3, 1)
        before = before.sigmoid() if self.change == "a sigmoid of the first gate" else before
        y = convolved(self, before * x, cache)
        y = y.relu() if self.change == "an activation" else y
        return self.out_proj((after * y).transpose(1, 2))


class TinyDelta(torch.nn.Module):
    """The gated delta rule: one key head and two value heads of four features."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.change = 1, 2, 4, 4, change
        self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a = (layer(8, n) for n in (16, 8, 2, 2))
        self.conv1d = torch.nn.Conv1d(16, 16, 4, groups=16, bias=False).requires_grad_(False)
        self.A_log, self.dt_bias, self.norm, self.out_proj = parameter(2), parameter(2), Norm(4), layer(8, 8)

    def forward(self, hidden_states: torch.Tensor, cache: Any, attention_mask: None) -> torch.Tensor:
        batch, new = hidden_states.shape[:2]
        x = silu(convolved(self, self.in_proj_qkv(hidden_states).transpose(1, 2), cache)).transpose(1, 2)
        q, k, v = x.split((4, 4, 8), -1)
        q, k = normalize(q, dim=-1)[:, :, None] / 2, normalize(k, dim=-1)[:, :, None]
        v, z = v.view(batch, new, 2, 4), self.in_proj_z(hidden_states).view(batch, new, 2, 4)
        beta = self.in_proj_b(hidden_states).sigmoid()[..., None]
        beta = 1.5 * beta if self.change == "another factor of beta" else beta
        decay = (-self.A_log.exp() * softplus(self.in_proj_a(hidden_states) + self.dt_bias)).exp()
        decay = decay.square() if self.change == "twice the decay" else decay
        kept = cache.layers[0]
        state = kept.recurrent_states[0]
        state = x.new_zeros(batch, 2, 4, 4) if state is None else state
        out = []
        for t in range(new):
            state = state * decay[:, t, :, None, None]
            more = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t].expand(-1, 2, -1), state)) * beta[:, t]
            state = state + k[:, t].expand(-1, 2, -1)[..., None] * more[:, :, None]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t].expand(-1, 2, -1), state))
        kept.recurrent_states[0] = state
        gate = z.tanh() if self.change == "another gate" else silu(z)
        return self.out_proj((self.norm(torch.stack(out, 1)) * gate).flatten(-2))


def stateful(module: torch.nn.Module) -> tuple[Any, dict[str, str]]:
    model: Any = torch.nn.ModuleDict({"mixer": module})
    model.config = None  # has no caches
    return linear_attention.recognise(model, torch.nn.ModuleList(), lambda spec: "")


def test_a_short_convolution() -> None:
    found, left = stateful(TinyShortConv())
    assert left == {}
    assert found["mixer"].delta is None
    assert (found["mixer"].conv.channels, found["mixer"].conv.width, found["mixer"].conv.activation) == (8, 4, "none")


def test_a_gated_delta() -> None:
    found, left = stateful(TinyDelta())
    assert left == {}
    conv, delta = found["mixer"].specs()
    assert (conv.channels, conv.width, conv.activation) == (16, 4, "silu")
    assert (delta.num_k_heads, delta.num_v_heads, delta.k_head_size, delta.v_head_size) == (1, 2, 4, 4)
    assert (delta.scale, delta.beta_scale, delta.gate, delta.decay_per_key) == (0.5, 1.0, "silu", 0)


@pytest.mark.parametrize(
    ("module", "change"),
    [
        (TinyShortConv, "a sigmoid of the first gate"),
        (TinyShortConv, "an activation"),
        (TinyDelta, "another factor of beta"),
        (TinyDelta, "twice the decay"),
        (TinyDelta, "another gate"),
    ],
)
def test_other_states_are_named(module: Any, change: str) -> None:
    found, left = stateful(module(change))
    assert found == {}
    assert left["mixer"].startswith(f"{module.__name__}: it computes something else than ")


@pytest.mark.parametrize(("spec", "operator"), [(ReduceSpec, "all_reduce"), (GatherSpec, "all_gather")])
def test_outputs_meet_once(spec, operator):
    """Those of the named modules and no others, with the rank's attributes."""
    model = torch.nn.Sequential(layer(8, 8), layer(8, 8), layer(16 if spec is GatherSpec else 8, 8))
    meet(model, ["1"], spec(rank=1, world=2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(model)(torch.empty(3, 8)).graph
    found = [node for node in graph.nodes if operator in str(node.target)]
    assert [node.args[0].target for node in found] == [torch.ops.aten.mm.default]
    assert json.loads(found[0].args[1]) == spec(rank=1, world=2).attributes()


def test_inputs_meet_once():
    """Those of the named modules and no others."""
    model = torch.nn.Sequential(layer(8, 8), layer(16, 8))
    meet_before(model, ["1"], GatherSpec(rank=1, world=2))
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(model)(torch.empty(3, 8)).graph
    (found,) = [node for node in graph.nodes if "all_gather" in str(node.target)]
    assert [node.target for node in (found.args[0], *found.users)] == [torch.ops.aten.mm.default] * 2
    assert json.loads(found.args[1]) == GatherSpec(rank=1, world=2).attributes()
