"""Who runs the layers that a loading instance lacks: its route over engines that have them (pure).

A model's pieces are 0 the embedding, 1..L its layers and L+1 the head, which is always the leader's. One engine that
has everything is asked for everything: each stop costs waiting for the step that the engine there is in, about half a
pass, so that layers dealt to several would end later, not sooner. Several are asked where none has all, and where an
execution pipeline is to be formed (lambda-Scale 4.3): instances that load together, which between them hold the model
long before each does, because each begins with another part of it (:func:`layer_order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from prism.policy.multicast.groups import transfer_orders

FALLBACKS: Final = 2
"""Routes beside the first one, each a connection that is kept."""
WORTH_SWITCHING: Final = 0.25
"""With fewer of its layers missing, a leader stays with whoever runs them: all its requests would begin again, for
what is left of the load."""


class Company(IntEnum):
    """What a helper is to the leader, nearest first."""

    PIPELINE = 0
    """It comes with it, in the same execution pipeline."""
    DECISION = 1
    """It comes with it, in another one."""
    OTHER = 2
    """It was there before, or comes by itself."""


@dataclass(frozen=True, slots=True)
class LayerHelper:
    """An engine that could run layers for others."""

    name: str
    held: frozenset[int]
    """Pieces that it has."""
    led_pieces: int
    """Pieces that it runs for others now, counted once for each of these."""
    requests: int
    far: bool = False
    """On another machine."""
    company: Company = Company.OTHER


@dataclass(frozen=True, slots=True)
class Hop:
    """Pieces [first, end) at the engine ``name``; "": at the leader."""

    name: str
    first: int
    end: int


Route = tuple[Hop, ...]


def plan_routes(
    count: int, held: Set[int], helpers: Sequence[LayerHelper], pipelined: bool = False, turn: int = 0
) -> tuple[Route, ...]:
    """Routes for an engine that has ``held`` of ``count`` pieces, the best first: over the engine that runs least for
    others (then: one of its machine, then: that has fewest requests), and over the next ones when it is lost. Where
    none has all that is missing: the one over as few as have it together. ``pipelined``: first over those of its
    execution pipeline, or else over all that come with it, if they have it together. ``turn``: which one it is of those
    that begin at the same moment; where only engines of other machines have everything they are dealt to these, since
    nobody knows yet whom the others ask. None: nobody has it. Raises ``ValueError`` for one without the head."""
    if count - 1 not in held:
        raise ValueError(f"a leader has the head, piece {count - 1}; got {sorted(held)}")
    missing = [piece for piece in range(count) if piece not in held]
    if not missing:
        return ((Hop("", 0, count),),)
    idle_first = sorted(helpers, key=lambda h: (h.led_pieces, h.far, h.requests, h.name))
    whole = sorted((h for h in helpers if h.held >= set(missing)), key=lambda h: h.name)
    if whole and all(h.far for h in whole):
        dealt = whole[turn % len(whole)]
        idle_first = [dealt, *(h for h in idle_first if h is not dealt)]
    found: dict[Route, None] = {}
    for within in (Company.PIPELINE, Company.DECISION) if pipelined and not found else ():
        found |= dict.fromkeys(_over(count, missing, [h for h in idle_first if h.company <= within]))
    found |= dict.fromkeys(_over(count, missing, idle_first))
    return tuple(found)[: 1 + FALLBACKS]


def _over(count: int, missing: Sequence[int], idle_first: Sequence[LayerHelper]) -> Iterator[Route]:
    whole = [helper.name for helper in idle_first if helper.held >= set(missing)]
    for name in whole:
        yield _hops(count, dict.fromkeys(missing, name))
    if not whole and (together := _together(missing, idle_first)) is not None:
        yield _hops(count, together)


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


def _hops(count: int, elsewhere: dict[int, str]) -> Route:
    hops: list[Hop] = []
    for piece in range(count):
        name = elsewhere.get(piece, "")
        first = hops.pop().first if hops and hops[-1].name == name else piece
        hops.append(Hop(name, first, piece + 1))
    return tuple(hops)


def leaves_for_pipeline(count: int, held: Set[int], helpers: Sequence[LayerHelper], peers: Set[str]) -> bool:
    """Whether a leader whose route leads over ``peers`` is to follow another one, over those that come with it: some
    of its peers do not, those that do have together what it lacks, and enough is lacking (:data:`WORTH_SWITCHING`)."""
    coming = [helper for helper in helpers if helper.company is not Company.OTHER]
    if not worth_switching(count, held) or peers <= {helper.name for helper in coming}:
        return False
    return set(range(count)) - held <= {piece for helper in coming for piece in helper.held}


def worth_switching(count: int, held: Set[int]) -> bool:
    """Whether a leader lacks enough for its requests to begin again (:data:`WORTH_SWITCHING`)."""
    return count - len(held) >= WORTH_SWITCHING * (count - 2)


def layer_order(layers: int, turn: int, turns: int) -> tuple[int, ...]:
    """All pieces of a model, as the instance ``turn`` of ``turns`` that load beside each other brings them: what it
    needs to lead requests first (embedding, first layer, head), then the layers from its own chunk on, and around
    (Algorithm 1's chunks, for machines that load from their own memory: lambda-Scale 5); the last of several from the
    last layer down, so that what it has borders on its head. Together they have all layers when each has its
    ``turns``-th part. Raises ``ValueError`` unless 0 <= turn < turns."""
    if not 0 <= turn < turns:
        raise ValueError(f"turn {turn} of {turns}")
    rest = range(2, layers + 1)
    if 0 < turn == turns - 1:
        return (0, 1, layers + 1, *reversed(rest))
    return (0, 1, layers + 1, *(rest[i] for i in (transfer_orders(turns, len(rest))[turn] if rest else ())))


def next_turn(taken: Sequence[int], turns: int) -> int:
    """The turn of an instance beside others that have theirs: the one that fewest have."""
    return min(range(turns), key=lambda turn: (taken.count(turn), turn))
