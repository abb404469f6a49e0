"""The zygote: one warm process with everything imported and patched, from which workers are forked in milliseconds.

    python -m prism.engine.zygote --socket PATH [--kind host|cuda] [--parent-pid PID] [--standby PATH]

It has one thread and serves a unix socket (:mod:`prism.engine.zygote_messages`). It outlives its clients; a child
outlives the zygote but not the process it was told to watch. For GPUs nothing is imported before the fork: a CUDA
context cannot be inherited, so each child imports for itself while it is parked.

With ``--standby`` one more fork of it waits at that socket: as warm as the zygote, most of its memory shared with it,
and able to take its place at once when it dies (:func:`prism.engine.zygote_client.promote`). Importing anew takes
seconds, on a busy machine minutes. A server that is started beside a warm zygote which is not its own may have its
own forked from that one (:func:`prism.engine.zygote_client.another`): tests start hundreds of servers.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn

from prism.engine import boot
from prism.engine.frames import BadFrame, FrameSocket
from prism.engine.process import die_with_parent, join
from prism.engine.zygote_messages import (
    Another,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Promote,
    ZygoteHello,
    encode,
    to_zygote,
)

TITLE: Final = "prism: zygote"
WORKER: Final = "prism.engine.worker"
STANDBY_TITLE: Final = "prism: standby zygote"
STANDBY_PAUSE_S: Final = 1.0
"""Between two forks of a standby: one that dies at once must not keep the zygote busy."""


def go_on_as(request: Another) -> NoReturn:
    """Life of another zygote that was forked instead of started: from here on as if it had been. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        join(request.beside_pid)
        os.setsid()
        _log_to(request.log_file)
        os.environ.clear()
        os.environ.update(request.environment)
        options = _parser().parse_args(request.arguments)
        boot.prepare_environment(options.kind)
        _title(TITLE)
        Zygote(listen(options.socket), options.kind, 0.0, options.standby, options.parent_pid).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def boot_child(fork: Fork, kind: str) -> None:
    """Beside GPUs each child imports for itself, one that uses none as on a machine without."""
    if kind == "cuda":
        boot.boot(fork.kind or kind)


