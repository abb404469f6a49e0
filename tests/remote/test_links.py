"""Links between engines: messages arrive whole, nobody blocks, and what is no message closes its own link only."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.remote.handing import PREFIX, hand_over, hand_path
from prism.remote.hub import LinkHub
from prism.remote.link import PeerLink, Received
from prism.remote.messages import HiddenStates, Message, PeerWelcome, Refused, RunPieces
from tests.patience import until

WORK = RunPieces(
    batch=3,
    first=1,
    end=4,
    decode=True,
    rows=[0],
    seq_lens=[5],
    out_slots=[9],
    positions=[4],
    token_ids=[1],
    table_rows=[0],
    table_positions=[4],
    table_slots=[9],
)
MESSAGES: list[Message] = [
    WORK,
    HiddenStates(batch=1),
    Refused(batch=2, reason="no"),
    PeerWelcome(version=1, engine="e", pieces=[1, 2]),
]


class Watched:
    """The descriptors that a hub wants watched."""

    def __init__(self) -> None:
        self.fds: set[int] = set()
        self.hub = LinkHub(self.fds.add, self.fds.remove)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Watched, Watched, PeerLink]]:
    """A hub that listens, another one, and the latter's link to it."""
    server, client = Watched(), Watched()
    server.hub.listen(tmp_path / "s")
    link = client.hub.connect(tmp_path / "s")
    server.hub.pump(0)
    yield server, client, link
    client.hub.close()
    server.hub.close()
    assert server.fds == client.fds == set()
    assert not (tmp_path / "s").exists()


def collect(hub: LinkHub, count: int) -> list[tuple[PeerLink, Received]]:
    found: list[tuple[PeerLink, Received]] = []

    def enough() -> bool:
        found.extend(hub.pump(0))
        return len(found) >= count

    until(enough, "messages")
    return found


def test_both_send_more_than_the_kernel_takes_at_once(ends: tuple[Watched, Watched, PeerLink]) -> None:
    server, client, link = ends
    (back,) = list(server.hub)
    big = memoryview(bytes(range(256)) * (1 << 14))
    for end in (link, back):
        for message in MESSAGES:
            end.send(message, [("uint8", [big.nbytes], big), ("uint8", [0], memoryview(b""))])
    assert link.unsent_bytes
    assert back.unsent_bytes, "nobody waits"
    found: dict[str, list[Received]] = {"server": [], "client": []}

    def all_there() -> bool:
        found["server"] += [r for _, r in server.hub.pump(0)]
        found["client"] += [r for _, r in client.hub.pump(0)]
        return all(len(received) == len(MESSAGES) for received in found.values())

    until(all_there, "all messages on both sides")
    for received in found.values():
        assert [r.message for r in received] == MESSAGES
        assert all(bytes(r.tensors[0][1]) == big and r.tensors[1][1].nbytes == 0 for r in received)
    assert link.unsent_bytes == back.unsent_bytes == 0


def test_what_could_not_be_sent_goes_on_by_itself(ends: tuple[Watched, Watched, PeerLink]) -> None:
    """An engine computes or waits for commands meanwhile: megabytes took one such time for each bufferful."""
    server, client, _ = ends
    (back,) = list(server.hub)
    big = memoryview(bytes(1 << 22))
    for number in range(3):
        back.send(HiddenStates(batch=number), [("uint8", [big.nbytes], big)])
    assert back.unsent_bytes, "the other side takes nothing, and nobody waits for it"
    found = collect(client.hub, 3)
    assert [(r.message, bytes(r.tensors[0][1]) == big) for _, r in found] == [
        (HiddenStates(batch=number), True) for number in range(3)
    ]
    until(lambda: not back.unsent_bytes, "nothing is left to be sent")


def test_who_takes_nothing_holds_up_nobody(ends: tuple[Watched, Watched, PeerLink], tmp_path: Path) -> None:
    """Neither other links, nor the end of the hub."""
    server, client, _ = ends
    other = client.hub.connect(tmp_path / "s")
    server.hub.pump(0)
    stuck, reads = list(server.hub)
    big = memoryview(bytes(1 << 22))
    stuck.send(HiddenStates(batch=1), [("uint8", [big.nbytes], big)])
    reads.send(HiddenStates(batch=2), [("uint8", [big.nbytes], big)])
    found: list[Received] = []

    def there() -> bool:
        found.extend(other.receive())
        return bool(found)

    until(there, "the other answer")
    assert found[0].message == HiddenStates(batch=2)
    assert stuck.unsent_bytes
    server.hub.close()
    assert stuck.closed and not stuck.unsent_bytes


