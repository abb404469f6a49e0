"""The scheduling step: memory lease and remote layers before it, resumed requests, one request's fault kept to it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from http import HTTPStatus
from typing import Any

from sglang_patches.graphs import capture_due
from sglang_patches.holding import stands_still
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.long_prompts import long_of
from sglang_patches.long_steps import plan_turns
from sglang_patches.remote_steps import all_here, before_step, plan_step
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)

_BLOCKED_NAP_S = 0.005
"""Requests wait but none can run (no memory): look again after this, or when a command comes."""
_LONG_NAP_S = 0.05
"""The same where only a request that is larger than the device waits: to look is to map its window."""


def schedule(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Around ``Scheduler.get_next_batch_to_run``."""
    seat: Seat = scheduler.server_args.prism_seat
    if all_here(scheduler):
        capture_due(scheduler, idle=False)
    before_step(scheduler)
    if getattr(scheduler, "prism_remote", None) is not None:
        running_batch, last_batch = scheduler.running_batch, scheduler.last_batch
    lease = scheduler.token_to_kv_pool_allocator.lease
    lease.before_step(scheduler)
    if stands_still(scheduler, running_batch, last_batch):
        seat.stepped(scheduler)
        if last_batch is None:  # else its results are to be looked at first
            seat.wait(seat.held_s())
        return _no_step(running_batch)
    plan = plan_step(
        scheduler, lambda running, last: plan_turns(original, scheduler, running, last), running_batch, last_batch
    )
    lease.planned(scheduler.enable_overlap)
    seat.stepped(scheduler)
    if plan.batch_to_run is None and last_batch is None and seat.rank == 0:
        _nap(scheduler, seat)
    return plan


def _no_step(running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)


def _nap(scheduler: Any, seat: Seat) -> None:
    long = long_of(scheduler)
    if scheduler.waiting_queue:
        seat.wait(_BLOCKED_NAP_S)
    elif long is not None and long.has_work:
        seat.wait(_LONG_NAP_S)


