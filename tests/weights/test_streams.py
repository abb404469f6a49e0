"""Bytes on one connection: sent from the shared pages, taken as they come, asked for again on a new connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from prism.transfer.auth import admit_client
from prism.transfer.frames import Data, Done, Get, expect, recv_exactly, recv_frame, send_frame
from prism.transfer.outgoing import OutgoingSession
from prism.transfer.peer_connection import PeerConnection, PullTerms
from prism.weights.exchange.pack_windows import window_name
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from tests.patience import PATIENCE_S
from tests.weights.conftest import KEY, contents_of, write_pack

SECRET = b"secret"
WINDOW = window_name(KEY)


@pytest.fixture
def packed(store: WeightStore) -> Iterator[ResidentPack]:
    write_pack(store, contents_of(8, 250_000))
    made = store.get(KEY)
    assert made is not None
    with made:
        for leaf in range(made.header.leaves):
            made.wait_leaf(leaf)
        yield made


def test_any_range_is_sent_as_it_is(packed: ResidentPack) -> None:
    first, end = 12_345, packed.header.data_bytes - 77
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        sender = threading.Thread(target=packed.send, args=(ours, first, end))
        sender.start()
        assert recv_exactly(theirs, end - first) == bytes(packed.data[first:end])
        sender.join()


def test_a_receiver_that_takes_nothing_is_given_up(packed: ResidentPack) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.05)
        with pytest.raises(TimeoutError, match="took nothing"):
            packed.send(ours, 0, packed.header.data_bytes)


def test_a_slow_link_is_not_taken_for_a_dead_peer() -> None:
    """Fewer bytes come within ``dead_s`` than the reader wants to be woken for, but some do."""
    dead_s, content = 1.0, bytes(range(250)) * 800
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            admit_client(sock, SECRET, "n0", ("tcp",))
            assert isinstance(recv_frame(sock), Get)
            send_frame(sock, Data(nbytes=len(content)))
            for at in range(0, len(content), 40_000):
                time.sleep(dead_s / 2)
                sock.sendall(content[at : at + 40_000])
            expect(sock, Done)

    server = threading.Thread(target=serve)
    server.start()
    into, steps = bytearray(len(content)), list[int]()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with listener, closing(PeerConnection("n0", address, SECRET, "n1", dead_s)) as peer:
        peer.request(Get(session="s", window=WINDOW, piece=0, offset=0, nbytes=len(content), node="n1"))
        forever = float("inf")
        window = memoryview(into)
        peer.receive(PullTerms(window, 30_000, 64 << 10, lambda waited_s: False, forever, lambda: None, steps.append))
    server.join()
    assert bytes(into) == content
    ends = {sum(steps[:i]) for i in range(len(steps) + 1)}
    assert {30_000, 30_000 + (64 << 10), 30_000 + (128 << 10)} <= ends, "the reader stops at the end of each leaf"


def test_who_asks_again_has_given_up_the_first_connection(packed: ResidentPack) -> None:
    """The pull that was granted on a connection which has died does not keep its successor waiting."""
    outgoing = OutgoingSession(WINDOW, packed)
    get = Get(session="s", window=WINDOW, piece=0, offset=0, nbytes=1000, node="n1")
    other = Get(session="s", window=WINDOW, piece=1, offset=1000, nbytes=1000, node="n1")
    with outgoing.turn(get, lambda: None):
        waits = outgoing.turn(other, lambda: None)
        again = outgoing.turn(get, lambda: None)
        with again as completed:
            completed()
        with waits:
            assert outgoing.waiting == 1
    assert outgoing.waiting == 0


def test_a_pull_that_still_waits_ends_when_it_is_asked_for_again(packed: ResidentPack) -> None:
    outgoing = OutgoingSession(WINDOW, packed)
    busy = Get(session="s", window=WINDOW, piece=0, offset=0, nbytes=1000, node="n1")
    get = Get(session="s", window=WINDOW, piece=1, offset=1000, nbytes=1000, node="n2")
    ended: list[BaseException] = []

    def first() -> None:
        try:
            with outgoing.turn(get, lambda: None):
                pass
        except EOFError as error:
            ended.append(error)

    with outgoing.turn(busy, lambda: None):
        waiter = threading.Thread(target=first)
        waiter.start()
        while outgoing.waiting < 2:
            time.sleep(0.001)
        successor = threading.Thread(target=first)
        successor.start()
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
    successor.join(PATIENCE_S)
    assert not successor.is_alive()
    assert len(ended) == 1
    assert outgoing.waiting == 0
