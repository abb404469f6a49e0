"""Execution pipelines while a multicast runs (lambda-Scale 4.2 to 4.4): receivers that together hold a model serve it.

``k`` sources send to all receivers in sub-groups whose chunks are shifted (Algorithm 1), so that the t-th receivers of
all sub-groups together hold the model after about blocks / k steps; they are one pipeline (Algorithm 2). Each member
leads requests of its own and runs its blocks for the others (2-D pipelining), and goes on alone when its last block
is there (mode switch). What leading takes, embedding and head, comes to the first sub-group at once, and to the others
behind their own chunk: until then the first member leads alone::

    2 -> 8, 4 blocks    sub-group 0: s0 -> r0 r1 r2   0 1 2 3       pipelines (r0 r3) (r1 r4) (r2 r5)
                        sub-group 1: s1 -> r3 r4 r5   2 3 0 1       r0 runs blocks 0 1, r3 runs 2 3

The cases of several devices (4.3) differ only in what a *seat* of a pipeline is: one device (case 1); the ``tp``
devices of a machine that hold one instance together (case 2); each further free device of a machine, which gets every
block from the first one over the machine's own links and sits in a pipeline of its own (case 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prism.policy.multicast.estimate import block_times
from prism.policy.multicast.groups import pipelines, transfer_orders
from prism.policy.multicast.planner import DEFAULT_BLOCKS, Plan, PlanRequest, plan

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PipelineSeat:
    """What runs one stage: the ``copy``-th instance that fits on a machine's free devices."""

    node: str
    copy: int = 0


