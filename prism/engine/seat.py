"""A worker's seat: what the patches inside SGLang see of Prism (:class:`sglang_patches.seat.Seat`)."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from typing import Any, Final

from sglang.srt.managers.io_struct import AbortReq, BatchEmbeddingOutput, BatchTokenIDOutput, ShutdownReq

from prism import memory
from prism.core.errors import InvalidValue
from prism.engine.adapters import AdapterRefused, EngineAdapters
from prism.engine.commands import (
    AbortRequest,
    ActivateModel,
    DeactivateModel,
    DropAdapter,
    EngineInfo,
    HoldSteps,
    Nudge,
    Report,
    SetKvLimit,
    Submit,
    command_decoder,
    encode,
)
from prism.engine.delivery import Delivery
from prism.engine.device_clock import DeviceClock
from prism.engine.events import EngineCounters, TokensMade
from prism.engine.frames import FrameSocket
from prism.engine.sglang_codec import decode_request
from prism.engine.telling import LoadTelling
from prism.engine.tracker import Tracker
from prism.engine.weight_seat import EngineWeights
from prism.kv.keeper import KvKeeper
from prism.kv.long_store import LongTiers
from prism.remote.orders import GrowRoute, HoldPieces, Order, OrderDone, ServeLayers, SetRoute
from sglang_patches.holding import may_stand_still
from sglang_patches.kv_move import computed_tokens
from sglang_patches.long_prompts import LongPrompts
from sglang_patches.remote_requests import held_pieces, requests_under_way
from sglang_patches.spec_memory import reserve_tokens

_TOKENS_EVERY_S: Final = 0.025
"""Half of the time for which it is decided who stands still."""


class WorkerSeat:
    """One activation's place in a worker. Frames that arrive for rank 0 are seen by every rank alike."""

    def __init__(
        self,
        channel: FrameSocket,
        delivery: Delivery,
        command: ActivateModel,
        owner: memory.Owner,
        kv_arena: memory.Arena,
        kv_capacity_bytes: int,
        weights: EngineWeights,
        device: memory.Device,
    ) -> None:
        self.rank, self.world = command.rank, command.world
        self.owner, self.kv_capacity_bytes, self.weights = owner, kv_capacity_bytes, weights
        self.kv_arenas = [kv_arena]
        self.kv_groups: list[memory.KvGroup] = []
        self.draft_rows: Any = None
        self.loading = weights
        self._channel, self._delivery = channel, delivery
        self._poller = select.poll()
        self._commands = select.poll()
        for poller in (self._poller, self._commands):
            poller.register(channel.fileno(), select.POLLIN)
        self.tracker = Tracker(command.engine, delivery, self.report)
        self.scheduler: Any = None
        self.adapters: EngineAdapters | None = None
        self._last_load: EngineCounters | None = None
        self._telling = LoadTelling()
        self._device = device
        self._orders: list[Order] = []
        self.first_pieces: tuple[int, ...] = ()
        """Of this activation, as :attr:`kv` and :attr:`fair`."""
        self._lent = 0
        self.kv: KvKeeper | None = None
        """Of this activation: the worker sets it."""
        self.long_tiers: LongTiers | None = None
        """Likewise."""
        self.fair = command.fair
        self.pace: DeviceClock | None = None
        """Likewise: where the device plays another's speed."""
        self._held_until_s: float | None = None
        """By the monotonic clock; None: nobody has asked, or ever does."""
        self._last_tokens_s = 0.0

    def close_pools(self) -> None:
        """Give all memory of the model's attention state back, at its end."""
        for group in self.kv_groups:
            group.pool.close()
        self.kv_groups.clear()

    def begin(self, engine: str, scheduler: Any) -> None:
        """Another activation of the same model in the same place."""
        self.tracker = Tracker(engine, self._delivery, self.report)
        self.scheduler, self._last_load, self._telling = scheduler, None, LoadTelling()
        self._held_until_s = None
        scheduler.prism_computed_tokens = 0

    # --- commands ---

    def receive_frames(self) -> list[bytes]:
        frames = self._channel.receive()
        if self._channel.closed:
            raise SystemExit(0)  # the pool is gone, and with it everyone who knows this engine
        self._channel.flush()
        return frames

    def decode(self, frames: Sequence[bytes]) -> list[Any]:
        requests: list[Any] = []
        for frame in frames:
            match command_decoder.decode(frame):
                case Submit() as work:
                    requests += self._submit(work)
                case AbortRequest(rid=rid):
                    requests += self._abort(rid)
                case SetKvLimit(limit_bytes=limit):
                    self.apply_limit(limit)
                case DeactivateModel():
                    requests.append(ShutdownReq())
                case DropAdapter(name=name):
                    if self.adapters is not None:
                        self.adapters.forget(name)
                case Nudge():
                    pass
                case HoldSteps(for_s=for_s):
                    self._held_until_s = time.monotonic() + for_s
                case ServeLayers() | HoldPieces() | SetRoute() | GrowRoute() as order:
                    self._orders.append(order)
                case ActivateModel(model=model):
                    raise RuntimeError(f"asked to activate {model} while a model is active")
        if self.tracker.lost:
            requests += [AbortReq(rid=rid) for rid in self.tracker.lost]
            self.tracker.lost.clear()
        return requests

    def _submit(self, work: Submit) -> list[Any]:
        if work.rid in self.tracker:
            return []
        self.tracker.take(work)
        try:
            request = decode_request(work.payload)
        except InvalidValue as error:
            self.reject(work.rid, str(error), 400)
            return []
        request.rid = work.rid
        return [request]

    def _abort(self, rid: str) -> list[Any]:
        return [AbortReq(rid=rid)] if rid in self.tracker else []

    def take_adapter(self, lora_id: str) -> tuple[str, int] | None:
        if self.adapters is None:
            self.adapters = EngineAdapters(self.scheduler)
        try:
            self.adapters.take(lora_id)
        except AdapterRefused as refused:
            return str(refused), refused.status
        return None

    def apply_limit(self, kv_limit_bytes: int | None) -> None:
        """From now on KV memory may hold ``kv_limit_bytes`` beside the weights; None: what the account grants."""
        limit = None if kv_limit_bytes is None else kv_limit_bytes + self.weights.held_bytes
        self._device.set_limit(self.owner.id, limit)

    def wait(self, timeout_s: float) -> bool:
        self._channel.flush()
        return bool(self._poller.poll(timeout_s * 1000))

    def called(self) -> bool:
        return bool(self._commands.poll(0))

    def held_s(self) -> float:
        return 0.0 if self._held_until_s is None else max(0.0, self._held_until_s - time.monotonic())

    # --- layers in other engines ---

    def take_orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def ordered(self, number: int, error: str, whole_only: bool = False) -> None:
        self.report(OrderDone(number=number, error=error, whole_only=whole_only))

    def watch(self, fd: int) -> None:
        self._poller.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    def lent_owner(self) -> memory.Owner:
        self._lent += 1
        return self._device.register(f"{self.owner.name}/lent-{self._lent}")

    # --- outputs ---

    def resumed(self, rid: str) -> Sequence[int]:
        return self.tracker.resumed(rid)

    def emit(self, output: Any) -> None:
        if isinstance(output, BatchTokenIDOutput):
            self.tracker.deliver(output, self._prefill_times)
        elif isinstance(output, BatchEmbeddingOutput):
            self.tracker.deliver_vectors(output, self._prefill_times)
        elif isinstance(output, AbortReq) and output.rid is not None:
            finish = output.finished_reason or {"type": "abort", "message": "Aborted", "status_code": None}
            self.tracker.finish(output.rid, dict(finish))

    def reject(self, rid: str, message: str, status: int) -> None:
        if self.rank == 0:
            self.tracker.fail(rid, message, int(status))

    def report(self, report: Report) -> None:
        if self.rank == 0:
            self._channel.send(encode(report))

    def _prefill_times(self, rid: str) -> tuple[float, float]:
        for batch in (self.scheduler.cur_batch_for_debug, self.scheduler.running_batch):
            for req in batch.reqs if batch is not None else ():
                if req.rid == rid:
                    times = req.time_stats
                    queued_s = max(0.0, times.forward_entry_time - times.scheduler_recv_time)
                    return queued_s, max(0.0, times.prefill_finished_time - times.forward_entry_time)
        return 0.0, 0.0

    # --- load ---

    def stepped(self, scheduler: Any) -> None:
        if self.rank != 0:
            return
        self._channel.flush()
        now_s = time.monotonic()
        if self._held_until_s is not None and now_s - self._last_tokens_s >= _TOKENS_EVERY_S:
            self._last_tokens_s = now_s
            self.report(TokensMade(after_first=self._tokens_made(scheduler)))
        if not self._telling.looks(now_s, held_pieces(scheduler)):
            return
        resident = [] if self.adapters is None else self.adapters.resident()
        load = measure_load(scheduler, self.weights.held_bytes * self.world, self.world, resident)
        if self._telling.tells(now_s, load != self._last_load):
            self._last_load = load
            self.report(load)

    def _tokens_made(self, scheduler: Any) -> dict[str, int]:
        """Of none where it may not stand still: others wait for its steps."""
        if not may_stand_still(scheduler):
            return {}
        running = [req for req in scheduler.running_batch.reqs if not req.finished()]
        return {req.rid: max(0, len(req.output_ids) - len(self.resumed(req.rid)) - 1) for req in running}


