"""Do eight threads, or eight processes, on one device collapse?

    python -m benchmarks.memory.contention

Operations/s of one thread against eight threads on one pool, eight threads with a pool each, and eight processes.
An operation is alloc+free of 16 slots; every tenth is one of

    books   and a reservation of a page with the account, given back again
    page    in a block of its own, whose page is unmapped and mapped again
    memory  in a block of its own, whose page goes back to the account and the kernel, and is taken anew (and zeroed)

    batch   256 slots in every call, so that the library is measured more than Python's loop
    python  nothing of ours: calls of a built-in function, which show what taking turns costs by itself

Goal: at least that of one. Python's threads take turns, so `books` can have no more than `python` has; memory
is worked on beside each other. (`memory` on one pool is left out: there a page goes from one thread to the next.)
All of it is repeated in rounds; each ratio is the median over rounds of neighbouring runs. The CPU time of an operation
tells on a busy machine, too, whether threads collapse. Where other programs run, `chrt -r 1` before the command gives
it the cores while it lasts.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

from benchmarks.memory.bench import GIB, MIB, SMALL, report
from prism import memory

SECONDS = 0.2
ROUNDS = 7
WORKERS = 8
MIXES = ("python", "books", "batch", "page", "memory")
Place = tuple[memory.Owner, memory.Pool]


def make_pool(device: memory.Device, name: str, mix: str) -> Place:
    """512 slots a page; room for every worker's block."""
    owner = device.register(name)
    pool = owner.arena(GIB).divide(SMALL, 100_000, None if mix == "memory" else 4 * WORKERS * MIB)
    if mix == "page":
        pool.set_ahead(0, 0)
    return owner, pool


def work(place: Place, mix: str, end_s: float) -> int:
    """Operations until ``end_s``."""
    owner, pool = place
    done = 0
    if mix == "python":
        while time.perf_counter() < end_s:
            for _ in range(20):
                abs(abs(-1))
            done += 10
        return done
    while mix == "batch" and time.perf_counter() < end_s:
        for _ in range(10):
            pool.free(pool.alloc(256))
        done += 10
    while time.perf_counter() < end_s:
        for _ in range(9):
            pool.free(pool.alloc(16))
        pool.free(pool.alloc(16, fresh=mix != "books"))
        if mix == "books":
            owner.reserve(2 * MIB, "staging")
            owner.release(2 * MIB, "staging")
        done += 10
    return done


def threads(device: memory.Device, mix: str, count: int, shared: bool) -> tuple[float, float]:
    """Operations/s of ``count`` threads of this process, and CPU seconds of one operation."""
    places = [make_pool(device, str(i), mix) for i in range(1 if shared else count)]
    done, end_s = [0] * count, [0.0]

    def start() -> None:
        end_s[0] = time.perf_counter() + SECONDS

    begin = threading.Barrier(count, start)

    def run(i: int) -> None:
        begin.wait()
        done[i] = work(places[i % len(places)], mix, end_s[0])

    running = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    cpu_s = time.process_time()
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    cpu_s = time.process_time() - cpu_s
    for owner, _ in places:
        owner.close()
    return sum(done) / SECONDS, cpu_s / sum(done)


def process(
    directory: str, mix: str, number: int, begin: Barrier, end_s: Synchronized[float], results: Queue[int]
) -> None:
    place = make_pool(memory.open_device("host:0", account_dir=directory), str(number), mix)
    begin.wait()
    with end_s:  # one end for all: a process that gets a core late has less time, not more
        end_s.value = end_s.value or time.perf_counter() + SECONDS
        end = end_s.value
    results.put(work(place, mix, end))
    place[0].close()


def processes(directory: str, mix: str, count: int) -> float:
    """Operations/s of ``count`` forked processes."""
    context = multiprocessing.get_context("fork")
    results: Queue[int] = context.Queue()
    begin, end_s = context.Barrier(count), context.Value("d", 0.0)
    running = [context.Process(target=process, args=(directory, mix, i, begin, end_s, results)) for i in range(count)]
    for p in running:
        p.start()
    total = sum(results.get(timeout=60) for _ in running)
    for p in running:
        p.join()
    return total / SECONDS


def one_round(device: memory.Device, directory: str, mix: str) -> dict[str, float]:
    """Operations/s of one thread, and ratios. Each ratio is to what one did right before and right after."""
    rate, cpu_s = threads(device, mix, 1, True)
    own, own_cpu_s = threads(device, mix, WORKERS, False)
    shared = 0.0 if mix == "memory" else threads(device, mix, WORKERS, True)[0]
    after, after_cpu_s = threads(device, mix, 1, True)
    one, one_cpu_s = (rate + after) / 2, (cpu_s + after_cpu_s) / 2
    alone = processes(directory, mix, 1)
    eight = processes(directory, mix, WORKERS)
    alone = (alone + processes(directory, mix, 1)) / 2
    return {
        "one thread": one,
        "8 threads on one pool": shared / one,
        "8 threads with a pool each": own / one,
        "CPU time of an operation in these": own_cpu_s / one_cpu_s,
        "8 processes": eight / alone,
    }


def show(mix: str, what: str, found: list[float]) -> None:
    """The median over rounds, and how far rounds were apart."""
    median, spread = statistics.median(found), f"{min(found):.2f}-{max(found):.2f}"
    if what == "one thread":
        report(f"{mix}: {what}", median / 1e3, "kops/s")
    elif median > 0:
        report(f"{mix}: {what}", median, "x one", spread + ("" if "CPU" in what else "; goal >= 1"))


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        device = memory.open_device("host:0", 4 * GIB, account_dir=Path(directory))
        found: dict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(ROUNDS):
            for mix in MIXES:
                for what, value in one_round(device, directory, mix).items():
                    found[mix, what].append(value)
        for (mix, what), values in found.items():
            show(mix, what, values)


if __name__ == "__main__":
    main()
