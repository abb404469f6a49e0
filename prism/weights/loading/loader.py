"""Copying a pack into the memory of a device, block after block.

The unit of work is a leaf: a worker checksums it (which brings it into its core's cache) and copies it from there with
stores that bypass the cache, so that checking costs little beside the copy (on the way to a GPU it does not:
:mod:`prism.weights.loading.gpu_loader`). Leaves are taken in order by all workers;
a block is reported once all its leaves are in place and every earlier block was reported.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import xxhash

from prism.memory import stream_copy
from prism.weights.errors import CorruptBlock, LoadCancelled
from prism.weights.loading.chunks import chunk_bytes_of
from prism.weights.loading.destination import Destination, address_of, gpu_of
from prism.weights.loading.gpu_loader import CHUNK_BYTES, load_gpu
from prism.weights.loading.help_ways import HelpWay
from prism.weights.loading.help_wire import AskHelp
from prism.weights.loading.links import LoadLinks, device_lanes, device_peer
from prism.weights.loading.watching import CancelFlag, Never, OnBlock
from prism.weights.packs.format import PackHeader
from prism.weights.store.resident import ResidentPack

_WORKERS: Final = max(1, min(4, os.cpu_count() or 1))
"""Two threads saturate the memory of small machines, four that of most sockets."""


def load(
    packed: ResidentPack,
    destination: Destination,
    on_block: OnBlock | None = None,
    cancel: CancelFlag | None = None,
    *,
    workers: int = _WORKERS,
    verify: bool | None = None,
    links: LoadLinks | None = None,
) -> None:
    """Copies the data area of ``packed`` to the start of ``destination``, memory of the host or of a GPU, mapped.

    ``on_block(index, block)`` is called in this thread, in order, as soon as a block is complete and verified. Leaves
    that have not arrived in host memory yet are waited for, so reading from disk overlaps copying. Raises
    :class:`CorruptBlock` (naming the block; no later block was reported), :class:`LoadCancelled` when ``cancel`` was
    set, :class:`SourceLost` when missing leaves stopped coming, and ``ValueError`` for a destination that is too small.

    ``links``: of the destination's device, where it has some; helpers are used if there are any, and ``helped_bytes``
    says how much.

    Every leaf was verified when it arrived in host memory. ``verify``: again now; None: where it costs little beside
    the copy, which is so on the host and not on the way to a GPU.
    """
    header = packed.header
    target, nbytes = address_of(destination)
    if nbytes < header.data_bytes:
        raise ValueError(f"destination has {nbytes} bytes, {header.key} needs {header.data_bytes}")
    gpu = gpu_of(destination)
    if gpu is not None or (links is not None and links.plays):
        _load_over_lanes(packed, target, gpu, on_block, cancel, bool(verify) or (gpu is None and verify is None), links)
        return
    job = _HostLoad(packed, target, cancel or Never(), verify is not False)
    with ThreadPoolExecutor(workers, thread_name_prefix="weights-load") as pool:
        try:
            futures = [pool.submit(job.work) for _ in range(workers)]
            _report(header, job, futures, on_block)
        finally:
            job.stopped = True


def _load_over_lanes(
    packed: ResidentPack,
    target: int,
    gpu: int | None,
    on_block: OnBlock | None,
    cancel: CancelFlag | None,
    verify: bool,
    links: LoadLinks | None,
) -> None:
    header, helpers = packed.header, {} if links is None else links.helpers
    chunk_bytes = chunk_bytes_of(header.data_bytes, header.leaf_bytes, 1 + len(helpers), CHUNK_BYTES)
    ask = AskHelp(path=str(packed.path), chunk_bytes=chunk_bytes, verify=verify)
    if links is None:
        lanes, ways = device_lanes(gpu, 0.0, chunk_bytes), []
    else:
        lanes = device_lanes(gpu, links.declared.host, chunk_bytes)
        ways = [
            HelpWay(n, path, links.owner, device_peer(gpu, links.declared.peer), ask) for n, path in helpers.items()
        ]
    if gpu is not None:
        from prism.weights.loading.cuda_lanes import finish_other_work

        finish_other_work(gpu)
    load_gpu(packed, target, lanes, on_block, cancel, verify=verify, chunk_bytes=chunk_bytes, helpers=ways)
    if links is not None:
        links.helped_bytes = {way.name: way.books.brought_bytes for way in ways}


@dataclass
class _HostLoad:
    """State the workers of one load share; ``guard`` protects ``next`` and ``done``."""

    packed: ResidentPack
    target: int
    cancel: CancelFlag
    verify: bool
    next: int = 0
    done: set[int] = field(default_factory=set)
    stopped: bool = False
    guard: threading.Condition = field(default_factory=threading.Condition)

    def halted(self) -> bool:
        return self.stopped or self.cancel.is_set()

    def work(self) -> None:
        while not self.halted():
            with self.guard:
                leaf = self.next
                self.next += 1
            if leaf >= self.packed.header.leaves or not self.packed.wait_leaf(leaf, self.halted):
                return
            self._copy(leaf)
            with self.guard:
                self.done.add(leaf)
                self.guard.notify()

    def _copy(self, leaf: int) -> None:
        header, packed = self.packed.header, self.packed
        first, end = header.leaf_range(leaf)
        if self.verify:
            found = xxhash.xxh3_64_intdigest(packed.data[first:end])
            if found != header.leaf_sum(leaf) and not packed.repair(leaf):
                raise CorruptBlock(packed.path, header.blocks_in_leaf(leaf), leaf, header.leaf_sum(leaf), found)
        stream_copy(self.target + first, packed.address + first, end - first)


def _report(header: PackHeader, job: _HostLoad, futures: list[Future[None]], on_block: OnBlock | None) -> None:
    """Calls ``on_block`` for each block in order; raises what stopped the workers."""
    for index, block in enumerate(header.blocks):
        needed = header.block_leaves(index)
        with job.guard:
            while not all(leaf in job.done for leaf in needed):
                _raise_first(futures)
                if job.cancel.is_set():
                    job.stopped = True
                    raise LoadCancelled(index, len(header.blocks))
                job.guard.wait(0.02)
        if on_block is not None:
            on_block(index, block)
    wait(futures, return_when=FIRST_EXCEPTION)
    _raise_first(futures)


def _raise_first(futures: list[Future[None]]) -> None:
    for future in futures:
        if future.done():
            future.result()
