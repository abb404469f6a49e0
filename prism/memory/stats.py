"""What can be seen of a device: owners, classes, limits, page states; and audits against the kernel or the driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OwnerStats:
    """One owner's entry in the account. ``kernel_bytes`` is the kernel's own count for a host device, else ``None``.

    ``weights_bytes + kv_bytes + staging_bytes + lent_bytes`` is what it holds in the books; ``physical_bytes`` of that
    exist as pages, ``mapped_bytes`` have an address, ``ahead_bytes`` of these no slot in use; ``deferred_bytes`` await
    a fence.
    ``outside_bytes`` is what its process is charged for beside: ``granted_bytes``, or ``measured_bytes`` (0 if not
    known) if that is more.
    """

    id: int
    name: str
    pid: int
    floor_bytes: int
    limit_bytes: int | None
    weights_bytes: int
    kv_bytes: int
    staging_bytes: int
    outside_bytes: int
    granted_bytes: int
    measured_bytes: int
    lent_bytes: int
    wanted_bytes: int
    physical_bytes: int
    mapped_bytes: int
    ahead_bytes: int
    deferred_bytes: int
    used_bytes: int
    virtual_bytes: int
    kernel_bytes: int | None

    @property
    def leased_bytes(self) -> int:
        """Held in the books, over all classes but what is outside of pages."""
        return self.weights_bytes + self.kv_bytes + self.staging_bytes + self.lent_bytes

    @property
    def spare_bytes(self) -> int:
        """Physical pages without an address, kept for the next map."""
        return self.physical_bytes - self.mapped_bytes


@dataclass(frozen=True, kw_only=True)
class DeviceStats:
    """The account at one instant. ``charged_bytes`` counts each owner's floor or what it holds, whichever is more, and
    what it takes outside. ``free_bytes`` is capacity - foreign - charged: below 0 when facts overtook the books.
    ``lend_keep_bytes``: the device lends what is free beyond this; ``None``: nothing."""

    capacity_bytes: int
    foreign_bytes: int
    """Held by programs that are no owners."""
    charged_bytes: int
    free_bytes: int
    wanted_bytes: int
    page_bytes: int
    lend_keep_bytes: int | None
    recoveries: int
    reaped_owners: int
    owners: tuple[OwnerStats, ...]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Books against reality. ``problems`` is empty if they agree; the driver's totals are ``None`` if it has none."""

    books: DeviceStats
    driver_total_bytes: int | None
    driver_free_bytes: int | None
    problems: tuple[str, ...]


def device_stats(raw: Mapping[str, Any]) -> DeviceStats:
    """From the extension's dictionaries."""
    names = {field.name for field in fields(DeviceStats)} - {"owners"}
    owners = tuple(OwnerStats(**owner) for owner in raw["owners"])
    return DeviceStats(owners=owners, **{name: raw[name] for name in names})
