"""A GPU's fault: what is replaced, what serves on, and what is said when a device is gone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.specs import DeviceKind, DeviceSpec, ModelShape, ModelSpec
from prism.engine import launching, workers
from prism.engine.diagnosis import diagnose
from prism.engine.errors import ActivationCause, CannotActivate
from prism.engine.events import Died
from prism.engine.gpu_faults import concerns_whole_gpu, fatal_code
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.outside import KEPT_FACTOR
from prism.engine.pool import EnginePool
from prism.memory import errors as memory
from prism.memory.errors import is_out_of_memory
from tests.patience import happens

ROOT = Path(__file__).resolve().parents[2]
A, B = DeviceId("n/host:0"), DeviceId("n/host:1")
SHAPE = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1)


class TorchOutOfMemoryError(RuntimeError):
    """As torch's is called."""


TorchOutOfMemoryError.__name__ = "OutOfMemoryError"


def test_what_no_process_survives_is_told_by_its_number() -> None:
    assert fatal_code(memory.DeadDriver("cuda:0: cuMemMap failed", {"cuda_result": 214})) == 214
    assert fatal_code(RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")) == 700
    assert fatal_code(RuntimeError("CUDA error: unspecified launch failure")) == 719
    lost = "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"
    assert fatal_code(RuntimeError(lost)) == 226 and concerns_whole_gpu(226, mps=False)
    assert fatal_code(RuntimeError("CUDA error: hardware stack error")) == 714
    assert fatal_code(RuntimeError("CUDA error: Tensor Memory not completely freed")) == 721
    assert fatal_code(ValueError("nothing of CUDA")) is None
    assert fatal_code(RuntimeError("CUDA error: out of memory")) is None
    try:
        raise ValueError("while loading") from memory.DeadDriver("gone", {"cuda_result": 46})
    except ValueError as error:
        assert fatal_code(error) == 46
    assert concerns_whole_gpu(214, mps=False) and concerns_whole_gpu(700, mps=True)
    assert not concerns_whole_gpu(700, mps=False), "a context of its own dies alone"


def test_a_full_gpu_is_no_memory_whoever_says_so() -> None:
    for error in (
        TorchOutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        memory.OutOfMemory("the account is empty"),
    ):
        assert is_out_of_memory(error) and fatal_code(error) is None
        assert diagnose(error)[0] == ActivationCause.OUT_OF_MEMORY.value
    assert not is_out_of_memory(RuntimeError("size mismatch"))


@pytest.fixture
def folder() -> Iterator[Path]:
    found = Path(tempfile.mkdtemp(prefix="prism-x-"))
    yield found
    shutil.rmtree(found)


@pytest.fixture
def bare_zygote(folder: Path) -> Iterator[Path]:
    socket = folder / "zygote.sock"
    command = [sys.executable, "-m", "prism.engine.zygote", "--kind", "bare", "--socket", str(socket)]
    with subprocess.Popen([*command, "--parent-pid", str(os.getpid())], cwd=ROOT) as process:
        yield socket
        process.kill()


@pytest.fixture
async def pool(folder: Path, bare_zygote: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EnginePool]:
    """Two devices with one parked worker each; no SGLang."""
    monkeypatch.setattr(launching, "WORKER_ENTRY", "tests.engine.stub_worker:main")
    monkeypatch.setattr(workers, "RETRY_S", 0.2)
    monkeypatch.setattr(workers, "mps_runs", lambda: (folder / "mps").exists())
    (folder / "config.json").write_text(json.dumps({}))
    specs = [DeviceSpec(device, NodeId("n"), DeviceKind.HOST, 16 << 20) for device in (A, B)]
    pool = EnginePool(specs, PoolOptions(folder, folder / "accounts", zygote_socket=bare_zygote))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def activate(pool: EnginePool, folder: Path, device: DeviceId, generation: int) -> EngineHandle:
    spec = ModelSpec(ModelName("m"), str(folder), 1.0, 0.1, 1, SHAPE, 0)
    (part,) = whole_model([device])
    return await pool.activate(InstanceKey(spec.name, Generation(generation)), spec, part)


def crash(folder: Path, handle: EngineHandle, code: int) -> None:
    part = folder / "part"
    part.write_text(str(code))
    part.rename(folder / f"crash-{handle.id.split('@')[1].rsplit('-', 1)[0]}")


async def died(handle: EngineHandle) -> Died:
    *_, last = [event async for event in handle.events()]
    assert isinstance(last, Died)
    return last


@pytest.mark.parametrize(("code", "mps", "all_of_it"), [(214, False, True), (700, False, False), (700, True, True)])
async def test_who_is_replaced_with_the_process_at_fault(
    pool: EnginePool, folder: Path, code: int, mps: bool, all_of_it: bool
) -> None:
    if mps:
        (folder / "mps").touch()
    first, second = await activate(pool, folder, A, 1), await activate(pool, folder, A, 2)
    elsewhere = await activate(pool, folder, B, 3)
    await happens(lambda: pool.counts()[A]["parked"] == 1, "a parked worker")
    crash(folder, first, code)
    assert (await died(first)).suspects == ("r",)
    if all_of_it:
        assert (await died(second)).suspects == (), "it did nothing"
    await happens(lambda: pool.counts()[A] == {"starting": 0, "parked": 1, "active": 1 - all_of_it}, "new workers")
    assert second.alive is not all_of_it and elsewhere.alive
    again = await activate(pool, folder, A, 4)
    assert again.alive and pool.faults() == {}


async def test_a_worker_that_starts_slowly_is_not_one_too_many(pool: EnginePool, folder: Path) -> None:
    """Models leave two workers while the third is being started."""
    (folder / "slow-host:0").touch()
    first = await activate(pool, folder, A, 1)
    await happens(lambda: (folder / "waits-host:0").exists(), "another worker being started")
    second = await activate(pool, folder, A, 2)
    await asyncio.gather(first.deactivate(), second.deactivate())
    assert pool.counts()[A] == {"starting": 1, "parked": KEPT_FACTOR, "active": 0}
    (folder / "waits-host:0").unlink()
    await happens(lambda: pool.counts()[A]["starting"] == 0, "its start")
    await happens(lambda: pool.counts()[A]["parked"] == KEPT_FACTOR, "no more parked workers than there may be")


async def test_a_gpu_that_is_gone_is_out_of_service_until_it_is_back(pool: EnginePool, folder: Path) -> None:
    handle, elsewhere = await activate(pool, folder, A, 1), await activate(pool, folder, B, 2)
    broken = folder / "broken-host:0"
    broken.write_text("46")
    crash(folder, handle, 46)
    await died(handle)
    await happens(lambda: A in pool.faults(), "the device's being out of service")
    assert "result 46" in pool.faults()[A]
    with pytest.raises(CannotActivate, match=r"n/host:0 is out of service: .*result 46"):
        await activate(pool, folder, A, 3)
    assert elsewhere.alive and (await activate(pool, folder, B, 4)).alive
    broken.unlink()
    await happens(lambda: pool.faults() == {}, "the device's being back")
    assert (await activate(pool, folder, A, 5)).alive
