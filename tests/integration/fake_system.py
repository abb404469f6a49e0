"""Controller, node agents and fake engines in one process over the in-memory store, with a front door of ten lines."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec

from prism.config.sections.machine import WeightConfig
from prism.controller.controller import Controller
from prism.controller.models import KnownModels
from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.settings import ClusterSettings, GpuSettings
from prism.core.specs import DeviceKind, DeviceSpec, ModelShape, ModelSpec
from prism.engine.fake import FakeHandle, FakePool, FakeSpeed, fake_tokens
from prism.node.agent import AgentMachine, NodeAgent
from prism.node.weights import NodeWeights
from prism.obs.decisions import DecisionLog
from prism.obs.metrics import Metrics
from prism.scheduler import cluster_scheduler
from prism.store.connect import open_store
from prism.store.interface import Store
from prism.wire import keys
from prism.wire.mailbox import Inbox, Outbox
from prism.wire.messages import Failed, Finish, ResumeQuery, ResumeReply, Submission, Tokens, decode, encode
from prism.wire.secret import MailKeys
from tests.patience import LOOK_S, PATIENCE_S, happens

MIB = 1 << 20
SHAPE = ModelShape(2, 64, 4, 2, 16, 128, 1000)
MAX_WAIT_S = 2 * PATIENCE_S
"""Nothing is refused for having waited: that is tested where time is an argument."""
SETTLE_S = 2.0
SPEED = FakeSpeed(activation_s=0.02, prefill_s=0.005, step_s=0.002)


@dataclass
class Answer:
    """What a client has received."""

    tokens: list[int] = field(default_factory=list)
    attempt: int = 1
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failed: Failed | None = None
    finish: dict[str, object] | None = None
    prompt: tuple[int, ...] = ()
    wanted: int = 0

    @property
    def expected(self) -> list[int]:
        return fake_tokens(self.prompt, 0, self.wanted, SPEED.vocab)


class Front:
    """Routes, keeps the token log, answers agents: the contract of a front door and nothing else."""

    def __init__(self, store: Store, inbox: Inbox) -> None:
        self.store, self.inbox, self.outbox = store, inbox, Outbox(keys=inbox.keys)
        self.answers: dict[str, Answer] = {}
        self._settling: set[asyncio.Task[None]] = set()
        self._count = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._mail())
            group.create_task(self._announce())

    async def ask(self, model: str, tokens: int = 20) -> Answer:
        """Sends one request; the answer fills up by itself."""
        self._count += 1
        id = f"r{self._count}"
        answer = self.answers[id] = Answer(prompt=(self._count, 2, 3), wanted=tokens)
        fields: list[object] = [None] * 12
        fields[0], fields[4], fields[8] = "TokenizedGenerateReqInput", ["q", array("q", answer.prompt).tobytes()], {}
        fields[8] = {"max_new_tokens": tokens}
        submission = Submission(
            id=id,
            model=model,
            front=self.inbox.address,
            arrival_s=time.time(),
            prompt_tokens=3,
            max_new_tokens=tokens,
            slo_ttft_s=1.0,
            slo_tpot_s=0.1,
            max_wait_s=MAX_WAIT_S,
            late="serve",
            payload=msgspec.msgpack.encode(fields),
        )
        ready = [r for r in (await self.store.placement()).get(ModelName(model), []) if r.ready]
        queue = keys.device_queue(ready[0].queue_device) if ready else keys.INACTIVE_QUEUE
        await self.store.add(queue, id, encode(submission))
        return answer

    async def _announce(self) -> None:
        while True:
            await self.store.announce_front(self.inbox.address, time.time())
            await asyncio.sleep(0.5)

    async def _mail(self) -> None:
        async for message in self.inbox:
            match message:
                case Tokens():
                    self._take(message)
                case Failed(id=id):
                    self.answers[id].failed = message
                    self.answers[id].ended.set()
                case ResumeQuery(id=id, reply_to=reply_to):
                    answer = self.answers[id]
                    answer.attempt += 1
                    self._reply(id, reply_to)
                case Finish():
                    task = asyncio.get_running_loop().create_task(self._settle(message))
                    self._settling.add(task)
                    task.add_done_callback(self._settling.discard)

    async def _settle(self, message: Finish) -> None:
        """Tokens come over another connection and may be behind the word that it was the last; what does not come
        is dropped, and made again."""
        answer, tokens = self.answers[message.id], decode(message.final)
        assert isinstance(tokens, Tokens)
        attempt, give_up_s = answer.attempt, time.monotonic() + SETTLE_S
        self._take(tokens)
        while not answer.ended.is_set() and answer.attempt == attempt and time.monotonic() < give_up_s:
            await asyncio.sleep(LOOK_S)
            self._take(tokens)
        if not answer.ended.is_set():
            answer.attempt += 1
        self._reply(message.id, message.reply_to)

    def _take(self, message: Tokens) -> None:
        for item in message.items:
            answer = self.answers[item.id]
            if item.attempt != answer.attempt or item.start > len(answer.tokens):
                continue
            answer.tokens += item.token_ids[len(answer.tokens) - item.start :]
            if item.finish is not None:
                answer.finish = item.finish
                answer.ended.set()

    def _reply(self, id: str, reply_to: str) -> None:
        answer = self.answers[id]
        reply = ResumeReply(
            id=id,
            known=True,
            attempt=answer.attempt,
            token_ids=list(answer.tokens),
            complete=answer.ended.is_set(),
        )
        self.outbox.send(reply_to, reply)


class Catalog:
    """The part of a catalog that the controller uses, without files."""

    def __init__(self, specs: list[ModelSpec], file: Path) -> None:
        self.specs = self.by_name = {s.name: s for s in specs}
        self.models: list[object] = [SimpleNamespace(name=s.name, path=s.path, pinned=True) for s in specs if s.pinned]
        self.entries: list[object] = []
        self.file = file
        self.weights = WeightConfig()

    def spec(self, name: str) -> ModelSpec:
        return self.specs[ModelName(name)]


def model(name: str, weight_bytes: int = 40 * MIB) -> ModelSpec:
    return ModelSpec(ModelName(name), f"/{name}", 1.0, 0.1, weight_bytes, SHAPE, 1024, max_wait_s=MAX_WAIT_S)


async def ended(*answers: Answer) -> None:
    await happens(lambda: all(a.ended.is_set() for a in answers), "the end of all answers")


async def some_tokens(answers: list[Answer]) -> None:
    """Each answer is under way (or has ended, on a machine that lets nothing else run meanwhile)."""
    await happens(lambda: all(len(a.tokens) > 5 for a in answers), "some tokens of each answer")


def whole(answer: Answer) -> bool:
    return answer.failed is None and answer.tokens == answer.expected


def start_controller(
    folder: Path,
    specs: list[ModelSpec],
    store: Store,
    inbox: Inbox,
    decisions: DecisionLog,
    *,
    first_generation: int = 1,
    **settings: object,
) -> Controller:
    """With a ``first_generation`` above 1 it takes over from another."""
    models = KnownModels(Catalog(specs, folder / "catalog.yaml"))  # type: ignore[arg-type]
    takes_over, known = first_generation > 1, ClusterSettings(**settings)  # type: ignore[arg-type]
    scheduler = cluster_scheduler(known, [], first_generation, takes_over)
    controller = Controller(models, scheduler, store, inbox, decisions, Metrics())
    controller.admin.view = lambda: {}  # type: ignore[method-assign]
    return controller


@dataclass
class System:
    store: Store
    front: Front
    pools: list[FakePool]
    agents: list[NodeAgent]
    controller: Controller
    tasks: dict[str, asyncio.Task[None]]

    def engines(self, name: str) -> list[FakeHandle]:
        return [h for p in self.pools for h in p.handles if h.key.model == name and h.alive]

    async def left(self) -> int:
        queues = [keys.INACTIVE_QUEUE, *(keys.device_queue(d.id) for a in self.agents for d in a.devices)]
        return sum(await self.store.lengths(queues))

    async def empty(self) -> None:
        """Waits until nothing stands in any queue."""
        async with asyncio.timeout(PATIENCE_S):
            while await self.left():
                await asyncio.sleep(LOOK_S)


def start_agent(
    system_store: Store,
    folder: Path,
    pool: FakePool,
    name: str,
    serial: int,
    node_name: str = "local",
    keys: MailKeys | None = None,
    weights: NodeWeights | None = None,
) -> NodeAgent:
    node = NodeId(node_name)
    devices = [DeviceSpec(DeviceId(f"{node}/host:{i}"), node, DeviceKind.HOST, 100 * MIB) for i in range(2)]
    inbox = Inbox(address(folder, f"{name}{serial}", keys), keys=keys)
    accounts = {d.id: _Untouched() for d in devices}
    machine = AgentMachine(node, tuple(devices), accounts)
    return NodeAgent(machine, GpuSettings(), pool, system_store, inbox, Metrics(), weights)


class _Untouched:
    """The account of a device that nobody takes memory from."""

    def free_bytes(self) -> int:
        return 100 * MIB

    def wanted_bytes(self) -> int:
        return 0

    def foreign_bytes(self) -> int:
        return 0

    def outside_bytes(self) -> int:
        return 0


def address(folder: Path, name: str, keys: MailKeys | None) -> str:
    """Of a mailbox: on the network when there are keys for it."""
    return f"ipc://{folder}/{name}.ipc" if keys is None else "tcp://127.0.0.1:0"


@asynccontextmanager
async def fake_system(
    folder: Path, specs: list[ModelSpec], mail_keys: MailKeys | None = None, **settings: object
) -> AsyncIterator[System]:
    """A running system; when the block ends everything is stopped. With ``mail_keys`` its mailboxes are on the
    network, as those of a fleet."""
    store = open_store("memory://")
    pool = FakePool(SPEED, keys=mail_keys)
    agent = start_agent(store, folder, pool, "agent", 0, keys=mail_keys)
    (folder / "catalog.yaml").touch()
    with (
        Inbox(address(folder, "front", mail_keys), keys=mail_keys) as front_inbox,
        Inbox(address(folder, "controller", mail_keys), keys=mail_keys) as inbox,
    ):
        decisions = DecisionLog(folder / "decisions.jsonl", Metrics())
        controller = start_controller(folder, specs, store, inbox, decisions, **settings)
        front = Front(store, front_inbox)
        system = System(store, front, [pool], [agent], controller, {})
        for name, main in (("front", front.run()), ("controller", controller.run()), ("agent", agent.run())):
            system.tasks[name] = asyncio.create_task(main)
        try:
            yield system
        finally:
            for task in system.tasks.values():
                task.cancel()
            await asyncio.gather(*system.tasks.values(), return_exceptions=True)
            front.outbox.close()
            for a in system.agents:
                a.inbox.close()
            decisions.close()
            await store.aclose()
