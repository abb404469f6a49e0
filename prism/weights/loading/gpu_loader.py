"""Copying a pack into a GPU through pinned buffers.

::

    host copy --copy--> pinned buffer 0 --DMA--> target
                        pinned buffer 1              the lane's thread fills one while the other is on its way

A *lane* is a thread with two buffers and a stream (:mod:`prism.weights.loading.cuda_lanes`). One thread copies slower
than the link takes, so there are several; they take chunks in order from one queue. The driver behind a lane is CuPy;
everything else here is host code and tested without a GPU.

Leaves were verified when they arrived in host memory, which is what their mark says
(:mod:`prism.weights.store.host_copy`). They are not verified again unless asked for: the checksum of every byte would
be most of what an activation costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from prism.memory import stream_copy
from prism.weights.errors import CorruptBlock, LoadCancelled
from prism.weights.loading.chunks import Chunks, WayBooks
from prism.weights.loading.filling import checksum, fill
from prism.weights.loading.watching import CancelFlag, Never, OnBlock
from prism.weights.store.resident import ResidentPack

CHUNK_BYTES: Final = 8 << 20
"""Two of these per lane, rounded down to whole leaves. Smaller ones cost Python's time, larger ones pinned memory."""
_IDLE_S: Final = 0.005
"""How often a lane that has nothing to do looks whether helpers are late."""


class Lane(Protocol):
    """One way into the target GPU. Used by one thread."""

    buffers: Sequence[int]
    """Addresses of its pinned buffers, :data:`CHUNK_BYTES` each."""

    def send(self, buffer: int, target: int, nbytes: int) -> None:
        """Starts moving ``nbytes`` from the pinned buffer with that index to device address ``target``."""
        ...

    def wait(self, buffer: int) -> None:
        """Returns when what was sent from that buffer is in the target's memory."""
        ...

    def settle(self) -> None:
        """Returns when nothing is on its way any more, whatever became of it."""
        ...


class Helper(Protocol):
    """Another way into the target (:mod:`prism.weights.loading.help_ways`), with a thread of its own."""

    books: WayBooks

    def run(self, chunks: Chunks, target: int, halted: Callable[[], bool]) -> None:
        """Brings chunks until none is left, ``halted`` says so, or it cannot any more. Raises nothing for what another
        process did; nothing is on its way when it returns."""
        ...


def load_gpu(
    packed: ResidentPack,
    target: int,
    lanes: Sequence[Lane],
    on_block: OnBlock | None = None,
    cancel: CancelFlag | None = None,
    *,
    verify: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    helpers: Sequence[Helper] = (),
) -> None:
    """Copies the data area of ``packed`` to device address ``target`` over ``lanes``, whose buffers hold
    ``chunk_bytes``, and over ``helpers``. ``on_block`` and errors as in
    :func:`prism.weights.loading.loader.load`; without ``verify`` no :class:`CorruptBlock` for what was right when it
    arrived."""
    job = _GpuLoad(
        packed, target, cancel or Never(), verify, Chunks(packed, chunk_bytes, [helper.books for helper in helpers])
    )
    try:
        with ThreadPoolExecutor(len(lanes) + len(helpers), thread_name_prefix="weights-gpu") as pool:
            futures = [pool.submit(job.run, lane) for lane in lanes]
            futures += [pool.submit(helper.run, job.chunks, target, job.halted) for helper in helpers]
            try:
                _report(job, futures, on_block)
            finally:
                job.stop()
        for future in futures:
            future.result()
    finally:
        for lane in lanes:  # the target may be unmapped after a failure, and buffers are used again
            lane.settle()


class _GpuLoad:
    """What the lanes of one load share."""

    def __init__(self, packed: ResidentPack, target: int, cancel: CancelFlag, verify: bool, chunks: Chunks) -> None:
        self.packed, self.target, self.cancel, self._verify, self.chunks = packed, target, cancel, verify, chunks
        self._stopped = False

    def halted(self) -> bool:
        return self._stopped or self.cancel.is_set()

    def stop(self) -> None:
        with self.chunks.changed:
            self._stopped = True
            self.chunks.changed.notify_all()

    def run(self, lane: Lane) -> None:
        flying: list[range | None] = [None] * len(lane.buffers)
        turn = 0
        while not self.halted():
            chunk = self.chunks.take()
            if chunk is None:
                self._land_all(lane, turn, flying)  # what is in place is reported while the rest still arrives
                self.packed.wait_leaf(min(self.chunks.next_leaf, self.packed.header.leaves - 1), self.halted)
                continue
            if not chunk:
                self._land_all(lane, turn, flying)
                if not self.chunks.take_late():
                    break
                with self.chunks.changed:
                    self.chunks.changed.wait(_IDLE_S)
                continue
            self._land(lane, turn, flying)
            self._fill(chunk, lane.buffers[turn])
            start = self.packed.header.leaf_range(chunk[0])[0]
            lane.send(turn, self.target + start, self.packed.header.leaf_range(chunk[-1])[1] - start)
            flying[turn] = chunk
            turn = (turn + 1) % len(lane.buffers)
        self._land_all(lane, turn, flying)

    def _land_all(self, lane: Lane, turn: int, flying: list[range | None]) -> None:
        for buffer in range(len(lane.buffers)):
            self._land(lane, (turn + buffer) % len(lane.buffers), flying)

    def _land(self, lane: Lane, buffer: int, flying: list[range | None]) -> None:
        chunk = flying[buffer]
        if chunk is not None:
            lane.wait(buffer)
            flying[buffer] = None
            self.chunks.brought(self.chunks.own, chunk)

    def _fill(self, chunk: range, buffer: int) -> None:
        """Copies a chunk into a pinned buffer, verified if asked for."""
        header, packed = self.packed.header, self.packed
        if not self._verify:
            fill(packed, chunk, buffer)
            return
        base = header.leaf_range(chunk[0])[0]
        for leaf in chunk:
            first, end = header.leaf_range(leaf)
            found = checksum(packed, leaf)
            if found != header.leaf_sum(leaf) and not packed.repair(leaf):
                raise CorruptBlock(packed.path, header.blocks_in_leaf(leaf), leaf, header.leaf_sum(leaf), found)
            stream_copy(buffer + first - base, packed.address + first, end - first)


def _report(job: _GpuLoad, futures: Sequence[Future[None]], on_block: OnBlock | None) -> None:
    header, chunks = job.packed.header, job.chunks
    for index, block in enumerate(header.blocks):
        wanted = set(header.block_leaves(index))
        with chunks.changed:
            while not wanted <= chunks.done:
                for future in futures:
                    if future.done():
                        future.result()
                if job.cancel.is_set():
                    raise LoadCancelled(index, len(header.blocks))
                chunks.changed.wait(0.02)
        if on_block is not None:
            on_block(index, block)
