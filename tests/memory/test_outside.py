"""Memory beside Prism's pages, of its own processes and of others: found, counted, felt, given back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism import memory
from prism.memory import errors
from prism.memory.outside import (
    FOREIGN_WINDOW_S,
    MARGIN_BYTES,
    GpuLost,
    GpuUse,
    MemoryWatch,
    NvmlMeter,
    SlidingMaximum,
    attribute,
)
from tests.memory.drivers import CUDA, FAKE, PAGES, Bed, FakeCuda

MIB = 1 << 20
GIB = 1 << 30


@dataclass
class FakeMeter:
    """A GPU of 80 GiB. ``during`` happens between the two times that the books are read."""

    processes: dict[int, int] = field(default_factory=dict)
    free_bytes: int = 80 * GIB
    during: list[Any] = field(default_factory=list)

    def look(self) -> GpuUse:
        for action in self.during:
            action()
        return GpuUse(self.free_bytes, dict(self.processes))


@pytest.fixture
def device(tmp_path: Path) -> memory.Device:
    """Of a GPU of 80 GiB Prism may use 70."""
    return memory.open_device("host:0", 70 * GIB, account_dir=tmp_path, page_bytes=65536)


def test_what_a_process_holds_beside_its_pages_is_charged_to_it(device: memory.Device) -> None:
    with device.register("engine") as owner:
        region = owner.weight_region(MIB)
        region.commit()
        watch = MemoryWatch(device, FakeMeter({os.getpid(): GIB + MIB, 1: GIB}, free_bytes=78 * GIB - MIB))
        watch.look(0.0)
        (seen,) = device.stats().owners
        assert (seen.measured_bytes, seen.outside_bytes, seen.physical_bytes) == (GIB, GIB, MIB)
        assert device.stats().foreign_bytes == 0, "what the stranger holds lies in the part that is not Prism's"
        assert device.free_bytes() == 69 * GIB - MIB
        region.decommit()
    assert device.free_bytes() == 70 * GIB


def test_what_was_granted_counts_until_more_is_found(device: memory.Device) -> None:
    with device.register("engine") as owner:
        owner.reserve(2 * GIB, "outside")
        assert owner.leased_bytes == 0, "no limit and no floor is about it"
        device.note_outside(owner.id, GIB)
        assert device.outside_bytes() == 2 * GIB
        device.note_outside(owner.id, 3 * GIB)
        assert device.free_bytes() == 67 * GIB
        owner.release(2 * GIB, "outside")
        assert device.free_bytes() == 67 * GIB


def test_a_process_that_the_driver_does_not_name_counts_with_its_grant(device: memory.Device) -> None:
    """In a container the driver tells other process ids."""
    with device.register("engine") as owner:
        owner.reserve(2 * GIB, "outside")
        found = attribute(GpuUse(free_bytes=77 * GIB, processes={}), device.stats())
        assert found.outside == {} and found.foreign_bytes == 0
        found = attribute(GpuUse(free_bytes=40 * GIB, processes={}), device.stats())
        assert found.foreign_bytes == 70 * GIB - 40 * GIB - 2 * GIB + MARGIN_BYTES


def test_two_owners_of_one_process_share_what_it_holds(device: memory.Device) -> None:
    with device.register("a") as a, device.register("b") as b:
        found = attribute(GpuUse(79 * GIB, {os.getpid(): GIB}), device.stats())
        assert sorted(found.outside) == [a.id, b.id] and sum(found.outside.values()) == GIB


def test_strangers_are_felt_at_once_and_forgotten_slowly(device: memory.Device) -> None:
    meter = FakeMeter()
    watch = MemoryWatch(device, meter)
    watch.look(0.0)
    assert device.foreign_bytes() == 0
    meter.free_bytes = 30 * GIB
    watch.look(1.0)
    taken = 40 * GIB + MARGIN_BYTES
    assert device.foreign_bytes() == taken and device.free_bytes() == 70 * GIB - taken
    meter.free_bytes = 80 * GIB
    watch.look(1.0 + FOREIGN_WINDOW_S)
    assert device.foreign_bytes() == taken, "memory that comes and goes is not handed out"
    watch.look(1.1 + FOREIGN_WINDOW_S)
    assert device.foreign_bytes() == 0


def test_the_greatest_of_a_window() -> None:
    window = SlidingMaximum(10.0)
    noted = [(0, 5), (1, 3), (2, 4), (9, 1), (10.5, 2), (12.5, 0), (30, 0)]
    assert [window.note(value, float(at)) for at, value in noted] == [5, 5, 5, 5, 4, 2, 0]


def test_pages_that_come_and_go_meanwhile_are_not_taken_for_something_else(device: memory.Device) -> None:
    with device.register("engine") as owner:
        region = owner.weight_region(GIB, page_bytes=65536)
        sizes = iter(range(65536, 65536 * 100, 65536))
        meter = FakeMeter({os.getpid(): GIB}, during=[lambda: region.commit(next(sizes))])
        MemoryWatch(device, meter).look(0.0)
        assert device.stats().owners[0].measured_bytes == 0
        meter.during.clear()
        MemoryWatch(device, meter).look(0.0)
        assert device.stats().owners[0].measured_bytes == GIB - region.committed_bytes


def test_strangers_become_pressure_and_no_kill(tmp_path: Path) -> None:
    """An engine that holds unused lease and weights: the lease goes, the weights stay, nothing more is granted."""
    device = memory.open_device("host:0", 700 * MIB, account_dir=tmp_path, page_bytes=65536)
    with device.register("engine") as owner, device.register("idle") as idle:
        layout = memory.KvLayout(layers=2, kv_heads=2, head_dim=64)
        pool = owner.arena(GIB).divide(layout, 200_000, 65536)
        assert pool.ensure(100 * MIB // layout.cell_bytes)
        owner.reserve(300 * MIB, "weights")
        assert owner.pressure() == 0
        device.note_foreign(350 * MIB)
        overdrawn = -device.stats().free_bytes
        assert overdrawn > 0 and owner.pressure() == overdrawn and idle.pressure() == 0
        with pytest.raises(errors.OutOfMemory):
            owner.reserve(1, "staging")
        assert pool.give_back(0, owner.pressure()) >= overdrawn
        assert owner.pressure() == 0 and device.free_bytes() >= 0
        owner.release(300 * MIB, "weights")


def test_a_wish_counts_what_is_outside_of_pages(device: memory.Device) -> None:
    with device.register("a") as a, device.register("b") as b:
        a.reserve(GIB, "outside")
        b.reserve(2 * GIB, "outside")
        device.note_foreign(7 * GIB)
        assert a.wish(GIB, 100 * GIB) == 60 * GIB


# --- the driver's own word ---


def open_bed(directory: Path, fake: FakeCuda) -> Bed:
    return Bed.open(FAKE, directory, fake.path)


def leave_free(fake: FakeCuda, nbytes: int) -> None:
    """Strangers hold all else."""
    fake.set_foreign((1 << 30) - fake.physical_bytes() - nbytes)


def test_a_full_gpu_is_a_refusal_before_the_step(tmp_path: Path, fake: FakeCuda) -> None:
    """Somebody else fills the GPU: the lease falls to what is mapped, the account knows, and later it goes on."""
    bed = open_bed(tmp_path, fake)
    owner = bed.device.register("engine")
    pool = owner.arena(80 * bed.page_bytes).divide(bed.layout(), 16 * PAGES, 40 * bed.page_bytes)
    assert pool.available() == 40 * 16 - 1
    leave_free(fake, 4 * bed.page_bytes)
    assert pool.back(16 * 3), "there is room for four pages beside the first"
    assert not pool.back(16 * 20)
    held = owner.leased_bytes // bed.page_bytes
    assert held == 5 and pool.available() == held * 16 - 1
    pool.free(pool.alloc(pool.available()))
    assert bed.device.free_bytes() == 0, "what the driver does not have is not granted to others either"
    assert not pool.ensure(16 * 10)
    pool.check()
    fake.set_foreign(0)
    bed.device.note_foreign(0)
    assert pool.ensure(16 * 10) and pool.back(16 * 10) and len(pool.alloc(160)) == 160
    owner.close()


def test_spare_pages_of_another_size_make_room_where_the_driver_refuses(tmp_path: Path, fake: FakeCuda) -> None:
    bed = open_bed(tmp_path, fake)
    with bed.device.register("engine") as owner:
        pool = owner.arena(80 * bed.page_bytes).divide(bed.layout(), 16 * PAGES, 30 * bed.page_bytes)
        pool.set_ahead(0, 0)
        pool.free(pool.alloc(16 * 10))
        pool.quiesce()
        assert owner.spare_bytes > 0
        leave_free(fake, 0)
        region = owner.weight_region(2 * bed.page_bytes, page_bytes=2 * bed.page_bytes)
        region.commit()
        assert owner.spare_bytes == 0


def test_weights_wait_for_neighbours_where_the_driver_refuses(tmp_path: Path, fake: FakeCuda) -> None:
    bed = open_bed(tmp_path, fake)
    with bed.device.register("engine") as owner:
        leave_free(fake, bed.page_bytes)
        region = owner.weight_region(4 * bed.page_bytes, page_bytes=bed.page_bytes)
        with pytest.raises(errors.OutOfMemory):
            region.commit(timeout_s=0.05)
        assert owner.leased_bytes == 0 and bed.device.foreign_bytes() > 0
        fake.inject("cuMemCreate", 1, 2)  # once: somebody gives way meanwhile
        fake.set_foreign(0)
        bed.device.note_foreign(0)
        region.commit(timeout_s=30.0)
        assert region.committed_bytes == 4 * bed.page_bytes


def test_neighbouring_blocks_are_mapped_with_one_call_for_access(tmp_path: Path, fake: FakeCuda) -> None:
    bed = open_bed(tmp_path, fake)
    with bed.device.register("engine") as owner:
        pool = owner.arena(80 * bed.page_bytes).divide(bed.layout(), 16 * PAGES, 30 * bed.page_bytes)
        before, physical = fake.calls(), fake.physical_bytes()
        assert pool.back(16 * 8 - 1)
        assert fake.calls() - before == 7 + 7 + 1, "create and map each, access for all"
        before = fake.calls()
        slots = pool.alloc(16 * 8 - 1)
        assert fake.calls() == before and sorted(slots) == list(range(1, 128))
        assert pool.back(0) and pool.back(16 * 100), "no more than the lease covers"
        assert fake.physical_bytes() - physical == 29 * bed.page_bytes


def test_pages_are_exportable_where_they_are_exported_only(tmp_path: Path, fake: FakeCuda) -> None:
    """The fake driver refuses to export others."""
    bed = open_bed(tmp_path, fake)
    with bed.device.register("engine") as owner:
        region = owner.weight_region(2 * bed.page_bytes, page_bytes=bed.page_bytes, exportable=True)
        region.commit()
        for descriptor, _, _ in region.export_pages():
            os.close(descriptor)
        plain = owner.weight_region(bed.page_bytes)
        plain.commit()
        with pytest.raises(errors.BadRequest, match="not made to be exported"):
            plain.export_pages()


def test_nothing_goes_from_owner_to_owner_but_through_the_driver(bed: Bed) -> None:
    """Prism keeps no page that it does not account for, so that a page that changes owner is the driver's in between,
    which clears what it hands to another process (docs/memory.md); host memory is cleared by the kernel."""
    with bed.device.register("first") as owner:
        pool = owner.arena(80 * bed.page_bytes).divide(bed.layout(), 16 * PAGES, 20 * bed.page_bytes)
        pool.alloc(16 * 10)
        bed.write(pool.address, b"secret" * 100)
        pool.close()
        assert (owner.leased_bytes, owner.spare_bytes) == (0, 0)
        assert bed.device.stats().owners[0].physical_bytes == 0
        region = owner.weight_region(10 * bed.page_bytes, page_bytes=bed.page_bytes)
        region.commit()
        if bed.kind != CUDA:  # the driver may give the same process its own page back as it was
            assert bed.read(region.address, bed.page_bytes) == bytes(bed.page_bytes)


# --- the management library ---


class NvmlError(Exception):
    pass


class NotSupported(NvmlError):
    pass


class Lost(NvmlError):
    pass


def test_the_driver_is_asked_for_processes_with_and_without_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    def mps(handle: str) -> list[Any]:
        if handle == "old":
            raise NotSupported
        return [SimpleNamespace(pid=3, usedGpuMemory=30)]

    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1": "new", "GPU-2": "old"}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=1, usedGpuMemory=10),
            SimpleNamespace(pid=2, usedGpuMemory=None),
        ],
        nvmlDeviceGetMPSComputeRunningProcesses=mps,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(free=100, used=7, total=107),
        NVMLError_NotSupported=NotSupported,
        NVMLError_GpuIsLost=Lost,
        NVMLError_ResetRequired=Lost,
    )
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    assert NvmlMeter("GPU-1").look() == GpuUse(100, {1: 10, 3: 30})
    assert NvmlMeter("GPU-2").look() == GpuUse(100, {1: 10})

    def fall_off_the_bus(handle: str) -> None:
        raise Lost("GPU is lost")

    fake.nvmlDeviceGetMemoryInfo = fall_off_the_bus
    with pytest.raises(GpuLost, match="GPU-1 is lost to the driver: GPU is lost"):
        NvmlMeter("GPU-1").look()


def test_of_a_lost_gpu_nothing_is_left_to_place_on(device: memory.Device) -> None:
    class Gone:
        def look(self) -> GpuUse:
            raise GpuLost("GPU-1 is lost")

    with pytest.raises(GpuLost):
        MemoryWatch(device, Gone()).look(0.0)
    assert device.foreign_bytes() == device.capacity_bytes and device.free_bytes() == 0
