"""A machine's weights as its agent handles them: what is here, what comes from other machines, what others may have.

Before an activation the agent makes sure that the weights are here or on their way: an engine uses blocks as they
arrive, so nothing waits for the last one. Receiving and serving run in threads of :mod:`prism.transfer`; this class
belongs to the agent's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from prism.kv.exchange import KvOffers, fetch_kv
from prism.kv.host_pool import HostPool
from prism.node.held_packs import HeldPacks
from prism.node.kept_copies import KeptCopies
from prism.node.kv_handover import KvHandover
from prism.node.mending import Mending
from prism.node.threads import in_own_thread
from prism.transfer.errors import SourceLost, TransferError
from prism.transfer.link_rates import LinkRates
from prism.transfer.one_sided_networks import find_networks
from prism.transfer.server import ServerOptions, TransferServer
from prism.transfer.session import NodePlan
from prism.transfer.windows import WindowSources
from prism.weights.errors import CorruptBlock, WeightsError
from prism.weights.exchange.borrowed_folders import OfferedFolders, borrow_folder, pack_elsewhere
from prism.weights.exchange.pack_fetch import PackFetch
from prism.weights.exchange.pack_windows import PackWindows, window_name
from prism.weights.packs.format import PackKey
from prism.weights.store.disk_rate import read_rate
from prism.weights.store.weight_store import WeightStore
from prism.weights.store.whereabouts import Tier
from prism.wire.commands import ActivateCommand, KeepCopies
from prism.wire.reports import ArrivalReport, LinkReport, PackReport

log = logging.getLogger(__name__)

FAILURES: Final = (WeightsError, TransferError, OSError)
LOOK_S: Final = 2.0
"""How often the store is looked through."""
SHOWN_S: Final = 10.0
"""So long a finished arrival is still reported."""
KEPT_S: Final = 60.0
"""So long after its end a session is still served: a receiver may have been slower than this node."""
JOINED_PIECES: Final = 16
_KV_SHARE: Final = 4
"""An activation brings KV of at most this part of the pool's bound from other machines."""
_KV_LINK_BYTES_S: Final = 1e8
"""What a link that has not carried anything is taken to reach."""


@dataclass(slots=True)
class _Arriving:
    model: str
    plan: NodePlan
    fetch: PackFetch
    error: str = ""
    ended_s: float | None = None

    def report(self) -> ArrivalReport:
        progress, key = self.fetch.progress, self.fetch.key
        pieces = progress.pieces_by_source
        return ArrivalReport(
            session=self.plan.session,
            model=self.model,
            mark=key.model,
            layout=key.layout,
            bytes_all=progress.bytes_all,
            bytes_done=progress.bytes_done,
            pieces_all=progress.pieces_all,
            pieces_done=progress.pieces_done,
            sources={n: (pieces.get(n, 0), b, s) for n, (b, s) in progress.by_source.items()},
            rerouted=len(progress.reroutes),
            took_s=progress.took_s,
            error=self.error,
        )


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """What an engine is given: the model's ``folder`` and, where that has no weights in it, their fingerprint."""

    folder: str
    mark: str = ""
    remote: bool = False
    """Weights come from another machine."""


