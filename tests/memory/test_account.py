"""Accounts: attaching, waiting, waking, pressure."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prism import memory
from prism.memory import errors

MIB = 1 << 20


def test_attaching_needs_an_account(tmp_path: Path) -> None:
    with pytest.raises(errors.SystemFailed, match="No such file"):
        memory.open_device("host:0", account_dir=tmp_path)
    memory.open_device("host:0", MIB, account_dir=tmp_path)
    assert memory.open_device("host:0", account_dir=tmp_path).capacity_bytes == MIB


@pytest.mark.parametrize("name", ["gpu:0", "host:", "host:x", "cuda:-1", "host0"])
def test_device_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(errors.BadRequest, match="host:N and cuda:N"):
        memory.open_device(name, MIB, account_dir=tmp_path)


def test_capacity_changes_only_without_owners(tmp_path: Path) -> None:
    device = memory.open_device("host:0", MIB, account_dir=tmp_path)
    owner = device.register("a")
    with pytest.raises(errors.AccountMismatch) as caught:
        memory.open_device("host:0", 2 * MIB, account_dir=tmp_path)
    assert caught.value.numbers["capacity_bytes"] == MIB
    owner.close()
    assert (
        memory.open_device("host:0", 2 * MIB, account_dir=tmp_path).capacity_bytes == 2 * MIB == device.capacity_bytes
    )


def test_a_file_that_is_no_account(tmp_path: Path) -> None:
    (tmp_path / "host-0.account").write_bytes(b"x")
    with pytest.raises(errors.AccountMismatch):
        memory.open_device("host:0", account_dir=tmp_path)


def test_a_half_initialised_account_is_made_anew(tmp_path: Path) -> None:
    """A predecessor died before it wrote the magic number."""
    (tmp_path / "host-0.account").write_bytes(b"\0" * MIB)
    assert memory.open_device("host:0", MIB, account_dir=tmp_path).free_bytes() == MIB


def test_owners_that_left_are_unknown(device: memory.Device) -> None:
    owner = device.register("a")
    owner.close()
    owner.close()
    with pytest.raises(errors.ClosedHandle):
        owner.reserve(1, "kv")
    with pytest.raises(errors.UnknownOwner):
        device.set_limit(owner.id, 5)
    again = device.register("a")
    assert again.id != owner.id


def test_the_table_of_owners_is_finite(device: memory.Device) -> None:
    owners = []
    with pytest.raises(errors.TooManyOwners) as caught:
        owners.extend(device.register(str(i)) for i in range(1000))
    assert caught.value.numbers["owners"] == 128
    for _ in owners:
        owners[0].close()


def test_bad_numbers_are_refused(device: memory.Device) -> None:
    owner = device.register("a")
    for call in (
        lambda: owner.reserve(-1, "kv"),
        lambda: owner.release(-1, "kv"),
        lambda: device.set_limit(owner.id, -1),
    ):
        with pytest.raises(errors.BadRequest):
            call()
    with pytest.raises(errors.BadRequest, match="weights, kv, staging, outside, lent"):
        owner.reserve(1, "heap")  # type: ignore[arg-type]


def test_a_waiter_is_seen_and_woken(device: memory.Device) -> None:
    holder, waiter = device.register("holder"), device.register("waiter")
    holder.reserve(MIB, "kv")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.reserve, MIB // 2, "weights", 60.0)
        while device.wanted_bytes() == 0:
            pass
        assert holder.pressure() == MIB // 2 and waiter.pressure() == 0
        holder.release(MIB // 4, "kv")
        assert holder.pressure() == MIB // 4 and not waiting.done()
        holder.release(MIB // 4, "kv")
        waiting.result(60)
    assert device.wanted_bytes() == 0 and waiter.held("weights") == MIB // 2


def test_a_waiter_gives_up_in_time_and_without_a_trace(device: memory.Device) -> None:
    holder, waiter = device.register("holder"), device.register("waiter")
    holder.reserve(MIB, "kv")
    with pytest.raises(errors.OutOfMemory):
        waiter.reserve(1, "kv", 0.05)
    assert device.wanted_bytes() == 0 == waiter.leased_bytes


def test_no_pressure_below_the_floor(device: memory.Device) -> None:
    """Giving back what is guaranteed anyway would help nobody."""
    holder, waiter = device.register("holder", floor_bytes=MIB // 2), device.register("waiter")
    holder.reserve(MIB // 2 + 4096, "kv")
    waiter.reserve(MIB // 2 - 4096, "kv")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter.reserve, MIB // 4, "kv", 60.0)
        while device.wanted_bytes() == 0:
            pass
        assert holder.pressure() == 4096
        holder.release(4096, "kv")
        assert holder.pressure() == 0
        device.set_limit(waiter.id, MIB // 2)
        with pytest.raises(errors.LimitExceeded):
            waiting.result(60)


def test_a_lowered_limit_stops_growth_and_is_felt(device: memory.Device) -> None:
    owner = device.register("a")
    owner.reserve(1000, "kv")
    device.set_limit(owner.id, 400)
    assert owner.pressure() == owner.excess() == 600
    with pytest.raises(errors.LimitExceeded):
        owner.reserve(0 + 1, "kv")
    device.set_limit(owner.id, None)
    assert owner.limit_bytes is None and owner.pressure() == 0


def test_threads_never_overrun(device: memory.Device) -> None:
    """Eight threads reserve and release; what they were granted never exceeds the device."""
    granted = 0
    lock = threading.Lock()

    def work(owner: memory.Owner) -> None:
        nonlocal granted
        for i in range(300):
            nbytes = MIB // 6 + i
            try:
                owner.reserve(nbytes, "kv")
            except errors.OutOfMemory:
                continue
            with lock:
                granted += nbytes
                assert granted <= MIB
            with lock:
                granted -= nbytes
            owner.release(nbytes, "kv")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [device.register(str(i)) for i in range(8)]))
    assert device.free_bytes() == MIB and not device.audit().problems
