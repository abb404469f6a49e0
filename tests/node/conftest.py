"""A device shell over the in-memory store, with an engine and a front door that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from prism.core.device_events import EngineUp, MemoryReport
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey
from prism.core.settings import GpuSettings
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.api import Work
from prism.engine.errors import EngineGone
from prism.node.device import DeviceShell
from prism.node.measures import NodeMeasures
from prism.node.services import NodeServices
from prism.obs.metrics import Metrics
from prism.store.connect import open_store
from prism.store.interface import Store
from prism.wire import keys
from prism.wire.messages import Submission, encode
from tests.outbox import NotedOutbox
from tests.patience import LOOK_S, PATIENCE_S

DEVICE = DeviceId("local/host:0")
QUEUE = keys.device_queue(DEVICE)
FRONT = "ipc:///front"


@dataclass
class Engine:
    """Stands in for a handle: notes what it was given, says what the test puts into ``queue``."""

    key: InstanceKey
    works: list[Work] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    queue: asyncio.Queue = field(default_factory=asyncio.Queue)
    alive: bool = True
    load: object = None

    def submit(self, work: Work) -> None:
        if not self.alive:
            raise EngineGone("dead")
        self.works.append(work)

    def hold(self, for_s: float) -> None:
        """Its answers come when a test says so, whoever stands still."""

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def events(self) -> AsyncIterator[object]:
        while (event := await self.queue.get()) is not None:
            yield event


@dataclass
class Bench:
    """Everything a test of one device needs."""

    shell: DeviceShell
    store: Store
    outbox: NotedOutbox
    free_bytes: int = 1 << 30
    wanted_bytes: int = 0
    now_s: float = 1000.0
    clock_s: float = 0.0
    hasten_report: Callable[[], None] = lambda: None
    emptied: list[InstanceKey] = field(default_factory=list)
    on_emptied: Callable[[InstanceKey], None] = lambda key: None

    def note_emptied(self, key: InstanceKey) -> None:
        self.emptied.append(key)
        self.on_emptied(key)

    async def submit(self, id: str, model: str = "m", hops: int = 0, **changes: object) -> None:
        """Puts a request into the device's queue, as a front door does."""
        values = {
            "id": id,
            "model": model,
            "front": FRONT,
            "arrival_s": self.now_s,
            "prompt_tokens": 10,
            "max_new_tokens": 5,
            "slo_ttft_s": 1.0,
            "slo_tpot_s": 0.1,
            "max_wait_s": 60.0,
            "late": "serve",
            "payload": b"payload",
            "hops": hops,
        } | changes
        await self.store.add(QUEUE, id, encode(Submission(**values)))

    def engine_up(self, model: str = "m", generation: int = 1) -> Engine:
        engine = Engine(InstanceKey(ModelName(model), Generation(generation)))
        up = EngineUp(engine.key, 1e6, 1000, 8)
        self.shell.engine_up(engine, up)  # type: ignore[arg-type]
        self.shell.feed(MemoryReport(self.free_bytes))
        return engine

    async def settle(self) -> None:
        """Lets everything that can happen now happen."""
        for _ in range(20):
            await asyncio.sleep(0)
        await self.shell.desk.ledger.drain()

    async def stands(self, count: int, queue: str = QUEUE) -> None:
        """Waits until so many requests stand in ``queue``."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.left(queue) != count:
                await asyncio.sleep(LOOK_S)

    async def left(self, queue: str = QUEUE) -> int:
        return (await self.store.lengths([queue]))[0]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    store = open_store("memory://")
    outbox = NotedOutbox()
    bench = Bench.__new__(Bench)
    services = NodeServices(
        store,
        outbox,  # type: ignore[arg-type]
        "ipc:///agent",
        "agent:1",
        NodeMeasures(Metrics(), []),
        hasten_report=lambda: bench.hasten_report(),
        note_emptied=lambda key: bench.note_emptied(key),
        now_s=lambda: bench.now_s,
        clock_s=lambda: bench.clock_s,
    )
    spec = DeviceSpec(DEVICE, NodeId("local"), DeviceKind.HOST, 1 << 30)
    shell = DeviceShell(spec, GpuSettings(), lambda: MemoryReport(bench.free_bytes, bench.wanted_bytes), services)
    bench.__init__(shell, store, outbox)  # type: ignore[misc]
    task = asyncio.create_task(shell.run())
    await bench.settle()
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.aclose()
