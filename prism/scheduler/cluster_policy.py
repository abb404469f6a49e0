"""What a policy is: an object that answers three questions about the books.

1. Where does a wanted model go (:meth:`ClusterPolicy.find_room`)? A pure question: asking changes nothing.
2. What is done when time passes (:meth:`ClusterPolicy.on_time`)?
3. What is done when a device reports (:meth:`ClusterPolicy.on_report`)?

The answers are values (:mod:`.decisions`). Those to 2 and 3 are carried out one by one as they are yielded, so that
each is taken on what the one before has changed. The mechanism does the rest: books, states, retries, refusals, losses,
operators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from prism.core.events import DeviceReport
from prism.core.instances import InstanceKey
from prism.core.views import PlannedDecision
from prism.scheduler.books import Books
from prism.scheduler.decisions import Decision, NoRoom, Room, StopInstance
from prism.scheduler.records import ModelRecord, PrewarmCounts
from prism.scheduler.survey import Survey


class ClusterPolicy(ABC):
    """Reads the books; changes nothing but what it owns itself."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.prewarmed = PrewarmCounts()

    @abstractmethod
    def find_room(self, model: ModelRecord, now_s: float, survey: Survey) -> Room | NoRoom:
        """Where ``model`` should be activated now. ``survey`` is what models that are looked at together share."""

    def on_time(self, now_s: float) -> Iterable[Decision]:
        """What is to be done now. Asked after every event, and at :meth:`next_time_s`."""
        return ()

    def next_time_s(self) -> float:
        """When :meth:`on_time` has something to do at the latest. All rates are as of now then."""
        return float("inf")

    def wake_s(self) -> float:
        """When :meth:`on_time` should be asked at the latest, be all rates fresh or not."""
        return self.next_time_s()

    def on_report(self, report: DeviceReport, now_s: float) -> Iterable[Decision]:
        """What is to be done now that a device's report is in the books."""
        return ()

    # --- told, beside the three questions ---

    def on_no_room(self, model: ModelRecord, now_s: float) -> Iterable[StopInstance]:
        """No room was found and the model's requests wait on. Only what drains already may be hurried here: what a
        survey has found must still hold."""
        return ()

    def on_arrivals(self, model: ModelRecord, idle_s: float, now_s: float) -> None:
        """Requests for ``model`` came after it had been idle for ``idle_s`` (0: it was not)."""
        return

    def on_gone(self, models: Iterable[ModelRecord], now_s: float) -> None:
        """Instances of ``models`` are gone from the books."""
        return

    def on_catalog_changed(self, now_s: float) -> Iterable[Decision]:
        """A change of the catalog has been taken in."""
        return ()

    def explain_loaded(self, now_s: float) -> Sequence[PlannedDecision]:
        """What would be done about the loaded models if it were decided now (``prism plan``); changes nothing."""
        return [kept(key, self.books) for key in self.books.loaded]


def kept(key: InstanceKey, books: Books) -> PlannedDecision:
    """The plan for an instance that stays where it is."""
    instance = books.loaded[key]
    return PlannedDecision(key.model, "stay", instance.devices, instance.devices, instance.reason)
