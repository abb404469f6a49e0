"""What a peer does of what its leaders ask, when, and what runs in one pass. Nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.remote.link import Received
from prism.remote.messages import (
    VERSION,
    FetchKv,
    HiddenStates,
    KvRows,
    PeerHello,
    PeerWelcome,
    Refused,
    RunPieces,
    RunRest,
)
from sglang_patches import remote_peer
from sglang_patches.remote_foreign import Begun, NotDone, furthest_behind
from sglang_patches.remote_passes import Passenger
from sglang_patches.remote_peer import ForeignWork

FULL = 8
"""Tokens of prompts in one pass."""
HEAD = 7
OWN = 0
"""Stands for this engine's own step among the numbers of leaders."""


class Link:
    """To a leader."""

    def __init__(self, name: str) -> None:
        self.peer, self.label, self.closed, self.sent = name, name, False, list[Any]()

    def send(self, message: Any, tensors: Any = ()) -> None:
        if not isinstance(message, PeerWelcome):
            self.sent.append(message)

    def close(self, why: str) -> None:
        self.closed = True

    @property
    def answers(self) -> list[tuple[str, int]]:
        return [(type(one).__name__, one.batch) for one in self.sent]


class Run:
    """Runs a piece at a time, and says who was in each pass, with its pieces."""

    def __init__(self, *_: Any) -> None:
        self.shares, self.shared, self.full_tokens, self.held = True, 0, FULL, frozenset(range(HEAD))
        self.passes: list[tuple[list[int], int, int]] = []
        self.gone, self.breaks_at = set[int](), 99
        self.after_piece: Callable[[int], None] = lambda piece: None

    def begin(self, note: Any, work: RunPieces, tensors: Any) -> Begun:
        state = (torch.zeros(1), None)
        on = Passenger(None, None, work.first, work.end, state)
        return Begun(on, note.leader, SimpleNamespace(), work)  # type: ignore[arg-type]

    def advance(self, begun: Sequence[Begun], called: Callable[[], bool] | None) -> bool:
        behind = furthest_behind(begun)
        first = behind[0].on.piece
        end = min([one.on.end for one in behind] + [one.on.piece for one in begun if one not in behind])
        for piece in range(first, end):
            if piece == self.breaks_at:
                raise NotDone("it broke")
            for one in behind:
                one.on.piece = piece + 1
            self.after_piece(piece)
            if called is not None and piece + 1 < end and called():
                end = piece + 1
                break
        self.passes.append((sorted(getattr(one, "leader", OWN) for one in behind), first, end))
        return end == min(one.on.end for one in behind)

    def stands(self, begun: Begun) -> bool:
        return begun.leader not in self.gone

    def fetch(self, note: Any, work: FetchKv) -> Sequence[Any]:
        return ()

    def wanted_back(self, number: int) -> bool:
        return False

    def drop(self, number: int) -> None:
        self.gone.add(number)


class Peer:
    """Its leaders are ``a`` (number 1), ``b`` (2) and ``c`` (3)."""

    def __init__(self) -> None:
        ranks: Any = SimpleNamespace(world=1, tell=lambda *_: None)
        pieces: Any = SimpleNamespace(usable=lambda held: held)
        self.work = ForeignWork(None, pieces, "me", "model", lambda: None, ranks)  # type: ignore[arg-type, return-value]
        self.run: Any = self.work._run
        self.a, self.b, self.c = links = [Link(name) for name in "abc"]
        hello = PeerHello(version=VERSION, engine="e", model="model", slots=9)
        for link in links:
            self.work.take(link, Received(hello, ()))  # type: ignore[arg-type]

    def ask(self, link: Link, batch: int, first: int = 2, end: int = HEAD, tokens: int = 0) -> None:
        """To run pieces on a prompt of ``tokens``; 0: on one that decodes."""
        each = list(range(tokens or 1))
        table: dict[str, Any] = {"table_rows": [], "table_positions": [], "table_slots": []}
        lists: dict[str, Any] = {"rows": [0], "seq_lens": [9], "out_slots": each, "positions": each, "token_ids": each}
        work = RunPieces(batch=batch, first=first, end=end, decode=not tokens, **lists, **table)
        self.take(link, work)

    def step(self, tokens: int = 0) -> bool:
        """A step of its own: a prompt of ``tokens``, or several that decode."""
        mode = SimpleNamespace(is_decode=lambda: not tokens)
        batch = SimpleNamespace(forward_mode=mode, input_ids=list(range(tokens or 2)))
        return self.work.take_along(Passenger(None, batch, 0, HEAD, None))

    def take(self, link: Link, message: Any) -> None:
        self.work.take(link, Received(message, ()))  # type: ignore[arg-type]


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setattr(remote_peer, "ForeignRun", Run)
    return Peer()


