"""The four characteristics of traces as tables and as the Prism paper's Figure 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prism.core.errors import InvalidValue
from prism.trace.report_plots import colour, new_figure, to_svg
from prism.trace.stats import Spread, TraceStats

NamedStats = Sequence[tuple[str, TraceStats]]


def summary_rows(stats: TraceStats) -> list[tuple[str, str]]:
    """``(characteristic, value)`` lines of one trace; spreads are over models (P10, P50, P90)."""
    size = f"{stats.requests:,} of {len(stats.models)} models in {stats.span_s:,.0f} s ({stats.rate_rps:.3g}/s)"
    top = f"top 10%: {_pc(stats.top_10_share)}, top 40%: {_pc(stats.top_40_share)}"
    changes = f"{_spread(stats.rate_change)}; 5-fold in {_pc(stats.changes_5x_share)} of the models"
    return [
        ("requests", size),
        ("popularity", f"{top}, last 60%: {_pc(stats.last_60_share)}"),
        ("idle intervals > 10 s", f"median length {_spread(stats.idle_median_s)} s"),
        ("idle intervals per hour", _spread(stats.idle_per_hour)),
        ("CV of requests per minute", _spread(stats.cv_per_minute)),
        ("rate change within a minute", changes),
        ("prompt tokens", _lengths(stats.prompt_tokens)),
        ("output tokens", _lengths(stats.output_tokens)),
    ]


def figure_2(traces: NamedStats) -> str:
    """Figure 2 of the paper for some traces, as SVG: (a) popularity; CDFs over models of (b) the median idle interval,
    (c) idle intervals per hour, (d) the CV of requests per minute, (e) the rate change within a minute."""
    figure, axes = new_figure(2, 3)
    for index, (name, stats) in enumerate(traces):
        shares = np.cumsum([m.share for m in stats.models])
        ranks = np.arange(1, len(shares) + 1) / max(1, len(shares))
        axes[0].plot(100 * ranks, 100 * shares, color=colour(index), label=name, marker=".", ms=4)
        series: list[list[float | None]] = [
            [m.idle_median_s for m in stats.models],
            [m.idle_per_hour for m in stats.models],
            [m.cv_per_minute for m in stats.models],
            [m.rate_change for m in stats.models],
        ]
        for axis, values in zip(axes[1:], series, strict=False):
            known = np.sort([v for v in values if v is not None])
            if known.size:
                axis.step(known, 100 * np.arange(1, known.size + 1) / known.size, where="post", color=colour(index))
    labels = (
        "models, most popular first (%)",
        "median idle interval (s)",
        "idle intervals > 10 s per hour",
        "CV of requests per minute",
        "largest rate change within a minute",
    )
    for letter, axis, label in zip("abcde", axes, labels, strict=False):
        counted = "requests (%)" if letter == "a" else "models (%)"
        axis.set(xlabel=label, ylabel=counted, title=f"({letter})", ylim=(0, 103))
    axes[4].set_xscale("log")
    axes[5].set_axis_off()
    axes[5].legend(*axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    return to_svg(figure)


def write_figure(path: Path, traces: NamedStats) -> None:
    """Figure 2 into ``path``, an ``.svg`` file."""
    if path.suffix != ".svg":
        raise InvalidValue("figure", str(path), "must end in .svg")
    path.write_text(figure_2(traces), encoding="utf-8")


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.p10:.3g} / {spread.p50:.3g} / {spread.p90:.3g}"


def _lengths(spread: Spread | None) -> str:
    return "unknown" if spread is None else f"P50 {spread.p50:.0f}, P90 {spread.p90:.0f}, P99 {spread.p99:.0f}"


def _pc(share: float) -> str:
    return f"{100 * share:.1f}%"
