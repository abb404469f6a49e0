"""What a device carries of the models that share it: MuxServe's throughput estimator (its section 3.3, equation 3).

A batch of ``b`` requests of model ``m`` is served in ``sum of all models' prefills + output tokens x decode step``, so
that its throughput is ``b`` over that time, and at most what is asked. The batch is bounded by the model's part of the
device's KV memory. Adapted: MuxServe profiles every model at every share of the multiprocessors; here, as in the Prism
paper's port, nobody is limited (MPS 100%), steps are a roofline of nominal rates, and decoding engines slow each other
down once their reads exceed the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.specs import DeviceSpec, ModelSpec

_FLOPS_PER_S: Final = 5.4e14
_BYTES_PER_S: Final = 2.5e12
_STEP_S: Final = 2.5e-3
"""An H100 as serving reaches it. The map needs how models compare rather than what one of them takes."""
_MOST_SEQUENCES: Final = 256.0
_ROUNDS: Final = 6
"""Batches and the slowdown they cause agree after so many, or the device is overloaded."""
_CARRIED: Final = 0.99
"""Part of what is asked that counts as all of it."""
_MOST_FACTOR: Final = 64.0


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What a model is expected to be asked."""

    rate_per_s: float
    prompt_tokens: float = 512.0
    output_tokens: float = 128.0

    def times(self, factor: float) -> PlannedLoad:
        """So many times as many requests."""
        return PlannedLoad(self.rate_per_s * factor, self.prompt_tokens, self.output_tokens)

    def work_s(self, model: ModelSpec) -> float:
        """Seconds of one device per second: every token passes all weights once, and a decode step reads them for as
        many requests as run together (taken to be eight)."""
        per_request_s = 2.0 * _parameters(model) * self.prompt_tokens / _FLOPS_PER_S
        per_request_s += self.output_tokens * model.weight_bytes / _BYTES_PER_S / 8.0
        return self.rate_per_s * per_request_s

    def request_bytes(self, model: ModelSpec) -> float:
        """KV of one request at its end, of the whole model."""
        return (self.prompt_tokens + self.output_tokens) * model.shape.kv_bytes_per_token

    def kv_bytes(self, model: ModelSpec) -> float:
        """KV of the requests that run at a time, of the whole model, if nothing slows them down."""
        step_s = _STEP_S + model.weight_bytes / model.tp / _BYTES_PER_S
        return self.rate_per_s * self.output_tokens * step_s * self.request_bytes(model)


Resident = tuple[ModelSpec, PlannedLoad]
"""A model with a shard on a device."""


@dataclass(slots=True)
class _Shard:
    """One resident's numbers on the device."""

    rate_per_s: float
    output_tokens: float
    prefill_s: float
    """Of one request."""
    step_s: float
    """Of a decode step without requests."""
    request_step_s: float
    """What one request adds to it."""
    read_s: float
    """The weights' part of ``step_s``."""
    most: float
    """Requests that its KV memory holds."""
    batch: float = 0.0

    def slowed_s(self, slowdown: float) -> float:
        """Decoding one whole answer, beside the batch it is in."""
        return self.output_tokens * (self.step_s + self.batch * self.request_step_s) * slowdown

    def bandwidth(self) -> float:
        """Share of the device's bandwidth that its decoding takes."""
        reading_s = self.read_s + self.batch * self.request_step_s
        return min(1.0, self.batch) * reading_s / (self.step_s + self.batch * self.request_step_s)


def throughputs(
    device: DeviceSpec, residents: Sequence[Resident], factor: float = 1.0, *, equal_shares: bool = False
) -> list[float]:
    """Requests/s of each resident, at most ``factor`` times what it is asked. KV memory is divided by what each would
    hold of it at its rate, or in ``equal_shares``."""
    shards = _shards(device, residents, factor, equal_shares)
    slowdown, prefills_s = 1.0, 0.0
    for _ in range(_ROUNDS):
        for shard in shards:
            others_s = prefills_s - shard.batch * shard.prefill_s
            each_s = shard.prefill_s + shard.output_tokens * slowdown * shard.request_step_s
            once_s = others_s + shard.output_tokens * slowdown * shard.step_s
            left = 1.0 - shard.rate_per_s * each_s
            shard.batch = min(shard.most, shard.rate_per_s * once_s / left) if left > 0.0 else shard.most
        prefills_s = sum(s.batch * s.prefill_s for s in shards)
        slowdown = max(1.0, sum(s.bandwidth() for s in shards))
    return [min(s.rate_per_s, s.batch / max(1e-12, prefills_s + s.slowed_s(slowdown))) for s in shards]


def margin(device: DeviceSpec, residents: Sequence[Resident], *, equal_shares: bool = False) -> float:
    """The largest multiple of what is asked that the device carries, at most 64; 0 when not even a 64th of it."""

    def carries(factor: float) -> bool:
        found = throughputs(device, residents, factor, equal_shares=equal_shares)
        return all(t >= _CARRIED * factor * load.rate_per_s for t, (_, load) in zip(found, residents, strict=True))

    if not any(load.rate_per_s > 0.0 for _, load in residents) or carries(_MOST_FACTOR):
        return _MOST_FACTOR
    low, high = 1.0 / _MOST_FACTOR, _MOST_FACTOR
    if not carries(low):
        return 0.0
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if carries(middle) else (low, middle)
    return low


def _shards(device: DeviceSpec, residents: Sequence[Resident], factor: float, equal_shares: bool) -> list[_Shard]:
    free = device.memory_bytes - sum(m.shard_weight_bytes + device.engine_bytes for m, _ in residents)
    wants = [1.0 if equal_shares else max(1e-9, load.kv_bytes(m)) / m.tp for m, load in residents]
    total = sum(wants)
    return [
        _shard(model, load, factor, max(0.0, free) * want / total)
        for (model, load), want in zip(residents, wants, strict=True)
    ]


def _shard(model: ModelSpec, load: PlannedLoad, factor: float, kv_bytes: float) -> _Shard:
    read_s = model.shard_weight_bytes / _BYTES_PER_S
    held = (load.prompt_tokens + load.output_tokens / 2) * model.shape.kv_bytes_per_token / model.tp
    return _Shard(
        rate_per_s=load.rate_per_s * factor,
        output_tokens=load.output_tokens,
        prefill_s=2.0 * _parameters(model) * load.prompt_tokens / model.tp / _FLOPS_PER_S,
        step_s=_STEP_S + read_s,
        request_step_s=held / _BYTES_PER_S,
        read_s=read_s,
        most=min(_MOST_SEQUENCES, kv_bytes * model.tp / max(1.0, load.request_bytes(model))),
    )


def _parameters(model: ModelSpec) -> float:
    return model.weight_bytes / model.shape.dtype_bytes
