"""How much more load does Prism carry within its objectives than static partitioning, MuxServe++ and QLM?

    python -m benchmarks.slo.compare --out slo --no-ablations        # rates and scales (about an hour)
    python -m benchmarks.slo.compare --out slo                       # and the ablations (a quarter of an hour more)
    python -m benchmarks.slo.compare --out slo-quick --quick         # a small grid (minutes)
    python -m benchmarks.slo.compare --out slo-sim --backend sim     # modelled H100s instead of real engines (minutes)
    python -m benchmarks.slo.compare --out slo-told --measured DIR   # this machine's devices, modelled (minutes)
    python -m benchmarks.slo.compare --out slo --summarize-only      # the tables and figures again, without any run

Calibrates each model alone, then runs policies x {request rate, SLO scale, devices} and the ablations. Points that
differ only in load and objectives share a server, which is put back into its first state between them. ``static`` and
``muxserve`` never look at an objective: their points at other scales are one run judged anew; the others are run at
each. An interrupted comparison goes on where it was, and ``--begin-within 150`` begins no run later than so many
seconds after the start, so that it can be made in pieces; one repeat is finished before the next begins. ``--policies
"prism,prism without pauses"`` runs a part switched off over the whole axes, ``--layer-ms`` declares how long devices
take for a layer. Writes ``results.md`` (tables), ``figure7.svg``, ``ablations.svg`` and every run's own report and
page. The Arena trace is the recorded one where it is found or given (``--recorded arena=FILE``; see
:mod:`benchmarks.trace.originals`), else the generator's preset; ``results.md`` says which. Results:
docs/results/replay.md.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from benchmarks.slo import modelled, simulated
from benchmarks.slo.finished import grid_of, setup_of
from benchmarks.slo.fleet import make_models, trace_source
from benchmarks.slo.live import LiveRunner, calibrate
from benchmarks.slo.margins import margins
from benchmarks.slo.misses import misses
from benchmarks.slo.pauses import pauses
from benchmarks.slo.plots import ablation_bars, figure_7
from benchmarks.slo.resources import facts, resources
from benchmarks.slo.server import exit_on_sigterm
from benchmarks.slo.spec import POLICIES, Grid, RunSpec, Setup
from benchmarks.slo.summary import curves, judged, markdown
from prism.core.errors import InvalidValue, PrismError
from prism.obs.kernel import AUTOGROUPS_REMEDY, has_autogroups
from prism.trace.replay.plan import read_objectives
from prism.trace.report import Report, read_report

_NUMBERS = {
    "models": int, "device_mib": int, "seconds": float, "start_s": float, "seed": int, "base_rate": float,
    "base_scale": float, "base_devices": int, "prompt_scale": float, "output_scale": float, "most_prompt": int,
    "most_output": int, "compress": float, "base_rps": float, "layer_ms": float,
}  # fmt: skip


Results = list[tuple[RunSpec, Report]]


class Runner(Protocol):
    """What runs a point."""

    def run(self, spec: RunSpec, folder: Path) -> Report: ...

    def close(self) -> None: ...


def main(argv: list[str] | None = None) -> int:
    """Run what is missing and write tables and plots; returns 1 when a run failed."""
    options = _parser().parse_args(argv)
    out: Path = options.out
    setup = _setup(options)
    if options.summarize_only:
        setup = setup_of(out, setup)
        results = _finished(grid_of(out, setup).runs(setup), out, setup.base_scale)
        if not results:
            raise SystemExit(f"{out / 'runs'} holds no finished run")
        _write(results, setup, out)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    grid = _grid(options)
    if options.backend == "serve":
        if has_autogroups() and not options.measured:
            print(f"before measuring: {AUTOGROUPS_REMEDY} (docs/runbook.md)", file=sys.stderr, flush=True)
        make_models(setup.models_folder)
    runner = _runner(options, setup, grid)
    try:
        results, failed = _run_all(grid.runs(setup), out, runner, setup.base_scale, options.begin_within)
    finally:
        runner.close()
    _write(results, setup, out)
    return 1 if failed else 0


def _write(results: Results, setup: Setup, out: Path) -> None:
    """Tables and figures of ``results`` into ``out``."""
    found = curves(results)
    sources = {name: trace_source(name, out) for name in dict.fromkeys(spec.trace for spec, _ in results)}
    parts = (
        facts(results, setup, sources), markdown(results), margins(found), misses(results, out / "runs"),
        resources(results, setup), pauses((spec for spec, _ in results), out / "runs"),
    )  # fmt: skip
    text = "\n".join(part for part in parts if part)
    (out / "results.md").write_text(text)
    figure_7(found, out / "figure7.svg")
    ablation_bars(found, out / "ablations.svg")
    print(text)


def _finished(runs: list[RunSpec], out: Path, base_scale: float) -> Results:
    """The runs that have a report; the others are left out."""
    results: Results = []
    for spec in runs:
        measured = spec.measured(base_scale)
        path = out / "runs" / measured.folder / "report.json"
        if path.exists():
            try:
                results.append((spec, judged(read_report(path), spec.scale / measured.scale)))
            except PrismError as exc:  # being written by a comparison that goes on
                print(f"{spec.folder}: left out: {exc}", file=sys.stderr)
    return results


def _runner(options: argparse.Namespace, setup: Setup, grid: Grid) -> Runner:
    """What runs the points, with the objectives at scale 1 that it calibrates (or is given)."""
    out, given = options.out, read_objectives(options.slo) if options.slo else None
    if options.measured:
        told = given or modelled.calibrate(setup, grid.traces, out, options.measured)
        return modelled.ModelledRunner(setup, told, out, options.measured)
    if options.backend == "sim":
        return simulated.SimRunner(setup, given or simulated.calibrate(setup, grid.traces, out), out)
    return LiveRunner(setup, given or calibrate(setup, grid.traces, out), out)


def _run_all(runs: list[RunSpec], out: Path, runner: Runner, base_scale: float, within_s: float) -> tuple[Results, int]:
    """``within_s``: runs that are not there begin so long after the start at the latest."""
    results: Results = []
    failed, began_s = 0, time.monotonic()
    for number, spec in enumerate(runs, start=1):
        measured = spec.measured(base_scale)
        folder = out / "runs" / measured.folder
        try:
            done = folder / "report.json"
            if not done.exists() and time.monotonic() - began_s > within_s:
                continue
            report = read_report(done) if done.exists() else runner.run(measured, folder)
            report = judged(report, spec.scale / measured.scale)
        except Exception as exc:  # one failed run must not cost the others
            failed += 1
            print(f"[{number}/{len(runs)}] {spec.folder}: FAILED: {exc}", file=sys.stderr, flush=True)
            continue
        results.append((spec, report))
        met = report.all.attainment
        print(
            f"[{number}/{len(runs)}] {time.monotonic() - began_s:6.0f} s  {spec.folder}: TTFT {100 * met.ttft:.1f}%  "
            f"TPOT {100 * met.tpot:.1f}%  failed {sum(report.all.errors.values())}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return results, failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slo.compare", description="Compare policies.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=["serve", "sim"], default="serve")
    parser.add_argument("--quick", action="store_true", help="one trace, two points per axis, one repeat, 10 s each")
    parser.add_argument("--models-folder", type=Path, default=Path("demo-models"))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--traces", default="arena,hyperbolic")
    parser.add_argument("--rates", default="0.5,1,1.5,2")
    parser.add_argument("--scales", default="2.5,5,10,15")
    parser.add_argument("--devices", default="2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-ablations", action="store_true")
    parser.add_argument("--measured", type=Path, help="simulate the live runs with this validation's calibration")
    parser.add_argument("--summarize-only", action="store_true", help="tables and figures of the runs in --out")
    parser.add_argument(
        "--recorded", action="append", default=[], metavar="NAME=FILE", help="a trace file instead of what is found"
    )
    parser.add_argument("--begin-within", type=float, default=math.inf, help="seconds in which runs may begin")
    parser.add_argument("--slo", type=Path, help="objectives at scale 1; default: calibrate")
    for name, kind in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"default: {getattr(Setup(Path()), name)}")
    return parser


def _setup(options: argparse.Namespace) -> Setup:
    given = {name: getattr(options, name) for name in _NUMBERS if getattr(options, name) is not None}
    if options.quick:
        given.setdefault("seconds", 10.0)
    setup = Setup(options.models_folder)
    if options.backend == "sim":
        setup = replace(setup, seconds=200.0, prompt_scale=1.0, output_scale=1.0, most_prompt=4096, most_output=2048)
        setup = replace(setup, compress=1.0, base_rps=16.0)
    return replace(setup, **given, recorded=dict(_recorded(item) for item in options.recorded))


def _recorded(item: str) -> tuple[str, Path]:
    name, equals, path = item.partition("=")
    if not (name and equals and Path(path).is_file()):
        raise InvalidValue("recorded", item, "must be NAME=FILE, of a trace file that exists")
    return name, Path(path)


def _grid(options: argparse.Namespace) -> Grid:
    def floats(text: str) -> tuple[float, ...]:
        return tuple(float(part) for part in text.split(",") if part)

    policies = tuple(part for part in options.policies.split(",") if part)
    traces = tuple(part for part in options.traces.split(",") if part)
    if options.quick:
        return Grid(traces[:1], policies, floats(options.rates)[1:3], floats(options.scales)[1:3], (2,), 1, False)
    devices = tuple(int(part) for part in options.devices.split(",") if part)
    return Grid(
        traces,
        policies,
        floats(options.rates),
        floats(options.scales),
        devices,
        options.repeats,
        not options.no_ablations,
    )


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
