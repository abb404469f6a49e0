"""What the zygote and its clients say to each other (MessagePack in length-prefixed frames on a unix socket)."""

from __future__ import annotations

from typing import Any

import msgspec


class _Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pass


class Fork(_Message, frozen=True, kw_only=True):
    """Client to zygote: fork a child that calls ``entry`` (``package.module:function``) with ``args``."""

    ask: int
    """Chosen by the client; the answer carries it."""
    entry: str
    args: dict[str, Any]
    watch_pid: int
    """The child ends when this process ends."""
    title: str = "prism: worker"
    kind: str | None = None
    """``host``: the child uses no GPU, on a machine with GPUs either; None: what the zygote was started for."""
    log_file: str | None = None
    """The child's stdout and stderr are appended here; None: they stay the zygote's."""


class Another(_Message, frozen=True, kw_only=True):
    """Client to zygote: fork another zygote, independent of this one."""

    ask: int
    arguments: list[str]
    """As on the command line."""
    environment: dict[str, str]
    beside_pid: int
    """It has this process's namespaces (network, mounts) and working directory."""
    log_file: str
    """Its stdout and stderr are appended here."""


class Forked(_Message, frozen=True, kw_only=True):
    ask: int
    pid: int


class ForkFailed(_Message, frozen=True, kw_only=True):
    ask: int
    error: str


class Exited(_Message, frozen=True, kw_only=True):
    """Zygote to the client that asked for the child."""

    pid: int
    status: int
    """Exit code, or minus the signal that ended it."""


class ZygoteHello(_Message, frozen=True, kw_only=True):
    """Zygote to a new client, once it is warm."""

    pid: int
    kind: str
    boot_s: float


class Promote(_Message, frozen=True, kw_only=True):
    """Supervisor to a standby, whose socket has the zygote's address now: it is the zygote, and forks a standby."""


ToZygote = Fork | Another | Promote
FromZygote = ZygoteHello | Forked | ForkFailed | Exited

to_zygote = msgspec.msgpack.Decoder(ToZygote)
from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(FromZygote)
encode = msgspec.msgpack.Encoder().encode
