"""``prism unload``"""

from __future__ import annotations

import click

from prism.cli import output
from prism.cli.client import AdminClient, model_path, server_options


@click.command()
@click.argument("model")
@click.option("--device", "devices", multiple=True, help="From this device only.  [default: everywhere]")
@click.option("--carry", is_flag=True, help="Move running requests elsewhere at once, instead of letting them finish.")
@output.json_option
@server_options
def command(client: AdminClient, model: str, devices: tuple[str, ...], carry: bool, as_json: bool) -> None:
    """Let MODEL leave its devices. No request is lost: running ones finish first, or are carried over. A LoRA adapter
    leaves engines that run no requests of it; its base stays."""
    with output.progress(f"unloading {model}"):
        reply = client.post(model_path(model, "unload"), devices=list(devices), carry=carry)
    if as_json:
        output.print_json(reply)
    else:
        base = (reply.get("detail") or {}).get("base")
        where = f"engines of {base} that run no requests of it" if base else ", ".join(devices) or "all devices"
        click.echo(f"{model} has left {where}")
