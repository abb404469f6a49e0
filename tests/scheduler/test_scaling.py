"""The scaling rule: a view in, a decision out that names how many instances come or go, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.scheduler import scaling
from prism.scheduler.scaling import Place, ScalingDecision, ScalingView, decide_scaling


def key(generation: int) -> InstanceKey:
    return InstanceKey(ModelName("m"), Generation(generation))


def places(*kvprs: float, pressed: bool = False) -> list[Place]:
    return [Place((DeviceId(f"n/host:{i}"),), kvpr, pressed) for i, kvpr in enumerate(kvprs)]


CROWDED = ScalingView(wanted=4, active=((key(1), 9),), settled=True, may_grow=True, kvpr=0.5)
NOTHING = ScalingDecision()


def test_a_crowded_model_gets_the_best_place() -> None:
    assert decide_scaling(CROWDED, iter(places(0.1, 0.2))) == ScalingDecision(add=tuple(places(0.1)))


@pytest.mark.parametrize(
    ("view", "offered"),
    [
        (replace(CROWDED, settled=False), places(0.1)),
        (replace(CROWDED, may_grow=False), places(0.1)),
        (CROWDED, places(0.5)),
        (CROWDED, places(0.1, pressed=True)),
        (CROWDED, []),
        (replace(CROWDED, wanted=1), places(0.1)),
    ],
    ids=["on its way", "may not grow", "no better place", "place is short itself", "no place", "enough"],
)
def test_nothing_is_done(view: ScalingView, offered: list[Place]) -> None:
    assert decide_scaling(view, iter(offered)) == NOTHING


def test_the_least_loaded_leaves_of_equal_ones_the_youngest() -> None:
    view = replace(CROWDED, wanted=3, active=((key(1), 2), (key(2), 0), (key(3), 0), (key(4), 5)))
    assert decide_scaling(view, iter(())) == ScalingDecision(remove=(key(3),))


@given(
    wanted=st.integers(1, 8),
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    offered=st.lists(st.floats(0.0, 1.0), max_size=8),
    at_once=st.integers(1, 4),
)
def test_several_at_once_are_a_matter_of_one_number(
    wanted: int, loads: list[int], offered: list[float], at_once: int
) -> None:
    """As many as are wanted and there are good places for, each on another place; never the last one leaves."""
    view = replace(CROWDED, wanted=wanted, active=tuple((key(i), load) for i, load in enumerate(loads)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "AT_ONCE", at_once)
        decision = decide_scaling(view, iter(places(*offered)))
    assert not (decision.add and decision.remove)
    assert len(decision.add) <= min(at_once, max(0, wanted - len(loads)))
    assert len(set(decision.add)) == len(decision.add) and all(p.kvpr < view.kvpr for p in decision.add)
    assert len(decision.remove) == min(at_once, max(0, len(loads) - wanted)) < len(loads)


def test_a_place_is_looked_for_only_when_it_is_needed() -> None:
    def search() -> Iterator[Place]:
        raise AssertionError("looking at all devices costs time")
        yield places(0.1)[0]

    assert decide_scaling(replace(CROWDED, settled=False), search()) == NOTHING
    assert decide_scaling(replace(CROWDED, wanted=1), search()) == NOTHING
