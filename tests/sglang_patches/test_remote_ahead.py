"""What waits for a peer is run at the leader meanwhile, and the peer is left with the rest."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.remote.link import Received
from prism.remote.messages import FetchKv, HiddenStates, RunPieces, RunRest
from sglang_patches.remote_ahead import RunAhead
from sglang_patches.remote_batches import BatchPart
from sglang_patches.remote_peer import ForeignWork
from sglang_patches.remote_stops import Stop

LAYERS, SLOTS = 6, 10
STOP = Stop(SimpleNamespace(), 2, 6)  # type: ignore[arg-type]


def part(prefix: int = 0, decodes: bool = False) -> BatchPart:
    extends = [] if decodes else [2]
    return BatchPart([0], [prefix + 2], [4, 5], [prefix, prefix + 1], [7, 8], [] if decodes else [prefix], extends)


class Link:
    """With so many bytes that the kernel has not taken."""

    def __init__(self, unsent_bytes: int = 0, closed: bool = False) -> None:
        self.unsent_bytes, self.closed, self.sent = unsent_bytes, closed, list[Any]()

    def send(self, message: Any, tensors: Any = ()) -> None:
        self.sent.append(message)


class Asking:
    """A peer that has not begun."""

    def __init__(self) -> None:
        self.open, self.sent = True, list[tuple[int, list[Any]]]()
        self.questions = SimpleNamespace(waits=lambda question: self.open)

    def run_rest(self, question: Any, first: int, tensors: list[Any]) -> None:
        self.sent.append((first, tensors))


def leader(asking: Asking, held: set[int]) -> RunAhead:
    buffers = [torch.zeros(SLOTS, 1, 2) + layer for layer in range(LAYERS)]
    cache = SimpleNamespace(k_buffer=buffers, v_buffer=[10 + one for one in buffers])
    allocator = SimpleNamespace(get_kvcache=lambda: cache)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=allocator)
    return RunAhead(scheduler, asking, lambda: frozenset(held))  # type: ignore[arg-type]


def run_here(stop: Stop, part: BatchPart, state: Any) -> Any:
    assert stop.end == stop.first + 1
    return state[0] + 1, state[1] + 1


def test_it_goes_as_far_as_weights_are_there_and_leaves_one_piece() -> None:
    asking, held = Asking(), {0, 1, 2}
    ahead, question = leader(asking, held), (Link(), 1)

    def go_on() -> bool:
        return ahead.go_on(STOP, part(), (torch.zeros(2), torch.zeros(2)), question, run_here)  # type: ignore[arg-type]

    assert [go_on(), go_on()] == [True, False], "piece 3 is not here"
    held |= {3, 4, 5}
    assert [go_on(), go_on(), go_on()] == [True, True, False], "the last piece is the peer's"
    assert [first for first, _ in asking.sent] == [3, 4, 5] and ahead.pieces == 3
    state, _, k, v = asking.sent[-1][1]
    assert state.tolist() == [3.0, 3.0]
    assert k[:, 0, 0, 0].tolist() == [1.0, 2.0, 3.0] and v[:, 1, 0, 1].tolist() == [11.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("which", "unsent", "waits"),
    [(part(decodes=True), 0, True), (part(prefix=3), 0, True), (part(), 1, True), (part(), 0, False)],
    ids=["decodes", "has KV at the peer", "is being sent", "is answered"],
)
def test_what_is_not_run_ahead(which: BatchPart, unsent: int, waits: bool) -> None:
    asking = Asking()
    asking.open = waits
    ahead, question = leader(asking, set(range(LAYERS))), (Link(unsent), 1)
    assert not ahead.go_on(STOP, which, None, question, run_here)  # type: ignore[arg-type]
    assert not asking.sent


def test_what_was_answered_meanwhile_is_not_said() -> None:
    asking = Asking()

    def answered(stop: Stop, part: BatchPart, state: Any) -> Any:
        asking.open = False
        return state

    ahead, question = leader(asking, set(range(LAYERS))), (Link(), 1)
    assert ahead.go_on(STOP, part(), (torch.zeros(2), torch.zeros(2)), question, answered)  # type: ignore[arg-type]
    assert not asking.sent


def work(batch: int) -> Received:
    per_token: dict[str, Any] = {"out_slots": [], "positions": [], "token_ids": []}
    table: dict[str, Any] = {"table_rows": [], "table_positions": [], "table_slots": []}
    lists: dict[str, Any] = {"rows": [], "seq_lens": [], **per_token, **table}
    return Received(RunPieces(batch=batch, first=2, end=6, decode=False, **lists), ())


def test_a_peer_does_less_of_what_waits_and_copies_kv_first() -> None:
    peer: Any = ForeignWork.__new__(ForeignWork)
    peer._queue, peer._begun = deque(), None
    a, b, c = (SimpleNamespace(closed=False) for _ in range(3))
    for link, batch in ((a, 1), (b, 1), (a, 2)):
        peer.take(link, work(batch))
    for first in (3, 4):
        peer.take(a, Received(RunRest(batch=2, first=first), ()))
    peer.take(b, Received(RunRest(batch=7, first=3), ()))
    for link in (a, c):
        peer.take(link, Received(FetchKv(batch=9, first_layer=0, end_layer=1, slots=[1]), ()))
    found = [(link, type(one.message), getattr(one.message, "first", 0)) for link, one in peer._queue]
    assert found == [(c, FetchKv, 0), (a, RunPieces, 2), (b, RunPieces, 2), (a, RunPieces, 4), (a, FetchKv, 0)]
    assert [getattr(one.message, "since", None) for _, one in peer._queue][3] == 2


def test_between_two_steps_a_peer_does_one_step_of_each_leader() -> None:
    """However much one of them has begun; who is gone is not answered."""
    peer: Any = ForeignWork.__new__(ForeignWork)
    peer._queue, peer._begun, peer._gone, peer._ranks = deque(), None, [], SimpleNamespace(world=1)
    answered: list[tuple[Any, int]] = []
    peer._answer = lambda link, received, called: answered.append((link, received.message.batch))
    a, b, gone = Link(), Link(), Link(closed=True)
    for link, batch in ((a, 1), (a, 2), (gone, 1), (a, 3), (b, 1)):
        peer.take(link, work(batch))
    peer.serve_round()
    assert answered == [(a, 1), (b, 1)] and peer.waiting == 2
    peer.serve_round()
    peer.serve_one()
    peer.serve_round()
    assert answered == [(a, 1), (b, 1), (a, 2), (a, 3)] and not peer.waiting


def test_a_peer_that_is_called_away_goes_on_where_it_stood_and_with_what_it_was_asked() -> None:
    """What was begun comes before anything else, and is not made less; who is gone is forgotten with it."""
    peer: Any = ForeignWork.__new__(ForeignWork)
    peer._queue, peer._begun, peer._gone, peer._ranks = deque(), None, [], SimpleNamespace(world=1)
    did: list[Any] = []
    begun = SimpleNamespace(work=work(1).message)
    peer._run = SimpleNamespace(go_on=lambda begun, called: did.append("on") or ())
    peer._answer = lambda link, received, called: did.append((link, received.message.batch, received.message.first))
    a, b = Link(), Link()
    for link, batch in ((a, 2), (b, 1)):
        peer.take(link, work(batch))
    peer._begun = a, begun
    assert peer.waiting == 3
    peer.take(a, Received(RunRest(batch=1, first=4), ()))
    peer.take(a, Received(FetchKv(batch=9, first_layer=0, end_layer=1, slots=[1]), ()))
    peer.serve_round(lambda: False)
    assert did == ["on", (b, 1, 2)] and a.sent == [HiddenStates(batch=1)] and peer._begun is None
    assert [type(one.message) for _, one in peer._queue] == [RunPieces, FetchKv]
    peer._begun, a.closed = (a, begun), True
    peer.serve_one()
    assert did[2:] == [] and not peer.waiting
