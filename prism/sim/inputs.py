"""From files and options to a :class:`prism.sim.run.SimSpec`: what the command line, sweeps and capacity share.

Picklable, so that a sweep's processes each build their own.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from prism.config.catalog import Catalog, load_catalog
from prism.config.profiles import ProfileStore
from prism.core.errors import InvalidValue
from prism.core.settings import PolicySettings
from prism.core.specs import ModelSpec
from prism.sim.calibration import Calibration, load_calibration
from prism.sim.cluster_file import load_cluster
from prism.sim.cluster_sections import Cluster, NodeGroup
from prism.sim.fault_check import fault_mistakes
from prism.sim.models import catalog_specs
from prism.sim.run import SimSpec
from prism.trace.files import Trace, open_trace
from prism.trace.lengths import length_table
from prism.trace.row import TraceRow
from prism.trace.transform import change_rate, fill_lengths, window

SAMPLES = 240
"""Samples of queues and memory over a run."""
STARTS = ("warm", "cold")
"""What stands on the devices when the trace begins: what fits of the models, most requested first (fixed maps: all they
have a place for); or nothing."""
NAMES_SHOWN = 20
"""Model names that an error lists at the most."""


@dataclass(frozen=True)
class Inputs:
    """One simulated run in terms of files and options."""

    trace: Path
    cluster: Path
    catalog: Path
    seed: int = 0
    calibration: Path | None = None
    profiles: Path | None = None
    """Of models (``prism profile``): where schedulers have them, they do not begin with guesses."""
    rate: float = 1.0
    slo_scale: float = 1.0
    limit_s: float | None = None
    policy: str | None = None
    gpus: int | None = None
    """Instead of the cluster file's number (of its first group)."""
    fast: bool = True
    sample: bool = False
    start: str = "warm"
    """One of :data:`STARTS`, whatever the policy."""

    def spec(self) -> SimSpec:
        """Read everything. Raises :class:`prism.core.errors.PrismError` subclasses for what is wrong with it."""
        self.check()
        catalog, cluster, trace = load_catalog(self.catalog), self._cluster(), open_trace(self.trace)
        policy = PolicySettings.named(self.policy) if self.policy else catalog.policy.settings()
        policy = replace(policy, cluster=replace(policy.cluster, live=catalog.live_scaling.mode))
        last_s = _last_arrival_s(trace, self.limit_s, catalog)
        return SimSpec(
            cluster=cluster,
            models=self._models(catalog, cluster),
            policy=policy,
            rows=_rows(trace, self.rate, self.limit_s, self.seed),
            title=f"{self.trace.name} on {cluster.gpus} devices, policy {policy.cluster.policy.value}",
            slo_scale=self.slo_scale,
            block_tokens=trace.info.block_tokens,
            last_arrival_s=last_s,
            sample_every_s=max(last_s / SAMPLES, 0.25) if self.sample else 0.0,
            preload_share=1.0,
            cold=self.start == "cold",
            fast=self.fast,
            calibration=self._calibration(cluster, catalog),
            settings=self._settings(policy, catalog, cluster),
        )

    def _models(self, catalog: Catalog, cluster: Cluster) -> tuple[ModelSpec, ...]:
        specs = catalog_specs(catalog)
        if self.profiles is None:
            return specs
        store, gpus = ProfileStore(self.profiles), {group.gpu for group in cluster.groups}
        return tuple(store.profiled(spec, gpus) for spec in specs)

    def check(self) -> None:
        """Look at the options without reading any file. Raises :class:`InvalidValue`."""
        for key, value in (("rate", self.rate), ("slo-scale", self.slo_scale), ("limit-s", self.limit_s)):
            if value is not None and not 0.0 < value < float("inf"):
                raise InvalidValue(key, value, "must be positive")
        if self.seed < 0:
            raise InvalidValue("seed", self.seed, "must not be negative")
        if self.gpus is not None and self.gpus < 1:
            raise InvalidValue("gpus", self.gpus, "must be at least 1")
        if self.policy is not None:
            PolicySettings.named(self.policy)
        if self.start not in STARTS:
            raise InvalidValue("start", self.start, "unknown start", STARTS)

    def _cluster(self) -> Cluster:
        cluster = load_cluster(self.cluster)
        if self.gpus is None:
            return cluster
        cluster = resized(cluster, self.gpus)
        for mistake in fault_mistakes(cluster):
            where = f"{self.cluster} with {self.gpus} GPUs"
            key = f"faults[{mistake.index}].{mistake.key}"
            raise InvalidValue(key, mistake.value, mistake.why, mistake.choices, where)
        return cluster

    def _calibration(self, cluster: Cluster, catalog: Catalog) -> Calibration | None:
        """Raises :class:`InvalidValue` for a table that would change nothing."""
        path = self.calibration
        if path is None:
            if cluster.calibration is None:
                return None
            path = self.cluster.parent / cluster.calibration
        found = load_calibration(path)
        kinds = sorted({group.gpu for group in cluster.groups})
        if found.gpu_name not in kinds:
            raise InvalidValue("gpu", found.gpu_name, "the cluster has no such GPU", kinds, str(path))
        if found.costs and not any(catalog.resolve(model) for model in found.costs):
            why = "the catalog has none of these models"
            raise InvalidValue("samples", sorted(found.costs), why, tuple(catalog.by_name)[:NAMES_SHOWN], str(path))
        return found

    def _settings(self, policy: PolicySettings, catalog: Catalog, cluster: Cluster) -> dict[str, object]:
        return {
            "trace": self.trace.name,
            "trace_crc32": zlib.crc32(self.trace.read_bytes()),
            "catalog": catalog.file.name,
            "cluster": msgspec.to_builtins(cluster, enc_hook=float),
            "policy": msgspec.to_builtins(policy),
            "seed": self.seed,
            "rate": self.rate,
            "slo_scale": self.slo_scale,
            "start": self.start,
            "limit_s": self.limit_s,
            "calibration": None if self.calibration is None else self.calibration.name,
            "profiles": None if self.profiles is None else self.profiles.name,
        }


