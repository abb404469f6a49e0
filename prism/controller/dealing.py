"""What waits for a model goes to the queues of its instances, as they come up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence, Set

from prism.controller.inactive import InactiveQueue
from prism.controller.placement import PlacementBook
from prism.core.effects import Activate
from prism.core.events import ClusterEvent, WaitingDealt
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey
from prism.scheduler.beginnings import Beginnings


class Dealing:
    """Moves what waits in ``inactive`` and tells the cluster scheduler of it (``feed``)."""

    def __init__(
        self, inactive: InactiveQueue, placement: PlacementBook, feed: Callable[[ClusterEvent], object]
    ) -> None:
        self._inactive, self._placement, self._feed = inactive, placement, feed
        self._beginnings = Beginnings()

    def ordered(self, orders: Iterable[Activate], late: Set[InstanceKey] = frozenset()) -> None:
        """These come in one decision, of which ``late`` run layers for the others before they lead."""
        self._beginnings.ordered(orders, time.monotonic(), late)

    def pass_on(self, model: ModelName, devices: Sequence[DeviceId]) -> None:
        """What waits for the model goes to these devices' queues, or the share of those that have come up, while others
        that come with them are about to."""
        waiting, now_s = self._inactive.count(model), time.monotonic()
        share = self._beginnings.share(model, devices, waiting, now_s)
        if self._beginnings.begins_settling(model, now_s):
            self._soon(lambda: self._feed(WaitingDealt(model, settled=False)))
            self._soon(lambda: self._look(model))
        if waiting:
            self._inactive.route(model, share.devices, share.most)
            if self._inactive.count(model):
                asyncio.get_running_loop().call_later(
                    self._beginnings.ask_again_in(model, now_s), self._pass_on_rest, model
                )
            else:
                self.tell_waiting(model)

    def tell_waiting(self, model: ModelName) -> None:
        """Soon tell the scheduler what waits *then*: what waits now may have changed once it listens, and a model that
        seems to have waiting requests is never evicted."""
        self._soon(lambda: self._feed(self._inactive.state(model)))

    def _pass_on_rest(self, model: ModelName) -> None:
        """What was kept for those that did not come up in time."""
        if self._inactive.count(model) and (devices := self._placement.route_of(model)):
            self.pass_on(model, devices)

    def _look(self, model: ModelName) -> None:
        """Whether the queues that were given something have settled."""
        if left_s := self._beginnings.settles_for(model, time.monotonic()):
            asyncio.get_running_loop().call_later(left_s, self._look, model)
        else:
            self._feed(WaitingDealt(model, settled=True))

    @staticmethod
    def _soon(do: Callable[[], object]) -> None:
        asyncio.get_running_loop().call_soon(do)
