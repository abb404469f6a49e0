"""The peer's side: leaders, and what they ask of this engine, in the order in which it came."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import torch

from prism import memory
from prism.remote.link import PeerLink, Received
from prism.remote.messages import (
    VERSION,
    FetchKv,
    HiddenStates,
    KvRows,
    Leading,
    Measured,
    MeasureLink,
    PeerHello,
    PeerWelcome,
    Refused,
    RunPieces,
    RunRest,
)
from prism.remote.notes import DoForeign, LeadersGone, Note
from sglang_patches.remote_foreign import Begun, Called, ForeignRun, NotDone
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_ranks import Ranks
from sglang_patches.remote_tensors import Unpacked, pack_tensors

log = logging.getLogger(__name__)

MEASURED_BYTES: Final = 1 << 20
"""Of a measurement, at most."""


class ForeignWork:
    """Never waits for anybody, so that engines that lead and serve each other cannot stop each other. Leaders speak to
    rank 0, which has the other ranks do with it what they ask (:meth:`serve`)."""

    def __init__(
        self,
        scheduler: Any,
        pieces: ModelPieces,
        me: str,
        model: str,
        new_owner: Callable[[], memory.Owner],
        ranks: Ranks,
    ) -> None:
        self._me, self._model, self._ranks = me, model, ranks
        self._run = ForeignRun(scheduler, pieces, new_owner, ranks)
        ranks.foreign = self._obey
        self._counter = itertools.count(1)
        self._numbers: dict[PeerLink, int] = {}
        """Of leaders that were greeted; what is kept for them goes by it."""
        self._slots: WeakKeyDictionary[PeerLink, int] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[PeerLink, str] = WeakKeyDictionary()
        self._leading: WeakSet[PeerLink] = WeakSet()
        self._queue: deque[tuple[PeerLink, Received]] = deque()
        self._begun: tuple[PeerLink, Begun] | None = None
        """What is done before anything else; it was begun, so that it is done as it was asked."""
        self._gone: list[int] = []
        """Leaders that other ranks still keep something for."""

    @property
    def held(self) -> frozenset[int]:
        """Pieces whose weights are here."""
        return self._run.held

    @held.setter
    def held(self, pieces: frozenset[int]) -> None:
        self._run.held = pieces

    @property
    def waiting(self) -> int:
        return len(self._queue) + (self._begun is not None)

    @property
    def leaders(self) -> list[str]:
        """Engines whose routes lead over this one now."""
        return sorted(link.label or self._names[link] for link in self._leading if not link.closed)

    def take(self, link: PeerLink, received: Received) -> None:
        """A message that is for the peer's side."""
        match received.message:
            case PeerHello() as hello:
                self._greet(link, hello)
            case MeasureLink(batch=batch, nbytes=nbytes):
                sent = torch.zeros(min(max(nbytes, 0), MEASURED_BYTES) // 4, dtype=torch.float32)
                link.send(Measured(batch=batch), pack_tensors([sent]))
            case Leading(now=now) if link in self._numbers:
                (self._leading.add if now else self._leading.discard)(link)
            case FetchKv() if not self._owes(link):
                self._queue.appendleft((link, received))  # a copy, for which streams stand still
            case RunRest() as rest:
                self._shorten(link, rest, received)
            case _:
                self._queue.append((link, received))

    def _owes(self, link: PeerLink) -> bool:
        """Whether anything of this leader is to be done yet."""
        begun = self._begun is not None and self._begun[0] is link
        return begun or any(whose is link for whose, _ in self._queue)

    def _shorten(self, link: PeerLink, rest: RunRest, received: Received) -> None:
        """Less is to be done of what waits; nothing, if it does not wait any more."""
        for i, (whose, asked) in enumerate(self._queue):
            work = asked.message
            if whose is link and isinstance(work, RunPieces) and work.batch == rest.batch:
                since = work.first if work.since is None else work.since
                less = msgspec.structs.replace(work, first=rest.first, since=since)
                self._queue[i] = (link, Received(less, received.tensors))
                return

    def _greet(self, link: PeerLink, hello: PeerHello) -> None:
        problem = ""
        if hello.version != VERSION:
            problem = f"it speaks version {hello.version}, this engine {VERSION}"
        elif not self._model or hello.model != self._model:
            problem = f"its weights are {hello.model or 'unknown'}, this engine's {self._model or 'unknown'}"
        elif hello.slots < 2:
            problem = f"it has {hello.slots} slots"
        if problem:
            link.send(Refused(batch=0, reason=problem))
            return
        self._slots[link], self._names[link] = hello.slots, hello.engine
        self._numbers.setdefault(link, next(self._counter))
        link.send(PeerWelcome(version=VERSION, engine=self._me, pieces=sorted(self.held)))

    # --- what is kept for leaders ---

    def forget_closed(self) -> None:
        """Give back what was kept for leaders that are gone, and what this device's own engines want."""
        for link, number in list(self._numbers.items()):
            if self._run.wanted_back(number):
                link.close("its memory is wanted back")
            if link.closed:
                del self._numbers[link]
                self._run.drop(number)
                if self._ranks.world > 1:
                    self._gone.append(number)

    def take_gone(self) -> list[int]:
        """Leaders that other ranks are to forget now."""
        gone, self._gone = self._gone, []
        return gone

    def forget(self, numbers: Iterable[int]) -> None:
        """On all ranks, between two steps: these leaders are gone; and those whose KV another rank's device wants back
        must go."""
        for number in numbers:
            self._run.drop(number)
        wanted = frozenset(self._run.wanted_back_anywhere())
        for link in [link for link, number in self._numbers.items() if number in wanted]:
            link.close("its memory is wanted back")
            del self._numbers[link]
        for number in wanted:
            self._run.drop(number)

    def drop_all(self) -> None:
        """On all ranks: the pieces that are here change, or this engine ends. Its leaders must begin again."""
        for link in self._numbers:
            link.close("the layers of this engine have changed")
        self._numbers.clear()
        self._gone.clear()
        self._queue.clear()
        self._begun = None
        self._run.drop_all()

    # --- what they ask ---

    def serve_one(self) -> None:
        """Answer the first message. On rank 0, while the others do what it tells them."""
        self._serve(frozenset(), None)

    def serve_round(self, called: Called | None = None) -> None:
        """Answer a message of each leader that has asked something. More may come meanwhile. When this engine is
        ``called`` between two layers the rest stands still until the next round."""
        served: set[PeerLink] = set()
        called = called if self._ranks.world == 1 else None
        while (link := self._serve(served, called)) is not None and self._begun is None:
            served.add(link)

    def _serve(self, but: Set[PeerLink], called: Called | None) -> PeerLink | None:
        """Answer the first message of another leader than those; whose it was."""
        if gone := self.take_gone():
            self._ranks.tell(LeadersGone(leaders=gone))
        if self._begun is not None:
            (link, begun), self._begun = self._begun, None
            if not link.closed:
                self._do(link, begun.work.batch, lambda: self._run.go_on(begun, called))
                return link
        self._queue = deque(one for one in self._queue if not one[0].closed)
        at = next((i for i, (link, _) in enumerate(self._queue) if link not in but), None)
        if at is None:
            return None
        link, received = self._queue[at]
        del self._queue[at]
        self._answer(link, received, called)
        return link

    def _answer(self, link: PeerLink, received: Received, called: Called | None) -> None:
        work = received.message
        batch = getattr(work, "batch", 0)
        if not isinstance(work, RunPieces | FetchKv):
            link.send(Refused(batch=batch, reason=f"a peer is not sent {type(work).__name__}"))
            return
        if link not in self._numbers:
            link.send(Refused(batch=batch, reason="it has not said who it is"))
            return
        note = DoForeign(leader=self._numbers[link], slots=self._slots[link], work=work)
        self._ranks.tell(note, [(head.dtype, head.shape, data) for head, data in received.tensors])
        self._do(link, batch, lambda: self._run.do(note, received.tensors, called), kv=isinstance(work, FetchKv))

    def _do(self, link: PeerLink, batch: int, do: Callable[[], Sequence[Any] | Begun], kv: bool = False) -> None:
        try:
            found = do()
        except NotDone as why:
            log.warning("work for %s was not done: %s", link.peer, why)
            link.send(Refused(batch=batch, reason=str(why)))
            return
        if isinstance(found, Begun):
            self._begun = link, found
            return
        link.send(KvRows(batch=batch) if kv else HiddenStates(batch=batch), pack_tensors(found))

    def _obey(self, note: Note, tensors: Unpacked) -> None:
        """On the other ranks."""
        if isinstance(note, LeadersGone):
            for number in note.leaders:
                self._run.drop(number)
        elif isinstance(note, DoForeign):
            with suppress(NotDone):  # rank 0 says so
                self._run.do(note, tensors)
