"""The scheduler's messages: one control channel of the worker instead of SGLang's sockets, and nothing pickled.

Commands arrive undecoded on rank 0, are broadcast as they are to the other tensor-parallel ranks, and every rank
decodes them alike.
"""

from __future__ import annotations

from typing import Any, Final, Never

import torch

from sglang_patches.graphs import capture_due
from sglang_patches.hooks import Hook, HookKind
from sglang_patches.remote_steps import all_here, rest
from sglang_patches.seat import Seat

_REST_S: Final = 0.1
"""An engine with nothing to do looks at its account so often."""


class _Outlet:
    """Stands where SGLang has a socket to its tokenizer or detokenizer process."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        if self._seat.rank == 0:
            self._seat.emit(output)


def create_channels(cls: Any, *, port_args: Any, **_: Any) -> Any:
    """Replaces ``SchedulerIpcChannels.create``: no sockets."""
    outlet = _Outlet(port_args.prism_seat)
    return cls(
        recv_from_tokenizer=None,
        recv_from_rpc=None,
        send_to_tokenizer=outlet,
        send_to_detokenizer=outlet,
        send_metrics_from_scheduler=None,
    )


def pull_requests(receiver: Any) -> list[bytes] | None:
    """Replaces ``SchedulerRequestReceiver._pull_raw_reqs``: frames on rank 0, None elsewhere."""
    seat: Seat = receiver.server_args.prism_seat
    return seat.receive_frames() if seat.rank == 0 else None


def broadcast_requests(receiver: Any, recv_reqs: list[bytes] | None) -> list[Any]:
    """Replaces ``SchedulerRequestReceiver._broadcast_reqs_across_ranks`` (which pickles)."""
    seat: Seat = receiver.server_args.prism_seat
    frames = recv_reqs if seat.world == 1 else share_frames(recv_reqs, seat, receiver.tp_cpu_group, receiver.tp_group)
    return seat.decode(frames or [])


def share_frames(frames: list[bytes] | None, seat: Seat, group: Any, tp_group: Any) -> list[bytes]:
    """Rank 0's frames on every rank, over the CPU group: first the sizes' size, then sizes and bytes."""
    source = tp_group.ranks[0]
    if seat.rank == 0:
        assert frames is not None
        blob = torch.frombuffer(bytearray(b"".join(frames) or b"\0"), dtype=torch.uint8)
        sizes = torch.tensor([len(f) for f in frames], dtype=torch.int64)
        head = torch.tensor([len(frames), blob.numel()], dtype=torch.int64)
    else:
        head = torch.empty(2, dtype=torch.int64)
    torch.distributed.broadcast(head, source, group=group)
    count, nbytes = int(head[0]), int(head[1])
    if count == 0:
        return []
    if seat.rank != 0:
        sizes = torch.empty(count, dtype=torch.int64)
        blob = torch.empty(nbytes, dtype=torch.uint8)
    torch.distributed.broadcast(sizes, source, group=group)
    torch.distributed.broadcast(blob, source, group=group)
    data, found, at = blob.numpy().tobytes(), [], 0
    for size in sizes.tolist():
        found.append(data[at : at + size])
        at += size
    return found


def leave_wrapped(receiver: Any, recv_reqs: Any) -> None:
    """Replaces ``SchedulerRequestReceiver.unwrap_pickle_wrapper``: the seat lets nothing wrapped through."""


def sleep_when_idle(scheduler: Any) -> None:
    """Replaces ``Scheduler.maybe_sleep_on_idle``: rank 0 waits for a command, the others for rank 0."""
    seat: Seat = scheduler.server_args.prism_seat
    if scheduler.gracefully_exit:
        return  # told to leave in this very round
    scheduler.token_to_kv_pool_allocator.lease.rest(scheduler)
    seat.stepped(scheduler)
    if all_here(scheduler):
        capture_due(scheduler, idle=True)
    if seat.rank == 0:
        rest(scheduler, _REST_S)


def no_load_snapshots(*_: Any, **__: Any) -> None:
    """Replaces ``create_load_snapshot_writer``: SGLang's would share one file in /dev/shm among all engines of the
    machine and leave it behind; Prism's engines report their load themselves."""


def drop_time_stats(obj: Any) -> None:
    """Replaces ``io_struct.wrap_as_pickle``: SGLang's time statistics stay here, anything else is refused."""
    if obj is None or isinstance(obj, list) or type(obj).__name__.endswith("TimeStats"):
        return
    raise TypeError(f"Prism sends nothing pickled, and {type(obj).__name__} has no other coding")


def refuse_pickle(obj: Any) -> Any:
    """Replaces ``io_struct.unwrap_from_pickle`` and ``io_struct._maybe_unwrap_pickle``."""
    if type(obj).__name__ == "PickleWrapper":
        _refuse()
    return obj


def _refuse() -> Never:
    raise TypeError("Prism accepts nothing pickled")


_RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_STRUCTS = "sglang.srt.managers.io_struct"
HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler_components.ipc_channels.SchedulerIpcChannels.create",
        HookKind.REPLACE,
        create_channels,
        ("port_args", "is_rank_zero", "skip_tokenizer_init", "metrics_enabled", "enable_scripted_runtime"),
        "the worker has one control channel of its own",
    ),
    Hook(f"{_RECEIVER}._pull_raw_reqs", HookKind.REPLACE, pull_requests, ("self",), "as above"),
    Hook(
        f"{_RECEIVER}._broadcast_reqs_across_ranks",
        HookKind.REPLACE,
        broadcast_requests,
        ("self", "recv_reqs"),
        "the original pickles",
    ),
    Hook(
        f"{_RECEIVER}.unwrap_pickle_wrapper",
        HookKind.REPLACE,
        leave_wrapped,
        ("self", "recv_reqs"),
        "nothing pickled is accepted",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
        HookKind.REPLACE,
        sleep_when_idle,
        ("self",),
        "wait on the control channel, mind the memory lease",
    ),
    Hook(
        "sglang.srt.managers.load_snapshot.create_load_snapshot_writer",
        HookKind.REPLACE,
        no_load_snapshots,
        ("server_args", "port_args", "dp_size", "dp_rank", "publish_interval"),
        "load is reported on the control channel",
    ),
    Hook(f"{_STRUCTS}.wrap_as_pickle", HookKind.REPLACE, drop_time_stats, ("obj",), "nothing pickled is sent"),
    Hook(f"{_STRUCTS}.unwrap_from_pickle", HookKind.REPLACE, refuse_pickle, ("obj",), "nothing pickled is accepted"),
    Hook(f"{_STRUCTS}._maybe_unwrap_pickle", HookKind.REPLACE, refuse_pickle, ("obj",), "nothing pickled is accepted"),
)
