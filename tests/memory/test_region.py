"""Weight regions: addresses stay, memory comes and goes."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from prism import memory
from prism.memory import errors
from tests.memory.drivers import CUDA, Bed


def test_address_survives_decommit_and_commit(bed: Bed) -> None:
    owner = bed.device.register("a")
    region = owner.weight_region(10 * bed.page_bytes - 3, page_bytes=2 * bed.page_bytes)
    address = region.address
    assert owner.leased_bytes == 0 == region.committed_bytes
    for content in (b"first", b"other"):
        assert region.commit() == 10 * bed.page_bytes == owner.held("weights")
        bed.write(region.address + region.nbytes - 5, content)
        assert bed.read(address + region.nbytes - 5, 5) == content
        assert region.commit() == 0
        assert region.decommit() == 10 * bed.page_bytes
    assert region.address == address and owner.leased_bytes == 0
    assert not bed.device.audit().problems


def test_parts(bed: Bed) -> None:
    owner = bed.device.register("a")
    region = owner.weight_region(10 * bed.page_bytes, page_bytes=bed.page_bytes)
    assert region.commit(bed.page_bytes + 1) == 2 * bed.page_bytes
    assert region.commit(3 * bed.page_bytes, offset_bytes=bed.page_bytes) == 2 * bed.page_bytes
    bed.write(region.address, b"kept")
    assert region.decommit(2 * bed.page_bytes, offset_bytes=bed.page_bytes // 2) == bed.page_bytes, "whole pages only"
    assert bed.read(region.address, 4) == b"kept"
    with pytest.raises(errors.BadRequest, match="outside"):
        region.commit(11 * bed.page_bytes)


def test_all_or_nothing(bed: Bed) -> None:
    owner = bed.device.register("a", limit_bytes=8 * bed.page_bytes)
    region = owner.weight_region(10 * bed.page_bytes, page_bytes=bed.page_bytes)
    with pytest.raises(errors.LimitExceeded):
        region.commit()
    assert region.committed_bytes == 0 == owner.leased_bytes
    region.commit(8 * bed.page_bytes)
    bed.device.set_limit(owner.id, None)
    rival = bed.device.register("rival")
    rival.reserve(bed.device.free_bytes(), "kv")
    with pytest.raises(errors.OutOfMemory):
        region.commit()
    assert region.committed_bytes == 8 * bed.page_bytes


@contextmanager
def giving_way(pool: memory.Pool) -> Iterator[None]:
    """Meanwhile the pool's owner answers to pressure, as an engine does between its steps."""
    ended = threading.Event()

    def answer() -> None:
        while not ended.wait(0.001):
            pool.give_back(most_bytes=pool.pressure())

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_neighbours_give_way_to_one_that_waits(bed: Bed) -> None:
    """A region and a pool's first block take what a neighbour holds in vain, once that one has seen the pressure."""
    idle = bed.device.register("idle")
    cache = idle.arena(64 * bed.page_bytes).divide(bed.layout(), 500, 30 * bed.page_bytes)
    idle.reserve(bed.device.free_bytes(), "staging")
    owner = bed.device.register("a")
    region = owner.weight_region(4 * bed.page_bytes, page_bytes=bed.page_bytes)
    arena = owner.arena(64 * bed.page_bytes)
    with pytest.raises(errors.OutOfMemory):
        region.commit()
    with giving_way(cache):
        assert region.commit(timeout_s=20) == 4 * bed.page_bytes
    idle.reserve(bed.device.free_bytes(), "staging")  # should it have given more than was missing
    with pytest.raises(errors.OutOfMemory):
        arena.divide(bed.layout(), 500, 4 * bed.page_bytes)
    with giving_way(cache):
        assert arena.divide(bed.layout(), 500, 4 * bed.page_bytes, timeout_s=20).available() > 0
    idle.reserve(bed.device.free_bytes(), "staging")
    with pytest.raises(errors.OutOfMemory):
        owner.weight_region(bed.page_bytes, page_bytes=bed.page_bytes).commit(timeout_s=0.05)
    assert bed.device.audit().problems == ()


def test_tensors_are_views(bed: Bed) -> None:
    if bed.kind == CUDA:
        pytest.importorskip("torch").cuda.init()
    elif bed.kind != "host":
        pytest.skip("torch knows that the fake is no GPU")
    torch = pytest.importorskip("torch")
    owner = bed.device.register("a")
    region = owner.weight_region(3 * bed.page_bytes)
    region.commit()
    tensor = region.tensor(256, (10, 7), torch.bfloat16)
    tensor.fill_(1.0)
    assert tensor.data_ptr() == region.address + 256
    assert bed.read(region.address + 256, 140) == b"\x80\x3f" * 70
    assert region.tensor(256, (), torch.bfloat16).item() == 1.0
    for offset, shape in ((-2, (1,)), (1, (1,)), (3 * bed.page_bytes - 2, (2,))):
        with pytest.raises(errors.BadRequest, match="outside"):
            region.tensor(offset, shape, torch.bfloat16)
    del tensor


def test_streamed_copies() -> None:
    source = np.random.default_rng(0).integers(0, 255, 5000, dtype=np.uint8)
    for start, length in ((0, 5000), (3, 4000), (63, 10), (64, 64), (1, 0)):
        target = np.zeros(5100, dtype=np.uint8)
        at = target.ctypes.data + 7
        memory.stream_copy(at + start, source.ctypes.data, length)
        assert ctypes.string_at(at + start, length) == source[:length].tobytes()
        assert not target[: 7 + start].any() and not target[7 + start + length :].any()
