"""Several batches of a leader under way at a time, so that it has another one for its peers, and they for it, while one
is elsewhere.

SGLang's loop plans a batch, runs it and processes its results before it plans the next one. A leader that does so has
one batch on its route: with as many engines that lead over each other, each stands still for half of the time (a closed
line of n customers at n stations is busy n / (2n - 1) of it). Here a batch that was planned is begun and kept, others
are planned beside it, and the loop gets each when its states are behind the last stop; then it runs the head,
samples and processes the results as ever::

    plan a, begin | plan b, begin | ... a's states are here: a goes to the loop (head, sampling, results) | plan c, ...

All parts pass every stop in the order in which their batches were planned (:class:`Passing`), so that each of them
finds the KV that it would find if they ran one behind the other; what SGLang frees when it plans or processes one may
be used by those planned later. So prompts that are taken in by chunks may have two of these under way, as in SGLang's
own pipelines. A batch that decodes is SGLang's running batch itself: prefills that end meanwhile join it when it is
back, and there is one at a time.

Between two calls, with batches under way, KV is taken over from nobody and no order is carried out: nothing is begun
until they are back (``quiet``). When a peer is lost all of them begin again, like any batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from prism.policy.live.micro_batches import micro_batches
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.long_prompts import long_of
from sglang_patches.remote_ahead import RunAhead
from sglang_patches.remote_batches import BatchPart, forward_batch, scheduled_batch
from sglang_patches.remote_lead import RouteLeader
from sglang_patches.remote_pieces import ModelPieces, State
from sglang_patches.remote_questions import PeerLost, Question
from sglang_patches.remote_requests import requests_under_way
from sglang_patches.remote_stages import Passing, Stages
from sglang_patches.remote_stops import Stop

log = logging.getLogger(__name__)

MOST: Final = 3
"""Batches under way over one peer: two prefills, and one that decodes or prefills. A line of four engines is busy
12 / 15 of the time then, 4 / 7 with one each."""
MORE: Final = 2
"""For each further peer: where one of four leads for all (embedding and head come to one at first), three batches keep
them busy for half of the time, seven for 7 / 10."""

_NAP_S: Final = 0.01
"""New requests are looked for so often."""
Planned = Callable[[Any, Any], Any]
"""SGLang's planning of a step, from a running batch and a last one: a ``NextBatchPlan``."""


@dataclass(frozen=True, slots=True)
class BegunBatch:
    """One that was planned, and has not been run as far as SGLang knows."""

    batch: Any
    parts: int
    tokens: int
    decodes: bool
    began_s: float


