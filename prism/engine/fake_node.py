"""A node of fake engines: takes requests from a device's queue and answers them, in place of controller, agent and
engines.

``python -m prism.engine.fake_node --redis-url URL --models a,b`` serves the named models beside a front door that uses
the same store; the front door's tests run it in their own process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from prism.core.ids import DeviceId, Generation, ModelName, node_of
from prism.core.instances import InstanceKey, whole_model
from prism.core.views import InstanceState
from prism.engine.api import Work
from prism.engine.events import AttemptFinished
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed
from prism.store.connect import open_store
from prism.store.interface import Store, consumer_name
from prism.store.ledger import Ledger
from prism.store.values import AgentRecord, ControllerRecord, Entry, Replica, StoreError
from prism.wire import keys
from prism.wire.mailbox import Inbox
from prism.wire.messages import Cancel, Submission

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""Nobody else wants it; a process that shares one with its tests may come to renew it late."""


class FakeNode:
    """Every model of ``models`` is ready on ``device`` at once, requests for others wait. :meth:`run` until cancelled;
    ``ready`` is set when requests are taken."""

    def __init__(
        self, store: Store, mailbox: str, models: Mapping[str, FakeSpeed], device: str = "local/host:0"
    ) -> None:
        self.store, self.device = store, DeviceId(device)
        self.inbox = Inbox(mailbox)
        self.consumer = consumer_name("fake-node")
        self.pool = FakePool()
        self.handles = {model: self._engine(model, speed) for model, speed in models.items()}
        self.entries: dict[str, Entry] = {}
        self._waiting: dict[str, list[Entry]] = {}
        self.answered = 0
        self.ready = asyncio.Event()
        self._ledger = Ledger(store, self.consumer)

    def _engine(self, model: str, speed: FakeSpeed) -> FakeHandle:
        self.pool.speed = speed
        return self.pool.start_engine(InstanceKey(ModelName(model), Generation(1)), [self.device])

    def activate(self, model: str, speed: FakeSpeed) -> None:
        """A model that was missing is there from now on; what waits for it starts."""
        self.handles[model] = self._engine(model, speed)
        self._tasks.create_task(self._finish(self.handles[model]))
        for entry in self._waiting.pop(model, []):
            self._start(entry, entry.submission)

    async def run(self) -> None:
        """Serves until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks = group
                group.create_task(self._lead())
                group.create_task(self._take())
                group.create_task(self._mail())
                for handle in self.handles.values():
                    group.create_task(self._finish(handle))
        finally:
            self.inbox.close()
            await self.pool.close()

    async def _lead(self) -> None:
        """Holds the controller's lease, since somebody must say where the models are."""
        holder = await self._lease()
        for model in self.handles:
            replica = Replica(
                parts=whole_model([self.device]),
                state=InstanceState.READY,
                generation=Generation(1),
                reason="fake",
                since_s=time.time(),
            )
            await self.store.set_placement(ModelName(model), [replica], holder)
        self.ready.set()
        while True:
            with contextlib.suppress(StoreError):
                await self.store.renew_lease(holder, LEASE_S)
                await self.store.announce_agent(self._record())
            await asyncio.sleep(1.0)

    async def _lease(self) -> ControllerRecord:
        while True:
            holder = await self.store.acquire_lease(self.consumer, self.inbox.address, LEASE_S)
            if holder is not None:
                return holder
            await asyncio.sleep(0.1)

    def _record(self) -> AgentRecord:
        return AgentRecord(
            node=node_of(self.device),
            mailbox=self.inbox.address,
            devices=[self.device],
            seen_s=time.time(),
            detail={"consumer": self.consumer},
        )

    async def _take(self) -> None:
        queues = [keys.device_queue(self.device), keys.INACTIVE_QUEUE]
        while True:
            try:
                entries = await self.store.read_new(queues, self.consumer, 512, 1.0)
            except StoreError as error:
                log.warning("the store is away: %s", error)
                continue
            for entry in entries:
                self._start(entry, entry.submission)

    def _start(self, entry: Entry, submission: Submission) -> None:
        handle = self.handles.get(submission.model)
        if handle is None:
            self._waiting.setdefault(submission.model, []).append(entry)
            return
        self.entries[submission.id] = entry
        handle.submit(Work(rid=submission.id, payload=submission.payload, front=submission.front, attempt=1))

    async def _finish(self, handle: FakeHandle) -> None:
        async for event in handle.events():
            if isinstance(event, AttemptFinished):
                self.answered += 1
                self._ledger.done(self.entries.pop(event.rid))

    async def _mail(self) -> None:
        async for message in self.inbox:
            if isinstance(message, Cancel):
                self._cancel(message.id)

    def _cancel(self, request_id: str) -> None:
        for handle in self.handles.values():
            handle.abort(request_id)
        for waiting in self._waiting.values():
            for entry in [entry for entry in waiting if entry.request_id == request_id]:
                waiting.remove(entry)
                self._ledger.done(entry)


async def _serve(options: argparse.Namespace) -> None:
    speed = FakeSpeed(prefill_s=options.prefill_s, step_s=options.step_s)
    store = open_store(options.redis_url)
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        models = dict.fromkeys(options.models.split(","), speed)
        node = FakeNode(store, f"ipc://{Path(folder)}/node", models, options.device)
        await node.run()


def main() -> None:
    parser = argparse.ArgumentParser(description="A node of fake engines.")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--models", required=True, help="comma-separated names of the catalog")
    parser.add_argument("--device", default="local/host:0")
    parser.add_argument("--prefill-s", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds per token; 0: all at once")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
