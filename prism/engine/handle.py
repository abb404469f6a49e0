"""An active engine as the node agent holds it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from prism.core.ids import DeviceId, EngineId
from prism.core.instances import InstanceKey
from prism.core.specs import DeviceKind
from prism.engine.api import Work
from prism.engine.commands import (
    AbortRequest,
    Activated,
    Crashed,
    Deactivated,
    DeactivateModel,
    DropAdapter,
    HoldSteps,
    NotActivated,
    Nudge,
    Parked,
    Report,
    SetKvLimit,
    Submit,
)
from prism.engine.errors import EngineGone
from prism.engine.events import AnyEvent, AttemptFinished, Died, EngineCounters, Lost
from prism.engine.link import WorkerLink, until_gone
from prism.engine.remote_orders import RemoteOrders
from prism.remote.orders import OrderDone

_FLOPS: Final = {DeviceKind.HOST: 2e10, DeviceKind.CUDA: 2e14}
"""Arithmetic a device does in a second, roughly: only a first guess of the prefill speed rests on it."""
_SHUTDOWN_S: Final = 30.0
"""A worker that has not given its model up after this is killed: it is stuck, not slow."""


class EngineHandle:
    """See :class:`prism.engine.api.Handle`. ``links`` are the ranks in order; rank 0 speaks for the engine."""

    def __init__(
        self,
        engine: EngineId,
        key: InstanceKey,
        links: Sequence[WorkerLink],
        activated: Activated,
        kind: DeviceKind,
        release: Callable[[Sequence[WorkerLink], bool], None],
    ) -> None:
        self._kind = kind
        self._id, self._key, self._links, self._activated = engine, key, tuple(links), activated
        self.info = activated.info
        self._release = release
        self._events: asyncio.Queue[AnyEvent | None] = asyncio.Queue()
        self._running: set[str] = set()
        self._load: EngineCounters | None = None
        self._answers: dict[str, asyncio.Future[Deactivated]] = {}
        self._leaving = False
        self._over = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.remote = RemoteOrders(self._links[0].send)
        for link in self._links:
            link.hand_to(self)

    @property
    def id(self) -> EngineId:
        return self._id

    @property
    def key(self) -> InstanceKey:
        return self._key

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return tuple(link.device for link in self._links)

    @property
    def phases(self) -> Mapping[str, float]:
        return self._activated.phases

    @property
    def helped_bytes(self) -> Mapping[str, int]:
        return self._activated.helped_bytes

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(link.pid for link in self._links)

    @property
    def load(self) -> EngineCounters | None:
        return self._load

    @property
    def alive(self) -> bool:
        return not self._over

    @property
    def ended(self) -> str:
        """How it ended, for people: the words of its first worker that is gone; empty while none is."""
        return next((link.describe_end() for link in self._links if link.gone.is_set()), "")

    @property
    def source(self) -> str:
        return "host" if self.info.from_image else "disk"

    @property
    def prefill_tokens_per_s(self) -> float:
        parameters = max(1, self.info.weight_bytes // self.info.dtype_bytes) * len(self._links)
        return _FLOPS[self._kind] * len(self._links) / (2 * parameters)

    @property
    def max_running(self) -> int:
        return self.info.max_running

    @property
    def chunk_tokens(self) -> int:
        return self.info.chunk_tokens

    @property
    def max_request_tokens(self) -> int:
        return self.info.max_request_tokens

    @property
    def device_tokens(self) -> int:
        return self.info.device_tokens

    @property
    def no_long(self) -> str:
        return self.info.no_long

    @property
    def began_with(self) -> tuple[int, ...]:
        return tuple(self.info.began_with)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(link.worker for link in self._links)

    @property
    def running(self) -> frozenset[str]:
        """Ids submitted and neither finished nor lost."""
        return frozenset(self._running)

    def submit(self, work: Work) -> None:
        if self._over or self._leaving:
            raise EngineGone(f"engine {self._id} takes no more requests")
        self._running.add(work.rid)
        self._idle.clear()
        self._links[0].send(
            Submit(
                rid=work.rid,
                payload=work.payload,
                front=work.front,
                attempt=work.attempt,
                resumed=list(work.resumed),
            )
        )

    def abort(self, rid: str) -> None:
        self._links[0].send(AbortRequest(rid=rid))

    def set_kv_limit(self, limit_bytes: int | None) -> None:
        # Rank 0 passes the frame on to the other ranks, so that all apply it at the same step.
        self._links[0].send(SetKvLimit(limit_bytes=limit_bytes))

    def forget_adapter(self, name: str) -> None:
        self._links[0].send(DropAdapter(name=name))

    def nudge(self) -> None:
        """Somebody waits for memory of these devices: let the engine look at the account now."""
        self._links[0].send(Nudge())

    def hold(self, for_s: float) -> None:
        self._links[0].send(HoldSteps(for_s=for_s))

    async def events(self) -> AsyncIterator[AnyEvent]:
        while (event := await self._events.get()) is not None:
            yield event

    async def deactivate(self, *, grace_s: float = 0.0) -> list[str]:
        if self._over:
            return sorted(self._running)
        self._leaving = True
        if grace_s > 0:
            await self._drain(grace_s)
        loop = asyncio.get_running_loop()
        self._answers = {link.worker: loop.create_future() for link in self._links}
        self._links[0].send(DeactivateModel())
        reusable = False
        with contextlib.suppress(TimeoutError, EngineGone):
            async with asyncio.timeout(_SHUTDOWN_S):
                await asyncio.gather(*self._answers.values())
            reusable = True
        self._finish(reusable)
        if not reusable:
            await until_gone(self._links)
        return sorted(self._running)

    def give_up(self) -> None:
        """The pool closes: the engine is over, and its workers are about to be killed."""
        self._finish(reusable=False)

    async def _drain(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return

    def _finish(self, reusable: bool) -> None:
        if self._over:
            return
        self._over = True
        self._events.put_nowait(None)
        self._release(self._links, reusable)

    def on_report(self, link: WorkerLink, report: Report) -> None:
        match report:
            case Deactivated():
                link.kept = tuple(report.kept)
                answer = self._answers.get(link.worker)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case EngineCounters():
                before, self._load = self._load, report
                self._events.put_nowait(report)
                if report.remote != (None if before is None else before.remote):
                    self.remote.told()
            case OrderDone():
                self.remote.on_done(report)
            case Activated() | NotActivated() | Parked() | Crashed():
                pass
            case _:
                if isinstance(report, AttemptFinished | Lost):
                    self._running.discard(report.rid)
                    if not self._running:
                        self._idle.set()
                self._events.put_nowait(report)

    def on_gone(self, link: WorkerLink) -> None:
        if self._over:
            return
        gone = link.describe_end()
        self.remote.on_gone(gone)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineGone(gone))
        words = link.last_words
        crashed = sorted(self._running) if link.crashed else ()
        self._events.put_nowait(Died(reason=gone, suspects=tuple(crashed if words is None else words.suspects)))
        self._idle.set()
        self._finish(reusable=False)
