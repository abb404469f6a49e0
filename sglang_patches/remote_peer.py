"""The peer's side: leaders, and what they ask of this engine, in the order in which it came.

What several of them ask of the same layers runs in one pass (:mod:`sglang_patches.remote_passes`). A pass begins with
the first prompt that is some leader's first message, as SGLang runs prompts first, or else with what waits longest; the
first message of each other leader joins it, also while it runs, as long as the pass has not passed the piece that it is
to begin with: so what decodes is never left behind for further prompts. Each is answered when its last piece is behind
it. Nothing waits for somebody to join. A step of this engine's own is such a pass, too, which begins with its first
layer and takes along what leaders ask (:meth:`ForeignWork.take_along`).
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Set
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
    Message,
    PeerHello,
    PeerWelcome,
    Refused,
    RunPieces,
    RunRest,
)
from prism.remote.notes import DoForeign, LeadersGone, Note
from sglang_patches.remote_foreign import Begun, Called, ForeignRun, Member, NotDone, answer_of, furthest_behind
from sglang_patches.remote_passes import Passenger
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
        self._pieces = pieces
        self._run = ForeignRun(scheduler, pieces, new_owner, ranks)
        ranks.foreign = self._obey
        self._counter = itertools.count(1)
        self._numbers: dict[PeerLink, int] = {}
        """Of leaders that were greeted; what is kept for them goes by it."""
        self._slots: WeakKeyDictionary[PeerLink, int] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[PeerLink, str] = WeakKeyDictionary()
        self._leading: WeakSet[PeerLink] = WeakSet()
        self._queue: deque[tuple[PeerLink, Received]] = deque()
        self._begun: list[tuple[PeerLink, Begun]] = []
        """The pass, one of each leader; it is done before anything else, and as it was asked."""
        self._own: Member | None = None
        """A step of this engine's own that is in the pass, too."""
        self._left: Set[PeerLink] = frozenset()
        """Leaders whose first message waited when the last of these began, and did not go along."""
        self.shared = 0
        """Passes of several leaders' rows through some layers, so far."""
        self.along = 0
        """Own steps with leaders' rows in some of their passes, so far."""
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
        return len(self._queue) + len(self._begun)

    @property
    def leaders(self) -> list[str]:
        """Engines whose routes lead over this one now."""
        return sorted(link.label or self._names[link] for link in self._leading if not link.closed)

    @property
    def led_over(self) -> bool:
        """Whether anybody's route leads over this engine now."""
        return any(not link.closed for link in self._leading)

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
        return any(whose is link for whose, _ in (*self._begun, *self._queue))

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
        link.send(PeerWelcome(version=VERSION, engine=self._me, pieces=sorted(self._pieces.usable(self.held))))

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
        self._begun.clear()
        self._run.drop_all()

    # --- what they ask ---

    def serve_one(self) -> None:
        """Answer the first message, and what joins its pass. On rank 0, while the others do what it tells them."""
        self._serve(set(), None)

    def serve_round(self, called: Called | None = None, left: bool = False) -> None:
        """Answer a message of each leader that has asked something. More may come meanwhile. When this engine is
        ``called`` between two layers the rest stands still until the next round. ``left``: a round begins for whoever
        did not go along with the last own step, or takes KV over; others may go along with the next."""
        served: set[PeerLink] = set()
        called = called if self._ranks.world == 1 else None
        while self._serve(served, called, left) and not self._begun:
            pass

    def take_along(self, own: Passenger) -> bool:
        """Run a step of this engine's own up to ``own.end``, and with it a message of each leader that may join. False:
        it broke; the step is to be run by itself, from its beginning."""
        waited = {self._queue[at][0] for at in self._firsts(frozenset())}
        served = {link for link, _ in self._begun}
        step = self._own = Member(own)
        while self._own is not None and not step.over:
            self._let_go()
            self._let_join(served)
            self._advance(served, None)
        self._own, self._left = None, waited - served
        self.along += bool(served)
        return step.over

    def _serve(self, served: set[PeerLink], called: Called | None, left: bool = False) -> bool:
        """Answer the first message of another leader than those who were ``served``, which grow. False: there is
        none."""
        if gone := self.take_gone():
            self._ranks.tell(LeadersGone(leaders=gone))
        if not self._begun:
            self._queue = deque(one for one in self._queue if not one[0].closed)
            if (at := self._next(served, left)) is None:
                return False
            self._take_up(at, served)
        served.update(link for link, _ in self._begun)
        self._go_on(served, called)
        return True

    def _next(self, served: Set[PeerLink], left: bool) -> int | None:
        """Where the queue has what is done next: KV that somebody stands still for, else a prompt that others may join,
        else what came first."""
        firsts = self._firsts(served)
        if left:
            firsts = [at for at in firsts if self._queue[at][0] in self._left or _is_kv(self._queue[at][1])]
        if not firsts or not self._run.shares or _is_kv(self._queue[firsts[0]][1]):
            return next(iter(firsts), None)
        return min(firsts, key=lambda at: not _prefills(self._queue[at][1].message))

    def _firsts(self, but: Set[PeerLink]) -> list[int]:
        """Where the queue has the first message of each leader, but of those: what it asked later is done behind it."""
        seen, found = set(but), []
        for i, (link, _) in enumerate(self._queue):
            if link not in seen and not link.closed:
                found.append(i)
            seen.add(link)
        return found

    def _take_up(self, at: int, served: set[PeerLink]) -> None:
        """The message at this place of the queue: it is begun, or answered."""
        link, received = self._queue[at]
        del self._queue[at]
        served.add(link)
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
        try:
            if isinstance(work, RunPieces):
                self._begun.append((link, self._run.begin(note, work, received.tensors)))
            else:
                link.send(KvRows(batch=batch), pack_tensors(self._run.fetch(note, work)))
        except NotDone as why:
            self._refuse(link, batch, why)

    # --- the pass ---

    def _go_on(self, served: set[PeerLink], called: Called | None) -> None:
        """With what was begun, until it is over or this engine is ``called``."""
        while self._begun:
            self._let_go()
            self._let_join(served)
            if not self._begun or not self._advance(served, called):
                return

    @property
    def _members(self) -> list[Member]:
        return [*(begun for _, begun in self._begun), *([] if self._own is None else [self._own])]

    def _let_join(self, served: set[PeerLink]) -> None:
        while (at := self._joins(served)) is not None:
            self._take_up(at, served)

    def _let_go(self) -> None:
        """Those whose leader is gone, or what was kept for it. What other ranks do is done here, too."""
        if self._ranks.world > 1:
            return
        going = []
        for link, begun in self._begun:
            if link.closed:
                continue
            if self._run.stands(begun):
                going.append((link, begun))
            else:
                self._refuse(link, begun.work.batch, NotDone("what was kept for it is gone"))
        self._begun = going

    def _advance(self, served: set[PeerLink], called: Called | None) -> bool:
        """As far as the pass goes as it is; who is through is answered. False: this engine was called."""
        members = self._members
        behind = furthest_behind(members)

        self.shared += sum(isinstance(one, Begun) for one in behind) > 1

        def stop() -> bool:
            return (called is not None and called()) or self._joins(served) is not None

        try:
            went = self._run.advance(members, stop if self._ranks.world == 1 else None)
        except NotDone as why:
            for link, begun in self._begun:
                if begun in behind:
                    self._refuse(link, begun.work.batch, why)
            self._begun = [one for one in self._begun if one[1] not in behind]
            self._own = None if self._own in behind else self._own
            return True
        for link, begun in self._begun:
            if begun.over:
                link.send(HiddenStates(batch=begun.work.batch), pack_tensors(answer_of(begun)))
        self._begun = [one for one in self._begun if not one[1].over]
        return went or called is None or not called()

    def _joins(self, served: Set[PeerLink]) -> int | None:
        """Where the queue has something that may join the pass."""
        if not self._members or not self._run.shares:
            return None
        for at in self._firsts({*served, *(link for link, _ in self._begun)}):
            link, received = self._queue[at]
            work = received.message
            if link in self._numbers and isinstance(work, RunPieces) and self._may_join(work):
                return at
        return None

    def _may_join(self, work: RunPieces) -> bool:
        """The pass has not passed its first piece, and does not take much longer with it: a prompt joins prompts only,
        or a step of this engine's own, as many as one of these would take."""
        own = None if self._own is None else self._own.on
        moved = any(begun.on.piece > begun.work.first for _, begun in self._begun)
        moved = moved or (own is not None and own.piece > 0)
        if moved and work.first < min(one.on.piece for one in self._members):
            return False
        prompts = [len(begun.work.token_ids) for _, begun in self._begun if not begun.work.decode]
        if own is not None:  # whoever decodes here stands still for others' prompts behind its step, if not in it
            prompts.append(0 if own.batch.forward_mode.is_decode() else own.rows)
        tokens = sum(prompts) + len(work.token_ids)
        return work.decode or (bool(prompts) and tokens <= self._run.full_tokens)

    def _refuse(self, link: PeerLink, batch: int, why: NotDone) -> None:
        log.warning("work for %s was not done: %s", link.peer, why)
        link.send(Refused(batch=batch, reason=str(why)))

    def _obey(self, note: Note, tensors: Unpacked) -> None:
        """On the other ranks."""
        if isinstance(note, LeadersGone):
            for number in note.leaders:
                self._run.drop(number)
        elif isinstance(note, DoForeign):
            with suppress(NotDone):  # rank 0 says so
                if isinstance(note.work, RunPieces):
                    self._run.advance([self._run.begin(note, note.work, tensors)])
                else:
                    self._run.fetch(note, note.work)


def _is_kv(received: Received) -> bool:
    return isinstance(received.message, FetchKv)


def _prefills(message: Message) -> bool:
    return isinstance(message, RunPieces) and not message.decode
