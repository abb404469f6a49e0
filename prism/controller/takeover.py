"""A controller that has just got the lease hears the fleet before it decides anything; and an operator who counts on a
machine that has just come is not told that there is none.

What serves where is known by the machines, which report once a second. Until all of them have, an instance on one that
has not been heard yet would be started again beside itself: for a pinned model, for a request that comes, for an
operator's order. And a machine that leaves would be told that nobody takes its KV (:mod:`prism.controller.kv_takers`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from prism.controller.nodes import FleetNodes
from prism.core.ids import NodeId
from prism.store.interface import State
from prism.store.values import AgentRecord, StoreUnavailable

log = logging.getLogger(__name__)

HEARD_WITHIN_S: Final = 3.0
"""Machines that the store names and that have not reported by then are taken for gone: reports come every second."""
LOOK_S: Final = 0.05


async def fleet_heard(
    store: State, nodes: FleetNodes, is_silent: Callable[[AgentRecord], bool] = lambda record: False
) -> None:
    """Returns when every machine that the store names has reported to this controller, at once where there is none;
    after :data:`HEARD_WITHIN_S` in any case. Who ``is_silent`` is known to be gone, and not waited for."""
    missing: set[NodeId] = set()
    for _ in range(round(HEARD_WITHIN_S / LOOK_S)):
        try:
            named = {record.node for record in await store.agents() if not is_silent(record)}
            missing = named - {node.id for node in nodes.all()}
        except StoreUnavailable as error:
            log.warning("cannot read which machines there are: %s", error)
            missing = {NodeId("(unknown)")}
        if not missing:
            return
        await asyncio.sleep(LOOK_S)
    log.warning("machines that have not reported count as gone until they do: %s", ", ".join(sorted(missing)))
