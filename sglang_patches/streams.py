"""On a GPU, steps run on a stream after the scheduler has moved on: a freed slot's page goes when they are done."""

from __future__ import annotations

from typing import Any

from sglang_patches.hooks import Hook, HookKind


def fence_freed_pages(scheduler: Any) -> None:
    """Before the event loop, when its streams are known. With overlap, steps run on the forward stream; without, on the
    one the loop itself runs on, and the forward stream stays empty (an event on it would be over at once)."""
    if scheduler.device != "cuda":
        return
    stream = scheduler.forward_stream if scheduler.enable_overlap else scheduler.schedule_stream
    scheduler.token_to_kv_pool_allocator.lease.pool.defer_on_stream(stream.cuda_stream)


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.dispatch_event_loop",
        HookKind.BEFORE,
        fence_freed_pages,
        ("scheduler",),
        "pages are unmapped behind the steps that may read them",
    ),
)
