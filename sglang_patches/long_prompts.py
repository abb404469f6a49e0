"""Requests that are larger than their device, inside SGLang's scheduler: one at a time, beside the others.

::

    taken in --goes long?--> waiting --window and tiers--> chunk, chunk, ... , token, token ... --> finished
                                 |                            |  ^  window given to others
                                 ^----------- a step was lost, or found no room -------'

A long request is in none of SGLang's queues and batches: between steps of the others it has one of its own, as often as
its share of the time allows (:mod:`prism.policy.long_turns`), a batch of one whose slots are all the padding slot and
whose attention back end knows where its KV is. Sampling, grammars, log-probabilities and streaming are SGLang's. Where
others wait for memory, of its model or of another one of the device, it gives them its window's between two steps, and
goes on when they were let in.

Each rank of a tensor-parallel engine has the KV of its heads, a window and units of its own. They take every step
alike: what may differ between them is asked by :meth:`LongPrompts.all_say`, at the same point of a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

import torch

from prism.memory.errors import OutOfMemory
from prism.policy.long_prompts import TierVerdict, goes_long, long_tokens, most_long_tokens
from prism.policy.long_turns import LongTurns, NeighbourTurns, WindowTurns
from sglang_patches.kv_lease import evict
from sglang_patches.long_run import LongRun, layout_of
from sglang_patches.long_window import LongWindow
from sglang_patches.seat import Seat, UnitStore, UnitTiers

log = logging.getLogger(__name__)

TRIES: Final = 3
"""A request whose steps were lost so often is refused."""


_TO_BE_REFUSED: Final = 8
"""Tokens beyond a prompt's own with which SGLang lets it in."""


