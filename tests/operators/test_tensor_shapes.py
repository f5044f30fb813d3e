"""Shapes of op.def: C++ and Python read the same outputs from them, and a wrong input is refused by name."""

import re
from dataclasses import replace

import pytest
from support.operators import native_kernels as native
from support.operators.specs import (
    attention_spec,
    conv_spec,
    delta_spec,
    linear_spec,
    moe_spec,
    projection,
    routing_spec,
    space_spec,
)

from quantmoe.custom_ops.op import (
    GatherSpec,
    IndexerSpec,
    NormSpec,
    ReduceNormSpec,
    ReduceSpec,
    RouterSpec,
    RowsSpec,
    ScatterSpec,
    Spec,
)
from quantmoe.custom_ops.op_def import tensor_shapes
from quantmoe.custom_ops.op_def.nodes import Hadamard, HyperConnection
from quantmoe.custom_ops.op_def.schema import schema
from quantmoe.custom_ops.op_def.tensor_shapes import output_shapes

W = projection("int4", 32, "f32", "none")
ROUTING = routing_spec(6, 2, "softmax_topk", shared_experts=1, shared_gate=1)
ROUTER = RouterSpec.from_attributes(ROUTING.attributes() | {"hidden_size": 64})
HEADS = attention_spec(4, 2, 16, v_head_size=8, rotary_size=8, qk_norm="head")
LATENT = replace(HEADS, kv_num_heads=1, head_size=12, qk_norm="none", key_split=7)
UP = replace(LATENT, key_split=0, nope_size=10, out_size=20)
UP_KEY, UP_VALUE = [4, 10, 8], [4, 8, 20]
DECAY = delta_spec(2, 4, 8, v_head_size=6, decay_per_key=1, z_size=99, state_window=3)
#: a node, its inputs' shapes, its outputs'
NODES: list[tuple[Spec, list[list[int] | None], list[list[int]]]] = [
    (moe_spec(8, 64, 32, W, W), [[2, 3, 64], [2, 3, 5], [2, 3, 5], [8, 99], [8, 7]], [[2, 3, 64]]),
    (linear_spec(64, 96, W), [[64], [1, 9]], [[96]]),
    (linear_spec(64, 96, W), [[0, 7, 64], [1, 9]], [[0, 7, 96]]),
    (ROUTING, [[5, 7], [6]], [[5, 3], [5, 3]]),
    (ROUTER, [[4, 1, 64], [7, 64], [0], [6]], [[4, 1, 3], [4, 1, 3]]),
    (NormSpec(norm_epsilon=1.0), [[3, 4, 5], [3, 4, 5], [5]], [[3, 4, 5]] * 2),
    (ReduceSpec(rank=0, world=2), [[3, 4]], [[3, 4]]),
    (ReduceNormSpec(norm_epsilon=1.0, rank=0, world=2, export_id=0), [[7, 5], [7, 5], [5]], [[7, 5]] * 2),
    (GatherSpec(rank=0, world=3), [[2, 5]], [[2, 15]]),
    (GatherSpec(rank=0, world=3, axis=0), [[2, 5]], [[6, 5]]),
    (ScatterSpec(rank=0, world=3), [[6, 4, 5]], [[2, 4, 5]]),
    (RowsSpec(), [[2, 4, 9, 16], [2, 3], [2, 11]], [[2, 3], [2, 1, 1]]),
    (
        HEADS,
        [[3, 5, 112], [3, 2, 9, 16], [3, 2, 9, 8], [3, 3], [3, 14], [3, 5, 4], [3, 5, 4], [16], [16], [4]],
        [[3, 5, 32], [3, 2, 14, 16], [3, 2, 14, 8]],
    ),
    (
        replace(HEADS, cache_format="int8_token", gated=1, qk_norm="row"),
        [[1, 1, 144], [1, 2, 9, 20], [1, 2, 9, 12], [1, 3], [1, 4], [1, 1, 4], [1, 1, 4], [64], [32], [4]],
        [[1, 1, 32], [1, 2, 9, 20], [1, 2, 9, 12]],
    ),
    (
        LATENT,
        [[3, 5, 60], [3, 1, 9, 7], [3, 1, 9, 5], [3, 3], [3, 9], [3, 5, 4], [3, 5, 4], [0], [0], [4]],
        [[3, 5, 32], [3, 1, 9, 7], [3, 1, 9, 5]],
    ),
    (
        UP,
        [
            [3, 5, 76],
            [3, 1, 9, 12],
            [3, 1, 9, 8],
            [3, 3],
            [3, 9],
            [3, 5, 4],
            [3, 5, 4],
            [0],
            [0],
            [4],
            [4, 10, 8],
            [4, 8, 20],
        ],
        [[3, 5, 80], [3, 1, 9, 12], [3, 1, 9, 8]],
    ),
    (
        replace(HEADS, block_size=256),
        [
            [1, 7, 112],
            [9, 256, 2, 16],
            [9, 256, 2, 8],
            [2, 3],
            [1, 14],
            [600, 4],
            [600, 4],
            [16],
            [16],
            [4],
            None,
            None,
            [2, 3],
        ],
        [[1, 7, 32], [9, 256, 2, 16], [9, 256, 2, 8]],
    ),
    (
        HEADS,
        [
            [3, 5, 112],
            [3, 2, 9, 16],
            [3, 2, 9, 8],
            [3, 3],
            [3, 14],
            [3, 5, 4],
            [3, 5, 4],
            [16],
            [16],
            [4],
            None,
            None,
            None,
            [3, 5, 2, 8],
        ],
        [[3, 5, 32], [3, 2, 14, 16], [3, 2, 14, 8]],
    ),
    (
        IndexerSpec(num_heads=4, head_size=8, top_k=6),
        [[3, 5, 32], [3, 5, 8], [3, 5, 4], [3, 1, 9, 8], [3, 3], [3, 14]],
        [[3, 5, 1, 6], [3, 1, 14, 8]],
    ),
    (Hadamard(features=96, size=32), [[2, 3, 96]], [[2, 3, 96]]),
    (
        HyperConnection(num_streams=3, hidden_size=8, iterations=2, epsilon=0.0),
        [[2, 5, 3, 8], [2, 5, 15], [15], [3]],
        [[2, 5, 8], [2, 5, 3], [2, 5, 3, 3]],
    ),
    (conv_spec(40), [[2, 3, 40], [40, 4], [40], [2, 40, 3], [2, 3]], [[2, 3, 40], [2, 40, 3]]),
    (
        replace(conv_spec(40, state_window=2), x_size=61, x_offset=20),
        [[2, 3, 61], [40, 4], [0], [2, 2, 40, 3], [2, 3]],
        [[2, 3, 40], [2, 2, 40, 3]],
    ),
    (
        DECAY,
        [[2, 3, 56], [2, 3, 32], [2, 3, 4], [2, 3, 99], [4], [32], [6], [3, 2, 4, 8, 6], [2, 3]],
        [[2, 3, 24], [3, 2, 4, 8, 6]],
    ),
    (
        space_spec(2, 4, 8, 6, dt_size=9),
        [[2, 3, 56], [2, 3, 9], [2, 3, 24], [4], [4], [4], [24], [2, 4, 8, 6], [2, 3]],
        [[2, 3, 24], [2, 4, 8, 6]],
    ),
]


