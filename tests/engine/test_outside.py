"""What a worker is granted beside its pages, how torch is held to it, how many parked ones a device bears; NUMA."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism import memory
from prism.engine import numa
from prism.engine.options import PoolOptions
from prism.engine.outside import OutsideMemory, has_room_to_park, hold_torch_to, most_parked
from prism.memory import errors

MIB = 1 << 20


@pytest.fixture
def device(tmp_path: Path) -> memory.Device:
    return memory.open_device("host:0", 100 * MIB, account_dir=tmp_path, page_bytes=65536)


def test_an_engine_is_granted_its_memory_before_it_takes_any(device: memory.Device) -> None:
    with device.register("a") as a, device.register("b") as b:
        outside = OutsideMemory(a, 10 * MIB, 40 * MIB)
        outside.park()
        assert device.free_bytes() == 90 * MIB
        outside.activate(0.0)
        assert device.free_bytes() == 60 * MIB
        b.reserve(55 * MIB, "weights")
        second = OutsideMemory(b, 5 * MIB, 20 * MIB)
        second.park()
        with pytest.raises(errors.OutOfMemory):
            second.activate(0.01)
        assert b.held("outside") == 5 * MIB, "a refused one keeps what it had"
        outside.park()
        second.activate(0.0)
        assert device.free_bytes() == 100 * MIB - 10 * MIB - 75 * MIB


def test_torch_is_held_to_what_the_engine_was_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    calls: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, gpu: calls.append((part, gpu)))
    hold_torch_to(3, 1 << 30, 3 << 30)
    hold_torch_to(0, 0, 200 << 30)
    assert calls == [(2 / 80, 3), (1.0, 0)]


def test_parked_workers_are_fewer_where_memory_is_wanted(tmp_path: Path) -> None:
    options = PoolOptions(tmp_path, tmp_path, parked_per_device=2, parked_bytes=MIB)
    assert most_parked(options, free_bytes=5, wanted_bytes=0) == 4
    assert most_parked(options, free_bytes=5, wanted_bytes=6) == 2
    assert most_parked(PoolOptions(tmp_path, tmp_path, parked_per_device=2), 0, 6) == 4, "they cost the device nothing"
    assert has_room_to_park(options, MIB) and not has_room_to_park(options, MIB - 1)


def test_binding_to_the_node_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in ((0, "0-2,8\n"), (1, "4-5\n"), (2, "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus)
    bound: list[set[int]] = []
    preferred: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(set(cpus)))
    monkeypatch.setattr(numa, "prefer_memory_of", preferred.append)
    assert numa.bind_to_node(0, tmp_path)
    assert not any(numa.bind_to_node(node, tmp_path) for node in (None, 1, 2, 7))
    assert bound == [{1, 2, 8}] and preferred == [0]


def test_memory_is_taken_from_the_node_first() -> None:
    """The kernel's own word, in a child: a policy stays with its process."""
    child = os.fork()
    if child == 0:
        numa.prefer_memory_of(0)
        policy = Path("/proc/self/numa_maps").read_text() if Path("/proc/self/numa_maps").exists() else ""
        os._exit(0 if not policy or "prefer" in policy else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
