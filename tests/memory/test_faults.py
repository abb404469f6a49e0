"""The CUDA code path on the fake driver: its rules are kept; every error at every call becomes an exception."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prism import memory
from prism.memory import errors
from tests.memory.drivers import FAKE, Bed, FakeCuda

OUT_OF_MEMORY, INVALID_VALUE, ILLEGAL_ADDRESS = 2, 1, 700
MOST_CALLS = 400


def open_bed(directory: Path, fake: FakeCuda) -> Bed:
    return Bed.open(FAKE, directory, fake.path)


def life(bed: Bed) -> None:
    """Uses every driver call, in every place they are made from."""
    with bed.device.register("life") as owner:
        arena = owner.arena(64 * bed.page_bytes)
        use_pools(bed, arena)
        region = owner.weight_region(5 * bed.page_bytes, page_bytes=2 * bed.page_bytes)
        region.commit(bed.page_bytes)
        region.commit()
        bed.device.audit()
        region.decommit()


def use_pools(bed: Bed, arena: memory.Arena) -> None:
    pool = arena.divide(bed.layout(order="layer", tokens_per_page=64), 100, 8 * bed.page_bytes)
    pool.free(pool.alloc(60))
    pool.trim()
    pool = arena.divide(bed.layout(), 300)
    pool.defer_on_stream(0)
    slots = pool.alloc(100)
    bed.write(pool.address, b"x" * 8)
    pool.free(slots)


def check_books(bed: Bed, fake: FakeCuda) -> None:
    """Whatever failed: the books are consistent and cover what the driver gave out."""
    audit = bed.device.audit()
    assert not audit.problems
    assert fake.physical_bytes() <= audit.books.charged_bytes or not audit.books.owners


def test_a_life_without_errors(tmp_path: Path, fake: FakeCuda) -> None:
    before = fake.physical_bytes(), fake.mappings(), fake.ranges(), fake.events()
    life(open_bed(tmp_path, fake))
    assert (fake.physical_bytes(), fake.mappings(), fake.ranges(), fake.events()) == before


@pytest.mark.parametrize("result", [OUT_OF_MEMORY, INVALID_VALUE])
def test_every_passing_error_at_every_call(tmp_path: Path, fake: FakeCuda, result: int) -> None:
    """The call raises or copes; the same life then succeeds on the same device."""
    raised = 0
    for nth in range(MOST_CALLS):
        bed = open_bed(tmp_path, fake)
        fake.inject("", nth, result)
        try:
            life(bed)
        except errors.DeviceMemoryError as error:
            raised += 1
            assert not isinstance(error, errors.DeadDriver)
            assert error.numbers
        if fake.pending():
            break
        fake.reset_injection()
        check_books(bed, fake)
        life(bed)
        check_books(bed, fake)
        assert fake.violations() == 0, (nth, fake.last_broken_rule())
    else:
        pytest.fail("the life never ends")
    assert raised > 40


def test_a_fatal_error_at_every_call(tmp_path: Path, fake: FakeCuda) -> None:
    """The driver is dead for this process: exceptions only, and the account gets the books back."""
    dead = 0
    for nth in range(MOST_CALLS):
        bed = open_bed(tmp_path, fake)
        fake.inject("", nth, ILLEGAL_ADDRESS, forever=True)
        try:
            life(bed)
        except errors.DeadDriver as error:
            dead += 1
            assert error.numbers["cuda_result"] == ILLEGAL_ADDRESS
        except errors.DriverUnavailable:
            pass  # it was dead from the start
        pending = fake.pending() and fake.calls() == 0
        fake.reset_injection()
        if pending or (dead and nth > dead + 30):
            break
        assert bed.device.stats().charged_bytes == 0
    assert dead > 40


@pytest.mark.parametrize("result", [46, 220, 226, 721, 805, 807, 810])
def test_errors_after_which_a_process_cannot_go_on(tmp_path: Path, fake: FakeCuda, result: int) -> None:
    """Of the GPU, of NVLink and of the MPS server (CUDA 13's cuda.h)."""
    bed = open_bed(tmp_path, fake)
    fake.inject("", 25, result, forever=True)
    with pytest.raises(errors.DeadDriver) as dead:
        life(bed)
    assert dead.value.numbers["cuda_result"] == result
    fake.reset_injection()


def test_a_graph_can_be_captured_while_pages_come_and_go(tmp_path: Path, fake: FakeCuda) -> None:
    """In this thread, in others and in the helper thread, which looks whether work in flight has passed."""
    bed = open_bed(tmp_path, fake)
    with bed.device.register("engine") as owner:
        pool = owner.arena(64 * bed.page_bytes).divide(bed.layout(), 600, 30 * bed.page_bytes)
        pool.set_ahead(0, 0)
        pool.defer_on_stream(0)
        slots = pool.alloc(200)
        fake.hold_streams(True)
        fake.set_capturing(True)
        pool.free(slots)
        worker = threading.Thread(target=lambda: pool.free(pool.alloc(100)))
        worker.start()
        worker.join()
        fake.hold_streams(False)
        pool.quiesce()
        fake.set_capturing(False)
        assert pool.stats()["deferred_bytes"] == 0


def count_calls(action: Callable[[], object], fake: FakeCuda) -> int:
    before = fake.calls()
    action()
    return fake.calls() - before


def test_pages_are_pooled_and_mapped_in_groups(tmp_path: Path, fake: FakeCuda) -> None:
    bed = open_bed(tmp_path, fake)
    owner = bed.device.register("a")
    pool = owner.arena(64 * bed.page_bytes).divide(bed.layout(), 300, 10 * bed.page_bytes)
    pool.set_ahead(0, 0)
    first = pool.alloc(15)
    slots = pool.alloc(16)
    assert count_calls(lambda: pool.free(slots), fake) == 1, "unmap; the page stays as a spare"
    assert owner.spare_bytes == bed.page_bytes
    assert count_calls(lambda: pool.alloc(16), fake) == 2, "map and set access; no page is created"
    assert first[0] == 1
    region = owner.weight_region(8 * bed.page_bytes, page_bytes=bed.page_bytes)
    assert count_calls(region.commit, fake) == 8 + 8 + 1, "create and map each, one set-access for all"


def test_the_driver_says_no_though_the_account_said_yes(tmp_path: Path, fake: FakeCuda) -> None:
    """Somebody uses the GPU outside of the account."""
    bed = open_bed(tmp_path, fake)
    owner = bed.device.register("a")
    pool = owner.arena(64 * bed.page_bytes).divide(bed.layout(), 300)
    fake.inject("cuMemCreate", 1, OUT_OF_MEMORY)
    with pytest.raises(errors.OutOfMemory, match="cuMemCreate"):
        pool.alloc(100)
    pool.check()
    assert pool.used() == 0
    pool.quiesce()
    assert owner.leased_bytes == bed.page_bytes
    assert len(pool.alloc(100)) == 100


def test_no_page_goes_while_a_stream_may_touch_it(tmp_path: Path, fake: FakeCuda) -> None:
    bed = open_bed(tmp_path, fake)
    owner = bed.device.register("a")
    before = fake.mappings()
    pool = owner.arena(64 * bed.page_bytes).divide(bed.layout(), 300)
    pool.defer_on_stream(0)
    fake.hold_streams(True)
    slots = pool.alloc(100)
    mappings = fake.mappings()
    pool.free(slots)
    pool.quiesce()
    assert fake.mappings() == mappings and pool.stats()["deferred_bytes"] > 0
    fake.hold_streams(False)
    pool.quiesce()
    assert fake.mappings() == before + 1 and owner.leased_bytes == bed.page_bytes


def test_a_gpu_cannot_be_taken_over_a_fork(tmp_path: Path, fake: FakeCuda) -> None:
    """A child may be the first to use a device that its parent opened, but not the second."""
    bed = open_bed(tmp_path, fake)

    def child() -> int:
        pid = os.fork()
        if pid == 0:
            try:
                bed.device.register("child")
            except errors.DriverUnavailable:
                os._exit(3)
            os._exit(4)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert child() == 4
    with bed.device.register("parent"):
        assert child() == 3


def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    device = memory.open_device("cuda:0", 1 << 20, account_dir=tmp_path, cuda_library="/nonexistent/libcuda.so")
    with pytest.raises(errors.DriverUnavailable, match="nonexistent"):
        device.register("a")
    device = memory.open_device("cuda:0", 1 << 20, account_dir=tmp_path, cuda_library="libm.so.6")
    with pytest.raises(errors.DriverUnavailable, match="cuInit"):
        device.register("a")


def test_devices_that_do_not_exist(tmp_path: Path, fake: FakeCuda) -> None:
    device = memory.open_device("cuda:9", 1 << 20, account_dir=tmp_path, cuda_library=str(fake.path))
    with pytest.raises(errors.DriverUnavailable) as caught:
        device.register("a")
    assert caught.value.numbers["devices"] == 1
