"""What a live and a simulated run are compared by, and how far they may be apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from prism.trace.report import Report, RequestRecord, Sample

GOALS = {"attainment": 0.05, "goodput": 0.05, "median": 0.15, "p99": 0.35, "tpot": 0.15, "activations": 0.10}
"""A run with fewer than ten activations may be off by one: a tenth of them would be less than one. What this lets pass
shows in the sums over all runs (:func:`summary`)."""

Pair = tuple[str, "Outcome", "Outcome"]
"""Name, live, simulated."""


@dataclass(frozen=True)
class Kv:
    """KV memory over a run."""

    mean_bytes: float
    """Mapped by all models together, mean over looks between the first arrival and the last answer."""
    peak_bytes: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    """Prompt tokens that a prefix cache had."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    attainment: float
    """Share that met TTFT."""
    goodput: float
    """Share that met TTFT and TPOT."""
    median_s: float
    p99_s: float
    tpot_s: float
    activations: int
    errors: int
    requests: int
    kv: Kv
    alone_s: float | None = None
    """A token of a request that nothing overlaps (:func:`alone_s`)."""


def outcome(
    report: Report, activations: int, tokens: Mapping[str, int], records: Iterable[RequestRecord] = ()
) -> Outcome:
    """``tokens`` has ``prompt``, ``generated`` and ``cached`` as the system itself counted them."""
    group = report.all
    assert group.ttft_s is not None
    assert group.tpot_s is not None
    totals = [sum(s.model_bytes.values()) for s in looks(report)]
    kv = Kv(
        fmean(totals) if totals else 0.0,
        max(totals, default=0),
        tokens["prompt"],
        tokens["generated"],
        tokens["cached"],
    )
    return Outcome(
        group.attainment.ttft,
        group.attainment.both,
        group.ttft_s.at(50.0),
        group.ttft_s.at(99.0),
        group.tpot_s.at(50.0),
        activations,
        sum(group.errors.values()),
        group.attainment.requests,
        kv,
        alone_s(records),
    )


_ENOUGH_TOKENS = 10
"""Of an answer, for its time per token to be more than noise."""


def alone_s(records: Iterable[RequestRecord]) -> float | None:
    """Seconds per token, median over the answers of the most asked model that overlap with no other request; None
    without any. No queue, neighbour or batch is in it: where live and simulated differ in this, the machine is not as
    fast as it was when it was calibrated."""
    found: dict[str, list[float]] = defaultdict(list)
    ordered = sorted(records, key=lambda r: r.arrival_s)
    ends_s = float("-inf")
    for record, after in zip(ordered, [*ordered[1:], None], strict=True):
        end_s = record.arrival_s + (record.e2e_s or 0.0)
        free_after = after is None or after.arrival_s >= end_s
        if (
            record.tpot_s is not None
            and record.output_tokens > _ENOUGH_TOKENS
            and ends_s <= record.arrival_s
            and free_after
        ):
            found[record.model].append(record.tpot_s)
        ends_s = max(ends_s, end_s)
    most = max(found.values(), key=len, default=None)
    return median(most) if most else None


def looks(report: Report) -> list[Sample]:
    """Samples of the run, at most one a second, which is how often a live server is looked at: a peak found by looking
    more often could not be compared."""
    found: list[Sample] = []
    for sample in report.timeline.samples:
        if 0.0 <= sample.t_s <= report.span_s and (not found or sample.t_s - found[-1].t_s > 0.9):
            found.append(sample)
    return found


def misses(live: Outcome, modelled: Outcome) -> dict[str, float]:
    """Differences: points of attainment, else relative to the live value."""
    return {
        "attainment": abs(live.attainment - modelled.attainment),
        "goodput": abs(live.goodput - modelled.goodput),
        "median": abs(modelled.median_s / live.median_s - 1),
        "p99": abs(modelled.p99_s / live.p99_s - 1),
        "tpot": abs(modelled.tpot_s / live.tpot_s - 1),
        "activations": abs(modelled.activations - live.activations) / max(1, live.activations),
        "kv_mean": abs(modelled.kv.mean_bytes / live.kv.mean_bytes - 1) if live.kv.mean_bytes else 0.0,
        "kv_peak": abs(modelled.kv.peak_bytes / live.kv.peak_bytes - 1) if live.kv.peak_bytes else 0.0,
        "generated": abs(modelled.kv.generated_tokens - live.kv.generated_tokens) / max(1, live.kv.generated_tokens),
    }


def missed(live: Outcome, modelled: Outcome) -> list[str]:
    """The goals that are not met."""
    off = misses(live, modelled)
    goals = {**GOALS, "activations": max(GOALS["activations"], 1 / max(1, live.activations))}
    return [key for key, goal in goals.items() if off[key] > goal]


def table(rows: Sequence[Pair]) -> str:
    """Markdown: ``live / simulated`` in every cell."""
    heads = ["run", "requests", "TTFT met", "goodput", "median, ms", "P99, ms", "TPOT, ms", "activations"]
    heads += ["KV mean, MB", "KV peak, MB", "a token alone, ms", "misses"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, live, sim in rows:
        pairs = [
            (f"{live.attainment:.3f}", f"{sim.attainment:.3f}"),
            (f"{live.goodput:.3f}", f"{sim.goodput:.3f}"),
            (f"{1e3 * live.median_s:.0f}", f"{1e3 * sim.median_s:.0f}"),
            (f"{1e3 * live.p99_s:.0f}", f"{1e3 * sim.p99_s:.0f}"),
            (f"{1e3 * live.tpot_s:.1f}", f"{1e3 * sim.tpot_s:.1f}"),
            (str(live.activations), str(sim.activations)),
            (f"{live.kv.mean_bytes / 1e6:.2f}", f"{sim.kv.mean_bytes / 1e6:.2f}"),
            (f"{live.kv.peak_bytes / 1e6:.1f}", f"{sim.kv.peak_bytes / 1e6:.1f}"),
            (_ms(live.alone_s), _ms(sim.alone_s)),
        ]
        cells = [name, str(live.requests), *(f"{a} / {b}" for a, b in pairs)]
        lines.append("| " + " | ".join([*cells, ", ".join(missed(live, sim)) or "none"]) + " |")
    return "\n".join(lines)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def summary(rows: Sequence[Pair]) -> str:
    """How many runs met each goal, and what is summed over them."""
    found = [missed(live, sim) for _, live, sim in rows]
    met = ", ".join(f"{key} {sum(key not in miss for miss in found)}" for key in GOALS)
    kv = [misses(live, sim)["kv_mean"] for _, live, sim in rows]
    return "\n".join(
        [
            f"Of {len(rows)} runs, within the goal: {met}; {found.count([])} without a miss.",
            f"Activations in all: {sum(a.activations for _, a, _ in rows)} live, "
            f"{sum(b.activations for _, _, b in rows)} simulated.",
            f"KV mean: off by {median(kv):.0%} (median), {max(kv):.0%} at most.",
        ]
    )
