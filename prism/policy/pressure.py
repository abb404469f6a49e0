"""KV pressure of devices and the device that bears a model best (Prism, section 6.2).

``KVPR = w_req_rate / shared_kv``: the sum of ``r / s`` of a device's models over the memory that their weights leave.
A :class:`PressureBoard` holds these sums as vectors over all devices, so that one choice among a thousand devices
takes microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prism.core.settings import KvprMode
from prism.core.specs import DeviceSpec, ModelSpec

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Sizes = int | NDArray[np.int64]
"""Bytes per device; one number where all devices have the same (nearly always), which saves the vector operations."""


class Shard(NamedTuple):
    """What one tensor-parallel shard puts on a device (the whole model when ``tp`` is 1)."""

    weighted_rate: float
    """``r / s / tp``."""
    weight_bytes: int
    min_kv_bytes: int


def domain_of(spec: DeviceSpec) -> str:
    """The name of the device's interconnect domain: its own, or that of its machine."""
    return spec.domain or f"node {spec.node}"


def kv_floor_bytes(spec: ModelSpec, min_kv_tokens: int) -> int:
    """KV memory without which the whole model should not be loaded: what the catalog asks for, and room for
    ``min_kv_tokens`` (at most the context)."""
    return max(
        spec.min_kv_bytes, min(min_kv_tokens, spec.context_tokens or min_kv_tokens) * spec.shape.kv_bytes_per_token
    )


