"""Connections between engines of two machines are found and made over their weight servers, for those who know."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from prism.core.ids import DeviceId
from prism.engine.errors import OrderRefused
from prism.node.layers_network import LayersNetwork, LayersOffer, LayersWanted
from prism.transfer.errors import PeerError
from prism.transfer.server import TransferServer
from prism.transfer.windows import WindowSources

WANTED = LayersWanted("m", "a/host:0")


class Machine:
    """A weight server, and what was taken of it."""

    def __init__(self, name: str, secret: bytes = b"fleet") -> None:
        self.server = TransferServer(WindowSources(), "127.0.0.1:0", secret, name)
        self.network = LayersNetwork(self.server)
        self.taken: list[tuple[LayersWanted, socket.socket]] = []
        self.busy: int | None = 0
        """Requests of its engine; None: it has none."""

    def requests(self, wanted: LayersWanted) -> int:
        if self.busy is None:
            raise OrderRefused("no engine here")
        return self.busy

    async def take(self, wanted: LayersWanted, sock: socket.socket) -> DeviceId:
        self.requests(wanted)
        self.taken.append((wanted, sock.dup()))
        return DeviceId(f"{self.server.node}/host:1")


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine, Machine]]:
    made = Machine("a"), Machine("b"), Machine("c")
    yield made
    for machine in made:
        machine.server.close()
        for _, sock in machine.taken:
            sock.close()


async def test_the_least_busy_machine_is_found_and_its_connection_outlives_both_servers(
    machines: tuple[Machine, Machine, Machine],
) -> None:
    a, b, c = machines
    addresses = {m.server.node: m.server.address for m in (b, c)}
    assert await asyncio.to_thread(a.network.least_busy, addresses, WANTED) is None, "nobody offers anything"
    for machine in (b, c):
        machine.network.offer(LayersOffer(machine.requests, machine.take))
    b.busy = 3
    found = await asyncio.to_thread(a.network.least_busy, addresses, WANTED)
    assert found == ("c", c.server.address)
    device, ours = await asyncio.to_thread(a.network.connect, *found, WANTED)
    ((wanted, theirs),) = c.taken
    assert device == "c/host:1" and wanted == WANTED
    a.server.close()
    c.server.close()
    with ours:
        ours.settimeout(5.0)
        theirs.settimeout(5.0)
        ours.sendall(b"to the peer")
        assert theirs.recv(100) == b"to the peer"
        theirs.sendall(b"to the leader")
        assert ours.recv(100) == b"to the leader"


async def test_who_has_no_engine_or_another_secret_gives_no_connection(
    machines: tuple[Machine, Machine, Machine],
) -> None:
    a, b, _ = machines
    b.network.offer(LayersOffer(b.requests, b.take))
    b.busy = None
    assert await asyncio.to_thread(a.network.least_busy, {"b": b.server.address}, WANTED) is None
    with pytest.raises(PeerError, match="no engine here"):
        await asyncio.to_thread(a.network.connect, "b", b.server.address, WANTED)
    b.busy = 0
    stranger = Machine("s", b"another")
    try:
        assert await asyncio.to_thread(stranger.network.least_busy, {"b": b.server.address}, WANTED) is None
    finally:
        stranger.server.close()
    assert not b.taken