def test_the_end_of_one_side_is_seen_by_the_other(ends: tuple[Watched, Watched, PeerLink]) -> None:
    server, client, link = ends
    (back,) = list(server.hub)
    link.close()
    client.hub.pump(0)
    until(lambda: server.hub.pump(0) == [] and back.closed, "the end")
    assert back.why == "it is gone"
    assert list(server.hub) == []
    back.send(WORK)
    assert back.unsent_bytes == 0, "a closed link takes nothing"


def frame(envelope: bytes, tensors: bytes = b"") -> bytes:
    return struct.pack("<QI", len(envelope) + len(tensors), len(envelope)) + envelope + tensors


GOOD = msgspec.msgpack.encode({"message": {"type": "HiddenStates", "batch": 1}, "tensors": []})
LONG = msgspec.msgpack.encode(
    {"message": {"type": "HiddenStates", "batch": 1}, "tensors": [{"dtype": "x", "shape": [9], "nbytes": 99}]}
)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<QI", 1 << 60, 8),
        struct.pack("<QI", 8, 9),
        struct.pack("<QI", 0, 0),
        frame(b"\xc1\xc1\xc1"),
        frame(msgspec.msgpack.encode({"message": {"type": "Explode"}})),
        frame(GOOD, b"left over"),
        frame(LONG, b"short"),
    ],
    ids=["huge", "envelope-longer", "empty", "no-msgpack", "unknown", "left-over", "short-tensor"],
)
def test_what_is_no_message_closes_its_link_only(
    ends: tuple[Watched, Watched, PeerLink], tmp_path: Path, data: bytes
) -> None:
    server, _, link = ends
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(tmp_path / "s"))
        stranger.sendall(data)
        until(lambda: server.hub.pump(0) == [] and len(list(server.hub)) == 1, "the stranger is gone")
    link.send(WORK)
    ((_, received),) = collect(server.hub, 1)
    assert received.message == WORK


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_noise_never_raises(noise: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = PeerLink(ours)
    theirs.sendall(noise)
    theirs.close()
    link.receive()
    link.receive()
    link.release()
    assert link.closed


def test_nobody_listens(tmp_path: Path) -> None:
    hub = Watched().hub
    with pytest.raises(OSError, match="No such file"):
        hub.connect(tmp_path / "nobody")
    hub.listen(tmp_path / "a")
    hub.listen(tmp_path / "a")
    with pytest.raises(OSError, match="listens at"):
        hub.listen(tmp_path / "b")
    hub.close()


def tcp_ends() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname()[:2])
        return one, listener.accept()[0]


def give(hub: LinkHub, sock: socket.socket, label: str, token: str = "") -> None:
    """As the agent does, while the engine goes on."""
    assert hub.path is not None
    with ThreadPoolExecutor(1) as agent, sock:
        given = agent.submit(hand_over, hub.path, sock, label, token)
        until(lambda: hub.pump(0.01) or given.done(), "the connection being taken")
        given.result()


def test_a_connection_to_another_machine_is_handed_to_both_engines(
    ends: tuple[Watched, Watched, PeerLink], tmp_path: Path
) -> None:
    server, client, _ = ends
    client.hub.listen(tmp_path / "c")
    mine, theirs = tcp_ends()
    give(server.hub, theirs, "a/host:0")
    give(client.hub, mine, "b/host:0", "t")
    with pytest.raises(ConnectionError, match="none was handed over"):
        client.hub.connect(Path(f"{PREFIX}another"))
    link = client.hub.connect(Path(f"{PREFIX}t"))
    assert (link.label, link.peer) == ("b/host:0", "the engine on b/host:0")
    link.send(WORK, [("uint8", [4], memoryview(b"abcd"))])
    ((back, received),) = collect(server.hub, 1)
    assert back.label == "a/host:0" and received.message == WORK and bytes(received.tensors[0][1]) == b"abcd"
    back.send(Refused(batch=3, reason="no"))
    assert collect(client.hub, 1)[0][1].message == Refused(batch=3, reason="no")
    back.close()
    until(lambda: client.hub.pump(0) or link.closed, "the end being seen")
    mine, theirs = tcp_ends()
    with theirs:
        give(client.hub, mine, "b/host:0", "unused")
        client.hub.drop_handed()
        with pytest.raises(ConnectionError, match="none was handed over"):
            client.hub.connect(Path(f"{PREFIX}unused"))
        client.hub.pump(0)
        assert theirs.recv(1) == b"", "it has ended"


def test_who_hands_over_nothing_harms_nobody(ends: tuple[Watched, Watched, PeerLink]) -> None:
    server, _, link = ends
    assert server.hub.path is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(hand_path(server.hub.path)))
        stranger.sendall(b"no descriptor")
        server.hub.pump(0)
        assert stranger.recv(1) == b""
    link.send(WORK)
    assert collect(server.hub, 1)[0][1].message == WORK
