"""``prism pin``"""

from __future__ import annotations

import click

from prism.cli import output
from prism.cli.client import AdminClient, model_path, server_options


@click.command()
@click.argument("model")
@click.option("--off", is_flag=True, help="Stop keeping it loaded.")
@output.json_option
@server_options
def command(client: AdminClient, model: str, off: bool, as_json: bool) -> None:
    """Keep MODEL loaded: it is never evicted, and loaded if it is not. Lasts until --off or a restart of the server."""
    reply = client.post(model_path(model, "unpin" if off else "pin"))
    if as_json:
        output.print_json(reply)
    else:
        click.echo(f"{model} is {'no longer pinned' if off else 'pinned'}")
