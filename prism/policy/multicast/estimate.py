"""How long a schedule takes on given links: the model behind the planner's choice.

A transfer starts when its source holds the block and both ends have finished what the schedule gives them before; it
runs at the slower of the source's outgoing and the destination's incoming rate. Links are full duplex. Where the
topology is known, transfers of one step share their leaf's uplink, and those inside a fast domain have its rate and
leave the nodes' links free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism.policy.multicast.schedule import Schedule
from prism.policy.multicast.topology import Wiring

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NodeLink:
    """A node's connection: bytes per second each way."""

    out_bytes_s: float
    in_bytes_s: float


def finish_times(
    schedule: Schedule,
    links: Sequence[NodeLink],
    block_bytes: float,
    overhead_s: float,
    wiring: Wiring | None = None,
) -> Floats:
    """Seconds until each node holds everything; 0 for sources. See :func:`block_times`."""
    return np.asarray(block_times(schedule, links, block_bytes, overhead_s, wiring).max(axis=1), dtype=np.float64)


def block_times(
    schedule: Schedule,
    links: Sequence[NodeLink],
    block_bytes: float,
    overhead_s: float,
    wiring: Wiring | None = None,
) -> Floats:
    """``[node, block]``: seconds until the node holds the block; 0 for sources. ``overhead_s`` is lost per block and
    hop (request, grant, acknowledgement, checksum)."""
    out = np.array([link.out_bytes_s for link in links])
    inward = np.array([link.in_bytes_s for link in links])
    held = np.zeros((schedule.nodes, schedule.blocks))
    send_free = np.zeros(schedule.nodes)
    recv_free = np.zeros(schedule.nodes)
    bounds = np.searchsorted(schedule.step, np.arange(schedule.steps + 1))
    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        src, dst, block = schedule.src[first:end], schedule.dst[first:end], schedule.block[first:end]
        rate = np.minimum(out[src], inward[dst])
        if wiring is not None:
            rate = wiring.rates(src, dst, rate)
            near = wiring.near(src, dst)
            held[dst[near], block[near]] = held[src[near], block[near]] + overhead_s + block_bytes / rate[near]
            src, dst, block, rate = src[~near], dst[~near], block[~near], rate[~near]
        start = np.maximum(np.maximum(held[src, block], send_free[src]), recv_free[dst])
        end_s = start + overhead_s + block_bytes / rate
        held[dst, block] = end_s
        send_free[src] = end_s
        recv_free[dst] = end_s
    return held


def first_model_s(
    schedule: Schedule, pipeline: Sequence[int], links: Sequence[NodeLink], block_bytes: float, overhead_s: float
) -> float:
    """Seconds until the nodes of ``pipeline`` together hold every block (execute-while-load may begin)."""
    limited = np.isin(schedule.dst, np.array(pipeline))
    arrival = _arrivals(schedule, links, block_bytes, overhead_s)
    first = np.full(schedule.blocks, np.inf)
    np.minimum.at(first, schedule.block[limited], arrival[limited])
    return float(first.max())


def _arrivals(schedule: Schedule, links: Sequence[NodeLink], block_bytes: float, overhead_s: float) -> Floats:
    """End time of every transfer, for links of equal speed the step number scaled."""
    slowest = min(min(link.out_bytes_s, link.in_bytes_s) for link in links)
    return np.asarray((schedule.step + 1) * (block_bytes / slowest + overhead_s), dtype=np.float64)
