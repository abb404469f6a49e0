"""Who is in none of SGLang's batches, for those who count requests and must not know how batches go over a route."""

from __future__ import annotations

from typing import Any


def requests_under_way(scheduler: Any) -> list[Any]:
    """Requests of batches that SGLang's loop has planned and does not know any more
    (:mod:`sglang_patches.remote_under_way`)."""
    remote = getattr(scheduler, "prism_remote", None)
    return [] if remote is None else list(remote.under_way.requests)
