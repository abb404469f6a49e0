"""The engine pool as its user (the node agent) sees it. :class:`prism.engine.pool.EnginePool` runs SGLang;
:class:`prism.engine.fake.FakePool` answers with made-up tokens at a settable speed.

All calls belong to one asyncio loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from prism.core.ids import DeviceId, EngineId
from prism.core.instances import InstanceKey, Part
from prism.core.specs import ModelSpec
from prism.engine.events import AnyEvent, EngineCounters
from prism.remote.orders import KvWay, RouteStop


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt at a request, as an engine takes it.

    ``resumed`` are the tokens the client's stream already has; the engine goes on behind them as if it had produced
    them itself (penalties, grammar, stop strings, minimum and maximum tokens, seeded sampling).
    """

    rid: str
    payload: bytes
    """``Submission.payload``."""
    front: str
    """Mailbox address of the front-door worker."""
    attempt: int
    resumed: tuple[int, ...] = ()


class LayerOrders(Protocol):
    """What an engine can be told about layers in others (:class:`prism.engine.remote_orders.RemoteOrders`). Methods
    wait until it is done, and raise :class:`OrderRefused`, or :class:`EngineGone` when the engine ends."""

    told: Callable[[], None]
    """Called whenever the engine has told something else of its pieces, its peers or its leaders than before."""

    async def serve_layers(self, path: Path) -> None:
        """Run layers for engines that connect at ``path``."""
        ...

    async def set_route(self, *routes: Sequence[RouteStop], answer_s: float = ...) -> None:
        """Lead requests over the first route, and over the next one when a peer is lost."""
        ...

    async def grow_route(self, kv: KvWay = ..., order: Sequence[int] = ..., when_whole: bool = ...) -> None:
        """Take over what peers run, as its weights arrive (``order``: of pieces, where several have arrived).
        Returns when it has begun."""
        ...


class Handle(Protocol):
    """The engine of one part of an instance. Over after ``deactivate`` or death."""

    @property
    def id(self) -> EngineId: ...
    @property
    def key(self) -> InstanceKey: ...
    @property
    def devices(self) -> tuple[DeviceId, ...]: ...
    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds each phase of the activation took."""
        ...

    @property
    def helped_bytes(self) -> Mapping[str, int]:
        """Of the weights, what came over other devices' links, by these."""
        ...

    @property
    def pids(self) -> tuple[int, ...]: ...
    @property
    def load(self) -> EngineCounters | None:
        """The latest :class:`EngineCounters`, None before the first."""
        ...

    @property
    def alive(self) -> bool: ...
    @property
    def source(self) -> str:
        """Where the weights came from: ``host`` (the machine's store), ``disk`` (the model's files) or ``remote``."""
        ...

    @property
    def prefill_tokens_per_s(self) -> float:
        """First guess of the prefill speed."""
        ...

    @property
    def max_running(self) -> int:
        """Most requests the engine runs at once."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Tokens one prefill step takes."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request, prompt and output."""
        ...

    @property
    def device_tokens(self) -> int:
        """Of one that is served on the device alone, where larger ones are served too; else 0."""
        ...

    @property
    def no_long(self) -> str:
        """Why larger ones are refused although they are allowed; else empty."""
        ...

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the processes, in rank order: :class:`prism.remote.state.RemoteState` has them."""
        ...

    @property
    def began_with(self) -> tuple[int, ...]:
        """Pieces of the model that were there when the engine was; the others were to come, and until it gets a route
        (:attr:`remote`) or has them all its requests wait. Empty: all were there."""
        ...

    @property
    def remote(self) -> LayerOrders:
        """Orders about layers in other engines."""
        ...

    def submit(self, work: Work) -> None:
        """Hand the request over; returns at once. Raises :class:`EngineGone` if the engine is known to be dead."""
        ...

    def abort(self, rid: str) -> None:
        """Stop the request if it is here: ``AttemptFinished`` with reason ``abort`` follows. Unknown ids are
        ignored."""
        ...

    def set_kv_limit(self, limit_bytes: int | None) -> None:
        """KV bytes the model may hold on each of its devices from now on; None: whatever the device's account grants.
        A lower limit is reached within a few steps (cached prefixes go first, then requests are retracted)."""
        ...

    def forget_adapter(self, name: str) -> None:
        """Let go of the LoRA adapter called ``name``, unless requests here still need it. Unknown names are ignored."""
        ...

    def hold(self, for_s: float) -> None:
        """Make no decode step for so long from now on, or until told again; 0: go on. From the first call on the engine
        tells what its answers have (:class:`prism.engine.events.TokensMade`). One for whose steps others wait goes
        on."""
        ...

    def events(self) -> AsyncIterator[AnyEvent]:
        """Events in order, ending after :class:`Died` or when ``deactivate`` is done. One consumer."""
        ...

    async def deactivate(self, *, grace_s: float = 0.0) -> list[str]:
        """Stop the model and give all its memory back. Requests still running after ``grace_s`` are dropped; their ids
        are returned (no ``AttemptFinished`` was or will be sent for them), so that they can go on elsewhere with their
        tokens. The worker returns to the pool, or is killed and replaced when it does not answer."""
        ...


_SETUP_S: Final = 300.0
_SLOWEST_BYTES_PER_S: Final = 100e6


def longest_activation_s(spec: ModelSpec) -> float:
    """An activation that takes longer is stuck, not slow: minutes for building the model on a machine without time,
    and its weights from a slow disk."""
    return _SETUP_S + spec.weight_bytes / _SLOWEST_BYTES_PER_S


class Engines(Protocol):
    """The engines of one machine, by instance: two generations of a model may stand side by side."""

    async def start(self) -> None:
        """Ready the zygote and the parked workers. Raises :class:`EngineSetupError` with what is missing."""
        ...

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
    ) -> Handle:
        """Make ``part`` of the instance ``key`` of ``spec`` ready. ``mark`` is the weights' fingerprint, for a folder
        without weights whose pack is in the store (or arriving there). ``first_pieces``: it need not wait for others
        (:attr:`Handle.began_with` says whether it did). ``turn``: with which chunk of how many weights on disk begin to
        come, since others load at the same time. ``kv_limit_bytes`` is the most KV the model may
        hold on each device; requests are cut or refused by what fits into its whole pages (a later
        :meth:`Handle.set_kv_limit` moves memory, not this bound). ``timeout_s`` is by default so long
        (:func:`longest_activation_s`) that only what is stuck runs out of it. Raises
        :class:`CannotActivate`, also for a part that no engine can run; then no memory is held for it and no worker is
        lost to the pool."""
        ...

    def counts(self) -> Mapping[DeviceId, Mapping[str, int]]:
        """Workers of each device by state: ``starting``, ``parked``, ``active``."""
        ...

    def faults(self) -> Mapping[DeviceId, str]:
        """Why devices are out of service: no worker starts there."""
        ...

    async def close(self) -> None:
        """End every engine; when this returns no process of the pool is left."""
        ...
