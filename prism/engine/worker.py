"""The engine worker: parked without a model, active with one, parked again. Runs in a process forked by the zygote.

::

    fork --> parked --ActivateModel--> active (SGLang's scheduler loop) --DeactivateModel--> parked ...
                            \\-- failed: says why, ends itself (the pool forks another)
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from prism import memory
from prism.core.ids import kind_and_index
from prism.core.pace import DevicePace
from prism.engine.building import ActiveModel, EngineBuilder, Phases
from prism.engine.commands import (
    Activated,
    ActivateModel,
    Crashed,
    Deactivated,
    NotActivated,
    Parked,
    command_decoder,
    encode,
)
from prism.engine.delivery import Delivery
from prism.engine.device_clock import DeviceClock, clock_file
from prism.engine.diagnosis import diagnose
from prism.engine.frames import FrameSocket, pack
from prism.engine.gpu_faults import fatal_code
from prism.engine.growing_region import ROOM_WAIT_S
from prism.engine.help_desk import HelpDesk
from prism.engine.leftovers import help_socket, rendezvous_file, structured_log_file
from prism.engine.numa import bind_to_node
from prism.engine.outside import OutsideMemory, hold_torch_to
from prism.engine.seat import describe
from prism.engine.sglang_process import (
    empty_torch_cache,
    finish_kernels,
    forget_globals,
    open_gpu,
    release_scheduler,
    suspects_of,
    torch_bytes,
)
from prism.engine.skeletons import Skeleton, Skeletons, all_ranks, can_rest, rest, wake
from prism.engine.weight_seat import EngineWeights
from prism.kv.keeper import KvKeeper
from prism.kv.lent_shelf import borrower_name
from prism.kv.opening import open_keeper, open_long_tiers
from prism.kv.settings import DeclaredLinks, read_kv_settings
from prism.memory.errors import is_out_of_memory
from prism.memory.gpus import numa_node_of
from prism.obs.logs import setup_logging
from prism.transfer.errors import TransferError
from prism.weights.errors import WeightsError
from prism.weights.loading.links import LoadLinks
from prism.weights.store.awaited_blocks import MENDING_S
from prism.weights.store.weight_store import WeightStore
from prism.wire.secret import read_secret
from sglang_patches.kv_move import keep_all
from sglang_patches.long_prompts import close_long, open_long
from sglang_patches.pace import pace_layers
from sglang_patches.remote_steps import close_remote

log = logging.getLogger(__name__)


class WorkerArgs(msgspec.Struct, frozen=True):
    """The plain dict the zygote hands to :func:`main`."""

    worker: str
    channel: str
    """Path of the pool's control socket."""
    device: str
    """``host:0`` or ``cuda:0``."""
    capacity_bytes: int
    account_dir: str
    store_dir: str | None
    run_dir: str
    world: int = 1
    threads: int = 1
    parked_bytes: int = 0
    """See :class:`prism.engine.options.PoolOptions`."""
    active_bytes: int = 0
    kept_models: int = 0
    """Skeletons it may keep (:mod:`prism.engine.skeletons`)."""
    load_helpers: int = 0
    """0: a virtual device's weights are loaded as fast as it goes, whatever links are declared."""
    log_dir: str | None = None
    secret_file: str | None = None
    """The fleet's secret; None: all front doors are on this machine."""
    pace: DevicePace | None = None
    """The compute speed that a virtual device plays."""


