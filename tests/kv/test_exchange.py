"""KV goes to another machine over the weights' transport, and is found there by its tokens."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest

from prism.kv import exchange
from prism.kv.exchange import LIST, OFFER, HeldPiece, fetch_kv
from prism.kv.host_pool import HostPool
from prism.kv.keeper import KvKeeper
from prism.kv.piece_file import PieceBytes
from prism.transfer.errors import PeerError, SourceLost
from prism.transfer.incoming import IncomingWindow
from prism.transfer.peer_connection import PeerConnection
from tests.kv.nodes import SECRET, KvNode
from tests.kv.rows import ArrayRows
from tests.kv.stored import forget, stored, writing
from tests.patience import PATIENCE_S

WEIGHTS = "fingerprint sglang/tp1/rank0/float32"
TOKENS = np.random.default_rng(3).integers(0, 1000, 500)
FAST = 1e9


class KvMachine(KvNode):
    """A node, and an engine's rows there."""

    def __init__(self, node: str, folder: Path, bound: int = 1 << 24) -> None:
        super().__init__(node, HostPool(folder / node, bound))
        self.rows = ArrayRows((2048, 512), 600, seed=len(node))
        self.keeper = self.engine()

    def engine(self, prefill: float = 1.0) -> KvKeeper:
        made = KvKeeper(self.pool, WEIGHTS, prefill)
        made.attach(self.rows)
        return made


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[KvMachine, KvMachine]]:
    made = KvMachine("one", tmp_path), KvMachine("another", tmp_path)
    yield made
    for machine in made:
        machine.server.close()


def test_what_one_machine_kept_is_found_on_another(machines: tuple[KvMachine, KvMachine]) -> None:
    one, two = machines
    there = np.arange(500)
    one.keeper.keep(TOKENS, there, "", 0, 60.0)
    one.keeper.keep(TOKENS[:90], there[:90], "an adapter", 0, 60.0)
    came = fetch_kv(two.offers, two.server, one.holder, "fingerprint", FAST, 1 << 24)
    assert came == one.pool.use().file_bytes == two.pool.use().file_bytes
    assert two.keeper.reach(TOKENS, "", 0) == 500 and two.keeper.reach(TOKENS, "an adapter", 0) == 90
    assert two.keeper.fetch(TOKENS, "", 0, 500, there[::-1].copy()) == 500
    assert two.rows.at(there[::-1]) == one.rows.at(there)
    assert fetch_kv(two.offers, two.server, one.holder, "fingerprint", FAST, 1 << 24) == 0, "it is here"
    assert fetch_kv(one.offers, one.server, two.holder, "fingerprint", FAST, 1 << 24) == 0
    assert one.offers.windows._by_name == {} == two.offers.windows._by_name
    assert not one.server._windows and not two.server._windows


def test_only_what_is_worth_it_and_fits(machines: tuple[KvMachine, KvMachine]) -> None:
    one, two = machines
    one.keeper.keep(TOKENS, np.arange(500), "", 0, 60.0)
    each = one.pool.use().file_bytes // one.pool.use().pieces
    assert fetch_kv(two.offers, two.server, one.holder, "others", FAST, 1 << 24) == 0
    assert fetch_kv(two.offers, two.server, one.holder, "fingerprint", 1.0, 1 << 24) == 0, "a link of 1 byte/s"
    came = fetch_kv(two.offers, two.server, one.holder, "fingerprint", FAST, 4 * each)
    assert 0 < came <= 4 * each


def test_pieces_that_are_gone_are_left_out(machines: tuple[KvMachine, KvMachine]) -> None:
    one, _ = machines
    one.keeper.keep(TOKENS, np.arange(500), "", 0, 60.0)
    (space,) = one.pool.spaces("fingerprint")
    held = [HeldPiece(space, p.name.split("/")[1], p.nbytes) for p in one.pool.pieces(space)]
    forget(one.pool, stored(one.pool, 0)[0])
    peer = PeerConnection(*one.holder, SECRET, "another", 5.0)
    _, sizes = msgspec.msgpack.decode(peer.ask(OFFER, msgspec.msgpack.encode(held), 5.0))
    assert sorted(zip(sizes, (h.file for h in held), strict=True))[0][0] == 0 and sizes.count(0) == 1
    assert peer.ask(LIST, msgspec.msgpack.encode(("nobody's", "another")), 5.0) == msgspec.msgpack.encode([])
    peer.close()