class BatchesUnderWay:
    """Of one engine. ``quiet``: nothing is to be begun beside others."""

    def __init__(
        self, scheduler: Any, pieces: ModelPieces, leader: RouteLeader, quiet: Callable[[], bool], ahead: RunAhead
    ) -> None:
        self._scheduler, self._pieces, self._leader, self._quiet = scheduler, pieces, leader, quiet
        self._ahead = ahead
        self._runner = scheduler.tp_worker.model_runner
        self._begun: list[BegunBatch] = []
        self._ended: list[Any] = []
        """Prefills that were processed while the running batch was under way, which they are to join."""
        self._passing: Passing[Stop, BatchPart, State, Question] | None = None
        self._moved_s = 0.0
        self.most = 0
        """That were under way at the same time, so far."""

    # --- what others see ---

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def requests(self) -> list[Any]:
        """Those that are in neither of SGLang's batches."""
        batches = [begun.batch for begun in self._begun if not begun.decodes] + self._ended
        return list(dict.fromkeys(req for batch in batches for req in batch.reqs))

    @property
    def run_ahead(self) -> int:
        """Pieces that were run in the peers' stead, so far."""
        return self._ahead.pieces

    @property
    def possible(self) -> bool:
        """Whether this engine may have several."""
        scheduler = self._scheduler
        plain = not (scheduler.enable_overlap or scheduler.is_mixed_chunk or scheduler.require_mlp_sync)
        in_order = getattr(scheduler, "prism_fair", None) is None and long_of(scheduler) is None
        return self._leader.remote and scheduler.server_args.prism_seat.world == 1 and plain and in_order

    @property
    def _may_show_images(self) -> bool:
        """Whether the next batch may have any."""
        scheduler = self._scheduler
        if not scheduler.model_config.is_multimodal:
            return False
        waiting = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
        chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
        return _shows_images([*waiting, *chunked, *scheduler.running_batch.reqs])

    def drop(self) -> list[Any]:
        """All of them are to begin again: their requests, without those of SGLang's batches."""
        requests = self.requests
        for link, number in self._passing.open if self._passing is not None else ():
            self._leader.asking.questions.drop((link, number))
        self._begun.clear()
        self._ended.clear()
        self._passing = None
        return requests

    def pass_on(self) -> None:
        """What peers have answered goes on to the next of them, while this engine computes
        (:mod:`sglang_patches.remote_relay`). Who is lost is found by the engine itself."""
        if self._passing is not None:
            with suppress(PeerLost):
                if self._passing.pass_on():
                    self._moved_s = time.monotonic()

    # --- a step ---

    def next(self, plan: Planned, running: Any, last: Any) -> Any:
        """What the loop is to do: a batch whose states are here (:attr:`RouteLeader.ready`), one that runs as ever, or
        nothing."""
        scheduler = self._scheduler
        if self._begun and last is not None and last.forward_mode.is_extend():
            self._ended.append(last)
        running = self._joined(running)
        if self._begun:
            scheduler.running_batch, scheduler.last_batch = running, None
        else:
            found = plan(running, last)
            if found.batch_to_run is None or self._quiet() or not self.possible:
                return found
            if _shows_images(found.batch_to_run.reqs):  # looked at, and their positions known, in SGLang's own steps
                return found
            scheduler.running_batch, scheduler.last_batch = found.running_batch, None
            self._begin(found.batch_to_run)
        try:
            batch = self._wait_for_one()
        except PeerLost as lost:
            self._leader.lost = str(lost)
            log.warning("%d batches under way have no result: %s", len(self._begun), lost)
            batch = None
        return _step(batch, scheduler.running_batch)

    def _joined(self, running: Any) -> Any:
        """The running batch with the prefills that have ended; while it is under way itself it stays as it is."""
        if any(begun.decodes for begun in self._begun):
            return running
        for ended in self._ended:
            size, elsewhere = ended.batch_size(), [ended.chunked_req, self._scheduler.chunked_req]
            ended.filter_batch(chunked_req_to_exclude=[req for req in elsewhere if req is not None])
            if ended.batch_size() < size:
                running.batch_is_full = False
            if running.is_empty():
                running = ended
            elif not ended.is_empty():
                running.merge_batch(ended)
        self._ended.clear()
        return running

    def _wait_for_one(self) -> Any:
        """The first batch, when it is back; others are begun beside it meanwhile. None: the engine ends. Raises
        :class:`PeerLost`."""
        passing, scheduler = self._passing, self._scheduler
        assert passing is not None
        looks = True
        while not passing.passed(self._begun[0].parts):
            looks = self._receive() or looks
            if scheduler.gracefully_exit or scheduler._engine_paused:
                return None
            if looks and self._begin_beside():
                continue
            looks = scheduler.grammar_manager.has_waiting_grammars()
            if moved := passing.advance() or passing.run_ahead():
                self._moved_s = time.monotonic()
            self._leader.asking.nap(not moved, self._moved_s, _NAP_S)
        first = self._begun.pop(0)
        self._leader.ready = passing.take(first.parts)
        self._leader.took(first.tokens, time.monotonic() - first.began_s, first.decodes)
        return first.batch

    def _receive(self) -> bool:
        """Whether something has come in. What SGLang's loop does between two steps."""
        received = self._scheduler.request_receiver.recv_requests()
        self._scheduler.process_input_requests(received)
        return bool(received)

    # --- beginning ---

    def _begin(self, batch: Any) -> None:
        from sglang.srt.managers.overlap_utils import resolve_forward_inputs

        resolve_forward_inputs(batch, self._scheduler.future_map)
        whole, leader = scheduled_batch(batch, self._scheduler.model_config.model_is_mrope), self._leader
        counts = micro_batches(whole.extend_lens, 1 + len(leader.peers)) if leader.cuts and not whole.decodes else []
        parts = list(whole.cut(counts)) if len(counts) > 1 else [whole]
        leader.parts += len(parts) if len(parts) > 1 else 0
        if not self._begun:
            self._passing, self._moved_s = self._new_passing(), time.monotonic()
        assert self._passing is not None
        self._passing.add(parts)
        self._begun.append(BegunBatch(batch, len(parts), len(whole.token_ids), whole.decodes, time.monotonic()))
        self.most = max(self.most, len(self._begun))

    def _begin_beside(self) -> bool:
        """Whether another one was begun. Prompts first, as in SGLang."""
        scheduler = self._scheduler
        most = MOST + MORE * max(0, len(self._leader.peers) - 1)
        if len(self._begun) >= most or self._quiet() or scheduler._pending_chunked_abort_req is not None:
            return False
        if self._may_show_images:
            return False
        if (batch := self._next_prefill()) is None and not any(begun.decodes for begun in self._begun):
            batch = self._next_decode()
        if batch is not None:
            self._begin(batch)
        return batch is not None

    def _next_prefill(self) -> Any:
        """Room is what those under way leave."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        if (chunked := scheduler.chunked_req) is not None:
            if chunked.return_logprob:  # how many tokens a chunk had is looked up in the request when it has run
                return None
            if chunked.extend_range.end > len(chunked.prefix_indices):
                scheduler.stash_chunked_request(chunked)
        running = scheduler.running_batch
        everybody = list(dict.fromkeys([*running.reqs, *self.requests]))
        crowd = ScheduleBatch(reqs=everybody, batch_is_full=running.batch_is_full)
        return scheduler.get_new_batch_prefill(crowd).batch_to_run

    def _next_decode(self) -> Any:
        scheduler = self._scheduler
        running = scheduler.running_batch
        if running.is_empty() or running.is_prefill_only:
            return None
        running = scheduler.running_batch = scheduler.update_running_batch(running)
        return None if running.is_empty() else running

    # --- passing ---

    def _new_passing(self) -> Passing[Stop, BatchPart, State, Question]:
        """Through the route as it is now, but for the head, which is SGLang's matter."""
        asking = self._leader.asking

        def received(stop: Stop, part: BatchPart, question: Question) -> State | None:
            answer = asking.questions.answer(question)
            return None if answer is None else asking.state(stop, part, answer)

        def ahead(stop: Stop, part: BatchPart, state: State | None, question: Question) -> bool:
            return self._ahead.go_on(stop, part, state, question, self._run_here)

        here = self._run_here
        stages = Stages(lambda stop: stop.peer is None, here, asking.send_part, received, asking.nap, ahead)
        return Passing(self._leader.stops_before_head(), stages)

    def _run_here(self, stop: Stop, part: BatchPart, state: State | None) -> State:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        runner = self._runner
        one = forward_batch(part, runner.device, self._scheduler.spec_algorithm)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            runner.attn_backend.init_forward_metadata(one)
            found: State = self._pieces.run(stop.first, stop.end, state, one.input_ids, one.positions, one)
        return found


def _shows_images(requests: Iterable[Any]) -> bool:
    return any(req.multimodal_inputs is not None for req in requests)


def _step(batch: Any, running: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=batch, running_batch=running)


def abort(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    """Around ``Scheduler.abort_request``: as it does with those of its own batches."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    original(scheduler, recv_req)
    for req in requests_under_way(scheduler):
        if not req.finished() and (recv_req.abort_all or req.rid.startswith(recv_req.rid)):
            req.to_finish = FINISH_ABORT()


def stay_awake(original: Callable[..., Any], scheduler: Any, *more: Any, **named: Any) -> bool:
    """Around ``Scheduler.is_fully_idle``."""
    return not requests_under_way(scheduler) and bool(original(scheduler, *more, **named))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(
        f"{_SCHEDULER}.abort_request",
        HookKind.AROUND,
        abort,
        ("self", "recv_req"),
        "batches under way are in none of SGLang's",
    ),
    Hook(
        f"{_SCHEDULER}.is_fully_idle",
        HookKind.AROUND,
        stay_awake,
        ("self", "for_health_check"),
        "an engine with batches under way is not idle",
    ),
)
