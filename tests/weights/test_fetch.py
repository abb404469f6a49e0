"""Machines on loopback: every byte arrives, strangers and nonsense are turned away, damage and loss are got over."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from prism.policy.multicast.planner import Plan, PlanRequest, plan
from prism.policy.multicast.simple import chain
from prism.transfer import patience
from prism.transfer.auth import admit_client, prove_to_server
from prism.transfer.errors import PeerError, SourceLost
from prism.transfer.frames import Data, Frame, Get, GetArrival, Queued, recv_frame, send_frame
from prism.transfer.incoming import PullOptions
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.pull_lanes import DEAD_S
from prism.transfer.reception import Reception
from prism.transfer.server import TransferServer
from prism.transfer.session import NodePlan, cut_pieces, node_plans, piece_bytes
from prism.weights.errors import LoadCancelled
from prism.weights.exchange.pack_fetch import PackFetch, fetch_pack
from prism.weights.exchange.pack_windows import PackWindows, header_of_description, window_name
from prism.weights.packs.format import PackKey
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.host_copy import HostCopy, open_copy
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from tests.patience import PATIENCE_S, until
from tests.weights.conftest import KEY, contents_of, write_pack

SECRET = b"secret"
WINDOW = window_name(KEY)


class Machine(TransferServer):
    """A store, and the server that offers it."""

    def __init__(self, store: WeightStore, node: str) -> None:
        super().__init__(PackWindows(store), "127.0.0.1:0", SECRET, node)
        self.store = store


def begin(machine: Machine, plan: NodePlan, hold: bool = False, dead_s: float = PATIENCE_S) -> PackFetch:
    return PackFetch(machine.store, machine, plan, PullOptions(hold=hold, dead_s=dead_s))


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> float:
    """Nobody is late or slow, however long all stand still: they share a processor. What counts as silence."""
    for name in ("MIN_SLIP_S", "MIN_SLOW_S", "UNKNOWN_S"):
        monkeypatch.setattr(patience, name, PATIENCE_S)
    return PATIENCE_S


def fetch(machine: Machine, plan: NodePlan) -> ResidentPack:
    return fetch_pack(machine.store, machine, plan)


Fleet = Callable[[int], list[Machine]]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Makes n servers n0, n1, ...; n0 has a pack."""
    servers: list[Machine] = []

    def make(count: int) -> list[Machine]:
        for i in range(count):
            store = WeightStore(tmp_path / f"d{i}", host_directory=tmp_path / f"h{i}")
            servers.append(Machine(store, f"n{i}"))
        write_pack(servers[0].store, contents_of(8, 250_000))
        return servers

    yield make
    for server in servers:
        server.close()


def plans(servers: list[Machine], sources: int = 1, pieces: int = 8) -> dict[str, NodePlan]:
    names = tuple(s.node for s in servers)
    chosen = plan(PlanRequest(names[:sources], names[sources:], 1 << 20, blocks=pieces))
    return node_plans(chosen, "session", WINDOW, {s.node: s.address for s in servers})


def whole(server: Machine) -> bytes:
    packed = server.store.get(KEY)
    assert packed is not None
    with packed:
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)
        return bytes(packed.data)


def test_five_machines(fleet: Fleet, unhurried: float) -> None:
    servers = fleet(5)
    parts = plans(servers)
    servers[0].join_session(parts["n0"])
    fetches = [begin(s, parts[s.node], dead_s=unhurried) for s in servers[1:]]
    blocks: list[int] = []
    for running in fetches:
        packed = running.wait(lambda index, block: blocks.append(index))
        assert bytes(packed.data) == whole(servers[0])
        assert running.progress.pieces_done == 8
        assert running.progress.took_s is not None
        assert running.progress.reroutes == []
        packed.close()
    assert blocks == list(range(10)) * 4
    assert sum(servers[0].sent_bytes.values()) < 4 * len(whole(servers[0])), "the source sent everything itself"


