"""The scenes: both sides get the same requests, catalogs are valid, what is there is not run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.slo import scenes
from benchmarks.slo.fleet import write_catalog
from benchmarks.slo.scene_list import CONTROL, SCENES, Scene, rows_of
from benchmarks.slo.scene_runs import Runner, SceneRun, runs_of
from benchmarks.slo.scene_table import spread
from prism.config.catalog import load_catalog
from prism.trace.replay.output import RecordWriter
from prism.trace.replay.plan import SendPlan
from prism.trace.report import Report, RequestRecord, write_report
from prism.trace.report_build import build_report


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_rows_come_in_order_and_repeats_differ(scene: Scene) -> None:
    rows = rows_of(scene, seed=1)
    assert rows == sorted(rows, key=lambda r: r.arrival_s)
    assert rows == rows_of(scene, seed=1) != rows_of(scene, seed=2)
    assert max(row.arrival_s for row in rows_of(scene, 1, time=0.5)) <= scene.seconds / 2


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_catalogs_are_valid_and_sides_differ_in_one_thing(tmp_path: Path, scene: Scene) -> None:
    found = {}
    for label in (*scene.variants, CONTROL):
        content = SceneRun(scene, label, 0).content(Path("demo-models"))
        catalog = load_catalog(write_catalog(tmp_path / "catalog.yaml", content))
        assert [model.name for model in catalog.models] == scene.names
        found[label] = catalog
    first, second = (found[label].policy.settings() for label in scene.variants)
    assert first != second
    assert found[CONTROL].policy == found[next(iter(scene.variants))].policy
    assert (first.gpu == second.gpu) == (scene.name != "admission")
    assert (first.cluster == second.cluster) == (scene.name == "admission")


def test_controls_come_first_and_runs_on_one_server_together() -> None:
    runs = runs_of(list(SCENES), 2, 1.0, 1.0, control=True)
    assert len({run.folder for run in runs}) == len(runs)
    of_scene = {scene.name: [(r.label, r.repeat) for r in runs[3:] if r.scene is scene] for scene in SCENES}
    assert of_scene["memory"] == [("elastic", 0), ("elastic", 1), ("fixed shares", 0), ("fixed shares", 1)]
    assert [repeat for _, repeat in of_scene["placement"]] == [0, 0, 1, 1]
    assert [run.label for run in runs[:3]] == [CONTROL] * 3


def test_spread_shows_least_and_most_where_they_differ() -> None:
    assert spread([1.0, 3.0, 2.0], 1) == "2.0 (1.0-3.0)"
    assert spread([100.0, 100.0], 1) == "100.0"
    assert spread([], 1) == "-"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs that were played, instead of on a server."""
    found: list[str] = []

    def live(runner: Runner, spec: SceneRun, trace: Path, content: object, folder: Path) -> Report:
        found.append(spec.folder)
        if spec.label == "without":
            raise RuntimeError("no memory")
        records = [
            RequestRecord(
                row=i, model=name, arrival_s=float(i), prompt_tokens=1, output_tokens=2, ttft_s=0.1, e2e_s=0.2
            )
            for i, name in enumerate(spec.scene.names)
        ]
        plan = SendPlan(
            trace="t", trace_sha256="", steps=[], block_tokens=1, url="http://x", endpoint="chat", models={},
            prompts={}, objectives={},
        )  # fmt: skip
        writer = RecordWriter(folder / "records.jsonl", plan)
        for record in records:
            writer.add(record)
        writer.close()
        report = build_report(records, kind="replay", title="t", settings={"load_average": 0.5})
        write_report(report, folder / "report.json")
        return report

    monkeypatch.setattr(Runner, "_live", live)
    monkeypatch.setattr(scenes, "make_models", lambda folder: None)
    return found


def test_an_interrupted_comparison_goes_on_and_a_failed_run_does_not_cost_the_others(
    tmp_path: Path, played: list[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert scenes.main([*out, "--repeats", "1", "--only", "placement"]) == 1
    assert played == ["placement/ample_memory-0", "placement/global_scheduler-0", "placement/without-0"]
    text = (tmp_path / "scenes.md").read_text()
    assert "| global scheduler | m1 |" in text
    assert "| without |" not in text
    assert (tmp_path / "figure10.svg").exists()
    played.clear()
    assert scenes.main([*out, "--repeats", "2"]) == 1
    assert "placement/global_scheduler-0" not in played
    assert {"placement/without-0", "placement/global_scheduler-1", "memory/elastic-0"} <= set(played)
    played.clear()
    assert scenes.main([*out, "--repeats", "2", "--summarize-only"]) == 0
    assert not played


def test_a_run_of_another_scene_is_not_taken_for_this_one(tmp_path: Path, played: list[str]) -> None:
    for time in ("1", "0.5", "0.5"):
        scenes.main(["--out", str(tmp_path), "--repeats", "1", "--only", "memory", "--no-control", "--time", time])
    assert played == ["memory/elastic-0", "memory/fixed_shares-0"] * 2