class LongPrompts:
    """Of one activation, made when it begins (:func:`open_long`)."""

    def __init__(self, scheduler: Any, tiers: UnitTiers, shape: Any, plan: Any) -> None:
        self._scheduler, self.tiers, self.shape, self.plan = scheduler, tiers, shape, plan
        self._seat: Seat = scheduler.server_args.prism_seat
        self.device_tokens = int(scheduler.max_req_len)
        """What the device can ever give one request."""
        most = most_long_tokens(shape, plan, tiers.rooms())
        self.most_tokens = self._least(min(int(scheduler.model_config.context_len) - 1, most))
        """Of a long request."""
        self.waiting: list[Any] = []
        self.run: LongRun | None = None
        self.begun = 0
        """Long requests that began so far."""
        self.turns, self.windows, self.neighbours = LongTurns(), WindowTurns(), NeighbourTurns()
        page = self._seat.owner.page_bytes
        self._window_bytes = -(-plan.nbytes // page) * page
        self._lacks_since_ns = 0
        """When the window was found to lack memory; 0: it does not."""
        self._step: tuple[float, bool] | None = None
        """When the step before was planned, and whether it is the long request's; None: there was none."""
        self._tries: dict[str, int] = {}
        self.wants_window = False
        """The first that waits lacks device memory for its window: nothing new is let in before it."""

    # --- ranks ---

    def _least(self, number: int) -> int:
        """Of all ranks."""
        return _least_of_ranks(self._scheduler, number)

    def all_say(self, yes: bool) -> bool:
        """Whether every rank says so. All of them ask at the same point of a step."""
        return bool(self._least(int(yes)))

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
        self.wants_window = self.wants_window and bool(self.waiting)
        if self.run is not None and matches(self.run.req):
            self.run.aborted = True

    def _say_aborted(self, req: Any) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=req.rid), req)

    # --- steps ---

    def note_step(self) -> None:
        """The step that was planned last is over."""
        if self._step is not None:
            since_s, ours = self._step
            took_s = time.perf_counter() - since_s
            self.turns.took(took_s, ours)
            self._step = None
            if ours:
                self.windows.stepped(self._who_lacks_memory())
                self.neighbours.stepped(took_s)

    def planned(self, batch: Any) -> None:
        """``batch`` is the next step; None: there is nothing to do."""
        if batch is not None:
            self._step = time.perf_counter(), self.owns(batch)

    def may_go(self) -> bool:
        """Whether the next step is to be the long request's, with others there."""
        return self.has_work and self._may_have_window() and self.all_say(self.turns.may_go)

    def next_batch(self) -> Any | None:
        """The next step's batch; None: there is nothing to do, or no memory to do it."""
        if not self._may_have_window() or not (self._begin_next() if self.run is None else self._go_on()):
            return None
        assert self.run is not None
        return self.run.next_batch()

    def _may_have_window(self) -> bool:
        """It has, or nobody who waits goes before, here or in another engine."""
        if self.window_bytes > 0:
            return True
        wished = not self.all_say(self._seat.owner.owed_bytes == 0)
        may_take = self.all_say(self.neighbours.may_take(wished, time.perf_counter()))
        return may_take and self.windows.may_take([req.rid for req in self._scheduler.waiting_queue])

    def _who_lacks_memory(self) -> list[str]:
        """Requests that wait for memory, on any rank."""
        lacks_bytes = self._scheduler.token_to_kv_pool_allocator.lease.lacks_bytes
        return [] if self.all_say(lacks_bytes == 0) else [req.rid for req in self._scheduler.waiting_queue]

    def settle(self) -> None:
        """Behind a step: one that is over or lost leaves; lenders are answered."""
        run = self.run
        if run is None:
            return
        if run.req.finished():
            self._end_run()
        elif run.aborted:
            run.release()
            self._end_run()
            self._say_aborted(run.req)
        elif run.backend.lost:
            self._begin_again(run)
        else:
            run.store.answer()
            if run.window is not None and (self.windows.gives_way or self._neighbours_wish()):
                self._give_way(run)

    def _end_run(self) -> None:
        self._close_run()
        self.windows.gave_way(self._who_lacks_memory())

    def _give_way(self, run: LongRun) -> None:
        if not self.all_say(run.backend.put_tails_away()):
            self.windows.stays()
            self.neighbours.stays()
            return
        run.give_window()
        self.neighbours.gave_way(time.perf_counter())
        self.windows.gave_way([req.rid for req in self._scheduler.waiting_queue])

    def _neighbours_wish(self) -> bool:
        """They get the window's memory: the lease has given what it can by now, and there is pressure still."""
        return self.neighbours.gives_way(not self.all_say(self._seat.owner.pressure() == 0))

    def _go_on(self) -> bool:
        """The request that runs has its window; False: there is no memory for it now, or its tails are lost."""
        run = self.run
        assert run is not None, "there is a request that runs"
        if run.window is not None:
            return True
        if (window := self._window()) is None:
            return False
        run.take_window(window)
        self.agree_on_loss()
        if run.backend.lost:
            self._begin_again(run)
        return not run.backend.lost

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
        store = self.tiers.begin(self.shape, self.plan, long_tokens(_length(req), _left(req)))
        begins = not isinstance(store, TierVerdict)
        if not self.all_say(begins):
            window.close()
            self._begin_later(req, store)
            return False
        assert not isinstance(store, TierVerdict)
        self.begun += 1
        self.waiting.pop(0)
        self.run = LongRun(self._scheduler, req, self.plan, self.shape, window, store, self.device_tokens)
        log.info("a prompt of %d tokens is larger than its device (%d)", _length(req), self.device_tokens)
        return True

    def _begin_later(self, req: Any, store: UnitStore | TierVerdict) -> None:
        """There is no room outside now, here or with another rank. If there never is, ``req`` is refused."""
        words = "the other devices of its model have none outside of them"
        may_fit = True
        if isinstance(store, TierVerdict):
            words, may_fit = store.words(), store.may_fit
        else:
            store.close()
        if not self.all_say(may_fit):
            self.waiting.remove(req)
            words = f"the request needs memory for {_length(req)} tokens: {words}"
            self._seat.reject(req.rid, words, HTTPStatus.BAD_REQUEST)

    def agree_on_loss(self) -> None:
        """Behind a step: what one rank lost all have to compute again."""
        assert self.run is not None, "its step is over, it is not"
        backend = self.run.backend
        if not self.all_say(not backend.lost):
            backend.lost = backend.lost or "another device of the model lost a part of it"

    def _window(self) -> LongWindow | None:
        # The lease withdraws the wish before every step, and its age says who goes first: it has to stand already when
        # the memory is taken.
        self._lacks_since_ns = self._lacks_since_ns or self._least(time.monotonic_ns())
        self._seat.owner.wish(self._window_bytes, self._window_bytes, self._lacks_since_ns)
        if (window := self._try_window()) is None:
            self._make_room()
            window = self._try_window()  # at once: before the next step the lease grows again for whoever waits
        self.wants_window = window is None
        if window is not None:
            self._lacks_since_ns = 0
            self._seat.owner.wish(0, 0)
            self.neighbours.took()
        return window

    def _try_window(self) -> LongWindow | None:
        """The window, if there is one on every rank."""
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        window = None
        with suppress(OutOfMemory):
            window = LongWindow(self._seat.owner, self.plan, self.shape.layers, pool)
        if self.all_say(window is not None):
            return window
        if window is not None:
            window.close()
        return None

    def _make_room(self) -> None:
        """The engine's own cache and unused lease go first."""
        lease = self._scheduler.token_to_kv_pool_allocator.lease
        for part in lease.parts:
            evict(self._scheduler, -(-self._window_bytes // lease.token_bytes), part)
            part.returns.settle(wait=True)
            part.give_back(part.demand(self._scheduler).running + part.scattered(), self._window_bytes)
        lease.agree_on_available(self._scheduler)

    def _close_run(self) -> None:
        if self.run is not None:
            self.run.close()
            self.run = None

    # --- what others ask ---

    @property
    def has_work(self) -> bool:
        """There is a long request, whether it has what it takes or not."""
        return self.run is not None or bool(self.waiting)

    @property
    def window_bytes(self) -> int:
        """Of device memory."""
        return 0 if self.run is None or self.run.window is None else self.run.window.held_bytes

    @property
    def requests(self) -> list[Any]:
        """All that are here."""
        return [*self.waiting, *([] if self.run is None else [self.run.req])]

    def owns(self, batch: Any) -> bool:
        """Whether ``batch`` is a step of the long request."""
        return self.run is not None and batch is not None and batch.reqs == [self.run.req]

    def close(self) -> None:
        """The model leaves."""
        self._close_run()
        self.waiting.clear()


def _least_of_ranks(scheduler: Any, number: int) -> int:
    if scheduler.server_args.prism_seat.world == 1:
        return number
    least = torch.tensor([number], dtype=torch.int64)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group)
    return int(least[0])


def _length(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _left(req: Any) -> int:
    return int(req.sampling_params.max_new_tokens) - len(req.output_ids)


def open_long(scheduler: Any) -> LongPrompts | None:
    """Before an engine serves: its long prompts, where tiers for them are and the model's attention can be computed in
    parts. Where it cannot, whoever sends one is told why."""
    seat: Seat = scheduler.server_args.prism_seat
    scheduler.prism_long, scheduler.prism_no_long = None, ""
    tiers = seat.long_tiers
    capacity_bytes = _least_of_ranks(scheduler, seat.kv_capacity_bytes)
    layout = "there is no memory for it outside" if tiers is None else layout_of(scheduler, capacity_bytes, tiers.ahead)
    everywhere = _least_of_ranks(scheduler, int(not isinstance(layout, str))) > 0
    if isinstance(layout, str) or not everywhere or tiers is None:
        if tiers is not None:
            scheduler.prism_no_long = layout if isinstance(layout, str) else "another of its devices cannot"
            log.warning("prompts that are larger than the device are refused: %s", scheduler.prism_no_long)
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
