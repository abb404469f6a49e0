"""What surrounds every request: its id, the size of its body, errors as OpenAI's objects, and counting."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Any, Final

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism.obs.log_context import log_context
from prism.server.errors import ApiError, internal, invalid

log = logging.getLogger(__name__)

BODY_SILENCE_S: Final = 60.0
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
"""Label values: what a client makes up is ``other``."""


def too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"The body is larger than {limit} bytes.")


async def read_body(receive: Receive, headers: Headers, limit: int) -> bytes:
    """The whole body. Raises :class:`ApiError`: 413 as soon as it is longer than ``limit`` bytes, 408 when it stops
    coming."""
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        try:
            async with asyncio.timeout(BODY_SILENCE_S):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, "body_timeout", f"No byte of the body came for {BODY_SILENCE_S:g} s.") from None
        if message["type"] == "http.disconnect":
            raise invalid("The client left before the body was complete.", code="incomplete_body")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            return chunk if not chunks else b"".join([*chunks, chunk])
        chunks.append(chunk)


def error_response(error: ApiError) -> Response:
    """``error`` as OpenAI's error object with its headers."""
    headers = dict(error.headers())
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(orjson.dumps(error.body()), error.status, headers, "application/json")


class Edge:
    """The outermost ASGI layer. ``count(method, route, status)`` is told of every response."""

    def __init__(
        self, app: ASGIApp, count: Callable[[str, str, int], None], refused: Callable[[ApiError], None]
    ) -> None:
        self._app, self._count, self._refused = app, count, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        status, complete = 0, False

        async def sending(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            else:
                status = message["status"]
                MutableHeaders(raw=message.setdefault("headers", []))["x-request-id"] = request_id
            await send(message)

        with log_context(request_id=request_id):
            try:
                await self._app(scope, receive, sending)
            except ApiError as error:
                await self._render(error, status, scope, receive, sending)
            except Exception as error:
                log.exception("unhandled error")
                await self._render(internal(), status, scope, receive, sending)
                if not complete:
                    raise error
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._count(method, _route(scope), status)

    async def _render(self, error: ApiError, status: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused(error)
        if not status:
            await error_response(error)(scope, receive, send)


def _route(scope: Scope) -> str:
    """The route's template, so that paths do not become label values."""
    route: Any = scope.get("route")
    found = getattr(route, "path", None) or scope.get("prism_route")
    return str(found) if found else "unknown"