def test_less_is_done_of_what_waits_and_kv_is_copied_first(peer: Peer) -> None:
    peer.ask(peer.a, 1, tokens=2)
    peer.ask(peer.a, 2, tokens=2)
    for first in (3, 4):
        peer.take(peer.a, RunRest(batch=2, first=first))
    peer.take(peer.a, RunRest(batch=7, first=3))
    for link in (peer.a, peer.c):
        peer.take(link, FetchKv(batch=9, first_layer=0, end_layer=1, slots=[1]))
    waits: list[Any] = [(link, type(one.message), getattr(one.message, "first", 0)) for link, one in peer.work._queue]
    assert waits == [(peer.c, FetchKv, 0), (peer.a, RunPieces, 2), (peer.a, RunPieces, 4), (peer.a, FetchKv, 0)]
    assert peer.work._queue[2][1].message.since == 2  # type: ignore[union-attr]
    for _ in range(4):
        peer.work.serve_one()
    assert peer.run.passes == [([1], 2, HEAD), ([1], 4, HEAD)] and not peer.work.waiting
    assert peer.a.answers == [("HiddenStates", 1), ("HiddenStates", 2), ("KvRows", 9)]
    assert peer.c.sent == [KvRows(batch=9)]


def test_between_two_steps_one_step_of_each_leader(peer: Peer) -> None:
    """However much one of them has asked, in a pass or not; who is gone is not answered."""
    for link, batch in ((peer.a, 1), (peer.a, 2), (peer.c, 1), (peer.a, 3)):
        peer.ask(link, batch, tokens=FULL)
    peer.ask(peer.b, 1, tokens=3)
    peer.c.close("")
    peer.work.serve_round()
    assert peer.run.passes == [([1], 2, HEAD), ([2], 2, HEAD)] and peer.work.waiting == 2
    peer.work.serve_round()
    assert peer.a.answers == [("HiddenStates", 1), ("HiddenStates", 2)] and peer.c.sent == []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_each_is_met_where_its_layers_begin_and_answered_where_they_end(peer: Peer, order: tuple[int, ...]) -> None:
    asks = [(peer.a, 4, 6), (peer.b, 2, 5), (peer.c, 4, HEAD)]
    for i in order:
        link, first, end = asks[i]
        peer.ask(link, 1, first, end)
    through: list[tuple[int, int]] = []
    peer.run.after_piece = lambda piece: through.append((piece, sum(len(link.sent) for link, _, _ in asks)))
    peer.work.serve_round()
    assert peer.run.passes == [([2], 2, 4), ([1, 2, 3], 4, 5), ([1, 3], 5, 6), ([3], 6, HEAD)]
    assert through == [(2, 0), (3, 0), (4, 0), (5, 1), (6, 2)]
    assert peer.a.answers == peer.b.answers == peer.c.answers == [("HiddenStates", 1)]


