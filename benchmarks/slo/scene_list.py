"""The scenes: who asks for what on which devices, and which two sides are compared.

All models are of one kind (12 MiB of weights, 9 KiB of KV a token), so that only load and policy tell them apart.
Devices are so small that the memory for KV runs out before the cores do; the control run of each scene, the first side
on devices with ample memory, shows whether that is so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prism.trace.replay.plan import Objective
from prism.trace.row import TraceRow

CONTROL = "ample memory"
"""The variant in which memory cannot be what decides."""
TOKEN_BYTES = 9216
"""KV of a token of these models."""


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of one model: ``(from_s, to_s, requests per second)`` pieces, with fixed lengths."""

    model: str
    pieces: tuple[tuple[float, float, float], ...]
    prompt: int
    output: int
    slo: Objective


@dataclass(frozen=True)
class Scene:
    """Loads, devices, and what is compared."""

    name: str
    figure: str
    """Of the Prism paper."""
    shows: str
    loads: tuple[Load, ...]
    devices: int
    device_mib: int
    ample_mib: int
    variants: dict[str, dict[str, Any]]
    """Label -> the policy's keys; the first is Prism."""
    both: dict[str, Any] = field(default_factory=dict)
    """Keys of the policy on every side."""
    pinned: bool = False
    """No model may leave: for scenes that are not about who is loaded."""

    @property
    def seconds(self) -> float:
        return max(piece[1] for load in self.loads for piece in load.pieces)

    @property
    def names(self) -> list[str]:
        return [load.model for load in self.loads]

    def policy(self, label: str) -> dict[str, Any]:
        """The catalog's policy section."""
        return {**self.both, **self.variants[next(iter(self.variants)) if label == CONTROL else label]}


_EASY = Objective(0.5, 0.05)
SCENES = (
    Scene(
        "memory",
        "figure8",
        "Two models on one device; one surges, then the other. Elastic memory against fixed shares, all else alike: "
        "fixed shares know no engines that stand still for others, so that here nobody does.",
        (
            Load("m1", ((0, 8, 4.5), (8, 20, 0.4)), 100, 150, _EASY),
            Load("m4", ((0, 9, 0.4), (9, 20, 4.5)), 100, 150, _EASY),
        ),
        1,
        48,
        160,
        {"elastic": {"name": "prism"}, "fixed shares": {"name": "static", "admission": "moore_hodgson"}},
        {"min_kv_tokens": 250, "longest_pause": "0s"},
        pinned=True,
    ),
    Scene(
        "placement",
        "figure10",
        "Four models on two devices; the two hot ones begin on the same. Planning looks 10 s back and ahead instead of "
        "60, as the scene is short; no replicas, as in the paper.",
        tuple(Load(name, ((0, 22, rate),), 100, 150, _EASY) for name, rate in
              (("m1", 4.5), ("m4", 0.05), ("m7", 4.5), ("m10", 0.05))),
        2,
        60,
        200,
        {"global scheduler": {"name": "prism"}, "without": {"name": "prism", "global_scheduler": False}},
        {"min_kv_tokens": 250, "planning_window": "10s", "rate_window": "10s", "rebalance_every": "1s",
         "max_replicas": 1},
    ),
    Scene(
        "admission",
        "figure11",
        "Two models on one device; the first has long prompts and a loose objective, the second short ones and a tight "
        "one. Moore-Hodgson over one queue against first come, first served over the same queue.",
        (
            Load("m1", ((0, 18, 2.7),), 600, 60, Objective(5.0, 0.1)),
            Load("m4", ((0, 18, 7.2),), 100, 60, Objective(0.3, 0.1)),
        ),
        1,
        44,
        160,
        {"Moore-Hodgson": {"name": "prism"}, "first come": {"name": "prism", "admission": "fcfs"}},
        {"min_kv_tokens": 64},
        pinned=True,
    ),
)  # fmt: skip


def rows_of(scene: Scene, seed: int, time: float = 1.0, rate: float = 1.0) -> list[TraceRow]:
    """The scene's trace; ``time`` shortens it at the same rates, ``rate`` multiplies all rates."""
    rows = []
    for index, load in enumerate(scene.loads):
        rng = np.random.default_rng([seed, index])
        for start_s, end_s, per_s in load.pieces:
            count = rng.poisson(per_s * rate * (end_s - start_s) * time)
            times = np.sort(rng.uniform(start_s * time, end_s * time, count))
            rows += [TraceRow(float(t), load.model, load.prompt, load.output) for t in times]
    return sorted(rows, key=lambda row: row.arrival_s)
