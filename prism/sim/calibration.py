"""A measured table: step times of real engines, from which the roofline's constants are fitted.

The table is JSON::

    {"gpu": "cpu", "machine": "2 cores, 24 GB", "samples": [
        {"model": "demo-llama", "kind": "prefill", "tokens": 512, "context": 0, "sequences": 1, "seconds": 0.031},
        {"model": "demo-llama", "kind": "decode", "batch": 4, "context": 1200, "seconds": 0.0061}],
     "gpu_overrides": {"pcie_bytes_per_s": 2.1e9, "overlap_gain": 1.0}}

For every model with samples the unknowns ``overhead``, ``per sequence``, ``per token``, ``per pair`` and ``per
context token`` are found by least squares with non-negative coefficients, weighted so that every sample counts by its
relative error, and two more that need particular samples (0 without them): ``entry``, what a request that enters
takes of its prefill step beside its tokens (bursts: ``ttft`` samples of several sequences), and ``switch``, what the
first decode step of an engine takes more that decoded for nobody before (``decode`` samples that are means over
answers of different lengths).
Reading the weights costs as much as computing some number of tokens, the *knee*; the one with the least error is
taken. :mod:`prism.sim.calibrate` makes such a table from a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from prism.core.errors import InvalidValue
from prism.core.specs import ModelSpec
from prism.sim.gpus import GpuKind
from prism.sim.roofline import StepCost


class StepSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step, with nothing else running on the device; or (``ttft``) a lone request's time to first token:
    its prefill and the way through the rest of the system. A burst's is that of its last first token."""

    model: str
    kind: Literal["prefill", "ttft", "decode"]
    seconds: float
    tokens: int = 0
    """New prompt tokens (prefill, ttft); tokens of the answers over which ``seconds`` is the mean (decode; 0: one step
    in the middle of an answer)."""
    sequences: int = 1
    """Requests whose tokens these are."""
    steps: int = 1
    """Prefill steps that they took (ttft; a burst's first request enters before the others have come)."""
    batch: int = 0
    """Sequences (decode)."""
    context: int = 0
    """Tokens in the cache, over all sequences."""


class CalibrationFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table."""

    gpu: str
    machine: str
    samples: list[StepSample]
    gpu_overrides: dict[str, float] = {}


@dataclass(frozen=True)
class Calibration:
    """Fitted costs by model; other models keep the roofline."""

    gpu_name: str
    overrides: dict[str, float]
    costs: dict[str, dict[str, float]]
    request_s: float = 0.0
    """What a request takes beside its steps (front door, queue, scheduler); 0 without ``ttft`` samples. It belongs into
    the cluster file as ``timing.front``, with ``deliver`` 0."""

    def gpu(self, kind: GpuKind) -> GpuKind:
        """``kind`` with the measured rates in place of the table's."""
        if kind.name != self.gpu_name or not self.overrides:
            return kind
        known = {field.name for field in fields(GpuKind)} - {"name", "memory_bytes", "page_bytes"}
        for key in self.overrides:
            if key not in known:
                raise InvalidValue(f"gpu_overrides.{key}", self.overrides[key], "no such rate", sorted(known))
        changed: dict[str, float] = dict(self.overrides)
        return replace(kind, **changed)  # type: ignore[arg-type]

    def step_cost(self, spec: ModelSpec, kind: GpuKind) -> StepCost | None:
        """Fitted cost of ``spec`` on ``kind``; None when it was not measured there."""
        fitted = self.costs.get(spec.name)
        if fitted is None or kind.name != self.gpu_name:
            return None
        return StepCost(
            overhead_s=fitted["overhead_s"],
            sequence_s=fitted["sequence_s"],
            gemm_token_s=fitted["gemm_token_s"],
            weights_s=fitted["weights_s"],
            attention_pair_s=fitted["attention_pair_s"],
            kv_token_s=fitted["kv_token_s"],
            comm_s=0.0,
            comm_token_s=0.0,
            entry_s=fitted["entry_s"],
            switch_s=fitted["switch_s"],
            engine_share=kind.engine_share,
            overhead_is_compute=kind.overhead_is_compute,
            thread_share=kind.thread_share,
        )


