"""Steps of an engine that stands still for a moment, so that others of its device keep their time per token
(:mod:`prism.policy.pauses`)."""

from __future__ import annotations

from typing import Any

from sglang_patches.long_prompts import long_of
from sglang_patches.seat import Seat


def may_stand_still(scheduler: Any) -> bool:
    """Nobody else waits for its steps: it has all its layers on one device, and lends none to anybody."""
    seat: Seat = scheduler.server_args.prism_seat
    return seat.world == 1 and getattr(scheduler, "prism_remote", None) is None and long_of(scheduler) is None


def stands_still(scheduler: Any, running_batch: Any, last_batch: Any) -> bool:
    """Whether the step that would come now is one of decoding and is not to be made. Prompts are computed all the same;
    what was prefilled last joins the others first, in a step."""
    seat: Seat = scheduler.server_args.prism_seat
    if seat.held_s() <= 0.0 or running_batch.is_empty() or not may_stand_still(scheduler):
        return False
    prompts = scheduler.waiting_queue or scheduler.chunked_req is not None or len(scheduler.grammar_manager)
    return not prompts and (last_batch is None or last_batch.forward_mode.is_decode())
