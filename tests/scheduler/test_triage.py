"""A fleet that cannot serve everybody (``overload``): ten models on two devices that hold four of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from prism.core.effects import Activate, Deactivate
from prism.core.ids import ModelName
from prism.core.settings import ClusterSettings, Overload
from prism.scheduler.decisions import NoRoom, Room
from prism.scheduler.survey import Survey
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices
from tests.scheduler.paged_world import PagedWorld
from tests.scheduler.test_relief import GB, HERE, gpu
from tests.scheduler.test_starvation import MAX_WAIT_S, PROFILES, SETTINGS, ten_models


def run(profile: str, overload: Overload, seconds: float = 300.0) -> PagedWorld:
    world = PagedWorld(replace(SETTINGS, overload=overload), ten_models(), 400, 1)
    world.run(PROFILES[profile], seconds)
    return world


def test_nobody_is_turned_away_who_could_be_served() -> None:
    """Decision for decision as without it."""
    everybody, turns, most = (run("the soak", overload, 120.0) for overload in Overload)
    assert most.log == turns.log == everybody.log and not most.scheduler.books.turned_away


def test_who_starves_has_its_turn_although_it_is_turned_away() -> None:
    world = run("everybody always", Overload.TURNS, 60.0)
    assert world.scheduler.books.turned_away, "memory holds four of ten"
    world.run(PROFILES["everybody always"], 240.0)
    assert not world.refused
    served = Counter(effect.model for _, effect in world.log if isinstance(effect, Activate))
    assert len(served) == 10 and min(served.values()) >= 3, "every model has turns"


def test_models_that_nobody_asks_for_are_not_looked_at() -> None:
    """A catalog may have ten thousand of them."""
    asked = ModelName("asked")
    w = World(ClusterSettings(), [model_spec(asked, GB), model_spec("idle", GB)])
    w.join(gpu(HERE))
    triage = w.scheduler.policy._triage  # type: ignore[attr-defined]
    w.arrive(asked)
    assert set(triage._asked) == {asked}
    for _ in range(40):
        w.pass_time(1.0)
        w.step()
    assert not triage._asked


def test_turns_may_have_a_tenth_of_the_time_only() -> None:
    world = run("everybody always", Overload.MOST_SERVED)
    left_s = [world.now - ask.waits_since_s for asks in world.inactive.values() for ask in asks]
    assert max(world.waits_s + left_s) <= MAX_WAIT_S + 1.0, "longer waits are refused"
    served = Counter(effect.model for _, effect in world.log if isinstance(effect, Activate))
    assert len(served) == 10 and min(served.values()) >= 5, "every model has turns"
    assert world.refused < world.answered / 10
    assert world.failures <= sum(served.values()) / 100, "the books promised memory that is not there"
    ended = [dict(e.reason.numbers) for _, e in world.log if isinstance(e, Deactivate)]
    assert any("turned_away" in numbers for numbers in ended), "turns end"


def test_an_operators_load_is_never_turned_away() -> None:
    world = run("everybody always", Overload.MOST_SERVED, 60.0)
    books, triage = world.scheduler.books, world.scheduler.policy._triage  # type: ignore[attr-defined]
    away = next(iter(books.turned_away), None)
    assert away is not None
    model = books.models[away]
    triage._spent_s = 1.0
    assert triage.waits_its_turn(model, world.now)
    model.want = next(e.reason for _, e in world.log if isinstance(e, Activate))
    assert not triage.waits_its_turn(model, world.now)


def test_until_its_turn_a_model_drives_out_only_who_is_idle_for_long_and_only_to_be_in_time() -> None:
    tight, loose, idle = model_spec("tight", 900, slo_ttft_s=0.8), model_spec("loose", 900), model_spec("idle", 900)
    w = World(SETTINGS, [tight, replace(loose, slo_ttft_s=2.0), idle])
    w.join(*node_devices("n", 1))
    w.arrive(idle.name)
    for _ in range(3):
        w.pass_time(0.5)
        w.step()
    policy, models = w.scheduler.policy, w.scheduler.books.models
    w.scheduler.books.turned_away = frozenset({tight.name, loose.name})

    def find(name: ModelName) -> object:
        model = models[name]
        if not model.waiting:
            model.waiting, model.waiting_since_s, model.tightest_deadline_s = 1, w.now, w.now
        return policy.find_room(model, w.now, Survey())

    assert isinstance(find(loose.name), NoRoom), "idle is not idle for long"
    w.now += 60.0
    assert isinstance(find(loose.name), Room)
    assert isinstance(find(tight.name), NoRoom), "loading takes too long for it"
    began_s = w.now
    w.now = began_s + 15.9
    assert isinstance(find(tight.name), NoRoom)
    w.now = began_s + 16.0
    assert isinstance(find(tight.name), Room), "its turn, with four of its twenty seconds left to load in"
    models[tight.name].spec = replace(tight, max_wait_s=60.0)
    w.now = began_s + 53.9
    assert isinstance(find(tight.name), NoRoom)
    w.now = began_s + 54.0
    assert isinstance(find(tight.name), Room)
