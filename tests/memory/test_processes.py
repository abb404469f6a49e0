"""Many processes on one device: they allocate, shrink and are killed at random, also while they hold the lock."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest

from prism import memory
from prism.memory import errors
from tests.patience import PATIENCE_S

PAGE = 16384
CAPACITY = 256 * PAGE
LAYOUT = memory.KvLayout(layers=2, kv_heads=2, head_dim=64, dtype_bytes=2)
SPAWN = multiprocessing.get_context("fork")


def open_device(directory: Path) -> memory.Device:
    return memory.open_device("host:0", CAPACITY, account_dir=directory, page_bytes=PAGE)


def engine(directory: Path, seed: int) -> None:
    """Allocates and frees at random until it is killed; what it was given, it writes to and checks."""
    rng = random.Random(seed)
    owner = enter(open_device(directory), f"engine {seed}")
    pool = owner.arena(64 << 20).divide(LAYOUT, 4000)
    region = owner.weight_region(10 * PAGE, page_bytes=PAGE)
    k = memory.numpy_views(pool, np.uint16)[0][0]
    held: list[np.ndarray] = []
    while True:
        with suppress(errors.OutOfMemory):
            step(rng, owner, pool, region, k, held, leased=seed % 2 == 1)
        pool.give_back(most_bytes=pool.pressure())
        if rng.random() < 0.002:
            owner._core.die_inside_lock(rng.randrange(PAGE), rng.random() < 0.5)


def enter(device: memory.Device, name: str) -> memory.Owner:
    """Register with a floor, as soon as the others leave room for it."""
    while True:
        try:
            return device.register(name, floor_bytes=4 * PAGE)
        except errors.FloorUnavailable:
            time.sleep(0.001)


def step(
    rng: random.Random,
    owner: memory.Owner,
    pool: memory.Pool,
    region: memory.WeightRegion,
    k: np.ndarray,
    held: list[np.ndarray],
    leased: bool,
) -> None:
    match rng.randrange(7):
        case 0 | 1:
            slots = pool.alloc(rng.randrange(1, 200))
            k[slots, 0, 0] = slots
            held.append(slots)
        case 2 if held:
            slots = held.pop(rng.randrange(len(held)))
            assert (k[slots, 0, 0] == slots.astype(np.uint16)).all()
            pool.free(slots)
        case 3:
            promised = pool.available()
            held.append(pool.alloc(promised))
            k[held[-1], 0, 0] = held[-1]
        case 4:
            pool.set_lease(rng.randrange(40) * PAGE) if leased else pool.trim()
        case 5:
            region.commit() if region.committed_bytes == 0 else region.decommit()
        case 6:
            owner.reserve(PAGE, "staging", 0.01)
            owner.release(PAGE, "staging")


def chaos(directory: Path, seconds: float, engines: int, seed: int) -> tuple[int, memory.DeviceStats]:
    """Run engines and kill them for a while; returns how many died and the books after the last one."""
    rng = random.Random(seed)
    device = open_device(directory)
    living: list[BaseProcess] = []
    started, deaths, end_s = 0, 0, time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            codes = [process.exitcode for process in living if not process.is_alive()]
            assert all(code == -signal.SIGKILL for code in codes), f"an engine failed by itself: {codes}"
            deaths += len(codes)
            living = [process for process in living if process.is_alive()]
            while len(living) < engines:
                living.append(SPAWN.Process(target=engine, args=(directory, started), daemon=True))
                living[-1].start()
                started += 1
            time.sleep(rng.random() * 0.05)
            audit = device.audit()
            assert audit.books.charged_bytes <= CAPACITY
            assert sum(o.leased_bytes for o in audit.books.owners) <= CAPACITY
            if rng.random() < 0.3:
                rng.choice(living).kill()
    finally:
        for process in living:
            process.kill()
            process.join()
    device.reap()
    return deaths, device.stats()


def check_empty(directory: Path, deaths: int, books: memory.DeviceStats) -> None:
    assert deaths > 0 and books.charged_bytes == 0 and books.wanted_bytes == 0 and not books.owners
    owner = open_device(directory).register("the last one")
    owner.reserve(CAPACITY, "kv")
    owner.close()


def test_chaos(tmp_path: Path) -> None:
    check_empty(tmp_path, *chaos(tmp_path, 4.0, 3, 1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_for_minutes(tmp_path: Path) -> None:
    check_empty(tmp_path, *chaos(tmp_path, 180.0, 8, 2))


def die_holding_the_lock(directory: Path, after_total: bool) -> None:
    owner = open_device(directory).register("victim")
    owner.reserve(5 * PAGE, "kv")
    owner._core.die_inside_lock(3 * PAGE, after_total)


@pytest.mark.parametrize("after_total", [False, True])
def test_death_inside_the_lock(tmp_path: Path, after_total: bool) -> None:
    """The next one to take the lock adds the books up again, and the victim's memory comes back without a restart."""
    device = open_device(tmp_path)
    bystander = device.register("bystander")
    bystander.reserve(PAGE, "weights")
    victim = SPAWN.Process(target=die_holding_the_lock, args=(tmp_path, after_total))
    victim.start()
    victim.join()
    assert victim.exitcode == -signal.SIGKILL
    bystander.reserve(CAPACITY - PAGE, "kv")
    books = device.audit()
    assert not books.problems and books.books.recoveries == 1 and books.books.reaped_owners == 1


