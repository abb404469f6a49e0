"""A worker without SGLang that has the faults a test asks for by files in the pool's folder:

``crash-WORKER``: it ends with the CUDA result in the file. ``broken-DEVICE``: workers of the device do not start, with
that result. ``slow-DEVICE``: the next one of the device makes ``waits-DEVICE`` of it, and does not start before that is
gone.
"""

from __future__ import annotations

import os
import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prism.engine.commands import (
    Activated,
    ActivateModel,
    Crashed,
    Deactivated,
    DeactivateModel,
    EngineInfo,
    Parked,
    command_decoder,
    encode,
)
from prism.engine.frames import FrameSocket

INFO = EngineInfo(
    kv_bytes_per_token=1,
    max_running=1,
    chunk_tokens=1,
    max_request_tokens=1,
    weight_bytes=1,
    dtype_bytes=1,
    from_image=True,
)


def main(args: dict[str, Any]) -> None:
    folder, name = Path(args["run_dir"]), str(args["worker"])
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(args["channel"])
    channel = FrameSocket(sock)
    broken = folder / f"broken-{args['device']}"
    if broken.exists():
        last_words(channel, int(broken.read_text()), name)
    waits = folder / f"waits-{args['device']}"
    with suppress(FileNotFoundError):
        (folder / f"slow-{args['device']}").rename(waits)
        while waits.exists():
            time.sleep(0.01)
    channel.send(encode(Parked(worker=name, pid=os.getpid(), owner=name)))
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    crash = folder / f"crash-{name}"
    while not channel.closed:
        poller.poll(20)
        for frame in channel.receive():
            match command_decoder.decode(frame):
                case ActivateModel():
                    channel.send(encode(Activated(phases={}, info=INFO)))
                case DeactivateModel():
                    channel.send(encode(Deactivated(unfinished=[], seconds=0.0)))
                case _:
                    pass
        if crash.exists():
            last_words(channel, int(crash.read_text()), name)


def last_words(channel: FrameSocket, cuda: int, name: str) -> None:
    channel.send(encode(Crashed(reason=f"DeadDriver: result {cuda}", suspects=["r"], worker=name, cuda=cuda)))
    while channel.unsent_bytes and not channel.closed:
        time.sleep(0.005)
        channel.flush()
    raise SystemExit(1)
