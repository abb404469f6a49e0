"""Which GPUs a process may use, against a stand-in for NVML that knows four of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prism.memory import gpus
from prism.memory.gpus import Gpu, GpuSet, NoDriver, gpus_if_any, read_gpus, visible_order

UUIDS = ["GPU-aa00", "GPU-aa11", "GPU-bb22", "GPU-cc33"]


class NvmlError(Exception):
    pass


class NotSupported(NvmlError):
    pass


class NotFound(NvmlError):
    pass


@dataclass
class FakeNvml:
    """The calls that are used, under NVML's names; GPUs 0 and 1 are linked, 2 has a mode, 3 is divided."""

    mode: int = 0
    initialised: int = 0

    NVMLError, NVMLError_NotSupported, NVMLError_LibraryNotFound = NvmlError, NotSupported, NotFound
    NVML_DEVICE_MIG_ENABLE, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 1, 2, 0
    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED = 0, 2

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self.initialised -= 1

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13020

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "a GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=1000 + handle, used=10)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [9, 0]

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"0000FFFF:0{handle}:00.0")

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, caps: int) -> int:
        if 3 in (first, second):
            raise NotSupported
        return 0 if {first, second} == {0, 1} and caps == 2 else 5

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle == 0:
            raise NotSupported
        return [int(handle == 3), 0]

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.mode if handle == 2 else 0


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # an engine of another test hides all
    return fake


@pytest.mark.parametrize(
    ("listed", "order"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , GPU-cc ", [1, 3]),
        ("GPU-aa", []),  # begins two
        ("GPU-aa1,GPU-bb22", [1, 2]),
        ("0,9,1", [0]),
        ("-1", []),
        ("0,MIG-1,1", [0]),
        ("1,1", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(listed: str | None, order: list[int]) -> None:
    assert visible_order(listed, UUIDS) == order


def test_numbers_are_those_of_cuda(nvml: FakeNvml) -> None:
    found = read_gpus({"CUDA_VISIBLE_DEVICES": "GPU-aa11,2,0"}, mps=False)
    assert found.cuda_version == (13, 2) and nvml.initialised == 0
    assert [(g.index, g.uuid, g.memory_bytes, g.used_bytes) for g in found.gpus] == [
        (0, "GPU-aa11", 1001, 10),
        (1, "GPU-bb22", 1002, 10),
        (2, "GPU-aa00", 1000, 10),
    ]
    assert [g.nvlinks for g in found.gpus] == [(2,), (), (0,)]
    assert found.memory_bytes == {0: 1001, 1: 1002, 2: 1000} and not found.refused


def test_what_cannot_be_shared_is_refused_with_words(nvml: FakeNvml) -> None:
    assert set(read_gpus({}, mps=False).refused) == {3}
    assert "MIG" in read_gpus({}, mps=False).refused[3]
    nvml.mode = 3
    assert "one process" in read_gpus({}, mps=False).refused[2]
    assert 2 in read_gpus({}, mps=True).memory_bytes, "the daemon is that one process"
    nvml.mode = 2
    assert "prohibits" in read_gpus({}, mps=True).refused[2]


def test_islands_of_nvlink(nvml: FakeNvml) -> None:
    assert read_gpus({}, mps=False).islands == (frozenset({0, 1}),)
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, mps=False).islands == ()


def test_islands_reach_over_others() -> None:
    def gpu(index: int, *links: int) -> Gpu:
        return Gpu(index, f"GPU-{index}", "a GPU", 1, 0, (9, 0), None, links, "")

    chain = GpuSet((13, 0), (gpu(0, 4), gpu(1, 3), gpu(2), gpu(3, 1, 4), gpu(4, 0, 3), gpu(5, 6), gpu(6, 5)))
    assert chain.islands == (frozenset({0, 1, 3, 4}), frozenset({5, 6}))


@pytest.mark.parametrize(
    ("names", "daemons"),
    [
        (["bash"], 0),
        (["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"], 1),
        (["nvidia-cuda-mps-control"] * 2 + ["nvidia-cuda-mps-server"] * 5, 2),
        (["nvidia-cuda-mps"] * 3, 1),  # cut, as the kernel keeps them
    ],
)
def test_daemons_of_mps_are_processes_not_pipes(
    names: list[str], daemons: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps-of-a-dead-daemon")
    processes = [SimpleNamespace(info={"name": name}) for name in names]
    monkeypatch.setattr(gpus.psutil, "process_iter", lambda attrs: iter(processes))
    assert gpus.mps_daemons() == daemons and gpus.mps_runs() == bool(daemons)


def test_the_node_near_a_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "_numa_node", lambda nvml, handle: handle % 2)
    assert gpus.numa_node_of(1) == 1 and gpus.numa_node_of(9) is None


def test_without_a_driver(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NotFound

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    with pytest.raises(NoDriver, match="not installed"):
        read_gpus({})
    assert gpus_if_any().gpus == ()
