"""Getting a pack from other machines: the whole of it, as the node agent uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prism.transfer.one_sided import OneSidedNetwork
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.pull_lanes import DEAD_S, PullLanes
from prism.transfer.reception import Progress, Reception
from prism.transfer.server import WeightServer
from prism.transfer.session import NodePlan
from prism.weights.errors import LoadCancelled, PeerError, SourceLost
from prism.weights.packs.format import BlockEntry, PackHeader
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.host_copy import open_copy
from prism.weights.store.resident import ResidentPack

_WAKE_S: Final = 0.1
OnBlock = Callable[[int, BlockEntry], None]


class PackFetch:
    """One reception of a pack into this machine's host memory, running from its making on.

    The pack can be used while it arrives: ``packed`` (or ``store.get(key)`` in any process of the machine) waits for
    the blocks it needs. ``server`` is this machine's :class:`WeightServer`; it passes pieces on as the plan says. When
    another process of the machine is receiving the pack already, this one only watches. Raises
    :class:`~prism.weights.errors.SourceLost` when no node of the plan has the pack,
    :class:`~prism.weights.errors.StoreFull` when there is no room. With ``hold`` memory and connections are made ready
    ahead of need, and pulling begins with :meth:`start`.
    """

    def __init__(self, server: WeightServer, plan: NodePlan, *, dead_s: float = DEAD_S, hold: bool = False) -> None:
        self.plan, self._server = plan, server
        header = server.store.header(plan.key) or _header_from_peers(plan, server.secret, dead_s)
        path = server.store.make_host_copy(header)
        self._lock = FillLock(path)
        filling = self._lock.acquire()
        copy, packed = open_copy(path, writable=True), server.store.get(plan.key)
        if copy is None or packed is None:
            raise SourceLost(f"{path}: was removed while it was being set up")
        self._copy, self.packed = copy, packed
        self._reception = Reception(plan, copy, lambda: server.arrived(plan.session))
        server.join(plan, told=filling)
        self._lanes = PullLanes(self._reception, server.secret, dead_s, self._mover()) if filling else None
        if self._lanes is not None:
            self._lanes.start()
            if hold:
                copy.populate(0, header.data_bytes)
                self._lanes.connected.wait()
            else:
                self._lanes.go.set()

    def _mover(self) -> OneSidedNetwork | None:
        """The plan's way to move bytes. Raises ``KeyError`` for one this machine does not have."""
        return None if self.plan.mover == "tcp" else self._server.movers[self.plan.mover]

    def start(self) -> None:
        """Begins to pull, if it was held back."""
        if self._lanes is not None:
            self._lanes.go.set()

    @property
    def progress(self) -> Progress:
        return self._reception.progress

    @property
    def arrived_s(self) -> dict[int, float]:
        """When each piece was here and verified (the monotonic clock)."""
        return dict(self._reception.arrived_s)

    def cancel(self) -> None:
        """Stops pulling; what has arrived stays and is served on."""
        self._reception.stop()

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
            self._reception.stop()
            if self._lanes is not None:
                self._lanes.go.set()
                self._lanes.join()
            for mover in self._server.movers.values():
                mover.forget(self._copy)
            self._copy.close()
            self._lock.release()
        return self.packed

    def _wait_leaf(self, leaf: int, blocks_done: int) -> None:
        reception = self._reception
        if self._lanes is None:
            if not self.packed.wait_leaf(leaf, lambda: reception.stopped):
                raise LoadCancelled(blocks_done, len(self._copy.header.blocks))
            return
        while not self.packed.has(range(leaf, leaf + 1)):
            if reception.failed is not None:
                raise reception.failed
            if reception.stopped:
                raise LoadCancelled(blocks_done, len(self._copy.header.blocks))
            reception.await_leaf(leaf, _WAKE_S)


def fetch(
    server: WeightServer, plan: NodePlan, on_block: OnBlock | None = None, *, dead_s: float = DEAD_S
) -> ResidentPack:
    """Receives the pack of ``plan``; see :class:`PackFetch`. Blocks until it is complete."""
    return PackFetch(server, plan, dead_s=dead_s).wait(on_block)


def _header_from_peers(plan: NodePlan, secret: bytes, dead_s: float) -> PackHeader:
    """The pack's header from the first node that has it, sources first."""
    tried: list[str] = []
    others = [n for n in plan.addresses if n != plan.node and n not in plan.sources]
    for node in [s for s in plan.sources if s != plan.node] + others:
        try:
            peer = PeerConnection(node, plan.addresses[node], secret, plan.node, dead_s)
            try:
                header = peer.header(plan.key)
            finally:
                peer.close()
        except (OSError, EOFError, PeerError) as error:
            tried.append(f"{node}: {error}")
            continue
        if header is not None:
            return header
        tried.append(f"{node}: does not have it")
    raise SourceLost(f"{plan.node}: nobody has {plan.key.model} {plan.key.layout}: " + "; ".join(tried))
