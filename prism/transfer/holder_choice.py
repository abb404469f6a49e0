"""Whom a receiver asks for what the plan does not bring: asks around who has it, and chooses.

The rule itself is pure (:mod:`prism.transfer.piece_choice`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final

from prism.transfer.frames import Arrival
from prism.transfer.peer_pool import PeerPool
from prism.transfer.piece_choice import Offer, choose_piece
from prism.transfer.reception import Reception
from prism.transfer.session import NodePlan
from prism.transfer.windows import THERE

_ASKED_NODES: Final = 8
_FRESH_NODES: Final = 2
"""Connections made at most before a choice: one to a slow node takes its time."""


class HolderChoice:
    """Of one reception; its lanes share it."""

    def __init__(self, plan: NodePlan, reception: Reception) -> None:
        self._plan, self._reception = plan, reception
        self._mark = zlib.crc32(plan.node.encode())
        self._unfinished: set[tuple[str, int]] = set()

    def note_unfinished(self, source: str, piece: int) -> None:
        """``source`` had all but the end of the piece and did not get it in time: it may wait for this node."""
        self._unfinished.add((source, piece))

    def nodes(self, trusted: bool) -> list[str]:
        """The sources and some others, not the same for every node, whom this node trusts (or does not)."""
        plan = self._plan
        others = [n for n in plan.addresses if n != plan.node and n not in plan.sources]
        turn = self._mark % max(len(others), 1)
        some = [*(s for s in plan.sources if s != plan.node), *(others[turn:] + others[:turn])]
        return [n for n in some if self._reception.trusts(n) == trusted][: _ASKED_NODES + len(plan.sources)]

    def choose(
        self,
        peers: PeerPool,
        wishes: Sequence[Sequence[int]],
        trusted: bool,
        on_failed: Callable[[str, str], None],
    ) -> tuple[str, int, bool] | None:
        """Whom to ask for which piece, and whether nobody else has it; None when nobody has any. ``wishes`` are pieces,
        those first of which one is taken if anybody has it: all by one answer, since the next may say more. Calls
        ``on_failed(node, reason)`` for those that could not be asked."""
        plan = self._plan
        nodes = self.nodes(trusted)
        fresh = [node for node in nodes if not peers.known(node)]
        asked = [node for node in nodes if node not in fresh[_FRESH_NODES:]]
        found, failed = peers.arrivals(asked, plan.window)
        for node, reason in failed.items():
            on_failed(node, reason)
        slow = frozenset(node for arrival in found.values() for node in arrival.slow)
        planned = {piece: source for source, piece in plan.receives if self._reception.trusts(source)}
        for wanted in wishes:
            offers = [self._offer(node, arrival, wanted) for node, arrival in found.items()]
            chosen = choose_piece(wanted, offers, self._mark, slow, plan.node in slow, planned)
            if chosen is not None:
                others = any(chosen[1] in offer.pieces for offer in offers if offer.node != chosen[0])
                return *chosen, not others and len(found) == len(nodes)
        return None

    def _offer(self, node: str, arrival: Arrival, wanted: Sequence[int]) -> Offer:
        pieces = ((piece, self._reception.pieces[piece]) for piece in wanted)
        missing = ((p, len(at) - arrival.leaves.count(THERE, at.start, at.stop), len(at)) for p, at in pieces)
        held = frozenset(
            piece
            for piece, lacks, leaves in missing
            if lacks == 0 or (lacks == 1 and leaves > 1 and (node, piece) not in self._unfinished)
        )
        return Offer(node, held if arrival.leaves else frozenset(), arrival.waiting, node in self._plan.sources)
