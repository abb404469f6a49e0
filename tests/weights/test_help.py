"""Loads over helpers: processes of other devices stage parts of the weights, and may leave, die or hang at any time."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prism import memory
from prism.kv.settings import DeclaredLinks
from prism.memory.errors import DeviceMemoryError
from prism.weights.errors import LoadCancelled
from prism.weights.loading import chunks as chunks_module
from prism.weights.loading.help_server import help_load
from prism.weights.loading.help_wire import packet_socket
from prism.weights.loading.links import LoadLinks, device_lanes
from prism.weights.loading.loader import load
from prism.weights.packs.format import PackHeader
from prism.weights.store.host_copy import open_copy
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from tests.patience import PATIENCE_S
from tests.weights.conftest import KEY, contents_of, write_pack

SPAWN = multiprocessing.get_context("spawn")
DEVICE_BYTES = 64 << 20
PAGE = 65536


def open_device(directory: Path, name: str) -> memory.Device:
    return memory.open_device(name, DEVICE_BYTES, account_dir=directory, page_bytes=PAGE)


def listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    sock = packet_socket()
    sock.bind(str(path))
    sock.listen()
    return sock


def serve_in_process(directory: Path, path: Path, host_bytes_s: float) -> None:
    """A helper that has the device ``host:1`` and serves one load."""
    device = open_device(directory, "host:1")
    with device.register("helper") as owner, listening(path) as sock:
        load, _ = sock.accept()
        with load:
            help_load(load, owner, lambda nbytes: device_lanes(None, host_bytes_s, nbytes), lambda: "")


@dataclass
class Helper:
    """One in a thread of this process. ``why`` is why it is to leave."""

    directory: Path
    name: str
    host_bytes_s: float = 0.0
    why: str = ""
    staged: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.device = open_device(self.directory, self.name)
        self.owner = self.device.register("helper")
        self.path = self.directory / f"{self.name}.help"
        self._sock = listening(self.path)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                load, _ = self._sock.accept()
            except OSError:
                return
            try:
                with load:
                    lanes: Callable[[int], object] = lambda n: device_lanes(None, self.host_bytes_s, n)  # noqa: E731
                    self.staged.append(help_load(load, self.owner, lanes, self.leaves))  # type: ignore[arg-type]
            except DeviceMemoryError as error:
                self.errors.append(error)

    def leaves(self) -> str:
        return self.why or ("memory is wanted" if self.device.wanted_bytes() > 0 else "")

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive() and not self.errors
        self.owner.close()


@dataclass
class Target:
    """A device that loads a pack of some MiB."""

    directory: Path
    packed: ResidentPack
    owner: memory.Owner
    region: memory.WeightRegion
    links: LoadLinks

    def declare(self, seconds: float) -> None:
        """The target's own link needs so long for all of it."""
        self.links.declared = DeclaredLinks(host=self.header.data_bytes / seconds, peer=4e9)

    @property
    def header(self) -> PackHeader:
        return self.packed.header

    def load(self, **options: object) -> None:
        ctypes.memset(self.region.address, 0xEE, self.region.nbytes)
        load(self.packed, self.region, links=self.links, **options)  # type: ignore[arg-type]
        self.check()

    def check(self) -> None:
        loaded = ctypes.string_at(self.region.address, self.header.data_bytes)
        assert loaded == bytes(self.packed.data)


@pytest.fixture
def target(store: WeightStore, tmp_path: Path) -> Iterator[Target]:
    write_pack(store, contents_of())
    packed = store.get(KEY)
    assert packed is not None
    for leaf in range(packed.header.leaves):
        packed.wait_leaf(leaf)
    owner = open_device(tmp_path, "host:0").register("target")
    region = owner.weight_region(packed.header.data_bytes)
    region.commit()
    target = Target(tmp_path, packed, owner, region, LoadLinks(owner))
    target.declare(0.3)
    yield target
    packed.close()
    owner.close()


@contextmanager
def helping(target: Target, *names: str, rate: float = 1.0) -> Iterator[list[Helper]]:
    """Helpers whose links are ``rate`` times as fast as the target's."""
    helpers = [Helper(target.directory, name, rate * target.links.declared.host) for name in names]
    target.links.helpers = {helper.name: helper.path for helper in helpers}
    try:
        yield helpers
    finally:
        for helper in helpers:
            helper.close()
        for helper in helpers:
            device = helper.device
            assert device.audit().problems == () and device.free_bytes() == DEVICE_BYTES, "memory of a helper was kept"


def test_what_helpers_bring_is_right_and_their_memory_goes_back(target: Target) -> None:
    target.declare(6.0)
    with helping(target, "host:1", "host:2", rate=20.0):
        blocks: list[int] = []
        target.load(on_block=lambda index, block: blocks.append(index))
        assert blocks == list(range(len(target.header.blocks)))
        brought = target.links.helped_bytes
        assert set(brought) == {"host:1", "host:2"}
        assert 0 < sum(brought.values()) < target.header.data_bytes, "the target's own link brought something, too"


