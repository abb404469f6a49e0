"""What of the running kernel's settings changes measurements and latencies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_AUTOGROUPS: Final = Path("/proc/sys/kernel/sched_autogroup_enabled")
AUTOGROUPS_REMEDY: Final = "busy engines keep other processes waiting: sysctl kernel.sched_autogroup_enabled=0"


def has_autogroups() -> bool:
    """Whether processor time is shared among sessions before it is among processes. Agent, controller, front door and
    engines then wait for each other for up to a second when all processors are busy (docs/runbook.md)."""
    try:
        return _AUTOGROUPS.read_text("ascii").strip() == "1"
    except OSError:
        return False