def test_what_decodes_is_not_left_behind_for_prompts(peer: Peer) -> None:
    """They come without end, at layers behind its own."""
    peer.ask(peer.a, 1, 1, 3)
    for batch in range(3):
        peer.ask(peer.b, batch, 4, tokens=FULL)
    peer.work.serve_one()
    assert peer.a.answers == [("HiddenStates", 1)] and peer.run.passes == [([1], 1, 3), ([2], 4, HEAD)]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(3, 0, True), (0, 3, True), (3, 5, True), (3, 6, False), (0, 0, True), (FULL + 5, 0, True)],
    ids=["decode to prompt", "a prompt begins", "prompts", "too many tokens", "decode", "decode to a long prompt"],
)
def test_who_may_join(peer: Peer, first: int, second: int, together: bool) -> None:
    peer.ask(peer.a, 1, tokens=first)
    peer.ask(peer.b, 1, tokens=second)
    peer.work.serve_round()
    alone = [([1], 2, HEAD), ([2], 2, HEAD)]
    assert peer.run.passes == ([([1, 2], 2, HEAD)] if together else alone)


@pytest.mark.parametrize(
    ("first", "tokens", "passes"),
    [
        (3, 0, [([1], 2, HEAD), ([2], 3, HEAD)]),
        (4, 0, [([1], 2, 4), ([1, 2], 4, HEAD)]),
        (5, 0, [([1], 2, 4), ([1], 4, 5), ([1, 2], 5, HEAD)]),
        (5, 3, [([1], 2, HEAD), ([2], 5, HEAD)]),
    ],
    ids=["it is by", "it is there", "it will be there", "a prompt would hold up what decodes"],
)
def test_what_comes_meanwhile_joins_a_pass_that_is_not_by(
    peer: Peer, first: int, tokens: int, passes: list[Any]
) -> None:
    def come(piece: int) -> None:
        if piece == 3 and not peer.b.sent and not peer.work.waiting > 1:
            peer.ask(peer.b, 1, first, tokens=tokens)

    peer.ask(peer.a, 1)
    peer.run.after_piece = come
    peer.work.serve_round()
    assert peer.run.passes == passes and peer.b.answers == [("HiddenStates", 1)]


def test_a_leader_that_is_gone_loses_its_rows_only(peer: Peer) -> None:
    def go(piece: int) -> None:
        if piece == 3:
            peer.b.closed = True
            peer.run.gone.add(3)

    for link in (peer.a, peer.b, peer.c):
        peer.ask(link, 1)
    peer.run.after_piece = go
    peer.work.serve_round(lambda: not peer.run.gone.isdisjoint({3}))
    assert peer.run.passes == [([1, 2, 3], 2, 4)] and peer.work.waiting == 3
    peer.work.serve_round()
    assert peer.run.passes[1:] == [([1], 4, HEAD)]
    assert peer.a.answers == [("HiddenStates", 1)] and peer.b.sent == [] and peer.c.answers == [("Refused", 1)]


def test_a_pass_that_breaks_is_refused_to_those_who_were_in_it(peer: Peer) -> None:
    peer.ask(peer.a, 1, tokens=3)
    peer.ask(peer.b, 1)
    peer.ask(peer.c, 1, first=5)
    peer.run.breaks_at = 3
    peer.work.serve_one()
    assert peer.a.answers == peer.b.answers == [("Refused", 1)] and peer.c.answers == [("HiddenStates", 1)]
    assert not peer.work.waiting


def test_no_pass_is_shared_where_it_may_not_be(peer: Peer) -> None:
    peer.run.shares = False
    for link in (peer.a, peer.b):
        peer.ask(link, 1)
    peer.work.serve_round()
    assert peer.run.passes == [([1], 2, HEAD), ([2], 2, HEAD)]


def test_a_peer_that_is_called_away_goes_on_where_it_stood_and_with_what_it_was_asked(peer: Peer) -> None:
    """What was begun comes before anything else, and is not made less."""
    peer.ask(peer.a, 1, tokens=2)
    peer.work.serve_round(lambda: True)
    assert peer.run.passes == [([1], 2, 3)]
    peer.ask(peer.a, 2, tokens=2)
    peer.ask(peer.b, 1, tokens=2)
    assert peer.work.waiting == 3
    peer.take(peer.a, RunRest(batch=1, first=4))
    peer.take(peer.a, FetchKv(batch=9, first_layer=0, end_layer=1, slots=[1]))
    peer.work.serve_round(lambda: False)
    assert peer.run.passes[1:] == [([1], 3, HEAD), ([2], 2, HEAD)]
    assert peer.a.sent == [HiddenStates(batch=1)] and not any(isinstance(one, Refused) for one in peer.b.sent)
    assert [type(one.message) for _, one in peer.work._queue] == [RunPieces, FetchKv]


