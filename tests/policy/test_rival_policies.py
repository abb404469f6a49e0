"""The rivals' pure parts: fixed maps and the choice of a seat."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.specs import DeviceKind, DeviceSpec, ModelShape, ModelSpec
from prism.policy.fixed_map import FixedPlace, muxserve_map, planned_loads, static_map
from prism.policy.mux_estimate import PlannedLoad, margin, throughputs
from prism.policy.mux_placement import mesh_groups
from prism.policy.virtual_queue import QueueSeat, choose_seat

SHAPE = ModelShape(1, 8, 1, 1, 1, 8, 8, 1)  # two bytes of KV per token
KV_TOKENS = 10


def _spec(i: int, weight: int, tp: int = 1) -> ModelSpec:
    return ModelSpec(ModelName(f"m{i}"), "p", 1.0, 0.1, weight, SHAPE, 100, tp)


def _devices(count: int) -> list[DeviceSpec]:
    return [DeviceSpec(DeviceId(f"n/host:{i}"), NodeId("n"), DeviceKind.HOST, 1000) for i in range(count)]


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 2)), max_size=10), st.integers(1, 3))
def test_maps_fit_with_a_least_kv_share_for_everyone(sizes: list[tuple[int, int]], count: int) -> None:
    models = [_spec(i, weight, tp) for i, (weight, tp) in enumerate(sizes)]
    devices = _devices(count)
    loads = planned_loads(models, {}, {}, {})
    for places in (static_map(models, devices, loads, KV_TOKENS), muxserve_map(models, devices, loads, KV_TOKENS)):
        used: dict[DeviceId, int] = {}
        for model in models:
            place = places.get(model.name, FixedPlace((), None))
            assert len(set(place.devices)) in (0, model.tp)
            least = -(-2 * KV_TOKENS // model.tp)
            share = least if place.kv_cap_bytes is None else place.kv_cap_bytes
            assert not place.devices or share >= least
            for d in place.devices:
                used[d] = used.get(d, 0) + model.shard_weight_bytes + share
        assert all(total <= 1000 for total in used.values())


def test_static_shares_are_equal_on_a_device() -> None:
    models = [_spec(0, 400), _spec(1, 200)]
    places = static_map(models, _devices(1), planned_loads(models, {}, {}, {}), KV_TOKENS)
    assert {p.kv_cap_bytes for p in places.values()} == {200}


def test_muxserve_balances_demand() -> None:
    models = [_spec(0, 100), _spec(1, 100), _spec(2, 100)]
    assert _together(models, {"m0": 9.0, "m1": 1.0, "m2": 1.0}) == [{"m0"}, {"m1", "m2"}]


def test_a_model_that_nobody_asks_for_counts_as_nothing() -> None:
    """Two are asked one request in ten seconds each; a third, in the catalog only, does not bring them together."""
    models = [_spec(0, 100), _spec(1, 100), _spec(2, 100)]
    assert not any({"m0", "m1"} <= group for group in _together(models, {"m0": 0.1, "m1": 0.1}))


def test_where_nothing_is_known_all_count_alike() -> None:
    models = [_spec(i, 100) for i in range(4)]
    assert sorted(map(len, _together(models, {}))) == [2, 2]


def test_kv_memory_is_balanced_beside_work() -> None:
    """Four models of one size and rate, two with requests that hold a hundred times more: each on a device of its own,
    in whatever order they are named (rate times weights alone put the first and the third together)."""
    models = [_spec(i, 100) for i in range(4)]
    rates, long = dict.fromkeys(("m0", "m1", "m2", "m3"), 1.0), {"m0": 200.0, "m2": 200.0, "m1": 2.0, "m3": 2.0}
    outputs = dict.fromkeys(rates, 4.0)
    groups = _together(models, rates, long, outputs)
    assert all(len(group & {"m0", "m2"}) == 1 for group in groups), groups


def test_the_estimator_knows_what_memory_and_bandwidth_bear() -> None:
    (device,) = _devices(1)
    device = replace(device, memory_bytes=80 << 30)
    big = replace(_spec(0, 16 << 30), shape=ModelShape(32, 4096, 32, 8, 128, 14336, 128256))
    load = PlannedLoad(1.0, 1000.0, 200.0)
    alone, beside = margin(device, [(big, load)]), margin(device, [(big, load), (big, load)])
    assert 1.0 < beside < alone
    tight = margin(replace(device, memory_bytes=18 << 30), [(big, load)])
    assert tight < alone, "the batch is bounded by its KV memory"
    assert margin(replace(device, memory_bytes=16 << 30), [(big, load)]) == 0.0
    found = throughputs(device, [(big, replace(load, rate_per_s=1000.0))])
    assert 0.0 < found[0] < 1000.0


def test_wide_models_get_meshes_and_narrow_ones_may_share_them() -> None:
    models = [_spec(0, 800, tp=2), _spec(1, 800, tp=2), _spec(2, 100)]
    groups = list(mesh_groups(models, _devices(4)))
    assert {len(g[2]) for g in groups} == {1, 2}
    assert all(len(mesh) == 2 for g in groups for mesh in g[2])
    assert {len(g[1]) for g in groups} == {2, 4}


def _together(
    models: list[ModelSpec],
    rates: dict[str, float],
    prompts: dict[str, float] | None = None,
    outputs: dict[str, float] | None = None,
) -> list[set[str]]:
    """Which models share a device under ``muxserve`` on two."""
    loads = planned_loads(models, rates, prompts or {}, outputs or {})
    places = muxserve_map(models, _devices(2), loads, KV_TOKENS)
    groups: dict[tuple[DeviceId, ...], set[str]] = {}
    for name, place in places.items():
        groups.setdefault(place.devices, set()).add(str(name))
    return list(groups.values())


def _seat(i: int, *models: str, may_leave: bool = True, busy: bool = False, since_s: float = 0.0) -> QueueSeat:
    return QueueSeat((DeviceId(f"n/host:{i}"),), tuple(map(ModelName, models)), may_leave, busy, since_s)


def test_the_head_group_takes_what_is_free_first() -> None:
    empty, done = _seat(0), _seat(1, "a")
    older, busy = _seat(2, "b", since_s=-5.0), _seat(3, "c", busy=True, since_s=-50.0)
    unserved = _seat(4, "d", may_leave=False, since_s=-99.0)

    def choose(*seats: QueueSeat, deadline_s: float = 0.0) -> QueueSeat | None:
        return choose_seat(seats, deadline_s, swap_s=1.0, quantum_s=10.0, now_s=0.0)

    assert choose(busy, done, empty) == empty
    assert choose(busy, done, older, unserved) == older
    assert choose(busy, unserved) == busy
    assert choose(busy, deadline_s=5.0) is None, "it can wait for the group to end"
    assert choose(_seat(5, "e", busy=True, since_s=-1.0)) is None, "its quantum is not over"
