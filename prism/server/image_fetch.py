"""Fetching images for clients, from hosts that the operator listed and from nowhere else.

What a client writes must not make the server talk to its own network: the name is looked up once, every address it has
must be public, the connection goes to one of those addresses (so that a name which answers differently the next moment
changes nothing), and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from fnmatch import fnmatchcase
from typing import Final
from urllib.parse import SplitResult, urlsplit

import httpx

from prism.config.sections.server import ImageConfig
from prism.config.units import format_size
from prism.server.errors import ApiError, invalid

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> the addresses of the name."""
_PORTS: Final = {"http": 80, "https": 443}


async def look_up(host: str, port: int) -> Sequence[str]:
    """Every address of ``host``, as the system's resolver knows them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class ImageFetcher:
    """One per front door. ``resolve`` and ``transport`` are the network; tests have others."""

    def __init__(
        self, limits: ImageConfig, resolve: Resolve = look_up, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.limits, self._resolve, self._transport = limits, resolve, transport
        self._trusted: ssl.SSLContext | None = None

    async def fetch(self, url: str, where: str) -> bytes:
        """What is at ``url``. Raises :class:`ApiError` (400) naming the field ``where``: not allowed, not there, or too
        large."""
        parts, port = self._allowed(url, where)
        assert parts.hostname is not None
        try:
            async with asyncio.timeout(float(self.limits.timeout_s)):
                address = await self._public_address(parts.hostname, port, where)
                return await self._get(parts, port, address, where)
        except TimeoutError:
            raise _refused("did not arrive in time", where) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, ValueError) as error:
            raise _refused(f"could not be fetched ({type(error).__name__})", where) from None

    def _allowed(self, url: str, where: str) -> tuple[SplitResult, int]:
        hosts = self.limits.hosts
        if not hosts:
            raise invalid("This server fetches no images: send them as 'data:image/png;base64,...'.", where)
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            raise invalid("This is no address of an image.", where) from None
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or "\\" in url:
            raise invalid("An image's address must begin with https:// or http://, without a user's name.", where)
        host = parts.hostname.rstrip(".")
        named = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
        if not any(fnmatchcase(named, pattern.lower()) for pattern in hosts):
            raise invalid(f"This server does not fetch images from {named[:100]!r}.", where)
        return parts, port

    async def _public_address(self, host: str, port: int, where: str) -> str:
        addresses = await self._resolve(host, port)
        if not addresses or not all(is_public(address) for address in addresses):
            raise _refused("is at an address that is not public", where)
        return addresses[0]

    async def _checked_by(self, scheme: str) -> ssl.SSLContext | bool:
        """What a host's certificate is checked by. To read it takes tens of milliseconds, in which a front door's loop
        would send nobody a token: it is done once, in a thread."""
        if scheme == "http":
            return False
        if self._trusted is None:
            self._trusted = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
        return self._trusted

    async def _get(self, parts: SplitResult, port: int, address: str, where: str) -> bytes:
        """To the address, under the name: ``Host`` and the certificate are the name's."""
        assert parts.hostname is not None
        there = f"[{address}]" if ":" in address else address
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        host = parts.hostname if port == _PORTS[parts.scheme] else f"{parts.hostname}:{port}"
        limit, data = int(self.limits.max_bytes), bytearray()
        verify = await self._checked_by(parts.scheme)
        async with (
            httpx.AsyncClient(
                transport=self._transport, verify=verify, trust_env=False, follow_redirects=False
            ) as client,
            client.stream(
                "GET",
                f"{parts.scheme}://{there}:{port}{path}",
                headers={"host": host, "accept": "image/*", "accept-encoding": "identity"},
                extensions={"sni_hostname": parts.hostname},
            ) as answer,
        ):
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise _refused("came compressed beyond its own format", where)  # a few bytes could become very many
            if answer.status_code != 200:
                raise _refused(f"was answered with {answer.status_code}; redirects are not followed", where)
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > limit:
                    raise invalid(f"An image may have {format_size(limit)}.", where)
        return bytes(data)


def is_public(address: str) -> bool:
    """Whether ``address`` is one of the public internet, behind whatever way of writing IPv4 inside of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and found in ipaddress.ip_network("64:ff9b::/96"):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return found.is_global and not found.is_multicast and not found.is_reserved


def _refused(why: str, where: str) -> ApiError:
    return invalid(f"The image {why}.", where, "image_not_fetched")
