"""What is compared: the grid of runs, and the set-up that all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prism.trace.report_build import SCALES

POLICIES = ("prism", "muxserve", "static", "qlm")

ABLATIONS: dict[str, dict[str, Any]] = {
    "without global scheduler": {"global_scheduler": False},
    "without admission": {"admission": "fcfs"},
    "without elastic memory": {"elastic_memory": False},
    "without engine pool": {"engine_pool": False},
    "without pauses": {"longest_pause": "0s"},
}
VARIANTS = {**ABLATIONS, "with pauses": {"longest_pause": "300ms"}}
"""What may stand behind ``prism`` where policies are named, to be run over whole axes."""

SCALE_FREE = ("static", "muxserve")
"""Policies that never look at an objective: one run is judged by every scale."""


@dataclass(frozen=True)
class Setup:
    """The same for every run of a comparison."""

    models_folder: Path
    """The demo models, as scripts/make_demo_models.py makes them."""
    models: int = 8
    device_mib: int = 80
    seconds: float = 16.0
    """Length of the replayed window of the (compressed) trace."""
    start_s: float = 0.0
    """Where the first repeat's window begins; the others' follow, so that repeats see different parts of the trace."""
    compress: float = 6.0
    """The trace's time runs so many times faster: activations and answers of the small models do, too."""
    base_rps: float = 6.0
    """Requests per second of every trace at rate 1, over its whole length."""
    prompt_scale: float = 1.0
    output_scale: float = 0.3
    layer_ms: float = 0.0
    """What a layer takes on a device (declared: ``devices: pace``); 0: what it takes."""
    most_prompt: int = 400
    most_output: int = 120
    seed: int = 0
    base_rate: float = 1.0
    base_scale: float = 5.0
    base_devices: int = 2
    recorded: Mapping[str, Path] = field(default_factory=dict, hash=False)
    """Trace files given for names of traces, instead of what would be found or generated."""

    def facts(self) -> dict[str, Any]:
        """For the report; paths by their names only."""
        facts = {k: v.name if isinstance(v, Path) else v for k, v in asdict(self).items()}
        return facts | {"recorded": {name: path.name for name, path in self.recorded.items()}}


@dataclass(frozen=True)
class RunSpec:
    """One run: one point of one curve."""

    experiment: str
    """``rate``, ``scale``, ``devices`` or ``ablation``: the axis it belongs to."""
    trace: str
    policy: str
    rate: float
    scale: float
    devices: int
    repeat: int
    variant: str = ""
    switches: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def x(self) -> float:
        """The place on the experiment's axis."""
        return {"rate": self.rate, "scale": self.scale, "devices": float(self.devices)}.get(self.experiment, 0.0)

    @property
    def label(self) -> str:
        return self.policy + (f" {self.variant}" if self.variant else "")

    @property
    def server(self) -> tuple[object, ...]:
        """Runs with the same value share a server: load and objectives can change under it, its map and devices not."""
        return (self.trace if self.policy in ("muxserve", "static") else "", self.label, self.devices)

    def measured(self, base_scale: float) -> RunSpec:
        """The run that this one is judged from: itself, or the one at the base scale where the policy does not look at
        objectives."""
        if self.policy in SCALE_FREE and self.scale / base_scale in SCALES:
            return replace(self, scale=base_scale)
        return self

    @property
    def folder(self) -> str:
        """The same for runs that are the same, whatever experiment asks for them."""
        name = f"{self.trace}-{self.label}-r{self.rate:g}-s{self.scale:g}-d{self.devices}-{self.repeat}"
        return name.replace(" ", "_")


@dataclass(frozen=True)
class Grid:
    """The axes. Each experiment varies one of them with the others at their base."""

    traces: tuple[str, ...] = ("arena", "hyperbolic")
    policies: tuple[str, ...] = POLICIES
    """Of :data:`POLICIES`; ``prism`` with one of :data:`VARIANTS` behind it, too."""
    rates: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    scales: tuple[float, ...] = (2.5, 5.0, 10.0, 15.0)
    devices: tuple[int, ...] = (2,)
    repeats: int = 3
    ablations: bool = True

    def runs(self, setup: Setup) -> list[RunSpec]:
        """All runs, one repeat after the other, runs on one server together; equal runs of several experiments come
        once for each."""
        return sorted(self._all(setup), key=lambda r: (r.repeat, str(r.server), r.scale, r.trace, r.rate))

    def _all(self, setup: Setup) -> Iterator[RunSpec]:
        for repeat in range(self.repeats):
            for trace in self.traces:
                yield from self._sweeps(trace, repeat, setup)
                if self.ablations:
                    for variant, switches in ABLATIONS.items():
                        yield RunSpec(
                            "ablation", trace, "prism", setup.base_rate, setup.base_scale, setup.base_devices, repeat,
                            variant, switches,
                        )  # fmt: skip

    def _sweeps(self, trace: str, repeat: int, setup: Setup) -> Iterator[RunSpec]:
        rate, scale, devices = setup.base_rate, setup.base_scale, setup.base_devices
        for label in self.policies:
            policy, _, variant = label.partition(" ")
            more = (variant, VARIANTS[variant]) if variant else ("", {})
            for x in self.rates:
                yield RunSpec("rate", trace, policy, x, scale, devices, repeat, *more)
            for x in self.scales:
                yield RunSpec("scale", trace, policy, rate, x, devices, repeat, *more)
            for count in self.devices if len(self.devices) > 1 else ():
                yield RunSpec("devices", trace, policy, rate, scale, count, repeat, *more)
            if self.ablations and not variant:
                yield RunSpec("ablation", trace, policy, rate, scale, devices, repeat)
