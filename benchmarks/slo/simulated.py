"""The same runs through ``prism sim``: modelled H100s and models of 1B to 8B, the production schedulers, no engines.

The traces keep their own lengths. Objectives are calibrated as in the live runs: each model alone on a GPU of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.slo.fleet import base_trace, model_names, policy_section, run_steps, slo_of, write_catalog
from benchmarks.slo.spec import RunSpec, Setup
from prism.trace.files import open_trace, write_trace
from prism.trace.replay.calibrate import objective_of, write_objectives
from prism.trace.replay.plan import Objective, read_objectives
from prism.trace.report import Report, read_report
from prism.trace.steps import Step, apply_steps, info_after

KINDS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
)
GPU = "H100"


def calibrate(setup: Setup, traces: tuple[str, ...], folder: Path) -> dict[str, Objective]:
    """P95 TTFT and TPOT of each model alone on a GPU, over the whole first trace; kept in ``folder/slo.json``."""
    path = folder / "slo.json"
    if path.exists():
        return read_objectives(path)
    trace, found = base_trace(traces[0], setup, folder), dict[str, Objective]()
    for name in model_names(setup):
        steps: list[Step] = [{"step": "only", "models": [name]}]
        report = _simulate(trace, steps, [name], {}, 1, {"name": "prism"}, folder / f"alone-{name}")
        found[name] = objective_of(report, name)
    write_objectives(path, found, {"setup": setup.facts(), "gpu": GPU})
    return found


class SimRunner:
    """Runs points in the simulator, with as many GPUs in one machine as the point says."""

    def __init__(self, setup: Setup, objectives: dict[str, Objective], out: Path) -> None:
        self._setup, self._objectives, self._out = setup, objectives, out

    def run(self, spec: RunSpec, folder: Path) -> Report:
        """One point."""
        trace = base_trace(spec.trace, self._setup, self._out)
        scaled = {name: objective.scaled(spec.scale) for name, objective in self._objectives.items()}
        policy = {k: v for k, v in policy_section(spec, trace, self._setup).items() if k != "min_kv_tokens"}
        names = model_names(self._setup)
        return _simulate(trace, run_steps(spec, self._setup), names, scaled, spec.devices, policy, folder)

    def close(self) -> None:
        """Nothing to stop."""


def _simulate(
    source: Path,
    steps: list[Step],
    names: list[str],
    objectives: dict[str, Objective],
    devices: int,
    policy: dict[str, Any],
    folder: Path,
) -> Report:
    folder.mkdir(parents=True, exist_ok=True)
    opened, trace = open_trace(source), folder / "trace.parquet"
    write_trace(trace, apply_steps(opened.rows(), steps), info_after(opened.info, steps))
    models = [{"name": n, "path": KINDS[int(n[1:]) % len(KINDS)], **slo_of(objectives.get(n))} for n in names]
    file = write_catalog(folder / "catalog.yaml", {"models": models, "policy": policy})
    cluster = folder / "cluster.yaml"
    cluster.write_text(yaml.safe_dump({"groups": [{"gpu": GPU, "nodes": 1, "gpus_per_node": devices}]}))
    command = [
        sys.executable, "-m", "prism.cli.main", "sim", "run", str(trace), "--cluster", str(cluster),
        "--catalog", str(file), "--out", str(folder / "report.json"),
    ]  # fmt: skip
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"prism sim ended with code {done.returncode}: {done.stderr[-800:]}")
    return read_report(folder / "report.json")
