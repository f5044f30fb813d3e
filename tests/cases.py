"""Random layers shared by the kernel, layout and engine tests: one seeded generator, every registered scheme."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from quantmoe.custom_ops import native
from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import MoESpec


@dataclass(frozen=True)
class Case:
    """One layer: sizes, scheme and semantics. Fields as in MoESpec; act_order "none", "shared" or "split"."""

    hidden: int = 64
    intermediate: int = 96
    experts: int = 4
    top_k: int = 2
    kind: str = "int4"
    group_size: int = 32
    scale_type: str = "bf16"
    activation_format: str = "int8_token_asym"
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    act_order: str = "none"
    on_input: bool = False
    offset: int = 0
    total_experts: int = 0
    seed: int = 0

    def matrix(self, rng: np.random.Generator, n: int, k: int, perm: np.ndarray | None = None) -> QuantizedMatrix:
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        top = 16 if self.kind == "int4" else 256
        scales = rng.uniform(0.5, 1.5, (n, groups)) / (top * np.sqrt(k) / 4)
        return QuantizedMatrix(
            kind=self.kind,
            codes=rng.integers(0, top, (n, k), dtype=np.uint8),
            scales=scales.astype(SCALE_DTYPES[self.scale_type]),
            group_size=self.group_size,
            bias=rng.normal(0, 0.3, n).astype(np.float32) if self.bias else None,
            perm=perm,
        )

    def expert(self, rng: np.random.Generator) -> Expert:
        def perm(k: int) -> np.ndarray:
            return rng.permutation(k).astype(np.int32)

        h, i = self.hidden, self.intermediate
        gate_perm = None if self.act_order == "none" else perm(h)
        up_perm = perm(h) if self.act_order == "split" else gate_perm
        down_perm = None if self.act_order == "none" else perm(i)
        return Expert(
            self.matrix(rng, i, h, gate_perm) if self.gated else None,
            self.matrix(rng, i, h, up_perm),
            self.matrix(rng, h, i, down_perm),
        )

    def build(self) -> Layer:
        rng = np.random.default_rng(self.seed)
        experts = [self.expert(rng) for _ in range(self.experts)]
        layout = LAYOUTS["cpu_panel"]
        w13, w2 = reduce(join, (layout.describe(e, self.activation_format) for e in experts))
        spec = MoESpec(
            num_experts=self.total_experts or self.experts,
            expert_offset=self.offset,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            w13=w13,
            w2=w2,
            activation=self.activation,
            gated=int(self.gated),
            swiglu_alpha=1.702,
            swiglu_limit=7.0 if self.activation == "swiglu_oai" else 1.5,
            apply_router_weight_on_input=int(self.on_input),
        )
        rows = [
            native.aligned(self.experts * layout.row_bytes(spec, p)).reshape(self.experts, -1) for p in ("w13", "w2")
        ]
        for i, expert in enumerate(experts):
            layout.pack(expert, spec, rows[0][i], rows[1][i])
        return Layer(self, spec, experts, *rows)

    def tokens(self, t: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """hidden f32 [t, H], topk_ids int64 [t, k] (distinct if there are enough experts), topk_weights f32 [t, k]."""
        rng = np.random.default_rng(seed)
        total = self.total_experts or self.experts
        ids = np.argsort(rng.random((t, max(total, self.top_k))), axis=1)[:, : self.top_k] % total
        return (
            rng.normal(0, 1, (t, self.hidden)).astype(np.float32),
            ids.astype(np.int64),
            rng.uniform(0, 1, (t, self.top_k)).astype(np.float32),
        )


@dataclass(frozen=True, eq=False)
class Layer:
    case: Case
    spec: MoESpec
    experts: list[Expert]
    w13: np.ndarray
    w2: np.ndarray

    def native(self) -> native.NativeMoE:
        return native.NativeMoE(self.spec, self.w13, self.w2)


#: every axis of the op once, then sizes that are not multiples of anything
CASES = [
    Case(),
    Case(activation_format="int8_token"),
    Case(activation_format="none"),
    *(
        Case(kind=k, group_size=g, scale_type=s)
        for k in ("int4", "int8")
        for g in (-1, 32, 64)
        for s in ("f32", "f16", "bf16")
    ),
    *(Case(kind=k, group_size=g, activation_format="none") for k in ("int4", "int8") for g in (-1, 64)),
    *(Case(kind=k, group_size=g, activation_format="int8_token") for k in ("int4", "int8") for g in (-1, 64)),
    *(Case(activation=a) for a in ("gelu", "gelu_tanh", "relu2", "swiglu_oai", "swiglu_step")),
    *(Case(activation=a, gated=False) for a in ("silu", "gelu", "relu2")),
    Case(bias=True),
    Case(bias=True, kind="int8", group_size=-1),
    Case(bias=True, activation="swiglu_oai", activation_format="none"),
    *(
        Case(act_order=a, activation_format=f, kind=k)
        for a in ("shared", "split")
        for f in ("none", "int8_token_asym")
        for k in ("int4", "int8")
    ),
    Case(act_order="shared", gated=False),
    Case(on_input=True, top_k=1),
    Case(on_input=True),
    Case(offset=2, total_experts=8, top_k=4),
    Case(hidden=40, intermediate=27, group_size=-1),
    Case(hidden=33, intermediate=7, group_size=-1, kind="int8"),
    Case(hidden=100, intermediate=70),
    Case(hidden=100, intermediate=70, kind="int8", bias=True),
    Case(hidden=31, intermediate=1, experts=1, top_k=1, group_size=64),
    Case(hidden=288, intermediate=200, group_size=96, act_order="split", bias=True),
    Case(hidden=256, intermediate=128, group_size=128, experts=16, top_k=8),
    Case(hidden=256, intermediate=384, group_size=128, experts=3, top_k=8, kind="int8"),
]
