"""The plots of a report, each as inline SVG. A plot whose data are not there returns an empty string."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import matplotlib
from matplotlib.figure import Figure

from prism.trace.report import PERCENTILES, Distribution, Group, Report, Residence

WIDTH: Final = 10.5
COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6f4fa0", "#8c8c00", "#7f7f7f", "#b2182b",
)  # fmt: skip
MOST_LINES: Final = 20
LEGEND_POINTS: Final = 9
"""Size of the letters of a legend, as of all other letters: smaller ones cannot be read on a page."""
LEGEND_LETTERS: Final = 150
"""So many fit below a figure of :data:`WIDTH`."""


def new_figure(rows: int = 1, columns: int = 1, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """A figure and its axes in reading order."""
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    found = [axis for line in axes for axis in line]
    for axis in found:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, found


def to_svg(figure: Figure) -> str:
    """The figure as an ``<svg>`` element; the same figure gives the same text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "prism", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def colour(index: int) -> str:
    """The colour of the ``index``-th thing, the same in every plot."""
    return COLOURS[index % len(COLOURS)]


def model_colours(report: Report) -> dict[str, str]:
    """A colour for every model of the report, wherever it appears."""
    names = {group.name for group in report.models}
    for sample in report.timeline.samples:
        names.update(sample.queued, sample.model_bytes)
    return {name: colour(index) for index, name in enumerate(sorted(names))}


def attainment_over_time(report: Report) -> str:
    """TTFT and TPOT attainment of each window, all models and each."""
    if not report.windows:
        return ""
    names = [group.name for group in report.models[:MOST_LINES]]
    figure, axes = new_figure(1, 2, 3.2 + _legend_height(names))
    shades = model_colours(report)
    for axis, name in zip(axes, ("ttft", "tpot"), strict=True):
        for group in report.models[:MOST_LINES]:
            points = [(w.start_s, w.models[group.name]) for w in report.windows if group.name in w.models]
            shares = [100 * getattr(a, name) for _, a in points]
            style = {"color": shades[group.name], "lw": 0.8, "alpha": 0.6, "marker": ".", "ms": 3}
            axis.plot([t for t, _ in points], shares, label=group.name or "(unnamed)", **style)
        whole = [(w.start_s, 100 * getattr(w.all, name)) for w in report.windows if w.all is not None]
        axis.plot([t for t, _ in whole], [s for _, s in whole], color="black", lw=2, label="all models")
        axis.set(xlabel=f"time (s), windows of {report.window_s:g} s", ylabel=f"{name.upper()} met (%)", ylim=(-3, 103))
    _legend_below(figure, axes[0])
    return to_svg(figure)


