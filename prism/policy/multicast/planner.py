"""Which multicast to run: algorithm, order of nodes and number of blocks, from what is where and how fast links are.

Every candidate is built and its time computed (:mod:`prism.policy.multicast.estimate`), so the choice is as good as
that model; nothing is decided by rules of thumb. The last node's time counts first. Where one slow link sets it, almost
any plan reaches it: of the candidates within :data:`SLACK` of the best the one is taken whose nodes are done soonest on
average, so that a slow node keeps nobody waiting but itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from prism.policy.multicast.binomial import binomial, binomial_steps
from prism.policy.multicast.estimate import NodeLink, finish_times
from prism.policy.multicast.groups import k_way
from prism.policy.multicast.schedule import Schedule
from prism.policy.multicast.simple import (
    binary_tree,
    chain,
    chain_steps,
    one_to_all,
    one_to_all_steps,
    tree_steps,
)

Algorithm = Callable[[int, int], Schedule]

STEPS: Final[Mapping[str, Callable[[int, int], int]]] = {
    "binomial": binomial_steps,
    "chain": chain_steps,
    "tree": tree_steps,
    "one-to-all": one_to_all_steps,
}
"""Steps of each algorithm's schedule, ``(nodes, blocks) -> steps``, without building it."""

ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    "binomial": binomial,
    "chain": chain,
    "tree": binary_tree,
    "one-to-all": one_to_all,
}
"""Every algorithm: ``(nodes, blocks) -> Schedule`` from node 0 to all others."""

TEN_GIGABIT: Final = NodeLink(1.25e9, 1.25e9)
DEFAULT_BLOCKS: Final = 16
"""lambda-Scale's elbow; ``blocks=None`` lets the planner look for this system's own."""
LIVE_BLOCKS: Final = 64
"""At least, where receivers serve meanwhile: a layer is there with its last block, and what all are to have first, or
what lies between two sub-groups' chunks, is whole blocks."""
_BLOCK_CHOICES: Final = (4, 8, 16, 32, LIVE_BLOCKS)
MAX_SIMULATED: Final = 4096
SLACK: Final = 1.15
"""On links of different speed the last node may be later by this factor for the sake of all others."""
BOUNDLESS: Final = "binomial"
"""Its nodes may run ahead of the steps where links allow it, so steps give no bound; comes first in ALGORITHMS."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to be sent where. ``sources`` hold all of it; ``receivers`` none."""

    sources: tuple[str, ...]
    receivers: tuple[str, ...]
    nbytes: int
    links: Mapping[str, NodeLink] = field(default_factory=dict)
    """By node; nodes that are missing here have ``default_link``."""
    default_link: NodeLink = TEN_GIGABIT
    overhead_s: float = 0.001
    """Lost per block and hop."""
    blocks: int | None = None
    """Fixed number of blocks; None: the planner chooses."""
    first: tuple[tuple[float, float], ...] = ()
    """Parts of the data, as fractions (from, to) of it, that every receiver is to have first: what an instance needs
    to serve while the rest comes."""
    layers: int = 0
    """In what lies between ``first``, of about equal size each: who receives is used layer by layer, so that sub-groups
    begin with one. 0: it is not, or not known."""
    least_blocks: int = 1
    """Where the planner chooses."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A chosen multicast. ``nodes[i]`` is the node that the schedule calls i, sources first."""

    nodes: tuple[str, ...]
    schedule: Schedule
    expected_s: float
    considered: Mapping[str, float]
    """Expected seconds (of the last node) of the best candidate of every algorithm: the reason of the choice. For one
    that cannot win this is a lower bound."""


def plan(request: PlanRequest) -> Plan:
    """The fastest candidate by the model. Raises ``ValueError`` without a source or a receiver, or when a node is named
    twice."""
    _check(request)
    order = _by_speed(request)
    links = [request.links.get(n, request.default_link) for n in order]
    sources = min(len(request.sources), len(request.receivers))
    fine = tuple(blocks for blocks in _BLOCK_CHOICES if blocks >= request.least_blocks) or _BLOCK_CHOICES[-1:]
    choices = (request.blocks,) if request.blocks else fine
    equal = len(set(links)) == 1
    candidates: dict[tuple[str, int], _Timed] = {}
    best_s = float("inf")
    for name in ALGORITHMS:
        for blocks in choices:
            timed = _by_steps(name, sources, blocks, links, request)
            if not equal and (name == BOUNDLESS or timed.last_s <= best_s * SLACK):
                timed = _by_simulation(name, sources, blocks, links, request)
            candidates[name, blocks] = timed
            best_s = min(best_s, timed.last_s)
    good = [c for c, timed in candidates.items() if timed.last_s <= best_s * (1.0 if equal else SLACK)]
    name, blocks = min(good, key=lambda c: (candidates[c].mean_s, candidates[c].last_s))
    considered = {name: min(candidates[name, b].last_s for b in choices) for name in ALGORITHMS}
    chosen = candidates[name, blocks]
    schedule = chosen.schedule or _built(name, len(order), sources, blocks, request)
    return Plan(tuple(order), schedule, chosen.last_s, considered)


