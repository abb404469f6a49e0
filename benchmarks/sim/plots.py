"""Line plots of attainment, with the range over draws of a trace, and what tables beside them need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OUT = Path(__file__).resolve().parents[2] / "docs" / "results" / "sim"
STYLE = {
    "prism": ("#c0392b", "o"),
    "muxserve": ("#2980b9", "s"),
    "static": ("#27ae60", "^"),
    "qlm": ("#8e44ad", "D"),
    "serverlessllm": ("#d68910", "v"),
    "prism, one instance": ("#e59866", "o"),
    "prism, told nothing": ("#f5b041", "v"),
    "free memory": ("#222222", "."),
    "ideal": ("#95a5a6", "+"),
}

Band = Sequence[tuple[float, float, float, float]]
"""Points (x, least, median, most share)."""


@dataclass(frozen=True)
class Panel:
    """One plot: policy -> band."""

    title: str
    x_label: str
    bands: Mapping[str, Band]
    log: bool = False


def single(points: Sequence[tuple[float, float]]) -> Band:
    """A curve without spread."""
    return [(x, y, y, y) for x, y in points]


def band(curves: Sequence[Sequence[tuple[float, float]]]) -> Band:
    """Least, median and most over ``curves``, as far as most of them go. One that ends before (attainment has fallen)
    counts with its last share from there on: the median does not depend on how much further it would have fallen."""
    xs = sorted({x for curve in curves for x, _ in curve})
    known = [x for x in xs if 2 * sum(curve[-1][0] >= x for curve in curves) > len(curves)]
    ends = [dict(curve) | {x: curve[-1][1] for x in xs if x > curve[-1][0]} for curve in curves]
    shares = [(x, [end[x] for end in ends if x in end]) for x in known]
    return [(x, min(found), median(found), max(found)) for x, found in shares]


def panels(name: str, rows: Sequence[Sequence[Panel]], title: str) -> Path:
    """A grid of panels; written to docs/results/sim/NAME.png."""
    figure, axes = plt.subplots(
        len(rows), len(rows[0]), figsize=(4.0 * len(rows[0]), 2.9 * len(rows)), squeeze=False, layout="constrained"
    )
    for line, cells in zip(axes, rows, strict=True):
        for axis, panel in zip(line, cells, strict=True):
            for policy, points in panel.bands.items():
                color, marker = STYLE.get(policy, ("#555555", "x"))
                xs, low, mid, high = zip(*points, strict=True)
                axis.plot(xs, mid, color=color, marker=marker, label=policy, markersize=4)
                axis.fill_between(xs, low, high, color=color, alpha=0.12, linewidth=0)
            axis.axhline(0.99, color="#999999", linewidth=0.8, linestyle="--")
            axis.set(title=panel.title, xlabel=panel.x_label, ylabel="attainment", ylim=(-0.03, 1.03))
            if panel.log:
                axis.set_xscale("log", base=2)
                axis.xaxis.set_major_formatter("{x:g}")
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


def crossing(points: Sequence[tuple[float, float]], target: float = 0.99) -> float | None:
    """The least x from which on the curve is at ``target``."""
    found: float | None = None
    for x, share in reversed(points):
        if share < target:
            break
        found = x
    return found


def show(x: float | None) -> str:
    """``x`` for a table."""
    return "never" if x is None else f"{x:g}"
