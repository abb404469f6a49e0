"""``prism store``: the packed weights of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options
from prism.cli.errors import CliError
from prism.config.state import DEFAULT_STATE_DIR, StateDir
from prism.weights.errors import BadPack
from prism.weights.packs.format import PackKey
from prism.weights.store.weight_store import PackInfo, WeightStore
from prism.weights.store.whereabouts import Tier

state_dir_option = click.option("--state-dir", envvar="PRISM_STATE_DIR", default=DEFAULT_STATE_DIR, show_default=True)


@click.group()
def command() -> None:
    """Look at the store of packed weights: what is there, whether it is intact, and remove it."""


@command.command("ls")
@state_dir_option
@output.json_option
def list_packs(state_dir: str, as_json: bool) -> None:
    """List the packs on disk and in host memory."""
    store = _store(state_dir)
    rows = [_row(store, info) for info in store.ls()]
    if as_json:
        output.print_json(rows)
        return
    columns = ("MODEL", "FINGERPRINT", "LAYOUT?3", "TIER", "SIZE>", "BLOCKS>?2", "USED?4", "IN USE", "BYTES ARE IN?1")
    cells = (
        [
            str(r["model"]),
            str(r["fingerprint"])[:12],
            str(r["layout"]),
            str(r["tier"]),
            output.size(r["bytes"]),
            str(r["blocks"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(r["used_s"])))),
            "yes" if r["in_use"] else "",
            str(r["refers_to"]),
        ]
        for r in rows
    )
    output.print_table(columns, cells, f"no packs in {store.directory}")


@command.command("pool")
@output.json_option
@server_options
def show_pool(client: AdminClient, as_json: bool) -> None:
    """Show the fleet's parameter pool: which machine answers for each pack, who has copies, and what that takes."""
    pool = client.get("pool")
    if as_json:
        output.print_json(pool)
        return
    rows = [
        (
            entry["model"],
            entry["fingerprint"][:12],
            entry["layout"],
            output.size(entry["bytes"]),
            entry["home"] or "no room",
            str(len(entry["copies"])),
            ", ".join(entry["copies"]) or "none",
        )
        for entry in pool["entries"]
    ]
    columns = ("MODEL", "FINGERPRINT", "LAYOUT?2", "SIZE>", "HOME", "COPIES>", "IN MEMORY OF")
    output.print_table(columns, rows, "no machine of the fleet has packed weights")
    for machine in pool["machines"]:
        kept, held = output.size(machine["pool_bytes"]), output.size(machine["host_bytes"])
        click.echo(f"{machine['node']}: {held} of weights in memory, {kept} kept for the fleet")
    once, held_bytes = sum(e["bytes"] for e in pool["entries"]), sum(m["host_bytes"] for m in pool["machines"])
    if once:
        click.echo(f"fleet: {output.size(held_bytes)} in memory, {held_bytes / once:.2f} copies per byte of weights")


@command.command("verify")
@click.argument("packs", nargs=-1, metavar="[FINGERPRINT...]")
@state_dir_option
@output.json_option
def verify(packs: tuple[str, ...], state_dir: str, as_json: bool) -> None:
    """Read packs on disk and check every checksum (all of them without arguments). Exit code 1 if one is broken."""
    store = _store(state_dir)
    problems: dict[str, list[str]] = {}
    for key in _chosen(store, packs):
        try:
            found = [str(error) for error in store.verify(key)]
        except BadPack as error:
            found = [str(error)]
        problems[f"{key.model}/{key.layout}"] = found
    if as_json:
        output.print_json(problems)
    else:
        for name, found in problems.items():
            click.echo(f"{name}: {'intact' if not found else ''}")
            for problem in found:
                click.echo(f"  {problem}")
    broken = sum(1 for found in problems.values() if found)
    if broken:
        raise CliError(
            f"{broken} of {len(problems)} packs are broken; remove them with `prism store rm` and pack again"
        )


@command.command("rm")
@click.argument("packs", nargs=-1, required=True, metavar="FINGERPRINT...")
@click.option("--tier", type=click.Choice(["host", "disk"]), help="Only here.  [default: everywhere]")
@state_dir_option
def remove(packs: tuple[str, ...], tier: str | None, state_dir: str) -> None:
    """Remove packs; processes that are using one keep it until they are done."""
    store = _store(state_dir)
    tiers = (Tier(tier),) if tier else (Tier.HOST, Tier.DISK)
    for key in _chosen(store, packs):
        click.echo(f"{key.model}/{key.layout}: {output.size(store.rm(key, tiers))} freed")


def _store(state_dir: str) -> WeightStore:
    folder = StateDir.at(state_dir).store
    if not folder.is_dir():
        raise CliError(f"there is no store in {folder}; --state-dir says where a server keeps its state")
    return WeightStore(folder)


def _chosen(store: WeightStore, wanted: tuple[str, ...]) -> list[PackKey]:
    """Keys whose fingerprint begins with one of ``wanted``; all keys for none."""
    keys = sorted({info.key for info in store.ls()})
    if not wanted:
        return keys
    for prefix in wanted:
        if not any(key.model.startswith(prefix) for key in keys):
            have = ", ".join(sorted({key.model[:12] for key in keys})) or "none"
            raise CliError(f"no pack has a fingerprint that begins with {prefix!r}; choices: {have}")
    return [key for key in keys if key.model.startswith(wanted)]


def _row(store: WeightStore, info: PackInfo) -> dict[str, object]:
    refers_to: Path | None = None
    try:
        header = store.header(info.key)
        if info.tier is Tier.DISK:
            refers_to = store.refers_to(info.key)
    except BadPack:
        header = None
    return {
        "model": header.label if header else "(broken)",
        "fingerprint": info.key.model,
        "layout": info.key.layout,
        "tier": info.tier.value,
        "bytes": info.nbytes,
        "blocks": len(header.blocks) if header else 0,
        "used_s": info.used_s,
        "in_use": info.in_use,
        "refers_to": str(refers_to or ""),
    }
