"""SGLang's steps where a long request takes turns with the others (:mod:`sglang_patches.long_prompts`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_move_in import without
from sglang_patches.long_prompts import LongPrompts, long_of


def plan_turns(original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """SGLang's ``get_next_batch_to_run``; the long request and the others take turns, as far as there is anything else
    to do. Prompts of the others go before it, as they go before decoding."""
    if (long := long_of(scheduler)) is None:
        return original(scheduler, running_batch, last_batch)
    long.note_step()
    plan = _plan_turns(long, original, scheduler, running_batch, last_batch)
    long.planned(plan.batch_to_run)
    return plan


def _plan_turns(
    long: LongPrompts, original: Callable[..., Any], scheduler: Any, running_batch: Any, last_batch: Any
) -> Any:
    ours = long.owns(last_batch)
    unread = ours and scheduler.enable_overlap  # its last step's result is still to come
    if not unread:
        long.settle()
    if ours:
        last_batch = None
    turn = not unread and (last_batch is None or not last_batch.forward_mode.is_extend()) and long.may_go()
    if turn and (batch := long.next_batch()) is not None:
        return _plan(batch, running_batch)
    held = {req.rid for req in scheduler.waiting_queue} if long.wants_window else set()
    plan = without(scheduler, held, lambda: original(scheduler, running_batch, last_batch))
    if plan.batch_to_run is None:
        long.turns.rested()
        if not (unread or turn) and (batch := long.next_batch()) is not None:
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
        result = original(scheduler, batch, *more, **named)
    long.agree_on_loss()
    return result


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


def stay_awake(original: Callable[..., Any], scheduler: Any, *more: Any, **named: Any) -> bool:
    """Around ``Scheduler.is_fully_idle``: a long request that waits for memory is in none of SGLang's queues. Resting
    would withdraw its wish."""
    long = long_of(scheduler)
    return (long is None or not long.has_work) and bool(original(scheduler, *more, **named))


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
    Hook(
        f"{_SCHEDULER}.is_fully_idle",
        HookKind.AROUND,
        stay_awake,
        ("self", "for_health_check"),
        "an engine with a long prompt that waits is not idle",
    ),
)
