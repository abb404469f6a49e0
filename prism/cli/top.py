"""``prism top``"""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Group
from rich.table import Table

from prism.cli import output
from prism.cli.client import AdminClient, server_options
from prism.cli.ps import COLUMNS, is_live, model_rows

BAR_CELLS = 24


@click.command()
@click.option("--interval", "interval_s", default=2.0, show_default=True, help="Seconds between two looks.")
@click.option("--once", is_flag=True, help="Print one look and stop.")
@output.json_option
@server_options
def command(client: AdminClient, interval_s: float, once: bool, as_json: bool) -> None:
    """Watch devices and loaded models until Ctrl-C. With --json: one line of JSON per look."""
    if once or as_json:
        _plain(client, interval_s, once, as_json)
        return
    from rich.live import Live

    try:
        with Live(screen_of(look(client)), console=output.console(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(screen_of(look(client)), refresh=True)
    except KeyboardInterrupt:
        return


def look(client: AdminClient) -> dict[str, Any]:
    """Devices and models at one time."""
    models = [model for model in client.get("models")["models"] if is_live(model)]
    return {"at_s": time.time(), "devices": client.get("devices")["devices"], "models": models}


def screen_of(seen: dict[str, Any]) -> Group:
    """What is shown of one look."""
    rows = [row for model in seen["models"] for row in model_rows(model)]
    return Group(devices_table(seen["devices"]), "", output.table(COLUMNS, rows))


def devices_table(devices: list[dict[str, Any]]) -> Table:
    """One row per device with its memory as a bar: ``#`` weights, ``+`` KV."""
    rows = [
        (
            device["id"] + condition(device),
            memory_bar(device),
            output.size(device["capacity_bytes"] - device["free_bytes"]),
            output.size(device["capacity_bytes"]),
            " ".join(f"{count} {state}" for state, count in (device.get("engines") or {}).items() if count),
        )
        for device in devices
    ]
    return output.table(("DEVICE", "MEMORY (# weights, + KV)", "USED>", "CAP>", "ENGINES?1"), rows)


def condition(device: dict[str, Any]) -> str:
    """Why it takes no new work; nothing where it does."""
    if device.get("fault"):
        return f" (out of service: {device['fault']})"
    return " (draining)" if device.get("draining") else ""


def memory_bar(device: dict[str, Any], cells: int = BAR_CELLS) -> str:
    """A bar of ``cells`` characters; any use at all shows."""
    capacity = max(device["capacity_bytes"], 1)
    weights = min(-(-cells * device.get("weight_bytes", 0) // capacity), cells)
    kv = min(-(-cells * device.get("kv_bytes", 0) // capacity), cells - weights)
    return f"{'#' * weights}{'+' * kv}{'.' * (cells - weights - kv)}"


def _plain(client: AdminClient, interval_s: float, once: bool, as_json: bool) -> None:
    import json

    while True:
        seen = look(client)
        if as_json:
            click.echo(json.dumps(seen, default=str))
        else:
            output.show(screen_of(seen))
        if once:
            return
        time.sleep(interval_s)