def measure_load(scheduler: Any, weight_bytes: int, world: int, adapters: list[str]) -> EngineCounters:
    """Where ``scheduler`` stands. Byte counts are over all ranks, which are alike."""
    lease = scheduler.token_to_kv_pool_allocator.lease
    pace: DeviceClock | None = scheduler.server_args.prism_seat.pace
    kv, remote = scheduler.server_args.prism_seat.kv, getattr(scheduler, "prism_remote", None)
    cached = int(scheduler.tree_cache.evictable_size())
    long: LongPrompts | None = getattr(scheduler, "prism_long", None)
    tiers = None if long is None else long.tiers
    in_batch = sum(1 for r in scheduler.running_batch.reqs if not r.finished()) + len(requests_under_way(scheduler))
    in_batch += long is not None and long.run is not None
    queued = len(scheduler.waiting_queue) + len(scheduler.grammar_manager) + (0 if long is None else len(long.waiting))
    return EngineCounters(
        running=in_batch + (scheduler.chunked_req is not None),
        queued=queued,
        free_kv_tokens=lease.free_tokens(scheduler.tree_cache),
        used_kv_tokens=lease.used_tokens() - cached,
        cached_kv_tokens=cached,
        kv_mapped_bytes=lease.mapped_bytes() * world,
        weight_bytes=weight_bytes,
        retractions=lease.retractions,
        kv_kept_pieces=0 if kv is None else kv.stored_pieces,
        kv_brought_tokens=(0 if kv is None else kv.fetched_tokens) + (0 if remote is None else remote.fetched_tokens),
        computed_tokens=computed_tokens(scheduler),
        long_host_bytes=0 if long is None or long.run is None else long.run.store.host_bytes * world,
        long_lent_bytes=0 if tiers is None else tiers.lent_bytes * world,
        long_brought_bytes=0 if tiers is None else tiers.brought_bytes * world,
        long_prompts=0 if long is None else long.begun,
        long_window_tokens=0 if long is None else long.window_bytes // lease.token_bytes,
        lacks_bytes=lease.lacks_bytes,
        adapters=adapters,
        remote=None if remote is None else remote.state,
        paced_s=0.0 if pace is None else round(pace.paced_s, 3),
        overrun_s=0.0 if pace is None else round(pace.overrun_s, 3),
    )