def test_every_operator_is_here() -> None:
    assert {spec.OP for spec, _, _ in NODES} == schema().operators.keys()


@pytest.mark.parametrize(("spec", "inputs", "outputs"), NODES)
def test_shapes_of_the_outputs(spec: Spec, inputs: list[list[int] | None], outputs: list[list[int]]) -> None:
    assert native.infer_shapes(spec, inputs) == outputs
    assert output_shapes(spec.OPERATOR, spec.attributes(), inputs) == outputs


@pytest.mark.parametrize(("spec", "inputs"), [(spec, inputs) for spec, inputs, _ in NODES])
def test_a_size_that_attributes_fix_is_refused_by_name(spec: Spec, inputs: list[list[int] | None]) -> None:
    operator = spec.OPERATOR
    values = tensor_shapes._values(operator, spec.attributes())
    for i, (name, _) in enumerate([*operator.inputs, *operator.optional_inputs][: len(inputs)]):
        items = tensor_shapes._items(operator.shapes[name], values) or []
        if (shape := inputs[i]) is None:
            continue
        fixed = [] if ".." in items else [at for at, item in enumerate(items) if not re.fullmatch("[A-Z]", item)]
        if items[:1] == [".."]:
            fixed = [len(shape) - 1] * (len(items) > 1 and not re.search(r"\b[A-Z]\b", items[-1]))
        for at in fixed * (shape != [0]):
            wrong = [*shape[:at], shape[at] + 1, *shape[at + 1 :]]
            with pytest.raises(ValueError, match=f"^{name} has shape {re.escape(str(wrong))}, expected "):
                native.infer_shapes(spec, [*inputs[:i], wrong, *inputs[i + 1 :]])


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, [3, 100], "x has shape [3, 100], expected [B, S, 40], which is [B, S, where(x_size, x_size, channels)]"),
        (0, [3, 9, 100], "x has shape [3, 9, 100], expected [3, 9, 40]"),
        (1, [40, 5], "weight has shape [40, 5], expected [40, 4], which is [channels, width]"),
        (2, [4], "bias has shape [4], expected [40] or, for none, [0], which is [channels] or [0]"),
        (3, [1, 40, 3], "past_conv has shape [1, 40, 3], expected [2, 40, 3], which is state_window - 1 ?"),
        (4, [2, 4], "rows has shape [2, 4], expected [2, 3], which is [B, 3]"),
    ],
)
def test_a_message_has_sizes_and_their_meaning(index: int, shape: list[int], message: str) -> None:
    inputs = [[2, 3, 40], [40, 4], [40], [2, 40, 3], [2, 3]]
    inputs[index] = shape
    with pytest.raises(ValueError, match=re.escape(message)):
        native.infer_shapes(conv_spec(40), inputs)


