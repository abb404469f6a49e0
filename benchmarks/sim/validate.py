"""Does the simulator predict live replays it has not seen?

On this machine's virtual devices (real SGLang engines, real memory caps): one calibration run, then two traces at three
rates under ``prism`` and one rival. Every run is made twice: live (prism-serve + prism replay) and simulated (same
trace, same catalog, the calibrated CPU devices). Goals: TTFT attainment and goodput within 5 points, median TTFT and
median TPOT within 15%, P99 of TTFT within 35%, activations within 10% or one. KV memory and tokens are compared with
what the engines themselves count.

    python -m benchmarks.sim.validate --work DIR --seed 23               # about 29 minutes
    python -m benchmarks.sim.validate --work DIR --seed 23 --simulate-only  # the same live runs against a changed model

It needs a quiet machine (two cores carry server, engines and load generator). With ``--layer-ms 4`` devices are paced:
a step takes what is declared of it and not what the machine's cores take in that minute, so that the schedulers'
decisions are compared and not the host's speed. Another ``--seed`` draws traces that
nobody has seen. What is in DIR already (the calibration, live runs of the same seed and length) is not measured again,
so that an interrupted validation goes on where it was (``--begin-within 150`` begins no live run later than so many
seconds after the start, so that it can be made in pieces, with a further calibration in between: ``--calibrations 2``
in a later piece, see :mod:`benchmarks.sim.calibrations`); a run that fails does not stop the others. Every live run
has a server of its own, whose models are asked for some answers and have left again when the trace begins. The last
result is in docs/results/sim.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

from benchmarks.sim.calibrations import calibrated
from benchmarks.sim.validation import Outcome, Pair, missed, misses, outcome, summary, table
from benchmarks.sim.validation_runs import MOST_OUTPUT, MOST_PROMPT, POLICIES, RATES, TRACES, Draw, Run, runs
from benchmarks.slo.server import exit_on_sigterm
from prism.core.pace import DevicePace, LayerWork
from prism.obs.kernel import AUTOGROUPS_REMEDY, has_autogroups
from prism.sim.calibrate import TOGETHER_OUTPUT, plan_run
from prism.sim.calibration import fit
from prism.sim.inputs import Inputs
from prism.sim.run import simulate
from prism.trace.files import open_trace, write_trace
from prism.trace.replay.output import read_records
from prism.trace.report import Report, read_report
from prism.trace.schema import TraceInfo
from tests.e2e.server import DEMOS, REPO, Server, catalog, start
from tests.patience import PATIENCE_S

MEMORY = "32MiB"
KEEP_ALIVE_S = 4.0
"""So that models come and go (under ``prism``) although all three fit into the devices."""
SLO = {"ttft": "300ms", "tpot": "50ms"}
PACED_SLO = {"ttft": "300ms", "tpot": "25ms"}
"""Near what tokens take where two models share a device, so that goodput is put to the test, too."""
COUNTED = {"prompt": "prism_prompt_tokens", "generated": "prism_generated_tokens", "cached": "prism_cached_tokens"}


PACE = DevicePace(prefill_token_s=40e-6, decode_sequence_s=100e-6, decode_kv_token_s=0.2e-6)
"""Beside a layer's own time, where devices are paced (``--layer-ms``)."""


