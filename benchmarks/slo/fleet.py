"""The models of a comparison, their traces and their catalogs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from benchmarks.slo.spec import RunSpec, Setup
from benchmarks.trace.originals import VARIABLE, find_original
from prism.core.errors import InvalidValue
from prism.trace.convert import sha256_of
from prism.trace.files import open_trace, write_trace
from prism.trace.generate import generate, preset
from prism.trace.replay.plan import Objective
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from prism.trace.steps import Step, apply_steps, count_models, info_after
from prism.trace.transform import fold

ROOT = Path(__file__).parents[2]
KINDS = ("demo-llama", "demo-qwen3", "demo-stablelm")
RECORDED = {"arena": "arena_prism_e2e_8m.parquet"}
"""Recorded traces, looked for as :mod:`benchmarks.trace.originals` says; without one, the generator's preset of the
same name takes its place, and every table and report says so."""


def model_names(setup: Setup) -> list[str]:
    return [f"m{index}" for index in range(setup.models)]


def make_models(folder: Path) -> None:
    """Make the demo models in ``folder`` unless they are there."""
    if not all((folder / kind / "config.json").exists() for kind in KINDS):
        script = ROOT / "scripts" / "make_demo_models.py"
        subprocess.run([sys.executable, str(script), str(folder)], check=True, stdout=subprocess.DEVNULL)


def kind_of(name: str) -> str:
    """Models take the three demo models' sizes in turn."""
    return KINDS[int(name.removeprefix("m")) % len(KINDS)]


def base_trace(name: str, setup: Setup, folder: Path) -> Path:
    """The trace called ``name`` for the set-up's models, compressed, at rate 1 and full length, as a file in
    ``folder``."""
    path = folder / f"trace-{name}.parquet"
    if path.exists():
        _same_source(name, setup, path)
        return path
    rows, info = _source(name, setup)
    print(f"trace {name}: {described(info)}", file=sys.stderr, flush=True)
    listed = list(rows)
    counts = count_models(iter(listed))
    targets = model_names(setup)
    span_s = listed[-1].arrival_s / setup.compress
    steps: list[Step] = [
        {"step": "time", "factor": 1.0 / setup.compress},
        {"step": "rate", "factor": setup.base_rps * span_s / len(listed), "seed": setup.seed},
        {"step": "models", "names": fold(counts, targets[: len(counts)])},
        {"step": "fill", "table": "arena", "seed": setup.seed},
        {
            "step": "lengths",
            "prompt": setup.prompt_scale,
            "output": setup.output_scale,
            "most_prompt": setup.most_prompt,
            "most_output": setup.most_output,
        },
    ]
    write_trace(path, apply_steps(iter(listed), steps), info_after(info, steps))
    return path


def trace_source(name: str, folder: Path) -> str:
    """Where the trace called ``name`` in ``folder`` comes from, in words."""
    path = folder / f"trace-{name}.parquet"
    return described(open_trace(path).info) if path.exists() else "not made yet"


def described(info: TraceInfo) -> str:
    """``recorded`` or ``generated``, with the file or the preset and seed."""
    facts, parts = info.provenance, []
    if (file := facts.get("file") or facts.get("source")) is not None:
        parts.append(str(file) + (f", sha256 {facts['file_sha256'][:12]}" if "file_sha256" in facts else ""))
    if "generator" in facts:
        parts.append(f"preset {facts.get('preset', facts['generator'])}, seed {facts.get('seed')}")
    kind = "generated" if "generator" in facts else "recorded"
    return f"{kind} ({'; '.join(parts)})" if parts else kind


def _source(name: str, setup: Setup) -> tuple[Iterable[TraceRow], TraceInfo]:
    """The file given for ``name``, else the recorded trace where it is found, else the generator's preset."""
    wanted = RECORDED.get(name)
    file = setup.recorded.get(name) or (find_original(wanted) if wanted else None)
    if file is not None:
        trace = open_trace(file)
        facts = {**trace.info.provenance, "file": file.name, "file_sha256": sha256_of(file)}
        return trace.rows(), TraceInfo(facts, trace.info.block_tokens)
    spec = preset(name)
    if wanted:
        print(
            f"trace {name}: no {wanted} found; the generator's preset takes its place. To use a recorded trace: "
            f"--recorded {name}=FILE, or a folder in {VARIABLE}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return generate(spec, setup.seed), TraceInfo({"generator": "preset", "preset": name, "seed": setup.seed})


def _same_source(name: str, setup: Setup, path: Path) -> None:
    """Raise :class:`InvalidValue` when ``path``, made earlier, is not of the file that is given for it now."""
    given = setup.recorded.get(name)
    if given is not None and open_trace(path).info.provenance.get("file_sha256") != sha256_of(given):
        raise InvalidValue("recorded", f"{name}={given}", f"but {path} was made of another trace: use another --out")


def run_steps(spec: RunSpec, setup: Setup) -> list[Step]:
    """What a run does to the base trace: the window of its repeat at its rate."""
    start_s = setup.start_s + spec.repeat * setup.seconds
    window: Step = {"step": "window", "start_s": start_s, "end_s": start_s + setup.seconds}
    return [window, {"step": "rate", "factor": spec.rate, "seed": setup.seed + spec.repeat}]


def catalog(
    models: list[str], setup: Setup, objectives: dict[str, Objective], devices: int, policy: dict[str, Any]
) -> dict[str, Any]:
    """A catalog of ``models`` on virtual devices; the objectives are already scaled."""
    pace = {"pace": {"layer": f"{setup.layer_ms:g}ms"}} if setup.layer_ms else {}
    return {
        "devices": [{"id": f"host:{i}", "memory": f"{setup.device_mib}MiB", **pace} for i in range(devices)],
        "defaults": {"engine_args": {"dtype": "float32"}, "max_wait": "30s"},
        "models": [
            {"name": name, "path": str((setup.models_folder / kind_of(name)).resolve()), **slo_of(objectives.get(name))}
            for name in models
        ],
        "policy": policy,
        "engines": {"parked_per_device": 1, "max_per_device": max(8, len(models)), "threads": 1},
    }


def write_catalog(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def policy_section(spec: RunSpec, trace: Path, setup: Setup) -> dict[str, Any]:
    """The policy of a run. Every model keeps KV memory for its longest request, so that all policies can place all
    models. The rivals' offline inputs (expected rates) are the means of the trace they will serve windows of."""
    longest = setup.most_prompt + setup.most_output
    section: dict[str, Any] = {"name": spec.policy, "min_kv_tokens": longest, **spec.switches}
    if spec.policy in ("muxserve", "static"):
        rows = list(open_trace(trace).rows())
        counts, span_s = count_models(rows), rows[-1].arrival_s
        section["expected_rates"] = {name: round(count / span_s, 4) for name, count in counts.items()}
    return section


def slo_of(objective: Objective | None) -> dict[str, Any]:
    """The ``slo`` key of a model; nothing without objectives."""
    if objective is None or objective.ttft_s is None or objective.tpot_s is None:
        return {}
    return {"slo": {"ttft": f"{objective.ttft_s:.6f}s", "tpot": f"{objective.tpot_s:.6f}s"}}
