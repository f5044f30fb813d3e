"""Write calls of every group of CUDA kernels for launch.cc: their structs in hex, a line each.

usage: calls.py FILE
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/support")]

from cuda.formats import FLOATS, FORMATS, spec_of  # noqa: E402
from specs import attention_spec, conv_spec, delta_spec, linear_spec, routing_spec, space_spec  # noqa: E402

from quantmoe.custom_ops import cuda, native  # noqa: E402
from quantmoe.custom_ops.op import NormSpec, RouterSpec, RowsSpec, Spec  # noqa: E402
from quantmoe.custom_ops.structs import Shape, Tensor, node  # noqa: E402
from quantmoe.custom_ops.tensor_shapes import input_shapes, output_shapes  # noqa: E402

HEADS = attention_spec(8, 2, 128, rotary_size=128)
ROUTING = routing_spec(16, 4, "softmax_topk")


def weights() -> list[str]:
    """Return calls of QuantMoE and QuantLinear: every format, few tokens and many, a cache of experts."""
    lines = []
    for name, (kind, group_size, block_n) in (FORMATS | FLOATS).items():
        spec = spec_of(1024, 512, 8, group_size, kind)
        spec = replace(spec, w13=replace(spec.w13, block_n=block_n), w2=replace(spec.w2, block_n=block_n))
        dtype = name if name in FLOATS else "bf16"
        for tokens in (1, 24, 1024):
            problem = cuda.problem(spec, dtype, tokens, 2, 8)
            lines.append(f"moe {bytes(problem).hex()}")
            problem.slots, problem.staging = 4, 8
            lines.append(f"moe {bytes(problem).hex()}")
            lines.append(f"linear {bytes(cuda.linear_problem(linear_spec(1024, 512, spec.w13), dtype, tokens)).hex()}")
    w, _, block_n = FORMATS["fp8"]
    spec = spec_of(1024, 512, 8, 128, w)
    codes = replace(spec.w13, block_n=block_n, activation_format="fp8_group128")
    lines.append(f"moe {bytes(cuda.problem(replace(spec, w13=codes, w2=codes), 'bf16', 1024, 2, 8)).hex()}")
    return lines


def attention() -> list[str]:
    """Return calls of CachedAttention: tiles of few rows and of many, codes in the cache, latent attention."""
    latent = attention_spec(16, 1, 576, v_head_size=512, key_split=288)
    specs = [HEADS, replace(HEADS, cache_format="int8"), attention_spec(8, 2, 96), latent]
    return [
        f"attention {bytes(cuda.attention_problem(spec, 'bf16', 2, tokens, 2048, 2048)).hex()}"
        for spec in specs
        for tokens in (1, 512)
    ]


def operators() -> list[str]:
    """Return calls of the operators that run by their names."""
    space = space_spec(2, 8, 128, 64)
    specs: list[Spec] = [
        *(NormSpec(norm_epsilon=1e-6), ROUTING, conv_spec(1024), delta_spec(4, 8, 128), space, RowsSpec()),
        RouterSpec.from_attributes(ROUTING.attributes() | {"hidden_size": 1024}),
    ]
    return [operator(spec, tokens) for spec in specs for tokens in (1, 512)]


def operator(spec: Spec, tokens: int) -> str:
    """Return a call of one; tensors are at addresses that are none."""
    free = {"B": 2, "S": tokens, "..": [2, tokens], "H": 1024, "G": 2, "P": 2048, "D": 128, "L": 2048}
    types = cuda.TYPES | {"T": cuda.TYPES["bf16"], "float": cuda.TYPES["f32"]}
    shapes = [input_shapes(spec.OPERATOR, spec.attributes(), free)]
    shapes.append(output_shapes(spec.OPERATOR, spec.attributes(), shapes[0]))
    words = ["node", spec.OP, bytes(node(native.library(), spec)).hex()]
    for side, declared in enumerate((spec.OPERATOR.inputs, spec.OPERATOR.outputs)):
        tensors = [
            Tensor((side * 16 + i + 1) << 32, types.get(kind, 0), Shape.of(shape))
            for i, (shape, (_, kind)) in enumerate(zip(shapes[side], declared, strict=True))
        ]
        words.append(b"".join(map(bytes, tensors)).hex())
    return " ".join(words)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(weights() + attention() + operators()) + "\n", encoding="utf-8")
