"""Structured logs: one JSON object per line, with the request's id wherever it is known.

``extra={"model": ..., "device": ...}`` adds fields; :mod:`prism.obs.log_context` adds them to everything logged inside
it. Field names are part of the interface: ``ts``, ``level``, ``process``, ``pid``, ``logger``, ``msg``, ``request_id``,
``model``, ``device``, ``error``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, TextIO

from prism.obs.foreign import ForeignFilter
from prism.obs.log_context import context_fields

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message", "asctime", "taskName", "color_message", "prism_shown",
}  # fmt: skip
"""Attributes every record has; all others came in through ``extra``."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|\n(?=\d\d:)")

LEVELS: Final = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


class JsonFormatter(logging.Formatter):
    """One JSON object per record; values that are no JSON are shown as text, line breaks never leave a record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = fields_of(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, Any] = {"ts": at, "level": record.levelname.lower(), "process": self.process}
        line |= {"pid": record.process, "logger": record.name, "msg": record.getMessage(), **fields}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = f"{record.exc_info[0].__name__}: {record.exc_info[1]}"
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class ConsoleFormatter(logging.Formatter):
    """One short line per record, for a person at a terminal."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = " ".join(f"{key}={value}" for key, value in fields_of(record).items())
        text = f"{at} {record.levelname[:4]} {self.process:<10} {record.getMessage()}  {fields}".rstrip()
        text = _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)  # nothing a client sent moves the cursor
        return text + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The record's own fields: those of the surrounding :func:`log_context`, then those of ``extra``."""
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD}
    return {**context_fields(), **extra}


def setup_logging(
    process: str,
    level: str = "info",
    file: Path | None = None,
    *,
    max_bytes: int = 64 << 20,
    backups: int = 3,
    console: TextIO | None = sys.stderr,
    prompts: bool | None = None,
) -> None:
    """Send this process's logs to ``file`` as JSON and to ``console`` (JSON too, unless it is a terminal).

    Replaces whatever handlers there were; may be called again after a fork with another name and file. ``prompts``:
    see :class:`prism.obs.foreign.ForeignFilter`.
    """
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    _take_over_libraries()
    foreign = ForeignFilter(prompts)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _add(
            root,
            RotatingFileHandler(file, maxBytes=max_bytes, backupCount=backups, encoding="utf-8"),
            JsonFormatter(process),
            foreign,
        )
    if console is not None:
        pretty = console.isatty() and "NO_COLOR" not in os.environ
        formatter = ConsoleFormatter(process) if pretty else JsonFormatter(process)
        _add(root, logging.StreamHandler(console), formatter, foreign)
    root.setLevel(LEVELS[level])
    for chatty in ("httpx", "httpcore", "asyncio", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(max(LEVELS[level], logging.WARNING))


def _take_over_libraries() -> None:
    """Loggers that write by themselves, past every filter here (transformers writes to stderr), hand on to ours."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True


def _add(root: logging.Logger, handler: logging.Handler, formatter: logging.Formatter, foreign: ForeignFilter) -> None:
    handler.setFormatter(formatter)
    handler.addFilter(foreign)
    root.addHandler(handler)
