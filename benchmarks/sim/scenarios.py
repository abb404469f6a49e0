"""Who meets most in set-ups that nobody chose (:mod:`benchmarks.sim.scenario_draws`)?

A draw is a catalog of 4 to 116 models, 2 to 48 H100s, two minutes of requests and objectives, all drawn. Everybody
starts warm, with what fits, and is told the trace's means. Goodput of everybody in every draw, Prism's lead over the
best rival of each, and how often it is behind.

    python -m benchmarks.sim.scenarios --work DIR [--draws 60] [--policies "prism+muxserve+static+serverlessllm+qlm"]

The last result is in docs/results/scenarios.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean, median
from typing import Any, Final

from benchmarks.sim import harness, variants
from benchmarks.sim.pieces import Pieces
from benchmarks.sim.scenario_draws import scenario
from benchmarks.sim.workloads import h100_cluster

_FULL_FROM: Final = 0.95
"""Weights over memory from which on models have to leave."""
_EVEN: Final = 0.01

Found = dict[int, dict[str, dict[str, Any]]]
"""By draw and policy."""


def run(pieces: Pieces, draw: int, policy: str) -> dict[str, Any]:
    drawn = scenario(draw, pieces)
    result = variants.run(policy, h100_cluster(drawn.gpus), drawn.models, drawn.rows)
    met = result.report.all.attainment
    return {
        "scenario": str(drawn),
        "full": drawn.full,
        "both": met.both,
        "ttft": met.ttft,
        "tpot": met.tpot,
        "never_ended": result.stats.never_ended,
        "activations": result.stats.activations,
    }


def name_of(draw: int, policy: str) -> str:
    return f"scenario {draw} {policy}"


def finished(pieces: Pieces, draws: Sequence[int], policies: Sequence[str]) -> Found:
    """Draws of which every policy is done."""
    found: Found = {}
    for draw in draws:
        done = {policy: piece for policy in policies if (piece := pieces.get(name_of(draw, policy))) is not None}
        if len(done) == len(policies):
            found[draw] = done
    return found


def print_draws(found: Found, ours: Sequence[str], rivals: Sequence[str]) -> None:
    """Every draw, those first in which the first of ``ours`` is furthest behind."""
    print("\n| draw | what | " + " | ".join((*ours, *rivals)) + " | leads by |")
    print("|---" * (len(ours) + len(rivals) + 3) + "|")
    for draw in sorted(found, key=lambda draw: _lead(found[draw], ours[0], rivals)):
        done = found[draw]
        shares = " | ".join(f"{done[policy]['both']:.3f}" for policy in (*ours, *rivals))
        print(f"| {draw} | {done[ours[0]]['scenario']} | {shares} | {_lead(done, ours[0], rivals):+.3f} |")


def print_summary(found: Found, ours: Sequence[str], rivals: Sequence[str]) -> None:
    """Means, and each of ours against the best rival of each draw."""
    some = {
        "all": list(found.values()),
        "weights fit": [done for done in found.values() if done[ours[0]]["full"] < _FULL_FROM],
        "they do not": [done for done in found.values() if done[ours[0]]["full"] >= _FULL_FROM],
    }
    print("\n| goodput, mean | " + " | ".join(f"{title} ({len(runs)})" for title, runs in some.items()) + " |")
    print("|---" * (len(some) + 1) + "|")
    for policy in (*ours, *rivals):
        means = (f"{mean(done[policy]['both'] for done in runs):.3f}" if runs else "" for runs in some.values())
        print(f"| {policy} | " + " | ".join(means) + " |")
    if not rivals:
        return
    print(
        "\n| against the best rival of each draw | leads in | even | behind in | mean, points | median | worst | best |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for policy in ours:
        leads = [_lead(done, policy, rivals) for done in found.values()]
        ahead, behind = sum(lead > _EVEN for lead in leads), sum(lead < -_EVEN for lead in leads)
        points = [f"{100 * value:+.1f}" for value in (mean(leads), median(leads), min(leads), max(leads))]
        print(f"| {policy} | {ahead} | {len(leads) - ahead - behind} | {behind} | " + " | ".join(points) + " |")


def _lead(done: dict[str, dict[str, Any]], policy: str, rivals: Sequence[str]) -> float:
    return float(done[policy]["both"] - max((done[rival]["both"] for rival in rivals), default=0.0))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--policies", default="+".join((variants.PRISM, *variants.RIVALS)), help=variants.HELP)
    args = parser.parse_args()
    pieces, draws, policies = Pieces(args.work), harness.chosen_draws(args), tuple(args.policies.split("+"))
    wanted = [(draw, policy) for draw in draws for policy in policies]
    harness.make(args, pieces, [(name_of(*one), partial(run, pieces, *one)) for one in wanted])
    ours = [policy for policy in policies if policy not in variants.RIVALS]
    rivals = [policy for policy in policies if policy in variants.RIVALS]
    if (found := finished(pieces, draws, policies)) and ours:
        print_draws(found, ours, rivals)
        print_summary(found, ours, rivals)


if __name__ == "__main__":
    main()
