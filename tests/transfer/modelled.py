"""A multicast on modelled links and a modelled clock: the pure parts (grants, patience, choice) as machines use them.

Links share their rate equally between the transfers on them; a transfer runs at the lesser of its two shares. Questions
and answers take a tick. What threads and sockets do in :mod:`prism.transfer.pull_lanes` is done by :class:`Node` here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prism.policy.multicast.planner import Plan
from prism.transfer.grants import Grants
from prism.transfer.patience import Patience
from prism.transfer.piece_choice import Offer, choose_piece
from prism.transfer.session import NodePlan, node_plans

PIECE_S = 0.1
"""What a piece takes on a link of rate 1."""
PIECE_BYTES = 1 << 20
TICK_S = PIECE_S / 20


@dataclass
class Pull:
    source: str
    piece: int
    asked_s: float
    planned: bool
    began_s: float | None = None
    from_done: float = 0.0


@dataclass
class Node:
    """A machine: what it holds, whom it lets pull, and its two lanes."""

    plan: NodePlan
    rate: float
    grants: Grants = field(init=False)
    patience: Patience = field(init=False)
    done: dict[int, float] = field(default_factory=dict)
    """Share of each piece that is here."""
    lanes: list[Pull | None] = field(default_factory=lambda: [None, None])
    sent: float = 0.0
    """Pieces that left this node, parts of them counted too."""
    finished_s: float | None = None

    def __post_init__(self) -> None:
        part = self.plan
        self.grants = Grants(lambda piece: self.done.get(piece, 0.0) >= 1.0, part.known_piece_s, part.sends)
        steps = {piece: step for (_, piece), step in zip(part.receives, part.steps, strict=True)}
        self.patience = Patience(steps, part.known_piece_s, PIECE_BYTES, len(part.addresses) - 1)
        self.patience.begin_pulling(0.0)
        self.queue = list(part.receives)
        self.orphans: list[int] = []
        self.at_hand: int | None = None
        self.slipped = not self.queue
        if part.node in part.sources:
            self.done = dict.fromkeys(range(part.pieces), 1.0)
            self.finished_s = 0.0

    @property
    def claimed(self) -> set[int]:
        return {pull.piece for pull in self.lanes if pull is not None}


class Model:
    """``slow``: by what factor a node's link is slower than the plan knows. ``run`` until every node has every piece;
    no longer than ``limit_s``. ``guessed``: whoever planned knew nothing of the links."""

    def __init__(
        self, plan: Plan, slow: dict[str, float] | None = None, true_s: float = PIECE_S, *, guessed: bool = False
    ) -> None:
        parts = node_plans(plan, "s", "weights/m/raw", dict.fromkeys(plan.nodes, ""), guessed=guessed)
        rate = PIECE_S / true_s
        self.nodes = {name: Node(part, rate / (slow or {}).get(name, 1.0)) for name, part in parts.items()}
        self.now_s = 0.0

    def run(self, limit_s: float) -> None:
        while self.now_s < limit_s and any(node.finished_s is None for node in self.nodes.values()):
            self.now_s += TICK_S
            self._move()
            for node in self.nodes.values():
                self._decide(node)
            for node in self.nodes.values():
                while (pull := node.grants.grant_next(self.now_s)) is not None:
                    self._begin(*pull)

    # --- bytes ---

    def _active(self) -> list[tuple[Node, int, Pull]]:
        return [
            (node, lane, pull)
            for node in self.nodes.values()
            for lane, pull in enumerate(node.lanes)
            if pull is not None and pull.began_s is not None
        ]

    def _move(self) -> None:
        active = self._active()
        out, inward = Counter(pull.source for _, _, pull in active), Counter(node.plan.node for node, _, _ in active)
        for node, lane, pull in active:
            source = self.nodes[pull.source]
            share = min(source.rate / out[pull.source], node.rate / inward[node.plan.node])
            moved = min(share * TICK_S / PIECE_S, 1.0 - node.done.get(pull.piece, 0.0))
            node.done[pull.piece] = node.done.get(pull.piece, 0.0) + moved
            source.sent += moved
            if node.done[pull.piece] >= 1.0 - 1e-9:
                self._complete(node, lane, pull)

    def _begin(self, who: str, piece: int) -> None:
        for pull in self.nodes[who].lanes:
            if pull is not None and pull.piece == piece:
                pull.began_s, pull.from_done = self.now_s, self.nodes[who].done.get(piece, 0.0)

    def _complete(self, node: Node, lane: int, pull: Pull) -> None:
        assert pull.began_s is not None
        node.done[pull.piece] = 1.0
        node.lanes[lane] = None
        nbytes = int((1.0 - pull.from_done) * PIECE_BYTES)
        node.patience.on_piece(pull.piece, pull.source, nbytes, self.now_s - pull.began_s, self.now_s)
        node.patience.forgive_if_equal(pull.source)
        self.nodes[pull.source].grants.end((node.plan.node, pull.piece), self.now_s, complete=True)
        if len(node.done) == node.plan.pieces and all(share >= 1.0 for share in node.done.values()):
            node.finished_s = node.finished_s or self.now_s

    # --- what a node decides ---

    def _decide(self, node: Node) -> None:
        for lane, pull in enumerate(node.lanes):
            if pull is not None:
                self._watch(node, lane, pull)
        if not node.slipped and node.finished_s is None and self.now_s >= node.patience.slips_at_s(node.at_hand):
            node.slipped = True
            node.orphans += [piece for _, piece in node.queue]
            node.queue.clear()
        for lane in range(len(node.lanes)):
            if node.lanes[lane] is None:
                self._next(node, lane)

    def _watch(self, node: Node, lane: int, pull: Pull) -> None:
        """Gives a pull up that is late or slow."""
        repair = not pull.planned
        if pull.began_s is None:
            if (repair or node.slipped) and self.now_s - pull.asked_s > node.patience.turn_s():
                self._give_up(node, lane, pull)
            return
        nbytes = int((1.0 - pull.from_done) * PIECE_BYTES)
        moved = int((node.done.get(pull.piece, 0.0) - pull.from_done) * PIECE_BYTES)
        half_s = (1 + repair) * node.patience.half_s(pull.source, nbytes)
        if self.now_s - pull.began_s > (1 if moved < nbytes // 2 else 2) * half_s:
            node.patience.blame(pull.source, self.now_s, moved, self.now_s - pull.began_s)
            node.orphans += [piece for source, piece in node.queue if source == pull.source]
            node.queue = [item for item in node.queue if item[0] != pull.source]
            self._give_up(node, lane, pull)

    def _give_up(self, node: Node, lane: int, pull: Pull) -> None:
        node.lanes[lane] = None
        node.orphans.append(pull.piece)
        self.nodes[pull.source].grants.end((node.plan.node, pull.piece), self.now_s, complete=False)

    def _next(self, node: Node, lane: int) -> None:
        if lane == 0 and not node.slipped:
            while node.queue:
                source, piece = node.queue.pop(0)
                if node.done.get(piece, 0.0) < 1.0 and piece not in node.claimed:
                    node.at_hand = piece
                    return self._ask(node, lane, source, piece, planned=True)
        wanted = [p for p in dict.fromkeys(node.orphans) if node.done.get(p, 0.0) < 1.0 and p not in node.claimed]
        chosen = (self._choose(node, wanted, True) or self._choose(node, wanted, False)) if wanted else None
        if chosen is not None:
            self._ask(node, lane, *chosen, planned=False)

    def _ask(self, node: Node, lane: int, source: str, piece: int, planned: bool) -> None:
        node.lanes[lane] = Pull(source, piece, self.now_s, planned)
        self.nodes[source].grants.ask((node.plan.node, piece), self.now_s, planned)

    def _choose(self, node: Node, wanted: list[int], trusted: bool) -> tuple[str, int] | None:
        me = node.plan.node
        others = [n for n in self.nodes if n != me and node.patience.trusts(n, self.now_s) == trusted]
        offers = [
            Offer(
                name,
                frozenset(p for p in wanted if self.nodes[name].done.get(p, 0.0) >= 1.0),
                self.nodes[name].grants.waiting,
                name in node.plan.sources,
            )
            for name in others
        ]
        slow = frozenset().union(*(self.nodes[name].grants.slow for name in others)) if others else frozenset()
        planned = {piece: s for s, piece in node.plan.receives if node.patience.trusts(s, self.now_s)}
        turn = list(self.nodes).index(me) * 7
        return choose_piece(wanted, offers, turn, slow, me in slow, planned)
