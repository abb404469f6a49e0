"""Instances that serve before their weights are there, live."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from prism.cli import output
from prism.cli.client import AdminClient, model_path
from prism.core.ids import local_name

LOOK_S: Final = 0.25
STUCK_S: Final = 60.0
"""Nothing has come for so long: whoever asked need not wait any more."""


def follow(client: AdminClient, model: str) -> None:
    """Says what each instance of ``model`` has of its layers and who runs the others, until every one has all (on the
    error stream: a line when that changes, a bar on a terminal)."""
    said: dict[tuple[str, ...], str] = {}
    changed_s = time.monotonic()
    with output.progress(f"layers of {model}") as report:
        while growing := _growing(client, model):
            for devices, remote in growing.items():
                if said.get(devices) != (text := line(devices, remote)):
                    said[devices], changed_s = text, time.monotonic()
                    click.echo(text, err=True)
            report(*(sum(remote[key] for remote in growing.values()) for key in ("held_layers", "layers")))
            if time.monotonic() - changed_s > STUCK_S:
                click.echo(f"no layer has come for {STUCK_S:.0f} s; it goes on, see `prism ps`", err=True)
                return
            time.sleep(LOOK_S)
    for devices in said:
        click.echo(f"{_names(devices)}: has all layers", err=True)


def line(devices: tuple[str, ...], remote: dict[str, Any]) -> str:
    """``host:1: serves with 1 of 4 layers, over host:0``."""
    over = f"over {_names(remote['peers'])}" if remote["peers"] else "waits for the others"
    return f"{_names(devices)}: serves with {remote['held_layers']} of {remote['layers']} layers, {over}"


def _growing(client: AdminClient, model: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Instances without all their layers, by devices."""
    replicas = client.get(model_path(model)).get("replicas", ())
    lacking = [(tuple(r["devices"]), r.get("remote")) for r in replicas]
    return {devices: remote for devices, remote in lacking if remote and remote["held_layers"] < remote["layers"]}


def _names(devices: Any) -> str:
    return ",".join(map(local_name, devices))
