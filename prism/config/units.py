"""Durations and sizes as people write them: ``500ms``, ``1m30s``, ``64MiB``, ``1.5GB``.

A number without its unit is refused (except 0): a bare ``ttft: 500`` has been read as seconds by one person and as
milliseconds by the next.
"""

from __future__ import annotations

import math
import re
from typing import Final

from prism.core.errors import InvalidValue

DURATION_UNITS_S: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE_UNITS_BYTES: Final = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}

_NUMBER: Final = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
DURATION_PATTERN: Final = rf"^(?:0|{_NUMBER} ?(?:us|ms|s|m|h|d)(?: ?{_NUMBER} ?(?:us|ms|s|m|h|d))*)$"
"""JSON-schema pattern of a duration; parts add up (``1m30s``), a space may stand before unit and part (``200 ms``)."""
SIZE_PATTERN: Final = rf"^(?:0|{_NUMBER} ?(?:B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB))$"
"""JSON-schema pattern of a size."""

_DURATION = re.compile(DURATION_PATTERN[:-1] + r"\Z", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER}) ?(us|ms|s|m|h|d)")
_SIZE = re.compile(rf"({_NUMBER}) ?([A-Za-z]+)\Z", re.ASCII)


class Seconds(float):
    """A duration in seconds, written with its unit in the catalog."""


class Bytes(int):
    """A size in bytes, written with its unit in the catalog."""


def parse_duration_s(text: object, key: str = "duration") -> Seconds:
    """Seconds in ``text`` (``500ms``, ``2s``, ``1m30s``, ``0``). Raises :class:`InvalidValue` naming ``key``."""
    if text == 0 and not isinstance(text, bool):
        return Seconds(0.0)
    if not isinstance(text, str) or not _DURATION.match(text):
        raise InvalidValue(
            key, text, "is not a duration; write a number with a unit, like 500ms", tuple(DURATION_UNITS_S)
        )
    parts = _DURATION_PART.findall(text)
    return Seconds(math.fsum(float(number) * DURATION_UNITS_S[unit] for number, unit in parts))


def parse_size_bytes(text: object, key: str = "size") -> Bytes:
    """Bytes in ``text`` (``64MiB``, ``1.5 GB``, ``0``), rounded down. Raises :class:`InvalidValue` naming ``key``."""
    if text in (0, "0") and not isinstance(text, bool):
        return Bytes(0)
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None or match[2] not in SIZE_UNITS_BYTES:
        raise InvalidValue(key, text, "is not a size; write a number with a unit, like 64MiB", tuple(SIZE_UNITS_BYTES))
    whole, _, fraction = match[1].partition(".")
    unit = SIZE_UNITS_BYTES[match[2]]
    return Bytes(int(whole) * unit + int(fraction or "0") * unit // 10 ** len(fraction))


def format_duration(value_s: float) -> str:
    """``value_s`` as :func:`parse_duration_s` reads it, in the largest unit that keeps it exact to the microsecond."""
    micros = round(value_s * 1e6)
    if micros == 0:
        return "0"
    for unit in ("d", "h", "m", "s", "ms"):
        scale = round(DURATION_UNITS_S[unit] * 1e6)
        if micros % scale == 0:
            return f"{micros // scale}{unit}"
    return f"{micros}us"


def format_size(value_bytes: int) -> str:
    """``value_bytes`` exactly, as :func:`parse_size_bytes` reads it, in the largest binary unit that divides it."""
    if value_bytes == 0:
        return "0"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value_bytes % SIZE_UNITS_BYTES[unit] == 0:
            return f"{value_bytes // SIZE_UNITS_BYTES[unit]}{unit}"
    return f"{value_bytes}B"


def written(value: object) -> str:
    """A :class:`Seconds` or :class:`Bytes` as the catalog has it. Raises :class:`NotImplementedError` for anything else
    (msgspec's rule for encoding hooks)."""
    if isinstance(value, Seconds):
        return format_duration(value)
    if isinstance(value, Bytes):
        return format_size(value)
    raise NotImplementedError(type(value).__name__)
