"""Parts go through stops in order, each as early as it can, over engines that take their time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.remote_stages import Passing, Stages, run_stages


class Place(NamedTuple):
    number: int
    peer: str
    """"": here."""


@dataclass
class Fleet:
    """Peers that answer what they were asked in order, one each time that the leader takes what arrived."""

    patience: list[int] = field(default_factory=list)
    """How many looks an answer takes, question by question; then one."""
    asked: dict[str, deque[tuple[int, int, int]]] = field(default_factory=dict)
    answered: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    log: list[tuple[Place, int]] = field(default_factory=list)
    both_busy: int = 0
    """Computations of the leader while a peer had work."""
    questions: int = 0
    states: dict[int, list[tuple[int, str]]] = field(default_factory=dict)

    def run_here(self, stop: Place, part: int, state: list[tuple[int, str]] | None) -> list[tuple[int, str]]:
        self.log.append((stop, part))
        self.both_busy += any(self.asked.values())
        return [*(state or []), stop]

    def send(self, stop: Place, part: int, state: list[tuple[int, str]] | None) -> int:
        self.log.append((stop, part))
        self.questions += 1
        looks = self.patience.pop() if self.patience else 1
        self.asked.setdefault(stop.peer, deque()).append((self.questions, looks, part))
        self.states[self.questions] = [*(state or []), stop]
        return self.questions

    def received(self, stop: Place, part: int, question: int) -> list[tuple[int, str]] | None:
        return self.answered.pop(question, None)

    def nap(self, waits: bool, since_s: float) -> None:
        assert not waits or any(self.asked.values()), "it waits for nobody"
        for queue in self.asked.values():
            if queue:
                question, looks, part = queue.popleft()
                if looks > 1:
                    queue.appendleft((question, looks - 1, part))
                else:
                    self.answered[question] = self.states[question]

    @property
    def stages(self) -> Stages[Place, int, list[tuple[int, str]], int]:
        return Stages(lambda stop: not stop.peer, self.run_here, self.send, self.received, self.nap)

    def run(self, parts: int, stops: list[Place]) -> list[list[tuple[int, str]]]:
        return run_stages(range(parts), stops, self.stages)


@given(
    st.integers(1, 6), st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=5), st.lists(st.integers(1, 5))
)
def test_every_part_passes_every_stop_in_order(parts: int, peers: list[str], patience: list[int]) -> None:
    fleet, stops = Fleet(patience), [Place(*place) for place in enumerate(peers)]
    assert fleet.run(parts, stops) == parts * [stops]
    for stop in stops:
        assert [part for at, part in fleet.log if at == stop] == list(range(parts))


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=5),
    st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=5),
    st.lists(st.integers(1, 5)),
)
def test_parts_that_come_later_follow_those_before_them(
    batches: list[tuple[int, int]], peers: list[str], patience: list[int]
) -> None:
    """Batches of so many parts, each some looks after the one before; each is taken as soon as it has passed."""
    fleet, stops = Fleet(patience), [Place(*place) for place in enumerate(peers)]
    passing, under_way, added, looks = Passing(stops, fleet.stages), list[int](), 0, 0
    coming = list(batches)
    while coming or under_way:
        if coming and (looks >= coming[0][1] or not under_way):
            count, looks = coming.pop(0)[0], 0
            passing.add(range(added, added + count))
            under_way.append(count)
            added += count
        looks += 1
        moved = passing.advance()
        while under_way and passing.passed(under_way[0]):
            count = under_way.pop(0)
            assert passing.take(count) == count * [stops]
        if under_way:
            fleet.nap(not moved, 0.0)
    for stop in stops:
        assert [part for at, part in fleet.log if at == stop] == list(range(added))


def test_the_leader_computes_a_part_while_its_peer_has_the_next() -> None:
    fleet = Fleet()
    fleet.run(4, [Place(0, "a"), Place(1, "")])
    assert fleet.both_busy == 3
    fleet = Fleet()
    fleet.run(1, [Place(0, "a"), Place(1, "")])
    assert fleet.both_busy == 0


def test_a_lost_peer_ends_it() -> None:
    class Lost(Fleet):
        def received(self, stop: Place, part: int, question: int) -> list[tuple[int, str]] | None:
            if part == 2:
                raise ConnectionError("gone")
            return super().received(stop, part, question)

    with pytest.raises(ConnectionError, match="gone"):
        Lost().run(4, [Place(0, ""), Place(1, "a"), Place(2, "")])
