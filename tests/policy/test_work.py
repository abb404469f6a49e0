"""Placement by work: what a place costs, and the move or exchange that relieves a device most, against all others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName
from prism.policy.work import MovableModel, Neighbour, ShardDemand, Site, best_relief, loads_with

demands = st.builds(ShardDemand, st.floats(0.0, 1.0), st.floats(0.0, 300.0), st.integers(10, 300))


def site(name: str, capacity: int, there: list[ShardDemand]) -> Site:
    built = Site(DeviceId(name), 0.0, 0.0, float(capacity))
    for demand in there:
        built = built.plus(demand)
    return built


def neighbour(name: str, there: dict[str, ShardDemand], capacity: int = 1000) -> Neighbour:
    room = capacity - sum(d.weight_bytes + d.kv_bytes for d in there.values())
    tenants = tuple(MovableModel(ModelName(m), d) for m, d in there.items())
    return Neighbour(site(name, capacity, list(there.values())), room, tenants)


def need_bytes(*devices: Neighbour) -> dict[ModelName, int]:
    return {t.model: int(t.demand.weight_bytes + t.demand.kv_bytes) for d in devices for t in d.tenants}


@given(demands, st.lists(st.lists(demands, max_size=3), min_size=1, max_size=5))
def test_the_vector_says_what_each_device_says(demand: ShardDemand, devices: list[list[ShardDemand]]) -> None:
    sites = [site(f"d{i}", 1000, there) for i, there in enumerate(devices)]
    found = loads_with(
        demand,
        np.array([s.work for s in sites]),
        np.array([s.kv_bytes for s in sites]),
        np.array([s.shared_bytes for s in sites]),
    )
    for one, grown in zip(sites, found, strict=True):
        then = one.plus(demand).load
        assert grown == (pytest.approx(then - one.load, abs=1e-9) if then < float("inf") else float("inf"))


@given(demands, st.lists(demands, max_size=3))
def test_what_comes_and_goes_leaves_nothing(demand: ShardDemand, there: list[ShardDemand]) -> None:
    before = site("d", 1000, there)
    after = before.plus(demand).minus(demand)
    assert after.work == pytest.approx(before.work, abs=1e-9)
    assert after.kv_bytes == pytest.approx(before.kv_bytes, abs=1e-6)
    assert after.shared_bytes == before.shared_bytes


tenancies = st.lists(demands, max_size=3)


@given(tenancies, st.lists(tenancies, min_size=1, max_size=3), st.sampled_from([0.0, 0.1, 0.5]))
def test_relief_is_the_best_of_all_moves_else_of_all_exchanges(
    here: list[ShardDemand], there: list[list[ShardDemand]], price: float
) -> None:
    """By trying every single one and adding up the loads of all devices anew."""
    models = {"here": {f"h{i}": d for i, d in enumerate(here)}}
    models |= {f"d{k}": {f"d{k}m{i}": d for i, d in enumerate(ds)} for k, ds in enumerate(there)}
    devices = {name: neighbour(name, m) for name, m in models.items()}
    needs = need_bytes(*devices.values())

    def total(assignment: dict[str, dict[str, ShardDemand]]) -> float:
        return sum(site(name, 1000, list(m.values())).load for name, m in assignment.items())

    def gain(goes: str, to: str, comes: str | None) -> float:
        then = {name: dict(m) for name, m in models.items()}
        then[to][goes] = then["here"].pop(goes)
        if comes is not None:
            then["here"][comes] = then[to].pop(comes)
        return total(models) - total(then)

    def fits(model: str, to: str) -> bool:
        return devices[to].room_bytes >= needs[ModelName(model)]

    moves = [(m, d, None) for m, d in itertools.product(models["here"], list(models)[1:]) if fits(m, d)]
    swaps = [(m, d, u) for m, d, _ in moves for u in models[d] if fits(u, "here")]
    found = best_relief(devices["here"], [devices[d] for d in list(models)[1:]], needs, price)
    best_move = max((gain(*m) for m in moves), default=0.0)
    best_swap = max((gain(*s) for s in swaps), default=0.0)
    if found is None:
        assert best_move <= price + 1e-6
        assert best_swap <= 2 * price + 1e-6
    elif found.comes is None:
        assert found.gain == pytest.approx(best_move, abs=1e-6)
        assert found.gain == pytest.approx(gain(found.goes, found.to, None), abs=1e-6)
    else:
        assert best_move <= price + 1e-6
        assert found.gain == pytest.approx(best_swap, abs=1e-6)
        assert found.gain > 2 * price


def test_two_busy_models_part_and_a_busy_and_a_quiet_one_change_places() -> None:
    busy, quiet = ShardDemand(0.9, 50.0, 100), ShardDemand(0.2, 50.0, 100)
    here = neighbour("here", {"a": busy, "b": busy})
    moved = best_relief(here, [neighbour("empty", {})], need_bytes(here), 0.1)
    assert moved is not None and (moved.to, moved.comes) == ("empty", None)
    # Where each device has a busy one already, nothing is gained by a third.
    light = neighbour("light", {"c": ShardDemand(0.75, 50.0, 100), "d": quiet})
    heavy = neighbour("heavy", {"a": busy, "b": ShardDemand(0.85, 50.0, 100)})
    swapped = best_relief(heavy, [light], need_bytes(heavy, light), 0.05)
    assert swapped is not None and swapped.comes == "d"