def test_helpers_that_are_not_there_or_have_no_room_cost_nothing(target: Target) -> None:
    with helping(target, "host:1") as (helper,):
        helper.owner.reserve(DEVICE_BYTES - PAGE, "kv")
        target.links.helpers = {**target.links.helpers, "host:9": target.directory / "nobody"}
        target.load()
        assert target.links.helped_bytes == {"host:1": 0, "host:9": 0}, "nobody helped"
        helper.owner.release(DEVICE_BYTES - PAGE, "kv")


def test_damage_that_a_helper_finds_is_repaired(target: Target) -> None:
    whole = bytes(target.packed.data)
    copy = open_copy(target.packed.path, writable=True)
    assert copy is not None
    with helping(target, "host:1"):
        for leaf in range(target.header.leaves):  # all of them: the helper meets some
            copy.data[target.header.leaf_range(leaf)[0]] ^= 1
        target.load()
        assert bytes(target.packed.data) == whole
    copy.close()


@contextmanager
def under_way(target: Target, device: memory.Device, **options: object) -> Iterator[threading.Thread]:
    """A load, from when its helper on ``device`` has its ring; at the end it is done and right."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            target.load(**options)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: staging(device) > 0 or not thread.is_alive())
        yield thread
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def staging(device: memory.Device) -> int:
    return sum(owner.staging_bytes for owner in device.stats().owners)


def wait_until(met: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if met():
            return
        pause.wait(0.002)
    raise AssertionError("it did not come about")


@pytest.mark.parametrize(
    "end",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="hanging", marks=pytest.mark.slow)],
)
def test_a_helper_that_dies_or_hangs_in_mid_load_costs_time_only(target: Target, end: signal.Signals) -> None:
    device, path = open_device(target.directory, "host:1"), target.directory / "process.help"
    target.declare(1.0)
    rate = target.header.data_bytes / 3
    process = SPAWN.Process(target=serve_in_process, args=(target.directory, path, rate))
    process.start()
    try:
        wait_until(path.exists)
        target.links.helpers = {"host:1": path}
        with under_way(target, device):
            assert process.pid is not None
            os.kill(process.pid, end)
    finally:
        process.kill()
        process.join(PATIENCE_S)
    device.reap()
    assert device.free_bytes() == DEVICE_BYTES and device.audit().problems == ()
    assert target.owner.held("staging") == 0


def test_a_helper_whose_memory_is_wanted_gives_it_back_at_once(target: Target) -> None:
    target.declare(6.0)
    cancel = threading.Event()
    with helping(target, "host:1") as (helper,), helper.device.register("wants") as wants:
        with pytest.raises(LoadCancelled), under_way(target, helper.device, cancel=cancel):
            wants.reserve(DEVICE_BYTES, "kv", timeout_s=PATIENCE_S)
            cancel.set()  # the load was still under way, or it would not be cancelled
        wants.release(DEVICE_BYTES, "kv")
        target.declare(0.1)
        target.load()


def test_a_load_that_is_cancelled_leaves_nothing_with_its_helper(target: Target) -> None:
    target.declare(6.0)
    cancel = threading.Event()
    with (
        helping(target, "host:1") as (helper,),
        pytest.raises(LoadCancelled),
        under_way(target, helper.device, cancel=cancel),
    ):
        cancel.set()


def test_what_is_copied_from_a_ring_that_was_taken_away_does_not_count(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that was stopped for a while goes on copying from a ring whose memory is another's by now."""
    monkeypatch.setattr("prism.weights.loading.help_server._LET_GO_S", 0.05)
    with helping(target, "host:1") as (helper,):

        class Late:
            def copy(self, source: int, at: int, nbytes: int) -> None:
                helper.why = "a test"
                wait_until(lambda: staging(helper.device) == 0)
                ctypes.memset(at, 0, nbytes)

        monkeypatch.setattr("prism.weights.loading.loader.device_peer", lambda gpu, rate: Late())
        target.load()
        assert target.links.helped_bytes == {"host:1": 0}


def test_what_a_helper_is_late_with_is_taken_from_it_and_counts_once(target: Target) -> None:
    now_s = [0.0]
    helper = chunks_module.WayBooks()
    books = chunks_module.Chunks(target.packed, target.header.leaf_bytes, [helper], clock=lambda: now_s[0])
    first, own = books.take_for(helper), books.take()
    assert first is not None and own
    now_s[0] = 0.01
    books.brought(books.own, own)
    while chunk := books.take():
        books.brought(books.own, chunk)
    assert books.take_late() and not books.take(), "it has time"
    now_s[0] = 1.0
    assert books.take_late() and books.take() == first and not books.keeps(helper, first)
    books.brought(helper, first)
    assert helper.brought_bytes == 0 and first[0] not in books.done
    books.brought(books.own, first)
    assert not books.take_late() and len(books.done) == target.header.leaves and books.over_for(helper)
