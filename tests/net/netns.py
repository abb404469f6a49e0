"""Several hosts on one machine: network namespaces joined by a bridge, every link shaped to a rate in both directions.

::

    host 0 --veth, tbf both ways--+
    host 1 --veth, tbf both ways--+-- bridge (in a namespace of its own)
    ...

Needs root and the ``ip`` and ``tc`` commands; :func:`why_not` says what is missing. Names carry this process's id, and
only what this process made is removed.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
BURST = "128kb"
LIMIT = "1mb"
CONGESTION = "reno"
"""Every kernel has it, and it leaves the pace to the link. BBR, where that is the system's choice, paces by timers,
below the rate of a link that it cannot measure in the 80 ms that a transfer lasts."""


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} (iproute2) is not installed"
    probe = f"pw{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


class Hosts:
    """``count`` hosts with links of ``mbit`` each way; ``slow`` gives other rates by host. Use as a context manager."""

    def __init__(self, count: int, mbit: float = 400.0, slow: dict[int, float] | None = None) -> None:
        self.count, self._mbit, self._slow = count, mbit, slow or {}
        self._tag = f"pw{os.getpid()}"
        self._switch = f"{self._tag}sw"

    def name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def ip(self, host: int) -> str:
        return f"10.77.{host // 250}.{host % 250 + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """``argv`` to be run on a host."""
        return ["ip", "netns", "exec", self.name(host), *argv]

    def set_link(self, host: int, up: bool) -> None:
        """Plugs a host's cable in or out."""
        port = self._port(host)
        _run("ip", "-n", self._switch, "link", "set", port, "up" if up else "down")

    def set_rate(self, host: int, mbit: float) -> None:
        """Another rate for a host's link, both ways, from now on."""
        self._shape(host, mbit, "change")

    def _port(self, host: int) -> str:
        return f"{self._tag}p{host}"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def _make(self) -> None:
        sweep()
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for host in range(self.count):
            self._make_host(host)

    def _make_host(self, host: int) -> None:
        space, port = self.name(host), self._port(host)
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self._switch)
        _run("ip", "-n", space, "addr", "add", f"{self.ip(host)}/16", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        self._shape(host, self._slow.get(host, self._mbit), "add")
        settings = ["net.ipv4.tcp_slow_start_after_idle=0", f"net.ipv4.tcp_congestion_control={CONGESTION}"]
        _run(*self.command(host, ["sysctl", "-qw", *settings]))

    def _shape(self, host: int, mbit: float, verb: str) -> None:
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", BURST, "limit", LIMIT]
        for where, device in ((self.name(host), "eth0"), (self._switch, self._port(host))):
            _run("tc", "-n", where, "qdisc", verb, "dev", device, "root", *shape)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        for space in [*(self.name(h) for h in range(self.count)), self._switch]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def inside(prefix: Sequence[str], ask: Callable[[], T]) -> T:
    """``ask`` on the host of :meth:`Hosts.command`'s ``prefix``, in a thread of its own; here where that is empty."""
    if not prefix:
        return ask()

    def there() -> T:
        with Path("/run/netns", prefix[3]).open("rb") as space:
            if _libc.setns(space.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"setns to {prefix[3]}")
        return ask()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(there).result()


def sweep() -> None:
    """Removes what processes that no longer live have left (they were killed)."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for space in re.findall(r"^pw(\d+)((?:h\d+|sw|probe))\b", listed, re.MULTILINE):
        if not Path(f"/proc/{space[0]}").exists():
            subprocess.run(["ip", "netns", "del", f"pw{space[0]}{space[1]}"], capture_output=True, check=False)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
