"""A Redis that does not behave: full, a mere copy, slow, emptied behind our back, behind TLS. Real servers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from prism.store.connect import open_store
from prism.store.embedded import EmbeddedServer
from prism.store.interface import Store
from prism.store.values import StoreUnavailable
from prism.wire import keys
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.redis, pytest.mark.hostile]
QUEUE, ME = keys.INACTIVE_QUEUE, "me"


@pytest.fixture
async def store(server: EmbeddedServer) -> AsyncIterator[Store]:
    opened = open_store(server.url, retry_s=PATIENCE_S)
    await command(opened, "FLUSHALL")
    yield opened
    await command(opened, "REPLICAOF", "NO", "ONE")
    await command(opened, "CONFIG", "SET", "maxmemory", "0")
    await opened.aclose()


async def command(store: Store, *words: str) -> Any:
    """What an operator (or somebody else) does to the server."""
    return await store._conn.client.execute_command(*words)  # type: ignore[attr-defined]


async def at_once(what: Any) -> None:
    """It is refused, and not after all the patience that a server which is away gets."""
    with pytest.raises(StoreUnavailable, match="takes no writes"):
        async with asyncio.timeout(PATIENCE_S / 2):
            await what


async def test_full_refuses_new_requests_at_once_and_lets_old_ones_end(store: Store) -> None:
    await store.add(QUEUE, "old", b"data")
    [entry] = await store.read_new([QUEUE], ME, 1, 0.0)
    await command(store, "CONFIG", "SET", "maxmemory", "1")
    await at_once(store.add(QUEUE, "new", b"data"))
    await at_once(store.put_doc("status", "{}"))
    assert await store.done(entry, ME), "what gives memory back is taken"
    assert await store.lengths([QUEUE]) == [0]
    await command(store, "CONFIG", "SET", "maxmemory", "0")
    assert await store.add(QUEUE, "new", b"data") == 1


async def test_a_copy_takes_no_writes_until_it_is_the_original(store: Store) -> None:
    await command(store, "REPLICAOF", "127.0.0.1", "1")
    await at_once(store.add(QUEUE, "r", b"data"))
    await command(store, "REPLICAOF", "NO", "ONE")
    assert await store.add(QUEUE, "r", b"data") == 1


async def test_slow_is_waited_for_and_nothing_happens_twice(store: Store, server: EmbeddedServer) -> None:
    await command(store, "CLIENT", "PAUSE", "700", "ALL")
    added = await asyncio.gather(*(store.add(QUEUE, f"r{i}", b"data") for i in range(20)))
    assert sorted(added) == list(range(1, 21))
    entries = await store.read_new([QUEUE], ME, 100, 0.0)
    assert sorted(e.request_id for e in entries) == sorted(f"r{i}" for i in range(20))


async def test_emptied_behind_our_back_goes_on_with_empty_queues(store: Store) -> None:
    await store.add(QUEUE, "lost", b"data")
    [entry] = await store.read_new([QUEUE], ME, 1, 0.0)
    await command(store, "FLUSHALL")
    assert await store.take_over(QUEUE, ME, idle_s=0.0) == []
    await command(store, "FLUSHALL")
    assert await store.beat(QUEUE, ME) == 0
    await command(store, "FLUSHALL")
    assert await store.done(entry, ME), "it is gone, as was asked"
    await command(store, "FLUSHALL")
    assert not await store.move(entry, ME, keys.device_queue("n/host:0"))
    await command(store, "FLUSHALL")
    assert await store.where(["lost"]) == [None]
    await store.add(QUEUE, "next", b"data")
    found = await store.read_new([QUEUE], ME, 1, 1.0) or await store.read_new([QUEUE], ME, 1, 1.0)
    assert [e.request_id for e in found] == ["next"]


@contextlib.asynccontextmanager
async def with_tls(server: EmbeddedServer, folder: Path) -> AsyncIterator[tuple[int, Path]]:
    """A port that speaks TLS in front of ``server``, and the certificate it shows."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    command = [*made, "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, ahead = await asyncio.open_unix_connection(server.socket_path)
        await asyncio.gather(_pump(reader, ahead), _pump(behind, writer), return_exceptions=True)

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield proxy.sockets[0].getsockname()[1], certificate
    proxy.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_tls_with_a_certificate_of_its_own(server: EmbeddedServer, tmp_path: Path) -> None:
    async with with_tls(server, tmp_path) as (port, certificate):
        store = open_store(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}", retry_s=PATIENCE_S)
        await command(store, "FLUSHALL")
        assert await store.add(QUEUE, "r", b"data") == 1
        assert [e.request_id for e in await store.read_new([QUEUE], ME, 1, 0.0)] == ["r"]
        await store.aclose()
        stranger = open_store(f"rediss://127.0.0.1:{port}/0", retry_s=0.5)
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            await stranger.add(QUEUE, "s", b"data")
        await stranger.aclose()
