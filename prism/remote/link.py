"""One connection between two engines: messages with tensors over a Unix socket, or over TCP between machines
(:mod:`prism.remote.handing`), never blocking.

::

    | u64 bytes behind this head | u32 bytes of the envelope | envelope | tensor bytes | tensor bytes | ...

What the kernel does not take at once waits in a queue, so that two engines that send to each other at once do not wait
for each other for ever. Whatever is wrong with what arrives closes this connection and nothing else.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from prism.remote.messages import Envelope, Message, TensorHead, encode_envelope, envelope_decoder

_HEAD: Final = struct.Struct("<QI")
MAX_MESSAGE_BYTES: Final = 4 << 30
MAX_ENVELOPE_BYTES: Final = 64 << 20
MAX_UNSENT_BYTES: Final = 8 << 30
"""A peer that takes nothing for so long is not coming back."""
_CREDENTIALS: Final = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Received:
    """A message and the bytes of its tensors."""

    message: Message
    tensors: tuple[tuple[TensorHead, memoryview], ...]


class PeerLink:
    """Either end. One thread uses it; another one may only :meth:`flush`."""

    def __init__(
        self, sock: socket.socket, label: str = "", send_on: Callable[[PeerLink], None] = lambda link: None
    ) -> None:
        """``label``: the device at the other end of a connection that agents made; they know whom they trust.
        ``send_on`` is told when the kernel has not taken all of a message."""
        sock.setblocking(False)
        self._sock, self.label = sock, label
        self.peer = f"the engine on {label}"
        """The other end, in words."""
        uid = os.geteuid()
        if not label:
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            self.peer = f"the engine of process {pid}"
        self._send_on, self._sending = send_on, threading.RLock()
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self._head = bytearray()
        self._body = bytearray()
        self._filled = 0
        self.closed = False
        self.why = ""
        """Why it is closed."""
        if uid != os.geteuid():
            self.close(f"it belongs to user {uid}")

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message, tensors: Sequence[tuple[str, Sequence[int], memoryview]] = ()) -> None:
        """Queue a message with tensors (dtype, shape, bytes; copied only where the kernel does not take them), and push
        what the kernel takes. Does nothing on a closed link."""
        if self.closed:
            return
        heads = [TensorHead(dtype, list(shape), data.nbytes) for dtype, shape, data in tensors]
        envelope = encode_envelope(Envelope(message, heads))
        total = len(envelope) + sum(head.nbytes for head in heads)
        with self._sending:
            self._unsent.append(memoryview(_HEAD.pack(total, len(envelope)) + envelope))
            self._unsent += [data.cast("B") for _, _, data in tensors if data.nbytes]
            self.unsent_bytes += _HEAD.size + total
            if self.unsent_bytes > MAX_UNSENT_BYTES:
                self.close("it takes nothing any more")
            self._flush()
        if self.unsent_bytes:
            self._send_on(self)

    def flush(self) -> None:
        """Push queued bytes as far as the kernel takes them."""
        with self._sending:
            self._flush()

    def _flush(self) -> None:
        while self._unsent and not self.closed:
            first = self._unsent[0]
            try:
                sent = self._sock.send(first)
            except BlockingIOError:
                return
            except OSError as error:
                self.close(str(error))
                return
            self.unsent_bytes -= sent
            if sent == first.nbytes:
                self._unsent.popleft()
            else:
                self._unsent[0] = first[sent:]

    def receive(self) -> list[Received]:
        """Messages that are complete now; closes the link at its end, and when what arrives is no message."""
        found: list[Received] = []
        try:
            while not self.closed and self._fill():
                found.append(self._parse())
        except (ValueError, msgspec.MsgspecError) as error:
            self.close(f"what it sent is no message: {error}")
        return found

    def _fill(self) -> bool:
        """Read towards one whole message; True when it is there."""
        while True:
            if len(self._head) < _HEAD.size:
                data = self._read(_HEAD.size - len(self._head))
                if not data:
                    return False
                self._head += data
                if len(self._head) == _HEAD.size:
                    self._begin()
                continue
            if self._filled == len(self._body):
                return True
            if not self._read_body():
                return False

    def _begin(self) -> None:
        total, envelope = _HEAD.unpack(self._head)
        if not 0 < envelope <= min(total, MAX_ENVELOPE_BYTES) or total > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {total} bytes with an envelope of {envelope} was announced")
        self._body, self._filled = bytearray(total), 0

    def _read(self, most: int) -> bytes:
        try:
            data = self._sock.recv(most)
        except BlockingIOError:
            return b""
        except OSError as error:
            self.close(str(error))
            return b""
        if not data:
            self.close("it is gone")
        return data

    def _read_body(self) -> bool:
        try:
            count = self._sock.recv_into(memoryview(self._body)[self._filled :])
        except BlockingIOError:
            return False
        except OSError as error:
            self.close(str(error))
            return False
        if not count:
            self.close("it is gone")
            return False
        self._filled += count
        return True

    def _parse(self) -> Received:
        _, size = _HEAD.unpack(self._head)
        body, self._head = memoryview(self._body), bytearray()
        envelope = envelope_decoder.decode(body[:size])
        tensors, at = [], size
        for head in envelope.tensors:
            if not 0 <= head.nbytes <= body.nbytes - at:
                raise ValueError(f"a tensor of {head.nbytes} bytes in {body.nbytes - at} that are left")
            tensors.append((head, body[at : at + head.nbytes]))
            at += head.nbytes
        if at != body.nbytes:
            raise ValueError(f"{body.nbytes - at} bytes belong to no tensor")
        return Received(envelope.message, tuple(tensors))

    def close(self, why: str = "closed here") -> None:
        """End the connection; the other end sees it. Safe to call again. The descriptor stays until :meth:`release`, so
        that no other connection gets its number while somebody still waits for this one."""
        with self._sending:
            if self.closed:
                return
            self.closed, self.why = True, why
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._unsent.clear()
            self.unsent_bytes = 0

    def release(self) -> None:
        """Give the descriptor back."""
        with self._sending:
            self.close()
            self._sock.close()
