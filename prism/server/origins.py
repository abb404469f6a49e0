"""Admin calls come from people's tools, not from web pages of other sites that a browser on this machine shows."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from prism.server.errors import forbidden


def check_site(headers: Headers, server: Any, allowed_origins: Collection[str]) -> None:
    """Raises :class:`ApiError` (403) for a call that a page of another site made (``Origin``, unless it is one of
    ``server.cors_origins`` or this server's own), and for one that reached a loopback address under a foreign name
    (DNS rebinding). ``server``: the ASGI scope's. The key is asked for besides."""
    host, origin = headers.get("host", ""), headers.get("origin")
    if "*" in allowed_origins or (origin is not None and origin in allowed_origins):
        return
    if origin is not None and urlsplit(origin).netloc != host:
        raise forbidden(f"Admin calls from pages of {origin[:100]!r} are not allowed ('server.cors_origins').")
    names = {urlsplit(allowed).hostname for allowed in allowed_origins}
    if server is not None and _is_loopback(str(server[0])) and not _is_local(host, names):
        raise forbidden(f"This server listens on {server[0]} and is not called {host[:100]!r} ('server.cors_origins').")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False  # a unix socket


def _is_local(host: str, names: Collection[str | None]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
