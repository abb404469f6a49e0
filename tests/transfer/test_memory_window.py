"""Bytes that are no weights go the same way: over memory of the host, into memory of a device, passed on as they
come."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prism import memory
from prism.policy.multicast.planner import PlanRequest, plan
from prism.transfer.errors import PeerError
from prism.transfer.incoming import IncomingWindow
from prism.transfer.memory_window import MemoryWindow, MemoryWindows
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.server import TransferServer
from prism.transfer.session import NodePlan, node_plans

SECRET, NAME, LEAF = b"secret", "kv/request-7", 64 << 10
NBYTES = 37 * LEAF + 1234


class Machine:
    """A server and the windows that it offers."""

    def __init__(self, node: str) -> None:
        self.windows = MemoryWindows()
        self.by_source: dict[str, tuple[int, float]] = {}
        """Of what was received last."""
        self.server = TransferServer(self.windows, "127.0.0.1:0", SECRET, node)

    def receive(self, part: NodePlan, on_leaf: Callable[[int, memoryview], None] | None = None) -> MemoryWindow:
        peer = PeerConnection("n0", part.addresses["n0"], SECRET, part.node, 5.0)
        landing = MemoryWindow.described(peer.describe(NAME), on_leaf)
        peer.close()
        self.windows.offer(NAME, landing)
        incoming = IncomingWindow(self.server, part, landing)
        for leaf in range(landing.cut.leaves):
            while not incoming.await_leaf(leaf, 0.1):
                assert incoming.failed is None and not incoming.stopped
        incoming.close()
        self.by_source = incoming.progress.by_source
        return landing


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    made = [Machine(f"n{i}") for i in range(3)]
    yield made
    for machine in made:
        machine.server.close()


@pytest.fixture
def content(machines: list[Machine]) -> bytes:
    """Offered by the first machine."""
    data = np.random.default_rng(5).bytes(NBYTES)
    machines[0].windows.offer(NAME, MemoryWindow.over(memoryview(bytearray(data)), LEAF))
    return data


def parts_of(machines: list[Machine]) -> dict[str, NodePlan]:
    names = [m.server.node for m in machines]
    chosen = plan(PlanRequest((names[0],), tuple(names[1:]), NBYTES, blocks=4))
    return node_plans(chosen, "session", NAME, {m.server.node: m.server.address for m in machines})


def test_what_is_no_pack_arrives_and_is_passed_on(machines: list[Machine], content: bytes) -> None:
    parts = parts_of(machines)
    machines[0].server.join_session(parts["n0"])
    chained = msgspec.structs.replace(parts["n2"], receives=tuple(("n1", piece) for piece in range(4)))
    assert bytes(machines[1].receive(parts["n1"]).data) == content
    assert bytes(machines[2].receive(chained).data) == content
    assert set(machines[1].by_source) == {"n0"} and "n1" in machines[2].by_source
    assert [sum(nbytes for nbytes, _ in m.by_source.values()) for m in machines[1:]] == [NBYTES, NBYTES]


def test_each_leaf_goes_on_to_a_devices_memory(machines: list[Machine], content: bytes, tmp_path: Path) -> None:
    device = memory.open_device("host:0", capacity_bytes=64 << 20, account_dir=str(tmp_path))
    owner = device.register("receiver")
    region = owner.weight_region(NBYTES)
    region.commit()

    def copy_on(first: int, leaf: memoryview) -> None:
        ctypes.memmove(region.address + first, bytes(leaf), leaf.nbytes)

    machines[1].receive(parts_of(machines)["n1"], copy_on)
    assert ctypes.string_at(region.address, NBYTES) == content
    region.close()
    owner.close()


def test_a_wrong_leaf_is_not_there() -> None:
    whole = MemoryWindow.over(memoryview(bytearray(3 * LEAF)), LEAF)
    assert whole.complete and whole.arrival_map() == b"\1\1\1"
    arrived: list[int] = []
    landing = MemoryWindow.described(whole.description.raw, lambda first, leaf: arrived.append(first))
    landing.data[LEAF] = 1
    assert [landing.accept(leaf) for leaf in range(3)] == [True, False, True]
    assert landing.arrival_map() == b"\1\0\1" and arrived == [0, 2 * LEAF] and not landing.complete


@pytest.mark.parametrize(
    "raw", [b"", b"nonsense", msgspec.msgpack.encode([100, 0, []]), msgspec.msgpack.encode([1, 1, []])]
)
def test_nonsense_describes_no_window(raw: bytes) -> None:
    with pytest.raises(PeerError, match="describes"):
        MemoryWindow.described(raw)


def test_a_window_that_was_withdrawn_is_not_found(machines: list[Machine], content: bytes) -> None:
    machines[0].windows.withdraw(NAME)
    peer = PeerConnection("n0", machines[0].server.address, SECRET, "n1", 5.0)
    assert peer.describe(NAME) == b"" and peer.arrival(NAME).leaves == b""
    peer.close()
