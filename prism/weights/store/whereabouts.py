"""Where a model's weights are, and which place they come from soonest (lambda-Scale 5: hot, warm, cold start)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where weights can be, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


class StartKind(StrEnum):
    """What an activation would be."""

    HOT = "hot"
    """The weights are on a device already."""
    WARM = "warm"
    """They are in this machine's memory."""
    COLD = "cold"
    """They have to come from a disk or from another machine."""


@dataclass(frozen=True, slots=True)
class SourceRates:
    """Bytes per second of this machine's disk and of its network link."""

    disk_bytes_s: float
    link_bytes_s: float


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """All places of one model, each a tuple that is empty when it is not there."""

    model: str
    device: tuple[str, ...] = ()
    """Device ids."""
    host: tuple[str, ...] = ()
    """Layouts with a copy in this machine's memory."""
    disk: tuple[str, ...] = ()
    """Layouts cached on this machine's disk."""
    remote: tuple[str, ...] = ()
    """Other machines that hold it in memory."""

    @property
    def start(self) -> StartKind:
        if self.device:
            return StartKind.HOT
        return StartKind.WARM if self.host else StartKind.COLD

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Every tier that has it, nearest first."""
        places = (
            (Tier.DEVICE, self.device),
            (Tier.HOST, self.host),
            (Tier.DISK, self.disk),
            (Tier.REMOTE, self.remote),
        )
        return tuple(tier for tier, where in places if where)

    def quickest(self, rates: SourceRates) -> Tier | None:
        """The tier to load from: this machine's memory if it is there, else disk or network, whichever is faster.
        None when it is nowhere (the model folder has to be packed first)."""
        if self.device:
            return Tier.DEVICE
        if self.host:
            return Tier.HOST
        if self.disk and self.remote:
            return Tier.REMOTE if rates.link_bytes_s > rates.disk_bytes_s else Tier.DISK
        if self.disk:
            return Tier.DISK
        return Tier.REMOTE if self.remote else None
