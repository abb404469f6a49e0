"""The control channel's framing, whatever pieces the kernel delivers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.engine.frames import MAX_FRAME_BYTES, BadFrame, FrameSocket, Splitter, pack


@given(st.lists(st.binary(max_size=50), max_size=10), st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_frames_survive_any_cutting(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(pack, frames))
    splitter, found, at, turn = Splitter(), [], 0, 0
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        found += list(splitter.feed(stream[at : at + step]))
        at, turn = at + step, turn + 1
    assert found == frames


def test_absurd_lengths_are_refused() -> None:
    with pytest.raises(BadFrame):
        list(Splitter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


@pytest.fixture
def pair() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield FrameSocket(ours), theirs
    ours.close()
    theirs.close()


def test_a_reader_that_does_not_read_never_blocks_the_writer(pair: tuple[FrameSocket, socket.socket]) -> None:
    channel, peer = pair
    frames = [bytes([i]) * 100_000 for i in range(30)]
    for frame in frames:
        channel.send(frame)
    assert channel.unsent_bytes > 0
    splitter, found = Splitter(), []
    while len(found) < len(frames):
        found += list(splitter.feed(peer.recv(1 << 20)))
        channel.flush()
    assert found == frames
    assert channel.unsent_bytes == 0


def test_a_peer_that_left_closes_the_channel(pair: tuple[FrameSocket, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(pack(b"last"))
    peer.close()
    assert channel.receive() == [b"last"]
    assert channel.closed
    channel.send(b"nobody reads this")
