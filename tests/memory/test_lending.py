"""Lent memory: only what is offered, the first to go, and gone with its borrower."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prism import memory
from prism.memory import errors

PAGE = 4096
PAGES = 64


def open_device(directory: Path) -> memory.Device:
    return memory.open_device("host:0", PAGES * PAGE, account_dir=directory, page_bytes=PAGE)


def test_nothing_is_lent_unless_it_is_offered(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    region = device.register("borrower").lent_region(40 * PAGE)
    with pytest.raises(errors.OutOfMemory):
        region.commit(PAGE)
    device.offer(30 * PAGE)
    assert device.offered_bytes() == 34 * PAGE == device.stats().capacity_bytes - device.stats().lend_keep_bytes  # type: ignore[operator]
    with pytest.raises(errors.OutOfMemory):
        region.commit(35 * PAGE)
    assert region.commit(34 * PAGE) == 34 * PAGE and device.offered_bytes() == 0
    assert device.stats().owners[0].lent_bytes == 34 * PAGE and not device.audit().problems
    with pytest.raises(errors.BadRequest, match="negative"):
        device.offer(-5)


def test_lent_memory_goes_before_anything_else(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    device.offer(0)
    cacher, hungry = device.register("cacher"), device.register("hungry")
    cacher.reserve(20 * PAGE, "kv")
    borrower = device.register("borrower")
    region = borrower.lent_region(30 * PAGE)
    region.commit()
    assert borrower.pressure() == 0
    assert hungry.wish(20 * PAGE, 20 * PAGE) == 20 * PAGE
    assert borrower.pressure() == 6 * PAGE and cacher.pressure() == 0
    region.decommit(6 * PAGE)
    assert borrower.pressure() == 0 == cacher.pressure()
    hungry.reserve(20 * PAGE, "kv", yielding=True)
    assert hungry.wish(40 * PAGE, 43 * PAGE) == 43 * PAGE, "all that is lent comes back, of other KV all but a page"
    assert borrower.pressure() == 24 * PAGE and cacher.pressure() == 19 * PAGE, "what lent memory does not cover"


def test_an_activation_and_what_is_kept_free_go_first_too(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    device.offer(8 * PAGE)
    cacher, borrower, model = device.register("cacher"), device.register("borrower"), device.register("model")
    cacher.reserve(10 * PAGE, "kv")
    region = borrower.lent_region(64 * PAGE)
    region.commit(40 * PAGE)
    cacher.reserve(6 * PAGE, "kv")  # within what is kept free, at once
    assert borrower.pressure() == 0 and device.offered_bytes() == 0
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(model.reserve, 20 * PAGE, "weights", 60.0)
        while device.wanted_bytes() == 0:
            pass
        assert borrower.pressure() == 20 * PAGE and cacher.pressure() == 0
        region.decommit(20 * PAGE)
        waiting.result(60)


def test_withdrawing_the_offer_asks_everything_back(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    device.offer(0)
    borrower = device.register("borrower")
    region = borrower.lent_region(10 * PAGE)
    region.commit()
    assert borrower.pressure() == 0
    device.offer(None)
    assert borrower.pressure() == 10 * PAGE and device.offered_bytes() == 0
    region.decommit()
    assert borrower.pressure() == 0 and device.free_bytes() == PAGES * PAGE


def test_a_borrower_that_does_not_answer_spares_the_others_for_a_moment_only(tmp_path: Path) -> None:
    device = open_device(tmp_path)
    device.offer(0)
    cacher, hungry, borrower = (device.register(name) for name in ("cacher", "hungry", "borrower"))
    cacher.reserve(20 * PAGE, "kv")
    region = borrower.lent_region(44 * PAGE)
    region.commit()
    hungry.wish(10 * PAGE, 10 * PAGE)
    assert cacher.pressure() == 0
    while cacher.pressure() == 0:
        time.sleep(0.01)
    assert cacher.pressure() == 10 * PAGE


def borrow_and_die(directory: Path, inside_lock: bool) -> None:
    owner = open_device(directory).register("borrower")
    region = owner.lent_region(20 * PAGE)
    region.commit()
    if inside_lock:
        owner._core.die_inside_lock(PAGE, True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("inside_lock", [False, True])
def test_a_borrower_that_is_killed_leaves_nothing(tmp_path: Path, inside_lock: bool) -> None:
    device = open_device(tmp_path)
    device.offer(0)
    process = multiprocessing.get_context("spawn").Process(target=borrow_and_die, args=(tmp_path, inside_lock))
    process.start()
    process.join()
    model = device.register("model")
    model.reserve(PAGES * PAGE, "weights")
    assert [o.name for o in device.stats().owners] == ["model"] and not device.audit().problems
