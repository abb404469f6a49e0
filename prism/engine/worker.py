"""The engine worker: parked without a model, active with one, parked again. Runs in a process forked by the zygote.

::

    fork --> parked --ActivateModel--> active (SGLang's scheduler loop) --DeactivateModel--> parked ...
                            \\-- failed: says why, ends itself (the pool forks another)
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prism import memory
from prism.core.ids import kind_and_index
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
from prism.engine.diagnosis import diagnose
from prism.engine.frames import FrameSocket
from prism.engine.images import image_keys
from prism.engine.leftovers import rendezvous_file, structured_log_file
from prism.engine.numa import bind_to_node
from prism.engine.outside import OutsideMemory, hold_torch_to
from prism.engine.seat import WorkerSeat, cut_to_memory, describe
from prism.engine.sglang_process import (
    empty_torch_cache,
    finish_kernels,
    forget_globals,
    prepare_ranks,
    release_scheduler,
    seat_pool,
    suspects_of,
)
from prism.engine.weight_seat import ROOM_WAIT_S, EngineWeights
from prism.memory.gpus import numa_node_of
from prism.obs.logs import setup_logging
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.store.weight_store import WeightStore
from prism.wire.secret import read_secret

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
    log_dir: str | None = None
    secret_file: str | None = None
    """The fleet's secret; None: all front doors are on this machine."""


@dataclass
class ActiveModel:
    """One activation: the objects that must be gone before the next."""

    command: ActivateModel
    scheduler: Any
    seat: WorkerSeat
    weights: EngineWeights


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
        self._arena = self._owner.arena(2 * args.capacity_bytes)
        self._store = None if args.store_dir is None else WeightStore(Path(args.store_dir))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(args.channel)
        self._channel = FrameSocket(sock)
        secret = None if args.secret_file is None else read_secret(Path(args.secret_file))
        self._delivery = Delivery(None if secret is None else secret.mail_keys())

    def run(self) -> None:
        """Until the pool closes the channel or an activation failed."""
        if self._args.world == 1:
            self._join_groups()
        if self._kind == "cuda" and self._args.active_bytes:
            hold_torch_to(self._gpu_index, self._args.parked_bytes, self._args.active_bytes)
        if self._kind == "cuda":
            from prism.weights.loading.cuda_lanes import warm_lanes

            warm_lanes(self._gpu_index)
        gc.collect()
        gc.freeze()
        self._channel.send(encode(Parked(worker=self._args.worker, pid=os.getpid(), owner=self._args.worker)))
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLIN)
        while True:
            poller.poll()
            frames = self._channel.receive()
            for frame in frames:
                command = command_decoder.decode(frame)
                if isinstance(command, ActivateModel) and not self._serve(command):
                    return
            if self._channel.closed:
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
            self._channel.send(encode(NotActivated(cause=cause, detail=detail, reusable=False)))
            self._drain()
            return False
        try:
            active.scheduler.run_event_loop()
        except Exception as error:
            log.exception("the engine of %s failed", command.model)
            reason = f"{type(error).__name__}: {error}"[:500]
            self._channel.send(encode(Crashed(reason=reason, suspects=suspects_of(active.scheduler))))
            self._drain()
            return False
        start_s = time.perf_counter()
        unfinished = active.seat.tracker.clear()
        reusable = self._deactivate(active)
        seconds = time.perf_counter() - start_s
        self._channel.send(encode(Deactivated(unfinished=unfinished, seconds=seconds, reusable=reusable)))
        if not reusable:
            self._drain()
        return reusable

    def _activate(self, command: ActivateModel) -> ActiveModel:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        clock = Phases()
        self._outside.activate(ROOM_WAIT_S)
        arguments = msgspec.json.decode(command.server_args)
        server_args = ServerArgs(**arguments)
        clock.done("arguments")
        weights = self._weights(command, arguments | {"dtype": server_args.dtype})
        clock.done("reserve")
        capacity = max(0, self._args.capacity_bytes - weights.expected_bytes)
        if command.limit_bytes is not None:
            # SGLang cuts and refuses requests by what it believes to have; one that it lets in must fit some day.
            page_bytes = self._device.page_bytes
            capacity = min(capacity, command.limit_bytes // page_bytes * page_bytes)
        seat = WorkerSeat(
            self._channel, self._delivery, command, self._owner, self._arena, capacity, weights, self._device
        )
        server_args.prism_seat = seat
        port_args = PortArgs(
            tokenizer_ipc_name="",
            scheduler_input_ipc_name="",
            detokenizer_ipc_name="",
            nccl_port=0,
            rpc_ipc_name="",
            metrics_ipc_name="",
            tokenizer_worker_ipc_name=None,
            decoupled_spec_ipc_config=None,
        )
        port_args.prism_seat = seat
        if command.world > 1:
            prepare_ranks(command)
        try:
            scheduler = Scheduler(server_args, port_args, self._gpu_index, command.rank, 0, 0, 0, 0, None)
        except BaseException:
            weights.release()
            raise
        clock.done("construct")
        seat.scheduler = scheduler
        cut_to_memory(scheduler)
        seat.apply_limit(command.limit_bytes)
        info = describe(scheduler, weights.held_bytes, weights.from_image)
        phases = {**clock.phases, **{f"weights.{k}": v for k, v in weights.phases.items()}}
        self._channel.send(encode(Activated(phases=phases, info=info)))
        return ActiveModel(command, scheduler, seat, weights)

    def _weights(self, command: ActivateModel, arguments: dict[str, Any]) -> EngineWeights:
        folder = Path(arguments["model_path"])
        cache = None if self._store is None else self._store.directory
        # Other kinds of files, and models named by their hub id, are SGLang's to find; no image is kept of them.
        found = fingerprint(folder, cache=cache) if any(folder.glob("*.safetensors")) else ""
        mark = found or command.mark  # a folder without weights belongs to a model whose pack comes from elsewhere
        key = image_keys(mark, command.world, arguments)[command.rank]
        store = self._store if mark else None
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        estimate = (stored or command.weight_bytes) // command.world
        return EngineWeights(self._owner, store, key, command.model, self._args.capacity_bytes, estimate)

    def _deactivate(self, active: ActiveModel) -> bool:
        """Give all memory back, that of torch too. True if the process may take another model."""
        finish_kernels(self._kind)
        release_scheduler(active.scheduler)
        weights = active.weights
        pool = seat_pool(active.scheduler)
        active.scheduler = active.seat.scheduler = None
        forget_globals()
        gc.collect()
        pool.close()
        weights.release()
        empty_torch_cache(self._kind)
        self._outside.park()
        self._device.set_limit(self._owner.id, None)
        return self._args.world == 1

    def _drain(self) -> None:
        """The last words must be out before the process ends."""
        deadline_s = time.monotonic() + 5.0
        while self._channel.unsent_bytes and not self._channel.closed and time.monotonic() < deadline_s:
            time.sleep(0.005)
            self._channel.flush()


class Phases:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def done(self, name: str) -> None:
        now_s = time.perf_counter()
        self.phases[name] = now_s - self._last_s
        self._last_s = now_s


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
    Worker(settings).run()
