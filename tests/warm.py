"""One zygote for all servers and engine pools of a test process: importing SGLang is most of what a server's start
costs, and hundreds are started."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from prism.supervisor.base import WARM_ZYGOTE

REPO = Path(__file__).resolve().parents[1]


@functools.cache
def zygote() -> Path:
    """The socket of one that is warm, or will be: whoever connects waits for its first word. It ends with this
    process. ``PRISM_WARM_ZYGOTE`` names one that runs already."""
    if given := os.environ.get(WARM_ZYGOTE):
        return Path(given)
    folder = Path(tempfile.mkdtemp(prefix="prism-z-"))
    path = folder / "zygote.sock"
    command = [sys.executable, "-m", "prism.engine.zygote", "--socket", str(path), "--parent-pid", str(os.getpid())]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=REPO)

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return path


def environment() -> dict[str, str]:
    """That of a server whose zygote is forked from this one."""
    return {**os.environ, WARM_ZYGOTE: str(zygote())}
