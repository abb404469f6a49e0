"""The error tree. Every error a user can meet derives from :class:`PrismError`: what was wrong, and what is right."""

from __future__ import annotations

from collections.abc import Sequence


class PrismError(Exception):
    """Base of all errors that Prism raises on purpose."""


class InvalidValue(PrismError):
    """A value from outside (catalog, request, command line, trace row) is not acceptable.

    Attributes say which: ``key`` is the dotted path, ``value`` what was there, ``choices`` what may be there.
    """

    def __init__(self, key: str, value: object, why: str, choices: Sequence[object] = (), where: str = "") -> None:
        self.key, self.value, self.why, self.choices, self.where = key, value, why, tuple(choices), where
        prefix = f"{where}: " if where else ""
        suffix = f"; choices: {', '.join(map(str, self.choices))}" if self.choices else ""
        super().__init__(f"{prefix}{key}: {why} (got {value!r}){suffix}")

    def __reduce__(self) -> tuple[type[InvalidValue], tuple[object, ...]]:
        """Errors cross processes (a sweep's workers): pickled by what they were made of, not by their message."""
        return type(self), (self.key, self.value, self.why, self.choices, self.where)