def test_without_a_plan_what_is_needed_to_lead_comes_first(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which order pieces are taken: two lanes take them, so that they may arrive in another one."""
    taken, claim = list[int](), Reception.claim_piece

    def noted(reception: Reception, piece: int) -> bool:
        with lock:
            if claimed := claim(reception, piece):
                taken.append(piece)
        return claimed

    lock = threading.Lock()
    monkeypatch.setattr(Reception, "claim_piece", noted)
    source, receiver = fleet(2)
    expected = whole(source)  # all of it is in the source's memory: what it still reads from its disk comes as it does
    addresses = {s.node: s.address for s in (source, receiver)}
    named = {"session": "s", "window": WINDOW, "node": receiver.node, "addresses": addresses, "sources": (source.node,)}
    running = begin(receiver, NodePlan(**named, pieces=16, first=(11, 6)))  # type: ignore[arg-type]
    with running.wait() as packed:
        assert bytes(packed.data) == expected
    assert {*taken[:2]} == {6, 11}, taken
    assert taken[2:] == [piece for piece in range(16) if piece not in (6, 11)]


def test_a_late_joiner_and_a_pull_without_a_plan(fleet: Fleet) -> None:
    servers = fleet(3)
    addresses = {s.node: s.address for s in servers}
    for server in servers[1:]:
        part = NodePlan(session="x", window=WINDOW, node=server.node, addresses=addresses, sources=("n0",), pieces=4)
        with fetch(server, part) as packed:
            assert bytes(packed.data) == whole(servers[0])


def test_the_copy_is_complete_already(fleet: Fleet) -> None:
    servers = fleet(2)
    parts = plans(servers)
    fetch(servers[1], parts["n1"]).close()
    servers[0].close()
    fetch(servers[1], parts["n1"]).close()


def test_a_second_reception_watches_the_first(fleet: Fleet) -> None:
    servers = fleet(2)
    parts = plans(servers)
    first = begin(servers[1], parts["n1"], hold=True)
    second = begin(servers[1], parts["n1"])
    first.start_pulling()
    assert bytes(second.wait().data) == bytes(first.wait().data) == whole(servers[0])


def test_cancelled(fleet: Fleet) -> None:
    servers = fleet(2)
    running = begin(servers[1], plans(servers)["n1"], hold=True)
    running.cancel()
    with pytest.raises(LoadCancelled, match="after 0 of"):
        running.wait()


def test_nobody_has_it(fleet: Fleet) -> None:
    servers = fleet(2)
    part = msgspec.structs.replace(plans(servers)["n1"], window=window_name(PackKey("unknown")))
    with pytest.raises(SourceLost, match="unknown"):
        begin(servers[1], part)


def test_an_unreachable_source_is_routed_around(fleet: Fleet) -> None:
    servers = fleet(4)
    parts = plans(servers)
    servers[2].close()
    others = [begin(s, parts[s.node]) for s in (servers[1], servers[3])]
    for running in others:
        assert bytes(running.wait().data) == whole(servers[0])


def test_a_dead_source_that_nobody_replaces_is_said_once(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prism.transfer.pull_lanes.GIVE_UP_S", 0.3)
    servers = fleet(2)
    write_pack(servers[1].store, contents_of(8, 250_000))  # so that it knows what it asks for
    part = plans(servers)["n1"]
    gone = msgspec.structs.replace(part, addresses={**part.addresses, "n0": "127.0.0.1:1"})
    with pytest.raises(SourceLost, match="no node that can be reached"):
        begin(servers[1], gone).wait()
    assert sum(r.levelname == "WARNING" for r in caplog.records if "routes around n0" in r.getMessage()) == 1


def test_corrupt_memory_at_a_peer_is_fetched_elsewhere(fleet: Fleet, unhurried: float) -> None:
    servers = fleet(3)
    addresses = {s.node: s.address for s in servers}
    fetch(
        servers[1], NodePlan(session="a", window=WINDOW, node="n1", addresses=addresses, sources=("n0",), pieces=4)
    ).close()
    copy = open_copy(next(servers[1].store.host_directory.rglob("*.pack")), writable=True)
    assert copy is not None
    copy.data[1000] ^= 1
    # n2 is told to take everything from n1
    receives = tuple(("n1", piece) for piece in range(4))
    part = NodePlan(
        session="b", window=WINDOW, node="n2", addresses=addresses, sources=("n0",), pieces=4, receives=receives
    )
    running = begin(servers[2], part, dead_s=unhurried)
    assert bytes(running.wait().data) == whole(servers[0])
    assert [(r.piece, r.source, r.reason) for r in running.progress.reroutes] == [(0, "n1", "corrupt")]
    copy.close()


def without_its_end(server: Machine, part: NodePlan, data: bytes) -> tuple[PackFetch, HostCopy]:
    """A reception at ``server`` that is given all but the last leaf, and asks for nothing itself."""
    held = begin(server, part, hold=True)
    copy = open_copy(held.resident.path, writable=True)
    assert copy is not None
    for leaf in range(copy.header.leaves - 1):
        first, end = copy.header.leaf_range(leaf)
        copy.write(first, memoryview(data)[first:end])
        assert copy.accept(leaf)
    server.on_arrived("session")
    return held, copy


def test_a_piece_is_passed_on_while_its_end_still_comes(fleet: Fleet, unhurried: float) -> None:
    """n1 holds all but the last leaf of the only piece; n2 pulls from it, gets that, and the rest when it is here."""
    servers = fleet(3)
    parts, data = plans(servers, pieces=1), whole(servers[0])
    held, copy = without_its_end(servers[1], parts["n1"], data)
    receives = (("n1", 0),)
    running = begin(servers[2], msgspec.structs.replace(parts["n2"], receives=receives), dead_s=unhurried)
    last = copy.header.leaves - 1
    first, end = copy.header.leaf_range(last)
    until(lambda: running.resident.has(range(last)), "what came before the end being usable at once")
    copy.write(first, memoryview(data)[first:end])
    assert copy.accept(last)
    servers[1].on_arrived("session")
    assert bytes(running.wait().data) == data
    assert running.progress.reroutes == []
    copy.close()
    held.cancel()
    held.wait()


def test_a_peer_that_never_gets_the_end_of_a_piece_is_not_asked_for_ever(fleet: Fleet) -> None:
    """n1 lacks the last leaf for good, as when it waits for n2 to send it; only the source has it."""
    servers = fleet(3)
    parts, data = plans(servers, pieces=1), whole(servers[0])
    held, copy = without_its_end(servers[1], parts["n1"], data)
    running = begin(servers[2], msgspec.structs.replace(parts["n2"], receives=(("n1", 0),)), dead_s=DEAD_S)
    assert bytes(running.wait().data) == data
    assert running.progress.pieces_by_source == {"n0": 1}
    copy.close()
    held.cancel()
    with pytest.raises(LoadCancelled):
        held.wait()


def test_the_plan_tells_when_the_first_piece_comes() -> None:
    names = tuple(f"n{i}" for i in range(5))
    chosen = Plan(names, chain(5, 8), 1.0, {})
    parts = node_plans(chosen, "s", WINDOW, dict.fromkeys(names, "127.0.0.1:1"))
    assert [parts[name].first_step for name in names] == [0, 0, 1, 2, 3]


def test_warming_a_connection_leaves_it_as_it_was(fleet: Fleet) -> None:
    server = fleet(1)[0]
    peer = PeerConnection("n0", server.address, SECRET, "me", 5.0)
    peer.open_windows(100_000)
    assert header_of_description(peer.describe(WINDOW), "n0") == server.store.header(KEY)
    peer.close()


def test_the_receiver_is_the_one_who_fills(fleet: Fleet) -> None:
    servers = fleet(2)
    running = begin(servers[1], plans(servers)["n1"], hold=True)
    lock = FillLock(running.resident.path)
    assert not lock.acquire()
    running.start_pulling()
    running.wait()
    assert lock.acquire()
    lock.release()


# --- strangers and nonsense ---


def test_both_sides_prove_the_secret() -> None:
    def talk(client: bytes, server: bytes) -> tuple[object, object]:
        ours, theirs = socket.socketpair()
        found: list[object] = [None, None]

        def serve() -> None:
            with theirs:
                try:
                    found[1] = admit_client(theirs, server, "server", ("tcp",))
                except (PeerError, EOFError, OSError) as error:
                    found[1] = error

        thread = threading.Thread(target=serve)
        thread.start()
        with ours:
            try:
                found[0] = prove_to_server(ours, client, "client").node
            except (PeerError, EOFError) as error:
                found[0] = error
        thread.join()
        return found[0], found[1]

    assert talk(b"same", b"same") == ("server", "client")
    client, server = talk(b"one", b"other")
    assert "secret" in str(client)
    assert isinstance(server, EOFError)


def test_a_client_that_lies_about_the_secret_is_refused(fleet: Fleet) -> None:
    server = fleet(1)[0]
    with socket.create_connection(_address(server)) as sock:
        from prism.transfer.frames import PROTOCOL_VERSION, Challenge, Greeting, Proof, expect

        send_frame(sock, Greeting(node="x", nonce=bytes(32), version=PROTOCOL_VERSION))
        expect(sock, Challenge)
        send_frame(sock, Proof(proof=bytes(32)))
        with pytest.raises(PeerError, match="wrong secret"):
            expect(sock, Data)


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 31), b"\3\0\0\0abc", b""])
def test_nonsense_ends_the_connection_and_nothing_else(fleet: Fleet, nonsense: bytes) -> None:
    servers = fleet(2)
    with socket.create_connection(_address(servers[0])) as sock:
        sock.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):  # closed before everything was read
            sock.sendall(nonsense)
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(1000) == b""
    assert bytes(fetch(servers[1], plans(servers)["n1"]).data) == whole(servers[0])


def test_requests_outside_the_pack_are_refused(fleet: Fleet) -> None:
    server = fleet(1)[0]
    for offset, nbytes in ((-1, 10), (0, 1 << 40), (1 << 40, 1)):
        peer = PeerConnection("n0", server.address, SECRET, "me", 5.0)
        get = Get(session="s", window=WINDOW, piece=0, offset=offset, nbytes=nbytes, node="me")
        peer.request(get)
        with pytest.raises(PeerError, match="outside"):
            peer._await_data(nbytes, lambda waited_s: waited_s > 60.0)
        peer.close()


def test_an_answer_that_is_no_question_is_refused(fleet: Fleet) -> None:
    server = fleet(1)[0]
    peer = PeerConnection("n0", server.address, SECRET, "me", 5.0)
    send_frame(peer._sock, Queued(held=True))
    with pytest.raises((EOFError, ConnectionError)):
        peer.arrival(WINDOW)
    peer.close()


def test_frames_round_trip() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames: list[Frame] = [GetArrival(window=WINDOW), Data(nbytes=5), Queued(held=False)]
        for frame in frames:
            send_frame(ours, frame)
        assert [recv_frame(theirs) for _ in frames] == frames


def test_random_bytes_are_no_frame() -> None:
    for _ in range(50):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            body = os.urandom(20)
            ours.sendall(struct.pack("<I", len(body)) + body)
            with pytest.raises(PeerError, match="no frame"):
                recv_frame(theirs)


def test_pieces_cover_the_data_area_once(fleet: Fleet) -> None:
    header = fleet(1)[0].store.header(KEY)
    assert header is not None
    for pieces in (1, 3, 16, header.leaves, 2 * header.leaves):
        at = 0
        for leaves in cut_pieces(header.cut, pieces):
            offset, nbytes = piece_bytes(header.cut, leaves)
            if nbytes:
                assert offset == at
                at += nbytes
        assert at == header.data_bytes


def _address(server: Machine) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)
