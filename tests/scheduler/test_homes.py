"""When the first map is searched for: once for the same models and devices, and not where that would take too long."""

from __future__ import annotations

import pytest

from prism.core.events import CatalogChanged, OperatorDrain
from prism.core.ids import DeviceId, ModelName
from prism.core.settings import ClusterSettings
from prism.policy.fixed_map import Places
from prism.scheduler import homes
from prism.scheduler.homes import Homes
from tests.scheduler.cluster_world import World, model_spec
from tests.scheduler.exchange import node_devices

A, B = model_spec("a", 100), model_spec("b", 100)
SETTINGS = ClusterSettings(expected_rates=(("a", 1.0), ("b", 1.0)), rebalance_every_s=0.0)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of devices of every search."""
    found: list[int] = []

    def search(models: object, devices: list[object], loads: object, least: int) -> Places:
        found.append(len(devices))
        return {ModelName("a"): (DeviceId("n/host:1"),)}

    monkeypatch.setattr(homes, "goodput_places", search)
    return found


def test_a_map_is_made_once_and_anew_for_other_models_or_devices(searches: list[int]) -> None:
    w = World(SETTINGS, [A, B])
    w.join(*node_devices("n", 2))
    books = w.scheduler.books
    known, record = Homes(books), books.models[A.name]
    for _ in range(3):
        assert known.of(record) == (DeviceId("n/host:1"),)
    assert searches == [2]
    w.scheduler.on_event(CatalogChanged((model_spec("c", 100),), ()), 0.0)
    known.of(record)
    w.scheduler.on_event(CatalogChanged((), (ModelName("c"),)), 0.0)
    known.of(record)
    w.scheduler.on_event(OperatorDrain((DeviceId("n/host:0"),), on=True, carry=False), 0.0)
    known.of(record)
    w.join(*node_devices("m", 2))
    known.of(record)
    known.of(record)
    assert searches == [2, 2, 2, 1, 3]


def test_a_large_fleet_begins_without_a_map(searches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_MOST_PAIRS", 3)
    w = World(SETTINGS, [A, B])
    w.join(*node_devices("n", 2))
    assert Homes(w.scheduler.books).of(w.scheduler.books.models[A.name]) == ()
    assert searches == []
