"""The scaling rule: a view in, a decision out that names how many instances come or go, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.scheduler.scaling import Place, ScalingDecision, ScalingView, decide_scaling


def key(generation: int) -> InstanceKey:
    return InstanceKey(ModelName("m"), Generation(generation))


def places(*slowdowns: float, bearable: bool = True, pressed: bool = False) -> list[Place]:
    return [Place((DeviceId(f"n/host:{i}"),), s, bearable, pressed) for i, s in enumerate(slowdowns)]


CROWDED = ScalingView(wanted=4, active=((key(1), 9),), coming=0, leaving=0, may_grow=True, slowdown=1.5, hot=True)
NOTHING = ScalingDecision()


def test_a_crowded_model_gets_all_it_lacks_at_once() -> None:
    offered = places(1.0, 1.0, 1.2, 1.3)
    assert decide_scaling(CROWDED, iter(offered)) == ScalingDecision(add=tuple(offered[:3]))


@pytest.mark.parametrize(
    ("view", "offered"),
    [
        (replace(CROWDED, coming=3), places(1.0)),
        (replace(CROWDED, may_grow=False), places(1.0)),
        (CROWDED, places(1.5, bearable=False)),
        (CROWDED, places(1.0, pressed=True)),
        (CROWDED, []),
        (replace(CROWDED, wanted=1), places(1.0)),
    ],
    ids=["on its way", "may not grow", "others would be late", "place is short itself", "no place", "enough"],
)
def test_nothing_is_done(view: ScalingView, offered: list[Place]) -> None:
    assert decide_scaling(view, iter(offered)) == NOTHING


def test_a_place_where_others_are_late_will_do_if_it_is_less_crowded_than_here() -> None:
    """When requests wait, that is: slow tokens alone are no reason to make others' slow."""
    (place,) = places(1.4, bearable=False)
    assert decide_scaling(CROWDED, iter([place])).add == (place,)
    assert decide_scaling(replace(CROWDED, hot=False), iter([place])) == NOTHING


def test_a_place_where_neighbours_lose_more_than_is_gained_is_none_even_when_requests_wait() -> None:
    (place,) = places(1.0)
    assert decide_scaling(CROWDED, iter([replace(place, pays=False)])) == NOTHING


def test_a_place_that_is_no_good_does_not_stop_the_search() -> None:
    bad, good = places(1.0, pressed=True), places(1.1)
    assert decide_scaling(CROWDED, iter([*bad, *good])).add == tuple(good)


def test_those_on_their_way_count() -> None:
    offered = places(1.0, 1.0, 1.0)
    assert decide_scaling(replace(CROWDED, coming=2), iter(offered)).add == tuple(offered[:1])


@pytest.mark.parametrize("change", [{"coming": 1}, {"leaving": 1}])
def test_none_leaves_while_another_comes_or_leaves(change: dict[str, int]) -> None:
    view = replace(CROWDED, wanted=1, active=((key(1), 0), (key(2), 0)), **change)  # type: ignore[arg-type]
    assert decide_scaling(view, iter(())) == NOTHING


def test_the_least_loaded_leaves_of_equal_ones_the_youngest() -> None:
    view = replace(CROWDED, wanted=3, active=((key(1), 2), (key(2), 0), (key(3), 0), (key(4), 5)))
    assert decide_scaling(view, iter(())) == ScalingDecision(remove=(key(3),))


@given(
    wanted=st.integers(1, 8),
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    offered=st.lists(st.tuples(st.floats(1.0, 3.0), st.booleans(), st.booleans()), max_size=8),
)
def test_as_many_as_are_wanted_and_there_are_good_places_for(
    wanted: int, loads: list[int], offered: list[tuple[float, bool, bool]]
) -> None:
    """Each on another place, the first ones first; never the last one leaves."""
    view = replace(CROWDED, wanted=wanted, active=tuple((key(i), load) for i, load in enumerate(loads)))
    all_places = [Place((DeviceId(f"n/host:{i}"),), *one) for i, one in enumerate(offered)]
    decision = decide_scaling(view, iter(all_places))
    good = [p for p in all_places if not p.pressed and (p.bearable or p.slowdown < view.slowdown)]
    assert decision.add == tuple(good[: max(0, wanted - len(loads))])
    assert not (decision.add and decision.remove)
    assert len(decision.remove) == min(1, max(0, len(loads) - wanted)) < len(loads)


def test_a_place_is_looked_for_only_when_it_is_needed() -> None:
    def search() -> Iterator[Place]:
        raise AssertionError("looking at all devices costs time")
        yield places(1.0)[0]

    assert decide_scaling(replace(CROWDED, coming=3), search()) == NOTHING
    assert decide_scaling(replace(CROWDED, wanted=1), search()) == NOTHING
