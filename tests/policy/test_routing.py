"""Routing: requests go where the fewest are, as far as the sender can know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.core.ids import DeviceId
from prism.policy.routing import QueueLoads, least_loaded

DEVICES = [DeviceId(f"n/host:{i}") for i in range(4)]
measurements = st.lists(st.integers(0, 50), min_size=1, max_size=4)


def known(counts: list[int]) -> tuple[QueueLoads, list[DeviceId]]:
    loads = QueueLoads()
    for device, count in zip(DEVICES, counts, strict=False):
        loads.measured(device, count)
    return loads, DEVICES[: len(counts)]


@given(measurements, st.integers(0, 100))
def test_a_batch_fills_the_shortest_queues_first(counts: list[int], requests: int) -> None:
    """As water does: no queue that took a request is more than one longer than any other."""
    loads, devices = known(counts)
    for _ in range(requests):
        loads.assign_request(devices)
    after = [loads.load_of(d) for d in devices]
    assert sum(after) == loads.total == sum(counts) + requests
    for before, now in zip(counts, after, strict=True):
        assert now == before or now <= min(after) + 1


@given(measurements, st.lists(st.integers(0, 3), max_size=20), st.integers(0, 9))
def test_a_measurement_replaces_what_was_sent_before_it(counts: list[int], sent: list[int], now: int) -> None:
    loads, devices = known(counts)
    for index in sent:
        loads.assign_request([devices[index % len(devices)]])
    loads.measured(devices[0], now)
    assert loads.load_of(devices[0]) == now
    others = sum(index % len(devices) != 0 for index in sent)
    assert loads.total == now + sum(counts[1:]) + others


@given(st.lists(st.integers(0, 5), min_size=1))
def test_the_first_of_the_least_loaded_is_taken(loads: list[int]) -> None:
    assert least_loaded(range(len(loads)), loads.__getitem__) == loads.index(min(loads))


def test_empty_means_nothing_measured_and_nothing_sent() -> None:
    loads = QueueLoads()
    assert loads.all_empty
    loads.assign_request(DEVICES)
    assert not loads.all_empty
    loads.measured(DEVICES[0], 0)
    assert loads.all_empty
    loads.assign_request(DEVICES)
    loads.measured_all({DEVICES[1]: 0})
    assert loads.all_empty


def test_no_queue_is_no_answer() -> None:
    with pytest.raises(ValueError):
        QueueLoads().assign_request([])
