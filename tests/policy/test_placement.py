"""Algorithm 1: its bound against brute force, feasibility, tensor parallelism, staying put."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.settings import KvprMode
from prism.core.specs import DeviceKind, DeviceSpec
from prism.policy.placement import Assignment, PlacementModel, mean_pressure, move_pays, place_models

CAPACITY = 1000


def _devices(count: int, per_domain: int = 100) -> list[DeviceSpec]:
    return [
        DeviceSpec(DeviceId(f"n/host:{i}"), NodeId("n"), DeviceKind.HOST, CAPACITY, f"domain{i // per_domain}")
        for i in range(count)
    ]


def _model(i: int, rate: float, weight: int, **more: object) -> PlacementModel:
    return PlacementModel(ModelName(f"m{i}"), rate, weight, **more)  # type: ignore[arg-type]


models_strategy = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 150)), min_size=1, max_size=6)


def _loads(models: list[PlacementModel], assignments: list[Assignment]) -> dict[DeviceId, tuple[float, float]]:
    """(weighted rate, memory left) by device."""
    by_name = {m.name: m for m in models}
    loads: dict[DeviceId, tuple[float, float]] = {}
    for a in assignments:
        model = by_name[a.model]
        for d in a.devices:
            rate, left = loads.get(d, (0.0, float(CAPACITY)))
            loads[d] = (rate + model.weighted_rate / model.tp, left - model.shard.weight_bytes)
    return loads


def _optimum(models: list[PlacementModel], count: int) -> float:
    best = float("inf")
    for choice in product(range(count), repeat=len(models)):
        rate, left = [0.0] * count, [float(CAPACITY)] * count
        for model, d in zip(models, choice, strict=True):
            rate[d] += model.weighted_rate
            left[d] -= model.weight_bytes
        if min(left) > 0:
            best = min(best, max(r / s for r, s in zip(rate, left, strict=True)))
    return best


@given(models_strategy, st.integers(1, 3))
def test_worst_pressure_is_within_the_papers_bound(sizes: list[tuple[int, int]], count: int) -> None:
    models = [_model(i, float(r), w) for i, (r, w) in enumerate(sizes)]
    assignments = place_models(models, _devices(count), 0.0, KvprMode.PAPER)
    loads = _loads(models, assignments)
    worst = max(loads, key=lambda d: loads[d][0] / loads[d][1])
    rate, left = loads[worst]
    last = [a for a in assignments if worst in a.devices][-1]
    before_last = left + next(m for m in models if m.name == last.model).weight_bytes
    weight = before_last - left
    bound = _optimum(models, count) * (1 + CAPACITY / (before_last - weight))
    assert rate / left <= bound * (1 + 1e-9)


@given(models_strategy, st.integers(1, 3))
def test_lookahead_is_within_twice_the_optimum_plus_one_model(sizes: list[tuple[int, int]], count: int) -> None:
    """The after-state of the device that the paper's rule would take bounds what lookahead takes."""
    models = [_model(i, float(r), w) for i, (r, w) in enumerate(sizes)]
    loads = _loads(models, place_models(models, _devices(count), 0.0, KvprMode.LOOKAHEAD))
    least_left = CAPACITY - sum(m.weight_bytes for m in models)
    worst = max(r / s for r, s in loads.values())
    assert worst <= _optimum(models, count) * (1 + CAPACITY / least_left) * (1 + 1e-9)


@pytest.mark.parametrize("mode", list(KvprMode))
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 900), st.integers(0, 200), st.integers(1, 3)), max_size=12
    ),
    count=st.integers(1, 6),
)
def test_placements_are_feasible_and_deterministic(
    mode: KvprMode, sizes: list[tuple[int, int, int, int]], count: int
) -> None:
    devices = _devices(count, per_domain=3)
    models = [_model(i, float(r), w, min_kv_bytes=kv, tp=tp) for i, (r, w, kv, tp) in enumerate(sizes)]
    assignments = place_models(models, devices, 0.0, mode)
    assert assignments == place_models(list(reversed(models)), devices, 0.0, mode)
    domain_of = {d.id: d.domain for d in devices}
    promised: dict[DeviceId, int] = {}
    for a in assignments:
        model = next(m for m in models if m.name == a.model)
        if a.devices:
            assert len(set(a.devices)) == model.tp
            assert len({domain_of[d] for d in a.devices}) == 1
        for d in a.devices:
            promised[d] = promised.get(d, 0) + model.shard.weight_bytes + model.shard.min_kv_bytes
    assert all(total <= CAPACITY for total in promised.values())


def test_a_model_stays_unless_another_device_is_better_by_more_than_tau() -> None:
    devices = _devices(2)
    here, there = devices[0].id, devices[1].id
    models = [_model(0, 10.0, 100, current=(here,)), _model(1, 5.0, 100, current=(here,))]
    gain = 5.0 / 800 + 10.0 / 900 - 5.0 / 900
    assert [a.devices for a in place_models(models, devices, 1.0, KvprMode.LOOKAHEAD)] == [(here,), (here,)]
    moved = place_models(models, devices, gain / 10, KvprMode.LOOKAHEAD)
    assert [a.devices for a in moved] == [(here,), (there,)]
    assert [a.moved for a in moved] == [False, True]


def test_a_model_without_room_is_reported_and_uses_nothing() -> None:
    devices = _devices(1)
    models = [_model(0, 9.0, 1200), _model(1, 1.0, 900)]
    assert [a.devices for a in place_models(models, devices, 0.0, KvprMode.LOOKAHEAD)] == [(), (devices[0].id,)]


def test_shards_take_the_next_best_device() -> None:
    devices = _devices(3)
    models = [_model(0, 8.0, 200), _model(1, 4.0, 400, tp=2)]
    (_, sharded) = place_models(models, devices, 0.0, KvprMode.LOOKAHEAD)
    assert sharded.devices == (devices[1].id, devices[2].id)


def test_moves_must_gain_more_than_they_cost() -> None:
    assert move_pays(current_kvpr=2.0, best_kvpr=1.0, activation_s=1.0, window_s=10.0)
    assert not move_pays(current_kvpr=2.0, best_kvpr=1.9, activation_s=1.0, window_s=10.0)
    assert not move_pays(current_kvpr=0.0, best_kvpr=0.0, activation_s=0.1, window_s=10.0)


def test_mean_pressure_is_a_lower_bound_on_every_placement() -> None:
    models = [_model(i, float(i + 1), 100) for i in range(5)]
    loads = _loads(models, place_models(models, _devices(2), 0.0, KvprMode.LOOKAHEAD))
    assert mean_pressure(models, _devices(2)) <= max(r / s for r, s in loads.values())
