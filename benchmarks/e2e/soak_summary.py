"""What a server did during a soak, from its decision log and its node agent's log."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

EVICTIONS: Final = ("make_room", "starvation", "kv_pressure", "keep_alive", "scale_in")
_FAILED: Final = re.compile(r"cannot activate \S+ on .+?: (\w+): ")
_LEFT: Final = re.compile(r" left .+, (\d+) requests carried over")


def summary(logs: Path) -> dict[str, Any]:
    """Counts by reason, and how long models waited for their activation."""
    counts: dict[str, Counter[str]] = {}
    waits_s: list[float] = []
    for record in _lines(logs, "decisions.jsonl*"):
        reason = record.get("reason") or {}
        counts.setdefault(str(record["do"]), Counter())[str(reason.get("code", "-"))] += 1
        if record["do"] == "Activate" and "waited_s" in reason:
            waits_s.append(float(reason["waited_s"]))
    failed, carried = _agent(logs)
    left = counts.get("Deactivate", Counter())
    return {
        "activations": dict(counts.get("Activate", {})),
        "failed_activations": dict(failed),
        "deactivations": dict(left),
        "evictions": sum(left[code] for code in EVICTIONS),
        "migrations": counts.get("Activate", Counter())["migration"],
        "requests_carried_over": carried,
        "refused_waiting": dict(counts.get("RefuseWaiting", {})),
        "wait_for_activation_s": spread(waits_s),
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(ordered[len(ordered) // 2], 3), "p99": round(p99, 3), "max": round(ordered[-1], 3)}


def _agent(logs: Path) -> tuple[Counter[str], int]:
    """Activations that failed, by cause, and running requests that were carried over from models that left."""
    failed: Counter[str] = Counter()
    carried = 0
    for record in _lines(logs, "agent-*.jsonl*"):
        message = str(record.get("msg", ""))
        if match := _FAILED.search(message):
            failed[match[1]] += 1
        elif match := _LEFT.search(message):
            carried += int(match[1])
    return failed, carried


def _lines(folder: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of a log and of its rotated predecessors; lines that are not whole are left out."""
    for file in sorted(folder.glob(pattern), reverse=True):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record
