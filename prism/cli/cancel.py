"""``prism cancel``"""

from __future__ import annotations

from urllib.parse import quote

import click

from prism.cli import output
from prism.cli.client import AdminClient, server_options


@click.command()
@click.argument("request_id")
@output.json_option
@server_options
def command(client: AdminClient, request_id: str, as_json: bool) -> None:
    """Cancel the request with this x-request-id, wherever it is."""
    reply = client.post(f"requests/{quote(request_id, safe='')}/cancel")
    if as_json:
        output.print_json(reply)
    else:
        click.echo(f"{request_id} is cancelled")
