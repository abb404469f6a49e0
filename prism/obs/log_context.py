"""Fields that everything logged inside a request, or any other stretch of work, carries: across ``await``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

_NOTHING: Final[Mapping[str, object]] = MappingProxyType({})
_context: ContextVar[Mapping[str, object]] = ContextVar("prism_log_context", default=_NOTHING)


@contextmanager
def log_context(**fields: object) -> Iterator[None]:
    """Add ``fields`` to every record logged inside, by this task and those it starts."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def context_fields() -> Mapping[str, object]:
    """The fields of the surrounding :func:`log_context`."""
    return _context.get()
