"""Loads put every verified byte into place, report blocks in order, and stop where they are told."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism.weights.errors import CorruptBlock, LoadCancelled
from prism.weights.loading import cuda_lanes, filling, loader
from prism.weights.loading.gpu_loader import CHUNK_BYTES, load_gpu
from prism.weights.loading.loader import load
from prism.weights.packs.pack_files import pack_name
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.host_copy import open_copy
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier
from tests.weights.conftest import KEY, Contents, contents_of, damage_file, write_pack

Load = Callable[..., None]


class FakeLane:
    """A lane whose device is host memory: what is sent arrives when it is waited for."""

    def __init__(self) -> None:
        self._memory = [ctypes.create_string_buffer(CHUNK_BYTES) for _ in range(2)]
        self.buffers = [ctypes.addressof(m) for m in self._memory]
        self._flying: dict[int, tuple[int, int]] = {}

    def send(self, buffer: int, target: int, nbytes: int) -> None:
        assert buffer not in self._flying, "a buffer was filled again before it was waited for"
        self._flying[buffer] = (target, nbytes)

    def wait(self, buffer: int) -> None:
        target, nbytes = self._flying.pop(buffer)
        ctypes.memmove(target, self.buffers[buffer], nbytes)

    def settle(self) -> None:
        for buffer in list(self._flying):
            self.wait(buffer)


def over_lanes(packed: ResidentPack, destination: bytearray, *args: object) -> None:
    lanes = [FakeLane(), FakeLane()]
    target = ctypes.addressof(ctypes.c_char.from_buffer(destination))
    load_gpu(packed, target, lanes, *args, verify=True)  # type: ignore[arg-type]
    assert not any(lane._flying for lane in lanes)


@pytest.fixture(params=[load, over_lanes], ids=["host", "lanes"])
def loading(request: pytest.FixtureRequest) -> Load:
    return request.param  # type: ignore[no-any-return]


def opened(store: WeightStore) -> ResidentPack:
    packed = store.get(KEY)
    assert packed is not None
    return packed


def test_every_byte_and_every_block_in_order(packed_store: tuple[WeightStore, Contents], loading: Load) -> None:
    store, contents = packed_store
    with opened(store) as packed:
        destination = bytearray(packed.header.data_bytes)
        blocks: list[tuple[int, str]] = []

        def check(index: int, block: object) -> None:
            entry = packed.header.blocks[index]
            blocks.append((index, entry.name))
            mine = [t for t in packed.header.tensors if t.block == index]
            for t in mine:
                at = entry.offset + t.offset
                assert destination[at : at + t.nbytes] == contents[t.name], "a block was reported before it was there"

        loading(packed, destination, check)
        assert blocks == list(enumerate(b.name for b in packed.header.blocks))
        assert bytes(destination) == bytes(packed.data)


def test_a_small_destination_is_refused(packed_store: tuple[WeightStore, Contents]) -> None:
    with opened(packed_store[0]) as packed, pytest.raises(ValueError, match="needs"):
        load(packed, bytearray(100))


def test_a_read_only_destination_is_refused(packed_store: tuple[WeightStore, Contents]) -> None:
    with opened(packed_store[0]) as packed, pytest.raises(ValueError, match="read-only"):
        load(packed, bytes(packed.header.data_bytes))


def test_cancelled_at_a_block_boundary(packed_store: tuple[WeightStore, Contents], loading: Load) -> None:
    cancel = threading.Event()
    with opened(packed_store[0]) as packed:
        seen: list[int] = []

        def stop(index: int, block: object) -> None:
            seen.append(index)
            if index == 1:
                cancel.set()

        destination = bytearray(packed.header.data_bytes)
        try:
            loading(packed, destination, stop, cancel)
        except LoadCancelled as error:
            assert error.blocks_done == len(seen) >= 2
        else:  # everything was in place before the event was looked at
            assert len(seen) == len(packed.header.blocks)


def test_cancelled_while_waiting_for_bytes(packed_store: tuple[WeightStore, Contents], loading: Load) -> None:
    store, _ = packed_store
    header = store.header(KEY)
    assert header is not None
    lock = FillLock(store.make_host_copy(header))
    assert lock.acquire()  # nothing will arrive
    cancel = threading.Event()
    threading.Timer(0.1, cancel.set).start()
    with opened(store) as packed, pytest.raises(LoadCancelled, match="after 0 of"):
        loading(packed, bytearray(header.data_bytes), None, cancel)
    lock.release()


def test_a_corrupt_block_is_named_and_not_reported(store: WeightStore, loading: Load) -> None:
    write_pack(store, contents_of())
    with opened(store) as packed:
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)
        store.rm(KEY, (Tier.DISK,))
        copy = open_copy(packed.path, writable=True)
        assert copy is not None
        copy.data[packed.header.blocks[3].offset + 70_000] ^= 1  # behind the back of the arrival map
        reported: list[int] = []
        with pytest.raises(CorruptBlock, match="layer2"):
            loading(packed, bytearray(packed.header.data_bytes), lambda index, block: reported.append(index))
        assert 3 not in reported
        copy.close()


def test_memory_damage_is_repaired_from_disk(packed_store: tuple[WeightStore, Contents], loading: Load) -> None:
    store, _ = packed_store
    with opened(store) as packed:
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)
        whole = bytes(packed.data)
        copy = open_copy(packed.path, writable=True)
        assert copy is not None
        copy.data[70_000] ^= 1
        destination = bytearray(packed.header.data_bytes)
        loading(packed, destination)
        assert bytes(destination) == whole
        copy.close()


def test_on_the_way_to_a_gpu_nothing_is_verified_twice(
    packed_store: tuple[WeightStore, Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrived was verified then; the checksum of every byte would be most of what an activation costs."""

    def forbidden(data: object) -> int:
        raise AssertionError("a leaf was verified again")

    with opened(packed_store[0]) as packed:
        for leaf in range(packed.header.leaves):
            packed.wait_leaf(leaf)
        monkeypatch.setattr(filling.xxhash, "xxh3_64_intdigest", forbidden)
        destination = bytearray(packed.header.data_bytes)
        lanes = [FakeLane() for _ in range(3)]
        load_gpu(packed, ctypes.addressof(ctypes.c_char.from_buffer(destination)), lanes)
        assert bytes(destination) == bytes(packed.data)


