"""How many of the pieces that arrived an engine brings into its model between two steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prism.remote.orders import GrowRoute, KvWay
from sglang_patches import remote_growth
from sglang_patches.remote_growth import BRING_S, LOOK_S, Growth
from sglang_patches.remote_layers import RemoteLayers
from sglang_patches.remote_stops import Stop

PIECES = 10


class OneRank:
    """Of an engine without tensor parallelism."""

    first = staticmethod(lambda numbers, here: next((n for n in numbers if here(n)), None))
    all = staticmethod(bool)
    same = staticmethod(int)


class Weights:
    """All of which have arrived; bringing one takes ``each_s`` on a clock of its own."""

    def __init__(self, each_s: float) -> None:
        self._each_s, self.now_s = each_s, 0.0
        self.arrived_bytes = 0

    def arrived(self, piece: int) -> bool:
        return True

    def bring(self, model: Any, piece: int) -> None:
        self.now_s += self._each_s

    def tend(self) -> None:
        pass


def test_what_a_pipeline_runs_is_taken_over_when_all_of_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs it leads over this engine, too."""
    peer = SimpleNamespace(lost=False)
    route = (Stop(None, 0, 2), Stop(peer, 2, 6), Stop(None, 6, 8))  # type: ignore[arg-type]
    asked: list[int] = []

    def taking(*given: Any) -> Any:
        asked.append(len(foreign.held))
        return SimpleNamespace(fetches=False, told=None)

    monkeypatch.setattr(remote_growth, "KvTaking", taking)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(prism_seat=None))
    pieces, foreign = SimpleNamespace(count=8, layers=6), SimpleNamespace(held=frozenset(range(6)) | {7})
    routes = SimpleNamespace(stalled=False, begin_again=lambda: None, use=lambda route: None, go_on_alone=lambda: None)
    leader = SimpleNamespace(remote=True, here=None, route=route)
    growth = Growth(scheduler, pieces, foreign, leader, routes, OneRank())  # type: ignore[arg-type]
    for when_whole in (True, False):
        growth.begin(GrowRoute(number=1, when_whole=when_whole))
        growth._take_over(KvWay.AUTO, idle=False)
    assert asked == [7], "the other pieces of its stop are not here"
    foreign.held = frozenset(range(8))
    growth.begin(GrowRoute(number=1, when_whole=True))
    growth._take_over(KvWay.AUTO, idle=False)
    assert asked == [7, 8]


@pytest.mark.parametrize(("came", "idle", "taken"), [(1, False, False), (2, False, True), (1, True, True)])
def test_requests_are_not_stopped_for_every_layer_that_comes(
    monkeypatch: pytest.MonkeyPatch, came: int, idle: bool, taken: bool
) -> None:
    """A quarter of what peers run is worth it; and nobody is stopped where nothing runs."""
    asked: list[Any] = []

    def taking(*given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(fetches=False)

    monkeypatch.setattr(remote_growth, "KvTaking", taking)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(prism_seat=None))
    peer = SimpleNamespace(lost=False)
    route = (Stop(None, 0, 2), Stop(peer, 2, 9), Stop(None, 9, 10))  # type: ignore[arg-type]
    foreign = SimpleNamespace(held=frozenset({0, 1, 9, *range(2, 2 + came)}))
    leader = SimpleNamespace(remote=True, here=None, route=route)
    pieces, routes = SimpleNamespace(count=10, layers=8), SimpleNamespace(stalled=False)
    growth = Growth(scheduler, pieces, foreign, leader, routes, OneRank())  # type: ignore[arg-type]
    growth.begin(GrowRoute(number=1))
    assert growth.takes_over is (came == 2)
    growth._take_over(KvWay.AUTO, idle)
    assert bool(asked) is taken


def held_after_a_step(monkeypatch: pytest.MonkeyPatch, each_s: float, idle: bool, step_s: float = 0.0) -> int:
    weights = Weights(each_s)
    monkeypatch.setattr(remote_growth, "time", SimpleNamespace(monotonic=lambda: weights.now_s))
    monkeypatch.setattr(Growth, "_take_over", lambda self, way, idle: None)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(prism_seat=SimpleNamespace(weights=weights)))
    pieces, foreign = SimpleNamespace(count=PIECES, model=None), SimpleNamespace(held=frozenset({0, 1, PIECES - 1}))
    leader, routes = SimpleNamespace(remote=True, here=None, step_s=step_s), SimpleNamespace(stalled=False)
    growth = Growth(scheduler, pieces, foreign, leader, routes, OneRank())  # type: ignore[arg-type]
    growth.begin(GrowRoute(number=1))
    growth.go_on(idle)
    return len(foreign.held)


def test_an_engine_that_rests_sees_that_weights_have_come() -> None:
    """Others may wait for its next layer. A command wakes it as ever, and so does the end of its rest."""
    weights, waited = Weights(0.0), list[float]()

    def wait(timeout_s: float) -> bool:
        waited.append(timeout_s)
        weights.arrived_bytes += len(waited) == 3
        return len(waited) == 5

    seat = SimpleNamespace(weights=weights, wait=wait)
    scheduler = SimpleNamespace(server_args=SimpleNamespace(prism_seat=seat))
    pieces, foreign = SimpleNamespace(count=PIECES, model=None), SimpleNamespace(held=frozenset({0, 1, PIECES - 1}))
    leader, routes = SimpleNamespace(remote=False, here=None, step_s=0.0), SimpleNamespace(stalled=True)
    growth = Growth(scheduler, pieces, foreign, leader, routes, OneRank())  # type: ignore[arg-type]
    others = SimpleNamespace(waiting=1)
    remote: Any = SimpleNamespace(_growth=growth, _seat=seat, _foreign=others)
    RemoteLayers.rest(remote, 1e6)
    assert not waited, "a leader has asked more than one step"
    others.waiting = 0
    growth.begin(GrowRoute(number=1))
    RemoteLayers.rest(remote, 1e6)
    assert waited == [LOOK_S] * 3 and growth.weights_came
    RemoteLayers.rest(remote, 1e6)
    assert len(waited) == 3, "it has not looked at what came yet"
    growth._seen_bytes = weights.arrived_bytes
    RemoteLayers.rest(remote, 1e6)
    assert waited == [LOOK_S] * 5, "until a command came"
    foreign.held = frozenset(range(PIECES))
    RemoteLayers.rest(remote, 0.0)
    assert not growth.waits and len(waited) == 5


@pytest.mark.parametrize(
    ("each_s", "idle", "step_s", "held"),
    [
        (BRING_S / 100, False, 0.0, PIECES),
        (BRING_S / 2, False, 0.0, 5),
        (BRING_S / 2, False, 19 * BRING_S, 7),
        (10 * BRING_S, False, 0.0, 4),
        (10 * BRING_S, True, 0.0, PIECES),
    ],
)
def test_a_step_waits_for_the_pieces_that_come_in_no_time_and_for_one_at_least(
    monkeypatch: pytest.MonkeyPatch, each_s: float, idle: bool, step_s: float, held: int
) -> None:
    """A step of a long prefill lasts longer than several layers take to arrive: with one a step, an engine that serves
    would have its last layer long after it came."""
    assert held_after_a_step(monkeypatch, each_s, idle, step_s) == held


def test_streams_of_short_steps_do_not_stand_still_for_a_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of 11 ms pieces were brought for another 10, beside the slice of KV that a pause is estimated by."""
    assert held_after_a_step(monkeypatch, 0.001, idle=False, step_s=0.011) == 3 + 3
