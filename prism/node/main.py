"""Entry point of the node agent: ``python -m prism.node.main CONFIG.json`` (the supervisor writes the file)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from prism import memory
from prism.core.ids import NodeId, kind_and_index, local_name
from prism.core.settings import GpuSettings
from prism.core.specs import DeviceKind, DeviceSpec
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.engine.process import die_with_parent
from prism.kv.opening import open_host_pool
from prism.kv.settings import read_kv_settings
from prism.memory.gpus import read_gpus
from prism.memory.region import GPU_REGION_PAGE_BYTES
from prism.node.agent import AgentMachine, NodeAgent
from prism.node.lending import DeviceLending
from prism.node.weights import NodeWeights
from prism.obs.logs import setup_logging
from prism.obs.metrics import Metrics
from prism.store.connect import open_store
from prism.weights.store.weight_store import WeightStore
from prism.wire.mailbox import Inbox
from prism.wire.secret import FleetSecret, read_secret


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The engine pool's part of the catalog."""

    parked_per_device: int
    max_per_device: int
    start_timeout_s: float
    threads: int
    parked_bytes: int
    """Of a GPU, beside weights and KV: see :class:`prism.engine.options.PoolOptions`."""
    active_bytes: int
    kept_models: int
    load_helpers: int
    overlap: bool | None


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a node agent needs to know."""

    node: str
    devices: list[DeviceSpec]
    redis_url: str
    mailbox: str
    run_dir: str
    store_dir: str
    log_dir: str
    log_level: str
    zygote_socket: str
    engines: EngineSettings
    settings: GpuSettings
    parent_pid: int
    """The process that started this one; the agent ends with it."""
    secret_file: str | None = None
    """The fleet's secret; None: there are no other machines."""
    weights: str = ""
    """``HOST:PORT`` to serve packed weights to other machines at; "": not at all."""
    leaves: bool = False
    """On SIGTERM models and requests go to other machines first. False: what runs is left to the next agent here."""
    state_dir: str = ""
    layers_keep_fraction: float | None = None
    """See :class:`prism.supervisor.fleet.FleetSettings`."""


async def serve(config: NodeConfig) -> None:
    """Runs the agent until SIGTERM or SIGINT."""
    accounts = Path(config.run_dir) / "accounts"
    devices = {d.id: memory.open_device(local_name(d.id), d.memory_bytes, account_dir=accounts) for d in config.devices}
    keep = read_kv_settings(accounts).lend_keep_fraction
    lending = DeviceLending(devices, config.layers_keep_fraction if keep is None else keep)
    on_gpus = any(d.kind is DeviceKind.CUDA for d in config.devices)
    options = PoolOptions(
        run_dir=Path(config.run_dir),
        account_dir=accounts,
        log_dir=Path(config.log_dir),
        zygote_socket=Path(config.zygote_socket),
        parked_per_device=config.engines.parked_per_device,
        max_per_device=config.engines.max_per_device,
        start_timeout_s=config.engines.start_timeout_s,
        threads=config.engines.threads,
        parked_bytes=config.engines.parked_bytes if on_gpus else 0,
        active_bytes=config.engines.active_bytes if on_gpus else 0,
        kept_models=config.engines.kept_models,
        load_helpers=config.engines.load_helpers,
        overlap=config.engines.overlap,
        store_dir=Path(config.store_dir),
        secret_file=None if config.secret_file is None else Path(config.secret_file),
    )
    pool = EnginePool(config.devices, options)
    store = open_store(config.redis_url)
    secret = None if config.secret_file is None else read_secret(Path(config.secret_file))
    with Inbox(config.mailbox, keys=None if secret is None else secret.mail_keys()) as inbox:
        specs = tuple(_as_run(spec, devices[spec.id], options) for spec in config.devices)
        kept_bytes = options.parked_per_device * options.parked_bytes
        watches = {d.id: watch for d in config.devices if (watch := _watch(d, devices[d.id])) is not None}
        machine = AgentMachine(
            NodeId(config.node),
            specs,
            devices,
            {"state_dir": config.state_dir},
            kept_bytes,
            watches,
            lending,
            layers_dir=None if config.layers_keep_fraction is None else Path(config.run_dir),
            kv_pool=open_host_pool(accounts),
        )
        weights = None if secret is None else _weights(config, secret)
        agent = NodeAgent(machine, config.settings, pool, store, inbox, Metrics(), weights)
        task = asyncio.create_task(agent.run())
        ending = _end_on_signal(agent, task, leaves=config.leaves)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
                await asyncio.gather(*ending)
        finally:
            await store.aclose()


def _weights(config: NodeConfig, secret: FleetSecret) -> NodeWeights:
    store, models = WeightStore(Path(config.store_dir)), Path(config.state_dir) / "models"
    pool = open_host_pool(Path(config.run_dir) / "accounts")
    return NodeWeights(config.node, store, bind=config.weights, secret=secret.weights, models_dir=models, kv_pool=pool)


def _end_on_signal(agent: NodeAgent, task: asyncio.Task[None], *, leaves: bool) -> list[asyncio.Task[None]]:
    """SIGTERM and SIGINT end ``task``; the first one after the node has left, if it ``leaves``,
    the second one at once."""
    ending: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    async def leave() -> None:
        try:
            await agent.leave()
        finally:
            task.cancel()

    def end() -> None:
        if not leaves:
            task.cancel()
        elif ending:
            ending[0].cancel()
        else:
            ending.append(loop.create_task(leave()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    return ending


def _as_run(spec: DeviceSpec, device: memory.Device, options: PoolOptions) -> DeviceSpec:
    """``spec`` with what this machine makes of it: pages of its memory, how many engines share it, what each costs."""
    return replace(
        spec,
        page_bytes=device.page_bytes,
        weight_page_bytes=GPU_REGION_PAGE_BYTES if spec.kind is DeviceKind.CUDA else device.page_bytes,
        max_engines=options.max_per_device,
        engine_bytes=options.active_bytes,
    )


def _watch(spec: DeviceSpec, device: memory.Device) -> memory.MemoryWatch | None:
    """Looks at what the driver sees of a GPU; virtual devices have no strangers."""
    if spec.kind is not DeviceKind.CUDA:
        return None
    index = kind_and_index(local_name(spec.id))[1]
    return memory.MemoryWatch(device, memory.NvmlMeter(read_gpus().gpus[index].uuid))


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=NodeConfig)
    die_with_parent(config.parent_pid)
    setup_logging("agent", config.log_level, Path(config.log_dir) / f"agent-{config.node}.jsonl", console=None)
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
