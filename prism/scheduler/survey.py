"""What models that look for room at one moment share.

Many waiting models look at the same devices. Who may leave a device, and which sizes have found no room, is the same
for all of them as long as no instance starts or stops: whoever looks on behalf of several models makes one survey for
all, and a new one after every start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.ids import DeviceId
from prism.scheduler.victims import Leavers, Pressing

Size = tuple[Pressing, int, int, int]
"""What decides whether there is room: how far the search may go, shards, weights and least KV of one."""


@dataclass(slots=True)
class Survey:
    """Of one moment; filled in by whoever looks first."""

    leavers: dict[tuple[DeviceId, Pressing], Leavers] = field(default_factory=dict)
    full: set[Size] = field(default_factory=set)
    """Sizes for which there is no room, with or without evictions."""