@pytest.mark.parametrize("file", ["../../etc/passwd", "000000-" + "g" * 32, "0-" + "0" * 32, "books"])
def test_nothing_else_is_sent(machines: tuple[KvMachine, KvMachine], file: str) -> None:
    one, _ = machines
    peer = PeerConnection(*one.holder, SECRET, "another", 5.0)
    with pytest.raises(PeerError, match="no piece"):
        peer.ask(OFFER, msgspec.msgpack.encode([HeldPiece("0" * 32, file, 10)]), 5.0)
    peer.close()


def ask_and_die(folder: Path, holder: tuple[str, str]) -> None:
    """An agent that is killed in the middle of the third piece that it stores."""
    two = KvMachine("another", folder)
    count = itertools.count(1)

    def writing(part: memoryview) -> Callable[[PieceBytes], None]:
        def write(place: PieceBytes) -> None:
            data = np.frombuffer(part, dtype=np.uint8)
            if next(count) == 3:
                place.write(data[: len(data) // 2], 0)
                os.kill(os.getpid(), signal.SIGKILL)
            place.write(data, 0)

        return write

    exchange._writing = writing
    fetch_kv(two.offers, two.server, holder, "fingerprint", FAST, 1 << 24)


def hold_and_die(folder: Path, tell: Connection) -> None:
    """An agent that is killed while it puts together what it was asked for."""
    one = KvMachine("one", folder)
    one.keeper.keep(TOKENS, np.arange(500), "", 0, 60.0)
    one.offers._read = lambda held: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, return-value]
    tell.send(one.holder)
    signal.pause()


def test_an_agent_that_is_killed_while_it_brings_kv_leaves_whole_pieces_only(
    machines: tuple[KvMachine, KvMachine], tmp_path: Path
) -> None:
    one, two = machines
    one.keeper.keep(TOKENS, np.arange(500), "", 0, 60.0)
    agent = multiprocessing.get_context("spawn").Process(target=ask_and_die, args=(tmp_path, one.holder))
    agent.start()
    agent.join(PATIENCE_S)
    assert agent.exitcode == -signal.SIGKILL
    assert writing(two.pool) == 1, "by the dead one"
    use = two.pool.use()
    assert use.pieces == 2 and use.booked_bytes == use.file_bytes
    assert not writing(two.pool)
    came = fetch_kv(two.offers, two.server, one.holder, "fingerprint", FAST, 1 << 24)
    assert came == one.pool.use().file_bytes - use.file_bytes, "the next one brings the others"
    assert two.keeper.fetch(TOKENS, "", 0, 500, np.arange(500)) == 500
    assert two.rows.at(np.arange(500)) == one.rows.at(np.arange(500)) and two.keeper.corrupt_pieces == 0
    one.offers._forget(time.monotonic() + 1)
    assert one.offers.windows._by_name == {}, "what the dead one had asked for is forgotten in time"


def test_what_came_before_its_holder_was_lost_is_used(
    machines: tuple[KvMachine, KvMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = machines
    one.keeper.keep(TOKENS, np.arange(500), "", 0, 60.0)
    whole = exchange._await

    def lost(incoming: IncomingWindow, leaf: int, node: str) -> None:
        if leaf == 2:
            raise SourceLost("in the middle")
        whole(incoming, leaf, node)

    monkeypatch.setattr(exchange, "_await", lost)
    with pytest.raises(SourceLost):
        fetch_kv(two.offers, two.server, one.holder, "fingerprint", FAST, 1 << 24)
    use = two.pool.use()
    assert 0 < use.pieces < one.pool.use().pieces and use.booked_bytes == use.file_bytes
    reached = two.keeper.reach(TOKENS, "", 0)
    assert reached == 64 * use.pieces, "what is used first came first"
    assert two.keeper.fetch(TOKENS, "", 0, reached, np.arange(reached)) == reached
    assert two.rows.at(np.arange(reached)) == one.rows.at(np.arange(reached))
    assert two.pool.spaces("fingerprint") == one.pool.spaces("fingerprint"), "and others can ask for it here"
    assert one.offers.windows._by_name == {} == two.offers.windows._by_name


def test_a_holder_that_is_killed_in_the_middle_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    two = KvMachine("another", tmp_path)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    agent = context.Process(target=hold_and_die, args=(tmp_path, there))
    agent.start()
    try:
        assert here.poll(PATIENCE_S)
        with pytest.raises((PeerError, SourceLost, OSError, EOFError)):
            fetch_kv(two.offers, two.server, here.recv(), "fingerprint", FAST, 1 << 24)
        agent.join(PATIENCE_S)
        assert agent.exitcode == -signal.SIGKILL
        assert two.pool.use().pieces == two.pool.use().booked_bytes == 0 and two.offers.windows._by_name == {}
    finally:
        agent.kill()
        two.server.close()
