"""Drains that a starving model waits for do not take as long as they like: what still runs there is carried over."""

from __future__ import annotations

from prism.core.reasons import ReasonCode, because
from prism.scheduler.books import Books
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.records import InstanceRecord

_PATIENCE_S = 1.0
"""A drain takes as long as what runs, usually nothing; only slower ones are hurried."""


def hurry_drains(books: Books, lifecycle: Lifecycle, now_s: float) -> None:
    """Drains whose time is over end now."""
    for instance in list(lifecycle.held.values()):
        if now_s < _hurry_at_s(books, instance):
            continue
        for victim in _slow_victims(books, instance):
            drains_s = now_s - victim.since_s
            reason = because(ReasonCode.STARVATION, for_model=instance.model, drains_s=drains_s)
            lifecycle.stop_instance(victim, reason, now_s, carry=True)


def next_hurry_s(books: Books, lifecycle: Lifecycle) -> float:
    """When a drain has to be hurried at the latest; infinite when none has to be."""
    if not lifecycle.held:
        return float("inf")
    return min(_hurry_at_s(books, i) for i in lifecycle.held.values())


def _hurry_at_s(books: Books, instance: InstanceRecord) -> float:
    """When the drains that ``instance`` waits for are to be hurried; infinite when they are already."""
    if not _slow_victims(books, instance):
        return float("inf")
    return max(books.models[instance.model].starves_at_s, instance.since_s + _PATIENCE_S)


def _slow_victims(books: Books, instance: InstanceRecord) -> list[InstanceRecord]:
    found = [victim for key in instance.waits_for if (victim := books.loaded.get(key)) is not None]
    return sorted((v for v in found if not v.carried), key=lambda v: v.key)
