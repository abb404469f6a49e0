"""How long does Moore-Hodgson take over 10,000 requests, against the listing's scan, and what does a whole plan cost?

Target: 20 ms for 10,000 requests on one core. The listing is measured at 2,000 requests (it is quadratic).

Times are CPU times, so that other work on the machine does not count.

    python -m benchmarks.scheduler.admission_time

Last result (2 cores shared with other work, 24 GB, no GPU): 3.4 to 5.0 ms; 17x the listing at 2,000 requests; 2.8 us
per arrival.
"""

from __future__ import annotations

import random
import statistics
import time

from prism.core.device_events import EngineUp, MemoryReport, RequestArrived
from prism.core.ids import DeviceId, Generation, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.settings import GpuSettings
from prism.policy.admission import moore_hodgson
from prism.scheduler.gpu import GpuScheduler

REPEATS = 9


def jobs(count: int, spread_s: float, seed: int = 1) -> tuple[list[float], list[float]]:
    """Deadlines over ``spread_s`` seconds and prefills of up to 100 ms: on average ``count`` x 50 ms of work."""
    rng = random.Random(seed)
    return [rng.uniform(0.0, spread_s) for _ in range(count)], [rng.uniform(0.0, 0.1) for _ in range(count)]


def listing(deadlines_s: list[float], execs_s: list[float]) -> list[int]:
    """Algorithm 2 as printed: a scan for the longest request at every removal."""
    schedule: list[int] = []
    now_s = 0.0
    for i in sorted(range(len(deadlines_s)), key=deadlines_s.__getitem__):
        schedule.append(i)
        now_s += execs_s[i]
        if now_s > deadlines_s[i]:
            longest = max(schedule, key=execs_s.__getitem__)
            schedule.remove(longest)
            now_s -= execs_s[longest]
    return schedule


def median_ms(run: object) -> float:
    times = []
    for _ in range(REPEATS):
        start_s = time.process_time()
        run()  # type: ignore[operator]
        times.append((time.process_time() - start_s) * 1e3)
    return statistics.median(times)


def arrivals_us(count: int) -> float:
    """Microseconds per event while ``count`` requests arrive at one busy device."""
    scheduler = GpuScheduler(DeviceId("n/host:0"), GpuSettings())
    scheduler.on_event(EngineUp(InstanceKey(ModelName("m"), Generation(1)), 5000.0, 1000, 4), 0.0)
    scheduler.on_event(MemoryReport(10**9), 0.0)
    requests = [Request(RequestId(f"r{i}"), ModelName("m"), i * 1e-4, 100 + i % 50, 1.0, 60.0) for i in range(count)]
    start_s = time.process_time()
    for request in requests:
        scheduler.on_event(RequestArrived(request), request.arrival_s)
    return (time.process_time() - start_s) / count * 1e6


def main() -> None:
    for spread_s in (1000.0, 100.0, 1.0):
        deadlines, execs = jobs(10_000, spread_s)
        on_time = len(moore_hodgson(deadlines, execs, 0.0).on_time)
        ms = median_ms(lambda d=deadlines, e=execs: moore_hodgson(d, e, 0.0))
        print(f"10,000 requests, {on_time:6} on time  {ms:7.2f} ms  target 20 ms")
    small = jobs(2000, 20.0)
    heap_ms, scan_ms = median_ms(lambda: moore_hodgson(*small, 0.0)), median_ms(lambda: listing(*small))
    print(f" 2,000 requests: heap {heap_ms:.2f} ms, listing {scan_ms:.1f} ms, {scan_ms / heap_ms:.0f}x")
    print(f"10,000 requests arriving at one busy device: {arrivals_us(10_000):.1f} us each")


if __name__ == "__main__":
    main()
