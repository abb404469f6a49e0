"""What do elastic memory, the global scheduler and the device's scheduler do, each seen in a small scene of its own?

    python -m benchmarks.slo.scenes --out scenes [--only memory] [--repeats 1]

The scenes of the Prism paper's Figures 8, 10 and 11, on real engines and virtual devices:

- ``memory`` (Figure 8): two models on one device; after 20 s the first falls silent and the second surges. With elastic
  memory the second's KV cache grows into what the first has left; with fixed shares (``static``) it cannot.
- ``placement`` (Figure 10): four models on two devices, of which two are hot. With the global scheduler the hot ones do
  not stay together.
- ``admission`` (Figure 11): one device; the first model gets long prompts with loose objectives, the second short ones
  with tight ones. With the device's scheduler the second does not wait behind the first.

Writes one figure per scene (``memory.svg``, ...), all reports, and ``scenes.md``. Results: docs/results/replay.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.slo.fleet import catalog, kind_of, make_models, write_catalog
from benchmarks.slo.scene_plots import FIGURES
from benchmarks.slo.server import Server, exit_on_sigterm
from benchmarks.slo.spec import Setup
from prism.trace.files import write_trace
from prism.trace.replay.plan import Objective
from prism.trace.replay.planning import ReplayOptions, make_plan
from prism.trace.replay.run import run_replay
from prism.trace.replay.watch import Watcher
from prism.trace.report import Report, read_report
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of one model: ``(from_s, to_s, requests per second)`` pieces, with fixed lengths."""

    model: str
    pieces: tuple[tuple[float, float, float], ...]
    prompt: int
    output: int
    slo: Objective


@dataclass(frozen=True)
class Scene:
    """Loads, devices, and what is compared."""

    name: str
    loads: tuple[Load, ...]
    devices: int
    device_mib: int
    variants: dict[str, dict[str, Any]]


SCENES = (
    Scene(
        "memory",
        (
            Load("m0", ((0, 20, 4.0), (20, 45, 0.2)), 200, 60, Objective(1.0, 0.1)),
            Load("m1", ((0, 20, 0.3), (20, 45, 8.0)), 200, 60, Objective(1.0, 0.1)),
        ),
        1,
        56,
        {"prism": {"name": "prism"}, "fixed shares": {"name": "static"}},
    ),
    Scene(
        "placement",
        (
            Load("m0", ((0, 40, 3.0),), 150, 40, Objective(0.5, 0.05)),
            Load("m1", ((0, 40, 0.2),), 150, 40, Objective(0.5, 0.05)),
            Load("m2", ((0, 40, 3.0),), 150, 40, Objective(0.5, 0.05)),
            Load("m3", ((0, 40, 0.2),), 150, 40, Objective(0.5, 0.05)),
        ),
        2,
        52,
        {"with global scheduler": {"name": "prism"}, "without": {"name": "prism", "global_scheduler": False}},
    ),
    Scene(
        "admission",
        (
            Load("m0", ((0, 40, 8.0),), 700, 12, Objective(5.0, 0.2)),
            Load("m1", ((0, 40, 2.0),), 20, 8, Objective(0.15, 0.1)),
        ),
        1,
        44,
        {"with device scheduler": {"name": "prism"}, "without": {"name": "prism", "admission": "fcfs"}},
    ),
)


def rows_of(scene: Scene, seed: int) -> list[TraceRow]:
    """The scene's trace."""
    rows = []
    for index, load in enumerate(scene.loads):
        rng = np.random.default_rng([seed, index])
        for start_s, end_s, rate in load.pieces:
            count = rng.poisson(rate * (end_s - start_s))
            times = np.sort(rng.uniform(start_s, end_s, count))
            rows += [TraceRow(float(t), load.model, load.prompt, load.output) for t in times]
    return sorted(rows, key=lambda row: row.arrival_s)


def run_variant(scene: Scene, policy: dict[str, Any], seed: int, models: Path, folder: Path) -> Report:
    """One run of the scene on a server of its own; each model is asked once before."""
    done = folder / "report.json"
    if done.exists():
        return read_report(done)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    setup = Setup(models, models=len(scene.loads), device_mib=scene.device_mib)
    names = [load.model for load in scene.loads]
    objectives = {load.model: load.slo for load in scene.loads}
    write_trace(folder / "trace.parquet", rows_of(scene, seed), TraceInfo({"scene": scene.name, "seed": seed}))
    longest = max(load.prompt + load.output for load in scene.loads)
    content = catalog(names, setup, objectives, scene.devices, {"min_kv_tokens": longest, **policy})
    with Server(write_catalog(folder / "catalog.yaml", content)) as server:
        for name in names:
            server.ask(name)
        options = ReplayOptions(
            trace=folder / "trace.parquet", url=server.url, objectives=objectives, timeout_s=120.0, seed=seed,
            tokenizers={name: models / kind_of(name) for name in names},
        )  # fmt: skip
        watcher = Watcher(server.url, server.admin_key)
        watched = watcher if watcher.available() else None
        plan, title = make_plan(options), f"{scene.name}: {policy}"
        return run_replay(plan, folder, title=title, watcher=watched, facts={"catalog": content}).report


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, draw the figures, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slo.scenes", description="Three scenes of the paper.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models-folder", type=Path, default=Path("demo-models"))
    parser.add_argument("--only", choices=[scene.name for scene in SCENES])
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args(argv)
    make_models(options.models_folder)
    lines = ["| scene | variant | model | TTFT met | TPOT met | TTFT P95 | tokens/s |", "|---|---|---|---|---|---|---|"]
    for scene in SCENES:
        if options.only in (None, scene.name):
            lines += _scene(scene, options)
    text = "\n".join(lines) + "\n"
    (options.out / "scenes.md").write_text(text)
    print(text)
    return 0


def _scene(scene: Scene, options: argparse.Namespace) -> list[str]:
    found: dict[str, list[tuple[Report, Path]]] = {}
    for label, policy in scene.variants.items():
        for repeat in range(options.repeats):
            folder = options.out / scene.name / f"{label.replace(' ', '_')}-{repeat}"
            report = run_variant(scene, policy, repeat, options.models_folder, folder)
            found.setdefault(label, []).append((report, folder))
            print(f"{scene.name} {label} {repeat}: TTFT {report.all.attainment.ttft:.3f}", file=sys.stderr, flush=True)
    FIGURES[scene.name]({label: runs[0] for label, runs in found.items()}, options.out / f"{scene.name}.svg")
    return [
        _line(scene.name, label, load.model, [report for report, _ in runs])
        for label, runs in found.items()
        for load in scene.loads
    ]


def _line(scene: str, label: str, model: str, reports: Sequence[Report]) -> str:
    """Medians over repeats for one model."""
    groups = [report.model(model) for report in reports]
    ttft = median(100 * g.attainment.ttft for g in groups)
    tpot = median(100 * g.attainment.tpot for g in groups)
    p95 = [g.ttft_s.at(95.0) for g in groups if g.ttft_s is not None]
    tokens = median(g.output_tokens / r.span_s for g, r in zip(groups, reports, strict=True))
    shown = f"{1000 * median(p95):.0f} ms" if p95 else "-"
    return f"| {scene} | {label} | {model} | {ttft:.1f}% | {tpot:.1f}% | {shown} | {tokens:.0f} |"


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