_UNUSABLE_SLOTS = 4
"""Of the pool's: its first slot is nobody's, and SGLang admits a request only if a slot more than it needs is free."""


def cut_to_memory(scheduler: Any) -> None:
    """Let requests be no longer than what all the memory that may ever be had can hold: SGLang lets one in that would
    need the last slots, and it would wait for ever. Guessed tokens need slots beside a request's own."""
    most = scheduler.max_total_num_tokens - _UNUSABLE_SLOTS - reserve_tokens(scheduler)
    scheduler.max_req_len = min(scheduler.max_req_len, most)
    scheduler.max_req_input_len = min(scheduler.max_req_input_len, most - 1)


_POOLED_STEPS = 2
"""Steps' worth of texts that an engine that does not generate may have: those of the next step are here when one ends,
or the device would wait for them, as nothing is decoded meanwhile."""


def describe(scheduler: Any, weights: EngineWeights) -> EngineInfo:
    """What schedulers must know about the engine that ``scheduler`` runs."""
    step_tokens = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
    long: LongPrompts | None = getattr(scheduler, "prism_long", None)
    most = min(scheduler.max_req_len, scheduler.model_config.context_len)
    return EngineInfo(
        kv_bytes_per_token=scheduler.token_to_kv_pool_allocator.lease.token_bytes,
        max_running=scheduler.max_running_requests,
        chunk_tokens=step_tokens if scheduler.is_generation else _POOLED_STEPS * step_tokens,
        max_request_tokens=most if long is None else max(most, long.most_tokens),
        device_tokens=0 if long is None else long.device_tokens,
        no_long=str(getattr(scheduler, "prism_no_long", "")),
        weight_bytes=weights.held_bytes,
        dtype_bytes=scheduler.model_config.dtype.itemsize,
        from_image=weights.from_image,
        began_with=list(weights.began_with),
    )