class RecordingCuda:
    """As much of CuPy as lanes use, with CUDA's rule: a stream that does not wait for others may copy only once the
    device has done what it was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.torch_writes = True
        self.keep: list[ctypes.Array[ctypes.c_char]] = []
        self.runtime = SimpleNamespace(memcpyAsync=self._copy, memcpyHostToDevice=1)
        cuda = self

        class Device:
            def __init__(self, gpu: int) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...
            def synchronize(self) -> None:
                cuda.torch_writes = False

        class Stream:
            ptr = 7

            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking

            def synchronize(self) -> None:
                cuda.calls.append("settle")

        class Event:
            def __init__(self, disable_timing: bool) -> None: ...
            def record(self, stream: Stream) -> None: ...
            def synchronize(self) -> None: ...

        self.Device, self.Stream, self.Event = Device, Stream, Event

    def alloc_pinned_memory(self, nbytes: int) -> SimpleNamespace:
        self.calls.append("pin")
        self.keep.append(ctypes.create_string_buffer(nbytes))
        return SimpleNamespace(ptr=ctypes.addressof(self.keep[-1]))

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert not self.torch_writes, "copied over what torch still writes"
        ctypes.memmove(target, source, nbytes)


def test_lanes_are_opened_once_and_wait_for_what_torch_still_does(
    packed_store: tuple[WeightStore, Contents], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = RecordingCuda()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cuda_lanes, "_OPEN", {})
    monkeypatch.setattr(loader, "gpu_of", lambda destination: 0)
    lanes = cuda_lanes.warm_lanes(0)
    assert len(lanes) == cuda_lanes.LANES and cuda.calls.count("pin") == 2 * len(lanes)
    with opened(packed_store[0]) as packed:
        for _ in range(2):
            cuda.torch_writes = True
            destination = bytearray(packed.header.data_bytes)
            load(packed, destination)
            assert bytes(destination) == bytes(packed.data)
        assert cuda.calls.count("pin") == 2 * len(lanes), "nothing is pinned during an activation"
        cancel = threading.Event()
        cancel.set()
        before = cuda.calls.count("settle")
        with pytest.raises(LoadCancelled):
            load(packed, bytearray(packed.header.data_bytes), None, cancel)
        assert cuda.calls.count("settle") == before + len(lanes), "buffers of a load that failed may still be read"


def test_blocks_are_used_while_others_arrive(packed_store: tuple[WeightStore, Contents], loading: Load) -> None:
    store, _ = packed_store
    header = store.header(KEY)
    assert header is not None
    data = (store.directory / pack_name(KEY)).read_bytes()[-header.data_bytes :]
    path = store.make_host_copy(header)
    lock = FillLock(path)
    assert lock.acquire()
    filling = open_copy(path, writable=True)
    assert filling is not None
    reported: list[int] = []

    def slowly() -> None:
        for leaf in range(header.leaves):
            if leaf == header.leaves // 2:
                deadline = time.monotonic() + 10
                while not reported and time.monotonic() < deadline:
                    time.sleep(0.001)
            first, end = header.leaf_range(leaf)
            filling.data[first:end] = data[first:end]
            assert filling.accept(leaf)

    thread = threading.Thread(target=slowly)
    thread.start()
    with opened(store) as packed:
        destination = bytearray(header.data_bytes)
        loading(packed, destination, lambda index, block: reported.append(index))
        assert bytes(destination) == data
    thread.join()
    filling.close()
    lock.release()


def test_a_truncated_model_is_an_error(store: WeightStore, tmp_path: Path) -> None:
    write_pack(store, contents_of())
    damage_file(store.directory / pack_name(KEY), lambda data: data.__delitem__(slice(-100, None)))
    with pytest.raises(Exception, match="not a usable weight pack"):
        store.get(KEY)
