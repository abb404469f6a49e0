"""Front-door workers that died: said in the store at once, so that agents and the controller stop their requests
without waiting until they were silent for long enough."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from prism.store.interface import Store
from prism.store.values import FRONT_DEAD, StoreUnavailable

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2


class Burial:
    """Of the workers whose mailboxes lie in ``run``; only the supervisor that holds the state directory may say that
    they are dead. One event loop."""

    def __init__(self, run: Path, open_store: Callable[[], Store]) -> None:
        self._run, self._open_store = run, open_store
        self._tasks: set[asyncio.Task[None]] = set()

    async def of_earlier_servers(self, store: Store) -> None:
        """Before any worker is started: all that are announced here are dead; what was buried before is cleared away.
        Raises :class:`StoreUnavailable`."""
        ours = set(self._mailboxes("*"))
        for mailbox, seen_s in (await store.fronts()).items():
            if not mailbox.startswith(f"ipc://{self._run}/") and mailbox not in ours:
                continue
            if seen_s == FRONT_DEAD:
                await store.remove_front(mailbox)
            else:
                await store.bury_front(mailbox)

    def died(self, index: int) -> None:
        """Worker ``index`` ended and its successor is not started yet: the mailboxes that are there are the dead
        one's. Returns at once; the store is told as soon as it takes it."""
        task = asyncio.get_running_loop().create_task(self._bury(self._mailboxes(str(index))))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _mailboxes(self, index: str) -> list[str]:
        """Of the workers that ran here last; those on the network stand in files (:mod:`prism.server.worker`)."""
        sockets = [f"ipc://{socket}" for socket in self._run.glob(f"f{index}-*.ipc")]
        return sockets + [file.read_text() for file in self._run.glob(f"f{index}-*.tcp")]

    async def _bury(self, mailboxes: Sequence[str]) -> None:
        store = self._open_store()
        try:
            for mailbox in mailboxes:
                while True:
                    try:
                        await store.bury_front(mailbox)
                        break
                    except StoreUnavailable as error:
                        log.warning("the death of %s is not said yet: %s", mailbox, error)
                        await asyncio.sleep(RETRY_S)
        finally:
            await store.aclose()

    async def close(self) -> None:
        """Gives up what was not said yet."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
