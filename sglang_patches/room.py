"""A step for which the device has no room ends neither the engine nor its requests.

What torch takes for a step is bounded, and others use the GPU too, so a step may fail for want of memory in its middle.
Everything that runs is then retracted, caches and unused pages are given back, and smaller steps begin anew::

    step n fails --> results of step n - 1 delivered --> all retracted, memory given back --> half as much a step
                                                              \\-- nothing smaller left: that request is refused (503)

Ranks of a tensor-parallel engine wait for each other in the middle of a step: there the engine ends, and its requests
go on in another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import torch

from prism.memory.errors import is_out_of_memory
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_lease import evict
from sglang_patches.remote_requests import requests_under_way
from sglang_patches.seat import Seat
from sglang_patches.step_width import StepWidth

log = logging.getLogger(__name__)

LAST_TRIES: Final = 3
"""A step that cannot be smaller is tried so often: what others take of the GPU may come back."""
_NAP_S: Final = 0.2
_ALL: Final = 1 << 40


class StepWithoutRoom(Exception):
    """A step of ``batch`` failed for want of memory. ``result``: of its forward pass, if only sampling failed."""

    def __init__(self, words: str, batch: Any, result: Any = None) -> None:
        super().__init__(words)
        self.batch, self.result = batch, result


class StepRoom:
    """What one engine knows about the room for its steps: from the start of its loop to the end."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.width = StepWidth(scheduler.chunked_prefill_size, scheduler.max_running_requests)
        self._tries = 0

    def found(self) -> None:
        """A step ran."""
        self._tries = 0
        if self.width.found_room():
            self.apply()

    def apply(self) -> None:
        """SGLang's next steps are as wide as ``width``."""
        self._scheduler.chunked_prefill_size = self.width.chunk_tokens
        self._scheduler.running_batch.batch_is_full = False

    def narrow(self, lack: StepWithoutRoom) -> bool:
        """Have the next steps be smaller than the one that failed. False: tried often enough, it cannot be done."""
        batch = lack.batch
        tokens = batch.extend_num_tokens if batch.forward_mode.is_extend() else 0
        self._tries = 0 if self.width.failed(len(batch.reqs), int(tokens or 0)) else self._tries + 1
        self.apply()
        if self._tries:
            self._scheduler.server_args.prism_seat.wait(_NAP_S)
        if self._tries < LAST_TRIES:
            return True
        self._tries = 0
        return False


def run_loop(loop: Callable[[], None], scheduler: Any) -> None:
    """SGLang's event loop, begun anew behind each step that found no room."""
    scheduler.prism_room = StepRoom(scheduler)
    while True:
        try:
            loop()
            break
        except StepWithoutRoom as raised:
            lack = raised
        step_back(scheduler, lack)
    scheduler.prism_room.width.widen_fully()
    scheduler.prism_room.apply()


def run_step(original: Callable[..., Any], scheduler: Any, batch: Any, *more: Any, **named: Any) -> Any:
    """Around ``Scheduler.run_batch``."""
    words = ""
    try:
        result = original(scheduler, batch, *more, **named)
    except Exception as error:
        words = _words_if_no_room(scheduler, error)
        if not words:
            raise
    if words:  # outside of the handler: the frames of the error hold the step's tensors
        raise StepWithoutRoom(words, batch)
    scheduler.prism_room.found()
    return result


def sample(original: Callable[..., Any], scheduler: Any, batch_result: Any, cur_batch: Any) -> Any:
    """Around ``Scheduler.launch_batch_sample_if_needed``: a step's second half where a grammar decides."""
    words = ""
    try:
        return original(scheduler, batch_result, cur_batch)
    except Exception as error:
        words = _words_if_no_room(scheduler, error)
        if not words:
            raise
    raise StepWithoutRoom(words, cur_batch, batch_result)


