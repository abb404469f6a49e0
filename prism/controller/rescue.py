"""Requests in the queues of machines that are gone: back to the inactive queue, from where they go to another machine.

A machine whose agent lives takes its own queues over when it restarts. One that died or left for good has nobody who
does; its record in the store says which queues it had. Front doors may still put requests there for a moment (they
learn of the new placement a little later), so queues are looked at for a while after their machine is gone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import msgspec

from prism.controller.nodes import FleetNodes
from prism.controller.versions import Versions
from prism.core.ids import DeviceId, NodeId
from prism.store.interface import Store
from prism.store.values import AgentRecord, Entry
from prism.wire import keys
from prism.wire.messages import encode

log = logging.getLogger(__name__)

FORGET_S: Final = 60.0
"""So long after a machine was last heard of nobody knows its queues any more."""
SILENT_S: Final = 3.0
"""Agents announce themselves every second."""
UNHEARD_S: Final = 10.0
"""A machine that this controller has never heard and that has announced nothing for so long is gone: it died with the
controller before. One that lives all the same loses nothing but its work: ownership fences it."""
READ_COUNT: Final = 256


@dataclass(slots=True)
class _Seen:
    devices: tuple[DeviceId, ...]
    stamp_s: float
    """What the agent wrote last, by its own clock."""
    changed_s: float
    """When that was seen to change, by this process's clock: clocks of machines differ."""
    known: bool = False
    """It reported to this controller: if it is not among the nodes now, it is gone."""

    def gone(self, now_s: float) -> bool:
        return self.known or now_s - self.changed_s > UNHEARD_S


class Rescue:
    """:meth:`look` every second. ``consumer`` is the controller's name in the queues."""

    def __init__(self, store: Store, consumer: str) -> None:
        self._store, self._consumer = store, consumer
        self._seen: dict[NodeId, _Seen] = {}

    async def look(self, nodes: FleetNodes, versions: Versions, now_s: float) -> None:
        """Empties the queues of all machines that are gone. Raises :class:`StoreUnavailable`."""
        for record in await self._store.agents():
            versions.look(record)
            self._note(record, now_s)
        here = {node.id: tuple(d.id for d in node.devices) for node in nodes.all()}
        for node, devices in here.items():
            stamp_s = self._seen[node].stamp_s if node in self._seen else 0.0
            self._seen[node] = _Seen(devices, stamp_s, now_s, known=True)
        for node, seen in list(self._seen.items()):
            if node in here or not seen.gone(now_s):
                continue
            for device in seen.devices:
                await self._empty(device)
            if now_s - seen.changed_s > FORGET_S:
                await self._store.remove_agent(node)
                for device in seen.devices:
                    await self._store.forget(keys.device_queue(device))
                del self._seen[node]

    def is_silent(self, record: AgentRecord, now_s: float) -> bool:
        """Whether this is what a machine wrote that has neither reported nor announced itself for :data:`SILENT_S`. One
        that has just come back has written anew."""
        seen = self._seen.get(record.node)
        return seen is not None and seen.stamp_s == record.seen_s and now_s - seen.changed_s > SILENT_S

    def _note(self, record: AgentRecord, now_s: float) -> None:
        seen = self._seen.get(record.node)
        if seen is None:
            self._seen[record.node] = _Seen(tuple(record.devices), record.seen_s, now_s)
        elif seen.stamp_s != record.seen_s:
            seen.devices, seen.stamp_s, seen.changed_s = tuple(record.devices), record.seen_s, now_s

    async def _empty(self, device: DeviceId) -> None:
        queue = keys.device_queue(device)
        entries = await self._store.take_over(queue, self._consumer, idle_s=0.0, count=READ_COUNT)
        entries += await self._store.read_new([queue], self._consumer, READ_COUNT, 0.0)
        for entry in entries:
            await self._move(entry)
        if entries:
            log.info("%s is gone: %d of its requests go elsewhere", device, len(entries))

    async def _move(self, entry: Entry) -> None:
        try:
            submission = entry.submission
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            log.error("dropped an unreadable entry %s: %s", entry.entry_id, error)
            await self._store.done(entry, self._consumer)
            return
        moved = msgspec.structs.replace(submission, hops=submission.hops + 1)
        await self._store.move(entry, self._consumer, keys.INACTIVE_QUEUE, encode(moved))
