"""What unit tests may not reach, and what stops them.

Tests of the pure packages reach no socket, no process and no clock: time is an argument there. Other tests without a
marker stay on this machine: unix sockets and loopback addresses. What is forbidden fails the test at the call, also
where the code under test would swallow an exception (what ``pytest.fail`` raises is no ``Exception``).
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
PURE_PACKAGES = ("core", "policy", "scheduler")
REACHING = ("redis", "engine", "gpu", "net", "slow")
"""Markers of tests that are not guarded."""

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep")
_REAL: dict[str, Callable[..., Any]] = {name: getattr(time, name) for name in CLOCKS}
_PROCESSES = ("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")
_PURE_FORBIDS = ("socket.__new__", "socket.getaddrinfo", *_PROCESSES)
_OURS = (str(TESTS.parent / "prism"), str(TESTS))


class Guard(Enum):
    OFF = "nothing is forbidden"
    LOCAL = "a test without a marker stays on this machine"
    PURE = "tests of core, policy and scheduler reach no socket, process or clock"


def guard_of(path: Path, markers: set[str], tests: Path = TESTS) -> Guard:
    """The guard of a test in ``path`` under ``tests``."""
    if path.is_relative_to(tests) and path.relative_to(tests).parts[0] in PURE_PACKAGES:
        return Guard.PURE
    return Guard.OFF if markers & set(REACHING) else Guard.LOCAL


class _State:
    """The guard in force and the thread it is for; others belong to what earlier tests left running."""

    guard = Guard.OFF
    thread = 0


@contextmanager
def guarded(guard: Guard, ours: tuple[str, ...] = _OURS) -> Iterator[None]:
    """``guard`` is in force in this thread, for clocks where code under one of the folders ``ours`` calls them."""
    before = _State.guard, _State.thread
    _State.guard, _State.thread = guard, threading.get_ident()
    try:
        with pytest.MonkeyPatch.context() as patch:
            if guard is Guard.PURE:
                for name in CLOCKS:
                    patch.setattr(time, name, _clock(name, ours))
            yield
    finally:
        _State.guard, _State.thread = before


def taken_clocks(names: dict[str, Any]) -> list[str]:
    """Names of a module that are clocks themselves (``from time import monotonic``), which no patch reaches."""
    return [name for name, value in names.items() if any(value is real for real in _REAL.values())]


def _clock(name: str, ours: tuple[str, ...]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        caller: FrameType = sys._getframe(1)  # pytest and Hypothesis look at clocks in the same thread
        if caller.f_code.co_filename.startswith(ours) and threading.get_ident() == _State.thread:
            pytest.fail(f"time.{name} called at {caller.f_code.co_filename}:{caller.f_lineno}: {Guard.PURE.value}")
        return _REAL[name](*args)

    return call


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _State.guard is Guard.OFF or threading.get_ident() != _State.thread:
        return
    if _State.guard is Guard.PURE and event in _PURE_FORBIDS:
        pytest.fail(f"{event}: {_State.guard.value}")
    if event in ("socket.connect", "socket.sendto") and not _stays(args[0], args[1]):
        pytest.fail(f"{event} to {args[1]}: {_State.guard.value}")
    if event == "socket.getaddrinfo" and not _is_here(args[0]):
        pytest.fail(f"{event} of {args[0]}: {_State.guard.value}")


def _stays(of: socket.socket, address: Any) -> bool:
    return of.family not in (socket.AF_INET, socket.AF_INET6) or _is_here(address[0])


def _is_here(host: str | bytes | None) -> bool:
    """Whether a name or address is this machine's, without asking anybody."""
    name = host.decode() if isinstance(host, bytes) else host
    if not name or name in ("localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


sys.addaudithook(_audit)
