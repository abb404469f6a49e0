"""An engine pool that makes its tokens up, at a settable speed, and speaks the real protocol. It needs no SGLang, no
model files and no device: for tests of everything around engines, for benchmarks of everything but engines, and to try
Prism out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prism.core.ids import DeviceId, EngineId, ModelName
from prism.core.instances import InstanceKey, Part
from prism.core.specs import ModelSpec
from prism.engine.api import Work
from prism.engine.errors import ActivationCause, CannotActivate, EngineGone
from prism.engine.events import Accepted, AnyEvent, AttemptFinished, AttemptFirstToken, Died, EngineCounters
from prism.engine.fake_layers import FakeLayers
from prism.engine.fake_payload import fake_extra, fake_tokens, fake_vector, read_payload
from prism.wire.mailbox import Outbox
from prism.wire.messages import TokenItem, Tokens, encode
from prism.wire.secret import MailKeys


@dataclass(frozen=True, slots=True)
class FakeSpeed:
    """How slow the fake engine is. The default is as fast as Python goes."""

    activation_s: float = 0.0
    prefill_s: float = 0.0
    """From taking a request in to its first token."""
    step_s: float = 0.0
    """Between the tokens of one request; 0: all tokens in one message."""
    max_running: int = 256
    vocab: range = range(100, 164)
    """Token ids to answer with."""


@dataclass(slots=True)
class _Run:
    work: Work
    prompt_ids: tuple[int, ...]
    total: int
    top: int | None
    sent: int
    script: list[int] | None = None
    vector: bytes = b""
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class FakeHandle:
    """One "active model". Implements :class:`prism.engine.api.Handle`; :meth:`kill` plays a death."""

    source = "host"
    chunk_tokens = 8192
    max_request_tokens = 1 << 20
    device_tokens = 0
    no_long = ""
    prefill_tokens_per_s = 1e6

    def __init__(
        self,
        engine: str,
        key: InstanceKey,
        devices: tuple[DeviceId, ...],
        speed: FakeSpeed,
        outbox: Outbox,
        began_with: Sequence[int] = (),
        layers: int = 0,
    ) -> None:
        self.id, self.key, self.devices = EngineId(engine), key, devices
        self.phases: Mapping[str, float] = {"fake": speed.activation_s}
        self.helped_bytes: Mapping[str, int] = {}
        self.pids: tuple[int, ...] = (os.getpid(),)
        self.max_running = speed.max_running
        self.alive = True
        self.kv_limit_bytes: int | None = None
        self.forgotten: list[str] = []
        self.holds: list[float] = []
        """Adapters it was told to let go of."""
        self.answer: Callable[[tuple[int, ...]], list[int]] | None = None
        """Tokens to answer a prompt with, ending with ``stop``; None: made-up tokens up to the limit."""
        self.workers = (str(self.id),)
        self.began_with = tuple(began_with)
        self.remote = FakeLayers(self.began_with, layers)
        self._speed, self._outbox = speed, outbox
        self._runs: dict[str, _Run] = {}
        self._events: asyncio.Queue[AnyEvent | None] = asyncio.Queue()
        self._idle = asyncio.Event()

    @property
    def load(self) -> EngineCounters:
        return EngineCounters(
            remote=self.remote.state,
            running=len(self._runs),
            queued=0,
            free_kv_tokens=1 << 20,
            used_kv_tokens=sum(len(r.prompt_ids) + r.sent for r in self._runs.values()),
            cached_kv_tokens=0,
            kv_mapped_bytes=0,
            weight_bytes=0,
            retractions=0,
        )

    def submit(self, work: Work) -> None:
        if not self.alive:
            raise EngineGone(f"engine {self.id} is gone")
        payload = read_payload(work.payload)
        script = self.answer(payload.prompt_ids) if self.answer is not None else None
        total = payload.max_new_tokens if script is None else len(script)
        run = _Run(work, payload.prompt_ids, total, payload.top_logprobs, len(work.resumed), script)
        if payload.pooled:
            run.vector = fake_vector(payload.prompt_ids)
        self._runs[work.rid] = run
        self._events.put_nowait(Accepted(rid=work.rid))
        self._events.put_nowait(self.load)
        if self._speed.prefill_s == 0 and self._speed.step_s == 0:
            self._first(run)
            self._send(run, run.total - run.sent)
        else:
            run.task = asyncio.get_running_loop().create_task(self._decode(run))

    async def _decode(self, run: _Run) -> None:
        await asyncio.sleep(self._speed.prefill_s)
        self._first(run)
        while self._runs.get(run.work.rid) is run:  # the same request may be here again as its next attempt
            self._send(run, 1 if self._speed.step_s else run.total - run.sent)
            await asyncio.sleep(self._speed.step_s)

    def _first(self, run: _Run) -> None:
        n = len(run.prompt_ids)
        self._events.put_nowait(
            AttemptFirstToken(
                rid=run.work.rid, prompt_tokens=n, cached_tokens=0, prefill_s=self._speed.prefill_s, queued_s=0.0
            )
        )

    def _send(self, run: _Run, count: int) -> None:
        count = max(0, min(count, run.total - run.sent))
        if run.script is not None:
            ids = run.script[run.sent : run.sent + count]
        else:
            ids = fake_tokens(run.prompt_ids, run.sent, count, self._speed.vocab)
        start, run.sent = run.sent, run.sent + len(ids)
        ended = run.sent >= run.total
        finish: dict[str, object] = {"type": "length", "length": run.total}
        if run.script is not None:
            finish = {"type": "stop", "matched": None}
        self._deliver(run, start, ids, finish if ended else None)

    def _deliver(self, run: _Run, start: int, ids: list[int], finish: dict[str, object] | None) -> None:
        item = TokenItem(
            id=run.work.rid,
            attempt=run.work.attempt,
            start=start,
            token_ids=ids,
            finish=finish,
            cached_tokens=0,
            engine_time_s=time.time(),
            extra=run.vector or fake_extra(ids, run.top),
        )
        data = encode(Tokens(engine=self.id, items=[item]))
        self._outbox.send_bytes(run.work.front, data)
        if finish is not None:
            del self._runs[run.work.rid]
            if not self._runs:
                self._idle.set()
            reason = str(finish["type"])
            self._events.put_nowait(
                AttemptFinished(
                    rid=run.work.rid,
                    attempt=run.work.attempt,
                    reason=reason,
                    total_tokens=run.sent,
                    final=data,
                )
            )
            self._events.put_nowait(self.load)

    def abort(self, rid: str) -> None:
        run = self._runs.get(rid)
        if run is not None:
            self._deliver(run, run.sent, [], {"type": "abort", "message": "aborted"})

    def set_kv_limit(self, limit_bytes: int | None) -> None:
        self.kv_limit_bytes = limit_bytes

    def forget_adapter(self, name: str) -> None:
        self.forgotten.append(name)

    def hold(self, for_s: float) -> None:
        self.holds.append(for_s)

    async def events(self) -> AsyncIterator[AnyEvent]:
        while (event := await self._events.get()) is not None:
            yield event
            if isinstance(event, Died):
                return

    async def deactivate(self, *, grace_s: float = 0.0) -> list[str]:
        if self._runs and grace_s > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._idle.wait()
        left = self._end()
        self._events.put_nowait(None)
        return left

    def kill(self, reason: str = "killed by a test", *, by_itself: bool = False) -> None:
        """The engine dies now: nothing more is sent, :class:`Died` is the last event. ``by_itself``: in a step of all
        its requests."""
        if self.alive:
            left = self._end()
            self._events.put_nowait(Died(reason=reason, suspects=tuple(left) if by_itself else ()))

    def _end(self) -> list[str]:
        self.alive = False
        left = list(self._runs)
        for run in self._runs.values():
            if run.task is not None:
                run.task.cancel()
        self._runs.clear()
        return left


class FakePool:
    """Implements :class:`prism.engine.api.Engines`. ``failures`` names models whose activation fails, and how."""

    def __init__(
        self,
        speed: FakeSpeed | None = None,
        failures: Mapping[ModelName, ActivationCause] | None = None,
        keys: MailKeys | None = None,
    ) -> None:
        self.speed = speed or FakeSpeed()
        self.failures = dict(failures or {})
        self.broken: dict[DeviceId, str] = {}
        """Devices to be out of service, and why."""
        self.refuses_layers = ""
        """What engines made from now on answer every order about layers with, for good."""
        self.handles: list[FakeHandle] = []
        self._outbox = Outbox(keys=keys)
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        return None

    async def activate(
        self,
        key: InstanceKey,
        spec: ModelSpec,
        part: Part,
        *,
        kv_limit_bytes: int | None = None,
        timeout_s: float | None = None,
        mark: str = "",
        first_pieces: Sequence[int] = (),
        turn: tuple[int, int] = (0, 1),
    ) -> FakeHandle:
        if timeout_s is not None and self.speed.activation_s > timeout_s:
            raise CannotActivate(spec.name, part.devices, ActivationCause.TIMEOUT, f"not ready in {timeout_s:g} s")
        await asyncio.sleep(self.speed.activation_s)
        for device in part.devices:
            if device in self.broken:
                raise CannotActivate(spec.name, part.devices, ActivationCause.ENGINE_DIED, self.broken[device])
        if (cause := self.failures.get(spec.name)) is not None:
            raise CannotActivate(spec.name, part.devices, cause, "the fake pool was told to fail")
        return self.start_engine(key, part.devices, kv_limit_bytes, first_pieces, spec.shape.layers)

    def counts(self) -> Mapping[DeviceId, Mapping[str, int]]:
        active: dict[DeviceId, dict[str, int]] = {}
        for handle in self.handles:
            for device in handle.devices:
                states = active.setdefault(device, {"starting": 0, "parked": 0, "active": 0})
                states["active"] += handle.alive
        return active

    def faults(self) -> Mapping[DeviceId, str]:
        return dict(self.broken)

    def start_engine(
        self,
        key: InstanceKey,
        devices: Sequence[DeviceId],
        kv_limit_bytes: int | None = None,
        first_pieces: Sequence[int] = (),
        layers: int = 0,
    ) -> FakeHandle:
        """An engine at once, for callers that have no :class:`ModelSpec`."""
        name = f"fake-{os.getpid()}-{next(self._numbers)}"
        handle = FakeHandle(name, key, tuple(devices), self.speed, self._outbox, first_pieces, layers)
        handle.set_kv_limit(kv_limit_bytes)
        handle.remote.refuses, handle.remote.whole_only = self.refuses_layers, bool(self.refuses_layers)
        self.handles.append(handle)
        return handle

    async def close(self) -> None:
        for handle in self.handles:
            await handle.deactivate()
        self._outbox.close()
