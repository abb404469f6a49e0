"""The two faces of the store. Both implementations (:mod:`prism.store.memory`, :mod:`prism.store.redis`) pass the same
tests.

All calls may be repeated after :class:`~prism.store.values.StoreUnavailable` without a visible effect of the first try.
Ownership is the fence: an entry belongs to the consumer that read it last, and :meth:`Queues.done` and
:meth:`Queues.move` are refused to everybody else. A consumer name is therefore an attempt token: make it unique per
process start (:func:`consumer_name`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from prism.core.ids import ModelName, NodeId
from prism.store.values import AgentRecord, ControllerRecord, Entry, PlacementChange, RateVerdict, Replica, Withdrawn


def consumer_name(role: str) -> str:
    """A consumer name that no process had or will have, readable in the store: ``ROLE:PID:RANDOM``."""
    return f"{role}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Queues(Protocol):
    """Streams of requests with one consumer group each. Queue names come from :mod:`prism.wire.keys`."""

    async def add(self, queue: str, request_id: str, data: bytes, limit: int | None = None) -> int:
        """Appends an encoded message; returns the queue's length. An id that stands in any queue already is not added
        again. Raises :class:`QueueFull` when the queue already holds ``limit`` entries."""

    async def add_to_least(self, queues: Sequence[str], request_id: str, data: bytes, limit: int | None = None) -> str:
        """:meth:`add` to the least loaded of ``queues`` (one or more) as they are then
        (:func:`prism.policy.routing.queue_load`); returns the queue that the request stands in."""

    async def read_new(self, queues: Sequence[str], consumer: str, count: int, block_s: float) -> list[Entry]:
        """Up to ``count`` entries nobody has read, oldest first per queue; waits up to ``block_s`` for the first (0:
        not at all). They belong to ``consumer`` now."""

    async def take_over(self, queue: str, consumer: str, idle_s: float, count: int = 100) -> list[Entry]:
        """Entries of other consumers that were not beaten for ``idle_s``; they belong to ``consumer`` now. With
        ``idle_s`` 0 everything others hold (their process is known to be dead)."""

    async def beat(self, queue: str, consumer: str) -> int:
        """Marks all entries that ``consumer`` owns as alive (XCLAIM JUSTID); returns how many."""

    async def owned(self, queue: str, consumer: str) -> list[str]:
        """Request ids of the entries ``consumer`` owns."""

    async def done(self, entry: Entry, consumer: str) -> bool:
        """Acknowledges and deletes. True also when it is gone already; False when another consumer owns it (stop
        working on it)."""

    async def move(self, entry: Entry, consumer: str, to_queue: str, data: bytes | None = None) -> bool:
        """Atomically deletes the entry here and adds it (``data`` instead of its own bytes when given) to ``to_queue``.
        False when another consumer owns it. Bounds do not apply: the request was accepted already."""

    async def move_to_least(self, entry: Entry, consumer: str, to_queues: Sequence[str], data: bytes) -> bool:
        """:meth:`move` to the least loaded of ``to_queues`` (one or more)."""

    async def tell_running(self, queue: str, running: int) -> None:
        """Engines run so many of the queue's requests; the others wait. Where it was never told all are taken for
        running."""

    async def forget(self, queue: str) -> None:
        """Nobody will read ``queue`` again: what the store keeps of it goes, if no entry stands in it. An entry that is
        added later makes it anew."""

    async def withdraw(self, request_id: str) -> Withdrawn:
        """Removes a request that no consumer has read yet, or says who owns it."""

    async def where(self, request_ids: Sequence[str]) -> list[str | None]:
        """The queue each request stands in (read or not), None for those in none."""

    async def lengths(self, queues: Sequence[str]) -> list[int]:
        """Entries per queue, read or not."""

    async def position(self, request_id: str) -> int | None:
        """How many entries stand before this one in its queue, those that were read included; at most
        :data:`~prism.store.values.MOST_BEFORE` are counted. None when it is in none."""


class State(Protocol):
    """What the processes of a cluster know of each other."""

    async def placement(self) -> dict[ModelName, list[Replica]]:
        """All models that are anywhere."""

    async def set_placement(self, model: ModelName, replicas: Sequence[Replica], holder: ControllerRecord) -> None:
        """Replaces the replicas of ``model`` (none: it is inactive) and tells the watchers. Raises :class:`LeaseLost`
        when ``holder`` is not the controller any more."""

    def watch_placement(self) -> AsyncIterator[PlacementChange]:
        """Every change from now on; starts with ``PlacementChange(None)``, once the subscription stands."""

    async def announce_agent(self, agent: AgentRecord) -> None:
        """Writes the agent's record (``seen_s`` is the caller's clock, Unix time)."""

    async def remove_agent(self, node: NodeId) -> None: ...

    async def agents(self) -> list[AgentRecord]:
        """All records, alive or not; the reader judges ``seen_s``."""

    async def announce_front(self, mailbox: str, seen_s: float) -> None:
        """A front-door worker says that it lives (every second). ``mailbox`` is unique per process start."""

    async def bury_front(self, mailbox: str) -> None:
        """Says that the worker's process has ended: nobody need wait until it was silent for long enough."""

    async def remove_front(self, mailbox: str) -> None: ...

    async def fronts(self) -> dict[str, float]:
        """Mailbox -> Unix time of the last announcement, alive or not; :data:`~prism.store.values.FRONT_DEAD` for a
        worker that was buried."""

    async def acquire_lease(self, controller: str, mailbox: str, ttl_s: float) -> ControllerRecord | None:
        """The lease with a fence higher than any before, or None while another holds it. The holder itself gets it
        renewed."""

    async def renew_lease(self, holder: ControllerRecord, ttl_s: float) -> bool:
        """False: it is lost; stop writing."""

    async def release_lease(self, holder: ControllerRecord) -> None: ...

    async def controller(self) -> ControllerRecord | None: ...

    async def catalog_generation(self) -> int: ...

    async def bump_catalog_generation(self) -> int:
        """Says that the catalog changed; returns the new generation."""

    async def rate_take(self, bucket: str, amount: int, per_minute: int, now_s: float) -> RateVerdict:
        """Takes ``amount`` from a token bucket that refills ``per_minute`` per minute and holds as much. Nothing is
        taken when refused. A negative amount gives back."""

    async def count(self, counters: Mapping[str, float]) -> None:
        """Adds to named statistics (for example arrivals and tokens per model, read by the controller)."""

    async def counters(self, prefix: str = "") -> dict[str, float]: ...

    async def append_decision(self, line: str, keep: int = 10_000) -> None:
        """Adds one JSON line to the decision log that operators read back."""

    async def decisions(self, count: int = 100) -> list[str]:
        """The latest lines, newest first."""

    async def put_doc(self, name: str, document: str) -> None:
        """Publishes a small JSON document under a name (``plan``, ``models``, ``node:ID``) for operators' views."""

    async def doc(self, name: str) -> str | None: ...


class Store(Queues, State, Protocol):
    """Everything; what :func:`prism.store.connect.open_store` returns."""

    async def ping(self) -> None:
        """Raises :class:`StoreUnavailable` when the server does not answer, :class:`StoreRefused` when it does not let
        this process in."""

    async def aclose(self) -> None: ...