def load_calibration(path: Path) -> Calibration:
    """The table in ``path``, fitted. Raises :class:`InvalidValue`."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=CalibrationFile)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidValue("calibration", str(path), f"cannot be read: {error}") from error
    return fit(table)


def fit(table: CalibrationFile) -> Calibration:
    """The constants behind ``table``."""
    by_model: dict[str, list[StepSample]] = {}
    for sample in table.samples:
        by_model.setdefault(sample.model, []).append(sample)
    # The way through the system is the same for all models, and so is the change from prefill to decoding (within what
    # can be measured), but one model's samples tell them apart from a step's overhead only roughly: they are the median
    # of what the models say, and the steps are fitted again to what they leave.
    known: dict[str, float] = {}
    for name in ("request_s", "switch_s"):
        known[name] = median([_fit_model(samples, known)[name] for samples in by_model.values()] or [0.0])
    costs = {model: _fit_model(samples, known) for model, samples in by_model.items()}
    return Calibration(table.gpu, dict(table.gpu_overrides), costs, known["request_s"])


_KNEES = (0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens whose linear layers cost as much as reading the weights: candidates."""
_EXACT = 1e-15
"""Squared relative errors below this are rounding: which of several exact fits has less of it says nothing."""
_NAMES = ("overhead_s", "sequence_s", "gemm_token_s", "attention_pair_s", "kv_token_s", "entry_s", "switch_s",
          "request_s")  # fmt: skip


def _fit_model(samples: list[StepSample], known: Mapping[str, float]) -> dict[str, float]:
    """The constants with the knee that leaves the least error; those that are ``known`` stay as they are."""
    seconds = np.array([sample.seconds for sample in samples])
    given = np.array([known.get(name, 0.0) for name in _NAMES])
    fixed = [name in known for name in _NAMES]
    if not any(sample.kind != "decode" and sample.sequences > 1 for sample in samples):
        fixed[_NAMES.index("entry_s")] = True  # nothing tells it from the way through the system
    if len({sample.tokens for sample in samples if sample.kind == "decode"}) < 2:
        fixed[_NAMES.index("switch_s")] = True  # nor this from a step's overhead
    best: tuple[float, dict[str, float]] | None = None
    for knee in _KNEES:
        rows = np.array([_row(sample, knee) for sample in samples], dtype=np.float64) / seconds[:, None]
        left = 1.0 - rows @ given
        rows[:, fixed] = 0.0
        found = non_negative_least_squares(rows, left)
        error = float(np.square(rows @ found - left).sum())
        if best is None or error < best[0] * (1 - 1e-6) - _EXACT:
            values = dict(zip(_NAMES, map(float, given + found), strict=True))
            best = error, {**values, "weights_s": values["gemm_token_s"] * knee}
    assert best is not None  # there is a first knee
    return best[1]


def _row(sample: StepSample, knee: int) -> tuple[float, ...]:
    """Coefficients of the unknowns in one sample, as :class:`StepCost` combines them."""
    if sample.kind == "decode":
        switches = 1.0 / (sample.tokens - 1) if sample.tokens > 1 else 0.0
        return 1.0, sample.batch, max(sample.batch, knee), 0.0, sample.context, 0.0, switches, 0.0
    entering, lone = sample.sequences, float(sample.kind == "ttft")
    pairs = sample.tokens * (sample.context + sample.tokens / 2 / max(1, entering))
    return sample.steps, entering, max(sample.tokens, knee), pairs, 0.0, entering, 0.0, lone


def non_negative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """``x >= 0`` that minimises ``|a x - b|`` (Lawson and Hanson's active set, for a handful of unknowns)."""
    count = a.shape[1]
    scale = np.maximum(np.linalg.norm(a, axis=0), 1e-300)
    a = a / scale
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if gradient.max() <= 1e-10:
            break
        free[int(np.argmax(gradient))] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            bad = free & (trial <= 0)
            if not bad.any():
                x = trial
                break
            step = np.min(x[bad] / np.maximum(x[bad] - trial[bad], 1e-300))
            x = x + step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
            if not free.any():
                break
    result: NDArray[np.float64] = x / scale
    return result
