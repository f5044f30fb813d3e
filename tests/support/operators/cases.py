"""Random layers shared by the kernel, layout and engine tests: one seeded generator, every registered scheme."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
from support.operators import native_kernels as native
from support.operators.specs import moe_spec, routing_spec

from quantmoe.custom_ops.expert import Expert
from quantmoe.custom_ops.layouts import LAYOUTS, join
from quantmoe.custom_ops.matrix import SCALE_DTYPES, QuantizedMatrix
from quantmoe.custom_ops.op import MoESpec
from quantmoe.custom_ops.schemes import SCHEMES


@dataclass(frozen=True)
class Case:
    """One layer: sizes, scheme and semantics. Fields as in MoESpec; act_order "none", "shared" or "split"."""

    hidden: int = 64
    intermediate: int = 96
    experts: int = 4
    top_k: int = 2
    weights: tuple[str, str, bool] = ("int4", "bf16", False)
    """kind, scale type, zero points"""
    group_size: int = 32
    block_n: int = 1
    pre_scale: bool = False
    static: bool = True
    activation_format: str = "int8_token_asym"
    down_format: str = ""
    """w2's, where it is another (tests/cuda)"""
    down_weights: tuple[tuple[str, str, bool], int, int] | None = None
    """weights, group_size and block_n of w2, where they are others (tests/cuda)"""
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    act_order: str = "none"
    on_input: bool = False
    hadamard: int = 0
    """of w2"""
    offset: int = 0
    total_experts: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Combinations that do not exist become ones that do."""
        if self.weights[0] in FLOATS and self.activation_format.startswith("int8"):
            object.__setattr__(self, "activation_format", "none")
        if self.weights[0] in ("bf16", "f16"):
            object.__setattr__(self, "group_size", -1)
        kind, scale_type, _ = self.weights
        if kind in ("int2", "int3", "int5", "int6") and self.group_size == 16:
            object.__setattr__(self, "group_size", 32)
        if kind in SCHEMES_OF_BLOCKS and (scale_type not in WIDE_BLOCKS or self.group_size not in (32, 64, 128, 256)):
            object.__setattr__(self, "group_size", SCHEMES[kind].group_size)

    @property
    def stored_scale(self) -> bool:
        formats = (self.activation_format, self.down_format)
        return "nvfp4" in formats or ("fp8_tensor" in formats and self.static)

    def matrix(self, rng: np.random.Generator, n: int, k: int, perm: np.ndarray | None = None) -> QuantizedMatrix:
        kind, scale_type, zero_points = self.weights
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        shape = (-(-n // self.block_n), groups)
        if kind in ("bf16", "f16"):
            values = rng.normal(0, k**-0.5, (n, k)).astype(SCALE_DTYPES[kind])
            scales = np.ones((n, 1), np.float32)
            return QuantizedMatrix(
                kind=kind, codes=values.view(np.uint16), scales=scales, group_size=-1, **self.extras(rng, n, k, perm)
            )
        top = 2 ** SCHEMES[kind].bits
        codes = rng.integers(0, top, (n, k), dtype=np.uint8)
        if kind == "fp8_e4m3":
            codes[codes & 0x7F == 0x7F] -= 1  # NaN
        if SCALE_DTYPES[scale_type].names:
            scales = two_levels(rng, kind, scale_type, n, groups)
            return QuantizedMatrix(
                kind=kind, codes=codes, scales=scales, group_size=self.group_size, **self.extras(rng, n, k, perm)
            )
        spread = np.nanstd(SCHEMES[kind].table) * np.sqrt(k)  # products keep unit variance
        global_scale = float(np.float32(rng.uniform(0.5, 1.5) / spread)) if kind == "nvfp4" else None
        scales = rng.uniform(0.5, 1.5, shape) / (1 if global_scale else spread)
        return QuantizedMatrix(
            kind=kind,
            codes=codes,
            scales=scales.astype(SCALE_DTYPES[scale_type]),
            group_size=self.group_size,
            block_n=self.block_n,
            zero_points=rng.integers(0, top, shape, dtype=np.uint8) if zero_points else None,
            global_scale=global_scale,
            **self.extras(rng, n, k, perm),
        )

    def extras(self, rng: np.random.Generator, n: int, k: int, perm: np.ndarray | None) -> dict[str, Any]:
        """What a matrix of any kind may have."""
        return {
            "input_scale": float(np.float32(rng.uniform(0.004, 0.02))) if self.stored_scale else None,
            "pre_scale": rng.uniform(0.5, 2, k).astype(np.float32) if self.pre_scale else None,
            "bias": rng.normal(0, 0.3, n).astype(np.float32) if self.bias else None,
            "perm": perm,
        }

    def expert(self, rng: np.random.Generator) -> Expert:
        def perm(k: int) -> np.ndarray:
            return rng.permutation(k).astype(np.int32)

        h, i, down = self.hidden, self.intermediate, self
        if self.down_weights:
            weights, group_size, block_n = self.down_weights
            down = replace(self, weights=weights, group_size=group_size, block_n=block_n)
        gate_perm = None if self.act_order == "none" else perm(h)
        up_perm = perm(h) if self.act_order == "split" else gate_perm
        down_perm = None if self.act_order == "none" else perm(i)
        return Expert(
            self.matrix(rng, i, h, gate_perm) if self.gated else None,
            self.matrix(rng, i, h, up_perm),
            replace(down.matrix(rng, h, i, down_perm), hadamard=self.hadamard),
        )

    def build(self) -> Layer:
        rng = np.random.default_rng(self.seed)
        experts = [self.expert(rng) for _ in range(self.experts)]
        layout = LAYOUTS["cpu_panel"]
        w13, w2 = reduce(join, (layout.describe(e, self.activation_format) for e in experts))
        spec = moe_spec(
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
            w2_hadamard=self.hadamard,
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


def assert_same(a: QuantizedMatrix | None, b: QuantizedMatrix | None) -> None:
    """That ``b`` is ``a`` bit for bit as it comes back from its row: what says nothing is None."""
    if a is None or b is None:
        assert a is b
        return
    silent: dict[str, Any] = {"zero_points": SCHEMES[a.kind].zero, "bias": 0, "pre_scale": 1}
    for field in fields(QuantizedMatrix):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if not isinstance(x, np.ndarray):
            assert x == y, field.name
            continue
        if y is None:
            y = np.arange(len(x)) if field.name == "perm" else np.full_like(x, silent[field.name])
        else:
            assert x.dtype.itemsize == y.dtype.itemsize, field.name
        assert x.tobytes() == np.asarray(y, x.dtype).tobytes(), field.name


def two_levels(rng: np.random.Generator, kind: str, scale_type: str, n: int, blocks: int) -> np.ndarray:
    """Scales with fields [n, blocks], of either sign, that bring products to about unit variance."""
    scheme, k = SCHEMES[kind], blocks * SCHEMES[kind].group_size
    scales = np.zeros((n, blocks), SCALE_DTYPES[scale_type])
    names = scales.dtype.names
    level = 64 if "scales" in names else 8 if "levels" in names else 1
    spread = np.std(scheme.table) * np.sqrt(k)
    for factor, codes, unit in (("d", "scales", spread * level), ("d_min", "minima", level * k**0.5)):
        if factor in names:
            scales[factor] = rng.uniform(0.5, 1.5, scales.shape) / unit
            if codes in names:
                scales[codes] = rng.integers(-128, 128, scales[codes].shape)
            else:
                scales[factor] *= rng.choice([1, -1], scales.shape)
    if "levels" in names:
        scales["levels"] = rng.integers(0, 256, scales["levels"].shape)
    return scales


INT4, INT8, FP8 = ("int4", "bf16", False), ("int8", "bf16", False), ("fp8_e4m3", "f32", False)
NVFP4 = ("nvfp4", "e4m3", False)
FLOATS = ("fp8_e4m3", "bf16", "f16", "nf4", "bnb_fp4", "q8_min")
K_QUANTS = {"q4_k": ("q4_k", "k32", False), "q5_k": ("q5_k", "k32", False), "q6_k": ("q6_k", "k16", False)}
#: and what CUDA's kernels do not run
GGML = K_QUANTS | {
    "q2_k": ("q2_k", "k16_minima", False),
    "q4_1": ("q4_1", "f16_minima", False),
    "q5_1": ("q5_1", "f16_minima", False),
    "q4_1-f32": ("q4_1", "f32_minima", False),
    "q5_1-f32": ("q5_1", "f32_minima", False),
}
#: integers in planes: kind, scale type, zero points
PLANES = [
    (kind, scales, (i + j) % 2 == 0)
    for i, kind in enumerate(("int2", "int3", "int5", "int6"))
    for j, scales in enumerate(("f32", "f16", "bf16"))
]
ONE_PLANE_EACH = [("int2", "f16", True), ("int3", "bf16", False), ("int5", "f32", True), ("int6", "f16", False)]
#: and what is multiplied by floats only
TABLES = [("nf4", "f32", False), ("bnb_fp4", "f32", False), ("q8_min", "f32_minima", False)]
#: formats of FORMAT.md 2.10; types of their scales that come in several group sizes
SCHEMES_OF_BLOCKS, WIDE_BLOCKS = {kind for kind, _, _ in (*GGML.values(), *TABLES)}, ("f32", "f32_minima")
#: kind, scale type, zero points: all that cpu_panel carries
WEIGHTS = [
    *GGML.values(),
    *TABLES,
    *PLANES,
    *((k, s, z) for k in ("int4", "int8") for s in ("f32", "f16", "bf16") for z in (False, True)),
    ("mxfp4", "e8m0", False),
    NVFP4,
    *(("fp8_e4m3", s, False) for s in ("bf16", "f16", "e8m0", "f32")),
    ("bf16", "f32", False),
    ("f16", "f32", False),
]
#: floats last
ONE_OF_EACH = [INT4, INT8, ("int4", "f16", True), ("int8", "f16", True), *WEIGHTS[-8:-6], FP8]
INT8_ACTIVATIONS = ("int8_token", "int8_token_asym", "int8_group")
FLOAT_ACTIVATIONS = ("fp8_token", "fp8_tensor", "fp8_group128", "nvfp4", "mxfp8", "mxfp4")


#: every axis of the op once, then sizes that are not multiples of anything
CASES = [
    Case(),
    Case(activation_format="int8_token"),
    Case(activation_format="none"),
    *(Case(weights=w, group_size=g) for w in WEIGHTS for g in (-1, 16, 32, 64)),
    *(Case(weights=w, group_size=g, activation_format="none") for w in ONE_OF_EACH for g in (-1, 16, 64)),
    *(Case(weights=w, group_size=g, activation_format="int8_token") for w in ONE_OF_EACH[:-1] for g in (-1, 64)),
    # Steps of activations for 32 or 64 columns, in groups that are as long, longer, shorter.
    *(
        Case(weights=w, group_size=g, activation_format="int8_group", **sizes)
        for w in ONE_OF_EACH[:-1]
        for g in (-1, 16, 32, 64, 96, 128)
        for sizes in (
            {"hidden": 160, "intermediate": 128},
            {"hidden": 100, "intermediate": 290, "bias": True, "act_order": "split", "pre_scale": True},
        )
    ),
    *(Case(weights=w, activation_format=a) for w in ONE_OF_EACH for a in FLOAT_ACTIVATIONS),
    # Integer products: both sides are e2m1 in the same groups; in act-order they are not.
    *(
        Case(weights=NVFP4, group_size=16, activation_format="nvfp4", **other)
        for other in (
            {},
            {"hidden": 176, "intermediate": 72, "bias": True, "gated": False, "activation": "relu2"},
            {"hidden": 100, "intermediate": 70, "pre_scale": True, "on_input": True},
            {"act_order": "split"},
        )
    ),
    *(Case(weights=FP8, group_size=g, block_n=48, hidden=160, activation_format="fp8_group128") for g in (-1, 128)),
    *(Case(weights=FP8, group_size=-1, activation_format="fp8_tensor", static=False, gated=g) for g in (True, False)),
    *(Case(weights=w, pre_scale=True, act_order="split") for w in ONE_OF_EACH),
    *(
        Case(hadamard=size, intermediate=i, activation_format=a, **other)
        for size, i in ((1, 27), (32, 96), (64, 192), (256, 256))
        for a in ("none", *INT8_ACTIVATIONS, "fp8_token", "mxfp4")
        for other in ({}, {"weights": NVFP4, "pre_scale": True}, {"bias": True, "gated": False, "on_input": True})
    ),
    Case(weights=FP8, hadamard=32, pre_scale=True, activation_format="fp8_tensor", static=False),
    Case(weights=FP8, pre_scale=True, activation_format="fp8_tensor", static=False),
    Case(weights=("mxfp4", "e8m0", False), bias=True, activation="swiglu_oai", hidden=90, intermediate=90),
    *(
        Case(weights=w, group_size=g, activation_format=a, hidden=290, intermediate=70, bias=True, act_order="split")
        for w in ONE_PLANE_EACH
        for a in ("none", *INT8_ACTIVATIONS, "fp8_token")
        for g in (-1, 96)
    ),
    *(
        Case(weights=w, activation_format=a, **sizes)
        for w in GGML.values()
        for a in ("none", *INT8_ACTIVATIONS)
        for sizes in ({"hidden": 512, "intermediate": 256}, {"hidden": 100, "intermediate": 290, "bias": True})
    ),
    *(
        Case(weights=w, activation_format=a, hidden=290, intermediate=40, act_order="split", pre_scale=True)
        for w in (*GGML.values(), *TABLES)
        for a in ("none", "int8_token_asym", "int8_group", "fp8_token")
    ),
    *(Case(weights=w, group_size=g, hidden=300, intermediate=130, bias=True) for w in TABLES for g in (32, 128, 256)),
    *(Case(activation=a) for a in ("gelu", "gelu_tanh", "relu2")),
    *(Case(activation=a) for a in ("swiglu_oai", "swiglu_step", "swiglu_clamp", "swiglu_tanh")),
    *(Case(activation=a, gated=False) for a in ("silu", "gelu", "relu2")),
    Case(bias=True),
    Case(bias=True, weights=INT8, group_size=-1),
    Case(bias=True, activation="swiglu_oai", activation_format="none"),
    *(
        Case(act_order=a, activation_format=f, weights=w)
        for a in ("shared", "split")
        for f in ("none", "int8_token_asym", "int8_group")
        for w in (INT4, INT8, ("int4", "f16", True))
    ),
    Case(act_order="shared", gated=False),
    Case(on_input=True, top_k=1),
    Case(on_input=True),
    Case(offset=2, total_experts=8, top_k=4),
    Case(hidden=40, intermediate=27, group_size=-1),
    Case(hidden=33, intermediate=7, group_size=-1, weights=INT8),
    Case(hidden=100, intermediate=70),
    Case(hidden=100, intermediate=70, weights=INT8, bias=True),
    *(Case(hidden=100, intermediate=70, weights=w, bias=True) for w in ONE_OF_EACH),
    Case(hidden=31, intermediate=1, experts=1, top_k=1, group_size=64),
    Case(hidden=288, intermediate=200, group_size=96, act_order="split", bias=True),
    Case(hidden=256, intermediate=128, group_size=128, experts=16, top_k=8),
    Case(hidden=256, intermediate=384, group_size=128, experts=3, top_k=8, weights=INT8),
]
CASES = list(dict.fromkeys(CASES))  # some formats have one group size

#: every routing method, as vLLM's RoutingMethodType has them: Default, Renormalize, RenormalizeNaive, DeepSeekV3 ...
ROUTERS = {
    "softmax": routing_spec(64, 8, "softmax_topk"),
    "topk-softmax": routing_spec(32, 4, "topk_softmax"),
    "renormalized": routing_spec(128, 8, "softmax_topk", renormalize=1),
    "groups": routing_spec(256, 8, "sigmoid_topk", 1, n_group=8, topk_group=4, routed_scaling_factor=2.5),
    "few-groups": routing_spec(64, 6, "sigmoid_topk", 1, n_group=8, topk_group=3, routed_scaling_factor=2.5),
    "one-group": routing_spec(160, 8, "sigmoid_topk", 1, routed_scaling_factor=1.5),
    "all": routing_spec(160, 160, "sigmoid_topk", 1, routed_scaling_factor=1.5),
    "llama4": routing_spec(16, 1, "topk_sigmoid"),
    "topk": routing_spec(60, 5, "topk"),
    "one": routing_spec(1, 1, "softmax_topk"),
    "groups-of-one": routing_spec(7, 3, "sigmoid_topk", n_group=7, topk_group=5),
    "all-groups-of-one": routing_spec(7, 7, "sigmoid_topk", n_group=7, topk_group=7),
    "most": routing_spec(2048, 40, "softmax_topk"),
    "shared": routing_spec(64, 6, "sigmoid_topk", 1, 8, 3, routed_scaling_factor=2.5, shared_experts=2),
    "shared-gate": routing_spec(256, 8, "topk_softmax", shared_experts=1, shared_gate=1),
    "shared-gate-of-many": routing_spec(60, 4, "softmax_topk", shared_experts=40, shared_gate=1),
}


def assert_routed(
    found: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], rtol: float, atol: float
) -> None:
    """Ids and weights [T, k] of float32 against float64's, which may order experts differently that float32 ties."""
    (ids, weights), (want_ids, want_weights) = found, want
    differ = (ids != want_ids).any(1)
    assert differ.sum() <= 0.002 * ids.size
    np.testing.assert_allclose(weights[~differ], want_weights[~differ], rtol=rtol, atol=atol)
