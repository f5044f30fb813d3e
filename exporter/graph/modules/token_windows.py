"""Windows of a row's tokens, whose number is a size of its own to torch.export.

Written as a quotient of the number of tokens, it makes torch.export prove inequalities of quotients at each operation,
which is slow.
"""

from __future__ import annotations

from typing import Any

import torch


def of(slots: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slots of each window, [batch, windows, size]. The last window is not whole: its last slot comes again.

    Args:
        slots: of a row's tokens in their order, [batch, tokens].
    """
    tokens = torch.ops.quantmoe.token_windows(slots, size)
    return slots.index_select(1, tokens.flatten()).unflatten(1, tokens.shape)


def take(x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return what slots [batch, windows, size] have of x [batch, slots, features]."""
    index = slots.flatten(1)[..., None]
    return x.gather(1, index.expand(*index.shape[:2], x.shape[-1])).unflatten(1, slots.shape[1:])


@torch.library.custom_op("quantmoe::token_windows", mutates_args=())
def token_windows(slots: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tokens of each window, int64 [windows, size]."""
    count = slots.shape[1]
    tokens = torch.arange(count // size + 1)[:, None] * size + torch.arange(size)
    return tokens.clamp(max=count - 1)


@token_windows.register_fake
def _fake(slots: torch.Tensor, size: int) -> torch.Tensor:
    count = slots.shape[1]
    known = isinstance(count, int)
    # of two windows at least nothing is specialised for one
    windows = count // size + 1 if known else torch.library.get_ctx().new_dynamic_size(min=2)
    return slots.new_empty((windows, size), dtype=torch.int64)


def onnx_token_windows(slots: Any, size: int) -> Any:
    """Return the entry of the exporter's translation table for ``token_windows``."""
    from onnxscript.onnx_opset import opset18 as op

    count = op.Shape(slots, start=1, end=2)
    zero, one, own = (op.Constant(value_ints=[number]) for number in (0, 1, size))
    windows = op.Squeeze(op.Add(op.Div(count, own), one))
    first = op.Mul(op.Range(op.Squeeze(zero), windows, op.Squeeze(one)), own)
    tokens = op.Add(op.Unsqueeze(first, one), op.Constant(value_ints=list(range(size))))
    return op.Min(tokens, op.Sub(count, one))


#: for the exporter's translation table
ONNX = {torch.ops.quantmoe.token_windows.default: onnx_token_windows}
