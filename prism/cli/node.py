"""``prism-node``: let a fleet use this machine's devices."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path
from typing import Final

import click

from prism.cli.fleet import own_address, program, run, state_dir_option, telling
from prism.config.state import StateDir
from prism.core.ids import local_name
from prism.obs.logs import LEVELS, setup_logging
from prism.obs.metrics import prepare_directory
from prism.wire.secret import ENVIRONMENT, make_secret, read_secret

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def _name(context: click.Context, option: click.Parameter, value: str | None) -> str:
    name = value or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    if not _NAME.fullmatch(name) or name == "local":
        raise click.BadParameter(f"{name!r} is no name for a machine; letters, digits, dots and dashes, not 'local'")
    return name


@click.command("node")
@click.option("--redis-url", required=True, help="The fleet's store: redis://ADDRESS:6380 for prism-serve --fleet.")
@click.option(
    "--secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The fleet's secret (fleet.secret in the state directory of prism-serve).  [default: ${ENVIRONMENT}]",
)
@click.option(
    "--listen",
    default="127.0.0.1",
    show_default=True,
    callback=own_address,
    help="Address of this machine that the others reach.",
)
@click.option("--name", callback=_name, help="Name of this machine in the fleet.  [default: its host name]")
@click.option(
    "--device",
    "devices",
    multiple=True,
    help="A device to give: cuda:N, cuda:N=SIZE, or host:N=SIZE for host memory. Once per device.  [default: all GPUs]",
)
@state_dir_option("Sockets, packed weights and logs.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Port for Prometheus to read.  [default: none]")
@click.option("--log-level", type=click.Choice(list(LEVELS)), default="info", show_default=True)
def command(
    redis_url: str,
    secret_file: Path | None,
    listen: str,
    name: str,
    devices: tuple[str, ...],
    state_dir: Path,
    metrics_port: int | None,
    log_level: str,
) -> None:
    """Let the fleet of a running prism-serve use the devices of this machine.

    SIGTERM or Ctrl-C: this machine's models and requests go elsewhere, then it leaves. Models need not be here: weights
    come from the memory of other machines.
    """
    state = StateDir.at(state_dir)
    state.create()
    secret = read_secret(secret_file)
    lock = state.take()  # before anything is written that a running machine has there
    if secret_file is None:  # its processes read it from a file
        secret_file = state.fleet_secret_file
        secret_file.unlink(missing_ok=True)
        make_secret(secret_file, secret.text)
    os.environ.update(prepare_directory(state.run / "metrics"))
    os.environ.pop(ENVIRONMENT, None)
    setup_logging("node", log_level, state.logs / "node.jsonl")
    from prism.supervisor.node import NodeMachine, NodeOptions  # after the metrics' environment is set

    options = NodeOptions(
        redis_url, secret, secret_file.absolute(), listen, name, devices, state, log_level, metrics_port
    )
    say = telling()
    machine = NodeMachine(options, say)

    async def ready() -> None:
        names = ", ".join(f"{local_name(d.id)} ({d.memory_bytes / 2**20:.0f} MiB)" for d in machine.devices)
        click.echo(f"\n{name} is part of the fleet with {names}. Logs: {state.logs}\n")

    with lock:
        asyncio.run(run(machine, say, ready, "models and requests go elsewhere"))


def main() -> None:
    """The ``prism-node`` script."""
    program(command, "prism-node")


if __name__ == "__main__":
    main()