def least_kv_bytes(spec: ModelSpec, min_kv_tokens: int) -> int:
    """The part of :func:`kv_floor_bytes` that falls to one tensor-parallel shard."""
    return -(-kv_floor_bytes(spec, min_kv_tokens) // spec.tp)


class PressureBoard:
    """Per device: capacity, memory left beside weights, promised KV, weighted rate. Index = position in ``specs``.

    Weights and KV are counted in whole pages of their device, since that is what its account charges; what an engine
    takes beside them counts with its weights.
    """

    def __init__(self, specs: Sequence[DeviceSpec]) -> None:
        self.specs = tuple(specs)
        self._weight_page = _one_or_all([s.weight_page_bytes or 1 for s in specs])
        self._kv_page = _one_or_all([s.page_bytes or 1 for s in specs])
        self._first_kv = _one_or_all([s.page_bytes for s in specs])
        self._engine = _one_or_all([s.engine_bytes for s in specs])
        self.capacity: Floats = np.array([s.memory_bytes for s in specs], dtype=np.float64)
        self.shared: Floats = self.capacity.copy()
        self.promised_kv: Floats = np.zeros(len(specs))
        self.rate: Floats = np.zeros(len(specs))
        self.seats: Floats = np.array([s.max_engines or np.inf for s in specs], dtype=np.float64)
        """Engines that the device may still have."""
        self._has_bounds = any(s.max_engines for s in specs)
        members: dict[str, list[int]] = {}
        for index, spec in enumerate(specs):
            members.setdefault(domain_of(spec), []).append(index)
        self.domains = [np.array(m) for m in members.values()]
        sizes = sorted({len(d) for d in self.domains})
        self._domain_groups = [np.array([d for d in self.domains if len(d) == size]) for size in sizes]
        """Domains of one size as the rows of a matrix, so that shards are placed without a loop over domains."""

    def resize(self, index: int, more_bytes: int) -> None:
        """The device has so much more, or less, than before."""
        self.capacity[index] += more_bytes
        self.shared[index] += more_bytes

    def weights_bytes(self, index: int, shard: Shard) -> int:
        """What the shard's weights and its engine's process take on the device."""
        spec = self.specs[index]
        return _whole(shard.weight_bytes, spec.weight_page_bytes or 1) + spec.engine_bytes

    def kv_bytes(self, index: int, shard: Shard) -> int:
        """What the shard's least KV takes on the device; one page is always mapped."""
        page_bytes = self.specs[index].page_bytes
        return max(page_bytes, _whole(shard.min_kv_bytes, page_bytes or 1))

    def need_on(self, index: int, shard: Shard) -> int:
        """Weights and least KV of the shard on one device."""
        return self.weights_bytes(index, shard) + self.kv_bytes(index, shard)

    def need(self, shard: Shard) -> Sizes:
        """Weights and least KV of the shard on each device."""
        whole = _whole_on_each(shard.min_kv_bytes, self._kv_page)
        if isinstance(whole, int) and isinstance(self._first_kv, int):
            least_kv: Sizes = max(whole, self._first_kv)
        else:
            least_kv = np.maximum(whole, self._first_kv)
        return self._weights(shard) + least_kv

    def _weights(self, shard: Shard) -> Sizes:
        return _whole_on_each(shard.weight_bytes, self._weight_page) + self._engine

    def charge(self, index: int, shard: Shard) -> None:
        self.shared[index] -= self.weights_bytes(index, shard)
        self.promised_kv[index] += self.kv_bytes(index, shard)
        self.rate[index] += shard.weighted_rate
        self.seats[index] -= 1.0

    def release(self, index: int, shard: Shard) -> None:
        self.shared[index] += self.weights_bytes(index, shard)
        self.promised_kv[index] -= self.kv_bytes(index, shard)
        self.rate[index] = max(0.0, self.rate[index] - shard.weighted_rate)
        self.seats[index] += 1.0

    def kvpr(self) -> Floats:
        """Pressure of every device as it is; infinite where weights leave nothing."""
        return _ratio(self.rate, self.shared)

    def pressure_for(self, shard: Shard, mode: KvprMode) -> Floats:
        """The pressure that is compared when ``shard`` looks for a device."""
        if mode is KvprMode.PAPER:
            return self.kvpr()
        return _ratio(self.rate + shard.weighted_rate, self.shared - self._weights(shard))

    def fits(self, shard: Shard) -> Mask:
        """Devices where the shard leaves everyone's least KV reserve, its own included, and its engine has a seat."""
        return self.with_seat(self.shared - self.promised_kv >= self.need(shard))

    def with_seat(self, mask: Mask) -> Mask:
        """Those of ``mask`` that may have one more engine."""
        return mask & (self.seats > 0.0) if self._has_bounds else mask

    def could_ever_fit(self, shard: Shard) -> Mask:
        mask: Mask = self.capacity >= self.need(shard)
        return mask

    def best(self, shard: Shard, tp: int, allowed: Mask, mode: KvprMode) -> tuple[list[int], float] | None:
        """The ``tp`` different allowed devices of one domain with the least pressure, and the worst among theirs.

        Ties go to the device with more memory left, then to the first. None: no domain has enough allowed devices.
        """
        pressure = np.where(allowed, self.pressure_for(shard, mode), np.inf)
        return self._best(pressure, tp, allowed)

    def best_by(self, load: Floats, tp: int, allowed: Mask) -> list[int] | None:
        """The same for any number per device in place of the pressure."""
        best = self._best(np.where(allowed, load, np.inf), tp, allowed)
        return None if best is None else best[0]

    def in_order(self, load: Floats, allowed: Mask) -> list[int]:
        """The allowed devices, each as :meth:`best_by` would name it for one shard once those before it were not
        allowed any more."""
        found = allowed.nonzero()[0]
        order: list[int] = found[np.lexsort((-self.shared[found], load[found]))].tolist()
        return order

    def _best(self, pressure: Floats, tp: int, allowed: Mask) -> tuple[list[int], float] | None:
        if tp == 1:
            index = self._least(pressure)
            return None if not allowed[index] else ([index], float(pressure[index]))
        found: tuple[float, NDArray[np.intp]] | None = None
        for group in self._domain_groups:
            if group.shape[1] < tp:
                continue
            worst = np.partition(pressure[group], tp - 1, axis=1)[:, tp - 1]  # of the tp best in every domain
            row = int(worst.argmin())
            if worst[row] < np.inf and (found is None or worst[row] < found[0]):
                found = float(worst[row]), group[row]
        return None if found is None else (self._least_in(found[1], pressure, tp), found[0])

    def _least(self, pressure: Floats) -> int:
        least = int(pressure.argmin())
        ties = (pressure == pressure[least]).nonzero()[0]
        return least if len(ties) == 1 else int(ties[self.shared[ties].argmax()])

    def _least_in(self, domain: NDArray[np.intp], pressure: Floats, tp: int) -> list[int]:
        order = np.lexsort((-self.shared[domain], pressure[domain]))
        return sorted(int(i) for i in domain[order[:tp]])


def _whole(nbytes: int, page_bytes: int) -> int:
    return -(-nbytes // page_bytes) * page_bytes


def _whole_on_each(nbytes: int, page_bytes: Sizes) -> Sizes:
    return -(-nbytes // page_bytes) * page_bytes


def _one_or_all(values: list[int]) -> Sizes:
    return values[0] if len(set(values)) == 1 else np.array(values, dtype=np.int64)


def _ratio(rate: Floats, shared: Floats) -> Floats:
    result = np.full(len(rate), np.inf)
    np.divide(rate, shared, out=result, where=shared > 0)
    return result
