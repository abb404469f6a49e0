"""Blocks that are corrupt on this machine, in memory and on disk, or did not come: who else has them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from prism.core.ids import ModelName
from prism.transfer.errors import PeerError
from prism.transfer.peer_connection import PeerConnection
from prism.transfer.session import NodePlan
from prism.weights.exchange.pack_windows import window_name
from prism.weights.packs.format import PackHeader, PackKey
from prism.weights.store.awaited_blocks import say_nobody_has, take_back
from prism.weights.store.disk_fill import FillLock
from prism.weights.store.weight_store import WeightStore

log = logging.getLogger(__name__)

REACH_S: Final = 2.0
_SESSION: Final = "mend-"
_MOST_PIECES: Final = 64
"""A piece is fetched as a whole."""


class Mending:
    """Of one machine. Engines that wait for such a block have others run its layer, or wait; what was fetched is here
    for all of them."""

    def __init__(self, node: str, store: WeightStore, secret: bytes) -> None:
        self._node, self._store, self._secret = node, store, secret
        self._ordered: dict[str, tuple[ModelName, Mapping[str, str]]] = {}
        """Of weights by their fingerprint: whose they are, and who may have them."""
        self._alone: set[PackKey] = set()
        """Nobody else had them when they were asked for."""

    def ordered(self, model: ModelName, mark: str, peers: Mapping[str, str]) -> None:
        """The model was to be loaded here; ``peers`` are the weight servers of other machines."""
        if mark:
            self._ordered[mark] = (model, dict(peers))

    def plan(self, key: PackKey, address: str) -> tuple[ModelName, NodePlan] | None:
        """How the damaged pack is to be fetched by this machine, whose server is at ``address``; None: it is being
        filled, or nobody has it (who waits for it is told). Asks other machines, so not in the agent's loop."""
        header = self._store.header(key)
        model, peers = self._ordered.get(key.model, (ModelName(""), {}))
        if header is None or not self._rests(header):
            return None
        has = self._who_has(key, {node: at for node, at in peers.items() if node != self._node})
        holders = [node for node, it in has.items() if it]
        copy_path = self._store.host_path(key)
        if not holders:
            if key not in self._alone:
                log.error("%s: what is corrupt or missing here, no other machine has", model)
            self._alone.add(key)
            if key.model in self._ordered and None not in has.values():
                say_nobody_has(copy_path, list(has))
            return None
        take_back(copy_path)
        log.warning("%s: what is corrupt or missing here comes from %s", model, ", ".join(holders))
        addresses = {node: peers[node] for node in holders} | {self._node: address}
        pieces = min(_MOST_PIECES, header.leaves)
        return model, NodePlan(
            session=f"{_SESSION}{uuid.uuid4().hex[:12]}",
            window=window_name(key),
            node=self._node,
            addresses=addresses,
            sources=tuple(holders),
            pieces=pieces,
        )

    @staticmethod
    def mends(plan: NodePlan) -> bool:
        """Whether it is one of these: the rest of the pack is here and in use."""
        return plan.session.startswith(_SESSION)

    def _rests(self, header: PackHeader) -> bool:
        """Whether nobody fills the copy."""
        lock = FillLock(self._store.make_host_copy(header))
        free = lock.acquire()
        lock.release()
        return free

    def _who_has(self, key: PackKey, others: Mapping[str, str]) -> dict[str, bool | None]:
        """Of all at once: several that do not answer would keep an engine waiting longer than it does."""
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return dict(zip(others, pool.map(lambda node: self._has(node, others[node], key), others), strict=True))

    def _has(self, node: str, address: str, key: PackKey) -> bool | None:
        """None: it does not answer now."""
        try:
            peer = PeerConnection(node, address, self._secret, self._node, REACH_S)
            try:
                return bool(peer.describe(window_name(key)))
            finally:
                peer.close()
        except (OSError, EOFError, PeerError) as error:
            log.warning("%s cannot be asked for a block: %s", node, error)
            return None
