"""What ``prism-serve`` and ``prism-node`` have in common: one state directory, a zygote, an agent, and processes that
are started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from prism import __version__
from prism.config.state import StateDir
from prism.core.errors import PrismError
from prism.core.ids import NodeId
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.zygote_client import ZygoteClient, another, promote
from prism.kv.pool_directory import drop_host_pool
from prism.kv.settings import write_kv_settings
from prism.node.main import NodeConfig
from prism.obs import names
from prism.obs.metrics import Metrics
from prism.store.connect import lets_everybody_in, open_store
from prism.store.interface import Store
from prism.supervisor.children import Child, Starter, python_module
from prism.supervisor.fleet import FleetSettings
from prism.weights.store.budget import write_budget
from prism.weights.store.shared_memory import drop_shared
from prism.wire.secret import without_password

WARM_UP_S: Final = 300.0
WARM_ZYGOTE: Final = "PRISM_WARM_ZYGOTE"
"""Names the socket of a zygote from which that of a server on virtual devices is forked instead of started: SGLang is
imported once for many servers. For tests: what it imported is the code of when it started."""
READY_S: Final = 120.0


class CannotStart(PrismError):
    """It cannot start; the message says what to do about it."""


class Supervisor:
    """The processes of one state directory, which the caller holds (:meth:`StateDir.take`). ``say`` hears of each step
    of the start."""

    def __init__(
        self,
        state: StateDir,
        devices: tuple[DeviceSpec, ...],
        redis_url: str,
        secret_file: Path | None,
        log_level: str,
        say: Callable[[str], None],
    ) -> None:
        self.state, self.devices, self._say = state, devices, say
        self.children: list[Child] = []
        self._redis_url, self._secret_file, self._log_level = redis_url, secret_file, log_level
        self._zygote: ZygoteClient | None = None
        self._began_s = time.time()
        self._metrics = Metrics()
        self._metrics.set(names.INFO, 1, version=__version__)

    def _release(self) -> None:
        """At the end of a clean stop: host memory goes back (packs stay on disk). After a crash the copies stay, and
        the next start uses them."""
        drop_shared(self.state.store)
        drop_host_pool(self.state.accounts)

    # --- processes ---

    def _add(self, name: str, start: Starter) -> Child:
        def died() -> None:
            self._metrics.inc(names.RESTARTS, process=name.partition("-")[0])
            self._died(name)

        child = Child(name, start, died)
        child.run()
        self.children.append(child)
        return child

    def _died(self, name: str) -> None:
        """Called when a process ended unasked, before it is started again."""

    def _start_zygote(self, standby: bool) -> Starter:
        """``standby``: whether another one waits, which takes the place of one that died at once."""
        kind = "cuda" if any(d.kind is DeviceKind.CUDA for d in self.devices) else "host"
        arguments = ["--socket", str(self._zygote_socket), "--kind", kind, "--parent-pid", str(os.getpid())]
        waiting = self.state.run / "standby.sock"
        if standby:
            arguments += ["--standby", str(waiting)]
        log_file = self.state.logs / "zygote.out"
        anew = python_module("prism.engine.zygote", arguments, log_file)
        warm = os.environ.get(WARM_ZYGOTE) if kind == "host" else None

        async def start() -> int:
            pid = await promote(waiting, self._zygote_socket) if standby else None
            if pid is None and warm is not None:
                pid = await another(Path(warm), arguments, log_file)
            return pid or await anew()

        return start

    @property
    def _zygote_socket(self) -> Path:
        return self.state.run / "zygote.sock"

    async def _warm(self) -> None:
        """Returns when the zygote is ready. Raises :class:`CannotStart`."""
        zygote = next(c for c in self.children if c.name == "zygote")
        connect = asyncio.create_task(self._client())
        while not connect.done():
            await asyncio.wait([connect], timeout=0.2)
            if zygote.restarts >= 2:
                connect.cancel()
                log = self.state.logs / "zygote.out"
                raise CannotStart(f"SGLang does not start on this machine; see {log} and run `prism doctor`")
        await connect

    async def _client(self) -> ZygoteClient:
        """A connection to the living zygote."""
        if self._zygote is None or not self._zygote.alive:
            client = ZygoteClient(self._zygote_socket)
            await client.connect(WARM_UP_S)
            self._zygote = client
        return self._zygote

    def _start_agent(
        self, node: NodeId, mailbox: str, fleet: FleetSettings, weights: str = "", *, leaves: bool = False
    ) -> Starter:
        """``weights`` and ``leaves``: see :class:`prism.node.main.NodeConfig`."""
        state = self.state
        write_budget(state.store, fleet.weights.budget())
        write_kv_settings(state.accounts, fleet.kv.on_this_machine())
        config = NodeConfig(
            node=node,
            devices=list(self.devices),
            redis_url=self._redis_url,
            mailbox=mailbox,
            run_dir=str(state.run),
            store_dir=str(state.store),
            log_dir=str(state.logs),
            log_level=self._log_level,
            zygote_socket=str(self._zygote_socket),
            engines=fleet.engines,
            settings=fleet.gpu,
            layers_keep_fraction=fleet.layers_keep_fraction,
            parent_pid=os.getpid(),
            secret_file=None if self._secret_file is None else str(self._secret_file),
            weights=weights,
            leaves=leaves,
            state_dir=str(state.root),
        )
        return self._configured("agent", "prism.node.main", config)

    def _configured(self, name: str, module: str, config: msgspec.Struct) -> Starter:
        file = self.state.run / f"{name}.json"
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(config))
        return python_module(module, [str(file)], self.state.logs / f"{name}.out")

    async def _stop(self, *order: str, timeout_s: float) -> None:
        """Ends the processes of these names, one after the other."""
        for name in order:
            for child in self.children:
                if child.name == name:
                    await child.stop(timeout_s)
            if name == "agent" and self._zygote is not None:
                await self._zygote.close()

    # --- readiness ---

    @contextlib.asynccontextmanager
    async def _store(self) -> AsyncIterator[Store]:
        store = open_store(self._redis_url)
        try:
            yield store
        finally:
            await store.aclose()

    async def _check_password(self) -> None:
        """A fleet's store on the network needs a password: whoever can write to it gives orders. Raises
        :class:`CannotStart`."""
        if await lets_everybody_in(self._redis_url):
            raise CannotStart(
                f"{without_password(self._redis_url)} lets everybody in; a fleet's store needs a password (requirepass)"
            )

    async def _until(self, ready: Callable[[], Awaitable[bool]], what: str) -> None:
        give_up_s = time.monotonic() + READY_S
        while not await ready():
            failing = next((c.name for c in self.children if c.restarts >= 3), None)
            if failing:
                raise CannotStart(f"{failing} keeps ending; see {self.state.logs}/{failing}.out")
            if time.monotonic() > give_up_s:
                raise CannotStart(f"{what} is not ready after {READY_S:.0f} s; see the logs in {self.state.logs}")
            await asyncio.sleep(0.05)
