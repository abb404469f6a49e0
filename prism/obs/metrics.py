"""The metrics of one process, and the merged text of all processes.

Every process of a server has ``PROMETHEUS_MULTIPROC_DIR`` (set by the supervisor before it starts them) and writes its
values into files there; whoever answers ``/metrics`` merges them. Without that variable a process has only its own.

:mod:`prometheus_client` reads the variable when it is imported, so this module imports it only when metrics are made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

from prism.core.effects import Activate, Deactivate, Effect, GpuEffect, Hold
from prism.core.reasons import ReasonCode
from prism.obs import names
from prism.obs.definition import MetricDef, MetricKind

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    Made: TypeAlias = Counter | Gauge | Histogram

MULTIPROC_ENV: Final = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of :mod:`prism.obs.names` in one process. Label values are given by name; a wrong one is an error."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client

        self._client = prometheus_client
        self.registry = registry or prometheus_client.CollectorRegistry()
        self._made: dict[str, Made] = {d.name: self._make(d) for d in names.METRICS}

    def inc(self, metric: MetricDef, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter, or to a gauge that counts what is in flight."""
        found = self._of(metric, labels)
        assert isinstance(found, self._client.Counter | self._client.Gauge)
        found.inc(amount)

    def set(self, metric: MetricDef, value: float, **labels: str) -> None:
        """Set a gauge."""
        found = self._of(metric, labels)
        assert isinstance(found, self._client.Gauge)
        found.set(value)

    def observe(self, metric: MetricDef, value: float, **labels: str) -> None:
        """Add one value to a histogram."""
        found = self._of(metric, labels)
        assert isinstance(found, self._client.Histogram)
        found.observe(value)

    @contextmanager
    def timed(self, metric: MetricDef, **labels: str) -> Iterator[None]:
        """Observe how long the block takes, in seconds."""
        began_s = perf_counter()
        try:
            yield
        finally:
            self.observe(metric, perf_counter() - began_s, **labels)

    def decision(self, effect: Effect) -> None:
        """Count a decision that was carried out, with what follows from it (evictions, migrations)."""
        reason = getattr(effect, "reason", None)
        code = reason.code.value if reason is not None else "route"
        scheduler = "device" if isinstance(effect, GpuEffect | Hold) else "cluster"
        self.inc(names.DECISIONS, scheduler=scheduler, action=type(effect).__name__, reason=code)
        if isinstance(effect, Deactivate):
            for device in effect.devices:
                self.inc(names.EVICTIONS, model=effect.model, device=device, reason=code)
        elif isinstance(effect, Activate) and code == ReasonCode.MIGRATION:
            self.inc(names.MIGRATIONS, model=effect.model)

    def _of(self, metric: MetricDef, labels: dict[str, str]) -> Made:
        made = self._made[metric.name]
        return made.labels(**labels) if metric.labels else made

    def _make(self, metric: MetricDef) -> Made:
        if metric.kind is MetricKind.COUNTER:
            return self._client.Counter(
                metric.name.removesuffix("_total"), metric.help, metric.labels, registry=self.registry
            )
        if metric.kind is MetricKind.GAUGE:
            return self._client.Gauge(
                metric.name, metric.help, metric.labels, registry=self.registry, multiprocess_mode=metric.merge
            )
        return self._client.Histogram(
            metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self.registry
        )


def prepare_directory(folder: Path) -> dict[str, str]:
    """Empty ``folder`` of an earlier run's values; returns the environment that all of the server's processes need.

    Call it, and put the result into ``os.environ``, before the first :class:`Metrics` is made and any process started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.db"):
        old.unlink(missing_ok=True)
    return {MULTIPROC_ENV: str(folder)}


def forget_process(pid: int) -> None:
    """Drop the gauges of a process that ended, so that they are not shown for ever."""
    if MULTIPROC_ENV in os.environ:
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def render(metrics: Metrics) -> bytes:
    """What was counted, as text: all processes merged, or only ``metrics`` when this process is on its own."""
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess

    if MULTIPROC_ENV not in os.environ:
        return generate_latest(metrics.registry)
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
    return generate_latest(merged)


def expose(host: str, port: int) -> Callable[[], None]:
    """Answers ``GET /metrics`` with the values of all processes of this machine, where no front door does; call what is
    returned to stop. Raises ``OSError``."""
    from prometheus_client import CollectorRegistry, multiprocess, start_http_server

    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
    server, thread = start_http_server(port, host, merged)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
