"""Files that worker processes leave behind when they end.

A worker lives for one activation or for many; a busy machine forks thousands of them a day. Where torch's process
groups met, and its socket, are removed with the worker. Logs stay for a while: those of workers that ended are what one
reads afterwards.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final

KEPT_LOGS: Final = 50
"""Logs are kept of so many ended workers, the latest."""
_RENDEZVOUS: Final = ".rendezvous"
_HELP: Final = ".help"


def rendezvous_file(run_dir: Path, worker: str, ranks: bool = False) -> Path:
    """Where ``worker``'s process groups meet; with ``ranks`` those of an engine of which it is the first."""
    return run_dir / f"{worker}{'-ranks' if ranks else ''}{_RENDEZVOUS}"


def help_socket(run_dir: Path, worker: str) -> Path:
    """Where ``worker`` may be asked for help while it is parked (:mod:`prism.engine.help_desk`)."""
    return run_dir / f"{worker}{_HELP}"


def log_file(log_dir: Path, worker: str) -> Path:
    """What the process prints."""
    return log_dir / f"engine-{worker}.log"


def structured_log_file(log_dir: Path, worker: str) -> Path:
    """What it logs."""
    return log_dir / f"engine-{worker}.jsonl"


class Leftovers:
    """One per agent: ``run_dir`` and the engines' logs in ``log_dir`` are its own."""

    def __init__(self, run_dir: Path, log_dir: Path | None) -> None:
        self._run_dir, self._log_dir = run_dir, log_dir
        self._ended: deque[str] = deque()

    def begin(self) -> None:
        """All files that are there belong to workers of an agent that died."""
        for kind in (_RENDEZVOUS, _HELP):
            for file in self._run_dir.glob(f"*{kind}"):
                file.unlink(missing_ok=True)
        if self._log_dir is not None:
            logs = sorted(self._log_dir.glob("engine-*.log"), key=lambda file: file.stat().st_mtime)
            self._ended.extend(file.stem.removeprefix("engine-") for file in logs)
        self._prune()

    def ended(self, worker: str) -> None:
        for ranks in (False, True):
            rendezvous_file(self._run_dir, worker, ranks).unlink(missing_ok=True)
        help_socket(self._run_dir, worker).unlink(missing_ok=True)
        self._ended.append(worker)
        self._prune()

    def _prune(self) -> None:
        while len(self._ended) > KEPT_LOGS:
            worker = self._ended.popleft()
            if self._log_dir is not None:
                log_file(self._log_dir, worker).unlink(missing_ok=True)
                structured_log_file(self._log_dir, worker).unlink(missing_ok=True)
