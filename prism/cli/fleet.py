"""What the programs of a fleet's machines have in common on the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import click

from prism.config.addresses import FleetAddress, check_reachable, parse_fleet_address
from prism.config.state import DEFAULT_STATE_DIR
from prism.core.errors import PrismError

C = TypeVar("C", bound=Callable[..., object])


def state_dir_option(holds: str) -> Callable[[C], C]:
    """``--state-dir`` of a program that keeps its own state; ``holds`` says what lies there."""
    return click.option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=DEFAULT_STATE_DIR,
        show_default=True,
        help=holds,
    )


def fleet_address(context: click.Context, option: click.Parameter, value: str | None) -> FleetAddress | None:
    """Click callback of ``--fleet``."""
    try:
        return None if value is None else parse_fleet_address(value)
    except PrismError as error:
        raise click.BadParameter(str(error)) from error


def own_address(context: click.Context, option: click.Parameter, value: str) -> str:
    """Click callback of ``--listen``."""
    try:
        return check_reachable("--listen", value)
    except PrismError as error:
        raise click.BadParameter(str(error)) from error


class Service(Protocol):
    """What runs until it is told to stop."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


async def run(
    machine: Service, say: Callable[[str], None], ready: Callable[[], Awaitable[None]], stopping: str
) -> None:
    """Starts ``machine``, awaits ``ready()`` (cancelled at the end) and stops it on SIGTERM or Ctrl-C; the second one
    ends this process at once, and with it all others."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting, stopped = loop.create_task(machine.start()), loop.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            say("ready")
            meanwhile = asyncio.ensure_future(ready())
            await stopped
            meanwhile.cancel()
            say(f"stopping: {stopping} (again Ctrl-C to stop at once)")
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lambda: os._exit(1))
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await machine.stop()
        say("stopped")


def telling() -> Callable[[str], None]:
    """Prints what happens, with the seconds since now."""
    began_s = time.time()
    return lambda text: click.echo(f"[{time.time() - began_s:5.1f} s] {text}")


def program(command: click.Command, name: str) -> None:
    """Runs ``command`` as a program of its own: errors that Prism raises on purpose become a message."""
    try:
        command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except click.exceptions.Abort:
        raise SystemExit(130) from None
    except (PrismError, TimeoutError) as error:
        click.echo(f"{name}: {error}", err=True)
        raise SystemExit(1) from None
