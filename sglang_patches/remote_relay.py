"""What comes while the engine computes is passed on at once.

A batch goes from one peer to the next over its leader, which computes layers of others, or of its own, most of the
time: each answer would wait for half a step before it goes on, at every stop. So another thread has the links while the
engine computes, and only then::

    engine   ... has the links | computes layers for b          | has the links ...
    relay                      | a's answer comes: on to c      |

It takes in what comes and sends on what waits for nobody else; it runs no layers and ends nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from prism.remote.hub import LinkHub

log = logging.getLogger(__name__)

_LOOK_S: Final = 0.02
"""A connection that is new while the engine computes is seen after it."""


class Relay:
    """Of one engine; its thread lives from the first step for which it may be of use until :meth:`close`. ``pass_on``
    is called in it, never while the engine's own thread has the links."""

    def __init__(self, hub: LinkHub, pass_on: Callable[[], None]) -> None:
        self._hub, self._pass_on = hub, pass_on
        self._links = threading.Lock()
        """Held by whoever has the links: the engine, but while it computes."""
        self._links.acquire()
        self._computes = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The engine computes, and touches no link meanwhile."""
        if self._over or not self._hub.reachable:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="layers-relay", daemon=True)
            self._thread.start()
        self._links.release()
        self._computes.set()
        try:
            yield
        finally:
            self._computes.clear()
            self._links.acquire()

    def _run(self) -> None:
        while True:
            self._computes.wait()
            if self._over:
                return
            if not self._hub.await_news(_LOOK_S):
                continue
            with self._links:
                if not self._computes.is_set() or self._over:
                    continue
                try:
                    self._pass_on()
                except Exception:
                    log.exception("nothing is passed on while this engine computes any more")
                    return

    def close(self) -> None:
        """By the engine, which has the links."""
        self._over = True
        self._computes.set()
        self._links.release()
        if self._thread is not None:
            self._thread.join()
