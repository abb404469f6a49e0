"""Which multicast to run: algorithm, order of nodes and number of blocks, from what is where and how fast links are.

Every candidate is built and its time computed (:mod:`prism.policy.multicast.estimate`), so the choice is as good as
that model; nothing is decided by rules of thumb. The last node's time counts first. Where one slow link sets it, almost
any plan reaches it: of the candidates within :data:`SLACK` of the best the one is taken whose nodes are done soonest on
average, so that a slow node keeps nobody waiting but itself.

Before that, sources whose outgoing direction carries traffic are left out while there are others (BlitzScale 5.1), and
receivers whose does count as slow ones, which pass little on. The candidate *chain* is made by
:func:`prism.policy.multicast.chains.plan_chains`, which knows fast domains and leaf switches; the others only feel
them, in the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Final

import numpy as np

from prism.policy.multicast.binomial import binomial, binomial_steps
from prism.policy.multicast.chain_schedule import chain_schedule
from prism.policy.multicast.chains import LinkedDevice, plan_chains
from prism.policy.multicast.estimate import NodeLink, finish_times
from prism.policy.multicast.groups import block_orders, k_way, sub_groups
from prism.policy.multicast.schedule import Schedule
from prism.policy.multicast.simple import (
    binary_tree,
    chain,
    chain_steps,
    one_to_all,
    one_to_all_steps,
    tree_steps,
)
from prism.policy.multicast.topology import NetworkTopology, Wiring

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
CHAIN: Final = "chain"
"""Planned from the topology."""
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
    ends: tuple[tuple[float, float], ...] = ()
    """Of ``first``, what nobody needs but who leads requests (embedding and head): with ``shift`` the first sub-group
    alone has it at once, the others have layers sooner for that. Together they have everything at the same moment,
    which is sooner than if all had it first."""
    layers: int = 0
    """In what lies between ``first``, of about equal size each: who receives is used layer by layer, so that sub-groups
    begin with one. 0: it is not, or not known."""
    least_blocks: int = 1
    """Where the planner chooses."""
    shift: bool = True
    """Sub-groups get the blocks in orders of their own, so that together they soon have all; else all from the
    beginning on, which is how one that serves alone with another's help uses them."""
    topology: NetworkTopology = field(default_factory=NetworkTopology)
    sending: frozenset[str] = frozenset()
    """Nodes whose outgoing direction carries other traffic."""

    def link_of(self, node: str) -> NodeLink:
        """Of a receiver that is sending something half of the outgoing direction."""
        link = self.links.get(node, self.default_link)
        shared = node in self.sending and node in self.receivers
        return NodeLink(link.out_bytes_s / 2, link.in_bytes_s) if shared else link


@dataclass(frozen=True, slots=True)
class Plan:
    """A chosen multicast. ``nodes[i]`` is the node that the schedule calls i, sources first."""

    nodes: tuple[str, ...]
    schedule: Schedule
    expected_s: float
    considered: Mapping[str, float]
    """Expected seconds (of the last node) of the best candidate of every algorithm: the reason of the choice. For one
    that cannot win this is a lower bound."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The receivers of each sub-group, which gets the blocks in an order of its own."""
    chains: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """Where the schedule is one of chains: each one's groups in order, the source's first."""
    left_out: tuple[str, ...] = ()
    """Sources that send nothing because their outgoing direction carries other traffic."""
    late: frozenset[str] = frozenset()
    """Receivers that get what only who leads needs behind layers (:attr:`PlanRequest.ends`)."""

    def words(self) -> str:
        """Who sends to whom, for operators: ``a > b+c > d; e > f``, or sources and receivers where nothing is a
        chain."""
        if self.chains:
            return "; ".join(" > ".join("+".join(group) for group in chain) for chain in self.chains)
        sources = self.schedule.sources
        return f"{'+'.join(self.nodes[:sources])} > {'+'.join(self.nodes[sources:])}"


