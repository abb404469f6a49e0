"""The supervisor says at once that a front-door worker is dead, and of nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.store.memory import MemoryStore
from prism.store.values import FRONT_DEAD, StoreUnavailable
from prism.supervisor import burial
from prism.supervisor.burial import Burial


class Away(MemoryStore):
    """A store that is away for the first call."""

    calls = 0

    async def bury_front(self, mailbox: str) -> None:
        self.calls += 1
        if self.calls == 1:
            raise StoreUnavailable("away")
        await super().bury_front(mailbox)

    async def aclose(self) -> None:
        """Others go on using it."""


async def test_the_dead_workers_mailbox_is_buried_and_its_successors_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(burial, "RETRY_S", 0.0)
    store = Away()
    yard = Burial(tmp_path, lambda: store)
    (tmp_path / "f0-old.ipc").touch()
    (tmp_path / "f1-other.ipc").touch()
    yard.died(0)
    (tmp_path / "f0-new.ipc").touch()  # started before the store was told
    while yard._tasks:
        await next(iter(yard._tasks))
    assert await store.fronts() == {f"ipc://{tmp_path}/f0-old.ipc": FRONT_DEAD}
    await yard.close()


async def test_workers_of_an_earlier_server_are_dead_and_those_of_other_machines_are_not(tmp_path: Path) -> None:
    store = MemoryStore()
    mine, elsewhere = f"ipc://{tmp_path}/f0-a.ipc", "tcp://10.0.0.2:7000"
    for mailbox in (mine, elsewhere):
        await store.announce_front(mailbox, 50.0)
    yard = Burial(tmp_path, lambda: store)
    await yard.of_earlier_servers(store)
    assert await store.fronts() == {mine: FRONT_DEAD, elsewhere: 50.0}
    await yard.of_earlier_servers(store)
    assert await store.fronts() == {elsewhere: 50.0}


async def test_a_worker_on_the_network_is_buried_under_its_address(tmp_path: Path) -> None:
    """Its file in the run directory says which mailbox it had."""
    store, address = Away(), "tcp://10.0.0.1:7000"
    store.calls = 1
    (tmp_path / "f0-a.tcp").write_text(address)
    yard = Burial(tmp_path, lambda: store)
    yard.died(0)
    while yard._tasks:
        await next(iter(yard._tasks))
    assert await store.fronts() == {address: FRONT_DEAD}
    await yard.close()
