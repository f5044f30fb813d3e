"""Figures of how well a model predicts a text, and how far its predictions are from another's: llama-perplexity's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

#: positions whose logits are converted to float64 at a time
ROWS = 64


@dataclass(frozen=True)
class Estimate:
    """A mean over positions and its standard error, which takes positions as independent."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.5f} ± {self.error:.5f}"


def estimate(values: np.ndarray) -> Estimate:
    """Return the mean of float64 [positions] and its standard error."""
    spread = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), spread)


@dataclass
class Positions:
    """Predictions at every position of a text, window after window.

    Attributes:
        loss: negative logarithm of the probability of the token that follows, in nats; a window's last position has
            none. base_loss: the same of the other model.
        kld: KL(base || model) in nats. same: whether both have the same likeliest token.
    """

    loss: list[np.ndarray] = field(default_factory=list)
    base_loss: list[np.ndarray] = field(default_factory=list)
    kld: list[np.ndarray] = field(default_factory=list)
    same: list[np.ndarray] = field(default_factory=list)

    def add(self, ids: Sequence[int], logits: np.ndarray, base: np.ndarray | None) -> None:
        """Take in a window.

        Args:
            ids: its tokens. logits: after each of them, f32 [tokens, vocabulary]. base: the other model's.
        """
        following = np.array(ids[1:])
        for at in range(0, len(ids), ROWS):
            rows, nexts = slice(at, at + ROWS), following[at : at + ROWS]
            q = log_softmax(logits[rows])
            self.loss.append(-q[np.arange(len(nexts)), nexts])
            if base is None:
                continue
            p = log_softmax(base[rows])
            self.base_loss.append(-p[np.arange(len(nexts)), nexts])
            self.kld.append((np.exp(p) * (p - q)).sum(-1))
            self.same.append(logits[rows].argmax(-1) == base[rows].argmax(-1))

    def figures(self) -> Figures:
        """Return the statistics of all windows so far."""
        loss = np.concatenate(self.loss)
        perplexity = math.exp(loss.mean())
        found = Figures(predicted=len(loss), perplexity=Estimate(perplexity, perplexity * estimate(loss).error))
        if not self.kld:
            return found
        base, kld, same = (np.concatenate(parts) for parts in (self.base_loss, self.kld, self.same))
        found.base_perplexity = Estimate(math.exp(base.mean()), math.exp(base.mean()) * estimate(base).error)
        found.log_ratio = estimate(loss - base)
        found.kld = estimate(kld)
        found.kld_quantiles = np.quantile(kld, np.linspace(0, 1, 101)).tolist()
        found.median_kld, found.kld_99, found.max_kld = (found.kld_quantiles[share] for share in (50, 99, 100))
        found.delta_p = estimate(np.exp(-loss) - np.exp(-base))
        found.rms_delta_p = float(np.sqrt(np.mean((np.exp(-loss) - np.exp(-base)) ** 2)))
        found.same_top = estimate(same.astype(np.float64))
        return found


@dataclass(kw_only=True)
class Figures:
    """Statistics of a text; the keys of ``--json``. Without a base there is only its perplexity.

    Attributes:
        predicted: tokens that were predicted. perplexity, base_perplexity: PPL(Q) and PPL(base).
        log_ratio: ln(PPL(Q) / PPL(base)).
        kld, median_kld, kld_99, max_kld: of KL(base || Q) in nats. kld_quantiles: its quantiles of 0, 1, .. 100 %.
        delta_p, rms_delta_p: change of the probability of the token that follows. same_top: share of positions with
            the same likeliest token.
    """

    predicted: int
    perplexity: Estimate
    base_perplexity: Estimate | None = None
    log_ratio: Estimate | None = None
    kld: Estimate | None = None
    median_kld: float | None = None
    kld_99: float | None = None
    max_kld: float | None = None
    kld_quantiles: list[float] | None = None
    delta_p: Estimate | None = None
    rms_delta_p: float | None = None
    same_top: Estimate | None = None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of the probabilities of logits [.., vocabulary], in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))
