"""Instances that come together and serve before any of them has everything: each runs what it has for the others.

::

    warm: each from its own memory      cold: two holders, a sub-group each (Algorithm 1)
    a  0 1 2 ...                        s0 -> c d     0 1 2 3       pipelines (c e) (d f)
    b      4 5 6 ...                    s1 -> e f     2 3 0 1       (Algorithm 2)

Who sits in which pipeline is said by the production code (:mod:`prism.policy.multicast.groups`), as in the live system
(:mod:`prism.controller.companions`). A pipeline of m members serves when each has its part of the weights (1 / m where
the order of all members differs). A step of a member then lies on the pools of all of them, in equal parts, and takes a
hop to each. Members that lead at the same time cost each other ``stage_wait`` of a step each: this is measured, not
derived (:data:`prism.policy.live.choice.STAGE_WAIT`). Nothing is taken over before a member has everything; then it
goes on alone, and still runs its part for the others. A pipeline that loses a member serves no more: those that have
nobody to lean on wait for their weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prism.core.effects import Activate
from prism.core.ids import NodeId
from prism.core.instances import InstanceKey
from prism.policy.multicast.groups import pipelines, sub_groups
from prism.sim.engine import Engine, Phase, StepSplit
from prism.sim.pairs import HOP_S
from prism.sim.sharing import Pool

Pools = tuple[Pool, ...]


@dataclass(slots=True)
class SimPipeline:
    """One of a decision's execution pipelines."""

    members: tuple[InstanceKey, ...]
    part: float
    """Of the weights, that each has before they serve together."""
    stage_wait: float
    pools: Mapping[InstanceKey, Pools]
    here: set[InstanceKey] = field(default_factory=set)
    """Members that have their part."""
    leaders: dict[InstanceKey, Engine] = field(default_factory=dict)
    """Members that serve over it."""
    broken: bool = False

    @property
    def serves(self) -> bool:
        return not self.broken and len(self.here) == len(self.members)

    @property
    def hops_s(self) -> float:
        """Of one step."""
        return HOP_S * len(self.members)

    @property
    def ready(self) -> bool:
        return self.serves

    def split(self, prompts: Sequence[int]) -> StepSplit:
        """All members' pools, whatever the step computes."""
        leading = sum(engine.phase is not Phase.IDLE for engine in self.leaders.values())
        length = 1.0 + self.stage_wait * max(0, leading - 1)
        pools = [pool for member in self.members for pool in self.pools[member]]
        return StepSplit(tuple(pools), (1.0 / len(self.members) / length,) * len(pools), length)


@dataclass(frozen=True, slots=True)
class SimSeat:
    """Of one instance: its sub-group, and the pipeline that it sits in."""

    group: int = 0
    pipeline: SimPipeline | None = None


class Pipelines:
    """Of one world."""

    def __init__(self, stage_wait: float) -> None:
        self._stage_wait = stage_wait
        self._of: dict[InstanceKey, SimPipeline] = {}

    def of(self, key: InstanceKey) -> SimPipeline | None:
        """The pipeline that the instance sits in, until it serves alone or is gone."""
        return self._of.get(key)

    def deal(
        self, orders: Sequence[Activate], warm: Collection[NodeId], sources: int, pools: Mapping[InstanceKey, Pools]
    ) -> dict[InstanceKey, SimSeat]:
        """Seats of the ``orders``, all of one model and one decision. ``warm``: nodes that have the weights in their
        memory; ``sources``: nodes that others can read them from."""
        at = {order.key: order.parts[0].node for order in orders}
        loading = [key for key in at if at[key] in warm]
        turns = {key: turn for turn, key in enumerate(loading)}
        seats = self._seats([loading], turns, len(loading), pools)
        cold: dict[NodeId, list[InstanceKey]] = {}
        for key in (key for key in at if at[key] not in warm):
            cold.setdefault(at[key], []).append(key)
        nodes, groups = list(cold), min(sources, len(cold))
        if groups < 2:
            return seats
        dealt = [[n - groups for n in group[1:]] for group in sub_groups(len(nodes) + groups, groups)]
        group_of = {key: number for number, group in enumerate(dealt) for n in group for key in cold[nodes[n]]}
        seats |= {key: SimSeat(group) for key, group in group_of.items()}
        for copy in range(max(map(len, cold.values()))):
            having = [[n for n in group if len(cold[nodes[n]]) > copy] for group in dealt]
            made = [[cold[nodes[n]][copy] for n in members] for members in pipelines(having)]
            seats |= self._seats(made, group_of, groups, pools)
        return seats

    def _seats(
        self,
        made: Iterable[list[InstanceKey]],
        turn_of: Mapping[InstanceKey, int],
        turns: int,
        pools: Mapping[InstanceKey, Pools],
    ) -> dict[InstanceKey, SimSeat]:
        seats: dict[InstanceKey, SimSeat] = {}
        for members in made:
            part = part_needed({turn_of[member] for member in members}, turns)
            if part < 1.0:
                one = SimPipeline(tuple(members), part, self._stage_wait, {m: pools[m] for m in members})
                seats |= {member: SimSeat(turn_of[member], one) for member in members}
                self._of |= dict.fromkeys(members, one)
        return seats

    def gone(self, key: InstanceKey) -> list[Engine]:
        """The instance ended; returns those that served over its pipeline, which does not serve any more."""
        pipeline = self._of.pop(key, None)
        if pipeline is None:
            return []
        pipeline.broken = True
        pipeline.leaders.pop(key, None)
        left, pipeline.leaders = list(pipeline.leaders.values()), {}
        return left


def part_needed(turns_taken: Collection[int], turns: int) -> float:
    """Part of the weights that each has when those who begin at the chunks ``turns_taken`` of ``turns``, and go on
    around, have all together; 1: not before one of them has all itself."""
    taken = sorted(turns_taken)
    if not taken:
        return 1.0
    return max(after - before for before, after in pairwise([*taken, taken[0] + turns])) / turns
