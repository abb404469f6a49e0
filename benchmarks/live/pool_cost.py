"""What does the parameter pool's book cost per event, with 10,000 models on 64 machines?

Events: a report that changed nothing, one with a copy more, a death (with all that lived there finding new homes), and
a machine that joins. CPU times of the policy; goal: not measurable beside a report's own cost.

    python -m benchmarks.live.pool_cost

Results: docs/results/live-scaling.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prism.policy.live.parameter_pool import ParameterPool

MODELS, MACHINES, GIB = 10_000, 64, 1 << 30


def filled() -> tuple[ParameterPool, dict[str, set[str]]]:
    """Every model at its home."""
    pool = ParameterPool()
    for i in range(MACHINES):
        pool.put_machine(f"m{i}", 20_000 * GIB)
    for i in range(MODELS):
        pool.need(f"e{i}", (1 + i % 140) * GIB)
    pool.settle()
    copies: dict[str, set[str]] = {f"m{i}": set() for i in range(MACHINES)}
    for entry, home in pool.lacking().items():
        copies[home].add(entry)
    for machine, entries in copies.items():
        pool.set_copies(machine, entries)
    pool.settle()
    return pool, copies


def milliseconds(run: Callable[[], object]) -> float:
    start_s = time.process_time()
    run()
    return 1e3 * (time.process_time() - start_s)


def main() -> None:
    fill_ms = milliseconds(filled)
    pool, copies = filled()

    def report(machine: str, entries: set[str]) -> None:
        pool.put_machine(machine, 20_000 * GIB)
        pool.set_copies(machine, entries)
        pool.settle()

    def die() -> None:
        pool.drop_machine("m7")
        pool.settle()

    print("| event | ms |\n|---|---|")
    print(f"| all of it from nothing | {fill_ms:.0f} |")
    print(f"| a report that changed nothing | {milliseconds(lambda: report('m1', copies['m1'])):.3f} |")
    print(f"| a report with a copy more | {milliseconds(lambda: report('m1', copies['m1'] | {'e0'})):.3f} |")
    print(f"| a death: {len(copies['m7'])} models get new homes | {milliseconds(die):.2f} |")
    moved = {home: set(entries) for home, entries in copies.items() if home != "m7"}
    for entry, home in pool.lacking().items():
        moved[home].add(entry)
    for machine, entries in moved.items():
        report(machine, entries)
    print(f"| a machine joins and takes its share | {milliseconds(lambda: report('new', set())):.2f} |")
    print(f"| what it is to fetch | {len(pool.lacking())} models |")


if __name__ == "__main__":
    main()
