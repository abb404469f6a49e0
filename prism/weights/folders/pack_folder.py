"""Packing a model folder into the store's ``raw`` layout at the rate of the disk.

By default every byte is read once, checksummed and left where it is (:mod:`prism.weights.packs.index`). With ``copy``
the tensors are written in the order of the forward pass into a file of their own, which does not need the folder any
more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from prism.weights.errors import BadModelFolder, BadPack
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.folders.read_ahead import CHUNK_BYTES, read_ahead
from prism.weights.folders.safetensors_folder import SourceTensor, read_folder
from prism.weights.packs.blocks import EMBEDDINGS, HEAD, BlockPlan, TensorPlan, layout_header, plan_blocks, stage_of
from prism.weights.packs.disk_pack import Referenced
from prism.weights.packs.format import PackHeader, PackKey
from prism.weights.packs.index import PackIndex, source_file
from prism.weights.store.weight_store import WeightStore

READERS: Final = 4
"""Reads in flight; disks need several to reach their rate."""
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _PackJob:
    """One folder to pack: what it holds, and how it shall lie in the store."""

    store: WeightStore
    header: PackHeader
    blocks: tuple[BlockPlan, ...]
    tensors: dict[str, SourceTensor]
    folder: Path
    report: OnProgress

    def sources(self) -> list[SourceTensor]:
        """The folder's tensors in the order of the pack."""
        return [self.tensors[t.name] for t in self.header.tensors]


def pack_folder(
    store: WeightStore,
    folder: Path,
    *,
    label: str = "",
    block_bytes: int | None = None,
    copy: bool = False,
    on_progress: OnProgress | None = None,
) -> PackHeader:
    """Packs ``folder`` unless the store has it already, usable and cut as asked; the pack's header.

    ``on_progress(done_bytes, all_bytes)``. With ``copy`` an index of the folder is replaced by a pack with its own
    bytes.

    Raises :class:`BadModelFolder`, :class:`~prism.weights.errors.StoreFull` or ``OSError``; the store is unchanged
    then.
    """
    folder = folder.resolve()
    key = PackKey(fingerprint(folder, store.directory))
    known = store.usable(key)
    if known is not None and block_bytes is None and not (copy and store.refers_to(key)):
        return known
    tensors = {t.name: t for t in read_folder(folder)}
    blocks = plan_blocks(merge_tied(list(tensors.values())), block_bytes)
    header = layout_header(key, blocks, label or folder.name)
    if known is not None and known.blocks == header.blocks and not (copy and store.refers_to(key)):
        return known
    report = on_progress or (lambda done_bytes, all_bytes: None)
    job = _PackJob(store, header, blocks, tensors, folder, report)
    return _copy(job) if copy else _index(job)


def _index(job: _PackJob) -> PackHeader:
    paths = sorted({t.file for t in job.tensors.values()})
    number = {path: i for i, path in enumerate(paths)}
    index = PackIndex(
        header=job.header,
        folder=str(job.folder),
        files=tuple(source_file(path) for path in paths),
        places=tuple((number[t.file], t.offset) for t in job.sources()),
    )
    try:
        sums = b"".join(total.to_bytes(8, "little") for total in _leaf_sums(index, job.folder, job.report))
    except BadPack as error:
        raise BadModelFolder(job.folder, f"changed while it was read: {error.why}") from error
    index = msgspec.structs.replace(index, header=msgspec.structs.replace(job.header, leaf_sums=sums))
    job.store.put_index(index)
    return index.header


def _leaf_sums(index: PackIndex, folder: Path, report: OnProgress) -> Iterator[int]:
    """Checksums of the data area's leaves in order. The files are checked again at the end: none changed meanwhile."""
    header = index.header
    with Referenced(index, folder) as source, ThreadPoolExecutor(READERS, thread_name_prefix="weights-pack") as pool:
        runs = source.runs(range(header.leaves))
        for run, sums in zip(runs, pool.map(source.leaf_sums, runs), strict=True):
            report(header.leaf_range(run[-1])[1], header.data_bytes)
            yield from sums
    with Referenced(index, folder):
        pass


def _copy(job: _PackJob) -> PackHeader:
    order = job.sources()
    total, done = sum(t.nbytes for t in order), 0
    with job.store.writer(job.header.key, job.blocks, job.header.label) as writer:
        for name, offset, data in read_ahead(order):
            writer.write(name, data, offset)
            done += data.nbytes
            job.report(done, total)
        return writer.finish()


def merge_tied(tensors: list[SourceTensor]) -> list[TensorPlan]:
    """Plans in which an output head that repeats the embeddings byte for byte is an alias of them."""
    aliases: dict[str, list[str]] = {}
    tied: set[str] = set()
    embeddings = [t for t in tensors if stage_of(t.name)[1] == EMBEDDINGS]
    for head in (t for t in tensors if stage_of(t.name)[1] == HEAD):
        for twin in embeddings:
            if (twin.dtype, twin.shape) == (head.dtype, head.shape) and _same_bytes(twin, head):
                aliases.setdefault(twin.name, []).append(head.name)
                tied.add(head.name)
                break
    return [
        TensorPlan(t.name, t.dtype, t.shape, (), tuple(aliases.get(t.name, ()))) for t in tensors if t.name not in tied
    ]


def _same_bytes(one: SourceTensor, other: SourceTensor) -> bool:
    """Compares chunk by chunk: two tensors that differ do so in the first one."""
    with one.file.open("rb") as first, other.file.open("rb") as second:
        for at in range(0, one.nbytes, CHUNK_BYTES):
            length = min(CHUNK_BYTES, one.nbytes - at)
            if os.pread(first.fileno(), length, one.offset + at) != os.pread(
                second.fileno(), length, other.offset + at
            ):
                return False
    return True
