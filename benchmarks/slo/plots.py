"""The curves as the Prism paper's Figure 7, and bars for the ablations (Figures 10a and 11a)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from benchmarks.slo.summary import GOODPUT, TARGET, Curve, CurveKey, highest_rate
from prism.trace.report_plots import colour, new_figure, to_svg

_AXES = {"rate": "request rate (times the trace's)", "scale": "SLO scale", "devices": "devices"}
_METRICS = {GOODPUT: "goodput (%)", "ttft": "TTFT met (%)", "tpot": "TPOT met (%)"}


def figure_7(found: Mapping[CurveKey, Curve], path: Path) -> None:
    """Rows: experiments; columns: goodput, TTFT and TPOT attainment of each trace. Bars from least to most over
    repeats; a dashed line where a policy's goodput falls below 99%."""
    experiments = [e for e in _AXES if any(key[0] == e for key in found)]
    traces = sorted({key[1] for key in found})
    if not experiments:
        return
    figure, axes = new_figure(len(experiments), len(_METRICS) * len(traces), height=3.0)
    labels = list(dict.fromkeys(key[2] for key in found if key[0] in _AXES))
    for row, experiment in enumerate(experiments):
        for column, (trace, metric) in enumerate(product(traces, _METRICS)):
            axis = axes[row * len(_METRICS) * len(traces) + column]
            for index, label in enumerate(labels):
                curve = found.get((experiment, trace, label))
                if not curve:
                    continue
                mids = [100 * getattr(p, metric)[0] for p in curve]
                low = [mid - 100 * getattr(p, metric)[1] for mid, p in zip(mids, curve, strict=True)]
                high = [100 * getattr(p, metric)[2] - mid for mid, p in zip(mids, curve, strict=True)]
                xs = [p.x for p in curve]
                axis.errorbar(xs, mids, yerr=[low, high], color=colour(index), marker="o", ms=3.5, lw=1.3, label=label)
                if experiment == "rate" and metric == GOODPUT and (edge := highest_rate(curve)):
                    axis.axvline(edge, color=colour(index), ls="--", lw=0.8)
            axis.axhline(100 * TARGET, color="grey", ls=":", lw=0.8)
            axis.set(xlabel=_AXES[experiment], ylabel=_METRICS[metric], ylim=(-3, 103))
            if row == 0:
                axis.set_title(trace, fontsize=9)
    axes[0].legend(frameon=False, fontsize=7)
    path.write_text(to_svg(figure), encoding="utf-8")


def ablation_bars(found: Mapping[CurveKey, Curve], path: Path) -> None:
    """Goodput, TTFT and TPOT attainment of Prism with parts switched off, and of the rivals, at the base point."""
    bars = {key: curve[0] for key, curve in found.items() if key[0] == "ablation"}
    traces = sorted({key[1] for key in bars})
    if not bars:
        return
    figure, axes = new_figure(1, len(traces), height=0.36 * len(bars) / len(traces) + 1.4)
    for axis, trace in zip(axes, traces, strict=True):
        chosen = {key[2]: point for key, point in bars.items() if key[1] == trace}
        places = range(len(chosen))
        for shift, (metric, name), shade in zip((-0.27, 0.0, 0.27), _METRICS.items(), (3, 0, 4), strict=True):
            values = [100 * getattr(p, metric)[0] for p in chosen.values()]
            axis.barh([place + shift for place in places], values, height=0.25, color=colour(shade), label=name)
        axis.set(yticks=list(places), yticklabels=list(chosen), xlim=(0, 100), xlabel="met (%)", title=trace)
        axis.invert_yaxis()
    axes[0].legend(frameon=False, fontsize=7)
    path.write_text(to_svg(figure), encoding="utf-8")
