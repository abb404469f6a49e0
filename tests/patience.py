"""How long tests wait, in one place: for conditions, never for durations, so long that only what is broken runs out.

A machine may be many times slower than the one a test was written on, and stop for seconds. The limits here are
therefore no statement about speed; pytest's own limit per test (``timeout`` in ``pyproject.toml``) lies above them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 300.0
"""For one thing to happen: an answer, an end."""
START_S = 600.0
"""For a whole server: it imports SGLang, a minute's work on a machine that does other things, too."""
LOOK_S = 0.02


def until(
    condition: Callable[[], T], what: str, *, despite: tuple[type[Exception], ...] = (), limit_s: float = PATIENCE_S
) -> T:
    """The condition's first true value. Errors of the kinds ``despite`` count as "not yet". Fails after ``limit_s``."""
    give_up_s = time.monotonic() + limit_s
    while True:
        looked_s = time.monotonic()
        with suppress(*despite):
            if value := condition():
                return value
        now_s = time.monotonic()
        assert now_s < give_up_s, f"{what} did not happen within {limit_s:.0f} s"
        time.sleep(max(LOOK_S, now_s - looked_s))  # what is waited for needs the processors, too


async def happens(condition: Callable[[], T], what: str, *, limit_s: float = PATIENCE_S) -> T:
    """:func:`until` for a condition that the running loop itself brings about."""
    give_up_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < give_up_s, f"{what} did not happen within {limit_s:.0f} s"
        await asyncio.sleep(LOOK_S)
    return value


def free_port() -> int:
    """A port for a server that cannot choose one itself. It lies below those that the kernel gives to outgoing
    connections, and is drawn, so that nobody takes it before the server does."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, max(lowest, 20_000)), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("a hundred ports in a row are taken")
