"""Global placement (Prism, Algorithm 1) with what its listing leaves out: feasibility, tensor parallelism, moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prism.core.ids import DeviceId, ModelName
from prism.core.settings import KvprMode
from prism.core.specs import DeviceSpec
from prism.policy.pressure import Mask, PressureBoard, Shard


@dataclass(frozen=True, slots=True)
class PlacementModel:
    """One model that is to have a place. Sizes and rate are of the whole model."""

    name: ModelName
    weighted_rate: float
    """``r / s``."""
    weight_bytes: int
    min_kv_bytes: int = 0
    tp: int = 1
    current: tuple[DeviceId, ...] = ()
    """Where it is loaded now, in rank order; empty: nowhere."""
    fixed: bool = False
    """It stays where it is whatever the pressure."""

    @property
    def shard(self) -> Shard:
        tp = self.tp
        return Shard(self.weighted_rate / tp, -(-self.weight_bytes // tp), -(-self.min_kv_bytes // tp))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where Algorithm 1 puts one model, with the pressures it compared."""

    model: ModelName
    devices: tuple[DeviceId, ...]
    """Empty: no feasible device."""
    moved: bool
    """It is loaded now, and not on these devices."""
    current_kvpr: float | None
    """Of its current devices (the worst of them) at the time of the choice; None: nowhere, or not feasible any more."""
    best_kvpr: float


def place_models(
    models: Sequence[PlacementModel], devices: Sequence[DeviceSpec], tau: float, mode: KvprMode
) -> list[Assignment]:
    """Every model's place, in the order in which they were decided (weighted rate per shard, descending).

    ``tau`` is in units of KVPR. Deterministic: ties go to the larger model, then by name. A model without a feasible
    device gets an empty assignment and uses nothing. O(models x devices), vectorised over devices.
    """
    if not devices:
        return [Assignment(m.name, (), False, None, float("inf")) for m in models]
    board = PressureBoard(devices)
    index_of = {spec.id: i for i, spec in enumerate(devices)}
    order = sorted(models, key=lambda m: (-m.weighted_rate / m.tp, -m.weight_bytes, m.name))
    return [_assign(model, board, index_of, tau, mode) for model in order]


def _assign(
    model: PlacementModel, board: PressureBoard, index_of: dict[DeviceId, int], tau: float, mode: KvprMode
) -> Assignment:
    shard = model.shard
    allowed = board.fits(shard)
    current = [index_of[d] for d in model.current if d in index_of]
    stays_possible = len(current) == model.tp and all(allowed[i] for i in current)
    current_kvpr = float(board.pressure_for(shard, mode)[current].max()) if stays_possible else None
    if model.fixed and len(current) == model.tp:
        best: tuple[list[int], float] | None = (current, current_kvpr if current_kvpr is not None else float("inf"))
    else:
        best = board.best(shard, model.tp, allowed, mode)
    if best is None:
        return Assignment(model.name, (), False, None, float("inf"))
    chosen, best_kvpr = best
    if current_kvpr is not None and not current_kvpr - best_kvpr > tau:
        chosen = current
    for index in chosen:
        board.charge(index, shard)
    moved = bool(model.current) and set(chosen) != set(current)
    return Assignment(model.name, tuple(board.specs[i].id for i in chosen), moved, current_kvpr, best_kvpr)


def move_pays(current_kvpr: float, best_kvpr: float, activation_s: float, window_s: float) -> bool:
    """Whether a migration gains more service within the planning window than it costs.

    In units of the model's own requests (its rate cancels): during ``activation_s`` the load disturbs what runs and
    occupies memory twice; over the window the share of pressure that is relieved is gained.
    """
    if current_kvpr == float("inf"):
        return True
    if current_kvpr <= 0.0:
        return False
    return activation_s < window_s * (1.0 - best_kvpr / current_kvpr)


def mean_pressure(models: Sequence[PlacementModel], devices: Sequence[DeviceSpec]) -> float:
    """Pressure if everything were spread perfectly: a lower bound on the best placement's worst KVPR."""
    left = sum(d.memory_bytes for d in devices) - sum(m.weight_bytes for m in models)
    demand = sum(m.weighted_rate for m in models)
    return demand / left if left > 0 else float("inf")


def all_devices(board: PressureBoard) -> Mask:
    """The mask that allows every device."""
    return np.ones(len(board.specs), dtype=np.bool_)
