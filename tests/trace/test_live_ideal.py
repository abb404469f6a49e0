"""The bound that live bursts are held against."""

from __future__ import annotations

from functools import partial
from math import e

import pytest

from benchmarks.live.ideal import MULTICAST_S, RECEIVERS, begun_s, sending, serving, stopping, work_s


def test_one_engine_takes_its_own_work_and_two_take_half() -> None:
    assert begun_s(lambda at_s: 1.0, 1.0) == pytest.approx(work_s(), abs=0.01)
    assert begun_s(lambda at_s: 2.0, 0.5) == pytest.approx(work_s() / 4, abs=0.01)


def test_nothing_is_served_before_receivers_have_all_layers_between_them() -> None:
    assert sending(4, 0.0) == 0.0 and sending(4, MULTICAST_S) == RECEIVERS
    assert begun_s(lambda at_s: sending(4, at_s), 0.9) < begun_s(lambda at_s: sending(2, at_s), 0.9) < MULTICAST_S


@pytest.mark.parametrize("sources", [1, 2])
def test_sources_run_what_is_missing(sources: int) -> None:
    assert serving(sources, 0.0) == sources
    assert serving(sources, MULTICAST_S / 2) == pytest.approx(2 * sources)
    assert serving(sources, MULTICAST_S) == sources + RECEIVERS


def test_load_then_serve_has_the_sources_until_the_end() -> None:
    assert stopping(serving, 2, 0.9 * MULTICAST_S) == 2 and stopping(serving, 2, MULTICAST_S) == 2 + RECEIVERS
    assert stopping(sending, 2, 0.9 * MULTICAST_S) == 0 and stopping(sending, 2, MULTICAST_S) == RECEIVERS


@pytest.mark.parametrize("requests", [25, 40, 50, 55, 60, 100])
def test_no_burst_gains_more_from_sources_that_serve(requests: int) -> None:
    late, early = (begun_s(partial(way, 1), 0.9, requests) for way in (partial(stopping, serving), serving))
    assert 1 < late / early < 1 / (1 - 1 / e)