def resized(cluster: Cluster, gpus: int) -> Cluster:
    """``cluster`` with ``gpus`` devices like those of its first group, as many to a node as there."""
    if gpus < 1:
        raise InvalidValue("gpus", gpus, "must be at least 1")
    group = cluster.groups[0]
    per_node = min(group.gpus_per_node, gpus)
    groups: list[NodeGroup] = [msgspec.structs.replace(group, nodes=gpus // per_node, gpus_per_node=per_node)]
    if gpus % per_node:
        groups.append(msgspec.structs.replace(group, nodes=1, gpus_per_node=gpus % per_node))
    return msgspec.structs.replace(cluster, groups=tuple(groups))


def numbers(key: str, text: str) -> tuple[float, ...]:
    """The comma-separated numbers in ``text``. Raises :class:`InvalidValue` naming ``key``."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise InvalidValue(key, text, "must be numbers separated by commas") from None


def counts(key: str, text: str) -> tuple[int, ...]:
    """The comma-separated whole numbers in ``text``. Raises :class:`InvalidValue` naming ``key``."""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise InvalidValue(key, text, "must be whole numbers separated by commas") from None


def default_processes() -> int:
    """One per usable core."""
    return len(os.sched_getaffinity(0))


def _rows(trace: Trace, rate: float, limit_s: float | None, seed: int) -> Callable[[], Iterable[TraceRow]]:
    def rows() -> Iterator[TraceRow]:
        found: Iterator[TraceRow] = fill_lengths(trace.rows(), length_table("arena"), seed)
        if limit_s is not None:
            found = window(found, 0.0, limit_s)
        return found if rate == 1.0 else change_rate(found, rate, seed)

    return rows


def _last_arrival_s(trace: Trace, limit_s: float | None, catalog: Catalog) -> float:
    """When the last request comes. Raises :class:`InvalidValue` for a trace without requests, or with one for a model
    that ``catalog`` does not have: now, not when the run comes to it."""
    rows = trace.rows() if limit_s is None else window(trace.rows(), 0.0, limit_s)
    known, last_s = dict.fromkeys(catalog.by_name), -1.0
    if len(catalog.models) == 1:
        known[""] = None
    for index, row in enumerate(rows):
        last_s = row.arrival_s
        if row.model not in known:
            choices = catalog.near(row.model) or tuple(known)[:NAMES_SHOWN]
            why = f"the catalog {catalog.file.name} does not have this model"
            raise InvalidValue("model", row.model, why, choices, f"{trace.path} row {index}")
    if last_s < 0.0:
        why = "has no requests" if limit_s is None else f"has no requests in its first {limit_s:g} s"
        raise InvalidValue("trace", str(trace.path), why)
    return last_s