def hold_all(directory: Path) -> None:
    owner = open_device(directory).register("holder")
    owner.reserve(CAPACITY, "kv")
    time.sleep(60)


def test_a_death_wakes_waiters(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    holder = SPAWN.Process(target=hold_all, args=(tmp_path,))
    holder.start()
    while device.free_bytes():
        time.sleep(0.01)
    waiter = device.register("waiter")
    with pytest.raises(errors.OutOfMemory):
        waiter.reserve(PAGE, "kv", 0.1)
    os.kill(holder.pid or 0, signal.SIGKILL)
    waiter.reserve(CAPACITY, "kv", 30.0)
    holder.join()


def use_after_fork(directory: Path, device: memory.Device, owner: memory.Owner, pool: memory.Pool) -> None:
    """In a child: what came from before the fork refuses, and a new owner works with the device opened before."""
    for call in (lambda: pool.alloc(1), lambda: owner.reserve(1, "kv"), lambda: owner.arena(PAGE)):
        with pytest.raises(errors.ClosedHandle):
            call()
    mine = device.register("child")
    small = mine.arena(1 << 20).divide(LAYOUT, 100)
    small.free(small.alloc(50))
    assert not device.audit().problems
    os._exit(7)


def test_children_of_a_fork(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    owner = device.register("parent")
    pool = owner.arena(16 << 20).divide(LAYOUT, 1000)
    pool.set_ahead(2 * PAGE, 4 * PAGE)  # a helper thread is running, which the child has not
    slots = pool.alloc(100)
    k = memory.numpy_views(pool, np.uint16)[0][0]
    k[slots, 0, 0] = slots
    child = SPAWN.Process(target=use_after_fork, args=(tmp_path, device, owner, pool))
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == 7
    assert (k[slots, 0, 0] == slots).all() and [o.name for o in device.audit().books.owners] == ["parent"]


def import_and_answer(directory: Path, pages: list[tuple[int, int, int]], done: str) -> None:
    owner = open_device(directory).register("importer")
    region = owner.import_region(pages)
    Path(done).write_bytes(bytes(np.from_dlpack(region.memory())[: len("shared")]))
    np.from_dlpack(region.memory())[0] = ord("S")
    assert owner.leased_bytes == 0


def test_weights_are_shared_between_processes(tmp_path: Path) -> None:
    owner = open_device(tmp_path).register("exporter")
    with pytest.raises(errors.BadRequest, match="not made to be exported"):
        owner.weight_region(3 * PAGE, page_bytes=PAGE).export_pages()
    region = owner.weight_region(3 * PAGE, page_bytes=PAGE, exportable=True)
    with pytest.raises(errors.BadRequest, match="wholly committed"):
        region.export_pages()
    region.commit()
    content = np.from_dlpack(region.memory())
    content[:6] = np.frombuffer(b"shared", dtype=np.uint8)
    pages = region.export_pages()
    done = tmp_path / "done"
    child = SPAWN.Process(target=import_and_answer, args=(tmp_path, pages, str(done)))
    child.start()
    child.join(PATIENCE_S)
    for descriptor, _, _ in pages:
        os.close(descriptor)
    assert child.exitcode == 0 and done.read_bytes() == b"shared" and bytes(content[:6]) == b"Shared"
