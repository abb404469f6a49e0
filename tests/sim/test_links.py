"""Fair shares against plain water-filling over all flows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.sim.links import SAME, Flow, Link, Network, evenly
from prism.sim.queue import EventQueue


def water_fill(flows: list[Flow], links: list[Link]) -> dict[Flow, float]:
    """Max-min fair rates: fill the tightest link, freeze its flows, go on."""
    rates: dict[Flow, float] = {}
    while len(rates) < len(flows):
        best: tuple[float, Link] | None = None
        for link in links:
            room = link.bytes_per_s - sum(rates[f] * s for f, s in link.flows.items() if f in rates)
            weight = sum(s for f, s in link.flows.items() if f not in rates)
            if weight > 0 and (best is None or room / weight < best[0]):
                best = (room / weight, link)
        assert best is not None
        for flow in best[1].flows:
            rates.setdefault(flow, best[0])
    return rates


@settings(max_examples=150, deadline=None)
@given(
    capacities=st.lists(st.floats(1.0, 100.0), min_size=1, max_size=8),
    picks=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True), min_size=1, max_size=10),
    removed=st.integers(0, 3),
)
def test_rates_are_max_min_fair(capacities: list[float], picks: list[list[int]], removed: int) -> None:
    network = Network(EventQueue())
    links = [Link(str(i), c) for i, c in enumerate(capacities)]
    flows = []
    for pick in picks:
        path = list(dict.fromkeys(links[i % len(links)] for i in pick))
        shares = {link: (1.0, 0.5, 0.125)[n % 3] for n, link in enumerate(path)}
        flows.append(network.start(shares, 1e9, lambda: None))
    for flow in flows[:removed]:
        network.cancel(flow)
    flows = flows[removed:]
    expected = water_fill(flows, links)
    for flow in flows:
        assert flow.rate == pytest.approx(expected[flow], rel=20 * SAME)
    for link in links:
        assert sum(f.rate * s for f, s in link.flows.items()) <= link.bytes_per_s * (1 + 20 * SAME)


def test_flow_takes_bytes_over_rate_and_neighbours_slow_it() -> None:
    queue = EventQueue()
    network, link, done = Network(queue), Link("l", 10.0), []
    network.start({link: 1.0}, 100.0, lambda: done.append(("a", queue.now_s)))
    queue.run_until(5.0)
    network.start({link: 1.0}, 25.0, lambda: done.append(("b", queue.now_s)))
    queue.run_until(100.0)
    assert done == [("b", pytest.approx(10.0)), ("a", pytest.approx(12.5))]


def test_directions_are_independent_and_a_split_flow_uses_parts() -> None:
    queue = EventQueue()
    network = Network(queue)
    up, down, helpers = Link("up", 10.0), Link("down", 10.0), [Link(str(i), 5.0) for i in range(4)]
    one = network.start({up: 1.0}, 1e6, lambda: None)
    other = network.start({down: 1.0}, 1e6, lambda: None)
    assert (one.rate, other.rate) == (10.0, 10.0)
    split = network.start(evenly([[helper] for helper in helpers]), 1e6, lambda: None)
    assert split.rate == pytest.approx(20.0)


def test_cancelled_flow_never_arrives() -> None:
    queue = EventQueue()
    network, link, done = Network(queue), Link("l", 10.0), []
    flow = network.start({link: 1.0}, 10.0, lambda: done.append(1))
    network.cancel(flow)
    queue.run_until(100.0)
    assert not done
    assert not link.flows
