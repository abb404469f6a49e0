"""What operators ask for: load and unload a model."""

from __future__ import annotations

from prism.core.events import OperatorLoad, OperatorUnload
from prism.core.reasons import ReasonCode, because
from prism.core.settings import LiveMode
from prism.core.views import InstanceState
from prism.scheduler.books import Books
from prism.scheduler.cluster_policy import ClusterPolicy
from prism.scheduler.decisions import Room, StartInstance
from prism.scheduler.lifecycle import Lifecycle
from prism.scheduler.live_ways import BegunWay, LiveWays
from prism.scheduler.records import ModelRecord
from prism.scheduler.survey import Survey
from prism.scheduler.wanting import Wanting


class Operators:
    """Carries out operators' wishes; remembers nothing that is not in a model's record."""

    def __init__(self, books: Books, lifecycle: Lifecycle, wanting: Wanting, policy: ClusterPolicy) -> None:
        self._books, self._lifecycle, self._wanting, self._policy = books, lifecycle, wanting, policy
        self._ways = LiveWays(books)

    def on_load(self, event: OperatorLoad, now_s: float) -> None:
        """Load the model, on the named devices if there are any; move it there if it serves elsewhere and there is
        room."""
        model = self._books.models.get(event.model)
        if model is None or model.removed:
            return
        model.stillborn = 0
        self._wanting.failures.clear_failure(model)
        if event.instances > 1:
            self._load_instances(model, event.instances, now_s)
            return
        reason = because(ReasonCode.OPERATOR)
        model.want, model.wanted_devices = reason, event.devices
        active = model.in_state(InstanceState.READY)
        if active and (not event.devices or active[0].devices == event.devices):
            model.want, model.wanted_devices = None, ()
        elif not active:
            self._wanting.want_model(model, now_s)
        elif isinstance(room := self._policy.find_room(model, now_s, Survey()), Room):
            self._lifecycle.start_instance(StartInstance(model, room, reason, active[0].key), now_s)
        else:  # it stays, and whoever asked is told
            model.want, model.wanted_devices = None, ()

    def _load_instances(self, model: ModelRecord, instances: int, now_s: float) -> None:
        """As many as there is room for, all ordered at once, so that their weights can be sent together."""
        model.least_instances = instances
        model.want, model.wanted_devices = because(ReasonCode.OPERATOR), ()
        if not model.coming_or_here:
            self._wanting.want_model(model, now_s)  # the first may drive others out
        model.want = None if model.coming_or_here else model.want
        begun: BegunWay | None = None
        modes: list[LiveMode | None] = []
        while model.coming_or_here and sum(i.state is not InstanceState.DRAINING for i in model.instances) < instances:
            room = self._policy.find_room(model, now_s, Survey())
            if not isinstance(room, Room) or room.evict or _holds(model, room):
                return
            if begun is None:  # all come in one way, so that they can form pipelines
                coming = instances - sum(i.state is not InstanceState.DRAINING for i in model.instances)
                begun = self._ways.choose(model, [room.devices] * coming, instances, 0.0, now_s)
                modes = list(begun.modes)
            reason = because(ReasonCode.OPERATOR, instances=instances, **begun.numbers)
            self._lifecycle.start_instance(StartInstance(model, room, reason, live=modes.pop(0)), now_s)

    def on_unload(self, event: OperatorUnload, now_s: float) -> None:
        """Let the model leave the named devices, or all."""
        if (model := self._books.models.get(event.model)) is None:
            return
        leaving = [i for i in model.instances if not event.devices or not i.shards.keys().isdisjoint(event.devices)]
        everywhere = len(leaving) == len(model.instances)
        if everywhere:
            model.pinned, model.want, model.least_instances = False, None, 1
            if not model.waiting:
                self._wanting.unwant_model(model)
        for instance in leaving:
            self._lifecycle.stop_instance(instance, because(ReasonCode.OPERATOR), now_s, event.carry)
        if everywhere:
            model.made_room = False  # also one that made room before: nobody loads it ahead


def _holds(model: ModelRecord, room: Room) -> bool:
    """Whether an instance of the model is on one of the devices already."""
    return any(not i.shards.keys().isdisjoint(room.devices) for i in model.instances)
