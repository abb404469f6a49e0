"""One run of a scene: on a server of its own, or foretold."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.slo.fleet import catalog, kind_of, write_catalog
from benchmarks.slo.scene_list import CONTROL, Scene, rows_of
from benchmarks.slo.scene_told import foretell
from benchmarks.slo.server import Server
from benchmarks.slo.spec import Setup
from prism.trace.files import write_trace
from prism.trace.replay.planning import ReplayOptions, make_plan
from prism.trace.replay.run import run_replay
from prism.trace.replay.watch import Watcher
from prism.trace.report import Report, read_report
from prism.trace.schema import TraceInfo


@dataclass(frozen=True)
class SceneRun:
    """A side of a scene, once. Repeats draw other arrivals; both sides of a repeat get the same."""

    scene: Scene
    label: str
    repeat: int
    time: float = 1.0

    @property
    def folder(self) -> str:
        return f"{self.scene.name}/{self.label.replace(' ', '_')}-{self.repeat}"

    def content(self, models: Path) -> dict[str, Any]:
        """The catalog."""
        scene = self.scene
        mib = scene.ample_mib if self.label == CONTROL else scene.device_mib
        setup = Setup(models, models=len(scene.loads), device_mib=mib)
        objectives = {load.model: load.slo for load in scene.loads}
        made = catalog(scene.names, setup, objectives, scene.devices, scene.policy(self.label))
        if scene.pinned:
            made["models"] = [{**model, "pin": True} for model in made["models"]]
        return made


def runs_of(scenes: list[Scene], repeats: int, time: float, control: bool) -> list[SceneRun]:
    """All sides of one repeat before the next repeat; the controls, once each, at the end."""
    found = [SceneRun(s, label, r, time) for r in range(repeats) for s in scenes for label in s.variants]
    return found + ([SceneRun(scene, CONTROL, 0, time) for scene in scenes] if control else [])


def run(spec: SceneRun, models: Path, out: Path, measured: Path | None) -> Report:
    """The report of ``spec``; what ``out`` has of an earlier call with the same catalog and arrivals is used again."""
    folder, content = out / spec.folder, spec.content(models)
    rows = rows_of(spec.scene, spec.repeat, spec.time)
    asked = msgspec.json.encode({"catalog": content, "rows": rows, "told": measured is not None})
    done, same = folder / "report.json", folder / "asked.json"
    if done.exists() and same.exists() and same.read_bytes() == asked:
        return read_report(done)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trace = folder / "trace.parquet"
    write_trace(trace, rows, TraceInfo({"scene": spec.scene.name, "seed": spec.repeat}))
    if measured is not None:
        report = foretell(trace, spec.scene.names, content, measured, folder)
    else:
        report = _live(spec, trace, content, models, folder)
    same.write_bytes(asked)
    return report


def _live(spec: SceneRun, trace: Path, content: dict[str, Any], models: Path, folder: Path) -> Report:
    scene = spec.scene
    load_average = os.getloadavg()[0]
    with Server(write_catalog(folder / "catalog.yaml", content)) as server:
        first = {name: round(server.ask(name), 3) for name in scene.names}
        options = ReplayOptions(
            trace=trace, url=server.url, objectives={load.model: load.slo for load in scene.loads}, timeout_s=120.0,
            seed=spec.repeat, tokenizers={name: models / kind_of(name) for name in scene.names},
        )  # fmt: skip
        watcher = Watcher(server.url, server.admin_key)
        facts = {"catalog": content, "start_s": server.started_s, "first_s": first, "load_average": load_average}
        watched = watcher if watcher.available() else None
        title = f"{scene.name}: {spec.label}, repeat {spec.repeat}"
        return run_replay(make_plan(options), folder, title=title, watcher=watched, facts=facts).report