def take_in(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    """Around ``Scheduler.handle_generate_request``: whatever is wrong with a request ends that request only."""
    seat: Seat = scheduler.server_args.prism_seat
    problem = find_problem(recv_req, scheduler)
    if problem is not None:
        seat.reject(recv_req.rid, problem, HTTPStatus.BAD_REQUEST)
        return
    try:
        if recv_req.lora_id is not None and (refusal := seat.take_adapter(recv_req.lora_id)) is not None:
            seat.reject(recv_req.rid, *refusal)
            return
        long = long_of(scheduler)
        with nullcontext() if long is None else long.lifting(recv_req, len(seat.resumed(recv_req.rid))):
            original(scheduler, recv_req)
    except Exception as error:
        log.exception("request %s could not be taken in", recv_req.rid)
        seat.reject(recv_req.rid, f"{type(error).__name__}: {error}", HTTPStatus.BAD_REQUEST)


def find_problem(recv_req: Any, scheduler: Any) -> str | None:
    """What in the request would break a batch that others share; None if nothing."""
    if not scheduler.is_generation:
        return "this model answers with vectors or scores: it does not generate text"
    if not recv_req.sampling_params.is_normalized:
        return "the sampling parameters were not normalized by the front door"
    vocab = scheduler.model_config.vocab_size
    params = recv_req.sampling_params
    ids = recv_req.input_ids
    if ids is None or len(ids) == 0:
        return "the prompt has no tokens"
    if min(ids) < 0 or max(ids) >= vocab:
        return f"prompt token ids must be in [0, {vocab}) for this model"
    if any(not 0 <= int(token) < vocab for token in params.logit_bias or {}):
        return f"logit_bias: token ids must be in [0, {vocab}) for this model"
    if any(not 0 <= token < vocab for token in params.stop_token_ids or ()):
        return f"stop_token_ids must be in [0, {vocab}) for this model"
    if any(not 0 <= token < vocab for token in recv_req.token_ids_logprob or ()):
        return f"token_ids_logprob must be in [0, {vocab}) for this model"
    if recv_req.top_logprobs_num > vocab:
        return f"top_logprobs must be at most {vocab} for this model"
    if recv_req.custom_logit_processor is not None:
        return "custom logit processors are code and are not run here"
    if recv_req.return_hidden_states or recv_req.return_routed_experts or recv_req.return_sampling_mask:
        return "hidden states, routed experts and sampling masks are not served"
    return None


def begin_resumed(scheduler: Any, req: Any) -> None:
    """Before ``Scheduler.init_req_max_new_tokens``, the first call on a new request: put in the tokens it already has.

    The engine then stands where it stands after a retraction: prompt and generated tokens are prefilled together.
    """
    seat: Seat = scheduler.server_args.prism_seat
    req.stream = True  # the front door keeps every request's tokens, so that another engine can go on
    tokens = seat.resumed(req.rid)
    if not tokens or len(req.output_ids):
        return
    count = len(tokens)
    req.output_ids = array("q", tokens)
    req.send_token_offset = req.send_output_token_logprobs_offset = count
    if req.return_logprob:
        pads: list[Any] = [None] * count
        logprob = req.logprob
        logprob.output_token_logprobs_val, logprob.output_token_logprobs_idx = list(pads), list(pads)
        logprob.output_top_logprobs_val, logprob.output_top_logprobs_idx = list(pads), list(pads)
        logprob.output_token_ids_logprobs_val, logprob.output_token_ids_logprobs_idx = list(pads), list(pads)
        req.input_logprob_sent = True
    for token in tokens:
        req.update_reasoning_tokens(token, scheduler.model_config.think_end_id)
    extend_positions(req.multimodal_inputs, count)


def extend_positions(media: Any, count: int) -> None:
    """M-RoPE's positions for ``count`` generated tokens behind the prompt's, as SGLang has it after a retraction: those
    of all that is prefilled are taken from there."""
    if media is None or media.mrope_positions is None:
        return
    from sglang.srt.managers.mm_utils import extend_mrope_positions_for_retracted_request

    media.mrope_positions = extend_mrope_positions_for_retracted_request(media.mrope_positions, count)


def enqueue(original: Callable[..., Any], scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Around ``Scheduler._add_request_to_queue``: the end of a resumed request's preparation: its grammar is ready."""
    seat: Seat = scheduler.server_args.prism_seat
    tokens = seat.resumed(req.rid)
    if tokens and not is_retracted and len(req.output_ids) == len(tokens) and req.to_finish is None:
        complete_resumed(req, tokens)
        if req.finished():
            scheduler.output_streamer.stream_output([req], req.return_logprob)
            return
    if (long := long_of(scheduler)) is None or not long.takes(req):
        original(scheduler, req, is_retracted)


def complete_resumed(req: Any, tokens: Sequence[int]) -> None:
    """Let the grammar follow the tokens the request already has; finish it if they are its whole answer. Its prompt's
    log-probabilities were delivered by an earlier attempt."""
    if req.return_logprob:
        req.logprob_start_len = len(req.origin_input_ids) + len(tokens)
    if req.grammar is not None:
        try:
            for token in tokens:
                req.grammar.accept_token(token)
        except ValueError as error:
            req.set_finish_with_abort(f"the grammar does not allow the tokens generated so far: {error}")
            return
    req.update_finish_state(new_accepted_len=len(tokens))


def keep_last_request(original: Callable[..., Any], batch: Any, server_args: Any) -> Any:
    """Around ``ScheduleBatch.retract_decode``: with memory lent elsewhere the last request waits instead of failing."""
    retracted, ratio, aborted = original(batch, server_args)
    for req in aborted:
        req.to_finish = None
        retracted.append(req)
    batch.token_to_kv_pool_allocator.lease.retractions += len(retracted)
    return retracted, ratio, []


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(
        f"{_SCHEDULER}.get_next_batch_to_run",
        HookKind.AROUND,
        schedule,
        ("self", "running_batch", "last_batch"),
        "memory leases and routes change between steps only; no spinning without memory",
    ),
    Hook(
        f"{_SCHEDULER}.handle_generate_request",
        HookKind.AROUND,
        take_in,
        ("self", "recv_req"),
        "one bad request must not end the engine",
    ),
    Hook(
        f"{_SCHEDULER}.init_req_max_new_tokens",
        HookKind.BEFORE,
        begin_resumed,
        ("self", "req"),
        "a request goes on where another engine left it",
    ),
    Hook(
        f"{_SCHEDULER}._add_request_to_queue",
        HookKind.AROUND,
        enqueue,
        ("self", "req", "is_retracted"),
        "grammar of a resumed request; one that is complete ends at once",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        HookKind.AROUND,
        keep_last_request,
        ("self", "server_args"),
        "running out of leased memory is no error",
    ),
)
