"""What is counted of an engine with layers elsewhere by others, who must not know how that goes: who is in none of
SGLang's batches, how many pieces of the model are here."""

from __future__ import annotations

from typing import Any


def requests_under_way(scheduler: Any) -> list[Any]:
    """Requests of batches that SGLang's loop has planned and does not know any more
    (:mod:`sglang_patches.remote_under_way`)."""
    remote = getattr(scheduler, "prism_remote", None)
    return [] if remote is None else list(remote.under_way.requests)


def held_pieces(scheduler: Any) -> int:
    """Pieces of the model that are in memory; 0: the engine was never told to run them apart."""
    remote = getattr(scheduler, "prism_remote", None)
    return 0 if remote is None else int(remote.held_pieces)
