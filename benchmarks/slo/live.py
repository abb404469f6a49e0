"""Runs against real engines: calibration of each model alone, and one run of the grid."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.slo.fleet import (
    base_trace,
    catalog,
    kind_of,
    model_names,
    policy_section,
    run_steps,
    trace_source,
    write_catalog,
)
from benchmarks.slo.pauses import held_s, note
from benchmarks.slo.server import Server
from benchmarks.slo.spec import SCALE_FREE, RunSpec, Setup
from prism.trace.replay.calibrate import objective_of, write_objectives
from prism.trace.replay.plan import Objective, read_objectives
from prism.trace.replay.planning import ReplayOptions, make_plan
from prism.trace.replay.run import run_replay
from prism.trace.replay.watch import Watcher
from prism.trace.report import Report
from prism.trace.steps import Step

CALIBRATION_REQUESTS = 60
CALIBRATION_TIME = 1.0
"""Of the compressed trace."""


def calibrate(setup: Setup, traces: tuple[str, ...], folder: Path) -> dict[str, Objective]:
    """P95 TTFT and TPOT of each kind of model alone on a device of its own, under the workload of its most popular
    model in the first trace; kept in ``folder/slo.json``. The paper calibrates model by model; models of one kind are
    the same here, and get the same objective."""
    path = folder / "slo.json"
    if path.exists():
        return read_objectives(path)
    trace = base_trace(traces[0], setup, folder)
    found: dict[str, Objective] = {}
    for name in model_names(setup):
        twin = next((other for other in found if kind_of(other) == kind_of(name)), None)
        found[name] = found[twin] if twin else _alone(name, setup, trace, folder / f"alone-{name}")
    write_objectives(path, found, {"setup": setup.facts()})
    return found


def _alone(name: str, setup: Setup, trace: Path, folder: Path) -> Objective:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = write_catalog(folder / "catalog.yaml", catalog([name], setup, {}, 1, {"name": "prism"}))
    with Server(file) as server:
        server.ask(name)
        steps: list[Step] = [{"step": "only", "models": [name]}, {"step": "time", "factor": CALIBRATION_TIME}]
        options = ReplayOptions(
            trace=trace, url=server.url, steps=steps, limit=CALIBRATION_REQUESTS,
            tokenizers=_tokenizers([name], setup), timeout_s=120.0,
        )  # fmt: skip
        outcome = run_replay(make_plan(options), folder / "replay", title=f"{name} alone")
    return objective_of(outcome.report, name)


class LiveRunner:
    """Runs points on real engines. Points that differ only in load and objectives share a server. Between two of them
    it becomes idle, gets the objectives by reloading its catalog, lets every model leave where the policy loads on
    demand, and is asked for each model once: so each point begins in the same state, except for what the schedulers
    have learnt (rates of the last minute, idle intervals, activation times), as in service."""

    def __init__(self, setup: Setup, objectives: dict[str, Objective], out: Path) -> None:
        self._setup, self._objectives, self._out = setup, objectives, out
        self._server: Server | None = None
        self._serves: tuple[object, ...] = ()
        self._facts: dict[str, object] = {}

    def run(self, spec: RunSpec, folder: Path) -> Report:
        """One point. The folder keeps catalog, records and report; a failure stops the server."""
        setup, trace = self._setup, base_trace(spec.trace, self._setup, self._out)
        scaled = {name: objective.scaled(spec.scale) for name, objective in self._objectives.items()}
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left would be resumed on another server
        folder.mkdir(parents=True)
        title = f"{spec.label}: {spec.trace}, rate x{spec.rate:g}, SLO x{spec.scale:g}, {spec.devices} devices"
        try:
            server = self._server_for(spec, scaled, trace, folder)
            options = ReplayOptions(
                trace=trace, url=server.url, steps=run_steps(spec, setup), objectives=scaled,
                tokenizers=_tokenizers(model_names(setup), setup), seed=spec.repeat, timeout_s=120.0,
            )  # fmt: skip
            watcher = Watcher(server.url, server.admin_key)
            watched = watcher if watcher.available() else None
            plan = make_plan(options)
            facts = {**self._facts, "trace_source": trace_source(spec.trace, self._out)}
            before_s = held_s(server.url)
            report = run_replay(plan, folder, title=title, watcher=watched, facts=facts).report
            note(folder, held_s(server.url) - before_s)
            return report
        except BaseException:
            self.close(failed=True)
            raise

    def close(self, failed: bool = False) -> None:
        """Stop the server; its logs are kept when something ``failed``."""
        server, self._server, self._serves = self._server, None, ()
        if server is not None:
            server.catalog.unlink(missing_ok=True)
            server.__exit__(RuntimeError if failed else None, None, None)

    def _server_for(self, spec: RunSpec, scaled: dict[str, Objective], trace: Path, folder: Path) -> Server:
        """The server of ``spec`` in its first state."""
        names = model_names(self._setup)
        content = catalog(names, self._setup, scaled, spec.devices, policy_section(spec, trace, self._setup))
        write_catalog(folder / "catalog.yaml", content)
        if self._server is not None and self._serves == spec.server:
            server = self._server
            server.settle(unload=spec.policy not in SCALE_FREE)
            write_catalog(server.catalog, content)
            server.command("reload")
        else:
            self.close()
            server = Server(write_catalog(self._out / f"{os.getpid()}.yaml", content))
            server.__enter__()
            self._server, self._serves = server, spec.server
        first = {name: round(server.ask(name), 3) for name in names}
        self._facts = {"setup": self._setup.facts(), "catalog": content, "start_s": server.started_s, "first_s": first}
        return server


def _tokenizers(names: list[str], setup: Setup) -> dict[str, Path]:
    return {name: setup.models_folder / kind_of(name) for name in names}
