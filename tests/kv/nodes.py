"""Machines that exchange KV, in one process."""

from __future__ import annotations

from typing import Final

from prism.kv.exchange import KvOffers
from prism.kv.host_pool import HostPool
from prism.transfer.server import ServerOptions, TransferServer
from prism.transfer.windows import WindowSources

SECRET: Final = b"secret"


class KvNode:
    """A pool and the server that sends from it and lets into it."""

    def __init__(self, node: str, pool: HostPool) -> None:
        self.pool = pool
        self.offers = KvOffers(pool, lambda session: self.server.leave_session(session))
        options = ServerOptions(answerers=self.offers.answerers())
        self.server = TransferServer(WindowSources(self.offers.windows), "127.0.0.1:0", SECRET, node, options)

    @property
    def holder(self) -> tuple[str, str]:
        return self.server.node, self.server.address
