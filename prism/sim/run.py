"""One simulated run: from a trace, a cluster, models and settings to a report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from prism.core.errors import InvalidValue
from prism.core.events import OperatorLoad
from prism.core.ids import ModelName
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.scheduler.decisions import Room
from prism.sim.calibration import Calibration
from prism.sim.cluster_sections import Cluster
from prism.sim.expected import expect, foresighted
from prism.sim.job import Job
from prism.sim.recorder import DecisionSink, RunRecorder
from prism.sim.world import World
from prism.trace.report import Report
from prism.trace.report_build import build_report
from prism.trace.row import TraceRow

Progress = Callable[[float, int], None]
"""Called with simulated seconds of the trace and requests ended so far."""


@dataclass(frozen=True)
class SimSpec:
    """Everything that decides a run. The same spec gives the same decisions, byte for byte."""

    cluster: Cluster
    models: tuple[ModelSpec, ...]
    policy: PolicySettings
    rows: Callable[[], Iterable[TraceRow]]
    """The trace, from its start at every call."""
    title: str = "simulation"
    default_tokens: tuple[int, int] = (512, 128)
    """Prompt and output tokens of rows that do not say."""
    slo_scale: float = 1.0
    """Multiplies every TTFT and TPOT objective."""
    tpot_scale: float | None = None
    """Multiplies TPOT objectives instead, when given."""
    warm_up_s: float = 30.0
    """Time before the trace begins, in which fixed maps and pinned models load."""
    preload_share: float = 0.0
    """During the warm-up load models, most requested first, until their weights take this share of the fleet's memory
    or there is no room beside everybody's least KV: the state of a system that has run for a while. (Fixed maps load
    everything they have a place for, whatever the share.)"""
    cold: bool = False
    """The devices join when the trace begins, with nothing on them, whatever the policy; else at the start of the
    warm-up."""
    block_tokens: int | None = None
    last_arrival_s: float | None = None
    """When the trace's last request comes, for progress; None: not known."""
    sample_every_s: float = 0.0
    """Samples of queues and memory for the report's plots; 0: none."""
    fast: bool = True
    calibration: Calibration | None = None
    settings: dict[str, object] = field(default_factory=dict)
    """Goes into the report: how to repeat the run."""


@dataclass(frozen=True)
class SimStats:
    """What a run cost and did."""

    wall_s: float
    cpu_s: float
    """Processor time, which other work on the machine does not stretch."""
    simulated_s: float
    requests: int
    events: int
    activations: int
    activation_s: tuple[float, ...]
    """Seconds of each finished activation."""
    decision_digest: str
    decisions: dict[str, int]
    """Number of decisions by ``kind:reason``."""
    steps: int
    retractions: int
    held_s: float
    """Time for which engines stood still for others, all together."""
    never_ended: int
    """Requests that were still there when nothing went on any more; they count as missed."""

    @property
    def times_real(self) -> float:
        """Simulated over processor time (one core)."""
        return self.simulated_s / self.cpu_s if self.cpu_s else float("inf")


@dataclass(frozen=True)
class SimResult:
    """A run's outcome; ``world`` is there for questions that the report does not answer."""

    report: Report
    stats: SimStats
    world: World


def simulate(
    spec: SimSpec,
    decisions: DecisionSink | None = None,
    progress: Progress | None = None,
    progress_every_s: float = 60.0,
) -> SimResult:
    """Run ``spec`` to its end. ``decisions`` receives the decision log line by line (JSON without line end).

    Raises :class:`InvalidValue` for a trace with a model that the catalog does not have.
    """
    with _few_collections():
        return _simulate(spec, decisions, progress, progress_every_s)


