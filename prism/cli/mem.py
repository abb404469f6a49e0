"""``prism mem``"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from prism import memory
from prism.cli import output
from prism.config.state import DEFAULT_STATE_DIR, StateDir
from prism.kv.host_pool import HostPool
from prism.kv.lent_shelf import borrower_of, is_long_borrower
from prism.kv.pool_directory import host_pool_directory
from prism.kv.settings import read_kv_settings
from prism.memory.errors import AccountMismatch

SUFFIX = ".account"
REFRESH_S = 0.5
COLUMNS = (
    "OWNER", "PID>", "FLOOR>?3", "LIMIT>?7", "WEIGHTS>", "KV>", "STAGING>?2", "OUTSIDE>", "LENT>?10", "MAPPED>",
    "IN USE>?8",
    "AHEAD>?5", "SPARE>?4", "DEFERRED>?6", "WANTS>?9", "VIRTUAL>?1",
)  # fmt: skip


@click.command()
@click.argument("devices", nargs=-1)
@click.option(
    "--state-dir",
    envvar="PRISM_STATE_DIR",
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="State of the server (or prism-node) whose devices are shown.",
)
@click.option(
    "--accounts",
    envvar="PRISM_ACCOUNT_DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of the accounts, for programs that use prism.memory by themselves.",
)
@click.option("--watch", is_flag=True, help="Show it live until interrupted.")
@click.option("--audit", is_flag=True, help="Compare the books with the kernel or the driver; exit 1 if they differ.")
@output.json_option
def command(
    devices: tuple[str, ...], state_dir: str, accounts: Path | None, watch: bool, audit: bool, as_json: bool
) -> None:
    """Show who holds the memory of every device (or of DEVICES, as host:0): owners, classes, limits, page states.

    MAPPED is physical memory with an address, IN USE the part that holds tokens or weights, AHEAD mapped without use,
    SPARE physical without an address, DEFERRED waits for work in flight; WANTS is what an owner waits for. OUTSIDE is
    what its process takes of a GPU beside all that: the driver's context, torch, graphs. LENT is KV of an engine of
    another device. The last lines are the machine's pool of KV in host memory, and by model what prompts that are
    larger than their device have outside of it.
    """
    directory = accounts or StateDir.at(state_dir).accounts
    if watch:
        show_live(directory, devices)
        return
    opened = list(open_all(directory, devices))
    audits = [device.audit() for device in opened] if audit else []
    books = [a.books for a in audits] if audit else [device.stats() for device in opened]
    problems = {device.name: a.problems for device, a in zip(opened, audits, strict=False)}
    if as_json:
        output.print_json([as_data(device.name, s, problems) for device, s in zip(opened, books, strict=True)])
    elif not opened:
        click.echo(f"no accounts in {directory}; is a server running? (--state-dir says where its state is)")
    else:
        shown = [render(device.name, s) for device, s in zip(opened, books, strict=True)]
        output.console().print(Group(*(part for parts in shown for part in parts)))
        click.echo(pool_line(directory))
        for line in long_lines(directory, books):
            click.echo(line)
        for name, found in problems.items():
            click.echo(f"{name}: " + ("; ".join(found) if found else "the books agree with the device"))
    if any(problems.values()):
        raise SystemExit(1)


def open_all(directory: Path, devices: tuple[str, ...]) -> Iterator[memory.Device]:
    """Devices with an account in the directory, by name; named ones must have one."""
    found = sorted(path.name.removesuffix(SUFFIX).replace("-", ":") for path in directory.glob(f"*{SUFFIX}"))
    for name in devices or found:
        if name not in found:
            raise click.UsageError(f"{name} has no account in {directory}; choices: {', '.join(found) or 'none'}")
        try:
            device = memory.open_device(name, account_dir=directory)
        except AccountMismatch:
            if devices:
                raise
            continue  # not asked for by name: it may be just coming into being
        yield device


def show_live(directory: Path, devices: tuple[str, ...]) -> None:
    """Refresh until interrupted."""
    with suppress(KeyboardInterrupt), Live(console=output.console(), screen=False, auto_refresh=False) as live:
        while True:
            parts = [part for d in open_all(directory, devices) for part in render(d.name, d.stats())]
            live.update(Group(*parts) if parts else Text(f"no accounts in {directory}"), refresh=True)
            time.sleep(REFRESH_S)


def render(name: str, stats: memory.DeviceStats) -> list[RenderableType]:
    """A headline and the table of owners."""
    size = output.size
    head = f"{name}  {size(stats.capacity_bytes)}, {size(max(0, stats.free_bytes))} free"
    if stats.foreign_bytes:
        head += f", {size(stats.foreign_bytes)} held by other programs"
    if stats.free_bytes < 0:
        head += f", overdrawn by {size(-stats.free_bytes)}"
    if stats.wanted_bytes:
        head += f", {size(stats.wanted_bytes)} waited for"
    if stats.reaped_owners:
        head += f"; {stats.reaped_owners} dead owners reaped, {stats.recoveries} locks taken over"
    if stats.lend_keep_bytes is not None:
        head += f", lends what is free beyond {size(stats.lend_keep_bytes)}"
    rows = [row(owner) for owner in stats.owners]
    return [Text(head, style="bold"), output.table(COLUMNS, rows) if rows else Text("no owners")]


def row(o: memory.OwnerStats) -> tuple[str, ...]:
    """One owner's line."""
    sizes = (
        o.weights_bytes, o.kv_bytes, o.staging_bytes, o.outside_bytes, o.lent_bytes, o.mapped_bytes, o.used_bytes,
        o.ahead_bytes, o.spare_bytes, o.deferred_bytes, o.wanted_bytes, o.virtual_bytes,
    )  # fmt: skip
    limit = "-" if o.limit_bytes is None else output.size(o.limit_bytes)
    return (o.name, str(o.pid), output.size(o.floor_bytes), limit, *map(output.size, sizes))


def pool_line(accounts: Path) -> str:
    """What the machine keeps of KV in host memory."""
    bound_bytes = read_kv_settings(accounts).host_bytes
    folder = host_pool_directory(accounts)
    if bound_bytes == 0 or not folder.is_dir():
        return "KV in host memory: none is kept"
    use = HostPool(folder, bound_bytes).use()
    return f"KV in host memory: {output.size(use.file_bytes)} of {output.size(bound_bytes)} in {use.pieces} pieces"


def long_lines(accounts: Path, books: Iterable[memory.DeviceStats]) -> list[str]:
    """KV of prompts that are larger than their device, by model and where it is."""
    bound_bytes, folder = read_kv_settings(accounts).host_bytes, host_pool_directory(accounts)
    host = HostPool(folder, bound_bytes).claims() if bound_bytes and folder.is_dir() else {}
    lent: Counter[str] = Counter()
    for owner in (owner for stats in books for owner in stats.owners):
        if owner.lent_bytes and is_long_borrower(owner.name):
            lent[borrower_of(owner.name)] += owner.lent_bytes
    size = output.size
    models = sorted(host.keys() | lent.keys())
    places = {model: f"{size(host.get(model, 0))} in host memory, {size(lent[model])} lent" for model in models}
    return [f"prompts of {model} larger than their device: {where}" for model, where in places.items()]


def as_data(name: str, stats: memory.DeviceStats, problems: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """For ``--json``."""
    data: dict[str, Any] = {"device": name, **dataclasses.asdict(stats)}
    if name in problems:
        data["problems"] = list(problems[name])
    return data
