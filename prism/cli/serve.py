"""``prism-serve``: serve a catalog of models on this machine's devices."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from prism.cli.fleet import fleet_address, program, run, state_dir_option, telling
from prism.config.addresses import FleetAddress
from prism.config.catalog import Catalog, load_catalog
from prism.config.state import StateDir
from prism.core.ids import local_name
from prism.core.specs import DeviceKind, DeviceSpec
from prism.obs.foreign import PROMPTS_ENV
from prism.obs.kernel import AUTOGROUPS_REMEDY, has_autogroups
from prism.obs.logs import LEVELS, setup_logging
from prism.obs.metrics import prepare_directory
from prism.wire.secret import without_password

MOST_FILES: Final = 1_048_576
"""Some systems allow a thousand times more, and some programs walk over all of them."""


@click.command("serve")
@click.argument("catalog", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--host", help="Address to listen on.  [default: the catalog's, 127.0.0.1]")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on.  [default: the catalog's, 8000]")
@state_dir_option("Queues, sockets, packed weights and logs.")
@click.option("--redis-url", help="Redis or Valkey to use (redis://... or unix://...).  [default: an embedded one]")
@click.option("--log-level", type=click.Choice(list(LEVELS)), help="Least level logged.  [default: the catalog's]")
@click.option("--front-workers", type=click.IntRange(1, 64), help="HTTP worker processes.  [default: the catalog's]")
@click.option(
    "--fleet",
    callback=fleet_address,
    metavar="ADDRESS[:PORT]",
    help="Let other machines join (prism-node): the address of this one that they reach; PORT is the embedded "
    "store's, 6380 unless given.",
)
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The fleet's secret.  [default: fleet.secret in the state directory, made when there is none]",
)
def command(catalog: Path, state_dir: Path, **given: Any) -> None:
    """Serve the models of CATALOG (YAML) through the OpenAI API.

    Stops cleanly on SIGTERM or Ctrl-C; SIGHUP, or saving the file, applies changes of the catalog.
    """
    loaded = load_catalog(catalog)
    state = StateDir.at(state_dir)
    state.create()
    level = given["log_level"] or loaded.log.level
    _raise_file_limit()
    with state.take():  # before anything is written that a running server has there
        state.admin_key()  # who is told that it is ready finds it
        os.environ.update(prepare_directory(state.run / "metrics"))
        os.environ[PROMPTS_ENV] = str(int(loaded.log.prompts))
        setup_logging("serve", level, state.logs / "serve.jsonl", max_bytes=int(loaded.log.max_bytes))
        asyncio.run(_serve(loaded, state, level, given))


async def _serve(catalog: Catalog, state: StateDir, level: str, given: dict[str, Any]) -> None:
    from prism.supervisor.machine import Machine, Options  # after the metrics' environment is set

    options = Options(
        host=given["host"] or catalog.server.host,
        port=given["port"] or catalog.server.port,
        state=state,
        redis_url=given["redis_url"] or catalog.server.redis_url,
        log_level=level,
        front_workers=given["front_workers"] or catalog.server.front_workers,
        secret_file=given["secret_file"] or state.fleet_secret_file,
        fleet=given["fleet"],
    )
    say = telling()
    machine = Machine(catalog, options, say)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, machine.reload)

    async def ready() -> None:
        url = f"http://{options.host}:{options.port}"
        state.write_server(url, catalog.file, time.time())
        _welcome(machine.devices, catalog, url, state)
        if options.fleet is not None:
            _invite(options.fleet, options.redis_url, options.secret_file)
        await machine.publish_status()

    try:
        await run(machine, say, ready, "running requests may finish")
    finally:
        state.withdraw_server()


def _raise_file_limit() -> None:
    """As many open files as this user may have: each client is one. Processes started later inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _welcome(devices: Sequence[DeviceSpec], catalog: Catalog, url: str, state: StateDir) -> None:
    names = ", ".join(f"{local_name(d.id)} ({d.memory_bytes / 2**20:.0f} MiB)" for d in devices)
    model = catalog.models[0].name if catalog.models else "MODEL"
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 32}}'
    click.echo(
        f"""
Prism answers at {url}/v1 with {len(catalog.models)} models on {names}. Try:

  curl {url}/v1/models
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
  prism ps          which models are loaded, where, and how they do
  prism top         the same, live

Logs: {state.logs}
"""
    )
    if has_autogroups() and any(d.kind is DeviceKind.HOST for d in devices):
        click.echo(f"The kernel groups processes by session: {AUTOGROUPS_REMEDY} (docs/runbook.md)\n", err=True)


def _invite(fleet: FleetAddress, redis_url: str | None, secret_file: Path) -> None:
    url = without_password(redis_url) if redis_url else f"redis://{fleet.host}:{fleet.port}"
    click.echo(
        f"""Other machines join with this one's {secret_file} and:

  prism-node --redis-url {url} --secret-file fleet.secret --listen THEIR_ADDRESS
"""
    )


def main() -> None:
    """The ``prism-serve`` script."""
    program(command, "prism-serve")
