"""The live runs foretold: the same catalogs, traces and virtual devices in the simulator, calibrated on this machine by
benchmarks/sim/validate.py. For choosing loads and memory before a long live run, and for comparing afterwards."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from benchmarks.slo.fleet import base_trace, catalog, kind_of, model_names, policy_section, run_steps, write_catalog
from benchmarks.slo.spec import RunSpec, Setup
from prism.sim.calibration import CalibrationFile
from prism.sim.inputs import Inputs
from prism.sim.run import simulate as run_simulation
from prism.trace.files import open_trace, write_trace
from prism.trace.replay.calibrate import objective_of, write_objectives
from prism.trace.replay.plan import Objective, read_objectives
from prism.trace.report import Report, write_report
from prism.trace.steps import Step, apply_steps, info_after


def calibrate(setup: Setup, traces: tuple[str, ...], folder: Path, measured: Path) -> dict[str, Objective]:
    """P95 TTFT and TPOT of each kind of model alone on a device, under the workload of its most popular model."""
    path = folder / "slo.json"
    if path.exists():
        return read_objectives(path)
    trace, found = base_trace(traces[0], setup, folder), dict[str, Objective]()
    for name in model_names(setup):
        twin = next((other for other in found if kind_of(other) == kind_of(name)), None)
        if twin is None:
            content = catalog([name], setup, {}, 1, {"name": "prism"})
            steps: list[Step] = [{"step": "only", "models": [name]}]
            report = simulate(trace, steps, content, measured, folder / f"alone-{name}")
            found[name] = objective_of(report, name)
        else:
            found[name] = found[twin]
    write_objectives(path, found, {"setup": setup.facts(), "modelled": True})
    return found


class ModelledRunner:
    """Runs points in the simulator, on the virtual devices of this machine as ``measured`` knows them."""

    def __init__(self, setup: Setup, objectives: dict[str, Objective], out: Path, measured: Path) -> None:
        self._setup, self._objectives, self._out, self._measured = setup, objectives, out, measured

    def run(self, spec: RunSpec, folder: Path) -> Report:
        """One point."""
        trace, names = base_trace(spec.trace, self._setup, self._out), model_names(self._setup)
        scaled = {name: objective.scaled(spec.scale) for name, objective in self._objectives.items()}
        content = catalog(names, self._setup, scaled, spec.devices, policy_section(spec, trace, self._setup))
        return simulate(trace, run_steps(spec, self._setup), content, self._measured, folder)

    def close(self) -> None:
        """Nothing to stop."""


def simulate(source: Path, steps: list[Step], content: dict[str, object], measured: Path, folder: Path) -> Report:
    """``content`` is a live catalog; ``measured`` the folder of a validation (``table.json``, ``cluster.yaml``)."""
    folder.mkdir(parents=True, exist_ok=True)
    opened, trace = open_trace(source), folder / "trace.parquet"
    write_trace(trace, apply_steps(opened.rows(), steps), info_after(opened.info, steps))
    report = run_simulation(inputs(trace, content, measured, folder).spec()).report
    write_report(report, folder / "report.json")
    return report


def inputs(trace: Path, content: dict[str, object], measured: Path, folder: Path) -> Inputs:
    """The live catalog ``content`` on the devices that ``measured`` knows; writes both into ``folder``."""
    file, cluster = write_catalog(folder / "catalog.yaml", content), folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump(_cluster(content, measured, folder)))
    return Inputs(trace, cluster, file)


def _cluster(content: dict[str, object], measured: Path, folder: Path) -> dict[str, object]:
    """The calibrated devices in the number and size of ``content``; each model has the step times of its kind."""
    devices, models = content["devices"], content["models"]
    assert isinstance(devices, list)
    assert isinstance(models, list)
    table = msgspec.json.decode((measured / "table.json").read_bytes(), type=CalibrationFile)
    samples = [
        msgspec.structs.replace(sample, model=model["name"])
        for model in models
        for sample in table.samples
        if sample.model == Path(model["path"]).name
    ]
    (folder / "table.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(table, samples=samples)))
    made: dict[str, object] = yaml.safe_load((measured / "cluster.yaml").read_text())
    groups = made["groups"]
    assert isinstance(groups, list)
    groups[0] |= {"gpus_per_node": len(devices), "memory": devices[0]["memory"]}
    return made
