"""A zygote that is killed is replaced by one that was warm already. The zygotes here import nothing (kind ``bare``):
what matters is who takes whose place."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from prism.engine.errors import EngineSetupError
from prism.engine.zygote import STANDBY_TITLE, TITLE
from prism.engine.zygote_client import ZygoteClient, another, promote
from prism.supervisor.children import python_module
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.engine


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a unix socket path has 107 bytes at most."""
    folder = Path(tempfile.mkdtemp(prefix="prism-z-"))
    yield folder
    for process in zygotes(folder):
        process.kill()
    shutil.rmtree(folder)


def zygotes(folder: Path, title: str = "") -> list[psutil.Process]:
    """Those whose output goes to ``folder``; of this title."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            ours = Path(f"/proc/{process.pid}/fd/1").readlink() == folder / "out"
            if ours and process.status() != psutil.STATUS_ZOMBIE and " ".join(process.cmdline()).startswith(title):
                found.append(process)
    return found


async def the(folder: Path, title: str) -> psutil.Process:
    """The one process with this title, once it is there."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := zygotes(folder, title)) != 1:
            await asyncio.sleep(0.02)
    return found[0]


def starter(folder: Path) -> Callable[[], object]:
    arguments = ["--socket", str(folder / "z.sock"), "--kind", "bare", "--parent-pid", str(os.getpid())]
    return python_module("prism.engine.zygote", [*arguments, "--standby", str(folder / "s.sock")], folder / "out")


async def forks(folder: Path) -> None:
    """The zygote at the socket forks children."""
    exits: asyncio.Queue[int] = asyncio.Queue()
    client = ZygoteClient(folder / "z.sock", on_exit=lambda pid, status: exits.put_nowait(pid))
    await client.connect(PATIENCE_S)
    pid = await client.fork("builtins:repr", {})
    async with asyncio.timeout(PATIENCE_S):
        assert await exits.get() == pid
    await client.close()


async def test_the_standby_takes_over_again_and_again(folder: Path) -> None:
    await starter(folder)()  # type: ignore[misc]
    for _ in range(3):
        first, standby = await the(folder, TITLE), await the(folder, STANDBY_TITLE)
        await forks(folder)
        first.kill()
        assert await promote(folder / "s.sock", folder / "z.sock") == standby.pid
        async with asyncio.timeout(PATIENCE_S):
            while (await the(folder, TITLE)).pid != standby.pid:  # the killed one may be seen a moment longer
                await asyncio.sleep(0.02)
        await forks(folder)


async def test_a_standby_that_is_killed_is_forked_anew(folder: Path) -> None:
    await starter(folder)()  # type: ignore[misc]
    standby = await the(folder, STANDBY_TITLE)
    standby.kill()
    async with asyncio.timeout(PATIENCE_S):
        while (await the(folder, STANDBY_TITLE)).pid == standby.pid:
            await asyncio.sleep(0.02)
    await forks(folder)


async def test_without_a_living_standby_nothing_is_promoted(folder: Path) -> None:
    assert await promote(folder / "s.sock", folder / "z.sock") is None
    await starter(folder)()  # type: ignore[misc]
    standby = await the(folder, STANDBY_TITLE)
    (await the(folder, TITLE)).kill()
    standby.send_signal(signal.SIGSTOP)
    assert await promote(folder / "s.sock", folder / "z.sock") is None
    async with asyncio.timeout(PATIENCE_S):
        while zygotes(folder):
            await asyncio.sleep(0.02)


async def test_a_zygote_that_is_told_to_end_takes_its_standby_along(folder: Path) -> None:
    await starter(folder)()  # type: ignore[misc]
    await the(folder, STANDBY_TITLE)
    (await the(folder, TITLE)).terminate()
    async with asyncio.timeout(PATIENCE_S):
        while zygotes(folder):
            await asyncio.sleep(0.02)


async def test_another_zygote_is_forked_and_lives_by_itself(folder: Path) -> None:
    """As a server of the tests has it: what it was forked from may die, and it is in its own session."""
    await starter(folder)()  # type: ignore[misc]
    first = await the(folder, TITLE)
    await forks(folder)
    other = folder / "other"
    other.mkdir()
    arguments = ["--socket", str(other / "z.sock"), "--kind", "bare", "--parent-pid", str(os.getpid())]
    pid = await another(folder / "z.sock", arguments, other / "out")
    first.kill()
    await forks(other)
    assert os.getsid(pid) == pid != first.pid
    psutil.Process(pid).terminate()


async def test_another_zygote_ends_with_whom_it_serves(folder: Path) -> None:
    await starter(folder)()  # type: ignore[misc]
    await forks(folder)
    served = await asyncio.create_subprocess_exec("sleep", "1000")
    arguments = ["--socket", str(folder / "o.sock"), "--kind", "bare", "--parent-pid", str(served.pid)]
    pid = await another(folder / "z.sock", arguments, folder / "o.out")
    process = psutil.Process(pid)
    served.kill()
    await served.wait()
    async with asyncio.timeout(PATIENCE_S):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def test_no_zygote_to_fork_another_from_is_said(folder: Path) -> None:
    with pytest.raises(EngineSetupError, match=r"no zygote at .*z\.sock: No such file"):
        await another(folder / "z.sock", [], folder / "out")
