"""Server-sent events as they come off the wire: pieces of bytes in, payloads of ``data:`` lines out."""

from __future__ import annotations


class SseParser:
    """Holds an unfinished line between pieces. OpenAI servers put one JSON value on each ``data:`` line."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The payloads that ``piece`` completes; comments and other fields are left out."""
        lines = (self._tail + piece if self._tail else piece).split(b"\n")
        self._tail = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
