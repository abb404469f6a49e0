"""The pool's line to the zygote it forks from: a supervised one, found again after it was replaced, or its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from prism.engine.errors import EngineSetupError
from prism.engine.zygote_client import ZygoteClient

ZYGOTE_S: Final = 300.0
"""A zygote that is not warm after this counts as broken."""


class ZygoteLine:
    """Forks children. ``path``: the socket of a supervised zygote, which its supervisor restarts under the same
    address; None: one of its own at ``own_path``, that ends with :meth:`close`. ``on_exit`` and ``on_gone`` as
    :class:`ZygoteClient` calls them."""

    def __init__(
        self,
        path: Path | None,
        own_path: Path,
        kind: str,
        on_exit: Callable[[int, int], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._path, self._own_path, self._kind = path, own_path, kind
        self._on_exit, self._on_gone = on_exit, on_gone
        self._client = ZygoteClient(own_path)
        self._process: asyncio.subprocess.Process | None = None

    async def connect(self) -> None:
        """Reach or start the zygote. Raises :class:`EngineSetupError`."""
        path = self._path
        if path is None:
            path = self._own_path
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "prism.engine.zygote", "--socket", str(path), "--kind", self._kind),
                *("--parent-pid", str(os.getpid())),
            )
        self._client = ZygoteClient(path, self._on_exit, self._on_gone)
        connecting = asyncio.create_task(self._client.connect(ZYGOTE_S))
        if self._process is not None:
            ended = asyncio.create_task(self._process.wait())
            await asyncio.wait({connecting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                connecting.cancel()
                raise EngineSetupError(f"the zygote ended with status {ended.result()} at its start; see its output")
            ended.cancel()
        await connecting

    async def fork(self, entry: str, args: dict[str, Any], *, title: str, log_file: Path | None) -> int:
        """As :meth:`ZygoteClient.fork`; reaches a zygote that was replaced first."""
        if not self._client.alive:
            await self._client.close()
            await self.connect()
        return await self._client.fork(entry, args, title=title, log_file=log_file)

    async def close(self) -> None:
        """Leave the zygote; end it if it is ours."""
        await self._client.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
