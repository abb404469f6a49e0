"""Connections that send nothing: they cost a descriptor each, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S: Final = 60.0
"""From the opening of a connection, or the first byte of a further request, to the end of the request's headers."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which bounds silence between requests only: here also before and inside their headers."""

    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit = self.loop.call_later(HEADERS_S, self._give_up)

    def on_message_begin(self) -> None:
        if self._limit is None:
            self._limit = self.loop.call_later(HEADERS_S, self._give_up)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _end(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _give_up(self) -> None:
        self._limit = None
        if not self.transport.is_closing():
            self.transport.close()