def _simulate(
    spec: SimSpec, decisions: DecisionSink | None, progress: Progress | None, progress_every_s: float
) -> SimResult:
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    world, recorder = _world(spec, decisions)
    _begin(spec, world)
    for at_s in world.run(_jobs(spec, world), progress_every_s if progress else 0.0):
        if progress is not None:
            progress(at_s - spec.warm_up_s, len(recorder.records))
    for job in world.front.open.values():
        recorder.never_ended(job)
    spent_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    report = build_report(
        recorder.records,
        kind="sim",
        title=spec.title,
        settings=spec.settings,
        timeline=recorder.timeline({str(d.id): d.spec.memory_bytes for d in world.devices.values()}),
        notes=_notes(world),
        sent=False,
    )
    return SimResult(report, _stats(world, spent_s, spec.warm_up_s), world)


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run makes millions of objects that live to its end and hardly any cycles; looking for cycles as often as Python
    does by itself takes a seventh of the time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _world(spec: SimSpec, decisions: DecisionSink | None) -> tuple[World, RunRecorder]:
    recorder = RunRecorder(float(spec.cluster.timing.deliver), decisions, spec.sample_every_s, spec.warm_up_s)
    tpot_scale = spec.slo_scale if spec.tpot_scale is None else spec.tpot_scale
    models = [
        replace(m, slo_ttft_s=m.slo_ttft_s * spec.slo_scale, slo_tpot_s=m.slo_tpot_s * tpot_scale) for m in spec.models
    ]
    world = World(
        spec.cluster,
        models,
        foresighted(spec.policy, lambda: expect(spec.rows(), spec.default_tokens)),
        recorder,
        block_tokens=spec.block_tokens,
        fast=spec.fast,
        calibration=spec.calibration,
    )
    return world, recorder


def _begin(spec: SimSpec, world: World) -> None:
    """Up to the moment at which the trace begins."""
    if spec.cold:
        world.queue.run_until(spec.warm_up_s)
        world.join()
        return
    world.join()
    if not spec.policy.cluster.policy.has_fixed_map:
        _preload(spec, world)
    world.queue.run_until(spec.warm_up_s)


def _preload(spec: SimSpec, world: World) -> None:
    room_bytes = spec.preload_share * sum(device.spec.memory_bytes for device in world.devices.values())
    rates = expect(spec.rows()).rates if room_bytes else {}
    for name in sorted(rates, key=lambda name: (-rates[name], name)):
        model = world.specs.get(ModelName(name))
        if model is not None and model.weight_bytes <= room_bytes and _has_free_room(world, model):
            room_bytes -= model.weight_bytes
            world.control.tell(OperatorLoad(model.name))


def _has_free_room(world: World, model: ModelSpec) -> bool:
    """Whether the scheduler would place the model without driving another one out."""
    room = world.control.scheduler.find_room(model.name, world.queue.now_s)
    return isinstance(room, Room) and not room.evict


def _jobs(spec: SimSpec, world: World) -> Iterator[Job]:
    names = _names(world)
    only = world.specs[next(iter(world.specs))] if len(world.specs) == 1 else None
    default_prompt, default_output = spec.default_tokens
    block = world.block_tokens
    for index, row in enumerate(spec.rows()):
        model = names.get(row.model) or (only if not row.model else None)
        if model is None:
            raise InvalidValue("model", row.model, f"row {index} of the trace is for an unknown model", sorted(names))
        prompt, output = row.prompt_tokens or default_prompt, row.output_tokens or default_output
        prompt = min(prompt, model.context_tokens - 1)
        output = max(1, min(output, model.context_tokens - prompt))
        job = Job(index, model, row.arrival_s + spec.warm_up_s, prompt, output)
        if row.prefix_hashes:
            job.blocks = row.prefix_hashes[: prompt // block]
        yield job


def _names(world: World) -> dict[str, ModelSpec]:
    names: dict[str, ModelSpec] = {}
    for spec in world.specs.values():
        for name in (spec.name, *spec.aliases):
            names[ModelName(name)] = spec
    return names


def _notes(world: World) -> list[str]:
    notes = [f"fault at {what}" for what in world.faults.happened]
    stuck = len(world.front.open)
    why = "nothing in the fleet could take them; they count as missed"
    return [*notes, f"{stuck} requests never ended: {why}"] if stuck else notes


def _stats(world: World, spent_s: tuple[float, float], warm_up_s: float) -> SimStats:
    recorder = world.recorder
    engines = [record.engine for record in world.nodes.instances.values() if record.engine is not None]
    return SimStats(
        wall_s=spent_s[0],
        cpu_s=spent_s[1],
        simulated_s=world.queue.now_s - warm_up_s,
        requests=len(recorder.records),
        events=world.queue.rung,
        activations=recorder.activations,
        activation_s=tuple(recorder.activation_s),
        decision_digest=recorder.decision_digest(),
        decisions=dict(sorted(recorder.counts.items())),
        steps=sum(engine.steps for engine in engines),
        retractions=sum(engine.retractions for engine in engines),
        held_s=sum(engine.held_s for engine in engines),
        never_ended=len(world.front.open),
    )
