"""Attention whose keys and values are not repeated for the heads that share them.

transformers expands a group's keys and values to every head, which ONNX Runtime and TensorRT then copy for each token,
longer with each. Here a group's heads are rows of one product with the cache as it is.

The scale is a tensor made from the mask's values, so an engine cannot see that it is one number. TensorRT 10.6 moves a
number past the transpose and the reshape of the heads. It then multiplies queries whose rows have no common distance in
memory. All heads of a group except the first are wrong, without a message. This happens in engines for sequences of 1
to 512, in layers without a rotary embedding.

Rows that see no key are padding. transformers' ONNX export zeroes them, this module does not: they are finite, and only
padding reads them. TensorRT 10.6 fuses the test for such rows wrongly when one token is new.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask

from quantmoe.exporter.targets import Target

#: of standard nodes; of one node where that computes the same
NAME, NODE = "quantmoe", "quantmoe_node"
#: ai.onnx has Attention from here on
ATTENTION = 23
#: what a token that is not seen adds to its score: exp() of it is 0, and in f16 no sum with it is infinite
UNSEEN = -3e4
#: arguments of transformers' attention functions that change the scores or which of them count, besides ours
UNSUPPORTED = ("softcap", "attention_bias", "head_mask", "indices", "block_indices")


# over 60 lines: half are its arguments and what they mean
def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    one_node: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return an attention function of transformers' interface.

    Args:
        query: [batch, heads, S, D]. key: [batch, groups, L, D]. value: [batch, groups, L, V].
        attention_mask: [batch, 1, S, L], 0 or the type's lowest number, added to the scores.
        scaling: of the scores.
        s_aux: gpt-oss's sinks, [heads]: a score of each row that has no value.
        sinks: Inkling 2's, of each token, [batch, heads, S, 1].
        one_node: use ONNX's Attention, which has no sinks, bias or selection.
        position_bias: added to the scores, [batch, heads or groups, S or 1, L].
        others: what the mask says already (sliding_window, is_causal) or what says nothing in inference (dropout).

    Returns:
        [batch, S, heads, V].

    Raises:
        ValueError: naming an argument of ``UNSUPPORTED`` that is not None.
    """
    selected = None
    if getattr(module, "indexed", False):  # exporter/graph/architectures/extended_cache/indexed.py
        given = [others.pop(name, None) for name in ("indices", "block_indices")]
        selected = next((mask for mask in given if mask is not None), None)
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ValueError(f"{type(module).__name__}: attention with {name} is not supported")
    absorbed = getattr(module, "absorbed", None)
    if absorbed is not None:  # exporter/graph/modules/latent.py; keys are the latent, then what turns
        nope, turning = query.transpose(1, 2).split([absorbed.k_up.shape[2], module.qk_rope_head_dim], -1)
        query = torch.cat((absorbed.queries(nope), turning), -1).transpose(1, 2)
    batch, heads, s, d = query.shape
    groups, length = key.shape[1:3]
    plain = all(one is None for one in (selected, s_aux, sinks, position_bias))
    if one_node and plain and key.shape[-1] == value.shape[-1]:  # torch gives outputs the keys' width
        mask = attention_mask.clamp(min=UNSEEN)
        found = torch.onnx.ops.attention(query, key, value, mask, scale=scaling, softmax_precision=1)[0].transpose(1, 2)
        return found if absorbed is None else absorbed.outputs(found), None
    # [batch, 1, S, 1], no element of a mask being above 0
    scale = (attention_mask[..., :1] <= 0).to(query.dtype) * scaling
    rows = query.reshape(batch, groups, heads // groups * s, d) * scale.repeat(1, 1, heads // groups, 1)
    scores = torch.matmul(rows, key.transpose(2, 3)).reshape(batch, groups, heads // groups, s, length)
    if selected is not None:
        attention_mask = torch.where(selected, attention_mask, torch.finfo(attention_mask.dtype).min)
    # in f32: the lowest f16 and a score below it would be -inf, and a row of nothing else NaN
    scores = scores.float()
    if position_bias is not None:
        scores = scores + position_bias.unflatten(1, (groups, -1))
    scores = scores + attention_mask.unsqueeze(2)
    if s_aux is not None:
        sinks = s_aux.reshape(1, heads, 1, 1).expand(batch, -1, s, 1)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().unflatten(1, (groups, -1))), -1)
    weights = torch.softmax(scores, -1).to(value.dtype)[..., :length]
    found = torch.matmul(weights.reshape(batch, groups, heads // groups * s, length), value)
    found = found.reshape(batch, heads, s, value.shape[-1]).transpose(1, 2)
    return found if absorbed is None else absorbed.outputs(found), None


def mask(
    *args: Any,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return a mask of transformers' interface whose windows and chunks count a row's tokens, without its padding.

    Args:
        mask_function: of row, head, slot of a token, slot of a key: whether the token sees the key.
        attention_mask: [batch, slots], True for tokens; None: all are.
    """
    if attention_mask is not None and mask_function is not causal_mask_function:
        mask_function = _of_tokens(mask_function, attention_mask)
    return eager_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **kwargs)


def _of_tokens(mask_function: Callable[..., Any], attention_mask: torch.Tensor) -> Callable[..., Any]:
    """Return a mask function that is given a token's slot as it would be without padding after the row's first token.

    transformers' chunks begin behind a row's padding on the left.
    """
    seen = attention_mask.long().cumsum(1)
    slots = seen - 1 + (seen == 0).sum(1, keepdim=True)
    return lambda row, head, own, slot: mask_function(row, head, slots[row, own], slots[row, slot])


def name_of(target: Target) -> str:
    """Return which of the functions a target's graphs have."""
    return NODE if (target.opset or 0) >= ATTENTION else NAME


for _name, _function in ((NAME, grouped_attention), (NODE, partial(grouped_attention, one_node=True))):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, mask)
