"""Standing wishes: who feels them, who goes before whom, what is kept for them, and that they never block for ever."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism import memory
from prism.memory import errors

PAGE = 4096
PAGES = 64
LAYOUT = memory.KvLayout(layers=1, kv_heads=1, head_dim=64, dtype_bytes=2)  # 16 tokens a page
FORK = multiprocessing.get_context("fork")


def open_device(directory: Path, pages: int = PAGES) -> memory.Device:
    return memory.open_device("host:0", pages * PAGE, account_dir=directory, page_bytes=PAGE)


def test_a_wish_stands_and_is_felt_until_it_is_withdrawn(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    idle, hungry = device.register("idle"), device.register("hungry")
    idle.reserve(60 * PAGE, "kv")
    assert hungry.wish(10 * PAGE, 10 * PAGE) == hungry.wished_bytes == device.wanted_bytes() == 10 * PAGE
    assert idle.pressure() == 6 * PAGE and hungry.pressure() == 0
    assert {o.name: o.wanted_bytes for o in device.stats().owners} == {"idle": 0, "hungry": 10 * PAGE}
    idle.release(6 * PAGE, "kv")
    assert idle.pressure() == 0 and hungry.wished_bytes == 10 * PAGE
    hungry.reserve(2 * PAGE, "weights")
    assert idle.pressure() == 2 * PAGE
    hungry.release(2 * PAGE, "weights")
    hungry.reserve(8 * PAGE, "kv", yielding=True)
    assert hungry.wished_bytes == 2 * PAGE == device.wanted_bytes() and idle.pressure() == 0, "the rest is free"
    hungry.wish(0, 0)
    assert device.wanted_bytes() == 0


def test_what_was_given_back_is_kept_for_the_wish(tmp_path: Path) -> None:
    """New work of others cannot take it; what runs, waiters and the wisher can."""
    device = open_device(tmp_path)
    hungry, other = device.register("hungry"), device.register("other")
    other.reserve(30 * PAGE, "kv")
    hungry.wish(20 * PAGE, 30 * PAGE)
    with pytest.raises(errors.OutOfMemory):
        other.reserve(5 * PAGE, "kv", yielding=True)
    other.reserve(4 * PAGE, "kv", yielding=True)
    other.reserve(2 * PAGE, "kv")
    assert other.pressure() == 2 * PAGE
    hungry.reserve(28 * PAGE, "kv", yielding=True)


def test_who_holds_less_goes_first_then_the_older_wish(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    less, more = device.register("less"), device.register("more")
    less.reserve(5 * PAGE, "kv")
    more.reserve(40 * PAGE, "kv")
    more.reserve(5 * PAGE, "weights")
    for owner in (less, more):
        owner.wish(20 * PAGE, 20 * PAGE)
    assert less.pressure() == 0 and more.pressure() == 6 * PAGE
    less.reserve(10 * PAGE, "weights")
    assert less.pressure() == 0, "weights do not count"
    more.release(35 * PAGE, "kv")
    for first, second in ((less, more), (more, less)):
        first.wish(30 * PAGE, 40 * PAGE, since_ns=1)
        second.wish(30 * PAGE, 40 * PAGE, since_ns=2)
        assert first.pressure() == 0 and second.pressure() == 1 * PAGE
    for owner in (more, less):
        owner.wish(0, 0)
        owner.wish(30 * PAGE, 40 * PAGE)
    less.wish(30 * PAGE, 40 * PAGE), more.wish(30 * PAGE, 40 * PAGE)
    assert more.pressure() == 0 and less.pressure() == 1 * PAGE, "a wish that stands keeps its age"


def test_floors_and_limits_get_their_due(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    guaranteed, hungry = device.register("guaranteed", floor_bytes=20 * PAGE), device.register("hungry")
    guaranteed.reserve(24 * PAGE, "kv")
    assert hungry.wish(1, 60 * PAGE) == 44 * PAGE, "the floor cannot become free"
    assert guaranteed.pressure() == 4 * PAGE
    guaranteed.release(14 * PAGE, "kv")
    assert guaranteed.pressure() == 0
    guaranteed.reserve(10 * PAGE, "kv", yielding=True)  # within the floor, whatever others wish
    device.set_limit(hungry.id, 8 * PAGE)
    assert hungry.wish(1, 60 * PAGE) == 8 * PAGE
    assert hungry.wish(9 * PAGE, 60 * PAGE) == 0 == device.wanted_bytes()


def test_a_wish_that_nobody_can_meet_does_not_stand(tmp_path: Path) -> None:
    """Else it would hold up others for ever: weights stay, and of its KV each owner keeps a page."""
    device = open_device(tmp_path)
    large, hungry = device.register("large"), device.register("hungry")
    large.reserve(40 * PAGE, "weights")
    large.reserve(4 * PAGE, "kv")
    assert hungry.wish(24 * PAGE, 30 * PAGE) == 0 == large.pressure()
    assert hungry.wish(23 * PAGE, 30 * PAGE) == 23 * PAGE and large.pressure() == 3 * PAGE
    large.release(30 * PAGE, "weights")
    assert hungry.wish(24 * PAGE, 30 * PAGE) == 30 * PAGE


def test_staging_gives_way_to_wishes_and_takes_nothing_that_they_need(tmp_path: Path) -> None:
    """The window of a request that is larger than its device is asked for like any KV."""
    device = open_device(tmp_path)
    long, hungry = device.register("long"), device.register("hungry")
    window = long.window_region(40 * PAGE)
    window.commit()
    assert hungry.wish(30 * PAGE, 30 * PAGE) == 30 * PAGE and long.pressure() == 6 * PAGE
    assert long.owed_bytes == 30 * PAGE and hungry.owed_bytes == 0
    window.decommit()
    with pytest.raises(errors.OutOfMemory):
        window.commit()
    assert long.held("staging") == 0
    hungry.wish(0, 0)
    window.commit()
    assert long.held("staging") == 40 * PAGE


def test_bad_wishes_are_refused(device: memory.Device) -> None:
    owner = device.register("a")
    for least, most in ((-1, 0), (2, 1)):
        with pytest.raises(errors.BadRequest):
            owner.wish(least, most)
    owner.close()
    with pytest.raises(errors.ClosedHandle):
        owner.wish(1, 1)


def wish_and_die(directory: Path, inside_lock: bool) -> None:
    owner = open_device(directory).register("wisher")
    owner.wish(PAGE, 20 * PAGE)
    if inside_lock:
        owner._core.die_inside_lock(PAGE, True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("inside_lock", [False, True])
def test_a_wish_dies_with_its_owner(tmp_path: Path, inside_lock: bool) -> None:
    device = open_device(tmp_path)
    other = device.register("other")
    other.reserve(60 * PAGE, "kv")
    wisher = FORK.Process(target=wish_and_die, args=(tmp_path, inside_lock))
    wisher.start()
    wisher.join()
    assert wisher.exitcode == -signal.SIGKILL
    other.reserve(4 * PAGE, "kv", yielding=True)  # whoever is refused looks for the dead
    assert other.pressure() == 0 == device.wanted_bytes()
    assert not device.audit().problems and device.stats().reaped_owners == 1


def test_leaving_withdraws_a_wish(device: memory.Device) -> None:
    owner, other = device.register("a"), device.register("b")
    other.reserve(device.free_bytes(), "kv")
    owner.wish(1, 100)
    assert other.pressure() == 100
    owner.close()
    assert other.pressure() == 0 == device.wanted_bytes()


@dataclass
class Engine:
    """What an SGLang engine does with its lease, in pages: jobs that wait, one that runs, and a cache of what ran."""

    owner: memory.Owner
    jobs: list[int]
    running: int = 0
    cached: int = 0
    left: int = 0

    def step(self, rng: random.Random) -> bool:
        """True if a job was begun or went on."""
        if self.running:
            self.left -= 1
            if self.left <= 0:
                self.cached, self.running = self.cached + self.running, 0
            self._give_back()
            return True
        if self._give_back() or not self.jobs:
            if not self.jobs:
                self.owner.wish(0, 0)
                return False
        elif self._begin(rng):
            return True
        missing = [m for m in (total * PAGE for total in self._missing()) if m > 0]
        self.owner.wish(*((missing[0], missing[-1]) if missing else (0, 0)))
        return False

    def _missing(self) -> list[int]:
        totals, total = [], -self.cached
        for job in self.jobs:
            total += job
            totals.append(total)
        return totals

    def _give_back(self) -> bool:
        wanted = self.owner.pressure()
        pages = min(self.cached, -(-wanted // PAGE))
        self.cached -= pages
        self.owner.release(pages * PAGE, "kv")
        return wanted > 0

    def _begin(self, rng: random.Random) -> bool:
        need = self.jobs[0] - self.cached
        try:
            self.owner.reserve(max(0, need) * PAGE, "kv", yielding=True)
        except errors.OutOfMemory:
            return False
        self.running, self.cached = self.jobs.pop(0), max(0, -need)
        self.left = rng.randrange(1, 4)
        self.owner.wish(0, 0)  # the next one is a new one
        return True


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 30),
    jobs=st.lists(st.lists(st.integers(1, 16), max_size=6), min_size=2, max_size=5),
    caches=st.lists(st.integers(0, 16), min_size=5, max_size=5),
)
def test_engines_that_wish_never_block_each_other_for_ever(
    device: memory.Device, seed: int, jobs: list[list[int]], caches: list[int]
) -> None:
    """Whatever they hold at first and whoever steps next: every job that fits the device alone is done in the end."""
    rng = random.Random(seed)
    ballast = device.register("weights")
    ballast.reserve(device.free_bytes() - 16 * PAGE, "weights")
    engines = [Engine(device.register(f"e{i}"), list(sizes)) for i, sizes in enumerate(jobs)]
    try:
        for engine, pages in zip(engines, caches, strict=False):
            engine.cached = min(pages, device.free_bytes() // PAGE)
            engine.owner.reserve(engine.cached * PAGE, "kv")
        # A page for each owner cannot be had from it by the account's rule; here every engine can give its last.
        largest = 16 - len(engines)
        for engine in engines:
            engine.jobs = [min(job, largest) for job in engine.jobs]
        quiet = 0
        while any(engine.jobs or engine.running for engine in engines):
            moved = [engine.step(rng) for engine in rng.sample(engines, len(engines))]
            assert not device.audit().problems
            quiet = 0 if any(moved) else quiet + 1
            assert quiet < 64, [(e.jobs, e.running, e.cached, e.owner.wished_bytes) for e in engines]
        for engine in engines:
            engine.step(rng)
        assert device.wanted_bytes() == 0
    finally:
        for engine in engines:
            engine.owner.close()
        ballast.close()


@pytest.mark.parametrize("late", [0, 1, 2])
def test_engines_without_end_starve_nobody(device: memory.Device, late: int) -> None:
    """Three engines need most of the device again and again; a late one with a single job gets its turn."""
    rng = random.Random(late)
    device.register("weights").reserve(device.free_bytes() - 16 * PAGE, "weights")
    engines = [Engine(device.register(f"e{i}"), []) for i in range(4)]
    engines[late].jobs = [12]
    for _ in range(1000):
        for engine in rng.sample(engines, len(engines)):
            if engine is not engines[late] and not engine.jobs:
                engine.jobs.append(rng.randrange(8, 13))
            engine.step(rng)
    assert not engines[late].jobs and not engines[late].running


def serve(directory: Path, seed: int, jobs: int, counting: Any) -> None:
    """One engine in its own process; with ``jobs`` it ends when so many were done since they are counted, else it goes
    on until it is killed."""
    rng = random.Random(seed)
    engine = Engine(open_device(directory).register(f"engine {seed}"), [])
    while jobs != 0 or engine.running or engine.jobs:
        if not engine.jobs and jobs != 0:
            engine.jobs.append(rng.randrange(1, PAGES - 8))
            jobs -= int(counting.value)
        if not engine.step(rng):
            os.sched_yield()
    engine.owner.close()


def test_many_processes_wish_and_some_are_killed(tmp_path: Path) -> None:
    """Those that live get all their jobs done, and the books are exact afterwards."""
    device = open_device(tmp_path)
    # Until then there is somebody else who holds what they wish for. No Event: its lock would die with those killed.
    all_killed = FORK.RawValue("i", 0)
    done = [FORK.Process(target=serve, args=(tmp_path, seed, 20, all_killed)) for seed in range(3)]
    killed = [FORK.Process(target=serve, args=(tmp_path, 10 + seed, -1, all_killed)) for seed in range(3)]
    try:
        for process in (*done, *killed):
            process.start()
        for process in killed:
            while not any(o.pid == process.pid and o.wanted_bytes for o in device.stats().owners):
                os.sched_yield()
            process.kill()
            process.join()
        all_killed.value = 1
        for process in done:
            process.join(300)
            assert process.exitcode == 0
    finally:
        for process in (*done, *killed):
            process.kill()
            process.join()
    device.reap()
    books = device.audit()
    assert not books.problems and books.books.charged_bytes == 0 == device.wanted_bytes()


def test_threads_change_wishes_while_others_read_pressure(device: memory.Device) -> None:
    owners = [device.register(f"o{i}") for i in range(4)]
    for owner in owners:
        owner.reserve(device.capacity_bytes // 5, "kv")

    def wish(owner: memory.Owner) -> None:
        for i in range(300):
            owner.wish(i % 7, i * 100)
            assert 0 <= owner.pressure() <= owner.leased_bytes
        owner.wish(0, 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(wish, owners))
    assert device.wanted_bytes() == 0 and all(owner.pressure() == 0 for owner in owners)
