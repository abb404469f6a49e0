"""How long each of the driver's calls takes, page by page."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.gpu.driver import Driver


@dataclass
class CallTimes:
    """Microseconds of each call, in the order of a page's life."""

    create: list[float] = field(default_factory=list)
    map: list[float] = field(default_factory=list)
    allow: list[float] = field(default_factory=list)
    unmap: list[float] = field(default_factory=list)
    release: list[float] = field(default_factory=list)

    def median_us(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in vars(self).items()}

    def p99_us(self, *calls: str) -> float:
        """Of a page's ``calls`` together."""
        sums = sorted(sum(each) for each in zip(*(getattr(self, call) for call in calls), strict=True))
        return float(sums[int(0.99 * (len(sums) - 1))])

    def to_map_us(self) -> float:
        """Until a new page can be touched: create, map, allow."""
        medians = self.median_us()
        return medians["create"] + medians["map"] + medians["allow"]

    def words(self) -> str:
        return " ".join(f"{name} {value:.1f}" for name, value in self.median_us().items()) + " us"


def time_pages(driver: Driver, page_bytes: int, pages: int, *, export: bool = False) -> CallTimes:
    """Make and unmake ``pages`` pages that stand at the same time, each with calls of its own."""
    times = CallTimes()
    start = driver.reserve(page_bytes * pages)
    at = [start + page_bytes * i for i in range(pages)]
    handles: list[int] = []
    for address in at:
        _timed(times.create, lambda: handles.append(driver.create(page_bytes, export=export)))
        _timed(times.map, lambda here=address: driver.map(here, page_bytes, handles[-1]))  # type: ignore[misc]
        _timed(times.allow, lambda here=address: driver.allow(here, page_bytes))  # type: ignore[misc]
    for address, handle in zip(at, handles, strict=True):
        _timed(times.unmap, lambda here=address: driver.unmap(here, page_bytes))  # type: ignore[misc]
        _timed(times.release, lambda it=handle: driver.release(it))  # type: ignore[misc]
    driver.free_address(start, page_bytes * pages)
    return times


def time_one_allow(driver: Driver, page_bytes: int, pages: int) -> float:
    """Microseconds a page when one access call covers all of them."""
    start = driver.reserve(page_bytes * pages)
    handles = [driver.create(page_bytes) for _ in range(pages)]
    for index, handle in enumerate(handles):
        driver.map(start + page_bytes * index, page_bytes, handle)
    spent: list[float] = []
    _timed(spent, lambda: driver.allow(start, page_bytes * pages))
    driver.unmap(start, page_bytes * pages)
    for handle in handles:
        driver.release(handle)
    driver.free_address(start, page_bytes * pages)
    return spent[0] / pages


def _timed(into: list[float], call: Callable[[], object]) -> None:
    start_s = time.perf_counter()
    call()
    into.append((time.perf_counter() - start_s) * 1e6)
