"""The null server for a benchmark, on a core of its own where there are two."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def pinned(core: int) -> list[str]:
    """The prefix of a command that keeps it on ``core``; nothing on a machine with one core."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[core % len(cores)])] if len(cores) > 1 else []


@contextmanager
def null_server(ttft_ms: float, tpot_ms: float, log: Path | None = None) -> Iterator[str]:
    """Its URL; it runs on the second core until the block ends."""
    command = [*pinned(1), sys.executable, "-m", "prism.trace.null_server", "--ttft-ms", str(ttft_ms)]
    command += ["--tpot-ms", str(tpot_ms), *(["--log", str(log)] if log else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
