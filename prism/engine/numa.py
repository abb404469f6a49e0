"""Running near a GPU: on the processors and in the memory of its NUMA node. Half a link's rate is lost across nodes."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path
from typing import Final

NODES: Final = Path("/sys/devices/system/node")
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_PREFERRED: Final = 1
_MASK_BITS: Final = 1024

log = logging.getLogger(__name__)


def processors_of(node: int, nodes: Path = NODES) -> set[int]:
    """Numbers of the node's processors; none if the kernel does not say."""
    try:
        text = (nodes / f"node{node}" / "cpulist").read_text("ascii")
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def bind_to_node(node: int | None, nodes: Path = NODES) -> bool:
    """From now on this process runs on the node's processors (those of them it may use) and takes memory there first.
    False, and nothing changed, if there is no such node or none of its processors is ours."""
    if node is None:
        return False
    ours = processors_of(node, nodes) & os.sched_getaffinity(0)
    if not ours:
        log.warning("none of NUMA node %d's processors may be used; the GPU is reached across nodes", node)
        return False
    os.sched_setaffinity(0, ours)
    prefer_memory_of(node)
    return True


def prefer_memory_of(node: int) -> None:
    """New memory comes from the node while it has some. Where the kernel refuses (some containers), placement is the
    kernel's: it follows the processors anyway."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS:
        return
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _PREFERRED, mask, ctypes.c_ulong(_MASK_BITS)) != 0:
        log.info("memory is not bound to NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
