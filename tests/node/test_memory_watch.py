"""What the agent sees of other programs' memory reaches the controller and the metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from prism import memory
from prism.core.ids import DeviceId, NodeId
from prism.core.settings import GpuSettings
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.fake import FakePool
from prism.memory.outside import MARGIN_BYTES, GpuUse
from prism.node.agent import AgentMachine, NodeAgent
from prism.obs.metrics import Metrics
from prism.store.connect import open_store
from prism.wire.mailbox import Inbox

GIB = 1 << 30
DEVICE = DeviceId("n/host:0")
SPEC = DeviceSpec(DEVICE, NodeId("n"), DeviceKind.HOST, 70 * GIB, page_bytes=2 << 20, engine_bytes=2 * GIB)


@dataclass
class Gpu:
    """Of 80 GiB."""

    free_bytes: int = 80 * GIB
    fails: bool = False

    def look(self) -> GpuUse:
        if self.fails:
            raise RuntimeError("the driver is being replaced")
        return GpuUse(self.free_bytes, {})


async def test_strangers_make_the_device_smaller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    device = memory.open_device("host:0", SPEC.memory_bytes, account_dir=tmp_path)
    gpu, store = Gpu(), open_store("memory://")
    with Inbox(f"ipc://{tmp_path}/agent") as inbox:
        machine = AgentMachine(
            NodeId("n"), (SPEC,), {DEVICE: device}, {}, GIB, {DEVICE: memory.MemoryWatch(device, gpu)}
        )
        pool = FakePool()
        agent = NodeAgent(machine, GpuSettings(), pool, store, inbox, Metrics())
        await agent._look_at_memory()
        (status,) = agent.report().devices
        assert (status.capacity_bytes, status.free_bytes) == (69 * GIB, 70 * GIB), "parked engines are no room"
        assert status.engine_bytes == 2 * GIB
        gpu.free_bytes = 30 * GIB
        await agent._look_at_memory()
        (status,) = agent.report().devices
        taken = 40 * GIB + MARGIN_BYTES
        assert (status.capacity_bytes, status.free_bytes) == (69 * GIB - taken, 70 * GIB - taken)
        gpu.fails = True
        with caplog.at_level(logging.WARNING):
            await agent._look_at_memory()
            await agent._look_at_memory()
        assert "the driver is being replaced" in caplog.text
        assert len(caplog.records) == 1, "said once, not every second"
        assert device.foreign_bytes() == taken, "what was seen last stands"
        agent.outbox.close()
        await pool.close()
    await store.aclose()
