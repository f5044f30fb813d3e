"""Write calls of every group of CUDA kernels for launch.cc: an operator's name, then its structs in hex, a line each.

usage: calls.py FILE
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))

from support.cuda.cuda_kernels import Experts  # noqa: E402
from support.cuda.formats import FLOATS, FORMATS, spec_of  # noqa: E402
from support.operators.specs import attention_spec, conv_spec, delta_spec, linear_spec, routing_spec, space_spec  # noqa: E402

from quantmoe.custom_ops import cuda, native  # noqa: E402
from quantmoe.custom_ops.op import NormSpec, RouterSpec, RowsSpec, Spec  # noqa: E402
from quantmoe.custom_ops.op_def.structs import Shape, Tensor, node  # noqa: E402
from quantmoe.custom_ops.op_def.tensor_shapes import input_shapes, output_shapes  # noqa: E402

HEADS = attention_spec(8, 2, 128, rotary_size=128)
ROUTING = routing_spec(16, 4, "softmax_topk")


def weights() -> Iterator[str]:
    """Yield calls of QuantMoE and QuantLinear: every format, few tokens and many, a cache of experts."""
    memory = {name: (40 + i) << 32 for i, name in enumerate(("slot_memory", "staging_memory", "cache_state"))}
    cache = Experts(slots=4, staging=8, **memory)
    for name, (kind, group_size, block_n) in (FORMATS | FLOATS).items():
        spec = spec_of(1024, 512, 8, group_size, kind)
        spec = replace(spec, w13=replace(spec.w13, block_n=block_n), w2=replace(spec.w2, block_n=block_n))
        dtype = name if name in FLOATS else "bf16"
        for tokens in (1, 24, 1024):
            yield call(spec, dtype, {"..": [tokens], "K": 2}, experts=8)
            yield call(spec, dtype, {"..": [tokens], "K": 2}, cache, experts=8)
            yield call(linear_spec(1024, 512, spec.w13), dtype, {"..": [tokens]})
    w, _, block_n = FORMATS["fp8"]
    spec = spec_of(1024, 512, 8, 128, w)
    codes = replace(spec.w13, block_n=block_n, activation_format="fp8_group128")
    yield call(replace(spec, w13=codes, w2=codes), "bf16", {"..": [1024], "K": 2}, experts=8)


def operators() -> Iterator[str]:
    """Yield calls of the others; CachedAttention: tiles of few rows and of many, codes in the cache, latents."""
    latent = attention_spec(16, 1, 576, v_head_size=512, key_split=288)
    specs: list[Spec] = [
        *(HEADS, replace(HEADS, cache_format="int8"), attention_spec(8, 2, 96), latent),
        *(NormSpec(norm_epsilon=1e-6), ROUTING, conv_spec(1024), delta_spec(4, 8, 128)),
        *(
            space_spec(2, 8, 128, 64),
            RowsSpec(),
            RouterSpec.from_attributes(ROUTING.attributes() | {"hidden_size": 1024}),
        ),
    ]
    for spec in specs:
        for tokens in (1, 512):
            yield call(
                spec,
                "bf16",
                {"B": 2, "S": tokens, "..": [2, tokens], "H": 1024, "G": 2, "P": 2048, "D": 128, "L": 2048},
            )


def call(spec: Spec, dtype: str, free: dict, cache: Experts | None = None, experts: int = 1) -> str:
    """Return a call; tensors are at addresses that are none."""
    shapes = input_shapes(spec.OPERATOR, spec.attributes(), free)
    given = cuda.tensors(spec, dtype, shapes, experts)
    made = [Tensor(None, 0, Shape.of(shape)) for shape in output_shapes(spec.OPERATOR, spec.attributes(), shapes)]
    for side, tensors in enumerate((given, made)):
        for i, tensor in enumerate(tensors):
            tensor.data = (side * 16 + i + 1) << 32 if tensor.shape.rank >= 0 else None
    structs = [node(native.library(), spec), given, (Tensor * len(made))(*made)]
    return " ".join([spec.OP, *(bytes(s).hex() for s in (*structs, *([cache] if cache else [])))])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join([*weights(), *operators()]) + "\n", encoding="utf-8")
