"""What an engine is told about layers in other engines, on its control channel, and what it answers."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class _Order(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    """Comes back in the answer."""


class ServeLayers(_Order, frozen=True, kw_only=True):
    """Run layers for engines that connect at the Unix socket ``path``, and take connections to other machines there
    (:mod:`prism.remote.handing`)."""

    path: str


class HoldPieces(_Order, frozen=True, kw_only=True):
    """Have the weights of these pieces in memory (0 the embedding, 1..L the layers, L+1 the head) and no others."""

    pieces: list[int]


class RouteStop(msgspec.Struct, frozen=True):
    """Pieces [first, end) run at the engine that serves at ``path``, or behind a connection that was handed over
    (``handed:TOKEN``); "": at the engine that is told."""

    path: str
    first: int
    end: int


class SetRoute(_Order, frozen=True, kw_only=True):
    """Lead requests over the first of ``routes``; over the next one whose engines live when a peer is lost. Those whose
    engines cannot be reached are left out, and refused when it is all of them. Requests that run begin again from the
    tokens they have."""

    routes: list[list[RouteStop]]
    answer_s: float = 60.0
    """A peer that has not answered after it counts as lost."""
    whole_prefills: bool = False
    """For comparisons: a prefill is not cut into parts that engines compute at the same time
    (:mod:`prism.policy.live.micro_batches`)."""


class KvWay(StrEnum):
    """How KV that peers keep comes to an engine that runs their layers itself from now on."""

    AUTO = "auto"
    """Whichever is estimated shorter."""
    FETCH = "fetch"
    RECOMPUTE = "recompute"
    """Requests begin again from the tokens they have."""


class GrowRoute(_Order, frozen=True, kw_only=True):
    """Bring the weights of what peers run as they arrive in host memory, and run the ends of what a peer runs here
    from then on, until no peer is left."""

    kv: KvWay = KvWay.AUTO
    order: list[int] = []
    """Pieces as they are to be brought, where several have arrived; those that are not in it come last."""
    when_whole: bool = False
    """Nothing is taken over before all is here: whoever runs it leads over this engine, too, so that as much work would
    come back as was taken over, and the KV of it would be fetched for nothing."""


Order = ServeLayers | HoldPieces | SetRoute | GrowRoute


class OrderDone(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer: ``error`` is empty when it was carried out; otherwise nothing changed but links that were opened."""

    number: int
    error: str = ""
    whole_only: bool = False
    """The model's layers cannot run in other engines at all, whatever is ordered."""
