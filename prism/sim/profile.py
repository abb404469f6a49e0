"""What one model can carry on devices of its own, and what memory it leaves or lacks there (AQUA, section 4).

The largest rate at which a share of the requests meets both objectives is found by halving an interval, then in steps
of half a request a second upward (the paper's search: attainment is not quite monotonic in the rate). The memory that
is free *at that rate* is what the model could lend. For bursts above it the model runs on devices with memory without
end: what its requests hold beyond the real devices' memory is what fair scheduling would page out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from prism.config.profiles import Profile
from prism.config.units import Bytes
from prism.core.errors import InvalidValue
from prism.core.settings import PolicySettings
from prism.core.specs import DeviceRates, ModelSpec
from prism.sim.calibration import Calibration
from prism.sim.cluster_sections import Cluster, EngineSection, NodeGroup
from prism.sim.gpus import gpu
from prism.sim.machines import USABLE
from prism.sim.roofline import StepCost, step_cost
from prism.sim.run import SimResult, SimSpec, simulate
from prism.trace.lengths import LengthTable, length_table
from prism.trace.row import TraceRow

BURSTS: Final = (2, 3, 5)
"""Multiples of the stable rate for which swap space is found (the paper's)."""
STEP_RPS: Final = 0.5
_BURST_S: Final = 60.0
_UNBOUNDED: Final = 32
"""Times a device's memory that stand for memory without end."""
_MANY_RUNNING: Final = 1 << 14
_CHUNK_TOKENS: Final = 2048
_DRAWN: Final = 1000
"""Requests whose mean lengths are taken."""
_ROUNDS: Final = 8
"""Until how many run and what their steps take agree."""


@dataclass(frozen=True)
class ProfileSpec:
    """One question. Objectives are the model's own."""

    model: ModelSpec
    gpu: str = "H100"
    lengths: str = "sharegpt"
    target: float = 0.99
    """Share of the requests that must meet both objectives."""
    seconds: float = 120.0
    """How long each rate is tried."""
    seed: int = 0
    most_rps: float = 128.0
    calibration: Calibration | None = None

    def check(self) -> None:
        """Raises :class:`InvalidValue`."""
        gpu(self.gpu)
        length_table(self.lengths)
        if not 0.0 < self.target <= 1.0:
            raise InvalidValue("target", self.target, "must be a share above 0, at most 1")
        if not self.seconds > 0:
            raise InvalidValue("seconds", self.seconds, "must be positive")


def profile(spec: ProfileSpec, on_try: Callable[[float], None] = lambda rate_rps: None) -> Profile:
    """Search, then the bursts. ``on_try`` hears of each rate. Raises :class:`InvalidValue` when it does not fit."""
    spec.check()
    kind = gpu(spec.gpu)
    capacity_bytes = int(kind.memory_bytes * USABLE)
    if spec.model.shard_weight_bytes >= capacity_bytes - kind.process_bytes:
        why = f"a shard of {spec.model.name} has {spec.model.shard_weight_bytes} bytes, a device takes {capacity_bytes}"
        raise InvalidValue("gpu", spec.gpu, why)
    rate_rps, used_bytes = _largest_rate(spec, on_try)
    bursts = {times: _burst_bytes(spec, rate_rps or STEP_RPS, times, on_try) for times in BURSTS}
    cost = (spec.calibration and spec.calibration.step_cost(spec.model, kind)) or step_cost(spec.model, kind)
    rates = _rates(spec, cost, rate_rps)
    return Profile(
        model=str(spec.model.name),
        gpu=spec.gpu,
        tp=spec.model.tp,
        lengths=spec.lengths,
        target=spec.target,
        ttft_s=spec.model.slo_ttft_s,
        tpot_s=spec.model.slo_tpot_s,
        rate_rps=rate_rps,
        free_bytes=max(capacity_bytes - used_bytes, 0),
        swap_bytes={times: max(held - capacity_bytes, 0) for times, held in bursts.items()},
        burst_bytes={times: max(held - used_bytes, 0) for times, held in bursts.items()},
        kind=kind.device_kind,
        step_s=rates.step_s,
        sequence_s=rates.sequence_s,
        bytes_per_s=rates.bytes_per_s,
        prefill_tokens_per_s=cost.prefill_tokens_per_s(_CHUNK_TOKENS),
    )


def _rates(spec: ProfileSpec, cost: StepCost, rate_rps: float) -> DeviceRates:
    """Of the decode steps of as many requests as run at that rate, by Little's law."""
    rng, table = np.random.default_rng(spec.seed), length_table(spec.lengths)
    lengths = [_within(table, rng, spec.model.context_tokens) for _ in range(_DRAWN)]
    prompt, output = (sum(column) / _DRAWN for column in zip(*lengths, strict=True))
    running, context = 1, 0
    for _ in range(_ROUNDS):
        context = round(running * (prompt + output / 2))
        run, _load = cost.decode(running, context)
        running = max(1, round(rate_rps * output * run.first_s))
    read_bytes = spec.model.shard_weight_bytes + context * spec.model.shape.kv_bytes_per_rank(spec.model.tp)
    host_s = cost.overhead_s + cost.comm_s
    sequence_s = cost.sequence_s + cost.comm_token_s
    read_s = max(cost.decode(running, context)[0].first_s - host_s - sequence_s * running, 1e-9)
    return DeviceRates(host_s, sequence_s, read_bytes / read_s)


def _largest_rate(spec: ProfileSpec, on_try: Callable[[float], None]) -> tuple[float, int]:
    """The rate, and the most memory a device held at it (at the smallest rate when none meets the objectives)."""
    seen: dict[float, tuple[bool, int]] = {}

    def meets(rate_rps: float) -> bool:
        if rate_rps not in seen:
            on_try(rate_rps)
            rows = tuple(_steady(spec, rate_rps))
            result = simulate(_run(spec, rows))
            seen[rate_rps] = result.report.all.attainment.both >= spec.target, _peak_bytes(result)
        return seen[rate_rps][0]

    low, high = 0.0, STEP_RPS
    while meets(high):
        low = high
        if high >= spec.most_rps:
            break
        high = min(2 * high, spec.most_rps)
    while high - low > STEP_RPS:
        middle = round((low + high) / 2 / STEP_RPS) * STEP_RPS
        if middle in (low, high):
            break
        low, high = (middle, high) if meets(middle) else (low, middle)
    while low and low + STEP_RPS <= spec.most_rps and meets(low + STEP_RPS):
        low += STEP_RPS
    return low, seen[low or STEP_RPS][1]


def _burst_bytes(spec: ProfileSpec, rate_rps: float, times: int, on_try: Callable[[float], None]) -> int:
    on_try(rate_rps * times)
    return _peak_bytes(simulate(_run(spec, tuple(_burst(spec, rate_rps, times)), unbounded=True)))


def _steady(spec: ProfileSpec, rate_rps: float) -> Iterator[TraceRow]:
    return _poisson(spec, [(0.0, spec.seconds, rate_rps)])


def _burst(spec: ProfileSpec, rate_rps: float, times: int) -> Iterator[TraceRow]:
    """The stable rate, then a minute of ``times`` as much (the paper's burst)."""
    before_s = min(spec.seconds, _BURST_S)
    return _poisson(spec, [(0.0, before_s, rate_rps), (before_s, before_s + _BURST_S, rate_rps * times)])


def _poisson(spec: ProfileSpec, phases: list[tuple[float, float, float]]) -> Iterator[TraceRow]:
    rng, table = np.random.default_rng(spec.seed), length_table(spec.lengths)
    for begin_s, end_s, rate_rps in phases:
        at_s = begin_s + float(rng.exponential(1 / rate_rps))
        while at_s < end_s:
            prompt, output = _within(table, rng, spec.model.context_tokens)
            yield TraceRow(at_s, str(spec.model.name), prompt, output)
            at_s += float(rng.exponential(1 / rate_rps))


def _within(table: LengthTable, rng: np.random.Generator, context_tokens: int) -> tuple[int, int]:
    """Lengths that the model can serve: a prompt leaves room for its answer."""
    prompt, output = table.draw(rng)
    prompt = min(prompt, context_tokens - 1)
    return prompt, min(output, context_tokens - prompt)


def _group(spec: ProfileSpec, unbounded: bool) -> NodeGroup:
    tp = spec.model.tp
    memory = Bytes(_UNBOUNDED * gpu(spec.gpu).memory_bytes) if unbounded else None
    return NodeGroup(gpu=spec.gpu, nodes=1, gpus_per_node=tp, memory=memory)


def _run(spec: ProfileSpec, rows: tuple[TraceRow, ...], unbounded: bool = False) -> SimSpec:
    engine = EngineSection(max_running=_MANY_RUNNING) if unbounded else EngineSection()
    return SimSpec(
        cluster=Cluster(groups=(_group(spec, unbounded),), engine=engine),
        models=(spec.model,),
        policy=PolicySettings(),
        rows=lambda: rows,
        preload_share=1.0,
        sample_every_s=0.25,
        calibration=spec.calibration,
    )


def _peak_bytes(result: SimResult) -> int:
    """The most a device had in use at a time."""
    return result.world.recorder.most_needed_bytes