def run_child(fork: Fork, kind: str) -> None:
    """Life of a forked child; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        if fork.log_file is not None:
            _log_to(fork.log_file)
        from setproctitle import setproctitle

        from prism.engine.process import die_with

        setproctitle(fork.title)
        die_with(fork.watch_pid)
        boot_child(fork, kind)
        module, _, function = fork.entry.partition(":")
        getattr(importlib.import_module(module), function)(fork.args)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Zygote:
    """The fork server's loop. ``children`` maps each living child to the client that asked for it. ``standby``: where
    another one is to wait; ``parent_pid``: the process this one ends with."""

    def __init__(
        self, listener: socket.socket, kind: str, boot_s: float, standby: Path | None, parent_pid: int | None
    ) -> None:
        self._listener, self._kind, self._boot_s = listener, kind, boot_s
        self._standby_path, self._parent_pid = standby, parent_pid
        self._standby_pid, self._standby_at_s, self._promoted = 0, -STANDBY_PAUSE_S, True
        self._hello = ZygoteHello(pid=os.getpid(), kind=kind, boot_s=boot_s)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._clients: list[FrameSocket] = []
        self._sockets: dict[FrameSocket, socket.socket] = {}
        self._children: dict[int, FrameSocket] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._reap)
        signal.signal(signal.SIGTERM, lambda *_: self._end())

    def serve(self, promoted: bool = True) -> NoReturn:
        """Answer clients until the process is ended. ``promoted``: False for one that is itself a standby."""
        self._promoted = promoted
        if self._parent_pid is not None:
            self._selector.register(_pidfd(self._parent_pid), selectors.EVENT_READ, lambda _: self._end())
        while True:
            for key, _ in self._selector.select(self._until_standby_s()):
                key.data(key.fileobj)
            if self._until_standby_s() == 0.0:
                self._fork_standby()

    def _until_standby_s(self) -> float | None:
        """When a standby is to be forked; None: there is one, or there shall be none."""
        if self._standby_path is None or self._standby_pid or not self._promoted:
            return None
        return max(0.0, self._standby_at_s + STANDBY_PAUSE_S - time.monotonic())

    def _fork_standby(self) -> None:
        assert self._standby_path is not None
        self._standby_at_s = time.monotonic()
        try:
            pid = os.fork()
        except OSError as error:
            print(f"zygote: no standby: {error}", file=sys.stderr)
            return
        if pid == 0:
            self._close_inherited()
            _title(STANDBY_TITLE)
            next_one = Zygote(
                listen(self._standby_path), self._kind, self._boot_s, self._standby_path, self._parent_pid
            )
            next_one.serve(promoted=False)
        self._standby_pid = pid

    def _promote(self) -> None:
        _title(TITLE)
        self._promoted = True

    def _end(self) -> NoReturn:
        """At the supervisor's word, or with it: the standby goes too. After a SIGKILL it stays and takes over."""
        if self._standby_pid:
            os.kill(self._standby_pid, signal.SIGKILL)
        os._exit(0)

    def _accept(self, _: Any) -> None:
        sock, _address = self._listener.accept()
        client = FrameSocket(sock)
        self._clients.append(client)
        self._sockets[client] = sock
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._read(client))
        client.send(encode(self._hello))

    def _read(self, client: FrameSocket) -> None:
        try:
            for frame in client.receive():
                message: Fork | Another | Promote = to_zygote.decode(frame)
                if isinstance(message, Promote):
                    self._promote()
                else:
                    self._fork(client, message)
        except (BadFrame, ValueError) as error:
            print(f"zygote: dropped a client: {error}", file=sys.stderr)
            client.closed = True
        if client.closed:
            self._drop(client)

    def _drop(self, client: FrameSocket) -> None:
        sock = self._sockets.pop(client)
        self._clients.remove(client)
        self._selector.unregister(sock)
        sock.close()

    def _fork(self, client: FrameSocket, request: Fork | Another) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            client.send(encode(ForkFailed(ask=request.ask, error=str(error))))
            return
        if pid == 0:
            self._close_inherited()
            if isinstance(request, Another):
                go_on_as(request)
            run_child(request, self._kind)
        self._children[pid] = client
        client.send(encode(Forked(ask=request.ask, pid=pid)))

    def _close_inherited(self) -> None:
        self._selector.close()
        self._listener.close()
        for sock in self._sockets.values():
            sock.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _reap(self, _: Any) -> None:
        while True:
            try:
                if not os.read(self._wake_read, 4096):
                    break
            except BlockingIOError:
                break
        while self._children or self._standby_pid:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._standby_pid:
                self._standby_pid = 0
                continue
            client = self._children.pop(pid, None)
            if client in self._sockets:
                client.send(encode(Exited(pid=pid, status=os.waitstatus_to_exitcode(status))))


def listen(path: Path) -> socket.socket:
    """The zygote's socket at ``path``, private to the user; a stale one is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return listener


def _log_to(file: str) -> None:
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _pidfd(pid: int) -> int:
    """Readable once process ``pid`` ends. Ends this process when it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)


def _title(title: str) -> None:
    from setproctitle import setproctitle

    setproctitle(title)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Fork server for engine and front-door workers.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--kind", choices=["host", "cuda", "bare"], default="host", help="bare: import nothing")
    parser.add_argument("--parent-pid", type=int, help="end when this parent process ends")
    parser.add_argument("--standby", type=Path, help="socket at which a warm copy waits to take over")
    return parser


def main() -> None:
    options = _parser().parse_args()
    if options.parent_pid is not None:
        die_with_parent(options.parent_pid)
    _title(TITLE)
    listener = listen(options.socket)
    start_s = time.perf_counter()
    if options.kind != "bare":
        boot.prepare_environment(options.kind)
    if options.kind == "host":
        boot.boot(options.kind)
        importlib.import_module(WORKER)  # else each would, after its fork
    gc.collect()
    gc.freeze()
    boot_s = time.perf_counter() - start_s
    Zygote(listener, options.kind, boot_s, options.standby, options.parent_pid).serve()


if __name__ == "__main__":
    main()
