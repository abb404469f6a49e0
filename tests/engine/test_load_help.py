"""Engines whose weights come over another virtual device's link, too: from a worker that is parked there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prism.engine.handle import EngineHandle
from prism.kv.settings import DeclaredLinks, KvSettings, write_kv_settings
from tests.engine.rig import DEVICE_BYTES, Rig, opened, prompt, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
NAME, OTHER, NEW = "demo-llama", "demo-qwen3", 8


@pytest.fixture
async def helped(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """Two virtual devices that load over each other's links, with an image of the model in host memory."""
    async with opened(zygote, demo_models, load_helpers=1, kept_models=1) as rig:
        async with rig.engine(NAME) as handle:
            assert not handle.helped_bytes, "no links were declared"
            await right(rig, handle)
        yield rig


def declare(rig: Rig, seconds: float) -> None:
    """A device's own link needs so long for the model's weights."""
    rate = rig.spec(NAME).weight_bytes / seconds
    links = {f"host:{i}": DeclaredLinks(host=rate, peer=100 * rate) for i in range(2)}
    write_kv_settings(rig.folder / "accounts", KvSettings(links=links))


async def right(rig: Rig, handle: EngineHandle) -> None:
    asked = prompt(3)
    name = str(handle.key.model)
    assert await rig.ask(handle, tokenized("", asked, NEW)) == rig.reference(name, asked, NEW)


def staging(rig: Rig, device: int) -> int:
    return sum(owner.staging_bytes for owner in rig.pool.memory[rig.devices[device]].stats().owners)


def all_free(rig: Rig) -> bool:
    return rig.free_bytes(0) == rig.free_bytes(1) == DEVICE_BYTES


async def test_weights_that_came_over_another_device_give_the_same_tokens(helped: Rig) -> None:
    declare(helped, 4.0)
    for device in (0, 1):  # the first again, as it was kept; the second from the image
        async with helped.engine(NAME, device) as handle:
            helper = helped.devices[1 - device]
            assert handle.info.from_image and set(handle.helped_bytes) == {helper}
            assert 0 < handle.helped_bytes[helper] < handle.info.weight_bytes
            await right(helped, handle)
    await happens(lambda: all_free(helped), "all memory to be given back")


@pytest.mark.slow
async def test_a_helper_that_dies_or_is_wanted_in_mid_load_costs_time_only(helped: Rig) -> None:
    declare(helped, 8.0)
    loading = asyncio.create_task(helped.activate(helped.spec(NAME), [helped.devices[0]]))
    await happens(lambda: staging(helped, 1) > 0, "a helper to stage weights")
    (helper,) = [link for link in helped.pool._workers._launcher.links.values() if link.device == helped.devices[1]]
    os.kill(helper.pid, signal.SIGKILL)
    handle = await loading
    await right(helped, handle)
    await handle.deactivate()
    await happens(lambda: all_free(helped), "all memory to be given back")
    await happens(lambda: helped.pool.counts()[helped.devices[1]]["parked"] == 1, "another worker to be parked")

    loading = asyncio.create_task(helped.activate(helped.spec(NAME), [helped.devices[0]]))
    await happens(lambda: staging(helped, 1) > 0, "a helper to stage weights")
    async with helped.engine(OTHER, 1) as other:  # the helper itself is to serve this one
        assert staging(helped, 1) == 0 and not loading.done()
        await right(helped, other)
        handle = await loading
        await asyncio.gather(right(helped, handle), right(helped, other))
        await handle.deactivate()
    await happens(lambda: all_free(helped), "all memory to be given back")
