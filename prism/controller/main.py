"""Entry point of the controller: ``python -m prism.controller.main CONFIG.json`` (written by ``prism-serve``)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from prism.config.catalog import load_catalog
from prism.controller.controller import Controller
from prism.controller.models import KnownModels
from prism.core.errors import PrismError
from prism.engine.process import die_with_parent
from prism.obs.decisions import DecisionLog
from prism.obs.logs import setup_logging
from prism.obs.metrics import Metrics
from prism.scheduler import cluster_scheduler
from prism.store.connect import open_store
from prism.wire.mailbox import Inbox
from prism.wire.secret import read_secret


class ControllerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller needs to know."""

    catalog: str
    redis_url: str
    mailbox: str
    log_dir: str
    log_level: str
    decision_log: str
    parent_pid: int
    """The process that started this one; the controller ends with it."""
    secret_file: str | None = None
    """The fleet's secret; None: there are no other machines."""
    profiles: str = ""
    """File of profiles from which schedulers start; "": none."""


async def serve(config: ControllerConfig) -> None:
    """Runs the controller until SIGTERM or SIGINT; SIGHUP reads the catalog again."""
    models = KnownModels(load_catalog(Path(config.catalog)), Path(config.profiles) if config.profiles else None)
    live = models.catalog.live_scaling
    settings = replace(models.catalog.policy.settings().cluster, live=live.mode, live_hop_s=float(live.hop_s))
    scheduler = cluster_scheduler(settings, [], first_generation=int(time.time()), takes_over=True)
    metrics = Metrics()
    decisions = DecisionLog(Path(config.decision_log), metrics)
    store = open_store(config.redis_url)
    loop = asyncio.get_running_loop()
    keys = None if config.secret_file is None else read_secret(Path(config.secret_file)).mail_keys()
    with Inbox(config.mailbox, keys=keys) as inbox:
        topology = models.catalog.topology.known()
        controller = Controller(models, scheduler, store, inbox, decisions, metrics, topology)
        task = loop.create_task(controller.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, task.cancel)
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(_reload(controller)))
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            decisions.close()
            await store.aclose()


async def _reload(controller: Controller) -> None:
    with contextlib.suppress(PrismError):  # logged by the controller; the old catalog stays
        await controller.admin.reload()


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ControllerConfig)
    die_with_parent(config.parent_pid)
    setup_logging("controller", config.log_level, Path(config.log_dir) / "controller.jsonl", console=None)
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
