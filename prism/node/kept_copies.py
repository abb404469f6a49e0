"""A machine's part of the fleet's parameter pool: what it keeps in host memory for all, and what it lets go.

The controller says what (:class:`~prism.wire.commands.KeepCopies`); how much this machine has room for stands in its
reports. Files are touched in threads, and the loop of the agent owns the rest.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final

from prism.node.threads import in_own_thread
from prism.transfer.errors import TransferError
from prism.transfer.session import NodePlan
from prism.weights.errors import WeightsError
from prism.weights.exchange.pack_windows import window_name
from prism.weights.packs.format import PackKey
from prism.weights.store.kept import read_kept, write_kept
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier
from prism.wire.commands import CopyOrder, KeepCopies

log = logging.getLogger(__name__)

MOST_PIECES: Final = 16
_PIECE_BYTES: Final = 1 << 20
"""No leaf is larger, so that there are as many pieces."""


class KeptCopies:
    """``fetch`` begins to receive a pack from another machine; False when that is not possible."""

    def __init__(self, node: str, store: WeightStore, fetch: Callable[[str, NodePlan], Awaitable[bool]]) -> None:
        self._node, self._store, self._fetch = node, store, fetch
        self._keep = read_kept(store.host_directory)
        self._spare_s: float | None = None
        """None: no controller has said anything yet, and nothing is let go."""
        self._coming: set[PackKey] = set()

    @property
    def host_bytes(self) -> int:
        """Host memory that packs may take on this machine."""
        if self._store.host_budget_bytes is not None:
            return self._store.host_budget_bytes
        room = os.statvfs(self._store.host_directory)
        return room.f_blocks * room.f_frsize

    def obey(self, order: KeepCopies, address: str) -> list[Coroutine[None, None, None]]:
        """The newest order; what has to be fetched for it, to be run by the agent. ``address``: of this machine's
        weight server."""
        keep = frozenset(PackKey(mark, layout) for mark, layout in order.keep)
        if keep != self._keep:
            self._keep = keep
            write_kept(self._store.host_directory, keep)
        self._spare_s = order.spare_s
        due = [o for o in order.fetch if PackKey(o.mark, o.layout) not in self._coming]
        self._coming |= {PackKey(o.mark, o.layout) for o in due}
        return [self._bring(one, address) for one in due]

    def tidy(self) -> None:
        """Lets go of copies that are nobody's and that no process has used for long. In a thread."""
        spare_s, keep = self._spare_s, self._keep
        if spare_s is None:
            return
        for info in self._store.ls():
            spare = info.tier is Tier.HOST and info.key not in keep and not info.in_use
            if spare and time.time() - info.used_s > spare_s and info.key not in self._coming:
                freed = self._store.rm(info.key, (Tier.HOST,))
                log.info("let go of %s, %d bytes: the fleet has it elsewhere", info.key, freed)

    async def _bring(self, order: CopyOrder, address: str) -> None:
        key = PackKey(order.mark, order.layout)
        try:
            if not order.source:
                await in_own_thread(self._read, key)
            else:
                await self._fetch(order.model, self._plan(key, order, address))
        except (WeightsError, TransferError, OSError, KeyError) as error:
            log.warning("%s does not come into memory here for the fleet: %s", order.model, error)
        finally:
            self._coming.discard(key)

    def _read(self, key: PackKey) -> None:
        """Raises ``KeyError`` when it is not on this machine (any more)."""
        packed = self._store.get(key)
        if packed is None:
            raise KeyError(key)
        with packed:
            for leaf in range(packed.header.leaves):
                packed.wait_leaf(leaf)

    def _plan(self, key: PackKey, order: CopyOrder, address: str) -> NodePlan:
        return NodePlan(
            session=f"pool-{uuid.uuid4().hex[:12]}",
            window=window_name(key),
            node=self._node,
            addresses={order.source: order.address, self._node: address},
            sources=(order.source,),
            pieces=min(MOST_PIECES, max(1, order.nbytes // _PIECE_BYTES)),
        )
