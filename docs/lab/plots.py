"""README's plot, drawn from gpu-layers.md: python docs/lab/plots.py (matplotlib is in the extra `bench`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
OURS, PEERS = "#1f6f8b", ("#c9ada7", "#9a8c98")


def table(first: str) -> list[dict[str, str]]:
    """Return the rows of the table whose header begins with ``first``.

    Raises:
        ValueError: there is none.
    """
    lines = (HERE / "gpu-layers.md").read_text(encoding="utf-8").splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith(first)), None)
    if at is None:
        raise ValueError(f"gpu-layers.md has no table that begins with {first}")

    def cells(line: str) -> list[str]:
        return [cell.strip() for cell in line.strip("|").split("|")]

    rows = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(cells(lines[at]), cells(line), strict=True)))
    return rows


def number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


def bars(axes: plt.Axes, rows: list[dict[str, str]], label: str, peers: tuple[str, ...]) -> None:
    """Draw peers' times by ours: a group of bars a row, and a line where they are equal."""
    width = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        places = [at + (i - (len(peers) - 1) / 2) * width for at in range(len(rows))]
        found = axes.bar(places, [number(row[f"{peer} / ours"]) for row in rows], width * 0.9, color=PEERS[i])
        axes.bar_label(found, fmt="%.1f", fontsize=7, padding=1)
        found.set_label(peer)
    axes.axhline(1, color=OURS, linewidth=2, label="QuantMoE")
    axes.set_xticks(range(len(rows)), [row[label] for row in rows], fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", labelsize=7)


def main() -> None:
    plt.rcParams["svg.hashsalt"] = "quantmoe"  # the same file each time
    plain = {"Date": None}

    figure, grid = plt.subplots(2, 2, figsize=(6.4, 4.2), sharey=True, layout="constrained")
    rows = table("| shape | T | path | best peer / ours |")
    for axes, shape in zip(grid.flat, dict.fromkeys(row["shape"] for row in rows), strict=True):
        mine = [row for row in rows if row["shape"] == shape]
        bars(axes, mine, "T", ("Humming", "Marlin"))
        axes.set_title(shape, fontsize=8)
        axes.set_xlabel("tokens", fontsize=7)
    grid[0, 0].set_ylabel("time / QuantMoE's time", fontsize=7)
    grid[0, 0].legend(fontsize=7, frameon=False)
    figure.suptitle("An int4 expert layer on one H200, 21 November 2026", fontsize=8)
    figure.savefig(HERE / "gpu.svg", metadata=plain)


if __name__ == "__main__":
    main()
