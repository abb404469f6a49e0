"""Ranks of an engine do what rank 0 says, in its order, and have what it got."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.remote.messages import FetchKv
from prism.remote.notes import DoForeign, LeadersGone, Note, PartCame, RunPart
from sglang_patches.remote_questions import PeerLost
from sglang_patches.remote_ranks import Ranks, RanksApart, RanksOutcome
from sglang_patches.remote_tensors import Unpacked, pack_tensors, unpack_tensors
from tests.patience import PATIENCE_S

WORLD = 2
FETCH = FetchKv(batch=7, first_layer=0, end_layer=2, slots=[3, 4])


class Group:
    """What torch's collectives do, between threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD, timeout=PATIENCE_S)
        self._given: list[Any] = [None] * WORLD
        self.rank = threading.local()

    def exchange(self, mine: Any) -> list[Any]:
        self._given[self.rank.number] = mine.clone()
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def broadcast(self, tensor: Any, source: int, group: Any) -> None:
        tensor.copy_(self.exchange(tensor)[source])

    def all_reduce(self, tensor: Any, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.copy_(torch.stack(self.exchange(tensor)).amin(0))

    def gather(self, tensor: Any, parts: list[Any] | None, dst: int, group: Any) -> None:
        for part, given in zip(parts or (), self.exchange(tensor), strict=parts is not None):
            part.copy_(given)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    found = Group()
    for name in ("broadcast", "all_reduce", "gather"):
        monkeypatch.setattr(torch.distributed, name, getattr(found, name))
    return found


def on_both(group: Group, do: Callable[[Ranks], Any]) -> list[Any]:
    """What ``do`` returns on each rank, or raises."""

    def on(rank: int) -> Any:
        group.rank.number = rank
        scheduler = SimpleNamespace(
            server_args=SimpleNamespace(prism_seat=SimpleNamespace(rank=rank, world=WORLD)),
            tp_cpu_group=group,
            tp_group=SimpleNamespace(ranks=[0, 1]),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(device="cpu")),
        )
        try:
            return do(Ranks(scheduler))
        except Exception as error:
            return error

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(on, range(WORLD)))


def test_others_do_what_rank_0_tells_them_in_its_order_and_get_what_it_got(group: Group) -> None:
    state = torch.arange(6.0).view(2, 3)

    def do(ranks: Ranks) -> Any:
        heard: list[Any] = []

        def hear(note: Note, tensors: Unpacked) -> None:
            heard.append((note, [t.tolist() for t in unpack_tensors(tensors, "cpu")]))

        def work() -> RanksOutcome:
            ranks.tell(RunPart(stop=1, part=0))
            ranks.tell(DoForeign(leader=3, slots=9, work=FETCH), pack_tensors([state, torch.empty(0, 3)]))
            ranks.tell(PartCame(part=0), pack_tensors([state.bfloat16()]))
            ranks.tell(LeadersGone(leaders=[3]))
            return RanksOutcome([1, 2], [state])

        ranks.foreign = hear
        found = ranks.together(work, hear)
        return list(found.numbers), [t.tolist() for t in found.tensors], heard

    first, second = on_both(group, do)
    assert first[:2] == second[:2] == ([1, 2], [state.tolist()])
    assert first[2] == [], "it has done it itself"
    assert second[2] == [
        (RunPart(stop=1, part=0), []),
        (DoForeign(leader=3, slots=9, work=FETCH), [state.tolist(), []]),
        (PartCame(part=0), [state.tolist()]),
        (LeadersGone(leaders=[3]), []),
    ]


def test_a_lost_peer_is_lost_on_all_ranks_and_anything_else_ends_the_engine(group: Group) -> None:
    def lose(ranks: Ranks) -> Any:
        def work() -> RanksOutcome:
            raise PeerLost("it is gone")

        return ranks.together(work)

    for found in on_both(group, lose):
        assert isinstance(found, PeerLost) and "it is gone" in str(found)

    def fail(ranks: Ranks) -> Any:
        def work() -> RanksOutcome:
            raise KeyError("what")

        return ranks.together(work) if ranks.leads else None

    assert isinstance(on_both(group, fail)[0], RanksApart)


def test_votes(group: Group) -> None:
    def vote(ranks: Ranks) -> Any:
        rank = ranks.rank
        here = ({1, 2, 4}, {0, 2, 4})[rank]
        return (
            ranks.least([5 - rank, rank]),
            ranks.all(True),
            ranks.all(rank == 0),
            ranks.first([4, 3, 2], here.__contains__),
            ranks.first([0, 1], here.__contains__),
            ranks.same(10 + rank),
        )

    assert on_both(group, vote) == [([4, 0], True, False, 4, None, 10)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_gets_the_heads_that_it_gave(group: Group, dtype: torch.dtype) -> None:
    def deal(ranks: Ranks) -> Any:
        mine = (torch.arange(2 * 3 * 2 * 4).view(2, 3, 2, 4) + 100 * ranks.rank).to(dtype)
        whole = ranks.collected(mine, 2)
        assert (whole is None) == (not ranks.leads)
        got = ranks.together(lambda: RanksOutcome(tensors=[whole])).tensors[0]
        return tuple(got.shape) == (2, 3, 4, 4) and torch.equal(ranks.own(got, 2), mine)

    assert on_both(group, deal) == [True, True]
