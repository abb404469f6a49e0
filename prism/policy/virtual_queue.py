"""Time sharing by swapping, one model per device (QLM; ALGORITHMS section 9): whose device does the head group take?

A request group is all waiting requests of one model (here a model has one SLO, so that groups by model and SLO are the
same thing). Groups stand in order of their earliest deadline; QLM solves the assignment of groups to devices anew at
every decision, so that the virtual queues need no memory: the head group takes the device that is free first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prism.core.ids import DeviceId, ModelName


@dataclass(frozen=True, slots=True)
class QueueSeat:
    """A device (or the devices of a tensor-parallel group) with the model that has it now."""

    devices: tuple[DeviceId, ...]
    models: tuple[ModelName, ...]
    """Empty: nobody has it."""
    may_leave: bool
    """All of ``models`` have served and none is pinned."""
    busy: bool
    since_s: float
    """When the last of them came."""


def choose_seat(
    seats: Sequence[QueueSeat], deadline_s: float, swap_s: float, quantum_s: float, now_s: float
) -> QueueSeat | None:
    """The seat for the head group: an empty one, else one whose group is done (longest there first), else - when
    waiting longer makes the head group late - one whose group has had its quantum. None: the head group waits."""
    empty = [s for s in seats if not s.models]
    if empty:
        return min(empty, key=lambda s: s.devices)
    done = [s for s in seats if s.may_leave and not s.busy]
    if done:
        return min(done, key=lambda s: (s.since_s, s.devices))
    if now_s + swap_s < deadline_s:
        return None
    due = [s for s in seats if s.may_leave and now_s - s.since_s >= quantum_s]
    return min(due, key=lambda s: (s.since_s, s.devices), default=None)
