"""Who is turned away: nobody where there is room, never more than need be, and near the best choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import ModelName
from prism.policy.triage import Applicant, FleetRoom, turned_away

AMOUNTS = st.floats(0.01, 10.0)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Applicant], FleetRoom]:
    count = draw(st.integers(0, 8))
    asked = [
        Applicant(ModelName(f"m{i}"), draw(AMOUNTS), draw(AMOUNTS), draw(AMOUNTS), draw(st.booleans()))
        for i in range(count)
    ]
    return asked, FleetRoom(draw(AMOUNTS) * 3, draw(AMOUNTS) * 3)


def kept(asked: list[Applicant], room: FleetRoom) -> list[Applicant]:
    away = turned_away(asked, room)
    assert away <= {one.model for one in asked}
    return [one for one in asked if one.model not in away]


def fits(some: list[Applicant], room: FleetRoom) -> bool:
    devices, memory = sum(a.devices for a in some), sum(a.memory_bytes for a in some)
    return devices <= room.devices * (1 + 1e-9) and memory <= room.memory_bytes * (1 + 1e-9)


@given(fleets())
def test_those_that_are_served_fit_and_nobody_else_would_beside_them(fleet: tuple[list[Applicant], FleetRoom]) -> None:
    asked, room = fleet
    served = kept(asked, room)
    assert fits(served, room)
    if fits(asked, FleetRoom(room.devices * (1 - 1e-9), room.memory_bytes * (1 - 1e-9))):
        assert served == asked
    for one in asked:
        if one not in served:
            assert not fits([*served, one], FleetRoom(room.devices * (1 - 1e-6), room.memory_bytes * (1 - 1e-6)))


@given(fleets(), st.booleans())
def test_where_one_use_is_overbooked_it_is_within_one_model_of_the_best_choice(
    fleet: tuple[list[Applicant], FleetRoom], by_time: bool
) -> None:
    asked, room = fleet
    asked = [replace(a, served=True, **{"memory_bytes" if by_time else "devices": 0.0}) for a in asked]
    value = sum(a.met_per_s for a in kept(asked, room))
    choices = [list(some) for n in range(len(asked) + 1) for some in combinations(asked, n)]
    best = max(sum(a.met_per_s for a in some) for some in choices if fits(some, room))
    assert value >= best - max((a.met_per_s for a in asked), default=0.0) - 1e-6


def test_a_model_that_takes_much_of_a_device_for_few_requests_goes_first() -> None:
    small = Applicant(ModelName("small"), 20.0, 0.8, 30.0, True)
    large = Applicant(ModelName("large"), 0.5, 2.5, 150.0, True)
    assert turned_away([small, large], FleetRoom(3.0, 160.0)) == {"large"}
    assert turned_away([small, large], FleetRoom(4.0, 200.0)) == frozenset()


def test_where_memory_holds_all_nobody_is_turned_away_for_time_unless_asked_for() -> None:
    asked = [Applicant(ModelName(name), 1.0, 2.0, 10.0, True) for name in ("a", "b")]
    assert turned_away(asked, FleetRoom(3.0, 20.0), by_time=False) == frozenset()
    assert turned_away(asked, FleetRoom(3.0, 20.0)) == {"b"}
    assert turned_away(asked, FleetRoom(3.0, 15.0), by_time=False) == {"b"}


def test_who_is_served_stays_for_a_small_gain() -> None:
    old = Applicant(ModelName("old"), 10.0, 1.0, 0.0, True)
    new = Applicant(ModelName("new"), 12.0, 1.0, 0.0, False)
    assert turned_away([old, new], FleetRoom(1.0, 1.0)) == {"new"}
    assert turned_away([old, replace(new, met_per_s=16.0)], FleetRoom(1.0, 1.0)) == {"old"}


def test_a_fleet_without_devices_serves_nobody() -> None:
    asked = [Applicant(ModelName("a"), 1.0, 1.0, 1.0, True)]
    assert turned_away(asked, FleetRoom(0.0, 0.0)) == {"a"}
