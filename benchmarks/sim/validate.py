"""Does the simulator predict live replays it has not seen?

On this machine's virtual devices (real SGLang engines, real memory caps): one calibration run, then two traces at three
rates under ``prism`` and one rival. Every run is made twice: live (prism-serve + prism replay) and simulated (same
trace, same catalog, the calibrated CPU devices). Goals: TTFT attainment within 5 points, median TTFT within 15%, P99
within 35%, activations within 10%. KV memory and tokens are compared with what the engines themselves count.

    python benchmarks/sim/validate.py --work DIR [--seconds 75]          # about 23 minutes
    python benchmarks/sim/validate.py --work DIR --simulate-only         # the same live runs against a changed model

It needs a quiet machine (two cores carry server, engines and load generator). What is in DIR already (the calibration,
live runs) is not measured again, so that an interrupted validation goes on where it was. Every live run has a server of
its own, whose models are asked once and have left again when the trace begins. The last result is in
docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml
from validation import Outcome, missed, misses, outcome, table

from prism.sim.calibrate import activation_s, calibrate, fit_sharing, plan_run, slowdowns
from prism.sim.calibration import fit
from prism.sim.inputs import Inputs
from prism.sim.run import simulate
from prism.trace.files import open_trace, write_trace
from prism.trace.generate import generate, preset
from prism.trace.replay.output import read_records
from prism.trace.report import Report, read_report
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from prism.trace.transform import scale_lengths
from tests.e2e.server import DEMOS, REPO, Server, catalog, complete, start

MEMORY = "32MiB"
TRACES = ("hyperbolic", "arena")
RATES = (1.0, 2.0, 4.0)
POLICIES = ("prism", "muxserve")
MOST_PROMPT, MOST_OUTPUT = 400, 64
KEEP_ALIVE_S = 4.0
"""So that models come and go (under ``prism``) although all three fit into the devices."""
SLO = {"ttft": "300ms", "tpot": "50ms"}
COUNTED = {"prompt": "prism_prompt_tokens", "generated": "prism_generated_tokens", "cached": "prism_cached_tokens"}


class Bench:
    """Runs live and simulated systems in one folder."""

    def __init__(self, work: Path, models: Path, seconds: float) -> None:
        self.work, self.models, self.seconds = work, models, seconds
        work.mkdir(parents=True, exist_ok=True)

    def catalog(self, policy: str, rates: dict[str, float] | None = None) -> Path:
        """The catalog of live and simulated runs alike. Prompts never repeat, so engines keep no prefixes: what they
        have mapped is what their requests use."""
        args = {"dtype": "float32", "disable_radix_cache": True}
        keep = {"keep_alive": f"{KEEP_ALIVE_S:g}s"} if policy == "prism" else {}
        made = catalog(self.models.resolve(), memory=MEMORY, slo=SLO, engine_args=args, **keep)
        expected = {"expected_rates": rates} if rates else {}
        made["policy"] = {"name": policy, "min_kv_tokens": MOST_PROMPT + MOST_OUTPUT, **expected}
        file = self.work / f"catalog-{policy}.yaml"
        file.write_text(yaml.safe_dump(made))
        return file

    @contextmanager
    def server(self, name: str, file: Path) -> Iterator[Server]:
        running = start(self.work / "servers" / name, yaml.safe_load(file.read_text()))
        try:
            yield running
        finally:
            running.stop()

    def replay(self, server: Server, trace: Path, out: Path, file: Path) -> Report:
        key = (server.state / "admin.key").read_text().strip()
        command = [sys.executable, "-m", "prism.cli.main", "replay", str(trace), "--url", server.url]
        command += ["--admin-key", key, "--out", str(out), "--catalog", str(file), "--ignore-eos", "--json"]
        subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        return read_report(out / "report.json")

    # --- calibration ---

    def calibrate(self) -> str:
        """Measure step times, contention and activations unless that was done; (re)makes table and cluster file."""
        plan, out = plan_run(DEMOS, keep_alive_s=KEEP_ALIVE_S), self.work / "calibration-run"
        if not (out / "report.json").exists():
            trace = self.work / "calibration.jsonl"
            write_trace(trace, iter(plan.rows), TraceInfo())
            file = self.catalog("prism")
            with self.server("calibration", file) as server:
                warm_up(server)
                self.replay(server, trace, out, file)
        records = list(read_records(out / "records.jsonl"))
        slower = slowdowns(records, plan)
        share, background = fit_sharing(slower, os.cpu_count() or 1)
        alone = (r for r in records if r.row in plan.alone)
        machine = f"{os.cpu_count()} cores, virtual devices"
        made = calibrate(alone, "cpu", machine, {"engine_share": share})
        (self.work / "table.json").write_bytes(msgspec.json.encode(made))
        wake_s = activation_s(records, plan)
        front_s = fit(made).request_s
        self.cluster(wake_s, front_s, background)
        return (
            f"activation {1e3 * wake_s:.0f} ms, a request {1e3 * front_s:.1f} ms beside its steps, "
            f"slower together {slower}: share {share:.2f}, rest {background:.2f}"
        )

    def cluster(self, relayout_s: float, front_s: float, background: float) -> None:
        group = {
            "gpu": "cpu", "nodes": 1, "gpus_per_node": 2, "memory": MEMORY, "shared_compute": True,
            "background_load": background,
        }  # fmt: skip
        took = {"front": front_s, "deliver": 0.0, "ready": 0.0, "relayout": relayout_s}
        timing = {key: f"{1e3 * seconds:.1f}ms" for key, seconds in took.items()}
        engine = {"chunk_tokens": 2048, "max_running": 64}
        data = {"groups": [group], "timing": timing, "engine": engine, "calibration": "table.json"}
        (self.work / "cluster.yaml").write_text(yaml.safe_dump(data))

    # --- one comparison ---

    def live(self, trace_name: str, rate: float, policy: str) -> Outcome:
        """The live run, made unless it is there."""
        name = f"{trace_name}-{rate:g}-{policy}"
        out = self.work / "live" / name
        trace, file = self._inputs(trace_name, rate, policy)
        if not (out / "counters.json").exists():
            with self.server(name, file) as server:
                warm_up(server)
                before = counters(server)
                self.replay(server, trace, out, file)
                after = counters(server)
            (out / "counters.json").write_text(json.dumps({k: after[k] - before[k] for k in after}))
        counted = json.loads((out / "counters.json").read_text())
        return outcome(read_report(out / "report.json"), counted["activations"], counted)

    def simulated(self, trace_name: str, rate: float, policy: str) -> Outcome:
        trace, file = self._inputs(trace_name, rate, policy)
        result = simulate(Inputs(trace, self.work / "cluster.yaml", file, sample=True).spec())
        activations = sum(1 for r in result.report.timeline.residences if r.start_s > 0)
        tokens = {"prompt": result.report.all.prompt_tokens, "generated": result.report.all.output_tokens, "cached": 0}
        return outcome(result.report, activations, tokens)

    def _inputs(self, trace_name: str, rate: float, policy: str) -> tuple[Path, Path]:
        trace = self.work / f"{trace_name}-{rate:g}.jsonl"
        if not trace.exists():  # live runs that are there were made with it
            write_trace(trace, iter(self.rows(trace_name, rate)), TraceInfo())
        rows = list(open_trace(trace).rows())
        rates = {name: sum(row.model == name for row in rows) / self.seconds for name in DEMOS}
        return trace, self.catalog(policy, rates if policy == "muxserve" else None)

    def rows(self, trace_name: str, rate: float) -> list[TraceRow]:
        spec = replace(preset(trace_name), models=len(DEMOS), names=DEMOS, rate_rps=rate, duration_s=self.seconds)
        return list(scale_lengths(generate(spec, 11), most_prompt=MOST_PROMPT, most_output=MOST_OUTPUT))


def warm_up(server: Server) -> None:
    """Every model is loaded once (files are read, its image is written); under ``prism`` all have left afterwards."""
    for model in DEMOS:
        complete(server.client, model, "the time of day", 4)
    time.sleep(KEEP_ALIVE_S + 2.0)


def counters(server: Server) -> dict[str, int]:
    """The server's counters of activations and tokens."""
    text = httpx.get(f"{server.url}/metrics", timeout=30.0).text
    found = {key: _total(text, name) for key, name in COUNTED.items()}
    return {**found, "activations": _total(text, "prism_activations", 'outcome="ok"')}


