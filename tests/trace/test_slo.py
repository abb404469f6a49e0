"""The comparison's own arithmetic: grids, catalogs, medians, where 99% ends."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.slo.compare import main
from benchmarks.slo.fleet import base_trace, catalog, kind_of, model_names, policy_section, run_steps, write_catalog
from benchmarks.slo.plots import ablation_bars, figure_7
from benchmarks.slo.scene_list import SCENES, Scene
from benchmarks.slo.scene_plots import FIGURES
from benchmarks.slo.spec import Grid, RunSpec, Setup
from benchmarks.slo.summary import Point, curves, highest_rate, judged, lowest_scale, markdown
from prism.config.catalog import load_catalog
from prism.trace.files import open_trace
from prism.trace.replay.output import RecordWriter
from prism.trace.replay.plan import Objective, SendPlan
from prism.trace.report import Report, RequestRecord, Sample, Timeline
from prism.trace.report_build import build_report
from prism.trace.steps import apply_steps

SETUP = Setup(Path("demo-models"), seconds=60.0)


def point(x: float, ttft: float) -> Point:
    return Point(x, (ttft, ttft, ttft), (1.0, 1.0, 1.0), (ttft, ttft, ttft), 0.0, 1.0, 1)


def report(met: int, of: int) -> Report:
    records = [
        RequestRecord(
            row=i, model=f"m{i % 2}", arrival_s=float(i), prompt_tokens=1, output_tokens=2,
            ttft_s=0.1 if i < met else 9.0, tpot_s=0.01, e2e_s=0.2, slo_ttft_s=1.0, slo_tpot_s=1.0,
        )
        for i in range(of)
    ]  # fmt: skip
    samples = [
        Sample(t_s=float(t), queued={"m0": t}, mapped_bytes={"host:0": t}, model_bytes={"m0": t}) for t in range(3)
    ]
    return build_report(records, kind="replay", title="t", settings={}, timeline=Timeline(samples=samples))


@pytest.mark.parametrize(
    ("shares", "rate"),
    [
        ([1.0, 1.0, 0.98], 3.0),
        ([1.0, 0.99, 0.9], 2.0),
        ([0.9, 1.0], None),
        ([1.0, 1.0], 2.0),
        ([], None),
    ],
)
def test_highest_rate_is_interpolated(shares: list[float], rate: float | None) -> None:
    curve = [point(float(x), share) for x, share in zip((1, 2, 4), shares, strict=False)]
    assert highest_rate(curve) == (None if rate is None else pytest.approx(rate))


def test_lowest_scale_needs_all_larger_ones_too() -> None:
    assert lowest_scale([point(1, 0.5), point(2, 0.99), point(3, 1.0)]) == 2
    assert lowest_scale([point(1, 1.0), point(2, 0.5)]) is None


def test_tables_have_medians_and_spread(tmp_path: Path) -> None:
    results = [
        (RunSpec("rate", "arena", policy, rate, 5.0, 2, repeat), report(met, 100))
        for policy in ("prism", "static")
        for rate in (1.0, 2.0)
        for repeat, met in enumerate((100, 90, 98))
    ]
    results += [(RunSpec("ablation", "arena", "prism", 1.0, 5.0, 2, 0, "without admission", {}), report(50, 100))]
    found = curves(results)
    assert found[("rate", "arena", "prism")][0].ttft == pytest.approx((0.98, 0.90, 1.0))
    text = markdown(results)
    assert "98.0 (90.0-100.0) / 100.0" in text
    assert "| prism without admission | 50.0 |" in text
    figure_7(found, tmp_path / "7.svg")
    ablation_bars(found, tmp_path / "a.svg")
    assert (tmp_path / "7.svg").read_text().startswith("<svg")


def test_every_run_of_the_grid_has_its_place() -> None:
    runs = list(Grid(repeats=2).runs(SETUP))
    assert len({(r.experiment, r.folder) for r in runs}) == len(runs)
    assert len({r.folder for r in runs}) < len(runs)  # the base point belongs to every experiment and is run once
    assert {r.x for r in runs if r.experiment == "scale"} == set(Grid().scales)


@pytest.mark.parametrize("name", ["hyperbolic", "arena"])
def test_base_traces_fit_the_models(tmp_path: Path, name: str) -> None:
    rows = list(open_trace(base_trace(name, SETUP, tmp_path)).rows())
    assert {r.model for r in rows} <= set(model_names(SETUP))
    assert max(r.prompt_tokens or 0 for r in rows) <= SETUP.most_prompt
    spec = RunSpec("rate", name, "prism", 2.0, 5.0, 2, 0)
    window = list(apply_steps(iter(rows), run_steps(spec, SETUP)))
    assert window
    assert window[-1].arrival_s < SETUP.seconds + 5.0


@pytest.mark.parametrize("policy", ["prism", "muxserve", "static", "qlm"])
def test_catalogs_are_valid(tmp_path: Path, policy: str) -> None:
    trace = base_trace("hyperbolic", SETUP, tmp_path)
    spec = RunSpec("rate", "hyperbolic", policy, 1.0, 5.0, 3, 0, switches={"admission": "fcfs"})
    objectives = {name: Objective(0.5, 0.05) for name in model_names(SETUP)}
    content = catalog(model_names(SETUP), SETUP, objectives, 3, policy_section(spec, trace, SETUP))
    loaded = load_catalog(write_catalog(tmp_path / "c.yaml", content))
    assert [m.name for m in loaded.models] == model_names(SETUP)
    assert loaded.models[0].slo.ttft_s == pytest.approx(0.5)
    assert loaded.policy.settings().cluster.policy == policy
    assert {kind_of(m.name) for m in loaded.models} == {"demo-llama", "demo-qwen3", "demo-stablelm"}


def test_a_failed_run_does_not_cost_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def __init__(self, *_: object) -> None:
            pass

        def run(self, spec: RunSpec, folder: Path) -> Report:
            if spec.policy == "static":
                raise RuntimeError("no memory")
            return report(99, 100)

        def close(self) -> None:
            pass

    monkeypatch.setattr("benchmarks.slo.compare.LiveRunner", Runner)
    monkeypatch.setattr("benchmarks.slo.compare.make_models", lambda folder: None)
    slo = tmp_path / "slo.json"
    slo.write_text('{"models": {"m0": {"ttft_s": 0.1, "tpot_s": 0.01}}}')
    assert main(["--out", str(tmp_path / "o"), "--slo", str(slo), "--policies", "prism,static", "--quick"]) == 1
    text = (tmp_path / "o" / "results.md").read_text()
    assert "prism" in text
    assert "static" not in text


@pytest.mark.parametrize("scene", SCENES, ids=lambda s: s.name)
def test_scenes_draw_their_figures(tmp_path: Path, scene: Scene) -> None:
    plan = SendPlan(
        trace="t", trace_sha256="", steps=[], block_tokens=1, url="http://x", endpoint="chat", models={}, prompts={},
        objectives={},
    )  # fmt: skip
    writer = RecordWriter(tmp_path / "records.jsonl", plan)
    writer.add(RequestRecord(row=0, model="m0", arrival_s=1.0, prompt_tokens=1, output_tokens=5, e2e_s=2.0))
    writer.close()
    figure = tmp_path / "f.svg"
    runs = {"a": [(report(5, 10), tmp_path), (report(7, 10), tmp_path)], "b": [(report(9, 10), tmp_path)]}
    FIGURES[scene.name](runs, figure)
    assert figure.read_text().startswith("<svg")


def test_policies_that_ignore_objectives_are_run_once_for_all_scales() -> None:
    def at(policy: str, scale: float) -> RunSpec:
        return RunSpec("scale", "arena", policy, 1.0, scale, 2, 0)

    assert at("static", 10.0).measured(5.0).folder == at("static", 5.0).folder
    assert at("static", 11.0).measured(5.0).scale == 11.0  # reports are not judged by this factor
    assert at("prism", 10.0).measured(5.0).scale == 10.0
    loose = judged(report(50, 100), 50.0)
    assert report(50, 100).all.attainment.ttft == 0.5
    assert loose.all.attainment.ttft == 1.0


def test_runs_on_one_server_come_together_and_a_repeat_is_finished_first() -> None:
    runs = Grid(repeats=2, ablations=False).runs(SETUP)
    assert [r.repeat for r in runs] == sorted(r.repeat for r in runs)
    servers = [r.server for r in runs if r.repeat == 0]
    changes = sum(a != b for a, b in itertools.pairwise(servers))
    assert changes + 1 == len(set(servers)) == 6  # muxserve and static have a map for each trace
