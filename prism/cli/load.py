"""``prism load``"""

from __future__ import annotations

import time

import click

from prism.cli import output
from prism.cli.arriving import watched
from prism.cli.client import AdminClient, model_path, server_options
from prism.cli.errors import CliError
from prism.cli.growing import follow


@click.command()
@click.argument("model")
@click.option("--device", "devices", multiple=True, help="Where (once per tensor-parallel rank).  [default: best]")
@click.option("--to", "instances", type=click.IntRange(1, 1000), help="So many of it, each on devices of its own.")
@output.json_option
@server_options
def command(client: AdminClient, model: str, devices: tuple[str, ...], instances: int | None, as_json: bool) -> None:
    """Load MODEL now and wait until it is ready.

    With --to its weights are sent once to all machines that lack them, from those that have them in memory. Instances
    that serve before theirs are there are shown until they have all their layers.
    """
    if instances is not None and devices:
        raise click.UsageError("--to and --device exclude each other")
    began_s = time.monotonic()
    with watched(client, model):
        wanted = {"devices": list(devices)} if instances is None else {"instances": instances}
        reply = client.post(model_path(model, "load"), **wanted)
    if as_json:
        output.print_json(reply)
        return
    detail = reply.get("detail") or {}
    for send in detail.get("sends") or ():
        click.echo(f"weights: {output.reason(send['reason'])}")
    if instances is not None and "instances" in detail:
        took = output.seconds(time.monotonic() - began_s)
        click.echo(f"{model} is on {detail['instances']} of {instances} after {took}")
        for failure in detail["failed"]:
            click.echo(f"  not loaded: {failure}", err=True)
        follow(client, model)
        if detail["instances"] < instances:
            what = "see `prism logs`" if detail["failed"] else "no device has room for more of it as things are"
            raise CliError(f"{what}; `prism mem` shows who holds what, `prism unload MODEL` makes room")
        return
    if detail.get("was_ready"):
        click.echo(f"{model} was ready already")
        return
    phases = ", ".join(f"{name} {output.seconds(took_s)}" for name, took_s in (reply.get("phases") or {}).items())
    click.echo(
        f"{model} is ready after {output.seconds(time.monotonic() - began_s)}" + (f" ({phases})" if phases else "")
    )
