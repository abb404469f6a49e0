"""What do elastic memory, the global scheduler and the device's scheduler do, each seen in a small scene of its own?

    python -m benchmarks.slo.scenes --out scenes                       # on real engines; says how long it will take
    python -m benchmarks.slo.scenes --out told --measured DIR          # foretold by the simulator (seconds)
    python -m benchmarks.slo.scenes --out scenes --summarize-only      # table and figures of the runs that are there

The scenes of the Prism paper's Figures 8, 10 and 11 (:mod:`benchmarks.slo.scene_list`), two sides each, three repeats
with other arrivals, on a fresh server wherever models may have moved; and each scene once with ample memory, which
shows what the machine's cores alone allow. ``DIR`` is the folder of a ``benchmarks/sim/validate.py`` on this machine.

The runs with ample memory come first. ``scenes.md`` says how much KV the running requests needed then: a machine whose
cores are slower or busy needs more (requests stay longer), and in ``memory`` and ``placement`` no policy can help from
about twice the room on. Then, and where even these runs miss objectives, lower ``--rate``.

An interrupted comparison goes on where it was. Writes
``scenes.md``, ``figure8.svg``, ``figure10.svg``, ``figure11.svg`` and all reports. Results: docs/results/replay.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from benchmarks.slo.fleet import make_models
from benchmarks.slo.scene_list import SCENES
from benchmarks.slo.scene_plots import FIGURES
from benchmarks.slo.scene_runs import ASKED, Runner, SceneRun, runs_of
from benchmarks.slo.scene_table import Found, table
from benchmarks.slo.server import exit_on_sigterm
from prism.obs.kernel import AUTOGROUPS_REMEDY, has_autogroups
from prism.trace.report import read_report

START_S, AROUND_S = 21.0, 4.0
"""What a server takes until it serves, and a run before and after its requests."""


def main(argv: list[str] | None = None) -> int:
    """Run what is missing, draw the figures, print the table; returns 1 when a run failed."""
    options = _parser().parse_args(argv)
    scenes = [scene for scene in SCENES if options.only in (None, scene.name)]
    runs = runs_of(scenes, options.repeats, options.time, options.rate, not options.no_control)
    if options.summarize_only:
        found, failed = _there(runs, options.out), 0
    else:
        if options.measured is None:
            make_models(options.models_folder)
            if has_autogroups():
                print(f"before measuring: {AUTOGROUPS_REMEDY} (docs/runbook.md)", file=sys.stderr, flush=True)
        found, failed = _run_all(runs, options)
    if not found:
        raise SystemExit(f"{options.out} holds no finished run")
    for scene in scenes:
        sides = {label: of for label in scene.variants if (of := found.get((scene.name, label)))}
        if sides:
            FIGURES[scene.name](sides, options.out / f"{scene.figure}.svg")
    text = table(scenes, found)
    (options.out / "scenes.md").write_text(text)
    print(text)
    return 1 if failed else 0


def _run_all(runs: list[SceneRun], options: argparse.Namespace) -> tuple[Found, int]:
    found: Found = {}
    failed, began_s = 0, time.monotonic()
    if options.measured is None:
        print(f"{len(runs)} runs, about {_minutes(runs):.0f} minutes if none is there", file=sys.stderr, flush=True)
    runner = Runner(options.models_folder, options.out, options.measured)
    try:
        for number, spec in enumerate(runs, start=1):
            head = f"[{number}/{len(runs)}]"
            try:
                report = runner.run(spec)
            except Exception as exc:  # one failed run must not cost the others
                failed += 1
                print(f"{head} {spec.folder}: FAILED: {exc}", file=sys.stderr, flush=True)
                continue
            found.setdefault((spec.scene.name, spec.label), []).append((report, options.out / spec.folder))
            met = ", ".join(f"{group.name} {100 * group.attainment.ttft:.1f}%" for group in report.models)
            left = "" if options.measured else f"; about {_minutes(runs[number:]):.0f} minutes left"
            spent = f"{time.monotonic() - began_s:5.0f} s"
            print(f"{head} {spent}  {spec.folder}: TTFT met {met}{left}", file=sys.stderr, flush=True)
    finally:
        runner.close()
    return found, failed


def _minutes(runs: list[SceneRun]) -> float:
    shared = sum(
        one.scene.pinned and (one.scene, one.label) == (next_.scene, next_.label)
        for one, next_ in itertools.pairwise(runs)
    )
    spent_s = sum(spec.scene.seconds * spec.time + AROUND_S + START_S for spec in runs)
    return (spent_s - START_S * shared) / 60.0


def _there(runs: list[SceneRun], out: Path) -> Found:
    found: Found = {}
    for spec in runs:
        if not (out / spec.folder / ASKED).exists():
            continue
        report = read_report(out / spec.folder / "report.json")
        found.setdefault((spec.scene.name, spec.label), []).append((report, out / spec.folder))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slo.scenes", description="Three scenes of the paper.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models-folder", type=Path, default=Path("demo-models"))
    parser.add_argument("--only", choices=[scene.name for scene in SCENES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--time", type=float, default=1.0, help="length of the scenes, as a factor (default: 1)")
    parser.add_argument("--rate", type=float, default=1.0, help="of all requests, as a factor (default: 1)")
    parser.add_argument("--no-control", action="store_true", help="leave out the runs with ample memory")
    parser.add_argument("--measured", type=Path, help="simulate the live runs with this validation's calibration")
    parser.add_argument("--summarize-only", action="store_true", help="table and figures of the runs in --out")
    return parser


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
