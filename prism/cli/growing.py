"""Instances that serve before their weights are there, live."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from prism.cli import output
from prism.cli.client import AdminClient, model_path
from prism.cli.ps import beside

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
            for devices, (serves, remote) in growing.items():
                if said.get(devices) != (text := line(devices, remote, serves)):
                    said[devices], changed_s = text, time.monotonic()
                    click.echo(text, err=True)
            report(*(sum(remote[key] for _, remote in growing.values()) for key in ("held_layers", "layers")))
            if time.monotonic() - changed_s > STUCK_S:
                click.echo(f"no layer has come for {STUCK_S:.0f} s; it goes on, see `prism ps`", err=True)
                return
            time.sleep(LOOK_S)
    for devices in said:
        click.echo(f"{_names(devices)}: has all layers", err=True)


def line(devices: tuple[str, ...], remote: dict[str, Any], serves: bool = True) -> str:
    """``host:1: serves with 1 of 4 layers, over host:0``; ``b/host:0: has 2 of 4 layers, runs them for c/host:0``."""
    words = [f"{'serves with' if serves else 'has'} {remote['held_layers']} of {remote['layers']} layers"]
    if remote["peers"]:
        words.append(f"over {beside(devices[0], remote['peers'])}")
    elif serves:
        words.append("waits for the others")
    if leaders := remote.get("leaders"):
        words.append(f"runs them for {beside(devices[0], leaders)}")
    return f"{_names(devices)}: {', '.join(words)}"


def _growing(client: AdminClient, model: str) -> dict[tuple[str, ...], tuple[bool, dict[str, Any]]]:
    """Instances without all their layers, by devices: whether they serve, and what they have."""
    replicas = client.get(model_path(model)).get("replicas", ())
    lacking = [(tuple(r["devices"]), r["state"] == "ready", r.get("remote")) for r in replicas]
    return {
        devices: (serves, remote)
        for devices, serves, remote in lacking
        if remote and remote["held_layers"] < remote["layers"]
    }


def _names(devices: Any) -> str:
    """Those of other machines than the server's with these."""
    return beside("local/", devices)
