"""How much host memory KV may take on this machine, and what links are to reach. Written beside the devices'
accounts by whoever runs the machine, read by its engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from prism.core.settings import LongPromptPlace

_FILE: Final = "kv.json"


class DeclaredLinks(msgspec.Struct, frozen=True, kw_only=True):
    """Declared rates of a device's links, bytes/s; 0: as fast as it goes. Copies keep to them."""

    host: float = 0.0
    """Between the device and host memory."""
    peer: float = 0.0
    """Between the device and another one of the machine: what others lend is used when this is faster than ``host``,
    and both are known."""
    memory: float = 0.0
    """Of its own memory; 0: not known."""


class KvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's. Without the file nothing is kept."""

    host_bytes: int = 0
    """Host memory for KV of models that left and of requests that wait; 0: none is kept."""
    lend_keep_fraction: float | None = None
    """Each device lends what is free beyond this part of it; None: devices lend nothing."""
    lend_rate_fraction: float = 1.0
    """Share of a lender's memory bandwidth that all who borrow from it may take together."""
    long_prompts: LongPromptPlace = LongPromptPlace.REFUSE
    """Where prompts that are larger than their device may have KV."""
    leave_s: float = 1.0
    """A model that leaves takes so long at most to store what it has cached."""
    links: dict[str, DeclaredLinks] = {}
    """By device (``host:0``); virtual devices that play a link."""


def write_kv_settings(directory: Path, settings: KvSettings) -> None:
    """For the accounts in ``directory``; engines that run keep what they have read."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{_FILE}.{os.getpid()}"
    partial.write_bytes(msgspec.json.encode(settings))
    partial.replace(directory / _FILE)


def read_kv_settings(directory: Path) -> KvSettings:
    """Those beside the accounts in ``directory``."""
    try:
        return msgspec.json.decode((directory / _FILE).read_bytes(), type=KvSettings)
    except FileNotFoundError:
        return KvSettings()
