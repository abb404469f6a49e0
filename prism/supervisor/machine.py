"""All processes of one machine, in the order in which they need each other::

valkey (embedded, unless a URL is given)
zygote        warm SGLang process; forks engines (for the agent) and front-door workers (for the supervisor)
controller    one per fleet
agent         one per machine: devices, engines
front-0..N    the HTTP workers
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prism import __version__
from prism.config.addresses import FleetAddress
from prism.config.catalog import Catalog
from prism.config.devices import resolve_devices
from prism.config.state import StateDir
from prism.controller.main import ControllerConfig
from prism.core.ids import NodeId
from prism.memory.gpus import gpus_if_any
from prism.store.connect import open_store, reach
from prism.store.embedded import EmbeddedServer
from prism.store.interface import Store
from prism.store.values import StoreUnavailable
from prism.supervisor.base import CannotStart, Supervisor
from prism.supervisor.burial import Burial
from prism.supervisor.children import Child, Starter
from prism.supervisor.fleet import DOCUMENT, FleetDocument, settings_of
from prism.supervisor.sharing import STATUS, check_alone, signed
from prism.wire.secret import FleetSecret, make_secret, with_password, without_password

LOCAL_NODE: Final = NodeId("local")
STOP_S: Final = 10.0
STATUS_S: Final = 1.0
LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides."""

    host: str
    port: int
    state: StateDir
    redis_url: str | None
    log_level: str
    front_workers: int
    secret_file: Path
    """The fleet's secret; made when there is none."""
    fleet: FleetAddress | None = None
    """Where other machines reach this one; None: no other machines."""


