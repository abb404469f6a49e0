"""What would happen from a live system's state on, under its own or another policy.

The snapshot is the controller's view (``prism.core.views.ClusterView`` as JSON): devices, loaded models with rates,
waiting and running requests. The world starts in that state (instances adopted, pins, drained devices, rates as seen),
then requests arrive at the observed rates (Poisson) for the horizon. Lengths are drawn: a snapshot does not know them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from prism.config.catalog import load_catalog
from prism.config.units import Bytes
from prism.core.effects import Activate, Deactivate, Effect, RefuseWaiting
from prism.core.errors import InvalidValue
from prism.core.events import Arrivals, OperatorDrain, PinChanged
from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import InstanceKey
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.core.views import InstanceState
from prism.sim.calibration import Calibration, load_calibration
from prism.sim.cluster_file import load_cluster
from prism.sim.cluster_sections import Cluster, NodeGroup
from prism.sim.expected import Expected, foresighted
from prism.sim.job import Job
from prism.sim.models import catalog_specs
from prism.sim.recorder import RunRecorder
from prism.sim.world import World
from prism.trace.lengths import length_table
from prism.trace.report_build import attainment

SERVING: Final = (InstanceState.READY, InstanceState.LOADING, InstanceState.DRAINING)


class SnapshotDevice(msgspec.Struct, frozen=True):
    """The part of a :class:`prism.core.views.DeviceView` that is used; other keys are ignored."""

    id: DeviceId
    node: str
    capacity_bytes: int
    domain: str = ""
    draining: bool = False


class SnapshotInstance(msgspec.Struct, frozen=True):
    generation: int
    devices: tuple[DeviceId, ...]
    state: InstanceState
    running: int = 0
    waiting: int = 0


class SnapshotModel(msgspec.Struct, frozen=True):
    name: ModelName
    rate_per_s: float
    waiting: int = 0
    pinned: bool = False
    instances: tuple[SnapshotInstance, ...] = ()


class Snapshot(msgspec.Struct, frozen=True):
    """See the module."""

    devices: tuple[SnapshotDevice, ...]
    models: tuple[SnapshotModel, ...]
    policy: str = "prism"


@dataclass(frozen=True)
class Action:
    """One decision of the cluster scheduler."""

    at_s: float
    action: str
    model: str
    devices: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class DryRun:
    """The decisions within the horizon, and what the requests of the horizon would see."""

    policy: str
    horizon_s: float
    actions: tuple[Action, ...]
    requests: int
    ttft: float
    tpot: float
    both: float
    """Goodput: the share that meets TTFT and TPOT."""
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in ``path``. Raises :class:`InvalidValue` naming file and key."""
    try:
        snapshot = msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidValue("snapshot", str(path), f"is no output of `prism plan --snapshot`: {error}") from error
    if not snapshot.devices:
        raise InvalidValue("devices", [], "the snapshot has no devices", where=str(path))
    known = [device.id for device in snapshot.devices]
    for model in snapshot.models:
        for instance in model.instances:
            for device in instance.devices:
                if device not in known:
                    why = f"an instance of {model.name} is on a device that the snapshot does not have"
                    raise InvalidValue("instances.devices", device, why, known, str(path))
    return snapshot


def dry_run_file(
    snapshot: Path, *, catalog: Path, cluster: Path | None, policy: str | None, horizon_s: float, seed: int
) -> DryRun:
    """:func:`dry_run` on files."""
    found, models = read_snapshot(snapshot), load_catalog(catalog)
    settings = PolicySettings.named(policy) if policy else models.policy.settings()
    base = load_cluster(cluster) if cluster is not None else None
    calibration = None
    if cluster is not None and base is not None and base.calibration is not None:
        calibration = load_calibration(cluster.parent / base.calibration)
    return dry_run(found, catalog_specs(models), settings, base, horizon_s, seed, calibration)


def dry_run(
    snapshot: Snapshot,
    models: tuple[ModelSpec, ...],
    settings: PolicySettings,
    base: Cluster | None = None,
    horizon_s: float = 60.0,
    seed: int = 0,
    calibration: Calibration | None = None,
) -> DryRun:
    """What the scheduler of ``settings`` would do from ``snapshot`` on. ``base`` gives kinds of GPUs, links and timing
    (its number of nodes and its faults are ignored). Deterministic for ``seed``. Raises :class:`InvalidValue`."""
    if not 0.0 < horizon_s < float("inf"):
        raise InvalidValue("horizon-s", horizon_s, "must be positive")
    if seed < 0:
        raise InvalidValue("seed", seed, "must not be negative")
    by_node = _by_node(snapshot)
    cluster = _cluster(by_node, base)
    start_s = settings.cluster.rate_window_s
    recorder = RunRecorder(float(cluster.timing.deliver), None, 0.0, start_s)
    expecting = foresighted(settings, lambda: Expected({str(m.name): m.rate_per_s for m in snapshot.models}))
    # Pinned models are asked for when those that are there have been adopted.
    world = World(cluster, [replace(m, pinned=False) for m in models], expecting, recorder, calibration=calibration)
    names = dict(zip(world.devices, (d.id for devices in by_node for d in devices), strict=True))
    actions: list[Action] = []
    recorder.watch = lambda effect, now_s: _note(effect, now_s - start_s, names, actions)
    _replay_rates(snapshot, world, start_s)
    _adopt(snapshot, world, {theirs: ours for ours, theirs in names.items()}, [m.name for m in models if m.pinned])
    for _ in world.run(iter(_jobs(snapshot, world, start_s, horizon_s, seed))):
        pass
    for job in world.front.open.values():
        recorder.never_ended(job)
    shares = attainment(recorder.records)
    within = tuple(a for a in actions if a.at_s <= horizon_s)
    name = settings.cluster.policy.value
    notes = _notes(snapshot, world)
    return DryRun(name, horizon_s, within, shares.requests, shares.ttft, shares.tpot, shares.both, notes)