def _legend_below(figure: Figure, axis: Any) -> None:
    """One legend for all panels, below them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=_columns(labels, 1), frameon=False,
                  fontsize=LEGEND_POINTS)  # fmt: skip


def _columns(labels: Sequence[str], panels: int) -> int:
    """How many entries fit beside each other in a legend below one of so many panels."""
    letters = max((len(label) for label in labels), default=0) + 6  # the line before it
    return max(1, min(len(labels), LEGEND_LETTERS // panels // letters))


def _legend(axis: Any, panels: int = 1) -> None:
    """Below the panel and the name of its axis, where it covers nothing."""
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(
        handles, labels, loc="upper center", bbox_to_anchor=(0.5, 0.0), borderaxespad=3.8,
        ncols=_columns(labels, panels), frameon=False, fontsize=LEGEND_POINTS,
    )  # fmt: skip


def _legend_height(labels: Sequence[str], panels: int = 1) -> float:
    """Inches that a legend with these entries takes."""
    return LEGEND_POINTS * 1.6 / 72 * -(-len(labels) // _columns(labels, panels))


def attainment_per_model(report: Report) -> str:
    """Bars of TTFT and TPOT attainment by model."""
    if not report.models:
        return ""
    figure, (axis,) = new_figure(height=max(2.0, 0.34 * len(report.models) + 1))
    places = range(len(report.models))
    for shift, name, shade in ((-0.2, "ttft", colour(0)), (0.2, "tpot", colour(4))):
        values = [100 * getattr(g.attainment, name) for g in report.models]
        axis.barh([p + shift for p in places], values, height=0.38, color=shade, label=name.upper())
    axis.set(yticks=list(places), yticklabels=[g.name or "(unnamed)" for g in report.models], xlim=(0, 100))
    axis.set_xlabel("requests that met the objective (%)")
    axis.invert_yaxis()
    axis.legend(frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    return to_svg(figure)


def attainment_by_scale(report: Report) -> str:
    """The same run judged by other objectives."""
    if not report.by_scale:
        return ""
    figure, (axis,) = new_figure()
    scales = [point.scale for point in report.by_scale]
    for index, name in enumerate(("ttft", "tpot", "both")):
        shares = [100 * getattr(p.attainment, name) for p in report.by_scale]
        axis.plot(scales, shares, marker="o", ms=4, color=colour(index), label=name.upper() if name != "both" else name)
    axis.axhline(99, color="grey", ls=":", lw=1)
    axis.set(xscale="log", xlabel="objectives multiplied by", ylabel="met (%)", ylim=(-3, 103))
    axis.set_xticks(scales, [f"{s:g}" for s in scales])
    axis.minorticks_off()
    axis.legend(frameon=False)
    return to_svg(figure)


def latency_cdfs(report: Report) -> str:
    """CDFs of TTFT, TPOT, gaps and e2e latency, all models and each."""
    metrics = (
        ("TTFT (s)", "ttft_s"),
        ("TPOT (s)", "tpot_s"),
        ("time between tokens (s)", "gap_s"),
        ("e2e (s)", "e2e_s"),
    )
    if report.all.ttft_s is None:
        return ""
    figure, axes = new_figure(2, 2, 3.2 + _legend_height([group.name for group in report.models[:MOST_LINES]]) / 2)
    shades = model_colours(report)
    for axis, (label, name) in zip(axes, metrics, strict=True):
        for group in report.models[:MOST_LINES]:
            label_of = group.name or "(unnamed)"
            _cdf(axis, getattr(group, name), color=shades[group.name], lw=0.8, alpha=0.7, label=label_of)
        _cdf(axis, getattr(report.all, name), color="black", lw=2, label="all models")
        axis.set(xlabel=label, ylabel="requests (%)", xscale="log", ylim=(0, 101))
    _legend_below(figure, axes[0])
    return to_svg(figure)


def _cdf(axis: Any, values: Distribution | None, **style: Any) -> None:
    if values is not None:
        axis.plot(values.values, PERCENTILES, **style)


def queues(report: Report) -> str:
    """Waiting requests over time: by model, and by device where known."""
    by_model = (("waiting requests", "queued", 1.0), ("running requests", "running", 1.0))
    return _over_time(report, (*by_model, ("waiting requests on devices", "device_queued", 1.0)))


def memory(report: Report) -> str:
    """Mapped memory over time: by device with its capacity, and KV by model."""
    return _over_time(
        report, (("memory in use (MiB)", "mapped_bytes", 2.0**20), ("KV memory (MiB)", "model_bytes", 2.0**20))
    )


def _over_time(report: Report, panels: Iterable[tuple[str, str, float]]) -> str:
    samples = report.timeline.samples
    shown = [panel for panel in panels if any(any(getattr(s, panel[1]).values()) for s in samples)]
    if not shown:
        return ""
    labels = [sorted({key for s in samples for key in getattr(s, name)})[:MOST_LINES] for _, name, _ in shown]
    figure, axes = new_figure(1, len(shown), 3.2 + max(_legend_height(each, len(shown)) for each in labels))
    shades = model_colours(report)
    for axis, (label, name, unit) in zip(axes, shown, strict=True):
        keys = sorted({key for s in samples for key in getattr(s, name)})
        for index, key in enumerate(keys[:MOST_LINES]):
            values = [getattr(s, name).get(key, float("nan")) / unit for s in samples]
            shade = shades.get(key, colour(index))
            axis.plot([s.t_s for s in samples], values, color=shade, lw=1.2, label=key)
        if name == "mapped_bytes":
            for index, key in enumerate(keys[:MOST_LINES]):
                if key in report.timeline.device_bytes:
                    axis.axhline(report.timeline.device_bytes[key] / unit, color=colour(index), ls=":", lw=1)
        axis.set(xlabel="time (s)", ylabel=label)
        axis.set_ylim(bottom=0)
        _legend(axis, len(shown))
    return to_svg(figure)


def placement(report: Report) -> str:
    """Which model was on which device when: one lane per model and device, lighter while it was being activated, with a
    mark where each activation began."""
    stays = report.timeline.residences
    if not stays:
        return ""
    devices = sorted({stay.device for stay in stays})
    lanes = sorted({(stay.device, stay.model) for stay in stays})
    figure, (axis,) = new_figure(height=max(2.0, 0.3 * len(lanes) + 1))
    for stay in stays:
        _stay(axis, lanes.index((stay.device, stay.model)), stay, report.span_s, colour(devices.index(stay.device)))
    axis.set(yticks=range(len(lanes)), yticklabels=[f"{model} on {device}" for device, model in lanes])
    axis.set(xlabel="time (s)", xlim=(0, report.span_s or None))
    axis.invert_yaxis()
    return to_svg(figure)


def _stay(axis: Any, lane: int, stay: Residence, span_s: float, shade: str) -> None:
    end_s = span_s if stay.end_s is None else stay.end_s
    ready_s = min(end_s if stay.ready_s is None else stay.ready_s, end_s)
    axis.barh(lane, ready_s - stay.start_s, left=stay.start_s, color=shade, alpha=0.3, height=0.6)
    axis.barh(lane, end_s - ready_s, left=ready_s, color=shade, height=0.6)
    if stay.start_s > 0:  # those before were there when the run began
        axis.plot([stay.start_s], [lane], marker="|", ms=11, mew=1.5, color="black")


def arrivals(report: Report) -> str:
    """Requests per second by model over time, from the windows."""
    if not report.windows:
        return ""
    names = [group.name for group in report.models[:MOST_LINES]]
    figure, (axis,) = new_figure(height=2.6 + _legend_height(names))
    times = [w.start_s for w in report.windows]
    series = {group.name: _rates(report, group) for group in report.models[:MOST_LINES]}
    shades = model_colours(report)
    _stack(axis, times, series, [shades[name] for name in series])
    axis.set(xlabel="time (s)", ylabel="requests/s")
    if len(series) > 1:
        _legend(axis)
    return to_svg(figure)


def _rates(report: Report, group: Group) -> list[float]:
    return [w.models[group.name].requests / report.window_s if group.name in w.models else 0.0 for w in report.windows]


def _stack(axis: Any, times: list[float], series: Mapping[str, list[float]], shades: list[str]) -> None:
    axis.stackplot(times, *series.values(), labels=list(series), colors=shades, alpha=0.85, step="post")


PLOTS: Final[tuple[tuple[str, Callable[[Report], str]], ...]] = (
    ("Attainment over time", attainment_over_time),
    ("Attainment by model", attainment_per_model),
    ("Judged by other objectives", attainment_by_scale),
    ("Latencies", latency_cdfs),
    ("Arrivals", arrivals),
    ("Queues", queues),
    ("Memory", memory),
    ("Placement and activations", placement),
)
