"""The embedded server for real: killed under load, restarted, stopped, orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import whole_model
from prism.core.views import InstanceState
from prism.store.connect import lets_everybody_in, open_store
from prism.store.embedded import EmbeddedServer
from prism.store.interface import Store
from prism.store.values import Replica, StoreError, StoreUnavailable
from prism.wire import keys
from tests.patience import PATIENCE_S, free_port, until

pytestmark = pytest.mark.redis
Q, R = "prism:queue:a", "prism:queue:b"
REQUESTS = 400


async def _produce(store: Store, start: int) -> None:
    for i in range(start, start + REQUESTS // 4):
        await store.add(Q, f"r{i}", b"payload")


async def _consume(store: Store, consumer: str, finished: Counter[str], queues: tuple[str, ...]) -> None:
    """Half of what comes from Q is moved to R, the rest is finished where it stands."""
    while finished.total() < REQUESTS:
        for entry in await store.read_new(queues, consumer, 7, 0.1):
            if entry.queue == Q and int(entry.request_id[1:]) % 2:
                assert await store.move(entry, consumer, R)
            else:
                finished[entry.request_id] += 1
                assert await store.done(entry, consumer)


async def test_nothing_is_lost_or_doubled_when_the_server_is_killed_again_and_again(short_dir: Path) -> None:
    server = EmbeddedServer(short_dir)
    server.start(PATIENCE_S)
    watcher = asyncio.create_task(server.watch())
    producer, first, second = (open_store(server.url, retry_s=PATIENCE_S) for _ in range(3))
    finished: Counter[str] = Counter()

    async def killer() -> None:
        for pause_s in (0.03, 0.11, 0.17, 0.07, 0.23):
            await asyncio.sleep(pause_s)
            if server.pid is not None:
                os.kill(server.pid, signal.SIGKILL)

    work = [_produce(producer, i * REQUESTS // 4) for i in range(4)]
    consumers = [_consume(first, "one", finished, (Q, R)), _consume(second, "two", finished, (R, Q))]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*work, *consumers, killer())
    assert finished == Counter({f"r{i}": 1 for i in range(REQUESTS)})
    assert await producer.lengths([Q, R]) == [0, 0]
    assert server.restarts >= 1
    server.stop()
    await watcher
    for store in (producer, first, second):
        await store.aclose()


async def test_watching_placement_survives_a_kill(short_dir: Path) -> None:
    server = EmbeddedServer(short_dir)
    server.start(PATIENCE_S)
    watcher = asyncio.create_task(server.watch())
    store = open_store(server.url, retry_s=PATIENCE_S)
    holder = await store.acquire_lease("c", "ipc:///c", 2 * PATIENCE_S)
    assert holder is not None
    changes = store.watch_placement()
    assert (await anext(changes)).model is None
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(changes)).model is None, "after a loss everything has to be read again"
    replica = Replica(
        parts=whole_model([DeviceId("local/host:0")]), state=InstanceState.READY, generation=Generation(1)
    )
    await store.set_placement(ModelName("m"), [replica], holder)
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(changes)).model == "m"
    server.stop()
    await watcher
    await store.aclose()


async def test_a_placement_of_another_version_counts_as_nowhere(short_dir: Path) -> None:
    server = EmbeddedServer(short_dir)
    server.start(PATIENCE_S)
    store = open_store(server.url, retry_s=PATIENCE_S)
    older = '[{"devices":["local/host:0"],"state":"ready","generation":1}]'
    await store._run("hset", keys.PLACEMENT, "m", older)  # type: ignore[attr-defined]
    assert await store.placement() == {"m": []}, "named, so that whoever places models can clear it"
    await store.aclose()
    server.stop()


async def test_entries_are_found_after_an_orderly_restart(short_dir: Path) -> None:
    for round_ in range(2):
        server = EmbeddedServer(short_dir)
        server.start(PATIENCE_S)
        store = open_store(server.url, retry_s=PATIENCE_S)
        await store.add(Q, f"r{round_}", b"")
        await store.aclose()
        server.stop()
    server.start(PATIENCE_S)
    store = open_store(server.url, retry_s=PATIENCE_S)
    assert await store.lengths([Q]) == [2]
    await store.aclose()
    server.stop()


async def test_a_server_that_stays_away_is_an_error_in_time(short_dir: Path) -> None:
    store = open_store(f"unix://{short_dir}/nothing.sock", retry_s=0.3)
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await store.add(Q, "r", b"")
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await store.aclose()


def test_the_server_dies_with_its_parent(short_dir: Path) -> None:
    code = (
        "import sys, time, pathlib; from prism.store.embedded import EmbeddedServer\n"
        f"s = EmbeddedServer(pathlib.Path({str(short_dir)!r})); s.start(); print(s.pid, flush=True); time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def ended() -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    until(ended, f"the end of server {pid} with its parent")


def test_a_path_too_long_for_a_socket_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="shorter state directory"):
        EmbeddedServer(tmp_path / ("x" * 120))


async def test_other_machines_come_in_with_the_password(tmp_path: Path) -> None:
    """That nobody does without it is tested with whole machines (tests/e2e/test_fleet.py)."""
    port = free_port()
    server = EmbeddedServer(tmp_path / "redis", listen=("127.0.0.1", port), password="abcd1234")
    server.start(PATIENCE_S)
    try:
        for url in (server.url, f"redis://:abcd1234@127.0.0.1:{port}"):
            store = open_store(url, retry_s=PATIENCE_S)
            await store.ping()
            await store.aclose()
        assert not await lets_everybody_in(server.url)
    finally:
        server.stop()
    with pytest.raises(ValueError, match="password"):
        EmbeddedServer(tmp_path / "redis", listen=("127.0.0.1", port))