def plan(request: PlanRequest) -> Plan:
    """The fastest candidate by the model. Raises ``ValueError`` without a source or a receiver, or when a node is named
    twice."""
    _check(request)
    case = _case_of(request)
    fine = tuple(blocks for blocks in _BLOCK_CHOICES if blocks >= request.least_blocks) or _BLOCK_CHOICES[-1:]
    choices = (request.blocks,) if request.blocks else fine
    equal = case.equal
    candidates: dict[tuple[str, int], _Timed] = {}
    best_s = float("inf")
    for name in ALGORITHMS:
        for blocks in choices:
            timed = _by_steps(name, blocks, case)
            if case.wiring is not None or (not equal and (name == BOUNDLESS or timed.last_s <= best_s * SLACK)):
                timed = _by_simulation(name, blocks, case, best_s * SLACK)
            candidates[name, blocks] = timed
            best_s = min(best_s, timed.last_s)
    good = [c for c, timed in candidates.items() if timed.last_s <= best_s * (1.0 if equal else SLACK)]
    name, blocks = min(good, key=lambda c: (candidates[c].mean_s, candidates[c].last_s))
    considered = {name: min(candidates[name, b].last_s for b in choices) for name in ALGORITHMS}
    chosen = candidates[name, blocks]
    schedule = chosen.schedule or case.schedule(name, blocks)
    chained = tuple(tuple(tuple(case.order[n] for n in group) for group in chain) for chain in case.chains)
    return Plan(
        case.order,
        schedule,
        chosen.last_s,
        considered,
        groups=case.groups(name),
        chains=chained if name == CHAIN else (),
        left_out=case.left_out,
        late=case.late(name, schedule.blocks),
    )


def first_blocks(parts: Sequence[tuple[float, float]], blocks: int) -> list[int]:
    """The blocks with anything of ``parts`` (:attr:`PlanRequest.first`)."""
    return [b for b in range(blocks) if any(a * blocks < b + 1 and b < end * blocks for a, end in parts)]


def end_blocks(request: PlanRequest, blocks: int) -> list[int]:
    """The blocks with nothing but :attr:`PlanRequest.ends`."""
    inside = [(a * blocks, end * blocks) for a, end in request.ends]
    return [b for b in range(blocks) if any(a <= b and b + 1 <= end for a, end in inside)]


def chunk_starts(
    parts: Sequence[tuple[float, float]],
    layers: int,
    sources: int,
    blocks: int,
    first: Sequence[int],
    ends: Collection[int] = (),
) -> list[int]:
    """The block with which each of ``sources`` sub-groups begins behind the blocks ``first``: where a layer begins, as
    the chunk before needs all of its last one, and each has as many layers; the first one fewer, by as much as the
    blocks ``ends`` are, which come to it alone. None: there are too few, or the layers do not lie together between
    ``parts``."""
    bounds = [0.0, *(x for part in sorted(parts) for x in part), 1.0]
    begin, end = max(zip(bounds[::2], bounds[1::2], strict=True), key=lambda gap: gap[1] - gap[0])
    more = len(ends) / blocks * layers / (end - begin) if end > begin else 0.0  # in layers
    others = (
        min(Fraction(layers) + Fraction(more), Fraction(sources * max(layers - 1, 0), max(sources - 1, 1))) / sources
    )
    before = [layers - (sources - i) * others if i else Fraction(0) for i in range(sources)]
    at = [begin + (end - begin) * ceil(one) / max(layers, 1) for one in before]
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
    shift: bool = True,
    ends: Collection[int] = (),
) -> Schedule:
    """``algorithm`` from ``sources`` nodes: by itself for one source, in sub-groups for several, with shifted chunks
    (``starts``: their first blocks) unless not ``shift``; the blocks ``first`` before all others, but for ``ends`` in
    all shifted sub-groups but the first."""
    if sources == 1 and not first:
        return algorithm(nodes, blocks)
    return k_way(algorithm, nodes, sources, blocks, shift, first, starts, ends)


@dataclass(frozen=True, slots=True)
class _Case:
    """A request with its nodes in order."""

    request: PlanRequest
    order: tuple[str, ...]
    """Sources, then receivers, each fastest first."""
    sources: int
    left_out: tuple[str, ...]
    links: tuple[NodeLink, ...]
    wiring: Wiring | None
    chains: tuple[tuple[tuple[int, ...], ...], ...]
    """Those that have a target, in the numbers of ``order``."""

    @property
    def equal(self) -> bool:
        """All candidates are as long as their steps."""
        return len(set(self.links)) == 1 and self.wiring is None

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        if name == CHAIN:
            return tuple(tuple(node for group in chain[1:] for node in group) for chain in self.chains)
        return tuple(tuple(group[1:]) for group in sub_groups(len(self.order), self.sources))

    def schedule(self, name: str, blocks: int) -> Schedule:
        request, count = self.request, len(self.chains) if name == CHAIN else self.sources
        first = first_blocks(request.first, blocks)
        ends = end_blocks(request, blocks)
        by_layer = request.layers and request.shift
        starts = chunk_starts(request.first, request.layers, count, blocks, first, ends) if by_layer else []
        if name == CHAIN:
            orders = block_orders(count, blocks, request.shift, first, starts, ends)
            return chain_schedule(self.chains, len(self.order), self.sources, orders)
        nodes, shift = len(self.order), request.shift
        return build_schedule(ALGORITHMS[name], nodes, self.sources, blocks, first, starts, shift, ends)

    def late(self, name: str, blocks: int) -> frozenset[str]:
        if not self.request.shift or not end_blocks(self.request, blocks):
            return frozenset()
        return frozenset(self.order[node] for group in self.groups(name)[1:] for node in group)


