"""How far logits move when float32, or 16 bits, round otherwise, and what greedy text may then differ by.

The rounding of a result s errs by at most u |s|, u = 2^-24, evenly in between: with a variance of at most (u s)^2 / 3.
Errors of different roundings are taken as independent (Higham and Mary, A new approach to probabilistic rounding error
analysis, SIAM J. Sci. Comput. 41, 2019). Where n terms of sum S and sum of squares Q are added up in an order of which
nothing is known, the squares of the partial sums have together the mean (n + 1) / 6 (Q + 2 S^2): the error of the sum
has a variance of u^2 (n + 1) / 18 (Q + 2 S^2). Two runs differ by the errors of both, twice that.

In a graph of f16 or bf16 what goes from node to node is rounded once more, u = 2^-11 or 2^-8. Where that was the same
number in both runs it still is; where one differs, all that follows is rounded apart, up to the variance 2 (u s)^2 / 3
of two independent roundings, which is taken for all. Nodes hold norms, activations and softmax in f32: more results are
rounded here than there. Numbers below f16's normal ones (6e-5) are rounded coarser; they are not taken apart.

What such differences become in the logits is not bounded by norms, which are wider by orders of magnitude, but carried
there: runs of the model in float64 in which results are off by normal numbers of that variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from support.operators.arithmetic import U
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default)
#: sums along a dimension, whose terms are taken as alike
SUMS = (ATEN.sum.dim_IntList, ATEN.mean.dim, ATEN.convolution.default)
#: one rounding, or a few of a function
ROUNDED = (
    *(getattr(ATEN, name).Tensor for name in ("add", "sub", "mul", "div")),
    *(getattr(ATEN, name).default for name in ("exp", "rsqrt", "sigmoid", "silu", "softplus", "cumsum", "cos", "sin")),
    ATEN.pow.Tensor_Scalar, ATEN.linalg_solve_triangular.default,
)  # fmt: skip
#: what a rounding errs by at most, of the number
UNITS = {"f16": 2.0**-11, "bf16": 2.0**-8}
#: of a difference of logits: that one of a million is beyond has a probability of 3e-6
DEVIATIONS = 7


class Roundings(TorchDispatchMode):
    """Results are off as those of two runs in float32 are from each other.

    Args:
        seed: of the errors.
        exact: tensors whose products have the same bytes in both; None: nothing has, and all operations round.
        unit: of UNITS, of results that are rounded to 16 bits; 0: of none.
    """

    def __init__(self, seed: int, exact: Iterable[torch.Tensor] | None, unit: float = 0):
        super().__init__()
        self._unit = unit
        self._random, self._all = torch.Generator().manual_seed(seed), exact is None
        self._exact = {tensor.untyped_storage().data_ptr() for tensor in exact or ()}

    def _off(self, results: torch.Tensor, terms: int, squares: torch.Tensor | float, unit: float = U) -> torch.Tensor:
        """Results of sums of so many terms, with their squares' sum; of one term: of a rounding."""
        noise = torch.randn(results.shape, generator=self._random, dtype=torch.float64)
        error = noise * unit * ((terms + 1) / 9 * (squares + 2 * results**2)).sqrt()
        return torch.where(error.isfinite(), results + error.to(results.dtype), results)  # a mask's are not

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            x, w = args[-2:]
            if not {tensor.untyped_storage().data_ptr() for tensor in (x, w)} & self._exact:
                out = self._off(out, x.shape[-1], x**2 @ w**2)
        elif func is ATEN._softmax.default:  # all are divided by one sum
            sums = self._off(torch.ones_like(out[..., :1]), out.shape[-1], (out**2).sum(-1, keepdim=True))
            out = out / sums
        elif self._all and func in SUMS:
            terms = args[1][0].numel() if func is ATEN.convolution.default else args[0].numel() // out.numel()
            out = self._off(out, terms, out**2 / terms)
        elif self._all and func in ROUNDED and out.is_floating_point():
            out = self._off(out, 1, out**2)
        if self._unit and func in (*PRODUCTS, *SUMS, *ROUNDED, ATEN._softmax.default) and out.is_floating_point():
            out = self._off(out, 1, out**2, self._unit)
        return out


def bound(
    model: PreTrainedModel, ids: np.ndarray, same: Iterable[str] | None = None, samples: int = 8, type: str = "f32"
) -> float:
    """Of the difference of the logits of two runs, by the largest logit.

    Args:
        model: float32; eager attention and experts from then on.
        ids: [B, S].
        same: parameters whose products have the same bytes in both; None: nothing has.
        type: of what goes from node to node, f32 or of UNITS.
    """
    parameters = dict(model.named_parameters())
    exact = None if same is None else [parameters[name] for name in same]
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    given = torch.from_numpy(ids)
    with torch.no_grad():
        model.double()
        logits, found = model(given).logits, []
        for seed in range(samples):
            with Roundings(seed, exact, UNITS.get(type, 0)):
                found.append(model(given).logits - logits)
        model.float()
    return DEVIATIONS * float(torch.stack(found).square().mean((0, 1, 3)).sqrt().max() / logits.abs().max())


def same_but_near_ties(found: Sequence[int], want: Sequence[int], logits: np.ndarray, bound: float) -> int:
    """How many tokens are the same. At the next both are as likely, within the bound on either's logit.

    Args:
        logits: [S, vocabulary], of the tokens ``want``. bound: by the largest logit.
    """
    same = next((i for i, (a, b) in enumerate(zip(found, want, strict=True)) if a != b), len(want))
    if same < len(want):
        gap = logits[same, want[same]] - logits[same, found[same]]
        assert gap <= 2 * bound * np.abs(logits).max(), (same, gap)
    return same
