"""The decision log: one JSON line per decision that was carried out, with its reason and the numbers behind it."""

from __future__ import annotations

import json
from collections import deque
from logging import LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from prism.core.effects import Effect, decision_line
from prism.obs.metrics import Metrics


class DecisionLog:
    """Appends to one file (rotated by size) and counts in metrics. One per process; not for several writers."""

    def __init__(self, path: Path, metrics: Metrics, *, max_bytes: int = 64 << 20, backups: int = 3) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._metrics = metrics
        self._handler = RotatingFileHandler(path, maxBytes=max_bytes, backupCount=backups, encoding="utf-8")

    def committed(self, effect: Effect, now_s: float) -> str:
        """``effect`` was carried out at ``now_s``: log and count it. Returns its line."""
        line = decision_line(effect, now_s)
        self._handler.emit(LogRecord("decision", 0, "", 0, line, None, None))
        self._metrics.decision(effect)
        return line

    def close(self) -> None:
        self._handler.close()


def read_decisions(path: Path, last: int = 100) -> list[dict[str, Any]]:
    """The newest ``last`` decisions in ``path``, oldest first; lines that are not whole (a crash) are left out."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, maxlen=last)
    except OSError:
        return []
    return [record for line in lines if (record := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
