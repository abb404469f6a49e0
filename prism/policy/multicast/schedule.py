"""A multicast schedule as a value: who sends which block to whom in which step.

Nodes are numbered 0..nodes-1; the first ``sources`` of them hold every block at the start. In one step a node sends at
most one block and receives at most one. Steps order the transfers of a node; the executor has no global clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
NO_BLOCK: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Parallel arrays with one entry per transfer, in step order."""

    algorithm: str
    nodes: int
    sources: int
    blocks: int
    step: Ints
    src: Ints
    dst: Ints
    block: Ints

    @property
    def steps(self) -> int:
        """Number of steps: the schedule's own floor on the time, in units of one block's time on a link."""
        return int(self.step.max()) + 1 if self.step.size else 0

    @property
    def transfers(self) -> int:
        return int(self.step.size)

    def receives(self, node: int) -> list[tuple[int, int]]:
        """(source, block) of every block ``node`` gets, in order."""
        mine = np.flatnonzero(self.dst == node)
        return [(int(self.src[i]), int(self.block[i])) for i in mine]

    def sends(self, node: int) -> list[tuple[int, int]]:
        """(destination, block) of every block ``node`` sends, in order."""
        mine = np.flatnonzero(self.src == node)
        return [(int(self.dst[i]), int(self.block[i])) for i in mine]


def build(
    algorithm: str, nodes: int, sources: int, blocks: int, step: Ints, src: Ints, dst: Ints, block: Ints
) -> Schedule:
    """A schedule from transfers in any order."""
    order = np.argsort(step.astype(np.int64) * nodes + src, kind="stable")  # one key: a tenth of lexsort's time
    return Schedule(algorithm, nodes, sources, blocks, step[order], src[order], dst[order], block[order])


def violations(schedule: Schedule, near: Callable[[int, int], bool] = lambda src, dst: False) -> list[str]:
    """What is wrong with a schedule, in words; empty when it is sound. Checked: every node gets every block exactly
    once, nobody sends what it does not hold, and nobody sends or receives twice in a step over its own link: what goes
    between ``near`` nodes has links of its own."""
    found: list[str] = []
    held = [set(range(schedule.blocks)) if n < schedule.sources else set() for n in range(schedule.nodes)]
    arriving: list[tuple[int, int]] = []
    busy_out: set[int] = set()
    busy_in: set[int] = set()
    now = -1
    for t, s, d, k in zip(
        *(a.tolist() for a in (schedule.step, schedule.src, schedule.dst, schedule.block)), strict=True
    ):
        if t != now:
            for node, block in arriving:
                held[node].add(block)
            arriving, busy_out, busy_in, now = [], set(), set(), t
        if k not in held[s]:
            found.append(f"step {t}: node {s} sends block {k}, which it does not hold")
        if k in held[d] or (d, k) in arriving:
            found.append(f"step {t}: node {d} gets block {k} again")
        if not near(s, d):
            if s in busy_out:
                found.append(f"step {t}: node {s} sends twice")
            if d in busy_in:
                found.append(f"step {t}: node {d} receives twice")
            busy_out.add(s)
            busy_in.add(d)
        arriving.append((d, k))
    for node, block in arriving:
        held[node].add(block)
    found += [
        f"node {n} never gets {schedule.blocks - len(h)} blocks" for n, h in enumerate(held) if len(h) < schedule.blocks
    ]
    return found