def _notes(snapshot: Snapshot, world: World) -> tuple[str, ...]:
    unknown = [str(m.name) for m in snapshot.models if m.name not in world.specs]
    stuck = len(world.front.open)
    notes = [f"left out, because the catalog does not have them: {', '.join(unknown)}"] if unknown else []
    if stuck:
        notes.append(f"{stuck} requests never ended: nothing in the fleet could take them; they count as missed")
    return tuple(notes)


def _by_node(snapshot: Snapshot) -> list[list[SnapshotDevice]]:
    """The devices of each node, those of one NVLink domain beside each other."""
    nodes: dict[str, dict[str, list[SnapshotDevice]]] = {}
    for device in snapshot.devices:
        nodes.setdefault(device.node, {}).setdefault(device.domain, []).append(device)
    return [[device for devices in domains.values() for device in devices] for domains in nodes.values()]


def _cluster(by_node: list[list[SnapshotDevice]], base: Cluster | None) -> Cluster:
    """One group per node, with the snapshot's capacities."""
    virtual = "/host:" in by_node[0][0].id
    template = base.groups[0] if base is not None else NodeGroup(gpu="cpu" if virtual else "H100")
    groups = tuple(
        msgspec.structs.replace(
            template,
            nodes=1,
            gpus_per_node=len(devices),
            memory=Bytes(min(d.capacity_bytes for d in devices)),
            domain_gpus=_domain_gpus(devices),
            shared_compute=virtual,
        )
        for devices in by_node
    )
    return msgspec.structs.replace(base or Cluster(), groups=groups, faults=())


def _domain_gpus(devices: list[SnapshotDevice]) -> int:
    """How many devices of a node NVLink joins. Domains of different sizes are taken for the smallest of them."""
    return min(Counter(device.domain for device in devices).values())


def _replay_rates(snapshot: Snapshot, world: World, until_s: float) -> None:
    """Tell the scheduler of past arrivals, so that it sees the snapshot's rates. It has no devices yet and does
    nothing about them."""
    times = [
        (until_s * (i + 0.5) / count, model.name)
        for model in snapshot.models
        if (count := round(model.rate_per_s * until_s)) and model.name in world.specs
        for i in range(count)
    ]
    for at_s, name in sorted(times):
        world.control.scheduler.on_event(Arrivals(name, 1), at_s)
    world.queue.run_until(until_s)


def _adopt(snapshot: Snapshot, world: World, ours: dict[DeviceId, DeviceId], pinned: list[ModelName]) -> None:
    """Make the snapshot's instances, then pin and drain what was pinned and drained."""
    world.join()
    for model in snapshot.models:
        if model.name not in world.specs:
            continue
        for instance in model.instances:
            if instance.state in SERVING:
                devices = tuple(ours[d] for d in instance.devices)
                world.nodes.adopt(InstanceKey(model.name, Generation(instance.generation)), devices)
    for name in dict.fromkeys([*pinned, *(m.name for m in snapshot.models if m.pinned and m.name in world.specs)]):
        world.control.tell(PinChanged(name, True))
    drained = tuple(ours[device.id] for device in snapshot.devices if device.draining)
    if drained:
        world.control.tell(OperatorDrain(drained))


def _jobs(snapshot: Snapshot, world: World, start_s: float, horizon_s: float, seed: int) -> list[Job]:
    """Requests that are there at the start, then Poisson arrivals, in order."""
    found: list[tuple[float, ModelSpec]] = []
    for index, model in enumerate(snapshot.models):
        spec = world.specs.get(model.name)
        if spec is None:
            continue
        present = model.waiting + sum(i.running + i.waiting for i in model.instances)
        found += [(0.0, spec)] * present
        found += [(at_s, spec) for at_s in _poisson(model.rate_per_s, horizon_s, seed, index)]
    found.sort(key=lambda item: (item[0], item[1].name))
    table, rng = length_table("arena"), np.random.default_rng([seed, 1])
    jobs = []
    for index, (at_s, spec) in enumerate(found):
        prompt, output = table.draw(rng)
        context = spec.context_tokens or prompt + output
        prompt = min(prompt, context - 1)
        jobs.append(Job(index, spec, start_s + at_s, prompt, max(1, min(output, context - prompt))))
    return jobs


def _poisson(rate_per_s: float, horizon_s: float, seed: int, index: int) -> Iterator[float]:
    if rate_per_s <= 0:
        return
    rng = np.random.default_rng([seed, 2, index])
    at_s = float(rng.exponential(1 / rate_per_s))
    while at_s < horizon_s:
        yield at_s
        at_s += float(rng.exponential(1 / rate_per_s))


def _note(effect: Effect, at_s: float, names: dict[DeviceId, DeviceId], into: list[Action]) -> None:
    if isinstance(effect, Activate | Deactivate):
        devices = tuple(names[d] for d in effect.devices)
        into.append(Action(at_s, type(effect).__name__.lower(), effect.model, devices, str(effect.reason)))
    elif isinstance(effect, RefuseWaiting):
        into.append(Action(at_s, "refuse", effect.model, (), str(effect.reason)))
