"""When layers in other engines have their turn: what SGLang's loop calls between two of its steps.

With overlap SGLang prepares a step while the one before is computed. An engine whose route leads elsewhere does not:
its results are processed first, as they are without overlap (:func:`_settle`), until it is alone again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_guard import UnsupportedModel
from sglang_patches.kv_move_in import without
from sglang_patches.remote_layers import RemoteLayers
from sglang_patches.remote_under_way import Planned
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)


def before_step(scheduler: Any) -> None:
    """Orders, lost peers and foreign work between two steps. Requests that begin again are in neither of the
    scheduler's batches any more."""
    seat: Seat = scheduler.server_args.prism_seat
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    orders = seat.take_orders()
    if remote is None and (orders or seat.first_pieces):
        try:
            remote = scheduler.prism_remote = RemoteLayers(scheduler)
        except Exception as error:
            if seat.first_pieces:
                _wait_for_all(scheduler, error)
            for order in orders:
                seat.ordered(order.number, f"{type(error).__name__}: {error}", isinstance(error, UnsupportedModel))
            return
    if remote is not None:
        if orders or not remote.whole:
            _settle(scheduler)
        orders = remote.due(orders)
        remote.step(orders)


def _wait_for_all(scheduler: Any, why: Exception) -> None:
    """An engine that began with some pieces, and cannot run them apart, runs nothing before all of them are here."""
    seat: Seat = scheduler.server_args.prism_seat
    log.warning("%s waits for all of its weights: %s", seat.owner.name, why)
    seat.weights.hold(scheduler.tp_worker.model_runner.model, lambda name: True)
    seat.first_pieces = ()


def _settle(scheduler: Any) -> None:
    """With overlap: process what the step before computed now, as it is done without. Routes change and get lost, and
    requests begin again, when nothing is in flight only; an engine whose batches wait for peers has nothing to gain."""
    if scheduler.enable_overlap and scheduler.last_batch is not None:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.prism_settled = True


def plan_step(scheduler: Any, plan: Planned, running_batch: Any, last_batch: Any) -> Any:
    """``plan`` of both batches, with requests held back while no route is left; foreign work when there is nothing to
    run."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    if remote is None:
        return plan(running_batch, last_batch)
    waiting = {req.rid: req for req in scheduler.waiting_queue} if remote.stalled else {}
    found = without(scheduler, waiting, lambda: remote.under_way.next(plan, running_batch, last_batch))
    if getattr(scheduler, "prism_settled", False):
        scheduler.prism_settled = False
        scheduler.last_batch = None  # the loop would look for its results once more
    remote.own_steps.plan(found.batch_to_run)
    if found.batch_to_run is None:
        remote.serve()
    return found


def all_here(scheduler: Any) -> bool:
    """Whether the engine has all of its model and runs it by itself."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    return not scheduler.server_args.prism_seat.first_pieces if remote is None else remote.whole


def rest(scheduler: Any, most_s: float) -> None:
    """Rank 0 has nothing to do: until a command or a message is here, or a piece of the model that is to come."""
    seat: Seat = scheduler.server_args.prism_seat
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    if remote is None:
        seat.wait(most_s)
    else:
        remote.rest(most_s)


def close_remote(scheduler: Any) -> None:
    """The model leaves: its links and what it kept for others go."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    if remote is not None:
        remote.close()
        scheduler.prism_remote = None


def drop_lost(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around ``Scheduler.process_batch_result``: tokens of a batch that lost its peer are never seen."""
    remote: RemoteLayers | None = getattr(scheduler, "prism_remote", None)
    return None if remote is not None and remote.lost else original(scheduler, batch, result)


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.process_batch_result",
        HookKind.AROUND,
        drop_lost,
        ("self", "batch", "result"),
        "a batch that lost the peer that ran a part of it has no result",
    ),
)
