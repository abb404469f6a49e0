"""The processes of a machine that joins a fleet: a zygote and a node agent (``prism-node``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from prism import __version__
from prism.config.devices import parse_devices
from prism.config.state import StateDir
from prism.core.ids import NodeId
from prism.memory.gpus import gpus_if_any
from prism.obs.metrics import expose
from prism.store.connect import REACH_S, open_store
from prism.store.interface import Store
from prism.store.values import AgentRecord, StoreRefused, StoreUnavailable
from prism.supervisor.base import CannotStart, Supervisor
from prism.supervisor.fleet import DOCUMENT, FleetDocument, FleetSettings, decode
from prism.wire.message import PROTOCOL_VERSION
from prism.wire.secret import FleetSecret, with_password, without_password

SAME_NAME_S: Final = 12.0
"""A machine of the same name that was heard of within this time is running."""
LEAVE_S: Final = 90.0
"""Longest time for models and requests to go elsewhere."""
STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What the command line decides."""

    redis_url: str
    secret: FleetSecret
    secret_file: Path
    listen: str
    name: str
    devices: tuple[str, ...]
    state: StateDir
    log_level: str
    metrics_port: int | None = None


class NodeMachine(Supervisor):
    """Joins (:meth:`start`), keeps its processes running, leaves (:meth:`stop`)."""

    def __init__(self, options: NodeOptions, say: Callable[[str], None]) -> None:
        self.node = NodeId(options.name)
        url = with_password(options.redis_url, options.secret)
        gpus = gpus_if_any()
        devices = parse_devices(options.devices, self.node, gpus.memory_bytes, gpus.refused)
        super().__init__(options.state, devices, url, options.secret_file, options.log_level, say)
        self.options = options
        self._hide_metrics: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Returns when the fleet can use the devices. Raises :class:`CannotStart`."""
        if self.options.metrics_port is not None:
            try:
                self._hide_metrics = expose(self.options.listen, self.options.metrics_port)
            except OSError as error:
                raise CannotStart(f"--metrics-port {self.options.metrics_port}: {error.strerror}") from error
        self._say(f"asking {without_password(self._redis_url)}")
        fleet = await self._join()
        self.devices = fleet.paced(self.devices)
        self._say("warming up SGLang (imports, about 20 s on two cores)")
        self._add("zygote", self._start_zygote(fleet.standby))
        await self._warm()
        self._say(f"starting {len(self.devices)} devices")
        began_s = time.time()
        address = f"tcp://{self.options.listen}:0"
        weights = f"{self.options.listen}:0"
        self._add("agent", self._start_agent(self.node, address, fleet, weights, leaves=True))
        async with self._store() as store:
            await self._until(lambda: self._announced(store, began_s), "the node agent")

    async def stop(self) -> None:
        """The agent lets its models and requests go elsewhere; when this returns no process is left."""
        await self._stop("agent", timeout_s=LEAVE_S)
        await self._stop("zygote", timeout_s=STOP_S)
        self._hide_metrics()
        self._release()

    async def _join(self) -> FleetSettings:
        """The fleet's settings, once it is sure that this machine belongs to it."""
        shown = without_password(self._redis_url)
        store = open_store(self._redis_url, retry_s=REACH_S)
        try:
            text = await store.doc(DOCUMENT)
            await self._check_password()
            if text is None:
                raise CannotStart(f"{shown} is not the store of a fleet; start prism-serve with --fleet ADDRESS")
            document = _decoded(text, shown)
            if document.check != self.options.secret.check_value():
                raise CannotStart(
                    f"the secret is not that of the fleet at {shown}; take the fleet.secret of its server"
                )
            await self._check_name(store)
            return document.settings
        except StoreRefused as error:
            raise CannotStart(
                f"{error}. Without a password in the URL the one derived from the secret is used: either the secret is "
                "not this fleet's, or the store has a password of its own (redis://:PASSWORD@HOST:PORT)"
            ) from error
        except StoreUnavailable as error:
            raise CannotStart(str(error)) from error
        finally:
            await store.aclose()

    async def _check_name(self, store: Store) -> None:
        for record in await store.agents():
            if record.node != self.node or time.time() - record.seen_s > SAME_NAME_S:
                continue
            if record.detail.get("state_dir") == str(self.state.root):
                continue  # it was this one; whoever holds the state directory may take its place
            raise CannotStart(f"a machine called {self.node} is in the fleet already; choose another --name")

    async def _announced(self, store: Store, began_s: float) -> bool:
        return any(_is_new(record, self.node, began_s) for record in await store.agents())


def _is_new(record: AgentRecord, node: NodeId, began_s: float) -> bool:
    return record.node == node and record.seen_s >= began_s


def _decoded(text: str, shown: str) -> FleetDocument:
    try:
        document = decode(text)
    except msgspec.MsgspecError as error:
        raise CannotStart(f"the fleet at {shown} runs another version of Prism ({error})") from error
    if document.version != __version__ or document.protocol != PROTOCOL_VERSION:
        theirs = f"Prism {document.version} (messages of version {document.protocol})"
        ours = f"{__version__} (messages of version {PROTOCOL_VERSION})"
        raise CannotStart(f"the fleet at {shown} runs {theirs}, this is {ours}; install the fleet's version here")
    return document