class Worker:
    """The parked loop and its transitions."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._kind, index = kind_and_index(args.device)
        self._gpu_index = index if self._kind == "cuda" else 0
        self._device = memory.open_device(args.device, capacity_bytes=args.capacity_bytes, account_dir=args.account_dir)
        self._owner = self._device.register(args.worker)
        self._outside = OutsideMemory(self._owner, args.parked_bytes, args.active_bytes)
        self._outside.park()
        self._pace = _device_clock(args)
        self._skeletons = Skeletons(args.kept_models)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(args.channel)
        self._channel = FrameSocket(sock)
        gpu = self._gpu_index if self._kind == "cuda" else None
        path = help_socket(Path(args.run_dir), args.worker)
        self._desk = HelpDesk(path, self._device, self._owner, gpu, self._declared)
        secret = None if args.secret_file is None else read_secret(Path(args.secret_file))
        self._builder = EngineBuilder(
            device=self._device,
            gpu_index=self._gpu_index,
            owner=self._owner,
            arena=self._owner.arena(2 * args.capacity_bytes),
            capacity_bytes=args.capacity_bytes,
            store=None if args.store_dir is None else WeightStore(Path(args.store_dir), mending_s=MENDING_S),
            channel=self._channel,
            delivery=Delivery(None if secret is None else secret.mail_keys()),
        )

    def run(self) -> None:
        """Until the pool closes the channel or an activation failed."""
        if self._kind == "cuda":
            open_gpu(self._gpu_index)
        if self._args.world == 1:
            self._join_groups()
        if self._kind == "cuda" and self._args.active_bytes:
            hold_torch_to(self._gpu_index, self._args.parked_bytes, self._args.active_bytes)
        if self._kind == "cuda":
            from prism.weights.loading.cuda_lanes import warm_lanes

            warm_lanes(self._gpu_index)
        gc.collect()
        gc.freeze()
        self._desk.open()
        self._channel.send(encode(Parked(worker=self._args.worker, pid=os.getpid(), owner=self._args.worker)))
        while True:
            self._desk.wait(self._channel.fileno())
            frames = self._channel.receive()
            for frame in frames:
                command = command_decoder.decode(frame)
                if isinstance(command, ActivateModel):
                    self._desk.close()
                    if not self._serve(command):
                        return
                    self._desk.open()
            if self._channel.closed:
                self._desk.close()
                return

    def _join_groups(self) -> None:
        """Process groups of a one-rank engine, made while parked (0.1 s otherwise paid by the first activation)."""
        from sglang.srt.distributed import parallel_state

        parallel_state.init_distributed_environment(
            backend="nccl" if self._kind == "cuda" else "gloo",
            world_size=1,
            rank=0,
            local_rank=self._gpu_index,
            distributed_init_method=f"file://{rendezvous_file(Path(self._args.run_dir), self._args.worker)}",
        )
        parallel_state.initialize_model_parallel()

    def _serve(self, command: ActivateModel) -> bool:
        """One activation from begin to end. False: this process must end."""
        try:
            active = self._activate(command)
        except Exception as error:
            log.exception("activation of %s failed", command.model)
            cause, detail = diagnose(error)
            if fatal_code(error) is not None:
                self._say_last(error, suspects=[])
            self._channel.send(encode(NotActivated(cause=cause, detail=detail, reusable=False)))
            self._drain()
            return False
        try:
            active.scheduler.run_event_loop()
        except Exception as error:
            log.exception("the engine of %s failed", command.model)
            # A device without room is no request's fault, nor are weights that do not come.
            blameless = is_out_of_memory(error) or isinstance(error, WeightsError | TransferError)
            self._say_last(error, [] if blameless else suspects_of(active.scheduler))
            self._drain()
            return False
        start_s = time.perf_counter()
        unfinished = active.seat.tracker.clear()
        self._deactivate(active)
        seconds = time.perf_counter() - start_s
        kept = self._skeletons.builds()
        self._channel.send(encode(Deactivated(unfinished=unfinished, seconds=seconds, kept=kept)))
        return True

    def _activate(self, command: ActivateModel) -> ActiveModel:
        clock = Phases()
        self._outside.activate(ROOM_WAIT_S)
        mark = self._builder.mark(command)
        links = LoadLinks(
            self._owner,
            self._declared() if self._args.load_helpers else DeclaredLinks(),
            {name: Path(path) for name, path in command.helpers.items()},
        )
        skeleton = self._find_skeleton(command, mark)
        if skeleton is None:
            active = self._builder.build(command, mark, clock, links)
        else:
            active = self._wake(skeleton, command, mark, clock, links)
        self._pace_layers(active)
        active.seat.apply_limit(command.limit_bytes)
        active.seat.kv, active.seat.fair = self._keeper(active.weights, command), command.fair
        self._open_long(active)
        weights = active.weights
        if command.first_pieces and not all_ranks(bool(weights.began_with), command.world):
            weights.complete(active.scheduler.tp_worker.model_runner.model)
        active.seat.first_pieces = weights.began_with
        info = describe(active.scheduler, weights)
        phases = {**clock.phases, **{f"weights.{k}": v for k, v in weights.phases.items()}}
        self._channel.send(encode(Activated(phases=phases, info=info, helped_bytes=weights.helped_bytes)))
        return active

    def _pace_layers(self, active: ActiveModel) -> None:
        """Where the device plays another's speed."""
        if self._pace is not None:
            log.warning(
                "%s plays a device, its times are declared and no measurements: %s",
                self._args.device,
                self._pace.pace.words,
            )
            pace_layers(active.scheduler, self._pace, active.command.world)
        active.seat.pace = self._pace

    def _declared(self) -> DeclaredLinks:
        return read_kv_settings(Path(self._args.account_dir)).links.get(self._args.device, DeclaredLinks())

    def _keeper(self, weights: EngineWeights, command: ActivateModel) -> KvKeeper | None:
        """Where this activation's KV outlives it."""
        accounts, device = Path(self._args.account_dir), self._args.device
        borrower = borrower_name(self._args.worker, command.model)
        return open_keeper(
            accounts,
            device,
            borrower,
            weights.identity,
            weights.expected_bytes,
            command.borrows,
            command.prefill_tokens_per_s,
        )

    def _open_long(self, active: ActiveModel) -> None:
        """Where prompts that are larger than the device have their KV."""
        accounts, command = Path(self._args.account_dir), active.command
        active.seat.long_tiers = open_long_tiers(
            accounts, self._args.device, self._args.worker, command.model, command.borrows, command.world
        )
        if open_long(active.scheduler) is None:
            self._close_long(active)

    def _close_long(self, active: ActiveModel) -> None:
        close_long(active.scheduler)
        if active.seat.long_tiers is not None:
            active.seat.long_tiers.close()
            active.seat.long_tiers = None

    def _find_skeleton(self, command: ActivateModel, mark: str) -> Skeleton | None:
        """What this worker keeps of the model, if it can be woken on all ranks."""
        if self._skeletons.most == 0:
            return None
        skeleton = self._skeletons.take(command.build, mark)
        if all_ranks(
            skeleton is not None and skeleton.weights.find_again((command.turn, command.turns)), command.world
        ):
            return skeleton
        if skeleton is not None:
            self._drop(skeleton)
        return None

    def _wake(
        self, skeleton: Skeleton, command: ActivateModel, mark: str, clock: Phases, links: LoadLinks
    ) -> ActiveModel:
        try:
            skeleton.weights.wake(skeleton.scheduler.tp_worker.model_runner.model, command.first_pieces, links)
            clock.done("reserve")
            wake(skeleton, command.engine)
        except BaseException:
            self._drop(skeleton)
            raise
        clock.done("wake")
        return ActiveModel(command, skeleton.scheduler, skeleton.seat, skeleton.weights, mark)

    def _deactivate(self, active: ActiveModel) -> None:
        """Give all memory back, that of torch too: the process may take another model."""
        finish_kernels(self._kind)
        close_remote(active.scheduler)
        self._close_long(active)
        keep_all(active.scheduler)
        active.seat.kv = None
        keep = self._skeletons.most > 0 and can_rest(active.scheduler, active.weights)
        if self._skeletons.most > 0 and all_ranks(keep, active.command.world):
            self._keep(active)
            active.scheduler = None
            active.seat.close_pools()
        else:
            weights = active.weights
            release_scheduler(active.scheduler)
            active.scheduler = active.seat.scheduler = active.seat.adapters = None
            forget_globals()
            gc.collect()
            active.seat.close_pools()
            weights.release()
        empty_torch_cache(self._kind)
        self._bound_kept()
        self._device.set_limit(self._owner.id, None)

    def _keep(self, active: ActiveModel) -> None:
        """Keep what was built, without its weights' memory; the KV pool is the caller's to close."""
        skeleton = rest(active.scheduler, active.seat, active.weights)
        forget_globals()
        active.weights.rest()
        for old in self._skeletons.put(active.command.build, active.mark, skeleton):
            self._drop(old)

    def _bound_kept(self) -> None:
        """What is kept of a GPU is counted, and the models used longest ago go when it is too much."""
        most = self._outside.most_kept_bytes
        while most is not None and torch_bytes(self._kind) > most and (old := self._skeletons.pop()) is not None:
            self._drop(old)
            empty_torch_cache(self._kind)
        self._outside.park(torch_bytes(self._kind) if self._skeletons.builds() else 0)

    def _drop(self, skeleton: Skeleton) -> None:
        release_scheduler(skeleton.scheduler)
        skeleton.scheduler = None
        gc.collect()
        skeleton.weights.release()

    def _say_last(self, error: Exception, suspects: list[str]) -> None:
        self._channel.send(encode(Crashed(reason=worded(error), suspects=suspects, cuda=fatal_code(error))))

    def _drain(self) -> None:
        """The last words must be out before the process ends."""
        deadline_s = time.monotonic() + 5.0
        while self._channel.unsent_bytes and not self._channel.closed and time.monotonic() < deadline_s:
            time.sleep(0.005)
            self._channel.flush()


def worded(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _device_clock(args: WorkerArgs) -> DeviceClock | None:
    return None if args.pace is None else DeviceClock(args.pace, clock_file(Path(args.account_dir), args.device))


def say_why_not(settings: WorkerArgs, error: Exception) -> None:
    """The worker cannot use its device: the pool hears why, instead of a status."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(settings.channel)
        words = Crashed(reason=worded(error), suspects=[], worker=settings.worker, cuda=fatal_code(error))
        sock.sendall(pack(encode(words)))


def main(args: dict[str, Any]) -> None:
    """Entry point named in the zygote's ``Fork``."""
    settings = msgspec.convert(args, WorkerArgs)
    file = None if settings.log_dir is None else structured_log_file(Path(settings.log_dir), settings.worker)
    setup_logging(f"engine-{settings.worker}", "info", file, console=None if file else sys.stderr)
    logging.getLogger("sglang").setLevel(logging.WARNING)
    if settings.device.startswith("host"):
        import torch

        torch.set_num_threads(settings.threads)
    else:
        bind_to_node(numa_node_of(kind_and_index(settings.device)[1]))
    try:
        worker = Worker(settings)
    except Exception as error:
        say_why_not(settings, error)
        raise
    worker.run()
