"""On a GPU, steps run on a stream after the scheduler has moved on: a freed slot's page goes when they are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_patches import room
from sglang_patches.hooks import Hook, HookKind


def run_loop(original: Callable[..., None], scheduler: Any) -> None:
    """Around ``dispatch_event_loop``: pages are fenced before it, and no step is left unfinished behind it."""
    fence_freed_pages(scheduler)
    room.run_loop(lambda: original(scheduler), scheduler)
    finish_steps(scheduler)


def fence_freed_pages(scheduler: Any) -> None:
    """When the loop's streams are known. With overlap, steps run on the forward stream; without, on the one the loop
    itself runs on, and the forward stream stays empty (an event on it would be over at once)."""
    if scheduler.device != "cuda":
        return
    stream = scheduler.forward_stream if scheduler.enable_overlap else scheduler.schedule_stream
    for group in scheduler.server_args.prism_seat.kv_groups:
        group.pool.defer_on_stream(stream.cuda_stream)


def finish_steps(scheduler: Any) -> None:
    """With overlap the loop ends with a step in flight: wait for it and deliver what it made."""
    while scheduler.enable_overlap and scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.dispatch_event_loop",
        HookKind.AROUND,
        run_loop,
        ("scheduler",),
        "pages are unmapped behind the steps that may read them; the last step's tokens are delivered",
    ),
)