def test_a_size_that_is_not_known() -> None:
    assert native.infer_shapes(conv_spec(40), [[-1, 3, 40], [40, 4], [0], [2, 40, 3], [-1, 3]]) == [
        [2, 3, 40],
        [2, 40, 3],
    ]
    assert native.infer_shapes(ScatterSpec(rank=0, world=3), [[-1, 4]]) == [[-1, 4]]


def test_a_size_that_is_a_number_in_host_memory() -> None:
    inputs = [[2, 4, 9, 16], [2, 5], [2, 11], [1]]
    assert native.infer_shapes(RowsSpec(), inputs) == [[2, 3], [2, -1, 1]]
    for most, kept in ((1, 1), (3, 3), (9, 5)):
        sizes = {"num_logits": most}
        assert output_shapes(RowsSpec.OPERATOR, {}, inputs, host_sizes=sizes) == [[2, 3], [2, kept, 1]]
    inputs[1] = [2, 1]
    assert native.infer_shapes(RowsSpec(), inputs) == [[2, 3], [2, 1, 1]]


def test_sizes_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("x has shape [7, 4], expected [3 * N, ..]")):
        native.infer_shapes(ScatterSpec(rank=0, world=3), [[7, 4]])


def test_the_number_of_inputs_is_checked() -> None:
    with pytest.raises(ValueError, match="CausalConv has 4 inputs, expected 5"):
        native.infer_shapes(conv_spec(40), [[2, 3, 40], [40, 4], [40], [2, 40, 3]])
