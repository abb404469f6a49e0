"""``prism drain``"""

from __future__ import annotations

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options


@click.command()
@click.argument("devices", nargs=-1, required=True)
@click.option("--off", is_flag=True, help="Use the devices again.")
@click.option("--carry", is_flag=True, help="Move running requests elsewhere at once, instead of letting them finish.")
@output.json_option
@server_options
def command(client: AdminClient, devices: tuple[str, ...], off: bool, carry: bool, as_json: bool) -> None:
    """Empty DEVICES: their models move elsewhere and nothing new is placed there. No request is lost."""
    listed = ", ".join(devices)
    if off:
        reply = client.post("undrain", devices=list(devices))
    else:
        with output.progress(f"draining {listed}"):
            reply = client.post("drain", devices=list(devices), carry=carry)
    if as_json:
        output.print_json(reply)
    else:
        click.echo(f"{listed}: {'in use again' if off else 'draining'}")