class NodeWeights:
    """``models_dir`` takes what is borrowed of model folders; ``bind`` is where the server listens."""

    def __init__(
        self,
        node: str,
        store: WeightStore,
        *,
        bind: str,
        secret: bytes,
        models_dir: Path,
        kv_pool: HostPool | None = None,
    ) -> None:
        """``kv_pool``: the machine's pool of KV; None: it keeps none."""
        self._store, self._models_dir, self._secret, self._node = store, models_dir, secret, node
        self._kv = None if kv_pool is None else KvOffers(kv_pool, lambda session: self.server.leave_session(session))
        answerers = {**OfferedFolders(store).answerers(), **(self._kv.answerers() if self._kv else {})}
        options = ServerOptions(find_networks(node), answerers)
        windows = WindowSources(PackWindows(store), *([self._kv.windows] if self._kv else []))
        self.server = TransferServer(windows, bind, secret, node, options)
        self.changed = asyncio.Event()
        """Set when there is something to report; whoever reports clears it."""
        self.handover = None if self._kv is None else KvHandover(self._kv, self.changed)
        self._bringing: dict[str, asyncio.Lock] = {}
        self.packs: list[PackReport] = []
        self.disk_bytes_s = self.link_bytes_s = 0.0
        self._link_rates = LinkRates()
        self._arriving: dict[str, _Arriving] = {}
        self._held = HeldPacks(store)
        self.copies = KeptCopies(node, store, self.fetch)
        self._mending = Mending(node, store, secret)
        self.awaited: Callable[[str], bool] = lambda model: False
        """Whether an engine of the model here leads requests with the layers that have come, or begins."""
        self._failed: dict[PackKey, str] = {}
        """Packs that did not arrive as a whole, and whose models' they are, while an engine awaits the rest."""
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keeps :attr:`packs` up to date, until cancelled."""
        self.disk_bytes_s = await asyncio.to_thread(read_rate, self._store.directory)
        while True:
            await asyncio.to_thread(self.copies.tidy)
            packs = await asyncio.to_thread(self._held.reports)
            if packs != self.packs:
                self.packs = packs
                self.changed.set()
            await self._mend()
            await asyncio.sleep(LOOK_S)

    async def _mend(self) -> None:
        """What was corrupt at the last look, or failed to come, comes from other machines."""
        coming = {a.fetch.key for a in self._arriving.values() if a.ended_s is None}
        for key in (self._held.damaged | self._failed.keys()) - coming:
            if (model := self._failed.get(key)) is not None and not self.awaited(model):
                self._give_up_for_good(key)
            elif found := await asyncio.to_thread(self._mending.plan, key, self.server.address):
                await self.fetch(*found)

    def close(self) -> None:
        self._closed = True
        for arriving in self._arriving.values():
            arriving.fetch.cancel()
        for task in self._tasks:
            task.cancel()
        self.server.close()

    def arriving(self) -> list[ArrivalReport]:
        now_s = time.monotonic()
        shown = [a for a in self._arriving.values() if a.ended_s is None or now_s - a.ended_s < SHOWN_S]
        return [a.report() for a in shown]

    def links(self) -> list[LinkReport]:
        """What transfers from other nodes reached, for the planner of the next ones."""
        known = self._link_rates.rates(time.monotonic())
        return [LinkReport(source=r.source, bytes_s=r.bytes_s, age_s=r.age_s) for r in known]

    @property
    def kv_bytes(self) -> int:
        """Host memory that KV may take; 0: none is kept."""
        return 0 if self._kv is None else self._kv.pool.bound_bytes

    @property
    def busy(self) -> bool:
        """Something is on its way."""
        return any(a.ended_s is None for a in self._arriving.values())

    def send_part(self, part: bytes) -> None:
        """Take part in a multicast as a source."""
        plan = msgspec.msgpack.decode(part, type=NodePlan)
        self._start(self._join(plan))

    def keep_copies(self, order: KeepCopies) -> None:
        """Take part in the fleet's parameter pool."""
        for work in self.copies.obey(order, self.server.address):
            self._start(work)

    async def prepare(self, order: ActivateCommand) -> PreparedWeights:
        """Weights and files of an activation: here, or on their way, when this returns. Raises
        :class:`WeightsError` when they can be had nowhere; an order with a folder that is here never fails."""
        self.bring_kv(order.key.model, order.mark, order.peers)
        self._mending.ordered(order.key.model, order.mark, order.peers)
        path = order.spec.path
        here = not Path(path).is_absolute() or (Path(path) / "config.json").is_file()
        plans = [msgspec.msgpack.decode(part, type=NodePlan) for part in order.plans]
        fetched = [await self.fetch(order.key.model, plan) for plan in plans]
        if here:
            return PreparedWeights(path, remote=any(fetched))
        if not order.mark:
            raise SourceLost(f"{path} is not on this machine, and its weights have no fingerprint to be found by")
        borrowed = await asyncio.to_thread(
            borrow_folder, path, order.mark, self._models_dir, order.peers, self._secret, self._node
        )
        if not plans and not self._holds_image(order.mark):
            fetched = [await self._fetch_files(order)]
        return PreparedWeights(str(borrowed), order.mark, any(fetched))

    def bring_kv(self, model: str, mark: str, peers: Mapping[str, str]) -> None:
        """Begins to bring what other machines kept of the model's conversations, beside all else. ``mark``: its
        weights' fingerprint; "": nobody knows it, and nothing is found by it."""
        if self._kv is not None and mark:
            self._start(self._bring_kv_in_turn(self._kv, model, mark, peers))

    async def _bring_kv_in_turn(self, kv: KvOffers, model: str, mark: str, peers: Mapping[str, str]) -> None:
        """Who is told twice asks for the rest only, and says no sooner that it has everything."""
        async with self._bringing.setdefault(mark, asyncio.Lock()):
            await self._bring_kv(kv, model, mark, peers)

    async def _bring_kv(self, kv: KvOffers, model: str, mark: str, peers: Mapping[str, str]) -> None:
        room = kv.pool.use().bound_bytes // _KV_SHARE
        for peer in peers.items():
            if peer[0] == self._node:
                continue
            try:
                rate = self.link_bytes_s or _KV_LINK_BYTES_S
                came = await asyncio.to_thread(fetch_kv, kv, self.server, peer, mark, rate, room)
            except (*FAILURES, EOFError) as error:
                log.warning("no KV of %s from %s: %s", model, peer[0], error)
                continue
            if came:
                log.info("%d bytes of KV of %s came from %s", came, model, peer[0])
            room -= came

    def _holds_image(self, mark: str) -> bool:
        where = self._store.where(mark)
        return bool(where.host or where.disk)

    async def _fetch_files(self, order: ActivateCommand) -> bool:
        """No engine left an image: the weights as they are in the folder of a machine that has it."""
        found = await asyncio.to_thread(
            pack_elsewhere, order.spec.path, order.mark, order.peers, self._secret, self._node
        )
        if found is None:
            raise SourceLost(f"{order.spec.path} is not on this machine, and no other one has its weights")
        source, header = found
        plan = NodePlan(
            session=f"files-{order.command}",
            window=window_name(header.key),
            node=self._node,
            addresses={**order.peers, self._node: self.server.address},
            sources=(source,),
            pieces=min(JOINED_PIECES, header.leaves),
        )
        return await self.fetch(order.key.model, plan)

    async def fetch(self, model: str, plan: NodePlan) -> bool:
        """Begins to receive; False when that is not possible (the engine then looks for itself)."""
        if plan.session in self._arriving:
            return True
        if self.server.networks:  # used with those who offer the same; the others send over TCP
            plan = msgspec.structs.replace(plan, network=next(iter(self.server.networks)))
        try:
            fetch = await asyncio.to_thread(PackFetch, self._store, self.server, plan)
        except FAILURES as error:
            log.warning("%s does not come from another machine: %s", model, error)
            return False
        arriving = self._arriving[plan.session] = _Arriving(model, plan, fetch)
        self.changed.set()
        self._start(self._receive(arriving))
        return True

    async def _receive(self, arriving: _Arriving) -> None:
        key, session = arriving.fetch.key, arriving.plan.session
        try:
            await in_own_thread(arriving.fetch.wait)
        except FAILURES as error:
            arriving.error = str(error)
            log.error("%s did not arrive: %s", arriving.model, error)
            if not isinstance(error, CorruptBlock):  # another process fills the copy; the block is looked for elsewhere
                await self._give_up(arriving)
        else:
            self._failed.pop(key, None)
            progress = arriving.fetch.progress
            log.info("%s arrived in %.3f s from %s", arriving.model, progress.took_s, ", ".join(progress.by_source))
            if self._mending.mends(arriving.plan):
                await asyncio.to_thread(self._store.rm, key, (Tier.DISK,))  # it is written anew
            await self._keep(arriving.model, key)
        self._note_links(arriving)
        self.packs = await asyncio.to_thread(self._held.reports)  # before it has ended: who sees the end sees the pack
        arriving.ended_s = time.monotonic()
        self.changed.set()
        await asyncio.sleep(KEPT_S)
        self.server.leave_session(session)
        del self._arriving[session]

    async def _give_up(self, arriving: _Arriving) -> None:
        """The rest comes from whoever has it: an engine may lead with what is here, over others that run what is
        missing, and would lead for ever; as long as it does, it is tried again (:meth:`_mend`). Else what came is
        removed: it would keep the next activation waiting."""
        key, mends = arriving.fetch.key, self._mending.mends(arriving.plan)
        if mends and key in self._held.damaged:
            return  # all of it is here but what is corrupt, which is looked for again
        again = None if mends or self._closed else await asyncio.to_thread(self._mending.plan, key, self.server.address)
        if self.awaited(arriving.model):
            self._failed[key] = arriving.model
        if again is not None:
            await self.fetch(*again)
        elif key not in self._failed:
            self._give_up_for_good(key)

    def _give_up_for_good(self, key: PackKey) -> None:
        self._failed.pop(key, None)
        self._store.rm(key, (Tier.HOST,))

    def _note_links(self, arriving: _Arriving) -> None:
        progress = arriving.fetch.progress
        rates = [nbytes / took_s for nbytes, took_s in progress.by_source.values() if took_s > 0]
        self.link_bytes_s = max([self.link_bytes_s, *rates])
        self._link_rates.note_reception(progress.timed, time.monotonic())

    async def _keep(self, model: str, key: PackKey) -> None:
        try:
            await asyncio.to_thread(self._store.keep_on_disk, key)
        except (*FAILURES, KeyError) as error:
            log.warning("%s stays in memory only: %s", model, error)

    async def _join(self, plan: NodePlan) -> None:
        try:
            await asyncio.to_thread(self.server.join_session, plan)
        except FAILURES as error:
            log.warning("cannot serve %s: %s", plan.window, error)
            return
        await asyncio.sleep(KEPT_S + plan.piece_s * plan.pieces * len(plan.addresses))
        self.server.leave_session(plan.session)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
