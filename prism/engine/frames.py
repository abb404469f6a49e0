"""Length-prefixed MessagePack frames over stream sockets, for both ends of the control channels."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Final

from prism.core.errors import PrismError

_HEADER: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 256 << 20


class BadFrame(PrismError):
    """The peer sent something that is no frame; the channel is of no use any more."""


def pack(data: bytes) -> bytes:
    """``data`` with its length in front."""
    return _HEADER.pack(len(data)) + data


class Splitter:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields each frame that is complete now. Raises :class:`BadFrame` on an absurd length."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"frame of {length} bytes announced, at most {MAX_FRAME_BYTES} allowed")
            if len(self._buffer) - start - _HEADER.size < length:
                break
            start += _HEADER.size
            yield bytes(self._buffer[start : start + length])
            start += length
        del self._buffer[:start]


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame, None at the end of the stream (also when it breaks off)."""
    try:
        (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
        if length > MAX_FRAME_BYTES:
            raise BadFrame(f"frame of {length} bytes announced, at most {MAX_FRAME_BYTES} allowed")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class FrameSocket:
    """The blocking-or-not end of a channel inside a worker: frames in, frames out, never blocked by a slow peer."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._splitter = Splitter()
        self._unsent = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, data: bytes) -> None:
        """Queue one frame and push what the kernel takes."""
        self._unsent += pack(data)
        self.flush()

    def flush(self) -> None:
        """Push queued bytes as far as the kernel takes them."""
        while self._unsent and not self.closed:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._unsent[:sent]

    def receive(self) -> list[bytes]:
        """Frames that are here now; sets :attr:`closed` when the peer is gone."""
        frames: list[bytes] = []
        while not self.closed:
            try:
                data = self._sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            frames.extend(self._splitter.feed(data))
        return frames

    @property
    def unsent_bytes(self) -> int:
        return len(self._unsent)
