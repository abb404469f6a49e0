"""Completely fair scheduling inside the engine: who is in the batch is chosen anew every few steps
(:mod:`prism.policy.fair`).

Who leaves is taken out as by a retraction, and its KV is kept (:mod:`sglang_patches.kv_move`); who enters has its KV
brought before it is admitted, beside the steps of the others. Between two rounds SGLang schedules as ever, but that
those who were left out stay out. What the policy leaves open:

* A prompt that is taken in by chunks stays in until it is prefilled, and so do requests whose KV is not named by their
  tokens (images): SGLang knows no way to take the one out, and nobody could bring back the other.
* Where paging does not pay, the order of arrival is kept, with SGLang's own reservations, and the log says so.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sglang.srt.managers import schedule_policy

from prism.policy.fair import (
    ROUND_STEPS,
    FairRequest,
    FairRoom,
    ReturnSteps,
    ServiceBook,
    Switch,
    UsualAnswer,
    expected_left,
    paging_pays,
    plan_round,
    turn_tokens,
)
from prism.policy.kv_ahead import LOOKAHEAD_STEPS
from sglang_patches.kv_move_in import KvMoves, without
from sglang_patches.kv_placement import own_blocks
from sglang_patches.seat import KvStore

log = logging.getLogger(__name__)

_STAYS: Final = 1 << 30
"""Rounds left out, for who must be in."""
_NEWEST: Final = 0.25
"""Weight of the newest step in what is expected of the next."""


class FairRounds:
    """The rounds of one scheduler."""

    def __init__(self, scheduler: Any, store: KvStore, moves: KvMoves) -> None:
        self._scheduler, self._store, self._moves = scheduler, store, moves
        self._book, self._returns = ServiceBook(), ReturnSteps()
        self._numbers = itertools.count(1)
        self._arrivals: dict[str, int] = {}
        self._present: dict[str, Any] = {}
        self._chosen: frozenset[str] = frozenset()
        self._outside: frozenset[str] = frozenset()
        self._steps = 0
        self._stepped_s = 0.0
        self._step_s = 0.0
        self._usual, self._answer_tokens = UsualAnswer(), 0.0
        self.pays = True
        """Whether the last time that somebody was to make room for another it was worth it."""

    def admit(self, original: Callable[..., Any], batch: Any) -> Any:
        """``Scheduler.get_new_batch_prefill`` for those whose turn it is."""
        scheduler, moves = self._scheduler, self._moves
        outside = self.turn(batch)
        without(scheduler, outside, lambda: moves.look(running=not batch.is_empty()))
        held = {*outside, *moves.coming}
        held |= self._returning_later(batch, held)
        with self._reserving():
            return without(scheduler, held, lambda: original(scheduler, batch))

    def _returning_later(self, batch: Any, held: Collection[str]) -> set[str]:
        """Ids of those whose KV is here again and who wait for a step that others need, too."""
        entering = [req for req in self._scheduler.waiting_queue if req.rid not in held]
        returning = {req.rid for req in entering if _decodes(req)}
        prompts = len(returning) < len(entering) or self._scheduler.chunked_req is not None
        due = self._returns.due(len(returning), sum(not req.finished() for req in batch.reqs), prompts)
        return set() if due else returning

    def turn(self, batch: Any) -> frozenset[str]:
        """Before an admission: whose turn it is. ``batch`` is what runs, and those who leave are out of it then, behind
        the queue. Returns the ids of those in the queue who are not to be admitted now."""
        present = {req.rid: req for req in self._everybody(batch)}
        ended = [req for rid, req in self._present.items() if rid not in present]
        for req in ended:
            self._usual.note(len(req.output_ids))
        self._answer_tokens = self._usual.tokens(sum(len(req.output_ids) for req in present.values()))
        came = not self._present.keys() >= present.keys()
        self._present = present
        self._arrivals = {rid: self._arrivals.get(rid) or next(self._numbers) for rid in present}
        self._time_step(batch)
        idle = batch.is_empty() and not self._moves.coming
        if self._steps >= ROUND_STEPS or ended or idle or (came and not self._outside):
            self._begin_round(batch)
        elif self._outside:
            self._outside |= {req.rid for req in self._scheduler.waiting_queue if req.rid not in self._chosen}
        return self._outside

    def _everybody(self, batch: Any) -> Iterator[Any]:
        yield from (req for req in batch.reqs if not req.finished())
        if self._scheduler.chunked_req is not None:
            yield self._scheduler.chunked_req
        yield from self._scheduler.waiting_queue

    def _time_step(self, batch: Any) -> None:
        now_s = time.perf_counter()
        if self._steps > 0 and not batch.is_empty():
            took_s = now_s - self._stepped_s
            self._step_s += (took_s - self._step_s) * (_NEWEST if self._step_s else 1)
        self._steps, self._stepped_s = self._steps + (not batch.is_empty()), now_s

    def _begin_round(self, batch: Any) -> None:
        self._steps = 0
        everybody = sorted(self._present.values(), key=lambda req: self._arrivals[req.rid])
        self._book.enter([(req.rid, _decodes(req), _given(req)) for req in everybody])
        inside = {req.rid for req in batch.reqs}
        planned = plan_round([self._view(req, req.rid in inside) for req in everybody], self._room())
        leaving = [req for req in batch.reqs if not req.finished() and req.rid not in planned.members]
        entering = [req for req in self._scheduler.waiting_queue if req.rid in planned.members]
        if leaving and not self._worth(batch, leaving, len(entering)):
            self._chosen, self._outside = frozenset(self._present), frozenset()
            self._order([req.rid for req in everybody])
            return
        self._book.note_round([req.rid for req in everybody], planned)
        self._chosen = planned.members
        if leaving:
            self._take_out(batch, {req.rid for req in leaving})
        self._order([*planned.prefilling, *planned.decoding])
        self._outside = frozenset(req.rid for req in self._scheduler.waiting_queue) - self._chosen
        batch.batch_is_full = False

    def _view(self, req: Any, inside: bool) -> FairRequest:
        decodes, chunked = _decodes(req), req is self._scheduler.chunked_req
        left = 0 if decodes else max(1, len(req.origin_input_ids) - (_given(req) if chunked else 0))
        stays = chunked or (inside and (req.input_embeds is not None or req.multimodal_inputs is not None))
        return FairRequest(
            id=req.rid,
            service_tokens=self._book.service(req.rid, decodes, _given(req)),
            kv_tokens=self._rounded(len(req.origin_input_ids) + len(req.output_ids) + LOOKAHEAD_STEPS),
            prompt_tokens=left,
            resident=inside or chunked,
            left_out=_STAYS if stays else self._book.left_out(req.rid),
        )

    def _rounded(self, tokens: int) -> int:
        group = self._scheduler.token_to_kv_pool_allocator.lease.parts[0].group
        block = int(group.pool.block_slots) * group.slot_tokens if own_blocks(group.pool) else 1
        return -(-tokens // block) * block

    def _room(self) -> FairRoom:
        scheduler = self._scheduler
        lease = scheduler.token_to_kv_pool_allocator.lease
        coming = sum(len(coming.slots) for coming in self._moves.coming.values())
        tokens = self._moves.agree(lease.used_tokens() + lease.available_tokens() - coming)
        chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        most = min(int(scheduler.max_running_requests), scheduler.prism_room.width.rows)
        return FairRoom(tokens, int(chunk), most, self._turn_tokens())

    def _turn_tokens(self) -> int:
        held = [len(req.origin_input_ids) + len(req.output_ids) for req in self._present.values()]
        trip_s = self._store.trip_s(sum(held) // len(held)) if held else 0.0
        return self._moves.agree(turn_tokens(self._answer_tokens, trip_s, self._step_s))

    def _worth(self, batch: Any, leaving: Sequence[Any], entering: int) -> bool:
        """Whether ``leaving`` make room as planned; copies go beside the steps of others. Where nobody enters, memory
        has become too small for who is in: somebody leaves in any case, and that says nothing about turns."""
        if entering == 0:
            return self.pays
        copy_s = sum(self._store.trip_s(len(req.origin_input_ids) + len(req.output_ids)) for req in leaving)
        wait_s = self._step_s * min(self._expected_left(req) for req in batch.reqs if not req.finished())
        switch = Switch(copy_s, len(leaving), entering, wait_s)
        pays = bool(self._moves.agree(int(paging_pays(switch))))
        if pays is not self.pays:
            self.pays = pays
            log.debug("fair scheduling %s: %s", "takes turns" if pays else "keeps the order of arrival", switch)
        return pays

    def _expected_left(self, req: Any) -> int:
        return expected_left(len(req.output_ids), int(req.sampling_params.max_new_tokens), self._answer_tokens)

    def _take_out(self, batch: Any, leaving: set[str]) -> None:
        """As :meth:`ScheduleBatch.retract_decode` does it; before a request gives its slots up its KV is kept."""
        going = [(i, req) for i, req in enumerate(batch.reqs) if req.rid in leaving]
        keep = [i for i, req in enumerate(batch.reqs) if req.rid not in leaving and not req.finished()]
        for i, _ in going:
            batch.release_req(i, len(keep), self._scheduler.server_args)
        batch.filter_batch(keep_indices=keep)
        for _, req in going:
            self._scheduler._add_request_to_queue(req, is_retracted=True)

    def _order(self, ids: Sequence[str]) -> None:
        """Those in the queue in this order; others stay behind them as they arrived."""
        place = {rid: i for i, rid in enumerate(ids)}
        queue = self._scheduler.waiting_queue
        queue.sort(key=lambda req: (place.get(req.rid, len(place)), self._arrivals[req.rid]))

    @contextmanager
    def _reserving(self) -> Iterator[None]:
        """SGLang lets a request in only with room for the answers of all; here with that for a round, since who is in
        makes room for others before it ends."""
        if not self.pays:
            yield
            return
        before = schedule_policy.CLIP_MAX_NEW_TOKENS
        schedule_policy.CLIP_MAX_NEW_TOKENS = LOOKAHEAD_STEPS
        try:
            yield
        finally:
            schedule_policy.CLIP_MAX_NEW_TOKENS = before


def _decodes(req: Any) -> bool:
    return len(req.output_ids) > 0


def _given(req: Any) -> int:
    """Tokens generated; before the first, tokens prefilled."""
    return len(req.output_ids) if _decodes(req) else len(req.prefix_indices)


def fair_rounds(scheduler: Any, store: KvStore, moves: KvMoves) -> FairRounds | None:
    """The scheduler's, made when they are first asked for; None: its model's requests go in order of arrival."""
    if not scheduler.server_args.prism_seat.fair:
        return None
    rounds: FairRounds | None = getattr(scheduler, "prism_fair", None)
    if rounds is None:
        rounds = scheduler.prism_fair = FairRounds(scheduler, store, moves)
    return rounds