def first_blocks(parts: Sequence[tuple[float, float]], blocks: int) -> list[int]:
    """The blocks with anything of ``parts`` (:attr:`PlanRequest.first`)."""
    return [b for b in range(blocks) if any(a * blocks < b + 1 and b < end * blocks for a, end in parts)]


def chunk_starts(
    parts: Sequence[tuple[float, float]], layers: int, sources: int, blocks: int, first: Sequence[int]
) -> list[int]:
    """The block with which each of ``sources`` sub-groups begins behind the blocks ``first``: where a layer begins, as
    the chunk before needs all of its last one, and each has as many layers. None: there are too few, or the layers do
    not lie together between ``parts``."""
    bounds = [0.0, *(x for part in sorted(parts) for x in part), 1.0]
    begin, end = max(zip(bounds[::2], bounds[1::2], strict=True), key=lambda gap: gap[1] - gap[0])
    at = [begin + (end - begin) * -(-layers * i // sources) / max(layers, 1) for i in range(sources)]
    rest = [block for block in range(blocks) if block not in first]
    found = [next((b for b in rest if b >= int(x * blocks)), -1) for x in at]
    apart = all(a < b for a, b in pairwise(found))
    return found if apart and layers >= sources and found[0] >= 0 else []


def build_schedule(
    algorithm: Algorithm,
    nodes: int,
    sources: int,
    blocks: int,
    first: Sequence[int] = (),
    starts: Sequence[int] = (),
) -> Schedule:
    """``algorithm`` from ``sources`` nodes: by itself for one source, in sub-groups with shifted chunks for several
    (``starts``: their first blocks); the blocks ``first`` before all others."""
    if sources == 1 and not first:
        return algorithm(nodes, blocks)
    return k_way(algorithm, nodes, sources, blocks, first=first, starts=starts)


def _built(name: str, nodes: int, sources: int, blocks: int, request: PlanRequest) -> Schedule:
    first = first_blocks(request.first, blocks)
    starts = chunk_starts(request.first, request.layers, sources, blocks, first) if request.layers else []
    return build_schedule(ALGORITHMS[name], nodes, sources, blocks, first, starts)


@dataclass(frozen=True, slots=True)
class _Timed:
    """Expected seconds until the last receiver is done, and of all on average; the schedule if it had to be built."""

    last_s: float
    mean_s: float = 0.0
    """0: not computed."""
    schedule: Schedule | None = None


def _by_steps(name: str, sources: int, blocks: int, links: Sequence[NodeLink], request: PlanRequest) -> _Timed:
    """The steps of the largest sub-group, all at the rate of the fastest link: what is expected when links are equal,
    and never more than :func:`_by_simulation` finds, except for :data:`BOUNDLESS`."""
    rate = min(max(link.out_bytes_s for link in links), max(link.in_bytes_s for link in links))
    group = 1 + -(-(len(links) - sources) // sources)
    return _Timed(STEPS[name](group, blocks) * (request.nbytes / blocks / rate + request.overhead_s))


def _by_simulation(name: str, sources: int, blocks: int, links: Sequence[NodeLink], request: PlanRequest) -> _Timed:
    """On links of different speed."""
    if name == "one-to-all" and len(links) * blocks > MAX_SIMULATED:
        return _Timed(float("inf"))  # hopeless, and its many steps would take the planning budget
    schedule = _built(name, len(links), sources, blocks, request)
    times = finish_times(schedule, links, request.nbytes / blocks, request.overhead_s)
    return _Timed(float(np.max(times)), float(np.mean(times[sources:])), schedule)


def _by_speed(request: PlanRequest) -> list[str]:
    """Sources in the given order of preference, fastest first; receivers likewise, so that slow ones forward least.
    (BlitzScale orders groups by decreasing link speed for the same reason.)"""

    def speed(node: str) -> float:
        link = request.links.get(node, request.default_link)
        return -min(link.out_bytes_s, link.in_bytes_s)

    usable = sorted(request.sources, key=speed)[: len(request.receivers)]
    return usable + sorted(request.receivers, key=speed)


def _check(request: PlanRequest) -> None:
    names = [*request.sources, *request.receivers]
    if not request.sources or not request.receivers or len(set(names)) != len(names):
        raise ValueError(
            f"a multicast needs distinct sources and receivers, got {request.sources} -> {request.receivers}"
        )
