"""Line plots of attainment and the table beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "sim"
STYLE = {
    "prism": ("#c0392b", "o"),
    "muxserve": ("#2980b9", "s"),
    "static": ("#27ae60", "^"),
    "qlm": ("#8e44ad", "D"),
}

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""Policy -> points (x, share)."""


def panels(name: str, rows: Sequence[Sequence[tuple[str, str, Curves]]], title: str) -> Path:
    """A grid of panels ``(title, x label, curves)``; written to docs/results/sim/NAME.png."""
    figure, axes = plt.subplots(
        len(rows), len(rows[0]), figsize=(4.0 * len(rows[0]), 2.9 * len(rows)), squeeze=False, layout="constrained"
    )
    for line, cells in zip(axes, rows, strict=True):
        for axis, (panel_title, x_label, curves) in zip(line, cells, strict=True):
            for policy, points in curves.items():
                color, marker = STYLE.get(policy, ("#555555", "x"))
                axis.plot(*zip(*points, strict=True), color=color, marker=marker, label=policy, markersize=4)
            axis.axhline(0.99, color="#999999", linewidth=0.8, linestyle="--")
            axis.set(title=panel_title, xlabel=x_label, ylabel="attainment", ylim=(-0.03, 1.03))
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.suptitle(title)
    return save(figure, name)


def save(figure: plt.Figure, name: str) -> Path:
    """``figure`` as docs/results/sim/NAME.png."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / f"{name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def crossing(points: Sequence[tuple[float, float]], target: float = 0.99, falling: bool = False) -> float | None:
    """The largest x up to which the curve stays at ``target`` (``falling``), or the least x from which it is there."""
    found: float | None = None
    for x, share in points if falling else reversed(points):
        if share < target:
            break
        found = x
    return found


def show(x: float | None) -> str:
    """``x`` for a table."""
    return "never" if x is None else f"{x:g}"