@dataclass(frozen=True, slots=True)
class StageRun:
    """Blocks [first, end) are run by one seat. A seat may have several runs."""

    seat: PipelineSeat
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ExecutionPipeline:
    """Seats that serve together from ``ready_s`` on; times count from the start of the multicast."""

    runs: tuple[StageRun, ...]
    """In the order of the blocks, without gaps."""
    ready_s: float
    """When its seats together hold every block."""
    alone_s: Mapping[PipelineSeat, float]
    """When each seat holds every block itself."""


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A multicast whose receivers serve meanwhile."""

    multicast: PlanRequest
    tp: int = 1
    """Devices that one instance takes, all of one machine."""
    free_devices: Mapping[str, int] = field(default_factory=dict)
    """Of each receiver, those for this model; ``tp`` where a receiver is missing here."""
    local_bytes_s: float = 50e9
    """Between devices of one machine."""


@dataclass(frozen=True, slots=True)
class LivePlan:
    """Who sends what to whom, and who serves together until it is there."""

    multicast: Plan
    pipelines: tuple[ExecutionPipeline, ...]


def plan_live(request: LiveRequest) -> LivePlan:
    """The fastest multicast, and the pipelines on its way. Raises ``ValueError`` as :func:`plan` does, and when a
    receiver has fewer free devices than an instance takes."""
    copies = {node: _copies(request, node) for node in request.multicast.receivers}
    chosen = plan(request.multicast)
    schedule = chosen.schedule
    links = [request.multicast.links.get(n, request.multicast.default_link) for n in chosen.nodes]
    block_bytes = request.multicast.nbytes / schedule.blocks
    wiring = request.multicast.topology.wiring(chosen.nodes)
    held = block_times(schedule, links, block_bytes, request.multicast.overhead_s, wiring)
    local_s = block_bytes / request.local_bytes_s + request.multicast.overhead_s
    made: list[ExecutionPipeline] = []
    for copy in range(max(copies.values())):
        having = [[n for n in group if copies[chosen.nodes[n]] > copy] for group in chosen.groups]
        arrival = held + copy * local_s
        made += [_pipeline([PipelineSeat(chosen.nodes[n], copy) for n in m], arrival[m]) for m in pipelines(having)]
    return LivePlan(chosen, tuple(made))


def plan_warm(nodes: Sequence[str], blocks: int, nbytes: int, load_bytes_s: float) -> tuple[ExecutionPipeline, ...]:
    """The pipeline of machines that each load the model from their own memory (warm start, lambda-Scale 5): the order
    of their blocks is shifted, so that together they hold the model after the n-th part of the time. Raises
    ``ValueError`` without a node or a block."""
    if not nodes or blocks < 1:
        raise ValueError(f"a warm start needs machines and blocks, got {len(nodes)} and {blocks}")
    arrival = np.zeros((len(nodes), blocks))
    for row, order in enumerate(transfer_orders(len(nodes), blocks)):
        arrival[row, order] = (np.arange(blocks) + 1) * (nbytes / blocks / load_bytes_s)
    return (_pipeline([PipelineSeat(node) for node in nodes], arrival),)


@dataclass(frozen=True, slots=True)
class PipelineShare:
    """A pipeline of a scale-out that is not planned yet, in parts of the time that all weights take."""

    members: int
    ready: float


@lru_cache(maxsize=256)
def expected_pipelines(sources: int, receivers: int) -> tuple[PipelineShare, ...]:
    """The pipelines that ``receivers`` equal machines would form while ``sources`` send, on equal links: what is known
    before it is decided who sends to whom. Raises ``ValueError`` without a source or a receiver."""
    sending, receiving = (tuple(f"{what}{i}" for i in range(n)) for what, n in (("s", sources), ("r", receivers)))
    request = PlanRequest(sending, receiving, nbytes=1 << 30, blocks=DEFAULT_BLOCKS, overhead_s=0.0)
    found = plan_live(LiveRequest(request)).pipelines
    last_s = max(max(pipeline.alone_s.values()) for pipeline in found)
    return tuple(PipelineShare(len(pipeline.alone_s), pipeline.ready_s / last_s) for pipeline in found)


def _copies(request: LiveRequest, node: str) -> int:
    free = request.free_devices.get(node, request.tp)
    if free < request.tp:
        raise ValueError(f"{node} has {free} free devices, an instance takes {request.tp}")
    return free // request.tp


def _pipeline(seats: Sequence[PipelineSeat], arrival: Floats) -> ExecutionPipeline:
    """``arrival[seat, block]``: when the seat has the block."""
    ready_s = float(arrival.min(axis=0).max())
    runner = share_blocks(arrival <= ready_s)
    bounds = [0, *(np.flatnonzero(np.diff(runner)) + 1).tolist(), len(runner)]
    runs = [StageRun(seats[int(runner[a])], a, b) for a, b in pairwise(bounds)]
    return ExecutionPipeline(tuple(runs), ready_s, dict(zip(seats, arrival.max(axis=1).tolist(), strict=True)))


def share_blocks(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Which member runs each block, of those that hold it (``holds[member, block]``; somebody holds each).

    Block by block: the member that runs the block before goes on while it holds the next and has not its even share
    yet, since every change of the member is a hop; else the one with the fewest blocks so far that could go on
    longest.
    """
    members, blocks = holds.shape
    even = -(-blocks // members)
    ahead = _ahead(holds)
    load = np.zeros(members, dtype=np.int64)
    runner = np.empty(blocks, dtype=np.int64)
    now = -1
    for block in range(blocks):
        if now < 0 or not holds[now, block] or load[now] >= even:
            able = np.flatnonzero(holds[:, block])
            now = int(able[np.lexsort((-ahead[able, block], load[able]))[0]])
        runner[block] = now
        load[now] += 1
    return runner


def _ahead(holds: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """``[member, block]``: how many blocks from this one on the member holds without a gap."""
    ahead = np.zeros(holds.shape, dtype=np.int64)
    run = np.zeros(holds.shape[0], dtype=np.int64)
    for block in range(holds.shape[1] - 1, -1, -1):
        run = np.where(holds[:, block], run + 1, 0)
        ahead[:, block] = run
    return ahead
