"""``prism logs``"""

from __future__ import annotations

import heapq
import json
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from prism.cli import output
from prism.cli.errors import CliError
from prism.config.state import DEFAULT_STATE_DIR, StateDir

LEVELS: Final = ("debug", "info", "warning", "error")
POLL_S: Final = 0.3
_SHOWN: Final = frozenset({"ts", "level", "process", "pid", "logger", "msg", "traceback"})


@dataclass(frozen=True, slots=True)
class Filter:
    """Which lines are wanted; None and empty: all."""

    request: str | None = None
    model: str | None = None
    process: str | None = None
    level: str = "debug"

    def wants(self, line: dict[str, Any]) -> bool:
        if self.request is not None and not str(line.get("request_id") or line.get("id", "")).startswith(self.request):
            return False
        if self.model is not None and line.get("model") != self.model:
            return False
        if self.process is not None and not str(line.get("process", "")).startswith(self.process):
            return False
        level = str(line.get("level", "info"))
        return level not in LEVELS or LEVELS.index(level) >= LEVELS.index(self.level)


@click.command()
@click.option("-n", "--lines", default=100, show_default=True, type=click.IntRange(0), help="How many of the newest.")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--request", help="Only this request (the beginning of its x-request-id is enough).")
@click.option("--model", help="Only this model.")
@click.option("--process", help="Only this process (front, agent, controller, serve, ...).")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="Only this level and above.")
@click.option("--decisions", is_flag=True, help="The schedulers' decisions instead of the logs.")
@click.option("--raw", is_flag=True, help="What the processes printed (SGLang's own messages, tracebacks) instead.")
@click.option("--state-dir", envvar="PRISM_STATE_DIR", default=DEFAULT_STATE_DIR, show_default=True)
@output.json_option
def command(state_dir: str, lines: int, follow: bool, decisions: bool, raw: bool, as_json: bool, **wanted: Any) -> None:
    """Read the server's logs of all processes, in order of time. Needs the state directory, not the server."""
    folder = StateDir.at(state_dir).logs
    if raw:
        show_raw(folder, wanted["process"], lines)
        return
    files = log_files(folder, decisions)
    if not files and not follow:
        raise CliError(f"there are no logs in {folder}; --state-dir says where a server keeps its state")
    tail = Tail(folder, decisions, Filter(**wanted))
    try:
        for line in tail.newest(lines):
            show(line, as_json)
        while follow:
            for line in tail.fresh():
                show(line, as_json)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def log_files(folder: Path, decisions: bool) -> list[Path]:
    """The current log files in ``folder``; rotated ones are left out."""
    return sorted(path for path in folder.glob("*.jsonl") if path.name.startswith("decisions") == decisions)


def show_raw(folder: Path, process: str | None, lines: int) -> None:
    """Print the last lines of the processes' plain output, oldest file first."""
    files = [
        path for pattern in ("*.out", "*.log") for path in folder.glob(pattern) if path.name.startswith(process or "")
    ]
    for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
        with path.open(errors="replace") as file:
            newest = list(deque(file, maxlen=lines))
        if newest:
            click.echo(f"==> {path.name} <==")
            click.echo("".join(newest), nl=not newest[-1].endswith("\n"))


class Tail:
    """Reads several growing files of JSON lines; remembers how far it got in each."""

    def __init__(self, folder: Path, decisions: bool, wanted: Filter) -> None:
        self.folder, self.decisions, self.wanted = folder, decisions, wanted
        self._read_bytes: dict[Path, int] = {}

    def newest(self, count: int) -> list[dict[str, Any]]:
        """The last ``count`` wanted lines of all files together, oldest first; :meth:`fresh` goes on after them."""
        per_file = [deque(self._lines(path), maxlen=count) for path in log_files(self.folder, self.decisions)]
        merged = list(heapq.merge(*per_file, key=_time))
        return merged[max(len(merged) - count, 0) :]

    def fresh(self) -> list[dict[str, Any]]:
        """Wanted lines written since the last call, oldest first."""
        lines = [line for path in log_files(self.folder, self.decisions) for line in self._lines(path)]
        return sorted(lines, key=_time)

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        try:
            start = self._read_bytes.get(path, 0)
            if path.stat().st_size < start:
                start = 0  # rotated: a new file has the name
            with path.open("rb") as file:
                file.seek(start)
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # still being written
                    start += len(raw)
                    line = _parsed(raw)
                    if line is not None and self.wanted.wants(line):
                        yield line
            self._read_bytes[path] = start
        except FileNotFoundError:
            self._read_bytes.pop(path, None)


def show(line: dict[str, Any], as_json: bool) -> None:
    """Print one line: as it stands in the file, or for a person."""
    if as_json:
        click.echo(json.dumps(line, ensure_ascii=False))
    elif "do" in line:
        click.echo(decision_text(line))
    else:
        fields = " ".join(f"{key}={value}" for key, value in line.items() if key not in _SHOWN)
        ts, level, process = (str(line.get(key, "")) for key in ("ts", "level", "process"))
        text = f"{ts} {level:<7} {process:<12} {line.get('msg', '')}"
        click.echo(f"{text}  {fields}".rstrip())
        if "traceback" in line:
            click.echo(line["traceback"])


def decision_text(line: dict[str, Any]) -> str:
    """``12:00:01.250 Activate model=a devices=local/host:0: demand (waiting=3)``"""
    at_s = float(line.get("at_s", 0.0))
    at = time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"
    rest = {key: value for key, value in line.items() if key not in ("at_s", "do", "reason") and value is not None}
    fields = " ".join(f"{key}={','.join(map(str, v)) if isinstance(v, list) else v}" for key, v in rest.items())
    why = output.reason(line.get("reason"))
    return f"{at} {line['do']} {fields}" + (f": {why}" if why else "")


def _parsed(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _time(line: dict[str, Any]) -> str:
    """Sort key; log lines have ``ts`` (ISO 8601), decisions ``at_s``."""
    return str(line["ts"]) if "ts" in line else f"{float(line.get('at_s', 0.0)):020.6f}"