def _total(text: str, name: str, having: str = "") -> int:
    lines = re.findall(rf"^{name}_total(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
    return int(sum(float(value) for labels, value in lines if having in labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, default=REPO / "demo-models")
    parser.add_argument("--work", type=Path, default=Path("validate-work"))
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--simulate-only", action="store_true", help="Compare the live runs that are in --work.")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--rates", default=",".join(f"{r:g}" for r in RATES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    args = parser.parse_args()
    bench = Bench(args.work.resolve(), args.models, args.seconds)
    print("calibrated:", bench.calibrate(), flush=True)
    rows: list[tuple[str, Outcome, Outcome]] = []
    for trace in args.traces.split(","):
        for rate in map(float, args.rates.split(",")):
            for policy in args.policies.split(","):
                there = (bench.work / "live" / f"{trace}-{rate:g}-{policy}" / "counters.json").exists()
                if args.simulate_only and not there:
                    continue
                pair = bench.live(trace, rate, policy), bench.simulated(trace, rate, policy)
                rows.append((f"{trace} {rate:g}/s {policy}", *pair))
                print(rows[-1][0], "off by", _shown(misses(*pair)), "-", missed(misses(*pair)) or "ok", flush=True)
    save(bench.work / "validation.json", rows)
    print(table(rows))
    print(
        f"{sum(not missed(misses(a, b)) for _, a, b in rows)} of {len(rows)} runs within the goals (live / simulated)"
    )


def _shown(off: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in off.items()}


def save(path: Path, rows: list[tuple[str, Outcome, Outcome]]) -> None:
    found: list[dict[str, Any]] = [
        {"run": name, "live": asdict(live), "simulated": asdict(sim), "off": misses(live, sim)}
        for name, live, sim in rows
    ]
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
