"""Reports count as they say: failures miss, single tokens have no TPOT to miss, distributions are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.errors import InvalidValue
from prism.trace.gaps import bin_middle_s, gap_bin, histogram, merge
from prism.trace.report import (
    PERCENTILES,
    Report,
    RequestRecord,
    Residence,
    Sample,
    Timeline,
    read_report,
    write_report,
)
from prism.trace.report_build import attainment, build_report, distribution
from prism.trace.report_html import html_page
from prism.trace.report_plots import PLOTS


def record(index: int = 0, **changes: Any) -> RequestRecord:
    given_values: dict[str, Any] = {
        "row": index, "model": "a", "arrival_s": float(index), "prompt_tokens": 10, "output_tokens": 5, "ttft_s": 0.1,
        "tpot_s": 0.01, "e2e_s": 0.14, "slo_ttft_s": 0.2, "slo_tpot_s": 0.02,
    }  # fmt: skip
    return RequestRecord(**{**given_values, **changes})


def report_of(records: list[RequestRecord], **changes: Any) -> Report:
    return build_report(records, kind="sim", title="<test>", settings={"seed": 1}, sent=False, **changes)


@pytest.mark.parametrize(
    ("changes", "ttft", "tpot"),
    [
        ({}, True, True),
        ({"ttft_s": 0.3}, False, True),
        ({"tpot_s": 0.03}, True, False),
        ({"error": "http_500"}, False, False),
        ({"ttft_s": None}, False, True),
        ({"tpot_s": None, "output_tokens": 1}, True, True),
        ({"slo_ttft_s": None, "slo_tpot_s": None, "ttft_s": 99.0}, True, True),
    ],
)
def test_what_meets_an_objective(changes: dict[str, Any], ttft: bool, tpot: bool) -> None:
    one = record(**changes)
    assert (one.met_ttft(), one.met_tpot()) == (ttft, tpot)
    assert attainment([one]).both == float(ttft and tpot)


@given(
    st.lists(
        st.builds(
            record,
            st.integers(0, 600),
            ttft_s=st.none() | st.floats(0, 1),
            tpot_s=st.none() | st.floats(0, 0.1),
            error=st.sampled_from(["", "", "timeout"]),
            model=st.sampled_from("abc"),
        ),
        max_size=40,
    )
)
def test_parts_make_the_whole(records: list[RequestRecord]) -> None:
    report = report_of(records)
    assert report.all.attainment.requests == len(records)
    assert sum(g.attainment.requests for g in report.models) == len(records)
    assert sum(w.all.requests for w in report.windows if w.all) == len(records)
    met = sum(g.attainment.ttft * g.attainment.requests for g in report.models)
    assert met == pytest.approx(report.all.attainment.ttft * len(records))
    by_scale = [point.attainment.both for point in report.by_scale]
    assert by_scale == sorted(by_scale)
    for group in (report.all, *report.models):
        assert group.attainment.both <= min(group.attainment.ttft, group.attainment.tpot) + 1e-12


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
def test_distribution_is_numpys(values: list[float]) -> None:
    found = distribution(values)
    assert found is not None
    assert found.at(50.0) == pytest.approx(float(np.percentile(values, 50)))
    assert found.at(99.9) == pytest.approx(float(np.percentile(values, 99.9)))
    assert len(found.values) == len(PERCENTILES)
    assert distribution([]) is None


@given(st.floats(1e-5, 1e3))
def test_gap_bins_are_five_percent_wide(gap_s: float) -> None:
    assert bin_middle_s(gap_bin(gap_s)) == pytest.approx(gap_s, rel=0.06)


def test_gap_histograms_merge_and_keep_percentiles() -> None:
    gaps = np.random.default_rng(0).lognormal(-4, 1, 5000)
    halves = histogram(gaps[:2000]), histogram(gaps[2000:])
    assert merge(halves) == histogram(gaps)
    found = report_of([record(0, gaps=halves[0]), record(1, gaps=halves[1])]).all.gap_s
    assert found is not None
    assert found.count == 5000
    for percentile in (50.0, 95.0, 99.0):
        assert found.at(percentile) == pytest.approx(float(np.percentile(gaps, percentile)), rel=0.07)


TIMELINE = Timeline(
    samples=[
        Sample(t_s=float(t), queued={"a": t}, running={"a": 1}, mapped_bytes={"host:0": t << 20}, model_bytes={"a": 1})
        for t in range(5)
    ],
    residences=[Residence(model="a", device="host:0", start_s=0.0, ready_s=1.0, end_s=3.0, reason="<request>")],
    device_bytes={"host:0": 8 << 20},
)


def test_json_round_trip_and_versions(tmp_path: Path) -> None:
    report = report_of([record(i, gaps={3: 2}) for i in range(20)], timeline=TIMELINE, notes=["slow"])
    path = tmp_path / "r.json"
    write_report(report, path)
    assert read_report(path) == report
    assert report.model("a").attainment.requests == 20
    with pytest.raises(InvalidValue, match="choices: a"):
        report.model("b")
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 99'))
    with pytest.raises(InvalidValue, match="version"):
        read_report(path)
    path.write_text("{}")
    with pytest.raises(InvalidValue, match="is not a report"):
        read_report(path)


def test_page_is_whole_and_escaped() -> None:
    records = [record(i, model="x<y" if i % 2 else "a", error="timeout" if i == 3 else "") for i in range(30)]
    report = report_of([*records, record(40, gaps={90: 2})], timeline=TIMELINE, notes=["a <note>"])
    page = html_page(report)
    for title, _ in PLOTS:
        assert f"<h2>{title}</h2>" in page
    assert page.count("<svg") == len(PLOTS)
    assert "&lt;test&gt;" in page
    assert "a &lt;note&gt;" in page
    assert "x&lt;y" in page
    assert "x<y" not in page
    assert "<script" not in page
    for outside in ('src="http', "href='http", "@import", "url(http"):
        assert outside not in page


def test_page_fits_and_its_letters_can_be_read() -> None:
    """The table is in a box that scrolls by itself; no letter is smaller than nine points in a picture of 756."""
    names = ["meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"]
    records = [record(i, model=names[i % 2]) for i in range(30)]
    page = html_page(report_of(records, timeline=TIMELINE))
    assert page.index("<div class='wide'><table>") < page.index("TTFT met") < page.index("</table></div>")
    assert ".wide{overflow-x:auto}" in page
    sizes = [float(size) for size in re.findall(r"<text [^>]*?(?:font-size: |font: )([0-9.]+)px", page)]
    assert len(sizes) > 50 and min(sizes) >= 7.0, "superscripts of 10 pt"
    legend = [float(s) for s in re.findall(r'style="font-size: ([0-9.]+)px[^>]*>(?:meta-llama|deepseek)', page)]
    assert legend and min(legend) >= 9.0


def test_empty_run_has_a_page_too() -> None:
    report = report_of([])
    assert report.windows == []
    assert "How to repeat it" in html_page(report)
