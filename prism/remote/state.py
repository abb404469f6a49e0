"""What an engine tells of layers in other engines."""

from __future__ import annotations

import msgspec


class RemoteState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that leads requests over others, or runs layers for them. Engines are named by their workers."""

    layers: int
    """Of the model."""
    held_layers: int
    """Of these, those whose weights are here."""
    alone: bool
    """It has all weights and runs its own requests by itself."""
    peers: list[str] = []
    """Engines that run layers for it."""
    leaders: list[str] = []
    """Engines for which it may be asked to run layers."""
