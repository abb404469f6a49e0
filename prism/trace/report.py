"""What came of every request, and the report made of it. Shared by the replayer and the simulator.

A run yields one :class:`RequestRecord` per request (in any order, from any source: the live client or a simulated
world) and, when the system can be watched, a :class:`Timeline`. :func:`prism.trace.report_build.build_report` turns
them into a :class:`Report`, which is written as JSON here and as a page by :mod:`prism.trace.report_html`.

Definitions, as in the Prism paper (section 7): TTFT is the time from sending a request to its first token; TPOT the
mean time of each further token, ``(e2e - ttft) / (tokens - 1)``. Attainment is the share of *all* requests that met
the objective: a request that failed did not meet any, one with a single token has no TPOT to miss.
All times are seconds from the start of the run unless the name says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from prism.core.errors import InvalidValue

REPORT_VERSION: Final = 1

PERCENTILES: Final = (*(float(p) for p in range(100)), 99.5, 99.9, 100.0)
"""The percentiles that a :class:`Distribution` keeps: enough to draw a CDF and to read the tail."""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a run. ``error`` is empty when the whole answer arrived, else the kind of failure."""

    row: int
    """Index of the request in the trace as it was replayed (after transforms)."""
    model: str
    arrival_s: float
    """When the trace wants the request to be sent."""
    prompt_tokens: int
    output_tokens: int
    """Tokens that arrived (which may be fewer than the trace has)."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    error: str = ""
    lag_s: float = 0.0
    """How much later than ``arrival_s`` it was really sent."""
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    gaps: dict[int, int] = {}
    """Histogram of the times between token events: bin of :mod:`prism.trace.gaps` -> count."""
    max_gap_s: float = 0.0
    server_prompt_tokens: int | None = None
    """What the server counted, when it says."""
    detail: str = ""
    """The failure in words (the server's message, shortened)."""
    asked_tokens: int | None = None
    """Tokens that the trace wants, where the answer had another number of them."""

    def met_ttft(self, scale: float = 1.0) -> bool:
        """Whether the TTFT objective times ``scale`` was met. A request without objective meets it by finishing."""
        if self.error or self.ttft_s is None:
            return False
        return self.slo_ttft_s is None or self.ttft_s <= self.slo_ttft_s * scale

    def met_tpot(self, scale: float = 1.0) -> bool:
        """Whether the TPOT objective times ``scale`` was met; a single token has no TPOT and meets it."""
        if self.error:
            return False
        return self.slo_tpot_s is None or self.tpot_s is None or self.tpot_s <= self.slo_tpot_s * scale


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """``values[i]`` is the :data:`PERCENTILES` ``[i]``-th percentile of ``count`` numbers."""

    count: int
    mean: float
    values: list[float]

    def at(self, percentile: float) -> float:
        """The value at one of :data:`PERCENTILES`."""
        return self.values[PERCENTILES.index(percentile)]


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """Shares (0..1) of ``requests`` that met their TTFT objective, their TPOT objective, and both."""

    requests: int
    ttft: float
    tpot: float
    both: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one model, or of all. Distributions are None when there is no value."""

    name: str
    attainment: Attainment
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    slo_ttft_s: float | None = None
    """The objective, when all requests of the group have the same."""
    slo_tpot_s: float | None = None
    ttft_s: Distribution | None = None
    tpot_s: Distribution | None = None
    e2e_s: Distribution | None = None
    gap_s: Distribution | None = None
    """Times between token events, to within 5% (they are kept as histograms)."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Attainment of the requests due in ``[start_s, start_s + Report.window_s)``; models without any are absent."""

    start_s: float
    all: Attainment | None
    models: dict[str, Attainment]


class ScaledAttainment(msgspec.Struct, frozen=True, kw_only=True):
    """The same run judged with all objectives multiplied by ``scale`` (the run itself was scheduled with scale 1)."""

    scale: float
    attainment: Attainment


class Sample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The system at one moment. Absent keys mean unknown, not zero."""

    t_s: float
    queued: dict[str, int] = {}
    """Waiting requests by model."""
    running: dict[str, int] = {}
    """Running requests by model."""
    mapped_bytes: dict[str, int] = {}
    """Physical memory in use by device (weights, KV and buffers)."""
    model_bytes: dict[str, int] = {}
    """Mapped KV bytes by model."""
    device_queued: dict[str, int] = {}
    """Waiting requests by device."""


class Residence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model on a device: ``start_s`` the activation began, ``ready_s`` it could serve (None: not seen), ``end_s`` it
    left (None: still there at the end)."""

    model: str
    device: str
    start_s: float
    ready_s: float | None = None
    end_s: float | None = None
    reason: str = ""


class Timeline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was seen of the system during a run."""

    samples: list[Sample] = []
    residences: list[Residence] = []
    device_bytes: dict[str, int] = {}
    """Capacity of each device."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run: how to repeat it, what came of it, and what the system did meanwhile."""

    kind: Literal["replay", "sim"]
    title: str
    settings: dict[str, object]
    """All that is needed to repeat the run (JSON values): trace and hash, transforms, seeds, objectives, versions."""
    span_s: float
    """From the first due time to the last answer."""
    window_s: float
    all: Group
    models: list[Group]
    windows: list[Window]
    by_scale: list[ScaledAttainment]
    lag_s: Distribution | None
    """How late requests were sent; None when nothing was sent (simulated)."""
    requests_per_s: float
    output_tokens_per_s: float
    timeline: Timeline
    notes: list[str]
    """What a reader must know to trust the numbers (the sender fell behind, the run was resumed, ...)."""
    version: int = REPORT_VERSION

    def model(self, name: str) -> Group:
        """The group of one model. Raises :class:`InvalidValue` naming those there are."""
        for group in self.models:
            if group.name == name:
                return group
        raise InvalidValue("model", name, "no such model in the report", [g.name for g in self.models])


def write_report(report: Report, path: Path) -> None:
    """Write ``report`` as indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def read_report(path: Path) -> Report:
    """The report in ``path``. Raises :class:`InvalidValue` naming the file when it is not one."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError as exc:
        raise InvalidValue("report", str(path), f"is not a report: {exc}") from exc
    if report.version != REPORT_VERSION:
        raise InvalidValue("version", report.version, "unknown report version", [REPORT_VERSION], where=str(path))
    return report