def _case_of(request: PlanRequest) -> _Case:
    order, sources, left_out = _by_speed(request)
    links = tuple(map(request.link_of, order))
    topology, number = request.topology, {node: i for i, node in enumerate(order)}
    devices = [
        LinkedDevice(
            node, topology.domains.get(node, ""), topology.leaves.get(node, ""), min(link.out_bytes_s, link.in_bytes_s)
        )
        for node, link in zip(order, links, strict=True)
    ]
    chains = tuple(
        tuple(tuple(number[device.name] for device in group.devices) for group in chain.groups)
        for chain in plan_chains(devices[:sources], devices[sources:])
        if chain.tail is not None
    )
    return _Case(request, order, sources, left_out, links, topology.wiring(order), chains)


@dataclass(frozen=True, slots=True)
class _Timed:
    """Expected seconds until the last receiver is done, and of all on average; the schedule if it had to be built."""

    last_s: float
    mean_s: float = 0.0
    """0: not computed."""
    schedule: Schedule | None = None


def _by_steps(name: str, blocks: int, case: _Case) -> _Timed:
    """The steps of the largest sub-group, all at the rate of the fastest link: what is expected when links are equal,
    and never more than :func:`_by_simulation` finds without a topology, except for :data:`BOUNDLESS`."""
    rate = min(max(link.out_bytes_s for link in case.links), max(link.in_bytes_s for link in case.links))
    group = 1 + max(map(len, case.groups(name)))
    return _Timed(STEPS[name](group, blocks) * (case.request.nbytes / blocks / rate + case.request.overhead_s))


def _by_simulation(name: str, blocks: int, case: _Case, most_s: float) -> _Timed:
    """On links of different speed, or where the topology matters. What cannot take ``most_s`` or less is not timed to
    its end."""
    if name == "one-to-all" and len(case.links) * blocks > MAX_SIMULATED:
        return _Timed(float("inf"))  # hopeless, and its many steps would take the planning budget
    request = case.request
    schedule = case.schedule(name, blocks)
    if case.wiring is not None and (least_s := _least_s(schedule, case, case.wiring)) > most_s:
        return _Timed(least_s)
    times = finish_times(schedule, case.links, request.nbytes / blocks, request.overhead_s, case.wiring)
    return _Timed(float(np.max(times)), float(np.mean(times[case.sources :])), schedule)


def _least_s(schedule: Schedule, case: _Case, wiring: Wiring) -> float:
    """What the busiest node needs for all that it sends over its own link."""
    out = np.array([link.out_bytes_s for link in case.links])
    sends = np.bincount(schedule.src[~wiring.near(schedule.src, schedule.dst)], minlength=schedule.nodes)
    request = case.request
    return float((sends * (request.nbytes / schedule.blocks / out + request.overhead_s)).max())


def _by_speed(request: PlanRequest) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
    """Sources in the given order of preference, fastest first, of equal ones those under a receiver's switch, and
    receivers likewise, so that slow ones forward least (BlitzScale orders groups by decreasing link speed for the same
    reason); how many of them are sources; and the sources that were left out because they are sending."""
    places = {request.topology.leaves.get(node, "") for node in request.receivers}

    def speed(node: str) -> tuple[float, bool]:
        link = request.link_of(node)
        return -min(link.out_bytes_s, link.in_bytes_s), request.topology.leaves.get(node, "") not in places

    idle = [node for node in request.sources if node not in request.sending] or request.sources
    usable = sorted(idle, key=speed)[: len(request.receivers)]
    left_out = tuple(node for node in request.sources if node not in idle)
    return (*usable, *sorted(request.receivers, key=speed)), len(usable), left_out


def _check(request: PlanRequest) -> None:
    names = [*request.sources, *request.receivers]
    if not request.sources or not request.receivers or len(set(names)) != len(names):
        raise ValueError(
            f"a multicast needs distinct sources and receivers, got {request.sources} -> {request.receivers}"
        )
