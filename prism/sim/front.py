"""The front door: requests come in, stand in the inactive queue of their model or go to a device, and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from prism.core.effects import RefuseWaiting
from prism.core.events import Arrivals, ClusterEvent, WaitingDealt, WaitingRequests
from prism.core.ids import DeviceId, ModelName, RequestId
from prism.policy.routing import least_loaded, queue_load
from prism.scheduler.beginnings import Beginnings
from prism.scheduler.request_life import DeviceRequests
from prism.sim.cluster_sections import TimingSection
from prism.sim.job import Job
from prism.sim.queue import EventQueue


class DeviceQueue(Protocol):
    """A device as a front door sees it."""

    gone: bool
    requests: DeviceRequests[Job]

    def arrive(self, job: Job) -> None:
        """``job`` enters the device's queue."""


class SimFront:
    """All front doors and the inactive queue. ``tell`` takes what the cluster scheduler has to hear, ``record`` the
    requests that have ended; ``slowdown`` says how many times longer than alone a front door takes now."""

    def __init__(
        self,
        queue: EventQueue,
        timing: TimingSection,
        devices: Mapping[DeviceId, DeviceQueue],
        slowdown: Callable[[], float],
        tell: Callable[[ClusterEvent], None],
        record: Callable[[Job], None],
    ) -> None:
        self._queue, self._timing, self._devices = queue, timing, devices
        self._slowdown, self._tell, self._record = slowdown, tell, record
        self._routes: dict[ModelName, tuple[DeviceId, ...]] = {}
        self._inactive: dict[ModelName, dict[RequestId, Job]] = {}
        self._tokens: dict[ModelName, int] = {}
        self._moving: dict[ModelName, None] = {}
        self.beginnings = Beginnings()
        """Of instances that come together; whoever orders them says so here."""
        self.open: dict[RequestId, Job] = {}
        """Requests that have not ended."""

    def waiting(self) -> dict[ModelName, int]:
        """Length of each model's inactive queue."""
        return {model: len(jobs) for model, jobs in self._inactive.items()}

    def arrive(self, job: Job) -> None:
        """A client's request has been read."""
        self.open[job.id] = job
        self._tell(Arrivals(job.model, 1))
        more_s = self._timing.front * (self._slowdown() - 1.0)
        if more_s > 0.0:
            self._queue.after(more_s, self._place, job)
        else:
            self._place(job)

    def wait(self, job: Job) -> None:
        """``job`` waits in the inactive queue until the scheduler routes it (a device sent it back, or failed)."""
        job.device = None
        self._inactive.setdefault(job.model, {})[job.id] = job
        self._tokens[job.model] = self._tokens.get(job.model, 0) + job.prompt_tokens
        self._tell_waiting(job.model)

    def ended(self, job: Job) -> None:
        """``job`` has its last token or an error."""
        self.open.pop(job.id, None)
        job.device = None
        job.end_s = self._queue.now_s
        self._record(job)

    # --- routing ---

    def route(self, model: ModelName, devices: tuple[DeviceId, ...]) -> None:
        """New requests and those that wait go to one of ``devices`` (none: to the inactive queue)."""
        self._routes[model] = devices
        if devices and model not in self._inactive:
            self.beginnings.share(model, devices, 0, self._queue.now_s)
        elif devices and model not in self._moving:
            self._moving[model] = None
            self._queue.after(self._timing.route, self._move, model)

    def refuse(self, effect: RefuseWaiting) -> None:
        """End waiting requests as the effect says."""
        jobs = list(self._inactive.get(effect.model, {}).values())
        if effect.arrived_before_s is not None:
            jobs = [job for job in jobs if job.arrival_s < effect.arrived_before_s]
        else:
            jobs = sorted(jobs, key=lambda job: job.arrival_s)[effect.keep :]
        for job in jobs:
            self._forget(job)
            job.error = f"refused:{effect.reason.code.value}"
            self.ended(job)
        if jobs:
            self._tell_waiting(effect.model)

    def _place(self, job: Job) -> None:
        device = self._choose(self._routes.get(job.model, ()))
        if device is not None:
            device.arrive(job)
        else:
            self.wait(job)

    def _choose(self, ids: Sequence[DeviceId]) -> DeviceQueue | None:
        """The least loaded of these devices."""
        devices = self._devices
        routed = [device for id in ids if (device := devices.get(id)) and not device.gone]
        if len(routed) < 2:
            return routed[0] if routed else None
        return least_loaded(routed, lambda device: queue_load(len(device.requests), device.requests.running_total))

    def _move(self, model: ModelName) -> None:
        """The controller moves the waiting requests of an active model to its device(s), or to those that come up
        their share (:mod:`prism.controller.dealing`)."""
        del self._moving[model]
        devices, jobs = self._routes.get(model, ()), list(self._inactive.get(model, {}).values())
        if self._choose(devices) is None:
            return
        share = self.beginnings.share(model, devices, len(jobs), self._queue.now_s)
        if self.beginnings.begins_settling(model, self._queue.now_s):
            self._tell(WaitingDealt(model, settled=False))
            self._queue.after(0.0, self._look, model)
        for job in jobs[: share.most]:
            device = self._choose(share.devices) or self._choose(devices)
            assert device is not None
            self._forget(job)
            device.arrive(job)
        if model in self._inactive:
            self._queue.after(self.beginnings.ask_again_in(model, self._queue.now_s), self._move_rest, model)
        else:
            self._tell_waiting(model)

    def _move_rest(self, model: ModelName) -> None:
        """What was kept for those that did not come up in time."""
        self.route(model, self._routes.get(model, ()))

    def _look(self, model: ModelName) -> None:
        """Whether the queues that were given something have settled."""
        if left_s := self.beginnings.settles_for(model, self._queue.now_s):
            self._queue.after(left_s, self._look, model)
        else:
            self._tell(WaitingDealt(model, settled=True))

    def _forget(self, job: Job) -> None:
        jobs = self._inactive[job.model]
        del jobs[job.id]
        self._tokens[job.model] -= job.prompt_tokens
        if not jobs:
            del self._inactive[job.model]
            del self._tokens[job.model]

    def _tell_waiting(self, model: ModelName) -> None:
        jobs = self._inactive.get(model)
        if not jobs:
            self._tell(WaitingRequests(model, 0, float("inf")))
            return
        first = next(iter(jobs.values()))
        oldest_s = first.arrival_s if len(jobs) == 1 else min(job.arrival_s for job in jobs.values())
        deadline_s = oldest_s + first.spec.slo_ttft_s
        self._tell(WaitingRequests(model, len(jobs), oldest_s, self._tokens[model], deadline_s))