def test_an_own_step_takes_along_a_message_of_each_leader(peer: Peer) -> None:
    """From where its layers begin; who asks meanwhile may come along, too."""

    def come(piece: int) -> None:
        if piece == 3:
            peer.ask(peer.c, 1, first=5)

    peer.ask(peer.a, 1, first=2, end=6)
    peer.ask(peer.a, 2)
    peer.ask(peer.b, 1, first=4, tokens=3)
    peer.run.after_piece = come
    assert peer.step()
    assert peer.run.passes == [
        ([OWN], 0, 2),
        ([OWN, 1], 2, 4),
        ([OWN, 1, 2], 4, 5),
        ([OWN, 1, 2, 3], 5, 6),
        ([OWN, 2, 3], 6, HEAD),
    ]
    assert peer.a.answers == peer.b.answers == peer.c.answers == [("HiddenStates", 1)] and peer.work.waiting == 1


@pytest.mark.parametrize(
    ("own", "tokens", "along"),
    [(0, 0, True), (0, FULL, True), (0, FULL + 1, False), (3, 0, True), (3, FULL - 3, True), (3, FULL - 2, False)],
    ids=["decode to decode", "a prompt", "too long a prompt", "decode to a prompt", "prompts", "too many tokens"],
)
def test_who_goes_along_with_an_own_step(peer: Peer, own: int, tokens: int, along: bool) -> None:
    """Who does not has a pass behind it; who asks later waits for the next own step."""
    peer.ask(peer.a, 1, tokens=tokens)
    assert peer.step(own)
    peer.ask(peer.b, 1)
    peer.work.serve_round(left=True)
    assert peer.run.passes == ([([OWN], 0, 2), ([OWN, 1], 2, HEAD)] if along else [([OWN], 0, HEAD), ([1, 2], 2, HEAD)])
    assert peer.a.answers == [("HiddenStates", 1)]
    assert peer.step(own)
    assert peer.b.answers == [("HiddenStates", 1)]


def test_kv_is_copied_before_an_own_step(peer: Peer) -> None:
    peer.take(peer.a, FetchKv(batch=9, first_layer=0, end_layer=1, slots=[1]))
    peer.ask(peer.b, 1)
    assert peer.step()
    peer.work.serve_round(left=True)
    assert peer.a.sent == [KvRows(batch=9)] and not peer.work.waiting


def test_what_stood_still_goes_on_with_an_own_step(peer: Peer) -> None:
    peer.ask(peer.a, 1, tokens=2)
    peer.work.serve_round(lambda: True)
    assert peer.step()
    assert peer.run.passes == [([1], 2, 3), ([OWN], 0, 3), ([OWN, 1], 3, HEAD)]


def test_an_own_step_whose_pass_breaks_is_to_be_run_by_itself(peer: Peer) -> None:
    peer.ask(peer.a, 1)
    peer.ask(peer.b, 1, first=5)
    peer.run.breaks_at = 3
    assert not peer.step()
    assert peer.a.answers == [("Refused", 1)] and peer.b.sent == []
    peer.run.breaks_at = 99
    peer.work.serve_round(left=True)
    assert peer.b.answers == [("HiddenStates", 1)]


def test_a_leader_that_is_gone_does_not_stop_an_own_step(peer: Peer) -> None:
    def go(piece: int) -> None:
        if piece == 3:
            peer.b.closed = True
            peer.ask(peer.c, 1, first=4)

    for link in (peer.a, peer.b):
        peer.ask(link, 1)
    peer.run.after_piece = go
    assert peer.step()
    assert peer.run.passes == [([OWN], 0, 2), ([OWN, 1, 2], 2, 4), ([OWN, 1, 3], 4, HEAD)]
    assert peer.b.sent == [] and not peer.work.waiting
