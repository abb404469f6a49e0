"""Getting a pack from other machines: the whole of it, as the node agent uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from prism.transfer.errors import PeerError, SourceLost
from prism.transfer.incoming import IncomingWindow, PullOptions
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.progress import ReceptionProgress
from prism.transfer.pull_lanes import DEAD_S
from prism.transfer.server import TransferServer
from prism.transfer.session import NodePlan
from prism.weights.errors import BadPack, LoadCancelled
from prism.weights.exchange.pack_windows import header_of_description, key_of_window
from prism.weights.packs.format import BlockEntry, PackHeader, PackKey
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.host_copy import open_copy
from prism.weights.store.resident import ResidentPack
from prism.weights.store.weight_store import WeightStore

_WAKE_S: Final = 0.1
OnBlock = Callable[[int, BlockEntry], None]


class PackFetch:
    """One reception of a pack into the host memory of ``store``, running from its making on.

    The pack can be used while it arrives: ``resident`` (or ``store.get(key)`` in any process of the machine) waits for
    the blocks it needs. ``server``, this machine's, passes pieces on as the plan says. When another process of the
    machine is receiving the pack already, this one only watches. Raises
    :class:`~prism.transfer.errors.SourceLost` when no node of the plan has the pack,
    :class:`~prism.weights.errors.StoreFull` when there is no room, ``ValueError`` for a plan of another kind of window.
    """

    def __init__(
        self, store: WeightStore, server: TransferServer, plan: NodePlan, options: PullOptions | None = None
    ) -> None:
        options = options or PullOptions()
        key = key_of_window(plan.window)
        if key is None:
            raise ValueError(f"window {plan.window!r} is no pack")
        self.plan, self.key = plan, key
        header = store.header(key) or _header_from_peers(plan, key, server.secret, options.dead_s)
        path = store.make_host_copy(header)
        self._lock = FillLock(path)
        self._filling = self._lock.acquire()
        copy, resident = open_copy(path, writable=True), store.get(key)
        if copy is None or resident is None:
            raise SourceLost(f"{path}: was removed while it was being set up")
        self._copy, self.resident = copy, resident
        self._incoming = IncomingWindow(server, plan, copy, replace(options, watch_only=not self._filling))

    def start_pulling(self) -> None:
        """Begins to pull, if it was held back."""
        self._incoming.start_pulling()

    @property
    def progress(self) -> ReceptionProgress:
        return self._incoming.progress

    @property
    def arrived_s(self) -> dict[int, float]:
        """When each piece was here and verified (the monotonic clock)."""
        return self._incoming.arrived_s

    def cancel(self) -> None:
        """Stops pulling; what has arrived stays and is passed on."""
        self._incoming.cancel()

    def wait(self, on_block: OnBlock | None = None) -> ResidentPack:
        """Returns the pack once all of it is here, calling ``on_block(index, block)`` in order on the way. Raises what
        ended the reception: :class:`SourceLost`, :class:`LoadCancelled`, ``OSError``."""
        header = self._copy.header
        try:
            for index, block in enumerate(header.blocks):
                for leaf in header.block_leaves(index):
                    self._wait_leaf(leaf, index)
                if on_block is not None:
                    on_block(index, block)
        finally:
            self._incoming.close()
            self._copy.close()
            self._lock.release()
        return self.resident

    def _wait_leaf(self, leaf: int, blocks_done: int) -> None:
        incoming = self._incoming
        if not self._filling:
            if not self.resident.wait_leaf(leaf, lambda: incoming.stopped):
                raise LoadCancelled(blocks_done, len(self._copy.header.blocks))
            return
        while not self._copy.has(range(leaf, leaf + 1)):
            if incoming.failed is not None:
                raise incoming.failed
            if incoming.stopped:
                raise LoadCancelled(blocks_done, len(self._copy.header.blocks))
            incoming.await_leaf(leaf, _WAKE_S)


def fetch_pack(
    store: WeightStore,
    server: TransferServer,
    plan: NodePlan,
    on_block: OnBlock | None = None,
    *,
    dead_s: float = DEAD_S,
) -> ResidentPack:
    """Receives the pack of ``plan``; see :class:`PackFetch`. Blocks until it is complete."""
    return PackFetch(store, server, plan, PullOptions(dead_s=dead_s)).wait(on_block)


def _header_from_peers(plan: NodePlan, key: PackKey, secret: bytes, dead_s: float) -> PackHeader:
    """The pack's header from the first node that has it, sources first."""
    tried: list[str] = []
    others = [n for n in plan.addresses if n != plan.node and n not in plan.sources]
    for node in [s for s in plan.sources if s != plan.node] + others:
        try:
            peer = PeerConnection(node, plan.addresses[node], secret, plan.node, dead_s)
            try:
                raw = peer.describe(plan.window)
            finally:
                peer.close()
        except (OSError, EOFError, PeerError) as error:
            tried.append(f"{node}: {error}")
            continue
        if raw:
            return _checked(header_of_description(raw, node), key, node)
        tried.append(f"{node}: does not have it")
    raise SourceLost(f"{plan.node}: nobody has {key.model} {key.layout}: " + "; ".join(tried))


def _checked(header: PackHeader, key: PackKey, node: str) -> PackHeader:
    """Raises :class:`BadPack` for the header of another pack."""
    if header.key != key:
        raise BadPack(node, f"is {header.key}, asked for {key}")
    return header
