"""What waited for a model, while the instances of a pipeline come up one after the other.

They have all layers together at one moment, and say so within half a second. The first of them is not given
everything that waited, of which most would be moved again: each gets its share when it comes up, and who does not come
up in time leaves its share to the others. Whoever moves what waits, live or simulated, asks :class:`Beginnings`, and
tells the cluster scheduler (:class:`~prism.core.events.WaitingDealt`) when it begins, and when reports show what was
given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from prism.core.effects import Activate
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey, queue_device
from prism.core.settings import LiveMode

HOLD_S: Final = 0.8
HOLD_SHARE: Final = 0.1
"""From the first of them on, or such a part of the time that it took to come up, if that is longer: a member is told to
lead between two steps, which others' layers may take, and those that are up have their own share to do meanwhile."""
SETTLE_S: Final = 0.3
"""After something was given queues have not been reported with it."""
LATE_SHARE: Final = 0.5
"""Members that lead later are waited for so long, as a part of the time until the first came up, before anything is
shared out by reports: a pipeline of which two lead already does no more than one of which one does."""


@dataclass(frozen=True, slots=True)
class ShareNow:
    """Of what waits: so many of the oldest (None: all) go to the queues of these devices now."""

    devices: tuple[DeviceId, ...]
    most: int | None = None


@dataclass(slots=True)
class _Beginning:
    devices: frozenset[DeviceId]
    """Whose queues take the requests of those that come up together, and lead."""
    late: frozenset[DeviceId]
    """The same, of those that run layers for these before they lead."""
    ordered_s: float
    given: set[DeviceId] = field(default_factory=set)
    """Those that got their share."""
    began_s: float | None = None
    """When the first of them came up."""
    up: frozenset[DeviceId] = frozenset()
    """Whose queues the model is served from."""
    gave_s: float = float("-inf")
    """When the last of them got something."""
    kept: bool = False
    """Something was kept for those that are about to come up."""

    @property
    def until_s(self) -> float:
        """Something is kept for them until then; -inf before the first is up."""
        if self.began_s is None:
            return float("-inf")
        return self.began_s + max(HOLD_S, HOLD_SHARE * (self.began_s - self.ordered_s))

    def waits_for_late(self, now_s: float) -> bool:
        """Some that lead later are not up, and may come."""
        if self.began_s is None or self.late <= self.up:
            return False
        return now_s < self.began_s + LATE_SHARE * (self.began_s - self.ordered_s)


def pipelined(orders: Iterable[Activate]) -> list[Activate]:
    """Those of ``orders``, all of one model, that are to form execution pipelines; none: one alone forms none."""
    found = [o for o in orders if o.live is LiveMode.PIPELINES and len(o.parts) == 1]
    return found if len(found) > 1 else []


class Beginnings:
    """Of the decisions that are being carried out. Times are those of one clock, any."""

    def __init__(self) -> None:
        self._of: dict[ModelName, _Beginning] = {}
        self._settling: set[ModelName] = set()

    def ordered(self, orders: Iterable[Activate], now_s: float, late: Set[InstanceKey] = frozenset()) -> None:
        """These come in one decision, of which ``late`` run layers for the others before they lead."""
        by_model: dict[ModelName, list[Activate]] = {}
        for order in orders:
            by_model.setdefault(order.model, []).append(order)
        for model, mine in by_model.items():
            self._of.pop(model, None)
            if together := pipelined(mine):
                queues = {order.key: DeviceId(queue_device(order.parts)) for order in together}
                later = frozenset(device for key, device in queues.items() if key in late)
                self._of[model] = _Beginning(frozenset(queues.values()) - later, later, now_s)

    def share(self, model: ModelName, devices: Sequence[DeviceId], waiting: int, now_s: float) -> ShareNow:
        """The model is served from these devices' queues, and so many of its requests wait for that: who gets how many
        of them now. What is left is to be asked for again when another one comes up, and after :meth:`ask_again_in`."""
        beginning = self._of.get(model)
        if beginning is None:
            return ShareNow(tuple(devices))
        beginning.up = frozenset(devices)
        if beginning.began_s is None:
            beginning.began_s = now_s if waiting else float("-inf")  # what comes later is sent to one of them at once
        if now_s >= beginning.until_s + SETTLE_S and not beginning.waits_for_late(now_s):
            del self._of[model]
            return ShareNow(tuple(devices))
        if waiting:
            beginning.gave_s = now_s
        coming = len(beginning.devices.difference(devices))
        new = tuple(device for device in devices if device not in beginning.given)
        beginning.given |= set(new)
        beginning.kept = bool(coming) and now_s < beginning.until_s
        if not beginning.kept:
            return ShareNow(new or tuple(devices))
        return ShareNow(new, -(-waiting // (len(new) + coming)) * len(new))

    def ask_again_in(self, model: ModelName, now_s: float) -> float:
        """When to ask again for what is left."""
        beginning = self._of.get(model)
        left_s = 0.0 if beginning is None else beginning.until_s - now_s
        return left_s if left_s > 0 else HOLD_S

    def begins_settling(self, model: ModelName, now_s: float) -> bool:
        """Whether something was given just now that reports do not show, and nobody was told of that. To share it out
        by reports would move it for nothing. If so, ask :meth:`settles_for` until it says 0."""
        if model in self._settling or not self._left_s(model, now_s):
            return False
        self._settling.add(model)
        return True

    def settles_for(self, model: ModelName, now_s: float) -> float:
        """When to ask again; 0: the queues of a model that was said to settle have settled."""
        left_s = self._left_s(model, now_s)
        if not left_s:
            self._settling.discard(model)
        return left_s

    def _left_s(self, model: ModelName, now_s: float) -> float:
        beginning = self._of.get(model)
        if beginning is None or beginning.began_s is None:
            return 0.0
        kept_until_s = beginning.until_s if beginning.kept else now_s
        look_s = SETTLE_S if beginning.waits_for_late(now_s) else 0.0
        return max(look_s, kept_until_s - now_s, beginning.gave_s + SETTLE_S - now_s)
