"""The move or exchange that relieves a device most, against all that there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, ModelName
from prism.policy.goodput import SharingModel, Site
from prism.policy.relief import Neighbour, Relief, admitted_gain, best_in_turn, best_relief

KV_BYTES = 10.0
MEMORY_BYTES = 1000.0
Devices = dict[str, tuple[SharingModel, ...]]


tenants = st.builds(
    SharingModel,
    model=st.just(ModelName("")),
    rate_per_s=st.floats(0.1, 5.0),
    duty=st.floats(0.0, 1.0),
    share=st.floats(0.1, 0.9),
    bearable=st.floats(0.5, 3.0),
    kv_bytes=st.just(KV_BYTES),
    weight_bytes=st.sampled_from([100, 200, 400]),
)
few = st.lists(tenants, max_size=3)
rooms = st.sampled_from([0.0, 150.0, 250.0, 1000.0])


def named(device: str, found: list[SharingModel]) -> tuple[SharingModel, ...]:
    return tuple(
        SharingModel(ModelName(f"{device}-{i}"), t.rate_per_s, t.duty, t.share, t.bearable, t.kv_bytes, t.weight_bytes)
        for i, t in enumerate(found)
    )


def needs(tenant: SharingModel) -> int:
    return int(tenant.weight_bytes + KV_BYTES)


@dataclass(frozen=True)
class Fleet:
    """Devices full or empty as their models, and as much ``slack_bytes`` as is said, make them."""

    devices: Devices
    slack_bytes: float

    def room(self, device: str) -> float:
        return self.slack_bytes if self.devices[device] else MEMORY_BYTES

    def met(self, devices: Devices) -> float:
        return sum(Site(DeviceId(d), MEMORY_BYTES, models).met_per_s for d, models in devices.items())

    def after(self, goes: SharingModel, to: str, comes: SharingModel | None) -> Devices:
        then = dict(self.devices)
        then["here"] = tuple(t for t in then["here"] if t is not goes)
        then[to] = (*(t for t in then[to] if t is not comes), goes)
        if comes is not None:
            then["here"] = (*then["here"], comes)
        return then

    def steps(self) -> Iterator[tuple[str, float, float]]:
        """Kind, gain and what is asked meanwhile of the one that is away, of every step that there is room for."""
        for goes in self.devices["here"]:
            for to in [d for d in self.devices if d != "here"]:
                if self.room(to) >= needs(goes):
                    yield "move", self.met(self.after(goes, to, None)) - self.met(self.devices), 0.0
                for comes in self.devices[to]:
                    gain = self.met(self.after(goes, to, comes)) - self.met(self.devices)
                    if self.room(to) >= needs(goes) and self.room("here") >= needs(comes):
                        yield "exchange", gain, 0.0
                    there, here = self.room(to) + needs(comes), self.room("here") + needs(goes)
                    if there >= needs(goes) and here >= needs(comes):
                        yield "in turn", gain, min(goes.rate_per_s, comes.rate_per_s)

    def best(self, price: float) -> Relief | None:
        return best_relief(*self._sides(), self._needs(), price)

    def best_in_turn(self, price: float, away_share: float) -> Relief | None:
        room_without = {t.model: self.room(d) + needs(t) for d, models in self.devices.items() for t in models}
        return best_in_turn(*self._sides(), self._needs(), room_without, price, away_share)

    def _needs(self) -> dict[ModelName, int]:
        return {t.model: needs(t) for models in self.devices.values() for t in models}

    def _sides(self) -> tuple[Neighbour, list[Neighbour]]:
        sides = {
            d: Neighbour(Site(DeviceId(d), MEMORY_BYTES, models), self.room(d), models)
            for d, models in self.devices.items()
        }
        return sides["here"], [sides[d] for d in self.devices if d != "here"]


def fleet_of(here: list[SharingModel], there: list[list[SharingModel]], slack_bytes: float = 1000.0) -> Fleet:
    devices = {"here": named("here", here), **{f"d{k}": named(f"d{k}", found) for k, found in enumerate(there)}}
    return Fleet(devices, slack_bytes)


def best_of(fleet: Fleet, away_share: float) -> dict[str, float]:
    best = {"move": 0.0, "exchange": 0.0, "in turn": 0.0}
    for kind, gain, asked in fleet.steps():
        best[kind] = max(best[kind], gain - away_share * asked)
    return best


@given(few, st.lists(few, min_size=1, max_size=3), rooms, st.sampled_from([0.0, 0.1, 0.5]))
def test_it_is_the_best_of_all_moves_else_of_all_exchanges(
    here: list[SharingModel], there: list[list[SharingModel]], slack_bytes: float, price: float
) -> None:
    """By trying every single one and adding up what all devices meet anew."""
    fleet = fleet_of(here, there, slack_bytes)
    found, best = fleet.best(price), best_of(fleet, 0.0)
    if found is None:
        assert best["move"] <= price + 1e-6
        assert best["exchange"] <= 2.0 * price + 1e-6
    elif found.comes is None:
        assert found.gain == pytest.approx(best["move"], abs=1e-6)
        assert found.gain > price
    else:
        assert best["move"] <= price + 1e-6
        assert found.gain == pytest.approx(best["exchange"], abs=1e-6)
        assert found.gain > 2.0 * price


@given(few, st.lists(few, min_size=1, max_size=3), rooms, st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.05]))
def test_in_turn_it_is_the_best_of_all_that_fit_once_one_has_left_less_what_that_one_is_asked(
    here: list[SharingModel], there: list[list[SharingModel]], slack_bytes: float, price: float, away_share: float
) -> None:
    fleet = fleet_of(here, there, slack_bytes)
    found, best = fleet.best_in_turn(price, away_share), best_of(fleet, away_share)["in turn"]
    if found is None:
        assert best <= 2.0 * price + 1e-6
        return
    asked = {t.model: t.rate_per_s for models in fleet.devices.values() for t in models}
    assert found.away is not None
    assert found.comes is not None
    assert asked[found.away] == min(asked[found.goes], asked[found.comes])
    assert found.gain - away_share * asked[found.away] == pytest.approx(best, abs=1e-6)
    assert best > 2.0 * price - 1e-6


def busy(duty: float = 1.0, weight_bytes: int = 400, rate_per_s: float = 1.0) -> SharingModel:
    return SharingModel(ModelName(""), rate_per_s, duty, 0.7, 1.5, KV_BYTES, weight_bytes)


def test_what_does_not_fit_does_not_move() -> None:
    fleet = fleet_of([busy(), busy(), busy()], [[]])
    side = Neighbour(Site(DeviceId("d0"), MEMORY_BYTES, ()), 50.0, ())
    here = Neighbour(Site(DeviceId("here"), MEMORY_BYTES, fleet.devices["here"]), 0.0, fleet.devices["here"])
    assert best_relief(here, [side], {t.model: needs(t) for t in fleet.devices["here"]}, 0.0) is None


def test_two_change_places_on_full_devices_and_the_one_that_is_asked_less_is_away() -> None:
    fleet = fleet_of([busy(), busy()], [[busy(0.01), busy(0.01, rate_per_s=0.1)]], slack_bytes=0.0)
    assert fleet.best(0.1) is None
    found = fleet.best_in_turn(0.1, 0.05)
    assert found is not None
    assert found.away == found.comes == fleet.devices["d0"][1].model


def test_nobody_leaves_first_for_less_than_is_asked_of_it_meanwhile() -> None:
    idle = busy(0.01, rate_per_s=0.1)
    fleet = fleet_of([busy(), busy()], [[idle, idle]], slack_bytes=0.0)
    assert fleet.best_in_turn(0.1, 0.05) is not None
    assert fleet.best_in_turn(0.1, 5.0) is None


def test_what_is_larger_than_the_place_that_it_would_take_stays() -> None:
    fleet = fleet_of([busy(), busy()], [[busy(0.01, 200), busy(0.01, 200)]], slack_bytes=0.0)
    assert fleet.best_in_turn(0.0, 0.0) is None


def site(id: str, *models: SharingModel) -> Site:
    return Site(DeviceId(id), MEMORY_BYTES, named(id, list(models)))


def one(device: str, number: int) -> ModelName:
    return ModelName(f"{device}-{number}")


def test_who_is_held_back_gains_all_it_is_asked_where_there_is_bandwidth() -> None:
    wide = SharingModel(ModelName(""), 1.0, 0.98, 0.9, 1.2, KV_BYTES, 100)
    here, empty = site("here", wide, wide), site("d0")
    gain = admitted_gain(here, empty, Relief(one("here", 0), DeviceId("d0"), 0.0))
    assert gain == pytest.approx(1.0, rel=0.15)


def test_nothing_is_gained_where_it_would_be_held_back_as_well() -> None:
    """Two at once have the bandwidth; by who decodes on average it pays to make one device worse for the other."""
    here, there = site("here", *[busy(0.9, 100)] * 3), site("d0", *[busy(0.9, 100)] * 3)
    relief = Relief(one("here", 0), DeviceId("d0"), 0.0)
    assert here.minus(relief.goes).met_per_s - here.met_per_s > 0.5
    assert admitted_gain(here, there, relief) < 0.1


@given(few.filter(bool), few.filter(bool))
def test_an_exchange_gains_what_both_devices_let_in_then(here: list[SharingModel], there: list[SharingModel]) -> None:
    a, b = site("here", *here), site("d0", *there)
    goes, comes = a.tenants[0], b.tenants[-1]
    then = (
        Site(a.id, MEMORY_BYTES, (*a.tenants[1:], comes)).admitted_per_s
        + Site(b.id, MEMORY_BYTES, (*b.tenants[:-1], goes)).admitted_per_s
    )
    relief = Relief(goes.model, b.id, 0.0, comes.model)
    assert admitted_gain(a, b, relief) == pytest.approx(then - a.admitted_per_s - b.admitted_per_s, abs=1e-6)
