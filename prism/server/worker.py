"""One front-door process. Several share the port (SO_REUSEPORT); forked from a warm process they start in a moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from prism.config.catalog import Catalog, load_catalog
from prism.config.state import StateDir
from prism.obs import names
from prism.obs.logs import setup_logging
from prism.obs.metrics import Metrics
from prism.server.connections import BoundedProtocol
from prism.server.front import Front, make_front
from prism.store.connect import open_store
from prism.wire.mailbox import Inbox
from prism.wire.secret import read_secret

log = logging.getLogger(__name__)

BACKLOG = 16_384


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know; a plain dictionary on the way through a fork."""

    catalog: str
    state_dir: str
    redis_url: str
    host: str = "127.0.0.1"
    port: int = 8000
    index: int = 0
    log_level: str = "info"
    listen: str | None = None
    """Address at which other machines' agents and engines reach this worker; None: there are none."""
    secret_file: str | None = None


def main(args: dict[str, Any]) -> None:
    """Entry point after a fork: serves until SIGTERM or SIGINT, then drains."""
    config = msgspec.convert(args, WorkerConfig)
    state = StateDir.at(config.state_dir)
    name = f"front-{config.index}"
    catalog = load_catalog(config.catalog)
    setup_logging(
        name,
        config.log_level,
        state.logs / f"{name}.jsonl",
        max_bytes=int(catalog.log.max_bytes),
        backups=catalog.log.backups,
        console=None,
        prompts=catalog.log.prompts,
    )
    run_worker(config, catalog)


def run_worker(config: WorkerConfig, catalog: Catalog, listener: socket.socket | None = None) -> None:
    """Serves ``catalog`` on ``listener`` (default: its own socket at the configured address) until told to stop."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    asyncio.run(serve(config, catalog, listener or listen(config.host, config.port)))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket that other workers may share. Raises :class:`OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    listener.listen(BACKLOG)
    return listener


async def serve(config: WorkerConfig, catalog: Catalog, listener: socket.socket) -> None:
    """The worker's life. Order at the end: no new requests, running ones end (or the time is up), then the mailbox."""
    from prism.server.app import create_app

    state = StateDir.at(config.state_dir)
    metrics = Metrics()
    store = open_store(config.redis_url, on_loss=lambda: metrics.inc(names.STORE_ERRORS, process="front"))
    _remove_stale(state.run, config.index)
    with _mailbox(state.run, config) as inbox:
        front = make_front(
            catalog, store, inbox, metrics=metrics, admin_key=state.admin_key(), decision_log=state.decision_log
        )
        life = asyncio.create_task(front.run(config.index))
        try:
            await front.placements.known.wait()
            gc.collect()
            gc.freeze()
            await _http(front, create_app(front), listener, life)
        finally:
            await front.broker.close()
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await store.aclose()


async def _http(front: Front, app: Any, listener: socket.socket, life: asyncio.Task[None]) -> None:
    """Serves until a signal comes; raises what the broker dies of, so that the supervisor restarts the worker."""
    options = uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = _Server(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    log.info("listening", extra={"address": listener.getsockname()[:2], "pid": os.getpid()})
    await asyncio.wait({serving, stopping, life}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if life.done() and not life.cancelled():
        life.result()
    for listening in server.servers:
        listening.close()  # other workers get new connections; open ones go on
    await front.drain(float(front.catalog.server.drain_timeout_s))
    server.should_exit = True
    await serving


class _Server(uvicorn.Server):
    """Signals are the worker's own business: it drains before it stops listening."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _mailbox(run: Path, config: WorkerConfig) -> Inbox:
    """The worker's inbox: a socket in ``run``, or one on the network whose address stands in a file there, by which
    the supervisor knows what to bury."""
    name = f"f{config.index}-{uuid.uuid4().hex[:8]}"
    if config.listen is None or config.secret_file is None:
        return Inbox(f"ipc://{run}/{name}.ipc")
    inbox = Inbox(f"tcp://{config.listen}:0", keys=read_secret(Path(config.secret_file)).mail_keys())
    (run / f"{name}.tcp").write_text(inbox.address)
    return inbox


def _remove_stale(run: Path, index: int) -> None:
    """Mailboxes of earlier workers with this index."""
    for old in (*run.glob(f"f{index}-*.ipc"), *run.glob(f"f{index}-*.tcp")):
        old.unlink(missing_ok=True)
