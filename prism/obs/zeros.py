"""Counters at zero before their first event: a counter that appears with its first event shows no increase for it, and
alerts and dashboards cannot tell "never" from "not measured".

A catalog of hundreds of models has thousands of such series. They are text, made once and put between what was counted
when somebody asks: as values of every process they took 36 MiB of each and a tenth of a second of every answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

from prism.obs import names
from prism.obs.definition import MetricDef, MetricKind

OUTCOMES: Final = ("ok", "rejected", "failed", "cancelled", "invalid")
REASONS: Final = ("queue_full", "rate_limit", "draining", "too_large", "unauthorized", "forbidden")
PROCESSES: Final = ("valkey", "front", "controller", "agent", "zygote")

_VALUES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    names.REQUESTS.name: {"outcome": OUTCOMES},
    names.SLO.name: {"objective": ("ttft", "tpot"), "met": ("true", "false")},
    names.REFUSED.name: {"reason": REASONS},
    names.HTTP.name: {
        "method": ("POST",),
        "route": ("/v1/chat/completions", "/v1/completions"),
        "status": ("200",),
    },
    names.ACTIVATIONS.name: {"source": ("disk",), "outcome": ("ok", "failed")},
    names.WEIGHT_ARRIVALS.name: {"outcome": ("ok", "failed")},
    names.DECISIONS.name: {"scheduler": ("cluster", "device"), "action": ("Activate",), "reason": ("demand",)},
    names.EVICTIONS.name: {"reason": ("make_room",)},
    names.RESTARTS.name: {"process": PROCESSES},
    names.STORE_ERRORS.name: {"process": ("front", "controller", "agent")},
    names.RELOADS.name: {"outcome": ("applied", "unchanged", "invalid")},
}
"""What labels other than ``model`` and ``key`` can be, or one value of theirs where only events tell."""

_FAMILY: Final = b"# HELP "


class Zeros:
    """The series of every counter for ``models`` and ``keys``, devices and machines being told by events only (``""``
    until then)."""

    def __init__(self, models: Iterable[str], keys: Iterable[str]) -> None:
        known = {"model": tuple(models), "key": tuple(keys)}
        self._series = {
            metric.name: list(_series_of(metric, known))
            for metric in names.METRICS
            if metric.kind is MetricKind.COUNTER
        }

    def complete(self, text: bytes) -> bytes:
        """``text`` (the exposition format) with a zero for each series that it does not have."""
        families = {_name_of(family): family for family in text.split(_FAMILY)[1:]}
        for metric in names.METRICS:
            series = self._series.get(metric.name)
            if series is not None:
                families[metric.name] = _completed(families.get(metric.name) or _head(metric), series)
        return b"".join(_FAMILY + family for family in families.values())


def _series_of(metric: MetricDef, known: dict[str, tuple[str, ...]]) -> Iterator[bytes]:
    """``name{label="value",...}`` for every combination, labels in the order of the exposition format."""
    values = {**known, **_VALUES.get(metric.name, {})}
    labels = sorted(metric.labels)
    escaped = [[f'{label}="{_escaped(value)}"' for value in values.get(label, ("",))] for label in labels]
    for combination in product(*escaped):
        inside = "{" + ",".join(combination) + "}" if combination else ""
        yield (metric.name + inside).encode()


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _name_of(family: bytes) -> str:
    return family[: family.index(b" ")].decode()


def _head(metric: MetricDef) -> bytes:
    text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"{metric.name} {text}\n# TYPE {metric.name} counter\n".encode()


def _completed(family: bytes, series: list[bytes]) -> bytes:
    counted = {line.rpartition(b" ")[0] for line in family.splitlines()}
    missing = [name for name in series if name not in counted]
    return family + b" 0.0\n".join(missing) + (b" 0.0\n" if missing else b"")
