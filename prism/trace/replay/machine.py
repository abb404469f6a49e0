"""Where and with what a run was made, for its report."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import prism
from prism.obs.kernel import has_autogroups


def machine_facts() -> dict[str, object]:
    """Software and hardware of this side of the run; no names of hosts or users."""
    return {
        "prism": prism.__version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "sglang": _version("sglang"),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "autogroups": has_autogroups(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of the checkout, when there is one."""
    command = ["git", "-C", str(Path(prism.__file__).parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
