"""``quantmoe evaluate --plot``: the KL divergence at the positions of a text, sorted."""

from __future__ import annotations

from pathlib import Path

from quantmoe.benchmarks.quality.evaluate import Evaluation

#: nats, the least that the plot shows: logits in float32 resolve no less
LEAST = 1e-6


def draw(found: Evaluation, path: Path) -> None:
    """Draw which share of the positions has at most which divergence.

    Args:
        found: an evaluation against another model.
        path: the file; its name's end chooses the format.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    kld, quantiles = found.figures.kld, found.figures.kld_quantiles
    assert kld
    assert quantiles
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    axes.plot(range(len(quantiles)), [max(nats, LEAST) for nats in quantiles], label="KL divergence")
    axes.axhline(max(kld.mean, LEAST), color="0.5", linestyle=":", label=f"mean: {kld.mean:.5f} nats")
    axes.set(xlabel="% of the positions", ylabel="KL divergence at most, nats", yscale="log", xlim=(0, 100))
    axes.set_title(f"{found.model}\nagainst {found.against}", fontsize="small", parse_math=False)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)
