"""One zygote for all engine tests; each test has its own pool, devices and front door."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prism.kv.host_pool import HostPool
from tests.engine.long_tiers import host_tiers
from tests.engine.rig import Rig, opened
from tests.engine.wide import make_wide_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Path]:
    """Socket of a warm zygote that all tests share (``PRISM_TEST_ZYGOTE`` names one that runs already)."""
    if given := os.environ.get("PRISM_TEST_ZYGOTE"):
        yield Path(given)
        return
    folder = Path(tempfile.mkdtemp(prefix="prism-z-"))
    path = folder / "zygote.sock"
    command = [sys.executable, "-m", "prism.engine.zygote", "--socket", str(path), "--parent-pid", str(os.getpid())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    yield path
    process.kill()
    process.wait()
    shutil.rmtree(folder)


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
