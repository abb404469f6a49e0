"""What is kept of a run: one record per request, where models lived, samples over time, the decision log."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prism.core.effects import Activate, Dispatch, Effect, Route, decision_line
from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.sim.device import SimDevice
from prism.sim.job import Job
from prism.trace.report import RequestRecord, Residence, Sample, Timeline

DecisionSink = Callable[[str], None]

NEVER_ENDED: Final = "never_ended"
"""Kind of error of a request that was still there when nothing went on any more."""


class RunRecorder:
    """Owned by the world. ``decisions`` gets every line of the decision log; None keeps no log (a line costs more than
    most decisions)."""

    def __init__(
        self,
        deliver_s: float,
        decisions: DecisionSink | None = None,
        sample_every_s: float = 0.0,
        offset_s: float = 0.0,
    ) -> None:
        self.records: list[RequestRecord] = []
        self.counts: Counter[str] = Counter()
        """Decisions by kind and reason."""
        self.activation_s: list[float] = []
        """Seconds of every finished activation."""
        self.watch: Callable[[Effect, float], None] | None = None
        """Sees every decision as a value."""
        self.sample_every_s = sample_every_s
        self.most_needed_bytes = 0
        """The most that a device had in use at a sample, what is mapped ahead of use not counted."""
        self._deliver_s = deliver_s
        self.offset_s = offset_s
        """World time at which the trace begins (before it, a fleet warms up); reports count from it."""
        self._decisions = decisions
        self._hash = hashlib.blake2b(digest_size=16)
        self._residences: dict[InstanceKey, list[Residence]] = {}
        self._past: list[Residence] = []
        self._samples: list[Sample] = []

    # --- decisions ---

    def decided(self, effect: Effect, now_s: float) -> None:
        """A scheduler decided ``effect``."""
        code = "" if isinstance(effect, Route) else effect.reason.code.value
        self.counts[f"{type(effect).__name__}:{code}"] += 1
        if self.watch is not None:
            self.watch(effect, now_s)
        if self._decisions is not None:
            line = decision_line(effect, now_s)
            self._hash.update(line.encode())
            self._decisions(line)

    def decision_digest(self) -> str:
        """Hash of the decision log so far."""
        return self._hash.hexdigest()

    @property
    def dispatches(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith(Dispatch.__name__))

    @property
    def activations(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith(Activate.__name__))

    # --- requests ---

    def ended(self, job: Job) -> None:
        """``job`` has ended; clients see tokens ``deliver_s`` after the engine made them."""
        spec = job.spec
        made = job.generated
        ttft_s = None if job.first_token_s < 0 else job.first_token_s - job.arrival_s + self._deliver_s
        e2e_s = job.end_s - job.arrival_s + self._deliver_s
        tpot_s = (e2e_s - ttft_s) / (made - 1) if ttft_s is not None and made > 1 else None
        self.records.append(
            RequestRecord(
                row=job.index,
                model=job.model,
                arrival_s=job.arrival_s - self.offset_s,
                prompt_tokens=job.prompt_tokens,
                output_tokens=made,
                ttft_s=ttft_s,
                tpot_s=None if job.error else tpot_s,
                e2e_s=e2e_s,
                error=job.error,
                slo_ttft_s=spec.slo_ttft_s,
                slo_tpot_s=spec.slo_tpot_s,
            )
        )

    def never_ended(self, job: Job) -> None:
        """The run is over and ``job`` is still there: it missed its objectives."""
        spec = job.spec
        self.records.append(
            RequestRecord(
                row=job.index,
                model=job.model,
                arrival_s=job.arrival_s - self.offset_s,
                prompt_tokens=job.prompt_tokens,
                output_tokens=job.generated,
                error=NEVER_ENDED,
                slo_ttft_s=spec.slo_ttft_s,
                slo_tpot_s=spec.slo_tpot_s,
            )
        )

    # --- residences ---

    def activation_started(self, effect: Activate, now_s: float) -> None:
        self._residences[effect.key] = [
            Residence(model=effect.model, device=device, start_s=now_s - self.offset_s, reason=effect.reason.code.value)
            for device in effect.devices
        ]

    def ready(self, key: InstanceKey, now_s: float) -> None:
        rows = self._residences.get(key, [])
        if rows:
            self.activation_s.append(now_s - self.offset_s - rows[0].start_s)
        self._residences[key] = [_with(row, ready_s=now_s - self.offset_s) for row in rows]

    def left(self, key: InstanceKey, now_s: float) -> None:
        self._past += [_with(row, end_s=now_s - self.offset_s) for row in self._residences.pop(key, [])]

    # --- samples ---

    def sample(self, now_s: float, inactive: Mapping[ModelName, int], devices: Iterable[SimDevice]) -> None:
        """Look at the whole system once; ``inactive`` is the length of each model's inactive queue."""
        queued: Counter[str] = Counter(inactive)
        running: Counter[str] = Counter()
        model_bytes: Counter[str] = Counter()
        mapped, device_queued = {}, {}
        for device in devices:
            queued.update(device.scheduler.waiting())
            device_queued[str(device.id)] = device.scheduler.queued
            account = device.account
            needed = (account.capacity_pages - account.free_pages - account.ahead_pages()) * account.page_bytes
            self.most_needed_bytes = max(self.most_needed_bytes, needed)
            mapped[str(device.id)] = needed + account.kept_pages() * account.page_bytes
            for key, engine in device.engines.items():
                running[key.model] += engine.running
                queued[key.model] += len(engine.intake.waiting)
                model_bytes[key.model] += engine.kv.mapped_bytes()
        self._samples.append(
            Sample(
                t_s=now_s - self.offset_s,
                queued={m: n for m, n in sorted(queued.items()) if n},
                running={m: n for m, n in sorted(running.items()) if n},
                mapped_bytes=mapped,
                model_bytes={m: n for m, n in sorted(model_bytes.items()) if n},
                device_queued=device_queued,
            )
        )

    def timeline(self, device_bytes: dict[str, int]) -> Timeline:
        """Everything seen of the system."""
        present = [row for rows in self._residences.values() for row in rows]
        residences = sorted(self._past + present, key=lambda r: (r.start_s, r.model, r.device))
        return Timeline(samples=self._samples, residences=residences, device_bytes=device_bytes)


def _with(row: Residence, ready_s: float | None = None, end_s: float | None = None) -> Residence:
    return Residence(
        model=row.model,
        device=row.device,
        start_s=row.start_s,
        ready_s=row.ready_s if ready_s is None else ready_s,
        end_s=row.end_s if end_s is None else end_s,
        reason=row.reason,
    )
