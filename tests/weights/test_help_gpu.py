"""Loading over helpers on GPUs, as far as stand-ins tell: two of them by the fake driver, whose memory faults where it
is not mapped or may not be reached, and CuPy that checks what is copied where."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from prism import memory
from prism.weights.loading import cuda_lanes, help_ways, loader
from prism.weights.loading.gpu_loader import CHUNK_BYTES
from prism.weights.loading.help_server import help_load
from prism.weights.loading.help_wire import packet_socket
from prism.weights.loading.links import LoadLinks, device_lanes
from prism.weights.loading.loader import load
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore
from tests.memory.drivers import HOST_PAGE_BYTES, FakeCuda, build_fake
from tests.patience import PATIENCE_S
from tests.weights.conftest import KEY, contents_of, write_pack

DEVICE_BYTES = 512 * HOST_PAGE_BYTES


@dataclass
class TwoGpus:
    """CuPy's part: copies, by the GPU whose turn it is, between memory of a kind that is checked."""

    pinned: list[ctypes.Array[ctypes.c_char]] = field(default_factory=list)
    copies: set[tuple[str, int]] = field(default_factory=set)
    own_link: threading.Event = field(default_factory=threading.Event)
    """The target's own link goes on once it is set."""

    def __post_init__(self) -> None:
        here, gpus = threading.local(), self
        self.runtime = SimpleNamespace(memcpyAsync=self._copy, memcpyHostToDevice=1, memcpyDeviceToDevice=3)
        self._here = here

        class Device:
            def __init__(self, gpu: int) -> None:
                self.gpu = gpu

            def __enter__(self) -> None:
                here.gpu = self.gpu

            def __exit__(self, *_: object) -> None:
                here.gpu = None

            def synchronize(self) -> None: ...

        class Stream:
            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking and here.gpu is not None
                self.ptr = here.gpu

            def synchronize(self) -> None: ...

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                self.gpu = here.gpu

            def record(self, stream: Stream) -> None:
                assert stream.ptr == self.gpu, "an event of one GPU on another's stream"

            def synchronize(self) -> None:
                assert self.gpu or gpus.own_link.wait(PATIENCE_S)

        self.Device, self.Stream, self.Event = Device, Stream, Event

    def alloc_pinned_memory(self, nbytes: int) -> SimpleNamespace:
        self.pinned.append(ctypes.create_string_buffer(nbytes))
        return SimpleNamespace(ptr=ctypes.addressof(self.pinned[-1]))

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert stream == self._here.gpu, "another GPU's stream"
        pinned = any(0 <= source - ctypes.addressof(m) <= CHUNK_BYTES - nbytes for m in self.pinned)
        assert pinned == (kind == self.runtime.memcpyHostToDevice), "a kind that the addresses are not of"
        ctypes.memmove(target, source, nbytes)
        self.copies.add(("host" if pinned else "peer", stream))
        if not pinned:
            self.own_link.set()


@pytest.fixture
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCuda]:
    controls = FakeCuda(build_fake(tmp_path_factory.mktemp("fake-cuda")))
    controls.reset()
    yield controls
    assert controls.violations() == 0, controls.last_broken_rule()
    controls.reset()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    found = TwoGpus()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=found))
    monkeypatch.setattr(cuda_lanes, "_OPEN", {})
    monkeypatch.setattr(cuda_lanes, "LANES", 2)
    monkeypatch.setattr(loader, "gpu_of", lambda destination: 0)
    return found


@pytest.fixture
def packed(store: WeightStore) -> Iterator[ResidentPack]:
    write_pack(store, contents_of())
    packed = store.get(KEY)
    assert packed is not None
    for leaf in range(packed.header.leaves):
        packed.wait_leaf(leaf)
    yield packed
    packed.close()


def helped_load(fake: FakeCuda, folder: Path, packed: ResidentPack) -> int:
    """Loads the pack into ``cuda:0`` with ``cuda:1`` as its helper; returns the bytes that came over that."""
    pages = {"page_bytes": HOST_PAGE_BYTES, "cuda_library": str(fake.path)}
    target, other = (memory.open_device(f"cuda:{i}", DEVICE_BYTES, account_dir=folder, **pages) for i in range(2))  # type: ignore[arg-type]
    path = folder / "help"
    with target.register("target") as owner, other.register("helper") as lender, packet_socket() as listening:
        listening.bind(str(path))
        listening.listen()
        before = fake.physical_bytes()

        def serve() -> None:
            sock, _ = listening.accept()
            with sock:
                help_load(sock, lender, lambda nbytes: device_lanes(1, 0.0, nbytes), lambda: "")

        helper = threading.Thread(target=serve, daemon=True)
        helper.start()
        region = owner.weight_region(packed.header.data_bytes, page_bytes=HOST_PAGE_BYTES)
        region.commit()
        links = LoadLinks(owner, helpers={"cuda:1": path})
        load(packed, region, links=links)
        assert ctypes.string_at(region.address, packed.header.data_bytes) == bytes(packed.data)
        helper.join(PATIENCE_S)
        assert not helper.is_alive() and lender.held("staging") == 0
        assert other.free_bytes() == DEVICE_BYTES
        region.close()
        assert fake.physical_bytes() == before and fake.mappings() == 0
    return links.helped_bytes["cuda:1"]


def test_pages_of_a_gpu_that_nvlink_joins_are_mapped_and_copied_from(
    fake: FakeCuda, gpus: TwoGpus, packed: ResidentPack, tmp_path: Path
) -> None:
    fake.set_devices(2, linked=True)
    assert 0 < helped_load(fake, tmp_path, packed) < packed.header.data_bytes
    assert gpus.copies == {("host", 0), ("host", 1), ("peer", 0)}, "each GPU copies what is its own to copy"


def test_a_gpu_whose_memory_cannot_be_mapped_does_not_help(
    fake: FakeCuda, gpus: TwoGpus, packed: ResidentPack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(text: str, *facts: object) -> None:
        said.append(text % facts)
        gpus.own_link.set()

    fake.set_devices(2, linked=False)
    monkeypatch.setattr(help_ways.log, "warning", say)
    assert helped_load(fake, tmp_path, packed) == 0
    assert gpus.copies == {("host", 0)}
    assert len(said) == 1 and "cuda:1 does not help to load: cuda:0: cuMemSetAccess failed" in said[0]
