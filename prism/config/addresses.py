"""Addresses that other machines use, as operators write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prism.core.errors import InvalidValue

STORE_PORT: Final = 6380
"""Of the embedded store; not the one that a Redis of its own has."""
_EVERYWHERE: Final = ("0.0.0.0", "*", "::", "")


@dataclass(frozen=True, slots=True)
class FleetAddress:
    """``host`` is an address of this machine, ``port`` that of the embedded store on it."""

    host: str
    port: int


def parse_fleet_address(text: str) -> FleetAddress:
    """``ADDRESS`` or ``ADDRESS:PORT``. Raises :class:`InvalidValue`."""
    host, colon, port = text.partition(":")
    if colon and not (port.isdecimal() and 0 < int(port) < 65536):
        raise InvalidValue("--fleet", text, "is not an address", ("10.0.0.1", "10.0.0.1:6380"))
    return FleetAddress(check_reachable("--fleet", host), int(port) if colon else STORE_PORT)


def check_reachable(option: str, host: str) -> str:
    """``host`` itself. Raises :class:`InvalidValue` for one that others cannot be told: it is what they connect to."""
    if host in _EVERYWHERE or ":" in host:
        why = "is not an address that other machines can be told; give one of this machine's own"
        raise InvalidValue(option, host, why, ("10.0.0.1", "node-1.example"))
    return host
