"""Who runs the layers that a loading instance lacks: its route over engines that have them (pure).

A model's pieces are 0 the embedding, 1..L its layers and L+1 the head, which is always the leader's. One engine that
has everything is asked for everything: each stop costs waiting for the step that the engine there is in, about half a
pass, so that layers dealt to several would end later, not sooner. Several are asked where none has all (lambda-Scale's
execution pipelines, 4.3): instances that load together, or what is left of them when the one that had all is gone.
That they together have all is what :func:`loads_downwards` is for.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

FALLBACKS: Final = 2
"""Routes beside the first one, each a connection that is kept."""


@dataclass(frozen=True, slots=True)
class LayerHelper:
    """An engine that could run layers for others."""

    name: str
    held: frozenset[int]
    """Pieces that it has."""
    led_pieces: int
    """Pieces that it runs for others now, counted once for each of these."""
    requests: int


@dataclass(frozen=True, slots=True)
class Hop:
    """Pieces [first, end) at the engine ``name``; "": at the leader."""

    name: str
    first: int
    end: int


def plan_routes(count: int, held: Set[int], helpers: Sequence[LayerHelper]) -> tuple[tuple[Hop, ...], ...]:
    """Routes for an engine that has ``held`` of ``count`` pieces, the best first: over the engine that runs least for
    others (then: that has fewest requests), and over the next ones when it is lost. Where none has all that is missing:
    the one over as few as have it together. None: nobody has it. Raises ``ValueError`` for one without the head."""
    if count - 1 not in held:
        raise ValueError(f"a leader has the head, piece {count - 1}; got {sorted(held)}")
    missing = [piece for piece in range(count) if piece not in held]
    if not missing:
        return ((Hop("", 0, count),),)
    idle_first = sorted(helpers, key=lambda h: (h.led_pieces, h.requests, h.name))
    whole = [helper.name for helper in idle_first if helper.held >= set(missing)]
    if whole:
        return tuple(_hops(count, dict.fromkeys(missing, name)) for name in whole[: 1 + FALLBACKS])
    together = _together(missing, idle_first)
    return () if together is None else (_hops(count, together),)


def _together(missing: Sequence[int], helpers: Sequence[LayerHelper]) -> dict[int, str] | None:
    """Who runs which piece: from the first one on always whoever has most of what follows (the fewest stops). None:
    nobody has one of them."""
    by: dict[int, str] = {}
    while len(by) < len(missing):
        rest = missing[len(by) :]
        best = max(helpers, key=lambda helper: _run(helper, rest), default=None)
        if best is None or (run := _run(best, rest)) == 0:
            return None
        by.update(dict.fromkeys(rest[:run], best.name))
    return by


def _run(helper: LayerHelper, pieces: Sequence[int]) -> int:
    """How many of ``pieces`` it has before the first that it lacks."""
    return next((i for i, piece in enumerate(pieces) if piece not in helper.held), len(pieces))


def _hops(count: int, elsewhere: dict[int, str]) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    for piece in range(count):
        name = elsewhere.get(piece, "")
        first = hops.pop().first if hops and hops[-1].name == name else piece
        hops.append(Hop(name, first, piece + 1))
    return tuple(hops)


def loads_downwards(others: Sequence[bool]) -> bool:
    """Whether an instance brings its layers from the last one down, when ``others`` of its model that load beside it do
    (True) or do not. In turns: two that load in both directions have all layers between them when each has half of
    them (lambda-Scale's shifted chunks, for machines that load from their own memory), and each one's layers still
    are the two ends of the model with one gap between, so that it makes one stop on its way."""
    return 2 * sum(others) < len(others)
