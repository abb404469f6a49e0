"""``prism sim``: what would happen if this trace met this catalog on that cluster under such a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from prism.core.settings import PolicyName

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)


class _RunByDefault(click.Group):
    """``prism sim TRACE ...`` is ``prism sim run TRACE ...``; with ``--dry-run`` it is ``prism sim dry-run ...``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--dry-run" in args:
            args = ["dry-run", *(arg for arg in args if arg != "--dry-run")]
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault)
def command() -> None:
    """Simulate a catalog and a trace on modelled devices, with the production schedulers.

    `prism sim TRACE --cluster C --catalog M` runs once, `prism sim --dry-run SNAPSHOT --catalog M` goes on from a live
    system's state; the other verbs vary something.
    """


def _common(function: Any) -> Any:
    options = (
        click.argument("trace", type=_FILE),
        click.option("--cluster", type=_FILE, required=True, help="The machines (docs/sim.md)."),
        click.option("--catalog", type=_FILE, required=True, help="The models and the policy."),
        click.option("--seed", type=int, default=0, show_default=True, help="For lengths a trace does not have."),
        click.option("--calibration", type=_FILE, help="Measured step times instead of the roofline."),
        click.option("--profiles", type=_FILE, help="What schedulers start from: a server's STATE/profiles.json."),
        click.option(
            "--rate", type=float, default=1.0, show_default=True, help="Requests, as a factor of the trace's."
        ),
        click.option("--slo-scale", type=float, default=1.0, show_default=True, help="Multiplies every objective."),
        click.option("--limit-s", type=float, help="Only the first so many seconds of the trace."),
        click.option(
            "--start",
            type=click.Choice(["warm", "cold"]),
            default="warm",
            show_default=True,
            help="With what fits of the models loaded when the trace begins, or with nothing; alike for all policies.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


_POLICY = click.option(
    "--policy", type=click.Choice([p.value for p in PolicyName]), help="Instead of the catalog's policy."
)


@command.command()
@_common
@_POLICY
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@click.option("--out", type=_OUT, help="Write the report (JSON) here, and a page with plots beside it (.html).")
@click.option("--decisions", type=_OUT, help="Write the decision log here.")
@click.option("--slow", is_flag=True, help="Take every engine step by itself (same result, for checking).")
def run(
    trace: Path, as_json: bool, out: Path | None, decisions: Path | None, policy: str | None, slow: bool, **options: Any
) -> None:
    """Simulate once."""
    from prism.cli.sim_output import ProgressLine, check_outputs, decision_file, print_summary, write_outputs
    from prism.sim.inputs import Inputs
    from prism.sim.run import simulate

    spec = Inputs(trace=trace, policy=policy, fast=not slow, sample=True, **options).spec()
    check_outputs(out, decisions)
    with decision_file(decisions) as log, ProgressLine(spec.last_arrival_s) as line:
        result = simulate(spec, log, line.update, progress_every_s=5.0)
    write_outputs(result, out)
    print_summary(result, as_json)


@command.command()
@_common
@click.option("--policies", default="", help="Comma-separated; default: the catalog's.")
@click.option("--gpus", default="", help="Comma-separated numbers of GPUs (the cluster's first group is resized).")
@click.option("--rates", default="", help="Comma-separated factors on the trace's rate.")
@click.option("--slo-scales", default="", help="Comma-separated factors on all objectives.")
@click.option("--processes", type=click.IntRange(min=0), default=0, help="Parallel processes; default: one per core.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def sweep(
    trace: Path, policies: str, gpus: str, rates: str, slo_scales: str, processes: int, as_json: bool, **options: Any
) -> None:
    """Simulate every combination of the given policies, GPU counts, rates and SLO scales."""
    from prism.cli.sim_output import ProgressLine, print_sweep
    from prism.sim.inputs import Inputs, counts, numbers
    from prism.sim.sweep import Axes, sweep_points

    axes = Axes(
        policies=tuple(name for name in policies.split(",") if name),
        gpus=counts("gpus", gpus),
        rates=numbers("rates", rates),
        slo_scales=numbers("slo-scales", slo_scales),
    )
    with ProgressLine() as line:
        points = sweep_points(Inputs(trace=trace, **options), axes, processes, line.runs)
    print_sweep(points, as_json)


@command.command()
@_common
@_POLICY
@click.option("--target", type=float, default=0.99, show_default=True, help="Attainment to reach.")
@click.option(
    "--metric",
    type=click.Choice(["both", "ttft", "tpot"]),
    default="both",
    show_default=True,
    help="Which attainment; both: goodput.",
)
@click.option("--most", type=int, default=1024, show_default=True, help="Most GPUs to try.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def capacity(
    trace: Path, target: float, metric: str, most: int, as_json: bool, policy: str | None, **options: Any
) -> None:
    """Find the fewest GPUs that reach a target attainment."""
    from prism.cli.sim_output import ProgressLine, print_capacity
    from prism.sim.capacity import fewest_gpus
    from prism.sim.inputs import Inputs

    with ProgressLine() as line:
        found = fewest_gpus(Inputs(trace=trace, policy=policy, **options), target, metric, most, on_try=line.trying)
    print_capacity(found, as_json)


@command.command("dry-run")
@click.argument("snapshot", type=_FILE)
@click.option("--catalog", type=_FILE, required=True, help="The models and the policy.")
@click.option("--cluster", type=_FILE, help="Kind of devices, links and timing; default: H100s, or CPU devices.")
@_POLICY
@click.option("--horizon-s", type=float, default=60.0, show_default=True, help="How far to look ahead.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def dry_run(snapshot: Path, as_json: bool, **options: Any) -> None:
    """What would happen from a live system's state on, under this or another policy.

    SNAPSHOT is the JSON of `prism plan --snapshot`.
    """
    from prism.cli.sim_output import print_dry_run
    from prism.sim.dry_run import dry_run_file

    print_dry_run(dry_run_file(snapshot, **options), as_json)


@command.command()
@click.option("--json", "as_json", is_flag=True)
def gpus(as_json: bool) -> None:
    """List the GPUs the simulator knows."""
    from prism.cli.sim_output import print_gpus

    print_gpus(as_json)