def _words_if_no_room(scheduler: Any, error: Exception) -> str:
    if scheduler.server_args.prism_seat.world > 1 or not is_out_of_memory(error):
        return ""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def admit(original: Callable[..., int], scheduler: Any, running_bs: int) -> int:
    """Around ``Scheduler.get_num_allocatable_reqs``: no more run at once than a step has room for."""
    room: StepRoom = scheduler.prism_room
    return min(original(scheduler, running_bs), room.width.rows - running_bs)


def step_back(scheduler: Any, lack: StepWithoutRoom) -> None:
    """From the middle of a step to before it: the requests wait, what they held is given back."""
    torch.get_device_module(scheduler.device).synchronize()
    while scheduler.enable_overlap and scheduler.result_queue:
        batch, result = scheduler.result_queue.popleft()
        if result is not lack.result:
            scheduler.process_batch_result(batch, result)
    requests = _running(scheduler, lack.batch)
    _retract(scheduler, requests)
    _give_back(scheduler)
    room: StepRoom = scheduler.prism_room
    if room.narrow(lack):
        log.warning("no room for a step of %d requests: %s; now %s", len(lack.batch.reqs), lack, room.width)
    else:
        _refuse(scheduler, lack)
        requests = [req for req in requests if req not in lack.batch.reqs]
    others = list(scheduler.waiting_queue)
    scheduler.waiting_queue.clear()
    for req in requests:
        scheduler._add_request_to_queue(req, is_retracted=True)
    scheduler.waiting_queue.extend(others)


def _running(scheduler: Any, failed: Any) -> list[Any]:
    """Requests that hold memory and are not finished, those of the failed step with them."""
    batches = [scheduler.running_batch, scheduler.last_batch, failed]
    known = [req for batch in batches if batch is not None for req in batch.reqs]
    known += [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    known += requests_under_way(scheduler)
    return [req for req in dict.fromkeys(known) if req.kv is not None and not req.finished()]


def _retract(scheduler: Any, requests: list[Any]) -> None:
    from sglang.srt.managers.schedule_batch import retract_all

    retract_all(
        reqs=requests,
        server_args=scheduler.server_args,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
    scheduler.token_to_kv_pool_allocator.lease.retractions += len(requests)
    scheduler.running_batch.reqs = []
    scheduler.last_batch = scheduler.cur_batch_for_debug = scheduler.chunked_req = None
    if (remote := getattr(scheduler, "prism_remote", None)) is not None:
        remote.under_way.drop()


def _give_back(scheduler: Any) -> None:
    """Cached prefixes and their pages, what torch keeps, and what pins the tensors of past steps."""
    if scheduler.enable_overlap:
        scheduler.batch_record_buf = [None] * len(scheduler.batch_record_buf)
    for part in scheduler.token_to_kv_pool_allocator.lease.parts:
        part.returns.settle(wait=True)
        evict(scheduler, _ALL, part)
        part.returns.settle(wait=True)
        part.give_back(0, _ALL)
    if scheduler.device == "cuda":
        torch.cuda.empty_cache()


def _refuse(scheduler: Any, lack: StepWithoutRoom) -> None:
    seat: Seat = scheduler.server_args.prism_seat
    for req in lack.batch.reqs:
        log.error("request %s is refused: %s", req.rid, lack)
        words = f"the device has no room for a step of this request alone: {lack}"
        seat.reject(req.rid, words, HTTPStatus.SERVICE_UNAVAILABLE)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(
        f"{_SCHEDULER}.run_batch",
        HookKind.AROUND,
        run_step,
        ("self", "batch", "pp_proxy_tensors"),
        "a step without room is no end of the engine",
    ),
    Hook(
        f"{_SCHEDULER}.launch_batch_sample_if_needed",
        HookKind.AROUND,
        sample,
        ("self", "batch_result", "cur_batch"),
        "nor is its sampling",
    ),
    Hook(
        f"{_SCHEDULER}.get_num_allocatable_reqs",
        HookKind.AROUND,
        admit,
        ("self", "running_bs"),
        "smaller steps where there was no room for larger ones",
    ),
)
