"""The curves as the Prism paper's Figure 7, and bars for the ablations (Figures 10a and 11a)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.slo.summary import TARGET, Curve, CurveKey, highest_rate
from prism.trace.report_plots import colour, new_figure, to_svg

_AXES = {"rate": "request rate (times the trace's)", "scale": "SLO scale", "devices": "devices"}


def figure_7(found: Mapping[CurveKey, Curve], path: Path) -> None:
    """Rows: experiments; columns: TTFT and TPOT attainment of each trace. Bars from least to most over repeats; a
    dashed line where a policy's TTFT attainment falls below 99%."""
    experiments = [e for e in _AXES if any(key[0] == e for key in found)]
    traces = sorted({key[1] for key in found})
    if not experiments:
        return
    figure, axes = new_figure(len(experiments), 2 * len(traces), height=3.0)
    labels = list(dict.fromkeys(key[2] for key in found if key[0] in _AXES))
    for row, experiment in enumerate(experiments):
        for column in range(2 * len(traces)):
            axis = axes[row * 2 * len(traces) + column]
            trace, metric = traces[column // 2], ("ttft", "tpot")[column % 2]
            for index, label in enumerate(labels):
                curve = found.get((experiment, trace, label))
                if not curve:
                    continue
                mids = [100 * getattr(p, metric)[0] for p in curve]
                low = [mid - 100 * getattr(p, metric)[1] for mid, p in zip(mids, curve, strict=True)]
                high = [100 * getattr(p, metric)[2] - mid for mid, p in zip(mids, curve, strict=True)]
                xs = [p.x for p in curve]
                axis.errorbar(xs, mids, yerr=[low, high], color=colour(index), marker="o", ms=3.5, lw=1.3, label=label)
                if experiment == "rate" and metric == "ttft" and (edge := highest_rate(curve, metric="ttft")):
                    axis.axvline(edge, color=colour(index), ls="--", lw=0.8)
            axis.axhline(100 * TARGET, color="grey", ls=":", lw=0.8)
            axis.set(xlabel=_AXES[experiment], ylabel=f"{metric.upper()} met (%)", ylim=(-3, 103))
            if row == 0:
                axis.set_title(trace, fontsize=9)
    axes[0].legend(frameon=False, fontsize=7)
    path.write_text(to_svg(figure), encoding="utf-8")


def ablation_bars(found: Mapping[CurveKey, Curve], path: Path) -> None:
    """TTFT and TPOT attainment of Prism with single parts switched off, and of the rivals, at the base point."""
    bars = {key: curve[0] for key, curve in found.items() if key[0] == "ablation"}
    traces = sorted({key[1] for key in bars})
    if not bars:
        return
    figure, axes = new_figure(1, len(traces), height=0.36 * len(bars) / len(traces) + 1.4)
    for axis, trace in zip(axes, traces, strict=True):
        chosen = {key[2]: point for key, point in bars.items() if key[1] == trace}
        places = range(len(chosen))
        for shift, metric, shade in ((-0.2, "ttft", colour(0)), (0.2, "tpot", colour(4))):
            values = [100 * getattr(p, metric)[0] for p in chosen.values()]
            axis.barh([place + shift for place in places], values, height=0.38, color=shade, label=metric.upper())
        axis.set(yticks=list(places), yticklabels=list(chosen), xlim=(0, 100), xlabel="met (%)", title=trace)
        axis.invert_yaxis()
    axes[0].legend(frameon=False, fontsize=7)
    path.write_text(to_svg(figure), encoding="utf-8")
