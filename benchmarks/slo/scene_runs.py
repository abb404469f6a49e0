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

ASKED = "asked.json"
"""In a run's folder once it is finished: what was run."""


@dataclass(frozen=True)
class SceneRun:
    """A side of a scene, once. Repeats draw other arrivals; both sides of a repeat get the same."""

    scene: Scene
    label: str
    repeat: int
    time: float = 1.0
    rate: float = 1.0

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


def runs_of(scenes: list[Scene], repeats: int, time: float, rate: float, control: bool) -> list[SceneRun]:
    """The controls, once each; then the scenes, runs that may share a server together."""
    found = [SceneRun(scene, CONTROL, 0, time, rate) for scene in scenes] if control else []
    for scene in scenes:
        pairs = [(label, repeat) for repeat in range(repeats) for label in scene.variants]
        if scene.pinned:
            pairs.sort(key=lambda pair: list(scene.variants).index(pair[0]))
        found += [SceneRun(scene, label, repeat, time, rate) for label, repeat in pairs]
    return found


class Runner:
    """Runs scenes live, or in the simulator where ``measured`` says what this machine's devices do."""

    def __init__(self, models: Path, out: Path, measured: Path | None = None) -> None:
        self._models, self._out, self._measured = models, out, measured
        self._server: Server | None = None
        self._serves: tuple[str, str] | None = None

    def run(self, spec: SceneRun) -> Report:
        """The report of ``spec``; what an earlier call left there of the same catalog and arrivals is used again."""
        folder, content = self._out / spec.folder, spec.content(self._models)
        rows = rows_of(spec.scene, spec.repeat, spec.time, spec.rate)
        asked = msgspec.json.encode({"catalog": content, "rows": rows, "told": self._measured is not None})
        done, same = folder / "report.json", folder / ASKED
        if done.exists() and same.exists() and same.read_bytes() == asked:
            return read_report(done)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        trace = folder / "trace.parquet"
        write_trace(trace, rows, TraceInfo({"scene": spec.scene.name, "seed": spec.repeat}))
        if self._measured is not None:
            report = foretell(trace, spec.scene.names, content, self._measured, folder)
        else:
            report = self._live(spec, trace, content, folder)
        same.write_bytes(asked)
        return report

    def close(self, failed: bool = False) -> None:
        """Stop the server; its logs are kept when something ``failed``."""
        server, self._server, self._serves = self._server, None, None
        if server is not None:
            server.__exit__(RuntimeError if failed else None, None, None)

    def _live(self, spec: SceneRun, trace: Path, content: dict[str, Any], folder: Path) -> Report:
        scene, load_average = spec.scene, os.getloadavg()[0]
        try:
            server = self._server_for(spec, content, folder)
            first = {name: round(server.ask(name), 3) for name in scene.names}
            options = ReplayOptions(
                trace=trace, url=server.url, objectives={load.model: load.slo for load in scene.loads},
                timeout_s=120.0, seed=spec.repeat,
                tokenizers={name: self._models / kind_of(name) for name in scene.names},
            )  # fmt: skip
            watcher = Watcher(server.url, server.admin_key)
            facts = {
                "catalog": content, "start_s": server.started_s, "first_s": first, "load_average": load_average,
                "rate": spec.rate,
            }  # fmt: skip
            watched = watcher if watcher.available() else None
            title = f"{scene.name}: {spec.label}, repeat {spec.repeat}"
            outcome = run_replay(make_plan(options), folder, title=title, watcher=watched, facts=facts)
            if outcome.interrupted:
                raise KeyboardInterrupt
            return outcome.report
        except BaseException:
            self.close(failed=True)
            raise

    def _server_for(self, spec: SceneRun, content: dict[str, Any], folder: Path) -> Server:
        """A fresh server; but the last one, idle again, where no model can have moved on it."""
        serves = (spec.scene.name, spec.label)
        file = write_catalog(folder / "catalog.yaml", content)
        if self._server is not None and self._serves == serves and spec.scene.pinned:
            self._server.settle(unload=False)
            return self._server
        self.close()
        server = Server(file)
        server.__enter__()
        self._server, self._serves = server, serves
        return server
