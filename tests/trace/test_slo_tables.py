"""What a comparison says beyond attainment: rates over the rivals', causes of misses, memory; and from its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slo.compare import main
from benchmarks.slo.finished import grid_of, setup_of
from benchmarks.slo.fleet import policy_section
from benchmarks.slo.margins import Reach, margins, ratio, reach
from benchmarks.slo.misses import cause, causes
from benchmarks.slo.pauses import note, pauses
from benchmarks.slo.resources import resources
from benchmarks.slo.spec import Grid, RunSpec, Setup
from benchmarks.slo.summary import Point, curves
from prism.trace.replay.calibrate import write_objectives
from prism.trace.replay.output import RecordWriter
from prism.trace.replay.plan import Objective, SendPlan
from prism.trace.report import Report, RequestRecord, Residence, Sample, Timeline, write_report
from prism.trace.report_build import build_report

TIMELINE = Timeline(
    samples=[
        Sample(
            t_s=float(t), queued={"m0": 2 if t in (4, 5) else 0}, mapped_bytes={"d": (10 + t) << 20},
            model_bytes={"m0": t << 20},
        )
        for t in range(9)
    ],
    residences=[
        Residence(model="m0", device="d", start_s=-0.1, ready_s=-0.1, end_s=6.0),
        Residence(model="m0", device="d", start_s=7.0, ready_s=8.0),
    ],
    device_bytes={"d": 32 << 20},
)  # fmt: skip


def record(row: int, at_s: float, ttft_s: float = 0.1, error: str = "") -> RequestRecord:
    return RequestRecord(
        row=row, model="m0", arrival_s=at_s, prompt_tokens=1, output_tokens=2, ttft_s=None if error else ttft_s,
        tpot_s=0.01, e2e_s=0.2, slo_ttft_s=0.5, slo_tpot_s=1.0, error=error,
    )  # fmt: skip


RECORDS = [
    record(0, 1.0),
    record(1, 1.2, 0.9),
    record(2, 4.1, 0.6),
    record(3, 7.1, 0.6),
    record(4, 2.0, error="http_503"),
]


def report(records: list[RequestRecord]) -> Report:
    settings = {"machine": {"cores": 2, "memory_bytes": 1 << 34, "python": "3.11", "sglang": "1", "revision": "abc"}}
    return build_report(records, kind="replay", title="t", settings=settings, timeline=TIMELINE)


def curve(*shares: float) -> list[Point]:
    return [
        Point(float(x), (share,) * 3, (1.0,) * 3, (share - 0.01,) * 3, 0.0, 1.0, 1)
        for x, share in enumerate(shares, start=1)
    ]


def test_how_far_a_policy_holds_a_target() -> None:
    assert reach(curve(1.0, 0.99, 0.97), 0.98, "ttft") == Reach(2.5)
    assert reach(curve(1.0, 0.99), 0.99, "ttft") == Reach(2.0, beyond=True)
    assert reach(curve(0.9, 1.0), 0.99, "ttft") == Reach(1.0, below=True)
    assert reach(curve(1.0, 0.9, 1.0), 0.9, "ttft") == Reach(3.0, beyond=True)
    assert reach(curve(1.0, 0.9), 0.9) == Reach(1.9), "goodput, which is less, unless another is asked for"
    assert [str(Reach(1.5)), str(Reach(1.0, below=True)), str(Reach(2.0, beyond=True))] == [
        "x1.50",
        "< x1.00",
        ">= x2.00",
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (Reach(3.0), Reach(2.0), "1.50x"),
        (Reach(3.0), Reach(1.0, below=True), "> 3.00x"),
        (Reach(4.0, beyond=True), Reach(2.0), "> 2.00x"),
        (Reach(4.0, beyond=True), Reach(1.0, below=True), "> 4.00x"),
        (Reach(4.0, beyond=True), Reach(4.0, beyond=True), "-"),
        (Reach(1.0, below=True), Reach(1.0, below=True), "-"),
        (Reach(1.0, below=True), Reach(2.0), "< 0.50x"),
        (Reach(2.0), Reach(4.0, beyond=True), "< 0.50x"),
    ],
)
def test_ratios_say_when_they_are_bounds(ours: Reach, theirs: Reach, said: str) -> None:
    assert ratio(ours, theirs) == said


def test_the_table_of_rates_has_a_column_for_each_rival() -> None:
    found = {("rate", "arena", "prism"): curve(1.0, 1.0), ("rate", "arena", "static"): curve(0.5, 0.4)}
    assert "| arena | TTFT 99% | >= x2.00 | > 2.00x (< x1.00) |" in margins(found)
    assert margins({("rate", "arena", "prism"): curve(1.0)}) == ""


def test_causes_of_misses() -> None:
    assert [cause(r, TIMELINE) for r in RECORDS[1:]] == ["in its engine", "waiting", "not loaded", "failed"]
    assert cause(RECORDS[1], Timeline()) == "unknown"
    assert causes(report(RECORDS), RECORDS)["requests"] == 5


def test_memory_counts_only_while_requests_arrive() -> None:
    """Requests until 7.1 s in windows of a second: looks up to 8 s, and one activation after the start."""
    text = resources([(RunSpec("rate", "arena", "prism", 1.0, 5.0, 2, 0), report(RECORDS))], Setup(Path("m")))
    assert "| arena | prism | 32 | 14 | 18 | 4 | 1 |" in text


def test_a_finished_comparison_is_summarized_without_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.slo.compare.LiveRunner", None)  # nothing may be run
    setup = Setup(Path("demo-models"), base_scale=4.0, device_mib=99)
    write_objectives(tmp_path / "slo.json", {"m0": Objective(0.1, 0.1)}, {"setup": setup.facts()})
    plan = SendPlan(
        trace="t", trace_sha256="", steps=[], block_tokens=1, url="http://x", endpoint="chat", models={}, prompts={},
        objectives={},
    )  # fmt: skip
    specs = [RunSpec("rate", "arena", policy, rate, 4.0, 2, 0) for policy in ("prism", "static") for rate in (0.5, 1.0)]
    specs += [RunSpec("scale", "arena", "prism", 1.0, 8.0, 2, 0)]
    specs += [RunSpec("rate", "arena", "serverlessllm", 1.0, 4.0, 2, 0)]  # not one of the default's
    for spec in specs:
        folder = tmp_path / "runs" / spec.folder
        folder.mkdir(parents=True)
        if spec.policy == "static" and spec.rate == 0.5:
            continue  # under way: no report yet
        write_report(report(RECORDS), folder / "report.json")
        writer = RecordWriter(folder / "records.jsonl", plan)
        for one in RECORDS:
            writer.add(one)
        writer.close()
    assert setup_of(tmp_path, Setup(Path("demo-models"))) == setup
    grid = grid_of(tmp_path, setup)
    assert grid.policies == ("prism", "static", "serverlessllm")
    assert (grid.traces, grid.repeats, grid.ablations) == (("arena",), 1, False)
    assert (grid.rates, grid.scales, grid.devices) == ((0.5, 1.0), (4.0, 8.0), (2,))

    assert main(["--out", str(tmp_path), "--summarize-only"]) == 0
    text = (tmp_path / "results.md").read_text()
    assert text in capsys.readouterr().out
    for part in (
        "99 MiB",
        "2 cores, 16 GiB",
        "| static | - |",
        "over static",
        "| prism | x1 | 5 | 4 (80.0%) | 1 | 1 | 1 | 1 |",
    ):
        assert part in text
    assert (tmp_path / "figure7.svg").read_text().startswith("<svg")
    assert ("scale", "arena", "static") in curves(
        [(RunSpec("scale", "arena", "static", 1.0, 8.0, 2, 0), report(RECORDS))]
    )


def test_a_part_switched_off_may_be_run_over_whole_axes(tmp_path: Path) -> None:
    policies, setup = ("prism", "prism without pauses", "prism with pauses"), Setup(Path("demo-models"))
    runs = Grid(("arena",), policies, (0.5, 1.0), (), (2,), 1, ablations=False).runs(setup)
    assert {(r.label, r.rate) for r in runs} == {(policy, rate) for policy in policies for rate in (0.5, 1.0)}
    section = policy_section(next(r for r in runs if r.label == policies[1]), tmp_path, setup)
    assert (section["name"], section["longest_pause"]) == ("prism", "0s")
    for run in runs:
        folder = tmp_path / "runs" / run.folder
        folder.mkdir(parents=True)
        (folder / "report.json").touch()
    assert {r.folder for r in grid_of(tmp_path, setup).runs(setup)} == {r.folder for r in runs}


def test_how_long_engines_stood_still_is_summed_over_repeats(tmp_path: Path) -> None:
    specs = [RunSpec("rate", "arena", policy, 1.0, 5.0, 2, i) for policy in ("prism", "static") for i in range(2)]
    for spec in specs:
        (tmp_path / spec.folder).mkdir()
        note(tmp_path / spec.folder, 0.0)
    assert pauses(specs, tmp_path) == ""
    note(tmp_path / specs[0].folder, 1.25)
    note(tmp_path / specs[1].folder, 2.0)
    assert "| arena | prism | 3.2 |" in pauses(specs, tmp_path)


def test_nothing_to_summarize_is_said(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no finished run"):
        main(["--out", str(tmp_path), "--summarize-only"])
