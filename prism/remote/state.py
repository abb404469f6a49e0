"""What an engine tells of layers in other engines."""

from __future__ import annotations

import msgspec


class LayersTaken(msgspec.Struct, frozen=True, kw_only=True):
    """When an engine last ran layers itself that peers had run for it."""

    layers: int
    tokens: int
    """Of requests, whose KV of these layers was with a peer."""
    fetched: bool
    """It came from there; otherwise it was made again."""
    estimated_s: float
    """So long requests were to stand still for it at once: while a slice was fetched, or until they had begun again."""


class RemoteState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that leads requests over others, or runs layers for them. Engines of its machine are named by their
    workers, those of others by their devices."""

    layers: int
    """Of the model."""
    held_layers: int
    """Of these, those whose weights are here."""
    pieces: list[int] = []
    """The same with embedding and head, as they are numbered (:mod:`prism.remote.messages`)."""
    alone: bool
    """It has all weights and runs its own requests by itself."""
    peers: list[str] = []
    """Engines that run layers for it."""
    leaders: list[str] = []
    """Engines whose routes lead over it; those that would only fall back to it are not among them."""
    taken: LayersTaken | None = None
    parts: int = 0
    """Of prefills that several engines computed at the same time, so far (:mod:`prism.policy.live.micro_batches`)."""
    ahead: int = 1
    """Steps' worth of prompts that it may have at once: a leader begins some while others are with its peers."""
    most: int = 0
    """Batches that were under way over its route at the same time, so far."""
    run_ahead: int = 0
    """Pieces that it ran in its peers' stead while batches waited for them, so far."""
    shared: int = 0
    """Passes through layers that several leaders' batches ran in together, so far."""
    along: int = 0
    """Steps of its own that took leaders' batches along through some layers, so far."""
