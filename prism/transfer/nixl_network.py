"""Moving bytes with NIXL (UCX underneath: RDMA, NVLink, shared memory, TCP). Optional: ``pip install nixl``.

Two agents per process, one that is read from and one that reads, or pulls queue behind data that flows the other way.
No progress thread (it would burn a core): the thread that waits for a transfer drives its agent, on both sides, since
reads over UCX's TCP go nowhere unless the target's library runs too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import msgspec

from prism.transfer.windows import MemorySpan

_POLL_S: Final = 0.0003
_SEGMENT: Final = "256k"
"""UCX's TCP segments; with its default a link above 10 Gbit/s is not filled."""
logger = logging.getLogger(__name__)


class Descriptor(msgspec.Struct, frozen=True, array_like=True):
    """Where to read: the serving agent's metadata and an address in its process."""

    agent: str
    metadata: bytes
    address: int


class NixlNetwork:
    """See :class:`prism.transfer.one_sided.OneSidedNetwork`. Raises ``ImportError`` where NIXL is not installed."""

    name = "nixl"

    def __init__(self, node: str) -> None:
        for way in ("TX", "RX"):
            os.environ.setdefault(f"UCX_TCP_{way}_SEG_SIZE", _SEGMENT)
        from nixl._api import nixl_agent, nixl_agent_config

        tag = f"{node}-{uuid.uuid4().hex[:8]}"
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._server: Any = nixl_agent(f"{tag}-s", config)
        self._client: Any = nixl_agent(f"{tag}-c", config)
        self._server_name = f"{tag}-s"
        self._serving, self._reading = threading.Lock(), threading.Lock()
        self._registered: dict[tuple[str, int], Any] = {}
        self._known: dict[str, bytes] = {}

    def offer(self, memory: MemorySpan, offset: int) -> bytes:
        with self._serving:
            self._register("s", self._server, memory)
            metadata = self._server.get_agent_metadata()
        return msgspec.msgpack.encode(Descriptor(self._server_name, metadata, memory.address + offset))

    def make_progress(self) -> None:
        with self._serving:
            self._server.get_new_notifs()

    def read(
        self, descriptor: bytes, memory: MemorySpan, offset: int, nbytes: int, raise_if_dead: Callable[[], None]
    ) -> None:
        source = msgspec.msgpack.decode(descriptor, type=Descriptor)
        with self._reading:
            self._register("c", self._client, memory)
            self._meet(source)
            handle = self._post(source, memory.address + offset, nbytes)
        try:
            self._complete(handle, raise_if_dead)
        finally:
            with self._reading:
                self._client.release_xfer_handle(handle)

    def forget(self, memory: MemorySpan) -> None:
        for side, agent, lock in (("s", self._server, self._serving), ("c", self._client, self._reading)):
            with lock:
                known = self._registered.pop((side, memory.address), None)
                if known is not None:
                    agent.deregister_memory(known)

    def _post(self, source: Descriptor, address: int, nbytes: int) -> Any:
        local = self._client.get_xfer_descs([(address, nbytes, 0)], "DRAM")
        remote = self._client.get_xfer_descs([(source.address, nbytes, 0)], "DRAM")
        handle = self._client.initialize_xfer("READ", local, remote, source.agent)
        if self._client.transfer(handle) == "ERR":
            self._client.release_xfer_handle(handle)
            raise EOFError(f"NIXL cannot read from {source.agent}")
        return handle

    def _complete(self, handle: Any, raise_if_dead: Callable[[], None]) -> None:
        while True:
            with self._reading:
                try:
                    state = self._client.check_xfer_state(handle)
                except Exception as error:  # the binding's own exception types are not exported
                    raise EOFError(f"NIXL: {error}") from error
            if state == "DONE":
                return
            if state == "ERR":
                raise EOFError("NIXL reports a failed transfer")
            raise_if_dead()
            time.sleep(_POLL_S)

    def _register(self, side: str, agent: Any, memory: MemorySpan) -> None:
        if (side, memory.address) not in self._registered:
            everything = [(memory.address, memory.nbytes, 0, "")]
            self._registered[side, memory.address] = agent.register_memory(everything, "DRAM")

    def _meet(self, source: Descriptor) -> None:
        """Learns the server's memory; again whenever it has registered more."""
        if self._known.get(source.agent) != source.metadata:
            self._client.add_remote_agent(source.metadata)
            self._known[source.agent] = source.metadata