class Machine(Supervisor):
    """Starts everything (:meth:`start`, telling ``say`` each step), keeps it running, stops it (:meth:`stop`)."""

    def __init__(self, catalog: Catalog, options: Options, say: Callable[[str], None]) -> None:
        gpus = gpus_if_any()
        devices = resolve_devices(catalog, LOCAL_NODE, gpus.memory_bytes, gpus.refused, gpus.islands)
        secret_file = options.secret_file if options.fleet else None
        super().__init__(options.state, devices, options.redis_url or "", secret_file, options.log_level, say)
        self.catalog, self.options, self._settings = catalog, options, settings_of(catalog)
        self._secret = make_secret(options.secret_file) if options.fleet else None
        if self._secret is not None and self._redis_url:
            self._redis_url = with_password(self._redis_url, self._secret)
        self._fronts: list[Child] = []
        self._valkey: EmbeddedServer | None = None
        self._valkey_watch: asyncio.Task[None] | None = None
        self._burial = Burial(options.state.run, lambda: open_store(self._redis_url))

    # --- start ---

    async def start(self) -> None:
        """Returns when requests are answered. Raises :class:`CannotStart`."""
        self._check_port(self.options.host, self.options.port, "--port")
        if not self._redis_url:
            self._start_valkey()
        async with self._store() as store:
            await reach(store)
            await check_alone(store, self.state, without_password(self._redis_url))
            if self._secret is not None:
                await self._check_password()
                await store.put_doc(DOCUMENT, self._fleet_document(self._secret).encode())
            await self._burial.of_earlier_servers(store)
            self._say("warming up SGLang (imports, about 20 s on two cores)")
            self._add("zygote", self._start_zygote(self.catalog.engines.standby))
            await self._warm()
            self._say(f"starting the scheduler and {len(self.devices)} devices")
            self._add("controller", self._start_controller())
            agent = f"ipc://{self.state.run}/agent.ipc"
            weights = f"{self.options.fleet.host}:0" if self.options.fleet else ""
            self._add("agent", self._start_agent(LOCAL_NODE, agent, self._settings, weights))
            for index in range(self.options.front_workers):
                self._fronts.append(self._add(f"front-{index}", self._front_starter(index)))
            await self._until(lambda: self._agent_is_up(store), "the node agent")
            await self._until(self._port_answers, "the front door")

    def _start_valkey(self) -> None:
        """The embedded server; machines that join reach it over the network, with the password of the secret."""
        fleet, password = self.options.fleet, ""
        if fleet is not None and self._secret is not None:
            self._check_port(fleet.host, fleet.port, "--fleet ADDRESS:PORT")
            password = self._secret.store_password
        self._say("starting the embedded Valkey server")
        listen = None if fleet is None else (fleet.host, fleet.port)
        self._valkey = EmbeddedServer(
            self.state.redis, self.state.run / "valkey.sock", listen=listen, password=password
        )
        self._valkey.start()
        self._valkey_watch = asyncio.create_task(self._valkey.watch())
        self._redis_url = self._valkey.url

    def _check_port(self, host: str, port: int, option: str) -> None:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                why = f"cannot listen on {host}:{port}: {error.strerror}; choose another port with {option}"
                raise CannotStart(why) from error

    def _fleet_document(self, secret: FleetSecret) -> FleetDocument:
        return FleetDocument(version=__version__, check=secret.check_value(), settings=self._settings)

    def _mailbox(self, name: str) -> str:
        """Where a process that other machines write to reads: on the network only in a fleet."""
        fleet = self.options.fleet
        return f"ipc://{self.state.run}/{name}.ipc" if fleet is None else f"tcp://{fleet.host}:0"

    def _died(self, name: str) -> None:
        process, _, index = name.partition("-")
        if process == "front":
            self._burial.died(int(index))

    def _start_controller(self) -> Starter:
        state = self.state
        config = ControllerConfig(
            catalog=str(self.catalog.file),
            redis_url=self._redis_url,
            mailbox=self._mailbox("controller"),
            log_dir=str(state.logs),
            log_level=self.options.log_level,
            decision_log=str(state.decision_log),
            parent_pid=os.getpid(),
            secret_file=None if self._secret_file is None else str(self._secret_file),
            profiles=str(state.profiles),
        )
        return self._configured("controller", "prism.controller.main", config)

    def _front_starter(self, index: int) -> Starter:
        options, state = self.options, self.state
        arguments = {
            "catalog": str(self.catalog.file),
            "state_dir": str(state.root),
            "redis_url": self._redis_url,
            "host": options.host,
            "port": options.port,
            "index": index,
            "log_level": options.log_level,
            "listen": options.fleet.host if options.fleet else None,
            "secret_file": None if self._secret_file is None else str(self._secret_file),
        }

        async def start() -> int:
            client = await self._client()
            return await client.fork(
                "prism.server.worker:main",
                arguments,
                watch_pid=os.getpid(),
                title=f"prism: front-{index}",
                log_file=state.logs / f"front-{index}.out",
                kind="host",
            )

        return start

    # --- readiness ---

    async def _agent_is_up(self, store: Store) -> bool:
        return any(record.node == LOCAL_NODE for record in await store.agents())

    async def _port_answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self.options.host, self.options.port)
        except OSError:
            return False
        writer.close()
        return True

    # --- running and stopping ---

    async def publish_status(self) -> None:
        """Keeps the operators' view of the processes up to date, for ever: at once when one of them ends or starts."""
        async with self._store() as store:
            published: dict[str, object] = {}
            at_s = 0.0
            while True:
                status, now_s = self.status(), time.monotonic()
                if status != published or now_s - at_s >= STATUS_S:
                    with contextlib.suppress(StoreUnavailable):  # a later round says it
                        await store.put_doc(STATUS, signed(status, self.state))
                        published, at_s = status, now_s
                await asyncio.sleep(LOOK_S)

    def status(self) -> dict[str, object]:
        """Version, address and processes, as `prism ps` and `/admin/status` show them."""
        processes = [{"name": c.name, "pid": c.pid, "restarts": max(0, c.restarts)} for c in self.children]
        if self._valkey is not None:
            processes.append({"name": "valkey", "pid": self._valkey.pid or 0, "restarts": self._valkey.restarts})
        return {
            "version": __version__,
            "url": f"http://{self.options.host}:{self.options.port}",
            "pid": os.getpid(),
            "started_s": self._began_s,
            "processes": processes,
            "redis": {"embedded": self._valkey is not None},
        }

    def reload(self) -> None:
        """SIGHUP: the controller reads the catalog again (it also notices by itself)."""
        for child in self.children:
            if child.name == "controller":
                child.send(signal.SIGHUP)

    async def stop(self) -> None:
        """Front doors first (running requests may finish), then the others; when it returns no process is left."""
        drain_s = self.catalog.server.drain_timeout_s + STOP_S
        await asyncio.gather(*(front.stop(drain_s) for front in self._fronts))
        await self._burial.close()
        await self._stop("controller", "agent", "zygote", timeout_s=STOP_S)
        if self._valkey is not None:
            await asyncio.to_thread(self._valkey.stop)
        if self._valkey_watch is not None:
            self._valkey_watch.cancel()
        self._release()