class Bench:
    """Runs live and simulated systems in one folder."""

    def __init__(self, work: Path, models: Path, layer_ms: float = 0.0) -> None:
        """``layer_ms``: what a layer takes on a device (declared; 0: what it takes)."""
        self.work, self.models = work, models
        self.pace = replace(PACE, layer_s=1e-3 * layer_ms) if layer_ms else None
        work.mkdir(parents=True, exist_ok=True)

    def catalog(self, policy: str, rates: dict[str, float] | None = None) -> Path:
        """The catalog of live and simulated runs alike. Prompts never repeat, so engines keep no prefixes: what they
        have mapped is what their requests use."""
        args = {"dtype": "float32", "disable_radix_cache": True}
        keep: dict[str, Any] = {"keep_alive": f"{KEEP_ALIVE_S:g}s"} if policy == "prism" else {}
        made = catalog(
            self.models.resolve(), memory=MEMORY, slo=PACED_SLO if self.pace else SLO, engine_args=args, **keep
        )
        expected = {"expected_rates": rates} if rates else {}
        if self.pace:
            made["devices"] = [device | {"pace": _section(self.pace)} for device in made["devices"]]
        made["policy"] = {"name": policy, "min_kv_tokens": MOST_PROMPT + MOST_OUTPUT, **expected}
        file = self.work / f"catalog-{policy}.yaml"
        file.write_text(yaml.safe_dump(made))
        return file

    @contextmanager
    def server(self, name: str, file: Path) -> Iterator[Server]:
        folder = self.work / "servers" / name
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was interrupted
        running = start(folder, yaml.safe_load(file.read_text()))
        try:
            yield running
        finally:
            running.stop()

    def replay(self, server: Server, trace: Path, out: Path, file: Path) -> Report:
        shutil.rmtree(out, ignore_errors=True)
        key = (server.state / "admin.key").read_text().strip()
        command = [sys.executable, "-m", "prism.cli.main", "replay", str(trace), "--url", server.url]
        command += ["--admin-key", key, "--out", str(out), "--catalog", str(file), "--ignore-eos", "--json"]
        subprocess.run(command, check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        return read_report(out / "report.json")

    # --- calibration ---

    def calibrate(self, times: int) -> str:
        """Measure step times, contention and activations until that was done so many ``times``; (re)makes table and
        cluster file of all that there are."""
        plans = [plan_run(DEMOS, self.pause_s(), KEEP_ALIVE_S, earlier) for earlier in (False, True)]
        trace = self.work / "calibration.jsonl"
        if not trace.exists():
            write_trace(trace, iter(plans[0].rows), TraceInfo())
        for number in range(1, times + 1):
            self._calibration_run(trace, self._calibration(number))
        rows = list(open_trace(trace).rows())
        fitting = [p for p in plans if list(p.rows) == rows]
        if not fitting:
            raise SystemExit(f"{trace} is another calibration than this version reads: use another folder")
        numbered = map(self._calibration, itertools.count(1))
        folders = list(itertools.takewhile(lambda folder: (folder / "report.json").exists(), numbered))
        found = calibrated(
            [list(read_records(f / "records.jsonl")) for f in folders],
            fitting[0],
            os.cpu_count() or 1,
            self.declared_s(),
        )
        (self.work / "table.json").write_bytes(msgspec.json.encode(found.table))
        front_s = fit(found.table).request_s
        took = {"relayout": found.build_s, "wake": found.wake_s, "front": front_s}
        self.cluster(took, found.background, found.crowding)
        return (
            f"{len(folders)} times: activation {1e3 * found.build_s:.0f} ms, {1e3 * found.wake_s:.0f} in an engine "
            f"that had the model, a request {1e3 * front_s:.1f} ms beside its steps, slower together {found.slower}: "
            f"share {found.share:.2f}, rest {found.background:.2f}, crowding {found.crowding:.2f}"
        )

    def declared_s(self) -> dict[str, float] | None:
        """What a token of an answer that is alone takes at least, by model; None where nothing is declared."""
        if self.pace is None:
            return None
        configs = {name: json.loads((self.models / name / "config.json").read_text()) for name in DEMOS}
        works = {name: LayerWork(layers=config["num_hidden_layers"], sequences=1) for name, config in configs.items()}
        return {name: self.pace.seconds(work) for name, work in works.items()}

    def pause_s(self) -> float:
        """Between two requests of a calibration that are alone: longer than the longest of them takes."""
        return max(1.0, 1.1 * TOGETHER_OUTPUT * max((self.declared_s() or {"": 0.0}).values()))

    def _calibration(self, number: int) -> Path:
        """Where the calibration of that number, from 1 on, stands."""
        return self.work / ("calibration-run" if number == 1 else f"calibration-run-{number}")

    def _calibration_run(self, trace: Path, out: Path) -> None:
        if not (out / "report.json").exists():
            file = self.catalog("prism")
            with self.server("calibration", file) as server:
                warm_up(server, DEMOS)
                self.replay(server, trace, out, file)

    def cluster(self, took: dict[str, float], background: float, crowding: float) -> None:
        group: dict[str, Any] = {"gpu": "cpu", "nodes": 1, "gpus_per_node": 2, "memory": MEMORY}
        if self.pace:
            group["pace"] = _section(self.pace)
        else:
            group |= {"shared_compute": True, "background_load": background}
            group |= {"cores": os.cpu_count() or 1, "crowding": crowding}
        timing = {key: f"{1e3 * seconds:.1f}ms" for key, seconds in {**took, "deliver": 0.0, "ready": 0.0}.items()}
        engine = {"chunk_tokens": 2048, "max_running": 64}
        data = {"groups": [group], "timing": timing, "engine": engine, "calibration": "table.json"}
        (self.work / "cluster.yaml").write_text(yaml.safe_dump(data))

    # --- one comparison ---

    def done(self, run: Run) -> bool:
        """The live run is there."""
        return (self.work / "live" / run.name / "counters.json").exists()

    def live(self, run: Run) -> Outcome:
        """The live run, made unless it is there."""
        out = self.work / "live" / run.name
        trace, file = self._inputs(run)
        if not self.done(run):
            with self.server(run.name, file) as server:
                warm_up(server, {row.model for row in open_trace(trace).rows()}, leave=run.policy == "prism")
                before = counters(server)
                self.replay(server, trace, out, file)
                after = counters(server)
            (out / "counters.json").write_text(json.dumps({k: after[k] - before[k] for k in after}))
        counted = json.loads((out / "counters.json").read_text())
        records = read_records(out / "records.jsonl")
        return outcome(read_report(out / "report.json"), counted["activations"], counted, records)

    def simulated(self, run: Run) -> Outcome:
        trace, file = self._inputs(run)
        start = "cold" if run.policy == "prism" else "warm"  # as the live server is left by its warm-up
        result = simulate(Inputs(trace, self.work / "cluster.yaml", file, sample=True, start=start).spec())
        activations = sum(1 for r in result.report.timeline.residences if r.start_s > 0)
        tokens = {"prompt": result.report.all.prompt_tokens, "generated": result.report.all.output_tokens, "cached": 0}
        return outcome(result.report, activations, tokens, result.world.recorder.records)

    def trace(self, draw: Draw) -> Path:
        trace = self.work / f"{draw.name}.jsonl"
        if not trace.exists():  # live runs that are there were made with it
            write_trace(trace, iter(draw.rows(DEMOS)), TraceInfo())
        return trace

    def _inputs(self, run: Run) -> tuple[Path, Path]:
        trace = self.trace(run.draw)
        rows = list(open_trace(trace).rows())
        rates = {name: sum(row.model == name for row in rows) / run.draw.seconds for name in DEMOS}
        return trace, self.catalog(run.policy, rates if run.policy == "muxserve" else None)


def _section(pace: DevicePace) -> dict[str, str]:
    """As catalogs and cluster files have it."""
    return {key.removesuffix("_s"): f"{1e6 * seconds:g}us" for key, seconds in asdict(pace).items()}


def warm_up(server: Server, models: Collection[str], leave: bool = True) -> None:
    """Each of ``models`` answers short prompts and the longest ones, streamed and over connections of their own: files
    are read, images written, and nothing in the run is the first of its kind (the first long prompt of an engine's
    process takes 30 to 70 ms more than later ones). ``leave``: then wait until all have left again. Models without a
    request in the run must not be among them: a fixed map has no place for those."""
    for tokens in (16, MOST_PROMPT, MOST_PROMPT):
        for model in sorted(models):
            body = {"model": model, "prompt": " the" * tokens, "max_tokens": 16, "temperature": 0}
            answer = httpx.post(
                f"{server.url}/v1/completions", json={**body, "ignore_eos": True, "stream": True}, timeout=PATIENCE_S
            )
            answer.raise_for_status()
            assert "[DONE]" in answer.text, answer.text
    for model in models if leave else ():
        server.wait_unloaded(model)
    time.sleep(1.0)


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
    parser.add_argument("--seed", type=int, default=11, help="Of the traces.")
    parser.add_argument("--seconds", type=float, help="Length of every run.  [default: by rate, 140 requests or more]")
    parser.add_argument("--simulate-only", action="store_true", help="Compare the live runs that are in --work.")
    parser.add_argument("--calibrations", type=int, default=1, help="Made until there are so many; all are used.")
    parser.add_argument("--layer-ms", type=float, default=0.0, help="Of a layer on a device: declared, not measured.")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--rates", default=",".join(f"{r:g}" for r in RATES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--begin-within", type=float, default=math.inf, help="Seconds in which live runs may begin.")
    args = parser.parse_args()
    began_s = time.monotonic()
    if has_autogroups() and not args.simulate_only:
        print(f"before measuring: {AUTOGROUPS_REMEDY} (docs/runbook.md)", file=sys.stderr, flush=True)
    bench = Bench(args.work.resolve(), args.models, args.layer_ms)
    print("calibrated:", bench.calibrate(args.calibrations), flush=True)
    rates = [float(rate) for rate in args.rates.split(",")]
    wanted = runs(args.traces.split(","), rates, args.policies.split(","), args.seconds, args.seed)
    rows: list[Pair] = []
    failed = 0
    for run in wanted:
        late = args.simulate_only or time.monotonic() - began_s > args.begin_within
        if late and not bench.done(run):
            continue
        try:
            live, modelled = bench.live(run), bench.simulated(run)
        except Exception:  # the others are worth having; the next call makes this one
            traceback.print_exc()
            failed += 1
            continue
        rows.append((run.title, live, modelled))
        print(run.title, "off by", _shown(misses(live, modelled)), "-", missed(live, modelled) or "ok", flush=True)
    if rows:
        save(bench.work / f"validation-seed{args.seed}.json", rows)
        print(f"{table(rows)}\n\n{summary(rows)}")
    if failed:
        raise SystemExit(f"{failed} runs failed")


def _shown(off: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in off.items()}


def save(path: Path, rows: list[Pair]) -> None:
    found: list[dict[str, Any]] = [
        {"run": name, "live": asdict(live), "simulated": asdict(sim), "off": misses(live, sim)}
        for name, live, sim in rows
    ]
    path.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    exit_on_sigterm()
    main()
