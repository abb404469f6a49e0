"""Which parked engine an activation gets, and what it keeps of the models that it had."""

from __future__ import annotations

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.sim.cluster_sections import TimingSection
from prism.sim.parking import Parking, Taken
from prism.sim.queue import EventQueue

DEVICE = DeviceId("node0/host:0")
HERE, HERE_BUILT = Taken(0.0, wakes=False), Taken(0.0, wakes=True)


def key(model: str, generation: int = 1) -> InstanceKey:
    return InstanceKey(ModelName(model), Generation(generation))


def parking(kept_models: int = 2, *, pooled: bool = True) -> tuple[Parking, EventQueue]:
    queue = EventQueue()
    return Parking(queue, TimingSection(), 1, kept_models, pooled=pooled), queue


def test_a_model_comes_back_to_the_engine_that_had_it() -> None:
    lots, queue = parking()
    assert lots.take(DEVICE, key("a")) == HERE
    queue.run_until(10.0)  # another is parked meanwhile
    lots.put_back(DEVICE, key("a"))
    assert lots.take(DEVICE, key("a", 2)) == HERE_BUILT
    assert lots.take(DeviceId("node0/host:1"), key("a", 3)) == HERE


def test_another_model_gets_an_engine_that_keeps_nothing_while_there_is_one() -> None:
    lots, queue = parking()
    lots.take(DEVICE, key("a"))
    queue.run_until(10.0)
    lots.put_back(DEVICE, key("a"))
    assert lots.take(DEVICE, key("b")) == HERE
    assert lots.take(DEVICE, key("a", 2)) == HERE_BUILT


def test_an_engine_keeps_the_models_that_it_had_last() -> None:
    lots, _ = parking()
    for model in "abc":
        lots.take(DEVICE, key(model))
        lots.put_back(DEVICE, key(model))
    assert not lots.take(DEVICE, key("a", 2)).wakes
    lots.put_back(DEVICE, key("a", 2))
    assert lots.take(DEVICE, key("c", 2)).wakes


def test_what_a_lost_engine_kept_is_gone() -> None:
    lots, queue = parking()
    lots.take(DEVICE, key("a"))
    lots.lose(DEVICE, key("a"))
    queue.run_until(10.0)
    assert lots.take(DEVICE, key("a", 2)) == HERE


def test_engines_that_keep_nothing_or_are_not_pooled_never_wake() -> None:
    lots, _ = parking(kept_models=0)
    lots.take(DEVICE, key("a"))
    lots.put_back(DEVICE, key("a"))
    assert not lots.take(DEVICE, key("a", 2)).wakes
    alone, _ = parking(pooled=False)
    alone.take(DEVICE, key("a"))
    alone.put_back(DEVICE, key("a"))
    assert alone.take(DEVICE, key("a", 2)) == Taken(20.0, wakes=False)
