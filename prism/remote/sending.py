"""Bytes that the kernel did not take at once are sent on while the engine computes.

A socket holds some 200 KB, hidden states of a prompt are megabytes: without this they would stand still for as long as
the engine's own step, and the engine that waits for them as well.
"""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress

from prism.remote.link import PeerLink


class LinkSender:
    """One thread for all links of an engine, from the first bytes that are left until :meth:`close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[PeerLink] = set()
        """With bytes that are left."""
        self._thread: threading.Thread | None = None
        self._wake = -1
        self._over = False

    def send_on(self, link: PeerLink) -> None:
        """``link`` has bytes that the kernel did not take."""
        with self._lock:
            if self._over or link in self._links:
                return
            self._links.add(link)
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name="layers-sender", daemon=True)
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while links := self._next():
            for link in links:
                link.flush()

    def _next(self) -> list[PeerLink]:
        """Links to flush, after waiting until one takes bytes; none when it is over."""
        while True:
            poller = select.poll()
            poller.register(self._wake, select.POLLIN)
            with self._lock:
                if self._over:
                    return []
                self._links = {link for link in self._links if link.unsent_bytes}
                links = {link.fileno(): link for link in self._links}
            for fd in links.keys() - {-1}:
                poller.register(fd, select.POLLOUT)
            ready = [fd for fd, _ in poller.poll()]
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if found := [links[fd] for fd in ready if fd in links]:
                return found

    def close(self) -> None:
        """Nothing is sent on any more when this returns."""
        with self._lock:
            self._over = True
            thread, self._thread = self._thread, None
            if thread is not None:
                os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()
            os.close(self._wake)
