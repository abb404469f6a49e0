"""One zygote for all engine tests; each test has its own pool, devices and front door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prism.kv.host_pool import HostPool
from tests import warm
from tests.engine.long_tiers import host_tiers
from tests.engine.rig import Rig, opened
from tests.engine.wide import make_wide_model


@pytest.fixture(scope="session")
def zygote() -> Path:
    """Socket of a warm zygote that all tests share."""
    return warm.zygote()


@pytest.fixture
async def rig(zygote: Path, demo_models: Path) -> AsyncIterator[Rig]:
    """Two virtual devices of 128 MiB with an engine pool, and a front door's mailbox."""
    async with opened(zygote, demo_models) as rig:
        yield rig


@pytest.fixture
async def tiers(rig: Rig) -> AsyncIterator[HostPool]:
    """The machine's pool, in which prompts that are larger than their device may be."""
    with host_tiers(rig.folder / "accounts") as pool:
        yield pool


@pytest.fixture
def wide_model(tmp_path: Path, demo_models: Path) -> Path:
    """See :func:`tests.engine.wide.make_wide_model`."""
    return make_wide_model(demo_models, tmp_path / "wide-llama")
