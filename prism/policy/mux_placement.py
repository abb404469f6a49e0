"""MuxServe's placement (Algorithm 1, "enumeration-based greedy LLM placement"; ICML 2024, section 3.2).

For every way to cut the devices into meshes: models in the order of the computation they are asked, each onto the mesh
whose estimated throughput gains most by it. Adapted: a model's tensor parallelism is given (Algorithm 2, which chooses
it with a share of the multiprocessors, falls away), so that meshes of more than one device are for models of that
width; models of one device share them or not, which is one more thing to enumerate. Of meshes that gain alike (all that
is asked, mostly) the one with the least computation so far is taken, then that with the most memory, as the authors'
code does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from prism.core.ids import DeviceId, ModelName
from prism.core.specs import DeviceSpec, ModelSpec
from prism.policy.map_room import MapRoom
from prism.policy.mux_estimate import PlannedLoad, Resident, throughputs
from prism.policy.pressure import domain_of

Mesh = tuple[DeviceId, ...]
FACTORS: Final = (1.0, 4.0)
"""Multiples of the expected load that a map is made for: the mean, which MuxServe plans for, and bursts of it."""
_MOST_OF_A_SIZE: Final = 2
"""Most meshes of one width above 1 that are tried."""
_ALIKE: Final = 100
"""Gains are compared in steps of this part of what is asked."""


def mux_placements(
    models: Sequence[ModelSpec],
    devices: Sequence[DeviceSpec],
    loads: Mapping[ModelName, PlannedLoad],
    min_kv_tokens: int,
) -> Iterator[dict[ModelName, tuple[DeviceId, ...]]]:
    """The greedy placement for every group of meshes and every one of :data:`FACTORS`. A model that fits no mesh has no
    place in it."""
    order = sorted(models, key=lambda m: (-loads[m.name].work_s(m), -m.weight_bytes, m.name))
    for meshes, factor in product(list(mesh_groups(models, devices)), FACTORS):
        yield _Greedy(devices, meshes, loads, min_kv_tokens, factor).place(order)


def mesh_groups(models: Sequence[ModelSpec], devices: Sequence[DeviceSpec]) -> Iterator[dict[int, list[Mesh]]]:
    """Ways to cut the devices: width -> meshes. As many of each width above 1 as models have it, at most two, or one
    fewer; single devices are all, or only those in no wider mesh."""
    widths = Counter(m.tp for m in models if m.tp > 1)
    counts = [range(min(n, _MOST_OF_A_SIZE), 0, -1) for _, n in sorted(widths.items(), reverse=True)]
    for chosen in product(*counts):
        left = _by_domain(devices)
        meshes: dict[int, list[Mesh]] = {}
        for width, count in zip(sorted(widths, reverse=True), chosen, strict=True):
            meshes[width] = [mesh for _ in range(count) if (mesh := _cut(left, width)) is not None]
        every: list[Mesh] = [(d.id,) for d in devices]
        yield {**meshes, 1: every}
        rest: list[Mesh] = [(id,) for ids in left for id in ids]
        if widths and rest:
            yield {**meshes, 1: rest}


def _by_domain(devices: Sequence[DeviceSpec]) -> list[list[DeviceId]]:
    domains: dict[str, list[DeviceId]] = {}
    for spec in devices:
        domains.setdefault(domain_of(spec), []).append(spec.id)
    return list(domains.values())


def _cut(domains: list[list[DeviceId]], width: int) -> Mesh | None:
    """Take ``width`` devices out of the domain that has most left."""
    best = max(domains, key=len)
    if len(best) < width:
        return None
    mesh = tuple(best[:width])
    del best[:width]
    return mesh


@dataclass(slots=True)
class _Seat:
    """One device while models are placed."""

    spec: DeviceSpec
    residents: list[Resident]
    carried: float = 0.0
    """Requests/s of all residents, for their part of each."""
    work_s: float = 0.0


class _Greedy:
    """One run of Algorithm 1's inner loop."""

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        meshes: Mapping[int, Sequence[Mesh]],
        loads: Mapping[ModelName, PlannedLoad],
        min_kv_tokens: int,
        factor: float,
    ) -> None:
        self._meshes, self._loads, self._factor = meshes, loads, factor
        self._room = MapRoom(devices, min_kv_tokens)
        self._seats = {d.id: _Seat(d, []) for d in devices}

    def place(self, order: Sequence[ModelSpec]) -> dict[ModelName, tuple[DeviceId, ...]]:
        """Each model of ``order`` in turn, where it gains most."""
        places: dict[ModelName, tuple[DeviceId, ...]] = {}
        for model in order:
            fitting = [m for m in self._meshes.get(model.tp, ()) if all(self._room.fits(model, id) for id in m)]
            if fitting:
                best = max(self._distinct(fitting), key=lambda mesh: self._merit(model, mesh))
                self._settle(model, best)
                places[model.name] = best
        return places

    def _distinct(self, meshes: Sequence[Mesh]) -> list[Mesh]:
        """Of meshes that are empty, one of each kind: the others gain the same."""
        seen: set[tuple[int, ...]] = set()
        found = []
        for mesh in meshes:
            if not any(self._seats[id].residents for id in mesh):
                kind = tuple(self._seats[id].spec.memory_bytes for id in mesh)
                if kind in seen:
                    continue
                seen.add(kind)
            found.append(mesh)
        return found

    def _merit(self, model: ModelSpec, mesh: Mesh) -> tuple[float, float, int]:
        load = self._loads[model.name]
        gain = sum(self._with(model, id) - self._seats[id].carried for id in mesh)
        asked = load.rate_per_s * self._factor
        alike = round(_ALIKE * gain / asked) if asked > 0.0 else 0
        work_s = max(self._seats[id].work_s for id in mesh)
        return float(alike), -work_s, min(self._room.left_bytes[id] for id in mesh)

    def _with(self, model: ModelSpec, id: DeviceId) -> float:
        """What the device carries with the model on it."""
        seat = self._seats[id]
        return _carried(seat.spec, [*seat.residents, (model, self._loads[model.name])], self._factor)

    def _settle(self, model: ModelSpec, mesh: Mesh) -> None:
        self._room.book(model, mesh)
        load = self._loads[model.name]
        for id in mesh:
            seat = self._seats[id]
            seat.residents.append((model, load))
            seat.carried = _carried(seat.spec, seat.residents, self._factor)
            seat.work_s += load.work_s(model) / model.tp


def _carried(device: DeviceSpec, residents: Sequence[Resident], factor: float) -> float:
    """A model of several devices counts for its part on each."""
    found = throughputs(device, residents, factor)
    return sum(t / model.tp for t, (model, _) in zip(found, residents, strict=True))
