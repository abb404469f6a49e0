"""What receptions tell of links, the transfers that were broken off included."""

from __future__ import annotations

from pathlib import Path

from prism.transfer.link_rates import NOTED_BYTES, NOTED_S, LinkRate, LinkRates
from prism.transfer.reception import Reception
from prism.transfer.session import NodePlan
from prism.weights.exchange.pack_windows import window_name
from prism.weights.store.host_copy import open_copy
from prism.weights.store.weight_store import WeightStore
from tests.weights.conftest import KEY, contents_of, write_pack


def test_the_newest_rate_of_each_node_and_its_age() -> None:
    links = LinkRates()
    links.note_reception({"b": (10 * NOTED_BYTES, 2.0), "a": (NOTED_BYTES, 0.1)}, 5.0)
    links.note_reception({"b": (NOTED_BYTES, 1.0)}, 7.0)
    assert links.rates(8.0) == [LinkRate("a", NOTED_BYTES / 0.1, 3.0), LinkRate("b", NOTED_BYTES, 1.0)]


def test_little_that_came_slowly_says_something_and_little_that_came_at_once_does_not() -> None:
    links = LinkRates()
    links.note_reception({"a": (1000, NOTED_S / 2), "b": (1000, NOTED_S), "c": (0, 2 * NOTED_S), "d": (0, 0.0)}, 0.0)
    assert {rate.source: rate.bytes_s for rate in links.rates(0.0)} == {"b": 1000 / NOTED_S, "c": 1 / (2 * NOTED_S)}


def test_a_transfer_that_is_broken_off_for_its_slowness_is_measured(tmp_path: Path) -> None:
    store, there = (WeightStore(tmp_path / n, host_directory=tmp_path / f"{n}-memory") for n in ("here", "there"))
    write_pack(there, contents_of())
    header = there.header(KEY)
    assert header is not None
    copy = open_copy(store.make_host_copy(header), writable=True)
    assert copy is not None
    addresses = {"a": "", "b": ""}
    plan = NodePlan(session="s", window=window_name(KEY), node="b", addresses=addresses, sources=("a",), pieces=2)
    reception = Reception(plan, copy, lambda: None)
    reception.blame_source("a", 2000, 0.5)
    reception.blame_source("a")  # dead: no rate
    assert reception.progress.timed == {"a": (2000, 0.5)} and reception.progress.by_source == {}
    copy.close()
