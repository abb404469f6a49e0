"""All connections of one engine: those it opened to peers, and those that leaders opened to it."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from prism.remote.handing import PREFIX, hand_path, take_handed
from prism.remote.link import PeerLink, Received
from prism.remote.listening import listen_at
from prism.remote.sending import LinkSender

log = logging.getLogger(__name__)

MAX_LINKS: Final = 256
"""Leaders beyond it are turned away."""
MAX_HANDED: Final = 16
"""Connections for routes beyond it push out the oldest."""


class LinkHub:
    """Waits for all of them at once. ``watch`` and ``unwatch`` are told the descriptors that should also end the
    engine's own waiting, when they can be read. The end of a connection is how a peer's death is noticed: the kernel
    closes it at once."""

    def __init__(self, watch: Callable[[int], None], unwatch: Callable[[int], None]) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._poller, self._news = select.poll(), select.poll()
        self._links: dict[int, PeerLink] = {}
        self._listener: socket.socket | None = None
        self._hander: socket.socket | None = None
        self._handed: dict[str, PeerLink] = {}
        """By token: links that no route has used yet."""
        self.on_handed: Callable[[PeerLink], None] = lambda link: None
        """Called with each link to a peer that was handed over, before a route uses it."""
        self._path: Path | None = None
        self._sender = LinkSender()

    def __iter__(self) -> Iterator[PeerLink]:
        return iter(list(self._links.values()))

    @property
    def path(self) -> Path | None:
        """Where leaders find this engine; None: nowhere yet."""
        return self._path

    def listen(self, path: Path) -> None:
        """Take connections at ``path``, and those that are handed over, from now on. Raises ``OSError``; listening
        already at the same path is fine."""
        if self._listener is not None:
            if path != self._path:
                raise OSError(f"listens at {self._path} already")
            return
        listener = listen_at(path)
        try:
            hander = listen_at(hand_path(path))
        except OSError:
            listener.close()
            raise
        self._listener, self._hander, self._path = listener, hander, path
        self._add(listener.fileno())
        self._add(hander.fileno())

    def connect(self, path: Path) -> PeerLink:
        """A link to the engine that listens at ``path``, or the one that was handed over under this token
        (:data:`prism.remote.handing.PREFIX`). Raises ``OSError`` when there is none."""
        if str(path).startswith(PREFIX):
            link = self._handed.pop(str(path).removeprefix(PREFIX), None)
            if link is None or link.closed:
                raise ConnectionError(
                    f"no connection {path} is here: {'none was handed over' if not link else link.why}"
                )
            return link
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return self._take(sock)

    def _take(self, sock: socket.socket, label: str = "") -> PeerLink:
        link = PeerLink(sock, label, self._sender.send_on)
        self._links[link.fileno()] = link
        self._add(link.fileno())
        return link

    def _add(self, fd: int) -> None:
        self._poller.register(fd, select.POLLIN)
        self._news.register(fd, select.POLLIN)
        self._watch(fd)

    @property
    def reachable(self) -> bool:
        """There are connections, or may be."""
        return bool(self._links) or self._listener is not None

    def await_news(self, timeout_s: float) -> bool:
        """Whether :meth:`pump` has something to do; waits for that. For one other thread than the hub's own."""
        return bool(self._news.poll(timeout_s * 1000))

    def pump(self, timeout_s: float) -> list[tuple[PeerLink, Received]]:
        """What arrived, after waiting ``timeout_s`` at most for something to happen. Links that ended are forgotten;
        :attr:`PeerLink.closed` tells their owners."""
        found: list[tuple[PeerLink, Received]] = []
        for fd, _ in self._poller.poll(timeout_s * 1000):
            if self._listener is not None and fd == self._listener.fileno():
                self._accept()
                continue
            if self._hander is not None and fd == self._hander.fileno():
                self._accept_handed()
                continue
            link = self._links[fd]
            found += [(link, received) for received in link.receive()]
        self.sweep()
        return found

    def sweep(self) -> None:
        """Forget links that are closed."""
        for fd, link in list(self._links.items()):
            if link.closed:
                self._drop(fd)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                if len(self._links) < MAX_LINKS:
                    self._take(sock)
                    continue
                log.warning("a leader was turned away: there are %d connections", len(self._links))
                sock.close()

    def _accept_handed(self) -> None:
        assert self._hander is not None
        with suppress(BlockingIOError):
            channel, _ = self._hander.accept()
            try:
                sock, label, token = take_handed(channel)
            except (OSError, ValueError) as error:
                log.warning("a connection was not handed over: %s", error)
                return
            link = self._take(sock, label)
            if token:
                self._handed[token] = link
                self.on_handed(link)
            while len(self._handed) > MAX_HANDED:
                self._handed.pop(next(iter(self._handed))).close("no route led over it")

    def drop_handed(self) -> None:
        """End those that no route has used."""
        for link in self._handed.values():
            link.close("no route led over it")
        self._handed.clear()

    def _drop(self, fd: int) -> None:
        link = self._links.pop(fd)
        self._poller.unregister(fd)
        self._news.unregister(fd)
        self._unwatch(fd)
        link.release()

    def close(self) -> None:
        """End all connections and listen no more."""
        self._sender.close()
        for fd in list(self._links):
            self._drop(fd)
        for sock in (self._listener, self._hander):
            if sock is not None:
                self._poller.unregister(sock.fileno())
                self._news.unregister(sock.fileno())
                self._unwatch(sock.fileno())
                sock.close()
        self._listener = self._hander = None
        self._handed.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            hand_path(self._path).unlink(missing_ok=True)
            self._path = None
