"""The rivals' pure parts: fixed maps and the choice of a seat."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.specs import DeviceKind, DeviceSpec, ModelShape, ModelSpec
from prism.policy.fixed_map import FixedPlace, muxserve_map, static_map
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
    for places in (static_map(models, devices, KV_TOKENS), muxserve_map(models, devices, {}, KV_TOKENS)):
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
    places = static_map([_spec(0, 400), _spec(1, 200)], _devices(1), KV_TOKENS)
    assert {p.kv_cap_bytes for p in places.values()} == {200}


def test_muxserve_balances_demand() -> None:
    models = [_spec(0, 100), _spec(1, 100), _spec(2, 100)]
    rates = {ModelName("m0"): 9.0, ModelName("m1"): 1.0, ModelName("m2"): 1.0}
    places = muxserve_map(models, _devices(2), rates, KV_TOKENS)
    assert places[ModelName("m0")].devices != places[ModelName("m1")].devices
    assert places[ModelName("m1")].devices == places[ModelName("m2")].devices


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
