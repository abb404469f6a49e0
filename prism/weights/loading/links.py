"""The links that a load may use: into its device, and over which helpers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prism import memory
from prism.kv.pacing import LinkPace
from prism.kv.settings import DeclaredLinks
from prism.weights.loading.gpu_loader import CHUNK_BYTES, Lane
from prism.weights.loading.help_ways import Peer
from prism.weights.loading.host_lanes import HostLane, HostPeer

_HOST_LANES: Final = 2


@dataclass
class LoadLinks:
    """Of one device, for loads one after the other."""

    owner: memory.Owner
    """Of the device: helpers' memory is mapped by it."""
    declared: DeclaredLinks = field(default_factory=DeclaredLinks)
    """A virtual device's."""
    helpers: Mapping[str, Path] = field(default_factory=dict)
    """Sockets of processes that may help now (:func:`prism.weights.loading.help_server.help_load`), by device."""
    helped_bytes: dict[str, int] = field(default_factory=dict)
    """What came over helpers in the last load, by device."""

    @property
    def plays(self) -> bool:
        """Whether a virtual device is to load as a GPU does."""
        return self.declared.host > 0 or bool(self.helpers)


def device_lanes(gpu: int | None, bytes_per_s: float, buffer_bytes: int = CHUNK_BYTES) -> Sequence[Lane]:
    """Lanes into GPU ``gpu``; None: into a virtual device whose link has that rate (0: as fast as it goes)."""
    if gpu is None:
        pace = LinkPace(bytes_per_s)
        return [HostLane(pace, buffer_bytes) for _ in range(_HOST_LANES)]
    # imported here: CuPy is slow to import where no GPU will ever be
    from prism.weights.loading.cuda_lanes import warm_lanes

    return warm_lanes(gpu)


def device_peer(gpu: int | None, bytes_per_s: float) -> Peer:
    """From another device's memory into GPU ``gpu``, or a virtual device over a link with that rate."""
    if gpu is None:
        return HostPeer(LinkPace(bytes_per_s))
    from prism.weights.loading.cuda_lanes import CudaPeer

    return CudaPeer(gpu)
