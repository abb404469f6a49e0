"""The report as one HTML page: numbers, plots and how to repeat it, without anything fetched from elsewhere."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Final

from prism.trace.report import Attainment, Distribution, Group, Report
from prism.trace.report_plots import PLOTS

_STYLE: Final = """
body{font:15px/1.45 system-ui,sans-serif;max-width:1140px;margin:2em auto;padding:0 1em;color:#1c2430}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25em .8em;text-align:right;border-bottom:1px solid #dde3ea}
th:first-child,td:first-child{text-align:left}th{font-weight:600;color:#52606d}
.wide{overflow-x:auto}.wide th,.wide td{padding:.25em .5em;font-size:13px}.wide td{white-space:nowrap}
.wide td:first-child{white-space:normal;overflow-wrap:anywhere;min-width:9em}
.tiles{display:flex;flex-wrap:wrap;gap:1em;margin:1em 0}.tile{background:#f3f6f9;border-radius:8px;padding:.7em 1.2em}
.tile b{display:block;font-size:1.5em}.tile span{color:#52606d;font-size:.85em}
.note{background:#fff4e0;border-left:4px solid #e0a030;padding:.5em 1em;margin:.5em 0}
svg{max-width:100%;height:auto}pre{background:#f3f6f9;padding:1em;overflow:auto;font-size:12px}
details summary{cursor:pointer;font-weight:600}
"""


def write_html(report: Report, path: Path) -> None:
    """Write the page of ``report``; it needs no network and no other file."""
    path.write_text(html_page(report), encoding="utf-8")


def html_page(report: Report) -> str:
    """The page as text."""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(report.title)}</title>",
        f"<style>{_STYLE}</style><h1>{escape(report.title)}</h1>",
        *(f"<p class='note'>{escape(note)}</p>" for note in report.notes),
        _tiles(report),
        "<h2>Models</h2>",
        _models(report),
        _errors(report.all),
        *(f"<h2>{escape(title)}</h2>{svg}" for title, plot in PLOTS if (svg := plot(report))),
        "<h2>How to repeat it</h2><details><summary>Settings</summary><pre>",
        escape(json.dumps(report.settings, indent=1, default=str)),
        "</pre></details></html>",
    ]
    return "\n".join(parts)


def _tiles(report: Report) -> str:
    met = report.all.attainment
    tiles = [
        (_percent(met.both), "goodput: met TTFT and TPOT"),
        (_percent(met.ttft), "met the TTFT objective"),
        (_percent(met.tpot), "met the TPOT objective"),
        (f"{met.requests:,}", "requests"),
        (f"{sum(report.all.errors.values()):,}", "failed"),
        (f"{report.requests_per_s:.2f}/s", "requests"),
        (f"{report.output_tokens_per_s:,.0f}/s", "output tokens"),
        (f"{report.span_s:,.0f} s", "long"),
    ]
    if report.lag_s is not None:
        tiles.append((f"{report.lag_s.at(99.0) * 1000:.1f} ms", "send lag, P99"))
    return (
        "<div class='tiles'>"
        + "".join(f"<div class='tile'><b>{a}</b><span>{b}</span></div>" for a, b in tiles)
        + "</div>"
    )


def _models(report: Report) -> str:
    head = (
        "model", "requests", "failed", "goodput", "TTFT met", "TPOT met", "TTFT SLO", "P50", "P95", "P99",
        "TPOT SLO", "P50", "P95", "P99", "tokens in", "tokens out",
    )  # fmt: skip
    rows = [_row(group) for group in (report.all, *report.models)]
    table = "<table><tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>" + "".join(rows) + "</table>"
    return f"<div class='wide'>{table}</div>"


def _row(group: Group) -> str:
    met: Attainment = group.attainment
    cells = [
        escape(group.name) or "(unnamed)",
        f"{met.requests:,}",
        f"{sum(group.errors.values()):,}",
        *(_percent(value) for value in (met.both, met.ttft, met.tpot)),
        _seconds(group.slo_ttft_s),
        *_three(group.ttft_s),
        _seconds(group.slo_tpot_s),
        *_three(group.tpot_s),
        f"{group.prompt_tokens:,}",
        f"{group.output_tokens:,}",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _errors(group: Group) -> str:
    if not group.errors:
        return ""
    items = "".join(f"<tr><td>{escape(kind)}</td><td>{count:,}</td></tr>" for kind, count in group.errors.items())
    return f"<h2>Failures</h2><table><tr><th>kind</th><th>requests</th></tr>{items}</table>"


def _three(values: Distribution | None) -> list[str]:
    return ["-"] * 3 if values is None else [_seconds(values.at(p)) for p in (50.0, 95.0, 99.0)]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"
