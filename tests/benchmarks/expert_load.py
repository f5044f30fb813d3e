"""The busiest rank's share of tokens that Zipf spreads over experts, with and without a map (lab/several-gpus)."""

from __future__ import annotations

import numpy as np

from quantmoe.exporter.reading.expert_map import balance, in_order


def main() -> None:
    for experts, ranks in ((128, 8), (256, 8), (256, 32)):
        tokens = np.random.default_rng(0).permutation(1 / np.arange(1, experts + 1))
        placed = (in_order(experts, ranks), balance(tokens, ranks, 0), balance(tokens, ranks, ranks))
        shares = (placement.load(tokens).max() * ranks / tokens.sum() for placement in placed)
        print(experts, ranks, *(f"{share:.2f}" for share in shares))


if __name__ == "__main__":
    main()
