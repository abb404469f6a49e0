"""Makes modelled engines for instances whose weights are there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prism.core.ids import ModelName
from prism.core.instances import InstanceKey
from prism.core.specs import ModelSpec
from prism.sim.calibration import Calibration
from prism.sim.device import SimDevice
from prism.sim.engine import Engine
from prism.sim.gpus import GpuKind
from prism.sim.intake import EngineLimits
from prism.sim.kv import KvMemory
from prism.sim.queue import EventQueue
from prism.sim.roofline import StepCost, step_cost


class EngineMaker:
    """Of one world: the same limits for all engines, prefixes cached in blocks of ``block_tokens``. ``weights_stay``:
    no model ever leaves, so that a request that does not fit beside the weights of all never will."""

    def __init__(
        self,
        queue: EventQueue,
        limits: EngineLimits,
        block_tokens: int,
        calibration: Calibration | None,
        *,
        weights_stay: bool = False,
    ) -> None:
        self._queue, self._limits, self._block_tokens, self._calibration = queue, limits, block_tokens, calibration
        self._weights_stay = weights_stay
        self._costs: dict[tuple[ModelName, GpuKind], StepCost] = {}

    def make(self, key: InstanceKey, spec: ModelSpec, devices: Sequence[SimDevice], kv_cap_bytes: int | None) -> Engine:
        """The engine of an instance on ``devices`` (in rank order), with KV memory of its own."""
        accounts = [device.account for device in devices]
        kv = KvMemory(accounts, _token_bytes(spec, len(devices)), self._block_tokens, kv_cap_bytes)
        pools = tuple(dict.fromkeys(device.pool for device in devices))
        cost = self._cost(spec, devices[0].gpu)
        largest_tokens = partial(self._largest_tokens, key, kv, tuple(devices))
        return Engine(self._queue, key, cost, kv, pools, self._limits, devices[0], largest_tokens)

    def _largest_tokens(self, key: InstanceKey, kv: KvMemory, devices: tuple[SimDevice, ...]) -> int:
        """What ``kv`` could hold if nobody else held KV memory: beside its own weights, where others may leave for it,
        else beside everybody's and the page that each engine keeps."""
        if not self._weights_stay:
            return kv.largest_tokens(max(device.shards[key].weight_bytes for device in devices))
        return kv.largest_tokens(max(_fixed_bytes(device) for device in devices))

    def _cost(self, spec: ModelSpec, kind: GpuKind) -> StepCost:
        """The step cost of ``spec`` on ``kind``: measured if there is a measurement, else the roofline."""
        key = (spec.name, kind)
        cost = self._costs.get(key)
        if cost is None:
            measured = self._calibration.step_cost(spec, kind) if self._calibration is not None else None
            cost = self._costs[key] = measured or step_cost(spec, kind)
        return cost


def _fixed_bytes(device: SimDevice) -> int:
    account = device.account
    pages = max(0, len(account.tenants) - 1)
    return sum(shard.weight_bytes for shard in device.shards.values()) + pages * account.page_bytes


def _token_bytes(spec: ModelSpec, tp: int) -> int:
    """KV bytes of a token on each of ``tp`` devices; KV heads are not split further than one per device."""
    return max(1, spec.shape.kv_bytes_per_token // min(tp, spec.shape.kv_heads))
