"""The figures of the scenes: Figures 8, 10 and 11 of the Prism paper. Bars are medians over repeats, with the least and
the most; what changes over time is that of the first repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from prism.trace.replay.output import read_records
from prism.trace.report import Report
from prism.trace.report_plots import colour, new_figure, to_svg

Runs = Mapping[str, Sequence[tuple[Report, Path]]]
"""Variant -> report and folder of each repeat."""

BIN_S = 2.0


def figure_8(runs: Runs, path: Path) -> None:
    """Per variant: request rates, KV memory, throughput of each model over time."""
    figure, axes = new_figure(3, len(runs), height=2.2)
    for column, (label, repeats) in enumerate(runs.items()):
        report, folder = repeats[0]
        rates, kv, throughput = (axes[row * len(runs) + column] for row in range(3))
        rates.set_title(label)
        for index, group in enumerate(report.models):
            times, requests, tokens = _binned(folder, group.name)
            rates.step(times, requests, color=colour(index), label=group.name)
            throughput.step(times, tokens, color=colour(index))
            samples = report.timeline.samples
            values = [s.model_bytes.get(group.name, 0) / 2**20 for s in samples]
            kv.plot([s.t_s for s in samples], values, color=colour(index))
        rates.set_ylabel("requests/s")
        kv.set_ylabel("KV memory (MiB)")
        throughput.set(ylabel="output tokens/s", xlabel="time (s)")
    _same_heights(axes, 3, len(runs))
    axes[0].legend(frameon=False)
    path.write_text(to_svg(figure), encoding="utf-8")


def figure_10(runs: Runs, path: Path) -> None:
    """(a) attainment with and without; (b) memory in use of each device over time."""
    figure, axes = new_figure(1, 1 + len(runs))
    bars = {
        label: [(r.all.attainment.ttft, r.all.attainment.tpot) for r, _ in repeats] for label, repeats in runs.items()
    }
    _attainment_bars(axes[0], bars, ["TTFT", "TPOT"])
    for axis, (label, repeats) in zip(axes[1:], runs.items(), strict=True):
        samples = repeats[0][0].timeline.samples
        for index, device in enumerate(sorted({d for s in samples for d in s.mapped_bytes})):
            used = [s.mapped_bytes.get(device, 0) / 2**20 for s in samples]
            axis.plot([s.t_s for s in samples], used, color=colour(index), label=device)
        axis.set(title=label, xlabel="time (s)", ylabel="memory in use (MiB)")
        if samples:
            axis.legend(frameon=False, fontsize=7)
    _same_heights(axes[1:], 1, len(runs))
    path.write_text(to_svg(figure), encoding="utf-8")


def figure_11(runs: Runs, path: Path) -> None:
    """(a) TTFT attainment of each model with and without; (b) waiting requests of each model over time."""
    figure, axes = new_figure(1, 1 + len(runs))
    models = [group.name for group in next(iter(runs.values()))[0][0].models]
    bars = {
        label: [tuple(r.model(m).attainment.ttft for m in models) for r, _ in repeats]
        for label, repeats in runs.items()
    }
    _attainment_bars(axes[0], bars, models)
    for axis, (label, repeats) in zip(axes[1:], runs.items(), strict=True):
        samples = repeats[0][0].timeline.samples
        for index, model in enumerate(models):
            axis.plot(
                [s.t_s for s in samples], [s.queued.get(model, 0) for s in samples], color=colour(index), label=model
            )
        axis.set(title=label, xlabel="time (s)", ylabel="waiting requests")
        axis.legend(frameon=False, fontsize=7)
    _same_heights(axes[1:], 1, len(runs))
    path.write_text(to_svg(figure), encoding="utf-8")


FIGURES: dict[str, Callable[[Runs, Path], None]] = {"memory": figure_8, "placement": figure_10, "admission": figure_11}


def _binned(folder: Path, model: str) -> tuple[list[float], list[float], list[float]]:
    """Times, requests/s by arrival and output tokens/s by completion of one model."""
    records = [r for r in read_records(folder / "records.jsonl") if r.model == model]
    ends = [r.arrival_s + r.lag_s + (r.e2e_s or 0.0) for r in records]
    edges = np.arange(0.0, max(ends, default=0.0) + 2 * BIN_S, BIN_S)
    requests = np.histogram([r.arrival_s for r in records], edges)[0] / BIN_S
    tokens = np.histogram(ends, edges, weights=[float(r.output_tokens) for r in records])[0] / BIN_S
    return [float(t) for t in edges[:-1]], requests.tolist(), tokens.tolist()


def _attainment_bars(axis: Any, bars: Mapping[str, Sequence[tuple[float, ...]]], names: list[str]) -> None:
    """``bars``: label -> the values (0..1) of each repeat, one for each of ``names``."""
    width = 0.8 / len(bars)
    for index, (label, repeats) in enumerate(bars.items()):
        places = [place + index * width for place in range(len(names))]
        values = [[100 * repeat[place] for repeat in repeats] for place in range(len(names))]
        mids = [median(of) for of in values]
        spread = [[m - min(of) for m, of in zip(mids, values, strict=True)],
                  [max(of) - m for m, of in zip(mids, values, strict=True)]]  # fmt: skip
        style = {"ecolor": "black", "error_kw": {"lw": 0.8}, "capsize": 2}
        axis.bar(places, mids, width=width * 0.95, color=colour(index), label=label, yerr=spread, **style)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], names)
    axis.set(ylabel="met (%)", ylim=(0, 118))
    axis.legend(frameon=False, fontsize=7, loc="upper center", ncols=2)


def _same_heights(axes: list[Any], rows: int, columns: int) -> None:
    """Variants are compared at the same scale."""
    for row in range(rows):
        line = axes[row * columns : (row + 1) * columns]
        top = max(axis.get_ylim()[1] for axis in line)
        for axis in line:
            axis.set_ylim(0, top)
