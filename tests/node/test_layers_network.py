"""Connections between engines of two machines are found and made over their weight servers, for those who know."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.engine.errors import OrderRefused
from prism.node import layers_network
from prism.node.layers_network import HeldPieces, LayersNetwork, LayersOffer, LayersWanted
from prism.node.news import News
from prism.transfer.errors import PeerError
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.server import TransferServer
from prism.transfer.windows import WindowSources
from tests.patience import PATIENCE_S, happens

WANTED = LayersWanted("m", "a/host:0")


class Machine:
    """A weight server, and what was taken of it."""

    def __init__(self, name: str, secret: bytes = b"fleet") -> None:
        self.server = TransferServer(WindowSources(), "127.0.0.1:0", secret, name)
        self.network = LayersNetwork(self.server)
        self.taken: list[tuple[LayersWanted, socket.socket]] = []
        self.pieces: list[int] | None = [0, 1, 2]
        """Of its engine; None: it has none."""
        self.news = News()

    def held(self, wanted: LayersWanted) -> list[HeldPieces]:
        key, device = InstanceKey(ModelName(wanted.model), Generation(ord(self.server.node))), f"{self.server.node}/x"
        here = self.pieces is not None
        return [HeldPieces(key=key, device=device, pieces=self.pieces or [], led_pieces=0, requests=3)] * here

    def offer(self) -> LayersOffer:
        return LayersOffer(self.held, self.news.next, self.take)

    async def take(self, wanted: LayersWanted, sock: socket.socket) -> DeviceId:
        if not self.held(wanted):
            raise OrderRefused("no engine here")
        self.taken.append((wanted, sock.dup()))
        return DeviceId(f"{self.server.node}/host:1")


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine, Machine]]:
    made = Machine("a"), Machine("b"), Machine("c")
    yield made
    for machine in made:
        machine.network.close()
        machine.server.close()
        for _, sock in machine.taken:
            sock.close()


async def test_who_has_which_pieces_is_found_and_its_connection_outlives_both_servers(
    machines: tuple[Machine, Machine, Machine],
) -> None:
    a, b, c = machines
    addresses = {m.server.node: m.server.address for m in (b, c)}
    assert await asyncio.to_thread(a.network.holders, addresses, WANTED) == [], "nobody offers anything"
    for machine in (b, c):
        machine.network.offer(machine.offer())
    b.pieces = [0, 3]
    found = await asyncio.to_thread(a.network.holders, addresses, WANTED)
    assert [(x.node, x.address, x.held) for x in found] == [
        (m.server.node, m.server.address, *m.held(WANTED)) for m in (b, c)
    ]
    device, ours = await asyncio.to_thread(a.network.connect, found[1], WANTED)
    ((wanted, theirs),) = c.taken
    assert device == "c/host:1" and wanted == msgspec.structs.replace(WANTED, key=found[1].held.key)
    a.server.close()
    c.server.close()
    with ours:
        ours.settimeout(PATIENCE_S)
        theirs.settimeout(PATIENCE_S)
        ours.sendall(b"to the peer")
        assert theirs.recv(100) == b"to the peer"
        theirs.sendall(b"to the leader")
        assert ours.recv(100) == b"to the leader"


async def test_a_connection_is_used_again_while_it_lives(
    machines: tuple[Machine, Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for its pipeline asks five times a second."""
    a, b, _ = machines
    b.network.offer(b.offer())
    made: list[PeerConnection] = []
    connection = a.network._connection

    def counted(node: str, address: str) -> PeerConnection:
        made.append(connection(node, address))
        return made[-1]

    monkeypatch.setattr(a.network, "_connection", counted)
    for number in (1, 1, 2):
        if number == 2:
            made[0].close()
        found = await asyncio.to_thread(a.network.holders, {"b": b.server.address}, WANTED)
        assert [x.held for x in found] == b.held(WANTED) and len(made) == number


async def test_who_waits_for_a_piece_is_told_when_it_is_there(
    machines: tuple[Machine, Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again and again it would be known a while later, and each question would be one beside the weights."""
    monkeypatch.setattr(layers_network, "HELD_BACK_S", 60.0)
    monkeypatch.setattr(layers_network, "ASK_S", 120.0)
    a, b, _ = machines
    b.network.offer(b.offer())
    told: list[list[int]] = []
    watching = asyncio.create_task(
        a.network.watch("b", b.server.address, WANTED, lambda found: told.append(found[0].held.pieces))
    )
    await happens(lambda: len(told) == 1, "what it has now")
    for pieces in ([0, 1, 2, 3], [0, 1, 2, 3, 4]):
        b.news.tell()  # of something else
        b.pieces = pieces
        b.news.tell()
        await happens(lambda p=pieces: told[-1] == p, "the piece that came")  # type: ignore[misc]
    assert told == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    watching.cancel()
    b.pieces = None
    b.news.tell()  # whoever still waits for an answer has it


async def test_who_has_no_engine_or_another_secret_gives_no_connection(
    machines: tuple[Machine, Machine, Machine],
) -> None:
    a, b, _ = machines
    b.network.offer(b.offer())
    (found,) = await asyncio.to_thread(a.network.holders, {"b": b.server.address}, WANTED)
    b.pieces = None
    assert await asyncio.to_thread(a.network.holders, {"b": b.server.address}, WANTED) == []
    with pytest.raises(PeerError, match="no engine here"):
        await asyncio.to_thread(a.network.connect, found, WANTED)
    b.pieces = [0]
    stranger = Machine("s", b"another")
    try:
        assert await asyncio.to_thread(stranger.network.holders, {"b": b.server.address}, WANTED) == []
    finally:
        stranger.network.close()
        stranger.server.close()
    assert not b.taken


def test_a_question_that_comes_when_the_loop_has_ended_is_refused_and_leaves_nothing_behind(
    machines: tuple[Machine, Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that has stopped takes work and never begins it: the coroutine would be complained about when it is
    collected."""
    a, b, _ = machines

    async def offer() -> None:
        b.network.offer(b.offer())

    with (
        closing(asyncio.new_event_loop()) as loop,
        closing(a.network._connection("b", b.server.address)) as connection,
    ):
        loop.run_until_complete(offer())
        monkeypatch.setattr(layers_network, "ASK_S", 0.1)
        with pytest.raises(PeerError, match="stops"):
            connection.ask(layers_network.TOPIC, msgspec.msgpack.encode(WANTED), 30.0)
    gc.collect()


async def test_a_machine_that_does_not_answer_is_left_alone_for_a_while(
    machines: tuple[Machine, Machine, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = machines
    b.network.offer(b.offer())
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, and says nothing
        host, port = silent.getsockname()
        addresses = {"b": b.server.address, "silent": f"{host}:{port}"}
        monkeypatch.setattr(layers_network, "ASK_S", 0.2)
        found = await asyncio.to_thread(a.network.holders, addresses, WANTED)
        assert [x.node for x in found] == ["b"]
        monkeypatch.setattr(layers_network, "ASK_S", 1e9)
        found = await asyncio.to_thread(a.network.holders, addresses, WANTED)
        assert [x.node for x in found] == ["b"]
