"""Units of a long prompt over several places: each place by its rate, and nobody waits for a slow one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from prism.policy.long_places import AHEAD, bytes_per_s, deal_round, place_of, places_for

RATES = st.lists(st.floats(1e6, 1e12), min_size=1, max_size=6)


def brought_s(rates: list[float], units: int) -> float:
    """Until the last of ``units`` of one byte is read, with :data:`AHEAD` on their way at once, in order."""
    dealt = deal_round(rates)
    free_s = [0.0] * len(rates)
    read_s = [0.0] * AHEAD
    """When the units before were read: the oldest first."""
    for unit in range(units):
        place = place_of(0, unit, dealt)
        begins_s = max(read_s[-AHEAD], free_s[place])
        free_s[place] = begins_s + 1.0 / rates[place]
        read_s.append(max(read_s[-1], free_s[place]))
    return read_s[-1]


def test_two_alike_take_turns_and_one_three_times_as_fast_has_three_of_four() -> None:
    assert deal_round([5.0, 5.0])[:4] == (0, 1, 0, 1)
    assert deal_round([1.0, 3.0])[:8] == (1, 1, 1, 0, 1, 1, 1, 0)
    assert bytes_per_s([1.0, 3.0]) == 4.0
    assert bytes_per_s([5.0, 5.0]) == 10.0


def test_who_is_too_slow_or_one_too_many_has_none() -> None:
    assert places_for([10.0, 3.0, 4.0]) == (0, 2)
    assert places_for([1.0] * 5) == (0, 1, 2)
    assert places_for([]) == deal_round([]) == ()
    assert bytes_per_s([]) == 0.0


def test_where_a_rate_is_not_known_the_first_place_has_all() -> None:
    assert deal_round([0.0, 5.0]) == deal_round([5.0, 0.0]) == (0,)
    assert bytes_per_s([5.0, 0.0]) == 0.0


@given(rates=RATES)
def test_places_are_dealt_by_their_rates(rates: list[float]) -> None:
    dealt, used = deal_round(rates), places_for(rates)
    counts = Counter(dealt)
    assert set(counts) <= set(used)
    total = sum(rates[place] for place in used)
    for place in used:
        assert abs(counts[place] - len(dealt) * rates[place] / total) <= 1.0 or len(dealt) == 1
    assert bytes_per_s(rates) >= max(rates) * (1 - 1e-9), "never slower than the fastest alone"


@given(rates=RATES)
def test_reading_in_order_nears_the_sum_of_the_rates(rates: list[float]) -> None:
    units = 240
    used = [rates[place] for place in places_for(rates)]
    assert units / brought_s(rates, units) >= 0.85 * sum(used)
    assert units / brought_s(rates, units) >= 0.98 * max(used)


@given(rates=RATES, layers=st.integers(1, 80))
def test_layers_of_one_piece_each_are_dealt_as_well(rates: list[float], layers: int) -> None:
    dealt = deal_round(rates)
    places = [place_of(layer, 0, dealt) for layer in range(layers * len(dealt))]
    assert Counter(places) == Counter({place: layers * n for place, n in Counter(dealt).items()})
    assert all(place_of(a, 1, dealt) == place_of(b, 0, dealt) for a, b in pairwise(range(layers)))
