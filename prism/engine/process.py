"""Small things about processes that the standard library lacks."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_NAMESPACES: Final = {"net": 0x40000000, "mnt": 0x00020000}
"""What :func:`join` enters, by the flags of ``setns(2)``."""
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends. ``parent_pid`` closes the race with a parent that is
    already gone: then the process ends here."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with(pid: int) -> None:
    """End this process as soon as process ``pid`` (any, not only the parent) ends. Uses one thread that sleeps in the
    kernel and needs no lock of the interpreter's other threads for long."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while not poller.poll():
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-owner", daemon=True).start()


def join(pid: int) -> None:
    """Go on in the namespaces (network and mounts) and the working directory of process ``pid``. Namespaces that this
    process is in already are not entered, which would need privileges. Raises :class:`OSError`."""
    own, other = Path("/proc/self/ns"), Path(f"/proc/{pid}/ns")
    flags = sum(flag for name, flag in _NAMESPACES.items() if (own / name).readlink() != (other / name).readlink())
    cwd = Path(f"/proc/{pid}/cwd").readlink()
    if flags:
        descriptor = os.pidfd_open(pid)
        if _libc.setns(descriptor, flags) != 0:
            raise OSError(ctypes.get_errno(), f"setns into the namespaces of process {pid} failed")
        os.close(descriptor)
    os.chdir(cwd)
