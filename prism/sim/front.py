"""The front door: requests come in, stand in the inactive queue of their model or go to a device, and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism.core.effects import RefuseWaiting
from prism.core.events import Arrivals, WaitingRequests
from prism.core.ids import DeviceId, ModelName, RequestId
from prism.policy.routing import least_loaded
from prism.sim.job import Job

if TYPE_CHECKING:
    from prism.sim.device import Device
    from prism.sim.world import World


class Front:
    """All front doors and the inactive queue."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._routes: dict[ModelName, tuple[DeviceId, ...]] = {}
        self._inactive: dict[ModelName, dict[RequestId, Job]] = {}
        self._tokens: dict[ModelName, int] = {}
        self._moving: dict[ModelName, None] = {}
        self.open = 0
        """Requests that have not ended."""

    def waiting(self) -> dict[ModelName, int]:
        """Length of each model's inactive queue."""
        return {model: len(jobs) for model, jobs in self._inactive.items()}

    def arrive(self, job: Job) -> None:
        """A client's request has been read."""
        self.open += 1
        self._world.control.tell(Arrivals(job.model, 1))
        more_s = self._world.cluster.timing.front * (self._world.machines.front_slowdown() - 1.0)
        if more_s > 0.0:
            self._world.queue.after(more_s, self._place, job)
        else:
            self._place(job)

    def send_back(self, job: Job) -> None:
        """A device cannot take ``job``: its model is not active there any more. It waits in the inactive queue, until
        the scheduler routes it anew."""
        self._wait(job)

    def ended(self, job: Job) -> None:
        """``job`` has its last token or an error."""
        self.open -= 1
        job.device = None
        job.end_s = self._world.queue.now_s
        self._world.recorder.ended(job)

    # --- routing ---

    def route(self, model: ModelName, devices: tuple[DeviceId, ...]) -> None:
        """New requests and those that wait go to one of ``devices`` (none: to the inactive queue)."""
        self._routes[model] = devices
        if devices and model in self._inactive and model not in self._moving:
            self._moving[model] = None
            self._world.queue.after(self._world.cluster.timing.route, self._move, model)

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
        device = self._choose(job.model)
        if device is not None:
            device.arrive(job)
        else:
            self._wait(job)

    def _wait(self, job: Job) -> None:
        job.device = None
        self._inactive.setdefault(job.model, {})[job.id] = job
        self._tokens[job.model] = self._tokens.get(job.model, 0) + job.prompt_tokens
        self._tell_waiting(job.model)

    def _choose(self, model: ModelName) -> Device | None:
        """The routed device with the fewest requests."""
        devices = self._world.devices
        routed = [device for id in self._routes.get(model, ()) if (device := devices.get(id)) and not device.gone]
        if len(routed) < 2:
            return routed[0] if routed else None
        return least_loaded(routed, lambda device: len(device.jobs))

    def _move(self, model: ModelName) -> None:
        """The controller moves the waiting requests of an active model to its device(s)."""
        del self._moving[model]
        if self._choose(model) is None:
            return
        jobs = list(self._inactive.pop(model, {}).values())
        self._tokens.pop(model, None)
        for job in jobs:
            self._place(job)
        self._tell_waiting(model)

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
            self._world.control.tell(WaitingRequests(model, 0, 0.0))
            return
        first = next(iter(jobs.values()))
        oldest_s = first.arrival_s if len(jobs) == 1 else min(job.arrival_s for job in jobs.values())
        deadline_s = oldest_s + first.spec.slo_ttft_s
        self._world.control.tell(WaitingRequests(model, len(jobs), oldest_s, self._tokens[model], deadline_s))
