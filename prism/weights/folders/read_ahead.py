"""Reading tensors in a given order ahead of whoever takes them, past the page cache."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from prism.weights.errors import BadModelFolder
from prism.weights.folders.safetensors_folder import SourceTensor
from prism.weights.packs.direct_buffers import direct_buffer
from prism.weights.packs.disk_pack import open_direct
from prism.weights.packs.format import PAGE_BYTES, align

CHUNK_BYTES: Final = 8 << 20
READ_AHEAD: Final = 4


def read_ahead(order: list[SourceTensor]) -> Iterator[tuple[str, int, memoryview]]:
    """(tensor, offset in it, bytes) in the given order, read ahead by a few threads into buffers that are used again:
    the bytes are valid until the next item is asked for."""
    pieces = ((t, at) for t in order for at in range(0, max(t.nbytes, 1), CHUNK_BYTES))
    files = {file: open_direct(file) for file in {t.file for t in order}}
    # a chunk's window may reach into a page at either end
    free = [direct_buffer(CHUNK_BYTES + 2 * PAGE_BYTES) for _ in range(READ_AHEAD + 1)]
    ahead: deque[tuple[SourceTensor, int, memoryview, Future[memoryview]]] = deque()
    try:
        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="weights-pack") as pool:
            more = True
            while more or ahead:
                while more and free:
                    piece = next(pieces, None)
                    if piece is None:
                        more = False
                        break
                    tensor, at = piece
                    buffer, length = free.pop(), min(CHUNK_BYTES, tensor.nbytes - at)
                    job = pool.submit(_read, files[tensor.file], tensor, at, length, buffer)
                    ahead.append((tensor, at, buffer, job))
                if ahead:
                    tensor, at, buffer, job = ahead.popleft()
                    yield tensor.name, at, job.result()
                    free.append(buffer)
    finally:
        for fd in files.values():
            os.close(fd)


def _read(fd: int, tensor: SourceTensor, at: int, length: int, buffer: memoryview) -> memoryview:
    """Reads ``length`` bytes of the tensor from ``at`` on, through an aligned window as direct reads demand."""
    first = tensor.offset + at
    start = first // PAGE_BYTES * PAGE_BYTES
    window = buffer[: align(first + length, PAGE_BYTES) - start]
    got = 0
    while got < first + length - start:
        count = os.preadv(fd, [window[got:]], start + got)
        if count == 0:
            raise BadModelFolder(tensor.file, f"ends inside tensor {tensor.name!r}")
        got += count
    return window[first - start : first - start + length]
