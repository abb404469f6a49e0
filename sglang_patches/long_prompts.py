"""Requests that are larger than their device, inside SGLang's scheduler: one at a time, beside the others.

::

    taken in --goes long?--> waiting --window and tiers--> chunk, chunk, ... , token, token ... --> finished
                                 ^----------- a step was lost, or found no room -------'

A long request is in none of SGLang's queues and batches: between two steps of the others it has one of its own, a batch
of one whose slots are all the padding slot and whose attention back end knows where its KV is. Sampling, grammars,
log-probabilities and streaming are SGLang's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

from prism.memory.errors import OutOfMemory
from prism.policy.long_prompts import TierVerdict, goes_long, long_tokens, most_long_tokens
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_lease import evict
from sglang_patches.kv_move_in import without
from sglang_patches.long_run import LongRun, layout_of
from sglang_patches.long_window import LongWindow
from sglang_patches.seat import Seat, UnitTiers

log = logging.getLogger(__name__)

TRIES: Final = 3
"""A request whose steps were lost so often is refused."""


_TO_BE_REFUSED: Final = 8
"""Tokens beyond a prompt's own with which SGLang lets it in."""


class LongPrompts:
    """Of one activation, made when it begins (:func:`open_long`)."""

    def __init__(self, scheduler: Any, tiers: UnitTiers, shape: Any, plan: Any) -> None:
        self._scheduler, self._tiers, self.shape, self.plan = scheduler, tiers, shape, plan
        self._seat: Seat = scheduler.server_args.prism_seat
        self.device_tokens = int(scheduler.max_req_len)
        """What the device can ever give one request."""
        most = most_long_tokens(shape, plan, tiers.rooms())
        self.most_tokens = min(int(scheduler.model_config.context_len) - 1, most)
        """Of a long request."""
        self.waiting: list[Any] = []
        self.run: LongRun | None = None
        self._tries: dict[str, int] = {}
        self.wants_window = False
        """The first that waits lacks device memory for its window: nothing new is let in before it."""

    # --- coming in ---

    @contextmanager
    def lifting(self, recv_req: Any, resumed: int) -> Iterator[None]:
        """While ``recv_req`` is taken in, with ``resumed`` tokens of earlier attempts: SGLang's bounds are the
        device's, which a long request may pass."""
        scheduler, new_tokens = self._scheduler, recv_req.sampling_params.max_new_tokens
        tokens = len(recv_req.input_ids or ()) + resumed
        plain = recv_req.mm_inputs is None and recv_req.input_embeds is None
        if not plain or not goes_long(tokens, 1 << 30 if new_tokens is None else new_tokens, self.device_tokens):
            yield
            return
        before = scheduler.max_req_len, scheduler.max_req_input_len, scheduler.max_total_num_tokens
        # One that the tiers can never hold is let in, too: it is refused with their numbers.
        most = min(int(scheduler.model_config.context_len) - 1, max(self.most_tokens, tokens + _TO_BE_REFUSED))
        scheduler.max_req_len, scheduler.max_req_input_len, scheduler.max_total_num_tokens = most, most - 1, most + 1
        try:
            yield
        finally:
            scheduler.max_req_len, scheduler.max_req_input_len, scheduler.max_total_num_tokens = before

    def takes(self, req: Any) -> bool:
        """Whether ``req``, about to be queued, is served here; then it waits here."""
        if req.to_finish is not None or req.multimodal_inputs is not None or req.input_embeds is not None:
            return False
        if not goes_long(_length(req), _left(req), self.device_tokens):
            return False
        if self.run is not None and self.run.req is req:  # its step found no room, and SGLang took it back
            self._close_run()
        req.skip_radix_cache_insert = True
        self.waiting.append(req)
        return True

    def abort(self, matches: Callable[[Any], bool]) -> None:
        """Requests that ``matches`` end."""
        for req in [req for req in self.waiting if matches(req)]:
            self.waiting.remove(req)
            self._say_aborted(req)
        if self.run is not None and matches(self.run.req):
            self.run.aborted = True

    def _say_aborted(self, req: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)

    # --- steps ---

    def next_batch(self) -> Any | None:
        """The next step's batch; None: there is nothing to do, or no memory to do it."""
        if self.run is None and not self._begin_next():
            return None
        assert self.run is not None
        return self.run.next_batch()

    def settle(self) -> None:
        """Behind a step: one that is over or lost leaves; lenders are answered."""
        run = self.run
        if run is None:
            return
        if run.req.finished():
            self._close_run()
        elif run.aborted:
            run.release()
            self._close_run()
            self._say_aborted(run.req)
        elif run.backend.lost:
            self._begin_again(run)
        else:
            run.store.answer()

    def _begin_again(self, run: LongRun) -> None:
        req, why = run.req, run.backend.lost
        run.release()
        req.reset_for_retract()
        self._close_run()
        self._scheduler.token_to_kv_pool_allocator.lease.retractions += 1
        tries = self._tries[req.rid] = self._tries.get(req.rid, 0) + 1
        if tries < TRIES:
            self.waiting.insert(0, req)
            return
        del self._tries[req.rid]
        self._seat.reject(req.rid, f"its KV was lost {tries} times: {why}", HTTPStatus.SERVICE_UNAVAILABLE)

    def _begin_next(self) -> bool:
        if not self.waiting or self._scheduler.req_to_token_pool.available_size() == 0:
            self.wants_window = False
            return False
        req = self.waiting[0]
        if (window := self._window()) is None:
            return False
        store = self._tiers.begin(self.shape, self.plan, long_tokens(_length(req), _left(req)))
        if isinstance(store, TierVerdict):
            window.close()
            if not store.may_fit:
                self._refuse(self.waiting.pop(0), store)
            return False
        self.waiting.pop(0)
        self.run = LongRun(self._scheduler, req, self.plan, self.shape.layers, window, store, self.device_tokens)
        log.info("a prompt of %d tokens is larger than its device (%d)", _length(req), self.device_tokens)
        return True

    def _window(self) -> LongWindow | None:
        if (window := self._try_window()) is None:
            self._make_room()
            window = self._try_window()  # at once: before the next step the lease grows again for whoever waits
        self.wants_window = window is None
        if window is None:
            self._seat.owner.wish(self.plan.nbytes, self.plan.nbytes)
        return window

    def _try_window(self) -> LongWindow | None:
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        try:
            return LongWindow(self._seat.owner, self.plan, self.shape.layers, pool)
        except OutOfMemory:
            return None

    def _make_room(self) -> None:
        """The engine's own cache and unused lease go first."""
        lease = self._scheduler.token_to_kv_pool_allocator.lease
        part = lease.parts[0]
        evict(self._scheduler, -(-self.plan.nbytes // lease.token_bytes))
        part.returns.settle(wait=True)
        part.give_back(part.demand(self._scheduler).running + part.scattered(), self.plan.nbytes)

    def _refuse(self, req: Any, verdict: TierVerdict) -> None:
        words = f"the request needs memory for {_length(req)} tokens: {verdict.words()}"
        self._seat.reject(req.rid, words, HTTPStatus.BAD_REQUEST)

    def _close_run(self) -> None:
        if self.run is not None:
            self.run.close()
            self.run = None

    # --- what others ask ---

    def owns(self, batch: Any) -> bool:
        """Whether ``batch`` is a step of the long request."""
        return self.run is not None and batch is not None and batch.reqs == [self.run.req]

    def close(self) -> None:
        """The model leaves."""
        self._close_run()
        self.waiting.clear()


def _length(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _left(req: Any) -> int:
    return int(req.sampling_params.max_new_tokens) - len(req.output_ids)


def open_long(scheduler: Any) -> LongPrompts | None:
    """Before an engine serves: its long prompts, where tiers for them are and the model's attention can be computed in
    parts."""
    tiers: UnitTiers | None = scheduler.server_args.prism_seat.long_tiers
    layout = None if tiers is None else layout_of(scheduler)
    if tiers is None or layout is None:
        scheduler.prism_long = None
        return None
    scheduler.prism_long = found = LongPrompts(scheduler, tiers, *layout)
    return found


def long_of(scheduler: Any) -> LongPrompts | None:
    found: LongPrompts | None = getattr(scheduler, "prism_long", None)
    return found


def close_long(scheduler: Any) -> None:
    """The model leaves: a long request is computed again elsewhere."""
    if (long := long_of(scheduler)) is not None:
        long.close()
        scheduler.prism_long = None


def plan_turns(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """SGLang's ``get_next_batch_to_run``; the long request and the others take turns, as far as there is anything else
    to do. Prompts of the others go before it, as they go before decoding."""
    if (long := long_of(scheduler)) is None:
        return original(scheduler, running_batch, last_batch)
    ours = long.owns(last_batch)
    if not (ours and scheduler.enable_overlap):  # then its last step's result is still to come
        long.settle()
    if ours:
        last_batch = None
    turn = not ours and (last_batch is None or not last_batch.forward_mode.is_extend())
    if turn and (batch := long.next_batch()) is not None:
        return _plan(batch, running_batch)
    held = {req.rid for req in scheduler.waiting_queue} if long.wants_window else set()
    plan = without(scheduler, held, lambda: original(scheduler, running_batch, last_batch))
    again = ours and plan.batch_to_run is None and not scheduler.enable_overlap
    if again and (batch := long.next_batch()) is not None:
        return _plan(batch, plan.running_batch)
    return plan


def _plan(batch: Any, running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=batch, running_batch=running_batch)


def run_step(original: Callable[..., Any], scheduler: Any, batch: Any, *more: Any, **named: Any) -> Any:
    """Around ``Scheduler.run_batch``."""
    long = long_of(scheduler)
    if long is None or long.run is None or not long.owns(batch):
        return original(scheduler, batch, *more, **named)
    with long.run.computing():
        return original(scheduler, batch, *more, **named)


def drop_lost_step(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around ``Scheduler.process_batch_result``: tokens of a step without its KV are never seen."""
    long = long_of(scheduler)
    if long is not None and long.run is not None and long.owns(batch) and long.run.backend.lost:
        return None
    return original(scheduler, batch, result)


def abort(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    """Around ``Scheduler.abort_request``."""
    original(scheduler, recv_req)
    if (long := long_of(scheduler)) is not None:
        long.abort(lambda req: recv_req.abort_all or req.rid.startswith(recv_req.rid))


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(
        f"{_SCHEDULER}.run_batch",
        HookKind.AROUND,
        run_step,
        ("self", "batch", "pp_proxy_tensors"),
        "a step of a long prompt has another attention back end",
    ),
    Hook(
        f"{_SCHEDULER}.process_batch_result",
        HookKind.AROUND,
        drop_lost_step,
        ("self", "batch", "result"),
        "one that was lost has no result",
    ),
    Hook(
        f"{_SCHEDULER}.abort_request",
        HookKind.AROUND,
        abort,
        ("self", "recv_req"),
        "long prompts are in none of SGLang's queues",
    ),
)
